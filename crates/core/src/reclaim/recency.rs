//! How long a page was out, and whether it should stay longer for that.
//!
//! Nothing says which of the pages that are there are in use. But a page that comes back says how long it was out, in
//! laps: its entry has kept the *epoch* in which the hand took it, an eighth of a lap. What comes back within half a lap
//! is touched several times a lap.
//!
//! To spare such pages has a price: where victims aren't neighbours each is a move of its own. So it isn't done while
//! touches are random, when most pages come back soon, but while streams and runs of first touches bring in much of what
//! comes: a walk through a large array must not take from memory what is used all the time, and would go without it just
//! as fast. (Half of the touches a walk, half evenly in a third of what there is room for: 5 % of the latter were faults,
//! and 25 % without this; `core/tests/invariants.rs`.)
//!
//! What compresses badly gains little by going: two pages must go for what one would free that compresses well. So a page
//! that comes back from the pool is spared the more laps the longer its object was. This leaves victims without neighbours,
//! too, and is done while the driver says that they are cheap ([`Lone`]).

use crate::sync::atomic::{AtomicU32, Ordering};
use crate::table::entry::AGE_MAX;
use crate::units::{PAGE_BYTES, PageIndex};

/// Parts of a lap.
const EPOCHS_IN_LAP: u64 = 8;
/// Epochs that an entry can tell apart. It has one more value: none is known.
const EPOCHS: u32 = (1 << Epoch::BITS) - 1;
/// Half a lap: so many borders of epochs at most lie between going and coming back.
const NEAR: u32 = 3;
/// Laps that a page is spared which was out for less than [`NEAR`]. (One that was out for sixteen laps looks as if.)
pub const AGE_NEAR: u8 = AGE_MAX;
/// Of so many pages one is counted: threads that fault shall not fight for the counts.
const COUNTED: u64 = 8;
/// Counts are halved at so many, so that the latest weigh most.
const COUNT_MAX: u32 = 256;
/// A scan is on while one of so many pages comes in with a walk.
const SCAN: u32 = 4;

/// An epoch as an entry keeps it; 0 if it isn't known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(pub u8);

impl Epoch {
    /// Bits that it needs.
    pub const BITS: u32 = 7;
}

/// How a page came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// For the first time.
    New,
    /// A touch brought it back; it had gone in this epoch.
    Back(Epoch),
    /// A stream came to it or had it brought, or a neighbour's first touch: a walk through memory that is new is a scan as
    /// well.
    InWalk,
}

/// What it costs to take a victim that has no neighbours among them, compared with one of many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lone {
    /// Little more.
    Cheap,
    /// Several times as much: other CPUs are interrupted for it.
    Dear,
}

/// One space's epochs, and what comes in.
pub struct Recency {
    epoch: AtomicU32,
    /// Pages that came in lately, and those of them that came in a walk.
    came: AtomicU32,
    came_in_walk: AtomicU32,
    /// 1 while [`Lone::Cheap`].
    lone_are_cheap: AtomicU32,
}

impl Default for Recency {
    fn default() -> Self {
        Recency::new()
    }
}

impl Recency {
    /// The first epoch.
    pub fn new() -> Recency {
        Recency {
            epoch: AtomicU32::new(0),
            came: AtomicU32::new(0),
            came_in_walk: AtomicU32::new(0),
            lone_are_cheap: AtomicU32::new(0),
        }
    }

    /// The epoch it is, for a page that goes.
    pub fn now(&self) -> Epoch {
        Epoch(1 + (self.epoch.load(Ordering::Relaxed) % EPOCHS) as u8)
    }

    /// `passed` pages were looked at or taken since an epoch last ended, of the `resident` ones there are; what is left of
    /// that for the next epoch. For whoever has the hand.
    pub fn hand_went(&self, passed: u64, resident: u64) -> u64 {
        let length = (resident / EPOCHS_IN_LAP).max(1);
        self.epoch.fetch_add((passed / length) as u32, Ordering::Relaxed);
        passed % length
    }

    /// A page came in: laps that it is to be spared.
    pub fn came_in(&self, page: PageIndex, how: Came) -> u8 {
        self.count(page, how);
        match how {
            Came::Back(epoch) if self.is_near(epoch) && self.is_scan_on() => AGE_NEAR,
            _ => 0,
        }
    }

    /// A touch brought a page back whose object in the pool has so many bytes: laps that it is to be spared for that.
    pub fn came_from_pool(&self, length: impl FnOnce() -> usize) -> u8 {
        if self.lone_are_cheap.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let length = length();
        // The page's memory less the object's is what its going gains; never 0, since a page may not compress at all.
        (length / (PAGE_BYTES + 1 - length)).min(AGE_MAX.into()) as u8
    }

