//! `signal` mode: faults as SIGBUS, in the thread that touched the page.
//!
//! This mode needs no privilege. The kernel doesn't put the thread to sleep, but calls a handler of the
//! engine. The handler serves the fault itself if it can (`runtime/src/guard/direct.rs`). Otherwise it *hands
//! the fault over* to an engine thread and sleeps until that thread has dealt with the page. Then the handler
//! returns, and the access is tried again.
//!
//! The thread that installs a page wakes the threads that sleep for the page, before it settles the page. A
//! userfaultfd wakes only threads that it has put to sleep itself. [`Woken`] wakes the threads of this mode,
//! for every way of getting pages in.
// UNSAFETY: the file passes on calls that change the program's memory, with its callers' promises.

use crate::thread::FAULTS_MAX;
use crate::{Fault, InstallError, Outgoing, Pages};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use farpage_core::cache::Backing;
use farpage_core::pager::Access;
use farpage_core::sync::{Lock, rank};
use farpage_core::units::{PageBytes, PageIndex, PageRange};
use farpage_os::futex;
use farpage_os::memory::Stretch;
use farpage_os::signal::{Context, Info};
use farpage_os::sys::Errno;

/// Faults that can wait to be taken up. A further thread waits for a free place.
const WAITING_MAX: usize = 128;
/// Buckets of sleeping threads. Threads that sleep for different pages of one bucket are woken together.
const BUCKETS: usize = 64;

/// Returns the fault that a SIGBUS is about, if a page is missing or protected there. The caller must know
/// whether the page is one of Farpage's, and whether it was poisoned. Kernels without handling of memory
/// failures report a poisoned page in the same way.
pub const fn fault_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.missing_at() else { return None };
    let access = match (context.was_protection(), context.was_write()) {
        (true, _) => Access::WriteProtected,
        (false, true) => Access::Write,
        (false, false) => Access::Read,
    };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// Returns the fault that a SIGSEGV is about, if there is a mapping that doesn't allow the access. The caller
/// must know whether the page is one of Farpage's.
pub const fn forbidden_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.forbidden_at() else { return None };
    let access = if context.was_write() { Access::Write } else { Access::Read };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// Returns the fault that a SIGSEGV is about, if there is no mapping. The caller must know whether the page
/// is one of Farpage's.
pub const fn unmapped_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.unmapped_at() else { return None };
    let access = if context.was_write() { Access::Write } else { Access::Read };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// The result of a faulting thread's try to serve its fault itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inline {
    /// The fault was served.
    Served,
    /// Another thread deals with the page, and then wakes the threads that sleep for it.
    Joined,
    /// The fault needs an engine thread.
    Elsewhere,
}

/// Faults that no engine thread has taken up yet, in a ring.
struct Waiting {
    faults: [Fault; WAITING_MAX],
    first: usize,
    count: usize,
}

/// Threads that sleep for the pages of one bucket.
#[repr(align(64))]
struct Bucket {
    /// Changes when a page of the bucket is settled.
    turn: AtomicU32,
    sleepers: AtomicU32,
}

/// The queue between threads of the program and engine threads.
pub struct Handover {
    waiting: Lock<Waiting, { rank::LAST }>,
    /// Changes with each fault that is handed over.
    bell: AtomicU32,
    /// Count of engine threads that sleep until `bell` changes.
    idle: AtomicU32,
    /// Changes when faults were taken out of the full ring.
    freed: AtomicU32,
    buckets: [Bucket; BUCKETS],
    /// Whether no thread takes faults up any more.
    is_closed: AtomicBool,
}

impl Default for Handover {
    fn default() -> Self {
        Handover::new()
    }
}

impl Handover {
    /// Makes an empty queue.
    pub fn new() -> Handover {
        let nothing = Fault { page: PageIndex(0), access: Access::Read };
        Handover {
            waiting: Lock::new(Waiting { faults: [nothing; WAITING_MAX], first: 0, count: 0 }),
            bell: AtomicU32::new(0),
            idle: AtomicU32::new(0),
            freed: AtomicU32::new(0),
            buckets: [const { Bucket { turn: AtomicU32::new(0), sleepers: AtomicU32::new(0) } }; BUCKETS],
            is_closed: AtomicBool::new(false),
        }
    }

