//! What a program does with signals that must stay ours.
//!
//! A fault (SIGBUS, or SIGSEGV without a userfaultfd) or a stopped call (SIGSYS) in a thread that blocks that signal, or
//! in a program that handles it itself, would end the process. So the program's dispositions of both are kept here,
//! threads that block them only believe to, and signals that aren't about us go to the program's own handler, with what
//! the kernel said.
// UNSAFETY: the program's handlers are called as the kernel would.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::sync::Lock;
use farpage_os::signal::{Action, Context, Handler, Info, SIGBUS, SIGSYS, action_of, bit, set_action};
use farpage_os::sys::{self, number};

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
pub fn is_ours(signal: usize) -> bool {
    ours().contains(&(signal as u32))
}

/// The program's dispositions of our two signals: faults, stopped calls. Changed under the lock, and read without it: a child
/// of vfork that is killed must not have it.
static DISPOSITIONS: [[AtomicU64; 4]; 2] = [const { [const { AtomicU64::new(0) }; 4] }; 2];
static CHANGING: Lock<()> = Lock::new(());
/// Odd while they are being changed.
static CHANGES: AtomicU32 = AtomicU32::new(0);

const fn place_of(signal: usize) -> usize {
    if signal == SIGSYS as usize { 1 } else { 0 }
}

/// The program's disposition of one of our signals.
pub fn disposition(signal: usize) -> Action {
    loop {
        // Ordering: SeqCst here and below: words between two looks at the same even number belong together.
        let before = CHANGES.load(Ordering::SeqCst);
        let words = DISPOSITIONS[place_of(signal)].each_ref().map(|word| word.load(Ordering::SeqCst));
        if before.is_multiple_of(2) && CHANGES.load(Ordering::SeqCst) == before {
            return Action::from_words(words);
        }
        core::hint::spin_loop();
    }
}

/// Changes it. Not in a child of vfork.
pub fn set_disposition(signal: usize, action: Action) {
    // Who is told of a signal on top of this asks for dispositions, and would wait for us.
    let blocked = swap_blocked(u64::MAX);
    change_disposition(signal, action);
    set_blocked(blocked);
}

fn change_disposition(signal: usize, action: Action) {
    let _changing = CHANGING.lock();
    CHANGES.fetch_add(1, Ordering::SeqCst);
    for (place, word) in DISPOSITIONS[place_of(signal)].iter().zip(action.to_words()) {
        place.store(word, Ordering::SeqCst);
    }
    CHANGES.fetch_add(1, Ordering::SeqCst);
}

/// Puts handlers of ours in place, and tells what was there instead: the program's dispositions.
pub fn install(on_fault: Handler, on_sigsys: Handler, was_there: impl Fn(usize, Action)) {
    for (signal, handler) in ours().into_iter().zip([on_fault, on_sigsys]) {
        let action = Action::of(handler, open());
        // SAFETY: our handlers run on top of anything: they use nothing of the program's.
        let before = unsafe { set_action(signal, &action) };
        if let Some(before) = before.ok().filter(|before| before.handler != action.handler) {
            was_there(signal as usize, before);
        }
    }
}

/// Whether the program has a handler that ends the call which it interrupts.
pub fn any_interrupts() -> bool {
    (1..=SIGNALS)
        .filter(|signal| !is_ours(*signal as usize))
        .filter_map(|signal| action_of(signal).ok())
        .any(|action| action.is_handler() && !action.restarts())
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

/// Handlers that the program installed before its calls were looked at don't block our signals either: they make calls.
pub fn open_masks() {
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal as usize)) {
        let Ok(mut action) = action_of(signal) else { continue };
        if action.is_handler() && action.mask & open() != 0 {
            let read = action;
            action.mask &= !open();
            // SAFETY: the program's own, but for its mask.
            let before = unsafe { set_action(signal, &action) };
            if let Some(mut newer) = before.ok().filter(|before| before.to_bytes() != read.to_bytes()) {
                newer.mask &= !open();
                // SAFETY: likewise: another thread has set it meanwhile.
                let _ = unsafe { set_action(signal, &newer) };
            }
        }
    }
}

/// In a child that has a copy of its parent's memory, and no engine: everything as if we had never been there.
pub fn uninstall() {
    CHANGING.forget_holder();
    CHANGES.store(0, Ordering::SeqCst);
    for signal in ours() {
        // SAFETY: the program's own.
        let _ = unsafe { set_action(signal, &disposition(signal as usize)) };
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
    let action = if is_spent { Action::DEFAULT } else { disposition(signal as usize) };
    // SAFETY: the kernel's own structures.
    let (was_sent, blocked) = unsafe { ((*info).was_sent(), (*context).blocked) };
    if action.is_handler() {
        match spent {
            Some(spent) if action.is_once() => *spent |= own,
            None if action.is_once() => set_disposition(signal as usize, Action::DEFAULT),
            _ => {}
        }
        set_blocked(action.blocks(signal as u32, blocked) & !open());
        // SAFETY: the program's handler, called with what the kernel would call it with: it takes one argument or three.
        let handler = unsafe { core::mem::transmute::<usize, Handler>(action.handler) };
        // SAFETY: as above. It may never return.
        unsafe { handler(signal, info, context) };
        // What it wants to be blocked from now on: as with any handler's return, not ours.
        // SAFETY: the kernel's own structure.
        unsafe { (*context).blocked &= !open() };
        return;
    }
    if action.is_ignored() && was_sent {
        return;
    }
    // The default is to end the process: with this very signal, so that whoever waits for it is told what happened.
    // SAFETY: takes our handler away.
    let _ = unsafe { set_action(signal as u32, &Action::DEFAULT) };
    if was_sent {
        // Delivered when our handler returns. Whatever it was else happens again then.
        // SAFETY: takes nothing.
        let (process, thread) =
            unsafe { (sys::call(number::GETPID, [0; 6]), sys::call(number::GETTID, [0; 6])) };
        // SAFETY: takes no address.
        unsafe { sys::call(number::TGKILL, [process as usize, thread as usize, signal as usize, 0, 0, 0]) };
    }
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
    let mut before = 0_u64;
    let sets = [&raw const mask as usize, &raw mut before as usize];
    // SAFETY: the kernel reads a set of 8 bytes on our own stack, and writes another.
    unsafe { sys::call(number::RT_SIGPROCMASK, [SET, sets[0], sets[1], 8, 0, 0]) };
    before
}

/// Blocks the signals of `mask`, too.
pub fn add_blocked(mask: u64) {
    const BLOCK: usize = 0;
    // SAFETY: as in `set_blocked`.
    unsafe { sys::call(number::RT_SIGPROCMASK, [BLOCK, &raw const mask as usize, 0, 8, 0, 0]) };
}
