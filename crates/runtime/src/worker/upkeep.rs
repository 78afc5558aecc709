//! What the keeper does beside evictions: the pool shrinks and becomes denser, areas are discarded and tried
//! again, and memory that nobody needs goes back to the kernel.
// UNSAFETY: memory of the pool and of a parent's books is given back.

use super::evict::{EVICT_NS_MAX, LOOK_NS};
use super::{Progress, WRITES_MAX, Worker};
use crate::engine::Engine;
use crate::engine::fork;
use core::sync::atomic::Ordering;
use farpage_core::pager::{Densified, Shrunk};
use farpage_core::stats::Counter;
use farpage_core::units::AreaId;
use farpage_io::Wait;
use farpage_os::clock::now_ns;

/// Clusters of an area that are discarded in one round.
const DISCARDS_MAX: usize = 4;
/// Nanoseconds of a turn of the pool. An object that stays in the pool for one to two turns without being
/// loaded is compressed once more.
const TURN_NS: u64 = 2_000_000_000;
/// Nanoseconds that densifying the pool takes at a time.
const DENSIFY_NS: u64 = 1_000_000;
/// Rest after densifying, in multiples of the time that it took.
const DENSIFY_REST: u64 = 10;
/// Objects in a row that can't be made shorter now, after which densifying stops.
const IN_VAIN_MAX: u32 = 16;
/// Divisor of the pool's occupied bytes: a 12th may be waste. To reduce waste further isn't worth the moves.
const WASTE_PART: usize = 12;
/// Objects that are moved together by one call.
const COMPACTED_AT_ONCE: usize = 256;
/// Nanoseconds between two attempts to use full areas again.
const RETRY_AREAS_NS: u64 = 1_000_000_000;

/// Why densifying ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DensifyEnd {
    /// The time is over, or an eviction is due.
    Time,
    /// All objects have been looked at.
    Nothing,
    /// There is no memory for the shorter objects beside the longer ones.
    InVain,
}

impl Worker {
    /// Writes the objects that go first from the pool to an area, until the pool is as small as it should be.
    /// Objects that are only kept are freed.
    pub(super) fn shrink_pool(&mut self) -> Progress {
        let (mut progress, mut busy, mut starved) = (Progress::None, 0, 0);
        let began_ns = now_ns();
        let mut looked_ns = began_ns;
        // On a slow device, shrinking to the end may take seconds.
        while now_ns() < began_ns + EVICT_NS_MAX {
            if now_ns() >= looked_ns + LOOK_NS {
                self.release_blocks();
                self.engine.take_share();
                looked_ns = now_ns();
                // Other processes may need more memory meanwhile. Evicting pages frees memory faster.
                if self.engine.is_over_limit() {
                    break;
                }
            }
            // Checked before any wait. Mostly there is nothing to do.
            if !self.engine.pager.should_shrink() || self.holds_enough() && !self.send_writes() {
                break;
            }
            // An object takes a whole page until it is written. No fault needs this memory, so the number of
            // frames is limited.
            for _ in 0..WRITES_MAX {
                if self.frames_under_way() + self.writes.frames_at_most() < self.frames_to_hold() {
                    break;
                }
                self.send_writes();
                self.collect_writes(Wait::One);
            }
            // One frame is for the pack, one for the page.
            self.prepare_packs(2);
            let shared = self.engine.map.shared(self.index);
            let shrunk = self.engine.pager.shrink(self.writes, self.scratch);
            drop(shared);
            match shrunk {
                Shrunk::Enough => break,
                Shrunk::NoArea => {
                    if self.densify_all() == Progress::Some {
                        progress = Progress::Some;
                    }
                    break;
                }
                Shrunk::Queued | Shrunk::Released => (progress, busy, starved) = (Progress::Some, 0, 0),
                // The object may be the only one of its kind, and thus come first again.
                Shrunk::Busy if busy == 64 => break,
                Shrunk::Busy => busy += 1,
                // Other threads have the frames.
                Shrunk::NoFrame if starved == 2 => break,
                Shrunk::NoFrame => {
                    starved += 1;
                    self.send_writes();
                    self.collect_writes(Wait::One);
                    if !self.back_a_free_frame() {
                        break;
                    }
                }
            }
        }
        self.send_if_worthwhile();
        progress
    }

    /// Tells devices about a few clusters that became empty. The caller holds no lock, because this may take
    /// milliseconds.
    pub(super) fn discard_empty_clusters(&self) {
        let pager = self.engine.pager;
        let areas = (0..pager.areas().count()).map(|area| AreaId(area as u8));
        for area in areas {
            for _ in 0..DISCARDS_MAX {
                let Some(run) = pager.areas().take_discard(area) else { break };
                if self.engine.devices.discard(run) {
                    pager.stats().add(Counter::Discarded, u64::from(run.count));
                }
                pager.areas().discarded(run);
            }
        }
    }

    /// Tries full areas again, because the disk may have free space by now, or another process may have freed
    /// slots. Also frees what dead processes had before it is needed. Otherwise an area that grows would grow
    /// with every process that ever ran.
    pub(super) fn retry_full_areas(&mut self) {
        let now = now_ns();
        if now >= self.retry_areas_at_ns {
            self.retry_areas_at_ns = now + RETRY_AREAS_NS;
            self.engine.reap_dead_processes();
            self.engine.pager.areas().let_go_of_unused();
            self.engine.pager.areas().reopen();
            self.engine.pager.areas().note_used();
            self.engine.protections.inspect(|protections| protections.count_mappings());
        }
    }

