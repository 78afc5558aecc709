//! The books' half of readahead: which pages a fault brings in, how they are locked, and how they are
//! settled.
//!
//! A page that is read ahead is on its way like any other page: locked, with a ticket. The fault that started
//! the readahead never waits for it. On any failure the ticket is given back and the page is as it was. The
//! fault that needs the page will find out why.
//!
//! A driver opens a plan, locks pages of the plan until no page is left, brings the pages in, and closes the
//! plan. The calls are [`Pager::plan_ahead`], [`Opening::new`], [`Pager::lock_ahead`], [`Pager::load_ahead`]
//! or [`Pager::unpack_ahead`] (of packed pages) and [`Pager::check_ahead`], [`Pager::settle_ahead`] or
//! [`Pager::settle_parked`], [`Pager::close_ahead`].

use super::step::Ticket;
use super::{Pager, pack};
use crate::cache::Backing;
use crate::config::Readahead;
use crate::readahead::streams::{Landed, Seen, WINDOW_MAX};
use crate::readahead::{Advice, Plan};
use crate::stats::Counter;
use crate::table::entry::{State, Stored};
use crate::table::ranges::Range;
use crate::units::{FrameIndex, PAGE_BYTES, PageIndex, SlotIndex, SlotPart};
use crate::zswap::codec::Decoder;

/// Where a page that is read ahead goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Into the program's memory.
    Map,
    /// Into a frame, with a mark. The touch of a marked page is counted.
    Park,
}

/// A plan that is being carried out.
#[derive(Debug)]
pub struct Opening {
    plan: Plan,
    /// Steps of the plan looked at so far. Steps that the walk had gone through before count as looked at.
    step: u32,
    /// Pages locked so far. Pages that the walk had gone through before count as locked.
    locked: u32,
    landed: Landed,
    /// The step of the last page that is out, if the window ends with its range. That page stays parked, so
    /// that the stream is seen when it reaches the page.
    closing_step: Option<u32>,
    /// Whether no frame is free for another page.
    out_of_frames: bool,
    /// Whether the pages of the plan may keep their objects.
    keeps_objects: bool,
}

impl Opening {
    /// Returns an opening of which nothing has been done.
    pub const fn new(plan: Plan) -> Opening {
        let landed = Landed { marker: None, mapped: 0, steps: 0, was_late: false };
        Opening {
            plan,
            step: 0,
            locked: 0,
            landed,
            closing_step: None,
            out_of_frames: false,
            keeps_objects: false,
        }
    }

    /// The plan.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl Pager<'_> {
    /// Returns the pages to bring in because of the ticket's fault. Call once for each fault, before its
    /// ticket is settled or given back.
    pub fn plan_ahead(&self, ticket: &mut Ticket) -> Advice {
        let advice = self.advice(ticket).unwrap_or_default();
        ticket.in_walk = advice.is_walk;
        advice
    }

    fn advice(&self, ticket: &Ticket) -> Option<Advice> {
        let page = ticket.page;
        let only = |plan| Advice { plan: Some(plan), ..Advice::default() };
        match (self.config.readahead, ticket.before) {
            (Readahead::Off, _) => None,
            (policy, State::Parked { frame, .. }) => {
                let was_marked = self.cache.unmark(frame);
                if was_marked {
                    self.stats.count(Counter::SwapRaHit);
                }
                self.found_ahead(policy, page, was_marked)
            }
            (Readahead::Streams, before) if Self::is_out(before) => {
                let range = self.range_for_readahead(page)?;
                let seen = self.streams.lock().fault(page, range.pages, self.window_max());
                Some(self.advice_of(seen))
            }
            (Readahead::ByAddress, before) if Self::is_out(before) => {
                let mut ranges = self.ranges.lock();
                let (range, word) = ranges.ahead_mut(page)?;
                let (next, window) = word.missed(page, range.pages, self.config.page_cluster);
                *word = next;
                (window.count() > 1 && range.flags.may_evict()).then_some(only(Plan::Pages(window)))
            }
            (Readahead::BySlot, State::OnArea(SlotPart { slot, .. })) => {
                let slots = self.areas.slots(slot.area());
                let window = self.slot_words.missed(slot.offset(), slots, self.config.page_cluster);
                let first = SlotIndex::new(slot.area(), window.first);
                (window.count > 1).then_some(only(Plan::Slots { first, count: window.count }))
            }
            _ => None,
        }
    }

