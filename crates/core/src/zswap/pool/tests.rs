//! The pool at its limits, against a naive model (`model`), under several threads, and measured.

mod model;

use std::collections::HashMap;

use super::*;

/// The memory that a driver would map for a pool.
struct Memory {
    layout: PoolLayout,
    data: Vec<u8>,
    objects: Vec<ObjectMeta>,
    blocks: Vec<BlockMeta>,
}

impl Memory {
    fn new(layout: PoolLayout) -> Self {
        Memory {
            layout,
            // A page more, so that the data can begin at a page's start.
            data: vec![0; layout.data_bytes + PAGE_BYTES],
            objects: (0..layout.objects).map(|_| ObjectMeta::UNUSED).collect(),
            blocks: (0..layout.blocks).map(|_| BlockMeta::UNUSED).collect(),
        }
    }

    fn for_limit(bytes_max: usize) -> Self {
        Self::new(PoolLayout::for_limit(bytes_max))
    }

    fn pool(&mut self, accept_percent: u32) -> Pool<'_> {
        let start = self.data.as_ptr().align_offset(PAGE_BYTES);
        let data = &mut self.data[start..];
        let memory = PoolMemory { data, objects: &mut self.objects, blocks: &mut self.blocks };
        Pool::new(&self.layout, memory, accept_percent)
    }
}

/// xorshift: the same numbers in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit
    }
}

/// Returns bytes that differ in every place from one seed to the next.
fn bytes_of(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    (0..length).map(|_| (random.next() >> 24) as u8).collect()
}

fn load(pool: &Pool, handle: ObjectHandle) -> Vec<u8> {
    pool.read(handle, <[u8]>::to_vec)
}

fn store(pool: &Pool, owner: u64, length: usize) -> Result<ObjectHandle, StoreError> {
    pool.store(PageIndex(owner), &bytes_of(owner, length))
}

/// Gives back everything that the pool doesn't want to keep, as a driver would. The content goes bad.
fn release_all(pool: &Pool) -> usize {
    let ranges = std::iter::from_fn(|| pool.take_released());
    let give_back = |range: Range<usize>| {
        pool.state.lock().blocks.scribble(range.clone(), 0xdb);
        pool.released(range);
    };
    ranges.map(give_back).count()
}

#[test]
fn objects_come_back_whatever_their_length() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let lengths = [1, 2, 31, 32, 33, 100, 1365, 1366, 2048, 2049, 4095, 4096];
    let handles = lengths.map(|length| store(&pool, length as u64, length).unwrap());
    for (handle, length) in handles.into_iter().zip(lengths) {
        assert_eq!(load(&pool, handle), bytes_of(length as u64, length));
        assert_eq!(pool.owner(handle), Some(PageIndex(length as u64)));
        pool.free(handle);
        assert_eq!(pool.owner(handle), None);
    }
    pool.check(&mut |_, _, _| panic!("something is left"));
}

#[test]
fn first_in_goes_first_except_for_busy_pages() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let [a, b, c] = [1, 2, 3].map(|owner| store(&pool, owner, 500).unwrap());
    // b's page is busy. A handle is left where it is if the call names another owner.
    pool.rotate(b, PageIndex(2));
    pool.rotate(a, PageIndex(2));
    let order: Vec<_> = std::iter::from_fn(|| {
        let (handle, owner) = pool.first_to_go()?;
        pool.free(handle);
        Some((handle, owner.0))
    })
    .collect();
    assert_eq!(order, [(a, 1), (c, 3), (b, 2)]);
    pool.rotate(b, PageIndex(2)); // gone: nothing happens
}

#[test]
fn what_takes_a_whole_page_goes_first() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let lengths = [500, PAGE_BYTES, PAGE_BYTES - 1, PAGE_BYTES];
    let [a, b, c, d] = lengths.map(|length| store(&pool, length as u64, length).unwrap());
    pool.rotate(b, PageIndex(PAGE_BYTES as u64));
    let order = std::iter::from_fn(|| pool.first_to_go().map(|(handle, _)| (pool.free(handle), handle).1));
    assert_eq!(order.collect::<Vec<_>>(), [d, b, a, c]);
}

