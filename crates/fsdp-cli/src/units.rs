//! Formats numbers for people.

use std::time::Duration;

use fsdp_config::Packing;

/// Bytes with a binary unit: `512 B`, `1.5 KiB`, `12.0 MiB`.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub(crate) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

/// An integer with commas between groups of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun: `1 file`, `2 files`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {}", plural(count, noun))
}

/// A noun as it stands after a count.
pub(crate) fn plural(count: usize, noun: &str) -> String {
    let end = match (count, noun.ends_with('h')) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{noun}{end}")
}

/// A rate, rounded to an integer.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are positive and small")]
pub(crate) fn rate(per_second: f64) -> String {
    grouped(per_second.max(0.0).round() as u64)
}

/// The unit of the speed, which depends on how samples are made: a stream has no padding.
pub(crate) fn speed_unit(packing: Packing) -> &'static str {
    match packing {
        Packing::Stream => "tokens/s",
        Packing::Documents | Packing::Packed => "tokens/s with padding",
    }
}

/// A perplexity: two decimals, or three digits if large.
pub(crate) fn perplexity(value: f64) -> String {
    if value < 1e6 { format!("{value:.2}") } else { format!("{value:.2e}") }
}

/// A duration as `m:ss` or `h:mm:ss`.
pub(crate) fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// A count of parameters: `5.9M`, `8.03B`.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(crate) fn params(count: usize) -> String {
    let value = count as f64;
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.1}K", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}M", value / 1e6),
        _ => format!("{:.2}B", value / 1e9),
    }
}

/// Floating-point operations with a decimal unit: `12 FLOP`, `49.2 MFLOP`, `1.3 TFLOP`.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub(crate) fn flops(count: u64) -> String {
    let mut value = count as f64;
    let mut unit = "";
    for larger in ["k", "M", "G", "T", "P", "E"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    if unit.is_empty() { format!("{count} FLOP") } else { format!("{value:.1} {unit}FLOP") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_use_decimal_units() {
        let shown = [0, 999, 1_000, 49_152, 6_700_000_000_000].map(flops);
        assert_eq!(shown, ["0 FLOP", "999 FLOP", "1.0 kFLOP", "49.2 kFLOP", "6.7 TFLOP"]);
    }

    #[test]
    fn large_perplexities_use_scientific_notation() {
        let shown = [1.0, 20.456, 1e9, f64::INFINITY].map(perplexity);
        assert_eq!(shown, ["1.00", "20.46", "1.00e9", "inf"]);
    }

    #[test]
    fn bytes_pick_fitting_binary_unit() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
    }

    #[test]
    fn thousands_are_grouped_with_commas() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1234), "1,234");
        assert_eq!(grouped(1_000_000), "1,000,000");
        assert_eq!(rate(999.6), "1,000");
    }

    #[test]
    fn counted_uses_singular_for_one() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "file")), ["0 files", "1 file", "2 files"]);
        assert_eq!(plural(2, "micro-batch"), "micro-batches");
    }

    #[test]
    fn clock_shows_hours_only_if_nonzero() {
        assert_eq!(clock(Duration::from_secs(65)), "1:05");
        assert_eq!(clock(Duration::from_secs(3661)), "1:01:01");
    }

    #[test]
    fn params_show_three_significant_digits() {
        assert_eq!(params(999), "999");
        assert_eq!(params(5_900_000), "5.90M");
        assert_eq!(params(8_030_000_000), "8.03B");
    }
}
