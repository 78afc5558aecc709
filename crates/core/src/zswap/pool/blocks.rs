//! Blocks: equal pieces of the pool's memory, each cut into slots of one class while it is in use.
//!
//! ```text
//!   Cold --acquire--> InUse --last object gone--> Warm --begin_release--> Releasing --released--> Cold
//!                       ^-----------acquire---------'
//! ```
//!
//! A cold block has no memory behind it. A warm block is empty but keeps its memory, so that the next store
//! neither asks the kernel for pages nor waits for zeroing. Most other empty blocks are given back. A block
//! that is being released belongs to the driver, which works without our lock. Nobody can acquire the block
//! until the driver says that it is done.
//!
//! Free slots of a block are linked through their own first two bytes. Slots that were never used since the
//! block was acquired are only counted, so that a block's pages get memory one by one.
// UNSAFETY: links of free slots, and objects that are moved, lie in raw memory (`data`).

use core::ops::Range;

use super::data::Data;
use super::layout::BLOCK_BYTES_MAX;
use super::list::{Linked, Links, List};
use super::objects::InBlock;

/// Links among the blocks of one fullness group, or among cold or warm blocks.
pub(super) enum InGroup {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum BlockState {
    /// Empty and without memory.
    Cold = 0,
    /// Empty, with memory.
    Warm = 1,
    /// Empty; the driver is giving its memory back.
    Releasing = 2,
    /// Cut into slots of its class, at least one of them in use.
    InUse = 3,
}

/// Metadata of one block. All-zero bytes are a block that was never used.
#[repr(C)]
pub struct BlockMeta {
    links: Links,
    /// The live objects in the block.
    pub(super) objects: List<InBlock>,
    /// Slots from this one on were not used since the block was acquired.
    slots_touched: u16,
    /// The slot freed last, plus 1; 0 if no slot below `slots_touched` is free.
    slot_free: u16,
    pub(super) class: u8,
    pub(super) state: BlockState,
}

impl BlockMeta {
    /// A block that was never used.
    pub const UNUSED: BlockMeta = BlockMeta {
        links: Links::NONE,
        objects: List::EMPTY,
        slots_touched: 0,
        slot_free: 0,
        class: 0,
        state: BlockState::Cold,
    };
}

impl Linked<InGroup> for BlockMeta {
    fn links(&self) -> Links {
        self.links
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

/// Bytes of memory in empty blocks that are kept at most.
const WARM_BYTES_MAX: usize = 1 << 20;
/// Blocks in use for each empty block that is kept, unless the pool is nearly full.
const WARM_PART: u32 = 128;
const _: () = assert!(WARM_BYTES_MAX >= BLOCK_BYTES_MAX);

/// All blocks and the memory they stand for. Block numbers begin at 1.
pub(super) struct Blocks<'m> {
    pub metas: &'m mut [BlockMeta],
    data: Data<'m>,
    block_bytes: usize,
    /// Blocks that may have memory at once.
    pub limit: u32,
    /// Blocks that were ever used. Beyond them `metas` and `data` are untouched.
    pub touched: u32,
    cold: List<InGroup>,
    /// Warm blocks, the one emptied last first: its memory is likeliest to be in the CPU's caches.
    warm: List<InGroup>,
    pub in_use: u32,
    releasing: u32,
}

impl<'m> Blocks<'m> {
    pub fn new(metas: &'m mut [BlockMeta], data: Data<'m>, block_bytes: usize) -> Self {
        let limit = (metas.len() - 1) as u32;
        assert!(data.len() == limit as usize * block_bytes);
        Blocks {
            metas,
            data,
            block_bytes,
            limit,
            touched: 0,
            cold: List::EMPTY,
            warm: List::EMPTY,
            in_use: 0,
            releasing: 0,
        }
    }

    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    pub fn capacity(&self) -> u32 {
        (self.metas.len() - 1) as u32
    }

    /// Returns how many blocks have memory behind them.
    pub fn with_memory(&self) -> u32 {
        self.in_use + self.warm.count + self.releasing
    }

