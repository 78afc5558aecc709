//! `segv` mode works without a userfaultfd. Evicted pages are *closed* (PROT_NONE), and a touch of one raises
//! SIGSEGV. The mode needs no privilege and no system call that containers refuse. Farpage does here what the
//! kernel does for the other modes:
//!
//! * `book.rs` knows which pages are *open*, and which protection the program has set. The kernel has one
//!   protection for both.
//! * Pages that were never touched are closed, too. Without that the program would grow unnoticed.
//! * A page is filled while it is closed, through /proc/self/mem or in another mapping (`aside.rs`), and
//!   opened afterwards.
//! * An eviction closes a page before it drops the page (`take.rs`).
//! * Each border between open and closed pages costs a mapping, of which the kernel allows some 65,000. Near
//!   that limit memory counts as full.
// UNSAFETY: these calls take pages of the program away, with their callers' promises.

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
use linux_raw_sys::general::{MADV_DONTNEED, MADV_POPULATE_WRITE, PROT_NONE};

/// Runs that are opened one by one when a range is registered, at most. If there are more, runs are opened
/// with the gaps between them.
const RUNS_MAX: u64 = 4096;

/// Sets the kernel's protection of `pages`. The caller deals with an error.
fn protect(pages: PageRange, protection: usize) -> Result<(), Errno> {
    // SAFETY: a thread that the protection stops is served here, or the program meant to stop it.
    unsafe { memory::allow(pages, protection) }
}

/// Opens `pages` from the start, up to the first page that isn't mapped or for which the kernel has no
/// mapping to spare. Returns the number of open pages.
fn open_from_start(pages: PageRange, protection: usize) -> u64 {
    if protect(pages, protection).is_ok() {
        return pages.count();
    }
    // A failed call may have opened some of the pages, and the program may have written to them. A call for
    // one page does all or nothing.
    let opens = |page: &u64| protect(PageRange::of(PageIndex(*page), 1), protection).is_ok();
    (pages.start.0..pages.end.0).take_while(opens).count() as u64
}

/// Drops the memory of `pages`. Returns false if a page is locked (mlock).
///
/// # Safety
/// No code needs the bytes any more.
unsafe fn drop_memory(pages: PageRange) -> bool {
    // SAFETY: no code needs the bytes, by the caller's promise.
    unsafe { memory::advise(pages, MADV_DONTNEED) }.is_ok()
}

/// Returns whether this kernel keeps a pinned page that an eviction copies (see `take.rs`).
pub fn keeps_pinned_pages() -> Result<bool, Errno> {
    Ok(Careful::new(&Pagemap::open()?)?.is_some())
}

/// The back end that takes and installs pages by changing their protection.
pub struct ByProtection {
    memory: OwnMemory,
    pagemap: Pagemap,
    book: Book,
    /// None where the kernel drops a page that has references, or replaces it by a copy after its protection
    /// was changed. There a pinned page's last writes can be lost.
    careful: Option<Careful>,
    /// Whether a write through /proc/self/mem reaches a closed page.
    is_forcible: bool,
    /// Mappings that the kernel allows this process (vm.max_map_count).
    mappings_max: u64,
    /// Mappings at the last count, less the borders. Threads that open neighbours at once miscount borders a
    /// little, and the next count corrects that.
    others: AtomicI64,
}

