//! The memory that a simulated process hands to its pager: zeroed tables, frames and pool. The memory is
//! freed with the process.
//!
//! Frames are modelled as the kernel has them. A frame without memory behind it is filled with poison, which
//! no page contains and no code may overwrite.

// UNSAFETY: a pager borrows this memory for its whole life. Here one value owns both the pager and the
// memory, so the borrow has no lifetime that can be written down.

use farpage_core::cache::Backing;
use farpage_core::memory::{Region, Zeroed};
use farpage_core::table::Leaf;
use farpage_core::units::{FrameIndex, PAGE_BYTES, PageBytes};
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Pieces of memory that live until the home is dropped.
#[derive(Default)]
pub(crate) struct Home {
    pieces: Vec<(*mut u8, Layout)>,
}

impl Home {
    /// Returns `bytes` zeroed bytes, page aligned.
    pub(crate) fn piece(&mut self, bytes: usize) -> *mut u8 {
        let layout = Layout::from_size_align(bytes.max(1), PAGE_BYTES).expect("a sensible size");
        // SAFETY: the layout's size isn't 0.
        let piece = unsafe { alloc_zeroed(layout) };
        assert!(!piece.is_null(), "no memory for a simulated process");
        self.pieces.push((piece, layout));
        piece
    }

    /// Returns zeroed memory for tables. The caller drops all users of the memory before the home.
    pub(crate) fn region(&mut self, bytes: usize) -> Region<'static> {
        let base = self.piece(bytes);
        // SAFETY: the memory is fresh, zeroed, of this size, and unshared. The memory lives as long as
        // `self`, not forever. `self` outlives the pager, because `Space` declares it last.
        unsafe { Region::new(base, bytes) }
    }

    /// Returns a table of `count` zeroed values, under the condition of [`Home::region`].
    pub(crate) fn table<T: Zeroed>(&mut self, count: usize) -> &'static mut [T] {
        self.region(Region::bytes_for::<T>(count)).carve(count)
    }

    /// Returns a leaf for the page table.
    pub(crate) fn leaf(&mut self) -> &'static Leaf {
        &self.table::<Leaf>(1)[0]
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for &(piece, layout) in &self.pieces {
            // SAFETY: `piece` allocated this memory with this layout, and it is freed once.
            unsafe { dealloc(piece, layout) };
        }
    }
}

/// The byte that fills a frame without memory.
const POISON: u8 = 0xdb;

/// The frames, as the kernel sees them.
pub(crate) struct Frames {
    first: *mut PageBytes,
    backed: Vec<bool>,
    /// The bytes of a page when it was moved into the frame. A pipe or a device may still read them there.
    lent: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
}

impl Frames {
    /// Wraps `count` frames at `first`, all with or all without memory. The frames must live as long as
    /// `self` is used.
    pub(crate) fn new(first: *mut PageBytes, count: usize, backing: Backing) -> Frames {
        let mut frames = Frames { first, backed: vec![true; count], lent: vec![None; count] };
        if backing == Backing::Hole {
            (0..count).for_each(|frame| frames.empty(FrameIndex(frame as u32)));
        }
        frames
    }

    #[expect(clippy::mut_from_ref, reason = "frames are raw memory; the simulator has one thread")]
    fn bytes(&self, frame: FrameIndex) -> &mut [u8; PAGE_BYTES] {
        assert!(frame.at() < self.backed.len());
        // SAFETY: the frame is in bounds, and alive by the promise in `new`. The core's references to frames
        // live only inside one of its calls, on the same thread, and none of these calls leads here.
        unsafe { &mut (*self.first.add(frame.at())).0 }
    }

    pub(crate) fn is_backed(&self, frame: FrameIndex) -> bool {
        self.backed[frame.at()]
    }

    pub(crate) fn backed_count(&self) -> usize {
        self.backed.iter().filter(|&&backed| backed).count()
    }

    /// Gives a hole memory, as its first touch does. The frame then holds zeros.
    pub(crate) fn back(&mut self, frame: FrameIndex) {
        assert!(!self.is_backed(frame), "{frame:?} already has memory");
        self.assert_intact(frame);
        self.bytes(frame).fill(0);
        self.backed[frame.at()] = true;
    }

    /// Makes a frame a hole, by MADV_DONTNEED or because the page moved out.
    pub(crate) fn empty(&mut self, frame: FrameIndex) {
        assert!(self.is_backed(frame), "{frame:?} is a hole already");
        self.assert_unchanged(frame);
        self.bytes(frame).fill(POISON);
        self.backed[frame.at()] = false;
        self.lent[frame.at()] = None;
    }

    /// Moves a page into a hole.
    pub(crate) fn fill_hole(&mut self, frame: FrameIndex, bytes: &[u8; PAGE_BYTES]) {
        assert!(!self.is_backed(frame), "a page was moved over {frame:?}, which has memory");
        self.assert_intact(frame);
        *self.bytes(frame) = *bytes;
        self.backed[frame.at()] = true;
        self.lent[frame.at()] = Some(Box::new(*bytes));
    }

    /// Copies a page into a frame with memory.
    pub(crate) fn copy_in(&mut self, frame: FrameIndex, bytes: &[u8; PAGE_BYTES]) {
        assert!(self.is_backed(frame), "{frame:?} is a hole");
        *self.bytes(frame) = *bytes;
    }

    pub(crate) fn read(&self, frame: FrameIndex) -> &[u8; PAGE_BYTES] {
        assert!(self.is_backed(frame), "{frame:?}, a hole, was read");
        self.bytes(frame)
    }

    fn assert_intact(&self, frame: FrameIndex) {
        assert!(self.bytes(frame).iter().all(|&byte| byte == POISON), "{frame:?}, a hole, was written");
    }

    fn assert_unchanged(&self, frame: FrameIndex) {
        let lent = self.lent[frame.at()].as_deref();
        assert!(
            lent.is_none_or(|lent| lent == self.bytes(frame)),
            "{frame:?}: a page that came was written to"
        );
    }

    /// Asserts that no code has written into a hole, or into the memory of a page that was moved here.
    pub(crate) fn check(&self) {
        for frame in (0..self.backed.len() as u32).map(FrameIndex) {
            if self.is_backed(frame) { self.assert_unchanged(frame) } else { self.assert_intact(frame) }
        }
    }
}
