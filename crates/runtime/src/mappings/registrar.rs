//! The registrar: an engine thread that registers mappings on behalf of hooks.
//!
//! Hooks run in threads of the program, whose descriptor table doesn't have the engine's descriptors. A hook
//! that has made a mapping therefore asks the registrar and waits. The hook holds the map lock exclusively on
//! the registrar's behalf. The registrar itself never takes that lock, so it always answers.
//!
//! For the same reason, the registrar makes the page by which a parent hears of its child at a fork. It also
//! reads the kernel's event while a registered mapping is being moved, because all handler threads may be
//! waiting for the map lock by then.

use crate::engine::Engine;
use crate::engine::fork;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::sync;
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::futex;
use farpage_os::sys::Errno;
use farpage_os::thread;

const IDLE: u32 = 0;
const RANGE_ASKED: u32 = 1;
const ANSWERED: u32 = 2;
/// A thread is about to fork. The registrar frees what was left to children that are gone, and makes a token.
const TOKEN_ASKED: u32 = 5;
/// A registered mapping is being moved: the registrar reads the kernel's event.
const MOVING: u32 = 3;
/// The mapping has been moved, or the call has failed.
const MOVED: u32 = 4;

/// The request to the registrar, one at a time. The thread that asks holds the map lock exclusively.
#[derive(Default)]
pub struct Registrar {
    state: AtomicU32,
    start: AtomicU64,
    end: AtomicU64,
    /// errno, 0 for success.
    answer: AtomicU32,
}

impl Registrar {
    /// Has the registrar register `range`. The caller holds the map lock exclusively.
    pub fn ask(&self, range: PageRange) -> Result<(), Errno> {
        self.start.store(range.start.0, Ordering::Relaxed);
        self.end.store(range.end.0, Ordering::Relaxed);
        self.wait_for(RANGE_ASKED)
    }

    /// Has the registrar map a page, the token, and returns its address. The token says to which generation
    /// of children its next user belongs: see
    /// [`Membership::token`](crate::session::record::Membership::token). The caller holds the map lock
    /// exclusively.
    pub fn ask_for_token(&self, generation: usize) -> Result<usize, Errno> {
        self.start.store(generation as u64, Ordering::Relaxed);
        self.wait_for(TOKEN_ASKED)?;
        Ok(self.end.load(Ordering::Relaxed) as usize)
    }

    fn wait_for(&self, asked: u32) -> Result<(), Errno> {
        // Ordering: Release publishes the question to the registrar's Acquire.
        self.state.store(asked, Ordering::Release);
        sync::wake_all(&self.state);
        // Ordering: Acquire pairs with the Release of the answer.
        while self.state.load(Ordering::Acquire) != ANSWERED {
            futex::wait(&self.state, asked);
        }
        // Ordering: Relaxed, because only the registrar looks at IDLE and finds nothing to do. The next
        // request has its own Release.
        self.state.store(IDLE, Ordering::Relaxed);
        match self.answer.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Errno(errno as i32)),
        }
    }

    /// Has the registrar look whether the engine has ended.
    pub fn wake(&self) {
        sync::wake_all(&self.state);
    }

    /// Makes a call that may move the registered mapping `from`. The caller holds the map lock exclusively.
    pub fn while_moving(&self, engine: &Engine, from: PageRange, call: impl FnOnce() -> isize) -> isize {
        let Some(uffd) = engine.uffd else { return call() };
        uffd.move_begins(from);
        // Ordering: Release publishes the beginning of the move to the registrar's Acquire.
        self.state.store(MOVING, Ordering::Release);
        sync::wake_all(&self.state);
        let result = call();
        // Ordering: Release and Acquire as in `wait_for`. The registrar has read the kernel's event before
        // this thread goes on.
        self.state.store(MOVED, Ordering::Release);
        while self.state.load(Ordering::Acquire) != IDLE {
            futex::wait(&self.state, MOVED);
        }
        result
    }

    /// Answers requests until the engine ends.
    pub fn serve(&self, engine: &Engine) -> ! {
        loop {
            if engine.has_ended() {
                thread::exit();
            }
            // Ordering: Acquire pairs with the Release of the thread that asks. It publishes the range, or
            // the beginning of a move.
            let state = self.state.load(Ordering::Acquire);
            if let Some(uffd) = engine.uffd.filter(|_| state == MOVING || state == MOVED) {
                // Ordering: Acquire pairs with the Release of MOVED. The call is then over, and its event has
                // been read.
                uffd.drain_until(|| self.state.load(Ordering::Acquire) == MOVED);
                uffd.move_ended();
                // Ordering: Release publishes the end of the move to the thread that waits in `while_moving`.
                self.state.store(IDLE, Ordering::Release);
                sync::wake_all(&self.state);
                continue;
            }
            if state != RANGE_ASKED && state != TOKEN_ASKED {
                futex::wait(&self.state, state);
                continue;
            }
            let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
            let answer = if state == TOKEN_ASKED {
                fork::forget_heirless(engine);
                let token = engine.while_nobody_reaps(|| engine.membership.token(start as usize));
                token.map(|address| self.end.store(address as u64, Ordering::Relaxed))
            } else {
                engine.register_range(PageRange::new(PageIndex(start), PageIndex(end)), None)
            };
            self.answer.store(answer.map_or_else(|errno| errno.0 as u32, |()| 0), Ordering::Relaxed);
            // Ordering: Release publishes the answer and what the registrar has done.
            self.state.store(ANSWERED, Ordering::Release);
            sync::wake_all(&self.state);
        }
    }
}