    /// Returns an empty block to cut into slots of `class`; `None` if that would exceed the limit less
    /// `reserve`.
    pub fn acquire(&mut self, class: usize, reserve: u32) -> Option<u32> {
        let limit = self.limit - reserve;
        // The limit holds for warm blocks, too: the limit may have been lowered since they were acquired.
        if self.in_use >= limit {
            return None;
        }
        let block = match self.warm.pop_first(self.metas) {
            Some(warm) => warm,
            None if self.with_memory() >= limit => return None,
            None => self.cold.pop_first(self.metas).unwrap_or_else(|| {
                self.touched += 1;
                self.touched
            }),
        };
        let meta = &mut self.metas[block as usize];
        assert!(matches!(meta.state, BlockState::Cold | BlockState::Warm) && meta.objects.count == 0);
        (meta.state, meta.class) = (BlockState::InUse, class as u8);
        (meta.slots_touched, meta.slot_free) = (0, 0);
        self.in_use += 1;
        Some(block)
    }

    /// Takes back a block whose last object is gone.
    pub fn give_back(&mut self, block: u32) {
        let meta = &mut self.metas[block as usize];
        assert!(meta.state == BlockState::InUse && meta.objects.count == 0);
        meta.state = BlockState::Warm;
        self.in_use -= 1;
        self.warm.push_first(self.metas, block);
    }

    /// Returns how many warm blocks are kept although nobody needs them now. A pool that was full goes down
    /// by a tenth and up again. Each block given back meanwhile is a call of madvise that interrupts other
    /// CPUs. So a nearly full pool keeps an eighth of its limit, 1 MiB at most. Other pools go up and down
    /// less, and what they keep is memory that the program doesn't have.
    fn warm_kept(&self) -> u32 {
        let is_nearly_full = u64::from(self.in_use) * 4 >= u64::from(self.limit) * 3;
        let kept = if is_nearly_full { self.limit / 8 } else { self.in_use / WARM_PART };
        kept.clamp(1, (WARM_BYTES_MAX / self.block_bytes) as u32)
    }

    /// Marks an empty block as being released, if there are more than should be kept. Returns the block's
    /// range.
    pub fn begin_release(&mut self) -> Option<Range<usize>> {
        if self.warm.count <= self.warm_kept() && self.with_memory() <= self.limit {
            return None;
        }
        let block = self.warm.pop_last(self.metas)?;
        self.metas[block as usize].state = BlockState::Releasing;
        self.releasing += 1;
        Some(self.range(block))
    }

    /// Makes a released block cold: the driver has given its memory back.
    pub fn released(&mut self, range: Range<usize>) {
        let block = (range.start / self.block_bytes) as u32 + 1;
        assert!(block <= self.touched && range == self.range(block), "{range:?} is not a block");
        let meta = &mut self.metas[block as usize];
        assert!(meta.state == BlockState::Releasing, "block {block} was not being released");
        meta.state = BlockState::Cold;
        self.releasing -= 1;
        self.cold.push_first(self.metas, block);
    }

    fn range(&self, block: u32) -> Range<usize> {
        let start = (block as usize - 1) * self.block_bytes;
        start..start + self.block_bytes
    }

    /// Returns where the first `length` bytes of a slot are in the data.
    pub fn place(&self, block: u32, slot: u16, slot_bytes: usize, length: usize) -> Range<usize> {
        let inside = usize::from(slot) * slot_bytes;
        assert!(length <= slot_bytes && inside + slot_bytes <= self.block_bytes);
        let start = (block as usize - 1) * self.block_bytes + inside;
        start..start + length
    }

    /// Returns the slot that a free slot is linked to, plus 1.
    fn link(&self, block: u32, slot: u16, slot_bytes: usize) -> u16 {
        let place = self.place(block, slot, slot_bytes, size_of::<u16>());
        // SAFETY: only the pool uses free slots, and the caller has the pool's lock.
        let bytes = unsafe { self.data.bytes(place) };
        u16::from_ne_bytes(bytes.try_into().expect("of so many bytes"))
    }

