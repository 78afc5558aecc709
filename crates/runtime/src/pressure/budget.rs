//! The budget: how much memory the process may have, and at which marks eviction starts and stops.
//!
//! The promise is one that the user can check: `Pss_Anon` in smaps_rollup, summed over the tree, stays below
//! the budget. This process's part of the budget is its limit ([`share`](crate::pressure::share)). Managed
//! resident pages, frames and the pool are counted exactly, page by page. The rest is memory that isn't
//! managed, and our own tables. The rest is measured now and then, as the difference to what the kernel says.
//!
//! Pages of zeros blur that difference. Pages of zeros count as resident, and take memory when they are
//! written, often without a fault that the engine sees. So when the rest seems to shrink, the part of the
//! shrinkage that pages lately mapped as zeros can explain isn't believed. Otherwise a program that reads new
//! memory and then writes it would end above its budget, by as much as the rest takes.
//!
//! ```text
//!            limit  ────────  a thread that needs memory evicts by itself (direct reclaim)
//!   limit - gap / 8 ────────  the keeper helps threads of the program that evict for themselves
//!   limit - gap / 4 ────────  threads of the program begin to evict, after each of their faults
//!   limit -   gap   ────────  the keeper begins to evict (background reclaim)
//!   limit - 2 gap   ────────  the keeper stops
//!   limit - 3 gap   ────────  activation: mappings are registered (the largest gap)
//! ```
//!
//! The gap follows the rate at which pages come in. The gap is as many bytes as come in within [`GAP_NS`],
//! because the keeper may need that long until it looks again. The largest gap is a 64th of the
//! limit. The smallest is an eighth of the largest, for bursts. In any case the gap is at least 1 MiB, or 256
//! KiB for one process of many.
//!
//! The program can't use the memory between the marks. Pages from a disk come in at a few dozen in a
//! millisecond, pages from the pool at up to a hundred thousand in a second. So a program whose pages come
//! from a disk needs a smaller gap. While memory is shared since a fork, a write brings pages in without the
//! engine hearing of it. Then the gap is as large as it can be.

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
    /// The total that the limits outside of the run leave now.
    now_bytes: AtomicU64,
    /// This process's part of the total, at present.
    limit_bytes: AtomicU64,
    /// The present distance between two marks, and its bounds.
    gap_bytes: AtomicU64,
    gap_bytes_min: AtomicU64,
    gap_bytes_max: AtomicU64,
    /// Bytes that came in per [`GAP_NS`] lately.
    wanted_bytes: AtomicU64,
    /// When the rate was last looked at, and the number of pages that had come in until then.
    looked_ns: AtomicU64,
    came_in: AtomicU64,
    /// Anonymous memory that isn't managed pages, frames or pool, when last measured.
    other_bytes: AtomicU64,
    /// Bytes of frames and pool when last looked at: exact numbers need their locks.
    own_bytes: AtomicU64,
    /// Bytes of all these that count for other processes, with which they are shared since a fork.
    shared_bytes: AtomicU64,
    /// Whether this process shares memory since a fork, even if it pays for all of it.
    has_kin: AtomicBool,
    /// Bytes of managed pages that were mapped as zeros lately. Halved every [`HALVED_NS`].
    zeros_bytes: AtomicU64,
    /// When `zeros_bytes` was last halved.
    halved_ns: AtomicU64,
    /// Changes when the keeper should look.
    bell: AtomicU32,
}

/// Nanoseconds between two halvings of the bytes of zeros. The halving stands for pages of zeros that were
/// written or given up since, which the engine doesn't hear of.
const HALVED_NS: u64 = 500_000_000;
/// Nanoseconds whose incoming pages make up the gap: the marks are as far apart as what comes in within this
/// time.
const GAP_NS: u64 = 8_000_000;
/// Nanoseconds between two looks at the rate at least: over less time a rate means little.
const RATE_NS: u64 = 1_000_000;
/// Nanoseconds in which the believed rate may fall to nothing, so that a lower rate is believed only after a
/// while.
const FALLS_NS: u64 = 500_000_000;
/// The largest gap is divided by this to get the smallest one, however few pages come in.
const LEAST_PART: u64 = 8;
/// Bytes of the smallest gap, for a process that has the whole budget, and for one process of many.
const GAP_BYTES_MIN: u64 = 1 << 20;
const GAP_OF_MANY_BYTES_MIN: u64 = 256 << 10;
/// Pages: the lower bound of [`Budget::together`].
const TOGETHER_MIN: u64 = 64;
/// Bytes that all threads that serve their own faults may bring along at once.
const ALONG_BYTES: u64 = (SERVERS as u64) * (CATCH_UP_MAX as u64 + 1) * PAGE;

