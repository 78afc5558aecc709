//! Encodes pages that are mostly zeros: which words aren't 0, and as many bytes of each as the largest needs.
//!
//! Examples are tables that were made larger than they need be, and freshly allocated memory. LZ4 finds the
//! zeros, but takes several bytes to say where each run of zeros ends.
//!
//! ```text
//!  width │ u64: which groups of eight words have any │ of each of those a byte: which words │ words, `width` bytes each
//! ```
#![forbid(unsafe_code)]

use crate::units::PAGE_BYTES;

const LANES: usize = 8;
const GROUPS: usize = PAGE_BYTES / 8 / LANES;
const HEAD_BYTES: usize = 1 + 8;
/// Words other than 0 up to which a page is sparse.
const WORDS_MAX: usize = PAGE_BYTES / 8 / 4;

/// Encodes a sparse page and returns the length. Returns `None` if too many words aren't 0, or `output` is
/// too short.
pub fn encode(page: &[u8; PAGE_BYTES], output: &mut [u8]) -> Option<usize> {
    // Every word is stored without a branch. The next word overwrites a word that is 0.
    let mut words = [0; WORDS_MAX + LANES];
    let (mut count, mut union) = (0, 0);
    let (mut groups, mut masks, mut masks_count) = (0_u64, [0; GROUPS], 0);
    for (number, group) in page.chunks_exact(8 * LANES).enumerate() {
        let mut mask = 0;
        for (lane, bytes) in group.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(*bytes.first_chunk()?);
            words[count] = word;
            union |= word;
            count += usize::from(word != 0);
            mask |= u8::from(word != 0) << lane;
        }
        if count > WORDS_MAX {
            return None;
        }
        masks[masks_count] = mask;
        masks_count += usize::from(mask != 0);
        groups |= u64::from(mask != 0) << number;
    }
    let width = (u64::BITS - union.leading_zeros()).div_ceil(8) as usize;
    let length = HEAD_BYTES + masks_count + count * width;
    let (head, rest) = output.get_mut(..length)?.split_at_mut(HEAD_BYTES);
    let (to_masks, to_words) = rest.split_at_mut(masks_count);
    head[0] = width as u8;
    head[1..].copy_from_slice(&groups.to_le_bytes());
    to_masks.copy_from_slice(&masks[..masks_count]);
    // Words are stored whole where they fit. The next word overwrites the surplus bytes.
    for (at, word) in words[..count].iter().enumerate() {
        let (to, bytes) = (&mut to_words[at * width..], word.to_le_bytes());
        match to.first_chunk_mut() {
            Some(to) => *to = bytes,
            None => to[..width].copy_from_slice(&bytes[..width]),
        }
    }
    Some(length)
}

