//! Copies: a page that was brought in keeps what it was brought from. When it goes again unchanged, nothing has to be
//! compressed or written.
//!
//! Nobody is told of a write to such a page. What it has kept is only likely to be the page's still, and that is looked at when
//! the page has gone. A slot has a checksum of 60 bits, which is compared: that a page was written and has the same one
//! happens by chance once in 2^60 such pages, less often than a disk returns wrong bytes unnoticed. (It depends on a key that
//! nobody can guess: [`crate::areas::Areas::checksum`].) An object's bytes are made again and compared, which takes about a
//! third of the time of compressing them (`farpage bench codec`, the mix; as much as that, if they were made denser). Both were
//! write-protected once: a fault at each first write, and an interruption of all CPUs to lift the protection, cost more than
//! all that is saved.
//!
//! A slot is kept wherever that is possible. An object takes memory while its page takes its own. So it is kept where the page
//! is likely to go soon: if it was read ahead for a walk, since what lies behind walks goes first ([`crate::reclaim::rivals`]).
//! A few per cent of the budget is what such objects take at most, and less where the pool is nearly full.

use super::Pager;
use super::write::Shrunk;
use crate::areas::AreaState;
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, PageIndex, Part, SlotIndex, SlotPart};
use crate::zswap::codec::{Scratch, is_of};
use crate::zswap::pool::ObjectHandle;
use core::sync::atomic::{AtomicU32, Ordering};

/// What an object that was kept in vain adds to the tally: a look that found a changed page.
const IN_VAIN: u32 = 1;
/// What one takes away that was of use: about so many looks are saved by it.
const OF_USE: u32 = 2;
/// The highest tally.
const TALLY_MAX: u32 = 256;
/// Objects are kept below it.
const TALLY_KEEPS: u32 = 128;
/// Above it those of one window in so many.
const TRIAL_WINDOWS: u32 = 16;

/// So many may be kept however few pages there are.
const KEPT_MAX_MIN: u64 = 64;
/// When the pool is full, so many of them make room at once.
const RELEASED_AT_ONCE: u32 = 64;

/// Pages that have one tally of those that walks change, and such tallies.
const WALKED_PAGES: u64 = 8192;
const WALKED: usize = 64;
/// One page in so many is looked at.
const SAMPLED: u64 = 16;
/// All of them are changed; many are.
const CHANGED: u32 = 1 << 16;
const CHANGED_MANY: u32 = CHANGED / 16;
/// What a tally remembers, in pages that were looked at.
const SAMPLES: u32 = 32;

/// Whether keeping objects is worth it.
pub(super) struct Copies {
    tally: AtomicU32,
    windows: AtomicU32,
    /// How many of the pages behind walks were changed, of late, by where they are.
    walked: [AtomicU32; WALKED],
}

impl Copies {
    pub(super) const fn new() -> Copies {
        Copies {
            tally: AtomicU32::new(0),
            windows: AtomicU32::new(0),
            walked: [const { AtomicU32::new(0) }; WALKED],
        }
    }

    /// Whether the next window's pages should keep their objects.
    fn are_worth_it(&self) -> bool {
        // Ordering: Relaxed: hints.
        let is_trial = self.windows.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRIAL_WINDOWS);
        is_trial || self.tally.load(Ordering::Relaxed) < TALLY_KEEPS
    }

    fn count(&self, was_of_use: bool) {
        // Ordering: Relaxed, as above; of two threads at once one counts.
        let tally = self.tally.load(Ordering::Relaxed);
        let after = if was_of_use { tally.saturating_sub(OF_USE) } else { (tally + IN_VAIN).min(TALLY_MAX) };
        if after != tally {
            self.tally.store(after, Ordering::Relaxed);
        }
    }
}

