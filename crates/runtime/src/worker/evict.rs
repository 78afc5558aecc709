//! Evictions: pages leave the program into frames. The keeper evicts in the background. Handler threads evict
//! at the limit (direct reclaim), readahead threads to make memory for a batch. Threads of the program evict
//! after they were served. `place.rs` says where the pages go from their frames.
// UNSAFETY: pages are taken away from the program.

use super::{Progress, Worker};
use crate::guard;
use crate::mappings::map_lock::DIRECT;
use crate::pressure::evictor::{self, EvictionCost};
use crate::pressure::lull;
use core::sync::atomic::Ordering;
use farpage_core::pager::Taken;
use farpage_core::reclaim::recency::Lone;
use farpage_core::stats::Counter;
use farpage_core::units::{PageIndex, PageRange};
use farpage_fault::Outgoing;
use farpage_io::Wait;
use farpage_os::clock::now_ns;

/// Victims of one batch in a thread that serves a fault.
pub(super) const DIRECT_BATCH: usize = 32;
/// Nanoseconds that a thread that needs memory evicts, at most. Then the program goes on over its budget.
const DIRECT_NS_MAX: u64 = 2_000_000_000;
/// Nanoseconds in which a thread doesn't look again after it has found nothing to evict.
const GIVE_UP_NS: u64 = 20_000_000;
/// Rest after a look at all of the program's memory that found nothing movable, in multiples of the time that
/// the look took. During the rest the keeper doesn't look again, and no thread waits for the keeper.
const REST_AFTER_LAP: u64 = 8;
/// Nanoseconds of evicting after which the keeper looks after the pool and the areas, however much there is
/// to evict. A lap over memory that can't be moved may take longer.
pub(super) const EVICT_NS_MAX: u64 = 100_000_000;
/// Nanoseconds of evicting after which the keeper works out the process's part of the budget again, however
/// much there is to evict.
pub(super) const LOOK_NS: u64 = 5_000_000;
/// Batches of nothing but held pages, before a thread finds that there is nothing to evict. After each batch,
/// the hand goes on behind the range that a call holds.
const HELD_BATCHES_MAX: usize = 16;

/// The kind of thread that takes pages out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// An engine thread.
    Engine,
    /// A thread of the program, in its handler.
    Program,
}

/// Result of a batch.
struct Out {
    took: EvictionCost,
    /// Victims that were released because calls hold them.
    spared: usize,
}

impl Worker {
    /// Evicts in the thread that needs the memory, until there is some or nothing can be done (direct
    /// reclaim).
    pub(crate) fn make_memory_direct(&mut self) {
        self.engine.budget.ring();
        let deadline = now_ns() + DIRECT_NS_MAX;
        loop {
            self.engine.budget.refresh(self.engine.pager);
            let now = now_ns();
            if !self.engine.is_over_limit() || now < self.give_up_until_ns {
                return;
            }
            self.engine.pager.stats().count(Counter::ReclaimDirect);
            // Asked before evicting: if nothing can be evicted, the keeper may have freed space in the pool
            // just then.
            let may_densify = self.engine.may_densify();
            if now > deadline
                || (self.evict(DIRECT_BATCH) == Progress::None && !self.wait_for_others(may_densify))
            {
                // Perhaps nothing could be evicted because the program has just given memory back. Then less
                // is needed now.
                self.engine.measure();
                if self.engine.is_over_limit() {
                    self.give_up();
                }
                return;
            }
        }
    }

    /// Waits after nothing could be evicted, for other threads that may be able to evict, or for the keeper
    /// if it frees space in the pool. Returns false if there is nothing to wait for.
    fn wait_for_others(&mut self, may_densify: bool) -> bool {
        let is_for_good = now_ns() < self.engine.unmovable_until_ns.load(Ordering::Relaxed);
        if (core::mem::take(&mut self.sees_shared) && !is_for_good) || may_densify {
            self.engine.budget.ring();
            farpage_os::clock::sleep_ns(100_000);
            return true;
        }
        self.wait_for_frames()
    }

