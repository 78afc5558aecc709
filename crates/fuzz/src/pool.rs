//! The pool against a queue of objects, the oldest first. Objects of a whole page leave before the other
//! objects, then objects that can't become shorter. Objects that are only kept are in a list of their own.

use crate::{Input, Memory};
use farpage_core::units::{PAGE_BYTES, PageIndex};
use farpage_core::zswap::pool::{ObjectHandle, Pool, PoolLayout, PoolMemory, StoreError};
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes of the pool: 16 blocks of a page each.
const LIMIT: usize = 16 * PAGE_BYTES;

struct Object {
    handle: ObjectHandle,
    owner: PageIndex,
    length: usize,
    is_kept: bool,
    is_dense: bool,
    /// The object's first byte. Each following byte is one higher.
    first: u8,
}

impl Object {
    /// Returns the object's kind. Objects of lower kinds leave first.
    fn kind(&self) -> u8 {
        match self {
            Object { is_kept: true, .. } => 3,
            Object { length: PAGE_BYTES, .. } => 0,
            Object { is_dense: true, .. } => 1,
            _ => 2,
        }
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        let first = self.first;
        (0..self.length).map(move |at| first.wrapping_add(at as u8))
    }
}

/// Stores, frees, ages, moves and releases objects.
pub fn run(input: &mut Input) {
    let off = input.byte();
    let accept_percent = input.below(120) as u32;
    let layout = PoolLayout::for_limit(LIMIT);
    let mut memory = Memory::new(layout.data_bytes + PAGE_BYTES + (layout.objects + layout.blocks + 2) * 64);
    let mut region = memory.region();
    let data = region.carve::<u8>(layout.data_bytes + PAGE_BYTES);
    let start = data.as_ptr().align_offset(PAGE_BYTES);
    let memory = PoolMemory {
        data: &mut data[start..],
        objects: region.carve(layout.objects),
        blocks: region.carve(layout.blocks),
    };
    let pool = Pool::new(&layout, memory, accept_percent);
    let mut model: VecDeque<Object> = VecDeque::new();
    let mut releasing: Vec<Range<usize>> = Vec::new();
    while !input.is_over() {
        let kind = input.kind(8, off);
        let which = if model.is_empty() { None } else { Some(input.below(model.len())) };
        match (kind, which) {
            (Some(0 | 1), _) => store(input, &pool, &mut model),
            (Some(2), Some(at)) => _ = pool.free(model.remove(at).expect("in range").handle),
            (Some(3), Some(_)) => {
                let position = |kind| model.iter().position(|object| object.kind() == kind);
                let first = (0..3).find_map(position).and_then(|at| model.remove(at));
                assert_eq!(pool.first_to_go(), first.as_ref().map(|first| (first.handle, first.owner)));
                first.inspect(|first| _ = pool.free(first.handle));
            }
            (Some(4), Some(at)) => {
                let mut object = model.remove(at).expect("in range");
                // Each of the three calls makes the object the youngest of its kind.
                match input.below(3) {
                    0 => pool.rotate(object.handle, object.owner),
                    1 => {
                        pool.keep(object.handle);
                        (object.is_kept, object.is_dense) = (true, false);
                    }
                    _ => {
                        pool.stow(object.handle);
                        (object.is_kept, object.is_dense) = (false, false);
                    }
                }
                model.push_back(object);
            }
            (Some(5), Some(at)) => {
                let owner = PageIndex(u64::from(input.byte()));
                pool.rename(model[at].handle, owner);
                model[at].owner = owner;
            }
            (Some(6), _) => match input.below(40) {
                moves_max @ 0..20 => _ = pool.compact(moves_max),
                _ => densify(input, &pool, &mut model),
            },
            (Some(7), _) => match pool.take_released() {
                Some(range) if input.byte() < 128 => releasing.push(range),
                Some(range) => pool.released(range),
                None => releasing.drain(..).for_each(|range| pool.released(range)),
            },
            _ => {}
        }
        agree(&pool, &model);
    }
    for object in &model {
        pool.read(object.handle, |bytes| {
            assert!(bytes.iter().copied().eq(object.bytes()), "an object's bytes changed");
        });
    }
}

fn store(input: &mut Input, pool: &Pool, model: &mut VecDeque<Object>) {
    // Few different sizes, so that blocks fill up.
    let lengths = [1, 33, 100, 700, 1365, 1366, 2049, PAGE_BYTES];
    let length = match input.below(10) {
        any @ 8.. => 1 + (input.below(PAGE_BYTES) + any) % PAGE_BYTES,
        at => lengths[at],
    };
    let owner = PageIndex(u64::from(input.byte()));
    let handle = ObjectHandle::from_raw(1).expect("not 0");
    let mut object = Object { handle, owner, length, is_kept: false, is_dense: false, first: input.byte() };
    match pool.store(owner, &object.bytes().collect::<Vec<u8>>()) {
        Ok(handle) => {
            object.handle = handle;
            model.push_back(object);
        }
        Err(StoreError::Full | StoreError::NoHandle) => {}
    }
}

/// Takes the oldest object that may become shorter. Replaces it by a shorter one, or marks that it stays.
fn densify(input: &mut Input, pool: &Pool, model: &mut VecDeque<Object>) {
    let at = model.iter().position(|object| object.kind() == 2);
    let first = at.map(|at| (model[at].handle, model[at].owner));
    assert_eq!(pool.first_to_densify(false), first);
    let Some(mut object) = at.and_then(|at| model.remove(at)) else { return };
    object.is_dense = true;
    if input.byte() < 64 {
        pool.leave_as_it_is(object.handle);
    } else {
        let length = 1 + input.below(object.length);
        let first = input.byte();
        let shorter = Object { length, first, ..object };
        let Ok(handle) = pool.replace(object.handle, &shorter.bytes().collect::<Vec<u8>>()) else {
            object.is_dense = false;
            return model.insert(at.expect("it was found"), object);
        };
        object = Object { handle, ..shorter };
    }
    model.push_back(object);
}

fn agree(pool: &Pool, model: &VecDeque<Object>) {
    let of_kind = |kind| model.iter().filter(move |object| object.kind() == kind);
    let kept = || of_kind(3);
    let mut expected = (0..4).flat_map(of_kind);
    let first_kept = kept().next().map(|object| (object.handle, object.owner));
    assert_eq!((pool.first_kept(), pool.kept() as usize), (first_kept, kept().count()));
    pool.check(&mut |handle, owner, length| {
        let object = expected.next().expect("an object that was never stored");
        assert_eq!((handle, owner, length), (object.handle, object.owner, object.length));
    });
    assert!(expected.next().is_none(), "an object was lost");
    let usage = pool.usage();
    assert_eq!(usage.objects, model.len());
    assert_eq!(usage.payload_bytes, model.iter().map(|object| object.length).sum::<usize>());
    assert!(usage.payload_bytes <= usage.bytes_occupied && usage.bytes_occupied <= usage.bytes);
    assert!(usage.bytes <= LIMIT, "over the limit");
}
