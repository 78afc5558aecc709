//! From frames to slots: batches of pages that go out together, the pool's write-back, and what becomes of
//! a page when its write is done or has failed.
//!
//! While its frame is being written a page is `Writing`, not locked: a fault copies it out of the frame and
//! doesn't wait for the disk. The frame's owner then is nobody, and the completion frees frame and slot.

use super::Pager;
use super::step::{WRITE_PAGES_MAX, WriteBatch, WriteRequest};
use crate::areas::{AreaState, SlotRun};
use crate::cache::Backing;
use crate::stats::Counter;
use crate::table::Place;
use crate::table::entry::{State, Stored};
use crate::units::{AreaId, FrameIndex, NodeId, PageIndex, SlotIndex};
use crate::zswap::codec::{Decoder, decompress};
use core::sync::atomic::Ordering;

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteProgress {
    /// Every page is settled; the request can be forgotten.
    Finished,
    /// Some pages are just being faulted on: call again.
    Again,
}

/// What [`Pager::shrink`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Shrunk {
    /// The pool is small enough.
    Enough,
    /// There is no area to write to: [`Pager::densify`] may make room.
    NoArea,
    /// An object was freed that a page in memory had kept.
    Released,
    /// The object that goes first waits in the write batch.
    Queued,
    /// Its page is just being faulted on; it is the youngest of its kind now.
    Busy,
    /// No free frame has memory: give one some (see [`Pager::cache`]) or wait for writes.
    NoFrame,
}

/// Slots looked at in one search for kept ones.
const KEPT_LOOKS: u32 = 16 * 1024;

