//! `farpage bench kernel`: the kernel's own swap against Farpage, with the same unmodified program and equal
//! memory.
//!
//! The kernel's side is a memory cgroup and a swap file, with zswap and without. Farpage's side is `farpage
//! run`. The budget is the cgroup's limit. Where the limit leaves out zswap's pool, the budget also has the
//! pool's peak in the same round. Both swap to the same directory. The kernel has the codec that is best for
//! the first load from the pool, and the readahead that is best for each load. Runs before the counted ones
//! find both. The program is [`crate::load::touch`]. The contents of its pages are [`contents`].

pub mod contents;
pub mod machine;

use crate::Effort;
use crate::live::{self, Outcome};
use crate::load::touch;
use crate::measure::{Sample, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};
use crate::stop;
use machine::{Machine, PAGE_CLUSTERS, PoolPeak, Setting};
use std::io::Write;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Percent of touches that write.
const WRITES: u64 = 20;
/// The smallest pool of Farpage. With it, evicted pages go to disk.
const POOL_LEAST: &str = "1M";

/// The place to which evicted pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    /// zswap, or Farpage's pool.
    Pool,
    /// The disk alone.
    Disk,
}

impl Tier {
    const fn name(self) -> &'static str {
        match self {
            Tier::Pool => "pool",
            Tier::Disk => "disk",
        }
    }
}

/// One load in one tier.
struct Case {
    tier: Tier,
    pattern: &'static str,
    threads: usize,
    write_percent: u64,
    /// The part of the result that counts, and its target: the ratio of its touches to the kernel's.
    wanted: Option<(&'static str, f64)>,
}

impl Case {
    const fn of(
        tier: Tier,
        pattern: &'static str,
        threads: usize,
        wanted: Option<(&'static str, f64)>,
    ) -> Case {
        Case { tier, pattern, threads, write_percent: WRITES, wanted }
    }

    fn title(&self) -> String {
        let threads =
            if self.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", self.threads) };
        format!("{}, {}, {threads}, {} % writes", self.tier.name(), self.pattern, self.write_percent)
    }

    /// Returns the names of the load's parts, as the load's result has them.
    fn parts(&self) -> Vec<&'static str> {
        if self.pattern == "mixed" { vec!["sequential", "random"] } else { vec![self.pattern] }
    }

    /// Returns the part by which the kernel's settings are chosen.
    fn choosing_part(&self) -> &'static str {
        self.wanted.map_or_else(|| self.parts()[0], |(part, _)| part)
    }

    /// Returns the name of a part in a chart, short enough to fit below its bars.
    fn short_name(&self, part: &str) -> String {
        match (self.pattern, self.threads) {
            ("mixed", _) => format!("mix: {part}"),
            (pattern, 1) => pattern.to_owned(),
            (pattern, threads) => format!("{pattern} x{threads}"),
        }
    }
}

/// Returns the cases whose titles contain `only`. A quick run has only the first one of each tier.
fn chosen(effort: Effort, only: Option<&str>) -> Vec<Case> {
    let mut chosen = cases();
    chosen.retain(|case| only.is_none_or(|text| case.title().contains(text)));
    if effort == Effort::Quick {
        chosen.dedup_by_key(|case| case.tier);
    }
    chosen
}

/// Returns the case by which the codec is chosen.
fn first_with_codec(cases: &[Case]) -> Option<&Case> {
    cases.iter().find(|case| case.tier == Tier::Pool)
}

/// Returns all cases, tier by tier.
fn cases() -> Vec<Case> {
    use Tier::{Disk, Pool};
    let random = |tier, threads, wanted| Case::of(tier, "random", threads, Some(("random", wanted)));
    vec![
        random(Pool, 1, 2.5),
        random(Pool, 2, 2.5),
        Case::of(Pool, "random", 4, None),
        Case::of(Pool, "random", 16, None),
        Case { write_percent: 0, ..Case::of(Pool, "random", 1, None) },
        Case::of(Pool, "zipf", 1, Some(("zipf", 2.5))),
        Case::of(Pool, "sequential", 1, Some(("sequential", 5.0))),
        Case { write_percent: 0, ..Case::of(Pool, "sequential", 1, None) },
        Case::of(Pool, "streams", 1, Some(("streams", 4.0))),
        Case::of(Pool, "strided", 1, None),
        Case::of(Pool, "mixed", 2, Some(("sequential", 4.0))),
        random(Disk, 1, 1.0),
        random(Disk, 16, 1.5),
        Case::of(Disk, "sequential", 1, Some(("sequential", 4.0))),
        Case::of(Disk, "streams", 1, Some(("streams", 8.0))),
        Case::of(Disk, "mixed", 2, None),
    ]
}