/// Frees everything in the order in which it goes, and returns the owners.
fn drained(pool: &Pool) -> Vec<u64> {
    let next = || pool.first_to_go().map(|(handle, owner)| (pool.free(handle), owner.0).1);
    std::iter::from_fn(next).collect()
}

#[test]
fn what_is_denser_goes_before_what_is_not_and_keeps_its_owner() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let [a, b, c] = [1, 2, 3].map(|owner| store(&pool, owner, 900).unwrap());
    let denser = pool.replace(b, &bytes_of(20, 300)).unwrap();
    assert_eq!((pool.owner(denser), pool.owner(b)), (Some(PageIndex(2)), None));
    assert_eq!(load(&pool, denser), bytes_of(20, 300));
    pool.leave_as_it_is(c);
    assert_eq!(load(&pool, c), bytes_of(3, 900));
    assert_eq!(pool.first_to_densify(false), Some((a, PageIndex(1))));
    assert_eq!(pool.usage().payload_bytes, 2100);
    pool.check(&mut |_, _, _| {});
    // An object that was asked for isn't old any more.
    let more = store(&pool, 4, 900).unwrap();
    pool.leave_as_it_is(more);
    pool.keep(denser);
    pool.stow(denser);
    assert_eq!(drained(&pool), [3, 4, 1, 2]);
}

#[test]
fn what_has_been_there_for_two_turns_is_old() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let old = || pool.first_to_densify(true).map(|(_, owner)| owner.0);
    let [a, b, c] = [1, 2, 3].map(|owner| store(&pool, owner, 900).unwrap());
    pool.turn();
    let d = store(&pool, 4, 900).unwrap();
    assert_eq!(old(), None);
    pool.turn();
    assert_eq!(old(), Some(1));
    // The youngest of the old objects goes, and then the oldest; b is asked for.
    pool.free(c);
    assert_eq!(old(), Some(1));
    pool.free(a);
    assert_eq!(old(), Some(2));
    pool.rotate(b, PageIndex(2));
    assert_eq!(old(), None);
    pool.turn();
    assert_eq!(old(), Some(4));
    pool.free(d);
    assert_eq!(old(), None, "b is a turn old");
    pool.turn();
    assert_eq!(old(), Some(2));
}

#[test]
fn a_full_pool_keeps_what_has_no_room_to_become_denser() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    let page = [7; PAGE_BYTES];
    let only = store(&pool, 1, 1300).unwrap();
    while pool.store(PageIndex(2), &page).is_ok() {}
    let before = pool.usage();
    assert_eq!(pool.replace(only, &[1; 500]), Err(StoreError::Full));
    assert_eq!((pool.usage(), load(&pool, only)), (before, bytes_of(1, 1300)));
}

#[test]
fn what_becomes_denser_has_a_reserve_where_that_is_asked_for() {
    let mut memory = Memory::for_limit(2 << 20);
    let pool = memory.pool(90);
    pool.keep_reserve();
    let only = store(&pool, 1, 1300).unwrap();
    while pool.store(PageIndex(2), &[7; PAGE_BYTES]).is_ok() {}
    let reserve = (2 << 20) - pool.usage().bytes;
    assert!((32 << 10..=64 << 10).contains(&reserve), "{reserve}");
    let denser = pool.replace(only, &[1; 500]).unwrap();
    assert_eq!(load(&pool, denser), [1; 500]);
    assert_eq!(pool.store(PageIndex(3), &[7; PAGE_BYTES]), Err(StoreError::Full));
}

#[test]
fn what_becomes_denser_takes_a_larger_slot_where_there_is_no_other() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    // Objects of three sizes, and a free slot of the middle one.
    let large = store(&pool, 1, 2000).unwrap();
    let middle = store(&pool, 2, 1300).unwrap();
    while pool.store(PageIndex(3), &[7; PAGE_BYTES]).is_ok() {}
    while pool.store(PageIndex(3), &[7; 1300]).is_ok() {}
    pool.free(middle);
    let denser = pool.replace(large, &[1; 500]).unwrap();
    assert_eq!((load(&pool, denser), pool.owner(denser)), (vec![1; 500], Some(PageIndex(1))));
    pool.check(&mut |_, _, _| {});
}

