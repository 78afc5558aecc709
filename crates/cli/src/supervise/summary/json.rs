//! The summary as JSON, for programs: everything that was counted, with a legend, and the settings.

use super::Run;
use crate::host::oom;
use crate::host::sys::{self, ChildState};
use crate::supervise::notices::{self, About};
use crate::supervise::outside;
use crate::supervise::totals::{Earlier, Numbers};
use farpage_core::config::{Codec, Install, IoEngine, Readahead};
use farpage_core::stats::{Counter, Gauge, Latency, LatencySummary};
use farpage_runtime::session::{Notice, UffdSource};
use serde_json::{Map, Value, json};

/// Version of the JSON's layout.
const SCHEMA: u32 = 1;

/// Returns the summary as JSON.
pub fn json(run: &Run) -> Value {
    let about = About { areas: run.names, files: run.areas, budget: run.budget };
    let processes = run.totals.processes.iter().map(|process| {
        let mut object = numbers(&process.numbers);
        object.insert("pid".into(), process.pid.into());
        object.insert("command".into(), process.command.as_str().into());
        object.insert("notices".into(), notices_of(&process.notices, &about));
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
    object.insert("earlier".into(), earlier(&run.totals.earlier, &about));
    object.insert("tree_anonymous_peak".into(), run.totals.anonymous_peak.into());
    object.insert("internal_error".into(), run.totals.last_words.as_deref().into());
    object.insert("resident_peak".into(), run.resident_peak.into());
    object.insert("resident_peak_is_known".into(), run.is_peak_known().into());
    object.insert("process_count".into(), run.totals.count.into());
    object.insert("oom_kills".into(), oom_kills(run.oom));
    object.insert("outside".into(), outside_processes(run.outside));
    object.insert("legend".into(), legend());
    Value::Object(object)
}

fn notices_of(notices: &[(Notice, u64)], about: &About) -> Value {
    let told = notices.iter().map(|(notice, value)| {
        let text = notices::describe(*notice, *value, about);
        json!({ "notice": format!("{notice:?}"), "value": value, "text": text })
    });
    told.collect()
}

/// Returns what programs told whose records others have taken over; null if there are none.
fn earlier(earlier: &Earlier, about: &About) -> Value {
    if earlier.programs == 0 {
        return Value::Null;
    }
    let mut object = numbers(&earlier.numbers);
    object.insert("programs".into(), earlier.programs.into());
    object.insert("notices".into(), notices_of(&earlier.notices, about));
    Value::Object(object)
}

fn outside_processes(outside: &outside::Report) -> Value {
    let processes = outside.processes.iter().map(|process| {
        let (path, why, peak) = (&process.path, &process.why, process.peak);
        json!({ "pid": process.pid, "path": path, "why": why, "resident_peak": peak })
    });
    json!({ "processes": processes.collect::<Vec<_>>(), "more": outside.more, "not_followed": outside.missed, "was_full": outside.was_full })
}

fn oom_kills(oom: &oom::Report) -> Value {
    let victims = oom.victims.iter().map(|(pid, command)| json!({ "pid": pid, "command": command }));
    json!({
        "cgroup": oom.kills.group,
        "machine": oom.kills.machine,
        "likely_victims": victims.collect::<Vec<_>>(),
    })
}

/// Returns what the counters and gauges mean, so that the file explains itself.
fn legend() -> Value {
    let row =
        |name: &str, unit: &str, help: &str| (name.to_owned(), json!({ "unit": unit, "help": help.trim() }));
    let counters = Counter::ALL.iter().map(|c| row(c.name(), c.unit(), c.help()));
    let gauges = Gauge::ALL.iter().map(|g| row(g.name(), g.unit(), g.help()));
    let latency = |help: &str| format!("Latency of faults. {}", help.trim());
    let latencies = Latency::ALL.iter().map(|kind| row(kind.name(), kind.unit(), &latency(kind.help())));
    let others = [
        row("total", "ns", &latency("All of them.")),
        row(
            "tree_anonymous_peak",
            "bytes",
            "The most anonymous memory of all processes together, as sampled.",
        ),
        row(
            "resident_peak",
            "bytes",
            "The most memory in RAM of the program or of one process that it waited for, files included, as the kernel has it.",
        ),
        row(
            "resident_peak_is_known",
            "flag",
            "Whether there was no higher peak. Else there may have been one between two looks, or below what getrusage had before the program.",
        ),
        row(
            "process_count",
            "processes",
            "Processes that reported. One that executes another program is one.",
        ),
        row(
            "earlier",
            "programs",
            "Programs that had ended when others took over their records: the numbers of all of them, and each notice once.",
        ),
        row(
            "outside",
            "processes",
            "Processes outside of this budget, why, and their largest size in RAM as seen; was_full: as many ran at once as are managed.",
        ),
        row(
            "oom_kills",
            "processes",
            "Ended by the kernel's out-of-memory killer during the run: in the run's cgroup, and on the machine with these.",
        ),
    ];
    Value::Object(counters.chain(gauges).chain(latencies).chain(others).collect())
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
        ChildState::Running | ChildState::Stopped(_) | ChildState::Ended => Value::Null,
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
            "node": area.place.node().map(|node| node.0),
            "grows": area.grows,
            "discards": area.discards,
            "bad_slots": area.bad_slots.len(),
            "disk_reserve_bytes": area.disk_reserve_bytes,
            "extents": area.places.as_ref().map(|places| places.extents.len()),
            "span_bytes": area.places.as_ref().map(|places| places.span_bytes),
        })
    });
    json!({
        "ram_bytes": settings.ram_bytes,
        "ram_origin": run.budget.origin,
        "ram_bytes_least": run.least_bytes,
        "pool_bytes_max": settings.pool_bytes_max,
        "codec": codec_name(settings.codec),
        "pack": if settings.packs == 0 { "off" } else { "on" },
        "faults": faults_name(settings.uffd_source),
        "install": install_name(settings.install),
        "io": io_name(settings.io),
        "slots": settings.slots.name(),
        "order": settings.order.name(),
        "readahead": readahead_name(settings.readahead),
        "page_cluster": settings.page_cluster,
        "wait": wait_name(settings.polls),
        "mlockall": if settings.refuses_mlockall == 0 { "allow" } else { "refuse" },
        "userfaultfd": uffd_name(settings.uffd_source),
        "areas": areas.collect::<Vec<_>>(),
    })
}

