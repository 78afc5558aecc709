//! Program memory through userfaultfd, by moving pages or by copying them.
//!
//! Moving has no race: one call takes the page out of the program with its memory, and from then on no thread
//! can write it. Copying begins with a write protection. A thread that writes meanwhile waits, is woken when
//! the page is settled, and finds it missing. No protection stops a device or a process that has pinned the
//! page. Therefore `lazy.rs` makes the kernel drop only unpinned pages. Before Linux 5.19 a protection itself
//! does harm, and copying does without.
//!
//! The kernel may refuse to move a page in, because its mapping is read-only now or a device still holds the
//! frame. The page is then copied in. The kernel may refuse to move a page out because it is shared since a
//! fork. The page is then *unshared*: the kernel is asked to make it writable, which makes it private to this
//! process again. The page isn't copied out, because a device may be writing into it, and only the kernel
//! knows.
//!
//! The result of a failed UFFDIO_MOVE can't be trusted. On Linux 6.18, after a collision with other threads,
//! the call tries again and moves the page. The call then forgets that success, tries once more, and answers
//! EEXIST with a count of 0. A page lost in this way would read as zeros. After every failure the code
//! therefore looks which frames have memory now. Only the engine uses frames, so a frame's memory is the
//! truth. The case `threads_hammering_...` shows the defect.
// UNSAFETY: these calls take pages of the program away, as the trait's contract says.

use crate::lazy::{self, Claim, Lazy, PipeBits, Writers};
use crate::{InstallError, Outgoing, Pages};
use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Access, Taken};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_os::memory::{self, Stretch};
use farpage_os::proc::{Mapped, Pagemap};
use farpage_os::sys::Errno;
use farpage_os::uffd::{Trouble, Uffd};

/// Most pages of zeros that one call copies.
pub const ZEROS: usize = 16;

/// A constant, so that no code can write the pages. Any byte written here would be in every new page of the
/// program.
static ZERO_PAGES: [PageBytes; ZEROS] = [PageBytes::ZERO; ZEROS];

/// Stretches of frames that one call empties.
const STRETCHES_MAX: usize = 64;

const MADV_POPULATE_WRITE: u32 = 23;
/// Tries to look at a frame while the system has no memory, not even for a page table, and the time between
/// two tries. The map lock is held meanwhile, and threads that change the program's maps wait.
const MEMORY_TRIES: u32 = 10_000;
const MEMORY_TRY_NS: u64 = 1_000_000;

/// Pages moved out with UFFDIO_MOVE, and moved or copied in.
pub struct ByMove<'u> {
    uffd: &'u Uffd,
    install: Install,
    pagemap: Pagemap,
}

/// Pages copied in with UFFDIO_COPY and out under write protection.
pub struct ByCopy<'u> {
    uffd: &'u Uffd,
    pagemap: Pagemap,
    /// None where this kernel drops pages that have references. There a pinned page's last writes can be
    /// lost.
    lazy: Option<Lazy>,
    writers: Writers,
    /// The frame number of the kernel's page of zeros, where this process may know it.
    zero_frame: Option<u64>,
}

fn page_of(frame: *mut PageBytes) -> PageIndex {
    PageIndex::of_address(frame as usize)
}

const fn install_error(trouble: Trouble) -> InstallError {
    match trouble {
        Trouble::Present => InstallError::Present,
        Trouble::Other(Errno::ENOMEM) => InstallError::NoMemory,
        _ => InstallError::Unmapped,
    }
}

/// Tries an operation on a run of pages. The kernel refuses the whole run where one of the program's mappings
/// ends and another begins, and the caller doesn't know these borders. After a refusal the first half is
/// tried, then half of that. Returns the pages of the last try, and its result.
fn by_halves(
    pages: PageRange,
    no: Trouble,
    mut attempt: impl FnMut(PageRange) -> Result<(), Trouble>,
) -> (PageRange, Result<(), Trouble>) {
    let mut part = pages;
    loop {
        match attempt(part) {
            Err(trouble) if trouble == no && part.count() > 1 => {
                part = PageRange::of(part.start, part.count() / 2);
            }
            done => return (part, done),
        }
    }
}

