//! Who takes pages out: the thread that has just been served a fault, or the keeper.
//!
//! A page that is moved out must go from the translations of every CPU that runs a thread of the program, the keeper's among
//! them. Where the keeper takes pages while the program runs, each stretch of victims interrupts the program's CPU, which costs
//! both of them more than all else about it (6 us and 11; a virtual machine with two CPUs). While the keeper sleeps, a thread
//! that takes them itself interrupts nobody: then it takes a few at a time and parks them, and the keeper is woken now and
//! then to find them a place, which is most of the work. Where other threads of the program run as well there is nothing to
//! be gained, which shows in what a page costs: it is measured on both sides.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Victims of one batch in a thread that was served.
pub const BATCH: usize = 16;
/// So many are worth waking the keeper for.
const WORTH_WAKING: u32 = 64;
/// A page may cost so many quarters of what it costs the keeper.
const QUARTERS: u64 = 3;
/// Where it costs more, the keeper takes them for so long.
const ELSEWHERE_NS: u64 = 100_000_000;

/// The state of that.
#[derive(Default)]
pub struct Takes {
    /// Set while nobody else does.
    is_taking: AtomicBool,
    keeper_sleeps: AtomicBool,
    /// Pages taken here since the keeper was woken.
    taken: AtomicU32,
    here: Cost,
    keeper: Cost,
    elsewhere_until_ns: AtomicU64,
}

/// What it takes to take a page, on average: nanoseconds; 0 if it isn't known.
#[derive(Default)]
struct Cost(AtomicU64);

impl Cost {
    fn add(&self, pages: usize, ns: u64) {
        let by_page = (ns / pages.max(1) as u64).max(1);
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(if before == 0 { by_page } else { (before * 7 + by_page) / 8 }, Ordering::Relaxed);
    }
}

impl Takes {
    /// Nobody has taken anything.
    pub const fn new() -> Takes {
        const fn unknown() -> Cost {
            Cost(AtomicU64::new(0))
        }
        Takes {
            is_taking: AtomicBool::new(false),
            keeper_sleeps: AtomicBool::new(false),
            taken: AtomicU32::new(0),
            here: unknown(),
            keeper: unknown(),
            elsewhere_until_ns: AtomicU64::new(0),
        }
    }

    /// Whether threads that were served do it, as far as is known.
    pub fn are_here(&self, now_ns: u64) -> bool {
        now_ns >= self.elsewhere_until_ns.load(Ordering::Relaxed)
    }

    /// Has `take` take some pages if it is a thread's turn that was just served. It answers how many, and how long that took.
    /// True if the keeper is to be woken.
    pub fn take(&self, now_ns: u64, take: impl FnOnce() -> (usize, u64)) -> bool {
        if !self.keeper_sleeps.load(Ordering::Relaxed)
            || !self.are_here(now_ns)
            // Ordering: Acquire, and Release below: a lock.
            || self.is_taking.swap(true, Ordering::Acquire)
        {
            return false;
        }
        let (pages, ns) = take();
        if pages > 0 {
            self.here.add(pages, ns);
        }
        let (here, keeper) = (self.here.0.load(Ordering::Relaxed), self.keeper.0.load(Ordering::Relaxed));
        let is_dear = keeper > 0 && here * 4 > keeper * QUARTERS;
        if pages == 0 || is_dear {
            self.elsewhere_until_ns.store(now_ns + ELSEWHERE_NS, Ordering::Relaxed);
            self.here.0.store(0, Ordering::Relaxed);
        }
        let taken = self.taken.load(Ordering::Relaxed) + pages as u32;
        let is_worth_it = taken >= WORTH_WAKING || pages == 0 || is_dear;
        self.taken.store(if is_worth_it { 0 } else { taken }, Ordering::Relaxed);
        if is_worth_it {
            self.keeper_sleeps.store(false, Ordering::Relaxed);
        }
        self.is_taking.store(false, Ordering::Release);
        is_worth_it
    }

    /// The keeper has taken so many.
    pub fn keeper_took(&self, pages: usize, ns: u64) {
        if pages > 0 {
            self.keeper.add(pages, ns);
        }
    }

    /// The keeper is about to sleep, or awake again.
    pub fn keeper_sleeps(&self, sleeps: bool) {
        self.keeper_sleeps.store(sleeps, Ordering::Relaxed);
    }
}
