//! The index against an ordered map of keys to handles. Each handle has the number of its store.

use crate::{Input, Memory};
use farpage_core::units::{AreaId, CLUSTER_SLOTS, SlotIndex};
use farpage_core::zswap::index::{Entry, Full, Index, IndexLayout, IndexMemory};
use farpage_core::zswap::pool::ObjectHandle;
use std::collections::{BTreeMap, BTreeSet};

/// Slots of two areas, with 3 and 2 clusters.
const SLOTS: [u32; 2] = [2 * CLUSTER_SLOTS + 100, CLUSTER_SLOTS + 1];
/// Loaded entries that may be erased later, at most.
const LOADS_MAX: usize = 32;

fn any_key(input: &mut Input) -> SlotIndex {
    let area = input.below(2) as u8;
    let offset = input.below(8) as u32 * 131 % SLOTS[area as usize];
    SlotIndex::new(AreaId(area), offset)
}

fn any_handle(input: &mut Input) -> ObjectHandle {
    ObjectHandle::from_raw(input.below(20) as u32 + 1).expect("not 0")
}

/// Stores, loads, erases and removes entries.
pub fn run(input: &mut Input) {
    let off = input.byte();
    let leaves = input.below(6);
    let layout = IndexLayout::new(&SLOTS, leaves);
    let mut memory = Memory::new(layout.bytes());
    let index = Index::new(&layout, IndexMemory::carve(&mut memory.region(), &layout));
    let mut model: BTreeMap<SlotIndex, (ObjectHandle, u32)> = BTreeMap::new();
    let mut loads: Vec<(SlotIndex, Entry, (ObjectHandle, u32))> = Vec::new();
    let mut stores = 0;
    while !input.is_over() {
        match input.kind(5, off) {
            Some(0) => {
                let (key, handle) = (any_key(input), any_handle(input));
                let clusters: BTreeSet<u32> = model.keys().map(|key| key.raw() / CLUSTER_SLOTS).collect();
                let fits = clusters.contains(&(key.raw() / CLUSTER_SLOTS)) || clusters.len() < leaves;
                let before = if fits { model.insert(key, (handle, stores)) } else { None };
                let expected = if fits { Ok(before.map(|(handle, _)| handle)) } else { Err(Full) };
                assert_eq!(index.store(key, handle), expected);
                stores += 1;
            }
            Some(1) => {
                let key = any_key(input);
                if let Some(entry) = index.load(key).filter(|_| loads.len() < LOADS_MAX) {
                    loads.push((key, entry, model[&key]));
                }
            }
            Some(2) if !loads.is_empty() => {
                let (key, entry, was) = loads.swap_remove(input.below(loads.len()));
                let is_same = model.get(&key) == Some(&was);
                assert_eq!(index.erase(key, entry), is_same);
                if is_same {
                    model.remove(&key);
                }
            }
            Some(3) => {
                let key = any_key(input);
                assert_eq!(index.remove(key), model.remove(&key).map(|(handle, _)| handle));
            }
            Some(4) if input.byte() < 32 => {
                let area = AreaId(input.below(2) as u8);
                let mut removed = Vec::new();
                index.remove_area(area, |key, handle| removed.push((key, handle)));
                let expected = model.iter().filter(|(key, _)| key.area() == area);
                assert!(expected.map(|(key, (handle, _))| (*key, *handle)).eq(removed));
                model.retain(|key, _| key.area() != area);
            }
            _ => {}
        }
        assert_eq!(index.len(), model.len());
        for (key, (handle, _)) in &model {
            assert_eq!(index.load(*key).map(Entry::handle), Some(*handle));
        }
    }
    index.check();
}
