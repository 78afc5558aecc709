//! 48 virtual CPUs in simulated time. The allocators are real, and each call is made when its CPU comes to it
//! in virtual time. A probe records the call's locks and the number of slots it looks at, in their order. The
//! record is then played back. Locks are queues, first come first served, and each step takes the time given
//! by [`Costs`]. One seed gives one result.

use super::stage::{BATCH, Player, Setting, Stage, with_stage};
use farpage_core::areas::slots::probe::{Locked, Probe};
use farpage_core::sync::{Guard, Lock};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// The time of each kind of step, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Taking and releasing a lock that this CPU used last, and the work under it.
    pub lock: u64,
    /// Added if another CPU had the lock last, because its cache lines must be transferred.
    pub transfer: u64,
    /// Looking at one slot. The tables are far larger than a CPU's nearest cache.
    pub slot: f64,
    /// A CPU's work on each page between two calls.
    pub think: u64,
}

/// The results of a run.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Slots per virtual second.
    pub speed: f64,
    /// Share of the CPUs' time spent waiting for locks.
    pub waiting: f64,
    /// Slots found by one refill.
    pub refill: f64,
    /// Slots of a run that one write can merge.
    pub run: f64,
}

/// One step of a call.
#[derive(Clone, Copy, Debug)]
enum Event {
    Lock(Locked),
    Unlock(Locked),
    Scan(u32),
}

/// Records the steps of calls.
#[derive(Default)]
struct Recorder {
    events: RefCell<Vec<Event>>,
    refills: Cell<u64>,
    refilled: Cell<u64>,
}

impl Probe for Recorder {
    fn lock<'a, T, const RANK: u8>(&self, name: Locked, lock: &'a Lock<T, RANK>) -> Guard<'a, T, RANK> {
        self.events.borrow_mut().push(Event::Lock(name));
        lock.lock()
    }
    fn unlocking(&self, name: Locked) {
        self.events.borrow_mut().push(Event::Unlock(name));
    }
    fn scanned(&self, slots: u32) {
        self.events.borrow_mut().push(Event::Scan(slots));
    }
    fn refilled(&self, slots: u32) {
        self.refills.set(self.refills.get() + 1);
        self.refilled.set(self.refilled.get() + u64::from(slots));
    }
}

/// The next call of a CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Take,
    Free,
}

struct Cpu {
    player: Player,
    phase: Phase,
    /// Steps of the call under way, the last step first.
    steps: Vec<Event>,
    waits_since: u64,
}

/// A lock in virtual time.
#[derive(Default)]
struct Queue {
    holder: Option<usize>,
    last: Option<usize>,
    waiting: VecDeque<usize>,
}

struct World<'s, 'r> {
    stage: &'r Stage<'s, Recorder>,
    cpus: Vec<Cpu>,
    queues: HashMap<Locked, Queue>,
    /// Time, sequence number and CPU of each event.
    agenda: BinaryHeap<Reverse<(u64, u64, usize)>>,
    order: u64,
    waited: u64,
    costs: Costs,
}

/// Runs `setting.cpus` virtual CPUs for `duration_ns` virtual nanoseconds.
pub fn run(setting: Setting, costs: Costs, duration_ns: u64) -> Outcome {
    with_stage(setting, Recorder::default(), |stage, players| {
        let probe = stage.slots.probe();
        probe.events.borrow_mut().clear();
        let (refills, refilled) = (probe.refills.get(), probe.refilled.get());
        let cpu = |player| Cpu { player, phase: Phase::Take, steps: Vec::new(), waits_since: 0 };
        let mut world = World {
            stage,
            cpus: players.into_iter().map(cpu).collect(),
            queues: HashMap::new(),
            agenda: BinaryHeap::new(),
            order: 0,
            waited: 0,
            costs,
        };
        // The CPUs start at different instants.
        (0..world.cpus.len()).for_each(|cpu| world.schedule(cpu as u64 * 97, cpu));
        while let Some(Reverse((now, _, cpu))) = world.agenda.pop() {
            if now >= duration_ns {
                break;
            }
            world.step(now, cpu);
        }
        // CPUs that still wait at the end have waited since `waits_since`.
        let waiting = world.queues.values().flat_map(|queue| &queue.waiting);
        let pending: u64 =
            waiting.map(|cpu| duration_ns - world.cpus[*cpu].waits_since.min(duration_ns)).sum();
        let sum = |of: fn(&Player) -> u64| world.cpus.iter().map(|cpu| of(&cpu.player)).sum::<u64>() as f64;
        let slots = sum(|player| player.slots);
        Outcome {
            speed: slots / (duration_ns as f64 / 1e9),
            waiting: (world.waited + pending) as f64 / (duration_ns * world.cpus.len() as u64) as f64,
            refill: (probe.refilled.get() - refilled) as f64 / (probe.refills.get() - refills) as f64,
            run: slots / sum(|player| player.runs),
        }
    })
}

impl World<'_, '_> {
    fn schedule(&mut self, when: u64, cpu: usize) {
        self.order += 1;
        self.agenda.push(Reverse((when, self.order, cpu)));
    }

    /// Does a CPU's next step.
    fn step(&mut self, now: u64, cpu: usize) {
        match self.cpus[cpu].steps.pop() {
            None => self.call(now, cpu),
            Some(Event::Scan(slots)) => {
                let took = (f64::from(slots) * self.costs.slot).round() as u64;
                self.schedule(now + took, cpu);
            }
            Some(Event::Lock(name)) => {
                let queue = self.queues.entry(name).or_default();
                if queue.holder.is_some() {
                    queue.waiting.push_back(cpu);
                    self.cpus[cpu].waits_since = now;
                } else {
                    self.grant(now, cpu, name);
                }
            }
            Some(Event::Unlock(name)) => {
                let queue = self.queues.get_mut(&name).expect("a lock that was taken");
                assert!(queue.holder.take() == Some(cpu), "{name:?} is given back by who has it");
                let next = queue.waiting.pop_front();
                self.schedule(now, cpu);
                if let Some(next) = next {
                    self.waited += now - self.cpus[next].waits_since;
                    self.grant(now, next, name);
                }
            }
        }
    }

    fn grant(&mut self, now: u64, cpu: usize, name: Locked) {
        let queue = self.queues.get_mut(&name).expect("a lock that somebody wants");
        let transfer = if queue.last == Some(cpu) { 0 } else { self.costs.transfer };
        (queue.holder, queue.last) = (Some(cpu), Some(cpu));
        self.schedule(now + self.costs.lock + transfer, cpu);
    }

    /// Makes a CPU's next call on the real allocator. The call's record is played back from now on.
    fn call(&mut self, now: u64, number: usize) {
        let cpu = &mut self.cpus[number];
        let mut think = 0;
        match cpu.phase {
            Phase::Take => {
                cpu.player.take(self.stage);
                cpu.player.count_runs();
                cpu.phase = Phase::Free;
                think = self.costs.think * BATCH as u64;
            }
            Phase::Free => {
                if cpu.player.free(self.stage) {
                    cpu.phase = Phase::Take;
                }
            }
        }
        let mut events = self.stage.slots.probe().events.borrow_mut();
        cpu.steps.extend(events.drain(..).rev());
        drop(events);
        self.schedule(now + think, number);
    }
}
