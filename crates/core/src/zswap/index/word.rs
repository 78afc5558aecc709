//! The three packed words of the index: an entry, a leaf's tally, a cluster's lease of a leaf.

use crate::zswap::pool::ObjectHandle;

/// The entry of one slot. The upper half is the object's handle. The lower half counts the stores at this
/// place. The count stays when the entry is erased, so a word with a handle never comes back: comparing words
/// compares identities. (The count wraps after 2^32 stores at one place. A thread that compares must not have
/// slept through exactly that many.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(pub u64);

impl Word {
    pub const fn handle(self) -> Option<ObjectHandle> {
        ObjectHandle::from_raw((self.0 >> 32) as u32)
    }
    /// Returns the next entry at this place.
    pub const fn with(self, handle: ObjectHandle) -> Word {
        Word((handle.raw() as u64) << 32 | (self.0 as u32).wrapping_add(1) as u64)
    }
    /// Returns the word of this place without an entry.
    pub const fn erased(self) -> Word {
        Word(self.0 as u32 as u64)
    }
}

/// Keeps a leaf with its cluster. The upper half is the number of the assignment, its generation. The
/// lower half counts the entries that the leaf has or is about to have. Generation 0 means that the leaf is
/// assigned to no cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tally(pub u64);

impl Tally {
    /// Assigned to no cluster.
    pub const FREE: Tally = Tally(0);

    pub const fn new(generation: u32, count: u32) -> Tally {
        Tally((generation as u64) << 32 | count as u64)
    }
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
    pub const fn count(self) -> u32 {
        self.0 as u32
    }
}

/// The leaf of a cluster. The upper half is 1 + the leaf's number. The lower half is the number of the
/// assignment, which tells a leaf that went and came back from a leaf that stayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease(pub u64);

impl Lease {
    pub const NONE: Lease = Lease(0);

    pub const fn new(leaf: usize, generation: u32) -> Lease {
        Lease((leaf as u64 + 1) << 32 | generation as u64)
    }
    pub const fn leaf(self) -> Option<usize> {
        ((self.0 >> 32) as usize).checked_sub(1)
    }
    pub const fn generation(self) -> u32 {
        self.0 as u32
    }
}
