//! Slots of one area: which are free, in clusters of 512.
//!
//! Pages that go out together should lie together, so that they are written in one request and later read
//! in one. A run is therefore taken from the cluster we are filling, front to back; when it has no room, from
//! a cluster that is at least half free; then from a new lease; and only then from whatever hole there is.
//! Clusters are in one list each, by how much of them is free, so no search is longer than one cluster.

use super::leases::Leases;
use crate::memory::Zeroed;
use crate::units::CLUSTER_SLOTS;

const WORDS: usize = CLUSTER_SLOTS as usize / 64;

/// One cluster: a bit for each used slot, and its place in a list.
#[repr(C)]
pub struct Cluster {
    used: [u64; WORDS],
    previous: u32,
    next: u32,
    free: u16,
    in_use: u16,
    /// Index of the list it is in plus one; 0: in none.
    list: u8,
}

// SAFETY: integers.
unsafe impl Zeroed for Cluster {}

/// The lists, by how much of a cluster is free.
#[derive(Clone, Copy, PartialEq, Eq)]
enum List {
    /// Nothing in use.
    Empty = 0,
    /// At least half free.
    Roomy = 1,
    /// Some slots free.
    Tight = 2,
    /// None free.
    Full = 3,
}

/// Free and used slots of the clusters that this process has leased.
pub struct Slots<'m> {
    clusters: &'m mut [Cluster],
    /// First cluster of each list, plus one; links are stored like that too, so zero ends a list.
    heads: [u32; 4],
    /// The cluster being filled, and where in it to look next.
    current: Option<(u32, u32)>,
    in_use: u32,
    leased: u32,
    /// Clusters in the list of empty ones.
    empty: u32,
    /// Slots of the area; those at and beyond it in the last cluster don't exist.
    total: u32,
}

/// Empty clusters to keep leased for the next run; the rest goes back to the other processes.
const EMPTY_KEPT: u32 = 2;

