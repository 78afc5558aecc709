//! Running a load, or any program, for real: under `farpage run` with its own statistics, within a cgroup, or without a budget.
// UNSAFETY: wait4, which says what a child has used.

use serde_json::Value;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What one run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What it printed.
    pub printed: Vec<u8>,
    /// The same as JSON, if it is a load.
    pub load: Value,
    /// Farpage's statistics (`--stats`); null without a budget.
    pub stats: Value,
    /// From start to end.
    pub wall: Duration,
    /// What all its processes together took of the processors.
    pub cpu_seconds: f64,
    /// Faults for which the kernel had to bring a page from swap.
    pub major_faults: u64,
    /// The most that one of its processes had in memory, in bytes.
    pub peak_bytes: u64,
}

impl Outcome {
    /// A number that the load printed.
    pub fn number(&self, name: &str) -> f64 {
        self.load[name].as_f64().unwrap_or(f64::NAN)
    }

    /// A number of one part of the load.
    pub fn part(&self, part: &str, name: &str) -> f64 {
        self.load["parts"][part][name].as_f64().unwrap_or(f64::NAN)
    }

    /// One of Farpage's counters, of all processes together.
    pub fn counter(&self, name: &str) -> f64 {
        self.stats["counters"][name].as_f64().unwrap_or(f64::NAN)
    }

    /// One of Farpage's counters, of the process in which this part of the load ran.
    pub fn counter_of(&self, part: &str, name: &str) -> f64 {
        let pid = &self.load["parts"][part]["pid"];
        let processes = self.stats["processes"].as_array();
        let process = processes.and_then(|all| all.iter().find(|process| process["pid"] == *pid));
        process.and_then(|process| process["counters"][name].as_f64()).unwrap_or(f64::NAN)
    }
}

/// Where a program runs.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// Without a budget.
    Alone,
    /// As a member of a cgroup: this is its list of them.
    Within(&'a Path),
    /// Under `farpage run` with these options.
    Under(&'a [&'a str]),
}

/// Runs `farpage run OPTIONS -- farpage load ARGUMENTS`.
pub fn under(options: &[&str], load: &[&str]) -> Result<Outcome, String> {
    run_load(Place::Under(options), load, || Ok(()))
}

/// Runs `farpage load ARGUMENTS`.
pub fn alone(load: &[&str]) -> Result<Outcome, String> {
    run_load(Place::Alone, load, || Ok(()))
}

/// Runs `farpage load ARGUMENTS` as a member of a cgroup: `members` is its list of them. `watch` is called again and again.
pub fn within(
    members: &Path,
    load: &[&str],
    watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
    run_load(Place::Within(members), load, watch)
}

fn run_load(
    place: Place<'_>,
    load: &[&str],
    watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
    let farpage = farpage()?;
    let words = [&[&*farpage, "load"], load].concat();
    let outcome = run(place, &words, Path::new("."), watch)?;
    let load = serde_json::from_slice(&outcome.printed)
        .map_err(|error| format!("{words:?} printed no JSON: {error}"))?;
    Ok(Outcome { load, ..outcome })
}

/// Runs a program in a directory. `watch` is called again and again; if it finds that the program had better not go on, it is
/// ended.
pub fn run(
    place: Place<'_>,
    words: &[&str],
    directory: &Path,
    watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
    let stats = std::env::temp_dir().join(format!("farpage-bench-{}.json", std::process::id()));
    let mut command = match place {
        Place::Alone => Command::new(words[0]),
        Place::Within(members) => {
            let mut command = Command::new("sh");
            command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(members).arg(words[0]);
            command
        }
        Place::Under(options) => {
            let mut command = Command::new(farpage()?);
            command.args(["run", "--quiet", "--stats"]).arg(&stats).args(options).arg("--").arg(words[0]);
            command
        }
    };
    command.args(&words[1..]).current_dir(directory);
    let outcome = finish(command, watch);
    if !matches!(place, Place::Under(_)) {
        return outcome;
    }
    let outcome = outcome.and_then(|outcome| {
        let text = std::fs::read_to_string(&stats).map_err(|error| format!("no statistics: {error}"))?;
        let stats = serde_json::from_str(&text).map_err(|error| format!("bad statistics: {error}"))?;
        Ok(Outcome { stats, ..outcome })
    });
    let _ = std::fs::remove_file(&stats);
    outcome
}

/// The file of this program, which is `farpage`.
pub fn farpage() -> Result<String, String> {
    let path =
        std::env::current_exe().map_err(|error| format!("farpage's own file can't be found: {error}"))?;
    path.into_os_string().into_string().map_err(|name| format!("{} is no UTF-8", name.display()))
}

/// The most that a process or one of its descendants had in memory so far, in bytes. (What wait4 says of that begins with what
/// this process had when it started the child.)
fn peak_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    children.map(peak_of).fold(kib * 1024, u64::max)
}

/// Between two calls of `watch`.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// A benchmark that is killed takes its programs with it: what they are in and swap to could not be undone else.
fn dies_with_us(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: takes no pointers.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) };
        // SAFETY: takes nothing.
        let is_there = unsafe { libc::getppid() } as u32 == parent;
        if is_there { Ok(()) } else { Err(std::io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: two system calls, and an error that takes no memory.
    unsafe { command.pre_exec(ask) };
}

/// Runs a program to its end.
fn finish(mut command: Command, mut watch: impl FnMut() -> Result<(), String>) -> Result<Outcome, String> {
    dies_with_us(&mut command);
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{command:?} can't be started: {error}"))?;
    let mut output = child.stdout.take().ok_or("no pipe")?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut output, &mut text).map(|_| text)
    });
    // SAFETY: zeros are a good value of these counts.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    let mut status = 0;
    let mut watched = Ok(());
    let mut peak_bytes = 0;
    loop {
        let pid = child.id() as libc::pid_t;
        peak_bytes = peak_bytes.max(peak_of(child.id()));
        // SAFETY: a child of this process that nobody else waits for; status and counts are this function's own.
        match unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut used) } {
            0 if watched.is_ok() => {
                watched = watch();
                if watched.is_err() {
                    // SAFETY: takes no pointers; it isn't waited for yet, so the number is still the child's. A supervisor
                    // passes it on.
                    unsafe { libc::kill(pid, libc::SIGTERM) };
                }
            }
            0 => {}
            -1 => {
                return Err(format!("{command:?} can't be waited for: {}", std::io::Error::last_os_error()));
            }
            _ => break,
        }
        std::thread::sleep(WATCH_EVERY);
    }
    let wall = began.elapsed();
    watched?;
    let status = ExitStatus::from_raw(status);
    if !status.success() {
        return Err(format!("{command:?} ended with {status}"));
    }
    let printed = reader.join().map_err(|_| "a thread that reads has panicked".to_owned())?;
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(Outcome {
        printed: printed.map_err(|error| error.to_string())?,
        load: Value::Null,
        stats: Value::Null,
        wall,
        cpu_seconds: seconds(used.ru_utime) + seconds(used.ru_stime),
        major_faults: used.ru_majflt as u64,
        peak_bytes,
    })
}
