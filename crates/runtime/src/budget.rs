//! The budget: how much memory the process has, and when that is too much.
//!
//! What we promise is what the user can check: `Pss_Anon` in smaps_rollup, summed over the tree, stays below the budget;
//! this process's part of that is its limit ([`share`](crate::share)). Part of what it has
//! we know to the page (managed resident pages, frames, the pool); the rest, memory that we don't manage and
//! our own tables, is measured now and then as the difference to what the kernel says. That difference is blurred by
//! pages of zeros: they count as resident, and take memory when they are written, often without a fault that we would
//! see. So when it shrinks, as much of that isn't believed as pages lately mapped as zeros can explain; else a
//! program that reads new memory and then writes it ends above its budget by as much as the rest takes.
//!
//! ```text
//!            limit  ─────────────  a thread that needs memory evicts by itself (direct reclaim)
//!   limit - gap / 8 ─────────────  where threads of the program take pages themselves: the background thread helps them
//!   limit - gap / 4 ─────────────  ... and they begin, after each of their faults
//!   limit -   gap   ─────────────  the background thread starts evicting
//!   limit - 2 gap   ─────────────  ... and stops
//!   limit - 3 gap   ─────────────  activation: mappings are registered (the largest gap)
//! ```
//!
//! The gap follows the rate at which pages come in: it is what comes in [`GAP_NS`], for the background thread may need that long
//! to look again. At most it is a 64th of the limit, and at least an eighth of that, for what comes in a burst; in any case 1 MiB,
//! or 256 KiB for one process of many. What lies between the marks is memory that the program hasn't got, and one whose pages
//! come from a disk, a few dozen in a millisecond, needs less of it than one that has a hundred thousand a second from the pool.
//! (Random touches from a disk: see [`takes`](crate::takes).) While memory is shared since a fork pages come in that nobody hears
//! of, when they are written: then the gap is as large as it can be.

use crate::guard::direct::SERVERS;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use farpage_core::pager::Pager;
use farpage_core::readahead::streams::CATCH_UP_MAX;
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_os::futex;

const PAGE: u64 = PAGE_BYTES as u64;

/// Limit, marks, and the last measurement.
pub struct Budget {
    total_bytes: u64,
    /// The part of it that limits outside of the run leave now.
    now_bytes: AtomicU64,
    /// This process's part of the total, for now.
    limit_bytes: AtomicU64,
    /// Between marks just now, and the bounds of that.
    gap_bytes: AtomicU64,
    gap_bytes_min: AtomicU64,
    gap_bytes_max: AtomicU64,
    /// What came in [`GAP_NS`] lately.
    wanted_bytes: AtomicU64,
    /// When that was last looked at, and pages that had come in until then.
    looked_ns: AtomicU64,
    came_in: AtomicU64,
    /// Anonymous memory that isn't managed pages, frames or pool, when last measured.
    other_bytes: AtomicU64,
    /// Frames and pool, when last looked at: exact numbers need their locks.
    own_bytes: AtomicU64,
    /// Of all that, what counts for other processes, with which it is shared since a fork.
    shared_bytes: AtomicU64,
    /// Whether this process shares memory since a fork, even if it pays for all of it.
    has_kin: AtomicBool,
    /// Managed pages that were mapped as zeros lately, in bytes: halved again and again.
    zeros_bytes: AtomicU64,
    /// When they were last halved.
    halved_ns: AtomicU64,
    /// Changes when the background thread should look.
    bell: AtomicU32,
}

/// How often the bytes of zeros are halved: nobody says which of them were written or given up since.
const HALVED_NS: u64 = 500_000_000;
/// The marks are as far apart as what comes in within this time.
const GAP_NS: u64 = 8_000_000;
/// The rate is looked at so seldom that it means something, and a lower one is believed only after a while.
const RATE_NS: u64 = 1_000_000;
const FALLS_NS: u64 = 500_000_000;
/// However few come, the marks are as far apart as one of so many parts of the most.
const LEAST_PART: u64 = 8;
/// The marks are so far apart at least, for one process that has the whole budget, and for one of many.
const GAP_BYTES_MIN: u64 = 1 << 20;
const GAP_OF_MANY_BYTES_MIN: u64 = 256 << 10;
/// See [`Budget::together`].
const TOGETHER_MIN: u64 = 64;
/// What threads that serve their own faults bring along at once, all together.
const ALONG_BYTES: u64 = (SERVERS as u64) * (CATCH_UP_MAX as u64 + 1) * PAGE;