/// Returns for how many of the first pages the operation was done.
fn of_run((pages, done): (PageRange, Result<(), Trouble>)) -> Result<u64, InstallError> {
    match done {
        Ok(()) => Ok(pages.count()),
        Err(Trouble::Partly(done)) => Ok(done),
        Err(trouble) => Err(install_error(trouble)),
    }
}

/// Maps zeros. Pages that are read get the kernel's page of zeros. A write to that page would be another
/// fault and a TLB shootdown. Pages that are about to be written therefore get memory of their own.
fn zero(uffd: &Uffd, pages: PageRange, access: Access) -> Result<u64, InstallError> {
    let is_write = access == Access::Write;
    let most = if is_write { ZEROS as u64 } else { u64::MAX };
    let pages = PageRange::of(pages.start, pages.count().min(most));
    of_run(by_halves(pages, Trouble::Missing, |pages| {
        if !is_write {
            return uffd.zero(pages);
        }
        // SAFETY: the source has at least as many pages as `pages`, and they are constants.
        unsafe { uffd.copy_run(pages, ZERO_PAGES.as_ptr().cast()) }
    }))
}

/// Copies a frame in.
///
/// # Safety
/// As for `Pages::install`.
unsafe fn copy_in(uffd: &Uffd, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
    // SAFETY: the frame belongs to the caller and has memory, so it is readable and no other code writes it.
    unsafe { uffd.copy(page, frame.cast()) }.map_err(install_error)?;
    Ok(Backing::Memory)
}

/// Copies a run in.
///
/// # Safety
/// As for `Pages::install_run`.
unsafe fn copy_run_in(uffd: &Uffd, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
    // SAFETY: the source is the caller's promise. Every try begins at the first page, as `source` does.
    of_run(by_halves(pages, Trouble::Missing, |pages| unsafe { uffd.copy_run(pages, source.cast()) }))
}

fn poison(uffd: &Uffd, page: PageIndex) -> Result<(), InstallError> {
    uffd.poison(page).map_err(install_error)
}

/// A set of a run's pages, one bit for each.
pub(crate) type RunBits = u128;

/// Calls `take` with each stretch that is contiguous in pages and in frames. A stretch with more pages than
/// [`RunBits`] has bits is split.
pub(crate) fn for_each_run(pages: &mut [Outgoing], mut take: impl FnMut(&mut [Outgoing])) {
    let mut rest = pages;
    while !rest.is_empty() {
        let follows = |pair: &&[Outgoing]| {
            pair[1].page.0 == pair[0].page.0 + 1
                && pair[1].frame == pair[0].frame.wrapping_add(1)
                && pair[1].backing == pair[0].backing
        };
        let length = 1 + rest.windows(2).take(RunBits::BITS as usize - 1).take_while(follows).count();
        let (run, others) = rest.split_at_mut(length);
        take(run);
        rest = others;
    }
}

