//! Durations of touches: a histogram with 32 steps to an octave. A percentile is at most 3.2 % too high. The
//! histogram takes 10 KiB, little beside the smallest budget.

use serde_json::{Value, json};

/// Steps of an octave.
const STEPS: u64 = 32;
/// Octaves, from 32 ns to 137 s. Below 32 ns a step is 1 ns.
const OCTAVES: u64 = 32;
/// Nanoseconds below which a touch counts as one without a fault. A fault that another thread serves takes
/// 2.5 µs at least.
const FAULT_NS: u64 = 2_000;
/// Nanoseconds from which a touch may have waited for a device; a shorter touch has not. Reads of 4 KiB from
/// real devices take 50 µs and more, with few exceptions.
pub const DEVICE_NS: u64 = 40_000;

/// A histogram of durations.
#[derive(Clone)]
pub struct Latencies {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
    faults: u64,
    long: u64,
}

impl Default for Latencies {
    fn default() -> Latencies {
        let counts = vec![0; ((OCTAVES + 1) * STEPS) as usize];
        Latencies { counts, count: 0, sum_ns: 0, max_ns: 0, faults: 0, long: 0 }
    }
}

/// Returns the step of a duration. Below `STEPS` nanoseconds each duration has its own step; above, an octave
/// has `STEPS` steps.
fn step_of(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let octave = u64::from(ns.ilog2() - STEPS.ilog2());
    let step = (octave + 1) * STEPS + (ns >> octave) - STEPS;
    step.min((OCTAVES + 1) * STEPS - 1) as usize
}

/// Returns the longest duration of a step.
fn limit_ns(step: usize) -> u64 {
    let (octave, within) = (step as u64 / STEPS, step as u64 % STEPS);
    match octave.checked_sub(1) {
        None => within,
        Some(octave) => ((STEPS + within + 1) << octave) - 1,
    }
}

impl Latencies {
    /// Adds one touch.
    pub fn record(&mut self, ns: u64) {
        self.counts[step_of(ns)] += 1;
        self.count += 1;
        self.sum_ns += ns;
        self.max_ns = self.max_ns.max(ns);
        self.faults += u64::from(ns >= FAULT_NS);
        self.long += u64::from(ns >= DEVICE_NS);
    }

    /// Returns the number of touches.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Adds the touches of another thread.
    pub fn add(&mut self, other: &Latencies) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
        self.faults += other.faults;
        self.long += other.long;
    }

    /// Returns the duration that `percent` of all touches don't exceed.
    fn percentile_ns(&self, percent: f64) -> u64 {
        let wanted = ((self.count as f64 * percent / 100.0).ceil() as u64).max(1);
        let mut seen = 0;
        let step = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        step.map_or(0, limit_ns).min(self.max_ns)
    }

    /// Returns mean, percentiles and counts as JSON.
    pub fn json(&self) -> Value {
        let us = |ns: u64| ns as f64 / 1e3;
        json!({
            "touches": self.count,
            "mean_us": us(self.sum_ns) / self.count.max(1) as f64,
            "p50_us": us(self.percentile_ns(50.0)),
            "p95_us": us(self.percentile_ns(95.0)),
            "p99_us": us(self.percentile_ns(99.0)),
            "p999_us": us(self.percentile_ns(99.9)),
            "max_us": us(self.max_ns),
            "over_2us": self.faults,
            "over_40us": self.long,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_in_a_step_that_is_at_most_a_thirtysecond_wide() {
        let mut before = 0;
        for ns in
            (0..10_000).chain((14..36).map(|bits| (1 << bits) - 1)).chain((14..36).map(|bits| 1 << bits))
        {
            let limit = limit_ns(step_of(ns));
            assert!(limit >= ns && limit - ns <= ns / STEPS, "{ns} is counted as {limit}");
            assert!(ns >= 10_000 || step_of(ns) >= before);
            before = step_of(ns);
        }
        assert_eq!(step_of(u64::MAX), Latencies::default().counts.len() - 1);
    }

    #[test]
    fn percentiles_and_counts_are_those_of_the_durations() {
        let (mut latencies, mut others) = (Latencies::default(), Latencies::default());
        (1..=50).for_each(|us| latencies.record(us * 1000));
        (51..=100).for_each(|us| others.record(us * 1000));
        latencies.add(&others);
        let json = latencies.json();
        assert_eq!((json["touches"].as_u64(), json["mean_us"].as_f64()), (Some(100), Some(50.5)));
        let p95 = json["p95_us"].as_f64().unwrap();
        assert!((95.0..98.0).contains(&p95), "{p95}");
        assert_eq!(json["max_us"].as_f64(), Some(100.0));
        assert_eq!((json["over_2us"].as_u64(), json["over_40us"].as_u64()), (Some(99), Some(61)));
        assert_eq!(Latencies::default().json()["p50_us"].as_f64(), Some(0.0));
    }
}
