//! The pool's share of the budget, which the keeper adjusts between two rounds. The pool's limit follows the
//! process's part of the budget. Within that limit, memory goes where it is of more use, to the pool or to
//! the program ([`farpage_core::reclaim::balance`]).

use crate::engine::Engine;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use farpage_core::config::Codec;
use farpage_core::reclaim::balance::{Costs, Sizes, Verdict};
use farpage_core::stats::{Gauge, Latency, LatencySummary};
use farpage_core::units::PAGE_BYTES;
use farpage_core::zswap::pool::PoolUsage;

/// Steps that a limit is made of: each step is an eighth. A step down is an eighth of what the pool has, and
/// at most [`DOWN_BYTES_MAX`].
const STEP: u64 = 8;
/// Bytes of one step down, at most: what an area can write until the next step.
const DOWN_BYTES_MAX: u64 = 4 << 20;
/// Part of the budget that is always left to the pool: 1/64. The pool is where pages wait to be written
/// together.
const LEAST: u64 = 64;
/// Blocks that are always left to the pool. Each size of objects has blocks of its own.
const LEAST_BLOCKS: u64 = 64;
/// Nanoseconds that faults are taken to cost while few have been measured. The value for an area is a fast
/// disk's.
const COSTS: Costs = Costs { pool_ns: 4_000, area_ns: 60_000 };
/// Faults below which their mean latency says nothing yet.
const FEW: u64 = 64;

/// The limits of the pool.
#[derive(Default)]
pub struct PoolShare {
    /// Bytes of the process's part of the budget, when `most` was last worked out.
    for_bytes: AtomicU64,
    /// Bytes that the pool may have of this part, at most.
    most: AtomicU64,
    /// Bytes of `most` that the pool may not have at the moment.
    withheld: AtomicU64,
    /// Bytes beyond which the pool may not grow; 0 if it may.
    held_at: AtomicU64,
    /// Whether an area could be written when the limit was last worked out.
    has_area: AtomicBool,
}

impl PoolShare {
    fn is_held(&self) -> bool {
        self.held_at.load(Ordering::Relaxed) > 0
    }

