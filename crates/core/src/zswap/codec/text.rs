//! Text, and everything else that repeats itself at any byte: *matches*, which copy earlier bytes, and the
//! bytes between them, the *literals*. Evictions encode these pages, and faults decode them.
//!
//! The scheme is LZ77, as LZ4 has it, made for one page. The time grows with the number of matches, and a
//! short match saves next to nothing. So a match has at least eight bytes. A page is short enough for the
//! distance and both lengths to take three bytes as a rule. Literals stand by themselves. If all literals are
//! ASCII, they are packed: they are taken as eight rows, and the last row's bits become the other rows' top
//! bits. Digits among the literals are packed before that ([`digits`](super::digits)). Text becomes as short
//! as with LZ4, in two thirds of the time (`farpage bench codec`).
//!
//! ```text
//!  where literals begin: 15 bits │ with digits: 1 bit │ literals: 15 bits │ packed: 1 bit │ matches │ literals │ digits
//!  a match: distance: 12 bits │ its bytes, less 8: 6 bits │ literals before it: 6 bits
//!           │ literals before it: u16, if all its bits are set │ its bytes: u16, if all its bits are set
//! ```

use super::digits;
use crate::units::PAGE_BYTES;

/// Bytes of a match, at least: a word, which is searched for at once.
const WORD_BYTES: usize = 8;
const HEAD_BYTES: usize = 4;
const MATCH_BYTES: usize = 3;
/// Bit of a 16-bit field of the head that is a flag. The other 15 bits are a number.
const FLAG: u32 = 15;
/// Value of a length's six bits if the length follows as a whole.
const LONG: usize = 63;
/// Rows of packed literals. All rows but the last are stored, each byte with a bit of the last row.
const ROWS: usize = 8;
/// Bytes copied at once where they fit. Later copies overwrite the surplus.
const CHUNK: usize = 32;

/// Offset in the output at which the literals are gathered: behind as many matches as there may be. Long
/// matches take more bytes, but are fewer.
const LITERALS_AT: usize = 1600;
const _: () = assert!(HEAD_BYTES + PAGE_BYTES / WORD_BYTES * MATCH_BYTES < LITERALS_AT);
/// Offset in the output at which digits among the literals are packed.
const DIGITS_AT: usize = LITERALS_AT + PAGE_BYTES + CHUNK;
/// Bytes that the encoder may write.
pub const OUTPUT_BYTES: usize = DIGITS_AT + digits::BYTES_MAX;

const TABLE_BITS: u32 = 11;
/// Where a word was last seen, by its hash.
pub type Table = [u16; 1 << TABLE_BITS];

fn place_of(word: u64) -> usize {
    (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - TABLE_BITS)) as usize
}

