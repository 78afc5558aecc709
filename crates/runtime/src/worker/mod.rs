//! The worker: everything that one thread needs to serve faults, and the driver that does the pager's
//! waiting. The thread is an engine thread, or a thread of the program with a fault of its own
//! (`serve_inline`). This file serves faults. `evict.rs` takes pages, `place.rs` places them, `write.rs`
//! writes them; `upkeep.rs` looks after pool and areas, `ahead.rs` reads early, `polling.rs` polls for a
//! read.
//!
//! Each worker has scratch memory, batches, and back ends of its own. Threads therefore meet only in the
//! pager's short critical sections and in page locks. All of this code runs while the program may be stopped
//! at any instruction with any of its locks held. Therefore the code makes no allocation, calls no libc, and
//! uses no thread-local storage. It touches program memory only through the crate `farpage_fault`.

pub mod ahead;
mod evict;
mod place;
pub mod polling;
mod upkeep;
mod write;

use crate::engine::{Engine, FaultMode};
use crate::mappings::map_lock::ReaderIndex;
use crate::privileges::limits;
use crate::session::devices::{BackEndPlaces, BackEnds};
use crate::session::{Notice, StopReason, pack_io_error};
use crate::worker::ahead::{AheadMemory, Reclaim, Server};
use farpage_core::cache::Backing;
use farpage_core::pager::{Access, BATCH_MAX, Batch, Step, Taken, Ticket, WriteBatch, WriteRequest};
use farpage_core::readahead::Plan;
use farpage_core::stats::Latency;
use farpage_core::table::entry::State;
use farpage_core::units::{NodeId, PAGE_BYTES, PageIndex, PageRange, SlotIndex};
use farpage_core::zswap::codec::Scratch;
use farpage_fault::signal::Inline;
use farpage_fault::{Fault, InstallError, Outgoing};
use farpage_io::IoError;
use farpage_os::clock::now_ns;
use farpage_os::memory;
use farpage_os::sys::Errno;
use rustix::fd::BorrowedFd;

/// Pages in a row that lack memory before the engine looks whether the lack is for good. Each page waits for
/// a millisecond.
const LACKS_MAX: u32 = 1000;

/// Write requests that one thread has in flight, at most.
const WRITES_MAX: usize = 16;
/// Pages of zeros that a run of first touches by reads gets at once, at most. The pages are the kernel's and
/// take no memory.
const ZERO_RUN_MAX: u64 = 32;
/// Pages of zeros that a run of first touches by writes gets at once, at most. These pages have memory.
const WRITTEN_RUN_MAX: u64 = farpage_fault::uffd::ZEROS as u64;
/// Pages of zeros in a run of writes while memory is so near the limit that pages are evicted. All threads
/// may take a run at the same time, without another look at the limit.
const WRITTEN_RUN_NEAR_LIMIT: u64 = 4;

/// Nanoseconds that a read waits before it is tried again after the kernel refused it for the moment. The
/// wait doubles each time, up to a tenth of a second.
const PAUSE_NS: core::ops::Range<u64> = 1_000_000..100_000_000;
/// Nanoseconds for which a refused read is tried again.
const READ_NS_MAX: u64 = 30_000_000_000;

/// State of a write in flight, beside its request.
#[derive(Clone, Copy)]
struct InFlight {
    /// Time at which the write got its slots.
    since_ns: u64,
    /// The result of the write; `None` while the device has it.
    result: Option<Result<(), IoError>>,
}

/// What one batch of evictions did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Pages were evicted, or memory was freed.
    Some,
    /// Nothing could be done.
    None,
}

/// The larger parts of a worker, which never move.
struct LargeParts {
    scratch: Scratch,
    writes: WriteBatch,
    requests: [WriteRequest; WRITES_MAX],
    back_ends: BackEndPlaces,
    readers: BackEndPlaces,
}