#[test]
fn limit_of_what_is_there_takes_nothing_more_and_keeps_the_reserve() {
    for reserves in [false, true] {
        let mut memory = Memory::for_limit(2 << 20);
        let pool = memory.pool(90);
        if reserves {
            pool.keep_reserve();
        }
        let block_bytes = pool.state.lock().blocks.block_bytes();
        for owner in 0..300 {
            // The blocks that exist take what fits. No other block is to be had.
            pool.store(PageIndex(owner), &[7; PAGE_BYTES]).unwrap();
            let used = pool.usage().bytes;
            pool.set_limit(pool.limit_of_what_is_there());
            while pool.store(PageIndex(owner), &[7; PAGE_BYTES]).is_ok() {}
            assert_eq!(pool.usage().bytes, used);
            let has_reserve = reserves && used / block_bytes >= 31;
            assert_eq!(pool.replace(pool.first_to_go().unwrap().0, &[1; 100]).is_ok(), has_reserve, "{used}");
            pool.set_limit(2 << 20);
            if pool.usage().bytes > (2 << 20) * 9 / 10 {
                break;
            }
        }
    }
}

#[test]
fn no_room_to_become_denser_does_not_make_a_pool_full() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    let only = store(&pool, 1, 1300).unwrap();
    pool.set_limit(PAGE_BYTES);
    assert!(pool.accepts());
    assert_eq!(pool.replace(only, &[1; 500]), Err(StoreError::Full));
    assert!(pool.accepts());
}

#[test]
fn renamed_object_keeps_bytes_and_age() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handle = store(&pool, 7, 900).unwrap();
    store(&pool, 8, 900).unwrap();
    pool.rename(handle, PageIndex(70));
    assert_eq!(pool.first_to_go(), Some((handle, PageIndex(70))));
    assert_eq!(load(&pool, handle), bytes_of(7, 900));
}

#[test]
#[should_panic(expected = "not live")]
fn double_free_panics() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handle = store(&pool, 1, 100).unwrap();
    pool.free(handle);
    pool.free(handle);
}

#[test]
#[should_panic(expected = "not live")]
fn load_of_a_handle_that_was_never_given_out_panics() {
    let mut memory = Memory::for_limit(1 << 20);
    load(&memory.pool(90), ObjectHandle::from_raw(u32::MAX).unwrap());
}

#[test]
#[should_panic(expected = "was not being released")]
fn release_of_a_block_in_use_panics() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    store(&pool, 1, 100).unwrap();
    pool.released(0..PAGE_BYTES);
}

#[test]
fn pool_of_less_than_a_page_is_full_and_accepts_nothing() {
    for bytes_max in [0, PAGE_BYTES - 1] {
        let mut memory = Memory::for_limit(bytes_max);
        let pool = memory.pool(90);
        assert!(!pool.accepts() && !pool.over_accept_threshold());
        assert!(store(&pool, 1, 100).is_err());
        assert_eq!((pool.first_to_go(), pool.compact(9), pool.take_released()), (None, 0, None));
    }
}

#[test]
fn raw_pages_fill_the_pool_to_the_last_byte() {
    for bytes_max in [64 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20] {
        let mut memory = Memory::for_limit(bytes_max);
        let pool = memory.pool(90);
        let page = [7; PAGE_BYTES];
        let raw = |owner| pool.store(PageIndex(owner), &page);
        let stored = (0..).take_while(|&owner| raw(owner).is_ok()).count();
        assert_eq!(stored * PAGE_BYTES, bytes_max);
        assert_eq!(pool.usage().bytes, bytes_max);
    }
}

