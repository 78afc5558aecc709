//! Signals as the program believes to have them: Farpage keeps two signals for itself, and stands before the
//! program's handlers of all other signals.
//!
//! A fault is SIGBUS, or SIGSEGV without a userfaultfd. A stopped call is SIGSYS. Either would end the
//! process if the thread blocked the signal, or the program handled the signal itself. Therefore the
//! program's dispositions of both are kept here, and threads that block them only believe to. Signals that
//! aren't about Farpage go to the program's own handler, with what the kernel said. The program's handlers of
//! all other signals are kept, too. The kernel knows a handler of Farpage's instead (`deliver.rs`).
// UNSAFETY: dispositions of the program's are changed.

use super::arm::{self, is_armed};
use super::deliver;
use super::handlers;
use super::rooms;
use crate::engine::Engine;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use farpage_core::sync::{Lock, rank};
use farpage_os::clock::sleep_ns;
use farpage_os::signal::{
    Action, Context, Handler, Info, SIGBUS, SIGSEGV, SIGSYS, action_of, bit, send_again, set_action,
};
use farpage_os::sys::{self, Errno, number};

/// The signal that faults arrive as.
static FAULT: AtomicU32 = AtomicU32::new(SIGBUS);

/// Sets the signal that faults arrive as. Must run before any thread is armed.
pub fn faults_arrive_as(signal: u32) {
    FAULT.store(signal, Ordering::Relaxed);
}

/// Returns Farpage's two signals: that of faults, and that of stopped calls.
pub fn ours() -> [u32; 2] {
    [FAULT.load(Ordering::Relaxed), SIGSYS]
}

/// Returns the signals that no thread may block.
pub fn open() -> u64 {
    ours().into_iter().fold(0, |bits, signal| bits | bit(signal))
}

const SIGNALS: u32 = 64;

/// Returns whether a signal is one of Farpage's.
pub fn is_ours(signal: u32) -> bool {
    ours().contains(&signal)
}

/// The program's dispositions of Farpage's two signals. For any other signal this is the last disposition
/// that was a handler. The kernel knows whether the signal still has a handler. Changed under the lock
/// `CHANGING`, and read without the lock: a child of vfork that is killed must not have it.
static DISPOSITIONS: [[AtomicU64; 4]; SIGNALS as usize] =
    [const { [const { AtomicU64::new(0) }; 4] }; SIGNALS as usize];
/// Signals for which a handler of the program's stands behind Farpage's, or stood there until it was reset.
static HANDLED: AtomicU64 = AtomicU64::new(0);
static CHANGING: Lock<(), { rank::LAST }> = Lock::new(());
/// Says whether every thread is armed, so that handlers of Farpage's can count on a room's stack.
static ALL_ARMED: AtomicBool = AtomicBool::new(false);
/// Version of the dispositions: odd while they are being changed.
static CHANGES: AtomicU32 = AtomicU32::new(0);

fn place_of(signal: u32) -> &'static [AtomicU64; 4] {
    &DISPOSITIONS[signal as usize - 1]
}

/// Returns the program's disposition of one of Farpage's signals, or its handler of another signal.
pub fn disposition(signal: u32) -> Action {
    // The thread that changes dispositions may have lost its CPU to this one. In a child that copies or
    // shares that thread's memory, the thread may have ended.
    let mut tries = 0;
    loop {
        // Ordering: SeqCst here and below: words that are read between two looks at the same even version
        // belong together.
        let before = CHANGES.load(Ordering::SeqCst);
        let words = place_of(signal).each_ref().map(|word| word.load(Ordering::SeqCst));
        let is_whole = before.is_multiple_of(2) && CHANGES.load(Ordering::SeqCst) == before;
        if is_whole || tries == TRIES_MAX {
            return Action::from_words(words);
        }
        tries += 1;
        sleep_ns(PAUSE_NS);
    }
}

/// How often dispositions are read while they are being changed. With a pause after each, more than a second
/// in all.
const TRIES_MAX: u32 = 10_000;
const PAUSE_NS: u64 = 100_000;

