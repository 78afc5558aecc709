//! The result of a run: a dozen lines for people; [`json`] is the same for programs.

mod json;

pub use json::{codec_name, faults_name, install_name, io_name, json, uffd_name};

use crate::areas::Area;
use crate::budget::Budget;
use crate::failure::STATUS_FAILED;
use crate::notices::{self, About};
use crate::numbers::{duration, grouped, iec, suggestion_below};
use crate::oom;
use crate::outside;
use crate::say;
use crate::sys::{self, ChildState};
use crate::totals::{Numbers, Totals};
use farpage::session::{Notice, PROCESSES_MAX, Settings};
use farpage_core::stats::{Counter, Gauge};
use farpage_core::units::PAGE_BYTES;
use libc::SIGKILL;
use std::time::Duration;

const PAGE: u64 = PAGE_BYTES as u64;

/// Problems of single processes that are told; the rest is counted.
const PROBLEMS_MAX: usize = 20;

/// Processes without a budget that are named; the rest is counted.
const OUTSIDE_MAX: usize = 8;

/// Divisor of the budget for what a run may have above it without a word.
const OVER_PARTS: u64 = 20;

/// What the summary is about.
pub struct Run<'a> {
    /// The command line of the program.
    pub program: &'a [String],
    /// How it ended.
    pub exit: ChildState,
    /// The most memory in RAM that it or one of its children had, in bytes, files included.
    pub resident_peak: u64,
    /// Whether that is the kernel's word; else what was seen.
    pub is_peak_known: bool,
    /// How long it took.
    pub wall: Duration,
    /// What it was allowed.
    pub budget: &'a Budget,
    /// The least that the budget was meanwhile, by what limits left.
    pub least_bytes: u64,
    /// What was chosen.
    pub settings: &'a Settings,
    /// Its areas.
    pub areas: &'a [Area],
    /// What it reported.
    pub totals: &'a Totals,
    /// Their names, as they may be printed.
    pub names: &'a [String],
    /// What the kernel's out-of-memory killer did meanwhile.
    pub oom: &'a oom::Report,
    /// Processes without a budget.
    pub outside: &'a outside::Report,
}

// ---- for people ----------------------------------------------------------------------------------------

/// The lines, without their prefix.
pub fn text(run: &Run) -> Vec<String> {
    let mut lines = if run.totals.processes.is_empty() && run.exit == ChildState::Exited(STATUS_FAILED) {
        vec![
            headline(run),
            row("note", "no process reported: Farpage's library was loaded, it seems, and could not start"),
        ]
    } else if run.totals.processes.is_empty() {
        let note = "no process reported: the program ran without a budget. Farpage's library was not loaded (is the \
                    program's loader told to ignore LD_PRELOAD?) or could not start; `farpage doctor` looks at what it needs";
        vec![headline(run), row("note", note)]
    } else if run.totals.was_active() {
        let mut lines = vec![headline(run)];
        lines.extend(details(run));
        lines
    } else if ended_by_us(run) || run.totals.last_words.is_some() {
        // The problem below says why. It did not run as it does without Farpage.
        vec![headline(run)]
    } else if was_over(run) || tells(run, is_unlimited) || was_short(run) || has_outside(run) {
        vec![headline(run), budget_row(run)]
    } else {
        never_reached(run)
    };
    lines.extend(outside_row(run));
    lines.extend(note_on_status(run));
    lines.extend(note_on_killer(run));
    lines.extend(problems(run));
    lines
}

/// Whether there may have been processes that nothing limits.
fn has_outside(run: &Run) -> bool {
    !run.outside.processes.is_empty() || run.outside.missed > 0
}

/// Processes that nothing limits.
fn outside_row(run: &Run) -> Option<String> {
    let outside = run.outside;
    let missed = match outside.missed {
        0 => None,
        missed => Some(format!("{} programs were not followed, too many at once", grouped(missed))),
    };
    let describe = |process: &outside::Process| {
        let size =
            if process.peak == 0 { String::new() } else { format!(", seen with {}", iec(process.peak)) };
        let unknown =
            if process.peak == 0 { "it ended before Farpage could look" } else { "it did not join the run" };
        let why = process.why.as_deref().unwrap_or(unknown);
        format!("{} (pid {}{size}: {})", say::harmless(&process.path), process.pid, say::harmless(why))
    };
    let named: Vec<_> = outside.processes.iter().take(OUTSIDE_MAX).map(describe).collect();
    let count = (outside.processes.len() as u64).saturating_add(outside.more);
    let more = match count - named.len() as u64 {
        0 => String::new(),
        more => format!(" and {} more", grouped(more)),
    };
    let processes = if count == 1 { "1 process".into() } else { format!("{} processes", grouped(count)) };
    // Of processes that have ended the kernel knows the largest, if they were waited for.
    let seen = outside.processes.iter().map(|process| process.peak).max().unwrap_or(0);
    let largest = iec(run.resident_peak.max(seen));
    let named = named.join(", ");
    let had = format!(
        "{processes} had no budget: {named}{more}; the largest of the run had at least {largest} in RAM"
    );
    let texts: Vec<_> = (count > 0).then_some(had).into_iter().chain(missed).collect();
    (!texts.is_empty()).then(|| row("outside", &texts.join("; ")))
}

