//! Whether the pool or the program should have more of the memory that they share.
//!
//! A page of memory holds one page of the program, which costs nothing to touch, or several in the pool, which cost a fault each.
//! What a tenth of the program's memory would be worth on either side shows in what comes back:
//!
//! - a page that was out for at most [`SOON`] borders of epochs would still be there if the program had so much more: a lap of the
//!   hand would be so much longer (`recency`). Its fault would not have been.
//! - one of the oldest objects in the pool would have come from an area if the pool had so much less.
//! - what comes from an area later would have come from the pool, some of it, if that had so much more. As much as it would hold, of
//!   all that areas hold: nobody knows when those pages were written.
//!
//! (What objects are worth in the mean says nothing: where the young ones come back all the time, the others may be of no use.)
//!
//! Where all pages are touched alike and compress, few come back soon, and the pool grows to its limit. Where what is in use all
//! the time almost fits, most come back soon: then each page that the program gets saves a fault again and again, and the pool
//! holds what nobody asks for. (A graph of 128 MiB whose ranks take 12, ranked under 32M: more than 100 s with a pool of 16 MiB,
//! which left the ranks 10, and 2 s with one of 8; `farpage load pagerank`, `--pool`.)
//!
//! Faults count it here, one page of eight; the keeper decides now and then.
#![forbid(unsafe_code)]

use super::recency::is_counted;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::units::PageIndex;

/// Borders of epochs between going and coming back, at most: an epoch and a half in the mean.
const SOON: u32 = 1;
/// What either side would have more, of what the program has: what is out for less comes back soon.
const MORE: u64 = 10;
/// Pages that are counted before anything is decided.
const ENOUGH: u32 = 256;
/// What comes back soon must cost so many times what the pool saves, and be one of so many pages: of pages that are touched evenly
/// a few come soon, too, and who was out for eight laps looks like it. Where it matters it is ten times as much.
const CLEARLY: u128 = 2;
const ONE_OF: u32 = 32;
/// Pages that the pool holds in the memory of one, as a rule.
const DENSITY: u128 = 2;

/// Where a page came back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CameFrom {
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

/// Where the program's pages are, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Resident ones.
    pub resident: u64,
    /// The pool's memory.
    pub pool: u64,
    /// What the pages are that it holds.
    pub in_pool: u64,
    /// What is elsewhere.
    pub on_areas: u64,
}

/// Who should have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is about even.
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
    /// Soon.
    soon_from_pool: AtomicU32,
    soon_from_area: AtomicU32,
    /// Later, from an area; and any that a walk had brought from there, where the pool would be little faster.
    later_from_area: AtomicU32,
    walked_from_area: AtomicU32,
    /// From the pool, where it was one of the oldest; later, or for a walk.
    old: AtomicU32,
    walked_old: AtomicU32,
}

impl Balance {
    /// A touch brought this page back, `out` borders of epochs after it went, if that is known.
    pub fn came_back(&self, page: PageIndex, from: CameFrom, out: Option<u32>) {
        let is_soon = out.is_some_and(|out| out <= SOON);
        self.count(
            page,
            match from {
                CameFrom::Area if is_soon => Some(&self.soon_from_area),
                CameFrom::Area => Some(&self.later_from_area),
                CameFrom::Pool { .. } if is_soon => Some(&self.soon_from_pool),
                CameFrom::Pool { is_old } => is_old.then_some(&self.old),
            },
        );
    }

    /// A walk had this page brought back.
    pub fn walked(&self, page: PageIndex, from: CameFrom) {
        self.count(
            page,
            match from {
                CameFrom::Area => Some(&self.walked_from_area),
                CameFrom::Pool { is_old } => is_old.then_some(&self.walked_old),
            },
        );
    }

    fn count(&self, page: PageIndex, also: Option<&AtomicU32>) {
        if is_counted(page) {
            also.into_iter().chain([&self.came]).for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        }
    }

