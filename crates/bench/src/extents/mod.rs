//! `farpage bench extents`: from a slot to its block.
//!
//! Linux kept extents in a list with one cursor. When several tasks swapped at once, they spent 90 % of their
//! time walking the list. Linux 5.3 replaced the list by a red-black tree. [`lookups`] measures both, two
//! more structures, and ours. [`live`] runs a program on a file in 20,000 pieces and on a file in a few.

mod live;
mod lookups;

use crate::Effort;
use crate::measure::{self, Sample};
use crate::report::{Cell, Chart, Report, Table, Target};
use lookups::{LIST, Lookup, OURS, Pattern, Plan, RBTREE, STRUCTURES};
use std::time::Duration;

/// Numbers of extents of the files. In this order: the smallest file, the published file at first, the
/// published experiment, and the 80 GB file that started the change.
const FILES: [usize; 4] = [2, 2_000, 20_000, 84_656];
/// Extents of the file that the targets are about.
const JUDGED: usize = 84_656;
const THREADS: [usize; 3] = [1, 4, 8];
const PATTERNS: [Pattern; 3] = [Pattern::Random, Pattern::Chained, Pattern::Sequential];

/// Runs the experiment.
pub fn run(effort: Effort) -> Result<Report, String> {
    let mut report = Report::new("extents");
    report.published = vec![
        "list with a cursor -> red-black tree (Linux 5.3), 20,000 extents: swap-out 165,191 -> 858,993 KB/s (+420 %) \
         and swap-in 171,798 -> 715,827 KB/s (+317 %) with 4 tasks; +211 % and +237 % with 8; no change with 1"
            .into(),
        "80 GB in 84,656 extents: 30 % of a CPU in mapping, 70 MB/s; with 2,000 extents 400 to 500 MB/s".into(),
        "8 bytes more for each extent in the tree than in the list".into(),
    ];
    let measured: Vec<lookups::Found> = FILES
        .iter()
        .map(|extents| {
            lookups::run(&Plan {
                extents: *extents,
                patterns: &PATTERNS,
                threads: &THREADS,
                rounds: effort.pick(5, 3),
                each: Duration::from_millis(effort.pick(60, 8)),
            })
        })
        .collect();
    show_lookups(&mut report, &measured);
    let judged = FILES.iter().position(|extents| *extents == JUDGED).expect("a file in the table");
    show_throughput(&mut report, &measured[judged]);
    show_memory(&mut report, &measured);
    judge_lookups(&mut report, &measured[judged]);
    // One lookup at a time, as between two requests to a disk.
    let one_by_one = &measured[judged].lookups[1][0];
    let ns: Vec<_> =
        STRUCTURES.into_iter().zip(one_by_one.iter().map(|rounds| Sample::of(&ns(rounds)))).collect();
    match live::run(effort) {
        Ok(found) => show_live(&mut report, &found, &ns),
        Err(why) => report.failed = Some(format!("the live part could not be run: {why}")),
    }
    report.notes.push(
        "the list's nodes lie in one piece and its cursor is one atomic word without a lock: better than Linux had \
         them; the red-black tree is intrusive-collections', its nodes in one piece too, and nobody locks it"
            .into(),
    );
    Ok(report)
}

// ---- lookups -------------------------------------------------------------------------------------------

fn ns(rounds: &[Lookup]) -> Vec<f64> {
    rounds.iter().map(|lookup| lookup.ns).collect()
}

/// Returns the ratio of another structure's time to ours.
fn times_ours(by_structure: &[Vec<Lookup>], other: usize) -> Sample {
    measure::ratio(&ns(&by_structure[other]), &ns(&by_structure[OURS]))
}

