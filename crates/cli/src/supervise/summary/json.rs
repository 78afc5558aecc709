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

/// Fields beside counters, gauges and kinds of faults: the name, the unit, and a sentence. A name has the
/// objects around the field, without those of one process.
const FIELDS: &[(&str, &str, &str)] = &[
    ("schema", "version", "Version of the layout of this file."),
    ("program", "words", "The command line of the program."),
    ("exit", "object", "How the program ended; null if only its parent knows."),
    ("exit.status", "status", "The program's own status, or one of Farpage's."),
    ("exit.signal", "number", "The signal that killed the program."),
    ("exit.name", "text", "The signal's name."),
    ("wall_seconds", "s", "How long the program ran."),
    (
        "internal_error",
        "text",
        "The last words of a process that a bug in Farpage ended; null if there was none.",
    ),
    ("tree_anonymous_peak", "bytes", "The most anonymous memory of all processes together, as sampled."),
    (
        "resident_peak",
        "bytes",
        "The most memory in RAM of the program or of one process that it waited for, files included, as the kernel has it.",
    ),
    (
        "resident_peak_is_known",
        "flag",
        "Whether there was no higher peak. Else there may have been one between two looks, or below what getrusage had before the program.",
    ),
    ("process_count", "processes", "Processes that reported. One that executes another program is one."),
    ("counters", "object", "Values that only rise: of all processes together, or of one in `processes`."),
    (
        "gauges",
        "object",
        "Values that rise and fall, as each process told them last, also one that has ended: added up, where a peak is the highest of one process.",
    ),
    ("latency_ns", "object", "How long faults took to be served, by kind."),
    ("latency_ns.count", "faults", "Faults of the kind that were measured."),
    ("latency_ns.sum", "ns", "Sum over these faults."),
    ("latency_ns.mean", "ns", "Mean of these faults."),
    ("latency_ns.p50", "ns", "Half of these faults took at most that. The value may be 25 % too high."),
    ("latency_ns.p99", "ns", "99 % of these faults took at most that. The value may be 25 % too high."),
    ("latency_ns.max", "ns", "The longest of these faults."),
    (
        "processes",
        "list",
        "The programs that reported last, at most 256. A process that executes another program has one entry for each.",
    ),
    ("pid", "number", "The process's id."),
    ("command", "text", "The program's name, cut to 15 bytes."),
    ("notices", "list", "What the program told, each kind once."),
    ("notices.notice", "text", "Kind of the notice."),
    ("notices.value", "number", "What the notice is about, in the kind's own unit; `text` says it in words."),
    ("notices.text", "text", "The notice in words."),
    (
        "earlier",
        "programs",
        "Programs that had ended when others took over their records: the numbers of all of them, and each notice once.",
    ),
    ("earlier.programs", "programs", "Number of these programs."),
    (
        "outside",
        "processes",
        "Processes outside of this budget, why, and their largest size in RAM as seen; was_full: as many ran at once as are managed.",
    ),
    ("outside.processes", "list", "These processes, the largest first."),
    ("outside.processes.pid", "number", "The process's id."),
    ("outside.processes.path", "text", "The program's file, as the process executed it."),
    ("outside.processes.why", "text", "Why the process has no budget; null if that isn't known."),
    ("outside.processes.resident_peak", "bytes", "The most memory in RAM with which the process was seen."),
    ("outside.more", "processes", "Further processes, of which no more is known."),
    ("outside.not_followed", "starts", "Starts of programs that were not followed, too many at once."),
    ("outside.was_full", "flag", "Whether as many processes ran at once as Farpage manages."),
    (
        "oom_kills",
        "processes",
        "Ended by the kernel's out-of-memory killer during the run: in the run's cgroup, and on the machine with these.",
    ),
    ("oom_kills.cgroup", "processes", "Of these, the ones in the run's cgroup."),
    ("oom_kills.machine", "processes", "All of these on the machine; null if the kernel doesn't say."),
    ("oom_kills.likely_victims", "list", "Large processes of the run that ended at such a time."),
    ("oom_kills.likely_victims.pid", "number", "The process's id."),
    ("oom_kills.likely_victims.command", "text", "The program's name."),
    ("settings", "object", "What the run used: as asked for, or as Farpage chose."),
    ("settings.ram_bytes", "bytes", "The budget."),
    ("settings.ram_origin", "text", "What the budget was made from."),
    ("settings.ram_bytes_least", "bytes", "The smallest budget meanwhile, by what limits left."),
    ("settings.pool_bytes_max", "bytes", "Limit of the compressed pool, which is a part of the budget."),
    ("settings.codec", "text", "The value of --codec."),
    ("settings.pack", "text", "The value of --pack."),
    ("settings.faults", "text", "The mode, as --faults names it."),
    ("settings.userfaultfd", "text", "Where the userfaultfd comes from."),
    ("settings.install", "text", "How pages move, as --install names it."),
    ("settings.io", "text", "How areas are written, as --io names it."),
    ("settings.wait", "text", "How a thread waits for a page of an area, as --wait names it."),
    ("settings.slots", "text", "The value of --slots."),
    ("settings.order", "text", "The value of --order."),
    ("settings.readahead", "text", "The value of --readahead."),
    ("settings.page_cluster", "exponent", "The value of --page-cluster."),
    ("settings.mlockall", "text", "The value of --mlockall."),
    ("settings.over_budget", "text", "The value of --over-budget."),
    ("settings.supervisor", "text", "Where the supervisor stood, as --supervisor names it."),
    ("settings.areas", "list", "The swap areas; an empty list without a disk."),
    ("settings.areas.name", "text", "The directory, file or device."),
    ("settings.areas.kind", "text", "Kind: temporary file, empty file, swap file or device."),
    ("settings.areas.slots", "slots", "Slots, the header's included."),
    ("settings.areas.bytes", "bytes", "What fits into the area."),
    ("settings.areas.priority", "number", "Priority: areas with a higher one are filled first."),
    ("settings.areas.node", "number", "NUMA node of the disk; null if that isn't known."),
    ("settings.areas.grows", "flag", "Whether the area takes space on the disk only as it needs space."),
    ("settings.areas.discards", "flag", "Whether the disk is told of space that isn't needed any more."),
    ("settings.areas.bad_slots", "slots", "Slots that the header lists as bad."),
    (
        "settings.areas.disk_reserve_bytes",
        "bytes",
        "Space of the file system that the area leaves free as it grows.",
    ),
    (
        "settings.areas.extents",
        "extents",
        "Pieces in which the area lies on the disk; null if that isn't known.",
    ),
    (
        "settings.areas.span_bytes",
        "bytes",
        "From the first of these pieces to the end of the last one; null if that isn't known.",
    ),
    ("legend", "object", "What each field is, and its unit."),
];

