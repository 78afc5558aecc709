//! Writes to areas: slots for waiting pages, requests to the devices, and their results.

use super::{InFlight, WRITES_MAX, Worker};
use crate::engine::fork;
use crate::session::{Notice, pack_io_error};
use core::sync::atomic::Ordering;
use farpage_core::areas::{AreaState, RequestTime};
use farpage_core::pager::WriteProgress;
use farpage_core::units::{AREAS_MAX, AreaId, CLUSTER_SLOTS, PageRange};
use farpage_io::{Backend, Completion, IoError, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::errno::Errno;

/// Nanoseconds above which a call has waited for the device.
const BLOCKED_NS: u64 = 20_000;
/// Sources that `find_slots` knows.
const SOURCES_OF_SLOTS: u32 = 3;
/// Nanoseconds between two looks at writes in several areas.
const LOOK_AGAIN_NS: u64 = 50_000;
/// Nanoseconds of one wait for a write, where there are several areas. Writes to a disk that isn't overloaded
/// take less.
const WAIT_NS_MAX: u64 = 10_000_000;
/// Nanoseconds after which a write counts as stuck, where there are several areas. The frames of such a write
/// hold up no other write.
const STUCK_NS: u64 = 1_000_000_000;

/// Returns the state of an area after a failed write. The area is tried again in a second if it has no free
/// space, or if the kernel was short of something.
fn state_after(error: IoError) -> AreaState {
    if error.is_no_space() || error.is_retryable() { AreaState::Full } else { AreaState::ReadOnly }
}

impl Worker {
    /// Sends the pages that wait for slots. Returns false if this is not possible. Then the pages are parked
    /// again.
    pub(super) fn send_writes(&mut self) -> bool {
        while !self.writes.is_empty() {
            let Some(at) = self.free_request() else { return false };
            let node = self.node.unwrap_or_else(farpage_os::numa::current_node);
            let since_ns = now_ns();
            let shared = self.engine.map.shared(self.index);
            let pager = self.engine.pager;
            let request = pager.assign(self.index.0, node, self.writes).or_else(|| {
                (0..SOURCES_OF_SLOTS).find_map(|source| {
                    self.find_slots(source).then(|| pager.assign(self.index.0, node, self.writes)).flatten()
                })
            });
            let Some(request) = request else {
                pager.park_again(self.writes);
                drop(shared);
                self.engine.explain_full();
                return false;
            };
            drop(shared);
            self.requests[at] = request;
            self.in_flight[at] = Some(InFlight { since_ns, result: None });
            self.engine.writes_under_way.fetch_add(1, Ordering::Relaxed);
            self.send(at);
        }
        true
    }

    /// Frees slots from one source, when there are none. Returns whether there may be some now.
    fn find_slots(&self, source: u32) -> bool {
        let pager = self.engine.pager;
        match source {
            0 => pager.release_kept(64, |page| _ = self.engine.pages.unprotect(PageRange::of(page, 1))) > 0,
            1 => fork::forget_heirless(self.engine),
            _ => self.engine.reap_dead_processes(),
        }
    }

    fn free_request(&mut self) -> Option<usize> {
        for wait in [Wait::No, Wait::One] {
            if let Some(at) = self.in_flight.iter().position(Option::is_none) {
                return Some(at);
            }
            self.collect_writes(wait);
        }
        self.in_flight.iter().position(Option::is_none)
    }

    fn send(&mut self, at: usize) {
        let request = &self.requests[at];
        let first = request.run().first;
        let cluster = first.offset() / CLUSTER_SLOTS;
        if let Err(error) = self.engine.devices.prepare(first.area(), cluster) {
            return self.ended(at, Err(error));
        }
        let cache = self.engine.pager.cache();
        let mut segments = [Segment { base: core::ptr::null_mut() }; SEGMENTS_MAX];
        for (segment, frame) in segments.iter_mut().zip(request.written()) {
            segment.base = cache.pointer(frame).cast();
        }
        let request = Request {
            op: Op::Write,
            offset: first.byte_offset(),
            segments: &segments[..request.written().len()],
            token: at as u64,
        };
        let area = first.area();
        let back_end = self.back_ends.get_or_make(area, || self.engine.back_end(area));
        // SAFETY: each segment is a frame of a write request. The frame is ours until `write_done`, has
        // memory, and no code writes it.
        let sent = unsafe { back_end.submit(&request) };
        back_end.flush();
        if back_end.is_synchronous() {
            self.note_latency(area, at, u64::MAX);
        }
        if sent.is_err() {
            // The back end's table is longer than this thread's, so it can't be full. Treat this as a failed
            // write all the same.
            self.ended(at, Err(IoError::EIO));
        }
    }

    /// Collects and settles writes that the devices have finished. Waits only if no device has finished any.
    pub(super) fn collect_writes(&mut self, wait: Wait) {
        let is_news = self.has_writes();
        if self.collect_from_all(Wait::No) == 0 && wait != Wait::No {
            self.wait_for_a_write();
        }
        if is_news {
            self.looked_ns = now_ns();
        }
        for at in 0..WRITES_MAX {
            self.settle_write(at);
        }
    }

    /// Collects at least one write, if any is in flight. One area may never answer, such as a file on a
    /// server that is gone. So where there are several areas the wait may end without a write, and the caller
    /// does what can be done without.
    fn wait_for_a_write(&mut self) {
        if !self.has_several_areas() {
            self.collect_from_all(Wait::One);
            return;
        }
        let until_ns = now_ns() + WAIT_NS_MAX;
        let is_busy = |area: &u8| self.back_ends.get(AreaId(*area)).is_some_and(|it| it.in_flight() > 0);
        let busy = (0..AREAS_MAX as u8).filter(is_busy).count();
        // A thread can sleep until one area answers, not until any of several does.
        if busy == 0 || busy == 1 && self.collect_from_all(Wait::Briefly) > 0 {
            return;
        }
        loop {
            let looked_ns = now_ns();
            if self.collect_from_all(Wait::No) > 0 || looked_ns >= until_ns {
                return;
            }
            self.looked_ns = looked_ns;
            sleep_ns(LOOK_AGAIN_NS);
        }
    }

    fn has_several_areas(&self) -> bool {
        self.engine.pager.areas().count() > 1
    }

    /// Collects finished writes of all areas, and returns their number. With `wait`, waits for the first area
    /// that has writes in flight.
    fn collect_from_all(&mut self, mut wait: Wait) -> usize {
        let (mut done, mut all) = ([Completion::EMPTY; WRITES_MAX], 0);
        for area in 0..AREAS_MAX {
            let Some(back_end) = self.back_ends.get(AreaId(area as u8)) else { continue };
            if back_end.in_flight() == 0 {
                continue;
            }
            let before = now_ns();
            let count = back_end.complete(wait, &mut done);
            let was_noted = back_end.is_synchronous();
            // A call that had to wait has found the write at the moment when it was done.
            let looked_ns = if now_ns() - before > BLOCKED_NS { u64::MAX } else { self.looked_ns };
            for completion in done.iter().take(count).filter(|_| !was_noted) {
                self.note_latency(AreaId(area as u8), completion.token as usize, looked_ns);
            }
            wait = Wait::No;
            if count == 0 && self.has_several_areas() {
                self.note_unfinished(AreaId(area as u8));
            }
            for completion in done.iter().take(count) {
                self.ended(completion.token as usize, completion.result);
            }
            all += count;
        }
        all
    }

    /// Tells the order of areas how long a write took that was just found done. The ring doesn't say when the
    /// write was done. The write was done after `looked_ns`, and if that is long ago, the time is only a
    /// bound.
    fn note_latency(&self, area: AreaId, at: usize, looked_ns: u64) {
        let Some(write) = self.in_flight[at] else { return };
        let now = now_ns();
        let took_ns = now - write.since_ns;
        let is_exact = now.saturating_sub(looked_ns.max(write.since_ns)) * 4 <= took_ns;
        let took = if is_exact { RequestTime::Exactly(took_ns) } else { RequestTime::AtMost(took_ns) };
        self.engine.pager.areas().note_latency(area, took);
    }

    /// Tells the order of areas how long this thread's oldest write to an area has been in flight. A look has
    /// just found no write of the area done.
    fn note_unfinished(&self, area: AreaId) {
        let writes = self.requests.iter().zip(&self.in_flight);
        let to_area = writes.filter(|(request, _)| request.run().first.area() == area);
        let unfinished = to_area.filter_map(|(_, write)| write.filter(|write| write.result.is_none()));
        if let Some(since_ns) = unfinished.map(|write| write.since_ns).min() {
            let age_ns = now_ns() - since_ns;
            self.engine.pager.areas().note_latency(area, RequestTime::MoreThan(age_ns));
        }
    }

    fn ended(&mut self, at: usize, result: Result<(), IoError>) {
        let Some(write) = &mut self.in_flight[at] else { return };
        let first = self.requests[at].run().first;
        write.result = Some(result);
        if let Err(error) = result
            && state_after(error) == AreaState::ReadOnly
        {
            let packed =
                pack_io_error(first.area().0, first.offset(), error.errno().unwrap_or(Errno::EIO.0 as u16));
            self.engine.record.notice(Notice::WriteError, packed);
        }
        self.settle_write(at);
    }

    fn settle_write(&mut self, at: usize) {
        let Some(InFlight { result: Some(result), .. }) = self.in_flight[at] else { return };
        let _shared = self.engine.map.shared(self.index);
        let settled = self.engine.pager.write_done(&mut self.requests[at], result.map_err(state_after));
        if settled == WriteProgress::Finished {
            if result.is_err_and(IoError::is_no_space) {
                self.engine.pager.areas().found_no_space(self.requests[at].run().first.area());
                self.engine.explain_full();
            }
            self.in_flight[at] = None;
            self.engine.writes_under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of frames in this thread's requests. Requests that are stuck don't count.
    pub(super) fn frames_under_way(&self) -> usize {
        let stuck_ns = if self.has_several_areas() { now_ns().saturating_sub(STUCK_NS) } else { 0 };
        let is_under_way = |write: &Option<InFlight>| write.is_some_and(|it| it.since_ns >= stuck_ns);
        let under_way = self.requests.iter().zip(&self.in_flight).filter(|(_, write)| is_under_way(write));
        under_way.map(|(request, _)| request.frames().count()).sum()
    }

    /// Settles what the devices have finished, if this thread has any writes in flight. If it `is_idle`, also
    /// sends the pages that wait for a fuller request, because no other thread sends them.
    pub fn finish_writes(&mut self, is_idle: bool) {
        if is_idle {
            self.send_writes();
        }
        if self.has_writes() {
            self.collect_writes(Wait::No);
        }
    }

    /// Returns whether any page of this thread is being written, or is going to be. Until the write is
    /// settled, the page has a frame and perhaps a slot, even if the program no longer has the page. A thread
    /// that has writes must therefore not sleep for long.
    pub fn has_writes(&self) -> bool {
        !self.writes.is_empty() || self.in_flight.iter().any(Option::is_some)
    }
}