fn word_at(page: &[u8; PAGE_BYTES], at: usize) -> Option<u64> {
    page.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Returns how many bytes from `at` on equal the bytes from `from` on, which is before `at`. The first eight
/// are known to be equal.
fn same(page: &[u8; PAGE_BYTES], from: usize, at: usize) -> usize {
    const STEP: usize = size_of::<u128>();
    let mut count = WORD_BYTES;
    while let Some(bytes) = page[at + count..].first_chunk::<STEP>() {
        let others = page[from + count..].first_chunk().expect("it is before");
        let differ = u128::from_le_bytes(*bytes) ^ u128::from_le_bytes(*others);
        if differ != 0 {
            return count + differ.trailing_zeros() as usize / 8;
        }
        count += STEP;
    }
    let rest = page[at + count..].iter().zip(&page[from + count..]);
    count + rest.take_while(|(byte, other)| byte == other).count()
}

/// Offsets that are tried one after the other. The last bytes of a page are fewer than these need, and begin
/// no match.
const STEPS: usize = 4;
/// Failed rounds after which each round also skips [`STEPS`] offsets. As many failed rounds later each round
/// skips twice as many offsets, and so on.
const PATIENCE: usize = 16;

/// Returns the next match at `at` or behind it: where its bytes occurred before, and where they occur now.
#[inline]
fn next_match(page: &[u8; PAGE_BYTES], table: &mut Table, mut at: usize) -> Option<(usize, usize)> {
    let mut missed = 0;
    loop {
        let window: &[u8; STEPS + WORD_BYTES - 1] = page[at..].first_chunk()?;
        for step in 0..STEPS {
            let word = u64::from_le_bytes(*window[step..].first_chunk()?);
            let seen = &mut table[place_of(word)];
            let from = usize::from(*seen);
            *seen = (at + step) as u16;
            if word_at(page, from) == Some(word) {
                return Some((from, at + step));
            }
        }
        missed += 1;
        at = (at + STEPS * (1 + missed / PATIENCE)).min(PAGE_BYTES);
    }
}

/// Encodes a page and returns the length.
pub fn encode(page: &[u8; PAGE_BYTES], table: &mut Table, output: &mut [u8; OUTPUT_BYTES]) -> usize {
    // The table first says that every word was seen at 0. Words are compared there as anywhere.
    table.fill(0);
    let mut written = Written { matches_end: HEAD_BYTES, literals_end: LITERALS_AT };
    let mut done = 0;
    let mut next = next_match(page, table, 1);
    while let Some((from, at)) = next {
        let count = same(page, from, at);
        written.literals(page, done, at, output);
        written.match_of(at - from, count, at - done, output);
        done = at + count;
        if let Some(word) = word_at(page, done - 2) {
            table[place_of(word)] = done as u16 - 2;
        }
        next = next_match(page, table, done);
    }
    written.literals(page, done, PAGE_BYTES, output);
    written.join(output)
}

/// How far the output is filled: with matches from its start, and with literals from [`LITERALS_AT`].
struct Written {
    matches_end: usize,
    literals_end: usize,
}

impl Written {
    fn literals(
        &mut self,
        page: &[u8; PAGE_BYTES],
        from: usize,
        end: usize,
        output: &mut [u8; OUTPUT_BYTES],
    ) {
        let to = &mut output[self.literals_end..];
        match (page[from..].first_chunk::<CHUNK>(), to.first_chunk_mut()) {
            (Some(chunk), Some(to)) if end - from <= CHUNK => *to = *chunk,
            _ => to[..end - from].copy_from_slice(&page[from..end]),
        }
        self.literals_end += end - from;
    }

    fn match_of(&mut self, distance: usize, count: usize, literals: usize, output: &mut [u8; OUTPUT_BYTES]) {
        let (more, few) = ((count - WORD_BYTES).min(LONG), literals.min(LONG));
        let bits = distance | more << 12 | few << 18;
        output[self.matches_end..][..4].copy_from_slice(&(bits as u32).to_le_bytes());
        self.matches_end += MATCH_BYTES;
        for (short, whole) in [(few, literals), (more, count)] {
            if short == LONG {
                output[self.matches_end..][..2].copy_from_slice(&(whole as u16).to_le_bytes());
                self.matches_end += 2;
            }
        }
    }

    /// Puts the literals behind the matches, and returns the length of all.
    fn join(mut self, output: &mut [u8; OUTPUT_BYTES]) -> usize {
        let (to, count) = (self.matches_end, self.literals_end - LITERALS_AT);
        let (literals, packed) = output.split_at_mut(DIGITS_AT);
        let packed = packed.first_chunk_mut().expect("there is space");
        let digits = digits::pack(&mut literals[LITERALS_AT..self.literals_end], packed);
        if let Some((left, _)) = digits {
            self.literals_end = LITERALS_AT + left;
        }
        let is_packed = output[LITERALS_AT..self.literals_end].is_ascii();
        let flagged = |count: usize, flag: bool| (count as u16 | u16::from(flag) << FLAG).to_le_bytes();
        output[..2].copy_from_slice(&flagged(to, digits.is_some()));
        output[2..HEAD_BYTES].copy_from_slice(&flagged(count, is_packed));
        let end = to + self.move_literals(is_packed, output);
        let Some((_, bytes)) = digits else { return end };
        output.copy_within(DIGITS_AT..DIGITS_AT + bytes, end);
        end + bytes
    }

    /// Moves the literals behind the matches, as they are or as rows. Returns how many bytes they take there.
    fn move_literals(&self, is_packed: bool, output: &mut [u8; OUTPUT_BYTES]) -> usize {
        let (to, count) = (self.matches_end, self.literals_end - LITERALS_AT);
        if !is_packed {
            output.copy_within(LITERALS_AT..self.literals_end, to);
            return count;
        }
        let row = count.div_ceil(ROWS);
        output[self.literals_end..LITERALS_AT + ROWS * row].fill(0);
        let (rows, last) = output.split_at_mut(LITERALS_AT + (ROWS - 1) * row);
        for number in 0..ROWS - 1 {
            let (from, to) = (LITERALS_AT + number * row, to + number * row);
            rows.copy_within(from..from + row, to);
            let bytes = rows[to..to + row].iter_mut().zip(&*last);
            bytes.for_each(|(byte, bits)| *byte |= bits >> number << (ROWS - 1));
        }
        (ROWS - 1) * row
    }
}

/// Decodes `bytes` into `page`. Returns `None` if [`encode`] makes `bytes` of no page; `page` then has no
/// particular content.
///
/// The literals are put at the end of the page first. Writes from the start of the page never come past the
/// literals: what is left to write consists of them and the matches.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let head: &[u8; HEAD_BYTES] = bytes.first_chunk()?;
    let flagged = |at: usize| {
        let bits = usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
        (bits >> FLAG != 0, bits & ((1 << FLAG) - 1))
    };
    let ((has_digits, matches_end), (is_packed, count)) = (flagged(0), flagged(2));
    let (mut matches, stored) =
        bytes.get(HEAD_BYTES..)?.split_at_checked(matches_end.checked_sub(HEAD_BYTES)?)?;
    let mut literals = PAGE_BYTES.checked_sub(count)?;
    if has_digits {
        spread_with_digits(stored, is_packed, &mut page[literals..])?;
    } else {
        spread(stored, is_packed, &mut page[literals..])?;
    }
    let mut to = 0;
    while !matches.is_empty() {
        let bits = match matches.first_chunk() {
            Some(bytes) => u32::from_le_bytes(*bytes),
            None => u32::from_le_bytes([*matches.first()?, *matches.get(1)?, *matches.get(2)?, 0]),
        } as usize;
        matches = &matches[MATCH_BYTES..];
        let (distance, mut count, mut few) =
            (bits & 0xfff, (bits >> 12 & LONG) + WORD_BYTES, bits >> 18 & LONG);
        // The fast path: most matches are like this.
        if few <= CHUNK
            && count <= CHUNK
            && distance >= CHUNK / 2
            && to + few + CHUNK <= literals
            && literals <= PAGE_BYTES - CHUNK
        {
            copy::<CHUNK>(page, literals, to)?;
            literals += few;
            to += few;
            let from = to.checked_sub(distance)?;
            copy::<{ CHUNK / 2 }>(page, from, to)?;
            copy::<{ CHUNK / 2 }>(page, from + CHUNK / 2, to + CHUNK / 2)?;
            to += count;
            continue;
        }
        if few == LONG {
            few = long(&mut matches)?;
        }
        if count == LONG + WORD_BYTES {
            count = long(&mut matches)?;
        }
        let next = literals + few;
        if next > PAGE_BYTES || to + few + count > next {
            return None;
        }
        page.copy_within(literals..next, to);
        literals = next;
        to += few;
        repeat(page, to, distance, count)?;
        to += count;
    }
    (to == literals).then_some(())
}

