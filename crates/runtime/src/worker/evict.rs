//! Evictions: pages leave the program into frames, and from there go to where they stay. A thread that needs
//! memory evicts a batch itself (direct reclaim). The keeper evicts in the background, and looks after the
//! pool and the areas.

use super::{Progress, WRITES_MAX, Worker};
use crate::engine::Engine;
use crate::evictor::{self, EvictionCost};
use crate::map_lock::DIRECT;
use crate::{fork, guard, lull};
use core::sync::atomic::Ordering;
use farpage_core::cache::Backing;
use farpage_core::pager::{Densified, Placed, Shrunk, Taken};
use farpage_core::reclaim::recency::Lone;
use farpage_core::stats::Counter;
use farpage_core::units::{AreaId, FrameIndex, PAGE_BYTES, PageIndex, PageRange};
use farpage_fault::Outgoing;
use farpage_io::Wait;
use farpage_os::clock::now_ns;
use farpage_os::memory::Stretch;

/// Victims of one batch in a thread that serves a fault.
const DIRECT_BATCH: usize = 32;
/// Pages placed between two trims of the frames that they leave, while threads wait for room.
const PLACED_FOR_WAITERS: u32 = 32;
/// Pages that make a write worth sending: 128 KiB.
const WRITE_WORTHWHILE: u32 = 32;
/// Frames that are given memory before a page is packed, at most: one for the page, and one for the pack.
const PREPARED_MAX: usize = 2;
/// Free frames that keep their memory, for the decompression of the next faults.
const BACKED_KEPT: u32 = 64;
/// Free frames with memory that came with pages, gathered at most before this memory is given back. Each
/// return interrupts other CPUs. The limit is lower where there are few frames, where the marks are close
/// together, and near the limit of the budget.
const TRIMMED_AT_ONCE: u32 = 160;
const TRIMMED_NEAR_LIMIT: u32 = DIRECT_BATCH as u32;
/// Stretches of these frames whose memory is given back by one call.
const STRETCHES_MAX: usize = 32;
/// Nanoseconds that a thread that needs memory evicts, at most. Then the program goes on over its budget.
const DIRECT_NS_MAX: u64 = 2_000_000_000;
/// Nanoseconds in which a thread doesn't look again after it has found nothing to evict.
const GIVE_UP_NS: u64 = 20_000_000;
/// Rest after a look at all of the program's memory that found nothing movable, in multiples of the time that
/// the look took. During the rest the keeper doesn't look again, and no thread waits for the keeper.
const REST_AFTER_LAP: u64 = 8;
/// Nanoseconds of evicting after which the keeper looks after the pool and the areas, however much there is
/// to evict.
const EVICT_NS_MAX: u64 = 100_000_000;
/// Nanoseconds of evicting after which the keeper works out the process's part of the budget again, however
/// much there is to evict.
const LOOK_NS: u64 = 5_000_000;
/// Batches of nothing but held pages, before a thread finds that there is nothing to evict. After each batch,
/// the hand goes on behind the range that a call holds.
const HELD_BATCHES_MAX: usize = 16;
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

