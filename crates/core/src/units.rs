//! Units: an index, a count and a size are different types.
//!
//! All other code uses these types. Each conversion is visible at the call, and each rounding is a named
//! choice.

/// Bytes in a page. x86-64 has no other base page size.
pub const PAGE_BYTES: usize = 4096;
/// `PAGE_BYTES` as a shift.
pub const PAGE_SHIFT: u32 = 12;
const _: () = assert!(1 << PAGE_SHIFT == PAGE_BYTES);

/// Slots in a cluster: 2 MiB of an area, as in Linux with transparent huge pages.
pub const CLUSTER_SLOTS: u32 = 512;

/// A page-sized, page-aligned buffer, of which frames and scratch pages are made.
#[repr(C, align(4096))]
#[derive(Clone)]
pub struct PageBytes(pub [u8; PAGE_BYTES]);

impl PageBytes {
    /// A page of zeros.
    pub const ZERO: PageBytes = PageBytes([0; PAGE_BYTES]);
}

/// Number of a page in a space: its address divided by the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// Returns the page that contains this address.
    pub const fn of_address(address: usize) -> Self {
        PageIndex((address >> PAGE_SHIFT) as u64)
    }
    /// Returns the address of the page's first byte.
    pub const fn address(self) -> usize {
        (self.0 << PAGE_SHIFT) as usize
    }
    /// Returns the page `count` pages further on.
    #[must_use]
    pub const fn plus(self, count: u64) -> Self {
        PageIndex(self.0 + count)
    }
}

/// Pages from `start` up to `end`, without `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// First page.
    pub start: PageIndex,
    /// One past the last page.
    pub end: PageIndex,
}

impl PageRange {
    /// Returns the range `start..end`. An inverted range becomes empty.
    pub const fn new(start: PageIndex, end: PageIndex) -> Self {
        let end = if end.0 < start.0 { start } else { end };
        PageRange { start, end }
    }
    /// Returns the range of `count` pages from `start`.
    pub const fn of(start: PageIndex, count: u64) -> Self {
        PageRange { start, end: PageIndex(start.0 + count) }
    }
    /// Returns every page that has a byte in `[address, address + bytes)`. The start is rounded down, and the
    /// end up.
    pub const fn covering(address: usize, bytes: usize) -> Self {
        let end = (address + bytes + PAGE_BYTES - 1) >> PAGE_SHIFT;
        PageRange { start: PageIndex::of_address(address), end: PageIndex(end as u64) }
    }
    /// Number of pages in the range.
    pub const fn count(self) -> u64 {
        self.end.0 - self.start.0
    }
    /// Number of bytes in the range.
    pub const fn bytes(self) -> usize {
        (self.count() as usize) << PAGE_SHIFT
    }
    /// Whether the range has no page.
    pub const fn is_empty(self) -> bool {
        self.start.0 >= self.end.0
    }
    /// Whether `page` is in the range.
    pub const fn contains(self, page: PageIndex) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }
    /// Returns the pages that both ranges have, which may be none.
    #[must_use]
    pub const fn intersection(self, other: PageRange) -> PageRange {
        let start = if self.start.0 > other.start.0 { self.start } else { other.start };
        let end = if self.end.0 < other.end.0 { self.end } else { other.end };
        PageRange::new(start, end)
    }
    /// Returns the pages one by one, in address order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PageIndex> {
        (self.start.0..self.end.0).map(PageIndex)
    }
}

/// Number of a frame: a page-sized buffer that Farpage owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct FrameIndex(pub u32);

impl FrameIndex {
    /// Returns the number as an index into a slice of frames.
    pub const fn at(self) -> usize {
        self.0 as usize
    }
}

/// Number of a swap area, in the order in which areas were put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct AreaId(pub u8);

/// Number of a NUMA node: the node of the CPU that a thread runs on, or of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NodeId(pub u8);

/// Nodes that Farpage tells apart.
pub const NODES_MAX: usize = 64;

/// A page-sized place in a swap area: the area's number in the top 4 bits, the slot in the other 28.
///
/// 28 bits of 4 KiB slots are 1 TiB per area, and 4 bits are [`AREAS_MAX`] areas. Slot 0 of every area holds
/// the header. So the value 0, which is slot 0 of area 0, is never handed out, and can mean "none" in a
/// packed word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct SlotIndex(u32);