/// Changes the program's disposition of a signal. Not for a child of vfork.
pub fn set_disposition(signal: u32, action: Action) {
    alone(|| keep(signal, &action));
}

/// Changes dispositions, as one step for other threads and for children: a fork is made alone, too. Otherwise
/// a child could have half of what another thread changes.
pub fn alone<T>(change: impl FnOnce() -> T) -> T {
    // A handler on top of this function reads dispositions, and would wait for this thread. All signals are
    // therefore blocked.
    let blocked = swap_blocked(u64::MAX);
    let changing = CHANGING.lock();
    let done = change();
    drop(changing);
    set_blocked(blocked);
    done
}

fn keep(signal: u32, action: &Action) {
    CHANGES.fetch_add(1, Ordering::SeqCst);
    for (place, word) in place_of(signal).iter().zip(action.kept().to_words()) {
        place.store(word, Ordering::SeqCst);
    }
    CHANGES.fetch_add(1, Ordering::SeqCst);
}

/// Makes the change that the program's own `rt_sigaction` asks for. Returns what was there before.
pub fn change(signal: u32, new: Option<Action>, is_borrower: bool) -> Result<Action, Errno> {
    if !(1..=SIGNALS).contains(&signal) {
        return Err(Errno::EINVAL);
    }
    // A child that borrows this memory has dispositions of its own, which end when it runs another program.
    let kept = new.filter(|_| !is_borrower);
    if is_ours(signal) {
        let before = disposition(signal);
        kept.inspect(|new| set_disposition(signal, *new));
        return Ok(before);
    }
    let Some(new) = new else {
        return action_of(signal).map(|found| believed(disposition(signal), found));
    };
    let open_new = Action { mask: new.mask & !open(), ..new };
    // SAFETY: the handler is the program's own, or Farpage's, which runs on top of anything.
    let set = |action: &Action| unsafe { set_action(signal, action) };
    if kept.is_none() {
        return set(&open_new).map(|found| believed(disposition(signal), found));
    }
    alone(|| {
        let before = disposition(signal);
        if !new.is_handler() {
            let found = set(&open_new)?;
            HANDLED.fetch_and(!bit(signal), Ordering::Relaxed);
            return Ok(believed(before, found));
        }
        // The program has found Farpage's handler by a call past libc, while its thread wasn't armed, and
        // puts that handler back.
        let new = if new.handler == deliver::on_signal as *const () as usize { before } else { new };
        // Kept first, because the handler may be wanted at once.
        keep(signal, &new);
        HANDLED.fetch_or(bit(signal), Ordering::Relaxed);
        let found = set(&stand_in(&new)).inspect_err(|_| keep(signal, &before));
        found.map(|found| believed(before, found))
    })
}

/// Returns the signals whose handlers run in this process.
pub fn handled() -> u64 {
    HANDLED.load(Ordering::Relaxed)
}

/// Puts Farpage's handler back for a signal that is sent once more and had a handler for one signal only. The
/// kernel has reset the handler already.
pub fn put_back_once(signal: u32) {
    let kept = disposition(signal);
    if kept.is_once() {
        alone(|| {
            if action_of(signal).is_ok_and(|found| found.is_of_ours() && !found.is_handler()) {
                // SAFETY: the handler is Farpage's, which runs on top of anything.
                let _ = unsafe { set_action(signal, &stand_in(&kept)) };
            }
        });
    }
}

/// Changes a disposition for libc's functions. `call` makes the kernel's call, which is stopped in an armed
/// thread like any other. In a thread that isn't armed while other threads may be, the change goes to what
/// Farpage keeps.
pub fn change_by_libc(
    engine: &Engine,
    signal: u32,
    new: Option<Action>,
    call: impl FnOnce() -> Result<Action, Errno>,
) -> Result<Action, Errno> {
    let is_armed = || rooms::of_caller().is_some_and(is_armed);
    // In `thread` mode no thread is ever armed. A child that borrows this memory may be killed while it has
    // the lock.
    if engine.mode().calls_can_wait() || handlers::is_borrower(Some(engine)) || is_armed() {
        return call();
    }
    // The signal that arms the thread is blocked meanwhile.
    let blocked = swap_blocked(u64::MAX);
    if is_armed() {
        set_blocked(blocked);
        return call();
    }
    // The thread that installs Farpage's handlers publishes the engine first, and takes the lock for each
    // handler.
    let changing = CHANGING.lock();
    let done = if handlers::engine().is_none() { Some(call()) } else { None };
    drop(changing);
    let done = done.unwrap_or_else(|| change(signal, new, false));
    set_blocked(blocked);
    done
}

