//! Tests extents against the naive model: a list of the block of each slot.
// UNSAFETY: a region is made of raw memory.

use super::*;
use crate::config::AreaOrder;
use crate::units::{AreaId, CLUSTER_SLOTS, PAGE_BYTES};
use proptest::prelude::*;

/// Handed memory of a test, in 8-byte words so that it is aligned like tables are.
struct Memory(Vec<u64>);

impl Memory {
    fn for_extents(extents: u32) -> Memory {
        Memory(vec![0; Extents::bytes(extents).div_ceil(8)])
    }

    fn region(&mut self) -> Region<'_> {
        let bytes = self.0.len() * 8;
        // SAFETY: the memory is the vector's own, zeroed and writable. It is borrowed exclusively while the
        // region lives.
        unsafe { Region::new(self.0.as_mut_ptr().cast(), bytes) }
    }
}

/// The naive model: the block of each slot.
fn blocks(extents: &[Extent]) -> Vec<u64> {
    extents.iter().flat_map(|extent| (0..u64::from(extent.count)).map(|n| extent.block + n)).collect()
}

/// Returns the runs of slots that lie side by side, found by a walk along the list.
fn naive_runs(blocks: &[u64], slot: u32, count: u32) -> Vec<Extent> {
    let mut runs: Vec<Extent> = Vec::new();
    for slot in slot..slot + count {
        let block = blocks[slot as usize];
        match runs.last_mut() {
            Some(last) if last.block + u64::from(last.count) == block => last.count += 1,
            _ => runs.push(Extent { slot, count: 1, block }),
        }
    }
    runs
}

fn build<'m>(memory: &'m mut Memory, added: &[Extent]) -> Extents<'m> {
    let mut tally = Tally::default();
    added.iter().for_each(|extent| _ = tally.add(*extent));
    *memory = Memory::for_extents(tally.extents());
    let start = memory.0.as_mut_ptr();
    let mut builder = Builder::new(&mut memory.region(), tally.extents());
    let begun = added.iter().filter(|extent| builder.add(**extent)).count();
    assert_eq!(begun, tally.extents() as usize);
    let built = builder.finish(7);
    built.check();
    // The extents are read back as another process finds them.
    // SAFETY: the head is that of the extents built here, by a builder whose capacity is exactly the number
    // of extents. The memory is aligned to 8 bytes, and nobody writes there.
    unsafe { Extents::of_memory(built.head(), start.cast()) }
}

/// Generates extents one after the other. Each lies anywhere or right behind the one before.
fn files(pieces_max: usize) -> impl Strategy<Value = Vec<Extent>> {
    let lengths = prop_oneof![8 => Just(1u32), 4 => 2u32..6, 1 => 6u32..300];
    let piece = (lengths, prop_oneof![1 => Just(None), 3 => (0u64..1 << 44).prop_map(Some)]);
    proptest::collection::vec(piece, 1..pieces_max).prop_map(|pieces| {
        let (mut slot, mut next) = (0, 0);
        pieces
            .into_iter()
            .map(|(count, elsewhere)| {
                let extent = Extent { slot, count, block: elsewhere.unwrap_or(next) };
                (slot, next) = (slot + count, extent.block + u64::from(count));
                extent
            })
            .collect()
    })
}

/// Returns the same slots in pieces of at most `longest` slots.
fn cut(extents: &[Extent], longest: u32) -> Vec<Extent> {
    let mut pieces = Vec::new();
    for extent in extents {
        for from in (0..extent.count).step_by(longest as usize) {
            pieces.push(Extent {
                slot: extent.slot + from,
                count: longest.min(extent.count - from),
                block: extent.block + u64::from(from),
            });
        }
    }
    pieces
}

/// Compares everything that can be seen of the extents with the list.
fn compare(extents: &Extents<'_>, blocks: &[u64]) {
    extents.check();
    let slots = blocks.len() as u32;
    let all = naive_runs(blocks, 0, slots);
    assert_eq!((extents.tally().slots(), extents.tally().extents()), (slots, all.len() as u32));
    assert_eq!(extents.iter().collect::<Vec<_>>(), all);
    for slot in 0..slots {
        assert_eq!(extents.block(slot), blocks[slot as usize]);
        let run = extents.run_from(slot);
        let of = all.iter().find(|one| slot < one.slot + one.count).unwrap();
        assert_eq!((run.slot, run.slot + run.count), (slot, of.slot + of.count));
        assert_eq!(run.block, blocks[slot as usize]);
    }
    let without_header = naive_runs(blocks, 1, slots - 1);
    assert_eq!(extents.without_header().collect::<Vec<_>>(), without_header);
    let used = &blocks[1..];
    let span = used.iter().max().zip(used.iter().min()).map_or(0, |(high, low)| high - low + 1);
    assert_eq!(extents.tally().span(), span);
    assert!(extents.begins_at(7, blocks[0]) && !extents.begins_at(8, blocks[0]));
}

