//! Readahead in the live engine. Two threads named `farpage-ahead` bring windows in, so that the program goes
//! through one window while the next one is made ready.
//!
//! The thread that serves a fault serves the faulting page first. Windows wait in a short queue. A window
//! that finds the queue full isn't read. The pages of a batch are gathered next to each other, in memory of
//! the thread's own. So one read and one UFFDIO_COPY take a whole run, and only parked pages need a frame. Up
//! to four batches are being read before the first of them is mapped.
// UNSAFETY: pages are brought into raw memory, as the kernel and the devices see it.

use crate::session::devices::BackEnds;
use crate::worker::{Progress, Worker};
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::cache::Backing;
use farpage_core::pager::{Fate, Opening, Ticket};
use farpage_core::readahead::Plan;
use farpage_core::readahead::streams::{CATCH_UP_MAX, Window};
use farpage_core::sync::{Lock, rank};
use farpage_core::table::entry::State;
use farpage_core::units::{AREAS_MAX, AreaId, PAGE_BYTES, PageBytes, PageIndex, PageRange, SlotIndex};
use farpage_io::{Backend, Completion, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_os::{futex, memory};

/// Pages in one batch, the unit in which a plan is locked and read: as many as one read request takes.
const BATCH: usize = SEGMENTS_MAX;
/// Batches that one thread has in flight at once. The largest window fits, so that all of its pages are
/// locked at once. A page that isn't locked yet, and that the program touches, would be a read of its own.
/// That page would also be a hole in the reads of its neighbours.
const BATCHES: usize = 4;
/// Slots of other pages that a request reads along at most between two slots that it needs. A separate
/// request would take longer.
const OTHERS_BETWEEN: u32 = 8;
/// Slots of other pages that one batch reads along at most.
const OTHERS_MAX: usize = 32;
/// Batches that a readahead thread evicts at most to make headroom for one batch that it brings in.
const BATCHES_FOR_HEADROOM: usize = 4;
/// Windows that can wait in the queue.
const QUEUE: usize = 64;

/// Whether a thread that reads ahead may evict pages to make headroom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaim {
    /// The thread has no other work, so it may evict.
    Allowed,
    /// The thread serves faults, so it stops reading ahead instead.
    Forbidden,
}

/// Whose thread serves a fault, and then reads ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The faulting thread itself, a thread of the program.
    Program,
    /// An engine thread.
    Engine,
}

struct Ring {
    plans: [Option<Plan>; QUEUE],
    first: usize,
    count: usize,
}

/// Windows that wait for the readahead threads. The queue's lock is an innermost one: no other lock is taken
/// under it.
pub struct AheadQueue {
    ring: Lock<Ring, { rank::LAST }>,
    bell: AtomicU32,
}

impl Default for AheadQueue {
    fn default() -> Self {
        AheadQueue::new()
    }
}

impl AheadQueue {
    /// An empty queue.
    pub const fn new() -> AheadQueue {
        let ring = Ring { plans: [None; QUEUE], first: 0, count: 0 };
        AheadQueue { ring: Lock::new(ring), bell: AtomicU32::new(0) }
    }

    /// Puts a window at the end, and wakes one thread. A full queue drops the window.
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
        // Ordering: Release pairs with the Acquire in `bell`: a thread that sees the new number finds the
        // window.
        self.bell.fetch_add(1, Ordering::Release);
        futex::wake(&self.bell, 1);
    }

    /// Takes out the window that has waited longest.
    pub fn pop(&self) -> Option<Plan> {
        let mut ring = self.ring.lock();
        let at = ring.first;
        let plan = ring.plans[at].take()?;
        ring.first = (at + 1) % QUEUE;
        ring.count -= 1;
        Some(plan)
    }

    /// Returns a number that changes with each window.
    pub fn bell(&self) -> u32 {
        // Ordering: Acquire, as in `push`.
        self.bell.load(Ordering::Acquire)
    }

    /// Wakes all threads that wait, so that they look for other work.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        futex::wake(&self.bell, u32::MAX >> 1);
    }

    /// Waits until the bell's number differs from `seen`, or `ns` have passed.
    pub fn wait(&self, seen: u32, ns: u64) {
        futex::wait_for(&self.bell, seen, ns);
    }
}

