//! The result of a run: a dozen lines for people, and the same as JSON for programs.

use crate::areas::Area;
use crate::budget::Budget;
use crate::notices;
use crate::numbers::{duration, grouped, iec};
use crate::sys::{self, ChildState};
use crate::totals::{Numbers, Totals};
use farpage::session::{Notice, Session, Settings, UffdSource};
use farpage_core::config::{Codec, Install, IoEngine};
use farpage_core::stats::{Counter, Gauge, Latency, LatencySummary};
use farpage_core::units::PAGE_BYTES;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Version of the JSON's layout.
const SCHEMA: u32 = 1;
const PAGE: u64 = PAGE_BYTES as u64;

/// What the summary is about.
pub struct Run<'a> {
    /// The command line of the program.
    pub program: &'a [String],
    /// How it ended.
    pub exit: ChildState,
    /// How long it took.
    pub wall: Duration,
    /// What it was allowed.
    pub budget: &'a Budget,
    /// What was chosen.
    pub settings: &'a Settings,
    /// Its areas.
    pub areas: &'a [Area],
    /// What it reported.
    pub totals: &'a Totals,
    /// The session, for the names in notices.
    pub session: &'a Session,
}

// ---- for people ----------------------------------------------------------------------------------------

/// The lines, without their prefix.
pub fn text(run: &Run) -> Vec<String> {
    let mut lines = vec![headline(run)];
    if run.totals.processes.is_empty() {
        lines.push(row("note", "no process reported: Farpage's library was not loaded or could not start"));
    } else if !run.totals.was_active() {
        lines = vec![
            never_reached(run),
            "nothing was registered: the program ran as it does without Farpage".into(),
        ];
    } else {
        lines.extend(details(run));
    }
    lines.extend(problems(run));
    lines
}

fn headline(run: &Run) -> String {
    let (name, wall) = (name(run), duration(run.wall.as_nanos() as u64));
    let processes = match run.totals.processes.len() {
        0 | 1 => String::new(),
        count => format!(" ({count} processes; peaks are of the largest one)"),
    };
    match run.exit {
        ChildState::Killed(signal) => {
            format!("{name} was killed by {} after {wall}{processes}", sys::signal_name(signal))
        }
        ChildState::Exited(status) => format!("{name} ended with status {status} after {wall}{processes}"),
        ChildState::Running | ChildState::Stopped => format!("{name} runs on after {wall}{processes}"),
    }
}

fn name(run: &Run) -> String {
    let name = run.program.first().map_or("?", String::as_str);
    name.rsplit('/').next().unwrap_or(name).to_owned()
}

fn never_reached(run: &Run) -> String {
    let peak = match run.totals.sum.gauge(Gauge::AnonymousPeak) {
        0 => String::new(),
        peak => format!(" (peak {})", iec(peak)),
    };
    format!("{} stayed within its budget of {}{peak}", name(run), iec(run.budget.ram_bytes))
}

fn row(label: &str, text: &str) -> String {
    format!("  {label:<10} {text}")
}

fn details(run: &Run) -> Vec<String> {
    let n = &run.totals.sum;
    let mut rows = vec![budget_row(run, n), program_row(run, n), pool_row(run, n), evicted_row(n)];
    rows.extend((!run.areas.is_empty()).then(|| to_areas_row(run, n)));
    rows.extend((!run.areas.is_empty()).then(|| from_areas_row(n)));
    rows.extend([faults_row(n), latency_row(n), time_row(run, n)]);
    rows
}

fn budget_row(run: &Run, n: &Numbers) -> String {
    let (budget, peak) = (run.budget.ram_bytes, n.gauge(Gauge::AnonymousPeak));
    let share = percent(peak, budget);
    row("budget", &format!("{} ({}); peak {} anonymous, {share}", iec(budget), run.budget.origin, iec(peak)))
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
        _ => format!(", {:.1} : 1", (pages * PAGE) as f64 / peak as f64),
    };
    let (limit, codec) = (iec(run.settings.pool_bytes_max), codec_name(run.settings.codec));
    row("pool", &format!("{} of {limit} at most, for {} pages ({codec}{ratio})", iec(peak), grouped(pages)))
}