/// Sizes, times and rounds of a run.
struct Size {
    ram: u64,
    bytes: u64,
    seconds: f64,
    rounds: usize,
    bank_pages: usize,
}

/// One run.
struct Run {
    outcome: Outcome,
    /// Peak of the pool, in bytes.
    pool: u64,
    /// Pages written to disk.
    written: u64,
}

impl Run {
    fn rate(&self, part: &str) -> f64 {
        self.outcome.part(part, "touches_per_second")
    }
}

/// The runs of one case, round by round.
struct Measured {
    case: Case,
    setting: Setting,
    kernel: Vec<Run>,
    farpage: Vec<Run>,
    unlimited: Vec<Run>,
    /// Runs that the kernel ended because it found no memory. The runs were repeated.
    killed: usize,
}

impl Measured {
    /// Leaves only the rounds in which everybody has run.
    fn cut(&mut self) {
        let all = [&mut self.kernel, &mut self.farpage, &mut self.unlimited];
        let rounds = all.iter().map(|runs| runs.len()).min().unwrap_or(0);
        all.into_iter().for_each(|runs| runs.truncate(rounds));
    }
}

/// Runs all cases, or only those whose titles contain `only`.
pub fn run(effort: Effort, only: Option<&str>) -> Result<Report, String> {
    let cases = chosen(effort, only);
    if cases.is_empty() {
        return Err("it has no such case; one is called `pool, random, 1 thread, 20 % writes`".to_owned());
    }
    let size = Size {
        ram: effort.pick(128, 32) * MIB,
        bytes: effort.pick(256, 64) * MIB,
        seconds: effort.pick(4.0, 0.3),
        rounds: effort.pick(5, 1),
        bank_pages: effort.pick(touch::BANK_PAGES, 320),
    };
    let _hearing = stop::hear();
    let (directory, temporary) = (live::swap_directory()?, live::temporary()?);
    // The swap file holds everything, and the space that the kernel keeps free.
    let mut machine = Machine::new(&directory, 2 * size.bytes, size.ram)?;
    let bank = temporary.join(format!("farpage-bank-{}", std::process::id()));
    machine.has_file(&bank)?;
    contents::write_bank(&bank, size.bank_pages)?;
    let mut contest = Contest { size: &size, bank: &bank, directory: &directory, codecs: Vec::new() };
    // Without zswap no codec is in use, and the kernel may have none.
    if let Some(first) = first_with_codec(&cases) {
        contest.codecs = contest.compare_codecs(&mut machine, first).map_err(Failed::why)?;
    }
    let found = Found::of(cases, Case::title, |case| {
        tell(&format!("bench kernel: {}", case.title()));
        contest.measure(&mut machine, case)
    });
    let budget = machine.budget_of_farpage();
    let restored = machine.restore();
    found.report(restored, |measured| report(&size, measured, &contest.codecs, budget))
}

/// The figures of the loads or programs, as far as the benchmark came.
pub(crate) struct Found<M> {
    measured: Vec<M>,
    /// Loads without some or all of their rounds, because the kernel killed them again and again.
    killed: Vec<String>,
    /// Why the benchmark ended early.
    ended: Option<String>,
}

