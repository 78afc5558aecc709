//! `farpage bench readahead`: no readahead, readahead by slot, by address (the Linux change), and by streams
//! (ours). All run live, under the same loads with the same budget.
//!
//! Each case is a load of [`crate::load::ahead`] or [`crate::load::lu`], which knows nothing of Farpage. The
//! four policies run in turns, and each run is a program of its own. The load times its touches; Farpage
//! counts its reads.
//!
//! Two hit rates are reported:
//! - *used* is the published rate, from the kernel's counters: `swap_ra_hit` divided by `swap_ra`. The rate
//!   is the share of pages read ahead that were touched later. A policy can reach 100 % by reading little
//!   ahead.
//! - *covered* is the stricter rate: 1 - `fault_area` / `pswpin`. The rate is the share of pages from an area
//!   for which no thread had to begin the read. By-slot and by-address begin each window with a read of the
//!   faulting thread, so windows of 8 pages (order 3) cover at most 87.5 %.
//!
//! Both rates come from counters of the walking process, so they are exact and mean the same under every
//! policy. If the random part runs in the same process, its pages are counted too. For this case the load's
//! own rate stands beside them. *At once* counts only touches of pages that were out of memory 8 MiB before
//! the walk came to them. The rate is the share of these touches that took less time than a device needs. A
//! touch that waited for a read in flight is covered, but not at once.

mod cases;
mod tables;

use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::interleaved_until_failure;
use crate::report::Report;
use cases::{Case, cases};

/// The policies, as `--readahead` names them.
const POLICIES: [&str; 4] = ["off", "by-slot", "by-address", "streams"];
/// The baseline: the kernel's readahead before the change.
const BY_SLOT: usize = 1;
/// The kernel's readahead after the change.
const BY_ADDRESS: usize = 2;
/// Farpage's readahead.
const STREAMS: usize = 3;

/// A case with its outcomes, by policy, then by round.
struct Measured {
    case: Case,
    outcomes: Vec<Vec<Outcome>>,
}

/// Runs every case.
pub fn run(effort: Effort) -> Result<Report, String> {
    let (mut measured, mut failed) = (Vec::new(), None);
    for case in cases(effort) {
        let title = case.title.clone();
        match measure(case) {
            Ok((one, why)) => {
                measured.push(one);
                failed = why;
            }
            Err(why) if measured.is_empty() => return Err(format!("{title}: {why}")),
            Err(why) => failed = Some(why),
        }
        if let Some(why) = &mut failed {
            why.insert_str(0, &format!("{title}: "));
            break;
        }
    }
    let mut report = Report { failed, ..Report::new("readahead") };
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

/// Returns the complete rounds of a case, and the failure that ended them.
fn measure(case: Case) -> Result<(Measured, Option<String>), String> {
    let one = |policy: usize| {
        let (options, load) = (case.options(POLICIES[policy]), case.load());
        live::under(&words(&options), &words(&load))
    };
    let (outcomes, failed) = interleaved_until_failure(case.rounds, POLICIES.len(), one)?;
    case.compare(&outcomes)?;
    Ok((Measured { case, outcomes }, failed))
}

fn words(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}
