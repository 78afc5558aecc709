//! `farpage bench programs`: how long real programs take with two fifths of the memory that they need. If the
//! kernel kills a program with so little, the program gets more. The programs run under the kernel's own swap
//! and under Farpage. Machine, settings and memory are those of [`crate::kernel`]. [`crate::contest`] runs
//! one program.

mod client;

use crate::Effort;
use crate::contest::{Client, Contest, Entrant, Job, Measured, Run, chart, digest, notes, table};
use crate::kernel::machine::Machine;
use crate::kernel::{Failed, Found, tell};
use crate::live::{self, Outcome, Place};
use crate::measure::{Random, Sample};
use crate::report::{Report, Target};
use crate::stop;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const OBJECTS: &str = include_str!("../../../tests/programs/objects.py");
/// Targets for the ratio of the kernel's time to Farpage's: the median of all programs, and each program.
const WANTED: (f64, f64) = (1.5, 1.0);
/// Tenths of its needed memory that a program gets: the first number with which the kernel doesn't kill it.
const TENTHS: std::ops::RangeInclusive<u64> = 4..=9;

/// A program of the benchmark.
struct Program {
    name: &'static str,
    /// The command that must be installed.
    needs: &'static str,
    /// Processes that have as much memory as the largest process.
    processes: u64,
    /// Writes the program's files, for about the given number of bytes of memory.
    prepare: fn(&Path, u64) -> std::io::Result<()>,
    words: fn(u64) -> Result<Vec<String>, String>,
    /// Gives the program work from outside, and ends it.
    client: Option<Client>,
    /// Returns the program's result.
    result: fn(&Outcome) -> Result<String, String>,
}

/// The only table of programs.
const PROGRAMS: [Program; 6] = [
    Program {
        name: "pagerank, 2 threads",
        needs: "sh",
        processes: 1,
        prepare: |_, _| Ok(()),
        words: |bytes| {
            Ok(strings(&[
                &live::farpage()?,
                "load",
                "pagerank",
                "--threads",
                "2",
                "--bytes",
                &bytes.to_string(),
            ]))
        },
        client: None,
        result: |outcome| {
            let found: serde_json::Value = serde_json::from_slice(&outcome.printed)
                .map_err(|why| format!("it printed no JSON: {why}"))?;
            Ok(found["digest"].to_string())
        },
    },
    Program {
        name: "python3, objects",
        needs: "python3",
        processes: 1,
        prepare: |place, _| fs::write(place.join("objects.py"), OBJECTS),
        words: |bytes| Ok(strings(&[&python()?, "objects.py", &(bytes / MIB).to_string(), "mixed"])),
        client: None,
        result: printed,
    },
    Program {
        name: "sort, 2 threads",
        needs: "sort",
        processes: 1,
        prepare: write_lines,
        words: |bytes| Ok(strings(&["sort", "--parallel=2", "-S", &(4 * bytes).to_string(), "lines"])),
        client: None,
        result: printed,
    },
    Program {
        name: "redis-server, set and get",
        needs: "redis-server",
        processes: 1,
        prepare: |_, _| Ok(()),
        words: |_| {
            let words = "redis-server --port 0 --unixsocket socket --appendonly no --logfile log --save";
            Ok([words.split(' ').map(str::to_owned).collect(), vec![String::new()]].concat())
        },
        client: Some(client::sets_and_gets),
        result: |_| Ok(String::new()),
    },
    Program {
        name: "sqlite3, a table in memory",
        needs: "sqlite3",
        processes: 1,
        prepare: write_queries,
        words: |_| Ok(strings(&["sqlite3", "-batch", "-init", "queries", ":memory:", ".exit"])),
        client: None,
        result: printed,
    },
    Program {
        name: "stress-ng --vm 2 --verify",
        needs: "stress-ng",
        processes: 2,
        prepare: |_, _| Ok(()),
        words: |bytes| {
            // Without `--oomable`, stress-ng restarts a worker that the kernel has killed, and may never end.
            let words =
                "stress-ng --quiet --oomable --vm 2 --vm-method all --vm-ops 20000 --verify --vm-bytes";
            Ok([words.split(' ').map(str::to_owned).collect(), vec![bytes.to_string()]].concat())
        },
        client: None,
        // stress-ng ends with an error if a byte was wrong. The output can't be compared, because it contains
        // times.
        result: |_| Ok(String::new()),
    },
];

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn printed(outcome: &Outcome) -> Result<String, String> {
    if outcome.printed.is_empty() {
        Err("it printed nothing".to_owned())
    } else {
        Ok(digest(&outcome.printed))
    }
}

