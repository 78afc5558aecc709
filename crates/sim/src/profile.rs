//! The profile of a seed: sizes, devices, and the weights of operations. All of them are drawn once, at the
//! start. Some operations are switched off at random, because the remaining ones then happen more often.
//! Limits are so small that a run usually reaches them.

use crate::content;
use crate::random::Random;
use farpage_core::config::{Codec, Config, Install, Readahead, SlotPolicy};
use farpage_io::{CrashPlan, FaultPlan, IoError, SlowPlan};

/// An act that can happen in one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Act {
    /// A program thread touches memory.
    Thread,
    /// A handler thread takes a fault message.
    Handle,
    /// An operation under way goes one call further.
    Continue,
    /// A batch of victims is chosen, because the budget is exceeded.
    Evict,
    /// A batch of victims is chosen, whatever the budget is.
    EvictAnyway,
    /// The oldest parked page is placed.
    Place,
    /// The pool's object that goes first is moved to a write batch.
    Shrink,
    /// The pool's oldest object is made denser.
    Densify,
    /// A write batch gets slots.
    Assign,
    /// Slots of unchanged resident pages are freed.
    ReleaseKept,
    /// The pool is compacted, and its empty blocks are given back.
    Compact,
    /// A parked page is put back into the program.
    PutBack,
    /// Memory behind free frames is given back.
    Surplus,
    /// Write batches are parked again although there may be slots.
    ParkAgain,
    /// The program changes a mapping.
    Change,
    /// The pool's limit changes.
    PoolLimit,
    /// A thread faults on a page that was never managed.
    Stray,
    /// Clusters of dead processes are taken back.
    Reap,
    /// An empty cluster is discarded.
    Discard,
    /// A device or a peer writes to a page that it has pinned, or gives it up.
    Device,
    /// A process dies.
    Die,
}

/// Number of acts.
pub(crate) const ACTS: usize = Act::Die as usize + 1;
const _: () = assert!(ACTS == Act::ALL.len());

impl Act {
    /// Whether the keeper does this act. The keeper acts only while it has a CPU.
    pub(crate) const fn is_keepers(self) -> bool {
        match self {
            Act::Evict | Act::EvictAnyway | Act::Place | Act::Shrink | Act::Densify | Act::Assign => true,
            Act::ReleaseKept | Act::Compact | Act::PutBack | Act::Surplus | Act::ParkAgain => true,
            Act::Thread | Act::Handle | Act::Continue | Act::Change | Act::PoolLimit | Act::Stray => false,
            Act::Reap | Act::Discard | Act::Device | Act::Die => false,
        }
    }

    /// All acts, in the order of their weights.
    pub(crate) const ALL: [Act; 21] = [
        Act::Thread,
        Act::Handle,
        Act::Continue,
        Act::Evict,
        Act::EvictAnyway,
        Act::Place,
        Act::Shrink,
        Act::Densify,
        Act::Assign,
        Act::ReleaseKept,
        Act::Compact,
        Act::PutBack,
        Act::Surplus,
        Act::ParkAgain,
        Act::Change,
        Act::PoolLimit,
        Act::Stray,
        Act::Reap,
        Act::Discard,
        Act::Device,
        Act::Die,
    ];
}

/// One swap area and its device.
pub(crate) struct AreaProfile {
    /// Slots that the area claims to have.
    pub slots: u32,
    /// Pages that the device has. If the device has fewer pages than slots, writes beyond its end find no
    /// space.
    pub device_pages: u32,
    pub priority: i32,
    /// The slots that are bad, in ascending order.
    pub bad: Vec<u32>,
    pub discards: bool,
    pub slow: SlowPlan,
    pub faults: FaultPlan,
    pub crash: CrashPlan,
}

