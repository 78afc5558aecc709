//! The codec of heaps for any CPU, word by word. `avx2.rs` compiles the same code for its vectors.

use super::{
    BASE_BYTES, GROUP_BYTES, HEAD_BYTES, LAG_MAX, LAGS, LANES, LIKE_COUNT, LOW_BITS, OUTPUT_BYTES, TAGS,
    TAGS_BYTES, is_address, sample,
};
use crate::units::PAGE_BYTES;

/// Eight words, as they lie in the page.
pub type Group = [u8; GROUP_BYTES];
/// The references of a group's words, by [`Like`](super::Like).
pub type References<'p> = [&'p Group; LIKE_COUNT];
/// The groups before a group, nearest first.
type Before<'p> = [&'p Group; LAG_MAX];
/// Zeros, for words that are compared to nothing, and in front of the page.
const ZEROS: Group = [0; GROUP_BYTES];
/// The groups before the first group.
const NONE: Before = [&ZEROS; LAG_MAX];

/// Returns the groups before the next group.
#[inline(always)]
fn next<'p>(group: &'p Group, before: Before<'p>) -> Before<'p> {
    [group, before[0], before[1], before[2], before[3]]
}

#[inline(always)]
fn references<'p>(base: &'p Group, before: Before<'p>) -> References<'p> {
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
    u64::from_le_bytes(*group[8 * lane..].first_chunk().expect("a group has eight words"))
}

/// Counts the short words of a sample, as [`count_short_with`](super::count_short_with) defines them.
#[inline(always)]
pub fn count_short(page: &[u8; PAGE_BYTES]) -> u32 {
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

/// Returns the tags of a group's words, and what is stored of the words.
#[inline(always)]
pub fn choose_tags(group: &Group, references: References) -> ([u64; LANES], [u64; LANES]) {
    let (mut tags, mut stored) = ([0; LANES], [0; LANES]);
    for lane in 0..LANES {
        let this = word(group, lane);
        let differences = references.map(|reference| this ^ word(reference, lane));
        let (mut number, mut difference) = (TAGS.len() as u64 - 1, this);
        // Try the tags backwards, without a branch: the first tag that is true is set last and stays.
        macro_rules! try_each {
            ($($at:literal)*) => {$(
                let tag = const { TAGS[$at] };
                // The rotation makes low bits that are set the highest bits, so that the test below fails.
                let turned =
                    differences[tag.like as usize].rotate_right(if tag.is_high { LOW_BITS } else { 0 });
                let is_true = turned >> (8 * tag.bytes) == 0;
                number = if is_true { $at } else { number };
                difference = if is_true { turned } else { difference };
            )*};
        }
        try_each!(14 13 12 11 10 9 8 7 6 5 4 3 2 1 0);
        (tags[lane], stored[lane]) = (number, difference);
    }
    (tags, stored)
}

/// Encodes a page. The argument `choose_tags` is the function [`choose_tags`], or does the same with vectors.
#[inline(always)]
pub fn encode(
    page: &[u8; PAGE_BYTES],
    output: &mut [u8; OUTPUT_BYTES],
    choose_tags: impl Fn(&Group, References) -> ([u64; LANES], [u64; LANES]),
) -> usize {
    let base = base(page);
    output[..BASE_BYTES].copy_from_slice(&base.to_le_bytes());
    let base = group_of(base);
    let mut before = NONE;
    let mut to = HEAD_BYTES;
    for (number, group) in page.as_chunks().0.iter().enumerate() {
        let (tags, stored) = choose_tags(group, references(&base, before));
        let nibbles = (0..LANES).fold(0, |nibbles, lane| nibbles | (tags[lane] as u32) << (4 * lane));
        output[BASE_BYTES + TAGS_BYTES * number..][..TAGS_BYTES].copy_from_slice(&nibbles.to_le_bytes());
        for (tag, stored) in tags.into_iter().zip(stored) {
            // Words are stored whole. The next word overwrites the surplus bytes.
            output[to..][..8].copy_from_slice(&stored.to_le_bytes());
            to += TAGS[tag as usize % TAGS.len()].bytes;
        }
        before = next(group, before);
    }
    to
}

/// Decodes a page, as [`decode`](super::decode) says.
#[inline(always)]
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (base, bytes): (&[u8; BASE_BYTES], _) = bytes.split_first_chunk()?;
    let (head, mut rest): (&[u8; HEAD_BYTES - BASE_BYTES], _) = bytes.split_first_chunk()?;
    let base = group_of(u64::from_le_bytes(*base));
    let mut before = NONE;
    let groups = page.as_chunks_mut::<GROUP_BYTES>().0.iter_mut();
    for (group, nibbles) in groups.zip(head.as_chunks::<TAGS_BYTES>().0) {
        let nibbles = u32::from_le_bytes(*nibbles);
        let references = references(&base, before);
        for lane in 0..LANES {
            let tag = &TAGS[(nibbles >> (4 * lane)) as usize % TAGS.len()];
            let stored = match rest.first_chunk() {
                // The surplus bytes belong to the next word.
                Some(bytes) => u64::from_le_bytes(*bytes) & BYTE_MASKS[tag.bytes],
                None => {
                    let mut last = [0; 8];
                    last[..tag.bytes].copy_from_slice(rest.get(..tag.bytes)?);
                    u64::from_le_bytes(last)
                }
            };
            rest = &rest[tag.bytes..];
            let difference = if tag.is_high { stored.rotate_left(LOW_BITS) } else { stored };
            let this = difference ^ word(references[tag.like as usize], lane);
            group[8 * lane..][..8].copy_from_slice(&this.to_le_bytes());
        }
        before = next(group, before);
    }
    rest.is_empty().then_some(())
}

/// Masks of a word's lowest bytes, by the number of bytes.
const BYTE_MASKS: [u64; 9] = {
    let mut masks = [u64::MAX; 9];
    let mut bytes = 0;
    while bytes < 8 {
        masks[bytes] = (1 << (8 * bytes)) - 1;
        bytes += 1;
    }
    masks
};