/// Memory and back ends with which a thread reads ahead. Each is made when it is first needed.
pub(crate) struct AheadMemory {
    /// Memory in which neighbouring pages of the batches are gathered. Null until needed.
    pages: *mut PageBytes,
    /// Back ends that only read. The thread waits for their completions.
    readers: BackEnds,
    /// Bit n: in area n, slots of other pages are no longer read along, because one of them may be
    /// unreadable.
    unbridged: u32,
}

impl AheadMemory {
    pub(crate) const fn new(readers: BackEnds) -> AheadMemory {
        AheadMemory { pages: core::ptr::null_mut(), readers, unbridged: 0 }
    }

    /// Makes sure that there is memory to gather pages in. False if none can be had.
    fn prepare(&mut self) -> bool {
        const BYTES: usize = BATCHES * (BATCH + OTHERS_MAX) * PAGE_BYTES;
        if self.pages.is_null()
            && let Ok(base) = memory::reserve(BYTES)
        {
            // SAFETY: only engine code uses this memory, and a child makes an engine of its own.
            if unsafe { memory::keep_from_children(base, BYTES) }.is_ok() {
                self.pages = base.cast();
            }
        }
        !self.pages.is_null()
    }

    /// Page `at` of the batch `turn`.
    fn page(&self, turn: usize, at: usize) -> *mut PageBytes {
        assert!(turn < BATCHES && at < BATCH && !self.pages.is_null());
        self.pages.wrapping_add(turn * BATCH + at)
    }

    /// Memory into which slot number `at` of those that the batch `turn` reads along is read.
    fn others(&self, turn: usize, at: usize) -> *mut PageBytes {
        assert!(turn < BATCHES && at < OTHERS_MAX && !self.pages.is_null());
        self.pages.wrapping_add(BATCHES * BATCH + turn * OTHERS_MAX + at)
    }

    /// The bytes of one page of a batch, to fill or to read.
    #[expect(clippy::mut_from_ref, reason = "raw memory; see Safety")]
    fn bytes(&self, turn: usize, at: usize) -> &mut [u8; PAGE_BYTES] {
        // SAFETY: the page is in bounds, by `page`. The memory stays mapped for good, and belongs to this
        // thread alone. A device writes only to pages that are pending, and callers ask only for pages that
        // aren't. No two references to one page are alive at once, because each caller drops its own.
        unsafe { &mut (*self.page(turn, at)).0 }
    }
}

/// Pages in flight, in address order. The page of ticket n is gathered in page n of the batch.
type Tickets = [Option<Ticket>];

/// A batch that is being read.
struct Reading {
    /// Index of its plan in [`OnTheWay::plans`].
    of: usize,
    is_under_way: bool,
    tickets: [Option<Ticket>; BATCH],
    /// The batch's page into which the slot of page n is read. Pages that share a slot are read into one of
    /// them.
    read_into: [u8; BATCH],
    /// Bit n: a slot was read into page n.
    read: u64,
    /// Bit n: a slot is being read into page n.
    pending: u64,
    /// The pages of the request whose first page is n, one bit each.
    requests: [u64; BATCH],
    /// Bit n: some of the batch's pages are read from area n.
    areas: u32,
    /// Bit n: the request whose first page is n reads slots of other pages along.
    bridges: u64,
    /// Slots of other pages that the batch reads along.
    others: usize,
}

impl Reading {
    const NONE: Reading = Reading {
        of: 0,
        is_under_way: false,
        tickets: [const { None }; BATCH],
        read_into: [0; BATCH],
        read: 0,
        pending: 0,
        requests: [0; BATCH],
        areas: 0,
        bridges: 0,
        others: 0,
    };
}

/// A plan that is being carried out.
struct Carried {
    opening: Opening,
    /// All of its batches have been begun.
    is_begun: bool,
}

