//! Random numbers for the decorators: the splitmix64 sequence, so that one seed reproduces a run.

/// A sequence drawn from a seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

/// The number that stands for certainty. Probabilities are given in parts per million.
pub(crate) const PPM: u32 = 1_000_000;

impl Random {
    pub(crate) const fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        // The constants are those of splitmix64: the golden ratio, and two multipliers found by search.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..end`. The bias of the remainder is below 1e-9 for the small ends that this
    /// crate uses.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0);
        self.next() % end
    }

    /// Returns true with this probability. Every call draws one number, whatever the probability is. A change
    /// of one probability of a plan therefore doesn't shift the hits of the other probabilities.
    pub(crate) fn chance(&mut self, ppm: u32) -> bool {
        self.below(PPM as u64) < ppm as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_splitmix64() {
        // First outputs for seed 0, as published with the algorithm.
        let mut random = Random::new(0);
        assert_eq!(random.next(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(random.next(), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn chance_is_never_at_zero_and_always_at_a_million() {
        let mut random = Random::new(1);
        assert!((0..1000).all(|_| !random.chance(0) && random.chance(PPM)));
    }
}
