//! Whose bytes are in which slot, or part of a slot, and their checksums.
//!
//! The tables have a plane for each part that a slot can have, in each of which a slot has a word; a slot that one page has
//! for itself uses the first. So what isn't packed touches a quarter of the memory, and the words of neighbouring slots stand
//! side by side in any case. An area's tables are the most that the engine needs beside the pool (a run spreads over three
//! times the slots that it uses), and each page of them is a page less for the program: so a part has 12 bytes, not 16.

use crate::units::{PARTS_MAX, PageIndex, Part};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Words that each of the two tables of an area with so many slots has.
pub const fn words(slots: u32) -> usize {
    slots as usize * PARTS_MAX
}

/// Bits that are kept of a checksum: 16 times as many pages would be taken for one another by chance as with all of them,
/// which is one in 10^18.
const SUM_BITS: u32 = 60;
const SUM_MASK: u64 = (1 << SUM_BITS) - 1;

/// Pages that have one number above their checksum; 0 is no page.
const BELOW: u64 = u32::MAX as u64;

/// Both tables of one area: 12 bytes for each part.
pub(super) struct Pages<'m> {
    slots: usize,
    /// Whether any slot has ever had more than one page: else the other planes aren't looked at, and take no memory.
    has_parts: AtomicBool,
    /// 1 + what is left of the page's index by [`BELOW`], 0 where there is no page.
    owners: &'m [AtomicU32],
    /// How often [`BELOW`] fits into the page's index, above the checksum.
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

    /// Whose bytes are there now, and their checksum.
    pub(super) fn own(&self, slot: u32, part: Part, page: PageIndex, checksum: u64) {
        if part.place() > 0 && !self.has_parts.load(Ordering::Relaxed) {
            self.has_parts.store(true, Ordering::Relaxed);
        }
        let (above, below) = (page.0 / BELOW, page.0 % BELOW);
        debug_assert!(above <= u64::MAX >> SUM_BITS);
        let at = self.at(slot, part);
        // Who reads one word of the old page and one of the new has some third page, which the table says isn't there.
        self.checksums[at].store(above << SUM_BITS | checksum & SUM_MASK, Ordering::Relaxed);
        self.owners[at].store(below as u32 + 1, Ordering::Relaxed);
    }

    /// The same bytes are another page's.
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

    /// The pages in a slot, which is one if it isn't shared.
    pub(super) fn owners(&self, slot: u32) -> impl Iterator<Item = PageIndex> + '_ {
        let planes = if self.has_parts.load(Ordering::Relaxed) { PARTS_MAX } else { 1 };
        (0..planes).filter_map(move |at| self.owner(slot, Part::nth(at)))
    }

    /// Whether this may be the checksum of the bytes that are there.
    pub(super) fn has_checksum(&self, slot: u32, part: Part, checksum: u64) -> bool {
        (self.checksums[self.at(slot, part)].load(Ordering::Relaxed) ^ checksum) & SUM_MASK == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::table;
    use super::*;

    /// The first and the last page of each number above a checksum, and the last that a process can have.
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
