//! Readahead under way: the plans of the live engine, carried out a page at a time, with other operations in
//! between. A plan waits for its turn. The plan's pages are locked together and come in one by one, from the
//! pool or from devices that are slow, fail and lie. The program must not see any of this.

use crate::ops::{Next, Op};
use crate::program::NotThere;
use crate::space::Space;
use crate::world::World;
use farpage_core::cache::Backing;
use farpage_core::pager::{Fate, Opening, Step, Ticket};
use farpage_core::readahead::Plan;
use farpage_core::table::entry::State;
use farpage_core::units::{FrameIndex, PageBytes, PageIndex};
use farpage_io::Op as Direction;

/// Pages that are locked together, at most.
const BATCH_MAX: u64 = 20;

/// A page that is being brought in.
struct Page {
    ticket: Ticket,
    bytes: Box<PageBytes>,
    place: Place,
}

/// The progress of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The page's bytes are still in the pool, in a frame or on a device.
    Away,
    /// The device has been asked. The value is the request's token.
    Asked(u64),
    /// The device has answered, but the bytes aren't checked yet.
    Read,
    /// The page's bytes are loaded.
    Here,
    /// The page is in the program's memory.
    Mapped,
}

/// A plan that is being carried out.
pub(crate) struct AheadOp {
    opening: Opening,
    pages: Vec<Page>,
    /// Whether the operation is inside the map lock.
    inside: bool,
}

impl AheadOp {
    /// Calls `visit` with the token of each request that the operation waits for.
    pub(crate) fn for_each_token(&self, mut visit: impl FnMut(u64)) {
        for page in &self.pages {
            if let Place::Asked(token) = page.place {
                visit(token);
            }
        }
    }

    /// Returns the number of pages that the operation may soon make resident.
    pub(crate) const fn pages_in_flight(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Adds the frames that the operation holds. Returns how many of them have memory.
    pub(crate) fn holds(&self, frames: &mut Vec<FrameIndex>) -> i64 {
        let tickets = self.pages.iter().map(|page| &page.ticket);
        // A parked page's frame counts as the page's.
        let held = tickets.filter(|ticket| !matches!(ticket.before(), State::Parked { .. }));
        held.filter_map(|ticket| Some((ticket.frame()?, !ticket.needs_backing())))
            .map(|(frame, is_backed)| {
                frames.push(frame);
                i64::from(is_backed)
            })
            .sum()
    }
}

impl Space {
    /// Starts the plan that a fault leads to, if there is one.
    pub(crate) fn plan_ahead(&self, world: &World, step: &mut Step) {
        let (Step::Zero(ticket) | Step::Install(ticket) | Step::Load(ticket) | Step::Read(ticket)) = step
        else {
            return;
        };
        let advice = self.pager.plan_ahead(ticket);
        if let Some(plan) = advice.plan.or(advice.late.map(Plan::CatchUp)) {
            self.begin_ahead(world, plan);
        }
    }

    /// Starts the plan of a fault whose page is already on its way, if there is one.
    pub(crate) fn plan_joined(&self, world: &World, page: PageIndex) {
        if let Some(plan) = self.pager.plan_joined(page) {
            world.saw("plan of who waits");
            self.begin_ahead(world, plan);
        }
    }

    fn begin_ahead(&self, world: &World, plan: Plan) {
        world.note(|| format!("{} reads ahead: {plan:?}", self.number));
        world.saw(match plan {
            Plan::Pages(_) => "plan Pages",
            Plan::Slots { .. } => "plan Slots",
            Plan::Stream(_) => "plan Stream",
            Plan::CatchUp(_) => "plan CatchUp",
            Plan::Rest(_) => "plan Rest",
        });
        if world.is_ending() || world.random.percent(5) {
            // The plan is dropped as if the queue were full.
            return world.saw("ahead dropped");
        }
        let op = AheadOp { opening: Opening::new(plan), pages: Vec::new(), inside: false };
        self.ops.borrow_mut().push(Op::Ahead(Box::new(op)));
    }

    pub(crate) fn step_ahead(&self, world: &World, mut ahead: Box<AheadOp>) -> Next {
        if ahead.pages.is_empty() {
            // Pages that no thread has asked for aren't brought in over the limit.
            if self.pager.resident() > world.profile.limit_pages && !world.is_ending() {
                world.saw("ahead dropped");
                return Next::Done;
            }
            return self.begin_batch(world, ahead);
        }
        // An operation that waits for devices isn't inside the map lock.
        if !ahead.inside {
            let is_read = |page: &Page| matches!(page.place, Place::Asked(token) if world.is_finished(token));
            let asked = |page: &Page| matches!(page.place, Place::Asked(_));
            if let Some(page) = ahead.pages.iter_mut().find(|page| is_read(page)) {
                let Place::Asked(token) = page.place else { unreachable!("found as such") };
                self.read_ahead_done(world, page, token);
                return Next::Go(Op::Ahead(ahead));
            }
            if ahead.pages.iter().any(asked) || !self.enter() {
                return Next::Wait(Op::Ahead(ahead));
            }
            ahead.inside = true;
        }
        let near = |page: &Page| !(matches!(page.place, Place::Away) && page.ticket.is_on_area());
        if let Some(at) = ahead.pages.iter().position(near) {
            let page = ahead.pages.swap_remove(at);
            if let Some(page) = self.land_ahead(world, &mut ahead.opening, page) {
                ahead.pages.push(page);
            }
        } else if !self.ask_ahead(world, &mut ahead) {
            return Next::Wait(Op::Ahead(ahead));
        }
        if ahead.inside && ahead.pages.is_empty() {
            ahead.inside = false;
            self.leave();
        }
        Next::Go(Op::Ahead(ahead))
    }

