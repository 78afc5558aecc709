//! `farpage bench order`: the area that pages go to. The lists of the four-node example are checked exactly.
//! Then other machines are simulated ([`crate::order_sim`]) around the engine's own code for the order.

use crate::Effort;
use crate::measure::{Sample, interleaved, ratio};
use crate::order_sim::{Costs, Device, Machine, Orders, Outcome, run as simulate};
use crate::report::{Cell, Chart, Report, Table, Target};
use farpage_core::areas::{Order, Placement};
use farpage_core::config::AreaOrder;
use farpage_core::units::{AreaId, NodeId};

/// Key and area of each node's list in the example of the Linux change. Areas A to D are on nodes 0 to 3.
const PUBLISHED_LISTS: [&str; 4] = ["A1 B3 C4 D5", "B1 A2 C4 D5", "C1 A2 B3 D5", "D1 A2 B3 C4"];

/// Costs of an NVMe drive of 2017, of the class of the Intel DC P4500, from its data sheet. The drive reads 4
/// KiB in 90 µs, and does some 450,000 random reads a second, so 40 at once. The drive writes 1 GB/s. Taking
/// 64 slots holds the area's lock for 1.6 µs. A device on the other node adds a hop across the sockets and
/// back: 1 µs.
const SSD: Costs = Costs {
    own_out_ns: 0,
    own_in_ns: 0,
    locked_out_ns: 25,
    locked_in_ns: 25,
    locked_remote_ns: 0,
    write_ns: 4_096,
    read_ns: 90_000,
    channels: 40,
    remote_ns: 1_000,
};

/// Costs of compressed memory as a device. The process itself compresses (LZO, 3 µs) and decompresses in 1.5
/// µs. A lock of the device covers finding space, copying and freeing. Another node's memory adds 100 ns for
/// half a page.
const ZRAM: Costs = Costs {
    own_out_ns: 3_000,
    own_in_ns: 1_500,
    locked_out_ns: 400,
    locked_in_ns: 150,
    locked_remote_ns: 100,
    write_ns: 0,
    read_ns: 0,
    channels: 1,
    remote_ns: 0,
};

/// Pages that stand for 1 GB. All sizes are scaled alike.
const GB: u64 = 1_024;

struct Case {
    name: &'static str,
    machine: Machine,
    /// Simulated time of a full run.
    full_ns: u64,
    quick_ns: u64,
}

fn machine(processes: &[usize], devices: Vec<Device>, pages_out: u64) -> Machine {
    Machine {
        processes: processes.to_vec(),
        devices,
        pages_out,
        orders: Orders::OneForAll,
        // Passing a modified cache line within a socket, and between sockets (Skylake-SP).
        pass_ns: [50, 130],
        // The median software time of a fault after the patch series of 2017.
        fault_ns: 4_000,
        grain: 1,
    }
}

/// Returns one device of these costs on each node.
fn on_each(nodes: u8, gb: u64, costs: Costs) -> Vec<Device> {
    (0..nodes).map(|node| Device { node, pages: gb * GB, costs }).collect()
}

fn cases() -> Vec<Case> {
    let ssd = |name, processes: &[usize], devices| {
        // 128 GB of data in 64 GB of memory, and two drives of 170 GB.
        Case {
            name,
            machine: machine(processes, devices, 64 * GB),
            full_ns: 6_000_000_000,
            quick_ns: 1_200_000_000,
        }
    };
    let zram = |name, orders| Case {
        name,
        // The distribution of processes follows the published use after the test: 15.7, 3.4, 3.4, 2.6.
        machine: Machine { grain: 8, orders, ..machine(&[40, 9, 9, 6], on_each(4, 16, ZRAM), 26 * GB) },
        full_ns: 3_000_000_000,
        quick_ns: 300_000_000,
    };
    let each = |case: Case| Case { machine: Machine { orders: Orders::OneEach, ..case.machine }, ..case };
    let mut uneven = on_each(2, 170, SSD);
    uneven[1].costs.write_ns *= 3;
    vec![
        ssd(CASE_32, &[16, 16], on_each(2, 170, SSD)),
        ssd(CASE_64, &[32, 32], on_each(2, 170, SSD)),
        ssd("2 nodes, 64 processes, all on node 0", &[64, 0], on_each(2, 170, SSD)),
        ssd("2 nodes, 64 processes, one SSD writes a third as fast", &[32, 32], uneven),
        ssd("4 nodes, 96 processes", &[24; 4], on_each(4, 170, SSD)),
        zram(CASE_ZRAM, Orders::OneForAll),
        each(ssd("2 nodes, 64 processes, an order for each", &[32, 32], on_each(2, 170, SSD))),
        each(ssd("2 nodes, 64 processes on node 0, an order for each", &[64, 0], on_each(2, 170, SSD))),
        zram("4 nodes with zram, 62 % on node 0, an order for each", Orders::OneEach),
    ]
}

