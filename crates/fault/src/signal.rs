//! `signal` mode: faults as SIGBUS, in the thread that touched the page.
//!
//! It needs no privilege. The kernel doesn't put the thread to sleep; it calls a handler of ours, which serves the
//! fault itself if it can (`runtime/src/guard/direct.rs`), else *hands it over* to an engine thread and sleeps until the page
//! was dealt with. Then the handler returns, and the access is tried again.
//!
//! Whoever deals with a page wakes those that sleep for it; userfaultfd does that by itself for threads that it has put
//! to sleep, but it knows nothing of ours. [`Woken`] does it for every way of getting pages in.
// UNSAFETY: it passes on what changes the program's memory, with its callers' promises.

use crate::thread::FAULTS_MAX;
use crate::{Fault, InstallError, Outgoing, Pages};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use farpage_core::cache::Backing;
use farpage_core::pager::Access;
use farpage_core::sync::Lock;
use farpage_core::units::{PageBytes, PageIndex, PageRange};
use farpage_os::futex;
use farpage_os::memory::Stretch;
use farpage_os::signal::{Context, Info};
use farpage_os::sys::Errno;

/// Faults that wait to be taken up; a thread more waits for room.
const WAITING_MAX: usize = 128;
/// Threads that sleep for different pages of the same bucket are woken together.
const BUCKETS: usize = 64;

/// What a SIGBUS is about, if a page is missing or protected there. Whether it is one of ours is the caller's to know, and
/// whether we have poisoned it: kernels without handling of memory failures report that in the same way.
pub const fn fault_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.missing_at() else { return None };
    let access = match (context.was_protection(), context.was_write()) {
        (true, _) => Access::WriteProtected,
        (false, true) => Access::Write,
        (false, false) => Access::Read,
    };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// What a SIGSEGV is about, if there is a mapping that doesn't allow the access. Likewise.
pub const fn forbidden_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.forbidden_at() else { return None };
    let access = if context.was_write() { Access::Write } else { Access::Read };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// What a SIGSEGV is about, if there is no mapping. Likewise.
pub const fn unmapped_of(info: &Info, context: &Context) -> Option<Fault> {
    let Some(address) = info.unmapped_at() else { return None };
    let access = if context.was_write() { Access::Write } else { Access::Read };
    Some(Fault { page: PageIndex::of_address(address), access })
}

/// What came of a fault that the thread which ran into it tried to serve itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// It was dealt with.
    Served,
    /// Somebody else is dealing with the page, and wakes who sleeps for it then.
    Joined,
    /// It takes an engine thread.
    Elsewhere,
}

struct Ring {
    faults: [Fault; WAITING_MAX],
    first: usize,
    count: usize,
}

/// Sleepers for the pages of one bucket.
#[repr(align(64))]
struct Bucket {
    /// Changes when a page of the bucket was dealt with.
    turn: AtomicU32,
    sleepers: AtomicU32,
}

/// Where threads of the program and engine threads meet.
pub struct Handover {
    ring: Lock<Ring>,
    /// Changes with each fault that is handed over.
    bell: AtomicU32,
    /// Engine threads that sleep until it does.
    idle: AtomicU32,
    /// Changes when faults were taken up while there was no room for more.
    room: AtomicU32,
    buckets: [Bucket; BUCKETS],
    /// Nobody takes faults up any more.
    is_closed: AtomicBool,
}

impl Default for Handover {
    fn default() -> Self {
        Handover::new()
    }
}

impl Handover {
    /// Nobody waits.
    pub fn new() -> Handover {
        let nothing = Fault { page: PageIndex(0), access: Access::Read };
        Handover {
            ring: Lock::new(Ring { faults: [nothing; WAITING_MAX], first: 0, count: 0 }),
            bell: AtomicU32::new(0),
            idle: AtomicU32::new(0),
            room: AtomicU32::new(0),
            buckets: [const { Bucket { turn: AtomicU32::new(0), sleepers: AtomicU32::new(0) } }; BUCKETS],
            is_closed: AtomicBool::new(false),
        }
    }

    const fn bucket(&self, page: PageIndex) -> &Bucket {
        &self.buckets[page.0 as usize % BUCKETS]
    }

