//! Readahead by virtual address: one window for each region of the program's memory, around the fault. The
//! policy is Linux's since 4.14, to the bit. The state of a region is one packed word, which lives with
//! its range.
//!
//! ```text
//! bits 0..6  hits since the last window     bits 6..12  last window     bits 12..  page of the last fault
//! ```

use super::window;
use crate::config::PAGE_CLUSTER_MAX;
use crate::units::{PageIndex, PageRange};

const FIELD_MAX: u32 = 63;
const WINDOW_SHIFT: u32 = 6;
const PAGE_SHIFT: u32 = 12;
/// Hits that a new region begins with, so that its very first fault opens a window.
const HITS_AT_FIRST: u32 = 4;
/// Pages that one page-table page maps. A window doesn't leave them.
const PAGES_PER_TABLE: u64 = 512;

/// The state of one region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionWord(u64);

impl RegionWord {
    /// The state of a region that has had no fault yet.
    pub const NEW: RegionWord = RegionWord(0);

    const fn of(page: PageIndex, window: u32, hits: u32) -> RegionWord {
        let hits = if hits < FIELD_MAX { hits } else { FIELD_MAX };
        RegionWord(page.0 << PAGE_SHIFT | (window as u64) << WINDOW_SHIFT | hits as u64)
    }

    /// Returns the page of the last fault, the last window, and the hits since. A new word reads as one with
    /// [`HITS_AT_FIRST`] hits.
    const fn parts(self) -> (PageIndex, u32, u32) {
        let word = if self.0 == 0 { HITS_AT_FIRST as u64 } else { self.0 };
        let field = FIELD_MAX as u64;
        (PageIndex(word >> PAGE_SHIFT), (word >> WINDOW_SHIFT & field) as u32, (word & field) as u32)
    }

    /// Records that a page was found in the cache. `marked` says that it was read ahead. Returns the new
    /// word.
    #[must_use]
    pub const fn found(self, page: PageIndex, marked: bool) -> RegionWord {
        let (_, window, hits) = self.parts();
        RegionWord::of(page, window, hits + marked as u32)
    }

    /// Records a fault that the cache could not serve. Returns the new word, and the window, `page` included.
    pub fn missed(self, page: PageIndex, region: PageRange, cluster: u32) -> (RegionWord, PageRange) {
        let (before, window_before, hits) = self.parts();
        let most = 1 << cluster.min(PAGE_CLUSTER_MAX);
        let pages =
            if most == 1 { 1 } else { window::pages(hits, page.0.abs_diff(before.0), most, window_before) };
        let count = u64::from(pages);
        let left = if page.0 == before.0 + 1 {
            0
        } else if page.0 + 1 == before.0 {
            count - 1
        } else {
            (count - 1) / 2
        };
        // Near the start of the address space a window begins with page 0.
        let start = page.0.saturating_sub(left);
        let whole = PageRange::new(PageIndex(start), PageIndex(page.0 + count - left));
        let table = PageRange::of(PageIndex(page.0 / PAGES_PER_TABLE * PAGES_PER_TABLE), PAGES_PER_TABLE);
        (RegionWord::of(page, pages, 0), whole.intersection(region).intersection(table))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end))
    }

    #[test]
    fn first_fault_of_a_region_opens_eight_pages() {
        let (_, window) = RegionWord::NEW.missed(PageIndex(1000), range(900, 2000), 3);
        assert_eq!(window, range(997, 1005), "three before, the rest after");
    }

    #[test]
    fn window_lies_where_the_faults_go() {
        let region = range(512, 1024);
        let at = RegionWord::of(PageIndex(700), 8, 8);
        assert_eq!(at.missed(PageIndex(701), region, 3).1, range(701, 709));
        assert_eq!(at.missed(PageIndex(699), region, 3).1, range(692, 700));
        assert_eq!(at.missed(PageIndex(800), region, 3).1, range(797, 805));
    }

    #[test]
    fn no_cluster_no_readahead() {
        assert_eq!(RegionWord::NEW.missed(PageIndex(77), range(0, 100), 0).1, range(77, 78));
        let (_, window) = RegionWord::of(PageIndex(76), 0, 60).missed(PageIndex(77), range(0, 512), 9);
        assert_eq!(window.count(), 32, "never more than 32 pages");
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Miss(u64),
        Found(u64, bool),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0_u64..1600).prop_map(Event::Miss),
            (0_u64..1600, any::<bool>()).prop_map(|(page, marked)| Event::Found(page, marked)),
        ]
    }

    proptest! {
        /// Invariant 11: a window leaves neither its region nor the 2 MiB that one page-table page maps. The
        /// naive model keeps the three fields apart.
        #[test]
        fn window_never_leaves_region_or_table_and_word_is_what_its_fields_are(
            events in prop::collection::vec(event(), 1..80), cluster in 0_u32..6, start in 0_u64..900, length in 1_u64..1600,
        ) {
            let region = range(start, start + length);
            let mut word = RegionWord::NEW;
            let (mut hits, mut window_before, mut before) = (4_u32, 0_u32, 0_u64);
            for event in events {
                match event {
                    Event::Found(page, marked) => {
                        word = word.found(PageIndex(page), marked);
                        hits = (hits + u32::from(marked)).min(63);
                        before = page;
                    }
                    Event::Miss(page) => {
                        if !region.contains(PageIndex(page)) { continue; }
                        let (next, window) = word.missed(PageIndex(page), region, cluster);
                        word = next;
                        let pages =
                            if cluster == 0 { 1 } else { window::pages(hits, page.abs_diff(before), 1 << cluster, window_before) };
                        (hits, window_before, before) = (0, pages, page);
                        prop_assert!(window.contains(PageIndex(page)));
                        prop_assert!(window.count() <= 32 && window.count() <= u64::from(pages));
                        prop_assert!(window.start >= region.start && window.end <= region.end);
                        prop_assert_eq!(window.start.0 / 512, (window.end.0 - 1) / 512);
                    }
                }
                // A word of zeros reads as a new one, as in Linux.
                if word == RegionWord::NEW { hits = 4; }
                prop_assert_eq!(word.parts(), (PageIndex(before), window_before, hits));
            }
        }
    }
}
