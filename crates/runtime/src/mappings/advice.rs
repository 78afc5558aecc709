//! Advice on memory: madvise and process_madvise.
//!
//! Like the calls in [`changes`](super::changes): made in threads of the program, under the map lock, as the
//! program asked. Advice that discards memory drops what the engine knows of it. Advice for children of forks
//! is noted. Advice that would pass the budget isn't taken, or taken in parts.

use crate::engine::{Engine, FaultMode};
use crate::mappings::changes::{
    Arguments, HOLE, in_parts, in_parts_over_holes, is_aligned, pages_of, pass_on,
};
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PAGE_BYTES, PageRange};
use farpage_os::errno::returned::{EFAULT, EINVAL};
use farpage_os::peek;
use farpage_os::sys::{Errno, number};
use linux_raw_sys::general as raw;

// Advice that is newer than the headers: freeing locked memory, and guard pages.
const DONTNEED_LOCKED: u32 = 24;
const GUARD_INSTALL: u32 = 102;
/// Tries of a call that may find memory out. What was brought in may be out again before the kernel looks.
const TRIES_MAX: usize = 100;

/// `madvise(address, bytes, advice)`.
pub fn madvise(engine: &'static Engine, arguments: Arguments) -> isize {
    let [address, bytes, advice, ..] = arguments;
    let Some(range) = pages_of(address, bytes).filter(|_| is_aligned(address)) else {
        return pass_on(number::MADVISE, arguments);
    };
    match advice as u32 {
        // Guard pages are refused, as by Linux before 6.13, so that programs do without them. Until 6.18,
        // filling guarded pages with zeros takes the guard away. The engine would fill them along with the
        // first touch of a neighbouring page.
        GUARD_INSTALL if engine.touches(range) => EINVAL,
        raw::MADV_DONTNEED | raw::MADV_FREE | DONTNEED_LOCKED => discard(engine, range, arguments),
        raw::MADV_POPULATE_READ | raw::MADV_POPULATE_WRITE | raw::MADV_COLLAPSE => {
            if !engine.touches(range) {
                return pass_on(number::MADVISE, arguments);
            }
            if advice as u32 != raw::MADV_POPULATE_READ {
                engine.prepare_to_fill(range.bytes() as u64);
            }
            if engine.mode().calls_can_wait() {
                pass_on(number::MADVISE, arguments)
            } else {
                bring_and_advise(engine, arguments)
            }
        }
        // The hint isn't taken. With huge pages memory fills several times as fast, and would be past the
        // budget before anything can be registered.
        raw::MADV_HUGEPAGE
            if !engine.is_active() && range.bytes() as u64 > engine.headroom() && engine.touches(range) =>
        {
            0
        }
        raw::MADV_DONTFORK | raw::MADV_DOFORK => show_or_hide(engine, range, arguments),
        raw::MADV_WIPEONFORK | raw::MADV_KEEPONFORK => wipe_or_keep(engine, range, arguments),
        _ => pass_on(number::MADVISE, arguments),
    }
}

/// Discards the contents of `range`, which the program no longer needs.
fn discard(engine: &Engine, range: PageRange, arguments: Arguments) -> isize {
    let _exclusive = engine.settled([range]);
    // While the engine doesn't hear of missing pages, the kernel may free later. A freed page reads as zeros,
    // as MADV_FREE allows.
    let is_followed = engine.is_active() || engine.mode() != FaultMode::Segv;
    if arguments[2] as u32 != raw::MADV_FREE || !is_followed {
        return drop_now(engine, range, arguments);
    }
    // MADV_FREE may free at once, and only freeing at once can be followed. Freeing must not come after
    // activation either. What the kernel frees then would be missing in a guarded call, or in the frame that
    // it was moved to. But the kernel refuses to free what isn't anonymous memory, and dropping that would
    // lose what was written there.
    in_parts_over_holes(engine, range, Flags::NONE, |part, is_known| {
        let advice = if is_known { raw::MADV_DONTNEED } else { raw::MADV_FREE };
        drop_now(engine, part, [part.start.address(), part.bytes(), advice as usize, 0, 0, 0])
    })
}

/// Passes on advice that discards at once, and drops the pages of known memory. Returns the kernel's result.
/// Memory that a call uses just now stays where the kernel wouldn't wait for it, and becomes zeros.
fn drop_now(engine: &Engine, range: PageRange, arguments: Arguments) -> isize {
    if !engine.is_active() || engine.mode().calls_can_wait() {
        return drop_all(engine, range, arguments);
    }
    let (mut holes, mut refused) = (0, 0);
    let _ = engine.for_each_part(range, |part, is_held| {
        // The kernel doesn't discard locked memory, and a file's memory reads as the file afterwards.
        let lock = engine.first_locked(part).filter(|_| arguments[2] as u32 != DONTNEED_LOCKED);
        let is_managed = |page| matches!(engine.pager.state(page), State::Resident { .. });
        if is_held && lock.is_none() && part.iter().all(is_managed) && set_to_zero(part) {
            return Ok(());
        }
        let arguments = [part.start.address(), part.bytes(), arguments[2], 0, 0, 0];
        match drop_all(engine, part, arguments) {
            0 => Ok(()),
            HOLE => {
                holes = HOLE;
                Ok(())
            }
            result => {
                refused = result;
                Err(Errno(0))
            }
        }
    });
    if refused != 0 { refused } else { holes }
}

/// Writes zeros over pages that are in memory. False if a page can't be written, or isn't there.
fn set_to_zero(pages: PageRange) -> bool {
    static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    // SAFETY: the program has asked for zeros there.
    pages.iter().all(|page| unsafe { peek::write(page.address(), &ZEROS) })
}

