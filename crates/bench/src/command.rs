//! `farpage bench command -- PROGRAM`: how long a program of the user's takes with less memory than it needs,
//! under the kernel's own swap and under Farpage. [`crate::contest`] runs the program. Machine, settings and
//! memory are those of [`crate::kernel`].

use crate::contest::{Contest, Entrant, Job, Measured, Run, chart, digest, notes, table};
use crate::kernel::machine::{self, Machine};
use crate::kernel::{Failed, Found, tell};
use crate::live::{self, Outcome, Place};
use crate::report::{Report, Target};
use crate::{Effort, stop};
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Smallest memory to measure with, in bytes. In a smaller cgroup the kernel finds no memory, and kills.
const RAM_MIN: u64 = 4 * MIB;
/// Times that the kernel's swap file is as large as the program's largest process. The program may have more
/// processes, so `SWAP_BYTES` are added.
const SWAP_TIMES: u64 = 4;
const SWAP_BYTES: u64 = 512 * MIB;
/// Characters of the command that name it in the report.
const NAME_CHARS: usize = 32;
/// Target for the ratio of the kernel's time to Farpage's.
const WANTED: f64 = 1.0;

/// What the user has asked for.
pub struct Asked<'a> {
    /// The program and its arguments.
    pub words: &'a [String],
    /// Returns the memory that the program gets, in bytes, from what its largest process has without a limit.
    pub ram: &'a dyn Fn(u64) -> u64,
    /// Options of `farpage run`, as a shell has them. Each text is measured. Without one, the defaults are.
    pub with: &'a [String],
}

/// Measures the program.
///
/// # Errors
/// Says why the program can't be measured: no root, a program that fails or prints something else each time.
pub fn run(effort: Effort, asked: &Asked<'_>) -> Result<Report, String> {
    machine::takes_root()?;
    let _hearing = stop::hear();
    let directory = live::swap_directory()?;
    let job = Job {
        name: short(&asked.words.join(" ")),
        words: asked.words.to_vec(),
        client: None,
        result: |outcome| Ok(digest(&outcome.printed)),
    };
    tell("bench command: without a limit");
    let words: Vec<&str> = asked.words.iter().map(String::as_str).collect();
    let first = live::run(Place::Alone, &words, Path::new("."), || Ok(()))?;
    let ram = (asked.ram)(first.peak_bytes) / MIB * MIB;
    if ram < RAM_MIN {
        return Err(format!(
            "{} is too little memory to measure with; give --ram {} or more",
            mib(ram),
            mib(RAM_MIN)
        ));
    }
    let machine = Machine::new(&directory, first.peak_bytes.max(ram) * SWAP_TIMES + SWAP_BYTES, ram)?;
    let mut contest = Contest {
        machine,
        place: Path::new(".").to_owned(),
        directory,
        entrants: entrants(asked.with),
        rounds: effort.pick(5, 1),
    };
    tell(&format!("bench command: with {}", mib(ram)));
    let peak = first.peak_bytes;
    let found = Found::of(vec![first], |_| job.name.clone(), |first| measure(&mut contest, &job, ram, first));
    let (rounds, budget) = (contest.rounds, contest.machine.budget_of_farpage());
    let restored = contest.machine.restore();
    found.report(restored, |measured| report(measured, peak, rounds, budget))
}

fn mib(bytes: u64) -> String {
    format!("{}M", bytes / MIB)
}

/// Returns the beginning of a command, in one line.
fn short(command: &str) -> String {
    let line: String = command.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match line.char_indices().nth(NAME_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Returns what is measured under Farpage.
fn entrants(with: &[String]) -> Vec<Entrant> {
    let of = |text: &String| Entrant {
        name: ["farpage", text.trim()].join(" ").trim_end().to_owned(),
        options: text.split_whitespace().map(str::to_owned).collect(),
    };
    if with.is_empty() { vec![of(&String::new())] } else { with.iter().map(of).collect() }
}

/// Measures both sides. If the kernel can't run the program with so little memory, Farpage runs alone.
fn measure(contest: &mut Contest, job: &Job, ram: u64, first: Outcome) -> (Option<Measured>, Option<Failed>) {
    let result = digest(&first.printed);
    let mut unlimited = vec![Run::unlimited(Outcome { printed: Vec::new(), ..first })];
    match contest.measure_within(job, ram, &result, &mut unlimited) {
        (None, Some(Failed::Killed(why))) => {
            let (measured, failed) = contest.measure_as(None, job, ram, &result, &mut unlimited);
            (measured, failed.or(Some(Failed::Killed(why))))
        }
        measured => measured,
    }
}

fn report(measured: &[Measured], peak: u64, rounds: usize, budget: &str) -> Report {
    let mut report = Report::new("command");
    report.tables.push(table(measured));
    report.charts.push(chart("A program with less memory than it needs", measured));
    for one in measured {
        report.notes.push(format!(
            "kernel: a cgroup of {}; the program's largest process has {} without a limit; farpage: --ram {budget}; {rounds} rounds",
            mib(one.ram),
            mib(peak)
        ));
        if one.setting.is_none() {
            continue;
        }
        for ((who, _), speed) in one.farpage.iter().zip(one.speeds()) {
            report.targets.push(Target::at_least(format!("{who}: ratio of speeds"), WANTED, speed.median));
        }
    }
    report.notes.extend(notes(measured, rounds));
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_command_is_named_by_its_beginning_in_one_line() {
        assert_eq!(short("sort lines"), "sort lines");
        let named = short("sh -c for i in 1 2 3\ndo echo $i done here\ndone");
        assert_eq!(named, "sh -c for i in 1 2 3 do echo $i ...");
    }

    #[test]
    fn each_text_is_an_entrant_and_the_defaults_are_one() {
        let named = |with: &[&str]| -> Vec<(String, Vec<String>)> {
            let with: Vec<String> = with.iter().map(|text| (*text).to_owned()).collect();
            entrants(&with).into_iter().map(|entrant| (entrant.name, entrant.options)).collect()
        };
        assert_eq!(named(&[]), [("farpage".to_owned(), vec![])]);
        let [segv, pool] = [" --faults segv ", "--pool  1M"];
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            named(&[segv, pool]),
            [
                ("farpage --faults segv".to_owned(), words(segv)),
                ("farpage --pool  1M".to_owned(), words(pool))
            ]
        );
    }
}
