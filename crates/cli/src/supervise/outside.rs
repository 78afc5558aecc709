//! Processes of the run that have no budget: programs that were executed and have not joined.
//!
//! A process that executes a program leaves a note in the session. The program takes the note away when it
//! joins. A note that stays for five seconds, or whose process has ended, is told of with the size and, if
//! one was found, the reason.

use crate::host::sys;
use crate::program;
use crate::supervise::descendants::{self, Descendants};
use crate::supervise::session::{Shared, mapped_session, own_session};
use crate::supervise::totals::Member;
use crate::text::say;
use farpage_runtime::session::started::{PATH_BYTES_KEPT, Program};
use farpage_runtime::session::{PROCESSES_MAX, SESSION_ENV};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Looks, ten a second, after which a living program has had the time to join: on a busy machine
/// some take seconds.
const PATIENCE: u32 = 50;
/// Ancestors of a process that are looked at.
const ANCESTORS_MAX: usize = 64;
/// Most processes that are remembered.
const KNOWN_MAX: usize = 256;
/// Reasons given for a process that was found below the program, if there is no other reason.
const ELSEWHERE: &str = "in a pid namespace of its own";
const BEYOND: &str = "one of more than 256 processes, or made by a bare clone";
const NO_NOTE: &str = "made by a bare clone, or in another way that Farpage doesn't see";
const LEFT: &str = "Farpage doesn't limit it any more";
/// Characters of a program's name that the kernel keeps in `comm`.
const COMM_BYTES: usize = 15;

/// A process without a budget.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// The process's id.
    pub pid: u32,
    /// Path of the program, as the process executed it.
    pub path: String,
    /// Why the process has no budget, if the reason was found.
    pub why: Option<String>,
    /// The most memory in RAM that the process was seen with, in bytes; 0 if it ended before anybody looked.
    pub peak: u64,
    /// The anonymous memory in RAM that the process has, in bytes.
    anonymous: u64,
    /// When the process began, in the kernel's ticks; 0 if it was never seen.
    began: u64,
}

/// Watches the notes.
#[derive(Default)]
pub struct Outside {
    /// The process of each note, and how often it was looked at.
    waiting: BTreeMap<usize, (Process, u32)>,
    known: BTreeMap<u32, Process>,
    more: u64,
    descendants: Descendants,
    /// Ids, in their own namespaces, of processes that were found. Notes have these ids.
    inner: BTreeSet<u32>,
    /// Whether a look found as many processes as the session has records.
    was_full: bool,
}

/// The result of all looks.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The processes, the largest first.
    pub processes: Vec<Process>,
    /// Further processes, of which no more is known.
    pub more: u64,
    /// Programs that were not followed, because too many started at once. Most of them have joined.
    pub missed: u64,
    /// Whether there were as many processes at once as can be managed. A fork's child beyond that has no
    /// budget, and leaves no note.
    pub was_full: bool,
}

impl Outside {
    /// Looks once more: ten times a second, and at the end.
    pub fn look(&mut self, shared: &Shared, members: &BTreeMap<u32, Member>) {
        self.was_full |= members.values().filter(|member| member.is_alive).count() >= PROCESSES_MAX;
        let started = &shared.session().started;
        let notes: BTreeMap<usize, Program> = started.waiting().collect();
        // The note is gone: the program has joined, or the call has failed.
        self.waiting.retain(|at, (process, _)| notes.get(at).is_some_and(|note| note.process == process.pid));
        for (at, note) in notes {
            let (process, looks) = self.waiting.entry(at).or_insert_with(|| (Process::of(&note), 0));
            process.look();
            *looks += 1;
            // A process that was never seen may have another id here, so it gets the time to join.
            let has_ended = process.began != 0 && !process.is_there();
            if *looks > PATIENCE || has_ended {
                let process = std::mem::take(process);
                self.waiting.remove(&at);
                // If the note is gone, the program has joined meanwhile.
                if started.take_back(at, note.process) {
                    self.keep(process);
                }
            }
        }
        // On a busy machine a process may join late.
        self.known.retain(|pid, process| {
            !(members.get(pid).is_some_and(|member| member.is_limited) && process.is_there())
        });
        self.known.values_mut().for_each(Process::measure);
    }

