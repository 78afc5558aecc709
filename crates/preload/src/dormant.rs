//! While the process is dormant: which of its calls need an engine first.
//!
//! Within what the process has said that it can have, its calls pass as they are. A call that would have it pass that starts an
//! engine, before the call is made; so does one whose effect an engine must know of from the beginning, and one after which an
//! engine could no longer be started.
// UNSAFETY: what is known of the process lies on a page that is wiped in a child.

use crate::hooks;
use crate::init::{begin_late, session_path};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use farpage::changes::Arguments;
use farpage::dormant::{Added, Dormant, WAKES};
use farpage::session::{Notice, Session, StartFailure};
use farpage::{credentials, filters};
use farpage_core::units::PAGE_BYTES;
use farpage_os::memory;
use farpage_os::signal::{self, Action, Context, Info, set_action};
use farpage_os::sys::{self, Errno, number};
use linux_raw_sys::{general as raw, prctl};

/// Zero also in a child, which isn't dormant until it has joined by itself.
const NOT: u32 = 0;
const IS: u32 = 1;
/// An engine was started, or can't be.
const WAS: u32 = 2;

/// On a page of its own.
struct Page {
    state: AtomicU32,
    /// Which process that is: a child of vfork has the same memory.
    process: AtomicU32,
    dormant: UnsafeCell<MaybeUninit<Dormant>>,
}

static PAGE: AtomicPtr<Page> = AtomicPtr::new(core::ptr::null_mut());

fn page() -> Option<&'static Page> {
    // SAFETY: null, or placed for good.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

fn current() -> Option<&'static Page> {
    // Ordering: Acquire pairs with the Release in `join`.
    page().filter(|page| page.state.load(Ordering::Acquire) == IS)
}

/// What this process has said of itself, and where; none if it isn't dormant.
fn dormant() -> Option<&'static Dormant> {
    // SAFETY: written before the state was, and taken by `start_engine` only after it has changed the state.
    current().map(|page| unsafe { (*page.dormant.get()).assume_init_ref() })
}

/// The session, of a dormant process.
pub fn session() -> Option<&'static Session> {
    dormant().map(Dormant::session)
}

/// Whether this process is dormant, or its parent by vfork is.
pub fn is_dormant() -> bool {
    current().is_some()
}

/// Joins the run without an engine. False if that can't be.
pub fn join() -> bool {
    if page().is_none() {
        let (state, process) = (AtomicU32::new(NOT), AtomicU32::new(0));
        let dormant = UnsafeCell::new(MaybeUninit::uninit());
        let Ok(page) = memory::place(Page { state, process, dormant }) else { return false };
        let base = core::ptr::from_mut(page).cast();
        // SAFETY: zero is `NOT`, and nobody looks at the rest then.
        if unsafe { memory::wipe_in_children(base, PAGE_BYTES) }.is_err() {
            return false;
        }
        PAGE.store(base.cast(), Ordering::Release);
    }
    // A program that was started to ignore the signal can't be asked.
    if !matches!(signal::action_of(WAKES), Ok(Action { handler: 0, .. })) {
        return false;
    }
    let (Some(page), Some(dormant)) = (page(), Dormant::join(session_path())) else { return false };
    // SAFETY: a handler of ours, which does nothing before the state is `IS`.
    if unsafe { set_action(WAKES, &Action::of(on_wake, 0)) }.is_err() {
        dormant.leave();
        return false;
    }
    // SAFETY: the state says that nobody reads it.
    unsafe { (*page.dormant.get()).write(dormant) };
    page.process.store(own_process(), Ordering::Relaxed);
    // Ordering: Release publishes what was written.
    page.state.store(IS, Ordering::Release);
    true
}

unsafe extern "C" fn on_wake(_: i32, _: *mut Info, _: *mut Context) {
    start_engine();
}

fn is_ours(action: &Action) -> bool {
    action.handler == on_wake as *const () as usize
}

/// The program changes what a signal does. What it does for us is none of the program's business: it sees the default.
pub fn before_action(signal: u32, is_new: bool) {
    if signal == WAKES && is_new {
        start_engine();
    }
}

/// What the program sees of a signal's disposition.
pub fn seen(found: Action) -> Action {
    if is_ours(&found) { Action::DEFAULT } else { found }
}

/// The default again, if it is still ours.
fn forget_signal() {
    if signal::action_of(WAKES).is_ok_and(|action| is_ours(&action)) {
        // SAFETY: the default is no handler.
        let _ = unsafe { set_action(WAKES, &Action::DEFAULT) };
    }
}

fn own_process() -> u32 {
    // SAFETY: takes nothing.
    unsafe { sys::call(number::GETPID, [0; 6]) as u32 }
}

/// Tells the supervisor why the process ends.
pub fn tell(notice: Notice, failure: StartFailure) {
    dormant().inspect(|dormant| dormant.tell(notice, failure, Errno(0)));
}

