//! The pool against the simplest thing that could work, compared after each step.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use proptest::sample::Index;

use super::super::*;
use super::{Memory, bytes_of, load};

#[derive(Clone, Debug)]
enum Op {
    Store { owner: u64, length: usize },
    Free(Index),
    FreeFirst,
    Load(Index),
    Rotate { which: Index, right_owner: bool },
    Rename { which: Index, owner: u64 },
    Keep { which: Index, is_kept: bool },
    Densify { is_old: bool, length: Option<usize> },
    Turn,
    Compact(usize),
    TakeReleased,
    Released(Index),
    SetLimit(usize),
}

impl Op {
    /// Returns the bit of the mask that switches operations of this kind off.
    fn kind(&self) -> u32 {
        match self {
            Op::Store { .. } | Op::Load(_) => 0,
            Op::Free(_) => 1,
            Op::FreeFirst => 2,
            Op::Rotate { .. } => 3,
            Op::Rename { .. } => 4,
            Op::Compact(_) => 5,
            Op::TakeReleased => 6,
            Op::Released(_) => 7,
            Op::SetLimit(_) => 8,
            Op::Keep { .. } => 9,
            Op::Densify { .. } => 10,
            Op::Turn => 11,
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few sizes, so that classes fill up and blocks hold several objects. Any size at times.
    let length =
        prop_oneof![4 => 1..120_usize, 3 => Just(700_usize), 2 => 1..=4096_usize, 1 => Just(4096_usize)];
    prop_oneof![
        12 => (0..50_u64, length).prop_map(|(owner, length)| Op::Store { owner, length }),
        5 => any::<Index>().prop_map(Op::Free),
        2 => Just(Op::FreeFirst),
        1 => any::<Index>().prop_map(Op::Load),
        1 => (any::<Index>(), any::<bool>()).prop_map(|(which, right_owner)| Op::Rotate { which, right_owner }),
        1 => (any::<Index>(), 0..50_u64).prop_map(|(which, owner)| Op::Rename { which, owner }),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(which, is_kept)| Op::Keep { which, is_kept }),
        2 => (any::<bool>(), proptest::option::of(1..100_usize))
            .prop_map(|(is_old, length)| Op::Densify { is_old, length }),
        1 => Just(Op::Turn),
        2 => (0..20_usize).prop_map(Op::Compact),
        2 => Just(Op::TakeReleased),
        2 => any::<Index>().prop_map(Op::Released),
        1 => (0..80_usize << 10).prop_map(Op::SetLimit),
    ]
}

/// The pool as it should look from outside: the simplest thing that could work.
struct Model {
    live: HashMap<u32, (u64, Vec<u8>)>,
    /// Handles, the oldest first.
    by_age: Vec<u32>,
    /// Handles of objects that are kept.
    kept: HashSet<u32>,
    /// Handles of objects that won't become any shorter.
    dense: HashSet<u32>,
    /// Turns since the object became the youngest of its kind.
    age: HashMap<u32, u32>,
    /// How many objects had been made before this one, before the object that it replaced, or when it was
    /// last in use.
    born: HashMap<u32, u64>,
    made: u64,
    was_full: bool,
    accept_percent: u64,
    limit: usize,
    /// Whether a part of the limit is for objects that become denser.
    reserves: bool,
    /// Whether the limit was ever lowered. If not, block memory must stay within the limit.
    limit_was_lowered: bool,
    objects_max: usize,
    block_bytes: usize,
    data_bytes: usize,
    releasing: Vec<Range<usize>>,
    stores: u64,
}

impl Model {
    /// Returns the handles in the order in which they should go, and the handles of objects that are kept.
    fn order(&self) -> (Vec<u32>, Vec<u32>) {
        let (kept, others): (Vec<u32>, Vec<u32>) =
            self.by_age.iter().partition(|raw| self.kept.contains(raw));
        let (whole, compressed): (Vec<u32>, Vec<u32>) =
            others.iter().partition(|raw| self.live[raw].1.len() == PAGE_BYTES);
        let (dense, compressed): (Vec<u32>, Vec<u32>) =
            compressed.iter().partition(|raw| self.dense.contains(raw));
        ([whole, dense, compressed].concat(), kept)
    }

