//! One program under the kernel's own swap, under Farpage, and without a limit, in turns. `bench programs`
//! and `bench command` use the contest.
//!
//! The program runs to its end, and its result is compared. The result is the program's output, or the
//! answers that a client got. The kernel has the setting that is best for the program. Runs before the
//! counted ones find that setting.

use crate::kernel::machine::{self, Machine, PAGE_CLUSTERS, PoolPeak, Setting};
use crate::kernel::{Failed, NOTE_CPU, try_in_turns, unless_killed};
use crate::live::{self, Outcome, Place};
use crate::measure::{Sample, ratio};
use crate::report::{Cell, Chart, Table};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
/// The option of `farpage run` that goes with no swap directory.
const NO_DISK: &str = "--no-disk";
/// Seconds of a run below which its time says little: it is taken every 20 ms.
const SHORT_SECONDS: f64 = 1.0;

/// Gives a program work from outside, ends it, and returns the answers. Gets the program's directory, and the
/// bytes of memory that the program is to fill.
pub type Client = fn(&Path, u64) -> Result<String, String>;

/// A program to measure.
pub struct Job {
    /// Name in the report.
    pub name: String,
    /// The program and its arguments.
    pub words: Vec<String>,
    /// The program's client, with the client's bytes.
    pub client: Option<(Client, u64)>,
    /// Returns the program's result.
    pub result: fn(&Outcome) -> Result<String, String>,
}

/// Options of `farpage run` that are measured.
pub struct Entrant {
    /// Name in the report.
    pub name: String,
    /// The options, beside the budget and the swap directory.
    pub options: Vec<String>,
}

/// The runs of one program, round by round.
pub struct Measured {
    /// Name of the program.
    pub name: String,
    /// The memory that the kernel's side had, in bytes.
    pub ram: u64,
    /// The kernel's setting. None if the kernel can't run the program with so little memory.
    pub setting: Option<Setting>,
    /// Runs under the kernel's swap.
    pub kernel: Vec<Run>,
    /// Runs under Farpage, by entrant.
    pub farpage: Vec<(String, Vec<Run>)>,
    /// Runs without a limit.
    pub unlimited: Vec<Run>,
    /// Runs that the kernel ended because it found no memory. The runs were repeated.
    pub killed: usize,
    /// Smaller limits that were tried before, in bytes. With them the kernel killed the program under every
    /// setting.
    pub killed_with: Vec<u64>,
}

impl Measured {
    /// Returns the number of rounds in which everybody ran.
    pub fn rounds(&self) -> usize {
        let kernel = self.setting.as_ref().map(|_| self.kernel.len());
        self.farpage.iter().map(|(_, runs)| runs.len()).chain(kernel).min().unwrap_or(0)
    }

    /// Returns the ratios of the kernel's time to that of each entrant.
    pub fn speeds(&self) -> Vec<Sample> {
        self.farpage.iter().map(|(_, runs)| ratio(&seconds(&self.kernel), &seconds(runs))).collect()
    }

    fn truncate(&mut self) {
        let complete = self.rounds();
        self.kernel.truncate(complete);
        self.farpage.iter_mut().for_each(|(_, runs)| runs.truncate(complete));
    }
}

/// One run.
pub struct Run {
    /// What the run gave and took.
    pub outcome: Outcome,
    /// Peak of the pool, in bytes.
    pub pool: u64,
    /// Pages written to disk.
    pub written: u64,
}

impl Run {
    /// Makes a run without a limit.
    pub const fn unlimited(outcome: Outcome) -> Run {
        Run { outcome, pool: 0, written: 0 }
    }

    fn seconds(&self) -> f64 {
        self.outcome.wall.as_secs_f64()
    }
}

/// The two sides, set up.
pub struct Contest {
    /// The kernel's side.
    pub machine: Machine,
    /// The directory in which programs run.
    pub place: PathBuf,
    /// The directory to which the kernel and Farpage swap.
    pub directory: PathBuf,
    /// Farpage's side.
    pub entrants: Vec<Entrant>,
    /// Counted runs of each.
    pub rounds: usize,
}

