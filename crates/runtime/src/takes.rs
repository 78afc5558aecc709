//! Who takes pages out: the thread of the program that has just been served a fault, or the keeper. (`signal` mode; elsewhere
//! only engine threads do.)
//!
//! A page that is moved out must go from the translations of each CPU that runs a thread of the program, and ours are such
//! threads. So where the keeper takes pages while the program runs, every stretch of victims interrupts the program: 10 µs
//! there and 16 µs here, which is more than all else about it (a virtual machine, 2 CPUs, November 2026; `farpage bench
//! faults`). While the keeper sleeps, a thread that takes them itself interrupts nobody. Then it takes a few at a time, which
//! is cheap, and the keeper is woken now and then to find them a place, which is the work. Seldom: each
//! time that its CPU has gone to sleep it is interrupted twice more, until Linux has taken it off the list of those that may have
//! translations (6.18; seen in traces of interrupts). (One thread, random touches from
//! the pool: 1.1 times the touches, and with [`Lone::Cheap`](farpage_core::reclaim::recency::Lone) 1.25 times; Zipf's
//! distribution 1.2 times. `farpage load touch`, 256 MiB under 200M.)
//!
//! Where other threads of the program run at the same time there is nothing to be gained here, but see [`lull`](crate::lull).
//! It shows when several are served at once, and else in what a page costs, which is measured on both sides. Nor is there where
//! one fault of 16 and more waits for a device: a program that sleeps isn't interrupted, so the keeper takes pages meanwhile
//! (random touches from a disk, together with what [`budget`](crate::budget) says of its gap: 1.07 times, p99 94 µs instead of 118;
//! `farpage load touch`, 256 MiB under 128M with `--pool 1M`). Whatever these threads don't take in time, the keeper takes as ever
//! ([`Worker::reclaim_background`](crate::worker::Worker::reclaim_background)).

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Victims of one batch in a thread that was served.
pub const BATCH: usize = 16;
/// Quarters of a page's cost in the keeper that the page may cost such a thread.
const QUARTERS: u64 = 3;
/// Or this, which is less than an interrupt of another CPU alone, spread over a stretch of usual length. (Without any 0.4 to 0.7 µs,
/// with them 2.5 to 3; same machine.)
const CHEAP_NS: u64 = 1_500;
/// What it is taken to cost before it is known: so little that no single batch that lost its CPU decides.
const PRESUMED_NS: u64 = CHEAP_NS / 2;
/// Nanoseconds for which the keeper takes pages where a page costs such a thread more. Then it is tried again.
const KEEPERS_NS: u64 = 100_000_000;
/// Of so many faults one that waits for a device is many.
const A_WAIT: u32 = 16;
/// After so many others it is forgotten that there were many.
const WAITS_MAX: u32 = 4 * A_WAIT;

/// What both sides know.
pub struct Takes {
    /// Whoever sets it may take pages.
    is_taking: AtomicBool,
    keeper_sleeps: AtomicBool,
    /// Pages taken by threads of the program since the keeper was last woken for them.
    parked: AtomicU32,
    /// What a page costs a thread of the program, and the keeper.
    here: Cost,
    keeper: Cost,
    /// Until then it is the keeper's.
    keepers_until_ns: AtomicU64,
    /// Faults that waited for a device lately: [`A_WAIT`] more for each, one less for each other.
    waits: AtomicU32,
}

/// Nanoseconds for a page, on average; 0 while it isn't known.
#[derive(Default)]
struct Cost(AtomicU64);

impl Cost {
    fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, pages: usize, ns: u64) {
        if pages == 0 {
            return;
        }
        let (before, this) = (self.ns(), (ns / pages as u64).max(1));
        // Whoever loses its CPU meanwhile isn't slow.
        let after = if before == 0 { this } else { (7 * before + this.min(2 * before)).div_ceil(8) };
        self.0.store(after, Ordering::Relaxed);
    }

    /// As if it had been so much.
    fn presume(&self, ns: u64) {
        self.0.store(ns, Ordering::Relaxed);
    }
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// Pages that were to go: none where no frame is free, or there is nobody.
    pub victims: usize,
    /// Pages that went.
    pub pages: usize,
    /// What moving them took.
    pub ns: u64,
}

impl Default for Takes {
    fn default() -> Takes {
        Takes::new()
    }
}

impl Takes {
    /// Nobody has taken anything.
    pub fn new() -> Takes {
        Takes {
            is_taking: AtomicBool::new(false),
            keeper_sleeps: AtomicBool::new(false),
            parked: AtomicU32::new(0),
            here: Cost(AtomicU64::new(PRESUMED_NS)),
            keeper: Cost::default(),
            keepers_until_ns: AtomicU64::new(0),
            waits: AtomicU32::new(0),
        }
    }

