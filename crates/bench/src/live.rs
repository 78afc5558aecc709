//! Running a load for real: under `farpage run` with its own statistics, within a cgroup, or without a budget.
// UNSAFETY: wait4, which says what a child has used.

use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What one run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the load printed.
    pub load: Value,
    /// Farpage's statistics (`--stats`); null without a budget.
    pub stats: Value,
    /// From start to end.
    pub wall: Duration,
    /// What all its processes together took of the processors.
    pub cpu_seconds: f64,
    /// Faults for which the kernel had to bring a page from swap.
    pub major_faults: u64,
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

/// Runs `farpage run OPTIONS -- farpage load ARGUMENTS`.
pub fn under(options: &[&str], load: &[&str]) -> Result<Outcome, String> {
    let farpage = farpage()?;
    let stats = std::env::temp_dir().join(format!("farpage-bench-{}.json", std::process::id()));
    let mut command = Command::new(&farpage);
    command.arg("run").args(["--quiet", "--stats"]).arg(&stats).args(options);
    command.arg("--").arg(&farpage).arg("load").args(load);
    let outcome = finish(command, || Ok(())).and_then(|outcome| {
        let text = std::fs::read_to_string(&stats).map_err(|error| format!("no statistics: {error}"))?;
        let stats = serde_json::from_str(&text).map_err(|error| format!("bad statistics: {error}"))?;
        Ok(Outcome { stats, ..outcome })
    });
    let _ = std::fs::remove_file(&stats);
    outcome
}

/// Runs `farpage load ARGUMENTS`.
pub fn alone(load: &[&str]) -> Result<Outcome, String> {
    let mut command = Command::new(farpage()?);
    command.arg("load").args(load);
    finish(command, || Ok(()))
}

/// Runs `farpage load ARGUMENTS` as a member of a cgroup: `members` is its list of them. `watch` is called again and again.
pub fn within(
    members: &Path,
    load: &[&str],
    watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
    let mut command = Command::new("sh");
    command
        .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
        .arg(members)
        .arg(farpage()?)
        .arg("load")
        .args(load);
    finish(command, watch)
}

fn farpage() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("farpage's own file can't be found: {error}"))
}

/// Between two calls of `watch`.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// Runs a load to its end. If `watch` finds that it had better not go on, it is ended.
fn finish(mut command: Command, mut watch: impl FnMut() -> Result<(), String>) -> Result<Outcome, String> {
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
    loop {
        let pid = child.id() as libc::pid_t;
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
    let text = reader.join().map_err(|_| "a thread that reads has panicked".to_owned())?;
    let load = text.map_err(|error| error.to_string()).and_then(|text| {
        serde_json::from_slice(&text).map_err(|error| format!("{command:?} printed no JSON: {error}"))
    })?;
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(Outcome {
        load,
        stats: Value::Null,
        wall,
        cpu_seconds: seconds(used.ru_utime) + seconds(used.ru_stime),
        major_faults: used.ru_majflt as u64,
    })
}