impl Contest {
    /// Measures a program with `ram` bytes. Returns the complete rounds, if there are any, and the failure
    /// that ended them. `unlimited` has runs that were made before. Later rounds add theirs.
    pub fn measure_within(
        &mut self,
        job: &Job,
        ram: u64,
        result: &str,
        unlimited: &mut Vec<Run>,
    ) -> (Option<Measured>, Option<Failed>) {
        let limited = self.machine.limits_to(ram).map_err(Failed::from);
        match limited.and_then(|()| self.best_setting(job, result)) {
            Ok(setting) => self.measure_as(Some(setting), job, ram, result, unlimited),
            Err(failed) => (None, Some(failed)),
        }
    }

    /// Does the same with this setting of the kernel, or without the kernel's side.
    pub fn measure_as(
        &mut self,
        setting: Option<Setting>,
        job: &Job,
        ram: u64,
        result: &str,
        unlimited: &mut Vec<Run>,
    ) -> (Option<Measured>, Option<Failed>) {
        let mut measured = Measured {
            name: job.name.clone(),
            ram,
            setting,
            kernel: vec![],
            farpage: self.entrants.iter().map(|entrant| (entrant.name.clone(), vec![])).collect(),
            unlimited: vec![],
            killed: 0,
            killed_with: vec![],
        };
        let failed = (0..self.rounds)
            .find_map(|round| self.round(job, &mut measured, result, (round, &mut *unlimited)).err());
        measured.truncate();
        if measured.rounds() == 0 {
            return (None, failed);
        }
        measured.unlimited = std::mem::take(unlimited);
        (Some(measured), failed)
    }

    fn round(
        &mut self,
        job: &Job,
        measured: &mut Measured,
        result: &str,
        (round, unlimited): (usize, &mut Vec<Run>),
    ) -> Result<(), Failed> {
        let mut pool = 0;
        // The kernel runs first, because the size of its pool decides how much memory Farpage gets.
        if let Some(setting) = measured.setting.clone() {
            let kernel = unless_killed(&mut measured.killed, || self.kernel(job, &setting, result))?;
            pool = if self.machine.pool_is_within() { 0 } else { kernel.pool };
            measured.kernel.push(kernel);
        }
        for at in 0..self.entrants.len() {
            // No entrant always follows the same rival.
            let who = (at + round) % self.entrants.len();
            let run = self.farpage(job, measured.ram + pool, &self.entrants[who], result)?;
            measured.farpage[who].1.push(run);
        }
        if round >= unlimited.len() {
            unlimited.push(Run::unlimited(same(self.once(job, Place::Alone)?, result)?));
        }
        Ok(())
    }

    /// Returns the setting with which the kernel runs the program best. Each codec of zswap, and no zswap, is
    /// tried without readahead first. Then the best of these, and no zswap, are tried with each readahead
    /// window. Codecs come first because windows take memory: with windows the kernel kills redis in some
    /// runs, whatever the codec.
    fn best_setting(&mut self, job: &Job, result: &str) -> Result<Setting, Failed> {
        let codecs = self.machine.codecs().into_iter().map(Some).chain([None]);
        let without_readahead = codecs.map(|codec| Setting { codec, page_cluster: 0 });
        let (least, best) = self.best_of(job, without_readahead.collect(), result)?;
        let codecs = [Some(best.codec.clone()), best.codec.as_ref().map(|_| None)];
        let rest = codecs.into_iter().flatten().flat_map(|codec| {
            let windows = PAGE_CLUSTERS.into_iter().filter(|page_cluster| *page_cluster > 0);
            windows.map(move |page_cluster| Setting { codec: codec.clone(), page_cluster })
        });
        match self.best_of(job, rest.collect(), result) {
            Ok((seconds, other)) if seconds < least => Ok(other),
            Ok(_) | Err(Failed::Killed(_)) => Ok(best),
            Err(failed) => Err(failed),
        }
    }