/// Plans that one thread carries out, and their batches.
struct OnTheWay {
    /// At most one plan is being begun. Every other plan here is begun, and some of its batches are still
    /// being read.
    plans: [Option<Carried>; 2],
    batches: [Reading; BATCHES],
    /// Index of the batch that is begun next. From this index on, round the array, the batches are in the
    /// order in which they were begun.
    turn: usize,
}

impl OnTheWay {
    fn new() -> OnTheWay {
        OnTheWay { plans: [None, None], batches: [const { Reading::NONE }; BATCHES], turn: 0 }
    }

    /// Whether another plan may be begun.
    fn has_place(&self) -> bool {
        self.plans.iter().any(Option::is_none) && !self.batches[self.turn].is_under_way
    }

    /// The index of the oldest batch that is being read.
    fn oldest(&self) -> Option<usize> {
        (0..BATCHES).map(|at| (self.turn + at) % BATCHES).find(|at| self.batches[*at].is_under_way)
    }

    /// Takes out a plan that is done.
    fn take_done(&mut self) -> Option<Opening> {
        let batches = &self.batches;
        let is_read = |at: usize| !batches.iter().any(|batch| batch.of == at && batch.is_under_way);
        let mut plans = self.plans.iter_mut().enumerate();
        let done = plans.find_map(|(at, plan)| plan.take_if(|plan| plan.is_begun && is_read(at)));
        done.map(|plan| plan.opening)
    }
}

/// Gathered tickets whose pages are neighbours, so that one call can map them.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Index of the batch.
    turn: usize,
    first: usize,
    count: usize,
}

impl Worker {
    /// Decides what to read ahead because of a fault. Queues a window of a walk, or a plan for pages on an
    /// area, for the readahead threads. Returns the plan that is left for the time after the fault is served.
    /// A thread of the program itself brings in only a catch-up, and queues any other plan. A catch-up is the
    /// next pages of a walk that is too fast for the readahead threads. Under the map lock.
    pub(crate) fn plan_ahead(&self, ticket: &mut Ticket, server: Server) -> Option<Plan> {
        let advice = self.engine.pager.plan_ahead(ticket);
        let Some(plan) = advice.plan else {
            let late = advice.late?;
            // In `segv` mode bytes are written through a file. A thread of the program hasn't got that file
            // in its table.
            let may_install = !self.engine.mode().installs_by_file() && late.count > 0;
            return match server {
                Server::Program => may_install.then_some(Plan::CatchUp(late)),
                Server::Engine => self.engine.ahead.pop(),
            };
        };
        let is_far = matches!(plan, Plan::Stream(_) | Plan::Rest(_)) || ticket.is_on_area();
        if is_far {
            // The plan is queued now, so that the other thread wakes up while this one serves the fault.
            self.engine.ahead.push(plan);
            return None;
        }
        Some(plan)
    }

    /// Queues what to read ahead because of a fault on a page that another thread is bringing in. Under the
    /// map lock.
    pub(crate) fn plan_joined(&self, page: PageIndex) {
        if let Some(plan) = self.engine.pager.plan_joined(page) {
            self.engine.ahead.push(plan);
        }
    }

    /// Carries a plan out as far as memory allows. With [`Reclaim::Allowed`], carries out the plans that wait
    /// in the queue as well. Without the map lock.
    pub fn bring(&mut self, plan: Plan, reclaim: Reclaim) {
        let mut way = OnTheWay::new();
        let (mut next, mut may_go_on) = (Some(plan), true);
        loop {
            if let Some(plan) = next.take() {
                may_go_on = self.begin_plan(&mut way, plan, reclaim);
            } else if let Some(oldest) = way.oldest() {
                self.land_batch(&mut way, oldest);
            } else {
                return;
            }
            // The next plan begins here, so that the device has work while the last batches of this plan are
            // mapped. Beginning it after them costs a walk from disk about an eighth of its speed.
            if reclaim == Reclaim::Allowed && may_go_on && way.has_place() {
                next = self.engine.ahead.pop();
            }
        }
    }