/// Whether a process ran on, and nothing of it was evicted from some time on.
const fn is_unlimited(notice: Notice) -> bool {
    matches!(notice, Notice::NotArmed | Notice::Alone | Notice::Retired)
}

/// Whether Farpage ended a process, or did not let it begin.
fn ended_by_us(run: &Run) -> bool {
    tells(run, is_an_end)
}

fn tells(run: &Run, is_meant: impl Fn(Notice) -> bool) -> bool {
    let mut notices = run.totals.processes.iter().flat_map(|process| &process.notices);
    notices.any(|(notice, _)| is_meant(*notice))
}

/// Whether all processes together had more than the budget, though none of them had so much that it was managed.
fn was_over(run: &Run) -> bool {
    !run.totals.was_active() && run.totals.anonymous_peak > run.budget.ram_bytes
}

/// Why a run was over its budget, if none of its processes has counted that it was.
fn over(run: &Run) -> Option<String> {
    let (budget, peak) = (run.budget.ram_bytes, run.totals.anonymous_peak);
    if was_over(run) {
        let is_told_below = ended_by_us(run) || tells(run, is_unlimited);
        let many = "memory was over the budget: each of many processes had so little that it wasn't managed";
        return (!is_told_below).then(|| many.into());
    }
    // Eviction takes time, so a run may be a little over its budget.
    let is_told = run.totals.sum.counter(Counter::OverBudget) > 0;
    let is_over = !is_told && run.totals.was_active() && peak > budget.saturating_add(budget / OVER_PARTS);
    is_over.then(|| {
        let count = run.totals.count;
        let which = if count > 1 {
            format!(" of {} processes together", grouped(count as u64))
        } else {
            String::new()
        };
        format!("memory{which} was {} over the budget at its peak", iec(peak - budget))
    })
}

/// Whether the kernel killed for memory, as far as that can be known: of the program itself, or in its cgroup.
fn was_short(run: &Run) -> bool {
    let kills = run.oom.kills;
    kills.group > 0 || kills.machine > Some(0) && run.exit == ChildState::Killed(SIGKILL)
}

const fn is_an_end(notice: Notice) -> bool {
    matches!(notice, Notice::NotStarted | Notice::BudgetTooSmall | Notice::Stopped)
}

fn headline(run: &Run) -> String {
    let (name, wall) = (name(run), duration(run.wall.as_nanos() as u64));
    let processes = match run.totals.count {
        // Later ones take over the records of those that have ended.
        count if run.totals.processes.len() == PROCESSES_MAX => format!(" ({count} processes or more)"),
        0 | 1 => String::new(),
        count => format!(" ({count} processes; peaks of the pool and of programs are the largest one's)"),
    };
    match run.exit {
        ChildState::Killed(signal) => {
            format!("{name} was killed by {} after {wall}{processes}", sys::signal_name(signal))
        }
        ChildState::Exited(status) => format!("{name} ended with status {status} after {wall}{processes}"),
        ChildState::Ended => {
            format!("{name} ended after {wall}{processes}; by which status or signal only its parent knows")
        }
        ChildState::Running | ChildState::Stopped(_) => format!("{name} runs on after {wall}{processes}"),
    }
}

fn name(run: &Run) -> String {
    let name = run.program.first().map_or("?", String::as_str);
    name.rsplit('/').next().unwrap_or(name).to_owned()
}

fn never_reached(run: &Run) -> Vec<String> {
    // Whatever else ended it must still be told: a signal, an error of its own.
    let mut lines = Vec::new();
    lines.extend((run.exit != ChildState::Exited(0)).then(|| headline(run)));
    lines.push(within(run));
    lines.push("nothing was registered: no fault went through Farpage".into());
    lines
}

/// That the budget wasn't reached. Only of one process does the kernel know the peak; what several have together is sampled.
fn within(run: &Run) -> String {
    let (name, budget) = (name(run), iec(run.budget.ram_bytes));
    let sampled = iec(run.totals.anonymous_peak);
    let least = if run.is_peak_known { "" } else { "at least " };
    let resident = format!("{least}{}", iec(run.resident_peak));
    match run.totals.count {
        0 | 1 if run.is_peak_known && run.resident_peak <= run.budget.ram_bytes => {
            format!("{name} stayed within its budget of {budget} (peak {resident} in RAM, files included)")
        }
        0 | 1 => format!(
            "{name} was not seen above its budget of {budget} (peak {sampled} anonymous, as sampled; {resident} in RAM, files included)"
        ),
        count => format!(
            "{name} and its processes, {count} in all, were not seen above their budget of {budget} (peak {sampled} together, as sampled; \
             the largest had at least {resident} in RAM, files included)"
        ),
    }
}

