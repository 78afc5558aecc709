//! The pager's half of a fault: begin, load or read, settle. [`Pager::fault`] locks the page and says what to
//! do. The driver does it. [`Pager::settle_fault`], [`Pager::give_back`] or [`Pager::fail`] ends the move.

use super::pack;
use super::step::{Access, Step, Ticket};
use super::{Pager, State};
use crate::cache::Backing;
use crate::reclaim::AGE_FROM_PARKED;
use crate::reclaim::balance::CameFrom;
use crate::reclaim::recency::{Came, is_counted};
use crate::stats::Counter;
use crate::table::EntryRef;
use crate::table::entry::{Past, Stored, Word};
use crate::units::{PAGE_BYTES, PageIndex, SlotIndex};
use crate::zswap::codec::{Decoder, Scratch, decompress};
use crate::zswap::pool::ObjectHandle;
use crate::zswap::same_filled::fill;
use core::sync::atomic::Ordering;

/// The slot that a lost page names if it owns none: its bytes weren't on an area, or the page was inherited.
const NO_SLOT: SlotIndex = SlotIndex::from_raw(0);

/// What remains of a page after it was brought in: its old copy and its age.
#[derive(Default)]
struct Behind {
    /// The copy that the page keeps.
    kept: Option<Stored>,
    /// Length in bytes of the page's object in the pool, if the object was freed.
    length: Option<usize>,
    /// Whether the object was one of the pool's oldest.
    was_old: bool,
    /// Laps of the clock hand that the page stays at least.
    least_age: u8,
}

