//! What simulated programs write into their pages: every kind that the swap path treats differently.

use crate::random::Random;
use farpage_core::units::PAGE_BYTES;

/// Kinds of content.
pub(crate) const KINDS: usize = 10;

/// Fills a page. `weights` has one for each kind.
pub(crate) fn fill(page: &mut [u8; PAGE_BYTES], random: &Random, weights: &[u32; KINDS]) {
    let half = random.next() & 0xffff_ffff;
    match random.weighted(weights) {
        0 => page.fill(0),
        // The four shapes of a repeated word that fit an entry, and one that doesn't.
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

/// Without a pattern up to `bytes`, a multiple of 8.
fn noise(page: &mut [u8; PAGE_BYTES], random: &Random, bytes: usize) {
    page[..bytes].chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
}

/// Noise in front, a short period behind: compresses to anything between 2 % and 100 %.
fn compressible(page: &mut [u8; PAGE_BYTES], random: &Random) {
    let noisy = random.index(PAGE_BYTES / 8) * 8;
    noise(page, random, noisy);
    let period = 1 + random.index(40);
    let step = random.next() as u8 | 1;
    for (at, byte) in page[noisy..].iter_mut().enumerate() {
        *byte = ((at % period) as u8).wrapping_mul(step);
    }
}

/// A few words in any order: what is old in the pool becomes shorter if it is like this.
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

/// One of four pages, but for one byte: mistaking one page for another shows only there.
fn near_duplicate(page: &mut [u8; PAGE_BYTES], random: &Random) {
    let base = random.below(4) as u8;
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = (at / 16) as u8 ^ base;
    }
    page[random.index(PAGE_BYTES)] = random.next() as u8;
}
