//! Runs in a memory cgroup. The default budget fits what the group has left. The budget becomes smaller as
//! the group fills. A kill for memory is told as one.

use super::wait_until;
use crate::farpage::budgeted::{MIB, alone_with, library};
use crate::farpage::group::Group;
use crate::farpage::{Ended, directory, farpage, skip};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Runs `farpage run` with these words in a group, to its end.
fn run_in(group: &Group, words: &[&str]) -> Ended {
    Ended::of(start_in(group, words).wait_with_output().unwrap())
}

/// Starts `farpage run` with these words in a group.
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

/// Returns the sum that `fills` prints.
fn filled(mib: u64) -> String {
    format!("{}\n", (mib << 8) * u64::from(b'0'))
}

/// A file in memory.
struct InMemory(String);

impl InMemory {
    /// Makes the file by a process of the group, which pays for it.
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

/// A budget of 90 % of the limit would be too much beside a file in memory: the kernel would kill
/// the program.
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

/// Programs that the kernel has killed must not be told of with "stayed within its budget" and
/// "problems none".
#[test]
fn kill_for_memory_is_told_with_the_limit_and_whom_it_hit() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(64 * MIB)) else { return };
    // Memory that processes share isn't managed. Of the processes that end, the one with the most memory
    // of its own is named.
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

/// The file is not there when the budget is made. If the budget stayed as it is, the kernel would
/// kill the program.
#[test]
fn budget_becomes_smaller_as_the_group_fills() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(96 * MIB)) else { return };
    // The file is made once beforehand, because /dev/shm may be there and be too small.
    let Some(file) = InMemory::new(&group, 40) else { return };
    fs::remove_file(&file.0).unwrap();
    let program = format!("head -c 40M /dev/zero > {} && exec python3 -c \"{}\"", file.0, fills(100));
    let ended = lives(&group, &["sh", "-c", &program], &filled(100));
    assert!(ended.stderr.contains("farpage: note: the budget of "), "{}", ended.stderr);
    assert!(ended.stderr.contains(" as a limit left no more; peak "), "{}", ended.stderr);
}

/// A budget above the limit must not end in SIGKILL and "stayed within its budget of 200 MiB".
#[test]
fn budget_above_the_limit_ends_nobody() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(64 * MIB)) else { return };
    let ended = lives(&group, &["--ram", "200M", "python3", "-c", &fills(100)], &filled(100));
    assert!(ended.stderr.contains("it becomes smaller as that fills"), "{}", ended.stderr);
    assert!(ended.stderr.contains(" as a limit left no more; peak "), "{}", ended.stderr);
}

/// No budget counts the page tables and the kernel's memory of each process. Without a reserve for these the
/// kernel would kill one of the processes.
#[test]
fn many_processes_leave_room_for_what_each_costs() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(96 * MIB)) else { return };
    let one = format!("python3 -c \"{}\"", fills(60));
    let all = format!("{one} | cat & {one} & {one}; wait");
    lives(&group, &["sh", "-c", &all], &filled(60).repeat(3));
}

/// If each run took 90 % of the group, the kernel would kill one. If three runs didn't find each other, the
/// oldest would keep more than its part. A supervisor has the sessions of its neighbours open, and must not
/// take the first of them for its own.
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
