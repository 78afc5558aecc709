//! Planted bugs and interruptions. The bugs are for the one test that shows that the simulator would find
//! them. Interruptions are the places where another thread can come in between two instructions of a call.
//! Both exist only with the feature `planted`, which no shipped build has.
// UNSAFETY: a function is installed for all threads, like the parker of `sync`.

use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Bug {
    /// A page that comes back from the pool leaves its old copy there.
    DropInvalidation = 1,
    /// A slot is freed twice.
    FreeSlotTwice = 2,
    /// The pool's write-back doesn't check that the object is still its page's.
    SkipIdentityCheck = 3,
    /// A page that kept its object is evicted without a check whether it was written.
    TrustKeptObject = 4,
    /// A page that kept its slot is evicted without a check whether it was written.
    TrustKeptSlot = 5,
    /// The densifier of the pool doesn't check that the object is still its page's.
    DensifyWhatIsThere = 6,
    /// A slot that several pages share is free when the first of them has left it.
    FreePackEarly = 7,
}

static PLANTED: AtomicU32 = AtomicU32::new(0);

/// The function that runs at an interruption.
pub struct Interrupt(pub fn());

static INTERRUPT: AtomicPtr<Interrupt> = AtomicPtr::new(core::ptr::null_mut());

/// Installs the function that runs at an interruption. The function makes calls into the core, each from
/// beginning to end.
pub fn set_interrupt(interrupt: &'static Interrupt) {
    // Ordering: Release pairs with the Acquire in `pause`.
    INTERRUPT.store(core::ptr::from_ref(interrupt).cast_mut(), Ordering::Release);
}

/// Runs the installed interruption: another thread may come in between here. No lock of rank 3 to 10 is held
/// ([`crate::sync`]). Pages may be locked.
pub fn pause() {
    // Ordering: Acquire pairs with the Release in `set_interrupt`.
    let interrupt = INTERRUPT.load(Ordering::Acquire);
    // SAFETY: null, or from a `&'static Interrupt` that is never taken back.
    if let Some(interrupt) = unsafe { interrupt.as_ref() } {
        (interrupt.0)();
    }
}

/// Plants a bug, or removes the planted one.
pub fn plant(bug: Option<Bug>) {
    PLANTED.store(bug.map_or(0, |bug| bug as u32), Ordering::Relaxed);
}

/// Whether `bug` is the planted one.
pub fn strikes(bug: Bug) -> bool {
    PLANTED.load(Ordering::Relaxed) == bug as u32
}