    /// Waits for frames after nothing could be evicted, because frames are being written or filled. Returns
    /// false if none is.
    fn wait_for_frames(&mut self) -> bool {
        self.send_writes();
        if self.has_writes() {
            self.collect_writes(Wait::One);
            return true;
        }
        let others = self.engine.writes_under_way.load(Ordering::Relaxed) > 0
            || self.engine.evicting.load(Ordering::Relaxed) > 0;
        if others {
            farpage_os::clock::sleep_ns(100_000);
        }
        others
    }

    fn give_up(&mut self) {
        self.give_up_until_ns = now_ns() + GIVE_UP_NS;
        self.engine.pager.stats().count(Counter::OverBudget);
    }

    /// Makes one round of background reclaim. Evicts down to the stop mark, shrinks the pool to its
    /// threshold, and looks after the pool and the areas.
    pub fn reclaim_background(&mut self) -> Progress {
        let engine = self.engine;
        let now = now_ns();
        engine.budget.age_zeros(now);
        engine.follow_rate(now);
        engine.balance_pool();
        let rests_until_ns = self.give_up_until_ns.max(engine.unmovable_until_ns.load(Ordering::Relaxed));
        let mut progress = Progress::None;
        if engine.is_over_start() && now_ns() >= rests_until_ns {
            progress = self.evict_to_stop();
        }
        if self.shrink_pool() == Progress::Some {
            progress = Progress::Some;
        }
        self.densify_old();
        self.tidy_pool();
        self.forget_heirless();
        self.discard_empty_clusters();
        self.retry_full_areas();
        if progress == Progress::None {
            self.send_writes();
        }
        self.collect_writes(Wait::No);
        self.trim_frames();
        engine.publish_gauges();
        progress
    }

    /// Evicts batches until memory is below the stop mark, or until it is better to wait.
    fn evict_to_stop(&mut self) -> Progress {
        let engine = self.engine;
        let began_ns = now_ns();
        let (mut progress, mut looked_ns) = (Progress::None, began_ns);
        // The number of batches in a row with nothing but shared pages, and the time of the first one.
        let (mut shared_batches, mut since_ns) = (0, 0);
        let batch = engine.background_batch();
        while engine.is_over_stop() {
            let now = now_ns();
            if now >= looked_ns + LOOK_NS {
                engine.take_share();
                looked_ns = now;
            }
            if !engine.is_near_limit() && engine.pager.is_waiting_for_walks() {
                return Progress::Some;
            }
            // The keeper places the pages that threads of the program have taken. Taking more pages would
            // interrupt these threads.
            if !engine.is_near_limit() && engine.evicts_inline(now_ns()) {
                let has_placed = self.place(engine.parked_max()) > 0;
                self.after_placing();
                return if has_placed { Progress::Some } else { progress };
            }
            engine.pager.stats().count(Counter::ReclaimBackground);
            let may_densify = engine.may_densify();
            let evicted = self.evict(batch);
            let is_shared = self.unshare_refused();
            if evicted == Progress::None {
                if shared_batches == 0 {
                    since_ns = now_ns();
                }
                shared_batches += u64::from(is_shared);
                // A page that was shared can be moved at the next look, unless a device has pinned it.
                let is_seen_twice = shared_batches * batch as u64 > 2 * engine.pager.resident();
                // Go on until all pages were seen twice. Otherwise no thread would know that devices have
                // pinned all pages.
                if is_shared && !is_seen_twice {
                    continue;
                }
                if self.wait_for_frames() {
                    // A slow device must keep neither the pool nor the areas waiting.
                    if now_ns() >= began_ns + EVICT_NS_MAX {
                        break;
                    }
                    continue;
                }
                if is_seen_twice {
                    let rest_ns = (now_ns() - since_ns) * REST_AFTER_LAP;
                    engine.unmovable_until_ns.store(now_ns() + rest_ns, Ordering::Relaxed);
                }
                // As in `make_memory_direct`.
                engine.measure();
                if engine.is_over_start() && !may_densify {
                    self.give_up();
                    engine.explain_over_budget();
                }
                break;
            }
            (progress, shared_batches) = (Progress::Some, 0);
            engine.budget.refresh(engine.pager);
            let now = now_ns();
            engine.follow_rate(now);
            if now >= began_ns + EVICT_NS_MAX {
                break;
            }
        }
        progress
    }

