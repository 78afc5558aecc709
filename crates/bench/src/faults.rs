//! `farpage bench faults`: the cost of a fault that arrives as a message to a thread of the engine, and as a
//! signal in the touching thread.
//!
//! A program touches random pages, with 20 % writes, in four times as much memory as its budget. The pages
//! compress, so evicted pages are in the pool. No device is involved, and only the path of a fault is
//! measured. The program's threads compare what they read.
//!
//! A second table shows the cost of interrupting another CPU (`interrupts.rs`), which decides who takes pages
//! out in signal mode.

use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::{Sample, interleaved, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};

/// The modes, as `--faults` names them.
const MODES: [&str; 2] = ["thread", "signal"];
const THREADS: [&str; 3] = ["1", "2", "4"];
/// The ratio that signal mode is to reach with one thread.
const WANTED: f64 = 2.0;

/// Runs both modes in turns, for each number of threads.
pub fn run(effort: Effort) -> Result<Report, String> {
    let (ram, bytes, seconds, rounds) = effort.pick(("64M", "256M", "4", 5), ("32M", "64M", "0.2", 1));
    let mut report = Report::new("faults");
    report.notes.push(format!(
        "farpage run --no-disk --ram {ram} --faults MODE -- farpage load random-pool --bytes {bytes} --seconds {seconds} \
         --write-percent 20 --threads N"
    ));
    report.published.push(
        "a prototype on a machine like this, each page by itself: 4.9 us for a fault as SIGBUS served by the thread itself, \
         75 us as a message to a thread on another CPU, 3.9 us to one on the same CPU"
            .to_owned(),
    );
    let mut series = MODES.map(|mode| (mode.to_owned(), Vec::new()));
    let mut table = Table::new(
        "random touches; what is out is in the pool",
        &["threads", "mode", "touches/s", "ratio to thread mode", "faults/s", "of these first touches, %"],
    );
    for threads in THREADS {
        let one = |mode: usize| {
            let options = ["--no-disk", "--ram", ram, "--faults", MODES[mode]];
            let load = ["random-pool", "--bytes", bytes, "--seconds", seconds, "--write-percent", "20"];
            live::under(&options, &[&load[..], &["--threads", threads]].concat())
        };
        let outcomes: Result<Vec<Vec<Outcome>>, String> =
            interleaved(rounds, MODES.len(), one).into_iter().map(|all| all.into_iter().collect()).collect();
        let outcomes = outcomes?;
        let rates = |mode: usize| -> Vec<f64> {
            outcomes[mode].iter().map(|outcome| outcome.number("touches_per_second")).collect()
        };
        for (mode, name) in MODES.iter().enumerate() {
            let first = sum(&outcomes[mode], &["fault_first"]);
            let all = sum(&outcomes[mode], &["fault_first", "fault_parked", "fault_pool", "fault_write"]);
            let wall: f64 = outcomes[mode].iter().map(|outcome| outcome.wall.as_secs_f64()).sum();
            series[mode].1.push(Sample::of(&rates(mode)).median);
            table.row(vec![
                threads.into(),
                (*name).into(),
                Sample::of(&rates(mode)).into(),
                if mode == 0 { Cell::Nothing } else { ratio(&rates(mode), &rates(0)).into() },
                (all / wall).into(),
                (100.0 * first / all).into(),
            ]);
        }
        if threads == "1" {
            report.targets.push(Target::at_least(
                "random touches served from the pool, one thread, signal to thread mode",
                WANTED,
                ratio(&rates(1), &rates(0)).median,
            ));
        }
    }
    report.tables.push(table);
    match crate::interrupts::table(rounds, effort.pick(0.5, 0.02))? {
        Some(table) => report.tables.push(table),
        None => report.notes.push("one CPU: there is no other to interrupt".to_owned()),
    }
    report.charts.push(Chart {
        title: "Random touches, served from the pool".to_owned(),
        unit: "touches/s".to_owned(),
        groups: THREADS.iter().map(|threads| format!("{threads} threads")).collect(),
        series: series.into(),
    });
    Ok(report)
}

fn sum(outcomes: &[Outcome], counters: &[&str]) -> f64 {
    outcomes.iter().flat_map(|outcome| counters.iter().map(|name| outcome.counter(name))).sum()
}
