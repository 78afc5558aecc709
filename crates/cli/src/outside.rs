//! Processes of the run that have no budget: programs that were executed and have not joined.
//!
//! Whoever executes a program leaves a note in the session, which the program takes away when it joins. What is left after a
//! second, or when the process has ended, is told of with the reason, as far as one can be found, and its peak.

use crate::program;
use crate::session::Shared;
use crate::sys;
use crate::totals::Member;
use farpage::session::SESSION_ENV;
use farpage::started::{PATH_BYTES_KEPT, Program};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Looks, ten a second, after which a program that lives has had the time to join.
const PATIENCE: u32 = 10;
/// Processes that are remembered.
const KNOWN_MAX: usize = 256;
/// Characters of a program's name that the kernel keeps.
const COMM_BYTES: usize = 15;

/// One process without a budget.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// What it executed: as it was called.
    pub path: String,
    /// Why it has no budget, if that was found.
    pub why: Option<String>,
    /// The most memory in RAM that it was seen with, in bytes; 0 if it ended before anybody looked.
    pub peak: u64,
}

/// Watches the notes.
#[derive(Default)]
pub struct Outside {
    /// By note: the process, and how often it was looked at.
    waiting: BTreeMap<usize, (Process, u32)>,
    known: BTreeMap<u32, Process>,
    more: u64,
}

/// All that was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The largest first.
    pub processes: Vec<Process>,
    /// Others, of which no more is known.
    pub more: u64,
}

impl Outside {
    /// Looks once more: ten times a second, and at the end.
    pub fn look(&mut self, shared: &Shared, alive: &BTreeMap<u32, Member>) {
        let started = &shared.session().started;
        let notes: BTreeMap<usize, Program> = started.waiting().collect();
        // It has joined, or the call has failed.
        self.waiting.retain(|at, (process, _)| notes.get(at).is_some_and(|note| note.process == process.pid));
        for (at, note) in notes {
            let (process, looks) = self.waiting.entry(at).or_insert_with(|| (Process::of(&note), 0));
            process.look(&note);
            *looks += 1;
            if *looks > PATIENCE || sys::is_gone(note.process) {
                let process = std::mem::take(process);
                self.waiting.remove(&at);
                started.take_back(at, note.process);
                self.keep(process);
            }
        }
        // On a busy machine it may join late.
        self.known.retain(|pid, _| !alive.contains_key(pid));
        self.known.values_mut().for_each(Process::measure);
    }

    fn keep(&mut self, process: Process) {
        if self.known.len() < KNOWN_MAX {
            self.known.insert(process.pid, process);
        } else {
            self.more += 1;
        }
    }

    /// What was seen. Who lives and still has the time to join is left out: the program has left it behind.
    pub fn report(mut self, shared: &Shared) -> Report {
        let waiting = std::mem::take(&mut self.waiting).into_values();
        waiting.filter(|(process, _)| sys::is_gone(process.pid)).for_each(|(process, _)| self.keep(process));
        let mut processes: Vec<_> = self.known.into_values().collect();
        processes.sort_by_key(|process| std::cmp::Reverse(process.peak));
        Report { processes, more: self.more.saturating_add(shared.session().started.missed()) }
    }
}

impl Process {
    fn of(note: &Program) -> Process {
        let path = String::from_utf8_lossy(note.path()).into_owned();
        Process { pid: note.process, path, ..Process::default() }
    }

    /// Looks for the reason, and at its memory.
    fn look(&mut self, note: &Program) {
        let is_it = self.is_it();
        if is_it {
            self.measure();
        }
        if self.why.is_none() {
            let path = Path::new(OsStr::from_bytes(note.path()));
            let file = is_it.then(|| PathBuf::from(format!("/proc/{}/exe", self.pid)));
            let named = (path.is_absolute() && note.path().len() < PATH_BYTES_KEPT).then(|| path.to_owned());
            let refused = file.or(named).and_then(|file| program::refusal(&file, &self.path));
            self.why = refused.or_else(|| self.chosen(is_it));
        }
    }

    /// Whether the process of that number executes the program now. In another pid namespace the number is somebody else's.
    fn is_it(&self) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        let comm = fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        let short = String::from_utf8_lossy(&name.as_bytes()[..name.len().min(COMM_BYTES)]).into_owned();
        !short.is_empty() && comm.trim_end_matches('\n') == short
    }

    /// What its variables say, or whose it is.
    fn chosen(&self, is_it: bool) -> Option<String> {
        let place = PathBuf::from(format!("/proc/{}", self.pid));
        if !is_it {
            return None;
        }
        if fs::metadata(&place)
            .is_ok_and(|place| std::os::unix::fs::MetadataExt::uid(&place) != sys::effective_user())
        {
            return Some("it belongs to another user".into());
        }
        let environment = fs::read(place.join("environ")).ok()?;
        let value = |name: &str| {
            let is_its = |entry: &&[u8]| {
                entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'='))
            };
            let entry = environment.split(|byte| *byte == 0).find(is_its)?;
            Some(entry[name.len() + 1..].to_vec())
        };
        match (value("LD_PRELOAD"), value(SESSION_ENV)) {
            (Some(libraries), _) if libraries.is_empty() => Some("LD_PRELOAD is empty".into()),
            (_, Some(session)) if session.is_empty() => Some(format!("{SESSION_ENV} is empty")),
            (_, Some(session)) if !session.starts_with(own_sessions().as_bytes()) => {
                Some("it is in a run of its own".into())
            }
            _ => None,
        }
    }

    fn measure(&mut self) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        self.peak = self.peak.max(kib.unwrap_or(0).saturating_mul(1024));
    }
}

/// How the paths of this supervisor's sessions begin.
fn own_sessions() -> String {
    format!("/proc/{}/", std::process::id())
}
