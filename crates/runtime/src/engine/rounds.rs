//! The keeper's rounds: its checks at intervals, from the engine's start to its end. The process may have to
//! end, or may have changed its credentials. Each loop of the keeper's that may last makes the rounds.
// UNSAFETY: the process is killed by a bare system call.

use crate::engine::Engine;
use crate::engine::start::{AHEAD_NAME, HANDLER_NAME, KEEPER_NAME, MAPS_NAME};
use crate::privileges::credentials::Watch;
use crate::session::first::{First, STATUS_FAILED};
use core::sync::atomic::Ordering;
use farpage_os::clock::now_ns;
use farpage_os::proc;
use farpage_os::sys::{self, number};

/// Nanoseconds between two looks of the keeper for the end of its own program. A keeper that has nothing to
/// evict then also looks for dead processes.
const REAP_NS: u64 = 1_000_000_000;
/// Nanoseconds between two looks for whether the supervisor was killed. New processes of the run can't join
/// it after that.
const SUPERVISOR_NS: u64 = 100_000_000;

/// When the next checks are due.
pub struct Rounds {
    reap_ns: u64,
    supervisor_ns: u64,
    credentials: Watch,
}

impl Rounds {
    /// Returns rounds that begin now.
    pub fn begin() -> Rounds {
        Rounds {
            reap_ns: now_ns() + REAP_NS,
            supervisor_ns: now_ns() + SUPERVISOR_NS,
            credentials: Watch::default(),
        }
    }

    /// Makes the checks that are due. Returns whether it is time to reap, too.
    pub fn make(&mut self, engine: &Engine) -> bool {
        self.credentials.look(engine);
        let now = now_ns();
        if now >= self.supervisor_ns {
            end_with_the_supervisor(engine);
            self.supervisor_ns = now + SUPERVISOR_NS;
        }
        let is_time = now >= self.reap_ns;
        if is_time {
            end_with_the_program(engine);
            self.reap_ns = now + REAP_NS;
        }
        is_time
    }
}

/// Ends this process if the supervisor was killed: the run ends then. Programs started from now on could not
/// join the run, and nothing would limit them.
fn end_with_the_supervisor(engine: &Engine) {
    const SIGKILL: usize = linux_raw_sys::general::SIGKILL as usize;
    let session = engine.membership.session;
    if session.first.is_to_end.load(Ordering::Relaxed) != 0 && First::is_this_process(session) {
        sys::exit_group(STATUS_FAILED);
    }
    if engine.membership.was_supervisor_killed() {
        // SAFETY: the call takes no pointers, and the process is this one.
        unsafe { sys::call(number::KILL, [engine.process as usize, SIGKILL, 0, 0, 0, 0]) };
        // The process survives the signal if it is process 1 of a container.
        sys::exit_group(128 + SIGKILL as i32);
    }
}

/// Ends the process when the program's last thread has ended, even if that thread ended by the bare system
/// call. Without the engine's threads, the process would have ended with it.
fn end_with_the_program(engine: &Engine) {
    let ours = [KEEPER_NAME, HANDLER_NAME, AHEAD_NAME, MAPS_NAME].map(core::ffi::CStr::to_bytes);
    if let Some(status) = proc::status_but_for(engine.process, &ours) {
        sys::exit_group(First::tell(engine.membership.session, status));
    }
}
