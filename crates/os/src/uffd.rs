//! userfaultfd: Farpage's own thin layer over its ioctls.
//!
//! Existing bindings lack UFFDIO_MOVE and POISON, and read negative byte counts as huge ones. Here every
//! out-field is decoded as signed. A call that did part of its work says how much ([`Trouble::Partly`]).
// UNSAFETY: these calls move, add and remove pages of this process.

use crate::sys::{self, Errno, number};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::units::{PageIndex, PageRange};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Features of a userfaultfd: bits of `UFFDIO_API`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Faults on write-protected pages are reported.
    pub const WRITE_PROTECT: Features = Features(1);
    /// A moved mapping stays registered. The call that moves the mapping waits until some thread has read the
    /// event.
    pub const EVENT_REMAP: Features = Features(1 << 2);
    /// Faults are reported as SIGBUS to the thread that touched the page, not as messages.
    const SIGBUS: Features = Features(1 << 7);
    /// `UFFDIO_POISON`.
    pub const POISON: Features = Features(1 << 14);
    /// `UFFDIO_MOVE`.
    pub const MOVE: Features = Features(1 << 16);
    /// Returns whether all of `other` is included.
    pub const fn has(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Why an ioctl did not do all of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The ioctl did this many pages from the start. The caller tries again with the rest.
    Partly(u64),
    /// A page is already there (EEXIST).
    Present,
    /// No page at the source, or no registered mapping at the destination (ENOENT).
    Missing,
    /// The kernel or a device holds the page, or it is shared with a fork's child (EBUSY).
    Busy,
    /// The mappings don't allow the operation: different protection, not anonymous, or not registered
    /// (EINVAL).
    Refused,
    /// Any other error.
    Other(Errno),
}

impl Trouble {
    /// Translates errno. No other place does.
    const fn of(error: Errno) -> Trouble {
        match error.0 {
            17 => Trouble::Present,
            2 => Trouble::Missing,
            16 => Trouble::Busy,
            22 => Trouble::Refused,
            _ => Trouble::Other(error),
        }
    }
}

/// Tries that end with EAGAIN before this thread reads events itself. EAGAIN means that a call is changing
/// mappings, and that call may be waiting for its event to be read.
const DRAIN_AFTER: u64 = 100;
const UFFDIO_API: u32 = 0xc018_aa3f;
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
const UFFDIO_UNREGISTER: u32 = 0x8010_aa01;
const UFFDIO_WAKE: u32 = 0x8010_aa02;
const UFFDIO_COPY: u32 = 0xc028_aa03;
const UFFDIO_ZEROPAGE: u32 = 0xc020_aa04;
const UFFDIO_MOVE: u32 = 0xc028_aa05;
const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;
const UFFDIO_POISON: u32 = 0xc020_aa08;
const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;
/// Mode: threads that wait for the page aren't woken.
const DONT_WAKE: u64 = 1;
const WRITEPROTECT_MODE_WP: u64 = 1;
/// `USERFAULTFD_IOC_NEW` on /dev/userfaultfd.
const IOC_NEW: u32 = 0xaa00;
const O_CLOEXEC_NONBLOCK: usize = 0o2_000_000 | 0o4_000;

/// A fault message as the kernel writes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    event: u8,
    reserved: [u8; 7],
    /// Flags of a fault. In an event for a moved mapping, the mapping's old address.
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Message>() == 32);

impl Message {
    /// An empty message, to read into.
    pub const EMPTY: Message =
        Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0, padding: 0 };
    /// Returns where a moved mapping was; none if the message isn't about a move.
    fn moved_from(&self) -> Option<PageIndex> {
        const REMAP: u8 = 0x14;
        (self.event == REMAP).then(|| PageIndex::of_address(self.flags as usize))
    }
    /// Returns the page that was touched; none for an event.
    pub const fn page(&self) -> Option<PageIndex> {
        const PAGEFAULT: u8 = 0x12;
        if self.event == PAGEFAULT { Some(PageIndex::of_address(self.address as usize)) } else { None }
    }
    /// Returns whether the access was a write.
    pub const fn is_write(&self) -> bool {
        self.flags & 1 != 0
    }
    /// Returns whether the access was a write to a write-protected page.
    pub const fn is_write_protect(&self) -> bool {
        self.flags & 2 != 0
    }
}

