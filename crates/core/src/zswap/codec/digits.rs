//! Digits among the bytes of text that are like nothing before them: numbers, dates, addresses, digests. [`text`](super::text) has
//! its literals packed here first.
//!
//! 16 literals that are all of one alphabet of 16 become 8 bytes: half of them are the low digits, the other half the high ones.
//! Which alphabet says a mark of two bits. It is not learned: to count a page's bytes takes longer than all of this.
//! (`farpage bench codec`, rows `text` and `digits`.)
#![forbid(unsafe_code)]

use crate::units::PAGE_BYTES;

/// Literals that are looked at together.
const CHUNK: usize = 16;
/// What they become.
const PACKED: usize = CHUNK / 2;
/// One of so many is looked at first: what are words should cost no more than that.
const SAMPLE: usize = 4;
/// Chunks whose marks share a byte.
const IN_BYTE: usize = 4;
/// So many bytes must be saved, or it isn't worth the time of a fault.
const WORTH: usize = 64;
const MARKS_MAX: usize = marks(PAGE_BYTES / CHUNK);

/// Literals of one kind, or of none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// 0 to 9, and a to f.
    Lower = 1,
    /// The same with A to F.
    Upper = 2,
    /// 0 to 9, and what stands between: colon, end of line, comma, minus, point, and space.
    Numbers = 3,
}

impl Alphabet {
    /// That of a chunk. None: it stands as it is.
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
        // A digit that is at least so much is more than four bits hold with this.
        let from = |least: u64| (digits + ONES * (16 - least)) >> 4 & ONES;
        Half(match self {
            Alphabet::Lower => digits + ONES * 0x30 + from(10) * 0x27,
            Alphabet::Upper => digits + ONES * 0x30 + from(10) * 7,
            // But for these two, the low half of what they are.
            Alphabet::Numbers => {
                let (line, space) = (from(11) - from(12), from(15));
                digits + ONES * 0x30 - from(11) * 0x10 - line * 0x21 - space * 0xf
            }
        })
    }

    /// What [`letters`](Self::letters) makes these of, if they are all of this alphabet; else any digits.
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

/// Half a chunk: a letter or a digit in each byte.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Half(u64);

/// 1 in each byte.
const ONES: u64 = u64::from_le_bytes([1; PACKED]);
/// The bits that a digit has, and the highest.
const DIGIT: u64 = ONES * 0xf;
const HIGH: u64 = ONES << 7;

impl Half {
    #[inline]
    fn of(bytes: [u8; PACKED]) -> Half {
        Half(u64::from_le_bytes(bytes))
    }

    /// Whether there is a letter behind f, or none of ASCII. That is so in nearly all of what are words.
    #[inline]
    const fn has_others(&self) -> bool {
        (((self.0 & !HIGH) + ONES * (0x7f - b'f' as u64)) | self.0) & HIGH != 0
    }
}

/// 16 letters as digits, and of which alphabet they all are. `likely` is tried first.
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

/// What [`pack`] may write: packed literals, and behind them a mark for each chunk.
pub const ROOM: usize = PAGE_BYTES / CHUNK * PACKED + MARKS_MAX;

const fn marks(chunks: usize) -> usize {
    chunks.div_ceil(IN_BYTE)
}

/// Packs what it can of the literals. How many are left, which then stand at their start, and how long the rest is in `to`. None if
/// it isn't worth it; then they are as they were.
#[inline(never)]
pub fn pack(literals: &mut [u8], to: &mut [u8; ROOM]) -> Option<(usize, usize)> {
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

/// What [`pack`] wrote for so many literals, at the end of `stored`, and what stands before it. None if there is none.
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
    /// How many these are.
    pub const fn literals(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Puts them between the others, which stand at the end of `literals`. What is written never comes past those: what is left to
    /// be written is they and more.
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
