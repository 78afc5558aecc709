//! How long a page was out, and whether it should stay longer because of that.
//!
//! The kernel doesn't tell which resident pages are in use. But a page that comes back shows how long it was
//! out, in laps. The page's entry has kept the *epoch* in which the hand took the page; an epoch is a
//! sixteenth of a lap. A page that is touched often comes back soon. The entry remembers how often, as the
//! page's *heat*. Each return that is soon adds one degree, and each late return takes one away. Each degree
//! doubles the laps that a page stays.
//!
//! A return is soon if the page was out for less than the *mark*. The mark moves to where three of ten pages
//! come back sooner (four laps at most). Where all pages are touched alike, chance decides which pages come
//! back soon, and they do so no more often than other pages. Sparing them has a price: where victims aren't
//! neighbours, each is a move of its own. So the returns of *hot* pages, those of two degrees and more, are
//! watched. Heat counts only while hot pages come back soon again, and only where victims without neighbours
//! are cheap ([`Lone`]).
//!
//! Heat doesn't count while streams and runs of first touches bring in a large share of the pages. Then a
//! page is spared if it comes back within half a lap, even for the first time. A walk through a large array
//! must not displace pages that are used all the time, and would be as fast without their memory. Without
//! this rule these pages fault five times as often (`core/tests/invariants`).
//!
//! A page that compresses badly gains little by going. Two of them must go to free what one page frees that
//! compresses well. So a page that comes back from the pool stays the more laps the longer its object was.
//! This rule leaves victims without neighbours, too, and applies while the driver says that they are cheap.
//!
//! By both rules together, pages stay in proportion to how often they are touched, as far as is known. They
//! also stay in proportion to the memory that they take for each byte that their eviction would free.

use crate::sync::atomic::{AtomicU32, Ordering};
use crate::table::entry::{AGE_MAX, Past};
use crate::units::{PAGE_BYTES, PageIndex};

/// Parts of a lap.
const EPOCHS_IN_LAP: u64 = 16;
/// Epochs that an entry can tell apart. An entry has one more value, which says that no epoch is known.
const EPOCHS: u32 = (1 << Epoch::BITS) - 1;
/// Borders of epochs between going and coming back, at most, for a page that was out for at most half a lap.
const NEAR: u32 = 7;
/// Laps that a page is spared beside a scan if it was out for no longer than [`NEAR`]. A page that was out
/// for eight laps looks as if it had just gone.
pub const AGE_NEAR: u8 = 7;
const _: () = assert!(AGE_NEAR <= AGE_MAX);
/// Parts of an epoch, the unit of the mark.
const MARK_IN_EPOCH: u32 = 256;
/// Parts of an epoch by which the mark goes down for a page that came back sooner. At seven down to three up
/// ([`MARK_UP`]), the mark stays where three of ten pages come sooner.
const MARK_DOWN: u32 = 7;
/// Parts of an epoch by which the mark goes up for a page that came back later.
const MARK_UP: u32 = 3;
const MARK_MAX: u32 = EPOCHS / 2 * MARK_IN_EPOCH;
/// Share of the hot pages that must come back soon for heat to count, of [`CERTAIN`]. Of all pages three of
/// ten come back soon. Where nearly all pages fit in memory the share is larger, because an epoch is long for
/// them.
const BELIEVED: u32 = CERTAIN / 2;
/// The share that stands for all pages.
const CERTAIN: u32 = 1 << 16;
/// Hot pages over which the share is averaged. The latest weigh most.
const WATCHED: u32 = 64;
/// Pages of which one is counted, so that faulting threads don't fight for the counts.
const COUNTED: u64 = 8;
/// Count at which counts are halved, so that the latest weigh most.
const COUNT_MAX: u32 = 256;
/// Pages of which at least one comes in with a walk while a scan is on.
const SCAN: u32 = 4;

/// Laps by which a page stays longer if its eviction frees as much as its object takes, and proportionally
/// for other pages. Of the factors 1 to 6, 3 is the best compromise between even touches and Zipf's
/// distribution (`farpage load touch --stats`).
const WORTH: usize = 3;

/// An epoch as an entry keeps it. 0 means that none is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(pub u8);

impl Epoch {
    /// Bits that an epoch takes in an entry.
    pub const BITS: u32 = 7;
}

/// How often a page has come back soon, less how often it came back late, as an entry keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heat(pub u8);

impl Heat {
    /// Bits that heat takes in an entry.
    pub const BITS: u32 = 2;
    /// The highest heat.
    pub const MAX: Heat = Heat((1 << Heat::BITS) - 1);
    /// The heat from which a page is hot.
    const HOT: Heat = Heat(2);

    const fn is_hot(self) -> bool {
        self.0 >= Heat::HOT.0
    }