proptest! {
    /// Invariant 8: extents cover every slot exactly once. A lookup doesn't depend on how the extents were
    /// added.
    #[test]
    fn invariant_8_extents_cover_all_slots_and_do_not_depend_on_merging(
        file in files(700), longest in 1u32..9,
    ) {
        let blocks = blocks(&file);
        let (mut one, mut other) = (Memory(Vec::new()), Memory(Vec::new()));
        let whole = build(&mut one, &file);
        compare(&whole, &blocks);
        let in_pieces = build(&mut other, &cut(&file, longest));
        prop_assert!(whole.iter().eq(in_pieces.iter()));
        prop_assert!((0..blocks.len() as u32).all(|slot| whole.block(slot) == in_pieces.block(slot)));
    }

    #[test]
    fn part_of_an_area_is_its_extents_cut_to_it(file in files(60), from in any::<u32>(), count in any::<u32>()) {
        let blocks = blocks(&file);
        let slots = blocks.len() as u32;
        let from = from % (slots + 1);
        let count = count % (slots - from + 1);
        let mut memory = Memory(Vec::new());
        let extents = build(&mut memory, &file);
        let found: Vec<Extent> = extents.within(from, count).collect();
        prop_assert_eq!(found, naive_runs(&blocks, from, count));
    }
}

/// Every number of extents at which the shape of the index changes, with one slot in each extent.
#[test]
fn every_shape_of_the_index_finds_every_slot() {
    let edges = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 511, 512, 513, 527, 528, 529, 8191, 8192, 8193, 8209];
    for count in edges {
        let file: Vec<Extent> = (0..count)
            .map(|slot| Extent { slot, count: 1, block: 10 + 2 * u64::from(count - slot) })
            .collect();
        let mut memory = Memory(Vec::new());
        let extents = build(&mut memory, &file);
        extents.check();
        assert!((0..count).all(|slot| extents.block(slot) == 10 + 2 * u64::from(count - slot)));
    }
}

#[test]
fn largest_area_in_two_extents_is_found_to_its_last_slot() {
    let half = SLOTS_PER_AREA_MAX / 2;
    let far = u64::MAX >> 12;
    let file = [
        Extent { slot: 0, count: half, block: far - u64::from(half) },
        Extent { slot: half, count: half, block: 0 },
    ];
    let mut memory = Memory(Vec::new());
    let extents = build(&mut memory, &file);
    assert_eq!((extents.block(0), extents.block(half - 1)), (far - u64::from(half), far - 1));
    assert_eq!((extents.block(half), extents.block(SLOTS_PER_AREA_MAX - 1)), (0, u64::from(half) - 1));
}

#[test]
fn device_is_one_extent() {
    let mut memory = Memory::for_extents(1);
    let extents = Extents::of_device(&mut memory.region(), 7, 100);
    compare(&extents, &(0..100).collect::<Vec<_>>());
    assert_eq!(extents.tally().span(), 99);
}

#[test]
fn extent_costs_at_most_16_bytes() {
    for count in [1u32, 2, 3, 33, 2_000, 20_000, 84_656, SLOTS_PER_AREA_MAX] {
        let alignment = align_of::<u64>() + align_of::<u32>();
        let bytes = Extents::bytes(count) - alignment;
        assert!(bytes <= 16 * count as usize, "{count} extents take {bytes} bytes");
    }
}

#[test]
#[should_panic(expected = "without a gap")]
fn gap_between_extents_is_a_bug() {
    let mut tally = Tally::default();
    tally.add(Extent { slot: 0, count: 3, block: 0 });
    tally.add(Extent { slot: 4, count: 3, block: 4 });
}

#[test]
#[should_panic(expected = "beyond the area")]
fn slot_beyond_the_area_is_a_bug() {
    let mut memory = Memory::for_extents(1);
    Extents::of_device(&mut memory.region(), 7, 100).block(100);
}

#[test]
fn area_is_found_again_by_its_first_block() {
    let mut areas = crate::areas::tests::areas(2, AreaOrder::Weighted);
    let whole_from = |block| {
        let memory = Box::leak(Box::new(Memory(Vec::new())));
        build(memory, &[Extent { slot: 0, count: CLUSTER_SLOTS, block }])
    };
    areas.set_extents(AreaId(0), whole_from(500));
    assert_eq!((areas.at_block(7, 500), areas.at_block(7, 501)), (Some(AreaId(0)), None));
    areas.set_extents(AreaId(1), whole_from(0));
    assert_eq!((areas.at_block(7, 0), areas.at_block(8, 500)), (Some(AreaId(1)), None));
    assert_eq!(areas.extents(AreaId(0)).map(|extents| extents.block(9)), Some(509));
}

