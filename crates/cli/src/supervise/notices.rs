//! Notices of programs while they run: each kind is told once per process, as one line with what to do.

use crate::areas::Area;
use crate::host::budget::Budget;
use crate::supervise::session::Shared;
use crate::supervise::totals;
use crate::supervise::valve::Valve;
use crate::text::numbers::{grouped, iec, suggestion};
use crate::text::say::harmless;
use farpage_core::units::PAGE_SHIFT;
use farpage_runtime::session::{
    NOT_SENT, Notice, ProcessRecord, Retired, Session, StartFailure, StopReason, unpack_full, unpack_io_error,
};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How much a notice matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Good to know; --quiet leaves the notice out.
    Information,
    /// Data was lost, the disk fails, or the program ended because of us.
    Serious,
}

/// The things that notices are about, beside the program.
pub struct About<'a> {
    /// The names of the areas as they may be printed, in the order of the areas.
    pub areas: &'a [String],
    /// The areas themselves.
    pub files: &'a [Area],
    /// The budget of the run.
    pub budget: &'a Budget,
}

/// Knows which notices were told already, and how many may still be told.
pub struct Watcher {
    /// For each record, the process that had it and the bits that were told: records are reused.
    told: Vec<(u32, u32)>,
    /// Least weight of a notice that is told.
    least: Weight,
    /// Whether last words were told.
    is_last_told: bool,
    valve: Valve,
    /// The valve of serious notices. Many others hold none of them back.
    valve_of_serious: Valve,
}

impl Watcher {
    /// A watcher that has told nothing yet.
    pub fn new(session: &Session, least: Weight) -> Watcher {
        Watcher {
            told: vec![(0, 0); session.processes.len()],
            least,
            is_last_told: false,
            valve: Valve::new(),
            valve_of_serious: Valve::new(),
        }
    }

    /// Returns the lines for everything that is new, and for what was held back before.
    pub fn news(&mut self, session: &Session, about: &About, now: Instant) -> Vec<String> {
        let held = add(self.valve.turn(now), self.valve_of_serious.turn(now));
        let mut lines: Vec<String> = held.map(held_back).into_iter().collect();
        for (record, told) in session.processes.iter().zip(&mut self.told) {
            let pid = record.pid.load(Ordering::Acquire);
            if pid != told.0 {
                *told = (pid, 0);
            }
            // A process has a record again if it execs and the record is the only free one.
            told.1 &= record.notices.load(Ordering::Acquire);
            for notice in Notice::ALL {
                let bit = 1 << notice as u32;
                let Some(value) = record.noticed(notice).filter(|_| told.1 & bit == 0) else { continue };
                told.1 |= bit;
                let valve = match weight(notice) {
                    Weight::Serious => &mut self.valve_of_serious,
                    Weight::Information => &mut self.valve,
                };
                if weight(notice) >= self.least && valve.passes(now) {
                    lines.push(line(record, pid, notice, value, about));
                }
            }
        }
        lines
    }

    /// Returns the last words of a process that ended by a bug in Farpage. Later calls return none.
    pub fn last_words(&mut self, session: &Session) -> Option<String> {
        let words = last_words(session).filter(|_| !self.is_last_told)?;
        self.is_last_told = true;
        Some(words)
    }

    /// Returns the line for what was held back and never told. Called at the end.
    pub fn rest(&mut self) -> Option<String> {
        add(self.valve.rest(), self.valve_of_serious.rest()).map(held_back)
    }
}

fn add(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    let sum = one.unwrap_or(0) + other.unwrap_or(0);
    (sum > 0).then_some(sum)
}

/// Returns the last words of the first process that ended by a bug in Farpage.
pub fn last_words(session: &Session) -> Option<String> {
    let mut buffer = [0; 512];
    let (pid, text) = session.last_words.read(&mut buffer)?;
    let text = String::from_utf8_lossy(text);
    let text = text.lines().map(|line| harmless(line.trim())).collect::<Vec<_>>().join("; ");
    Some(format!(
        "INTERNAL ERROR of Farpage in pid {pid}, which was ended with status 134: {text}; please report it"
    ))
}

fn line(record: &ProcessRecord, pid: u32, notice: Notice, value: u64, about: &About) -> String {
    let command = harmless(&totals::command(record));
    if notice == Notice::BudgetTooSmall {
        budget_too_small(&command, value, about.budget)
    } else {
        format!("{command} (pid {pid}): {}", describe(notice, value, about))
    }
}