    /// Returns the pages to bring in because a thread waits for a page that is being read from an area. The
    /// device can begin with them at once. Call once for each fault of this kind.
    pub fn plan_joined(&self, page: PageIndex) -> Option<Plan> {
        if self.config.readahead != Readahead::Streams || !matches!(self.state(page), State::OnArea(_)) {
            return None;
        }
        let range = self.range_for_readahead(page)?;
        let seen = self.streams.lock().joined(page, range.pages, self.window_max());
        self.advice_of(seen).plan
    }

    /// Whether the first page of a plan must be read from an area. Only a hint: the page isn't locked.
    pub fn is_on_area(&self, plan: &Plan) -> bool {
        let first = plan.page(0, |at| self.areas.owner(at));
        first.is_some_and(|page| matches!(self.state(page), State::OnArea(_)))
    }

    /// Whether the page's bytes are farther away than in a frame.
    const fn is_out(state: State) -> bool {
        matches!(
            state,
            State::Zero | State::Same(_) | State::Pooled(_) | State::OnArea(_) | State::Inherited(_)
        )
    }

    /// Returns the pages to bring in after a fault that found its page parked.
    fn found_ahead(&self, policy: Readahead, page: PageIndex, was_marked: bool) -> Option<Advice> {
        match policy {
            Readahead::Streams if was_marked => {
                let range = self.range_for_readahead(page)?;
                let seen = self.streams.lock().touched(page, range.pages, self.window_max());
                Some(self.advice_of(seen))
            }
            Readahead::ByAddress => {
                let mut ranges = self.ranges.lock();
                let (_, word) = ranges.ahead_mut(page)?;
                *word = word.found(page, was_marked);
                None
            }
            Readahead::BySlot if was_marked => {
                self.slot_words.hit();
                None
            }
            _ => None,
        }
    }

    fn range_for_readahead(&self, page: PageIndex) -> Option<Range> {
        self.ranges.lock().find(page).filter(|range| range.flags.may_evict())
    }

    fn advice_of(&self, seen: Seen) -> Advice {
        self.stats.add(Counter::SwapRaHit, u64::from(seen.hits));
        let next = seen.window.map(Plan::Stream);
        let plan = next.or(seen.rest.map(Plan::Rest));
        Advice { plan, late: seen.late, is_walk: seen.is_walk }
    }

    /// Whether a parked page that has become the oldest should stay, because a stream will come to it.
    pub(super) fn is_held_for_stream(&self, frame: FrameIndex, page: PageIndex) -> bool {
        self.config.readahead == Readahead::Streams
            && self.cache.is_marked(frame)
            && self.streams.lock().holds(page)
    }

    /// Returns the largest window of a stream in pages: a 128th of the budget, which is also how many pages
    /// may be parked.
    fn window_max(&self) -> u32 {
        let pages = self.config.parked_max.clamp(8, WINDOW_MAX);
        1 << pages.ilog2()
    }

