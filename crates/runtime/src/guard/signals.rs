//! What a program does with signals: those that must stay ours, and all that it handles.
//!
//! A fault (SIGBUS, or SIGSEGV without a userfaultfd) or a stopped call (SIGSYS) in a thread that blocks that signal, or
//! in a program that handles it itself, would end the process. So the program's dispositions of both are kept here,
//! threads that block them only believe to, and signals that aren't about us go to the program's own handler, with what
//! the kernel said. Its handlers of all other signals are kept, too: the kernel knows one of ours instead (`deliver.rs`).
// UNSAFETY: dispositions of the program's are changed.

use super::arm::{self, is_armed};
use super::deliver;
use super::handlers;
use super::rooms;
use crate::engine::Engine;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use farpage_core::sync::Lock;
use farpage_os::clock::sleep_ns;
use farpage_os::signal::{
    Action, Context, Handler, Info, SIGBUS, SIGSEGV, SIGSYS, action_of, bit, send_again, set_action,
};
use farpage_os::sys::{self, Errno, number};

/// The signal that faults arrive as.
static FAULT: AtomicU32 = AtomicU32::new(SIGBUS);

/// Faults arrive as that signal. Before any thread is armed.
pub fn faults_arrive_as(signal: u32) {
    FAULT.store(signal, Ordering::Relaxed);
}

/// Our two signals: that of faults, and that of stopped calls.
pub fn ours() -> [u32; 2] {
    [FAULT.load(Ordering::Relaxed), SIGSYS]
}

/// Signals that no thread may block.
pub fn open() -> u64 {
    ours().into_iter().fold(0, |bits, signal| bits | bit(signal))
}

const SIGNALS: u32 = 64;

/// Whether a signal is one of ours.
pub fn is_ours(signal: u32) -> bool {
    ours().contains(&signal)
}

/// The program's dispositions of our two signals, and of others the last one that was a handler: the kernel knows whether it
/// still is. Changed under the lock, and read without it: a child of vfork that is killed must not have it.
static DISPOSITIONS: [[AtomicU64; 4]; SIGNALS as usize] =
    [const { [const { AtomicU64::new(0) }; 4] }; SIGNALS as usize];
/// Signals for which there is a handler behind ours, or was until it was reset.
static HANDLED: AtomicU64 = AtomicU64::new(0);
static CHANGING: Lock<()> = Lock::new(());
/// Whether every thread is armed, so that handlers of ours can count on a room's stack.
static ALL_ARMED: AtomicBool = AtomicBool::new(false);
/// Odd while they are being changed.
static CHANGES: AtomicU32 = AtomicU32::new(0);

fn place_of(signal: u32) -> &'static [AtomicU64; 4] {
    &DISPOSITIONS[signal as usize - 1]
}