    /// Looks once more at the program and below it, for processes that have left no note, and for those that
    /// Farpage has left.
    pub fn look_below(&mut self, program: u32, members: &BTreeMap<u32, Member>, now: Instant) {
        let is_noted = |pid| self.waiting.values().any(|(process, _)| process.pid == pid);
        let is_left = |pid: u32| members.get(&pid).is_some_and(Member::is_left);
        // A note with the id that a process has in another namespace gives the process no time to join:
        // from there it never joins.
        let is_known = |pid, number| {
            members.get(&number).is_some_and(|member| member.is_limited)
                || number == pid && is_noted(pid)
                || self.known.get(&pid).is_some_and(Process::is_there)
                || pid == program && !is_left(pid)
        };
        for pid in self.descendants.look(program, now, is_known) {
            let why = match () {
                () if is_left(pid) => LEFT,
                () if self.was_full => BEYOND,
                () => NO_NOTE,
            };
            if let Some(process) = Process::found(pid, why) {
                self.keep(process);
            }
        }
    }

    /// Returns the anonymous memory of all living processes without a budget, in bytes.
    pub fn anonymous_bytes(&self) -> u64 {
        self.alive().map(|process| process.anonymous).sum()
    }

    /// Returns the names of some living processes, and the number of the rest.
    pub fn names(&self) -> String {
        const NAMES_MAX: usize = 3;
        let name = |process: &Process| format!("{} (pid {})", say::harmless(&process.path), process.pid);
        let names: Vec<_> = self.alive().take(NAMES_MAX).map(name).collect();
        let more = match self.alive().count().saturating_sub(names.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{}{more}", names.join(", "))
    }

    /// Kills every known process without a budget that still runs.
    pub fn kill(&self) {
        for process in self.alive() {
            // The descriptor means this process even if another process gets its id meanwhile.
            let opened = sys::open_process(process.pid);
            if process.is_there() && is_of_run(process.pid) {
                match opened {
                    Ok(opened) => sys::send_signal_to(&opened, libc::SIGKILL),
                    Err(_) => sys::send_signal(process.pid, libc::SIGKILL),
                }
            }
        }
    }

    /// Yields processes that live and are of this run. A note says only what some process of the
    /// run has written.
    fn alive(&self) -> impl Iterator<Item = &Process> {
        self.known.values().filter(|process| process.is_there() && is_of_run(process.pid))
    }

    /// Remembers a process. The largest are kept, and those that live.
    fn keep(&mut self, process: Process) {
        if process.began == 0 && self.inner.contains(&process.pid) {
            return;
        }
        // In another namespace the note of the process has another id, under which the process can't be
        // found here.
        if let Some(inner) = descendants::number_elsewhere(process.pid).filter(|_| process.is_there()) {
            self.inner.insert(inner);
            self.known.retain(|known, process| *known != inner || process.began != 0);
        }
        self.known.insert(process.pid, process);
        if self.known.len() > KNOWN_MAX {
            let gone = self.known.values().filter(|process| !process.is_there());
            let smallest = gone.min_by_key(|process| process.peak).or_else(|| self.known.values().next());
            let pid = smallest.map_or(0, |process| process.pid);
            self.known.remove(&pid);
            self.more += 1;
        }
    }

    /// Returns what was seen. A process that lives and may still join is left out: the program has left it
    /// behind. A process with a reason never joins.
    pub fn report(&mut self, shared: &Shared) -> Report {
        let waiting = std::mem::take(&mut self.waiting).into_values().map(|(process, _)| process);
        let is_outside = |process: &Process| process.why.is_some() || sys::is_gone(process.pid);
        waiting.filter(is_outside).for_each(|process| self.keep(process));
        let mut processes: Vec<_> = self.known.values().cloned().collect();
        processes.sort_by_key(|process| std::cmp::Reverse(process.peak));
        let missed = shared.session().started.missed();
        Report { processes, more: self.more, missed, was_full: self.was_full }
    }
}

impl Process {
    fn of(note: &Program) -> Process {
        let path = String::from_utf8_lossy(note.path()).into_owned();
        Process { pid: note.process, path, ..Process::default() }
    }