fn evicted_row(n: &Numbers) -> String {
    let parts = parts(
        n,
        &[
            (Counter::Zswpout, "to the pool"),
            (Counter::SwpoutZero, "zero"),
            (Counter::SwpoutSame, "same-filled"),
            (Counter::EvictClean, "unchanged"),
            (Counter::StoredRaw, "kept uncompressed"),
        ],
    );
    row("evicted", &format!("{} pages{parts}", grouped(n.counter(Counter::EvictTaken))))
}

fn to_areas_row(run: &Run, n: &Numbers) -> String {
    let (pages, writes) = (n.counter(Counter::Pswpout), n.counter(Counter::AreaWrites));
    let names: Vec<_> = run.areas.iter().map(|area| area.path.display().to_string()).collect();
    let mean = match writes {
        0 => String::new(),
        _ => format!(" in {} writes of {}", grouped(writes), iec(pages * PAGE / writes)),
    };
    let text = format!("{} pages, {}{mean}, to {}", grouped(pages), iec(pages * PAGE), names.join(", "));
    row("written", &text)
}

fn from_areas_row(n: &Numbers) -> String {
    let (pages, ahead) = (n.counter(Counter::Pswpin), n.counter(Counter::Zswpwb));
    let text = format!(
        "{} pages, {}; {} of the written came from the pool",
        grouped(pages),
        iec(pages * PAGE),
        grouped(ahead)
    );
    row("read", &text)
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
    let total = FAULTS.iter().map(|(counter, _)| n.counter(*counter)).sum();
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

fn time_row(run: &Run, n: &Numbers) -> String {
    let lost = n.all_latencies().sum_ns;
    let share = percent(lost, run.wall.as_nanos() as u64);
    row("time lost", &format!("{} to faults, summed over threads: {share} of the run", duration(lost)))
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
    for process in &run.totals.processes {
        for (notice, value) in &process.notices {
            if matches!(notice, Notice::ReadError | Notice::Corrupt | Notice::WriteError) {
                let text = notices::describe(*notice, *value, run.session, run.budget);
                rows.push(row("problem", &format!("pid {}: {text}", process.pid)));
            }
        }
    }
    let nothing = rows.is_empty() && run.totals.was_active();
    rows.extend(nothing.then(|| row("problems", "none")));
    rows
}

// ---- for programs --------------------------------------------------------------------------------------

/// The same as JSON.
pub fn json(run: &Run) -> Value {
    let processes = run.totals.processes.iter().map(|process| {
        let mut object = numbers(&process.numbers);
        object.insert("pid".into(), process.pid.into());
        object.insert("command".into(), process.command.as_str().into());
        let told = process.notices.iter().map(|(notice, value)| {
            json!({
                "notice": format!("{notice:?}"),
                "value": value,
                "text": notices::describe(*notice, *value, run.session, run.budget),
            })
        });
        object.insert("notices".into(), told.collect());
        Value::Object(object)
    });
    let processes = processes.collect::<Vec<_>>();
    let mut object = numbers(&run.totals.sum);
    object.insert("schema".into(), SCHEMA.into());
    object.insert("program".into(), run.program.into());
    object.insert("exit".into(), exit(run.exit));
    object.insert("wall_seconds".into(), run.wall.as_secs_f64().into());
    object.insert("settings".into(), settings(run));
    object.insert("processes".into(), processes.into());
    Value::Object(object)
}

fn numbers(n: &Numbers) -> Map<String, Value> {
    let counters: Map<_, _> =
        Counter::ALL.iter().map(|c| (c.name().to_owned(), n.counter(*c).into())).collect();
    let gauges: Map<_, _> = Gauge::ALL.iter().map(|g| (g.name().to_owned(), n.gauge(*g).into())).collect();
    let kinds = Latency::ALL.iter().map(|kind| (kind.name().to_owned(), latency(n.latency(*kind))));
    let latencies: Map<_, _> = kinds.chain([("total".to_owned(), latency(&n.all_latencies()))]).collect();
    Map::from_iter([
        ("counters".into(), counters.into()),
        ("gauges".into(), gauges.into()),
        ("latency_ns".into(), latencies.into()),
    ])
}

fn latency(summary: &LatencySummary) -> Value {
    json!({
        "count": summary.count,
        "sum": summary.sum_ns,
        "mean": summary.mean_ns(),
        "p50": summary.percentile_ns(50.0),
        "p99": summary.percentile_ns(99.0),
        "max": summary.max_ns,
    })
}

fn exit(exit: ChildState) -> Value {
    match exit {
        ChildState::Exited(status) => json!({ "status": status }),
        ChildState::Killed(signal) => json!({ "signal": signal, "name": sys::signal_name(signal) }),
        ChildState::Running | ChildState::Stopped => Value::Null,
    }
}

fn settings(run: &Run) -> Value {
    let settings = run.settings;
    let areas = run.areas.iter().map(|area| {
        json!({
            "name": area.path.display().to_string(),
            "kind": area.kind.name(),
            "slots": area.slots,
            "bytes": area.bytes(),
            "priority": area.priority,
            "grows": area.grows,
            "bad_slots": area.bad_slots.len(),
            "disk_reserve_bytes": area.disk_reserve_bytes,
        })
    });
    json!({
        "ram_bytes": settings.ram_bytes,
        "ram_origin": run.budget.origin,
        "pool_bytes_max": settings.pool_bytes_max,
        "codec": codec_name(settings.codec),
        "faults": "thread",
        "install": install_name(settings.install),
        "io": io_name(settings.io),
        "userfaultfd": uffd_name(settings.uffd_source),
        "areas": areas.collect::<Vec<_>>(),
    })
}

/// As `--codec` has it.
pub const fn codec_name(codec: Codec) -> &'static str {
    match codec {
        Codec::Lz4 => "lz4",
        Codec::None => "none",
    }
}