    /// Frees what was left to children that are gone.
    pub(super) fn forget_heirless(&self) {
        let _shared = self.engine.map.shared(self.index);
        fork::forget_heirless(self.engine);
    }

    fn is_eviction_due(&self, now_ns: u64) -> bool {
        self.engine.is_due(self.engine.evicts_inline(now_ns))
    }

    /// Compresses objects once more that have been in the pool for some time. Not while children have a copy
    /// of the pool, because pages that they share with it would be there twice.
    pub(super) fn densify_old(&mut self) {
        let now = now_ns();
        if now >= self.turn_at_ns {
            self.turn_at_ns = now + TURN_NS;
            self.engine.pager.pool().turn();
        }
        if now >= self.densify_at_ns && !self.is_eviction_due(now) && !self.engine.heirs.are_any() {
            self.densify(true, now);
            let after = now_ns();
            self.densify_at_ns = after + (after - now) * DENSIFY_REST;
        }
    }

    /// Compresses the pool's objects once more, because the pool is nearly full and there is no area. While
    /// the budget is exceeded, the next call goes on without a rest, and threads that need memory wait for
    /// this ([`Engine::may_densify`]).
    fn densify_all(&mut self) -> Progress {
        let (engine, now) = (self.engine, now_ns());
        if now < self.densify_at_ns {
            return Progress::None;
        }
        let end = self.densify(false, now);
        let is_vain = matches!(end, DensifyEnd::Nothing | DensifyEnd::InVain);
        engine.densify_is_vain.store(is_vain, Ordering::Relaxed);
        // Shorter objects have left holes, but only whole blocks are free memory.
        self.compact_pool();
        let after = now_ns();
        let rest = if is_vain { DENSIFY_REST } else { u64::from(!engine.is_over_limit()) };
        self.densify_at_ns = after + (after - now) * rest;
        if is_vain { Progress::None } else { Progress::Some }
    }

    /// Compresses the oldest objects of the pool once more, for some time. With `is_old`, only takes objects
    /// that are old, and stops when an eviction is due.
    fn densify(&mut self, is_old: bool, began_ns: u64) -> DensifyEnd {
        let mut in_vain = 0;
        loop {
            let now = now_ns();
            if now - began_ns >= DENSIFY_NS || is_old && self.is_eviction_due(now) {
                break;
            }
            let shared = self.engine.map.shared(self.index);
            let densified = self.engine.pager.densify(is_old, self.scratch);
            drop(shared);
            match densified {
                Densified::Nothing => return DensifyEnd::Nothing,
                Densified::Shorter => in_vain = 0,
                Densified::AsItWas => {}
                // The object may be the only one, and thus come first again.
                Densified::Busy | Densified::NoSpace if in_vain == IN_VAIN_MAX => return DensifyEnd::InVain,
                Densified::Busy | Densified::NoSpace => in_vain += 1,
            }
        }
        DensifyEnd::Time
    }

    /// Moves objects together where blocks are sparse.
    fn compact_pool(&self) {
        // A fork must not find an object half moved: the child would read from the object's old place.
        let _shared = self.engine.map.shared(self.index);
        let moved = self.engine.pager.pool().compact(COMPACTED_AT_ONCE);
        self.engine.pager.stats().add(Counter::PoolMoved, moved as u64);
    }

    /// Moves objects together if that is worth it, and gives free blocks back.
    pub(super) fn tidy_pool(&mut self) {
        let pager = self.engine.pager;
        let usage = pager.pool().usage();
        if usage.bytes_occupied > usage.payload_bytes + usage.bytes_occupied / WASTE_PART {
            self.compact_pool();
        }
        self.release_blocks();
    }

    /// Gives back all memory that the pool and the frames no longer need, because pages come back for good.
    pub fn give_pool_back(&mut self) {
        self.engine.pager.pool().set_limit(0);
        self.tidy_pool();
        self.trim_frames();
    }

    /// Gives back the memory of free blocks, also of blocks that were inherited.
    fn release_blocks(&self) {
        // A fork must not find a block half released.
        let _shared = self.engine.map.shared(self.index);
        self.drop_released(self.engine);
        for elder in self.engine.elders() {
            // No object is stored in an elder's pool any more.
            elder.pager.pool().set_limit(0);
            self.drop_released(elder);
        }
    }

    /// Gives back the memory of free blocks in the pool of `books`, which is this process's engine or an
    /// elder's.
    fn drop_released(&self, books: &Engine) {
        let pool = books.pager.pool();
        while let Some(range) = pool.take_released() {
            let base = books.pool_base.wrapping_add(range.start);
            self.engine.about_to_drop(base, range.len());
            // SAFETY: `take_released` gave us a free block of the pool's data, which starts at `pool_base`.
            // No code needs the block's bytes or refers to them, and the block isn't allocated until
            // `released`.
            let _ = unsafe { farpage_os::memory::drop_pages(base, range.len()) };
            pool.released(range);
        }
    }
}
