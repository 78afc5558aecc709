//! `farpage bench` and `farpage load`: hands the options to `farpage-bench`, and its report to
//! screen and files.

use crate::options::{BenchOptions, LoadOptions};
use crate::text::failure::Failure;
use crate::text::say;
use crate::text::size::{Amount, Size};
use farpage_bench::load::{LOADS, Settings};
use farpage_bench::{EXPERIMENTS, Effort, Run};
use std::path::Path;
use std::process::ExitCode;

/// Runs an experiment and reports. The exit status doesn't depend on what was found.
pub fn bench(options: &BenchOptions) -> Result<ExitCode, Failure> {
    let experiment = EXPERIMENTS.iter().find(|experiment| experiment.name == options.experiment);
    let experiment = experiment.expect("clap accepts the names in the table only");
    let only = options.only.as_deref();
    let has_cases = matches!(experiment.run, Run::Cases(_));
    if only.is_some() && !has_cases {
        return Err(
            Failure::new(format!("`bench {}` is run as a whole", experiment.name)).fix("leave out --only")
        );
    }
    // The files are tried before the minutes that the experiment takes.
    for file in [&options.json, &options.svg].into_iter().flatten() {
        write(file, "")?;
    }
    let effort = if options.quick { Effort::Quick } else { Effort::Full };
    let report = match experiment.run {
        Run::Whole(run) => run(effort),
        Run::Cases(run) => run(effort, only),
    };
    let report =
        report.map_err(|why| Failure::new(format!("`bench {}` could not go on: {why}", experiment.name)))?;
    say::to_stdout(&report.text())?;
    if let Some(file) = &options.json {
        write(file, &format!("{:#}\n", report.json()))?;
    }
    if let Some(file) = &options.svg {
        let svg = report.svg().map_err(|why| Failure::new(format!("the plot can't be drawn: {why}")))?;
        write(file, &svg)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| {
        Failure::new(format!("{} can't be written: {error}", path.display()))
            .fix("name a file in a directory that exists and is yours")
    })
}

/// Runs a load, and prints its result as JSON on standard output.
pub fn load(options: &LoadOptions) -> Result<ExitCode, Failure> {
    let load = LOADS.iter().find(|load| load.name == options.name);
    let load = load.expect("clap accepts the names in the table only");
    let settings = Settings {
        bytes: options.bytes.of(0),
        threads: options.threads,
        random_bytes: options.random_bytes.of(0),
        random_threads: options.random_threads,
        stride: options.stride,
        seconds: options.seconds,
        write_percent: options.write_percent,
        seed: options.seed,
        noise: options.noise,
        shared: options.shared,
        processes: options.processes,
        gate: options.gate,
        pattern: options.pattern.clone(),
        contents: options.contents.clone(),
    };
    let is_share = |size: &&&Size| matches!(size.amount, Amount::Share(_));
    if let Some(share) = [&options.bytes, &options.random_bytes].iter().find(is_share) {
        return Err(
            Failure::new(format!("`{}` is a share of nothing", share.text)).fix("give a size: --bytes 64M")
        );
    }
    settings.check().map_err(|why| {
        Failure::new(why).fix(format!("`farpage load {} --help` shows the defaults", load.name))
    })?;
    let threads = (settings.threads + settings.random_threads) as u64;
    if settings.seed.checked_add(threads).is_none() {
        let what = format!("--seed {} is too large for {threads} threads", settings.seed);
        return Err(Failure::new(what)
            .because("each thread has a seed of its own, above the one that is given")
            .fix(format!("--seed {} or less", u64::MAX - threads)));
    }
    let found =
        (load.run)(&settings).map_err(|why| Failure::new(format!("load {}: {why}", load.name)).status(1))?;
    say::to_stdout(&format!("{found}\n"))?;
    Ok(ExitCode::SUCCESS)
}