    /// Whether threads of the program do it, as far as is known.
    pub fn are_here(&self, now_ns: u64) -> bool {
        now_ns >= self.keepers_until_ns.load(Ordering::Relaxed)
    }

    /// Several threads are served at once, so they run on several CPUs: for a while the keeper takes.
    pub fn several_are_served(&self, now_ns: u64) {
        self.are_the_keepers(now_ns, KEEPERS_NS);
    }

    /// A thread was served, and has waited so long for a device. Where many of its faults are of that kind the program sleeps for most
    /// of the time, and then the keeper interrupts nobody: it takes.
    pub fn was_served(&self, now_ns: u64, waited_ns: Option<u64>) {
        // What other threads count at the same time may be lost: it is an estimate.
        let waits = self.waits.load(Ordering::Relaxed);
        let after = match waited_ns {
            Some(_) => (waits + A_WAIT).min(WAITS_MAX),
            None => waits.saturating_sub(1),
        };
        // Each fault reads it: written only when it changes.
        if after != waits {
            self.waits.store(after, Ordering::Relaxed);
        }
        if let Some(waited_ns) = waited_ns.filter(|_| waits > 0) {
            self.are_the_keepers(now_ns, (2 * waited_ns).min(KEEPERS_NS));
        }
    }

    /// Faults are served by engine threads: for a while the keeper takes.
    pub fn are_elsewhere(&self, now_ns: u64) {
        self.are_the_keepers(now_ns, KEEPERS_NS);
    }

    fn are_the_keepers(&self, now_ns: u64, for_ns: u64) {
        // Each fault says so: written now and then.
        if self.keepers_until_ns.load(Ordering::Relaxed) < now_ns + for_ns / 2 {
            self.keepers_until_ns.store(now_ns + for_ns, Ordering::Relaxed);
        }
    }

    /// Whether the keeper sleeps, which it does for some milliseconds by itself. Whoever is told so has to wake it: nobody else is.
    pub fn claim_waking(&self) -> bool {
        self.keeper_sleeps.load(Ordering::Relaxed) && self.keeper_sleeps.swap(false, Ordering::Relaxed)
    }

    /// In a thread that was just served: has it `take` a few pages, if that is for such threads to do and nobody else does. True if
    /// the keeper is to be woken: `worth_waking` pages are parked since it last was.
    pub fn take_here(&self, now_ns: u64, worth_waking: u32, take: impl FnOnce() -> Took) -> bool {
        let may = self.keeper_sleeps.load(Ordering::Relaxed) && self.are_here(now_ns);
        // Ordering: Acquire pairs with the Release below: counts and costs are one thread's at a time.
        if !may || self.is_taking.swap(true, Ordering::Acquire) {
            return false;
        }
        let took = take();
        self.here.add(took.pages, took.ns);
        let (here_ns, keeper_ns) = (self.here.ns(), self.keeper.ns());
        let is_dear = here_ns > CHEAP_NS && keeper_ns > 0 && here_ns * 4 > keeper_ns * QUARTERS;
        // What can't be moved is for the keeper to look into.
        let is_keepers = took.pages == 0 && took.victims > 0 || is_dear;
        if is_keepers {
            self.keepers_until_ns.store(now_ns + KEEPERS_NS, Ordering::Relaxed);
            self.here.presume(PRESUMED_NS);
        }
        let parked = self.parked.load(Ordering::Relaxed) + took.pages as u32;
        let wakes = parked >= worth_waking || took.pages == 0 || is_keepers;
        self.parked.store(if wakes { 0 } else { parked }, Ordering::Relaxed);
        if wakes {
            // It will be a moment before it says so itself.
            self.keeper_sleeps.store(false, Ordering::Relaxed);
        }
        // Ordering: see above.
        self.is_taking.store(false, Ordering::Release);
        wakes
    }

    /// The keeper, or whoever evicts beside it, has taken a batch.
    pub fn taken_by_engine(&self, took: Took) {
        self.keeper.add(took.pages, took.ns);
    }

