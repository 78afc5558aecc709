//! Two ways to find victims, and which of the two is better now.
//!
//! The hand takes the pages that it comes to, which are mostly those that have been in memory longest. But a
//! page that a walk has just gone through is needed again only when the walk comes round, if ever. When the
//! walk goes through more than fits in memory, pages right behind the walk are the better victims. The other
//! pages stay where they are. Then the walk finds most of them each time round, and pages used beside the
//! walk stay, too. Where a walk's pages are soon gone over again, block by block, this way is worse.
//!
//! So one way is tried now and then while the other is used, and some victims of each way are watched. The
//! better way is the one whose victims come back less often for the time that they were watched. A victim is
//! watched for a *turnover*: until as many victims have gone as pages are resident. A page that comes back
//! later would have gone anyway. Time is counted in victims.

use crate::memory::Zeroed;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::units::PageIndex;

/// A way to find victims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By the clock's hand.
    Hand,
    /// Behind walks.
    Behind,
}

/// The number of ways to find victims.
pub const WAYS: usize = 2;
/// Parts of a turnover. In each part, one victim of each way is chosen to be watched.
const PARTS: usize = 256;
/// Places for watched victims. Twice as many as can be watched, so that places seldom collide.
const PLACES: usize = 2 * PARTS;
const _: () = assert!(PLACES.is_power_of_two());
/// Batches of which one goes to the way that looks worse.
const BATCHES_FOR_TRIAL: u32 = 16;
/// Victims from behind walks for each one that comes back within a turnover, above which the hand gets no
/// trials. The hand can't be much better then, and leaves holes in the pages that walks come to next.
const FEW: u64 = 8;
/// Returns at which counts are halved. Counts are halved once a turnover, too, so that the latest weigh most.
const RETURNS_MAX: u32 = 128;

/// The watched victims of one way. A page is kept as its number plus one; 0 is none.
pub struct Watched {
    /// Watched pages, each at a place that follows from its number.
    places: [AtomicU64; PLACES],
    /// The page that is watched from each part of the last turnover on.
    from: [AtomicU64; PARTS],
    /// The number of pages that are watched.
    out: AtomicU32,
    came_back: AtomicU32,
}

// SAFETY: integers may be all zero bytes and have no drop.
unsafe impl Zeroed for Watched {}

