//! Two ways to find victims, and which of them is better now.
//!
//! The hand takes what it comes to, which is mostly what has been there longest. But what a walk has just gone through is
//! needed again only when the walk comes round, if ever: when it goes through more than there is room for, it is better
//! to take pages right behind it, and to leave the others where they are. Then the walk finds most of them there each
//! time round, and what is used beside it stays. Where a walk's pages are gone over again soon, block by block, it is
//! worse.
//!
//! So one of them is tried now and then while the other is used, and some victims of each are watched: the better way is
//! the one whose victims come back less often for the time that they were watched. They are watched for a *lap*, until
//! as many have gone as there is room for: what comes back later would have gone anyway. Time is counted in victims.

use crate::memory::Zeroed;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::units::PageIndex;

/// One way to find victims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The hand's.
    Hand,
    /// Behind walks.
    Behind,
}

/// Ways to find victims.
pub const WAYS: usize = 2;
/// Parts of a lap; in each, one victim of each way is chosen to be watched.
const PARTS: usize = 256;
/// So many victims can be watched if their places don't meet.
const PLACES: usize = 2 * PARTS;
const _: () = assert!(PLACES.is_power_of_two());
/// So many batches to one of the way that looks worse.
const BATCHES_FOR_TRIAL: u32 = 16;
/// None to the hand while less than one in so many victims from behind walks comes back within a lap: the hand can't be much
/// better then, and leaves holes in what walks come to next.
const FEW: u64 = 8;
/// Counts are halved at so many returns, and once a lap, so that the latest weigh most.
const RETURNS_MAX: u32 = 128;

/// What the watched victims of one way do. Pages are kept plus one; 0: none.
pub struct Watched {
    /// Each at a place that follows from its number.
    places: [AtomicU64; PLACES],
    /// Who is watched from each part of the last lap on.
    from: [AtomicU64; PARTS],
    /// How many are watched.
    out: AtomicU32,
    came_back: AtomicU32,
}

// SAFETY: integers.
unsafe impl Zeroed for Watched {}

impl Watched {
    /// Whoever was watched at this page's place no longer is.
    fn watch(&self, page: PageIndex) {
        if self.places[place_of(page)].swap(page.0 + 1, Ordering::Relaxed) == 0 {
            self.out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether it was watched.
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

/// Pages in a row, and at most strides, come to different places.
const fn place_of(page: PageIndex) -> usize {
    (page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - PLACES.ilog2())) as usize
}

/// Both ways. Whoever faults looks here, without a lock.
pub(crate) struct Rivals<'m> {
    ways: &'m [Watched],
}

/// What belongs to who has the hand.
pub(crate) struct Turns {
    batches: u32,
    /// Victims since the last part of a lap ended.
    since: u64,
    part: usize,
    /// Whether somebody is watched from this part on.
    has_watched: [bool; WAYS],
    /// Sum over parts of how many were watched.
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

    /// The better one, as far as it is known: behind walks, as long as nothing is. And whether the other one needs no trials.
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

    /// Where the next batch should come from.
    pub(crate) fn next(&self, turns: &mut Turns) -> Way {
        let (better, is_good) = self.better(turns);
        turns.batches = turns.batches.wrapping_add(1);
        let is_trial = turns.batches.is_multiple_of(BATCHES_FOR_TRIAL) && !is_good;
        match (better, is_trial) {
            (Way::Hand, false) | (Way::Behind, true) => Way::Hand,
            (Way::Behind, false) | (Way::Hand, true) => Way::Behind,
        }
    }

    /// A batch was chosen, `first` and others, while so many pages were `resident`.
    pub(crate) fn went(&self, turns: &mut Turns, way: Way, first: PageIndex, count: u64, resident: u64) {
        if !turns.has_watched[way as usize] {
            turns.has_watched[way as usize] = true;
            let watched = &self.ways[way as usize];
            watched.from[turns.part].store(first.0 + 1, Ordering::Relaxed);
            watched.watch(first);
        }
        turns.since += count;
        let part = (resident / PARTS as u64).max(1);
        // Memory may have shrunk. After a lap nobody is watched any more.
        turns.since = turns.since.min(part * PARTS as u64);
        while turns.since >= part {
            turns.since -= part;
            self.go_on(turns);
        }
    }

    /// A part of a lap is over.
    fn go_on(&self, turns: &mut Turns) {
        turns.part = (turns.part + 1) % PARTS;
        turns.has_watched = [false; WAYS];
        for (watched, waited) in self.ways.iter().zip(&mut turns.waited) {
            // It was watched for a lap. Should it have gone again meanwhile it is watched a little less long.
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

    /// A victim that didn't go: it can't come back.
    pub(crate) fn stayed(&self, page: PageIndex) {
        self.ways.iter().for_each(|watched| _ = watched.forget(page));
    }

    /// A page that was out is there again.
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

    /// Of so many batches, those from behind walks.
    fn behind(rivals: &Rivals, turns: &mut Turns, batches: u32) -> u32 {
        (0..batches).map(|_| u32::from(rivals.next(turns) == Way::Behind)).sum()
    }

    /// One victim in turns of each way, for `laps`; a victim comes back after so many others have gone.
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
            // Half a part of a lap each, of which the first victim is watched.
            rivals.went(&mut turns, Way::Behind, PageIndex(page), 8, 16 * RESIDENT);
            rivals.stayed(PageIndex(page));
        }
        assert_eq!((turns.part, turns.waited), (50, [0; WAYS]));
        assert_eq!(rivals.ways[Way::Behind as usize].out.load(Ordering::Relaxed), 0);
    }

    /// Much fewer are resident than when the last part began.
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
