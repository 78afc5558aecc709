//! Copies. A page that was brought in keeps the slot or object that it was brought from. If the page is
//! unchanged when it is evicted again, nothing has to be compressed or written.
//!
//! A write to a page with a copy is reported only if the page was to be copied out and stayed
//! (`Victim::keeps_slot`). So the copy is only likely to be current, and page and copy are compared when the
//! page has gone. Of a slot, the checksum of 60 bits is compared. A written page has the same checksum by
//! chance once in 2^60 pages, less often than a disk returns wrong bytes unnoticed. The checksum depends on a
//! key that nobody can guess: [`crate::areas::Areas::checksum`]. An object is decompressed and compared. The
//! comparison takes about a third of the time of compressing, or as much if the object was made denser.
//!
//! Write protection would be dearer. A fault at each first write, and a TLB shootdown to lift the protection,
//! cost more than all that copies save.
//!
//! A slot is kept wherever that is possible. An object takes memory while its page takes memory, too. So an
//! object is kept only where its page is likely to go soon: if the page was read ahead for a walk. Pages
//! behind walks go first ([`crate::reclaim::rivals`]). Kept objects take at most a few per cent of the
//! budget, or less where the pool is nearly full.

use super::Pager;
use super::write::Shrunk;
use crate::areas::AreaState;
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, PageIndex, Part, SlotIndex, SlotPart};
use crate::zswap::codec::{Scratch, is_of};
use crate::zswap::pool::ObjectHandle;
use core::sync::atomic::{AtomicU32, Ordering};

/// Added to the tally for an object that was kept in vain: the comparison found a changed page.
const IN_VAIN: u32 = 1;
/// Taken from the tally for an object that was of use. A useful object saves the time of about this many
/// comparisons.
const OF_USE: u32 = 2;
/// The highest tally.
const TALLY_MAX: u32 = 256;
/// Tally below which objects are kept.
const TALLY_KEEPS: u32 = 128;
/// Windows of which one keeps its objects as a trial, while the tally is higher.
const TRIAL_WINDOWS: u32 = 16;

/// Objects that may be kept however few pages are resident.
const KEPT_MAX_MIN: u64 = 64;
/// Kept objects that are released at once when the pool is full.
const RELEASED_AT_ONCE: u32 = 64;

/// Pages that share one tally of the pages that change from one walk to the next.
const WALKED_PAGES: u64 = 8192;
/// Tallies of changes.
const WALKED: usize = 64;
/// Pages of which one is compared for the tally.
const SAMPLED: u64 = 16;
/// Tally that says that all pages are changed.
const CHANGED: u32 = 1 << 16;
/// Tally from which many pages are changed.
const CHANGED_MANY: u32 = CHANGED / 16;
/// Compared pages that a tally remembers.
const SAMPLES: u32 = 32;

/// The records that say whether keeping copies is worth it.
pub(super) struct Copies {
    tally: AtomicU32,
    windows: AtomicU32,
    /// Share of the pages behind walks that were changed lately, by where the pages are.
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
        // Ordering: Relaxed, because both values are hints.
        let is_trial = self.windows.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRIAL_WINDOWS);
        is_trial || self.tally.load(Ordering::Relaxed) < TALLY_KEEPS
    }

    fn count(&self, was_of_use: bool) {
        // Ordering: Relaxed, as above. Of two threads at once, one counts.
        let tally = self.tally.load(Ordering::Relaxed);
        let after = if was_of_use { tally.saturating_sub(OF_USE) } else { (tally + IN_VAIN).min(TALLY_MAX) };
        if after != tally {
            self.tally.store(after, Ordering::Relaxed);
        }
    }
}