/// The state of one engine thread, or of one server of faults in threads of the program (`guard/direct.rs`).
pub struct Worker {
    pub(crate) engine: &'static Engine,
    pub(crate) index: ReaderIndex,
    /// The NUMA node of the CPU that this thread is bound to, if it is bound to one.
    node: Option<NodeId>,
    pub(crate) scratch: &'static mut Scratch,
    pub(crate) ahead: AheadMemory,
    batch: Batch,
    outgoing: [Outgoing; BATCH_MAX],
    /// Pages that wait to be written.
    writes: &'static mut WriteBatch,
    /// The requests whose state `in_flight` holds.
    requests: &'static mut [WriteRequest; WRITES_MAX],
    in_flight: [Option<InFlight>; WRITES_MAX],
    back_ends: BackEnds,
    /// Page after the last run of first touches, and that run's length. Sequential fills get longer runs.
    zero_end: PageIndex,
    zero_run: u64,
    give_up_until_ns: u64,
    retry_areas_at_ns: u64,
    /// Times at which the pool's next turn begins, and at which old objects are compressed once more.
    turn_at_ns: u64,
    densify_at_ns: u64,
    /// Time of the last look for completions.
    looked_ns: u64,
    /// Pages in a row for which the kernel had no memory.
    lacks: u32,
    /// Whether the last batch had pages that are shared since a fork. The keeper makes these the program's
    /// own.
    sees_shared: bool,
    /// Whether the pages of the last batch were unshared and chosen as victims again.
    has_unshared: bool,
}

