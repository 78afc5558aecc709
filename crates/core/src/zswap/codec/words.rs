//! Heaps: 64-bit words, each told by one of the 32 words before it, eight at a time.
//!
//! Heaps are made of objects of a few sizes: what stands in a word often stands in the same field of a neighbour, or differs
//! in its low bytes: types, counts, pointers into one arena. So the page is taken as 64 *groups* of eight words, a cache line
//! each, and every word is compared with the words at its own place in the four groups before (in front of the first group
//! are zeros). A four-bit tag says what is left to be stored, and to which group a word is compared ([`TAGS`]). Because a
//! word's eight neighbours don't matter to it, eight are encoded and decoded at once.
//!
//! ```text
//!  counts: 4 × u16 │ 512 tags, two in a byte │ eights │ fours │ twos │ ones
//! ```
//!
//! Differences are XORs. Six bytes are four and two. Encoding and decoding exist twice, with AVX-512 and without: the same
//! bytes, which a property test sees to.
// UNSAFETY: vector instructions where the CPU has them; they read and write through pointers.

use crate::units::PAGE_BYTES;

/// Words that are dealt with at once.
const LANES: usize = 8;
const GROUPS: usize = PAGE_BYTES / 8 / LANES;
const COUNTS_BYTES: usize = 8;
/// Of a group: two tags in a byte, the lower one first.
const TAGS_BYTES: usize = LANES / 2;
/// What stands in front of the streams.
const HEAD_BYTES: usize = COUNTS_BYTES + TAGS_BYTES * GROUPS;
/// Groups that a word may be told by.
const LAGS: usize = 4;

/// What a tag says.
#[derive(Clone, Copy)]
struct Tag {
    /// The word is compared to that so many groups before; 0: to nothing.
    lag: usize,
    /// How many bytes are left of it. As bits: the streams that have them.
    bytes: usize,
}

/// The first that is true of a word is its tag.
const TAGS: [Tag; 16] = {
    const fn tag(lag: usize, bytes: usize) -> Tag {
        Tag { lag, bytes }
    }
    [
        tag(0, 0),
        tag(1, 0),
        tag(2, 0),
        tag(3, 0),
        tag(4, 0),
        tag(0, 1),
        tag(0, 2),
        tag(1, 2),
        tag(2, 2),
        tag(3, 2),
        tag(4, 2),
        tag(0, 4),
        tag(1, 4),
        tag(2, 4),
        tag(1, 6),
        tag(0, 8),
    ]
};

/// Bytes of what the four streams are made of, in their order.
const WIDTHS: [usize; 4] = [8, 4, 2, 1];

/// Where the streams are put together. Stores write eight elements each, whatever counts of them.
#[repr(C, align(64))]
pub struct Streams {
    tags: [u8; TAGS_BYTES * GROUPS],
    eights: [u8; 8 * (8 * GROUPS + LANES)],
    fours: [u8; 4 * (8 * GROUPS + LANES)],
    twos: [u8; 2 * (8 * GROUPS + LANES)],
    ones: [u8; 8 * GROUPS + LANES],
}

impl Streams {
    /// Any bytes will do.
    pub const ZERO: Streams = Streams {
        tags: [0; TAGS_BYTES * GROUPS],
        eights: [0; 8 * (8 * GROUPS + LANES)],
        fours: [0; 4 * (8 * GROUPS + LANES)],
        twos: [0; 2 * (8 * GROUPS + LANES)],
        ones: [0; 8 * GROUPS + LANES],
    };

    /// Puts them one behind the other; the length. None if `output` is shorter.
    pub fn join(&self, Encoded(counts): Encoded, output: &mut [u8]) -> Option<usize> {
        let length = length_of(counts);
        let (head, mut rest) = output.get_mut(..length)?.split_at_mut(HEAD_BYTES);
        for (to, count) in head.chunks_exact_mut(2).zip(counts) {
            to.copy_from_slice(&(count as u16).to_le_bytes());
        }
        head[COUNTS_BYTES..].copy_from_slice(&self.tags);
        let streams: [&[u8]; 4] = [&self.eights, &self.fours, &self.twos, &self.ones];
        for ((stream, count), width) in streams.into_iter().zip(counts).zip(WIDTHS) {
            let (to, others) = rest.split_at_mut(count * width);
            to.copy_from_slice(&stream[..count * width]);
            rest = others;
        }
        Some(length)
    }
}

