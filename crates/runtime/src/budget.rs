//! The budget: how much memory the process has, and when that is too much.
//!
//! What we promise is what the user can check: `Anonymous` in smaps_rollup stays below the limit. Part of it
//! we know to the page (managed resident pages, frames, the pool); the rest, memory that we don't manage and
//! our own tables, is measured now and then as the difference to what the kernel says.
//!
//! ```text
//!            limit  ─────────────  a thread that needs memory evicts by itself (direct reclaim)
//!   limit -   gap   ─────────────  the background thread starts evicting
//!   limit - 2 gap   ─────────────  ... and stops
//!   limit - 3 gap   ─────────────  activation: mappings are registered
//! ```

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::pager::Pager;
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_os::futex;

const PAGE: u64 = PAGE_BYTES as u64;

/// Limit, marks, and the last measurement.
pub struct Budget {
    limit_bytes: u64,
    gap_bytes: u64,
    /// Anonymous memory that isn't managed pages, frames or pool, when last measured.
    other_bytes: AtomicU64,
    /// Frames and pool, when last looked at: exact numbers need their locks.
    own_bytes: AtomicU64,
    /// Changes when the background thread should look.
    bell: AtomicU32,
}

impl Budget {
    /// A budget of `limit_bytes`.
    pub const fn new(limit_bytes: u64) -> Budget {
        let gap = limit_bytes / 64;
        Budget {
            limit_bytes,
            gap_bytes: if gap < 1 << 20 { 1 << 20 } else { gap },
            other_bytes: AtomicU64::new(0),
            own_bytes: AtomicU64::new(0),
            bell: AtomicU32::new(0),
        }
    }

    /// The limit.
    pub const fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// From here on mappings are registered and evicted from.
    pub const fn activate_at(&self) -> u64 {
        self.limit_bytes - 3 * self.gap_bytes
    }

    /// Background eviction starts above this.
    pub const fn start_at(&self) -> u64 {
        self.limit_bytes - self.gap_bytes
    }

    /// Background eviction stops at this.
    pub const fn stop_at(&self) -> u64 {
        self.limit_bytes - 2 * self.gap_bytes
    }

    /// What we think the process has now. Signal-safe: atomics only.
    pub fn estimate(&self, pager: &Pager<'_>) -> u64 {
        self.other_bytes.load(Ordering::Relaxed)
            + self.own_bytes.load(Ordering::Relaxed)
            + pager.resident() * PAGE
    }

    /// Looks at frames and pool again.
    pub fn refresh(&self, pager: &Pager<'_>) {
        self.own_bytes.store(pager.own_bytes(), Ordering::Relaxed);
    }

    /// The kernel says that the process has `anonymous_bytes`. Pages of zeros count as resident although they
    /// take no memory until they are written, so the difference is never taken below zero: they may be
    /// written at any moment, often without a fault that we would see.
    pub fn measured(&self, pager: &Pager<'_>, anonymous_bytes: u64) {
        let own = pager.own_bytes();
        let known = pager.resident() * PAGE + own;
        self.own_bytes.store(own, Ordering::Relaxed);
        self.other_bytes.store(anonymous_bytes.saturating_sub(known), Ordering::Relaxed);
        let stats = pager.stats();
        stats.set(Gauge::Anonymous, anonymous_bytes);
        stats.raise(Gauge::AnonymousPeak, anonymous_bytes);
        let program = anonymous_bytes.saturating_sub(own) + pager.evicted() * PAGE;
        stats.raise(Gauge::ProgramPeak, program);
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

    /// Whether a process that has `anonymous_bytes` and grows must be taken over now: at the mark, or earlier if it
    /// would be past it before we could look again and have registered its mappings. Without this a program that
    /// fills memory fast would be far over its budget before the first page is evicted.
    pub const fn must_activate(&self, anonymous_bytes: u64, growth_bytes_per_us: u64) -> bool {
        anonymous_bytes + growth_bytes_per_us * TAKE_OVER_US >= self.activate_at()
    }

    /// How long the process can grow, at the fastest that memory can be touched, before it must be looked at
    /// again. Looking costs 5 µs.
    pub const fn look_again_ns(&self, anonymous_bytes: u64, growth_bytes_per_us: u64) -> u64 {
        // First touches with huge pages reach some 8 GB/s on two threads: 8 bytes in a nanosecond.
        let headroom_ns = self.activate_at().saturating_sub(anonymous_bytes) / 8;
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

/// Time to wake up, start threads and register, on busy CPUs.
const TAKE_OVER_US: u64 = 20_000;
