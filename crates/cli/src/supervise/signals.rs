//! Signals of a supervisor above the program. Farpage passes signals on to the program, and stops and
//! ends as the program does.
//!
//! Signals are taken one by one from the blocked set, not by handlers, so nothing here runs at an odd moment.
//! The program starts in our process group and session, so a signal from the terminal reaches it without us.
//! Only signals that the program wasn't sent, too, are passed on.

use crate::host::sys::{self, Child, ChildState, Disposition, SignalSet};
use crate::text::failure::Failure;
use std::ffi::c_int;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Signal settings at Farpage's start, which the program gets.
pub struct Inherited {
    blocked: SignalSet,
    child: Disposition,
}

/// Blocks every signal from now on. Signals wait until [`supervise`] or [`Unheeded`] takes them.
pub fn block_all() -> Inherited {
    let inherited = Inherited { blocked: SignalSet::all().block(), child: sys::disposition(libc::SIGCHLD) };
    // If SIGCHLD were ignored, the kernel would throw the program's exit status away.
    sys::set_disposition(libc::SIGCHLD, Disposition::Default);
    inherited
}

/// Makes a command start with the signal settings that Farpage got, and die if Farpage is killed.
pub fn hand_down(command: &mut Command, inherited: &Inherited) {
    let (blocked, child, pipe) = (inherited.blocked, inherited.child, sys::sigpipe_at_start());
    let supervisor = std::process::id();
    let prepare = move || {
        sys::set_disposition(libc::SIGCHLD, child);
        sys::set_disposition(libc::SIGPIPE, pipe);
        if !sys::die_with_parent(supervisor) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        blocked.block();
        Ok(())
    };
    // SAFETY: runs between fork and exec of a process with one thread. The closure calls only functions that
    // are async-signal-safe, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// Makes a command that takes Farpage's place start with the disposition of SIGPIPE that Farpage got.
pub fn hand_down_pipe(command: &mut Command) {
    let pipe = sys::sigpipe_at_start();
    let prepare = move || {
        sys::set_disposition(libc::SIGPIPE, pipe);
        Ok(())
    };
    // SAFETY: the closure only sets a disposition, in a process with one thread.
    unsafe { command.pre_exec(prepare) };
}

/// How long a killed program may take to be gone: it may be in the middle of a system call.
const DEATH: Duration = Duration::from_secs(10);
/// Pause between two looks at a killed program.
const DEATH_LOOK: Duration = Duration::from_millis(100);

/// Stays with the program until it ends. `poll` is called repeatedly, and returns the longest time until its
/// next call. If `poll` fails, the program is killed.
pub fn supervise(
    program: u32,
    mut poll: impl FnMut() -> Result<Duration, Failure>,
) -> Result<Child, Failure> {
    let all = SignalSet::all();
    let mut wait = Duration::ZERO;
    loop {
        let arrival = sys::next_signal(&all, wait);
        if let Some(arrival) = arrival.filter(|arrival| arrival.is_for(program)) {
            sys::send_signal(program, arrival.signal);
        }
        wait = poll().inspect_err(|_| kill(program))?;
        sys::reap_orphans(program);
        let child = sys::child(program).map_err(|error| lost(&error))?;
        match child.state {
            // A process that waits for us (a shell with job control) must see that the job has stopped. But
            // stopping would lose a SIGCONT that has come meanwhile.
            ChildState::Stopped(libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)
                if !sys::is_pending(libc::SIGCONT) =>
            {
                sys::stop_self();
            }
            // The program was stopped by another signal. The process that stops and continues it
            // doesn't know of us.
            ChildState::Running | ChildState::Stopped(_) => {}
            ChildState::Exited(_) | ChildState::Killed(_) | ChildState::Ended => return Ok(child),
        }
    }
}

/// Time from an unheeded signal to the note. The program may have been sent the signal, too, and
/// takes a while to end.
const HEEDED: Duration = Duration::from_secs(10);

/// Watches for signals that are meant to end a supervisor beside the program (`pkill farpage`), and don't.
#[derive(Default)]
pub struct Unheeded {
    first: Option<(c_int, Instant)>,
    is_told: bool,
}

impl Unheeded {
    /// Returns a note for the user, once, if the program still runs a while after an unheeded signal.
    pub fn look(&mut self, program: u32) -> Option<String> {
        while let Some(arrival) = sys::next_signal(&SignalSet::all(), Duration::ZERO) {
            let ends = matches!(arrival.signal, libc::SIGTERM | libc::SIGINT | libc::SIGQUIT);
            if ends && arrival.is_for(program) {
                self.first.get_or_insert((arrival.signal, Instant::now()));
            }
        }
        let (signal, _) = self.first.filter(|(_, at)| !self.is_told && at.elapsed() > HEEDED)?;
        self.is_told = true;
        let (name, own) = (sys::signal_name(signal), std::process::id());
        Some(format!(
            "note: {name} was sent to Farpage's supervisor (process {own}), which stays as long as the program (process {program})"
        ))
    }
}

fn lost(error: &io::Error) -> Failure {
    Failure::new(format!("the program can't be waited for: {error}"))
        .fix("see whether it runs on, and end it")
}

/// Kills the program, and waits until it is gone.
fn kill(program: u32) {
    sys::send_signal(program, libc::SIGKILL);
    let until = Instant::now() + DEATH;
    let is_running = |child: Child| matches!(child.state, ChildState::Running | ChildState::Stopped(_));
    let is_there = || sys::child(program).is_ok_and(is_running);
    while is_there() && Instant::now() < until {
        // The program's end is a signal, too.
        sys::next_signal(&SignalSet::all(), DEATH_LOOK);
    }
}
