//! A look at a page, which tells the kinds of pages from each other: at one word of each cache line, each time at another place
//! in it, because records repeat themselves, and at the word before that.
//!
//! The same code is compiled three times: for any CPU, and for vectors of 32 bytes and of 64, where words are picked by hand.
// UNSAFETY: calls of functions that are compiled for more than every CPU has; reads of a page's lines, and writes of words of ours.

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

/// The lane before this one. The first one's is the last of the same line, so that no line is read twice.
const fn before(lane: usize) -> usize {
    (lane + LANES - 1) % LANES
}

/// What was seen.
pub struct Look {
    words: Words,
    /// Bytes look as if each were a die that was thrown.
    pub is_noise: bool,
    /// Three of four words are 0.
    pub is_sparse: bool,
    /// Half of the words are as the ones before.
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

/// The words looked at, and the ones before.
#[inline(always)]
fn pick(page: &[u8; PAGE_BYTES]) -> [Words; 2] {
    let line = |at: usize| at / LANES * LANES + line_of(at % LANES);
    [
        core::array::from_fn(|at| word(page, line(at) * LANES + at % LANES)),
        core::array::from_fn(|at| word(page, line(at) * LANES + before(at % LANES))),
    ]
}

#[inline(always)]
fn look_by([words, before]: [Words; 2]) -> Look {
    let zeros = words.iter().filter(|word| **word == 0).count();
    let alike = words.iter().zip(&before).filter(|(word, other)| word == other).count();
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
    // One by one: the loop of `(4..8).all()` isn't compiled into this, and so for any CPU.
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
    const LEAST: u64 = HALF - OF_ONE_BYTE;
    const MOST: u64 = HALF + OF_ONE_BYTE;
    // Eight counts in one word. What is added has those above MOST, or those from LEAST on, reach the top bits of their bytes.
    const { assert!(MOST <= 0x7f && LOOKS as u64 + 0x80 - LEAST <= 0xff) };
    let counts = words.iter().fold(0, |counts, word| counts + (of(*word) & EACH));
    let too_many = counts + EACH * (0x7f - MOST);
    let enough = counts + EACH * (0x80 - LEAST);
    // Four sums of two, and their sum in the upper quarter.
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
    use super::{LANES, LINE_BYTES, LOOKS, Look, Words, before, line_of, look_by};
    use crate::units::PAGE_BYTES;
    use core::arch::x86_64::{
        _mm512_alignr_epi64, _mm512_loadu_si512, _mm512_mask_mov_epi64, _mm512_setzero_si512,
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
        let mut picked = [[0; LOOKS]; 2];
        for group in (0..LOOKS).step_by(LANES) {
            let (mut words, mut those_before) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for lane in 0..LANES {
                let at = (group + line_of(lane)) * LINE_BYTES;
                // SAFETY: a line of the page.
                let line = unsafe { _mm512_loadu_si512(page.as_ptr().add(at).cast()) };
                words = _mm512_mask_mov_epi64(words, 1 << lane, line);
                those_before = _mm512_mask_mov_epi64(those_before, 1 << before(lane), line);
            }
            // Each goes to the lane behind its own.
            those_before = _mm512_alignr_epi64::<{ LANES as i32 - 1 }>(those_before, those_before);
            for (to, words) in picked.iter_mut().zip([words, those_before]) {
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
    fn a_word_is_compared_to_the_one_before_it_in_its_line() {
        // Of each eight words those that are the same; the others are like none.
        let cases: [(&[u64], bool); 6] = [
            (&[], false),
            // Half of all, and each as its neighbour on one side.
            (&[0, 1, 4, 5], false),
            (&[0, 1, 2, 3], false),
            (&[0, 1, 2, 3, 4], true),
            // The first of a line is compared to the last.
            (&[0, 1, 2, 7], false),
            (&[0, 1, 2, 3, 7], true),
        ];
        for (same, is_repeated) in cases {
            let word = |at: u64| at / 8 * 100 + if same.contains(&(at % 8)) { 99 } else { at % 8 };
            let page = super::super::page_of_words(&(0..512).map(word).collect::<Vec<u64>>());
            for vectors in cpu::each() {
                assert_eq!(Look::at_by(vectors, &page).is_repeated, is_repeated, "{vectors:?}: {same:?}");
            }
        }
    }

    /// Whether that bit is thrown, counted byte by byte.
    fn is_plainly_thrown(words: &Words, bit: u32) -> bool {
        let of_byte = |byte: u32| words.iter().filter(|word| **word >> (8 * byte + bit) & 1 == 1).count();
        let counts: Vec<usize> = (0..8).map(of_byte).collect();
        counts.iter().sum::<usize>().abs_diff(256) <= 34
            && counts.iter().all(|count| count.abs_diff(32) <= 20)
    }

    /// Words with so many ones in each byte.
    fn words_of(counts: [usize; 8]) -> Words {
        let word = |at: usize| (0..8).map(|byte| u64::from(at < counts[byte]) << (8 * byte)).sum();
        core::array::from_fn(word)
    }

    #[test]
    fn a_byte_that_is_set_too_often_or_too_seldom_is_not_thrown() {
        // So many of the words of one byte; the others even it out.
        for (count, is_thrown_then) in
            [(0, false), (11, false), (12, true), (52, true), (53, false), (64, false)]
        {
            for byte in 0..8 {
                let mut counts = [(256_usize - count).div_ceil(7); 8];
                counts[byte] = count;
                let words = words_of(counts);
                assert_eq!(is_thrown(&words, |word| word), is_thrown_then, "{count} of byte {byte}");
            }
        }
        // And all together.
        for (sum, is_thrown_then) in [(221, false), (222, true), (290, true), (291, false)] {
            let words = words_of(core::array::from_fn(|byte| (sum + byte) / 8));
            assert_eq!(is_thrown(&words, |word| word), is_thrown_then, "{sum} in all");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn eight_bytes_at_once_are_counted_as_one_at_a_time(
            counts in proptest::array::uniform8(prop_oneof![0_usize..=64, 10_usize..15, 50_usize..55, 24_usize..41]),
        ) {
            let words = words_of(counts);
            prop_assert_eq!(is_thrown(&words, |word| word), is_plainly_thrown(&words, 0), "{:?}", counts);
        }

        /// Bits that are always or never set, and such as are what the next one is.
        #[test]
        fn noise_is_what_has_four_bits_thrown_and_not_one_as_the_next(
            words in proptest::collection::vec(any::<u64>(), LOOKS),
            set in prop_oneof![Just(0), any::<u32>().prop_map(|bit| 1_u64 << (bit % 64))],
            same in proptest::option::of(0_u32..8),
        ) {
            let each = 0x0101_0101_0101_0101_u64;
            let words: Words = core::array::from_fn(|at| match same {
                Some(bit) if bit < 7 => {
                    let others = words[at] & !(each << (bit + 1));
                    others | (others & each << bit) << 1 | set
                }
                _ => words[at] | set,
            });
            let differ = words.map(|word| word ^ word >> 1);
            let plain = (4..8).all(|bit| is_plainly_thrown(&words, bit)) && is_plainly_thrown(&differ, 4);
            prop_assert_eq!(is_noise(&words), plain);
        }

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
