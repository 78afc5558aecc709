//! Decimals: floating-point numbers with at most a few digits behind the point, as prices and measurements
//! have. An eviction packs a page of decimals as whole numbers. A fault divides the whole numbers again.
//!
//! 12.34 has no end in binary, so its bits look like noise. But 12.34 is the number nearest to 1234 / 100,
//! and the numerators are a column like any other ([`columns`](super::columns)). For each number x of a page
//! the encoder takes the bits of 1.5·2⁵² + x·10ⁿ. Numbers of that size are whole and one apart. The sum is
//! therefore rounded to a whole number, and its bits count up as that number does. A subtraction and a
//! division bring x back, to the last bit or not at all. A page is one of decimals if all of its numbers come
//! back. Numbers that are too large, infinite or NaN don't come back, nor do zeros with a sign. Numbers of 32
//! bits use 2²³ in the same way.
//!
//! ```text
//!  n, and 128 for numbers of 32 bits │ columns
//! ```
//!
//! Encoder and decoder must round alike, whatever the program has set in its threads: see [`as_usual`].
// UNSAFETY: this file calls functions that are compiled for features which not every CPU has. It also sets
// the register that says how to round.

use super::columns::{Ints, Longs};
use super::cpu::{self, Vectors};
use crate::units::PAGE_BYTES;

/// Digits behind the point, at most. Places in degrees have seven.
const DIGITS_MAX: usize = 7;
/// Bit of the first byte that says that the numbers have 32 bits.
const SHORT: u8 = 0x80;
/// Numbers of a page that are sampled before all are packed.
const SAMPLE: usize = 32;
/// Bytes between two checks whether all numbers so far come back. The first failed check gives the page up.
const STEP_BYTES: usize = 512;

/// A floating-point type.
trait Float: Copy {
    const BYTES: usize;
    const TENS: [Self; DIGITS_MAX + 1];
    /// The middle of the numbers that are whole and one apart, so that either sign fits.
    const WHOLE: Self;

    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    /// Returns whether the number may have few digits at all: zero, or neither large nor small. As
    /// floating-point numbers, integers and most other contents of memory are tiny. Some CPUs take a hundred
    /// times as long to multiply them.
    fn is_likely(self) -> bool;
    /// Returns the packed form of a number with `digits` digits behind the point: a whole number.
    fn up(self, digits: usize) -> Self;
    fn down(self, digits: usize) -> Self;
    /// Returns 0 if `packed` is in its place and comes back as this number, bit for bit. The check of the
    /// place refuses NaN. NaN would come back, too, as CPUs are, but no language promises it.
    fn differs(self, packed: Self, digits: usize) -> u64;
}

macro_rules! float {
    ($type:ty) => {
        impl Float for $type {
            const BYTES: usize = size_of::<$type>();
            const TENS: [Self; DIGITS_MAX + 1] = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7];
            const WHOLE: Self = 1.5 * (1_u64 << (<$type>::MANTISSA_DIGITS - 1)) as $type;

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(*bytes.first_chunk().expect("as many bytes"))
            }
            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
            #[inline(always)]
            fn is_likely(self) -> bool {
                // Compare bits, so that nothing is computed with the number.
                let (least, most): ($type, $type) =
                    (1e-7, (1_u64 << (<$type>::MANTISSA_DIGITS - 2)) as $type);
                let size = self.to_bits() << 1;
                size == 0 || (least.to_bits() << 1..most.to_bits() << 1).contains(&size)
            }
            #[inline(always)]
            fn up(self, digits: usize) -> Self {
                self * Self::TENS[digits] + Self::WHOLE
            }
            #[inline(always)]
            fn down(self, digits: usize) -> Self {
                (self - Self::WHOLE) / Self::TENS[digits]
            }
            #[inline(always)]
            fn differs(self, packed: Self, digits: usize) -> u64 {
                let back = packed.down(digits);
                let out_of_place =
                    (packed.to_bits() ^ Self::WHOLE.to_bits()) >> (<$type>::MANTISSA_DIGITS - 1);
                u64::from(out_of_place | (self.to_bits() ^ back.to_bits()))
            }
        }
    };
}
float!(f64);
float!(f32);

