//! Our own mappings: reserved once, populated by the kernel as they are touched.
// UNSAFETY: mapping memory makes and breaks pointers.

use crate::sys::Errno;
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use linux_raw_sys::general as raw;
use rustix::fd::BorrowedFd;
use rustix::mm::{Advice, MapFlags};

pub use rustix::mm::ProtFlags;

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

/// The first reservations of this process that are there: first page and count of pages. Whoever looks for the program's
/// mappings in /proc must leave these out.
static EARLY: [[AtomicU64; 2]; 32] = [const { [const { AtomicU64::new(0) }; 2] }; 32];
static EARLY_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Calls `visit` for each of the first reservations.
pub fn for_each_early_reservation(mut visit: impl FnMut(PageRange)) {
    let count = EARLY_COUNT.load(Ordering::Acquire).min(EARLY.len());
    for [start, pages] in &EARLY[..count] {
        visit(PageRange::of(PageIndex(start.load(Ordering::Acquire)), pages.load(Ordering::Acquire)));
    }
}

fn remember(base: *mut c_void, bytes: usize) {
    let (first, count) = (PageIndex::of_address(base as usize).0, (bytes / PAGE_BYTES) as u64);
    let known = EARLY_COUNT.load(Ordering::Acquire).min(EARLY.len());
    let given_up = EARLY[..known].iter().find(|[start, pages]| {
        pages.load(Ordering::Acquire) == 0
            && start.load(Ordering::Acquire) == 0
            && start.compare_exchange(0, first, Ordering::AcqRel, Ordering::Acquire).is_ok()
    });
    if let Some([_, pages]) = given_up {
        pages.store(count, Ordering::Release);
        return;
    }
    let at = EARLY_COUNT.fetch_add(1, Ordering::AcqRel);
    if let Some([start, pages]) = EARLY.get(at) {
        start.store(first, Ordering::Release);
        pages.store(count, Ordering::Release);
    }
}

/// Frees the entry of a mapping among the first reservations. The mapping was unmapped, or this child doesn't have it.
pub fn forget(base: *const u8) {
    let first = PageIndex::of_address(base as usize).0;
    let known = EARLY_COUNT.load(Ordering::Acquire).min(EARLY.len());
    if let Some([start, pages]) =
        EARLY[..known].iter().find(|[start, _]| first != 0 && start.load(Ordering::Acquire) == first)
    {
        pages.store(0, Ordering::Release);
        start.store(0, Ordering::Release);
    }
}

/// Unmaps a mapping of ours.
///
/// # Safety
/// Farpage has mapped `bytes` bytes at `base`, and no reference to that memory exists.
pub unsafe fn release(base: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { rustix::mm::munmap(base.cast(), bytes.next_multiple_of(PAGE_BYTES)) };
    forget(base);
}

/// Maps memory where programs have none. A program may count on a hole that it has made itself with munmap or
/// mremap to stay one, and put something there later; a mapping of ours that the kernel had placed in it would
/// be overwritten.
fn map_far_away(
    bytes: usize,
    map: impl Fn(*mut c_void, MapFlags) -> rustix::io::Result<*mut c_void>,
) -> Result<*mut c_void, Errno> {
    /// Far below where the kernel puts mappings (they grow down from the top) and above where programs are.
    const FIRST: usize = 0x1000_0000_0000;
    const STEP: usize = 1 << 21;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let here = 0_u8;
    if NEXT.load(Ordering::Relaxed) == 0 {
        // Where the kernel has put the stack is random: 22 bits of it make our place random, too.
        let here = (&raw const here as usize >> 12) & 0x3f_ffff;
        let _ = NEXT.compare_exchange(0, FIRST + here * STEP, Ordering::Relaxed, Ordering::Relaxed);
    }
    for _ in 0..64 {
        let wanted = NEXT.fetch_add((bytes + PAGE_BYTES).next_multiple_of(STEP), Ordering::Relaxed);
        match map(wanted as *mut c_void, MapFlags::FIXED_NOREPLACE) {
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(errno(error)),
            Ok(base) => return Ok(base),
        }
    }
    map(core::ptr::null_mut(), MapFlags::empty()).map_err(errno)
}

