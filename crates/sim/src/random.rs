//! The simulator's only source of random numbers: the splitmix64 sequence of the seed. All decisions of the
//! simulator are drawn here, so one seed reproduces a run.

use std::cell::Cell;

/// A sequence drawn from a seed. Drawing takes `&self`, so any code can draw.
pub(crate) struct Random(Cell<u64>);

impl Random {
    pub(crate) const fn new(seed: u64) -> Random {
        Random(Cell::new(seed))
    }

    pub(crate) fn next(&self) -> u64 {
        // The constants are those of splitmix64.
        self.0.set(self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut z = self.0.get();
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..end`; 0 if the range is empty.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// Returns an index into a sequence of this length.
    pub(crate) fn index(&self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// Returns a number in `first..=last`.
    pub(crate) fn within(&self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// Returns true in `percent` of 100 cases.
    pub(crate) fn percent(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns one of the elements.
    pub(crate) fn pick<T: Copy>(&self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// Returns an index, drawn by weight. At least one weight must not be 0.
    pub(crate) fn weighted(&self, weights: &[u32]) -> usize {
        let mut at = self.below(weights.iter().map(|&weight| u64::from(weight)).sum());
        for (index, &weight) in weights.iter().enumerate() {
            match at.checked_sub(u64::from(weight)) {
                Some(rest) => at = rest,
                None => return index,
            }
        }
        panic!("weights without weight");
    }
}
