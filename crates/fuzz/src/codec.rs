//! The codec of the pool. Compressed pages must come back unchanged. Decompressing any bytes must return an
//! answer. Each scenario makes its page from the same bytes of the input.

use crate::Input;
use farpage_core::config::Codec;
use farpage_core::units::PAGE_BYTES;
use farpage_core::zswap::codec::{Decoder, Scratch, compress, decompress, densify};
use farpage_core::zswap::same_filled::{fill, same_filled};

/// Decompresses the input's bytes as they are, and compresses pages made from them.
pub fn run(input: &mut Input) {
    let repeat = 1 + input.below(64);
    let bytes_max = input.below(PAGE_BYTES + 1);
    let bytes = input.rest();
    let digits = (repeat / 4) as i32;

    decompress_anything(bytes);
    let page = repeated_bytes(bytes, repeat, bytes_max);
    let mut numbers = numbers_of_64_bits(bytes, digits, bytes_max);
    numbers_of_32_bits(bytes, digits, &mut numbers);
    same_filled_page(&page);
}

/// Decompresses bytes that no codec made. Where they decode to a page, the page must survive a round trip.
fn decompress_anything(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(PAGE_BYTES)];
    let mut page = Box::new([0xee; PAGE_BYTES]);
    // LZ4 doesn't use the decoder, so both codecs may have the same one.
    let mut decoder = Box::new(Decoder::new());
    for codec in [Codec::Lz4, Codec::Auto] {
        if decompress(codec, bytes, &mut page, &mut decoder).is_ok() {
            check_round_trip(&page, PAGE_BYTES);
        }
    }
}

/// Compresses a page that has each byte `repeat` times, so that the page is compressible. Returns the page.
fn repeated_bytes(bytes: &[u8], repeat: usize, bytes_max: usize) -> Box<[u8; PAGE_BYTES]> {
    let mut page = Box::new([0_u8; PAGE_BYTES]);
    let repeated = bytes.iter().flat_map(|byte| std::iter::repeat_n(*byte, repeat));
    page.iter_mut().zip(repeated).for_each(|(to, byte)| *to = byte);
    check_round_trip(&page, bytes_max);
    check_round_trip(&page, PAGE_BYTES);
    page
}

/// Compresses a page of 64-bit numbers, then the same page with one word of any value. Returns the page.
fn numbers_of_64_bits(bytes: &[u8], digits: i32, bytes_max: usize) -> Box<[u8; PAGE_BYTES]> {
    let mut numbers = Box::new([0_u8; PAGE_BYTES]);
    let decimals = bytes.as_chunks::<2>().0.iter().map(|pair| decimal(pair, digits));
    let (words, _) = numbers.as_chunks_mut::<8>();
    words.iter_mut().zip(decimals).for_each(|(to, decimal)| *to = decimal.to_le_bytes());
    check_round_trip(&numbers, bytes_max);
    check_round_trip(&numbers, PAGE_BYTES);
    if let ([word, ..], Some(at)) = (bytes.as_chunks::<8>().0, bytes.last()) {
        numbers.as_chunks_mut::<8>().0[2 * usize::from(*at)] = *word;
        check_round_trip(&numbers, PAGE_BYTES);
    }
    numbers
}

/// Writes 32-bit numbers over a page of 64-bit numbers, from its start. Compresses the page.
fn numbers_of_32_bits(bytes: &[u8], digits: i32, numbers: &mut [u8; PAGE_BYTES]) {
    let decimals = bytes.as_chunks::<2>().0.iter().map(|pair| decimal(pair, digits) as f32);
    let (halves, _) = numbers.as_chunks_mut::<4>();
    halves.iter_mut().zip(decimals).for_each(|(to, decimal)| *to = decimal.to_le_bytes());
    check_round_trip(numbers, PAGE_BYTES);
}

/// Returns a number with `digits` decimal digits behind the point: a few, or too many for the codec.
fn decimal(pair: &[u8; 2], digits: i32) -> f64 {
    f64::from(i16::from_le_bytes(*pair)) / 10_f64.powi(digits)
}

/// Checks that exactly the pages that repeat one word are found, and that the word restores the page.
fn same_filled_page(page: &[u8; PAGE_BYTES]) {
    let mut words = page.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    let first = words.next().expect("a page has words");
    let expected = words.all(|word| word == first).then_some(first);
    assert_eq!(same_filled(page), expected);
    if let Some(word) = expected {
        let mut restored = Box::new([0xee; PAGE_BYTES]);
        fill(&mut restored, word);
        assert_eq!(page, &*restored);
    }
}

/// Compresses a page with each codec, makes the result denser, and compares what both decode to.
fn check_round_trip(page: &[u8; PAGE_BYTES], bytes_max: usize) {
    let (mut scratch, mut decoder) = (Box::new(Scratch::new()), Box::new(Decoder::new()));
    let mut restored = Box::new([0xee; PAGE_BYTES]);
    for codec in [Codec::Lz4, Codec::Auto] {
        let Some(stored) = compress(codec, page, &mut scratch, bytes_max) else { continue };
        assert!(stored.len() <= bytes_max && stored.len() < PAGE_BYTES);
        let stored = stored.to_vec();
        decompress(codec, &stored, &mut restored, &mut scratch.decoder).expect("it was compressed just now");
        assert_eq!(page, &*restored);
        if codec != Codec::Auto {
            continue;
        }
        let Some(denser) = densify(&stored, &mut scratch) else { continue };
        // `densify` promises to save an eighth.
        assert!(denser.len() * 8 <= stored.len() * 7);
        // The denser bytes lie in `scratch`, so its decoder can't be borrowed.
        decompress(codec, denser, &mut restored, &mut decoder).expect("it was made denser just now");
        assert_eq!(page, &*restored);
    }
}
