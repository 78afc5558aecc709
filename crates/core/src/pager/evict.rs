//! The pager's half of an eviction. [`Pager::begin_evict`] locks victims and gives each a frame. The driver
//! takes the victims out of the program. [`Pager::park`] parks them. [`Pager::place_oldest`] then finds the
//! oldest parked page a place.

use super::Pager;
use super::parcels::{Origin, WriteBatch};
use super::step::{BATCH_MAX, Batch, Taken, Ticket, Victim};
use super::write::WHOLE_MAX;
use crate::cache::Backing;
use crate::reclaim::recency::Epoch;
use crate::reclaim::rivals::Way;
use crate::stats::Counter;
use crate::table::EntryRef;
use crate::table::entry::{AGE_MAX, Past, SameWord, State, Stored};
use crate::units::{FrameIndex, PAGE_BYTES, PageIndex};
use crate::zswap::codec::{Scratch, compress};
use crate::zswap::same_filled::same_filled;

/// Laps that a page is spared after it could not be taken: its holder is likely to go on holding it.
const AGE_BUSY: u8 = 3;
const _: () = assert!(AGE_BUSY <= AGE_MAX);

/// What [`Pager::place_oldest`] did with the oldest parked page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Placed {
    /// Nothing is parked.
    Nothing,
    /// The page went to a place that takes less memory, or none.
    Done,
    /// The page waits in the write batch.
    Queued,
    /// The page is being faulted on, or a stream will come to it. The next parked page is the oldest now.
    Busy,
    /// Neither the pool nor an area takes the page.
    NowhereToGo,
}

/// The smaller form that a placed page takes.
enum Small<'s> {
    /// A word or an object in the pool.
    State(State),
    /// The page needs a slot, or a part of a slot for this object.
    Object(&'s [u8]),
    /// The page needs a whole slot.
    No,
}

