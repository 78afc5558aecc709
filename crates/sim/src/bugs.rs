//! Bugs that tests plant in the driver's part. Bugs of the core are in `farpage_core::planted`. Each bug here
//! was once in a live driver. A bug can strike only with the feature `planted`.

/// A bug of the driver that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DriverBug {
    /// Drops a page that was copied, although a device has it pinned. The device's later writes are lost.
    DropPinned = 1,
    /// Drops a page that was copied, although the program wrote to it meanwhile.
    DropWritten = 2,
    /// Copies a page out that the kernel refuses to move because the page is pinned.
    CopyRefused = 3,
    /// A handler thread leaves reclaim to the keeper, and brings its page in although memory is over the
    /// limit.
    NoDirectReclaim = 4,
    /// A handler thread that had no CPU for a long time reports that nothing can be evicted. The handler
    /// thread looks only at the clock.
    GiveUpByClock = 5,
}

#[cfg(feature = "planted")]
mod planted {
    use super::DriverBug;
    use std::sync::atomic::{AtomicU32, Ordering};

    static PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Plants a bug in the driver; `None` removes the planted bug.
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
