//! Operations under way: each is a little state machine that goes one call further when its turn comes, so
//! that any two of them can overlap in any order.

use crate::ahead::AheadOp;
use crate::bugs::{DriverBug, strikes};
use crate::change::ChangeOp;
use crate::program::NotThere;
use crate::space::{Slots, Space};
use crate::world::World;
use farpage_core::areas::{AreaState, SlotRun};
use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Access, Batch, Densified, Placed, Shrunk, Step, Taken, Ticket, WriteBatch};
use farpage_core::pager::{WriteProgress, WriteRequest};
use farpage_core::reclaim::recency::Lone;
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::units::{AreaId, FrameIndex, PageIndex, SlotIndex};
use farpage_io::{IoError, Op as Direction};
use std::ops::Range;

/// A thread faulted and nobody has looked at it yet.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub thread: usize,
    pub page: PageIndex,
    pub access: Access,
}

/// What one writer collects.
#[derive(Default)]
pub(crate) struct Writer {
    pub batch: WriteBatch,
}

/// Something under way.
pub(crate) enum Op {
    Fault(FaultOp),
    Ahead(Box<AheadOp>),
    Evict(Box<EvictOp>),
    Write(Box<WriteOp>),
    Change(ChangeOp),
    /// Memory of the pool that is being given back.
    ReleasePool(Range<usize>),
    /// Frames whose memory is being given back.
    ReleaseFrames(u32, u32),
    /// Slots whose device is being told that nobody needs them.
    Discard(SlotRun),
    /// One of these whose thread has no CPU before this moment.
    Starved(Box<Op>, u64),
}

/// What became of an operation's turn.
pub(crate) enum Next {
    /// It went on.
    Go(Op),
    /// It has to wait.
    Wait(Op),
    Done,
}

/// What became of a handler's turn at making memory.
enum Reclaimed {
    GoesOn(Reclaim),
    /// It has to wait.
    Waits(Reclaim),
    Over,
}

/// Whether there is something to evict.
enum Victims {
    Some(Box<EvictOp>),
    None,
    /// A change has the map lock, or wants it.
    NotNow,
}

pub(crate) struct FaultOp {
    page: PageIndex,
    access: Access,
    phase: FaultPhase,
}

enum FaultPhase {
    /// Memory is over the limit: the handler evicts first.
    Reclaim(Reclaim),
    Ask,
    BackToLoad(Ticket),
    Load(Ticket),
    BackToRead(Ticket),
    Read(Ticket),
    /// The only phase with a ticket that isn't inside the map lock.
    Wait(Ticket, u64),
    Zero(Ticket),
    Install(Ticket),
    Unprotect(Ticket),
    Settle(Ticket, Backing),
    Fail(Ticket, SlotIndex),
}

/// What a handler does before it brings a page in.
#[derive(Default)]
struct Reclaim {
    /// Its own eviction, under way.
    evict: Option<Box<EvictOp>>,
    /// Pages that the last one took.
    taken: Option<usize>,
    /// Evictions in a row that took nothing.
    in_vain: u32,
    began: u64,
}

/// Pages that are mapped along with a first touch, at most.
const NEIGHBOURS_MAX: u64 = 3;

/// Evictions in a row that take nothing, after which a handler brings its page in all the same.
const IN_VAIN_MAX: u32 = 8;

/// Ticks after which a handler with [`DriverBug::GiveUpByClock`] gives up.
const LATE_TICKS: u64 = 300;

impl FaultPhase {
    const fn ticket(&self) -> Option<&Ticket> {
        match self {
            FaultPhase::Reclaim(_) | FaultPhase::Ask => None,
            FaultPhase::BackToLoad(ticket)
            | FaultPhase::Load(ticket)
            | FaultPhase::BackToRead(ticket)
            | FaultPhase::Read(ticket)
            | FaultPhase::Wait(ticket, _)
            | FaultPhase::Zero(ticket)
            | FaultPhase::Install(ticket)
            | FaultPhase::Unprotect(ticket)
            | FaultPhase::Fail(ticket, _)
            | FaultPhase::Settle(ticket, _) => Some(ticket),
        }
    }
}

pub(crate) struct EvictOp {
    batch: Batch,
    /// Victims before it have been dealt with.
    at: usize,
    phase: EvictPhase,
    /// Pages that it has taken.
    taken: usize,
}

/// How far an eviction is. Only `Free`, `Copy` and `Drop` of `Install::Copy` can be interrupted: the kernel moves a page by one
/// call.
#[derive(Clone, Copy)]
enum EvictPhase {
    /// The batch is to be write-protected.
    Protect,
    /// Pages are moved out.
    Move,
    /// The next run of pages is made clean.
    Free,
    /// The run up to here is copied.
    Copy(usize),
    /// Of that run, what is still clean is dropped.
    Drop(usize),
}

