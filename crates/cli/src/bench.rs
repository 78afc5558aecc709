//! `farpage bench` and `farpage load`: hands the options to `farpage-bench`, and its report to
//! screen and files.

use crate::host::sys;
use crate::options::{BenchOptions, LoadOptions};
use crate::text::failure::Failure;
use crate::text::say;
use crate::text::size::{Amount, Size};
use farpage_bench::command::Asked;
use farpage_bench::load::{LOADS, Settings};
use farpage_bench::{EXPERIMENTS, Effort, Experiment, Run};
use farpage_runtime::session::SESSION_ENV;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Runs an experiment and reports. The exit status doesn't depend on what was found. An experiment that ends
/// early reports what it has found, and its status is 125.
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
    check_program(options, experiment)?;
    if options.json.is_some() && options.json == options.svg {
        return Err(Failure::new("--json and --svg name the same file").fix("name two files"));
    }
    if sys::environment(SESSION_ENV).is_some() {
        return Err(Failure::new("a benchmark can't run under `farpage run`")
            .because("its programs would have that run's budget, or none")
            .fix(format!("farpage bench {}", experiment.name)));
    }
    // The files are tried before the minutes that the experiment takes.
    let files = [&options.json, &options.svg].into_iter().flatten().map(|file| Draft::of(file));
    let files = files.collect::<Result<Vec<Draft<'_>>, Failure>>()?;
    let effort = if options.quick { Effort::Quick } else { Effort::Full };
    let report = match experiment.run {
        Run::Whole(run) => run(effort),
        Run::Cases(run) => run(effort, only),
        Run::Command(run) => {
            let ram = |whole| options.ram.as_ref().map_or(whole / 2, |size| size.of(whole));
            run(effort, &Asked { words: &options.program, ram: &ram, with: &options.with })
        }
    };
    let gave_up = |why: String| Failure::new(format!("`bench {}` could not go on: {why}", experiment.name));
    let mut report = report.map_err(gave_up)?;
    report
        .notes
        .extend(options.quick.then(|| "--quick: sizes and rounds are too few to judge by".to_owned()));
    report.notes.extend(only.map(|text| format!("--only: cases whose titles contain `{text}`")));
    files.into_iter().for_each(Draft::stays);
    // All three are written, whatever becomes of the others. The files come first, because a terminal may be
    // gone.
    let written = [
        options.json.as_ref().map(|file| write(file, &format!("{:#}\n", report.json()))),
        options.svg.as_ref().map(|file| {
            let svg = report.svg().map_err(|why| Failure::new(format!("the plot can't be drawn: {why}")))?;
            write(file, &svg)
        }),
        Some(say::to_stdout(&report.text())),
    ];
    written.into_iter().flatten().collect::<Result<(), Failure>>()?;
    report.failed.map_or(Ok(ExitCode::SUCCESS), |why| Err(gave_up(why)))
}

/// Checks that a program is given exactly where one is measured.
fn check_program(options: &BenchOptions, experiment: &Experiment) -> Result<(), Failure> {
    let is_given = !options.program.is_empty();
    if matches!(experiment.run, Run::Command(_)) {
        return if is_given {
            Ok(())
        } else {
            Err(Failure::new("`bench command` measures a program, and none is given")
                .fix("farpage bench command --ram 50% -- python3 job.py"))
        };
    }
    if is_given || options.ram.is_some() || !options.with.is_empty() {
        return Err(Failure::new(format!("`bench {}` measures no program of yours", experiment.name))
            .because("--ram, --with and a program are for `bench command`")
            .fix("farpage bench command --ram 50% -- python3 job.py"));
    }
    Ok(())
}

/// A file that can be written. An earlier content stays until there is a result, which may be never.
struct Draft<'f> {
    path: &'f Path,
    is_new: bool,
}

impl Draft<'_> {
    fn of(path: &Path) -> Result<Draft<'_>, Failure> {
        let is_new = path.symlink_metadata().is_err();
        let opened = OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|error| unwritable(path, &error))?;
        Ok(Draft { path, is_new })
    }

    /// There is a result: the file isn't removed.
    fn stays(mut self) {
        self.is_new = false;
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if self.is_new {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{} can't be written: {error}", path.display()))
        .fix("name a file in a directory that exists and is yours")
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of an earlier run was emptied before the experiment began, and the experiment then failed.
    #[test]
    fn earlier_result_stays_until_there_is_another_and_a_new_file_goes_without_one() {
        let place = tempfile::tempdir().unwrap();
        let [earlier, new] = ["earlier.json", "new.json"].map(|name| place.path().join(name));
        std::fs::write(&earlier, "figures").unwrap();
        for path in [&earlier, &new] {
            drop(Draft::of(path).unwrap());
        }
        assert_eq!(std::fs::read_to_string(&earlier).unwrap(), "figures");
        assert!(!new.exists());
        Draft::of(&new).unwrap().stays();
        assert!(new.exists());
        assert!(Draft::of(place.path()).is_err() && Draft::of(&place.path().join("no/such.json")).is_err());
    }
}
