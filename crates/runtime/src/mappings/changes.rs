//! System calls by which the program changes its memory: mmap, munmap, mremap, mprotect, brk. (Advice is in
//! [`advice`], locking in [`locked`].)
//!
//! These functions are called instead of libc's, in threads of the program, on a stack of Farpage's and with
//! signals blocked (see the preload library). Each function makes the system call itself, under the exclusive
//! map lock. The call is made as the program asked for it, except for what would pass the budget or can't be
//! followed. What the engine knows changes together with the mapping. The result is the kernel's, or what an
//! older kernel would return.

use crate::engine::Engine;
use crate::mappings::advice::{self, advise_by_list, madvise};
use crate::mappings::locked::{self, LOCK_AND_FILL, ON_TOUCH};
use crate::mappings::map_lock::Exclusive;
use crate::mappings::segments;
use core::sync::atomic::Ordering;
use farpage_core::stats::{Counter, Gauge};
use farpage_core::sync;
use farpage_core::table::ranges::{Flags, Range, Ranges, TooMany};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_fault::segv::ByProtection;
use farpage_os::errno::returned::{EFAULT, EINVAL, ENOMEM, ENOSYS};
use farpage_os::memory;
use farpage_os::proc::Mapping;
use farpage_os::sys::{self, number};
use linux_raw_sys::general as raw;

/// The arguments of a system call.
pub type Arguments = [usize; 6];

const PROTECTION: usize = (raw::PROT_READ | raw::PROT_WRITE | raw::PROT_EXEC) as usize;
/// Every page that we can manage.
pub const EVERYTHING: PageRange = PageRange::new(PageIndex(0), PageIndex(1 << 35));
/// The result of a call that found a hole in its range. Some calls go on behind the hole.
pub(crate) const HOLE: isize = ENOMEM;
const READ_WRITE: usize = (raw::PROT_READ | raw::PROT_WRITE) as usize;

/// Makes a call with the program's own arguments.
pub(crate) fn pass_on(number: usize, arguments: Arguments) -> isize {
    // SAFETY: the program asked for exactly this call. The rest of this file follows what the call does to
    // managed memory.
    unsafe { sys::call(number, arguments) }
}

pub(super) const fn is_aligned(address: usize) -> bool {
    address.is_multiple_of(PAGE_BYTES)
}

/// Returns the pages of an argument pair. None if the pair overflows, because the kernel refuses it then.
pub fn pages_of(address: usize, bytes: usize) -> Option<PageRange> {
    address.checked_add(bytes)?.checked_add(PAGE_BYTES)?;
    Some(PageRange::covering(address, bytes))
}