pub(crate) struct WriteOp {
    request: WriteRequest,
    phase: WritePhase,
}

#[derive(Clone, Copy)]
enum WritePhase {
    Submit,
    Wait(u64),
    Done(Result<(), AreaState>),
}

impl Op {
    /// The requests it waits for.
    pub(crate) fn for_each_token(&self, mut visit: impl FnMut(u64)) {
        match self {
            Op::Fault(FaultOp { phase: FaultPhase::Wait(_, token), .. }) => visit(*token),
            Op::Ahead(ahead) => ahead.for_each_token(visit),
            Op::Starved(op, _) => op.for_each_token(visit),
            Op::Write(write) => {
                if let WritePhase::Wait(token) = write.phase {
                    visit(token);
                }
            }
            _ => {}
        }
    }

    const fn is_fault(&self) -> bool {
        match self {
            Op::Fault(_) => true,
            Op::Starved(op, _) => op.is_fault(),
            _ => false,
        }
    }

    /// Pages that may soon be resident by it, whatever the budget says by then.
    pub(crate) fn pages_in_flight(&self) -> u64 {
        match self {
            Op::Fault(FaultOp { phase: FaultPhase::Reclaim(_), .. }) => 0,
            Op::Fault(FaultOp { phase: FaultPhase::Ask, .. }) => 1 + NEIGHBOURS_MAX,
            Op::Fault(_) => 1,
            Op::Ahead(ahead) => ahead.pages_in_flight(),
            Op::Starved(op, _) => op.pages_in_flight(),
            _ => 0,
        }
    }

    /// Adds what it holds to the lists; returns how many of its frames have memory and no page that counts
    /// them.
    pub(crate) fn holds(
        &mut self,
        frames: &mut Vec<FrameIndex>,
        writing: &mut Vec<FrameIndex>,
        slots: &mut Slots,
    ) -> i64 {
        match self {
            Op::Starved(op, _) => op.holds(frames, writing, slots),
            Op::Fault(FaultOp { phase: FaultPhase::Reclaim(reclaim), .. }) => {
                reclaim.evict.as_mut().map_or(0, |evict| evict.holds(frames))
            }
            Op::Fault(fault) => {
                let Some(ticket) = fault.phase.ticket() else { return 0 };
                let moved = matches!(fault.phase, FaultPhase::Settle(_, Backing::Hole));
                if let State::Parked { .. } = ticket.before() {
                    // Counted as parked. Once moved out it is parked without memory for a moment.
                    return if moved { -1 } else { 0 };
                }
                let Some(frame) = ticket.frame() else { return 0 };
                frames.push(frame);
                i64::from(!ticket.needs_backing() && !moved)
            }
            Op::Ahead(ahead) => ahead.holds(frames),
            Op::Evict(evict) => evict.holds(frames),
            Op::Write(write) => {
                slots.extend(write.request.open().map(|(at, _)| at.slot));
                writing.extend(write.request.frames());
                0
            }
            Op::ReleaseFrames(first, length) => {
                frames.extend((*first..*first + *length).map(FrameIndex));
                i64::from(*length)
            }
            Op::Change(_) | Op::ReleasePool(_) | Op::Discard(_) => 0,
        }
    }
}

impl EvictOp {
    /// Adds the frames it holds; returns how many of them have memory.
    fn holds(&mut self, frames: &mut Vec<FrameIndex>) -> i64 {
        let mut backed = 0;
        for victim in self.batch.victims() {
            frames.push(victim.frame);
            backed += i64::from(victim.taken == Taken::Yes || victim.backing == Backing::Memory);
        }
        backed
    }
}

impl Space {
    /// Gives one operation whose thread has a CPU, drawn at random, its turn. False if there is none or it had to wait.
    pub(crate) fn step_one(&self, world: &World) -> bool {
        let has_cpu = |op: &Op| !matches!(op, Op::Starved(_, until) if world.is_before(*until));
        let can_go: Vec<usize> =
            self.ops.borrow().iter().enumerate().filter(|(_, op)| has_cpu(op)).map(|(at, _)| at).collect();
        if can_go.is_empty() {
            return false;
        }
        let op = self.ops.borrow_mut().swap_remove(can_go[world.random.index(can_go.len())]);
        let op = if let Op::Starved(op, _) = op { *op } else { op };
        let in_flight = op.pages_in_flight();
        self.in_hand.set(self.in_hand.get() + in_flight);
        let next = match op {
            Op::Starved(..) => unreachable!("nobody is starved twice"),
            Op::Fault(fault) => self.step_fault(world, fault),
            Op::Ahead(ahead) => self.step_ahead(world, ahead),
            Op::Evict(evict) => self.step_evict(world, evict),
            Op::Write(write) => self.step_write(world, write),
            Op::Change(change) => self.step_change(world, change),
            Op::ReleasePool(range) => {
                self.release_pool(range);
                Next::Done
            }
            Op::ReleaseFrames(first, length) => {
                for frame in (first..first + length).map(FrameIndex) {
                    self.frames.borrow_mut().empty(frame);
                    self.pager.cache().put(frame, Backing::Hole);
                }
                Next::Done
            }
            Op::Discard(run) => {
                self.discard_slots(run);
                Next::Done
            }
        };
        let (op, went) = match next {
            Next::Go(op) => match world.starves() {
                Some(until) => (Some(Op::Starved(Box::new(op), until)), true),
                None => (Some(op), true),
            },
            Next::Wait(op) => (Some(op), false),
            Next::Done => (None, true),
        };
        self.ops.borrow_mut().extend(op);
        self.in_hand.set(self.in_hand.get() - in_flight);
        went
    }

