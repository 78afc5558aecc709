//! A lull: while a thread of ours moves pages out, threads of the program that run into a fault wait for its end. (`signal` mode.)
//!
//! A page that is moved out must go from the translations of each CPU that runs a thread of the program, and each stretch of
//! victims interrupts those CPUs. Waiting for the other CPU takes 16 µs on a virtual machine (`farpage bench faults`), more than
//! all else about a page, and where several threads fault nobody can move pages without interrupting the others
//! ([`takes`](crate::takes)). But a CPU that sleeps needn't be told. Threads that fault come to us by themselves, every few
//! microseconds: if they stay for the time that it takes to move a few hundred pages, most of those interrupt nobody. (Two
//! threads, touches from the pool: 1.16 times as many at random, 1.3 times with Zipf's distribution: `farpage load touch`,
//! 256 MiB under 200M.)
//!
//! So they do where there are somewhat more threads than CPUs: all of them come, and the CPU sleeps (same load, three threads
//! on two CPUs: random 1.33 times, Zipf's distribution 1.2 times; four of `farpage bench scale` 1.5 times the touches). With
//! many more it sleeps too late, and all are woken for nothing (16 threads: random 0.56 times).
//!
//! At the limit such threads wait for *room*, too: the engine thread is at work and has too little of the CPUs, and another one
//! that evicts beside it interrupts it with every stretch. (Same load, random: 1.05 times the touches with two threads, 4,400
//! interrupts a second instead of 7,500, `perf stat -a -e ipi:ipi_send_cpu`. Where there are no lulls it gains nothing: 16
//! threads 1.00.) Victims without neighbours are cheap in a lull
//! ([`Lone`](farpage_core::reclaim::recency::Lone)): 1.06 times.
//!
//! It is a matter of speed alone: who waits holds nothing, and goes on after [`WAIT_NS`] or [`ROOM_WAIT_NS`] in any case.

use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_os::clock::now_ns;
use farpage_os::futex;

/// Victims that are taken in one lull, at most. (128 and 512: 0.96 and 0.89 of the random touches with two threads; see above.)
pub const PAGES: usize = 256;
/// Batches of them: a thread that serves a fault takes smaller ones.
pub const BATCHES: usize = 4;
/// Nanoseconds that a thread waits for the end of a lull, at most: somewhat longer than its batches take.
const WAIT_NS: u64 = 500_000;
/// Nanoseconds for which threads that were served at the same time are expected to go on so.
const SEVERAL_NS: u64 = 100_000_000;
/// Nanoseconds that a thread waits for room, at most. An engine thread places some hundred pages meanwhile.
const ROOM_WAIT_NS: u64 = 1_000_000;
/// Nanoseconds after a vain wait for room in which no thread waits for it again: there may be none to be had.
const NO_ROOM_NS: u64 = 100_000_000;
/// On one CPU nobody is interrupted. With more, more of them would sleep each time, and it is not known whether that pays.
const CPUS: RangeInclusive<u32> = 2..=4;
/// Threads per CPU up to which a lull pays off.
const THREADS_BY_CPU: u32 = 2;

/// Who waits for whom.
#[derive(Default)]
pub struct Lull {
    /// Threads that take pages out in a lull just now.
    takers: AtomicU32,
    /// Threads that wait for them.
    waiting_for_takers: AtomicU32,
    cpus: AtomicU32,
    /// Until then several threads of the program are taken to fault again and again.
    several_until_ns: AtomicU64,
    /// And until then too many for the CPUs.
    many_until_ns: AtomicU64,
    /// Threads that wait for room, and a number that changes when there is some.
    waiting_for_room: AtomicU32,
    room: AtomicU32,
    /// Until then nobody does.
    no_room_until_ns: AtomicU64,
}

impl Lull {
    /// The program may run on so many CPUs.
    pub fn runs_on(&self, cpus: u32) {
        self.cpus.store(cpus, Ordering::Relaxed);
    }

    /// So many threads of the program are served at once, at least.
    pub fn are_served(&self, threads: usize, now_ns: u64) {
        let is_many = threads > (THREADS_BY_CPU * self.cpus.load(Ordering::Relaxed)) as usize;
        for (until, is_so) in [(&self.several_until_ns, threads > 1), (&self.many_until_ns, is_many)] {
            // Each fault says so: written now and then.
            if is_so && until.load(Ordering::Relaxed) < now_ns + SEVERAL_NS / 2 {
                until.store(now_ns + SEVERAL_NS, Ordering::Relaxed);
            }
        }
    }

