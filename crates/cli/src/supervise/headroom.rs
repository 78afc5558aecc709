//! Makes the budget follow the limits: while other processes fill the memory below a limit, the run has less.
//!
//! The supervisor reads every limit 10 to 200 times a second. The supervisor adds the memory that the limit
//! leaves to the memory that this user's runs have below the limit. Then it divides the sum among the runs,
//! as a run divides its budget among its processes. Keepers read the result in the session, and evict before
//! the kernel's out-of-memory killer has to act.

use crate::host::budget::{self, Limit, PROCESS_BYTES, Roots, START_BYTES};
use crate::host::neighbours::{Holding, Neighbours};
use crate::supervise::session::Shared;
use crate::supervise::summary::is_much_less;
use crate::text::numbers::iec;
use farpage_runtime::pressure::kin::Claimed;
use farpage_runtime::pressure::share::allowance;
use farpage_runtime::session::ram_now_within;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Recent looks of which the lowest counts. A look reads usage and claims one after the other, so memory that
/// is freed in between counts twice.
const LOOKS: usize = 8;
/// Most bytes that several processes fill in a nanosecond. The next look comes before the processes could
/// fill what a limit leaves.
const FILL_BYTES_PER_NS: u64 = 4;
/// Bounds of the pause between two looks.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The result of one look at one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    /// Memory in bytes that the run may have.
    bytes: u64,
    /// Bytes that are free below the limit, without the reserve.
    free_bytes: u64,
}

/// Follows the limits of one run.
pub struct Headroom {
    roots: Roots,
    /// The budget that was asked for.
    ram_bytes: u64,
    neighbours: Neighbours,
    /// Results of the recent looks, and the place of the next one.
    looks: [u64; LOOKS],
    next: usize,
    /// The lowest budget so far.
    least_bytes: u64,
    /// Time of the next look; none before the first.
    next_look: Option<Instant>,
    /// Whether the user has been told that the budget is less.
    is_told: bool,
    /// The limit that left the least memory at the last look.
    tightest: Option<Limit>,
}

impl Headroom {
    /// A follower for a budget of `ram_bytes`.
    pub fn new(roots: Roots, ram_bytes: u64, neighbours: Neighbours) -> Headroom {
        let looks = [ram_bytes; LOOKS];
        Headroom {
            roots,
            ram_bytes,
            neighbours,
            looks,
            next: 0,
            least_bytes: ram_bytes,
            next_look: None,
            is_told: false,
            tightest: None,
        }
    }

    /// Reads the limits if it is time, and writes the budget into the session. Returns the pause
    /// until the next look.
    pub fn look(&mut self, shared: &Shared) -> Duration {
        let now = Instant::now();
        if self.next_look.is_none_or(|at| now >= at) {
            self.next_look = Some(now + self.look_now(shared));
        }
        self.next_look.map_or(PAUSE_MIN, |at| at.saturating_duration_since(Instant::now()))
    }

    fn look_now(&mut self, shared: &Shared) -> Duration {
        self.neighbours.find(&self.roots, shared.session().neighbours.load(Ordering::Relaxed));
        let own = Holding::of(shared.session(), shared.file());
        let before = ram_now_within(shared.ram_now(), self.ram_bytes);
        let others = self.neighbours.holdings();
        let mut least = Look { bytes: u64::MAX, free_bytes: u64::MAX };
        for limit in budget::limits(&self.roots) {
            let others = others.iter().filter(|(groups, _)| limit.is_above(groups)).map(|(_, run)| *run);
            let all: Vec<_> = [own].into_iter().chain(others).map(|run| run.below(&limit)).collect();
            let found = look_at(&limit, before, &all);
            if found.bytes < least.bytes {
                self.tightest = Some(limit);
            }
            least.bytes = least.bytes.min(found.bytes);
            least.free_bytes = least.free_bytes.min(found.free_bytes);
        }
        let bytes = self.lowest_recent(least.bytes);
        self.least_bytes = self.least_bytes.min(bytes);
        shared.set_ram_now(bytes);
        Duration::from_nanos(least.free_bytes / FILL_BYTES_PER_NS).clamp(PAUSE_MIN, PAUSE_MAX)
    }