    /// A handler takes the oldest message, or sometimes another one.
    pub(crate) fn handle_message(&self, world: &World) -> bool {
        let busy = self.ops.borrow().iter().filter(|op| op.is_fault()).count();
        let mut messages = self.messages.borrow_mut();
        if messages.is_empty() || busy >= world.profile.handlers {
            return false;
        }
        let at = if world.random.percent(70) { 0 } else { world.random.index(messages.len()) };
        let Message { page, access, .. } = messages.remove(at).expect("in bounds");
        let phase = FaultPhase::Reclaim(Reclaim { began: world.now(), ..Reclaim::default() });
        self.ops.borrow_mut().push(Op::Fault(FaultOp { page, access, phase }));
        true
    }

    fn step_fault(&self, world: &World, fault: FaultOp) -> Next {
        let FaultOp { page, access, phase } = fault;
        let op = |phase| Op::Fault(FaultOp { page, access, phase });
        match phase {
            FaultPhase::Reclaim(reclaim) => match self.reclaim_direct(world, reclaim) {
                Reclaimed::GoesOn(reclaim) => Next::Go(op(FaultPhase::Reclaim(reclaim))),
                Reclaimed::Waits(reclaim) => Next::Wait(op(FaultPhase::Reclaim(reclaim))),
                Reclaimed::Over => Next::Go(op(FaultPhase::Ask)),
            },
            FaultPhase::Ask => self.ask(world, page, access),
            FaultPhase::BackToLoad(ticket) => Next::Go(op(FaultPhase::Load(self.back(ticket)))),
            FaultPhase::BackToRead(ticket) => Next::Go(op(FaultPhase::Read(self.back(ticket)))),
            FaultPhase::Load(ticket) => {
                let loaded = self.with_scratch(|scratch| self.pager.load(&ticket, &mut scratch.decoder));
                loaded.expect("the pool has the bytes that were stored");
                Next::Go(op(FaultPhase::Install(ticket)))
            }
            FaultPhase::Read(ticket) => {
                let slot = ticket.slot().expect("a slot to read");
                match world.submit(self, Direction::Read, slot, ticket.frame().into_iter()) {
                    Some(token) => {
                        self.leave();
                        Next::Go(op(FaultPhase::Wait(ticket, token)))
                    }
                    None => Next::Wait(op(FaultPhase::Read(ticket))),
                }
            }
            FaultPhase::Wait(ticket, token) => {
                if !world.is_finished(token) || !self.enter() {
                    return Next::Wait(op(FaultPhase::Wait(ticket, token)));
                }
                Next::Go(op(self.read_finished(world, ticket, world.finish(token))))
            }
            FaultPhase::Fail(ticket, slot) => {
                self.program.borrow_mut().page_mut(page).lost = true;
                self.pager.fail(ticket, slot);
                self.leave();
                self.wake(page, &world.random);
                Next::Done
            }
            FaultPhase::Zero(ticket) => {
                let refused = world.refuses();
                let result = if refused { Err(NotThere) } else { self.program.borrow_mut().zero(page) };
                self.installed(world, ticket, result, Backing::Hole)
            }
            FaultPhase::Install(ticket) => self.install(world, ticket),
            FaultPhase::Unprotect(ticket) => {
                // Whatever is there now: the kernel may have dropped it, and lifting is harmless then.
                self.program.borrow_mut().page_mut(page).protected = false;
                let left = Backing::Hole;
                Next::Go(op(FaultPhase::Settle(ticket, left)))
            }
            FaultPhase::Settle(ticket, left) => {
                self.pager.settle_fault(ticket, left);
                self.leave();
                self.wake(page, &world.random);
                Next::Done
            }
        }
    }

