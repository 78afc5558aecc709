//! The engine's lock, and the order in which locks are taken.
//!
//! Code that a fault can reach may run inside another program's process, in a thread that glibc doesn't know,
//! while the process's malloc lock is held. So the engine's lock is one 32-bit word, without thread-local
//! storage and without a libc call. `core` makes no system call either. A driver installs how to wait
//! ([`set_parker`]); until then waiting is spinning.
//!
//! docs/internals/locks.md has the table of locks with their ranks, the rules, and the exceptions. The
//! simulator checks order and use of the core's locks ([`Witness`]).

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// The atomics of the code that loom runs (`make loom`): this lock, a page's entry, pins, holds, leases, the
/// index, roll calls. A file that takes its atomics from here can have a module of loom models, compiled with
/// `cfg(all(test, loom))`. Its unit tests that pass the standard library's atomics are left out of that
/// build.
pub mod atomic {
    #[cfg(not(all(test, loom)))]
    pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    #[cfg(all(test, loom))]
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

/// How a thread waits for a word to change, and how waiters are woken: a futex in a live process.
pub struct Parker {
    /// Returns when `word` may no longer be `expected`; may return early.
    pub wait: fn(word: &AtomicU32, expected: u32),
    /// Wakes up to `count` threads that wait on `word`.
    pub wake: fn(word: &AtomicU32, count: u32),
}

static PARKER: AtomicPtr<Parker> = AtomicPtr::new(core::ptr::null_mut());

/// Installs how threads of this process wait. Must be called once, before a second thread exists.
pub fn set_parker(parker: &'static Parker) {
    // Ordering: Release pairs with the Acquire in `parker`, so that a thread sees the functions complete.
    PARKER.store(core::ptr::from_ref(parker).cast_mut(), Ordering::Release);
}

fn parker() -> Option<&'static Parker> {
    // Ordering: Acquire pairs with the Release in `set_parker`.
    let pointer = PARKER.load(Ordering::Acquire);
    // SAFETY: `pointer` is null, or came from the `&'static Parker` given to `set_parker`, which is never
    // taken back.
    unsafe { pointer.as_ref() }
}

/// The ranks of the engine's locks, outermost first: ten times the ranks in docs/internals/locks.md. Locks of
/// one rank that nest have numbers one after the other.
pub mod rank {
    /// A change of credentials, or a new filter. The thread that takes this lock holds no other lock. Engine
    /// threads answer in a signal's handler, and may hold any lock meanwhile.
    pub const CREDENTIALS: u8 = 0;
    /// The clock's hand.
    pub const CLOCK: u8 = 30;
    /// The list of ranges.
    pub const RANGES: u8 = 40;
    /// The cache's frames.
    pub const CACHE: u8 = 50;
    /// The pool's objects.
    pub const POOL: u8 = 60;
    /// The leaves of the pool's index.
    pub const INDEX: u8 = 61;
    /// A CPU's slots: its hand or its cache.
    pub const CPU_SLOTS: u8 = 70;
    /// What a CPU has freed.
    pub const RETURNED_SLOTS: u8 = 71;
    /// An area's lists.
    pub const AREA: u8 = 72;
    /// A cluster of an area.
    pub const CLUSTER: u8 = 73;
    /// The order of the areas. Never taken with an area's slots held.
    pub const AREA_ORDER: u8 = 74;
    /// The streams.
    pub const STREAMS: u8 = 80;
    /// The places for lines of a leaf's entries.
    pub const LEAF: u8 = 90;
    /// Locks under which no lock is taken: queues, counts of slots, dispositions of signals.
    pub const LAST: u8 = 100;

    /// Whether a lock of rank `next` may be taken while one of rank `held` is held.
    pub const fn may_follow(held: u8, next: u8) -> bool {
        let is_of_slots = held >= CPU_SLOTS && held <= CLUSTER;
        held < next && !(is_of_slots && next == AREA_ORDER)
    }
}

/// Watches the order in which threads take locks. Only builds with debug assertions call the witness.
pub struct Witness {
    /// The thread is about to take a lock, and waits if the lock is held.
    pub takes: fn(rank: u8),
    /// The thread took a lock by `try_lock`, which never waits.
    pub took: fn(rank: u8),
    /// The thread gives a lock back.
    pub gives_back: fn(rank: u8),
}

static WITNESS: AtomicPtr<Witness> = AtomicPtr::new(core::ptr::null_mut());

/// Installs who watches the order of locks.
pub fn set_witness(witness: &'static Witness) {
    // Ordering: Release pairs with the Acquire in `tell`.
    WITNESS.store(core::ptr::from_ref(witness).cast_mut(), Ordering::Release);
}

/// Tells the witness, if there is one. Nothing of this remains in a build without debug assertions.
fn tell(event: impl FnOnce(&Witness)) {
    if cfg!(debug_assertions) {
        // Ordering: Acquire pairs with the Release in `set_witness`.
        let pointer = WITNESS.load(Ordering::Acquire);
        // SAFETY: `pointer` is null, or came from the `&'static Witness` given to `set_witness`.
        if let Some(witness) = unsafe { pointer.as_ref() } {
            event(witness);
        }
    }
}

/// Waits until `word` may have changed from `expected`. Signal-safe.
pub fn wait(word: &AtomicU32, expected: u32) {
    match parker() {
        Some(parker) => (parker.wait)(word, expected),
        None => core::hint::spin_loop(),
    }
}

