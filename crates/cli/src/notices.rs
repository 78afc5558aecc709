//! What programs have to tell while they run: each kind once per process, as one line with what to do.

use crate::budget::Budget;
use crate::numbers::{grouped, iec, suggestion};
use crate::session;
use crate::totals;
use farpage::session::{Notice, Session, StartFailure, StopReason, unpack_io_error};
use farpage_core::units::PAGE_SHIFT;
use std::io;
use std::sync::atomic::Ordering;

/// How much a notice matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// Good to know; --quiet leaves it out.
    Information,
    /// Data was lost, the disk fails, or the program ended because of us.
    Serious,
}

/// Which notices were told already.
pub struct Watcher {
    /// For each record, whose it was and which bits were told: records are reused.
    told: Vec<(u32, u32)>,
}

impl Watcher {
    /// Nothing was told yet.
    pub fn new(session: &Session) -> Watcher {
        Watcher { told: vec![(0, 0); session.processes.len()] }
    }

    /// The lines for everything that is new.
    pub fn news(&mut self, session: &Session, budget: &Budget) -> Vec<(Weight, String)> {
        let mut lines = Vec::new();
        for (record, told) in session.processes.iter().zip(&mut self.told) {
            let pid = record.pid.load(Ordering::Acquire);
            if pid != told.0 {
                *told = (pid, 0);
            }
            for notice in Notice::ALL {
                let bit = 1 << notice as u32;
                let Some(value) = record.noticed(notice).filter(|_| told.1 & bit == 0) else { continue };
                told.1 |= bit;
                let command = totals::command(record);
                let text = if notice == Notice::BudgetTooSmall {
                    budget_too_small(&command, value, budget)
                } else {
                    format!("{command} (pid {pid}): {}", describe(notice, value, session, budget))
                };
                lines.push((weight(notice), text));
            }
        }
        lines
    }
}

const fn weight(notice: Notice) -> Weight {
    match notice {
        Notice::WriteError
        | Notice::ReadError
        | Notice::Corrupt
        | Notice::NotStarted
        | Notice::Stopped
        | Notice::BudgetTooSmall => Weight::Serious,
        Notice::AreaFull
        | Notice::PoolFull
        | Notice::Unmanaged
        | Notice::Locked
        | Notice::NotArmed
        | Notice::Alone
        | Notice::ForkRefused => Weight::Information,
    }
}

fn budget_too_small(command: &str, needed: u64, budget: &Budget) -> String {
    format!(
        "`{}` ({}) is below the {} that {command} needs resident before it starts; use --ram {} or more (or FARPAGE_RAM)",
        budget.origin,
        iec(budget.ram_bytes),
        iec(needed),
        suggestion(needed)
    )
}

/// What a notice says, without the program it is about.
pub fn describe(notice: Notice, value: u64, session: &Session, budget: &Budget) -> String {
    match notice {
        Notice::AreaFull => format!(
            "swap area {} is full ({} in use): nothing more is evicted, and memory goes over the budget of {}; free room on the disk or add an area with --swap",
            area_names(session),
            iec(value),
            iec(budget.ram_bytes)
        ),
        Notice::PoolFull => format!(
            "the compressed pool is full ({}) and there is no disk behind it: memory goes over the budget of {}; add one with --swap or give more with --ram",
            iec(value),
            iec(budget.ram_bytes)
        ),
        Notice::WriteError => format!(
            "writing failed: {}; the pages were kept, and the area is not written any more; check the disk (dmesg)",
            place(value, session)
        ),
        Notice::ReadError => format!(
            "LOST DATA, reading failed: {}; the program got SIGBUS; check the disk (dmesg)",
            place(value, session)
        ),
        Notice::Corrupt => format!(
            "LOST DATA, what was read is not what was written: {}; the program got SIGBUS; check the disk, and that nobody else writes there",
            place(value, session)
        ),
        Notice::Unmanaged => format!(
            "{} of its memory can't be evicted (locked memory, stacks, small mappings), out of a budget of {}; use --ram {} or more",
            iec(value),
            iec(budget.ram_bytes),
            // It is told from half of the budget on: a quarter more could be less than there is now.
            suggestion(value.saturating_mul(2))
        ),
        Notice::Locked => "it locked all its memory (mlockall): nothing can be evicted; have that refused with --mlockall refuse, or switch it off in the program".into(),
        Notice::NotArmed => format!(
            "its thread {value} lets no signal through, or stays in a handler on a stack of its own, so nothing can be evicted and memory goes over the budget of {}; --faults thread needs no signal, but a privilege (`farpage doctor`)",
            iec(budget.ram_bytes)
        ),
        Notice::ForkRefused => format!(
            "a fork was refused: its child could not have been given the {} pages that are evicted, because 256 processes are under this run already (EAGAIN), or the limit on mappings (vm.max_map_count) is reached, or the program has changed its user or root, or keeps others from looking at its memory (ENOMEM); use posix_spawn in the program, or give so much with --ram that nothing is evicted",
            grouped(value)
        ),
        Notice::NotStarted => format!("Farpage could not start in it: {}", start_failure(value)),
        Notice::Alone => format!("it runs without Farpage, and its memory isn't limited: {}", start_failure(value)),
        Notice::Stopped => format!("STOPPED rather than given wrong bytes: {}", stop_reason(value)),
        Notice::BudgetTooSmall => {
            format!("the budget of {} is below the {} it needs before it starts", iec(budget.ram_bytes), iec(value))
        }
    }
}