impl Engine {
    /// Takes the exclusive map lock while no page of `ranges` is being moved.
    pub(crate) fn settled<const N: usize>(&self, ranges: [PageRange; N]) -> Exclusive<'_> {
        loop {
            let exclusive = self.map.exclusive();
            match ranges.iter().try_for_each(|range| self.pager.quiet(*range)) {
                Ok(()) => return exclusive,
                Err(unsettled) => {
                    drop(exclusive);
                    sync::wait(self.pager.settled_word(), unsettled.seen);
                }
            }
        }
    }

    pub(super) fn touches(&self, range: PageRange) -> bool {
        self.pager.ranges.lock().touches(range)
    }

    /// Drops all that is known of `range`, which the kernel has unmapped.
    fn forget(&self, range: PageRange) {
        self.pager.discard(range);
        self.protections.inspect(|protections| protections.forget(range));
        let ranges = self.pager.ranges.lock();
        let mut from = range.start;
        while let Some(known) = ranges.at_or_after(from).filter(|known| known.pages.start < range.end) {
            if known.flags.has(Flags::REGISTERED) {
                let part = known.pages.intersection(range);
                self.pager.stats().gauge_sub(Gauge::ManagedBytes, part.bytes() as u64);
            }
            from = known.pages.end;
        }
        drop(ranges);
        self.note(|ranges| ranges.remove(range));
    }

    /// Changes the list of ranges. Ends the program if the list is full. Otherwise the engine would take
    /// later memory there for what was there before.
    pub(super) fn note(&self, change: impl FnOnce(&mut Ranges<'_>) -> Result<(), TooMany>) {
        let noted = change(&mut self.pager.ranges.lock());
        if noted.is_err() {
            out_of_tables(self);
        }
    }

    /// Prepares for new memory at `range`. An earlier mapping may still be known there, if a call unmapped it
    /// and failed later, or if the engine couldn't see the call. The pages of that mapping would be taken for
    /// the new ones, so they are forgotten. Returns whether anything was known there.
    pub(super) fn forget_what_was(&self, range: PageRange) -> bool {
        let was_there = self.touches(range);
        if was_there {
            self.forget(range);
        }
        was_there
    }

    /// Called when a call has failed that unmaps what is in `range` first. Before Linux 6.17 mremap checks
    /// the rest only after that. Forgets the known parts that are no longer mapped. Most calls that fail
    /// leave everything mapped.
    pub(super) fn forget_if_gone(&self, range: PageRange) {
        let known = |from| self.pager.ranges.lock().at_or_after(from);
        let is_gone = |page| memory::mapped_before_a_hole(PageRange::of(page, 1)).is_empty();
        let mut from = range.start;
        while let Some(found) = known(from).filter(|found| found.pages.start < range.end) {
            from = found.pages.end;
            let part = found.pages.intersection(range);
            if is_gone(part.start) && is_gone(PageIndex(part.end.0 - 1)) {
                self.forget(part);
            }
        }
    }

    /// Adds a new anonymous private mapping to the list. Takes it over if the engine is active and the
    /// mapping is big enough.
    fn adopt(&self, range: PageRange, flags: Flags) {
        if range.end > EVERYTHING.end {
            // The table has no entries for these addresses. The kernel gives them out only with five levels
            // of page tables, and only to a program that asks for them.
            return;
        }
        if self.pager.ranges.lock().insert(range, flags).is_ok() && self.is_active() {
            self.take_over(range.start, |range| self.registrar.ask(range));
        }
    }
}

/// Returns the flags that a protection means.
const fn flags_for(protection: usize) -> Flags {
    match protection & PROTECTION {
        READ_WRITE => Flags::NONE,
        other if other & raw::PROT_EXEC as usize != 0 => Flags::FOREIGN,
        _ => Flags::PROTECTED,
    }
}

/// Returns the flags of a mapping that can't be both read and written, or that can be executed: PROTECTED or
/// FOREIGN.
pub const fn flags_of(mapping: &Mapping) -> Flags {
    if mapping.is_executable { Flags::FOREIGN } else { Flags::PROTECTED }
}

/// `mmap(address, bytes, protection, flags, fd, offset)`.
pub fn mmap(engine: &'static Engine, mut arguments: Arguments) -> isize {
    let [address, bytes, protection, flags, ..] = arguments;
    let flag = |bit: u32| flags & bit as usize != 0;
    let is_private = flags & raw::MAP_TYPE as usize == raw::MAP_PRIVATE as usize;
    let unmanaged = raw::MAP_STACK | raw::MAP_GROWSDOWN | raw::MAP_HUGETLB;
    let is_ours = flag(raw::MAP_ANONYMOUS) && is_private && !flag(unmanaged);
    let replaces = flag(raw::MAP_FIXED) && !flag(raw::MAP_FIXED_NOREPLACE);
    // Without MAP_FIXED an address is a hint, and the kernel doesn't mind one that can't be.
    let nowhere = PageRange::of(PageIndex(0), 0);
    let replaced = match pages_of(address, bytes) {
        Some(wanted) if replaces && is_aligned(address) => wanted,
        None if replaces => return pass_on(number::MMAP, arguments),
        _ => nowhere,
    };
    if is_ours && (flag(raw::MAP_LOCKED) || engine.lock_future.load(Ordering::Relaxed) == LOCK_AND_FILL) {
        engine.prepare_to_fill(bytes as u64);
    }
    let exclusive = engine.settled([replaced]);
    // Populating is a hint. Managed memory would pass the budget before anything can be registered. Other
    // memory is filled below, because the kernel may read all of a file.
    let populates = flag(raw::MAP_POPULATE) && !flag(raw::MAP_NONBLOCK) && !is_ours;
    if populates || is_ours && (engine.is_active() || bytes as u64 > engine.headroom()) {
        arguments[3] &= !(raw::MAP_POPULATE as usize);
    }
    let result = pass_on(number::MMAP, arguments);
    let Ok(start) = sys::check(result) else {
        engine.forget_if_gone(replaced);
        return result;
    };
    let range = PageRange::covering(start, bytes);
    // The range includes what MAP_FIXED replaces.
    if engine.forget_what_was(range) {
        engine.pager.stats().count(Counter::MapChanges);
    }
    if is_ours {
        let known = flags_for(protection);
        let known = if flag(raw::MAP_LOCKED) { known.with(Flags::LOCKED) } else { known };
        adopt_new(engine, range, known, exclusive);
    } else {
        drop(exclusive);
        if populates {
            populate(range, protection, is_private);
        }
    }
    result
}