/// Encodes a page of decimals and returns the length. Returns `None` if the page isn't one of decimals, or if
/// the result is longer than `output`. The content of `buffer` doesn't matter.
pub fn encode(page: &[u8; PAGE_BYTES], buffer: &mut [u8; PAGE_BYTES], output: &mut [u8]) -> Option<usize> {
    encode_by(cpu::vectors(), page, buffer, output)
}

fn encode_by(
    vectors: Vectors,
    page: &[u8; PAGE_BYTES],
    buffer: &mut [u8; PAGE_BYTES],
    output: &mut [u8],
) -> Option<usize> {
    if cfg!(not(target_arch = "x86_64")) {
        // `as_usual` is yet to be written for other CPUs.
        return None;
    }
    let (first, to) = output.split_first_mut()?;
    let (may_be_longs, may_be_ints) = (are_likely::<f64>(page), are_likely::<f32>(page));
    if !may_be_longs && !may_be_ints {
        return None;
    }
    let (mut longs, mut ints) = (None, None);
    as_usual(&mut || {
        if may_be_longs {
            longs = digits::<f64>(page).filter(|digits| up::<f64>(vectors, page, *digits, buffer));
        }
        if longs.is_none() && may_be_ints {
            ints = digits::<f32>(page).filter(|digits| up::<f32>(vectors, page, *digits, buffer));
        }
    });
    let length = match (longs, ints) {
        (Some(digits), _) => {
            *first = digits as u8;
            Longs::of(buffer)?.encode(buffer, to)
        }
        (None, digits) => {
            *first = SHORT | digits? as u8;
            Ints::of(buffer)?.encode(buffer, to)
        }
    };
    Some(1 + length?)
}

/// Decodes `bytes` into `page`. Returns `None` if no page of decimals can have become `bytes`.
pub fn decode(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    decode_by(cpu::vectors(), bytes, page)
}

fn decode_by(vectors: Vectors, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
    let (first, bytes) = bytes.split_first()?;
    let digits = usize::from(*first & !SHORT);
    if digits > DIGITS_MAX {
        return None;
    }
    if *first & SHORT == 0 {
        Longs::decode(bytes, page)?;
        as_usual(&mut || down::<f64>(vectors, digits, page));
    } else {
        Ints::decode(bytes, page)?;
        as_usual(&mut || down::<f32>(vectors, digits, page));
    }
    Some(())
}

/// Runs `act` with numbers rounded to the nearest, none of them flushed to zero, and no trap. Every thread
/// begins with these settings, and the kernel sets them for signal handlers. But the encoder may run in a
/// signal handler, and the decoder in a thread that has inherited what the program has set. Afterwards the
/// program's settings are restored, and the flags that its own numbers have raised.
#[cfg(target_arch = "x86_64")]
fn as_usual(act: &mut dyn FnMut()) {
    let (mut before, usual) = (0_u32, 0x1f80_u32);
    // SAFETY: `before` has four bytes to write, and `usual` four to read. All compiled code expects the value
    // in `usual`.
    unsafe {
        core::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack, preserves_flags));
        core::arch::asm!("ldmxcsr [{}]", in(reg) &raw const usual, options(nostack));
    }
    // The call is opaque to the compiler. Otherwise the compiler could move a computation out of `act`, to
    // where other rounding applies.
    core::hint::black_box(act)();
    // SAFETY: `before` has four bytes to read, which hold the value that was set before.
    unsafe {
        core::arch::asm!("ldmxcsr [{}]", in(reg) &raw const before, options(nostack));
    }
}

/// Runs `act` as it is. Nothing is encoded on these CPUs, so only bytes that nobody made get here.
#[cfg(not(target_arch = "x86_64"))]
fn as_usual(act: &mut dyn FnMut()) {
    act();
}