    /// Locks the next page of the plan that is out and free. Returns `None` when the plan has no more. Under
    /// the shared map lock.
    ///
    /// With [`Fate::Park`] the ticket has a frame, which may need memory. With [`Fate::Map`] the ticket has a
    /// frame only if the page was parked.
    pub fn lock_ahead(&self, opening: &mut Opening) -> Option<Ticket> {
        if opening.step == 0 {
            opening.closing_step = self.closing_step(&opening.plan);
            if let Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) = &opening.plan {
                opening.keeps_objects = self.may_keep_objects(window.count);
                // The window has waited while the walk went on.
                let passed = self.streams.lock().passed_in(window);
                (opening.step, opening.locked) = (passed, passed);
            }
        }
        while opening.step < opening.plan.looks() && opening.locked < opening.plan.count() {
            let step = opening.step;
            let closes = opening.closing_step == Some(step);
            opening.step += 1;
            let page = opening.plan.page(step, |at| self.areas.owner(at));
            let fate = match opening.plan {
                Plan::Stream(_) if opening.landed.marker.is_some() && !closes => Fate::Map,
                Plan::CatchUp(_) | Plan::Rest(_) => Fate::Map,
                _ => Fate::Park,
            };
            let ticket = page.and_then(|page| self.try_lock_ahead(page, fate, opening));
            if let Some(ticket) = ticket {
                opening.locked += 1;
                if ticket.fate == Fate::Park {
                    self.tell_of_marker(opening, ticket.page, closes);
                }
                return Some(ticket);
            }
            if opening.out_of_frames {
                break;
            }
        }
        None
    }

    /// Tells the stream that a page just locked is going to be parked as its marker, or as its last page.
    fn tell_of_marker(&self, opening: &mut Opening, page: PageIndex, closes: bool) {
        let Plan::Stream(window) = &opening.plan else { return };
        let mut streams = self.streams.lock();
        if opening.landed.marker.is_none() {
            opening.landed.marker = Some(page);
            streams.mark(window, page);
        }
        if closes {
            streams.close(window, page);
        }
    }

    /// Returns the step of the last page that the stream can come to, if this window brings that page. Only a
    /// hint: the pages aren't locked.
    fn closing_step(&self, plan: &Plan) -> Option<u32> {
        let Plan::Stream(window) = plan else { return None };
        if !window.closes {
            return None;
        }
        let mut out = (0..window.reach).filter(|step| Self::is_out(self.state(window.page(*step))));
        let last = out.by_ref().take(window.count as usize).last();
        last.filter(|_| out.next().is_none())
    }

    fn try_lock_ahead(&self, page: PageIndex, fate: Fate, opening: &mut Opening) -> Option<Ticket> {
        let place = self.table.known(page)?;
        let word = place.entry().load();
        let before = word.state();
        let is_wanted = match (before, &opening.plan) {
            // Another window's marker stays parked, so that the walk is seen when it comes to the marker.
            (State::Parked { frame, .. }, Plan::Stream(_) | Plan::Rest(_)) => !self.cache.is_marked(frame),
            (State::Pooled(_) | State::Zero | State::Same(_), Plan::CatchUp(_)) => true,
            (_, Plan::CatchUp(_)) => false,
            // A page that costs nothing to keep where it is costs nothing to map, but it costs a frame to
            // park.
            (State::Zero | State::Same(_), plan) => matches!(plan, Plan::Stream(_) | Plan::Rest(_)),
            (State::OnArea(SlotPart { slot, .. }), Plan::Slots { first, count }) => {
                slot.area() == first.area()
                    && (first.offset()..first.offset() + count).contains(&slot.offset())
            }
            (State::Pooled(_) | State::Inherited(_), Plan::Slots { .. }) => false,
            (before, _) => Self::is_out(before),
        };
        if word.is_locked() || !is_wanted {
            return None;
        }
        let (fate, frame) = match before {
            State::Parked { frame, .. } => (fate, Some((frame, Backing::Memory))),
            _ if fate == Fate::Map => (fate, None),
            _ => match self.frame_ahead() {
                Some(frame) => (fate, Some(frame)),
                // A stream goes on without a marker. The next fault beyond the window continues the stream.
                None if matches!(opening.plan, Plan::Stream(_)) => (Fate::Map, None),
                None => {
                    opening.out_of_frames = true;
                    return None;
                }
            },
        };
        pause!();
        let ticket = Ticket {
            frame,
            keep_copy: match before.stored() {
                Some(Stored::Slot(at)) => self.areas.may_keep(at.slot),
                Some(Stored::Object(_)) => opening.keeps_objects,
                None => false,
            },
            ahead: true,
            in_walk: true,
            fate,
            ..Ticket::new(page, before, self.source_of(before).0)
        };
        if place.entry().try_lock(word).is_err() {
            if let Some((frame, backing)) = frame.filter(|_| !matches!(before, State::Parked { .. })) {
                self.cache.put(frame, backing);
            }
            return None;
        }
        Some(ticket)
    }

    /// Takes a frame for readahead. A quarter of all frames is left to faults.
    fn frame_ahead(&self) -> Option<(FrameIndex, Backing)> {
        if self.cache.usage().free <= self.cache.count() / 4 { None } else { self.cache.take() }
    }

    /// Puts the bytes of a page that isn't on an area into `bytes`, which is the driver's memory or the
    /// ticket's frame. On an error, the fault that needs the page finds out what is wrong.
    pub fn load_ahead(
        &self,
        ticket: &Ticket,
        bytes: &mut [u8; PAGE_BYTES],
        decoder: &mut Decoder,
    ) -> Result<(), SlotIndex> {
        self.load_into(ticket, bytes, decoder)
    }

    /// Unpacks the ticket's page from `slot`, which was read for another page of the same slot.
    /// [`Pager::unpack_into`] unpacks that other page, and must come last.
    pub fn unpack_ahead(
        &self,
        ticket: &Ticket,
        slot: &[u8; PAGE_BYTES],
        page: &mut [u8; PAGE_BYTES],
        decoder: &mut Decoder,
    ) -> Result<(), SlotIndex> {
        let at = ticket.slot_part();
        self.decode(ticket, pack::object(slot, at.part).ok_or(at.slot)?, page, decoder)
    }

    /// Checks `bytes`, which were read from the ticket's slot, and unpacked if the slot holds several pages.
    /// An error says that they aren't what was written, and names the slot.
    pub fn check_ahead(&self, ticket: &Ticket, bytes: &[u8; PAGE_BYTES]) -> Result<(), SlotIndex> {
        self.verify(ticket, bytes)
    }

    /// Ends a move whose page's bytes are in the ticket's frame. The page waits there until a thread touches
    /// it.
    pub fn settle_parked(&self, opening: &mut Opening, ticket: Ticket) {
        assert!(ticket.ahead && ticket.fate == Fate::Park);
        let (frame, backing) = ticket.frame.expect("a page to park has a frame");
        assert!(backing == Backing::Memory, "a page was to be parked in a hole");
        let (page, before) = (ticket.page, ticket.before);
        match before {
            State::Parked { .. } => {}
            _ => self.cache.park(frame, page),
        }
        self.cache.mark(frame);
        // Nobody can write the page in its frame, so its slot may stay.
        let copy = self.keep_or_free(before.stored(), ticket.keep_copy || before.slot().is_some());
        match before {
            State::Pooled(_) => self.stats.count(Counter::Zswpin),
            State::OnArea(_) => self.stats.count(Counter::Pswpin),
            State::Zero => self.stats.count(Counter::SwpinZero),
            State::Same(_) => self.stats.count(Counter::SwpinSame),
            State::Inherited(_) => self.stats.count(Counter::SwpinInherited),
            _ => {}
        }
        // Counted before the settle: a thread that finds the mark counts a hit, and hits must never exceed
        // pages read ahead.
        self.stats.count(Counter::SwapRa);
        if self.settle(page, self.place(page), before, State::Parked { frame, copy }) {
            opening.landed.was_late |= matches!(before, State::OnArea(_));
            self.stats.count(Counter::SwapRaJoined);
        }
    }

    /// Counts a page that was mapped ahead. `waited` says whether a thread was waiting for the page.
    pub(super) fn count_ahead(&self, waited: bool) {
        self.stats.count(Counter::SwapRa);
        if waited {
            self.stats.count(Counter::SwapRaJoined);
        }
    }

    /// Ends a move whose page is in the program's memory now.
    pub fn settle_ahead(&self, opening: &mut Opening, ticket: Ticket, left: Backing) {
        let is_far = ticket.is_on_area();
        opening.landed.was_late |= self.settle_fault(ticket, left) && is_far;
        opening.landed.mapped += 1;
    }

    /// Gives up a page that could not be brought in. The page is as it was.
    pub fn give_up_ahead(&self, opening: &mut Opening, ticket: Ticket) {
        if ticket.fate == Fate::Park
            && let Plan::Stream(window) = &opening.plan
        {
            self.streams.lock().unmark(window, ticket.page);
        }
        self.give_back(ticket);
    }

    /// Closes a plan of which everything possible was done.
    pub fn close_ahead(&self, mut opening: Opening) {
        if let Plan::CatchUp(window) | Plan::Rest(window) = &opening.plan {
            self.streams.lock().caught_up(window, opening.landed.mapped);
        }
        if let Plan::Stream(window) = opening.plan {
            // All pages looked at are known to be in memory, also those beyond the wanted count.
            let is_done = opening.step == window.reach || opening.locked == window.count;
            opening.landed.steps = if is_done { opening.step.max(window.count) } else { opening.step };
            let hits = self.streams.lock().landed(&window, opening.landed);
            self.stats.add(Counter::SwapRaHit, u64::from(hits));
        }
    }
}