fn show_lookups(report: &mut Report, measured: &[lookups::Found]) {
    let mut columns = vec!["extents", "slots", "threads"];
    columns.extend(STRUCTURES);
    columns.extend(["list : ours", "red-black : ours"]);
    let title = "CPU time of a lookup, ns; each block that is found is compared";
    let mut table = Table::new(title, &columns);
    for (extents, found) in FILES.iter().zip(measured) {
        for (pattern, by_threads) in PATTERNS.iter().zip(&found.lookups) {
            for (threads, by_structure) in THREADS.iter().zip(by_threads) {
                let mut row: Vec<Cell> = vec![(*extents).into(), pattern.name().into(), (*threads).into()];
                row.extend(by_structure.iter().map(|rounds| Cell::from(Sample::of(&ns(rounds)))));
                row.push(times_ours(by_structure, LIST).into());
                row.push(times_ours(by_structure, RBTREE).into());
                table.row(row);
            }
        }
    }
    report.tables.push(table);
    for (at, pattern) in PATTERNS.iter().enumerate().take(2) {
        report.charts.push(chart_of(measured, at, *pattern));
    }
}

/// Adds the throughput of several threads together. Other programs on the CPUs count here.
fn show_throughput(report: &mut Report, found: &lookups::Found) {
    let mut columns = vec!["threads"];
    columns.extend(STRUCTURES);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let title = format!("million lookups a second, {JUDGED} extents, random slots, {cpus} CPUs");
    let mut table = Table::new(title, &columns);
    for (threads, by_structure) in THREADS.iter().zip(&found.lookups[0]) {
        let mut row: Vec<Cell> = vec![(*threads).into()];
        let millions = |rounds: &Vec<Lookup>| -> Vec<f64> {
            rounds.iter().map(|lookup| lookup.per_second / 1e6).collect()
        };
        row.extend(by_structure.iter().map(|rounds| Cell::from(Sample::of(&millions(rounds)))));
        table.row(row);
    }
    report.tables.push(table);
}

/// Returns a chart of all structures except the list. Beside the list no other bar could be seen.
fn chart_of(measured: &[lookups::Found], at: usize, pattern: Pattern) -> Chart {
    let ns = |found: &lookups::Found, who: usize| Sample::of(&ns(&found.lookups[at][1][who])).median;
    let series = (RBTREE..STRUCTURES.len())
        .map(|who| (STRUCTURES[who].to_owned(), measured.iter().map(|found| ns(found, who)).collect()));
    Chart {
        title: format!("one lookup, {} slots, {} threads, by number of extents", pattern.name(), THREADS[1]),
        unit: "ns of CPU time".into(),
        groups: FILES.map(|extents| extents.to_string()).into(),
        series: series.collect(),
    }
}

fn show_memory(report: &mut Report, measured: &[lookups::Found]) {
    let mut columns = vec!["extents"];
    columns.extend(STRUCTURES);
    let mut table = Table::new("bytes for each extent, as the heap gave them", &columns);
    // The file of two extents is left out, because its figure is only the heap's smallest piece.
    for (extents, found) in FILES.iter().zip(measured).skip(1) {
        let mut row: Vec<Cell> = vec![(*extents).into()];
        row.extend(found.bytes_each.iter().map(|bytes| Cell::from(*bytes)));
        table.row(row);
    }
    report.tables.push(table);
}

fn judge_lookups(report: &mut Report, found: &lookups::Found) {
    for (pattern, by_threads) in PATTERNS.iter().zip(&found.lookups).take(2) {
        for (threads, by_structure) in THREADS.iter().zip(by_threads) {
            let what = format!(
                "{JUDGED} extents, slots {}, {threads} threads: red-black tree : ours",
                pattern.name()
            );
            report.targets.push(Target::at_least(what, 3.0, times_ours(by_structure, RBTREE).median));
        }
    }
    let ours = |at: usize| ns(&found.lookups[0][at][OURS]);
    for (at, threads) in THREADS.iter().enumerate().skip(1) {
        let flat = measure::ratio(&ours(0), &ours(at)).median;
        let what =
            format!("{JUDGED} extents, slots random: CPU time of a lookup, 1 thread : {threads} threads");
        report.targets.push(Target::at_least(what, 0.9, flat));
    }
    let bytes = found.bytes_each[OURS];
    report.targets.push(Target::at_most(format!("{JUDGED} extents: bytes for each"), 16.0, bytes));
}