impl Budget {
    /// A budget of `total_bytes`, all of which this process may have.
    pub fn new(total_bytes: u64) -> Budget {
        let budget = Budget {
            total_bytes,
            now_bytes: AtomicU64::new(total_bytes),
            limit_bytes: AtomicU64::new(0),
            gap_bytes: AtomicU64::new(0),
            gap_bytes_min: AtomicU64::new(0),
            gap_bytes_max: AtomicU64::new(0),
            wanted_bytes: AtomicU64::new(u64::MAX),
            looked_ns: AtomicU64::new(0),
            came_in: AtomicU64::new(0),
            other_bytes: AtomicU64::new(0),
            own_bytes: AtomicU64::new(0),
            shared_bytes: AtomicU64::new(0),
            has_kin: AtomicBool::new(false),
            zeros_bytes: AtomicU64::new(0),
            halved_ns: AtomicU64::new(0),
            bell: AtomicU32::new(0),
        };
        budget.allow(total_bytes, 1);
        budget
    }

    /// This process may have `bytes`, as one of `sharers`.
    pub fn allow(&self, bytes: u64, sharers: u64) {
        let gap_min = (GAP_BYTES_MIN / sharers).max(GAP_OF_MANY_BYTES_MIN);
        // Not more than its part: one that grows beside many that don't would evict long before the budget is used.
        let part = bytes.min(self.now_bytes() / sharers);
        self.limit_bytes.store(bytes, Ordering::Relaxed);
        let gap_max = (part / 64).max(gap_min);
        self.gap_bytes_min.store(gap_min.max(gap_max / LEAST_PART), Ordering::Relaxed);
        self.gap_bytes_max.store(gap_max, Ordering::Relaxed);
        self.set_gap();
    }

    /// So many pages have come into the program since it began. For one thread, now and then.
    pub fn have_come_in(&self, pages: u64, now_ns: u64) {
        let looked_ns = self.looked_ns.load(Ordering::Relaxed);
        let took_ns = now_ns.saturating_sub(looked_ns);
        if took_ns < RATE_NS {
            return;
        }
        self.looked_ns.store(now_ns, Ordering::Relaxed);
        let came_in = pages.saturating_sub(self.came_in.swap(pages, Ordering::Relaxed));
        if looked_ns == 0 {
            return;
        }
        let wanted = (u128::from(came_in * PAGE) * u128::from(GAP_NS) / u128::from(took_ns)) as u64;
        let before =
            self.wanted_bytes.load(Ordering::Relaxed).min(self.gap_bytes_max.load(Ordering::Relaxed));
        let falls_by = u128::from(before) * u128::from(took_ns.min(FALLS_NS)) / u128::from(FALLS_NS);
        let falls_to = before - falls_by as u64;
        self.wanted_bytes.store(wanted.max(falls_to), Ordering::Relaxed);
        self.set_gap();
    }

    fn set_gap(&self) {
        let (least, most) = (&self.gap_bytes_min, &self.gap_bytes_max);
        let (least, most) = (least.load(Ordering::Relaxed), most.load(Ordering::Relaxed));
        let wanted = if self.is_shared() { most } else { self.wanted_bytes.load(Ordering::Relaxed) };
        let gap = wanted.clamp(least, most);
        self.gap_bytes.store(gap, Ordering::Relaxed);
    }

    /// The whole budget, of all processes together.
    pub const fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The whole budget as it is now.
    pub fn now_bytes(&self) -> u64 {
        self.now_bytes.load(Ordering::Relaxed)
    }

    /// Sets the whole budget in bytes. The next [`Budget::allow`] applies it.
    pub fn set_now_bytes(&self, bytes: u64) {
        self.now_bytes.store(bytes, Ordering::Relaxed);
    }

