//! Heaps: 64-bit words, each stored as its difference from another word, eight at a time.
//!
//! Heaps consist of objects of a few sizes. A word often equals the word in the same field of a neighbour, or
//! differs from it only in the low bytes. Examples are types, counts, and pointers into one arena. So the
//! page is taken as 64 *groups* of eight words, a cache line each. Every word is compared with the words at
//! its own place in the groups 3, 4 and 5 before. Zeros stand in front of the first group. Every word is also
//! compared with the page's *base*, its first word that looks like an address. A four-bit tag says which of
//! these words a word is like, and how many bytes of the difference, an XOR, are stored ([`TAGS`]).
//! Addresses of objects are multiples of 16, so some differences are stored without their lowest four bits.
//! No word depends on the other words of its group, so eight are encoded and decoded at once.
//!
//! ```text
//!  base │ 512 tags, two in a byte │ what is left of each word, lowest byte first
//! ```
//!
//! Encoding and decoding exist with AVX-512 VBMI and VBMI2, with AVX2, and for any CPU. All versions make the
//! same bytes, which a property test checks.
// UNSAFETY: vector instructions, used where the CPU has them, read and write through pointers.

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

/// The word that another word is compared to.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Like {
    Nothing,
    Base,
    /// The word as many groups before as the first of [`LAGS`] says. `Lag1` and `Lag2` stand for the next
    /// two.
    Lag0,
    Lag1,
    Lag2,
}
const LIKES: usize = 2 + LAGS.len();

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

/// The [`Like`] of each tag, for vectors to look up.
const LIKE: [u8; 16] = {
    let mut table = [0; 16];
    let mut number = 0;
    while number < TAGS.len() {
        table[number] = TAGS[number].like as u8;
        number += 1;
    }
    table
};

/// Returns whether a word looks like an address: its upper 16 bits are 0, and the next eight aren't.
const fn is_address(word: u64) -> bool {
    matches!(word >> 40, 1..=0xff)
}

/// Distance, in groups, between two groups that are sampled before a page is encoded.
const SAMPLE_STEP: usize = 8;
/// Sampled words that must be short (see [`short_by`]) for a page to look like a heap. In heaps most words
/// are short. In text at most an eighth is, where lines are indented.
const LIKELY: u32 = (LANES * GROUPS / SAMPLE_STEP) as u32 * 2 / 5;

/// Returns whether the page's words look like those of a heap. Looks only at one group in eight.
pub fn are_likely(page: &[u8; PAGE_BYTES]) -> bool {
    short_by(cpu::vectors(), page) >= LIKELY
}

/// Counts the sampled words that are short. A short word differs only in its two lowest bytes from a word at
/// one of [`LAGS`], or fits into four bytes.
fn short_by(vectors: Vectors, page: &[u8; PAGE_BYTES]) -> u32 {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `short` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Vbmi2 => unsafe { avx512::short(page) },
        // SAFETY: `vectors` says that the CPU has the features that `short` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => unsafe { avx2::short(page) },
        _ => plain::short(page),
    }
}

/// Returns the sampled groups. Each has enough groups before it for all [`LAGS`].
fn sample() -> impl Iterator<Item = usize> {
    (LAG_MAX..GROUPS).step_by(SAMPLE_STEP)
}

/// Encodes a page and returns the length, which exceeds a page's if the words have little in common.
pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
    encode_by(cpu::vectors(), page, output)
}