    /// Begins all batches of a plan, as far as there is headroom. Maps batches that were begun earlier
    /// meanwhile. Returns whether another plan should be begun beside this one. The condition is that there
    /// was headroom for all of this plan, and that some of it is still being read. Plans with nothing to read
    /// would delay the mapping of pages that were already read.
    fn begin_plan(&mut self, way: &mut OnTheWay, plan: Plan, reclaim: Reclaim) -> bool {
        if !self.ahead.prepare() {
            self.engine.pager.close_ahead(Opening::new(plan));
            return false;
        }
        let at = way.plans.iter().position(Option::is_none).expect("there is a place for a plan");
        way.plans[at] = Some(Carried { opening: Opening::new(plan), is_begun: false });
        // If a read of one batch fits below the limit, the device begins with it. Headroom is made meanwhile.
        let mut may_wait = self.engine.pager.is_on_area(&plan) && !self.engine.is_near_limit();
        let has_headroom = loop {
            self.land_batch(way, way.turn);
            // Several threads bring in a batch each, so threads that begin just below the limit end above it.
            // So the memory between the mark where eviction starts and the limit is not for readahead. See
            // `make_headroom` for the exception. Headroom is made before the batches in flight are mapped,
            // because the device works on them meanwhile. The other order makes a walk from disk about a
            // tenth slower, and lengthens its longest waits.
            if !may_wait && !self.has_headroom(reclaim) {
                break false;
            }
            // A fault's read waits behind what the device already has. So only one batch is in flight beside
            // it, and the read waits no longer than one batch takes.
            if self.engine.faults_reading.load(Ordering::Relaxed) > 0 {
                while let Some(oldest) = way.oldest() {
                    self.land_batch(way, oldest);
                }
            }
            let may_be_more = self.begin_batch(way, at);
            if core::mem::take(&mut may_wait) {
                self.has_headroom(reclaim);
            }
            if !may_be_more {
                break true;
            }
        };
        if let Some(plan) = &mut way.plans[at] {
            plan.is_begun = true;
        }
        self.close_done(way);
        has_headroom && way.plans[at].is_some()
    }

    fn close_done(&self, way: &mut OnTheWay) {
        while let Some(opening) = way.take_done() {
            self.engine.pager.close_ahead(opening);
        }
    }

    /// Brings in what a walk comes to next, if there is headroom, in the thread that faulted. The stack may
    /// be small. Without the map lock.
    pub(crate) fn catch_up(&mut self, window: Window) {
        assert!(
            !self.engine.mode().installs_by_file(),
            "pages are mapped through a file that this thread hasn't got"
        );
        if self.engine.is_near_limit() || !self.ahead.prepare() {
            return self.engine.budget.ring();
        }
        let mut opening = Opening::new(Plan::CatchUp(window));
        let mut tickets = [const { None }; CATCH_UP_MAX as usize];
        {
            let _shared = self.engine.map.shared(self.index);
            self.lock_batch(&mut opening, &mut tickets);
            self.load_batch(&mut opening, &mut tickets, 0);
        }
        self.engine.pager.close_ahead(opening);
    }

    /// Returns whether more of a plan may be brought in, evicting for it if `reclaim` allows. If not, tells
    /// the keeper.
    fn has_headroom(&mut self, reclaim: Reclaim) -> bool {
        let has = !self.engine.wants_headroom() || reclaim == Reclaim::Allowed && self.make_headroom();
        if !has {
            self.engine.budget.ring();
        }
        has
    }

    /// Evicts until memory is below the mark where the keeper starts to evict. Gives up after a few batches,
    /// or when nothing can be evicted. The batches are as large as the keeper's: smaller ones interrupt the
    /// other CPUs as often for less memory. Returns whether the mark was reached, or the limit at least isn't
    /// near.
    fn make_headroom(&mut self) -> bool {
        for _ in 0..BATCHES_FOR_HEADROOM {
            self.engine.budget.refresh(self.engine.pager);
            if !self.engine.wants_headroom() {
                return true;
            }
            if self.evict(self.engine.background_batch()) == Progress::None {
                break;
            }
        }
        // The program has to wait for each page that a window leaves out, one fault at a time. So the plan
        // goes on above the mark, as long as the limit isn't near.
        !self.engine.is_near_limit()
    }

