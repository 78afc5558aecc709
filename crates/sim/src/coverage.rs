//! Counts of the events and states that runs reached. A test checks that every possible event occurred, so
//! that the simulator can't stop exercising something unnoticed.

use std::collections::BTreeMap;

/// The number of times that each event happened, by name.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    seen: BTreeMap<&'static str, u64>,
}

impl Coverage {
    /// Counts an event once.
    pub fn saw(&mut self, name: &'static str) {
        self.add(name, 1);
    }
    /// Counts an event `count` times.
    pub fn add(&mut self, name: &'static str, count: u64) {
        *self.seen.entry(name).or_default() += count;
    }
    /// Returns how often an event happened.
    pub fn count(&self, name: &str) -> u64 {
        self.seen.get(name).copied().unwrap_or(0)
    }
    /// Adds the counts of another run.
    pub fn merge(&mut self, other: &Coverage) {
        other.seen.iter().for_each(|(name, count)| self.add(name, *count));
    }
    /// Yields all events that happened and their counts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.seen.iter().map(|(name, count)| (*name, *count))
    }
}