    /// Returns a process that has left no note. `unknown` is the reason if no other is found.
    fn found(pid: u32, unknown: &str) -> Option<Process> {
        let mut process = Process { pid, began: began(pid)?, ..Process::default() };
        process.path = process.file();
        process.look();
        process.why.get_or_insert_with(|| unknown.into());
        Some(process)
    }

    /// A process that was seen, for tests of the summary.
    #[cfg(test)]
    pub fn seen(pid: u32, path: &str, why: Option<&str>, peak: u64) -> Process {
        Process { pid, path: path.into(), why: why.map(str::to_owned), peak, began: 1, anonymous: 0 }
    }

    /// Returns the path of the program that the process executes now, or the process's name.
    fn file(&self) -> String {
        let executable = fs::read_link(self.place().join("exe")).map(PathBuf::into_os_string);
        let name = || fs::read(self.place().join("comm")).unwrap_or_default();
        let path = executable.map_or_else(|_| name().trim_ascii_end().to_vec(), OsString::into_vec);
        String::from_utf8_lossy(&path).into_owned()
    }

    fn place(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}", self.pid))
    }

    /// Looks for the reason, and at the memory of the process.
    fn look(&mut self) {
        if self.began == 0 && (self.executes_it() || self.is_elsewhere()) {
            self.began = began(self.pid).unwrap_or(0);
        }
        self.measure();
        if !self.is_there() {
            return;
        }
        if self.why.is_none() {
            self.why = self.reason();
        }
        // The note of a fork out of the run has the parent's program. What the child executes leaves no note
        // with an id that means the child here.
        if self.why.as_deref() == Some(ELSEWHERE) {
            let file = self.file();
            if !file.is_empty() {
                self.path = file;
            }
        }
    }

    /// Whether the process with that id is of this run, and in a pid namespace of its own.
    fn is_elsewhere(&self) -> bool {
        descendants::number_elsewhere(self.pid).is_some() && is_of_run(self.pid)
    }

    /// Whether the process with that id executes the program now. In another pid namespace the id belongs
    /// to another process.
    fn executes_it(&self) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or_default().as_bytes();
        let comm = fs::read(self.place().join("comm")).unwrap_or_default();
        // A note has only the beginning of a longer path.
        if self.path.len() >= PATH_BYTES_KEPT {
            let file = fs::read_link(self.place().join("exe")).unwrap_or_default();
            return file.as_os_str().as_encoded_bytes().starts_with(self.path.as_bytes());
        }
        !name.is_empty() && comm.strip_suffix(b"\n") == Some(&name[..name.len().min(COMM_BYTES)])
    }

    /// Whether the process lives: the same process, not another one with its id.
    fn is_there(&self) -> bool {
        self.began != 0 && began(self.pid) == Some(self.began) && !sys::is_gone(self.pid)
    }

    fn reason(&self) -> Option<String> {
        let place = self.place();
        if fs::metadata(&place).ok()?.uid() != sys::effective_user() {
            return Some("another user's".into());
        }
        program::kind(&place.join("exe"))
            .or_else(|| descendants::number_elsewhere(self.pid).map(|_| ELSEWHERE.into()))
            .or_else(|| self.chosen(&fs::read(place.join("environ")).ok()?))
    }

    /// Returns the reason that the variables of the process give.
    fn chosen(&self, environment: &[u8]) -> Option<String> {
        let value = |name: &str| {
            let entries = environment.split(|byte| *byte == 0);
            let mut values =
                entries.filter_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
            // The loader, too, takes the last one.
            values.next_back()
        };
        match (value("LD_PRELOAD"), value(SESSION_ENV)) {
            (Some(b""), _) => Some("LD_PRELOAD is empty".into()),
            (_, Some(b"")) => Some(format!("{SESSION_ENV} is empty")),
            (_, Some(session)) if !session.starts_with(own_sessions().as_bytes()) => {
                Some("in a run of its own".into())
            }
            _ => None,
        }
    }

    /// Returns the kernel's status of the process. A first thread that has ended has no memory any more, and
    /// then another thread tells.
    fn status(&self) -> String {
        let read = |place: PathBuf| fs::read_to_string(place.join("status")).unwrap_or_default();
        let has_memory = |status: &String| status.contains("\nRssAnon:");
        let first = read(self.place());
        if has_memory(&first) {
            return first;
        }
        let threads = fs::read_dir(self.place().join("task")).into_iter().flatten().flatten();
        threads.map(|thread| read(thread.path())).find(has_memory).unwrap_or(first)
    }

    fn measure(&mut self) {
        self.anonymous = 0;
        if self.is_there() {
            let status = self.status();
            let bytes = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
                kib.unwrap_or(0).saturating_mul(1024)
            };
            self.peak = self.peak.max(bytes("VmHWM:"));
            self.anonymous = bytes("RssAnon:");
        }
    }
}