    /// Locks the next batch of a plan, brings in what isn't on an area, and begins to read the rest. Returns
    /// whether the plan may have more pages.
    fn begin_batch(&mut self, way: &mut OnTheWay, of: usize) -> bool {
        let OnTheWay { plans, batches, turn } = way;
        let at = *turn;
        let opening = &mut plans[of].as_mut().expect("the plan is being begun").opening;
        let shared = self.engine.map.shared(self.index);
        batches[at].of = of;
        let count = self.lock_batch(opening, &mut batches[at].tickets);
        self.load_batch(opening, &mut batches[at].tickets, at);
        drop(shared);
        // The rest lies on areas. As with any read, the lock of each page keeps changes of its mapping
        // waiting.
        self.submit_batch(batches, at);
        // If nothing is being read, the next batch can use the same memory.
        if batches[at].is_under_way {
            *turn = (at + 1) % BATCHES;
        }
        count == BATCH
    }

    /// Locks as many pages of the plan as fit in `tickets`. Returns how many it locked. Under the map lock.
    fn lock_batch(&self, opening: &mut Opening, tickets: &mut Tickets) -> usize {
        let mut count = 0;
        while count < tickets.len()
            && let Some(ticket) = self.engine.pager.lock_ahead(opening)
        {
            tickets[count] = Some(ticket);
            count += 1;
        }
        let page = |at: usize| tickets[at].as_ref().map(Ticket::page);
        if count > 1 && page(0) > page(count - 1) {
            tickets[..count].reverse();
        }
        count
    }

    /// Brings in every page of a batch that isn't on an area. Under the map lock.
    fn load_batch(&mut self, opening: &mut Opening, tickets: &mut Tickets, turn: usize) {
        let pager = self.engine.pager;
        let mut run = Run { turn, ..Run::default() };
        for at in 0..tickets.len() {
            let Some(ticket) = tickets[at].take_if(|ticket| !ticket.is_on_area()) else {
                continue;
            };
            let is_there = ticket.fate() == Fate::Park && matches!(ticket.before(), State::Parked { .. });
            if !is_there
                && pager.load_ahead(&ticket, self.ahead.bytes(turn, at), &mut self.scratch.decoder).is_err()
            {
                pager.give_up_ahead(opening, ticket);
            } else {
                self.land(opening, tickets, ticket, at, &mut run);
            }
        }
        self.map_run(opening, tickets, run);
    }

    /// Waits until a batch has been read, and brings its pages in. Does nothing if the batch isn't being
    /// read.
    fn land_batch(&mut self, way: &mut OnTheWay, turn: usize) {
        if !way.batches[turn].is_under_way {
            return;
        }
        self.collect_batch(&mut way.batches, turn);
        let there = self.unpack_batch(&way.batches[turn], turn);
        let OnTheWay { plans, batches, .. } = way;
        let Reading { of, is_under_way, tickets, read, bridges, others, .. } = &mut batches[turn];
        let opening = &mut plans[*of].as_mut().expect("a plan stays until its batches are read").opening;
        let shared = self.engine.map.shared(self.index);
        let pager = self.engine.pager;
        let mut run = Run { turn, ..Run::default() };
        for at in 0..BATCH {
            let Some(ticket) = tickets[at].take() else { continue };
            let is_there = there & 1 << at != 0;
            if !is_there || pager.check_ahead(&ticket, self.ahead.bytes(turn, at)).is_err() {
                pager.give_up_ahead(opening, ticket);
            } else {
                self.land(opening, tickets, ticket, at, &mut run);
            }
        }
        self.map_run(opening, tickets, run);
        (*is_under_way, *read, *bridges, *others) = (false, 0, 0, 0);
        drop(shared);
        self.close_done(way);
    }

