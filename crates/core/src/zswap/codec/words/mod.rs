//! Heaps: 64-bit words, each stored as its difference from another word, eight at a time.
//!
//! A page is 64 *groups* of eight words, a cache line each. A word's four-bit tag ([`TAGS`]) names the word
//! that it is like ([`Like`]), and says how many bytes of the difference, an XOR, are stored. No word depends
//! on the other words of its group. `docs/internals/pool.md` says why heaps suit this.
//!
//! [`plain`], [`avx2`] and [`avx512`] make the same bytes, which a property test checks.
// UNSAFETY: functions that are compiled for vectors are called where the CPU has the vectors.

/// Makes a table of a byte for each tag, for vectors to look up. A `const fn` can't take a closure.
#[cfg(target_arch = "x86_64")]
macro_rules! table_of_tags {
    ($tag:ident => $byte:expr) => {{
        let mut table = [0_u8; TAGS.len()];
        let mut number = 0;
        while number < TAGS.len() {
            let $tag = TAGS[number];
            table[number] = $byte;
            number += 1;
        }
        table
    }};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

use super::cpu::{self, Vectors};
use crate::units::PAGE_BYTES;

/// Words of a group, which are processed at once.
const LANES: usize = 8;
const GROUP_BYTES: usize = 8 * LANES;
const GROUPS: usize = PAGE_BYTES / GROUP_BYTES;
/// Bytes of a group's tags: two tags in a byte, the lower one first.
const TAGS_BYTES: usize = LANES / 2;
const BASE_BYTES: usize = 8;
/// Bytes in front of the stored words: the base and all tags.
const HEAD_BYTES: usize = BASE_BYTES + TAGS_BYTES * GROUPS;
/// Distances, in groups, to the earlier words that a word is compared to. Objects of 3, 6 and 12 words repeat
/// after three groups, of 5 and 10 after five, of 16 after four. Objects of 1, 2, 4 and 8 words repeat after
/// any number of groups.
const LAGS: [usize; 3] = [3, 4, 5];
const LAG_MAX: usize = 5;
/// Bytes that the encoder may write: every word whole. A group is stored as a whole, and the last one ends
/// here at most.
pub const OUTPUT_BYTES: usize = HEAD_BYTES + PAGE_BYTES;

/// The word that another word is compared to: its *reference*.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Like {
    /// No word: the difference is the word itself.
    Nothing,
    /// The page's *base*: its first word that looks like an address.
    Base,
    /// The word as many groups before as the first of [`LAGS`] says. `Lag1` and `Lag2` stand for the next
    /// two.
    Lag0,
    Lag1,
    Lag2,
}
const LIKE_COUNT: usize = 2 + LAGS.len();

/// The meaning of a tag.
#[derive(Clone, Copy)]
struct Tag {
    like: Like,
    /// Bytes of the difference that are stored.
    bytes: usize,
    /// Whether the difference is stored without its lowest [`LOW_BITS`], which are 0.
    is_high: bool,
}

/// Low bits that are 0 in all addresses of objects.
const LOW_BITS: u32 = 4;

/// All tags. A word gets the first tag that is true of it.
const TAGS: [Tag; 16] = {
    use Like::{Base, Lag0, Lag1, Lag2, Nothing};
    const fn whole(like: Like, bytes: usize) -> Tag {
        Tag { like, bytes, is_high: false }
    }
    const fn high(like: Like, bytes: usize) -> Tag {
        Tag { like, bytes, is_high: true }
    }
    [
        whole(Lag0, 0),
        whole(Lag2, 0),
        whole(Nothing, 0),
        whole(Nothing, 1),
        high(Lag0, 1),
        high(Lag1, 1),
        high(Lag2, 1),
        whole(Lag0, 2),
        whole(Base, 2),
        whole(Lag2, 3),
        high(Base, 3),
        whole(Base, 4),
        whole(Lag0, 5),
        whole(Nothing, 6),
        whole(Lag2, 7),
        whole(Nothing, 8),
    ]
};

/// The [`Like`] of each tag.
#[cfg(target_arch = "x86_64")]
const LIKE_OF_TAG: [u8; 16] = table_of_tags!(tag => tag.like as u8);

/// Returns whether a word looks like an address: its upper 16 bits are 0, and the next eight aren't.
const fn is_address(word: u64) -> bool {
    matches!(word >> 40, 1..=0xff)
}

/// Distance, in groups, between two groups that are sampled before a page is encoded.
const SAMPLE_STEP: usize = 8;
/// Sampled words that must be short (see [`count_short_with`]) for a page to look like a heap. In heaps most
/// words are short. In text at most an eighth is, where lines are indented.
const LIKELY: u32 = (LANES * GROUPS / SAMPLE_STEP) as u32 * 2 / 5;