impl ByProtection {
    /// Makes the back end, with no page registered yet.
    pub fn new() -> Result<ByProtection, Errno> {
        let pagemap = Pagemap::open()?;
        let (memory, careful) = (OwnMemory::open()?, Careful::new(&pagemap)?);
        let is_forcible = is_forcible(&memory)?;
        if careful.is_none() && !is_forcible {
            return Err(Errno::EIO);
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

    /// Makes a back end that behaves as on a kernel where /proc/self/mem obeys protections
    /// (proc_mem.force_override). None where pages can't be filled aside.
    pub fn without_force() -> Result<Option<ByProtection>, Errno> {
        let pages = ByProtection { is_forcible: false, ..ByProtection::new()? };
        Ok(pages.careful.is_some().then_some(pages))
    }

    /// Closes `pages`, which are open. After a failure the pages are opened again ([`ByProtection::reopen`]),
    /// and false is returned.
    fn close(&self, pages: PageRange) -> bool {
        self.close_to(pages, PROT_NONE as usize)
    }

    /// Closes `pages`, which are open, to all accesses but those that `protection` allows. A failure is
    /// handled as in [`ByProtection::close`].
    fn close_to(&self, pages: PageRange, protection: usize) -> bool {
        self.book.set_open(pages, false);
        let is_closed = protect(pages, protection).is_ok();
        if !is_closed {
            self.reopen(pages);
        }
        is_closed
    }

    /// Opens `pages` again, all or some of which were closed. A page for which the kernel has no mapping to
    /// spare stays closed, although the book says that it is open. A thread that touches the page faults, and
    /// has it opened after some faults. If that fails, too, the program gets the signal.
    fn reopen(&self, pages: PageRange) {
        self.book.set_open(pages, true);
        let _ = self.part(pages);
    }

    /// Gives `pages` the protection that the program has set. Returns how many pages, from the start, are
    /// open now.
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

    /// Returns those of `pages`, from the start, that are closed and registered. Another thread may have
    /// unmapped a page between a fault and its service.
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

    /// Puts bytes into closed pages and opens them. Returns how many pages, from the start, are filled and
    /// open.
    ///
    /// # Safety
    /// As for `Pages::install_run`.
    unsafe fn fill(&self, pages: PageRange, from: *const PageBytes) -> Result<u64, InstallError> {
        let filled = match &self.careful {
            // SAFETY: pages and source are the caller's promise.
            Some(careful) if !self.is_forcible => unsafe { self.fill_aside(careful, pages, from) }?,
            _ => {
                // SAFETY: pages and source are the caller's promise.
                unsafe { self.memory.write(pages, from.cast()) }.map_err(install_error)?;
                pages.count()
            }
        };
        let pages = PageRange::of(pages.start, filled);
        let count = self.open(pages);
        let rest = PageRange::new(pages.start.plus(count), pages.end);
        if !rest.is_empty() {
            // SAFETY: the pages were filled just now and never opened. The caller keeps the source.
            unsafe { drop_memory(rest) };
        }
        if count == 0 { Err(InstallError::NoMemory) } else { Ok(count) }
    }

    /// Drops a closed page that holds only zeros. A dropped page reads as zeros.
    fn drop_if_zero(&self, page: PageRange) {
        if let Some(careful) = self.careful.as_ref().filter(|_| !self.is_forcible) {
            return careful.drop_zero_aside(page);
        }
        let mut bytes = PageBytes::ZERO;
        // SAFETY: `bytes` is one page.
        let read = unsafe { self.memory.read(page, (&raw mut bytes).cast()) };
        if read.is_ok() && bytes.0 == PageBytes::ZERO.0 {
            // SAFETY: the page is closed, so it still holds zeros. A dropped page reads as zeros.
            unsafe { drop_memory(page) };
        }
    }

    /// Drops those of `pages`, which were just closed, that the program has only read. Each of them is the
    /// kernel's page of zeros. If it were opened, the program's first write would take memory without a fault
    /// that Farpage sees. `first` is a page that Farpage wrote.
    fn drop_zeros(&self, pages: PageRange, first: Option<PageRange>) {
        first.into_iter().for_each(|first| self.drop_if_zero(first));
        // Linux before 6.7 can't name these pages. They then stay, and only blur the measure of memory in
        // use.
        let _ = self.pagemap.for_each_zero_run(pages, |zeros| {
            // SAFETY: the pages are closed and read as zeros. Dropped pages do, too.
            unsafe { drop_memory(zeros) };
        });
    }

    /// Opens the present ones of `pages`, which were just closed. If they are in more than `RUNS_MAX` pieces,
    /// gaps are opened, too.
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
        if all { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// Calls `visit` for each run of present pages. Present pages with a gap of fewer than `gap` pages
    /// between them are in one run.
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
    if matches!(error, Errno::ENOMEM) { InstallError::NoMemory } else { InstallError::Unmapped }
}

impl Pages for &ByProtection {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        // When a never-written mapping is closed, the kernel takes the memory charge off the mapping. Parts
        // that are opened get the charge again, each by itself, and then never merge into one mapping.
        // Therefore one page is written first.
        let first = PageRange::of(pages.start, 1);
        // A page that the program had before may be pinned, and a device may still write to it. That page
        // isn't dropped.
        let is_own = self.look(first).own != 0;
        // SAFETY: the call changes no byte.
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
        // SAFETY: page and frame are the caller's promise. The page is closed.
        unsafe { self.fill(self.closed(PageRange::of(page, 1))?, frame) }?;
        Ok(Backing::Memory)
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: pages and source are the caller's promise. The pages are closed.
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
        // No page is write-protected in this mode. A page may still be closed because the kernel had no
        // mapping to spare.
        let is_known = |page| is_known(self.book.get(PageIndex(page)));
        (pages.start.0..pages.end.0).all(is_known) && self.open(pages) == pages.count()
    }

    fn poison(&self, _: PageIndex) -> Result<(), InstallError> {
        // The page stays closed, and a thread that touches it gets SIGBUS.
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

/// Work that the kernel does by itself in the other modes, where it knows which pages are missing. The caller
/// has the exclusive map lock unless a method says otherwise.
impl ByProtection {
    /// Calls `visit` for each page of `pages` that the program can touch without a fault.
    pub fn for_each_open(&self, pages: PageRange, mut visit: impl FnMut(PageIndex)) {
        self.book.for_each_run(pages, is_open, |run, _| {
            (run.start.0..run.end.0).for_each(|page| visit(PageIndex(page)))
        });
    }

    /// Returns whether the program's protection allows this access. Needs no map lock.
    pub fn allows(&self, page: PageIndex, write: bool) -> bool {
        const WRITE: usize = 2;
        // Any permission counts as one to read, because a writable page can be read, and an instruction fetch
        // looks like a read. A forbidden access faults again once the page is open.
        allowed(self.book.get(page)) & if write { WRITE } else { usize::MAX } != 0
    }

    /// Returns whether `page` is open. Needs no map lock.
    pub fn is_open(&self, page: PageIndex) -> bool {
        self.book.is_open(page)
    }

    /// Closes `pages`, whose contents were discarded, so that the next touch faults.
    pub fn withdraw(&self, pages: PageRange) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, _| {
            if result.is_ok() && !self.close(run) {
                result = Err(Errno::ENOMEM);
            }
        });
        result
    }

    /// Registers `pages`, which stay open because a system call uses them.
    pub fn register_open(&self, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        self.book.set_open(pages, true);
        Ok(())
    }

    /// Registers `pages` in a fork's child, whose pages are a copy of `parent`'s, and opens the pages that
    /// are open in the parent. A child that closed only evicted pages could need more mappings than the
    /// kernel allows. Pages that were never touched, which the parent has closed, lie between evicted ones.
    pub fn register_like(&self, parent: &ByProtection, pages: PageRange) -> Result<(), Errno> {
        self.book.register(pages)?;
        protect(pages, PROT_NONE as usize)?;
        parent.book.for_each_run(pages, is_open, |run, _| {
            // A page for which there is no mapping to spare is opened at its next fault, because its bytes
            // are there.
            self.open(run);
        });
        Ok(())
    }

    /// Notes that the memory of `pages` was moved elsewhere while their mapping stays.
    pub fn vacate(&self, pages: PageRange) {
        self.book.for_each_run(pages, is_open, |run, _| self.book.set_open(run, false));
    }

    /// Notes that `pages` were unmapped.
    pub fn forget(&self, pages: PageRange) {
        self.book.forget(pages);
    }

    /// Sets the program's protection of `pages`, all of them registered. Closed pages stay closed.
    pub fn allow(&self, pages: PageRange, protection: usize) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, _| {
            if result.is_ok() {
                result = protect(run, protection);
            }
        });
        result.inspect(|()| self.book.set_allowed(pages, protection as u64))
    }