/// Returns Farpage's handler that stands for one of the program's. The handler runs on a room's stack. Until
/// every thread has a room, the handler runs where the program's would. A thread that isn't armed may have a
/// small alternate stack for another purpose.
fn stand_in(action: &Action) -> Action {
    let ours = action.through(deliver::on_signal, open());
    let has_room = ALL_ARMED.load(Ordering::Relaxed) || action.wants_alternate_stack();
    if has_room { ours } else { ours.on_any_stack() }
}

/// Returns what the program believes to be in place, where the kernel has `found`.
fn believed(kept: Action, found: Action) -> Action {
    match found {
        Action { handler, .. } if handler == deliver::on_signal as *const () as usize => kept,
        // The kernel resets only the handler (`SA_RESETHAND`).
        found if found.is_of_ours() && !found.is_handler() => Action { handler: found.handler, ..kept },
        found => found,
    }
}

/// Installs Farpage's handlers in a child that borrows its maker's memory. The child's dispositions end when
/// it runs another program.
pub fn install_in_borrower(on_fault: Handler, on_sigsys: Handler) {
    for (signal, handler) in ours().into_iter().zip([on_fault, on_sigsys]) {
        // SAFETY: Farpage's handlers run on top of anything, because they use nothing of the program's.
        let _ = unsafe { set_action(signal, &Action::of(handler, open())) };
    }
}

/// Returns whether a signal is pending that ends the process, in a thread that blocks `blocked`.
pub fn is_ending(blocked: u64) -> bool {
    // Signals that by default do nothing, stop the process, or let it go on: CHLD, CONT, STOP, TSTP, TTIN,
    // TTOU, URG, WINCH.
    const HARMLESS: u64 = bit(17) | bit(18) | bit(19) | bit(20) | bit(21) | bit(22) | bit(23) | bit(28);
    waiting(!blocked & !HARMLESS).any(|action| !action.is_handler() && !action.is_ignored())
}

/// Returns whether a signal is pending that the program handles, in a thread that blocks `blocked`.
pub fn is_handling(blocked: u64) -> bool {
    waiting(!blocked & !open()).any(|action| action.is_handler())
}

/// Returns whether a signal is pending that ends a call, in a thread that blocks `blocked`: the program
/// handles the signal, and doesn't want calls to be made again.
pub fn is_ending_calls(blocked: u64) -> bool {
    waiting(!blocked & !open()).any(|action| action.is_handler() && !action.restarts())
}

/// Returns whether any handler of the program's would block this signal while it runs. The mask stays when
/// the kernel has reset the handler (SA_RESETHAND).
pub fn is_blocked_in_a_handler(signal: u32) -> bool {
    let others = (1..=SIGNALS).filter(|other| *other != signal);
    // Behind a handler of Farpage's is the program's disposition, as far as it is kept.
    let programs = |other| match action_of(other) {
        Ok(found) if found.is_of_ours() => Some(disposition(other)),
        found => found.ok(),
    };
    let may_have_run = |action: &Action| action.is_handler() || action.handler == 0 && action.is_once();
    others.filter_map(programs).filter(may_have_run).any(|action| action.mask & bit(signal) != 0)
}

/// Returns the dispositions of those of these signals that are pending.
fn waiting(signals: u64) -> impl Iterator<Item = Action> {
    let mut waiting = 0_u64;
    // SAFETY: the kernel writes a set of 8 bytes, on this function's stack.
    unsafe { sys::call(number::RT_SIGPENDING, [&raw mut waiting as usize, 8, 0, 0, 0, 0]) };
    (1..=SIGNALS)
        .filter(move |signal| waiting & signals & bit(*signal) != 0)
        .filter_map(|signal| action_of(signal).ok())
}

