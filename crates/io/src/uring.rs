//! The io_uring back end: many requests per system call, each a READV or WRITEV on a registered file.
//!
//! This file is Farpage's own small layer on the three system calls, because existing libraries need an
//! allocator or errno. Six rules keep the layer small and right:
//!
//! 1. Each request in flight owns a place in a table that never moves, with its own iovec array. The pointers
//!    that the kernel gets therefore stay valid until the completion, whatever happens to the caller's slice.
//! 2. A place has at most one queue entry at a time, and both queues have at least as many entries as the
//!    table has places. Therefore neither queue can overflow, and no code handles an overflow.
//! 3. The kernel reads the submission queue only inside `io_uring_enter`, because SQPOLL isn't used.
//!    Therefore entries that the kernel hasn't taken can be withdrawn.
//! 4. Frames aren't registered as buffers: UFFDIO_MOVE must be able to move them, and registering pins them.
//! 5. Neither SINGLE_ISSUER nor COOP_TASKRUN is set. A completion must not wait until the submitting thread
//!    happens to enter the kernel.
//! 6. From Linux 5.11 on no thread waits for ever for a request that the kernel has forgotten. After a wait
//!    in vain an empty request rouses the kernel's workers ([`Uring::rouse`]). At most one empty request is
//!    in flight. An empty request has no place in the table, and belongs to no request of a caller.
//!
//! UNSAFETY: the rings are memory shared with the kernel, and no safe wrapper exists without an allocator.

use crate::error::{SetupError, SetupStep};
use crate::table::PlaceSet;
use crate::transfer::{Transfer, Verdict};
use crate::{Backend, Busy, Completion, DEPTH, IoError, Op, Request, SEGMENTS_MAX, Wait};
use core::ffi::c_void;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use farpage_core::units::PAGE_BYTES;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringFeatureFlags, IoringOp, IoringRegisterOp,
    IoringSetupFlags, IoringSqeFlags, io_uring_cqe, io_uring_enter, io_uring_enter_arg,
    io_uring_getevents_arg, io_uring_params, io_uring_ptr, io_uring_register, io_uring_setup, io_uring_sqe,
    io_uring_user_data, iovec,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::time::Timespec;

/// Times in a row that `io_uring_enter` may refuse for lack of kernel memory before the queued requests are
/// failed. The faulting thread must get an answer in the end.
const REFUSALS_MAX: u32 = 1000;

/// How long a thread waits for a completion before the request counts as possibly forgotten (see
/// [`Uring::rouse`]).
static FORGOTTEN_AFTER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long [`Wait::Briefly`] waits for a completion. Writes to a disk that isn't overloaded take less.
static BRIEF: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// The `user_data` of the request that rouses workers, which has no place.
const ROUSED: u64 = u64::MAX;

/// Index of the registered file that is read and written: the first one.
const FILE_INDEX: RawFd = 0;

/// The back end's data about a request in flight, and the iovecs that the kernel reads.
#[repr(C)]
struct InFlight {
    iovecs: [iovec; SEGMENTS_MAX],
    token: u64,
    op: IoringOp,
    transfer: Transfer,
    /// Why the request is over although the kernel never saw it. Meaningful in `failed` places.
    failure: IoError,
}

impl InFlight {
    const VACANT: InFlight = InFlight {
        iovecs: [iovec { iov_base: null_mut(), iov_len: 0 }; SEGMENTS_MAX],
        token: 0,
        op: IoringOp::Nop,
        transfer: Transfer::new(0, 0),
        failure: IoError::EIO,
    };
}

const TABLE_BYTES: usize = (size_of::<InFlight>() * DEPTH).next_multiple_of(PAGE_BYTES);

/// A ring with one registered file.
pub struct Uring {
    /// Submission queue indices, completion queue indices and completion entries.
    rings: Mapping,
    /// Submission entries.
    entries: Mapping,
    /// `[InFlight; DEPTH]`.
    table: Mapping,
    /// Offsets of the submission queue's indices in `rings`, as the kernel laid them out.
    sq: QueueLayout,
    cq: QueueLayout,
    cqes_offset: usize,
    /// Our end of the submission queue: the value that is published as its tail.
    sq_tail: u32,
    /// Requests that can be in flight: `1..=DEPTH`.
    depth: usize,
    /// Places in use.
    taken: PlaceSet,
    /// Taken places whose request is over because the kernel refused to take it.
    failed: PlaceSet,
    /// Refusals of `io_uring_enter` in a row.
    refusals: u32,
    /// Whether the kernel can limit a wait's time (5.11).
    waits_for_a_time: bool,
    /// Whether the request that [`Uring::rouse`] has queued isn't over yet.
    is_rousing: bool,
    ring: OwnedFd,
}

