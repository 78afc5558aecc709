//! From what a file system says about a file to extents of whole pages.
//!
//! File systems with blocks smaller than a page may put a page's blocks anywhere. Only pages that lie in one
//! piece, at a page's boundary of the device, can be slots; the blocks between them are left out, so the area may
//! become smaller than the file. (Slot and place in the file are then no longer the same number.)

use super::Extent;
use crate::units::{PAGE_BYTES, SLOTS_PER_AREA_MAX};

const PAGE: u64 = PAGE_BYTES as u64;

/// Bytes of a file that lie side by side on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Where they begin in the file.
    pub offset: u64,
    /// Where they begin on the device.
    pub place: u64,
    /// How many.
    pub bytes: u64,
}

/// The file has no blocks at this offset, so nothing can be written there without the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The first byte without one.
    pub offset: u64,
}

/// Gives `add` the extents of a file of `bytes` bytes, in the order of their slots, until there are `slots_max`
/// slots. `mapped` is sorted by offset, without overlaps. Returns how many slots there are.
pub fn whole_pages(
    mapped: &[Mapped],
    bytes: u64,
    slots_max: u32,
    mut add: impl FnMut(Extent),
) -> Result<u32, Hole> {
    let slots_max = slots_max.min(SLOTS_PER_AREA_MAX);
    // What is left of the file at its end is less than a page, and may be anything.
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
        // A file system may tell one piece in several, divided anywhere.
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
