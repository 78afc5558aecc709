//! Eviction by copying, without losing a write that somebody else makes to the page meanwhile.
//!
//! A device or another process that has pinned a page writes to it past every protection. The kernel knows of the pin.
//! 1. A pipe refers to each page (vmsplice). The kernel drops none of them now, however short memory is.
//! 2. MADV_FREE makes the pages clean. Each write from here on shows.
//! 3. Reading the pipe copies the bytes and gives the references up.
//! 4. MADV_PAGEOUT drops the pages that are clean and that nobody refers to. [`keep`] marks the others as written.
// UNSAFETY: these calls take pages of the program away.

use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_os::proc::Pagemap;
use farpage_os::sys::{self, Errno};
use farpage_os::{futex, memory};
use linux_raw_sys::general as raw;
use rustix::fd::{AsRawFd, OwnedFd};

/// Pages that a pipe takes: the kernel's default, which no limit of a user's pipes reduces before 1,024 pipes.
pub const PIPE_PAGES: usize = 16;
/// Threads that can copy at once. One more finds its pages busy and comes again.
const PIPES: usize = 8;

const MADV_FREE: u32 = 8;
const MADV_PAGEOUT: u32 = 21;

struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// Pipes that hold references to pages while those are copied; and what this kernel can.
pub struct Lazy {
    pipes: [Pipe; PIPES],
    /// One bit for each pipe in use.
    in_use: AtomicU32,
}

impl Lazy {
    /// None: this kernel drops pages that somebody refers to (before Linux 5.18, but for some stable kernels), or can't be asked.
    pub fn new(pagemap: &Pagemap) -> Result<Option<Lazy>, Errno> {
        let pipe = || rustix::pipe::pipe().map(|(reader, writer)| Pipe { reader, writer });
        let mut pipes = [const { None }; PIPES];
        for place in &mut pipes {
            *place = Some(pipe().map_err(|error| Errno(error.raw_os_error()))?);
        }
        let lazy = Lazy { pipes: pipes.map(|pipe| pipe.expect("made above")), in_use: AtomicU32::new(0) };
        Ok(lazy.spares_references(pagemap)?.then_some(lazy))
    }

    /// Tries with two pages: the one that a pipe refers to must stay, the other one must go.
    fn spares_references(&self, pagemap: &Pagemap) -> Result<bool, Errno> {
        let base = memory::reserve(2 * PAGE_BYTES)?;
        let pages = PageRange::covering(base as usize, 2 * PAGE_BYTES);
        let first = PageRange::of(pages.start, 1);
        // SAFETY: the mapping just made, two pages of it.
        unsafe { base.write_bytes(1, 2 * PAGE_BYTES) };
        let is_held = self.pipes[0].hold(first);
        // SAFETY: both pages are ours, and their bytes are of no use.
        let asked = unsafe { memory::advise(pages, MADV_FREE).and(memory::advise(pages, MADV_PAGEOUT)) };
        let stays = pagemap.is_present(pages.start)?;
        let goes = !pagemap.is_present(pages.start.plus(1))?;
        if is_held {
            // SAFETY: `base` is the first page of the mapping made above; no reference into it exists.
            unsafe { self.pipes[0].copy_out(PAGE_BYTES, base) };
        }
        // SAFETY: the mapping just made; nothing refers to it any more.
        let _ = unsafe { memory::drop_pages(base, 2 * PAGE_BYTES) };
        Ok(is_held && asked.is_ok() && stays && goes)
    }

