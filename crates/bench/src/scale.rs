//! `farpage bench scale`: the cost of a fault with more threads, and with larger memory.
//!
//! Pages are touched at random, with 20 % writes, in four times as much memory as the budget. The pages
//! compress, so no device is involved. The part *threads* runs all threads in one space. The part *spaces*
//! spreads the same number of pages further and further apart, in a mapping of up to a terabyte. Each run of
//! *spaces* is repeated without a budget, because there, too, a touch costs more when no two pages share a
//! page table of the kernel. Both runs are also repeated without touches: they only fill the memory and end.
//! The cost of filling is reported separately, and isn't part of a fault's cost in a space.

use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::{Sample, interleaved_until_failure, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Highest ratio of a fault's cost in a larger space to its cost in the smallest one.
const COST_MAX: f64 = 1.1;
const METADATA_MAX: f64 = 16.0;

/// One row of a table.
struct Case {
    title: String,
    threads: usize,
    /// Pages from one touched page to the next.
    stride: u64,
}

/// The way in which a load runs.
#[derive(Clone, Copy)]
enum Place {
    /// Without a budget.
    Alone,
    /// Under `farpage run` with a budget.
    Under,
}

/// The sizes and times that all cases share.
struct Size {
    ram: u64,
    bytes: u64,
    seconds: f64,
    rounds: usize,
}

impl Size {
    fn run(&self, case: &Case, place: Place, seconds: f64) -> Result<Outcome, String> {
        let (ram, bytes, seconds) = (self.ram.to_string(), self.bytes.to_string(), seconds.to_string());
        let (threads, stride) = (case.threads.to_string(), case.stride.to_string());
        let load = ["random-pool", "--write-percent", "20", "--bytes", &bytes, "--seconds", &seconds];
        let load = [&load[..], &["--threads", &threads, "--stride", &stride]].concat();
        match place {
            Place::Alone => live::alone(&load),
            Place::Under => live::under(&["--no-disk", "--faults", "signal", "--ram", &ram], &load),
        }
    }

    /// Runs the cases in turns. Returns the outcomes of each case.
    fn measure(&self, cases: &[Case], place: Place, seconds: f64) -> Result<Vec<Vec<Outcome>>, String> {
        let one = |at: usize| self.run(&cases[at], place, seconds);
        // A cost is made of four measurements of the same round, so all of them need all rounds.
        match interleaved_until_failure(self.rounds, cases.len(), one)? {
            (outcomes, None) => Ok(outcomes),
            (_, Some(why)) => Err(why),
        }
    }
}

/// Runs both parts.
pub fn run(effort: Effort) -> Result<Report, String> {
    let size = Size {
        ram: effort.pick(32, 16) * MIB,
        bytes: effort.pick(128, 64) * MIB,
        seconds: effort.pick(3.0, 0.2),
        rounds: effort.pick(5, 1),
    };
    let mut report = Report::new("scale");
    report.published.push(
        "Linux's page tables: 8 bytes for each page, 4 KiB for each 2 MiB of which a page was ever touched"
            .to_owned(),
    );
    threads(&size, effort, &mut report)?;
    report.failed = spaces(&size, effort, &mut report).err();
    report.notes = vec![
        format!(
            "farpage run --no-disk --faults signal --ram {}M -- farpage load random-pool --bytes {}M --seconds {} \
             --write-percent 20 --threads N --stride N",
            size.ram / MIB,
            size.bytes / MIB,
            size.seconds
        ),
        "a fault's cost in a space: processor time of all threads, evictions included, less what the same touches take without a \
         budget, by faults; of each what the same run has without touches (`--seconds 0`) is taken off"
            .to_owned(),
        "a fault's cost by threads: all processor time by all faults".to_owned(),
        "metadata: anonymous memory of the process that is neither the program's nor the pool's, by all pages of the \
         mapping, touched or not; frames (up to a 16th of the budget, most of them without memory) and what is needed once are in it"
            .to_owned(),
    ];
    Ok(report)
}

fn faults(outcome: &Outcome) -> f64 {
    ["fault_first", "fault_parked", "fault_pool", "fault_write"]
        .iter()
        .map(|name| outcome.counter(name))
        .sum()
}

fn of(outcomes: &[Outcome], what: impl Fn(&Outcome) -> f64) -> Vec<f64> {
    outcomes.iter().map(what).collect()
}

fn rates(outcomes: &[Outcome]) -> Vec<f64> {
    of(outcomes, |outcome| outcome.number("touches_per_second"))
}

fn threads(size: &Size, effort: Effort, report: &mut Report) -> Result<(), String> {
    let counts = effort.pick(&[1_usize, 2, 4, 8, 16][..], &[1, 4]);
    let case = |threads: &usize| Case { title: format!("{threads}"), threads: *threads, stride: 1 };
    let cases: Vec<Case> = counts.iter().map(case).collect();
    let measured = size.measure(&cases, Place::Under, size.seconds)?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let columns = ["threads", "touches/s", "ratio to one", "faults/s", "CPU us by fault"];
    let mut table = Table::new(format!("threads, {cpus} CPUs"), &columns);
    for (case, outcomes) in cases.iter().zip(&measured) {
        let wall = |outcome: &Outcome| outcome.wall.as_secs_f64();
        table.row(vec![
            case.title.clone().into(),
            Sample::of(&rates(outcomes)).into(),
            ratio(&rates(outcomes), &rates(&measured[0])).into(),
            Sample::of(&of(outcomes, |outcome| faults(outcome) / wall(outcome))).into(),
            Sample::of(&of(outcomes, |outcome| outcome.cpu_seconds / faults(outcome) * 1e6)).into(),
        ]);
    }
    let last = ratio(&rates(&measured[cases.len() - 1]), &rates(&measured[0])).median;
    report.targets.push(Target::at_least(
        format!("{} threads against one, touches", counts[counts.len() - 1]),
        1.0,
        last,
    ));
    report.tables.push(table);
    report.charts.push(Chart {
        title: format!("Random touches by threads, {cpus} CPUs"),
        unit: "touches/s".to_owned(),
        groups: counts.iter().map(|count| format!("{count} threads")).collect(),
        series: vec![(
            "farpage".to_owned(),
            measured.iter().map(|outcomes| Sample::of(&rates(outcomes)).median).collect(),
        )],
    });
    Ok(())
}

fn spaces(size: &Size, effort: Effort, report: &mut Report) -> Result<(), String> {
    let spans = effort.pick(&[1_u64, 16, 128, 1024][..], &[1, 16]);
    let case = |gib: &u64| Case { title: format!("{gib} GiB"), threads: 1, stride: gib * GIB / size.bytes };
    let cases: Vec<Case> = spans.iter().map(case).collect();
    let measure = |place, seconds| size.measure(&cases, place, seconds);
    let (measured, filled) = (measure(Place::Under, size.seconds)?, measure(Place::Under, 0.0)?);
    let (unlimited, filled_unlimited) = (measure(Place::Alone, size.seconds)?, measure(Place::Alone, 0.0)?);
    let costs = |at: usize| -> Vec<f64> {
        let cost = |round: usize| {
            let (ours, filled) = (&measured[at][round], &filled[at][round]);
            let (alone, filled_alone) = (&unlimited[at][round], &filled_unlimited[at][round]);
            let more =
                |of: &dyn Fn(&Outcome) -> f64, with: &Outcome, without: &Outcome| of(with) - of(without);
            let cpu_seconds = |outcome: &Outcome| outcome.cpu_seconds;
            let touches = |outcome: &Outcome| outcome.number("touches");
            let touch = more(&cpu_seconds, alone, filled_alone) / more(&touches, alone, filled_alone);
            let all = more(&cpu_seconds, ours, filled);
            (all - touch * more(&touches, ours, filled)) / more(&faults, ours, filled) * 1e6
        };
        (0..size.rounds).map(cost).collect()
    };
    let metadata = |at: usize, outcome: &Outcome| {
        let pages = (spans[at] * GIB / 4096) as f64;
        let pool = outcome.stats["gauges"]["pool_total_size"].as_f64().unwrap_or(f64::NAN);
        (outcome.number("anonymous_bytes") - outcome.number("resident_bytes") - pool) / pages
    };
    let columns = [
        "space",
        "touches/s",
        "unlimited touches/s",
        "CPU us by fault",
        "ratio to 1 GiB",
        "metadata, bytes",
        "CPU s to fill and end",
        "unlimited",
    ];
    let cpu_seconds = |outcomes: &[Outcome]| Sample::of(&of(outcomes, |outcome| outcome.cpu_seconds)).median;
    let mut table = Table::new(format!("{} MiB of pages, evenly over a space", size.bytes / MIB), &columns);
    for (at, case) in cases.iter().enumerate() {
        let by_page = Sample::of(&of(&measured[at], |outcome| metadata(at, outcome))).median;
        table.row(vec![
            case.title.clone().into(),
            Sample::of(&rates(&measured[at])).into(),
            Sample::of(&rates(&unlimited[at])).median.into(),
            Sample::of(&costs(at)).into(),
            if at == 0 { Cell::Nothing } else { ratio(&costs(at), &costs(0)).into() },
            by_page.into(),
            cpu_seconds(&filled[at]).into(),
            cpu_seconds(&filled_unlimited[at]).into(),
        ]);
        let title = format!("{}: metadata by page of it, bytes", case.title);
        report.targets.push(Target::at_most(title, METADATA_MAX, by_page));
        if at > 0 {
            let found = ratio(&costs(at), &costs(0)).median;
            let title = format!("{}: cost of a fault, ratio to 1 GiB", case.title);
            report.targets.push(Target::at_most(title, COST_MAX, found));
        }
    }
    report.tables.push(table);
    Ok(())
}
