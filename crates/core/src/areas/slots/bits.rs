//! One bit for each slot of a cluster, handled a word at a time.

use crate::memory::Zeroed;
use crate::units::CLUSTER_SLOTS;

const WORDS: usize = CLUSTER_SLOTS as usize / 64;

/// A set of a cluster's slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits([u64; WORDS]);

// SAFETY: integers, for which zero is valid and which have no drop.
unsafe impl Zeroed for Bits {}

impl Bits {
    /// No slot.
    pub const NONE: Bits = Bits([0; WORDS]);
    /// Every slot.
    pub const ALL: Bits = Bits([u64::MAX; WORDS]);

    /// Number of slots in the set.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether slot `at` is in the set.
    pub const fn has(&self, at: u32) -> bool {
        self.0[at as usize / 64] & 1 << (at % 64) != 0
    }

    /// Adds a slot.
    pub const fn set(&mut self, at: u32) {
        self.0[at as usize / 64] |= 1 << (at % 64);
    }

    /// Removes a slot.
    pub const fn clear(&mut self, at: u32) {
        self.0[at as usize / 64] &= !(1 << (at % 64));
    }

    /// Returns the slots that are not in the set.
    #[must_use]
    pub fn complement(&self) -> Bits {
        Bits(self.0.map(|word| !word))
    }

    /// Returns the slots that are in this set and not in `other`.
    #[must_use]
    pub fn without(&self, other: &Bits) -> Bits {
        Bits(core::array::from_fn(|at| self.0[at] & !other.0[at]))
    }

    /// Removes the first run of neighbouring slots, or its first `max` slots. Returns the run's first slot
    /// and its length.
    pub fn take_run(&mut self, max: u32) -> Option<(u32, u32)> {
        let mut word = self.0.iter().position(|word| *word != 0)?;
        let first = self.0[word].trailing_zeros();
        let start = word as u32 * 64 + first;
        // In the first word the run begins at `first`. A run that reaches a word's end continues in the next
        // word.
        let (mut at, mut length) = (first, 0);
        loop {
            let here = (self.0[word] >> at).trailing_ones().min(64 - at).min(max - length);
            self.0[word] &= !(ones(here) << at);
            length += here;
            if at + here < 64 || length == max || word + 1 == WORDS {
                return Some((start, length));
            }
            (word, at) = (word + 1, 0);
        }
    }
}

/// Returns a word with the lowest `count` bits set. 64 sets all of them.
const fn ones(count: u32) -> u64 {
    if count == 0 { 0 } else { u64::MAX >> (64 - count) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// The model is a set of numbers. Stretches are long, so that runs cross words.
        #[test]
        fn runs_are_those_of_a_set(
            stretches in prop::collection::vec((0_u32..512, 1_u32..150), 0..12),
            max in prop_oneof![1_u32..4, 60_u32..70, Just(512)],
        ) {
            let (mut bits, mut set) = (Bits::NONE, BTreeSet::new());
            for (start, length) in stretches {
                for at in start..(start + length).min(512) {
                    bits.set(at);
                    set.insert(at);
                }
            }
            while let Some(&start) = set.first() {
                let length = (start..start + max).take_while(|at| set.contains(at)).count() as u32;
                prop_assert_eq!(bits.take_run(max), Some((start, length)));
                (start..start + length).for_each(|at| { set.remove(&at); });
                prop_assert_eq!(bits.count() as usize, set.len());
                prop_assert!((0..512).all(|at| bits.has(at) == set.contains(&at)));
            }
            prop_assert_eq!(bits.take_run(max), None);
        }
    }

    #[test]
    fn difference_and_complement_are_those_of_sets() {
        let (mut one, mut other) = (Bits::NONE, Bits::NONE);
        [3, 64, 511].iter().for_each(|at| one.set(*at));
        other.set(64);
        assert_eq!(one.without(&other).count(), 2);
        assert!(!one.complement().has(3) && one.complement().has(4));
        one.clear(3);
        assert!(!one.has(3) && Bits::ALL.complement() == Bits::NONE);
    }
}
