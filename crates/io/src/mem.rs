//! An area in memory, which the simulator and the tests of other crates use in place of a device.
//!
//! The area has a fixed size, like a block device. Pages up to the end are moved. Beyond the end a write
//! returns `NoSpace` and a read `Short`. Pages that were never written read as zeros.
//!
//! UNSAFETY: the segments of a request are addresses.

use crate::table::Finished;
use crate::{Backend, Busy, Completion, IoError, Op, Request, Segment, Wait};
use farpage_core::units::PAGE_BYTES;

/// A back end whose device is a slice.
pub struct Mem<'a> {
    bytes: &'a mut [u8],
    finished: Finished,
}

impl<'a> Mem<'a> {
    /// Makes an area of the whole pages in `bytes`, which are cleared.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        bytes.fill(0);
        Mem { bytes, finished: Finished::new() }
    }

    /// Returns the content of the device, for checks.
    pub const fn contents(&self) -> &[u8] {
        self.bytes
    }

    /// Returns the page of the device at `offset`, if it lies before the end.
    fn page(&mut self, offset: u64) -> Option<&mut [u8]> {
        let start = usize::try_from(offset).ok()?;
        self.bytes.get_mut(start..start.checked_add(PAGE_BYTES)?)
    }
}

impl Backend for Mem<'_> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        request.check();
        if self.finished.is_full() {
            return Err(Busy);
        }
        let mut result = Ok(());
        for (offset, &Segment { base }) in (request.offset..).step_by(PAGE_BYTES).zip(request.segments) {
            let Some(page) = self.page(offset) else {
                result = Err(if request.op == Op::Write { IoError::NoSpace } else { IoError::Short });
                break;
            };
            match request.op {
                // SAFETY: the caller of `submit` vouches that `base` is a valid page that no other code
                // touches. `page` is a page of our own slice, which is borrowed exclusively, so the two can't
                // overlap.
                Op::Read => unsafe { base.copy_from_nonoverlapping(page.as_ptr(), PAGE_BYTES) },
                // SAFETY: as above, except that other code may read `base`, as this code does.
                Op::Write => unsafe { base.copy_to_nonoverlapping(page.as_mut_ptr(), PAGE_BYTES) },
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{page_of, read, write};

    #[test]
    fn requests_across_the_end_move_what_fits_and_say_what_is_missing() {
        let mut device = vec![0xee; 3 * PAGE_BYTES];
        let mut mem = Mem::new(&mut device);
        let two = [page_of(1), page_of(2)];
        assert_eq!(write(&mut mem, 2, &two), Err(IoError::NoSpace));
        assert_eq!(write(&mut mem, 3, &two), Err(IoError::NoSpace));
        let mut back = [page_of(9), page_of(9)];
        assert_eq!(read(&mut mem, 2, &mut back), Err(IoError::Short));
        assert_eq!(back[0].0, two[0].0);
        assert_eq!(read(&mut mem, 0, &mut back), Ok(()));
        assert!(back.iter().all(|page| page.0.iter().all(|&byte| byte == 0)));
    }
}
