//! Programs that fault all the time: every byte is right, and pages go out and in by the cheapest way.

use super::{RAM, modes};
use crate::farpage::budgeted::{Job, MIB, Outcome, Under, alone_with, compiled, library};
use crate::farpage::{self, directory, put};
use std::process::Stdio;

#[test]
fn pipeline_passes_every_byte_while_pages_are_out() {
    let Some(_alone) = alone_with("python3") else { return };
    let input: Vec<u8> =
        (0_u64..12 << 20).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 13).to_ne_bytes()).collect();
    let reverse = "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[::-1])";
    let mut command = farpage::farpage();
    command.env("FARPAGE_PRELOAD", library()).args(["run", "--quiet", "--ram", "48M", "--"]);
    command.args(["python3", "-c", reverse]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut to = child.stdin.take().unwrap();
    let sent = input.clone();
    let sender = std::thread::spawn(move || std::io::Write::write_all(&mut to, &sent).unwrap());
    let output = child.wait_with_output().unwrap();
    sender.join().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert!(output.stdout.iter().eq(input.iter().rev()), "{} bytes came out", output.stdout.len());
}

/// Calls of a peer and requests of a ring that fail must be told: "problems none" would be wrong.
#[test]
fn memory_that_neither_a_peer_nor_a_ring_can_reach_is_told_once() {
    let Some(_alone) = alone_with("cc") else { return };
    let cases = [
        ("peer_writes", "from_a_parent", "it could not reach memory of process "),
        ("io", "registered_before_the_budget", "it began an io_uring before its memory was managed"),
    ];
    for (name, case, told) in cases {
        let program = compiled(name);
        for (faults, times) in [("signal", 1), ("segv", 1), ("thread", 0)] {
            if faults == "thread" && !crate::farpage::is_root() {
                continue;
            }
            let words = [program.to_str().unwrap(), case];
            let outcome = Job::new(&Under::budget(RAM, &["--faults", faults]), &words).run();
            outcome.succeeded();
            // If the kernel has no rings there is nothing to tell of them.
            if outcome.stderr.contains("skipped: no ring") {
                continue;
            }
            for (start, times) in
                [(format!("farpage: {name} (pid "), times), ("farpage:   problem ".into(), times)]
            {
                let lines =
                    outcome.stderr.lines().filter(|line| line.starts_with(&start) && line.contains(told));
                assert_eq!(lines.count(), times, "{faults} {case}: {}", outcome.stderr);
            }
        }
    }
}

/// Touches memory at random, of which half is in the pool, in `signal` mode. The load compares
/// all that it reads.
fn touched_at_random(threads: &str) -> Option<Outcome> {
    let farpage = env!("CARGO_BIN_EXE_farpage");
    let _alone = alone_with(farpage)?;
    let load =
        ["random-pool", "--bytes", "96M", "--seconds", "3", "--write-percent", "30", "--threads", threads];
    let words = [&[farpage, "load"], &load[..]].concat();
    let outcome = Job::new(&Under::budget(48 * MIB, &["--faults", "signal", "--no-disk"]), &words).run();
    outcome.succeeded();
    Some(outcome)
}

/// A faulting thread evicts pages for the pages that it gets, and the keeper places them.
#[test]
fn thread_that_was_served_takes_pages_out_itself() {
    let Some(outcome) = touched_at_random("1") else { return };
    let (here, all) = (outcome.counter("evict_here"), outcome.counter("evict_taken"));
    assert!(here > 1_000 && here <= all, "{here} of {all}: {}", outcome.stderr);
}

/// Lulls are used on few CPUs only: on more CPUs their benefit isn't known.
#[test]
fn threads_that_fault_wait_while_pages_are_taken() {
    let Some(outcome) = touched_at_random("2") else { return };
    let (lull, all) = (outcome.counter("evict_lull"), outcome.counter("evict_taken"));
    let cpus = std::thread::available_parallelism().unwrap().get();
    let is_used = (2..=4).contains(&cpus);
    assert_eq!(lull > 1_000, is_used, "{lull} of {all}, {cpus} CPUs: {}", outcome.stderr);
    assert!(lull <= all, "{lull} of {all}");
}

/// The working set of the program is a little more than half of its budget. The pool, which may have the
/// other half, must give way: otherwise each fault evicts pages of the working set. The data may compress (a
/// graph's ranks) or not (a matrix).
#[test]
fn pool_gives_way_to_what_is_in_use_all_the_time() {
    let farpage = env!("CARGO_BIN_EXE_farpage");
    let Some(_alone) = alone_with(farpage) else { return };
    for faults in ["signal", "thread", "segv"] {
        for (load, bytes, ram) in [("pagerank", "64M", 16), ("lu", "9M", 8)] {
            let words = [farpage, "load", load, "--bytes", bytes];
            let outcome = Job::new(&Under::budget(ram * MIB, &["--faults", faults]), &words).run();
            outcome.succeeded();
            let taken = outcome.counter("evict_taken");
            assert!((5_000..1_000_000).contains(&taken), "{load}, {faults}: {}", outcome.stderr);
        }
    }
}

