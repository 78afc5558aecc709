//! Engines that can't get what they need when memory comes near the budget: the program goes on, and the user
//! is told (`tests/programs/life.c`).

use super::{RAM, is_gone, wait_until};
use crate::farpage::budgeted::{Job, Outcome, Running, Under, alone_with, compiled, find};
use crate::farpage::{is_root, skip};
use std::time::{Duration, Instant};

/// Status by which the program says that a container forbids even root to do this.
const NOT_ALLOWED: i32 = 77;

fn job(faults: &str, before: &[&str], case: &str) -> Job {
    let program = compiled("life");
    let words: Vec<&str> = before.iter().copied().chain([program.to_str().unwrap(), case]).collect();
    Job::new(&Under::budget(RAM, &["--faults", faults]), &words)
}

fn run(faults: &str, case: &str) -> Outcome {
    job(faults, &[], case).within(60).run()
}

/// With `unshare -pf` and the old /proc, threads never got the signal that arms them. The program went over
/// its budget without a word, and setrlimit never returned.
#[test]
fn program_in_another_pid_namespace_runs_as_without_farpage() {
    let Some(_alone) = alone_with("cc") else { return };
    if !is_root() || find("unshare").is_none() {
        return skip("only root can make a pid namespace, by unshare");
    }
    for faults in ["thread", "signal", "segv"] {
        let outcome = job(faults, &["unshare", "-pf"], "fills_in_another_namespace").within(60).run();
        if outcome.stderr.contains("unshare failed") {
            return skip("root may make no pid namespace here");
        }
        assert_eq!(outcome.status, Some(0), "{faults}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("is in another pid namespace"), "{faults}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("stayed within"), "{faults}: {}", outcome.stderr);
    }
}

/// The fork's child waited for its engine for ever.
#[test]
fn fork_into_another_pid_namespace_is_refused_while_pages_are_out() {
    let Some(_alone) = alone_with("cc") else { return };
    if !is_root() {
        return skip("only root can make a pid namespace");
    }
    for faults in ["thread", "signal", "segv"] {
        let outcome = run(faults, "forks_into_another_namespace");
        if outcome.status == Some(NOT_ALLOWED) {
            return skip("root may make no pid namespace here");
        }
        assert_eq!(outcome.status, Some(0), "{faults}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("a fork was refused"), "{faults}: {}", outcome.stderr);
    }
}

/// The kernel refuses the signal that arms a thread if too many signals are pending. setrlimit never returned
/// then, and nobody was told.
#[test]
fn thread_that_can_be_sent_no_signal_is_told_of() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in ["signal", "segv"] {
        let outcome = run(faults, "can_queue_no_signal");
        assert_eq!(outcome.status, Some(0), "{faults}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("too many signals pending"), "{faults}: {}", outcome.stderr);
    }
}

/// The process lived on, without a limit: its keeper was busy with arming.
#[test]
fn program_that_can_not_be_armed_ends_with_a_supervisor_that_is_killed() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in ["signal", "segv"] {
        let running: Running = job(faults, &[], "can_queue_no_signal_and_waits").within(60).start();
        let (ready, program) = (running.place().join("ready"), running.pid());
        wait_until("the program's readiness", || ready.exists() || is_gone(program));
        // SAFETY: takes no pointers; the process belongs to this test.
        assert_eq!(unsafe { libc::kill(running.supervisor() as i32, libc::SIGKILL) }, 0);
        let killed = Instant::now();
        wait_until("the end of the program", || is_gone(program));
        assert!(killed.elapsed() < Duration::from_secs(5), "{faults}: {:?}", killed.elapsed());
        assert_eq!(running.end().signal, Some(libc::SIGKILL));
    }
}

/// The program was ended with 125, though nothing was out yet.
#[test]
fn program_without_threads_to_spare_goes_on_without_farpage() {
    let Some(_alone) = alone_with("cc") else { return };
    if !is_root() {
        return skip("only root can become another user");
    }
    for faults in ["thread", "signal", "segv"] {
        let outcome = run(faults, "can_start_few_threads");
        assert_eq!(outcome.status, Some(0), "{faults}: {}", outcome.stderr);
        let told = "no thread could be started to serve its faults";
        assert!(outcome.stderr.contains(told), "{faults}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("Farpage has left it"), "{faults}: {}", outcome.stderr);
        assert_eq!(outcome.counter("evict_taken"), 0, "{faults}: {}", outcome.stderr);
    }
}
