//! `--over-budget kill`: ends a run whose memory stays above its budget.
//!
//! The claims in the session give the memory of processes with a budget; /proc gives that of the other
//! processes. A run may exceed its budget briefly, because eviction takes time. So only memory that stays
//! above the budget counts.

use crate::text::failure::Failure;
use crate::text::numbers::{iec, suggestion};

/// Divisor of the budget that gives the memory the run may have above it.
const TOLERANCE_PARTS: u64 = 20;
/// Looks in a row, at ten a second, with more memory than the tolerance allows, after which the run ends.
const LOOKS: u32 = 10;

/// Watches one run.
pub struct OverBudget {
    ram_bytes: u64,
    /// Looks in a row with too much memory, and the least memory in these looks.
    looks: u32,
    least_bytes: u64,
}

impl OverBudget {
    /// A watcher for a budget of `ram_bytes`.
    pub const fn new(ram_bytes: u64) -> OverBudget {
        OverBudget { ram_bytes, looks: 0, least_bytes: u64::MAX }
    }

    /// Takes note that the run has `bytes` of anonymous memory. Fails once the memory has stayed above the
    /// budget, for the reasons given.
    pub fn look(&mut self, bytes: u64, reasons: impl FnOnce() -> Vec<String>) -> Result<(), Failure> {
        if bytes <= self.ram_bytes.saturating_add(self.ram_bytes / TOLERANCE_PARTS) {
            *self = OverBudget::new(self.ram_bytes);
            return Ok(());
        }
        self.looks += 1;
        self.least_bytes = self.least_bytes.min(bytes);
        if self.looks < LOOKS { Ok(()) } else { Err(self.failure(reasons())) }
    }

    fn failure(&self, reasons: Vec<String>) -> Failure {
        let what = format!(
            "the run was ended: for a second it had {} or more, above its budget of {} (--over-budget kill)",
            iec(self.least_bytes),
            iec(self.ram_bytes)
        );
        let unknown =
            || vec!["it has memory that can't be evicted, or nothing could be evicted so fast".to_owned()];
        let reasons = if reasons.is_empty() { unknown() } else { reasons };
        let failure = reasons.into_iter().fold(Failure::new(what), Failure::because);
        let more = suggestion(self.least_bytes);
        failure
            .fix(format!("--ram {more} or more (or FARPAGE_RAM)"))
            .fix("--over-budget warn lets such a run go on")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn only_memory_that_stays_above_the_budget_ends_the_run() {
        let mut over = OverBudget::new(100 * MIB);
        let mut looks = |count: u32, mib: u64| {
            let ends = |_| over.look(mib * MIB, || vec!["the pool is full".into()]).err();
            (0..count).filter_map(ends).last().map(|failure| failure.to_string())
        };
        assert_eq!(looks(100, 105), None, "a twentieth is let pass");
        assert_eq!(looks(LOOKS - 1, 106), None);
        assert_eq!(looks(1, 90), None);
        assert_eq!(looks(LOOKS - 1, 200), None, "counted anew");
        let told = looks(1, 150).unwrap();
        for words in
            ["it had 150 MiB or more, above its budget of 100 MiB", "the pool is full", "--over-budget warn"]
        {
            assert!(told.contains(words), "{told}");
        }
    }
}