fn encode_by(vectors: Vectors, page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `encode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Vbmi2 => unsafe { avx512::encode(page, output) },
        // SAFETY: `vectors` says that the CPU has the features that `encode` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => unsafe { avx2::encode(page, output) },
        _ => plain::encode(page, output, plain::tell),
    }
}

/// Decodes `bytes` into `page`. Returns `None` if `bytes` has another length than its tags say; `page` then
/// has no particular content.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    decode_by(cpu::vectors(), bytes, page)
}

fn decode_by(vectors: Vectors, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
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

mod plain {
    use super::{
        BASE_BYTES, GROUP_BYTES, HEAD_BYTES, LAG_MAX, LAGS, LANES, LIKES, LOW_BITS, OUTPUT_BYTES, TAGS,
        TAGS_BYTES, is_address, sample,
    };
    use crate::units::PAGE_BYTES;

    /// Eight words, as they lie in the page.
    pub type Group = [u8; GROUP_BYTES];
    /// The words that a group's words are compared to, by [`Like`](super::Like).
    pub type Likes<'p> = [&'p Group; LIKES];
    /// The groups before a group, nearest first.
    type Before<'p> = [&'p Group; LAG_MAX];
    /// Zeros, for words that are compared to nothing, and in front of the page.
    const ZEROS: Group = [0; GROUP_BYTES];
    const NONE: Before = [&ZEROS; LAG_MAX];

    /// Returns the groups before the next group.
    #[inline(always)]
    fn next<'p>(group: &'p Group, before: Before<'p>) -> Before<'p> {
        [group, before[0], before[1], before[2], before[3]]
    }

    #[inline(always)]
    fn likes<'p>(base: &'p Group, before: Before<'p>) -> Likes<'p> {
        let [first, second, third] = LAGS.map(|lag| before[lag - 1]);
        [&ZEROS, base, first, second, third]
    }

    /// Returns the base of a page; 0 if no word looks like an address.
    #[inline(always)]
    fn base(page: &[u8; PAGE_BYTES]) -> u64 {
        let words = page.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        words.into_iter().find(|word| is_address(*word)).unwrap_or(0)
    }

    /// Returns a group whose words all are `word`.
    #[inline(always)]
    fn group_of(word: u64) -> Group {
        let mut group = ZEROS;
        group.as_chunks_mut().0.iter_mut().for_each(|to| *to = word.to_le_bytes());
        group
    }

    #[inline(always)]
    fn word(group: &Group, lane: usize) -> u64 {
        u64::from_le_bytes(*group[8 * lane..].first_chunk().expect("a group has so many words"))
    }

    /// Counts the short words of a sample, as [`short_by`](super::short_by) defines them.
    #[inline(always)]
    pub fn short(page: &[u8; PAGE_BYTES]) -> u32 {
        let (groups, _) = page.as_chunks();
        let of_group = |at: usize| {
            let is_short = |lane: &usize| {
                let this = word(&groups[at], *lane);
                let is_near = |lag| (this ^ word(&groups[at - lag], *lane)) >> 16 == 0;
                this >> 32 == 0 || LAGS.into_iter().any(is_near)
            };
            (0..LANES).filter(is_short).count() as u32
        };
        sample().map(of_group).sum()
    }

    /// Returns the tags of a group, and what is stored of its words.
    #[inline(always)]
    pub fn tell(group: &Group, likes: Likes) -> ([u64; LANES], [u64; LANES]) {
        let (mut tags, mut left) = ([0; LANES], [0; LANES]);
        for lane in 0..LANES {
            let this = word(group, lane);
            let differ = likes.map(|like| this ^ word(like, lane));
            let (mut number, mut differs) = (TAGS.len() as u64 - 1, this);
            // Try the tags backwards, without a branch: the first tag that is true is set last and stays.
            macro_rules! try_each {
                ($($at:literal)*) => {$(
                    let tag = const { TAGS[$at] };
                    // The rotation makes low bits that are set the highest bits, so that the test below
                    // fails.
                    let turned = differ[tag.like as usize].rotate_right(if tag.is_high { LOW_BITS } else { 0 });
                    let is_true = turned >> (8 * tag.bytes) == 0;
                    number = if is_true { $at } else { number };
                    differs = if is_true { turned } else { differs };
                )*};
            }
            try_each!(14 13 12 11 10 9 8 7 6 5 4 3 2 1 0);
            (tags[lane], left[lane]) = (number, differs);
        }
        (tags, left)
    }

    /// Encodes a page. The argument `tell` finds the tags of a group: the function [`tell`], or the same with
    /// vectors.
    #[inline(always)]
    pub fn encode(
        page: &[u8; PAGE_BYTES],
        output: &mut [u8; OUTPUT_BYTES],
        tell: impl Fn(&Group, Likes) -> ([u64; LANES], [u64; LANES]),
    ) -> usize {
        let base = base(page);
        output[..BASE_BYTES].copy_from_slice(&base.to_le_bytes());
        let base = group_of(base);
        let mut before = NONE;
        let mut to = HEAD_BYTES;
        for (number, group) in page.as_chunks().0.iter().enumerate() {
            let (tags, left) = tell(group, likes(&base, before));
            let nibbles = (0..LANES).fold(0, |nibbles, lane| nibbles | (tags[lane] as u32) << (4 * lane));
            output[BASE_BYTES + TAGS_BYTES * number..][..TAGS_BYTES].copy_from_slice(&nibbles.to_le_bytes());
            for (tag, left) in tags.into_iter().zip(left) {
                // Words are stored whole. The next word overwrites the surplus bytes.
                output[to..][..8].copy_from_slice(&left.to_le_bytes());
                to += TAGS[tag as usize % TAGS.len()].bytes;
            }
            before = next(group, before);
        }
        to
    }

    #[inline(always)]
    pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let (base, bytes): (&[u8; BASE_BYTES], _) = bytes.split_first_chunk()?;
        let (head, mut rest): (&[u8; HEAD_BYTES - BASE_BYTES], _) = bytes.split_first_chunk()?;
        let base = group_of(u64::from_le_bytes(*base));
        let mut before = NONE;
        let groups = page.as_chunks_mut::<GROUP_BYTES>().0.iter_mut();
        for (group, nibbles) in groups.zip(head.as_chunks::<TAGS_BYTES>().0) {
            let nibbles = u32::from_le_bytes(*nibbles);
            let likes = likes(&base, before);
            for lane in 0..LANES {
                let tag = &TAGS[(nibbles >> (4 * lane)) as usize % TAGS.len()];
                let left = match rest.first_chunk() {
                    // The surplus bytes belong to the next word.
                    Some(bytes) => u64::from_le_bytes(*bytes) & LOW[tag.bytes],
                    None => {
                        let mut left = [0; 8];
                        left[..tag.bytes].copy_from_slice(rest.get(..tag.bytes)?);
                        u64::from_le_bytes(left)
                    }
                };
                rest = &rest[tag.bytes..];
                let differs = if tag.is_high { left.rotate_left(LOW_BITS) } else { left };
                let this = differs ^ word(likes[tag.like as usize], lane);
                group[8 * lane..][..8].copy_from_slice(&this.to_le_bytes());
            }
            before = next(group, before);
        }
        rest.is_empty().then_some(())
    }

    /// Masks of the lowest bytes, by their number.
    const LOW: [u64; 9] = {
        let mut masks = [u64::MAX; 9];
        let mut bytes = 0;
        while bytes < 8 {
            masks[bytes] = (1 << (8 * bytes)) - 1;
            bytes += 1;
        }
        masks
    };
}

/// The code for any CPU, compiled for vectors of 32 bytes. Only `tell` is written by hand.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::plain::{self, Group, Likes};
    use super::{LANES, LIKE, LOW_BITS, OUTPUT_BYTES, TAGS};
    use crate::units::PAGE_BYTES;
    use core::arch::x86_64::{
        __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_cmpeq_epi64,
        _mm256_loadu_si256, _mm256_max_epu8, _mm256_or_si256, _mm256_set1_epi64x, _mm256_setzero_si256,
        _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_srlv_epi64, _mm256_storeu_si256, _mm256_sub_epi64,
        _mm256_xor_si256,
    };

    /// Low bits that each tag's difference is stored without, for vectors to look up.
    const LOW: [u8; 16] = {
        let mut table = [0; 16];
        let mut number = 0;
        while number < TAGS.len() {
            table[number] = if TAGS[number].is_high { LOW_BITS as u8 } else { 0 };
            number += 1;
        }
        table
    };

    /// Words in half of a group.
    const HALF: usize = LANES / 2;

    /// Does what [`plain::tell`] does.
    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    #[inline]
    fn tell(group: &Group, likes: Likes) -> ([u64; LANES], [u64; LANES]) {
        const LAST: i64 = TAGS.len() as i64 - 1;
        let (mut tags, mut left) = ([0; LANES], [0; LANES]);
        for half in [0, HALF] {
            // SAFETY: half of a group, from its start or its middle on, can be read.
            let load = |group: &Group| unsafe { _mm256_loadu_si256(group.as_ptr().add(8 * half).cast()) };
            // SAFETY: half of `words`, from its start or its middle on, can be written.
            let store = |words: &mut [u64; LANES], half_of| unsafe {
                _mm256_storeu_si256(words.as_mut_ptr().add(half).cast(), half_of);
            };
            let words = load(group);
            let low = _mm256_set1_epi64x((1 << LOW_BITS) - 1);
            // How far the first tag that is true stands before the last tag: the largest of these distances.
            let mut behind = _mm256_setzero_si256();
            macro_rules! try_each {
                ($($number:literal)*) => {$(
                    let tag = const { TAGS[$number] };
                    let differ = _mm256_xor_si256(words, load(likes[tag.like as usize]));
                    // The bits that must be 0 for this tag to be true.
                    let rest = if tag.is_high {
                        let above = _mm256_srli_epi64::<{ 8 * TAGS[$number].bytes as i32 + LOW_BITS as i32 }>(differ);
                        _mm256_or_si256(above, _mm256_and_si256(differ, low))
                    } else {
                        _mm256_srli_epi64::<{ 8 * TAGS[$number].bytes as i32 }>(differ)
                    };
                    let is_true = _mm256_cmpeq_epi64(rest, _mm256_setzero_si256());
                    let those = _mm256_and_si256(is_true, _mm256_set1_epi64x(LAST - $number));
                    behind = _mm256_max_epu8(behind, those);
                )*};
            }
            try_each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
            let number = _mm256_sub_epi64(_mm256_set1_epi64x(LAST), behind);
            // Only the lowest byte of each word is a tag.
            let of_tag = |table| _mm256_and_si256(look_up(table, number), _mm256_set1_epi64x(0xff));
            let like = of_tag(&LIKE);
            let mut other = _mm256_setzero_si256();
            for (at, group) in likes.into_iter().enumerate().skip(1) {
                let those = _mm256_cmpeq_epi64(like, _mm256_set1_epi64x(at as i64));
                other = _mm256_or_si256(other, _mm256_and_si256(those, load(group)));
            }
            store(&mut tags, number);
            let differ = _mm256_xor_si256(words, other);
            store(&mut left, _mm256_srlv_epi64(differ, of_tag(&LOW)));
        }
        (tags, left)
    }

    /// Looks up each byte of `at`, which must be below 16, in the table.
    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    #[inline]
    fn look_up(table: &[u8; 16], at: __m256i) -> __m256i {
        // SAFETY: the table has 16 bytes.
        let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    pub fn short(page: &[u8; PAGE_BYTES]) -> u32 {
        plain::short(page)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
        plain::encode(page, output, |group, likes| tell(group, likes))
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        plain::decode(bytes, page)
    }
}

/// The code for vectors of 64 bytes, VBMI and VBMI2: one instruction gathers the stored bytes of a group.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::super::word;
    use super::{
        BASE_BYTES, GROUP_BYTES, GROUPS, HEAD_BYTES, LAG_MAX, LAGS, LANES, LIKE, LIKES, LOW_BITS,
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

    /// Bit of an index into [`BY_ZEROS`]: the difference ends with four bits of zeros.
    const ENDS_LOW: i64 = 32;

    /// Tags by what a word is compared to, and by the number of four-bit zeros that the difference begins
    /// with.
    const BY_ZEROS: [[u8; 64]; LIKES] = {
        const { assert!(LOW_BITS == 4) };
        let mut tables = [[15; 64]; LIKES];
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
    const BYTES: [u8; 16] = {
        let mut table = [0; 16];
        let mut number = 0;
        while number < TAGS.len() {
            table[number] = (1_u16 << TAGS[number].bytes).wrapping_sub(1) as u8;
            number += 1;
        }
        table
    };

    /// The highest bit of each byte tells whether the tag's difference is stored without its low bits.
    const HIGH: [u8; 16] = {
        let mut table = [0; 16];
        let mut number = 0;
        while number < TAGS.len() {
            table[number] = (TAGS[number].is_high as u8) << 7;
            number += 1;
        }
        table
    };

    /// Returns the first tag of the kind `like` that is true, in the lowest byte of each lane. The other
    /// bytes are always 15.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn tags_of(differ: __m512i, like: usize) -> __m512i {
        let ends_low = _mm512_testn_epi64_mask(differ, _mm512_set1_epi64((1 << LOW_BITS) - 1));
        let zeros = _mm512_srli_epi64::<2>(_mm512_lzcnt_epi64(differ));
        let at = _mm512_mask_or_epi64(zeros, ends_low, zeros, _mm512_set1_epi64(ENDS_LOW));
        // SAFETY: the table has 64 bytes.
        _mm512_permutexvar_epi8(at, unsafe { _mm512_loadu_si512(BY_ZEROS[like].as_ptr().cast()) })
    }

    /// Returns the lanes whose tags store the difference without its low bits.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn high_of(tags: __m128i) -> u8 {
        _mm_movepi8_mask(look_up_few(&HIGH, tags)) as u8
    }

    /// Returns the words that a group's words are compared to, by [`Like`](super::Like).
    #[inline(always)]
    fn likes(base: __m512i, before: [__m512i; LAG_MAX]) -> [__m512i; LIKES] {
        let [first, second, third] = LAGS.map(|lag| before[lag - 1]);
        // Callers skip the first element, which stands for a comparison to nothing.
        [base, base, first, second, third]
    }

    /// Returns the lanes of words that look like an address ([`is_address`](super::is_address)).
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn addresses_of(words: __m512i) -> u8 {
        let less_one = _mm512_sub_epi64(_mm512_srli_epi64::<40>(words), _mm512_set1_epi64(1));
        _mm512_cmplt_epu64_mask(less_one, _mm512_set1_epi64(0xff))
    }

    /// Looks up each byte of `at`, which must be below 16, in the table.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn look_up_few(table: &[u8; 16], at: __m128i) -> __m128i {
        // SAFETY: the table has 16 bytes.
        _mm_shuffle_epi8(unsafe { _mm_loadu_si128(table.as_ptr().cast()) }, at)
    }

    /// Returns the bytes that the tags of eight words store, a bit for each.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn bytes_of(tags: __m128i) -> u64 {
        _mm_cvtsi128_si64(look_up_few(&BYTES, tags)) as u64
    }

    /// Returns the lanes in which no bits are set but the lowest `bits`.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    #[inline]
    fn within(words: __m512i, bits: u32) -> u8 {
        _mm512_testn_epi64_mask(words, _mm512_set1_epi64((u64::MAX << bits) as i64))
    }

    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    pub fn short(page: &[u8; PAGE_BYTES]) -> u32 {
        // SAFETY: `at` is the number of a group, and a group of the page can be read.
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

    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8; OUTPUT_BYTES]) -> usize {
        // SAFETY: `at` is the number of a group, and a group of the page can be read.
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
            let (mut left, mut tags) = (words, tags_of(words, 0));
            for (like, other) in likes(base, before).into_iter().enumerate().skip(1) {
                let differ = _mm512_xor_si512(words, other);
                let others = tags_of(differ, like);
                left = _mm512_mask_mov_epi64(left, _mm512_cmplt_epu64_mask(others, tags), differ);
                tags = _mm512_min_epu64(tags, others);
            }
            let tags = _mm512_cvtepi64_epi8(tags);
            let nibbles = _pext_u64(_mm_cvtsi128_si64(tags) as u64, NIBBLES) as u32;
            output[BASE_BYTES + TAGS_BYTES * number..][..TAGS_BYTES].copy_from_slice(&nibbles.to_le_bytes());
            let left = _mm512_mask_srli_epi64::<LOW_BITS>(left, high_of(tags), left);
            let bytes = bytes_of(tags);
            // SAFETY: behind the head and the most that all groups before this one store, `output` has room
            // for a group.
            unsafe {
                let to = output.as_mut_ptr().add(to).cast();
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(bytes, left));
            }
            to += bytes.count_ones() as usize;
            before = [words, before[0], before[1], before[2], before[3]];
        }
        to
    }

    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt"
    )]
    pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let (base, bytes): (&[u8; BASE_BYTES], _) = bytes.split_first_chunk()?;
        let (head, mut rest): (&[u8; HEAD_BYTES - BASE_BYTES], _) = bytes.split_first_chunk()?;
        let base = _mm512_set1_epi64(i64::from_le_bytes(*base));
        let mut before = [_mm512_setzero_si512(); LAG_MAX];
        for (number, nibbles) in head.as_chunks::<TAGS_BYTES>().0.iter().enumerate() {
            let tags = _pdep_u64(u64::from(u32::from_le_bytes(*nibbles)), NIBBLES);
            let tags = _mm_cvtsi64_si128(tags as i64);
            let bytes = bytes_of(tags);
            let left = match rest.first_chunk::<GROUP_BYTES>() {
                // SAFETY: `chunk` has as many bytes as the vector.
                Some(chunk) => unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) },
                // SAFETY: the mask covers only bytes that `rest` has.
                None => unsafe { _mm512_maskz_loadu_epi8((1 << rest.len()) - 1, rest.as_ptr().cast()) },
            };
            rest = rest.get(bytes.count_ones() as usize..)?;
            let left = _mm512_maskz_expand_epi8(bytes, left);
            let differ = _mm512_mask_slli_epi64::<LOW_BITS>(left, high_of(tags), left);
            let like = _mm512_cvtepu8_epi64(look_up_few(&LIKE, tags));
            let mut other = _mm512_setzero_si512();
            for (at, words) in likes(base, before).into_iter().enumerate().skip(1) {
                let those = _mm512_cmpeq_epi64_mask(like, _mm512_set1_epi64(at as i64));
                other = _mm512_mask_mov_epi64(other, those, words);
            }
            let words = _mm512_xor_si512(differ, other);
            // SAFETY: `number` is the number of a group, and a group of the page can be written.
            unsafe { _mm512_storeu_si512(page.as_mut_ptr().add(GROUP_BYTES * number).cast(), words) };
            before = [words, before[0], before[1], before[2], before[3]];
        }
        rest.is_empty().then_some(())
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
        let length = encode_by(Vectors::Any, page, &mut output);
        for vectors in cpu::each() {
            assert_eq!(short_by(vectors, page), short_by(Vectors::Any, page), "{vectors:?}");
            let mut others = [0xdd; OUTPUT_BYTES];
            assert_eq!(encode_by(vectors, page, &mut others), length, "{vectors:?}");
            assert!(output[..length] == others[..length], "{vectors:?}");
            let mut back = [0xcc; PAGE_BYTES];
            decode_by(vectors, &output[..length], &mut back).unwrap();
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
                assert_eq!(decode_by(vectors, &bytes[..length], &mut back), None, "{vectors:?}, {length}");
            }
        }
        bytes.push(0);
        assert!(cpu::each().all(|vectors| decode_by(vectors, &bytes, &mut back).is_none()));
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
            let plain = decode_by(Vectors::Any, &bytes, &mut page);
            for vectors in cpu::each() {
                let mut other = [0; PAGE_BYTES];
                prop_assert_eq!(decode_by(vectors, &bytes, &mut other), plain, "{:?}", vectors);
                prop_assert!(plain.is_none() || page == other, "{:?}", vectors);
            }
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..4400)) {
            for vectors in cpu::each() {
                let _ = decode_by(vectors, &bytes, &mut [0; PAGE_BYTES]);
            }
        }
    }
}
