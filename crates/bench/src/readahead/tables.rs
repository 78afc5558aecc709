//! Makes tables, targets and charts from outcomes.

use super::cases::{Kind, walkers};
use super::{BY_ADDRESS, BY_SLOT, Measured, POLICIES, STREAMS};
use crate::Effort;
use crate::live::Outcome;
use crate::measure::{Sample, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};

/// The processes whose counters are meant.
#[derive(Clone, Copy)]
enum Counted {
    /// All processes.
    All,
    /// The process that ran this part.
    Part(&'static str),
}

impl Counted {
    fn of(self, outcome: &Outcome, name: &str) -> f64 {
        match self {
            Counted::All => outcome.counter(name),
            Counted::Part(part) => outcome.counter_of(part, name),
        }
    }

    /// Returns the share of the pages read ahead that were touched, in percent.
    fn used(self, outcome: &Outcome) -> f64 {
        100.0 * self.of(outcome, "swap_ra_hit") / self.of(outcome, "swap_ra")
    }

    /// Returns the share of the pages from an area that no thread had to ask for, in percent.
    fn covered(self, outcome: &Outcome) -> f64 {
        100.0 - 100.0 * self.of(outcome, "fault_area") / self.of(outcome, "pswpin")
    }
}

impl Measured {
    /// Returns one value for each round.
    fn each(&self, policy: usize, value: impl Fn(&Outcome) -> f64) -> Vec<f64> {
        self.outcomes[policy].iter().map(value).collect()
    }

    fn sample(&self, policy: usize, value: impl Fn(&Outcome) -> f64) -> Sample {
        Sample::of(&self.each(policy, value))
    }

    fn to_by_slot(&self, policy: usize, value: impl Fn(&Outcome) -> f64) -> Sample {
        ratio(&self.each(policy, &value), &self.each(BY_SLOT, &value))
    }

