//! Watches an allocator's locks and scans. In a live engine nothing watches, and none of this remains in the
//! machine code. The benchmark measures how long threads wait, and its simulation records what a call does.

use crate::sync::{Guard, Lock};
use core::ops::{Deref, DerefMut};

/// A lock of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Locked {
    /// A CPU's hand or cache.
    Cpu(u32),
    /// The slots that a CPU has freed.
    Returned(u32),
    /// One cluster.
    Cluster(u32),
    /// The area's lists, or the whole area.
    Area,
}

/// Observer of an allocator's locks and scans.
pub trait Probe {
    /// Takes a lock.
    fn lock<'a, T, const RANK: u8>(&self, _name: Locked, lock: &'a Lock<T, RANK>) -> Guard<'a, T, RANK> {
        lock.lock()
    }
    /// Called before a lock is given back.
    fn unlocking(&self, _name: Locked) {}
    /// Called after `slots` slots were looked at one by one.
    fn scanned(&self, _slots: u32) {}
    /// Called after an empty hand or cache was refilled with `slots` slots.
    fn refilled(&self, _slots: u32) {}
}

/// The observer that sees nothing, for a live engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Probe for Unwatched {}

/// A held lock that reports to a probe.
pub(super) struct Held<'a, T, P: Probe, const RANK: u8> {
    /// None only inside `unlocked`.
    guard: Option<Guard<'a, T, RANK>>,
    lock: &'a Lock<T, RANK>,
    probe: &'a P,
    name: Locked,
}

impl<'a, T, P: Probe, const RANK: u8> Held<'a, T, P, RANK> {
    pub(super) fn new(probe: &'a P, name: Locked, lock: &'a Lock<T, RANK>) -> Self {
        Held { guard: Some(probe.lock(name, lock)), lock, probe, name }
    }

    /// Gives the lock back for the time of `act`.
    pub(super) fn unlocked<R>(&mut self, act: impl FnOnce() -> R) -> R {
        self.probe.unlocking(self.name);
        self.guard = None;
        let result = act();
        self.guard = Some(self.probe.lock(self.name, self.lock));
        result
    }
}

impl<T, P: Probe, const RANK: u8> Deref for Held<'_, T, P, RANK> {
    type Target = T;
    fn deref(&self) -> &T {
        self.guard.as_ref().expect("a lock that is held")
    }
}

impl<T, P: Probe, const RANK: u8> DerefMut for Held<'_, T, P, RANK> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("a lock that is held")
    }
}

impl<T, P: Probe, const RANK: u8> Drop for Held<'_, T, P, RANK> {
    fn drop(&mut self) {
        if self.guard.is_some() {
            self.probe.unlocking(self.name);
        }
    }
}
