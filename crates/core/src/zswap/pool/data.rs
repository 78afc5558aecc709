//! The memory in which objects lie.
//!
//! Bytes of an object are read and written while others change the pool, so no reference covers more than one object's place.
// UNSAFETY: references are made into raw memory; whose bytes they are is `blocks` and `pins` to know.

use core::marker::PhantomData;
use core::ops::Range;

/// Where it begins and how long it is.
#[derive(Clone, Copy)]
pub(super) struct Data<'m> {
    base: *mut u8,
    bytes: usize,
    /// It was lent to us.
    memory: PhantomData<&'m mut [u8]>,
}

// SAFETY: it is lent for as long as this lives, like the slice that it was made of; what is done with it is unsafe.
unsafe impl Send for Data<'_> {}
// SAFETY: as above.
unsafe impl Sync for Data<'_> {}

impl<'m> Data<'m> {
    pub fn new(memory: &'m mut [u8]) -> Data<'m> {
        Data { base: memory.as_mut_ptr(), bytes: memory.len(), memory: PhantomData }
    }

    pub const fn len(self) -> usize {
        self.bytes
    }

    fn at(self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} is not in the pool");
        self.base.wrapping_add(range.start)
    }

    /// Has the CPU fetch these bytes into its caches, all at once: a decoder would wait for one line after the other. (1.01 to 1.03
    /// times the touches from the pool: `farpage load touch`, 256 MiB under 200M.)
    pub fn prefetch(self, range: &Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..range.len()).step_by(64) {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing and can't fail, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at(range).wrapping_add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = range;
    }

    /// Some of it.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice is in use.
    pub unsafe fn bytes(self, range: Range<usize>) -> &'m [u8] {
        // SAFETY: inside the memory by `at`; the rest is the caller's.
        unsafe { core::slice::from_raw_parts(self.at(&range), range.len()) }
    }

    /// Some of it, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the slice is in use.
    pub unsafe fn bytes_mut(self, range: Range<usize>) -> &'m mut [u8] {
        // SAFETY: inside the memory by `at`; the rest is the caller's.
        unsafe { core::slice::from_raw_parts_mut(self.at(&range), range.len()) }
    }
}