    fn rows(&self) -> Vec<(&'static str, Counted)> {
        match self.case.kind {
            Kind::Apart => self.case.parts().iter().map(|part| (*part, Counted::Part(part))).collect(),
            Kind::Mixed | Kind::MixedOther => vec![("both", Counted::All)],
            Kind::Interleaved | Kind::Walk | Kind::Lu => vec![("all", Counted::All)],
        }
    }
}

/// Adds the tables of one case: the program's measurements, and what was read.
pub fn add(report: &mut Report, measured: &Measured) {
    if measured.case.kind == Kind::Lu {
        report.tables.push(elapsed(measured));
    } else {
        report.tables.push(speed(measured));
    }
    report.tables.push(reads(measured));
}

fn speed(measured: &Measured) -> Table {
    let columns = [
        "part",
        "policy",
        "pages/s",
        "to by-slot",
        "mean us",
        "to by-slot (mean)",
        "p50 us",
        "p95 us",
        "p99 us",
        "max us",
    ];
    let mut table = Table::new(measured.case.title.clone(), &columns);
    for part in measured.case.parts() {
        for (policy, name) in POLICIES.iter().enumerate() {
            let of = |number: &'static str| move |outcome: &Outcome| outcome.part(part, number);
            let median = |number| Cell::from(measured.sample(policy, of(number)).median);
            table.row(vec![
                (*part).into(),
                (*name).into(),
                measured.sample(policy, of("pages_per_second")).into(),
                measured.to_by_slot(policy, of("pages_per_second")).into(),
                measured.sample(policy, of("mean_us")).into(),
                measured.to_by_slot(policy, of("mean_us")).into(),
                median("p50_us"),
                median("p95_us"),
                median("p99_us"),
                median("max_us"),
            ]);
        }
    }
    table
}

fn elapsed(measured: &Measured) -> Table {
    let mut table = Table::new(measured.case.title.clone(), &["policy", "seconds", "to by-slot"]);
    for (policy, name) in POLICIES.iter().enumerate() {
        let seconds = |outcome: &Outcome| outcome.number("seconds");
        table.row(vec![
            (*name).into(),
            measured.sample(policy, seconds).into(),
            measured.to_by_slot(policy, seconds).into(),
        ]);
    }
    table
}

fn reads(measured: &Measured) -> Table {
    let columns = [
        "part",
        "policy",
        "swap_ra",
        "swap_ra_hit",
        "used %",
        "covered %",
        "pswpin",
        "pswpin/touch",
        "waited for ra",
        "at once %",
    ];
    let mut table = Table::new(format!("{}: what was read", measured.case.name), &columns);
    for (part, counted) in measured.rows() {
        for (policy, name) in POLICIES.iter().enumerate() {
            let count = |counter| Cell::from(measured.sample(policy, |one| counted.of(one, counter)).median);
            table.row(vec![
                part.into(),
                (*name).into(),
                count("swap_ra"),
                count("swap_ra_hit"),
                percent(measured.sample(policy, |one| counted.used(one))),
                percent(measured.sample(policy, |one| counted.covered(one))),
                count("pswpin"),
                measured
                    .sample(policy, |one| counted.of(one, "pswpin") / touches(measured, one, part))
                    .median
                    .into(),
                count("swap_ra_joined"),
                if part == "random" { Cell::Nothing } else { percent(measured.sample(policy, at_once)) },
            ]);
        }
    }
    table
}

/// Returns the touches that the counters of a row are about.
fn touches(measured: &Measured, outcome: &Outcome, part: &str) -> f64 {
    match measured.case.kind {
        Kind::Apart => outcome.part(part, "touches"),
        _ => measured.case.parts().iter().map(|part| outcome.part(part, "touches")).sum(),
    }
}

/// Returns the share of the sequential part's touches of evicted pages that were too short for a device, in
/// percent.
fn at_once(outcome: &Outcome) -> f64 {
    100.0 * outcome.part("sequential", "out_short") / outcome.part("sequential", "out")
}

/// Formats with two decimals, because the published rate is 99.98.
fn percent(sample: Sample) -> Cell {
    if !sample.median.is_finite() {
        return Cell::Nothing;
    }
    format!("{:.2} [{:.2}..{:.2}]", sample.median, sample.low, sample.high).into()
}

/// Adds the targets. Hit rates are stated as the part missing to 100 %, in ten-thousandths.
pub fn targets(report: &mut Report, all: &[Measured]) {
    let missing = |percent: f64| (100.0 - percent) * 100.0;
    let mut targets = Vec::new();
    for measured in all {
        let part = |number: &'static str| move |outcome: &Outcome| outcome.part("sequential", number);
        let (speed, latency) = (part("pages_per_second"), part("mean_us"));
        let to_by_slot = |policy, value: &dyn Fn(&Outcome) -> f64| measured.to_by_slot(policy, value).median;
        let rate = |policy, value: &dyn Fn(&Outcome) -> f64| measured.sample(policy, value).median;
        let used = |one: &Outcome| Counted::All.used(one);
        match measured.case.kind {
            Kind::Mixed => targets.extend([
                Target::at_least(
                    "mixed: by-address, pages/s to by-slot",
                    1.0,
                    to_by_slot(BY_ADDRESS, &speed),
                ),
                Target::at_most(
                    "mixed: by-address, mean latency to by-slot",
                    1.0,
                    to_by_slot(BY_ADDRESS, &latency),
                ),
                Target::at_least(
                    "mixed: by-address, used % less by-slot's",
                    0.0,
                    rate(BY_ADDRESS, &used) - rate(BY_SLOT, &used),
                ),
                Target::at_least("mixed: streams, pages/s to by-slot", 1.199, to_by_slot(STREAMS, &speed)),
                Target::at_most(
                    "mixed: streams, mean latency to by-slot",
                    0.629,
                    to_by_slot(STREAMS, &latency),
                ),
            ]),
            Kind::Apart => {
                let used = rate(STREAMS, &|one| Counted::Part("sequential").used(one));
                let what = "sequential part: streams, of 10,000 pages read ahead not used";
                targets.push(Target::at_most(what, 2.0, missing(used)));
            }
            Kind::Interleaved => {
                let what = "16 streams: streams, of 10,000 pages read ahead not used";
                targets.push(Target::at_most(what, 100.0, missing(rate(STREAMS, &used))));
            }
            Kind::Lu => {
                let seconds = |one: &Outcome| one.number("seconds");
                targets.push(Target::at_most(
                    "LU: streams, time to by-slot",
                    0.84,
                    to_by_slot(STREAMS, &seconds),
                ));
            }
            Kind::MixedOther | Kind::Walk => {}
        }
    }
    report.targets = targets;
}

/// Adds the charts: every case's speed as a ratio to by-slot, and the latencies of the published case.
pub fn charts(report: &mut Report, all: &[Measured]) {
    let speed = |measured: &Measured, policy: usize| match measured.case.kind {
        Kind::Lu => 1.0 / measured.to_by_slot(policy, |one| one.number("seconds")).median,
        _ => measured.to_by_slot(policy, |one| one.part("sequential", "pages_per_second")).median,
    };
    let series = |value: &dyn Fn(usize) -> Vec<f64>| {
        POLICIES.iter().enumerate().map(|(policy, name)| ((*name).to_owned(), value(policy))).collect()
    };
    report.charts.push(Chart {
        title: "Speed of the sequential part, to by-slot".to_owned(),
        unit: "ratio".to_owned(),
        groups: all.iter().map(|measured| measured.case.name.to_owned()).collect(),
        series: series(&|policy| all.iter().map(|measured| speed(measured, policy)).collect()),
    });
    let Some(mixed) = all.iter().find(|measured| measured.case.kind == Kind::Mixed) else { return };
    let numbers = [("mean", "mean_us"), ("p50", "p50_us"), ("p95", "p95_us"), ("p99", "p99_us")];
    let latency =
        |policy, number| mixed.sample(policy, |one: &Outcome| one.part("sequential", number)).median;
    report.charts.push(Chart {
        title: "Latency of the sequential part's touches, mixed".to_owned(),
        unit: "us".to_owned(),
        groups: numbers.iter().map(|(name, _)| (*name).to_owned()).collect(),
        series: series(&|policy| numbers.iter().map(|(_, number)| latency(policy, number)).collect()),
    });
}

/// Returns the notes that a reader needs.
pub fn notes(effort: Effort) -> Vec<String> {
    let (sequential, random) = walkers();
    let mut notes = vec![
        format!("4 sequential and 8 random workers were published; on this machine it is {sequential} and {random}"),
        "a touch is the first access to a page, all touches count, also those that met no fault; then the whole page \
         is compared"
            .to_owned(),
        "used: swap_ra_hit by swap_ra, the hit rate as published; what a run's last windows hold is never used. covered: of the pages that came from an area, those for which no \
         thread had to begin the read; at most 87.5 % with windows of 8 that begin with a miss. at once: of the \
         sequential part's touches of pages that were out 8 MiB before, those shorter than 40 us"
            .to_owned(),
        "waited for ra (swap_ra_joined): touches of pages that readahead was just reading; they count as covered"
            .to_owned(),
        "by-slot's state is one for all processes, as in the kernel; pages in the pool have no slot, so it does \
         nothing for them"
            .to_owned(),
    ];
    if effort == Effort::Quick {
        notes.push("one round, small: run it without --quick to judge".to_owned());
    }
    notes
}
