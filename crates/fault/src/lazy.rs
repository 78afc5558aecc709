//! Eviction by copying that loses no write of a device or another process.
//!
//! A device or another process that has pinned a page writes to it past every protection. Only the kernel
//! knows of the pin. Pages are therefore evicted in four steps:
//!
//! 1. A pipe refers to each page (vmsplice). From now on the kernel drops none of them, however short memory
//!    is.
//! 2. MADV_FREE makes the pages clean. Each write from now on shows.
//! 3. Reading the pipe copies the bytes and gives the references up.
//! 4. MADV_PAGEOUT drops the pages that are clean and have no other reference. [`keep`] marks the remaining
//!    pages as written.
//!
//! A write protection stops the program's threads meanwhile, or nothing does ([`Writers`]).
// UNSAFETY: these calls take pages of the program away.

use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_os::proc::{Mapped, Pagemap};
use farpage_os::sys::{self, Errno};
use farpage_os::{futex, memory};
use linux_raw_sys::general as raw;
use rustix::fd::{AsRawFd, OwnedFd};

/// Pages that the largest pipe takes. Most runs of an eviction have fewer.
pub const PIPE_PAGES: usize = 32;
/// A set of a pipe's pages, one bit for each.
pub type PipeBits = u32;
/// Pipes, and so threads that can copy at once. A further thread finds its pages busy and tries again.
pub const PIPES: usize = 8;
/// Pages that each pipe is to take. The sum of 112 is below the 128 pages that eight pipes have by default. A
/// user whose pipes have more than 16,384 pages gets smaller pipes from the kernel.
const PAGES: [usize; PIPES] = [PIPE_PAGES, PIPE_PAGES, 8, 8, 8, 8, 8, 8];

/// Pairs of pages that are tried before the kernel counts as one that doesn't drop clean pages. By chance the
/// kernel keeps about one pair in 1,400.
const TRIES: usize = 16;

const MADV_FREE: u32 = 8;
const MADV_PAGEOUT: u32 = 21;

/// Whether the program's threads may write while their pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// The threads wait, because the pages are write-protected.
    Wait,
    /// The threads may write. Before Linux 5.19 a page whose protection was lifted is copied by its next
    /// write if it has a reference. Writes of the device that holds the reference are then lost. For that
    /// reason pages aren't protected there.
    GoOn,
}

struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
    /// Pages that the pipe takes.
    pages_max: usize,
}

/// The outcome for two pages that the kernel was asked to drop.
struct Tried {
    /// Whether the page that a pipe refers to is still there.
    held_stays: bool,
    /// Whether the other page is gone.
    other_goes: bool,
}

/// Pipes that hold references to pages while the pages are copied. [`Lazy::new`] gives them only on a kernel
/// that doesn't drop pages with references.
pub struct Lazy {
    pipes: [Pipe; PIPES],
    /// One bit for each pipe in use.
    in_use: AtomicU32,
}

impl Lazy {
    /// Makes the pipes. None if this kernel drops pages that have references (before Linux 5.18, but for some
    /// stable kernels), or if it can't be asked.
    pub fn new(pagemap: &Pagemap) -> Result<Option<Lazy>, Errno> {
        let mut pipes = [const { None }; PIPES];
        for (place, pages) in pipes.iter_mut().zip(PAGES) {
            *place = Some(Pipe::of(pages).map_err(|error| Errno(error.raw_os_error()))?);
        }
        let lazy = Lazy { pipes: pipes.map(|pipe| pipe.expect("made above")), in_use: AtomicU32::new(0) };
        Ok(lazy.spares_references(pagemap)?.then_some(lazy))
    }

    /// Tries with two pages: the one that a pipe refers to must stay, and the other one must go. Neither goes
    /// while a CPU that this thread has left still has the new pages in its own list. Then other pages are
    /// tried.
    fn spares_references(&self, pagemap: &Pagemap) -> Result<bool, Errno> {
        let base = memory::reserve(2 * PAGE_BYTES)?;
        for _ in 0..TRIES {
            // SAFETY: `base` is the start of the mapping just made, which has two pages.
            match unsafe { self.try_to_drop(pagemap, base) }? {
                Tried { held_stays: false, .. } => return Ok(false),
                Tried { other_goes: true, .. } => return Ok(true),
                Tried { .. } => {}
            }
        }
        Ok(false)
    }