/// Maps a file that is shared with others, from its beginning. It is ours until it is unmapped.
pub fn map_shared(fd: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> Result<*mut u8, Errno> {
    let base = map_far_away(bytes, |place, flags| {
        // SAFETY: where there is nothing, or where the kernel likes it: nothing that exists is touched.
        unsafe { rustix::mm::mmap(place, bytes, protection, MapFlags::SHARED | flags, fd, 0) }
    })?;
    remember(base, bytes);
    Ok(base.cast())
}

/// Reserves zeroed memory without charging for it until it is touched. It lives until the process ends; a fork's child has
/// a copy, unless [`keep_from_children`] is told.
pub fn reserve(bytes: usize) -> Result<*mut u8, Errno> {
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let base = map_far_away(bytes, |place, flags| {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE | flags);
        // SAFETY: where there is nothing, or where the kernel likes it: nothing that exists is touched.
        unsafe { rustix::mm::mmap_anonymous(place, bytes, protection, flags) }
    })?;
    remember(base, bytes);
    // Huge pages would make the first touch of each sparse table cost 2 MiB of the budget.
    // SAFETY: advice about the mapping just made, which changes nothing that can be read.
    unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxNoHugepage) }.or_else(|error| match error {
        rustix::io::Errno::INVAL => Ok(()),
        error => Err(errno(error)),
    })?;
    Ok(base.cast())
}

/// The same for what only engine threads use: a fork's child, which has none, doesn't get it.
///
/// # Safety
/// No code that runs in a child may use it.
pub unsafe fn reserve_for_threads(bytes: usize) -> Result<*mut u8, Errno> {
    let base = reserve(bytes)?;
    keep_from_core_files(base, bytes);
    // SAFETY: the caller's promise.
    unsafe { keep_from_children(base, bytes) }?;
    Ok(base)
}

/// Puts a value into memory of its own, for as long as the process lives.
pub fn place<T>(value: T) -> Result<&'static mut T, Errno> {
    const { assert!(align_of::<T>() <= PAGE_BYTES) };
    let base = reserve(size_of::<T>().max(1))?.cast::<T>();
    // SAFETY: the mapping is new, ours alone, big enough, page-aligned, and never unmapped.
    unsafe {
        base.write(value);
        Ok(&mut *base)
    }
}

/// Keeps a mapping of ours out of core files. A kernel that refuses writes more into them, no more than that.
pub fn keep_from_core_files(base: *mut u8, bytes: usize) {
    // SAFETY: advice for core files, which changes nothing that can be read.
    let _ = unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDontDump) };
}

/// Keeps a mapping of ours out of a fork's child.
///
/// # Safety
/// No code that runs in a child may use the range.
pub unsafe fn keep_from_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller answers for the child; in this process nothing changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDontFork) }.map_err(errno)
}

/// Undoes [`keep_from_children`].
///
/// # Safety
/// Code that runs in a child may use its copy only as its own memory.
pub unsafe fn give_to_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller answers for the child; in this process nothing changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDoFork) }.map_err(errno)
}

/// Makes a mapping read as zeros in a fork's child.
///
/// # Safety
/// Code that runs in a child must expect zeros in the range.
pub unsafe fn wipe_in_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller answers for the child; in this process nothing changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxWipeOnFork) }.map_err(errno)
}

/// Gives the memory behind a range back; it reads as zeros (or faults, where registered) afterwards.
///
/// # Safety
/// Nobody needs the bytes, and no reference to them exists.
pub unsafe fn drop_pages(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::madvise(base.cast::<c_void>(), bytes, Advice::LinuxDontNeed) }.map_err(errno)
}

/// Neighbouring bytes, as the kernel wants to have them described.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// The first byte.
    pub base: *mut u8,
    /// How many.
    pub bytes: usize,
}

/// This process, as a descriptor that nobody has to open (Linux 6.14).
const SELF: i32 = -10_001;
/// The kernel, or who filters its calls, has refused to take several stretches at once.
static ONE_BY_ONE: AtomicBool = AtomicBool::new(false);

