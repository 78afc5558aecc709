//! Columns of numbers: the least word of a block, and each word's difference from it in as few bits as the
//! largest difference needs.
//!
//! Counters, times, prices, indices: neighbours in a column are about as large as each other. The bits of
//! floating-point numbers of similar size are alike, too. A page is taken as eight blocks. A block is eight
//! rows of 64 bytes. A row is eight words of 64 bits, or sixteen of 32. Differences are packed by the columns
//! of a block, the lanes. Each lane has eight numbers of `bits` bits, which fill `bits` bytes, lowest first.
//! So all lanes are packed at once.
//!
//! ```text
//!  8 × least word │ 8 × bits │ of each block: whole words of all lanes, one after the other; then the bytes that are left,
//!                 │          │ lane after lane
//! ```
//!
//! The same code is compiled three times: for any CPU, and for vectors of 32 and of 64 bytes.
// UNSAFETY: this file calls functions that are compiled for features which not every CPU has.

use super::cpu::{self, Vectors};
use crate::units::PAGE_BYTES;
use core::ops::{BitAnd, BitOr, Shl, Shr};

const ROWS: usize = 8;
const ROW_BYTES: usize = 64;
const BLOCKS: usize = PAGE_BYTES / ROWS / ROW_BYTES;
const BLOCK_BYTES: usize = PAGE_BYTES / BLOCKS;

/// The type of a column's words: an unsigned integer.
pub trait Word:
    Copy + Ord + BitOr<Output = Self> + BitAnd<Output = Self> + Shl<u32, Output = Self> + Shr<u32, Output = Self>
{
    const BITS: u32;
    const BYTES: usize = Self::BITS as usize / 8;
    const ZERO: Self;
    const MAX: Self;
    /// Bits of a block's differences from which on columns gain nothing. If both sampled blocks need this
    /// many or more, the page is given up.
    const HOPELESS: u8 = (Self::BITS - Self::BITS / 16) as u8;
    /// Bytes in front of the blocks.
    const HEAD_BYTES: usize = BLOCKS * (Self::BYTES + 1);

    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    /// Returns the number of bits without leading zeros.
    fn width(self) -> u8;
    /// Reads a word from [`Word::BYTES`] bytes.
    fn read(bytes: &[u8]) -> Self;
    /// Writes the lowest bytes of the word, as many as `bytes` has.
    fn write(self, bytes: &mut [u8]);
    /// Returns the least and the largest word of a block. Written by hand, because the compiler doesn't find
    /// these instructions.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn extremes(block: &[u8; BLOCK_BYTES]) -> (Self, Self);
}

macro_rules! word {
    ($type:ty, $min:ident, $max:ident, $reduce_min:ident, $reduce_max:ident) => {
        impl Word for $type {
            const BITS: u32 = <$type>::BITS;
            const ZERO: Self = 0;
            const MAX: Self = <$type>::MAX;

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn minus(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn width(self) -> u8 {
                (Self::BITS - self.leading_zeros()) as u8
            }
            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().expect("as many bytes as it has"))
            }
            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes()[..bytes.len()]);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            #[inline]
            unsafe fn extremes(block: &[u8; BLOCK_BYTES]) -> (Self, Self) {
                use core::arch::x86_64::{_mm512_loadu_si512, $max, $min, $reduce_max, $reduce_min};
                let rows = block.as_ptr();
                // SAFETY: `at` is the number of a row, and a row of the block can be read.
                let row = |at: usize| unsafe { _mm512_loadu_si512(rows.add(ROW_BYTES * at).cast()) };
                let (mut least, mut most) = (row(0), row(0));
                for at in 1..ROWS {
                    (least, most) = ($min(least, row(at)), $max(most, row(at)));
                }
                ($reduce_min(least), $reduce_max(most))
            }
        }
    };
}
word!(u64, _mm512_min_epu64, _mm512_max_epu64, _mm512_reduce_min_epu64, _mm512_reduce_max_epu64);
word!(u32, _mm512_min_epu32, _mm512_max_epu32, _mm512_reduce_min_epu32, _mm512_reduce_max_epu32);

