//! Tests every policy against a set of slots. Clusters have 512 slots, so the tests make most of them bad. A
//! few usable slots are left in each cluster, and running out of slots is the rule.

use super::*;
use core::sync::atomic::AtomicU32;
use proptest::prelude::*;
use std::collections::BTreeSet;

const CLUSTERS: u32 = 5;
/// The last cluster is short.
const TOTAL: u32 = (CLUSTERS - 1) * CLUSTER_SLOTS + 100;

/// Returns the bad slots. `tiny` leaves in each cluster only slots with an offset up to it, or just below
/// 128.
fn bad(tiny: Option<u32>) -> &'static [u32] {
    let is_bad = |slot: &u32| {
        let at = slot % CLUSTER_SLOTS;
        match tiny {
            Some(few) => at > few && !(128 - few..128).contains(&at),
            None => [3, 700, 701].contains(slot),
        }
    };
    (1..TOTAL).filter(is_bad).collect::<Vec<_>>().leak()
}

struct Setting {
    policy: SlotPolicy,
    tiny: Option<u32>,
    cpus: usize,
    discards: bool,
}

fn slots(setting: &Setting, holders: &'static [AtomicU32]) -> Slots<'static> {
    let bytes = SlotMemory::bytes(setting.policy, TOTAL, setting.cpus);
    let memory = vec![0_u64; bytes / 8 + 1].leak();
    // SAFETY: the memory is zeroed, writable and of that size. It is never freed, so it is nobody else's.
    let mut region = unsafe { Region::new(memory.as_mut_ptr().cast(), bytes) };
    let memory = SlotMemory::carve(&mut region, setting.policy, TOTAL, setting.cpus);
    let leases = Leases::new(holders, 1);
    let ground = Ground { total: TOTAL, bad: bad(setting.tiny), leases, discards: setting.discards };
    let mut slots = Slots::new(ground, memory, Unwatched);
    if let (Policy::Classic(classic), Some(_)) = (&mut slots.policy, setting.tiny) {
        classic.limits = classic::Limits { ration: 7, batch: 3, on: 2, off: 1 };
    }
    slots
}

fn holders() -> &'static [AtomicU32] {
    (0..CLUSTERS).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().leak()
}

/// Returns the first run of the slots taken. The other runs are freed again.
fn take(slots: &Slots<'_>, cpu: usize, max: u32) -> Option<Run> {
    let mut runs = Vec::new();
    let taken = slots.take(cpu, max, |run| runs.push(run));
    assert_eq!(runs.iter().map(|run| run.1).sum::<u32>(), taken);
    let others = runs.iter().skip(1).flat_map(|run| run.0..run.0 + run.1);
    others.for_each(|slot| slots.free(cpu, slot));
    runs.first().copied()
}

#[derive(Clone, Debug)]
enum Op {
    Take(usize, u32),
    Free(usize),
    /// Frees every second slot from here on.
    FreeMany(usize),
    Discard,
    Discarded,
    LetGo,
    Tighten,
    /// The other process takes a cluster, or gives one back.
    Other(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0_usize..4, 1_u32..65).prop_map(|(cpu, max)| Op::Take(cpu, max)),
        2 => any::<usize>().prop_map(Op::Free),
        2 => any::<usize>().prop_map(Op::FreeMany),
        1 => Just(Op::Discard),
        1 => Just(Op::Discarded),
        1 => Just(Op::LetGo),
        1 => Just(Op::Tighten),
        1 => any::<bool>().prop_map(Op::Other),
    ]
}

/// What the model knows.
#[derive(Default)]
struct Model {
    used: BTreeSet<u32>,
    discarding: Vec<Run>,
    others: Vec<u32>,
}

impl Model {
    /// Fails if a slot was handed out that must not be.
    fn take(&mut self, run: Run, bad: &[u32]) -> Result<(), TestCaseError> {
        prop_assert_eq!(run.0 / CLUSTER_SLOTS, (run.0 + run.1 - 1) / CLUSTER_SLOTS);
        for slot in run.0..run.0 + run.1 {
            prop_assert!(slot > 0 && slot < TOTAL && bad.binary_search(&slot).is_err(), "slot {}", slot);
            prop_assert!(!self.is_discarding(slot), "slot {} is being discarded", slot);
            prop_assert!(!self.others.contains(&(slot / CLUSTER_SLOTS)), "slot {} is another's", slot);
            prop_assert!(self.used.insert(slot), "slot {} was handed out twice", slot);
        }
        Ok(())
    }