/// Samples a page's numbers, each at another place of its step, because numbers may stand in rows.
fn sample<F: Float>(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = F> {
    let step = PAGE_BYTES / F::BYTES / SAMPLE;
    (0..SAMPLE).map(move |at| F::read(&page[F::BYTES * (at * step + at * 5 % step)..]))
}

/// Returns whether all sampled numbers have the size of a decimal.
fn are_likely<F: Float>(page: &[u8; PAGE_BYTES]) -> bool {
    sample::<F>(page).all(Float::is_likely)
}

/// Returns how many digits the page's numbers have, as far as a sample tells.
fn digits<F: Float>(page: &[u8; PAGE_BYTES]) -> Option<usize> {
    let have =
        |digits: &usize| sample::<F>(page).all(|number| number.differs(number.up(*digits), *digits) == 0);
    (0..=DIGITS_MAX).find(have)
}

/// Writes the packed form of each number to `buffer`. Returns `false` if one of the numbers doesn't come
/// back.
fn up<F: Float>(
    vectors: Vectors,
    page: &[u8; PAGE_BYTES],
    digits: usize,
    buffer: &mut [u8; PAGE_BYTES],
) -> bool {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `up` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::up::<F>(page, digits, buffer) },
        // SAFETY: `vectors` says that the CPU has the features that `up` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => unsafe { avx2::up::<F>(page, digits, buffer) },
        _ => any::up::<F>(page, digits, buffer),
    }
}

/// Turns the packed numbers of a page back, in place.
fn down<F: Float>(vectors: Vectors, digits: usize, page: &mut [u8; PAGE_BYTES]) {
    match vectors {
        // SAFETY: `vectors` says that the CPU has the features that `down` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 | Vectors::Vbmi2 => unsafe { avx512::down::<F>(digits, page) },
        // SAFETY: `vectors` says that the CPU has the features that `down` is compiled for.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => unsafe { avx2::down::<F>(digits, page) },
        _ => any::down::<F>(digits, page),
    }
}

/// The code that all versions are made of.
mod any {
    use super::{Float, STEP_BYTES};
    use crate::units::PAGE_BYTES;

    #[inline(always)]
    pub fn up<F: Float>(page: &[u8; PAGE_BYTES], digits: usize, buffer: &mut [u8; PAGE_BYTES]) -> bool {
        page.chunks_exact(STEP_BYTES).zip(buffer.chunks_exact_mut(STEP_BYTES)).all(|(from, to)| {
            let mut differ = 0;
            for (from, to) in from.chunks_exact(F::BYTES).zip(to.chunks_exact_mut(F::BYTES)) {
                let number = F::read(from);
                let whole = number.up(digits);
                differ |= number.differs(whole, digits);
                whole.write(to);
            }
            differ == 0
        })
    }

    #[inline(always)]
    pub fn down<F: Float>(digits: usize, page: &mut [u8; PAGE_BYTES]) {
        page.chunks_exact_mut(F::BYTES).for_each(|bytes| F::read(bytes).down(digits).write(bytes));
    }
}

