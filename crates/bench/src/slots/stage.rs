//! An area of which 90 % is in use, at random. A byte for each slot names the slot's owner, so every slot
//! that an allocator hands out is checked to have none.
// UNSAFETY: the allocators' tables are carved out of handed memory, as in a live engine.

use crate::measure::Random;
use farpage_core::areas::slots::probe::Probe;
use farpage_core::areas::slots::{Ground, Slots};
use farpage_core::areas::{Leases, SlotMemory};
use farpage_core::config::SlotPolicy;
use farpage_core::memory::Region;
use farpage_core::units::CLUSTER_SLOTS;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Slots that a thread takes and frees at a time.
pub const BATCH: usize = 64;
/// Percent of the area that is in use.
pub const FILL_PERCENT: u32 = 90;

/// The settings of a stage.
#[derive(Clone, Copy)]
pub struct Setting {
    /// The policy that finds free slots.
    pub policy: SlotPolicy,
    /// Slots of the area.
    pub slots: u32,
    /// CPUs or threads that take slots.
    pub cpus: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// An area with its allocator and its owners.
pub struct Stage<'s, P: Probe> {
    /// The allocator.
    pub slots: &'s Slots<'s, P>,
    /// The owner of each slot: the CPU's number plus one, or 0.
    owners: &'s [AtomicU8],
}

/// The slots of one thread, and its random numbers.
pub struct Player {
    cpu: usize,
    held: Vec<u32>,
    fresh: Vec<u32>,
    random: Random,
    /// Writes that the player's batches need. A run of neighbours in a batch is one write.
    pub runs: u64,
    /// Slots taken.
    pub slots: u64,
}

/// Sets an area up, fills it, deals its slots to one player for each CPU, and calls `act`.
pub fn with_stage<P: Probe, R>(
    setting: Setting,
    probe: P,
    act: impl FnOnce(&Stage<'_, P>, Vec<Player>) -> R,
) -> R {
    let holders: Vec<AtomicU32> =
        (0..setting.slots.div_ceil(CLUSTER_SLOTS)).map(|_| AtomicU32::new(0)).collect();
    let bytes = SlotMemory::bytes(setting.policy, setting.slots, setting.cpus);
    let mut memory = vec![0_u64; bytes / 8 + 1];
    // SAFETY: the memory is zeroed and has this size. The vector outlives the slots and isn't used meanwhile.
    let mut region = unsafe { Region::new(memory.as_mut_ptr().cast(), bytes) };
    let tables = SlotMemory::carve(&mut region, setting.policy, setting.slots, setting.cpus);
    let leases = Leases::new(&holders, 1);
    let ground = Ground { total: setting.slots, bad: &[], leases, discards: false };
    let slots = Slots::new(ground, tables, probe);
    let owners: Vec<AtomicU8> = (0..setting.slots).map(|_| AtomicU8::new(0)).collect();
    let stage = Stage { slots: &slots, owners: &owners };
    let players = stage.fill(setting);
    let result = act(&stage, players);
    let owned = owners.iter().filter(|owner| owner.load(Ordering::Relaxed) != 0).count();
    let mut in_use = 0;
    slots.check(|slot| {
        let owner = owners[slot as usize].load(Ordering::Relaxed);
        assert!(owner != 0, "slot {slot} is in use, but nobody has it");
        in_use += 1;
    });
    assert_eq!(in_use, owned, "slots in use");
    result
}

impl<P: Probe> Stage<'_, P> {
    /// Takes every slot, then frees one in ten at random. Returns the players with the slots that are left.
    fn fill(&self, setting: Setting) -> Vec<Player> {
        let mut random = Random::new(setting.seed);
        let mut all = Vec::with_capacity(setting.slots as usize);
        let mut turns = (0..setting.cpus).cycle();
        let mut take = |cpu| self.slots.take(cpu, BATCH as u32, |run| all.extend(run.0..run.0 + run.1));
        while take(turns.next().expect("a cycle")) > 0 {}
        for at in (1..all.len()).rev() {
            all.swap(at, random.below(at as u64 + 1) as usize);
        }
        let kept = all.len() * FILL_PERCENT as usize / 100;
        for (turn, slot) in all.split_off(kept).into_iter().enumerate() {
            self.slots.free(turn % setting.cpus, slot);
        }
        let share = all.len().div_ceil(setting.cpus);
        let deal = |(cpu, held): (usize, &[u32])| {
            held.iter().for_each(|slot| self.change_owner(*slot, 0, cpu as u8 + 1));
            Player {
                cpu,
                held: held.to_vec(),
                fresh: Vec::with_capacity(BATCH),
                random: Random::new(setting.seed + 1 + cpu as u64),
                runs: 0,
                slots: 0,
            }
        };
        all.chunks(share).enumerate().map(deal).collect()
    }

    /// Changes a slot's owner without a locked instruction, which would cost more than some of the measured
    /// calls. Two threads that get the same slot at the same instant both find it free. The thread whose
    /// number is overwritten notices the error when it frees the slot.
    fn change_owner(&self, slot: u32, from: u8, to: u8) {
        let owner = &self.owners[slot as usize];
        let found = owner.load(Ordering::Relaxed);
        assert!(found == from, "slot {slot} should be {from}'s, but is {found}'s (0: nobody's)");
        owner.store(to, Ordering::Relaxed);
    }
}

impl Player {
    /// Takes a batch of slots.
    pub fn take<P: Probe>(&mut self, stage: &Stage<'_, P>) {
        let me = self.cpu as u8 + 1;
        while self.fresh.len() < BATCH {
            let left = (BATCH - self.fresh.len()) as u32;
            let taken = stage.slots.take(self.cpu, left, |(first, count)| {
                for slot in first..first + count {
                    stage.change_owner(slot, 0, me);
                    self.fresh.push(slot);
                }
            });
            assert!(taken > 0, "no slot is free, but a tenth of the area is");
        }
    }

    /// Frees a random slot of those that the player holds, and holds a slot of the batch instead. Returns
    /// whether the batch is used up.
    pub fn free<P: Probe>(&mut self, stage: &Stage<'_, P>) -> bool {
        let Some(fresh) = self.fresh.pop() else { return true };
        let at = self.random.below(self.held.len() as u64) as usize;
        let slot = std::mem::replace(&mut self.held[at], fresh);
        stage.change_owner(slot, self.cpu as u8 + 1, 0);
        stage.slots.free(self.cpu, slot);
        self.fresh.is_empty()
    }

    /// Counts the writes that a complete batch needs.
    pub fn count_runs(&mut self) {
        self.fresh.sort_unstable();
        let breaks = self
            .fresh
            .windows(2)
            .filter(|pair| pair[1] != pair[0] + 1 || pair[0] / CLUSTER_SLOTS != pair[1] / CLUSTER_SLOTS);
        self.runs += 1 + breaks.count() as u64;
        self.slots += BATCH as u64;
    }
}