    /// Makes the kernel drop two new pages, the first of which a pipe refers to.
    ///
    /// # Safety
    /// `base` is the start of two pages without memory that only the caller uses.
    unsafe fn try_to_drop(&self, pagemap: &Pagemap, base: *mut u8) -> Result<Tried, Errno> {
        let pages = PageRange::covering(base as usize, 2 * PAGE_BYTES);
        // SAFETY: both pages are the caller's alone, by the caller's promise.
        unsafe { base.write_bytes(1, 2 * PAGE_BYTES) };
        let is_held = self.pipes[0].hold(PageRange::of(pages.start, 1));
        // SAFETY: both pages are ours, and no code needs their bytes.
        let asked = unsafe { memory::advise(pages, MADV_FREE).and(memory::advise(pages, MADV_PAGEOUT)) };
        let held_stays = is_held && asked.is_ok() && pagemap.is_present(pages.start)?;
        let other_goes = !pagemap.is_present(pages.start.plus(1))?;
        if is_held {
            // SAFETY: the first page is the caller's alone, and no reference into it exists.
            unsafe { self.pipes[0].copy_out(PAGE_BYTES, base) };
        }
        // SAFETY: as above, and the pipe no longer refers to the first page.
        let _ = unsafe { memory::drop_pages(base, 2 * PAGE_BYTES) };
        Ok(Tried { held_stays, other_goes })
    }

    /// Returns whether a page stays the page that a pipe refers to when its protection is changed and the
    /// page is then written. The trial uses a new page, whose protection `change` sets and lifts. If the
    /// kernel copied the page at the write, a device that had pinned it would write to a page outside the
    /// program.
    pub fn protection_is_harmless(&self, change: impl FnOnce(PageRange) -> bool) -> Result<bool, Errno> {
        let base = memory::reserve(PAGE_BYTES)?;
        let page = PageRange::of(PageIndex::of_address(base as usize), 1);
        // SAFETY: `base` is the start of the mapping just made.
        unsafe { base.write(1) };
        let is_held = self.pipes[0].hold(page);
        let is_lifted = change(page);
        let mut seen = PageBytes::ZERO;
        if is_lifted {
            // SAFETY: as above. The page is there, and no longer protected.
            unsafe { base.write_volatile(2) };
        }
        if is_held {
            // SAFETY: `seen` is one page of Farpage's.
            unsafe { self.pipes[0].copy_out(PAGE_BYTES, (&raw mut seen).cast()) };
        }
        // SAFETY: the range is the mapping just made, and nothing refers to it any more.
        let _ = unsafe { memory::drop_pages(base, PAGE_BYTES) };
        Ok(is_held && is_lifted && seen.0[0] == 2)
    }

    /// Claims a pipe that no thread uses.
    pub fn claim(&self) -> Option<Claim<'_>> {
        let which = (0..PIPES).find(|which| {
            // Ordering: Acquire pairs with the Release in `drop`.
            self.in_use.fetch_or(1 << which, Ordering::Acquire) & 1 << which == 0
        })?;
        Some(Claim { lazy: self, which })
    }
}

/// The right to use one pipe, until the claim is dropped.
pub struct Claim<'l> {
    lazy: &'l Lazy,
    which: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Ordering: Release, so that the thread that claims the pipe next finds it empty.
        self.lazy.in_use.fetch_and(!(1 << self.which), Ordering::Release);
    }
}