#[test]
fn tiny_objects_run_out_of_handles_and_shrinking_helps() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    let stored = (0..).take_while(|&owner| store(&pool, owner, 10).is_ok()).count();
    assert_eq!(stored, (64 << 10) / 128);
    assert_eq!(store(&pool, 0, 10), Err(StoreError::NoHandle));
    assert!(!pool.accepts() && pool.over_accept_threshold());
    while pool.over_accept_threshold() {
        pool.free(pool.first_to_go().unwrap().0);
    }
    assert!(pool.accepts() && store(&pool, 0, 10).is_ok());
}

#[test]
fn layouts_of_all_sizes_fit_their_number_ranges() {
    for shift in 12..=40 {
        for bytes_max in [(1_usize << shift) - 1, 1 << shift, (1 << shift) + 12_345] {
            let layout = PoolLayout::for_limit(bytes_max);
            assert!(layout.data_bytes <= bytes_max && bytes_max - layout.data_bytes < layout.block_bytes);
            assert!(layout.objects <= 1 << HANDLE_BITS && layout.blocks <= u32::MAX as usize);
        }
    }
}

/// 16 blocks of one page each. At 75 % the pool accepts again with 12 of them occupied.
#[test]
fn full_pool_accepts_again_only_at_the_threshold() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(75);
    let handles: Vec<_> = (0..16).map(|owner| store(&pool, owner, 4096).unwrap()).collect();
    assert!(pool.accepts(), "full to the brim, but nobody was refused yet");
    assert_eq!(store(&pool, 99, 4096), Err(StoreError::Full));
    for (freed, &handle) in handles.iter().enumerate() {
        assert_eq!(pool.accepts(), freed >= 4, "{freed}");
        assert_eq!(pool.over_accept_threshold(), freed < 4, "{freed}");
        pool.free(handle);
    }
    // Once it accepts again, the pool goes on to the limit, not to the threshold.
    assert!((0..15).all(|owner| store(&pool, owner, 4096).is_ok() && pool.accepts()));
}

#[test]
fn thresholds_of_0_and_100_percent_are_reached() {
    for (accept_percent, left) in [(0, 0), (100, 16), (u32::MAX, 16)] {
        let mut memory = Memory::for_limit(64 << 10);
        let pool = memory.pool(accept_percent);
        assert!((0..16).all(|owner| store(&pool, owner, 4096).is_ok()));
        store(&pool, 99, 4096).unwrap_err();
        while pool.over_accept_threshold() {
            pool.free(pool.first_to_go().unwrap().0);
        }
        assert_eq!(pool.usage().objects, left);
        assert!(pool.accepts());
    }
}

#[test]
fn lowered_limit_shrinks_the_pool_and_can_be_raised_again() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(100);
    assert!((0..16).all(|owner| store(&pool, owner, 4096).is_ok()));
    pool.set_limit(32 << 10);
    assert!(pool.over_accept_threshold());
    while pool.over_accept_threshold() {
        pool.free(pool.first_to_go().unwrap().0);
    }
    release_all(&pool);
    assert_eq!(pool.usage().bytes, 32 << 10);
    assert_eq!(store(&pool, 1, 4096), Err(StoreError::Full));
    pool.set_limit(1 << 30);
    assert!((0..8).all(|owner| store(&pool, owner, 4096).is_ok()));
    assert_eq!(store(&pool, 1, 4096), Err(StoreError::Full));
    pool.check(&mut |_, _, _| {});
}

/// A full pool goes to its threshold and up again. A block that is given back and had again costs two calls.
/// In other pools the kept memory is missing from the program.
#[test]
fn a_nearly_full_pool_keeps_more_of_what_is_empty() {
    let small = [(64, 8, 8), (64, 16, 8), (64, 17, 1), (64, 63, 1)];
    // 2 of 16 MiB are free, and half of 64 MiB, where blocks have eight pages.
    let large = [(16 << 8, 2 << 8, 1 << 8), (64 << 8, 32 << 8, 8 * 1024 / 128)];
    for (pages, freed, kept) in small.into_iter().chain(large) {
        let mut memory = Memory::for_limit(pages << 12);
        let pool = memory.pool(90);
        let handles: Vec<_> = (0..pages as u64).map(|owner| store(&pool, owner, 4096).unwrap()).collect();
        handles.into_iter().take(freed).for_each(|handle| _ = pool.free(handle));
        release_all(&pool);
        let usage = pool.usage();
        assert_eq!((usage.bytes - usage.bytes_occupied) >> 12, kept, "{freed} of {pages} pages are free");
    }
}

