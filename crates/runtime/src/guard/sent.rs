//! Signals that are *sent* with the number of one of Farpage's two signals, while a handler of Farpage's is
//! at work. The program hears of these signals when the handler is done.
//!
//! Farpage's two signals stay open in its handlers, because the handlers touch memory that may be out. A
//! SIGBUS that one thread sends to another can therefore arrive while the other serves a fault or deals with
//! a call. The program's handler must not run on top of Farpage's then. A touch of the page that its own
//! thread is bringing in would wait for ever. The signal is therefore kept, and sent again with all that it
//! said, so it arrives when Farpage's handler returns. As in the kernel, a signal that waits is kept once.
//!
//! There is a case that can't be mended. The kernel merges a signal of its own that isn't delivered yet with
//! one of the same number that is sent just then. The thread hears only of the first to come. A sent signal
//! can be lost in this way. A lost fault happens again. But if a SIGSYS is sent at the moment at which its
//! thread makes a call, that call may never be made.
//!
//! A handler of Farpage's that waits (a large write, for free space) does so with the program's own mask. Any
//! signal of the program's can end the wait. The signal is sent again, too, and its handler runs when
//! Farpage's has returned.
//!
//! Hooks are like handlers here: they leave both signals open, and hold the lock of the mappings. Hooks run
//! on stacks of their own, by which an interrupted hook is recognized.
// UNSAFETY: the kept signals are their thread's alone.

use super::signals;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use farpage_os::signal::{Context, Info, send_again};

/// Threads that can be inside hooks at once.
pub const HOOKS_MAX: usize = 64;
static HOOKS: [AtWork; HOOKS_MAX] = [const { AtWork::new() }; HOOKS_MAX];
/// Address where the first hook stack begins, and bytes from one stack to the next.
static HOOK_STACKS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Notes where the stacks of hooks are. There are [`HOOKS_MAX`] of them.
pub fn hooks_run_on(first: usize, apart: usize) {
    HOOK_STACKS[0].store(first, Ordering::Relaxed);
    // Ordering: Release: a thread that sees the distance sees the address.
    HOOK_STACKS[1].store(apart, Ordering::Release);
}

/// Does the work of a hook, on the stack with this number.
pub fn during_hook<T>(stack: usize, work: impl FnOnce() -> T) -> T {
    // The highest address stands for the hook's context, so every handler counts as on top of the hook.
    HOOKS[stack].during(core::ptr::without_provenance(usize::MAX), work)
}

/// Forgets, in a fork's child, the signals that were kept for its parent's threads.
pub fn forget_in_hooks() {
    HOOKS.iter().for_each(AtWork::reset);
}

/// Returns the hook that was interrupted with this stack pointer, if it was one.
pub fn hook_at(stack_pointer: usize) -> Option<&'static AtWork> {
    // Ordering: Acquire pairs with the Release in `hooks_run_on`.
    let apart = HOOK_STACKS[1].load(Ordering::Acquire);
    let above = stack_pointer.checked_sub(HOOK_STACKS[0].load(Ordering::Relaxed))?;
    HOOKS.get(above.checked_div(apart)?)
}

/// Whether a handler of Farpage's is at work in one thread, and the signals that were sent to the thread
/// meanwhile. Part of the thread's room. Each hook's stack has one, too.
pub struct AtWork {
    /// Address of the context of the outermost handler of Farpage's that is at work; 0 if none is.
    outermost: AtomicUsize,
    /// A signal's frame is being moved to the program's stack.
    is_entering: AtomicBool,
    /// The handler waits with the program's own mask.
    is_waiting: AtomicBool,
    /// The program's signal that came during the wait; 0 if none did.
    came: AtomicU32,
    kept: [PendingSignal; 2],
}

/// A signal that may be kept. Zeros are a valid value, because rooms are made of them.
struct PendingSignal {
    is_kept: AtomicBool,
    info: UnsafeCell<MaybeUninit<Info>>,
}

impl PendingSignal {
    fn is_there(&self) -> bool {
        self.is_kept.load(Ordering::Relaxed)
    }
}

// SAFETY: kept signals are used by one thread alone: the room's thread, or the thread that has claimed the
// hook's stack.
unsafe impl Sync for AtWork {}

impl AtWork {
    const fn new() -> AtWork {
        let kept = [const {
            PendingSignal { is_kept: AtomicBool::new(false), info: UnsafeCell::new(MaybeUninit::uninit()) }
        }; 2];
        AtWork {
            outermost: AtomicUsize::new(0),
            is_entering: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
            came: AtomicU32::new(0),
            kept,
        }
    }

    /// Does the work of a handler that was given this context.
    pub fn during<T>(&self, context: *const Context, work: impl FnOnce() -> T) -> T {
        if self.is_on_top(context) {
            return work();
        }
        self.set_outermost(context as usize);
        let done = work();
        self.set_outermost(0);
        if self.kept.iter().any(PendingSignal::is_there) {
            // Kept signals arrive with the program's own mask, when this handler returns.
            signals::set_blocked(u64::MAX);
            self.send();
        }
        done
    }