impl Pager<'_> {
    /// Begins to serve a thread that touched `page` and can't go on. Signal-safe; under the shared map lock.
    pub fn fault(&self, page: PageIndex, access: Access) -> Step {
        let Some(place) = self.table.get(page) else { return Step::Unknown };
        loop {
            let word = place.entry().load();
            if word.is_locked() {
                if place.entry().ask_to_be_woken() {
                    self.stats.count(Counter::FaultJoined);
                    return Step::Joined;
                }
                continue;
            }
            pause!();
            if let Some(step) = self.begin(page, place, word, access) {
                return step;
            }
        }
    }

    /// Makes one attempt. Returns `None` if the page's word changed meanwhile.
    fn begin(&self, page: PageIndex, place: EntryRef<'_>, word: Word, access: Access) -> Option<Step> {
        let before = word.state();
        let source = self.source_of(before).0;
        let ticket = |frame, keep_copy| Ticket { frame, keep_copy, ..Ticket::new(page, before, source) };
        let keep_copy = access == Access::Read;
        match before {
            State::Lost(slot) => return Some(Step::Lost(slot)),
            State::Resident { .. } if access != Access::WriteProtected => {
                self.stats.count(Counter::FaultSpurious);
                return Some(Step::Present);
            }
            _ if access == Access::WriteProtected && !before.is_resident() => {
                // The page was evicted before the message was read. The thread will fault again, on a missing
                // page.
                self.stats.count(Counter::FaultSpurious);
                return Some(Step::Present);
            }
            _ => {}
        }
        if !Self::needs_frame(before) {
            place.entry().try_lock(word).ok()?;
            return Some(match before {
                State::Resident { .. } => Step::Unprotect(ticket(None, false)),
                State::Parked { frame, copy } => Step::Install(ticket(
                    Some((frame, Backing::Memory)),
                    keep_copy && matches!(copy, Some(Stored::Slot(_))),
                )),
                _ => Step::Zero(ticket(None, false)),
            });
        }
        let Some((frame, backing)) = self.cache.take() else { return Some(Step::NoFrame) };
        pause!();
        if place.entry().try_lock(word).is_err() {
            self.cache.put(frame, backing);
            return None;
        }
        let frame = Some((frame, backing));
        Some(match (before, source) {
            (State::OnArea(at), _) => Step::Read(ticket(frame, keep_copy && self.areas.may_keep(at.slot))),
            // The slot is the elder's, so this page can't keep it.
            (_, State::OnArea(_)) => Step::Read(ticket(frame, false)),
            _ => Step::Load(ticket(frame, false)),
        })
    }

    /// Returns whether serving the fault is likely to take more memory. A page that has a slot already has
    /// its memory when its write protection is lifted. A page of zeros has none. Only a hint: the page isn't
    /// locked.
    pub fn takes_memory(&self, page: PageIndex, access: Access) -> bool {
        access != Access::WriteProtected
            || matches!(self.state(page), State::Resident { copy: None | Some(Stored::Object(_)), .. })
    }

    /// Locks a page that was never touched, so that the page can be mapped along with its neighbour.
    pub fn lock_absent(&self, page: PageIndex) -> Option<Ticket> {
        let place = self.table.get(page)?;
        let word = place.entry().load();
        if word.is_locked() || word.state() != State::Absent || place.entry().try_lock(word).is_err() {
            return None;
        }
        Some(Ticket { ahead: true, ..Ticket::new(page, State::Absent, State::Absent) })
    }

    /// Returns the end of the registered, freely accessible range around `page`, or `page` itself if there is
    /// none.
    pub fn registered_end(&self, page: PageIndex) -> PageIndex {
        let range = self.ranges.lock().find(page).filter(|range| range.flags.may_evict());
        range.map_or(page, |range| range.pages.end)
    }

    const fn needs_frame(state: State) -> bool {
        matches!(
            state,
            State::Same(_)
                | State::Writing { .. }
                | State::Pooled(_)
                | State::OnArea(_)
                | State::Inherited(_)
        )
    }

    /// Puts the page's bytes into the ticket's frame, which must have memory by now. Under the page's lock.
    /// An error says that the bytes are lost. The error names no slot, because the bytes weren't on an area.
    pub fn load(&self, ticket: &Ticket, decoder: &mut Decoder) -> Result<(), SlotIndex> {
        let (frame, backing) = ticket.frame.expect("a ticket to load has a frame");
        assert!(backing == Backing::Memory, "a page was to be loaded into a hole");
        // SAFETY: the ticket owns the frame, it has memory, and only this thread has the ticket.
        let page = unsafe { self.cache.bytes_mut(frame) };
        self.load_into(ticket, page, decoder)
    }

    /// Puts the bytes of a page that isn't on an area into `bytes`.
    pub(super) fn load_into(
        &self,
        ticket: &Ticket,
        bytes: &mut [u8; PAGE_BYTES],
        decoder: &mut Decoder,
    ) -> Result<(), SlotIndex> {
        let (source, books) = self.source_of(ticket.before);
        match source {
            State::Zero => bytes.fill(0),
            State::Same(word) => fill(bytes, word.word()),
            State::Parked { frame, .. } | State::Writing { frame } => {
                // SAFETY: the page's lock is ours, and its frame has memory. Nobody writes the frame of a
                // page that is parked or being written. `write_done` waits for the page's lock before it
                // frees the frame. An elder's frames never change.
                bytes.copy_from_slice(unsafe { books.cache.bytes(frame) });
            }
            State::Pooled(handle) => {
                let codec = books.config.codec;
                let decoded = books.pool.read(handle, |stored| {
                    pause!();
                    decompress(codec, stored, bytes, decoder)
                });
                decoded.map_err(|_| NO_SLOT)?;
            }
            state => panic!("nothing to load for a page that is {state:?}"),
        }
        Ok(())
    }

    /// Checks that `bytes` are the page that was written to the ticket's slot, or to the ticket's part of the
    /// slot. An error names the slot.
    pub(super) fn verify(&self, ticket: &Ticket, bytes: &[u8; PAGE_BYTES]) -> Result<(), SlotIndex> {
        let at = ticket.slot_part();
        let (_, books) = self.source_of(ticket.before);
        if books.areas.verify(at, bytes) { Ok(()) } else { Err(at.slot) }
    }

    /// Unpacks the ticket's frame after the slot was read into it, and checks that the bytes are those that
    /// were written. An error names the slot. Under the page's lock.
    pub fn read_done(&self, ticket: &Ticket, scratch: &mut Scratch) -> Result<(), SlotIndex> {
        let (frame, _) = ticket.frame.expect("a ticket to read has a frame");
        // SAFETY: the ticket owns the frame, the frame has memory, only this thread has the ticket, and the
        // read into the frame is over.
        let bytes = unsafe { self.cache.bytes_mut(frame) };
        self.unpack_into(ticket, bytes, scratch)?;
        self.verify(ticket, bytes)
    }

    /// Turns the bytes read from a slot into the ticket's page, if the slot holds several pages.
    pub fn unpack_into(
        &self,
        ticket: &Ticket,
        bytes: &mut [u8; PAGE_BYTES],
        scratch: &mut Scratch,
    ) -> Result<(), SlotIndex> {
        if !ticket.is_packed() {
            return Ok(());
        }
        let at = ticket.slot_part();
        let (kept, decoder) = scratch.page_and_decoder();
        let object = pack::object(bytes, at.part).ok_or(at.slot)?;
        let length = object.len();
        kept[..length].copy_from_slice(object);
        self.decode(ticket, &kept[..length], bytes, decoder)
    }

    /// Decompresses `object`, the page's object in a pack, into `page`.
    pub(super) fn decode(
        &self,
        ticket: &Ticket,
        object: &[u8],
        page: &mut [u8; PAGE_BYTES],
        decoder: &mut Decoder,
    ) -> Result<(), SlotIndex> {
        let (_, books) = self.source_of(ticket.before);
        decompress(books.config.codec, object, page, decoder).map_err(|_| ticket.slot_part().slot)
    }

    /// Ends a fault whose page is in the program's memory now. `left` is what is behind the ticket's frame
    /// now: a move leaves a hole, a copy leaves the memory. Returns whether another thread waited for the
    /// page. Under the shared map lock and the page's lock, which ends here.
    pub fn settle_fault(&self, ticket: Ticket, left: Backing) -> bool {
        let Ticket { page, before, source, frame, put_back, ahead, in_walk, .. } = ticket;
        let place = self.place(page);
        pause!();
        let past = place.entry().load().past();
        let behind = self.leave_behind(&ticket);
        if let Some((frame, _)) = frame {
            self.cache.put(frame, left);
        }
        let came = match before {
            _ if ahead || in_walk => Came::InWalk,
            State::Absent => Came::New,
            _ => Came::Back,
        };
        if before.is_evicted() {
            self.rivals.came_back(page);
        }
        let (age, heat) = if put_back || before.is_resident() {
            (0, past.heat)
        } else {
            self.weigh(page, source, behind.was_old, came, past);
            self.recency.came_in(page, came, past, behind.length)
        };
        let after = State::Resident { copy: behind.kept, age: age.max(behind.least_age) };
        let waited = self.settle_with(page, place, before, after, Some(Past { heat, ..past }));
        if ahead && before.is_evicted() {
            self.count_ahead(waited);
        }
        waited
    }

    /// Frees the place that the page was brought from, or keeps that place as the page's copy.
    fn leave_behind(&self, ticket: &Ticket) -> Behind {
        let Ticket { page, before, source, keep_copy, put_back, ahead, in_walk, .. } = *ticket;
        let served = |counter| {
            if !ahead {
                self.stats.count(counter);
            }
        };
        let mut behind = Behind::default();
        match before {
            State::Resident { copy, .. } => {
                self.stats.count(Counter::FaultWrite);
                copy.into_iter().for_each(|copy| self.free(copy));
            }
            State::Absent => self.stats.count(if ahead { Counter::ZeroAhead } else { Counter::FaultFirst }),
            State::Zero => {
                self.stats.count(Counter::SwpinZero);
                served(Counter::FaultPool);
            }
            State::Same(_) => {
                self.stats.count(Counter::SwpinSame);
                served(Counter::FaultPool);
            }
            State::Parked { frame, copy } => {
                self.cache.unpark(frame);
                behind.kept = self.keep_or_free(copy, keep_copy);
                if !put_back && !ahead && !in_walk {
                    behind.least_age = AGE_FROM_PARKED;
                }
                served(if put_back { Counter::EvictPutBack } else { Counter::FaultParked });
            }
            State::Writing { frame } => {
                // The page has left frame and slot. The write's completion frees both.
                self.cache.set_owner(frame, None);
                behind.least_age = AGE_FROM_PARKED;
                self.stats.count(Counter::FaultParked);
            }
            State::Pooled(handle) => {
                self.leave_pool(page, handle, keep_copy, &mut behind);
                self.stats.count(Counter::Zswpin);
                served(Counter::FaultPool);
            }
            State::OnArea(at) => {
                behind.kept = self.keep_or_free(Some(Stored::Slot(at)), keep_copy);
                self.stats.count(Counter::Pswpin);
                served(Counter::FaultArea);
            }
            State::Inherited(_) => {
                self.stats.count(Counter::SwpinInherited);
                served(if source.slot().is_some() { Counter::FaultArea } else { Counter::FaultPool });
            }
            State::Lost(_) => panic!("a lost page was installed"),
        }
        behind
    }

    /// Frees the page's object, or keeps the object as the page's copy.
    fn leave_pool(&self, page: PageIndex, handle: ObjectHandle, keep_copy: bool, behind: &mut Behind) {
        #[cfg(feature = "planted")]
        let planted = crate::planted::strikes(crate::planted::Bug::DropInvalidation);
        #[cfg(not(feature = "planted"))]
        let planted = false;
        if keep_copy {
            behind.was_old = is_counted(page) && self.pool.is_old(handle);
            behind.kept = self.keep_or_free(Some(Stored::Object(handle)), true);
        } else if !planted {
            let (bytes, was_old) = self.pool.free_and_tell(handle);
            (behind.length, behind.was_old) = (Some(bytes), was_old);
        }
    }

    /// Tells the balance that a page came in, and where the page came from. The balance concludes whether the
    /// pool or the program should have more memory.
    fn weigh(&self, page: PageIndex, source: State, is_old: bool, came: Came, past: Past) {
        let from = match source {
            State::OnArea(_) => CameFrom::Area,
            State::Pooled(_) => CameFrom::Pool { is_old },
            _ => return,
        };
        match came {
            Came::Back => self.balance.came_back(page, from, self.recency.out_for(past.went)),
            Came::InWalk => self.balance.walked(page, from),
            Came::New => {}
        }
    }

    /// Gives a ticket back unused. The page is as before. Under the page's lock, which ends here.
    pub fn give_back(&self, ticket: Ticket) {
        let Ticket { page, before, frame, .. } = ticket;
        // The frame of a parked page stays the page's.
        if let Some((frame, backing)) = frame.filter(|_| !matches!(before, State::Parked { .. })) {
            self.cache.put(frame, backing);
        }
        self.settle(page, self.place(page), before, before);
    }

    /// Ends a fault whose page's bytes are lost. The driver must see to it that the program gets SIGBUS.
    /// Under the shared map lock and the page's lock, which ends here.
    pub fn fail(&self, ticket: Ticket, slot: SlotIndex) {
        let Ticket { page, before, source, frame, .. } = ticket;
        if let Some((frame, backing)) = frame {
            self.cache.put(frame, backing);
        }
        match before {
            State::Pooled(handle) => _ = self.pool.free(handle),
            // The slot stays taken: no new page is entrusted to a slot that could not be read.
            State::OnArea(_) => self.stats.count(Counter::ReadErrors),
            State::Inherited(_) if source.slot().is_some() => self.stats.count(Counter::ReadErrors),
            State::Inherited(_) => {}
            state => panic!("a page that is {state:?} can't fail to load"),
        }
        self.stats.count(Counter::FaultLost);
        self.has_lost.store(true, Ordering::Relaxed);
        let slot = if matches!(before, State::Inherited(_)) { NO_SLOT } else { slot };
        self.settle(page, self.place(page), before, State::Lost(slot));
    }

    /// Returns the table's place for a locked page. A locked page always has one.
    pub(super) fn place(&self, page: PageIndex) -> EntryRef<'_> {
        self.table.get(page).expect("a locked page has a leaf")
    }
}