/// The program's disposition of one of our signals, or its handler of another.
pub fn disposition(signal: u32) -> Action {
    // Who changes them may have lost its CPU to us; or have ended, if this is a child that has a copy of its memory, or shares it.
    let mut tries = 0;
    loop {
        // Ordering: SeqCst here and below: words between two looks at the same even number belong together.
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

/// How often dispositions are read that are just being changed, and how long it is waited in between: more than a second in all.
const TRIES_MAX: u32 = 10_000;
const PAUSE_NS: u64 = 100_000;

/// Changes it. Not in a child of vfork.
pub fn set_disposition(signal: u32, action: Action) {
    alone(|| keep(signal, &action));
}

/// Changes dispositions, as one step for others.
fn alone<T>(change: impl FnOnce() -> T) -> T {
    // Who is told of a signal on top of this asks for dispositions, and would wait for us.
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

/// The program's own `rt_sigaction`: what was there before.
pub fn change(signal: u32, new: Option<Action>, is_borrower: bool) -> Result<Action, Errno> {
    const EINVAL: Errno = Errno(linux_raw_sys::errno::EINVAL as i32);
    if !(1..=SIGNALS).contains(&signal) {
        return Err(EINVAL);
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
    // SAFETY: the program's own, or ours, which runs on top of anything.
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
        // Found by a call past libc while its thread wasn't armed, and put back.
        let new = if new.handler == deliver::on_signal as *const () as usize { before } else { new };
        // First: it may be wanted at once.
        keep(signal, &new);
        HANDLED.fetch_or(bit(signal), Ordering::Relaxed);
        let found = set(&stand_in(&new)).inspect_err(|_| keep(signal, &before));
        found.map(|found| believed(before, found))
    })
}

/// Signals whose handlers run in this process.
pub fn handled() -> u64 {
    HANDLED.load(Ordering::Relaxed)
}

/// A signal arrives once more that had a handler for one signal: the kernel has reset that already.
pub fn put_back_once(signal: u32) {
    let kept = disposition(signal);
    if kept.is_once() {
        alone(|| {
            if action_of(signal).is_ok_and(|found| found.is_of_ours() && !found.is_handler()) {
                // SAFETY: ours, which runs on top of anything.
                let _ = unsafe { set_action(signal, &stand_in(&kept)) };
            }
        });
    }
}

/// The program changes a disposition by libc. `call` makes the kernel's call for that, and an armed thread's is looked at like
/// any other. In a thread that isn't armed while others may be, what changes is what we keep.
pub fn change_by_libc(
    engine: &Engine,
    signal: u32,
    new: Option<Action>,
    call: impl FnOnce() -> Result<Action, Errno>,
) -> Result<Action, Errno> {
    let is_armed = || rooms::of_caller().is_some_and(is_armed);
    // In `thread` mode no thread is ever armed. A child that borrows this memory may be killed with the lock.
    if engine.handover.is_none() || handlers::is_borrower(Some(engine)) || is_armed() {
        return call();
    }
    // What would arm the thread is blocked meanwhile.
    let blocked = swap_blocked(u64::MAX);
    if is_armed() {
        set_blocked(blocked);
        return call();
    }
    // Who puts our handlers in place publishes the engine first, and takes the lock for each.
    let changing = CHANGING.lock();
    let done = if handlers::engine().is_none() { Some(call()) } else { None };
    drop(changing);
    let done = done.unwrap_or_else(|| change(signal, new, false));
    set_blocked(blocked);
    done
}

/// Our handler that stands for one of the program's. It runs on a room's stack; until every thread has one, where the program's
/// would run: a thread that isn't armed may have a small alternate stack for something else.
fn stand_in(action: &Action) -> Action {
    let ours = action.through(deliver::on_signal, open());
    let has_room = ALL_ARMED.load(Ordering::Relaxed) || action.wants_alternate_stack();
    if has_room { ours } else { ours.on_any_stack() }
}

/// What the program believes to be in place where the kernel has `found`.
fn believed(kept: Action, found: Action) -> Action {
    match found {
        Action { handler, .. } if handler == deliver::on_signal as *const () as usize => kept,
        // The kernel resets nothing but the handler (`SA_RESETHAND`).
        found if found.is_of_ours() && !found.is_handler() => Action { handler: found.handler, ..kept },
        found => found,
    }
}

/// Puts handlers of ours in place in a child that borrows its maker's memory: its dispositions end when it runs another program.
pub fn install_in_borrower(on_fault: Handler, on_sigsys: Handler) {
    for (signal, handler) in ours().into_iter().zip([on_fault, on_sigsys]) {
        // SAFETY: our handlers run on top of anything: they use nothing of the program's.
        let _ = unsafe { set_action(signal, &Action::of(handler, open())) };
    }
}

/// Whether a signal waits that ends the process, in a thread that blocks `blocked`.
pub fn is_ending(blocked: u64) -> bool {
    // Those that do nothing by default, or stop the process or let it go on: CHLD, CONT, STOP, TSTP, TTIN, TTOU, URG, WINCH.
    const HARMLESS: u64 = bit(17) | bit(18) | bit(19) | bit(20) | bit(21) | bit(22) | bit(23) | bit(28);
    waiting(!blocked & !HARMLESS).any(|action| !action.is_handler() && !action.is_ignored())
}

/// Whether a signal waits that the program handles, in a thread that blocks `blocked`.
pub fn is_handling(blocked: u64) -> bool {
    waiting(!blocked & !open()).any(|action| action.is_handler())
}

/// The dispositions of those of these signals that wait.
fn waiting(signals: u64) -> impl Iterator<Item = Action> {
    let mut waiting = 0_u64;
    // SAFETY: the kernel writes a set of 8 bytes, on our own stack.
    unsafe { sys::call(number::RT_SIGPENDING, [&raw mut waiting as usize, 8, 0, 0, 0, 0]) };
    (1..=SIGNALS)
        .filter(move |signal| waiting & signals & bit(*signal) != 0)
        .filter_map(|signal| action_of(signal).ok())
}

/// Puts our handlers in place: those of our two signals, and the one that stands for each handler of the program's. What was
/// there is kept. Before a thread is armed, and again until all are: a thread that isn't may have changed something by a call
/// past libc. An armed thread ends the process where SIGSYS has no handler of ours, or one of the program's blocks it.
pub fn take_over(on_fault: Handler, on_sigsys: Handler) {
    for (signal, handler) in ours().into_iter().zip([on_fault, on_sigsys]) {
        let action = Action::of(handler, open());
        replace(signal, |found| (found.handler != action.handler).then_some(action));
    }
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal)) {
        replace(signal, |found| (found.is_handler() && !found.is_of_ours()).then(|| stand_in(found)));
    }
}