/// The findings of a look at a page, before anything is packed: of each block the least word, and the bits of
/// the largest difference.
pub struct Columns<W, const LANES: usize> {
    least: [W; BLOCKS],
    bits: [u8; BLOCKS],
}

/// Columns of 64 bits.
pub type Longs = Columns<u64, 8>;
/// Columns of 32 bits.
pub type Ints = Columns<u32, 16>;

/// Blocks in the order in which they are looked at. The first [`SAMPLED`] may already show that nothing is
/// gained.
const ORDER: [usize; BLOCKS] = [1, 6, 0, 2, 3, 4, 5, 7];
const SAMPLED: usize = 2;

impl<W: Word, const LANES: usize> Columns<W, LANES> {
    /// Looks at a page. Returns `None` if the first blocks show that the page would stay about as long as it
    /// is.
    pub fn of(page: &[u8; PAGE_BYTES]) -> Option<Self> {
        Self::of_by(cpu::vectors(), page)
    }

    fn of_by(vectors: Vectors, page: &[u8; PAGE_BYTES]) -> Option<Self> {
        match vectors {
            // SAFETY: `vectors` says that the CPU has the features that `look` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::look(page) },
            // SAFETY: `vectors` says that the CPU has the features that `look` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::look(page) },
            _ => look_by(page, any::extremes),
        }
    }

    /// Returns how many bytes [`Columns::encode`] makes of the page.
    pub fn bytes(&self) -> usize {
        W::HEAD_BYTES + self.bits.iter().map(|bits| LANES * usize::from(*bits)).sum::<usize>()
    }

    /// Packs the page that was looked at, and returns the length. Returns `None` if `output` is shorter.
    pub fn encode(&self, page: &[u8; PAGE_BYTES], output: &mut [u8]) -> Option<usize> {
        self.encode_by(cpu::vectors(), page, output)
    }

    fn encode_by(&self, vectors: Vectors, page: &[u8; PAGE_BYTES], output: &mut [u8]) -> Option<usize> {
        let length = self.bytes();
        let (head, rest) = output.get_mut(..length)?.split_at_mut(W::HEAD_BYTES);
        let (least, bits) = head.split_at_mut(BLOCKS * W::BYTES);
        least.chunks_exact_mut(W::BYTES).zip(self.least).for_each(|(to, least)| least.write(to));
        bits.copy_from_slice(&self.bits);
        match vectors {
            // SAFETY: `vectors` says that the CPU has the features that `pack` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::pack(page, self, rest) },
            // SAFETY: `vectors` says that the CPU has the features that `pack` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::pack(page, self, rest) },
            _ => any::pack(page, self, rest),
        }
        Some(length)
    }

    /// Decodes `bytes` into `page`. Returns `None` if a width in `bytes` is too large, or if the widths don't
    /// match the length.
    pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        Self::decode_by(cpu::vectors(), bytes, page)
    }

    fn decode_by(vectors: Vectors, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let head = bytes.get(..W::HEAD_BYTES)?;
        let (least, bits) = head.split_at(BLOCKS * W::BYTES);
        let mut columns = Self { least: [W::ZERO; BLOCKS], bits: [0; BLOCKS] };
        columns.bits.copy_from_slice(bits);
        for (to, bytes) in columns.least.iter_mut().zip(least.chunks_exact(W::BYTES)) {
            *to = W::read(bytes);
        }
        if columns.bytes() != bytes.len() || columns.bits.iter().any(|bits| u32::from(*bits) > W::BITS) {
            return None;
        }
        match vectors {
            // SAFETY: `vectors` says that the CPU has the features that `unpack` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::unpack(bytes, &columns, page) },
            // SAFETY: `vectors` says that the CPU has the features that `unpack` is compiled for.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { avx2::unpack(bytes, &columns, page) },
            _ => any::unpack(bytes, &columns, page),
        }
        Some(())
    }
}

