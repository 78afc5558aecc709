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
use crate::measure::{Sample, interleaved_until_failure, ratio};
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
        let (outcomes, failed) = match interleaved_until_failure(rounds, MODES.len(), one) {
            Ok(found) => found,
            Err(why) if table.rows.is_empty() => return Err(why),
            Err(why) => {
                report.failed = Some(why);
                break;
            }
        };
        add_rows(&mut table, threads, &outcomes);
        for (mode, series) in series.iter_mut().enumerate() {
            series.1.push(Sample::of(&rates(&outcomes[mode])).median);
        }
        if threads == "1" {
            report.targets.push(Target::at_least(
                "random touches served from the pool, one thread, signal to thread mode",
                WANTED,
                ratio(&rates(&outcomes[1]), &rates(&outcomes[0])).median,
            ));
        }
        report.failed = failed;
        if report.failed.is_some() {
            break;
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
        groups: THREADS[..series[0].1.len()].iter().map(|threads| format!("{threads} threads")).collect(),
        series: series.into(),
    });
    Ok(report)
}

fn rates(outcomes: &[Outcome]) -> Vec<f64> {
    outcomes.iter().map(|outcome| outcome.number("touches_per_second")).collect()
}

/// Adds a row for each mode. `outcomes` has the rounds of each.
fn add_rows(table: &mut Table, threads: &str, outcomes: &[Vec<Outcome>]) {
    let by_thread_mode = rates(&outcomes[0]);
    for (mode, (name, outcomes)) in MODES.iter().zip(outcomes).enumerate() {
        let first = sum(outcomes, &["fault_first"]);
        let all = sum(outcomes, &["fault_first", "fault_parked", "fault_pool", "fault_write"]);
        let wall: f64 = outcomes.iter().map(|outcome| outcome.wall.as_secs_f64()).sum();
        table.row(vec![
            threads.into(),
            (*name).into(),
            Sample::of(&rates(outcomes)).into(),
            if mode == 0 { Cell::Nothing } else { ratio(&rates(outcomes), &by_thread_mode).into() },
            (all / wall).into(),
            (100.0 * first / all).into(),
        ]);
    }
}

fn sum(outcomes: &[Outcome], counters: &[&str]) -> f64 {
    outcomes.iter().flat_map(|outcome| counters.iter().map(|name| outcome.counter(name))).sum()
}
