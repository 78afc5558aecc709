//! The program, a member of its tree or the supervisor ends or is killed: no file, memory, slot or
//! process is left behind.

use super::{RAM, go, is_gone, modes, start_waiting, wait_until, wait_within};
use crate::farpage::budgeted::{Job, MIB, Outcome, Under, alone_with, compiled, is_full_size};
use crate::farpage::{self, directory};
use std::fs::{self, File};
use std::time::{Duration, Instant};

fn shared_memory() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> =
        fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

/// Starts a program that has pages in the swap directory, kills one side of it, and checks what is left.
fn nothing_is_left_after(kill: impl FnOnce(u32, u32)) -> Outcome {
    let before = shared_memory();
    let swap = directory();
    let running = start_waiting("read_after", &["--swap", swap.path().to_str().unwrap()]);
    let processes = running.processes();
    assert!(!processes.is_empty(), "there is no program");
    kill(running.supervisor(), processes[0]);
    wait_until("the end of all processes", || processes.iter().all(|pid| is_gone(*pid)));
    let outcome = running.end();
    assert_eq!(fs::read_dir(swap.path()).unwrap().count(), 0, "files are left");
    assert_eq!(shared_memory(), before, "shared memory is left");
    outcome
}

fn send(pid: u32, signal: i32) {
    // SAFETY: takes no pointers; the process belongs to this test.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

#[test]
fn supervisor_killed_leaves_nothing() {
    let Some(_alone) = alone_with("cc") else { return };
    let outcome = nothing_is_left_after(|supervisor, _| send(supervisor, libc::SIGKILL));
    assert_eq!(outcome.signal, Some(libc::SIGKILL));
}

/// Whether a process has joined the session of its run.
fn has_joined(pid: &u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("farpage-session"))
}

/// If the supervisor is killed, the program and all that it has started must end, or nobody would limit them.
/// The tree has a process over its budget, one within it, and one that isn't the program's own child.
#[test]
fn supervisor_killed_ends_all_of_the_run() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("waits");
    let script = "\"$0\" read_after & sleep 300 & (sleep 300; true) & wait";
    for faults in modes() {
        let words = ["sh", "-c", script, program.to_str().unwrap()];
        let running = Job::new(&Under::budget(RAM, &["--faults", faults]), &words).within(150).start();
        let ready = running.place().join("ready");
        wait_until("the program's readiness", || ready.exists());
        // The tree is sh, the program, the first sleep, a subshell and its sleep.
        let members = || running.processes();
        wait_until("the tree's growth", || members().len() >= 5 && members().iter().all(has_joined));
        let members = members();
        let _end =
            AtEnd(|| members.iter().filter(|pid| !is_gone(**pid)).for_each(|pid| send(*pid, libc::SIGKILL)));
        send(running.supervisor(), libc::SIGKILL);
        wait_until("the end of all processes", || members.iter().all(|pid| is_gone(*pid)));
        assert_eq!(running.end().signal, Some(libc::SIGKILL));
    }
}

/// Runs a program that stays above its budget, and checks what is said. Returns its output.
#[track_caller]
fn is_ended_over_budget(options: &[&str], words: &[&str], reason: &str) -> Vec<u8> {
    let options = [options, &["--over-budget", "kill"]].concat();
    let outcome = Job::new(&Under::budget(24 * MIB, &options), words).within(60).run();
    assert_eq!((outcome.status, outcome.signal), (Some(125), None), "{}", outcome.stderr);
    for words in ["the run was ended: for a second it had ", "above its budget of 24 MiB", reason] {
        assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
    }
    outcome.stdout
}

/// A budget may be a promise to other users. A job that breaks it is then to end, not to go on
/// with a warning.
#[test]
fn run_that_stays_above_its_budget_is_killed_if_asked_for() {
    let Some(_alone) = alone_with("python3") else { return };
    let grows = "import os, time; b = os.urandom(80 << 20); time.sleep(300)";
    let words = ["python3", "-c", grows];
    is_ended_over_budget(&["--no-disk"], &words, "the compressed pool is full");
}

/// A process without a budget counts, too, and doesn't go on when the run has ended.
#[test]
fn run_with_a_process_that_has_no_budget_is_killed_if_asked_for() {
    let Some(_alone) = alone_with("python3") else { return };
    let grows = "import os, time; print(os.getpid(), flush=True); b = os.urandom(80 << 20); time.sleep(300)";
    let script = format!("LD_PRELOAD= python3 -c '{grows}' & wait");
    let told = is_ended_over_budget(&[], &["sh", "-c", &script], "these processes have no budget: ");
    let pid = String::from_utf8(told).unwrap().trim().parse().unwrap();
    wait_until("the end of that process", || is_gone(pid));
}