impl Budget {
    /// A budget of `total_bytes`. This process may have all of it.
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

    /// Sets this process's limit to `bytes`, as one of `sharers` processes.
    pub fn allow(&self, bytes: u64, sharers: u64) {
        let gap_min = (GAP_BYTES_MIN / sharers).max(GAP_OF_MANY_BYTES_MIN);
        // The largest gap follows from no more than an equal part of the budget. A process that grows beside
        // many that don't would otherwise evict long before the budget is used.
        let part = bytes.min(self.now_bytes() / sharers);
        self.limit_bytes.store(bytes, Ordering::Relaxed);
        let gap_max = (part / 64).max(gap_min);
        self.gap_bytes_min.store(gap_min.max(gap_max / LEAST_PART), Ordering::Relaxed);
        self.gap_bytes_max.store(gap_max, Ordering::Relaxed);
        self.set_gap();
    }

    /// Tells the budget that `pages` pages have come into the program since the program began. One thread
    /// calls this now and then.
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

    /// The whole budget as limits outside of the run leave it now.
    pub fn now_bytes(&self) -> u64 {
        self.now_bytes.load(Ordering::Relaxed)
    }

    /// Sets the whole budget in bytes. The next [`Budget::allow`] applies it.
    pub fn set_now_bytes(&self, bytes: u64) {
        self.now_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that this process may have.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    fn below_limit(&self, gaps: u64) -> u64 {
        self.limit_bytes().saturating_sub(gaps * self.gap_bytes.load(Ordering::Relaxed))
    }

    /// The mark at which mappings are registered. Uses the largest gap, because the rate at which pages come
    /// in isn't known until then.
    pub fn activate_at(&self) -> u64 {
        self.limit_bytes().saturating_sub(3 * self.gap_bytes_max.load(Ordering::Relaxed))
    }

    /// The mark above which a thread of the program evicts after each of its faults, where the program's
    /// threads are the evictors. The mark stays far enough below the limit for the pages that these threads
    /// bring along, and for one batch that they park.
    pub fn inline_start_at(&self) -> u64 {
        self.part_below_limit(4, ALONG_BYTES + TOGETHER_MIN * PAGE, 1)
    }

    /// Half way from where background eviction starts to the limit. Lower, if the threads that serve their
    /// own faults need more bytes than that to bring a few pages along each.
    pub fn near_limit(&self) -> u64 {
        self.part_below_limit(2, ALONG_BYTES, 2)
    }

    /// The same mark where threads of the program evict. Above this mark those threads can't keep up alone,
    /// and the keeper helps.
    pub fn inline_near_limit(&self) -> u64 {
        self.part_below_limit(8, ALONG_BYTES, 2)
    }

    /// The mark that lies a `part`-th of the gap below the limit, or `bytes_min` bytes if that is more, but
    /// at most the whole gap. While memory is shared since a fork, `part_of_shared` takes the place of
    /// `part`.
    fn part_below_limit(&self, part: u64, bytes_min: u64, part_of_shared: u64) -> u64 {
        let gap = self.gap_bytes.load(Ordering::Relaxed);
        let part = if self.is_shared() { part_of_shared } else { part };
        self.limit_bytes().saturating_sub((gap / part).max(bytes_min).min(gap))
    }

    /// Pages that are dealt with together while they still take their memory. When threads of the program
    /// have taken this many pages, the keeper is woken. The keeper takes this many in one batch. And this
    /// many emptied frames give their memory back at once. The number is a quarter of a gap, but at least 64.
    /// Waking the keeper more often slows random touches from the pool by several percent.
    pub fn together(&self) -> u32 {
        let pages = self.gap_bytes.load(Ordering::Relaxed) / (4 * PAGE);
        pages.clamp(TOGETHER_MIN, 256) as u32
    }

    /// The mark above which background eviction starts.
    pub fn start_at(&self) -> u64 {
        self.below_limit(1)
    }

    /// The mark down to which background eviction goes.
    pub fn stop_at(&self) -> u64 {
        self.below_limit(2)
    }

    /// Bytes of this process's memory that count for other processes.
    pub fn shared(&self) -> u64 {
        self.shared_bytes.load(Ordering::Relaxed)
    }

    /// Sets the bytes of this process's memory that count for other processes.
    pub fn shares(&self, bytes: u64) {
        self.shared_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Lowers the bytes that count for other processes by `bytes`. Several threads may call this at once.
    pub fn shares_less(&self, bytes: u64) {
        let less = |shared: u64| Some(shared.saturating_sub(bytes));
        let _ = self.shared_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Sets whether this process shares memory since a fork, even if it pays for all of it.
    pub fn has_kin(&self, has: bool) {
        self.has_kin.store(has, Ordering::Relaxed);
    }

    /// Whether memory that is shared since a fork may be written without the engine hearing of it.
    pub fn is_shared(&self) -> bool {
        self.has_kin.load(Ordering::Relaxed) || self.shared() > 0
    }

    /// Bytes that the process is estimated to have now. Signal-safe: atomics only.
    pub fn estimate(&self, pager: &Pager<'_>) -> u64 {
        let all = self.other_bytes.load(Ordering::Relaxed)
            + self.own_bytes.load(Ordering::Relaxed)
            + pager.resident() * PAGE;
        all.saturating_sub(self.shared())
    }

    /// Reads the bytes of frames and pool anew.
    pub fn refresh(&self, pager: &Pager<'_>) {
        self.own_bytes.store(pager.own_bytes(), Ordering::Relaxed);
    }

    /// Adds pages of a range that were mapped as zeros, or found to be zeros.
    pub fn mapped_zeros(&self, pages: u64) {
        self.zeros_bytes.fetch_add(pages * PAGE, Ordering::Relaxed);
    }

    /// Bytes of anonymous memory that isn't managed pages, frames or pool, when last measured.
    pub fn other(&self) -> u64 {
        self.other_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that are known exactly: managed resident pages, frames and the pool.
    pub fn known(&self, pager: &Pager<'_>) -> u64 {
        pager.resident() * PAGE + pager.own_bytes()
    }

    /// Notes a measurement: the kernel says that the process has `anonymous_bytes`. `known` is
    /// [`Budget::known`] just before the kernel was asked, because it may have become less since. `before` is
    /// the other memory as measured before, or [`u64::MAX`] if that isn't known.
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

    /// Halves the bytes of zeros when it is time. One thread calls this.
    pub fn age_zeros(&self, now_ns: u64) {
        if now_ns >= self.halved_ns.load(Ordering::Relaxed) + HALVED_NS {
            self.halved_ns.store(now_ns, Ordering::Relaxed);
            let zeros = self.zeros_bytes.load(Ordering::Relaxed);
            self.zeros_bytes.fetch_sub(zeros.div_ceil(2), Ordering::Relaxed);
        }
    }

    /// Wakes the keeper, so that it looks.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Relaxed);
        futex::wake(&self.bell, 1);
    }

    /// The bell's present number, for [`Budget::wait`].
    pub fn bell(&self) -> u32 {
        self.bell.load(Ordering::Relaxed)
    }

    /// Waits until the bell's number differs from `seen`, or `ns` have passed.
    pub fn wait(&self, seen: u32, ns: u64) {
        futex::wait_for(&self.bell, seen, ns);
    }

    /// Whether a process that has `charged_bytes` and grows must be activated now. The answer is yes at the
    /// mark. The answer is yes earlier if the process would pass the mark before the keeper can look again
    /// and has registered its mappings. Otherwise a program that fills memory fast would be far over its
    /// budget before the first page is evicted.
    pub fn must_activate(&self, charged_bytes: u64, growth_bytes_per_us: u64) -> bool {
        charged_bytes + growth_bytes_per_us * TAKE_OVER_US >= self.activate_at()
    }

    /// Nanoseconds after which the process must be looked at again. Within bounds, the process needs at least
    /// that long to reach the mark, at the fastest rate at which memory can be touched. A look costs 5 µs.
    pub fn look_again_ns(&self, charged_bytes: u64, growth_bytes_per_us: u64) -> u64 {
        // First touches with huge pages reach some 8 GB/s on two threads: 8 bytes in a nanosecond.
        let headroom_ns = self.activate_at().saturating_sub(charged_bytes) / 8;
        // A process that grows by more than 100 bytes in a microsecond may be looked at more often.
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
    /// The bytes that the process had at the last look, and when that look began.
    last: Option<(u64, u64)>,
}

impl Growth {
    /// Returns the growth since the last look. The process has `bytes`, measured at some moment of `look_ns`.
    /// The thread that looks may lose its CPU at any point of a look while the program goes on. So growth is
    /// spread over the longest time in which it can have happened. Otherwise a pause could make a slow
    /// program look like one that must be activated at once.
    pub fn bytes_per_us(&mut self, bytes: u64, look_ns: Range<u64>) -> u64 {
        match self.last.replace((bytes, look_ns.start)) {
            Some((had, since_ns)) => bytes.saturating_sub(had) * 1000 / (look_ns.end - since_ns).max(1),
            None => 0,
        }
    }
}

/// Microseconds from a look until everything is registered, on busy CPUs: to wake up, start threads and
/// register.
const TAKE_OVER_US: u64 = 20_000;

/// Returns the bytes of anonymous memory that isn't `known`. Up to `zeros` of the known bytes may take no
/// memory yet. The result is at least what is left over if they all take memory, and at most `zeros` more.
/// Between these bounds the result is what was measured `before`.
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

    /// The gap is what comes in within GAP_NS, within bounds.
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

    /// Threads that look after each of their faults need less headroom than the keeper, but what they bring
    /// along needs some.
    #[test]
    fn marks_of_threads_that_take_pages_themselves_lie_nearer_to_the_limit() {
        let [along, start] = [512 << 10, 768 << 10];
        for (mib, start, near) in [(1024, 4 * MIB, 2 * MIB), (256, MIB, along), (64, start, along)] {
            let budget = Budget::new(mib * MIB);
            let below_limit = |mark| mib * MIB - mark;
            assert_eq!(
                [budget.inline_start_at(), budget.inline_near_limit()].map(below_limit),
                [start, near]
            );
            budget.shares(1);
            assert_eq!(
                budget.inline_start_at(),
                budget.start_at(),
                "what is shared is written without a fault"
            );
            assert_eq!(budget.inline_near_limit(), budget.near_limit());
        }
        // One process of many has no memory to spare.
        let budget = Budget::new(4096 * MIB);
        budget.allow(16 * MIB, 256);
        assert_eq!(budget.inline_start_at(), budget.start_at());
        assert_eq!(budget.inline_near_limit(), budget.near_limit());
    }

    /// Several threads that evicted shared pages at once lost each other's updates. The process then believed
    /// that other processes paid for those pages.
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
        // If the program gave pages up, the count falls. The rate is zero then, not negative.
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
        // The same holds however slowly pages come in.
        let budget = Budget::new(4096 * MIB);
        (1..=9_000).for_each(|ms| budget.have_come_in(0, ms * MS));
        assert!(budget.stop_at() > Budget::new(4096 * MIB).stop_at());
        assert!(budget.start_at() + u64::from(budget.together()) * PAGE <= budget.near_limit());
        // One process of many in a large budget has a small gap.
        let budget = Budget::new(4096 * MIB);
        budget.allow(16 * MIB, 256);
        assert_eq!(budget.together(), 64);
        assert!(budget.start_at() + 64 * PAGE <= budget.limit_bytes());
    }

    /// A keeper that lost its CPU after its first look activated a program of 58 MiB under a budget of 512
    /// MiB.
    #[test]
    fn growth_while_nobody_looked_is_not_fast() {
        let ms = |ms: u64| ms * 1_000_000;
        let mut growth = Growth::default();
        assert_eq!(growth.bytes_per_us(MIB, 0..ms(100)), 0, "nothing to compare with");
        assert_eq!(growth.bytes_per_us(49 * MIB, ms(100)..ms(100) + 20_000), 48 * MIB / 100_020);
        // Without pauses the growth is exact: 16 MiB in 2 ms.
        assert_eq!(growth.bytes_per_us(65 * MIB, ms(102) - 10_000..ms(102)), 16 * MIB / 2_000);
        // A process that has less than before hasn't grown.
        assert_eq!(growth.bytes_per_us(60 * MIB, ms(110)..ms(111)), 0);
    }

    #[test]
    fn other_memory_is_the_difference_while_nothing_was_mapped_as_zeros() {
        assert_eq!(other(50 * MIB, 40 * MIB, 0, 3 * MIB), 10 * MIB);
        assert_eq!(other(50 * MIB, 40 * MIB, 0, UNKNOWN), 10 * MIB);
        assert_eq!(other(30 * MIB, 40 * MIB, 0, 3 * MIB), 0, "some of the known pages take no memory");
    }

    /// A worker of stress-ng was 6 MiB over its budget of 115 MiB. It had read its new buffer, which hid the
    /// memory of everything that isn't managed, and then wrote the buffer without a fault.
    #[test]
    fn pages_of_zeros_do_not_hide_other_memory() {
        // 6 MiB of other memory; 100 MiB are read as zeros, then written.
        let mut found = other(6 * MIB, 0, 0, UNKNOWN);
        for written in [0, 50, 94, 100] {
            found = other((6 + written) * MIB, 100 * MIB, 100 * MIB, found);
            assert_eq!(found, 6 * MIB, "{written} MiB are written");
        }
        // The process is activated with all of these zeros in place.
        assert_eq!(other(16 * MIB, 100 * MIB, 90 * MIB, UNKNOWN), 6 * MIB);
        // More other memory is believed at once. Less is believed only once there are fewer zeros.
        assert_eq!(other(120 * MIB, 100 * MIB, 100 * MIB, found), 20 * MIB);
        assert_eq!(other(16 * MIB, 14 * MIB, MIB, found), 3 * MIB);
    }
}