    fn begin_batch(&self, world: &World, mut ahead: Box<AheadOp>) -> Next {
        if !self.enter() {
            return Next::Wait(Op::Ahead(ahead));
        }
        // At the end of a run no page is locked. The plan is closed, like a plan that finds no headroom.
        let most = if world.is_ending() { 0 } else { world.random.within(1, BATCH_MAX) as usize };
        while ahead.pages.len() < most
            && let Some(ticket) = self.pager.lock_ahead(&mut ahead.opening)
        {
            ahead.pages.push(Page { ticket, bytes: Box::new(PageBytes::ZERO), place: Place::Away });
        }
        if ahead.pages.is_empty() {
            self.pager.close_ahead(ahead.opening);
            self.leave();
            return Next::Done;
        }
        ahead.inside = true;
        Next::Go(Op::Ahead(ahead))
    }

    /// Asks the devices for all pages that are left. The bytes are read into the operation's own memory.
    /// False if the devices accept no more requests now.
    fn ask_ahead(&self, world: &World, ahead: &mut AheadOp) -> bool {
        for page in &mut ahead.pages {
            let slot = page.ticket.slot().expect("a slot to read");
            let base = page.bytes.0.as_mut_ptr();
            let frame = FrameIndex(0);
            match world.submit_at(self, Direction::Read, slot, core::iter::once(frame), |_| base) {
                Some(token) => page.place = Place::Asked(token),
                None => break,
            }
        }
        let asked = ahead.pages.iter().any(|page| matches!(page.place, Place::Asked(_)));
        if asked {
            world.saw("ahead read");
            ahead.inside = false;
            self.leave();
        }
        asked
    }

    fn read_ahead_done(&self, world: &World, page: &mut Page, token: u64) {
        page.place = match world.finish(token) {
            Ok(()) => Place::Read,
            Err(error) => {
                world.saw("ahead read error");
                world
                    .note(|| format!("{} {:?} was not read ahead: {error}", self.number, page.ticket.page()));
                // A pattern that is never a valid page, so each check of the bytes fails.
                page.bytes.0.fill(0x5a);
                Place::Read
            }
        };
    }

    /// Returns whether the bytes read are the page, and unpacks a packed page. The page is unpacked in place,
    /// or from a copy of the slot as for another page of the slot.
    fn is_whole(&self, world: &World, page: &mut Page) -> bool {
        let Page { ticket, bytes, .. } = page;
        let unpacked = self.with_scratch(|scratch| {
            if !ticket.is_packed() {
                Ok(())
            } else if world.random.percent(50) {
                world.saw("ahead unpacked beside");
                let slot = bytes.0;
                self.pager.unpack_ahead(ticket, &slot, &mut bytes.0, &mut scratch.decoder)
            } else {
                world.saw("ahead unpacked in place");
                self.pager.unpack_into(ticket, &mut bytes.0, scratch)
            }
        });
        unpacked.is_ok() && self.pager.check_ahead(ticket, &bytes.0).is_ok()
    }

    /// Takes one page a step further. Returns `None` once the page has arrived or was given up.
    fn land_ahead(&self, world: &World, opening: &mut Opening, mut page: Page) -> Option<Page> {
        match page.place {
            Place::Away => {
                let is_there =
                    matches!(page.ticket.before(), State::Parked { .. }) && page.ticket.fate() == Fate::Park;
                if !is_there {
                    let loaded = self.with_scratch(|scratch| {
                        self.pager.load_ahead(&page.ticket, &mut page.bytes.0, &mut scratch.decoder)
                    });
                    loaded.expect("the pool has the bytes that were stored");
                }
                page.place = Place::Here;
                Some(page)
            }
            Place::Read => {
                if self.is_whole(world, &mut page) {
                    page.place = Place::Here;
                    return Some(page);
                }
                // A refused pack stays as it was read, as in `read_finished`.
                assert!(
                    page.ticket.is_packed()
                        || page.bytes.0 != *self.program.borrow().truth(page.ticket.page()),
                    "whole, but refused"
                );
                world.saw("ahead lie noticed");
                self.pager.give_up_ahead(opening, page.ticket);
                None
            }
            Place::Here if page.ticket.fate() == Fate::Park => {
                self.park_ahead(world, opening, page);
                None
            }
            Place::Here => self.map_ahead(world, opening, page),
            Place::Mapped => {
                let page_index = page.ticket.page();
                self.pager.settle_ahead(opening, page.ticket, Backing::Memory);
                world.saw("ahead mapped");
                self.wake(page_index, &world.random);
                None
            }
            Place::Asked(_) => unreachable!("it waits outside the map lock"),
        }
    }

    fn park_ahead(&self, world: &World, opening: &mut Opening, page: Page) {
        let mut ticket = page.ticket;
        if !matches!(ticket.before(), State::Parked { .. }) {
            if ticket.needs_backing() {
                ticket = self.back(ticket);
            }
            let frame = ticket.frame().expect("a page to park has a frame");
            self.frames.borrow_mut().copy_in(frame, &page.bytes.0);
        }
        world.saw("ahead parked");
        self.pager.settle_parked(opening, ticket);
    }

    fn map_ahead(&self, world: &World, opening: &mut Opening, mut page: Page) -> Option<Page> {
        let at = page.ticket.page();
        let result = if world.refuses() {
            Err(NotThere)
        } else {
            self.program.borrow_mut().install(at, &page.bytes.0)
        };
        if result.is_err() {
            world.saw("ahead refused");
            self.pager.give_up_ahead(opening, page.ticket);
            self.wake(at, &world.random);
            return None;
        }
        if world.random.percent(50) {
            self.wake(at, &world.random);
        }
        page.place = Place::Mapped;
        Some(page)
    }
}