    fn after(self, was_soon: bool) -> Heat {
        Heat(if was_soon { (self.0 + 1).min(Heat::MAX.0) } else { self.0.saturating_sub(1) })
    }
}

/// How a page came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// For the first time.
    New,
    /// A touch brought it back.
    Back,
    /// A stream came to the page or had it brought, or a neighbour's first touch did. A walk through new
    /// memory is a scan as well.
    InWalk,
}

/// The cost of taking a victim that has no neighbours among the victims, compared with one of many
/// neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lone {
    /// Little more.
    Cheap,
    /// Several times as much, because other CPUs are interrupted for it.
    Dear,
}

/// The epochs of one space, and counts of the pages that come in.
pub struct Recency {
    epoch: AtomicU32,
    /// Pages that came in lately. `came_in_walk` counts those that came in a walk.
    came: AtomicU32,
    came_in_walk: AtomicU32,
    /// 1 while [`Lone::Cheap`].
    lone_are_cheap: AtomicU32,
    /// A page that was out for less than this came back soon. In parts of an epoch.
    mark: AtomicU32,
    /// Share of the hot pages that came back soon, of [`CERTAIN`].
    hot_soon: AtomicU32,
}

impl Default for Recency {
    fn default() -> Self {
        Recency::new()
    }
}

impl Recency {
    /// Returns the state at the first epoch.
    pub fn new() -> Recency {
        Recency {
            epoch: AtomicU32::new(0),
            came: AtomicU32::new(0),
            came_in_walk: AtomicU32::new(0),
            lone_are_cheap: AtomicU32::new(0),
            mark: AtomicU32::new(NEAR * MARK_IN_EPOCH),
            hot_soon: AtomicU32::new(0),
        }
    }

    /// Returns the current epoch, for a page that goes.
    pub fn now(&self) -> Epoch {
        Epoch(1 + (self.epoch.load(Ordering::Relaxed) % EPOCHS) as u8)
    }

    /// Records that `passed` of the `resident` pages were looked at or taken since the last epoch ended.
    /// Returns the pages left over, which count for the next epoch. Only the thread that has the hand may
    /// call this.
    pub fn hand_went(&self, passed: u64, resident: u64) -> u64 {
        let length = (resident / EPOCHS_IN_LAP).max(1);
        self.epoch.fetch_add((passed / length) as u32, Ordering::Relaxed);
        passed % length
    }

    /// Records that a page came in. `past` is what its entry remembered. `length` is the size in bytes of its
    /// pool object, if the object was freed. Returns the laps that the page is to be spared, and its heat.
    pub fn came_in(&self, page: PageIndex, how: Came, past: Past, length: Option<usize>) -> (u8, Heat) {
        if is_counted(page) {
            self.count(how);
        }
        if how != Came::Back {
            return (0, past.heat);
        }
        let out = self.out_for(past.went);
        let heat = out.map_or(past.heat, |out| self.heat_after(page, past.heat, out));
        let is_scan_on = self.is_scan_on();
        let is_near = is_scan_on && out.is_some_and(|out| out <= NEAR);
        let counts = out.is_some() && !is_scan_on && self.is_heat_believed();
        let laps = match self.are_lone_cheap() {
            true => laps(length, if counts { heat } else { Heat(0) }),
            false => 0,
        };
        (if is_near { laps.max(AGE_NEAR) } else { laps }, heat)
    }

    /// Returns the heat of a page that was out for `out` borders of epochs.
    fn heat_after(&self, page: PageIndex, heat: Heat, out: u32) -> Heat {
        let mark = self.mark.load(Ordering::Relaxed);
        // The middle of the epoch in which the page came back.
        let was_soon = out * MARK_IN_EPOCH + MARK_IN_EPOCH / 2 < mark;
        if is_counted(page) {
            self.learn(mark, heat, was_soon);
        }
        heat.after(was_soon)
    }

    fn is_heat_believed(&self) -> bool {
        self.hot_soon.load(Ordering::Relaxed) > BELIEVED
    }

    /// Adjusts the mark and the share of hot pages. Updates by other threads at the same time may be lost,
    /// because both are estimates.
    fn learn(&self, mark: u32, heat: Heat, was_soon: bool) {
        let mark = if was_soon { mark.saturating_sub(MARK_DOWN) } else { (mark + MARK_UP).min(MARK_MAX) };
        self.mark.store(mark, Ordering::Relaxed);
        if heat.is_hot() {
            let hot_soon = self.hot_soon.load(Ordering::Relaxed);
            let this = if was_soon { CERTAIN / WATCHED } else { 0 };
            self.hot_soon.store(hot_soon - hot_soon / WATCHED + this, Ordering::Relaxed);
        }
    }