const CASE_32: &str = "2 nodes, 32 processes";
const CASE_64: &str = "2 nodes, 64 processes";
const CASE_ZRAM: &str = "4 nodes with zram, 62 % of processes on node 0";

/// The results of one case for each policy.
struct Found {
    name: &'static str,
    /// Faults per second, by policy, then by seed.
    faults_per_s: Vec<Vec<f64>>,
    /// GB in use of each area at the end of the first seed, by policy.
    used_gb: Vec<Vec<f64>>,
}

impl Found {
    fn of(case: &Case, effort: Effort) -> Found {
        let ns = effort.pick(case.full_ns, case.quick_ns);
        let mut seed = 0;
        let outcomes: Vec<Vec<Outcome>> = interleaved(effort.pick(3, 2), AreaOrder::ALL.len(), |policy| {
            seed += 1;
            // All policies of a round get the same seed.
            let round = (seed - 1) / AreaOrder::ALL.len() as u64;
            simulate(&case.machine, AreaOrder::ALL[policy], round + 1, ns)
        });
        let gb = |outcome: &Outcome| outcome.used.iter().map(|used| *used as f64 / GB as f64).collect();
        Found {
            name: case.name,
            faults_per_s: outcomes
                .iter()
                .map(|rounds| rounds.iter().map(|o| o.faults_per_s).collect())
                .collect(),
            used_gb: outcomes.iter().map(|rounds| gb(&rounds[0])).collect(),
        }
    }

    fn ratio(&self, ours: AreaOrder, theirs: AreaOrder) -> Sample {
        ratio(&self.faults_per_s[ours as usize], &self.faults_per_s[theirs as usize])
    }

    fn median(&self, policy: AreaOrder) -> f64 {
        Sample::of(&self.faults_per_s[policy as usize]).median
    }

    /// Returns the ratio of `Weighted` to the best of the other policies.
    fn against_best(&self) -> Sample {
        let others = [AreaOrder::Global, AreaOrder::Numa, AreaOrder::RoundRobin];
        let best = others.into_iter().max_by(|a, b| self.median(*a).total_cmp(&self.median(*b)));
        self.ratio(AreaOrder::Weighted, best.expect("there are others"))
    }
}

/// Returns the lists of the four-node example, written as in the description of the Linux change.
fn lists() -> Vec<String> {
    let mut order = Order::new(AreaOrder::Numa, 4);
    for area in 0..4 {
        order.on(AreaId(area), Placement::default().at(NodeId(area), |_| None));
    }
    let list = |node| {
        let areas =
            order.of_node(NodeId(node)).map(|(area, key)| format!("{}{key}", (b'A' + area.0) as char));
        areas.collect::<Vec<_>>().join(" ")
    };
    (0..4).map(list).collect()
}

/// Runs the experiment.
pub fn run(effort: Effort) -> Result<Report, String> {
    let mut report = Report::new("order");
    report.published = vec![
        "choice by node (Linux 4.14): 2 nodes, an SSD each; 32 processes 13,306 to 15,169 (+14 %), 64 processes \
         11,885 to 14,879 (+25 %)"
            .into(),
        "its revert (after Linux 6.18): 4 zram devices, in turn about 18 % better than by node; in use afterwards \
         15.7/3.4/3.4/2.6 GB by node, 6.6 GB each in turn"
            .into(),
    ];
    report_lists(&mut report);
    let found: Vec<Found> = cases().iter().map(|case| Found::of(case, effort)).collect();
    report_cases(&mut report, &found);
    report.notes = vec![
        "simulated machines; only the order of areas is real code. Modelled: an SSD's read latency, parallel reads and \
         write bandwidth (data sheet of its class), the area's lock and the passing of its cache line, a hop between \
         sockets, compression for zram. Not modelled: reads that are slowed down by writes, memory bandwidth, \
         interrupts"
            .into(),
        "the costs stand in crates/bench/src/order.rs with where they come from; devices and compression take between half \
         and one and a half times theirs (if always the same, nobody ever waits in the orders without choice, however \
         busy the device: `weighted` then comes to 0.98 on the 4 nodes)".into(),
    ];
    Ok(report)
}

