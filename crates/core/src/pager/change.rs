//! The books follow when the program changes its memory. Everything here needs the exclusive map lock.
//!
//! A change has three steps. [`Pager::quiet`] makes sure that no page in the range is on its way. The caller
//! makes the system call. Then the caller tells the table. No other thread can look in between.

use super::Pager;
use crate::cache::Backing;
use crate::table::entry::{State, Stored};
use crate::units::{PageIndex, PageRange};
use core::sync::atomic::Ordering;

/// A page in the range is being moved. The caller releases the map lock, waits until the settled word is no
/// longer `seen`, and tries again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsettled {
    /// The value that the settled word had. The caller waits until the word has another value.
    pub seen: u32,
}

impl Pager<'_> {
    /// Checks that no page in `range` is being moved.
    pub fn quiet(&self, range: PageRange) -> Result<(), Unsettled> {
        // Ordering: Acquire pairs with the Release in `settle`. The word is read before the entries. So a
        // settle that an entry doesn't show yet changes the word on which the caller then waits.
        let seen = self.settled.load(Ordering::Acquire);
        let mut result = Ok(());
        self.table.for_each_used(range, |_, place| {
            while place.entry().load().is_locked() {
                if place.entry().ask_to_be_woken() {
                    result = Err(Unsettled { seen });
                    break;
                }
            }
        });
        result
    }

    /// Forgets pages that no longer exist, or that read as zeros again.
    pub fn discard(&self, range: PageRange) {
        self.release_all(range, |_| State::Absent);
    }

    /// Keeps nothing of pages in memory anywhere else, because the engine ends. Forgets pages that are out:
    /// the program has unmapped them.
    pub fn let_go(&self, range: PageRange) {
        self.release_all(range, |before| match before {
            State::Resident { age, .. } => State::Resident { copy: None, age },
            State::Lost(_) => before,
            _ => State::Absent,
        });
    }

    /// Frees what holds the bytes of each page in `range` whose state changes to `after`.
    fn release_all(&self, range: PageRange, after: impl Fn(State) -> State) {
        self.table.for_each_used(range, |_, place| {
            let before = place.entry().load().state();
            let after = after(before);
            if after != before {
                self.release(before);
                self.account(before, after);
                place.set(before, after);
            }
        });
    }

    /// Frees the frame, slot or object that holds a page's bytes.
    fn release(&self, state: State) {
        state.stored().into_iter().for_each(|stored| self.free(stored));
        match state {
            State::Parked { frame, .. } => {
                self.cache.unpark(frame);
                self.cache.put(frame, Backing::Memory);
            }
            State::Writing { frame } => self.cache.set_owner(frame, None),
            // The slot of a lost page stays taken: see `fail`.
            State::Lost(slot) if slot.raw() != 0 => {
                self.slots_given_up.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Renames the pages of a mapping that moved from `range` to `to`. The new pages have leaves and are
    /// unknown. The two ranges may not overlap (mremap doesn't allow it).
    pub fn remap(&self, range: PageRange, to: PageIndex) {
        assert!(range.intersection(PageRange::of(to, range.count())).is_empty());
        self.table.for_each_used(range, |page, from| {
            let new_page = PageIndex(to.0 + (page.0 - range.start.0));
            let before = from.entry().load().state();
            let after = match before {
                // A page that is moved is likely to be written, so its slot isn't worth keeping.
                State::Resident { copy: Some(Stored::Slot(at)), age } => {
                    self.areas.free(at);
                    State::Resident { copy: None, age }
                }
                state => state,
            };
            self.rename(after, page, new_page);
            from.set(before, State::Absent);
            let target = self.table.get(new_page).expect("the new pages have leaves");
            debug_assert!(target.entry().load().state() == State::Absent);
            target.set(State::Absent, after);
        });
    }

    fn rename(&self, state: State, old: PageIndex, new: PageIndex) {
        match state.stored() {
            Some(Stored::Slot(at)) => self.areas.rename(at, new),
            Some(Stored::Object(handle)) => self.pool.rename(handle, new),
            None => {}
        }
        if let State::Parked { frame, .. } | State::Writing { frame } = state {
            debug_assert_eq!(self.cache.owner(frame), Some(old));
            self.cache.set_owner(frame, Some(new));
        }
    }

    /// Records that a page of a mapping which has just come under Farpage's care is in memory.
    pub fn adopt_present(&self, page: PageIndex) {
        let Some(place) = self.table.get(page) else { return };
        let word = place.entry().load();
        if word.state() == State::Absent && !word.is_locked() {
            let after = State::Resident { copy: None, age: 0 };
            self.account(State::Absent, after);
            place.set(State::Absent, after);
        }
    }
}
