//! Leases: which process of the run holds which cluster of an area.
//!
//! There is one word for each cluster, in memory that all processes of a run share. A process takes a cluster
//! by writing its number over 0. From then on it allocates slots in the cluster without asking any other
//! process. A process that finds a holder dead may take the holder's clusters back for all.

use crate::sync::atomic::{AtomicU32, Ordering};

/// This process's view of an area's clusters.
pub struct Leases<'m> {
    holders: &'m [AtomicU32],
    me: u32,
    /// Cluster where the next search begins. The clusters before it were taken at the last search.
    hint: AtomicU32,
    /// Calls of `take_unless_futile` that give up at once, because the last search found nothing.
    skip: AtomicU32,
}

/// Calls of `take_unless_futile` that give up after a search that found nothing. A search looks at all
/// clusters, and no process is told when another process gives a cluster back.
const SKIPS: u32 = 64;

impl<'m> Leases<'m> {
    /// Creates the view of the process with number `me`. `me` isn't 0, is the same for all areas, and belongs
    /// to no other living process. A number is used again when its process is dead. So the clusters of that
    /// number's last process are freed.
    pub fn new(holders: &'m [AtomicU32], me: u32) -> Leases<'m> {
        assert!(me != 0);
        let leases = Leases { holders, me, hint: AtomicU32::new(0), skip: AtomicU32::new(0) };
        leases.free_all_of(me);
        leases
    }

    /// Number of clusters in the area.
    pub const fn clusters(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Number of clusters that any process holds.
    pub fn leased(&self) -> u32 {
        self.holders.iter().filter(|holder| holder.load(Ordering::Relaxed) != 0).count() as u32
    }

    /// Leases the first free cluster below `limit`, and returns its number.
    pub fn take(&self, limit: u32) -> Option<u32> {
        let clusters = self.clusters().min(limit);
        let hint = self.hint.load(Ordering::Relaxed).min(clusters);
        let taken = (hint..clusters).chain(0..hint).find(|&cluster| {
            let holder = &self.holders[cluster as usize];
            // Ordering: AcqRel. Acquire: everything that the last holder did to the cluster's slots comes
            // before our use. Release: a process that sees our number also sees what we did before.
            holder.load(Ordering::Relaxed) == 0
                && holder.compare_exchange(0, self.me, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        match taken {
            Some(cluster) => self.hint.store(cluster + 1, Ordering::Relaxed),
            None => self.skip.store(SKIPS, Ordering::Relaxed),
        }
        taken
    }

    /// Leases a cluster like `take`, for a caller that has an alternative. After a search that found nothing,
    /// the next 64 calls don't search, unless this process has given a cluster back meanwhile.
    pub fn take_unless_futile(&self, limit: u32) -> Option<u32> {
        match self.skip.load(Ordering::Relaxed).checked_sub(1) {
            Some(skip) => {
                self.skip.store(skip, Ordering::Relaxed);
                None
            }
            None => self.take(limit),
        }
    }

    /// Gives an empty cluster back.
    pub fn give_back(&self, cluster: u32) {
        // Ordering: Release. This process's use of the slots comes before that of any other process.
        let holder = &self.holders[cluster as usize];
        let given = holder.compare_exchange(self.me, 0, Ordering::Release, Ordering::Relaxed);
        assert!(given.is_ok(), "cluster {cluster} was not ours to give back");
        self.hint.fetch_min(cluster, Ordering::Relaxed);
        self.skip.store(0, Ordering::Relaxed);
    }

    /// Whether this process holds the cluster.
    pub fn holds(&self, cluster: u32) -> bool {
        self.holders[cluster as usize].load(Ordering::Relaxed) == self.me
    }

    /// Returns the holder with the next higher number than `above`, this process excepted.
    pub fn next_holder(&self, above: u32) -> Option<u32> {
        let numbers = self.holders.iter().map(|holder| holder.load(Ordering::Relaxed));
        numbers.filter(|number| *number > above && *number != self.me).min()
    }

    /// Gives up every cluster of this process, whatever its slots hold.
    pub fn give_up_all(&self) {
        self.free_all_of(self.me);
    }

    /// Frees every cluster of a dead holder whose number isn't used again meanwhile. Returns how many.
    pub fn reap(&self, dead: u32) -> u32 {
        let freed = self.free_all_of(dead);
        if freed > 0 {
            self.hint.store(0, Ordering::Relaxed);
            self.skip.store(0, Ordering::Relaxed);
        }
        freed
    }

    /// Writes 0 over every word with this number. Returns how many there were.
    fn free_all_of(&self, number: u32) -> u32 {
        // Ordering: as in `take`. If a word changed meanwhile, another process has reaped the cluster, and
        // may have taken it.
        let is_freed = |holder: &&AtomicU32| {
            holder.compare_exchange(number, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        self.holders.iter().filter(is_freed).count() as u32
    }
}

#[cfg(all(test, not(loom)))]
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
        assert_eq!((a.next_holder(0), a.next_holder(2)), (Some(2), None));
        assert_eq!(a.reap(2), 2);
        assert!(a.holds(2) && !b.holds(1));
        assert_eq!(a.take(9), Some(0));
    }

    #[test]
    fn what_the_last_process_of_a_number_held_is_free() {
        let holders: Vec<AtomicU32> = [1, 2, 1].map(AtomicU32::new).into();
        let again = Leases::new(&holders, 1);
        assert!(!again.holds(0) && !again.holds(2));
        assert_eq!((again.take(9), again.take(9), again.take(9)), (Some(0), Some(2), None));
    }

    #[test]
    fn futile_looks_are_left_out_until_a_cluster_comes_back() {
        let holders = [AtomicU32::new(0), AtomicU32::new(0)];
        let (a, b) = (Leases::new(&holders, 1), Leases::new(&holders, 2));
        assert_eq!((a.take_unless_futile(9), b.take(9), a.take_unless_futile(9)), (Some(0), Some(1), None));
        b.give_back(1);
        assert!((0..SKIPS).all(|_| a.take_unless_futile(9).is_none()), "another's gift is seen late");
        assert_eq!((a.take_unless_futile(9), a.take_unless_futile(9)), (Some(1), None));
        a.give_back(0);
        assert_eq!(a.take_unless_futile(9), Some(0), "our own is seen at once");
    }

    /// The word was cleared before the check. Another process's cluster was free, and its slots were lost.
    #[test]
    fn giving_back_what_another_holds_is_a_bug_that_harms_nobody_else() {
        let holders = [AtomicU32::new(7)];
        let given = std::panic::catch_unwind(|| Leases::new(&holders, 1).give_back(0));
        assert!(given.is_err());
        assert_eq!(holders[0].load(Ordering::Relaxed), 7);
    }
}

#[cfg(all(test, loom))]
mod loomed {
    //! Tests leases in every order in which processes can meet: `make loom`.

    use super::*;
    use loom::cell::Cell;
    use loom::thread;

    /// A lease protects its cluster. Here the cluster is a cell, in which loom allows no race.
    #[test]
    fn loom_a_cluster_has_one_holder_and_the_next_one_sees_what_he_did() {
        loom::model(|| {
            struct Shared([AtomicU32; 1], Cell<u32>);
            // SAFETY: the cell is used only under a lease. If that isn't enough, loom panics.
            unsafe impl Sync for Shared {}
            let shared: &'static Shared = Box::leak(Box::new(Shared([AtomicU32::new(0)], Cell::new(0))));
            let use_it = move |me: u32| {
                let leases = Leases::new(&shared.0, me);
                let Some(cluster) = leases.take(1) else { return 0 };
                shared.1.set(shared.1.get() + 1);
                leases.give_back(cluster);
                1
            };
            let other = thread::spawn(move || use_it(2));
            let uses = use_it(1) + other.join().unwrap();
            assert!(uses > 0);
            let last = Leases::new(&shared.0, 3);
            assert_eq!(last.take(1), Some(0));
            assert_eq!(shared.1.get(), uses);
        });
    }
}