/// Areas that can be on at once.
pub const AREAS_MAX: usize = 16;
/// Slots that one area can have.
pub const SLOTS_PER_AREA_MAX: u32 = 1 << 28;
const _: () = assert!((AREAS_MAX as u64) * (SLOTS_PER_AREA_MAX as u64) == 1 << 32);

impl SlotIndex {
    /// Slot `offset` of `area`.
    pub const fn new(area: AreaId, offset: u32) -> Self {
        assert!((area.0 as usize) < AREAS_MAX && offset < SLOTS_PER_AREA_MAX);
        SlotIndex((area.0 as u32) << 28 | offset)
    }
    /// Returns the slot with this packed form.
    pub const fn from_raw(raw: u32) -> Self {
        SlotIndex(raw)
    }
    /// Returns the packed form.
    pub const fn raw(self) -> u32 {
        self.0
    }
    /// Returns the area that the slot lies in.
    pub const fn area(self) -> AreaId {
        AreaId((self.0 >> 28) as u8)
    }
    /// Returns the slot's number inside its area.
    pub const fn offset(self) -> u32 {
        self.0 & (SLOTS_PER_AREA_MAX - 1)
    }
    /// Returns the slot's byte offset inside its area.
    pub const fn byte_offset(self) -> u64 {
        (self.offset() as u64) << PAGE_SHIFT
    }
    /// Returns the slot `count` slots further on in the same area.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        SlotIndex::new(self.area(), self.offset() + count)
    }
}

/// Largest number of pages that share a slot. The pages are compressed and lie one behind the other.
pub const PARTS_MAX: usize = 4;

/// Which of the pages that share a slot. [`Part::WHOLE`] if one page has the slot for itself, uncompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Part(u8);

impl Part {
    /// The slot holds one page, uncompressed.
    pub const WHOLE: Part = Part(0);

    /// Returns the part of page number `at`, from 0, among the pages of a slot.
    pub const fn nth(at: usize) -> Self {
        assert!(at < PARTS_MAX);
        Part(at as u8 + 1)
    }
    /// Returns the part with this packed form.
    pub const fn from_raw(raw: u8) -> Self {
        assert!(raw as usize <= PARTS_MAX);
        Part(raw)
    }
    /// Returns the packed form, which has three bits.
    pub const fn raw(self) -> u8 {
        self.0
    }
    /// Returns the page's number, from 0, among the pages of its slot. None if one page has the slot for
    /// itself.
    pub const fn at(self) -> Option<usize> {
        (self.0 as usize).checked_sub(1)
    }
    /// Returns the page's number like `at`, but 0 for a page that has its slot for itself.
    pub const fn place(self) -> usize {
        (self.0 as usize).saturating_sub(1)
    }
}

/// Where a page's bytes are on an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotPart {
    /// The slot, which is always read and written as a whole.
    pub slot: SlotIndex,
    /// The part of the slot.
    pub part: Part,
}

impl SlotPart {
    /// Returns the place of a page that has its slot for itself.
    pub const fn whole(slot: SlotIndex) -> Self {
        SlotPart { slot, part: Part::WHOLE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_apart_from_each_other_and_from_a_whole_slot() {
        assert_eq!((Part::WHOLE.raw(), Part::WHOLE.at()), (0, None));
        for at in 0..PARTS_MAX {
            assert_eq!((Part::nth(at).at(), Part::from_raw(Part::nth(at).raw())), (Some(at), Part::nth(at)));
        }
    }

    #[test]
    fn covering_rounds_start_down_and_end_up() {
        let range = PageRange::covering(0x1fff, 2);
        assert_eq!((range.start, range.end), (PageIndex(1), PageIndex(3)));
        assert_eq!(PageRange::covering(0x2000, 0x1000).count(), 1);
    }

    #[test]
    fn slot_keeps_area_and_offset_at_both_ends() {
        for (area, offset) in [(0, 1), (15, SLOTS_PER_AREA_MAX - 1), (7, 0)] {
            let slot = SlotIndex::new(AreaId(area), offset);
            assert_eq!((slot.area(), slot.offset()), (AreaId(area), offset));
            assert_eq!(SlotIndex::from_raw(slot.raw()), slot);
        }
    }

    #[test]
    fn intersection_of_disjoint_ranges_is_empty() {
        let a = PageRange::of(PageIndex(1), 4);
        assert!(a.intersection(PageRange::of(PageIndex(9), 1)).is_empty());
        assert_eq!(a.intersection(PageRange::of(PageIndex(3), 9)).count(), 2);
    }
}
