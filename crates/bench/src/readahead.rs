//! `farpage bench readahead`: no readahead, readahead by slot, by address (the change), and by streams (ours), under
//! the same loads with the same budget, live.
//!
//! Each case is a load of [`crate::load::ahead`] or [`crate::load::lu`], which knows nothing of Farpage; it is run in
//! turns under the four policies, each run a program of its own. Touches are timed by the load; what was read is
//! counted by Farpage.
//!
//! What a hit rate is:
//! - *used* is what the kernel's counters give and what was published: `swap_ra_hit` by `swap_ra`, of what was read
//!   ahead that which was touched later. A policy that reads little ahead can have 100 %.
//! - *covered* is the harsher one: of the pages that came from an area, those for which no thread had to begin the
//!   read itself: 1 - `fault_area` by `pswpin`. By-slot and by-address begin each window with such a read, so 8 pages
//!   of order 3 cover at most 87.5 %.
//!
//! Both come from counters of the process that walks, so they are exact, and mean the same under every policy. Where
//! the random part runs in the same process they count it too; so there the load's own view stands beside them: *at
//! once*, of the touches of pages that were not in memory 8 MiB before the walk came to them, those that took less than
//! a device needs. A touch that waited for a read that was on its way is covered, but not at once.

mod cases;
mod tables;

use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::interleaved;
use crate::report::Report;
use cases::{Case, cases};

/// The policies, as `--readahead` calls them.
const POLICIES: [&str; 4] = ["off", "by-slot", "by-address", "streams"];
/// What the others are compared with: what the kernel did before the change.
const BY_SLOT: usize = 1;
/// The change.
const BY_ADDRESS: usize = 2;
/// Ours.
const STREAMS: usize = 3;

/// A case with its outcomes: by policy, then by round.
struct Measured {
    case: Case,
    outcomes: Vec<Vec<Outcome>>,
}

/// Runs every case.
pub fn run(effort: Effort) -> Result<Report, String> {
    let measured: Result<Vec<Measured>, String> = cases(effort).into_iter().map(measure).collect();
    let measured = measured?;
    let mut report = Report::new("readahead");
    report.published = [
        "sequential and random workers: throughput +19.9 %, mean latency -37.1 % (97.14 to 61.06 us), used 52.69 to \
         99.98 %; 95th percentile slightly worse (346 to 369 us); by address against by slot, v4.14",
        "Linpack: elapsed -16.2 %, used 86.21 to 98.82 %",
    ]
    .map(str::to_owned)
    .to_vec();
    for one in &measured {
        tables::add(&mut report, one);
    }
    tables::targets(&mut report, &measured);
    tables::charts(&mut report, &measured);
    report.notes = tables::notes(effort);
    Ok(report)
}

fn measure(case: Case) -> Result<Measured, String> {
    let one = |policy: usize| {
        let (options, load) = (case.options(POLICIES[policy]), case.load());
        live::under(&words(&options), &words(&load))
    };
    let outcomes = interleaved(case.rounds, POLICIES.len(), one);
    let outcomes: Result<Vec<Vec<Outcome>>, String> =
        outcomes.into_iter().map(|rounds| rounds.into_iter().collect()).collect();
    let outcomes = outcomes.map_err(|why| format!("{}: {why}", case.title))?;
    case.compare(&outcomes)?;
    Ok(Measured { case, outcomes })
}

fn words(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}