// SAFETY: all pointers lead into mappings that belong to this value alone, and every method that follows them
// takes `&mut self`. Any thread may enter a ring that isn't SINGLE_ISSUER. The addresses in the table are
// those of segments, which may go to any thread.
unsafe impl Send for Uring {}

/// Offsets of a queue's indices in the mapping, and the mask that turns an index into a position.
#[derive(Clone, Copy)]
struct QueueLayout {
    head: usize,
    tail: usize,
    mask: u32,
}

impl Uring {
    /// Sets up a ring that keeps at most `entries` requests in flight (brought into `1..=DEPTH`) on `fd`. The
    /// file may have been opened with O_DIRECT. The ring keeps the file open, so the caller may close `fd`
    /// afterwards.
    ///
    /// `kept` stays open, too, until the last request is over, even if the process dies before that. While a
    /// lock on that file is held, the ring may still write. Once the lock is free, no request of the ring
    /// writes any more.
    pub fn new(fd: BorrowedFd<'_>, kept: Option<BorrowedFd<'_>>, entries: u32) -> Result<Uring, SetupError> {
        let depth = entries.clamp(1, DEPTH as u32);
        let (ring, params, own) = set_up(depth)?;
        // SINGLE_MMAP (5.4): both rings are one mapping. NODROP and SUBMIT_STABLE came with 5.5, the oldest
        // supported kernel.
        let needed = IoringFeatureFlags::SINGLE_MMAP | IoringFeatureFlags::SUBMIT_STABLE;
        if !params.features.contains(needed) {
            return Err(SetupError::at(SetupStep::Features)(Errno::NOSYS));
        }
        assert!(params.sq_entries >= depth && params.cq_entries >= params.sq_entries);

        let memory = SetupError::at(SetupStep::Memory);
        let (rings, entries) = match own {
            Some(own) => own,
            None => {
                let rings =
                    Mapping::of_ring(&ring, IORING_OFF_SQ_RING, rings_bytes(&params)).map_err(&memory)?;
                let bytes = params.sq_entries as usize * size_of::<io_uring_sqe>();
                (rings, Mapping::of_ring(&ring, IORING_OFF_SQES, bytes).map_err(&memory)?)
            }
        };
        let table = Mapping::private(TABLE_BYTES).map_err(&memory)?;

        let uring = Uring {
            sq: QueueLayout {
                head: params.sq_off.head as usize,
                tail: params.sq_off.tail as usize,
                mask: params.sq_entries - 1,
            },
            cq: QueueLayout {
                head: params.cq_off.head as usize,
                tail: params.cq_off.tail as usize,
                mask: params.cq_entries - 1,
            },
            cqes_offset: params.cq_off.cqes as usize,
            rings,
            entries,
            table,
            sq_tail: 0,
            depth: depth as usize,
            taken: PlaceSet::NONE,
            failed: PlaceSet::NONE,
            refusals: 0,
            waits_for_a_time: params.features.contains(IoringFeatureFlags::EXT_ARG),
            is_rousing: false,
            ring,
        };
        uring.fill_index_array(&params);
        uring.register(fd, kept).map_err(SetupError::at(SetupStep::File))?;
        Ok(uring)
    }

    /// Fills the array of indices that the submission queue goes through. The array is the identity and never
    /// changes.
    fn fill_index_array(&self, params: &io_uring_params) {
        for index in 0..params.sq_entries {
            let offset = params.sq_off.array as usize + index as usize * size_of::<u32>();
            self.rings.word(offset).store(index, Ordering::Relaxed);
        }
    }

    fn register(&self, fd: BorrowedFd<'_>, kept: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
        const NO_FILE: RawFd = -1;
        let files: [RawFd; 2] = [fd.as_raw_fd(), kept.map_or(NO_FILE, |kept| kept.as_raw_fd())];
        // SAFETY: RegisterFiles reads `nr_args` = 2 file descriptors from `files`, which outlives the call.
        // The kernel takes references of its own to the files.
        unsafe {
            io_uring_register(&self.ring, IoringRegisterOp::RegisterFiles, files.as_ptr().cast(), 2)?;
        }
        Ok(())
    }

