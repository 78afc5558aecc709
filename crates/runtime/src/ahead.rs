//! Readahead in the live engine: windows are brought in by a thread of their own, `farpage-ahead`, so that the
//! program goes through one window while the next one is made ready.
//!
//! The thread that serves a fault serves its page first and alone. Windows wait in a short queue; a full queue
//! means that a window isn't read, no more. Pages are gathered in memory of the thread's own, next to each other, so
//! that one read and one UFFDIO_COPY take a whole run, and no frame is needed but for what is parked.
// UNSAFETY: pages are brought into raw memory, as the kernel and the devices see it.

use crate::devices::BackEnds;
use crate::worker::{Progress, Worker};
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::cache::Backing;
use farpage_core::pager::{Access, Fate, Left, Opening, Pager, Ticket};
use farpage_core::readahead::Plan;
use farpage_core::sync::Lock;
use farpage_core::table::entry::State;
use farpage_core::units::{AREAS_MAX, AreaId, PAGE_BYTES, PageBytes, PageRange};
use farpage_io::{Backend, Completion, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_os::{futex, memory};

/// Pages that are on their way at once: what one read request takes.
const BATCH: usize = SEGMENTS_MAX;
/// Pages that are mapped by one call: who is close behind doesn't wait for more.
const RUN_MAX: usize = 16;
/// Batches that a thread that reads ahead evicts for one batch that it brings, at most.
const BATCHES_FOR_ROOM: usize = 4;
/// Pages of one such batch, at least.
const EVICTED_MIN: usize = 16;
/// Windows that wait.
const QUEUE: usize = 64;

/// Whether a thread that reads ahead may evict pages to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaim {
    /// It has nothing better to do.
    Allowed,
    /// It serves faults: it stops instead.
    NotHere,
}

struct Ring {
    plans: [Option<Plan>; QUEUE],
    first: usize,
    count: usize,
}

/// Windows that wait for the thread that reads ahead. Its lock is an innermost one: nothing is done under it.
pub struct AheadQueue {
    ring: Lock<Ring>,
    bell: AtomicU32,
}

impl Default for AheadQueue {
    fn default() -> Self {
        AheadQueue::new()
    }
}

impl AheadQueue {
    /// Empty.
    pub const fn new() -> AheadQueue {
        let ring = Ring { plans: [None; QUEUE], first: 0, count: 0 };
        AheadQueue { ring: Lock::new(ring), bell: AtomicU32::new(0) }
    }

    /// Puts a window at the end, and wakes the thread; a full queue drops it.
    pub fn push(&self, plan: Plan) {
        {
            let mut ring = self.ring.lock();
            if ring.count == QUEUE {
                return;
            }
            let at = (ring.first + ring.count) % QUEUE;
            ring.plans[at] = Some(plan);
            ring.count += 1;
        }
        // Ordering: Release pairs with the Acquire in `bell`: who sees the new number finds the window.
        self.bell.fetch_add(1, Ordering::Release);
        futex::wake(&self.bell, 1);
    }

    /// The window that has waited longest.
    pub fn pop(&self) -> Option<Plan> {
        let mut ring = self.ring.lock();
        let at = ring.first;
        let plan = ring.plans[at].take()?;
        ring.first = (at + 1) % QUEUE;
        ring.count -= 1;
        Some(plan)
    }

    /// A number that changes with each window.
    pub fn bell(&self) -> u32 {
        // Ordering: Acquire, as in `push`.
        self.bell.load(Ordering::Acquire)
    }

    /// Waits for another window, at most `ns`.
    pub fn wait(&self, seen: u32, ns: u64) {
        futex::wait_for(&self.bell, seen, ns);
    }
}

/// What a thread needs to read ahead; made when it first does.
pub(crate) struct AheadMemory {
    /// Neighbouring pages to gather a batch in; null until needed.
    pages: *mut PageBytes,
    /// Back ends for reads alone: their completions are waited for.
    readers: BackEnds,
}

