//! The supervisor beside the program, which is the default in most cases. The program keeps the process that
//! `farpage run` was started as.
//!
//! The process parts in two before the program starts. The supervisor is the part that nobody waits for: it
//! isn't the program's child, and has a session of its own. The other part becomes the program. So signals,
//! job control, parents and statuses are the program's own. The program says how it ends
//! (`farpage_runtime::session::first`). The kernel says how a killed program has ended, for sure from Linux
//! 6.15 on.

use crate::host::sys::{self, Child, ChildState, Disposition, Forked};
use crate::text::failure::{FIX_DESCRIPTORS, Failure, STATUS_FAILED};
use crate::text::say;
use farpage_os::futex;
use farpage_runtime::session::first::First;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a program that is to end with our status may take to end before it is killed.
const BEFORE_KILL: Duration = Duration::from_secs(1);
/// Pause between two looks at a program that has rung the bell: it ends next, or can't ring.
const RUNG_LOOK: Duration = Duration::from_millis(10);
/// Nanoseconds of the longest wait for the program's word that it ends.
const LISTEN_NS: u64 = 1_000_000_000;
/// How long the kernel may take to say how a process has ended. Between the wait of the process's parent and
/// the process's last moment, the kernel has no answer.
const REAPED: Duration = Duration::from_millis(500);

/// The part of the process that this is.
pub enum Side {
    /// The part that becomes the program.
    Program(Started),
    /// The supervisor.
    Supervisor(Starting),
}

/// The program's ends of the pipes to its supervisor.
pub struct Started {
    from_supervisor: File,
    /// Closed when the program is executed.
    to_supervisor: File,
}

/// The supervisor's ends of the pipes to the program's part.
pub struct Starting {
    /// The program's process id.
    pub program: u32,
    /// A descriptor of that process: another process may get its id later.
    process: OwnedFd,
    /// None once the supervisor has said all. Closing the pipe tells the other part so.
    to_program: Option<File>,
    from_program: File,
}

/// First byte of what the supervisor says if the run goes on. The session's path follows.
const READY: u8 = b'+';
/// First byte if the run is refused, which the supervisor has told the user. The status follows.
const REFUSED: u8 = b'-';

/// Parts this process in two. None if two more processes can't be made; a supervisor above the
/// program needs only one.
pub fn part() -> Result<Option<Side>, Failure> {
    let program = std::process::id();
    let ((from_supervisor, to_program), (from_program, to_supervisor)) =
        io::pipe().and_then(|one| Ok((one, io::pipe()?))).map_err(|error| not_parted(&error))?;
    // If SIGCHLD is ignored, the kernel keeps no status.
    let inherited = sys::disposition(libc::SIGCHLD);
    sys::set_disposition(libc::SIGCHLD, Disposition::Default);
    let forked = sys::fork();
    match forked {
        Err(_) => {
            sys::set_disposition(libc::SIGCHLD, inherited);
            Ok(None)
        }
        Ok(Forked::Parent(between)) => {
            drop((to_program, from_program));
            let has_forked = sys::wait_for_end(between);
            sys::set_disposition(libc::SIGCHLD, inherited);
            // A program that was started with the signal blocked would find the signal waiting.
            sys::forget_pending(libc::SIGCHLD);
            let [from_supervisor, to_supervisor] =
                [OwnedFd::from(from_supervisor), to_supervisor.into()].map(File::from);
            Ok(has_forked.then_some(Side::Program(Started { from_supervisor, to_supervisor })))
        }
        Ok(Forked::Child) => {
            drop((from_supervisor, to_supervisor));
            sys::begin_session();
            // The supervisor's parent ends at once, so the supervisor is no child that the
            // program could wait for.
            match sys::fork() {
                Ok(Forked::Child) => {}
                Ok(Forked::Parent(_)) => sys::end_at_once(0),
                Err(_) => sys::end_at_once(i32::from(STATUS_FAILED)),
            }
            let [mut to_program, from_program] =
                [OwnedFd::from(to_program), from_program.into()].map(File::from);
            match sys::open_process(program) {
                Ok(process) => {
                    let to_program = Some(to_program);
                    Ok(Some(Side::Supervisor(Starting { program, process, to_program, from_program })))
                }
                // The program's part was killed meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => sys::end_at_once(0),
                Err(error) => {
                    say::plainly(&no_process(&error).to_string());
                    let _ = to_program.write_all(&[REFUSED, STATUS_FAILED]);
                    sys::end_at_once(0)
                }
            }
        }
    }
}

