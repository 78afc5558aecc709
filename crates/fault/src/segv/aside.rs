//! A mapping that no thread of the program knows. `segv` mode moves pages there (*aside*) that Farpage must
//! touch and the program must not. Pages that an eviction leaves are marked as written there (`take.rs`).
//! Pages that the program may not write are copied from there. Where /proc/self/mem obeys protections
//! (proc_mem.force_override), pages are filled there.
// UNSAFETY: these calls take pages of the program away, with their callers' promises.

use super::book::READ_WRITE;
use super::{ByProtection, drop_memory, install_error, protect};
use crate::InstallError;
use crate::lazy::{Claim, Lazy, PIPE_PAGES, PIPES, until_done};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_os::memory;
use farpage_os::proc::{OwnMemory, Pagemap};
use farpage_os::sys::Errno;
use linux_raw_sys::general::{PROT_NONE, PROT_READ};

/// Nanoseconds between two looks for a free place.
const TURN_NS: u64 = 20_000;

/// The means to copy pages without losing writes to pinned pages.
pub(super) struct Careful {
    pub(super) lazy: Lazy,
    /// The places: [`PIPE_PAGES`] pages for each pipe. Only the pipe's owner touches them.
    aside: PageIndex,
}

impl Careful {
    /// Makes the means; none where this kernel doesn't keep pinned pages.
    pub(super) fn new(pagemap: &Pagemap) -> Result<Option<Careful>, Errno> {
        let Some(lazy) = Lazy::new(pagemap)? else { return Ok(None) };
        let close_and_open = |page| {
            let closed = protect(page, PROT_READ as usize).and(protect(page, PROT_NONE as usize));
            closed.and(protect(page, READ_WRITE as usize)).is_ok()
        };
        if !lazy.protection_is_harmless(close_and_open)? {
            return Ok(None);
        }
        let aside = memory::reserve(PIPES * PIPE_PAGES * PAGE_BYTES)?;
        Ok(Some(Careful { lazy, aside: PageIndex::of_address(aside as usize) }))
    }

    /// Returns the first `count` pages of the place that belongs to the claimed pipe.
    pub(super) const fn place(&self, claim: &Claim<'_>, count: u64) -> PageRange {
        PageRange::of(self.aside.plus((claim.which() * PIPE_PAGES) as u64), count)
    }

    /// Waits for a free pipe and its place. The owner of a place waits for no other thread, so a place
    /// becomes free.
    fn wait_for_place(&self) -> Claim<'_> {
        loop {
            match self.lazy.claim() {
                Some(claim) => return claim,
                None => farpage_os::clock::sleep_ns(TURN_NS),
            }
        }
    }
}

impl Careful {
    /// Drops a closed page if it holds only zeros. The page is read aside.
    pub(super) fn drop_zero_aside(&self, page: PageRange) {
        let claim = self.wait_for_place();
        let place = self.place(&claim, 1);
        if move_aside(page, place).is_err() {
            return;
        }
        let bytes: *const PageBytes = core::ptr::with_exposed_provenance(place.start.address());
        // SAFETY: the place can be read, and belongs to the claim alone.
        if unsafe { (*bytes).0 == PageBytes::ZERO.0 } {
            // SAFETY: the page holds zeros, and a dropped page reads as zeros.
            unsafe { drop_memory(place) };
        }
        move_back(place, page);
    }
}

/// Moves the memory of `pages` to `place`, where only Farpage can touch it, and makes it writable there.
pub(super) fn move_aside(pages: PageRange, place: PageRange) -> Result<(), Errno> {
    // SAFETY: the pages are closed, and no code needs what is at the place.
    unsafe { memory::move_memory(pages, place.start) }?;
    protect(place, READ_WRITE as usize).inspect_err(|_| move_back(place, pages))
}

/// Moves the memory at `place` back to `pages`, which are closed.
pub(super) fn move_back(place: PageRange, pages: PageRange) {
    until_done(|| protect(place, PROT_NONE as usize).is_ok());
    // SAFETY: the memory of `pages` was moved aside, so they have none. Only the caller touches the place.
    until_done(|| unsafe { memory::move_memory(place, pages.start) }.is_ok());
}

impl ByProtection {
    /// Fills closed pages from the start, as many as lie in one mapping and fit into one place. Returns how
    /// many.
    ///
    /// # Safety
    /// As for `Pages::install_run`. The pages are closed.
    pub(super) unsafe fn fill_aside(
        &self,
        careful: &Careful,
        pages: PageRange,
        from: *const PageBytes,
    ) -> Result<u64, InstallError> {
        let claim = careful.wait_for_place();
        let mut part = PageRange::of(pages.start, pages.count().min(PIPE_PAGES as u64));
        loop {
            let place = careful.place(&claim, part.count());
            match move_aside(part, place) {
                Ok(()) => {
                    let to: *mut PageBytes = core::ptr::with_exposed_provenance_mut(place.start.address());
                    // SAFETY: the place can be written, and belongs to the claim alone. `from` is readable by
                    // the caller's promise.
                    unsafe { core::ptr::copy_nonoverlapping(from, to, part.count() as usize) };
                    move_back(place, part);
                    return Ok(part.count());
                }
                // The kernel may have several mappings there, but moves pages of one mapping only.
                Err(Errno::EFAULT) if part.count() > 1 => part = PageRange::of(part.start, part.count() / 2),
                Err(error) => return Err(install_error(error)),
            }
        }
    }
}

/// Returns whether /proc/self/mem can write private memory that is PROT_NONE.
pub(super) fn is_forcible(memory: &OwnMemory) -> Result<bool, Errno> {
    let base = memory::reserve(PAGE_BYTES)?;
    let (page, zeros) = (PageRange::covering(base as usize, PAGE_BYTES), PageBytes::ZERO);
    protect(page, PROT_NONE as usize)?;
    // SAFETY: the page is a new mapping that no other thread knows, and `zeros` is one page.
    let is_written = unsafe { memory.write(page, (&raw const zeros).cast()) }.is_ok();
    // SAFETY: the range is the mapping just made.
    let _ = unsafe { memory::drop_pages(base, PAGE_BYTES) };
    Ok(is_written)
}
