//! The program makes a copy of itself.
//!
//! A child must see every byte as of the fork. While nothing is evicted it does, by the kernel's own copy on
//! write, and it gets an engine of its own. While pages are out, the pool and the areas are the parent's
//! alone, so such a fork is refused with ENOMEM. vfork and posix_spawn need nothing: their children use the
//! parent's memory, and the parent's handlers serve it.
//!
//! A child that was made behind our back (a bare clone) finds managed memory missing, not zeroed: registered
//! ranges are kept from children except during a fork that we have allowed.

// UNSAFETY: the snapshot is written by one fork and read by its child, a different process.

use crate::engine::Engine;
use crate::session::Notice;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use farpage_core::stats::Counter;
use farpage_core::sync;
use farpage_core::table::ranges::Range;

/// One fork at a time, and what its child must know.
pub struct ForkGate {
    under_way: AtomicU32,
    snapshot: UnsafeCell<&'static mut [Range]>,
    count: AtomicUsize,
}

// SAFETY: `snapshot` is written only by the thread that has set `under_way`, and read only in the child.
unsafe impl Sync for ForkGate {}

impl ForkGate {
    /// No fork is under way. `list` is room for every range.
    pub const fn new(list: &'static mut [Range]) -> ForkGate {
        ForkGate { under_way: AtomicU32::new(0), snapshot: UnsafeCell::new(list), count: AtomicUsize::new(0) }
    }

    /// Whether a thread is between [`prepare`] and [`parent`].
    pub fn is_under_way(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `end`: who sees that a fork is over sees the managed memory
        // hidden from children again.
        self.under_way.load(Ordering::Acquire) != 0
    }

    /// The ranges as of the fork. In the child.
    pub fn snapshot(&self) -> &[Range] {
        // Ordering: Acquire pairs with the Release in `prepare`: the count is that of the list written before it.
        // SAFETY: the child has one thread, and its copy of the list was complete before the fork.
        let list: &[Range] = unsafe { &*self.snapshot.get() };
        &list[..self.count.load(Ordering::Acquire)]
    }

    fn begin(&self) {
        // Ordering: Acquire and Release order one fork's use of the snapshot before the next one's.
        while self.under_way.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            sync::wait(&self.under_way, 1);
        }
    }

    fn end(&self) {
        // Ordering: Release pairs with the Acquire in `begin` and in `is_under_way`.
        self.under_way.store(0, Ordering::Release);
        sync::wake_all(&self.under_way);
    }
}

/// Before a fork: makes sure that nothing is evicted and nothing will be. False if it must be refused.
pub fn prepare(engine: &Engine) -> bool {
    engine.fork.begin();
    let _exclusive = engine.map.exclusive();
    let evicted = engine.pager.evicted();
    if evicted > 0 {
        // A mapping that was registered after `begin` was left visible for the child that there won't be.
        engine.show_to_children(false);
        engine.fork.end();
        engine.pager.stats().count(Counter::ForkRefused);
        engine.record.notice(Notice::ForkRefused, evicted);
        return false;
    }
    // SAFETY: `begin` made us the only one.
    let list: &mut [Range] = unsafe { &mut *engine.fork.snapshot.get() };
    // Ordering: Release publishes the list to `snapshot`.
    engine.fork.count.store(engine.pager.ranges.lock().copy_to(list), Ordering::Release);
    if engine.is_active() {
        engine.show_to_children(true);
    }
    true
}

/// After a fork, in the child, before it starts an engine of its own.
pub fn child() {
    crate::guard::leave_in_child();
}

/// After a fork, in the parent, whether it succeeded or not.
pub fn parent(engine: &Engine) {
    let _exclusive = engine.map.exclusive();
    if engine.is_active() {
        engine.show_to_children(false);
    }
    engine.fork.end();
}
