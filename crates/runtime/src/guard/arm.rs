//! Arming: from when the engine becomes active, each system call of the program's threads is stopped and looked at.
//!
//! Within its budget a program runs as ever, so its threads are armed only then, before anything is registered. The keeper
//! sends each a signal that no program blocks through libc (libc's own for set-user-id calls), and the thread arms itself
//! in the handler. A call that this interrupts is made again, through us: what it was given is held like that of any
//! other. Threads that an armed thread makes are armed before they run code of the program.
//!
//! Who is armed waits in the handler until everything is registered. Busy threads take a slice of a CPU each until they
//! hear of us; if the others went on filling memory meanwhile, a program with eight such threads on two CPUs would be at
//! 1.7 times its budget before its first page goes out (`filled_by_many` in `tests/programs/threads.c`).
// UNSAFETY: handlers and stacks are put in place; a thread's registers are changed so that a call is made again.

use super::WAKES_ONLY;
use super::handlers::{self, ENGINE, born};
use super::rooms::{self, ARMED, FAILED, GIVEN, LATER, Room};
use super::signals::{self, open};
use crate::credentials;
use crate::engine::Engine;
use crate::session::{Notice, StopReason};
use crate::start::KEEPER;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use farpage_core::sync::Lock;
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::dispatch::{self, Selector, set_born};
use farpage_os::frame::Frame;
use farpage_os::futex;
use farpage_os::peek;
use farpage_os::proc::{self, CallUnderWay, WaitingThread};
use farpage_os::signal::{
    self, Action, AlternateStack, Context, Handler, Info, Register, SIGCANCEL, SIGSETXID, alternate_stack,
    bit, send_to_thread, set_action, set_alternate_stack, set_alternate_stack_on_top,
};
use farpage_os::sys::{self, Errno, SignalMask, number};
use farpage_os::thread;

static SELECTOR: Selector = Selector::new();
/// The range of our own code: system calls from there always pass.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Who else handles the signal that we use: libc, once it was needed.
static OTHERS: Others = Others([const { AtomicU64::new(0) }; 4]);

/// A disposition that a handler reads, on top of whoever writes it: a lock would never be free. It has one value only, from when
/// it has any: libc's.
struct Others([AtomicU64; 4]);