/// Decodes `bytes` into `page`. Returns `None` if the counts in `bytes` don't match what follows; `page` then
/// has no particular content.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let (width, groups) = (usize::from(head[0]), u64::from_le_bytes(*head[1..].first_chunk()?));
    let (masks, words) = rest.split_at_checked(groups.count_ones() as usize)?;
    let count: u32 = masks.iter().map(|mask| mask.count_ones()).sum();
    if width > 8 || width == 0 && count > 0 || words.len() != count as usize * width {
        return None;
    }
    page.fill(0);
    // Each read takes eight bytes and ends where its word's bytes end. The head leaves space before the first
    // word.
    let (first, others) = (bytes.len() - words.len() + width - 8, 64 - 8 * width as u32);
    let (mut left, mut at) = (groups, 0);
    for mask in masks {
        let group = 8 * LANES * left.trailing_zeros() as usize;
        left &= left - 1;
        let mut mask = *mask;
        while mask != 0 {
            let word = u64::from_le_bytes(*bytes[first + at * width..].first_chunk()?) >> others;
            page[group + 8 * mask.trailing_zeros() as usize..][..8].copy_from_slice(&word.to_le_bytes());
            at += 1;
            mask &= mask - 1;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::page_of_words;
    use super::*;
    use proptest::prelude::*;

    /// Encodes and decodes a page; returns the length.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Option<usize> {
        let mut output = vec![0xee; PAGE_BYTES];
        let length = encode(page, &mut output)?;
        assert!(output[length..].iter().all(|byte| *byte == 0xee));
        let mut back = [0xcc; PAGE_BYTES];
        decode(&output[..length], &mut back).unwrap();
        assert!(back == *page);
        assert_eq!(encode(page, &mut output[..length - 1]), None);
        for wrong in 0..length {
            assert_eq!(decode(&output[..wrong], &mut back), None, "{wrong} of {length}");
        }
        Some(length)
    }

    #[test]
    fn each_word_takes_as_many_bytes_as_the_largest() {
        assert_eq!(round_trip(&[0; PAGE_BYTES]), Some(HEAD_BYTES));
        for width in 1..=8 {
            let mut words = [0; 512];
            // Two words of the first group, and the last word of the page.
            (words[0], words[7], words[511]) = (1, 1 << (8 * width - 8), u64::MAX >> (64 - 8 * width));
            assert_eq!(round_trip(&page_of_words(&words)), Some(HEAD_BYTES + 2 + 3 * width));
        }
    }

    #[test]
    fn words_without_bytes_are_refused() {
        let mut bytes = [0; HEAD_BYTES + 1];
        assert_eq!(decode(&bytes[..HEAD_BYTES], &mut [0xcc; PAGE_BYTES]), Some(()));
        // One group with one word.
        (bytes[1], bytes[HEAD_BYTES]) = (1, 1);
        assert_eq!(decode(&bytes, &mut [0; PAGE_BYTES]), None);
    }

    #[test]
    fn a_page_of_too_many_words_is_refused() {
        for (words, length) in [(WORDS_MAX, Some(HEAD_BYTES + 16 + WORDS_MAX)), (WORDS_MAX + 1, None)] {
            assert_eq!(round_trip(&page_of_words(&vec![1; words])), length);
        }
        assert_eq!(round_trip(&[1; PAGE_BYTES]), None);
    }

    proptest! {
        #[test]
        fn any_page_comes_back(
            mut words in proptest::collection::vec((any::<u64>(), 0_u32..200), 512),
            width in 0_u32..=64,
        ) {
            words.iter_mut().for_each(|(word, chance)| {
                *word = if *chance < 40 { word.checked_shr(width).unwrap_or(0) } else { 0 };
            });
            round_trip(&page_of_words(&words.iter().map(|(word, _)| *word).collect::<Vec<_>>()));
        }

        #[test]
        fn any_counts_that_fit_are_answered_with_the_words_they_tell(
            masks in proptest::collection::btree_map(0_usize..GROUPS, any::<u8>(), 0..GROUPS),
            width in 0_usize..10,
            seed in any::<u64>(),
        ) {
            let groups: u64 = masks.keys().map(|group| 1 << group).sum();
            let at = masks.iter().flat_map(|(group, mask)| {
                (0..LANES).filter(move |lane| mask >> lane & 1 == 1).map(move |lane| group * LANES + lane)
            });
            let at: Vec<usize> = at.collect();
            let bytes_of = |word: usize| (seed ^ word as u64).wrapping_mul(0xd134_2543_de82_ef95).to_le_bytes();
            let mut bytes = vec![width as u8];
            bytes.extend(groups.to_le_bytes());
            bytes.extend(masks.values());
            at.iter().for_each(|at| bytes.extend((0..width).map(|byte| bytes_of(*at)[byte % 8])));
            let mut page = [0xee; PAGE_BYTES];
            let decoded = decode(&bytes, &mut page);
            prop_assert_eq!(decoded.is_some(), width <= 8 && (width > 0 || at.is_empty()));
            if decoded.is_some() {
                let mut plain = [0; PAGE_BYTES];
                at.iter().for_each(|at| plain[8 * at..][..width].copy_from_slice(&bytes_of(*at)[..width]));
                prop_assert!(page == plain);
            }
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..1500), width in 0_u8..10) {
            let mut bytes = bytes;
            let _ = decode(&bytes, &mut [0; PAGE_BYTES]);
            if let Some(first) = bytes.first_mut() {
                *first = width;
            }
            let _ = decode(&bytes, &mut [0; PAGE_BYTES]);
        }
    }
}
