//! Slots that the children of forks may read.
//!
//! A fork's child finds its evicted pages in the slots where its parent had put them. The slots are the
//! parent's. The parent goes on, frees the slots, and would use them again. So at a fork every slot that has
//! a page's only copy is *bequeathed*. A bequeathed slot has one more reference (`slots/counts.rs`) until the
//! child is known to be gone. Children whose end is noticed together belong to one *generation*. One bit for
//! each slot and generation says whether the slot is kept. A child never frees what it inherits.
//!
//! A slot that the parent frees after a fork no longer has an owner, so the next fork doesn't bequeath it.
//! The slot becomes free with the generation that it was kept for, however many forks follow.

use super::Areas;
use crate::units::{AreaId, CLUSTER_SLOTS, PageIndex, SlotIndex};
use core::sync::atomic::Ordering;

/// Generations that can exist at once. Further children share a generation, which lasts as long as its last
/// child.
pub const GENERATIONS: usize = 32;

/// Words that an area of `slots` slots needs: one bit for each slot and generation.
pub const fn words(slots: u32) -> usize {
    GENERATIONS * words_of_one(slots)
}

const fn words_of_one(slots: u32) -> usize {
    slots.div_ceil(u64::BITS) as usize
}

/// Returns the numbers of the words that a cluster has in each generation. The last cluster may have fewer.
const fn words_of_cluster(cluster: u32) -> core::ops::Range<usize> {
    const WORDS: usize = (CLUSTER_SLOTS / u64::BITS) as usize;
    cluster as usize * WORDS..(cluster as usize + 1) * WORDS
}

