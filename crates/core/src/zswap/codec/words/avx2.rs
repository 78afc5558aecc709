//! The codec of heaps for vectors of 32 bytes: the code for any CPU, compiled for them. Only `choose_tags` is
//! written by hand. It finds the tags of four words at once.
// UNSAFETY: vector instructions read and write through pointers.

use super::plain::{self, Group, References};
use super::{LANES, LIKE_OF_TAG, LOW_BITS, OUTPUT_BYTES, TAGS};
use crate::units::PAGE_BYTES;
use core::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_cmpeq_epi64,
    _mm256_loadu_si256, _mm256_max_epu8, _mm256_or_si256, _mm256_set1_epi64x, _mm256_setzero_si256,
    _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_srlv_epi64, _mm256_storeu_si256, _mm256_sub_epi64,
    _mm256_xor_si256,
};

/// Low bits that each tag's difference is stored without.
const SHIFT_OF_TAG: [u8; 16] = table_of_tags!(tag => if tag.is_high { LOW_BITS as u8 } else { 0 });

/// Words in half of a group.
const HALF: usize = LANES / 2;

/// Does what [`plain::choose_tags`] does.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
#[inline]
fn choose_tags(group: &Group, references: References) -> ([u64; LANES], [u64; LANES]) {
    const LAST: i64 = TAGS.len() as i64 - 1;
    let (mut tags, mut stored) = ([0; LANES], [0; LANES]);
    for half in [0, HALF] {
        // SAFETY: `half` is 0 or 4. A group has 64 bytes, so 32 bytes from `8 * half` on lie in it.
        let load = |group: &Group| unsafe { _mm256_loadu_si256(group.as_ptr().add(8 * half).cast()) };
        // SAFETY: `half` is 0 or 4. `words` has 8 words, so 4 words from `half` on lie in it.
        let store = |words: &mut [u64; LANES], half_of| unsafe {
            _mm256_storeu_si256(words.as_mut_ptr().add(half).cast(), half_of);
        };
        let words = load(group);
        let low_bits = _mm256_set1_epi64x((1 << LOW_BITS) - 1);
        // How far the first tag that is true stands before the last tag: the largest of these distances.
        let mut behind = _mm256_setzero_si256();
        macro_rules! try_each {
            ($($number:literal)*) => {$(
                let tag = const { TAGS[$number] };
                let difference = _mm256_xor_si256(words, load(references[tag.like as usize]));
                // The bits that must be 0 for this tag to be true.
                let rest = if tag.is_high {
                    let above = _mm256_srli_epi64::<{ 8 * TAGS[$number].bytes as i32 + LOW_BITS as i32 }>(difference);
                    _mm256_or_si256(above, _mm256_and_si256(difference, low_bits))
                } else {
                    _mm256_srli_epi64::<{ 8 * TAGS[$number].bytes as i32 }>(difference)
                };
                let is_true = _mm256_cmpeq_epi64(rest, _mm256_setzero_si256());
                let distance = _mm256_and_si256(is_true, _mm256_set1_epi64x(LAST - $number));
                behind = _mm256_max_epu8(behind, distance);
            )*};
        }
        try_each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
        let number = _mm256_sub_epi64(_mm256_set1_epi64x(LAST), behind);
        // Only the lowest byte of each word is a tag.
        let of_tag = |table| _mm256_and_si256(look_up(table, number), _mm256_set1_epi64x(0xff));
        let like = of_tag(&LIKE_OF_TAG);
        let mut reference = _mm256_setzero_si256();
        for (at, group) in references.into_iter().enumerate().skip(1) {
            let matching = _mm256_cmpeq_epi64(like, _mm256_set1_epi64x(at as i64));
            reference = _mm256_or_si256(reference, _mm256_and_si256(matching, load(group)));
        }
        store(&mut tags, number);
        let difference = _mm256_xor_si256(words, reference);
        store(&mut stored, _mm256_srlv_epi64(difference, of_tag(&SHIFT_OF_TAG)));
    }
    (tags, stored)
}

/// Looks up each byte of `at`, which must be below 16, in the table.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
#[inline]
fn look_up(table: &[u8; 16], at: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes, as many as the vector.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at)
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub fn count_short(page: &[u8; PAGE_BYTES]) -> u32 {
    plain::count_short(page)
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
    plain::encode(page, output, |group, references| choose_tags(group, references))
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    plain::decode(bytes, page)
}
