//! Evictions in `segv` mode: pages are copied out, and the kernel drops only those that aren't pinned.
//!
//! Pages that the program may write are made read-only first (*stopped*). Then a pipe refers to the pages,
//! and they are closed, freed lazily, copied and dropped (`lazy.rs`). A page that the kernel hasn't dropped
//! stays, unless another process maps it, too.
//!
//! A page that stays must be marked as written, and so must be writable for a moment, but not for the
//! program. Therefore the page is moved *aside*, to a mapping that the program doesn't know (`aside.rs`).
//! Pages that the program may not write are copied there, too.
// UNSAFETY: these calls take pages of the program away, with their callers' promises.

use super::aside::{Careful, move_aside, move_back};
use super::book::{READ_WRITE, allowed};
use super::{ByProtection, drop_memory, protect};
use crate::Outgoing;
use crate::lazy::{Claim, PipeBits, Writers, until_done};
use crate::uffd::RunBits;
use farpage_core::pager::Taken;
use farpage_core::units::PageRange;
use farpage_os::proc::Mapped;
use farpage_os::sys::Errno;
use linux_raw_sys::general::{PROT_NONE, PROT_READ};

/// The kernel's answer about a run's pages: bit n for page n.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen {
    /// Pages that only this process maps, or that the kernel has swapped out or is migrating.
    pub(super) own: RunBits,
    /// Pages of `own` that are present, so that only this process maps them.
    alone: RunBits,
    /// Pages that another process maps, too, or that are the kernel's page of zeros.
    shared: RunBits,
}

impl Seen {
    const fn is_there(self, at: usize) -> bool {
        (self.own | self.shared) & 1 << at != 0
    }
}

fn pages_of(run: &[Outgoing]) -> PageRange {
    PageRange::of(run[0].page, run.len() as u64)
}

impl ByProtection {
    /// Takes neighbouring pages, which go to neighbouring frames.
    pub(super) fn take_neighbours(&self, run: &mut [Outgoing]) {
        let Some(careful) = &self.careful else { return self.take_whatever_is_pinned(run) };
        let Some(claim) = careful.lazy.claim() else { return };
        let is_writable =
            |page: &Outgoing| allowed(self.book.get(page.page)) & READ_WRITE as usize == READ_WRITE as usize;
        for run in run.chunk_by_mut(|one, next| is_writable(one) == is_writable(next)) {
            for run in run.chunks_mut(claim.pages_max()) {
                if is_writable(&run[0]) {
                    self.take_stopped(careful, &claim, run);
                } else {
                    self.take_aside(careful, &claim, run);
                }
            }
        }
    }

    /// Opens the pages of a run that had stayed closed because the kernel had no mapping to spare. Returns
    /// false if it has none now.
    fn open_all(&self, run: &[Outgoing]) -> bool {
        let is_open = |page: &Outgoing| self.book.is_open(page.page);
        run.iter().all(is_open) || self.open(pages_of(run)) == run.len() as u64
    }

    /// Takes pages that the program may write. They are stopped, then closed.
    fn take_stopped(&self, careful: &Careful, claim: &Claim<'_>, run: &mut [Outgoing]) {
        let pages = pages_of(run);
        if !self.open_all(run) || !self.close_to(pages, PROT_READ as usize) {
            return;
        }
        // A page that isn't present was opened with its neighbours, and never touched.
        let before = self.look(pages);
        if before.own == 0 && self.is_forcible {
            return self.take_closed(run, before);
        }
        let close = || protect(pages, PROT_NONE as usize).is_ok();
        // SAFETY: the caller has locked the pages. There are as many frames, one after the other, which
        // belong to the caller.
        let copied = unsafe {
            claim.copy_and_drop(pages, run[0].frame, Writers::Wait, before.alone as PipeBits, close)
        };
        let Some(freed) = copied else { return self.reopen(pages) };
        let after = self.look(pages);
        // SAFETY: the frames hold the bytes. Pages that other processes map aren't pinned for writing
        // (`take_closed`).
        let locked = unsafe { drop_some(pages, after.shared) };
        let freed = RunBits::from(freed);
        let left = after.own & freed & !self.leave(careful, claim, pages, after.own & freed);
        self.settle(run, before, left | locked | after.own & !freed);
    }

    /// Marks as written the pages in `freed`, which were freed lazily and are still present. Otherwise the
    /// kernel could drop them at any time. Returns the pages that the kernel has dropped meanwhile, which
    /// were clean.
    fn leave(&self, careful: &Careful, claim: &Claim<'_>, pages: PageRange, freed: RunBits) -> RunBits {
        let place = careful.place(claim, 1);
        pages.iter().enumerate().filter(|(at, _)| freed & 1 << at != 0).fold(0, |dropped, (at, page)| {
            let alone = PageRange::of(page, 1);
            let mut moved = Ok(());
            until_done(|| {
                moved = move_aside(alone, place);
                moved.is_ok() || moved == Err(Errno::EFAULT)
            });
            // EFAULT: the program has unmapped the page unseen by Farpage, and no longer needs it.
            let is_left = moved.is_ok() && self.mark_or_drop(claim, place) != 0;
            if moved.is_ok() {
                move_back(place, alone);
            }
            dropped | RunBits::from(!is_left) << at
        })
    }

