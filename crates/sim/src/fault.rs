//! Faults under way. A handler thread takes a message and reclaims memory if too much is resident. Then the
//! handler thread asks the pager, and brings the page in from the pool or an area.

use crate::bugs::{DriverBug, strikes};
use crate::evict::{EvictOp, Victims};
use crate::ops::{Next, Op};
use crate::program::NotThere;
use crate::space::Space;
use crate::world::World;
use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Access, Placed, Step, Ticket};
use farpage_core::stats::Counter;
use farpage_core::units::{PageIndex, SlotIndex};
use farpage_io::{IoError, Op as Direction};

/// A fault that no handler thread has taken yet.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub thread: usize,
    pub page: PageIndex,
    pub access: Access,
}

/// The result of a handler thread's turn at direct reclaim.
enum Reclaimed {
    GoesOn(Reclaim),
    /// The handler thread has to wait.
    Waits(Reclaim),
    Over,
}

pub(crate) struct FaultOp {
    page: PageIndex,
    access: Access,
    pub(crate) phase: FaultPhase,
}

pub(crate) enum FaultPhase {
    /// Memory is over the limit, and the handler thread evicts first.
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

/// The direct reclaim of a handler thread before it brings a page in.
#[derive(Default)]
pub(crate) struct Reclaim {
    /// The handler thread's eviction under way.
    pub(crate) evict: Option<Box<EvictOp>>,
    /// Pages that the handler thread's last eviction took.
    taken: Option<usize>,
    /// Evictions in a row that took nothing.
    in_vain: u32,
    began: u64,
}

/// Pages that are mapped along with a first touch, at most.
pub(crate) const NEIGHBOURS_MAX: u64 = 3;

/// Evictions in a row that take nothing before a handler thread gives up and brings its page in anyway.
const IN_VAIN_MAX: u32 = 8;

/// Ticks after which a handler thread with [`DriverBug::GiveUpByClock`] gives up.
const LATE_TICKS: u64 = 300;

impl FaultPhase {
    pub(crate) const fn ticket(&self) -> Option<&Ticket> {
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

impl Space {
    /// Lets a handler thread take the oldest message, or sometimes another one.
    pub(crate) fn handle_message(&self, world: &World) -> bool {
        let busy = self.ops.borrow().iter().filter(|op| op.is_fault()).count();
        let mut messages = self.messages.borrow_mut();
        if messages.is_empty() || busy >= world.profile.handler_threads {
            return false;
        }
        let at = if world.random.percent(70) { 0 } else { world.random.index(messages.len()) };
        let Message { page, access, .. } = messages.remove(at).expect("in bounds");
        let phase = FaultPhase::Reclaim(Reclaim { began: world.now(), ..Reclaim::default() });
        self.ops.borrow_mut().push(Op::Fault(FaultOp { page, access, phase }));
        true
    }

    pub(crate) fn step_fault(&self, world: &World, fault: FaultOp) -> Next {
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
                // The kernel may have dropped the page meanwhile. Lifting the protection is harmless then.
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

    /// Goes one call further with a handler thread's direct reclaim.
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
                world.saw("handler thread evicts");
                reclaim.evict = Some(evict);
                Reclaimed::GoesOn(reclaim)
            }
            Victims::None => {
                (reclaim.taken, reclaim.in_vain) = (Some(0), reclaim.in_vain + 1);
                self.free_a_frame(world);
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
                self.free_a_frame(world);
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

    /// Starts to map some of the pages behind a first touch, because first touches come in runs.
    fn zero_neighbours(&self, world: &World, page: PageIndex) {
        let end = self.pager.registered_end(page).0.min(page.0 + world.random.below(NEIGHBOURS_MAX + 1));
        for page in (page.0 + 1..end).map(PageIndex) {
            let Some(ticket) = self.pager.lock_absent(page) else { break };
            // Each neighbour is an operation of its own, inside the map lock like any other.
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

    /// Checks the bytes of a finished read. If they are wrong, the device must have failed or lied.
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
                // A refused pack stays in the frame as it was read. After a misdirected write, the frame can
                // hold the whole page.
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
        // The kernel can't move a page into a mapping that isn't writable, and pages there are copied. A few
        // pages are copied at random to cover this case.
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

    /// Handles the kernel's answer to an install. If the kernel installed the page, it may have woken the
    /// page's threads; if it refused, the ticket is given back.
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

    /// Starts to put the oldest parked page back into the program. False if there is none.
    pub(crate) fn put_back(&self, world: &World) -> bool {
        if !self.enter() {
            return false;
        }
        let Some(ticket) = self.pager.put_back() else {
            self.leave();
            return false;
        };
        let page = ticket.page();
        // The page has no other place to go, whatever the budget is.
        self.over_for_a_reason.set(true);
        world.note(|| format!("{} puts {page:?} back", self.number));
        let phase = FaultPhase::Install(ticket);
        self.ops.borrow_mut().push(Op::Fault(FaultOp { page, access: Access::Read, phase }));
        true
    }

    /// Tries to free a frame for a faulting thread.
    pub(crate) fn free_a_frame(&self, world: &World) {
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
}