/// Wakes every thread that waits on `word`. Signal-safe.
pub fn wake_all(word: &AtomicU32) {
    if let Some(parker) = parker() {
        (parker.wake)(word, i32::MAX as u32);
    }
}

const FREE: u32 = 0;
const HELD: u32 = 1;
/// The lock is held, and a thread may be waiting in the kernel.
const CONTENDED: u32 = 2;

/// Looks at a held lock before the thread goes to sleep. Critical sections take some 100 ns; a futex wait and
/// wake cost several microseconds. A single look is enough for loom.
const SPINS: u32 = if cfg!(all(test, loom)) { 1 } else { 64 };

/// A mutual-exclusion lock around a value: one word, no poisoning (a panic ends the process). Its rank
/// ([`rank`]) is part of its type, for the [`Witness`].
pub struct Lock<T, const RANK: u8> {
    state: atomic::AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Guard`, and `state` lets one guard exist at a time. So sharing
// the lock only ever moves the value between threads, which needs `T: Send`.
unsafe impl<T: Send, const RANK: u8> Sync for Lock<T, RANK> {}

impl<T, const RANK: u8> Lock<T, RANK> {
    /// Returns a free lock.
    #[cfg(not(all(test, loom)))]
    pub const fn new(value: T) -> Self {
        Lock { state: atomic::AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Returns a free lock. loom's atomics can't be made at compile time.
    #[cfg(all(test, loom))]
    pub fn new(value: T) -> Self {
        Lock { state: atomic::AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Takes the lock, and waits for it if it is held. Signal-safe in a thread whose asynchronous signals are
    /// blocked.
    pub fn lock(&self) -> Guard<'_, T, RANK> {
        tell(|witness| (witness.takes)(RANK));
        // Ordering: Acquire pairs with the Release in `Guard::drop`.
        if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_slow();
        }
        Guard { lock: self }
    }

    /// Takes the lock if no thread holds it.
    pub fn try_lock(&self) -> Option<Guard<'_, T, RANK>> {
        // Ordering: Acquire as in `lock`.
        let taken = self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // A guard is made only if the lock was taken: dropping a guard gives the lock back.
        taken.then(|| {
            tell(|witness| (witness.took)(RANK));
            Guard { lock: self }
        })
    }

    /// Frees the lock in a fork's child, where the thread that held it doesn't exist.
    pub fn forget_holder(&self) {
        self.state.store(FREE, Ordering::Relaxed);
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            core::hint::spin_loop();
            if self.state.load(Ordering::Relaxed) == FREE
                // Ordering: Acquire as in `lock`.
                && self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
        // Ordering: Acquire as in `lock`. The state becomes CONTENDED although no other thread may be
        // waiting. The unlock then wakes once too often, which is harmless. With HELD a sleeper could be
        // forgotten.
        while self.state.swap(CONTENDED, Ordering::Acquire) != FREE {
            self.sleep();
        }
    }

    #[cfg(not(all(test, loom)))]
    fn sleep(&self) {
        wait(&self.state, CONTENDED);
    }

    #[cfg(all(test, loom))]
    fn sleep(&self) {
        loom::thread::yield_now();
    }

    #[cfg(not(all(test, loom)))]
    fn wake_one(&self) {
        if let Some(parker) = parker() {
            (parker.wake)(&self.state, 1);
        }
    }

    #[cfg(all(test, loom))]
    fn wake_one(&self) {}
}

/// Proof that a [`Lock`] is held. Dropping it gives the lock back.
pub struct Guard<'a, T, const RANK: u8> {
    lock: &'a Lock<T, RANK>,
}

impl<T, const RANK: u8> Deref for Guard<'_, T, RANK> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one (see `Lock`), so nobody writes the value while it is read.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T, const RANK: u8> DerefMut for Guard<'_, T, RANK> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and the caller holds it by `&mut`, so no other reference
        // exists.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T, const RANK: u8> Drop for Guard<'_, T, RANK> {
    fn drop(&mut self) {
        // Ordering: Release publishes the writes made under the lock to the next Acquire.
        if self.lock.state.swap(FREE, Ordering::Release) == CONTENDED {
            self.lock.wake_one();
        }
        tell(|witness| (witness.gives_back)(RANK));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn counts_of_many_threads_add_up() {
        let lock = Arc::new(Lock::<_, { rank::LAST }>::new(0_u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || (0..5_000).for_each(|_| *lock.lock() += 1))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*lock.lock(), 20_000);
    }

    #[test]
    fn lock_that_is_held_is_not_taken() {
        let lock = Lock::<_, { rank::LAST }>::new(0);
        let guard = lock.try_lock();
        assert!(guard.is_some() && lock.try_lock().is_none() && lock.try_lock().is_none());
        drop(guard);
        assert!(lock.try_lock().is_some());
    }
}

#[cfg(all(test, loom))]
mod loomed {
    //! The lock, in every order in which its threads can meet (`make loom`).

    use super::*;
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_who_holds_the_lock_is_alone_and_sees_what_the_last_one_did() {
        loom::model(|| {
            let lock = Arc::new(Lock::<_, { rank::LAST }>::new(Cell::new(0)));
            let add = |lock: &Lock<Cell<u32>, { rank::LAST }>| {
                let value = lock.lock();
                value.set(value.get() + 1);
            };
            let other = {
                let lock = Arc::clone(&lock);
                thread::spawn(move || add(&lock))
            };
            add(&lock);
            other.join().unwrap();
            assert_eq!(lock.lock().get(), 2);
        });
    }
}