fn length_of(counts: [usize; 4]) -> usize {
    HEAD_BYTES + counts.iter().zip(WIDTHS).map(|(count, width)| count * width).sum::<usize>()
}

/// Groups that are looked at before a page is encoded: every eighth.
const SAMPLE_STEP: usize = 8;
/// Of the words looked at, so many must be told in two bytes, or four. In heaps it is most of them; in text an eighth at most,
/// where lines are indented.
const LIKELY: u32 = (LANES * GROUPS / SAMPLE_STEP) as u32 * 2 / 5;

/// Whether this looks like words that are told by others: a look at one of eight.
pub fn are_likely(page: &[u8; PAGE_BYTES]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for.
        return unsafe { avx512::short(page) } >= LIKELY;
    }
    plain::short(page) >= LIKELY
}

/// The groups looked at: there are four before each.
fn sample() -> impl Iterator<Item = usize> {
    (SAMPLE_STEP / 2..GROUPS).step_by(SAMPLE_STEP)
}

/// A page whose streams are filled: how much is in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded([usize; 4]);

impl Encoded {
    /// Bytes that it takes.
    pub fn bytes(self) -> usize {
        length_of(self.0)
    }
}

/// Fills the streams with a page.
pub fn encode(page: &[u8; PAGE_BYTES], streams: &mut Streams) -> Encoded {
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for.
        return Encoded(unsafe { avx512::encode(page, streams) });
    }
    Encoded(plain::encode(page, streams))
}

/// Makes the page. None if the counts in these bytes aren't those of their tags and streams; then it has no particular
/// content.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let counts = counts_of(bytes)?;
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for, and the counts are those of the streams.
        return unsafe { avx512::decode(bytes, counts, page) };
    }
    plain::decode(bytes, counts, page)
}

/// How much is in each stream, if that is what there is.
fn counts_of(bytes: &[u8]) -> Option<[usize; 4]> {
    let head: &[u8; HEAD_BYTES] = bytes.first_chunk()?;
    let mut counts = [0; 4];
    for (count, bytes) in counts.iter_mut().zip(head.chunks_exact(2)) {
        *count = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    }
    (length_of(counts) == bytes.len()).then_some(counts)
}

/// Where each stream begins.
const fn starts(counts: [usize; 4]) -> [usize; 4] {
    let fours = HEAD_BYTES + 8 * counts[0];
    let twos = fours + 4 * counts[1];
    [HEAD_BYTES, fours, twos, twos + 2 * counts[2]]
}

mod plain {
    use super::{COUNTS_BYTES, GROUPS, LAGS, LANES, Streams, TAGS, TAGS_BYTES, Tag, WIDTHS, sample, starts};
    use crate::units::PAGE_BYTES;

    type Group = [u64; LANES];

    fn group(page: &[u8; PAGE_BYTES], at: usize) -> Group {
        core::array::from_fn(|lane| {
            let word = page[(at * LANES + lane) * 8..].first_chunk();
            u64::from_le_bytes(*word.expect("a page has so many words"))
        })
    }

    /// A bit for each lane of which that is true.
    fn mask(is_so: impl Fn(usize) -> bool) -> u8 {
        (0..LANES).fold(0, |mask, lane| mask | u8::from(is_so(lane)) << lane)
    }

    /// How many of the words looked at are told in two bytes, or four.
    pub fn short(page: &[u8; PAGE_BYTES]) -> u32 {
        let of_group = |at: usize| {
            let words = group(page, at);
            let before: [Group; LAGS] = core::array::from_fn(|lag| group(page, at - lag - 1));
            let near = |lane: usize| before.iter().any(|other| (words[lane] ^ other[lane]) >> 16 == 0);
            mask(|lane| words[lane] >> 32 == 0 || near(lane)).count_ones()
        };
        sample().map(of_group).sum()
    }

