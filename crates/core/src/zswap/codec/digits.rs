//! Packs digits among the literals of text: numbers, dates, addresses, digests. Matches don't help, because
//! digits are like nothing before them. [`text`](super::text) has its literals packed here first.
//!
//! 16 literals of one alphabet of 16 become 8 bytes. The first half of the literals are the low digits, the
//! second half the high digits. A mark of two bits says which alphabet. The alphabets are fixed, because
//! counting a page's bytes takes longer than packing them (`farpage bench codec`, rows `text` and `digits`).
#![forbid(unsafe_code)]

use crate::units::PAGE_BYTES;

/// Literals that are packed together.
const CHUNK: usize = 16;
/// Bytes of a packed chunk.
const PACKED: usize = CHUNK / 2;
/// Chunks of which one is sampled first: the sample is all that words should cost.
const SAMPLE: usize = 4;
/// Chunks whose marks share a byte.
const IN_BYTE: usize = 4;
/// Bytes that packing must save to be worth the time of a fault.
const WORTH: usize = 64;
const MARKS_MAX: usize = marks(PAGE_BYTES / CHUNK);

/// The alphabet of a chunk's literals. Its number is the chunk's mark; 0 means none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// 0 to 9 and a to f.
    Lower = 1,
    /// 0 to 9 and A to F.
    Upper = 2,
    /// 0 to 9 and what stands between numbers: colon, end of line, comma, minus, point and space.
    Numbers = 3,
}

impl Alphabet {
    /// Returns the alphabet of a chunk; `None` if the chunk stands as it is.
    const fn of_chunk(marks: &[u8], at: usize) -> Option<Alphabet> {
        match marks[at / IN_BYTE] >> (at % IN_BYTE * 2) & 3 {
            1 => Some(Alphabet::Lower),
            2 => Some(Alphabet::Upper),
            3 => Some(Alphabet::Numbers),
            _ => None,
        }
    }

    #[inline]
    fn letters(self, digits: Half) -> Half {
        let Half(digits) = digits;
        // Adding 16 - `least` makes exactly the digits from `least` on overflow their four bits.
        let from = |least: u64| (digits + ONES * (16 - least)) >> 4 & ONES;
        Half(match self {
            Alphabet::Lower => digits + ONES * 0x30 + from(10) * 0x27,
            Alphabet::Upper => digits + ONES * 0x30 + from(10) * 7,
            // Digits are the low half of their letters, but for these two.
            Alphabet::Numbers => {
                let (line, space) = (from(11) - from(12), from(15));
                digits + ONES * 0x30 - from(11) * 0x10 - line * 0x21 - space * 0xf
            }
        })
    }

    /// Returns the digits of which [`letters`](Self::letters) makes these, if all are of this alphabet;
    /// otherwise any digits.
    #[inline]
    fn digits(self, letters: Half) -> Half {
        let Half(letters) = letters;
        let low = letters & DIGIT;
        Half(match self {
            Alphabet::Lower | Alphabet::Upper => (low + (letters >> 6 & ONES) * 9) & DIGIT,
            Alphabet::Numbers => {
                let is = |byte: u8| {
                    let differs = letters ^ (ONES * u64::from(byte));
                    !(((differs & !HIGH) + !HIGH) | differs) >> 7 & ONES
                };
                (low + is(b'\n') + is(b' ') * 0xf) & DIGIT
            }
        })
    }
}

/// Half a chunk: each byte is a letter or a digit.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Half(u64);

/// 1 in each byte.
const ONES: u64 = u64::from_le_bytes([1; PACKED]);
/// The bits that a digit has. [`HIGH`] is the highest bit of each byte.
const DIGIT: u64 = ONES * 0xf;
const HIGH: u64 = ONES << 7;

impl Half {
    #[inline]
    fn of(bytes: [u8; PACKED]) -> Half {
        Half(u64::from_le_bytes(bytes))
    }

    /// Returns whether a letter comes after `f`, or isn't ASCII. In words nearly every chunk has one.
    #[inline]
    const fn has_others(&self) -> bool {
        (((self.0 & !HIGH) + ONES * (0x7f - b'f' as u64)) | self.0) & HIGH != 0
    }
}

/// Returns 16 letters as digits, and the alphabet that has all of them. Tries `likely` first.
#[inline]
fn packed(letters: [Half; 2], likely: Alphabet) -> Option<(Alphabet, u64)> {
    if letters.iter().any(Half::has_others) {
        return None;
    }
    [likely, Alphabet::Numbers, Alphabet::Lower, Alphabet::Upper].into_iter().find_map(|alphabet| {
        let digits = letters.map(|half| alphabet.digits(half));
        let fit = digits.map(|half| alphabet.letters(half)) == letters;
        fit.then_some((alphabet, digits[0].0 | digits[1].0 << 4))
    })
}

