//! Sizes as users type them: `2G`, `2GiB`, `1.5g`, `2GB`, `4096`, `50%`.
//!
//! `2G` and `2GiB` are 2^31, `2GB` is 2 * 10^9, a plain number is bytes. A percentage is a share of the whole
//! that the option names. Fractions are exact, then rounded down to a byte: no floating point is involved.

/// A size or a share, with the text it came from, because errors quote what the user typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// As typed, without surrounding blanks.
    pub text: String,
    /// The size or share that the text means.
    pub amount: Amount,
}

/// Meaning of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Bytes.
    Bytes(u64),
    /// Millionths of a percent, above 0 and at most 100 %.
    Share(u64),
}

/// `Amount::Share` of one percent.
const PERCENT: u64 = 1_000_000;

impl Size {
    /// Returns the size in bytes. A percentage is a share of `whole`.
    pub fn of(&self, whole: u64) -> u64 {
        match self.amount {
            Amount::Bytes(bytes) => bytes,
            // The cast can't truncate: a share is at most 100 %, so the result is at most `whole`.
            Amount::Share(share) => {
                (u128::from(whole) * u128::from(share) / u128::from(100 * PERCENT)) as u64
            }
        }
    }
}

/// Reads a size. The error is a sentence that begins with the text that was typed.
pub fn parse(typed: &str) -> Result<Size, String> {
    let text = typed.trim();
    let refuse = |why: &str| Err(format!("`{text}` is not a size: {why}"));
    let number_bytes = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let (number, unit) = text.split_at(number_bytes);
    if is_exponent(unit.trim_start()) {
        return refuse("`e` begins an exponent, and a size has none; an exbibyte is E, as in 1E");
    }
    let Some(multiple) = multiple_of(unit.trim_start()) else {
        return if number.is_empty() {
            refuse("it should begin with a number, as in 2G, 1.5GiB, 500MB, 4096 or 50%")
        } else {
            refuse(
                "the unit should be K, M, G, T, P, E (powers of 1024), KB, MB, GB, TB, PB, EB (powers of 1000) or %",
            )
        };
    };
    let Some((whole, fraction)) = split_number(number) else {
        return refuse("it should begin with a number, as in 2G, 1.5GiB, 500MB, 4096 or 50%");
    };
    let Some(value) = scaled(whole, fraction, multiple) else {
        return refuse("it is too large");
    };
    if !unit.trim_start().starts_with('%') {
        return Ok(Size { text: text.to_owned(), amount: Amount::Bytes(value) });
    }
    if value == 0 || value > 100 * PERCENT {
        return refuse("a percentage is at least 0.000001 and at most 100");
    }
    Ok(Size { text: text.to_owned(), amount: Amount::Share(value) })
}

/// Whether an exponent begins here, as in `1e9`. `1e` is one that isn't finished, and no exbibyte.
fn is_exponent(unit: &str) -> bool {
    unit == "e"
        || unit.starts_with(['e', 'E'])
            && unit[1..].starts_with(|c: char| c.is_ascii_digit() || "+-".contains(c))
}

/// Returns the value of one unit, in bytes or in millionths of a percent; none for an unknown unit.
fn multiple_of(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_uppercase();
    let prefixes = ["K", "M", "G", "T", "P", "E"];
    match unit.as_str() {
        "" | "B" => return Some(1),
        "%" => return Some(PERCENT),
        _ => {}
    }
    let power = prefixes.iter().position(|prefix| unit.starts_with(prefix))? as u32 + 1;
    match &unit[1..] {
        "" | "I" | "IB" => Some(1024u64.pow(power)),
        "B" => Some(1000u64.pow(power)),
        _ => None,
    }
}

/// Splits a number into the digits before and after the point. None without a digit, or with a second point.
fn split_number(number: &str) -> Option<(&str, &str)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = whole.len() + fraction.len();
    (digits > 0 && !fraction.contains('.')).then_some((whole, fraction))
}