    fn best_of(&mut self, job: &Job, settings: Vec<Setting>, result: &str) -> Result<(f64, Setting), Failed> {
        let tried = try_in_turns(settings, self.rounds, |setting| {
            self.kernel(job, setting, result).map(|run| run.seconds().recip())
        })?;
        let fastest = tried.into_iter().max_by(|(_, one), (_, other)| one.total_cmp(other));
        fastest
            .map(|(setting, speed)| (speed.recip(), setting))
            .ok_or_else(|| "nothing to try".to_owned().into())
    }

    fn kernel(&mut self, job: &Job, setting: &Setting, result: &str) -> Result<Run, Failed> {
        self.machine.swaps_as(setting)?;
        let (before, killed) = (machine::pages_written(), self.machine.killed());
        let mut pool = PoolPeak::begin();
        let members = self.machine.members();
        // A program whose worker was killed may wait for the worker for ever.
        let found = self.watched(job, Place::Within(&members), || {
            pool.look();
            if self.machine.killed() > killed { Err("a process of it was killed".to_owned()) } else { Ok(()) }
        });
        let written = machine::pages_written().saturating_sub(before);
        if self.machine.killed() > killed {
            return Err(Failed::Killed("the kernel found no memory, and killed a process of it".to_owned()));
        }
        Ok(Run { outcome: same(found?, result)?, pool: pool.bytes(), written })
    }

    /// Runs a program under Farpage.
    pub fn farpage(&self, job: &Job, ram: u64, entrant: &Entrant, result: &str) -> Result<Run, String> {
        let (ram, swap) = (ram.to_string(), self.directory.display().to_string());
        let mut options = vec!["--ram", &ram];
        if !entrant.options.iter().any(|option| option == NO_DISK) {
            options.extend(["--swap", &swap]);
        }
        options.extend(entrant.options.iter().map(String::as_str));
        let outcome = same(self.once(job, Place::Under(&options))?, result)?;
        let number = |what: &str, name: &str| outcome.stats[what][name].as_u64().unwrap_or(0);
        let (pool, written) = (number("gauges", "pool_peak"), number("counters", "area_slots"));
        Ok(Run { outcome, pool, written })
    }

    /// Runs a program once, not under the kernel's swap. Returns the outcome and the program's result.
    pub fn once(&self, job: &Job, place: Place<'_>) -> Result<(Outcome, String), String> {
        let killed = machine::killed();
        let found = self.watched(job, place, || Ok(()))?;
        // The program may have ended regularly although a process was killed, with half of its work done.
        let is_whole = machine::killed() == killed;
        is_whole
            .then_some(found)
            .ok_or_else(|| "the machine has too little memory: the kernel has killed a process".to_owned())
    }

    /// Runs a program to its end. Returns the outcome and the program's result.
    fn watched(
        &self,
        job: &Job,
        place: Place<'_>,
        mut watch: impl FnMut() -> Result<(), String>,
    ) -> Result<(Outcome, String), String> {
        let words: Vec<&str> = job.words.iter().map(String::as_str).collect();
        std::thread::scope(|scope| {
            let mut client =
                job.client.map(|(client, bytes)| scope.spawn(move || client(&self.place, bytes)));
            let mut got = String::new();
            let outcome = live::run(place, &words, &self.place, || {
                watch()?;
                if let Some(ended) = client.take_if(|client| client.is_finished()) {
                    got = ended.join().map_err(|_| "its client has panicked".to_owned())??;
                }
                Ok(())
            })?;
            if let Some(client) = client {
                got = client.join().map_err(|_| "its client has panicked".to_owned())??;
            }
            let result = (job.result)(&outcome)? + &got;
            // The output may be large.
            Ok((Outcome { printed: Vec::new(), ..outcome }, result))
        })
    }
}

fn same((outcome, found): (Outcome, String), wanted: &str) -> Result<Outcome, String> {
    if found == wanted {
        Ok(outcome)
    } else {
        Err(format!("its result is `{found}`, and `{wanted}` without a budget"))
    }
}