/// Returns whether the page's words look like those of a heap. Looks only at one group in eight.
pub fn are_likely(page: &[u8; PAGE_BYTES]) -> bool {
    count_short_with(cpu::vectors(), page) >= LIKELY
}

/// Counts the sampled words that are short. A short word differs only in its two lowest bytes from a word at
/// one of [`LAGS`], or fits into four bytes.
fn count_short_with(vectors: Vectors, page: &[u8; PAGE_BYTES]) -> u32 {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `count_short` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Vbmi2 => unsafe { avx512::count_short(page) },
        // SAFETY: `vectors` says that the CPU has the features that `count_short` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => unsafe { avx2::count_short(page) },
        _ => plain::count_short(page),
    }
}

/// Returns the sampled groups. Each has enough groups before it for all [`LAGS`].
fn sample() -> impl Iterator<Item = usize> {
    (LAG_MAX..GROUPS).step_by(SAMPLE_STEP)
}

/// Encodes a page and returns the length, which exceeds a page's if the words have little in common.
///
/// ```text
///  base │ 512 tags, two in a byte │ what is stored of each word, lowest byte first
/// ```
pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
    encode_with(cpu::vectors(), page, output)
}

fn encode_with(vectors: Vectors, page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `encode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Vbmi2 => unsafe { avx512::encode(page, output) },
        // SAFETY: `vectors` says that the CPU has the features that `encode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => unsafe { avx2::encode(page, output) },
        _ => plain::encode(page, output, plain::choose_tags),
    }
}

/// Decodes `bytes` into `page`. Returns `None` if `bytes` has another length than its tags say; `page` then
/// has no particular content.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    decode_with(cpu::vectors(), bytes, page)
}

fn decode_with(vectors: Vectors, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `decode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Vbmi2 => unsafe { avx512::decode(bytes, page) },
        // SAFETY: `vectors` says that the CPU has the features that `decode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => unsafe { avx2::decode(bytes, page) },
        _ => plain::decode(bytes, page),
    }
}

#[cfg(test)]
mod tests {
    use super::super::page_of_words;
    use super::*;
    use proptest::prelude::*;

