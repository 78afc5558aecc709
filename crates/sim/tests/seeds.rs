//! Runs the seeds of `make test`, and checks that they still reach every possible event.

use farpage_core::stats::Counter;
use farpage_sim::{Coverage, Say, run};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const SEEDS: u64 = 1000;

/// Counters that only a live driver counts.
const DRIVERS_OWN: [Counter; 5] = [
    Counter::ForkRefused,
    Counter::SwpinInherited,
    Counter::EvictInline,
    Counter::EvictLull,
    Counter::FaultPolled,
];

/// Events and states that must have occurred at least once, beside the counters.
const EXPECTED: &[&str] = &[
    "step Zero",
    "step Install",
    "step Load",
    "step Read",
    "step Unprotect",
    "step Joined",
    "step Present",
    "step Lost",
    "step NoFrame",
    "step Unknown",
    "state Absent",
    "state Zero",
    "state Same",
    "state Resident",
    "state Resident with a slot",
    "state Resident with an object",
    "state Parked",
    "state Parked with a slot",
    "state Parked with an object",
    "state Writing",
    "state Pooled",
    "state OnArea",
    "state OnArea packed",
    "state Lost",
    "placed Nothing",
    "placed Done",
    "placed Queued",
    "placed Busy",
    "placed NowhereToGo",
    "shrunk Enough",
    "shrunk Released",
    "shrunk Queued",
    "shrunk Busy",
    "shrunk NoFrame",
    "shrunk NoArea",
    "densified Shorter",
    "densified AsItWas",
    "densified Busy",
    "densified NoSpace",
    "plan Pages",
    "plan Slots",
    "plan Stream",
    "plan CatchUp",
    "plan Rest",
    "plan of who waits",
    "ahead mapped",
    "ahead parked",
    "ahead refused",
    "ahead read",
    "ahead read error",
    "ahead lie noticed",
    "ahead dropped",
    "ahead unpacked beside",
    "ahead unpacked in place",
    "fault unpacked",
    "write Finished",
    "write Again",
    "given back",
    "starved",
    "handler thread evicts",
    "gave up",
    "late write",
    "pinned page refused",
    "pinned page stays",
    "written page stays",
    "Unsettled",
    "change Discard",
    "change Unmap",
    "change Map",
    "change Register",
    "change Remap",
    "change Flag",
    "death",
    "reaped",
    "discard",
    "read error",
    "lie noticed",
    "device read errors",
    "device write errors",
    "device torn writes",
    "device lost writes",
    "device flips",
    "device misdirections",
];

#[test]
fn hundreds_of_seeds_hold_and_reach_everything() {
    let next = AtomicU64::new(0);
    let work = || {
        let mut coverage = Coverage::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SEEDS {
                return coverage;
            }
            match run(seed, Say::Nothing) {
                Ok(report) => coverage.merge(&report.coverage),
                Err(failure) => panic!("{failure}"),
            }
        }
    };
    let mut coverage = Coverage::default();
    thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().for_each(|worker| coverage.merge(&worker.join().expect("no violation")));
    });
    let counters = Counter::ALL.iter().filter(|counter| !DRIVERS_OWN.contains(counter));
    let names = counters.map(|counter| counter.name()).chain(EXPECTED.iter().copied());
    let missing: Vec<_> = names.filter(|name| coverage.count(name) == 0).collect();
    assert!(missing.is_empty(), "{SEEDS} seeds never reached {missing:?}");
}

#[test]
fn one_seed_gives_one_run() {
    let seen = || {
        let report = run(3, Say::Nothing).expect("no violation");
        (report.steps, report.coverage.iter().collect::<Vec<_>>())
    };
    assert_eq!(seen(), seen());
}
