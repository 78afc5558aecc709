//! Whether the supervisor may stand beside the program, as an orphan: the kernel gives an orphan
//! to an ancestor.
//!
//! The question is asked before the process parts in two (`beside.rs`). If an orphan is impossible, or costs
//! the user something that was not asked for, the supervisor is the program's parent.

use crate::host::sys;
use crate::supervise::outside::parent;
use std::fs;
use std::os::unix::process::parent_id;
use std::path::Path;

/// The pid namespace that the machine was started with, as the kernel writes its name.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";
/// Exists while systemd is process 1.
const SYSTEMD: &str = "/run/systemd/system";
/// Zombies of supervisors among an ancestor's children which show that the ancestor doesn't wait for orphans.
/// A slow process 1 has some for a moment.
const ZOMBIES_MAX: usize = 64;
/// Other children behind the zombies at which the search stops: then the zombies don't count. Looking at a
/// child takes some 10 µs.
const OTHERS_MAX: usize = 32;
/// Ancestors that are looked at.
const ANCESTORS_MAX: usize = 64;

/// Returns why the supervisor is the program's parent; None if it stands beside the program.
/// `is_asked_for` says whether the user wants the supervisor beside the program: then only what makes that
/// impossible counts.
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
    // The kernel, or a container's runtime, kills the processes that are left. The summary of a killed
    // program comes a moment after its end.
    if is_main_process_of_a_container() {
        return Some("the container ends with the program, and the supervisor would with it");
    }
    let own_name = fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let zombie = format!("({}) Z ", own_name.trim_end());
    ancestors()
        .any(|pid| keeps_zombies(&children(pid), &zombie))
        .then_some("a process keeps zombies of earlier supervisors, for it waits for no orphans")
}

/// Whether this process most likely is the main process of a container: a child of process 1, or of a process
/// outside of its namespace.
fn is_main_process_of_a_container() -> bool {
    let is_first = fs::read_link("/proc/self/ns/pid").is_ok_and(|name| name.as_os_str() == FIRST_NAMESPACE);
    match parent_id() {
        0 => true,
        1 => !is_first && !Path::new(SYSTEMD).exists(),
        _ => false,
    }
}

/// Yields the ancestors from the parent up to process 1. The kernel gives an orphan to the first subreaper
/// among them, or to process 1.
fn ancestors() -> impl Iterator<Item = u32> {
    std::iter::successors(Some(parent_id()), |pid| parent(*pid))
        .take_while(|pid| *pid != 0)
        .take(ANCESTORS_MAX)
}

/// Returns the children of a process's first thread, in the order in which it got them.
fn children(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default()
}

/// Whether many of the last children are supervisors that nobody waits for. `zombie` is the
/// kernel's text for one.
fn keeps_zombies(children: &str, zombie: &str) -> bool {
    let (mut zombies, mut others) = (0, 0);
    for pid in children.split_whitespace().rev() {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let count = if stat.contains(zombie) { &mut zombies } else { &mut others };
        *count += 1;
        if zombies == ZOMBIES_MAX || others == OTHERS_MAX {
            break;
        }
    }
    zombies == ZOMBIES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    #[test]
    fn ancestors_go_up_to_the_last() {
        let all: Vec<_> = ancestors().collect();
        assert_eq!(all[0], parent_id());
        assert!(all.len() == ANCESTORS_MAX || parent(*all.last().unwrap()).is_none_or(|pid| pid == 0));
    }

    /// A slow process 1 must not make the supervisor's place a matter of luck.
    #[test]
    fn many_zombies_behind_few_others_count() {
        let mut all: Vec<Child> = (0..ZOMBIES_MAX).map(|_| Command::new("true").spawn().unwrap()).collect();
        let mut others: Vec<Child> =
            (0..OTHERS_MAX).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        let numbers =
            |children: &[Child]| children.iter().map(|child| format!("{} ", child.id())).collect::<String>();
        let zombie = "(true) Z ";
        let start = std::time::Instant::now();
        while !keeps_zombies(&numbers(&all), zombie) {
            assert!(start.elapsed().as_secs() < 60, "they have not ended");
        }
        let few = numbers(&others[1..]);
        assert!(keeps_zombies(&(numbers(&all) + &few), zombie), "few others are behind them");
        assert!(!keeps_zombies(&(numbers(&all) + &numbers(&others)), zombie), "many are");
        assert!(!keeps_zombies(&(few + &numbers(&all[1..])), zombie), "one zombie less");
        assert!(!keeps_zombies(&numbers(&all), "(false) Z "), "zombies of another program");
        others.iter_mut().for_each(|child| child.kill().unwrap());
        all.iter_mut().chain(&mut others).for_each(|child| _ = child.wait().unwrap());
    }
}