/// Every thread is armed, but for those that are just being born: from now on all handlers begin on a room's stack.
pub fn all_are_armed() {
    ALL_ARMED.store(true, Ordering::Relaxed);
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal)) {
        alone(|| {
            let found = action_of(signal).ok().filter(|found| found.is_handler() && found.is_of_ours());
            if found.is_some_and(|found| !found.wants_alternate_stack()) {
                // SAFETY: ours, which runs on top of anything.
                let _ = unsafe { set_action(signal, &stand_in(&disposition(signal))) };
            }
        });
    }
}

/// Keeps the disposition that was found, and puts the one in its place that `by` names, if it names one.
fn replace(signal: u32, by: impl Fn(&Action) -> Option<Action>) {
    let wanted = |found: Action| Some((found, by(&found)?));
    // Mostly nothing is to be done, and no lock to be waited for.
    if action_of(signal).ok().and_then(wanted).is_none() {
        return;
    }
    alone(|| {
        if let Some((found, ours)) = action_of(signal).ok().and_then(wanted) {
            // First: it may be wanted at once.
            keep(signal, &found);
            if !is_ours(signal) {
                HANDLED.fetch_or(bit(signal), Ordering::Relaxed);
            }
            // SAFETY: ours, which runs on top of anything.
            let _ = unsafe { set_action(signal, &ours) };
        }
    });
}

/// In a child that has a copy of its parent's memory: a thread that isn't here may have had the lock.
pub fn reset_in_child() {
    CHANGING.forget_holder();
}

/// In a child that has a copy of its parent's memory, and no engine: everything as if we had never been there.
pub fn uninstall() {
    CHANGES.store(0, Ordering::SeqCst);
    HANDLED.store(0, Ordering::Relaxed);
    ALL_ARMED.store(false, Ordering::Relaxed);
    put_back_all();
}

/// The engine has ended, and no signal is about us any more: everything as if we had never been there.
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
            // SAFETY: the program's own.
            let _ = unsafe { set_action(signal, &believed) };
        }
    }
}