    /// Closes all of `pages`, so that the kernel has one mapping there. The book still says which of them are
    /// open.
    pub fn join(&self, pages: PageRange) {
        let _ = protect(pages, PROT_NONE as usize);
    }

    /// Undoes `join`: gives the open pages their protection again.
    pub fn part(&self, pages: PageRange) -> Result<(), Errno> {
        let mut result = Ok(());
        self.book.for_each_run(pages, is_open, |run, bits| {
            if result.is_ok() {
                result = protect(run, allowed(bits));
            }
        });
        result
    }

    /// Opens all of `pages`, as the program allows them, in a fork's child that doesn't know which pages are
    /// evicted.
    pub fn part_in_child(&self, pages: PageRange) -> Result<(), Errno> {
        self.for_each_allowed(pages, protect)
    }

    /// Takes over the protections that the program has set, in a fork's child whose pages are a copy of
    /// `parent`'s.
    pub fn allow_like(&self, parent: &ByProtection, pages: PageRange) -> Result<(), Errno> {
        parent.for_each_allowed(pages, |run, protection| match protection as u64 {
            READ_WRITE => Ok(()),
            _ => self.allow(run, protection),
        })
    }

    /// Calls `visit` with each run of pages that the program has given one protection, and with that
    /// protection. Ends at the first error.
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

