//! The way from frames to slots: batches of pages that are written together, the pool's write-back, and the
//! end of a write, done or failed.
//!
//! A page is `Writing`, not locked, while its frame or its pack is being written. A fault copies the page out
//! of the frame and doesn't wait for the disk. After such a fault the frame has no owner, and the completion
//! of the write frees frame and slot.

use super::Pager;
use super::pack;
use super::parcels::{Origin, Parcel, WriteBatch, WriteRequest};
use crate::areas::{AreaState, SlotRun};
use crate::cache::Backing;
use crate::config::Codec;
use crate::stats::Counter;
use crate::table::EntryRef;
use crate::table::entry::State;
use crate::units::{AreaId, FrameIndex, NodeId, PAGE_BYTES, PageIndex, Part, SlotPart};
use crate::zswap::codec::{Scratch, decompress};
use core::sync::atomic::Ordering;

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteProgress {
    /// Every page is settled. The request can be forgotten.
    Finished,
    /// Some pages are being faulted on. Call again.
    Again,
}

/// The outcome of [`Pager::shrink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Shrunk {
    /// The pool is small enough.
    Enough,
    /// There is no area to write to: [`Pager::densify`] may free space in the pool.
    NoArea,
    /// An object was freed that a page in memory had only kept.
    Released,
    /// An object left the pool and waits in the write batch.
    Queued,
    /// The object's page is being faulted on. The object is the youngest of its kind now.
    Busy,
    /// No free frame has memory, or few frames are free. Give a frame memory (see [`Pager::cache`]), or wait
    /// for writes.
    NoFrame,
}

/// Bytes of the largest object that is packed. A larger one is written as a whole page, because an object
/// that fits beside it seldom comes.
const OBJECT_MAX: usize = PAGE_BYTES * 3 / 4;
/// Frames of which the shrinker leaves one to faults.
const LEFT_BY_SHRINK: u32 = 8;
/// Frames of which packs leave one to faults.
const LEFT_BY_PACKS: u32 = 16;
/// Bytes of the pool's limit for each byte that pages that don't compress may take. Beyond that they go to an
/// area at once.
pub(super) const WHOLE_MAX: u32 = 16;
/// Bytes of the pool's limit for each byte that the shrinker leaves to pages that don't compress.
const WHOLE_KEPT: u32 = 20;
/// Pages that are out for each slot in use, below which an area counts as needed.
const NEEDED: u64 = 16;
/// Slots looked at in one search for kept slots.
const KEPT_LOOKS: u32 = 16 * 1024;