    /// Evicts one batch, and places as many parked pages.
    pub(crate) fn evict(&mut self, max: usize) -> Progress {
        self.engine.evicting.fetch_add(1, Ordering::Relaxed);
        // Pages that calls hold are passed over, and not chosen again for some time. After some such batches,
        // the caller decides whether to wait. A program that holds more than its budget goes over the budget.
        let progress = (0..HELD_BATCHES_MAX).find_map(|_| self.evict_batch(max)).unwrap_or(Progress::None);
        self.engine.evicting.fetch_sub(1, Ordering::Relaxed);
        progress
    }

    /// Evicts one batch. Returns `None` if all victims were pages that calls hold.
    fn evict_batch(&mut self, max: usize) -> Option<Progress> {
        let engine = self.engine;
        let out = if engine.evicts_in_lulls(now_ns()) {
            engine.lull.during(|| self.take_batches(max))
        } else {
            self.take_batch(max, By::Engine)
        };
        let Some(Out { took, spared }) = out else {
            return Some(Progress::None);
        };
        self.engine.evictor.taken_by_engine(took);
        let placed = self.place(if took.victims == 0 { 0 } else { self.engine.parked_max() });
        self.after_placing();
        if took.pages > 0 || placed > 0 {
            return Some(Progress::Some);
        }
        self.sees_shared = self.outgoing.iter().any(|outgoing| outgoing.is_shared);
        (spared == 0).then_some(Progress::None)
    }

    /// Takes several batches in a row, as long as each batch is full and memory is above the stop mark.
    /// Memory that the pages give up when they are placed counts as free already. Returns the last batch.
    fn take_batches(&mut self, max: usize) -> Option<Out> {
        let mut last = self.take_batch_in_lull(max)?;
        for _ in 1..(lull::PAGES / max).min(lull::BATCHES) {
            if last.took.pages < max || !self.engine.is_over_stop() {
                break;
            }
            match self.take_batch_in_lull(max) {
                Some(more) if more.took.victims > 0 => {
                    self.engine.evictor.taken_by_engine(last.took);
                    last = more;
                }
                // No frame is left, or nothing may be evicted any more. The pages that were taken have to be
                // placed.
                _ => break,
            }
        }
        // Threads that go on now must know how much memory these pages still take.
        self.engine.budget.refresh(self.engine.pager);
        Some(last)
    }

    /// Takes one batch of a lull, and counts it.
    fn take_batch_in_lull(&mut self, max: usize) -> Option<Out> {
        let out = self.take_batch(max, By::Engine)?;
        self.engine.pager.stats().add(Counter::EvictLull, out.took.pages as u64);
        Some(out)
    }

