//! Small processes have nothing of Farpage running in them, and are managed before they are large.

use super::{is_gone, modes, wait_until};
use crate::farpage::budgeted::{Job, MIB, Outcome, Under, alone_with, compiled, compiled_library};
use crate::farpage::{is_root, skip};
use std::fs;

/// Budget in bytes. A dormant process may have a 16th of it, and the stack that is allowed to the process is
/// 8 MiB of that.
const RAM: u64 = 256 * MIB;

/// Returns the budget of a case in bytes.
fn budget(case: &str) -> u64 {
    match case {
        // In these cases several processes are dormant at once.
        "forks"
        | "forks_with_all_signals_blocked"
        | "clones_and_executes"
        | "is_asked_while_it_waits"
        | "ends_its_own_calls" => 2 * RAM,
        _ => RAM,
    }
}

fn run(faults: &str, case: &str) -> Outcome {
    let program = compiled("dormant");
    let program = program.to_str().unwrap();
    let words = match case {
        "forks" | "shares" => vec!["sh", "-c", "ulimit -s 2048; exec \"$0\" \"$1\"", program, case],
        _ => vec![program, case],
    };
    Job::new(&Under::budget(budget(case), &["--faults", faults]), &words).within(120).run()
}

/// Runs cases. Each case checks by itself whether there are threads when there may be some.
fn is_right(cases: &[&str]) {
    let Some(_alone) = alone_with("cc") else { return };
    for (faults, case) in modes().iter().flat_map(|faults| cases.iter().map(move |case| (faults, case))) {
        let outcome = run(faults, case);
        assert_eq!(outcome.status, Some(0), "{faults} {case}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("limited"), "{faults} {case}: {}", outcome.stderr);
        let (most, peak) = (budget(case) * 21 / 20, outcome.samples.peaks().into_iter().max());
        assert!(peak <= Some(most), "{faults} {case}: {peak:?} of {most} at most: {}", outcome.stderr);
    }
}

/// chromium ends itself if it finds a second thread; `unshare -Ur`, gdb and valgrind fail because of it.
#[test]
fn small_process_has_one_thread() {
    is_right(&["stays", "spawns", "user_namespace"]);
}

/// The process is managed however it comes to have more memory than it has announced. The cases include
/// memory that it reserved while nobody looked, and the child of a child of a dormant process.
#[test]
fn process_that_grows_is_managed() {
    is_right(&["maps", "heap", "remaps", "reserves", "keeps_what_it_moves", "vforks", "forks"]);
}

/// With glibc 2.41 and later each child of a fork got an engine at once, with a thread and some MiB of its
/// own. libc has blocked every signal there, and Farpage took that for the program's doing.
#[test]
fn child_of_a_libc_that_blocks_signals_has_one_thread() {
    is_right(&["forks_with_all_signals_blocked"]);
}

/// A parent of 8 MiB had 48 children that read its memory. Each of them counted 8 MiB, and most of the memory
/// was evicted from a budget that was six times what all of them had.
#[test]
fn memory_shared_with_a_dormant_parent_counts_once() {
    is_right(&["shares"]);
}

/// With `thread` the variables of a library were zeros, after another library had been where it is now. A
/// fork's child was ended if no library was there any more.
#[test]
fn library_that_is_loaded_again_keeps_its_variables() {
    let Some(_alone) = alone_with("cc") else { return };
    compiled_library("library", "dormant");
    let modes = if is_root() { &["thread", "signal", "segv"][..] } else { &["signal", "segv"] };
    for faults in modes {
        let outcome = run(faults, "loads_again");
        assert_eq!(outcome.status, Some(0), "{faults}: {}", outcome.stderr);
        assert!(outcome.counter("evict_taken") > 0, "{faults}: {}", outcome.stderr);
    }
}

/// With `segv` an evicted page read as zeros through /proc/self/mem, and what was written there was lost. A
/// program that had opened the file early was not noticed.
#[test]
fn memory_that_is_open_as_a_file_stays_right() {
    let Some(_alone) = alone_with("cc") else { return };
    let cases = ["reads_its_memory", "reads_its_memory_in_a_thread"];
    for (faults, case) in ["signal", "segv"].iter().flat_map(|faults| cases.map(|case| (*faults, case))) {
        let outcome = run(faults, case);
        assert_eq!(outcome.status, Some(0), "{faults} {case}: {}", outcome.stderr);
        let is_told = outcome.stderr.contains("it has its own memory open as a file");
        assert_eq!(is_told, faults == "segv", "{}", outcome.stderr);
    }
}

/// Locked, read-only or executable memory exists, though the kernel doesn't count it as data.
#[test]
fn memory_that_may_not_be_written_any_more_counts() {
    is_right(&["seals"]);
}

/// Chromium ends itself if its zygote has a second thread, and the zygote gives this advice
/// before that check.
#[test]
fn advice_about_children_starts_no_engine() {
    is_right(&["advises"]);
}

/// An engine that starts sees what a program has asked for past libc while it was dormant.
#[test]
fn memory_that_is_wiped_in_children_stays_so() {
    is_right(&["wiped_in_children"]);
}

/// The handler of the supervisor's signal must not write below a small stack for handlers.
#[test]
fn signal_of_the_supervisor_overwrites_nothing() {
    is_right(&["is_asked"]);
}

/// A signal of Farpage's must not end a call of the program's. poll ended with EINTR in a program without
/// any handler.
#[test]
fn signal_of_the_supervisor_ends_no_call() {
    is_right(&["is_asked_while_it_waits", "ends_its_own_calls"]);
}

/// An engine that starts must find the process as it expects it: with one thread, and without memory that the
/// kernel may drop at any time.
#[test]
fn engine_that_starts_knows_what_the_process_has_done() {
    is_right(&["has_threads_without_guards", "guards_a_small_stack", "frees_later"]);
}

/// A child by a bare clone must be in the run or be told of.
#[test]
fn children_of_dormant_processes_stay_in_the_run_or_are_told_of() {
    let Some(_alone) = alone_with("cc") else { return };
    let outcome = run("signal", "forks_in_a_user_namespace");
    assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("1 process ran outside of this budget: dormant (pid "),
        "{}",
        outcome.stderr
    );
    if !is_root() {
        return skip("only root can make a namespace for host names");
    }
    let outcome = run("signal", "clones_and_executes");
    assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
}

