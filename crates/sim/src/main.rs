//! `farpage-sim`: runs seeds and prints a summary.
//!
//! `--seeds 0..10000` runs a range. `--seed N --verbose` prints one seed's events. A violation prints the
//! seed and the last events, and the process ends with status 1.

use farpage_core::stats::Counter;
use farpage_sim::{Coverage, Say, print_on_panic, run};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "usage: farpage-sim [--seeds FIRST..END | --seed N] [--verbose] [--coverage]";

struct Options {
    seeds: Range<u64>,
    say: Say,
    coverage: bool,
}

fn options() -> Option<Options> {
    let mut options = Options { seeds: 0..1000, say: Say::Nothing, coverage: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seeds" => {
                let range = arguments.next()?;
                let (first, end) = range.split_once("..")?;
                options.seeds = first.parse().ok()?..end.parse().ok()?;
            }
            "--seed" => {
                let seed = arguments.next()?.parse().ok()?;
                options.seeds = seed..seed + 1;
            }
            "--verbose" => options.say = Say::Everything,
            "--coverage" => options.coverage = true,
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    print_on_panic();
    let start = Instant::now();
    let (mut steps, mut coverage) = (0, Coverage::default());
    for seed in options.seeds.clone() {
        match run(seed, options.say) {
            Ok(report) => {
                steps += report.steps;
                coverage.merge(&report.coverage);
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
        if (seed + 1).is_multiple_of(1000) {
            eprintln!("{} seeds, {:.0} s", seed + 1 - options.seeds.start, start.elapsed().as_secs_f64());
        }
    }
    if options.coverage {
        coverage.iter().for_each(|(name, count)| println!("{count:12} {name}"));
    }
    println!("{}", summary(&options.seeds, steps, &coverage, start.elapsed().as_secs_f64()));
    ExitCode::SUCCESS
}

fn summary(seeds: &Range<u64>, steps: u64, coverage: &Coverage, seconds: f64) -> String {
    let of = |counter: Counter| coverage.count(counter.name());
    format!(
        "{} seeds, no violation: {steps} steps; faults: {} first, {} parked, {} pool, {} area, {} write, {} joined, \
         {} lost; {} pages evicted, {} written to areas; {} mapping changes, {} deaths; {seconds:.1} s",
        seeds.end - seeds.start,
        of(Counter::FaultFirst),
        of(Counter::FaultParked),
        of(Counter::FaultPool),
        of(Counter::FaultArea),
        of(Counter::FaultWrite),
        of(Counter::FaultJoined),
        of(Counter::FaultLost),
        of(Counter::EvictTaken),
        of(Counter::Pswpout),
        of(Counter::MapChanges),
        coverage.count("death"),
    )
}
