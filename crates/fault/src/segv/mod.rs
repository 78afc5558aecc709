//! `segv` mode: without a userfaultfd. What is out may not be touched (PROT_NONE), and a touch is a SIGSEGV.
//!
//! It needs no privilege and no system call that containers refuse. What the other modes leave to the kernel is done here:
//!
//! * *Out of sight.* A page is filled while no instruction may touch it, through /proc/self/mem or aside (`aside.rs`), and opened
//!   when its bytes are there. When it goes it is closed before it is dropped (`take.rs`).
//! * *Which pages.* Beside every page stands whether it is *open*, and what the program itself allows there, since both share
//!   the kernel's one protection.
//! * *How many mappings.* Neighbours with different protections are mappings of their own to the kernel, which allows some
//!   65,000. The borders are counted; with many of them memory counts as full, and evictions, by the hand then and so in
//!   address order, join what lies between.
//!
//! A page that was never touched is closed, too: else the program would grow without our hearing of it.
// UNSAFETY: it takes pages of the program away, with its callers' promises.

mod aside;
mod book;
mod take;

use crate::uffd::for_each_run;
use crate::{InstallError, Outgoing, Pages};
use aside::{Careful, is_forcible};
use book::{Book, OPEN, READ_WRITE, allowed, is_known, is_open};
use core::sync::atomic::{AtomicI64, Ordering};
use farpage_core::cache::Backing;
use farpage_core::pager::Access;
use farpage_core::units::{PageBytes, PageIndex, PageRange};
use farpage_os::memory::{self, Stretch};
use farpage_os::proc::{self, OwnMemory, Pagemap};
use farpage_os::sys::Errno;
use linux_raw_sys::general::{MADV_DONTNEED, MADV_POPULATE_WRITE, PROT_NONE, PROT_READ};

/// Runs that are opened when a range is registered, at most; more, and what lies between is opened, too.
const RUNS_MAX: u64 = 4096;
const ENOMEM: Errno = Errno(12);
const EIO: Errno = Errno(5);

/// The kernel's protection of `pages`. An error is the caller's to deal with.
fn protect(pages: PageRange, protection: usize) -> Result<(), Errno> {
    // SAFETY: whoever runs into it is served by us, or meant to run into it by the program.
    unsafe { memory::allow(pages, protection) }
}

/// Opens as many of `pages` as can be, from the start: up to where the kernel has no mapping to spare, or where there is
/// none. Returns how many.
fn open_from_start(pages: PageRange, protection: usize) -> u64 {
    if protect(pages, protection).is_ok() {
        return pages.count();
    }
    // Part of it may be open now, and written to already. A page alone is or isn't.
    let opens = |page: &u64| protect(PageRange::of(PageIndex(*page), 1), protection).is_ok();
    (pages.start.0..pages.end.0).take_while(opens).count() as u64
}

/// Drops what is behind `pages`. False if something there is locked.
///
/// # Safety
/// The bytes are needed no more.
unsafe fn drop_memory(pages: PageRange) -> bool {
    // SAFETY: the caller's promise.
    unsafe { memory::advise(pages, MADV_DONTNEED) }.is_ok()
}

/// Whether this kernel keeps pages that somebody has pinned while they are copied out here: see `take.rs`.
pub fn keeps_pinned_pages() -> Result<bool, Errno> {
    Ok(Careful::new(&Pagemap::open()?)?.is_some())
}

/// Pages taken and installed by what may be done with them.
pub struct ByProtection {
    memory: OwnMemory,
    pagemap: Pagemap,
    book: Book,
    /// None where the kernel drops pages although somebody refers to them, or copies them after their protection was changed:
    /// then a pinned page's last writes can be lost.
    careful: Option<Careful>,
    /// Whether /proc/self/mem passes over protections.
    is_forcible: bool,
    /// Mappings that this process may have.
    mappings_max: u64,
    /// Those that it has without our borders, when last counted. Threads that open neighbours at once miscount borders a
    /// little, which this sets right.
    others: AtomicI64,
}