impl AheadMemory {
    pub(crate) const fn new(readers: BackEnds) -> AheadMemory {
        AheadMemory { pages: core::ptr::null_mut(), readers }
    }

    /// Makes sure that there is memory to gather pages in.
    fn prepare(&mut self) -> bool {
        if self.pages.is_null()
            && let Ok(base) = memory::reserve(BATCH * PAGE_BYTES)
        {
            // SAFETY: only engine code uses this memory, and a child makes an engine of its own.
            if unsafe { memory::keep_from_children(base, BATCH * PAGE_BYTES) }.is_ok() {
                self.pages = base.cast();
            }
        }
        !self.pages.is_null()
    }

    fn page(&self, at: usize) -> *mut PageBytes {
        assert!(at < BATCH && !self.pages.is_null());
        self.pages.wrapping_add(at)
    }

    /// One page of the batch, to fill or to read.
    #[expect(clippy::mut_from_ref, reason = "raw memory; see Safety")]
    fn bytes(&self, at: usize) -> &mut [u8; PAGE_BYTES] {
        // SAFETY: in bounds by `page`; mapped for good, and this thread's alone; between two calls of `bring` no
        // device has it, and no two references to one page are alive at once: each caller drops its own.
        unsafe { &mut (*self.page(at)).0 }
    }
}

/// Pages on their way, in address order; each is gathered in the page of its number.
type Tickets = [Option<Ticket>; BATCH];

/// Neighbours among them that have been gathered and can be mapped by one call.
#[derive(Clone, Copy, Default)]
struct Run {
    first: usize,
    count: usize,
}

impl Worker {
    /// What to read ahead because of a fault. Hands it to the threads that do so; returned is what this thread
    /// should do itself when the fault is served: if the program waits for it (`here`), no more than a walk that is too fast
    /// for them comes to next. Under the map lock.
    pub(crate) fn plan_ahead(&self, ticket: &mut Ticket, access: Access, here: bool) -> Option<Plan> {
        let advice = self.engine.pager.plan_ahead(ticket, access);
        let Some(plan) = advice.plan else {
            let late = advice.late?;
            return if here { Some(Plan::CatchUp(late)) } else { self.engine.ahead.pop() };
        };
        let is_far = matches!(plan, Plan::Stream { .. }) || ticket.is_on_area();
        if is_far {
            // Now: the other thread wakes up while this one serves the fault.
            self.engine.ahead.push(plan);
            return None;
        }
        Some(plan)
    }

    /// Carries a plan out as far as memory allows. Without the map lock.
    pub fn bring(&mut self, plan: Plan, reclaim: Reclaim) {
        let mut opening = Opening::new(plan);
        if !self.ahead.prepare() {
            opening.stop();
        }
        loop {
            // Several threads bring a batch each: who begins just below the limit ends above it. So nothing is read
            // ahead into what lies between the mark where eviction starts and the limit.
            let is_full = match opening.plan() {
                Plan::CatchUp(_) => self.engine.is_near_limit(),
                _ => self.engine.is_over_start(),
            };
            if is_full && (reclaim == Reclaim::NotHere || !self.make_room(opening.plan().count() as usize)) {
                self.engine.budget.ring();
                break;
            }
            if !self.bring_batch(&mut opening) {
                break;
            }
        }
        self.engine.pager.close_ahead(opening);
    }

    /// Evicts until memory is below the mark where the keeper starts to, about as much as is going to come: what goes
    /// early comes back by faults. False if that takes long or can't be done.
    fn make_room(&mut self, pages: usize) -> bool {
        for _ in 0..BATCHES_FOR_ROOM {
            self.engine.budget.refresh(self.engine.pager);
            if !self.engine.is_over_start() {
                return true;
            }
            if self.evict(pages.clamp(EVICTED_MIN, BATCH)) == Progress::None {
                return false;
            }
        }
        false
    }