/// A userfaultfd of this process.
pub struct Uffd {
    fd: OwnedFd,
    features: Features,
    known_moves: KnownMoves,
    /// Mappings that were moved by calls that Farpage has not seen.
    unseen_moves: AtomicU32,
}

/// The ranges of the last known calls that may move a mapping.
///
/// The thread that reads a call's event lets the call go on. The call may be over, and later calls, too,
/// before the reader checks here whether the call was a known one. Therefore the reader looks at the counter
/// before and after. A known call must be one of those in between.
struct KnownMoves {
    /// Counts beginnings and ends, so the count is odd while a call is under way.
    edges: AtomicU32,
    last: [(AtomicU64, AtomicU64); KnownMoves::KEPT as usize],
}

impl KnownMoves {
    /// Calls whose ranges are kept. If at least this many pass while one thread reads, the reader can't tell
    /// whether a move was a known one. The move then counts as known, so that no program is stopped.
    const KEPT: u32 = 16;

    const fn new() -> KnownMoves {
        let last = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; KnownMoves::KEPT as usize];
        KnownMoves { edges: AtomicU32::new(0), last }
    }

    fn begin(&self, from: PageRange) {
        let edges = self.edges.load(Ordering::Relaxed);
        let (start, end) = &self.last[(edges / 2 % KnownMoves::KEPT) as usize];
        start.store(from.start.0, Ordering::Relaxed);
        end.store(from.end.0, Ordering::Relaxed);
        // Ordering: Release publishes the range to `has`.
        self.edges.store(edges + 1, Ordering::Release);
    }

    /// Returns whether one of the calls since `before` moves a mapping at `from`.
    fn has(&self, before: u32, from: PageIndex) -> bool {
        let first = before / 2;
        // Ordering: Acquire pairs with the Release in `begin`, so a call that is counted has its range.
        let calls = self.edges.load(Ordering::Acquire).div_ceil(2).wrapping_sub(first);
        calls >= KnownMoves::KEPT
            || (0..calls).any(|call| {
                let (start, end) = &self.last[(first.wrapping_add(call) % KnownMoves::KEPT) as usize];
                (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&from.0)
            })
    }
}

fn new_descriptor(mode: usize) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes no pointer.
    let fd =
        sys::check(unsafe { sys::call(number::USERFAULTFD, [O_CLOEXEC_NONBLOCK | mode, 0, 0, 0, 0, 0]) })?;
    // SAFETY: the kernel has just given us this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Duplicates a descriptor to a number near 1000, which most programs don't reach. None if the limit doesn't
/// allow numbers that high.
pub fn out_of_the_way(fd: &OwnedFd) -> Option<OwnedFd> {
    // Upper bound of the new number. The kernel's table is as long as its highest number, and each fork
    // copies it.
    const TABLE: u64 = 1024;
    /// Numbers below the bound, for a userfaultfd and all areas.
    const FROM_END: u64 = 32;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let lowest = limit.unwrap_or(TABLE).min(TABLE).checked_sub(FROM_END)?;
    if lowest < FROM_END {
        return None;
    }
    rustix::io::fcntl_dupfd_cloexec(fd, lowest as i32).ok()
}

impl Uffd {
    /// Makes a userfaultfd by the system call. Fails with EPERM if the caller may not handle faults of the
    /// kernel.
    pub fn by_syscall() -> Result<Uffd, Errno> {
        Uffd::handshake(new_descriptor(0)?, Features(0))
    }

    /// Makes a userfaultfd without any privilege. A thread that touches a missing or protected page gets
    /// SIGBUS, and serves the fault or has it served. The kernel's own accesses aren't served: those system
    /// calls answer EFAULT, or a short count.
    pub fn for_signals() -> Result<Uffd, Errno> {
        const USER_MODE_ONLY: usize = 1;
        Uffd::handshake(new_descriptor(USER_MODE_ONLY)?, Features::SIGBUS)
    }

    /// Moves the descriptor [`out_of_the_way`], if the limit allows that.
    pub fn out_of_the_way(self) -> Uffd {
        match out_of_the_way(&self.fd) {
            Some(fd) => Uffd { fd, ..self },
            None => self,
        }
    }

