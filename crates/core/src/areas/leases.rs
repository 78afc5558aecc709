//! Leases: which process of the tree owns which cluster of an area.
//!
//! One word for each cluster, in memory that all processes of a run share. A process takes a cluster by
//! writing its number over 0 and from then on allocates slots in it without asking anybody. Whoever finds
//! that a holder is dead may take its clusters back for all.

use core::sync::atomic::{AtomicU32, Ordering};

/// This process's view of an area's clusters.
pub struct Leases<'m> {
    holders: &'m [AtomicU32],
    me: u32,
    /// Where to look next: clusters before it were taken when we last looked.
    hint: AtomicU32,
}

impl<'m> Leases<'m> {
    /// `me` is this process's number, not 0, the same for all areas and nobody else's.
    pub fn new(holders: &'m [AtomicU32], me: u32) -> Leases<'m> {
        assert!(me != 0);
        Leases { holders, me, hint: AtomicU32::new(0) }
    }

    /// Clusters of the area.
    pub const fn clusters(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Leases the first free cluster below `limit`.
    pub fn take(&self, limit: u32) -> Option<u32> {
        let clusters = self.clusters().min(limit);
        let hint = self.hint.load(Ordering::Relaxed).min(clusters);
        (hint..clusters).chain(0..hint).find(|&cluster| {
            // Ordering: AcqRel: what the last holder did to the cluster's slots is over, and others see ours.
            let taken = self.holders[cluster as usize]
                .compare_exchange(0, self.me, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
            if taken {
                self.hint.store(cluster + 1, Ordering::Relaxed);
            }
            taken
        })
    }

    /// Gives an empty cluster back.
    pub fn give_back(&self, cluster: u32) {
        // Ordering: Release: our use of its slots comes before anybody else's.
        let old = self.holders[cluster as usize].swap(0, Ordering::Release);
        assert_eq!(old, self.me, "cluster {cluster} was not ours to give back");
        self.hint.fetch_min(cluster, Ordering::Relaxed);
    }

    /// Whether we hold it.
    pub fn holds(&self, cluster: u32) -> bool {
        self.holders[cluster as usize].load(Ordering::Relaxed) == self.me
    }

    /// Frees every cluster of holders that `is_dead` names. Returns how many.
    pub fn reap(&self, mut is_dead: impl FnMut(u32) -> bool) -> u32 {
        let mut freed = 0;
        for holder in self.holders {
            let number = holder.load(Ordering::Relaxed);
            // Ordering: as in `take`. If it changed meanwhile, another process has reaped and taken it.
            if number != 0
                && number != self.me
                && is_dead(number)
                && holder.compare_exchange(number, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                freed += 1;
            }
        }
        if freed > 0 {
            self.hint.store(0, Ordering::Relaxed);
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_never_hold_the_same_cluster_and_the_dead_are_reaped() {
        let holders: Vec<AtomicU32> = (0..6).map(|_| AtomicU32::new(0)).collect();
        let (a, b) = (Leases::new(&holders, 1), Leases::new(&holders, 2));
        assert_eq!((a.take(9), b.take(9), a.take(9)), (Some(0), Some(1), Some(2)));
        a.give_back(0);
        assert_eq!(b.take(1), Some(0), "a hint never hides a free cluster");
        assert_eq!(b.take(2), None, "clusters beyond the limit are not taken");
        assert_eq!(a.reap(|holder| holder == 2), 2);
        assert!(a.holds(2) && !b.holds(1));
        assert_eq!(a.take(9), Some(0));
    }

    #[test]
    #[should_panic(expected = "not ours")]
    fn giving_back_what_another_holds_is_a_bug() {
        let holders = [AtomicU32::new(7)];
        Leases::new(&holders, 1).give_back(0);
    }
}