    /// Goes one call further with what a handler does while memory is over the limit.
    fn reclaim_direct(&self, world: &World, mut reclaim: Reclaim) -> Reclaimed {
        if let Some(mut evict) = reclaim.evict.take() {
            if self.goes_on(world, &mut evict) {
                reclaim.evict = Some(evict);
                return Reclaimed::GoesOn(reclaim);
            }
            reclaim.taken = Some(evict.taken);
            reclaim.in_vain = if evict.taken > 0 { 0 } else { reclaim.in_vain + 1 };
        }
        let is_over = self.pager.resident() > world.profile.limit_pages;
        if !is_over || world.is_ending() || strikes(DriverBug::NoDirectReclaim) {
            return Reclaimed::Over;
        }
        let is_late = strikes(DriverBug::GiveUpByClock) && world.now() > reclaim.began + LATE_TICKS;
        if reclaim.in_vain >= IN_VAIN_MAX || is_late {
            assert_eq!(reclaim.taken, Some(0), "{} says that nothing can be evicted", self.number);
            world.saw("gave up");
            self.pager.stats().count(Counter::OverBudget);
            self.over_for_a_reason.set(true);
            return Reclaimed::Over;
        }
        match self.batch_to_evict(world) {
            Victims::Some(evict) => {
                world.saw("handler evicts");
                reclaim.evict = Some(evict);
                Reclaimed::GoesOn(reclaim)
            }
            Victims::None => {
                (reclaim.taken, reclaim.in_vain) = (Some(0), reclaim.in_vain + 1);
                self.make_room(world);
                Reclaimed::Waits(reclaim)
            }
            Victims::NotNow => Reclaimed::Waits(reclaim),
        }
    }

    /// Asks the pager what a fault needs.
    fn ask(&self, world: &World, page: PageIndex, access: Access) -> Next {
        let op = |phase| Op::Fault(FaultOp { page, access, phase });
        if !self.enter() {
            return Next::Wait(op(FaultPhase::Ask));
        }
        let mut step = self.pager.fault(page, access);
        world.note(|| format!("{} fault {page:?} {access:?}: {step:?}", self.number));
        self.plan_ahead(world, &mut step);
        let (name, phase) = match step {
            Step::Zero(ticket) => {
                self.zero_neighbours(world, page);
                ("step Zero", Some(FaultPhase::Zero(ticket)))
            }
            Step::Install(ticket) => ("step Install", Some(FaultPhase::Install(ticket))),
            Step::Load(ticket) if ticket.needs_backing() => {
                ("step Load", Some(FaultPhase::BackToLoad(ticket)))
            }
            Step::Load(ticket) => ("step Load", Some(FaultPhase::Load(ticket))),
            Step::Read(ticket) if ticket.needs_backing() => {
                ("step Read", Some(FaultPhase::BackToRead(ticket)))
            }
            Step::Read(ticket) => ("step Read", Some(FaultPhase::Read(ticket))),
            Step::Unprotect(ticket) => ("step Unprotect", Some(FaultPhase::Unprotect(ticket))),
            Step::Joined => {
                self.plan_joined(world, page);
                ("step Joined", None)
            }
            Step::Present => {
                self.wake(page, &world.random);
                ("step Present", None)
            }
            Step::Lost(_) => {
                self.sigbus(page);
                ("step Lost", None)
            }
            Step::NoFrame => {
                world.saw("step NoFrame");
                self.leave();
                self.make_room(world);
                return Next::Wait(op(FaultPhase::Ask));
            }
            Step::Unknown => panic!("{page:?} isn't known"),
        };
        world.saw(name);
        match phase {
            Some(phase) => Next::Go(op(phase)),
            None => {
                self.leave();
                Next::Done
            }
        }
    }

    /// First touches come in runs: some of the pages behind are mapped along with this one.
    fn zero_neighbours(&self, world: &World, page: PageIndex) {
        let end = self.pager.registered_end(page).0.min(page.0 + world.random.below(NEIGHBOURS_MAX + 1));
        for page in (page.0 + 1..end).map(PageIndex) {
            let Some(ticket) = self.pager.lock_absent(page) else { break };
            // Each is an operation of its own, inside the map lock like any other.
            assert!(self.enter_again());
            let phase = FaultPhase::Zero(ticket);
            self.ops.borrow_mut().push(Op::Fault(FaultOp { page, access: Access::Read, phase }));
        }
    }

    pub(crate) fn back(&self, mut ticket: Ticket) -> Ticket {
        self.frames.borrow_mut().back(ticket.frame().expect("a frame"));
        ticket.set_backed();
        ticket
    }