    /// Initialises a free place of the table for a new request, and returns it. A place that no request has
    /// needed yet takes no memory.
    fn vacated(&mut self, place: usize) -> &mut InFlight {
        assert!(place < DEPTH && !self.taken.contains(place));
        // SAFETY: the mapping is ours alone, page aligned and writable, and holds DEPTH places (TABLE_BYTES).
        unsafe { self.table.base.cast::<InFlight>().add(place).write(InFlight::VACANT) };
        self.place(place)
    }

    /// Returns the place of a request.
    fn place(&mut self, place: usize) -> &mut InFlight {
        assert!(place < DEPTH);
        // SAFETY: the mapping is page aligned and holds DEPTH places (TABLE_BYTES). `vacated` has initialised
        // this one. The kernel only reads `iovecs`, which `submit` writes while the kernel has no entry of
        // this place. `&mut self` makes the reference the only one.
        unsafe { self.table.base.cast::<InFlight>().add(place).as_mut() }
    }

    /// Queues an entry for the rest of the request in `place`.
    fn queue(&mut self, place: usize) {
        let in_flight = self.place(place);
        let transfer = in_flight.transfer;
        let rest = &mut in_flight.iovecs[transfer.first..transfer.count];
        let mut entry = io_uring_sqe {
            opcode: in_flight.op,
            flags: IoringSqeFlags::FIXED_FILE,
            fd: FILE_INDEX,
            user_data: io_uring_user_data::from_u64(place as u64),
            ..io_uring_sqe::default()
        };
        entry.off_or_addr2.off = transfer.offset;
        entry.addr_or_splice_off_in.addr = io_uring_ptr::new(rest.as_mut_ptr().cast::<c_void>());
        entry.len.len = rest.len() as u32;

        // Invariant 2: the queue is not full, because this place has no other entry in it.
        self.put(entry);
    }

    /// Puts an entry into the queue, which must not be full.
    fn put(&mut self, entry: io_uring_sqe) {
        assert!(self.queued() <= self.sq.mask);
        let position = (self.sq_tail & self.sq.mask) as usize;
        // SAFETY: `position` is below the number of entries that the mapping was made for. The kernel isn't
        // reading this entry, which lies outside head..tail, as just asserted.
        unsafe { self.entries.base.cast::<io_uring_sqe>().add(position).write(entry) };
        self.sq_tail = self.sq_tail.wrapping_add(1);
        // Ordering: Release pairs with the kernel's acquire of the tail, so that it sees the entry.
        self.rings.word(self.sq.tail).store(self.sq_tail, Ordering::Release);
    }

    /// Returns the number of entries that the kernel hasn't taken.
    fn queued(&self) -> u32 {
        // Ordering: Acquire pairs with the kernel's release of the head, after it has read the entries.
        self.sq_tail.wrapping_sub(self.rings.word(self.sq.head).load(Ordering::Acquire))
    }

    /// Gives the kernel the queued entries, and waits until the completion queue has an entry, or until the
    /// time is over.
    fn enter(&mut self, wait: Wait) {
        let time = match wait {
            Wait::No => None,
            Wait::Briefly => self.waits_for_a_time.then_some(&BRIEF),
            Wait::One => Some(&FORGOTTEN_AFTER),
        };
        let completions_min = u32::from(time.is_some());
        let flags = if time.is_some() { IoringEnterFlags::GETEVENTS } else { IoringEnterFlags::default() };
        // SAFETY: the entries between head and tail are complete. The iovecs and segments that they point to
        // stay valid until the completion. The iovecs do because the table outlives the ring's last request
        // (see `drop`), the segments by the contract of `submit`.
        let entered = unsafe {
            if let Some(time) = time.filter(|_| self.waits_for_a_time) {
                let time = core::ptr::from_ref(time).cast_mut().cast::<c_void>();
                let until = io_uring_getevents_arg { ts: io_uring_ptr::new(time), ..Default::default() };
                let flags = flags | IoringEnterFlags::EXT_ARG;
                io_uring_enter_arg(&self.ring, self.queued(), completions_min, flags, Some(&until))
            } else {
                io_uring_enter(&self.ring, self.queued(), completions_min, flags)
            }
        };
        match entered {
            Ok(_) => self.refusals = 0,
            Err(Errno::TIME) => self.rouse(),
            // A signal came before the call did anything. The caller looks again.
            Err(Errno::INTR) => {}
            // The kernel has no memory for now.
            Err(errno @ (Errno::AGAIN | Errno::BUSY | Errno::NOMEM)) => {
                self.refusals += 1;
                if self.refusals > REFUSALS_MAX {
                    self.fail_queued(IoError::from_errno(errno));
                }
                rustix::thread::sched_yield();
            }
            // The ring can't be entered: the program closed our file descriptor, or put a filter on this
            // process. Requests that the kernel already has still complete into the mapping, or are broken
            // off there. The caller waits for them by looking again.
            Err(errno) => {
                self.fail_queued(IoError::from_errno(errno));
                rustix::thread::sched_yield();
            }
        }
    }

