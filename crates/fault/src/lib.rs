//! How faults arrive, and how pages are put into a program's memory and taken out of it.
//!
//! Two interfaces allow modes to be combined and compared:
//!
//! * [`Pages`] is the program's memory. [`uffd::ByMove`] moves pages with UFFDIO_MOVE. [`uffd::ByCopy`]
//!   copies pages, for kernels that can't move. [`segv::ByProtection`] does without a userfaultfd. All pass
//!   one conformance suite.
//! * [`Fault`] is an access that can't go on. [`thread::Faults`] reads faults as userfaultfd messages.
//!   [`signal::Handover`] gets them from the faulting threads, as SIGBUS or SIGSEGV.
//!
//! The calling thread is an engine thread, or a thread of the program in a handler or hook of the engine.
//! This code therefore doesn't allocate, doesn't call libc, and doesn't use thread-local storage.
#![cfg_attr(not(test), no_std)]

mod lazy;
pub mod segv;
pub mod signal;
pub mod thread;
pub mod uffd;

use farpage_core::cache::Backing;
use farpage_core::pager::{Access, Taken};
use farpage_core::units::{PageBytes, PageIndex, PageRange};
use farpage_os::memory::Stretch;
use farpage_os::sys::Errno;

/// Returns whether this kernel keeps pinned pages while they are copied out (see `lazy.rs`).
pub fn keeps_pinned_pages() -> Result<bool, Errno> {
    let pagemap = farpage_os::proc::Pagemap::open()?;
    Ok(lazy::Lazy::new(&pagemap)?.is_some())
}

/// A thread of the program touched a page and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page.
    pub page: PageIndex,
    /// The access that faulted.
    pub access: Access,
}

/// One page to take out.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// The page.
    pub page: PageIndex,
    /// The frame it goes to.
    pub frame: *mut PageBytes,
    /// Whether the frame has memory.
    pub backing: Backing,
    /// The outcome.
    pub taken: Taken,
    /// `taken` is `Busy` because the kernel can't move this page at the moment: the page is shared since a
    /// fork, or pinned by a device. [`Pages::unshare`] may help.
    pub is_shared: bool,
}

/// Why a page could not be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstallError {
    /// A page is already there.
    Present,
    /// The page's mapping no longer exists.
    Unmapped,
    /// The kernel has no memory for the page now.
    NoMemory,
}

/// Access to the program's memory by other means than touching it.
///
/// Implementations promise what holds once [`Pages::take`] reports a page as taken. The page's bytes are in
/// the frame, and no thread, process or device can change them. A thread that touches the page waits for the
/// engine.
pub trait Pages: Sync {
    /// Handles faults in `pages` from now on.
    ///
    /// # Safety
    /// From now on a missing page is not a page of zeros. The caller must know each page's content and
    /// install it.
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno>;

    /// Takes pages out, neighbours together, and writes the outcome into each of them.
    ///
    /// # Safety
    /// The frames belong to the caller. The caller has locked the pages, and serves threads that touch them.
    unsafe fn take(&self, pages: &mut [Outgoing]);

    /// Does the same as [`Pages::take`] in a thread of the program. Of the descriptors that taking needs, the
    /// thread's table has only the userfaultfd. Returns false, with nothing done, where that isn't enough.
    ///
    /// # Safety
    /// As for [`Pages::take`].
    unsafe fn take_inline(&self, pages: &mut [Outgoing]) -> bool {
        let _ = pages;
        false
    }

    /// Puts the frame's bytes into the missing `page`, and wakes threads that wait for it. Returns whether
    /// the frame still has memory.
    ///
    /// # Safety
    /// The frame belongs to the caller and has memory. The caller has locked the page.
    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError>;

    /// Copies neighbouring pages in where they are missing, and wakes threads that wait for them. Returns how
    /// many pages, from the start, are there now; an error if none is.
    ///
    /// # Safety
    /// `source` points to as many readable pages as `pages` has, which no thread writes. The caller has
    /// locked the pages.
    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError>;

    /// Maps zeros into the missing `pages` and wakes. Returns how many pages, from the start, are there now.
    /// Pages that are about to be written may get memory of their own at once. Otherwise the memory comes
    /// with the first write.
    fn zero(&self, pages: PageRange, access: Access) -> Result<u64, InstallError>;

    /// Makes the kernel report the next write to each of `pages` that is there. Returns false if the kernel
    /// can't.
    fn protect(&self, pages: PageRange) -> bool;

    /// Lifts the write protection of `pages` and wakes. Returns false if the protection can't be lifted.
    fn unprotect(&self, pages: PageRange) -> bool;

    /// Makes every touch of the missing page a SIGBUS, and wakes.
    fn poison(&self, page: PageIndex) -> Result<(), InstallError>;

    /// Wakes threads that wait for the page, so that they try again.
    fn wake(&self, page: PageIndex);

    /// Tries to make pages movable that could not be taken. The call may wait for a fault. The caller must
    /// therefore be a thread that serves no faults, and hold no lock.
    fn unshare(&self, pages: PageRange);

    /// Gives a frame memory, if it has none.
    ///
    /// # Safety
    /// The frame belongs to the caller.
    unsafe fn give_memory(&self, frame: *mut PageBytes) -> Result<(), InstallError>;

    /// Takes the memory of frames away, so that they become holes.
    ///
    /// # Safety
    /// The frames belong to the caller, and their bytes are no longer needed.
    unsafe fn drop_memory(&self, frames: &[Stretch]) -> Result<(), Errno>;
}
