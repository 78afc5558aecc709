//! The codec of heaps for vectors of 64 bytes, with AVX-512 VBMI and VBMI2. One vector is a group. One
//! instruction gathers the bytes that are stored of a group.
// UNSAFETY: vector instructions read and write through pointers.

use super::super::word;
use super::{
    BASE_BYTES, GROUP_BYTES, GROUPS, HEAD_BYTES, LAG_MAX, LAGS, LANES, LIKE_COUNT, LIKE_OF_TAG, LOW_BITS,
    OUTPUT_BYTES, TAGS, TAGS_BYTES, sample,
};
use crate::units::PAGE_BYTES;
use core::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_loadu_si128, _mm_movepi8_mask,
    _mm_shuffle_epi8, _mm512_cmpeq_epi64_mask, _mm512_cmplt_epu64_mask, _mm512_cvtepi64_epi8,
    _mm512_cvtepu8_epi64, _mm512_loadu_si512, _mm512_lzcnt_epi64, _mm512_mask_mov_epi64,
    _mm512_mask_or_epi64, _mm512_mask_slli_epi64, _mm512_mask_srli_epi64, _mm512_maskz_compress_epi8,
    _mm512_maskz_expand_epi8, _mm512_maskz_loadu_epi8, _mm512_min_epu64, _mm512_permutexvar_epi8,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_srli_epi64, _mm512_storeu_si512, _mm512_sub_epi64,
    _mm512_testn_epi64_mask, _mm512_xor_si512, _pdep_u64, _pext_u64,
};

/// Mask of the tags of eight words, if each tag is a byte.
const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Bit of an index into [`TAG_BY_ZEROS`]: the difference ends with four bits of zeros.
const ENDS_LOW: i64 = 32;

/// Tags by what a word is compared to, and by the number of four-bit zeros that the difference begins
/// with.
const TAG_BY_ZEROS: [[u8; 64]; LIKE_COUNT] = {
    const { assert!(LOW_BITS == 4) };
    let mut tables = [[15; 64]; LIKE_COUNT];
    let mut number = TAGS.len();
    while number > 0 {
        number -= 1;
        let tag = TAGS[number];
        let mut zeros = 16 - 2 * tag.bytes - tag.is_high as usize;
        while zeros <= 16 {
            if !tag.is_high {
                tables[tag.like as usize][zeros] = number as u8;
            }
            tables[tag.like as usize][zeros + ENDS_LOW as usize] = number as u8;
            zeros += 1;
        }
    }
    tables
};

/// The bytes that each tag stores, a bit for each.
const BYTES_OF_TAG: [u8; 16] = table_of_tags!(tag => (1_u16 << tag.bytes).wrapping_sub(1) as u8);

/// The highest bit of each byte says whether the tag's difference is stored without its low bits.
const HIGH_OF_TAG: [u8; 16] = table_of_tags!(tag => (tag.is_high as u8) << 7);

/// Compiles functions for CPUs of the level `Vectors::Vbmi2`.
macro_rules! vbmi2 {
    ($($function:item)*) => {$(
        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
        )]
        $function
    )*};
}

/// Returns the references of a group's words, by [`Like`](super::Like).
#[inline(always)]
fn references(base: __m512i, before: [__m512i; LAG_MAX]) -> [__m512i; LIKE_COUNT] {
    let [first, second, third] = LAGS.map(|lag| before[lag - 1]);
    // Callers skip the first element, which stands for a comparison to nothing.
    [base, base, first, second, third]
}

