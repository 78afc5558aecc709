//! Readahead in the order of the device: the aligned block of slots around the fault's slot. Linux does so
//! for rotating disks, and once did so for every device. The state is global: all processes of a run share
//! it.

use super::window;
use crate::config::PAGE_CLUSTER_MAX;
use core::sync::atomic::{AtomicU32, Ordering};

/// Hits that the state begins with. The count is stored minus this, so that zeroed memory is a fresh value.
const HITS_AT_FIRST: u32 = 4;

/// The state that the kernel keeps in three global words. All-zero bytes are a fresh value.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SlotWords {
    hits_less_first: AtomicU32,
    before: AtomicU32,
    window: AtomicU32,
}

/// Slots to read, by offset in their area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotWindow {
    /// The first slot.
    pub first: u32,
    /// The number of slots, the fault's own included.
    pub count: u32,
}

impl SlotWords {
    /// Returns a fresh state.
    pub const fn new() -> SlotWords {
        SlotWords { hits_less_first: AtomicU32::new(0), before: AtomicU32::new(0), window: AtomicU32::new(0) }
    }

    /// Records that a page that was read ahead was found in the cache.
    pub fn hit(&self) {
        self.hits_less_first.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a fault on the page in slot `offset` of an area that has `slots` slots, the header's slot 0
    /// included. Returns the window.
    pub fn missed(&self, offset: u32, slots: u32, cluster: u32) -> SlotWindow {
        let most = 1 << cluster.min(PAGE_CLUSTER_MAX);
        if most == 1 {
            return SlotWindow { first: offset, count: 1 };
        }
        // The three words don't change together, as in Linux. A race makes one window odd, no more.
        let none = 0_u32.wrapping_sub(HITS_AT_FIRST);
        let hits = self.hits_less_first.swap(none, Ordering::Relaxed).wrapping_add(HITS_AT_FIRST);
        let before = self.before.load(Ordering::Relaxed);
        let distance = u64::from(offset.abs_diff(before));
        let pages = window::pages(hits.min(1 << 16), distance, most, self.window.load(Ordering::Relaxed));
        if hits == 0 {
            self.before.store(offset, Ordering::Relaxed);
        }
        self.window.store(pages, Ordering::Relaxed);
        // A window that has just been halved need not be a power of two.
        let pages = pages.next_power_of_two();
        let first = (offset & !(pages - 1)).max(1);
        let last = (offset | (pages - 1)).min(slots - 1);
        SlotWindow { first, count: last + 1 - first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn first_fault_reads_its_aligned_block() {
        assert_eq!(SlotWords::new().missed(21, 100, 3), SlotWindow { first: 16, count: 8 });
    }

    #[test]
    fn position_is_remembered_only_without_hits() {
        let words = SlotWords::new();
        words.missed(21, 100, 3);
        assert_eq!(words.before.load(Ordering::Relaxed), 0, "there were hits");
        assert_eq!(words.missed(60, 100, 3).count, 4, "no hits: half of the last window");
        assert_eq!(words.before.load(Ordering::Relaxed), 60);
        assert_eq!(words.missed(90, 100, 3).count, 2);
        assert_eq!(words.missed(40, 100, 3).count, 1);
        assert_eq!(words.missed(41, 100, 3), SlotWindow { first: 40, count: 2 }, "a neighbour");
    }

    proptest! {
        /// Invariant 11: neither slot 0 nor the area's end is crossed.
        #[test]
        fn window_has_the_fault_and_stays_in_the_area(
            faults in prop::collection::vec((1_u32..300, 0_u32..40), 1..60), slots in 2_u32..300, cluster in 0_u32..6,
        ) {
            let words = SlotWords::new();
            for (offset, hits) in faults {
                (0..hits).for_each(|_| words.hit());
                if offset >= slots { continue; }
                let SlotWindow { first, count } = words.missed(offset, slots, cluster);
                prop_assert!(first >= 1 && first <= offset && offset < first + count);
                prop_assert!(first + count <= slots && count <= 32);
            }
        }
    }
}
