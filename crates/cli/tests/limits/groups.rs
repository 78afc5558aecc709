//! Runs in a memory cgroup: the default budget fits what the group has left, and a kill for memory is told as that.

use crate::farpage::budgeted::{MIB, alone_with, library};
use crate::farpage::group::Group;
use crate::farpage::{Ended, farpage, skip};
use std::fs;
use std::process::Command;

/// `farpage run` with these words, in a group.
fn run_in(group: &Group, words: &[&str]) -> Ended {
    let mut command = farpage();
    command
        .env("FARPAGE_PRELOAD", library())
        .env_remove("TMPDIR")
        .args(["run", "--swap", "/var/tmp"])
        .args(words);
    group.enter(&mut command);
    Ended::of(command.output().unwrap())
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
    let budget = ended.stderr.lines().find(|line| line.contains(" budget ")).unwrap();
    assert!(budget.contains("% of cgroup v") && budget.contains("MiB in use"), "{budget}");
    assert!(ended.stderr.contains("problems   none"), "{}", ended.stderr);
}

/// "stayed within its budget", "problems none": of programs that the kernel had shot.
#[test]
fn kill_for_memory_is_told_with_the_limit_and_whom_it_hit() {
    let Some(_alone) = alone_with("python3") else { return };
    let Some(group) = Group::new().filter(|group| group.limit(64 * MIB)) else { return };
    // Memory that processes share isn't managed.
    let shares = "import mmap; m = mmap.mmap(-1, 200 << 20); m.write(b'x' * (200 << 20))";
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
    let problem = ended.stderr.lines().find(|line| line.starts_with("farpage:   problem "));
    let problem = problem.unwrap_or_else(|| panic!("{}", ended.stderr));
    assert!(problem.contains(words) && problem.contains("use --ram 30M or less"), "{problem}");
    assert!(!ended.stderr.contains("stayed within") && !ended.stderr.contains("none"), "{}", ended.stderr);
}