#[test]
fn block_being_released_is_not_used_until_the_driver_is_done() {
    let mut memory = Memory::for_limit(64 << 10);
    let pool = memory.pool(90);
    let handles: Vec<_> = (0..16).map(|owner| store(&pool, owner, 4096).unwrap()).collect();
    handles.into_iter().for_each(|handle| _ = pool.free(handle));
    let ranges: Vec<_> = std::iter::from_fn(|| pool.take_released()).collect();
    assert_eq!(ranges.len(), 15, "one of the blocks is kept, although it is empty");
    assert_eq!(pool.usage().bytes, 64 << 10, "the memory is still there");
    assert!(store(&pool, 1, 4096).is_ok());
    assert_eq!(store(&pool, 2, 4096), Err(StoreError::Full));
    pool.check(&mut |_, _, _| {});
    ranges.into_iter().for_each(|range| pool.released(range));
    assert_eq!(pool.usage().bytes, PAGE_BYTES);
    store(&pool, 3, 4096).unwrap();
}

/// Blocks of 8 objects of 1000 bytes. The second block is emptied to one object, the first to seven.
#[test]
fn stores_go_to_the_fuller_of_two_blocks() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handles: Vec<_> = (0..16).map(|owner| store(&pool, owner, 1000).unwrap()).collect();
    pool.free(handles[0]);
    handles[9..].iter().for_each(|&handle| _ = pool.free(handle));
    store(&pool, 99, 1000).unwrap();
    pool.free(handles[8]);
    assert_eq!(pool.usage().bytes_occupied, 8 << 10, "the sparser block could not drain");
}

/// Two blocks of 8 objects of 1000 bytes: 9 objects need both, 8 need one.
#[test]
fn compaction_works_exactly_when_a_block_is_to_be_had() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handles: Vec<_> = (0..16).map(|owner| store(&pool, owner, 1000).unwrap()).collect();
    for at in [0, 2, 4, 6, 9, 11, 13] {
        pool.free(handles[at]);
    }
    assert_eq!((pool.compact(99), pool.usage().bytes_occupied), (0, 16 << 10));
    pool.free(handles[15]);
    assert_eq!((pool.compact(99), pool.usage().bytes_occupied), (4, 8 << 10));
    for at in [1, 3, 5, 7, 8, 10, 12, 14] {
        assert_eq!(load(&pool, handles[at]), bytes_of(at as u64, 1000));
    }
}

#[test]
fn compaction_frees_blocks_and_keeps_every_byte() {
    let mut memory = Memory::for_limit(4 << 20);
    let pool = memory.pool(90);
    let mut random = Random(11);
    let mut live: Vec<_> =
        (0..4000).map(|owner| (owner, store(&pool, owner, 500 + random.below(300)).unwrap())).collect();
    // Three of four objects go, at random.
    live.retain(|&(_, handle)| {
        let stays = random.below(4) == 0;
        if !stays {
            pool.free(handle);
        }
        stays
    });
    let (before, lengths): (_, HashMap<_, _>) =
        (pool.usage(), live.iter().map(|&(owner, handle)| (owner, load(&pool, handle).len())).collect());
    let mut moved = 0;
    loop {
        match pool.compact(37) {
            37 => moved += 37,
            rest => break moved += rest,
        }
        pool.check(&mut |_, _, _| {});
    }
    let after = pool.usage();
    println!("compaction: {} -> {} bytes with {moved} moves", before.bytes_occupied, after.bytes_occupied);
    // At most one partly filled block is left in each class. Objects of 500 to 800 bytes have fewer than 24
    // classes.
    assert!(after.bytes_occupied <= after.payload_bytes * 108 / 100 + 24 * 8192);
    assert!(after.bytes_occupied < before.bytes_occupied / 2 && moved <= live.len());
    assert_eq!(pool.compact(1), 0);
    assert!(release_all(&pool) > 0);
    for (owner, handle) in live {
        assert_eq!(load(&pool, handle), bytes_of(owner, lengths[&owner]));
    }
}