/// 134 is also what a shell answers for a program that aborted: only a silent one is suspicious.
fn note_on_status(run: &Run) -> Option<String> {
    let text = "status 134 without a message of the program's own may be a bug in Farpage: please report it \
                with this summary";
    (run.exit == ChildState::Exited(134) && run.totals.last_words.is_none()).then(|| row("note", text))
}

fn row(label: &str, text: &str) -> String {
    format!("  {label:<10} {text}")
}

fn details(run: &Run) -> Vec<String> {
    let n = &run.totals.sum;
    let mut rows = vec![budget_row(run), program_row(run, n), pool_row(run, n), evicted_row(n)];
    rows.extend((!run.areas.is_empty()).then(|| to_areas_row(run, n)));
    rows.extend((!run.areas.is_empty()).then(|| from_areas_row(n)));
    rows.extend([faults_row(n), latency_row(n), time_row(run, n)]);
    rows
}

fn budget_row(run: &Run) -> String {
    let (budget, peak) = (run.budget.ram_bytes, run.totals.anonymous_peak);
    let share = percent(peak, budget);
    let origin = &run.budget.origin;
    let less = if is_much_less(run.least_bytes, budget) {
        format!(", down to {} as a limit left no more", iec(run.least_bytes))
    } else {
        String::new()
    };
    row("budget", &format!("{} ({origin}){less}; peak {} anonymous, {share}", iec(budget), iec(peak)))
}

/// Whether the budget became so much less that a user notices.
pub const fn is_much_less(bytes: u64, budget_bytes: u64) -> bool {
    bytes < budget_bytes - budget_bytes / 32
}

fn program_row(run: &Run, n: &Numbers) -> String {
    let most = n.gauge(Gauge::ProgramPeak);
    let times = most as f64 / run.budget.ram_bytes as f64;
    row("program", &format!("{} at most, in memory and evicted: {times:.1} times its budget", iec(most)))
}

fn pool_row(run: &Run, n: &Numbers) -> String {
    let (peak, pages) = (n.gauge(Gauge::PoolPeak), n.gauge(Gauge::StoredPeak));
    let ratio = match peak {
        0 => String::new(),
        _ => format!(", {:.1} : 1", pages.saturating_mul(PAGE) as f64 / peak as f64),
    };
    let (limit, codec) = (iec(run.settings.pool_bytes_max), codec_name(run.settings.codec));
    let denser = parts(n, &[(Counter::PoolDensified, "made denser")]);
    let pages = grouped(pages);
    row("pool", &format!("{} of {limit} at most, for {pages} pages ({codec}{ratio}){denser}", iec(peak)))
}

/// Where evicted pages went: the parts add up to the pages.
fn evicted_row(n: &Numbers) -> String {
    let counter = |counter| n.counter(counter);
    let pages = counter(Counter::EvictTaken);
    let as_they_are = match counter(Counter::StoredIncompressible) {
        0 => String::new(),
        count => format!(" ({} as they are)", grouped(count)),
    };
    let mut parts = vec![
        (counter(Counter::Zswpout), format!("to the pool{as_they_are}")),
        (counter(Counter::Pswpout).saturating_sub(counter(Counter::Zswpwb)), "past the pool".into()),
        (counter(Counter::SwpoutZero), "zero".into()),
        (counter(Counter::SwpoutSame), "same-filled".into()),
        (counter(Counter::EvictClean), "unchanged".into()),
    ];
    let went = parts.iter().fold(0_u64, |sum, (count, _)| sum.saturating_add(*count));
    parts.push((pages.saturating_sub(went), "touched again or freed before that".into()));
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<_> = parts.map(|(count, words)| format!("{} {words}", grouped(*count))).collect();
    let colon = if parts.is_empty() { "" } else { ": " };
    row("evicted", &format!("{} pages{colon}{}", grouped(pages), parts.join(", ")))
}

fn to_areas_row(run: &Run, n: &Numbers) -> String {
    let (pages, writes) = (n.counter(Counter::Pswpout), n.counter(Counter::AreaWrites));
    let slots = n.counter(Counter::AreaSlots);
    let names: Vec<_> = run.areas.iter().map(|area| area.path.display().to_string()).collect();
    let mean = match writes {
        0 => String::new(),
        _ => format!(" in {} writes of {}", grouped(writes), iec(slots.saturating_mul(PAGE) / writes)),
    };
    // Counted when they are sent; some may not have arrived when the program ended.
    let from_pool = match n.counter(Counter::Zswpwb).min(pages) {
        0 => String::new(),
        from_pool => format!("; {} of them from the pool", grouped(from_pool)),
    };
    let shared = if slots < pages { format!(" in {} slots", grouped(slots)) } else { String::new() };
    let bytes = iec(slots.saturating_mul(PAGE));
    row(
        "written",
        &format!("{} pages{shared}, {bytes}{mean}{from_pool}, to {}", grouped(pages), names.join(", ")),
    )
}

fn from_areas_row(n: &Numbers) -> String {
    let pages = n.counter(Counter::Pswpin);
    row("read", &format!("{} pages", grouped(pages)))
}

