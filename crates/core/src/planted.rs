//! Bugs on purpose, for the one test that shows the simulator would find them, and interruptions: the places
//! where another thread can come in between two instructions of a call. Only with the feature `planted`,
//! which nothing that ships has.
// UNSAFETY: a function installed for all threads, like `sync`'s parker.

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
    /// A page that kept its object goes without a look at whether it was written.
    TrustKeptObject = 4,
    /// The same of one that kept its slot.
    TrustKeptSlot = 5,
    /// What makes the pool's objects denser doesn't check that the object is still its page's.
    DensifyWhatIsThere = 6,
    /// A slot that several pages share is free when the first of them has left it.
    FreePackEarly = 7,
}

static PLANTED: AtomicU32 = AtomicU32::new(0);

/// What happens at an interruption.
pub struct Interrupt(pub fn());

static INTERRUPT: AtomicPtr<Interrupt> = AtomicPtr::new(core::ptr::null_mut());

/// Installs what happens at an interruption: calls into the core, each from beginning to end.
pub fn set_interrupt(interrupt: &'static Interrupt) {
    // Ordering: Release pairs with the Acquire in `pause`.
    INTERRUPT.store(core::ptr::from_ref(interrupt).cast_mut(), Ordering::Release);
}

/// Somebody may come in between here. No lock of rank 3 or below is held; pages may be locked.
pub fn pause() {
    // Ordering: Acquire pairs with the Release in `set_interrupt`.
    let interrupt = INTERRUPT.load(Ordering::Acquire);
    // SAFETY: null, or from a `&'static Interrupt` that is never taken back.
    if let Some(interrupt) = unsafe { interrupt.as_ref() } {
        (interrupt.0)();
    }
}

/// Plants a bug, or takes it away.
pub fn plant(bug: Option<Bug>) {
    PLANTED.store(bug.map_or(0, |bug| bug as u32), Ordering::Relaxed);
}

/// Whether this is the planted bug.
pub fn strikes(bug: Bug) -> bool {
    PLANTED.load(Ordering::Relaxed) == bug as u32
}
