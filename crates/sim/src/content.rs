//! The contents that simulated programs write into their pages: one kind for each path of the swap code.

use crate::random::Random;
use farpage_core::units::PAGE_BYTES;

/// Number of kinds of content.
pub(crate) const KINDS: usize = 10;

/// Fills a page. `weights` has one weight for each kind of content.
pub(crate) fn fill(page: &mut [u8; PAGE_BYTES], random: &Random, weights: &[u32; KINDS]) {
    let half = random.next() & 0xffff_ffff;
    match random.weighted(weights) {
        0 => page.fill(0),
        // Kinds 1 to 4 are the repeated words that fit an entry; kind 5 is a repeated word that doesn't.
        1 => words(page, half << 32 | half),
        2 => words(page, random.pick(&[half, half & 0xff, 1])),
        3 => words(page, random.pick(&[0xffff_ffff << 32 | half, u64::MAX])),
        4 => words(page, half << 32),
        5 => words(page, random.next()),
        6 => compressible(page, random),
        7 => noise(page, random, PAGE_BYTES),
        8 => prose(page, random),
        _ => near_duplicate(page, random),
    }
}

fn words(page: &mut [u8; PAGE_BYTES], word: u64) {
    page.chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word.to_ne_bytes()));
}

/// Fills the first `bytes` bytes with noise. `bytes` is a multiple of 8.
fn noise(page: &mut [u8; PAGE_BYTES], random: &Random, bytes: usize) {
    page[..bytes].chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
}

/// Fills a page with noise in front and a short period behind. The page compresses to between 2 % and 100 %.
fn compressible(page: &mut [u8; PAGE_BYTES], random: &Random) {
    let noisy = random.index(PAGE_BYTES / 8) * 8;
    noise(page, random, noisy);
    let period = 1 + random.index(40);
    let step = random.next() as u8 | 1;
    for (at, byte) in page[noisy..].iter_mut().enumerate() {
        *byte = ((at % period) as u8).wrapping_mul(step);
    }
}

/// Fills a page with a few words in random order. The denser codec makes an old object of this kind shorter.
fn prose(page: &mut [u8; PAGE_BYTES], random: &Random) {
    const WORDS: [&[u8]; 7] =
        [b"page ", b"frame ", b"slot ", b"of a ", b"cluster, ", b"evicted ", b"which was "];
    let mut rest = &mut page[..];
    while !rest.is_empty() {
        let word = random.pick(&WORDS);
        let length = word.len().min(rest.len());
        let (to, after) = rest.split_at_mut(length);
        to.copy_from_slice(&word[..length]);
        rest = after;
    }
}

/// Fills a page with one of four patterns, with one byte changed. Only that byte shows that one page was
/// mistaken for another.
fn near_duplicate(page: &mut [u8; PAGE_BYTES], random: &Random) {
    let base = random.below(4) as u8;
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = (at / 16) as u8 ^ base;
    }
    page[random.index(PAGE_BYTES)] = random.next() as u8;
}
