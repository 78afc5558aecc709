//! A fork's child: pages that were out at the fork are where the parent had put them.
//!
//! The child has a copy of its parent's memory. So it has a copy of the books and of every frame and pool
//! object as of the fork. That copy is the child's *elder*. Only the elder's pool ever changes. A page that
//! is out is [`State::Inherited`], and the first fault on it looks up in the elder's table where the bytes
//! are. An object in the elder's pool is freed once its page isn't inherited any more. Slots aren't copied.
//! The parent keeps the slots that were in use for as long as a child might read them (`areas/heirs.rs`). A
//! child of a child has an elder with an elder. When nothing is inherited any more the copy can be forgotten.
//!
//! The fork is made under the exclusive map lock, so no page is half moved in the copy. A locked page is
//! waiting for a device, and its word says where its bytes are.

use super::Pager;
use crate::table::entry::State;
use crate::units::{PageIndex, PageRange, SlotIndex};
use core::sync::atomic::Ordering;

impl<'m> Pager<'m> {
    /// Frees, in a fork's child, the locks of the ranges and of the pool, and the pool's pins: in these books
    /// and in those of all elders. The threads that were looking something up don't exist in the child. Must
    /// be the first call on the books in the child.
    pub fn forget_holders(&self) {
        self.ranges.forget_holder();
        self.pool.forget_holder();
        if let Some(elder) = self.elder {
            elder.forget_holders();
        }
    }

    /// Takes over the elder's pages of a range that is registered now and has leaves. Call before any fault
    /// in the range is served. `drop` takes a page out of memory that appeared there after the fork, because
    /// the kernel makes huge pages unasked. The bytes of a page that was out are still where the elder says.
    pub fn inherit(&self, range: PageRange, drop: impl Fn(PageIndex)) {
        let Some(elder) = self.elder else { return };
        elder.table.for_each_used(range, |page, old| {
            let after = match old.entry().load().state() {
                State::Absent | State::Resident { .. } => return,
                // The word has all there is to these states.
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
            // A page that can't be read any more stays poisoned.
            if before.is_resident() && after.is_evicted() {
                drop(page);
            }
            self.account(before, after);
            place.set(before, after);
        });
    }

    /// Keeps, on behalf of a generation of children, every slot that a child will read. A resident or parked
    /// page needs no slot, because the child has its bytes in memory. Under the exclusive map lock.
    pub fn bequeath(&self, generation: usize) {
        self.areas.bequeath(
            generation,
            |slot, page| matches!(self.state(page), State::OnArea(at) if at.slot == slot),
        );
    }

    /// Whether there may be pages whose bytes are lost. A child must know of lost pages. Where pages that are
    /// out are closed (`segv` mode), a child without the parent's books would find zeros in them.
    pub fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// Frees the pool object of a page that was inherited in this state and no longer is. This process has
    /// the elder's pool for itself, whatever became of the parent's.
    pub(super) fn free_inherited(&self, state: State) {
        if let (State::Pooled(handle), books) = self.source_of(state) {
            books.pool.free(handle);
        }
    }

    /// Returns the number of pages whose bytes are only in the elder's books.
    pub fn inherited(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `account`.
        self.inherited.load(Ordering::Acquire)
    }

    /// Returns where the bytes of a page in this state are: the state that says so, and the books that it
    /// belongs to.
    pub(super) fn source_of(&self, state: State) -> (State, &Pager<'m>) {
        let (mut state, mut books) = (state, self);
        while let State::Inherited(page) = state {
            books = books.elder.expect("what is inherited is from somebody");
            state = books.state(page);
        }
        (state, books)
    }
}