fn not_parted(error: &io::Error) -> Failure {
    let failure = Failure::new(format!("the supervisor can't stand beside the program: {error}"));
    lacks_descriptors(&failure, error).unwrap_or_else(|| failure.fix("use --supervisor above"))
}

/// Returns the failure with its cause if no descriptor is free. A supervisor above needs some, too.
fn lacks_descriptors(failure: &Failure, error: &io::Error) -> Option<Failure> {
    let lacks = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    lacks.then(|| failure.clone().because("no file descriptor is free").fix(FIX_DESCRIPTORS))
}

impl Started {
    /// Waits until the supervisor is ready, and returns the session's path. If the supervisor refuses the
    /// run, returns the status with which the run ends; the user has been told why. If the supervisor can't
    /// be heard, returns a failure that the user is still to be told of.
    pub fn session(&mut self) -> Result<String, Result<u8, Failure>> {
        let mut said = Vec::new();
        let read = self.from_supervisor.read_to_end(&mut said);
        match (read, said.split_first()) {
            (Ok(_), Some((&READY, path))) => Ok(String::from_utf8_lossy(path).into_owned()),
            (Ok(_), Some((&REFUSED, [status]))) => Err(Ok(*status)),
            (Err(error), _) => Err(Err(not_parted(&error))),
            _ => Err(Err(Failure::new("the supervisor has ended before the program was started")
                .because("it was killed")
                .fix("try again, or use --supervisor above"))),
        }
    }

    /// Tells the supervisor that the program is executed next.
    pub fn goes_on(&mut self) {
        // A supervisor that is gone needs no word, so an error is ignored.
        let _ = self.to_supervisor.write_all(b"g");
    }

    /// Tells the supervisor that the program could not be executed. This process tells the user.
    pub fn give_up(mut self) {
        let _ = self.to_supervisor.write_all(b"x");
    }
}

impl Starting {
    /// Closes what the program has open. Standard output stays open if `prints` says that
    /// something is printed there.
    pub fn let_go(&self, prints: bool) {
        sys::close_inherited();
        sys::let_go_of(libc::STDIN_FILENO);
        if !prints {
            sys::let_go_of(libc::STDOUT_FILENO);
        }
    }

    /// Tells the program's part that the session is there. Returns true when the program runs. Returns false
    /// if the program could not be executed, or its process was killed before.
    pub fn ready(&mut self, session: &str) -> bool {
        let mut said = vec![READY];
        said.extend(session.as_bytes());
        self.say(&said);
        let mut words = Vec::new();
        self.from_program.read_to_end(&mut words).is_ok() && words == b"g"
    }

    /// Refuses the run with that status. The caller has told the user.
    pub fn refuse(&mut self, status: u8) {
        self.say(&[REFUSED, status]);
    }

    fn say(&mut self, words: &[u8]) {
        // If the other part is gone, the supervisor finds out when it looks.
        self.to_program.take().map(|mut file| file.write_all(words));
    }

    /// Stays with the program until it says that it ends, or ends. `poll` is called repeatedly, and
    /// returns the longest time until its next call. If `poll` fails, so does `follow`, and the caller
    /// must end the program.
    pub fn follow(
        &self,
        first: &First,
        mut poll: impl FnMut() -> Result<Duration, Failure>,
    ) -> Result<Child, Failure> {
        let (bell, ring) = io::pipe().map_err(|error| no_process(&error))?;
        let is_over = &AtomicBool::new(false);
        std::thread::scope(|threads| {
            let rings = move || {
                // A program may write over the word at any time, so no wait for the word may be the last.
                while first.has_told.load(Ordering::Acquire) == 0 && !is_over.load(Ordering::Acquire) {
                    futex::wait_for_shared(&first.has_told, 0, LISTEN_NS);
                }
                drop(ring);
            };
            // Without another thread the bell's other end is closed, and the program is looked at often.
            let _ = std::thread::Builder::new().spawn_scoped(threads, rings);
            let ended = self.follow_with(&bell, first, &mut poll);
            is_over.store(true, Ordering::Release);
            futex::wake_shared(&first.has_told, 1);
            ended
        })
    }