/// Looks at a page. `extremes` returns the least and the largest word of a block.
#[inline(always)]
fn look_by<W: Word, const LANES: usize>(
    page: &[u8; PAGE_BYTES],
    extremes: impl Fn(&[u8; BLOCK_BYTES]) -> (W, W),
) -> Option<Columns<W, LANES>> {
    let block = |number: usize| {
        let bytes = page[number * BLOCK_BYTES..].first_chunk().expect("a block of the page");
        let (least, most) = extremes(bytes);
        (least, most.minus(least).width())
    };
    let mut columns = Columns { least: [W::ZERO; BLOCKS], bits: [0; BLOCKS] };
    for (at, number) in ORDER.into_iter().enumerate() {
        (columns.least[number], columns.bits[number]) = block(number);
        if at == SAMPLED - 1 && ORDER[..SAMPLED].iter().all(|number| columns.bits[*number] >= W::HOPELESS) {
            return None;
        }
    }
    Some(columns)
}

/// The code that all versions are made of.
mod any {
    use super::{BLOCK_BYTES, Columns, ROW_BYTES, ROWS, Word};
    use crate::units::PAGE_BYTES;

    #[inline(always)]
    fn row<W: Word, const LANES: usize>(bytes: &[u8], at: usize) -> [W; LANES] {
        const { assert!(LANES * W::BYTES == ROW_BYTES) };
        let bytes: &[u8; ROW_BYTES] = bytes[ROW_BYTES * at..].first_chunk().expect("a row that is there");
        core::array::from_fn(|lane| W::read(&bytes[W::BYTES * lane..][..W::BYTES]))
    }

    #[inline(always)]
    fn put<W: Word, const LANES: usize>(bytes: &mut [u8], at: usize, row: [W; LANES]) {
        let bytes = &mut bytes[ROW_BYTES * at..][..ROW_BYTES];
        bytes.chunks_exact_mut(W::BYTES).zip(row).for_each(|(to, word)| word.write(to));
    }

    /// Puts the lowest `left` bytes of each lane's word. Words are written whole where they fit. The next
    /// word must then overwrite the surplus bytes.
    #[inline(always)]
    fn put_left<W: Word, const LANES: usize>(bytes: &mut [u8], left: usize, words: [W; LANES]) {
        for (lane, word) in words.into_iter().enumerate() {
            let to = &mut bytes[lane * left..];
            match to.get_mut(..W::BYTES) {
                Some(to) => word.write(to),
                None => word.write(&mut to[..left]),
            }
        }
    }

    #[inline(always)]
    pub fn extremes<W: Word>(block: &[u8; BLOCK_BYTES]) -> (W, W) {
        let words = || block.chunks_exact(W::BYTES).map(W::read);
        (words().fold(W::MAX, W::min), words().fold(W::ZERO, W::max))
    }

    #[inline(always)]
    pub fn pack<W: Word, const LANES: usize>(
        page: &[u8; PAGE_BYTES],
        columns: &Columns<W, LANES>,
        mut output: &mut [u8],
    ) {
        for (block, bytes) in page.chunks_exact(BLOCK_BYTES).enumerate() {
            let (least, bits) = (columns.least[block], u32::from(columns.bits[block]));
            if bits == 0 {
                continue;
            }
            // The bits that aren't written yet, how many of them each lane has, and the rows written.
            let (mut waiting, mut filled, mut written) = ([W::ZERO; LANES], 0, 0);
            for at in 0..ROWS {
                let mut more: [W; LANES] = row(bytes, at);
                more.iter_mut().for_each(|word| *word = word.minus(least));
                for lane in 0..LANES {
                    waiting[lane] = waiting[lane] | more[lane] << filled;
                }
                if filled + bits < W::BITS {
                    filled += bits;
                    continue;
                }
                put(output, written, waiting);
                written += 1;
                // Shift in two steps: all bits may be gone, and one shift by a whole word is not allowed.
                for lane in 0..LANES {
                    waiting[lane] = more[lane] >> (W::BITS - 1 - filled) >> 1;
                }
                filled = filled + bits - W::BITS;
            }
            let left = filled as usize / 8;
            if left > 0 {
                put_left(&mut output[ROW_BYTES * written..], left, waiting);
            }
            output = &mut output[LANES * bits as usize..];
        }
    }