    /// Keeps the pool from growing beyond `bytes`. 0 lets the pool grow again.
    fn hold(&self, bytes: u64) {
        self.held_at.store(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes that the pool may have now.
    fn limit(&self) -> u64 {
        let bytes = self.most.load(Ordering::Relaxed).saturating_sub(self.withheld.load(Ordering::Relaxed));
        match self.held_at.load(Ordering::Relaxed) {
            0 => bytes,
            held_at => bytes.min(held_at),
        }
    }
}

/// Returns the limit in bytes after a step, where the pool has `has` bytes.
fn stepped(verdict: Verdict, limit: u64, has: u64, least: u64, most: u64) -> u64 {
    match verdict {
        Verdict::Stay => limit,
        Verdict::SmallerPool => {
            // Memory that the pool may have but doesn't use is no loss. But the pool may be about to fill it.
            let from = has.clamp(limit / 2, limit);
            (from - (from / STEP).min(DOWN_BYTES_MAX)).max(least).min(limit)
        }
        Verdict::LargerPool => (limit + limit / STEP + 1).min(most),
    }
}

/// Returns the bytes to withhold when the most changes from `before` to `most`: the same part as before.
fn rescaled(withheld: u64, before: u64, most: u64) -> u64 {
    (u128::from(withheld) * u128::from(most) / u128::from(before.max(1))) as u64
}

impl Engine {
    /// Scales the pool's limits to a part of the budget of `bytes`, if that has changed noticeably.
    pub(crate) fn fit_pool(&self, bytes: u64) {
        let share = &self.pool_share;
        let before = share.for_bytes.load(Ordering::Relaxed);
        if bytes.abs_diff(before) <= before / 16 {
            return;
        }
        share.for_bytes.store(bytes, Ordering::Relaxed);
        let all = self.pager.config.pool_bytes_max;
        let most = (u128::from(all) * u128::from(bytes) / u128::from(self.budget.total_bytes())) as u64;
        let before = share.most.swap(most, Ordering::Relaxed);
        let withheld = share.withheld.load(Ordering::Relaxed);
        share.withheld.store(rescaled(withheld, before, most), Ordering::Relaxed);
        self.limit_pool();
    }

    /// Keeps the pool from growing if `hold`, or lets it grow again. A page that other processes share frees
    /// no memory when it is evicted, and takes some in the pool.
    pub(crate) fn hold_pool(&self, hold: bool) {
        if hold == self.pool_share.is_held() {
            return;
        }
        let pool = self.pager.pool();
        let least = LEAST_BLOCKS as usize * pool.block_bytes();
        self.pool_share.hold(if hold { pool.usage().bytes.max(least) as u64 } else { 0 });
        self.limit_pool();
    }

    /// Works the pool's limit out anew if the areas have filled up or failed, or can be written again.
    pub(crate) fn follow_areas(&self, has_area: bool) {
        if has_area != self.pool_share.has_area.load(Ordering::Relaxed) {
            self.limit_pool();
        }
    }

    fn limit_pool(&self) {
        let bytes = self.pool_share.limit();
        let pool = self.pager.pool();
        // Without an area to write to, pages in the pool have no other place. The limit stays above what is
        // there.
        let has_area = self.pager.areas().any_writable();
        self.pool_share.has_area.store(has_area, Ordering::Relaxed);
        let least = if has_area { 0 } else { pool.limit_of_what_is_there() };
        pool.set_limit((bytes as usize).max(least));
    }

    /// Moves memory by one step to the pool or to the program, if the pages that came back lately call for
    /// it.
    pub(crate) fn balance_pool(&self) {
        let pager = self.pager;
        if !pager.areas().any_writable() {
            // Evicted pages have no other place than the pool.
            if self.pool_share.withheld.load(Ordering::Relaxed) > 0 && pager.pool().over_accept_threshold() {
                self.step(Verdict::LargerPool, 0);
            }
        } else if pager.config.codec != Codec::None && pager.balance.is_ready() {
            let usage = pager.pool().usage();
            let verdict = pager.balance.decide(self.costs(), self.sizes(&usage));
            self.step(verdict, usage.bytes as u64);
        }
    }

    /// Makes one step of the limit, where the pool has `has` bytes.
    fn step(&self, verdict: Verdict, has: u64) {
        let share = &self.pool_share;
        let most = share.most.load(Ordering::Relaxed);
        let limit = most.saturating_sub(share.withheld.load(Ordering::Relaxed));
        let blocks = LEAST_BLOCKS * self.pager.pool().block_bytes() as u64;
        let least = (self.budget.limit_bytes() / LEAST).max(blocks).min(most);
        let after = stepped(verdict, limit, has, least, most);
        if after != limit {
            share.withheld.store(most - after, Ordering::Relaxed);
            self.limit_pool();
        }
    }

    fn sizes(&self, pool: &PoolUsage) -> Sizes {
        let page = PAGE_BYTES as u64;
        let out = self.pager.stats().gauge(Gauge::Evicted);
        Sizes {
            resident: self.pager.resident() * page,
            pool: pool.bytes as u64,
            in_pool: pool.objects as u64 * page,
            on_areas: out.saturating_sub(pool.objects as u64) * page,
        }
    }

    /// Returns the mean cost of faults from the pool and from areas.
    fn costs(&self) -> Costs {
        let mean_or = |kind, otherwise| {
            let mut summary = LatencySummary::default();
            self.pager.stats().latency(kind).add_to(&mut summary);
            if summary.count < FEW { otherwise } else { summary.mean_ns() }
        };
        Costs {
            pool_ns: mean_or(Latency::Pool, COSTS.pool_ns),
            area_ns: mean_or(Latency::Area, COSTS.area_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn same_part_is_withheld_of_another_most() {
        assert_eq!(rescaled(6 * MIB, 8 * MIB, 4 * MIB), 3 * MIB);
        assert_eq!([rescaled(0, 0, 8 * MIB), rescaled(6 * MIB, 8 * MIB, 0)], [0, 0]);
        assert_eq!(rescaled(1 << 40, 1 << 40, 1 << 41), 1 << 41);
    }

    #[test]
    fn pool_that_is_held_does_not_grow_whatever_else_it_may_have() {
        let share = PoolShare::default();
        share.most.store(20 * MIB, Ordering::Relaxed);
        share.withheld.store(2 * MIB, Ordering::Relaxed);
        assert_eq!((share.limit(), share.is_held()), (18 * MIB, false));
        share.hold(5 * MIB);
        assert_eq!((share.limit(), share.is_held()), (5 * MIB, true));
        // Neither a step nor a larger part of the budget lets the pool grow. The pool may still become
        // smaller.
        share.withheld.store(0, Ordering::Relaxed);
        share.most.store(40 * MIB, Ordering::Relaxed);
        assert_eq!(share.limit(), 5 * MIB);
        share.withheld.store(37 * MIB, Ordering::Relaxed);
        assert_eq!(share.limit(), 3 * MIB);
        share.hold(0);
        share.withheld.store(0, Ordering::Relaxed);
        assert_eq!((share.limit(), share.is_held()), (40 * MIB, false));
    }

    #[test]
    fn limit_goes_to_either_end_and_back_and_no_further() {
        // Memory that the pool may have but doesn't use is taken away faster.
        assert_eq!(stepped(Verdict::SmallerPool, 512 * MIB, 16 * MIB, MIB, 512 * MIB), 252 * MIB);
        assert_eq!(stepped(Verdict::SmallerPool, 24 * MIB, 16 * MIB, MIB, 512 * MIB), 14 * MIB);
        // The pool may have more than its limit just after the limit was lowered.
        assert_eq!(stepped(Verdict::SmallerPool, 8 * MIB, 9 * MIB, MIB, 16 * MIB), 7 * MIB);
        for (least, most) in [(MIB, 8 * MIB), (2 * MIB, 64 * MIB), (16 * MIB, 1024 * MIB), (MIB, MIB)] {
            let mut limit = most;
            for (verdict, end) in [(Verdict::SmallerPool, least), (Verdict::LargerPool, most)] {
                assert_eq!(stepped(Verdict::Stay, limit, limit, least, most), limit);
                for _ in 0..400 {
                    let after = stepped(verdict, limit, limit, least, most);
                    assert!((least..=most).contains(&after) && limit.saturating_sub(after) <= DOWN_BYTES_MAX);
                    limit = after;
                }
                assert_eq!(limit, end);
            }
        }
    }
}