impl ByProtection {
    /// With nothing registered yet.
    pub fn new() -> Result<ByProtection, Errno> {
        let pagemap = Pagemap::open()?;
        let (memory, careful) = (OwnMemory::open()?, Careful::new(&pagemap)?);
        let is_forcible = is_forcible(&memory)?;
        if careful.is_none() && !is_forcible {
            return Err(EIO);
        }
        let pages = ByProtection {
            memory,
            careful,
            is_forcible,
            pagemap,
            book: Book::new()?,
            mappings_max: proc::mappings_max(),
            others: AtomicI64::new(0),
        };
        pages.count_mappings();
        Ok(pages)
    }

    /// As on a kernel that lets nobody pass over protections (proc_mem.force_override). None where pages can't be filled aside.
    pub fn without_force() -> Result<Option<ByProtection>, Errno> {
        let pages = ByProtection { is_forcible: false, ..ByProtection::new()? };
        Ok(pages.careful.is_some().then_some(pages))
    }

    /// Closes `pages`, which are open, or doesn't change anything.
    fn close(&self, pages: PageRange) -> bool {
        self.close_to(pages, PROT_NONE as usize)
    }

    /// Closes `pages`, which are open, to all accesses but those that `protection` allows; or doesn't change anything.
    fn close_to(&self, pages: PageRange, protection: usize) -> bool {
        self.book.set_open(pages, false);
        let is_closed = protect(pages, protection).is_ok();
        if !is_closed {
            self.reopen(pages);
        }
        is_closed
    }

    /// Opens `pages` after they were closed, wholly or in part. Where the kernel has no mapping to spare a page stays closed, and is
    /// opened for a thread that touches it again and again.
    fn reopen(&self, pages: PageRange) {
        self.book.set_open(pages, true);
        let _ = self.part(pages);
    }

    /// Lets the program at `pages` again, as far as it allows itself. Returns how many, from the start, are open now.
    fn open(&self, pages: PageRange) -> u64 {
        let mut from = pages.start;
        while let Some((run, bits)) = self.book.next_run(from, pages.end, |_| true) {
            let count = open_from_start(run, allowed(bits));
            if count > 0 {
                self.book.set_open(PageRange::of(run.start, count), true);
            }
            from = run.start.plus(count);
            if from < run.end {
                break;
            }
        }
        from.0 - pages.start.0
    }

    /// As many of `pages`, from the start, as are closed and not unmapped: who touched a page may be served after another
    /// thread has unmapped it.
    fn closed(&self, pages: PageRange) -> Result<PageRange, InstallError> {
        let is_closed = |page: &u64| {
            let bits = self.book.get(PageIndex(*page));
            is_known(bits) && !is_open(bits)
        };
        let count = (pages.start.0..pages.end.0).take_while(is_closed).count() as u64;
        match (count, self.book.is_open(pages.start)) {
            (0, true) => Err(InstallError::Present),
            (0, false) => Err(InstallError::Unmapped),
            _ => Ok(PageRange::of(pages.start, count)),
        }
    }

    /// Puts bytes into closed pages and opens them. Returns how many, from the start.
    ///
    /// # Safety
    /// As for `Pages::install_run`.
    unsafe fn fill(&self, pages: PageRange, from: *const PageBytes) -> Result<u64, InstallError> {
        let filled = match &self.careful {
            // SAFETY: the caller's promise.
            Some(careful) if !self.is_forcible => unsafe { self.fill_aside(careful, pages, from) }?,
            _ => {
                // SAFETY: the caller's promise.
                unsafe { self.memory.write(pages, from.cast()) }.map_err(install_error)?;
                pages.count()
            }
        };
        let pages = PageRange::of(pages.start, filled);
        let count = self.open(pages);
        let rest = PageRange::new(pages.start.plus(count), pages.end);
        if !rest.is_empty() {
            // SAFETY: what was written just now, and nobody has seen; the caller keeps where it came from.
            unsafe { drop_memory(rest) };
        }
        if count == 0 { Err(InstallError::NoMemory) } else { Ok(count) }
    }