    fn is_discarding(&self, slot: u32) -> bool {
        self.discarding.iter().any(|run| (run.0..run.0 + run.1).contains(&slot))
    }

    /// Slots that this process could have.
    fn free(&self, bad: &[u32]) -> usize {
        let usable = |slot: &u32| bad.binary_search(slot).is_err() && !self.is_discarding(*slot);
        let ours = |slot: &u32| !self.others.contains(&(slot / CLUSTER_SLOTS)) && !self.used.contains(slot);
        (1..TOTAL).filter(usable).filter(ours).count()
    }
}

fn run(setting: &Setting, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let holders = holders();
    let slots = slots(setting, holders);
    let other = Leases::new(holders, 2);
    let bad = bad(setting.tiny);
    let mut model = Model::default();
    for op in ops {
        match op {
            Op::Take(cpu, max) => {
                let mut runs = Vec::new();
                let taken = slots.take(cpu, max, |run| runs.push(run));
                prop_assert_eq!(runs.iter().map(|run| run.1).sum::<u32>(), taken);
                prop_assert!(taken <= max && (taken > 0 || model.free(bad) == 0));
                runs.into_iter().try_for_each(|run| model.take(run, bad))?;
            }
            Op::Free(at) => {
                if let Some(&slot) = model.used.iter().nth(at % model.used.len().max(1)) {
                    model.used.remove(&slot);
                    slots.free(at % 7, slot);
                }
            }
            Op::FreeMany(at) => {
                for slot in model.used.iter().copied().skip(at % 7).step_by(2).collect::<Vec<_>>() {
                    model.used.remove(&slot);
                    slots.free(at % 7, slot);
                }
            }
            Op::Discard => {
                let run = slots.take_discard();
                prop_assert!(run.is_none() || setting.discards);
                if let Some((first, count)) = run {
                    prop_assert!((first..first + count).all(|slot| !model.used.contains(&slot)));
                    prop_assert!(first > 0 && first + count <= TOTAL);
                    model.discarding.push((first, count));
                }
            }
            Op::Discarded => model.discarding.pop().into_iter().for_each(|run| slots.discarded(run)),
            Op::LetGo => {
                slots.let_go();
                if setting.policy == SlotPolicy::Clusters && !setting.discards {
                    let is_kept = |number: &u32| slots.leases().holds(*number);
                    let usable = |number: &u32| slots.ground().usable(*number) > 0;
                    let kept: BTreeSet<u32> = (0..CLUSTERS).filter(is_kept).filter(usable).collect();
                    let used = model.used.iter().map(|slot| slot / CLUSTER_SLOTS).collect();
                    prop_assert_eq!(kept, used);
                }
            }
            Op::Tighten => slots.tighten(),
            Op::Other(true) => model.others.extend(other.take(CLUSTERS)),
            Op::Other(false) => model.others.pop().into_iter().for_each(|cluster| other.give_back(cluster)),
        }
        let mut seen = BTreeSet::new();
        slots.check(|slot| assert!(seen.insert(slot)));
        prop_assert_eq!(&seen, &model.used);
        prop_assert_eq!(slots.in_use() as usize, model.used.len());
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_slot_is_handed_out_twice_and_all_are_found(
        policy in prop::sample::select(&SlotPolicy::ALL[..]),
        tiny in prop_oneof![Just(None), (0_u32..6).prop_map(Some)],
        cpus in 1_usize..4,
        discards in any::<bool>(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        run(&Setting { policy, tiny, cpus, discards }, ops)?;
    }
}

fn plain(policy: SlotPolicy) -> Setting {
    Setting { policy, tiny: None, cpus: 1, discards: false }
}

fn take_all(slots: &Slots<'_>) -> Vec<u32> {
    let mut all = Vec::new();
    while slots.take(0, 64, |(first, count)| all.extend(first..first + count)) > 0 {}
    all
}

/// Invariant 7: slots in use are what the clusters count, without the unusable slots. The rest is free.
#[test]
fn invariant_7_counts_of_clusters_add_up_to_slots_in_use() {
    for policy in SlotPolicy::ALL {
        let slots = slots(&plain(policy), holders());
        let usable = TOTAL - 1 - bad(None).len() as u32;
        let taken = take_all(&slots);
        assert_eq!((taken.len() as u32, slots.in_use()), (usable, usable), "{policy:?}");
        taken.iter().step_by(3).for_each(|slot| slots.free(0, *slot));
        let mut seen = 0;
        slots.check(|_| seen += 1);
        assert_eq!((seen, slots.in_use()), (usable - usable.div_ceil(3), seen), "{policy:?}");
        assert_eq!(take_all(&slots).len() as u32, usable - seen, "{policy:?}: free ones are the rest");
    }
}

/// Invariant 9, of which order 0 is left: slots that are handed out as one run lie in one cluster.
#[test]
fn invariant_9_no_run_crosses_a_cluster() {
    for policy in SlotPolicy::ALL {
        let slots = slots(&plain(policy), holders());
        let mut longest = 0;
        let each = |(first, count): Run| {
            assert_eq!(first / CLUSTER_SLOTS, (first + count - 1) / CLUSTER_SLOTS, "{policy:?}");
            longest = longest.max(count);
        };
        slots.take(0, TOTAL, each);
        assert!(longest >= 64, "{policy:?}: runs are long while there is free space");
    }
}

#[test]
fn runs_are_contiguous_while_there_is_room() {
    for policy in SlotPolicy::ALL {
        let slots = slots(&plain(policy), holders());
        // The baselines leave clusters with a bad slot, such as the header's cluster, to the end.
        let first = if policy == SlotPolicy::Clusters { 4 } else { 2 * CLUSTER_SLOTS };
        if policy == SlotPolicy::Clusters {
            assert_eq!(take(&slots, 0, 2), Some((1, 2)));
        }
        assert_eq!(take(&slots, 0, 64), Some((first, 64)), "{policy:?}");
        assert_eq!(take(&slots, 0, 64), Some((first + 64, 64)), "{policy:?}");
    }
}

#[test]
fn empty_clusters_go_back_to_the_others() {
    for policy in SlotPolicy::ALL {
        let holders = holders();
        let slots = slots(&plain(policy), holders);
        take_all(&slots).into_iter().for_each(|slot| slots.free(0, slot));
        let held =
            holders.iter().filter(|holder| holder.load(core::sync::atomic::Ordering::Relaxed) == 1).count();
        // Three of the baselines' clusters have unusable slots and are never empty.
        let kept = if policy == SlotPolicy::Clusters { clusters::EMPTY_KEPT as usize + 1 } else { 5 };
        assert!(held <= kept, "{policy:?}: {held} clusters are still leased");
    }
}

#[test]
fn cpus_work_in_clusters_of_their_own() {
    let slots = slots(&Setting { cpus: 2, ..plain(SlotPolicy::Clusters) }, holders());
    let places: Vec<u32> = (0..8).map(|cpu| take(&slots, cpu, 1).unwrap().0 / CLUSTER_SLOTS).collect();
    assert_eq!(places, [0, 1, 0, 1, 0, 1, 0, 1]);
}

#[test]
fn holes_are_used_last_and_what_was_freed_longest_ago_first() {
    let slots = slots(&plain(SlotPolicy::Clusters), holders());
    let taken = take_all(&slots);
    let free = |slot: u32| slots.free(0, slot);
    // One hole in cluster 3, then one in cluster 0, then half of cluster 2.
    free(3 * CLUSTER_SLOTS + 5);
    free(9);
    (2 * CLUSTER_SLOTS..2 * CLUSTER_SLOTS + 300).for_each(free);
    let mut order = Vec::new();
    slots.take(0, 999, |run| order.push(run));
    assert_eq!(order, [(2 * CLUSTER_SLOTS, 300), (3 * CLUSTER_SLOTS + 5, 1), (9, 1)]);
    assert_eq!(slots.in_use() as usize, taken.len());
}

/// A disk that has blocks for some clusters, and free space for a limited number of clusters.
struct Disk {
    slots: Slots<'static>,
    backed: BTreeSet<u32>,
    clusters_max: usize,
}

impl Disk {
    /// Writes to slots of one cluster, as an area does. Returns whether the disk had free space.
    fn write(&mut self, cpu: usize, written: &mut Vec<u32>) -> bool {
        let (first, count) = take(&self.slots, cpu, 64).unwrap();
        let cluster = first / CLUSTER_SLOTS;
        if self.backed.len() < self.clusters_max {
            self.backed.insert(cluster);
        }
        if self.backed.contains(&cluster) {
            written.extend(first..first + count);
            return true;
        }
        (first..first + count).for_each(|slot| self.slots.free(cpu, slot));
        self.slots.tighten();
        self.slots.let_go();
        false
    }
}

/// Regression: on a full disk, clusters without blocks were offered again and again while there were any.
/// Slots that had become free in other clusters weren't found.
#[test]
fn without_room_every_slot_with_blocks_is_found() {
    for discards in [false, true] {
        let setting = Setting { discards, cpus: 2, ..plain(SlotPolicy::Clusters) };
        let mut disk = Disk { slots: slots(&setting, holders()), backed: BTreeSet::new(), clusters_max: 2 };
        let (mut written, mut refused) = (Vec::new(), 0);
        while refused < 2 {
            refused += usize::from(!disk.write(written.len() / 64 % 2, &mut written));
        }
        let usable: u32 = disk.backed.iter().map(|cluster| disk.slots.ground().usable(*cluster)).sum();
        assert_eq!(written.len() as u32, usable, "all that has blocks");
        // Few slots in each cluster, less than half of it.
        for part in [20, 3] {
            let freed: Vec<u32> = written.iter().copied().step_by(part).collect();
            written.retain(|slot| !freed.contains(slot));
            freed.iter().for_each(|slot| disk.slots.free(0, *slot));
            while (written.len() as u32) < usable {
                assert!(
                    disk.write(written.len() % 2, &mut written),
                    "one in {part}: {} found",
                    written.len()
                );
            }
            assert!(!disk.write(0, &mut written));
        }
        // Holes come first, even with free space again. Once they are used, empty clusters come first as
        // usual.
        disk.clusters_max = 4;
        let freed: Vec<u32> = written.iter().copied().step_by(7).collect();
        written.retain(|slot| !freed.contains(slot));
        freed.iter().for_each(|slot| disk.slots.free(0, *slot));
        while (written.len() as u32) < usable {
            assert!(disk.write(0, &mut written) && disk.backed.len() == 2, "holes first");
        }
        assert!(disk.write(0, &mut written) && disk.backed.len() == 3);
        written.drain(..200).for_each(|slot| disk.slots.free(0, slot));
        let mut later = Vec::new();
        while disk.backed.len() < 4 {
            assert!(disk.write(0, &mut later));
        }
        assert!(later.iter().all(|slot| slot / CLUSTER_SLOTS > 1), "holes last, while there is free space");
    }
}

#[test]
fn empty_cluster_is_discarded_before_it_is_used_again() {
    let setting = Setting { discards: true, ..plain(SlotPolicy::Clusters) };
    let slots = slots(&setting, holders());
    let taken = take_all(&slots);
    assert_eq!(slots.take_discard(), None);
    taken.iter().filter(|slot| **slot / CLUSTER_SLOTS == 2).for_each(|slot| slots.free(0, *slot));
    let run = slots.take_discard();
    assert_eq!(run, Some((2 * CLUSTER_SLOTS, CLUSTER_SLOTS)));
    assert_eq!((slots.take_discard(), take(&slots, 0, 1)), (None, None));
    slots.discarded(run.unwrap());
    assert_eq!(take(&slots, 0, 8), Some((2 * CLUSTER_SLOTS, 8)));
}

#[test]
fn slot_freed_twice_is_a_bug() {
    for policy in SlotPolicy::ALL {
        let twice = std::panic::catch_unwind(|| {
            let slots = slots(&plain(policy), holders());
            let (slot, _) = take(&slots, 0, 1).unwrap();
            slots.free(0, slot);
            slots.free(0, slot);
        });
        assert!(twice.is_err(), "{policy:?}");
    }
}

/// Eight threads take slots of their own. A word for each slot says whether a thread has it.
#[test]
fn threads_never_get_the_same_slot() {
    for policy in SlotPolicy::ALL {
        let slots = slots(&Setting { cpus: 3, ..plain(policy) }, holders());
        let owners: Vec<AtomicU32> = (0..TOTAL).map(|_| AtomicU32::new(0)).collect();
        let order = core::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            for cpu in 0..8 {
                let (slots, owners) = (&slots, &owners);
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for round in 0..300_usize {
                        slots.take(cpu, 40, |(first, count)| {
                            for slot in first..first + count {
                                assert_eq!(
                                    owners[slot as usize].swap(1, order),
                                    0,
                                    "{policy:?}: slot {slot}"
                                );
                                mine.push(slot);
                            }
                        });
                        while mine.len() > 180 {
                            let slot = mine.swap_remove(round * 7919 % mine.len());
                            owners[slot as usize].store(0, order);
                            slots.free(cpu, slot);
                        }
                    }
                });
            }
        });
        let used = owners.iter().filter(|owner| owner.load(order) == 1).count();
        let mut seen = 0;
        slots.check(|_| seen += 1);
        assert_eq!((seen, slots.in_use() as usize), (used, used), "{policy:?}");
    }
}