    /// Copies `pages`, which are all there, to `frames`, and has the kernel drop those that nobody else refers to or has written
    /// to meanwhile. False if it could not begin: then nothing was changed. Afterwards, [`keep`] what is left.
    ///
    /// # Safety
    /// The caller has locked the pages and serves their faults. `frames` is the first of as many frames of the caller's, which
    /// have memory.
    pub unsafe fn copy_and_drop(&self, pages: PageRange, frames: *mut PageBytes) -> bool {
        debug_assert!(pages.count() <= PIPE_PAGES as u64);
        let Some(which) = self.claim() else { return false };
        let pipe = &self.pipes[which];
        let is_held = pipe.hold(pages);
        if is_held {
            // A lock that we have not heard of ends either advice where it begins. What wasn't freed isn't dropped.
            // SAFETY: the kernel drops nothing as long as the pipe refers to it.
            let _ = unsafe { memory::advise(pages, MADV_FREE) };
            // SAFETY: the caller's promise.
            unsafe { pipe.copy_out(pages.bytes(), frames.cast()) };
            // SAFETY: only pages that were freed and are clean are dropped: their bytes are in the frames.
            let _ = unsafe { memory::advise(pages, MADV_PAGEOUT) };
        }
        // Ordering: Release: who claims the pipe next finds it empty.
        self.in_use.fetch_and(!(1 << which), Ordering::Release);
        is_held
    }

    fn claim(&self) -> Option<usize> {
        (0..PIPES).find(|which| {
            // Ordering: Acquire pairs with the Release in `copy_and_drop`.
            self.in_use.fetch_or(1 << which, Ordering::Acquire) & 1 << which == 0
        })
    }
}

impl Pipe {
    /// Has the empty pipe refer to `pages`, all of them or none. They are there, so nothing waits for a fault.
    fn hold(&self, pages: PageRange) -> bool {
        const NONBLOCK: usize = raw::SPLICE_F_NONBLOCK as usize;
        let list = [pages.start.address(), pages.bytes()];
        let arguments = [self.writer.as_raw_fd() as usize, list.as_ptr() as usize, 1, NONBLOCK, 0, 0];
        // SAFETY: one iovec, which names mapped memory; the kernel only reads it.
        let held = sys::check(unsafe { sys::call(raw::__NR_vmsplice as usize, arguments) }).unwrap_or(0);
        let is_all = held == pages.bytes();
        if !is_all {
            self.empty(held);
        }
        is_all
    }

    /// Reads as many bytes as the pipe refers to, to `place`. The pipe refers to nothing afterwards.
    ///
    /// # Safety
    /// As many bytes there are the caller's.
    unsafe fn copy_out(&self, bytes: usize, place: *mut u8) {
        let mut done = 0;
        while done < bytes {
            let arguments = [self.reader.as_raw_fd() as usize, place as usize + done, bytes - done, 0, 0, 0];
            // SAFETY: the caller's promise.
            let read = sys::check(unsafe { sys::call(raw::__NR_read as usize, arguments) });
            // A frame without the page's bytes must not be taken for a copy.
            done += read.ok().filter(|read| *read > 0).expect("a pipe of ours gives what it holds");
        }
    }

    /// Gives up the pipe's references to `bytes` bytes.
    fn empty(&self, bytes: usize) {
        let mut scratch = PageBytes::ZERO;
        for _ in 0..bytes.div_ceil(PAGE_BYTES) {
            let arguments =
                [self.reader.as_raw_fd() as usize, (&raw mut scratch) as usize, PAGE_BYTES, 0, 0, 0];
            // SAFETY: the kernel writes at most one page, to `scratch`, which is one page.
            unsafe { sys::call(raw::__NR_read as usize, arguments) };
        }
    }
}

/// Marks a page that is left as written: one that was freed lazily could be dropped by the kernel at any time. False if it is
/// not there any more; then it was clean, and what was copied is what it held.
///
/// # Safety
/// The program may write the page, which isn't write-protected.
pub unsafe fn keep(page: PageIndex) -> bool {
    // SAFETY: the caller's promise.
    unsafe { futex::rewrite(page.address()) }
}

/// The frame number of the kernel's page of zeros, if this process may know it.
pub fn zero_frame(pagemap: &Pagemap) -> Result<Option<u64>, Errno> {
    let base = memory::reserve(PAGE_BYTES)?;
    // SAFETY: the mapping just made, which was never written: read, it is the page of zeros.
    let zero = unsafe { base.read_volatile() };
    debug_assert_eq!(zero, 0);
    Ok(pagemap.frame_number(PageIndex::of_address(base as usize)))
}
