//! The result of a run, in a dozen lines for people. [`json`] says the same for programs.

mod json;

pub use json::{codec_name, faults_name, install_name, io_name, json, uffd_name, wait_name};

use crate::areas::Area;
use crate::host::budget::Budget;
use crate::host::oom;
use crate::host::sys::{self, ChildState};
use crate::supervise::notices::{self, About, Weight};
use crate::supervise::outside;
use crate::supervise::totals::{Numbers, Totals};
use crate::text::failure::STATUS_FAILED;
use crate::text::numbers::{duration, grouped, iec, suggestion_below};
use crate::text::say;
use farpage_core::stats::{Counter, Gauge};
use farpage_core::units::PAGE_BYTES;
use farpage_runtime::session::{Notice, PROCESSES_MAX, Settings};
use libc::SIGKILL;
use std::cmp::Reverse;
use std::time::Duration;

const PAGE: u64 = PAGE_BYTES as u64;

/// Problems of single processes that are printed. Further problems are counted.
const PROBLEMS_MAX: usize = 20;

/// Processes without a budget that are named. Further processes are counted.
const OUTSIDE_MAX: usize = 8;

/// Divisor of the budget that gives what a run may have above it without a word.
const OVER_PARTS: u64 = 20;

/// The run that a summary is about.
pub struct Run<'a> {
    /// The command line of the program.
    pub program: &'a [String],
    /// How the program ended.
    pub exit: ChildState,
    /// The most memory in RAM that the program or one of its children had, in bytes, files included.
    pub resident_peak: u64,
    /// Upper bound in bytes of the true peak, which may be above `resident_peak`; none if nobody knows.
    pub resident_most: Option<u64>,
    /// How long the program took.
    pub wall: Duration,
    /// The budget of the run.
    pub budget: &'a Budget,
    /// The smallest budget meanwhile, by what limits left, in bytes.
    pub least_bytes: u64,
    /// The settings that were chosen.
    pub settings: &'a Settings,
    /// Whether a run that stays above its budget is ended.
    pub kills_over_budget: bool,
    /// The areas of the run.
    pub areas: &'a [Area],
    /// Counts that the programs reported.
    pub totals: &'a Totals,
    /// Names of the areas, as they may be printed.
    pub names: &'a [String],
    /// Acts of the kernel's out-of-memory killer meanwhile.
    pub oom: &'a oom::Report,
    /// Processes without a budget.
    pub outside: &'a outside::Report,
}

impl Run<'_> {
    /// Whether the peak is exact. Otherwise there may have been a higher one.
    fn is_peak_known(&self) -> bool {
        self.resident_most.is_some_and(|most| most <= self.resident_peak)
    }
}

// ---- for people ----------------------------------------------------------------------------------------

