//! A fork's child: pages that were out at the fork are where its parent had put them.
//!
//! The child has a copy of its parent's memory, and so of the books and of every frame and pool object as of the fork. It
//! doesn't change that copy, its *elder*, but for its pool: a page that is out is [`State::Inherited`], and the first fault on it looks
//! up in the elder's table where the bytes are. An object in the elder's pool is freed once its page isn't inherited any more. Slots are the one thing that isn't copied: the parent keeps those that were in
//! use for as long as there is a child that might read them (`areas/heirs.rs`). A child of a child has an elder with an
//! elder. When nothing is inherited any more the copy can be forgotten.
//!
//! The fork is made under the exclusive map lock, so no page is half moved in the copy: a locked one is waiting for a
//! device, and its word says where its bytes are.

use super::Pager;
use crate::table::entry::State;
use crate::units::{PageIndex, PageRange, SlotIndex};
use core::sync::atomic::Ordering;

impl<'m> Pager<'m> {
    /// The books as they are in a fork's child: whoever was looking something up isn't there. Before anything else is
    /// done with them.
    pub fn forget_holders(&self) {
        self.ranges.forget_holder();
        self.pool.forget_holder();
        if let Some(elder) = self.elder {
            elder.forget_holders();
        }
    }

    /// Takes over what the elder has of a range that is registered now and has leaves. Before any fault in it is served.
    /// `drop` takes a page out of memory that came there after the fork by nobody's doing (huge pages are made behind our
    /// back): what was out is still where the elder says.
    pub fn inherit(&self, range: PageRange, drop: impl Fn(PageIndex)) {
        let Some(elder) = self.elder else { return };
        elder.table.for_each_used(range, |page, old| {
            let after = match old.entry().load().state() {
                State::Absent | State::Resident { .. } => return,
                // All there is to these is in the word.
                state @ (State::Zero | State::Same(_)) => state,
                State::Lost(_) => {
                    self.has_lost.store(true, Ordering::Relaxed);
                    State::Lost(SlotIndex::from_raw(0))
                }
                State::Parked { .. }
                | State::Writing { .. }
                | State::Pooled(_)
                | State::OnArea(_)
                | State::Inherited(_) => State::Inherited(page),
            };
            let place = self.table.get(page).expect("a registered page has a leaf");
            let before = place.entry().load().state();
            // What can't be read any more stays poisoned.
            if before.is_resident() && after.is_evicted() {
                drop(page);
            }
            self.account(before, after);
            place.set(before, after);
        });
    }

    /// Keeps every slot that a child will read for a generation of children. What is resident or parked it has in memory.
    /// Under the exclusive map lock.
    pub fn bequeath(&self, generation: usize) {
        self.areas.bequeath(
            generation,
            |slot, page| matches!(self.state(page), State::OnArea(at) if at.slot == slot),
        );
    }

    /// Whether there may be pages whose bytes are lost. A child must know of them: where what is out may not be touched, it would
    /// find zeros.
    pub fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// A page in this state is no longer inherited: its object in the pool that it was in isn't needed any more. This process has
    /// that pool for itself, whatever became of the parent's.
    pub(super) fn free_inherited(&self, state: State) {
        if let (State::Pooled(handle), books) = self.source_of(state) {
            books.pool.free(handle);
        }
    }

    /// Pages whose bytes are only in the elder's books.
    pub fn inherited(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `account`.
        self.inherited.load(Ordering::Acquire)
    }

    /// Where the bytes of a page in this state are: the state that says so, and in whose books.
    pub(super) fn source_of(&self, state: State) -> (State, &Pager<'m>) {
        let (mut state, mut books) = (state, self);
        while let State::Inherited(page) = state {
            books = books.elder.expect("what is inherited is from somebody");
            state = books.state(page);
        }
        (state, books)
    }
}
