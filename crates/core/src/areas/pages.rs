//! Which page's bytes are in which slot, or part of a slot, and their checksums.
//!
//! The tables have a plane for each part that a slot can have. A slot has one word in each plane. A slot that
//! holds one unpacked page uses the first plane. So an area without packs touches a quarter of the memory.
//! The words of neighbouring slots always stand side by side.
//!
//! Except for the pool, an area's tables are the largest memory that the engine needs. A run spreads over
//! three times the slots that it uses, and so touches more of the tables. Each page of a table is a page less
//! for the program. So a part has 12 bytes, not 16.

use crate::units::{PARTS_MAX, PageIndex, Part};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Words in each of the two tables of an area with `slots` slots.
pub const fn words(slots: u32) -> usize {
    slots as usize * PARTS_MAX
}

/// Bits that are kept of a checksum. With 60 bits, wrong bytes pass for the right ones once in 10^18 times,
/// 16 times as often as with all 64 bits.
const SUM_BITS: u32 = 60;
const SUM_MASK: u64 = (1 << SUM_BITS) - 1;

/// Pages that have the same number above their checksum. The owner's word stays below 2^32, and its value 0
/// means no page.
const BELOW: u64 = u32::MAX as u64;

/// Both tables of one area: 12 bytes for each part.
pub(super) struct Pages<'m> {
    slots: usize,
    /// Whether any slot has ever had more than one page. If not, the other planes aren't read and take no
    /// memory.
    has_parts: AtomicBool,
    /// The page's index modulo [`BELOW`], plus 1. 0 where there is no page.
    owners: &'m [AtomicU32],
    /// The page's index divided by [`BELOW`], above the checksum.
    checksums: &'m [AtomicU64],
}

impl<'m> Pages<'m> {
    pub(super) fn new(slots: u32, owners: &'m [AtomicU32], checksums: &'m [AtomicU64]) -> Pages<'m> {
        assert!(owners.len() >= words(slots) && checksums.len() >= words(slots));
        Pages { slots: slots as usize, has_parts: AtomicBool::new(false), owners, checksums }
    }

    fn at(&self, slot: u32, part: Part) -> usize {
        part.place() * self.slots + slot as usize
    }

    /// Records the page whose bytes are in a part of a slot, and their checksum.
    pub(super) fn own(&self, slot: u32, part: Part, page: PageIndex, checksum: u64) {
        if part.place() > 0 && !self.has_parts.load(Ordering::Relaxed) {
            self.has_parts.store(true, Ordering::Relaxed);
        }
        let (above, below) = (page.0 / BELOW, page.0 % BELOW);
        debug_assert!(above <= u64::MAX >> SUM_BITS);
        let at = self.at(slot, part);
        // A reader that sees one word of the old page and one of the new gets a third page. The page table
        // then shows that the third page isn't in this slot.
        self.checksums[at].store(above << SUM_BITS | checksum & SUM_MASK, Ordering::Relaxed);
        self.owners[at].store(below as u32 + 1, Ordering::Relaxed);
    }

    /// Gives a part's bytes to another page.
    pub(super) fn rename(&self, slot: u32, part: Part, page: PageIndex) {
        self.own(slot, part, page, self.checksums[self.at(slot, part)].load(Ordering::Relaxed));
    }

    pub(super) fn disown(&self, slot: u32, part: Part) {
        self.owners[self.at(slot, part)].store(0, Ordering::Relaxed);
    }

    pub(super) fn owner(&self, slot: u32, part: Part) -> Option<PageIndex> {
        let at = self.at(slot, part);
        let below = u64::from(self.owners[at].load(Ordering::Relaxed)).checked_sub(1)?;
        let above = self.checksums[at].load(Ordering::Relaxed) >> SUM_BITS;
        Some(PageIndex(above * BELOW + below))
    }

    /// Returns the pages in a slot: one page if the slot isn't shared.
    pub(super) fn owners(&self, slot: u32) -> impl Iterator<Item = PageIndex> + '_ {
        let planes = if self.has_parts.load(Ordering::Relaxed) { PARTS_MAX } else { 1 };
        (0..planes).filter_map(move |at| self.owner(slot, Part::nth(at)))
    }

    /// Whether `checksum` may be that of the bytes in a part of a slot.
    pub(super) fn has_checksum(&self, slot: u32, part: Part, checksum: u64) -> bool {
        (self.checksums[self.at(slot, part)].load(Ordering::Relaxed) ^ checksum) & SUM_MASK == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::table;
    use super::*;

    /// Tests the first and the last page of each number above a checksum, and the last page that a process
    /// can have.
    #[test]
    fn every_page_keeps_its_number_beside_any_checksum() {
        let pages = Pages::new(4, table(words(4)), table(words(4)));
        let part = Part::nth(PARTS_MAX - 1);
        let edges = (0..=8).flat_map(|above| [above * BELOW, above * BELOW + BELOW - 1]);
        for page in edges.chain([u64::from(u32::MAX) + 1, (1 << 35) - 1]).map(PageIndex) {
            for checksum in [0, 1, SUM_MASK, u64::MAX] {
                pages.own(3, part, page, checksum);
                assert_eq!((pages.owner(3, part), pages.owners(3).count()), (Some(page), 1));
                assert!(pages.has_checksum(3, part, checksum));
                assert!(!pages.has_checksum(3, part, checksum ^ 1 << (SUM_BITS - 1)));
                pages.rename(3, part, PageIndex(7 * BELOW));
                assert_eq!(pages.owner(3, part), Some(PageIndex(7 * BELOW)));
                assert!(pages.has_checksum(3, part, checksum), "the bytes are the same");
                pages.disown(3, part);
                assert_eq!((pages.owner(3, part), pages.owners(3).next()), (None, None));
            }
        }
    }
}