/// Fills two blocks with objects of the same size, and frees most of the first block and half of the second.
/// Returns the object left in the first block, and the size.
fn sparse_blocks(pool: &Pool) -> (ObjectHandle, usize) {
    const LENGTH: usize = 1000;
    let capacity = pool.state.lock().blocks.block_bytes() / LENGTH;
    let handles: Vec<_> = (0..2 * capacity as u64).map(|owner| store(pool, owner, LENGTH).unwrap()).collect();
    let freed = handles[1..capacity].iter().chain(&handles[capacity + capacity / 2..]);
    freed.for_each(|&handle| _ = pool.free(handle));
    (handles[0], LENGTH)
}

#[test]
fn an_object_that_is_read_is_not_moved_until_later() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let (handle, length) = sparse_blocks(&pool);
    pool.read(handle, |bytes| {
        assert_eq!(pool.compact(100), 0);
        store(&pool, 77, length).unwrap();
        assert_eq!(bytes, bytes_of(0, length));
    });
    assert!(pool.compact(100) > 0);
    assert_eq!(load(&pool, handle), bytes_of(0, length));
    pool.check(&mut |_, _, _| {});
}

#[test]
#[should_panic(expected = "was freed while somebody read it")]
fn an_object_that_is_read_can_not_be_freed() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handle = store(&pool, 1, 1000).unwrap();
    pool.read(handle, |_| pool.free(handle));
}

/// A thread that comes when no pin is free reads and stores under the lock.
#[test]
fn more_readers_than_there_is_room_for_read_and_store_all_the_same() {
    fn nested(pool: &Pool, handle: ObjectHandle, more: usize) {
        if more > 0 {
            assert!(pool.state.try_lock().is_some(), "who has a pin has not got the lock");
            return pool.read(handle, |_| nested(pool, handle, more - 1));
        }
        pool.read(handle, |bytes| {
            assert_eq!(bytes, bytes_of(1, 1000));
            assert!(pool.state.try_lock().is_none(), "who has no pin has the lock");
        });
        let other = store(pool, 2, 3000).unwrap();
        assert_eq!(load(pool, other), bytes_of(2, 3000));
        pool.free(other);
    }
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let handle = store(&pool, 1, 1000).unwrap();
    nested(&pool, handle, super::pins::PINS);
    pool.free(handle);
}

#[test]
fn threads_at_once_lose_nothing() {
    let mut memory = Memory::for_limit(1 << 20);
    let pool = memory.pool(90);
    let (pool, done) = (&pool, &core::sync::atomic::AtomicUsize::new(0));
    let worker = move |thread: u64| {
        let mut random = Random(thread + 1);
        let mut live: Vec<(u64, usize, ObjectHandle)> = Vec::new();
        for step in 0..20_000 {
            // Owners tell the threads apart: each thread frees only what it stored.
            let (owner, length) = (thread << 32 | step, 1 + random.below(3000));
            match random.below(8) {
                0..4 => live.extend(store(pool, owner, length).ok().map(|handle| (owner, length, handle))),
                4 | 5 if !live.is_empty() => {
                    let (owner, length, handle) = live.swap_remove(random.below(live.len()));
                    assert_eq!(load(pool, handle), bytes_of(owner, length));
                    pool.free(handle);
                }
                6 => drop(pool.first_to_go().map(|(handle, owner)| pool.rotate(handle, owner))),
                _ => {
                    pool.compact(random.below(20));
                    release_all(pool);
                }
            }
            assert!(pool.usage().bytes <= 1 << 20);
        }
        done.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        live
    };
    let live: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3).map(|thread| scope.spawn(move || worker(thread))).collect();
        while done.load(core::sync::atomic::Ordering::Relaxed) < 3 && workers.iter().any(|w| !w.is_finished())
        {
            pool.check(&mut |_, _, _| {});
            std::thread::yield_now();
        }
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert_eq!(pool.usage().objects, live.len());
    for (owner, length, handle) in live {
        assert_eq!(pool.owner(handle), Some(PageIndex(owner)));
        assert_eq!(load(pool, handle), bytes_of(owner, length));
        pool.free(handle);
    }
    pool.check(&mut |_, _, _| panic!("something is left"));
}