    /// Makes a userfaultfd by /dev/userfaultfd, already open as `device`.
    pub fn by_device(device: &OwnedFd) -> Result<Uffd, Errno> {
        // SAFETY: this request takes flags, not a pointer.
        let fd = unsafe { sys::ioctl(device.as_raw_fd(), IOC_NEW, O_CLOEXEC_NONBLOCK) }?;
        // SAFETY: the kernel has just given us this descriptor, and no other code owns it.
        Uffd::handshake(unsafe { OwnedFd::from_raw_fd(fd as i32) }, Features(0))
    }

    /// Agrees with the kernel on the features that Farpage uses. Of the events, only the one for moved
    /// mappings is asked for. A mapping that lost its registration, if only for a moment, would show zeros to
    /// a thread that touches it. An unread event blocks the program's call and every ioctl. Code that lets
    /// the program move a registered mapping must therefore have a thread read events
    /// ([`Uffd::drain_until`]).
    fn handshake(fd: OwnedFd, more: Features) -> Result<Uffd, Errno> {
        let mut api = [0xaa_u64, Features::WRITE_PROTECT.0 | Features::EVENT_REMAP.0 | more.0, 0];
        // SAFETY: the kernel reads and writes a 24-byte uffdio_api.
        unsafe { sys::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr() as usize) }?;
        let features = Features(api[1]);
        Ok(Uffd { fd, features, known_moves: KnownMoves::new(), unseen_moves: AtomicU32::new(0) })
    }

    /// Returns the features of this kernel.
    pub const fn features(&self) -> Features {
        self.features
    }

    /// Returns the descriptor, to poll.
    pub const fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Reads the queued messages. Returns 0 if there are none.
    pub fn read(&self, messages: &mut [Message]) -> Result<usize, Errno> {
        // SAFETY: the slice covers `messages`, whose elements are plain integers. The kernel fills whole
        // messages.
        let bytes = unsafe {
            core::slice::from_raw_parts_mut(messages.as_mut_ptr().cast::<u8>(), size_of_val(messages))
        };
        // Ordering: Acquire keeps this load before the read. A call whose event is read had not ended at this
        // point.
        let before = self.known_moves.edges.load(Ordering::Acquire);
        match rustix::io::read(&self.fd, bytes) {
            Ok(read) => {
                let count = read / size_of::<Message>();
                let moved = messages[..count].iter().filter_map(Message::moved_from);
                let unseen = moved.filter(|from| !self.known_moves.has(before, *from)).count();
                if unseen > 0 {
                    // Ordering: Release pairs with the Acquire in `unseen_moves`.
                    self.unseen_moves.fetch_add(unseen as u32, Ordering::Release);
                }
                Ok(count)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(0),
            Err(error) => Err(Errno(error.raw_os_error())),
        }
    }

    /// Notes that a call begins that may move the mappings in `from`. Only one call may be noted at a time,
    /// until [`Uffd::move_ended`].
    pub fn move_begins(&self, from: PageRange) {
        self.known_moves.begin(from);
    }

    /// Notes that the call has returned, after its event was read.
    pub fn move_ended(&self) {
        // Ordering: Release keeps the reading of the call's event before this store, and pairs with the
        // Acquire in `read`.
        self.known_moves.edges.fetch_add(1, Ordering::Release);
    }

    /// Returns how many registered mappings the program has moved unseen. Farpage's knowledge of those
    /// mappings is wrong.
    pub fn unseen_moves(&self) -> u32 {
        // Ordering: Acquire pairs with the Release in `read`.
        self.unseen_moves.load(Ordering::Acquire)
    }

    /// Reads events until `done` returns true.
    ///
    /// The kernel hands out faults before events, so every waiting fault must be read first. No fault is
    /// served here. The faulting threads are woken at the very end, try again, and come back as faults. A
    /// thread that was woken at once would be queued before the event again: 100 threads that did so kept a
    /// mremap waiting for ever.
    pub fn drain_until(&self, done: impl Fn() -> bool) {
        while !done() {
            self.drain();
        }
        self.wake_all();
    }

    /// Reads the queued messages, so that a call that waits for its event goes on. The caller calls
    /// [`Uffd::wake_all`] after the last time.
    fn drain(&self) {
        let mut messages = [Message::EMPTY; 16];
        if self.read(&mut messages).unwrap_or(0) == 0 {
            crate::clock::sleep_ns(20_000);
        }
    }

    /// Wakes every thread that waits for a page, at any address. A thread whose fault is just being served
    /// faults once more than it needs to.
    fn wake_all(&self) {
        const LOWEST: u64 = 0x1_0000;
        const HIGHEST: u64 = 0x7fff_ffff_f000;
        self.wake(PageRange::new(PageIndex(LOWEST >> 12), PageIndex(HIGHEST >> 12)));
    }

    /// Makes an ioctl on a range, whose last word is the signed count of bytes done.
    ///
    /// # Safety
    /// As the request demands.
    unsafe fn ranged<const N: usize>(&self, request: u32, mut words: [u64; N]) -> Result<(), Trouble> {
        for tries in 0_u64.. {
            words[N - 1] = 0;
            // SAFETY: `words` is the request's struct of N words. The request's effect on memory is the
            // caller's promise.
            let result = unsafe { sys::ioctl(self.fd.as_raw_fd(), request, words.as_mut_ptr() as usize) };
            let done = words[N - 1] as i64;
            if tries > DRAIN_AFTER && (result != Err(Errno::EAGAIN) || done > 0) {
                self.wake_all();
            }
            match result {
                Ok(_) => return Ok(()),
                Err(Errno::EAGAIN) if done > 0 => return Err(Trouble::Partly(done as u64 >> 12)),
                // The mappings are just being changed, perhaps by a call that waits for its event to be read.
                Err(Errno::EAGAIN) if tries >= DRAIN_AFTER => self.drain(),
                Err(Errno::EAGAIN) => core::hint::spin_loop(),
                Err(error) => return Err(Trouble::of(error)),
            }
        }
        Err(Trouble::Busy)
    }

    /// Takes over faults on missing pages of `pages`, and on write-protected ones.
    ///
    /// # Safety
    /// From now on a missing page is not a page of zeros. The caller must know the content of each missing
    /// page, and install it.
    pub unsafe fn register(&self, pages: PageRange) -> Result<(), Errno> {
        let mode = REGISTER_MISSING | REGISTER_WP;
        let mut words = [pages.start.address() as u64, pages.bytes() as u64, mode, 0];
        // SAFETY: the kernel reads a 32-byte uffdio_register and writes to its last word. The faults are the
        // caller's promise.
        unsafe { sys::ioctl(self.fd.as_raw_fd(), UFFDIO_REGISTER, (&raw mut words) as usize) }.map(|_| ())
    }

    /// Gives faults in `pages` back to the kernel, and wakes threads that wait for one. Missing pages read as
    /// zeros from now on.
    ///
    /// # Safety
    /// Every page in `pages` that isn't all zeros is in memory.
    pub unsafe fn unregister(&self, pages: PageRange) -> Result<(), Errno> {
        let words = [pages.start.address() as u64, pages.bytes() as u64];
        // SAFETY: the kernel reads a 16-byte uffdio_range. The content of missing pages is the caller's
        // promise.
        unsafe { sys::ioctl(self.fd.as_raw_fd(), UFFDIO_UNREGISTER, (&raw const words) as usize) }.map(|_| ())
    }

    /// Wakes threads that wait for a page of `pages`, so that they try again.
    pub fn wake(&self, pages: PageRange) {
        let words = [pages.start.address() as u64, pages.bytes() as u64];
        // SAFETY: the kernel reads a 16-byte uffdio_range. Waking changes no memory.
        let _ = unsafe { sys::ioctl(self.fd.as_raw_fd(), UFFDIO_WAKE, (&raw const words) as usize) };
    }

    /// Maps zeros where pages are missing, and wakes. Filling a missing page can't destroy anything.
    pub fn zero(&self, pages: PageRange) -> Result<(), Trouble> {
        let words = [pages.start.address() as u64, pages.bytes() as u64, 0, 0];
        // SAFETY: `words` is a uffdio_zeropage. The kernel refuses where a page is present.
        unsafe { self.ranged(UFFDIO_ZEROPAGE, words) }
    }

    /// Copies a page to where one is missing, and wakes.
    ///
    /// # Safety
    /// `source` must be a readable page that doesn't change meanwhile.
    pub unsafe fn copy(&self, page: PageIndex, source: *const u8) -> Result<(), Trouble> {
        // SAFETY: `words` is a uffdio_copy. The kernel refuses where a page is present. The source is the
        // caller's promise.
        unsafe { self.ranged(UFFDIO_COPY, [page.address() as u64, source as u64, 4096, 0, 0]) }
    }

    /// As [`Uffd::copy`], for all of `pages`, whose bytes lie one after the other at `source`.
    ///
    /// # Safety
    /// `source` must point to as many readable pages as `pages` has, which don't change meanwhile.
    pub unsafe fn copy_run(&self, pages: PageRange, source: *const u8) -> Result<(), Trouble> {
        let words = [pages.start.address() as u64, source as u64, pages.bytes() as u64, 0, 0];
        // SAFETY: `words` is a uffdio_copy. The kernel refuses where a page is present. The source is the
        // caller's promise.
        unsafe { self.ranged(UFFDIO_COPY, words) }
    }

    /// Moves the pages in `from` to `to` without copying. `wake` says whether threads may wait at `to`.
    ///
    /// # Safety
    /// Taking pages away is the dangerous half. A thread that touches `from` afterwards must be served the
    /// old content. No reference to memory in `from` may exist.
    pub unsafe fn move_pages(&self, to: PageIndex, from: PageRange, wake: bool) -> Result<(), Trouble> {
        let mode = if wake { 0 } else { DONT_WAKE };
        let words = [to.address() as u64, from.start.address() as u64, from.bytes() as u64, mode, 0];
        // SAFETY: `words` is a uffdio_move. The pages that go away are the caller's promise.
        unsafe { self.ranged(UFFDIO_MOVE, words) }
    }

    /// Write-protects present pages, or lifts the protection and wakes.
    pub fn protect(&self, pages: PageRange, protect: bool) -> Result<(), Errno> {
        let mode = if protect { WRITEPROTECT_MODE_WP } else { 0 };
        let words = [pages.start.address() as u64, pages.bytes() as u64, mode];
        for tries in 0_u64.. {
            // SAFETY: the kernel only reads the uffdio_writeprotect. Bytes in memory don't change.
            let result =
                unsafe { sys::ioctl(self.fd.as_raw_fd(), UFFDIO_WRITEPROTECT, (&raw const words) as usize) };
            if tries > DRAIN_AFTER && result != Err(Errno::EAGAIN) {
                self.wake_all();
            }
            match result {
                Err(Errno::EAGAIN) if tries >= DRAIN_AFTER => self.drain(),
                Err(Errno::EAGAIN) => core::hint::spin_loop(),
                result => return result.map(|_| ()),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Makes every touch of a missing page a SIGBUS, and wakes.
    pub fn poison(&self, page: PageIndex) -> Result<(), Trouble> {
        // SAFETY: the words are a uffdio_poison. The kernel refuses where a page is present.
        unsafe { self.ranged(UFFDIO_POISON, [page.address() as u64, 4096, 0, 0]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, count: u64) -> PageRange {
        PageRange::of(PageIndex(start), count)
    }

    #[test]
    fn moves_under_way_or_over_since_are_known_and_no_others() {
        let known = KnownMoves::new();
        assert!(!known.has(0, PageIndex(5)), "nothing is being moved");
        known.begin(range(5, 3));
        let under_way = known.edges.load(Ordering::Relaxed);
        for before in [0, under_way] {
            assert!(known.has(before, PageIndex(5)) && known.has(before, PageIndex(7)));
            assert!(!known.has(before, PageIndex(4)) && !known.has(before, PageIndex(8)));
        }
        known.edges.fetch_add(1, Ordering::Relaxed);
        assert!(known.has(under_way, PageIndex(5)), "it was over before the reader looked");
        assert!(!known.has(2, PageIndex(5)), "it was over before the reader read");
        for call in 1..KnownMoves::KEPT {
            known.begin(range(100 * u64::from(call), 1));
            known.edges.fetch_add(1, Ordering::Relaxed);
        }
        assert!(known.has(2, PageIndex(100)) && !known.has(2, PageIndex(5)));
        assert!(known.has(0, PageIndex(77)), "too many to tell");
    }
}