/// The file kept pages of a run that Farpage had ended, and nobody was told.
#[test]
fn users_empty_file_is_empty_again_also_after_a_run_that_failed() {
    let Some(_alone) = alone_with("python3") else { return };
    let place = directory();
    let swap = place.path().join("swap");
    let script = "LD_PRELOAD= python3 -c 'import os, time; b = os.urandom(80 << 20); time.sleep(300)' & wait";
    for supervisor in ["above", "beside"] {
        File::create(&swap).unwrap();
        let options = ["--supervisor", supervisor, "--swap", swap.to_str().unwrap()];
        is_ended_over_budget(&options, &["sh", "-c", script], "these processes have no budget: ");
        assert_eq!(fs::metadata(&swap).unwrap().len(), 0, "{supervisor}");
    }
}

#[test]
fn what_a_program_leaves_behind_goes_on_when_the_program_has_ended() {
    let Some(_alone) = alone_with("sh") else { return };
    let script =
        "sleep 300 >/dev/null 2>&1 & while ! grep -q farpage-session /proc/$!/maps; do :; done; echo $!";
    let outcome = Job::new(&Under::budget(RAM, &[]), &["sh", "-c", script]).within(60).run();
    let left: u32 = outcome.succeeded().text().trim().parse().unwrap();
    let _end = AtEnd(|| send(left, libc::SIGKILL));
    // Time for several looks at the supervisor.
    std::thread::sleep(Duration::from_millis(500));
    assert!(!is_gone(left), "it was ended");
}

#[test]
fn program_killed_leaves_nothing_and_the_summary_is_told() {
    let Some(_alone) = alone_with("cc") else { return };
    let outcome = nothing_is_left_after(|_, program| send(program, libc::SIGKILL));
    assert_eq!(outcome.signal, Some(libc::SIGKILL));
    assert!(outcome.stderr.contains("was killed by SIGKILL"), "{}", outcome.stderr);
    assert!(outcome.counter("evict_taken") > 0);
}

#[test]
fn program_that_ends_leaves_nothing() {
    let Some(_alone) = alone_with("cc") else { return };
    let outcome = nothing_is_left_after(|_, program| send(program, libc::SIGTERM));
    assert_eq!(outcome.signal, Some(libc::SIGTERM));
}

/// Our memory must not be in a core file: its content is there already, or means nothing to a debugger,
/// and it is gigabytes.
#[test]
fn core_file_has_the_programs_pages_and_not_the_pool() {
    let Some(_alone) = alone_with("cc") else { return };
    let running = start_waiting("read_after", &["--pool", "16M"]);
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", running.processes()[0])).unwrap();
    // Sizes in bytes of the engine's own mappings, kept out or dumped, and bytes of the program's mappings.
    let (mut kept_out, mut dumped, mut program) = (Vec::new(), Vec::new(), 0);
    let (mut bytes, mut is_ours) = (0, false);
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut bounds = words[0].split('-').map(|word| u64::from_str_radix(word, 16));
        if let (Some(Ok(start)), Some(Ok(end))) = (bounds.next(), bounds.next()) {
            bytes = end - start;
            // The engine maps its own memory far below all else, and above programs.
            is_ours = (0x1000_0000_0000..0x5000_0000_0000).contains(&start) && words.len() == 5;
        } else if words[0] == "VmFlags:" {
            match (is_ours, words.contains(&"dd")) {
                (true, true) => kept_out.push(bytes),
                (true, false) => dumped.push(bytes),
                (false, false) if (96 * MIB..200 * MIB).contains(&bytes) => program += bytes,
                (false, _) => {}
            }
        }
    }
    go(&running);
    assert_eq!(running.end().succeeded().text(), "all right\n");
    // The pool with the tables beside it, and the frames, have a mapping each.
    assert!(kept_out.len() >= 2 && kept_out.iter().any(|bytes| *bytes >= 16 * MIB), "{kept_out:?}");
    assert!(!dumped.is_empty() && dumped.iter().all(|bytes| *bytes < 4 * MIB), "{dumped:?}");
    assert!(program >= 96 * MIB, "the program's memory would not be dumped");
}

/// Returns the bytes used and the bytes leased in the areas of a run, as `farpage show --json` has them.
fn areas_of(supervisor: u32) -> (u64, u64) {
    let shown = farpage::farpage().args(["show", "--json", &supervisor.to_string()]).output().unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let sum =
        |name: &str| shown["areas"].as_array().unwrap().iter().map(|area| area[name].as_u64().unwrap()).sum();
    (sum("used"), sum("leased"))
}

