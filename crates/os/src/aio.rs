//! Linux's own asynchronous I/O, for one feature that io_uring lacks. The device's interrupt writes a read's
//! completion into memory of the process, on whatever CPU the interrupt comes. A thread sees the completion
//! there without a system call. With io_uring the waiting thread itself must be interrupted, because the
//! kernel has that thread write the completion. A second advantage: containers whose profile refuses io_uring
//! allow this interface.
//!
//! [`Aio`] is one context for one read at a time. A process with a context takes 30 ms longer to end or to
//! become another program. During that time the kernel makes sure that no CPU looks at the context any more.
// UNSAFETY: the kernel writes into memory that it shares with us.

use crate::memory;
use crate::sys::{self, Errno, check, number};
use core::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use farpage_core::units::PAGE_BYTES;
use linux_raw_sys::general::{MREMAP_FIXED, MREMAP_MAYMOVE};
use rustix::fd::{AsRawFd, BorrowedFd};

/// The kernel's `struct iocb`, in its form for a read.
#[repr(C)]
#[derive(Default)]
struct ControlBlock {
    data: u64,
    /// Set by the kernel.
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: i32,
    base: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}
const _: () = assert!(size_of::<ControlBlock>() == 64);

const PREAD: u16 = 0;

/// The kernel's `struct aio_ring`, which `entries` events follow.
#[repr(C)]
struct Ring {
    id: u32,
    entries: AtomicU32,
    /// `head` is the index of the next event to take. `tail` is the index of the next event to come.
    head: AtomicU32,
    tail: AtomicU32,
    magic: AtomicU32,
    compatible: u32,
    incompatible: AtomicU32,
    header_bytes: AtomicU32,
}

/// The kernel's `struct io_event`.
#[repr(C)]
struct Event {
    data: AtomicI64,
    control_block: AtomicI64,
    /// The number of bytes read, or an error.
    result: AtomicI64,
    more: AtomicI64,
}

const MAGIC: u32 = 0xa10a_10a1;

/// A context for one read at a time.
pub struct Aio {
    /// The ring, in memory of Farpage, whose address is the context's number.
    ring: &'static Ring,
    entries: u32,
    is_reading: bool,
}

impl Aio {
    /// Makes a new context, far from where programs have memory.
    ///
    /// For a moment the ring lies where the kernel chooses. Meanwhile no thread may map anything at an
    /// address of its own choice.
    pub fn new() -> Result<Aio, Errno> {
        let mut context = 0_usize;
        // SAFETY: the kernel writes one word to `context`.
        check(unsafe { sys::call(number::IO_SETUP, [1, (&raw mut context) as usize, 0, 0, 0, 0]) })?;
        moved_away(context).inspect_err(|_| destroy(context))
    }

    /// Begins to read whole pages. `file` must not be a pipe, because the kernel would read it all the same,
    /// and take its bytes.
    ///
    /// # Safety
    /// Until the read is over, `base` points to `bytes` bytes of memory that no other code reads or writes.
    pub unsafe fn begin(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        base: *mut u8,
        bytes: usize,
    ) -> Result<(), Errno> {
        assert!(!self.is_reading);
        let mut block = ControlBlock {
            opcode: PREAD,
            file: file.as_raw_fd(),
            base: base as u64,
            bytes: bytes as u64,
            offset: offset as i64,
            ..ControlBlock::default()
        };
        let list = [&raw mut block as usize];
        // SAFETY: during the call the kernel reads the list and the block, and writes the block's key. The
        // memory at `base` is the caller's promise. After an error no read has begun.
        let begun = check(unsafe {
            sys::call(number::IO_SUBMIT, [self.context(), 1, list.as_ptr() as usize, 0, 0, 0])
        })?;
        // The kernel accepts the read, or returns an error.
        if begun != 1 {
            return Err(Errno::EIO);
        }
        self.is_reading = true;
        Ok(())
    }

