//! The counts of the programs, copied out of the session: per process and in total.

use crate::supervise::notices;
use crate::supervise::session::{self, Shared};
use farpage_core::stats::{Counter, Gauge, Latency, LatencySummary, Stats};
use farpage_runtime::session::{Notice, ProcessRecord, Session};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// Counters, gauges and latencies at one moment.
#[derive(Clone)]
pub struct Numbers {
    counters: Vec<u64>,
    gauges: Vec<u64>,
    latencies: Vec<LatencySummary>,
}

impl Default for Numbers {
    fn default() -> Numbers {
        Numbers {
            counters: vec![0; Counter::COUNT],
            gauges: vec![0; Gauge::COUNT],
            latencies: vec![LatencySummary::default(); Latency::COUNT],
        }
    }
}

impl Numbers {
    fn of(stats: &Stats) -> Numbers {
        let mut numbers = Numbers {
            counters: Counter::ALL.iter().map(|counter| stats.get(*counter)).collect(),
            gauges: Gauge::ALL.iter().map(|gauge| stats.gauge(*gauge)).collect(),
            ..Numbers::default()
        };
        for (kind, sum) in Latency::ALL.iter().zip(&mut numbers.latencies) {
            stats.latency(*kind).add_to(sum);
        }
        numbers
    }

    /// Adds another process: peaks are the highest of any process, the other numbers are sums.
    fn add(&mut self, other: &Numbers) {
        for (sum, counter) in self.counters.iter_mut().zip(&other.counters) {
            *sum = sum.saturating_add(*counter);
        }
        let is_largest = other.gauge(Gauge::PoolPeak) > self.gauge(Gauge::PoolPeak);
        let stored = if is_largest { other } else { &*self }.gauge(Gauge::StoredPeak);
        for (gauge, (sum, value)) in Gauge::ALL.iter().zip(self.gauges.iter_mut().zip(&other.gauges)) {
            *sum = if gauge.is_peak() { (*sum).max(*value) } else { sum.saturating_add(*value) };
        }
        // The pages of the largest pool, and not of another one.
        self.gauges[Gauge::StoredPeak as usize] = stored;
        for (sum, latency) in self.latencies.iter_mut().zip(&other.latencies) {
            sum.add(latency);
        }
    }

    /// A counter's value.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }
    /// A gauge's value.
    pub fn gauge(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize]
    }
    /// The latencies of one kind of fault.
    pub fn latency(&self, kind: Latency) -> &LatencySummary {
        &self.latencies[kind as usize]
    }
    /// The latencies of all faults.
    pub fn all_latencies(&self) -> LatencySummary {
        self.latencies.iter().fold(LatencySummary::default(), |mut sum, latency| {
            sum.add(latency);
            sum
        })
    }
}

/// A program that a process ran.
pub struct Process {
    /// The process's id.
    pub pid: u32,
    /// The program's name, as it stands in its record: any bytes.
    pub command: String,
    /// Numbers that the program counted.
    pub numbers: Numbers,
    /// Notices of the program, with their values.
    pub notices: Vec<(Notice, u64)>,
}

/// Programs that are no longer counted one by one.
pub struct Earlier {
    /// Number of programs.
    pub programs: u64,
    /// The sum over all of them.
    pub numbers: Numbers,
    /// Notices of the programs. The value is the first program's.
    pub notices: Vec<(Notice, u64)>,
}

/// Everything that was counted in a session.
pub struct Totals {
    /// Programs that reported. A process that executes another program reports anew.
    pub processes: Vec<Process>,
    /// Number of processes that ran these programs.
    pub count: usize,
    /// Programs that have ended and whose records others have taken over.
    pub earlier: Earlier,
    /// The sum over all of them.
    pub sum: Numbers,
    /// The most anonymous memory that the processes had at once, in bytes.
    pub anonymous_peak: u64,
    /// The last words of the first process that ended by a bug in Farpage.
    pub last_words: Option<String>,
}