impl<'m> Slots<'m> {
    /// Nothing leased yet, in an area of `total` slots.
    pub fn new(clusters: &'m mut [Cluster], total: u32) -> Slots<'m> {
        assert!(clusters.len() >= total.div_ceil(CLUSTER_SLOTS) as usize);
        Slots { clusters, heads: [0; 4], current: None, in_use: 0, leased: 0, empty: 0, total }
    }

    /// Slots in use by this process.
    pub const fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Takes up to `max` neighbouring slots. `bad` names slots of a new cluster that can't be used.
    pub fn take(&mut self, max: u32, leases: &Leases<'_>, bad: &[u32]) -> Option<(u32, u32)> {
        loop {
            if let Some((cluster, from)) = self.current {
                if let Some((at, length)) = self.clusters[cluster as usize].find(from, max) {
                    self.current = Some((cluster, at + length));
                    self.mark(cluster, at, length);
                    return Some((cluster * CLUSTER_SLOTS + at, length));
                }
                self.current = None;
                self.relist(cluster);
            }
            let head = |list: List| self.heads[list as usize].checked_sub(1);
            let next = match head(List::Roomy).or(head(List::Empty)) {
                Some(cluster) => cluster,
                None => match self.lease(leases, bad) {
                    Some(cluster) => cluster,
                    None => self.heads[List::Tight as usize].checked_sub(1)?,
                },
            };
            self.unlist(next);
            self.current = Some((next, 0));
        }
    }

    /// Frees a slot. A cluster that becomes empty is given back to the others, unless it is one of few.
    pub fn free(&mut self, slot: u32, leases: &Leases<'_>) {
        let (cluster, at) = (slot / CLUSTER_SLOTS, slot % CLUSTER_SLOTS);
        let entry = &mut self.clusters[cluster as usize];
        let bit = 1 << (at % 64);
        assert!(entry.used[at as usize / 64] & bit != 0, "slot {slot} was freed twice");
        entry.used[at as usize / 64] &= !bit;
        entry.free += 1;
        entry.in_use -= 1;
        let is_empty = entry.in_use == 0;
        self.in_use -= 1;
        if self.current.is_some_and(|(current, _)| current == cluster) {
            return;
        }
        self.unlist(cluster);
        if is_empty && self.empty >= EMPTY_KEPT {
            self.leased -= 1;
            leases.give_back(cluster);
        } else {
            self.relist(cluster);
        }
    }

    /// Whether the slot is in use.
    pub fn is_used(&self, slot: u32) -> bool {
        let cluster = &self.clusters[(slot / CLUSTER_SLOTS) as usize];
        cluster.used[(slot % CLUSTER_SLOTS) as usize / 64] & 1 << (slot % 64) != 0
    }

    /// Usable slots of a cluster: it has no bad ones and lies inside the area.
    fn usable(&self, cluster: u32) -> u32 {
        (self.total - cluster * CLUSTER_SLOTS).min(CLUSTER_SLOTS)
    }

    fn lease(&mut self, leases: &Leases<'_>, bad: &[u32]) -> Option<u32> {
        let cluster = leases.take(self.total.div_ceil(CLUSTER_SLOTS))?;
        self.leased += 1;
        let usable = self.usable(cluster);
        let entry = &mut self.clusters[cluster as usize];
        *entry = Cluster { used: [0; WORDS], previous: 0, next: 0, free: 0, in_use: 0, list: 0 };
        let first = cluster * CLUSTER_SLOTS;
        // Slot 0 is the header's, in every area.
        let unusable = |at: u32| at >= usable || first + at == 0 || bad.contains(&(first + at));
        for at in 0..CLUSTER_SLOTS {
            if unusable(at) {
                entry.used[at as usize / 64] |= 1 << (at % 64);
            } else {
                entry.free += 1;
            }
        }
        self.relist(cluster);
        Some(cluster)
    }

    fn mark(&mut self, cluster: u32, at: u32, length: u32) {
        let entry = &mut self.clusters[cluster as usize];
        for slot in at..at + length {
            debug_assert!(entry.used[slot as usize / 64] & 1 << (slot % 64) == 0);
            entry.used[slot as usize / 64] |= 1 << (slot % 64);
        }
        entry.free -= length as u16;
        entry.in_use += length as u16;
        self.in_use += length;
    }

    fn relist(&mut self, cluster: u32) {
        let list = match &self.clusters[cluster as usize] {
            entry if entry.free == 0 => List::Full,
            entry if entry.in_use == 0 => List::Empty,
            entry if u32::from(entry.free) >= CLUSTER_SLOTS / 2 => List::Roomy,
            _ => List::Tight,
        };
        self.empty += u32::from(list == List::Empty);
        let head = self.heads[list as usize];
        let entry = &mut self.clusters[cluster as usize];
        debug_assert!(entry.list == 0);
        (entry.previous, entry.next, entry.list) = (0, head, list as u8 + 1);
        if head != 0 {
            self.clusters[head as usize - 1].previous = cluster + 1;
        }
        self.heads[list as usize] = cluster + 1;
    }

    fn unlist(&mut self, cluster: u32) {
        let Cluster { previous, next, list, .. } = self.clusters[cluster as usize];
        assert!(list != 0, "cluster {cluster} is in no list");
        match previous {
            0 => self.heads[list as usize - 1] = next,
            previous => self.clusters[previous as usize - 1].next = next,
        }
        if next != 0 {
            self.clusters[next as usize - 1].previous = previous;
        }
        self.empty -= u32::from(list == List::Empty as u8 + 1);
        self.clusters[cluster as usize].list = 0;
    }

    /// Asserts lists and counts; calls `used` for each used slot that exists.
    pub fn check(&self, leases: &Leases<'_>, bad: &[u32], mut used: impl FnMut(u32)) {
        let (mut in_use, mut listed) = (0, 0);
        for (cluster, entry) in self.clusters.iter().enumerate() {
            let is_current = self.current.is_some_and(|(current, _)| current as usize == cluster);
            if entry.list == 0 && !is_current {
                continue;
            }
            listed += 1;
            assert!(leases.holds(cluster as u32), "cluster {cluster} is used but not leased");
            let first = cluster as u32 * CLUSTER_SLOTS;
            let bits: u32 = entry.used.iter().map(|word| word.count_ones()).sum();
            assert_eq!(CLUSTER_SLOTS - bits, u32::from(entry.free), "free slots of cluster {cluster}");
            for slot in (first..(first + CLUSTER_SLOTS).min(self.total)).filter(|slot| self.is_used(*slot)) {
                if slot != 0 && !bad.contains(&slot) {
                    in_use += 1;
                    used(slot);
                }
            }
        }
        assert_eq!(in_use, self.in_use, "slots in use");
        assert_eq!(listed, self.leased, "leased clusters");
    }
}

impl Cluster {
    /// The first run of free slots at or after `from`, up to `max` long.
    fn find(&self, from: u32, max: u32) -> Option<(u32, u32)> {
        let is_free = |at: &u32| self.used[*at as usize / 64] & 1 << (at % 64) == 0;
        if self.free == 0 {
            return None;
        }
        let first = (from..CLUSTER_SLOTS).find(is_free)?;
        let length = (first..CLUSTER_SLOTS.min(first + max)).take_while(is_free).count();
        Some((first, length as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn clusters(count: usize) -> &'static mut [Cluster] {
        let zeroed = || Cluster { used: [0; WORDS], previous: 0, next: 0, free: 0, in_use: 0, list: 0 };
        (0..count).map(|_| zeroed()).collect::<Vec<_>>().leak()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Take(u32),
        Free(usize),
        FreeMany(usize),
    }

    proptest! {
        /// The model is a set of used slots. 5 clusters, the last one short, some slots bad.
        #[test]
        fn no_slot_is_handed_out_twice_and_all_are_found(
            ops in prop::collection::vec(prop_oneof![
                3 => (1_u32..65).prop_map(Op::Take),
                1 => any::<usize>().prop_map(Op::Free),
                1 => any::<usize>().prop_map(Op::FreeMany),
            ], 1..150)
        ) {
            const TOTAL: u32 = 4 * 512 + 100;
            let bad = [3, 700, 701];
            let holders: Vec<AtomicU32> = (0..5).map(|_| AtomicU32::new(0)).collect();
            let leases = Leases::new(&holders, 1);
            let mut slots = Slots::new(clusters(5), TOTAL);
            let mut used = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Take(max) => match slots.take(max, &leases, &bad) {
                        Some((first, length)) => for slot in first..first + length {
                            prop_assert!(slot > 0 && slot < TOTAL && !bad.contains(&slot));
                            prop_assert!(used.insert(slot), "slot {} was handed out twice", slot);
                        },
                        None => prop_assert_eq!(used.len() as u32, TOTAL - 1 - bad.len() as u32),
                    },
                    Op::Free(i) => if let Some(&slot) = used.iter().nth(i % used.len().max(1)) {
                        used.remove(&slot);
                        slots.free(slot, &leases);
                    },
                    Op::FreeMany(i) => for slot in used.iter().copied().skip(i % 7).step_by(2).collect::<Vec<_>>() {
                        used.remove(&slot);
                        slots.free(slot, &leases);
                    },
                }
                let mut seen = BTreeSet::new();
                slots.check(&leases, &bad, |slot| { seen.insert(slot); });
                prop_assert_eq!(&seen, &used);
                prop_assert_eq!(slots.in_use() as usize, used.len());
            }
        }
    }

