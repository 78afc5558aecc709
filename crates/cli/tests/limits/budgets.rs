//! Budgets: one that is too small, calls that are refused or told near a budget, and the budget that all
//! processes of a tree share.

use super::{RAM, is_gone};
use crate::farpage::budgeted::{Job, MIB, Outcome, Under, alone_with, compiled};
use crate::farpage::group::Group;
use crate::farpage::{is_root, skip};
use std::process::Command;
use std::time::Duration;

// ---- refused or told -----------------------------------------------------------------------------------

#[test]
fn budget_below_what_the_process_needs_names_the_number() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("waits");
    let outcome =
        Job::new(&Under::budget(MIB, &[]), &[program.to_str().unwrap(), "read_after"]).within(20).run();
    assert_eq!((outcome.status, outcome.text().as_str()), (Some(125), ""), "{}", outcome.stderr);
    for word in ["1 MiB", "needs resident before it starts", "use --ram"] {
        assert!(outcome.stderr.contains(word), "`{word}` is not in:\n{}", outcome.stderr);
    }
    assert!(!outcome.place.path().join("ready").exists(), "the program ran");
}

/// docs/user/limits.md: a mapping that is moved past libc is noticed, and the program is stopped. Where its
/// system calls are guarded, the move is seen and followed.
#[test]
fn memory_that_is_moved_past_libc_stops_the_program_or_is_followed() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("waits");
    for faults in ["signal", "segv", "thread"] {
        if faults == "thread" && !is_root() {
            skip("only root may have faults as messages");
            continue;
        }
        let under = Under::budget(RAM, &["--faults", faults]);
        let outcome = Job::new(&under, &[program.to_str().unwrap(), "moved_past_libc"]).within(60).run();
        if faults == "thread" {
            assert_eq!((outcome.status, outcome.text().as_str()), (Some(125), ""), "{}", outcome.stderr);
            assert!(
                outcome.stderr.contains("STOPPED") && outcome.stderr.contains("past libc"),
                "{}",
                outcome.stderr
            );
        } else {
            assert_eq!(outcome.succeeded().text(), "all right\n");
        }
    }
}

/// Memory isn't managed while it is locked, so it isn't held for AIO then. Once unlocked it is managed, and
/// must stay.
#[test]
fn memory_for_aio_stays_after_it_was_unlocked() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("waits");
    for faults in ["signal", "segv"] {
        let under = Under::budget(RAM, &["--faults", faults]);
        let outcome = Job::new(&under, &[program.to_str().unwrap(), "aio_in_locked_memory"]).within(60).run();
        assert_eq!(outcome.succeeded().text(), "all right\n");
    }
}

/// The child of a fork after a change of user could not get at the evicted pages, so the fork is refused. The
/// refusal must be told.
#[test]
fn fork_after_a_change_of_user_is_refused_and_told() {
    let Some(_alone) = alone_with("cc") else { return };
    if !is_root() {
        return skip("only root can become another user");
    }
    let program = compiled("strange");
    let outcome =
        Job::new(&Under::budget(RAM, &[]), &[program.to_str().unwrap(), "another_user"]).within(60).run();
    outcome.succeeded();
    assert_eq!(outcome.counter("fork_refused"), 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("a fork was refused"), "{}", outcome.stderr);
}

/// The program's limit must be named as the cause, not a full swap file with free space on the disk as the
/// remedy.
#[test]
fn program_that_limits_its_files_is_told_of_with_the_cause() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("strange");
    for faults in ["thread", "signal", "segv"] {
        let under = Under::budget(RAM, &["--faults", faults, "--pool", "1M"]);
        let outcome = Job::new(&under, &[program.to_str().unwrap(), "limits_its_files"]).within(120).run();
        let told = &outcome.succeeded().stderr;
        assert!(told.contains("RLIMIT_FSIZE") && !told.contains("is full"), "{told}");
    }
}

// ---- held ----------------------------------------------------------------------------------------------