/// Installs Farpage's handlers: those of its two signals, and one for each handler of the program's. Keeps
/// the dispositions that were there. Runs before a thread is armed, and again until all are: a thread that
/// isn't armed may have changed something by a call past libc. The next stopped call of an armed thread ends
/// the process if Farpage doesn't handle SIGSYS, or if a handler of the program's blocks SIGSYS.
pub fn take_over(on_fault: Handler, on_sigsys: Handler) {
    for (signal, handler) in ours().into_iter().zip([on_fault, on_sigsys]) {
        let action = Action::of(handler, open());
        replace(signal, |found| (found.handler != action.handler).then_some(action));
    }
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal)) {
        replace(signal, |found| (found.is_handler() && !found.is_of_ours()).then(|| stand_in(found)));
    }
}

/// Makes all handlers begin on a room's stack from now on. Every thread is armed by then, except those that
/// are just being born.
pub fn all_are_armed() {
    ALL_ARMED.store(true, Ordering::Relaxed);
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal)) {
        alone(|| {
            let found = action_of(signal).ok().filter(|found| found.is_handler() && found.is_of_ours());
            if found.is_some_and(|found| !found.wants_alternate_stack()) {
                // SAFETY: the handler is Farpage's, which runs on top of anything.
                let _ = unsafe { set_action(signal, &stand_in(&disposition(signal))) };
            }
        });
    }
}

/// Keeps the disposition that was found, and installs the one that `by` returns for it, if any.
fn replace(signal: u32, by: impl Fn(&Action) -> Option<Action>) {
    let wanted = |found: Action| Some((found, by(&found)?));
    // Mostly there is nothing to do, and then no reason to wait for a lock.
    if action_of(signal).ok().and_then(wanted).is_none() {
        return;
    }
    alone(|| {
        if let Some((found, ours)) = action_of(signal).ok().and_then(wanted) {
            // Kept first, because the disposition may be wanted at once.
            keep(signal, &found);
            if !is_ours(signal) {
                HANDLED.fetch_or(bit(signal), Ordering::Relaxed);
            }
            // SAFETY: the handler is Farpage's, which runs on top of anything.
            let _ = unsafe { set_action(signal, &ours) };
        }
    });
}

/// Frees the lock in a child that has a copy of its parent's memory. A thread that isn't in the child may
/// have had the lock.
pub fn reset_in_child() {
    CHANGING.forget_holder();
}

/// Undoes everything in a child that has a copy of its parent's memory and no engine, as if Farpage had never
/// been there.
pub fn uninstall() {
    CHANGES.store(0, Ordering::SeqCst);
    HANDLED.store(0, Ordering::Relaxed);
    ALL_ARMED.store(false, Ordering::Relaxed);
    put_back_all();
}

/// Undoes everything at the engine's end, as if Farpage had never been there. No signal is about Farpage any
/// more.
pub fn give_back() {
    alone(|| {
        HANDLED.store(0, Ordering::Relaxed);
        put_back_all();
    });
}

fn put_back_all() {
    for signal in 1..=SIGNALS {
        let kept = disposition(signal);
        let own = if is_ours(signal) { Ok(kept) } else { action_of(signal) };
        let Some(found) = own.ok().filter(|found| !arm::is_for_good(found)) else { continue };
        let believed = believed(kept, found);
        if is_ours(signal) || believed.to_bytes() != found.to_bytes() {
            // SAFETY: the disposition is the program's own.
            let _ = unsafe { set_action(signal, &believed) };
        }
    }
}