    /// Returns how the read has ended, in bytes or as an error. None while the read is under way. Makes no
    /// system call.
    pub fn look(&mut self) -> Option<Result<usize, Errno>> {
        let head = self.ring.head.load(Ordering::Relaxed);
        // Ordering: Acquire, because the kernel has written the event, and the device its bytes, before the
        // tail.
        if head == self.ring.tail.load(Ordering::Acquire) {
            return None;
        }
        let result = self.event(head).result.load(Ordering::Relaxed);
        // Ordering: Release, because the kernel may use the event's place again from now on.
        self.ring.head.store((head + 1) % self.entries, Ordering::Release);
        self.is_reading = false;
        Some(check(result as isize))
    }

    /// Sleeps until the read is over, and returns how it has ended.
    pub fn wait(&mut self) -> Result<usize, Errno> {
        assert!(self.is_reading);
        loop {
            let mut event = [0_i64; 4];
            let arguments = [self.context(), 1, 1, event.as_mut_ptr() as usize, 0, 0];
            // SAFETY: the kernel writes one event to `event`, which has its size.
            if check(unsafe { sys::call(number::IO_GETEVENTS, arguments) }) == Ok(1) {
                self.is_reading = false;
                return check(event[2] as isize);
            }
            // Either a signal came, or the call isn't allowed any more. The kernel still finishes the read
            // that it has begun.
            if let Some(result) = self.look() {
                return result;
            }
            rustix::thread::sched_yield();
        }
    }

    fn context(&self) -> usize {
        core::ptr::from_ref(self.ring) as usize
    }

    fn event(&self, at: u32) -> &Event {
        assert!(at < self.entries);
        // SAFETY: `entries` events follow the ring in the same mapping, as `moved_away` has checked. The
        // kernel and this code read and write each of their words whole.
        unsafe { &*core::ptr::from_ref(self.ring).add(1).cast::<Event>().add(at as usize) }
    }
}

impl Drop for Aio {
    /// Waits for a read that is under way.
    fn drop(&mut self) {
        if self.is_reading {
            let _ = self.wait();
        }
        destroy(self.context());
    }
}

fn destroy(context: usize) {
    // SAFETY: the kernel ends a read that is under way first. No code refers to the ring afterwards.
    let _ = unsafe { sys::call(number::IO_DESTROY, [context, 0, 0, 0, 0, 0]) };
}