/// [`drop_pages`] for several stretches: by one call where the kernel can, so that other CPUs are interrupted once and not for
/// each (since Linux 6.16).
///
/// # Safety
/// As for [`drop_pages`], of each.
pub unsafe fn drop_each(stretches: &[Stretch]) -> Result<(), Errno> {
    // Ordering: Relaxed: who doesn't see it yet is refused, too.
    if stretches.len() > 1 && !ONE_BY_ONE.load(Ordering::Relaxed) {
        let advice = Advice::LinuxDontNeed as usize;
        let arguments = [SELF as usize, stretches.as_ptr() as usize, stretches.len(), advice, 0, 0];
        // SAFETY: the kernel reads the list, which outlives the call; for the rest the caller's promise.
        let word = unsafe { crate::sys::call(crate::sys::number::PROCESS_MADVISE, arguments) };
        if crate::sys::check(word) == Ok(stretches.iter().map(|stretch| stretch.bytes).sum()) {
            return Ok(());
        }
        ONE_BY_ONE.store(true, Ordering::Relaxed);
    }
    // SAFETY: the caller's promise.
    stretches.iter().try_for_each(|stretch| unsafe { drop_pages(stretch.base, stretch.bytes) })
}

/// Whether a page of private anonymous memory is there, by a call that needs no descriptor. False also for one that the host
/// has swapped out.
pub fn is_resident(page: PageIndex) -> bool {
    let mut state = 0_u8;
    let arguments = [page.address(), PAGE_BYTES, &raw mut state as usize, 0, 0, 0];
    // SAFETY: the kernel writes one byte for the one page, to a variable of ours.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MINCORE, arguments) }).is_ok()
        && state & 1 != 0
}

/// How much of `pages` is mapped before the first hole.
pub fn mapped_before_a_hole(pages: PageRange) -> PageRange {
    // SAFETY: asked for this, the kernel does nothing but look for holes.
    let is_mapped = |pages: PageRange| unsafe {
        let arguments =
            [pages.start.address(), pages.bytes(), linux_raw_sys::general::MS_ASYNC as usize, 0, 0, 0];
        crate::sys::call(crate::sys::number::MSYNC, arguments) == 0
    };
    // What lies before `end` is mapped; the hole, if there is one, begins before `limit`.
    let (mut end, mut limit) = (pages.start, pages.end);
    if is_mapped(pages) {
        return pages;
    }
    while end.0 + 1 < limit.0 {
        let middle = PageIndex(end.0 + (limit.0 - end.0) / 2);
        if is_mapped(PageRange::new(end, middle)) {
            end = middle;
        } else {
            limit = middle;
        }
    }
    PageRange::new(pages.start, end)
}

/// What may be done with pages: `PROT_*`.
///
/// # Safety
/// Whoever runs into it must be served, or be meant to.
pub unsafe fn allow(pages: PageRange, protection: usize) -> Result<(), Errno> {
    let arguments = [pages.start.address(), pages.bytes(), protection, 0, 0, 0];
    // SAFETY: the caller's promise.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MPROTECT, arguments) }).map(|_| ())
}

/// Moves the memory behind `pages` to `to`, with the mapping that it has. In the place of `pages` stays a mapping like it, without
/// memory. Where that is refused, because RLIMIT_AS is below what the process has, the place of `pages` has no mapping afterwards.
/// The kernel moves no pages of several mappings at once.
///
/// # Safety
/// Nobody needs what is at `to`. Nobody touches either place meanwhile but who is served, or meant to run into it.
pub unsafe fn move_memory(pages: PageRange, to: PageIndex) -> Result<(), Errno> {
    const ENOMEM: Errno = Errno(linux_raw_sys::errno::ENOMEM as i32);
    let move_with = |flags: u32| {
        let flags = (raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED | flags) as usize;
        let arguments = [pages.start.address(), pages.bytes(), pages.bytes(), flags, to.address(), 0];
        // SAFETY: the caller's promise.
        crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MREMAP, arguments) }).map(|_| ())
    };
    match move_with(raw::MREMAP_DONTUNMAP) {
        Err(ENOMEM) => move_with(0),
        moved => moved,
    }
}

/// How large this process may make files, and up to where it may write them (RLIMIT_FSIZE).
pub fn file_bytes_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// How large the stack of this process's first thread may become (RLIMIT_STACK).
pub fn stack_bytes_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Stack).current.unwrap_or(u64::MAX)
}

/// Advice on the program's memory, by number: advice whose effect the program can't see, except
/// `MADV_DONTNEED`, for which see Safety.
///
/// # Safety
/// If `advice` discards pages, nobody may need them any more.
pub unsafe fn advise(pages: PageRange, advice: u32) -> Result<(), Errno> {
    let arguments = [pages.start.address(), pages.bytes(), advice as usize, 0, 0, 0];
    // SAFETY: the caller's promise.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MADVISE, arguments) }).map(|_| ())
}