    /// What this process may have.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    fn below_limit(&self, gaps: u64) -> u64 {
        self.limit_bytes().saturating_sub(gaps * self.gap_bytes.load(Ordering::Relaxed))
    }

    /// From here on mappings are registered and evicted from. At what rate pages come in isn't known by then.
    pub fn activate_at(&self) -> u64 {
        self.limit_bytes().saturating_sub(3 * self.gap_bytes_max.load(Ordering::Relaxed))
    }

    /// Threads of the program that were served take pages out above this, where that is for them to do. Not nearer to the limit
    /// than where they bring pages along, and a batch of theirs is parked.
    pub fn start_here_at(&self) -> u64 {
        self.part_below_limit(4, ALONG_BYTES + TOGETHER_MIN * PAGE, 1)
    }

    /// Half way from where background eviction starts to the limit, or so far from that that each of the places where
    /// threads serve their own faults may bring a few pages along.
    pub fn near_limit(&self) -> u64 {
        self.part_below_limit(2, ALONG_BYTES, 2)
    }

    /// The same where threads of the program take pages: they don't get along by themselves.
    pub fn near_limit_here(&self) -> u64 {
        self.part_below_limit(8, ALONG_BYTES, 2)
    }

    /// So large a part of the gap below the limit, or so many bytes if that is more; no more than the whole. While memory is shared
    /// since a fork, `part_of_shared`.
    fn part_below_limit(&self, part: u64, bytes_min: u64, part_of_shared: u64) -> u64 {
        let gap = self.gap_bytes.load(Ordering::Relaxed);
        let part = if self.is_shared() { part_of_shared } else { part };
        self.limit_bytes().saturating_sub((gap / part).max(bytes_min).min(gap))
    }

    /// Pages that are seen to together, while they still take the memory that is to be had by them: when threads of the program
    /// have taken so many the keeper is woken, it takes as many in one batch, and so many emptied frames give theirs back at once.
    /// A quarter of a gap, but 64 at least. (Waking it for 192 instead of 64: 1.07 times the random touches from the pool, 1.06 with
    /// Zipf's distribution; `farpage load touch`, 256 MiB under 200M.)
    pub fn together(&self) -> u32 {
        let pages = self.gap_bytes.load(Ordering::Relaxed) / (4 * PAGE);
        pages.clamp(TOGETHER_MIN, 256) as u32
    }

    /// Background eviction starts above this.
    pub fn start_at(&self) -> u64 {
        self.below_limit(1)
    }

    /// Background eviction stops at this.
    pub fn stop_at(&self) -> u64 {
        self.below_limit(2)
    }

    /// What counts for others.
    pub fn shared(&self) -> u64 {
        self.shared_bytes.load(Ordering::Relaxed)
    }

    /// So much of this process's memory counts for others.
    pub fn shares(&self, bytes: u64) {
        self.shared_bytes.store(bytes, Ordering::Relaxed);
    }

    /// So much less counts for others. Beside other threads that say so.
    pub fn shares_less(&self, bytes: u64) {
        let less = |shared: u64| Some(shared.saturating_sub(bytes));
        let _ = self.shared_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Says whether this process shares memory since a fork, even if it pays for all of it.
    pub fn has_kin(&self, has: bool) {
        self.has_kin.store(has, Ordering::Relaxed);
    }

    /// Whether memory that nobody hears of may be written, because it is shared since a fork.
    pub fn is_shared(&self) -> bool {
        self.has_kin.load(Ordering::Relaxed) || self.shared() > 0
    }

    /// What we think the process has now. Signal-safe: atomics only.
    pub fn estimate(&self, pager: &Pager<'_>) -> u64 {
        let all = self.other_bytes.load(Ordering::Relaxed)
            + self.own_bytes.load(Ordering::Relaxed)
            + pager.resident() * PAGE;
        all.saturating_sub(self.shared())
    }

    /// Looks at frames and pool again.
    pub fn refresh(&self, pager: &Pager<'_>) {
        self.own_bytes.store(pager.own_bytes(), Ordering::Relaxed);
    }

    /// Pages of a range were mapped as zeros, or found to be.
    pub fn mapped_zeros(&self, pages: u64) {
        self.zeros_bytes.fetch_add(pages * PAGE, Ordering::Relaxed);
    }

    /// Anonymous memory that we don't know of, when last measured.
    pub fn other(&self) -> u64 {
        self.other_bytes.load(Ordering::Relaxed)
    }

    /// What we know of: managed resident pages, frames and the pool.
    pub fn known(&self, pager: &Pager<'_>) -> u64 {
        pager.resident() * PAGE + pager.own_bytes()
    }

    /// The kernel says that the process has `anonymous_bytes`. `known` is what we knew of just before it was asked: it
    /// may have become less since. `before` is the other memory that there was, [`u64::MAX`] if that isn't known.
    pub fn measured(&self, pager: &Pager<'_>, known: u64, anonymous_bytes: u64, before: u64) {
        let own = pager.own_bytes();
        let known = known.max(pager.resident() * PAGE + own);
        self.own_bytes.store(own, Ordering::Relaxed);
        let zeros = self.zeros_bytes.load(Ordering::Relaxed);
        self.other_bytes.store(other(anonymous_bytes, known, zeros, before), Ordering::Relaxed);
        let stats = pager.stats();
        stats.set(Gauge::Anonymous, anonymous_bytes);
        stats.raise(Gauge::AnonymousPeak, anonymous_bytes);
        let program = anonymous_bytes.saturating_sub(own) + pager.evicted() * PAGE;
        stats.raise(Gauge::ProgramPeak, program);
    }

    /// Halves the bytes of zeros when it is time. For one thread.
    pub fn age_zeros(&self, now_ns: u64) {
        if now_ns >= self.halved_ns.load(Ordering::Relaxed) + HALVED_NS {
            self.halved_ns.store(now_ns, Ordering::Relaxed);
            let zeros = self.zeros_bytes.load(Ordering::Relaxed);
            self.zeros_bytes.fetch_sub(zeros.div_ceil(2), Ordering::Relaxed);
        }
    }

    /// Asks the background thread to look.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Relaxed);
        futex::wake(&self.bell, 1);
    }

    /// The bell's number, to wait for a change of.
    pub fn bell(&self) -> u32 {
        self.bell.load(Ordering::Relaxed)
    }

    /// Waits until somebody rings, or `ns` have passed.
    pub fn wait(&self, seen: u32, ns: u64) {
        futex::wait_for(&self.bell, seen, ns);
    }

    /// Whether a process that has `charged_bytes` and grows must be taken over now: at the mark, or earlier if it
    /// would be past it before we could look again and have registered its mappings. Without this a program that
    /// fills memory fast would be far over its budget before the first page is evicted.
    pub fn must_activate(&self, charged_bytes: u64, growth_bytes_per_us: u64) -> bool {
        charged_bytes + growth_bytes_per_us * TAKE_OVER_US >= self.activate_at()
    }

    /// How long the process can grow, at the fastest that memory can be touched, before it must be looked at
    /// again. Looking costs 5 µs.
    pub fn look_again_ns(&self, charged_bytes: u64, growth_bytes_per_us: u64) -> u64 {
        // First touches with huge pages reach some 8 GB/s on two threads: 8 bytes in a nanosecond.
        let headroom_ns = self.activate_at().saturating_sub(charged_bytes) / 8;
        // 100 bytes in a microsecond: who grows that fast may be looked at more often.
        let shortest_ns = if growth_bytes_per_us > 100 { 250_000 } else { 1_000_000 };
        if headroom_ns < shortest_ns {
            shortest_ns
        } else if headroom_ns > 20_000_000 {
            20_000_000
        } else {
            headroom_ns
        }
    }
}