/// A process must be managed before a call after which nothing could be started in it.
#[test]
fn process_is_managed_before_it_gives_up_what_an_engine_needs() {
    is_right(&["has_threads", "keeps_others_out", "limits", "handles_it"]);
    if !is_root() {
        return skip("only root can become another user, or make a pid namespace");
    }
    is_right(&["other_user", "other_pid_namespace"]);
}

/// Only the supervisor sees the process grow.
#[test]
fn process_that_grows_past_libc_is_told_of_and_managed() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in modes() {
        let outcome = run(faults, "maps_past_libc");
        assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("for instance by system calls of its own"), "{}", outcome.stderr);
        assert!(outcome.counter("evict_taken") > 0, "{}", outcome.stderr);
    }
}

/// The process has put the run out of its reach, and its memory isn't limited. The summary must
/// give its size.
#[test]
fn process_that_can_no_longer_be_managed_is_told_of_with_its_size() {
    let Some(_alone) = alone_with("cc") else { return };
    let outcome = run("signal", "grows_in_a_user_namespace");
    assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
    let told = outcome.stderr.contains("the run was out of its reach when it grew");
    assert!(told && !outcome.stderr.contains("stayed within"), "{}", outcome.stderr);
    let budget = outcome.stderr.lines().find(|line| line.contains("  budget ")).unwrap();
    assert!(budget.contains("peak 30") && budget.contains(" MiB anonymous"), "{budget}");
}

/// Returns the number of threads of a process.
fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

fn has_joined(pid: &u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("farpage-session"))
}

/// A process with an engine is ended by its engine; a dormant process has none.
#[test]
fn dormant_processes_end_with_a_supervisor_that_is_killed() {
    let Some(_alone) = alone_with("sh") else { return };
    let words = ["sh", "-c", "sleep 300 & (sleep 300; true) & wait"];
    let running = Job::new(&Under::budget(4096 * MIB, &[]), &words).within(60).start();
    let members = || running.processes();
    // sh, a sleep, a subshell and its sleep.
    wait_until("the tree's growth", || members().len() == 4 && members().iter().all(has_joined));
    // The supervisor looks several times meanwhile.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let members = members();
    assert!(members.iter().all(|pid| threads(*pid) == 1), "some aren't dormant");
    // SAFETY: takes no pointers; the process belongs to this test.
    assert_eq!(unsafe { libc::kill(running.supervisor() as i32, libc::SIGKILL) }, 0);
    wait_until("the end of all processes", || members.iter().all(|pid| is_gone(*pid)));
    assert_eq!(running.end().signal, Some(libc::SIGKILL));
}

/// A process left behind couldn't start an engine when the supervisor is gone, and would grow
/// without a limit.
#[test]
fn what_is_left_behind_is_managed_when_the_run_ends() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("dormant");
    let script = format!("{} waits >ready & while ! grep -q r ready; do :; done; echo $!", program.display());
    let outcome = Job::new(&Under::budget(1024 * MIB, &[]), &["sh", "-c", &script]).within(60).run();
    let left: u32 = outcome.succeeded().text().trim().parse().unwrap();
    let threads = threads(left);
    // SAFETY: takes no pointers; the process was started by this test's program, and hasn't ended.
    unsafe { libc::kill(left as i32, libc::SIGKILL) };
    assert!(threads > 1, "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("without a budget"), "{}", outcome.stderr);
}

/// The debugger's library for threads must not find threads of Farpage's, which it can't know.
#[test]
fn debugger_sees_the_program_as_it_is() {
    let Some(_alone) = alone_with("gdb") else { return };
    let program = compiled("dormant");
    let commands = ["break pause", "run", "bt", "info threads", "kill"];
    let mut words = vec!["gdb", "-batch", "-nx"];
    commands.iter().for_each(|command| words.extend(["-ex", *command]));
    words.extend(["--args", program.to_str().unwrap(), "waits"]);
    for faults in modes() {
        // gdb itself is large.
        let under = Under::budget(8192 * MIB, &["--faults", faults]);
        let outcome = Job::new(&under, &words).within(60).run();
        let text = outcome.text();
        assert!(text.contains("in main ()") || text.contains("in waits ()"), "{text}{}", outcome.stderr);
        assert!(text.contains("* 1 ") && !text.contains("  2 "), "{text}{}", outcome.stderr);
    }
}

/// valgrind must not end with "Unsupported clone() flags": its program would never run.
#[test]
fn valgrinds_program_runs_without_farpage_and_that_is_told() {
    let Some(_alone) = alone_with("valgrind") else { return };
    let words = ["valgrind", "-q", "--error-exitcode=3", "sh", "-c", "exit 7"];
    let outcome = Job::new(&Under::budget(RAM, &[]), &words).within(60).run();
    assert_eq!(outcome.status, Some(7), "{}", outcome.stderr);
    for text in
        ["valgrind can't run the threads that Farpage makes", "1 process ran outside of this budget: "]
    {
        assert!(outcome.stderr.contains(text), "{}", outcome.stderr);
    }
}
