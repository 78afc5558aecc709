//! Arming: from the engine's activation on, each system call of the program's threads is stopped and looked
//! at.
//!
//! A program within its budget runs unchanged: threads are armed only at activation, before any memory is
//! registered. The keeper sends each thread a signal that no program blocks through libc: libc's own for
//! set-user-id calls. The thread arms itself in the handler. A call that the signal interrupts is made again,
//! this time through Farpage, so that its memory is held. Threads that an armed thread makes are armed before
//! they run code of the program.
//!
//! An armed thread waits in the handler until everything is registered. Busy threads need a slice of a CPU
//! each until they hear of the signal. If armed threads went on filling memory meanwhile, a program could
//! reach 1.7 times its budget before its first page goes out (`filled_by_many` in
//! `tests/programs/threads.c`).
// UNSAFETY: handlers and stacks are put in place, and a thread's registers are changed so that a call is made
// again.

use super::WAKES_ONLY;
use super::handlers::{self, ENGINE, born};
use super::rooms::{self, ARMED, FAILED, GIVEN, LATER, Level, Room};
use super::signals::{self, open};
use super::unarmed::{Blocking, Refusal, TELL_AFTER_NS, tell};
use crate::engine::Engine;
use crate::engine::rounds::Rounds;
use crate::engine::start::KEEPER;
use crate::privileges::credentials;
use crate::session::StopReason;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use farpage_core::sync::{Lock, rank};
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::dispatch::{self, Selector, set_born};
use farpage_os::errno::returned;
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
use linux_raw_sys::general as raw;

static SELECTOR: Selector = Selector::new();
/// Address range of Farpage's own code. System calls from there always pass.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// Disposition of another user of the same signal: libc's, once libc has needed the signal.
static OTHERS: Others = Others([const { AtomicU64::new(0) }; 4]);

/// A disposition that a handler reads on top of the thread that writes it. A lock would never become free
/// there. Once set, the disposition has only one value, libc's.
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
static LEAVING: Lock<[u32; LEAVING_MAX], { rank::LAST }> = Lock::new([0; LEAVING_MAX]);
/// Entries of `LEAVING`. More than one is used only if threads race to run another program, which ends the
/// rest.
const LEAVING_MAX: usize = 16;

/// Threads that were armed in a hook and are still in that hook.
static IN_HOOKS: AtomicU32 = AtomicU32::new(0);
/// Farpage's signals that a fork's child believes to block, as its maker did. Valid until the end of the hook
/// that has made the child.
static INHERITED: AtomicU64 = AtomicU64::new(0);

/// Nanoseconds that an armed thread waits, at most, until everything is registered. A thread that isn't armed
/// yet may be in a call that no signal interrupts.
const PAUSE_NS: u64 = 50_000_000;

/// Nanoseconds that a thread may leave the signal unanswered before Farpage looks whether the thread still
/// lives.
const PATIENCE_NS: u64 = 5_000_000;

/// Nanoseconds until a thread that is on an alternate stack of its own is asked again. The pause grows each
/// time, up to the time for which the other threads wait.
const LATER_NS: core::ops::Range<u64> = 1_000_000..PAUSE_NS;

/// The engine has ended, and no thread is armed any more.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Arms every thread of the program. Runs in the keeper, with no lock held, and makes the keeper's rounds
/// meanwhile. Returns false if the engine is to end before all threads are armed.
pub fn arm_all_threads(engine: &'static Engine, rounds: &mut Rounds) -> bool {
    if find_own_code().is_err() {
        engine.stop_program(StopReason::Arming);
    }
    set_born(born);
    unforked(engine, || {
        // Ordering: Release publishes the engine to handlers.
        ENGINE.store(core::ptr::from_ref(engine).cast_mut(), Ordering::Release);
        install_handlers();
    });
    // A hook that arming interrupts continues with Farpage's signals open. Hooks that begin from now on must
    // leave them open, too.
    sys::keep_open(open() | bit(SIGSETXID));
    install_arming(engine);
    SELECTOR.set(true);
    // A thread that isn't armed may make another thread while the keeper looks. Armed threads make armed
    // threads.
    let (mut quiet_turns, mut refusal) = (0, Refusal::default());
    while quiet_turns < 2 {
        if engine.is_to_retire() {
            return false;
        }
        rounds.make(engine);
        let found = arm_those_there_are(engine, rounds);
        quiet_turns = if found == Found::AllArmed { quiet_turns + 1 } else { 0 };
        match found {
            Found::Refused(thread) => refusal.goes_on(engine, thread),
            Found::AllArmed | Found::SomeToArm => refusal = Refusal::default(),
        }
    }
    // A thread may have set its own handlers before it was armed.
    unforked(engine, install_handlers);
    // The handler of `install_arming` stays: for a thread that was asked twice the signal is still pending.
    signals::all_are_armed();
    sys::keep_open(open());
    true
}