    /// Takes a few pages out in a thread of the program that was just served, if the served threads take
    /// pages now. The keeper places these pages.
    pub(crate) fn take_along(&mut self, now_ns: u64) {
        let engine = self.engine;
        if self.index.0 > DIRECT.0 {
            engine.evictor.several_are_served(now_ns);
            engine.lull.are_served(self.index.0 - DIRECT.0 + 1, now_ns);
        }
        if !engine.is_over_start() {
            return;
        }
        let is_inline = engine.evicts_inline(now_ns);
        if !engine.is_due(is_inline) {
            return;
        }
        let are_cheap = is_inline || engine.evicts_in_lulls(now_ns);
        engine.pager.lone_victims_are(if are_cheap { Lone::Cheap } else { Lone::Dear });
        if !is_inline {
            if engine.is_near_limit() && engine.evictor.claim_waking() {
                engine.budget.ring();
            }
            return;
        }
        let wakes_keeper = engine.evictor.evict_inline(now_ns, engine.budget.together(), || {
            engine.evicting.fetch_add(1, Ordering::Relaxed);
            let out = self.take_batch(evictor::BATCH, By::Program);
            engine.evicting.fetch_sub(1, Ordering::Relaxed);
            engine.budget.refresh(engine.pager);
            let took = out.map_or(EvictionCost::default(), |out| out.took);
            engine.pager.stats().add(Counter::EvictInline, took.pages as u64);
            took
        });
        if wakes_keeper {
            engine.budget.ring();
        }
    }

    /// Takes victims out of the program and parks them. Returns `None` while no page may go.
    fn take_batch(&mut self, max: usize, by: By) -> Option<Out> {
        let pager = self.engine.pager;
        let shared = self.engine.map.shared(self.index);
        // The keeper reads which pages were refused. Those of an earlier batch may lie in mappings that are
        // gone.
        self.outgoing.iter_mut().for_each(|outgoing| outgoing.is_shared = false);
        if !self.engine.evictions_allowed() {
            return None;
        }
        if self.engine.wants_neighbours() {
            pager.choose_by_hand_next();
        }
        pager.begin_evict(&mut self.batch, max);
        let spared = self.spare_held_victims();
        let victims = self.batch.len();
        let shared_pages = self.fill_outgoing();
        let outgoing = &mut self.outgoing[..victims];
        let began_ns = now_ns();
        match by {
            // SAFETY: `begin_evict` gave each victim a frame of Farpage's and locked its page. Engine threads
            // serve faults on the page.
            By::Engine => unsafe { self.engine.pages.take(outgoing) },
            // If this thread can't take pages, all victims stay.
            // SAFETY: as for `By::Engine`.
            By::Program => _ = unsafe { self.engine.pages.take_inline(outgoing) },
        }
        let ns = now_ns() - began_ns;
        let pages = self.note_taken(shared_pages);
        pager.park(&mut self.batch);
        drop(shared);
        Some(Out { took: EvictionCost { victims, pages, ns }, spared })
    }

    /// Releases the victims that a system call of the program holds. Returns how many.
    fn spare_held_victims(&mut self) -> usize {
        if self.engine.mode().calls_can_wait() {
            return 0;
        }
        let pager = self.engine.pager;
        let mut held = 0_u128;
        guard::rooms::for_each_held(|range| {
            let mut here = 0;
            for (at, victim) in self.batch.victims().iter().enumerate() {
                here |= u128::from(range.contains(victim.page)) << at;
            }
            if here != 0 {
                pager.pass_over(range);
            }
            held |= here;
        });
        pager.release_held(&mut self.batch, held)
    }

    /// Writes the batch's victims down for [`Pages::take`](farpage_fault::Pages::take). Returns which of them
    /// other processes have too: one bit for each.
    fn fill_outgoing(&mut self) -> u128 {
        let cache = self.engine.pager.cache();
        for (outgoing, victim) in self.outgoing.iter_mut().zip(self.batch.victims()) {
            *outgoing = Outgoing {
                page: victim.page,
                frame: cache.pointer(victim.frame),
                backing: victim.backing,
                taken: Taken::Busy,
                is_shared: false,
            };
        }
        self.shared_among(self.batch.len())
    }

