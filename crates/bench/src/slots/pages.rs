//! pmbench's pattern, live. Processes touch pages at random, four reads to one write, under `farpage run`
//! with each policy. The area is just large enough.

use super::{CLASSIC, POLICIES};
use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::{Sample, interleaved_until_failure, ratio};
use crate::report::{Cell, Chart, Report, Table};

const MIB: f64 = (1 << 20) as f64;

/// Runs the experiment, and adds its table and chart.
pub(super) fn run(effort: Effort, report: &mut Report) -> Result<(), String> {
    // The published run had 16 processes on 48 CPUs. Here two processes run on each of two CPUs.
    let (processes, process_mib, seconds, rounds) = effort.pick((4, 96, 6.0, 5), (2, 48, 0.7, 1));
    // A third of each process's memory fits. Then 90 % of the area is in use.
    let ram_mib = process_mib / 3;
    let area_mib = processes * (process_mib - ram_mib) * 10 / 9;
    let swap = format!("{}:{area_mib}M", live::swap_directory()?.display());
    let (outcomes, failed) = interleaved_until_failure(rounds, POLICIES.len(), |who| {
        let (ram, bytes) = (format!("{ram_mib}M"), format!("{process_mib}M"));
        let options = ["--ram", &ram, "--pool", "1M", "--swap", &swap, "--slots", POLICIES[who].name()];
        let (processes, seconds) = (processes.to_string(), seconds.to_string());
        let load = ["random-processes", "--bytes", &bytes, "--threads", &processes, "--seconds", &seconds];
        live::under(&options, &load)
    })?;
    let mut table = Table::new(
        format!(
            "pmbench's pattern live: {processes} processes of {process_mib} MiB, {ram_mib} MiB of RAM each, an area of \
             {area_mib} MiB, {seconds} s"
        ),
        &["policy", "touches/s", "ratio to classic", "swap-in MiB/s", "swap-out MiB/s", "pages/write"],
    );
    let numbers =
        |who: usize, of: fn(&Outcome) -> f64| -> Vec<f64> { outcomes[who].iter().map(of).collect() };
    let touches: fn(&Outcome) -> f64 = |outcome| outcome.number("touches_per_second");
    let mut bars = Vec::new();
    for (who, policy) in POLICIES.iter().enumerate() {
        let sample = |of| Cell::Sample(Sample::of(&numbers(who, of)));
        table.row(vec![
            policy.name().into(),
            sample(touches),
            ratio(&numbers(who, touches), &numbers(CLASSIC, touches)).into(),
            sample(|outcome| pages_per_second(outcome, "pswpin") * 4096.0 / MIB),
            sample(|outcome| pages_per_second(outcome, "area_slots") * 4096.0 / MIB),
            sample(|outcome| outcome.counter("area_slots") / outcome.counter("area_writes")),
        ]);
        bars.push((policy.name().to_owned(), vec![Sample::of(&numbers(who, touches)).median]));
    }
    report.tables.push(table);
    report.charts.push(Chart {
        title: "pmbench's pattern, live".to_owned(),
        unit: "touches/s".to_owned(),
        groups: vec![format!("{processes} processes")],
        series: bars,
    });
    failed.map_or(Ok(()), Err)
}

/// Returns the rate over the whole run, filling included, because the counters don't separate the two.
fn pages_per_second(outcome: &Outcome, counter: &str) -> f64 {
    outcome.counter(counter) / outcome.wall.as_secs_f64()
}