    /// Notes a result. Returns the lowest result of the recent looks, within the bounds of a budget.
    fn lowest_recent(&mut self, bytes: u64) -> u64 {
        self.looks[self.next] = bytes;
        self.next = (self.next + 1) % LOOKS;
        let least = self.looks.iter().copied().min().unwrap_or(bytes);
        ram_now_within(least.max(1), self.ram_bytes)
    }

    /// Returns the lowest budget so far, in bytes.
    pub const fn least_bytes(&self) -> u64 {
        self.least_bytes
    }

    /// Returns a note for the user, once, if the budget is much less.
    pub fn news(&mut self) -> Option<String> {
        let is_news = !self.is_told && is_much_less(self.least_bytes, self.ram_bytes);
        let limit = self.tightest.as_ref().filter(|_| is_news)?;
        self.is_told = true;
        let (bytes, file, source) = (iec(limit.bytes), limit.file.display(), limit.source);
        let is_least = self.least_bytes <= ram_now_within(1, self.ram_bytes);
        let what = match (limit.is_what_is_left(), is_least) {
            (true, _) => format!("{bytes} are left beside what this run has, says {file} ({source})"),
            (false, true) => format!("of the {bytes} in {file} ({source}), less is left to this run"),
            (false, false) => format!("of the {bytes} in {file} ({source}), no more is left to this run"),
        };
        let least = if is_least { ", an eighth and the least," } else { "" };
        let [budget, now] = [self.ram_bytes, self.least_bytes].map(iec);
        Some(format!("note: the budget of {budget} is {now}{least} for now: {what}"))
    }
}

/// Divides what a limit leaves among these runs. Returns the part of the first run, whose budget was
/// `before` bytes until now.
fn look_at(limit: &Limit, before: u64, all: &[Holding]) -> Look {
    let has =
        all.iter().fold(0_u64, |sum, run| sum.saturating_add(run.claimed.has)).min(limit.runs_bytes_max);
    let kept = |run: &Holding| run.processes * PROCESS_BYTES + if run.is_active { 0 } else { START_BYTES };
    let kept = all.iter().map(kept).sum::<u64>() + limit.reserve_bytes();
    let total = has.saturating_add(limit.left_bytes()).saturating_sub(kept);
    let claimed = set_aside(total, all);
    Look { bytes: allowance(total, before, 0, &claimed).bytes, free_bytes: total.saturating_sub(has) }
}