impl<M> Found<M> {
    /// Measures each of `all`, until one fails. `measure` returns the complete rounds, and the failure.
    pub(crate) fn of<C>(
        all: Vec<C>,
        title: impl Fn(&C) -> String,
        mut measure: impl FnMut(C) -> (Option<M>, Option<Failed>),
    ) -> Found<M> {
        let mut found = Found { measured: vec![], killed: vec![], ended: None };
        for one in all {
            let title = title(&one);
            let (measured, failed) = measure(one);
            found.measured.extend(measured);
            match failed {
                None => {}
                Some(Failed::Killed(why)) => found.killed.push(format!("{title}: {why}")),
                Some(Failed::Otherwise(why)) => {
                    found.ended = Some(format!("{title}: {why}"));
                    break;
                }
            }
        }
        found
    }

    /// Returns the report of what was measured. The report also says what wasn't put back.
    pub(crate) fn report(
        self,
        restored: Result<(), String>,
        report: impl Fn(&[M]) -> Report,
    ) -> Result<Report, String> {
        let failed = self.ended.into_iter().chain(restored.err()).reduce(|one, other| one + "; " + &other);
        if self.measured.is_empty() {
            let all: Vec<String> = self.killed.into_iter().chain(failed).collect();
            return Err(all.join("; "));
        }
        let mut report = report(&self.measured);
        report.notes.extend(self.killed);
        report.failed = failed;
        Ok(report)
    }
}

/// Runs with each setting of the kernel before the counted runs.
const TRIALS: usize = 3;
/// Ratio of speeds beyond which a slower setting isn't tried again.
const HOPELESS: f64 = 4.0;

/// Says what the benchmark is at. A reader that is gone is no error: the figures are worth more.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "farpage: {text}");
}

/// Returns the settings with the speed that `run` finds for each: the median of up to three runs in turns. A
/// single run isn't enough, because in some loads a bad moment halves the kernel's speed or worse. A setting
/// with which the kernel only kills the program is left out. A setting that is far slower than the fastest
/// one isn't tried again.
pub(crate) fn try_in_turns(
    settings: Vec<Setting>,
    rounds: usize,
    mut run: impl FnMut(&Setting) -> Result<f64, Failed>,
) -> Result<Vec<(Setting, f64)>, Failed> {
    let mut tried: Vec<(Setting, Vec<f64>)> = settings.into_iter().map(|setting| (setting, vec![])).collect();
    let mut failed = String::new();
    for _ in 0..TRIALS.min(rounds) {
        let fastest = tried.iter().filter_map(|(_, speeds)| speeds.first().copied()).fold(0.0, f64::max);
        for (setting, speeds) in &mut tried {
            if speeds.first().is_some_and(|speed| speed * HOPELESS < fastest) {
                continue;
            }
            match run(setting) {
                Ok(speed) if speed.is_finite() => speeds.push(speed),
                Ok(_) => return Err(Failed::Otherwise(format!("{setting}: the load has no speed"))),
                // With large windows and little memory, the kernel may find no memory and kill the program.
                Err(Failed::Killed(why)) => {
                    tell(&format!("  {setting}: the kernel killed it"));
                    failed = why;
                }
                Err(failed) => return Err(failed),
            }
        }
        if tried.iter().all(|(_, speeds)| speeds.is_empty()) {
            return Err(Failed::Killed(failed));
        }
    }
    tried.retain(|(_, speeds)| !speeds.is_empty());
    Ok(tried.into_iter().map(|(setting, speeds)| (setting, Sample::of(&speeds).median)).collect())
}

struct Contest<'a> {
    size: &'a Size,
    bank: &'a Path,
    directory: &'a Path,
    /// zswap's codecs with the touches per second of each, best first.
    codecs: Vec<(String, f64)>,
}

