//! A simulated machine with nodes, devices on them, and processes that swap. Only [`Order`] is real code.
//!
//! Every process endlessly touches random pages of its memory. A touch faults and reads the page from its
//! area. After every 64 pages read, the process writes 64 other pages to the area that the order chooses.
//! Locks and devices are queues with servers. Events happen in the order of simulated time, and one seed
//! gives one run.

use crate::measure::Random;
use farpage_core::areas::order::{AreaSet, RequestTime};
use farpage_core::areas::{Order, Placement};
use farpage_core::config::AreaOrder;
use farpage_core::units::{AreaId, NodeId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Slots that are taken and written at once: Linux's SWAP_BATCH, and Farpage's largest write.
pub(crate) const BATCH_PAGES: u64 = 64;
/// Nanoseconds between two reports to the order of how full areas are, as in the live runtime.
const USED_EVERY_NS: u64 = 1_000_000_000;
/// Slots that must be free before an area that was full is used again.
const FREED_ENOUGH: u64 = 64;

/// The costs of one kind of device, in ns.
#[derive(Clone, Copy)]
pub(crate) struct Costs {
    /// The process's own work for each page that it writes (compression), and for each page that it reads.
    pub(crate) own_out_ns: u64,
    pub(crate) own_in_ns: u64,
    /// Time under the area's lock for each page written (taking its slot, storing it), and for each page
    /// read.
    pub(crate) locked_out_ns: u64,
    pub(crate) locked_in_ns: u64,
    /// Added to the time under the lock if the area is on another node.
    pub(crate) locked_remote_ns: u64,
    /// The device's time to write a page, one request after another, and to read a page, with `channels`
    /// reads at once.
    pub(crate) write_ns: u64,
    pub(crate) read_ns: u64,
    pub(crate) channels: usize,
    /// Added to a request if the device is on another node.
    pub(crate) remote_ns: u64,
}

/// One device with an area.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub(crate) node: u8,
    pub(crate) pages: u64,
    pub(crate) costs: Costs,
}

/// A machine and its load.
pub(crate) struct Machine {
    /// Processes on each node.
    pub(crate) processes: Vec<usize>,
    pub(crate) devices: Vec<Device>,
    /// Evicted pages of all processes together.
    pub(crate) pages_out: u64,
    /// Whether one order serves all processes, as in a kernel, or each process has its own, as under Farpage.
    pub(crate) orders: Orders,
    /// Time to pass a lock's cache line within a node, and between nodes.
    pub(crate) pass_ns: [u64; 2],
    /// Time of a fault without its I/O.
    pub(crate) fault_ns: u64,
    /// Pages that one event stands for. 1 is exact; more is faster.
    pub(crate) grain: u64,
}

/// The number of orders.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orders {
    OneForAll,
    OneEach,
}

/// The results of a run.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Faults served per second, all processes together.
    pub(crate) faults_per_s: f64,
    /// Pages in use on each area at the end.
    pub(crate) used: Vec<u64>,
}

/// Servers for which requests wait, first come first served.
struct Queue {
    free_at: Vec<u64>,
}

impl Queue {
    fn new(servers: usize) -> Queue {
        Queue { free_at: vec![0; servers] }
    }

    /// Returns the time at which a request that arrives now is done.
    fn serve(&mut self, now: u64, ns: u64) -> u64 {
        let server = self.free_at.iter_mut().min().expect("a queue has a server");
        *server = (*server).max(now) + ns;
        *server
    }
}

/// A device at work.
struct Area {
    device: Device,
    lock: Queue,
    /// The node that held the lock last.
    lock_at: u8,
    writes: Queue,
    reads: Queue,
    used: u64,
    is_full: bool,
}

/// The next step of a process.
#[derive(Clone, Copy)]
enum Step {
    Choose,
    Lock { area: usize, since: u64 },
    Write { area: usize, since: u64 },
    Written { area: usize, since: u64 },
    Read,
    Free { area: usize },
}

struct Process {
    node: u8,
    step: Step,
    /// The process's pages on each area.
    out: Vec<u64>,
    /// Pages of the process that are out in the steady state.
    out_wanted: u64,
    /// Pages to read before the next batch is written.
    to_read: u64,
}

struct World {
    machine_pass_ns: [u64; 2],
    fault_ns: u64,
    grain: u64,
    areas: Vec<Area>,
    processes: Vec<Process>,
    orders: Vec<Order>,
    random: Random,
    faults: u64,
}

