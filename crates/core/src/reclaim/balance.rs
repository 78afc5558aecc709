//! Whether the pool or the program should have more of the memory that they share.
//!
//! A page of memory holds one page of the program, which costs nothing to touch, or several in the pool, which cost a fault each.
//! What one more would be worth on either side shows in what comes back:
//!
//! - a page that was out for at most [`SOON`] borders of epochs would still be there if the program had so much more memory, a tenth: a
//!   lap of the hand would be so much longer (`recency`). Its fault would not have been.
//! - what was one of the oldest objects in the pool would have come from an area if the pool were smaller. (What any object is worth in
//!   the mean says nothing: where those that are young come back all the time, all others may be of no use.)
//!
//! Where all pages are touched alike and compress, few come back soon, and the pool grows to its limit. Where what is in use all
//! the time almost fits, nearly all come back soon: then each page that the program gets saves a fault again and again, and the
//! pool holds what nobody asks for. (A graph of 128 MiB whose ranks take 12, ranked under 32M: more than 100 s with a pool of
//! 16 MiB, which left the ranks 10, and 2 s with one of 8; `farpage load pagerank`, `--pool`.)
//!
//! Faults count it here, one page of eight; the keeper decides now and then.
#![forbid(unsafe_code)]

use super::recency::is_counted;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::units::PageIndex;

/// Borders of epochs between going and coming back, at most: an epoch and a half in the mean.
const SOON: u32 = 1;
/// What the program would have more, of what it has: what is out for less comes back soon.
const MORE: u64 = 10;
/// Pages that are counted before anything is decided.
const ENOUGH: u32 = 256;
/// What comes back soon must cost so many times what the pool saves: of pages that are touched evenly a few come soon, too, and by
/// chance some more. Where it matters it is ten times as much.
const CLEARLY: u64 = 2;

/// Where a page came back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CameFrom {
    /// A frame, or nowhere: it was a repeated word.
    Near,
    /// The pool.
    Pool {
        /// It was one of the oldest objects.
        is_old: bool,
    },
    /// An area.
    Area,
}

/// What faults cost, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// From the pool.
    pub pool_ns: u64,
    /// From an area.
    pub area_ns: u64,
}

/// Who should have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Too little is known yet, or it is about even.
    Stay,
    /// The program.
    SmallerPool,
    /// The pool.
    LargerPool,
}

/// What came back lately.
#[derive(Default)]
pub struct Balance {
    /// All that is counted.
    came: AtomicU32,
    /// Soon, from the pool or a frame, and from an area.
    soon_near: AtomicU32,
    soon_area: AtomicU32,
    /// From the pool, where it was one of the oldest.
    old: AtomicU32,
    /// The same for a walk, which an area would serve about as fast.
    old_walked: AtomicU32,
}

impl Balance {
    /// A touch brought this page back, `out` borders of epochs after it went, if that is known.
    pub fn came_back(&self, page: PageIndex, from: CameFrom, out: Option<u32>) {
        if !is_counted(page) {
            return;
        }
        let is_soon = out.is_some_and(|out| out <= SOON);
        let count = match from {
            CameFrom::Area if is_soon => Some(&self.soon_area),
            CameFrom::Pool { is_old: true } => Some(&self.old),
            _ if is_soon => Some(&self.soon_near),
            _ => None,
        };
        count.into_iter().chain([&self.came]).for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
    }

