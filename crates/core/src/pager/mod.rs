//! The pager: the only place that moves a page from one state to another.
//!
//! The pager decides and keeps the books. The pager never waits, and never touches program memory. The pager
//! makes no system call itself: a settle wakes threads by the driver's [`Wake`]. Each move has two halves.
//! The first half locks the page's entry and hands out what the move needs: a [`Ticket`], a [`Batch`] or a
//! [`WriteBatch`]. The driver does the work. The second half, a settle, ends the move.
//!
//! Invariants, for pages in registered ranges, whenever a page isn't locked:
//! 1. `Resident` if and only if the page is in the program's memory.
//! 2. Each frame in use, each pool object and each reference to a slot belongs to exactly one owner. The
//!    owner is a page whose entry names it, or a write under way. Frames may also belong to tickets, batches,
//!    and packs on their way. References may also belong to generations of a fork's children. Slots that were
//!    given up belong to nobody, and are never used again.
//! 3. A resident page that still owns a slot or an object may have been written since. The page is compared
//!    with its copy when the page is evicted.
//!
//! Resources change hands before the entry is settled. A thread that can see the new state can rely on all of
//! it.

/// Marks a place where another thread can come in between. With the feature `planted` the simulator makes
/// other calls into the core here. Without the feature the macro is empty.
macro_rules! pause {
    () => {
        #[cfg(feature = "planted")]
        crate::planted::pause();
    };
}

mod ahead;
mod change;
mod copies;
mod dense;
mod evict;
mod fault;
mod inherit;
mod pack;
mod parcels;
mod step;
mod write;

pub use ahead::{Fate, Opening};
pub use change::Unsettled;
pub use dense::Densified;
pub use evict::Placed;
pub use parcels::{WRITE_SLOTS_MAX, WriteBatch, WriteRequest};
pub use step::{Access, BATCH_MAX, Batch, Step, Taken, Ticket};
pub use write::{Shrunk, WriteProgress};

use crate::areas::Areas;
use crate::cache::Cache;
use crate::config::Config;
use crate::readahead::by_slot::SlotWords;
use crate::readahead::streams::Streams;
use crate::reclaim::Clock;
use crate::reclaim::balance::Balance;
use crate::reclaim::recency::{Lone, Recency};
use crate::reclaim::rivals::{Rivals, Watched};
use crate::stats::{Gauge, Stats};
use crate::sync::{self, Lock, rank};
use crate::table::entry::{Past, State};
use crate::table::ranges::Ranges;
use crate::table::{EntryRef, Table};
use crate::units::{AREAS_MAX, PAGE_BYTES, PageIndex};
use crate::zswap::pool::Pool;
use copies::Copies;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How the pager tells threads that faulted on a page to try again.
pub trait Wake: Sync {
    /// Wakes the threads that wait for this page. Must not call back into the pager.
    fn wake(&self, page: PageIndex);
}

/// The parts that a pager is made of.
pub struct Parts<'m> {
    /// Settings.
    pub config: Config,
    /// Page table.
    pub table: Table<'m>,
    /// Known ranges.
    pub ranges: Ranges<'m>,
    /// Frames.
    pub cache: Cache<'m>,
    /// Compressed pool.
    pub pool: Pool<'m>,
    /// Swap areas.
    pub areas: Areas<'m>,
    /// Where to count.
    pub stats: &'m Stats,
    /// How to wake threads that wait for a page.
    pub wake: &'m dyn Wake,
    /// The state of readahead by slot.
    pub slot_words: &'m SlotWords,
    /// An entry for each of the [`WAYS`](crate::reclaim::rivals::WAYS) to find victims.
    pub watched: &'m [Watched],
    /// In a fork's child: the parent's books as of the fork.
    pub elder: Option<&'m Pager<'m>>,
}

/// A space: one process's managed memory and where its pages are.
pub struct Pager<'m> {
    /// Settings.
    pub config: Config,
    pub(crate) table: Table<'m>,
    /// Known ranges; see [`crate::table::ranges`].
    pub ranges: Lock<Ranges<'m>, { rank::RANGES }>,
    pub(crate) cache: Cache<'m>,
    pub(crate) pool: Pool<'m>,
    pub(crate) areas: Areas<'m>,
    pub(crate) clock: Lock<Clock, { rank::CLOCK }>,
    pub(crate) recency: Recency,
    /// Whether the pool should have more of the memory, or the program should.
    pub balance: Balance,
    pub(crate) rivals: Rivals<'m>,
    copies: Copies,
    pub(crate) stats: &'m Stats,
    wake: &'m dyn Wake,
    pub(crate) streams: Lock<Streams, { rank::STREAMS }>,
    pub(crate) slot_words: &'m SlotWords,
    /// In a fork's child: the parent's books as of the fork. `inherited` counts the pages whose bytes are
    /// only there.
    elder: Option<&'m Pager<'m>>,
    inherited: AtomicU64,
    /// Whether a page's bytes were ever lost, in this process or in a process that it descends from by fork.
    has_lost: AtomicBool,
    /// Changes whenever a page is settled that a thread waited for.
    settled: AtomicU32,
    /// For each area, where the next search for slots that clean pages keep begins.
    kept_hints: [AtomicU32; AREAS_MAX],
    /// Slots, and parts of slots, that could not be read and whose page is gone. They are never used again.
    slots_given_up: AtomicU64,
}

