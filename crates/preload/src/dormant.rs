//! Decides, while the process is dormant, which of its calls need an engine first.
//!
//! Most calls are made unchanged. Three kinds of calls start an engine first. After the first kind the
//! process could have more memory than it has announced. The second has an effect that an engine must know
//! from the beginning. After the third no engine could be started.
//!
//! The work is done on a stack of Farpage's, because the program's stack may be small. Signals are blocked
//! meanwhile: the program's handler could start an engine in the middle of a call, and the engine
//! would not see the call.
// UNSAFETY: the state of the process lies on a page that is wiped in a child, and the code switches stacks.

use crate::hooks;
use crate::init::{begin_late, session_path, thread_block};
use crate::stack::call_on_stack;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_os::errno::returned;
use farpage_os::signal::{self, Action, Context, Info, SIGCANCEL, SIGSETXID, bit, set_action};
use farpage_os::sys::{self, Errno, number};
use farpage_os::{memory, proc};
use farpage_runtime::engine::dormant::{Added, Dormant, WAKES};
use farpage_runtime::guard;
use farpage_runtime::mappings::changes::Arguments;
use farpage_runtime::privileges::{credentials, filters, limits};
use farpage_runtime::session::{Notice, Session, StartFailure};
use linux_raw_sys::{general as raw, ioctl, prctl};

/// The process isn't dormant. The value is zero, because a child reads zero from the wiped page until it has
/// joined by itself.
const NOT: u32 = 0;
const IS: u32 = 1;
/// An engine was started, or can't be started.
const WAS: u32 = 2;

/// State of the process, on a page of its own.
struct Page {
    state: AtomicU32,
    /// Id of the process that the state is about: a child of vfork has the same memory.
    process: AtomicU32,
    dormant: UnsafeCell<MaybeUninit<Dormant>>,
}

static PAGE: AtomicPtr<Page> = AtomicPtr::new(core::ptr::null_mut());

/// Bytes of the stack on which work is done for a dormant process. Starting an engine takes some 6 KiB.
const STACK_BYTES: usize = 32 << 10;

#[repr(C, align(64))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);

// SAFETY: used by one thread at a time, as `IS_BUSY` says.
unsafe impl Sync for Stack {}

static STACK: Stack = Stack(UnsafeCell::new([0; STACK_BYTES]));
static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// Set once the process has entered a user namespace: from there nobody can open the session.
static IS_OUT_OF_REACH: AtomicBool = AtomicBool::new(false);

/// First page and end of the mapping that held the thread's control block when the library was loaded; 0 if
/// that isn't known. The kernel merges this mapping with memory that the program maps beside it.
static BLOCK: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn find_block() {
    let block = PageIndex::of_address(thread_block());
    let _ = proc::for_each_mapping(|mapping| {
        if mapping.pages.contains(block) {
            BLOCK[0].store(mapping.pages.start.0, Ordering::Relaxed);
            BLOCK[1].store(mapping.pages.end.0, Ordering::Relaxed);
        }
    });
}

/// Returns those pages; none if they aren't known.
pub fn block_pages() -> Option<PageRange> {
    pages_in(&BLOCK)
}

/// First page and end of the last mapping made for a stack while the process was dormant; 0 if none was made.
/// From glibc 2.42 on a small stack of a thread is mapped like that of posix_spawn.
static NEW_STACK: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Returns those pages, which may hold a thread's stack or anything else by now.
pub fn new_stack_pages() -> Option<PageRange> {
    pages_in(&NEW_STACK)
}

fn pages_in(bounds: &[AtomicU64; 2]) -> Option<PageRange> {
    let [start, end] = bounds.each_ref().map(|bound| PageIndex(bound.load(Ordering::Relaxed)));
    (end.0 > 0).then(|| PageRange::new(start, end))
}

fn note_stack([_, bytes, _, flags, ..]: &Arguments, result: isize) {
    if *flags as u32 & raw::MAP_STACK != 0
        && let Ok(address) = sys::check(result)
    {
        let pages = PageRange::covering(address, *bytes);
        NEW_STACK[0].store(pages.start.0, Ordering::Relaxed);
        NEW_STACK[1].store(pages.end.0, Ordering::Relaxed);
    }
}

