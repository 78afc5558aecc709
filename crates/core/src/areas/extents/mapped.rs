//! Turns what a file system reports about a file into extents of whole pages.
//!
//! File systems with blocks smaller than a page may put a page's blocks anywhere. Only a page that lies in
//! one piece, at a page boundary of the device, can be a slot. The blocks between these pages are left out,
//! so the area may become smaller than the file. (Then a slot's number is no longer its place in the file.)

use super::Extent;
use crate::units::{PAGE_BYTES, SLOTS_PER_AREA_MAX};

const PAGE: u64 = PAGE_BYTES as u64;

/// Bytes of a file that lie side by side on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Offset in the file where the bytes begin.
    pub offset: u64,
    /// Offset on the device where the bytes begin.
    pub place: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The file has no blocks at this offset, so without the file system nothing can be written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The first byte without a block.
    pub offset: u64,
}

/// Calls `add` for each extent of a file of `bytes` bytes, in the order of their slots, until there are
/// `slots_max` slots. `mapped` must be sorted by offset, without overlaps. Returns the number of slots. Fails
/// at the first hole among the blocks that are needed.
pub fn whole_pages(
    mapped: &[Mapped],
    bytes: u64,
    slots_max: u32,
    mut add: impl FnMut(Extent),
) -> Result<u32, Hole> {
    let slots_max = slots_max.min(SLOTS_PER_AREA_MAX);
    // The rest at the file's end is less than a page, and may be anything.
    let end = bytes - bytes % PAGE;
    let (mut slot, mut expected) = (0, 0);
    let mut rest = mapped.iter().copied().peekable();
    while let Some(mut piece) = rest.next() {
        if slot == slots_max || expected >= end {
            return Ok(slot);
        }
        if piece.offset != expected {
            return Err(Hole { offset: expected });
        }
        // A file system may report one piece as several, divided anywhere.
        let follows = |next: &Mapped, piece: &Mapped| {
            next.offset == piece.offset + piece.bytes && next.place == piece.place + piece.bytes
        };
        while let Some(next) = rest.next_if(|next| follows(next, &piece)) {
            piece.bytes += next.bytes;
        }
        expected = piece.offset + piece.bytes;
        let within = piece.bytes.min(bytes - piece.offset.min(bytes));
        let (first, last) = (piece.place.div_ceil(PAGE), (piece.place + within) / PAGE);
        let count = last.saturating_sub(first).min(u64::from(slots_max - slot)) as u32;
        if count > 0 {
            add(Extent { slot, count, block: first });
            slot += count;
        }
    }
    if slot < slots_max && expected < end { Err(Hole { offset: expected }) } else { Ok(slot) }
}