    /// Unpacks the pages of a batch from the slots that were read. Bit n of the result: page n was unpacked.
    /// The caller still has to check that its bytes are what was written.
    fn unpack_batch(&mut self, reading: &Reading, turn: usize) -> u64 {
        let (pager, mut there) = (self.engine.pager, 0_u64);
        let into = |at: usize| usize::from(reading.read_into[at]);
        let is_read = |at: usize| reading.read & 1 << into(at) != 0;
        let tickets = || (0..BATCH).filter_map(|at| Some((at, reading.tickets[at].as_ref()?)));
        // The page into which a slot was read is unpacked in place, over the slot's bytes. So that page comes
        // last.
        for (at, ticket) in tickets().filter(|(at, _)| is_read(*at) && into(*at) != *at) {
            let (slot, page) = (self.ahead.bytes(turn, into(at)), self.ahead.bytes(turn, at));
            let unpacked = pager.unpack_ahead(ticket, slot, page, &mut self.scratch.decoder);
            there |= u64::from(unpacked.is_ok()) << at;
        }
        for (at, ticket) in tickets().filter(|(at, _)| is_read(*at) && into(*at) == *at) {
            let unpacked = pager.unpack_into(ticket, self.ahead.bytes(turn, at), self.scratch);
            there |= u64::from(unpacked.is_ok()) << at;
        }
        there
    }

    /// Parks a page that was gathered, or adds it to the run of pages that are mapped next.
    fn land(&self, opening: &mut Opening, tickets: &mut Tickets, ticket: Ticket, at: usize, run: &mut Run) {
        if ticket.fate() == Fate::Park {
            return self.park_ahead(opening, ticket, run.turn, at);
        }
        let continues = run.count > 0 && at == run.first + run.count && {
            let last = tickets[at - 1].as_ref();
            last.is_some_and(|last| last.page().plus(1) == ticket.page())
        };
        if !continues {
            self.map_run(opening, tickets, *run);
            *run = Run { first: at, count: 0, ..*run };
        }
        tickets[at] = Some(ticket);
        run.count += 1;
    }

    fn park_ahead(&self, opening: &mut Opening, mut ticket: Ticket, turn: usize, at: usize) {
        let pager = self.engine.pager;
        if !matches!(ticket.before(), State::Parked { .. }) {
            if !self.back(&mut ticket) {
                return pager.give_up_ahead(opening, ticket);
            }
            let frame = ticket.frame().expect("a page to park has a frame");
            // SAFETY: the ticket owns the frame, and the frame has memory. Nobody else knows the frame.
            unsafe { pager.cache().bytes_mut(frame) }.copy_from_slice(self.ahead.bytes(turn, at));
        }
        pager.settle_parked(opening, ticket);
    }

    /// Maps a run with as few calls as the kernel allows.
    fn map_run(&self, opening: &mut Opening, tickets: &mut Tickets, run: Run) {
        let pager = self.engine.pager;
        let mut at = run.first;
        while at < run.first + run.count {
            let Some(first) = &tickets[at] else { return };
            let pages = PageRange::of(first.page(), (run.first + run.count - at) as u64);
            // SAFETY: the pages were gathered in this thread's own memory, one after the other. This thread
            // holds their locks.
            let installed = unsafe { self.engine.pages.install_run(pages, self.ahead.page(run.turn, at)) };
            let end = at + installed.unwrap_or(0) as usize;
            while at < end
                && let Some(ticket) = tickets[at].take()
            {
                pager.settle_ahead(opening, ticket, Backing::Memory);
                at += 1;
            }
            // The page is there already, or the mapping doesn't allow the page now.
            if at < run.first + run.count
                && let Some(ticket) = tickets[at].take()
            {
                pager.give_up_ahead(opening, ticket);
                at += 1;
            }
        }
    }

