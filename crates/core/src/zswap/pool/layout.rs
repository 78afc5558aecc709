//! Computes how much memory a pool wants, and in what block size it uses the memory.
//!
//! The driver asks [`PoolLayout::for_limit`], maps that much zeroed memory, and hands it over. Nearly all of
//! the memory stays untouched until objects come, and so has no pages behind it.
#![forbid(unsafe_code)]

use super::blocks::BlockMeta;
use super::objects::ObjectMeta;
use crate::units::PAGE_BYTES;

/// Bits of a handle, at most: the page table keeps the handle in the payload of an entry.
pub const HANDLE_BITS: u32 = 28;

/// Bytes of pool for each object. If objects are smaller on average, the pool runs out of handles before
/// memory.
const BYTES_PER_OBJECT_MIN: usize = 128;

/// The block sizes, each with the smallest limit for which it is used.
///
/// A block holds objects of one class. Large blocks allow finely spaced classes, so an object wastes little
/// inside its slot. But each class leaves a part of a block unused. The limit decides which loss weighs more.
/// The table shows the waste of a full pool with objects of 300 to 3000 bytes, in percent.
/// `tests::waste_by_block_size` computes the table, so it is the same on every machine.
///
/// | limit | 4 KiB | 8 KiB | 16 KiB | 32 KiB | 64 KiB |
/// |---|---|---|---|---|---|
/// | 1 MiB | 29 | **17** | 38 | 70 | 98 |
/// | 6 MiB | 28 | 13 | **12** | 21 | 66 |
/// | 32 MiB | 28 | 12 | 6.9 | **5.9** | 11 |
/// | 128 MiB | 27 | 12 | 6.2 | **3.7** | 3.6 |
/// | 512 MiB | 27 | 12 | 6.0 | 3.2 | **2.1** |
///
/// A large pool is seldom full: without areas its limit is four fifths of the budget, of which it takes about
/// a fifth. So the largest blocks are for pools that gain by them even when a quarter full.
const BLOCK_BYTES: [(usize, usize); 5] =
    [(64 << 10, 512 << 20), (32 << 10, 24 << 20), (16 << 10, 5 << 20), (8 << 10, 512 << 10), (PAGE_BYTES, 0)];

/// The largest block size.
pub(super) const BLOCK_BYTES_MAX: usize = BLOCK_BYTES[0].0;

/// The sizes of a pool's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    /// Bytes of page-aligned memory for objects: the limit, rounded down to whole blocks.
    pub data_bytes: usize,
    /// Elements of [`PoolMemory::objects`].
    pub objects: usize,
    /// Elements of [`PoolMemory::blocks`].
    pub blocks: usize,
    pub(super) block_bytes: usize,
}

impl PoolLayout {
    /// Returns the layout of a pool that never uses more than `bytes_max` bytes for objects. With less than a
    /// page the pool is always full.
    #[must_use]
    pub fn for_limit(bytes_max: usize) -> PoolLayout {
        let fits = |&&(_, limit_min): &&(usize, usize)| bytes_max >= limit_min;
        let block_bytes = BLOCK_BYTES.iter().find(fits).map_or(PAGE_BYTES, |&(block_bytes, _)| block_bytes);
        Self::with_blocks_of(block_bytes, bytes_max)
    }

    pub(super) fn with_blocks_of(block_bytes: usize, bytes_max: usize) -> PoolLayout {
        let blocks = bytes_max / block_bytes;
        assert!(blocks < u32::MAX as usize, "a pool of {bytes_max} bytes has too many blocks to number");
        let data_bytes = blocks * block_bytes;
        let objects = (data_bytes / BYTES_PER_OBJECT_MIN).min((1 << HANDLE_BITS) - 1);
        // Each table has an element more, because element 0 means "none".
        PoolLayout { data_bytes, objects: objects + 1, blocks: blocks + 1, block_bytes }
    }
}

/// The memory of a pool: all zero when handed over, and the pool's alone for as long as the pool lives.
pub struct PoolMemory<'m> {
    /// Where objects lie; page-aligned, at least [`PoolLayout::data_bytes`].
    pub data: &'m mut [u8],
    /// At least [`PoolLayout::objects`]. All-zero bytes are a valid element.
    pub objects: &'m mut [ObjectMeta],
    /// At least [`PoolLayout::blocks`]. All-zero bytes are a valid element.
    pub blocks: &'m mut [BlockMeta],
}
