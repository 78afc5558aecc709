//! One engine thread: serves faults, evicts, places, writes. The driver that does the pager's waiting.
//!
//! Each thread has scratch memory, batches, and back ends of its own, so threads meet only in the pager's
//! short critical sections and in page locks. Everything below runs while the program may be stopped at any
//! instruction with any of its locks held: no allocation, no libc, no thread-local storage; nothing here
//! touches program memory except through `fault`.

use crate::ahead::{AheadMemory, Reclaim};
use crate::devices::{BackEndPlaces, BackEnds};
use crate::engine::Engine;
use crate::fork;
use crate::guard;
use crate::map_lock::ReaderIndex;
use crate::session::{Notice, pack_io_error};
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering;
use farpage_core::areas::{AreaState, Took};
use farpage_core::cache::Backing;
use farpage_core::pager::{
    Access, BATCH_MAX, Batch, Left, Placed, Shrunk, Step, Taken, Ticket, WriteBatch, WriteProgress,
    WriteRequest,
};
use farpage_core::readahead::Plan;
use farpage_core::stats::{Counter, Latency};
use farpage_core::table::entry::State;
use farpage_core::units::{
    AREAS_MAX, AreaId, CLUSTER_SLOTS, FrameIndex, NodeId, PAGE_BYTES, PageBytes, PageIndex, PageRange,
    SlotIndex,
};
use farpage_core::zswap::codec::Scratch;
use farpage_fault::signal::Here;
use farpage_fault::{Fault, InstallError, Outgoing};
use farpage_io::psync::read_now;
use farpage_io::{Backend, Completion, IoError, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_os::clock::now_ns;
use farpage_os::memory;
use farpage_os::sys::Errno;
use linux_raw_sys::errno::EIO;

/// Write requests that one thread has under way.
const WRITES_MAX: usize = 16;
/// Victims of one batch in a thread that serves a fault.
const DIRECT_BATCH: usize = 32;
/// Victims of one batch in the background.
const BACKGROUND_BATCH: usize = 64;
/// Pages that make a write worth sending: 128 KiB.
const WRITE_WORTHWHILE: u32 = 32;
/// Free frames that keep their memory, for the next faults to be decompressed into.
const BACKED_KEPT: u32 = 64;
/// Pages of zeros that a run of first touches gets at once, at most.
const ZERO_RUN_MAX: u64 = 32;
/// A thread that needs memory goes on evicting for so long; then the program goes on over its budget.
const DIRECT_NS_MAX: u64 = 2_000_000_000;
/// After finding nothing to evict, a thread doesn't look again for so long.
const GIVE_UP_NS: u64 = 20_000_000;
/// A call that took longer than this has waited for the device.
const BLOCKED_NS: u64 = 20_000;
/// See `Worker::find_slots`.
const SOURCES_OF_SLOTS: u32 = 3;
/// Clusters of an area that are discarded in one go.
const DISCARDS_MAX: usize = 4;
/// How often a full area is tried again.
const RETRY_AREAS_NS: u64 = 1_000_000_000;

/// A write under way.
#[derive(Clone, Copy)]
struct InFlight {
    request: WriteRequest,
    /// When it got its slots.
    since_ns: u64,
    /// How it ended; none while the device has it.
    result: Option<Result<(), AreaState>>,
}

/// After looking at all of the program's memory and finding that nothing can be moved, for good, nobody waits for the keeper
/// for so many times as that took, and it doesn't look again.
const REST_AFTER_LAP: u64 = 8;
/// Batches of nothing but pages that calls hold, before a thread finds that there is nothing to evict.
const HELD_BATCHES_MAX: usize = 16;

/// What one batch of evictions did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Pages went out or memory was freed.
    Some,
    /// Nothing could be done.
    None,
}

/// A worker's larger parts, where they stay.
struct Room {
    page: PageBytes,
    scratch: MaybeUninit<Scratch>,
    back_ends: BackEndPlaces,
    readers: BackEndPlaces,
}

