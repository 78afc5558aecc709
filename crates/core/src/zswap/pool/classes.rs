//! Size classes: which slot size an object gets, and which block of that size is used next.
//!
//! Classes aren't spaced evenly but cut from the block. For each number of slots that a block can hold there
//! is one class, with the largest slots of which that many fit. So hardly anything is left over at a block's
//! end. Classes that would hold equally many slots, or lie within 16 bytes, are one. An uncompressed page
//! (4096 bytes) fits exactly.
//!
//! A class keeps its partly filled blocks in groups by how full they are. Stores go to the fullest group, so
//! that sparse blocks drain by themselves. Compaction takes objects from the sparsest group. Full and empty
//! blocks are in no group.
#![forbid(unsafe_code)]

use super::blocks::{BlockMeta, InGroup};
use super::list::{Linked, List};
use crate::units::PAGE_BYTES;

/// Bytes of which every slot size is a multiple.
const GRANULE_BYTES: usize = 8;
/// Bytes of the smallest slot: LZ4 needs about 30 bytes for a page of two values.
pub(super) const SLOT_BYTES_MIN: usize = 32;
/// Bytes between two classes, at least. Finer classes would leave more in their unfilled blocks than they
/// save.
const STEP_BYTES: usize = 16;
/// Classes that every block size has at most; asserted below.
pub(super) const CLASSES_MAX: usize = 112;
/// Groups by fullness: quarters.
const GROUPS: usize = 4;

/// The class of an object, by its granules.
type ClassOf = [u8; PAGE_BYTES / GRANULE_BYTES + 1];

/// One size class.
pub(super) struct Class {
    pub slot_bytes: usize,
    /// Slots in a block.
    pub capacity: u32,
    /// Blocks of this class, including full blocks.
    pub blocks: u32,
    /// Free slots in these blocks.
    pub slots_free: u32,
    groups: [List<InGroup>; GROUPS],
}

impl Class {
    const EMPTY: Self = Class {
        slot_bytes: 0,
        capacity: 0,
        blocks: 0,
        slots_free: 0,
        groups: [const { List::EMPTY }; GROUPS],
    };

    /// Returns the group of a block with `used` slots in use; `None` for a full or empty block.
    fn group_of(&self, used: u32) -> Option<usize> {
        let partial = 0 < used && used < self.capacity;
        partial.then_some(used as usize * GROUPS / self.capacity as usize)
    }

    /// Puts `block` into its group. `before` of its slots were in use, and now `after` are.
    pub fn regroup(&mut self, blocks: &mut [BlockMeta], block: u32, before: u32, after: u32) {
        let (from, to) = (self.group_of(before), self.group_of(after));
        if from != to {
            if let Some(from) = from {
                self.groups[from].remove(blocks, block);
            }
            if let Some(to) = to {
                self.groups[to].push_first(blocks, block);
            }
        }
        self.slots_free = self.slots_free + before - after;
    }

    /// Returns a block of the fullest group, which has a free slot; `None` if all blocks are full.
    pub fn fullest(&self) -> Option<u32> {
        self.groups.iter().rev().map(|group| group.first).find(|&first| first != 0)
    }

    /// Returns from which block to which an object should be moved so that blocks become empty. Returns
    /// `None` if no block can become empty. A block can as soon as the free slots make up a block: then any
    /// one block's objects fit into the other blocks.
    pub fn compaction(&self, blocks: &[BlockMeta]) -> Option<(u32, u32)> {
        if self.slots_free < self.capacity {
            return None;
        }
        let from = self.groups.iter().map(|group| group.first).find(|&first| first != 0)?;
        // A partly filled block lacks less than a whole block, so there are at least two, and `to` exists.
        let to = self.fullest().filter(|&to| to != from).unwrap_or(blocks[from as usize].links().next);
        (to != 0).then_some((from, to))
    }

    /// Visits each partly filled block, and asserts that it is in its group.
    pub fn check_groups(&self, blocks: &[BlockMeta], mut visit: impl FnMut(u32)) {
        for (number, group) in self.groups.iter().enumerate() {
            group.check(blocks, |block| {
                let used = blocks[block as usize].objects.count;
                assert!(self.group_of(used) == Some(number), "block {block} with {used} used is in {number}");
                visit(block);
            });
        }
    }
}