    pub fn encode(page: &[u8; PAGE_BYTES], streams: &mut Streams) -> [usize; 4] {
        let mut counts = [0; 4];
        // Zeros take the place of the group itself, which nothing is compared to.
        let mut before = [[0; LANES]; 1 + LAGS];
        for at in 0..GROUPS {
            let words = group(page, at);
            let mut tags = 0;
            for (lane, word) in words.into_iter().enumerate() {
                let left = |tag: &Tag| word ^ before[tag.lag][lane];
                let fits = |tag: &Tag| tag.bytes == 8 || left(tag) >> (8 * tag.bytes) == 0;
                let number = TAGS.iter().position(fits).expect("the last fits every word");
                let tag = &TAGS[number];
                tags |= (number as u32) << (4 * lane);
                let mut left = &left(tag).to_le_bytes()[..tag.bytes];
                let streams: [&mut [u8]; 4] =
                    [&mut streams.eights, &mut streams.fours, &mut streams.twos, &mut streams.ones];
                for ((stream, count), width) in streams.into_iter().zip(&mut counts).zip(WIDTHS) {
                    if tag.bytes & width != 0 {
                        let (bytes, others) = left.split_at(width);
                        stream[*count * width..][..width].copy_from_slice(bytes);
                        (*count, left) = (*count + 1, others);
                    }
                }
            }
            streams.tags[TAGS_BYTES * at..][..TAGS_BYTES].copy_from_slice(&tags.to_le_bytes());
            before[1..].rotate_right(1);
            before[1] = words;
        }
        counts
    }

