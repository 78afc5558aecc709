//! Other runs of this user on this machine, and the memory that their processes hold.
//!
//! Runs below one limit share what it leaves, so each supervisor reads the claims in the sessions of the other runs. A new run tells
//! them to look for it, and writes nothing else there. A run of another user, or in another pid namespace, can't be seen: its
//! memory counts like that of any other process.

use crate::budget::{Group, Limit, Roots, groups_of};
use crate::session::{own_session, session_in};
use crate::sys::{self, Access, SharedMemory};
use farpage::head::HeadCopy;
use farpage::kin::Claimed;
use farpage::record::SUPERVISOR_BYTE;
use farpage::session::Session;
use farpage::share::claimed_in;
use farpage_core::stats::Gauge;
use std::fs::{self, File};
use std::ops::AddAssign;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time after which runs are looked for again. A new run tells that it begins, but may fail to.
const FIND_AGAIN: Duration = Duration::from_secs(10);

/// Bytes that no run holds. Programs of a run can write any claim, and sums over runs must not overflow.
const HELD_BYTES_MAX: u64 = 1 << 50;

/// Memory that the processes of one run hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Their claims in one sum.
    pub claimed: Claimed,
    /// Number of processes.
    pub processes: u64,
    /// Whether a process of the run evicts.
    pub is_active: bool,
}

impl AddAssign<Claimed> for Holding {
    fn add_assign(&mut self, claimed: Claimed) {
        let sum = &mut self.claimed;
        for (sum, bytes) in
            [(&mut sum.has, claimed.has), (&mut sum.needs, claimed.needs), (&mut sum.floor, claimed.floor)]
        {
            *sum = sum.saturating_add(bytes).min(HELD_BYTES_MAX);
        }
        self.processes += 1;
    }
}

impl Holding {
    /// The sum over a session's living processes: each holds its record's lock in `file`.
    pub fn of(session: &Session, file: &File) -> Holding {
        let mut sum = Holding::default();
        let is_alive = |at: usize| sys::is_locked(file, at as u64);
        claimed_in(session, is_alive, |claimed| sum += claimed);
        let used = session.processes.iter().filter(|record| record.pid.load(Ordering::Relaxed) != 0);
        sum.is_active = used.map(|record| record.stats.gauge(Gauge::Active)).any(|active| active != 0);
        sum
    }
}

/// One of the other runs.
struct Neighbour {
    memory: SharedMemory,
    groups: Vec<Group>,
}

impl Neighbour {
    /// The run of the supervisor `pid`, if its session can be opened and has this version's layout.
    fn of(roots: &Roots, pid: u32) -> Option<Neighbour> {
        let path = own_session(&roots.proc, pid).ok()??;
        let file = File::options().read(true).write(true).open(path).ok()?;
        let memory = SharedMemory::open(file, Access::Write).ok()?;
        let mut head = Box::new(HeadCopy::EMPTY);
        session_in(&memory)?.head.copy_to(&mut head);
        head.check(memory.bytes())?;
        Some(Neighbour { memory, groups: groups_of(roots, &pid.to_string()) })
    }

    /// Its memory; none once its supervisor is gone, because then the run follows no limit.
    fn holding(&self) -> Option<Holding> {
        let file = self.memory.file();
        let session = session_in(&self.memory).filter(|_| sys::is_locked(file, SUPERVISOR_BYTE))?;
        Some(Holding::of(session, file))
    }
}

/// The other runs.
#[derive(Default)]
pub struct Neighbours {
    found: Vec<Neighbour>,
    /// When they are looked for again; at first at once.
    find_at: Option<Instant>,
    /// How often new ones have told that they begin.
    count: u32,
}

impl Neighbours {
    /// Tells them that a run begins. Of two that begin at the same time, the one whose session is younger finds the other.
    pub fn tell(&mut self, roots: &Roots) {
        self.find_at = None;
        self.find(roots, self.count);
        let sessions = self.found.iter().filter_map(|run| session_in(&run.memory));
        sessions.for_each(|session| _ = session.neighbours.fetch_add(1, Ordering::Relaxed));
    }

    /// Looks for them, if the last time is long ago or `count` has changed: the number of runs that have told that they begin.
    pub fn find(&mut self, roots: &Roots, count: u32) {
        let now = Instant::now();
        let is_told = std::mem::replace(&mut self.count, count) != count;
        if !is_told && self.find_at.is_some_and(|at| now < at) {
            return;
        }
        self.found = supervisors(&roots.proc).filter_map(|pid| Neighbour::of(roots, pid)).collect();
        self.find_at = Some(now + FIND_AGAIN);
    }

    /// The memory of each run that this limit holds, too.
    pub fn below<'a>(&'a self, limit: &'a Limit) -> impl Iterator<Item = Holding> + 'a {
        let below = self.found.iter().filter(|run| limit.is_above(&run.groups));
        below.filter_map(Neighbour::holding)
    }

    /// Notes in each limit how much of the memory below it is theirs.
    pub fn note_in(&self, limits: &mut [Limit]) {
        for limit in limits {
            limit.runs_bytes = self.below(limit).map(|run| run.claimed.has).sum();
        }
    }
}

/// The numbers of processes that have this process's name and user, but for its own.
fn supervisors(proc: &Path) -> impl Iterator<Item = u32> {
    let (own, user, proc) = (std::process::id(), sys::effective_user(), proc.to_owned());
    let name = fs::read(proc.join("self/comm")).unwrap_or_default();
    let entries = fs::read_dir(&proc).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter(move |pid| {
        let process = proc.join(pid.to_string());
        let is_ours = || fs::metadata(&process).is_ok_and(|process| process.uid() == user);
        *pid != own && is_ours() && fs::read(process.join("comm")).is_ok_and(|other| other == name)
    })
}