impl Pager<'_> {
    /// Moves the pool's object that goes first into a frame and from there into the write batch, if the pool is over
    /// its accept threshold; objects that are only kept are freed before. `writes` must not be full. Under the shared map
    /// lock.
    pub fn shrink(&self, writes: &mut WriteBatch, decoder: &mut Decoder) -> Shrunk {
        if !self.pool.over_accept_threshold() {
            return Shrunk::Enough;
        }
        if let Some((handle, page)) = self.pool.first_kept() {
            return self.release_object(handle, page);
        }
        if !self.areas.any_writable() {
            return Shrunk::NoArea;
        }
        let Some((handle, page)) = self.pool.first_to_go() else { return Shrunk::Enough };
        pause!();
        let Some(frame) = self.cache.take_backed() else { return Shrunk::NoFrame };
        let place = self.table.get(page).expect("a pool object's page has a leaf");
        let word = place.entry().load();
        pause!();
        // Identity: between `first_to_go` and here the object may have been faulted in and the page stored anew.
        #[cfg(feature = "planted")]
        let skip_check = crate::planted::strikes(crate::planted::Bug::SkipIdentityCheck);
        #[cfg(not(feature = "planted"))]
        let skip_check = false;
        let same = skip_check || word.state() == State::Pooled(handle);
        if word.is_locked() || !same || place.entry().try_lock(word).is_err() {
            self.cache.put(frame, Backing::Memory);
            self.pool.rotate(handle, page);
            return Shrunk::Busy;
        }
        pause!();
        // SAFETY: `take_backed` has just given us the frame, with memory; nobody else knows it.
        let bytes = unsafe { self.cache.bytes_mut(frame) };
        if self.pool.read(handle, |stored| decompress(self.config.codec, stored, bytes, decoder)).is_err() {
            // Memory that isn't what was stored: the page stays where it is, and a fault on it will fail.
            self.cache.put(frame, Backing::Memory);
            self.pool.rotate(handle, page);
            self.settle(page, place, word.state(), word.state());
            return Shrunk::Busy;
        }
        self.pool.free(handle);
        self.cache.set_owner(frame, Some(page));
        writes.push(frame);
        self.stats.count(Counter::Zswpwb);
        self.settle(page, place, word.state(), State::Writing { frame });
        Shrunk::Queued
    }

    /// Gives the oldest of the waiting frames neighbouring slots, in the area that the order has for CPUs of
    /// `node`; slots are taken for all of them at once, in as many runs as that needs. None if no area has a free
    /// slot: then [`Pager::release_kept`], or [`Pager::park_again`]. `cpu` as in [`crate::areas::Areas::take`].
    pub fn assign(&self, cpu: usize, node: NodeId, writes: &mut WriteBatch) -> Option<WriteRequest> {
        if writes.is_empty() {
            return None;
        }
        let run = self.taken_run(writes).or_else(|| {
            self.areas.take(cpu, node, writes.len() as u32, |run| writes.push_run(run));
            writes.pop_run()
        })?;
        pause!();
        let count = run.count as usize;
        let mut request = WriteRequest {
            run,
            frames: [FrameIndex(0); WRITE_PAGES_MAX],
            open: u64::MAX >> (WRITE_PAGES_MAX - count),
            is_over: false,
        };
        request.frames[..count].copy_from_slice(&writes.frames()[..count]);
        writes.drop_first(count);
        for (slot, frame) in request.open() {
            // SAFETY: frames in a write batch are ours until the write is done, have memory, and nobody
            // writes them.
            let sum = self.areas.checksum(unsafe { self.cache.bytes(frame) });
            // A page that was faulted in again meanwhile is written all the same; nobody will read it.
            let page = self.cache.owner(frame).unwrap_or(PageIndex(0));
            pause!();
            self.areas.own(slot, page, sum);
        }
        self.stats.count(Counter::AreaWrites);
        Some(request)
    }

    /// A run that was taken before, in an area that may still be written.
    fn taken_run(&self, writes: &mut WriteBatch) -> Option<SlotRun> {
        while let Some(run) = writes.pop_run() {
            if self.areas.state(run.first.area()) != AreaState::ReadOnly {
                return Some(run);
            }
            self.free_run(run);
        }
        None
    }

    fn free_run(&self, run: SlotRun) {
        (0..run.count).for_each(|at| self.areas.free(run.first.plus(at)));
        self.areas.finished(run.first.area());
    }

    /// The write is over. `result` is the same for all pages of the request. Under the shared map lock.
    pub fn write_done(&self, request: &mut WriteRequest, result: Result<(), AreaState>) -> WriteProgress {
        if !core::mem::replace(&mut request.is_over, true) {
            self.areas.finished(request.run.first.area());
        }
        if let Err(state) = result {
            self.areas.set_state(request.run.first.area(), state);
        }
        let snapshot = *request;
        for (slot, frame) in snapshot.open() {
            if self.write_settled(slot, frame, result) {
                request.open &= !(1 << (slot.offset() - request.run.first.offset()));
            }
        }
        if request.open == 0 { WriteProgress::Finished } else { WriteProgress::Again }
    }

    /// Settles one page of a finished write; false if its page is just being moved.
    fn write_settled(&self, slot: SlotIndex, frame: FrameIndex, result: Result<(), AreaState>) -> bool {
        let Some(page) = self.cache.owner(frame) else {
            // Faulted in or discarded while it was being written.
            self.areas.free(slot);
            self.cache.put(frame, Backing::Memory);
            return true;
        };
        let Some(place) = self.lock_writing(page, frame) else { return false };
        let after = match result {
            Ok(()) => {
                self.stats.count(Counter::Pswpout);
                self.areas.rename(slot, page);
                self.cache.put(frame, Backing::Memory);
                State::OnArea(slot)
            }
            Err(state) => {
                if state == AreaState::ReadOnly {
                    self.stats.count(Counter::WriteErrors);
                }
                self.areas.free(slot);
                // Again: freeing the slot may have reopened a full area.
                self.areas.set_state(slot.area(), state);
                self.cache.park(frame, page);
                State::Parked { frame, copy: None }
            }
        };
        self.settle(page, place, State::Writing { frame }, after);
        true
    }

    /// Locks a page that is being written out of `frame`; none if it is just being moved, or isn't there any more.
    fn lock_writing(&self, page: PageIndex, frame: FrameIndex) -> Option<Place<'_>> {
        pause!();
        let place = self.table.known(page)?;
        let word = place.entry().load();
        pause!();
        let is_writing = !word.is_locked() && word.state() == (State::Writing { frame });
        (is_writing && place.entry().try_lock(word).is_ok()).then_some(place)
    }

    /// No slot is to be had: parks what waits again. Pages that are just being faulted on stay in the batch.
    pub fn park_again(&self, writes: &mut WriteBatch) {
        while let Some(run) = writes.pop_run() {
            self.free_run(run);
        }
        let mut at = 0;
        while at < writes.count {
            let frame = writes.frames[at];
            let done = match self.cache.owner(frame) {
                None => {
                    self.cache.put(frame, Backing::Memory);
                    true
                }
                Some(page) => self.park_unwritten(frame, page),
            };
            if done {
                writes.frames.copy_within(at + 1..writes.count, at);
                writes.count -= 1;
            } else {
                at += 1;
            }
        }
    }

    fn park_unwritten(&self, frame: FrameIndex, page: PageIndex) -> bool {
        let Some(place) = self.lock_writing(page, frame) else { return false };
        self.stats.count(Counter::AreaFull);
        self.cache.park(frame, page);
        self.settle(page, place, State::Writing { frame }, State::Parked { frame, copy: None });
        true
    }

    /// Frees up to `max` slots that resident pages only keep. Returns how many. `unprotect` is told of each page while that is
    /// locked: if it was to be copied out and stayed, nothing is to be heard of its next write any more.
    pub fn release_kept(&self, max: u32, unprotect: impl Fn(PageIndex)) -> u32 {
        let mut released = 0;
        for id in 0..self.areas.count() {
            let mut from = self.kept_hint.load(Ordering::Relaxed);
            while released < max {
                // A page that is being moved is passed over: its slot can't be freed now, and finding it
                // again and again would be waiting for whoever moves it.
                let is_kept = |slot, page| {
                    self.table.known(page).is_some_and(|place| {
                        let word = place.entry().load();
                        let state = word.state();
                        !word.is_locked()
                            && matches!(state, State::Resident { copy: Some(Stored::Slot(kept)), .. } if kept == slot)
                    })
                };
                let Some(slot) = self.areas.find_owned(AreaId(id as u8), from, KEPT_LOOKS, is_kept) else {
                    from = from.wrapping_add(KEPT_LOOKS);
                    break;
                };
                from = slot.offset() + 1;
                released += u32::from(self.release_slot(slot, &unprotect));
            }
            self.kept_hint.store(from, Ordering::Relaxed);
        }
        released
    }
}