    /// Returns the object to make denser next.
    fn to_densify(&self, is_old: bool) -> Option<(u32, u64)> {
        let (order, _) = self.order();
        let is_it = |raw: &&u32| self.live[raw].1.len() < PAGE_BYTES && !self.dense.contains(raw);
        let first = order.iter().find(is_it).filter(|raw| !is_old || self.age[raw] >= 2)?;
        Some((*first, self.live[first].0))
    }

    fn densify(&mut self, pool: &Pool, is_old: bool, length: Option<usize>) {
        let Some((handle, owner)) = pool.first_to_densify(is_old) else { return };
        let Some(length) = length else {
            pool.leave_as_it_is(handle);
            self.dense.insert(handle.raw());
            let born = self.born[&handle.raw()];
            self.make_youngest(handle);
            self.born.insert(handle.raw(), born);
            return;
        };
        self.stores += 1;
        let (bytes, before) = (bytes_of(self.stores, length), pool.usage());
        match pool.replace(handle, &bytes) {
            Ok(denser) => {
                self.forget(handle);
                self.begin(denser, owner.0, bytes);
                self.born.insert(denser.raw(), self.born[&handle.raw()]);
                self.dense.insert(denser.raw());
            }
            Err(StoreError::NoHandle) => assert_eq!(before.objects, self.objects_max),
            Err(StoreError::Full) => {
                assert!(before.bytes >= self.limit, "{before:?}");
                assert_eq!(pool.usage(), before, "a refused store changed something");
            }
        }
    }

    fn make_youngest(&mut self, handle: ObjectHandle) {
        self.by_age.retain(|&other| other != handle.raw());
        self.by_age.push(handle.raw());
        self.age.insert(handle.raw(), 0);
        self.born.insert(handle.raw(), self.made);
    }

    fn begin(&mut self, handle: ObjectHandle, owner: u64, bytes: Vec<u8>) {
        assert!(handle.raw() >> HANDLE_BITS == 0);
        assert!(self.live.insert(handle.raw(), (owner, bytes)).is_none(), "{handle:?} twice");
        self.make_youngest(handle);
        self.made += 1;
    }

    /// Returns whether more objects were made since this one than three quarters of those made since the
    /// oldest that compresses.
    fn is_old(&self, raw: u32) -> bool {
        let compresses = |raw: &&u32| self.live[*raw].1.len() < PAGE_BYTES;
        let (order, _) = self.order();
        let (dense, others): (Vec<u32>, Vec<u32>) =
            order.iter().filter(compresses).partition(|raw| self.dense.contains(raw));
        let firsts = [dense.first(), others.first()].into_iter().flatten();
        let oldest = firsts.map(|first| self.made - self.born[first]).max();
        oldest.is_some_and(|oldest| (self.made - self.born[&raw]) * 4 > oldest * 3)
    }

    fn pick(&self, which: &Index) -> Option<ObjectHandle> {
        let raw = (!self.by_age.is_empty()).then(|| self.by_age[which.index(self.by_age.len())])?;
        ObjectHandle::from_raw(raw)
    }

    fn forget(&mut self, handle: ObjectHandle) {
        self.live.remove(&handle.raw()).unwrap();
        self.kept.remove(&handle.raw());
        self.dense.remove(&handle.raw());
        self.by_age.retain(|&other| other != handle.raw());
    }

    fn is_over(&self, usage: &PoolUsage) -> bool {
        usage.bytes_occupied as u64 * 100 > self.limit as u64 * self.accept_percent
            || usage.objects as u64 * 100 > self.objects_max as u64 * self.accept_percent
    }