    /// Takes a free slot of a block that has one. The slot's content is arbitrary.
    pub fn take_slot(&mut self, block: u32, slot_bytes: usize) -> u16 {
        match self.metas[block as usize].slot_free {
            0 => {
                let slot = self.metas[block as usize].slots_touched;
                assert!((usize::from(slot) + 1) * slot_bytes <= self.block_bytes, "block {block} is full");
                self.metas[block as usize].slots_touched += 1;
                slot
            }
            free => {
                self.metas[block as usize].slot_free = self.link(block, free - 1, slot_bytes);
                free - 1
            }
        }
    }

    /// Frees a slot, and overwrites its first bytes.
    pub fn free_slot(&mut self, block: u32, slot: u16, slot_bytes: usize) {
        let next = self.metas[block as usize].slot_free;
        let place = self.place(block, slot, slot_bytes, size_of::<u16>());
        // SAFETY: the slot's object has left it. Nobody reads or writes the slot any more, because the object
        // has no pin.
        unsafe { self.data.bytes_mut(place) }.copy_from_slice(&next.to_ne_bytes());
        self.metas[block as usize].slot_free = slot + 1;
    }

    /// Copies `length` bytes from one (block, slot) to another of the same class, which was taken. The object
    /// that lies in the first slot must not have a pin.
    pub fn copy(&mut self, from: (u32, u16), to: (u32, u16), slot_bytes: usize, length: usize) {
        assert!(from != to);
        let from = self.place(from.0, from.1, slot_bytes, length);
        let to = self.place(to.0, to.1, slot_bytes, length);
        // SAFETY: two different slots don't overlap. The target was taken and holds no object yet, so no
        // other code reads or writes it. Nobody writes the source, because its object has no pin.
        unsafe { self.data.bytes_mut(to).copy_from_slice(self.data.bytes(from)) };
    }

    /// Asserts what holds among blocks alone: each block ever used is in the one list that its state says.
    pub fn check(&self) {
        let mut counted = [0; 4];
        for block in 1..=self.touched {
            let meta = &self.metas[block as usize];
            counted[meta.state as usize] += 1;
            assert!((meta.objects.count != 0) == (meta.state == BlockState::InUse), "block {block}");
        }
        assert!(counted == [self.cold.count, self.warm.count, self.releasing, self.in_use]);
        let expect = |block: u32, state| assert!(self.metas[block as usize].state == state, "block {block}");
        self.cold.check(self.metas, |block| expect(block, BlockState::Cold));
        self.warm.check(self.metas, |block| expect(block, BlockState::Warm));
        assert!(self.touched <= self.capacity());
    }

    /// Asserts that the block's free slots and the slots in `used` are all different. Together they are all
    /// slots that were ever touched.
    pub fn check_slots(&self, block: u32, slot_bytes: usize, used: impl Iterator<Item = u16>) {
        let meta = &self.metas[block as usize];
        // A bit per slot. A block has at most 64 KiB, in slots of at least 32 bytes.
        let mut seen = [0_u64; 32];
        let mut count = 0;
        let mut see = |slot: u16| {
            assert!(slot < meta.slots_touched, "slot {slot} of block {block} was never taken");
            let (word, bit) = (usize::from(slot / 64), 1 << (slot % 64));
            assert!(seen[word] & bit == 0, "slot {slot} of block {block} has two uses");
            seen[word] |= bit;
            count += 1;
        };
        used.for_each(&mut see);
        let mut free = meta.slot_free;
        while free != 0 {
            see(free - 1);
            free = self.link(block, free - 1, slot_bytes);
        }
        assert!(count == meta.slots_touched, "block {block} lost a slot");
    }

    /// Fills memory that was given back with `byte`, which is worse than what the kernel does to it.
    #[cfg(test)]
    pub fn scribble(&mut self, range: Range<usize>, byte: u8) {
        // SAFETY: the block is empty, and was given to the caller.
        unsafe { self.data.bytes_mut(range) }.fill(byte);
    }
}
