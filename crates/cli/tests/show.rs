//! Several areas at once, in the order that was asked for. `farpage show` tells their use while the program
//! runs, or why it can't.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Running, Under, alone_with, compiled, descendants};
use farpage::{Ended, directory, farpage, is_root, skip};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

const RAM: u64 = 32 * MIB;

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a case of `tests/programs/waits.c`, up to its wait: 96 MiB of noise with 32 MiB of memory.
fn start_waiting(case: &str, options: &[&str]) -> Running {
    let program = compiled("waits");
    let under = Under::budget(RAM, &[&["--supervisor", "above"], options].concat());
    let running = Job::new(&under, &[program.to_str().unwrap(), case]).within(150).start();
    wait_until("the program's readiness", || running.place().join("ready").exists());
    running
}

fn say(running: &Running, name: &str) {
    File::create(running.place().join(name)).unwrap();
}

fn show(pid: u32, words: &[&str]) -> Ended {
    Ended::of(farpage().arg("show").args(words).arg(pid.to_string()).output().unwrap())
}

/// Returns what `show --json` says.
#[track_caller]
fn shown(pid: u32) -> Value {
    let ended = show(pid, &["--json"]);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

/// Returns the MiB in use of each area, once everything that must be evicted is: at least 60 MiB.
fn used_mib(pid: u32) -> Vec<u64> {
    let used = || -> Vec<u64> {
        let areas = shown(pid)["areas"].as_array().unwrap().clone();
        areas.iter().map(|area| area["used"].as_u64().unwrap() / MIB).collect()
    };
    wait_until("60 MiB are out", || used().iter().sum::<u64>() >= 60);
    used()
}

/// Whether the areas are shared. Areas take turns by writes, which are not all of one size.
fn are_shared(used: &[u64]) -> bool {
    used.iter().all(|used| *used >= 15)
}

fn in_areas(place: &Path, areas: &[&str], options: &[&str]) -> Running {
    let paths: Vec<String> = areas.iter().map(|area| format!("{}{area}", place.display())).collect();
    let swap = paths.iter().flat_map(|path| ["--swap", path]);
    start_waiting("read_after", &swap.chain(options.iter().copied()).collect::<Vec<_>>())
}

#[track_caller]
fn ends_well(running: Running) {
    say(&running, "go");
    assert_eq!(running.end().succeeded().text(), "all right\n");
}

#[test]
fn higher_priority_is_filled_first_and_then_the_next_and_show_says_so() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let running = in_areas(place.path(), &[":200M,prio=3,node=0", ":16M,prio=7"], &[]);
    let pid = running.pid();
    let used = used_mib(pid);
    assert!((14..=16).contains(&used[1]) && used[0] >= 40, "{used:?}");

    let table = show(pid, &[]);
    let lines: Vec<Vec<&str>> = table.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "TYPE", "SIZE", "USED", "PRIO", "NODE"]);
    let name = place.path().to_str().unwrap();
    assert_eq!((&lines[1][..3], &lines[1][4..]), (&[name, "file", "200M"][..], &["3", "0"][..]));
    assert_eq!((lines[2][2], lines[2][4], lines.len()), ("16M", "7", 3));
    let plain = show(pid, &["--noheadings", "--bytes", "-o", "SIZE,prio"]);
    assert_eq!(plain.stdout, "209711104 3\n 16773120 7\n");
    // The program's process shows the same run.
    let json = shown(descendants(pid)[0]);
    assert_eq!((&json["supervisor"], &json["order"]), (&pid.into(), &"weighted".into()));
    assert_eq!(json["processes"][0]["command"], "waits");
    ends_well(running);
    show(pid, &[]).refused(125, &["no process"]);
}

#[test]
fn equal_priorities_take_turns() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let running = in_areas(place.path(), &[":200M,prio=5", ":200M,prio=5", ":200M,prio=1"], &[]);
    let used = used_mib(running.pid());
    assert!(are_shared(&used[..2]) && used[2] == 0, "{used:?}");
    ends_well(running);
}