    fn apply(&mut self, pool: &Pool, op: Op) {
        match op {
            Op::Store { owner, length } => self.store(pool, owner, length),
            Op::Free(which) => {
                if let Some(handle) = self.pick(&which) {
                    pool.free(handle);
                    self.forget(handle);
                }
            }
            Op::FreeFirst => {
                if let Some((handle, _)) = pool.first_to_go() {
                    pool.free(handle);
                    self.forget(handle);
                }
            }
            Op::Load(which) => {
                if let Some(handle) = self.pick(&which) {
                    assert_eq!(load(pool, handle), self.live[&handle.raw()].1);
                }
            }
            Op::Rotate { which, right_owner } => {
                if let Some(handle) = self.pick(&which) {
                    let owner = self.live[&handle.raw()].0;
                    pool.rotate(handle, PageIndex(if right_owner { owner } else { owner + 1 }));
                    if right_owner {
                        self.make_youngest(handle);
                    }
                }
            }
            Op::Rename { which, owner } => {
                if let Some(handle) = self.pick(&which) {
                    pool.rename(handle, PageIndex(owner));
                    self.live.get_mut(&handle.raw()).unwrap().0 = owner;
                }
            }
            Op::Keep { which, is_kept } => {
                if let Some(handle) = self.pick(&which) {
                    if is_kept {
                        pool.keep(handle);
                        self.kept.insert(handle.raw());
                    } else {
                        pool.stow(handle);
                        self.kept.remove(&handle.raw());
                    }
                    self.dense.remove(&handle.raw());
                    self.make_youngest(handle);
                }
            }
            Op::Densify { is_old, length } => self.densify(pool, is_old, length),
            Op::Turn => {
                pool.turn();
                self.age.values_mut().for_each(|age| *age += 1);
            }
            Op::Compact(moves_max) => {
                let before = pool.usage();
                assert!(pool.compact(moves_max) <= moves_max);
                let after = pool.usage();
                assert!(after.bytes_occupied <= before.bytes_occupied && after.bytes == before.bytes);
            }
            Op::TakeReleased => {
                if let Some(range) = pool.take_released() {
                    assert_eq!(range.len(), self.block_bytes);
                    pool.state.lock().blocks.scribble(range.clone(), 0xdb);
                    self.releasing.push(range);
                }
            }
            Op::Released(which) => {
                if !self.releasing.is_empty() {
                    let range = self.releasing.swap_remove(which.index(self.releasing.len()));
                    let before = pool.usage().bytes;
                    pool.released(range);
                    assert_eq!(pool.usage().bytes, before - self.block_bytes);
                }
            }
            Op::SetLimit(bytes_max) => {
                pool.set_limit(bytes_max);
                let limit = bytes_max.min(self.data_bytes) / self.block_bytes * self.block_bytes;
                self.limit_was_lowered |= limit < self.limit;
                self.limit = limit;
            }
        }
    }

    /// Returns the limit less the reserve for objects that become denser.
    fn limit_of_stores(&self) -> usize {
        let blocks = self.limit / self.block_bytes;
        (blocks - if self.reserves { blocks / 32 } else { 0 }) * self.block_bytes
    }

    fn store(&mut self, pool: &Pool, owner: u64, length: usize) {
        self.stores += 1;
        let bytes = bytes_of(self.stores, length);
        let before = pool.usage();
        match pool.store(PageIndex(owner), &bytes) {
            Ok(handle) => {
                let after = pool.usage().bytes_occupied;
                assert!(
                    after == before.bytes_occupied || after <= self.limit_of_stores(),
                    "a block over the limit"
                );
                assert!(before.objects < self.objects_max);
                self.begin(handle, owner, bytes);
            }
            Err(error) => {
                self.was_full = true;
                assert_eq!(pool.usage(), before, "a refused store changed something");
                match error {
                    StoreError::NoHandle => assert_eq!(before.objects, self.objects_max),
                    StoreError::Full => assert!(before.bytes >= self.limit_of_stores(), "{before:?}"),
                }
            }
        }
    }