/// Returns a short text that differs for each output.
pub fn digest(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{} bytes, {:016x}", bytes.len(), hasher.finish())
}

/// Returns the wall times of some runs.
fn seconds(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(Run::seconds).collect()
}

/// Returns the table of some programs: who ran, how long, and with what.
pub fn table(measured: &[Measured]) -> Table {
    let columns =
        ["program", "MiB", "who", "wall s", "ratio", "CPU s", "pool MiB", "to disk MiB", "major faults"];
    let mut table = Table::new("wall time to the end", &columns);
    for one in measured {
        let row = |who: &str, runs: &[Run], speed: Option<Sample>| {
            let median = |of: &dyn Fn(&Run) -> f64| {
                Cell::from(Sample::of(&runs.iter().map(of).collect::<Vec<_>>()).median)
            };
            vec![
                one.name.as_str().into(),
                ((one.ram / MIB) as usize).into(),
                who.into(),
                Sample::of(&seconds(runs)).into(),
                speed.map_or(Cell::Nothing, Cell::from),
                median(&|run| run.outcome.cpu_seconds),
                median(&|run| run.pool as f64 / MIB as f64),
                median(&|run| run.written as f64 * 4096.0 / MIB as f64),
                median(&|run| run.outcome.major_faults as f64),
            ]
        };
        if let Some(setting) = &one.setting {
            table.row(row(&format!("kernel, {setting}"), &one.kernel, None));
        }
        for ((who, runs), speed) in one.farpage.iter().zip(one.speeds()) {
            table.row(row(who, runs, one.setting.as_ref().map(|_| speed)));
        }
        table.row(row("unlimited", &one.unlimited, None));
    }
    table
}

/// Returns a chart of the same. All programs have the same entrants.
pub fn chart(title: &str, measured: &[Measured]) -> Chart {
    let of = |runs: &dyn Fn(&Measured) -> &[Run]| -> Vec<f64> {
        measured.iter().map(|one| Sample::of(&seconds(runs(one))).median).collect()
    };
    let mut series = Vec::new();
    if measured.iter().any(|one| one.setting.is_some()) {
        series.push(("kernel".to_owned(), of(&|one| &one.kernel)));
    }
    let entrants = measured.first().map_or(&[][..], |one| &one.farpage);
    for (at, (name, _)) in entrants.iter().enumerate() {
        series.push((name.clone(), of(&|one| &one.farpage[at].1)));
    }
    series.push(("unlimited".to_owned(), of(&|one| &one.unlimited)));
    Chart {
        title: title.to_owned(),
        unit: "seconds".to_owned(),
        groups: measured.iter().map(|one| one.name.clone()).collect(),
        series,
    }
}

/// Returns what a reader of the table must know.
pub fn notes(measured: &[Measured], rounds: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if measured.iter().any(|one| one.setting.is_some()) {
        notes.push(
            "the kernel has what it does best with of its codecs for zswap, no zswap, and page-cluster 3, 0 and 5, tried before"
                .to_owned(),
        );
    }
    notes.extend([
        "all results are those of the run without a limit".to_owned(),
        "the cgroup's limit counts what the kernel keeps for the program, too (tables of pages, files that it reads and writes)"
            .to_owned(),
        NOTE_CPU.to_owned(),
    ]);
    let is_short = |one: &Measured| one.unlimited.iter().any(|run| run.seconds() < SHORT_SECONDS);
    if measured.iter().any(is_short) {
        notes.push("times are taken every 20 ms: those of less than a second say little".to_owned());
    }
    for one in measured.iter().filter(|one| one.rounds() < rounds) {
        notes.push(format!("{}: {} of {rounds} rounds", one.name, one.rounds()));
    }
    for one in measured.iter().filter(|one| one.killed > 0) {
        notes.push(format!("{}: {} runs that the kernel killed were made again", one.name, one.killed));
    }
    notes
}
