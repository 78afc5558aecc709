//! The memory in which objects lie.
//!
//! Bytes of an object are read and written while other threads change the pool. So no reference covers more
//! than one object's place.
// UNSAFETY: references are made into raw memory. `blocks` and `pins` know whose bytes they are.

use core::marker::PhantomData;
use core::ops::Range;

/// Where the memory begins and how long it is.
#[derive(Clone, Copy)]
pub(super) struct Data<'m> {
    base: *mut u8,
    bytes: usize,
    /// The memory is lent to the pool.
    memory: PhantomData<&'m mut [u8]>,
}

// SAFETY: the memory is lent for as long as this value lives, like the slice that it was made of. Only unsafe
// methods access the bytes.
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

    /// Has the CPU fetch these bytes into its caches, all lines at once. Without this a decoder would wait
    /// for one line after the other.
    pub fn prefetch(self, range: &Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..range.len()).step_by(64) {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch is a hint, which reads nothing and can't fail, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at(range).wrapping_add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = range;
    }

    /// Returns some of the bytes.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice is in use.
    pub unsafe fn bytes(self, range: Range<usize>) -> &'m [u8] {
        // SAFETY: `at` asserts that the range is inside the memory. The caller promises that nobody writes
        // it.
        unsafe { core::slice::from_raw_parts(self.at(&range), range.len()) }
    }

    /// Returns some of the bytes, to write.
    ///
    /// # Safety
    /// No other code reads or writes these bytes while the slice is in use.
    pub unsafe fn bytes_mut(self, range: Range<usize>) -> &'m mut [u8] {
        // SAFETY: `at` asserts that the range is inside the memory. The caller promises that no other code
        // reads or writes it.
        unsafe { core::slice::from_raw_parts_mut(self.at(&range), range.len()) }
    }
}