/// The kind of thread that takes pages out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// An engine thread.
    Engine,
    /// A thread of the program, in its handler.
    Program,
}

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
            // Asked before evicting: if nothing can be evicted, the keeper may have made room in the pool
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
    /// if it makes room in the pool. Returns false if there is nothing to wait for.
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
        self.outgoing[took.victims..].iter_mut().for_each(|outgoing| outgoing.is_shared = false);
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

    /// Settles finished writes and gives back memory of free frames. Then lets threads go on that wait for
    /// room.
    fn after_placing(&mut self) {
        self.collect_writes(Wait::No);
        let cache = self.engine.pager.cache();
        let gathered = cache.usage().free_moved;
        let at_once = TRIMMED_AT_ONCE.min(cache.count() / 8).min(self.engine.budget.together());
        if gathered >= at_once || gathered >= TRIMMED_NEAR_LIMIT && self.engine.is_near_limit() {
            self.trim_frames();
        }
        self.engine.budget.refresh(self.engine.pager);
        self.engine.let_waiters_go_on();
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
        if !self.engine.evictions_allowed() {
            return None;
        }
        if self.engine.wants_neighbours() {
            pager.choose_by_hand_next();
        }
        pager.begin_evict(&mut self.batch, max);
        let mut spared = 0;
        if self.engine.handover.is_some() {
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
            spared = pager.spare(&mut self.batch, held);
        }
        let count = self.batch.len();
        for (outgoing, victim) in self.outgoing.iter_mut().zip(self.batch.victims()) {
            *outgoing = Outgoing {
                page: victim.page,
                frame: pager.cache().pointer(victim.frame),
                backing: victim.backing,
                taken: Taken::Busy,
                is_shared: false,
            };
        }
        let shared_pages = self.shared_among(count);
        let outgoing = &mut self.outgoing[..count];
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
        let mut taken = 0;
        for (outgoing, victim) in self.outgoing.iter().zip(self.batch.victims()) {
            (victim.taken, victim.backing) = (outgoing.taken, outgoing.backing);
            taken += usize::from(outgoing.taken != Taken::Busy);
            // The victim may have been write-protected for copying, and then not taken. Where system calls of
            // the program can't wait for the engine, a victim may stay protected only if it owns a slot.
            // Pages that own a slot are checked before a call.
            let is_protected = outgoing.taken == Taken::Busy && !self.engine.frames_move;
            if is_protected && self.engine.handover.is_some() && !victim.keeps_slot() {
                self.engine.pages.unprotect(PageRange::of(victim.page, 1));
            }
            // Without this, a page that is shared since a fork would stay: a protected page can't be unshared
            // without a fault.
            if outgoing.is_shared
                && victim.keeps_slot()
                && self.engine.pages.unprotect(PageRange::of(victim.page, 1))
            {
                pager.leave_slot(victim);
            }
        }
        let went = |at: &usize| shared_pages & 1 << at != 0 && self.outgoing[*at].taken != Taken::Busy;
        match (0..count).filter(went).count() {
            0 => {}
            pages => self.engine.have_evicted_shared(pages as u64, 0),
        }
        pager.park(&mut self.batch);
        drop(shared);
        Some(Out { took: EvictionCost { victims: count, pages: taken, ns }, spared })
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

    /// Places the oldest parked pages until at most `keep` are parked. Returns how many left.
    fn place(&mut self, keep: u32) -> u32 {
        let (mut left, mut busy, mut told) = (0, 0, 0);
        loop {
            let parked = self.engine.pager.cache().usage().parked;
            // Look only once at each page that can't be placed now. A stream holds its marker for a limited
            // number of looks.
            if parked <= keep || busy >= parked.min(64) {
                break;
            }
            if self.holds_enough() && !self.send_writes() {
                break;
            }
            if left >= told + PLACED_FOR_WAITERS && self.engine.lull.is_waited_for() {
                told = left;
                self.trim_frames();
                self.engine.let_waiters_go_on();
            }
            self.prepare_packs(1);
            let _shared = self.engine.map.shared(self.index);
            match self.engine.pager.place_oldest(self.scratch, self.writes) {
                Placed::Done | Placed::Queued => left += 1,
                Placed::Busy => busy += 1,
                Placed::Nothing => break,
                Placed::NowhereToGo => {
                    self.engine.explain_full();
                    break;
                }
            }
        }
        self.send_if_worthwhile();
        left
    }

    /// Sends the waiting writes once they are enough for one request. Until then the pages stay in frames,
    /// where a fault finds them. This thread sends them in any case when it has nothing better to do.
    fn send_if_worthwhile(&mut self) {
        let frames = self.writes.frames_at_most();
        if self.writes.len() >= WRITE_WORTHWHILE as usize || frames >= self.frames_to_hold() / 2 {
            self.send_writes();
        }
    }

    /// Returns whether the waiting writes must be sent before another page can join. Either a request has no
    /// free slot left, or the writes hold too many frames.
    fn holds_enough(&self) -> bool {
        self.writes.is_full() || self.writes.frames_at_most() >= self.frames_to_hold()
    }

    /// Returns how many frames writes may hold: half as many as may be parked, and at most an eighth of all
    /// frames. These frames have memory.
    fn frames_to_hold(&self) -> usize {
        let pager = self.engine.pager;
        (self.engine.parked_max() / 2).max(WRITE_WORTHWHILE).min(pager.cache().count() / 8) as usize
    }

    /// Gives back the memory behind free frames, but for what the next faults need. Returns whether there was
    /// any.
    fn trim_frames(&self) -> bool {
        let pager = self.engine.pager;
        // Where pages are copied instead of moved, frames keep their memory.
        if !self.engine.frames_move {
            return false;
        }
        let mut trimmed = false;
        loop {
            let mut runs = [(FrameIndex(0), 0); STRETCHES_MAX];
            let mut stretches = [Stretch { base: core::ptr::null_mut(), bytes: 0 }; STRETCHES_MAX];
            let mut count = 0;
            while count < STRETCHES_MAX
                && let Some((first, frames)) = pager.cache().take_surplus(BACKED_KEPT)
            {
                runs[count] = (first, frames);
                stretches[count] = Stretch {
                    base: pager.cache().pointer(first).cast(),
                    bytes: frames as usize * PAGE_BYTES,
                };
                count += 1;
            }
            if count == 0 {
                break;
            }
            stretches[..count]
                .iter()
                .for_each(|stretch| self.engine.about_to_drop(stretch.base.cast(), stretch.bytes));
            // SAFETY: the frames were free, and `take_surplus` gave them to this thread. Their bytes are
            // needed no more.
            let empty = |stretches| unsafe { self.engine.pages.drop_memory(stretches) }.is_ok();
            let are_empty = empty(&stretches[..count]);
            for ((first, frames), stretch) in runs[..count].iter().zip(&stretches) {
                // The kernel doesn't say which of several stretches it could not empty. To empty one again
                // does no harm.
                let is_empty = are_empty || empty(core::slice::from_ref(stretch));
                let backing = if is_empty { Backing::Hole } else { Backing::Memory };
                (first.0..first.0 + frames).for_each(|frame| pager.cache().put(FrameIndex(frame), backing));
            }
            if !are_empty {
                break;
            }
            trimmed = true;
        }
        trimmed
    }

    /// Frees a frame for a fault that needs one: trims frames, places parked pages, waits for a write, or
    /// puts a page back into the program.
    pub(super) fn free_a_frame(&mut self) {
        if self.trim_frames() {
            return;
        }
        self.send_writes();
        if self.place(self.engine.pager.cache().usage().parked.saturating_sub(8)) > 0 {
            self.collect_writes(Wait::No);
            return;
        }
        self.collect_writes(Wait::One);
        let put_back = {
            let _shared = self.engine.map.shared(self.index);
            match self.engine.pager.put_back() {
                Some(ticket) => {
                    self.install(ticket);
                    true
                }
                None => false,
            }
        };
        if !put_back {
            // Other threads use all frames and are about to return them.
            farpage_os::clock::sleep_ns(50_000);
        }
    }

    /// Writes the objects that go first from the pool to an area, until the pool is as small as it should be.
    /// Objects that are only kept are freed.
    fn shrink_pool(&mut self) -> Progress {
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

    /// Sees to it that `wanted` free frames have memory that did not come with a page, if possible. Pages are
    /// packed in such frames.
    fn prepare_packs(&self, wanted: u32) {
        let pager = self.engine.pager;
        let usage = pager.cache().usage();
        let own = usage.free_backed - usage.free_moved;
        if !pager.config.packs || own >= wanted || !pager.areas().any_writable() {
            return;
        }
        // Frames with memory come first, so take all of these before any is put back.
        let mut frames = [None; PREPARED_MAX];
        frames[..wanted as usize].fill_with(|| pager.cache().take());
        frames.into_iter().flatten().for_each(|frame| _ = self.give_memory(frame));
    }

    fn back_a_free_frame(&self) -> bool {
        let pager = self.engine.pager;
        let emptied = || if self.trim_frames() { pager.cache().take() } else { None };
        pager.cache().take().or_else(emptied).is_some_and(|frame| self.give_memory(frame))
    }

    /// Puts a frame that was taken back into the cache, with memory. Returns false if there is no memory for
    /// the frame.
    fn give_memory(&self, (frame, backing): (FrameIndex, Backing)) -> bool {
        let cache = self.engine.pager.cache();
        // SAFETY: the frame was free, and this thread has taken it.
        let backed = backing == Backing::Memory
            || unsafe { self.engine.pages.give_memory(cache.pointer(frame)) }.is_ok();
        cache.put(frame, if backed { Backing::Memory } else { Backing::Hole });
        backed
    }

    /// Tells devices about a few clusters that became empty. The caller holds no lock, because this may take
    /// milliseconds.
    fn discard_empty_clusters(&self) {
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

    /// Tries full areas again, because the disk or another process may have made room. Also frees what dead
    /// processes had before it is needed. Otherwise an area that grows would grow with every process that
    /// ever ran.
    fn retry_full_areas(&mut self) {
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
    fn forget_heirless(&self) {
        let _shared = self.engine.map.shared(self.index);
        fork::forget_heirless(self.engine);
    }

    fn is_eviction_due(&self, now_ns: u64) -> bool {
        self.engine.is_due(self.engine.evicts_inline(now_ns))
    }

    /// Compresses objects once more that have been in the pool for some time. Not while children have a copy
    /// of the pool, because pages that they share with it would be there twice.
    fn densify_old(&mut self) {
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
                Densified::Busy | Densified::NoRoom if in_vain == IN_VAIN_MAX => return DensifyEnd::InVain,
                Densified::Busy | Densified::NoRoom => in_vain += 1,
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
    fn tidy_pool(&mut self) {
        let pager = self.engine.pager;
        let usage = pager.pool().usage();
        if usage.bytes_occupied > usage.payload_bytes + usage.bytes_occupied / WASTE_PART {
            self.compact_pool();
        }
        self.release_blocks();
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
