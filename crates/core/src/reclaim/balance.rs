//! Whether the pool or the program should have more of the memory that they share.
//!
//! A page of memory holds either one page of the program or several pages in the pool. The program's page
//! costs nothing to touch, and each page in the pool costs a fault. Pages that come back show what a tenth of
//! the program's memory would be worth on either side:
//!
//! - A page that was out for at most [`SOON`] borders of epochs would still be there if the program had a
//!   tenth more. A lap of the hand would be a tenth longer (`recency`), and the page's fault would not have
//!   happened.
//! - One of the oldest objects in the pool would have come from an area if the pool had that much less.
//! - Of the pages that come from an area later, some would have come from the pool if the pool had that much
//!   more. Their share is taken to be what the pool could then hold, of all that areas hold, because nobody
//!   knows when those pages were written.
//!
//! The mean worth of an object says nothing. Where young objects come back all the time, old ones may be of
//! no use.
//!
//! Where all pages are touched alike and compress, few come back soon, and the pool grows to its limit. Where
//! the pages in constant use almost fit, most come back soon. Then each page that the program gets saves a
//! fault again and again, while the pool holds pages that nobody asks for. There, twice as large a pool can
//! make a program 50 times as slow (`farpage load pagerank --pool`).
//!
//! Faults count here, one page of eight. The keeper decides now and then.
#![forbid(unsafe_code)]

use super::recency::is_counted;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::units::PageIndex;

/// Borders of epochs between going and coming back, at most, for a page that comes back soon. In the mean
/// this limit is an epoch and a half.
const SOON: u32 = 1;
/// Parts of the program's memory. The question is what one part more would be worth on either side. A page
/// comes back soon if it was out for less than one such part of a lap.
const MORE: u64 = 10;
/// Pages that are counted before a decision.
const ENOUGH: u32 = 256;
/// Ratio above which the pool is made smaller: the cost of pages that come back soon to what the pool saves.
const CLEARLY: u128 = 2;
/// Counted pages of which one must have come back soon for the pool to be made smaller. Of pages that are
/// touched evenly, a few come back soon, too. A page that was out for eight laps looks like one of them.
/// Where a smaller pool matters, ten times as many come back soon.
const ONE_OF: u32 = 32;
/// Pages that the pool usually holds in the memory of one page.
const DENSITY: u128 = 2;

/// Where a page came back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CameFrom {
    /// The pool.
    Pool {
        /// Whether the page's object was one of the oldest.
        is_old: bool,
    },
    /// An area.
    Area,
}

/// Costs of faults, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// A fault served from the pool.
    pub pool_ns: u64,
    /// A fault served from an area.
    pub area_ns: u64,
}

/// Where the program's pages are, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Size of the resident pages.
    pub resident: u64,
    /// Memory that the pool takes.
    pub pool: u64,
    /// Uncompressed size of the pages that the pool holds.
    pub in_pool: u64,
    /// Size of the pages that are elsewhere.
    pub on_areas: u64,
}

/// Which side should have more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The sides are about even.
    Stay,
    /// The program should have more.
    SmallerPool,
    /// The pool should have more.
    LargerPool,
}

/// Counts of the pages that came back lately.
#[derive(Default)]
pub struct Balance {
    /// All counted pages.
    came: AtomicU32,
    /// Pages that came back soon: from the pool, and from an area.
    soon_from_pool: AtomicU32,
    soon_from_area: AtomicU32,
    /// Pages that came back later from an area, and all pages that a walk had brought from an area. For a
    /// walk the pool would be little faster.
    later_from_area: AtomicU32,
    walked_from_area: AtomicU32,
    /// Pages whose object was one of the pool's oldest: those that came back later, and those that a walk had
    /// brought.
    old: AtomicU32,
    walked_old: AtomicU32,
}

impl Balance {
    /// Counts a page that a touch brought back, `out` borders of epochs after it went, if that is known.
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

    /// Counts a page that a walk had brought back.
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

    /// Whether enough pages came back for a decision.
    pub fn is_ready(&self) -> bool {
        self.came.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Decides which side should have more memory, and forgets what came back.
    pub fn decide(&self, costs: Costs, sizes: Sizes) -> Verdict {
        let take = |count: &AtomicU32| count.swap(0, Ordering::Relaxed);
        let (pool_ns, area_ns) = (u128::from(costs.pool_ns), u128::from(costs.area_ns));
        let (came, soon) = (take(&self.came), [take(&self.soon_from_pool), take(&self.soon_from_area)]);
        let soon_ns = u128::from(soon[0]) * pool_ns + u128::from(soon[1]) * area_ns;
        let saved_ns = |touched, walked| {
            u128::from(take(touched)) * area_ns.saturating_sub(pool_ns) + u128::from(take(walked)) * pool_ns
        };
        let more = u128::from(sizes.resident / MORE);
        // The oldest objects are a quarter of all.
        let lost_ns = saved_ns(&self.old, &self.walked_old) * 4 * more / u128::from(sizes.pool.max(1));
        let won_ns = saved_ns(&self.later_from_area, &self.walked_from_area) * DENSITY * more
            / u128::from(sizes.on_areas.max(1));
        let pool_is_worth_ns = lost_ns.max(won_ns);
        // While most pages that are out are in the pool, a smaller pool would write them for the first time.
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

    /// Decides after the given numbers of pages came back: from where, and after how many borders of epochs,
    /// or for a walk.
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
        // The program touches twice as much as fits in memory. Half of that is in a pool, where it takes a
        // third. One page in 16 is out for an epoch.
        let came =
            [(20, YOUNG, Some(1)), (10, CameFrom::Area, Some(0)), (250, YOUNG, Some(9)), (90, OLD, None)];
        assert_eq!(decide(&came, &[], sizes(64, 21, 64)), Verdict::LargerPool);
    }

    #[test]
    fn what_comes_back_at_once_should_not_go() {
        // The pages in constant use are in the pool's younger half. The rest of the pool is of no use.
        let came = [(250, YOUNG, Some(8)), (100, YOUNG, Some(1)), (1, OLD, Some(30))];
        assert_eq!(decide(&came, &[(200, CameFrom::Area)], sizes(4, 8, 60)), Verdict::SmallerPool);
        let came = [(100, YOUNG, Some(0)), (60, CameFrom::Area, Some(1)), (100, OLD, Some(40))];
        assert_eq!(decide(&came, &[], sizes(10, 16, 60)), Verdict::SmallerPool);
        // The smaller the pool becomes, the more each of its objects is worth.
        assert_eq!(decide(&came, &[], sizes(10, 8, 60)), Verdict::Stay);
        assert_eq!(decide(&came, &[], sizes(10, 2, 60)), Verdict::LargerPool);
    }

    /// A program goes round through data that would fit if the pool were as large as it may be. None of the
    /// data is in the pool now, and none comes back soon.
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
        // Most of what is out is in the pool, and would be written for nothing. This happens with objects of
        // python3, of which the pool holds ten in a page's memory.
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