    /// The driver says what victims without neighbours cost it.
    pub fn lone_victims_are(&self, lone: Lone) {
        let is_cheap = u32::from(lone == Lone::Cheap);
        // Each fault reads it: written only when it changes.
        if self.lone_are_cheap.load(Ordering::Relaxed) != is_cheap {
            self.lone_are_cheap.store(is_cheap, Ordering::Relaxed);
        }
    }

    fn is_near(&self, epoch: Epoch) -> bool {
        epoch != Epoch(0) && (u32::from(self.now().0) + EPOCHS - u32::from(epoch.0)) % EPOCHS <= NEAR
    }

    /// Whether walks bring in much of what comes.
    pub fn is_scan_on(&self) -> bool {
        let in_walk = self.came_in_walk.load(Ordering::Relaxed);
        in_walk > 0 && in_walk * SCAN >= self.came.load(Ordering::Relaxed)
    }

    /// What other threads count at the same time may be lost: it is an estimate.
    fn count(&self, page: PageIndex, how: Came) {
        // Strides that have a power of two in them meet all remainders.
        if !(page.0 ^ page.0 >> 3 ^ page.0 >> 6).is_multiple_of(COUNTED) {
            return;
        }
        if how == Came::InWalk {
            self.came_in_walk.fetch_add(1, Ordering::Relaxed);
        }
        if self.came.fetch_add(1, Ordering::Relaxed) + 1 >= COUNT_MAX {
            for count in [&self.came, &self.came_in_walk] {
                count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_gains_little_by_going_stays_longer_where_lone_victims_are_cheap() {
        let recency = Recency::new();
        assert_eq!(recency.came_from_pool(|| panic!("nobody needs it")), 0);
        recency.lone_victims_are(Lone::Cheap);
        let laps = [1, 1000, 2048, 2049, 2800, 3500, 4095, PAGE_BYTES]
            .map(|length| recency.came_from_pool(|| length));
        assert_eq!(laps, [0, 0, 0, 1, 2, 5, AGE_MAX, AGE_MAX]);
        recency.lone_victims_are(Lone::Dear);
        assert_eq!(recency.came_from_pool(|| PAGE_BYTES), 0);
    }

    #[test]
    fn an_epoch_is_an_eighth_of_a_lap() {
        let recency = Recency::new();
        let first = recency.now();
        assert_eq!(recency.hand_went(99, 800), 99);
        assert_eq!(recency.now(), first);
        assert_eq!(recency.hand_went(101, 800), 1);
        assert_eq!(recency.now().0, first.0 + 1);
        assert_eq!(recency.hand_went(250, 800), 50);
        assert_eq!(recency.now().0, first.0 + 3);
        // Of very few pages, and of none.
        assert_eq!(recency.hand_went(2, 3), 0);
        assert_eq!(recency.hand_went(1, 0), 0);
        assert_eq!(recency.now().0, first.0 + 6);
    }

    #[test]
    fn every_epoch_fits_an_entry_and_near_goes_round() {
        let recency = Recency::new();
        for _ in 0..300 {
            let now = recency.now();
            assert!(now.0 > 0 && u32::from(now.0) < 1 << Epoch::BITS);
            let mut near = 0;
            while recency.is_near(now) {
                recency.hand_went(1, 8);
                near += 1;
            }
            assert_eq!(near, NEAR + 1);
        }
        assert!(!recency.is_near(Epoch(0)), "nobody knows");
    }

    #[test]
    fn only_beside_a_scan_are_pages_spared() {
        let recency = Recency::new();
        let pages = || (0..4000).map(PageIndex);
        let now = recency.now();
        assert!(pages().all(|page| recency.came_in(page, Came::Back(now)) == 0), "random touches");
        pages().for_each(|page| _ = recency.came_in(page, Came::InWalk));
        assert_eq!(recency.came_in(PageIndex(5), Came::Back(now)), AGE_NEAR);
        assert_eq!(recency.came_in(PageIndex(5), Came::New), 0);
        assert_eq!(recency.came_in(PageIndex(5), Came::InWalk), 0);
        // A lap later.
        recency.hand_went(8, 8);
        assert_eq!(recency.came_in(PageIndex(5), Came::Back(now)), 0);
        // The scan is over.
        pages().for_each(|page| _ = recency.came_in(page, Came::New));
        assert_eq!(recency.came_in(PageIndex(5), Came::Back(recency.now())), 0);
    }
}