impl Contest<'_> {
    fn compare_codecs(&self, machine: &mut Machine, case: &Case) -> Result<Vec<(String, f64)>, Failed> {
        let setting = |codec: &String| Setting { codec: Some(codec.clone()), page_cluster: 0 };
        let settings: Vec<Setting> = machine.codecs().iter().map(setting).collect();
        if settings.is_empty() {
            return Err("this kernel has no codec for zswap".to_owned().into());
        }
        let tried = self.try_each(machine, case, settings)?;
        Ok(tried.into_iter().filter_map(|(setting, rate)| Some((setting.codec?, rate))).collect())
    }

    /// Returns the settings with the kernel's touches per second with each, best first.
    fn try_each(
        &self,
        machine: &mut Machine,
        case: &Case,
        settings: Vec<Setting>,
    ) -> Result<Vec<(Setting, f64)>, Failed> {
        let part = case.choosing_part();
        let rate = |setting: &Setting| self.kernel(machine, case, setting).map(|run| run.rate(part));
        let mut all = try_in_turns(settings, self.size.rounds, rate)?;
        all.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        Ok(all)
    }

    /// Returns the complete rounds, if there are any, and the failure that ended them.
    fn measure(&self, machine: &mut Machine, case: Case) -> (Option<Measured>, Option<Failed>) {
        let setting = match self.best_setting(machine, &case) {
            Ok(setting) => setting,
            Err(failed) => return (None, Some(failed)),
        };
        let mut measured =
            Measured { case, setting, kernel: vec![], farpage: vec![], unlimited: vec![], killed: 0 };
        let failed = (0..self.size.rounds).find_map(|round| self.round(machine, &mut measured, round).err());
        measured.cut();
        ((!measured.kernel.is_empty()).then_some(measured), failed)
    }

    fn round(&self, machine: &mut Machine, measured: &mut Measured, round: usize) -> Result<(), Failed> {
        // The kernel runs first, because the size of its pool decides how much memory Farpage gets.
        let kernel =
            unless_killed(&mut measured.killed, || self.kernel(machine, &measured.case, &measured.setting))?;
        let pool = if machine.pool_is_within() { 0 } else { kernel.pool };
        measured.kernel.push(kernel);
        if round % 2 == 1 {
            measured.unlimited.push(self.unlimited(&measured.case)?);
        }
        measured.farpage.push(self.farpage(&measured.case, pool)?);
        if round.is_multiple_of(2) {
            measured.unlimited.push(self.unlimited(&measured.case)?);
        }
        Ok(())
    }

    /// Returns the setting with which the kernel does this load best.
    fn best_setting(&self, machine: &mut Machine, case: &Case) -> Result<Setting, Failed> {
        let codec = match case.tier {
            Tier::Pool => {
                Some(self.codecs.first().ok_or_else(|| "this kernel has no zswap".to_owned())?.0.clone())
            }
            Tier::Disk => None,
        };
        let settings = PAGE_CLUSTERS.map(|page_cluster| Setting { codec: codec.clone(), page_cluster });
        let tried = self.try_each(machine, case, settings.into())?;
        Ok(tried.into_iter().next().expect("one at least").0)
    }

    fn load(&self, case: &Case) -> Vec<String> {
        let mut words: Vec<String> = ["touch", "--pattern", case.pattern].map(str::to_owned).to_vec();
        let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
        option("--contents", self.bank.display().to_string());
        option("--bytes", self.size.bytes.to_string());
        option("--threads", case.threads.to_string());
        option("--seconds", self.size.seconds.to_string());
        option("--write-percent", case.write_percent.to_string());
        words
    }

    fn kernel(&self, machine: &mut Machine, case: &Case, setting: &Setting) -> Result<Run, Failed> {
        machine.swaps_as(setting)?;
        let (before, killed, mut pool) = (machine::pages_written(), machine.killed(), PoolPeak::begin());
        let load = self.load(case);
        let words: Vec<&str> = load.iter().map(String::as_str).collect();
        let found = live::within(&machine.members(), &words, || {
            pool.look();
            Ok(())
        });
        let written = machine::pages_written().saturating_sub(before);
        if machine.killed() > killed {
            return Err(Failed::Killed("the kernel found no memory, and killed the program".to_owned()));
        }
        Ok(Run { outcome: found?, pool: pool.bytes(), written })
    }

    fn farpage(&self, case: &Case, pool: u64) -> Result<Run, String> {
        let ram = (self.size.ram + pool).to_string();
        let swap = self.directory.display().to_string();
        let mut options = vec!["--ram", &ram, "--swap", &swap, "--faults", "signal"];
        if case.tier == Tier::Disk {
            options.extend(["--pool", POOL_LEAST]);
        }
        let load = self.load(case);
        let words: Vec<&str> = load.iter().map(String::as_str).collect();
        let outcome = live::under(&options, &words)?;
        let number = |what: &str, name: &str| outcome.stats[what][name].as_u64().unwrap_or(0);
        let (pool, written) = (number("gauges", "pool_peak"), number("counters", "area_slots"));
        Ok(Run { outcome, pool, written })
    }

    fn unlimited(&self, case: &Case) -> Result<Run, String> {
        let load = self.load(case);
        let words: Vec<&str> = load.iter().map(String::as_str).collect();
        Ok(Run { outcome: live::alone(&words)?, pool: 0, written: 0 })
    }
}

