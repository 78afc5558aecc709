//! Columns of integers: the least of 64 words, and what the others have more, in as few bits as the largest of that needs.
//!
//! Counters, times, prices, indices: neighbours in a column are about as large as each other. A page is taken as eight blocks
//! of 64 words; a block as eight rows of eight. Differences are packed by columns of that square: each lane has eight numbers
//! of `bits` bits, which fill `bits` bytes, lowest first. So eight lanes are packed at once.
//!
//! ```text
//!  8 × least word │ 8 × bits │ of each block: whole words of eight lanes, one after the other; then the bytes that are left,
//!                 │          │ lane after lane
//! ```
//!
//! The same code is compiled twice, for any CPU and for vectors of 64 bytes.
// UNSAFETY: calls of functions that are compiled for more than every CPU has.

use crate::units::PAGE_BYTES;

const LANES: usize = 8;
const ROWS: usize = 8;
const BLOCKS: usize = PAGE_BYTES / 8 / ROWS / LANES;
const BLOCK_BYTES: usize = PAGE_BYTES / BLOCKS;
const HEAD_BYTES: usize = 8 * BLOCKS + BLOCKS;

type Row = [u64; LANES];

/// What is known of a page before anything is packed.
pub struct Shape {
    least: [u64; BLOCKS],
    bits: [u8; BLOCKS],
}

impl Shape {
    /// Bytes that [`encode`] would make of it.
    pub fn bytes(&self) -> usize {
        HEAD_BYTES + self.bits.iter().map(|bits| LANES * usize::from(*bits)).sum::<usize>()
    }
}

/// Blocks that are looked at first.
const SAMPLE: [usize; 2] = [1, BLOCKS - 2];
/// If both of them need so many bits, a page gains nothing here.
const HOPELESS: u8 = 60;

/// Looks at a page. None if it is clear soon that it would stay about as long as it is.
pub fn shape(page: &[u8; PAGE_BYTES]) -> Option<Shape> {
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for.
        return unsafe { wide::shape(page) };
    }
    any::shape(page)
}

/// The shape of a page, given that of its blocks: the least word and the bits of the largest difference.
#[inline(always)]
fn shape_by(block: impl Fn(usize) -> (u64, u8)) -> Option<Shape> {
    if SAMPLE.iter().all(|at| block(*at).1 >= HOPELESS) {
        return None;
    }
    let mut shape = Shape { least: [0; BLOCKS], bits: [0; BLOCKS] };
    for at in 0..BLOCKS {
        (shape.least[at], shape.bits[at]) = block(at);
    }
    Some(shape)
}

const fn bits_between(least: u64, most: u64) -> u8 {
    (u64::BITS - (most - least).leading_zeros()) as u8
}

/// Packs a page that has this shape; the length. None if `output` is shorter.
pub fn encode(page: &[u8; PAGE_BYTES], shape: &Shape, output: &mut [u8]) -> Option<usize> {
    let length = shape.bytes();
    let (head, rest) = output.get_mut(..length)?.split_at_mut(HEAD_BYTES);
    for (to, least) in head.chunks_exact_mut(8).zip(shape.least) {
        to.copy_from_slice(&least.to_le_bytes());
    }
    head[8 * BLOCKS..].copy_from_slice(&shape.bits);
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for.
        unsafe { wide::pack(page, shape, rest) };
        return Some(length);
    }
    any::pack(page, shape, rest);
    Some(length)
}

/// Makes the page. None if the lengths in these bytes aren't those of what follows.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let mut shape = Shape { least: [0; BLOCKS], bits: [0; BLOCKS] };
    for (least, bytes) in shape.least.iter_mut().zip(head.chunks_exact(8)) {
        *least = u64::from_le_bytes(*bytes.first_chunk()?);
    }
    shape.bits.copy_from_slice(&head[8 * BLOCKS..]);
    if shape.bytes() != bytes.len() || shape.bits.iter().any(|bits| *bits > 64) {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx512() {
        // SAFETY: the CPU has what it is compiled for.
        unsafe { wide::unpack(rest, &shape, page) };
        return Some(());
    }
    any::unpack(rest, &shape, page);
    Some(())
}

/// What both versions are made of.
mod any {
    use super::{BLOCK_BYTES, LANES, ROWS, Row, Shape, bits_between, shape_by};
    use crate::units::PAGE_BYTES;

    #[inline(always)]
    fn row(bytes: &[u8], at: usize) -> Row {
        let bytes: &[u8; 8 * LANES] = bytes[8 * LANES * at..].first_chunk().expect("a row that is there");
        core::array::from_fn(|lane| u64::from_le_bytes(*bytes[8 * lane..].first_chunk().expect("a word")))
    }

