//! Programs that a program starts stay within the budget, though their environment no longer says
//! anything of Farpage.

use super::RAM;
use crate::farpage::budgeted::{Job, MIB, Outcome, Under, alone_with, compiled};
use crate::farpage::{self, harmless_library, skip};
use std::process::Command;

/// MiB that a started program fills: twice the budget.
const MIB_FILLED: u64 = 64;
/// Sum of one byte of each filled page.
const SUM: &str = "786432\n";

/// Returns an interpreter and a program that fills memory, adds up a part of it, and prints the sum. The
/// first word is the interpreter itself, not a script that finds it.
fn filler() -> (String, String) {
    let found = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    // On a busy machine all memory is filled before the keeper has had a CPU, so the program gives it time.
    let fill = "[b.__setitem__(i, 48) for i in range(0, len(b), 4096)]";
    let program = format!(
        "b = bytearray({MIB_FILLED} << 20); {fill}; import time; time.sleep(0.7); print(sum(b[::4096]))"
    );
    (String::from_utf8(found.stdout).unwrap().trim().to_owned(), program)
}

fn run(faults: &str, words: &[&str]) -> Outcome {
    let outcome = Job::new(&Under::budget(RAM, &["--faults", faults]), words).run();
    outcome.succeeded();
    assert_eq!(outcome.text(), SUM, "{words:?}: {}", outcome.stderr);
    outcome
}

/// Whether a process of 64 MiB or more is told of with this reason.
fn is_told_outside(outcome: &Outcome, why: &str) -> bool {
    let processes = outcome.stats["outside"]["processes"].as_array().unwrap();
    let is_it = |process: &serde_json::Value| {
        process["why"] == why
            && process["resident_peak"].as_u64().is_some_and(|bytes| bytes > MIB_FILLED << 20)
    };
    processes.iter().any(is_it) && outcome.stderr.contains(" ran outside of this budget: ")
}

fn stays(faults: &str, words: &[&str]) {
    let outcome = run(faults, words);
    // With processes outside, the evicted pages might be another process's.
    assert_eq!(
        outcome.stats["outside"]["processes"],
        serde_json::json!([]),
        "{faults}, {words:?}: {}",
        outcome.stderr
    );
    assert!(outcome.counter("evict_taken") > 5_000, "{faults}, {words:?}: {}", outcome.stderr);
}

/// Programs with a changed environment must have a budget, or the summary would be wrong to say that all
/// stayed within theirs.
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
    // Armed threads' system calls are intercepted by then.
    let past_the_budget =
        starts("b = [os.urandom(4096) for _ in range(12288)]; subprocess.run(words, env={}, check=True)");
    let exec = compiled("exec");
    let unset = "unset LD_PRELOAD FARPAGE_SESSION; exec \"$0\" -c \"$1\"";
    for faults in ["signal", "thread", "segv"] {
        stays(faults, &["env", "-i", &python, "-c", &fills]);
        stays(faults, &["env", &library, &python, "-c", &has_it]);
        stays(faults, &["sh", "-c", unset, &python, &fills]);
        // The list of the environment, and its entries, are evicted by then.
        for how in ["exec", "spawn"] {
            stays(faults, &[exec.to_str().unwrap(), how, &python, "-c", &fills]);
        }
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
        let why = format!("{variable} is empty").replace('=', "");
        assert!(is_told_outside(&outcome, &why), "{}", outcome.stderr);
    }
}

/// Of 300 forked processes nobody manages those beyond 256. The summary must not say that they "were not seen
/// above" the budget.
#[test]
fn forks_beyond_the_records_are_told_of() {
    let Some(_alone) = alone_with("python3") else { return };
    let forks = |count: u32| {
        let text = format!(
            "import os, time
left = os.getpid()
for _ in range({count}):
    if os.getpid() == left and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
time.sleep(1)
os.system('kill $(cat /proc/%d/task/*/children)' % left)"
        );
        let (python, _) = filler();
        Job::new(&Under::budget(4096 * MIB, &[]), &[&python, "-c", &text]).within(60).run()
    };
    let told =
        |outcome: &Outcome| outcome.stderr.contains("256 processes ran at once, as many as Farpage manages");
    let many = forks(300);
    assert!(told(&many) && !many.stderr.contains("not seen above"), "{}", many.stderr);
    let few = forks(20);
    assert!(!told(&few) && few.stderr.contains("not seen above"), "{}", few.stderr);
}

/// A static program's children, and a child by a bare clone, leave no note. The summary must name
/// them nevertheless.
#[test]
fn processes_that_leave_no_note_are_found_below_the_program() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = farpage::directory();
    let source = r#"#include <signal.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/syscall.h>
        #include <sys/wait.h>
        #include <unistd.h>
        int main(int count, char **words)
        {
            long pid = SYS_clone;
            register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
            __asm__ volatile("syscall" : "+a"(pid) : "D"(SIGCHLD), "S"(0L), "d"(0L), "r"(r10), "r"(r8)
                             : "rcx", "r11", "memory");
            if (pid == 0) {
                char *memory = malloc(64 << 20);
                memset(memory, 1, 64 << 20);
                sleep(12);
                _exit(memory[5] - 1);
            }
            int status;
            return waitpid(pid, &status, 0) != pid || status != 0;
        }"#;
    let source = farpage::put(place.path(), "parent.c", source.as_bytes(), 0o644);
    let start = |flag: &str, shell: &str| {
        let program = place.path().join(flag);
        let built = Command::new("cc").arg(flag).arg("-o").arg(&program).arg(&source).status();
        built.is_ok_and(|status| status.success()).then(|| {
            Job::new(&Under::budget(RAM, &[]), &["sh", "-c", shell, program.to_str().unwrap()]).start()
        })
    };
    let started = [start("-static", "\"$0\"; true"), start("-O1", "exec \"$0\"")];
    let whys = ["a static program", "made by a bare clone, or in another way that Farpage doesn't see"];
    for (running, why) in started.into_iter().zip(whys) {
        let Some(running) = running else { return skip("cc doesn't work here, or not with -static") };
        let outcome = running.end();
        outcome.succeeded();
        assert!(is_told_outside(&outcome, why), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("not seen above"), "{}", outcome.stderr);
    }
}

