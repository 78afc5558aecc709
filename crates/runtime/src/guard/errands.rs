//! A child of vfork needs memory: it asks, and does nothing itself.
//!
//! It runs on its maker's memory, in its maker's [`Room`](super::rooms::Room), and may be killed at any instruction while
//! that waits. A lock that it held then would be held for ever, in a process that lives. So it takes none: what it
//! needs it writes into the room, rings an engine thread's bell, and waits until that has done it. What it changes of its
//! mappings (munmap, mprotect) is the exception: that takes the map lock as ever. (When it served its
//! faults like any thread, its maker stood still after at most 300 kills: `tests/programs/processes.c`, `borrowers_killed`.)

use super::rooms;
use crate::engine::Engine;
use crate::worker::Worker;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::sync;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PageIndex, PageRange};
use farpage_fault::Fault;
use farpage_os::futex;
use farpage_os::sys::{self, Errno};
use linux_raw_sys::errno::ESRCH;
use linux_raw_sys::general as raw;

/// A child that waits looks so often whether its maker is still there.
const LOOK_NS: u64 = 100_000_000;

const NONE: u32 = 0;
const ASKED: u32 = 1;
const UNDER_WAY: u32 = 2;
const DONE: u32 = 3;
const NOT_OURS: u32 = 4;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This fault is to be served.
    Fault(Fault),
    /// These pages are to be there, and writable if that is said.
    Pages(PageRange, bool),
}

/// One room's. All zero: nothing is asked.
pub struct Errand {
    state: AtomicU32,
    /// The child's until it has asked, and then the engine thread's that has taken it on.
    wanted: UnsafeCell<MaybeUninit<Wanted>>,
}

fn is_gone(process: u32) -> bool {
    // SAFETY: signal 0 is only asked about.
    let asked = unsafe { sys::call(raw::__NR_kill as usize, [process as usize, 0, 0, 0, 0, 0]) };
    sys::check(asked) == Err(Errno(ESRCH as i32))
}

/// Whether any child has asked for something that nobody does yet.
pub fn is_any_asked() -> bool {
    // Ordering: SeqCst as in `ask`.
    rooms::lent() > 0 && rooms::all().any(|room| room.errand.state.load(Ordering::SeqCst) == ASKED)
}

impl Errand {
    /// In the child: returns once it was done. False if none of that is memory that we manage.
    pub fn ask(&self, engine: &Engine, wanted: Wanted) -> bool {
        let Some(handover) = engine.handover else { return false };
        // SAFETY: nothing is asked, so nobody else looks.
        unsafe { (*self.wanted.get()).write(wanted) };
        // Ordering: SeqCst: who doesn't see it when he looks sees that the bell has rung since.
        self.state.store(ASKED, Ordering::SeqCst);
        handover.ring();
        loop {
            // Ordering: Acquire pairs with the Release in `run`.
            let word = self.state.load(Ordering::Acquire);
            match word {
                DONE => return true,
                NOT_OURS => return false,
                _ => futex::wait_for(&self.state, word, LOOK_NS),
            }
            if engine.has_ended() {
                // What it wants is there.
                return true;
            }
            if self.state.load(Ordering::Relaxed) == word && is_gone(engine.process) {
                // With it all threads are gone that could do anything.
                sys::exit_group(128 + 9);
            }
        }
    }

    /// Nothing is asked, in a fork's child.
    pub fn reset(&self) {
        self.state.store(NONE, Ordering::Relaxed);
    }

    /// In an engine thread: does what is asked for, if anything is.
    fn run(&self, engine: &Engine, worker: &mut Worker) {
        // Ordering: SeqCst as in `ask`.
        if self.state.load(Ordering::SeqCst) != ASKED
            || self.state.compare_exchange(ASKED, UNDER_WAY, Ordering::SeqCst, Ordering::Relaxed).is_err()
        {
            return;
        }
        // SAFETY: written before ASKED was, and the child waits.
        let wanted = unsafe { (*self.wanted.get()).assume_init() };
        let answer = if do_for_child(engine, worker, wanted) { DONE } else { NOT_OURS };
        self.state.store(answer, Ordering::Release);
        futex::wake(&self.state, u32::MAX >> 1);
    }

    /// In the maker: the child is gone, and whatever it asked for is over.
    pub fn give_up(&self) {
        loop {
            match self.state.load(Ordering::Acquire) {
                ASKED => {
                    let _ = self.state.compare_exchange(ASKED, NONE, Ordering::Relaxed, Ordering::Relaxed);
                }
                UNDER_WAY => futex::wait(&self.state, UNDER_WAY),
                _ => return self.state.store(NONE, Ordering::Relaxed),
            }
        }
    }
}

/// In an engine thread that serves faults: does what children have asked for.
pub fn run_all(engine: &Engine, worker: &mut Worker) {
    if rooms::lent() > 0 {
        rooms::all().for_each(|room| room.errand.run(engine, worker));
    }
}

fn do_for_child(engine: &Engine, worker: &mut Worker, wanted: Wanted) -> bool {
    // A mapping that is being moved is at its new place before we know of it.
    engine.map.wait_for_changes();
    let pages = match wanted {
        Wanted::Fault(fault) => PageRange::of(fault.page, 1),
        Wanted::Pages(pages, _) => pages,
    };
    // Somebody else may be moving the page, who would wake a thread that sleeps for it.
    let mut serve = |fault: Fault| {
        worker.serve(fault);
        while let Err(unsettled) = engine.pager.quiet(PageRange::of(fault.page, 1)) {
            sync::wait(engine.pager.settled_word(), unsettled.seen);
        }
    };
    let (mut from, mut any) = (pages.start, false);
    while from < pages.end {
        let Some(part) = engine.next_with(PageRange::new(from, pages.end), Flags::REGISTERED) else { break };
        match wanted {
            Wanted::Fault(fault) => any |= engine.serve_for(fault, &mut serve),
            Wanted::Pages(_, write) => {
                any = true;
                for page in part.start.0..part.end.0 {
                    engine.bring_page(PageIndex(page), write, 0, &mut serve);
                }
            }
        }
        from = part.end;
    }
    any
}
