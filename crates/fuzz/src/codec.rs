//! The codec. Compressed pages must come back unchanged. Decompressing any bytes must return an answer.

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

    let mut page = Box::new([0xee; PAGE_BYTES]);
    let mut decoder = Box::new(Decoder::new());
    for codec in [Codec::Lz4, Codec::Auto] {
        if decompress(codec, &bytes[..bytes.len().min(PAGE_BYTES)], &mut page, &mut decoder).is_ok() {
            comes_back(&page, PAGE_BYTES);
        }
    }

    // Each byte is repeated, so that the page is compressible.
    let stretched = bytes.iter().flat_map(|byte| std::iter::repeat_n(*byte, repeat));
    page.fill(0);
    page.iter_mut().zip(stretched).for_each(|(to, byte)| *to = byte);
    comes_back(&page, bytes_max);
    comes_back(&page, PAGE_BYTES);

    // A page of numbers with a few decimal digits, or with too many.
    let number = |two: &[u8; 2]| f64::from(i16::from_le_bytes(*two)) / 10_f64.powi((repeat / 4) as i32);
    let numbers = bytes.as_chunks().0.iter().map(number);
    let mut table = Box::new([0; PAGE_BYTES]);
    table.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, number)| *to = number.to_le_bytes());
    comes_back(&table, bytes_max);
    comes_back(&table, PAGE_BYTES);
    // A word of any value at any place, and then numbers of half the size.
    if let ([odd, ..], Some(place)) = (bytes.as_chunks::<8>().0, bytes.last()) {
        table.as_chunks_mut().0[2 * usize::from(*place)] = *odd;
        comes_back(&table, PAGE_BYTES);
    }
    let numbers = bytes.as_chunks().0.iter().map(|two| number(two) as f32);
    table.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, number)| *to = number.to_le_bytes());
    comes_back(&table, PAGE_BYTES);

    let mut again = Box::new([0xee; PAGE_BYTES]);
    let words = || page.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    let first = words().next().expect("a page has words");
    assert_eq!(same_filled(&page), words().all(|word| word == first).then_some(first));
    if let Some(word) = same_filled(&page) {
        fill(&mut again, word);
        assert_eq!(page, again);
    }
}

fn comes_back(page: &[u8; PAGE_BYTES], bytes_max: usize) {
    let (mut scratch, mut decoder) = (Box::new(Scratch::new()), Box::new(Decoder::new()));
    let mut again = Box::new([0xee; PAGE_BYTES]);
    for codec in [Codec::Lz4, Codec::Auto] {
        let Some(stored) = compress(codec, page, &mut scratch, bytes_max) else { continue };
        assert!(stored.len() <= bytes_max && stored.len() < PAGE_BYTES);
        let stored = stored.to_vec();
        decompress(codec, &stored, &mut again, &mut scratch.decoder).expect("it was compressed just now");
        assert_eq!(page, &*again);
        if codec != Codec::Auto {
            continue;
        }
        let Some(denser) = densify(&stored, &mut scratch) else { continue };
        assert!(denser.len() * 8 <= stored.len() * 7);
        decompress(codec, denser, &mut again, &mut decoder).expect("it was made denser just now");
        assert_eq!(page, &*again);
    }
}