/// Does with a signal that isn't about Farpage what the program would do. `spent` is given by a child of
/// vfork: the set of signals for which the child has no handler any more.
///
/// # Safety
/// The caller must be a handler of Farpage's, and pass what that handler was given.
pub unsafe fn hand_on(signal: i32, info: *mut Info, context: *mut Context, spent: Option<&mut u64>) {
    let own = bit(signal as u32);
    let is_spent = spent.as_ref().is_some_and(|spent| **spent & own != 0);
    let action = if is_spent { Action::DEFAULT } else { disposition(signal as u32) };
    // SAFETY: the structure is the kernel's own, for this call.
    let was_sent = unsafe { (*info).was_sent() };
    if action.is_handler() {
        match spent {
            Some(spent) if action.is_once() => *spent |= own,
            None if action.is_once() => set_disposition(signal as u32, Action::DEFAULT),
            _ => {}
        }
        // SAFETY: the caller's promise is passed on.
        return unsafe { deliver::run(action, signal, info, context) };
    }
    if action.is_ignored() && was_sent {
        return;
    }
    // By default the signal ends the process. The process ends by this very signal, so that the parent is
    // told what happened.
    if was_sent {
        // SAFETY: the context is the kernel's own, for this call.
        end_with(signal as u32, unsafe { &mut *context });
    } else {
        // The cause of the signal occurs again, and the kernel ends the process.
        // SAFETY: the default disposition takes Farpage's handler away.
        let _ = unsafe { set_action(signal as u32, &Action::DEFAULT) };
    }
}

/// Deals with a signal whose frame has no place on the program's stack. The kernel raises SIGSEGV then, and
/// the handler of SIGSEGV may run elsewhere. The process ends if SIGSEGV was the signal, is blocked, or has
/// no handler.
pub fn has_no_place(signal: u32, context: &mut Context) {
    let handles = || match is_ours(SIGSEGV) {
        true => Ok(disposition(SIGSEGV)),
        false => action_of(SIGSEGV),
    };
    let is_blocked = context.blocked & bit(SIGSEGV) != 0;
    if signal != SIGSEGV && !is_blocked && handles().is_ok_and(|action| action.is_handler()) {
        // SIGSEGV arrives with the program's own mask, when this handler returns.
        set_blocked(u64::MAX);
        send_again(&Info::by_kernel(SIGSEGV));
    } else {
        end_with(SIGSEGV, context);
    }
}

/// Ends the process by a signal, which is delivered when the handler that has this context returns.
pub fn end_with(signal: u32, context: &mut Context) {
    // SAFETY: the default disposition takes Farpage's handler away.
    let _ = unsafe { set_action(signal, &Action::DEFAULT) };
    context.blocked &= !bit(signal);
    // SAFETY: the calls take no arguments.
    let [process, thread] = [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
    // SAFETY: the call takes no address.
    unsafe { sys::call(number::TGKILL, [process as usize, thread as usize, signal as usize, 0, 0, 0]) };
}

/// Blocks exactly `mask` in the calling thread.
pub fn set_blocked(mask: u64) {
    swap_blocked(mask);
}

/// Runs `what` with the signals of `mask` blocked, too.
pub fn with_blocked<T>(mask: u64, what: impl FnOnce() -> T) -> T {
    let before = swap_blocked(u64::MAX);
    set_blocked(before | mask);
    let done = what();
    set_blocked(before);
    done
}

/// Blocks exactly `mask`, and returns what was blocked before.
fn swap_blocked(mask: u64) -> u64 {
    const SET: usize = 2;
    change_blocked_in_kernel(SET, mask)
}

/// Calls `rt_sigprocmask`. Returns what was blocked before.
fn change_blocked_in_kernel(how: usize, mask: u64) -> u64 {
    let mut before = 0_u64;
    let sets = [&raw const mask as usize, &raw mut before as usize];
    // SAFETY: the kernel reads one set of 8 bytes on this function's stack, and writes another.
    unsafe { sys::call(number::RT_SIGPROCMASK, [how, sets[0], sets[1], 8, 0, 0]) };
    before
}

/// Opens the signals of `mask` in the calling thread.
pub fn open_also(mask: u64) {
    const UNBLOCK: usize = 1;
    change_blocked_in_kernel(UNBLOCK, mask);
}

/// Blocks the signals of `mask`, too, and returns what was blocked before.
pub fn add_blocked(mask: u64) -> u64 {
    const BLOCK: usize = 0;
    change_blocked_in_kernel(BLOCK, mask)
}