    /// Notes in the batch what became of each victim, and unprotects victims that stay. `shared_pages` has a
    /// bit for each victim that other processes have too. Returns the number of pages that were taken.
    fn note_taken(&mut self, shared_pages: u128) -> usize {
        let (pager, pages) = (self.engine.pager, self.engine.pages);
        let (mut taken, mut taken_shared) = (0, 0);
        for (at, (outgoing, victim)) in self.outgoing.iter().zip(self.batch.victims()).enumerate() {
            (victim.taken, victim.backing) = (outgoing.taken, outgoing.backing);
            let stays = outgoing.taken == Taken::Busy;
            taken += usize::from(!stays);
            taken_shared += u64::from(!stays && shared_pages & 1 << at != 0);
            // The victim may have been write-protected for copying, and then not taken. Where system calls of
            // the program can't wait for the engine, a victim may stay protected only if it owns a slot.
            // Pages that own a slot are checked before a call.
            let is_protected = stays && !self.engine.frames_move;
            if is_protected && !self.engine.mode().calls_can_wait() && !victim.keeps_slot() {
                pages.unprotect(PageRange::of(victim.page, 1));
            }
            // Without this, a page that is shared since a fork would stay: a protected page can't be unshared
            // without a fault.
            if outgoing.is_shared && victim.keeps_slot() && pages.unprotect(PageRange::of(victim.page, 1)) {
                pager.leave_slot(victim);
            }
        }
        if taken_shared > 0 {
            self.engine.have_evicted_shared(taken_shared, 0);
        }
        taken
    }

    /// Returns which of the victims other processes have too, since a fork: one bit for each. Where pages are
    /// moved, the kernel refuses shared pages ([`Worker::unshare_refused`]).
    fn shared_among(&self, count: usize) -> u128 {
        let engine = self.engine;
        if engine.frames_move || !engine.share.ledger.has_kin() {
            return 0;
        }
        let outgoing = &self.outgoing[..count];
        let (mut bits, mut first) = (0, 0);
        // Ask about neighbours together.
        while first < count {
            let page = outgoing[first].page;
            let goes_on = |at: &usize| outgoing[*at].page == page.plus((*at - first) as u64);
            let length = (first..count).take_while(goes_on).count();
            let (pages, before) = (PageRange::of(page, length as u64), bits);
            engine.pagemap.for_each_shared(pages, |shared| {
                bits |= 1 << (first as u64 + (shared.0 - page.0));
            });
            if bits != before {
                // The kernel's page of zeros takes no memory. Before Linux 6.7, the kernel counts it as
                // shared.
                let _ = engine.pagemap.for_each_zero_run(pages, |zeros| {
                    zeros.iter().for_each(|zero| bits &= !(1 << (first as u64 + (zero.0 - page.0))));
                });
            }
            first += length;
        }
        bits
    }

    /// Makes pages that are shared since a fork the program's own. Each becomes a copy.
    fn unshare(&self, pages: PageRange) {
        let engine = self.engine;
        let has_kin = engine.share.ledger.has_kin();
        let shared = if has_kin { engine.count_shared(pages) } else { 0 };
        engine.pages.unshare(pages);
        if shared > 0 {
            engine.have_evicted_shared(shared, shared);
        }
    }

    /// Handles victims of the last batch that the kernel refused, because they are shared since a fork or
    /// pinned. Shared pages become the program's own and are the next victims. Otherwise all of memory would
    /// be copied before any page is evicted. Pages that can't be moved then are left for later. Returns
    /// whether there were any refused pages. Called in the keeper with no lock held, because the kernel may
    /// have to fault the pages in.
    fn unshare_refused(&mut self) -> bool {
        let refused = || self.outgoing.iter().filter(|page| page.is_shared).map(|page| page.page);
        let mut shared = refused();
        let Some(mut first) = shared.next() else {
            self.has_unshared = false;
            return false;
        };
        let mut end = first.plus(1);
        for page in shared.chain([PageIndex(0)]) {
            if page != end {
                self.unshare(PageRange::new(first, end));
                first = page;
            }
            end = page.plus(1);
        }
        if !self.has_unshared {
            let _shared = self.engine.map.shared(self.index);
            self.engine.pager.choose_next(refused());
        }
        self.has_unshared = !self.has_unshared;
        true
    }
}