    /// Gives the kernel's workers a request that does nothing. Requests that can't be done at once, such as a
    /// write that lengthens a file, go to workers, which end when they are idle. On Linux 6.18 a write was
    /// left without a worker for good, and was done once there was other work.
    fn rouse(&mut self) {
        if self.is_rousing || self.queued() > 0 {
            return;
        }
        let entry = io_uring_sqe {
            opcode: IoringOp::Nop,
            flags: IoringSqeFlags::ASYNC,
            user_data: io_uring_user_data::from_u64(ROUSED),
            ..io_uring_sqe::default()
        };
        self.put(entry);
        // SAFETY: the entry is complete, and points to nothing.
        let _ = unsafe { io_uring_enter(&self.ring, 1, 0, IoringEnterFlags::default()) };
        self.is_rousing = self.queued() == 0;
        if !self.is_rousing {
            // The kernel hasn't taken the entry, which would be one more than the queue can hold.
            self.sq_tail = self.sq_tail.wrapping_sub(1);
            // Ordering: Release as in `put`.
            self.rings.word(self.sq.tail).store(self.sq_tail, Ordering::Release);
        }
    }

    /// Withdraws the entries that the kernel hasn't taken (invariant 3) and marks their requests failed.
    fn fail_queued(&mut self, error: IoError) {
        self.refusals = 0;
        while self.queued() > 0 {
            self.sq_tail = self.sq_tail.wrapping_sub(1);
            let position = (self.sq_tail & self.sq.mask) as usize;
            // SAFETY: `position` lies between head and tail, so `queue` has written it. The kernel doesn't
            // touch it outside `io_uring_enter`.
            let entry = unsafe { self.entries.base.cast::<io_uring_sqe>().add(position).read() };
            let place = entry.user_data.u64_() as usize;
            self.place(place).failure = error;
            self.failed.insert(place);
        }
        // Ordering: Release as in `put`.
        self.rings.word(self.sq.tail).store(self.sq_tail, Ordering::Release);
    }

    /// Hands out failed requests first, then those in the completion queue. Queues the rest of requests that
    /// were done in part.
    fn take_over(&mut self, out: &mut [Completion]) -> usize {
        let mut count = 0;
        while count < out.len() {
            let Some((place, result)) = self.take_failed().or_else(|| self.take_finished()) else { break };
            self.taken.remove(place);
            out[count] = Completion { token: self.place(place).token, result };
            count += 1;
        }
        count
    }

    fn take_failed(&mut self) -> Option<(usize, Result<(), IoError>)> {
        let place = self.failed.first()?;
        self.failed.remove(place);
        Some((place, Err(self.place(place).failure)))
    }

    /// Returns the next request in the completion queue that is over.
    fn take_finished(&mut self) -> Option<(usize, Result<(), IoError>)> {
        loop {
            let (place, answer) = self.take_answer()?;
            if place == ROUSED as usize {
                self.is_rousing = false;
                continue;
            }
            assert!(self.taken.contains(place), "a completion for a place that is free");
            match self.place(place).transfer.settle(answer) {
                Verdict::Over(result) => return Some((place, result)),
                Verdict::Again => self.queue(place),
            }
        }
    }

    /// Takes one entry off the completion queue.
    fn take_answer(&mut self) -> Option<(usize, Result<usize, Errno>)> {
        // Only this function writes the head.
        let head = self.rings.word(self.cq.head).load(Ordering::Relaxed);
        // Ordering: Acquire pairs with the kernel's release of the tail, so that this thread sees the entry,
        // and the bytes that were read before it.
        if head == self.rings.word(self.cq.tail).load(Ordering::Acquire) {
            return None;
        }
        let position = (head & self.cq.mask) as usize;
        // SAFETY: `cqes_offset` and the number of entries come from the kernel, and `rings_bytes` sized the
        // mapping for them. The kernel has published this entry and leaves it alone until we move the head.
        // Entries are 16 bytes and so aligned, as CQE32 isn't set.
        let (data, res) = unsafe {
            let entry = self.rings.base.add(self.cqes_offset).cast::<io_uring_cqe>().add(position);
            ((*entry.as_ptr()).user_data.u64_(), (*entry.as_ptr()).res)
        };
        // Ordering: Release pairs with the kernel's acquire of the head. The kernel may reuse the entry,
        // which has been read.
        self.rings.word(self.cq.head).store(head.wrapping_add(1), Ordering::Release);
        let answer = usize::try_from(res).map_err(|_| Errno::from_raw_os_error(-res));
        Some((data as usize, answer))
    }
}