#[test]
fn areas_without_priority_are_used_as_the_order_says() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    for (order, priorities, first_only) in
        [("global", [-1, -2], true), ("numa", [-2, -3], true), ("round-robin", [-1, -1], false)]
    {
        // Only one of the areas could be local to this process, and that is the first.
        let areas = [":200M,node=0", ":200M"];
        let running = in_areas(place.path(), &areas, &["--order", order]);
        let used = used_mib(running.pid());
        let json = shown(running.pid());
        let found = [0, 1].map(|at: usize| json["areas"][at]["prio"].as_i64().unwrap());
        assert_eq!(found, priorities, "{order}");
        assert_eq!(used[1] == 0, first_only, "{order}: {used:?}");
        assert!(first_only || are_shared(&used), "{order}: {used:?}");
        ends_well(running);
    }
    // The area that gets more depends on how long writes took. The core's own tests measure that
    // without a clock.
    let running = in_areas(place.path(), &[":200M", ":200M"], &[]);
    used_mib(running.pid());
    let json = shown(running.pid());
    assert_eq!([0, 1].map(|at: usize| json["areas"][at]["prio"].as_i64().unwrap()), [-1, -1]);
    ends_well(running);
}

#[test]
fn discard_gives_room_on_the_disk_back_while_the_program_runs() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let path = farpage::put(place.path(), "area", b"", 0o600);
    let on_disk = || fs::metadata(&path).unwrap().blocks() * 512 / MIB;
    for (option, is_given_back) in [("", false), (",discard", true)] {
        let area = format!("{path}:200M{option}");
        let running = start_waiting("give_up_after", &["--swap", &area]);
        used_mib(running.pid());
        assert!(on_disk() >= 60, "{}", on_disk());
        say(&running, "go");
        wait_until("the program's giving up", || running.place().join("gone").exists());
        if is_given_back {
            // Two empty clusters may be kept, and one is being filled.
            wait_until("free space on the disk", || on_disk() <= 8);
        } else {
            std::thread::sleep(Duration::from_millis(200));
            assert!(on_disk() >= 60, "nobody asked for it: {}", on_disk());
        }
        say(&running, "end");
        let outcome = running.end();
        assert_eq!(outcome.succeeded().text(), "all right\n");
        assert_eq!(outcome.counter("discarded") > 0, is_given_back);
    }
}

#[test]
fn show_says_why_it_can_not() {
    show(u32::MAX, &[]).refused(125, &["no process 4294967295"]);
    show(std::process::id(), &[]).refused(125, &["doesn't run under Farpage", "farpage run PROGRAM"]);
    let ended = show(1, &["--json", "--bytes"]);
    assert!(ended.status == Some(125) && ended.stderr.contains("cannot be used with"), "{}", ended.stderr);
    let ended = show(1, &["-o", "name,what"]);
    assert!(ended.status == Some(125) && ended.stderr.contains("what"), "{}", ended.stderr);
}

/// Some programs write over their variables to show a title (postgres, redis). `show` said that such a
/// program doesn't run under Farpage.
#[test]
fn show_finds_the_run_of_a_program_that_has_written_over_its_variables() {
    let Some(_alone) = alone_with("python3") else { return };
    let text = "
import ctypes, os, subprocess, sys
variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), 'environ')
at = 0
while variables[at]:
    ctypes.memset(variables[at], 0, len(ctypes.string_at(variables[at])))
    at += 1
assert b'FARPAGE_SESSION' not in open('/proc/self/environ', 'rb').read()
sys.exit(subprocess.run([sys.argv[1], 'show', str(os.getpid())]).returncode)
";
    let farpage = env!("CARGO_BIN_EXE_farpage");
    let under = Under::budget(RAM, &["--supervisor", "beside"]);
    let outcome = Job::new(&under, &["python3", "-c", text, farpage]).within(60).run();
    assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
    assert!(outcome.text().starts_with("NAME "), "{}", outcome.text());
}

#[test]
fn show_of_somebody_elses_run_is_refused() {
    if !is_root() {
        return skip("this needs a second user");
    }
    let place = directory();
    let executable = place.path().join("farpage");
    farpage::install(Path::new(env!("CARGO_BIN_EXE_farpage")), &executable, 0o755);
    let mut command = std::process::Command::new(executable);
    command.args(["show", "1"]).uid(65_534).gid(65_534).current_dir("/");
    Ended::of(command.output().unwrap()).refused(125, &["belongs to somebody else", "sudo farpage show 1"]);
}
