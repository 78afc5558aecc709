//! The choice of the thread that takes pages out (`signal` mode): the keeper, or the thread of the program
//! that has just been served a fault. In other modes only engine threads take pages out.
//!
//! A page that leaves needs a TLB shootdown on each CPU that runs a thread of the process. Engine threads are
//! threads of the process, too. While the program runs, each stretch of victims that the keeper takes
//! therefore interrupts the program. On both CPUs, the interrupt costs more than all other work on a page.
//! While the keeper sleeps, a thread of the program that takes pages itself interrupts no CPU. Such a thread
//! takes a few pages at a time, which is cheap. The keeper is woken now and then to place these pages, which
//! is the larger part of the work. The wakes must be rare: each time the keeper's CPU has gone to sleep, the
//! CPU is interrupted twice more. Then Linux (seen on 6.18) takes it off the list of CPUs that may have
//! translations.
//!
//! Where other threads of the program run at the same time, taking pages in the served thread gains nothing;
//! [`lull`](crate::pressure::lull) is for that case. Several threads served at once show it, and so does the
//! cost of a page, which is measured on both sides. Nothing is gained either where one fault in 16, or more,
//! waits for a device. A program that sleeps isn't interrupted, so the keeper takes pages meanwhile. In any
//! case, the keeper takes all pages that the threads of the program don't take in time
//! ([`Worker::reclaim_background`](crate::worker::Worker::reclaim_background)).

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Victims of one batch in a thread that was served.
pub const BATCH: usize = 16;
/// Quarters of a page's cost in the keeper, up to which the served thread takes pages.
const QUARTERS: u64 = 3;
/// Nanoseconds for a page, up to which the served thread takes pages whatever the keeper's cost. An interrupt
/// of another CPU alone costs more, even spread over a stretch of usual length.
const CHEAP_NS: u64 = 1_500;
/// Nanoseconds that a page is presumed to cost the served thread before its cost is known. The value is so
/// low that no single batch that lost its CPU decides.
const PRESUMED_NS: u64 = CHEAP_NS / 2;
/// Nanoseconds for which the keeper takes pages, before the served thread is tried again.
const KEEPERS_NS: u64 = 100_000_000;
/// Weight of a fault that waits for a device: this many faults without a wait make up for one such fault.
const A_WAIT: u32 = 16;
/// Faults without a wait, after which earlier waits are forgotten.
const WAITS_MAX: u32 = 4 * A_WAIT;

/// State of the choice, shared by both sides.
pub struct Evictor {
    /// Lock: the thread that sets it may take pages.
    is_taking: AtomicBool,
    keeper_sleeps: AtomicBool,
    /// Pages taken by threads of the program since the keeper was last woken to place them.
    parked: AtomicU32,
    /// Cost of a page in a thread of the program.
    here: Cost,
    /// Cost of a page in the keeper.
    keeper: Cost,
    /// Until this time, the keeper takes pages.
    keepers_until_ns: AtomicU64,
    /// Measure of recent faults that waited for a device: [`A_WAIT`] is added for each, and one subtracted
    /// for each other fault.
    waits: AtomicU32,
}

/// Mean nanoseconds for a page; 0 while unknown.
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
        // A batch that lost its CPU meanwhile isn't slow, so its cost is capped.
        let after = if before == 0 { this } else { (7 * before + this.min(2 * before)).div_ceil(8) };
        self.0.store(after, Ordering::Relaxed);
    }

    /// Sets the cost to `ns`.
    fn presume(&self, ns: u64) {
        self.0.store(ns, Ordering::Relaxed);
    }
}

/// Result of taking a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct EvictionCost {
    /// Pages chosen as victims: 0 if no frame is free, or no page may go.
    pub victims: usize,
    /// Pages that were taken out.
    pub pages: usize,
    /// Nanoseconds that taking them out took.
    pub ns: u64,
}

impl Default for Evictor {
    fn default() -> Evictor {
        Evictor::new()
    }
}

impl Evictor {
    /// Returns the state before any thread has taken a page.
    pub fn new() -> Evictor {
        Evictor {
            is_taking: AtomicBool::new(false),
            keeper_sleeps: AtomicBool::new(false),
            parked: AtomicU32::new(0),
            here: Cost(AtomicU64::new(PRESUMED_NS)),
            keeper: Cost::default(),
            keepers_until_ns: AtomicU64::new(0),
            waits: AtomicU32::new(0),
        }
    }

    /// Returns whether threads of the program take pages out, as far as is known.
    pub fn is_inline(&self, now_ns: u64) -> bool {
        now_ns >= self.keepers_until_ns.load(Ordering::Relaxed)
    }