    #[test]
    fn runs_are_contiguous_while_there_is_room() {
        let holders: Vec<AtomicU32> = (0..2).map(|_| AtomicU32::new(0)).collect();
        let leases = Leases::new(&holders, 1);
        let mut slots = Slots::new(clusters(2), 1024);
        assert_eq!(slots.take(64, &leases, &[]), Some((1, 64)));
        assert_eq!(slots.take(64, &leases, &[]), Some((65, 64)));
    }

    #[test]
    fn empty_clusters_go_back_to_the_others() {
        let holders: Vec<AtomicU32> = (0..8).map(|_| AtomicU32::new(0)).collect();
        let leases = Leases::new(&holders, 1);
        let mut slots = Slots::new(clusters(8), 8 * 512);
        let mut taken = Vec::new();
        while let Some((first, length)) = slots.take(64, &leases, &[]) {
            taken.extend(first..first + length);
        }
        taken.into_iter().for_each(|slot| slots.free(slot, &leases));
        let held = (0..8).filter(|&cluster| leases.holds(cluster)).count();
        assert!(held <= EMPTY_KEPT as usize + 1, "{held} clusters are still leased");
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn slot_freed_twice_is_a_bug() {
        let holders = [AtomicU32::new(0)];
        let leases = Leases::new(&holders, 1);
        let mut slots = Slots::new(clusters(1), 512);
        let (slot, _) = slots.take(1, &leases, &[]).unwrap();
        slots.free(slot, &leases);
        slots.free(slot, &leases);
    }
}
