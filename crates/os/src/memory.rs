//! Mappings of Farpage: reserved once, populated by the kernel as they are touched.
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

/// The first reservations of this process that are still there, as first page and count of pages. Code that
/// looks for the program's mappings in /proc must leave these out.
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

/// Frees the entry of a mapping among the first reservations. The mapping was unmapped, or this child doesn't
/// have it.
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

/// Unmaps a mapping of Farpage.
///
/// # Safety
/// Farpage has mapped `bytes` bytes at `base`, and no reference to that memory exists.
pub unsafe fn release(base: *mut u8, bytes: usize) {
    // SAFETY: the range is a mapping of Farpage, and no reference to it exists, by the caller's promise.
    let _ = unsafe { rustix::mm::munmap(base.cast(), bytes.next_multiple_of(PAGE_BYTES)) };
    forget(base);
}

/// Maps memory where programs have none. A program may count on a hole that it has made with munmap or mremap
/// to stay one, and put something there later. A mapping of Farpage that the kernel had placed in the hole
/// would be overwritten.
fn map_far_away(
    bytes: usize,
    map: impl Fn(*mut c_void, MapFlags) -> rustix::io::Result<*mut c_void>,
) -> Result<*mut c_void, Errno> {
    /// Lowest address of Farpage's mappings. The kernel puts mappings far above, from the top downwards.
    /// Programs that are loaded at fixed addresses lie below.
    const FIRST: usize = 0x1000_0000_0000;
    /// Bytes from there on in which mappings begin. After the last address the first one is next: a program
    /// that forks all the time gets a new mapping for each fork.
    const BYTES: usize = 0x6000_0000_0000;
    const STEP: usize = 1 << 21;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let here = 0_u8;
    if NEXT.load(Ordering::Relaxed) == 0 {
        // The kernel puts the stack at a random address. 22 bits of that address make this address random,
        // too.
        let here = (&raw const here as usize >> 12) & 0x3f_ffff;
        let _ = NEXT.compare_exchange(0, here * STEP, Ordering::Relaxed, Ordering::Relaxed);
    }
    for _ in 0..64 {
        let next = NEXT.fetch_add((bytes + PAGE_BYTES).next_multiple_of(STEP), Ordering::Relaxed);
        let wanted = FIRST + next % BYTES;
        match map(wanted as *mut c_void, MapFlags::FIXED_NOREPLACE) {
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(errno(error)),
            Ok(base) => return Ok(base),
        }
    }
    map(core::ptr::null_mut(), MapFlags::empty()).map_err(errno)
}

/// Maps a file that is shared with other processes, from its beginning. The mapping belongs to the caller
/// until the caller unmaps it.
pub fn map_shared(fd: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> Result<*mut u8, Errno> {
    let base = map_far_away(bytes, |place, flags| {
        // SAFETY: the mapping goes where nothing is mapped, or where the kernel chooses, so no existing
        // mapping is touched.
        unsafe { rustix::mm::mmap(place, bytes, protection, MapFlags::SHARED | flags, fd, 0) }
    })?;
    remember(base, bytes);
    Ok(base.cast())
}

/// Reserves zeroed memory that isn't charged for until it is touched. The memory lives until the process
/// ends. A fork's child has a copy, unless [`keep_from_children`] is called.
pub fn reserve(bytes: usize) -> Result<*mut u8, Errno> {
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let base = map_far_away(bytes, |place, flags| {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE | flags);
        // SAFETY: the mapping goes where nothing is mapped, or where the kernel chooses, so no existing
        // mapping is touched.
        unsafe { rustix::mm::mmap_anonymous(place, bytes, protection, flags) }
    })?;
    remember(base, bytes);
    // Huge pages would make the first touch of each sparse table cost 2 MiB of the budget.
    // SAFETY: advice about the mapping just made, which changes no byte.
    unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxNoHugepage) }.or_else(|error| match error {
        rustix::io::Errno::INVAL => Ok(()),
        error => Err(errno(error)),
    })?;
    Ok(base.cast())
}

