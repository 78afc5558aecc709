//! Memory that the kernel is about to use is brought in, and stays until the call is done.
//!
//! In `signal` mode, in threads of the program: what is out is handed over to the engine, like a fault.
// UNSAFETY: words of the program's are read where they are.

use super::buffers::{Buffer, Memory};
use super::calls::How;
use super::rooms::{self, Level};
use crate::changes;
use crate::engine::Engine;
use core::cell::Cell;
use farpage_core::pager::Access;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_fault::Fault;
use farpage_fault::signal::Handover;
use farpage_os::peek;

/// After so many tries a page can't be had: its mapping is gone, or another thread discards it again and again.
const TRIES_MAX: u32 = 1000;

impl Engine {
    /// Sees to it that each page of `pages` that we manage is in the program's memory, to be written if `write`. It may be
    /// out again at once, unless it is held. In a thread of the program, with no lock held.
    pub fn bring_in(&'static self, pages: PageRange, write: bool) {
        if self.handover.is_none() {
            return; // The kernel waits for us.
        }
        let mut from = pages.start;
        while from < pages.end {
            let Some(part) = self.next_with(PageRange::new(from, pages.end), Flags::REGISTERED) else {
                return;
            };
            for page in part.start.0..part.end.0 {
                self.bring_page(PageIndex(page), write);
            }
            from = part.end;
        }
    }

    /// Whether `page` is in memory that we manage.
    pub fn is_registered(&self, page: PageIndex) -> bool {
        self.pager.ranges.lock().find(page).is_some_and(|range| range.flags.has(Flags::REGISTERED))
    }

    /// Whether all that we manage of `pages` stays in memory anyway.
    fn is_kept(&self, pages: PageRange) -> bool {
        let ranges = self.pager.ranges.lock();
        let mut from = pages.start;
        while let Some(range) = ranges.at_or_after(from).filter(|range| range.pages.start < pages.end) {
            if range.flags.has(Flags::REGISTERED) && !range.flags.has(Flags::HELD) {
                return false;
            }
            from = range.pages.end;
        }
        true
    }

    /// Has a fault served, here or by an engine thread.
    pub fn serve_fault(&'static self, handover: &Handover, fault: Fault) {
        handover.serve(fault, |fault| self.direct.serve(self, fault));
    }

    fn bring_page(&'static self, page: PageIndex, write: bool) {
        let Some(handover) = self.handover else { return };
        for tries in 0..TRIES_MAX {
            // None while it is just being registered.
            let word = self.pager.table().get(page).map(|place| place.entry().load());
            let access = match word.map(|word| (word.state(), word.is_locked())) {
                Some((State::Lost(_), _)) => return,
                Some((State::Resident { slot, .. }, false)) => {
                    // What owns a slot is write-protected.
                    if !write || slot.is_none() {
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
            self.serve_fault(handover, Fault { page, access });
        }
    }

    /// Bytes of a buffer that lie in memory that we manage.
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

/// The pages of a buffer; none if it doesn't lie in the address space.
fn pages_of(address: usize, bytes: usize) -> Option<PageRange> {
    address.checked_add(bytes)?.checked_add(PAGE_BYTES)?;
    Some(PageRange::covering(address, bytes))
}

/// One call's memory, being made ready.
pub struct Guarding<'a> {
    engine: &'static Engine,
    level: &'a Level,
    /// The thread's stack pointer: its page is mapped, whatever else isn't.
    stack_pointer: usize,
    /// The page that was last found to be readable.
    readable: Cell<usize>,
}

impl<'a> Guarding<'a> {
    /// For a call of a thread with this stack pointer.
    pub fn new(engine: &'static Engine, level: &'a Level, stack_pointer: usize) -> Guarding<'a> {
        Guarding { engine, level, stack_pointer, readable: Cell::new(stack_pointer / PAGE_BYTES) }
    }

    fn is_readable(&self, address: usize) -> bool {
        let page = address / PAGE_BYTES;
        let known = self.readable.get() == page || peek::is_readable(address);
        if known {
            self.readable.set(page);
        }
        known
    }

    /// Writes to where the kernel would have, in memory that was told of. False where it would have failed.
    ///
    /// # Safety
    /// The program must expect it.
    pub unsafe fn write<const N: usize>(&self, address: usize, bytes: [u8; N]) -> bool {
        if address / PAGE_BYTES == self.stack_pointer / PAGE_BYTES
            && (address + N - 1) / PAGE_BYTES == self.stack_pointer / PAGE_BYTES
        {
            // SAFETY: on the page that the thread's stack pointer is on, where the program wants it.
            unsafe { (address as *mut [u8; N]).write_unaligned(bytes) };
            return true;
        }
        // SAFETY: the caller's promise.
        unsafe { peek::write(address, &bytes) }
    }
}

impl Memory for Guarding<'_> {
    fn buffer(&mut self, buffer: Buffer) {
        let Some(pages) = pages_of(buffer.address, buffer.bytes) else { return };
        // Also what isn't registered yet: it may be before the call is over.
        if !self.engine.pager.ranges.lock().touches(pages) {
            return;
        }
        if buffer.how == How::Stays && !self.engine.is_kept(pages) {
            changes::hold(self.engine, pages);
        }
        // Before it is looked at whether it is there.
        self.level.holder.hold(pages);
        if self.engine.protections.is_some() {
            // Whoever closes memory for a moment (a fork) does it under the map lock, and leaves alone what is held.
            self.engine.map.wait_for_changes();
        }
        self.engine.bring_in(pages, buffer.how != How::In);
    }

    fn word(&mut self, address: usize) -> Option<u64> {
        let is_one_page = address / PAGE_BYTES == (address + 7) / PAGE_BYTES;
        let there = if is_one_page { self.is_readable(address) } else { peek::is_readable(address) };
        // SAFETY: the kernel has just read there, and what is ours is held.
        there.then(|| unsafe { (address as *const u64).read_unaligned() })
    }
    fn is_own_process(&self, number: u32) -> bool {
        number == self.engine.process || rooms::of_thread(number).is_some()
    }
}
