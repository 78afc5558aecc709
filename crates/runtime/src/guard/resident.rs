//! Brings in the memory that the kernel is about to use, and holds it until the call is done.
//!
//! Runs in threads of the program, in `signal` and `segv` mode. A page that is out is brought in as for a
//! fault, by this thread or by an engine thread.
// UNSAFETY: words of the program's are read where they are.

use super::buffers::{Buffer, Memory};
use super::calls::How;
use super::errands::Wanted;
use super::rooms::{self, Level, Room};
use crate::engine::{Engine, FaultMode};
use crate::mappings::changes::pages_of;
use crate::mappings::locked;
use core::cell::Cell;
use farpage_core::pager::Access;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_fault::Fault;
use farpage_fault::signal::Handover;
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::peek;

/// Tries after which a page can't be had: its mapping is gone, or another thread discards it again and again.
const TRIES_MAX: u32 = 1000;
/// Nanoseconds of further tries in a thread that is also woken for the pages of other threads. The number of
/// tries by itself says nothing there. A slow disk may take half a minute.
const PATIENCE_NS: u64 = 40_000_000_000;
/// Nanoseconds between two of these further tries.
const PAUSE_NS: u64 = 1_000_000;

impl Engine {
    /// Brings each managed page of `pages` into the program's memory, writable if `write`. A page may be out
    /// again at once, unless it is held. Runs in a thread of the program, with no lock held.
    pub fn bring_in(&'static self, pages: PageRange, write: bool) {
        // Without a handover the kernel waits for Farpage.
        let Some(handover) = self.handover else { return };
        let mut from = pages.start;
        while from < pages.end {
            let Some(part) = self.next_with(PageRange::new(from, pages.end), Flags::REGISTERED) else {
                return;
            };
            for page in part.start.0..part.end.0 {
                self.bring_page(PageIndex(page), write, PATIENCE_NS, |fault| {
                    self.serve_fault(handover, fault)
                });
            }
            from = part.end;
        }
    }

    /// Returns whether `page` is in managed memory.
    pub fn is_registered(&self, page: PageIndex) -> bool {
        self.pager.ranges.lock().find(page).is_some_and(|range| range.flags.has(Flags::REGISTERED))
    }

    /// Returns whether all known memory in `pages` is marked to stay in memory. Memory that isn't managed yet
    /// counts, too, since it may be managed later.
    fn is_kept(&self, pages: PageRange) -> bool {
        let ranges = self.pager.ranges.lock();
        let mut from = pages.start;
        while let Some(range) = ranges.at_or_after(from).filter(|range| range.pages.start < pages.end) {
            if !range.flags.has(Flags::HELD) {
                return false;
            }
            from = range.pages.end;
        }
        true
    }

    /// Has a fault served, by this thread or by an engine thread.
    pub fn serve_fault(&'static self, handover: &Handover, fault: Fault) {
        handover.serve(fault, |fault| self.direct.serve(self, fault));
    }

    /// Has one page brought in by `serve`, as often as it takes. Gives up after `TRIES_MAX` tries and another
    /// `patience_ns`.
    pub(crate) fn bring_page(
        &self,
        page: PageIndex,
        write: bool,
        patience_ns: u64,
        mut serve: impl FnMut(Fault),
    ) {
        let mut give_up_ns = u64::MAX;
        for tries in 0_u32.. {
            if tries == TRIES_MAX {
                give_up_ns = now_ns() + patience_ns;
            } else if tries > TRIES_MAX {
                if now_ns() > give_up_ns {
                    return;
                }
                sleep_ns(PAUSE_NS);
            }
            // `None` while the page is just being registered.
            let word = self.pager.table().get(page).map(|place| place.entry().load());
            let access = match word.map(|word| (word.state(), word.is_locked())) {
                Some((State::Lost(_), _)) => return,
                Some((state @ State::Resident { .. }, false)) => {
                    // A page that owns a slot may be write-protected, if it was to be copied out and stayed.
                    if !write || state.slot().is_none() {
                        return;
                    }
                    Access::WriteProtected
                }
                _ if write => Access::Write,
                _ => Access::Read,
            };
            if tries > 1 && !self.is_registered(page) {
                return;
            }
            serve(Fault { page, access });
        }
    }

    /// Serves one fault of a child's. Returns false if the page is lost, and the program is to hear of that.
    pub(super) fn serve_for(&self, fault: Fault, mut serve: impl FnMut(Fault)) -> bool {
        let is_lost = matches!(self.pager.state(fault.page), State::Lost(_));
        if !is_lost {
            serve(fault);
        }
        !is_lost
    }

    /// Returns how many bytes of a buffer lie in managed memory.
    pub fn managed_bytes(&self, address: usize, bytes: usize) -> usize {
        let Some(pages) = pages_of(address, bytes) else { return 0 };
        let (mut from, mut found) = (pages.start, 0);
        while from < pages.end {
            let Some(part) = self.next_with(PageRange::new(from, pages.end), Flags::REGISTERED) else {
                break;
            };
            found += part.bytes();
            from = part.end;
        }
        found
    }
}