vbmi2! {
    /// Returns the first tag of the kind `like` that is true, in the lowest byte of each lane. The other
    /// bytes are always 15.
    #[inline]
    fn tags_of(difference: __m512i, like: usize) -> __m512i {
        let ends_low = _mm512_testn_epi64_mask(difference, _mm512_set1_epi64((1 << LOW_BITS) - 1));
        let zeros = _mm512_srli_epi64::<2>(_mm512_lzcnt_epi64(difference));
        let at = _mm512_mask_or_epi64(zeros, ends_low, zeros, _mm512_set1_epi64(ENDS_LOW));
        // SAFETY: the table has 64 bytes, as many as the vector.
        _mm512_permutexvar_epi8(at, unsafe { _mm512_loadu_si512(TAG_BY_ZEROS[like].as_ptr().cast()) })
    }

    /// Returns the lanes whose tags store the difference without its low bits.
    #[inline]
    fn high_of(tags: __m128i) -> u8 {
        _mm_movepi8_mask(look_up_few(&HIGH_OF_TAG, tags)) as u8
    }

    /// Returns the lanes of words that look like an address ([`is_address`](super::is_address)).
    #[inline]
    fn addresses_of(words: __m512i) -> u8 {
        let less_one = _mm512_sub_epi64(_mm512_srli_epi64::<40>(words), _mm512_set1_epi64(1));
        _mm512_cmplt_epu64_mask(less_one, _mm512_set1_epi64(0xff))
    }

    /// Looks up each byte of `at`, which must be below 16, in the table.
    #[inline]
    fn look_up_few(table: &[u8; 16], at: __m128i) -> __m128i {
        // SAFETY: the table has 16 bytes, as many as the vector.
        _mm_shuffle_epi8(unsafe { _mm_loadu_si128(table.as_ptr().cast()) }, at)
    }

    /// Returns the bytes that the tags of eight words store, a bit for each.
    #[inline]
    fn bytes_of(tags: __m128i) -> u64 {
        _mm_cvtsi128_si64(look_up_few(&BYTES_OF_TAG, tags)) as u64
    }

    /// Returns the lanes in which no bits are set but the lowest `bits`.
    #[inline]
    fn within(words: __m512i, bits: u32) -> u8 {
        _mm512_testn_epi64_mask(words, _mm512_set1_epi64((u64::MAX << bits) as i64))
    }

    /// Does what [`plain::count_short`](super::plain::count_short) does.
    pub fn count_short(page: &[u8; PAGE_BYTES]) -> u32 {
        // SAFETY: `at` is below `GROUPS`: `sample` yields 5 to 61, and the lags are at most 5. So 64 bytes
        // from there on lie in the page.
        let group = |at: usize| unsafe { _mm512_loadu_si512(page.as_ptr().add(GROUP_BYTES * at).cast()) };
        let mut short = 0;
        for at in sample() {
            let words = group(at);
            let mut mask = within(words, 32);
            for lag in LAGS {
                mask |= within(_mm512_xor_si512(words, group(at - lag)), 16);
            }
            short += mask.count_ones();
        }
        short
    }

    /// Does what [`plain::encode`](super::plain::encode) does.
    pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
        // SAFETY: `at` is below `GROUPS`, so 64 bytes from there on lie in the page.
        let group = |at: usize| unsafe { _mm512_loadu_si512(page.as_ptr().add(GROUP_BYTES * at).cast()) };
        let first_of = |at: usize| {
            let lanes = addresses_of(group(at));
            (lanes != 0).then(|| word(page, at * LANES + lanes.trailing_zeros() as usize))
        };
        let base = (0..GROUPS).find_map(first_of).unwrap_or(0);
        output[..BASE_BYTES].copy_from_slice(&base.to_le_bytes());
        let base = _mm512_set1_epi64(base as i64);
        let mut before = [_mm512_setzero_si512(); LAG_MAX];
        let mut to = HEAD_BYTES;
        for number in 0..GROUPS {
            let words = group(number);
            let (mut stored, mut tags) = (words, tags_of(words, 0));
            for (like, reference) in references(base, before).into_iter().enumerate().skip(1) {
                let difference = _mm512_xor_si512(words, reference);
                let candidates = tags_of(difference, like);
                stored = _mm512_mask_mov_epi64(stored, _mm512_cmplt_epu64_mask(candidates, tags), difference);
                tags = _mm512_min_epu64(tags, candidates);
            }
            let tags = _mm512_cvtepi64_epi8(tags);
            let nibbles = _pext_u64(_mm_cvtsi128_si64(tags) as u64, NIBBLES) as u32;
            output[BASE_BYTES + TAGS_BYTES * number..][..TAGS_BYTES].copy_from_slice(&nibbles.to_le_bytes());
            let stored = _mm512_mask_srli_epi64::<LOW_BITS>(stored, high_of(tags), stored);
            let bytes = bytes_of(tags);
            // SAFETY: `to` is at most `HEAD_BYTES + number * GROUP_BYTES`, and `output` has a group more than
            // that: `OUTPUT_BYTES` is the head and all groups.
            unsafe {
                let to = output.as_mut_ptr().add(to).cast();
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(bytes, stored));
            }
            to += bytes.count_ones() as usize;
            before = [words, before[0], before[1], before[2], before[3]];
        }
        to
    }

    /// Does what [`plain::decode`](super::plain::decode) does.
    pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let (base, bytes): (&[u8; BASE_BYTES], _) = bytes.split_first_chunk()?;
        let (head, mut rest): (&[u8; HEAD_BYTES - BASE_BYTES], _) = bytes.split_first_chunk()?;
        let base = _mm512_set1_epi64(i64::from_le_bytes(*base));
        let mut before = [_mm512_setzero_si512(); LAG_MAX];
        for (number, nibbles) in head.as_chunks::<TAGS_BYTES>().0.iter().enumerate() {
            let tags = _pdep_u64(u64::from(u32::from_le_bytes(*nibbles)), NIBBLES);
            let tags = _mm_cvtsi64_si128(tags as i64);
            let bytes = bytes_of(tags);
            let stored = match rest.first_chunk::<GROUP_BYTES>() {
                // SAFETY: `chunk` has as many bytes as the vector.
                Some(chunk) => unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) },
                // SAFETY: `rest` has less than 64 bytes, and the mask has a bit for each of them. The
                // instruction reads no other byte.
                None => unsafe { _mm512_maskz_loadu_epi8((1 << rest.len()) - 1, rest.as_ptr().cast()) },
            };
            rest = rest.get(bytes.count_ones() as usize..)?;
            let stored = _mm512_maskz_expand_epi8(bytes, stored);
            let difference = _mm512_mask_slli_epi64::<LOW_BITS>(stored, high_of(tags), stored);
            let like = _mm512_cvtepu8_epi64(look_up_few(&LIKE_OF_TAG, tags));
            let mut reference = _mm512_setzero_si512();
            for (at, words) in references(base, before).into_iter().enumerate().skip(1) {
                let matching = _mm512_cmpeq_epi64_mask(like, _mm512_set1_epi64(at as i64));
                reference = _mm512_mask_mov_epi64(reference, matching, words);
            }
            let words = _mm512_xor_si512(difference, reference);
            // SAFETY: `number` is below `GROUPS`, since `head` has 4 bytes for each group. So 64 bytes from
            // there on lie in the page.
            unsafe { _mm512_storeu_si512(page.as_mut_ptr().add(GROUP_BYTES * number).cast(), words) };
            before = [words, before[0], before[1], before[2], before[3]];
        }
        rest.is_empty().then_some(())
    }
}
