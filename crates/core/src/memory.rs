//! The memory that `core` is handed. `core` never allocates; at start it carves its tables out of a region
//! that it is given.
//!
//! The region is zeroed. In a live process the kernel populates it page by page as it is touched. So a table
//! can be as long as its index could ever need, at no cost.
// UNSAFETY: turning bytes into typed tables has no safe way without an allocator.

use core::marker::PhantomData;

/// Types for which all-zero bytes are a valid value, and which need no drop.
///
/// # Safety
/// The implementer promises both conditions.
pub unsafe trait Zeroed: Sized {}

// SAFETY: integers and atomic integers are valid for every bit pattern, zero included, and have no drop.
unsafe impl Zeroed for u8 {}
// SAFETY: as above.
unsafe impl Zeroed for u16 {}
// SAFETY: as above.
unsafe impl Zeroed for u32 {}
// SAFETY: as above.
unsafe impl Zeroed for u64 {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU32 {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU64 {}
// SAFETY: an atomic pointer may be null, which is all zeros.
unsafe impl<T> Zeroed for core::sync::atomic::AtomicPtr<T> {}
// SAFETY: an array is zeroed when its elements are.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU8 {}
// SAFETY: bytes only.
unsafe impl Zeroed for crate::units::PageBytes {}
// SAFETY: a lock's word is zero while it is free; what it protects may be zeroed, and neither has a drop.
unsafe impl<T: Zeroed, const RANK: u8> Zeroed for crate::sync::Lock<T, RANK> {}

// SAFETY: zero bytes are an object that was never stored, and no field has a drop.
unsafe impl Zeroed for crate::zswap::pool::ObjectMeta {}
// SAFETY: zero bytes are a block that was never used, and no field has a drop.
unsafe impl Zeroed for crate::zswap::pool::BlockMeta {}

/// A zeroed region that hands out disjoint typed tables until it is used up.
pub struct Region<'m> {
    next: *mut u8,
    left: usize,
    owner: PhantomData<&'m mut [u8]>,
}

impl<'m> Region<'m> {
    /// Takes over `bytes` bytes at `base`.
    ///
    /// # Safety
    /// The memory must be readable, writable and all zero, and no other code may use it for `'m`.
    pub const unsafe fn new(base: *mut u8, bytes: usize) -> Region<'m> {
        Region { next: base, left: bytes, owner: PhantomData }
    }

    /// Returns the next `count` values of `T`, all zero. Panics if the region is too small. The region's size
    /// comes from a layout function next to the table, so a region too small is a bug, not a condition.
    pub fn carve<T: Zeroed>(&mut self, count: usize) -> &'m mut [T] {
        let padding = self.next.align_offset(align_of::<T>());
        let bytes = count * size_of::<T>();
        assert!(padding + bytes <= self.left, "a handed region is too small for its tables");
        // SAFETY: the assertion keeps `base..base + bytes` inside the region given to `new`, and `padding`
        // aligns it. The memory is zero and exclusively ours for 'm. Advancing `next` past it means that it
        // is handed out once. `T: Zeroed` makes zero bytes a valid value.
        unsafe {
            let base = self.next.add(padding);
            self.next = base.add(bytes);
            self.left -= padding + bytes;
            core::slice::from_raw_parts_mut(base.cast::<T>(), count)
        }
    }

    /// Returns the bytes that `count` values of `T` take wherever the region stands, alignment included.
    pub const fn bytes_for<T: Zeroed>(count: usize) -> usize {
        count * size_of::<T>() + align_of::<T>()
    }
}