    /// A read is over: were these the bytes? If not, the device must have failed or lied.
    fn read_finished(&self, world: &World, ticket: Ticket, result: Result<(), IoError>) -> FaultPhase {
        let slot = ticket.slot().expect("a slot");
        match result {
            Err(error) if error.is_retryable() => return FaultPhase::Read(ticket),
            Err(error) => {
                world.saw("read error");
                world.note(|| format!("{} {:?} could not be read: {error}", self.number, ticket.page()));
                return FaultPhase::Fail(ticket, slot);
            }
            Ok(()) => {}
        }
        if ticket.is_packed() {
            world.saw("fault unpacked");
        }
        match self.with_scratch(|scratch| self.pager.read_done(&ticket, scratch)) {
            Ok(()) => FaultPhase::Install(ticket),
            Err(slot) => {
                let (page, frame) = (ticket.page(), ticket.frame().expect("a frame"));
                // A pack that is refused stays in the frame as it was read: a misdirected write can have put the whole page there.
                assert!(
                    ticket.is_packed()
                        || self.frames.borrow().read(frame) != self.program.borrow().truth(page),
                    "{page:?} came back whole from {slot:?}, but was refused"
                );
                world.lied(slot);
                FaultPhase::Fail(ticket, slot)
            }
        }
    }

    fn install(&self, world: &World, ticket: Ticket) -> Next {
        let (page, frame) = (ticket.page(), ticket.frame().expect("a frame to install"));
        // What can't be moved, because the mapping isn't writable, is copied.
        let copy = self.pager.config.install == Install::Copy || world.random.percent(10);
        let left = if copy { Backing::Memory } else { Backing::Hole };
        let result = if world.refuses() {
            Err(NotThere)
        } else {
            self.program.borrow_mut().install(page, self.frames.borrow().read(frame))
        };
        if result.is_ok() && !copy {
            self.frames.borrow_mut().empty(frame);
        }
        self.installed(world, ticket, result, left)
    }

    /// The kernel has installed a page, and perhaps woken its threads, or refused.
    fn installed(&self, world: &World, ticket: Ticket, result: Result<(), NotThere>, left: Backing) -> Next {
        let page = ticket.page();
        if result.is_err() {
            world.saw("given back");
            self.pager.give_back(ticket);
            self.leave();
            self.wake(page, &world.random);
            return Next::Done;
        }
        if world.random.percent(50) {
            self.wake(page, &world.random);
        }
        Next::Go(Op::Fault(FaultOp { page, access: Access::Read, phase: FaultPhase::Settle(ticket, left) }))
    }

    /// Starts an eviction.
    pub(crate) fn begin_evict(&self, world: &World) -> bool {
        let Victims::Some(evict) = self.batch_to_evict(world) else { return false };
        self.ops.borrow_mut().push(Op::Evict(evict));
        true
    }

    /// Chooses victims, inside the map lock from then on.
    fn batch_to_evict(&self, world: &World) -> Victims {
        if !self.enter() {
            return Victims::NotNow;
        }
        let mut batch = Batch::new();
        if world.random.percent(5) {
            self.pager.lone_victims_are(world.random.pick(&[Lone::Cheap, Lone::Dear]));
        }
        self.pager.begin_evict(&mut batch, world.profile.batch_max);
        // What a system call of the program's would hold.
        if world.random.percent(10) {
            let held = u128::from(world.random.next()) << 64 | u128::from(world.random.next());
            self.pager.spare(&mut batch, held);
        }
        if batch.is_empty() {
            self.leave();
            return Victims::None;
        }
        world.note(|| {
            format!("{} evicts {} pages from {:?}", self.number, batch.len(), batch.victims()[0].page)
        });
        let phase = match (self.pager.config.install == Install::Copy, world.profile.writers_wait) {
            (true, true) => EvictPhase::Protect,
            (true, false) => EvictPhase::Free,
            (false, _) => EvictPhase::Move,
        };
        Victims::Some(Box::new(EvictOp { batch, at: 0, phase, taken: 0 }))
    }

    fn step_evict(&self, world: &World, mut evict: Box<EvictOp>) -> Next {
        if self.goes_on(world, &mut evict) { Next::Go(Op::Evict(evict)) } else { Next::Done }
    }

    /// Goes one call further with an eviction. False if it is over.
    fn goes_on(&self, world: &World, evict: &mut EvictOp) -> bool {
        let count = evict.batch.len();
        let run_end = |at: usize| count.min(at + world.random.within(1, 16) as usize);
        evict.phase = match evict.phase {
            EvictPhase::Protect => {
                self.protect(&mut evict.batch);
                EvictPhase::Free
            }
            EvictPhase::Move if evict.at < count => {
                let end = run_end(evict.at);
                (evict.at..end).for_each(|at| self.move_out(world, &mut evict.batch, at));
                evict.at = end;
                EvictPhase::Move
            }
            EvictPhase::Free if evict.at < count => {
                let end = run_end(evict.at);
                (evict.at..end).for_each(|at| self.free_to_copy(world, &mut evict.batch, at));
                EvictPhase::Copy(end)
            }
            EvictPhase::Move | EvictPhase::Free => {
                evict.taken = evict.batch.victims().iter().filter(|one| one.taken == Taken::Yes).count();
                self.pager.park(&mut evict.batch);
                self.leave();
                return false;
            }
            EvictPhase::Copy(end) => {
                let (mut frames, program) = (self.frames.borrow_mut(), self.program.borrow());
                let run = evict.batch.victims()[evict.at..end].iter();
                run.filter(|victim| victim.taken == Taken::Yes)
                    .for_each(|victim| frames.copy_in(victim.frame, program.bytes(victim.page)));
                EvictPhase::Drop(end)
            }
            EvictPhase::Drop(end) => {
                (evict.at..end).for_each(|at| self.drop_copied(world, &mut evict.batch, at));
                evict.at = end;
                EvictPhase::Free
            }
        };
        true
    }

