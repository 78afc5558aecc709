//! Operations under way. Each is a small state machine that goes one call further when its turn comes, so any
//! two operations can overlap in any order.
//!
//! `fault`, `evict` and `write` hold the operations of a page's life. `ahead` and `change` hold readahead and
//! changes of mappings. The operations that give memory and slots back are in this file.

use crate::ahead::AheadOp;
use crate::change::ChangeOp;
use crate::evict::EvictOp;
use crate::fault::{FaultOp, FaultPhase, NEIGHBOURS_MAX};
use crate::space::{Slots, Space};
use crate::world::World;
use crate::write::{WriteOp, WritePhase};
use farpage_core::areas::SlotRun;
use farpage_core::cache::Backing;
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::units::{AreaId, FrameIndex};
use std::ops::Range;

/// An operation under way.
pub(crate) enum Op {
    Fault(FaultOp),
    Ahead(Box<AheadOp>),
    Evict(Box<EvictOp>),
    Write(Box<WriteOp>),
    Change(ChangeOp),
    /// Bytes of the pool whose memory is being given back.
    ReleasePool(Range<usize>),
    /// The first frame and the number of frames whose memory is being given back.
    ReleaseFrames(u32, u32),
    /// Slots that the device is being told to discard.
    Discard(SlotRun),
    /// An operation whose thread has no CPU before this moment.
    Starved(Box<Op>, u64),
}

/// The result of an operation's turn.
pub(crate) enum Next {
    /// The operation went one call further.
    Go(Op),
    /// The operation has to wait.
    Wait(Op),
    Done,
}

impl Op {
    /// Calls `visit` with the token of each request that the operation waits for.
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

    pub(crate) const fn is_fault(&self) -> bool {
        match self {
            Op::Fault(_) => true,
            Op::Starved(op, _) => op.is_fault(),
            _ => false,
        }
    }

    /// Returns the number of pages that the operation may soon make resident, whatever the budget is by then.
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

    /// Adds the frames and slots that the operation holds to the lists. Returns how many of its frames have
    /// memory that no page accounts for.
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
                    // The page counts as parked. After its bytes moved out, the page is parked without memory
                    // for a moment.
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

impl Space {
    /// Gives one operation, drawn at random among those whose threads have a CPU, a turn. False if there is
    /// none, or if the operation had to wait.
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

    /// Compacts the pool, and starts to give the memory of empty blocks back.
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
            // SAFETY: the pool has handed these bytes out, and doesn't touch them until `released`.
            // `pool_data` is the start of the pool's memory, and the range lies inside.
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

    /// Starts to discard an empty cluster.
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

    /// Reports the slots as discarded. None of them may have been handed out meanwhile.
    fn discard_slots(&self, run: SlotRun) {
        let mut slots = (0..run.count).map(|at| run.first.plus(at));
        assert!(slots.all(|slot| !self.pager.areas().is_owned(slot)), "{run:?} is being discarded");
        self.pager.stats().add(Counter::Discarded, u64::from(run.count));
        self.pager.areas().discarded(run);
    }
}
