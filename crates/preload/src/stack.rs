//! Runs hooks on stacks of Farpage's.
//!
//! A program's stack may itself be managed memory (a coroutine's, say). Suppose a hook holds the map lock and
//! touches an evicted page of its own stack. The hook would wait for a handler thread, and the handler thread
//! for the lock. So a hook puts its arguments into a slot of Farpage's, moves the stack pointer there, and
//! only then takes the lock. Signals are blocked meanwhile: a handler of the program could call a hook again,
//! or never return.
// UNSAFETY: changing stacks is assembly.

use core::arch::naked_asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use farpage_core::units::PageRange;
use farpage_os::memory;
use farpage_os::sys::{self, Errno};
use farpage_runtime::engine::Engine;
use farpage_runtime::engine::retire;
use farpage_runtime::guard::{self, StackInUse};
use farpage_runtime::mappings::changes::{self, Arguments};
use farpage_runtime::mappings::locked;
use farpage_runtime::privileges::credentials::{self, Whose};
use farpage_runtime::privileges::filters;
use farpage_runtime::privileges::limits;

/// Threads that can be inside hooks at once. Further threads wait.
const SLOTS: usize = guard::HOOKS_MAX;
/// Bytes of a hook's stack. The deepest hook makes a worker, which takes some 20 KiB.
const STACK_BYTES: usize = 32 * 1024;

/// A task, and the stack on which it is done.
#[repr(C, align(4096))]
struct Slot {
    stack: UnsafeCell<[u8; STACK_BYTES]>,
    work: UnsafeCell<Work>,
}

#[derive(Clone, Copy)]
pub enum Task {
    /// A system call that changes memory.
    Call(usize, Arguments),
    /// A fork, with the arguments of clone(2), and a place on the program's stack.
    Fork([usize; 6], usize),
    /// Pages that stay in memory from now on.
    Hold(PageRange),
    /// A call that asks for a filter of seccomp.
    Filter(usize, Arguments),
    /// A call that is about to limit a resource that an engine needs.
    Limit(usize, Arguments),
    /// A call that has changed what the program may do.
    Follow(usize, Arguments, Whose),
}

/// Answer of a task whose call is still to be made. The kernel never gives this answer.
pub const TO_BE_MADE: isize = isize::MIN;

struct Work {
    engine: Option<&'static Engine>,
    task: Task,
    /// The alternate signal stack that the thread is on. The thread has none during the task.
    in_use: Option<StackInUse>,
    result: isize,
}

static POOL: AtomicPtr<Slot> = AtomicPtr::new(core::ptr::null_mut());
/// Bits of the slots that are in use.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Reserves the stacks, unless they are inherited. Must run before there is an engine.
pub fn prepare() -> Result<(), Errno> {
    if !POOL.load(Ordering::Relaxed).is_null() {
        return Ok(());
    }
    let base = memory::reserve(SLOTS * size_of::<Slot>())?;
    guard::hooks_run_on(base as usize, size_of::<Slot>());
    POOL.store(base.cast(), Ordering::Release);
    Ok(())
}

/// Forgets the parent's other threads. Runs in a child, on one of these stacks: no other thread
/// is in a hook here.
pub fn only_this_one() {
    let here = 0_u8;
    let from_base = (&raw const here as usize).wrapping_sub(POOL.load(Ordering::Relaxed) as usize);
    IN_USE.store(1 << (from_base / size_of::<Slot>()), Ordering::Relaxed);
    guard::forget_in_hooks();
    retire::only_this_hook();
}

/// Makes a call through the engine. Returns the kernel's word.
pub fn on_own_stack(engine: &'static Engine, call: usize, arguments: Arguments) -> isize {
    perform(engine, Task::Call(call, arguments))
}

/// Does a task on a stack of Farpage's, with signals blocked.
pub fn perform(engine: &'static Engine, task: Task) -> isize {
    retire::hook_begins();
    if engine.has_ended() {
        retire::hook_ends();
        return perform_without(task);
    }
    let before = sys::block_signals();
    let at = claim();
    // SAFETY: `claim` returns numbers below SLOTS, and the pool has SLOTS slots.
    let slot = unsafe { &*POOL.load(Ordering::Acquire).add(at) };
    // SAFETY: the claimed slot is this thread's alone until `IN_USE` says otherwise.
    let result = guard::during_hook(at, || unsafe {
        let in_use = guard::stack_in_use(&raw const at as usize);
        *slot.work.get() = Work { engine: Some(engine), task, in_use, result: 0 };
        call_on_stack(slot.work.get().cast(), slot.stack.get().cast::<u8>().add(STACK_BYTES), run);
        (*slot.work.get()).result
    });
    // Ordering: Release pairs with the Acquire in `claim`: our use of the slot is over before the next one's.
    IN_USE.fetch_and(!(1 << at), Ordering::Release);
    guard::end_hook(before);
    retire::hook_ends();
    result
}

/// Does a task where the engine has just ended.
fn perform_without(task: Task) -> isize {
    match task {
        // SAFETY: the program's own call, unchanged.
        Task::Call(call, arguments) => unsafe { sys::call(call, arguments) },
        // SAFETY: likewise.
        Task::Fork(arguments, _) => unsafe { sys::call(sys::number::CLONE, arguments) },
        Task::Filter(..) => TO_BE_MADE,
        Task::Hold(_) | Task::Limit(..) | Task::Follow(..) => 0,
    }
}

fn claim() -> usize {
    loop {
        let in_use = IN_USE.load(Ordering::Relaxed);
        let at = in_use.trailing_ones() as usize;
        if at >= SLOTS {
            rustix::thread::sched_yield();
            continue;
        }
        // Ordering: Acquire pairs with the Release of the slot's last user.
        let claimed =
            IN_USE.compare_exchange_weak(in_use, in_use | 1 << at, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_ok() {
            return at;
        }
    }
}

/// Calls `run(work)` with the stack pointer at `top`.
///
/// # Safety
/// `top` is 16-byte aligned, and the memory below it suffices for `run`. `run` may be given `work`.
#[unsafe(naked)]
pub unsafe extern "C" fn call_on_stack(work: *mut u8, top: *mut u8, run: extern "C" fn(*mut u8)) {
    naked_asm!("push rbp", "mov rbp, rsp", "mov rsp, rsi", "call rdx", "mov rsp, rbp", "pop rbp", "ret")
}

extern "C" fn run(work: *mut u8) {
    // SAFETY: `work` lies in the slot that `perform` has claimed and filled.
    let work = unsafe { &mut *work.cast::<Work>() };
    let Some(engine) = work.engine else { return };
    work.result = guard::without_stack(work.in_use, || match work.task {
        Task::Call(call, arguments) => changes::by_hook(engine, call, arguments),
        Task::Fork(arguments, stack_pointer) => crate::fork::make(engine, arguments, stack_pointer),
        Task::Hold(range) => {
            locked::hold(engine, range);
            0
        }
        Task::Filter(call, arguments) => filters::install(engine, call, &arguments).unwrap_or(TO_BE_MADE),
        Task::Limit(call, arguments) => {
            limits::prepare(engine, call, &arguments);
            0
        }
        Task::Follow(call, arguments, whose) => {
            credentials::follow(engine, call, &arguments, whose);
            0
        }
    });
}