    #[inline(always)]
    fn put(bytes: &mut [u8], at: usize, row: Row) {
        let bytes = &mut bytes[8 * LANES * at..][..8 * LANES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(row) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    #[inline(always)]
    pub fn shape(page: &[u8; PAGE_BYTES]) -> Option<Shape> {
        shape_by(|block| {
            let bytes = &page[block * BLOCK_BYTES..][..BLOCK_BYTES];
            let (mut least, mut most) = (row(bytes, 0), row(bytes, 0));
            for at in 1..ROWS {
                let words = row(bytes, at);
                for lane in 0..LANES {
                    least[lane] = least[lane].min(words[lane]);
                    most[lane] = most[lane].max(words[lane]);
                }
            }
            let least = least.into_iter().fold(u64::MAX, u64::min);
            (least, bits_between(least, most.into_iter().fold(0, u64::max)))
        })
    }

    #[inline(always)]
    pub fn pack(page: &[u8; PAGE_BYTES], shape: &Shape, mut output: &mut [u8]) {
        for (block, bytes) in page.chunks_exact(BLOCK_BYTES).enumerate() {
            let (least, bits) = (shape.least[block], u32::from(shape.bits[block]));
            let (to, rest) = output.split_at_mut(LANES * bits as usize);
            output = rest;
            if bits == 0 {
                continue;
            }
            // What hasn't been written yet, and how many bits of each lane that is.
            let (mut waiting, mut filled, mut written) = ([0; LANES], 0, 0);
            for at in 0..ROWS {
                let mut more = row(bytes, at);
                more.iter_mut().for_each(|word| *word = word.wrapping_sub(least));
                for lane in 0..LANES {
                    waiting[lane] |= more[lane] << filled;
                }
                if filled + bits < u64::BITS {
                    filled += bits;
                    continue;
                }
                put(to, written, waiting);
                written += 1;
                // In two steps: all 64 bits may have gone.
                for lane in 0..LANES {
                    waiting[lane] = more[lane] >> (u64::BITS - 1 - filled) >> 1;
                }
                filled = filled + bits - u64::BITS;
            }
            let left = filled as usize / 8;
            let to = &mut to[8 * LANES * written..];
            for (lane, word) in waiting.into_iter().enumerate() {
                to[lane * left..][..left].copy_from_slice(&word.to_le_bytes()[..left]);
            }
        }
    }

    #[inline(always)]
    pub fn unpack(mut bytes: &[u8], shape: &Shape, page: &mut [u8; PAGE_BYTES]) {
        for (block, to) in page.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let (least, bits) = (shape.least[block], u32::from(shape.bits[block]));
            let (packed, rest) = bytes.split_at(LANES * bits as usize);
            bytes = rest;
            if bits == 0 {
                (0..ROWS).for_each(|at| put(to, at, [least; LANES]));
                continue;
            }
            let whole = bits as usize / 8;
            let mask = u64::MAX >> (u64::BITS - bits);
            let (mut waiting, mut filled, mut taken) = ([0; LANES], 0, 0);
            for at in 0..ROWS {
                let mut words = waiting;
                if filled < bits {
                    let next = if taken < whole {
                        row(packed, taken)
                    } else {
                        last(packed, whole, bits as usize % 8)
                    };
                    taken += 1;
                    for lane in 0..LANES {
                        words[lane] |= next[lane] << filled;
                        // In two steps: none of it may be left.
                        waiting[lane] = next[lane] >> (bits - filled - 1) >> 1;
                    }
                    filled += u64::BITS - bits;
                } else {
                    for lane in 0..LANES {
                        waiting[lane] = words[lane] >> (bits - 1) >> 1;
                    }
                    filled -= bits;
                }
                words.iter_mut().for_each(|word| *word = (*word & mask).wrapping_add(least));
                put(to, at, words);
            }
        }
    }

    /// The bytes that are left of each lane behind whole words.
    #[inline(always)]
    fn last(packed: &[u8], whole: usize, left: usize) -> Row {
        let bytes = &packed[8 * LANES * whole..];
        core::array::from_fn(|lane| {
            let mut word = [0; 8];
            word[..left].copy_from_slice(&bytes[lane * left..][..left]);
            u64::from_le_bytes(word)
        })
    }
}

/// The same, for vectors of 64 bytes.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{BLOCK_BYTES, LANES, ROWS, Shape, any, bits_between, shape_by};
    use crate::units::PAGE_BYTES;
    use core::arch::x86_64::{
        _mm512_loadu_si512, _mm512_max_epu64, _mm512_min_epu64, _mm512_reduce_max_epu64,
        _mm512_reduce_min_epu64,
    };

