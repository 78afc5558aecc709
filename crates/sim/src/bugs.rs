//! Bugs on purpose in what a driver does, beside those of the core (`farpage_core::planted`): each was one of a live driver's.
//! Only with the feature `planted` can one strike.

/// A bug of a driver's that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DriverBug {
    /// A page that was copied is dropped although somebody has pinned it: later writes of a device are lost.
    DropPinned = 1,
    /// A page that was copied is dropped although it was written meanwhile.
    DropWritten = 2,
    /// What the kernel refuses to move, because it is pinned, is copied out.
    CopyRefused = 3,
    /// A handler leaves it to the keeper to make memory, and brings its page in over the limit.
    NoDirectReclaim = 4,
    /// A handler that had no CPU for long says that nothing can be evicted: it looked at the clock only.
    GiveUpByClock = 5,
}

#[cfg(feature = "planted")]
mod planted {
    use super::DriverBug;
    use std::sync::atomic::{AtomicU32, Ordering};

    static PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Plants a bug of a driver's, or takes it away.
    pub fn plant_in_driver(bug: Option<DriverBug>) {
        PLANTED.store(bug.map_or(0, |bug| bug as u32), Ordering::Relaxed);
    }

    pub(crate) fn strikes(bug: DriverBug) -> bool {
        PLANTED.load(Ordering::Relaxed) == bug as u32
    }
}

#[cfg(feature = "planted")]
pub use planted::plant_in_driver;
#[cfg(feature = "planted")]
pub(crate) use planted::strikes;

#[cfg(not(feature = "planted"))]
pub(crate) const fn strikes(_: DriverBug) -> bool {
    false
}