    /// Notes that several threads are served at once, and thus run on several CPUs. For a while the keeper
    /// takes pages.
    pub fn several_are_served(&self, now_ns: u64) {
        self.leave_to_the_keeper(now_ns, KEEPERS_NS);
    }

    /// Notes that a thread was served, and how long it waited for a device. Where many of its faults wait,
    /// the program sleeps most of the time. Then the keeper interrupts no CPU, so the keeper takes pages.
    pub fn was_served(&self, now_ns: u64, waited_ns: Option<u64>) {
        // Concurrent updates of other threads may be lost. The value is only an estimate.
        let waits = self.waits.load(Ordering::Relaxed);
        let after = match waited_ns {
            Some(_) => (waits + A_WAIT).min(WAITS_MAX),
            None => waits.saturating_sub(1),
        };
        // Each fault reads the word, so it is written only when it changes.
        if after != waits {
            self.waits.store(after, Ordering::Relaxed);
        }
        if let Some(waited_ns) = waited_ns.filter(|_| waits > 0) {
            self.leave_to_the_keeper(now_ns, (2 * waited_ns).min(KEEPERS_NS));
        }
    }

    /// Notes that engine threads serve the faults. For a while the keeper takes pages.
    pub fn engine_serves(&self, now_ns: u64) {
        self.leave_to_the_keeper(now_ns, KEEPERS_NS);
    }

    fn leave_to_the_keeper(&self, now_ns: u64, for_ns: u64) {
        // Each fault may come here, so the word is written only now and then.
        if self.keepers_until_ns.load(Ordering::Relaxed) < now_ns + for_ns / 2 {
            self.keepers_until_ns.store(now_ns + for_ns, Ordering::Relaxed);
        }
    }

    /// Returns whether the keeper sleeps. The keeper sleeps for some milliseconds by itself. A caller that
    /// gets true must wake the keeper, because no other caller gets true.
    pub fn claim_waking(&self) -> bool {
        self.keeper_sleeps.load(Ordering::Relaxed) && self.keeper_sleeps.swap(false, Ordering::Relaxed)
    }

    /// Calls `take` to take a few pages out, if the served threads take pages now and no other thread does so
    /// at this moment. Called in a thread that was just served. Returns whether the keeper is to be woken,
    /// for example because `worth_waking` pages were parked since it last was.
    pub fn evict_inline(&self, now_ns: u64, worth_waking: u32, take: impl FnOnce() -> EvictionCost) -> bool {
        let may = self.keeper_sleeps.load(Ordering::Relaxed) && self.is_inline(now_ns);
        // Ordering: Acquire pairs with the Release below. Counts and costs belong to one thread at a time.
        if !may || self.is_taking.swap(true, Ordering::Acquire) {
            return false;
        }
        let took = take();
        self.here.add(took.pages, took.ns);
        let (here_ns, keeper_ns) = (self.here.ns(), self.keeper.ns());
        let is_dear = here_ns > CHEAP_NS && keeper_ns > 0 && here_ns * 4 > keeper_ns * QUARTERS;
        // If no victim can be taken out, the keeper has to find out why.
        let is_keepers = took.pages == 0 && took.victims > 0 || is_dear;
        if is_keepers {
            self.keepers_until_ns.store(now_ns + KEEPERS_NS, Ordering::Relaxed);
            self.here.presume(PRESUMED_NS);
        }
        let parked = self.parked.load(Ordering::Relaxed) + took.pages as u32;
        let wakes = parked >= worth_waking || took.pages == 0 || is_keepers;
        self.parked.store(if wakes { 0 } else { parked }, Ordering::Relaxed);
        if wakes {
            // The keeper clears the flag itself only a moment later.
            self.keeper_sleeps.store(false, Ordering::Relaxed);
        }
        // Ordering: Release pairs with the Acquire above.
        self.is_taking.store(false, Ordering::Release);
        wakes
    }

    /// Notes a batch that the keeper, or a thread that evicts beside it, has taken.
    pub fn taken_by_engine(&self, took: EvictionCost) {
        self.keeper.add(took.pages, took.ns);
    }

