//! How faults arrive, and how pages are put into a program's memory and taken out of it.
//!
//! Two borders, so that modes can be combined and compared:
//!
//! * [`Pages`]: program memory. [`uffd::ByMove`] moves pages with UFFDIO_MOVE, [`uffd::ByCopy`] copies them, for
//!   kernels that can't move, and [`segv::ByProtection`] does without a userfaultfd. All pass one conformance suite.
//! * [`Fault`]: a touch that can't go on. [`thread::Faults`] reads them as userfaultfd messages;
//!   [`signal::Handover`] gets them from the threads that touched, as SIGBUS or SIGSEGV.
//!
//! Whoever calls is an engine thread, or a thread of the program in a handler or hook of ours: no allocation, no libc, no
//! thread-local storage.
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

/// Whether this kernel keeps pages that somebody has pinned while they are copied out: see `lazy.rs`.
pub fn keeps_pinned_pages() -> Result<bool, Errno> {
    let pagemap = farpage_os::proc::Pagemap::open()?;
    Ok(lazy::Lazy::new(&pagemap)?.is_some())
}

/// A thread of the program touched a page and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page.
    pub page: PageIndex,
    /// What it was doing.
    pub access: Access,
}

/// One page to take out.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// The page.
    pub page: PageIndex,
    /// The frame it goes to.
    pub frame: *mut PageBytes,
    /// What is behind the frame.
    pub backing: Backing,
    /// The answer.
    pub taken: Taken,
    /// Taken is `Busy` because the kernel can't move this page at the moment (shared since a fork, pinned by a
    /// device): [`Pages::unshare`] may help.
    pub is_shared: bool,
}

/// Why a page could not be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstallError {
    /// A page is there already.
    Present,
    /// There is no such mapping any more.
    Unmapped,
    /// The kernel has no memory for it now.
    NoMemory,
}

/// Access to the program's memory by other means than touching it.
///
/// Implementations promise that from the moment [`Pages::take`] reports a page as taken, its bytes are in the
/// frame, nobody can change them, and whoever touches the page waits for us.
pub trait Pages: Sync {
    /// Takes care of faults in `pages` from now on.
    ///
    /// # Safety
    /// From now on a missing page is not a page of zeros: the caller must know what it holds and install it.
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno>;

    /// Takes pages out, neighbours together, and writes into each what became of it.
    ///
    /// # Safety
    /// The frames are the caller's; the pages are locked by the caller, who serves whoever touches them.
    unsafe fn take(&self, pages: &mut [Outgoing]);

    /// The same in a thread of the program's, whose table has no descriptor of ours but the userfaultfd. False where that isn't
    /// enough: nothing was done.
    ///
    /// # Safety
    /// As for [`Pages::take`].
    unsafe fn take_here(&self, pages: &mut [Outgoing]) -> bool {
        let _ = pages;
        false
    }

    /// Puts the frame's bytes into the missing `page` and wakes whoever waits for it. Answers what is behind the
    /// frame now.
    ///
    /// # Safety
    /// The frame is the caller's and has memory; the page is locked by the caller.
    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError>;

    /// Copies neighbouring pages in, where they are missing, and wakes whoever waits for them. Returns how many,
    /// from the start, are there now; an error if none is.
    ///
    /// # Safety
    /// `source` is as many readable pages that nobody writes; the pages are locked by the caller.
    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError>;

    /// Maps zeros into the missing `pages` and wakes. Returns how many, from the start, are there now. If they are about to be
    /// written they may have memory of their own at once; else that comes with the first write.
    fn zero(&self, pages: PageRange, access: Access) -> Result<u64, InstallError>;

    /// Has the next write to each of `pages` that is there reported to us. False if the kernel can't.
    fn protect(&self, pages: PageRange) -> bool;

    /// Lifts the write protection of `pages` and wakes. False if it can't be lifted.
    fn unprotect(&self, pages: PageRange) -> bool;

    /// Makes every touch of the missing page a SIGBUS, and wakes.
    fn poison(&self, page: PageIndex) -> Result<(), InstallError>;

    /// Wakes whoever waits for the page; they try again.
    fn wake(&self, page: PageIndex);

    /// Tries to make pages that could not be taken movable. It may wait for a fault, so the caller must be a
    /// thread that serves none, and hold no lock.
    fn unshare(&self, pages: PageRange);

    /// Gives a frame memory, if it has none.
    ///
    /// # Safety
    /// The frame is the caller's.
    unsafe fn give_memory(&self, frame: *mut PageBytes) -> Result<(), InstallError>;

    /// Takes the memory of frames away: they are holes.
    ///
    /// # Safety
    /// The frames are the caller's and their bytes are needed no more.
    unsafe fn drop_memory(&self, frames: &[Stretch]) -> Result<(), Errno>;
}