/// Returns the lines, without their prefix.
pub fn text(run: &Run) -> Vec<String> {
    let mut lines = if run.totals.processes.is_empty() && run.exit == ChildState::Exited(STATUS_FAILED) {
        vec![
            headline(run),
            row("note", "no process reported: Farpage's library was loaded, it seems, and could not start"),
        ]
    } else if run.totals.processes.is_empty() {
        let note = "no process reported: what ran had no budget. Farpage's library was not loaded (could the program be \
                    started, and is its loader told to ignore LD_PRELOAD?) or could not start; `farpage doctor` looks at what it needs";
        vec![headline(run), row("note", note)]
    } else if run.totals.was_active() {
        let mut lines = vec![headline(run)];
        lines.extend(details(run));
        lines
    } else if ended_by_us(run) || run.totals.last_words.is_some() {
        // The problem below says why. The program did not run as it does without Farpage.
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
    !run.outside.processes.is_empty() || run.outside.missed > 0 || run.outside.was_full
}

/// Returns the row about processes that nothing limits.
fn outside_row(run: &Run) -> Option<String> {
    let outside = run.outside;
    let missed = match outside.missed {
        0 => None,
        missed => Some(format!("{} starts of programs were not followed, too many at once", grouped(missed))),
    };
    let describe = |process: &outside::Process| {
        let size =
            if process.peak == 0 { String::new() } else { format!(", seen with {}", iec(process.peak)) };
        let unknown = if process.peak == 0 {
            "Farpage did not find it while it ran"
        } else {
            "it did not join the run"
        };
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
    // The kernel knows the largest of the processes that have ended, if they were waited for.
    let seen = outside.processes.iter().map(|process| process.peak).max().unwrap_or(0);
    let largest = iec(run.resident_peak.max(seen));
    let named = named.join(", ");
    let had = format!(
        "{processes} ran outside of this budget: {named}{more}; the largest of the run had at least {largest} in RAM"
    );
    let full = outside.was_full.then(|| {
        format!("{PROCESSES_MAX} processes ran at once, as many as Farpage manages: whatever else was forked had no budget")
    });
    let texts: Vec<_> = (count > 0).then_some(had).into_iter().chain(missed).chain(full).collect();
    (!texts.is_empty()).then(|| row("outside", &texts.join("; ")))
}

/// Whether a notice says that a process ran on, and that nothing of it was evicted any more.
const fn is_unlimited(notice: Notice) -> bool {
    matches!(notice, Notice::NotArmed | Notice::Alone | Notice::Retired)
}

/// Whether Farpage ended a process, or did not let it begin.
fn ended_by_us(run: &Run) -> bool {
    tells(run, is_an_end)
}

fn tells(run: &Run, is_meant: impl Fn(Notice) -> bool) -> bool {
    run.totals.notices().any(|(notice, ..)| is_meant(notice))
}

/// Whether all processes together had more than the budget, though none of them had enough to be managed.
fn was_over(run: &Run) -> bool {
    !run.totals.was_active() && run.totals.anonymous_peak > run.budget.ram_bytes
}

/// Returns why a run was over its budget, if none of its processes has counted that.
fn over(run: &Run) -> Option<String> {
    let (budget, peak) = (run.budget.ram_bytes, run.totals.anonymous_peak);
    if was_over(run) {
        let is_told_below = ended_by_us(run) || tells(run, is_unlimited);
        let unmanaged = "memory was over the budget while no process was managed";
        return (!is_told_below).then(|| unmanaged.into());
    }
    // Eviction takes time, so a run may be a little over its budget without a word.
    let is_over = run.totals.was_active() && peak > budget.saturating_add(budget / OVER_PARTS);
    is_over.then(|| {
        let which = match run.totals.count {
            0 | 1 => String::new(),
            _ => format!(" of {} together", processes(run)),
        };
        format!("memory{which} was {} over the budget at its peak", iec(peak - budget))
    })
}

/// Whether the kernel killed for memory, as far as that can be known: the program itself, or in its cgroup.
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
        0 | 1 if !may_be_more(run) => String::new(),
        _ => format!(" ({}; peaks of the pool and of programs are the largest one's)", processes(run)),
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

/// Whether there may have been more processes than are counted. Later processes take over the records of
/// processes that have ended.
fn may_be_more(run: &Run) -> bool {
    run.totals.earlier.programs > 0
}

/// Returns how many processes there were.
fn processes(run: &Run) -> String {
    let more = if may_be_more(run) { " or more" } else { "" };
    match run.totals.count {
        1 => format!("1 process{more}"),
        count => format!("{} processes{more}", grouped(count as u64)),
    }
}

fn name(run: &Run) -> String {
    let name = run.program.first().map_or("?", String::as_str);
    say::harmless(name.rsplit('/').next().unwrap_or(name))
}

fn never_reached(run: &Run) -> Vec<String> {
    // Another reason for the program's end must still be told: a signal, or an error of its own.
    let mut lines = Vec::new();
    lines.extend((run.exit != ChildState::Exited(0)).then(|| headline(run)));
    lines.push(within(run));
    // A program that ended during activation has registered memory.
    let is_untouched = run.totals.sum.counter(Counter::Registered) == 0;
    lines.extend(is_untouched.then(|| "nothing was registered: no fault went through Farpage".into()));
    lines
}

/// Returns the line that the budget wasn't reached. The kernel knows the exact peak of one process only; the
/// peak of several together is sampled.
fn within(run: &Run) -> String {
    let (name, budget) = (name(run), format!("{}{}", iec(run.budget.ram_bytes), less(run)));
    let sampled = iec(run.totals.anonymous_peak);
    let least = if run.is_peak_known() { "" } else { "at least " };
    let resident = format!("{least}{}", iec(run.resident_peak));
    match run.totals.count {
        _ if may_be_more(run) => several(run, &budget),
        0 | 1 if run.resident_most.is_some_and(|most| most <= run.budget.ram_bytes) => {
            format!("{name} stayed within its budget of {budget} (peak {resident} in RAM, files included)")
        }
        0 | 1 => format!(
            "{name} was not seen above its budget of {budget} (peak {sampled} anonymous, as sampled; {resident} in RAM, files included)"
        ),
        _ => several(run, &budget),
    }
}

fn several(run: &Run, budget: &str) -> String {
    let (name, sampled, resident) = (name(run), iec(run.totals.anonymous_peak), iec(run.resident_peak));
    let more = if may_be_more(run) { " or more" } else { "" };
    let count = grouped(run.totals.count as u64);
    format!(
        "{name} and its processes, {count}{more} in all, were not seen above their budget of {budget} (peak {sampled} together, as \
         sampled; the largest had at least {resident} in RAM, files included)"
    )
}

/// Returns a note on status 134. A shell answers 134 for a program that aborted, too, so only a silent
/// program is suspicious.
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
    let (origin, less) = (&run.budget.origin, less(run));
    // Farpage samples a process no more once it limits it no more. The kernel's peak goes on.
    let is_more_known = tells(run, is_unlimited) && run.resident_peak > peak;
    let more = if is_more_known {
        format!(
            "; not all processes were limited all the time: the largest had at least {} in RAM, files included",
            iec(run.resident_peak)
        )
    } else {
        String::new()
    };
    row(
        "budget",
        &format!("{} ({origin}){less}; peak {} anonymous as sampled, {share}{more}", iec(budget), iec(peak)),
    )
}

/// Returns how much less the budget was at times.
fn less(run: &Run) -> String {
    if is_much_less(run.least_bytes, run.budget.ram_bytes) {
        format!(", down to {} as a limit left no more", iec(run.least_bytes))
    } else {
        String::new()
    }
}

/// Whether the budget became smaller by enough for a user to notice.
pub const fn is_much_less(bytes: u64, budget_bytes: u64) -> bool {
    bytes < budget_bytes - budget_bytes / 32
}

fn program_row(run: &Run, n: &Numbers) -> String {
    let most = n.gauge(Gauge::ProgramPeak);
    let times = most as f64 / run.budget.ram_bytes as f64;
    row("program", &format!("{} seen at most, in memory and evicted: {times:.1} times its budget", iec(most)))
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
    row("pool", &format!("{} seen of {limit} at most, for {pages} pages ({codec}{ratio}){denser}", iec(peak)))
}

/// Returns the row on where evicted pages went. The parts add up to the pages.
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
    parts.push((pages.saturating_sub(went), "kept, touched again or freed before that".into()));
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<_> = parts.map(|(count, words)| format!("{} {words}", grouped(*count))).collect();
    let colon = if parts.is_empty() { "" } else { ": " };
    row("evicted", &format!("{} pages{colon}{}", grouped(pages), parts.join(", ")))
}

