//! Whose bytes are in which slot, or part of a slot, and their checksums.
//!
//! The tables have a plane for each part that a slot can have, in each of which a slot has a word; a slot that one page has
//! for itself uses the first. So what isn't packed touches a quarter of the memory, and the words of neighbouring slots stand
//! side by side in any case.

use crate::units::{PARTS_MAX, PageIndex, Part};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words that each of the two tables of an area with so many slots has.
pub const fn words(slots: u32) -> usize {
    slots as usize * PARTS_MAX
}

/// Both tables of one area.
pub(super) struct Pages<'m> {
    slots: usize,
    /// Whether any slot has ever had more than one page: else the other planes aren't looked at, and take no memory.
    has_parts: AtomicBool,
    /// 1 + page, 0 where there is none.
    owners: &'m [AtomicU64],
    checksums: &'m [AtomicU64],
}

impl<'m> Pages<'m> {
    pub(super) fn new(slots: u32, owners: &'m [AtomicU64], checksums: &'m [AtomicU64]) -> Pages<'m> {
        assert!(owners.len() >= words(slots) && checksums.len() >= words(slots));
        Pages { slots: slots as usize, has_parts: AtomicBool::new(false), owners, checksums }
    }

    fn at(&self, slot: u32, part: Part) -> usize {
        part.place() * self.slots + slot as usize
    }

    pub(super) fn set_owner(&self, slot: u32, part: Part, page: Option<PageIndex>) {
        let word = page.map_or(0, |page| page.0 + 1);
        if part.place() > 0 && !self.has_parts.load(Ordering::Relaxed) {
            self.has_parts.store(true, Ordering::Relaxed);
        }
        self.owners[self.at(slot, part)].store(word, Ordering::Relaxed);
    }

    pub(super) fn owner(&self, slot: u32, part: Part) -> Option<PageIndex> {
        let word = self.owners[self.at(slot, part)].load(Ordering::Relaxed);
        word.checked_sub(1).map(PageIndex)
    }

    /// The pages in a slot, which is one if it isn't shared.
    pub(super) fn owners(&self, slot: u32) -> impl Iterator<Item = PageIndex> + '_ {
        let planes = if self.has_parts.load(Ordering::Relaxed) { PARTS_MAX } else { 1 };
        (0..planes).filter_map(move |at| self.owner(slot, Part::nth(at)))
    }

    pub(super) fn set_checksum(&self, slot: u32, part: Part, checksum: u64) {
        self.checksums[self.at(slot, part)].store(checksum, Ordering::Relaxed);
    }

    pub(super) fn checksum(&self, slot: u32, part: Part) -> u64 {
        self.checksums[self.at(slot, part)].load(Ordering::Relaxed)
    }
}
