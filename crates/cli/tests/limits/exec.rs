//! What a program starts stays within the budget, though the environment says nothing of it any more.

use super::RAM;
use crate::farpage::budgeted::{Job, Outcome, Under, alone_with};
use crate::farpage::harmless_library;
use std::process::Command;

/// MiB that a started program fills: twice the budget.
const MIB_FILLED: u64 = 64;
/// Their sum, one byte of each page.
const SUM: &str = "786432\n";

/// Fills memory, adds up a part of it, and prints the sum. The first word is the interpreter, not a script that finds it.
fn filler() -> (String, String) {
    let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    // Page by page: with a burst, what is evicted depends on how busy the machine is.
    let fill = "[b.__setitem__(i, 48) for i in range(0, len(b), 4096)]";
    let program = format!("b = bytearray({MIB_FILLED} << 20); {fill}; print(sum(b[::4096]))");
    (String::from_utf8(found.stdout).unwrap().trim().to_owned(), program)
}

fn run(faults: &str, words: &[&str]) -> Outcome {
    let outcome = Job::new(&Under::budget(RAM, &["--faults", faults]), words).run();
    outcome.succeeded();
    assert_eq!(outcome.text(), SUM, "{words:?}: {}", outcome.stderr);
    outcome
}

fn stays(faults: &str, words: &[&str]) {
    let outcome = run(faults, words);
    assert!(outcome.counter("evict_taken") > 5_000, "{faults}, {words:?}: {}", outcome.stderr);
}

/// They had no budget, and the summary said that all had stayed within theirs (peak 428 KiB).
#[test]
fn programs_started_with_another_environment_stay_within_the_budget() {
    let Some(_alone) = alone_with("python3") else { return };
    let (python, fills) = filler();
    let library = format!("LD_PRELOAD={}", harmless_library().display());
    let has_it = format!("assert 'harmless' in open('/proc/self/maps').read(); {fills}");
    let starts = |how: &str| {
        format!("import ctypes, os, subprocess, sys; words = [sys.executable, '-c', \"{fills}\"]; {how}")
    };
    let emptied = starts("subprocess.run(words, env={}, check=True)");
    let emptied_by_fork = starts("subprocess.run(words, env={}, check=True, preexec_fn=lambda: None)");
    let no_list = starts(
        "c = (ctypes.c_char_p * 4)(*[word.encode() for word in words], None); \
         ctypes.CDLL(None).execve(c[0], c, None); sys.exit(3)",
    );
    // Its system calls are looked at by then.
    let past_the_budget =
        starts("b = [os.urandom(4096) for _ in range(12288)]; subprocess.run(words, env={}, check=True)");
    let unset = "unset LD_PRELOAD FARPAGE_SESSION; exec \"$0\" -c \"$1\"";
    for faults in ["signal", "thread", "segv"] {
        stays(faults, &["env", "-i", &python, "-c", &fills]);
        stays(faults, &["env", &library, &python, "-c", &has_it]);
        stays(faults, &["sh", "-c", unset, &python, &fills]);
        for program in [&emptied, &emptied_by_fork, &no_list, &past_the_budget] {
            stays(faults, &[&python, "-c", program]);
        }
    }
}

#[test]
fn program_that_is_started_with_an_empty_variable_runs_outside_of_the_run() {
    let Some(_alone) = alone_with("python3") else { return };
    let (python, fills) = filler();
    for variable in ["LD_PRELOAD=", "FARPAGE_SESSION="] {
        let outcome = run("signal", &["env", "-i", variable, &python, "-c", &fills]);
        assert_eq!(outcome.counter("evict_taken"), 0, "{}", outcome.stderr);
    }
}