/// Spreads the stored literals over `to`, which is exactly as long as the literals.
fn spread(stored: &[u8], is_packed: bool, to: &mut [u8]) -> Option<()> {
    if !is_packed {
        return (stored.len() == to.len()).then(|| to.copy_from_slice(stored));
    }
    let row = to.len().div_ceil(ROWS);
    if stored.len() != (ROWS - 1) * row {
        return None;
    }
    let rows = || stored.chunks_exact(row.max(1));
    for (to, from) in to.chunks_mut(row.max(1)).zip(rows()) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from & 0x7f);
    }
    if let Some(last) = to.get_mut((ROWS - 1) * row..) {
        last.fill(0);
        for (number, from) in rows().enumerate() {
            last.iter_mut().zip(from).for_each(|(to, from)| *to |= from >> (ROWS - 1) << number);
        }
    }
    Some(())
}

/// Does what [`spread`] does, where digits among the literals are packed.
#[inline(never)]
fn spread_with_digits(stored: &[u8], is_packed: bool, to: &mut [u8]) -> Option<()> {
    let (stored, digits) = digits::split(stored, to.len())?;
    spread(stored, is_packed, &mut to[digits.literals()..])?;
    digits.unpack(to);
    Some(())
}

fn long(matches: &mut &[u8]) -> Option<usize> {
    let (length, rest) = matches.split_first_chunk()?;
    *matches = rest;
    Some(u16::from_le_bytes(*length).into())
}

