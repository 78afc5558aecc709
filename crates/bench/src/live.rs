//! Runs a load, or any program: under `farpage run` with its own statistics, within a cgroup, or without a
//! budget.
// UNSAFETY: wait4 is a C function, which reports what a child has used.

use serde_json::Value;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The results of one run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The program's output.
    pub printed: Vec<u8>,
    /// The output as JSON, if the program is a load.
    pub load: Value,
    /// Farpage's statistics (`--stats`); null without a budget.
    pub stats: Value,
    /// Time from start to end.
    pub wall: Duration,
    /// CPU time of all its processes together.
    pub cpu_seconds: f64,
    /// Faults for which the kernel had to bring a page from swap.
    pub major_faults: u64,
    /// Largest memory of any one of its processes, in bytes.
    pub peak_bytes: u64,
}

impl Outcome {
    /// Returns a number that the load printed.
    pub fn number(&self, name: &str) -> f64 {
        self.load[name].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns a number of one part of the load.
    pub fn part(&self, part: &str, name: &str) -> f64 {
        self.load["parts"][part][name].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns one of Farpage's counters, of all processes together.
    pub fn counter(&self, name: &str) -> f64 {
        self.stats["counters"][name].as_f64().unwrap_or(f64::NAN)
    }

    /// Returns one of Farpage's counters, of the process that ran this part of the load.
    pub fn counter_of(&self, part: &str, name: &str) -> f64 {
        let pid = &self.load["parts"][part]["pid"];
        let processes = self.stats["processes"].as_array();
        let process = processes.and_then(|all| all.iter().find(|process| process["pid"] == *pid));
        process.and_then(|process| process["counters"][name].as_f64()).unwrap_or(f64::NAN)
    }
}

/// The environment in which a program runs.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// Without a budget.
    Alone,
    /// As a member of a cgroup. The path is the cgroup's list of members.
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

/// Runs `farpage load ARGUMENTS` as a member of a cgroup, whose list of members is `members`. `watch` is
/// called repeatedly.
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

/// Runs a program in a directory. `watch` is called repeatedly. If it returns an error, the program is ended.
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

/// Returns the path of this program, which is `farpage`.
pub fn farpage() -> Result<String, String> {
    let path =
        std::env::current_exe().map_err(|error| format!("farpage's own file can't be found: {error}"))?;
    path.into_os_string().into_string().map_err(|name| format!("{} is no UTF-8", name.display()))
}

/// Returns the largest memory that a process or one of its descendants has had so far, in bytes. The figure
/// of wait4 can't be used, because it begins with the memory that this process had when it started the child.
fn peak_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    children.map(peak_of).fold(kib * 1024, u64::max)
}

/// Time between two calls of `watch`.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// Makes the child die with this process. If a killed benchmark left its programs running, their cgroup and
/// swap file could not be undone.
fn dies_with_us(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: the call takes no pointers.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) };
        // SAFETY: the call takes no arguments.
        let is_there = unsafe { libc::getppid() } as u32 == parent;
        if is_there { Ok(()) } else { Err(std::io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: the closure makes two system calls, and its error allocates no memory.
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
    // SAFETY: zeros are a valid value of these counts.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    let mut status = 0;
    let mut watched = Ok(());
    let mut peak_bytes = 0;
    loop {
        let pid = child.id() as libc::pid_t;
        peak_bytes = peak_bytes.max(peak_of(child.id()));
        // SAFETY: the child is one of this process, and no other code waits for it. Status and counts are
        // this function's own variables.
        match unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut used) } {
            0 if watched.is_ok() => {
                watched = watch();
                if watched.is_err() {
                    // SAFETY: the call takes no pointers. The child isn't waited for yet, so its number is
                    // still its own. A supervisor passes the signal on.
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