impl Pager<'_> {
    /// Returns the number of objects that may be kept: one for each 16th resident page. Several times as many
    /// as the pages that stay behind walks and the pages that are ahead of walks.
    fn kept_max(&self) -> u32 {
        (self.resident() / 16).max(KEPT_MAX_MIN).try_into().unwrap_or(u32::MAX)
    }

    /// Whether the `pages` of a window should keep their objects. Call once for each window. Frees space in
    /// the pool by releasing the objects that have been kept longest: their pages were expected to go, and
    /// have stayed.
    pub(super) fn may_keep_objects(&self, pages: u32) -> bool {
        if !self.copies.are_worth_it() || self.pool.over_accept_threshold() {
            return false;
        }
        self.release_objects((self.pool.kept() + pages).saturating_sub(self.kept_max()));
        true
    }

    /// Releases kept objects after the pool refused a store. Returns false if none could be released.
    pub(super) fn make_space_in_pool(&self) -> bool {
        self.release_objects(RELEASED_AT_ONCE)
    }

    fn release_objects(&self, count: u32) -> bool {
        let mut any = false;
        for _ in 0..count {
            let Some((handle, page)) = self.pool.first_kept() else { break };
            // An object that can't be freed now becomes the youngest, and the next one goes.
            any |= self.release_object(handle, page) == Shrunk::Released;
        }
        any
    }

    /// Keeps or frees the slot or object of a page that comes in. Returns what the page keeps.
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

    /// Returns what a page that goes behind a walk has kept, unless its slot is far from its neighbours. Far
    /// is a slot with much free space around it, or a part of a pack whose other pages are elsewhere by now.
    /// Then the slot is freed, and the page is written anew next to the pages that go with it. So the walk
    /// finds them side by side when it comes again. The page must be in its frame. Where nothing can be
    /// written the page keeps its slot.
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

    /// Whether a pack that was written with its page's neighbours no longer has them, or soon won't. If many
    /// of the pages around change from one walk to the next, the unchanged pages lie in more and more places.
    fn is_scattered(&self, at: SlotPart, page: PageIndex, frame: FrameIndex) -> bool {
        if at.part == Part::WHOLE {
            return false;
        }
        let tally = &self.copies.walked[(page.0 / WALKED_PAGES) as usize % WALKED];
        // Ordering: Relaxed, as in `count`.
        let mut changes = tally.load(Ordering::Relaxed);
        if page.0.is_multiple_of(SAMPLED) {
            // SAFETY: we hold the lock bit of the page that was taken into this frame, and the frame has
            // memory.
            let is_changed = !self.areas.verify(at, unsafe { self.cache.bytes(frame) });
            changes = changes - changes / SAMPLES + u32::from(is_changed) * (CHANGED / SAMPLES);
            tally.store(changes, Ordering::Relaxed);
        }
        changes >= CHANGED_MANY || self.areas.references(at.slot) == 1
    }

    /// Returns the copy that a locked, parked page has kept, if the copy has the page's bytes. Otherwise
    /// frees the copy.
    pub(super) fn unless_changed(
        &self,
        copy: Option<Stored>,
        frame: FrameIndex,
        scratch: &mut Scratch,
    ) -> Option<Stored> {
        // SAFETY: we hold the lock bit of the parked page that owns the frame. Parked frames have memory, and
        // nobody writes them.
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

    /// Whether a page that is still in memory had better not be left to this copy alone. A copy is doubtful
    /// if its area could not be written, because the area may not be readable any more either. A copy is
    /// doubtful, too, if its area is being taken out of use.
    pub(super) fn is_doubtful(&self, copy: Stored) -> bool {
        matches!(copy, Stored::Slot(at) if self.areas.state(at.slot.area()) == AreaState::ReadOnly)
    }

    /// Frees the slot or object that held a page's bytes.
    pub(super) fn free(&self, stored: Stored) {
        match stored {
            Stored::Slot(at) => self.areas.free(at),
            Stored::Object(handle) => _ = self.pool.free(handle),
        }
    }

    /// Frees an object that is only kept. If its page is being moved, the object becomes the youngest
    /// instead.
    pub(super) fn release_object(&self, handle: ObjectHandle, page: PageIndex) -> Shrunk {
        pause!();
        if self.release_copy(page, Stored::Object(handle), |_| {}) {
            return Shrunk::Released;
        }
        self.pool.rotate(handle, page);
        Shrunk::Busy
    }

    /// Frees a slot that pages only keep. Returns whether no page owns the slot afterwards.
    pub(super) fn release_slot(&self, slot: SlotIndex, unprotect: impl Fn(PageIndex)) -> bool {
        for page in self.areas.owners(slot) {
            pause!();
            if let Some(kept) = self.keeps_in(page, slot) {
                self.release_copy(page, Stored::Slot(kept), &unprotect);
            }
        }
        !self.areas.is_owned(slot)
    }

    /// Returns what a page keeps in this slot, if the page is in memory and nobody is moving it.
    pub(super) fn keeps_in(&self, page: PageIndex, slot: SlotIndex) -> Option<SlotPart> {
        let word = self.table.known(page)?.entry().load();
        match word.state() {
            State::Resident { copy: Some(Stored::Slot(kept)), .. } if kept.slot == slot => {
                (!word.is_locked()).then_some(kept)
            }
            _ => None,
        }
    }

    /// Frees what a page keeps, if the page still keeps it and nobody is moving the page.
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
