//! Bounds the lines that a run prints while its program runs, whatever the programs tell. The other
//! lines are counted.

use std::time::{Duration, Instant};

/// Lines that are printed in one period.
pub const LINES_MAX: u32 = 10;
/// The first period. Each period that had to hold lines back makes the next one twice as long.
const SHORTEST: Duration = Duration::from_secs(1);
/// The longest period.
const LONGEST: Duration = Duration::from_secs(64);

/// Lets a number of lines pass in each period.
pub struct Valve {
    /// When the present period began; none if the last one is over.
    began: Option<Instant>,
    length: Duration,
    passed: u32,
    held: u64,
}

impl Valve {
    /// A valve that nothing has passed yet.
    pub const fn new() -> Valve {
        Valve { began: None, length: SHORTEST, passed: 0, held: 0 }
    }

    /// Ends the present period if its time is over. Returns how many lines the period held back, if any.
    pub fn turn(&mut self, now: Instant) -> Option<u64> {
        let began = self.began?;
        if now.saturating_duration_since(began) < self.length {
            return None;
        }
        let held = self.rest();
        self.length = if held.is_some() { (self.length * 2).min(LONGEST) } else { SHORTEST };
        (self.began, self.passed) = (None, 0);
        held
    }

    /// Whether a line may pass. A line that may not is counted.
    pub fn passes(&mut self, now: Instant) -> bool {
        self.began.get_or_insert(now);
        let passes = self.passed < LINES_MAX;
        if passes {
            self.passed += 1;
        } else {
            self.held += 1;
        }
        passes
    }

    /// Returns the number of lines held back that nobody has heard of, and resets it; none if there are none.
    pub fn rest(&mut self) -> Option<u64> {
        let held = std::mem::take(&mut self.held);
        (held > 0).then_some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_becomes_ten_lines_in_longer_and_longer_periods() {
        let (mut valve, start) = (Valve::new(), Instant::now());
        let (mut passed, mut told, mut held) = (0, 0, 0);
        // 260 lines ten times a second, for an hour.
        for tenth in 0..36_000 {
            let now = start + Duration::from_millis(100 * tenth);
            if let Some(more) = valve.turn(now) {
                (told, held) = (told + 1, held + more);
            }
            passed += (0..260).filter(|_| valve.passes(now)).count() as u64;
        }
        held += valve.rest().unwrap();
        assert_eq!(passed + held, 260 * 36_000, "each line is printed or counted");
        assert!((600..=700).contains(&passed), "{passed}");
        assert!(told <= passed / 10, "{told}");
    }

    #[test]
    fn lines_that_come_one_by_one_all_pass() {
        let (mut valve, start) = (Valve::new(), Instant::now());
        for second in 0..100 {
            let now = start + Duration::from_millis(1001 * second);
            assert_eq!(valve.turn(now), None);
            assert!((0..LINES_MAX).all(|_| valve.passes(now)));
        }
        assert_eq!(valve.rest(), None);
    }

    #[test]
    fn quiet_period_after_a_flood_ends_it() {
        let (mut valve, start) = (Valve::new(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        (0..12).for_each(|_| _ = valve.passes(start));
        assert_eq!(valve.turn(after(1)), Some(2));
        assert!(valve.passes(after(1)));
        assert_eq!(valve.turn(after(2)), None, "the period is twice as long");
        assert_eq!((valve.turn(after(3)), valve.began), (None, None), "it held nothing back");
        assert_eq!(valve.length, SHORTEST);
    }
}