impl Pager<'_> {
    /// Locks up to `max` victims and gives each a frame. An empty batch means that no page can be evicted or
    /// that no frame is free: see `Cache::usage`. Under the shared map lock.
    pub fn begin_evict(&self, batch: &mut Batch, max: usize) {
        batch.clear();
        // A quarter of the frames is left to faults.
        let keep = self.cache.count() / 4;
        let mut frames = [(FrameIndex(0), Backing::Hole); BATCH_MAX];
        let mut count = 0;
        while count < max.min(BATCH_MAX) {
            let wanted = (max.min(BATCH_MAX) - count) as u32;
            let Some((first, length, backing)) = self.cache.take_run(wanted, keep) else { break };
            for frame in first.0..first.0 + length {
                frames[count] = (FrameIndex(frame), backing);
                count += 1;
            }
        }
        pause!();
        if count > 0 {
            self.choose(batch, count);
        }
        for (at, &(frame, backing)) in frames[..count].iter().enumerate() {
            if at < batch.len() {
                let victim = &mut batch.victims()[at];
                (victim.frame, victim.backing) = (frame, backing);
            } else {
                self.cache.put(frame, backing);
            }
        }
    }

    /// Releases the victims that a system call uses now, and takes them out of the batch. `held` has one bit
    /// for each victim, by its position in the batch. Must be called before anything is taken. Returns the
    /// number of victims released. Under the shared map lock; the batch holds the victims' locks.
    pub fn release_held(&self, batch: &mut Batch, held: u128) -> usize {
        const { assert!(BATCH_MAX <= u128::BITS as usize) };
        let before = batch.len();
        batch.retain(|at, victim| {
            let held = held & 1 << at != 0;
            if held {
                self.stats.count(Counter::EvictBusy);
                self.release_victim(victim);
            }
            !held
        });
        before - batch.len()
    }

    /// Frees the slot of a victim that isn't going to be taken and that the driver has made writable. Under
    /// the shared map lock; the batch holds the victim's lock.
    pub fn leave_slot(&self, victim: &mut Victim) {
        if let Some(Stored::Slot(slot)) = victim.copy {
            self.areas.free(slot);
            victim.copy = None;
        }
    }

    /// Releases a victim that stays where it is.
    fn release_victim(&self, victim: &Victim) {
        let place = self.place(victim.page);
        let before = place.entry().load().state();
        self.cache.put(victim.frame, victim.backing);
        self.rivals.stayed(victim.page);
        self.settle(victim.page, place, before, State::Resident { copy: victim.copy, age: AGE_BUSY });
    }

    /// Parks the victims that the driver has taken out, and releases the rest. Under the shared map lock; the
    /// batch holds the victims' locks, which end here.
    pub fn park(&self, batch: &mut Batch) {
        // The return of a page that only came with a walk doesn't prove that the page is in constant use.
        let went = if batch.way == Way::Hand { self.recency.now() } else { Epoch(0) };
        let is_behind = batch.way == Way::Behind;
        for victim in batch.victims() {
            let place = self.place(victim.page);
            let word = place.entry().load();
            let before = word.state();
            let after = match victim.taken {
                Taken::Busy => {
                    self.stats.count(Counter::EvictBusy);
                    self.release_victim(victim);
                    continue;
                }
                Taken::Yes => {
                    self.stats.count(Counter::EvictTaken);
                    match victim.backing {
                        Backing::Hole => self.cache.park_moved(victim.frame, victim.page),
                        Backing::Memory => self.cache.park(victim.frame, victim.page),
                    }
                    let copy = if is_behind {
                        self.unless_far(victim.copy, victim.page, victim.frame)
                    } else {
                        victim.copy
                    };
                    State::Parked { frame: victim.frame, copy }
                }
                Taken::Gone => {
                    self.stats.count(Counter::EvictGone);
                    self.cache.put(victim.frame, victim.backing);
                    victim.copy.into_iter().for_each(|copy| self.free(copy));
                    State::Absent
                }
            };
            self.settle_with(victim.page, place, before, after, Some(Past { went, ..word.past() }));
        }
        batch.clear();
    }

    /// Finds a place for the oldest parked page. `writes` must not be full. Under the shared map lock.
    pub fn place_oldest(&self, scratch: &mut Scratch, writes: &mut WriteBatch) -> Placed {
        let Some((frame, page)) = self.cache.oldest() else { return Placed::Nothing };
        if self.is_held_for_stream(frame, page) {
            self.cache.rotate(frame);
            return Placed::Busy;
        }
        pause!();
        let Some((place, copy)) = self.lock_parked(frame, page) else { return Placed::Busy };
        let copy = self.unless_changed(copy, frame, scratch);
        let before = State::Parked { frame, copy };
        let leave_to = |copy: Stored| {
            self.stats.count(Counter::EvictClean);
            self.leave_frame(frame);
            self.settle(page, place, before, copy.alone());
            Placed::Done
        };
        if let Some(copy) = copy.filter(|copy| !self.is_doubtful(*copy)) {
            return leave_to(copy);
        }
        let shrunk = self.shrink_page(frame, page, scratch);
        if let Small::State(after) = shrunk {
            copy.into_iter().for_each(|copy| self.free(copy));
            self.leave_frame(frame);
            self.settle(page, place, before, after);
            return Placed::Done;
        }
        if self.areas.any_writable() {
            copy.into_iter().for_each(|copy| self.free(copy));
            self.cache.unpark(frame);
            self.cache.set_owner(frame, Some(page));
            let object = match shrunk {
                Small::Object(object) => Some(object),
                _ => None,
            };
            self.queue(writes, (frame, Origin::Parked), object);
            self.settle(page, place, before, State::Writing { frame });
            pause!();
            return Placed::Queued;
        }
        if let Some(copy) = copy {
            return leave_to(copy);
        }
        self.cache.rotate(frame);
        self.settle(page, place, before, before);
        Placed::NowhereToGo
    }

    /// Locks the page that should be parked in `frame`. If a fault has the page, makes it the youngest parked
    /// page instead.
    fn lock_parked(&self, frame: FrameIndex, page: PageIndex) -> Option<(EntryRef<'_>, Option<Stored>)> {
        let place = self.table.known(page)?;
        let word = place.entry().load();
        pause!();
        if let State::Parked { frame: found, copy } = word.state()
            && found == frame
            && !word.is_locked()
            && place.entry().try_lock(word).is_ok()
        {
            return Some((place, copy));
        }
        self.cache.rotate(frame);
        None
    }

    /// Finds a page a place in memory where it takes less, if there is one.
    fn shrink_page<'s>(&self, frame: FrameIndex, page: PageIndex, scratch: &'s mut Scratch) -> Small<'s> {
        // SAFETY: we hold the lock bit of the parked page that owns the frame. Parked frames have memory, and
        // nobody writes them.
        let bytes: &[u8; PAGE_BYTES] = unsafe { self.cache.bytes(frame) };
        match same_filled(bytes) {
            Some(0) => {
                self.stats.count(Counter::SwpoutZero);
                return Small::State(State::Zero);
            }
            Some(word) => {
                if let Some(packed) = SameWord::pack(word) {
                    self.stats.count(Counter::SwpoutSame);
                    return Small::State(State::Same(packed));
                }
            }
            None => {}
        }
        let accepts = || self.pool.accepts();
        let is_accepted = accepts() || self.make_space_in_pool() && accepts();
        if !is_accepted {
            self.stats.count(Counter::PoolLimitHit);
            if !(self.config.packs && self.areas.any_writable()) {
                return Small::No;
            }
        }
        pause!();
        let compressed =
            compress(self.config.codec, bytes, scratch, self.config.compressed_bytes_max as usize);
        let needs_slot = compressed.map_or(Small::No, Small::Object);
        if !is_accepted {
            return needs_slot;
        }
        if compressed.is_none() && self.wholes_go(WHOLE_MAX) {
            return Small::No;
        }
        // A few pages that don't compress are stored as they are while the pool has free space. The shrinker
        // takes them first.
        let store = || self.pool.store(page, compressed.unwrap_or(bytes));
        match store().or_else(|error| if self.make_space_in_pool() { store() } else { Err(error) }) {
            Ok(handle) => {
                self.stats.count(Counter::Zswpout);
                if compressed.is_none() {
                    self.stats.count(Counter::StoredIncompressible);
                }
                Small::State(State::Pooled(handle))
            }
            Err(_) => {
                self.stats.count(Counter::PoolLimitHit);
                needs_slot
            }
        }
    }

    /// Frees the frame that a parked page has left.
    fn leave_frame(&self, frame: FrameIndex) {
        self.cache.unpark(frame);
        self.cache.put(frame, Backing::Memory);
    }

    /// Locks the oldest parked page, which has nowhere to go, so that it can be installed again and its frame
    /// is free. Under the shared map lock; the ticket keeps the page's lock.
    pub fn put_back(&self) -> Option<Ticket> {
        let (frame, page) = self.cache.oldest()?;
        pause!();
        let (_, copy) = self.lock_parked(frame, page)?;
        let before = State::Parked { frame, copy };
        let frame = Some((frame, Backing::Memory));
        Some(Ticket { frame, put_back: true, ..Ticket::new(page, before, before) })
    }
}
