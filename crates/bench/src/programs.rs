//! `farpage bench programs`: how long real programs take with two fifths of the memory that they need. If the
//! kernel kills a program with so little, the program gets more. The programs run under the kernel's own swap
//! and under Farpage. Machine, settings and memory are those of [`crate::kernel`].
//!
//! Each program runs to its end, and its result is compared. The result is the program's output, or the
//! answers that a client got.

mod client;

use crate::Effort;
use crate::kernel::machine::{self, Machine, PAGE_CLUSTERS, PoolPeak, Setting};
use crate::kernel::{Failed, Found, NOTE_CPU, tell, try_in_turns, unless_killed};
use crate::live::{self, Outcome, Place};
use crate::measure::{Random, Sample, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};
use crate::stop;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
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

type Client = fn(&Path, u64) -> Result<String, String>;

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

fn digest(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{} bytes, {:016x}", bytes.len(), hasher.finish())
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

// ---- the contest ----------------------------------------------------------------------------------------

/// The runs of one program, round by round.
struct Measured {
    name: &'static str,
    ram: u64,
    setting: Setting,
    kernel: Vec<Run>,
    farpage: Vec<Run>,
    unlimited: Vec<Run>,
    /// Runs that the kernel ended because it found no memory. The runs were repeated.
    killed: usize,
    /// Smaller limits that were tried before, in bytes. With them the kernel killed the program under every
    /// setting.
    killed_with: Vec<u64>,
}

struct Run {
    outcome: Outcome,
    /// Peak of the pool, in bytes.
    pool: u64,
    /// Pages written to disk.
    written: u64,
}

impl Run {
    fn seconds(&self) -> f64 {
        self.outcome.wall.as_secs_f64()
    }
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
    let mut contest = Contest { machine, place, directory, bytes, rounds: effort.pick(5, 1) };
    let found = Found::of(
        installed,
        |program| program.name.to_owned(),
        |program| {
            tell(&format!("bench programs: {}", program.name));
            contest.measure(program)
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

struct Contest {
    machine: Machine,
    /// The directory in which programs run.
    place: PathBuf,
    /// The directory to which the kernel and Farpage swap.
    directory: PathBuf,
    bytes: u64,
    rounds: usize,
}

impl Contest {
    /// Measures a program with the least memory with which the kernel can run it at all. Returns the complete
    /// rounds, if there are any, and the failure that ended them.
    fn measure(&mut self, program: &Program) -> (Option<Measured>, Option<Failed>) {
        self.measure_enough(program).unwrap_or_else(|failed| (None, Some(failed)))
    }

    fn measure_enough(&mut self, program: &Program) -> Result<(Option<Measured>, Option<Failed>), Failed> {
        (program.prepare)(&self.place, self.bytes).map_err(|error| format!("its files: {error}"))?;
        let (first, result) = self.once(program, Place::Alone)?;
        let peak = first.peak_bytes * program.processes;
        let mut unlimited = vec![Run { outcome: first, pool: 0, written: 0 }];
        let (mut killed_with, mut failed) = (Vec::new(), String::new());
        for tenths in TENTHS {
            // Rounded down to whole MiB.
            let ram = peak * tenths / 10 / MIB * MIB;
            match self.measure_within(program, ram, &result, &mut unlimited) {
                (None, Some(Failed::Killed(why))) => failed = why,
                (one, failed) => return Ok((one.map(|one| Measured { killed_with, ..one }), failed)),
            }
            killed_with.push(ram);
        }
        Err(Failed::Killed(failed))
    }

    fn measure_within(
        &mut self,
        program: &Program,
        ram: u64,
        result: &str,
        unlimited: &mut Vec<Run>,
    ) -> (Option<Measured>, Option<Failed>) {
        let limited = self.machine.limits_to(ram).map_err(Failed::from);
        let setting = match limited.and_then(|()| self.best_setting(program, result)) {
            Ok(setting) => setting,
            Err(failed) => return (None, Some(failed)),
        };
        let mut measured = Measured {
            name: program.name,
            ram,
            setting,
            kernel: vec![],
            farpage: vec![],
            unlimited: vec![],
            killed: 0,
            killed_with: vec![],
        };
        let failed = (0..self.rounds)
            .find_map(|round| self.round(program, &mut measured, result, (round, &mut *unlimited)).err());
        let complete = measured.kernel.len().min(measured.farpage.len());
        if complete == 0 {
            return (None, failed);
        }
        measured.kernel.truncate(complete);
        measured.unlimited = std::mem::take(unlimited);
        (Some(measured), failed)
    }

    fn round(
        &mut self,
        program: &Program,
        measured: &mut Measured,
        result: &str,
        (round, unlimited): (usize, &mut Vec<Run>),
    ) -> Result<(), Failed> {
        // The kernel runs first, because the size of its pool decides how much memory Farpage gets.
        let setting = measured.setting.clone();
        let kernel = unless_killed(&mut measured.killed, || self.kernel(program, &setting, result))?;
        let pool = if self.machine.pool_is_within() { 0 } else { kernel.pool };
        measured.kernel.push(kernel);
        measured.farpage.push(self.farpage(program, measured.ram + pool, result)?);
        if round >= unlimited.len() {
            let outcome = same(self.once(program, Place::Alone)?, result)?;
            unlimited.push(Run { outcome, pool: 0, written: 0 });
        }
        Ok(())
    }

    /// Returns the setting with which the kernel runs the program best. Each codec of zswap, and no zswap, is
    /// tried without readahead first. Then the best of these, and no zswap, are tried with each readahead
    /// window. Codecs come first because windows take memory: with windows the kernel kills redis in some
    /// runs, whatever the codec.
    fn best_setting(&mut self, program: &Program, result: &str) -> Result<Setting, Failed> {
        let codecs = self.machine.codecs().into_iter().map(Some).chain([None]);
        let without_readahead = codecs.map(|codec| Setting { codec, page_cluster: 0 });
        let (least, best) = self.best_of(program, without_readahead.collect(), result)?;
        let codecs = [Some(best.codec.clone()), best.codec.as_ref().map(|_| None)];
        let rest = codecs.into_iter().flatten().flat_map(|codec| {
            let windows = PAGE_CLUSTERS.into_iter().filter(|page_cluster| *page_cluster > 0);
            windows.map(move |page_cluster| Setting { codec: codec.clone(), page_cluster })
        });
        match self.best_of(program, rest.collect(), result) {
            Ok((seconds, other)) if seconds < least => Ok(other),
            Ok(_) | Err(Failed::Killed(_)) => Ok(best),
            Err(failed) => Err(failed),
        }
    }

    fn best_of(
        &mut self,
        program: &Program,
        settings: Vec<Setting>,
        result: &str,
    ) -> Result<(f64, Setting), Failed> {
        let tried = try_in_turns(settings, self.rounds, |setting| {
            self.kernel(program, setting, result).map(|run| run.seconds().recip())
        })?;
        let fastest = tried.into_iter().max_by(|(_, one), (_, other)| one.total_cmp(other));
        fastest
            .map(|(setting, speed)| (speed.recip(), setting))
            .ok_or_else(|| "nothing to try".to_owned().into())
    }

    fn kernel(&mut self, program: &Program, setting: &Setting, result: &str) -> Result<Run, Failed> {
        self.machine.swaps_as(setting)?;
        let (before, killed) = (machine::pages_written(), self.machine.killed());
        let mut pool = PoolPeak::begin();
        let members = self.machine.members();
        let found = self.watched(program, Place::Within(&members), || pool.look());
        let written = machine::pages_written().saturating_sub(before);
        if self.machine.killed() > killed {
            return Err(Failed::Killed("the kernel found no memory, and killed a process of it".to_owned()));
        }
        Ok(Run { outcome: same(found?, result)?, pool: pool.bytes(), written })
    }

    fn farpage(&self, program: &Program, ram: u64, result: &str) -> Result<Run, String> {
        let (ram, swap) = (ram.to_string(), self.directory.display().to_string());
        let options = ["--ram", &ram, "--swap", &swap, "--faults", "signal"];
        let outcome = same(self.once(program, Place::Under(&options))?, result)?;
        let number = |what: &str, name: &str| outcome.stats[what][name].as_u64().unwrap_or(0);
        let (pool, written) = (number("gauges", "pool_peak"), number("counters", "area_slots"));
        Ok(Run { outcome, pool, written })
    }

    fn once(&self, program: &Program, place: Place<'_>) -> Result<(Outcome, String), String> {
        let killed = machine::killed();
        let found = self.watched(program, place, || ())?;
        // The program may have ended regularly although a process was killed, with half of its work done.
        let is_whole = machine::killed() == killed;
        is_whole
            .then_some(found)
            .ok_or_else(|| "the machine has too little memory: the kernel has killed a process".to_owned())
    }

    /// Runs a program to its end. Returns the outcome and the program's result.
    fn watched(
        &self,
        program: &Program,
        place: Place<'_>,
        mut watch: impl FnMut(),
    ) -> Result<(Outcome, String), String> {
        let words = (program.words)(self.bytes)?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        std::thread::scope(|scope| {
            let mut client =
                program.client.map(|client| scope.spawn(move || client(&self.place, self.bytes)));
            let mut got = String::new();
            let outcome = live::run(place, &words, &self.place, || {
                watch();
                if let Some(ended) = client.take_if(|client| client.is_finished()) {
                    got = ended.join().map_err(|_| "its client has panicked".to_owned())??;
                }
                Ok(())
            })?;
            if let Some(client) = client {
                got = client.join().map_err(|_| "its client has panicked".to_owned())??;
            }
            let result = (program.result)(&outcome)? + &got;
            // The output may be large.
            Ok((Outcome { printed: Vec::new(), ..outcome }, result))
        })
    }
}

fn same((outcome, found): (Outcome, String), wanted: &str) -> Result<Outcome, String> {
    if found == wanted {
        Ok(outcome)
    } else {
        Err(format!("its result is `{found}`, and `{wanted}` without a budget"))
    }
}

fn report(bytes: u64, rounds: usize, measured: &[Measured], missing: &[&str], budget: &str) -> Report {
    let mut report = Report::new("programs");
    report.published.push(
        "a machine like this, 512 MiB of 1 GiB, zswap with lzo: 105,000 random touches/s with one thread; a prototype of ours \
         143,000; programs: nothing"
            .to_owned(),
    );
    report.tables.push(table(measured));
    let speeds: Vec<f64> = measured.iter().map(|one| speed(one).median).collect();
    for (one, found) in measured.iter().zip(&speeds) {
        report.targets.push(Target::at_least(format!("{}: ratio of speeds", one.name), WANTED.1, *found));
    }
    if !speeds.is_empty() {
        let median = Sample::of(&speeds).median;
        report.targets.push(Target::at_least("median of all programs: ratio of speeds", WANTED.0, median));
    }
    report.charts.push(chart(measured));
    report.notes = vec![
        format!(
            "kernel: a cgroup of two fifths of what the program has in memory without a limit (or more: see below); farpage: \
             --ram {budget}, --faults signal; {} MiB of data, {rounds} rounds",
            bytes / MIB
        ),
        "the kernel has what it does best with of its codecs for zswap, no zswap, and page-cluster 3, 0 and 5, tried before; all \
         results are those of the run without a limit"
            .to_owned(),
        "the cgroup's limit counts what the kernel keeps for the program, too (tables of pages, files that it writes)".to_owned(),
        NOTE_CPU.to_owned(),
    ];
    for one in measured.iter().filter(|one| one.kernel.len() < rounds) {
        report.notes.push(format!("{}: {} of {rounds} rounds", one.name, one.kernel.len()));
    }
    for one in measured.iter().filter(|one| one.killed > 0) {
        report
            .notes
            .push(format!("{}: {} runs that the kernel killed were made again", one.name, one.killed));
    }
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

/// Returns the ratio of the kernel's time to Farpage's.
fn speed(one: &Measured) -> Sample {
    ratio(&seconds(&one.kernel), &seconds(&one.farpage))
}

fn seconds(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(Run::seconds).collect()
}

fn table(measured: &[Measured]) -> Table {
    let columns =
        ["program", "MiB", "who", "wall s", "ratio", "CPU s", "pool MiB", "to disk MiB", "major faults"];
    let mut table = Table::new("wall time to the end", &columns);
    for one in measured {
        let kernel = format!("kernel, {}", one.setting);
        let who = [(kernel.as_str(), &one.kernel), ("farpage", &one.farpage), ("unlimited", &one.unlimited)];
        for (at, (who, runs)) in who.into_iter().enumerate() {
            let median = |of: &dyn Fn(&Run) -> f64| {
                Cell::from(Sample::of(&runs.iter().map(of).collect::<Vec<_>>()).median)
            };
            table.row(vec![
                one.name.into(),
                ((one.ram / MIB) as usize).into(),
                who.into(),
                Sample::of(&seconds(runs)).into(),
                if at == 1 { speed(one).into() } else { Cell::Nothing },
                median(&|run| run.outcome.cpu_seconds),
                median(&|run| run.pool as f64 / MIB as f64),
                median(&|run| run.written as f64 * 4096.0 / MIB as f64),
                median(&|run| run.outcome.major_faults as f64),
            ]);
        }
    }
    table
}

fn chart(measured: &[Measured]) -> Chart {
    let of = |runs: fn(&Measured) -> &Vec<Run>| -> Vec<f64> {
        measured.iter().map(|one| Sample::of(&seconds(runs(one))).median).collect()
    };
    Chart {
        title: "Programs with two fifths of the memory they need".to_owned(),
        unit: "seconds".to_owned(),
        groups: measured.iter().map(|one| one.name.to_owned()).collect(),
        series: vec![
            ("kernel".to_owned(), of(|one| &one.kernel)),
            ("farpage".to_owned(), of(|one| &one.farpage)),
            ("unlimited".to_owned(), of(|one| &one.unlimited)),
        ],
    }
}