/// Fills a mapping as MAP_POPULATE does. Without any lock: other threads' faults don't wait for the file.
fn populate(range: PageRange, protection: usize, is_private: bool) {
    let can = |bit: u32| protection & bit as usize != 0;
    let advice = match (can(raw::PROT_WRITE) && is_private, can(raw::PROT_READ | raw::PROT_EXEC)) {
        (true, _) => raw::MADV_POPULATE_WRITE,
        (false, true) => raw::MADV_POPULATE_READ,
        (false, false) => return,
    };
    // Linux before 5.14 doesn't know this advice. Then the hint isn't taken.
    //
    // SAFETY: populating changes no byte and discards no page.
    let _ = unsafe { memory::advise(range, advice) };
}

/// Adopts new memory. Locks it as well if all future memory is to be locked. Releases the map lock.
fn adopt_new(engine: &'static Engine, range: PageRange, flags: Flags, exclusive: Exclusive<'_>) {
    let lock_future = engine.lock_future.load(Ordering::Relaxed);
    engine.adopt(range, if lock_future == 0 { flags } else { flags.with(Flags::LOCKED) });
    drop(exclusive);
    if lock_future == LOCK_AND_FILL {
        locked::fill(engine, range, flags);
    }
}

/// `munmap(address, bytes)`.
pub fn munmap(engine: &'static Engine, arguments: Arguments) -> isize {
    let [address, bytes, ..] = arguments;
    let Some(range) = pages_of(address, bytes).filter(|_| is_aligned(address)) else {
        return pass_on(number::MUNMAP, arguments);
    };
    let _exclusive = engine.settled([range]);
    let result = pass_on(number::MUNMAP, arguments);
    if result == 0 && engine.touches(range) {
        engine.forget(range);
        engine.pager.stats().count(Counter::MapChanges);
    }
    result
}

