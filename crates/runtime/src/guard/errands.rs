//! Requests of a child of vfork: the child asks for the memory that it needs, and does nothing itself.
//!
//! The child runs on its maker's memory, in its maker's [`Room`](super::rooms::Room), while the maker waits.
//! The child may be killed at any instruction. A lock that it held would then be held for ever, in a process
//! that lives on. For this reason the child takes no lock. The child writes its request into the room, rings
//! an engine thread's bell, and waits until the request is done. Changes of mappings (munmap, mprotect) are
//! the exception, because they take the map lock. If children served their own faults, the maker would hang
//! after a few hundred kills: `tests/programs/processes.c`, `borrowers_killed`.

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
use farpage_os::proc;
use farpage_os::sys::{self, Errno};
use linux_raw_sys::general as raw;

/// Nanoseconds after which a waiting child looks whether its maker is still there.
const LOOK_NS: u64 = 100_000_000;

const NONE: u32 = 0;
const ASKED: u32 = 1;
const UNDER_WAY: u32 = 2;
const DONE: u32 = 3;
const NOT_OURS: u32 = 4;

/// Request of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Serve this fault.
    Fault(Fault),
    /// Bring these pages in, writable if the flag says so.
    Pages(PageRange, bool),
}

/// Request of one room's child. All zeros: nothing is asked.
pub struct Errand {
    state: AtomicU32,
    /// The child's until the child has asked, and then the engine thread's that has taken the request on.
    wanted: UnsafeCell<MaybeUninit<Wanted>>,
}

fn is_gone(process: u32) -> bool {
    // SAFETY: the call takes no pointer, and signal 0 sends nothing.
    let asked = unsafe { sys::call(raw::__NR_kill as usize, [process as usize, 0, 0, 0, 0, 0]) };
    // Until its parent has waited for it, a process that has ended keeps its id.
    sys::check(asked) == Err(Errno::ESRCH) || proc::is_zombie(process)
}

/// Returns whether any child has asked for something that no engine thread does yet.
pub fn is_any_asked() -> bool {
    // Ordering: SeqCst as in `ask`.
    rooms::lent() > 0 && rooms::all().any(|room| room.errand.state.load(Ordering::SeqCst) == ASKED)
}

impl Errand {
    /// Asks, in the child, and returns once the request was done. Returns false if none of the memory is
    /// managed, or if the page of the fault is lost.
    pub fn ask(&self, engine: &Engine, wanted: Wanted) -> bool {
        let Some(handover) = engine.handover else { return false };
        // SAFETY: nothing is asked, so no engine thread looks.
        unsafe { (*self.wanted.get()).write(wanted) };
        // Ordering: SeqCst: an engine thread that looks and doesn't see the request sees that the bell has
        // rung since.
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
                // After the engine's end all pages are there.
                return true;
            }
            if self.state.load(Ordering::Relaxed) == word && is_gone(engine.process) {
                // With the maker's process all threads are gone that could do anything.
                sys::exit_group(128 + 9);
            }
        }
    }

    /// Forgets the request, in a fork's child.
    pub fn reset(&self) {
        self.state.store(NONE, Ordering::Relaxed);
    }

    /// Does what is asked for, if anything is. Runs in an engine thread.
    fn run(&self, engine: &Engine, worker: &mut Worker) {
        // Ordering: SeqCst as in `ask`.
        if self.state.load(Ordering::SeqCst) != ASKED
            || self.state.compare_exchange(ASKED, UNDER_WAY, Ordering::SeqCst, Ordering::Relaxed).is_err()
        {
            return;
        }
        // SAFETY: the request was written before the state was ASKED, and the child waits.
        let wanted = unsafe { (*self.wanted.get()).assume_init() };
        let answer = if do_for_child(engine, worker, wanted) { DONE } else { NOT_OURS };
        self.state.store(answer, Ordering::Release);
        futex::wake(&self.state, u32::MAX >> 1);
    }

    /// Ends the request when the child is gone. Runs in the maker.
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

/// Does what children have asked for. Runs in an engine thread that serves faults.
pub fn run_all(engine: &Engine, worker: &mut Worker) {
    if rooms::lent() > 0 {
        rooms::all().for_each(|room| room.errand.run(engine, worker));
    }
}

fn do_for_child(engine: &Engine, worker: &mut Worker, wanted: Wanted) -> bool {
    // A mapping that is being moved is at its new place before Farpage knows that place.
    engine.map.wait_for_changes();
    let pages = match wanted {
        Wanted::Fault(fault) => PageRange::of(fault.page, 1),
        Wanted::Pages(pages, _) => pages,
    };
    // Another thread may be moving the page, and would wake only threads that sleep for it.
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