impl<'u> ByMove<'u> {
    /// Makes an object that moves pages to and from `frames`. Registers the memory of `frames`, whose pages
    /// become holes.
    ///
    /// # Safety
    /// `frames` must be private anonymous memory that is touched only as the frames of one cache. Frames
    /// without memory must not be touched at all.
    pub unsafe fn new(uffd: &'u Uffd, frames: PageRange, install: Install) -> Result<ByMove<'u>, Errno> {
        // SAFETY: no thread touches a frame without memory, by the caller's promise, so no fault arises
        // there.
        unsafe { uffd.register(frames) }?;
        Ok(ByMove { uffd, install, pagemap: Pagemap::open()? })
    }

    /// Returns whether a frame has memory. The function panics if it can't tell, because the page would be
    /// lost.
    fn has_memory(&self, frame: *mut PageBytes) -> bool {
        self.pagemap.is_present(page_of(frame)).expect("our own pagemap can be read")
    }

    /// Does the same as [`ByMove::has_memory`] without the pagemap, for threads of the program. The program
    /// may have put another file at the pagemap's descriptor number. For the same reason the answer must not
    /// rest on the userfaultfd alone.
    fn has_memory_inline(&self, page: &mut Outgoing) -> bool {
        if memory::is_resident(page_of(page.frame)) {
            return true;
        }
        // The frame's page isn't in memory. Either it was never moved, or the host has swapped it out since.
        // In the second case the kernel refuses to map zeros there. In the first case it maps the page of
        // zeros, which takes no memory, and the zeros are dropped again. If they can't be dropped, `backing`
        // says so, and no page may be moved there.
        for _ in 0..MEMORY_TRIES {
            match self.uffd.zero(PageRange::of(page_of(page.frame), 1)) {
                Ok(()) => {
                    let stretch = Stretch { base: page.frame.cast(), bytes: PAGE_BYTES };
                    // SAFETY: the frame belongs to the caller, and its zeros were just mapped here.
                    if unsafe { self.drop_memory(&[stretch]) }.is_err() {
                        page.backing = Backing::Memory;
                    }
                    return false;
                }
                Err(Trouble::Present) => return true,
                // Giving up without an answer could lose a page that is in the frame.
                Err(Trouble::Other(Errno::ENOMEM)) => farpage_os::clock::sleep_ns(MEMORY_TRY_NS),
                // The descriptor is no longer our userfaultfd, so most likely the move wasn't made either. If
                // it was made, the page is in memory, unless the host has swapped it out within these
                // microseconds.
                Err(_) => return false,
            }
        }
        panic!(
            "the system has had no memory for ten seconds, and a page of the program may be in a frame or not"
        );
    }

    /// Takes all runs. `has_memory` says whether a page is in its frame although the move failed.
    fn take_runs(&self, pages: &mut [Outgoing], has_memory: impl Fn(&mut Outgoing) -> bool) {
        self.empty_frames(pages);
        for_each_run(pages, |run| self.take_run(run, &has_memory));
    }

    /// Takes away the memory that the frames have, by one call, because each call interrupts other CPUs. A
    /// frame that can't be emptied keeps its memory, and no page goes there.
    fn empty_frames(&self, pages: &mut [Outgoing]) {
        let has_memory = |page: &Outgoing| page.backing == Backing::Memory;
        for pages in pages.chunks_mut(STRETCHES_MAX) {
            if !pages.iter().any(has_memory) {
                continue;
            }
            let mut stretches = [Stretch { base: core::ptr::null_mut(), bytes: 0 }; STRETCHES_MAX];
            let mut count = 0;
            for page in pages.iter().filter(|page| has_memory(page)) {
                let base: *mut u8 = page.frame.cast();
                match stretches[..count].last_mut() {
                    Some(last) if last.base.wrapping_add(last.bytes) == base => last.bytes += PAGE_BYTES,
                    _ => {
                        stretches[count] = Stretch { base, bytes: PAGE_BYTES };
                        count += 1;
                    }
                }
            }
            // SAFETY: the frames belong to the caller and are free, so their bytes are no longer needed.
            let empty = |stretches: &[Stretch]| unsafe { self.drop_memory(stretches) }.is_ok();
            let are_empty = empty(&stretches[..count]);
            for page in pages.iter_mut().filter(|page| has_memory(page)) {
                // The kernel doesn't say which of several stretches could not be emptied. Emptying one again
                // does no harm.
                if are_empty || empty(&[Stretch { base: page.frame.cast(), bytes: PAGE_BYTES }]) {
                    page.backing = Backing::Hole;
                }
            }
        }
    }

    /// Takes one run, and goes on after each page that the kernel refuses.
    fn take_run(&self, run: &mut [Outgoing], has_memory: impl Fn(&mut Outgoing) -> bool) {
        // After the refusal of a single page, the kernel is likely to refuse the next pages, too.
        let (mut at, mut most) = (0, run.len());
        while at < run.len() {
            // The frame has memory already (see `has_memory_inline`). Zeros there would look like a page that
            // was moved there.
            if run[at].backing == Backing::Memory {
                at += 1;
                continue;
            }
            let rest = PageRange::of(run[at].page, most.min(run.len() - at) as u64);
            // SAFETY: the caller of `take` has locked the pages and serves threads that touch them. The
            // frames are holes in registered memory of Farpage's. No reference of Farpage's leads into the
            // program's memory.
            let move_them = |pages| unsafe { self.uffd.move_pages(page_of(run[at].frame), pages, false) };
            let (tried, moved) = by_halves(rest, Trouble::Refused, move_them);
            let tried = tried.count() as usize;
            most = if moved == Err(Trouble::Refused) { 1 } else { tried * 2 };
            let Err(trouble) = moved else {
                let end = at + tried;
                run[at..end].iter_mut().for_each(|page| page.taken = Taken::Yes);
                at = end;
                continue;
            };
            let before = at;
            while at < run.len() && has_memory(&mut run[at]) {
                run[at].taken = Taken::Yes;
                at += 1;
            }
            if at == before {
                run[at].taken = if trouble == Trouble::Missing { Taken::Gone } else { Taken::Busy };
                run[at].is_shared = trouble == Trouble::Busy;
                at += 1;
            }
        }
    }
}

impl Pages for ByMove<'_> {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        // SAFETY: the content of missing pages is the caller's promise.
        unsafe { self.uffd.register(pages) }
    }

    unsafe fn take(&self, pages: &mut [Outgoing]) {
        self.take_runs(pages, |page| self.has_memory(page.frame));
    }

    unsafe fn take_inline(&self, pages: &mut [Outgoing]) -> bool {
        self.take_runs(pages, |page| self.has_memory_inline(page));
        true
    }

    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
        if self.install.installs_by_move() {
            // SAFETY: the frame belongs to the caller. After a move it is a hole, which the answer says.
            match unsafe { self.uffd.move_pages(page, PageRange::of(page_of(frame), 1), true) } {
                Ok(()) => return Ok(Backing::Hole),
                // The page was moved, whatever the call reported.
                Err(_) if !self.has_memory(frame) => {
                    self.wake(page);
                    return Ok(Backing::Hole);
                }
                // The mapping is not writable now, or the kernel still holds the frame for a write.
                Err(Trouble::Refused | Trouble::Busy) => {}
                Err(trouble) => return Err(install_error(trouble)),
            }
        }
        // SAFETY: frame and page are the caller's promise.
        unsafe { copy_in(self.uffd, page, frame) }
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: source and pages are the caller's promise.
        unsafe { copy_run_in(self.uffd, pages, source) }
    }

    fn zero(&self, pages: PageRange, access: Access) -> Result<u64, InstallError> {
        zero(self.uffd, pages, access)
    }

    fn protect(&self, pages: PageRange) -> bool {
        self.uffd.protect(pages, true).is_ok()
    }

    fn unprotect(&self, pages: PageRange) -> bool {
        self.uffd.protect(pages, false).is_ok()
    }

    fn poison(&self, page: PageIndex) -> Result<(), InstallError> {
        poison(self.uffd, page)
    }

    fn wake(&self, page: PageIndex) {
        self.uffd.wake(PageRange::of(page, 1));
    }

    fn unshare(&self, pages: PageRange) {
        // SAFETY: populating for writing changes no byte. The call ends the sharing of pages since a fork.
        let _ = unsafe { memory::advise(pages, MADV_POPULATE_WRITE) };
    }

    unsafe fn give_memory(&self, frame: *mut PageBytes) -> Result<(), InstallError> {
        // SAFETY: the source is a constant page. The kernel refuses if the frame has memory.
        match unsafe { self.uffd.copy(page_of(frame), ZERO_PAGES.as_ptr().cast()) } {
            Ok(()) | Err(Trouble::Present) => Ok(()),
            Err(trouble) => Err(install_error(trouble)),
        }
    }

    unsafe fn drop_memory(&self, frames: &[Stretch]) -> Result<(), Errno> {
        // SAFETY: the frames belong to the caller and their bytes aren't needed, by the caller's promise.
        unsafe { memory::drop_each(frames) }
    }
}

