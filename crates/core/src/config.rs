//! Settings that one pager gets at start. Every value is safe, and an odd value is only slow.

use crate::units::PAGE_BYTES;

/// Which codec the pool uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Codec {
    /// LZ4.
    Lz4 = 0,
    /// Pages go into the pool uncompressed, for comparison.
    None = 1,
    /// Each page gets the codec that suits it: one for numbers, heaps, text or sparse pages, and otherwise
    /// LZ4. A page that stays in the pool is compressed once more, by zstd.
    Auto = 2,
    /// Like `Auto`, but without zstd.
    Fast = 3,
}

impl Codec {
    /// Whether objects that stay in the pool are compressed once more.
    #[must_use]
    pub const fn densifies(self) -> bool {
        matches!(self, Codec::Auto)
    }
}

/// How pages get into the program's memory and out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Install {
    /// UFFDIO_MOVE both ways: the page itself moves, and nothing is copied.
    Move = 0,
    /// In by UFFDIO_COPY. Out by copying through a pipe. Then the kernel drops the pages that nobody pins
    /// (`fault/src/lazy.rs`). For kernels before 6.8.
    Copy = 1,
    /// Out by UFFDIO_MOVE, in by UFFDIO_COPY. Each is the cheaper way where handler threads serve faults.
    /// Moving a page out of a frame must flush the frame's translation on every CPU that runs a thread of the
    /// program. Copying flushes nothing, and so about halves the latency of a fault from the pool.
    Mixed = 2,
}

impl Install {
    /// Whether pages leave the program by being moved.
    pub const fn takes_by_move(self) -> bool {
        matches!(self, Install::Move | Install::Mixed)
    }
    /// Whether pages come back by being moved.
    pub const fn installs_by_move(self) -> bool {
        matches!(self, Install::Move)
    }
}

/// How areas are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum IoEngine {
    /// io_uring.
    Uring = 0,
    /// pread and pwrite.
    Psync = 1,
}

/// The order in which areas without a priority of the user's are used. Areas with a priority come first in
/// every order: the highest first, equals in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AreaOrder {
    /// One after the other, in the order in which they were put on: -1, -2, -3 (Linux before 4.14).
    Global = 0,
    /// Priorities -2, -3, -4, but on each node the node's own areas come first, in turn (Linux 4.14 to 6.18).
    Numa = 1,
    /// All areas have priority -1, and so take turns (Linux after 6.18).
    RoundRobin = 2,
    /// All areas have priority -1. The area is used whose write is expected to be done soonest. The
    /// expectation depends on how long the area's writes take, and how many wait. The area's distance from
    /// the CPU and how full it is count too.
    Weighted = 3,
}

impl AreaOrder {
    /// Every order.
    pub const ALL: [AreaOrder; 4] =
        [AreaOrder::Global, AreaOrder::Numa, AreaOrder::RoundRobin, AreaOrder::Weighted];

    /// Returns the order's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            AreaOrder::Global => "global",
            AreaOrder::Numa => "numa",
            AreaOrder::RoundRobin => "round-robin",
            AreaOrder::Weighted => "weighted",
        }
    }
}

/// How free slots of an area are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotPolicy {
    /// Farpage's own policy: see `areas::slots::clusters`.
    Clusters = 0,
    /// Linux 4.11 to 5.7: slots come from a cluster per CPU while clusters are free. After that a linear scan
    /// looks for one slot at a time.
    Classic = 1,
    /// Linux 5.8: like `Classic`, but after the first slot that it finds, the scan goes on as far as its
    /// ration allows.
    ScanMore = 2,
}

impl SlotPolicy {
    /// All policies, the oldest first.
    pub const ALL: [SlotPolicy; 3] = [SlotPolicy::Classic, SlotPolicy::ScanMore, SlotPolicy::Clusters];

    /// Returns the policy's name in `--slots`.
    pub const fn name(self) -> &'static str {
        match self {
            SlotPolicy::Clusters => "clusters",
            SlotPolicy::Classic => "classic",
            SlotPolicy::ScanMore => "scan-more",
        }
    }
}