/// A signal that isn't about us: what the program would do with it. A child of vfork brings the set of those for which it
/// has no handler any more.
///
/// # Safety
/// In a handler of ours, with what that was given.
pub unsafe fn hand_on(signal: i32, info: *mut Info, context: *mut Context, spent: Option<&mut u64>) {
    let own = bit(signal as u32);
    let is_spent = spent.as_ref().is_some_and(|spent| **spent & own != 0);
    let action = if is_spent { Action::DEFAULT } else { disposition(signal as u32) };
    // SAFETY: the kernel's own structures.
    let was_sent = unsafe { (*info).was_sent() };
    if action.is_handler() {
        match spent {
            Some(spent) if action.is_once() => *spent |= own,
            None if action.is_once() => set_disposition(signal as u32, Action::DEFAULT),
            _ => {}
        }
        // SAFETY: passed on.
        return unsafe { deliver::run(action, signal, info, context) };
    }
    if action.is_ignored() && was_sent {
        return;
    }
    // The default is to end the process: with this very signal, so that whoever waits for it is told what happened.
    if was_sent {
        // SAFETY: the kernel's own structure.
        end_with(signal as u32, unsafe { &mut *context });
    } else {
        // Whatever it was happens again.
        // SAFETY: takes our handler away.
        let _ = unsafe { set_action(signal as u32, &Action::DEFAULT) };
    }
}

/// A signal's frame has no place on the program's stack. The kernel raises SIGSEGV then, whose handler may run elsewhere; unless
/// it was that.
pub fn has_no_place(signal: u32, context: &mut Context) {
    let handles = || match is_ours(SIGSEGV) {
        true => Ok(disposition(SIGSEGV)),
        false => action_of(SIGSEGV),
    };
    let is_blocked = context.blocked & bit(SIGSEGV) != 0;
    if signal != SIGSEGV && !is_blocked && handles().is_ok_and(|action| action.is_handler()) {
        // It arrives with the program's own mask, when this handler returns.
        set_blocked(u64::MAX);
        send_again(&Info::by_kernel(SIGSEGV));
    } else {
        end_with(SIGSEGV, context);
    }
}

/// Ends the process by a signal, delivered when the handler that has this context returns.
pub fn end_with(signal: u32, context: &mut Context) {
    // SAFETY: takes our handler away.
    let _ = unsafe { set_action(signal, &Action::DEFAULT) };
    context.blocked &= !bit(signal);
    // SAFETY: takes nothing.
    let [process, thread] = [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
    // SAFETY: takes no address.
    unsafe { sys::call(number::TGKILL, [process as usize, thread as usize, signal as usize, 0, 0, 0]) };
}

/// Blocks exactly `mask` in the calling thread.
pub fn set_blocked(mask: u64) {
    swap_blocked(mask);
}

/// Does something with the signals of `mask` blocked.
pub fn with_blocked<T>(mask: u64, what: impl FnOnce() -> T) -> T {
    let before = swap_blocked(u64::MAX);
    set_blocked(before | mask);
    let done = what();
    set_blocked(before);
    done
}

/// The same, and says what was blocked before.
fn swap_blocked(mask: u64) -> u64 {
    const SET: usize = 2;
    change_blocked_in_kernel(SET, mask)
}

/// `rt_sigprocmask`. What was blocked before.
fn change_blocked_in_kernel(how: usize, mask: u64) -> u64 {
    let mut before = 0_u64;
    let sets = [&raw const mask as usize, &raw mut before as usize];
    // SAFETY: the kernel reads a set of 8 bytes on our own stack, and writes another.
    unsafe { sys::call(number::RT_SIGPROCMASK, [how, sets[0], sets[1], 8, 0, 0]) };
    before
}

/// Opens the signals of `mask` in the calling thread.
pub fn open_also(mask: u64) {
    const UNBLOCK: usize = 1;
    change_blocked_in_kernel(UNBLOCK, mask);
}

/// Blocks the signals of `mask`, too, and says what was blocked before.
pub fn add_blocked(mask: u64) -> u64 {
    const BLOCK: usize = 0;
    change_blocked_in_kernel(BLOCK, mask)
}