    fn protect(&self, batch: &mut Batch) {
        let mut program = self.program.borrow_mut();
        for victim in batch.victims() {
            let page = program.page_mut(victim.page);
            page.protected = page.present;
        }
    }

    /// What the kernel answers before anything was done with a page; and its frame is as the eviction needs it.
    fn look(&self, world: &World, batch: &mut Batch, at: usize, wanted: Backing) -> Taken {
        let (mut frames, mut program) = (self.frames.borrow_mut(), self.program.borrow_mut());
        let victim = &mut batch.victims()[at];
        assert_eq!(frames.is_backed(victim.frame), victim.backing == Backing::Memory);
        if victim.backing != wanted {
            match wanted {
                Backing::Memory => frames.back(victim.frame),
                Backing::Hole => frames.empty(victim.frame),
            }
            victim.backing = wanted;
        }
        if world.random.percent(world.profile.gone_percent) {
            // The program had said MADV_FREE here, and the kernel has made use of it.
            program.drop_page(victim.page);
        }
        if !program.page(victim.page).present {
            Taken::Gone
        } else if world.random.percent(world.profile.busy_percent) {
            // A page that was write-protected for the copy stays so: a needless protection only costs a fault.
            Taken::Busy
        } else {
            Taken::Yes
        }
    }

    /// Moves one page out, if the kernel lets us. The kernel moves no page that somebody has pinned.
    fn move_out(&self, world: &World, batch: &mut Batch, at: usize) {
        let taken = self.look(world, batch, at, Backing::Hole);
        let (mut frames, mut program) = (self.frames.borrow_mut(), self.program.borrow_mut());
        let victim = &mut batch.victims()[at];
        victim.taken = taken;
        if taken == Taken::Yes && program.is_pinned(victim.page) {
            world.saw("pinned page refused");
            if !strikes(DriverBug::CopyRefused) {
                victim.taken = Taken::Busy;
                return;
            }
            frames.back(victim.frame);
            frames.copy_in(victim.frame, program.bytes(victim.page));
            victim.backing = Backing::Memory;
            program.remove(victim.page);
        } else if taken == Taken::Yes {
            frames.fill_hole(victim.frame, program.bytes(victim.page));
            program.remove(victim.page);
        }
    }

    /// Makes one page clean: whoever writes to it from here on can be seen.
    fn free_to_copy(&self, world: &World, batch: &mut Batch, at: usize) {
        let taken = self.look(world, batch, at, Backing::Memory);
        let victim = &mut batch.victims()[at];
        victim.taken = taken;
        if taken == Taken::Yes {
            self.program.borrow_mut().free_lazily(victim.page);
        }
    }

    /// The kernel drops one page that was copied, unless somebody has written to it or refers to it. What is left counts as
    /// written, and may be written.
    fn drop_copied(&self, world: &World, batch: &mut Batch, at: usize) {
        let mut program = self.program.borrow_mut();
        let victim = &mut batch.victims()[at];
        if victim.taken != Taken::Yes {
            return;
        }
        let (is_written, is_pinned) = (!program.page(victim.page).clean, program.is_pinned(victim.page));
        if (is_pinned && strikes(DriverBug::DropPinned)) || (is_written && strikes(DriverBug::DropWritten)) {
            program.remove(victim.page);
        } else if !program.drop_clean(victim.page) {
            world.saw(if is_pinned { "pinned page stays" } else { "written page stays" });
            let page = program.page_mut(victim.page);
            (page.protected, page.clean) = (false, false);
            victim.taken = Taken::Busy;
        }
    }

    /// A device or a peer goes on with what it does to a page that it has pinned. False if there is none.
    pub(crate) fn use_pin(&self, world: &World) -> bool {
        let mut program = self.program.borrow_mut();
        let pins = program.pins();
        if pins == 0 {
            return false;
        }
        let pin = world.random.index(pins);
        if world.random.percent(60)
            && let Some(page) = program.late_write(pin, &world.random)
        {
            world.saw("late write");
            world.note(|| format!("{} a device writes to {page:?}", self.number));
        } else {
            program.unpin(pin);
        }
        true
    }

