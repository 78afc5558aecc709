//! Reclaim: the choice of victims.
//!
//! The kernel gives user space no "accessed" bit, so recency must be seen in the pages that come back. A
//! clock hand goes round the program's ranges in address order. A page with age 0 goes. A page with a higher
//! age is spared and made younger. A page gets its age when it comes back. A page from the parking queue was
//! out for a moment only, so it is in use. A page from farther away gets an age if it was out for a short
//! time ([`recency`]). Address order makes victims neighbours, so that one move takes a whole run.
//!
//! The hand spares, once, pages that were brought in for a stream and that the stream hasn't come to yet.
//! These pages came back last, but their place in the round has nothing to do with that.
//!
//! Victims are looked for behind walks first, unless the hand does better ([`rivals`]).

pub mod balance;
pub mod recency;
pub mod rivals;

use crate::config::Readahead;
use crate::pager::{Batch, Pager};
use crate::readahead::streams::Unread;
use crate::stats::Counter;
use crate::table::Walk;
use crate::table::entry::{AGE_MAX, State};
use crate::units::{PageIndex, PageRange};
use rivals::{Turns, Way};

/// Laps that a page is spared after it came back from the parking queue.
pub const AGE_FROM_PARKED: u8 = 2;
const _: () = assert!(AGE_FROM_PARKED <= AGE_MAX);
/// Entries that one search looks at before it gives up for now. Looking at them takes about a millisecond.
const LOOKS_MAX: u32 = 1 << 18;
/// Pages that a search spares at most. A search spares no more than are resident, either. Then it takes the
/// next page whatever its age. Otherwise a search could find nothing while all of memory may go.
const SPARED_MAX: u64 = 1 << 12;
/// Further pages that a search may spare for each victim that it finds: one for this many resident pages, and
/// at most this many.
const SPARED_FOR_ONE: u64 = 64;

/// Resident pages for each page that stays behind walks. All walks share the pages that stay. A page that is
/// used twice in a row then needn't come back.
const KEPT_BEHIND: u64 = 64;

/// Stretches behind walks that are looked at for one batch, at most.
const STRETCHES_MAX: usize = 16;

/// The clock's hand, and whose turn it is.
pub struct Clock {
    hand: PageIndex,
    /// Resident pages that the hand looked at, or that were taken behind walks, since the last epoch ended.
    passed: u64,
    turns: Turns,
    /// Whether the next batch is the hand's.
    is_hand_next: bool,
}

impl Clock {
    /// Returns a clock whose hand is at the beginning of the address space.
    pub const fn new() -> Clock {
        Clock { hand: PageIndex(0), passed: 0, turns: Turns::new(), is_hand_next: false }
    }
}

/// The number of pages that a search may still spare.
struct Spares {
    left: u64,
    for_one: u64,
}

impl Spares {
    fn of(resident: u64) -> Spares {
        Spares { left: resident.min(SPARED_MAX), for_one: (resident / SPARED_FOR_ONE).min(SPARED_FOR_ONE) }
    }

    /// Records that a victim was found.
    const fn earn(&mut self) {
        self.left += self.for_one;
    }