    /// Whether enough came back to decide.
    pub fn is_ready(&self) -> bool {
        self.came.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Who should have more. What came back is forgotten then.
    pub fn decide(&self, costs: Costs, sizes: Sizes) -> Verdict {
        let take = |count: &AtomicU32| count.swap(0, Ordering::Relaxed);
        let (pool_ns, area_ns) = (u128::from(costs.pool_ns), u128::from(costs.area_ns));
        let (came, soon) = (take(&self.came), [take(&self.soon_from_pool), take(&self.soon_from_area)]);
        let soon_ns = u128::from(soon[0]) * pool_ns + u128::from(soon[1]) * area_ns;
        let saved_ns = |touched, walked| {
            u128::from(take(touched)) * area_ns.saturating_sub(pool_ns) + u128::from(take(walked)) * pool_ns
        };
        let more = u128::from(sizes.resident / MORE);
        // The oldest are a quarter of the objects.
        let lost_ns = saved_ns(&self.old, &self.walked_old) * 4 * more / u128::from(sizes.pool.max(1));
        let won_ns = saved_ns(&self.later_from_area, &self.walked_from_area) * DENSITY * more
            / u128::from(sizes.on_areas.max(1));
        let pool_is_worth_ns = lost_ns.max(won_ns);
        // While most of what is out is in the pool, a smaller one would have it written for the first time.
        let is_read_anyway = sizes.on_areas > sizes.in_pool;
        if is_read_anyway && soon_ns > pool_is_worth_ns * CLEARLY && (soon[0] + soon[1]) * ONE_OF >= came {
            Verdict::SmallerPool
        } else if pool_is_worth_ns > soon_ns {
            Verdict::LargerPool
        } else {
            Verdict::Stay
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const COSTS: Costs = Costs { pool_ns: 4_000, area_ns: 60_000 };
    const OLD: CameFrom = CameFrom::Pool { is_old: true };
    const YOUNG: CameFrom = CameFrom::Pool { is_old: false };

    fn sizes(resident: u64, pool: u64, on_areas: u64) -> Sizes {
        Sizes { resident: resident << 20, pool: pool << 20, in_pool: pool << 21, on_areas: on_areas << 20 }
    }

    /// So many pages that came back: from where, and after how many borders of epochs; or walked.
    fn decide(came: &[(u32, CameFrom, Option<u32>)], walked: &[(u32, CameFrom)], sizes: Sizes) -> Verdict {
        let balance = Balance::default();
        let pages = |count: u32| (0..).map(PageIndex).filter(|page| is_counted(*page)).take(count as usize);
        for &(count, from, out) in came {
            pages(count).for_each(|page| balance.came_back(page, from, out));
        }
        for &(count, from) in walked {
            pages(count).for_each(|page| balance.walked(page, from));
        }
        let all = came.iter().map(|one| one.0).chain(walked.iter().map(|one| one.0)).sum::<u32>();
        assert_eq!(balance.is_ready(), all >= ENOUGH);
        let verdict = balance.decide(COSTS, sizes);
        assert!(!balance.is_ready(), "it is forgotten");
        assert_eq!(balance.decide(COSTS, sizes), Verdict::Stay);
        verdict
    }

    #[test]
    fn what_is_touched_evenly_belongs_into_the_pool() {
        // Twice as much as the program has, half of it in a pool in which it takes a third: one in 16 is out for an epoch.
        let came =
            [(20, YOUNG, Some(1)), (10, CameFrom::Area, Some(0)), (250, YOUNG, Some(9)), (90, OLD, None)];
        assert_eq!(decide(&came, &[], sizes(64, 21, 64)), Verdict::LargerPool);
    }

    #[test]
    fn what_comes_back_at_once_should_not_go() {
        // What is in use all the time is in the pool's younger half, and the rest of it for nothing.
        let came = [(250, YOUNG, Some(8)), (100, YOUNG, Some(1)), (1, OLD, Some(30))];
        assert_eq!(decide(&came, &[(200, CameFrom::Area)], sizes(4, 8, 60)), Verdict::SmallerPool);
        let came = [(100, YOUNG, Some(0)), (60, CameFrom::Area, Some(1)), (100, OLD, Some(40))];
        assert_eq!(decide(&came, &[], sizes(10, 16, 60)), Verdict::SmallerPool);
        // The smaller the pool becomes, the more each of its objects is worth.
        assert_eq!(decide(&came, &[], sizes(10, 8, 60)), Verdict::Stay);
        assert_eq!(decide(&came, &[], sizes(10, 2, 60)), Verdict::LargerPool);
    }

    /// A program that goes round through what would fit, if the pool were what it may be: none of it is in the pool, nor soon back.
    #[test]
    fn pool_that_is_too_small_for_any_hit_grows_again() {
        assert_eq!(decide(&[(300, CameFrom::Area, Some(9))], &[], sizes(60, 1, 40)), Verdict::LargerPool);
        assert_eq!(decide(&[], &[(300, CameFrom::Area)], sizes(60, 1, 40)), Verdict::LargerPool);
    }

    #[test]
    fn a_few_that_come_soon_say_nothing() {
        let decide = |soon, on_areas| {
            decide(&[(soon, YOUNG, Some(0)), (300, YOUNG, Some(9))], &[], sizes(60, 9, on_areas))
        };
        assert_eq!([decide(8, 60), decide(10, 60)], [Verdict::Stay, Verdict::SmallerPool]);
        // Most of what is out is in the pool, and would be written for nothing. (Objects of python3 of which the pool held ten in a
        // page's memory.)
        assert_eq!([decide(10, 18), decide(100, 0)], [Verdict::Stay, Verdict::Stay]);
    }

    /// A slow disk, much memory, and a long time.
    #[test]
    fn no_number_is_too_large() {
        let balance = Balance::default();
        for count in [&balance.came, &balance.old, &balance.walked_old, &balance.walked_from_area] {
            count.store(u32::MAX, Ordering::Relaxed);
        }
        let costs = Costs { pool_ns: 1_000_000, area_ns: 10_000_000_000 };
        assert_eq!(balance.decide(costs, sizes(1 << 24, 1, 1 << 24)), Verdict::LargerPool);
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