    #[inline(always)]
    pub fn unpack<W: Word, const LANES: usize>(
        bytes: &[u8],
        columns: &Columns<W, LANES>,
        page: &mut [u8; PAGE_BYTES],
    ) {
        let mut begin = W::HEAD_BYTES;
        for (block, to) in page.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let (least, bits) = (columns.least[block], u32::from(columns.bits[block]));
            let packed = begin;
            begin += LANES * bits as usize;
            if bits == 0 {
                (0..ROWS).for_each(|at| put(to, at, [least; LANES]));
                continue;
            }
            let whole = bits as usize / W::BYTES;
            let mask = W::MAX >> (W::BITS - bits);
            let (mut waiting, mut filled, mut taken) = ([W::ZERO; LANES], 0, 0);
            for at in 0..ROWS {
                let mut words = waiting;
                if filled < bits {
                    let next: [W; LANES] = if taken < whole {
                        row(&bytes[packed..], taken)
                    } else {
                        last(bytes, packed + ROW_BYTES * whole, bits as usize % W::BYTES)
                    };
                    taken += 1;
                    for lane in 0..LANES {
                        words[lane] = words[lane] | next[lane] << filled;
                        // Shift in two steps: no bit may be left, and one shift by a whole word is not
                        // allowed.
                        waiting[lane] = next[lane] >> (bits - filled - 1) >> 1;
                    }
                    filled += W::BITS - bits;
                } else {
                    for lane in 0..LANES {
                        waiting[lane] = words[lane] >> (bits - 1) >> 1;
                    }
                    filled -= bits;
                }
                words.iter_mut().for_each(|word| *word = (*word & mask).plus(least));
                put(to, at, words);
            }
        }
    }

    /// Returns the words of which `left` bytes for each lane, at least one, begin at `begin`. Whole words are
    /// read, each ending where its lane's bytes end. The head leaves space in front of the first word.
    #[inline(always)]
    fn last<W: Word, const LANES: usize>(bytes: &[u8], begin: usize, left: usize) -> [W; LANES] {
        const { assert!(W::HEAD_BYTES >= W::BYTES) };
        let bytes = &bytes[begin + left - W::BYTES..][..LANES * left - left + W::BYTES];
        let others = W::BITS - 8 * left as u32;
        core::array::from_fn(|lane| W::read(&bytes[lane * left..][..W::BYTES]) >> others)
    }
}