    /// In a thread of the program, with signals blocked: has the fault served, by `here` if that can. When it returns the
    /// page may be there, or the access faults again.
    pub fn serve(&self, fault: Fault, mut here: impl FnMut(Fault) -> Here) {
        let first = here(fault);
        if first == Here::Served {
            return;
        }
        let bucket = self.bucket(fault.page);
        // Before anybody can take the fault up: whoever deals with it sees that somebody sleeps.
        // Ordering: SeqCst: whoever wakes has taken the fault out of the ring after this, or has settled the page after
        // such a one asked to be woken (`Entry::ask_to_be_woken`): his load in `wake` finds it.
        bucket.sleepers.fetch_add(1, Ordering::SeqCst);
        let turn = bucket.turn.load(Ordering::SeqCst);
        // Whoever is dealing with the page may have woken those that slept before we did.
        let now = if first == Here::Joined { here(fault) } else { first };
        if now == Here::Served {
            bucket.sleepers.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        if now == Here::Elsewhere {
            self.hand_over(fault);
        }
        while bucket.turn.load(Ordering::SeqCst) == turn && !self.is_closed() {
            futex::wait(&bucket.turn, turn);
        }
        bucket.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    fn hand_over(&self, fault: Fault) {
        loop {
            let room = self.room.load(Ordering::SeqCst);
            {
                let mut ring = self.ring.lock();
                if ring.count < WAITING_MAX {
                    let at = (ring.first + ring.count) % WAITING_MAX;
                    ring.faults[at] = fault;
                    ring.count += 1;
                    break;
                }
            }
            if self.is_closed() {
                return;
            }
            futex::wait(&self.room, room);
        }
        self.ring();
    }

    fn is_closed(&self) -> bool {
        // Ordering: SeqCst: see `close`.
        self.is_closed.load(Ordering::SeqCst)
    }

    /// No page is missing any more. Threads that sleep until a page is there wake and try again, and none sleeps from now on.
    pub fn close(&self) {
        // Ordering: SeqCst: a thread that reads a turn after the change below finds this true. One that read the old turn doesn't
        // sleep on it.
        self.is_closed.store(true, Ordering::SeqCst);
        for bucket in &self.buckets {
            bucket.turn.fetch_add(1, Ordering::SeqCst);
            futex::wake(&bucket.turn, u32::MAX >> 1);
        }
        self.room.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.room, u32::MAX >> 1);
    }

    /// Has every engine thread that waits for faults look what else there is to do.
    pub fn ring_all(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.bell, u32::MAX >> 1);
    }

    /// Has an engine thread look what there is to do.
    pub fn ring(&self) {
        // Ordering: SeqCst here and in `wait`: either we see that somebody sleeps, or he sees that the bell has rung.
        self.bell.fetch_add(1, Ordering::SeqCst);
        if self.idle.load(Ordering::SeqCst) > 0 {
            futex::wake(&self.bell, 1);
        }
    }

    /// In an engine thread: waits for faults, at most `ns` if that is given, and returns how many were put into `faults`; 0 if
    /// none came, another thread was quicker, or there is something else to do.
    pub fn wait(
        &self,
        faults: &mut [Fault; FAULTS_MAX],
        ns: Option<u64>,
        is_else: impl FnOnce() -> bool,
    ) -> usize {
        let seen = self.bell.load(Ordering::SeqCst);
        let count = self.take(faults);
        if count == 0 && !is_else() {
            // Ordering: SeqCst, as in `hand_over`.
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
        let mut ring = self.ring.lock();
        let was_full = ring.count == WAITING_MAX;
        // The others are for who has nothing to do: each may have to be read.
        let idle = self.idle.load(Ordering::Relaxed) as usize;
        let most = ring.count.div_ceil(idle + 1).min(FAULTS_MAX);
        let mut count = 0;
        while count < most {
            faults[count] = ring.faults[ring.first];
            ring.first = (ring.first + 1) % WAITING_MAX;
            ring.count -= 1;
            count += 1;
        }
        drop(ring);
        if was_full {
            // Ordering: SeqCst: who found no room has read the number before, and doesn't sleep on an old one.
            self.room.fetch_add(1, Ordering::SeqCst);
            futex::wake(&self.room, u32::MAX >> 1);
        }
        count
    }

    /// Wakes whoever sleeps for one of `pages`; they try again.
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

/// Another way of getting pages in and out, with those woken who have handed their faults over.
pub struct Woken<'a, P> {
    /// The way.
    pub pages: P,
    /// Where threads sleep.
    pub handover: &'a Handover,
}

impl<P: Pages> Pages for Woken<'_, P> {
    unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        // SAFETY: passed on.
        unsafe { self.pages.register(pages) }
    }

    unsafe fn take(&self, pages: &mut [Outgoing]) {
        // SAFETY: passed on.
        unsafe { self.pages.take(pages) }
    }

    unsafe fn take_here(&self, pages: &mut [Outgoing]) -> bool {
        // SAFETY: passed on.
        unsafe { self.pages.take_here(pages) }
    }

    unsafe fn install(&self, page: PageIndex, frame: *mut PageBytes) -> Result<Backing, InstallError> {
        // SAFETY: passed on.
        let left = unsafe { self.pages.install(page, frame) }?;
        self.handover.wake(PageRange::of(page, 1));
        Ok(left)
    }

    unsafe fn install_run(&self, pages: PageRange, source: *const PageBytes) -> Result<u64, InstallError> {
        // SAFETY: passed on.
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
        // SAFETY: passed on.
        unsafe { self.pages.give_memory(frame) }
    }

    unsafe fn drop_memory(&self, frames: &[Stretch]) -> Result<(), Errno> {
        // SAFETY: passed on.
        unsafe { self.pages.drop_memory(frames) }
    }
}
