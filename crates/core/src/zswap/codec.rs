//! Pages to bytes and back.
//!
//! An eviction compresses a page into the scratch buffer of its thread and stores the result in the pool;
//! a fault loads the bytes and decodes them into a frame. Which of the two forms an object has is told by
//! its length: [`PAGE_BYTES`] bytes are the page as it is, fewer are the codec's output.
//!
//! The decoder is total: whatever bytes it is given, it answers with an error or a whole page, and reads
//! and writes nothing else.

// UNSAFETY: one function fills a `Scratch` where it lies. It is 21 KiB and lives in memory that the driver
// maps; building it by value would put it on the stack first, which need not have that much room.

use core::mem::MaybeUninit;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use super::lz4;
use crate::config::Codec;
use crate::units::PAGE_BYTES;

/// What the LZ4 encoder may write for a page that doesn't compress at all; it refuses to start with less.
const OUTPUT_BYTES: usize = get_maximum_output_size(PAGE_BYTES);
const _: () = assert!(OUTPUT_BYTES > PAGE_BYTES);

// The entries lie inside the table, 4096 of 2 bytes at least. A smaller table would mean that
// some crate switched on lz4_flex's `alloc` feature, and that the encoder calls the program's malloc.
const _: () = assert!(size_of::<CompressTable>() >= 4096 * 2);

/// Working memory of one engine thread: the encoder's match table and its output.
pub struct Scratch {
    table: CompressTable,
    output: [u8; OUTPUT_BYTES],
}

impl Scratch {
    /// Working memory by value, for tests and tools; see [`Scratch::init`].
    #[must_use]
    #[expect(clippy::new_without_default, reason = "21 KiB should not appear on a stack unasked")]
    pub fn new() -> Self {
        Scratch { table: CompressTable::small(), output: [0; OUTPUT_BYTES] }
    }

    /// Makes working memory in a place the driver owns (any alignment of [`Scratch`], any content).
    pub fn init(place: &mut MaybeUninit<Scratch>) -> &mut Scratch {
        let scratch = place.as_mut_ptr();
        // SAFETY: `scratch` points to a whole, aligned `Scratch` that `place` borrows for us alone. Both
        // fields are written, without reading what was there, before a reference to them is made; any
        // bytes are valid for `output`.
        unsafe {
            (&raw mut (*scratch).table).write(CompressTable::small());
            (&raw mut (*scratch).output).write_bytes(0, 1);
            place.assume_init_mut()
        }
    }
}

/// The bytes are not what [`compress`] made of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// What to store for `page`; `None` if that would be more than `bytes_max` bytes (incompressible).
///
/// The answer is shorter than a page, except with [`Codec::None`], which answers with the page itself
/// whatever `bytes_max` is. A caller that wants to keep an incompressible page stores it as it is.
pub fn compress<'s>(
    codec: Codec,
    page: &'s [u8; PAGE_BYTES],
    scratch: &'s mut Scratch,
    bytes_max: usize,
) -> Option<&'s [u8]> {
    match codec {
        Codec::None => Some(page),
        Codec::Lz4 => {
            // The buffer is as large as the encoder asks for, so it can't refuse; if it ever does, the
            // page counts as incompressible and no byte is lost.
            let bytes = compress_into_with_table(page, &mut scratch.output, &mut scratch.table).ok()?;
            (bytes <= bytes_max.min(PAGE_BYTES - 1)).then(|| &scratch.output[..bytes])
        }
    }
}

