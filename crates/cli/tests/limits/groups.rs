//! Runs in a memory cgroup: the default budget fits what the group has left, the budget becomes smaller as that fills, and a kill for
//! memory is told as that.

use super::wait_until;
use crate::farpage::budgeted::{MIB, alone_with, library};
use crate::farpage::group::Group;
use crate::farpage::{Ended, directory, farpage, skip};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// `farpage run` with these words, in a group.
fn run_in(group: &Group, words: &[&str]) -> Ended {
    Ended::of(start_in(group, words).wait_with_output().unwrap())
}

/// The same, that goes on.
fn start_in(group: &Group, words: &[&str]) -> Child {
    let mut command = farpage();
    command
        .env("FARPAGE_PRELOAD", library())
        .env_remove("TMPDIR")
        .args(["run", "--swap", "/var/tmp"])
        .args(words);
    group.enter(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A program that fills private memory, which can be evicted, and adds up one byte of each page.
fn fills(mib: u64) -> String {
    format!("b = bytearray(b'{}' * {}); print(sum(b[::4096]))", "0123456789abcdef", mib << 16)
}

/// The sum of that.
fn filled(mib: u64) -> String {
    format!("{}\n", (mib << 8) * u64::from(b'0'))
}

/// A file in memory.
struct InMemory(String);

impl InMemory {
    /// Made by a process of the group, which pays for it.
    #[track_caller]
    fn new(group: &Group, mib: u64) -> Option<InMemory> {
        let file = InMemory(format!("/dev/shm/farpage-test-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args(["-c", &format!("head -c {mib}M /dev/zero > {}", file.0)]);
        group.enter(&mut command);
        let is_made = command.status().is_ok_and(|status| status.success());
        if !is_made {
            skip("there is no /dev/shm");
        }
        is_made.then_some(file)
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The budget was 90 % of the limit: 72 MiB, where 40 were left. The kernel killed the program.
#[test]
fn default_budget_leaves_room_for_what_the_group_holds() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(96 * MIB)) else { return };
    let Some(_file) = InMemory::new(&group, 40) else { return };
    let ended = run_in(&group, &["python3", "-c", &fills(100)]);
    assert_eq!((ended.status, ended.stdout), (Some(0), filled(100)), "{}", ended.stderr);
    let budget = ended.stderr.lines().find(|line| line.contains("  budget ")).unwrap();
    assert!(budget.contains("(cgroup v") && budget.contains("MiB in use and a reserve of "), "{budget}");
    assert!(ended.stderr.contains("problems   none"), "{}", ended.stderr);
}

/// "stayed within its budget", "problems none": of programs that the kernel had shot.
#[test]
fn kill_for_memory_is_told_with_the_limit_and_whom_it_hit() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(64 * MIB)) else { return };
    // Memory that processes share isn't managed. Of those that end, the one that had the most memory of its own is named.
    let shares =
        "import mmap; a = b'x' * (16 << 20); m = mmap.mmap(-1, 200 << 20); m.write(b'x' * (200 << 20))";
    let python = |ending: &str| format!("python3 -c \"{shares}\"; {ending}");
    let ended = run_in(&group, &["--ram", "40M", "python3", "-c", shares]);
    assert_eq!((ended.status, ended.signal), (None, Some(libc::SIGKILL)), "{}", ended.stderr);
    told(
        &ended,
        "out-of-memory killer most likely ended it: a process in its cgroup meanwhile; the tightest limit is 64 MiB in ",
    );
    let ended = run_in(&group, &["--ram", "40M", "sh", "-c", &python("echo $?")]);
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), "137\n"), "{}", ended.stderr);
    told(&ended, "ended a process in its cgroup; of the run ended at that time python3 (pid ");
}

#[track_caller]
fn told(ended: &Ended, words: &str) {
    let mut problems = ended.stderr.lines().filter(|line| line.starts_with("farpage:   problem "));
    let problem = problems.find(|line| line.contains(words)).unwrap_or_else(|| panic!("{}", ended.stderr));
    assert!(problem.contains("use --ram 30M or less"), "{problem}");
    assert!(!ended.stderr.contains("stayed within") && !ended.stderr.contains("none"), "{}", ended.stderr);
}