fn page() -> Option<&'static Page> {
    // SAFETY: null, or placed for good.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

fn current() -> Option<&'static Page> {
    // Ordering: Acquire pairs with the Release in `join`.
    page().filter(|page| page.state.load(Ordering::Acquire) == IS)
}

/// Returns what this process has announced of itself, and where; none if it isn't dormant.
fn dormant() -> Option<&'static Dormant> {
    // SAFETY: written before the state was, and taken by `start` only after it has changed the state.
    current().map(|page| unsafe { (*page.dormant.get()).assume_init_ref() })
}

/// Returns the session of a dormant process.
pub fn session() -> Option<&'static Session> {
    dormant().map(Dormant::session)
}

/// Whether this process is dormant, or its parent by vfork is.
pub fn is_dormant() -> bool {
    current().is_some()
}

/// Whether the process has put the session out of its reach.
pub fn is_out_of_reach() -> bool {
    IS_OUT_OF_REACH.load(Ordering::Relaxed)
}

/// Signals that no program can block through libc, because libc's functions leave them out of each mask. A
/// mask that has both is libc's own. From glibc 2.41 on, `fork` blocks every signal until it returns.
const BLOCKED_BY_LIBC_ALONE: u64 = bit(SIGCANCEL) | bit(SIGSETXID);

/// Whether the program blocks the wake-up signal, as far as the thread's mask tells. The supervisor looks at
/// the mask again before it sends the signal.
const fn is_deaf(blocked: u64) -> bool {
    blocked & bit(WAKES) != 0 && blocked & BLOCKED_BY_LIBC_ALONE != BLOCKED_BY_LIBC_ALONE
}

/// Joins the run without an engine. Returns false if that can't be. The caller has blocked all signals;
/// `blocked` has those that were blocked before.
pub fn join(blocked: u64) -> bool {
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
    // A program that was started with the signal ignored, or that blocks the signal, can't be
    // asked for an engine.
    let hears = matches!(signal::action_of(WAKES), Ok(Action { handler: 0, .. })) && !is_deaf(blocked);
    // Other threads would make calls beside the thread that starts an engine, and an engine must
    // know their stacks.
    if !hears || proc::count_threads() != Ok(1) {
        return false;
    }
    if block_pages().is_none() {
        find_block();
    }
    if block_pages().is_none() {
        return false;
    }
    let (Some(page), Some(dormant)) = (page(), Dormant::join(session_path())) else { return false };
    // The handler runs on the thread's present stack. A program's alternate stack may be too small even
    // for the kernel's part.
    let action = Action::of(on_wake, 0).on_any_stack();
    // SAFETY: a handler of Farpage's, which does nothing before the state is `IS`.
    if unsafe { set_action(WAKES, &action) }.is_err() {
        dormant.leave();
        return false;
    }
    // SAFETY: the state says that nobody reads it.
    unsafe { (*page.dormant.get()).write(dormant) };
    page.process.store(own_process(), Ordering::Relaxed);
    // Ordering: Release pairs with the Acquire in `current` and publishes `dormant` and the process id.
    page.state.store(IS, Ordering::Release);
    true
}

unsafe extern "C" fn on_wake(_: i32, _: *mut Info, context: *mut Context) {
    // SAFETY: the context is the kernel's own, for this call.
    guard::handle_and_make_call_again(WAKES, unsafe { &mut *context }, start_engine);
}

fn is_ours(action: &Action) -> bool {
    action.handler == on_wake as *const () as usize
}

/// Starts an engine before the program changes the disposition of the wake-up signal.
pub fn before_action(signal: u32, is_new: bool) {
    if signal == WAKES && is_new {
        start_engine();
    }
}

/// Returns a signal's disposition as the program sees it: the default in the place of our handler.
pub fn seen(found: Action) -> Action {
    if is_ours(&found) { Action::DEFAULT } else { found }
}

/// Restores the signal's default disposition, if the present one is still ours.
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

// ---- on a stack of Farpage's ---------------------------------------------------------------------