/// The values that a seed decides at the start.
pub(crate) struct Profile {
    pub steps: u64,
    pub spaces: usize,
    pub pages: usize,
    pub threads: usize,
    /// Faults that are served at the same time.
    pub handler_threads: usize,
    pub writers: usize,
    /// Resident pages of one space above which background reclaim starts.
    pub budget_pages: u64,
    /// Resident pages of one space above which handler threads evict, too.
    pub limit_pages: u64,
    /// Calls of 1000 after which a thread of the engine loses its CPU.
    pub starve_permille: u64,
    /// Ticks for which the thread has no CPU, at most.
    pub starve_ticks_max: u64,
    pub batch_max: usize,
    pub config: Config,
    pub areas: Vec<AreaProfile>,
    pub slots: SlotPolicy,
    /// CPUs that have a hand of free slots.
    pub slot_cpus: usize,
    pub weights: [u32; ACTS],
    pub contents: [u32; content::KINDS],
    pub write_percent: u64,
    /// Pages that a write batch should have before it gets slots, at most.
    pub merge_pages: u64,
    /// Victims of 100 that the kernel reports as busy.
    pub busy_percent: u64,
    /// Written pages of 100 that are then pinned.
    pub pin_percent: u64,
    /// Whether a write protection stops writers while pages are copied out.
    pub writers_wait: bool,
    /// Victims of 100 that turn out to be gone.
    pub gone_percent: u64,
    /// Installs of 100 that the kernel refuses for now.
    pub refuse_percent: u64,
    /// Whether a waiting change keeps new operations out.
    pub changes_first: bool,
    /// Interruptions inside calls of the core, of 100 places where one is possible.
    #[cfg_attr(not(feature = "planted"), expect(dead_code, reason = "without pauses nothing interrupts"))]
    pub pause_percent: u64,
}

impl Profile {
    pub(crate) fn draw(random: &Random) -> Profile {
        let pages = random.pick(&[16, 24, 40, 64, 64, 120, 120, 250, 600]);
        let steps = random.within(500, if pages > 200 { 2000 } else { 5000 });
        let frames = random.pick(&[8, 9, 12, 16, 24, 64]);
        let areas = (0..random.pick(&[0, 1, 1, 1, 2, 3])).map(|_| Self::area(random)).collect();
        let budget_pages = random.within(2, (pages as u64 / random.pick(&[2, 4, 8])).max(3));
        Profile {
            steps,
            spaces: random.pick(&[1, 1, 2, 3]),
            pages,
            threads: random.pick(&[1, 3, 8, 16]),
            handler_threads: random.pick(&[1, 3, 8, 16]),
            writers: random.within(1, 2) as usize,
            budget_pages,
            limit_pages: budget_pages + random.within(1, 12),
            starve_permille: random.pick(&[0, 0, 3, 20, 100]),
            starve_ticks_max: random.pick(&[100, 2_000, 20_000]),
            batch_max: random.pick(&[1, 4, 16, 64, 128]),
            config: Self::config(random, frames),
            areas,
            slots: random.pick(&[
                SlotPolicy::Clusters,
                SlotPolicy::Clusters,
                SlotPolicy::Classic,
                SlotPolicy::ScanMore,
            ]),
            slot_cpus: random.pick(&[1, 2, 3]),
            weights: Self::weights(random),
            contents: std::array::from_fn(
                |_| if random.percent(30) { 0 } else { random.within(1, 5) as u32 },
            )
            .map(|weight: u32| weight.max(u32::from(random.percent(10)))),
            merge_pages: random.pick(&[1, 4, 16, 64]),
            write_percent: random.pick(&[10, 40, 70, 95]),
            busy_percent: random.pick(&[0, 0, 5, 40]),
            pin_percent: random.pick(&[0, 0, 2, 20]),
            writers_wait: random.percent(70),
            gone_percent: random.pick(&[0, 0, 3]),
            refuse_percent: random.pick(&[0, 0, 5]),
            changes_first: random.percent(50),
            pause_percent: random.pick(&[0, 10, 30, 60]),
        }
        .with_some_content()
    }

    fn with_some_content(mut self) -> Profile {
        if self.contents.iter().all(|&weight| weight == 0) {
            self.contents = [1; content::KINDS];
        }
        self
    }