fn to_areas_row(run: &Run, n: &Numbers) -> String {
    let (pages, writes) = (n.counter(Counter::Pswpout), n.counter(Counter::AreaWrites));
    let slots = n.counter(Counter::AreaSlots);
    let names: Vec<_> =
        run.areas.iter().map(|area| say::harmless(&area.path.display().to_string())).collect();
    // Each process counts the pages that it writes, not the area.
    let to = if names.len() == 1 { "to" } else { "to some or all of" };
    let mean = match writes {
        0 => String::new(),
        _ => format!(" in {} writes of {}", grouped(writes), iec(slots.saturating_mul(PAGE) / writes)),
    };
    // The two counters of a page rise one after the other. A process may be killed in between.
    let from_pool = match n.counter(Counter::Zswpwb).min(pages) {
        0 => String::new(),
        from_pool => format!("; {} of them from the pool", grouped(from_pool)),
    };
    let shared = if slots < pages { format!(" in {} slots", grouped(slots)) } else { String::new() };
    let bytes = iec(slots.saturating_mul(PAGE));
    row(
        "written",
        &format!("{} pages{shared}, {bytes}{mean}{from_pool}, {to} {}", grouped(pages), names.join(", ")),
    )
}

fn from_areas_row(n: &Numbers) -> String {
    let pages = n.counter(Counter::Pswpin);
    row("read", &format!("{} pages", grouped(pages)))
}