/// Work for `perform`.
#[derive(Clone, Copy)]
enum Task {
    Start,
    /// A system call that changes memory.
    Call(usize, Arguments),
    /// A fork, with the arguments of clone(2).
    Fork(Arguments),
}

struct Work {
    task: Task,
    /// Signals that were blocked before.
    blocked: u64,
    /// The kernel's word; none if the call is still to be made, because the process isn't dormant any more.
    word: Option<isize>,
}

/// Does a task on our stack, with signals blocked. Works in a child, too.
fn perform(task: Task) -> Option<isize> {
    let signals = sys::block_all_signals();
    while IS_BUSY.swap(true, Ordering::Acquire) {
        rustix::thread::sched_yield();
    }
    let mut work = Work { task, blocked: signals.bits(), word: None };
    // SAFETY: the stack is this thread's alone, as `IS_BUSY` says, and aligned; `run` expects a `Work`.
    unsafe {
        let top = STACK.0.get().cast::<u8>().add(STACK_BYTES);
        call_on_stack((&raw mut work).cast(), top, run);
    }
    IS_BUSY.store(false, Ordering::Release);
    sys::restore_signals(signals);
    work.word
}

extern "C" fn run(work: *mut u8) {
    // SAFETY: `perform` passes its own `Work`.
    let work = unsafe { &mut *work.cast::<Work>() };
    work.word = match work.task {
        Task::Start => {
            start();
            None
        }
        // The signal may have started an engine since the caller looked. The engine must know of the call.
        Task::Call(call, arguments) => is_dormant().then(|| pass(call, &arguments)).flatten(),
        Task::Fork(arguments) => fork(arguments, work.blocked),
    };
}

