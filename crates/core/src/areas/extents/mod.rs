//! Extents: where on its device each slot of an area lies.
//!
//! A swap file is rarely one piece. The file's extents are found once, when the area is put on, and never
//! change while it is on. `mapped.rs` finds them from what the file system reports. So a lookup needs no
//! modifiable tree, no lock and no cursor.
//!
//! The first slots of all extents lie sorted in one array. Beside the array, a guide divides the area evenly
//! into parts, at most half as many as there are extents. The guide names the extent that holds a part's
//! first slot, and the next part's. Between the two there are rarely more than sixteen extents, which are
//! compared at once, without a branch. There are more where short extents lie close together. Then halving
//! comes first, so a lookup takes O(log n) steps for any file.
//!
//! Each extent stores its *distance*, the number to add to one of its slots for the slot's block. Two
//! neighbours with the same distance are one extent, so merging is only a comparison. The arrays may lie in
//! memory that several processes see. One process builds them, and hands the other processes a [`Head`].
//!
//! An array of every sixteenth first slot above the array of first slots, and so on upwards, would need less
//! memory. But a lookup would make four dependent reads instead of two, and would be no faster than halving
//! alone.
//!
//! Extents matter because a request that crosses from one extent into the next is two requests to the disk.
//! For that request ext4 waits for a lock of the whole file, in a kernel thread. So requests end where
//! extents end ([`super::Areas::take`], and readahead).
// UNSAFETY: memory that another process built has no type. Its type is given here, beside the builder.

mod mapped;
#[cfg(all(test, not(loom)))]
mod tests;

pub use mapped::{Hole, Mapped, whole_pages};

use crate::memory::Region;
use crate::units::SLOTS_PER_AREA_MAX;

/// First slots that are compared at once, 64 bytes of them.
const AT_ONCE: usize = 16;
/// A slot number beyond every slot, also as a signed number.
const FAR: u32 = i32::MAX as u32;
const _: () = assert!(SLOTS_PER_AREA_MAX <= FAR);

/// Neighbouring slots that lie side by side on the device as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first slot.
    pub slot: u32,
    /// Number of slots.
    pub count: u32,
    /// Where the first slot lies, in pages from the device's start.
    pub block: u64,
}

impl Extent {
    /// Returns the number to add to one of the extent's slots for that slot's block. The number wraps around,
    /// because a block number may be smaller than the slot number.
    const fn distance(&self) -> u64 {
        self.block.wrapping_sub(self.slot as u64)
    }
}

/// Counts extents in the order of their slots, without storing them. A summary shows the counts, and they say
/// how much memory [`Builder`] needs.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Tally {
    extents: u32,
    slots: u32,
    /// Distance of the last extent.
    distance: u64,
    /// Block where slot 0 lies.
    first_block: u64,
    /// The lowest block that holds a slot other than 0, and one past the highest. If they are equal, there is
    /// no such block.
    lowest: u64,
    end: u64,
}

impl Tally {
    /// Adds slots that follow those added before. Returns true if they begin a new extent, and false if they
    /// make the last extent longer.
    pub fn add(&mut self, extent: Extent) -> bool {
        assert!(extent.slot == self.slots && extent.count > 0, "extents follow each other without a gap");
        assert!(extent.count <= SLOTS_PER_AREA_MAX - extent.slot, "no area has as many slots");
        let begins = self.extents == 0 || extent.distance() != self.distance;
        if self.extents == 0 {
            self.first_block = extent.block;
        }
        self.widen(extent);
        self.extents += u32::from(begins);
        self.slots += extent.count;
        self.distance = extent.distance();
        begins
    }

    /// Widens the span of blocks. Slot 0 is the header's and doesn't count.
    fn widen(&mut self, extent: Extent) {
        let header = u64::from(extent.slot == 0);
        let (low, high) = (extent.block + header, extent.block + u64::from(extent.count));
        if low < high {
            let is_first = self.lowest == self.end;
            self.lowest = if is_first { low } else { self.lowest.min(low) };
            self.end = self.end.max(high);
        }
    }

    /// Extents added so far.
    pub const fn extents(&self) -> u32 {
        self.extents
    }

    /// Slots added so far, slot 0 included.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Number of blocks from the lowest to the highest used one, without the header's block. Says how far
    /// apart the slots lie.
    pub const fn span(&self) -> u64 {
        self.end - self.lowest
    }
}

/// Everything about an area's extents except their arrays. All zeros mean that the extents aren't known.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Head {
    device: u64,
    tally: Tally,
    /// Slots in a part of the guide, as a shift.
    shift: u32,
    /// Entries of the guide.
    guide: u32,
}

impl Head {
    /// Whether the area's extents are known.
    pub const fn is_known(&self) -> bool {
        self.tally.extents > 0
    }

    /// Bytes that the arrays take.
    pub const fn bytes(&self) -> u64 {
        self.tally.extents as u64 * (size_of::<u64>() + size_of::<u32>()) as u64
            + self.guide as u64 * size_of::<u32>() as u64
    }
}