/// Why a run gave no figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The kernel's side: the kernel found no memory for the program, and killed it.
    Killed(String),
    /// Anything else, as an end of Farpage's side. The benchmark ends.
    Otherwise(String),
}

impl Failed {
    /// Returns the reason.
    pub fn why(self) -> String {
        match self {
            Failed::Killed(why) | Failed::Otherwise(why) => why,
        }
    }
}

impl From<String> for Failed {
    fn from(why: String) -> Failed {
        Failed::Otherwise(why)
    }
}

/// Repeats a run that the kernel ends because it finds no memory, at most `KILLED_MAX` times in all.
pub fn unless_killed<T>(killed: &mut usize, mut run: impl FnMut() -> Result<T, Failed>) -> Result<T, Failed> {
    const KILLED_MAX: usize = 10;
    loop {
        match run() {
            Err(Failed::Killed(_)) if *killed < KILLED_MAX => *killed += 1,
            done => return done,
        }
    }
}

/// Says whose CPU time a report has.
pub(crate) const NOTE_CPU: &str = "CPU s: of the program and its children; neither the kernel's own threads are in it, nor farpage's \
     process beside the program";

fn report(size: &Size, measured: &[Measured], codecs: &[(String, f64)], budget: &str) -> Report {
    let codecs: Vec<String> = codecs.iter().map(|(name, rate)| format!("{name} {rate:.0}")).collect();
    let mut report = Report::new("kernel");
    let mut killed = Vec::new();
    report.published.push(
        "a machine like this, 512 MiB of 1 GiB, zswap with lzo: 105,000 random touches/s with one thread; a prototype of ours \
         143,000"
            .to_owned(),
    );
    for one in measured {
        if one.killed > 0 {
            let runs = one.kernel.len() + one.killed;
            killed.push(format!("{}: {} of {runs}", one.case.title(), one.killed));
        }
        let (table, targets) = tabled(one);
        report.tables.push(table);
        report.targets.extend(targets);
    }
    if let Some(target) = fill_target(measured) {
        report.targets.push(target);
    }
    let charts = [Tier::Pool, Tier::Disk].map(|tier| chart(tier, measured));
    report.charts.extend(charts.into_iter().filter(|chart| !chart.groups.is_empty()));
    report.notes = vec![
        format!(
            "kernel: a cgroup of {} MiB, farpage: --ram {budget}; {} MiB of pages, {} rounds of {} s",
            size.ram / MIB,
            size.bytes / MIB,
            size.rounds,
            size.seconds
        ),
        "touches/s: of the slowest thread, times the threads; added up: all threads. (By accessed bits the kernel may keep all pages \
         of some threads, and few of the others'.)"
            .to_owned(),
        "pages: 7 of 20 an interpreter's heap, 4 integers, 3 floats, 3 text, 2 compressed already, 1 nearly empty; every byte is \
         compared in the end"
            .to_owned(),
        "the cgroup's limit counts what the kernel keeps for the program, too (tables of pages); farpage's budget is anonymous \
         memory. A cgroup at its limit evicts in the thread that faults, farpage on other CPUs, too: see CPU s"
            .to_owned(),
        NOTE_CPU.to_owned(),
        "farpage has --faults signal, where no descriptor takes a privilege".to_owned(),
    ];
    report.notes.push("page-cluster 3, 0 or 5, the best for each load".to_owned());
    if !codecs.is_empty() {
        let codecs = codecs.join(", ");
        report
            .notes
            .push(format!("zswap's codecs here, touches/s of the first load from the pool: {codecs}"));
    }
    for one in measured.iter().filter(|one| one.kernel.len() < size.rounds) {
        let rounds = one.kernel.len();
        report.notes.push(format!("{}: {rounds} of {} rounds", one.case.title(), size.rounds));
    }
    if !killed.is_empty() {
        report.notes.push(format!(
            "runs that the kernel killed because it found no memory in the cgroup, and that were made again: {}",
            killed.join("; ")
        ));
    }
    report
}