/// Starts an engine. Does nothing in a child of vfork, because the memory is its parent's.
fn start() {
    let Some(page) = current().filter(|page| page.process.load(Ordering::Relaxed) == own_process()) else {
        return;
    };
    if page.state.compare_exchange(IS, WAS, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    // SAFETY: written before the state was `IS`; nobody else has changed that to `WAS`.
    let dormant = unsafe { (*page.dormant.get()).assume_init_read() };
    forget_signal();
    if begin_late(Some(&dormant)) {
        dormant.leave();
    } else {
        end_with_the_supervisor(&dormant);
    }
    // Without an engine the record stays: by it the supervisor knows of the process.
}

/// Ends the process if the run's supervisor was killed. Mostly the kernel has seen to that already.
fn end_with_the_supervisor(dormant: &Dormant) {
    const SIGKILL: usize = raw::SIGKILL as usize;
    if dormant.was_supervisor_killed() {
        // SAFETY: takes no pointers; the process is this one.
        unsafe { sys::call(number::KILL, [own_process() as usize, SIGKILL, 0, 0, 0, 0]) };
    }
}

/// Makes a call that changes memory, if no engine is needed for it. Otherwise starts an engine and returns
/// none: the caller makes the call.
fn pass(call: usize, arguments: &Arguments) -> Option<isize> {
    let is_small = match effect_of(call, arguments) {
        Effect::Nothing => true,
        Effect::FreesLater => return Some(free_now(*arguments)),
        Effect::Adds(added) => dormant()
            .is_some_and(|dormant| dormant.adds_little(added) || dormant.may_add(added, session_path())),
        Effect::MustBeKnown => false,
    };
    if !is_small {
        start();
    }
    // A child of vfork can't have an engine, so its call is made anyway.
    let is_left_alone = is_small || is_dormant();
    // SAFETY: the program's own call, unchanged.
    let result = is_left_alone.then(|| unsafe { sys::call(call, *arguments) });
    if call == number::MMAP {
        result.inspect(|result| note_stack(arguments, *result));
    }
    result
}

/// Frees pages at once that the program allows the kernel to free later (MADV_FREE). The kernel stops at the
/// first page of a file and answers EINVAL. It has freed the pages before that one.
fn free_now([start, bytes, ..]: Arguments) -> isize {
    let advise = |start, bytes, advice: u32| {
        // SAFETY: the program's own call. MADV_DONTNEED follows only where the kernel has taken the pages for
        // private memory that the program doesn't need.
        unsafe { sys::call(number::MADVISE, [start, bytes, advice as usize, 0, 0, 0]) }
    };
    let answer = advise(start, bytes, raw::MADV_FREE);
    // The range may have holes. The kernel says so, and frees the rest.
    if answer == 0 || answer == returned::ENOMEM {
        advise(start, bytes, raw::MADV_DONTNEED);
        return answer;
    }
    // The kernel refuses a range that isn't aligned or wraps, and frees nothing then.
    let end = bytes.checked_next_multiple_of(PAGE_BYTES).and_then(|bytes| start.checked_add(bytes));
    let Some(end) = end.filter(|_| start.is_multiple_of(PAGE_BYTES)) else { return answer };
    // Looks for the first refused page by halves. A range with holes can have very many pages.
    let all = (end - start) / PAGE_BYTES;
    let (mut at, mut pages) = (start, all.checked_ilog2().map_or(0, |log| 1 << log));
    while pages > 0 {
        let bytes = pages * PAGE_BYTES;
        if bytes <= end - at && [0, returned::ENOMEM].contains(&advise(at, bytes, raw::MADV_FREE)) {
            advise(at, bytes, raw::MADV_DONTNEED);
            at += bytes;
        }
        pages /= 2;
    }
    answer
}

fn fork(arguments: Arguments, blocked: u64) -> Option<isize> {
    let dormant = dormant()?;
    end_with_the_supervisor(dormant);
    // SAFETY: the program's own call, unchanged. The child has a copy of this stack.
    let result = unsafe { sys::call(number::CLONE, arguments) };
    if result == 0 {
        forget_signal();
        if !join(blocked) {
            begin_late(None);
        }
    } else if result > 0 && is_out_of_reach() {
        dormant.has_forked_outside(result as u32);
    }
    Some(result)
}

// ---- what the program does -----------------------------------------------------------------------------

/// Starts an engine in a dormant process.
pub fn start_engine() {
    if is_dormant() {
        perform(Task::Start);
    }
}

/// Makes a call of a dormant process that changes memory. Returns none if the process isn't dormant: the
/// caller makes the call.
pub fn call(call: usize, arguments: Arguments) -> Option<isize> {
    if is_dormant() { perform(Task::Call(call, arguments)) } else { None }
}

/// Makes a fork of a dormant process. None if the process isn't dormant.
pub fn forked(arguments: Arguments) -> Option<isize> {
    if is_dormant() { perform(Task::Fork(arguments)) } else { None }
}

/// Ends a dormant process whose supervisor was killed, before the process runs another program.
pub fn before_exec() {
    dormant().inspect(|dormant| end_with_the_supervisor(dormant));
}

/// Prepares for a call that changes what the process may do. Starts an engine if none could be
/// started after the call.
pub fn before_change(call: usize, arguments: &Arguments) {
    if !is_dormant() {
        return;
    }
    if enters_user_namespace(call, arguments) {
        IS_OUT_OF_REACH.store(true, Ordering::Relaxed);
    } else if forbids_engines(call, arguments) {
        start_engine();
    }
}

/// Meaning of a call for a dormant process.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Nothing,
    Adds(Added),
    /// The kernel may drop the pages at any later time. An engine that starts later would take them for
    /// pages that stay.
    FreesLater,
    /// An engine must know the effect from the beginning: an engine that starts later doesn't see
    /// it in /proc.
    MustBeKnown,
}

const WRITE: usize = raw::PROT_WRITE as usize;

fn effect_of(call: usize, arguments: &Arguments) -> Effect {
    let [address, bytes, third, fourth, ..] = *arguments;
    match call {
        number::MMAP => effect_of_mmap(bytes, third, fourth),
        number::MREMAP => {
            let keeps = fourth & raw::MREMAP_DONTUNMAP as usize != 0;
            Effect::Adds(Added::Writable(third.saturating_sub(if keeps { 0 } else { bytes }) as u64))
        }
        number::BRK => {
            Effect::Adds(Added::Writable(address.saturating_sub(hooks::current_break(address)) as u64))
        }
        number::MPROTECT if third & WRITE != 0 => Effect::Adds(Added::Writable(bytes as u64)),
        number::MPROTECT => Effect::Adds(Added::Sealed(bytes as u64)),
        number::MADVISE if third as u32 == raw::MADV_FREE => Effect::FreesLater,
        number::MADVISE => effect_of_advice(third),
        number::PROCESS_MADVISE => effect_of_advice(fourth),
        number::MUNMAP | number::MUNLOCK | number::MUNLOCKALL | number::SHMAT => Effect::Nothing,
        _ => Effect::MustBeKnown,
    }
}