/// Takes extents in the order of their slots, and becomes [`Extents`].
pub struct Builder<'m> {
    tally: Tally,
    starts: &'m mut [u32],
    distances: &'m mut [u64],
    guide: &'m mut [u32],
}

impl<'m> Builder<'m> {
    /// Creates a builder with a capacity of `extents_max` extents. `region` must have [`Extents::bytes`]
    /// left.
    pub fn new(region: &mut Region<'m>, extents_max: u32) -> Builder<'m> {
        let distances = region.carve(extents_max as usize);
        let starts = region.carve(extents_max as usize);
        let guide = region.carve(guide_max(extents_max as usize));
        Builder { tally: Tally::default(), starts, distances, guide }
    }

    /// Adds slots that follow those added before. Merges them with the last extent if they follow it on the
    /// device too. Returns whether they begin a new extent. Panics if there is no free place for a new
    /// extent.
    pub fn add(&mut self, extent: Extent) -> bool {
        let begins = self.tally.add(extent);
        if begins {
            let at = self.tally.extents as usize - 1;
            self.distances[at] = extent.distance();
            self.starts[at] = extent.slot;
        }
        begins
    }

    /// Writes the guide and returns the extents. `device` is the device's number. At least one slot must have
    /// been added.
    pub fn finish(self, device: u64) -> Extents<'m> {
        assert!(self.tally.slots > 0, "an area has slots");
        let Builder { tally, starts, distances, guide } = self;
        let count = tally.extents as usize;
        let (starts, distances) = (&starts[..count], &distances[..count]);
        let parts_max = guide_max(count).saturating_sub(1) as u32;
        let parts = |shift: u32| ((tally.slots - 1) >> shift) + 1;
        let shift = (0..32).find(|shift| parts(*shift) <= parts_max).unwrap_or(0);
        let guide = match parts_max {
            0 => &mut guide[..0],
            _ => &mut guide[..=parts(shift) as usize],
        };
        let mut at = 0;
        for (part, guide) in guide.iter_mut().enumerate() {
            let first = (part as u64) << shift;
            at += starts[at + 1..].iter().take_while(|start| u64::from(**start) <= first).count();
            *guide = at as u32;
        }
        let head = Head { device, tally, shift, guide: guide.len() as u32 };
        Extents::of_arrays(head, distances, starts, guide)
    }
}

/// Entries of the guide: one for each part and one for the end. There are at most half as many parts as
/// extents. A few extents need no guide.
const fn guide_max(extents: usize) -> usize {
    if extents <= AT_ONCE { 0 } else { extents / 2 + 1 }
}

/// The extents of an area that is on. They never change, so any number of threads may read them.
pub struct Extents<'m> {
    head: Head,
    /// Copy of the first sixteen first slots, filled up with [`FAR`]. Most areas have no more extents.
    few: [u32; AT_ONCE],
    /// The extent that holds the first slot of each part. The last entry is the last extent. Empty if there
    /// are few extents.
    guide: &'m [u32],
    /// The first slot of each extent.
    starts: &'m [u32],
    /// The distance of each extent: the number to add to a slot for its block.
    distances: &'m [u64],
}

impl<'m> Extents<'m> {
    /// Bytes of memory for this many extents: 12 bytes for each, and up to 2 bytes for the guide.
    pub const fn bytes(extents: u32) -> usize {
        let extents = extents as usize;
        Region::bytes_for::<u64>(extents) + Region::bytes_for::<u32>(extents + guide_max(extents))
    }

    fn of_arrays(head: Head, distances: &'m [u64], starts: &'m [u32], guide: &'m [u32]) -> Extents<'m> {
        let mut few = [FAR; AT_ONCE];
        few.iter_mut().zip(starts).for_each(|(few, start)| *few = *start);
        Extents { head, few, guide, starts, distances }
    }

    /// Returns the head that another process needs beside the memory: see [`Extents::of_memory`].
    pub const fn head(&self) -> Head {
        self.head
    }

    /// Returns the extents that a [`Builder`] has built at `memory`, in this process or another. The
    /// builder's capacity must have been exactly the number of extents.
    ///
    /// # Safety
    /// `head` must belong to the extents at `memory`. `memory` must be aligned to 8 bytes, as it was for the
    /// builder. Nobody may write there for `'m`.
    pub unsafe fn of_memory(head: Head, memory: *const u8) -> Extents<'m> {
        let (count, guide) = (head.tally.extents as usize, head.guide as usize);
        // SAFETY: a builder with a capacity of exactly `count` extents carves distances, first slots and the
        // guide, in this order and without padding. So the three slices lie where the builder wrote them. The
        // caller promises the rest: `head` belongs to this memory, the memory is aligned, and nobody writes
        // there for `'m`.
        unsafe {
            let distances = memory.cast::<u64>();
            let starts = distances.add(count).cast::<u32>();
            Extents::of_arrays(
                head,
                core::slice::from_raw_parts(distances, count),
                core::slice::from_raw_parts(starts, count),
                core::slice::from_raw_parts(starts.add(count), guide),
            )
        }
    }