/// Bytes that [`pack`] may write: packed literals, and behind them a mark for each chunk.
pub const BYTES_MAX: usize = PAGE_BYTES / CHUNK * PACKED + MARKS_MAX;

const fn marks(chunks: usize) -> usize {
    chunks.div_ceil(IN_BYTE)
}

/// Packs the chunks of `literals` that have an alphabet. The unpacked literals then stand at the start of
/// `literals`. Returns their number, and how many bytes were written to `to`. Returns `None` if packing isn't
/// worth it; `literals` is then unchanged.
#[inline(never)]
pub fn pack(literals: &mut [u8], to: &mut [u8; BYTES_MAX]) -> Option<(usize, usize)> {
    let chunks = literals.as_chunks::<PACKED>().0.as_chunks::<2>().0;
    let (mut kinds, mut end, count) = ([0; MARKS_MAX], 0, chunks.len());
    let is_worth = |bytes| bytes >= marks(count) + WORTH;
    let mut likely = Alphabet::Numbers;
    let sample =
        chunks.iter().step_by(SAMPLE).filter(|chunk| !chunk.map(Half::of).iter().any(Half::has_others));
    if !is_worth(sample.count() * SAMPLE * PACKED) {
        return None;
    }
    for (at, chunk) in chunks.iter().enumerate() {
        if let Some((alphabet, digits)) = packed(chunk.map(Half::of), likely) {
            likely = alphabet;
            kinds[at / IN_BYTE] |= (alphabet as u8) << (at % IN_BYTE * 2);
            to[end..end + PACKED].copy_from_slice(&digits.to_le_bytes());
            end += PACKED;
        }
    }
    let kinds = &kinds[..marks(count)];
    if !is_worth(end) {
        return None;
    }
    let (chunks, rest) = literals.as_chunks_mut::<CHUNK>();
    let mut left = 0;
    for at in (0..count).filter(|at| Alphabet::of_chunk(kinds, *at).is_none()) {
        chunks[left] = chunks[at];
        left += 1;
    }
    let rest = rest.len();
    literals.copy_within(count * CHUNK.., left * CHUNK);
    to[end..end + kinds.len()].copy_from_slice(kinds);
    Some((left * CHUNK + rest, end + kinds.len()))
}

/// Splits off what [`pack`] wrote for `literals` literals, at the end of `stored`. Returns what stands before
/// it, and the packed literals; `None` if `stored` is too short.
pub fn split(stored: &[u8], literals: usize) -> Option<(&[u8], Packed<'_>)> {
    let chunks = literals / CHUNK;
    let (stored, kinds) = stored.split_at_checked(stored.len().checked_sub(marks(chunks))?)?;
    let packed = (0..chunks).filter(|at| Alphabet::of_chunk(kinds, *at).is_some()).count();
    let (rest, digits) = stored.split_at_checked(stored.len().checked_sub(packed * PACKED)?)?;
    Some((rest, Packed { kinds, chunks: digits.as_chunks().0 }))
}

/// Packed literals.
pub struct Packed<'a> {
    kinds: &'a [u8],
    chunks: &'a [[u8; PACKED]],
}

impl Packed<'_> {
    /// Returns how many literals are packed.
    pub const fn literals(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Puts the packed literals between the unpacked ones, which stand at the end of `literals`. Writes never
    /// come past the unpacked literals: what is left to write consists of them and more.
    pub fn unpack(&self, literals: &mut [u8]) {
        let mut next = self.literals();
        let mut packed = self.chunks.iter();
        for at in 0..literals.len() / CHUNK {
            let to = at * CHUNK;
            let chunk: [u8; CHUNK] = match Alphabet::of_chunk(self.kinds, at) {
                None => {
                    let chunk = literals[next..].first_chunk().expect("those that aren't packed are there");
                    next += CHUNK;
                    *chunk
                }
                Some(alphabet) => {
                    let packed = u64::from_le_bytes(*packed.next().expect("they were counted"));
                    let digits = [packed, packed >> 4].map(|digits| Half(digits & DIGIT));
                    let letters = digits.map(|half| alphabet.letters(half).0.to_le_bytes());
                    *letters.as_flattened().first_chunk().expect("two halves")
                }
            };
            *literals[to..].first_chunk_mut().expect("a whole chunk") = chunk;
        }
    }
}