fn drop_all(engine: &Engine, range: PageRange, arguments: Arguments) -> isize {
    let result = pass_on(number::MADVISE, arguments);
    if !engine.touches(range) || !engine.is_active() {
        return result;
    }
    if result == 0 || result == HOLE {
        discarded(engine, range);
    } else {
        // The part that the kernel had done until then is done again, but with a result for each part.
        in_parts(engine, range, Flags::REGISTERED, |part, is_registered| {
            let result =
                pass_on(number::MADVISE, [part.start.address(), part.bytes(), arguments[2], 0, 0, 0]);
            let is_done = result == 0 || result == HOLE;
            if is_registered {
                // The kernel stopped at a locked mapping, unless the advice is about locked memory. Before
                // Linux 5.18 that advice is unknown, and nothing is done.
                let lock = engine.first_locked(part).filter(|_| arguments[2] as u32 != DONTNEED_LOCKED);
                let end = if is_done { part.end } else { lock.unwrap_or(part.start) };
                discarded(engine, PageRange::new(part.start, end));
            }
            if is_done { 0 } else { result }
        });
    }
    engine.pager.stats().count(Counter::MapChanges);
    result
}

fn discarded(engine: &Engine, range: PageRange) {
    engine.pager.discard(range);
    // If the memory stays open, the program may touch it again without the engine hearing of it. That only
    // blurs the count of memory that is there.
    let _ = engine.protections.map(|protections| protections.withdraw(range));
}

/// Has children of forks get zeros for `range`, or again what is there, as the program asked.
fn wipe_or_keep(engine: &Engine, range: PageRange, arguments: Arguments) -> isize {
    let _exclusive = engine.map.exclusive();
    let wipe = arguments[2] as u32 == raw::MADV_WIPEONFORK;
    let change = |f: Flags| if wipe { f.with(Flags::WIPE_ON_FORK) } else { f.without(Flags::WIPE_ON_FORK) };
    let result = pass_on(number::MADVISE, arguments);
    if result == 0 || result == HOLE {
        engine.note(|ranges| ranges.update(range, change));
        return result;
    }
    // The kernel stops at memory of another kind, and has advised what lies before. Advice that is given
    // again changes nothing.
    in_parts_over_holes(engine, range, Flags::NONE, |part, _| {
        let result = pass_on(number::MADVISE, [part.start.address(), part.bytes(), arguments[2], 0, 0, 0]);
        if result == 0 || result == HOLE {
            engine.note(|ranges| ranges.update(part, change));
        }
        result
    });
    result
}

/// Hides `range` from the program's children, or shows it to them again, as the program asked.
fn show_or_hide(engine: &Engine, range: PageRange, arguments: Arguments) -> isize {
    let _exclusive = engine.map.exclusive();
    let hide = arguments[2] as u32 == raw::MADV_DONTFORK;
    let change = |f: Flags| if hide { f.with(Flags::DONT_FORK) } else { f.without(Flags::DONT_FORK) };
    engine.note(|ranges| ranges.update(range, change));
    if hide || !engine.is_active() {
        return pass_on(number::MADVISE, arguments);
    }
    // Registered memory stays hidden from children until a fork that the engine sees.
    in_parts_over_holes(engine, range, Flags::REGISTERED, |part, is_registered| {
        let part = [part.start.address(), part.bytes(), arguments[2], 0, 0, 0];
        if is_registered { 0 } else { pass_on(number::MADVISE, part) }
    })
}

/// Gives advice that has the kernel touch pages, which the kernel doesn't do for pages that are out. The
/// advice is given in parts, because not all of the range may fit in memory at once.
fn bring_and_advise(engine: &'static Engine, arguments: Arguments) -> isize {
    // Each part is a huge page, because the advice may be about huge pages.
    const PART_BYTES: usize = 2 << 20;
    let [address, bytes, advice, ..] = arguments;
    let (mut result, end) = (0, address + bytes);
    let mut next = address;
    while next < end {
        let start = next;
        next = end.min((start / PART_BYTES + 1) * PART_BYTES);
        let part = [start, next - start, advice, 0, 0, 0];
        for _ in 0..TRIES_MAX {
            engine.bring_in(PageRange::covering(part[0], part[1]), true);
            result = pass_on(number::MADVISE, part);
            // For memory that may not be touched the kernel answers EINVAL.
            if result != EFAULT && !(result == EINVAL && engine.mode() == FaultMode::Segv) {
                break;
            }
        }
        if result != 0 {
            break;
        }
    }
    result
}

/// `process_madvise(pidfd, list, count, advice, flags)`: accepts the advice that Linux before 6.13 accepts.
/// Such advice drops no page and changes no property; MADV_COLLAPSE may fill memory. For other advice returns
/// EINVAL, as that kernel does. The refusal includes other processes, so that no program counts on it.
pub(super) const fn process_madvise(arguments: Arguments) -> Option<isize> {
    match arguments[3] as u32 {
        raw::MADV_COLD | raw::MADV_PAGEOUT | raw::MADV_WILLNEED | raw::MADV_COLLAPSE => None,
        _ => Some(EINVAL),
    }
}

/// Makes process_madvise. The kernel reads the list of ranges, which may be out, and in some modes doesn't
/// wait for it.
pub(super) fn advise_by_list(engine: &'static Engine, arguments: Arguments) -> isize {
    let [_, list, count, ..] = arguments;
    // The list is no longer than the kernel allows (UIO_MAXIOV).
    let pages = count.checked_mul(16).filter(|_| count <= 1024).and_then(|bytes| pages_of(list, bytes));
    let mut result = EFAULT;
    for _ in 0..TRIES_MAX {
        pages.inspect(|pages| engine.bring_in(*pages, false));
        result = pass_on(number::PROCESS_MADVISE, arguments);
        if result != EFAULT {
            break;
        }
    }
    result
}