/// Registers `page`, which belongs to the caller, protects it and lifts the protection.
fn protect_and_lift(uffd: &Uffd, page: PageRange) -> bool {
    // SAFETY: no code touches the page once it is dropped.
    let is_registered = unsafe { uffd.register(page) }.is_ok();
    is_registered && uffd.protect(page, true).and(uffd.protect(page, false)).is_ok()
}

impl<'u> ByCopy<'u> {
    /// Makes an object that copies pages. Frames are ordinary memory.
    pub fn new(uffd: &'u Uffd) -> Result<ByCopy<'u>, Errno> {
        let pagemap = Pagemap::open()?;
        let lazy = Lazy::new(&pagemap)?;
        let zero_frame = lazy::zero_frame(&pagemap)?;
        let writers = match &lazy {
            Some(lazy) if !lazy.protection_is_harmless(|page| protect_and_lift(uffd, page))? => Writers::GoOn,
            _ => Writers::Wait,
        };
        Ok(ByCopy { uffd, pagemap, lazy, writers, zero_frame })
    }

    /// Makes an object that works as on a kernel before 5.19. None where the kernel drops pages that have
    /// references.
    pub fn without_protection(uffd: &'u Uffd) -> Result<Option<ByCopy<'u>>, Errno> {
        let by_copy = ByCopy { writers: Writers::GoOn, ..ByCopy::new(uffd)? };
        Ok(by_copy.lazy.is_some().then_some(by_copy))
    }

    fn take_run(&self, run: &mut [Outgoing]) {
        let range = PageRange::of(run[0].page, run.len() as u64);
        if self.writers == Writers::Wait && self.uffd.protect(range, true).is_err() {
            // As in `by_halves`: before Linux 6.4 the kernel doesn't protect across borders of mappings.
            if run.len() > 1 {
                let (first, second) = run.split_at_mut(run.len() / 2);
                self.take_run(first);
                self.take_run(second);
            }
            return;
        }
        // Reading a missing page would make this thread wait for itself. The call `mincore` can't tell,
        // because it reports a page as missing that the host has swapped out.
        let Some(present) = self.present(range) else { return };
        let mut there = present;
        for page in run.iter_mut() {
            page.taken = if there & 1 == 0 { Taken::Gone } else { Taken::Yes };
            there >>= 1;
        }
        match &self.lazy {
            Some(lazy) => self.take_present(lazy, run),
            None => self.take_whatever_is_pinned(run, range),
        }
    }

    /// Takes the pages of a run that are there.
    fn take_present(&self, lazy: &Lazy, run: &mut [Outgoing]) {
        let claim = lazy.claim();
        let pages_max = claim.as_ref().map_or(run.len(), Claim::pages_max);
        // Without a pipe nothing is known of the pages. They stay, and are tried again.
        let is_tried = claim.is_some();
        let is_there = |page: &Outgoing| page.taken == Taken::Yes;
        for run in run.chunk_by_mut(|one, next| is_there(one) == is_there(next)) {
            if !is_there(&run[0]) {
                continue;
            }
            for run in run.chunks_mut(pages_max) {
                let pages = PageRange::of(run[0].page, run.len() as u64);
                // SAFETY: the pages are there, and the caller of `take` has locked them. The frames belong to
                // the caller and follow each other.
                let copied = claim.as_ref().and_then(|claim| unsafe {
                    claim.copy_and_drop(pages, run[0].frame, self.writers, self.alone(pages), || true)
                });
                let left = self.present(pages).expect("our own pagemap can be read");
                let is_left = |(at, _): &(usize, &mut Outgoing)| left & 1 << at != 0;
                let leave = |(_, page): (usize, &mut Outgoing)| {
                    self.leave(page, copied.is_some());
                    page.is_shared &= is_tried;
                };
                if copied.is_none() {
                    // No frame has the bytes of a page that the kernel has dropped meanwhile. The program had
                    // freed such a page.
                    let is_gone = |at: &usize| left & 1 << at == 0;
                    (0..run.len()).filter(is_gone).for_each(|at| run[at].taken = Taken::Gone);
                }
                run.iter_mut().enumerate().filter(is_left).for_each(leave);
            }
        }
    }

    /// Settles a page that the kernel has not dropped. With `is_copied` its frame has the bytes that the page
    /// had when it became clean.
    fn leave(&self, page: &mut Outgoing, is_copied: bool) {
        let alone = PageRange::of(page.page, 1);
        let is_protected = self.writers == Writers::Wait;
        // Without a protection a page of zeros becomes a page of the program's own, which is dropped the next
        // time.
        if is_copied && is_protected && self.is_zero_page(page.page) {
            // No device or process can have pinned the kernel's page of zeros to write to it. The protection
            // stops threads that would replace it.
            // SAFETY: the frame holds the page's zeros, and the caller of `take` serves the page's faults.
            if unsafe { memory::drop_pages(page.page.address() as *mut u8, PAGE_BYTES) }.is_ok() {
                return;
            }
        }
        if is_protected {
            // This fails only if the mapping is gone, and the page with it.
            let _ = self.uffd.protect(alone, false);
        }
        // SAFETY: the caller of `take` names only pages that the program may write. No protection of
        // Farpage's is left.
        let is_kept = !is_copied || unsafe { lazy::keep(page.page) };
        if is_kept || self.pagemap.is_present(page.page).expect("our own pagemap can be read") {
            page.taken = Taken::Busy;
            page.is_shared = true;
        }
    }

    /// Returns whether a page is the kernel's page of zeros: it was read, and never written.
    fn is_zero_page(&self, page: PageIndex) -> bool {
        let mut is_zero = false;
        let asked = self.pagemap.for_each_zero_run(PageRange::of(page, 1), |_| is_zero = true);
        match asked {
            Ok(()) => is_zero,
            // Before Linux 6.7 PAGEMAP_SCAN doesn't tell.
            Err(_) => self.zero_frame.is_some_and(|zero| self.pagemap.frame_number(page) == Some(zero)),
        }
    }

    /// Does the work of [`ByCopy::take_present`] on a kernel that doesn't say whether a page is pinned.
    fn take_whatever_is_pinned(&self, run: &mut [Outgoing], range: PageRange) {
        for page in run.iter().filter(|page| page.taken == Taken::Yes) {
            let source = page.page.address() as *const PageBytes;
            // SAFETY: the page is there, readable and write-protected, so it can't change while it is copied.
            // The frame belongs to the caller.
            unsafe { core::ptr::copy_nonoverlapping(source, page.frame, 1) };
        }
        // SAFETY: the bytes of the present pages are in the frames. The caller serves threads that touch the
        // pages.
        if unsafe { memory::drop_pages(range.start.address() as *mut u8, range.bytes()) }.is_err() {
            // A part of the run is locked by an mlock that Farpage has not seen. Pages that are still there
            // stay write-protected, and the caller is told.
            let left = self.present(range).expect("our own pagemap can be read");
            for (at, page) in run.iter_mut().enumerate().filter(|(at, _)| left & 1 << at != 0) {
                debug_assert!(page.taken == Taken::Yes, "page {at} came while it was locked");
                page.taken = Taken::Busy;
            }
        }
    }

    /// Returns which pages of a run no other process maps: bit n for page n.
    fn alone(&self, pages: PageRange) -> PipeBits {
        let mut bits = 0;
        let looked = self.pagemap.for_each_mapped(pages, |page, mapped| {
            bits |= PipeBits::from(mapped == Mapped::Alone) << (page.0 - pages.start.0);
        });
        looked.expect("our own pagemap can be read");
        bits
    }

    /// Returns which pages of a run are there: bit n for page n.
    fn present(&self, range: PageRange) -> Option<RunBits> {
        let mut bits: RunBits = 0;
        let seen = self.pagemap.for_each_present(range, |page| bits |= 1 << (page.0 - range.start.0));
        seen.is_ok().then_some(bits)
    }
}

impl Pages for ByCopy<'_> {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        // SAFETY: the content of missing pages is the caller's promise.
        unsafe { self.uffd.register(pages) }
    }

