//! A *lull*: while an engine thread takes pages out, threads of the program that fault wait until the engine
//! thread is done (`signal` mode).
//!
//! A page that leaves needs a TLB shootdown on each CPU that runs a thread of the program, and each stretch
//! of victims interrupts these CPUs. The wait for another CPU costs more than all other work on a page. Where
//! several threads fault, none of them can evict without interrupting the others
//! ([`evictor`](crate::pressure::evictor)). A CPU that sleeps needs no shootdown. Threads fault every few
//! microseconds. If they wait while a few hundred pages are taken out, most of these pages interrupt nobody.
//!
//! Lulls pay off even with somewhat more threads than CPUs: all threads arrive, and the CPUs sleep. With many
//! more threads, a CPU goes to sleep too late, and all threads are woken for nothing. Sixteen threads on two
//! CPUs do about half as many touches with lulls.
//!
//! At the limit, faulting threads also wait for *headroom*, which is free budget. The keeper is evicting
//! already and gets too little CPU time. A thread that evicts beside the keeper would interrupt it with every
//! stretch. Where there are no lulls, this wait gains nothing. Victims without neighbours are cheap in a lull
//! ([`Lone`](farpage_core::reclaim::recency::Lone)).
//!
//! Lulls change speed only. A waiting thread holds nothing, and goes on after [`WAIT_NS`] or
//! [`HEADROOM_WAIT_NS`] in any case.

use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_os::clock::now_ns;
use farpage_os::futex;

/// Victims taken in one lull, at most. Half and twice as many give fewer random touches with two threads.
pub const PAGES: usize = 256;
/// Batches of victims in one lull, at most. The limit takes effect for a thread that serves a fault: its
/// batches are smaller.
pub const BATCHES: usize = 4;
/// Nanoseconds that a thread waits for the end of a lull, at most. The batches of a lull take somewhat less.
const WAIT_NS: u64 = 500_000;
/// Nanoseconds for which several threads are expected to fault again after they were served at the same time.
const SEVERAL_NS: u64 = 100_000_000;
/// Nanoseconds that a thread waits for headroom, at most. The keeper places some hundred pages meanwhile.
const HEADROOM_WAIT_NS: u64 = 1_000_000;
/// Nanoseconds after a wait for headroom that failed, in which no thread waits for headroom again. There may
/// be none to be had.
const NO_HEADROOM_NS: u64 = 100_000_000;
/// CPUs of the program with which lulls are used. With one CPU, an eviction interrupts nobody. With more than
/// four, more CPUs would sleep in each lull, and it is not known whether that pays.
const CPUS: RangeInclusive<u32> = 2..=4;
/// Threads per CPU up to which a lull pays off.
const THREADS_BY_CPU: u32 = 2;

/// The threads that take pages out in lulls, and the threads that wait for them.
#[derive(Default)]
pub struct Lull {
    /// Threads that take pages out in a lull now.
    takers: AtomicU32,
    /// Threads that wait for the takers.
    waiting_for_takers: AtomicU32,
    cpus: AtomicU32,
    /// Until this time, several threads of the program are expected to fault again and again.
    several_until_ns: AtomicU64,
    /// Until this time, too many threads for the CPUs are expected to fault.
    many_until_ns: AtomicU64,
    /// Threads that wait for headroom.
    waiting_for_headroom: AtomicU32,
    /// Changes when there is headroom: the futex word of the threads that wait.
    headroom_word: AtomicU32,
    /// Until this time, no thread waits for headroom.
    no_headroom_until_ns: AtomicU64,
}

impl Lull {
    /// Notes that the program may run on `cpus` CPUs.
    pub fn runs_on(&self, cpus: u32) {
        self.cpus.store(cpus, Ordering::Relaxed);
    }

    /// Notes that at least `threads` threads of the program are served at once.
    pub fn are_served(&self, threads: usize, now_ns: u64) {
        let is_many = threads > (THREADS_BY_CPU * self.cpus.load(Ordering::Relaxed)) as usize;
        for (until, is_so) in [(&self.several_until_ns, threads > 1), (&self.many_until_ns, is_many)] {
            // Each fault comes here, so the words are written only now and then.
            if is_so && until.load(Ordering::Relaxed) < now_ns + SEVERAL_NS / 2 {
                until.store(now_ns + SEVERAL_NS, Ordering::Relaxed);
            }
        }
    }

