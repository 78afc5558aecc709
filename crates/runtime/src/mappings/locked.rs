//! Memory locks of the program (mlock, mlock2, munlock, mlockall, munlockall), and memory that must stay
//! resident for other reasons.
//!
//! [`changes`](crate::mappings::changes) calls these functions, on a stack of Farpage's and with signals
//! blocked. Marks change under the exclusive map lock. The mlock that fills pages may wait for a fault, so it
//! is made with no lock held. Calls of munlock, mlockall and munlockall are made with no lock held, too.
//! Locked pages come in through faults.

use crate::engine::Engine;
use crate::mappings::changes::{Arguments, EVERYTHING, HOLE, pages_of, pass_on};
use core::sync::atomic::Ordering;
use farpage_core::table::Walk;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::errno::returned::EPERM;
use farpage_os::memory;
use farpage_os::sys::number;
use linux_raw_sys::general as raw;

/// Value of `Engine::lock_future`: new mappings are locked and filled.
pub const LOCK_AND_FILL: u32 = 1;
/// Value of `Engine::lock_future`: new mappings are locked as they are touched.
const LOCK: u32 = 2;
/// Flag of mlock2: pages are locked as they are touched.
pub const ON_TOUCH: usize = raw::MLOCK_ONFAULT as usize;

impl Engine {
    /// Returns where the first locked part of `range` begins.
    pub(crate) fn first_locked(&self, range: PageRange) -> Option<PageIndex> {
        let ranges = self.pager.ranges.lock();
        let inside = ranges.as_slice().iter().filter(|known| !known.pages.intersection(range).is_empty());
        let locked = inside
            .filter(|known| known.flags.has(Flags::LOCKED))
            .map(|known| known.pages.start.max(range.start));
        locked.min()
    }
}

/// Locks memory as `mlock(address, bytes)` or `mlock2` does. The kernel checks whether the range may be
/// locked before any page is filled. Otherwise a sparse mapping that RLIMIT_MEMLOCK refuses would be all in
/// memory first.
pub fn mlock(engine: &'static Engine, call: usize, arguments: Arguments) -> isize {
    let [address, bytes, ..] = arguments;
    let flags = if call == number::MLOCK2 { arguments[2] } else { 0 };
    let Some(range) = pages_of(address, bytes).filter(|_| flags & !ON_TOUCH == 0) else {
        return pass_on(call, arguments);
    };
    if flags == 0 {
        // Registration comes first if this call could exceed the budget: a locked range isn't registered.
        engine.prepare_to_fill(range.bytes() as u64);
    }
    let was_locked = engine.first_locked(range).is_some();
    let mut result = lock_on_touch(engine, range, flags == ON_TOUCH);
    if result == 0 && flags == 0 {
        // The pages come in through faults, so this thread holds no lock meanwhile.
        engine.bring_in(range, true);
        result = pass_on(call, arguments);
    }
    if result != 0 && !was_locked {
        // The kernel may have locked a part of the range. In either case no page of the range is locked now.
        pass_on(number::MUNLOCK, [address, bytes, 0, 0, 0, 0]);
        mark_locked(engine, range, false);
    }
    result
}

/// Has the kernel lock the resident pages of `range`, and the other pages when they are touched. `for_good`
/// says that the program asked for MLOCK_ONFAULT.
fn lock_on_touch(engine: &Engine, range: PageRange, for_good: bool) -> isize {
    let nothing = PageRange::of(range.start, 0);
    let _exclusive = engine.map.exclusive();
    let result = pass_on(number::MLOCK2, [range.start.address(), range.bytes(), ON_TOUCH, 0, 0, 0]);
    let locked = match result {
        0 => range,
        // ENOMEM has two causes. At a hole, the kernel has locked the part before the hole. Without a hole,
        // the range exceeds RLIMIT_MEMLOCK and nothing is locked.
        HOLE => Some(memory::mapped_before_a_hole(range)).filter(|part| *part != range).unwrap_or(nothing),
        _ => nothing,
    };
    let as_asked = if for_good { Flags::LOCKED.with(Flags::ON_TOUCH) } else { Flags::LOCKED };
    let change = |flags: Flags| flags.without(Flags::ON_TOUCH).with(as_asked);
    engine.note(|ranges| ranges.update(locked, change));
    result
}

/// Unlocks memory as `munlock(address, bytes)` does.
pub fn munlock(engine: &'static Engine, arguments: Arguments) -> isize {
    let [address, bytes, ..] = arguments;
    let result = pass_on(number::MUNLOCK, arguments);
    if let (0 | HOLE, Some(range)) = (result, pages_of(address, bytes)) {
        // The kernel unlocks what lies before a hole, and stops there.
        let unlocked = if result == HOLE { memory::mapped_before_a_hole(range) } else { range };
        mark_locked(engine, unlocked, false);
    }
    result
}