    /// Begins to read the tickets' slots. One request reads neighbouring slots, and bridges gaps of a few
    /// slots of other pages.
    fn submit_batch(&mut self, reading: &mut [Reading; BATCHES], turn: usize) {
        let mut order = Order::default();
        let Reading { tickets, read_into, .. } = &mut reading[turn];
        for (at, ticket) in tickets.iter().enumerate() {
            if let Some(slot) = ticket.as_ref().and_then(Ticket::slot) {
                read_into[at] = order.insert(slot, at as u8);
            }
        }
        let mut rest = order.all();
        reading[turn].is_under_way = !rest.is_empty();
        while !rest.is_empty() {
            let may_bridge = self.ahead.unbridged & 1 << rest[0].0.area().0 == 0;
            let others_max = if may_bridge { OTHERS_MAX - reading[turn].others } else { 0 };
            let count = self.neighbours(rest, others_max);
            self.submit_read(reading, turn, &rest[..count]);
            rest = &rest[count..];
        }
    }

    /// Returns how many of these slots, from the first on, one request can read. The slots lie in one area
    /// and side by side on its device. At most [`OTHERS_BETWEEN`] slots of other pages lie between two of
    /// them, and `others_max` in all.
    fn neighbours(&self, slots: &[(SlotIndex, u8)], others_max: usize) -> usize {
        let (start, _) = slots[0];
        let slots_from_start = |slot: SlotIndex| (slot.offset() - start.offset()) as usize + 1;
        let follows = |(at, pair): &(usize, &[(SlotIndex, u8)])| {
            let (before, slot) = (pair[0].0, pair[1].0);
            slot.area() == start.area()
                && slot.offset() - before.offset() <= 1 + OTHERS_BETWEEN
                && slots_from_start(slot) <= SEGMENTS_MAX.min(at + 2 + others_max)
        };
        let mut count = 1 + slots.windows(2).enumerate().take_while(follows).count();
        let wanted = slots_from_start(slots[count - 1].0) as u32;
        let beside = self.engine.pager.areas().beside(start, wanted) as usize;
        while slots_from_start(slots[count - 1].0) > beside.max(1) {
            count -= 1;
        }
        count
    }

    fn submit_read(&mut self, reading: &mut [Reading; BATCHES], turn: usize, slots: &[(SlotIndex, u8)]) {
        let (first, area) = (slots[0].0, slots[0].0.area());
        let mut segments = [Segment { base: core::ptr::null_mut() }; SEGMENTS_MAX];
        let (mut length, mut pages) = (0, 0);
        for (slot, at) in slots {
            let place = (slot.offset() - first.offset()) as usize;
            for segment in &mut segments[length..place] {
                segment.base = self.ahead.others(turn, reading[turn].others).cast();
                reading[turn].others += 1;
            }
            segments[place].base = self.ahead.page(turn, *at as usize).cast();
            length = place + 1;
            pages |= 1 << at;
        }
        reading[turn].bridges |= u64::from(length > slots.len()) << slots[0].1;
        // There is at most one request for each page, so the request's first page names it.
        let token = u64::from(slots[0].1) | (turn as u64) << 32;
        let offset = first.byte_offset();
        let request = Request { op: Op::Read, offset, segments: &segments[..length], token };
        reading[turn].requests[slots[0].1 as usize] = pages;
        reading[turn].pending |= pages;
        reading[turn].areas |= 1 << area.0;
        loop {
            let engine = self.engine;
            let reader = self.ahead.readers.get_or_make(area, || engine.back_end(area));
            // SAFETY: the segments are this thread's own memory. Nobody touches them until `collect_batch`
            // has waited for all of the batch's requests. Each page is in one request.
            if unsafe { reader.submit(&request) }.is_ok() {
                // Each request is flushed at once, so that the device begins while the next requests are
                // made. One call for all of them makes a walk a tenth slower.
                reader.flush();
                return;
            }
            self.collect_reads(reading, area);
        }
    }