fn area_names(session: &Session) -> String {
    let areas = session.areas.iter().take(session.areas_count as usize);
    areas.map(|area| session::text(&area.name)).collect::<Vec<_>>().join(", ")
}

/// Area, offset and reason of a failed request.
fn place(packed: u64, session: &Session) -> String {
    let (area, slot, errno) = unpack_io_error(packed);
    let name =
        session.areas.get(usize::from(area)).map_or_else(|| "?".into(), |area| session::text(&area.name));
    let place = format!("{name} at offset {}", grouped(u64::from(slot) << PAGE_SHIFT));
    if errno == 0 { place } else { format!("{place}: {}", error_text(errno)) }
}

fn error_text(errno: u16) -> String {
    io::Error::from_raw_os_error(errno.into()).to_string()
}

fn start_failure(value: u64) -> String {
    let (kind, errno) = (value as u16, (value >> 16) as u16);
    let reasons = [
        (
            StartFailure::Userfaultfd,
            "no userfaultfd for this process; did it change its user? `farpage doctor` shows the ways to get it",
        ),
        (
            StartFailure::Memory,
            "no memory for Farpage's own tables; look at `ulimit -v` and the cgroup's limit",
        ),
        (StartFailure::Thread, "no thread could be started; look at `ulimit -u` and the cgroup's pids.max"),
        (
            StartFailure::Area,
            "a swap area could not be opened; was the supervisor ended, or did the program change its user?",
        ),
        (
            StartFailure::Hooks,
            "libc's functions could not be replaced; is it linked against another libc, run by a debugger, or kept from changing code (PR_SET_MDWE)?",
        ),
        (StartFailure::Proc, "/proc is not usable; mount it in the container or chroot"),
    ];
    let reason = reasons.iter().find(|(failure, _)| *failure as u16 == kind);
    let text = match i32::from(errno) {
        libc::EACCES if kind == StartFailure::Proc as u16 => {
            "it keeps others from looking at its memory (PR_SET_DUMPABLE, or a program file that can't be read), and so itself"
        }
        libc::EMFILE | libc::ENFILE => "no file descriptor is free; look at `ulimit -n`",
        _ => reason.map_or("unknown reason", |(_, text)| text),
    };
    if errno == 0 { text.into() } else { format!("{text} ({})", error_text(errno)) }
}