/// Does something when it is dropped.
struct AtEnd<F: FnMut()>(F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Kills some members of a tree of 20 processes that share areas, one after the other. The other members find
/// every byte. Memory and slots of the dead are free again, and nothing more is left of them.
fn others_go_on_when_members_are_killed(faults: &str, kills: usize) {
    let (before, swap) = (shared_memory(), directory());
    let options = ["--faults", faults, "--pool", "4M", "--swap", swap.path().to_str().unwrap()];
    let program = compiled("tree");
    // With this large a stack no process is dormant. An engine that starts late would manage the root's small
    // heap, which may be evicted in the end.
    let words = ["sh", "-c", "ulimit -s 1048576; exec \"$0\" members", program.to_str().unwrap()];
    let running = Job::new(&Under::budget(200 * MIB, &options), &words).within(20 + kills as u64).start();
    let first = running.pid();
    let members = || running.processes().into_iter().skip(1).filter(|pid| !is_gone(*pid)).collect::<Vec<_>>();
    // The tree must end if this test fails, too: only this guard tells it.
    let end = AtEnd(|| {
        for name in ["stop", "go"] {
            let _ = File::create(running.place().join(name));
        }
        let start = Instant::now();
        while !members().is_empty() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let mut killed = 0;
    for dice in (1_u64..).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20).take(kills) {
        // The root learns of a grandchild only when the grandchild's parent ends, so some members
        // may be missing.
        wait_until("the tree's growth", || members().len() >= 12 || is_gone(first));
        std::thread::sleep(Duration::from_millis(dice % 150));
        let members = members();
        let Some(victim) = members.get(dice as usize % members.len().max(1)) else { break };
        // SAFETY: takes no pointers. The process belongs to this test's tree. If it has ended by itself, the
        // tree's root waits for it.
        killed += usize::from(unsafe { libc::kill(*victim as i32, libc::SIGKILL) } == 0);
        wait_until("a member's end", || is_gone(*victim));
    }
    File::create(running.place().join("stop")).unwrap();
    let freed = running.place().join("freed");
    wait_until("the end of all members", || freed.exists() || is_gone(first));
    assert!(freed.exists(), "the root has ended");
    // The root looks once a second for what the dead had, and keeps nothing that it doesn't use.
    let supervisor = running.supervisor();
    wait_until("the return of all clusters", || areas_of(supervisor) == (0, 0));
    drop(end);
    let outcome = running.end();
    outcome.succeeded();
    assert_eq!(killed, kills);
    assert!(outcome.text().contains(&format!("{kills} killed")), "{} of {kills}", outcome.text());
    assert!(outcome.counter("evict_taken") > 0, "{}", outcome.stderr);
    assert_eq!(fs::read_dir(swap.path()).unwrap().count(), 0, "files are left");
    assert_eq!(shared_memory(), before, "shared memory is left");
}

#[test]
fn members_of_a_tree_that_are_killed_hurt_nobody_else() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in modes() {
        others_go_on_when_members_are_killed(faults, if is_full_size() { 200 } else { 30 });
    }
}

/// Starts a process that forks repeatedly while eight of its threads write. Each child finds everything as of
/// the fork. In the end no slot is in use or leased.
fn storm_of_forks_leaves_no_slot(faults: &str, ram: u64, storm: &str, seconds: u64) {
    let program = compiled("processes");
    let words = [program.to_str().unwrap(), "snapshots_beside_writers"];
    let swap = directory();
    let options = ["--faults", faults, "--swap", swap.path().to_str().unwrap()];
    let mut job = Job::new(&Under::budget(ram, &options), &words).within(seconds);
    job.environment("STORM", storm);
    let running = job.start();
    let (first, freed) = (running.pid(), running.place().join("freed"));
    wait_within(seconds, "the end of the storm", || freed.exists() || is_gone(first));
    if freed.exists() {
        let supervisor = running.supervisor();
        wait_until("the return of all clusters", || areas_of(supervisor) == (0, 0));
        go(&running);
    }
    let outcome = running.end();
    outcome.succeeded();
    assert!(outcome.counter("evict_taken") > 0, "{}", outcome.stderr);
}

#[test]
fn forks_beside_writers_leave_no_slot() {
    let Some(_alone) = alone_with("cc") else { return };
    let (ram, storm, seconds) =
        if is_full_size() { (256 * MIB, "1024 200", 3600) } else { (RAM, "96 6", 240) };
    for faults in modes() {
        storm_of_forks_leaves_no_slot(faults, ram, storm, seconds);
    }
}