/// Does the same as [`reserve`] for memory that only engine threads use. A fork's child has no engine
/// threads, and doesn't get the memory.
///
/// # Safety
/// No code that runs in a child may use the memory.
pub unsafe fn reserve_for_threads(bytes: usize) -> Result<*mut u8, Errno> {
    let base = reserve(bytes)?;
    keep_from_core_files(base, bytes);
    // SAFETY: no code of a child uses the memory, by the caller's promise.
    unsafe { keep_from_children(base, bytes) }?;
    Ok(base)
}

/// Puts a value into memory of its own, for as long as the process lives.
pub fn place<T>(value: T) -> Result<&'static mut T, Errno> {
    const { assert!(align_of::<T>() <= PAGE_BYTES) };
    let base = reserve(size_of::<T>().max(1))?.cast::<T>();
    // SAFETY: the mapping is new, used by no other code, big enough, page-aligned, and never unmapped.
    unsafe {
        base.write(value);
        Ok(&mut *base)
    }
}

/// Keeps a mapping of Farpage out of core files. If the kernel refuses, core files are larger, and nothing
/// worse happens.
pub fn keep_from_core_files(base: *mut u8, bytes: usize) {
    // SAFETY: advice for core files, which changes no byte.
    let _ = unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDontDump) };
}

/// Keeps a mapping of Farpage out of a fork's child.
///
/// # Safety
/// No code that runs in a child may use the range.
pub unsafe fn keep_from_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: no code of a child uses the range, by the caller's promise. In this process nothing changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDontFork) }.map_err(errno)
}

/// Undoes [`keep_from_children`].
///
/// # Safety
/// Code that runs in a child may use its copy only as its own memory.
pub unsafe fn give_to_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: code of a child uses its copy only as its own memory, by the caller's promise. In this process
    // nothing changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxDoFork) }.map_err(errno)
}

/// Makes a mapping read as zeros in a fork's child.
///
/// # Safety
/// Code that runs in a child must expect zeros in the range.
pub unsafe fn wipe_in_children(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: code of a child expects zeros in the range, by the caller's promise. In this process nothing
    // changes.
    unsafe { rustix::mm::madvise(base.cast(), bytes, Advice::LinuxWipeOnFork) }.map_err(errno)
}

/// Gives the memory behind a range back to the kernel. Afterwards the range reads as zeros, or faults where
/// it is registered.
///
/// # Safety
/// No code needs the bytes, and no reference to them exists.
pub unsafe fn drop_pages(base: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: no code needs the bytes and no reference exists, by the caller's promise.
    unsafe { rustix::mm::madvise(base.cast::<c_void>(), bytes, Advice::LinuxDontNeed) }.map_err(errno)
}

/// A contiguous run of bytes, in the form that the kernel reads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// The first byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
}

/// Names this process as a descriptor that needs no opening (Linux 6.14).
const SELF: i32 = -10_001;
/// Whether the kernel, or a filter of its calls, has refused to drop several stretches at once.
static ONE_BY_ONE: AtomicBool = AtomicBool::new(false);

/// Drops the pages of several stretches, as [`drop_pages`] does for one. Where the kernel can (since Linux
/// 6.16), one call drops all, so that other CPUs are interrupted once and not for each stretch.
///
/// # Safety
/// As for [`drop_pages`], of each stretch.
pub unsafe fn drop_each(stretches: &[Stretch]) -> Result<(), Errno> {
    // Ordering: Relaxed, because a thread that doesn't see the flag yet is refused, too.
    if stretches.len() > 1 && !ONE_BY_ONE.load(Ordering::Relaxed) {
        let advice = Advice::LinuxDontNeed as usize;
        let arguments = [SELF as usize, stretches.as_ptr() as usize, stretches.len(), advice, 0, 0];
        // SAFETY: the kernel reads the list, which outlives the call. The bytes are the caller's promise.
        let word = unsafe { crate::sys::call(crate::sys::number::PROCESS_MADVISE, arguments) };
        if crate::sys::check(word) == Ok(stretches.iter().map(|stretch| stretch.bytes).sum()) {
            return Ok(());
        }
        ONE_BY_ONE.store(true, Ordering::Relaxed);
    }
    // SAFETY: no code needs the bytes and no reference exists, by the caller's promise.
    stretches.iter().try_for_each(|stretch| unsafe { drop_pages(stretch.base, stretch.bytes) })
}

