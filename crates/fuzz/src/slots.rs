//! The slots of an area that two processes share, under each policy, against a set for each process.

use crate::{Input, Memory};
use farpage_core::areas::slots::probe::Unwatched;
use farpage_core::areas::slots::{Ground, Run};
use farpage_core::areas::{Leases, SlotMemory, Slots};
use farpage_core::config::SlotPolicy;
use farpage_core::units::CLUSTER_SLOTS;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

const CLUSTERS: u32 = 4;
/// Slots in the area. The last cluster is short.
const TOTAL: u32 = (CLUSTERS - 1) * CLUSTER_SLOTS + 100;

struct Process<'m> {
    number: u32,
    slots: Slots<'m>,
    used: BTreeSet<u32>,
    discarding: Vec<Run>,
}

/// Takes, frees and discards slots.
pub fn run(input: &mut Input) {
    let off = input.byte();
    let policy = SlotPolicy::ALL[input.below(SlotPolicy::ALL.len())];
    let cpus = 1 + input.below(3);
    let discards = input.byte() < 128;
    // In each cluster a few slots at two places are good, or nearly all slots of the area are good.
    let few = input.below(6) as u32;
    let is_bad = |slot: &u32| match few {
        0 => [3, 700, 701].contains(slot),
        _ => slot % CLUSTER_SLOTS > few && !(128 - few..128).contains(&(slot % CLUSTER_SLOTS)),
    };
    let bad: Vec<u32> = (1..TOTAL).filter(is_bad).collect();
    let holders: [AtomicU32; CLUSTERS as usize] = std::array::from_fn(|_| AtomicU32::new(0));
    let mut memories =
        [1, 2].map(|number| (number, Memory::new(SlotMemory::bytes(policy, TOTAL, cpus) + 64)));
    let mut processes = memories.each_mut().map(|(number, memory)| {
        let leases = Leases::new(&holders, *number);
        let memory = SlotMemory::carve(&mut memory.region(), policy, TOTAL, cpus);
        let slots = Slots::new(Ground { total: TOTAL, bad: &bad, leases, discards }, memory, Unwatched);
        Process { number: *number, slots, used: BTreeSet::new(), discarding: Vec::new() }
    });
    while !input.is_over() {
        // Taking slots is never switched off.
        let kind = input.kind(6, off & !1);
        let who = input.below(2);
        let cpu = input.below(4);
        match kind {
            Some(0) => take(&mut processes, who, cpu, 1 + input.below(64) as u32, &bad, &holders),
            Some(1) => {
                let process = &mut processes[who];
                if let Some(&slot) = process.used.iter().nth(input.below(process.used.len())) {
                    process.free(cpu, slot);
                }
            }
            Some(2) => {
                let process = &mut processes[who];
                let (skip, step) = (input.below(8), 1 + input.below(3));
                let gone: Vec<u32> = process.used.iter().copied().skip(skip).step_by(step).collect();
                gone.into_iter().for_each(|slot| process.free(cpu, slot));
            }
            Some(3) => {
                let process = &mut processes[who];
                let run = process.slots.take_discard();
                assert!(run.is_none() || discards);
                process.discarding.extend(run);
            }
            Some(4) => {
                let process = &mut processes[who];
                process.discarding.pop().into_iter().for_each(|run| process.slots.discarded(run));
            }
            Some(5) => processes[who].slots.let_go(),
            _ => {}
        }
        processes.iter().for_each(Process::agrees);
    }
}

fn take(processes: &mut [Process; 2], who: usize, cpu: usize, max: u32, bad: &[u32], holders: &[AtomicU32]) {
    let is_used = |slot: u32| {
        let is_in = |run: &Run| (run.0..run.0 + run.1).contains(&slot);
        processes.iter().any(|process| process.used.contains(&slot) || process.discarding.iter().any(is_in))
    };
    let is_free = |slot: u32| slot > 0 && slot < TOTAL && bad.binary_search(&slot).is_err() && !is_used(slot);
    let Process { number, slots, .. } = &processes[who];
    let mut got = BTreeSet::new();
    let taken = slots.take(cpu, max, |(first, count)| {
        assert_eq!(first / CLUSTER_SLOTS, (first + count - 1) / CLUSTER_SLOTS, "a run beyond its cluster");
        assert!(
            (first..first + count).all(|slot| is_free(slot) && got.insert(slot)),
            "a slot that isn't free"
        );
        assert_eq!(holders[(first / CLUSTER_SLOTS) as usize].load(Ordering::Relaxed), *number);
    });
    assert!(taken <= max && taken as usize == got.len());
    if taken == 0 {
        let mut could_have = (0..TOTAL).filter(|&slot| {
            [0, *number].contains(&holders[(slot / CLUSTER_SLOTS) as usize].load(Ordering::Relaxed))
        });
        assert!(!could_have.any(is_free), "a free slot wasn't found");
    }
    processes[who].used.extend(got);
}

impl Process<'_> {
    fn free(&mut self, cpu: usize, slot: u32) {
        assert!(self.used.remove(&slot));
        self.slots.free(cpu, slot);
    }

    fn agrees(&self) {
        let mut seen = BTreeSet::new();
        self.slots.check(|slot| assert!(seen.insert(slot)));
        assert_eq!(seen, self.used);
        assert_eq!(self.slots.in_use() as usize, self.used.len());
    }
}