impl Pager<'_> {
    /// Objects that are kept at most: one for each sixteenth page that is there. Several times what stays behind walks and
    /// what is ahead of them.
    fn kept_max(&self) -> u32 {
        (self.resident() / 16).max(KEPT_MAX_MIN).try_into().unwrap_or(u32::MAX)
    }

    /// Whether the `pages` of a window should keep their objects. Once for each. Makes room by releasing those that
    /// have been kept longest: their pages were expected to go, and have stayed.
    pub(super) fn may_keep_objects(&self, pages: u32) -> bool {
        if !self.copies.are_worth_it() || self.pool.over_accept_threshold() {
            return false;
        }
        self.release_objects((self.pool.kept() + pages).saturating_sub(self.kept_max()));
        true
    }

    /// A store was refused: what is only kept makes room. False if there is nothing of that.
    pub(super) fn make_room_in_pool(&self) -> bool {
        self.release_objects(RELEASED_AT_ONCE)
    }

    fn release_objects(&self, count: u32) -> bool {
        let mut any = false;
        for _ in 0..count {
            let Some((handle, page)) = self.pool.first_kept() else { break };
            // One that can't be freed now is the youngest, and the next one goes.
            any |= self.release_object(handle, page) == Shrunk::Released;
        }
        any
    }

    /// A page comes in that was stored: what it may keep, the rest is freed.
    pub(super) fn keep_or_free(&self, stored: Option<Stored>, keep: bool) -> Option<Stored> {
        let stored = stored?;
        match stored {
            Stored::Object(handle) if keep => self.pool.keep(handle),
            Stored::Slot(_) if keep => {}
            _ => {
                self.free(stored);
                return None;
            }
        }
        Some(stored)
    }

    /// What a page that goes behind a walk has kept, unless that is a slot with much free around it, or part of one whose other
    /// pages are elsewhere by now: then the page is written anew, next to those that go with it, so that the walk finds them side
    /// by side when it comes again. The page is in its frame. Not where nothing can be written.
    pub(super) fn unless_far(
        &self,
        copy: Option<Stored>,
        page: PageIndex,
        frame: FrameIndex,
    ) -> Option<Stored> {
        if let Some(Stored::Slot(at)) = copy
            && self.areas.state(at.slot.area()) == AreaState::Writable
            && (self.areas.is_thin(at.slot) || self.is_scattered(at, page, frame))
        {
            self.areas.free(at);
            return None;
        }
        copy
    }

    /// Whether a pack that was written with its page's neighbours hasn't got them any more, or soon won't: if many of the pages
    /// around are changed from one walk to the next, what stays where it is lies in more and more places.
    fn is_scattered(&self, at: SlotPart, page: PageIndex, frame: FrameIndex) -> bool {
        if at.part == Part::WHOLE {
            return false;
        }
        let tally = &self.copies.walked[(page.0 / WALKED_PAGES) as usize % WALKED];
        // Ordering: Relaxed, as in `count`.
        let mut changes = tally.load(Ordering::Relaxed);
        if page.0.is_multiple_of(SAMPLED) {
            // SAFETY: we hold the lock bit of the page that was taken into this frame, which has its memory.
            let is_changed = !self.areas.verify(at, unsafe { self.cache.bytes(frame) });
            changes = changes - changes / SAMPLES + u32::from(is_changed) * (CHANGED / SAMPLES);
            tally.store(changes, Ordering::Relaxed);
        }
        changes >= CHANGED_MANY || self.areas.references(at.slot) == 1
    }

    /// What a locked, parked page has kept, if that has the same bytes. Else it is freed.
    pub(super) fn unless_changed(
        &self,
        copy: Option<Stored>,
        frame: FrameIndex,
        scratch: &mut Scratch,
    ) -> Option<Stored> {
        // SAFETY: we hold the lock bit of the parked page that owns the frame; parked frames have memory and nobody writes
        // them.
        let bytes = unsafe { self.cache.bytes(frame) };
        let copy = copy?;
        let is_same = match copy {
            Stored::Slot(at) => self.areas.verify(at, bytes),
            Stored::Object(handle) => self.pool.read(handle, |stored| {
                pause!();
                is_of(self.config.codec, bytes, scratch, stored)
            }),
        };
        #[cfg(feature = "planted")]
        let is_same = is_same
            || crate::planted::strikes(match copy {
                Stored::Slot(_) => crate::planted::Bug::TrustKeptSlot,
                Stored::Object(_) => crate::planted::Bug::TrustKeptObject,
            });
        if let Stored::Object(handle) = copy {
            self.copies.count(is_same);
            if is_same {
                self.pool.stow(handle);
            }
        }
        if !is_same {
            self.free(copy);
            return None;
        }
        Some(copy)
    }

    /// Whether a page that is still in memory had better not be left to this copy alone: it is on an area that could not be written,
    /// and may not be read any more either, or that is being taken out of use.
    pub(super) fn is_doubtful(&self, copy: Stored) -> bool {
        matches!(copy, Stored::Slot(at) if self.areas.state(at.slot.area()) == AreaState::ReadOnly)
    }

    /// Frees what held a page's bytes.
    pub(super) fn free(&self, stored: Stored) {
        match stored {
            Stored::Slot(at) => self.areas.free(at),
            Stored::Object(handle) => _ = self.pool.free(handle),
        }
    }

    /// Frees an object that is only kept; if its page is just being moved, it becomes the youngest instead.
    pub(super) fn release_object(&self, handle: ObjectHandle, page: PageIndex) -> Shrunk {
        pause!();
        if self.release_copy(page, Stored::Object(handle), |_| {}) {
            return Shrunk::Released;
        }
        self.pool.rotate(handle, page);
        Shrunk::Busy
    }

    /// Frees a slot that pages only keep. Whether it is nobody's then.
    pub(super) fn release_slot(&self, slot: SlotIndex, unprotect: impl Fn(PageIndex)) -> bool {
        for page in self.areas.owners(slot) {
            pause!();
            if let Some(kept) = self.keeps_in(page, slot) {
                self.release_copy(page, Stored::Slot(kept), &unprotect);
            }
        }
        !self.areas.is_owned(slot)
    }

    /// What a page in memory that nobody is moving keeps in this slot.
    pub(super) fn keeps_in(&self, page: PageIndex, slot: SlotIndex) -> Option<SlotPart> {
        let word = self.table.known(page)?.entry().load();
        match word.state() {
            State::Resident { copy: Some(Stored::Slot(kept)), .. } if kept.slot == slot => {
                (!word.is_locked()).then_some(kept)
            }
            _ => None,
        }
    }

    /// Frees what a page keeps, if that still is the page's and nobody is moving it.
    fn release_copy(&self, page: PageIndex, copy: Stored, unprotect: impl Fn(PageIndex)) -> bool {
        let Some(place) = self.table.known(page) else { return false };
        let word = place.entry().load();
        let before = word.state();
        let after = match before {
            State::Resident { copy: Some(found), age } if found == copy => {
                State::Resident { copy: None, age }
            }
            State::Parked { frame, copy: Some(found) } if found == copy => {
                State::Parked { frame, copy: None }
            }
            _ => return false,
        };
        if word.is_locked() || place.entry().try_lock(word).is_err() {
            return false;
        }
        if before.is_resident() {
            unprotect(page);
        }
        self.free(copy);
        self.settle(page, place, before, after);
        true
    }
}