impl Totals {
    /// Copies the totals out of a session.
    pub fn of(session: &Session) -> Totals {
        let used = session.processes.iter().filter(|record| record.pid.load(Ordering::Acquire) != 0);
        let processes: Vec<Process> = used.map(process).collect();
        let earlier = Earlier {
            programs: session.earlier_programs.load(Ordering::Relaxed),
            numbers: Numbers::of(&session.earlier.stats),
            notices: notices(&session.earlier),
        };
        let mut sum = earlier.numbers.clone();
        processes.iter().for_each(|process| sum.add(&process.numbers));
        let count = processes.iter().map(|process| process.pid).collect::<BTreeSet<_>>().len();
        // The peak of one process is known more exactly.
        let anonymous_peak = match count {
            0 | 1 => sum.gauge(Gauge::AnonymousPeak),
            _ => session.claims_peak.load(Ordering::Relaxed).max(sum.gauge(Gauge::AnonymousPeak)),
        };
        Totals { processes, count, earlier, sum, anonymous_peak, last_words: notices::last_words(session) }
    }

    /// Every notice with its value and the number of its process, which is 0 for earlier programs.
    pub fn notices(&self) -> impl Iterator<Item = (Notice, u64, u32)> {
        let told = |process: &Process| (process.pid, process.notices.clone());
        let told = self.processes.iter().map(told).chain([(0, self.earlier.notices.clone())]);
        told.flat_map(|(pid, notices)| notices.into_iter().map(move |(notice, value)| (notice, value, pid)))
    }

    /// Whether any program reached its budget.
    pub fn was_active(&self) -> bool {
        self.sum.gauge(Gauge::Active) != 0
    }
}

fn process(record: &ProcessRecord) -> Process {
    Process {
        pid: record.pid.load(Ordering::Acquire),
        command: command(record),
        numbers: Numbers::of(&record.stats),
        notices: notices(record),
    }
}

fn notices(record: &ProcessRecord) -> Vec<(Notice, u64)> {
    Notice::ALL.into_iter().filter_map(|notice| Some((notice, record.noticed(notice)?))).collect()
}

/// A process of the run.
#[derive(Clone)]
pub struct Member {
    /// The process's name, as it stands in its record: any bytes.
    pub command: String,
    /// The most anonymous memory that the process had, in bytes.
    pub anonymous_bytes: u64,
    /// Whether the process holds its record.
    pub is_alive: bool,
    /// Whether Farpage limits the memory of the process: it holds a record, and Farpage has not left it.
    pub is_limited: bool,
    /// Whether Farpage has left a program of the process.
    pub was_left: bool,
}

impl Member {
    fn of(shared: &Shared, at: usize, record: &ProcessRecord) -> Member {
        let is_alive = shared.is_alive(at);
        let was_left =
            [Notice::Retired, Notice::Alone].into_iter().any(|notice| record.noticed(notice).is_some());
        Member {
            command: command(record),
            anonymous_bytes: record.stats.gauge(Gauge::AnonymousPeak),
            is_alive,
            is_limited: is_alive && !was_left,
            was_left,
        }
    }

    /// Whether the process runs on without a limit.
    pub const fn is_left(&self) -> bool {
        self.was_left && !self.is_limited
    }
}

/// Returns the processes of the run by pid. A process that has ended stays until another process takes its
/// record. After an exec the entry is the program with more memory.
pub fn members(shared: &Shared) -> BTreeMap<u32, Member> {
    let mut members = BTreeMap::new();
    for (at, record) in shared.session().processes.iter().enumerate() {
        let pid = record.pid.load(Ordering::Acquire);
        if pid == 0 {
            continue;
        }
        let member = Member::of(shared, at, record);
        let known: &mut Member = members.entry(pid).or_insert_with(|| member.clone());
        known.is_alive |= member.is_alive;
        known.is_limited |= member.is_limited;
        known.was_left |= member.was_left;
        if member.anonymous_bytes > known.anonymous_bytes {
            (known.command, known.anonymous_bytes) = (member.command, member.anonymous_bytes);
        }
    }
    members
}