    /// Sets what victims without neighbours cost the driver.
    pub fn lone_victims_are(&self, lone: Lone) {
        let is_cheap = u32::from(lone == Lone::Cheap);
        // Written only when it changes, because each fault reads it.
        if self.lone_are_cheap.load(Ordering::Relaxed) != is_cheap {
            self.lone_are_cheap.store(is_cheap, Ordering::Relaxed);
        }
    }

    fn are_lone_cheap(&self) -> bool {
        self.lone_are_cheap.load(Ordering::Relaxed) != 0
    }

    /// Returns the borders of epochs since `went`, or `None` if `went` isn't known.
    pub fn out_for(&self, went: Epoch) -> Option<u32> {
        (went != Epoch(0)).then(|| (u32::from(self.now().0) + EPOCHS - u32::from(went.0)) % EPOCHS)
    }

    /// Whether walks bring in a large share of the pages that come in.
    pub fn is_scan_on(&self) -> bool {
        let in_walk = self.came_in_walk.load(Ordering::Relaxed);
        in_walk > 0 && in_walk * SCAN >= self.came.load(Ordering::Relaxed)
    }

    /// Counts a page that came in. Counts by other threads at the same time may be lost, because the result
    /// is an estimate.
    fn count(&self, how: Came) {
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

/// Returns the laps that a page of this heat is spared if its eviction frees all of its memory but `length`
/// bytes, and nothing else decides. The result is one less than the laps that the page stays.
fn laps(length: Option<usize>, heat: Heat) -> u8 {
    let length = length.unwrap_or(0);
    // Never 0, because a page may not compress at all.
    let frees = PAGE_BYTES + 1 - length;
    (((frees + WORTH * length) << heat.0) / frees - 1).min(AGE_MAX.into()) as u8
}

/// Whether a page is one of those that are counted. Strides with a power of two in them meet all remainders.
pub fn is_counted(page: PageIndex) -> bool {
    (page.0 ^ page.0 >> 3 ^ page.0 >> 6).is_multiple_of(COUNTED)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_gains_little_by_going_stays_longer_where_lone_victims_are_cheap() {
        let recency = Recency::new();
        let unknown = Past { went: Epoch(0), heat: Heat(3) };
        let came = |how, length| recency.came_in(PageIndex(1), how, unknown, Some(length)).0;
        assert_eq!(came(Came::Back, PAGE_BYTES), 0);
        recency.lone_victims_are(Lone::Cheap);
        let laps = [1, 1000, 2048, 2049, 2800, 3500, 4095, PAGE_BYTES].map(|length| came(Came::Back, length));
        assert_eq!(laps, [0, 0, 2, 3, 6, 17, AGE_MAX, AGE_MAX]);
        assert_eq!([Came::New, Came::InWalk].map(|how| came(how, PAGE_BYTES)), [0, 0]);
        recency.lone_victims_are(Lone::Dear);
        assert_eq!(came(Came::Back, PAGE_BYTES), 0);
    }

    #[test]
    fn each_degree_of_heat_doubles_how_long_a_page_stays() {
        let stays = |length: usize| [0, 1, 2, 3].map(|heat| 1 + laps(Some(length), Heat(heat)));
        assert_eq!([stays(1), stays(2048), stays(2800)], [[1, 2, 4, 8], [3, 7, 15, 31], [7, 14, 29, 32]]);
        assert_eq!(laps(None, Heat(2)), 3);
    }

    #[test]
    fn an_epoch_is_a_sixteenth_of_a_lap() {
        let recency = Recency::new();
        let first = recency.now();
        assert_eq!(recency.hand_went(99, 1600), 99);
        assert_eq!(recency.now(), first);
        assert_eq!(recency.hand_went(101, 1600), 1);
        assert_eq!(recency.now().0, first.0 + 1);
        assert_eq!(recency.hand_went(250, 1600), 50);
        assert_eq!(recency.now().0, first.0 + 3);
        // With very few resident pages, and with none.
        assert_eq!(recency.hand_went(2, 3), 0);
        assert_eq!(recency.hand_went(1, 0), 0);
        assert_eq!(recency.now().0, first.0 + 6);
    }

    #[test]
    fn every_epoch_fits_an_entry_and_is_told_from_the_others() {
        let recency = Recency::new();
        for _ in 0..300 {
            let now = recency.now();
            assert!(now.0 > 0 && u32::from(now.0) < 1 << Epoch::BITS);
            for passed in 0..EPOCHS {
                assert_eq!(recency.out_for(now), Some(passed));
                recency.hand_went(1, 1);
            }
            recency.hand_went(1, 1);
        }
        assert_eq!(recency.out_for(Epoch(0)), None, "nobody knows");
    }

    #[test]
    fn beside_a_scan_is_spared_what_comes_back_soon_for_the_first_time() {
        let recency = Recency::new();
        let pages = || (0..4000).map(PageIndex);
        let past = Past { went: recency.now(), heat: Heat(0) };
        let age = |how| recency.came_in(PageIndex(5), how, past, None).0;
        assert_eq!(age(Came::Back), 0, "random touches");
        pages().for_each(|page| _ = recency.came_in(page, Came::InWalk, past, None));
        assert_eq!([Came::Back, Came::New, Came::InWalk].map(age), [AGE_NEAR, 0, 0]);
        // A lap later.
        recency.hand_went(16, 16);
        assert_eq!(age(Came::Back), 0);
        // The scan is over.
        pages().for_each(|page| _ = recency.came_in(page, Came::New, past, None));
        let past = Past { went: recency.now(), heat: Heat(0) };
        assert_eq!(recency.came_in(PageIndex(5), Came::Back, past, None).0, 0);
    }

    /// A page comes back that was out for `out_for` epochs.
    fn back(recency: &Recency, page: u64, heat: u8, out_for: u64) -> (u8, u8) {
        let went = recency.now();
        recency.hand_went(out_for, 16);
        let (age, heat) = recency.came_in(PageIndex(page), Came::Back, Past { went, heat: Heat(heat) }, None);
        (age, heat.0)
    }

    /// A page that is counted.
    const COUNTED_PAGE: u64 = 0;
    /// A page that isn't counted.
    const OTHER_PAGE: u64 = 1;

    #[test]
    fn what_comes_back_soon_again_and_again_is_hot_until_it_comes_late() {
        let recency = Recency::new();
        recency.lone_victims_are(Lone::Cheap);
        (0..200).for_each(|_| _ = back(&recency, COUNTED_PAGE, 3, 1));
        recency.mark.store(NEAR * MARK_IN_EPOCH, Ordering::Relaxed);
        let heats = [0, 1, 2, 3];
        let soon = heats.map(|heat| back(&recency, OTHER_PAGE, heat, 1));
        assert_eq!(soon, [(1, 1), (3, 2), (7, 3), (7, 3)]);
        let late = heats.map(|heat| back(&recency, OTHER_PAGE, heat, 15));
        assert_eq!(late, [(0, 0), (0, 0), (1, 1), (3, 2)]);
        let unknown = Past { went: Epoch(0), heat: Heat(3) };
        assert_eq!(recency.came_in(PageIndex(1), Came::Back, unknown, None), (0, Heat(3)));
    }

    #[test]
    fn heat_is_believed_in_while_hot_pages_come_back_soon() {
        let recency = Recency::new();
        recency.lone_victims_are(Lone::Cheap);
        let is_spared = || back(&recency, OTHER_PAGE, 3, 0).0 > 0;
        assert!(!is_spared(), "nothing is known");
        (0..200).for_each(|_| _ = back(&recency, COUNTED_PAGE, 1, 0));
        assert!(!is_spared(), "nothing is known of hot ones");
        // Most pages aren't hot, and come back late.
        let many = |soon, late| {
            (0..100).for_each(|_| {
                (0..30).for_each(|_| _ = back(&recency, COUNTED_PAGE, 0, 120));
                (0..soon).for_each(|_| _ = back(&recency, COUNTED_PAGE, 3, 0));
                (0..late).for_each(|_| _ = back(&recency, COUNTED_PAGE, 3, 120));
            });
            is_spared()
        };
        assert_eq!([many(7, 3), many(3, 7), many(9, 1)], [true, false, true]);
        recency.lone_victims_are(Lone::Dear);
        assert!(!is_spared());
    }

    /// The mark adapts: pages are out for up to a quarter of a lap, or for two to four laps.
    #[test]
    fn three_of_ten_come_back_soon() {
        for (shortest, longest) in [(0, 4), (32, 64)] {
            let recency = Recency::new();
            let mut soon = 0;
            for at in 0..400_000_u64 {
                let now = u64::from(recency.now().0) - 1;
                let out_for = shortest + ((at * 2_654_435_761) >> 16) % (longest - shortest);
                let went = Epoch(1 + ((now + u64::from(EPOCHS) - out_for) % u64::from(EPOCHS)) as u8);
                let (_, heat) =
                    recency.came_in(PageIndex(at), Came::Back, Past { went, heat: Heat(1) }, None);
                soon += u32::from(at >= 200_000 && heat == Heat(2));
                recency.hand_went(1, 16);
            }
            assert!((55_000..65_000).contains(&soon), "{soon} of 200,000 ({shortest} to {longest} epochs)");
        }
    }
}
