//! The end of the engine while the program goes on. The program has asked for something that engine threads
//! can't live under, such as a seccomp filter.
//!
//! The thread that asks waits. The keeper stops evictions, brings every page back into memory, gives the
//! program its mappings and signals back, and has all engine threads end. Afterwards the program runs as if
//! Farpage weren't there, except that Farpage's versions of libc's functions stay and pass every call on. The
//! program is told nothing; the user gets a notice.
// UNSAFETY: gives mappings back to the program.

use crate::engine::Engine;
use crate::engine::fork;
use crate::engine::start::KEEPER;
use crate::guard::{self, arm};
use crate::mappings::changes::EVERYTHING;
use crate::mappings::map_lock::Exclusive;
use crate::session::{Notice, Retired, StopReason};
use crate::worker::Worker;
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::roll_call::Member;
use farpage_core::sync;
use farpage_core::table::Walk;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PageIndex, PageRange};
use farpage_fault::Fault;
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::signal::{SIGSETXID, send_to_thread};
use farpage_os::{futex, memory, thread};

/// The engine is at work.
const RUNS: u32 = 0;
/// A thread has asked the keeper to end the engine.
const WANTED: u32 = 1;
/// Pages come back, and none is evicted any more.
const BRINGS: u32 = 2;
/// Nothing is managed any more. Engine threads end as soon as they see it.
const ENDED: u32 = 3;

/// Pages that come back before the pool's memory for them is given back.
const BROUGHT_AT_ONCE: u64 = 256;
/// Nanoseconds that one wait for an engine thread takes at most, until the thread is woken once more.
const WAKE_AGAIN_NS: u64 = 5_000_000;
/// Rounds over all pages after which a page without a mapping is given up.
const LOOKS_MAX: u32 = 3;
/// Rounds over all pages after which the program is stopped, because some page can't be brought back.
const LOOKS_END: u32 = 64;

/// Hooks under way. A hook counts from before its look for an engine until after its last system call.
static HOOKS: AtomicU32 = AtomicU32::new(0);
/// Nanoseconds of the longest wait for hooks and handlers of other threads. One of these threads may itself
/// wait for the waiting thread.
pub(crate) const PATIENCE_NS: u64 = 2_000_000_000;

/// Counts a hook that begins. The hook looks only afterwards whether the engine has ended.
pub fn hook_begins() {
    // Ordering: SeqCst. If a thread doesn't find this hook counted, that thread has ended the engine before.
    // Then this hook finds no engine.
    HOOKS.fetch_add(1, Ordering::SeqCst);
}

/// Uncounts a hook that ends. The hook makes no further system call.
pub fn hook_ends() {
    HOOKS.fetch_sub(1, Ordering::SeqCst);
}

/// Resets the count in a fork's child, whose only hook is the calling one.
pub fn only_this_hook() {
    HOOKS.store(1, Ordering::Relaxed);
}

/// Waits until no other thread is in a hook or handler of an ended engine, but at most [`PATIENCE_NS`]. The
/// calling thread is in no hook. It is about to install a filter, perhaps for all threads, which may forbid
/// what hooks and handlers still do.
pub fn let_others_leave(engine: &Engine) {
    let until_ns = now_ns() + PATIENCE_NS;
    while HOOKS.load(Ordering::SeqCst) != 0 && now_ns() < until_ns {
        sleep_ns(100_000);
    }
    if !engine.mode().calls_can_wait() {
        arm::let_others_leave(until_ns);
    }
}

/// The state of the engine's end.
#[derive(Default)]
pub struct Retirement {
    state: AtomicU32,
}

impl Engine {
    /// Ends the engine, and returns when no engine thread is left. Called in a thread of the program that
    /// holds no lock but the one for following credentials.
    pub fn retire(&self, why: Retired) {
        self.ask_to_retire(why);
        while !self.has_ended() {
            let seen = self.retirement.state.load(Ordering::Acquire);
            if seen != ENDED {
                futex::wait_for(&self.retirement.state, seen, 1_000_000_000);
            }
        }
        wait_for_threads(self, 0);
        self.direct.descriptors.still_there().for_each(|number| {
            // SAFETY: the descriptor is the engine's, in the program's table. The handlers that used it find
            // nothing to do any more.
            unsafe { rustix::io::close(number) };
        });
    }