#[test]
fn mlockall_is_refused_if_that_is_asked_for() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("advise");
    let under = Under::budget(RAM, &["--mlockall", "refuse"]);
    let mut job = Job::new(&under, &[program.to_str().unwrap(), "locking_refused"]).within(120);
    job.environment("FARPAGE_MLOCKALL", "refuse");
    let outcome = job.run();
    outcome.succeeded().held_its_budget();
    assert!(!outcome.stderr.contains("locked"), "{}", outcome.stderr);
}

/// Each of eight busy threads gets Farpage's signal only when it has a CPU. Threads that were asked one after
/// the other would fill memory meanwhile. Threads that were all asked at once, but ran on until all were
/// registered, would also fill too much before the first page goes out.
#[test]
fn eight_threads_that_fill_memory_are_taken_over_in_time() {
    let Some(_alone) = alone_with("cc") else { return };
    let program = compiled("threads");
    for faults in ["signal", "thread", "segv"] {
        let under = Under::budget(128 * MIB, &["--faults", faults]);
        let outcome = Job::new(&under, &[program.to_str().unwrap(), "filled_by_many"]).within(120).run();
        outcome.succeeded();
        let peak = outcome.stats["gauges"]["anonymous_peak"].as_u64().unwrap();
        assert!(peak < 128 * MIB * 9 / 8, "{faults}: {} MiB:\n{}", peak / MIB, outcome.stderr);
    }
}

/// Keepers of many processes at nice -20 keep the kernel's own threads off the CPU, and with them every disk.
/// A keeper therefore waits for its turn like other threads while nothing grows.
#[test]
fn keeper_of_a_quiet_program_does_not_go_first() {
    let script =
        "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; cat /proc/$$/task/*/stat; done | grep '(farpage-keeper)'";
    let under = Under::budget(64 * MIB, &[]);
    let outcome = Job::new(&under, &["sh", "-c", script]).within(120).run();
    outcome.succeeded();
    // Field 19 of proc_pid_stat(5), 17 words after the name.
    let nice = |line: &str| line.rsplit(')').next().unwrap().split_whitespace().nth(16).unwrap().to_owned();
    let seen: Vec<_> = String::from_utf8_lossy(&outcome.stdout).lines().map(nice).collect();
    assert!(seen.iter().any(|nice| nice == "0"), "{seen:?}");
}

/// Runs a case of share.c in one mode.
fn shared_budget(case: &str, faults: &str, ram: u64) -> Outcome {
    let program = compiled("share");
    let under = Under::budget(ram, &["--faults", faults]);
    let outcome = Job::new(&under, &[program.to_str().unwrap(), case]).within(120).run();
    outcome.succeeded();
    outcome
}

#[test]
fn processes_of_a_tree_have_one_budget_together() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in ["signal", "thread", "segv"] {
        let outcome = shared_budget("growers", faults, 64 * MIB);
        outcome.held_its_budget();
        assert!(outcome.counter("evict_taken") > 10_000, "{}", outcome.stderr);
        // The first process had filled the budget, and the last one got as much as the rest.
        let peaks = outcome.samples.peaks();
        let workers: Vec<_> = peaks.iter().filter(|peak| **peak > 10 * MIB).collect();
        assert_eq!(workers.len(), 4, "{peaks:?}");
        let said = outcome.stats["tree_anonymous_peak"].as_u64().unwrap();
        assert!((60 * MIB..75 * MIB).contains(&said), "{said}");
    }
}

#[test]
fn nothing_is_evicted_while_all_that_processes_have_fits() {
    let Some(_alone) = alone_with("cc") else { return };
    for faults in ["signal", "thread", "segv"] {
        for (case, mib) in [("readers", 64), ("one_by_one", 64), ("among_idle_ones", 512)] {
            let outcome = shared_budget(case, faults, mib * MIB);
            assert_eq!(outcome.counter("evict_taken"), 0, "{case}: {}", outcome.stderr);
        }
    }
}

