//! Decodes LZ4 blocks to pages: for a fault on a page that no other codec made small, or for every fault with
//! `--codec lz4`.
//!
//! A block is a row of sequences (<https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md>). A sequence
//! is a token with two lengths, the literal bytes, and a match. A match copies bytes from a given distance
//! back in the output. The last sequence ends after its literals. A match may overlap its own output: 1000
//! bytes from one byte back repeat that byte 1000 times. Heaps are full of overlapping matches: runs of
//! zeros, columns of small numbers. `lz4_flex`, which compresses for us, copies an overlapping match byte by
//! byte, and each byte waits for the one before it. This decoder copies as many periods at once as fit.

use crate::units::PAGE_BYTES;

/// Bytes copied at once where they fit. Later copies overwrite the surplus.
const CHUNK: usize = 16;
/// Bytes that a match has in addition to the length in its token.
const MATCH_MIN: usize = 4;
/// Smallest length that continues in the bytes behind the token.
const LONG: usize = 15;
/// Bytes of a block that are enough for a token, fewer than `LONG` literals and a distance.
const HEAD: usize = 1 + CHUNK + 2;
/// Bytes of a page that are enough for what fewer than `LONG` literals and a short match write.
const TAIL: usize = 3 * CHUNK;

/// Decodes `block` into `page`. Returns `None` if `block` isn't a page's block; `page` then has no particular
/// content.
pub fn decompress(block: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (mut from, mut to) = (0, 0);
    loop {
        let rest = block.get(from..)?;
        let token = usize::from(*rest.first()?);
        let (literals, matched) = (token >> 4, token & LONG);
        from += 1;
        // The fast path: most sequences have few literals, and aren't close to the end of the block or the
        // page.
        if let Some(head) = rest.first_chunk::<HEAD>()
            && literals < LONG
            && to <= PAGE_BYTES - TAIL
        {
            let text: &[u8; CHUNK] = head[1..].first_chunk()?;
            *page[to..].first_chunk_mut()? = *text;
            from += literals + 2;
            to += literals;
            let distance = usize::from(u16::from_le_bytes([head[1 + literals], head[2 + literals]]));
            if matched < LONG && distance >= 8 {
                let start = to.checked_sub(distance)?;
                if distance >= CHUNK {
                    copy::<CHUNK>(page, start, to);
                } else {
                    copy::<8>(page, start, to);
                    copy::<8>(page, start + 8, to + 8);
                }
                copy::<4>(page, start + CHUNK, to + CHUNK);
                to += matched + MATCH_MIN;
            } else {
                let count = length(block, &mut from, matched)? + MATCH_MIN;
                repeat(page, to, distance, count)?;
                to += count;
            }
            continue;
        }
        let literals = length(block, &mut from, literals)?;
        let text = block.get(from..)?.get(..literals)?;
        page.get_mut(to..)?.get_mut(..literals)?.copy_from_slice(text);
        from += literals;
        to += literals;
        if from == block.len() {
            return (to == PAGE_BYTES).then_some(());
        }
        let distance = u16::from_le_bytes(*block.get(from..)?.first_chunk()?);
        from += 2;
        let count = length(block, &mut from, matched)? + MATCH_MIN;
        repeat(page, to, distance.into(), count)?;
        to += count;
    }
}

/// Returns a length that begins in a token, and continues in the next bytes if it is too large for the token.
fn length(block: &[u8], from: &mut usize, in_token: usize) -> Option<usize> {
    let mut length = in_token;
    if in_token == LONG {
        loop {
            let more = *block.get(*from)?;
            *from += 1;
            length += usize::from(more);
            if more < u8::MAX {
                break;
            }
        }
    }
    Some(length)
}

fn copy<const N: usize>(page: &mut [u8; PAGE_BYTES], from: usize, to: usize) {
    page.copy_within(from..from + N, to);
}

/// Writes `count` bytes at `to`, each a copy of the byte `distance` before it. Returns `None`, and writes
/// nothing, if `distance` leads to no written byte or the page is too short.
fn repeat(page: &mut [u8; PAGE_BYTES], to: usize, distance: usize, count: usize) -> Option<()> {
    if distance == 0 || distance > to || count > PAGE_BYTES - to {
        return None;
    }
    let (mut start, end) = (to - distance, to + count);
    let mut to = to;
    if distance >= count && count > 4 * CHUNK {
        page.copy_within(start..start + count, to);
        return Some(());
    }
    if distance < CHUNK && to + CHUNK <= PAGE_BYTES {
        // The length of as many whole periods as fit into a chunk.
        let period = distance * (CHUNK / distance);
        let chunk = periods(*page[start..].first_chunk()?, distance);
        while to < end && to + CHUNK <= PAGE_BYTES {
            page[to..to + CHUNK].copy_from_slice(&chunk);
            to += period;
        }
    } else {
        while to < end && to + CHUNK <= PAGE_BYTES {
            copy::<CHUNK>(page, start, to);
            start += CHUNK;
            to += CHUNK;
        }
    }
    for at in to..end {
        page[at] = page[at - distance];
    }
    Some(())
}

/// Fills a chunk with repetitions of its first `distance` bytes.
fn periods(bytes: [u8; CHUNK], distance: usize) -> [u8; CHUNK] {
    let mut all = u128::from_le_bytes(bytes) & (u128::MAX >> (8 * (CHUNK - distance)));
    let mut known = distance;
    while known < CHUNK {
        all |= all << (8 * known);
        known *= 2;
    }
    all.to_le_bytes()
}