impl Watched {
    /// Watches `page`. A page that was watched at the same place no longer is.
    fn watch(&self, page: PageIndex) {
        if self.places[place_of(page)].swap(page.0 + 1, Ordering::Relaxed) == 0 {
            self.out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Stops watching `page`. Returns whether it was watched.
    fn forget(&self, page: PageIndex) -> bool {
        let place = &self.places[place_of(page)];
        let was_watched = place.load(Ordering::Relaxed) == page.0 + 1
            && place.compare_exchange(page.0 + 1, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if was_watched {
            self.out.fetch_sub(1, Ordering::Relaxed);
        }
        was_watched
    }

    fn came_back(&self) -> u64 {
        u64::from(self.came_back.load(Ordering::Relaxed))
    }
}

/// Returns a page's place. Pages in a row have different places, and so have pages at nearly all strides.
const fn place_of(page: PageIndex) -> usize {
    (page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - PLACES.ilog2())) as usize
}

/// Both ways. Faulting threads look here without a lock.
pub(crate) struct Rivals<'m> {
    ways: &'m [Watched],
}

/// The state that belongs to the thread that has the hand.
pub(crate) struct Turns {
    batches: u32,
    /// Victims since the last part of a turnover ended.
    since: u64,
    part: usize,
    /// Whether a page of each way is watched from this part on.
    has_watched: [bool; WAYS],
    /// Sum over all parts of the number of pages that were watched.
    waited: [u64; WAYS],
}

impl Turns {
    pub(crate) const fn new() -> Turns {
        Turns { batches: 0, since: 0, part: 0, has_watched: [false; WAYS], waited: [0; WAYS] }
    }
}

impl<'m> Rivals<'m> {
    pub(crate) fn new(ways: &'m [Watched]) -> Rivals<'m> {
        assert!(ways.len() == WAYS);
        Rivals { ways }
    }

    /// Returns the better way, as far as is known, and whether the other one needs no trials. While nothing
    /// is known the better way is behind walks.
    fn better(&self, turns: &Turns) -> (Way, bool) {
        let [by_hand, behind] = [Way::Hand, Way::Behind].map(|way| self.ways[way as usize].came_back());
        let [waited_by_hand, waited_behind] = turns.waited;
        if behind * waited_by_hand > by_hand * waited_behind {
            (Way::Hand, false)
        } else {
            (Way::Behind, behind * FEW * (PARTS as u64) < waited_behind)
        }
    }

    /// Whether victims had better come from behind walks.
    pub(crate) fn prefers_walks(&self, turns: &Turns) -> bool {
        self.better(turns).0 == Way::Behind
    }

    /// Returns the way by which the next batch should be chosen.
    pub(crate) fn next(&self, turns: &mut Turns) -> Way {
        let (better, is_good) = self.better(turns);
        turns.batches = turns.batches.wrapping_add(1);
        let is_trial = turns.batches.is_multiple_of(BATCHES_FOR_TRIAL) && !is_good;
        match (better, is_trial) {
            (Way::Hand, false) | (Way::Behind, true) => Way::Hand,
            (Way::Behind, false) | (Way::Hand, true) => Way::Behind,
        }
    }

    /// Records that a batch of `count` victims, `first` among them, was chosen while `resident` pages were in
    /// memory.
    pub(crate) fn went(&self, turns: &mut Turns, way: Way, first: PageIndex, count: u64, resident: u64) {
        if !turns.has_watched[way as usize] {
            turns.has_watched[way as usize] = true;
            let watched = &self.ways[way as usize];
            watched.from[turns.part].store(first.0 + 1, Ordering::Relaxed);
            watched.watch(first);
        }
        turns.since += count;
        let part = (resident / PARTS as u64).max(1);
        // Memory may have shrunk. More than a turnover needn't be counted, because no page is watched for
        // longer.
        turns.since = turns.since.min(part * PARTS as u64);
        while turns.since >= part {
            turns.since -= part;
            self.go_on(turns);
        }
    }

    /// Ends a part of a turnover.
    fn go_on(&self, turns: &mut Turns) {
        turns.part = (turns.part + 1) % PARTS;
        turns.has_watched = [false; WAYS];
        for (watched, waited) in self.ways.iter().zip(&mut turns.waited) {
            // The page was watched for a turnover. If it went again meanwhile, it is watched for a little
            // less.
            if let Some(page) = watched.from[turns.part].swap(0, Ordering::Relaxed).checked_sub(1) {
                watched.forget(PageIndex(page));
            }
            *waited += u64::from(watched.out.load(Ordering::Relaxed));
            let came_back = watched.came_back.load(Ordering::Relaxed);
            if came_back >= RETURNS_MAX || turns.part == 0 {
                watched.came_back.fetch_sub(came_back.div_ceil(2), Ordering::Relaxed);
                *waited /= 2;
            }
        }
    }

    /// Stops watching a victim that didn't go, because it can't come back.
    pub(crate) fn stayed(&self, page: PageIndex) {
        self.ways.iter().for_each(|watched| _ = watched.forget(page));
    }

    /// Records that a page that was out is in memory again.
    pub(crate) fn came_back(&self, page: PageIndex) {
        for watched in self.ways {
            if watched.forget(page) {
                watched.came_back.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const RESIDENT: u64 = PARTS as u64;

    fn rivals() -> Rivals<'static> {
        let zero = |_| AtomicU64::new(0);
        let way = |_| Watched {
            places: std::array::from_fn(zero),
            from: std::array::from_fn(zero),
            out: AtomicU32::new(0),
            came_back: AtomicU32::new(0),
        };
        Rivals::new(Box::leak(Box::new(std::array::from_fn::<_, WAYS, _>(way))))
    }

    /// Returns how many of `batches` batches come from behind walks.
    fn behind(rivals: &Rivals, turns: &mut Turns, batches: u32) -> u32 {
        (0..batches).map(|_| u32::from(rivals.next(turns) == Way::Behind)).sum()
    }

    /// Takes victims by each way in turns, for `laps`. A victim comes back after the given number of other
    /// victims has gone.
    fn go(rivals: &Rivals, turns: &mut Turns, laps: u64, by_hand_after: usize, behind_after: usize) {
        let mut gone = Vec::new();
        for page in 0..2 * laps * RESIDENT {
            let way = if page % 2 == 0 { Way::Hand } else { Way::Behind };
            let page = PageIndex(1_000_000 + page);
            rivals.went(turns, way, page, 1, 2 * RESIDENT);
            gone.push(page);
            for (first, after) in [(0, by_hand_after), (1, behind_after)] {
                if let Some(at) = gone.len().checked_sub(after + 1).filter(|at| at % 2 == first) {
                    rivals.came_back(gone[at]);
                }
            }
        }
    }

    #[test]
    fn as_long_as_nothing_is_known_victims_come_from_behind_walks() {
        assert_eq!(behind(&rivals(), &mut Turns::new(), 160), 150);
    }

    #[test]
    fn the_way_whose_victims_come_back_later_is_taken() {
        let (rivals, mut turns) = (rivals(), Turns::new());
        go(&rivals, &mut turns, 3, 400, 100);
        assert_eq!(behind(&rivals, &mut turns, 160), 10, "the other one has its trials");
        go(&rivals, &mut turns, 6, 100, 400);
        assert_eq!(behind(&rivals, &mut turns, 160), 150);
    }

    #[test]
    fn what_comes_back_after_a_lap_is_not_counted_and_then_no_trial_is_needed() {
        let (rivals, mut turns) = (rivals(), Turns::new());
        go(&rivals, &mut turns, 3, 300, 2 * PARTS + 40);
        assert_eq!(rivals.ways[Way::Behind as usize].came_back(), 0);
        assert!(rivals.ways[Way::Hand as usize].came_back() > 0);
        assert_eq!(behind(&rivals, &mut turns, 160), 160);
    }

    #[test]
    fn who_stayed_is_not_waited_for() {
        let (rivals, mut turns) = (rivals(), Turns::new());
        for page in 0..100 {
            // Each batch is half a part of a turnover, and its first victim is watched.
            rivals.went(&mut turns, Way::Behind, PageIndex(page), 8, 16 * RESIDENT);
            rivals.stayed(PageIndex(page));
        }
        assert_eq!((turns.part, turns.waited), (50, [0; WAYS]));
        assert_eq!(rivals.ways[Way::Behind as usize].out.load(Ordering::Relaxed), 0);
    }

    /// Far fewer pages are resident than when the last part began.
    #[test]
    fn memory_may_shrink() {
        let (rivals, mut turns) = (rivals(), Turns::new());
        rivals.went(&mut turns, Way::Hand, PageIndex(1), u64::from(u32::MAX), 1 << 50);
        rivals.went(&mut turns, Way::Hand, PageIndex(2), 1, 0);
        assert_eq!((turns.since, turns.part), (0, 0), "a lap, and no more");
    }

    #[test]
    fn who_is_watched_is_known_to_be_out() {
        let (rivals, mut turns) = (rivals(), Turns::new());
        go(&rivals, &mut turns, 3, 300, 40);
        for watched in rivals.ways {
            let count = watched.places.iter().filter(|page| page.load(Ordering::Relaxed) != 0).count();
            assert_eq!(count as u32, watched.out.load(Ordering::Relaxed));
            assert!((10..=PARTS).contains(&count), "{count}");
        }
    }
}