impl Claim<'_> {
    /// Returns the index of the pipe, below [`PIPES`].
    pub const fn which(&self) -> usize {
        self.which
    }

    /// Returns the number of pages that can be copied at once.
    pub const fn pages_max(&self) -> usize {
        self.pipe().pages_max
    }

    const fn pipe(&self) -> &Pipe {
        &self.lazy.pipes[self.which]
    }

    /// Copies `pages`, which are all there, to `frames`. Then makes the kernel drop the pages that have no
    /// other reference and weren't written meanwhile. `alone` has a bit for each page that no other process
    /// maps. The remaining pages are only copied ([`free_lazily`]). `close` keeps the program from its pages
    /// once the pipe refers to them. Returns none if the copying could not begin; no page was changed then.
    /// Otherwise returns the pages that were freed lazily. The caller must [`keep`] those of them that are
    /// left.
    ///
    /// # Safety
    /// The caller has locked the pages and serves their faults. `frames` is the first of as many frames with
    /// memory as `pages` has, which belong to the caller.
    pub unsafe fn copy_and_drop(
        &self,
        pages: PageRange,
        frames: *mut PageBytes,
        writers: Writers,
        alone: PipeBits,
        close: impl FnOnce() -> bool,
    ) -> Option<PipeBits> {
        debug_assert!(pages.count() <= PIPE_PAGES as u64);
        let pipe = self.pipe();
        if !pipe.hold(pages) {
            return None;
        }
        if !close() {
            pipe.empty(pages.bytes());
            return None;
        }
        let freed = free_lazily(pages, alone);
        // SAFETY: the frames belong to the caller and have memory, by the caller's promise.
        unsafe { pipe.copy_out(pages.bytes(), frames.cast()) };
        if writers == Writers::GoOn {
            // SAFETY: the pages are there, and with `GoOn` not protected, by the caller's promise. The frames
            // were just filled with their copies.
            unsafe { keep_replaced(pages, frames) };
        }
        // A lock that Farpage has not seen ends the advice where the lock begins. A page that wasn't freed
        // isn't dropped.
        // SAFETY: the kernel drops only pages that were freed and are clean, and their bytes are in the
        // frames.
        let _ = unsafe { memory::advise(pages, MADV_PAGEOUT) };
        Some(freed)
    }

    /// Marks as written those of `pages` that the kernel hasn't dropped, and returns them: bit n for page n.
    /// A page that the kernel has dropped is the page of zeros afterwards.
    ///
    /// # Safety
    /// The pages may be read and written, and no other code touches them.
    pub unsafe fn mark_left(&self, pagemap: &Pagemap, pages: PageRange) -> PipeBits {
        // The kernel drops no page while the pipe refers to it. For a page that was dropped before, the pipe
        // makes the kernel map the page of zeros.
        until_done(|| self.pipe().hold(pages));
        let mut left = 0;
        let look = pagemap.for_each_mapped(pages, |page, mapped| {
            left |= PipeBits::from(mapped != Mapped::Shared) << (page.0 - pages.start.0);
        });
        look.expect("our own pagemap can be read");
        for page in pages.iter().filter(|page| left & 1 << (page.0 - pages.start.0) != 0) {
            // SAFETY: the page may be written and no other code touches it, by the caller's promise.
            let is_kept = unsafe { keep(page) };
            assert!(is_kept, "a page that a pipe refers to can be written");
        }
        self.pipe().empty(pages.bytes());
        left
    }
}

/// Makes the kernel treat as clean those of `pages` that have a bit in `bits`. Returns the pages for which
/// that worked: bit n for page n. A pipe refers to the pages, so the kernel drops none of them.
///
/// A page that another process maps, too, must not be freed. The other process's page-table entry can be
/// clean although that process wrote the page. A device that only reads a shared page gets a copy, and the
/// kernel maps the copy as clean. The kernel would then drop the page for both processes.
fn free_lazily(pages: PageRange, bits: PipeBits) -> PipeBits {
    // SAFETY: the kernel drops no page as long as a pipe refers to it.
    let free = |pages| unsafe { memory::advise(pages, MADV_FREE) }.is_ok();
    let mut freed = 0;
    for (first, count) in stretches(bits & (PipeBits::MAX >> (u64::from(PipeBits::BITS) - pages.count()))) {
        let stretch = PageRange::of(pages.start.plus(first), count);
        if free(stretch) {
            freed |= (PipeBits::MAX >> (u64::from(PipeBits::BITS) - count)) << first;
            continue;
        }
        // A lock that Farpage has not seen ends the advice where the lock begins.
        for (at, page) in (first..).zip(stretch.iter()) {
            freed |= PipeBits::from(free(PageRange::of(page, 1))) << at;
        }
    }
    freed
}

