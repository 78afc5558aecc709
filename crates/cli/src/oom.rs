//! Whether the kernel's out-of-memory killer was at work: its counters before the run and after it.
//!
//! The killer's victims end like anybody who is sent SIGKILL, and nobody is told why. So the kernel's counts are compared: of
//! the cgroup that the run is in, and of the whole machine. Which processes of the run have ended when a count rises is
//! the only trace of who it was.

use crate::budget::{self, Roots, row_of};
use crate::sys;
use crate::totals::Member;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// The row that counts kills, in every list of the kernel.
const KILLS: &str = "oom_kill";

/// Looks after the kill count rises in which a process that disappears counts as a victim. On a busy machine its end takes most of a
/// second.
const LOOKS: u32 = 10;
/// Victims that are remembered.
const VICTIMS_MAX: usize = 16;

/// Watches the counters beside the processes of the run.
pub struct Witness {
    before: Before,
    kills: Kills,
    looks: u32,
    /// Processes that were there, by their numbers.
    seen: BTreeSet<u32>,
    /// Processes that are gone.
    ended: BTreeSet<u32>,
    /// Those of them that may be victims.
    victims: Vec<(u32, Member)>,
}

impl Witness {
    /// Before the program starts.
    pub fn new(roots: Roots) -> Witness {
        let before = Before::now(roots);
        let kills = before.kills();
        let (seen, ended) = (BTreeSet::new(), BTreeSet::new());
        Witness { before, kills, looks: 0, seen, ended, victims: Vec::new() }
    }

    /// Looks once more: ten times a second, and at the end. How `program`, the first of the run, ends is known anyway.
    pub fn look(&mut self, members: &BTreeMap<u32, Member>, program: u32) {
        let kills = self.before.kills();
        if kills != self.kills {
            (self.kills, self.looks) = (kills, LOOKS);
        }
        // A number may be another process's later.
        self.seen.retain(|pid| members.contains_key(pid));
        self.ended.retain(|pid| members.get(pid).is_some_and(|member| !member.is_alive));
        for (pid, member) in members {
            // A process gives its record up before it is gone, or after: its rings keep the record for a while. A process of another pid
            // namespace was never there, and only the record says that it lives.
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
        // The killer takes the largest. Others end by themselves meanwhile.
        self.victims.sort_by_key(|(_, member)| Reverse(member.anonymous_bytes));
        self.victims.truncate(VICTIMS_MAX);
    }

    /// What was seen.
    pub fn report(&self) -> Report {
        let kills = match self.kills.group {
            0 => self.kills.machine.unwrap_or(0),
            kills => kills,
        } as usize;
        let victims = self.victims.iter().take(kills).map(|(pid, member)| (*pid, member.command.clone()));
        Report { kills: self.kills, victims: victims.collect() }
    }
}

/// What the out-of-memory killer did during the run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How often it struck.
    pub kills: Kills,
    /// Number and name of the largest processes of the run that ended at that time. They may have ended by themselves.
    pub victims: Vec<(u32, String)>,
}

/// The counters when the run began.
struct Before {
    roots: Roots,
    /// Each cgroup's file, and what stood there.
    groups: Vec<(PathBuf, u64)>,
    machine: Option<u64>,
}

/// Processes that the killer ended meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kills {
    /// In the cgroup of the run, whether for a limit or because the machine had no memory left.
    pub group: u64,
    /// On the machine, those of the cgroup included; none if that can't be read.
    pub machine: Option<u64>,
}

impl Before {
    /// Reads them. A counter that is not there (Linux before 4.13) counts nothing.
    fn now(roots: Roots) -> Before {
        let files = budget::groups(&roots).into_iter().filter_map(|group| {
            let file = group.directory()?.join(group.version.kills());
            Some((file.clone(), count(&file)?))
        });
        Before { groups: files.collect(), machine: count(&roots.proc.join("vmstat")), roots }
    }

    /// What has happened since.
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
    use crate::session::{self, Shared};
    use crate::totals::members;
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
            // Larger than any real one.
            record.pid.store(PID + at as u32, Ordering::Release);
            record.command[0].store(u64::from_ne_bytes(*b"grow\0\0\0\0"), Ordering::Relaxed);
            record.stats.set(Gauge::AnonymousPeak, 10 - at as u64);
            sys::lock_byte(&others, at as u64, true).unwrap();
        }
        let ends = |at: u64| sys::lock_byte(&others, at, false).unwrap();
        let mut witness = Witness::new(roots(&place));
        witness.look(&members(&shared), PID + 4);
        // By itself.
        ends(0);
        witness.look(&members(&shared), PID + 4);
        put(&place, counter, "oom_kill 2\n");
        ends(1);
        witness.look(&members(&shared), PID + 4);
        // Dying took a moment.
        ends(2);
        // The first program, and one that only became another one: this process lives.
        ends(4);
        let record = &shared.session().processes[5];
        record.pid.store(std::process::id(), Ordering::Release);
        witness.look(&members(&shared), PID + 4);
        ends(5);
        // A small one, by itself.
        ends(6);
        witness.look(&members(&shared), PID + 4);
        (0..LOOKS).for_each(|_| witness.look(&members(&shared), PID + 4));
        ends(3);
        witness.look(&members(&shared), PID + 4);
        let report = witness.report();
        assert_eq!(report.kills.group, 2);
        assert_eq!(report.victims, [(PID + 1, "grow".into()), (PID + 2, "grow".into())]);
    }

    /// It had given its record up when the count had risen, was not gone yet, and was forgotten: a smaller process was named.
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
            // In a container: the path is the host's.
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