/// Returns `whole.fraction * multiple`, rounded down; none if the result doesn't fit.
fn scaled(whole: &str, fraction: &str, multiple: u64) -> Option<u64> {
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()? };
    // Digits beyond the 19th are worth less than a byte even of an exbibyte: 2^60 / 10^19 is about a ninth.
    let fraction = &fraction[..fraction.len().min(19)];
    let parts = if fraction.is_empty() { 0 } else { fraction.parse::<u64>().ok()? };
    let part_of = 10u128.pow(fraction.len() as u32);
    let total = u128::from(whole) * u128::from(multiple) + u128::from(parts) * u128::from(multiple) / part_of;
    u64::try_from(total).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(text: &str) -> u64 {
        match parse(text).unwrap().amount {
            Amount::Bytes(bytes) => bytes,
            Amount::Share(_) => panic!("{text} is a share"),
        }
    }

    #[test]
    fn units_mean_what_the_documentation_says() {
        for (text, expected) in [
            ("2G", 1 << 31),
            ("2g", 1 << 31),
            ("2GiB", 1 << 31),
            ("2Gi", 1 << 31),
            ("2 GiB", 1 << 31),
            ("2GB", 2_000_000_000),
            ("1.5G", 3 << 29),
            (".5K", 512),
            // The 19th digit of an exbibyte is worth a ninth of a byte.
            ("0.0000000000000000009E", 1),
            ("4096", 4096),
            ("4096B", 4096),
            ("0", 0),
            ("1.9B", 1),
            ("15E", 15 << 60),
        ] {
            assert_eq!(bytes(text), expected, "{text}");
        }
    }

    #[test]
    fn percentage_is_of_the_whole_and_rounds_down() {
        let half = parse("50%").unwrap();
        assert_eq!((half.of(1001), half.of(u64::MAX)), (500, u64::MAX / 2));
        assert_eq!(parse("12.5 %").unwrap().of(1000), 125);
        assert_eq!(parse("100%").unwrap().of(u64::MAX), u64::MAX);
    }

    #[test]
    fn nonsense_is_refused_with_what_was_typed() {
        for text in [
            "", " ", ".", "G", "-1", "+1", "1e9", "1.2.3G", "2Q", "2GG", "2GBx", "0x10", "0%", "101%", "16E",
            "nan", "1é",
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.starts_with(&format!("`{}` is not a size", text.trim())), "{message}");
        }
    }

    /// `1e` was taken for an exbibyte, so for all of the machine's memory.
    #[test]
    fn exponent_is_refused_as_such() {
        for text in ["1e", "1 e", "1.5e", "1e9", "1E9", "2e+3", "2e-3"] {
            let message = parse(text).unwrap_err();
            assert!(message.contains("`e` begins an exponent"), "{message}");
        }
        for text in ["1E", "1 E", "1eb", "1eib", "1Ei"] {
            assert!(parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn percentage_at_its_ends() {
        assert_eq!(parse("0.000001%").unwrap().amount, Amount::Share(1));
        for text in ["0%", "0.0000009%", "100.000001%"] {
            let message = parse(text).unwrap_err();
            assert!(message.ends_with("at least 0.000001 and at most 100"), "{message}");
        }
    }

    proptest! {
        #[test]
        fn plain_number_is_itself(n: u64) {
            prop_assert_eq!(bytes(&n.to_string()), n);
        }

        #[test]
        fn unit_multiplies_or_is_too_large(n: u64, power in 0u32..6) {
            let unit = ["K", "M", "G", "T", "P", "E"][power as usize];
            let expected = n.checked_mul(1024u64.pow(power + 1));
            prop_assert_eq!(parse(&format!("{n}{unit}")).ok().map(|s| s.of(0)), expected);
            let expected = n.checked_mul(1000u64.pow(power + 1));
            prop_assert_eq!(parse(&format!("{n}{unit}B")).ok().map(|s| s.of(0)), expected);
        }

        #[test]
        fn fraction_is_exact_and_rounded_down(whole in 0u64..1000, thousandths in 0u64..1000) {
            let expected = (whole * 1000 + thousandths) * (1 << 30) / 1000;
            prop_assert_eq!(bytes(&format!("{whole}.{thousandths:03}G")), expected);
        }

        #[test]
        fn any_text_is_answered_without_panic(text in "\\PC{0,12}") {
            let _ = parse(&text);
        }

        #[test]
        fn share_never_exceeds_the_whole(whole: u64, share in 1u64..=100) {
            let size = parse(&format!("{share}%")).unwrap();
            prop_assert!(size.of(whole) <= whole);
        }
    }
}