    /// Has the keeper end the engine soon, and tells the user why.
    pub fn ask_to_retire(&self, why: Retired) {
        let state = &self.retirement.state;
        if state.load(Ordering::Acquire) == RUNS {
            // The notice comes first: if the pages don't fit into memory, the user knows why they came back.
            self.record.notice(Notice::Retired, why.value());
            let _ = state.compare_exchange(RUNS, WANTED, Ordering::AcqRel, Ordering::Relaxed);
        }
        self.budget.ring();
    }

    /// Returns whether the keeper is to end the engine as soon as it can.
    pub fn is_to_retire(&self) -> bool {
        self.retirement.state.load(Ordering::Acquire) != RUNS
    }

    /// Returns whether evictions have stopped because the engine ends.
    pub fn keeps_all_in(&self) -> bool {
        // Ordering: Relaxed, because the state changes to `BRINGS` under the exclusive map lock.
        self.retirement.state.load(Ordering::Relaxed) >= BRINGS
    }

    /// Returns whether nothing is managed any more.
    pub fn has_ended(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `end`. A thread that sees the end finds every page in
        // memory.
        self.retirement.state.load(Ordering::Acquire) == ENDED
    }

    /// Returns whether a page's bytes exist somewhere, but not where the program can touch them.
    fn is_out(&self, page: PageIndex) -> bool {
        !matches!(self.pager.state(page), State::Absent | State::Lost(_) | State::Resident { .. })
    }
}

/// Ends the engine. Called in the keeper, and never returns. `worker` is the keeper's own, once it has one.
pub fn end(engine: &'static Engine, worker: Option<&mut Worker>) -> ! {
    let exclusive = match engine.is_active() {
        true => {
            let worker = worker.map_or_else(|| Worker::placed(engine, KEEPER, None), Ok);
            bring_all(engine, worker.unwrap_or_else(|_| engine.stop_program(StopReason::Tables)))
        }
        false => engine.map.exclusive(),
    };
    end_under(engine, exclusive)
}

/// Ends an engine that has registered the program's memory, and finds no thread that could serve a fault. No
/// page is out yet. Called in the keeper, and never returns.
pub fn end_before_it_begins(engine: &'static Engine, exclusive: Exclusive<'static>) -> ! {
    engine.ask_to_retire(Retired::NoThread);
    engine.retirement.state.store(BRINGS, Ordering::Relaxed);
    end_under(engine, exclusive)
}

/// Ends the engine with the map lock held exclusively, and no page out.
fn end_under(engine: &'static Engine, exclusive: Exclusive<'static>) -> ! {
    fork::forget_elders_now(engine);
    fork::forget_heirless(engine);
    let_go_of_all(engine);
    // Hooks and handlers under way go on as if the budget had never been reached and never would be.
    engine.activation_is_doubtful.store(true, Ordering::Relaxed);
    engine.active.store(0, Ordering::Release);
    engine.handover.into_iter().for_each(farpage_fault::signal::Handover::close);
    drop(exclusive);
    arm::end(engine);
    engine.publish_gauges();
    // The other processes of the run count all of this process's memory for this process, because the engine
    // no longer asks the kernel how much of it is shared. The engine's last thread gives the record up. Then
    // the process is outside of the budget, and another process may forget its claim.
    engine.leave_kin();
    engine.take_share();
    // Ordering: Release publishes everything done before the end.
    engine.retirement.state.store(ENDED, Ordering::Release);
    futex::wake(&engine.retirement.state, u32::MAX >> 1);
    wait_for_threads(engine, 1);
    if !engine.heirs.are_any() {
        engine.pager.areas().give_up_all();
    }
    thread::exit()
}