/// Returns the context that was just made, with its ring moved to where Farpage's memory is.
fn moved_away(context: usize) -> Result<Aio, Errno> {
    // SAFETY: a context's number is its ring's address. The ring stays mapped there until it is moved, below.
    let ring = unsafe { &*(context as *const Ring) };
    let entries = ring.entries.load(Ordering::Relaxed);
    let is_known = ring.magic.load(Ordering::Relaxed) == MAGIC
        && ring.incompatible.load(Ordering::Relaxed) == 0
        && ring.header_bytes.load(Ordering::Relaxed) as usize == size_of::<Ring>();
    if !is_known || entries < 2 {
        return Err(Errno::EIO);
    }
    let bytes = (size_of::<Ring>() + entries as usize * size_of::<Event>()).next_multiple_of(PAGE_BYTES);
    // SAFETY: the range is the ring's mapping, which a child has no use for.
    unsafe { memory::keep_from_children(context as *mut u8, bytes) }?;
    let place = memory::reserve(bytes)?;
    let flags = (MREMAP_MAYMOVE | MREMAP_FIXED) as usize;
    // SAFETY: the call moves the ring's own mapping to a mapping of Farpage that no code uses. The kernel
    // takes the new address as the number.
    check(unsafe { sys::call(number::MREMAP, [context, bytes, bytes, flags, place as usize, 0]) })?;
    // SAFETY: the ring is mapped for as long as the context exists.
    Ok(Aio { ring: unsafe { &*place.cast::<Ring>() }, entries, is_reading: false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{AsFd, OwnedFd};
    use rustix::fs::{Mode, OFlags};

    /// Makes a file of pages that are full of their numbers, for direct reads where its file system has them.
    fn numbered(pages: u8) -> OwnedFd {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("farpage-aio-{}-{count}", std::process::id()));
        let contents: Vec<u8> = (0..pages).flat_map(|page| [page; PAGE_BYTES]).collect();
        std::fs::write(&path, contents).unwrap();
        let open = |flags| rustix::fs::open(path.to_str().unwrap(), OFlags::RDONLY | flags, Mode::empty());
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn buffer() -> *mut u8 {
        memory::reserve(PAGE_BYTES).unwrap()
    }

    fn begin(aio: &mut Aio, file: &OwnedFd, page: u8, buffer: *mut u8) -> Result<(), Errno> {
        // SAFETY: the page is the test's own and never unmapped. Callers look at it only when the read is
        // over.
        unsafe { aio.begin(file.as_fd(), u64::from(page) * PAGE_BYTES as u64, buffer, PAGE_BYTES) }
    }

    fn is_full_of(buffer: *mut u8, number: u8) -> bool {
        // SAFETY: the page is the test's own, and no read is under way.
        unsafe { core::slice::from_raw_parts(buffer, PAGE_BYTES) }.iter().all(|byte| *byte == number)
    }

    /// The test makes more reads than the ring has places, so the ring is gone through several times.
    #[test]
    fn each_read_is_seen_once_by_who_looks_and_by_who_waits() {
        let (file, buffer) = (numbered(251), buffer());
        let mut aio = Aio::new().unwrap();
        assert!(aio.look().is_none());
        for read in 0..3 * aio.entries {
            let page = (read * 7 % 251) as u8;
            begin(&mut aio, &file, page, buffer).unwrap();
            let sleeps = read % 3 == 0;
            let result = if sleeps {
                aio.wait()
            } else {
                std::iter::repeat_with(|| aio.look()).flatten().next().unwrap()
            };
            assert_eq!(result, Ok(PAGE_BYTES));
            assert!(is_full_of(buffer, page) && aio.look().is_none());
        }
    }

    #[test]
    fn what_cant_be_read_is_said_and_the_next_read_works() {
        let (file, buffer) = (numbered(2), buffer());
        let mut aio = Aio::new().unwrap();
        // The file has no page 2.
        begin(&mut aio, &file, 2, buffer).unwrap();
        assert_eq!(aio.wait(), Ok(0));
        let only_written = rustix::fs::open("/dev/null", OFlags::WRONLY, Mode::empty()).unwrap();
        assert_eq!(begin(&mut aio, &only_written, 0, buffer), Err(Errno::EBADF));
        begin(&mut aio, &file, 1, buffer).unwrap();
        assert_eq!(aio.wait(), Ok(PAGE_BYTES));
        assert!(is_full_of(buffer, 1));
    }

    /// A program may count on holes that it has made. A fork's child must not wait for events that never
    /// come.
    #[test]
    fn ring_lies_where_ours_are_and_no_child_gets_it() {
        let aio = Aio::new().unwrap();
        let start = format!("{:x}-", aio.context());
        assert_eq!(aio.context() >> 44, buffer() as usize >> 44);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping: Vec<&str> = maps.lines().skip_while(|line| !line.starts_with(&start)).collect();
        assert!(mapping[0].ends_with("/[aio] (deleted)"), "{}", mapping[0]);
        let flags = mapping.iter().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dc"), "{flags}");
        drop(aio);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.lines().any(|line| line.starts_with(&start)));
    }

    /// The buffer may be reused once the context is dropped, because no read writes to it any more.
    #[test]
    fn dropping_it_waits_for_what_is_under_way() {
        let (file, buffer) = (numbered(9), buffer());
        for page in 0..9 {
            let mut aio = Aio::new().unwrap();
            begin(&mut aio, &file, page, buffer).unwrap();
            drop(aio);
            assert!(is_full_of(buffer, page));
        }
    }
}
