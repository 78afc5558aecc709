//! Whether the supervisor may stand beside the program: it is an orphan there, and process 1 is its parent.
//!
//! Looked at before the process parts in two (`beside.rs`). Where an orphan can't be, or costs the user something that was not asked
//! for, the supervisor is the program's parent.

use crate::sys;
use std::fs;
use std::os::unix::process::parent_id;

/// The pid namespace that the machine was started with, as the kernel writes its name.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";
/// So many children of process 1 are looked at for a zombie.
const CHILDREN_MAX: usize = 4096;

/// Why the supervisor is the program's parent; None if it stands beside the program. `is_asked_for` says whether the user wants it
/// there: then only what makes it impossible counts.
pub fn why_above(is_asked_for: bool) -> Option<&'static str> {
    why_impossible().or_else(|| if is_asked_for { None } else { why_unwelcome() })
}

fn why_impossible() -> Option<&'static str> {
    match (std::process::id(), sys::is_subreaper()) {
        (1, _) => Some("as process 1 of a container the program would be the supervisor's parent"),
        (_, true) => {
            Some("it was started in a process that is given the orphans of those below (a subreaper)")
        }
        (own, _) if sys::open_process(own).is_err() => {
            Some("a filter of seccomp forbids pidfd_open, or no descriptor is free")
        }
        _ => None,
    }
}

fn why_unwelcome() -> Option<&'static str> {
    // With process 1 the kernel kills all of its namespace. A killed program's summary comes a moment after the program's end.
    if parent_id() == 1 && !is_first_namespace() {
        return Some("the container ends with the program, and the supervisor would with it");
    }
    keeps_zombies().then_some("process 1 asks for no status of orphans, and would keep a zombie of each run")
}

fn is_first_namespace() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|name| name.as_os_str() == FIRST_NAMESPACE)
}

/// Whether process 1 keeps a zombie already, and does nothing when a child of its ends: `sleep infinity` in a container.
fn keeps_zombies() -> bool {
    let status = fs::read_to_string("/proc/1/status").unwrap_or_default();
    if hears_of_children(&status) {
        return false;
    }
    let children = fs::read_to_string("/proc/1/task/1/children").unwrap_or_default();
    children.split_whitespace().take(CHILDREN_MAX).any(is_zombie)
}

/// Whether a process with that /proc/PID/status catches, blocks or ignores SIGCHLD. A process that blocks it takes it by itself. The
/// kernel keeps no zombie for one that ignores it.
fn hears_of_children(status: &str) -> bool {
    let has_it = |line: &str| {
        let mask =
            line.strip_prefix("SigBlk:").or(line.strip_prefix("SigIgn:")).or(line.strip_prefix("SigCgt:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> (libc::SIGCHLD - 1) & 1 != 0)
    };
    status.lines().any(has_it)
}

fn is_zombie(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('Z'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_catches_blocks_or_ignores_its_childrens_ends_keeps_no_zombies() {
        let nothing = "Name:\tsleep\nSigPnd:\t0000000000010000\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001000\n\
                       SigCgt:\t00000000000004e8\n";
        assert!(!hears_of_children(nothing), "it was only sent to it");
        for name in ["SigBlk", "SigIgn", "SigCgt"] {
            assert!(hears_of_children(&format!("{nothing}{name}:\t0000000180010002\n")), "{name}");
        }
        assert!(!hears_of_children(""), "nothing is known");
    }

    #[test]
    fn child_that_nobody_waits_for_is_a_zombie() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().to_string();
        let start = std::time::Instant::now();
        while !is_zombie(&pid) {
            assert!(start.elapsed().as_secs() < 60, "it has not ended");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!is_zombie(&pid) && !is_zombie("self"));
    }
}