/// Returns the name in a record: at most 16 bytes, of any kind.
pub fn command(record: &ProcessRecord) -> String {
    let words = record.command.each_ref().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
    session::text(words.as_flattened())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A session in which two programs have counted.
    pub fn two_programs() -> Shared {
        let areas = [session::tests::area("/var/tmp", 1 << 20, &[])];
        let shared = Shared::new(session::tests::settings(), &areas).unwrap();
        for (n, record) in shared.session().processes.iter().take(2).enumerate() {
            let n = n as u64 + 1;
            record.pid.store(100 + n as u32, Ordering::Release);
            record.command[0].store(u64::from_ne_bytes(*b"python3\0"), Ordering::Relaxed);
            record.stats.set(Gauge::Active, 1);
            record.stats.set(Gauge::AnonymousPeak, n * (100 << 20));
            record.stats.set(Gauge::ProgramPeak, n * (500 << 20));
            record.stats.set(Gauge::PoolPeak, n << 20);
            record.stats.set(Gauge::StoredPeak, 3 * n * 256);
            record.stats.add(Counter::Pswpout, 320 * n);
            record.stats.add(Counter::AreaSlots, 160 * n);
            record.stats.add(Counter::AreaWrites, 10 * n);
            record.stats.add(Counter::FaultPool, n);
            record.stats.latency(Latency::Pool).record(n * 10_000);
        }
        // The two peaks were not at the same time.
        shared.session().claims_peak.store(250 << 20, Ordering::Relaxed);
        shared
    }

    /// `sh -c 'exec ./grow'` must count as one process.
    #[test]
    fn process_that_executes_another_program_is_one() {
        let shared = two_programs();
        shared.session().processes[1].pid.store(101, Ordering::Release);
        let totals = Totals::of(shared.session());
        assert_eq!((totals.processes.len(), totals.count), (2, 1));
        // The peak of a single process is its own.
        assert_eq!(totals.anonymous_peak, 200 << 20);
    }

    /// A process that Farpage has left runs on without a limit, until it executes a program that joins.
    #[test]
    fn process_is_left_until_another_program_of_it_joins() {
        let shared = two_programs();
        let processes = &shared.session().processes;
        processes[0].notice(Notice::Retired, 0);
        assert!(members(&shared)[&101].is_left() && !members(&shared)[&102].is_left());
        processes[1].pid.store(101, Ordering::Release);
        assert!(members(&shared)[&101].is_left(), "a record that nobody holds limits nothing");
        let file = std::fs::File::options().read(true).write(true).open(shared.path()).unwrap();
        crate::host::sys::lock_byte(&file, 1, true).unwrap();
        assert!(!members(&shared)[&101].is_left() && members(&shared)[&101].is_alive);
    }

    #[test]
    fn pages_in_the_pool_are_those_of_the_largest_pool() {
        let shared = two_programs();
        shared.session().processes[0].stats.set(Gauge::StoredPeak, 9999);
        let sum = Totals::of(shared.session()).sum;
        assert_eq!((sum.gauge(Gauge::PoolPeak), sum.gauge(Gauge::StoredPeak)), (2 << 20, 6 * 256));
    }

    /// A record that others have taken over had lost pages. The summary said "problems none".
    #[test]
    fn earlier_programs_count() {
        let shared = two_programs();
        let session = shared.session();
        session.earlier_programs.store(40, Ordering::Relaxed);
        session.earlier.stats.add(Counter::Pswpout, 40);
        session.earlier.notice(Notice::Locked, 0);
        let totals = Totals::of(session);
        assert_eq!((totals.processes.len(), totals.earlier.programs), (2, 40));
        assert_eq!(totals.sum.counter(Counter::Pswpout), 1000);
        assert_eq!(totals.notices().collect::<Vec<_>>(), [(Notice::Locked, 0, 0)]);
    }

    #[test]
    fn counters_are_summed_and_peaks_are_the_highest() {
        let totals = Totals::of(two_programs().session());
        assert_eq!((totals.processes.len(), totals.count), (2, 2));
        assert_eq!((totals.processes[1].pid, totals.processes[1].command.as_str()), (102, "python3"));
        assert_eq!(totals.sum.counter(Counter::Pswpout), 960);
        assert_eq!((totals.sum.gauge(Gauge::AnonymousPeak), totals.anonymous_peak), (200 << 20, 250 << 20));
        assert_eq!((totals.sum.all_latencies().count, totals.sum.all_latencies().max_ns), (2, 20_000));
        assert!(totals.was_active());
    }
}
