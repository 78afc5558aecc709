//! Signals like ours that are *sent* while a handler of ours is at work: the program hears of them when that is done.
//!
//! Our signals stay open in our handlers, because those touch memory that may be out. So a SIGBUS that one thread sends to
//! another can arrive while that serves a fault or deals with a call. Had the program's handler run then, on top of ours, it
//! would wait for ever for a page that the thread itself is just bringing. It is kept instead, and sent again with all that
//! it said, so that it arrives when our handler returns. As the kernel does with a signal that waits, it is kept once.
//!
//! What can't be mended: to the kernel a signal of its own that isn't delivered yet and one of the same number that is sent
//! just then are one, and the first to come is the one that the thread hears of. So a sent one can be lost; a fault happens
//! again; but a SIGSYS that is sent in the moment in which its thread makes a call can have that call left out.
//!
//! A handler of ours that waits (a large write, for room) does so with the program's own mask, and any signal of the program's
//! can end that. It is sent again likewise: its handler runs when ours has returned.
//!
//! Hooks are like handlers here: they leave our signals open, too, and hold the lock of the mappings. They run on stacks of
//! their own, by which it is seen that one was interrupted.
// UNSAFETY: what is kept is its thread's alone.

use super::signals;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use farpage_os::signal::{Context, Info, send_again};

/// Threads that can be inside hooks at once.
pub const HOOKS_MAX: usize = 64;
static HOOKS: [AtWork; HOOKS_MAX] = [const { AtWork::new() }; HOOKS_MAX];
/// Where the first of their stacks begins, and how far they are apart.
static HOOK_STACKS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Hooks run on these stacks, of which there are [`HOOKS_MAX`].
pub fn hooks_run_on(first: usize, apart: usize) {
    HOOK_STACKS[0].store(first, Ordering::Relaxed);
    // Ordering: Release: who sees the distance sees the place.
    HOOK_STACKS[1].store(apart, Ordering::Release);
}

/// Does the work of a hook, on the stack with this number.
pub fn during_hook<T>(stack: usize, work: impl FnOnce() -> T) -> T {
    // Everything runs on top of it.
    HOOKS[stack].during(core::ptr::without_provenance(usize::MAX), work)
}

/// In a fork's child: what was kept for its parent's threads.
pub fn forget_in_hooks() {
    HOOKS.iter().for_each(AtWork::reset);
}

/// The hook that was interrupted with this stack pointer, if it was one.
pub fn hook_at(stack_pointer: usize) -> Option<&'static AtWork> {
    // Ordering: Acquire pairs with the Release in `hooks_run_on`.
    let apart = HOOK_STACKS[1].load(Ordering::Acquire);
    let above = stack_pointer.checked_sub(HOOK_STACKS[0].load(Ordering::Relaxed))?;
    HOOKS.get(above.checked_div(apart)?)
}

/// Whether a handler of ours is at work in one thread, and what was sent to that meanwhile. Part of its room; or the same of
/// a hook.
pub struct AtWork {
    /// Where the context is of the outermost handler of ours that is at work; 0 if none is.
    outermost: AtomicUsize,
    /// A signal's frame is being moved to the program's stack.
    is_entering: AtomicBool,
    /// The handler waits with the program's own mask.
    is_waiting: AtomicBool,
    /// The signal of the program's that came meanwhile; 0 if none did.
    came: AtomicU32,
    kept: [Kept; 2],
}

/// One signal. Zeros are a good value: rooms are made of them.
struct Kept {
    is_kept: AtomicBool,
    info: UnsafeCell<MaybeUninit<Info>>,
}

impl Kept {
    fn is_there(&self) -> bool {
        self.is_kept.load(Ordering::Relaxed)
    }
}

// SAFETY: what is kept is used by the thread alone whose room it is in, or who has claimed the hook's stack.
unsafe impl Sync for AtWork {}

impl AtWork {
    const fn new() -> AtWork {
        let kept = [const {
            Kept { is_kept: AtomicBool::new(false), info: UnsafeCell::new(MaybeUninit::uninit()) }
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
        if self.kept.iter().any(Kept::is_there) {
            // It arrives with the program's own mask, when this handler returns.
            signals::set_blocked(u64::MAX);
            self.send();
        }
        done
    }

    /// Whether a handler is, as another thread sees it.
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

    /// Whether that is what was interrupted.
    pub fn is_entering(&self) -> bool {
        self.is_entering.load(Ordering::Relaxed)
    }

    /// Waits with the program's own mask of signals. Also gives the program's signal that ended it, or that was kept before and
    /// that the program may be waiting for: its handler runs as soon as ours returns, which it must do now.
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

    /// Whether that is what a signal of the program's has interrupted. Then it is sent again, and arrives when our handler returns:
    /// until then it is blocked.
    pub fn puts_off(&self, info: &Info) -> bool {
        let puts_off = self.is_waiting.load(Ordering::Relaxed);
        if puts_off {
            self.came.store(info.signal(), Ordering::Relaxed);
            signals::put_back_once(info.signal());
            send_again(info);
        }
        puts_off
    }

    /// Code of the program's may run, and never come back: it is as if no handler of ours were at work. What was kept is
    /// heard first: the program may wait for what its handler does.
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

    /// Sends what was kept. No handler of ours is at work, so nobody keeps anything meanwhile.
    fn send(&self) {
        for kept in &self.kept {
            // Before the next one can be kept there.
            // SAFETY: this thread's own; no handler of ours is at work.
            let info = unsafe { *kept.info.get() };
            if kept.is_kept.swap(false, Ordering::Relaxed) {
                // SAFETY: what is kept has been written.
                send_again(unsafe { info.assume_init_ref() });
            }
        }
    }

    /// Whether a signal that arrived with this context must wait. Then it is kept.
    pub fn keeps(&self, info: &Info, context: *const Context) -> bool {
        if !info.was_sent() || !self.is_on_top(context) {
            return false;
        }
        let Some(at) = signals::ours().iter().position(|signal| *signal == info.signal()) else {
            return false;
        };
        // What ends the process or isn't heard of needn't wait.
        if !signals::disposition(info.signal()).is_handler() {
            return false;
        }
        let kept = &self.kept[at];
        if !kept.is_kept.swap(true, Ordering::Relaxed) {
            // SAFETY: this thread's own; another one that arrives here meanwhile is dropped, and nobody sends it before this
            // handler and the one below have ended.
            unsafe { *kept.info.get() = MaybeUninit::new(*info) };
        }
        true
    }

    /// Nobody is at work, as far as the room's next user is concerned.
    pub fn reset(&self) {
        self.set_outermost(0);
        self.forget();
    }

    /// Nothing was going on.
    pub fn forget(&self) {
        AtWork::set(&self.is_entering, false);
        AtWork::set(&self.is_waiting, false);
        self.kept.iter().for_each(|kept| kept.is_kept.store(false, Ordering::Relaxed));
    }

    /// Whether a handler with this context runs on top of one of ours. Stacks grow downwards; a handler at the same place or
    /// above the one that we know of says that the program has left that behind.
    fn is_on_top(&self, context: *const Context) -> bool {
        (context as usize) < self.outermost.load(Ordering::Relaxed)
    }

    /// Handlers on top of this thread see it before whatever comes next, and after what came before.
    fn set(place: &AtomicBool, value: bool) {
        compiler_fence(Ordering::SeqCst);
        place.store(value, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// As above.
    fn set_outermost(&self, outermost: usize) {
        compiler_fence(Ordering::SeqCst);
        self.outermost.store(outermost, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }
}
