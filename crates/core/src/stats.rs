//! Counters, gauges and latencies, one table each. The names in `--stats` JSON, in the summary and in the
//! docs come from here. A counter has Linux's name where Linux counts the same thing.
//!
//! Counters only rise, and all threads of a process share them. A reader subtracts an earlier value. The
//! counters live in memory that the driver hands over. The live runtime puts them into the session's shared
//! memory, so that the supervisor can read them however the program died.

use core::sync::atomic::{AtomicU64, Ordering};

macro_rules! table {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident = $text:literal, $unit:literal;)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum $name { $($(#[doc = $doc])+ $variant),+ }
        impl $name {
            /// Every row, in the order of the table.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];
            /// Rows in the table.
            pub const COUNT: usize = Self::ALL.len();
            /// The name that users see.
            pub const fn name(self) -> &'static str { match self { $($name::$variant => $text),+ } }
            /// The unit that the row counts in.
            pub const fn unit(self) -> &'static str { match self { $($name::$variant => $unit),+ } }
            /// One sentence for the user.
            pub const fn help(self) -> &'static str { match self { $($name::$variant => concat!($($doc),+)),+ } }
        }
    };
}

table! {
    /// Values that only rise.
    Counter {
        /// Pages read from areas.
        Pswpin = "pswpin", "pages";
        /// Pages written to areas.
        Pswpout = "pswpout", "pages";
        /// Pages that came back from the compressed pool.
        Zswpin = "zswpin", "pages";
        /// Pages stored in the compressed pool.
        Zswpout = "zswpout", "pages";
        /// Pages moved from the pool to an area.
        Zswpwb = "zswpwb", "pages";
        /// All-zero pages that came back without I/O.
        SwpinZero = "swpin_zero", "pages";
        /// All-zero pages that went out without I/O.
        SwpoutZero = "swpout_zero", "pages";
        /// Pages of one repeated word that came back.
        SwpinSame = "swpin_same", "pages";
        /// Pages that came back from where a fork's parent had put them.
        SwpinInherited = "swpin_inherited", "pages";
        /// Pages of one repeated word that went out.
        SwpoutSame = "swpout_same", "pages";
        /// Pages brought in before anybody asked for them (readahead).
        SwapRa = "swap_ra", "pages";
        /// Pages of readahead that were then used.
        SwapRaHit = "swap_ra_hit", "pages";
        /// Faults on a page that readahead was just bringing in.
        SwapRaJoined = "swap_ra_joined", "faults";
        /// First touches of memory that was never there, after the budget was reached.
        FaultFirst = "fault_first", "faults";
        /// Pages of zeros that came along with a neighbour's first touch.
        ZeroAhead = "zero_ahead", "pages";
        /// Faults on pages still uncompressed in a frame: parked, or being written (minor faults).
        FaultParked = "fault_parked", "faults";
        /// Faults served from the pool, or from a repeated word (zeros too).
        FaultPool = "fault_pool", "faults";
        /// Faults that read an area.
        FaultArea = "fault_area", "faults";
        /// Faults of fault_area whose thread polled for the read and saw it complete, instead of sleeping.
        FaultPolled = "fault_polled", "faults";
        /// First writes to write-protected pages: pages only read before activation, or pages whose eviction
        /// by copying was given up.
        FaultWrite = "fault_write", "faults";
        /// Faults on a page that another thread was already moving.
        FaultJoined = "fault_joined", "faults";
        /// Faults on a page that was already in memory when the fault's message was read.
        FaultSpurious = "fault_spurious", "faults";
        /// Faults on pages whose only copy could not be read: the program got SIGBUS.
        FaultLost = "fault_lost", "faults";
        /// Pages taken out of the program's memory.
        EvictTaken = "evict_taken", "pages";
        /// Pages of evict_taken that were evicted by the thread that had just faulted.
        EvictInline = "evict_here", "pages";
        /// Pages of evict_taken that were evicted in a lull, while faulting threads waited.
        EvictLull = "evict_lull", "pages";
        /// Pages that could not be taken because the kernel or a device held them.
        EvictBusy = "evict_busy", "pages";
        /// Pages that the kernel reported as absent when they were to be evicted.
        EvictGone = "evict_gone", "pages";
        /// Unchanged pages evicted without a write or a compression, because their slot or pool object still
        /// had the same bytes.
        EvictClean = "evict_clean", "pages";
        /// Parked pages put back into the program because no other place was free.
        EvictPutBack = "evict_put_back", "pages";
        /// Pages that the clock hand passed over because they came back recently.
        ClockSpared = "clock_spared", "pages";
        /// Victims chosen because a stream had gone through them.
        EvictBehind = "evict_behind", "pages";
        /// Eviction batches by the keeper (background reclaim).
        ReclaimBackground = "reclaim_background", "batches";
        /// Eviction batches by a thread that was serving a fault.
        ReclaimDirect = "reclaim_direct", "batches";
        /// Stores refused because the pool was at its limit.
        PoolLimitHit = "pool_limit_hit", "pages";
        /// Pages that don't compress, stored in the pool as they are.
        StoredIncompressible = "stored_incompressible", "pages";
        /// Objects of the pool that were old and made shorter.
        PoolDensified = "pool_densified", "pages";
        /// Objects moved to make whole pool blocks free.
        PoolMoved = "pool_moved", "objects";
        /// Write requests that areas have carried out.
        AreaWrites = "area_writes", "requests";
        /// Slots written. Divided by area_writes: slots in a mean write. pswpout divided by it: pages that
        /// share a slot.
        AreaSlots = "area_slots", "slots";
        /// Pages of areas that were discarded on the disk.
        Discarded = "discarded", "pages";
        /// Failed writes: the pages were kept.
        WriteErrors = "write_errors", "pages";
        /// Failed reads: the pages are lost.
        ReadErrors = "read_errors", "pages";
        /// Pages that found no free slot in any area.
        AreaFull = "area_full", "pages";
        /// Times that memory stayed over the budget because nothing could be evicted.
        OverBudget = "over_budget", "times";
        /// Forks refused with EAGAIN or ENOMEM because pages were evicted.
        ForkRefused = "fork_refused", "calls";
        /// Ranges of memory that Farpage took over.
        Registered = "registered", "calls";
        /// Changes of managed mappings by the program (munmap, mremap, madvise, ...).
        MapChanges = "map_changes", "calls";
    }
}

table! {
    /// Values that rise and fall. A gauge that is named a peak keeps the highest value seen, and so does
    /// `Active`.
    Gauge {
        /// Managed pages in the program's memory.
        Resident = "resident", "pages";
        /// Pages that are out: parked, being written, same-filled, in the pool, on an area, or with a parent.
        Evicted = "evicted", "pages";
        /// Pages in the compressed pool, pages in memory that kept their object included.
        Stored = "stored_pages", "pages";
        /// Memory of the pool.
        PoolBytes = "pool_total_size", "bytes";
        /// Compressed bytes in the pool, without the pool's own waste.
        PoolPayload = "pool_payload", "bytes";
        /// Slots in use.
        SlotsUsed = "slots_used", "slots";
        /// The process's anonymous memory when last measured.
        Anonymous = "anonymous", "bytes";
        /// The highest anonymous memory measured.
        AnonymousPeak = "anonymous_peak", "bytes";
        /// The most memory the program had at once: in RAM and evicted.
        ProgramPeak = "program_peak", "bytes";
        /// The pool's largest size.
        PoolPeak = "pool_peak", "bytes";
        /// Pages that were in the pool when the pool was largest.
        StoredPeak = "stored_peak", "pages";
        /// Registered managed memory.
        ManagedBytes = "managed_bytes", "bytes";
        /// 1 once the budget was reached and eviction began.
        Active = "active", "flag";
    }
}

table! {
    /// Kinds of fault whose latency is recorded. The latency of a fault begins when the serving thread begins
    /// with the fault, and ends when the serving thread has woken the faulting thread.
    Latency {
        /// First touch.
        First = "first", "ns";
        /// From the frame in which the page was parked.
        Parked = "parked", "ns";
        /// From the pool, from a repeated word (zeros too), or from a frame that is being written.
        Pool = "pool", "ns";
        /// From an area.
        Area = "area", "ns";
    }
}

impl Gauge {
    /// Whether the gauge keeps the highest value seen rather than the present one.
    pub const fn is_peak(self) -> bool {
        matches!(
            self,
            Gauge::AnonymousPeak | Gauge::ProgramPeak | Gauge::PoolPeak | Gauge::StoredPeak | Gauge::Active
        )
    }
}

/// Buckets of a latency histogram: four to an octave, from 4 ns up. The last bucket takes all longer
/// durations.
pub const BUCKETS: usize = 160;

/// Durations in buckets. Each bucket is a quarter of an octave wide, so its upper bound is at most 1.25 times
/// its lower bound. So a percentile is at most 25 % too high.
#[repr(C)]
pub struct Histogram {
    count: AtomicU64,
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    const fn bucket_of(ns: u64) -> usize {
        let ns = if ns < 4 { 4 } else { ns };
        let octave = 63 - ns.leading_zeros() as usize;
        let quarter = ((ns >> (octave - 2)) & 3) as usize;
        let bucket = octave * 4 + quarter;
        if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
    }

    /// Returns the upper bound of a bucket in ns.
    const fn bucket_limit_ns(bucket: usize) -> u64 {
        let (octave, quarter) = (bucket / 4, (bucket % 4) as u64);
        if octave < 2 { 4 } else { (quarter + 5) << (octave - 2) }
    }

    /// Adds one duration. Safe in a signal handler, because it uses only atomics.
    pub fn record(&self, ns: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
        self.max_ns.fetch_max(ns, Ordering::Relaxed);
        self.buckets[Self::bucket_of(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds this histogram to another one, and becomes empty.
    fn move_to(&self, sum: &Histogram) {
        sum.max_ns.fetch_max(self.max_ns.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        move_count(&self.count, &sum.count);
        move_count(&self.sum_ns, &sum.sum_ns);
        for (bucket, total) in self.buckets.iter().zip(&sum.buckets) {
            move_count(bucket, total);
        }
    }

    /// Adds this histogram to a plain copy. Sums stop at their largest value, because a program may have
    /// written over its counters, and they can then be anything.
    pub fn add_to(&self, sum: &mut LatencySummary) {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        sum.count = sum.count.saturating_add(load(&self.count));
        sum.sum_ns = sum.sum_ns.saturating_add(load(&self.sum_ns));
        sum.max_ns = sum.max_ns.max(load(&self.max_ns));
        for (total, bucket) in sum.buckets.iter_mut().zip(&self.buckets) {
            *total = total.saturating_add(load(bucket));
        }
    }
}

/// Adds a count to a sum, and sets the count to zero. The sum stops at the largest value, because a program
/// may have written over its counts.
fn move_count(count: &AtomicU64, sum: &AtomicU64) {
    let count = count.swap(0, Ordering::Relaxed);
    if count > 0 {
        let added = |sum: u64| Some(sum.saturating_add(count));
        let _ = sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
    }
}

/// A plain copy of one or several histograms.
#[derive(Clone)]
pub struct LatencySummary {
    /// Durations recorded.
    pub count: u64,
    /// Sum of the durations in ns.
    pub sum_ns: u64,
    /// The longest duration in ns.
    pub max_ns: u64,
    buckets: [u64; BUCKETS],
}

impl Default for LatencySummary {
    fn default() -> Self {
        LatencySummary { count: 0, sum_ns: 0, max_ns: 0, buckets: [0; BUCKETS] }
    }
}

impl LatencySummary {
    /// Mean duration in ns, or 0 if nothing was recorded.
    pub const fn mean_ns(&self) -> u64 {
        match self.sum_ns.checked_div(self.count) {
            Some(mean) => mean,
            None => 0,
        }
    }

    /// Returns the duration that `percent` of all durations are at or below. The result is a bucket's upper
    /// bound, and never above the maximum.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        // Rounded up: the 99th percentile of ten durations is the longest of them.
        let below = self.count as f64 * percent / 100.0;
        let wanted = (below as u64 + u64::from(below > (below as u64) as f64)).max(1);
        let mut seen = 0_u64;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen = seen.saturating_add(*count);
            if seen >= wanted {
                return Histogram::bucket_limit_ns(bucket).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// Adds another summary to this one.
    pub fn add(&mut self, other: &LatencySummary) {
        self.count = self.count.saturating_add(other.count);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        for (total, bucket) in self.buckets.iter_mut().zip(&other.buckets) {
            *total = total.saturating_add(*bucket);
        }
    }
}

/// All counters, gauges and latencies of one process. All-zero bytes are a valid, fresh value, so `Stats` can
/// live in new memory.
#[repr(C)]
pub struct Stats {
    counters: [AtomicU64; Counter::COUNT],
    gauges: [AtomicU64; Gauge::COUNT],
    latencies: [Histogram; Latency::COUNT],
}

impl Stats {
    /// Adds one to a counter.
    pub fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }
    /// Adds `n` to a counter.
    pub fn add(&self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_add(n, Ordering::Relaxed);
    }
    /// A counter's value.
    pub fn get(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }
    /// Sets a gauge.
    pub fn set(&self, gauge: Gauge, value: u64) {
        self.gauges[gauge as usize].store(value, Ordering::Relaxed);
    }
    /// Raises a gauge to `value` if it was lower.
    pub fn raise(&self, gauge: Gauge, value: u64) {
        // A peak is hardly ever new. So look first, before writing to a cache line that other threads write
        // too.
        if self.gauge(gauge) < value {
            self.gauges[gauge as usize].fetch_max(value, Ordering::Relaxed);
        }
    }
    /// Raises a peak to at least a value. If the peak rises, the other gauge becomes what there was at the
    /// peak.
    pub fn raise_with(&self, peak: (Gauge, u64), at_the_peak: (Gauge, u64)) {
        if self.gauge(peak.0) < peak.1 {
            self.raise(peak.0, peak.1);
            self.set(at_the_peak.0, at_the_peak.1);
        }
    }
    /// Adds `n` to a gauge. Returns the new value.
    pub fn gauge_add(&self, gauge: Gauge, n: u64) -> u64 {
        self.gauges[gauge as usize].fetch_add(n, Ordering::Relaxed).wrapping_add(n)
    }
    /// Subtracts `n` from a gauge, which must be at least `n`.
    pub fn gauge_sub(&self, gauge: Gauge, n: u64) {
        let before = self.gauges[gauge as usize].fetch_sub(n, Ordering::Relaxed);
        debug_assert!(before >= n, "{} fell below zero: {before} - {n}", gauge.name());
    }
    /// A gauge's value.
    pub fn gauge(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize].load(Ordering::Relaxed)
    }
    /// The histogram of one kind of fault.
    pub fn latency(&self, kind: Latency) -> &Histogram {
        &self.latencies[kind as usize]
    }
    /// Moves the numbers of a process that has ended into a sum. Counters and latencies are added, and peaks
    /// are the highest of any process. Afterwards all of these numbers are zero.
    pub fn move_to(&self, sum: &Stats) {
        for (counter, total) in self.counters.iter().zip(&sum.counters) {
            move_count(counter, total);
        }
        let peak = |gauge| (gauge, self.gauge(gauge));
        sum.raise_with(peak(Gauge::PoolPeak), peak(Gauge::StoredPeak));
        for gauge in Gauge::ALL {
            if gauge.is_peak() && *gauge != Gauge::StoredPeak {
                sum.raise(*gauge, self.gauge(*gauge));
            }
            self.set(*gauge, 0);
        }
        for (latency, total) in self.latencies.iter().zip(&sum.latencies) {
            latency.move_to(total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Box<Stats> {
        // SAFETY: `Stats` consists only of atomic integers, for each of which all-zero bytes are valid.
        unsafe { Box::new(core::mem::zeroed()) }
    }

    /// Noise had filled the pool with few pages, and text later a smaller pool with many. The summary said
    /// that the many pages had taken the large pool.
    #[test]
    fn pages_at_the_peak_are_those_of_the_peak() {
        let stats = fresh();
        for (bytes, pages) in [(64, 16), (30, 60), (65, 17)] {
            stats.raise_with((Gauge::PoolPeak, bytes), (Gauge::StoredPeak, pages));
            let expected = if bytes == 65 { (65, 17) } else { (64, 16) };
            assert_eq!((stats.gauge(Gauge::PoolPeak), stats.gauge(Gauge::StoredPeak)), expected);
        }
    }

    /// Whatever a process has told is told once, by the sum.
    #[test]
    fn numbers_that_move_are_in_the_sum_alone() {
        let sum = fresh();
        for (count, peak, stored) in [(3, 60, 7), (4, 50, 8), (u64::MAX, 50, 9)] {
            let stats = fresh();
            stats.add(Counter::Pswpin, count);
            stats.raise_with((Gauge::PoolPeak, peak), (Gauge::StoredPeak, stored));
            stats.latency(Latency::Pool).record(peak);
            stats.move_to(&sum);
            assert_eq!((stats.get(Counter::Pswpin), stats.gauge(Gauge::PoolPeak)), (0, 0));
            let mut rest = LatencySummary::default();
            stats.latency(Latency::Pool).add_to(&mut rest);
            assert_eq!((rest.count, rest.max_ns, rest.buckets.iter().sum::<u64>()), (0, 0, 0));
        }
        // A sum that can't be is the largest number, and doesn't begin anew.
        assert_eq!(sum.get(Counter::Pswpin), u64::MAX);
        assert_eq!((sum.gauge(Gauge::PoolPeak), sum.gauge(Gauge::StoredPeak)), (60, 7));
        let mut latencies = LatencySummary::default();
        sum.latency(Latency::Pool).add_to(&mut latencies);
        assert_eq!((latencies.count, latencies.sum_ns, latencies.max_ns), (3, 160, 60));
    }

    #[test]
    fn percentile_is_within_a_bucket_of_the_truth() {
        let stats = fresh();
        (1..=1000).for_each(|us| stats.latency(Latency::Pool).record(us * 1000));
        let mut summary = LatencySummary::default();
        stats.latency(Latency::Pool).add_to(&mut summary);
        let p50 = summary.percentile_ns(50.0);
        assert!((500_000..=600_000).contains(&p50), "{p50}");
        assert_eq!((summary.max_ns, summary.count), (1_000_000, 1000));
        assert_eq!(summary.percentile_ns(100.0), 1_000_000);
    }

    /// Nine quick faults and one of two seconds had a p99 that was quick, too.
    #[test]
    fn percentile_of_few_is_at_or_above_as_many_as_it_says() {
        let stats = fresh();
        (0..9).for_each(|_| stats.latency(Latency::Pool).record(12_000));
        stats.latency(Latency::Pool).record(2_000_000_000);
        let mut summary = LatencySummary::default();
        stats.latency(Latency::Pool).add_to(&mut summary);
        assert_eq!(summary.percentile_ns(99.0), 2_000_000_000);
        let [p50, p90, p1] = [50.0, 90.0, 1.0].map(|percent| summary.percentile_ns(percent));
        assert!(p50 < 20_000 && (p50, p50) == (p90, p1), "{p50} {p90} {p1}");
        assert_eq!(LatencySummary::default().percentile_ns(99.0), 0);
    }

    #[test]
    fn every_duration_lies_below_its_buckets_limit() {
        for ns in [0, 1, 3, 4, 5, 7, 8, 1023, 1024, 123_456_789, u64::from(u32::MAX) * 8] {
            assert!(ns <= Histogram::bucket_limit_ns(Histogram::bucket_of(ns)), "{ns}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Counter::ALL.iter().map(|c| c.name()).collect();
        names.extend(Gauge::ALL.iter().map(|g| g.name()));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
