//! Extents against a list of the block of every slot. The list is made as Linux makes it: sector by sector,
//! with a page wherever eight adjacent sectors form one.

use crate::{Input, Memory};
use farpage_core::areas::extents::{Builder, Extent, Extents, Mapped, whole_pages};
use farpage_core::units::PAGE_BYTES;

const PAGE: u64 = PAGE_BYTES as u64;
const SECTOR: u64 = 512;
const SECTORS_PER_PAGE: usize = (PAGE / SECTOR) as usize;

/// Draws a file's pieces, as a file system may report them: any length, any place, perhaps a hole.
fn any_pieces(input: &mut Input) -> (Vec<Mapped>, bool) {
    let (mut offset, mut place, mut has_hole) = (0, 0, false);
    let mut pieces = Vec::new();
    while !input.is_over() && pieces.len() < 200 {
        let how = input.byte();
        let sectors = if how & 8 == 0 { 8 * (1 + input.below(8)) } else { 1 + input.below(40) };
        match how & 7 {
            // The piece follows the last one on the device.
            0..3 => {}
            3..6 => place = input.below(1 << 16) as u64 * PAGE,
            6 => place = input.below(1 << 16) as u64 * SECTOR,
            _ if how == 0xff => {
                has_hole = true;
                offset += SECTOR * (1 + input.below(20) as u64);
            }
            _ => {}
        }
        let bytes = sectors as u64 * SECTOR;
        pieces.push(Mapped { offset, place, bytes });
        (offset, place) = (offset + bytes, place + bytes);
    }
    (pieces, has_hole)
}

/// Returns the block of each slot.
fn blocks_of(pieces: &[Mapped], bytes: u64) -> Vec<u64> {
    let sectors = pieces.iter().flat_map(|piece| (piece.place..piece.place + piece.bytes).step_by(512));
    let sectors: Vec<u64> = sectors.take((bytes / SECTOR) as usize).collect();
    let (mut blocks, mut at) = (Vec::new(), 0);
    while at + SECTORS_PER_PAGE <= sectors.len() {
        let page = &sectors[at..at + SECTORS_PER_PAGE];
        let lies_together = page.windows(2).all(|pair| pair[1] == pair[0] + SECTOR);
        if page[0].is_multiple_of(PAGE) && lies_together {
            blocks.push(page[0] / PAGE);
            at += SECTORS_PER_PAGE;
        } else {
            at += 1;
        }
    }
    blocks
}

/// Builds extents, looks every slot up, and iterates.
pub fn run(input: &mut Input) {
    let cut = input.below(64) as u64 * SECTOR;
    let slots_max = if input.byte() < 128 { u32::MAX } else { u32::from(input.byte()) };
    let (pieces, has_hole) = any_pieces(input);
    let bytes = pieces.last().map_or(0, |last| last.offset + last.bytes).saturating_sub(cut);
    let mut extents = Vec::new();
    let found = whole_pages(&pieces, bytes, slots_max, |extent| extents.push(extent));
    if has_hole {
        let told: u32 = extents.iter().map(|extent: &Extent| extent.count).sum();
        assert!(found.is_err() || found == Ok(told));
        return;
    }
    let mut blocks = blocks_of(&pieces, bytes);
    blocks.truncate(slots_max as usize);
    assert_eq!(found, Ok(blocks.len() as u32));
    let told = extents.iter().flat_map(|extent| extent.block..extent.block + u64::from(extent.count));
    assert!(told.eq(blocks.iter().copied()), "the pieces of the file tell other blocks");
    if !blocks.is_empty() {
        looks_up_like(&extents, &blocks, input.byte());
    }
}

fn looks_up_like(told: &[Extent], blocks: &[u64], device: u8) {
    let mut memory = Memory::new(Extents::bytes(told.len() as u32));
    let mut builder = Builder::new(&mut memory.region(), told.len() as u32);
    let begun = told.iter().filter(|extent| builder.add(**extent)).count();
    let extents = builder.finish(u64::from(device));
    extents.check();
    let breaks = blocks.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
    assert_eq!((begun, extents.tally().extents() as usize), (breaks + 1, breaks + 1));
    assert_eq!(extents.tally().slots() as usize, blocks.len());
    for (slot, block) in blocks.iter().enumerate() {
        assert_eq!(extents.block(slot as u32), *block);
        let run = extents.run_from(slot as u32);
        let together = 1 + blocks[slot..].windows(2).take_while(|pair| pair[1] == pair[0] + 1).count();
        let expected = Extent { slot: slot as u32, count: together as u32, block: *block };
        assert_eq!(run, expected);
    }
    let pages = |extent: Extent| extent.block..extent.block + u64::from(extent.count);
    assert!(extents.iter().flat_map(pages).eq(blocks.iter().copied()));
    assert!(extents.without_header().flat_map(pages).eq(blocks[1..].iter().copied()));
    assert!(extents.begins_at(u64::from(device), blocks[0]));
    let (from, count) = (blocks.len() / 3, blocks.len() / 2);
    let within = extents.within(from as u32, count as u32).flat_map(pages);
    assert!(within.eq(blocks[from..from + count].iter().copied()));
}
