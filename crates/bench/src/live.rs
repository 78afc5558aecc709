//! Runs a load, or any program: under `farpage run` with its own statistics, within a cgroup, or without a
//! budget. No setting of the user's (`FARPAGE_...`) reaches a program.
// UNSAFETY: wait4 is a C function, which reports what a child has used.

use crate::stop::{self, go_on};
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
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

/// Runs a program in a directory. `watch` is called repeatedly. If it returns an error, or a signal asks this
/// process to end, the program is ended.
pub fn run(
    place: Place<'_>,
    words: &[&str],
    directory: &Path,
    watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
    // A signal becomes an error, so that the program ends and the statistics are removed.
    let _hearing = stop::hear();
    go_on()?;
    let stats = temporary()?.join(format!("farpage-bench-{}.json", std::process::id()));
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
    without_settings(&mut command, place, std::env::vars_os())?;
    if !matches!(place, Place::Under(_)) {
        return finish(command, watch);
    }
    // A file of an earlier process with the same number would be taken for this run's.
    let _ = std::fs::remove_file(&stats);
    let outcome = finish(command, watch).and_then(|outcome| {
        let text = std::fs::read_to_string(&stats).map_err(|error| format!("no statistics: {error}"))?;
        let stats = serde_json::from_str(&text).map_err(|error| format!("bad statistics: {error}"))?;
        Ok(Outcome { stats, ..outcome })
    });
    let _ = std::fs::remove_file(&stats);
    outcome
}

/// Variables that say where things are. `farpage run` gets them, as absolute paths.
const PATHS: [&str; 2] = ["FARPAGE_PRELOAD", "FARPAGE_SWAP_DIR"];

/// Takes the user's settings of Farpage from a command. They would change one side of a comparison only.
fn without_settings(
    command: &mut Command,
    place: Place<'_>,
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<(), String> {
    for (name, value) in variables {
        if !name.as_encoded_bytes().starts_with(b"FARPAGE_") {
            continue;
        }
        let is_path = PATHS.iter().any(|path| name == *path) && !value.is_empty();
        if is_path && matches!(place, Place::Under(_)) {
            command.env(&name, absolute(Path::new(&value))?);
        } else {
            command.env_remove(&name);
        }
    }
    Ok(())
}

/// Returns a path that is right in any current directory.
fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{} has no absolute path: {error}", path.display()))
}

/// Returns the directory of temporary files, as an absolute path.
pub fn temporary() -> Result<PathBuf, String> {
    let named = std::env::temp_dir();
    let found = named.canonicalize();
    found
        .map_err(|error| format!("{}, the place of temporary files, can't be used: {error}", named.display()))
}

/// Returns the directory to which the kernel and Farpage swap, as an absolute path: `$FARPAGE_SWAP_DIR`, or
/// /var/tmp.
pub fn swap_directory() -> Result<PathBuf, String> {
    swap_directory_of(std::env::var_os("FARPAGE_SWAP_DIR"))
}

fn swap_directory_of(named: Option<OsString>) -> Result<PathBuf, String> {
    let named =
        named.filter(|name| !name.is_empty()).map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    let wrong = |why: String| {
        format!("{} can't be swapped to: {why}; FARPAGE_SWAP_DIR names a directory", named.display())
    };
    let path = named.canonicalize().map_err(|error| wrong(error.to_string()))?;
    if path.is_dir() { Ok(path) } else { Err(wrong("it is no directory".to_owned())) }
}

/// Returns the path of this program, which is `farpage`.
pub fn farpage() -> Result<String, String> {
    let path =
        std::env::current_exe().map_err(|error| format!("farpage's own file can't be found: {error}"))?;
    path.into_os_string().into_string().map_err(|name| format!("{} is no UTF-8", name.display()))
}

/// Returns the children of all threads of a process.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
    children
        .flat_map(|line| {
            line.unwrap_or_default().split(' ').filter_map(|child| child.parse().ok()).collect::<Vec<u32>>()
        })
        .collect()
}

/// Ends a child of this process and all of the child's descendants, by SIGKILL. The child isn't waited for
/// yet.
fn end_with_descendants(pid: u32) {
    let mut all = vec![pid];
    let mut at = 0;
    while at < all.len() {
        all.extend(children_of(all[at]));
        at += 1;
    }
    for pid in all {
        // SAFETY: the call takes no pointers. The number is that of a process which has just been seen below
        // the child.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
    }
}

/// Returns the largest memory that a process or one of its descendants has had so far, in bytes. The figure
/// of wait4 can't be used, because it begins with the memory that this process had when it started the child.
fn peak_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    children_of(pid).into_iter().map(peak_of).fold(kib * 1024, u64::max)
}

/// Time between two calls of `watch`.
const WATCH_EVERY: Duration = Duration::from_millis(20);
/// Time that a program has for its end after SIGTERM. Then SIGKILL ends the program.
const PATIENCE: Duration = Duration::from_secs(10);

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
fn finish(command: Command, watch: impl FnMut() -> Result<(), String>) -> Result<Outcome, String> {
    finish_within(PATIENCE, command, watch)
}