fn stop_reason(value: u64) -> &'static str {
    let reasons = [
        (
            StopReason::Tables,
            "no memory for the tables of what is evicted, or for a thread that evicts; look at `ulimit -v` and the cgroup's limit",
        ),
        (
            StopReason::Thread,
            "no thread could be started to serve its faults; look at `ulimit -u` and the cgroup's pids.max",
        ),
        (
            StopReason::UnseenMove,
            "it moved memory (mremap) by a system call of its own, past libc, which Farpage can't follow; run it without Farpage",
        ),
        (
            StopReason::Arming,
            "the system calls of one of its threads could not be guarded; try --faults thread, which needs a privilege (`farpage doctor`)",
        ),
        (
            StopReason::Credentials,
            "it changed its user, capabilities, root directory or namespaces, and Farpage's threads in it could not follow; run it without Farpage",
        ),
    ];
    let reason = reasons.iter().find(|(reason, _)| *reason as u64 == value);
    reason.map_or("unknown reason", |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::totals::tests::two_programs;
    use farpage::session::pack_io_error;

    fn budget() -> Budget {
        Budget { ram_bytes: 1 << 20, origin: "--ram 1M".into(), pool_bytes_max: 1 << 19 }
    }

    #[test]
    fn each_notice_is_told_once_for_each_process() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = Watcher::new(session);
        assert!(watcher.news(session, &budget()).is_empty());
        session.processes[0].notice(Notice::AreaFull, 5 << 20);
        session.processes[1].notice(Notice::AreaFull, 6 << 20);
        let news = watcher.news(session, &budget());
        assert_eq!(news.len(), 2);
        assert!(
            news[0].1.starts_with("python3 (pid 101): swap area /var/tmp is full (5 MiB in use)"),
            "{}",
            news[0].1
        );
        session.processes[0].notice(Notice::AreaFull, 7 << 20);
        assert!(watcher.news(session, &budget()).is_empty());
    }

    #[test]
    fn record_of_a_new_process_is_told_again() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = Watcher::new(session);
        session.processes[0].notice(Notice::Locked, 0);
        assert_eq!(watcher.news(session, &budget()).len(), 1);
        // As a new process claims it, which has nothing to tell yet.
        session.processes[0].notices.store(0, Ordering::Relaxed);
        session.processes[0].pid.store(999, Ordering::Release);
        assert_eq!(watcher.news(session, &budget()), []);
        session.processes[0].notice(Notice::Locked, 0);
        let news = watcher.news(session, &budget());
        assert!(news.len() == 1 && news[0].1.contains("pid 999"), "{news:?}");
    }

    #[test]
    fn budget_that_is_too_small_names_the_number_and_a_better_one() {
        let shared = two_programs();
        shared.session().processes[0].notice(Notice::BudgetTooSmall, 24_536_679);
        let news = Watcher::new(shared.session()).news(shared.session(), &budget());
        assert_eq!(news[0].0, Weight::Serious);
        assert_eq!(
            news[0].1,
            "`--ram 1M` (1 MiB) is below the 23.4 MiB that python3 needs resident before it starts; use --ram 32M or more (or FARPAGE_RAM)"
        );
    }

    /// It was called more than the budget, but is told from half of the budget on.
    #[test]
    fn memory_that_can_not_be_evicted_is_compared_with_the_budget() {
        let shared = two_programs();
        let budget = Budget { ram_bytes: 100 << 20, ..budget() };
        let text = describe(Notice::Unmanaged, 60 << 20, shared.session(), &budget);
        assert!(text.starts_with("60 MiB of its memory can't be evicted"), "{text}");
        assert!(text.ends_with("out of a budget of 100 MiB; use --ram 192M or more"), "{text}");
    }

    #[test]
    fn failed_requests_name_area_offset_and_reason() {
        let shared = two_programs();
        let lost = describe(Notice::ReadError, pack_io_error(0, 256, 5), shared.session(), &budget());
        assert!(lost.contains("/var/tmp at offset 1,048,576: Input/output error"), "{lost}");
        let nowhere = describe(Notice::Corrupt, pack_io_error(200, 1, 0), shared.session(), &budget());
        assert!(nowhere.contains("? at offset 4,096"), "{nowhere}");
    }

    #[test]
    fn every_notice_and_start_failure_has_a_text() {
        let shared = two_programs();
        for notice in Notice::ALL {
            assert!(!describe(notice, u64::MAX, shared.session(), &budget()).is_empty());
        }
        for kind in 1..=6 {
            assert!(!start_failure(kind | 12 << 16).contains("unknown"), "{kind}");
        }
        assert!(start_failure(77).contains("unknown"));
        assert!(start_failure(1 | (libc::EMFILE as u64) << 16).contains("ulimit -n"));
        for reason in 1..=4 {
            assert!(!stop_reason(reason).contains("unknown"), "{reason}");
        }
        assert!(stop_reason(77).contains("unknown"));
    }
}