    /// Whether pages should be taken out in lulls.
    pub fn is_worthwhile(&self, now_ns: u64) -> bool {
        let is_now = |until: &AtomicU64| now_ns < until.load(Ordering::Relaxed);
        let are_few = CPUS.contains(&self.cpus.load(Ordering::Relaxed));
        are_few && is_now(&self.several_until_ns) && !is_now(&self.many_until_ns)
    }

    /// Has whoever faults from now on wait until `take` is done.
    pub fn during<T>(&self, take: impl FnOnce() -> T) -> T {
        self.takers.fetch_add(1, Ordering::Relaxed);
        let took = take();
        if self.takers.fetch_sub(1, Ordering::Relaxed) == 1 {
            futex::wake(&self.takers, u32::MAX >> 1);
        }
        took
    }

    /// In a thread that has run into a fault: waits for the end of the lull, if there is one.
    pub fn wait(&self) {
        let takers = self.takers.load(Ordering::Relaxed);
        if takers != 0 {
            let now = now_ns();
            let waiting = self.waiting_for_takers.fetch_add(1, Ordering::Relaxed) + 1;
            // They are served in a moment, all at once.
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

    /// Whether room can be waited for: it has not been in vain lately.
    pub fn expects_room(&self, now_ns: u64) -> bool {
        now_ns >= self.no_room_until_ns.load(Ordering::Relaxed)
    }

    /// In a thread that needs memory: waits while there `is_none`, for the engine thread that is at work to make some. If it made
    /// some itself, it would interrupt that thread, and take CPU time from it. False if it took too long.
    pub fn wait_for_room(&self, is_none: impl Fn() -> bool) -> bool {
        let now = now_ns();
        self.waiting_for_room.fetch_add(1, Ordering::Relaxed);
        let has_room = loop {
            let seen = self.room.load(Ordering::Relaxed);
            if !is_none() {
                break true;
            }
            let Some(left_ns) = (now + ROOM_WAIT_NS).checked_sub(now_ns()) else { break false };
            // Somebody who didn't see us waiting wakes nobody; then it is the next who does.
            futex::wait_for(&self.room, seen, left_ns);
        };
        self.waiting_for_room.fetch_sub(1, Ordering::Relaxed);
        if !has_room {
            self.no_room_until_ns.store(now_ns() + NO_ROOM_NS, Ordering::Relaxed);
        }
        has_room
    }

    /// Whether somebody waits for room.
    pub fn is_waited_for(&self) -> bool {
        self.waiting_for_room.load(Ordering::Relaxed) > 0
    }

    /// There is room: whoever waits for it goes on.
    pub fn made_room(&self) {
        self.room.fetch_add(1, Ordering::Relaxed);
        futex::wake(&self.room, u32::MAX >> 1);
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
            // If this thread got no CPU for so long the others had their time.
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
                    // Nobody ends the lull while they are waited for: they go on because their time is over.
                });
            });
            assert_eq!(lull.waiting_for_takers.load(Ordering::Relaxed), 0);
        };
        // Whoever gets no CPU in time waits later than the others.
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
    fn who_needs_room_waits_until_there_is_some() {
        assert!(Lull::default().wait_for_room(|| false), "there is");
        // If a thread gets no CPU in time, the wait is over before there is room: seldom.
        let was_woken = || {
            let (lull, has_room, began_ns) = (Lull::default(), AtomicBool::new(false), now_ns());
            let has = std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    let has = lull.wait_for_room(|| !has_room.load(Ordering::Relaxed));
                    assert_eq!(has, lull.expects_room(now_ns()));
                    assert!(!has || has_room.load(Ordering::Relaxed), "woken for nothing, it went on");
                    has && now_ns() - began_ns < ROOM_WAIT_NS / 2
                });
                while !lull.is_waited_for() && !waiter.is_finished() {
                    std::thread::yield_now();
                }
                lull.made_room();
                std::thread::sleep(Duration::from_micros(100));
                has_room.store(true, Ordering::Relaxed);
                lull.made_room();
                waiter.join().unwrap()
            });
            assert!(!lull.is_waited_for());
            has
        };
        assert!((0..100).any(|_| was_woken()), "whoever waits is woken as soon as there is room");
    }

    #[test]
    fn nobody_waits_again_for_room_that_did_not_come() {
        let lull = Lull::default();
        let began_ns = now_ns();
        assert!(lull.expects_room(began_ns));
        assert!(!lull.wait_for_room(|| true));
        assert!(now_ns() - began_ns >= ROOM_WAIT_NS);
        assert!(!lull.expects_room(now_ns()));
        assert!(lull.expects_room(now_ns() + NO_ROOM_NS));
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