impl Areas<'_> {
    /// Keeps for a generation of children every slot with a page for which `is_needed` is true. Slots that
    /// the generation has already stay kept. No thread may take or free slots meanwhile.
    pub fn bequeath(&self, generation: usize, is_needed: impl Fn(SlotIndex, PageIndex) -> bool) {
        for id in (0..self.count()).map(|id| AreaId(id as u8)) {
            let leases = self.area(id).slots.leases();
            for cluster in (0..leases.clusters()).filter(|cluster| leases.holds(*cluster)) {
                let first = cluster * CLUSTER_SLOTS;
                for offset in first..(first + CLUSTER_SLOTS).min(self.slots(id)) {
                    let slot = SlotIndex::new(id, offset);
                    if self.owners(slot).any(|page| is_needed(slot, page)) {
                        self.bequeath_one(generation, slot);
                    }
                }
            }
        }
    }

    fn bequeath_one(&self, generation: usize, slot: SlotIndex) {
        let (word, bit) = self.heirs_of(generation, slot);
        // Ordering: Relaxed. A generation is ended only before this function or after the fork. The thread
        // that clears a bit gives the reference back.
        if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.share(slot).expect("a count of a few more needs no continuation");
        }
    }

    fn heirs_of(&self, generation: usize, slot: SlotIndex) -> (&core::sync::atomic::AtomicU64, u64) {
        let area = self.area(slot.area());
        let at = generation * words_of_one(area.total) + (slot.offset() / u64::BITS) as usize;
        (&area.heirs[at], 1 << (slot.offset() % u64::BITS))
    }

    /// Ends a generation that has no child any more. Returns how many slots were kept for it. Must be called
    /// under the shared map lock.
    pub fn disinherit(&self, generation: usize) -> u64 {
        let mut kept = 0;
        for id in (0..self.count()).map(|id| AreaId(id as u8)) {
            let area = self.area(id);
            let words = words_of_one(area.total);
            let leases = area.slots.leases();
            // A kept slot is in use, so its cluster is this process's. Most clusters of a large area aren't.
            let held = (0..leases.clusters()).filter(|cluster| leases.holds(*cluster));
            for at in held.flat_map(words_of_cluster).take_while(|at| *at < words) {
                let word = &area.heirs[generation * words + at];
                // Most words were never written. A swap would give them memory.
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = word.swap(0, Ordering::Relaxed);
                kept += u64::from(bits.count_ones());
                while bits != 0 {
                    let offset = at as u32 * u64::BITS + bits.trailing_zeros();
                    self.give_back(SlotIndex::new(id, offset));
                    bits &= bits - 1;
                }
            }
        }
        kept
    }

    /// Number of slots in use that only a generation keeps.
    pub fn kept_for_heirs(&self) -> usize {
        let slots = (0..self.count()).map(|id| AreaId(id as u8));
        slots
            .flat_map(|id| (0..self.slots(id)).map(move |offset| SlotIndex::new(id, offset)))
            .filter(|slot| !self.is_owned(*slot))
            .filter(|slot| self.heirs(*slot) > 0)
            .count()
    }

    /// Number of generations for which a slot is kept.
    pub fn heirs(&self, slot: SlotIndex) -> usize {
        (0..GENERATIONS).filter(|generation| self.is_kept_for(*generation, slot)).count()
    }

    fn is_kept_for(&self, generation: usize, slot: SlotIndex) -> bool {
        let (word, bit) = self.heirs_of(generation, slot);
        word.load(Ordering::Relaxed) & bit != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::{areas, take};
    use super::*;
    use crate::config::AreaOrder;
    use crate::units::SlotPart;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// References to a slot: whether its owner has it, and the generations.
    #[derive(Default)]
    struct Model(BTreeMap<SlotIndex, (bool, BTreeSet<usize>)>);

    impl Model {
        fn owned(&self) -> Vec<SlotIndex> {
            self.0.iter().filter(|(_, (owned, _))| *owned).map(|(slot, _)| *slot).collect()
        }

        fn forget_unused(&mut self) {
            self.0.retain(|_, (owned, generations)| *owned || !generations.is_empty());
        }
    }

    proptest! {
        /// In any sequence of forks, frees and ends, a slot is in use exactly as long as the model says. A
        /// slot in use is never handed out.
        #[test]
        fn slots_stay_as_long_as_anybody_may_read_them(
            steps in prop::collection::vec((0_u8..8, 0_usize..GENERATIONS, any::<u16>()), 1..120),
        ) {
            let areas = areas(2, AreaOrder::Global);
            let mut model = Model::default();
            for (what, generation, dice) in steps {
                match what {
                    0..4 => if let Some(run) = take(&areas, u32::from(dice % 7) + 1) {
                        for slot in (0..run.count).map(|at| run.first.plus(at)) {
                            prop_assert!(model.0.insert(slot, (true, BTreeSet::new())).is_none(), "{slot:?} is in use");
                            areas.own(SlotPart::whole(slot), PageIndex(u64::from(dice)), 1);
                        }
                    },
                    4 | 5 => if let Some(slot) = model.owned().get(usize::from(dice) % model.0.len().max(1)) {
                        areas.free(SlotPart::whole(*slot));
                        model.0.get_mut(slot).unwrap().0 = false;
                    },
                    6 => {
                        areas.bequeath(generation, |_, page| page.0 % 5 != 0);
                        let of_page = |slot: &SlotIndex| areas.owners(*slot).any(|page| page.0 % 5 != 0);
                        let kept = model.0.iter_mut().filter(|(slot, of)| of.0 && of_page(slot));
                        kept.for_each(|(_, of)| _ = of.1.insert(generation));
                    }
                    _ => {
                        let kept = model.0.values_mut().filter_map(|of| of.1.remove(&generation).then_some(()));
                        prop_assert_eq!(areas.disinherit(generation), kept.count() as u64);
                    }
                }
                model.forget_unused();
                prop_assert_eq!(areas.in_use(), model.0.len() as u64);
                prop_assert_eq!(areas.kept_for_heirs(), model.0.values().filter(|of| !of.0).count());
                for (slot, (owned, _)) in &model.0 {
                    prop_assert_eq!(areas.is_owned(*slot), *owned);
                }
                areas.check(|_| ());
            }
        }
    }
}