impl Pager<'_> {
    /// Moves one object from the pool through a frame into the write batch. Does so if the pool is over its
    /// accept threshold, or if it holds too many pages that don't compress. Over the threshold, objects that
    /// are only kept are freed first. `writes` must not be full. Under the shared map lock.
    pub fn shrink(&self, writes: &mut WriteBatch, scratch: &mut Scratch) -> Shrunk {
        if self.pool.over_accept_threshold() {
            if let Some((handle, page)) = self.pool.first_kept() {
                return self.release_object(handle, page);
            }
        } else if !self.wholes_go(WHOLE_KEPT) {
            return Shrunk::Enough;
        }
        if !self.areas.any_writable() {
            return Shrunk::NoArea;
        }
        let Some((handle, page)) = self.pool.first_to_go() else { return Shrunk::Enough };
        pause!();
        let Some(frame) = self.frame_leaving(LEFT_BY_SHRINK) else { return Shrunk::NoFrame };
        let place = self.table.get(page).expect("a pool object's page has a leaf");
        let word = place.entry().load();
        pause!();
        // Identity: since `first_to_go` the object may have been faulted in, and the page stored anew.
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
        // SAFETY: `frame_leaving` has just given us the frame, with memory, and no other thread knows the
        // frame.
        let bytes = unsafe { self.cache.bytes_mut(frame) };
        let (object, decoder) = scratch.page_and_decoder();
        let read = self.pool.read(handle, |stored| {
            object[..stored.len()].copy_from_slice(stored);
            decompress(self.config.codec, stored, bytes, decoder).map(|()| stored.len())
        });
        let Ok(length) = read else {
            // The memory isn't what was stored. The page stays where it is, and a fault on the page will
            // fail.
            self.cache.put(frame, Backing::Memory);
            self.pool.rotate(handle, page);
            self.settle(page, place, word.state(), word.state());
            return Shrunk::Busy;
        };
        self.pool.free(handle);
        self.cache.set_owner(frame, Some(page));
        self.queue(writes, (frame, Origin::Pool), Some(&object[..length]));
        self.settle(page, place, word.state(), State::Writing { frame });
        Shrunk::Queued
    }

    /// Whether [`Pager::shrink`] has anything to do.
    pub fn should_shrink(&self) -> bool {
        self.pool.is_too_full(self.may_wholes_go().then_some(WHOLE_KEPT))
    }

    fn may_wholes_go(&self) -> bool {
        self.config.codec != Codec::None && self.areas.any_writable() && self.is_area_needed()
    }

    /// Whether the pages that are out don't fit the pool. Slots that resident pages have kept count, too:
    /// the pages didn't fit a while ago.
    fn is_area_needed(&self) -> bool {
        self.areas.in_use() * NEEDED > self.evicted()
    }

    /// Whether pages that don't compress take more than one of `part` bytes of the pool's limit, and can go
    /// to an area. In the pool a page of this kind takes as much memory as in the program, where it costs no
    /// fault. Only few of them should wait in the pool for their write.
    pub(super) fn wholes_go(&self, part: u32) -> bool {
        self.may_wholes_go() && self.pool.has_many_whole(part)
    }

    /// Adds a page to the write batch: its frame, and its object if it was compressed. The page is packed
    /// with other pages if there is a frame for the pack. `writes` must not be full.
    pub(super) fn queue(
        &self,
        writes: &mut WriteBatch,
        (frame, origin): (FrameIndex, Origin),
        object: Option<&[u8]>,
    ) {
        let Some(object) = object.filter(|object| self.config.packs && object.len() <= OBJECT_MAX) else {
            writes.push(Parcel::whole(frame, origin));
            return;
        };
        let parcel = match writes.pack_for(object.len()) {
            Some(parcel) => parcel,
            None => match self.frame_leaving(LEFT_BY_PACKS) {
                Some(pack) => {
                    // SAFETY: `frame_leaving` has just given us the frame, with memory, and no other thread
                    // knows the frame.
                    pack::clear(unsafe { self.cache.bytes_mut(pack) });
                    writes.push(Parcel::pack(pack))
                }
                None => {
                    writes.push(Parcel::whole(frame, origin));
                    return;
                }
            },
        };
        let (at, before) = parcel.add((frame, origin), object.len());
        // SAFETY: the frame of a waiting pack is the batch's, which is ours alone, and it has memory.
        pack::append(unsafe { self.cache.bytes_mut(parcel.written()) }, at, before, object);
    }

    /// Takes a frame with memory, if more than one in `one_of` of all frames is free. The frames that stay
    /// free are left to faults. Victims leave a quarter of all frames, the shrinker half of that, and packs,
    /// which are few, half of that again.
    fn frame_leaving(&self, one_of: u32) -> Option<FrameIndex> {
        if self.cache.usage().free <= self.cache.count() / one_of { None } else { self.cache.take_backed() }
    }

    /// Gives the oldest waiting parcels neighbouring slots, in the area that comes next in the order for CPUs
    /// of `node`. Slots are taken for all waiting parcels at once, in as many runs as needed, and each call
    /// uses one run. Returns `None` if no area has a free slot: then call [`Pager::release_kept`] or
    /// [`Pager::park_again`]. `cpu` as in [`crate::areas::Areas::take`]. Under the shared map lock.
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
        writes.parcels()[..count].iter_mut().for_each(|parcel| self.unpack_lone(parcel));
        let mut request = WriteRequest::new(run, &writes.parcels()[..count]);
        writes.drop_first(count);
        for (slot, parcel) in request.parcels() {
            self.areas.will_have(slot, parcel.count() as u32);
            for (part, frame) in parcel.pages() {
                // SAFETY: the frames of pages in a write batch are ours until the write is done, have memory,
                // and nobody writes them.
                let sum = self.areas.checksum(unsafe { self.cache.bytes(frame) });
                // A page that was faulted in again meanwhile is written all the same. Nobody will read it.
                let page = self.cache.owner(frame).unwrap_or(PageIndex(0));
                pause!();
                self.areas.own(SlotPart { slot, part }, page, sum);
            }
        }
        Some(request)
    }

    /// Turns a pack with a single page into a whole page. A whole page takes as much of the area, and needn't
    /// be unpacked.
    fn unpack_lone(&self, parcel: &mut Parcel) {
        let mut pages = parcel.pages();
        if parcel.is_pack()
            && let (Some((part, frame)), None) = (pages.next(), pages.next())
        {
            self.cache.put(parcel.written(), Backing::Memory);
            *parcel = Parcel::whole(frame, parcel.origin(part));
        }
    }

    /// Returns a run that was taken before, in an area that may still be written.
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
        (0..run.count).for_each(|at| self.areas.free_unused(run.first.plus(at)));
        self.areas.finished(run.first.area());
    }

    /// Ends a write. `result` is the same for all pages of the request. Under the shared map lock.
    pub fn write_done(&self, request: &mut WriteRequest, result: Result<(), AreaState>) -> WriteProgress {
        if !core::mem::replace(&mut request.is_over, true) {
            self.areas.finished(request.run().first.area());
            if result.is_ok() {
                self.stats.count(Counter::AreaWrites);
                self.stats.add(Counter::AreaSlots, u64::from(request.run().count));
            }
        }
        if let Err(state) = result {
            self.areas.set_state(request.run().first.area(), state);
        }
        for (slot, parcel) in request.parcels() {
            for (part, frame) in parcel.pages() {
                let from = (frame, parcel.origin(part));
                if self.write_settled(SlotPart { slot, part }, from, result) {
                    self.leave(parcel, part);
                }
            }
        }
        if request.open().next().is_none() { WriteProgress::Finished } else { WriteProgress::Again }
    }

    /// Takes a page out of a parcel, because it is no longer on its way to an area. The last page frees the
    /// pack's frame.
    fn leave(&self, parcel: &mut Parcel, part: Part) {
        parcel.remove(part);
        if parcel.is_pack() && parcel.count() == 0 {
            self.cache.put(parcel.written(), Backing::Memory);
        }
    }

    /// Settles one page of a finished write. Returns false if the page is being moved.
    fn write_settled(
        &self,
        at: SlotPart,
        (frame, origin): (FrameIndex, Origin),
        result: Result<(), AreaState>,
    ) -> bool {
        let Some(page) = self.cache.owner(frame) else {
            // The page was faulted in or discarded while it was being written.
            self.free_after(at, result);
            self.cache.put(frame, Backing::Memory);
            return true;
        };
        let Some(place) = self.lock_writing(page, frame) else { return false };
        let after = match result {
            Ok(()) => {
                self.stats.count(Counter::Pswpout);
                self.stats.add(Counter::Zswpwb, u64::from(origin == Origin::Pool));
                self.areas.rename(at, page);
                self.cache.put(frame, Backing::Memory);
                State::OnArea(at)
            }
            Err(state) => {
                if state == AreaState::ReadOnly {
                    self.stats.count(Counter::WriteErrors);
                }
                self.free_after(at, result);
                self.cache.park(frame, page);
                State::Parked { frame, copy: None }
            }
        };
        self.settle(page, place, State::Writing { frame }, after);
        true
    }

    /// Frees the slot of a page after a write that ended with `result`.
    fn free_after(&self, at: SlotPart, result: Result<(), AreaState>) {
        self.areas.free(at);
        if let Err(state) = result {
            // Set again, because freeing the slot may have reopened a full area.
            self.areas.set_state(at.slot.area(), state);
        }
    }

    /// Locks a page that is being written out of `frame`. Returns `None` if the page is being moved, or isn't
    /// there any more.
    fn lock_writing(&self, page: PageIndex, frame: FrameIndex) -> Option<EntryRef<'_>> {
        pause!();
        let place = self.table.known(page)?;
        let word = place.entry().load();
        pause!();
        let is_writing = !word.is_locked() && word.state() == (State::Writing { frame });
        (is_writing && place.entry().try_lock(word).is_ok()).then_some(place)
    }

    /// Parks the waiting pages again when no slot is free. Pages that are being faulted on stay in the batch.
    /// Under the shared map lock.
    pub fn park_again(&self, writes: &mut WriteBatch) {
        while let Some(run) = writes.pop_run() {
            self.free_run(run);
        }
        for parcel in writes.parcels() {
            for (part, frame) in parcel.pages() {
                let is_done = match self.cache.owner(frame) {
                    None => {
                        self.cache.put(frame, Backing::Memory);
                        true
                    }
                    Some(page) => self.park_unwritten(frame, page),
                };
                if is_done {
                    self.leave(parcel, part);
                }
            }
        }
        writes.drop_empty();
    }

    fn park_unwritten(&self, frame: FrameIndex, page: PageIndex) -> bool {
        let Some(place) = self.lock_writing(page, frame) else { return false };
        self.stats.count(Counter::AreaFull);
        self.cache.park(frame, page);
        self.settle(page, place, State::Writing { frame }, State::Parked { frame, copy: None });
        true
    }

    /// Frees up to `max` slots whose pages are all resident and only keep their copies there. Returns how
    /// many. Calls `unprotect` with each page while the page is locked. A page that was to be copied out and
    /// stayed is write-protected, but its next write need not be reported any more. Under the shared map
    /// lock.
    pub fn release_kept(&self, max: u32, unprotect: impl Fn(PageIndex)) -> u32 {
        let mut released = 0;
        for (id, hint) in self.kept_hints.iter().enumerate().take(self.areas.count()) {
            let mut from = hint.load(Ordering::Relaxed);
            while released < max {
                // A page that is being moved is passed over. Its slot can't be freed now, and finding the
                // slot again and again would be waiting for the thread that moves the page.
                let is_kept = |slot| self.areas.owners(slot).all(|page| self.keeps_in(page, slot).is_some());
                let Some(slot) = self.areas.find_owned(AreaId(id as u8), from, KEPT_LOOKS, is_kept) else {
                    from = from.wrapping_add(KEPT_LOOKS);
                    break;
                };
                from = slot.offset() + 1;
                released += u32::from(self.release_slot(slot, &unprotect));
            }
            hint.store(from, Ordering::Relaxed);
        }
        released
    }
}
