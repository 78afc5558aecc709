//! From parked to stored. Pages are placed in the pool or queued for an area, a batch gets slots, and the
//! device writes the batch.

use crate::ops::{Next, Op};
use crate::space::Space;
use crate::world::World;
use farpage_core::areas::AreaState;
use farpage_core::cache::Backing;
use farpage_core::pager::{Densified, Placed, Shrunk, WriteBatch, WriteProgress, WriteRequest};
use farpage_io::Op as Direction;

/// The pages that one writer collects.
#[derive(Default)]
pub(crate) struct Writer {
    pub batch: WriteBatch,
}

pub(crate) struct WriteOp {
    pub(crate) request: WriteRequest,
    pub(crate) phase: WritePhase,
}

#[derive(Clone, Copy)]
pub(crate) enum WritePhase {
    Submit,
    Wait(u64),
    Done(Result<(), AreaState>),
}

impl Space {
    /// Takes a writer that isn't in use out of its place.
    fn take_writer(&self, world: &World) -> Option<(usize, Box<Writer>)> {
        let mut writers = self.writers.borrow_mut();
        let first = world.random.index(writers.len());
        let count = writers.len();
        let mut order = (0..count).map(|at| (first + at) % count);
        order.find_map(|at| writers[at].take().map(|writer| (at, writer)))
    }

    /// Calls `act` inside the map lock with a writer that isn't in use.
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

    /// Makes the pool's oldest object denser, or lets the pool's time pass.
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
            Densified::NoSpace => "densified NoSpace",
        });
        true
    }

    /// Returns the number of pages in the fullest write batch.
    pub(crate) fn waiting_for_slots(&self) -> usize {
        self.writers.borrow().iter().flatten().map(|writer| writer.batch.len()).max().unwrap_or(0)
    }

    /// Frees slots that resident pages keep. Write protection of these pages is lifted, because their writes
    /// need not be noticed any more.
    pub(crate) fn release_kept(&self, max: u32) -> u32 {
        self.pager.release_kept(max, |page| self.program.borrow_mut().page_mut(page).protected = false)
    }

    /// Gives a write batch slots. If no slot is free, frees some kept slots; if there are none, parks the
    /// batch again.
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

    pub(crate) fn step_write(&self, world: &World, mut write: Box<WriteOp>) -> Next {
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
                            self.pager.areas().found_no_space(write.request.run().first.area());
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
}