/// `mremap(old_address, old_bytes, new_bytes, flags, new_address)`.
pub fn mremap(engine: &'static Engine, mut arguments: Arguments) -> isize {
    let [address, old_bytes, new_bytes, flags, ..] = arguments;
    let is_fixed = flags & raw::MREMAP_FIXED as usize != 0;
    if !is_fixed {
        // Without MREMAP_FIXED the argument is at most a hint, or whatever was in the register.
        arguments[4] = 0;
    }
    let new_address = arguments[4];
    let (Some(old), Some(new)) = (pages_of(address, old_bytes), pages_of(new_address, new_bytes)) else {
        return pass_on(number::MREMAP, arguments);
    };
    if !is_aligned(address) || (is_fixed && !is_aligned(new_address)) {
        return pass_on(number::MREMAP, arguments);
    }
    let target = if is_fixed { new } else { PageRange::of(old.start, 0) };
    // Two ranges are settled, not one that spans both: pages between them may move.
    let exclusive = engine.settled([old, target]);
    let may_move = flags & raw::MREMAP_MAYMOVE as usize != 0;
    if is_fixed && may_move {
        // Since Linux 6.17 this call moves several mappings at once. What the engine moves is of one kind.
        let moves = PageRange::of(old.start, old.count().min(new.count()));
        if !engine.is_of_one_kind(moves) || engine.is_partly_registered(moves) {
            return EFAULT;
        }
        // If the source has a hole, the target keeps its mapping and its pages opposite the hole. Older
        // kernels refuse a call with a hole in its source.
        if engine.touches(target) && memory::mapped_before_a_hole(moves) != moves {
            return EFAULT;
        }
        if new.end > EVERYTHING.end && engine.touches(moves) {
            return ENOMEM;
        }
    }
    let known = engine.pager.ranges.lock().find(old.start);
    let has = |flag| known.is_some_and(|known| known.flags.has(flag));
    // The kernel populates what a locked mapping grows by. The kernel would wait for our handler threads, and
    // the handler threads wait for the map lock. So the mapping is unlocked now, and locked again after the
    // map lock is released.
    let relock = has(Flags::REGISTERED) && has(Flags::LOCKED);
    if relock {
        pass_on(number::MUNLOCK, [address, old_bytes, 0, 0, 0, 0]);
    }
    let result = match engine.protections {
        Some(protections) if has(Flags::REGISTERED) => move_joined(engine, protections, arguments, old),
        None if has(Flags::REGISTERED) => {
            engine.registrar.while_moving(engine, old, || pass_on(number::MREMAP, arguments))
        }
        _ => pass_on(number::MREMAP, arguments),
    };
    moved_or_resized(engine, result, arguments, known, (old, target));
    drop(exclusive);
    if relock {
        let (place, bytes) = sys::check(result).map_or((address, old_bytes), |start| (start, new_bytes));
        if has(Flags::ON_TOUCH) {
            pass_on(number::MLOCK2, [place, bytes, ON_TOUCH, 0, 0, 0]);
        } else {
            engine.bring_in(PageRange::covering(place, bytes), true);
            pass_on(number::MLOCK, [place, bytes, 0, 0, 0, 0]);
        }
    }
    result
}

/// Does mremap where a page that is out may not be touched. The kernel moves one mapping, and closed pages
/// split the program's mapping into pieces. So the pieces are joined first.
fn move_joined(engine: &Engine, protections: &ByProtection, arguments: Arguments, old: PageRange) -> isize {
    let [address, _, new_bytes, flags, ..] = arguments;
    // The count is in whole pages, as in the kernel.
    let count = PageRange::covering(address, new_bytes).count();
    let grows = count > old.count();
    let stays = flags & (raw::MREMAP_FIXED | raw::MREMAP_DONTUNMAP) as usize == 0 && !grows;
    if stays || !engine.is_wholly_registered(old) {
        return pass_on(number::MREMAP, arguments);
    }
    let moves = PageRange::of(old.start, count.min(old.count()));
    if !engine.is_of_one_kind(moves) {
        return EFAULT;
    }
    engine.join(protections, old);
    let has = |flag: u32| flags & flag as usize != 0;
    let may_move = has(raw::MREMAP_MAYMOVE);
    let place = PageRange::covering(arguments[4], new_bytes);
    let overlaps = has(raw::MREMAP_FIXED) && !place.intersection(old).is_empty();
    // A kernel since 6.17 moves several mappings with that flag. After a failure midway nothing would show
    // which mappings the kernel has moved.
    let by_us = has(raw::MREMAP_DONTUNMAP) && may_move && count == old.count() && !overlaps;
    let result = match if by_us { EFAULT } else { pass_on(number::MREMAP, arguments) } {
        EFAULT if may_move => move_pieces(engine, protections, arguments, (old, moves)),
        // A mapping in pieces can't grow in place.
        EFAULT => ENOMEM,
        result => result,
    };
    if result < 0 && !is_parted_again(protections, old, moves) {
        out_of_tables(engine);
    }
    result
}