// ---- whole pages ---------------------------------------------------------------------------------------

const BLOCK: u64 = 1024;
const BLOCKS_PER_PAGE: u64 = PAGE_BYTES as u64 / BLOCK;

/// The naive model reads the file block by block. `places` holds the device's block for each block of the
/// file.
fn naive_pages(places: &[Option<u64>], slots_max: u32) -> Result<Vec<u64>, Hole> {
    let (per_page, mut at, mut pages) = (BLOCKS_PER_PAGE as usize, 0, Vec::new());
    let end = places.len() / per_page * per_page;
    while at + per_page <= places.len() && pages.len() < slots_max as usize {
        let run = &places[at..at + per_page];
        if let Some(hole) = run.iter().take(end - at.min(end)).position(Option::is_none) {
            return Err(Hole { offset: (at + hole) as u64 * BLOCK });
        }
        let first = run[0].unwrap_or(0);
        let in_one_piece = (0..).zip(run).all(|(n, place)| *place == Some(first + n));
        if first.is_multiple_of(BLOCKS_PER_PAGE) && in_one_piece {
            pages.push(first / BLOCKS_PER_PAGE);
            at += per_page;
        } else {
            at += 1;
        }
    }
    let unseen = if pages.len() < slots_max as usize { at..end.max(at) } else { 0..0 };
    match unseen.clone().find(|at| places[*at].is_none()) {
        Some(hole) => Err(Hole { offset: hole as u64 * BLOCK }),
        None => Ok(pages),
    }
}

/// Generates pieces of a file in blocks: length, whether it is a hole, and place. Without a place, a piece
/// follows the one before.
fn pieces() -> impl Strategy<Value = Vec<(u64, bool, Option<u64>)>> {
    let piece = (
        1u64..14,
        prop_oneof![30 => Just(false), 1 => Just(true)],
        prop_oneof![1 => Just(None), 2 => (0u64..1 << 20).prop_map(Some)],
    );
    proptest::collection::vec(piece, 0..20)
}

proptest! {
    #[test]
    fn whole_pages_are_those_that_a_walk_block_by_block_finds(
        pieces in pieces(), slots_max in prop_oneof![1u32..12, Just(1000u32)], odd_bytes in 0u64..1024,
    ) {
        let (mut mapped, mut places, mut next) = (Vec::new(), Vec::new(), 0);
        for (count, is_hole, elsewhere) in pieces {
            let first = elsewhere.unwrap_or(next);
            next = first + count;
            if !is_hole {
                let offset = places.len() as u64 * BLOCK;
                mapped.push(Mapped { offset, place: first * BLOCK, bytes: count * BLOCK });
            }
            places.extend((first..next).map(|place| (!is_hole).then_some(place)));
        }
        // The last block may be used only in part. Then the file has fewer bytes than its blocks.
        let bytes = (places.len() as u64 * BLOCK).saturating_sub(odd_bytes);
        places.truncate((bytes / BLOCK) as usize);
        let mut extents = Vec::new();
        let found = whole_pages(&mapped, bytes, slots_max, |extent| extents.push(extent));
        match naive_pages(&places, slots_max) {
            Ok(pages) => {
                prop_assert_eq!(found, Ok(pages.len() as u32));
                prop_assert_eq!(blocks(&extents), pages);
                let mut tally = Tally::default();
                extents.iter().for_each(|extent| _ = tally.add(*extent));
            }
            Err(hole) => prop_assert_eq!(found, Err(hole)),
        }
    }
}

#[test]
fn file_with_small_blocks_may_shrink() {
    // Seven blocks from an odd place: the first three don't fill a page.
    let mapped = [
        Mapped { offset: 0, place: 1024, bytes: 7 * 1024 },
        Mapped { offset: 7 * 1024, place: 1 << 20, bytes: 9 * 1024 },
    ];
    let mut extents = Vec::new();
    assert_eq!(whole_pages(&mapped, 16 * 1024, 100, |extent| extents.push(extent)), Ok(3));
    assert_eq!(extents, [Extent { slot: 0, count: 1, block: 1 }, Extent { slot: 1, count: 2, block: 256 }]);
}

#[test]
fn hole_behind_the_slots_that_are_needed_does_not_matter() {
    let mapped = [Mapped { offset: 0, place: 0, bytes: 8192 }];
    assert_eq!(whole_pages(&mapped, 1 << 20, 2, |_| {}), Ok(2));
    assert_eq!(whole_pages(&mapped, 1 << 20, 3, |_| {}), Err(Hole { offset: 8192 }));
    assert_eq!(whole_pages(&[], 4096, 1, |_| {}), Err(Hole { offset: 0 }));
}