    /// Takes a writer that nobody uses out of its place.
    fn take_writer(&self, world: &World) -> Option<(usize, Box<Writer>)> {
        let mut writers = self.writers.borrow_mut();
        let first = world.random.index(writers.len());
        let count = writers.len();
        let mut order = (0..count).map(|at| (first + at) % count);
        order.find_map(|at| writers[at].take().map(|writer| (at, writer)))
    }

    /// Calls `act` inside the map lock with a writer that nobody uses.
    fn with_writer<T>(&self, world: &World, act: impl FnOnce(&mut WriteBatch) -> T) -> Option<T> {
        let (at, mut writer) = self.take_writer(world)?;
        let result = self.enter().then(|| {
            let result = act(&mut writer.batch);
            self.leave();
            result
        });
        self.writers.borrow_mut()[at] = Some(writer);
        result
    }

    /// Places the oldest parked page.
    pub(crate) fn place(&self, world: &World) -> Option<Placed> {
        let placed = self.with_writer(world, |batch| {
            (!batch.is_full()).then(|| self.with_scratch(|scratch| self.pager.place_oldest(scratch, batch)))
        })??;
        world.saw(match placed {
            Placed::Nothing => "placed Nothing",
            Placed::Done => "placed Done",
            Placed::Queued => "placed Queued",
            Placed::Busy => "placed Busy",
            Placed::NowhereToGo => "placed NowhereToGo",
        });
        if placed != Placed::Nothing {
            world.note(|| format!("{} placed: {placed:?}", self.number));
        }
        Some(placed)
    }

    /// Moves the pool's object that goes first towards an area.
    pub(crate) fn shrink(&self, world: &World) -> bool {
        let shrink = |batch: &mut _| self.with_scratch(|scratch| self.pager.shrink(batch, scratch));
        let shrunk = self.with_writer(world, |batch| (!batch.is_full()).then(|| shrink(batch))).flatten();
        let Some(shrunk) = shrunk else { return false };
        world.saw(match shrunk {
            Shrunk::Enough => "shrunk Enough",
            Shrunk::NoArea => "shrunk NoArea",
            Shrunk::Released => "shrunk Released",
            Shrunk::Queued => "shrunk Queued",
            Shrunk::Busy => "shrunk Busy",
            Shrunk::NoFrame => "shrunk NoFrame",
        });
        if matches!(shrunk, Shrunk::Enough | Shrunk::NoArea) {
            return false;
        }
        world.note(|| format!("{} shrunk: {shrunk:?}", self.number));
        if shrunk == Shrunk::NoFrame
            && let Some((frame, backing)) = self.pager.cache().take()
        {
            if backing == Backing::Hole {
                self.frames.borrow_mut().back(frame);
            }
            self.pager.cache().put(frame, Backing::Memory);
        }
        true
    }

    /// Makes the pool's oldest object denser, or lets time pass.
    pub(crate) fn densify(&self, world: &World) -> bool {
        if world.random.percent(20) {
            self.pager.pool().turn();
            return true;
        }
        let is_old = world.random.percent(50);
        let densified = self.with_scratch(|scratch| self.pager.densify(is_old, scratch));
        world.saw(match densified {
            Densified::Nothing => return false,
            Densified::Shorter => "densified Shorter",
            Densified::AsItWas => "densified AsItWas",
            Densified::Busy => "densified Busy",
            Densified::NoRoom => "densified NoRoom",
        });
        true
    }

    /// Pages in the fullest write batch.
    pub(crate) fn waiting_for_slots(&self) -> usize {
        self.writers.borrow().iter().flatten().map(|writer| writer.batch.len()).max().unwrap_or(0)
    }

    /// Frees slots that pages only keep; nothing is to be heard of writes to those any more.
    pub(crate) fn release_kept(&self, max: u32) -> u32 {
        self.pager.release_kept(max, |page| self.program.borrow_mut().page_mut(page).protected = false)
    }

    /// Gives a write batch slots; if there are none, frees some, or parks the batch again.
    pub(crate) fn assign(&self, world: &World) -> bool {
        let request = self.with_writer(world, |batch| {
            let waiting = batch.len();
            let request = self.pager.assign(world.random.index(4), self.node(), batch);
            if request.is_none() && waiting > 0 && self.release_kept(8) == 0 {
                self.pager.park_again(batch);
                world.note(|| format!("{} no slot: {waiting} parked again", self.number));
                return Err(true);
            }
            request.ok_or(false)
        });
        match request {
            Some(Ok(request)) => {
                world.note(|| format!("{} writes {:?}", self.number, request.run()));
                let write = WriteOp { request, phase: WritePhase::Submit };
                self.ops.borrow_mut().push(Op::Write(Box::new(write)));
                true
            }
            Some(Err(parked)) => {
                if parked {
                    self.put_back(world);
                }
                parked
            }
            None => false,
        }
    }