/// As `--install` has it.
pub const fn install_name(install: Install) -> &'static str {
    match install {
        Install::Move => "move",
        Install::Copy => "copy",
        Install::Mixed => "mixed",
    }
}

/// As `--io` has it.
pub const fn io_name(io: IoEngine) -> &'static str {
    match io {
        IoEngine::Uring => "uring",
        IoEngine::Psync => "psync",
    }
}

/// Where the userfaultfd comes from.
pub const fn uffd_name(source: UffdSource) -> &'static str {
    match source {
        UffdSource::Syscall => "system call",
        UffdSource::Device => "/dev/userfaultfd",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Shared;
    use crate::session::tests::{area, settings};
    use crate::totals::tests::two_programs;

    fn with<T>(shared: &Shared, exit: ChildState, test: impl Fn(&Run) -> T) -> T {
        let budget = Budget { ram_bytes: 256 << 20, origin: "--ram 256M".into(), pool_bytes_max: 128 << 20 };
        test(&Run {
            program: &["/usr/bin/python3".into(), "x.py".into()],
            exit,
            wall: Duration::from_millis(1500),
            budget: &budget,
            settings: &settings(),
            areas: &[area("/var/tmp", 1 << 20, &[])],
            totals: &Totals::of(shared.session()),
            session: shared.session(),
        })
    }

    #[test]
    fn summary_of_a_busy_run_has_a_dozen_lines() {
        let shared = two_programs();
        let lines = with(&shared, ChildState::Exited(0), text);
        assert_eq!(lines.len(), 11, "{lines:#?}");
        for words in [
            "python3 ended with status 0 after 1.5 s (2 processes",
            "256 MiB (--ram 256M); peak 200 MiB anonymous, 78.1 %",
            "1000 MiB at most, in memory and evicted: 3.9 times its budget",
            "2 MiB of 128 MiB at most, for 1,536 pages (lz4, 3.0 : 1)",
            "960 pages, 3.8 MiB in 30 writes of 128 KiB, to /var/tmp",
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
        assert_eq!(lines[0], "python3 stayed within its budget of 256 MiB (peak 200 MiB)");
        assert_eq!(lines.len(), 2);
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
        for counter in Counter::ALL {
            assert!(json["counters"][counter.name()].is_u64(), "{}", counter.name());
        }
        for gauge in Gauge::ALL {
            assert!(json["gauges"][gauge.name()].is_u64(), "{}", gauge.name());
        }
        for kind in Latency::ALL.iter().map(|kind| kind.name()).chain(["total"]) {
            assert!(json["latency_ns"][kind]["p99"].is_u64(), "{kind}");
        }
        assert_eq!(json["latency_ns"]["total"]["max"], 20_000);
        assert_eq!(json["processes"][1]["counters"]["pswpout"], 640);
        assert_eq!(json["exit"]["name"], "SIGTERM");
        assert_eq!(json["settings"]["areas"][0]["name"], "/var/tmp");
    }
}