    /// By hand: the compiler doesn't find these.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2")]
    pub fn shape(page: &[u8; PAGE_BYTES]) -> Option<Shape> {
        shape_by(|block| {
            let bytes = &page[block * BLOCK_BYTES..][..BLOCK_BYTES];
            // SAFETY: a row of the block.
            let row = |at: usize| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(8 * LANES * at).cast()) };
            let (mut least, mut most) = (row(0), row(0));
            for at in 1..ROWS {
                (least, most) = (_mm512_min_epu64(least, row(at)), _mm512_max_epu64(most, row(at)));
            }
            let least = _mm512_reduce_min_epu64(least);
            (least, bits_between(least, _mm512_reduce_max_epu64(most)))
        })
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2")]
    pub fn pack(page: &[u8; PAGE_BYTES], shape: &Shape, output: &mut [u8]) {
        any::pack(page, shape, output);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2")]
    pub fn unpack(bytes: &[u8], shape: &Shape, page: &mut [u8; PAGE_BYTES]) {
        any::unpack(bytes, shape, page);
    }
}

#[cfg(test)]
mod tests {
    use super::super::page_of_words;
    use super::*;
    use proptest::prelude::*;

    /// There and back, by the code for any CPU and by what this one has: the same bytes.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Option<usize> {
        let Some(shape) = shape(page) else {
            assert!(any::shape(page).is_none());
            return None;
        };
        let mut output = vec![0xee; 2 * PAGE_BYTES];
        let length = encode(page, &shape, &mut output).unwrap();
        assert_eq!(length, shape.bytes());
        let mut plain = vec![0xdd; length];
        plain[..HEAD_BYTES].copy_from_slice(&output[..HEAD_BYTES]);
        any::pack(page, &any::shape(page).unwrap(), &mut plain[HEAD_BYTES..]);
        assert_eq!(output[..length], plain);
        let mut back = [[0xcc; PAGE_BYTES]; 2];
        decode(&plain, &mut back[0]).unwrap();
        any::unpack(&plain[HEAD_BYTES..], &shape, &mut back[1]);
        assert!(back[0] == *page && back[1] == *page);
        assert_eq!(encode(page, &shape, &mut output[..length - 1]), None);
        Some(length)
    }

    #[test]
    fn every_width_comes_back() {
        for bits in 0..=64_u32 {
            let mask = u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0);
            let word = |n: u64| {
                // The first two of each block are the extremes.
                let any = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) & mask;
                let more = match n % 64 {
                    0 => 0,
                    1 => mask,
                    _ => any,
                };
                more.wrapping_add(if bits < 60 { n / 64 * 1_000_003 } else { 0 })
            };
            let words: Vec<u64> = (0..512).map(word).collect();
            let length = (bits < u32::from(HOPELESS)).then_some(HEAD_BYTES + 64 * bits as usize);
            assert_eq!(round_trip(&page_of_words(&words)), length, "{bits} bits");
            // Two narrow blocks, and it is worth a look.
            let words: Vec<u64> =
                (0..512).map(|n| if SAMPLE.contains(&(n as usize / 64)) { 1 } else { word(n) }).collect();
            assert_eq!(
                round_trip(&page_of_words(&words)),
                Some(HEAD_BYTES + 48 * bits as usize),
                "{bits} bits"
            );
        }
    }

    #[test]
    fn bytes_that_say_something_else_are_refused() {
        let page = page_of_words(&(0..512).collect::<Vec<u64>>());
        let mut output = vec![0; PAGE_BYTES];
        let length = encode(&page, &shape(&page).unwrap(), &mut output).unwrap();
        let mut back = [0; PAGE_BYTES];
        for wrong in [0, HEAD_BYTES - 1, HEAD_BYTES, length - 1, length + 1] {
            assert_eq!(decode(&output[..wrong], &mut back), None, "{wrong}");
        }
        // Two blocks whose widths are no widths, and together as long as they were.
        let mut wrong = output[..length].to_vec();
        (wrong[64], wrong[65]) = (65, wrong[64].wrapping_mul(2).wrapping_sub(65));
        assert_eq!(decode(&wrong, &mut back), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_page_comes_back(seeds in proptest::collection::vec((any::<u64>(), 0_u32..=64), 8), words in any::<u64>()) {
            let word = |n: usize| {
                let (base, bits) = seeds[n / 64];
                let random = words.wrapping_add(n as u64).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(31);
                base.wrapping_add(random & u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0))
            };
            round_trip(&page_of_words(&(0..512).map(word).collect::<Vec<_>>()));
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..4200)) {
            let _ = decode(&bytes, &mut [0; PAGE_BYTES]);
        }
    }
}