    pub fn decode(bytes: &[u8], counts: [usize; 4], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let mut at = starts(counts);
        let ends = [at[1], at[2], at[3], bytes.len()];
        let mut before = [[0; LANES]; 1 + LAGS];
        for number in 0..GROUPS {
            let tags = *bytes[COUNTS_BYTES + TAGS_BYTES * number..].first_chunk()?;
            let mut words = [0; LANES];
            for (lane, word) in words.iter_mut().enumerate() {
                let tag = TAGS[(u32::from_le_bytes(tags) >> (4 * lane)) as usize % TAGS.len()];
                let (mut left, mut filled) = ([0; 8], 0);
                for ((at, end), width) in at.iter_mut().zip(ends).zip(WIDTHS) {
                    if tag.bytes & width != 0 {
                        let taken = bytes[..end].get(*at..*at + width)?;
                        left[filled..][..width].copy_from_slice(taken);
                        (*at, filled) = (*at + width, filled + width);
                    }
                }
                *word = u64::from_le_bytes(left) ^ before[tag.lag][lane];
                page[(number * LANES + lane) * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
            before[1..].rotate_right(1);
            before[1] = words;
        }
        (at == ends).then_some(())
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{COUNTS_BYTES, GROUPS, LAGS, Streams, TAGS, TAGS_BYTES, WIDTHS, sample, starts};
    use crate::units::PAGE_BYTES;
    use core::arch::x86_64::{
        __m512i, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_loadu_si128, _mm_maskz_loadu_epi8,
        _mm_maskz_loadu_epi16, _mm_storel_epi64, _mm_storeu_si128, _mm256_maskz_loadu_epi32,
        _mm256_storeu_si256, _mm512_broadcast_i32x4, _mm512_cmpeq_epi64_mask, _mm512_cmplt_epu64_mask,
        _mm512_cvtepi64_epi8, _mm512_cvtepi64_epi16, _mm512_cvtepi64_epi32, _mm512_cvtepu8_epi64,
        _mm512_cvtepu16_epi64, _mm512_cvtepu32_epi64, _mm512_loadu_si512, _mm512_lzcnt_epi64,
        _mm512_mask_mov_epi64, _mm512_mask_slli_epi64, _mm512_mask_srli_epi64, _mm512_maskz_compress_epi64,
        _mm512_maskz_expand_epi64, _mm512_maskz_expandloadu_epi64, _mm512_min_epu64, _mm512_or_si512,
        _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_srli_epi64, _mm512_storeu_si512,
        _mm512_test_epi64_mask, _mm512_testn_epi64_mask, _mm512_xor_si512, _pdep_u64, _pext_u64,
    };

    /// Where the tags of eight words are, if each is a byte.
    const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

    /// The tag of a word that begins with so many bytes of zeros, if it is one that is compared to the group so many before.
    const BY_ZEROS: [[u8; 16]; 1 + LAGS] = {
        let mut tables = [[15; 16]; 1 + LAGS];
        let mut number = TAGS.len();
        while number > 0 {
            number -= 1;
            let tag = TAGS[number];
            let mut zeros = 8 - tag.bytes;
            while zeros <= 8 {
                tables[tag.lag][zeros] = number as u8;
                zeros += 1;
            }
        }
        tables
    };

    /// What tags say.
    const BYTES: [u8; 16] = {
        let mut table = [0; 16];
        let mut number = 0;
        while number < TAGS.len() {
            table[number] = TAGS[number].bytes as u8;
            number += 1;
        }
        table
    };
    const LAG: [u8; 16] = {
        let mut table = [0; 16];
        let mut number = 0;
        while number < TAGS.len() {
            table[number] = TAGS[number].lag as u8;
            number += 1;
        }
        table
    };

    /// For each byte, which must be below 16, what stands there in the table.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    #[inline]
    fn look_up(table: &[u8; 16], at: __m512i) -> __m512i {
        // SAFETY: 16 bytes.
        let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), at)
    }

    /// In the lowest byte of each lane the first tag that is true, of those with this lag. The others are 15 always.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    #[inline]
    fn tags_of(differ: __m512i, lag: usize) -> __m512i {
        look_up(&BY_ZEROS[lag], _mm512_srli_epi64::<3>(_mm512_lzcnt_epi64(differ)))
    }

    /// Which lanes have something in each stream.
    struct Masks {
        eights: u8,
        fours: u8,
        twos: u8,
        ones: u8,
    }

    impl Masks {
        /// Of tags in the lowest byte of each lane.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
        #[inline]
        fn of(tags: __m512i) -> Masks {
            let bytes = look_up(&BYTES, tags);
            let [eights, fours, twos, ones] =
                WIDTHS.map(|width| _mm512_test_epi64_mask(bytes, _mm512_set1_epi64(width as i64)));
            Masks { eights, fours, twos, ones }
        }

        fn counts(&self) -> [usize; 4] {
            [self.eights, self.fours, self.twos, self.ones].map(|mask| mask.count_ones() as usize)
        }
    }

    /// A bit for each lane of which no bits are set but the lowest so many.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    #[inline]
    fn within(words: __m512i, bits: u32) -> u8 {
        _mm512_testn_epi64_mask(words, _mm512_set1_epi64((u64::MAX << bits) as i64))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    pub fn short(page: &[u8; PAGE_BYTES]) -> u32 {
        // SAFETY: a group of the page.
        let group = |at: usize| unsafe { _mm512_loadu_si512(page.as_ptr().add(64 * at).cast()) };
        let mut short = 0;
        for at in sample() {
            let words = group(at);
            let mut mask = within(words, 32);
            for lag in 1..=LAGS {
                mask |= within(_mm512_xor_si512(words, group(at - lag)), 16);
            }
            short += mask.count_ones();
        }
        short
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    pub fn encode(page: &[u8; PAGE_BYTES], streams: &mut Streams) -> [usize; 4] {
        // Pointers, not counts: as four counts in a vector they would be extracted for each store.
        let starts = [
            &raw mut streams.eights as *mut u8,
            &raw mut streams.fours as *mut u8,
            &raw mut streams.twos as *mut u8,
            &raw mut streams.ones as *mut u8,
        ];
        let [mut to_eights, mut to_fours, mut to_twos, mut to_ones] = starts;
        let mut before = [_mm512_setzero_si512(); LAGS];
        for at in 0..GROUPS {
            // SAFETY: a group of the page.
            let words = unsafe { _mm512_loadu_si512(page.as_ptr().add(64 * at).cast()) };
            let (mut left, mut tags) = (words, tags_of(words, 0));
            for (lag, other) in (1..).zip(before) {
                let differ = _mm512_xor_si512(words, other);
                let others = tags_of(differ, lag);
                left = _mm512_mask_mov_epi64(left, _mm512_cmplt_epu64_mask(others, tags), differ);
                tags = _mm512_min_epu64(tags, others);
            }
            let nibbles = _pext_u64(_mm_cvtsi128_si64(_mm512_cvtepi64_epi8(tags)) as u64, NIBBLES) as u32;
            streams.tags[TAGS_BYTES * at..][..TAGS_BYTES].copy_from_slice(&nibbles.to_le_bytes());
            let masks = Masks::of(tags);
            let twos = _mm512_mask_srli_epi64::<32>(left, masks.fours & masks.twos, left);
            let ones = _mm512_cvtepi64_epi8(_mm512_maskz_compress_epi64(masks.ones, left));
            let twos = _mm512_cvtepi64_epi16(_mm512_maskz_compress_epi64(masks.twos, twos));
            let fours = _mm512_cvtepi64_epi32(_mm512_maskz_compress_epi64(masks.fours, left));
            let eights = _mm512_maskz_compress_epi64(masks.eights, left);
            let more = masks.counts();
            // SAFETY: eight elements each, for which every stream has room behind what it can have at most: eight for each
            // group so far.
            unsafe {
                _mm512_storeu_si512(to_eights.cast(), eights);
                _mm256_storeu_si256(to_fours.cast(), fours);
                _mm_storeu_si128(to_twos.cast(), twos);
                _mm_storel_epi64(to_ones.cast(), ones);
                to_eights = to_eights.add(8 * more[0]);
                to_fours = to_fours.add(4 * more[1]);
                to_twos = to_twos.add(2 * more[2]);
                to_ones = to_ones.add(more[3]);
            }
            before = [words, before[0], before[1], before[2]];
        }
        let bytes = |stream: usize, end: *mut u8| end.addr() - starts[stream].addr();
        [bytes(0, to_eights) / 8, bytes(1, to_fours) / 4, bytes(2, to_twos) / 2, bytes(3, to_ones)]
    }

    /// # Safety
    /// `counts` must be those of the streams in `bytes`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,bmi1,bmi2,popcnt")]
    pub unsafe fn decode(bytes: &[u8], counts: [usize; 4], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let [mut eights_at, mut fours_at, mut twos_at, mut ones_at] = starts(counts);
        let (eights_end, fours_end, twos_end, ones_end) = (fours_at, twos_at, ones_at, bytes.len());
        let mut before = [_mm512_setzero_si512(); LAGS];
        for number in 0..GROUPS {
            let nibbles = u32::from_le_bytes(*bytes[COUNTS_BYTES + TAGS_BYTES * number..].first_chunk()?);
            let tags = _mm_cvtsi64_si128(_pdep_u64(u64::from(nibbles), NIBBLES) as i64);
            let tags = _mm512_cvtepu8_epi64(tags);
            let masks = Masks::of(tags);
            let more = masks.counts();
            let is_short = eights_at + 8 * more[0] > eights_end || fours_at + 4 * more[1] > fours_end;
            if is_short || twos_at + 2 * more[2] > twos_end || ones_at + more[3] > ones_end {
                return None;
            }
            let lowest = |count: usize| (1_u32 << count).wrapping_sub(1);
            // SAFETY: so many elements are left in each stream; what isn't in a mask isn't read.
            let (eights, fours, twos, ones) = unsafe {
                (
                    _mm512_maskz_expandloadu_epi64(masks.eights, bytes.as_ptr().add(eights_at).cast()),
                    _mm256_maskz_loadu_epi32(lowest(more[1]) as u8, bytes.as_ptr().add(fours_at).cast()),
                    _mm_maskz_loadu_epi16(lowest(more[2]) as u8, bytes.as_ptr().add(twos_at).cast()),
                    _mm_maskz_loadu_epi8(lowest(more[3]) as u16, bytes.as_ptr().add(ones_at).cast()),
                )
            };
            eights_at += 8 * more[0];
            fours_at += 4 * more[1];
            twos_at += 2 * more[2];
            ones_at += more[3];
            let fours = _mm512_maskz_expand_epi64(masks.fours, _mm512_cvtepu32_epi64(fours));
            let twos = _mm512_maskz_expand_epi64(masks.twos, _mm512_cvtepu16_epi64(twos));
            let twos = _mm512_mask_slli_epi64::<32>(twos, masks.fours & masks.twos, twos);
            let ones = _mm512_maskz_expand_epi64(masks.ones, _mm512_cvtepu8_epi64(ones));
            let left = _mm512_or_si512(_mm512_or_si512(eights, fours), _mm512_or_si512(twos, ones));
            let lags = look_up(&LAG, tags);
            let mut other = _mm512_setzero_si512();
            // The group before comes last: it has only just been made.
            for lag in (1..=LAGS).rev() {
                let those = _mm512_cmpeq_epi64_mask(lags, _mm512_set1_epi64(lag as i64));
                other = _mm512_mask_mov_epi64(other, those, before[lag - 1]);
            }
            let words = _mm512_xor_si512(left, other);
            // SAFETY: a group of the page.
            unsafe { _mm512_storeu_si512(page.as_mut_ptr().add(64 * number).cast(), words) };
            before = [words, before[0], before[1], before[2]];
        }
        let is_all =
            eights_at == eights_end && fours_at == fours_end && twos_at == twos_end && ones_at == ones_end;
        is_all.then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::page_of_words;
    use super::*;
    use proptest::prelude::*;

    /// There and back, by the code for any CPU and by what this one has: the same bytes.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Vec<u8> {
        assert_eq!(are_likely(page), plain::short(page) >= LIKELY);
        let mut streams = Box::new(Streams::ZERO);
        let mut output = vec![0xee; 2 * PAGE_BYTES];
        let encoded = encode(page, &mut streams);
        let length = streams.join(encoded, &mut output).unwrap();
        assert_eq!(length, encoded.bytes());
        output.truncate(length);
        let mut others = vec![0xdd; length];
        assert_eq!(streams.join(encoded, &mut others[..length - 1]), None);
        let counts = plain::encode(page, &mut streams);
        assert_eq!(Encoded(counts), encoded);
        streams.join(encoded, &mut others).unwrap();
        assert!(output == others);
        let mut back = [[0xcc; PAGE_BYTES]; 2];
        decode(&output, &mut back[0]).unwrap();
        plain::decode(&output, counts, &mut back[1]).unwrap();
        assert!(back[0] == *page && back[1] == *page);
        output
    }

    #[test]
    fn each_tag_takes_what_it_says() {
        // A word of the second group, what that adds, and how many groups before it the word it resembles may stand; if that
        // stands further away, or is none, all 8 bytes are kept.
        const FIRST: u64 = 0x1111_2222_3333_4444;
        const NONE: usize = usize::MAX;
        let cases = [
            (0, 0, NONE),
            (FIRST, 0, 4),
            (0x7f, 1, NONE),
            (0x1234, 2, NONE),
            (0x1111_2222_3333_9999, 2, 4),
            (0x1234_5678, 4, NONE),
            (0x1111_2222_9999_9999, 4, 2),
            (0x1111_9999_9999_9999, 6, 1),
            (0x9999_9999_9999_9999, 8, NONE),
        ];
        let others = HEAD_BYTES + 8;
        for (second, bytes, lag_max) in cases {
            for lag in 1..=5 {
                let mut words = vec![0; 512];
                (words[2], words[2 + 8 * lag]) = (FIRST, second);
                let length = round_trip(&page_of_words(&words)).len();
                let adds = if lag <= lag_max { bytes } else { 8 };
                assert_eq!(length, others + adds, "{second:#x}, {lag} groups on");
            }
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
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length], &mut back), None, "{length}");
        }
        bytes.push(0);
        assert_eq!(decode(&bytes, &mut back), None);
    }