fn held_back(count: u64) -> String {
    let (notices, were) = if count == 1 { ("notice", "was") } else { ("notices", "were") };
    format!(
        "{} {notices} more {were} held back: too many at once; --stats FILE lists what each process tells",
        grouped(count)
    )
}

/// Returns how much a notice matters.
pub const fn weight(notice: Notice) -> Weight {
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
        | Notice::Retired
        | Notice::FileLimit
        | Notice::PeerOut
        | Notice::Ring
        | Notice::Grew
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

/// Reasons that are named for a run that stays above its budget.
const REASONS_MAX: usize = 3;

/// Returns why living processes don't stay within the budget, as they have told.
pub fn over_budget(shared: &Shared, about: &About) -> Vec<String> {
    let records = shared.session().processes.iter().enumerate();
    let told = records.flat_map(|(at, record)| {
        let notices = Notice::ALL.into_iter().filter(|notice| keeps_memory(*notice));
        notices.filter_map(move |notice| Some((at, record, notice, record.noticed(notice)?)))
    });
    let told = told.filter(|(at, ..)| shared.is_alive(*at)).take(REASONS_MAX);
    let line = |record: &ProcessRecord, notice, value| {
        line(record, record.pid.load(Ordering::Acquire), notice, value, about)
    };
    told.map(|(_, record, notice, value)| line(record, notice, value)).collect()
}

/// Whether a notice says that less is evicted than should be.
const fn keeps_memory(notice: Notice) -> bool {
    matches!(
        notice,
        Notice::AreaFull
            | Notice::PoolFull
            | Notice::WriteError
            | Notice::Unmanaged
            | Notice::Locked
            | Notice::NotArmed
            | Notice::FileLimit
    )
}

/// Returns what a notice says, without the program that it is about.
pub fn describe(notice: Notice, value: u64, about: &About) -> String {
    let budget = about.budget;
    match notice {
        Notice::AreaFull => area_full(value, about),
        Notice::FileLimit => format!(
            "it limits its files to {} (RLIMIT_FSIZE), and Farpage writes its swap file as the program: pages that need the file stay in memory, and it can go over the budget of {}; leave that limit alone in the program, give a device with --swap, or use --no-disk with more --ram",
            iec(value),
            iec(budget.ram_bytes)
        ),
        Notice::PoolFull => format!(
            "the compressed pool is full ({}) and there is no disk behind it: memory can go over the budget of {}; add one with --swap or give more with --ram",
            iec(value),
            iec(budget.ram_bytes)
        ),
        Notice::WriteError => format!(
            "writing failed: {}; the pages were kept, and the area is not written any more; check the disk (dmesg)",
            place(value, about)
        ),
        Notice::ReadError => format!(
            "LOST DATA, reading failed: {}; the program was ended, or told by SIGBUS or EFAULT; {}",
            place(value, about),
            cause(value, about).unwrap_or_else(|| "check the disk (dmesg)".into())
        ),
        Notice::Corrupt => format!(
            "LOST DATA, what was read is not what was written: {}; the program was ended, or told by SIGBUS or EFAULT; {}",
            place(value, about),
            cause(value, about).unwrap_or_else(|| "check the disk, and that nobody else writes there".into())
        ),
        Notice::Unmanaged => format!(
            "{} of its memory can't be evicted (locked or executable memory, stacks, small mappings), out of a budget of {}; use --ram {} or more",
            iec(value),
            iec(budget.ram_bytes),
            // The notice is told from half of the budget on: a quarter more could be less than
            // the budget is now.
            suggestion(value.saturating_mul(2))
        ),
        Notice::Locked => "it locked all its memory (mlockall): nothing can be evicted; have that refused with --mlockall refuse, or switch it off in the program".into(),
        Notice::NotArmed => not_armed(value, budget),
        Notice::PeerOut => format!(
            "it could not reach memory of process {value} (process_vm_readv or process_vm_writev, EFAULT), most likely because that is evicted; --faults thread can bring it back for others, but needs a privilege (`farpage doctor --faults thread`)"
        ),
        Notice::Ring => format!(
            "it began an io_uring before its memory was managed ({} in all): requests fail with EFAULT where their memory is evicted; use --faults thread, which needs a privilege (`farpage doctor --faults thread`), or switch io_uring off in the program",
            grouped(value)
        ),
        Notice::Grew => format!(
            "it had {} in memory before Farpage limited that: more than it had asked libc for, for instance by system calls of its own",
            iec(value)
        ),
        Notice::ForkRefused => format!(
            "a fork was refused: its child could not have been given the {} pages that are evicted, because 256 processes are under this run already (EAGAIN), or the limit on mappings (vm.max_map_count) is reached, or the program has changed its user or root, limits its descriptors or memory (`ulimit -n`, `-v`), or keeps others from looking at its memory (ENOMEM); use posix_spawn in the program, or give so much with --ram that nothing is evicted",
            grouped(value)
        ),
        Notice::NotStarted => format!("Farpage could not start in it: {}", start_failure(value)),
        Notice::Alone => format!("it runs without Farpage, and its memory isn't limited: {}", start_failure(value)),
        Notice::Retired => format!(
            "Farpage has left it, and its memory is no longer limited: {}; what was evicted comes back into memory",
            retired(value)
        ),
        Notice::Stopped => format!("STOPPED rather than given wrong bytes: {}", stop_reason(value)),
        Notice::BudgetTooSmall => {
            format!("the budget of {} is below the {} it needs before it starts", iec(budget.ram_bytes), iec(value))
        }
    }
}

/// Returns which thread takes no signal of Farpage's, and what would help.
fn not_armed(value: u64, budget: &Budget) -> String {
    let budget = iec(budget.ram_bytes);
    if value & NOT_SENT == 0 {
        return format!(
            "its thread {value} lets no signal through, or stays in a handler on a stack of its own, so nothing can be evicted until it does, and memory can go over the budget of {budget}; --faults thread needs no signal, but a privilege (`farpage doctor --faults thread`)"
        );
    }
    let thread = value & !NOT_SENT;
    format!(
        "its thread {thread} can't be sent a signal, because its user has too many signals pending, so nothing can be evicted until it can, and memory can go over the budget of {budget}; look at `ulimit -i`, or use --faults thread, which needs no signal, but a privilege (`farpage doctor --faults thread`)"
    )
}

/// Returns which areas are full, and what would help.
fn area_full(packed: u64, about: &About) -> String {
    let (bytes, not_full) = unpack_full(packed);
    let areas = about.areas.iter().enumerate();
    let full: Vec<_> =
        areas.filter(|(at, _)| not_full >> at & 1 == 0).map(|(_, name)| name.as_str()).collect();
    format!(
        "swap area {} is full (this process has {} there): nothing more is evicted until there is room, and memory can go over the budget of {}; free room on the disk or add an area with --swap",
        full.join(", "),
        iec(bytes),
        iec(about.budget.ram_bytes)
    )
}

/// Returns area, offset and reason of a failed request.
fn place(packed: u64, about: &About) -> String {
    let (area, slot, errno) = unpack_io_error(packed);
    let name = about.areas.get(usize::from(area)).map_or("?", String::as_str);
    let place = format!("{name} at offset {}", grouped(u64::from(slot) << PAGE_SHIFT));
    if errno == 0 { place } else { format!("{place}: {}", error_text(errno)) }
}

/// Returns why a page can't be read, if the area's file is the reason.
fn cause(packed: u64, about: &About) -> Option<String> {
    let (area, slot, _) = unpack_io_error(packed);
    let end = about.files.get(usize::from(area))?.shortened(u64::from(slot) << PAGE_SHIFT)?;
    Some(format!(
        "the file ends at {} now, so something has shortened it: leave it alone while it is in use",
        iec(end)
    ))
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
        (
            StartFailure::Session,
            "the run was out of its reach when it grew; did it enter another user namespace (unshare, setns) or root directory, or were 256 processes under the run?",
        ),
        (
            StartFailure::Namespace,
            "it is in another pid namespace, with the /proc of the one before; mount /proc anew (`unshare --mount-proc`, `bwrap --proc /proc`)",
        ),
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

fn retired(value: u64) -> String {
    match Retired::of_value(value) {
        Some(Retired::Strict) => "it entered seccomp's strict mode, in which no thread can evict".into(),
        Some(Retired::Denied(call)) => format!(
            "it installed a seccomp filter that doesn't allow all that Farpage needs (system call {call}); allow that in the program's filter, or switch the filter off"
        ),
        Some(Retired::Unseen) => {
            "it installed a seccomp filter by a system call of its own, past libc, which Farpage saw too late"
                .into()
        }
        Some(Retired::AllThreads) => {
            "it installed a seccomp filter for all threads (TSYNC) after one for a single thread".into()
        }
        Some(Retired::NotTaken) => {
            "it installed a seccomp filter that Farpage's threads couldn't take on".into()
        }
        Some(Retired::DataLimit) => {
            "it limited its own memory (RLIMIT_DATA), and in `segv` mode an evicted page couldn't come back once the limit is reached; leave that limit alone in the program, or use another mode (`farpage doctor`)"
                .into()
        }
        Some(Retired::MemoryOpen) => {
            "it has its own memory open as a file (/proc/self/mem), and in `segv` mode evicted pages would read as zeros there; use another mode (`farpage doctor`)"
                .into()
        }
        Some(Retired::NoThread) => {
            "when it came near its budget, no thread could be started to serve its faults; look at `ulimit -u` and the cgroup's pids.max"
                .into()
        }
        None => "unknown reason".into(),
    }
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
            "the system calls of one of its threads could not be guarded; try --faults thread, which needs a privilege (`farpage doctor --faults thread`)",
        ),
        (
            StopReason::Credentials,
            "it changed its user, capabilities, root directory or namespaces, and Farpage's threads in it could not follow; run it without Farpage",
        ),
        (
            StopReason::DataLimit,
            "it has as much memory as it may (`ulimit -d`, RLIMIT_DATA), so that an evicted page couldn't come back in `segv` mode; raise that limit, or use another mode (`farpage doctor`)",
        ),
    ];
    let reason = reasons.iter().find(|(reason, _)| *reason as u64 == value);
    reason.map_or("unknown reason", |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::session::tests::area;
    use crate::supervise::session::tests::settings;
    use crate::supervise::totals::tests::two_programs;
    use farpage_runtime::session::{pack_full, pack_io_error};

    fn budget_of(ram_bytes: u64) -> Budget {
        Budget {
            ram_bytes,
            origin: "--ram 1M".into(),
            pool_bytes_max: 1 << 19,
            asked_bytes: None,
            limit: None,
        }
    }

    fn with<T>(test: impl FnOnce(&About) -> T) -> T {
        test(&About { areas: &["/var/tmp".into()], files: &[], budget: &budget_of(1 << 20) })
    }

    fn news(watcher: &mut Watcher, session: &Session) -> Vec<String> {
        with(|about| watcher.news(session, about, Instant::now()))
    }

    fn watcher(session: &Session) -> Watcher {
        Watcher::new(session, Weight::Information)
    }

    #[test]
    fn each_notice_is_told_once_for_each_process() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = self::watcher(session);
        assert!(self::news(&mut watcher, session).is_empty());
        session.processes[0].notice(Notice::AreaFull, 5 << 20);
        session.processes[1].notice(Notice::AreaFull, 6 << 20);
        let news = self::news(&mut watcher, session);
        assert_eq!(news.len(), 2);
        assert!(
            news[0]
                .starts_with("python3 (pid 101): swap area /var/tmp is full (this process has 5 MiB there)"),
            "{}",
            news[0]
        );
        session.processes[0].notice(Notice::AreaFull, 7 << 20);
        assert!(self::news(&mut watcher, session).is_empty());
    }

    /// An area whose write had failed was called full, too.
    #[test]
    fn full_areas_are_named_without_those_that_failed() {
        let names = ["/mnt/a", "/mnt/b", "/mnt/c"].map(String::from);
        let about = About { areas: &names, files: &[], budget: &budget_of(1 << 20) };
        let text = describe(Notice::AreaFull, pack_full(5 << 20, 0b010), &about);
        assert!(
            text.starts_with("swap area /mnt/a, /mnt/c is full (this process has 5 MiB there)"),
            "{text}"
        );
        assert_eq!(unpack_full(pack_full(7, 1 << 15)), (7, 1 << 15));
    }

    #[test]
    fn record_of_a_new_process_is_told_again() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = self::watcher(session);
        session.processes[0].notice(Notice::Locked, 0);
        assert_eq!(news(&mut watcher, session).len(), 1);
        // A new process claims the record in this way, and has nothing to tell yet.
        session.processes[0].notices.store(0, Ordering::Relaxed);
        session.processes[0].pid.store(999, Ordering::Release);
        assert!(self::news(&mut watcher, session).is_empty());
        session.processes[0].notice(Notice::Locked, 0);
        let news = self::news(&mut watcher, session);
        assert!(news.len() == 1 && news[0].contains("pid 999"), "{news:?}");
    }

    #[test]
    fn quiet_leaves_out_what_is_only_good_to_know() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = Watcher::new(session, Weight::Serious);
        session.processes[0].notice(Notice::Locked, 0);
        session.processes[0].notice(Notice::Stopped, 1);
        let news = self::news(&mut watcher, session);
        assert!(news.len() == 1 && news[0].contains("STOPPED"), "{news:?}");
    }

    /// A program may write other ids over its own in its record. Each new id makes all of its notices
    /// new. The supervisor looks ten times a second, and must not print them all.
    #[test]
    fn flood_of_notices_is_counted_and_told_in_one_line() {
        let shared = two_programs();
        let session = shared.session();
        let mut watcher = self::watcher(session);
        for n in 0..1000 {
            session.processes[0].pid.store(1000 + n, Ordering::Release);
            Notice::ALL.into_iter().for_each(|notice| session.processes[0].notice(notice, 1));
            let news = self::news(&mut watcher, session);
            assert!(n <= 1 || news.len() <= 1, "{news:?}");
        }
        let rest = watcher.rest().unwrap();
        assert!(rest.contains(" notices more were held back"), "{rest}");
        assert_eq!(watcher.rest(), None);
    }

    /// 30 workers told that they lock memory. Then a worker lost data, and nobody was told.
    #[test]
    fn serious_notice_passes_a_flood_of_others() {
        let shared = Shared::new(settings(), &[]).unwrap();
        let records = &shared.session().processes;
        for (at, record) in records.iter().enumerate().take(30) {
            record.pid.store(1000 + at as u32, Ordering::Release);
            record.notice(Notice::Locked, 0);
        }
        let mut watcher = self::watcher(shared.session());
        assert_eq!(news(&mut watcher, shared.session()).len(), 10);
        records[25].notice(Notice::Stopped, 1);
        let news = news(&mut watcher, shared.session());
        assert!(news.len() == 1 && news[0].contains("STOPPED"), "{news:?}");
    }

    #[test]
    fn budget_that_is_too_small_names_the_number_and_a_better_one() {
        let shared = two_programs();
        shared.session().processes[0].notice(Notice::BudgetTooSmall, 24_536_679);
        let mut serious = Watcher::new(shared.session(), Weight::Serious);
        let news = news(&mut serious, shared.session());
        assert_eq!(
            news[0],
            "`--ram 1M` (1 MiB) is below the 23.4 MiB that python3 needs resident before it starts; use --ram 32M or more (or FARPAGE_RAM)"
        );
    }

    /// The text must not say "more than the budget": the notice is told from half of the budget on.
    #[test]
    fn memory_that_can_not_be_evicted_is_compared_with_the_budget() {
        let about = About { areas: &[], files: &[], budget: &budget_of(100 << 20) };
        let text = describe(Notice::Unmanaged, 60 << 20, &about);
        assert!(text.starts_with("60 MiB of its memory can't be evicted"), "{text}");
        assert!(text.ends_with("out of a budget of 100 MiB; use --ram 192M or more"), "{text}");
    }

    /// Without this cause the user would be sent to look at the disk.
    #[test]
    fn file_that_was_shortened_is_told_as_that() {
        let told = |grows, bytes, notice| {
            let file = Area { grows, ..area("swap", 100, &[]) };
            file.file.set_len(bytes).unwrap();
            let about = About { areas: &["swap".into()], files: &[file], budget: &budget_of(1 << 20) };
            describe(notice, pack_io_error(0, 50, 0), &about)
        };
        let is_told = |text: String| {
            assert!(text.starts_with("LOST DATA, ") && text.contains(": swap at offset 204,800; "), "{text}");
            text.contains("the file ends at 196 KiB now, so something has shortened it")
        };
        for notice in [Notice::ReadError, Notice::Corrupt] {
            assert!(is_told(told(true, 49 * 4096, notice)), "the page lies behind its end");
            assert!(is_told(told(false, 49 * 4096, notice)), "likewise");
            assert!(!is_told(told(true, 51 * 4096, notice)), "it grows, and has grown beyond the page");
            assert!(told(false, 51 * 4096, notice).contains("ends at 204 KiB now"), "it had all its slots");
            assert!(!told(false, 100 * 4096, notice).contains("shortened"), "as it still has");
        }
    }

    #[test]
    fn failed_requests_name_area_offset_and_reason() {
        let lost = with(|about| describe(Notice::ReadError, pack_io_error(0, 256, 5), about));
        assert!(lost.contains("/var/tmp at offset 1,048,576: Input/output error"), "{lost}");
        let nowhere = with(|about| describe(Notice::Corrupt, pack_io_error(200, 1, 0), about));
        assert!(nowhere.contains("? at offset 4,096"), "{nowhere}");
    }

    #[test]
    fn every_notice_and_start_failure_has_a_text() {
        for notice in Notice::ALL {
            assert!(!with(|about| describe(notice, u64::MAX, about)).is_empty());
        }
        for kind in 1..=8 {
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
