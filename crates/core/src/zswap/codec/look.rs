//! A look at a page, which tells the kinds of pages apart.
//!
//! A look samples one word of each cache line, and the word before it. The place in the line changes from
//! line to line, because records repeat. The same code is compiled three times: for any CPU, and for vectors
//! of 32 and of 64 bytes. For vectors of 64 bytes hand-written code picks the words.
// UNSAFETY: this file calls functions that are compiled for features which not every CPU has. Vectors read a
// page's lines and write words of Farpage's.

use super::cpu::{self, Vectors};
use super::word;
use crate::units::PAGE_BYTES;

/// Bytes of a cache line, of which one word is sampled.
const LINE_BYTES: usize = 64;
/// Words of a line. As many lines make a group: each line of a group gives the word at another place.
const LANES: usize = LINE_BYTES / 8;
const LOOKS: usize = PAGE_BYTES / LINE_BYTES;

/// Returns the line of its group that gives the word of this lane.
const fn line_of(lane: usize) -> usize {
    lane * 5 % LANES
}

/// Returns the lane before this one. For the first lane it is the last of the same line, so that no line is
/// read twice.
const fn before(lane: usize) -> usize {
    (lane + LANES - 1) % LANES
}

/// The findings of a look at a page.
pub struct Look {
    words: Words,
    /// The bytes look random, as encrypted or compressed data does.
    pub is_noise: bool,
    /// At least three of four sampled words are 0.
    pub is_sparse: bool,
    /// At least half of the sampled words equal the word before them.
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
            // SAFETY: `vectors` says that the CPU has the features that `look` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::look(page) },
            // SAFETY: `vectors` says that the CPU has the features that `look` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::look(page) },
            _ => look_by(pick(page)),
        }
    }

    /// Returns whether hardly any sampled word occurs twice. If so, matches make the page no shorter than the
    /// codecs that shorten each word.
    pub fn is_varied(&self) -> bool {
        /// Bits that varied words set at least. 64 different words set 57 of the 256 bits in the mean.
        const DIFFERENT: u32 = 50;
        let mut seen = [0_u64; 4];
        for word in self.words {
            let bit = word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            seen[bit as usize / 64] |= 1 << (bit % 64);
        }
        seen.iter().map(|seen| seen.count_ones()).sum::<u32>() >= DIFFERENT
    }
}

/// Returns the sampled words, and the word before each.
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

/// Returns whether the bytes look random, as those of encrypted or compressed data do. Each of the four
/// sampled bits is then set in half of the bytes, within three standard deviations. Three kinds of pages
/// aren't noise. If an eighth of a page isn't random, the page may just compress enough to fit. If one byte
/// of each word isn't random, that byte is a column. If the bits of a byte equal each other, one bit tells
/// the next: the upper bytes of small signed numbers are like this.
#[inline(always)]
fn is_noise(words: &Words) -> bool {
    // The calls are written out. The compiler doesn't inline the loop of `(4..8).all()` into this function,
    // and so compiles that loop for any CPU.
    is_thrown(words, |word| word >> 4)
        && is_thrown(words, |word| word >> 5)
        && is_thrown(words, |word| word >> 6)
        && is_thrown(words, |word| word >> 7)
        && is_thrown(words, |word| (word ^ word >> 1) >> 4)
}

/// Returns whether the lowest bit of each byte of `of(word)` looks random over all words.
#[inline(always)]
fn is_thrown(words: &Words, of: impl Fn(u64) -> u64) -> bool {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const EVERY_OTHER: u64 = 0x00ff_00ff_00ff_00ff;
    const TOP: u64 = EACH << 7;
    const HALF: u64 = LOOKS as u64 / 2;
    /// Distance from half that the count of one byte's bits may have: five standard deviations.
    const OF_ONE_BYTE: u64 = 20;
    /// Distance from half that the count of all bits may have: three standard deviations.
    const OF_ALL: u64 = 34;
    const LEAST: u64 = HALF - OF_ONE_BYTE;
    const MOST: u64 = HALF + OF_ONE_BYTE;
    // A word holds eight counts. In the first sum each count above MOST reaches the top bit of its byte. In
    // the second sum each count of LEAST or more does.
    const { assert!(MOST <= 0x7f && LOOKS as u64 + 0x80 - LEAST <= 0xff) };
    let counts = words.iter().fold(0, |counts, word| counts + (of(*word) & EACH));
    let too_many = counts + EACH * (0x7f - MOST);
    let enough = counts + EACH * (0x80 - LEAST);
    // Add pairs of counts, then the four sums. The total lies in the upper quarter of the word.
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

    /// Picks as [`pick`](super::pick) does, a line at a time: of each line the lane that is its own.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,popcnt")]
    #[inline]
    fn pick(page: &[u8; PAGE_BYTES]) -> [Words; 2] {
        let mut picked = [[0; LOOKS]; 2];
        for group in (0..LOOKS).step_by(LANES) {
            let (mut words, mut those_before) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for lane in 0..LANES {
                let at = (group + line_of(lane)) * LINE_BYTES;
                // SAFETY: `at` is the first byte of a line of the page, so a line can be read.
                let line = unsafe { _mm512_loadu_si512(page.as_ptr().add(at).cast()) };
                words = _mm512_mask_mov_epi64(words, 1 << lane, line);
                those_before = _mm512_mask_mov_epi64(those_before, 1 << before(lane), line);
            }
            // Each word moves to the lane behind its own.
            those_before = _mm512_alignr_epi64::<{ LANES as i32 - 1 }>(those_before, those_before);
            for (to, words) in picked.iter_mut().zip([words, those_before]) {
                let to: &mut [u64; LANES] = to[group..].first_chunk_mut().expect("a group of words");
                // SAFETY: `to` has as many bytes as the vector.
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
        // Each case lists those of eight words that are the same. Each other word equals no word.
        let cases: [(&[u64], bool); 6] = [
            (&[], false),
            // Half of all words are the same, and each equals its neighbour on one side.
            (&[0, 1, 4, 5], false),
            (&[0, 1, 2, 3], false),
            (&[0, 1, 2, 3, 4], true),
            // The first word of a line is compared to the last.
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

    /// Counts byte by byte whether `bit` looks random.
    fn is_plainly_thrown(words: &Words, bit: u32) -> bool {
        let of_byte = |byte: u32| words.iter().filter(|word| **word >> (8 * byte + bit) & 1 == 1).count();
        let counts: Vec<usize> = (0..8).map(of_byte).collect();
        counts.iter().sum::<usize>().abs_diff(256) <= 34
            && counts.iter().all(|count| count.abs_diff(32) <= 20)
    }

    /// Returns words of which `counts` set the lowest bit of each byte.
    fn words_of(counts: [usize; 8]) -> Words {
        let word = |at: usize| (0..8).map(|byte| u64::from(at < counts[byte]) << (8 * byte)).sum();
        core::array::from_fn(word)
    }

    #[test]
    fn a_byte_that_is_set_too_often_or_too_seldom_is_not_thrown() {
        // `count` of the words set the bit of one byte. The other bytes even the sum out.
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
        // The same for the sum of all bytes.
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

        /// One bit may be always set, and another may equal the next.
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

        /// Every version sees the same, whatever it is compiled for. The pages' words are 0, equal to the
        /// word before, or anything.
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