    /// Marks as written the pages at `place` that are left, and drops the rest. Returns the pages that are
    /// left.
    fn mark_or_drop(&self, claim: &Claim<'_>, place: PageRange) -> RunBits {
        // SAFETY: the place can be read and written, and belongs to the claim alone.
        let left = RunBits::from(unsafe { claim.mark_left(&self.pagemap, place) });
        // SAFETY: the kernel had dropped the page, or another process maps it, too, and then the page was
        // copied.
        unsafe { drop_some(place, !left & all_of(place)) };
        left
    }

    /// Opens the pages that stay, and notes the result of each page.
    fn settle(&self, run: &mut [Outgoing], before: Seen, stays: RunBits) {
        for (at, page) in run.iter_mut().enumerate() {
            if stays & 1 << at == 0 {
                page.taken = if before.is_there(at) { Taken::Yes } else { Taken::Gone };
            } else {
                // If this fails, the next touch opens the page.
                self.open(PageRange::of(page.page, 1));
                page.is_shared = true;
            }
        }
    }

    /// Takes pages that the program may not write, or not even read.
    fn take_aside(&self, careful: &Careful, claim: &Claim<'_>, run: &mut [Outgoing]) {
        let pages = pages_of(run);
        if !self.open_all(run) || !self.close_to(pages, PROT_NONE as usize) {
            return;
        }
        let place = careful.place(claim, pages.count());
        if move_aside(pages, place).is_err() {
            // The kernel may have several mappings there, but moves pages of one mapping only.
            self.reopen(pages);
            if run.len() > 1 {
                let (first, second) = run.split_at_mut(run.len() / 2);
                self.take_aside(careful, claim, first);
                self.take_aside(careful, claim, second);
            }
            return;
        }
        let before = self.look(place);
        // SAFETY: the place belongs to the claim alone. There are as many frames, one after the other, which
        // belong to the caller.
        let copied = unsafe {
            claim.copy_and_drop(place, run[0].frame, Writers::Wait, before.alone as PipeBits, || true)
        };
        let left = if copied.is_some() { self.mark_or_drop(claim, place) } else { all_of(place) };
        move_back(place, pages);
        self.settle(run, before, left);
    }

    /// Returns the kernel's answer about `pages`, at most one page for each bit of [`RunBits`].
    pub(super) fn look(&self, pages: PageRange) -> Seen {
        let mut seen = Seen::default();
        let looked = self.pagemap.for_each_mapped(pages, |page, mapped| {
            let bit = 1 << (page.0 - pages.start.0);
            match mapped {
                Mapped::Alone => (seen.own, seen.alone) = (seen.own | bit, seen.alone | bit),
                Mapped::Swapped => seen.own |= bit,
                Mapped::Shared => seen.shared |= bit,
            }
        });
        looked.expect("our own pagemap can be read");
        seen
    }

    /// Takes pages that can't be written, or that are closed, without a check for pins. Pages that another
    /// process maps, too, need no check: the kernel makes a page the process's own before it pins the page
    /// for writing.
    fn take_closed(&self, run: &mut [Outgoing], before: Seen) {
        let pages = pages_of(run);
        if protect(pages, PROT_NONE as usize).is_err() {
            return self.reopen(pages);
        }
        // SAFETY: there are as many frames as pages, one after the other, which belong to the caller.
        let read = unsafe { self.memory.read(pages, run[0].frame.cast()) };
        let left = match read {
            // SAFETY: the bytes are in the frames.
            Ok(()) => unsafe { drop_some(pages, all_of(pages)) },
            Err(_) => all_of(pages),
        };
        self.settle(run, before, left);
    }

    /// Takes pages on a kernel that can't tell which of them are pinned.
    fn take_whatever_is_pinned(&self, run: &mut [Outgoing]) {
        let pages = pages_of(run);
        if self.open_all(run) && self.close_to(pages, PROT_NONE as usize) {
            self.take_closed(run, self.look(pages));
        }
    }
}

/// Returns a set bit for each of `pages`.
const fn all_of(pages: PageRange) -> RunBits {
    RunBits::MAX >> (RunBits::BITS as u64 - pages.count())
}

/// Drops the memory of the pages in `bits`. Returns the pages that stay because the program has locked them
/// unseen by Farpage.
///
/// # Safety
/// No code needs the pages' bytes any more.
unsafe fn drop_some(pages: PageRange, bits: RunBits) -> RunBits {
    let (mut rest, mut locked) = (bits, 0);
    while rest != 0 {
        let first = rest.trailing_zeros();
        let count = (rest >> first).trailing_ones();
        let stretch = PageRange::of(pages.start.plus(u64::from(first)), u64::from(count));
        // SAFETY: no code needs the bytes, by the caller's promise.
        if !unsafe { drop_memory(stretch) } {
            for (at, page) in stretch.iter().enumerate() {
                // SAFETY: no code needs the bytes, by the caller's promise.
                let is_dropped = unsafe { drop_memory(PageRange::of(page, 1)) };
                locked |= RunBits::from(!is_dropped) << (first as usize + at);
            }
        }
        rest &= !(all_of(stretch) << first);
    }
    locked
}
