//! What a run has seen. A test asks whether everything that can happen did, so that the simulator can't stop
//! exercising something without anybody noticing.

use std::collections::BTreeMap;

/// How often each thing happened, by name.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    seen: BTreeMap<&'static str, u64>,
}

impl Coverage {
    /// It happened once more.
    pub fn saw(&mut self, name: &'static str) {
        self.add(name, 1);
    }
    /// It happened `count` times.
    pub fn add(&mut self, name: &'static str, count: u64) {
        *self.seen.entry(name).or_default() += count;
    }
    /// How often it happened.
    pub fn count(&self, name: &str) -> u64 {
        self.seen.get(name).copied().unwrap_or(0)
    }
    /// Adds what another run has seen.
    pub fn merge(&mut self, other: &Coverage) {
        other.seen.iter().for_each(|(name, count)| self.add(name, *count));
    }
    /// Everything seen, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.seen.iter().map(|(name, count)| (*name, *count))
    }
}