/// Returns pages of which one in ten doesn't compress.
fn mixed_pages(count: u64) -> Vec<u8> {
    let (mut noise, mut bytes) = (1u64, Vec::new());
    for word in 0..count * 512 {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let is_noise = (word / 512).is_multiple_of(10);
        let word = if is_noise { noise ^ noise >> 32 } else { word << 16 | noise >> 60 };
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// All evicted pages fit the pool, but there is a disk. Pages that don't compress must not be written to the
/// disk at once: faults on them would wait for the disk.
#[test]
fn next_to_nothing_is_read_from_the_disk_while_the_pool_has_room() {
    let farpage = env!("CARGO_BIN_EXE_farpage");
    let Some(_alone) = alone_with(farpage) else { return };
    let place = directory();
    let contents = put(place.path(), "contents", &mixed_pages(1000), 0o644);
    let load = ["touch", "--pattern", "random", "--bytes", "64M", "--seconds", "3", "--contents", &contents];
    let words = [&[farpage, "load"], &load[..], &["--write-percent", "20"]].concat();
    for faults in modes() {
        let outcome = Job::new(&Under::budget(48 * MIB, &["--faults", faults]), &words).run();
        let [pool, whole, area] =
            ["zswpin", "stored_incompressible", "pswpin"].map(|name| outcome.succeeded().counter(name));
        assert!(pool > 5_000 && whole > 500 && area < pool / 100, "{faults}: {}", outcome.stderr);
    }
}

/// In `segv` mode bytes are written through a file of the engine's. A walk that outruns its window must not
/// get the next pages in the program's thread. In that thread's table the file's number is another file, in
/// this test one that takes everything.
#[test]
fn walk_finds_its_bytes_whatever_files_the_program_has() {
    let Some(_alone) = alone_with("python3") else { return };
    let walk = r#"
import os
null = os.open("/dev/null", os.O_RDWR)
for number in range(3, 100):
    os.dup2(null, number)
PAGE, PAGES = 4096, 24000
some = bytes(range(256)) * 15
def page(n):
    return bytes(PAGE) if n % 3 == 0 else n.to_bytes(256, "little") + some
memory = bytearray(PAGE * PAGES)
for n in range(PAGES):
    if n % 3:
        memory[n * PAGE:(n + 1) * PAGE] = page(n)
print(sum(memory[n * PAGE:(n + 1) * PAGE] != page(n) for lap in range(6) for n in range(PAGES)), "wrong")
"#;
    for faults in ["signal", "thread", "segv"] {
        let options = ["--faults", faults];
        let outcome = Job::new(&Under::budget(48 * MIB, &options), &["python3", "-c", walk]).run();
        assert_eq!(outcome.succeeded().text(), "0 wrong\n", "{faults}");
        assert!(outcome.counter("swap_ra") > 10_000, "{faults}: {}", outcome.stderr);
    }
}

/// A thread that needs a page of an area polls for it or sleeps, as `--wait` says. A fork's child does the
/// same, and sets up its own means to poll.
#[test]
fn page_of_an_area_is_looked_for_or_slept_for() {
    let Some(_alone) = alone_with("python3") else { return };
    let touches = r#"
import hashlib, os, random, sys
PAGE, PAGES = 4096, 12000
def page(n):
    return hashlib.shake_128(n.to_bytes(4, "little")).digest(PAGE)
memory = bytearray(PAGE * PAGES)
for n in range(PAGES):
    memory[n * PAGE:(n + 1) * PAGE] = page(n)
child = os.fork() if sys.argv[1] == "child" else 0
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
wrong = sum(memory[n * PAGE:(n + 1) * PAGE] != page(n) for n in random.choices(range(PAGES), k=20000))
print(wrong, "wrong")
"#;
    for (faults, wait, who) in [
        ("signal", "poll", "itself"),
        ("thread", "poll", "child"),
        ("segv", "poll", "itself"),
        ("signal", "sleep", "itself"),
    ] {
        let options = ["--faults", faults, "--wait", wait, "--pool", "1M"];
        let outcome = Job::new(&Under::budget(24 * MIB, &options), &["python3", "-c", touches, who]).run();
        assert_eq!(outcome.succeeded().text(), "0 wrong\n", "{faults}");
        let (read, polled) = (outcome.counter("fault_area"), outcome.counter("fault_polled"));
        let is_as_asked = if wait == "poll" { polled > 20 } else { polled == 0 };
        assert!(read > 6_000 && is_as_asked, "{faults}, {wait}: {polled} of {read}");
    }
}