fn mark_locked(engine: &'static Engine, range: PageRange, locked: bool) {
    let _exclusive = engine.map.exclusive();
    let unlocked = |f: Flags| f.without(Flags::LOCKED).without(Flags::ON_TOUCH);
    let change = |f: Flags| if locked { unlocked(f).with(Flags::LOCKED) } else { unlocked(f) };
    engine.note(|ranges| ranges.update(range, change));
    if !locked && engine.is_active() {
        // Ranges that were locked when their mapping was taken over have not been registered.
        engine.take_over_all(range, |range| engine.registrar.ask(range));
        // The budget has counted this memory as unmanaged until now.
        engine.budget.ring();
    }
}

/// Keeps the pages in `range` in memory until they are unmapped. A page that isn't there yet stays once it is
/// touched. If the list of ranges has no room for a part of a range, all of the range is kept.
pub fn hold(engine: &'static Engine, range: PageRange) {
    let _exclusive = engine.settled([range]);
    let held = |flags: Flags| flags.with(Flags::HELD);
    let next = |from| engine.pager.ranges.lock().at_or_after(from);
    let mut from = range.start;
    while let Some(known) = next(from).filter(|known| known.pages.start < range.end) {
        let part = known.pages.intersection(range);
        let is_noted = engine.pager.ranges.lock().update(part, held).is_ok();
        if !is_noted {
            engine.note(|ranges| ranges.update(known.pages, held));
        }
        // All of the range, not the part: the range goes on behind the part if the part was held before.
        from = known.pages.end;
    }
}

/// Locks all memory as `mlockall(flags)` does.
///
/// By itself the kernel would fill every mapping, the engine's tables and frames too. These are gigabytes,
/// and some of their pages are holes to the engine. The kernel therefore only marks the mappings
/// (MCL_ONFAULT), and the engine fills the program's known ranges.
pub fn mlockall(engine: &'static Engine, mut arguments: Arguments) -> isize {
    let asked = arguments[0] as u32;
    let has = |flag: u32| asked & flag != 0;
    if engine.membership.settings.refuses_mlockall != 0 {
        return EPERM;
    }
    arguments[0] |= if has(raw::MCL_CURRENT | raw::MCL_FUTURE) { raw::MCL_ONFAULT as usize } else { 0 };
    let before = {
        let _exclusive = engine.map.exclusive();
        let all = engine.all_locked.load(Ordering::Relaxed);
        if has(raw::MCL_CURRENT) {
            engine.all_locked.store(1, Ordering::Relaxed);
        }
        all
    };
    let result = pass_on(number::MLOCKALL, arguments);
    if result != 0 {
        engine.all_locked.store(before, Ordering::Relaxed);
        return result;
    }
    let future = match (has(raw::MCL_FUTURE), has(raw::MCL_ONFAULT)) {
        (true, false) => LOCK_AND_FILL,
        (true, true) => LOCK,
        (false, _) => 0,
    };
    engine.lock_future.store(future, Ordering::Relaxed);
    if has(raw::MCL_CURRENT) {
        mark_locked(engine, EVERYTHING, true);
        if !has(raw::MCL_ONFAULT) {
            fill_all(engine);
        }
    }
    result
}

/// Makes every known page resident. The caller holds no lock, because the pages come in through faults.
fn fill_all(engine: &'static Engine) {
    let mut from = PageIndex(0);
    while let Some(range) = { engine.pager.ranges.lock().at_or_after(from) } {
        fill(engine, range.pages, range.flags);
        from = range.pages.end;
    }
}

/// Makes every page of a writable `range` resident. In a protected range, only pages that have been used come
/// in. The caller holds no lock.
pub fn fill(engine: &'static Engine, range: PageRange, flags: Flags) {
    if flags.has(Flags::PROTECTED) {
        // A reservation may span terabytes, so its untouched pages stay unfilled.
        let mut rest = range;
        while let Some((page, _)) = engine.pager.table().next(rest, Walk::Used) {
            rest.start = PageIndex(page.0 + 1);
            engine.bring_in(PageRange::new(page, rest.start), true);
        }
        return;
    }
    engine.bring_in(range, true);
    // SAFETY: MADV_POPULATE_WRITE discards no page and changes no byte.
    let _ = unsafe { memory::advise(range, raw::MADV_POPULATE_WRITE) };
}

/// Unlocks all memory as `munlockall()` does.
pub fn munlockall(engine: &'static Engine, arguments: Arguments) -> isize {
    let result = pass_on(number::MUNLOCKALL, arguments);
    unlock_all(engine);
    result
}

fn unlock_all(engine: &'static Engine) {
    mark_locked(engine, EVERYTHING, false);
    engine.lock_future.store(0, Ordering::Relaxed);
    engine.all_locked.store(0, Ordering::Relaxed);
}
