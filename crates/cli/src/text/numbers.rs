//! Printing of numbers: sizes in IEC units, counts in groups of three, times in the unit that fits.

/// `23.4 MiB`: one decimal, left out if it is zero.
pub fn iec(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut tenths = u128::from(bytes) * 10;
    for (power, unit) in UNITS.iter().enumerate() {
        if power > 0 {
            tenths = (u128::from(bytes) * 10 + (1 << (10 * power - 1))) >> (10 * power);
        }
        if tenths < 10_240 || power == UNITS.len() - 1 {
            let (whole, tenth) = (tenths / 10, tenths % 10);
            return if tenth == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenth} {unit}") };
        }
    }
    unreachable!("the last unit takes whatever is left")
}

/// `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `850 ns`, `12.1 µs`, `3.2 ms`, `1.5 s`.
pub fn duration(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        // A value that would be rounded to 1000.0 is printed in the next unit.
        1_000..999_950 => format!("{:.1} µs", ns as f64 / 1e3),
        999_950..999_950_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Returns a size that can be typed and is comfortably above `bytes`: a quarter more, on a round number.
pub fn suggestion(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    let wanted = bytes.saturating_add(bytes / 4).max(MIB);
    let round = match wanted.div_ceil(MIB) {
        0..=64 => wanted.div_ceil(MIB).next_power_of_two(),
        65..=1024 => wanted.div_ceil(64 * MIB) * 64,
        _ => wanted.div_ceil(512 * MIB) * 512,
    };
    if round.is_multiple_of(1024) { format!("{}G", round / 1024) } else { format!("{round}M") }
}

/// Returns a size that can be typed, on a round number, and at most `bytes`; 1M if `bytes` is
/// less than a MiB.
pub fn suggestion_below(bytes: u64) -> String {
    let mib = (bytes >> 20).max(1);
    let step = match mib {
        0..=128 => 1,
        129..=1024 => 16,
        _ => 256,
    };
    let round = mib / step * step;
    if round.is_multiple_of(1024) { format!("{}G", round / 1024) } else { format!("{round}M") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_short_and_never_1024_of_a_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (24_536_679, "23.4 MiB"),
            ((1 << 20) - 1, "1 MiB"),
            (1 << 31, "2 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(iec(bytes), text);
        }
    }

    #[test]
    fn counts_and_times() {
        assert_eq!((grouped(7), grouped(1_234_567)), ("7".into(), "1,234,567".into()));
        assert_eq!(duration(999), "999 ns");
        assert_eq!(duration(12_100), "12.1 µs");
        assert_eq!((duration(999_949), duration(999_950)), ("999.9 µs".into(), "1.0 ms".into()));
        assert_eq!(duration(999_950_000), "1.0 s");
        assert_eq!(duration(3_200_000_000), "3.2 s");
    }

    #[test]
    fn suggestion_is_round() {
        assert_eq!(suggestion(24_536_679), "32M");
        assert_eq!(suggestion(700 << 20), "896M");
        assert_eq!(suggestion(3 << 30), "4G");
        assert_eq!(suggestion(1), "1M");
    }

    proptest! {
        #[test]
        fn suggestion_below_is_a_size_at_most_an_eighth_less(bytes in 1u64 << 20..1 << 50) {
            let size = crate::text::size::parse(&suggestion_below(bytes)).unwrap().of(0);
            prop_assert!(size <= bytes && size >= bytes / 2 && (bytes < 8 << 20 || size >= bytes / 8 * 7));
        }

        #[test]
        fn suggestion_is_a_size_above_what_was_needed(bytes in 0u64..1 << 50) {
            prop_assert!(crate::text::size::parse(&suggestion(bytes)).unwrap().of(0) > bytes);
        }

        #[test]
        fn printed_size_is_within_a_twentieth(bytes: u64) {
            let text = iec(bytes);
            // `16 EiB` is one byte more than fits.
            if let Ok(size) = crate::text::size::parse(&text) {
                prop_assert!(size.of(0).abs_diff(bytes) <= bytes / 20 + 1, "{}", text);
            } else {
                prop_assert!(bytes > 15 << 60);
            }
        }
    }
}