/// The same code, compiled for vectors that not every CPU has.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $features:literal) => {
        mod $name {
            use super::{Float, any};
            use crate::units::PAGE_BYTES;

            #[target_feature(enable = $features)]
            pub fn up<F: Float>(
                page: &[u8; PAGE_BYTES],
                digits: usize,
                buffer: &mut [u8; PAGE_BYTES],
            ) -> bool {
                any::up::<F>(page, digits, buffer)
            }

            #[target_feature(enable = $features)]
            pub fn down<F: Float>(digits: usize, page: &mut [u8; PAGE_BYTES]) {
                any::down::<F>(digits, page);
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2,bmi1,bmi2,popcnt");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes and decodes a page with every version that this CPU has; all make the same bytes. Returns the
    /// length, if the page is one of decimals.
    fn round_trip(page: &[u8; PAGE_BYTES]) -> Option<usize> {
        let mut buffer = [0xaa; PAGE_BYTES];
        let mut output = vec![0xee; 2 * PAGE_BYTES];
        let length = encode_by(Vectors::Any, page, &mut buffer, &mut output);
        for vectors in cpu::each() {
            let mut others = vec![0xdd; 2 * PAGE_BYTES];
            assert_eq!(encode_by(vectors, page, &mut buffer, &mut others), length, "{vectors:?}");
            let Some(length) = length else { continue };
            assert!(output[..length] == others[..length], "{vectors:?}");
            let mut back = [0xcc; PAGE_BYTES];
            decode_by(vectors, &output[..length], &mut back).unwrap();
            assert!(back == *page, "{vectors:?}");
            assert_eq!(encode_by(vectors, page, &mut buffer, &mut others[..length - 1]), None);
        }
        length
    }

    fn page_of<const BYTES: usize>(number: impl FnMut(usize) -> [u8; BYTES]) -> [u8; PAGE_BYTES] {
        let bytes: Vec<u8> = (0..PAGE_BYTES / BYTES).flat_map(number).collect();
        bytes.try_into().unwrap()
    }

    /// Returns the number nearest to `whole` / 10^`digits`.
    fn written<T: std::str::FromStr<Err: std::fmt::Debug>>(whole: i64, digits: usize) -> T {
        format!("{whole}e-{digits}").parse().unwrap()
    }

    fn mixed(n: usize) -> i64 {
        ((n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as i64
    }

    #[test]
    fn what_is_written_with_a_few_digits_takes_the_bits_of_a_whole_number() {
        for digits in 0..=DIGITS_MAX {
            for bits in [1, 8, 16, 20] {
                let whole = |at: usize| (mixed(at) & ((1 << bits) - 1)) - (1 << (bits - 1)) + 1;
                let page = page_of(|at| written::<f64>(whole(at), digits).to_le_bytes());
                let length = round_trip(&page).unwrap_or_else(|| panic!("{bits} bits, {digits} digits"));
                assert!(length <= 1 + 72 + 64 * bits, "{length} bytes for {bits} bits, {digits} digits");
                let page = page_of(|at| written::<f32>(whole(at), digits).to_le_bytes());
                let length = round_trip(&page).unwrap_or_else(|| panic!("{bits} bits, {digits} digits, f32"));
                assert!(
                    length <= 1 + 40 + 128 * bits,
                    "{length} bytes for {bits} bits, {digits} digits, f32"
                );
            }
        }
    }

    #[test]
    fn one_number_that_has_no_such_digits_is_enough_to_leave_the_page_to_others() {
        let price = |at: usize| written::<f64>(mixed(at) % 100_000, 2);
        assert!(round_trip(&page_of(|at| price(at).to_le_bytes())).is_some());
        for (place, odd) in (0..512).zip(
            [
                1.0 / 3.0,
                -0.0,
                f64::NAN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                1e300,
                5e-324,
                1e-9,
                f64::MAX,
                4e13,
            ]
            .into_iter()
            .cycle(),
        ) {
            let page = page_of(|at| if at == place { odd } else { price(at) }.to_le_bytes());
            assert_eq!(round_trip(&page), None, "{odd} at {place}");
        }
    }

    /// A program may have set how its threads round, and what happens to small numbers. The encoding and the
    /// decoding thread may have different settings.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn it_does_not_matter_what_the_program_has_set_and_that_stays() {
        fn get() -> u32 {
            let mut set = 0;
            // SAFETY: `set` has four bytes to write.
            unsafe { core::arch::asm!("stmxcsr [{}]", in(reg) &raw mut set) };
            set
        }
        fn set(to: u32) {
            // SAFETY: `to` has four bytes to read, and every combination of these bits is allowed.
            unsafe { core::arch::asm!("ldmxcsr [{}]", in(reg) &raw const to) };
        }
        let pages = [
            page_of(|at| written::<f64>(mixed(at), 3).to_le_bytes()),
            page_of(|at| written::<f32>(mixed(at) % (1 << 20), 3).to_le_bytes()),
        ];
        for page in pages {
            let (mut buffer, mut usual, before) = ([0; PAGE_BYTES], vec![0; PAGE_BYTES], get());
            let length = encode(&page, &mut buffer, &mut usual).unwrap();
            // Round down, up, towards zero; the last with small numbers as zero; all flags set, or none;
            // every trap, or one.
            for mode in [0x3f80, 0x5f80, 0x7f80, 0xffc0, 0x9fff, 0x1f80, 0x0000, 0x0f80] {
                for vectors in cpu::each() {
                    let (mut bytes, mut back) = (vec![0; PAGE_BYTES], [0; PAGE_BYTES]);
                    set(mode);
                    let found = encode_by(vectors, &page, &mut buffer, &mut bytes);
                    let kept = get();
                    let decoded = decode_by(vectors, &usual[..length], &mut back);
                    let kept_again = get();
                    set(before);
                    let all = (found, decoded, kept, kept_again);
                    assert_eq!(all, (Some(length), Some(()), mode, mode), "{mode:#x}, {vectors:?}");
                    assert!(bytes == usual && back == page, "{mode:#x}, {vectors:?}");
                }
            }
        }
    }

    #[test]
    fn truncated_bytes_and_too_many_digits_are_refused() {
        let page = page_of(|at| written::<f32>(mixed(at) % 5000, 1).to_le_bytes());
        let (mut buffer, mut bytes, mut back) = ([0; PAGE_BYTES], vec![0; PAGE_BYTES], [0; PAGE_BYTES]);
        let length = encode(&page, &mut buffer, &mut bytes).unwrap();
        (0..length).for_each(|length| assert_eq!(decode(&bytes[..length], &mut back), None, "{length}"));
        assert_eq!(decode(&bytes[..=length], &mut back), None);
        for digits in DIGITS_MAX as u8 + 1..SHORT {
            bytes[0] = SHORT | digits;
            assert_eq!(decode(&bytes[..length], &mut back), None, "{digits}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// All numbers come back, or their page is left to another codec. Numbers with few enough digits come
        /// back.
        #[test]
        fn numbers_come_back(
            whole in proptest::collection::vec(-2_000_000_000_i64..2_000_000_000, 512),
            digits in 0..=DIGITS_MAX,
            odd in proptest::collection::vec((0_usize..512, any::<u64>()), 0..2),
        ) {
            let mut bits: Vec<u64> = whole.iter().map(|whole| written::<f64>(*whole, digits).to_bits()).collect();
            odd.iter().for_each(|(at, odd)| bits[*at] = *odd);
            let length = round_trip(&page_of(|at| bits[at].to_le_bytes()));
            prop_assert!(length.is_some() || !odd.is_empty());
        }

        #[test]
        fn any_bytes_are_answered(
            first in 0..=DIGITS_MAX as u8,
            is_short in any::<bool>(),
            bits in proptest::collection::vec(0..40_u8, 8),
            rest in proptest::collection::vec(any::<u8>(), PAGE_BYTES),
        ) {
            // The bytes are as long as they say, so that they are decoded.
            let (number, head) = if is_short { (4, SHORT) } else { (8, 0) };
            let bits: Vec<u8> = bits.iter().map(|bits| bits % (8 * number as u8)).collect();
            let packed: usize = bits.iter().map(|bits| 64 / number * usize::from(*bits)).sum();
            let bytes = [&[head | first], &rest[..8 * number], &bits, &rest[PAGE_BYTES - packed.min(PAGE_BYTES)..]].concat();
            prop_assert!(decode(&bytes, &mut [0; PAGE_BYTES]).is_some());
        }

        /// All decoders make the same of damaged bytes.
        #[test]
        fn damaged_bytes_are_answered_alike(
            step in 1_i64..1000,
            digits in 0..=DIGITS_MAX,
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let page = page_of(|at| written::<f64>(at as i64 * step, digits).to_le_bytes());
            let (mut buffer, mut bytes) = ([0; PAGE_BYTES], vec![0; PAGE_BYTES]);
            let length = encode(&page, &mut buffer, &mut bytes).unwrap();
            for (at, byte) in damage {
                bytes[at.index(length)] = byte;
            }
            let mut page = [0; PAGE_BYTES];
            let plain = decode_by(Vectors::Any, &bytes[..length], &mut page);
            for vectors in cpu::each() {
                let mut other = [0; PAGE_BYTES];
                prop_assert_eq!(decode_by(vectors, &bytes[..length], &mut other), plain, "{:?}", vectors);
                prop_assert!(plain.is_none() || page == other, "{:?}", vectors);
            }
        }
    }
}
