//! Segments of shared memory (System V) that the program attaches: shmat.
//!
//! A segment isn't managed. With SHM_REMAP it takes the place of memory that is, and whose pages may be out.
//! The kernel takes the segment's size for that, so the size must be found first.

use crate::engine::Engine;
use crate::mappings::changes::{Arguments, EVERYTHING, pages_of, pass_on};
use crate::mappings::map_lock::Exclusive;
use farpage_core::stats::Counter;
use farpage_core::units::{PAGE_BYTES, PageRange};
use farpage_os::errno::returned::ENOMEM;
use farpage_os::proc;
use farpage_os::sys::{self, number};

const SHM_RDONLY: usize = 0o10000;
/// Flag of shmat: replaces what is mapped at the address.
const SHM_REMAP: usize = 0o40000;

/// `shmat(segment, address, flags)`: attaches a segment.
pub fn attach(engine: &Engine, arguments: Arguments) -> isize {
    if arguments[2] & SHM_REMAP != 0 {
        return attach_over(engine, arguments);
    }
    // A page's place may be empty for a moment. No segment may get there.
    let _exclusive = engine.map.exclusive();
    pass_on(number::SHMAT, arguments)
}

/// Attaches a segment of shared memory anywhere, because a filter of the program's may forbid shmctl. Returns
/// the pages that the segment takes; otherwise the kernel's word for the failure.
fn attach_anywhere(segment: usize, _: &Exclusive<'_>) -> Result<PageRange, isize> {
    let word = pass_on(number::SHMAT, [segment, 0, SHM_RDONLY, 0, 0, 0]);
    let at = sys::check(word).map_err(|_| word)?;
    let mut found = None;
    let _ = proc::for_each_mapping(|mapping| {
        if mapping.pages.start.address() == at {
            found = Some(mapping.pages);
        }
    });
    found.ok_or_else(|| {
        detach(at);
        ENOMEM
    })
}

fn detach(address: usize) {
    pass_on(number::SHMDT, [address, 0, 0, 0, 0, 0]);
}

/// `shmat(segment, address, flags)` with SHM_REMAP: puts a segment of shared memory in the place of what is
/// there. Fails with ENOMEM if the segment's size can't be found.
fn attach_over(engine: &Engine, arguments: Arguments) -> isize {
    let [segment, address, ..] = arguments;
    // Otherwise another thread could map memory where the segment is attached meanwhile, and a fork's child
    // would keep it there.
    let exclusive = engine.settled([EVERYTHING]);
    let elsewhere = match attach_anywhere(segment, &exclusive) {
        Ok(elsewhere) => elsewhere,
        Err(word) => return word,
    };
    // With SHM_RND the address is rounded down. Otherwise the kernel refuses one that isn't aligned.
    let range = pages_of(address & !(PAGE_BYTES - 1), elsewhere.bytes());
    // The segment stays attached elsewhere meanwhile: the last process that detaches it may destroy it. But
    // what is put over that attachment would be detached with it.
    let is_in_the_way = range.is_some_and(|range| !range.intersection(elsewhere).is_empty());
    if is_in_the_way {
        detach(elsewhere.start.address());
    }
    let result = pass_on(number::SHMAT, arguments);
    match range {
        Some(range) if sys::check(result).is_err() => engine.forget_if_gone(range),
        Some(range) if engine.forget_what_was(range) => engine.pager.stats().count(Counter::MapChanges),
        _ => {}
    }
    if !is_in_the_way {
        detach(elsewhere.start.address());
    }
    result
}