/// Returns the most anonymous memory that a case of share.c had at once after its second process began, as a
/// fraction of its budget.
fn peak_in_group(group: &Group, case: &str, faults: &str, ram: u64) -> f64 {
    let program = compiled("share");
    let under = Under::budget(ram, &["--faults", faults]);
    let job = Job::new(&under, &[program.to_str().unwrap(), case]).within(120).in_group(group);
    let running = job.start();
    let (mut peak, mut are_several) = (0, false);
    while !is_gone(running.pid()) {
        are_several |= running.processes().len() > 1;
        if are_several {
            peak = group.anonymous().max(peak);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let outcome = running.end();
    outcome.succeeded();
    assert!(outcome.counter("evict_taken") > 1000, "{case} {faults}: {}", outcome.stderr);
    assert!(peak > ram / 2, "{case} {faults}: nothing was measured: {peak} bytes");
    peak as f64 / ram as f64
}

/// Memory that parent and child share must not be granted twice while both give it back. Otherwise a
/// tree would have nearly twice its budget after each fork. Nor may small processes have 8 MiB each,
/// however small the budget.
///
/// A process may lose its CPU with memory in its hands, so a peak above the bound is measured up
/// to twice more.
#[test]
fn children_and_their_parent_stay_within_their_budget_together() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(group) = Group::new() else { return };
    let cases =
        ["readers_in_turns", "closers_in_turns", "advisers_in_turns", "written_while_read", "many_small"];
    for faults in ["signal", "thread", "segv"] {
        for case in cases {
            let peak = || {
                let peak = peak_in_group(&group, case, faults, 24 * MIB);
                eprintln!("{case} {faults}: {peak:.2} of the budget");
                peak
            };
            assert!((0..3).any(|_| peak() < 1.2), "{case} {faults}: three times too much");
        }
    }
}

/// A stopped child never asks the kernel what is shared. Memory that a dead parent had paid for must be paid
/// for before that child asks. Otherwise the tree would have up to its budget and that memory.
#[test]
fn what_a_dead_parent_paid_for_is_paid_beside_a_stopped_child() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(group) = Group::new() else { return };
    for faults in ["signal", "thread", "segv"] {
        let peak = || {
            let peak = peak_in_group(&group, "payer_ends_beside_a_stopped_child", faults, 32 * MIB);
            eprintln!("{faults}: {peak:.2} of the budget");
            peak
        };
        assert!((0..3).any(|_| peak() < 1.2), "{faults}: three times too much");
    }
}

/// The peak must be the kernel's number, because a sample of anonymous memory is too low. A process that
/// executes another program is one process.
#[test]
fn peak_is_the_kernels_and_a_process_is_one_whatever_it_executes() {
    let Some(_alone) = alone_with("python3") else { return };
    let burst = "import resource; b = b'x' * (100 << 20); del b; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)";
    // The interpreter itself, not a script that finds it.
    let python =
        Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap().stdout;
    let python = String::from_utf8(python).unwrap();
    let script = "exec env -u NOTHING \"$1\" -c \"$2\"";
    let words = ["sh", "-c", script, "sh", python.trim(), burst];
    let outcome = Job::new(&Under::budget(1024 * MIB, &[]), &words).run();
    let said = outcome.succeeded().text().trim().parse::<u64>().unwrap() * 1024;
    let peak = outcome.stats["resident_peak"].as_u64().unwrap();
    assert!(said > 100 * MIB && (said..said + 2 * MIB).contains(&peak), "{said} and {peak}");
    let words = "sh stayed within its budget of 1 GiB (peak ";
    assert!(
        outcome.stderr.contains(words) && outcome.stderr.contains("in RAM, files included"),
        "{}",
        outcome.stderr
    );
    assert_eq!(outcome.stats["process_count"], 1, "{}", outcome.stderr);
}

/// A budget above the machine's memory must not end the program.
#[test]
fn budget_of_512_tib_is_that_of_the_machine() {
    let Some(_alone) = alone_with("true") else { return };
    let outcome = Job::new(&Under::budget(512 << 40, &[]), &["true"]).run();
    outcome.succeeded();
    assert!(
        outcome.stderr.contains("note: this machine has less than the 512 TiB of --ram 5629"),
        "{}",
        outcome.stderr
    );
}