/// Brings every page that is out into the program's memory. No page is out under the lock that is returned.
fn bring_all(engine: &'static Engine, worker: &mut Worker) -> Exclusive<'static> {
    {
        let _exclusive = engine.map.exclusive();
        engine.retirement.state.store(BRINGS, Ordering::Relaxed);
    }
    let mut brought = 0_u64;
    for looks in 0..LOOKS_END {
        for_each_out(engine, |page| {
            engine.bring_page(page, false, 0, |fault| serve(engine, worker, fault));
            brought += 1;
            if brought.is_multiple_of(BROUGHT_AT_ONCE) {
                worker.give_pool_back();
            }
            true
        });
        worker.give_pool_back();
        let exclusive = engine.settled([EVERYTHING]);
        let is_gone = |page| memory::mapped_before_a_hole(PageRange::of(page, 1)).is_empty();
        let are_all_there = for_each_out(engine, |page| looks >= LOOKS_MAX && is_gone(page));
        if are_all_there {
            return exclusive;
        }
    }
    engine.stop_program(StopReason::Tables)
}

/// Brings in a page that no thread has faulted on. If another thread is moving the page, waits until that is
/// done.
fn serve(engine: &Engine, worker: &mut Worker, fault: Fault) {
    worker.serve(fault);
    while let Err(unsettled) = engine.pager.quiet(PageRange::of(fault.page, 1)) {
        // No other thread completes the writes that this thread has begun.
        worker.finish_writes(true);
        sync::wait(engine.pager.settled_word(), unsettled.seen);
    }
}

/// Calls `visit` for each page that is out, until `visit` returns false. Returns whether it never did.
fn for_each_out(engine: &Engine, mut visit: impl FnMut(PageIndex) -> bool) -> bool {
    let mut from = EVERYTHING.start;
    while let Some(range) = engine.next_with(PageRange::new(from, EVERYTHING.end), Flags::REGISTERED) {
        let mut rest = range;
        while let Some((page, _)) = engine.pager.table().next(rest, Walk::Used) {
            rest.start = PageIndex(page.0 + 1);
            if engine.is_out(page) && !visit(page) {
                return false;
            }
        }
        from = range.end;
    }
    true
}

/// Gives the program's mappings back to it. The caller holds the map lock exclusively, and no page is out.
fn let_go_of_all(engine: &Engine) {
    let mut from = EVERYTHING.start;
    while let Some(range) = engine.next_with(PageRange::new(from, EVERYTHING.end), Flags::REGISTERED) {
        let_go_of(engine, range);
        from = range.end;
    }
    if engine.show_to_children(true).is_err() {
        engine.stop_program(StopReason::Tables);
    }
    let _ = engine.pager.ranges.lock().update(EVERYTHING, |flags| flags.without(Flags::REGISTERED));
}

/// Gives one range back. A lost page stays out of reach, because it would read as zeros.
fn let_go_of(engine: &Engine, range: PageRange) {
    // Hooks that wait for the map lock still forget pages later. They must find no slot to free: by then its
    // cluster may belong to another process.
    engine.pager.let_go(range);
    let mut rest = range;
    while !rest.is_empty() {
        let lost = first_lost(engine, rest);
        let part = PageRange::new(rest.start, lost.unwrap_or(rest.end));
        rest.start = lost.map_or(rest.end, |page| PageIndex(page.0 + 1));
        lost.into_iter().for_each(|page| {
            let lost = PageRange::of(page, 1);
            // SAFETY: the page is lost, so no byte is there. A thread that touches the page is meant to run
            // into the protection.
            let closed = unsafe { memory::allow(lost, linux_raw_sys::general::PROT_NONE as usize) };
            if closed.is_err() && !memory::mapped_before_a_hole(lost).is_empty() {
                engine.stop_program(StopReason::Tables);
            }
        });
        if !part.is_empty() {
            engine.protections.into_iter().for_each(|protections| protections.let_go(part));
        }
    }
    if let Some(uffd) = engine.uffd {
        // SAFETY: every page of the range that isn't zeros or lost is in memory, and a lost page can't be
        // touched. If the call fails, the mapping is gone, or a part of it. The registration of the remaining
        // part ends when the descriptor is closed.
        let _ = unsafe { uffd.unregister(range) };
    }
}

fn first_lost(engine: &Engine, range: PageRange) -> Option<PageIndex> {
    let mut rest = range;
    while let Some((page, _)) = engine.pager.table().next(rest, Walk::Used) {
        if matches!(engine.pager.state(page), State::Lost(_)) {
            return Some(page);
        }
        rest.start = PageIndex(page.0 + 1);
    }
    None
}

/// Waits until at most `left` engine threads are there.
fn wait_for_threads(engine: &Engine, left: usize) {
    while thread::all().count() > left {
        // A signal ends a wait for messages. All other waits end when they are rung. A thread that has just
        // begun to wait hears the next signal or ring.
        engine.registrar.wake();
        engine.handover.into_iter().for_each(farpage_fault::signal::Handover::ring_all);
        engine.ahead.ring();
        arm::let_threads_be_asked(engine);
        let own = thread::current().and_then(Member::number);
        for number in thread::all().filter_map(Member::number).filter(|number| Some(*number) != own) {
            let _ = send_to_thread(engine.process, number, SIGSETXID, guard::WAKES_ONLY);
        }
        let next = thread::all().find(|thread| thread.number() != own);
        next.into_iter().for_each(|next| thread::wait_for_end(next, WAKE_AGAIN_NS));
    }
}
