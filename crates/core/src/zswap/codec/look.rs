//! A look at a page, which tells the kinds of pages from each other: at one word of each cache line, each time at another place
//! in it, because records repeat themselves, and at that word's neighbour.
//!
//! The same code is compiled three times: for any CPU, and for vectors of 32 bytes and of 64, where words are picked by hand.
// UNSAFETY: calls of functions that are compiled for more than every CPU has, and reads of a page's lines.

use super::cpu::{self, Vectors};
use super::word;
use crate::units::PAGE_BYTES;

/// Bytes of which one word is looked at.
const LINE_BYTES: usize = 64;
/// Words of a line; as many lines make a group, of which each gives a word of another place.
const LANES: usize = LINE_BYTES / 8;
const LOOKS: usize = PAGE_BYTES / LINE_BYTES;

/// The line of its group that gives the word of this lane.
const fn line_of(lane: usize) -> usize {
    lane * 5 % LANES
}

/// What was seen.
pub struct Look {
    words: Words,
    /// Bytes look as if each were a die that was thrown.
    pub is_noise: bool,
    /// Three of four words are 0.
    pub is_sparse: bool,
    /// Half of the words are as their neighbours.
    pub is_repeated: bool,
}

type Words = [u64; LOOKS];

impl Look {
    /// Looks at a page.
    pub fn at(page: &[u8; PAGE_BYTES]) -> Look {
        Look::at_by(cpu::vectors(), page)
    }

    fn at_by(vectors: Vectors, page: &[u8; PAGE_BYTES]) -> Look {
        match vectors {
            // SAFETY: the CPU has what it is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::look(page) },
            // SAFETY: the CPU has what it is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::look(page) },
            _ => look_by(pick(page)),
        }
    }

    /// Whether hardly any word is there twice: then matches don't make it shorter than what makes each word shorter.
    pub fn is_varied(&self) -> bool {
        /// Of 64 words that are all different, 57 set a bit of their own in the mean.
        const DIFFERENT: u32 = 50;
        let mut seen = [0_u64; 4];
        for word in self.words {
            let bit = word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            seen[bit as usize / 64] |= 1 << (bit % 64);
        }
        seen.iter().map(|seen| seen.count_ones()).sum::<u32>() >= DIFFERENT
    }
}

/// The words looked at, and the neighbour of each.
#[inline(always)]
fn pick(page: &[u8; PAGE_BYTES]) -> [Words; 2] {
    [0, 1].map(|other| {
        core::array::from_fn(|at| {
            let lane = at % LANES;
            word(page, (at - lane + line_of(lane)) * LANES + (lane ^ other))
        })
    })
}

#[inline(always)]
fn look_by([words, neighbours]: [Words; 2]) -> Look {
    let zeros = words.iter().filter(|word| **word == 0).count();
    let alike = words.iter().zip(&neighbours).filter(|(word, other)| word == other).count();
    Look {
        is_noise: is_noise(&words),
        is_sparse: zeros >= LOOKS * 3 / 4,
        is_repeated: alike >= LOOKS / 2,
        words,
    }
}

/// Whether bytes look as if each were a die that was thrown: what is encrypted or compressed already. Each of the four bits
/// looked at is set in half of the bytes then, give or take three times the standard deviation. A page of which an eighth is
/// something else isn't noise: it may just fit. Nor is one of which one byte of each word isn't: that is a column. Nor one of
/// bytes that are thrown as a whole, as the upper ones of small numbers of either sign are: there a bit tells the next.
#[inline(always)]
fn is_noise(words: &Words) -> bool {
    // By hand: iterators' loops aren't always compiled into who calls them, and would be for any CPU then.
    is_thrown(words, |word| word >> 4)
        && is_thrown(words, |word| word >> 5)
        && is_thrown(words, |word| word >> 6)
        && is_thrown(words, |word| word >> 7)
        && is_thrown(words, |word| (word ^ word >> 1) >> 4)
}

