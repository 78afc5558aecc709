//! Whether the kernel's out-of-memory killer was at work, by its counters before the run and after it.
//!
//! The killer's victims end like any process that is sent SIGKILL, and the kernel tells nobody why. So the
//! kernel's counts are compared: of the cgroup that the run is in, and of the whole machine. The only trace
//! of the victims is which processes of the run have ended when a count rises.

use crate::host::budget::{self, Roots, row_of};
use crate::host::sys;
use crate::supervise::totals::Member;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Name of the row that counts kills, in every list of the kernel.
const KILLS: &str = "oom_kill";

/// Looks after the kill count rises in which a process that disappears counts as a victim. On a busy machine
/// a process takes most of a second to end.
const LOOKS: u32 = 10;
/// Looks more for each GiB of the largest process, because the kernel frees its pages first.
const LOOKS_MORE: u64 = 3;
/// Most victims that are remembered.
const VICTIMS_MAX: usize = 16;

/// Watches the counters beside the processes of the run.
pub struct Witness {
    before: Before,
    kills: Kills,
    looks: u32,
    /// Time at which a count was last seen to have risen.
    rose: Option<Instant>,
    /// Ids of processes that were there.
    seen: BTreeSet<u32>,
    /// Ids of processes that are gone.
    ended: BTreeSet<u32>,
    /// Processes among the ended ones that may be victims.
    victims: Vec<(u32, Member)>,
}

impl Witness {
    /// A witness with the counts before the program starts.
    pub fn new(roots: Roots) -> Witness {
        let before = Before::now(roots);
        let kills = before.kills();
        let (seen, ended) = (BTreeSet::new(), BTreeSet::new());
        Witness { before, kills, looks: 0, rose: None, seen, ended, victims: Vec::new() }
    }

    /// Looks once more: ten times a second, and at the end. `program` is the first process of the run. How it
    /// ends is known anyway.
    pub fn look(&mut self, members: &BTreeMap<u32, Member>, program: u32) {
        let kills = self.before.kills();
        if kills != self.kills {
            let largest = members.values().map(|member| member.anonymous_bytes).max().unwrap_or(0);
            let looks = LOOKS + (LOOKS_MORE * (largest >> 30)) as u32;
            (self.kills, self.looks, self.rose) = (kills, looks, Some(Instant::now()));
        }
        // An id may belong to another process later.
        self.seen.retain(|pid| members.contains_key(pid));
        self.ended.retain(|pid| members.get(pid).is_some_and(|member| !member.is_alive));
        for (pid, member) in members {
            // A process may give its record up before it is gone, or after, because its rings keep the
            // record for a while. A process of another pid namespace was never there, and only its
            // record says that it lives.
            let was_there = self.seen.contains(pid);
            if member.is_alive && was_there && self.looks == 0 {
                continue;
            }
            let is_gone = sys::is_gone(*pid);
            if !is_gone {
                self.seen.insert(*pid);
            }
            let has_ended = is_gone && (was_there || !member.is_alive);
            if !has_ended || !self.ended.insert(*pid) || self.looks == 0 || *pid == program {
                continue;
            }
            if self.victims.iter().all(|(victim, _)| victim != pid) {
                self.victims.push((*pid, member.clone()));
            }
        }
        self.looks = self.looks.saturating_sub(1);
        // The killer takes the largest processes. Other processes end by themselves meanwhile.
        self.victims.sort_by_key(|(_, member)| Reverse(member.anonymous_bytes));
        self.victims.truncate(VICTIMS_MAX);
    }

    /// Returns what was seen.
    pub fn report(&self) -> Report {
        let kills = match self.kills.group {
            0 => self.kills.machine.unwrap_or(0),
            kills => kills,
        } as usize;
        let victims = self.victims.iter().take(kills).map(|(pid, member)| (*pid, member.command.clone()));
        let last_kill = self.rose.map(|rose| rose.elapsed());
        Report { kills: self.kills, last_kill, victims: victims.collect() }
    }
}

/// The acts of the out-of-memory killer during the run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Kills by the out-of-memory killer.
    pub kills: Kills,
    /// Time since the last of these kills was counted.
    pub last_kill: Option<Duration>,
    /// Id and name of the largest processes of the run that ended at that time. The processes may
    /// have ended by themselves.
    pub victims: Vec<(u32, String)>,
}

/// The counters when the run began.
struct Before {
    roots: Roots,
    /// Each cgroup's file, and the count in it.
    groups: Vec<(PathBuf, u64)>,
    machine: Option<u64>,
}

/// Numbers of processes that the killer ended during the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kills {
    /// In the cgroup of the run, whether for a limit or because the machine had no memory left.
    pub group: u64,
    /// On the machine, the cgroup's included; none if the count can't be read.
    pub machine: Option<u64>,
}

impl Before {
    /// Reads the counters. A counter that doesn't exist (Linux before 4.13) counts nothing.
    fn now(roots: Roots) -> Before {
        let files = budget::groups(&roots).into_iter().filter_map(|group| {
            let file = group.directory()?.join(group.version.kills());
            Some((file.clone(), count(&file)?))
        });
        Before { groups: files.collect(), machine: count(&roots.proc.join("vmstat")), roots }
    }

    /// Returns the kills since the run began.
    fn kills(&self) -> Kills {
        let since = |file: &PathBuf, before: u64| count(file).unwrap_or(before).saturating_sub(before);
        Kills {
            group: self.groups.iter().map(|(file, before)| since(file, *before)).sum(),
            machine: self.machine.map(|before| since(&self.roots.proc.join("vmstat"), before)),
        }
    }
}