impl Backend for Uring {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        request.check();
        let place = self.taken.vacant_below(self.depth)?;
        let in_flight = self.vacated(place);
        in_flight.token = request.token;
        in_flight.op = match request.op {
            Op::Read => IoringOp::Readv,
            Op::Write => IoringOp::Writev,
        };
        in_flight.transfer = Transfer::new(request.offset, request.segments.len());
        for (iovec, segment) in in_flight.iovecs.iter_mut().zip(request.segments) {
            iovec.iov_base = segment.base.cast();
            iovec.iov_len = PAGE_BYTES;
        }
        self.taken.insert(place);
        self.queue(place);
        Ok(())
    }

    fn flush(&mut self) {
        // Each turn gives the kernel at least one entry, or is a refusal. Entries that are left after this
        // many turns go with the next call.
        for _ in 0..DEPTH {
            if self.queued() == 0 {
                return;
            }
            self.enter(Wait::No);
        }
    }

    /// A request that was submitted and not flushed begins here, so that submitting and waiting is one system
    /// call.
    fn complete(&mut self, mut wait: Wait, out: &mut [Completion]) -> usize {
        loop {
            let count = self.take_over(out);
            let may_wait = wait != Wait::No && count == 0 && !out.is_empty() && self.in_flight() > 0;
            if !may_wait {
                self.flush();
                return count;
            }
            self.enter(wait);
            if wait == Wait::Briefly {
                wait = Wait::No;
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.taken.count()
    }
}

impl Drop for Uring {
    /// Waits for everything in flight, because the kernel may still be writing to segments and reading the
    /// table.
    fn drop(&mut self) {
        let mut out = [Completion::EMPTY; DEPTH];
        while self.complete(Wait::One, &mut out) > 0 {}
        assert_eq!(self.in_flight(), 0);
    }
}

/// Both queues, and the submission entries, in memory of this process.
type OwnMemory = (Mapping, Mapping);

/// Makes a ring, and its memory if the kernel can use memory of this process.
///
/// The kernel maps a ring wherever it chooses, and refuses any other address (EINVAL, also for mremap). A
/// ring is made when it is first needed. By then the program may have made a hole that it counts on. A ring
/// in the hole is in the program's way, or is overwritten (case `page_by_page` found one). From Linux 6.5 on
/// a ring can lie in memory of this process, which is far away.
fn set_up(depth: u32) -> Result<(OwnedFd, io_uring_params, Option<OwnMemory>), SetupError> {
    // A page for each, so that the pages needn't be neighbours in RAM.
    const _: () = assert!(DEPTH * size_of::<io_uring_sqe>() <= PAGE_BYTES);
    const _: () =
        assert!(2 * DEPTH * size_of::<io_uring_cqe>() + DEPTH * size_of::<u32>() + 512 <= PAGE_BYTES);
    if let (Ok(rings), Ok(entries)) = (Mapping::private(PAGE_BYTES), Mapping::private(PAGE_BYTES)) {
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::NO_MMAP;
        params.cq_off.user_addr = rings.base.as_ptr().cast::<c_void>().into();
        params.sq_off.user_addr = entries.base.as_ptr().cast::<c_void>().into();
        // SAFETY: both addresses are whole zeroed pages of Farpage's, and stay mapped for as long as the ring
        // exists. The depth is at most DEPTH, so one page is enough for either (asserted above).
        if let Ok(ring) = unsafe { io_uring_setup(depth, &mut params) } {
            return Ok((ring, params, Some((rings, entries))));
        }
    }
    let mut params = io_uring_params::default();
    // SAFETY: no flag is set, so `wq_fd` means nothing. `params` is ours for the kernel to fill.
    let ring = unsafe { io_uring_setup(depth, &mut params) }.map_err(SetupError::at(SetupStep::Ring))?;
    Ok((ring, params, None))
}

/// Returns the size in bytes of the mapping that holds both queues: the later of their ends.
fn rings_bytes(params: &io_uring_params) -> usize {
    let sq_end = params.sq_off.array as usize + params.sq_entries as usize * size_of::<u32>();
    let cq_end = params.cq_off.cqes as usize + params.cq_entries as usize * size_of::<io_uring_cqe>();
    sq_end.max(cq_end)
}

/// Returns an address to ask the kernel for a mapping at. The address is far from programs' mappings, and
/// from where `os` puts Farpage's. The kernel treats it only as a wish, and never takes an address in use.
fn far_away(bytes: usize) -> *mut c_void {
    const STEP: usize = 1 << 21;
    static NEXT: AtomicUsize = AtomicUsize::new(0x2000_0000_0000);
    NEXT.fetch_add(bytes.next_multiple_of(STEP), Ordering::Relaxed) as *mut c_void
}

/// Memory that is unmapped when dropped.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    /// Maps a part of a ring, shared with the kernel. A forked child doesn't get the mapping, because it
    /// could only do harm there.
    fn of_ring(ring: &OwnedFd, offset: u64, bytes: usize) -> rustix::io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: without MAP_FIXED the new mapping replaces none.
        let base = unsafe { mmap(null_mut(), bytes, protection, flags, ring, offset) }?;
        let mapping = Mapping::owning(base, bytes);
        // SAFETY: the range is the mapping just made, and DONTFORK doesn't touch its contents.
        unsafe { madvise(base, bytes, Advice::LinuxDontFork) }?;
        Ok(mapping)
    }

    /// Maps zeroed memory of this process, which a forked child doesn't get.
    fn private(bytes: usize) -> rustix::io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the new mapping replaces none.
        let base = unsafe { mmap_anonymous(far_away(bytes), bytes, protection, MapFlags::PRIVATE) }?;
        let mapping = Mapping::owning(base, bytes);
        // SAFETY: the range is the mapping just made, and DONTFORK doesn't touch its contents.
        unsafe { madvise(base, bytes, Advice::LinuxDontFork) }?;
        Ok(mapping)
    }

    fn owning(base: *mut c_void, bytes: usize) -> Mapping {
        let base = NonNull::new(base.cast::<u8>());
        Mapping { base: base.expect("mmap doesn't choose address 0"), bytes }
    }

    /// Returns the index of a queue at `offset`.
    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(size_of::<u32>()) && offset + size_of::<u32>() <= self.bytes);
        // SAFETY: the word is in bounds and aligned, as just asserted, since the base is page aligned. The
        // mapping lives as long as `self`. All accesses, including the kernel's, are atomic.
        unsafe { self.base.add(offset).cast::<AtomicU32>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value's constructor mapped the range, and no reference into it outlives `self`. The
        // call can't fail for a whole mapping of Farpage's. A failure would only leave the range mapped.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Scratch, page_of, pages_of, read, uring_or_skip, uring_or_skip_keeping};
    use crate::{DEPTH, Segment};
    use rustix::fd::AsFd;
    use std::io::Write;

    #[test]
    fn small_ring_refuses_beyond_its_entries_and_clamps_the_rest() {
        let scratch = Scratch::new(4);
        for (entries, expected) in [(0, 1), (1, 1), (3, 3), (1000, DEPTH)] {
            let Some(mut uring) = uring_or_skip(scratch.fd(), entries) else { return };
            let mut page = page_of(1);
            let segments = [Segment { base: page.0.as_mut_ptr() }];
            let request = Request { op: Op::Write, offset: 0, segments: &segments, token: 0 };
            // SAFETY: `page` outlives the ring and no code writes it.
            let taken = (0..1000).take_while(|_| unsafe { uring.submit(&request) }.is_ok()).count();
            assert_eq!(taken, expected);
        }
    }

    /// Linux forgets a request once in many thousands, so rousing is tested without a forgotten request.
    /// Rousing yields no completion, takes no place, and is left out when the queue is full.
    #[test]
    fn rousing_disturbs_nobody() {
        let scratch = Scratch::new(DEPTH);
        let mut pages = pages_of(DEPTH, 7);
        let Some(mut uring) = uring_or_skip(scratch.fd(), DEPTH as u32) else { return };
        for round in 0..3 {
            uring.rouse();
            uring.rouse();
            for (token, page) in pages.iter_mut().enumerate() {
                let segments = [Segment { base: page.0.as_mut_ptr() }];
                let offset = (token * PAGE_BYTES) as u64;
                let request = Request { op: Op::Write, offset, segments: &segments, token: token as u64 };
                // SAFETY: `pages` outlives the ring, and no code writes it until the ring is gone.
                unsafe { uring.submit(&request) }.unwrap();
            }
            assert_eq!(uring.queued(), DEPTH as u32);
            uring.rouse();
            assert_eq!(uring.queued(), DEPTH as u32, "the queue was full");
            if round == 1 {
                uring.flush();
                uring.rouse();
            }
            let mut seen = [false; DEPTH];
            let mut out = [Completion::EMPTY; 7];
            while uring.in_flight() > 0 {
                let count = uring.complete(Wait::One, &mut out);
                assert!(count > 0);
                for completion in &out[..count] {
                    assert_eq!(completion.result, Ok(()));
                    assert!(!core::mem::replace(&mut seen[completion.token as usize], true));
                }
            }
            assert_eq!(seen, [true; DEPTH]);
        }
    }

    /// A pipe without bytes is a device that doesn't answer. A thread waited for such a device for ever,
    /// though other devices had something for the thread to do.
    #[test]
    fn brief_wait_for_a_device_that_does_not_answer_ends() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let Some(mut uring) = uring_or_skip(reader.as_fd(), 4) else { return };
        let (answer_now, is_time) = std::sync::mpsc::channel::<()>();
        let device = std::thread::spawn(move || {
            // Where the wait doesn't end, the answer comes all the same, and the test fails.
            let _ = is_time.recv_timeout(std::time::Duration::from_secs(20));
            writer.write_all(&page_of(5).0)
        });
        let mut page = page_of(1);
        let segments = [Segment { base: page.0.as_mut_ptr() }];
        let request = Request { op: Op::Read, offset: 0, segments: &segments, token: 9 };
        let mut out = [Completion::EMPTY; 2];
        // SAFETY: `page` outlives the request, and no other code touches it meanwhile.
        unsafe { uring.submit(&request) }.unwrap();
        for _ in 0..3 {
            assert_eq!((uring.complete(Wait::Briefly, &mut out), uring.in_flight()), (0, 1));
        }
        answer_now.send(()).unwrap();
        assert_eq!(uring.complete(Wait::One, &mut out), 1);
        assert_eq!(out[0], Completion { token: 9, result: Ok(()) });
        device.join().unwrap().unwrap();
        assert!(page.0 == page_of(5).0);
    }

    #[test]
    fn drop_with_requests_in_flight_waits_for_them() {
        let scratch = Scratch::new(64);
        let mut pages = pages_of(64, 5);
        let Some(mut uring) = uring_or_skip(scratch.fd(), 64) else { return };
        for (index, page) in pages.iter_mut().enumerate() {
            let segments = [Segment { base: page.0.as_mut_ptr() }];
            let offset = (index * PAGE_BYTES) as u64;
            let request = Request { op: Op::Write, offset, segments: &segments, token: 0 };
            // SAFETY: `pages` outlives the ring, and no code writes it until the ring is gone.
            unsafe { uring.submit(&request) }.unwrap();
            if index == 30 {
                uring.flush();
            }
        }
        drop(uring);
        let mut back = pages_of(64, 0);
        read(&mut crate::Psync::new(scratch.fd()), 0, &mut back).unwrap();
        assert!(back.iter().zip(&pages).all(|(a, b)| a.0 == b.0));
    }

    /// No file system here moves a part and then the rest, so the test makes the part up. The test withdraws
    /// the request, counts its first page as done, and queues the rest as after a short write.
    #[test]
    fn rest_of_a_short_write_goes_where_it_belongs() {
        let scratch = Scratch::new(8);
        let mut pages = pages_of(3, 1);
        let Some(mut uring) = uring_or_skip(scratch.fd(), 8) else { return };
        let segments: Vec<Segment> =
            pages.iter_mut().map(|page| Segment { base: page.0.as_mut_ptr() }).collect();
        let request = Request { op: Op::Write, offset: 4 * 4096, segments: &segments, token: 9 };
        // SAFETY: `pages` outlives the ring, and no code writes it.
        unsafe { uring.submit(&request) }.unwrap();
        uring.fail_queued(IoError::EIO);
        uring.failed.remove(0);
        assert_eq!(uring.place(0).transfer.settle(Ok(PAGE_BYTES + 17)), Verdict::Again);
        uring.queue(0);
        let mut out = [Completion::EMPTY; 2];
        assert_eq!(uring.complete(Wait::One, &mut out), 1);
        assert_eq!(out[0], Completion { token: 9, result: Ok(()) });
        let mut back = pages_of(4, 9);
        read(&mut uring, 4, &mut back).unwrap();
        assert!(back[0].0.iter().chain(&back[3].0).all(|&byte| byte == 0));
        assert!(back[1].0 == pages[1].0 && back[2].0 == pages[2].0);
    }

    /// A program that closes all file descriptors, as daemons do, closes the ring as well. Where the ring's
    /// memory is ours, no mapping of the ring keeps it. The kernel may then break off requests that it has
    /// begun.
    #[test]
    fn ring_that_is_closed_by_the_program_fails_requests_and_doesnt_hang() {
        let scratch = Scratch::new(4);
        let mut pages = [page_of(1), page_of(2)];
        let Some(mut uring) = uring_or_skip(scratch.fd(), 8) else { return };
        let [segment, unflushed] = pages.each_mut().map(|page| Segment { base: page.0.as_mut_ptr() });
        let request = Request { op: Op::Write, offset: 0, segments: &[segment], token: 1 };
        // SAFETY: `pages` outlives the ring and no code writes it.
        unsafe { uring.submit(&request) }.unwrap();
        uring.flush();
        let null = std::fs::File::open("/dev/null").unwrap();
        rustix::io::dup2(null.as_fd(), &mut uring.ring).unwrap();
        let request = Request { op: Op::Write, offset: 4096, segments: &[unflushed], token: 2 };
        // SAFETY: as above.
        unsafe { uring.submit(&request) }.unwrap();
        let mut out = [Completion::EMPTY; 4];
        let mut results = [None; 3];
        while uring.in_flight() > 0 {
            let count = uring.complete(Wait::One, &mut out);
            for completion in &out[..count] {
                results[completion.token as usize] = Some(completion.result);
            }
        }
        assert!(results[2].unwrap().unwrap_err().is_device_lost());
        if results[1].unwrap().is_ok() {
            let mut back = [page_of(0)];
            read(&mut crate::Psync::new(scratch.fd()), 0, &mut back).unwrap();
            assert!(back[0].0 == pages[0].0, "said to be written, and isn't");
        }
    }

    /// A bug: a ring that was made late lay in a hole between a program's mappings, where the program mapped
    /// memory next.
    #[test]
    fn rings_lie_far_from_the_programs_memory() {
        let scratch = Scratch::new(2);
        let Some(uring) = uring_or_skip(scratch.fd(), 8) else { return };
        let place = |mapping: &Mapping| mapping.base.as_ptr() as usize >> 40;
        let places = [&uring.rings, &uring.entries, &uring.table].map(place);
        // Before 6.5 the kernel decides where rings are.
        let can_choose = set_up(8).is_ok_and(|(_, _, own)| own.is_some());
        assert!(!can_choose || places == [0x20; 3], "{places:x?}");
        assert_eq!(places[2], 0x20);
    }

    #[test]
    fn file_may_be_closed_after_setup() {
        let scratch = Scratch::new(2);
        let other = scratch.fd().try_clone_to_owned().unwrap();
        let Some(mut uring) = uring_or_skip(other.as_fd(), 8) else { return };
        drop(other);
        let mut back = [page_of(9)];
        read(&mut uring, 1, &mut back).unwrap();
        assert!(back[0].0.iter().all(|&byte| byte == 0));
    }

    /// A bug: a process was killed, and its lock was free while its last writes were still in flight. Another
    /// process reused the slots.
    #[test]
    fn kept_file_is_open_for_as_long_as_the_ring() {
        let scratch = Scratch::new(2);
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let Some(uring) = uring_or_skip_keeping(scratch.fd(), Some(writer.as_fd()), 8) else { return };
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Err(Errno::AGAIN), "there is a writer");
        drop(uring);
        // The kernel takes a closed ring down some time later.
        let is_closed = || rustix::io::read(&reader, &mut [0; 1]) == Ok(0);
        let soon = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !is_closed() {
            assert!(std::time::Instant::now() < soon, "the ring is gone, the file is still open");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn ring_works_from_another_thread_than_the_one_that_made_it() {
        let scratch = Scratch::new(2);
        let Some(mut uring) = uring_or_skip(scratch.fd(), 8) else { return };
        let written = page_of(3);
        let mut uring = std::thread::spawn(move || {
            crate::conformance::write(&mut uring, 1, std::slice::from_ref(&written)).unwrap();
            uring
        })
        .join()
        .unwrap();
        let mut back = [page_of(0)];
        read(&mut uring, 1, &mut back).unwrap();
        assert_eq!(back[0].0, page_of(3).0);
    }
}
