//! Parked pages are placed: they leave their frames for a word, the pool, or a write to an area. The frames
//! are free then, and their memory goes back to the kernel.
// UNSAFETY: memory of frames is given back, and made anew.

use super::Worker;
use super::evict::DIRECT_BATCH;
use farpage_core::cache::Backing;
use farpage_core::pager::Placed;
use farpage_core::units::{FrameIndex, PAGE_BYTES};
use farpage_io::Wait;
use farpage_os::memory::Stretch;

/// Pages placed between two trims of the frames that they leave, while threads wait for headroom.
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
const UNTRIMMED_MAX: u32 = 160;
const UNTRIMMED_NEAR_LIMIT_MAX: u32 = DIRECT_BATCH as u32;
/// Stretches of these frames whose memory is given back by one call.
const STRETCHES_MAX: usize = 32;

impl Worker {
    /// Settles finished writes and gives back memory of free frames. Then lets threads go on that wait for
    /// headroom.
    pub(super) fn after_placing(&mut self) {
        self.collect_writes(Wait::No);
        let cache = self.engine.pager.cache();
        let gathered = cache.usage().free_moved;
        let at_once = UNTRIMMED_MAX.min(cache.count() / 8).min(self.engine.budget.together());
        if gathered >= at_once || gathered >= UNTRIMMED_NEAR_LIMIT_MAX && self.engine.is_near_limit() {
            self.trim_frames();
        }
        self.engine.budget.refresh(self.engine.pager);
        self.engine.let_waiters_go_on();
    }

    /// Places the oldest parked pages until at most `keep` are parked. Returns how many left.
    pub(super) fn place(&mut self, keep: u32) -> u32 {
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
    pub(super) fn send_if_worthwhile(&mut self) {
        let frames = self.writes.frames_at_most();
        if self.writes.len() >= WRITE_WORTHWHILE as usize || frames >= self.frames_to_hold() / 2 {
            self.send_writes();
        }
    }

    /// Returns whether the waiting writes must be sent before another page can join. Either a request has no
    /// free slot left, or the writes hold too many frames.
    pub(super) fn holds_enough(&self) -> bool {
        self.writes.is_full() || self.writes.frames_at_most() >= self.frames_to_hold()
    }

    /// Returns how many frames writes may hold: half as many as may be parked, and at most an eighth of all
    /// frames. These frames have memory.
    pub(super) fn frames_to_hold(&self) -> usize {
        let pager = self.engine.pager;
        (self.engine.parked_max() / 2).max(WRITE_WORTHWHILE).min(pager.cache().count() / 8) as usize
    }

    /// Gives back the memory behind free frames, but for what the next faults need. Returns whether there was
    /// any.
    pub(super) fn trim_frames(&self) -> bool {
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
        // Nothing is stored any more while pages come back for good.
        let parked_max = self.engine.pager.cache().usage().parked.saturating_sub(8);
        if !self.engine.keeps_all_in() && self.place(parked_max) > 0 {
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

    /// Sees to it that `wanted` free frames have memory that did not come with a page, if possible. Pages are
    /// packed in such frames.
    pub(super) fn prepare_packs(&self, wanted: u32) {
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

    pub(super) fn back_a_free_frame(&self) -> bool {
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
}