fn count(file: &PathBuf) -> Option<u64> {
    row_of(&fs::read_to_string(file).ok()?, KILLS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::session::{self, Shared};
    use crate::supervise::totals::members;
    use farpage_core::stats::Gauge;
    use std::sync::atomic::Ordering;

    const PID: u32 = 1 << 30;

    fn put(place: &tempfile::TempDir, path: &str, text: &str) {
        let path = place.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn roots(place: &tempfile::TempDir) -> Roots {
        Roots { proc: place.path().join("proc"), cgroup: place.path().join("cgroup") }
    }

    #[test]
    fn processes_that_are_gone_when_a_count_has_risen_are_its_victims() {
        let place = tempfile::tempdir().unwrap();
        put(&place, "proc/self/cgroup", "4:memory:/a\n");
        let counter = "cgroup/memory/a/memory.oom_control";
        put(&place, counter, "oom_kill 0\n");
        let shared = Shared::new(session::tests::settings(), &[]).unwrap();
        let others = fs::File::options().read(true).write(true).open(shared.path()).unwrap();
        for at in 0..7 {
            let record = &shared.session().processes[at];
            // An id larger than any real one.
            record.pid.store(PID + at as u32, Ordering::Release);
            record.command[0].store(u64::from_ne_bytes(*b"grow\0\0\0\0"), Ordering::Relaxed);
            record.stats.set(Gauge::AnonymousPeak, 10 - at as u64);
            sys::lock_byte(&others, at as u64, true).unwrap();
        }
        let ends = |at: u64| sys::lock_byte(&others, at, false).unwrap();
        let mut witness = Witness::new(roots(&place));
        witness.look(&members(&shared), PID + 4);
        // The process ends by itself.
        ends(0);
        witness.look(&members(&shared), PID + 4);
        put(&place, counter, "oom_kill 2\n");
        ends(1);
        witness.look(&members(&shared), PID + 4);
        // The process took a moment to die.
        ends(2);
        // The first program ends. A record only became another process's: that of this test, which lives.
        ends(4);
        let record = &shared.session().processes[5];
        record.pid.store(std::process::id(), Ordering::Release);
        witness.look(&members(&shared), PID + 4);
        ends(5);
        // A small process, which ends by itself.
        ends(6);
        witness.look(&members(&shared), PID + 4);
        (0..LOOKS).for_each(|_| witness.look(&members(&shared), PID + 4));
        ends(3);
        witness.look(&members(&shared), PID + 4);
        let report = witness.report();
        assert_eq!(report.kills.group, 2);
        assert_eq!(report.victims, [(PID + 1, "grow".into()), (PID + 2, "grow".into())]);
    }

    /// A process may give its record up when the count has risen, and be gone only later. A smaller process
    /// must not be named instead.
    #[test]
    fn process_whose_end_takes_long_is_a_victim() {
        let place = tempfile::tempdir().unwrap();
        put(&place, "proc/self/cgroup", "4:memory:/a\n");
        let counter = "cgroup/memory/a/memory.oom_control";
        put(&place, counter, "oom_kill 0\n");
        let shared = Shared::new(session::tests::settings(), &[]).unwrap();
        let others = fs::File::options().read(true).write(true).open(shared.path()).unwrap();
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let record = &shared.session().processes[0];
        record.pid.store(process.id(), Ordering::Release);
        record.command[0].store(u64::from_ne_bytes(*b"grow\0\0\0\0"), Ordering::Relaxed);
        let has_record = |is_held| sys::lock_byte(&others, 0, is_held).unwrap();
        has_record(true);
        let mut witness = Witness::new(roots(&place));
        witness.look(&members(&shared), PID);
        put(&place, counter, "oom_kill 1\n");
        has_record(false);
        witness.look(&members(&shared), PID);
        process.kill().unwrap();
        process.wait().unwrap();
        witness.look(&members(&shared), PID);
        assert_eq!(witness.report().victims, [(process.id(), "grow".into())]);
    }

    #[test]
    fn kills_are_counted_from_the_start_of_the_run_on() {
        for (groups, file) in [
            ("0::/a\n", "cgroup/a/memory.events"),
            ("4:memory:/a\n", "cgroup/memory/a/memory.oom_control"),
            // In a container the path is the host's.
            ("4:memory:/docker/0123\n0::/\n", "cgroup/memory/memory.oom_control"),
        ] {
            let place = tempfile::tempdir().unwrap();
            let put = |path: &str, text: &str| put(&place, path, text);
            put("proc/self/cgroup", groups);
            put("proc/vmstat", "oom_kill 7\nother 1\n");
            put("cgroup/cgroup.controllers", "memory\n");
            put(file, "low 0\noom 2\noom_kill 2\noom_group_kill 0\n");
            let before = Before::now(roots(&place));
            assert_eq!(before.kills(), Kills { group: 0, machine: Some(0) });
            put(file, "oom 4\noom_kill 3\n");
            put("proc/vmstat", "oom_kill 9\n");
            assert_eq!(before.kills(), Kills { group: 1, machine: Some(2) }, "{file}");
            fs::remove_file(place.path().join(file)).unwrap();
            assert_eq!(before.kills(), Kills { group: 0, machine: Some(2) });
        }
    }
}