    unsafe fn take(&self, pages: &mut [Outgoing]) {
        for_each_run(pages, |run| self.take_run(run));
    }

    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
        // SAFETY: frame and page are the caller's promise.
        unsafe { copy_in(self.uffd, page, frame) }
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: source and pages are the caller's promise.
        unsafe { copy_run_in(self.uffd, pages, source) }
    }

    fn zero(&self, pages: PageRange, access: Access) -> Result<u64, InstallError> {
        zero(self.uffd, pages, access)
    }

    fn protect(&self, pages: PageRange) -> bool {
        self.writers == Writers::Wait && self.uffd.protect(pages, true).is_ok()
    }

    fn unprotect(&self, pages: PageRange) -> bool {
        if self.writers == Writers::GoOn {
            // No page is protected. Lifting a protection that doesn't exist would make the kernel copy the
            // page at its next write, too.
            self.uffd.wake(pages);
            return true;
        }
        self.uffd.protect(pages, false).is_ok()
    }

    fn poison(&self, page: PageIndex) -> Result<(), InstallError> {
        poison(self.uffd, page)
    }

    fn wake(&self, page: PageIndex) {
        self.uffd.wake(PageRange::of(page, 1));
    }

    fn unshare(&self, _: PageRange) {}

    unsafe fn give_memory(&self, _: *mut PageBytes) -> Result<(), InstallError> {
        Ok(())
    }

    unsafe fn drop_memory(&self, _: &[Stretch]) -> Result<(), Errno> {
        Ok(())
    }
}