/// A program that enters a user namespace leaves the note of its next fork: the child can't join. The summary
/// called such a child by its parent's name, and said that it "did not join the run".
#[test]
fn processes_in_a_namespace_of_their_own_are_named_as_such() {
    let Some(_alone) = alone_with("python3") else { return };
    let (python, _) = filler();
    let inside = ["unshare", "-rpf", "--mount-proc", "sh", "-c", "sleep 12 & wait"];
    // The budget is large enough for unshare to have no thread of Farpage's, so that it may enter a
    // user namespace.
    let namespace = Job::new(&Under::budget(1024 * MIB, &[]), &inside).start();
    let short = ["unshare", "-rpf", "--mount-proc", "sh", "-c", "sleep 3 & wait"];
    let short = Job::new(&Under::budget(1024 * MIB, &[]), &short).start();
    // A child in a namespace of its own that is looked at before it executes a program.
    let forks = "import ctypes, os, time
assert ctypes.CDLL(None).unshare(0x30000000) == 0
child = os.fork()
if child == 0:
    time.sleep(1)
    os.execlp('sh', 'sh', '-c', 'sleep 12 & wait')
os.waitpid(child, 0)";
    let late = Job::new(&Under::budget(1024 * MIB, &[]), &[&python, "-c", forks]).start();
    // Notes of the fork and of the shell itself have two ids, and must not count twice.
    let is_shell = |process: &serde_json::Value| {
        process["why"] == "in a pid namespace of its own"
            && !process["path"].as_str().unwrap().contains("unshare")
    };
    let outcome = short.end();
    let outside = outcome.succeeded().stats["outside"]["processes"].as_array().unwrap();
    assert!(outside.iter().any(is_shell), "{}", outcome.stderr);
    for namespace in [namespace, late] {
        let outcome = namespace.end();
        outcome.succeeded();
        let outside = outcome.stats["outside"]["processes"].as_array().unwrap();
        let is_named = |process: &serde_json::Value| {
            let file = process["path"].as_str().unwrap();
            process["why"] == "in a pid namespace of its own"
                && ["unshare", "python"].iter().all(|first| !file.contains(first))
        };
        assert!(outside.len() == 2 && outside.iter().all(is_named), "{}", outcome.stderr);
    }
}

/// The summary must name a static child that is larger than the budget, and not say that the run
/// stayed within it.
#[test]
fn programs_that_never_join_are_named_with_the_reason() {
    let Some(_alone) = alone_with("python3") else { return };
    let (python, fills) = filler();
    let place = farpage::directory();
    let source = "#include <fcntl.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
                  int main(void) { char *m = malloc(64 << 20); memset(m, 1, 64 << 20); creat(\"full\", 0600); usleep(700000); return m[5] - 1; }\n";
    let source = farpage::put(place.path(), "hungry.c", source.as_bytes(), 0o644);
    let program = place.path().join("hungry");
    let built = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(source).status();
    if !built.is_ok_and(|status| status.success()) {
        return skip("cc -static doesn't work here");
    }
    let hungry = program.to_str().unwrap();
    let nested = env!("CARGO_BIN_EXE_farpage");
    for (words, why) in [
        (&["sh", "-c", "\"$0\"; true", hungry][..], "a static program"),
        (&["env", "LD_PRELOAD=", &python, "-c", &fills], "LD_PRELOAD is empty"),
        (&[nested, "run", "--ram", "1G", &python, "-c", &fills], "in a run of its own"),
    ] {
        let outcome = Job::new(&Under::budget(RAM, &[]), words).run();
        outcome.succeeded();
        assert!(is_told_outside(&outcome, why), "{}", outcome.stderr);
        assert!(outcome.stats["resident_peak"].as_u64().unwrap() > 64 << 20, "{}", outcome.stderr);
        let is_nested = words[0] == nested;
        assert!(is_nested || !outcome.stderr.contains("within"), "{}", outcome.stderr);
    }
    // A program with a long path, of which the note has only the beginning.
    let long = place.path().join("d".repeat(130));
    std::fs::create_dir(&long).unwrap();
    std::fs::copy(&program, long.join("hungry")).unwrap();
    let words = ["sh", "-c", "\"$0\"; true", long.join("hungry").to_str().unwrap()].map(str::to_owned);
    let outcome = Job::new(&Under::budget(RAM, &[]), &words.each_ref().map(String::as_str)).run();
    assert!(is_told_outside(outcome.succeeded(), "a static program"), "{}", outcome.stderr);
    // A program that is left behind, twice as large as the budget: "was not seen above its
    // budget" would be wrong.
    let leaves =
        ["sh", "-c", "\"$0\" >/dev/null 2>&1 & until [ -e full ]; do sleep 0.01; done; sleep 0.3", hungry];
    let outcome = Job::new(&Under::budget(RAM, &[]), &leaves).run();
    outcome.succeeded();
    assert!(is_told_outside(&outcome, "a static program"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("not seen above"), "{}", outcome.stderr);
}