    /// Waits for all requests of a batch.
    fn collect_batch(&mut self, reading: &mut [Reading; BATCHES], turn: usize) {
        // Only the areas of this batch are waited for: a device that has only another plan's reads may be
        // slower.
        let areas = core::mem::take(&mut reading[turn].areas);
        for area in (0..AREAS_MAX as u8).filter(|area| areas & 1 << area != 0).map(AreaId) {
            while reading[turn].pending != 0
                && self.ahead.readers.get(area).is_some_and(|reader| reader.in_flight() > 0)
            {
                self.collect_reads(reading, area);
            }
        }
    }

    /// Waits for at least one read of this area.
    fn collect_reads(&mut self, reading: &mut [Reading; BATCHES], area: AreaId) {
        let mut done = [Completion::EMPTY; 16];
        let Some(reader) = self.ahead.readers.get(area) else { return };
        let count = reader.complete(Wait::One, &mut done);
        for completion in &done[..count] {
            let (at, turn) = (completion.token as u32, completion.token >> 32);
            let of = &mut reading[turn as usize];
            let pages = of.requests[at as usize];
            of.pending &= !pages;
            match completion.result {
                Ok(()) => of.read |= pages,
                // The slot that can't be read may be another page's.
                Err(_) => self.ahead.unbridged |= u32::from(of.bridges & 1 << at != 0) << area.0,
            }
        }
    }
}

/// Slots of a batch in ascending order, each with the index of its page.
struct Order {
    slots: [(SlotIndex, u8); BATCH],
    count: usize,
}

impl Default for Order {
    fn default() -> Self {
        Order { slots: [(SlotIndex::from_raw(0), 0); BATCH], count: 0 }
    }
}

impl Order {
    /// Inserts a slot. Most slots come in ascending order. Returns the index of the page into which the slot
    /// is read: an earlier page that has the same slot, or `at`.
    fn insert(&mut self, slot: SlotIndex, at: u8) -> u8 {
        let mut place = self.count;
        while place > 0 && self.slots[place - 1].0 > slot {
            place -= 1;
        }
        if place > 0 && self.slots[place - 1].0 == slot {
            return self.slots[place - 1].1;
        }
        self.slots.copy_within(place..self.count, place + 1);
        self.slots[place] = (slot, at);
        self.count += 1;
        at
    }

    fn all(&self) -> &[(SlotIndex, u8)] {
        &self.slots[..self.count]
    }
}

const _: () = assert!(BATCH == u64::BITS as usize, "a bit for each page of a batch");

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(way: &mut OnTheWay, at: usize, first: u64) {
        let plan = Plan::Pages(PageRange::of(PageIndex(first), 8));
        way.plans[at] = Some(Carried { opening: Opening::new(plan), is_begun: false });
    }

    fn begin(way: &mut OnTheWay, of: usize) {
        (way.batches[way.turn].of, way.batches[way.turn].is_under_way) = (of, true);
        way.turn = (way.turn + 1) % BATCHES;
    }

    #[test]
    fn plan_is_done_when_all_of_it_is_begun_and_read_and_another_has_its_place_then() {
        let mut way = OnTheWay::new();
        carried(&mut way, 0, 7);
        (0..BATCHES).for_each(|_| begin(&mut way, 0));
        assert!(!way.has_place(), "no batch is free");
        assert_eq!(way.oldest(), Some(0));
        way.batches[0].is_under_way = false;
        assert!(way.has_place() && way.take_done().is_none());
        carried(&mut way, 1, 9);
        way.plans[0].as_mut().unwrap().is_begun = true;
        begin(&mut way, 1);
        assert_eq!((way.oldest(), way.has_place()), (Some(1), false));
        (1..BATCHES).for_each(|at| way.batches[at].is_under_way = false);
        let plan = |first: u64| Some(Plan::Pages(PageRange::of(PageIndex(first), 8)));
        assert_eq!(way.take_done().map(|opening| *opening.plan()), plan(7));
        // The second plan's batch is read, but not all of the plan is begun.
        way.batches[0].is_under_way = false;
        assert!(way.take_done().is_none() && way.oldest().is_none() && way.has_place());
        way.plans[1].as_mut().unwrap().is_begun = true;
        assert_eq!(way.take_done().map(|opening| *opening.plan()), plan(9));
    }
}