impl Others {
    fn keep(&self, action: &Action) {
        self.0.iter().zip(action.to_words()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }

    fn kept(&self) -> Action {
        Action::from_words([0, 1, 2, 3].map(|at: usize| self.0[at].load(Ordering::Relaxed)))
    }
}

/// Threads that are about to run another program.
static LEAVING: Lock<[u32; LEAVING_MAX]> = Lock::new([0; LEAVING_MAX]);
/// More than one only if threads race for who ends the others.
const LEAVING_MAX: usize = 16;

/// Threads that were armed in a hook, and go on in that.
static IN_HOOKS: AtomicU32 = AtomicU32::new(0);
/// Our signals that a fork's child believes to block, as its maker did. Until the hook is over that has made it.
static INHERITED: AtomicU64 = AtomicU64::new(0);

/// How long an armed thread waits for the rest, at most: one of those may be in a call that no signal interrupts.
const PAUSE_NS: u64 = 50_000_000;

/// How long a thread that doesn't answer is given until we look whether it still lives.
const PATIENCE_NS: u64 = 5_000_000;

/// And a thread that is on a stack of its own, until it is asked again: longer each time. The others wait no longer for it.
const LATER_NS: core::ops::Range<u64> = 1_000_000..PAUSE_NS;

/// How long a thread blocks the signal until the user is told: see [`Blocking`]. It may still come.
const TELL_AFTER_NS: u64 = 2_000_000_000;

/// How often it is looked at for that.
const LOOK_EVERY_NS: u64 = 20_000_000;

/// The engine has ended: nobody is armed any more.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Arms every thread of the program. In the keeper, with no lock held. False if the engine is to end before all are.
pub fn all(engine: &'static Engine) -> bool {
    if find_own_code().is_err() {
        engine.stop_program(StopReason::Arming);
    }
    set_born(born);
    unforked(engine, || {
        // Ordering: Release publishes the engine to handlers.
        ENGINE.store(core::ptr::from_ref(engine).cast_mut(), Ordering::Release);
        take_over();
    });
    // A hook that arming interrupts has our signals open when it goes on, and so must one that begins then.
    sys::keep_open(open() | bit(SIGSETXID));
    install_arming(engine);
    SELECTOR.set(true);
    // A thread that isn't armed may make one while we look; one that is armed makes armed ones.
    let mut quiet_turns = 0;
    while quiet_turns < 2 {
        if engine.is_to_retire() {
            return false;
        }
        quiet_turns = if arm_those_there_are(engine) { quiet_turns + 1 } else { 0 };
    }
    // A thread may have set its own handlers before it was armed.
    unforked(engine, take_over);
    // The handler of `install_arming` stays: a thread that was asked twice has the signal still waiting.
    signals::all_are_armed();
    sys::keep_open(open());
    true
}

/// The engine ends: nobody's calls are stopped any more, and the program's dispositions are in place. Alternate stacks stay ours. In
/// the keeper, when no page is missing any more.
pub fn end(engine: &Engine) {
    // Ordering: SeqCst: a thread that doesn't see it has begun to arm itself before it is waited for below.
    IS_OVER.store(true, Ordering::SeqCst);
    if handlers::engine().is_none() {
        return;
    }
    SELECTOR.set(false);
    if let_threads_pass().is_err() {
        engine.stop_program(StopReason::Arming);
    }
    unforked(engine, || {
        signals::give_back();
        ENGINE.store(core::ptr::null_mut(), Ordering::Release);
    });
}

/// Waits until no signal of an access is on its way to any thread. The kernel sends such a signal to a thread that runs, and delivers
/// it before the thread runs the program's code again. A thread that sleeps has none on its way. A thread that has run for long enough
/// has had it.
fn let_threads_pass() -> Result<(), Errno> {
    /// The way from a fault to the end of its handler takes some microseconds.
    const LONG_ENOUGH_NS: u64 = 1_000_000;
    /// The least wait for each thread. A thread that hangs in the kernel takes no time from those after it.
    const EACH_NS: u64 = 20_000_000;
    let all_until_ns = now_ns() + crate::retire::PATIENCE_NS;
    let own = current_thread();
    proc::for_each_thread(|thread| {
        if thread == own
            || thread::all().any(|ours| ours.number() == Some(thread))
            || proc::runs_no_program(thread)
        {
            return;
        }
        let Some(before) = proc::waiting_thread(thread).filter(|before| !before.sleeps) else { return };
        let until_ns = all_until_ns.max(now_ns() + EACH_NS);
        let has_passed = |now: WaitingThread| now.sleeps || now.ran_ns > before.ran_ns + LONG_ENOUGH_NS;
        while now_ns() < until_ns && proc::waiting_thread(thread).is_some_and(|now| !has_passed(now)) {
            sleep_ns(200_000);
        }
    })
}

/// After the engine's end: waits until no other thread is in an engine's handler, but not longer than until `until_ns`.
pub fn let_others_leave(until_ns: u64) {
    let own = rooms::of_caller();
    let others = rooms::all().filter(|room| own.is_none_or(|own| !core::ptr::eq(*room, own)));
    for room in others {
        while room.at_work.is_at_work() && now_ns() < until_ns {
            sleep_ns(100_000);
        }
    }
    // Those that have just left go through the kernel once more. What can't be looked at isn't waited for.
    let _ = let_threads_pass();
}

/// The mapping that this function is in: all of our code is in one library.
fn find_own_code() -> Result<(), Errno> {
    const ENOENT: i32 = 2;
    let here = PageIndex::of_address(find_own_code as *const () as usize);
    let mut found = Err(Errno(ENOENT));
    proc::for_each_mapping(|mapping| {
        if mapping.pages.contains(here) {
            CODE[0].store(mapping.pages.start.address(), Ordering::Relaxed);
            CODE[1].store(mapping.pages.end.address(), Ordering::Relaxed);
            found = Ok(());
        }
    })?;
    found
}

/// Does something as one step for children that are forked meanwhile. In the keeper: a child undoes what we have installed by
/// what was there before, which must be known then.
fn unforked<T>(engine: &Engine, step: impl FnOnce() -> T) -> T {
    let _shared = engine.map.shared(KEEPER);
    step()
}

/// Puts the handler in place that arms a thread. True if it was there already.
fn install_arming(engine: &Engine) -> bool {
    // On a thread's own stack for handlers, if it has one: Go's other stacks have no room for a signal's frame.
    let action = Action::of(on_arm, open());
    unforked(engine, || {
        // SAFETY: the handler runs on top of anything.
        match unsafe { set_action(SIGSETXID, &action) } {
            Ok(before) if before.handler == action.handler => true,
            Ok(before) => {
                OTHERS.keep(&before);
                false
            }
            Err(_) => engine.stop_program(StopReason::Arming),
        }
    })
}

/// Puts the handler of this signal in place, in any thread of the process: for those that ask engine threads.
pub fn let_threads_be_asked(engine: &Engine) {
    let action = Action::of(on_arm, open()).on_any_stack();
    // What was there is known before ours is there: a child that is forked meanwhile passes signals on, too.
    while let Ok(before) = signal::action_of(SIGSETXID)
        && before.handler != action.handler
    {
        OTHERS.keep(&before);
        // SAFETY: the handler runs on top of anything.
        if unsafe { set_action(SIGSETXID, &action) }.is_err() {
            engine.stop_program(StopReason::Credentials);
        }
    }
}

/// Whether a disposition is the handler that arms, which stays in place for good: libc's runs through it.
pub fn is_for_good(action: &Action) -> bool {
    action.handler == on_arm as *const () as usize
}

/// Whether the calling thread's system calls are stopped.
pub fn is_caller_armed() -> bool {
    handlers::engine().is_some() && rooms::of_caller().is_some_and(is_armed)
}

/// One look at all threads. Whether all were armed already.
fn arm_those_there_are(engine: &Engine) -> bool {
    let own = current_thread();
    let mut all_armed = true;
    // All are asked before any is waited for: each has to wait for its turn on a CPU.
    let all = proc::for_each_thread(|thread| {
        let is_done = rooms::of_thread(thread).is_some_and(is_armed) || proc::runs_no_program(thread);
        if thread != own && !is_done {
            all_armed = false;
            let Some(room) = Room::give(thread) else { engine.stop_program(StopReason::Arming) };
            ask(engine, thread, room);
        }
    });
    if all.is_err() {
        // Calls of whoever isn't armed would find memory missing.
        engine.stop_program(StopReason::Arming);
    }
    rooms::all().for_each(|room| wait_until_armed(engine, room));
    all_armed
}

pub fn is_armed(room: &Room) -> bool {
    // Ordering: Acquire pairs with the Release in `move_in`.
    room.state.load(Ordering::Acquire) == ARMED
}

fn current_thread() -> u32 {
    // SAFETY: takes nothing.
    unsafe { sys::call(number::GETTID, [0; 6]) as u32 }
}

/// Asks a thread to arm itself in `room`, which it isn't looking at: it is new, or the thread has put it back.
fn ask(engine: &Engine, thread: u32, room: &Room) {
    // SAFETY: the thread isn't in the handler that reads it.
    unsafe { (*room.own.get()).expected = proc::call_under_way(thread) };
    // Ordering: Release publishes what is expected to the handler.
    room.state.store(GIVEN, Ordering::Release);
    if !send(engine, thread, room) {
        // It has ended, or is about to run another program, or too many signals wait: then it is found again.
        sleep_ns(1_000_000);
        room.give_back();
    }
}

/// Sends the signal to a thread, unless that is about to run another program, which the signal would end. Whether it was sent.
fn send(engine: &Engine, thread: u32, room: &Room) -> bool {
    let leaving = LEAVING.lock();
    !leaving.contains(&thread) && send_to_thread(engine.process, thread, SIGSETXID, room.word()).is_ok()
}

/// Makes a call that runs another program in the place of this one. The calling thread isn't asked to arm itself meanwhile: a
/// signal that arrives when its handler is gone ends the new program. What was sent before is delivered before the call.
pub fn leave_by<T>(engine: &Engine, call: impl FnOnce() -> T) -> T {
    if engine.handover.is_none() || handlers::is_borrower(Some(engine)) {
        return call();
    }
    let own = current_thread();
    let replace = |from: u32, to: u32| {
        // A handler of the program's that runs another program would wait for this lock.
        signals::with_blocked(!open(), || {
            let mut leaving = LEAVING.lock();
            leaving.iter_mut().find(|thread| **thread == from).map(|thread| *thread = to)
        })
    };
    // With the table full it is as if nobody had called this.
    replace(0, own);
    let done = call();
    replace(own, 0);
    done
}

/// The program goes on over its budget, as long as this thread is as it is.
fn tell(engine: &Engine, thread: u32) {
    engine.cant_be_armed.store(true, Ordering::Relaxed);
    engine.record.notice(Notice::NotArmed, u64::from(thread));
}

/// For how long a thread was seen to block the signal that arms it.
///
/// A thread that doesn't answer mostly waits for a CPU, or for a child of vfork or a disk, which no signal interrupts: nothing is
/// wrong with its mask. And most block signals only for a moment, which is long if there is no CPU for it. So time counts in which
/// the thread sleeps with the signal blocked, or runs; and each look that finds the signal open begins anew.
#[derive(Default)]
struct Blocking {
    looked_ns: u64,
    before: Option<WaitingThread>,
    lasted_ns: u64,
}

impl Blocking {
    /// Whether it is enough to tell the user. `look` at the thread, now and then.
    fn is_lasting(&mut self, now_ns: u64, look: impl FnOnce() -> Option<WaitingThread>) -> bool {
        let since_ns = now_ns - self.looked_ns;
        if since_ns < LOOK_EVERY_NS {
            return false;
        }
        self.looked_ns = now_ns;
        let Some(seen) = look().filter(|seen| seen.blocked & bit(SIGSETXID) != 0) else {
            *self = Blocking { looked_ns: now_ns, ..Blocking::default() };
            return false;
        };
        if let Some(before) = self.before.replace(seen) {
            let ran_ns = seen.ran_ns.saturating_sub(before.ran_ns);
            let sleeps = seen.sleeps && before.sleeps;
            self.lasted_ns += if sleeps { since_ns } else { ran_ns.min(since_ns) };
        }
        self.lasted_ns > TELL_AFTER_NS
    }
}

/// Waits until the thread that was asked to arm itself in `room`, if one was, has done so or ended.
fn wait_until_armed(engine: &Engine, room: &Room) {
    // None: given to a thread that isn't made yet.
    let thread = room.thread.load(Ordering::Relaxed);
    if thread == 0 {
        return;
    }
    let began_ns = now_ns();
    let (mut later_ns, mut seen_in) = (LATER_NS.start, None);
    let mut blocking = Blocking::default();
    while !engine.is_to_retire() {
        let since = now_ns();
        let (mut pause_ns, mut state) = (20_000, room.state.load(Ordering::Acquire));
        // Somebody else's by now: it was a room whose thread is gone.
        while state == GIVEN && room.thread.load(Ordering::Relaxed) == thread {
            if engine.is_to_retire() {
                return;
            }
            sleep_ns(pause_ns);
            pause_ns = (pause_ns * 2).min(1_000_000);
            state = room.state.load(Ordering::Acquire);
            let waited_ns = now_ns() - since;
            if state == GIVEN && waited_ns > PATIENCE_NS && proc::runs_no_program(thread) {
                return room.give_back();
            }
            if state == GIVEN && waited_ns > PATIENCE_NS && !install_arming(engine) {
                // libc has put its own handler there, which doesn't know what we want.
                send(engine, thread, room);
            }
            // Meanwhile it may have changed a handler, and those that are armed have it.
            unforked(engine, take_over);
            if blocking.is_lasting(now_ns(), || proc::waiting_thread(thread)) {
                tell(engine, thread);
            }
        }
        match state {
            // On a stack of its own just now, as it is for as long as it is in the same call. Each asking interrupts that, and what
            // it waits for begins anew.
            LATER => {
                sleep_ns(later_ns);
                later_ns = (later_ns * 2).min(LATER_NS.end);
                let call = proc::call_under_way(thread);
                if call.is_none() || call != seen_in {
                    ask(engine, thread, room);
                } else if now_ns() - began_ns > TELL_AFTER_NS {
                    tell(engine, thread);
                }
                seen_in = call;
            }
            FAILED => engine.stop_program(StopReason::Arming),
            _ => return,
        }
    }
}

/// Puts our handlers in place. What was there is the program's disposition from now on.
fn take_over() {
    signals::take_over(handlers::on_fault, handlers::on_sigsys);
}

/// The same in a child that borrows its maker's memory.
pub fn install_handlers_in_borrower() {
    signals::install_in_borrower(handlers::on_fault, handlers::on_sigsys);
}

/// Stops the calling thread's system calls from now on.
pub fn arm_this_thread() -> bool {
    let code = CODE[0].load(Ordering::Relaxed)..CODE[1].load(Ordering::Relaxed);
    // SAFETY: `all` has installed the handler; no armed thread blocks SIGSYS, nor does whom it makes.
    unsafe { dispatch::arm(code, &SELECTOR) }.is_ok()
}

/// The calling thread, which was just made by an armed one, lives in `room` from now on.
pub fn move_in(room: &Room) {
    // SAFETY: a room's stack is its thread's alone; the thread is on no alternate stack.
    let Ok(before) = (unsafe { set_alternate_stack(&room.stack()) }) else { return };
    if before != room.stack() {
        // Whoever was just being born may have been told to arm itself, too, and lives in another room already.
        let other = rooms::of_stack(&before);
        // SAFETY: both are its own thread's.
        unsafe { (*room.own.get()).alternate = other.map_or(before, |other| (*other.own.get()).alternate) };
        other.into_iter().for_each(Room::give_back);
    }
    // What held the stack until here.
    room.levels[0].holder.release();
    begin_in(room);
}

/// The calling thread is armed, and says so.
fn begin_in(room: &Room) {
    let state = if arm_this_thread() { ARMED } else { FAILED };
    // Ordering: Release: who sees it armed sees its room complete.
    room.state.store(state, Ordering::Release);
}

/// A thread's stack for handlers that the thread is on, in a hook. What arms it would begin at the top of that, on what the
/// program has there: so the thread has none while it is on the hook's stack, and isn't asked on the way there and back.
#[derive(Clone, Copy)]
pub struct StackInUse {
    stack: AlternateStack,
    is_asked: bool,
}

/// In a hook that was called with this stack pointer, before it is on a stack of ours. None: there is nothing to be done.
pub fn stack_in_use(stack_pointer: usize) -> Option<StackInUse> {
    // Nobody is asked to arm itself in a hook but until then.
    if !sys::is_kept_open(bit(SIGSETXID)) {
        return None;
    }
    let stack = alternate_stack().ok().filter(|stack| stack.is_in_use(stack_pointer))?;
    let is_asked = signals::add_blocked(bit(SIGSETXID)) & bit(SIGSETXID) == 0;
    Some(StackInUse { stack, is_asked })
}

/// Does the hook's work on a stack of ours. Whoever restores the thread's mask opens it for what arms the thread.
pub fn without_stack<T>(in_use: Option<StackInUse>, work: impl FnOnce() -> T) -> T {
    let Some(StackInUse { stack, is_asked }) = in_use else { return work() };
    // SAFETY: the thread is on a stack of ours. Nothing begins on none.
    let _ = unsafe { set_alternate_stack(&AlternateStack::NONE) };
    if is_asked {
        signals::open_also(bit(SIGSETXID));
    }
    let done = work();
    signals::add_blocked(bit(SIGSETXID));
    match rooms::of_caller() {
        // SAFETY: its own thread's.
        Some(room) => unsafe { (*room.own.get()).alternate = stack },
        // SAFETY: the program's own.
        None => _ = unsafe { set_alternate_stack(&stack) },
    }
    done
}

/// In a child with a copy of its parent's memory: no other thread is in a hook.
pub fn reset_in_child() {
    IN_HOOKS.store(0, Ordering::Relaxed);
    IS_OVER.store(false, Ordering::Relaxed);
    LEAVING.forget_holder();
    *LEAVING.lock() = [0; LEAVING_MAX];
    if OTHERS.kept().is_of_ours() {
        OTHERS.keep(&signals::disposition(SIGSETXID));
    }
}

/// In a fork's child, in the hook: its maker, whose room this is, believed to block some of our signals. A maker that was armed in
/// this very hook seems to block all of them. What the program itself blocks, the hook's end knows then.
pub fn inherit(room: &Room) {
    // SAFETY: the child's only thread.
    let own = unsafe { &*room.own.get() };
    INHERITED.store(if own.is_in_hook { 0 } else { own.claimed }, Ordering::Relaxed);
}

/// A hook is over, which had blocked all signals that may be blocked; `before` were blocked before that.
pub fn end_hook(before: SignalMask) {
    let inherited = INHERITED.load(Ordering::Relaxed);
    if inherited != 0 {
        INHERITED.store(0, Ordering::Relaxed);
    }
    let before = before.with(inherited);
    forget_block_of_hook(before);
    sys::restore_signals(before);
    // Armed between the two.
    forget_block_of_hook(before);
}

/// What only the hook has blocked the program doesn't believe to block.
fn forget_block_of_hook(before: SignalMask) {
    if IN_HOOKS.load(Ordering::Relaxed) == 0 {
        return;
    }
    let Some(room) = rooms::of_caller() else { return };
    // SAFETY: the thread's own; a handler that changes it on top of this returns before the next instruction.
    let own = unsafe { &mut *room.own.get() };
    if core::mem::take(&mut own.is_in_hook) {
        own.claimed &= before.bits();
        IN_HOOKS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a hook of ours was interrupted that had blocked signals: libc lets no program block the signal for cancelling
/// threads.
fn is_in_hook(context: &Context) -> bool {
    let code = CODE[0].load(Ordering::Relaxed)..CODE[1].load(Ordering::Relaxed);
    code.contains(&context.register(Register::Rip)) && context.blocked & bit(SIGCANCEL) != 0
}

/// The keeper asks this thread to arm itself, or libc asks for something else.
unsafe extern "C" fn on_arm(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel's own structures, for this call.
    let word = unsafe { (*info).word() };
    let is_over = IS_OVER.load(Ordering::SeqCst);
    if word.is_some_and(credentials::is_taken) || word == Some(WAKES_ONLY) {
        return;
    }
    // Afterwards there is no engine thread, and the program may not be allowed to ask.
    if !is_over && thread::current().is_some() {
        return;
    }
    let Some(room) = word.and_then(rooms::by_word) else {
        let others = OTHERS.kept();
        if others.is_handler() {
            // SAFETY: libc's handler, with what the kernel told.
            unsafe { core::mem::transmute::<usize, Handler>(others.handler)(signal, info, context) };
        }
        return;
    };
    if is_over || room.state.load(Ordering::Acquire) != GIVEN {
        return; // A second asking.
    }
    // SAFETY: as above.
    let context = unsafe { &mut *context };
    let is_made_again = if rooms::is_here() {
        // It was just being born when it was asked: it lives in another room already.
        // SAFETY: nobody else's.
        let expected = unsafe { (*room.own.get()).expected.take() };
        room.give_back();
        make_again(context, expected)
    } else {
        // The thread may block them. This may run on memory of the program's, which may be out soon.
        signals::open_also(open());
        be_armed(room, context)
    };
    if is_made_again && signals::is_handling(context.blocked | bit(SIGSETXID)) {
        end_after_all(context);
    }
}

/// Arms the thread that was interrupted so, and waits for the rest; or not now, if it is on a stack for handlers: the kernel
/// gives it no other as long as it is. Whether the call that was interrupted is made again.
fn be_armed(room: &Room, context: &mut Context) -> bool {
    // SAFETY: the thread's own room now.
    let own = unsafe { &mut *room.own.get() };
    let expected = own.expected.take();
    let is_made_again = make_again(context, expected);
    let is_on_stack_for_handlers = context.alternate().is_in_use(context.register(Register::Rsp));
    // SAFETY: a room's stack is its thread's alone, and it has interrupted nothing on the one before.
    if is_on_stack_for_handlers || unsafe { set_alternate_stack_on_top(&room.stack()) }.is_err() {
        room.state.store(LATER, Ordering::Release);
        return is_made_again;
    }
    (own.claimed, own.alternate) = (context.blocked & open(), context.alternate());
    if is_in_hook(context) {
        IN_HOOKS.fetch_add(1, Ordering::Relaxed);
        own.is_in_hook = true;
    }
    context.blocked &= !open();
    context.stack = room.stack();
    // Another thread may have changed something by a call past libc.
    take_over();
    hold_frame(room, context);
    begin_in(room);
    wait_for_the_rest(context);
    is_made_again
}

/// Holds what the kernel reads when a handler returns whose return nobody looks at, until the thread's next call. The frame may lie on a
/// stack of the program's, in memory that is registered next, and is closed for a moment then. The kernel would end the program.
pub fn hold_frame(room: &Room, context: &Context) {
    // SAFETY: of this handler, which has not returned.
    let frame = unsafe { Frame::of(context) }.place();
    let level = room.level(frame.start);
    level.returns.store(true, Ordering::Relaxed);
    level.holder.hold(PageRange::covering(frame.start, frame.len()));
}

/// The thread, armed, goes on when there is something to serve its faults, or when that takes too long.
fn wait_for_the_rest(context: &Context) {
    // Ordering: Relaxed: set before any thread was asked.
    let code = CODE[0].load(Ordering::Relaxed)..CODE[1].load(Ordering::Relaxed);
    // In a hook of ours it may have the map lock, which activation needs.
    if let Some(engine) = handlers::engine().filter(|_| !code.contains(&context.register(Register::Rip))) {
        futex::wait_for(&engine.active, 0, PAUSE_NS);
    }
}

/// What a call has returned that a signal has ended.
const EINTR: usize = -(linux_raw_sys::errno::EINTR as isize) as usize;

/// The kernel has ended a call with EINTR for our signal, which the program has nothing to do with: it is made again. Whether
/// that is so.
fn make_again(context: &mut Context, expected: Option<CallUnderWay>) -> bool {
    let after = context.register(Register::Rip);
    let is_the_same = |expected: &CallUnderWay| {
        expected.instruction == after
            && expected.stack_pointer == context.register(Register::Rsp)
            && expected.arguments == dispatch::Call::stopped(0, context).arguments
    };
    if context.register(Register::Rax) != EINTR {
        return false;
    }
    let expected = expected.filter(is_the_same).map(|expected| expected.number);
    // It ran when it was asked, or was in another call, and made this one before it heard of that: poll(2) that doesn't wait, again
    // and again.
    let number = expected.or_else(|| number_before(after));
    if let Some(number) = number {
        context.call_again(number);
    }
    number.is_some()
}

/// The number of a call that returns to `after`, if its code is `mov eax, number; syscall`, as libc's mostly is, or
/// `xor eax, eax; syscall`, which is its read.
fn number_before(after: usize) -> Option<usize> {
    match peek::read::<7>(after.checked_sub(7)?)? {
        [_, _, _, 0x31, 0xc0, 0x0f, 0x05] => Some(number::READ),
        [0xb8, number @ .., 0x0f, 0x05] => Some(u32::from_le_bytes(number) as usize),
        _ => None,
    }
}

/// A signal of the program's has come meanwhile, whose handler runs as soon as this one returns: it is that which has ended the
/// call, and not ours. (Made again after the handler, `pause` would wait for the next one.)
fn end_after_all(context: &mut Context) {
    context.set_register(Register::Rax, EINTR);
    context.set_register(Register::Rip, context.register(Register::Rip) + Context::CALL_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is seen every 100 ms: signals blocked, asleep, time on a CPU.
    fn told_after(seconds: u64, mut look: impl FnMut(u64) -> (bool, bool, u64)) -> Option<u64> {
        const STEP_NS: u64 = 100_000_000;
        let mut blocking = Blocking::default();
        (1..=seconds * 10).find(|turn| {
            let (blocks, sleeps, ran_ms) = look(*turn);
            let blocked = if blocks { u64::MAX } else { 0 };
            let seen = WaitingThread { blocked, sleeps, ran_ns: ran_ms * 1_000_000 };
            blocking.is_lasting(turn * STEP_NS, || Some(seen))
        })
    }

    /// It was told of threads that only waited for a CPU: six programs beside two busy loops.
    #[test]
    fn only_a_thread_that_goes_on_blocking_is_told_of() {
        assert_eq!(told_after(60, |_| (false, false, 0)), None, "it waits for a CPU, or for a disk");
        assert_eq!(told_after(60, |_| (true, false, 0)), None, "it had no time yet to open its mask");
        assert_eq!(told_after(60, |_| (true, false, 5)), None, "nor does it have any from now on");
        assert_eq!(
            told_after(60, |turn| (turn % 15 != 0, true, 0)),
            None,
            "it lets the signal through at times"
        );
        assert_eq!(told_after(60, |_| (true, true, 0)), Some(22), "it sleeps, and blocks it");
        assert_eq!(told_after(60, |turn| (true, false, turn * 50)), Some(42), "it runs half of the time");
        assert_eq!(
            told_after(60, |turn| (true, turn % 2 == 0, turn * 100)),
            Some(22),
            "it runs, and sleeps between"
        );
    }
}
