//! The program and processes below it that have not joined the run, found from parents to children.
//!
//! Calls that Farpage sees leave notes (`outside.rs`). Three things leave none: a bare clone, the children of
//! a static program, and forks beyond the processes that are managed. The walk finds processes without a
//! note, except for a process that is an orphan by then.

use crate::host::sys;
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Pause between two walks, and the pause while a process was found that is still to be told of.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(1)];
/// Age of a process at which it is told of: on a busy machine a program takes seconds to join.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most threads whose children are read in one walk, some 10 µs each, and most processes. Processes beyond
/// these are not found.
const THREADS_MAX: usize = 512;
const PROCESSES_MAX: usize = 512;
/// The kernel's flag of a process that has not executed a program since it was forked.
const FORKED: u64 = 0x40;

/// Watches the processes below the program.
#[derive(Default)]
pub struct Descendants {
    walked: Option<Instant>,
    found: BTreeMap<u32, Found>,
}

/// A process below the program that isn't known to the run.
struct Found {
    /// When the process began, in the kernel's ticks.
    began: u64,
    /// When the process was found.
    first: Instant,
    is_told: bool,
}

impl Descendants {
    /// Looks once more. Returns `root` and processes below it that have lived for some seconds, have memory
    /// of their own, and aren't known. `is_known` gets the id of a process, and one of its ids (`numbers`).
    pub fn look(&mut self, root: u32, now: Instant, is_known: impl Fn(u32, u32) -> bool) -> Vec<u32> {
        let pause = PAUSES[usize::from(self.found.values().any(|found| !found.is_told))];
        if self.walked.is_some_and(|walked| now < walked + pause) {
            return Vec::new();
        }
        self.walked = Some(now);
        let mut found = BTreeMap::new();
        for (pid, parent) in std::iter::once((root, std::process::id())).chain(below(root)) {
            let is_stranger = |stat: &Stat| {
                !numbers(pid).into_iter().any(|number| is_known(pid, number))
                    && stat.has_own_memory(pid, parent)
            };
            let Some(stat) = Stat::of(pid).filter(is_stranger) else { continue };
            let before = self.found.remove(&pid).filter(|found| found.began == stat.began);
            found.insert(pid, before.unwrap_or(Found { began: stat.began, first: now, is_told: false }));
        }
        self.found = found;
        let due = self.found.iter_mut().filter(|(_, found)| !found.is_told && now >= found.first + PATIENCE);
        due.map(|(pid, found)| {
            found.is_told = true;
            *pid
        })
        .collect()
    }
}

/// Returns all processes below `root` with their parents, without `root` itself.
fn below(root: u32) -> Vec<(u32, u32)> {
    let (mut found, mut next, mut threads) = (Vec::new(), vec![root], 0);
    while let Some(parent) = next.pop() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{parent}/task")) else { continue };
        for task in tasks.flatten() {
            threads += 1;
            if threads > THREADS_MAX {
                return found;
            }
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
                if found.len() == PROCESSES_MAX {
                    return found;
                }
                found.push((child, parent));
                next.push(child);
            }
        }
    }
    found
}

/// Returns the ids of a process: ours for it, then its id in each of its pid namespaces. A process of the run
/// gives the last one as its own.
pub fn numbers(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let inner = line.split_whitespace().filter_map(|number| number.parse().ok());
    std::iter::once(pid).chain(inner).collect()
}

/// Returns the id of a process in its own pid namespace, if that is another namespace than ours.
pub fn number_elsewhere(pid: u32) -> Option<u32> {
    numbers(pid).into_iter().next_back().filter(|inner| *inner != pid)
}

/// Fields of /proc/PID/stat.
struct Stat {
    flags: u64,
    began: u64,
}

impl Stat {
    /// Reads the fields. None if the process is gone, or a zombie.
    fn of(pid: u32) -> Option<Stat> {
        let stat = sys::stat_of(pid).filter(|_| !sys::is_gone(pid))?;
        let field = |at: usize| stat.split(' ').nth(at)?.parse().ok();
        Some(Stat { flags: field(6)?, began: field(19)? })
    }

    /// Whether the process has memory of its own. A child of vfork lives in its parent's memory,
    /// which has a budget.
    fn has_own_memory(&self, pid: u32, parent: u32) -> bool {
        self.flags & FORKED == 0 || sys::have_other_memory(pid, parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    /// A shell with a child and a grandchild. Returns the shell and the grandchild's id.
    fn tree() -> (Child, u32) {
        let text = "sh -c 'sleep 60 & echo $!; wait'; true";
        let mut shell = Command::new("sh").args(["-c", text]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (shell, line.trim().parse().unwrap())
    }

    #[test]
    fn processes_below_are_found_to_the_last() {
        let (mut shell, last) = tree();
        let found = below(shell.id());
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].1, found[1].1), (shell.id(), found[0].0));
        assert_eq!(found[1].0, last);
        found.iter().for_each(|(pid, _)| sys::send_signal(*pid, libc::SIGKILL));
        shell.wait().unwrap();
    }

    #[test]
    fn strangers_are_told_of_once_after_a_while() {
        let (mut shell, last) = tree();
        let mut descendants = Descendants::default();
        let (start, mut told) = (Instant::now(), Vec::new());
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            told.extend(
                descendants.look(shell.id(), now, |pid, _| pid != last).into_iter().map(|pid| (second, pid)),
            );
        }
        assert_eq!(told, [(5, last)], "in the first walk after the fifth second");
        below(shell.id()).iter().for_each(|(pid, _)| sys::send_signal(*pid, libc::SIGKILL));
        shell.wait().unwrap();
    }

    #[test]
    fn process_has_its_number_in_each_namespace() {
        let own = std::process::id();
        assert!(numbers(own).len() >= 2 && numbers(own).contains(&own));
    }

    /// The memory of a child that vfork has made is its parent's, and is managed.
    #[test]
    fn we_have_our_own_memory_and_a_child_has_another() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!sys::have_other_memory(std::process::id(), std::process::id()));
        assert!(sys::have_other_memory(child.id(), std::process::id()));
        assert!(Stat::of(child.id()).unwrap().has_own_memory(child.id(), std::process::id()));
        assert!(Stat { flags: FORKED, began: 0 }.has_own_memory(child.id(), std::process::id()));
        child.kill().unwrap();
        assert!(!Stat { flags: FORKED, began: 0 }.has_own_memory(std::process::id(), std::process::id()));
        child.wait().unwrap();
    }
}
