//! Tests that planted bugs are noticed within a few seeds, and that the same seeds hold without a bug. All
//! bugs share one test, because a bug is planted in the whole process.
#![cfg(feature = "planted")]

use farpage_core::planted::{Bug, plant};
use farpage_sim::{DriverBug, Failure, Say, plant_in_driver, run};

/// Seeds within which each bug is noticed.
const SEEDS: u64 = 400;
/// Seeds that hold without a bug.
const SOUND_SEEDS: u64 = 150;

fn first_violation(seeds: u64) -> Option<Failure> {
    (0..seeds).find_map(|seed| run(seed, Say::Nothing).err())
}

fn was_noticed(bug: &dyn std::fmt::Debug, violation: Option<Failure>) {
    let violation = violation.unwrap_or_else(|| panic!("{bug:?} wasn't noticed in {SEEDS} seeds"));
    println!("{bug:?}: seed {}: {}", violation.seed, violation.message);
}

#[test]
fn planted_bugs_are_caught_and_nothing_else_is() {
    for bug in [
        Bug::DropInvalidation,
        Bug::FreeSlotTwice,
        Bug::SkipIdentityCheck,
        Bug::DensifyWhatIsThere,
        Bug::TrustKeptObject,
        Bug::TrustKeptSlot,
        Bug::FreePackEarly,
    ] {
        plant(Some(bug));
        let violation = first_violation(SEEDS);
        plant(None);
        was_noticed(&bug, violation);
    }
    for bug in [
        DriverBug::DropPinned,
        DriverBug::DropWritten,
        DriverBug::CopyRefused,
        DriverBug::NoDirectReclaim,
        DriverBug::GiveUpByClock,
    ] {
        plant_in_driver(Some(bug));
        let violation = first_violation(SEEDS);
        plant_in_driver(None);
        was_noticed(&bug, violation);
    }
    if let Some(violation) = first_violation(SOUND_SEEDS) {
        panic!("{violation}");
    }
}