/// Returns what each field means, so that the file explains itself.
fn legend() -> Value {
    Value::Object(legend_rows().collect())
}

fn legend_rows() -> impl Iterator<Item = (String, Value)> {
    let row =
        |name: &str, unit: &str, help: &str| (name.to_owned(), json!({ "unit": unit, "help": help.trim() }));
    let counters = Counter::ALL.iter().map(move |c| row(c.name(), c.unit(), c.help()));
    let gauges = Gauge::ALL.iter().map(move |g| row(g.name(), g.unit(), g.help()));
    let latency = |help: &str| format!("Latency of faults. {}", help.trim());
    let latencies = Latency::ALL.iter().map(move |kind| row(kind.name(), kind.unit(), &latency(kind.help())));
    let total = [row("total", "ns", &latency("All of them."))];
    let fields = FIELDS.iter().map(move |(name, unit, help)| row(name, unit, help));
    counters.chain(gauges).chain(latencies).chain(total).chain(fields)
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
        "over_budget": if run.kills_over_budget { "kill" } else { "warn" },
        "supervisor": if outside::stands_beside() { "beside" } else { "above" },
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Notes the names of all fields below an object, as the legend has them.
    fn note(value: &Value, around: &str, names: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(field, value)| {
                let around = match around {
                    "processes" => "",
                    "earlier" if field != "programs" => "",
                    "counters" | "gauges" => "",
                    around if around.starts_with("latency_ns.") => "latency_ns",
                    around => around,
                };
                let is_kind = around == "latency_ns" && value.is_object();
                let name =
                    if around.is_empty() || is_kind { field.clone() } else { format!("{around}.{field}") };
                if name != "legend" {
                    note(value, if is_kind { "latency_ns." } else { &name }, names);
                }
                names.insert(name);
            }),
            Value::Array(values) => values.iter().for_each(|value| note(value, around, names)),
            _ => {}
        }
    }

    /// The settings, the areas and half of the other fields were not in the legend, which was said to have
    /// all of them.
    #[test]
    fn legend_has_each_field_and_no_other() {
        let mut found = BTreeSet::new();
        for exit in [ChildState::Exited(0), ChildState::Killed(9)] {
            super::super::tests::with_everything(exit, |run| note(&json(run), "", &mut found));
        }
        let rows: Vec<_> = legend_rows().collect();
        let explained: BTreeSet<_> = rows.iter().map(|(name, _)| name.clone()).collect();
        assert_eq!(rows.len(), explained.len(), "a name stands for two fields");
        let missing: Vec<_> = found.symmetric_difference(&explained).collect();
        assert!(missing.is_empty(), "in the statistics or in the legend alone: {missing:?}");
        for (name, row) in rows {
            assert!(row["help"].as_str().is_some_and(|help| help.ends_with('.')), "{name}: {row}");
        }
    }
}