fn finish_within(
    patience: Duration,
    mut command: Command,
    mut watch: impl FnMut() -> Result<(), String>,
) -> Result<Outcome, String> {
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
    let (mut watched, mut asked) = (Ok(()), None::<Instant>);
    let mut peak_bytes = 0;
    loop {
        let pid = child.id() as libc::pid_t;
        peak_bytes = peak_bytes.max(peak_of(child.id()));
        // SAFETY: the child is one of this process, and no other code waits for it. Status and counts are
        // this function's own variables.
        match unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut used) } {
            0 if watched.is_ok() => {
                watched = go_on().and_then(|()| watch());
                if watched.is_err() {
                    asked = Some(Instant::now());
                    // SAFETY: the call takes no pointers. The child isn't waited for yet, so its number is
                    // still its own. A supervisor passes the signal on.
                    unsafe { libc::kill(pid, libc::SIGTERM) };
                }
            }
            0 if asked.is_some_and(|asked| asked.elapsed() >= patience) => {
                end_with_descendants(child.id());
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
    // A terminal sends its signal to the program, too.
    go_on()?;
    let status = ExitStatus::from_raw(status);
    if !status.success() {
        return Err(format!("{command:?} ended with {status}"));
    }
    let printed = collected(reader, patience).map_err(|why| format!("{command:?}: {why}"))?;
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(Outcome {
        printed,
        load: Value::Null,
        stats: Value::Null,
        wall,
        cpu_seconds: seconds(used.ru_utime) + seconds(used.ru_stime),
        major_faults: used.ru_majflt as u64,
        peak_bytes,
    })
}

/// Returns the output of a program that has ended. A process that the program has left behind may hold the
/// output open, and isn't waited for.
fn collected(reader: JoinHandle<std::io::Result<Vec<u8>>>, patience: Duration) -> Result<Vec<u8>, String> {
    let ended = Instant::now();
    while !reader.is_finished() {
        go_on()?;
        if ended.elapsed() > patience {
            return Err("it has ended, and a process that it has started holds its output open".to_owned());
        }
        std::thread::sleep(WATCH_EVERY);
    }
    let printed = reader.join().map_err(|_| "a thread that reads has panicked".to_owned())?;
    printed.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// FARPAGE_CODEC and its like changed Farpage's side of a comparison. In `bench programs`, which runs
    /// programs in another directory, a relative FARPAGE_PRELOAD named no file.
    #[test]
    fn settings_of_the_user_reach_no_program_and_paths_are_absolute() {
        let variables = [
            ("FARPAGE_CODEC", "lz4"),
            ("FARPAGE_NO_DISK", "1"),
            ("FARPAGE_PRELOAD", "target/lib.so"),
            ("FARPAGE_SWAP_DIR", ""),
            ("HOME", "/root"),
        ];
        let found = |place| -> BTreeMap<String, Option<String>> {
            let mut command = Command::new("true");
            let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
            without_settings(&mut command, place, variables).unwrap();
            let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
            command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect()
        };
        let removed = ["FARPAGE_CODEC", "FARPAGE_NO_DISK", "FARPAGE_PRELOAD", "FARPAGE_SWAP_DIR"];
        let mut wanted: BTreeMap<String, Option<String>> =
            removed.into_iter().map(|name| (name.to_owned(), None)).collect();
        assert_eq!(found(Place::Alone), wanted);
        assert_eq!(found(Place::Within(Path::new("/x"))), wanted);
        let library = std::env::current_dir().unwrap().join("target/lib.so");
        wanted.insert("FARPAGE_PRELOAD".to_owned(), library.to_str().map(str::to_owned));
        assert_eq!(found(Place::Under(&[])), wanted);
    }

    /// Where FARPAGE_SWAP_DIR named nothing, `bench extents` measured /var/tmp instead, and said nothing.
    #[test]
    fn swap_directory_is_absolute_and_there() {
        assert_eq!(swap_directory_of(Some("/".into())), Ok("/".into()));
        assert_eq!(swap_directory_of(Some(".".into())), Ok(std::env::current_dir().unwrap()));
        assert_eq!(swap_directory_of(Some("".into())), swap_directory_of(None), "empty is unset");
        for wrong in ["/nonexistent/farpage", "/proc/self/maps"] {
            let why = swap_directory_of(Some(wrong.into())).unwrap_err();
            assert!(why.contains(wrong) && why.contains("FARPAGE_SWAP_DIR"), "{why}");
        }
    }

    /// A program that ignored SIGTERM kept the benchmark, and the machine's changed settings, for ever.
    #[test]
    fn program_that_ignores_the_end_is_killed_with_its_children() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' TERM; sh -c 'echo $$; while :; do sleep 0.1; done' & wait; wait"]);
        let began = Instant::now();
        let mut children = Vec::new();
        let ended = finish_within(Duration::from_millis(50), command, || {
            children = children_of(std::process::id()).into_iter().flat_map(children_of).collect();
            if children.is_empty() { Ok(()) } else { Err("enough".to_owned()) }
        });
        assert_eq!(ended.unwrap_err(), "enough");
        assert!(began.elapsed() < Duration::from_secs(60));
        let is_gone = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        while !children.iter().all(is_gone) {
            assert!(began.elapsed() < Duration::from_secs(60), "{children:?}");
            std::thread::yield_now();
        }
    }

    /// The benchmark waited for ever, with the machine's settings changed.
    #[test]
    fn output_that_is_held_open_is_not_waited_for() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 20 & echo done"]);
        let found = finish_within(Duration::from_millis(50), command, || Ok(()));
        assert!(found.unwrap_err().contains("holds its output open"));
    }

    #[test]
    fn children_of_every_thread_are_found() {
        let mut child =
            std::thread::spawn(|| Command::new("sleep").arg("60").spawn().unwrap()).join().unwrap();
        let all = children_of(std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all.contains(&child.id()), "{all:?}");
    }
}