/// Undoes `join` after a call that failed. False if that can't be done, or if the call has moved some of
/// `moves`. Kernels since 6.17 move several mappings, and stop at the first one that fails. Older kernels
/// have unmapped what the call would have shrunk `old` by.
fn is_parted_again(protections: &ByProtection, old: PageRange, moves: PageRange) -> bool {
    let rest = memory::mapped_before_a_hole(PageRange::new(moves.end, old.end));
    memory::mapped_before_a_hole(moves) == moves
        && protections.part(moves).is_ok()
        && protections.part(rest).is_ok()
}

/// Does mremap for mappings that don't become one again, because a call uses part of them or a fork has kept
/// them apart. Each mapping is moved by itself. Nothing is copied, because a device may have pinned a page
/// and writes to that page.
fn move_pieces(
    engine: &Engine,
    protections: &ByProtection,
    arguments: Arguments,
    (old, moves): (PageRange, PageRange),
) -> isize {
    let [_, _, new_bytes, flags, new_address, _] = arguments;
    let has = |flag: u32| flags & flag as usize != 0;
    let is_wiped = engine.is_wholly(moves, Flags::WIPE_ON_FORK);
    let (place, fixed) = if has(raw::MREMAP_FIXED) { (new_address, raw::MAP_FIXED) } else { (0, 0) };
    let result = map_closed(place, new_bytes, fixed, is_wiped);
    let Ok(start) = sys::check(result) else { return result };
    let new = PageRange::covering(start, new_bytes);
    if !move_each(moves, new.start) {
        if memory::mapped_before_a_hole(moves) != moves {
            out_of_tables(engine);
        }
        pass_on(number::MUNMAP, [start, new_bytes, 0, 0, 0, 0]);
        return ENOMEM;
    }
    protections.join(new);
    let rest = PageRange::new(moves.end, old.end);
    if has(raw::MREMAP_DONTUNMAP) {
        let again = map_closed(moves.start.address(), moves.bytes(), raw::MAP_FIXED, is_wiped);
        if again < 0 {
            out_of_tables(engine);
        }
    } else if !rest.is_empty() {
        pass_on(number::MUNMAP, [rest.start.address(), rest.bytes(), 0, 0, 0, 0]);
    }
    result
}

/// Maps new memory that nobody may touch, with the advice that registered memory has.
fn map_closed(place: usize, bytes: usize, fixed: u32, is_wiped: bool) -> isize {
    let kind = (raw::MAP_PRIVATE | raw::MAP_ANONYMOUS | raw::MAP_NORESERVE | fixed) as usize;
    let result = pass_on(number::MMAP, [place, bytes, raw::PROT_NONE as usize, kind, usize::MAX, 0]);
    let Ok(start) = sys::check(result) else { return result };
    let new = PageRange::covering(start, bytes);
    // SAFETY: the advice only keeps new memory from children, like all registered memory. What moves there
    // brings its own advice.
    let kept = unsafe { memory::advise(new, raw::MADV_DONTFORK) };
    let wiped = match is_wiped {
        // SAFETY: the advice only changes what children find in the new memory, as the program asked for the
        // old memory.
        true => unsafe { memory::advise(new, raw::MADV_WIPEONFORK) },
        false => Ok(()),
    };
    if kept.and(wiped).is_err() {
        pass_on(number::MUNMAP, [start, bytes, 0, 0, 0, 0]);
        return ENOMEM;
    }
    result
}