    /// Returns whether a handler is at work, as another thread sees it.
    pub fn is_at_work(&self) -> bool {
        self.outermost.load(Ordering::SeqCst) != 0
    }

    /// Moves a signal's frame to the program's stack.
    pub fn entering<T>(&self, copy: impl FnOnce() -> T) -> T {
        AtWork::set(&self.is_entering, true);
        let copied = copy();
        AtWork::set(&self.is_entering, false);
        copied
    }

    /// Returns whether a frame was just being moved.
    pub fn is_entering(&self) -> bool {
        self.is_entering.load(Ordering::Relaxed)
    }

    /// Waits with the program's own mask of signals. Also returns the program's signal that ended the wait.
    /// If a signal was kept before, there is no wait, because the program may be waiting for that signal. The
    /// handler of the returned signal runs as soon as Farpage's returns, which must happen now.
    pub fn waiting<T>(&self, wait: impl FnOnce() -> T) -> (Option<T>, Option<u32>) {
        let kept = || signals::ours().into_iter().zip(&self.kept).find(|(_, kept)| kept.is_there());
        if let Some((signal, _)) = kept() {
            return (None, Some(signal));
        }
        self.came.store(0, Ordering::Relaxed);
        AtWork::set(&self.is_waiting, true);
        let waited = wait();
        AtWork::set(&self.is_waiting, false);
        let came = Some(self.came.load(Ordering::Relaxed)).filter(|signal| *signal != 0);
        (Some(waited), came.or(kept().map(|(signal, _)| signal)))
    }

    /// Returns whether a signal of the program's has interrupted a wait. Then the signal is sent again, stays
    /// blocked until Farpage's handler returns, and arrives then.
    pub fn puts_off(&self, info: &Info) -> bool {
        let puts_off = self.is_waiting.load(Ordering::Relaxed);
        if puts_off {
            self.came.store(info.signal(), Ordering::Relaxed);
            signals::put_back_once(info.signal());
            send_again(info);
        }
        puts_off
    }

    /// Runs code of the program's, which may never return, as if no handler of Farpage's were at work.
    /// Kept signals are sent first, because the program may wait for what their handlers do.
    pub fn aside<T>(&self, of_the_program: impl FnOnce() -> T) -> T {
        let outermost = self.outermost.load(Ordering::Relaxed);
        self.set_outermost(0);
        if outermost != 0 {
            self.send();
        }
        let done = of_the_program();
        self.set_outermost(outermost);
        done
    }

    /// Sends the kept signals. No handler of Farpage's is at work, so none is kept meanwhile.
    fn send(&self) {
        for kept in &self.kept {
            // Read before the next signal can be kept in the same place.
            // SAFETY: the place is this thread's own, and no handler of Farpage's is at work.
            let info = unsafe { *kept.info.get() };
            if kept.is_kept.swap(false, Ordering::Relaxed) {
                // SAFETY: a kept signal has been written.
                send_again(unsafe { info.assume_init_ref() });
            }
        }
    }

    /// Returns whether a signal that arrived with this context must wait. If so, the signal is kept.
    pub fn keeps(&self, info: &Info, context: *const Context) -> bool {
        if !info.was_sent() || !self.is_on_top(context) {
            return false;
        }
        let Some(at) = signals::ours().iter().position(|signal| *signal == info.signal()) else {
            return false;
        };
        // A signal needn't wait if it ends the process, or if the program doesn't hear of it.
        if !signals::disposition(info.signal()).is_handler() {
            return false;
        }
        let kept = &self.kept[at];
        if !kept.is_kept.swap(true, Ordering::Relaxed) {
            // SAFETY: the place is this thread's own. Another signal that arrives here meanwhile is dropped.
            // Nobody sends the kept signal before this handler and the one below have ended.
            unsafe { *kept.info.get() = MaybeUninit::new(*info) };
        }
        true
    }

    /// Makes the state that of no handler at work, for the room's next user.
    pub fn reset(&self) {
        self.set_outermost(0);
        self.forget();
    }

    /// Makes the state that of a thread that neither waits nor moves a frame nor has kept signals.
    pub fn forget(&self) {
        AtWork::set(&self.is_entering, false);
        AtWork::set(&self.is_waiting, false);
        self.kept.iter().for_each(|kept| kept.is_kept.store(false, Ordering::Relaxed));
    }

    /// Returns whether a handler with this context runs on top of one of Farpage's. Stacks grow downwards. A
    /// handler at the same place as the outermost known one, or above it, shows that the program has left the
    /// known one behind.
    fn is_on_top(&self, context: *const Context) -> bool {
        (context as usize) < self.outermost.load(Ordering::Relaxed)
    }

    /// Sets a flag. Handlers on top of this thread see the change before whatever comes next, and after what
    /// came before.
    fn set(place: &AtomicBool, value: bool) {
        compiler_fence(Ordering::SeqCst);
        place.store(value, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Sets `outermost`, with the same order as in `set`.
    fn set_outermost(&self, outermost: usize) {
        compiler_fence(Ordering::SeqCst);
        self.outermost.store(outermost, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }
}