    fn compare(&mut self, pool: &Pool) {
        let mut seen = Vec::new();
        pool.check(&mut |handle, owner, length| seen.push((handle.raw(), owner.0, length)));
        let expected = |raw: &u32| (*raw, self.live[raw].0, self.live[raw].1.len());
        let (order, kept) = self.order();
        assert_eq!(seen, order.iter().chain(&kept).map(expected).collect::<Vec<_>>());
        for (&raw, (owner, bytes)) in &self.live {
            let handle = ObjectHandle::from_raw(raw).unwrap();
            assert_eq!(pool.owner(handle), Some(PageIndex(*owner)));
            assert_eq!(pool.is_old(handle), self.is_old(raw), "object {raw}");
            assert_eq!(&load(pool, handle), bytes);
        }
        let gone = (1..=self.objects_max as u32).find(|raw| !self.live.contains_key(raw));
        assert_eq!(gone.and_then(|raw| pool.owner(ObjectHandle::from_raw(raw).unwrap())), None);
        let first = |of: &[u32]| of.first().map(|raw| (*raw, self.live[raw].0));
        let named = |(handle, owner): (ObjectHandle, PageIndex)| (handle.raw(), owner.0);
        assert_eq!(pool.first_to_go().map(named), first(&order));
        for is_old in [false, true] {
            assert_eq!(pool.first_to_densify(is_old).map(named), self.to_densify(is_old));
        }
        assert_eq!((pool.first_kept().map(named), pool.kept() as usize), (first(&kept), kept.len()));

        let usage = pool.usage();
        assert_eq!(usage.objects, self.live.len());
        assert_eq!(usage.payload_bytes, self.live.values().map(|(_, bytes)| bytes.len()).sum::<usize>());
        assert!(usage.payload_bytes <= usage.bytes_occupied && usage.bytes_occupied <= usage.bytes);
        assert!(usage.bytes <= self.data_bytes && usage.bytes.is_multiple_of(self.block_bytes));
        assert!(self.limit_was_lowered || usage.bytes <= self.limit);
        let over = self.is_over(&usage);
        assert_eq!(pool.over_accept_threshold(), over);
        let is_whole = |raw: &&u32| self.live[*raw].1.len() == PAGE_BYTES && !self.kept.contains(*raw);
        let whole = self.by_age.iter().filter(is_whole).count() * PAGE_BYTES;
        for part in [1, 4, 16] {
            let many = whole * part as usize > self.limit;
            assert_eq!(pool.has_many_whole(part), many, "{whole} bytes");
            assert_eq!(pool.is_too_full(Some(part)), over || many, "{whole} bytes");
        }
        self.was_full &= over;
        assert_eq!(pool.accepts(), !self.was_full && self.limit != 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pool_does_what_the_model_does(
        (block_bytes, bytes_max) in prop_oneof![
            (Just(4096_usize), 0..80_usize << 10),
            // Enough for a reserve of one or two blocks.
            (Just(4096_usize), 130_usize << 10..300 << 10),
            (Just(8192_usize), 0..80_usize << 10),
            (Just(65536_usize), 0..400_usize << 10),
        ],
        accept_percent in 0..=100_u32,
        reserves in any::<bool>(),
        switched_off in any::<u32>(),
        all_on in any::<bool>(),
        ops in prop::collection::vec(any_op(), 1..250),
    ) {
        let layout = PoolLayout::with_blocks_of(block_bytes, bytes_max);
        let mut memory = Memory::new(layout);
        let pool = memory.pool(accept_percent);
        let reserves = reserves && accept_percent < 96;
        if reserves {
            pool.keep_reserve();
        }
        let mut model = Model {
            live: HashMap::new(),
            by_age: Vec::new(),
            kept: HashSet::new(),
            dense: HashSet::new(),
            age: HashMap::new(),
            born: HashMap::new(),
            made: 0,
            was_full: false,
            accept_percent: u64::from(accept_percent),
            limit: layout.data_bytes,
            reserves,
            limit_was_lowered: false,
            objects_max: layout.objects - 1,
            block_bytes,
            data_bytes: layout.data_bytes,
            releasing: Vec::new(),
            stores: 0,
        };
        // Stores and loads are never off.
        let switched_off = if all_on { 0 } else { switched_off & !1 };
        for op in ops.into_iter().filter(|op| switched_off >> op.kind() & 1 == 0) {
            model.apply(&pool, op);
            model.compare(&pool);
        }
    }
}