impl<'m> Pager<'m> {
    /// Returns a pager that manages nothing.
    pub fn new(parts: Parts<'m>) -> Pager<'m> {
        Pager {
            config: parts.config,
            table: parts.table,
            ranges: Lock::new(parts.ranges),
            cache: parts.cache,
            pool: parts.pool,
            areas: parts.areas,
            clock: Lock::new(Clock::new()),
            recency: Recency::new(),
            balance: Balance::default(),
            rivals: Rivals::new(parts.watched),
            copies: Copies::new(),
            stats: parts.stats,
            wake: parts.wake,
            streams: Lock::new(Streams::new()),
            slot_words: parts.slot_words,
            elder: parts.elder,
            inherited: AtomicU64::new(0),
            has_lost: AtomicBool::new(false),
            settled: AtomicU32::new(0),
            kept_hints: [const { AtomicU32::new(0) }; AREAS_MAX],
            slots_given_up: AtomicU64::new(0),
        }
    }

    /// The page table, to attach leaves.
    pub const fn table(&self) -> &Table<'m> {
        &self.table
    }
    /// The frames.
    pub const fn cache(&self) -> &Cache<'m> {
        &self.cache
    }
    /// The pool.
    pub const fn pool(&self) -> &Pool<'m> {
        &self.pool
    }
    /// The areas.
    pub const fn areas(&self) -> &Areas<'m> {
        &self.areas
    }
    /// The counters.
    pub const fn stats(&self) -> &'m Stats {
        self.stats
    }

    /// Slots, and parts of them, that could not be read and whose page is gone.
    pub fn slots_given_up(&self) -> u64 {
        self.slots_given_up.load(Ordering::Relaxed)
    }

    /// Returns the state of a page, as a hint.
    pub fn state(&self, page: PageIndex) -> State {
        self.table.known(page).map_or(State::Absent, |place| place.entry().load().state())
    }

    /// Returns the number of pages in the program's memory.
    pub fn resident(&self) -> u64 {
        self.stats.gauge(Gauge::Resident)
    }

    /// Returns the number of pages that are out and must come back.
    pub fn evicted(&self) -> u64 {
        self.stats.gauge(Gauge::Evicted)
    }

    /// The word that changes when a page is settled that a thread waits for; see [`Unsettled`].
    pub const fn settled_word(&self) -> &AtomicU32 {
        &self.settled
    }

    /// Ends a move of a locked page: updates the gauges, stores the new state, wakes waiters. Returns whether
    /// a thread waited.
    pub(crate) fn settle(&self, page: PageIndex, place: EntryRef<'_>, before: State, after: State) -> bool {
        self.settle_with(page, place, before, after, None)
    }

    /// Like `settle`. `past` replaces what the entry remembers of the page; `None` leaves that unchanged.
    pub(crate) fn settle_with(
        &self,
        page: PageIndex,
        place: EntryRef<'_>,
        before: State,
        after: State,
        past: Option<Past>,
    ) -> bool {
        pause!();
        self.account(before, after);
        let waited = place.settle(before, after, past);
        if waited {
            // Ordering: Release. A thread that sees the new count also sees the settled entry.
            self.settled.fetch_add(1, Ordering::Release);
            sync::wake_all(&self.settled);
            self.wake.wake(page);
        }
        waited
    }

    /// Keeps the gauges in step with a page's state.
    fn account(&self, before: State, after: State) {
        match (matches!(before, State::Inherited(_)), matches!(after, State::Inherited(_))) {
            (false, true) => _ = self.inherited.fetch_add(1, Ordering::Relaxed),
            (true, false) => {
                self.free_inherited(before);
                // Ordering: Release. The use of the elder's books comes before the books are forgotten.
                self.inherited.fetch_sub(1, Ordering::Release);
            }
            _ => {}
        }
        for (gauge, was, is) in [
            (Gauge::Resident, before.is_resident(), after.is_resident()),
            (Gauge::Evicted, before.is_evicted(), after.is_evicted()),
        ] {
            match (was, is) {
                (false, true) => {
                    self.stats.gauge_add(gauge, 1);
                }
                (true, false) => self.stats.gauge_sub(gauge, 1),
                _ => {}
            }
        }
    }

    /// Copies the usage of the pool and the areas into the gauges. Call now and then.
    pub fn refresh_gauges(&self) {
        let pool = self.pool.usage();
        self.stats.set(Gauge::PoolBytes, pool.bytes as u64);
        self.stats.set(Gauge::PoolPayload, pool.payload_bytes as u64);
        self.stats.set(Gauge::Stored, pool.objects as u64);
        self.stats.raise_with((Gauge::PoolPeak, pool.bytes as u64), (Gauge::StoredPeak, pool.objects as u64));
        self.stats.set(Gauge::SlotsUsed, self.areas.in_use());
    }

    /// Sets what victims without neighbours cost the driver. Until the driver says so the cost is `Dear`.
    pub fn lone_victims_are(&self, lone: Lone) {
        self.recency.lone_victims_are(lone);
    }

    /// Returns whether walks bring in a large share of the pages that come in.
    pub fn is_scan_on(&self) -> bool {
        self.recency.is_scan_on()
    }

    /// Returns the bytes of Farpage's own memory that grow and shrink with what is evicted: the pool and
    /// frames with memory.
    pub fn own_bytes(&self) -> u64 {
        let cache = self.cache.usage();
        let backed = self.cache.count() - cache.free + cache.free_backed;
        self.pool.usage().bytes as u64 + u64::from(backed) * PAGE_BYTES as u64
    }
}