/// Yields the stretches of set bits: where each begins, and how many bits it has.
fn stretches(bits: PipeBits) -> impl Iterator<Item = (u64, u64)> {
    let mut rest = bits;
    core::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let first = rest.trailing_zeros();
        let count = (rest >> first).trailing_ones();
        rest &= !((PipeBits::MAX >> (PipeBits::BITS - count)) << first);
        Some((u64::from(first), u64::from(count)))
    })
}

/// Repeats an attempt until it succeeds, because giving up would lose a page of the program. The kernel may
/// have no memory or no mapping to spare, but has again within moments.
pub fn until_done(mut attempt: impl FnMut() -> bool) {
    const TRIES: u32 = 10_000;
    const TRY_NS: u64 = 1_000_000;
    for _ in 0..TRIES {
        if attempt() {
            return;
        }
        farpage_os::clock::sleep_ns(TRY_NS);
    }
    panic!(
        "the system has had no memory or no mapping (vm.max_map_count) to spare for ten seconds, and a page of the program is neither in its place nor out"
    );
}

impl Pipe {
    /// Makes a pipe that takes `pages`, or fewer for a user who has very many pipes.
    fn of(pages: usize) -> rustix::io::Result<Pipe> {
        let (reader, writer) = rustix::pipe::pipe()?;
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, pages * PAGE_BYTES);
        let pages_max = (rustix::pipe::fcntl_getpipe_size(&writer)? / PAGE_BYTES).clamp(1, PIPE_PAGES);
        Ok(Pipe { reader, writer, pages_max })
    }

    /// Makes the empty pipe refer to `pages`, to all of them or to none. The pages are there, so the call
    /// waits for no fault.
    fn hold(&self, pages: PageRange) -> bool {
        const NONBLOCK: usize = raw::SPLICE_F_NONBLOCK as usize;
        let list = [pages.start.address(), pages.bytes()];
        let arguments = [self.writer.as_raw_fd() as usize, list.as_ptr() as usize, 1, NONBLOCK, 0, 0];
        // SAFETY: the iovec names mapped memory, which the kernel only reads.
        let held = sys::check(unsafe { sys::call(raw::__NR_vmsplice as usize, arguments) }).unwrap_or(0);
        let is_all = held == pages.bytes();
        if !is_all {
            self.empty(held);
        }
        is_all
    }

    /// Reads `bytes` bytes, as many as the pipe refers to, to `place`. The pipe refers to nothing afterwards.
    ///
    /// # Safety
    /// `place` must point to `bytes` bytes that belong to the caller.
    unsafe fn copy_out(&self, bytes: usize, place: *mut u8) {
        let mut done = 0;
        while done < bytes {
            let arguments = [self.reader.as_raw_fd() as usize, place as usize + done, bytes - done, 0, 0, 0];
            // SAFETY: the bytes at `place` belong to the caller, by the caller's promise.
            let read = sys::check(unsafe { sys::call(raw::__NR_read as usize, arguments) });
            // A frame without the page's bytes must not be taken for a copy.
            done += read.ok().filter(|read| *read > 0).expect("a pipe of ours gives what it holds");
        }
    }

    /// Gives up the pipe's references to `bytes` bytes.
    fn empty(&self, bytes: usize) {
        let (mut scratch, mut left) = (PageBytes::ZERO, bytes);
        while left > 0 {
            let part = left.min(PAGE_BYTES);
            // A page left in the pipe would be taken for the first page of the next copy.
            // SAFETY: `scratch` has the bytes of a page, and `part` is no more.
            unsafe { self.copy_out(part, (&raw mut scratch).cast()) };
            left -= part;
        }
    }
}

/// Keeps pages that are no longer the pages that were copied. A thread's write replaces a page of zeros, or a
/// page that is shared since a fork. If that happened before MADV_FREE, the new page looks clean, but its
/// bytes differ from the copy.
///
/// # Safety
/// The pages are there, and the program may write them. There are as many frames as pages, and they hold the
/// pages' copies.
unsafe fn keep_replaced(pages: PageRange, frames: *mut PageBytes) {
    for (at, page) in pages.iter().enumerate() {
        // SAFETY: pages and copies are the caller's promise, and both are aligned to pages. `at` is below the
        // number of pages, and `word` below the number of words of a page. Threads of the program may write
        // their pages meanwhile.
        let differs = |word: usize| unsafe {
            let copy: *const u64 = frames.add(at).cast();
            (page.address() as *const u64).add(word).read_volatile() != copy.add(word).read()
        };
        if (0..PAGE_BYTES / size_of::<u64>()).any(differs) {
            // SAFETY: the program may write the page, by the caller's promise.
            let is_kept = unsafe { keep(page) };
            assert!(is_kept, "a page that was written while it was copied can be written");
        }
    }
}