/// Moves each of the kernel's mappings in `pages`. False if one move failed. Then `pages` has holes where
/// mappings were moved before.
fn move_each(pages: PageRange, to: PageIndex) -> bool {
    const HOW: usize = (raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED) as usize;
    let (mut done, mut wanted) = (0, pages.count());
    while done < pages.count() {
        let count = wanted.min(pages.count() - done);
        let (from, bytes) = (pages.start.plus(done).address(), count as usize * PAGE_BYTES);
        match pass_on(number::MREMAP, [from, bytes, bytes, HOW, to.plus(done).address(), 0]) {
            // There is more than one mapping, which only some calls of newer kernels move.
            EFAULT if count > 1 => wanted = count / 2,
            result if result < 0 => return false,
            _ => (done, wanted) = (done + count, count * 2),
        }
    }
    true
}

/// Updates what the engine knows after an mremap.
fn moved_or_resized(
    engine: &'static Engine,
    result: isize,
    arguments: Arguments,
    known: Option<Range>,
    (old, target): (PageRange, PageRange),
) {
    let [address, _, new_bytes, flags, ..] = arguments;
    let old_stays = flags & raw::MREMAP_DONTUNMAP as usize != 0;
    let Ok(start) = sys::check(result) else {
        // A call that shrinks unmaps the old mapping's end before it checks the rest.
        let kept = PageRange::covering(address, new_bytes).count().min(old.count());
        engine.forget_if_gone(PageRange::new(old.start.plus(kept), old.end));
        return engine.forget_if_gone(target);
    };
    let moved_to = PageRange::covering(start, new_bytes);
    if engine.touches(target) {
        engine.forget(target);
    }
    let Some(known) = known else { return unknown_moved_or_resized(engine, old, moved_to, old_stays) };
    engine.pager.stats().count(Counter::MapChanges);
    // Addresses that the kernel knows don't move along, and new memory has none.
    let flags = known.flags.without(Flags::HELD);
    if start == address {
        resized_in_place(engine, old, moved_to, flags);
    } else {
        moved(engine, old, moved_to, flags, old_stays);
    }
}

/// Does the same for a mapping whose first page isn't known. Known memory may lie further on, and the call
/// has unmapped it. A known range without a mapping would end the next fork's child.
fn unknown_moved_or_resized(engine: &Engine, old: PageRange, new: PageRange, old_stays: bool) {
    let border = old.end.min(new.end);
    let (gone, come) = match (new.start == old.start, old_stays) {
        (true, _) => (PageRange::new(border, old.end), PageRange::new(border, new.end)),
        (false, true) => (PageRange::of(old.end, 0), new),
        (false, false) => (old, new),
    };
    for range in [gone, come] {
        if engine.forget_what_was(range) {
            engine.pager.stats().count(Counter::MapChanges);
        }
    }
}

fn resized_in_place(engine: &'static Engine, old: PageRange, new: PageRange, flags: Flags) {
    if new.end < old.end {
        engine.forget(PageRange::new(new.end, old.end));
    } else if new.end > old.end {
        // The mapping may have been joined for the call.
        if engine.protections.is_some_and(|protections| protections.part(old).is_err()) {
            out_of_tables(engine);
        }
        // The kernel's mapping grew, and the registered part grew with it.
        let grown = PageRange::new(old.end, new.end);
        engine.forget_what_was(grown);
        if flags.has(Flags::REGISTERED) {
            let last = PageIndex(old.end.0 - 1);
            let noted = engine.protections.map_or(Ok(()), |protections| protections.grown(grown, last));
            if engine.attach_leaves(grown).and(noted).is_err() {
                out_of_tables(engine);
            }
            engine.pager.stats().gauge_add(Gauge::ManagedBytes, grown.bytes() as u64);
            note_registered(engine, grown, flags);
        } else {
            engine.adopt(grown, flags);
        }
    }
}

fn moved(engine: &'static Engine, old: PageRange, new: PageRange, flags: Flags, old_stays: bool) {
    engine.forget_what_was(new);
    if !flags.has(Flags::REGISTERED) {
        if !old_stays {
            engine.forget(old);
        }
        return engine.adopt(new, flags);
    }
    if engine.attach_leaves(new).is_err() {
        out_of_tables(engine);
    }
    let count = old.count().min(new.count());
    engine.pager.remap(PageRange::of(old.start, count), new.start);
    if let Some(protections) = engine.protections {
        if protections.moved(old.start, count, new).is_err() {
            out_of_tables(engine);
        }
        protections.vacate(old);
    }
    if !old_stays {
        engine.forget(old);
    }
    // The kernel has moved the registration along (EVENT_REMAP).
    note_registered(engine, new, flags);
    engine.pager.stats().gauge_add(Gauge::ManagedBytes, new.bytes() as u64);
}

