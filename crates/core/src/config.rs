//! What one pager is told at start. Every value is safe; odd ones are only slow.

use crate::units::PAGE_BYTES;

/// Which codec the pool uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Codec {
    /// LZ4.
    Lz4 = 0,
    /// Pages go into the pool as they are (for comparison).
    None = 1,
    /// For each page the one that it is made for: numbers, heaps, text, sparse pages; LZ4 for the rest. What stays is
    /// compressed once more, by zstd.
    Auto = 2,
    /// The same without zstd.
    Fast = 3,
}

impl Codec {
    /// Whether what stays in the pool may become denser.
    #[must_use]
    pub const fn densifies(self) -> bool {
        matches!(self, Codec::Auto)
    }
}

/// How pages get into the program's memory and out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Install {
    /// UFFDIO_MOVE both ways: the page itself moves, nothing is copied.
    Move = 0,
    /// UFFDIO_COPY in; write-protect, copy, MADV_DONTNEED out. For kernels before 6.8.
    Copy = 1,
    /// UFFDIO_MOVE out, UFFDIO_COPY in: each way the cheaper one where handler threads serve faults. Moving a
    /// page out of a frame must flush that frame's translation on every CPU that runs a thread of the program;
    /// copying flushes nothing. (2 vCPUs, Linux 6.18, mean latency of a fault, nearly all from the pool: 21 µs
    /// moved in, 11 µs copied in; `farpage run --install move|mixed --ram 128M -- python3
    /// tests/programs/objects.py 300 plain`.)
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

/// In which order areas are used that the user gave no priority. Those with one come first in every order: the
/// highest first, equals in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AreaOrder {
    /// One after the other, as they were put on: -1, -2, -3 (Linux before 4.14).
    Global = 0,
    /// -2, -3, -4, but on each node the areas of its own come first, in turn (Linux 4.14 to 6.18).
    Numa = 1,
    /// All of them -1, and so in turn (Linux after 6.18).
    RoundRobin = 2,
    /// All of them -1; the one that is expected to be done soonest: by how long its writes take, how many wait,
    /// how far it is from the CPU, and how full it is.
    Weighted = 3,
}

impl AreaOrder {
    /// Every order.
    pub const ALL: [AreaOrder; 4] =
        [AreaOrder::Global, AreaOrder::Numa, AreaOrder::RoundRobin, AreaOrder::Weighted];

    /// Its name on the command line.
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
    /// Ours: see `areas::slots::clusters`.
    Clusters = 0,
    /// Linux 4.11 to 5.7: from a cluster per CPU while clusters are free; then a linear scan for one slot at a time.
    Classic = 1,
    /// Linux 5.8: the same, but what the scan's time allows is looked at after the first slot that was found.
    ScanMore = 2,
}

impl SlotPolicy {
    /// All of them, the oldest first.
    pub const ALL: [SlotPolicy; 3] = [SlotPolicy::Classic, SlotPolicy::ScanMore, SlotPolicy::Clusters];

    /// As `--slots` has it.
    pub const fn name(self) -> &'static str {
        match self {
            SlotPolicy::Clusters => "clusters",
            SlotPolicy::Classic => "classic",
            SlotPolicy::ScanMore => "scan-more",
        }
    }
}

/// What is brought in before anybody asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Readahead {
    /// Several streams in one region, each with its stride; windows are mapped at once.
    Streams = 0,
    /// One window for each region, around the fault, as Linux has it with `vma_ra_enabled`.
    ByAddress = 1,
    /// An aligned block of slots around the fault's, as Linux had it before and has it on rotating disks.
    BySlot = 2,
    /// Nothing.
    Off = 3,
}

/// `--page-cluster` unless it is given, as `vm.page-cluster`: windows of 8 pages at most.
pub const PAGE_CLUSTER: u32 = 3;
/// The most that `--page-cluster` can be: 32 pages.
pub const PAGE_CLUSTER_MAX: u32 = 5;

/// The pager's own settings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    /// The pool never grows beyond this.
    pub pool_bytes_max: u64,
    /// Once the pool was full, it accepts again below this many percent of its limit (Linux's
    /// `accept_threshold_percent`).
    pub accept_percent: u32,
    /// The pool's codec.
    pub codec: Codec,
    /// Whether pages that compress share slots of areas.
    pub packs: bool,
    /// Frames: buffers for pages on their way in, parked pages, pages being written, and packs of them.
    pub frames: u32,
    /// Pages that may be parked uncompressed for a second chance; more than that and the oldest goes on.
    pub parked_max: u32,
    /// A page that compresses to more than this is incompressible: the pool keeps it as it is, and not for long.
    pub compressed_bytes_max: u32,
    /// Whether frames are recycled by moving pages (then a frame may have no memory behind it).
    pub install: Install,
    /// What is brought in before anybody asks for it.
    pub readahead: Readahead,
    /// Windows of `ByAddress` and `BySlot` have at most 2 to the power of this pages; 0 is none at all.
    pub page_cluster: u32,
}

impl Config {
    /// Settings for a budget of `ram_bytes`, one page in 128 of which may be parked.
    pub fn for_budget(ram_bytes: u64, pool_bytes_max: u64, install: Install) -> Config {
        let parked_max = (ram_bytes / PAGE_BYTES as u64 / 128).clamp(64, 4096) as u32;
        // Where pages are moved most frames are holes, which take no memory: if there are many, victims find room side by side, and
        // memory can be given back for more of them at once. (With half as many, 0.95 of the touches of a walk from disk, 0.98 of
        // those of 16 streams; with twice as many 0.99 and 1.01: `farpage load touch`, 256 MiB under 128M, `--pool 1M`.) Where they
        // are copied a frame keeps its memory. No more than 8192: they are looked through for free ones.
        let frames_for_one = if install.takes_by_move() { 8 } else { 2 };
        Config {
            pool_bytes_max,
            accept_percent: 90,
            codec: Codec::Auto,
            packs: true,
            frames: (frames_for_one * parked_max).min(8192),
            parked_max,
            // Beyond 7/8 of a page the pool saves less than its own waste; zsmalloc gives such an object a
            // whole page from 3632 bytes on.
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