// ---- live ----------------------------------------------------------------------------------------------

fn show_live(report: &mut Report, found: &live::Found, ns: &[(&str, Sample)]) {
    let columns = ["swap file", "extents", "span, MB", "out, MB/s", "in, MB/s", "KiB in a write"];
    let title = format!(
        "a program of {} MB, {} threads, no compression, on a swap file of {} MB; and the disk alone",
        found.program / 1_000_000,
        live::THREADS,
        found.bytes / 1_000_000
    );
    let mut table = Table::new(title, &columns);
    let program = found.runs.each_ref().map(|runs| Rates {
        out: runs.iter().map(|run| run.out_mb_s).collect(),
        back: runs.iter().map(|run| run.in_mb_s).collect(),
        kib: runs.iter().map(|run| run.write_kib).collect(),
    });
    let disk = found.disks.each_ref().map(|disks| Rates {
        out: disks.iter().map(|disk| disk.out_mb_s).collect(),
        back: disks.iter().map(|disk| disk.in_mb_s).collect(),
        kib: vec![live::REQUEST_BYTES as f64 / 1024.0],
    });
    for (who, rates) in [("the program", &program), ("the disk alone", &disk)] {
        for (area, (name, rates)) in found.areas.iter().zip(["in pieces", "in one piece"].iter().zip(rates)) {
            table.row(vec![
                format!("{who}, file {name}").into(),
                (area.extents as usize).into(),
                (area.span_bytes as f64 / 1e6).into(),
                Sample::of(&rates.out).into(),
                Sample::of(&rates.back).into(),
                Sample::of(&rates.kib).into(),
            ]);
        }
        let (out, back) = ratios(rates);
        let ratio = format!("{who}, ratio");
        table.row(vec![ratio.into(), Cell::Nothing, Cell::Nothing, out.into(), back.into(), Cell::Nothing]);
    }
    report.tables.push(table);
    let (out, back) = ratios(&program);
    for (name, ratio) in [("swap-out", out), ("swap-in", back)] {
        let what = format!("live, {name}: file in {} pieces against one piece", found.areas[0].extents);
        report.targets.push(Target::at_least(what, 0.95, ratio.median));
    }
    report.tables.push(share_of_mapping(&found.runs[0], ns));
    report.notes.push(
        "live, Farpage reads and writes slots through the file system, which maps them itself; the share of mapping is \
         what one lookup for each page would add, at the time that it takes at 84,656 extents, random, one by one"
            .into(),
    );
    report.notes.push(
        "live, the program's requests end where pieces do (one lookup for each run); those of the disk alone are all of \
         one size, and who crosses from one piece to the next is two for the disk"
            .into(),
    );
}

/// MB/s out and in, round by round, and KiB of a write.
struct Rates {
    out: Vec<f64>,
    back: Vec<f64>,
    kib: Vec<f64>,
}

/// Returns the ratios of the file in pieces to the file in one piece, out and in.
fn ratios(rates: &[Rates; 2]) -> (Sample, Sample) {
    let [pieces, whole] = rates;
    (measure::ratio(&pieces.out, &whole.out), measure::ratio(&pieces.back, &whole.back))
}

/// Returns the share of the runs on the file in pieces that lookups would take, if each page written or read
/// needed one.
fn share_of_mapping(runs: &[live::Run], ns: &[(&str, Sample)]) -> Table {
    let columns = ["structure", "ns each", "lookups", "seconds", "of the run, %"];
    let mut table = Table::new("share of time in mapping, live, with a lookup for each page", &columns);
    let pages = Sample::of(&runs.iter().map(|run| run.pages).collect::<Vec<_>>()).median;
    for (name, ns) in ns {
        let share = |run: &live::Run| 100.0 * run.pages * ns.median / 1e9 / run.seconds;
        let shares = Sample::of(&runs.iter().map(share).collect::<Vec<_>>());
        let seconds = pages * ns.median / 1e9;
        table.row(vec![(*name).into(), (*ns).into(), pages.into(), seconds.into(), shares.into()]);
    }
    table
}
