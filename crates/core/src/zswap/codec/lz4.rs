//! LZ4 blocks to pages: on the way of a fault whose page nothing else made small, or of every one with `--codec lz4`.
//!
//! A block is a row of sequences: a token with two lengths, so many literal bytes, and a match: so many bytes from so far
//! back in what is written already (<https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md>). The last one ends after
//! its literals. A match may reach into itself: 1000 bytes from one byte back are that byte 1000 times. Heaps are full of
//! those: runs of zeros, columns of small numbers. `lz4_flex`, which compresses for us, copies them byte by byte, and each
//! waits for the one before it; here as many periods as fit are copied at once.

use crate::units::PAGE_BYTES;

/// Bytes are copied so many at once where there is room: what is too much is written over.
const CHUNK: usize = 16;
/// A match has so many bytes more than its token says.
const MATCH_MIN: usize = 4;
/// Lengths from here on go on behind the token.
const LONG: usize = 15;
/// A token, few literals and a distance take less than so many bytes of a block.
const HEAD: usize = 1 + CHUNK + 2;
/// Few literals and a short match write less than so many.
const ROOM: usize = 3 * CHUNK;

/// Makes the page. None if that isn't a page's block; then it has no particular content.
pub fn decompress(block: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (mut from, mut to) = (0, 0);
    loop {
        let rest = block.get(from..)?;
        let token = usize::from(*rest.first()?);
        let (literals, matched) = (token >> 4, token & LONG);
        from += 1;
        // Most literals are few, and not close to an end.
        if let Some(head) = rest.first_chunk::<HEAD>()
            && literals < LONG
            && to <= PAGE_BYTES - ROOM
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

/// A length that begins in a token, and goes on in the next bytes if it is too large for that.
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

/// Writes `count` bytes at `to`, each of which is the one `distance` before it.
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
        // As many periods as a chunk has room for.
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

/// The first `distance` bytes again and again.
fn periods(bytes: [u8; CHUNK], distance: usize) -> [u8; CHUNK] {
    let mut all = u128::from_le_bytes(bytes) & (u128::MAX >> (8 * (CHUNK - distance)));
    let mut known = distance;
    while known < CHUNK {
        all |= all << (8 * known);
        known *= 2;
    }
    all.to_le_bytes()
}