/// Which pages are brought in before the program asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Readahead {
    /// Several streams in one region, each with its own stride. Windows are mapped at once.
    Streams = 0,
    /// One window for each region, around the fault, as in Linux with `vma_ra_enabled`.
    ByAddress = 1,
    /// An aligned block of slots around the fault's slot, as in older Linux, and in Linux on rotating disks.
    BySlot = 2,
    /// No pages.
    Off = 3,
}

/// Default of `--page-cluster`, Linux's `vm.page-cluster`. Windows then have 8 pages at most.
pub const PAGE_CLUSTER: u32 = 3;
/// The largest value of `--page-cluster`, for windows of 32 pages.
pub const PAGE_CLUSTER_MAX: u32 = 5;

/// Settings of the pager.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    /// Bytes that the pool never grows beyond.
    pub pool_bytes_max: u64,
    /// Percentage of its limit below which the pool accepts pages again after it was full (Linux's
    /// `accept_threshold_percent`).
    pub accept_percent: u32,
    /// The pool's codec.
    pub codec: Codec,
    /// Whether pages that compress share slots in areas.
    pub packs: bool,
    /// Frames: buffers for pages on their way in, for parked pages, for pages being written, and for packs of
    /// pages.
    pub frames: u32,
    /// Pages that may be parked uncompressed for a second chance. If more are parked, the oldest page moves
    /// on.
    pub parked_max: u32,
    /// Bytes beyond which a compressed page counts as incompressible. The pool stores an incompressible page
    /// as it is, and not for long.
    pub compressed_bytes_max: u32,
    /// How pages are installed and taken. If frames are recycled by moving pages, a frame may have no memory
    /// behind it.
    pub install: Install,
    /// Which pages are brought in before the program asks for them.
    pub readahead: Readahead,
    /// Windows of `ByAddress` and `BySlot` have at most 2 to the power of this many pages. 0 means no
    /// readahead.
    pub page_cluster: u32,
}

impl Config {
    /// Returns settings for a budget of `ram_bytes`. One page in 128 of the budget may be parked.
    pub fn for_budget(ram_bytes: u64, pool_bytes_max: u64, install: Install) -> Config {
        let parked_max = (ram_bytes / PAGE_BYTES as u64 / 128).clamp(64, 4096) as u32;
        // Where pages are moved, most frames are holes, which take no memory. With many holes, victims find
        // neighbouring frames, and more frames can give their memory back at once. Half as many frames make a
        // walk from disk 5 % slower, and twice as many gain nothing. Where pages are copied, a frame keeps
        // its memory. At most 8192, because a search for free frames looks through all of them.
        let frames_for_one = if install.takes_by_move() { 8 } else { 2 };
        Config {
            pool_bytes_max,
            accept_percent: 90,
            codec: Codec::Auto,
            packs: true,
            frames: (frames_for_one * parked_max).min(8192),
            parked_max,
            // Beyond 7/8 of a page the pool saves less than its own waste. From 3632 bytes on, zsmalloc gives
            // an object a whole page.
            compressed_bytes_max: (PAGE_BYTES * 7 / 8) as u32,
            install,
            readahead: Readahead::Streams,
            page_cluster: PAGE_CLUSTER,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn where_pages_are_moved_most_frames_are_for_victims() {
        const MIB: u64 = 1 << 20;
        let cases = [(8, 64, 512, 128), (200, 400, 3200, 800), (1024, 2048, 8192, 4096)];
        for (mib, parked_max, moved, copied) in cases.into_iter().chain([(16384, 4096, 8192, 8192)]) {
            for (install, frames) in
                [(Install::Mixed, moved), (Install::Move, moved), (Install::Copy, copied)]
            {
                let config = Config::for_budget(mib * MIB, MIB, install);
                assert_eq!((config.parked_max, config.frames), (parked_max, frames), "{mib} {install:?}");
                assert!(config.frames <= crate::table::entry::FRAMES_MAX);
            }
        }
    }
}