/// Returns what the runs claim. A run whose budget is less than its part of the free memory claims all of
/// that budget, and has no part in the rest.
fn set_aside(total: u64, all: &[Holding]) -> Vec<Claimed> {
    let mut claimed: Vec<_> = all.iter().map(|run| run.claimed).collect();
    loop {
        let have = claimed.iter().fold(0_u64, |sum, run| sum.saturating_add(run.has));
        let grows = |run: &Claimed| run.needs > run.has;
        let sharers = 1 + claimed.iter().skip(1).filter(|run| grows(run)).count() as u64;
        let part = total.saturating_sub(have) / sharers;
        let is_little =
            |run: &Claimed, most: u64| grows(run) && most != 0 && most.saturating_sub(run.has) < part;
        let mut others = claimed.iter_mut().zip(all).skip(1);
        let Some((run, Holding { most, .. })) = others.find(|(run, holding)| is_little(run, holding.most))
        else {
            return claimed;
        };
        run.has = run.has.max(*most);
        run.needs = run.has;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sys;
    use crate::supervise::session::tests::settings;
    use farpage_core::stats::Gauge;
    use std::fs::File;

    const MIB: u64 = 1 << 20;

    fn limit(bytes: u64, held_bytes: u64) -> Limit {
        Limit {
            source: "cgroup v2 memory.max",
            file: "/x/memory.max".into(),
            bytes,
            held_bytes,
            runs_bytes: 0,
            runs_bytes_max: held_bytes,
        }
    }

    fn run(has_mib: u64, more_mib: u64, processes: u64) -> Holding {
        let (has, needs) = (has_mib * MIB, (has_mib + more_mib) * MIB);
        let claimed = Claimed { has, needs, ..Claimed::default() };
        Holding { claimed, processes, is_active: true, ..Holding::default() }
    }

    /// Returns what a limit of 128 MiB leaves to the first run, in KiB.
    fn leaves_kib(held_mib: u64, all: &[Holding]) -> u64 {
        look_at(&limit(128 * MIB, held_mib * MIB), 128 * MIB, all).bytes / 1024
    }

    #[test]
    fn run_may_have_what_nobody_else_holds_but_for_a_reserve() {
        let all_but = |mib: u64, kib: u64| (128 - 8 - mib) * 1024 - kib;
        assert_eq!(leaves_kib(10, &[run(0, 0, 1)]), all_but(10, 256), "a process of the run has a reserve");
        assert_eq!(leaves_kib(110, &[run(100, 4, 1)]), all_but(10, 256), "what it has itself doesn't matter");
        assert_eq!(leaves_kib(110, &[run(100, 4, 9)]), all_but(10, 9 * 256));
        let starting = Holding { is_active: false, ..run(100, 4, 1) };
        assert_eq!(leaves_kib(110, &[starting]), all_but(10, 256 + 2560), "the engine has not started");
        assert_eq!(leaves_kib(300, &[run(0, 0, 1)]), 0, "a limit that was lowered");
    }

    /// If each run took 90 % of the group, the kernel would kill one of them.
    #[test]
    fn runs_share_what_they_have_below_a_limit() {
        let both = [run(60, 8, 1), run(60, 8, 1)];
        let half = (128 - 8) * 1024 / 2 - 256;
        assert_eq!(leaves_kib(120, &both), half);
        // A run that needs little leaves the rest to the other run.
        assert_eq!(leaves_kib(120, &[run(100, 8, 1), run(20, 0, 1)]), (128 - 8 - 20) * 1024 - 512);
        // A new run gets memory from a run that has more, at once.
        let small = leaves_kib(110, &[run(10, 8, 1), run(100, 8, 1)]);
        let large = leaves_kib(110, &[run(100, 8, 1), run(10, 8, 1)]);
        assert!(small >= 10 * 1024 && large <= 102 * 1024, "{small} {large}");
    }

    /// Many runs with little budgets must not leave only a small part of the machine to a run with a large
    /// budget.
    #[test]
    fn runs_with_little_budgets_have_no_part_in_what_they_may_not_have() {
        let little = Holding { most: 10 * MIB, ..run(6, 4, 1) };
        let large = run(20, 8, 1);
        let all = [large, little, little];
        assert_eq!(leaves_kib(32, &all), (128 - 8 - 20) * 1024 - 3 * 256);
        // Memory that a run has beyond its budget is its own. A run whose budget isn't little takes part.
        let over = Holding { most: 10 * MIB, ..run(14, 4, 1) };
        assert_eq!(leaves_kib(34, &[large, over]), (128 - 8 - 14) * 1024 - 2 * 256);
        let other = Holding { most: 100 * MIB, ..run(20, 8, 1) };
        let half = (128 - 8 - 10) * 1024 / 2;
        assert!(leaves_kib(46, &[large, little, other]).abs_diff(half) < 1024);
    }

    #[test]
    fn pause_is_as_long_as_filling_what_is_left_takes() {
        let free = |held| look_at(&limit(1 << 30, held), 1 << 30, &[run(0, 0, 0)]).free_bytes;
        assert_eq!(free(0), (1 << 30) - (64 << 20));
        assert_eq!(free(1 << 30), 0);
    }

    /// A machine made of files, whose cgroup has a limit and holds some memory.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(limit_mib: u64) -> Machine {
            let machine = Machine(tempfile::tempdir().unwrap());
            machine.put("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n");
            machine.put("proc/self/cgroup", "0::/a\n");
            machine.put("cgroup/cgroup.controllers", "memory\n");
            machine.put("cgroup/a/memory.max", &(limit_mib * MIB).to_string());
            machine.holds(0);
            machine
        }
        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        fn holds(&self, mib: u64) {
            self.put("cgroup/a/memory.current", &(mib * MIB).to_string());
        }
        fn headroom(&self, ram_mib: u64) -> Headroom {
            let root = |name| self.0.path().join(name);
            let roots = Roots { proc: root("proc"), cgroup: root("cgroup") };
            Headroom::new(roots, ram_mib * MIB, Neighbours::default())
        }
    }

    /// A session with a process that evicts, and the descriptor by which the process holds its record.
    fn shared() -> (Shared, File) {
        let shared = Shared::new(settings(), &[]).unwrap();
        let process = File::options().read(true).write(true).open(shared.path()).unwrap();
        sys::lock_byte(&process, 0, true).unwrap();
        let record = &shared.session().processes[0];
        record.pid.store(1 << 30, Ordering::Relaxed);
        record.stats.set(Gauge::Active, 1);
        (shared, process)
    }

    #[test]
    fn budget_follows_what_others_leave_and_says_so_once() {
        let (machine, (shared, _process)) = (Machine::new(128), shared());
        let mut headroom = machine.headroom(64);
        let mut after = |held| {
            machine.holds(held);
            let pause = (0..LOOKS).map(|_| headroom.look_now(&shared)).last().unwrap();
            (shared.ram_now() / MIB, pause, headroom.news())
        };
        assert_eq!(after(20), (64, Duration::from_nanos(100 * MIB / FILL_BYTES_PER_NS), None));
        let (now, _, news) = after(80);
        assert_eq!(now, 40);
        let news = news.unwrap();
        assert!(news.contains("the budget of 64 MiB is 40 MiB for now: of the 128 MiB in "), "{news}");
        assert_eq!(after(120), (8, PAUSE_MIN, None), "an eighth remains, whatever happens");
        assert_eq!(after(20).0, 64);
        assert_eq!(headroom.least_bytes(), 8 * MIB);
    }

    /// The note said that no more was left of 1 GiB (MemAvailable) than 6 GiB, of which the run had 5.
    #[test]
    fn available_memory_is_what_is_left_beside_the_run() {
        let news = |available_mib: u64| {
            let (machine, (shared, _process)) = (Machine::new(8000), shared());
            let meminfo = format!("MemTotal: 9000000 kB\nMemAvailable: {} kB\n", available_mib * 1024);
            machine.put("proc/meminfo", &meminfo);
            let mut headroom = machine.headroom(64);
            (0..LOOKS).for_each(|_| _ = headroom.look_now(&shared));
            headroom.news().unwrap()
        };
        let told = |news: &str, mib| {
            news.contains(&format!(" for now: {mib} MiB are left beside what this run has, says "))
                && news.ends_with("meminfo (MemAvailable)")
        };
        assert!(told(&news(50), 50) && !news(50).contains("eighth"), "{}", news(50));
        let least = news(1);
        assert!(told(&least, 1) && least.contains(" is 8 MiB, an eighth and the least, for now"), "{least}");
    }

    /// Usage and claims are read one after the other, so a look that finds more may be wrong. If that look
    /// were believed, the kernel would kill the program.
    #[test]
    fn one_look_that_finds_more_is_not_believed() {
        let (machine, (shared, _process)) = (Machine::new(128), shared());
        let mut headroom = machine.headroom(100);
        let mut now = |held| {
            machine.holds(held);
            headroom.look_now(&shared);
            shared.ram_now() / MIB
        };
        assert_eq!([now(100), now(20), now(100)], [20; 3]);
        assert_eq!((0..LOOKS).map(|_| now(40)).last(), Some(80));
    }
}