    /// Notes that the keeper is about to sleep, or is awake.
    pub fn keeper_sleeps(&self, sleeps: bool) {
        self.keeper_sleeps.store(sleeps, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the state after the engine's batches took 2,500 ns a page, while the keeper sleeps.
    fn evictor() -> Evictor {
        let evictor = Evictor::new();
        evictor.taken_by_engine(EvictionCost { victims: 64, pages: 64, ns: 160_000 });
        evictor.keeper_sleeps(true);
        evictor
    }

    const WORTH: u32 = 4 * BATCH as u32;
    const CHEAP: EvictionCost = EvictionCost { victims: BATCH, pages: BATCH, ns: 8_000 };

    #[test]
    fn keeper_is_woken_for_a_batch_of_its_own_and_left_alone_until_it_sleeps_again() {
        let evictor = evictor();
        let woken: Vec<bool> = (0..6).map(|_| evictor.evict_inline(0, WORTH, || CHEAP)).collect();
        assert_eq!(woken, [false, false, false, true, false, false]);
        assert!(!evictor.evict_inline(0, WORTH, || panic!("the keeper is at work")));
        evictor.keeper_sleeps(true);
        assert!(!evictor.evict_inline(0, WORTH, || CHEAP), "one batch since");
    }

    /// One dear batch is not enough. The first batch after a while often lost its CPU to other work, and
    /// would give cheap pages to the keeper.
    #[test]
    fn pages_that_cost_as_much_here_are_the_keepers_for_a_while() {
        let evictor = evictor();
        let dear = EvictionCost { victims: BATCH, pages: BATCH, ns: 40_000 };
        let batches = (1..)
            .find(|_| {
                evictor.keeper_sleeps(true);
                evictor.evict_inline(0, WORTH, || dear) && !evictor.is_inline(0)
            })
            .unwrap();
        assert!((4..12).contains(&batches), "{batches}");
        evictor.keeper_sleeps(true);
        assert!(!evictor.is_inline(KEEPERS_NS - 1));
        assert!(!evictor.evict_inline(KEEPERS_NS - 1, WORTH, || panic!("it is the keeper's")));
        assert!(!evictor.evict_inline(KEEPERS_NS, WORTH, || CHEAP), "tried again, and cheap");
        assert!(evictor.is_inline(KEEPERS_NS));
    }

    /// Beside other programs, the keeper is often on the CPU of the thread that faults. Then the keeper
    /// interrupts no CPU either.
    #[test]
    fn pages_that_are_cheap_on_both_sides_are_taken_here() {
        let evictor = Evictor::new();
        evictor.taken_by_engine(EvictionCost { victims: 64, pages: 64, ns: 64 * 500 });
        evictor.keeper_sleeps(true);
        assert!(!evictor.evict_inline(0, WORTH, || CHEAP));
        assert!(evictor.is_inline(0));
    }

    #[test]
    fn where_nothing_can_be_taken_the_keeper_finds_out_why() {
        let evictor = evictor();
        assert!(evictor.evict_inline(7, WORTH, || EvictionCost { victims: BATCH, pages: 0, ns: 0 }));
        assert!(!evictor.is_inline(7));
    }

    #[test]
    fn where_no_frame_is_free_the_keeper_is_woken_to_free_some() {
        let evictor = evictor();
        assert!(evictor.evict_inline(0, WORTH, EvictionCost::default));
        assert!(evictor.is_inline(0));
    }

    #[test]
    fn threads_served_at_once_leave_it_to_the_keeper() {
        let evictor = evictor();
        evictor.several_are_served(1);
        evictor.several_are_served(2);
        assert!(!evictor.is_inline(KEEPERS_NS));
        assert!(evictor.is_inline(KEEPERS_NS + 1));
    }

    #[test]
    fn threads_that_wait_for_a_device_leave_it_to_the_keeper_for_as_long_again() {
        let evictor = evictor();
        evictor.was_served(900, Some(50));
        assert!(evictor.is_inline(900));
        evictor.was_served(1_000, Some(50));
        assert!(!evictor.is_inline(1_099));
        assert!(evictor.is_inline(1_100));
        evictor.several_are_served(2_000);
        evictor.was_served(3_000, Some(50));
        assert!(!evictor.is_inline(1_999 + KEEPERS_NS), "it makes no shorter what is longer");
        evictor.was_served(0, Some(u64::MAX / 4));
        assert!(evictor.is_inline(2_000 + KEEPERS_NS));
    }

    #[test]
    fn a_few_faults_that_wait_for_a_device_change_nothing_among_many_others() {
        let evictor = evictor();
        let is_inline = |others: u32| {
            (0..100).all(|_| {
                evictor.was_served(1_000, Some(50));
                let is_inline = evictor.is_inline(1_000);
                (0..others).for_each(|_| evictor.was_served(1_000, None));
                is_inline
            })
        };
        assert!(is_inline(A_WAIT));
        assert!(!is_inline(A_WAIT - 1));
    }

    #[test]
    fn one_thread_wakes_a_keeper_that_sleeps() {
        let evictor = evictor();
        assert!(evictor.claim_waking());
        assert!(!evictor.claim_waking());
        evictor.keeper_sleeps(true);
        assert!(evictor.claim_waking());
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