/// How fast a process grows, from one look at it to the next.
#[derive(Default)]
pub struct Growth {
    /// What it had when it was looked at last, and when that look began.
    last: Option<(u64, u64)>,
}

impl Growth {
    /// It has `bytes`, measured at some moment of `look_ns`. Whoever looks may lose its processor at any point of a look
    /// while the program goes on, so growth is spread over the longest time in which it can have happened: no pause makes
    /// a slow program look like one that must be taken over at once.
    pub fn bytes_per_us(&mut self, bytes: u64, look_ns: Range<u64>) -> u64 {
        match self.last.replace((bytes, look_ns.start)) {
            Some((had, since_ns)) => bytes.saturating_sub(had) * 1000 / (look_ns.end - since_ns).max(1),
            None => 0,
        }
    }
}

/// Time to wake up, start threads and register, on busy CPUs.
const TAKE_OVER_US: u64 = 20_000;

/// Anonymous memory that isn't `known`, which has up to `zeros` bytes that take no memory yet: at least what is left
/// over if all of them were written, at most as much more; what was measured `before` if that is in between.
fn other(anonymous: u64, known: u64, zeros: u64, before: u64) -> u64 {
    let least = anonymous.saturating_sub(known);
    let most = (anonymous + zeros).saturating_sub(known);
    before.clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const UNKNOWN: u64 = u64::MAX;

    const MS: u64 = 1_000_000;

    /// What came in GAP_NS is what the marks are apart, within bounds.
    #[test]
    fn marks_follow_the_rate_at_which_pages_come_in() {
        let budget = Budget::new(1024 * MIB);
        let gap = || budget.start_at() - budget.stop_at();
        let (least, most) = (2 * MIB, 16 * MIB);
        assert_eq!(gap(), most, "before anything is known");
        let (mut pages, mut ms) = (7_000, 1_000);
        budget.have_come_in(pages, ms * MS);
        assert_eq!(gap(), most, "nothing to compare with");
        let mut come = |by_ms: u64, for_ms: u64| {
            for _ in 0..for_ms {
                (pages, ms) = (pages + by_ms, ms + 1);
                budget.have_come_in(pages, ms * MS);
            }
            gap()
        };
        assert_eq!(come(80, 2_000), 80 * PAGE * GAP_NS / MS);
        assert_eq!(come(2, 3_000), least);
        assert_eq!(come(128, 1), 128 * PAGE * GAP_NS / MS, "more is believed at once");
        let falls = come(0, 10);
        assert!(falls < 128 * PAGE * GAP_NS / MS && falls > 120 * PAGE * GAP_NS / MS, "less isn't: {falls}");
        assert_eq!(come(100_000, 5), most);
        assert_eq!(budget.activate_at(), 1024 * MIB - 3 * most);
        assert_eq!(come(0, 3_000), least);
        assert_eq!(budget.activate_at(), 1024 * MIB - 3 * most, "by then no rate is known");
        budget.shares(1);
        assert_eq!(come(0, 1), most, "what is shared may be written");
        budget.shares(0);
        assert_eq!(come(0, 1), least);
        come(100_000, 5);
        // A part of the budget has bounds of its own.
        budget.allow(128 * MIB, 1);
        assert_eq!(gap(), 2 * MIB);
    }

    /// Who looks after each of its faults needs less room than the keeper, but what is brought along has some.
    #[test]
    fn marks_of_threads_that_take_pages_themselves_lie_nearer_to_the_limit() {
        let [along, start] = [512 << 10, 768 << 10];
        for (mib, start, near) in [(1024, 4 * MIB, 2 * MIB), (256, MIB, along), (64, start, along)] {
            let budget = Budget::new(mib * MIB);
            let below_limit = |mark| mib * MIB - mark;
            assert_eq!([budget.start_here_at(), budget.near_limit_here()].map(below_limit), [start, near]);
            budget.shares(1);
            assert_eq!(
                budget.start_here_at(),
                budget.start_at(),
                "what is shared is written without a fault"
            );
            assert_eq!(budget.near_limit_here(), budget.near_limit());
        }
        // One of many has no room to spare.
        let budget = Budget::new(4096 * MIB);
        budget.allow(16 * MIB, 256);
        assert_eq!(budget.start_here_at(), budget.start_at());
        assert_eq!(budget.near_limit_here(), budget.near_limit());
    }

    /// Workers that evicted shared pages at once lost each other's pages: the process thought that others paid for those.
    #[test]
    fn shared_pages_that_threads_evict_at_once_are_all_counted() {
        const PAGES: u64 = 200_000;
        let budget = Budget::new(1024 * MIB);
        budget.shares((4 * PAGES + 1) * PAGE);
        std::thread::scope(|scope| {
            (0..4).for_each(|_| {
                scope.spawn(|| (0..PAGES).for_each(|_| budget.shares_less(PAGE)));
            });
        });
        assert_eq!(budget.shared(), PAGE);
        budget.shares_less(2 * PAGE);
        assert_eq!(budget.shared(), 0);
    }

    #[test]
    fn a_rate_takes_a_moment_to_be_seen() {
        let budget = Budget::new(1024 * MIB);
        let gap = || budget.start_at() - budget.stop_at();
        (1..=4_000).for_each(|ms| budget.have_come_in(900, ms * MS));
        let least = gap();
        budget.have_come_in(1_400, 4_000 * MS + RATE_NS - 1);
        assert_eq!(gap(), least);
        // Pages that the program gave up don't come in less than none.
        budget.have_come_in(0, 4_001 * MS);
        assert_eq!(gap(), least);
        budget.have_come_in(500, 4_002 * MS);
        assert_eq!(gap(), 500 * PAGE * GAP_NS / MS);
    }

    #[test]
    fn what_is_seen_to_together_fits_between_the_marks() {
        for (mib, pages) in [(8, 64), (128, 128), (200, 200), (4096, 256)] {
            let budget = Budget::new(mib * MIB);
            assert_eq!(u64::from(budget.together()), pages);
            assert!(budget.start_at() + pages * PAGE <= budget.near_limit());
        }
        // However slowly pages come.
        let budget = Budget::new(4096 * MIB);
        (1..=9_000).for_each(|ms| budget.have_come_in(0, ms * MS));
        assert!(budget.stop_at() > Budget::new(4096 * MIB).stop_at());
        assert!(budget.start_at() + u64::from(budget.together()) * PAGE <= budget.near_limit());
        // One of many in a large budget has a small gap.
        let budget = Budget::new(4096 * MIB);
        budget.allow(16 * MIB, 256);
        assert_eq!(budget.together(), 64);
        assert!(budget.start_at() + 64 * PAGE <= budget.limit_bytes());
    }

    /// A keeper that lost its processor after its first look had a program of 58 MiB taken over under 512.
    #[test]
    fn growth_while_nobody_looked_is_not_fast() {
        let ms = |ms: u64| ms * 1_000_000;
        let mut growth = Growth::default();
        assert_eq!(growth.bytes_per_us(MIB, 0..ms(100)), 0, "nothing to compare with");
        assert_eq!(growth.bytes_per_us(49 * MIB, ms(100)..ms(100) + 20_000), 48 * MIB / 100_020);
        // Without pauses it is what it is: 16 MiB in 2 ms.
        assert_eq!(growth.bytes_per_us(65 * MIB, ms(102) - 10_000..ms(102)), 16 * MIB / 2_000);
        // And who has less hasn't grown.
        assert_eq!(growth.bytes_per_us(60 * MIB, ms(110)..ms(111)), 0);
    }

    #[test]
    fn other_memory_is_the_difference_while_nothing_was_mapped_as_zeros() {
        assert_eq!(other(50 * MIB, 40 * MIB, 0, 3 * MIB), 10 * MIB);
        assert_eq!(other(50 * MIB, 40 * MIB, 0, UNKNOWN), 10 * MIB);
        assert_eq!(other(30 * MIB, 40 * MIB, 0, 3 * MIB), 0, "some of the known pages take no memory");
    }

    /// A worker of stress-ng was 6 MiB over 115: it had read its new buffer, which hid the memory of everything else,
    /// and wrote it without a fault.
    #[test]
    fn pages_of_zeros_do_not_hide_other_memory() {
        // 6 MiB of other memory; 100 MiB are read as zeros, then written.
        let mut found = other(6 * MIB, 0, 0, UNKNOWN);
        for written in [0, 50, 94, 100] {
            found = other((6 + written) * MIB, 100 * MIB, 100 * MIB, found);
            assert_eq!(found, 6 * MIB, "{written} MiB are written");
        }
        // Taken over with all of these zeros in place.
        assert_eq!(other(16 * MIB, 100 * MIB, 90 * MIB, UNKNOWN), 6 * MIB);
        // More of it is seen at once, less once there are fewer zeros.
        assert_eq!(other(120 * MIB, 100 * MIB, 100 * MIB, found), 20 * MIB);
        assert_eq!(other(16 * MIB, 14 * MIB, MIB, found), 3 * MIB);
    }
}
