//! Other runs of this user on this machine, and the memory that their processes hold.
//!
//! Runs below one limit share what it leaves, so each supervisor reads the claims in the sessions of the
//! other runs. A new run tells the other runs to look for it, and writes nothing more into their
//! sessions. A run of another user, or in another pid namespace, can't be seen: its memory counts like
//! that of any other process.

use crate::host::budget::{Group, Limit, Roots, groups, groups_of_other};
use crate::host::sys::{self, Access, SharedMemory};
use crate::supervise::session::{own_session, session_in};
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_runtime::engine::dormant::said_beyond_seen;
use farpage_runtime::pressure::kin::Claimed;
use farpage_runtime::pressure::share::claimed_in;
use farpage_runtime::session::Session;
use farpage_runtime::session::head::HeadCopy;
use farpage_runtime::session::record::SUPERVISOR_BYTE;
use std::fs::{self, File};
use std::ops::AddAssign;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pause between two searches for other runs while no run tells that it begins. A new run may fail to tell.
const FIND_AGAIN: Duration = Duration::from_secs(10);
/// Shortest pause between two searches. A search reads all of /proc.
const FIND_MIN: Duration = Duration::from_millis(100);
/// Most other runs that are followed. Each costs a descriptor.
const FOUND_MAX: usize = 128;
/// Bytes that no run holds, used as a bound. Programs of a run can write any claim, and sums over runs
/// must not overflow.
const HELD_BYTES_MAX: u64 = 1 << 50;

/// Memory that the processes of one run hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Sum of their claims.
    pub claimed: Claimed,
    /// The part of the claims that dormant processes don't have, but could have.
    pub beyond_seen: u64,
    /// Number of processes.
    pub processes: u64,
    /// Whether a process of the run evicts.
    pub is_active: bool,
    /// The run's budget in bytes, which is the most that it would like to have; 0 if that isn't known.
    pub most: u64,
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
    /// Returns the sum over a session's living processes. A living process holds its record's lock in `file`.
    pub fn of(session: &Session, file: &File) -> Holding {
        let mut sum = Holding::default();
        let is_alive = |at: usize| sys::is_locked(file, at as u64);
        claimed_in(session, is_alive, |claimed| sum += claimed);
        let is_active = |at: usize| session.processes[at].stats.gauge(Gauge::Active) != 0 && is_alive(at);
        sum.is_active = (0..session.processes.len()).any(is_active);
        sum.most = session.head.ram_bytes();
        sum.beyond_seen = said_beyond_seen(session, is_alive);
        sum
    }

    /// Returns the bytes that the processes have. A dormant process states more: what it could have.
    pub const fn seen(&self) -> u64 {
        self.claimed.has.saturating_sub(self.beyond_seen)
    }

    /// Returns the holding bounded by what a limit can hold.
    pub fn below(mut self, limit: &Limit) -> Holding {
        let Claimed { has, needs, floor, .. } = &mut self.claimed;
        let more = needs.saturating_sub(*has);
        *has = (*has).min(limit.runs_bytes_max);
        *needs = has.saturating_add(more).min(limit.bytes.saturating_add(limit.runs_bytes_max));
        *floor = (*floor).min(*needs);
        self
    }
}

/// Another run.
struct Neighbour {
    memory: SharedMemory,
    groups: Vec<Group>,
}

impl Neighbour {
    /// Opens the run of the supervisor `pid`, if its session can be opened and has this version's layout.
    fn of(roots: &Roots, pid: u32, own: &[Group]) -> Option<Neighbour> {
        let path = own_session(&roots.proc, pid).ok()??;
        let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        if file.metadata().ok()?.blksize() != PAGE_BYTES as u64 {
            // The memory is in huge pages, which can vanish.
            return None;
        }
        let memory = SharedMemory::open(file, Access::Write).ok()?;
        let mut head = Box::new(HeadCopy::EMPTY);
        session_in(&memory)?.head.copy_to(&mut head);
        head.check(memory.bytes())?;
        Some(Neighbour { memory, groups: groups_of_other(roots, pid, own) })
    }

    /// Returns the run's memory; none once its supervisor is gone, because then the run follows no limit.
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
    /// Time of the last search; none before the first.
    found_at: Option<Instant>,
    /// Runs that had told that they begin, at the last search.
    count: u32,
}

impl Neighbours {
    /// Tells the other runs that this run begins. If two runs begin at once, the run with the younger
    /// session finds the other.
    pub fn tell(&mut self, roots: &Roots) {
        self.found_at = None;
        self.find(roots, self.count);
        let sessions = self.found.iter().filter_map(|run| session_in(&run.memory));
        sessions.for_each(|session| _ = session.neighbours.fetch_add(1, Ordering::Relaxed));
    }

    /// Searches for other runs if the last search is long ago or `count` has changed. `count` is the number
    /// of runs that have told that they begin.
    pub fn find(&mut self, roots: &Roots, count: u32) {
        let pause = if self.count == count { FIND_AGAIN } else { FIND_MIN };
        if self.found_at.is_some_and(|at| at.elapsed() < pause) {
            return;
        }
        let own = groups(roots);
        let found = supervisors(&roots.proc).filter_map(|pid| Neighbour::of(roots, pid, &own));
        self.found = found.take(FOUND_MAX).collect();
        (self.found_at, self.count) = (Some(Instant::now()), count);
    }

    /// Returns the memory of each run, and the groups that the run is in.
    pub fn holdings(&self) -> Vec<(&[Group], Holding)> {
        self.found.iter().filter_map(|run| Some((run.groups.as_slice(), run.holding()?))).collect()
    }

    /// Notes in each limit how much of the memory below it belongs to the other runs.
    pub fn note_in(&self, limits: &mut [Limit]) {
        let runs = self.holdings();
        for limit in limits {
            let below = runs.iter().filter(|(groups, _)| limit.is_above(groups));
            let bytes = below.map(|(_, run)| run.claimed.has).fold(0, u64::saturating_add);
            limit.runs_bytes = bytes.min(limit.runs_bytes_max);
        }
    }
}

/// Yields the ids of processes with this process's name and user, without its own id.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A process can write any claim into its session, and its run is a neighbour of other runs.
    #[test]
    fn claims_are_bounded_by_what_a_limit_can_hold() {
        let limit = Limit {
            source: "cgroup v2 memory.max",
            file: "/x/memory.max".into(),
            bytes: 100 * MIB,
            held_bytes: 60 * MIB,
            runs_bytes: 0,
            runs_bytes_max: 60 * MIB,
        };
        let mut holding = Holding::default();
        for _ in 0..4 {
            let all = u64::MAX;
            holding += Claimed { has: all, needs: all, floor: all, shared: all };
        }
        assert_eq!((holding.claimed.has, holding.processes), (HELD_BYTES_MAX, 4));
        let Claimed { has, needs, floor, .. } = holding.below(&limit).claimed;
        assert_eq!(has, 60 * MIB);
        assert!(needs <= 160 * MIB && floor <= needs);
        let claimed = Claimed { has: 20 * MIB, needs: 24 * MIB, floor: 2 * MIB, shared: 0 };
        let holding = Holding { claimed, ..Holding::default() };
        assert_eq!(holding.below(&limit), holding, "what can be true stays");
    }
}