/// Runs a machine for `ns` simulated nanoseconds. The first third isn't counted.
pub(crate) fn run(machine: &Machine, policy: AreaOrder, seed: u64, ns: u64) -> Outcome {
    let mut world = World::new(machine, policy, seed);
    let mut events: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    for process in 0..world.processes.len() {
        events.push(Reverse((world.random.below(10_000), process)));
    }
    let (warm, mut faults_before, mut look_at) = (ns / 3, None, USED_EVERY_NS);
    while let Some(Reverse((now, process))) = events.pop() {
        if now >= ns {
            break;
        }
        if now >= warm && faults_before.is_none() {
            faults_before = Some(world.faults);
        }
        if now >= look_at {
            look_at += USED_EVERY_NS;
            world.note_used();
        }
        let at = world.step(process, now);
        events.push(Reverse((at, process)));
    }
    let faults = world.faults - faults_before.unwrap_or(0);
    let used: Vec<u64> = world.areas.iter().map(|area| area.used).collect();
    let held: u64 = world.processes.iter().flat_map(|process| &process.out).sum();
    assert_eq!(held, used.iter().sum::<u64>(), "every page that is out is on one area");
    Outcome { faults_per_s: faults as f64 * 1e9 / (ns - warm) as f64, used }
}

impl World {
    fn new(machine: &Machine, policy: AreaOrder, seed: u64) -> World {
        let count: usize = machine.processes.iter().sum();
        let nodes = machine.processes.len();
        let order = || {
            let mut order = Order::new(policy, nodes);
            for (at, device) in machine.devices.iter().enumerate() {
                // The distance that the firmware of these machines reports: 21 to any other node.
                let far = |from: NodeId| Some(if from.0 == device.node { 10 } else { 21 });
                order.on(AreaId(at as u8), Placement::default().at(NodeId(device.node), far));
            }
            order
        };
        let orders = if machine.orders == Orders::OneForAll { 1 } else { count };
        let nodes_of =
            machine.processes.iter().enumerate().flat_map(|(node, count)| vec![node as u8; *count]);
        World {
            machine_pass_ns: machine.pass_ns,
            fault_ns: machine.fault_ns,
            grain: machine.grain,
            areas: machine
                .devices
                .iter()
                .map(|device| Area {
                    device: *device,
                    lock: Queue::new(1),
                    lock_at: device.node,
                    writes: Queue::new(1),
                    reads: Queue::new(device.costs.channels),
                    used: 0,
                    is_full: false,
                })
                .collect(),
            processes: nodes_of
                .map(|node| Process {
                    node,
                    step: Step::Choose,
                    out: vec![0; machine.devices.len()],
                    out_wanted: (machine.pages_out / count as u64).max(BATCH_PAGES),
                    to_read: 0,
                })
                .collect(),
            orders: (0..orders).map(|_| order()).collect(),
            random: Random::new(seed),
            faults: 0,
        }
    }

    /// Does one step of a process. Returns the time at which its next step begins.
    fn step(&mut self, process: usize, now: u64) -> u64 {
        match self.processes[process].step {
            Step::Choose => self.choose(process, now),
            Step::Lock { area, since } => self.lock_out(process, area, since, now),
            Step::Write { area, since } => self.write(process, area, since, now),
            Step::Written { area, since } => self.written(process, area, since, now),
            Step::Read => self.read(process, now),
            Step::Free { area } => self.lock_in(process, area, now),
        }
    }

    fn order(&mut self, process: usize) -> &mut Order {
        let at = if self.orders.len() == 1 { 0 } else { process };
        &mut self.orders[at]
    }

    /// Takes slots for a batch from the area that the order chooses, or from the next one if that area is
    /// full.
    fn choose(&mut self, process: usize, now: u64) -> u64 {
        let node = NodeId(self.processes[process].node);
        let mut tried = AreaSet::default();
        let area = loop {
            let area = self.order(process).choose(node, tried).expect("the areas are large enough");
            let entry = &mut self.areas[area.0 as usize];
            if entry.used + BATCH_PAGES <= entry.device.pages {
                break area.0 as usize;
            }
            entry.is_full = true;
            tried.insert(area);
            self.order(process).finished(area);
            self.orders.iter_mut().for_each(|order| order.full(area));
        };
        self.areas[area].used += BATCH_PAGES;
        self.processes[process].out[area] += BATCH_PAGES;
        self.processes[process].step = Step::Lock { area, since: now };
        now + self.about(self.areas[area].device.costs.own_out_ns * BATCH_PAGES)
    }

