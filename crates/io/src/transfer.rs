//! How far a request has come, and what to do when a device did only a part of it.
//!
//! Devices and file systems may move less than was asked. The rule is the same for every back end, and counts
//! whole pages only, so the rest always begins at a page. A file opened with O_DIRECT would refuse any other
//! offset, and doing half a page twice is harmless. The rule:
//!
//! 1. A result that covers whole pages is progress. The request goes on behind them.
//! 2. A result that covers less than a page may be an interrupted transfer. The request is tried once more
//!    from the same page.
//! 3. No bytes at all, or less than a page twice in a row, is the end of the file: `Short`.
//! 4. EINTR, EAGAIN and ECANCELED are tried again, a bounded number of times without progress.

use crate::error::IoError;
use farpage_core::units::PAGE_BYTES;
use rustix::io::Errno;

/// Tries without progress until EINTR, EAGAIN or ECANCELED counts as the answer. A device that is merely busy
/// accepts one of this many tries. An endless loop would hang the faulting thread.
const RETRIES_MAX: u32 = 1000;

/// A request on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Offset in the file at which the rest begins.
    pub offset: u64,
    /// The first segment of the rest.
    pub first: usize,
    /// Segments of the whole request.
    pub count: usize,
    /// Results since the last whole page that covered less than a page.
    parts: u32,
    /// Tries since the last whole page that were refused for the moment.
    retries: u32,
}

/// What the caller does next with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The request is over.
    Over(Result<(), IoError>),
    /// The caller does the rest.
    Again,
}

impl Transfer {
    pub(crate) const fn new(offset: u64, count: usize) -> Transfer {
        Transfer { offset, first: 0, count, parts: 0, retries: 0 }
    }

    /// Takes in the kernel's answer for the rest: bytes moved, or errno.
    pub(crate) fn settle(&mut self, answer: Result<usize, Errno>) -> Verdict {
        let bytes = match answer {
            // ECANCELED: the submitting thread has ended, and the kernel dropped the requests that it hadn't
            // begun.
            Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                return Verdict::Again;
            }
            Err(errno) => return Verdict::Over(Err(IoError::from_errno(errno))),
            Ok(bytes) => bytes,
        };
        let pages = bytes / PAGE_BYTES;
        assert!(pages <= self.count - self.first, "the kernel moved more than it was asked to");
        if pages == 0 {
            self.parts += 1;
            let ended = bytes == 0 || self.parts > 1;
            return if ended { Verdict::Over(Err(IoError::Short)) } else { Verdict::Again };
        }
        self.first += pages;
        self.offset += (pages * PAGE_BYTES) as u64;
        self.parts = 0;
        self.retries = 0;
        if self.first == self.count { Verdict::Over(Ok(())) } else { Verdict::Again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Verdict::{Again, Over};

    const PAGE: usize = PAGE_BYTES;

    #[test]
    fn whole_pages_are_progress_and_the_rest_begins_at_a_page() {
        let mut transfer = Transfer::new(8 * PAGE as u64, 4);
        assert_eq!(transfer.settle(Ok(PAGE + 100)), Again);
        assert_eq!((transfer.offset, transfer.first), (9 * PAGE as u64, 1));
        assert_eq!(transfer.settle(Ok(3 * PAGE)), Over(Ok(())));
    }

    #[test]
    fn part_of_a_page_is_tried_once_more_and_then_the_end() {
        let mut transfer = Transfer::new(0, 2);
        assert_eq!(transfer.settle(Ok(100)), Again);
        assert_eq!(transfer.settle(Ok(PAGE)), Again);
        assert_eq!(transfer.settle(Ok(100)), Again);
        assert_eq!(transfer.settle(Ok(100)), Over(Err(IoError::Short)));
    }

    #[test]
    fn nothing_moved_is_the_end_of_the_file() {
        assert_eq!(Transfer::new(0, 1).settle(Ok(0)), Over(Err(IoError::Short)));
    }

    #[test]
    fn refusals_for_the_moment_are_retried_but_not_for_ever() {
        let mut transfer = Transfer::new(0, 2);
        for errno in [Errno::INTR, Errno::AGAIN, Errno::CANCELED] {
            assert_eq!(transfer.settle(Err(errno)), Again);
        }
        assert_eq!(transfer.settle(Ok(PAGE)), Again);
        for _ in 0..RETRIES_MAX {
            assert_eq!(transfer.settle(Err(Errno::AGAIN)), Again);
        }
        let over = transfer.settle(Err(Errno::AGAIN));
        assert_eq!(over, Over(Err(IoError::from_errno(Errno::AGAIN))));
    }

    #[test]
    fn other_errors_end_the_request_with_their_number() {
        assert_eq!(Transfer::new(0, 1).settle(Err(Errno::IO)), Over(Err(IoError::EIO)));
        assert_eq!(Transfer::new(0, 1).settle(Err(Errno::NOSPC)), Over(Err(IoError::NoSpace)));
    }
}