    /// Parks a write batch again.
    pub(crate) fn park_again(&self, world: &World) -> bool {
        self.with_writer(world, |batch| self.pager.park_again(batch)).is_some()
    }

    fn step_write(&self, world: &World, mut write: Box<WriteOp>) -> Next {
        match write.phase {
            WritePhase::Submit => {
                let frames: Vec<_> = write.request.written().collect();
                let first = write.request.run().first;
                match world.submit(self, Direction::Write, first, frames.into_iter()) {
                    Some(token) => write.phase = WritePhase::Wait(token),
                    None => return Next::Wait(Op::Write(write)),
                }
            }
            WritePhase::Wait(token) if !world.is_finished(token) => return Next::Wait(Op::Write(write)),
            WritePhase::Wait(token) => {
                write.phase = match world.finish(token) {
                    Ok(()) => WritePhase::Done(Ok(())),
                    Err(error) if error.is_retryable() => WritePhase::Submit,
                    Err(error) if error.is_no_space() => WritePhase::Done(Err(AreaState::Full)),
                    Err(_) => WritePhase::Done(Err(AreaState::ReadOnly)),
                }
            }
            WritePhase::Done(result) => {
                if !self.enter() {
                    return Next::Wait(Op::Write(write));
                }
                let progress = self.pager.write_done(&mut write.request, result);
                self.leave();
                match progress {
                    WriteProgress::Finished => {
                        world.saw("write Finished");
                        if result == Err(AreaState::Full) {
                            self.pager.areas().found_no_room(write.request.run().first.area());
                        }
                        return Next::Done;
                    }
                    WriteProgress::Again => {
                        world.saw("write Again");
                        return Next::Wait(Op::Write(write));
                    }
                }
            }
        }
        Next::Go(Op::Write(write))
    }

    /// Takes an empty cluster to be discarded.
    pub(crate) fn begin_discard(&self, world: &World) -> bool {
        let areas = self.pager.areas();
        let run = (0..areas.count()).find_map(|area| areas.take_discard(AreaId(area as u8)));
        if let Some(run) = run {
            world.saw("discard");
            world.note(|| format!("{} discards {run:?}", self.number));
            self.ops.borrow_mut().push(Op::Discard(run));
        }
        run.is_some()
    }

    /// The device forgets the slots. Nobody may have got one of them meanwhile.
    fn discard_slots(&self, run: SlotRun) {
        let mut slots = (0..run.count).map(|at| run.first.plus(at));
        assert!(slots.all(|slot| !self.pager.areas().is_owned(slot)), "{run:?} is being discarded");
        self.pager.stats().add(Counter::Discarded, u64::from(run.count));
        self.pager.areas().discarded(run);
    }

    /// Starts to put the oldest parked page back into the program.
    pub(crate) fn put_back(&self, world: &World) -> bool {
        if !self.enter() {
            return false;
        }
        let Some(ticket) = self.pager.put_back() else {
            self.leave();
            return false;
        };
        let page = ticket.page();
        // There is no other place for it, whatever the budget says.
        self.over_for_a_reason.set(true);
        world.note(|| format!("{} puts {page:?} back", self.number));
        let phase = FaultPhase::Install(ticket);
        self.ops.borrow_mut().push(Op::Fault(FaultOp { page, access: Access::Read, phase }));
        true
    }

    /// No frame is free: what a faulting thread does about it.
    pub(crate) fn make_room(&self, world: &World) {
        self.pager.stats().count(Counter::ReclaimDirect);
        self.surplus(world);
        match self.place(world) {
            Some(Placed::NowhereToGo) => {
                self.put_back(world);
            }
            Some(Placed::Done) => {}
            _ => {
                self.assign(world);
            }
        }
    }

    /// The pool's empty blocks: their memory is given back.
    pub(crate) fn compact(&self, world: &World) -> bool {
        let moved = self.pager.pool().compact(world.random.within(1, 20) as usize);
        self.pager.stats().add(Counter::PoolMoved, moved as u64);
        let range = self.pager.pool().take_released();
        let went = moved > 0 || range.is_some();
        self.ops.borrow_mut().extend(range.map(Op::ReleasePool));
        went
    }

    fn release_pool(&self, range: Range<usize>) {
        for byte in range.clone() {
            // SAFETY: the pool has handed these bytes out and doesn't touch them until `released`.
            unsafe { self.pool_data.add(byte).write(0xe5) };
        }
        self.pager.pool().released(range);
    }

    /// Starts to give the memory of free frames back.
    pub(crate) fn surplus(&self, world: &World) -> bool {
        let run = self.pager.cache().take_surplus(world.random.below(8) as u32);
        let went = run.is_some();
        self.ops.borrow_mut().extend(run.map(|(first, length)| Op::ReleaseFrames(first.0, length)));
        went
    }
}
