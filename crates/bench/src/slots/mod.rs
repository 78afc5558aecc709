//! `farpage bench slots`: how fast each policy finds free slots in an area of which 90 % is in use, at
//! random.
//!
//! [`threads`] runs real threads on this machine, [`simulated`] runs 48 virtual CPUs. Both use [`stage`],
//! which checks that each slot handed out has no owner. [`pages`] runs pmbench's pattern live under each
//! policy.

mod pages;
mod simulated;
mod stage;
mod threads;

use crate::Effort;
use crate::measure::{Sample, interleaved, ratio};
use crate::report::{Chart, Report, Table, Target};
use farpage_core::config::SlotPolicy;
use simulated::Costs;
use stage::Setting;
use std::time::Duration;

const POLICIES: [SlotPolicy; 3] = SlotPolicy::ALL;
const CLASSIC: usize = 0;
const SCAN_MORE: usize = 1;
const OURS: usize = 2;

/// Costs of a step on the simulated machine. A lock whose cache line is local, with 20 instructions under it,
/// takes 20 ns. A line from another core's cache adds 100 ns, as on machines of this size. Looking at a
/// slot's byte takes 1 ns.
const COSTS: Costs = Costs { lock: 20, transfer: 100, slot: 1.0, think: 0 };
/// Nanoseconds between two pages of a process at pmbench's rate: 16 processes do 725,000 pages a second (2.97
/// GB/s).
const THINK_NS: u64 = 22_000;
const CPUS: usize = 48;

/// Runs the experiment.
pub fn run(effort: Effort) -> Result<Report, String> {
    let mut report = Report::new("slots");
    report.published = vec![
        "scan-more against classic (Linux 5.8), 16 processes of pmbench on 48 CPUs, 80/20, random: score +37.1 %, \
         swap-in 2.02 to 2.94 GB/s (+45.7 %), swap-out 2.04 to 2.97 GB/s (+45.3 %), share of time in the lock 21 % \
         to about 0"
            .to_owned(),
    ];
    on_threads(effort, &mut report);
    in_simulation(effort, &mut report);
    report.failed = pages::run(effort, &mut report).err();
    report.notes = vec![
        "Each slot that was handed out was checked to be nobody's; after each run the allocator's own counts were, too."
            .to_owned(),
        format!(
            "Threads: {} CPUs here; a batch is 64 slots, taken in as few calls as the policy needs, and 64 freed at \
             random. Threads wait in the kernel (futex), so waiting includes not being scheduled.",
            std::thread::available_parallelism().map_or(1, usize::from)
        ),
        format!(
            "Simulation: the same allocators; a lock costs {} ns, {} ns more if another CPU had it, a slot looked \
             at {} ns. With pmbench's rate a CPU thinks {} µs for each page.",
            COSTS.lock,
            COSTS.transfer,
            COSTS.slot,
            THINK_NS / 1000
        ),
    ];
    Ok(report)
}

fn on_threads(effort: Effort, report: &mut Report) {
    let counts = effort.pick(&[1_usize, 4, 16][..], &[1, 16]);
    let (slots, millis, rounds) = effort.pick((1 << 20, 1_500, 5), (1 << 18, 200, 3));
    let duration = Duration::from_millis(millis);
    let mut table = Table::new(
        format!("threads on this machine, {slots} slots, 90 % in use at random"),
        &[
            "threads",
            "policy",
            "slots/s",
            "ratio to classic",
            "waiting for locks",
            "slots/refill",
            "slots/run",
        ],
    );
    let mut series: Vec<(String, Vec<f64>)> =
        POLICIES.map(|policy| (policy.name().to_owned(), Vec::new())).into();
    for &cpus in counts {
        let setting = |who: usize, seed| Setting { policy: POLICIES[who], slots, cpus, seed };
        let mut seed = 0;
        let speeds = interleaved(rounds, POLICIES.len(), |who| {
            seed += 1;
            threads::speed(setting(who, seed), duration)
        });
        for who in 0..POLICIES.len() {
            let seen = threads::watch(setting(who, 99), duration);
            let speed = Sample::of(&speeds[who]);
            table.row(vec![
                cpus.into(),
                POLICIES[who].name().into(),
                speed.into(),
                ratio(&speeds[who], &speeds[CLASSIC]).into(),
                seen.waiting.into(),
                seen.refill.into(),
                seen.run.into(),
            ]);
            series[who].1.push(speed.median / 1e6);
        }
        if cpus == 16 {
            let found = |ours: usize, theirs: usize| ratio(&speeds[ours], &speeds[theirs]).median;
            report.targets.extend([
                Target::at_least("clusters to classic, 16 threads, 90 % full", 5.0, found(OURS, CLASSIC)),
                Target::at_least("clusters to scan-more, 16 threads, 90 % full", 1.5, found(OURS, SCAN_MORE)),
                Target::at_least("scan-more to classic, 16 threads", 1.0, found(SCAN_MORE, CLASSIC)),
            ]);
        }
    }
    report.tables.push(table);
    report.charts.push(Chart {
        title: "Slots taken and freed, by threads".to_owned(),
        unit: "million/s".to_owned(),
        groups: counts.iter().map(|count| format!("{count} threads")).collect(),
        series,
    });
}

fn in_simulation(effort: Effort, report: &mut Report) {
    let (slots, millis) = effort.pick((1 << 21, 100), (1 << 20, 10));
    let mut table = Table::new(
        format!("{CPUS} virtual CPUs, {slots} slots, 90 % in use at random, {millis} ms"),
        &["load", "policy", "slots/s", "ratio to classic", "waiting for locks", "slots/refill", "slots/run"],
    );
    let loads = [("pmbench's rate", THINK_NS), ("as fast as they can", 0)];
    let mut series: Vec<(String, Vec<f64>)> =
        POLICIES.map(|policy| (policy.name().to_owned(), Vec::new())).into();
    for (load, think) in loads {
        let outcomes = POLICIES.map(|policy| {
            let setting = Setting { policy, slots, cpus: CPUS, seed: 1 };
            simulated::run(setting, Costs { think, ..COSTS }, millis * 1_000_000)
        });
        for (who, outcome) in outcomes.iter().enumerate() {
            table.row(vec![
                load.into(),
                POLICIES[who].name().into(),
                outcome.speed.into(),
                (outcome.speed / outcomes[CLASSIC].speed).into(),
                outcome.waiting.into(),
                outcome.refill.into(),
                outcome.run.into(),
            ]);
            series[who].1.push(outcome.speed / 1e6);
        }
        let scan_more = outcomes[SCAN_MORE].speed / outcomes[CLASSIC].speed;
        report.targets.push(Target::at_least(
            format!("scan-more to classic, {CPUS} CPUs, {load}"),
            1.0,
            scan_more,
        ));
    }
    report.tables.push(table);
    report.charts.push(Chart {
        title: format!("Slots taken and freed, {CPUS} virtual CPUs"),
        unit: "million/s".to_owned(),
        groups: loads.map(|(load, _)| load.to_owned()).into(),
        series,
    });
}