/// Id of the process from which all other processes of the run descend, if that isn't this
/// supervisor; 0 otherwise.
static FIRST: AtomicU32 = AtomicU32::new(0);

/// Inode of this run's session; 0 if there is none yet.
static SESSION: AtomicU64 = AtomicU64::new(0);

/// Notes the session of this run.
pub fn session_is(shared: &Shared) {
    SESSION.store(shared.file().metadata().map_or(0, |found| found.ino()), Ordering::Relaxed);
}

/// Whether this supervisor stands beside the program.
pub fn stands_beside() -> bool {
    FIRST.load(Ordering::Relaxed) != 0
}

/// Notes that this supervisor stands beside the program.
pub fn is_beside(program: u32) {
    FIRST.store(program, Ordering::Relaxed);
}

/// Whether a process is of this run: it descends from this supervisor or the program beside it, or has the
/// run's session in its variables or mapped. Some programs write over their variables (postgres, redis).
pub fn is_of_run(pid: u32) -> bool {
    let has_session = || {
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let session = format!("{SESSION_ENV}={}", own_sessions());
        variables.split(|byte| *byte == 0).any(|entry| entry.starts_with(session.as_bytes()))
    };
    let has_mapped = || {
        let (proc, own) = (Path::new("/proc"), SESSION.load(Ordering::Relaxed));
        let mapped = mapped_session(proc, pid).ok().flatten();
        // Supervisors of the user's other runs have this session mapped, too.
        mapped.is_some_and(|(_, inode)| inode == own)
            && own_session(proc, pid).is_ok_and(|found| found.is_none())
    };
    let first = FIRST.load(Ordering::Relaxed);
    let is_root = |above: u32| above != 0 && (above == first || above == std::process::id());
    let mut ancestors = std::iter::successors(parent(pid), |pid| parent(*pid)).take(ANCESTORS_MAX);
    pid != 0 && pid == first || ancestors.any(is_root) || has_session() || has_mapped()
}

/// Returns the id of a process's parent.
pub fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
}

/// Returns when a process began, in ticks since the kernel's start.
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The 20th field behind the name, which may contain anything.
    stat.rsplit(") ").next()?.split(' ').nth(19)?.parse().ok()
}