/// Runs the program in the group, and checks its output and that the kernel killed nobody.
#[track_caller]
fn lives(group: &Group, words: &[&str], output: &str) -> Ended {
    let ended = run_in(group, words);
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), output), "{}", ended.stderr);
    assert_eq!(group.kills(), 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("problems   none"), "{}", ended.stderr);
    ended
}

/// The file was not there when the budget was made: 72 MiB, where 40 were left. The kernel killed the program.
#[test]
fn budget_becomes_smaller_as_the_group_fills() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(96 * MIB)) else { return };
    // Tried first: it may be there, and be too small.
    let Some(file) = InMemory::new(&group, 40) else { return };
    fs::remove_file(&file.0).unwrap();
    let program = format!("head -c 40M /dev/zero > {} && exec python3 -c \"{}\"", file.0, fills(100));
    let ended = lives(&group, &["sh", "-c", &program], &filled(100));
    assert!(ended.stderr.contains("farpage: note: the budget of "), "{}", ended.stderr);
    assert!(ended.stderr.contains(" as a limit left no more; peak "), "{}", ended.stderr);
}

/// "killed by SIGKILL", "stayed within its budget of 200 MiB".
#[test]
fn budget_above_the_limit_ends_nobody() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(64 * MIB)) else { return };
    let ended = lives(&group, &["--ram", "200M", "python3", "-c", &fills(100)], &filled(100));
    assert!(ended.stderr.contains("it becomes smaller as that fills"), "{}", ended.stderr);
    assert!(ended.stderr.contains(" as a limit left no more; peak "), "{}", ended.stderr);
}

/// The tables and the kernel's memory of each process were in no budget. One of them was killed.
#[test]
fn many_processes_leave_room_for_what_each_costs() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(96 * MIB)) else { return };
    let one = format!("python3 -c \"{}\"", fills(60));
    let all = format!("{one} | cat & {one} & {one}; wait");
    lives(&group, &["sh", "-c", &all], &filled(60).repeat(3));
}

/// Each run took 90 % of the group, and the kernel killed one. Of three runs that don't find each other the oldest keeps 118 MiB of 192.
/// A supervisor has the sessions of its neighbours open, and the first of those was taken for its own.
#[test]
fn runs_in_one_group_share_it() {
    let Some(_alone) = alone_with("python3") else { return };
    for count in [2, 3] {
        let limit = count * 64 * MIB;
        let Some(group) = Group::new().filter(|group| group.limit(limit)) else { return };
        let place = directory();
        let file = |name: &str| place.path().join(name).display().to_string();
        let stats = |at: u64| file(&format!("{at}.json"));
        let start = |at: u64, program: &str| {
            start_in(&group, &["--stats", &stats(at), "--ram", "90%", "python3", "-c", program])
        };
        let waits = format!(
            "import os, time; {}; open('{}', 'w')\nwhile not os.path.exists('{}'): time.sleep(0.05)",
            fills(150),
            file("ready"),
            file("go")
        );
        let oldest = start(0, &waits);
        wait_until("the first run's readiness", || Path::new(&file("ready")).exists());
        let younger: Vec<_> = (1..count).map(|at| start(at, &fills(150))).collect();
        let ends = |run: Child| {
            let ended = Ended::of(run.wait_with_output().unwrap());
            assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), &*filled(150)), "{}", ended.stderr);
            ended
        };
        younger.into_iter().for_each(|run| _ = ends(run));
        fs::write(file("go"), "").unwrap();
        let ended = ends(oldest);
        let json: serde_json::Value = serde_json::from_slice(&fs::read(stats(0)).unwrap()).unwrap();
        let least = json["settings"]["ram_bytes_least"].as_u64().unwrap() / MIB;
        assert!((32..100).contains(&least), "{least} of {count} times 64 MiB: {}", ended.stderr);
        assert_eq!(group.kills(), 0);
    }
}