/// Undoes the arming when the engine ends. No calls are stopped any more, and the program's dispositions are
/// in place again. Alternate stacks stay Farpage's. Runs in the keeper, when no page is missing any more.
pub fn end(engine: &Engine) {
    // Ordering: SeqCst: a thread that doesn't see the flag has begun to arm itself before the wait below
    // begins.
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

/// Waits until no signal of an access is on its way to any thread. The kernel sends this signal to a running
/// thread, and delivers it before the thread runs the program's code again. A thread that sleeps has none on
/// its way. A thread that has run for long enough has had it.
fn let_threads_pass() -> Result<(), Errno> {
    /// The way from a fault to the end of its handler takes some microseconds.
    const LONG_ENOUGH_NS: u64 = 1_000_000;
    /// The least wait for each thread. A thread that hangs in the kernel takes no time from those after it.
    const EACH_NS: u64 = 20_000_000;
    let all_until_ns = now_ns() + crate::engine::retire::PATIENCE_NS;
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

/// Waits, after the engine's end, until no other thread is in a handler of an engine, at most until
/// `until_ns`.
pub fn let_others_leave(until_ns: u64) {
    let own = rooms::of_caller();
    let others = rooms::all().filter(|room| own.is_none_or(|own| !core::ptr::eq(*room, own)));
    for room in others {
        while room.at_work.is_at_work() && now_ns() < until_ns {
            sleep_ns(100_000);
        }
    }
    // Threads that have just left a handler go through the kernel once more. If threads can't be looked at,
    // this doesn't wait for them.
    let _ = let_threads_pass();
}

/// Finds the mapping that this function is in. All of Farpage's code is in one library.
fn find_own_code() -> Result<(), Errno> {
    let here = PageIndex::of_address(find_own_code as *const () as usize);
    let mut found = Err(Errno::ENOENT);
    proc::for_each_mapping(|mapping| {
        if mapping.pages.contains(here) {
            CODE[0].store(mapping.pages.start.address(), Ordering::Relaxed);
            CODE[1].store(mapping.pages.end.address(), Ordering::Relaxed);
            found = Ok(());
        }
    })?;
    found
}

/// Does something as one step: no child is forked in its midst. Runs in the keeper. A fork's child replaces
/// what Farpage has installed by what was there before. The dispositions from before must be known by then.
fn unforked<T>(engine: &Engine, step: impl FnOnce() -> T) -> T {
    let _shared = engine.map.shared(KEEPER);
    step()
}

/// Installs the handler that arms a thread. Returns true if the handler was in place already.
fn install_arming(engine: &Engine) -> bool {
    // The handler runs on a thread's alternate stack, if there is one. Go's other stacks are too small for a
    // signal's frame.
    let action = Action::of(on_arm, open());
    unforked(engine, || {
        // SAFETY: the handler can run on top of anything.
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

/// Installs the handler of this signal from any thread of the process, so that engine threads can be asked.
pub fn let_threads_be_asked(engine: &Engine) {
    let on_its_stack = Action::of(on_arm, open());
    // The old disposition is kept before Farpage's handler is in place. A child that is forked meanwhile
    // passes signals on, too.
    while let Ok(before) = signal::action_of(SIGSETXID)
        && before.handler != on_its_stack.handler
    {
        OTHERS.keep(&before);
        // libc's handler runs where it ran before. Go has it run on alternate stacks, because Go's other
        // stacks are too small.
        let action = if before.wants_alternate_stack() { on_its_stack } else { on_its_stack.on_any_stack() };
        // SAFETY: the handler can run on top of anything.
        if unsafe { set_action(SIGSETXID, &action) }.is_err() {
            engine.stop_program(StopReason::Credentials);
        }
    }
}

/// Returns whether a disposition is the handler that arms. The handler stays in place for good, because
/// libc's own runs through it.
pub fn is_for_good(action: &Action) -> bool {
    action.handler == on_arm as *const () as usize
}

/// Returns whether the calling thread's system calls are stopped.
pub fn is_caller_armed() -> bool {
    handlers::engine().is_some() && rooms::of_caller().is_some_and(is_armed)
}

/// What a look at all threads has found.
#[derive(Clone, Copy, PartialEq)]
enum Found {
    AllArmed,
    SomeToArm,
    /// The kernel has refused to send the signal to this thread.
    Refused(u32),
}

/// Looks at all threads once, and has those armed that aren't.
fn arm_those_there_are(engine: &Engine, rounds: &mut Rounds) -> Found {
    let own = current_thread();
    let mut found = Found::AllArmed;
    // All threads are asked before any is waited for. Each has to wait for its turn on a CPU.
    let all = proc::for_each_thread(|thread| {
        let is_done = rooms::of_thread(thread).is_some_and(is_armed) || proc::runs_no_program(thread);
        if thread != own && !is_done {
            let Some(room) = Room::give(thread) else { engine.stop_program(StopReason::Arming) };
            match ask(engine, thread, room) {
                Err(errno) if errno != Errno::ESRCH => found = Found::Refused(thread),
                _ if found == Found::AllArmed => found = Found::SomeToArm,
                _ => {}
            }
        }
    });
    if all.is_err() {
        // Calls of a thread that isn't armed would find memory missing.
        engine.stop_program(StopReason::Arming);
    }
    rooms::all().for_each(|room| wait_until_armed(engine, room, rounds));
    found
}

pub fn is_armed(room: &Room) -> bool {
    // Ordering: Acquire pairs with the Release in `begin_in`.
    room.state.load(Ordering::Acquire) == ARMED
}

fn current_thread() -> u32 {
    // SAFETY: the call takes no arguments.
    unsafe { sys::call(number::GETTID, [0; 6]) as u32 }
}

/// Asks a thread to arm itself in `room`. The thread must not be looking at the room: the room is new, or the
/// thread has put the arming off. After a failure the room is free again.
fn ask(engine: &Engine, thread: u32, room: &Room) -> Result<(), Errno> {
    // SAFETY: the thread isn't in the handler that reads the field.
    unsafe { (*room.own.get()).expected = proc::call_under_way(thread) };
    // Ordering: Release publishes the expected call to the handler.
    room.state.store(GIVEN, Ordering::Release);
    send(engine, thread, room).inspect_err(|_| {
        // The thread has ended, is about to run another program, or has too many signals pending. If the
        // thread lives on, the next look at all threads finds it.
        sleep_ns(1_000_000);
        room.give_back();
    })
}

/// Sends the signal to a thread, unless the thread is about to run another program, which the signal would
/// end. ESRCH: the thread is about to do so, or has ended.
fn send(engine: &Engine, thread: u32, room: &Room) -> Result<(), Errno> {
    let leaving = LEAVING.lock();
    if leaving.contains(&thread) {
        return Err(Errno::ESRCH);
    }
    send_to_thread(engine.process, thread, SIGSETXID, room.word())
}

/// Makes a call that runs another program in place of this one. The calling thread isn't asked to arm itself
/// meanwhile, because a signal that arrives when the handler is gone ends the new program. A signal that was
/// sent earlier is delivered before the call.
pub fn leave_by<T>(engine: &Engine, call: impl FnOnce() -> T) -> T {
    if engine.mode().calls_can_wait() || handlers::is_borrower(Some(engine)) {
        return call();
    }
    let own = current_thread();
    let replace = |from: u32, to: u32| {
        // Signals are blocked: a handler of the program's that runs another program would wait for this lock.
        signals::with_blocked(!open(), || {
            let mut leaving = LEAVING.lock();
            leaving.iter_mut().find(|thread| **thread == from).map(|thread| *thread = to)
        })
    };
    // If the table is full, the call is made without this protection.
    replace(0, own);
    let done = call();
    replace(own, 0);
    done
}

/// Waits until the thread that was asked to arm itself in `room` has done so or has ended. Returns at once if
/// no thread was asked. Makes the keeper's rounds meanwhile.
fn wait_until_armed(engine: &Engine, room: &Room, rounds: &mut Rounds) {
    // The room was given to a thread that isn't made yet.
    let thread = room.thread.load(Ordering::Relaxed);
    if thread == 0 {
        return;
    }
    let began_ns = now_ns();
    let (mut later_ns, mut seen_in) = (LATER_NS.start, None);
    let mut blocking = Blocking::default();
    while !engine.is_to_retire() {
        rounds.make(engine);
        let since = now_ns();
        let (mut pause_ns, mut state) = (20_000, room.state.load(Ordering::Acquire));
        // The loop ends if the room is another thread's by now. The thread that was asked is gone then.
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
                // libc had put its own handler there, which doesn't know what Farpage wants.
                let _ = send(engine, thread, room);
            }
            // The thread may have changed a handler meanwhile, and armed threads have that handler, too.
            unforked(engine, install_handlers);
            rounds.make(engine);
            if blocking.is_lasting(now_ns(), || proc::waiting_thread(thread)) {
                tell(engine, thread.into());
            }
        }
        match state {
            // The thread is on an alternate stack of its own, and stays there as long as it is in the same
            // call. Asking interrupts that call, and its wait begins anew. The thread is therefore asked
            // again only when it runs, or is in another call than at the last look.
            LATER => {
                sleep_ns(later_ns);
                later_ns = (later_ns * 2).min(LATER_NS.end);
                let call = proc::call_under_way(thread);
                if call.is_none() || call != seen_in {
                    let _ = ask(engine, thread, room);
                } else if now_ns() - began_ns > TELL_AFTER_NS {
                    tell(engine, thread.into());
                }
                seen_in = call;
            }
            FAILED => engine.stop_program(StopReason::Arming),
            _ => return,
        }
    }
}

/// Puts Farpage's handlers in place. The dispositions that were there are the program's from now on.
fn install_handlers() {
    signals::take_over(handlers::on_fault, handlers::on_sigsys);
}

/// Does the same in a child that borrows its maker's memory.
pub fn install_handlers_in_borrower() {
    signals::install_in_borrower(handlers::on_fault, handlers::on_sigsys);
}

/// Stops the calling thread's system calls from now on. Returns false if the kernel can't.
pub fn arm_this_thread() -> bool {
    let code = CODE[0].load(Ordering::Relaxed)..CODE[1].load(Ordering::Relaxed);
    // SAFETY: `arm_all_threads` has installed the handler of SIGSYS, and `handlers::born` does so in a
    // borrowing child. `on_arm` has opened SIGSYS in this thread; or an armed thread has made this one, and
    // neither blocks SIGSYS.
    unsafe { dispatch::arm(code, &SELECTOR) }.is_ok()
}

/// Moves the calling thread into `room`. An armed thread has just made the calling thread.
pub fn move_in(room: &Room) {
    // SAFETY: a room's stack is its thread's alone, and the thread is on no alternate stack.
    let Ok(before) = (unsafe { set_alternate_stack(&room.stack()) }) else { return };
    if before != room.stack() {
        // The thread may have been told to arm itself while it was being born. Then it lives in another room
        // already.
        let other = rooms::of_stack(&before);
        // SAFETY: both rooms are the calling thread's own.
        unsafe { (*room.own.get()).alternate = other.map_or(before, |other| (*other.own.get()).alternate) };
        other.into_iter().for_each(Room::give_back);
    }
    // Level 0 held the thread's stack until here.
    room.levels[0].holder.release();
    begin_in(room);
}

/// Arms the calling thread, and publishes in the room's state whether that succeeded.
fn begin_in(room: &Room) {
    let state = if arm_this_thread() { ARMED } else { FAILED };
    // Ordering: Release: a thread that sees the state sees the room complete.
    room.state.store(state, Ordering::Release);
}

/// The alternate stack that a thread is on in a hook. A handler that arms the thread would begin at the top
/// of that stack, over what the program has there. The thread therefore has no alternate stack while it is on
/// the hook's stack. On the way there and back the thread isn't asked to arm itself. See also
/// [`stack_of_child`].
#[derive(Clone, Copy)]
pub struct StackInUse {
    stack: AlternateStack,
    is_asked: bool,
}

/// Returns the alternate stack that the caller is on, in a hook that was called with this stack pointer. Must
/// run before the hook is on a stack of Farpage's. With `None` there is nothing to be done.
pub fn stack_in_use(stack_pointer: usize) -> Option<StackInUse> {
    to_be_taken_away(|stack| stack.is_in_use(stack_pointer))
}

/// Returns the alternate stack of a fork's child, whose engine arms the caller before the child has its
/// memory. A page of that stack may be out. What a handler wrote there would be lost when the page comes in.
pub fn stack_of_child() -> Option<StackInUse> {
    to_be_taken_away(|_| true)
}

fn to_be_taken_away(is_it: impl FnOnce(&AlternateStack) -> bool) -> Option<StackInUse> {
    // Hooks block this signal once all threads are armed. No thread is asked to arm itself in a hook from
    // then on.
    if !sys::is_kept_open(bit(SIGSETXID)) {
        return None;
    }
    let stack = alternate_stack().ok().filter(is_it)?;
    let is_asked = signals::add_blocked(bit(SIGSETXID)) & bit(SIGSETXID) == 0;
    Some(StackInUse { stack, is_asked })
}

/// Does the hook's work on a stack of Farpage's. Afterwards the signal that arms the thread is blocked, until
/// the caller restores the thread's mask.
pub fn without_stack<T>(in_use: Option<StackInUse>, work: impl FnOnce() -> T) -> T {
    let Some(StackInUse { stack, is_asked }) = in_use else { return work() };
    // SAFETY: the thread is on a stack of Farpage's. No handler begins on an alternate stack that isn't
    // there.
    let _ = unsafe { set_alternate_stack(&AlternateStack::NONE) };
    if is_asked {
        signals::open_also(bit(SIGSETXID));
    }
    let done = work();
    signals::add_blocked(bit(SIGSETXID));
    match rooms::of_caller() {
        // SAFETY: the fields are the calling thread's own.
        Some(room) => unsafe { (*room.own.get()).alternate = stack },
        // SAFETY: the stack is the program's own.
        None => _ = unsafe { set_alternate_stack(&stack) },
    }
    done
}

/// Resets the state of this file in a child with a copy of its parent's memory. No other thread is in a hook
/// there.
pub fn reset_in_child() {
    IN_HOOKS.store(0, Ordering::Relaxed);
    IS_OVER.store(false, Ordering::Relaxed);
    LEAVING.forget_holder();
    *LEAVING.lock() = [0; LEAVING_MAX];
    if OTHERS.kept().is_of_ours() {
        OTHERS.keep(&signals::disposition(SIGSETXID));
    }
}

/// Notes, in a fork's child and inside the hook, which of Farpage's signals the child's maker believed to
/// block. `room` is the maker's. A maker that was armed in this very hook seems to block all of them. In that
/// case the hook's end knows what the program itself blocks.
pub fn inherit(room: &Room) {
    // SAFETY: this is the child's only thread.
    let own = unsafe { &*room.own.get() };
    INHERITED.store(if own.is_in_hook { 0 } else { own.claimed }, Ordering::Relaxed);
}

/// Ends a hook, which had blocked all signals that may be blocked. `before` is the mask that the thread had
/// before the hook.
pub fn end_hook(before: SignalMask) {
    let inherited = INHERITED.load(Ordering::Relaxed);
    if inherited != 0 {
        INHERITED.store(0, Ordering::Relaxed);
    }
    let before = before.with(inherited);
    forget_block_of_hook(before);
    sys::restore_signals(before);
    // The thread may have been armed between the two calls.
    forget_block_of_hook(before);
}

/// Removes signals that only the hook has blocked from those that the program believes to block.
fn forget_block_of_hook(before: SignalMask) {
    if IN_HOOKS.load(Ordering::Relaxed) == 0 {
        return;
    }
    let Some(room) = rooms::of_caller() else { return };
    // SAFETY: the fields are the thread's own. A handler that changes them on top of this function returns
    // before the next instruction.
    let own = unsafe { &mut *room.own.get() };
    if core::mem::take(&mut own.is_in_hook) {
        own.claimed &= before.bits();
        IN_HOOKS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns whether the signal interrupted a hook of Farpage's that had blocked signals. The place may be the
/// hook's own code, or a function of libc or the vDSO that the hook has called. A hook blocks the signal that
/// cancels threads, which libc lets no program block.
const fn is_in_hook(context: &Context) -> bool {
    context.blocked & bit(SIGCANCEL) != 0
}

/// Handles the signal by which the keeper asks this thread to arm itself, or by which libc asks for a change
/// of credentials.
unsafe extern "C" fn on_arm(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the structure is the kernel's own, for this call.
    let word = unsafe { (*info).word() };
    let is_over = IS_OVER.load(Ordering::SeqCst);
    if word.is_some_and(credentials::is_taken) || word == Some(WAKES_ONLY) {
        return;
    }
    // After the engine's end there is no engine thread, and the program may not be allowed to ask which
    // thread it is.
    if !is_over && thread::current().is_some() {
        return;
    }
    let Some(room) = word.and_then(rooms::by_word) else {
        let others = OTHERS.kept();
        if others.is_handler() {
            // SAFETY: this is libc's handler, called with what the kernel passed.
            unsafe { core::mem::transmute::<usize, Handler>(others.handler)(signal, info, context) };
        }
        return;
    };
    if is_over || room.state.load(Ordering::Acquire) != GIVEN {
        return; // A second asking.
    }
    // SAFETY: the context is the kernel's own, for this call.
    let context = unsafe { &mut *context };
    let is_made_again = if rooms::is_current() {
        // The thread was asked while it was just being born, and lives in another room already.
        // SAFETY: the room was given to this thread, and nobody uses it yet.
        let expected = unsafe { (*room.own.get()).expected.take() };
        room.give_back();
        make_again(context, expected)
    } else {
        // The thread may block Farpage's signals. The handler may run on memory of the program's, which may
        // be out soon.
        signals::open_also(open());
        be_armed(room, context)
    };
    end_if_another_signal_does(context, is_made_again, context.blocked | bit(SIGSETXID));
}

/// Arms the thread that was interrupted with this context, and waits for the rest. Puts the arming off if the
/// thread is on an alternate stack, because the kernel gives it no other stack meanwhile. Returns whether the
/// interrupted call is made again.
fn be_armed(room: &Room, context: &mut Context) -> bool {
    // SAFETY: the room is the calling thread's own now.
    let own = unsafe { &mut *room.own.get() };
    let expected = own.expected.take();
    // Another signal may have ended the call, and the thread was asked only after that signal's handler.
    let may_come_late = signals::is_blocked_in_a_handler(SIGSETXID);
    let is_made_again = !may_come_late && make_again(context, expected);
    let is_on_stack_for_handlers = context.alternate().is_in_use(context.register(Register::Rsp));
    // SAFETY: a room's stack is its thread's alone, and nothing on it is in use. The handler has interrupted
    // nothing on the previous alternate stack.
    if is_on_stack_for_handlers || unsafe { set_alternate_stack_on_top(&room.stack()) }.is_err() {
        room.state.store(LATER, Ordering::Release);
        return is_made_again;
    }
    (own.claimed, own.alternate) = (context.blocked & open(), context.alternate());
    let is_in_hook = is_in_hook(context);
    if is_in_hook {
        IN_HOOKS.fetch_add(1, Ordering::Relaxed);
        own.is_in_hook = true;
    }
    context.blocked &= !open();
    context.stack = room.stack();
    // Another thread may have changed a disposition by a call past libc.
    install_handlers();
    hold_frame(room, context);
    begin_in(room);
    if !is_in_hook {
        wait_for_the_rest(context);
    }
    is_made_again
}

/// Holds the frame that the kernel reads when a handler returns, for a return that isn't stopped. The frame
/// is held until the thread's next call. A frame may lie on a stack of the program's, in memory that is
/// registered next. The memory is closed for a moment then, and the kernel would end the program. Returns the
/// level that holds, and the frame's addresses.
pub fn hold_frame<'a>(room: &'a Room, context: &Context) -> (&'a Level, Range<usize>) {
    // SAFETY: the kernel gave the context to a handler that has not returned, and the context is still where
    // the kernel laid it.
    let frame = unsafe { Frame::of(context) }.place();
    let level = room.level(frame.start);
    level.returns.store(true, Ordering::Relaxed);
    level.holder.hold(PageRange::covering(frame.start, frame.len()));
    (level, frame)
}

/// Has an armed thread wait until there is something to serve its faults, or until that takes too long.
fn wait_for_the_rest(context: &Context) {
    // Ordering: Relaxed: the range was set before any thread was asked.
    let code = CODE[0].load(Ordering::Relaxed)..CODE[1].load(Ordering::Relaxed);
    // A thread in a hook may have the map lock, which activation needs.
    if let Some(engine) = handlers::engine().filter(|_| !code.contains(&context.register(Register::Rip))) {
        futex::wait_for(&engine.active, 0, PAUSE_NS);
    }
}

/// Result of a call that a signal has ended.
const EINTR: usize = returned::EINTR as usize;

/// Has the thread make a call again that the kernel has ended with EINTR for Farpage's signal. The program
/// has nothing to do with that signal. Returns whether the call is made again.
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
    // A call that a signal has ended can't be taken up by restart_syscall any more. It begins anew.
    let is_whole = |expected: &CallUnderWay| expected.number != raw::__NR_restart_syscall as usize;
    let expected = expected.filter(is_the_same).filter(is_whole).map(|expected| expected.number);
    // The thread was running, or was in another call, when it was asked. The thread made this call before the
    // signal arrived, like a program that calls poll(2) without waiting, again and again.
    let number = expected.or_else(|| number_before(after));
    if let Some(number) = number {
        context.call_again(number);
    }
    number.is_some()
}

/// Handles a signal of Farpage's by `handle`. Then has the thread make the call again that the signal has
/// ended, if the code before the call says which call it was. `context` is the signal's.
pub fn handle_and_make_call_again(signal: u32, context: &mut Context, handle: impl FnOnce()) {
    // A handler of the program's may block the signal, and so may the call itself. Then another signal may
    // have ended the call, and this signal was delivered afterwards. `handle` may change dispositions.
    let may_come_late = signals::is_blocked_in_a_handler(signal) || brings_a_mask(context);
    handle();
    let is_made_again = !may_come_late && make_again(context, None);
    end_if_another_signal_does(context, is_made_again, context.blocked | bit(SIGSETXID));
}

/// Returns whether the call that the thread has just made brings its own mask of blocked signals.
fn brings_a_mask(context: &Context) -> bool {
    /// Flags of `io_uring_enter`.
    const EXT_ARG: usize = 1 << 3;
    const EXT_ARG_REG: usize = 1 << 6;
    let Some(number) = number_before(context.register(Register::Rip)) else { return false };
    let argument = |at: usize| dispatch::Call::stopped(number, context).arguments[at];
    match number as u32 {
        raw::__NR_rt_sigsuspend => true,
        raw::__NR_ppoll => argument(3) != 0,
        raw::__NR_epoll_pwait | raw::__NR_epoll_pwait2 => argument(4) != 0,
        // A structure begins with the mask's address, or the mask lies where only the kernel looks.
        raw::__NR_io_uring_enter if argument(3) & EXT_ARG != 0 => {
            argument(3) & EXT_ARG_REG != 0 || peek::read(argument(4)).is_some_and(|mask| mask != [0; 8])
        }
        raw::__NR_io_uring_enter => argument(4) != 0,
        // The argument points to the mask's address and length.
        raw::__NR_pselect6 | raw::__NR_io_pgetevents => {
            peek::read(argument(5)).is_some_and(|mask| mask != [0; 8])
        }
        _ => false,
    }
}

/// Ends the interrupted call with EINTR if a signal of the program's is pending that would have ended it. The
/// program's handler runs as soon as this one returns. `blocked` has the signals that are blocked then.
fn end_if_another_signal_does(context: &mut Context, is_made_again: bool, blocked: u64) {
    let is_ended = if is_made_again {
        signals::is_handling(blocked)
    } else {
        // The kernel makes the call again by itself, for the sake of Farpage's handler.
        signals::is_ending_calls(blocked) && is_before_waiting_call(context)
    };
    if is_ended {
        end_after_all(context);
    }
}

/// Returns whether the thread is about to make a call that may wait, and that a signal may end. Mostly the
/// kernel has interrupted the call for a signal. The call may also not have begun: a read of a file then ends
/// with EINTR, where Linux would have made it.
fn is_before_waiting_call(context: &Context) -> bool {
    const WAITING: [u32; 24] = [
        raw::__NR_read,
        raw::__NR_readv,
        raw::__NR_preadv2,
        raw::__NR_write,
        raw::__NR_writev,
        raw::__NR_pwritev2,
        raw::__NR_wait4,
        raw::__NR_waitid,
        raw::__NR_flock,
        raw::__NR_accept,
        raw::__NR_accept4,
        raw::__NR_connect,
        raw::__NR_recvfrom,
        raw::__NR_recvmsg,
        raw::__NR_recvmmsg,
        raw::__NR_sendto,
        raw::__NR_sendmsg,
        raw::__NR_sendmmsg,
        raw::__NR_sendfile,
        raw::__NR_splice,
        raw::__NR_tee,
        raw::__NR_vmsplice,
        raw::__NR_mq_timedsend,
        raw::__NR_mq_timedreceive,
    ];
    // Most of these calls don't wait, and programs don't expect that they end.
    const SELDOM_WAITING: [u32; 5] =
        [raw::__NR_open, raw::__NR_openat, raw::__NR_openat2, raw::__NR_creat, raw::__NR_ioctl];
    const FUTEX_COMMAND: u32 = !(raw::FUTEX_PRIVATE_FLAG | raw::FUTEX_CLOCK_REALTIME);
    let (at, number) = (context.register(Register::Rip), context.register(Register::Rax));
    let command = dispatch::Call::stopped(number, context).arguments[1] as u32;
    // The instruction leaves its end in Rcx, except where the CPU delivers events by FRED.
    let has_begun = || context.register(Register::Rcx) == at + Context::CALL_BYTES;
    let waits = match number as u32 {
        raw::__NR_fcntl => [raw::F_SETLKW, raw::F_OFD_SETLKW].contains(&command),
        raw::__NR_futex => [raw::FUTEX_WAIT, raw::FUTEX_WAIT_BITSET].contains(&(command & FUTEX_COMMAND)),
        number => WAITING.contains(&number) || SELDOM_WAITING.contains(&number) && has_begun(),
    };
    waits && peek::read(at) == Some(SYSCALL)
}

/// The instruction of a system call.
const SYSCALL: [u8; Context::CALL_BYTES] = [0x0f, 0x05];

/// Returns the number of a call that returns to `after`. The code before must be `mov eax, number; syscall`,
/// as it mostly is in libc, or `xor eax, eax; syscall`, as in libc's read. A prefix (REX) before either can
/// make it an instruction about R8 to R15. `mov` with a prefix that makes it wide would have more bytes.
fn number_before(after: usize) -> Option<usize> {
    const WIDE: u8 = 0b1000;
    const FROM: u8 = 0b0100;
    const TO: u8 = 0b0001;
    let is_prefix = |byte: u8| byte & 0xf0 == 0x40;
    let xors_others = |before| is_prefix(before) && before & (FROM | TO) != 0;
    let sets_another = |before| is_prefix(before) && before & (WIDE | TO) == TO;
    match peek::read::<8>(after.checked_sub(8)?)? {
        [_, _, _, before, 0x31, 0xc0, 0x0f, 0x05] if !xors_others(before) => Some(number::READ),
        [before, 0xb8, number @ .., 0x0f, 0x05] if !sets_another(before) => {
            Some(u32::from_le_bytes(number) as usize)
        }
        _ => None,
    }
}

/// Ends the call with EINTR after all. A signal of the program's has come meanwhile, and its handler runs as
/// soon as this one returns. The program's signal has ended the call, and not Farpage's. (Made again after
/// the handler, `pause` would wait for the next signal.)
fn end_after_all(context: &mut Context) {
    context.set_register(Register::Rax, EINTR);
    context.set_register(Register::Rip, context.register(Register::Rip) + Context::CALL_BYTES);
}