    /// Words as heaps have them, so that every tag occurs.
    fn heap() -> impl Strategy<Value = Vec<u64>> {
        let word = (0_u8..9, any::<u64>());
        proptest::collection::vec(word, 512).prop_map(|kinds| {
            let mut words: Vec<u64> = Vec::with_capacity(512);
            for (at, (kind, random)) in kinds.into_iter().enumerate() {
                let before = |groups: u64| at.checked_sub(8 * groups as usize).map_or(0, |at| words[at]);
                words.push(match kind {
                    0 => 0,
                    1 => random & 0xff,
                    2 => random & 0xffff,
                    3 => random & 0xffff_ffff,
                    4 => before(1 + random % 5),
                    5 => before(1 + random % 5) ^ (random >> 48),
                    6 => before(1 + random % 3) ^ (random >> 32),
                    7 => before(1) ^ (random >> 16),
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

        /// Both decoders answer alike to what is damaged: they find the same fault, or make the same page.
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
            let mut pages = [[0; PAGE_BYTES]; 2];
            let ours = decode(&bytes, &mut pages[0]);
            let theirs = counts_of(&bytes).and_then(|counts| plain::decode(&bytes, counts, &mut pages[1]));
            prop_assert_eq!(ours, theirs);
            prop_assert!(ours.is_none() || pages[0] == pages[1]);
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..4400)) {
            let _ = decode(&bytes, &mut [0; PAGE_BYTES]);
        }
    }
}
