//! The back end for systems that refuse io_uring, and the one synchronous read of a fault. Each request is
//! one `preadv` or `pwritev`, done by the time `submit` returns. The completion waits in a fixed table.
//!
//! Requests overlap only between threads: each thread has a `Psync` of its own on the same file.
//!
//! UNSAFETY: the segments of a request are addresses, and the system calls take slices.

use crate::table::Finished;
use crate::transfer::{Transfer, Verdict};
use crate::{Backend, Busy, Completion, IoError, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_core::units::PAGE_BYTES;
use rustix::fd::BorrowedFd;
use rustix::io::{IoSlice, IoSliceMut};

/// Reads and writes with one system call per request.
pub struct Psync<'fd> {
    fd: BorrowedFd<'fd>,
    finished: Finished,
}

impl<'fd> Psync<'fd> {
    /// Makes a back end on `fd`, which may have been opened with O_DIRECT.
    pub const fn new(fd: BorrowedFd<'fd>) -> Self {
        Psync { fd, finished: Finished::new() }
    }
}

impl Backend for Psync<'_> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        request.check();
        if self.finished.is_full() {
            return Err(Busy);
        }
        let mut transfer = Transfer::new(request.offset, request.segments.len());
        let result = loop {
            let rest = &request.segments[transfer.first..];
            let answer = match request.op {
                // SAFETY: the caller of `submit` vouches that the segments are valid and none appears twice.
                // No other code touches the segments of a read.
                Op::Read => unsafe { read(self.fd, rest, transfer.offset) },
                // SAFETY: the caller vouches that the segments are valid and that no code writes them.
                Op::Write => unsafe { write(self.fd, rest, transfer.offset) },
            };
            if let Verdict::Over(result) = transfer.settle(answer) {
                break result;
            }
        };
        self.finished.push(Completion { token: request.token, result });
        Ok(())
    }

    fn flush(&mut self) {}

    fn complete(&mut self, _: Wait, out: &mut [Completion]) -> usize {
        self.finished.pop_into(out)
    }

    fn in_flight(&self) -> usize {
        self.finished.len()
    }
}

/// Makes one `preadv`.
///
/// # Safety
///
/// Each segment is a valid page that no other code touches during the call, and none appears twice.
unsafe fn read(fd: BorrowedFd<'_>, segments: &[Segment], offset: u64) -> rustix::io::Result<usize> {
    let mut slices: [IoSliceMut<'_>; SEGMENTS_MAX] = core::array::from_fn(|_| IoSliceMut::new(&mut []));
    for (slice, segment) in slices.iter_mut().zip(segments) {
        // SAFETY: by the contract above `base` is valid for PAGE_BYTES of reads and writes, and holds
        // initialised memory. No other reference to it exists until `slices` is gone at the end of this
        // function.
        *slice = IoSliceMut::new(unsafe { core::slice::from_raw_parts_mut(segment.base, PAGE_BYTES) });
    }
    rustix::io::preadv(fd, &mut slices[..segments.len()], offset)
}

/// Makes one `pwritev`.
///
/// # Safety
///
/// Each segment is a valid page that no code writes during the call.
unsafe fn write(fd: BorrowedFd<'_>, segments: &[Segment], offset: u64) -> rustix::io::Result<usize> {
    let mut slices: [IoSlice<'_>; SEGMENTS_MAX] = core::array::from_fn(|_| IoSlice::new(&[]));
    for (slice, segment) in slices.iter_mut().zip(segments) {
        // SAFETY: by the contract above `base` is valid for PAGE_BYTES of reads and holds initialised memory.
        // The memory doesn't change until `slices` is gone at the end of this function.
        *slice = IoSlice::new(unsafe { core::slice::from_raw_parts(segment.base, PAGE_BYTES) });
    }
    rustix::io::pwritev(fd, &slices[..segments.len()], offset)
}

/// Reads whole pages at once. A fault uses this when it has no other request to wait for.
///
/// `buffer` is a multiple of a page, and page aligned if `fd` was opened with O_DIRECT. After an error its
/// contents are unspecified.
///
// Signal-safe: `pread` in a bounded loop; no lock, no errno, no allocation.
pub fn read_now(fd: BorrowedFd<'_>, offset: u64, buffer: &mut [u8]) -> Result<(), IoError> {
    assert!(!buffer.is_empty() && buffer.len().is_multiple_of(PAGE_BYTES));
    let mut transfer = Transfer::new(offset, buffer.len() / PAGE_BYTES);
    loop {
        let rest = &mut buffer[transfer.first * PAGE_BYTES..];
        if let Verdict::Over(result) = transfer.settle(rustix::io::pread(fd, rest, transfer.offset)) {
            return result;
        }
    }
}
