//! A program that writes over the memory that the processes of its run share. The result is one message, text
//! that a terminal can show, and no harm to other processes.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Outcome, Under, able, compiled, descendants};
use farpage::farpage;
use farpage_runtime::session::head::SessionHead;
use farpage_runtime::session::{PROCESSES_MAX, ProcessRecord, Session};
use std::fs;
use std::mem::offset_of;
use std::time::{Duration, Instant};

const RAM: u64 = 32 * MIB;

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A supervisor that is the program's parent, which can end with a status of its own.
fn above(options: &[&str]) -> Under {
    Under::budget(RAM, &[&["--supervisor", "above"], options].concat())
}

/// Returns a case of `tests/programs/hostile.c`, which is told where things are in a session.
fn hostile(case: &str, options: &[&str]) -> Job {
    let program = compiled("hostile");
    with_layout(Job::new(&above(options), &[program.to_str().unwrap(), case]))
}

fn with_layout(job: Job) -> Job {
    let mut job = job.within(150);
    for (name, value) in [
        ("HEAD_BYTES", size_of::<SessionHead>()),
        ("RECORDS_OFFSET", offset_of!(Session, processes)),
        ("RECORD_BYTES", size_of::<ProcessRecord>()),
        ("RECORDS", PROCESSES_MAX),
        ("FIRST_OFFSET", offset_of!(Session, first)),
    ] {
        job.environment(name, &value.to_string());
    }
    job
}

/// Checks that everything is Farpage's, in whole lines, and that a terminal can show it.
#[track_caller]
fn is_printable(stderr: &str) {
    let bad = stderr.chars().find(|c| *c != '\n' && c.is_control());
    assert_eq!(bad, None, "{stderr:?}");
    assert!(stderr.lines().all(|line| line.starts_with("farpage: ")), "{stderr}");
}

#[track_caller]
fn was_ended(outcome: &Outcome) {
    let stderr = &outcome.stderr;
    assert_eq!((outcome.status, outcome.signal), (Some(125), None), "{stderr}");
    assert!(!outcome.text().contains("it goes on"), "{}", outcome.text());
    is_printable(stderr);
    assert_eq!(stderr.matches("was overwritten; the run was ended").count(), 1, "{stderr}");
    assert!(stderr.contains("fix, one of:") && stderr.lines().count() <= 12, "{stderr}");
    assert!(outcome.seconds < 60.0, "it took {} s", outcome.seconds);
}

#[test]
fn session_that_was_overwritten_ends_the_run_with_one_message() {
    if !able("cc") {
        return;
    }
    for case in ["zeros", "ones", "noise", "behind"] {
        was_ended(&hostile(case, &[]).run());
        was_ended(&hostile(case, &["--quiet"]).run());
    }
}

/// Only the program's parent hears how the program has ended. So the supervisor beside it kills the program,
/// or its keeper ends it.
#[test]
fn session_that_was_overwritten_ends_the_run_that_has_its_supervisor_beside_it() {
    if !able("cc") {
        return;
    }
    let program = compiled("hostile");
    let beside = Under::budget(RAM, &["--supervisor", "beside"]);
    // Noise over the first process's words may say that the program has ended, and that the run's
    // end was told already.
    for case in ["zeros", "noise", "told"] {
        let outcome = with_layout(Job::new(&beside, &[program.to_str().unwrap(), case])).run();
        assert!(
            outcome.signal == Some(libc::SIGKILL) || outcome.status == Some(125),
            "{:?}: {}",
            (outcome.status, outcome.signal),
            outcome.stderr
        );
        assert!(!outcome.text().contains("it goes on"), "{}", outcome.text());
        let told = || fs::read_to_string(outcome.place.path().join("stderr")).unwrap();
        wait_until("the message", || told().contains("- look for wild writes"));
        assert_eq!(told().matches("was overwritten; the run was ended").count(), 1, "{}", told());
        is_printable(&told());
    }
}