/// Adds a registered range to the list. The engine wouldn't hear that a registered range outside of the list
/// is unmapped.
fn note_registered(engine: &Engine, range: PageRange, flags: Flags) {
    engine.note(|ranges| ranges.insert(range, flags));
}

/// Ends the program, because some of its memory can't be reached any more.
fn out_of_tables(engine: &Engine) -> ! {
    engine.stop_program(crate::session::StopReason::Tables)
}

/// `mprotect(address, bytes, protection)`, and `pkey_mprotect` with a key as fourth argument.
pub fn mprotect(engine: &'static Engine, call: usize, arguments: Arguments) -> isize {
    let [address, bytes, protection, ..] = arguments;
    let Some(range) = pages_of(address, bytes).filter(|_| is_aligned(address)) else {
        return pass_on(call, arguments);
    };
    let _exclusive = engine.map.exclusive();
    let result = match engine.protections {
        Some(protections) if engine.is_active() => protect_parts(engine, protections, call, arguments),
        // The kernel answers EINVAL before it changes anything.
        _ => Some(pass_on(call, arguments)).filter(|result| *result != EINVAL),
    };
    let Some(result) = result else { return EINVAL };
    if !engine.touches(range) {
        return result;
    }
    let after = match result {
        0 => flags_for(protection),
        _ => Flags::PROTECTED, // Perhaps half done: take nothing out of it any more.
    };
    // A call without a key leaves the memory's key as it is.
    let key = Some(arguments[3] as u32).filter(|key| call == number::PKEY_MPROTECT && *key != u32::MAX);
    let keyed = |f: Flags| match key {
        Some(0) if result == 0 => f.without(Flags::KEYED),
        Some(1..) => f.with(Flags::KEYED),
        _ => f,
    };
    let plain = |f: Flags| f.without(Flags::PROTECTED).without(Flags::FOREIGN);
    engine.note(|ranges| ranges.update(range, |f| keyed(plain(f).with(after))));
    if after == Flags::NONE && engine.is_active() {
        engine.take_over_all(range, |range| engine.registrar.ask(range));
    }
    result
}

/// Does mprotect where a page that is out may not be touched. In registered memory the program's protection
/// is only noted. None if the call can't be done, and nothing was done.
fn protect_parts(
    engine: &Engine,
    protections: &ByProtection,
    call: usize,
    arguments: Arguments,
) -> Option<isize> {
    let [address, bytes, protection, key, ..] = arguments;
    let range = PageRange::covering(address, bytes);
    if engine.next_with(range, Flags::REGISTERED).is_none() {
        return Some(pass_on(call, arguments)).filter(|result| *result != EINVAL);
    }
    /// Has no meaning on this machine.
    const PROT_SEM: usize = 8;
    if protection & !(PROTECTION | PROT_SEM) != 0 || call == number::PKEY_MPROTECT && key as u32 != u32::MAX {
        // A page would lose its key whenever it goes out.
        return None;
    }
    Some(in_parts(engine, range, Flags::REGISTERED, |part, is_registered| {
        if !is_registered {
            return pass_on(call, [part.start.address(), part.bytes(), protection, key, 0, 0]);
        }
        protections.allow(part, protection & PROTECTION).map_or_else(|errno| -(errno.0 as isize), |()| 0)
    }))
}

