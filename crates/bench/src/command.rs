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
/// Size of the kernel's swap file: `SWAP_TIMES` the memory of the program's largest process, and `SWAP_BYTES`
/// for more processes.
const SWAP_TIMES: u64 = 4;
const SWAP_BYTES: u64 = 512 * MIB;
/// Options of `farpage run` that the benchmark gives itself.
const OWN: [&str; 5] = ["--ram", "--swap", "--stats", "--quiet", "--"];
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
    /// Options of `farpage run`, with blanks between them. Each text is measured. Without one, the defaults
    /// are.
    pub with: &'a [String],
}

/// Measures the program.
///
/// # Errors
/// Says why the program can't be measured: no root, a program that fails or prints something else each time.
pub fn run(effort: Effort, asked: &Asked<'_>) -> Result<Report, String> {
    let entrants = entrants(asked.with)?;
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
    let killed = machine::killed();
    let first = live::run(Place::Alone, &words, Path::new("."), || Ok(()))?;
    if machine::killed() > killed {
        return Err("the machine has too little memory: the kernel has killed a process".to_owned());
    }
    let ram = (asked.ram)(first.peak_bytes) / MIB * MIB;
    if ram < RAM_MIN {
        return Err(format!(
            "the program's largest process was seen with {}, of which it would get {}; it needs {} to be measured: see --ram",
            mib(first.peak_bytes),
            mib(ram),
            mib(RAM_MIN)
        ));
    }
    let swap = first.peak_bytes.saturating_mul(SWAP_TIMES).saturating_add(SWAP_BYTES);
    let machine = Machine::new(&directory, swap, ram)?;
    let mut contest =
        Contest { machine, place: Path::new(".").to_owned(), directory, entrants, rounds: effort.pick(5, 1) };
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
fn entrants(with: &[String]) -> Result<Vec<Entrant>, String> {
    if with.is_empty() {
        return Ok(vec![Entrant { name: "farpage".to_owned(), options: vec![] }]);
    }
    let of = |text: &String| {
        let options: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let name = |option: &String| option.split('=').next().unwrap_or_default().to_owned();
        if let Some(own) = options.iter().map(name).find(|name| OWN.contains(&name.as_str())) {
            return Err(format!("--with \"{text}\" has `{own}`, which the benchmark sets itself"));
        }
        // A word would be taken for the program.
        if !options.first().is_some_and(|first| first.starts_with('-')) {
            return Err(format!("--with \"{text}\" doesn't begin with an option of `farpage run`"));
        }
        Ok(Entrant { name: format!("farpage {}", options.join(" ")), options })
    };
    with.iter().map(of).collect()
}

/// Measures both sides. If the kernel can't run the program with so little memory, Farpage runs alone.
fn measure(contest: &mut Contest, job: &Job, ram: u64, first: Outcome) -> (Option<Measured>, Option<Failed>) {
    let result = digest(&first.printed);
    let prints_nothing = first.printed.is_empty();
    let mut unlimited = vec![Run::unlimited(Outcome { printed: Vec::new(), ..first })];
    // Wrong options end the benchmark before the kernel's settings are tried, which takes long.
    for entrant in &contest.entrants {
        if let Err(why) = contest.farpage(job, ram, entrant, &result) {
            return (None, Some(Failed::Otherwise(format!("{}: {why}", entrant.name))));
        }
    }
    if prints_nothing {
        tell("  the program prints nothing: only its end is compared");
    }
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
        let (ram, peak) = (mib(one.ram), mib(peak));
        report
            .notes
            .push(format!("the program's largest process has {peak} without a limit; {rounds} rounds"));
        if one.setting.is_none() {
            report.notes.push(format!("farpage: --ram {ram}; with so little the kernel's swap can't run it"));
            continue;
        }
        report.notes.push(format!("kernel: a cgroup of {ram}; farpage: --ram {budget}"));
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
    use crate::kernel::machine::Setting;

    #[test]
    fn long_command_is_named_by_its_beginning_in_one_line() {
        assert_eq!(short("sort lines"), "sort lines");
        let named = short("sh -c for i in 1 2 3\ndo echo $i done here\ndone");
        assert_eq!(named, "sh -c for i in 1 2 3 do echo $i ...");
    }

    #[test]
    fn each_text_is_an_entrant_and_the_defaults_are_one() {
        let named = |with: &[&str]| -> Result<Vec<(String, Vec<String>)>, String> {
            let with: Vec<String> = with.iter().map(|text| (*text).to_owned()).collect();
            let found = entrants(&with)?;
            Ok(found.into_iter().map(|entrant| (entrant.name, entrant.options)).collect())
        };
        assert_eq!(named(&[]).unwrap(), [("farpage".to_owned(), vec![])]);
        let [segv, pool] = [" --faults segv ", "--pool  1M"];
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            named(&[segv, pool]).unwrap(),
            [
                ("farpage --faults segv".to_owned(), words(segv)),
                ("farpage --pool 1M".to_owned(), words(pool))
            ]
        );
        for (wrong, why) in [
            ("--pool 1M --ram 5M", "`--ram`"),
            ("--stats=x", "`--stats`"),
            ("--no-disk -- true", "`--`"),
            ("true", "doesn't begin with an option"),
            ("", "doesn't begin with an option"),
        ] {
            let refused = named(&[wrong]).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    /// The report said what the kernel does best with, though the kernel had only killed the program.
    #[test]
    fn report_without_the_kernels_side_says_nothing_of_its_settings() {
        let run = |seconds| {
            Run::unlimited(Outcome {
                printed: vec![],
                load: serde_json::Value::Null,
                stats: serde_json::Value::Null,
                wall: std::time::Duration::from_secs(seconds),
                cpu_seconds: 1.0,
                major_faults: 0,
                peak_bytes: 9 * MIB,
            })
        };
        let measured = |setting: Option<Setting>| Measured {
            name: "job".to_owned(),
            ram: 5 * MIB,
            kernel: setting.iter().map(|_| run(6)).collect(),
            setting,
            farpage: vec![("farpage".to_owned(), vec![run(3)])],
            unlimited: vec![run(1)],
            killed: 0,
            killed_with: vec![],
        };
        let alone = report(&[measured(None)], 9 * MIB, 1, "as much");
        let told = alone.notes.join("\n");
        assert!(told.contains("--ram 5M; with so little the kernel's swap can't run it"), "{told}");
        assert!(!told.contains("zswap") && alone.targets.is_empty(), "{told}");
        assert_eq!((alone.charts[0].series.len(), alone.tables[0].rows.len()), (2, 2));
        let both = report(&[measured(Some(Setting { codec: None, page_cluster: 0 }))], 9 * MIB, 1, "as much");
        assert_eq!((both.charts[0].series.len(), both.tables[0].rows.len(), both.targets.len()), (3, 3, 1));
    }
}