/// Returns whether a page of private anonymous memory is in memory, by a call that needs no descriptor. Also
/// false for a page that the host has swapped out.
pub fn is_resident(page: PageIndex) -> bool {
    let mut state = 0_u8;
    let arguments = [page.address(), PAGE_BYTES, &raw mut state as usize, 0, 0, 0];
    // SAFETY: the kernel writes one byte for the one page, to a variable on our stack.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MINCORE, arguments) }).is_ok()
        && state & 1 != 0
}

/// Returns the part of `pages` that is mapped before the first hole.
pub fn mapped_before_a_hole(pages: PageRange) -> PageRange {
    // SAFETY: with `MS_ASYNC` the kernel does nothing but look for holes.
    let is_mapped = |pages: PageRange| unsafe {
        let arguments =
            [pages.start.address(), pages.bytes(), linux_raw_sys::general::MS_ASYNC as usize, 0, 0, 0];
        crate::sys::call(crate::sys::number::MSYNC, arguments) == 0
    };
    // Everything before `end` is mapped. The hole begins before `limit`, if there is one.
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

/// Sets the protection of pages (`PROT_*`).
///
/// # Safety
/// A thread that runs into the protection must be served, or must be meant to run into it.
pub unsafe fn allow(pages: PageRange, protection: usize) -> Result<(), Errno> {
    let arguments = [pages.start.address(), pages.bytes(), protection, 0, 0, 0];
    // SAFETY: a thread that runs into the protection is served or meant to, by the caller's promise.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MPROTECT, arguments) }).map(|_| ())
}

/// Moves the memory behind `pages` to `to`, together with its mapping. A mapping of the same kind without
/// memory stays in the place of `pages`. The kernel refuses to leave that mapping if RLIMIT_AS is below what
/// the process has. The place of `pages` then has no mapping afterwards. The kernel doesn't move pages of
/// several mappings at once.
///
/// # Safety
/// No code needs what is at `to`. A thread that touches either place meanwhile must be served, or must be
/// meant to run into the fault.
pub unsafe fn move_memory(pages: PageRange, to: PageIndex) -> Result<(), Errno> {
    let move_with = |flags: u32| {
        let flags = (raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED | flags) as usize;
        let arguments = [pages.start.address(), pages.bytes(), pages.bytes(), flags, to.address(), 0];
        // SAFETY: no code needs what is at `to`, and a thread that touches either place is served or meant to
        // fault, by the caller's promise.
        crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MREMAP, arguments) }).map(|_| ())
    };
    match move_with(raw::MREMAP_DONTUNMAP) {
        Err(Errno::ENOMEM) => move_with(0),
        moved => moved,
    }
}

/// Returns the file size in bytes up to which this process may write files (RLIMIT_FSIZE).
pub fn file_bytes_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Returns the size in bytes that the stack of this process's first thread may reach (RLIMIT_STACK).
pub fn stack_bytes_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Stack).current.unwrap_or(u64::MAX)
}

/// Gives the kernel advice on the program's memory, by number. The program can't see the effect of the
/// advice, except of `MADV_DONTNEED`, for which see Safety.
///
/// # Safety
/// If `advice` discards pages, no code may need them any more.
pub unsafe fn advise(pages: PageRange, advice: u32) -> Result<(), Errno> {
    let arguments = [pages.start.address(), pages.bytes(), advice as usize, 0, 0, 0];
    // SAFETY: no code needs pages that the advice discards, by the caller's promise.
    crate::sys::check(unsafe { crate::sys::call(crate::sys::number::MADVISE, arguments) }).map(|_| ())
}