    fn follow_with(
        &self,
        bell: &impl AsFd,
        first: &First,
        poll: &mut impl FnMut() -> Result<Duration, Failure>,
    ) -> Result<Child, Failure> {
        let (mut resident_peak, mut has_rung) = (0, false);
        loop {
            resident_peak = resident_peak.max(resident_peak_of(self.program));
            let wait = poll()?;
            // The process is looked at before the word: a program that has told is gone only afterwards.
            let is_gone = sys::wait_for_any([self.process.as_fd()], Duration::ZERO);
            let seen = Instant::now();
            // Ordering: Acquire pairs with the Release in `First::say`.
            let is_told = first.has_told.load(Ordering::Acquire) != 0;
            let told = || ChildState::Exited(first.status.load(Ordering::Relaxed) as u8);
            let most = first.resident_most.each_ref().map(|most| most.load(Ordering::Relaxed));
            let peak = if is_told { first.resident_peak.load(Ordering::Relaxed) } else { 0 };
            let ended = |state| {
                Ok(Child {
                    state,
                    seen,
                    resident_peak: peak.max(resident_peak),
                    resident_most: is_told.then_some(most[0]),
                    waited_for_most: most[1],
                })
            };
            if is_gone {
                // The kernel's word counts first: of several threads that end a program, one has told.
                return match self.how_it_ended() {
                    ChildState::Ended if is_told => ended(told()),
                    state => ended(state),
                };
            }
            if is_told && first.waits.load(Ordering::Relaxed) != 0 {
                return ended(told());
            }
            if has_rung {
                sys::wait_for_any([self.process.as_fd()], wait.min(RUNG_LOOK));
            } else {
                sys::wait_for_any([self.process.as_fd(), bell.as_fd()], wait);
            }
            has_rung = sys::wait_for_any([bell.as_fd()], Duration::ZERO);
        }
    }

    /// Waits until a program is gone that has said that it ends.
    pub fn wait_until_gone(&self) {
        while !sys::wait_for_any([self.process.as_fd()], Duration::from_secs(60)) {}
    }

    /// Says why, and ends the program: with our status if its engine can do that, by SIGKILL otherwise.
    pub fn end(&self, first: &First, why: &Failure) {
        say::plainly(&why.to_string());
        first.is_to_end.store(1, Ordering::Relaxed);
        has_seen(first);
        if !sys::wait_for_any([self.process.as_fd()], BEFORE_KILL) {
            sys::send_signal_to(&self.process, libc::SIGKILL);
            sys::wait_for_any([self.process.as_fd()], BEFORE_KILL);
        }
    }

    /// Returns what the kernel says of the program, which has ended. The kernel knows until the parent has
    /// waited for the program, and from Linux 6.15 on afterwards, too.
    fn how_it_ended(&self) -> ChildState {
        let until = Instant::now() + REAPED;
        loop {
            match sys::status_of_zombie(self.program).or_else(|| sys::status_of_ended(&self.process)) {
                Some(state) => return state,
                None if Instant::now() > until => return ChildState::Ended,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

fn no_process(error: &io::Error) -> Failure {
    let failure = Failure::new(format!("the program can't be followed: {error}"));
    lacks_descriptors(&failure, error).unwrap_or_else(|| {
        failure.because("`--supervisor beside` needs Linux 5.3").fix("use --supervisor above")
    })
}

/// Tells the program that the summary is printed. The program waits for that before it ends.
pub fn has_seen(first: &First) {
    first.is_seen.store(1, Ordering::Relaxed);
    futex::wake_shared(&first.is_seen, 1);
}

/// Returns the most memory in RAM that a process has had since it executed its program, in bytes; 0 if it
/// has none any more.
fn resident_peak_of(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}