impl Worker {
    /// Places a worker for good, for the thread with this index. The thread stays on `node`, or moves between
    /// nodes if that is `None`. The larger parts are made in place. A move would take their size of the
    /// thread's stack as well, and all of that counts against the budget.
    #[expect(clippy::mut_from_ref, reason = "it is new, not borrowed from the engine")]
    pub fn placed(
        engine: &'static Engine,
        index: ReaderIndex,
        node: Option<NodeId>,
    ) -> Result<&'static mut Worker, Errno> {
        let nothing = Outgoing {
            page: PageIndex(0),
            frame: core::ptr::null_mut(),
            backing: Backing::Hole,
            taken: Taken::Busy,
            is_shared: false,
        };
        // SAFETY: the mapping is new, of this size, and ours alone for good. Zeros are valid scratch memory,
        // an empty batch and empty requests (`Zeroed`), and the other parts may hold any bytes. No child uses
        // it: a child makes workers of its own.
        let large =
            unsafe { &mut *memory::reserve_for_threads(size_of::<LargeParts>())?.cast::<LargeParts>() };
        memory::place(Worker {
            engine,
            index,
            node,
            scratch: &mut large.scratch,
            ahead: AheadMemory::new(BackEnds::new(&mut large.readers)),
            batch: Batch::new(),
            outgoing: [nothing; BATCH_MAX],
            writes: &mut large.writes,
            requests: &mut large.requests,
            in_flight: [const { None }; WRITES_MAX],
            back_ends: BackEnds::new(&mut large.back_ends),
            zero_end: PageIndex(0),
            zero_run: 1,
            give_up_until_ns: 0,
            retry_areas_at_ns: 0,
            turn_at_ns: 0,
            densify_at_ns: 0,
            looked_ns: 0,
            lacks: 0,
            sees_shared: false,
            has_unshared: false,
        })
    }

    /// Serves one fault in the thread of the program that ran into it, if this thread's descriptors are
    /// enough. No memory is freed for the fault here. Afterwards the thread may take out a few pages
    /// ([`evictor`](crate::pressure::evictor)). Without a userfaultfd only pages of zeros are served here.
    pub fn serve_inline(&mut self, fault: Fault) -> Inline {
        let started = now_ns();
        let pager = self.engine.pager;
        if self.engine.is_over_limit() && pager.takes_memory(fault.page, fault.access) {
            return Inline::Elsewhere;
        }
        let mut shared = Some(self.engine.map.shared(self.index));
        let (kind, plan) = match pager.fault(fault.page, fault.access) {
            Step::Zero(mut ticket) => {
                let kind = if ticket.before() == State::Absent { Latency::First } else { Latency::Pool };
                let plan = self.plan_ahead(&mut ticket, Server::Program);
                self.zero(ticket, fault.access);
                (kind, plan)
            }
            // The bytes would be written through a file that isn't in this thread's descriptor table.
            Step::Install(ticket) | Step::Load(ticket) | Step::Read(ticket)
                if self.engine.mode().installs_by_file() =>
            {
                pager.give_back(ticket);
                return Inline::Elsewhere;
            }
            Step::Install(mut ticket) => {
                let plan = self.plan_ahead(&mut ticket, Server::Program);
                self.install(ticket);
                (Latency::Parked, plan)
            }
            Step::Load(mut ticket) => {
                let plan = self.plan_ahead(&mut ticket, Server::Program);
                self.load(ticket);
                (Latency::Pool, plan)
            }
            Step::Unprotect(ticket) if self.engine.pages.unprotect(PageRange::of(fault.page, 1)) => {
                pager.settle_fault(ticket, Backing::Hole);
                return Inline::Served;
            }
            Step::Unprotect(ticket) => {
                pager.give_back(ticket);
                return Inline::Elsewhere;
            }
            Step::Read(mut ticket) => {
                let slot = ticket.slot().expect("a page to read is in a slot");
                let Some(file) = self.engine.direct.descriptors.area(slot.area()) else {
                    pager.give_back(ticket);
                    return Inline::Elsewhere;
                };
                let plan = self.plan_ahead(&mut ticket, Server::Program);
                shared = None;
                self.read_inline(ticket, file);
                (Latency::Area, plan)
            }
            Step::Joined => {
                self.plan_joined(fault.page);
                return Inline::Joined;
            }
            Step::Present | Step::Lost(_) | Step::NoFrame | Step::Unknown => return Inline::Elsewhere,
        };
        drop(shared);
        // If the page isn't there, the program has closed the descriptors, and nothing was done.
        if !pager.state(fault.page).is_resident() {
            return Inline::Elsewhere;
        }
        self.after_page(kind, started, plan);
        Inline::Served
    }

    /// Does the work that remains after a thread has got its page, before the thread goes on. `kind` says
    /// where the page came from.
    fn after_page(&mut self, kind: Latency, started: u64, plan: Option<Plan>) {
        match plan {
            Some(Plan::CatchUp(window)) => self.catch_up(window),
            Some(plan) => self.engine.ahead.push(plan),
            None => {}
        }
        let now = now_ns();
        self.engine.pager.stats().latency(kind).record(now - started);
        self.engine.evictor.was_served(now, (kind == Latency::Area).then(|| now - started));
        self.take_along(now);
    }

    /// Serves one fault to its end. Every path either installs the page or wakes the waiting thread.
    pub fn serve(&mut self, fault: Fault) {
        // The map lock is free again before pages are read ahead.
        if let Some(plan) = self.serve_page(fault) {
            self.bring(plan, Reclaim::Forbidden);
        }
    }

    /// Serves one fault. Returns what this thread should read ahead now that the page is served.
    fn serve_page(&mut self, fault: Fault) -> Option<Plan> {
        let started = now_ns();
        let is_over = self.engine.is_over_limit() && !self.engine.keeps_all_in();
        if is_over && self.engine.pager.takes_memory(fault.page, fault.access) {
            self.make_memory_direct();
        }
        loop {
            let shared = self.engine.map.shared(self.index);
            let (kind, plan) = match self.engine.pager.fault(fault.page, fault.access) {
                Step::Zero(mut ticket) => {
                    let kind = if ticket.before() == State::Absent { Latency::First } else { Latency::Pool };
                    let plan = self.plan_ahead(&mut ticket, Server::Engine);
                    self.zero(ticket, fault.access);
                    (Some(kind), plan)
                }
                Step::Install(mut ticket) => {
                    let plan = self.plan_ahead(&mut ticket, Server::Engine);
                    self.install(ticket);
                    (Some(Latency::Parked), plan)
                }
                Step::Load(mut ticket) => {
                    let plan = self.plan_ahead(&mut ticket, Server::Engine);
                    self.load(ticket);
                    (Some(Latency::Pool), plan)
                }
                Step::Read(mut ticket) => {
                    let plan = self.plan_ahead(&mut ticket, Server::Engine);
                    drop(shared);
                    self.read(ticket);
                    (Some(Latency::Area), plan)
                }
                Step::NoFrame => {
                    drop(shared);
                    self.free_a_frame();
                    continue;
                }
                Step::Unknown => {
                    drop(shared);
                    self.wait_for_event(fault.page);
                    (None, None)
                }
                Step::Unprotect(ticket) => (self.unprotect(ticket), None),
                Step::Joined => {
                    self.plan_joined(fault.page);
                    (None, None)
                }
                Step::Present => {
                    self.present(fault);
                    (None, None)
                }
                Step::Lost(_) => {
                    self.poison(fault.page);
                    (None, None)
                }
            };
            if let Some(kind) = kind {
                self.engine.pager.stats().latency(kind).record(now_ns() - started);
            }
            return plan;
        }
    }

    /// Lifts the write protection of a page. Only a first write counts in the latencies.
    fn unprotect(&self, ticket: Ticket) -> Option<Latency> {
        let is_first_write = ticket.slot().is_none();
        self.engine.pages.unprotect(PageRange::of(ticket.page(), 1));
        self.engine.pager.settle_fault(ticket, Backing::Hole);
        is_first_write.then_some(Latency::First)
    }

    /// Waits for the event of a call that no hook has seen. The call moved a registered page here that has
    /// never been known here. The thread that reads the event stops the program. Until then nothing may be
    /// installed.
    fn wait_for_event(&self, page: PageIndex) {
        farpage_os::clock::sleep_ns(1_000_000);
        self.engine.pages.wake(page);
    }

    /// Serves a first touch, or a page that was all zeros. Neighbours that are touched in order come along.
    fn zero(&mut self, ticket: Ticket, access: Access) {
        let pager = self.engine.pager;
        let page = ticket.page();
        let follows = page == self.zero_end && ticket.before() == State::Absent;
        self.zero_run = if follows { (self.zero_run * 2).min(ZERO_RUN_MAX) } else { 1 };
        // A page that is only read takes no memory yet.
        let has_little_headroom = match access {
            Access::Read => self.engine.is_due(self.engine.evicts_inline(now_ns())),
            _ => self.engine.is_over_start(),
        };
        let wanted = match (access, has_little_headroom) {
            (Access::Write, false) => self.zero_run.min(WRITTEN_RUN_MAX),
            (Access::Write, true) if !self.engine.is_over_limit() => {
                self.zero_run.min(WRITTEN_RUN_NEAR_LIMIT)
            }
            (Access::Read, false) => self.zero_run,
            _ => 1,
        };
        let mut tickets: [Option<Ticket>; ZERO_RUN_MAX as usize] = [const { None }; ZERO_RUN_MAX as usize];
        tickets[0] = Some(ticket);
        let mut count = 1;
        if wanted > 1 {
            let end = pager.registered_end(page);
            while count < wanted && page.0 + count < end.0 {
                let Some(next) = pager.lock_absent(page.plus(count)) else { break };
                tickets[count as usize] = Some(next);
                count += 1;
            }
        }
        let there = self.engine.pages.zero(PageRange::of(page, count), access);
        if there == Err(InstallError::NoMemory) {
            self.lack();
        }
        // The page was discarded, but no mapping was to spare for closing it. So the program has the page
        // already, and nothing has woken a thread that waits for it.
        let was_open = there == Err(InstallError::Present) && self.engine.mode() == FaultMode::Segv;
        let there = match there {
            _ if was_open => 1,
            // If the call has installed no page, another thread was quicker, or the mapping is gone. The
            // faulting thread tries again and finds out.
            there => there.unwrap_or_default(),
        };
        if access != Access::Write || self.engine.mode() == FaultMode::Segv {
            self.engine.budget.mapped_zeros(there);
        }
        for (at, ticket) in tickets.into_iter().flatten().enumerate() {
            if (at as u64) < there {
                pager.settle_fault(ticket, Backing::Hole);
            } else {
                pager.give_back(ticket);
            }
        }
        if there == 0 || was_open {
            self.engine.pages.wake(page);
        }
        self.zero_end = page.plus(there.max(1));
    }

    /// Waits a moment because the kernel has no memory for a page. The faulting thread then tries again. If
    /// RLIMIT_DATA leaves no memory for good, stops the program.
    fn lack(&mut self) {
        farpage_os::clock::sleep_ns(1_000_000);
        self.lacks += 1;
        let is_for_good = self.lacks >= LACKS_MAX && self.engine.mode() == FaultMode::Segv;
        if is_for_good && limits::is_data_full(&self.engine.statm) {
            self.engine.stop_program(StopReason::DataLimit);
        }
    }

    /// Installs the page, whose bytes are in the frame.
    fn install(&mut self, ticket: Ticket) {
        let (page, frame) = (ticket.page(), ticket.frame().expect("a page to install is in a frame"));
        let pager = self.engine.pager;
        let pointer = pager.cache().pointer(frame);
        // SAFETY: the ticket owns the frame, which has memory, and holds the page's lock.
        match unsafe { self.engine.pages.install(page, pointer) } {
            Ok(left) => {
                pager.settle_fault(ticket, left);
                self.lacks = 0;
            }
            Err(error) => {
                if error == InstallError::NoMemory {
                    self.lack();
                }
                // The bytes are where they were. The faulting thread tries again.
                pager.give_back(ticket);
                self.engine.pages.wake(page);
            }
        }
    }

    /// Loads the page out of the pool, or out of a word, and installs it.
    fn load(&mut self, mut ticket: Ticket) {
        if !self.back(&mut ticket) {
            let page = ticket.page();
            self.engine.pager.give_back(ticket);
            return self.engine.pages.wake(page);
        }
        match self.engine.pager.load(&ticket, &mut self.scratch.decoder) {
            Ok(()) => self.install(ticket),
            Err(slot) => self.lose(ticket, slot, Notice::Corrupt, 0),
        }
    }

    /// Reads the page from an area, and installs it. The caller doesn't hold the map lock. The page's own
    /// lock delays changes of its mapping.
    fn read(&mut self, mut ticket: Ticket) {
        let page = ticket.page();
        if !self.back(&mut ticket) {
            self.engine.pager.give_back(ticket);
            return self.engine.pages.wake(page);
        }
        let slot = ticket.slot().expect("a page to read is in a slot");
        let result = self.fill_in_the_end(&ticket, self.engine.devices.fd(slot.area()));
        let _shared = self.engine.map.shared(self.index);
        match result {
            Ok(()) => match self.engine.pager.read_done(&ticket, self.scratch) {
                Ok(()) => self.install(ticket),
                Err(slot) => self.lose(ticket, slot, Notice::Corrupt, 0),
            },
            Err(error) => self.lose(ticket, slot, Notice::ReadError, error.errno().unwrap_or(0)),
        }
    }

    /// Reads the page in a thread of the program, by that thread's own descriptor of the area. If the
    /// read fails, an engine thread reads again: the program can't change that thread's descriptors.
    fn read_inline(&mut self, mut ticket: Ticket, file: BorrowedFd<'_>) {
        if !self.back(&mut ticket) {
            return self.engine.pager.give_back(ticket);
        }
        let read = self.fill(&ticket, file);
        let _shared = self.engine.map.shared(self.index);
        if read.is_ok() && self.engine.pager.read_done(&ticket, self.scratch).is_ok() {
            return self.install(ticket);
        }
        // If the kernel is only short of something, the number is still the area's.
        if let Some(slot) = ticket.slot()
            && !read.is_err_and(IoError::is_retryable)
        {
            self.engine.direct.descriptors.lose_area(slot.area());
        }
        self.engine.pager.give_back(ticket);
    }

    /// Reads the ticket's slot into its frame, which has memory. If the kernel is only short of something,
    /// tries again for half a minute, because the bytes on the disk aren't lost.
    fn fill_in_the_end(&self, ticket: &Ticket, file: BorrowedFd<'_>) -> Result<(), IoError> {
        let (mut pause_ns, give_up_ns) = (PAUSE_NS.start, now_ns() + READ_NS_MAX);
        loop {
            match self.fill(ticket, file) {
                Err(error) if error.is_retryable() && now_ns() < give_up_ns => {
                    farpage_os::clock::sleep_ns(pause_ns);
                    pause_ns = (pause_ns * 2).min(PAUSE_NS.end);
                }
                result => return result,
            }
        }
    }

    /// Reads the ticket's slot into its frame, which has memory.
    fn fill(&self, ticket: &Ticket, file: BorrowedFd<'_>) -> Result<(), IoError> {
        let slot = ticket.slot().expect("a page to read is in a slot");
        let frame = ticket.frame().expect("a page to read has a frame");
        let pointer = self.engine.pager.cache().pointer(frame).cast::<u8>();
        // SAFETY: the ticket owns the frame, which has memory, and no other code refers to the frame.
        let bytes = unsafe { core::slice::from_raw_parts_mut(pointer, PAGE_BYTES) };
        self.engine.read_for_fault(file, slot.byte_offset(), bytes)
    }

    pub(crate) fn back(&self, ticket: &mut Ticket) -> bool {
        if let Some(frame) = ticket.frame().filter(|_| ticket.needs_backing()) {
            // SAFETY: the ticket owns the frame.
            if unsafe { self.engine.pages.give_memory(self.engine.pager.cache().pointer(frame)) }.is_err() {
                return false;
            }
            ticket.set_backed();
        }
        true
    }

    fn lose(&self, ticket: Ticket, slot: SlotIndex, notice: Notice, errno: u16) {
        let page = ticket.page();
        self.engine.pager.fail(ticket, slot);
        self.engine.record.notice(notice, pack_io_error(slot.area().0, slot.offset(), errno));
        self.poison(page);
    }

    fn poison(&self, page: PageIndex) {
        if matches!(self.engine.pages.poison(page), Err(InstallError::Unmapped)) {
            // The kernel has no UFFDIO_POISON. The page's bytes are gone, and it must never read as anything
            // else.
            farpage_os::sys::exit_group(128 + 7);
        }
        self.engine.pages.wake(page);
    }

    /// Serves a fault on a page that should be there. Usually the page is there, because another thread's
    /// fault brought it. If the program discarded the page by a call that no hook sees, the kernel has
    /// dropped it. Then the page is zeros now.
    fn present(&mut self, fault: Fault) {
        let there = || match self.engine.protections {
            Some(protections) => protections.is_open(fault.page),
            None => self.engine.pagemap.is_present(fault.page).unwrap_or(true),
        };
        if fault.access != Access::WriteProtected
            && !there()
            && let Step::Unprotect(ticket) = self.engine.pager.fault(fault.page, Access::WriteProtected)
        {
            if !there() {
                let _ = self.engine.pages.zero(PageRange::of(fault.page, 1), fault.access);
            }
            self.engine.pager.settle_fault(ticket, Backing::Hole);
        }
        self.engine.pages.wake(fault.page);
    }
}