/// The kinds of fault, with the words for them.
const FAULTS: [(Counter, &str); 8] = [
    (Counter::FaultFirst, "first touch"),
    (Counter::FaultParked, "parked"),
    (Counter::FaultPool, "pool"),
    (Counter::FaultArea, "area"),
    (Counter::FaultWrite, "first write"),
    (Counter::FaultJoined, "joined"),
    (Counter::FaultSpurious, "spurious"),
    (Counter::FaultLost, "LOST"),
];

fn faults_row(n: &Numbers) -> String {
    let total = FAULTS.iter().fold(0_u64, |sum, (counter, _)| sum.saturating_add(n.counter(*counter)));
    row("faults", &format!("{}{}", grouped(total), parts(n, &FAULTS)))
}

fn latency_row(n: &Numbers) -> String {
    let all = n.all_latencies();
    let text = format!(
        "mean {}, p50 {}, p99 {}, max {}",
        duration(all.mean_ns()),
        duration(all.percentile_ns(50.0)),
        duration(all.percentile_ns(99.0)),
        duration(all.max_ns)
    );
    row("latency", &text)
}

/// Threads may wait at the same time: their sum is an upper bound of the time by which the run was longer.
fn time_row(run: &Run, n: &Numbers) -> String {
    let (lost, wall) = (n.all_latencies().sum_ns, run.wall.as_nanos() as u64);
    let share = if lost <= wall {
        format!("at most {} of the run", percent(lost, wall))
    } else {
        "several waited at once".into()
    };
    row("time lost", &format!("{} to faults, summed over threads: {share}", duration(lost)))
}