    /// A walk had this page brought back from the pool, where it was one of the oldest.
    pub fn walked(&self, page: PageIndex) {
        if is_counted(page) {
            self.old_walked.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether enough came back to decide.
    pub fn is_ready(&self) -> bool {
        self.came.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Who should have more, the program with so many resident bytes or the pool with these. What came back is forgotten then.
    pub fn decide(&self, costs: Costs, resident_bytes: u64, pool_bytes: u64) -> Verdict {
        let take = |count: &AtomicU32| u64::from(count.swap(0, Ordering::Relaxed));
        take(&self.came);
        let soon_ns = take(&self.soon_near) * costs.pool_ns + take(&self.soon_area) * costs.area_ns;
        let old_ns = take(&self.old) * costs.area_ns.saturating_sub(costs.pool_ns)
            + take(&self.old_walked) * costs.pool_ns;
        // Of the last quarter, what is in as much memory as the program would have more.
        let lost_ns = old_ns * 4 * (resident_bytes / MORE) / pool_bytes.max(1);
        if soon_ns > lost_ns * CLEARLY {
            Verdict::SmallerPool
        } else if lost_ns > soon_ns {
            Verdict::LargerPool
        } else {
            Verdict::Stay
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const COSTS: Costs = Costs { pool_ns: 4_000, area_ns: 60_000 };

    /// So many pages that came back: from where, and after how many borders of epochs.
    fn decide(came: &[(u64, CameFrom, Option<u32>)], resident: u64, pool: u64) -> Verdict {
        let balance = Balance::default();
        for &(count, from, out) in came {
            let counted = (0..).map(PageIndex).filter(|page| is_counted(*page));
            counted.take(count as usize).for_each(|page| balance.came_back(page, from, out));
        }
        assert_eq!(
            balance.is_ready(),
            came.iter().map(|(count, ..)| count).sum::<u64>() >= u64::from(ENOUGH)
        );
        let verdict = balance.decide(COSTS, resident * MIB, pool * MIB);
        assert!(!balance.is_ready(), "it is forgotten");
        assert_eq!(balance.decide(COSTS, resident * MIB, pool * MIB), Verdict::Stay);
        verdict
    }

    const OLD: CameFrom = CameFrom::Pool { is_old: true };
    const YOUNG: CameFrom = CameFrom::Pool { is_old: false };

    #[test]
    fn what_is_touched_evenly_belongs_into_the_pool() {
        // Twice as much as the program has, half of it in a pool in which it takes a third: one in 16 is out for an epoch.
        let came =
            [(20, YOUNG, Some(1)), (10, CameFrom::Area, Some(0)), (250, YOUNG, Some(9)), (90, OLD, None)];
        assert_eq!(decide(&came, 64, 21), Verdict::LargerPool);
    }

    #[test]
    fn what_comes_back_at_once_should_not_go() {
        // What is in use all the time is in the pool's younger half, and the rest of it for nothing.
        let came =
            [(50, CameFrom::Near, Some(0)), (250, YOUNG, Some(8)), (50, YOUNG, Some(1)), (1, OLD, Some(30))];
        assert_eq!(decide(&came, 4, 8), Verdict::SmallerPool);
        let came = [(100, CameFrom::Near, Some(0)), (60, CameFrom::Area, Some(1)), (100, OLD, Some(40))];
        assert_eq!(decide(&came, 10, 16), Verdict::SmallerPool);
        // The smaller the pool becomes, the more each of its objects is worth.
        assert_eq!(decide(&came, 10, 8), Verdict::Stay);
        assert_eq!(decide(&came, 10, 2), Verdict::LargerPool);
    }

    #[test]
    fn nothing_is_decided_by_walks_or_by_what_the_pool_has_no_part_in() {
        assert_eq!(decide(&[(1000, CameFrom::Area, Some(50))], 10, 10), Verdict::Stay);
        let balance = Balance::default();
        (0..100_000).map(PageIndex).for_each(|page| balance.walked(page));
        assert!(!balance.is_ready(), "walks alone decide nothing");
    }

    #[test]
    fn one_page_of_eight_is_counted_whatever_the_stride() {
        let balance = Balance::default();
        for stride in [1, 8, 64] {
            (0..800).for_each(|at| balance.came_back(PageIndex(at * stride), CameFrom::Area, Some(0)));
            assert_eq!(balance.came.swap(0, Ordering::Relaxed), 100, "{stride}");
        }
    }
}