/// The same code, compiled for vectors that not every CPU has.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $features:literal, $extremes:path) => {
        mod $name {
            use super::{Columns, Word, any, look_by};
            use crate::units::PAGE_BYTES;

            #[target_feature(enable = $features)]
            pub fn look<W: Word, const LANES: usize>(page: &[u8; PAGE_BYTES]) -> Option<Columns<W, LANES>> {
                #[allow(unused_unsafe, reason = "one of the two is for any CPU")]
                // SAFETY: the CPU has the features that this function is compiled for.
                look_by(page, |block| unsafe { $extremes(block) })
            }

            #[target_feature(enable = $features)]
            pub fn pack<W: Word, const LANES: usize>(
                page: &[u8; PAGE_BYTES],
                columns: &Columns<W, LANES>,
                output: &mut [u8],
            ) {
                any::pack(page, columns, output);
            }

            #[target_feature(enable = $features)]
            pub fn unpack<W: Word, const LANES: usize>(
                bytes: &[u8],
                columns: &Columns<W, LANES>,
                page: &mut [u8; PAGE_BYTES],
            ) {
                any::unpack(bytes, columns, page);
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2,bmi1,bmi2,popcnt", any::extremes);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2", W::extremes);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes and decodes a page with every version that this CPU has; all make the same bytes. Returns the
    /// length.
    fn round_trip<W: Word, const LANES: usize>(page: &[u8; PAGE_BYTES]) -> Option<usize> {
        let Some(columns) = Columns::<W, LANES>::of_by(Vectors::Any, page) else {
            assert!(cpu::each().all(|vectors| Columns::<W, LANES>::of_by(vectors, page).is_none()));
            return None;
        };
        let mut output = vec![0xee; columns.bytes()];
        assert_eq!(columns.encode_by(Vectors::Any, page, &mut output), Some(output.len()));
        for vectors in cpu::each() {
            let columns = Columns::<W, LANES>::of_by(vectors, page).unwrap();
            let mut others = vec![0xdd; output.len()];
            assert_eq!(columns.encode_by(vectors, page, &mut others), Some(output.len()));
            assert_eq!(output, others, "{vectors:?}");
            let mut back = [0xcc; PAGE_BYTES];
            Columns::<W, LANES>::decode_by(vectors, &output, &mut back).unwrap();
            assert!(back == *page, "{vectors:?}");
            assert_eq!(columns.encode_by(vectors, page, &mut others[..output.len() - 1]), None);
        }
        Some(output.len())
    }

    /// Returns a page of the low bits of these numbers.
    fn page_of<W: Word>(word: impl Fn(u64) -> u64) -> [u8; PAGE_BYTES] {
        let words = (0..(PAGE_BYTES / W::BYTES) as u64).map(word);
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()[..W::BYTES].to_vec()).collect();
        bytes.try_into().unwrap()
    }

    fn every_width_comes_back<W: Word, const LANES: usize>() {
        let of_block = (BLOCK_BYTES / W::BYTES) as u64;
        for bits in 0..=W::BITS {
            let mask = u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0);
            let word = |n: u64| {
                // The first two words of each block are the extremes.
                let any = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) & mask;
                let more = match n % of_block {
                    0 => 0,
                    1 => mask,
                    _ => any,
                };
                more.wrapping_add(if bits < W::BITS - 4 { n / of_block * 1_000_003 } else { 0 })
            };
            let length = |blocks: usize| W::HEAD_BYTES + blocks * LANES * bits as usize;
            let is_worth_it = bits < u32::from(W::HOPELESS);
            let page = page_of::<W>(word);
            assert_eq!(round_trip::<W, LANES>(&page), is_worth_it.then_some(length(8)), "{bits} bits");
            // Two narrow blocks make the page worth a look.
            let page =
                page_of::<W>(
                    |n| if ORDER[..SAMPLED].contains(&((n / of_block) as usize)) { 1 } else { word(n) },
                );
            assert_eq!(round_trip::<W, LANES>(&page), Some(length(6)), "{bits} bits");
        }
    }

    #[test]
    fn every_width_of_longs_comes_back() {
        every_width_comes_back::<u64, 8>();
    }

    #[test]
    fn every_width_of_ints_comes_back() {
        every_width_comes_back::<u32, 16>();
    }

    fn bytes_that_say_something_else_are_refused<W: Word, const LANES: usize>() {
        let page = page_of::<W>(|n| n << (W::BITS / 2));
        let mut output = vec![0; PAGE_BYTES];
        let length = Columns::<W, LANES>::of(&page).unwrap().encode(&page, &mut output).unwrap();
        let mut back = [0; PAGE_BYTES];
        for wrong in [0, W::HEAD_BYTES - 1, W::HEAD_BYTES, length - 1, length + 1] {
            assert_eq!(Columns::<W, LANES>::decode(&output[..wrong], &mut back), None, "{wrong}");
        }
        // Two blocks have impossible widths, whose sum is as it was.
        let mut wrong = output[..length].to_vec();
        let (at, too_wide) = (BLOCKS * W::BYTES, W::BITS as u8 + 1);
        (wrong[at], wrong[at + 1]) = (too_wide, 2 * wrong[at] - too_wide);
        assert_eq!(Columns::<W, LANES>::decode(&wrong, &mut back), None);
    }

    #[test]
    fn longs_that_say_something_else_are_refused() {
        bytes_that_say_something_else_are_refused::<u64, 8>();
    }

    #[test]
    fn ints_that_say_something_else_are_refused() {
        bytes_that_say_something_else_are_refused::<u32, 16>();
    }

    /// Bytes that no page becomes are unpacked, too: any widths, and as many bytes as they say. Each word is
    /// computed here as the head of this file says.
    fn unpacked_alike<W: Word, const LANES: usize>(bits: [u8; BLOCKS], seed: u64) {
        let random = |at: usize| (seed ^ at as u64).wrapping_mul(0xd134_2543_de82_ef95) >> 37;
        let mut bytes: Vec<u8> = (0..BLOCKS * W::BYTES).map(|at| random(at) as u8).collect();
        bytes.extend(bits);
        let packed = bits.iter().map(|bits| LANES * usize::from(*bits)).sum::<usize>();
        bytes.extend((0..packed).map(|at| random(at + 1000) as u8));
        let mut plain = [0xcc; PAGE_BYTES];
        let mut begin = W::HEAD_BYTES;
        for (block, bits) in bits.into_iter().map(u32::from).enumerate() {
            let (whole, left) = (bits as usize / W::BYTES, bits as usize % W::BYTES);
            let least = W::read(&bytes[block * W::BYTES..][..W::BYTES]);
            for lane in 0..LANES {
                let whole_bytes = (0..whole).flat_map(|row| {
                    (0..W::BYTES).map(move |byte| begin + ROW_BYTES * row + W::BYTES * lane + byte)
                });
                let left_bytes = (0..left).map(|byte| begin + ROW_BYTES * whole + left * lane + byte);
                let column: Vec<u8> = whole_bytes.chain(left_bytes).map(|at| bytes[at]).collect();
                for row in 0..ROWS {
                    let mut word = [0; 16];
                    for bit in 0..bits {
                        let from = row as u32 * bits + bit;
                        let is_set = column[from as usize / 8] >> (from % 8) & 1;
                        word[bit as usize / 8] |= is_set << (bit % 8);
                    }
                    let word = W::read(&word[..W::BYTES]).plus(least);
                    word.write(
                        &mut plain[block * BLOCK_BYTES + row * ROW_BYTES + lane * W::BYTES..][..W::BYTES],
                    );
                }
            }
            begin += LANES * bits as usize;
        }
        for vectors in cpu::each() {
            let mut page = [0xee; PAGE_BYTES];
            Columns::<W, LANES>::decode_by(vectors, &bytes, &mut page).unwrap();
            assert!(page == plain, "{vectors:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_page_comes_back(seeds in proptest::collection::vec((any::<u64>(), 0_u32..=64), 8), words in any::<u64>()) {
            let word = |n: u64| {
                let (base, bits) = seeds[n as usize / 64 % 8];
                let random = words.wrapping_add(n).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(31);
                base.wrapping_add(random & u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0))
            };
            round_trip::<u64, 8>(&page_of::<u64>(word));
            round_trip::<u32, 16>(&page_of::<u32>(word));
        }

        #[test]
        fn any_widths_are_unpacked_as_the_code_for_any_cpu_does(
            longs in proptest::array::uniform8(0_u8..=64),
            ints in proptest::array::uniform8(0_u8..=32),
            seed in any::<u64>(),
        ) {
            unpacked_alike::<u64, 8>(longs, seed);
            unpacked_alike::<u32, 16>(ints, seed);
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..4200)) {
            let _ = Longs::decode(&bytes, &mut [0; PAGE_BYTES]);
            let _ = Ints::decode(&bytes, &mut [0; PAGE_BYTES]);
        }
    }
}
