//! Behaviour at the limits, end to end. The tests have a full area, a full disk, a disk that fails, a
//! budget that is too small, and a sudden death on either side. Nothing is lost that need not be lost, and
//! nothing is left behind.
//!
//! Helpers of all these tests are here; each module tells one story.

#[expect(dead_code, reason = "each test file uses its own part of it")]
#[path = "../farpage/mod.rs"]
mod farpage;

mod budgets;
mod dormant;
mod ends;
mod exec;
mod groups;
mod life;
mod paging;
mod storage;

use farpage::budgeted::{Job, MIB, Running, Under, compiled, find, is_full_size};
use farpage::{put, skip};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const RAM: u64 = 32 * MIB;

/// Modes in which a tree of processes is tested.
fn modes() -> &'static [&'static str] {
    if is_full_size() { &["signal", "thread", "segv"] } else { &["signal"] }
}

fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_within(60, what, condition);
}

fn wait_within(seconds: u64, what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(seconds), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts the program that waits (see `tests/programs/waits.c`), up to the wait.
fn start_waiting(case: &str, options: &[&str]) -> Running {
    let program = compiled("waits");
    let running =
        Job::new(&Under::budget(RAM, options), &[program.to_str().unwrap(), case]).within(150).start();
    let ready = running.place().join("ready");
    let pid = running.pid();
    wait_until("the program's readiness", || ready.exists() || is_gone(pid));
    running
}

fn go(running: &Running) {
    File::create(running.place().join("go")).unwrap();
}

/// Whether a process is gone, or is a zombie.
fn is_gone(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

fn ran(program: &str, words: &[&str]) -> bool {
    find(program)
        .is_some_and(|program| Command::new(program).args(words).output().is_ok_and(|o| o.status.success()))
}

/// Makes a file with all its blocks by mkswap; none if there is no mkswap.
#[track_caller]
fn swap_file(directory: &Path, name: &str, bytes: u64) -> Option<String> {
    let path = put(directory, name, b"", 0o600);
    if !ran("fallocate", &["-l", &bytes.to_string(), &path]) || !ran("mkswap", &[&path]) {
        skip("there is no mkswap, or no fallocate");
        return None;
    }
    Some(path)
}