/// Calls `change` for each part of `range` whose ranges have `flag`, and for each part between these. Stops
/// when `change` returns a value other than 0, and returns that value.
pub(super) fn in_parts(
    engine: &Engine,
    range: PageRange,
    flag: Flags,
    mut change: impl FnMut(PageRange, bool) -> isize,
) -> isize {
    let mut from = range.start;
    while from < range.end {
        let rest = PageRange::new(from, range.end);
        let next = engine.next_with(rest, flag).unwrap_or(PageRange::of(range.end, 0));
        for (part, has_it) in [(PageRange::new(from, next.start), false), (next, true)] {
            let result = if part.is_empty() { 0 } else { change(part, has_it) };
            if result != 0 {
                return result;
            }
        }
        from = next.end;
    }
    0
}

/// Does the same for calls that go on behind holes, and report the holes at the end.
pub(super) fn in_parts_over_holes(
    engine: &Engine,
    range: PageRange,
    flag: Flags,
    mut change: impl FnMut(PageRange, bool) -> isize,
) -> isize {
    let mut holes = 0;
    let result = in_parts(engine, range, flag, |part, has_it| match change(part, has_it) {
        HOLE => {
            holes = HOLE;
            0
        }
        result => result,
    });
    if result == 0 { holes } else { result }
}

/// `brk(address)`: makes the kernel's call, and returns the break as it is afterwards.
pub fn brk(engine: &'static Engine, arguments: Arguments) -> isize {
    let break_now = || pass_on(number::BRK, [0; 6]) as usize;
    let end_page = |address: usize| PageIndex::of_address(address + PAGE_BYTES - 1);
    let wanted = arguments[0];
    let (before, shrinks, exclusive) = loop {
        let before = break_now();
        if wanted == 0 || wanted == before {
            return pass_on(number::BRK, arguments);
        }
        let shrinks = PageRange::new(end_page(wanted), end_page(before));
        let exclusive = engine.settled([shrinks]);
        // Another thread may have moved the break while this one waited. The memory that the other thread got
        // would be taken for new memory.
        if break_now() == before {
            break (before, shrinks, exclusive);
        }
    };
    let after = pass_on(number::BRK, arguments);
    if after as usize != wanted {
        return after;
    }
    if wanted < before {
        engine.forget(shrinks);
        engine.pager.stats().count(Counter::MapChanges);
    } else {
        let grown = PageRange::new(end_page(before), end_page(wanted));
        if !grown.is_empty() {
            engine.forget_what_was(grown);
            adopt_new(engine, grown, Flags::NONE, exclusive);
        }
    }
    after
}

/// Makes a call for one of our hooks. No handler stops that call to see to its memory.
pub fn by_hook(engine: &'static Engine, call: usize, arguments: Arguments) -> isize {
    by_number(engine, call, arguments).unwrap_or_else(|| match call {
        number::PROCESS_MADVISE => advise_by_list(engine, arguments),
        _ => pass_on(call, arguments),
    })
}

/// Makes a call by number, for libc's `syscall`. Calls that change memory go to their functions. None for
/// other calls.
pub fn by_number(engine: &'static Engine, call: usize, arguments: Arguments) -> Option<isize> {
    Some(match call {
        number::MMAP => mmap(engine, arguments),
        number::MUNMAP => munmap(engine, arguments),
        number::MREMAP => mremap(engine, arguments),
        number::MADVISE => madvise(engine, arguments),
        number::MPROTECT | number::PKEY_MPROTECT => mprotect(engine, call, arguments),
        number::MLOCK | number::MLOCK2 => locked::mlock(engine, call, arguments),
        number::MUNLOCK => locked::munlock(engine, arguments),
        number::MLOCKALL => locked::mlockall(engine, arguments),
        number::MUNLOCKALL => locked::munlockall(engine, arguments),
        number::BRK => brk(engine, arguments),
        number::PROCESS_MADVISE => return advice::process_madvise(arguments),
        number::SHMAT => segments::attach(engine, arguments),
        // Sealed memory that is out could not be opened any more, and sealed read-only memory could not be
        // kept from children. So the answer is that of a kernel without mseal.
        number::MSEAL if engine.touches(pages_of(arguments[0], arguments[1])?) => ENOSYS,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