/// The memory of one call, while it is made ready.
pub struct Guarding<'a> {
    engine: &'static Engine,
    level: &'a Level,
    /// The thread's stack pointer. The stack pointer's page is mapped, whether or not other pages are.
    stack_pointer: usize,
    /// Number of the page that was last found to be readable.
    readable: Cell<usize>,
    /// The room that a child of vfork uses, if one makes the call. An engine thread does the child's work.
    borrowed: Option<&'static Room>,
}

impl<'a> Guarding<'a> {
    /// Begins with a call of a thread that has this stack pointer.
    pub fn new(engine: &'static Engine, level: &'a Level, stack_pointer: usize) -> Guarding<'a> {
        let readable = Cell::new(stack_pointer / PAGE_BYTES);
        Guarding { engine, level, stack_pointer, readable, borrowed: rooms::borrowed(engine) }
    }

    fn is_readable(&self, address: usize) -> bool {
        let page = address / PAGE_BYTES;
        let known = self.readable.get() == page || peek::is_readable(address);
        if known {
            self.readable.set(page);
        }
        known
    }

    /// Writes where the kernel would have written, in memory that was reported. Returns false where the
    /// kernel would have failed.
    ///
    /// # Safety
    /// The program must expect the bytes at this address.
    pub unsafe fn write<const N: usize>(&self, address: usize, bytes: [u8; N]) -> bool {
        if address / PAGE_BYTES == self.stack_pointer / PAGE_BYTES
            && (address + N - 1) / PAGE_BYTES == self.stack_pointer / PAGE_BYTES
        {
            // SAFETY: the bytes are on the page of the thread's stack pointer, which is mapped, and the
            // program expects them there.
            unsafe { (address as *mut [u8; N]).write_unaligned(bytes) };
            return true;
        }
        // SAFETY: the caller's promise.
        unsafe { peek::write(address, &bytes) }
    }
}

impl Guarding<'_> {
    /// Has pages brought in for a child of vfork. The child takes no lock, and asks an engine thread only if
    /// it must.
    fn have_brought(&self, room: &Room, pages: PageRange, write: bool) {
        self.level.holder.hold(pages);
        // A thread that closes memory for a moment leaves held memory alone.
        let now = self.engine.map.wait_for_changes();
        if self.is_there(pages, write) {
            return;
        }
        // SAFETY: the room's thread waits, so the fields are its child's.
        let known = unsafe { &mut (*room.own.get()).not_ours };
        if known.1 == now && known.0.intersection(pages) == pages {
            return;
        }
        if !room.errand.ask(self.engine, Wanted::Pages(pages, write)) {
            // posix_spawn asks for the same stack more than a hundred times. Adjoining pages are therefore
            // kept as one range.
            let touches = known.1 == now && known.0.start <= pages.end && pages.start <= known.0.end;
            let start = if touches { known.0.start.min(pages.start) } else { pages.start };
            let end = if touches { known.0.end.max(pages.end) } else { pages.end };
            *known = (PageRange::new(start, end), now);
        }
    }

    /// Returns whether the table alone says that nothing has to be done. Takes no lock, not even the table's.
    /// `Table::get` adds an unknown page under a lock, which a child that is killed there would keep for
    /// ever.
    fn is_there(&self, pages: PageRange, write: bool) -> bool {
        let table = self.engine.pager.table();
        let is_there = |page| match table.known(page) {
            // Without a leaf, nothing was ever registered anywhere near. With a leaf, the page may be
            // missing.
            None => !table.has_leaf(page),
            Some(place) => {
                let word = place.entry().load();
                let state = word.state();
                state.is_resident() && (!write || state.slot().is_none()) && !word.is_locked()
            }
        };
        (pages.start.0..pages.end.0).all(|page| is_there(PageIndex(page)))
    }
}

impl Memory for Guarding<'_> {
    fn buffer(&mut self, buffer: Buffer) {
        let Some(pages) = pages_of(buffer.address, buffer.bytes) else { return };
        if let Some(room) = self.borrowed {
            return self.have_brought(room, pages, buffer.how != How::In);
        }
        // Memory that isn't registered yet counts, too, because it may be registered before the call is over.
        if !self.engine.pager.ranges.lock().touches(pages) {
            return;
        }
        if buffer.how == How::Stays && !self.engine.is_kept(pages) {
            locked::hold(self.engine, pages);
        }
        // Held before the look at whether the pages are there.
        self.level.holder.hold(pages);
        if self.engine.mode() == FaultMode::Segv {
            // A thread that closes memory for a moment (a fork) does so under the map lock, and leaves held
            // memory alone.
            self.engine.map.wait_for_changes();
        }
        self.engine.bring_in(pages, buffer.how != How::In);
    }

    fn word(&mut self, address: usize) -> Option<u64> {
        let is_one_page = address / PAGE_BYTES == (address + 7) / PAGE_BYTES;
        let there = if is_one_page { self.is_readable(address) } else { peek::is_readable(address) };
        // SAFETY: the kernel has just read there, and managed memory is held.
        there.then(|| unsafe { (address as *const u64).read_unaligned() })
    }
    fn is_own_process(&self, number: u32) -> bool {
        number == self.engine.process || rooms::of_thread(number).is_some()
    }
}