fn sample(runs: &[Run], of: impl Fn(&Run) -> f64) -> Sample {
    Sample::of(&runs.iter().map(of).collect::<Vec<_>>())
}

fn rates(runs: &[Run], part: &str) -> Vec<f64> {
    runs.iter().map(|run| run.rate(part)).collect()
}

fn tabled(one: &Measured) -> (Table, Vec<Target>) {
    let columns = [
        "who",
        "part",
        "touches/s",
        "ratio",
        "added up",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "max us",
        "filled/s",
        "CPU s",
        "pool MiB",
        "to disk MiB",
        "major faults",
    ];
    let mut table = Table::new(one.case.title(), &columns);
    let mut targets = Vec::new();
    let kernel = format!("kernel, {}", one.setting);
    let who = [(kernel.as_str(), &one.kernel), ("farpage", &one.farpage), ("unlimited", &one.unlimited)];
    for part in one.case.parts() {
        for (name, runs) in who {
            let us = |name: &'static str| Cell::from(sample(runs, |run| run.outcome.part(part, name)).median);
            let is_kernel = std::ptr::eq(runs, &raw const one.kernel);
            table.row(vec![
                name.into(),
                part.into(),
                Sample::of(&rates(runs, part)).into(),
                if is_kernel {
                    Cell::Nothing
                } else {
                    ratio(&rates(runs, part), &rates(&one.kernel, part)).into()
                },
                sample(runs, |run| run.outcome.part(part, "together_per_second")).median.into(),
                us("p50_us"),
                us("p99_us"),
                us("p999_us"),
                us("max_us"),
                sample(runs, |run| run.outcome.number("filled_per_second")).median.into(),
                sample(runs, |run| run.outcome.cpu_seconds).median.into(),
                sample(runs, |run| run.pool as f64 / MIB as f64).median.into(),
                sample(runs, |run| run.written as f64 * 4096.0 / MIB as f64).median.into(),
                sample(runs, |run| run.outcome.major_faults as f64).median.into(),
            ]);
        }
    }
    if let Some((part, wanted)) = one.case.wanted {
        let found = ratio(&rates(&one.farpage, part), &rates(&one.kernel, part)).median;
        targets.push(Target::at_least(
            format!("{}: {part}, ratio to the kernel", one.case.title()),
            wanted,
            found,
        ));
        if one.case.tier == Tier::Pool && part == "random" {
            let found = sample(&one.farpage, |run| run.outcome.part(part, "p99_us")).median;
            targets.push(Target::at_most(format!("{}: p99 of a touch, us", one.case.title()), 60.0, found));
        }
    }
    (table, targets)
}

/// Returns the target for filling, from the first case in the pool. All cases fill their memory in the same
/// way.
fn fill_target(measured: &[Measured]) -> Option<Target> {
    let first = measured.iter().find(|one| one.case.tier == Tier::Pool)?;
    let filled = |runs: &[Run]| -> Vec<f64> {
        runs.iter().map(|run| run.outcome.number("filled_per_second")).collect()
    };
    let found = ratio(&filled(&first.farpage), &filled(&first.kernel)).median;
    Some(Target::at_least("filling beyond the budget, ratio to the kernel", 1.5, found))
}