/// Kinds of faults, with the words for them.
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

/// Returns the row on time lost. Threads may wait at the same time, and the cost of eviction and system calls
/// isn't measured. So the sum is no bound of the time by which the run was longer.
fn time_row(run: &Run, n: &Numbers) -> String {
    let (lost, wall) = (n.all_latencies().sum_ns, run.wall.as_nanos() as u64);
    let share = if lost <= wall {
        format!("as much as {} of the run's time", percent(lost, wall))
    } else {
        "several waited at once".into()
    };
    row("time lost", &format!("{} to faults, summed over threads: {share}", duration(lost)))
}

/// Returns `: 5 of this, 7 of that`, without kinds that didn't happen.
fn parts(n: &Numbers, kinds: &[(Counter, &str)]) -> String {
    let happened = kinds.iter().filter(|(counter, _)| n.counter(*counter) > 0);
    let parts: Vec<_> =
        happened.map(|(counter, word)| format!("{} {word}", grouped(n.counter(*counter)))).collect();
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "0 %".into() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// Name of the killer in the rows.
const KILLER: &str = "the kernel's out-of-memory killer";

fn victims_count(count: u64) -> String {
    if count == 1 { "a process".into() } else { format!("{} processes", grouped(count)) }
}

/// Time from a kill's count to the program's end, within which the killer most likely ended the program. On a
/// busy machine a process takes most of a second to end.
const KILLED_WITHIN: Duration = Duration::from_secs(2);
/// What the end of a process takes longer for each GiB, because the kernel frees its pages first.
const KILLED_WITHIN_MORE: Duration = Duration::from_millis(250);

fn is_killed_for_memory(run: &Run) -> bool {
    let within = KILLED_WITHIN + KILLED_WITHIN_MORE * (run.resident_peak >> 30) as u32;
    run.exit == ChildState::Killed(SIGKILL) && run.oom.last_kill.is_some_and(|ago| ago <= within)
}

/// Returns the kills on the machine that aren't known to have anything to do with the run.
fn kills_elsewhere(run: &Run) -> Option<u64> {
    let kills = run.oom.kills;
    let may_be_ours = kills.group > 0 || is_killed_for_memory(run) || !run.oom.victims.is_empty();
    kills.machine.filter(|count| *count > 0 && !may_be_ours)
}

fn note_on_killer(run: &Run) -> Option<String> {
    let ended = victims_count(kills_elsewhere(run)?);
    let text =
        format!("{KILLER} ended {ended} on this machine meanwhile, none that is known to be of the run");
    Some(row("note", &text))
}

/// Returns who was sent SIGKILL, and by whom, as far as that can be known.
fn killed(run: &Run) -> Option<String> {
    let kills = run.oom.kills;
    let is_known = kills.group > 0 || kills.machine.is_some();
    let is_sent = run.exit == ChildState::Killed(SIGKILL) && is_known && !is_killed_for_memory(run);
    let sent = is_sent.then(|| "it was sent SIGKILL; the kernel counted no kill for memory then".to_owned());
    let (count, place) = match kills.machine {
        _ if kills_elsewhere(run).is_some() => return sent,
        _ if kills.group > 0 => (kills.group, "in its cgroup"),
        Some(count) if count > 0 => (count, "on this machine"),
        _ => return sent,
    };
    let ended = victims_count(count);
    let told = if is_killed_for_memory(run) {
        format!("{KILLER} most likely ended it: {ended} {place} meanwhile{}", fitting(run))
    } else if kills.group > 0 {
        format!("{KILLER} ended {ended} {place}{}{}", victims(run), fitting(run))
    } else {
        format!("{KILLER} ended {ended} {place} meanwhile{}", victims(run))
    };
    Some(match sent {
        Some(sent) => format!("{sent}; before, {told}"),
        None => told,
    })
}

/// Returns the largest processes of the run that ended when the killer struck.
fn victims(run: &Run) -> String {
    let names =
        run.oom.victims.iter().map(|(pid, command)| format!("{} (pid {pid})", say::harmless(command)));
    let names = names.collect::<Vec<_>>().join(", ");
    if names.is_empty() { String::new() } else { format!("; of the run ended at that time {names}") }
}

/// Returns the limit, and the budget that would most likely have fit.
fn fitting(run: &Run) -> String {
    let Some((limit, by_default)) = &run.budget.limit else { return String::new() };
    let lower = run.budget.ram_bytes / 4 * 3;
    let fits = if *by_default > 0 && *by_default < lower { *by_default } else { lower };
    let (bytes, file, source) = (iec(limit.bytes), limit.file.display(), limit.source);
    let what = if limit.is_what_is_left() {
        format!("{bytes} were available before, says {file} ({source})")
    } else {
        let in_use = limit.in_use_words(", of which ", " were in use before");
        format!("the tightest limit is {bytes} in {file} ({source}){in_use}")
    };
    format!("; {what}: use --ram {} or less, or have more memory", suggestion_below(fits))
}

/// Returns the rows on problems. Notices may have scrolled away, so problems are printed once
/// more in one place.
fn problems(run: &Run) -> Vec<String> {
    let n = &run.totals.sum;
    let mut rows = Vec::new();
    for (counter, words) in [
        (Counter::FaultLost, "faults on lost pages: the program was ended, or told by SIGBUS or EFAULT"),
        (Counter::ReadErrors, "pages could not be read"),
        (Counter::WriteErrors, "pages could not be written; they were kept"),
        (Counter::AreaFull, "times a page found no room in any area"),
        (Counter::OverBudget, "times nothing more could be evicted near the budget or above it"),
    ] {
        let count = n.counter(counter);
        rows.extend((count > 0).then(|| row("problem", &format!("{} {words}", grouped(count)))));
    }
    rows.extend(over(run).map(|text| row("problem", &text)));
    rows.extend(run.totals.last_words.as_ref().map(|text| row("problem", text)));
    rows.extend(killed(run).map(|text| row("problem", &text)));
    rows.extend(noticed(run));
    let nothing = rows.is_empty() && run.totals.was_active() && !has_outside(run);
    rows.extend(nothing.then(|| row("problems", "none")));
    rows
}

/// Returns a row for each notice, and for all processes that tell the same. The serious ones come first.
fn noticed(run: &Run) -> Vec<String> {
    let about = About { areas: run.names, files: run.areas, budget: run.budget };
    let mut told: Vec<(Reverse<Weight>, String, Vec<u32>)> = Vec::new();
    // A process that grew is managed from then on, so it is no problem.
    for (notice, value, pid) in run.totals.notices().filter(|(notice, ..)| *notice != Notice::Grew) {
        let text = notices::describe(notice, value, &about);
        match told.iter_mut().find(|(_, other, _)| *other == text) {
            Some((.., pids)) => pids.push(pid),
            None => told.push((Reverse(notices::weight(notice)), text, vec![pid])),
        }
    }
    told.sort_by_key(|(weight, ..)| *weight);
    let more = told.len().saturating_sub(PROBLEMS_MAX);
    let rows = told.iter().take(PROBLEMS_MAX).map(|(_, text, pids)| {
        let others = match pids.len() - 1 {
            0 => String::new(),
            count => format!(" and {} more", grouped(count as u64)),
        };
        let first = if pids[0] == 0 { "an earlier program".into() } else { format!("pid {}", pids[0]) };
        row("problem", &format!("{first}{others}: {text}"))
    });
    let rest = (more > 0).then(|| row("problems", &format!("{more} more: --stats FILE lists them")));
    rows.chain(rest).collect()
}

#[cfg(test)]
mod tests;