    fn config(random: &Random, frames: u32) -> Config {
        Config {
            // A limit of 0 makes a pool that is always full.
            pool_bytes_max: random.pick(&[0, 16 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10]),
            accept_percent: random.pick(&[0, 50, 90, 100]),
            codec: random.pick(&[
                Codec::Auto,
                Codec::Auto,
                Codec::Auto,
                Codec::Fast,
                Codec::Lz4,
                Codec::None,
            ]),
            packs: random.percent(60),
            frames,
            parked_max: random.within(0, u64::from(frames)) as u32,
            compressed_bytes_max: random.pick(&[0, 1000, 3584, 3584, 4096]),
            install: if random.percent(70) { Install::Move } else { Install::Copy },
            readahead: random.pick(&[
                Readahead::Streams,
                Readahead::Streams,
                Readahead::ByAddress,
                Readahead::BySlot,
                Readahead::Off,
            ]),
            page_cluster: random.within(0, 5) as u32,
        }
    }

    /// Draws the weights. An act may be missing altogether, unless operations need it to come to their end.
    fn weights(random: &Random) -> [u32; ACTS] {
        let mut weights = [0; ACTS];
        for act in Act::ALL {
            let (always, most) = match act {
                Act::Thread => (true, 40),
                Act::Handle => (true, 60),
                Act::Continue => (true, 200),
                Act::Evict => (true, 40),
                Act::Place | Act::Assign | Act::Shrink => (false, 40),
                Act::EvictAnyway | Act::Densify => (false, 12),
                Act::Device => (true, 20),
                Act::Change => (false, 4),
                Act::ReleaseKept | Act::Compact | Act::PutBack | Act::Surplus => (false, 6),
                Act::ParkAgain | Act::PoolLimit | Act::Reap | Act::Discard => (false, 3),
                Act::Stray | Act::Die => (false, 1),
            };
            let likely = most >= 40;
            if always || random.percent(if likely { 85 } else { 70 }) {
                weights[act as usize] = random.within(1, most) as u32;
            }
        }
        // Weights are in tenths, so that a death can be rarer than any other act.
        weights.iter_mut().for_each(|weight| *weight *= 10);
        weights[Act::Die as usize] = weights[Act::Die as usize].min(random.pick(&[0, 0, 0, 0, 1]));
        weights
    }

    fn area(random: &Random) -> AreaProfile {
        let slots = random.pick(&[12, 30, 100, 200, 511, 513, 700, 1200, 2000]);
        let bad =
            if random.percent(30) { (1..slots).filter(|_| random.percent(7)).collect() } else { Vec::new() };
        let slow = random.pick(&[(0, 0), (0, 10), (5, 200)]);
        AreaProfile {
            slots,
            device_pages: if random.percent(10) { random.within(1, u64::from(slots)) as u32 } else { slots },
            priority: random.within(0, 2) as i32 - 1,
            bad,
            discards: random.percent(50),
            slow: SlowPlan { seed: random.next(), latency_ticks_min: slow.0, latency_ticks_max: slow.1 },
            faults: Self::faults(random),
            crash: CrashPlan {
                seed: random.next(),
                at_request: if random.percent(12) { random.below(200) } else { u64::MAX },
            },
        }
    }

    fn faults(random: &Random) -> FaultPlan {
        // EAGAIN, which can be retried, and EIO, which can't.
        let errors = [IoError::EIO, IoError::EIO, IoError::NoSpace, IoError::Device(11)];
        let often = |percent: u64| if random.percent(percent) { random.pick(&[3_000, 50_000]) } else { 0 };
        FaultPlan {
            read_error: random.pick(&[IoError::EIO, IoError::Short, IoError::Device(11)]),
            read_error_ppm: often(35),
            write_error: random.pick(&errors),
            write_error_ppm: often(20),
            torn_write_ppm: often(10),
            lost_write_ppm: often(30),
            flip_ppm: often(25),
            misdirect_ppm: often(10),
            ..FaultPlan::none(random.next())
        }
    }
}