/// Returns a chart of one tier's cases that write.
fn chart(tier: Tier, measured: &[Measured]) -> Chart {
    let mut chart = Chart {
        title: format!("The kernel's swap and Farpage, equal memory: {}", tier.name()),
        unit: "touches/s".to_owned(),
        groups: Vec::new(),
        series: vec![("kernel".to_owned(), Vec::new()), ("farpage".to_owned(), Vec::new())],
    };
    for one in measured.iter().filter(|one| one.case.tier == tier && one.case.write_percent > 0) {
        for part in one.case.parts() {
            chart.groups.push(one.case.short_name(part));
            for ((_, values), runs) in chart.series.iter_mut().zip([&one.kernel, &one.farpage]) {
                values.push(Sample::of(&rates(runs, part)).median);
            }
        }
    }
    chart
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load;

    /// The readahead of `disk, mixed` was chosen by a part that the load doesn't have. Every speed was then
    /// no number, and the first readahead of the list was the best.
    #[test]
    fn kernel_settings_are_chosen_by_a_part_that_the_load_has() {
        let bank = std::env::temp_dir().join(format!("farpage-parts-{}", std::process::id()));
        std::fs::write(&bank, [7; 4 * 4096]).unwrap();
        for case in cases() {
            let settings = load::Settings {
                bytes: (case.threads as u64) << 16,
                threads: case.threads,
                seconds: 0.001,
                pattern: Some(case.pattern.to_owned()),
                contents: bank.to_str().map(str::to_owned),
                ..load::Settings::default()
            };
            let found = touch::touch(&settings).unwrap();
            let rate = |part: &str| found["parts"][part]["touches_per_second"].as_f64();
            assert!(rate(case.choosing_part()) > Some(0.0), "{}: {found}", case.title());
            assert!(case.parts().iter().all(|part| rate(part) > Some(0.0)), "{}: {found}", case.title());
            assert_eq!(found["parts"].as_object().map(|parts| parts.len()), Some(case.parts().len()));
        }
        std::fs::remove_file(bank).unwrap();
    }

    /// A speed that is no number was neither slower nor faster than another one.
    #[test]
    fn speed_that_is_no_number_is_an_error() {
        let settings = [3, 0].map(|page_cluster| Setting { codec: None, page_cluster });
        let found = try_in_turns(settings.to_vec(), 1, |_| Ok(f64::NAN));
        assert!(found.unwrap_err().why().contains("no speed"), "a speed that wasn't measured");
    }

    /// Deflate was once taken for the best codec, because each other codec had a bad moment.
    #[test]
    fn settings_are_tried_in_turns_but_for_hopeless_ones() {
        let setting = |page_cluster| Setting { codec: None, page_cluster };
        // The results of each setting's runs: a bad moment, none, far slower, killed at first, always killed.
        let found: [&[Option<f64>]; 5] = [
            &[Some(3.0), Some(10.0), Some(11.0)],
            &[Some(9.0), Some(9.5), Some(9.0)],
            &[Some(2.0)],
            &[None, Some(4.0), Some(5.0)],
            &[None, None, None],
        ];
        let mut runs = [0; 5];
        let all = try_in_turns((0..5).map(setting).collect(), 5, |setting| {
            let at = setting.page_cluster as usize;
            runs[at] += 1;
            found[at][runs[at] - 1].ok_or_else(|| Failed::Killed("killed".to_owned()))
        });
        let medians = [(0, 10.0), (1, 9.0), (2, 2.0), (3, 4.5)].map(|(at, speed)| (setting(at), speed));
        assert_eq!((all.unwrap(), runs), (medians.to_vec(), [3, 3, 1, 3, 3]));
    }

    #[test]
    fn what_is_killed_with_every_setting_is_tried_once() {
        let settings = [0, 3].map(|page_cluster| Setting { codec: None, page_cluster });
        let mut runs = 0;
        let all = try_in_turns(settings.to_vec(), 5, |_| {
            runs += 1;
            Err(Failed::Killed("killed".to_owned()))
        });
        assert_eq!((all, runs), (Err(Failed::Killed("killed".to_owned())), 2));
    }

    /// A wrong byte under one setting was taken for a setting with which the kernel doesn't do.
    #[test]
    fn failure_that_is_no_kill_ends_the_trials() {
        let settings = [0, 3].map(|page_cluster| Setting { codec: None, page_cluster });
        let mut runs = 0;
        let wrong = Failed::Otherwise("page 7 is wrong".to_owned());
        let all = try_in_turns(settings.to_vec(), 5, |_| {
            runs += 1;
            Err(wrong.clone())
        });
        assert_eq!((all, runs), (Err(wrong), 1));
    }

    #[test]
    fn only_kills_are_made_again_and_not_for_ever() {
        let (mut killed, mut runs) = (0, 0);
        let mut after = |last: Result<(), Failed>, kills| {
            runs = 0;
            unless_killed(&mut killed, || {
                runs += 1;
                if runs <= kills { Err(Failed::Killed("SIGKILL".to_owned())) } else { last.clone() }
            })
        };
        assert_eq!(after(Ok(()), 3), Ok(()));
        // Farpage's program may have ended by SIGKILL, too.
        let ours = Failed::Otherwise("ended with signal: 9 (SIGKILL)".to_owned());
        assert_eq!(after(Err(ours.clone()), 0), Err(ours));
        assert!(matches!(after(Ok(()), 100), Err(Failed::Killed(_))));
        assert_eq!((killed, runs), (10, 8));
    }

    /// A load that failed late took the figures of all loads before with it. So did a step that couldn't be
    /// undone.
    #[test]
    fn figures_before_a_failure_are_reported_with_the_failure() {
        let found = |all: &[&str], restored: Result<(), String>| {
            let measure = |one: String| match one.as_str() {
                "killed" => (None, Some(Failed::Killed("no memory".to_owned()))),
                "wrong" => (None, Some(Failed::Otherwise("a wrong byte".to_owned()))),
                "partly" => (Some(one), Some(Failed::Otherwise("interrupted".to_owned()))),
                _ => (Some(one), None),
            };
            let all = all.iter().map(|name| (*name).to_owned()).collect();
            Found::of(all, String::clone, measure)
                .report(restored, |measured| Report { published: measured.to_vec(), ..Report::new("kernel") })
        };
        let report = found(&["a", "killed", "b", "wrong", "c"], Err("swapoff".to_owned())).unwrap();
        assert_eq!(report.published, ["a", "b"]);
        assert_eq!(report.notes, ["killed: no memory"]);
        assert_eq!(report.failed.as_deref(), Some("wrong: a wrong byte; swapoff"));
        let report = found(&["a", "partly", "c"], Ok(())).unwrap();
        assert_eq!((report.published.len(), report.failed.as_deref()), (2, Some("partly: interrupted")));
        assert_eq!(found(&["a"], Ok(())).unwrap().failed, None);
        assert_eq!(
            found(&["killed", "wrong", "a"], Ok(())).unwrap_err(),
            "killed: no memory; wrong: a wrong byte"
        );
    }

    /// A quick run knew two cases only, and said of every other one that there is none.
    #[test]
    fn quick_run_has_the_first_case_of_each_tier_that_was_asked_for() {
        let titles = |effort, only| -> Vec<String> { chosen(effort, only).iter().map(Case::title).collect() };
        let first = ["pool, random, 1 thread, 20 % writes", "disk, random, 1 thread, 20 % writes"];
        assert_eq!(titles(Effort::Quick, None), first);
        let mixed = ["pool, mixed, 2 threads, 20 % writes", "disk, mixed, 2 threads, 20 % writes"];
        assert_eq!(titles(Effort::Quick, Some("mixed")), mixed);
        assert_eq!(titles(Effort::Full, Some("mixed")), mixed);
        assert_eq!(titles(Effort::Full, None).len(), cases().len());
        assert!(titles(Effort::Quick, Some("nonsense")).is_empty());
    }

    /// `--only disk` chose a codec that it didn't use, by a load from the disk, and failed where there is no
    /// zswap.
    #[test]
    fn codec_is_chosen_by_the_first_case_from_the_pool_if_there_is_one() {
        let first = |only| first_with_codec(&chosen(Effort::Full, Some(only))).map(Case::title);
        assert_eq!(first("zipf").as_deref(), Some("pool, zipf, 1 thread, 20 % writes"));
        assert_eq!(first("disk"), None);
    }
}