    /// Takes `pages` pages of `ns` each through the area's lock. Returns the time at which they are done.
    fn through_lock(&mut self, process: usize, area: usize, pages: u64, ns: u64, now: u64) -> u64 {
        let node = self.processes[process].node;
        let area = &mut self.areas[area];
        let pass_ns = self.machine_pass_ns[usize::from(area.lock_at != node)];
        let remote_ns = if area.device.node == node { 0 } else { area.device.costs.locked_remote_ns };
        area.lock_at = node;
        area.lock.serve(now, pass_ns + pages * (ns + remote_ns))
    }

    fn lock_out(&mut self, process: usize, area: usize, since: u64, now: u64) -> u64 {
        let ns = self.areas[area].device.costs.locked_out_ns;
        self.processes[process].step = Step::Write { area, since };
        self.through_lock(process, area, BATCH_PAGES, ns, now)
    }

    fn write(&mut self, process: usize, area: usize, since: u64, now: u64) -> u64 {
        let remote = self.remote_ns(process, area);
        self.processes[process].step = Step::Written { area, since };
        let ns = self.about(self.areas[area].device.costs.write_ns * BATCH_PAGES);
        if ns == 0 { now } else { self.areas[area].writes.serve(now, ns) + remote }
    }

    fn written(&mut self, process: usize, area: usize, since: u64, now: u64) -> u64 {
        let order = self.order(process);
        order.finished(AreaId(area as u8));
        order.note_latency(AreaId(area as u8), RequestTime::Exactly(now - since));
        let entry = &mut self.processes[process];
        let is_under_way = entry.out.iter().sum::<u64>() > entry.out_wanted;
        entry.to_read = if is_under_way { BATCH_PAGES } else { 0 };
        self.next(process, now)
    }

    /// Returns a random time between half and one and a half times `ns`. With constant times, processes fall
    /// into step, and no process ever waits, however busy a device is.
    fn about(&mut self, ns: u64) -> u64 {
        ns / 2 + self.random.below(ns + 1)
    }

    fn next(&mut self, process: usize, now: u64) -> u64 {
        let entry = &mut self.processes[process];
        if entry.to_read == 0 {
            entry.step = Step::Choose;
            return now;
        }
        entry.step = Step::Read;
        now + self.fault_ns * self.grain
    }

    fn remote_ns(&self, process: usize, area: usize) -> u64 {
        let device = &self.areas[area].device;
        if device.node == self.processes[process].node { 0 } else { device.costs.remote_ns }
    }

    /// Reads a random page among the process's evicted pages.
    fn read(&mut self, process: usize, now: u64) -> u64 {
        let entry = &mut self.processes[process];
        let mut left = self.random.below(entry.out.iter().sum());
        let mut area = 0;
        while left >= entry.out[area] {
            left -= entry.out[area];
            area += 1;
        }
        entry.step = Step::Free { area };
        let remote = self.remote_ns(process, area);
        let costs = self.areas[area].device.costs;
        let own = self.about(costs.own_in_ns * self.grain);
        match self.about(costs.read_ns) {
            0 => now + own,
            read_ns => self.areas[area].reads.serve(now, read_ns) + remote + own,
        }
    }

    /// Frees the slot of a page that was read.
    fn lock_in(&mut self, process: usize, area: usize, now: u64) -> u64 {
        let pages = self.grain.min(self.processes[process].out[area]).min(self.processes[process].to_read);
        let ns = self.areas[area].device.costs.locked_in_ns;
        let done = self.through_lock(process, area, pages, ns, now);
        let entry = &mut self.processes[process];
        entry.out[area] -= pages;
        entry.to_read -= pages;
        self.faults += pages;
        let freed = &mut self.areas[area];
        freed.used -= pages;
        if freed.is_full && freed.used + BATCH_PAGES + FREED_ENOUGH <= freed.device.pages {
            freed.is_full = false;
            self.orders.iter_mut().for_each(|order| order.back(AreaId(area as u8)));
        }
        self.next(process, done)
    }

    fn note_used(&mut self) {
        for (at, area) in self.areas.iter().enumerate() {
            for order in &mut self.orders {
                order.note_used(AreaId(at as u8), area.used, area.device.pages);
            }
        }
    }
}