    /// Drops a closed page if it holds nothing but zeros: it reads as zeros, and will.
    fn drop_if_zero(&self, page: PageRange) {
        if let Some(careful) = self.careful.as_ref().filter(|_| !self.is_forcible) {
            return careful.drop_zero_aside(page);
        }
        let mut bytes = PageBytes::ZERO;
        // SAFETY: a page of our own.
        let read = unsafe { self.memory.read(page, (&raw mut bytes).cast()) };
        if read.is_ok() && bytes.0 == PageBytes::ZERO.0 {
            // SAFETY: nobody can write there.
            unsafe { drop_memory(page) };
        }
    }

    /// What was only read of `pages`, which were just closed, is one page of zeros, and takes memory once it is written:
    /// without our hearing of it, if it were opened. `first` was written by us, and not by the program.
    fn drop_zeros(&self, pages: PageRange, first: Option<PageRange>) {
        first.into_iter().for_each(|first| self.drop_if_zero(first));
        // Before Linux 6.7 it stays, and only blurs how much there is.
        let _ = self.pagemap.for_each_zero_run(pages, |zeros| {
            // SAFETY: they read as zeros, and will: nobody can write there.
            unsafe { drop_memory(zeros) };
        });
    }

    /// Opens what is there of `pages`, which were just closed; if that is in very many pieces, what lies between, too.
    fn open_present(&self, pages: PageRange) -> Result<(), Errno> {
        let mut gap = 1;
        loop {
            let mut runs = 0;
            self.for_each_run_present(pages, gap, |_| runs += 1)?;
            if runs <= RUNS_MAX {
                break;
            }
            gap *= 4;
        }
        let mut all = true;
        self.for_each_run_present(pages, gap, |run| all = all && self.open(run) == run.count())?;
        if all { Ok(()) } else { Err(ENOMEM) }
    }

    /// Runs of pages that are there, with fewer than `gap` others between two of one run.
    fn for_each_run_present(
        &self,
        pages: PageRange,
        gap: u64,
        mut visit: impl FnMut(PageRange),
    ) -> Result<(), Errno> {
        let mut run = PageRange::of(pages.start, 0);
        self.pagemap.for_each_present(pages, |page| {
            if run.is_empty() {
                run = PageRange::of(page, 1);
            } else if page.0 < run.end.0 + gap {
                run = PageRange::new(run.start, page.plus(1));
            } else {
                visit(run);
                run = PageRange::of(page, 1);
            }
        })?;
        if !run.is_empty() {
            visit(run);
        }
        Ok(())
    }
}

const fn install_error(error: Errno) -> InstallError {
    if error.0 == ENOMEM.0 { InstallError::NoMemory } else { InstallError::Unmapped }
}

impl Pages for &ByProtection {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        // A mapping that nobody has written to gives its charge back when it is closed, and its parts get it again one by
        // one: then they never become one mapping again. So one page is written first.
        let first = PageRange::of(pages.start, 1);
        // Whoever has pinned a page of the program's own may write to it yet.
        let is_own = self.look(first).own != 0;
        // SAFETY: it changes no byte.
        let _ = unsafe { memory::advise(first, MADV_POPULATE_WRITE) };
        let closed = protect(pages, PROT_NONE as usize).and_then(|()| {
            self.drop_zeros(pages, (!is_own).then_some(first));
            self.open_present(pages)
        });
        closed.inspect_err(|_| self.unregister(pages))
    }

    unsafe fn take(&self, pages: &mut [Outgoing]) {
        for_each_run(pages, |run| self.take_neighbours(run));
    }

    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
        // SAFETY: passed on.
        unsafe { self.fill(self.closed(PageRange::of(page, 1))?, frame) }?;
        Ok(Backing::Memory)
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: passed on.
        unsafe { self.fill(self.closed(pages)?, source) }
    }

    fn zero(&self, pages: PageRange, _: Access) -> Result<u64, InstallError> {
        match self.open(self.closed(pages)?) {
            0 => Err(InstallError::NoMemory),
            count => Ok(count),
        }
    }

    fn protect(&self, _: PageRange) -> bool {
        false
    }

    fn unprotect(&self, pages: PageRange) -> bool {
        // Nothing is, but the kernel may have had no mapping to spare when it should have been opened.
        let is_known = |page| is_known(self.book.get(PageIndex(page)));
        (pages.start.0..pages.end.0).all(is_known) && self.open(pages) == pages.count()
    }

    fn poison(&self, _: PageIndex) -> Result<(), InstallError> {
        // It stays closed, and whoever touches it is told.
        Ok(())
    }

    fn wake(&self, _: PageIndex) {}

    fn unshare(&self, _: PageRange) {}

    unsafe fn give_memory(&self, _: *mut PageBytes) -> Result<(), InstallError> {
        Ok(())
    }

    unsafe fn drop_memory(&self, _: &[Stretch]) -> Result<(), Errno> {
        Ok(())
    }
}