/// The program writes noise and the content of before by turns, while Farpage looks.
#[test]
fn session_that_is_overwritten_while_it_is_read_ends_the_run_with_one_message() {
    if !able("cc") {
        return;
    }
    let outcome = hostile("storm", &[]).run();
    let stderr = &outcome.stderr;
    assert_eq!((outcome.status, outcome.signal), (Some(125), None), "{stderr}");
    is_printable(stderr);
    assert_eq!(stderr.matches("was overwritten; the run was ended").count(), 1, "{stderr}");
    // The lines are the message, and notices from the few looks that found the session whole.
    assert!(stderr.lines().count() <= 12 + 4 * 11, "{stderr}");
    assert!(outcome.seconds < 60.0, "it took {} s", outcome.seconds);
}

/// The overwritten memory keeps the evicted pages of all processes apart, so all processes must end.
#[test]
fn session_that_was_overwritten_ends_the_other_processes_too() {
    if !able("cc") {
        return;
    }
    // A program that finds the session overwritten when it starts runs without an engine. The other program
    // must have started before, and says when it has.
    let script = "mkfifo never; sh -c ': >ready; read line <never' & until [ -e ready ]; do :; done; \
                  echo $!; exec \"$0\" zeros";
    let program = compiled("hostile");
    let words = ["sh", "-c", script, program.to_str().unwrap()];
    let outcome = with_layout(Job::new(&above(&[]), &words)).run();
    was_ended(&outcome);
    let other = outcome.text().lines().next().unwrap().to_owned();
    let is_gone =
        || fs::read_to_string(format!("/proc/{other}/stat")).map_or(true, |stat| stat.contains(") Z "));
    wait_until("the other's end", is_gone);
}

/// 256 processes have four things to tell, 40 times over. That would be 39,680 lines.
#[test]
fn flood_of_notices_is_some_lines_that_a_terminal_can_show() {
    if !able("cc") {
        return;
    }
    let outcome = hostile("flood", &[]).run();
    assert_eq!((outcome.status, outcome.text().as_str()), (Some(0), "told\n"), "{}", outcome.stderr);
    is_printable(&outcome.stderr);
    let lines = outcome.stderr.lines().count();
    assert!((20..=100).contains(&lines), "{lines} lines:\n{}", outcome.stderr);
    assert!(outcome.stderr.contains("notices more were held back"), "{}", outcome.stderr);
    let name = "farpage: \\u{1b}[2J\\u{1b}]0;x\\u{7}\\nab\u{fffd} (pid ";
    assert!(outcome.stderr.contains(name), "{}", outcome.stderr);
    let stats = fs::read_to_string(outcome.place.path().join("stats.json")).unwrap();
    assert!(!stats.chars().any(|c| c != '\n' && c.is_control()), "the statistics have control characters");
}

#[test]
fn session_is_its_users_alone_and_keeps_its_size() {
    if !able("cc") {
        return;
    }
    let outcome = hostile("shrink", &[]).run();
    assert!(outcome.text().starts_with("mode 600\n"), "{}{}", outcome.text(), outcome.stderr);
    was_ended(&outcome);
}

#[test]
fn show_tells_of_a_session_that_was_overwritten() {
    if !able("cc") {
        return;
    }
    // Farpage itself is stopped, or it would end the run.
    let mut job = hostile("noise", &[]);
    job.environment("WAITS", "1");
    let running = job.start();
    let pid = running.pid();
    let send = |signal| {
        // SAFETY: takes no pointers; the process is one that this test started.
        assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    };
    wait_until("the program's start", || !descendants(pid).is_empty());
    send(libc::SIGSTOP);
    fs::write(running.place().join("go"), "").unwrap();
    let written = running.place().join("stdout");
    wait_until("the damage", || fs::read_to_string(&written).is_ok_and(|text| text.contains("written")));
    for words in [&[][..], &["--json"]] {
        let shown =
            farpage::Ended::of(farpage().arg("show").args(words).arg(pid.to_string()).output().unwrap());
        shown.refused(125, &["was overwritten", "fix: "]);
    }
    send(libc::SIGCONT);
    was_ended(&running.end());
}