/// Returns the path of the real interpreter. `python3` may be a script that looks for it.
fn python() -> Result<String, String> {
    let asked = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let output = asked.map_err(|error| format!("python3 can't be started: {error}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Writes lines of some 200 bytes, half of them noise. The kernel charges the file's pages to the process
/// that wrote them, not to the process that sorts them.
fn write_lines(place: &Path, bytes: u64) -> std::io::Result<()> {
    let mut random = Random::new(7);
    let mut lines = String::new();
    // sort needs some 50 bytes for each line beside the line's contents.
    while (lines.len() as u64) < bytes * 3 / 4 {
        (0..6).for_each(|_| write!(lines, "{:016x}", random.next()).expect("a string takes everything"));
        lines.push_str(&" a part that is the same in all".repeat(3));
        lines.push('\n');
    }
    fs::write(place.join("lines"), lines)
}

fn write_queries(place: &Path, bytes: u64) -> std::io::Result<()> {
    let rows = bytes / 400;
    fs::write(
        place.join("queries"),
        format!(
            "PRAGMA cache_size = -1000000;
             CREATE TABLE data(id INTEGER PRIMARY KEY, class INTEGER, content TEXT);
             INSERT INTO data WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
               SELECT i, i * 7919 % 1009, printf('%016x', i * 6364136223846793005) || ' is row ' || i || printf('%.*c', 300, 'x')
               FROM n;
             CREATE INDEX by_class ON data(class);
             UPDATE data SET content = upper(content) WHERE class % 10 = 3;
             DELETE FROM data WHERE class % 20 = 7;
             SELECT class % 50, count(*), sum(length(content)), max(content) FROM data GROUP BY 1 ORDER BY 1;
             PRAGMA integrity_check;\n"
        ),
    )
}

/// Runs all programs, or only those whose names contain `only`.
pub fn run(effort: Effort, only: Option<&str>) -> Result<Report, String> {
    // In much smaller cgroups the kernel finds no memory, and kills.
    let bytes = effort.pick(256, 80) * MIB;
    let mut programs: Vec<&Program> =
        PROGRAMS.iter().filter(|program| only.is_none_or(|text| program.name.contains(text))).collect();
    if programs.is_empty() {
        return Err(format!("it has no such program; one is called `{}`", PROGRAMS[0].name));
    }
    programs.truncate(effort.pick(programs.len(), 1));
    let (installed, missing): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| is_installed(program.needs));
    let missing: Vec<&str> = missing.into_iter().map(|program| program.needs).collect();
    if installed.is_empty() {
        return Err(format!("not installed: {}", missing.join(", ")));
    }
    let _hearing = stop::hear();
    let (directory, temporary) = (live::swap_directory()?, live::temporary()?);
    let mut machine = Machine::new(&directory, 4 * bytes, bytes)?;
    let place = temporary.join(format!("farpage-programs-{}", std::process::id()));
    machine.has_directory(&place)?;
    fs::create_dir(&place).map_err(|error| format!("{} can't be made: {error}", place.display()))?;
    let farpage = Entrant { name: "farpage".to_owned(), options: strings(&["--faults", "signal"]) };
    let mut contest =
        Contest { machine, place, directory, entrants: vec![farpage], rounds: effort.pick(5, 1) };
    let found = Found::of(
        installed,
        |program| program.name.to_owned(),
        |program| {
            tell(&format!("bench programs: {}", program.name));
            measure(&mut contest, program, bytes)
        },
    );
    let rounds = contest.rounds;
    let budget = contest.machine.budget_of_farpage();
    let restored = contest.machine.restore();
    found.report(restored, |measured| report(bytes, rounds, measured, &missing, budget))
}

fn is_installed(command: &str) -> bool {
    let words = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&words).any(|place| place.join(command).is_file())
}

/// Measures a program with the least memory with which the kernel can run it at all. Returns the complete
/// rounds, if there are any, and the failure that ended them.
fn measure(contest: &mut Contest, program: &Program, bytes: u64) -> (Option<Measured>, Option<Failed>) {
    measure_enough(contest, program, bytes).unwrap_or_else(|failed| (None, Some(failed)))
}

fn measure_enough(
    contest: &mut Contest,
    program: &Program,
    bytes: u64,
) -> Result<(Option<Measured>, Option<Failed>), Failed> {
    (program.prepare)(&contest.place, bytes).map_err(|error| format!("its files: {error}"))?;
    let job = Job {
        name: program.name.to_owned(),
        words: (program.words)(bytes)?,
        client: program.client.map(|client| (client, bytes)),
        result: program.result,
    };
    let (first, result) = contest.once(&job, Place::Alone)?;
    let peak = first.peak_bytes * program.processes;
    let mut unlimited = vec![Run::unlimited(first)];
    let (mut killed_with, mut failed) = (Vec::new(), String::new());
    for tenths in TENTHS {
        // Rounded down to whole MiB.
        let ram = peak * tenths / 10 / MIB * MIB;
        match contest.measure_within(&job, ram, &result, &mut unlimited) {
            (None, Some(Failed::Killed(why))) => failed = why,
            (one, failed) => return Ok((one.map(|one| Measured { killed_with, ..one }), failed)),
        }
        killed_with.push(ram);
    }
    Err(Failed::Killed(failed))
}

fn report(bytes: u64, rounds: usize, measured: &[Measured], missing: &[&str], budget: &str) -> Report {
    let mut report = Report::new("programs");
    report.published.push(
        "a machine like this, 512 MiB of 1 GiB, zswap with lzo: 105,000 random touches/s with one thread; a prototype of ours \
         143,000; programs: nothing"
            .to_owned(),
    );
    report.tables.push(table(measured));
    let speeds: Vec<f64> = measured.iter().map(|one| one.speeds()[0].median).collect();
    for (one, found) in measured.iter().zip(&speeds) {
        report.targets.push(Target::at_least(format!("{}: ratio of speeds", one.name), WANTED.1, *found));
    }
    if !speeds.is_empty() {
        let median = Sample::of(&speeds).median;
        report.targets.push(Target::at_least("median of all programs: ratio of speeds", WANTED.0, median));
    }
    report.charts.push(chart("Programs with two fifths of the memory they need", measured));
    report.notes = vec![format!(
        "kernel: a cgroup of two fifths of what the program has in memory without a limit (or more: see below); farpage: \
             --ram {budget}, --faults signal; {} MiB of data, {rounds} rounds",
        bytes / MIB
    )];
    report.notes.extend(notes(measured, rounds));
    for one in measured.iter().filter(|one| !one.killed_with.is_empty()) {
        let with: Vec<String> = one.killed_with.iter().map(|bytes| (bytes / MIB).to_string()).collect();
        report.notes.push(format!(
            "{}: with {} MiB the kernel killed it, whatever its settings; so both have {}",
            one.name,
            with.join(" and "),
            one.ram / MIB
        ));
    }
    if !missing.is_empty() {
        report.notes.push(format!("not installed, and left out: {}", missing.join(", ")));
    }
    report
}