    /// Returns the extents of a block device. The device is one extent, in which slot and block have the same
    /// number.
    pub fn of_device(region: &mut Region<'m>, device: u64, slots: u32) -> Extents<'m> {
        let mut builder = Builder::new(region, 1);
        builder.add(Extent { slot: 0, count: slots, block: 0 });
        builder.finish(device)
    }

    /// Returns the block of a slot. Every slot of the area has a block, so asking for a slot beyond the area
    /// is a bug.
    #[inline]
    pub fn block(&self, slot: u32) -> u64 {
        u64::from(slot).wrapping_add(self.distances[self.find(slot)])
    }

    /// Returns `slot` and the slots after it that lie side by side on the device. One request can move all of
    /// them.
    #[inline]
    pub fn run_from(&self, slot: u32) -> Extent {
        let at = self.find(slot);
        let block = u64::from(slot).wrapping_add(self.distances[at]);
        Extent { slot, count: self.end_of(at) - slot, block }
    }

    /// Returns the extent that holds `slot`: the last extent whose first slot isn't beyond `slot`.
    #[inline]
    fn find(&self, slot: u32) -> usize {
        assert!(slot < self.head.tally.slots, "slot {slot} is beyond the area");
        if self.guide.is_empty() {
            return not_beyond(&self.few, slot) - 1;
        }
        let part = (slot >> self.head.shift) as usize;
        let (mut low, mut high) = (self.guide[part] as usize, self.guide[part + 1] as usize);
        while high - low >= AT_ONCE {
            let middle = low.midpoint(high);
            if self.starts[middle] <= slot {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        // The last few extents are searched together with those before them, so that there are always
        // sixteen.
        let from = low.min(self.starts.len() - AT_ONCE);
        let sixteen = self.starts[from..].first_chunk::<AT_ONCE>();
        from + not_beyond(sixteen.expect("a guide stands beside more than sixteen"), slot) - 1
    }

    /// Returns one past the last slot of an extent.
    fn end_of(&self, at: usize) -> u32 {
        self.starts.get(at + 1).copied().unwrap_or(self.head.tally.slots)
    }

    /// Returns all extents, in the order of their slots.
    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.within(0, self.head.tally.slots)
    }

    /// Returns the extents that the `count` slots from `slot` on lie in. The first and the last extent are
    /// cut to those slots. Used to discard a cluster.
    pub fn within(&self, slot: u32, count: u32) -> impl Iterator<Item = Extent> + '_ {
        let end = slot + count;
        assert!(end <= self.head.tally.slots, "slots {slot} to {end} are beyond the area");
        let first = if count == 0 { 0 } else { self.find(slot) };
        let all = (first..self.starts.len()).map(move |at| {
            let from = self.starts[at].max(slot);
            let block = u64::from(from).wrapping_add(self.distances[at]);
            Extent { slot: from, count: self.end_of(at).min(end).saturating_sub(from), block }
        });
        all.take_while(move |extent| extent.slot < end && extent.count > 0)
    }

    /// Returns the extents of every slot but the header, slot 0. Used to discard the area.
    pub fn without_header(&self) -> impl Iterator<Item = Extent> + '_ {
        self.within(1, self.head.tally.slots - 1)
    }

    /// Whether the area begins at this block of this device. So an area that is known only by its place, as
    /// after a hibernation, can be found again.
    pub const fn begins_at(&self, device: u64, block: u64) -> bool {
        self.head.device == device && self.head.tally.first_block == block
    }

    /// Returns how many extents and slots there are, and how far apart the slots lie.
    pub const fn tally(&self) -> &Tally {
        &self.head.tally
    }

    /// Asserts the conditions that a lookup relies on. First slots rise from 0, neighbours aren't one extent,
    /// and the guide names the extent that holds the first slot of each part.
    pub fn check(&self) {
        let starts = self.starts;
        assert!(starts[0] == 0 && starts[starts.len() - 1] < self.head.tally.slots);
        assert!(starts.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(self.distances.windows(2).all(|pair| pair[0] != pair[1]));
        let of_slot = |slot: u64| starts.partition_point(|start| u64::from(*start) <= slot) - 1;
        let mut parts = self.guide.iter().enumerate();
        assert!(parts.all(|(part, at)| *at as usize == of_slot((part as u64) << self.head.shift)));
        assert!(
            self.guide.is_empty()
                || (self.guide.len() - 1) << self.head.shift >= self.head.tally.slots as usize
        );
    }
}

/// Returns how many of these first slots aren't beyond `slot`. There is no branch, so that the compiler
/// compares four first slots at a time. The numbers are compared as signed ones, as SSE2 does, and slots have
/// only 28 bits.
#[inline]
fn not_beyond(starts: &[u32; AT_ONCE], slot: u32) -> usize {
    starts.iter().map(|start| i32::from(*start as i32 <= slot as i32)).sum::<i32>() as usize
}