    /// The keeper is about to sleep, or awake.
    pub fn keeper_sleeps(&self, sleeps: bool) {
        self.keeper_sleeps.store(sleeps, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine's batches took 2,500 ns a page, and the keeper sleeps.
    fn takes() -> Takes {
        let takes = Takes::new();
        takes.taken_by_engine(Took { victims: 64, pages: 64, ns: 160_000 });
        takes.keeper_sleeps(true);
        takes
    }

    const WORTH: u32 = 4 * BATCH as u32;
    const CHEAP: Took = Took { victims: BATCH, pages: BATCH, ns: 8_000 };

    #[test]
    fn keeper_is_woken_for_a_batch_of_its_own_and_left_alone_until_it_sleeps_again() {
        let takes = takes();
        let woken: Vec<bool> = (0..6).map(|_| takes.take_here(0, WORTH, || CHEAP)).collect();
        assert_eq!(woken, [false, false, false, true, false, false]);
        assert!(!takes.take_here(0, WORTH, || panic!("the keeper is at work")));
        takes.keeper_sleeps(true);
        assert!(!takes.take_here(0, WORTH, || CHEAP), "one batch since");
    }

    /// It takes a few: the first one after a while often lost its CPU to what was done meanwhile, and made the keeper's of what
    /// was cheap.
    #[test]
    fn pages_that_cost_as_much_here_are_the_keepers_for_a_while() {
        let takes = takes();
        let dear = Took { victims: BATCH, pages: BATCH, ns: 40_000 };
        let batches = (1..)
            .find(|_| {
                takes.keeper_sleeps(true);
                takes.take_here(0, WORTH, || dear) && !takes.are_here(0)
            })
            .unwrap();
        assert!((4..12).contains(&batches), "{batches}");
        takes.keeper_sleeps(true);
        assert!(!takes.are_here(KEEPERS_NS - 1));
        assert!(!takes.take_here(KEEPERS_NS - 1, WORTH, || panic!("it is the keeper's")));
        assert!(!takes.take_here(KEEPERS_NS, WORTH, || CHEAP), "tried again, and cheap");
        assert!(takes.are_here(KEEPERS_NS));
    }

    /// Beside other programs the keeper is often on the CPU of the thread that faults, and interrupts nobody either.
    #[test]
    fn pages_that_are_cheap_on_both_sides_are_taken_here() {
        let takes = Takes::new();
        takes.taken_by_engine(Took { victims: 64, pages: 64, ns: 64 * 500 });
        takes.keeper_sleeps(true);
        assert!(!takes.take_here(0, WORTH, || CHEAP));
        assert!(takes.are_here(0));
    }

    #[test]
    fn where_nothing_can_be_taken_the_keeper_finds_out_why() {
        let takes = takes();
        assert!(takes.take_here(7, WORTH, || Took { victims: BATCH, pages: 0, ns: 0 }));
        assert!(!takes.are_here(7));
    }

    #[test]
    fn where_no_frame_is_free_the_keeper_is_woken_to_free_some() {
        let takes = takes();
        assert!(takes.take_here(0, WORTH, Took::default));
        assert!(takes.are_here(0));
    }

    #[test]
    fn threads_served_at_once_leave_it_to_the_keeper() {
        let takes = takes();
        takes.several_are_served(1);
        takes.several_are_served(2);
        assert!(!takes.are_here(KEEPERS_NS));
        assert!(takes.are_here(KEEPERS_NS + 1));
    }

    #[test]
    fn threads_that_wait_for_a_device_leave_it_to_the_keeper_for_as_long_again() {
        let takes = takes();
        takes.was_served(900, Some(50));
        assert!(takes.are_here(900));
        takes.was_served(1_000, Some(50));
        assert!(!takes.are_here(1_099));
        assert!(takes.are_here(1_100));
        takes.several_are_served(2_000);
        takes.was_served(3_000, Some(50));
        assert!(!takes.are_here(1_999 + KEEPERS_NS), "it makes no shorter what is longer");
        takes.was_served(0, Some(u64::MAX / 4));
        assert!(takes.are_here(2_000 + KEEPERS_NS));
    }

    #[test]
    fn a_few_faults_that_wait_for_a_device_change_nothing_among_many_others() {
        let takes = takes();
        let are_here = |others: u32| {
            (0..100).all(|_| {
                takes.was_served(1_000, Some(50));
                let are_here = takes.are_here(1_000);
                (0..others).for_each(|_| takes.was_served(1_000, None));
                are_here
            })
        };
        assert!(are_here(A_WAIT));
        assert!(!are_here(A_WAIT - 1));
    }

    #[test]
    fn one_thread_wakes_a_keeper_that_sleeps() {
        let takes = takes();
        assert!(takes.claim_waking());
        assert!(!takes.claim_waking());
        takes.keeper_sleeps(true);
        assert!(takes.claim_waking());
    }

    #[test]
    fn a_batch_that_lost_its_cpu_does_not_make_its_side_look_slow() {
        let cost = Cost::default();
        cost.add(16, 16_000);
        cost.add(16, 16_000_000);
        assert_eq!(cost.ns(), 1_125);
        cost.add(0, 5);
        assert_eq!(cost.ns(), 1_125);
    }
}