    const fn bucket(&self, page: PageIndex) -> &Bucket {
        &self.buckets[page.0 as usize % BUCKETS]
    }

    /// Serves a fault by `inline`, or hands the fault over and sleeps until the page is settled. Called in a
    /// thread of the program, with signals blocked. When the call returns, the page may be there, or the
    /// access faults again.
    pub fn serve(&self, fault: Fault, mut inline: impl FnMut(Fault) -> Inline) {
        let first = inline(fault);
        if first == Inline::Served {
            return;
        }
        let bucket = self.bucket(fault.page);
        // This thread counts as a sleeper before any thread can take the fault up, so the thread that settles
        // the page sees the sleeper.
        // Ordering: SeqCst, so that the load in `wake` finds this addition. The waking thread has either
        // taken the fault out of the ring afterwards, or settled the page after this thread asked to be woken
        // (`Entry::ask_to_be_woken`).
        bucket.sleepers.fetch_add(1, Ordering::SeqCst);
        let turn = bucket.turn.load(Ordering::SeqCst);
        // The thread that deals with the page may have woken the sleepers before this thread was one. A
        // joined fault is therefore tried once more.
        let now = if first == Inline::Joined { inline(fault) } else { first };
        if now == Inline::Served {
            bucket.sleepers.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        if now == Inline::Elsewhere {
            self.hand_over(fault);
        }
        while bucket.turn.load(Ordering::SeqCst) == turn && !self.is_closed() {
            futex::wait(&bucket.turn, turn);
        }
        bucket.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    fn hand_over(&self, fault: Fault) {
        loop {
            let freed = self.freed.load(Ordering::SeqCst);
            {
                let mut waiting = self.waiting.lock();
                if waiting.count < WAITING_MAX {
                    let at = (waiting.first + waiting.count) % WAITING_MAX;
                    waiting.faults[at] = fault;
                    waiting.count += 1;
                    break;
                }
            }
            if self.is_closed() {
                return;
            }
            futex::wait(&self.freed, freed);
        }
        self.ring();
    }

    fn is_closed(&self) -> bool {
        // Ordering: SeqCst, see `close`.
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Ends the queue, when no page is missing any more. Threads that sleep for a page wake and try again,
    /// and none sleeps from now on.
    pub fn close(&self) {
        // Ordering: SeqCst. A thread that reads a turn after the change below finds this true. A thread that
        // read the old turn doesn't sleep on it.
        self.is_closed.store(true, Ordering::SeqCst);
        for bucket in &self.buckets {
            bucket.turn.fetch_add(1, Ordering::SeqCst);
            futex::wake(&bucket.turn, u32::MAX >> 1);
        }
        self.freed.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.freed, u32::MAX >> 1);
    }

    /// Makes every engine thread that waits for faults look for other work.
    pub fn ring_all(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.bell, u32::MAX >> 1);
    }

    /// Makes one engine thread look for work.
    pub fn ring(&self) {
        // Ordering: SeqCst here and in `wait`. Either this thread sees that another one sleeps, or the other
        // one sees that the bell has rung.
        self.bell.fetch_add(1, Ordering::SeqCst);
        if self.idle.load(Ordering::SeqCst) > 0 {
            futex::wake(&self.bell, 1);
        }
    }

    /// Waits for faults, for at most `ns` nanoseconds if given, and returns how many were put into `faults`.
    /// Called in an engine thread. Returns 0 if no fault came, if another thread was quicker, or if `is_else`
    /// says that the thread has other work.
    pub fn wait(
        &self,
        faults: &mut [Fault; FAULTS_MAX],
        ns: Option<u64>,
        is_else: impl FnOnce() -> bool,
    ) -> usize {
        let seen = self.bell.load(Ordering::SeqCst);
        let count = self.take(faults);
        if count == 0 && !is_else() {
            // Ordering: SeqCst, as in `ring`.
            self.idle.fetch_add(1, Ordering::SeqCst);
            match ns {
                Some(ns) => futex::wait_for(&self.bell, seen, ns),
                None => futex::wait(&self.bell, seen),
            }
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
        count
    }

    fn take(&self, faults: &mut [Fault; FAULTS_MAX]) -> usize {
        let mut waiting = self.waiting.lock();
        let was_full = waiting.count == WAITING_MAX;
        // The rest of the faults is left to idle threads, because each fault may need a read.
        let idle = self.idle.load(Ordering::Relaxed) as usize;
        let most = waiting.count.div_ceil(idle + 1).min(FAULTS_MAX);
        let mut count = 0;
        while count < most {
            faults[count] = waiting.faults[waiting.first];
            waiting.first = (waiting.first + 1) % WAITING_MAX;
            waiting.count -= 1;
            count += 1;
        }
        drop(waiting);
        if was_full {
            // Ordering: SeqCst. A thread that found no free place has read the number before, and doesn't
            // sleep on an old one.
            self.freed.fetch_add(1, Ordering::SeqCst);
            futex::wake(&self.freed, u32::MAX >> 1);
        }
        count
    }

    /// Wakes threads that sleep for one of `pages`, so that they try again.
    pub fn wake(&self, pages: PageRange) {
        for at in 0..pages.count().min(BUCKETS as u64) {
            let bucket = self.bucket(pages.start.plus(at));
            // Ordering: SeqCst, as in `serve`.
            if bucket.sleepers.load(Ordering::SeqCst) > 0 {
                bucket.turn.fetch_add(1, Ordering::SeqCst);
                futex::wake(&bucket.turn, u32::MAX >> 1);
            }
        }
    }
}

/// A way of getting pages in and out that also wakes the threads whose faults were handed over.
pub struct Woken<'a, P> {
    /// The wrapped way.
    pub pages: P,
    /// The queue in which threads sleep.
    pub handover: &'a Handover,
}

impl<P: Pages> Pages for Woken<'_, P> {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        unsafe { self.pages.register(pages) }
    }

    unsafe fn take(&self, pages: &mut [Outgoing]) {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        unsafe { self.pages.take(pages) }
    }

    unsafe fn take_inline(&self, pages: &mut [Outgoing]) -> bool {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        unsafe { self.pages.take_inline(pages) }
    }

    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        let left = unsafe { self.pages.install(page, frame) }?;
        self.handover.wake(PageRange::of(page, 1));
        Ok(left)
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        let count = unsafe { self.pages.install_run(pages, source) }?;
        self.handover.wake(PageRange::of(pages.start, count));
        Ok(count)
    }

    fn zero(&self, pages: PageRange, access: Access) -> Result<u64, InstallError> {
        let count = self.pages.zero(pages, access)?;
        self.handover.wake(PageRange::of(pages.start, count));
        Ok(count)
    }

    fn protect(&self, pages: PageRange) -> bool {
        self.pages.protect(pages)
    }

    fn unprotect(&self, pages: PageRange) -> bool {
        let lifted = self.pages.unprotect(pages);
        self.handover.wake(pages);
        lifted
    }

    fn poison(&self, page: PageIndex) -> Result<(), InstallError> {
        self.pages.poison(page)?;
        self.handover.wake(PageRange::of(page, 1));
        Ok(())
    }

    fn wake(&self, page: PageIndex) {
        self.handover.wake(PageRange::of(page, 1));
    }

    fn unshare(&self, pages: PageRange) {
        self.pages.unshare(pages);
    }

    unsafe fn give_memory(&self, frame: *mut PageBytes) -> Result<(), InstallError> {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        unsafe { self.pages.give_memory(frame) }
    }

    unsafe fn drop_memory(&self, frames: &[Stretch]) -> Result<(), Errno> {
        // SAFETY: the callee has the same contract, and our caller keeps it.
        unsafe { self.pages.drop_memory(frames) }
    }
}