const fn effect_of_advice(advice: usize) -> Effect {
    const NEGATIVE: u32 = 1 << 31;
    match advice as u32 {
        raw::MADV_NORMAL..=raw::MADV_DONTNEED
        // An engine that starts later sees these properties in /proc, and leaves the memory alone.
        | raw::MADV_DONTFORK
        | raw::MADV_DOFORK
        | raw::MADV_WIPEONFORK
        | raw::MADV_KEEPONFORK
        | raw::MADV_HUGEPAGE
        | raw::MADV_NOHUGEPAGE
        | raw::MADV_DONTDUMP
        | raw::MADV_DODUMP
        | raw::MADV_COLD..=raw::MADV_POPULATE_WRITE => Effect::Nothing,
        // No kernel accepts negative advice. BoringSSL gives it to check for that.
        NEGATIVE.. => Effect::Nothing,
        _ => Effect::MustBeKnown,
    }
}

/// Most bytes of a writable stack mapping that needs no engine. libc maps the stack of a thread
/// inaccessible at first. For the moment in which libc runs another program (posix_spawn, system), it maps
/// a small accessible stack.
const SPAWN_BYTES_MAX: usize = 256 << 10;

fn effect_of_mmap(bytes: usize, protection: usize, flags: usize) -> Effect {
    let has = |flag: u32| flags as u32 & flag != 0;
    let is_writable = protection & WRITE != 0;
    let is_stack = has(raw::MAP_STACK) && !(is_writable && bytes <= SPAWN_BYTES_MAX);
    if is_stack || has(raw::MAP_GROWSDOWN | raw::MAP_LOCKED) {
        return Effect::MustBeKnown;
    }
    match flags as u32 & raw::MAP_TYPE {
        raw::MAP_PRIVATE if is_writable => Effect::Adds(Added::Writable(bytes as u64)),
        _ => Effect::Nothing,
    }
}

/// Whether the process is about to enter a user namespace. The kernel refuses that call to a process with a
/// second thread. After the call no engine can be started in the process.
fn enters_user_namespace(call: usize, arguments: &Arguments) -> bool {
    let [first, second, ..] = arguments.map(|argument| argument as u32);
    // SAFETY: takes no pointers.
    let kind = || unsafe {
        sys::call(raw::__NR_ioctl as usize, [arguments[0], ioctl::NS_GET_NSTYPE as usize, 0, 0, 0, 0])
    };
    match call as u32 {
        raw::__NR_unshare => first & raw::CLONE_NEWUSER != 0,
        raw::__NR_setns if second == 0 => kind() == raw::CLONE_NEWUSER as isize,
        raw::__NR_setns => second & raw::CLONE_NEWUSER != 0,
        _ => false,
    }
}

/// Whether no engine could be started after a call. The session or /proc would be out of reach, or the kernel
/// would refuse a thread.
fn forbids_engines(call: usize, arguments: &Arguments) -> bool {
    let first = arguments[0] as u32;
    match call as u32 {
        // The kernel makes no thread in a process whose children go to another pid namespace.
        raw::__NR_unshare => first & raw::CLONE_NEWPID != 0 || credentials::is_about(call, arguments),
        raw::__NR_prctl => first == prctl::PR_SET_DUMPABLE || filters::is_about(call, arguments),
        // The process has announced how large its stack may become.
        raw::__NR_setrlimit | raw::__NR_prlimit64 => {
            limits::is_about(call, arguments) || limits::set_by(call, arguments) == Some(raw::RLIMIT_STACK)
        }
        // The program bypasses libc's sigaction, and may change the disposition that it finds.
        raw::__NR_rt_sigaction => first == WAKES,
        _ => credentials::is_about(call, arguments) || filters::is_about(call, arguments),
    }
}