fn copy<const N: usize>(page: &mut [u8; PAGE_BYTES], from: usize, to: usize) -> Option<()> {
    let bytes: [u8; N] = *page[from..].first_chunk()?;
    *page[to..].first_chunk_mut()? = bytes;
    Some(())
}

/// Writes `count` bytes at `to`, each a copy of the byte `distance` before it. Writes nothing behind them,
/// because literals may be there. The bytes must fit in the page. Returns `None` if `distance` leads to no
/// written byte.
fn repeat(page: &mut [u8; PAGE_BYTES], to: usize, distance: usize, count: usize) -> Option<()> {
    let from = to.checked_sub(distance).filter(|from| *from < to)?;
    // The bytes that are there already are whole periods. Each step copies all of them, and so doubles them.
    let mut done = 0;
    while done < count {
        let more = (distance + done).min(count - done);
        page.copy_within(from..from + more, to + done);
        done += more;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes as [`decode`] does, by the layout in the head of this file: byte for byte, and not in place.
    fn simply_decoded(bytes: &[u8]) -> Option<Vec<u8>> {
        let number =
            |at: usize| Some(usize::from(u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?])));
        let (end, has_digits) = (number(0)? & 0x7fff, number(0)? >> 15 == 1);
        let (count, is_packed) = (number(2)? & 0x7fff, number(2)? >> 15 == 1);
        let mut stored = bytes.get(end..)?;
        let mut marks = vec![0; count / 16];
        let mut digits = [].iter();
        if has_digits {
            let at = stored.len().checked_sub(marks.len().div_ceil(4))?;
            marks = (0..marks.len()).map(|chunk| stored[at + chunk / 4] >> (chunk % 4 * 2) & 3).collect();
            let from = at.checked_sub(8 * marks.iter().filter(|mark| **mark > 0).count())?;
            digits = stored[from..at].iter();
            stored = &stored[..from];
        }
        let others = count.checked_sub(2 * digits.len())?;
        let row = others.div_ceil(8);
        let mut rest: Vec<u8> = match is_packed {
            false if stored.len() == others => stored.to_vec(),
            true if stored.len() == 7 * row => {
                let last =
                    |at| (0..7).fold(0, |byte, row_of| byte | stored[row_of * row + at] >> 7 << row_of);
                stored.iter().map(|byte| byte & 0x7f).chain((0..row).map(last)).collect()
            }
            _ => return None,
        };
        rest.truncate(others);
        let mut rest = rest.into_iter();
        let mut literals = Vec::new();
        for mark in marks {
            let alphabet = ["", "0123456789abcdef", "0123456789ABCDEF", "0123456789:\n,-. "]
                [usize::from(mark)]
            .as_bytes();
            if mark == 0 {
                literals.extend(rest.by_ref().take(16));
                continue;
            }
            let both: Vec<u8> = digits.by_ref().take(8).copied().collect();
            literals.extend(both.iter().map(|byte| alphabet[usize::from(byte & 15)]));
            literals.extend(both.iter().map(|byte| alphabet[usize::from(byte >> 4)]));
        }
        literals.extend(rest);
        if literals.len() > PAGE_BYTES {
            return None;
        }
        let (mut page, mut literals) = (Vec::new(), literals.into_iter());
        let mut at = HEAD_BYTES;
        while at != end {
            if at + MATCH_BYTES > end {
                return None;
            }
            let bits =
                usize::from(bytes[at]) | usize::from(bytes[at + 1]) << 8 | usize::from(bytes[at + 2]) << 16;
            at += MATCH_BYTES;
            let (distance, mut count, mut few) = (bits & 4095, (bits >> 12 & 63) + 8, bits >> 18);
            for (length, longest) in [(&mut few, 63), (&mut count, 71)] {
                if *length == longest {
                    *length = if at + 2 <= end { number(at)? } else { return None };
                    at += 2;
                }
            }
            for _ in 0..few {
                page.push(literals.next()?);
            }
            for _ in 0..count {
                let from = page.len().checked_sub(distance).filter(|_| distance > 0)?;
                page.push(page[from]);
            }
        }
        page.extend(literals);
        (page.len() == PAGE_BYTES).then_some(page)
    }

    /// Encodes a page and decodes it with both decoders; returns the bytes.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Vec<u8> {
        let (mut table, mut output) = ([0xeeee; 1 << TABLE_BITS], [0xee; OUTPUT_BYTES]);
        let length = encode(page, &mut table, &mut output);
        let bytes = output[..length].to_vec();
        let mut back = [0xcc; PAGE_BYTES];
        decode(&bytes, &mut back).unwrap();
        assert!(back == *page);
        assert!(simply_decoded(&bytes).unwrap() == page);
        bytes
    }

    fn page_of(byte: impl FnMut(usize) -> u8) -> [u8; PAGE_BYTES] {
        core::array::from_fn(byte)
    }

    /// Returns bytes that have nothing in common, of `bits` bits each.
    fn noise(bits: u32) -> impl Fn(usize) -> u8 {
        move |at| {
            let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> (64 - bits)) as u8
        }
    }

    #[test]
    fn noise_takes_a_head_and_itself_and_ascii_an_eighth_less() {
        assert_eq!(round_trip(&page_of(noise(8))).len(), HEAD_BYTES + PAGE_BYTES);
        assert_eq!(round_trip(&page_of(noise(7))).len(), HEAD_BYTES + PAGE_BYTES * 7 / 8);
    }

    #[test]
    fn a_byte_or_a_few_again_and_again_are_one_match() {
        let nothing = noise(7);
        for period in 1..70 {
            let page = page_of(|at| nothing(at % period));
            let literals = period.div_ceil(8) * 7;
            // The first match begins behind the first period, and its length doesn't fit in its bits.
            let mut most = HEAD_BYTES + MATCH_BYTES + 2 + literals;
            if period >= LONG {
                most += 2;
            }
            assert!(round_trip(&page).len() <= most, "{period}: {} of {most}", round_trip(&page).len());
        }
    }

    /// The matches are written as the encoder writes what it has found, whether it would find them or not.
    #[test]
    fn every_length_is_written_and_read() {
        let nothing = noise(8);
        for distance in [1, 2, 15, 16, 17, 40, 900] {
            for literals in (0..80).chain([200, 1000]) {
                for count in (8..90).chain([200, 1000]) {
                    let at = 1000 + literals;
                    let mut page = page_of(&nothing);
                    page.copy_within(..100, 900);
                    (at..at + count).for_each(|to| page[to] = page[to - distance]);
                    let mut output = [0xee; OUTPUT_BYTES];
                    let mut written = Written { matches_end: HEAD_BYTES, literals_end: LITERALS_AT };
                    written.literals(&page, 0, 900, &mut output);
                    written.match_of(900, 100, 900, &mut output);
                    written.literals(&page, 1000, at, &mut output);
                    written.match_of(distance, count, literals, &mut output);
                    written.literals(&page, at + count, PAGE_BYTES, &mut output);
                    let length = written.join(&mut output);
                    let bytes = &output[..length];
                    let mut back = [0xcc; PAGE_BYTES];
                    decode(bytes, &mut back).unwrap();
                    assert!(back == page, "{distance}, {literals}, {count}");
                    assert!(simply_decoded(bytes).unwrap() == page);
                    let longs = 2 + usize::from(count >= LONG + WORD_BYTES) + usize::from(literals >= LONG);
                    let matches = HEAD_BYTES + 2 * MATCH_BYTES + 2 * longs;
                    assert_eq!(bytes.len(), matches + PAGE_BYTES - 100 - count);
                }
            }
        }
    }

    #[test]
    fn a_match_is_found_wherever_it_begins() {
        let nothing = noise(8);
        for at in 10..100 {
            let page = page_of(|byte| match byte.checked_sub(at) {
                Some(byte) if byte < 30 => nothing(byte % 10),
                _ => nothing(byte),
            });
            assert!(round_trip(&page).len() < PAGE_BYTES, "{at}");
        }
    }

    #[test]
    fn truncated_and_padded_bytes_are_refused() {
        let text = b"It was thought through and partly measured; where you find better, do better. ";
        let mut bytes = round_trip(&page_of(|at| text[(at + at / 300 * 7) % text.len()]));
        let mut back = [0; PAGE_BYTES];
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length], &mut back), None, "{length}");
        }
        bytes.push(0);
        assert_eq!(decode(&bytes, &mut back), None);
    }

    #[test]
    fn digits_take_half_and_what_is_between_them_what_it_is() {
        let nothing = noise(4);
        for alphabet in [b"0123456789abcdef", b"0123456789ABCDEF", b"0123456789:\n,-. "] {
            let digits = page_of(|at| alphabet[usize::from(nothing(at))]);
            let marks = PAGE_BYTES / 16 / 4;
            assert_eq!(round_trip(&digits).len(), HEAD_BYTES + marks + PAGE_BYTES / 2);
            // A letter in each four chunks. A letter that isn't ASCII leaves the other literals unpacked.
            for (other, least) in [(b'z', 14), (0xe4, 16)] {
                let mixed = page_of(|at| if at % 64 == 20 { other } else { digits[at] });
                let chunks = PAGE_BYTES / 64;
                assert_eq!(
                    round_trip(&mixed).len(),
                    HEAD_BYTES + marks + chunks * (3 * 8 + least),
                    "{other}"
                );
            }
        }
    }

    /// A few digits aren't worth the time.
    #[test]
    fn few_digits_stay_as_they_are() {
        let (letters, digits) = (noise(8), noise(4));
        for chunks in 0..40 {
            let page = page_of(|at| {
                if at < chunks * 16 {
                    b"0123456789abcdef"[usize::from(digits(at))]
                } else {
                    letters(at) | 0x80
                }
            });
            let length = HEAD_BYTES + PAGE_BYTES;
            let packed = length + 64 - chunks * 8;
            let least = if chunks < 16 { length } else { packed };
            assert_eq!(round_trip(&page).len(), least, "{chunks}");
        }
    }

    /// Pages of new bytes, which are any bytes, ASCII or digits, and of copies of earlier bytes.
    fn repetitive() -> impl Strategy<Value = [u8; PAGE_BYTES]> {
        let length = || prop_oneof![1_usize..12, 1_usize..100, 1_usize..1000];
        let piece = (length(), length(), prop_oneof![1_usize..20, 1_usize..4096]);
        let like = prop_oneof![
            Just("any"),
            Just("ASCII"),
            Just("0123456789abcdef"),
            Just("0123456789:\n,-. "),
            Just("FACE4z")
        ];
        (proptest::collection::vec(piece, 1..200), like, any::<u64>()).prop_map(|(pieces, like, mut seed)| {
            let mut page = Vec::new();
            for (new, count, distance) in pieces.iter().cycle() {
                for _ in 0..*new {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    let byte = (seed >> 56) as u8;
                    page.push(match like {
                        "any" => byte,
                        "ASCII" => byte & 0x7f,
                        letters => letters.as_bytes()[usize::from(byte) % letters.len()],
                    });
                }
                for _ in 0..*count {
                    page.push(page[page.len().saturating_sub(*distance)]);
                }
                if page.len() >= PAGE_BYTES {
                    break;
                }
            }
            *page.first_chunk().unwrap()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_page_comes_back(page in repetitive()) {
            round_trip(&page);
        }

        /// Both decoders treat damaged bytes alike: they find a fault, or make the same page.
        #[test]
        fn damaged_bytes_are_answered_alike(
            page in repetitive(),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = round_trip(&page);
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let mut back = [0; PAGE_BYTES];
            let ours = decode(&bytes, &mut back).map(|()| back.to_vec());
            prop_assert_eq!(ours, simply_decoded(&bytes));
        }

        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let mut page = [0; PAGE_BYTES];
            let ours = decode(&bytes, &mut page).map(|()| page.to_vec());
            prop_assert_eq!(ours, simply_decoded(&bytes));
        }
    }
}