    /// Encodes and decodes a page with every version that this CPU has; all make the same bytes, which are
    /// returned.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Vec<u8> {
        let mut output = [0xee; OUTPUT_BYTES];
        let length = encode_with(Vectors::Any, page, &mut output);
        for vectors in cpu::each() {
            assert_eq!(count_short_with(vectors, page), count_short_with(Vectors::Any, page), "{vectors:?}");
            let mut others = [0xdd; OUTPUT_BYTES];
            assert_eq!(encode_with(vectors, page, &mut others), length, "{vectors:?}");
            assert!(output[..length] == others[..length], "{vectors:?}");
            let mut back = [0xcc; PAGE_BYTES];
            decode_with(vectors, &output[..length], &mut back).unwrap();
            assert!(back == *page, "{vectors:?}");
        }
        output[..length].to_vec()
    }

    #[test]
    fn each_tag_takes_what_it_says() {
        // Each case has a word, and the bytes that it takes among zeros if `FIRST` stands 1 to 6 groups
        // before it.
        const FIRST: u64 = 0x1111_2222_3333_4444;
        let cases = [
            (FIRST, [8, 8, 0, 1, 0, 8]),
            (FIRST ^ 0x770, [8, 8, 1, 1, 1, 8]),
            (FIRST ^ 0x77, [8, 8, 2, 8, 3, 8]),
            (FIRST ^ 0x7770, [8, 8, 2, 8, 3, 8]),
            (FIRST ^ 0x77_7777, [8, 8, 5, 8, 3, 8]),
            (FIRST ^ 0x77_7777_7777, [8, 8, 5, 8, 7, 8]),
            (FIRST ^ 0x77_7777_7777_7777, [8, 8, 8, 8, 7, 8]),
            (0x7f, [1; 6]),
            // The base is 0 if there is no address. The words in front of the page are 0, too.
            (0x7fff, [2; 6]),
            (0x7f_fff0, [3; 6]),
            (0x7f_ffff, [3, 3, 3, 3, 4, 3]),
            (0x7fff_ffff, [4; 6]),
            (0x7f_ffff_ffff, [5, 5, 6, 5, 5, 5]),
            (0x7f_ffff_ffff_ffff, [7, 7, 7, 7, 8, 7]),
            (0x7fff_ffff_ffff_ffff, [8; 6]),
        ];
        for (second, bytes) in cases {
            for (lag, bytes) in (1..).zip(bytes) {
                let mut words = vec![0; 512];
                (words[2], words[2 + 8 * lag]) = (FIRST, second);
                let length = round_trip(&page_of_words(&words)).len();
                let mut alone = words.clone();
                alone[2 + 8 * lag] = 0;
                let without = round_trip(&page_of_words(&alone)).len();
                assert_eq!(length - without, bytes, "{second:#x}, {lag} groups on");
            }
        }
    }

    #[test]
    fn addresses_are_told_by_the_first_of_the_page() {
        const ADDRESS: u64 = 0x7f3a_9c40_12e0;
        let cases = [
            (ADDRESS, 2),
            (ADDRESS ^ 0x7777, 2),
            (ADDRESS ^ 0x777_7770, 3),
            (ADDRESS ^ 0x77_7777, 4),
            (ADDRESS ^ 0x7777_7777, 4),
            (ADDRESS ^ 0x0700_7777_7777, 6),
        ];
        for (second, bytes) in cases {
            // The words in front of the base aren't addresses.
            let mut words = vec![0; 512];
            (words[3], words[5], words[7]) = (0xff_ffff_ffff, 1 << 48, ADDRESS);
            let without = round_trip(&page_of_words(&words)).len();
            words[10] = second;
            assert_eq!(round_trip(&page_of_words(&words)).len() - without, bytes, "{second:#x}");
        }
    }

    #[test]
    fn a_page_of_nothing_in_common_takes_more_than_a_page() {
        let words: Vec<u64> =
            (1..=512_u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63).collect();
        assert_eq!(round_trip(&page_of_words(&words)).len(), HEAD_BYTES + PAGE_BYTES);
    }

    #[test]
    fn truncated_and_padded_bytes_are_refused() {
        let words: Vec<u64> = (0..512_u64).map(|n| (n % 7) << (n % 61)).collect();
        let mut bytes = round_trip(&page_of_words(&words));
        let mut back = [0; PAGE_BYTES];
        for vectors in cpu::each() {
            for length in 0..bytes.len() {
                assert_eq!(decode_with(vectors, &bytes[..length], &mut back), None, "{vectors:?}, {length}");
            }
        }
        bytes.push(0);
        assert!(cpu::each().all(|vectors| decode_with(vectors, &bytes, &mut back).is_none()));
    }

    /// Words as heaps have them, so that every tag occurs.
    fn heap() -> impl Strategy<Value = Vec<u64>> {
        const ADDRESS: u64 = 0x7f3a_9c40_12e0;
        let word = (0_u8..12, any::<u64>());
        proptest::collection::vec(word, 512).prop_map(|kinds| {
            let mut words: Vec<u64> = Vec::with_capacity(512);
            for (at, (kind, random)) in kinds.into_iter().enumerate() {
                let before = |groups: u64| at.checked_sub(8 * groups as usize).map_or(0, |at| words[at]);
                words.push(match kind {
                    0 => 0,
                    1 => random & 0xff,
                    2 => random & 0xffff,
                    3 => random & 0xffff_ffff,
                    4 => before(1 + random % 6),
                    5 => before(1 + random % 6) ^ (random >> (8 * (3 + random % 5))),
                    6 => random >> (8 * (1 + random % 4)),
                    7 => before(3) ^ (random >> 8),
                    // Near the base, and multiples of 16.
                    8 => ADDRESS ^ (random >> (32 + random % 17)),
                    9 => ADDRESS ^ (random >> (36 + random % 17) << 4),
                    10 => before(3 + random % 3) ^ (random >> 56 << 4),
                    _ => random,
                });
            }
            words
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_heap_comes_back(words in heap()) {
            round_trip(&page_of_words(&words));
        }

        /// All decoders treat damaged bytes alike: they find the same fault, or make the same page.
        #[test]
        fn damaged_bytes_are_answered_alike(
            words in heap(),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = round_trip(&page_of_words(&words));
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let mut page = [0; PAGE_BYTES];
            let plain = decode_with(Vectors::Any, &bytes, &mut page);
            for vectors in cpu::each() {
                let mut other = [0; PAGE_BYTES];
                prop_assert_eq!(decode_with(vectors, &bytes, &mut other), plain, "{:?}", vectors);
                prop_assert!(plain.is_none() || page == other, "{:?}", vectors);
            }
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..4400)) {
            for vectors in cpu::each() {
                let _ = decode_with(vectors, &bytes, &mut [0; PAGE_BYTES]);
            }
        }
    }
}
