//! Area back ends: how pages get to a device and back.
//!
//! The pager decides that a run of slots must be read or written. A driver turns the decision into a
//! [`Request`], hands it to a [`Backend`], and later gets a [`Completion`] with the same token. No code of
//! this adapter knows what a page means.
//!
//! The life of a request, and the modules in that order:
//!
//! 1. [`file`] makes sure that a swap file has blocks where it is about to be written.
//! 2. [`uring`], [`psync`] or [`mem`] carries the request out. All three pass one conformance suite and are
//!    compared with each other. [`read_now`] is the one read that a fault can do without any back end.
//! 3. `transfer` is their common rule for a device that did only a part of a request.
//! 4. [`error`] says what went wrong, in words that the layers above can act on.
//! 5. [`counting`], [`faulty`], [`slow`] and [`crash`] wrap any back end, to count, or to bring about what
//!    devices do on bad days. Tests and the simulator put them around the real back end.
//!
//! The crate runs in threads that the host program doesn't know of. Therefore it doesn't allocate and doesn't
//! use thread-local storage, and everything in flight sits in a table of fixed size.
//!
//! UNSAFETY: requests carry plain addresses. Frames belong to the caller, and move between program and pool
//! while no Rust reference to them exists.
#![cfg_attr(not(test), no_std)]

pub mod counting;
pub mod crash;
pub mod error;
pub mod faulty;
pub mod file;
pub mod mem;
pub mod psync;
mod random;
pub mod slow;
mod table;
mod transfer;
pub mod uring;

#[cfg(test)]
mod conformance;

pub use counting::{Counting, IoCounts, OpCounts};
pub use crash::{Crash, CrashPlan};
pub use error::{Busy, IoError, SetupError, SetupStep};
pub use faulty::{FaultCounts, FaultPlan, Faulty};
pub use file::AreaFile;
pub use mem::Mem;
pub use psync::{Psync, read_now};
pub use slow::{Slow, SlowPlan};
pub use uring::Uring;

use farpage_core::units::PAGE_BYTES;

/// Pages that one request can carry: 256 KiB, beyond which the reference device gets no faster.
pub const SEGMENTS_MAX: usize = 64;

/// Requests that a back end can have in flight.
pub const DEPTH: usize = 64;

/// One page-sized piece of memory: [`PAGE_BYTES`] long and page aligned.
///
/// A plain address, because the caller owns the frame until the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Segment {
    /// First byte.
    pub base: *mut u8,
}

// SAFETY: a segment is an address, and having it permits nothing. The contract of `Backend::submit` settles
// which code may touch the bytes, and when. The contract doesn't depend on the thread.
unsafe impl Send for Segment {}
// SAFETY: as above. A shared segment can only be copied.
unsafe impl Sync for Segment {}

impl Segment {
    /// No memory; fills unused places of tables.
    pub(crate) const NONE: Segment = Segment { base: core::ptr::null_mut() };
}

/// Direction of a request, seen from the program: read is device to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// From the device into the segments.
    Read,
    /// From the segments to the device.
    Write,
}

/// Adjacent pages of an area, to be read into or written from pages of memory.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Direction.
    pub op: Op,
    /// Where the request begins in the file, in bytes. Page aligned.
    pub offset: u64,
    /// The pages in memory, `1..=SEGMENTS_MAX` of them, in the order of the file.
    pub segments: &'a [Segment],
    /// Comes back in the completion. The back end ignores it, and it need not be unique.
    pub token: u64,
}

impl Request<'_> {
    /// Bytes to move.
    pub const fn bytes(&self) -> usize {
        self.segments.len() * PAGE_BYTES
    }

    /// Panics if the request breaks the rules that the tables rely on. A broken rule is a bug of the caller,
    /// not an error.
    pub(crate) fn check(&self) {
        assert!((1..=SEGMENTS_MAX).contains(&self.segments.len()), "segments: {}", self.segments.len());
        assert!(self.offset.is_multiple_of(PAGE_BYTES as u64), "offset {} isn't page aligned", self.offset);
        // i64::MAX is the largest offset that the kernel takes.
        assert!(self.offset <= i64::MAX as u64 - self.bytes() as u64, "offset {} is too far", self.offset);
        for segment in self.segments {
            debug_assert!(!segment.base.is_null() && segment.base.addr().is_multiple_of(PAGE_BYTES));
        }
    }
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the request.
    pub token: u64,
    /// Success if all bytes were moved. After an error any part of the request may have been done.
    pub result: Result<(), IoError>,
}

impl Completion {
    /// An empty completion, to fill arrays for [`Backend::complete`].
    pub const EMPTY: Completion = Completion { token: 0, result: Ok(()) };
}

/// Whether [`Backend::complete`] may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Returns the completions that are there.
    No,
    /// Blocks until there is a completion, or for some milliseconds. A back end that can't wait for a time
    /// doesn't block.
    Briefly,
    /// Blocks until there is a completion, if anything is in flight.
    One,
}

/// A back end that reads and writes pages of one area.
///
/// Two requests in flight that overlap on the device, one of them a write, take effect in no particular
/// order. The caller must wait for the first before it submits the second. Completions come in any order.
/// Every token taken comes back exactly once.
pub trait Backend {
    /// Takes a request. The request begins at the latest with the next [`Backend::flush`] or
    /// [`Backend::complete`], and may begin at once.
    ///
    /// Returns [`Busy`], having taken nothing, when the in-flight table is full. The caller then calls
    /// [`Backend::complete`] and tries again. The slice of segments is no longer needed after the call.
    ///
    /// # Safety
    ///
    /// The following must hold until the completion with this token has been returned, or the back end is
    /// dropped. Each segment is [`PAGE_BYTES`] of valid, initialised memory. For [`Op::Read`] no other code
    /// reads or writes the segments, and none appears twice. For [`Op::Write`] no code writes them.
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy>;

    /// Starts the requests that were taken, with one system call for many requests.
    fn flush(&mut self);

    /// Returns up to `out.len()` completions. With [`Wait::One`] the call blocks until there is at least one,
    /// unless nothing is in flight or `out` is empty. [`Wait::Briefly`] may end without any. The call
    /// includes a [`Backend::flush`].
    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize;

    /// Returns the number of requests taken whose completion hasn't been returned.
    fn in_flight(&self) -> usize;
}

impl<B: Backend + ?Sized> Backend for &mut B {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        // SAFETY: the inner `submit` has the same contract, and our caller keeps it.
        unsafe { (**self).submit(request) }
    }
    fn flush(&mut self) {
        (**self).flush();
    }
    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        (**self).complete(wait, out)
    }
    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }
}