/// All classes of a pool, the largest slots first.
pub(super) struct Classes {
    classes: [Class; CLASSES_MAX],
    count: usize,
    class_of: ClassOf,
    /// The class at which compaction goes on.
    pub compacting: usize,
}

impl Classes {
    pub fn new(block_bytes: usize) -> Self {
        let mut this = Classes {
            classes: [const { Class::EMPTY }; CLASSES_MAX],
            count: 0,
            class_of: [0; PAGE_BYTES / GRANULE_BYTES + 1],
            compacting: 0,
        };
        let mut next = Some(PAGE_BYTES);
        while let Some(slot_bytes) = next {
            let class = &mut this.classes[this.count];
            (class.slot_bytes, class.capacity) = (slot_bytes, (block_bytes / slot_bytes) as u32);
            // Larger classes come first, so the class written last is the smallest that is large enough.
            this.class_of[..=slot_bytes / GRANULE_BYTES].fill(this.count as u8);
            this.count += 1;
            next = slot_bytes_after(block_bytes, slot_bytes);
        }
        this
    }

    /// Returns the class of an object of `length` bytes.
    pub fn of_length(&self, length: usize) -> usize {
        usize::from(self.class_of[length.div_ceil(GRANULE_BYTES)])
    }

    pub fn get(&self, class: usize) -> &Class {
        &self.classes[class]
    }

    pub fn get_mut(&mut self, class: usize) -> &mut Class {
        &mut self.classes[class]
    }

    pub fn all(&self) -> &[Class] {
        &self.classes[..self.count]
    }
}

/// Returns the next smaller slot size: at least one more slot fits a block, and the size is at least a step
/// smaller.
const fn slot_bytes_after(block_bytes: usize, slot_bytes: usize) -> Option<usize> {
    let one_more = block_bytes / (block_bytes / slot_bytes + 1);
    let step_less = slot_bytes - STEP_BYTES;
    let smaller = if one_more < step_less { one_more } else { step_less };
    let wanted = smaller & !(GRANULE_BYTES - 1);
    if wanted < SLOT_BYTES_MIN {
        return None;
    }
    // As many slots as of `wanted` fit, but they are as large as they can be.
    Some((block_bytes / (block_bytes / wanted)) & !(GRANULE_BYTES - 1))
}

const fn class_count(block_bytes: usize) -> usize {
    let (mut count, mut slot_bytes) = (1, PAGE_BYTES);
    while let Some(next) = slot_bytes_after(block_bytes, slot_bytes) {
        (count, slot_bytes) = (count + 1, next);
    }
    count
}

const _: () = assert!(class_count(64 << 10) <= CLASSES_MAX && CLASSES_MAX <= u8::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_gets_the_smallest_slot_that_holds_it() {
        for block_bytes in [4096, 8192, 16384, 32768, 65536] {
            let classes = Classes::new(block_bytes);
            assert_eq!(classes.count, class_count(block_bytes));
            assert!(classes.count <= CLASSES_MAX);
            for length in 1..=PAGE_BYTES {
                let class = classes.of_length(length);
                assert!(length <= classes.get(class).slot_bytes);
                if let Some(smaller) = classes.all().get(class + 1) {
                    assert!(length > smaller.slot_bytes, "{length} would fit {}", smaller.slot_bytes);
                }
            }
        }
    }

    #[test]
    fn classes_differ_in_capacity_and_raw_pages_waste_nothing() {
        for block_bytes in [4096, 8192, 16384, 32768, 65536] {
            let classes = Classes::new(block_bytes);
            assert_eq!(classes.get(0).slot_bytes * classes.get(0).capacity as usize, block_bytes);
            for pair in classes.all().windows(2) {
                assert!(pair[0].capacity < pair[1].capacity && pair[0].slot_bytes > pair[1].slot_bytes);
            }
            assert!(classes.all().iter().all(|class| class.capacity <= 1 << 11));
        }
    }
}