/// `: 5 of this, 7 of that`, without what didn't happen.
fn parts(n: &Numbers, kinds: &[(Counter, &str)]) -> String {
    let happened = kinds.iter().filter(|(counter, _)| n.counter(*counter) > 0);
    let parts: Vec<_> =
        happened.map(|(counter, word)| format!("{} {word}", grouped(n.counter(*counter)))).collect();
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "0 %".into() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// The killer, as the rows name it.
const KILLER: &str = "the kernel's out-of-memory killer";

fn victims_count(count: u64) -> String {
    if count == 1 { "a process".into() } else { format!("{} processes", grouped(count)) }
}

/// Kills on the machine that aren't known to have anything to do with the run.
fn kills_elsewhere(run: &Run) -> Option<u64> {
    let kills = run.oom.kills;
    let may_be_ours =
        kills.group > 0 || run.exit == ChildState::Killed(SIGKILL) || !run.oom.victims.is_empty();
    kills.machine.filter(|count| *count > 0 && !may_be_ours)
}

fn note_on_killer(run: &Run) -> Option<String> {
    let ended = victims_count(kills_elsewhere(run)?);
    let text =
        format!("{KILLER} ended {ended} on this machine meanwhile, none that is known to be of the run");
    Some(row("note", &text))
}

/// Who was sent SIGKILL, and by whom, as far as that can be known.
fn killed(run: &Run) -> Option<String> {
    let (kills, is_killed) = (run.oom.kills, run.exit == ChildState::Killed(SIGKILL));
    if kills_elsewhere(run).is_some() {
        return None;
    }
    let (count, place) = match kills.machine {
        _ if kills.group > 0 => (kills.group, "in its cgroup"),
        Some(count) if count > 0 => (count, "on this machine"),
        Some(_) if is_killed => {
            return Some("it was sent SIGKILL; the kernel counted no kill for memory".into());
        }
        _ => return None,
    };
    let ended = victims_count(count);
    Some(if is_killed {
        format!("{KILLER} most likely ended it: {ended} {place} meanwhile{}", fitting(run))
    } else if kills.group > 0 {
        format!("{KILLER} ended {ended} {place}{}{}", victims(run), fitting(run))
    } else {
        format!("{KILLER} ended {ended} {place} meanwhile{}", victims(run))
    })
}

/// The largest processes of the run that ended when the killer struck.
fn victims(run: &Run) -> String {
    let names =
        run.oom.victims.iter().map(|(pid, command)| format!("{} (pid {pid})", say::harmless(command)));
    let names = names.collect::<Vec<_>>().join(", ");
    if names.is_empty() { String::new() } else { format!("; of the run ended at that time {names}") }
}

/// The limit, and the budget that would most likely have fit.
fn fitting(run: &Run) -> String {
    let Some((limit, by_default)) = &run.budget.limit else { return String::new() };
    let lower = run.budget.ram_bytes / 4 * 3;
    let fits = if *by_default > 0 && *by_default < lower { *by_default } else { lower };
    format!(
        "; the tightest limit is {} in {} ({}), of which {} were in use before: use --ram {} or less, or have more memory",
        iec(limit.bytes),
        limit.file.display(),
        limit.source,
        iec(limit.in_use_bytes()),
        suggestion_below(fits)
    )
}

/// What went wrong, once more in one place: notices may have scrolled away.
fn problems(run: &Run) -> Vec<String> {
    let n = &run.totals.sum;
    let mut rows = Vec::new();
    for (counter, words) in [
        (Counter::FaultLost, "faults on lost pages: the program got SIGBUS"),
        (Counter::ReadErrors, "pages could not be read"),
        (Counter::WriteErrors, "pages could not be written; they were kept"),
        (Counter::AreaFull, "pages found no room in any area"),
        (Counter::OverBudget, "times memory stayed over the budget"),
    ] {
        let count = n.counter(counter);
        rows.extend((count > 0).then(|| row("problem", &format!("{} {words}", grouped(count)))));
    }
    rows.extend(over(run).map(|text| row("problem", &text)));
    rows.extend(run.totals.last_words.as_ref().map(|text| row("problem", text)));
    rows.extend(killed(run).map(|text| row("problem", &text)));
    let about = About { areas: run.names, files: run.areas, budget: run.budget };
    let before = rows.len();
    let mut more = 0;
    for process in &run.totals.processes {
        for (notice, value) in &process.notices {
            let failed = matches!(notice, Notice::ReadError | Notice::Corrupt | Notice::WriteError);
            let unreached = matches!(notice, Notice::PeerOut | Notice::Ring);
            if failed || unreached || is_an_end(*notice) || is_unlimited(*notice) {
                if rows.len() - before == PROBLEMS_MAX {
                    more += 1;
                    continue;
                }
                let text = notices::describe(*notice, *value, &about);
                rows.push(row("problem", &format!("pid {}: {text}", process.pid)));
            }
        }
    }
    rows.extend((more > 0).then(|| row("problems", &format!("{more} more: --stats FILE lists them"))));
    let nothing = rows.is_empty() && run.totals.was_active() && !has_outside(run);
    rows.extend(nothing.then(|| row("problems", "none")));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Shared;
    use crate::session::tests::{area, settings};
    use crate::totals::tests::two_programs;
    use farpage_core::stats::Latency;

    fn with<T>(shared: &Shared, exit: ChildState, test: impl Fn(&Run) -> T) -> T {
        let budget = Budget {
            ram_bytes: 256 << 20,
            origin: "--ram 256M".into(),
            pool_bytes_max: 128 << 20,
            asked_bytes: None,
            limit: None,
        };
        test(&Run {
            program: &["/usr/bin/python3".into(), "x.py".into()],
            exit,
            resident_peak: 150 << 20,
            is_peak_known: true,
            wall: Duration::from_millis(1500),
            budget: &budget,
            least_bytes: budget.ram_bytes,
            settings: &settings(),
            areas: &[area("/var/tmp", 1 << 20, &[])],
            totals: &Totals::of(shared.session()),
            names: &["/var/tmp".into()],
            oom: &oom::Report::default(),
            outside: &outside::Report::default(),
        })
    }

    #[test]
    fn summary_of_a_busy_run_has_a_dozen_lines() {
        let shared = two_programs();
        let lines = with(&shared, ChildState::Exited(0), text);
        assert_eq!(lines.len(), 11, "{lines:#?}");
        for words in [
            "python3 ended with status 0 after 1.5 s (2 processes",
            "256 MiB (--ram 256M); peak 250 MiB anonymous, 97.7 %",
            "1000 MiB at most, in memory and evicted: 3.9 times its budget",
            "2 MiB of 128 MiB at most, for 1,536 pages (auto, 3.0 : 1)",
            "960 pages in 480 slots, 1.9 MiB in 30 writes of 64 KiB, to /var/tmp",
            "3: 3 pool",
            "mean 15.0 µs",
            "problems   none",
        ] {
            assert!(lines.iter().any(|line| line.contains(words)), "{words} in {lines:#?}");
        }
    }

    #[test]
    fn run_within_its_budget_gets_two_lines() {
        let shared = two_programs();
        shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
        let lines = with(&shared, ChildState::Exited(0), text);
        let several = "python3 and its processes, 2 in all, were not seen above their budget of 256 MiB (peak 250 MiB together, \
                       as sampled; the largest had at least 150 MiB in RAM, files included)";
        assert_eq!(lines, [several, "nothing was registered: no fault went through Farpage"]);
        let alone = |resident_peak| {
            shared.session().processes[1].pid.store(101, std::sync::atomic::Ordering::Relaxed);
            with(&shared, ChildState::Exited(0), |run| text(&Run { resident_peak, ..*run })[0].clone())
        };
        assert_eq!(
            alone(201 << 20),
            "python3 stayed within its budget of 256 MiB (peak 201 MiB in RAM, files included)"
        );
        let larger = "python3 was not seen above its budget of 256 MiB (peak 200 MiB anonymous, as sampled; 300 MiB in RAM, files included)";
        assert_eq!(alone(300 << 20), larger);
    }

    /// 8,764 of 718,780 evicted pages were in no part, and "time lost" was 240 % of the run.
    #[test]
    fn parts_add_up_and_nothing_is_more_than_all() {
        let shared = two_programs();
        let stats = &shared.session().processes[0].stats;
        for (counter, count) in [
            (Counter::EvictTaken, 1000),
            (Counter::Zswpout, 500),
            (Counter::StoredIncompressible, 20),
            (Counter::SwpoutZero, 7),
            (Counter::EvictClean, 30),
            // In the pool before they were written: 960 - 950 pages were not.
            (Counter::Zswpwb, 950),
        ] {
            stats.add(counter, count);
        }
        let row = |lines: &[String], label: &str| {
            lines.iter().find(|line| line.starts_with(label)).unwrap().clone()
        };
        let evicted = "  evicted    1,000 pages: 500 to the pool (20 as they are), 10 past the pool, 7 zero, 30 unchanged, \
                       453 touched again or freed before that";
        assert_eq!(row(&with(&shared, ChildState::Exited(0), text), "  evicted"), evicted);
        for (ns, share) in
            [(750_000_000, "at most 50.0 % of the run"), (4_000_000_000, "several waited at once")]
        {
            stats.latency(Latency::Pool).record(ns);
            let time = row(&with(&shared, ChildState::Exited(0), text), "  time lost");
            assert!(time.ends_with(&format!("summed over threads: {share}")), "{time}");
        }
    }

    /// The summary said 121 % of the budget, and "problems none": 150 processes had less each than an engine needs.
    #[test]
    fn run_that_was_over_its_budget_has_a_problem() {
        let told = |peak_mib: u64, over: u64| {
            let shared = two_programs();
            shared.session().claims_peak.store(peak_mib << 20, std::sync::atomic::Ordering::Relaxed);
            shared.session().processes[0].stats.add(Counter::OverBudget, over);
            let lines = with(&shared, ChildState::Exited(0), text);
            lines.into_iter().filter(|line| line.starts_with("  problem")).collect::<Vec<_>>()
        };
        assert_eq!(told(268, 0), ["  problems   none"]);
        assert_eq!(
            told(300, 0),
            ["  problem    memory of 2 processes together was 44 MiB over the budget at its peak"]
        );
        assert_eq!(told(300, 3), ["  problem    3 times memory stayed over the budget"]);
    }

    #[test]
    fn run_that_failed_within_its_budget_keeps_its_headline() {
        let shared = two_programs();
        shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
        for (exit, headline) in [
            (ChildState::Killed(9), "python3 was killed by SIGKILL after 1.5 s"),
            (ChildState::Exited(3), "python3 ended with status 3 after 1.5 s"),
        ] {
            let lines = with(&shared, exit, text);
            assert!(lines[0].starts_with(headline), "{lines:#?}");
            assert!(lines[1].contains("were not seen above their budget of 256 MiB"), "{lines:#?}");
            assert_eq!(lines.len(), 3, "{lines:#?}");
        }
    }

    /// "python3 was killed by SIGKILL" stood there, and "stayed within its budget".
    #[test]
    fn kill_for_memory_is_told_with_the_limit_and_a_budget_that_fits() {
        use crate::budget::Limit;
        use crate::oom::{Kills, Report};
        let (limit, file) = ("cgroup v2 memory.max", "/sys/fs/cgroup/a/memory.max");
        let limit = Limit {
            source: limit,
            file: file.into(),
            bytes: 64 << 20,
            held_bytes: 4 << 20,
            runs_bytes: 0,
            runs_bytes_max: 0,
        };
        let lines = |exit, group, machine, victims: &[(u32, &str)]| {
            let victims = victims.iter().map(|(pid, command)| (*pid, (*command).to_owned())).collect();
            let oom = Report { kills: Kills { group, machine }, victims };
            let shared = two_programs();
            shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
            with(&shared, exit, |run| {
                let budget = Budget { limit: Some((limit.clone(), 54 << 20)), ..run.budget.clone() };
                let run = Run { oom: &oom, budget: &budget, ..*run };
                assert_eq!(json(&run)["oom_kills"]["cgroup"], group);
                text(&run)
            })
        };
        let (killed, ended) = (ChildState::Killed(9), ChildState::Exited(0));
        let fit = "; the tightest limit is 64 MiB in /sys/fs/cgroup/a/memory.max (cgroup v2 memory.max), of which 4 MiB were in use \
                   before: use --ram 54M or less";
        for (exit, group, machine, victims, words) in [
            (
                killed,
                1,
                Some(1),
                &[(7, "python3")][..],
                "killer most likely ended it: a process in its cgroup meanwhile",
            ),
            (killed, 3, Some(3), &[], "killer most likely ended it: 3 processes in its cgroup meanwhile"),
            (
                ended,
                1,
                Some(1),
                &[(7, "gr\now")],
                "ended a process in its cgroup; of the run ended at that time gr\\now (pid 7); the",
            ),
            (ended, 2, None, &[], "killer ended 2 processes in its cgroup; the tightest"),
            (killed, 0, Some(2), &[], "most likely ended it: 2 processes on this machine meanwhile"),
        ] {
            let lines = lines(exit, group, machine, victims);
            assert_eq!(lines.len(), 3, "{lines:#?}");
            assert!(lines[1].starts_with("  budget "), "{lines:#?}");
            assert!(
                lines[2].starts_with("  problem ") && lines[2].contains(words) && lines[2].contains(fit),
                "{lines:#?}"
            );
        }
        // The others of the machine need not be ours, and nobody's SIGKILL is the kernel's.
        for (victims, label, words) in [
            (&[][..], "note", "on this machine meanwhile, none that is known to be of the run"),
            (
                &[(7, "grow")],
                "problem",
                "on this machine meanwhile; of the run ended at that time grow (pid 7)",
            ),
        ] {
            let told = lines(ended, 0, Some(1), victims);
            let start = format!("  {label:<10} the kernel's out-of-memory killer ended a process {words}");
            assert!(told[0].contains("not seen above") && told[2] == start, "{told:#?}");
        }
        assert!(
            lines(killed, 0, Some(0), &[])[3].contains("it was sent SIGKILL; the kernel counted no kill")
        );
        assert!(!lines(killed, 0, None, &[]).iter().any(|line| line.contains("problem")));
        assert!(!lines(ended, 0, Some(0), &[]).iter().any(|line| line.contains("problem")));
    }

    /// What could not be managed, and many processes that each had too little for that, had stayed within the budget, too.
    #[test]
    fn run_that_went_over_its_budget_unmanaged_says_so() {
        for (notice, peak, words) in [
            (Some(Notice::NotArmed), 250 << 20, "pid 101: "),
            (Some(Notice::Alone), 250 << 20, "pid 101: it runs without Farpage"),
            (Some(Notice::Retired), 250 << 20, "pid 101: Farpage has left it"),
            (None, 300 << 20, "memory was over the budget: "),
        ] {
            let shared = two_programs();
            let processes = &shared.session().processes;
            processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
            shared.session().claims_peak.store(peak, std::sync::atomic::Ordering::Relaxed);
            notice.into_iter().for_each(|notice| processes[0].notice(notice, 101));
            let lines = with(&shared, ChildState::Exited(0), text);
            assert_eq!(lines.len(), 3, "{lines:#?}");
            assert!(lines[0].starts_with("python3 ended with status 0"), "{lines:#?}");
            assert!(lines[1].starts_with("  budget     256 MiB (--ram 256M); peak"), "{lines:#?}");
            assert!(lines[2].starts_with(&format!("  problem    {words}")), "{lines:#?}");
        }
    }

    /// `--ram 2M` ended python3 with 125, and the summary said that it had stayed within its budget.
    #[test]
    fn run_that_farpage_ended_did_not_stay_within_its_budget() {
        for (notice, words) in [
            (Notice::BudgetTooSmall, "below the 16 MiB it needs"),
            (Notice::NotStarted, "could not start in it"),
            (Notice::Stopped, "STOPPED rather than given wrong bytes"),
        ] {
            let shared = two_programs();
            shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
            shared.session().processes[0].notice(notice, 16 << 20);
            let lines = with(&shared, ChildState::Exited(125), text);
            assert_eq!(lines.len(), 2, "{lines:#?}");
            assert!(lines[0].starts_with("python3 ended with status 125"), "{lines:#?}");
            assert!(lines[1].starts_with("  problem    pid 101: "), "{lines:#?}");
            assert!(lines[1].contains(words), "{lines:#?}");
        }
    }

    #[test]
    fn stop_of_a_busy_run_is_a_problem() {
        let shared = two_programs();
        shared.session().processes[1].notice(Notice::Stopped, 1);
        let lines = with(&shared, ChildState::Exited(125), text);
        assert!(lines.iter().any(|line| line.starts_with("  problem    pid 102: STOPPED")), "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("none")), "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("  evicted")), "{lines:#?}");
    }

    /// Where no thread could be made for us the summary said that the program had run.
    #[test]
    fn status_125_of_nobody_is_a_start_that_failed() {
        let nobody = |status| {
            with(&Shared::new(settings(), &[]).unwrap(), ChildState::Exited(status), text)[1].clone()
        };
        assert!(nobody(125).contains("could not start") && !nobody(125).contains("ran"), "{}", nobody(125));
        assert!(nobody(0).contains("the program ran without a budget"), "{}", nobody(0));
    }

    /// Status 134 without a word.
    #[test]
    fn last_words_of_an_engine_are_a_problem_in_one_harmless_line() {
        for active in [0, 1] {
            let shared = two_programs();
            shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, active));
            let _ =
                shared.session().last_words.write(102, format_args!("panicked at a.rs:1:2:\nno room\x1b[2J"));
            let lines = with(&shared, ChildState::Exited(134), text);
            let problem = "  problem    INTERNAL ERROR of Farpage in pid 102, which was ended with status 134: \
                           panicked at a.rs:1:2:; no room\\u{1b}[2J; please report it";
            assert!(lines.iter().any(|line| line == problem), "{lines:#?}");
            assert!(
                !lines.iter().any(|line| line.contains("stayed within") || line.contains("may be a bug")),
                "{lines:#?}"
            );
        }
    }

    /// "stayed within its budget of 24 MiB (peak 428 KiB)", of a static child of 60 MiB.
    #[test]
    fn processes_without_a_budget_are_named_and_nothing_is_claimed_of_the_run() {
        for active in [0, 1] {
            let shared = two_programs();
            shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, active));
            let process =
                |pid, path: &str, why: Option<&str>, peak| outside::Process::seen(pid, path, why, peak);
            let mut processes =
                vec![process(7, "./grow\x07", Some("a static program"), 60 << 20), process(8, "x", None, 0)];
            processes.extend((10..20).map(|pid| process(pid, "y", None, 1 << 20)));
            let outside = outside::Report { processes, more: 3, missed: 2 };
            let (lines, json) = with(&shared, ChildState::Exited(0), |run| {
                let run = Run { outside: &outside, ..*run };
                (text(&run), json(&run))
            });
            let start = "  outside    15 processes had no budget: ./grow\\u{7} (pid 7, seen with 60 MiB: a static program), x (pid 8: it ended before Farpage could look), ";
            let end = " and 7 more; the largest of the run had at least 150 MiB in RAM; 2 programs were not followed, too many at once";
            assert!(lines.iter().any(|line| line.starts_with(start) && line.ends_with(end)), "{lines:#?}");
            assert!(
                !lines.iter().any(|line| line.contains("not seen above") || line.contains("none")),
                "{lines:#?}"
            );
            assert_eq!(
                (&json["outside"]["more"], &json["outside"]["processes"][0]["pid"]),
                (&3.into(), &7.into())
            );
        }
    }

    #[test]
    fn status_134_may_be_our_bug() {
        let is_told = |status| {
            let lines = with(&two_programs(), ChildState::Exited(status), text);
            lines.iter().any(|line| line.contains("may be a bug in Farpage"))
        };
        assert!(is_told(134) && !is_told(0) && !is_told(133));
    }

    #[test]
    fn written_row_says_how_much_came_from_the_pool() {
        let shared = two_programs();
        shared.session().processes[0].stats.add(Counter::Zswpwb, 950);
        shared.session().processes[0].stats.add(Counter::AreaSlots, 480);
        let lines = with(&shared, ChildState::Exited(0), text);
        let written =
            "  written    960 pages, 3.8 MiB in 30 writes of 128 KiB; 950 of them from the pool, to /var/tmp";
        assert!(lines.iter().any(|line| line == written), "{lines:#?}");
        assert!(lines.iter().any(|line| line == "  read       0 pages"), "{lines:#?}");
    }

    #[test]
    fn run_that_nobody_reported_from_says_so() {
        let shared = Shared::new(settings(), &[]).unwrap();
        let lines = with(&shared, ChildState::Killed(9), text);
        assert_eq!(lines[0], "python3 was killed by SIGKILL after 1.5 s");
        assert!(lines[1].contains("no process reported"));
    }

    #[test]
    fn lost_page_is_named_with_area_and_offset() {
        let shared = two_programs();
        let record = &shared.session().processes[0];
        record.stats.count(Counter::FaultLost);
        record.notice(Notice::ReadError, farpage::session::pack_io_error(0, 2, 5));
        let lines = with(&shared, ChildState::Killed(7), text);
        assert!(lines.iter().any(|line| line.contains("/var/tmp at offset 8,192")), "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("1 faults on lost pages")), "{lines:#?}");
    }

    #[test]
    fn json_has_every_row_of_every_table() {
        let json = with(&two_programs(), ChildState::Killed(15), json);
        assert_eq!(json["schema"], 1);
        let explained = |name: &str, unit: &str| {
            let help = json["legend"][name]["help"].as_str().unwrap_or_default();
            json["legend"][name]["unit"] == unit && help.ends_with('.') && help == help.trim()
        };
        for counter in Counter::ALL {
            assert!(json["counters"][counter.name()].is_u64(), "{}", counter.name());
            assert!(explained(counter.name(), counter.unit()), "{}", counter.name());
        }
        for gauge in Gauge::ALL {
            assert!(json["gauges"][gauge.name()].is_u64(), "{}", gauge.name());
            assert!(explained(gauge.name(), gauge.unit()), "{}", gauge.name());
        }
        assert_eq!(
            json["legend"]["pswpin"],
            serde_json::json!({ "unit": "pages", "help": "Pages read from areas." })
        );
        for kind in Latency::ALL.iter().map(|kind| kind.name()).chain(["total"]) {
            assert!(json["latency_ns"][kind]["p99"].is_u64(), "{kind}");
        }
        assert_eq!(json["latency_ns"]["total"]["max"], 20_000);
        assert_eq!(json["processes"][1]["counters"]["pswpout"], 640);
        assert_eq!(json["exit"]["name"], "SIGTERM");
        assert_eq!(json["settings"]["areas"][0]["name"], "/var/tmp");
    }
}