    /// Whether another page may be spared.
    const fn spend(&mut self) -> bool {
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

impl Default for Clock {
    fn default() -> Self {
        Clock::new()
    }
}

impl Pager<'_> {
    /// Fills `batch` with up to `max` victims, each locked. Under the shared map lock.
    pub(crate) fn choose(&self, batch: &mut Batch, max: usize) {
        let mut clock = self.clock.lock();
        let resident = self.resident();
        batch.way = self.rivals.next(&mut clock.turns);
        if core::mem::take(&mut clock.is_hand_next) {
            batch.way = Way::Hand;
        }
        if batch.way == Way::Behind {
            self.choose_behind(batch, max, resident);
        }
        let mut looks = batch.len() as u32;
        if batch.is_empty() {
            batch.way = Way::Hand;
            looks = self.choose_by_hand(&mut clock, batch, max, resident);
            if batch.is_empty() {
                // Pages that were spared for streams aren't spared a second time.
                looks += self.choose_by_hand(&mut clock, batch, max, resident);
            }
        }
        if let [first, ..] = batch.victims() {
            let (first, count) = (first.page, batch.len() as u64);
            self.rivals.went(&mut clock.turns, batch.way, first, count, resident);
        }
        clock.passed = self.recency.hand_went(clock.passed + u64::from(looks), resident);
    }

    /// Whether an evictor that isn't in need of memory had better wait for walks to go on. True if victims
    /// come from behind walks and there are none. The hand would take the pages that walks come to next.
    pub fn is_waiting_for_walks(&self) -> bool {
        let clock = self.clock.lock();
        !clock.is_hand_next
            && self.rivals.prefers_walks(&clock.turns)
            && self.streams.lock().is_all_taken(self.resident() / KEPT_BEHIND)
    }

    /// Takes pages that walks have gone through.
    fn choose_behind(&self, batch: &mut Batch, max: usize, resident: u64) {
        for _ in 0..STRETCHES_MAX {
            let wanted = (max - batch.len()) as u32;
            let Some(passed) = self.streams.lock().take_passed(wanted, resident / KEPT_BEHIND) else { break };
            let mut range = PageRange::of(passed.first, 0);
            for page in passed.pages() {
                if !range.contains(page) {
                    range = self.range_to_evict(page).unwrap_or(range);
                }
                let Some(place) = self.table.known(page).filter(|_| range.contains(page)) else { continue };
                let word = place.entry().load();
                if let State::Resident { copy, age: 0 } = word.state()
                    && !word.is_locked()
                    && place.entry().try_lock(word).is_ok()
                {
                    self.stats.count(Counter::EvictBehind);
                    batch.push(page, copy);
                }
            }
            if batch.len() >= max {
                break;
            }
        }
    }

    /// Moves the hand around until it has looked at each page twice. Returns the number of pages looked at.
    fn choose_by_hand(&self, clock: &mut Clock, batch: &mut Batch, max: usize, resident: u64) -> u32 {
        let mut unread = Unread::new();
        if self.config.readahead == Readahead::Streams {
            self.streams.lock().unread(&mut unread);
        }
        let (mut looks, mut wraps) = (0, 0);
        let mut spares = Spares::of(resident);
        while batch.len() < max && looks < LOOKS_MAX && wraps < 3 {
            let Some(range) = self.evictable_at_or_after(clock.hand) else {
                clock.hand = PageIndex(0);
                wraps += 1;
                continue;
            };
            let from = if range.contains(clock.hand) { clock.hand } else { range.start };
            let rest = PageRange::new(from, range.end);
            clock.hand = self.choose_in(rest, batch, max, &mut looks, &mut spares, &mut unread);
        }
        self.streams.lock().were_spared(&unread);
        looks
    }

    /// Makes `pages` the next victims, because what kept them in memory is gone. `pages` must be neighbours
    /// in address order. Under the shared map lock.
    pub fn choose_next(&self, pages: impl Iterator<Item = PageIndex>) {
        let mut first = None;
        for page in pages {
            first = first.or(Some(page));
            let Some(place) = self.table.known(page) else { continue };
            let mut word = place.entry().load();
            while let State::Resident { age: 1.., .. } = word.state()
                && !word.is_locked()
            {
                place.entry().grow_younger(word);
                word = place.entry().load();
            }
        }
        if let Some(page) = first {
            let mut clock = self.clock.lock();
            (clock.hand, clock.is_hand_next) = (page, true);
        }
    }

    /// Moves the hand behind `pages` if it is in them, because none of them may go just now.
    pub fn pass_over(&self, pages: PageRange) {
        let mut clock = self.clock.lock();
        if pages.contains(clock.hand) {
            clock.hand = pages.end;
        }
    }

    /// Lets the hand choose the next victims, next to those that it took before.
    pub fn choose_by_hand_next(&self) {
        self.clock.lock().is_hand_next = true;
    }

    fn range_to_evict(&self, page: PageIndex) -> Option<PageRange> {
        let range = self.ranges.lock().find(page).filter(|range| range.flags.may_evict());
        range.map(|range| range.pages)
    }

    fn evictable_at_or_after(&self, page: PageIndex) -> Option<PageRange> {
        let ranges = self.ranges.lock();
        let mut from = page;
        loop {
            let range = ranges.at_or_after(from)?;
            if range.flags.may_evict() {
                return Some(range.pages);
            }
            from = range.pages.end;
        }
    }

    /// Goes through one range. Returns where the hand stands afterwards.
    fn choose_in(
        &self,
        range: PageRange,
        batch: &mut Batch,
        max: usize,
        looks: &mut u32,
        spares: &mut Spares,
        unread: &mut Unread,
    ) -> PageIndex {
        let mut rest = range;
        while let Some((page, place)) = self.table.next(rest, Walk::Resident) {
            rest = PageRange::new(page.plus(1), range.end);
            *looks += 1;
            let word = place.entry().load();
            let State::Resident { copy, age } = word.state() else { continue };
            if word.is_locked() {
                continue;
            }
            if age > 0 && spares.spend() {
                self.stats.count(Counter::ClockSpared);
                place.entry().grow_younger(word);
            } else if unread.meets(page) {
                self.stats.count(Counter::ClockSpared);
            } else if place.entry().try_lock(word).is_ok() {
                batch.push(page, copy);
                spares.earn();
            }
            if batch.len() >= max || *looks >= LOOKS_MAX {
                return rest.start;
            }
        }
        range.end
    }
}