fn report_lists(report: &mut Report) {
    let mut table = Table::new(
        "Lists of the example: areas A to D on nodes 0 to 3, none with a priority",
        &["node", "list", "published"],
    );
    let lists = lists();
    for (node, list) in lists.iter().enumerate() {
        table.row(vec![node.to_string().into(), list.as_str().into(), PUBLISHED_LISTS[node].into()]);
    }
    report.tables.push(table);
    let is_exact = lists == PUBLISHED_LISTS;
    report.targets.push(Target::at_least(
        "lists as published (1: exactly)",
        1.0,
        f64::from(u8::from(is_exact)),
    ));
}

fn report_cases(report: &mut Report, found: &[Found]) {
    let columns =
        ["machine", "global", "numa", "round-robin", "weighted", "numa/global", "weighted/best other"];
    let mut table = Table::new(
        "Simulated: faults served per second, in thousands (median [lowest..highest seed])",
        &columns,
    );
    let mut use_table = Table::new(
        "Simulated: GB in use of each area at the end",
        &["machine", "global", "numa", "round-robin", "weighted"],
    );
    for case in found {
        let thousands = |policy: &AreaOrder| -> Cell {
            let values: Vec<f64> =
                case.faults_per_s[*policy as usize].iter().map(|faults| faults / 1e3).collect();
            Sample::of(&values).into()
        };
        let mut row = vec![case.name.into()];
        row.extend(AreaOrder::ALL.iter().map(thousands));
        row.extend([case.ratio(AreaOrder::Numa, AreaOrder::Global).into(), case.against_best().into()]);
        table.row(row);
        let gigabytes = |policy: &AreaOrder| -> Cell {
            let areas = case.used_gb[*policy as usize].iter().map(|gb| format!("{gb:.1}"));
            areas.collect::<Vec<_>>().join("/").into()
        };
        let mut row = vec![case.name.into()];
        row.extend(AreaOrder::ALL.iter().map(gigabytes));
        use_table.row(row);
    }
    report.tables.extend([table, use_table]);
    let of = |name| found.iter().find(|case| case.name == name).expect("the case has this name");
    for (case, wanted) in [(CASE_32, 1.14), (CASE_64, 1.25)] {
        let ratio = of(case).ratio(AreaOrder::Numa, AreaOrder::Global).median;
        report.targets.push(Target::at_least(format!("{case}: numa over global"), wanted, ratio));
    }
    for other in [AreaOrder::Global, AreaOrder::Numa] {
        let ratio = of(CASE_ZRAM).ratio(AreaOrder::RoundRobin, other).median;
        let what = format!("{CASE_ZRAM}: round-robin over {}", other.name());
        report.targets.push(Target::at_least(what, 1.0, ratio));
    }
    for case in found {
        let what = format!("{}: weighted over the best of the others", case.name);
        report.targets.push(Target::at_least(what, 0.99, case.against_best().median));
    }
    report.charts.push(Chart {
        title: "Faults served per second, over `global` (simulated)".into(),
        unit: "ratio".into(),
        groups: (1..=found.len()).map(|case| format!("case {case}")).collect(),
        series: AreaOrder::ALL
            .iter()
            .map(|policy| {
                let ratios = found.iter().map(|case| case.ratio(*policy, AreaOrder::Global).median);
                (policy.name().to_owned(), ratios.collect())
            })
            .collect(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_example_are_the_published_ones() {
        assert_eq!(lists(), PUBLISHED_LISTS);
    }

    #[test]
    fn one_seed_gives_one_run_and_another_a_different_one() {
        let cases = cases();
        let run = |seed| simulate(&cases[5].machine, AreaOrder::Weighted, seed, 50_000_000).faults_per_s;
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn one_process_on_an_idle_machine_takes_the_time_that_its_costs_say() {
        let machine = machine(&[1], on_each(1, 10, SSD), GB);
        let found = simulate(&machine, AreaOrder::Global, 1, 3_000_000_000).faults_per_s;
        // A fault, a read, a 64th of a batch's write, and two passes under the lock.
        let ns = 4_000.0 + 90_000.0 + 4_096.0 + 25.0 + 25.0 + 50.0 + 50.0 / 64.0;
        assert!((found * ns / 1e9 - 1.0).abs() < 0.01, "{found} faults a second of {ns} ns");
    }
}
