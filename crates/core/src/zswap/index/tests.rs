//! Compares the index with an ordered map, at its limits and under several threads. Five tests look for the
//! defects of the B-tree that was once proposed for zswap, none of which may be found here.

use super::*;
use crate::units::{PAGE_BYTES, PageIndex};
use crate::zswap::pool::{BlockMeta, ObjectMeta, Pool, PoolLayout, PoolMemory};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::thread;

/// Two areas, of 3 and 2 clusters.
const SLOTS: [u32; 2] = [2 * CLUSTER_SLOTS + 100, CLUSTER_SLOTS + 1];

fn index(slots: &[u32], leaves: usize) -> Index<'static> {
    let layout = IndexLayout::new(slots, leaves);
    let atomics = |count: usize| &*Vec::leak((0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    Index::new(
        &layout,
        IndexMemory {
            directory: atomics(layout.clusters()),
            tallies: atomics(layout.leaves),
            clusters: vec![0; layout.leaves].leak(),
            words: atomics(layout.leaf_words()),
        },
    )
}

fn key(area: u8, offset: u32) -> SlotIndex {
    SlotIndex::new(AreaId(area), offset)
}

fn handle(raw: u32) -> ObjectHandle {
    ObjectHandle::from_raw(raw).unwrap()
}

fn loaded(index: &Index, key: SlotIndex) -> Option<u32> {
    index.load(key).map(|entry| entry.handle().raw())
}

// ---- the five defects ----

/// Defect 1: a reader had the old entry, and the key got a new one. The reader then let go of its entry,
/// which erased whatever stood at the key. The new entry stood there: a page was lost, and its object leaked.
#[test]
fn defect_1_erasing_an_entry_that_was_replaced_leaves_the_new_one() {
    let index = index(&SLOTS, 5);
    index.store(key(0, 7), handle(1)).unwrap();
    let reader = index.load(key(0, 7)).unwrap();
    assert_eq!(index.store(key(0, 7), handle(2)), Ok(Some(handle(1))));
    assert!(!index.erase(key(0, 7), reader));
    assert_eq!(loaded(&index, key(0, 7)), Some(2));
    // The same if the freed object's handle is given out again, for the same key.
    assert_eq!(index.store(key(0, 7), handle(1)), Ok(Some(handle(2))));
    assert!(!index.erase(key(0, 7), reader));
    assert_eq!((loaded(&index, key(0, 7)), index.len()), (Some(1), 1));
    index.check();
}

/// Defect 2: replacing and invalidating removed the key, then dropped the entry. The drop removed the key
/// once more, and with it whatever had been stored in between.
#[test]
fn defect_2_what_was_removed_once_is_not_removed_again() {
    let index = index(&SLOTS, 5);
    index.store(key(0, 7), handle(1)).unwrap();
    let reader = index.load(key(0, 7)).unwrap();
    assert_eq!(index.remove(key(0, 7)), Some(handle(1)));
    assert_eq!(index.store(key(0, 7), handle(1)), Ok(None));
    assert!(!index.erase(key(0, 7), reader));
    assert_eq!(index.remove(key(0, 7)), Some(handle(1)));
    assert!(!index.erase(key(0, 7), reader));
    assert_eq!((index.remove(key(0, 7)), index.len()), (None, 0));
    index.check();
}

/// Defect 3: invalidating an area freed its entries and the root, but no other node.
#[test]
fn defect_3_removing_an_area_gives_all_of_its_memory_back() {
    let index = index(&SLOTS, 3);
    for round in 0..4_u32 {
        let offsets = || (1..SLOTS[0]).step_by(37);
        offsets()
            .for_each(|offset| assert_eq!(index.store(key(0, offset), handle(offset + round)), Ok(None)));
        assert_eq!(index.store(key(1, 1), handle(1)), Err(Full));
        let mut removed = BTreeMap::new();
        index.remove_area(AreaId(0), |key, handle| assert!(removed.insert(key, handle).is_none()));
        assert!(removed.into_iter().eq(offsets().map(|offset| (key(0, offset), handle(offset + round)))));
        assert!(index.is_empty());
        index.check();
        // Another area can have all of the memory.
        (0..2).for_each(|cluster| {
            assert_eq!(index.store(key(1, cluster * CLUSTER_SLOTS), handle(9)), Ok(None));
        });
        index.remove_area(AreaId(1), |_, _| {});
    }
}

/// Defect 4: a store that failed had taken the old entry out, as it must. But the number of stored pages
/// still counted the old entry.
#[test]
fn defect_4_a_failed_store_leaves_no_older_copy_and_the_right_count() {
    let index = index(&SLOTS, 1);
    index.store(key(0, 7), handle(1)).unwrap();
    // No leaf is left for this entry. The key had no entry before.
    assert_eq!(index.store(key(1, 7), handle(2)), Err(Full));
    assert_eq!((loaded(&index, key(1, 7)), index.len()), (None, 1));
    // The pool has no free space for the new bytes of a key that has old ones.
    assert_eq!((index.remove(key(0, 7)), index.len()), (Some(handle(1)), 0));
    assert_eq!((loaded(&index, key(0, 7)), index.remove(key(0, 7))), (None, None));
    index.check();
}

/// Defect 5: making an entry could need memory, under the lock and after the old entry was gone.
#[test]
fn defect_5_storing_needs_no_memory_where_there_is_an_entry_and_says_full_before_anything_changes() {
    let index = index(&SLOTS, 2);
    index.store(key(0, 7), handle(1)).unwrap();
    index.store(key(1, 7), handle(2)).unwrap();
    for raw in 3..100 {
        assert_eq!(index.store(key(0, CLUSTER_SLOTS + raw), handle(raw)), Err(Full));
        assert!(index.store(key(0, 7), handle(raw)).unwrap().is_some());
        assert_eq!(index.store(key(0, 7 + raw), handle(raw)), Ok(None));
    }
    assert_eq!(loaded(&index, key(1, 7)), Some(2));
    assert_eq!(index.len(), 2 + 97);
    index.check();
}

// ---- invariants of the whole ----

/// zswap in little: an index, a pool of two pages, and a store that may fail.
struct Zswap {
    index: Index<'static>,
    pool: Pool<'static>,
}

impl Zswap {
    fn new() -> Zswap {
        let layout = PoolLayout::for_limit(2 * PAGE_BYTES);
        // A page more, so that the data can begin at a page's start.
        let data = vec![0; layout.data_bytes + PAGE_BYTES].leak();
        let start = data.as_ptr().align_offset(PAGE_BYTES);
        let memory = PoolMemory {
            data: &mut data[start..],
            objects: Vec::leak((0..layout.objects).map(|_| ObjectMeta::UNUSED).collect()),
            blocks: Vec::leak((0..layout.blocks).map(|_| BlockMeta::UNUSED).collect()),
        };
        Zswap { index: index(&SLOTS, 1), pool: Pool::new(&layout, memory, 100) }
    }

    /// Stores or fails. Either way no older copy is left.
    fn store(&self, key: SlotIndex, bytes: &[u8]) -> bool {
        let stored = self.pool.store(PageIndex(key.raw().into()), bytes);
        let (old, is_stored) = match stored.map(|new| (new, self.index.store(key, new))) {
            Ok((_, Ok(old))) => (old, true),
            Ok((new, Err(Full))) => (Some(new), false),
            Err(_) => (self.index.remove(key), false),
        };
        old.into_iter().for_each(|old| _ = self.pool.free(old));
        is_stored
    }

    fn load(&self, key: SlotIndex) -> Option<u8> {
        let entry = self.index.load(key)?;
        Some(self.pool.read(entry.handle(), |bytes| bytes[0]))
    }
}

/// Invariant 2: after a failed store there is no older copy, whether the pool refused or the index.
#[test]
fn invariant_2_failed_store_leaves_no_older_copy_of_the_slot() {
    let zswap = Zswap::new();
    assert!(zswap.store(key(0, 1), &[1; 4096]) && zswap.store(key(0, 2), &[2; 4096]));
    assert_eq!(zswap.load(key(0, 1)), Some(1));
    assert!(!zswap.store(key(0, 1), &[3; 4096]), "the pool has two pages");
    assert_eq!((zswap.load(key(0, 1)), zswap.index.len(), zswap.pool.usage().objects), (None, 1, 1));
    assert!(!zswap.store(key(1, 1), &[4; 100]), "the index has one leaf");
    assert_eq!((zswap.load(key(1, 1)), zswap.index.len(), zswap.pool.usage().objects), (None, 1, 1));
    assert_eq!(zswap.load(key(0, 2)), Some(2));
}

/// Invariant 5: a thread that writes an object back looks the entry up, reads the object, and then erases
/// exactly that entry. If the slot was stored anew meanwhile, the bytes that were read are old and must not
/// go on.
#[test]
fn invariant_5_write_back_of_an_entry_that_was_replaced_meanwhile_is_refused() {
    let zswap = Zswap::new();
    zswap.store(key(0, 1), &[1; 100]);
    let (oldest, owner) = zswap.pool.first_to_go().unwrap();
    let entry = zswap.index.load(SlotIndex::from_raw(owner.0 as u32)).unwrap();
    assert_eq!(entry.handle(), oldest);
    // Frees the object. Its handle is the next to be given out, and for the same key at that.
    assert_eq!(zswap.index.remove(key(0, 1)), Some(oldest));
    zswap.pool.free(oldest);
    zswap.store(key(0, 1), &[2; 100]);
    assert_eq!(zswap.index.load(key(0, 1)).unwrap().handle(), oldest);
    assert!(!zswap.index.erase(key(0, 1), entry));
    assert_eq!(zswap.load(key(0, 1)), Some(2));
}

// ---- limits ----

#[test]
fn last_slot_of_each_area_has_an_entry_and_beyond_it_panics() {
    let index = index(&SLOTS, 5);
    for (area, raw) in [(0, 1), (1, 2)] {
        index.store(key(area, SLOTS[area as usize] - 1), handle(raw)).unwrap();
    }
    assert_eq!(
        (loaded(&index, key(0, SLOTS[0] - 1)), loaded(&index, key(1, SLOTS[1] - 1))),
        (Some(1), Some(2))
    );
    assert_eq!(loaded(&index, key(1, 0)), None);
}

#[test]
#[should_panic(expected = "beyond the end")]
fn key_beyond_its_area_panics() {
    index(&SLOTS, 5).load(key(0, 3 * CLUSTER_SLOTS));
}

#[test]
fn index_without_leaves_is_full_and_empty() {
    let index = index(&SLOTS, 0);
    assert_eq!(index.store(key(0, 1), handle(1)), Err(Full));
    assert_eq!((loaded(&index, key(0, 1)), index.remove(key(0, 1)), index.len()), (None, None, 0));
}

// ---- against a model ----

#[derive(Clone, Debug)]
enum Op {
    Store(SlotIndex, u32),
    /// Loads an entry, to be erased some time later.
    Load(SlotIndex),
    Erase(prop::sample::Index),
    Remove(SlotIndex),
    RemoveArea(u8),
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few keys of each cluster, so that operations meet.
    let key = (0..2_u8, 0..3_u32, 0..3_u32).prop_map(|(area, cluster, at)| {
        key(area, (cluster % (3 - u32::from(area))) * CLUSTER_SLOTS + at * 30)
    });
    prop_oneof![
        6 => (key.clone(), 1..20_u32).prop_map(|(key, raw)| Op::Store(key, raw)),
        3 => key.clone().prop_map(Op::Load),
        3 => any::<prop::sample::Index>().prop_map(Op::Erase),
        3 => key.prop_map(Op::Remove),
        1 => (0..2_u8).prop_map(Op::RemoveArea),
    ]
}

proptest! {
    /// The model: an ordered map from keys to handles and the number of the store that each came from.
    #[test]
    fn index_says_what_the_map_says(leaves in 0..6_usize, ops in prop::collection::vec(any_op(), 1..120)) {
        let index = index(&SLOTS, leaves);
        let mut model: BTreeMap<SlotIndex, (u32, usize)> = BTreeMap::new();
        let mut loads = Vec::new();
        for (step, op) in ops.into_iter().enumerate() {
            match op {
                Op::Store(key, raw) => {
                    let clusters: BTreeSet<_> = model.keys().map(|key| key.raw() / CLUSTER_SLOTS).collect();
                    let fits = clusters.contains(&(key.raw() / CLUSTER_SLOTS)) || clusters.len() < leaves;
                    let stored = index.store(key, handle(raw));
                    prop_assert_eq!(stored.is_ok(), fits);
                    if let Ok(old) = stored {
                        let before = model.insert(key, (raw, step));
                        prop_assert_eq!(old.map(ObjectHandle::raw), before.map(|(raw, _)| raw));
                    }
                }
                Op::Load(key) => if let Some(entry) = index.load(key) { loads.push((key, entry, model[&key])) },
                Op::Erase(which) => if !loads.is_empty() {
                    let (key, entry, was) = loads.swap_remove(which.index(loads.len()));
                    let is_same = model.get(&key) == Some(&was);
                    prop_assert_eq!(index.erase(key, entry), is_same);
                    if is_same { model.remove(&key); }
                },
                Op::Remove(key) => {
                    let before = model.remove(&key);
                    prop_assert_eq!(index.remove(key).map(ObjectHandle::raw), before.map(|(raw, _)| raw));
                }
                Op::RemoveArea(area) => {
                    let mut removed = Vec::new();
                    index.remove_area(AreaId(area), |key, handle| removed.push((key, handle.raw())));
                    let expected = model.iter().filter(|(key, _)| key.area().0 == area);
                    prop_assert!(expected.map(|(key, (raw, _))| (*key, *raw)).eq(removed));
                    model.retain(|key, _| key.area().0 != area);
                }
            }
            index.check();
            prop_assert_eq!(index.len(), model.len());
            for cluster in 0..5_u32 {
                let (area, cluster) = if cluster < 3 { (0, cluster) } else { (1, cluster - 3) };
                for at in 0..3 {
                    let key = key(area, cluster * CLUSTER_SLOTS + at * 30);
                    prop_assert_eq!(loaded(&index, key), model.get(&key).map(|(raw, _)| *raw));
                }
            }
        }
    }
}

// ---- several threads ----

/// A thread that gets a handle out of the index owns it alone: each handle that went in comes out exactly
/// once. Six clusters take turns with two leaves, so leaves go round all the time.
#[test]
fn every_handle_comes_out_exactly_once_and_never_for_another_key() {
    const THREADS: u32 = 4;
    const STEPS: u32 = 30_000;
    let index = index(&[6 * CLUSTER_SLOTS], 2);
    // By handle: 1 + the key it was stored for; 0 while nobody has stored the handle.
    let owners: Vec<AtomicU32> = (0..=THREADS * STEPS).map(|_| AtomicU32::new(0)).collect();
    let full = AtomicUsize::new(0);
    let take_out = |handle: ObjectHandle, key: SlotIndex| {
        let before = owners[handle.raw() as usize].swap(0, Ordering::Relaxed);
        assert_eq!(before, key.raw() + 1, "a handle came out twice, or for another key");
    };
    let work = |thread: u32| {
        let mut random = u64::from(thread) * 0x9e37_79b9 + 1;
        for step in 0..STEPS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = (random >> 33) as u32;
            // Most clusters are empty most of the time.
            let key = key(0, (draw % 6) * CLUSTER_SLOTS + (draw >> 8) % 2);
            let new = handle(1 + thread * STEPS + step);
            match draw >> 16 & 3 {
                0 => {
                    owners[new.raw() as usize].store(key.raw() + 1, Ordering::Relaxed);
                    match index.store(key, new) {
                        Ok(old) => old.into_iter().for_each(|old| take_out(old, key)),
                        Err(Full) => {
                            full.fetch_add(1, Ordering::Relaxed);
                            take_out(new, key);
                        }
                    }
                }
                1 => {
                    if let Some(entry) = index.load(key)
                        && index.erase(key, entry)
                    {
                        take_out(entry.handle(), key);
                    }
                }
                _ => index.remove(key).into_iter().for_each(|old| take_out(old, key)),
            }
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    index.check();
    index.remove_area(AreaId(0), |key, handle| take_out(handle, key));
    assert!(owners.iter().all(|owner| owner.load(Ordering::Relaxed) == 0), "a handle never came out");
    println!("full {} times", full.into_inner());
}