    /// Brings one batch in. Whether there may be more.
    fn bring_batch(&mut self, opening: &mut Opening) -> bool {
        let mut tickets: Tickets = [const { None }; BATCH];
        let mut count = 0;
        let shared = self.engine.map.shared(self.index);
        while count < BATCH
            && let Some(ticket) = self.engine.pager.lock_ahead(opening)
        {
            tickets[count] = Some(ticket);
            count += 1;
        }
        let page = |at: usize| tickets[at].as_ref().map(Ticket::page);
        if count > 1 && page(0) > page(count - 1) {
            tickets[..count].reverse();
        }
        self.load_batch(opening, &mut tickets);
        drop(shared);
        // What is left lies on areas. As with any read, the pages' own locks keep changes of their mappings waiting.
        if tickets.iter().any(Option::is_some) {
            let read = self.read_batch(&tickets);
            let _shared = self.engine.map.shared(self.index);
            self.land_batch(opening, &mut tickets, read);
        }
        count == BATCH
    }

    /// Everything that isn't on an area.
    fn load_batch(&mut self, opening: &mut Opening, tickets: &mut Tickets) {
        let pager = self.engine.pager;
        let mut run = Run::default();
        for at in 0..BATCH {
            let Some(ticket) = tickets[at].take_if(|ticket| !ticket.is_on_area()) else {
                continue;
            };
            let is_there = ticket.fate() == Fate::Park && matches!(ticket.before(), State::Parked { .. });
            if !is_there && pager.load_ahead(&ticket, self.page, self.ahead.bytes(at)).is_err() {
                pager.give_up_ahead(opening, ticket);
            } else {
                self.land(opening, tickets, ticket, at, &mut run);
            }
        }
        self.map_run(opening, tickets, run);
    }

    /// What was read: bit n of `read` says that page n was.
    fn land_batch(&self, opening: &mut Opening, tickets: &mut Tickets, read: u64) {
        let pager = self.engine.pager;
        let mut run = Run::default();
        for at in 0..BATCH {
            let Some(ticket) = tickets[at].take() else { continue };
            if read & 1 << at == 0 || pager.check_ahead(&ticket, self.ahead.bytes(at)).is_err() {
                pager.give_up_ahead(opening, ticket);
            } else {
                self.land(opening, tickets, ticket, at, &mut run);
            }
        }
        self.map_run(opening, tickets, run);
    }

    /// A page was gathered: parks it, or adds it to the run of those that are mapped next.
    fn land(&self, opening: &mut Opening, tickets: &mut Tickets, ticket: Ticket, at: usize, run: &mut Run) {
        if ticket.fate() == Fate::Park {
            return self.park_ahead(opening, ticket, at);
        }
        let continues = run.count > 0 && run.count < RUN_MAX && at == run.first + run.count && {
            let last = tickets[at - 1].as_ref();
            last.is_some_and(|last| {
                last.page().plus(1) == ticket.page() && last.wants_protection() == ticket.wants_protection()
            })
        };
        if !continues {
            self.map_run(opening, tickets, *run);
            *run = Run { first: at, count: 0 };
        }
        tickets[at] = Some(ticket);
        run.count += 1;
    }

    fn park_ahead(&self, opening: &mut Opening, mut ticket: Ticket, at: usize) {
        let pager = self.engine.pager;
        if !matches!(ticket.before(), State::Parked { .. }) {
            if !self.back(&mut ticket) {
                return pager.give_up_ahead(opening, ticket);
            }
            let frame = ticket.frame().expect("a page to park has a frame");
            // SAFETY: the ticket owns the frame, it has memory, and nobody else knows it.
            unsafe { pager.cache().bytes_mut(frame) }.copy_from_slice(self.ahead.bytes(at));
        }
        pager.settle_parked(ticket);
    }