/// One engine thread's own state.
pub struct Worker {
    pub(crate) engine: &'static Engine,
    pub(crate) index: ReaderIndex,
    /// The node of the CPU that this thread is pinned to, if it is.
    node: Option<NodeId>,
    scratch: &'static mut Scratch,
    pub(crate) page: &'static mut PageBytes,
    pub(crate) ahead: AheadMemory,
    batch: Batch,
    outgoing: [Outgoing; BATCH_MAX],
    writes: WriteBatch,
    in_flight: [Option<InFlight>; WRITES_MAX],
    back_ends: BackEnds,
    /// Where the last run of first touches ended, and how long it was: sequential fills get longer ones.
    zero_end: PageIndex,
    zero_run: u64,
    give_up_until_ns: u64,
    retry_areas_at_ns: u64,
    /// When completions were last looked for.
    looked_ns: u64,
    /// The last batch was of pages that are shared since a fork: the keeper makes them the program's own.
    sees_shared: bool,
}

impl Worker {
    /// A worker for the thread with this index, which stays on that node or (none) moves about. For good. Its larger
    /// parts are made where they stay: what is moved there takes its size of the thread's stack, too, and all of that
    /// counts against the budget.
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
        // SAFETY: a new mapping of this size, ours alone, for good; zeros are a page, and the rest may hold anything.
        let room = unsafe { &mut *memory::reserve_for_threads(size_of::<Room>())?.cast::<Room>() };
        memory::place(Worker {
            engine,
            index,
            node,
            scratch: Scratch::init(&mut room.scratch),
            page: &mut room.page,
            ahead: AheadMemory::new(BackEnds::new(&mut room.readers)),
            batch: Batch::new(),
            outgoing: [nothing; BATCH_MAX],
            writes: WriteBatch::new(),
            in_flight: [const { None }; WRITES_MAX],
            back_ends: BackEnds::new(&mut room.back_ends),
            zero_end: PageIndex(0),
            zero_run: 1,
            give_up_until_ns: 0,
            retry_areas_at_ns: 0,
            looked_ns: 0,
            sees_shared: false,
        })
    }

    // ---- faults -------------------------------------------------------------------------------------

    /// Serves one fault in the thread of the program that ran into it, if it needs no more than what a userfaultfd and the
    /// pool can do: nothing is evicted, read or waited for here. That thread has none of our other descriptors.
    pub fn serve_here(&mut self, fault: Fault) -> Here {
        let started = now_ns();
        let pager = self.engine.pager;
        if self.engine.is_over_limit() && pager.takes_memory(fault.page, fault.access) {
            return Here::Elsewhere;
        }
        let _shared = self.engine.map.shared(self.index);
        let (kind, plan) = match pager.fault(fault.page, fault.access) {
            Step::Zero(ticket) => {
                let kind = if ticket.before() == State::Absent { Latency::First } else { Latency::Pool };
                let plan = self.plan_ahead(&ticket, fault.access);
                self.zero(ticket);
                (kind, plan)
            }
            Step::Install(ticket) => {
                let plan = self.plan_ahead(&ticket, fault.access);
                self.install(ticket);
                (Latency::Parked, plan)
            }
            Step::Load(ticket) => {
                let plan = self.plan_ahead(&ticket, fault.access);
                self.load(ticket);
                (Latency::Pool, plan)
            }
            Step::Unprotect(ticket) if self.engine.pages.unprotect(fault.page) => {
                pager.settle_fault(ticket, Left { frame: Backing::Hole, protected: false });
                return Here::Served;
            }
            Step::Unprotect(ticket) => {
                pager.give_back(ticket);
                return Here::Elsewhere;
            }
            Step::Read(ticket) => {
                pager.give_back(ticket);
                return Here::Elsewhere;
            }
            Step::Joined => return Here::Joined,
            Step::Present | Step::Lost(_) | Step::NoFrame | Step::Unknown => return Here::Elsewhere,
        };
        if let Some(plan) = plan {
            self.engine.ahead.push(plan);
        }
        // Without the descriptor nothing was done: the program has closed it.
        if !pager.state(fault.page).is_resident() {
            return Here::Elsewhere;
        }
        self.engine.pager.stats().latency(kind).record(now_ns() - started);
        Here::Served
    }

    /// Serves one fault to its end. Every path either installs the page or sees to it that the thread that
    /// waits is woken.
    pub fn serve(&mut self, fault: Fault) {
        // The map lock is free again before anything is read ahead.
        if let Some(plan) = self.serve_page(fault) {
            self.bring(plan, Reclaim::NotHere);
        }
    }

    /// Returns what this thread should read ahead now that the page is served.
    fn serve_page(&mut self, fault: Fault) -> Option<Plan> {
        let started = now_ns();
        if self.engine.is_over_limit() && self.engine.pager.takes_memory(fault.page, fault.access) {
            self.make_memory_direct();
        }
        loop {
            let shared = self.engine.map.shared(self.index);
            let step = self.engine.pager.fault(fault.page, fault.access);
            let mut plan = None;
            let kind = match step {
                Step::Zero(ticket) => {
                    let kind = if ticket.before() == State::Absent { Latency::First } else { Latency::Pool };
                    plan = self.plan_ahead(&ticket, fault.access);
                    self.zero(ticket);
                    Some(kind)
                }
                Step::Install(ticket) => {
                    plan = self.plan_ahead(&ticket, fault.access);
                    self.install(ticket);
                    Some(Latency::Parked)
                }
                Step::Load(ticket) => {
                    plan = self.plan_ahead(&ticket, fault.access);
                    self.load(ticket);
                    Some(Latency::Pool)
                }
                Step::Read(ticket) => {
                    plan = self.plan_ahead(&ticket, fault.access);
                    drop(shared);
                    self.read(ticket);
                    Some(Latency::Area)
                }
                Step::Unprotect(ticket) => {
                    let kind = if ticket.slot().is_none() { Some(Latency::First) } else { None };
                    self.engine.pages.unprotect(fault.page);
                    self.engine.pager.settle_fault(ticket, Left { frame: Backing::Hole, protected: false });
                    kind
                }
                Step::Joined => None,
                Step::Present => {
                    self.present(fault);
                    None
                }
                Step::Lost(_) => {
                    self.poison(fault.page);
                    None
                }
                Step::NoFrame => {
                    drop(shared);
                    self.free_a_frame();
                    continue;
                }
                Step::Unknown => {
                    // Registered, but nothing was ever known here: moved by a call that we have not seen. Whoever reads
                    // that call's event stops the program; until then nothing may be installed.
                    drop(shared);
                    farpage_os::clock::sleep_ns(1_000_000);
                    self.engine.pages.wake(fault.page);
                    None
                }
            };
            if let Some(kind) = kind {
                self.engine.pager.stats().latency(kind).record(now_ns() - started);
            }
            return plan;
        }
    }

    /// A first touch, or a page that was all zeros. Neighbours that are touched in order come along.
    fn zero(&mut self, ticket: Ticket) {
        let pager = self.engine.pager;
        let page = ticket.page();
        let follows = page == self.zero_end && ticket.before() == State::Absent;
        self.zero_run = if follows { (self.zero_run * 2).min(ZERO_RUN_MAX) } else { 1 };
        let wanted = if self.engine.is_over_start() { 1 } else { self.zero_run };
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
        // None: somebody was quicker, or the mapping is gone. The thread tries again and finds out.
        let there = self.engine.pages.zero(PageRange::of(page, count)).unwrap_or_default();
        self.engine.budget.mapped_zeros(there);
        for (at, ticket) in tickets.into_iter().flatten().enumerate() {
            if (at as u64) < there {
                pager.settle_fault(ticket, Left { frame: Backing::Hole, protected: false });
            } else {
                pager.give_back(ticket);
            }
        }
        if there == 0 {
            self.engine.pages.wake(page);
        }
        self.zero_end = page.plus(there.max(1));
    }

    /// The frame has the bytes: into the program with it.
    fn install(&mut self, ticket: Ticket) {
        let (page, frame) = (ticket.page(), ticket.frame().expect("a page to install is in a frame"));
        let pager = self.engine.pager;
        let pointer = pager.cache().pointer(frame);
        // SAFETY: the ticket owns the frame, which has memory, and holds the page's lock.
        match unsafe { self.engine.pages.install(page, pointer, ticket.wants_protection()) } {
            Ok(left) => pager.settle_fault(ticket, left),
            Err(error) => {
                if error == InstallError::NoMemory {
                    farpage_os::clock::sleep_ns(1_000_000);
                }
                // The bytes are where they were. The thread tries again.
                pager.give_back(ticket);
                self.engine.pages.wake(page);
            }
        }
    }

    /// Out of the pool, or out of a word.
    fn load(&mut self, mut ticket: Ticket) {
        if !self.back(&mut ticket) {
            let page = ticket.page();
            self.engine.pager.give_back(ticket);
            return self.engine.pages.wake(page);
        }
        match self.engine.pager.load(&ticket, self.page) {
            Ok(()) => self.install(ticket),
            Err(slot) => self.lose(ticket, slot, Notice::Corrupt, 0),
        }
    }

    /// Off an area. Called without the map lock: the page's own lock keeps changes of its mapping waiting.
    fn read(&mut self, mut ticket: Ticket) {
        let page = ticket.page();
        if !self.back(&mut ticket) {
            self.engine.pager.give_back(ticket);
            return self.engine.pages.wake(page);
        }
        let slot = ticket.slot().expect("a page to read is in a slot");
        let frame = ticket.frame().expect("a page to read has a frame");
        let pointer = self.engine.pager.cache().pointer(frame).cast::<u8>();
        // SAFETY: the ticket owns the frame and it has memory; nobody else refers to it.
        let bytes = unsafe { core::slice::from_raw_parts_mut(pointer, PAGE_BYTES) };
        let result = read_now(self.engine.devices.fd(slot.area()), slot.byte_offset(), bytes);
        let _shared = self.engine.map.shared(self.index);
        match result {
            Ok(()) => match self.engine.pager.read_done(&ticket) {
                Ok(()) => self.install(ticket),
                Err(slot) => self.lose(ticket, slot, Notice::Corrupt, 0),
            },
            Err(error) => self.lose(ticket, slot, Notice::ReadError, error.errno().unwrap_or(0)),
        }
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
            // A kernel without UFFDIO_POISON. The page's bytes are gone; never let it read as anything else.
            farpage_os::sys::exit_group(128 + 7);
        }
        self.engine.pages.wake(page);
    }

    /// The page should be there. Usually it is: another thread's fault brought it. If the kernel has dropped
    /// it (the program discarded it by a call that we don't see), it is zeros now.
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
                let _ = self.engine.pages.zero(PageRange::of(fault.page, 1));
            }
            self.engine.pager.settle_fault(ticket, Left { frame: Backing::Hole, protected: false });
        }
        self.engine.pages.wake(fault.page);
    }

    // ---- evictions ----------------------------------------------------------------------------------

    /// Evicts in the thread that needs the memory, until there is some or nothing can be done.
    pub(crate) fn make_memory_direct(&mut self) {
        self.engine.budget.ring();
        let deadline = now_ns() + DIRECT_NS_MAX;
        loop {
            self.engine.budget.refresh(self.engine.pager);
            let now = now_ns();
            if !self.engine.is_over_limit() || now < self.give_up_until_ns {
                return;
            }
            self.engine.pager.stats().count(Counter::ReclaimDirect);
            if now > deadline || (self.evict(DIRECT_BATCH) == Progress::None && !self.wait_for_others()) {
                // There may be nothing because the program has just given it back, and less is needed now.
                self.engine.measure();
                if self.engine.is_over_limit() {
                    self.give_up();
                }
                return;
            }
        }
    }

    /// Nothing could be evicted: waits for who may be able to. False if nobody is.
    fn wait_for_others(&mut self) -> bool {
        let is_for_good = now_ns() < self.engine.unmovable_until_ns.load(Ordering::Relaxed);
        if core::mem::take(&mut self.sees_shared) && !is_for_good {
            self.engine.budget.ring();
            farpage_os::clock::sleep_ns(100_000);
            return true;
        }
        self.wait_for_frames()
    }

    /// Nothing could be evicted because frames are being written or filled: waits for some. False if none is.
    fn wait_for_frames(&mut self) -> bool {
        self.send_writes();
        if self.has_writes() {
            self.collect_writes(Wait::One);
            return true;
        }
        let others = self.engine.writes_under_way.load(Ordering::Relaxed) > 0
            || self.engine.evicting.load(Ordering::Relaxed) > 0;
        if others {
            farpage_os::clock::sleep_ns(100_000);
        }
        others
    }

    fn give_up(&mut self) {
        self.give_up_until_ns = now_ns() + GIVE_UP_NS;
        self.engine.pager.stats().count(Counter::OverBudget);
    }

    /// The background thread's share: below the stop mark, and the pool below its threshold.
    pub fn reclaim_background(&mut self) -> Progress {
        let engine = self.engine;
        engine.measure();
        engine.budget.age_zeros(now_ns());
        let mut progress = Progress::None;
        // Batches of nothing but shared pages, and since when there have been no others.
        let (mut shared_batches, mut since_ns) = (0, 0);
        if engine.is_over_start()
            && now_ns() >= self.give_up_until_ns.max(engine.unmovable_until_ns.load(Ordering::Relaxed))
        {
            while engine.is_over_stop() {
                engine.pager.stats().count(Counter::ReclaimBackground);
                let evicted = self.evict(BACKGROUND_BATCH);
                let is_shared = self.unshare_refused();
                if evicted == Progress::None {
                    if shared_batches == 0 {
                        since_ns = now_ns();
                    }
                    shared_batches += u64::from(is_shared);
                    // What was shared can be moved at the next look at it, a lap later, unless a device holds it.
                    let is_seen_twice =
                        shared_batches * BACKGROUND_BATCH as u64 > 2 * engine.pager.resident();
                    if is_shared && !is_seen_twice || self.wait_for_frames() {
                        continue;
                    }
                    if is_seen_twice {
                        let rest_ns = (now_ns() - since_ns) * REST_AFTER_LAP;
                        engine.unmovable_until_ns.store(now_ns() + rest_ns, Ordering::Relaxed);
                    }
                    // As in `make_memory_direct`.
                    engine.measure();
                    if engine.is_over_start() {
                        self.give_up();
                        self.engine.explain_over_budget();
                    }
                    break;
                }
                (progress, shared_batches) = (Progress::Some, 0);
                engine.budget.refresh(engine.pager);
            }
        }
        if self.shrink_pool() == Progress::Some {
            progress = Progress::Some;
        }
        self.tidy_pool();
        self.forget_heirless();
        self.discard_empty_clusters();
        self.retry_full_areas();
        if progress == Progress::None {
            self.send_writes();
        }
        self.collect_writes(Wait::No);
        self.trim_frames();
        engine.publish_gauges();
        progress
    }

    /// One batch out of the program, and as many parked pages to where they stay.
    pub(crate) fn evict(&mut self, max: usize) -> Progress {
        self.engine.evicting.fetch_add(1, Ordering::Relaxed);
        // What calls hold is passed over, and not chosen again for some time. More than that is somebody else's to wait for:
        // a program that holds more than its budget goes over it.
        let progress = (0..HELD_BATCHES_MAX).find_map(|_| self.evict_batch(max)).unwrap_or(Progress::None);
        self.engine.evicting.fetch_sub(1, Ordering::Relaxed);
        progress
    }

    /// None if there were only pages that calls hold.
    fn evict_batch(&mut self, max: usize) -> Option<Progress> {
        let pager = self.engine.pager;
        let shared = self.engine.map.shared(self.index);
        if !self.engine.evictions_allowed() {
            return Some(Progress::None);
        }
        pager.begin_evict(&mut self.batch, max);
        let mut spared = 0;
        if self.engine.handover.is_some() {
            let mut held = 0;
            guard::rooms::for_each_held(|range| {
                for (at, victim) in self.batch.victims().iter().enumerate() {
                    held |= u64::from(range.contains(victim.page)) << at;
                }
            });
            spared = pager.spare(&mut self.batch, held);
        }
        let count = self.batch.len();
        for (outgoing, victim) in self.outgoing.iter_mut().zip(self.batch.victims()) {
            *outgoing = Outgoing {
                page: victim.page,
                frame: pager.cache().pointer(victim.frame),
                backing: victim.backing,
                taken: Taken::Busy,
                is_shared: false,
            };
        }
        // SAFETY: `begin_evict` gave each victim a frame of ours and locked its page, which we serve.
        unsafe { self.engine.pages.take(&mut self.outgoing[..count]) };
        let mut taken = 0;
        for (outgoing, victim) in self.outgoing.iter().zip(self.batch.victims()) {
            (victim.taken, victim.backing) = (outgoing.taken, outgoing.backing);
            taken += usize::from(outgoing.taken != Taken::Busy);
            // Protected to be copied, and then not taken: where calls of the program's can't wait for us, only what owns a slot
            // may stay so.
            let is_protected = outgoing.taken == Taken::Busy && !self.engine.frames_move;
            if is_protected && self.engine.handover.is_some() && !victim.keeps_slot() {
                self.engine.pages.unprotect(victim.page);
            }
            // Shared since a fork, it would stay: what is protected can't be made our own without a fault.
            if outgoing.is_shared && victim.keeps_slot() && self.engine.pages.unprotect(victim.page) {
                pager.leave_slot(victim);
            }
        }
        pager.park(&mut self.batch);
        drop(shared);
        self.outgoing[count..].iter_mut().for_each(|outgoing| outgoing.is_shared = false);
        let placed = self.place(if count == 0 { 0 } else { self.engine.pager.config.parked_max });
        self.collect_writes(Wait::No);
        self.trim_frames();
        self.engine.budget.refresh(self.engine.pager);
        if taken > 0 || placed > 0 {
            return Some(Progress::Some);
        }
        self.sees_shared = self.outgoing.iter().any(|outgoing| outgoing.is_shared);
        (spared == 0).then_some(Progress::None)
    }

    /// Pages that are shared since a fork, or pinned: what is only shared can be made ours. In the keeper, with no lock held:
    /// the kernel may have to fault them in. Whether there were any.
    fn unshare_refused(&self) -> bool {
        let mut shared =
            self.outgoing.iter().filter(|outgoing| outgoing.is_shared).map(|outgoing| outgoing.page);
        let Some(mut first) = shared.next() else { return false };
        let mut end = first.plus(1);
        for page in shared.chain([PageIndex(0)]) {
            if page != end {
                self.engine.pages.unshare(PageRange::new(first, end));
                first = page;
            }
            end = page.plus(1);
        }
        true
    }

    /// Places the oldest parked pages until at most `keep` are parked. Returns how many left.
    fn place(&mut self, keep: u32) -> u32 {
        let (mut left, mut busy) = (0, 0);
        while self.engine.pager.cache().usage().parked > keep && busy < 64 {
            if self.writes.is_full() && !self.send_writes() {
                break;
            }
            let _shared = self.engine.map.shared(self.index);
            match self.engine.pager.place_oldest(self.scratch, &mut self.writes) {
                Placed::Done | Placed::Queued => left += 1,
                Placed::Busy => busy += 1,
                Placed::Nothing => break,
                Placed::NowhereToGo => {
                    self.engine.explain_full();
                    break;
                }
            }
        }
        self.send_if_worthwhile();
        left
    }

    /// Sends what waits once it makes a write of a decent size. What stays is in frames, where a fault finds
    /// it; the keeper sends it when it has nothing better to do.
    fn send_if_worthwhile(&mut self) {
        // At most a sixteenth of the frames waits in each thread.
        let worthwhile = (self.engine.pager.cache().count() / 16).min(WRITE_WORTHWHILE) as usize;
        if self.writes.len() >= worthwhile {
            self.send_writes();
        }
    }

    /// Gives memory that lies behind free frames back, but for what the next faults need. Whether there was any.
    fn trim_frames(&self) -> bool {
        let pager = self.engine.pager;
        let mut trimmed = false;
        while let Some((first, count)) = pager.cache().take_surplus(BACKED_KEPT) {
            // SAFETY: the frames were free, and `take_surplus` gave them to us: nobody needs their bytes.
            let dropped =
                unsafe { self.engine.pages.drop_memory(pager.cache().pointer(first), count as usize) };
            let backing =
                if dropped.is_ok() && self.engine.frames_move { Backing::Hole } else { Backing::Memory };
            (first.0..first.0 + count).for_each(|frame| pager.cache().put(FrameIndex(frame), backing));
            if backing == Backing::Memory {
                break;
            }
            trimmed = true;
        }
        trimmed
    }

    /// A fault needs a frame and none is free: place parked pages, or wait for a write.
    fn free_a_frame(&mut self) {
        if self.trim_frames() {
            return;
        }
        self.send_writes();
        if self.place(self.engine.pager.cache().usage().parked.saturating_sub(8)) > 0 {
            self.collect_writes(Wait::No);
            return;
        }
        self.collect_writes(Wait::One);
        let put_back = {
            let _shared = self.engine.map.shared(self.index);
            match self.engine.pager.put_back() {
                Some(ticket) => {
                    self.install(ticket);
                    true
                }
                None => false,
            }
        };
        if !put_back {
            // Other threads have all frames in use and are about to return them.
            farpage_os::clock::sleep_ns(50_000);
        }
    }

    // ---- pool ---------------------------------------------------------------------------------------

    /// Writes the pool's oldest objects to an area until it is below its threshold.
    fn shrink_pool(&mut self) -> Progress {
        let mut progress = Progress::None;
        for _ in 0..4096 {
            if self.writes.is_full() && !self.send_writes() {
                break;
            }
            let shared = self.engine.map.shared(self.index);
            let shrunk = self.engine.pager.shrink(self.page, &mut self.writes);
            drop(shared);
            match shrunk {
                Shrunk::Enough => break,
                Shrunk::Queued => progress = Progress::Some,
                Shrunk::Busy => {}
                Shrunk::NoFrame => {
                    self.send_writes();
                    self.collect_writes(Wait::One);
                    if !self.back_a_free_frame() {
                        break;
                    }
                }
            }
        }
        self.send_if_worthwhile();
        progress
    }

    fn back_a_free_frame(&self) -> bool {
        let pager = self.engine.pager;
        self.trim_frames();
        let Some((frame, backing)) = pager.cache().take() else { return false };
        // SAFETY: the frame was free and is ours.
        let backed = backing == Backing::Memory
            || unsafe { self.engine.pages.give_memory(pager.cache().pointer(frame)) }.is_ok();
        pager.cache().put(frame, if backed { Backing::Memory } else { Backing::Hole });
        backed
    }

    /// Tells the disks of a few clusters that became empty. Without any lock: it may take milliseconds.
    fn discard_empty_clusters(&self) {
        let pager = self.engine.pager;
        let areas = (0..pager.areas().count()).map(|area| AreaId(area as u8));
        for area in areas {
            for _ in 0..DISCARDS_MAX {
                let Some(run) = pager.areas().take_discard(area) else { break };
                if self.engine.devices.discard(run) {
                    pager.stats().add(Counter::Discarded, u64::from(run.count));
                }
                pager.areas().discarded(run);
            }
        }
    }

    /// An area was full; perhaps the disk or another process has made room. What the dead had is free again before it is
    /// needed: else an area that grows would grow with every process that ever ran.
    fn retry_full_areas(&mut self) {
        let now = now_ns();
        if now >= self.retry_areas_at_ns {
            self.retry_areas_at_ns = now + RETRY_AREAS_NS;
            self.engine.reap_dead_processes();
            self.engine.pager.areas().reopen();
            self.engine.pager.areas().note_used();
            self.engine.protections.inspect(|protections| protections.count_mappings());
        }
    }

    /// Children may have gone.
    fn forget_heirless(&self) {
        let _shared = self.engine.map.shared(self.index);
        fork::forget_heirless(self.engine);
    }

    /// Moves objects together where blocks are sparse, and gives free blocks back.
    fn tidy_pool(&mut self) {
        let pager = self.engine.pager;
        let usage = pager.pool().usage();
        // A fork must not find the pool half changed.
        let _shared = self.engine.map.shared(self.index);
        // An eighth of the pool being waste is worth some memcpy.
        if usage.bytes > usage.payload_bytes + usage.bytes / 8 {
            let moved = pager.pool().compact(256);
            pager.stats().add(Counter::PoolMoved, moved as u64);
        }
        while let Some(range) = pager.pool().take_released() {
            let base = self.engine.pool_base.wrapping_add(range.start);
            // SAFETY: `take_released` gave us a free block of the pool's data, which starts at `pool_base`;
            // nobody allocates in it until `released`.
            let _ = unsafe { farpage_os::memory::drop_pages(base, range.len()) };
            pager.pool().released(range);
        }
    }

    // ---- writes -------------------------------------------------------------------------------------

    /// Sends what waits for slots. False if it could not be: then the pages are parked again.
    fn send_writes(&mut self) -> bool {
        while !self.writes.is_empty() {
            let Some(at) = self.free_request() else { return false };
            let node = self.node.unwrap_or_else(farpage_os::numa::current_node);
            let since_ns = now_ns();
            let shared = self.engine.map.shared(self.index);
            let pager = self.engine.pager;
            let request = pager.assign(self.index.0, node, &mut self.writes).or_else(|| {
                (0..SOURCES_OF_SLOTS).find_map(|source| {
                    self.find_slots(source)
                        .then(|| pager.assign(self.index.0, node, &mut self.writes))
                        .flatten()
                })
            });
            let Some(request) = request else {
                pager.park_again(&mut self.writes);
                drop(shared);
                self.engine.explain_full();
                return false;
            };
            drop(shared);
            self.in_flight[at] = Some(InFlight { request, since_ns, result: None });
            self.engine.writes_under_way.fetch_add(1, Ordering::Relaxed);
            self.send(at, request);
        }
        true
    }

    /// Where slots may come from when there are none, one source after the other. Whether there may be some now.
    fn find_slots(&self, source: u32) -> bool {
        let pager = self.engine.pager;
        match source {
            0 => pager.release_kept(64, |page| _ = self.engine.pages.unprotect(page)) > 0,
            1 => fork::forget_heirless(self.engine),
            _ => self.engine.reap_dead_processes(),
        }
    }

    fn free_request(&mut self) -> Option<usize> {
        for wait in [Wait::No, Wait::One] {
            if let Some(at) = self.in_flight.iter().position(Option::is_none) {
                return Some(at);
            }
            self.collect_writes(wait);
        }
        self.in_flight.iter().position(Option::is_none)
    }

    fn send(&mut self, at: usize, request: WriteRequest) {
        let first = request.run().first;
        let cluster = first.offset() / CLUSTER_SLOTS;
        if let Err(error) = self.engine.devices.prepare(first.area(), cluster) {
            return self.ended(at, Err(error));
        }
        let cache = self.engine.pager.cache();
        let mut segments = [Segment { base: core::ptr::null_mut() }; SEGMENTS_MAX];
        for (segment, frame) in segments.iter_mut().zip(request.frames()) {
            segment.base = cache.pointer(*frame).cast();
        }
        let request = Request {
            op: Op::Write,
            offset: first.byte_offset(),
            segments: &segments[..request.frames().len()],
            token: at as u64,
        };
        let area = first.area();
        let back_end = self.back_ends.get_or_make(area, || self.engine.back_end(area));
        // SAFETY: frames of a write request are ours until `write_done`, have memory, and nobody writes them.
        let sent = unsafe { back_end.submit(&request) };
        back_end.flush();
        if back_end.is_synchronous() {
            self.note_latency(area, at, u64::MAX);
        }
        if sent.is_err() {
            // Its table is as long as ours: it can't be full. Treat it as a failed write all the same.
            self.ended(at, Err(IoError::EIO));
        }
    }

    /// Collects what the devices have finished, and settles it.
    fn collect_writes(&mut self, wait: Wait) {
        let mut done = [Completion::EMPTY; WRITES_MAX];
        let mut wait = wait;
        let is_news = self.has_writes();
        for area in 0..AREAS_MAX {
            let Some(back_end) = self.back_ends.get(AreaId(area as u8)) else { continue };
            if back_end.in_flight() == 0 {
                continue;
            }
            let before = now_ns();
            let count = back_end.complete(wait, &mut done);
            let was_noted = back_end.is_synchronous();
            // Whoever had to wait has found it the moment it was done.
            let looked_ns = if now_ns() - before > BLOCKED_NS { u64::MAX } else { self.looked_ns };
            for completion in done.iter().take(count).filter(|_| !was_noted) {
                self.note_latency(AreaId(area as u8), completion.token as usize, looked_ns);
            }
            wait = Wait::No;
            for completion in done.iter().take(count) {
                self.ended(completion.token as usize, completion.result);
            }
        }
        if is_news {
            self.looked_ns = now_ns();
        }
        for at in 0..WRITES_MAX {
            self.settle_write(at);
        }
    }

    /// Tells the order of areas how long a write took that has just been found done. The ring doesn't say when that
    /// was: after `looked_ns`, and if that is long ago this is only a bound.
    fn note_latency(&self, area: AreaId, at: usize, looked_ns: u64) {
        let Some(write) = self.in_flight[at] else { return };
        let now = now_ns();
        let took_ns = now - write.since_ns;
        let is_exact = now.saturating_sub(looked_ns.max(write.since_ns)) * 4 <= took_ns;
        let took = if is_exact { Took::Exactly(took_ns) } else { Took::AtMost(took_ns) };
        self.engine.pager.areas().note_latency(area, took);
    }

    fn ended(&mut self, at: usize, result: Result<(), IoError>) {
        let Some(write) = &mut self.in_flight[at] else { return };
        let first = write.request.run().first;
        write.result = Some(result.map_err(|error| {
            if error.is_no_space() {
                return AreaState::Full;
            }
            let packed = pack_io_error(first.area().0, first.offset(), error.errno().unwrap_or(EIO as u16));
            self.engine.record.notice(Notice::WriteError, packed);
            AreaState::ReadOnly
        }));
        self.settle_write(at);
    }

    fn settle_write(&mut self, at: usize) {
        let Some(InFlight { request, result: Some(result), .. }) = &mut self.in_flight[at] else { return };
        let _shared = self.engine.map.shared(self.index);
        if self.engine.pager.write_done(request, *result) == WriteProgress::Finished {
            if *result == Err(AreaState::Full) {
                self.engine.explain_full();
            }
            self.in_flight[at] = None;
            self.engine.writes_under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Settles what the devices have finished, if this thread has any writes under way.
    pub fn finish_writes(&mut self, wait: Wait) {
        if self.has_writes() {
            self.collect_writes(wait);
        }
    }

    /// Whether any area has a write under way.
    pub fn has_writes(&self) -> bool {
        self.in_flight.iter().any(Option::is_some)
    }
}