/// Returns how the paths of this supervisor's sessions begin.
fn own_sessions() -> String {
    format!("/proc/{}/", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::session;
    use crate::supervise::totals::members;
    use farpage_runtime::session::Notice;
    use std::process::Command;
    use std::time::Duration;

    fn shared() -> Shared {
        Shared::new(session::tests::settings(), &[]).unwrap()
    }

    /// A program that joins and ends while it is looked at must not be told of.
    #[test]
    fn program_that_joins_is_not_outside_however_soon_it_ends() {
        let shared = shared();
        let started = &shared.session().started;
        let mut outside = Outside::default();
        // Ids that no process has.
        let [joined, ended] = [1 << 30, (1 << 30) + 1];
        started.executes(joined, b"/bin/joins").unwrap();
        started.executes(ended, b"/bin/ends").unwrap();
        outside.look(&shared, &members(&shared));
        started.joins(joined);
        (0..=PATIENCE).for_each(|_| outside.look(&shared, &members(&shared)));
        let report = outside.report(&shared);
        let left: Vec<_> = report.processes.iter().map(|process| (process.pid, process.peak)).collect();
        assert_eq!((left, report.missed), (vec![(ended, 0)], 0));
        assert_eq!(started.waiting().count(), 0, "the note is free for another");
    }

    /// Another process that has got the id by now must not be measured in place of the one that had it.
    #[test]
    fn process_is_measured_while_it_is_the_same_and_named_with_the_reason() {
        let shared = shared();
        let mut child = Command::new("sleep").arg("60").env("LD_PRELOAD", "").spawn().unwrap();
        // The kernel fills in the variables after the name.
        while fs::read(format!("/proc/{}/environ", child.id())).is_ok_and(|variables| variables.is_empty()) {
            std::thread::yield_now();
        }
        shared.session().started.executes(child.id(), b"/bin/sleep").unwrap();
        let mut outside = Outside::default();
        (0..=PATIENCE).for_each(|_| outside.look(&shared, &members(&shared)));
        let known = outside.known[&child.id()].clone();
        assert_eq!(known.why.as_deref(), Some("LD_PRELOAD is empty"));
        assert!(known.peak > 0 && known.is_there());
        assert!(!Process { began: known.began + 1, ..known.clone() }.is_there(), "another of that number");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!known.is_there());
        outside.look(&shared, &members(&shared));
        assert_eq!(outside.report(&shared).processes[0].peak, known.peak);
    }

    /// A filter of seccomp had ended the program's engine. The program then grew to many times the budget,
    /// and the summary and `--over-budget kill` knew nothing of that.
    #[test]
    fn program_that_farpage_has_left_is_told_of_and_one_that_has_just_not_joined_is_not() {
        let told = |notice: Option<Notice>| {
            let shared = shared();
            let mut child = Command::new("sleep").arg("60").spawn().unwrap();
            let record = &shared.session().processes[0];
            record.pid.store(child.id(), Ordering::Relaxed);
            notice.into_iter().for_each(|notice| record.notice(notice, 0));
            let (mut outside, start) = (Outside::default(), Instant::now());
            for second in 0..10 {
                let now = start + Duration::from_secs(second);
                outside.look(&shared, &members(&shared));
                outside.look_below(child.id(), &members(&shared), now);
            }
            let bytes = outside.anonymous_bytes();
            let why = outside.report(&shared).processes.first().and_then(|process| process.why.clone());
            child.kill().unwrap();
            child.wait().unwrap();
            (why, bytes > 0)
        };
        assert_eq!(told(Some(Notice::Retired)), (Some(LEFT.to_owned()), true));
        assert_eq!(told(None), (None, false));
    }

    /// The kernel calls such a process a zombie, and its first thread has no memory. Its other threads go on.
    #[test]
    fn process_whose_first_thread_has_ended_is_there_and_has_memory() {
        let text = "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3").args(["-c", text]).env("LD_PRELOAD", "").spawn().unwrap();
        let stat = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        while !stat().contains(") Z ") {
            std::thread::yield_now();
        }
        let shared = shared();
        shared.session().started.executes(child.id(), b"/bin/python3").unwrap();
        let mut outside = Outside::default();
        (0..=PATIENCE).for_each(|_| outside.look(&shared, &members(&shared)));
        let known = outside.known[&child.id()].clone();
        assert!(known.is_there() && known.anonymous > 0 && known.peak > 0);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!known.is_there());
    }

    #[test]
    fn largest_are_remembered() {
        let mut outside = Outside::default();
        for pid in 0..KNOWN_MAX as u32 + 10 {
            outside.keep(Process::seen((1 << 30) + pid, "x", None, u64::from(pid)));
        }
        let report = outside.report(&shared());
        assert_eq!((report.processes.len(), report.more), (KNOWN_MAX, 10));
        assert_eq!(report.processes[KNOWN_MAX - 1].peak, 10, "the smallest have gone");
    }
}