/// Whether the lowest bit of each byte of that is.
#[inline(always)]
fn is_thrown(words: &Words, of: impl Fn(u64) -> u64) -> bool {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const EVERY_OTHER: u64 = 0x00ff_00ff_00ff_00ff;
    const TOP: u64 = EACH << 7;
    const HALF: u64 = LOOKS as u64 / 2;
    /// Five times the standard deviation, of the same byte of each word.
    const OF_ONE_BYTE: u64 = 20;
    /// Three times, of all.
    const OF_ALL: u64 = 34;
    // Eight counts in one word, of which each stays below the top bit of its byte until that is what it is compared by.
    const { assert!(LOOKS + 0x7f - (HALF + OF_ONE_BYTE) as usize <= 0xff && HALF > OF_ONE_BYTE) };
    let counts = words.iter().fold(0, |counts, word| counts + (of(*word) & EACH));
    let too_many = counts + EACH * (0x7f - HALF - OF_ONE_BYTE);
    let enough = counts + EACH * (0x80 - HALF + OF_ONE_BYTE);
    // Four sums of two, and all of them on top.
    let pairs = (counts & EVERY_OTHER) + (counts >> 8 & EVERY_OTHER);
    let sum = pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48;
    too_many & TOP == 0 && enough & TOP == TOP && sum.abs_diff(8 * HALF) <= OF_ALL
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Look, look_by, pick};
    use crate::units::PAGE_BYTES;

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    pub fn look(page: &[u8; PAGE_BYTES]) -> Look {
        look_by(pick(page))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{LANES, LINE_BYTES, LOOKS, Look, Words, line_of, look_by};
    use crate::units::PAGE_BYTES;
    use core::arch::x86_64::{
        _mm512_loadu_si512, _mm512_mask_mov_epi64, _mm512_setzero_si512, _mm512_shuffle_epi32,
        _mm512_storeu_si512,
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,popcnt")]
    pub fn look(page: &[u8; PAGE_BYTES]) -> Look {
        look_by(pick(page))
    }

    /// As [`pick`](super::pick), a line at a time: of each the lane that is its own.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,popcnt")]
    #[inline]
    fn pick(page: &[u8; PAGE_BYTES]) -> [Words; 2] {
        /// Of two words in turns, one for the other.
        const SWAPPED: i32 = 0b01_00_11_10;
        let mut picked = [[0; LOOKS]; 2];
        for group in (0..LOOKS).step_by(LANES) {
            let (mut words, mut neighbours) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for lane in 0..LANES {
                let at = (group + line_of(lane)) * LINE_BYTES;
                // SAFETY: a line of the page.
                let line = unsafe { _mm512_loadu_si512(page.as_ptr().add(at).cast()) };
                words = _mm512_mask_mov_epi64(words, 1 << lane, line);
                neighbours = _mm512_mask_mov_epi64(neighbours, 1 << (lane ^ 1), line);
            }
            neighbours = _mm512_shuffle_epi32::<SWAPPED>(neighbours);
            for (to, words) in picked.iter_mut().zip([words, neighbours]) {
                let to: &mut [u64; LANES] = to[group..].first_chunk_mut().expect("a group of words");
                // SAFETY: as many bytes.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
            }
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn of_each_line_one_word_is_seen_and_of_each_place_as_many() {
        let page = super::super::page_of_words(&(0..512).collect::<Vec<u64>>());
        for vectors in cpu::each() {
            let words = Look::at_by(vectors, &page).words;
            for at in 0..LOOKS as u64 {
                assert_eq!(words.iter().filter(|word| **word / LANES as u64 == at).count(), 1, "{vectors:?}");
                let of_lane = words.iter().filter(|word| **word % LANES as u64 == at % 8).count();
                assert_eq!(of_lane, LOOKS / LANES, "{vectors:?}");
            }
        }
    }

    #[test]
    fn a_neighbour_is_one_of_two_in_the_same_line() {
        for (same, is_repeated) in [(1, false), (2, true), (3, true), (64, true)] {
            let page = super::super::page_of_words(&(0..512).map(|at| 1 + at / same).collect::<Vec<u64>>());
            for vectors in cpu::each() {
                assert_eq!(
                    Look::at_by(vectors, &page).is_repeated,
                    is_repeated,
                    "{vectors:?}: {same} times each"
                );
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever compiles it, it sees the same: pages whose words are 0, as the one before, or anything.
        #[test]
        fn every_version_sees_the_same(
            seed in any::<u64>(), zeros in 0_u64..=64, same in 0_u64..=64,
        ) {
            let random = |at: u64| (seed ^ at).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(31).wrapping_mul(seed | 1);
            let mut words = [0_u64; 512];
            for at in 0..512_usize {
                let (dice, before) = (random(at as u64 + 1000) >> 20, words[at.saturating_sub(1)]);
                words[at] = match (dice % 64 < zeros, dice >> 6 & 63 < same) {
                    (true, _) => 0,
                    (false, true) => before,
                    (false, false) => random(at as u64),
                };
            }
            let page = super::super::page_of_words(&words);
            let plain = Look::at_by(Vectors::Any, &page);
            for vectors in cpu::each() {
                let look = Look::at_by(vectors, &page);
                prop_assert_eq!(look.words, plain.words);
                prop_assert_eq!(
                    [look.is_noise, look.is_sparse, look.is_repeated],
                    [plain.is_noise, plain.is_sparse, plain.is_repeated]
                );
            }
        }
    }
}