/// Makes the page that `bytes` were stored for. On an error `page` has no particular content.
pub fn decompress(codec: Codec, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Result<(), Corrupt> {
    if bytes.len() == PAGE_BYTES {
        page.copy_from_slice(bytes);
        return Ok(());
    }
    match codec {
        Codec::Lz4 if bytes.len() < PAGE_BYTES => lz4::decompress(bytes, page).ok_or(Corrupt),
        Codec::Lz4 | Codec::None => Err(Corrupt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ANY: usize = PAGE_BYTES;

    fn page_of(mut byte: impl FnMut(usize) -> u8) -> Box<[u8; PAGE_BYTES]> {
        let mut page = Box::new([0; PAGE_BYTES]);
        page.iter_mut().enumerate().for_each(|(at, to)| *to = byte(at));
        page
    }

    /// Bytes without a pattern (xorshift), so that LZ4 finds nothing.
    fn noise(mut seed: u64) -> Box<[u8; PAGE_BYTES]> {
        page_of(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 32) as u8
        })
    }

    /// A block of literals and matches as they are asked for, as many as fit, and literals to the end of the page.
    fn block_of(sequences: &[(usize, u16, usize)]) -> Vec<u8> {
        let (mut block, mut to) = (Vec::new(), 0);
        let mut push = |literals: usize, found: Option<(u16, usize)>| {
            let in_token = |length: usize| length.min(15) as u8;
            let matched = found.map_or(0, |(_, count)| count - 4);
            block.push(in_token(literals) << 4 | in_token(matched));
            let rest = |block: &mut Vec<u8>, length: usize| {
                if let Some(more) = length.checked_sub(15) {
                    block.extend(std::iter::repeat_n(255, more / 255));
                    block.push((more % 255) as u8);
                }
            };
            rest(&mut block, literals);
            block.extend((0..literals).map(|at| (at * 7 + literals) as u8));
            if let Some((distance, _)) = found {
                block.extend(distance.to_le_bytes());
                rest(&mut block, matched);
            }
        };
        for &(literals, distance, count) in sequences {
            // The last literals are what other decoders insist on.
            if to + literals + count + 16 <= PAGE_BYTES && usize::from(distance) <= to + literals {
                push(literals, Some((distance, count)));
                to += literals + count;
            }
        }
        push(PAGE_BYTES - to, None);
        block
    }

    #[test]
    fn match_that_reaches_into_itself_is_repeated() {
        for distance in 1..=40 {
            for count in [4, 5, 15, 16, 17, 31, 32, 33, 100, 3000] {
                let block = block_of(&[(40, distance, count)]);
                let mut page = [0; PAGE_BYTES];
                lz4::decompress(&block, &mut page).unwrap();
                let from = usize::from(distance);
                assert!((40..40 + count).all(|at| page[at] == page[at - from]), "{distance}, {count}");
            }
        }
    }

    #[test]
    fn compressible_page_comes_back() {
        let mut scratch = Scratch::new();
        let page = page_of(|at| (at / 100) as u8);
        let bytes = compress(Codec::Lz4, &page, &mut scratch, ANY).unwrap();
        assert!(bytes.len() < 1000, "{}", bytes.len());
        let mut back = [0xee; PAGE_BYTES];
        decompress(Codec::Lz4, bytes, &mut back).unwrap();
        assert_eq!(back, *page);
    }

    #[test]
    fn incompressible_page_is_refused_even_if_more_than_a_page_were_allowed() {
        let mut scratch = Scratch::new();
        assert_eq!(compress(Codec::Lz4, &noise(1), &mut scratch, ANY), None);
        assert_eq!(compress(Codec::Lz4, &noise(1), &mut scratch, usize::MAX), None);
    }

    #[test]
    fn the_maximum_itself_is_accepted_and_one_less_refuses() {
        let mut scratch = Scratch::new();
        let page = page_of(|at| (at / 50) as u8);
        let bytes = compress(Codec::Lz4, &page, &mut scratch, ANY).unwrap().len();
        assert!(compress(Codec::Lz4, &page, &mut scratch, bytes).is_some());
        assert!(compress(Codec::Lz4, &page, &mut scratch, bytes - 1).is_none());
        assert!(compress(Codec::Lz4, &page, &mut scratch, 0).is_none());
    }

    #[test]
    fn codec_none_keeps_the_page_as_it_is() {
        let (mut scratch, page) = (Scratch::new(), noise(7));
        let bytes = compress(Codec::None, &page, &mut scratch, 0).unwrap();
        assert_eq!(bytes, *page);
        let mut back = [0; PAGE_BYTES];
        decompress(Codec::None, bytes, &mut back).unwrap();
        assert_eq!(back, *page);
        assert_eq!(decompress(Codec::None, &bytes[1..], &mut back), Err(Corrupt));
    }

    #[test]
    fn raw_page_decodes_under_either_codec_and_truncated_bytes_under_none() {
        let (raw, mut back) = (noise(3), [0; PAGE_BYTES]);
        decompress(Codec::Lz4, &raw[..], &mut back).unwrap();
        assert_eq!(back, *raw);
        let mut scratch = Scratch::new();
        let page = page_of(|at| (at / 60) as u8);
        let bytes = compress(Codec::Lz4, &page, &mut scratch, ANY).unwrap();
        for length in 0..bytes.len() {
            assert_eq!(decompress(Codec::Lz4, &bytes[..length], &mut back), Err(Corrupt), "{length}");
        }
    }

    #[test]
    fn scratch_made_in_place_works_over_old_content() {
        let mut place = Box::new(MaybeUninit::<Scratch>::uninit());
        // SAFETY: writing bytes into a `MaybeUninit` of our own; nothing reads them as a `Scratch`.
        unsafe { place.as_mut_ptr().write_bytes(0xa5, 1) };
        let scratch = Scratch::init(&mut place);
        let page = page_of(|at| (at / 30) as u8);
        let bytes = compress(Codec::Lz4, &page, scratch, ANY).unwrap();
        let mut back = [0; PAGE_BYTES];
        decompress(Codec::Lz4, bytes, &mut back).unwrap();
        assert_eq!(back, *page);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever `lz4_flex` makes a page of is that page to us, and nothing else is one.
        #[test]
        fn decoder_agrees_with_another_one(
            sequences in proptest::collection::vec(
                (prop_oneof![0_usize..20, 0_usize..600], 1_u16..40, prop_oneof![4_usize..40, 4_usize..700]), 0..60,
            ),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..3),
        ) {
            let mut block = block_of(&sequences);
            let mut pages = [[0_u8; PAGE_BYTES], [0xee; PAGE_BYTES]];
            for round in 0..2 {
                let theirs = lz4_flex::block::decompress_into(&block, &mut pages[0]);
                let theirs = matches!(theirs, Ok(PAGE_BYTES));
                let ours = lz4::decompress(&block, &mut pages[1]).is_some();
                prop_assert_eq!(ours, theirs);
                prop_assert!(!ours || pages[0] == pages[1]);
                prop_assert!(ours || round > 0, "what is whole is a page");
                for (at, byte) in &damage {
                    let at = at.index(block.len());
                    block[at] = *byte;
                }
            }
        }

        /// Never a panic, never a write outside (the slices see to that), whatever comes in.
        #[test]
        fn decoder_answers_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let mut page = [0; PAGE_BYTES];
            let _ = decompress(Codec::Lz4, &bytes, &mut page);
            let _ = decompress(Codec::None, &bytes, &mut page);
        }

        /// Damaged output gets deeper into the decoder than noise does.
        #[test]
        fn decoder_answers_damaged_pages(
            period in 1_usize..300,
            step in any::<u8>(),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut scratch = Scratch::new();
            let source = noise(period as u64);
            let page = page_of(|at| if at % 700 < 500 { source[at % period] } else { (at as u8).wrapping_mul(step) });
            if let Some(bytes) = compress(Codec::Lz4, &page, &mut scratch, ANY) {
                let mut bytes = bytes.to_vec();
                let mut back = [0; PAGE_BYTES];
                prop_assert_eq!(decompress(Codec::Lz4, &bytes, &mut back), Ok(()));
                prop_assert_eq!(&back, &*page);
                for (at, byte) in damage {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
                let _ = decompress(Codec::Lz4, &bytes, &mut back);
            }
        }
    }
}
