//! Detects pages that repeat one 64-bit word: zeroed memory, -1, cleared float arrays.
//!
//! An eviction asks this question first. The first and the last word tell most pages apart, so the answer
//! "no" costs two cache lines and a few ns. The answer "yes" needs the whole page.
#![forbid(unsafe_code)]

use crate::units::PAGE_BYTES;

const WORD_BYTES: usize = size_of::<u64>();
/// Bytes compared between two checks of the result: one cache line, which the compiler turns into vector
/// code.
const LINE_BYTES: usize = 64;
const _: () = assert!(PAGE_BYTES.is_multiple_of(LINE_BYTES) && LINE_BYTES.is_multiple_of(WORD_BYTES));

fn word_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; WORD_BYTES];
    word.copy_from_slice(&bytes[offset..offset + WORD_BYTES]);
    u64::from_ne_bytes(word)
}

/// Returns the word, in this machine's byte order, that the page repeats; `None` if the page repeats no word.
#[must_use]
pub fn same_filled(page: &[u8; PAGE_BYTES]) -> Option<u64> {
    let word = word_at(page, 0);
    // Compare the last word first: arrays often begin with a run of equal values, and hardly any ends with
    // it.
    if word_at(page, PAGE_BYTES - WORD_BYTES) != word {
        return None;
    }
    let line_repeats = |line: &[u8]| {
        let differences =
            line.chunks_exact(WORD_BYTES).fold(0, |sum, bytes| sum | (word_at(bytes, 0) ^ word));
        differences == 0
    };
    page.chunks_exact(LINE_BYTES).all(line_repeats).then_some(word)
}

/// Writes `word` all over the page: the inverse of [`same_filled`].
pub fn fill(page: &mut [u8; PAGE_BYTES], word: u64) {
    for bytes in page.chunks_exact_mut(WORD_BYTES) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_page_gives_its_word_back() {
        for word in [0, u64::MAX, 1, 1 << 63, 0x0123_4567_89ab_cdef, 0x0101_0101_0101_0101] {
            let mut page = [0x5a; PAGE_BYTES];
            fill(&mut page, word);
            assert_eq!(same_filled(&page), Some(word));
        }
    }

    #[test]
    fn one_flipped_bit_anywhere_is_seen() {
        let mut page = [0; PAGE_BYTES];
        fill(&mut page, 0x0102_0304_0506_0708);
        for byte in 0..PAGE_BYTES {
            page[byte] ^= 1 << (byte % 8);
            assert_eq!(same_filled(&page), None, "byte {byte}");
            page[byte] ^= 1 << (byte % 8);
        }
    }

    #[test]
    fn a_period_other_than_a_word_is_not_same_filled() {
        let mut page = [0; PAGE_BYTES];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = (at % 16) as u8;
        }
        assert_eq!(same_filled(&page), None);
    }
}