    /// Returns whether pages should be taken out in lulls.
    pub fn is_worthwhile(&self, now_ns: u64) -> bool {
        let is_now = |until: &AtomicU64| now_ns < until.load(Ordering::Relaxed);
        let are_few = CPUS.contains(&self.cpus.load(Ordering::Relaxed));
        are_few && is_now(&self.several_until_ns) && !is_now(&self.many_until_ns)
    }

    /// Calls `take`, and has each thread that faults meanwhile wait until `take` is done.
    pub fn during<T>(&self, take: impl FnOnce() -> T) -> T {
        self.takers.fetch_add(1, Ordering::Relaxed);
        let took = take();
        if self.takers.fetch_sub(1, Ordering::Relaxed) == 1 {
            futex::wake(&self.takers, u32::MAX >> 1);
        }
        took
    }

    /// Waits for the end of the lull, if there is one. Called by a thread that has faulted.
    pub fn wait(&self) {
        let takers = self.takers.load(Ordering::Relaxed);
        if takers != 0 {
            let now = now_ns();
            let waiting = self.waiting_for_takers.fetch_add(1, Ordering::Relaxed) + 1;
            // The waiting threads will all be served at once, in a moment.
            self.are_served(waiting as usize, now);
            self.wait_until(now + WAIT_NS, takers);
            self.waiting_for_takers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[cold]
    fn wait_until(&self, end_ns: u64, mut takers: u32) {
        while takers != 0
            && let Some(left_ns) = end_ns.checked_sub(now_ns())
        {
            futex::wait_for(&self.takers, takers, left_ns);
            takers = self.takers.load(Ordering::Relaxed);
        }
    }

    /// Returns whether waiting for headroom may help: no such wait has failed lately.
    pub fn expects_headroom(&self, now_ns: u64) -> bool {
        now_ns >= self.no_headroom_until_ns.load(Ordering::Relaxed)
    }

    /// Waits while `is_none`, until the keeper has made headroom. Called by a thread that needs memory. If
    /// this thread evicted instead, it would interrupt the keeper and take CPU time from it. Returns false if
    /// the wait took too long.
    pub fn wait_for_headroom(&self, is_none: impl Fn() -> bool) -> bool {
        let now = now_ns();
        self.waiting_for_headroom.fetch_add(1, Ordering::Relaxed);
        let has_headroom = loop {
            let seen = self.headroom_word.load(Ordering::Relaxed);
            if !is_none() {
                break true;
            }
            let Some(left_ns) = (now + HEADROOM_WAIT_NS).checked_sub(now_ns()) else { break false };
            // A thread that makes headroom without having seen this waiter wakes nobody. Then the next thread
            // that makes headroom does.
            futex::wait_for(&self.headroom_word, seen, left_ns);
        };
        self.waiting_for_headroom.fetch_sub(1, Ordering::Relaxed);
        if !has_headroom {
            self.no_headroom_until_ns.store(now_ns() + NO_HEADROOM_NS, Ordering::Relaxed);
        }
        has_headroom
    }

    /// Returns whether a thread waits for headroom.
    pub fn is_waited_for(&self) -> bool {
        self.waiting_for_headroom.load(Ordering::Relaxed) > 0
    }

    /// Wakes all threads that wait for headroom. There is some now.
    pub fn made_headroom(&self) {
        self.headroom_word.fetch_add(1, Ordering::Relaxed);
        futex::wake(&self.headroom_word, u32::MAX >> 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn it_is_worthwhile_for_a_while_after_several_were_served_but_not_too_many_for_the_cpus() {
        let lull = Lull::default();
        lull.runs_on(2);
        lull.are_served(1, 0);
        assert!(!lull.is_worthwhile(1));
        lull.are_served(2, 1_000);
        assert!(lull.is_worthwhile(1_000 + SEVERAL_NS - 1));
        assert!(!lull.is_worthwhile(1_000 + SEVERAL_NS));
        lull.are_served(4, 1_000 + SEVERAL_NS / 2 + 1);
        assert!(lull.is_worthwhile(1_000 + SEVERAL_NS));
        lull.are_served(5, 1_000 + SEVERAL_NS);
        lull.are_served(2, 1_001 + 2 * SEVERAL_NS);
        assert!(!lull.is_worthwhile(1_000 + 2 * SEVERAL_NS - 1));
        assert!(lull.is_worthwhile(1_001 + 2 * SEVERAL_NS));
        for cpus in [CPUS.start() - 1, CPUS.end() + 1] {
            lull.runs_on(cpus);
            assert!(!lull.is_worthwhile(1_001 + 2 * SEVERAL_NS));
        }
    }

    #[test]
    fn who_faults_waits_for_the_last_taker() {
        let (lull, are_done) = (Lull::default(), AtomicBool::new(false));
        lull.wait();
        let began_ns = now_ns();
        let waits = || {
            lull.wait();
            // If the threads got no CPU for that long, the wait may have run out before the lull ended.
            let is_over = now_ns() - began_ns >= WAIT_NS;
            assert!(are_done.load(Ordering::Relaxed) || is_over);
        };
        std::thread::scope(|scope| {
            lull.during(|| {
                scope.spawn(waits);
                lull.during(|| std::thread::sleep(Duration::from_micros(100)));
                std::thread::sleep(Duration::from_micros(100));
                are_done.store(true, Ordering::Relaxed);
            });
        });
        assert_eq!(lull.takers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn those_who_wait_are_counted() {
        let lull = Lull::default();
        lull.runs_on(2);
        let waits = |threads: usize| {
            lull.during(|| {
                std::thread::scope(|scope| {
                    (0..threads).for_each(|_| _ = scope.spawn(|| lull.wait()));
                    // Nothing ends the lull while the scope waits for the threads. They go on because their
                    // time is over.
                });
            });
            assert_eq!(lull.waiting_for_takers.load(Ordering::Relaxed), 0);
        };
        // A thread that gets no CPU in time may wait later than the others.
        assert!((0..100).any(|_| {
            waits(2);
            lull.is_worthwhile(now_ns())
        }));
        assert!((0..100).any(|_| {
            waits(5);
            now_ns() < lull.many_until_ns.load(Ordering::Relaxed)
        }));
    }

    #[test]
    fn who_needs_headroom_waits_until_there_is_some() {
        assert!(Lull::default().wait_for_headroom(|| false), "there is");
        // If a thread gets no CPU in time, its wait ends before there is headroom. This is rare.
        let was_woken = || {
            let (lull, has_headroom, began_ns) = (Lull::default(), AtomicBool::new(false), now_ns());
            let has = std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    let has = lull.wait_for_headroom(|| !has_headroom.load(Ordering::Relaxed));
                    assert_eq!(has, lull.expects_headroom(now_ns()));
                    assert!(!has || has_headroom.load(Ordering::Relaxed), "woken for nothing, it went on");
                    has && now_ns() - began_ns < HEADROOM_WAIT_NS / 2
                });
                while !lull.is_waited_for() && !waiter.is_finished() {
                    std::thread::yield_now();
                }
                lull.made_headroom();
                std::thread::sleep(Duration::from_micros(100));
                has_headroom.store(true, Ordering::Relaxed);
                lull.made_headroom();
                waiter.join().unwrap()
            });
            assert!(!lull.is_waited_for());
            has
        };
        assert!((0..100).any(|_| was_woken()), "whoever waits is woken as soon as there is headroom");
    }

    #[test]
    fn nobody_waits_again_for_headroom_that_did_not_come() {
        let lull = Lull::default();
        let began_ns = now_ns();
        assert!(lull.expects_headroom(began_ns));
        assert!(!lull.wait_for_headroom(|| true));
        assert!(now_ns() - began_ns >= HEADROOM_WAIT_NS);
        assert!(!lull.expects_headroom(now_ns()));
        assert!(lull.expects_headroom(now_ns() + NO_HEADROOM_NS));
        assert!(!lull.is_waited_for());
    }

    #[test]
    fn nobody_waits_for_ever() {
        let lull = Lull::default();
        let began = now_ns();
        lull.during(|| lull.wait());
        assert!(now_ns() - began >= WAIT_NS);
    }
}