/// What the kernel does by itself where it knows which pages are missing. Under the exclusive map lock, if nothing else is
/// said.
impl ByProtection {
    /// Calls `visit` for each page of `pages` that the program can touch without our hearing of it.
    pub fn for_each_open(&self, pages: PageRange, mut visit: impl FnMut(PageIndex)) {
        self.book.for_each_run(pages, is_open, |run, _| {
            (run.start.0..run.end.0).for_each(|page| visit(PageIndex(page)))
        });
    }

    /// Whether the program allows itself this access. Without the map lock.
    pub fn allows(&self, page: PageIndex, write: bool) -> bool {
        const WRITE: usize = 2;
        // What can be written can be read, and what can be executed is fetched, which looks like reading. If it is not
        // allowed the kernel says so again once the page is open.
        allowed(self.book.get(page)) & if write { WRITE } else { usize::MAX } != 0
    }

    /// Whether `page` is open. Without the map lock.
    pub fn is_open(&self, page: PageIndex) -> bool {
        self.book.is_open(page)
    }

    /// What `pages` hold was discarded: whoever touches them is to wait for us.
    pub fn withdraw(&self, pages: PageRange) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, _| {
            if result.is_ok() && !self.close(run) {
                result = Err(ENOMEM);
            }
        });
        result
    }

    /// `pages` are registered now as well, and stay open: a system call is using them.
    pub fn register_open(&self, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        self.book.set_open(pages, true);
        Ok(())
    }

    /// In a fork's child, where `parent`'s pages are a copy: `pages` are registered now, and open where they are with that. A
    /// child that opened what it found there, and closed what is out, needed more mappings than there are: beside pages that
    /// are out lie some that were never touched, which its parent has closed.
    pub fn register_like(&self, parent: &ByProtection, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        protect(pages, PROT_NONE as usize)?;
        parent.book.for_each_run(pages, is_open, |run, _| {
            // Where there is no mapping to spare it is opened for who touches it: it has its bytes.
            self.open(run);
        });
        Ok(())
    }

    /// All of `pages` is somewhere else now, and the mapping is still there.
    pub fn vacate(&self, pages: PageRange) {
        self.book.for_each_run(pages, is_open, |run, _| self.book.set_open(run, false));
    }

    /// `pages` were unmapped.
    pub fn forget(&self, pages: PageRange) {
        self.book.forget(pages);
    }

    /// The program changes what it allows for `pages`, all of them registered. What is closed stays so.
    pub fn allow(&self, pages: PageRange, protection: usize) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, _| {
            if result.is_ok() {
                result = protect(run, protection);
            }
        });
        result.inspect(|()| self.book.set_allowed(pages, protection as u64))
    }

    /// Closes all of `pages` for the kernel, which has one mapping there then. What is open stays so in our books.
    pub fn join(&self, pages: PageRange) {
        let _ = protect(pages, PROT_NONE as usize);
    }

    /// Undoes `join`.
    pub fn part(&self, pages: PageRange) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, bits| {
            if result.is_ok() {
                result = protect(run, allowed(bits));
            }
        });
        result
    }

    /// In a fork's child, which doesn't know what is out: everything may be touched, as the program allows it.
    pub fn part_in_child(&self, pages: PageRange) -> Result<(), Errno> {
        self.for_each_allowed(pages, protect)
    }

    /// In a fork's child, where `parent`'s pages are a copy: it allows itself what that does.
    pub fn allow_like(&self, parent: &ByProtection, pages: PageRange) -> Result<(), Errno> {
        parent.for_each_allowed(pages, |run, protection| match protection as u64 {
            READ_WRITE => Ok(()),
            _ => self.allow(run, protection),
        })
    }

    /// Calls `visit` for each run of pages for which the program allows the same, and says what. Until it fails.
    fn for_each_allowed(
        &self,
        pages: PageRange,
        mut visit: impl FnMut(PageRange, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut from = pages.start;
        while from < pages.end {
            let protection = allowed(self.book.get(from));
            let is_alike = |page: &u64| allowed(self.book.get(PageIndex(*page))) == protection;
            let count = (from.0..pages.end.0).take_while(is_alike).count() as u64;
            visit(PageRange::of(from, count), protection)?;
            from = from.plus(count);
        }
        Ok(())
    }

    /// `pages`, which could not all be registered, are the program's own again.
    pub fn unregister(&self, pages: PageRange) {
        // Only what may be read and written is registered.
        let _ = protect(pages, READ_WRITE as usize);
        self.book.forget(pages);
    }

    /// `pages` are the program's own for good, as far as it allows itself: all that isn't zeros is there. The book stays: a thread
    /// whose fault is on its way looks up there that the fault isn't the program's.
    pub fn let_go(&self, pages: PageRange) {
        let _ = self.for_each_allowed(pages, |run, protection| {
            // Where part of a run isn't mapped any more the rest is opened page by page.
            let mut from = run.start;
            while from < run.end {
                let opened = open_from_start(PageRange::new(from, run.end), protection);
                from = from.plus(opened.max(1));
            }
            Ok(())
        });
    }

    /// A joined mapping is at `to` now: the first `count` pages are those from `from` on.
    pub fn moved(&self, from: PageIndex, count: u64, to: PageRange) -> Result<(), Errno> {
        self.grown(to, from.plus(count - 1))?;
        let mut result = Ok(());
        self.book.for_each_run(
            PageRange::of(from, count),
            |_| true,
            |run, bits| {
                let run = PageRange::of(to.start.plus(run.start.0 - from.0), run.count());
                self.book.set(run, bits & !OPEN);
                if is_open(bits) && self.open(run) < run.count() {
                    result = Err(ENOMEM);
                }
            },
        );
        result
    }

    /// Where `from` can't be moved as one mapping, what is open of it is copied to `to`, new memory that may be written. It
    /// can't be written any more then, until `part`. In a thread of the program, which has none of our descriptors.
    pub fn copy(&self, from: PageRange, to: PageIndex) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(from, is_open, |run, _| {
            if result.is_err() {
                return;
            }
            result = protect(run, PROT_READ as usize);
            if result.is_ok() {
                let target = to.plus(run.start.0 - from.start.0).address() as *mut u8;
                // SAFETY: readable since just now, and nobody writes it; the target is a mapping that nobody else has yet.
                unsafe {
                    core::ptr::copy_nonoverlapping(run.start.address() as *const u8, target, run.bytes())
                };
            }
        });
        result
    }

    /// A mapping has grown by `pages`, and the program allows itself there what it does at `like`.
    pub fn grown(&self, pages: PageRange, like: PageIndex) -> Result<(), Errno> {
        let bits = self.book.get(like);
        self.book.register(pages)?;
        self.book.set_allowed(pages, allowed(bits) as u64);
        Ok(())
    }

    /// Looks at how many mappings there are that aren't of our making. Without the map lock.
    pub fn count_mappings(&self) {
        if let Ok(count) = proc::count_mappings() {
            let borders = self.book.borders.load(Ordering::Relaxed);
            self.others.store(count as i64 - borders, Ordering::Relaxed);
        }
    }

    /// How many mappings there are, in eighths of what there may be; 8 if all of them. Without the map lock.
    pub fn crowd(&self) -> u64 {
        let all = self.book.borders.load(Ordering::Relaxed) + self.others.load(Ordering::Relaxed);
        all.max(0) as u64 * 8 / self.mappings_max.max(1)
    }
}
