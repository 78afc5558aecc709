//! Evictions under way. Victims are chosen, then moved or copied out run by run, then parked. An eviction
//! must leave pages that devices have pinned, so the devices' use of pins is here too.

use crate::bugs::{DriverBug, strikes};
use crate::ops::{Next, Op};
use crate::space::Space;
use crate::world::World;
use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Batch, Taken};
use farpage_core::reclaim::recency::Lone;
use farpage_core::units::FrameIndex;

/// A batch of victims, if there is one.
pub(crate) enum Victims {
    Some(Box<EvictOp>),
    None,
    /// A change has the map lock or waits for it.
    NotNow,
}

pub(crate) struct EvictOp {
    batch: Batch,
    /// Victims before this index are done.
    at: usize,
    phase: EvictPhase,
    /// Pages that the eviction has taken.
    pub(crate) taken: usize,
}

/// The progress of an eviction. With `Install::Copy`, other operations can run between `Free`, `Copy` and
/// `Drop`. The kernel moves a page in one call, so a move isn't interrupted.
#[derive(Clone, Copy)]
enum EvictPhase {
    /// The batch is to be write-protected.
    Protect,
    /// Pages are moved out.
    Move,
    /// The next run of pages is made clean.
    Free,
    /// The run up to this index is copied.
    Copy(usize),
    /// The pages of the run that are still clean are dropped.
    Drop(usize),
}

impl EvictOp {
    /// Adds the frames that the eviction holds. Returns how many of them have memory.
    pub(crate) fn holds(&mut self, frames: &mut Vec<FrameIndex>) -> i64 {
        let mut backed = 0;
        for victim in self.batch.victims() {
            frames.push(victim.frame);
            backed += i64::from(victim.taken == Taken::Yes || victim.backing == Backing::Memory);
        }
        backed
    }
}

impl Space {
    /// Starts an eviction. False if there is no victim or the map lock isn't free.
    pub(crate) fn begin_evict(&self, world: &World) -> bool {
        let Victims::Some(evict) = self.batch_to_evict(world) else { return false };
        self.ops.borrow_mut().push(Op::Evict(evict));
        true
    }

    /// Chooses victims. The eviction stays inside the map lock from then on.
    pub(crate) fn batch_to_evict(&self, world: &World) -> Victims {
        if !self.enter() {
            return Victims::NotNow;
        }
        let mut batch = Batch::new();
        if world.random.percent(5) {
            self.pager.lone_victims_are(world.random.pick(&[Lone::Cheap, Lone::Dear]));
        }
        self.pager.begin_evict(&mut batch, world.profile.batch_max);
        // Some victims count as used by a system call of the program.
        if world.random.percent(10) {
            let held = u128::from(world.random.next()) << 64 | u128::from(world.random.next());
            self.pager.release_held(&mut batch, held);
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

    pub(crate) fn step_evict(&self, world: &World, mut evict: Box<EvictOp>) -> Next {
        if self.goes_on(world, &mut evict) { Next::Go(Op::Evict(evict)) } else { Next::Done }
    }

    /// Goes one call further with an eviction. False if it is over.
    pub(crate) fn goes_on(&self, world: &World, evict: &mut EvictOp) -> bool {
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

    /// Returns the kernel's answer for a page that is about to be taken, and gives its frame the wanted
    /// backing.
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
            // The program has called MADV_FREE on this page, and the kernel has dropped the page.
            program.drop_page(victim.page);
        }
        if !program.page(victim.page).present {
            Taken::Gone
        } else if world.random.percent(world.profile.busy_percent) {
            // A page that was write-protected for the copy stays so. A needless protection only costs a
            // fault.
            Taken::Busy
        } else {
            Taken::Yes
        }
    }

    /// Moves one page out if the kernel allows it. The kernel moves no pinned page.
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

    /// Makes one page clean, so that each later write to it can be seen.
    fn free_to_copy(&self, world: &World, batch: &mut Batch, at: usize) {
        let taken = self.look(world, batch, at, Backing::Memory);
        let victim = &mut batch.victims()[at];
        victim.taken = taken;
        if taken == Taken::Yes {
            self.program.borrow_mut().free_lazily(victim.page);
        }
    }

    /// Drops one copied page, unless it was written or is pinned. A page that stays counts as written and
    /// becomes writable.
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

    /// Lets a device or a peer use one of its pins: it writes to the page or gives the pin up. False if no
    /// page is pinned.
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
}