// ---- measured ----

/// Compressed sizes as heap pages have them: most between 300 and 3000 bytes, the middle more often.
fn mixed_length(random: &mut Random) -> usize {
    300 + (random.below(2700) + random.below(2700)) / 2
}

/// Returns the percentage of the pool's memory that holds no payload.
fn waste_percent(usage: &PoolUsage) -> f64 {
    100.0 - usage.payload_bytes as f64 * 100.0 / usage.bytes as f64
}

fn fill(pool: &Pool, random: &mut Random) -> Vec<ObjectHandle> {
    let zeros = [0; PAGE_BYTES];
    let store = || pool.store(PageIndex(1), &zeros[..mixed_length(random)]).ok();
    std::iter::from_fn(store).collect()
}

#[test]
fn full_pool_wastes_little() {
    for (bytes_max, percent_max) in [(2 << 20, 18.0), (16 << 20, 10.0), (64 << 20, 6.0), (256 << 20, 4.0)] {
        let mut memory = Memory::for_limit(bytes_max);
        let pool = memory.pool(90);
        fill(&pool, &mut Random(5));
        let waste = waste_percent(&pool.usage());
        println!("{:4} MiB: {waste:.1} % waste", bytes_max >> 20);
        assert!(waste < percent_max, "{waste:.1} % of {bytes_max}");
    }
}

/// Pages come and go at random at the limit, as under a steady load, with and without compaction.
#[test]
fn steady_state_wastes_little_and_hardly_gives_memory_back() {
    for (bytes_max, compacts) in [(32 << 20, false), (32 << 20, true)] {
        let mut memory = Memory::for_limit(bytes_max);
        let pool = memory.pool(90);
        let mut random = Random(5);
        let mut live = fill(&pool, &mut random);
        let (mut moved, mut released, mut turnover) = (0, 0, 0);
        let zeros = [0; PAGE_BYTES];
        for _ in 0..live.len() * 4 {
            if random.below(2) == 0 || !pool.accepts() {
                pool.free(live.swap_remove(random.below(live.len())));
            } else if let Ok(handle) = pool.store(PageIndex(1), &zeros[..mixed_length(&mut random)]) {
                live.push(handle);
                turnover += 1;
            }
            if compacts && pool.over_accept_threshold() {
                moved += pool.compact(2);
            }
            released += release_all(&pool);
        }
        let usage = pool.usage();
        let waste = 100.0 - usage.payload_bytes as f64 * 100.0 / usage.bytes_occupied as f64;
        println!(
            "compaction {compacts}: {waste:.1} % waste after {turnover} stores, {moved} moves, {released} releases"
        );
        assert!(!compacts || waste < 8.0);
    }
}

/// Prints the table behind `layout::BLOCK_BYTES`, and checks the choice made from it.
#[test]
fn waste_by_block_size() {
    for mib in [1, 2, 4, 6, 8, 16, 32, 48] {
        let limit = mib << 20;
        let waste_with = |block_bytes| {
            let mut memory = Memory::new(PoolLayout::with_blocks_of(block_bytes, limit));
            let pool = memory.pool(90);
            fill(&pool, &mut Random(5));
            waste_percent(&pool.usage())
        };
        let wastes = [4096, 8192, 16384, 32768, 65536].map(waste_with);
        let chosen = waste_with(PoolLayout::for_limit(limit).block_bytes);
        let best = wastes.into_iter().fold(f64::INFINITY, f64::min);
        println!("{mib:4} MiB: {wastes:5.1?} %, chosen {chosen:.1} %");
        assert!(chosen <= best + 4.0, "{mib} MiB: {chosen:.1} % where {best:.1} % was possible");
    }
}