    /// Gives `pages` back to the program when not all of them could be registered.
    pub fn unregister(&self, pages: PageRange) {
        // Only memory that may be read and written is registered.
        let _ = protect(pages, READ_WRITE as usize);
        self.book.forget(pages);
    }

    /// Gives `pages` to the program for good, with the program's protection. Each page that isn't all zeros
    /// must be present. The book stays, so that a thread whose fault is in flight learns that the fault isn't
    /// the program's.
    pub fn let_go(&self, pages: PageRange) {
        let _ = self.for_each_allowed(pages, |run, protection| {
            // A page that isn't mapped any more is skipped.
            let mut from = run.start;
            while from < run.end {
                let opened = open_from_start(PageRange::new(from, run.end), protection);
                from = from.plus(opened.max(1));
            }
            Ok(())
        });
    }

    /// Notes that a joined mapping was moved to `to`. The first `count` pages there are those that began at
    /// `from`.
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
                    result = Err(Errno::ENOMEM);
                }
            },
        );
        result
    }

    /// Notes that a mapping has grown by `pages`, which have the program's protection of `like`.
    pub fn grown(&self, pages: PageRange, like: PageIndex) -> Result<(), Errno> {
        let bits = self.book.get(like);
        self.book.register(pages)?;
        self.book.set_allowed(pages, allowed(bits) as u64);
        Ok(())
    }

    /// Counts the mappings that Farpage's borders have not made. Needs no map lock.
    pub fn count_mappings(&self) {
        if let Ok(count) = proc::count_mappings() {
            let borders = self.book.borders.load(Ordering::Relaxed);
            self.others.store(count as i64 - borders, Ordering::Relaxed);
        }
    }

    /// Returns the mappings in use, in eighths of those that the kernel allows. Needs no map lock.
    pub fn crowd(&self) -> u64 {
        let all = self.book.borders.load(Ordering::Relaxed) + self.others.load(Ordering::Relaxed);
        all.max(0) as u64 * 8 / self.mappings_max.max(1)
    }
}