/// Returns the codec's name in `--codec`.
pub const fn codec_name(codec: Codec) -> &'static str {
    match codec {
        Codec::Auto => "auto",
        Codec::Fast => "fast",
        Codec::Lz4 => "lz4",
        Codec::None => "none",
    }
}

/// Returns the way's name in `--install`.
pub const fn install_name(install: Install) -> &'static str {
    match install {
        Install::Move => "move",
        Install::Copy => "copy",
        Install::Mixed => "mixed",
    }
}

/// Returns the policy's name in `--readahead`.
const fn readahead_name(readahead: Readahead) -> &'static str {
    match readahead {
        Readahead::Streams => "streams",
        Readahead::ByAddress => "by-address",
        Readahead::BySlot => "by-slot",
        Readahead::Off => "off",
    }
}

/// Returns the engine's name in `--io`.
pub const fn io_name(io: IoEngine) -> &'static str {
    match io {
        IoEngine::Uring => "uring",
        IoEngine::Psync => "psync",
    }
}

/// Returns the name in `--wait` of the way in which a thread waits.
pub const fn wait_name(polls: u32) -> &'static str {
    if polls == 0 { "sleep" } else { "poll" }
}

/// Returns where the userfaultfd comes from.
pub const fn uffd_name(source: UffdSource) -> &'static str {
    match source {
        UffdSource::Syscall => "system call",
        UffdSource::Device => "/dev/userfaultfd",
        UffdSource::UserMode => "system call, user mode only",
        UffdSource::Nothing => "nothing",
    }
}

/// Returns the mode's name in `--faults`.
pub const fn faults_name(source: UffdSource) -> &'static str {
    match source {
        UffdSource::Syscall | UffdSource::Device => "thread",
        UffdSource::UserMode => "signal",
        UffdSource::Nothing => "segv",
    }
}