/// Marks a remaining page as written, because the kernel could drop a lazily freed page at any time. Returns
/// false if the page is not there any more. In that case the page was clean, and the copy is its content.
///
/// # Safety
/// The program may write the page, which isn't write-protected.
pub unsafe fn keep(page: PageIndex) -> bool {
    // SAFETY: the page may be written and isn't write-protected, by the caller's promise.
    unsafe { futex::rewrite(page.address()) }
}

/// Returns the frame number of the kernel's page of zeros, if this process may know it.
pub fn zero_frame(pagemap: &Pagemap) -> Result<Option<u64>, Errno> {
    let base = memory::reserve(PAGE_BYTES)?;
    // SAFETY: `base` is the start of the mapping just made. The mapping was never written, so a read finds
    // the page of zeros.
    let zero = unsafe { base.read_volatile() };
    debug_assert_eq!(zero, 0);
    Ok(pagemap.frame_number(PageIndex::of_address(base as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bug: about one pair of pages in 1,400 stays by chance. The kernel then counted as one that drops
    /// pinned pages.
    #[test]
    fn kernel_that_spares_pinned_pages_is_known_each_time() {
        let pagemap = Pagemap::open().unwrap();
        let Some(lazy) = Lazy::new(&pagemap).unwrap() else {
            assert!(
                std::env::var("CI").as_deref() != Ok("true"),
                "this kernel drops pinned pages (before 5.18)"
            );
            return println!("skipped: this kernel drops pinned pages (before 5.18)");
        };
        let (is_over, me) = (AtomicU32::new(0), rustix::thread::gettid());
        std::thread::scope(|scope| {
            // This thread moves the test from CPU to CPU, as a busy machine does now and then.
            scope.spawn(|| {
                let all = rustix::thread::sched_getaffinity(None).unwrap();
                let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
                for cpu in cpus.cycle().take_while(|_| is_over.load(Ordering::Relaxed) == 0) {
                    let mut one = rustix::thread::CpuSet::new();
                    one.set(cpu);
                    rustix::thread::sched_setaffinity(Some(me), &one).unwrap();
                }
            });
            let is_known = (0..2_000).all(|_| lazy.spares_references(&pagemap).unwrap());
            is_over.store(1, Ordering::Relaxed);
            assert!(is_known);
        });
    }

    /// A write replaced the first page before MADV_FREE. The page looks clean, but its bytes differ from the
    /// copy. Dropping it would lose the write. The second page is the one that was copied.
    #[test]
    fn clean_page_that_differs_from_its_copy_is_not_dropped() {
        let pagemap = Pagemap::open().unwrap();
        let base = memory::reserve(2 * PAGE_BYTES).unwrap();
        let pages = PageRange::covering(base as usize, 2 * PAGE_BYTES);
        let mut frames = [PageBytes([1; PAGE_BYTES]), PageBytes([1; PAGE_BYTES])];
        frames[0].0[PAGE_BYTES - 1] = 2;
        // A CPU that this thread has left may still have the new pages in its own list. Then neither page
        // goes.
        let other_goes = (0..TRIES).any(|_| {
            // SAFETY: no code needs the bytes of the mapping just made. The frames hold what the test says.
            unsafe {
                memory::drop_pages(base, 2 * PAGE_BYTES).unwrap();
                base.write_bytes(1, 2 * PAGE_BYTES);
                memory::advise(pages, MADV_FREE).unwrap();
                keep_replaced(pages, frames.as_mut_ptr());
                memory::advise(pages, MADV_PAGEOUT).unwrap();
            }
            assert!(pagemap.is_present(pages.start).unwrap(), "a page that isn't its copy stays");
            !pagemap.is_present(pages.start.plus(1)).unwrap()
        });
        assert!(other_goes, "a page that is its copy goes");
    }
}