    /// Maps a run by as few calls as the kernel allows.
    fn map_run(&self, opening: &mut Opening, tickets: &mut Tickets, run: Run) {
        let pager = self.engine.pager;
        let mut at = run.first;
        while at < run.first + run.count {
            let Some(first) = &tickets[at] else { return };
            let pages = PageRange::of(first.page(), (run.first + run.count - at) as u64);
            // `segv` mode can't, and says so only page by page.
            let protected = first.wants_protection() && self.engine.protections.is_none();
            // SAFETY: the pages were gathered in this thread's own memory, one after the other; their locks are ours.
            let installed = unsafe { self.engine.pages.install_run(pages, self.ahead.page(at), protected) };
            let end = at + installed.unwrap_or(0) as usize;
            while at < end
                && let Some(ticket) = tickets[at].take()
            {
                pager.settle_fault(ticket, Left { frame: Backing::Memory, protected });
                Pager::mapped_ahead(opening);
                at += 1;
            }
            // Somebody was quicker, or the mapping doesn't allow it now.
            if at < run.first + run.count
                && let Some(ticket) = tickets[at].take()
            {
                pager.give_up_ahead(opening, ticket);
                at += 1;
            }
        }
    }

    /// Reads the tickets' slots, neighbours by one request. Bit n of the answer: page n was read.
    fn read_batch(&mut self, tickets: &Tickets) -> u64 {
        let mut read = 0;
        let mut at = 0;
        while at < BATCH {
            let length = self.neighbours(tickets, at);
            if length > 0 {
                read |= self.submit_read(tickets, at, length);
            }
            at += length.max(1);
        }
        for area in (0..AREAS_MAX as u8).map(AreaId) {
            while self.ahead.readers.get(area).is_some_and(|reader| reader.in_flight() > 0) {
                read |= self.collect_reads(area);
            }
        }
        read
    }

    /// How many tickets from `first` on are in neighbouring slots of one area, side by side on its device.
    fn neighbours(&self, tickets: &Tickets, first: usize) -> usize {
        let slot = |at: usize| tickets.get(at).and_then(Option::as_ref).and_then(Ticket::slot);
        let Some(start) = slot(first) else { return 0 };
        let follows = |count: &u32| {
            slot(first + *count as usize)
                .is_some_and(|slot| slot.area() == start.area() && slot.offset() == start.offset() + count)
        };
        let count = (1..).take_while(follows).count() as u32 + 1;
        self.engine.pager.areas().beside(start, count) as usize
    }

    fn submit_read(&mut self, tickets: &Tickets, first: usize, length: usize) -> u64 {
        let Some(slot) = tickets[first].as_ref().and_then(Ticket::slot) else { return 0 };
        let mut segments = [Segment { base: core::ptr::null_mut() }; SEGMENTS_MAX];
        for (segment, at) in segments.iter_mut().zip(first..first + length) {
            segment.base = self.ahead.page(at).cast();
        }
        let token = (first | length << 32) as u64;
        let request =
            Request { op: Op::Read, offset: slot.byte_offset(), segments: &segments[..length], token };
        let area = slot.area();
        let mut read = 0;
        loop {
            let engine = self.engine;
            let reader = self.ahead.readers.get_or_make(area, || engine.back_end(area));
            // SAFETY: the segments are this thread's own memory, which nobody touches until `read_batch` has waited
            // for all of its requests; each is in one request.
            if unsafe { reader.submit(&request) }.is_ok() {
                return read;
            }
            read |= self.collect_reads(area);
        }
    }

    /// Waits for one read at least.
    fn collect_reads(&mut self, area: AreaId) -> u64 {
        let mut done = [Completion::EMPTY; 16];
        let Some(reader) = self.ahead.readers.get(area) else { return 0 };
        let count = reader.complete(Wait::One, &mut done);
        done[..count]
            .iter()
            .filter(|completion| completion.result.is_ok())
            .map(|completion| {
                let (first, length) = (completion.token as u32, completion.token >> 32);
                (u64::MAX >> (u64::BITS as u64 - length)) << first
            })
            .fold(0, |all, bits| all | bits)
    }
}

const _: () = assert!(BATCH == u64::BITS as usize, "a bit for each page of a batch");
