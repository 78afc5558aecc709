//! Memory that a parent leaves free for a fork's child, until other processes count the child.
//!
//! A fork rings for the keeper and waits ([`ChildHeadroom::wait`]). The keeper lowers the limit for some
//! milliseconds ([`ChildHeadroom::limit`]), and evicts down to that limit. The next look builds on the limit
//! without the headroom. Otherwise each look would lower the limit by the headroom once more.

use crate::pressure::kin::Claimed;
use crate::pressure::share::{Allowance, allowance};
use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a child's engine and its first faults take before other processes count them.
const CHILD_BYTES: u64 = 3 << 20;
/// The budget divided by this bounds [`CHILD_BYTES`].
const CHILD_PART: u64 = 8;
/// Nanoseconds that a fork waits for headroom at most.
const WAIT_NS: u64 = 20_000_000;
/// Nanoseconds that a waiting fork sleeps between two looks.
const SLEEP_NS: u64 = 200_000;
/// Nanoseconds after a fork that has waited in vain in which no other fork waits.
const IN_VAIN_NS: u64 = 1_000_000_000;

/// What one process knows of the headroom that it keeps for children.
#[derive(Default)]
pub struct ChildHeadroom {
    /// When the keeping of headroom ends, in ns.
    kept_until_ns: AtomicU64,
    /// The time from which forks wait for headroom again, in ns. The last fork that waited has waited in
    /// vain.
    in_vain_until_ns: AtomicU64,
    /// Bytes that this process may have, the kept headroom included. 0 before the first look.
    granted_bytes: AtomicU64,
}

/// Returns the bytes that a child takes before other processes count them.
fn child_bytes(total: u64) -> u64 {
    CHILD_BYTES.min(total / CHILD_PART)
}

impl ChildHeadroom {
    /// Returns how many of `total` bytes this process may have, the kept headroom included.
    fn granted(&self, total: u64) -> u64 {
        match self.granted_bytes.load(Ordering::Relaxed) {
            0 => total,
            bytes => bytes,
        }
    }

    fn kept(&self, total: u64, now_ns: u64) -> u64 {
        if now_ns < self.kept_until_ns.load(Ordering::Relaxed) { child_bytes(total) } else { 0 }
    }

    /// Works out how many of `total` bytes the first process of `all` may have, after what it might have
    /// until now.
    pub fn allowance(&self, total: u64, all: &[Claimed], now_ns: u64) -> Allowance {
        allowance(total, self.granted(total), self.kept(total, now_ns), all)
    }

    /// Returns the limit of a process with this allowance of `total` bytes: the allowance without the kept
    /// headroom.
    pub fn limit(&self, total: u64, allowance: &Allowance, now_ns: u64) -> u64 {
        self.granted_bytes.store(allowance.bytes, Ordering::Relaxed);
        allowance.bytes - self.kept(total, now_ns).min(allowance.bytes - allowance.least)
    }

    /// Waits until this process has so little of `total` bytes that a child has headroom, 20 ms at most. The
    /// headroom is kept for `kept_ns` longer. If the wait is in vain, no fork waits for a second.
    pub fn wait(&self, total: u64, kept_ns: u64, process: &impl Waits) {
        let most = self.granted(total).saturating_sub(child_bytes(total));
        let began_ns = process.now_ns();
        if process.charged() <= most || began_ns < self.in_vain_until_ns.load(Ordering::Relaxed) {
            return;
        }
        self.kept_until_ns.store(began_ns + WAIT_NS + kept_ns, Ordering::Relaxed);
        process.ring();
        while process.charged() > most {
            if process.now_ns() >= began_ns + WAIT_NS {
                return self.in_vain_until_ns.store(began_ns + IN_VAIN_NS, Ordering::Relaxed);
            }
            process.sleep_ns(SLEEP_NS);
        }
    }
}

