//! The program changes its memory: what we know follows. Everything here needs the exclusive map lock.
//!
//! A change first makes sure that no page in its range is on its way ([`Pager::quiet`]); then it makes the
//! system call; then it tells the table. Nobody can look in between.

use super::Pager;
use crate::cache::Backing;
use crate::table::entry::{State, Stored};
use crate::units::{PageIndex, PageRange};
use core::sync::atomic::Ordering;

/// A page in the range is being moved: release the map lock, wait until the settled word is no longer
/// `seen`, try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsettled {
    /// The value to wait away from.
    pub seen: u32,
}

impl Pager<'_> {
    /// Whether no page in `range` is being moved.
    pub fn quiet(&self, range: PageRange) -> Result<(), Unsettled> {
        // Ordering: Acquire pairs with the Release in `settle`: read before the entries, so that a settle
        // that we miss in an entry has changed the word we then wait on.
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

    /// The pages no longer exist, or read as zeros again.
    pub fn discard(&self, range: PageRange) {
        self.table.for_each_used(range, |_, place| {
            let before = place.entry().load().state();
            self.release(before);
            self.account(before, State::Absent);
            place.set(before, State::Absent);
        });
    }

    /// Frees whatever holds a page's bytes.
    fn release(&self, state: State) {
        state.stored().into_iter().for_each(|stored| self.free(stored));
        match state {
            State::Parked { frame, .. } => {
                self.cache.unpark(frame);
                self.cache.put(frame, Backing::Memory);
            }
            State::Writing { frame } => self.cache.set_owner(frame, None),
            // A lost page's slot stays taken: see `fail`.
            State::Lost(slot) if slot.raw() != 0 => {
                self.slots_given_up.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// The mapping moved: every page of `range` is now as many pages further on as `to` is from its start.
    /// The new pages have leaves and are unknown; the ranges may not overlap (mremap doesn't allow it).
    pub fn remap(&self, range: PageRange, to: PageIndex) {
        assert!(range.intersection(PageRange::of(to, range.count())).is_empty());
        self.table.for_each_used(range, |page, from| {
            let new_page = PageIndex(to.0 + (page.0 - range.start.0));
            let before = from.entry().load().state();
            let after = match before {
                // What is moved is likely to be written.
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

    /// A page of a mapping that has just come under our care is in memory.
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