/// The dormant process needs an engine from now on. Not in a child of vfork, whose parent has the memory.
pub fn start_engine() {
    let Some(page) = current().filter(|page| page.process.load(Ordering::Relaxed) == own_process()) else {
        return;
    };
    // A handler of the program's would come here again.
    let signals = sys::block_all_signals();
    if page.state.compare_exchange(IS, WAS, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        // SAFETY: written before the state was `IS`; nobody else has changed that to `WAS`.
        let dormant = unsafe { (*page.dormant.get()).assume_init_read() };
        forget_signal();
        if begin_late(Some(&dormant)) {
            dormant.leave();
        }
        // Else its record stays, by which the supervisor knows of it.
    }
    sys::restore_signals(signals);
}

/// A dormant process has forked, and this is the child.
pub fn begin_in_child() {
    forget_signal();
    if !join() {
        begin_late(None);
    }
}

/// A call that changes memory is about to be made.
pub fn before_call(call: usize, arguments: &Arguments) {
    let Some(dormant) = dormant() else { return };
    let is_small = match effect_of(call, arguments) {
        Effect::Nothing => true,
        Effect::Adds(added) if dormant.adds_little(added) => true,
        Effect::Adds(added) => {
            // Nobody starts an engine meanwhile.
            let signals = sys::block_all_signals();
            let may_add = dormant.may_add(added, session_path());
            sys::restore_signals(signals);
            may_add
        }
        Effect::MustBeKnown => false,
    };
    if !is_small {
        start_engine();
    }
}

/// A call that changes what the process may do is about to be made.
pub fn before_change(call: usize, arguments: &Arguments) {
    if is_dormant() && forbids_engines(call, arguments) {
        start_engine();
    }
}

/// What a call means for a dormant process.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Nothing,
    Adds(Added),
    /// /proc doesn't show it to an engine that starts later, or not to every kernel.
    MustBeKnown,
}

const WRITE: usize = raw::PROT_WRITE as usize;

fn effect_of(call: usize, arguments: &Arguments) -> Effect {
    let [address, bytes, third, fourth, ..] = *arguments;
    match call {
        number::MMAP => effect_of_mmap(bytes, third, fourth),
        number::MREMAP => Effect::Adds(Added::Writable(third.saturating_sub(bytes) as u64)),
        number::BRK => {
            Effect::Adds(Added::Writable(address.saturating_sub(hooks::current_break(address)) as u64))
        }
        number::MPROTECT if third & WRITE != 0 => Effect::Adds(Added::Writable(bytes as u64)),
        number::MPROTECT => Effect::Adds(Added::Sealed(bytes as u64)),
        number::MADVISE => match third as u32 {
            raw::MADV_NORMAL..=raw::MADV_DONTNEED
            | raw::MADV_FREE
            | raw::MADV_HUGEPAGE
            | raw::MADV_NOHUGEPAGE
            | raw::MADV_DONTDUMP
            | raw::MADV_DODUMP
            | raw::MADV_COLD..=raw::MADV_POPULATE_WRITE => Effect::Nothing,
            _ => Effect::MustBeKnown,
        },
        number::MUNMAP | number::MUNLOCK | number::MUNLOCKALL | number::PROCESS_MADVISE => Effect::Nothing,
        _ => Effect::MustBeKnown,
    }
}

fn effect_of_mmap(bytes: usize, protection: usize, flags: usize) -> Effect {
    // libc's flag for the stack of a thread: a process with threads isn't left alone.
    const KNOWN: u32 = raw::MAP_STACK | raw::MAP_GROWSDOWN | raw::MAP_LOCKED;
    let is_private = flags & raw::MAP_TYPE as usize == raw::MAP_PRIVATE as usize;
    match (flags as u32 & KNOWN != 0, is_private && protection & WRITE != 0) {
        (true, _) => Effect::MustBeKnown,
        (false, true) => Effect::Adds(Added::Writable(bytes as u64)),
        (false, false) => Effect::Nothing,
    }
}

/// Whether an engine could be refused after a call: the session is out of reach then, or /proc, or there are threads too many. A new
/// user namespace puts them out of reach, too, but a process with a thread of ours may not make one.
fn forbids_engines(call: usize, arguments: &Arguments) -> bool {
    let [first, second, ..] = arguments.map(|argument| argument as u32);
    match call as u32 {
        raw::__NR_unshare => first & raw::CLONE_NEWUSER == 0 && credentials::is_about(call, arguments),
        raw::__NR_setns => second != 0 && second & raw::CLONE_NEWUSER == 0,
        raw::__NR_prctl => first == prctl::PR_SET_DUMPABLE || filters::is_about(call, arguments),
        raw::__NR_setrlimit => limits_engines(first),
        raw::__NR_prlimit64 => arguments[2] != 0 && limits_engines(second),
        _ => credentials::is_about(call, arguments) || filters::is_about(call, arguments),
    }
}

/// Whether an engine needs what this resource limit is about, or a dormant process says it of itself.
const fn limits_engines(resource: u32) -> bool {
    matches!(
        resource,
        raw::RLIMIT_NPROC | raw::RLIMIT_NOFILE | raw::RLIMIT_AS | raw::RLIMIT_DATA | raw::RLIMIT_STACK
    )
}