/// The process in which a fork waits.
pub trait Waits {
    /// Bytes that the process has of the budget.
    fn charged(&self) -> u64;
    /// Wakes the keeper, so that it looks.
    fn ring(&self);
    /// The time.
    fn now_ns(&self) -> u64;
    /// Lets time pass.
    fn sleep_ns(&self, ns: u64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    const MIB: u64 = 1 << 20;
    const MS: u64 = 1_000_000;
    const TOTAL: u64 = 24 * MIB;

    /// A process whose keeper evicts `evicts_in_ms` bytes in each millisecond after it was rung for.
    #[derive(Default)]
    struct Process {
        has: Cell<u64>,
        now_ns: Cell<u64>,
        evicts_in_ms: u64,
        rung: Cell<u32>,
    }

    impl Waits for Process {
        fn charged(&self) -> u64 {
            self.has.get()
        }
        fn ring(&self) {
            self.rung.set(self.rung.get() + 1);
        }
        fn now_ns(&self) -> u64 {
            self.now_ns.get()
        }
        fn sleep_ns(&self, ns: u64) {
            assert!(self.rung.get() > 0, "nobody evicts");
            self.now_ns.set(self.now_ns.get() + ns);
            self.has.set(self.has.get().saturating_sub(self.evicts_in_ms * ns / MS));
        }
    }

    /// How long a fork waits, in ns.
    fn waited(headroom: &ChildHeadroom, process: &Process) -> u64 {
        let began_ns = process.now_ns();
        headroom.wait(TOTAL, 25 * MS, process);
        process.now_ns() - began_ns
    }

    /// Runs a process beside a second one that has `others` bytes. The first process evicts down to its limit
    /// and looks again, many times. Returns its limits.
    fn limits(headroom: &ChildHeadroom, has: u64, others: u64) -> Vec<u64> {
        let (mut has, mut limits) = (has, Vec::new());
        for look in 1..20 {
            let claimed = |has, floor| Claimed { has, needs: has + MIB, floor, shared: 0 };
            let all = [claimed(has, MIB), claimed(others, MIB)];
            let allowance = headroom.allowance(TOTAL, &all, look);
            let limit = headroom.limit(TOTAL, &allowance, look);
            has = has.min(limit);
            limits.push(limit);
        }
        limits
    }

    /// Each look took the headroom off once more, down to what a process has in any case.
    #[test]
    fn limit_is_lowered_once_however_often_the_keeper_looks() {
        // The three cases: both fit, both are just too much, and both are far too much while the second gives
        // nothing back.
        for (has, others) in [(20 * MIB, 2 * MIB), (13 * MIB, 12 * MIB), (13 * MIB, 20 * MIB)] {
            let headroom = ChildHeadroom::default();
            let without = limits(&headroom, has, others);
            let before = *without.last().unwrap();
            headroom.kept_until_ns.store(1000, Ordering::Relaxed);
            let with = limits(&headroom, before.min(has), others);
            let least = before.min(has) - 3 * MIB;
            assert!(
                with.iter().all(|limit| *limit >= least),
                "{has} beside {others}: {before}, then {with:?}"
            );
            assert!(with[0] < before, "headroom is kept: {with:?}");
        }
    }

    #[test]
    fn limit_rises_again_when_headroom_is_no_longer_kept() {
        let headroom = ChildHeadroom::default();
        let limit = |kept_until_ns| {
            headroom.kept_until_ns.store(kept_until_ns, Ordering::Relaxed);
            let alone = Claimed { has: 20 * MIB, needs: 21 * MIB, floor: MIB, shared: 0 };
            headroom.limit(TOTAL, &headroom.allowance(TOTAL, &[alone], 10), 10)
        };
        assert_eq!([limit(0), limit(11), limit(11), limit(10)], [24, 21, 21, 24].map(|mib| mib * MIB));
        headroom.kept_until_ns.store(11, Ordering::Relaxed);
        // The limit isn't below what a process may always have. The headroom is no more than a part of a
        // small budget.
        let all = [Claimed { has: 5 * MIB, needs: 6 * MIB, floor: 4 * MIB, shared: 0 }; 5];
        let allowance = headroom.allowance(TOTAL, &all, 1);
        assert_eq!(headroom.limit(TOTAL, &allowance, 1), 4 * MIB);
        assert_eq!(child_bytes(8 * MIB), MIB);
    }

    #[test]
    fn fork_waits_until_there_is_headroom_and_no_longer() {
        let (headroom, process) =
            (ChildHeadroom::default(), Process { evicts_in_ms: MIB, ..Process::default() });
        process.has.set(TOTAL - 3 * MIB);
        assert_eq!((waited(&headroom, &process), process.rung.get()), (0, 0), "there is headroom");
        process.has.set(TOTAL);
        assert!((3 * MS..4 * MS).contains(&waited(&headroom, &process)));
        assert_eq!(process.rung.get(), 1);
        // The next fork waits as well.
        process.has.set(TOTAL);
        assert!((3 * MS..4 * MS).contains(&waited(&headroom, &process)));
        // The headroom is kept for the child until then.
        let now_ns = process.now_ns();
        assert_eq!(
            [headroom.kept(TOTAL, now_ns + 41 * MS), headroom.kept(TOTAL, now_ns + 42 * MS)],
            [3 * MIB, 0]
        );
    }

    /// Small processes that couldn't evict waited 20 ms at every fork.
    #[test]
    fn after_a_fork_that_waited_in_vain_none_waits_for_a_second() {
        let (headroom, process) = (ChildHeadroom::default(), Process::default());
        process.has.set(TOTAL);
        assert_eq!(waited(&headroom, &process), WAIT_NS);
        assert_eq!([waited(&headroom, &process), waited(&headroom, &process)], [0, 0]);
        process.now_ns.set(999 * MS);
        assert_eq!((waited(&headroom, &process), process.rung.get()), (0, 1), "and the keeper isn't woken");
        process.now_ns.set(1000 * MS);
        assert_eq!(waited(&headroom, &process), WAIT_NS);
    }
}
