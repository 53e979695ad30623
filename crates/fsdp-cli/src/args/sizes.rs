//! Sizes as people write them: `5GB`, `256MiB`, `1.5 GiB`, `1000000`.
//!
//! Decimal and binary units mean what they say: 1 kB is 1000 bytes and 1 KiB is 1024. Letters alone (`5G`) are
//! refused, because tools disagree about them.

const UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

/// Digits after the point that are read; more would not change a byte of a terabyte.
const DECIMALS_MAX: usize = 12;

/// Reads a size in bytes.
///
/// # Errors
/// A message for the user.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let expected = || "expected a size such as 5GB, 256MiB or 1000000".to_owned();
    let digits_end = text.find(|character: char| character != '.' && !character.is_ascii_digit());
    let (number, unit) = text.split_at(digits_end.unwrap_or(text.len()));
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" => 1,
        name => UNITS.iter().find(|(known, _)| *known == name).ok_or_else(expected)?.1,
    };
    let (integer, decimals) = number.split_once('.').unwrap_or((number, ""));
    if integer.is_empty() || decimals.len() > DECIMALS_MAX {
        return Err(expected());
    }
    let digits: u128 = format!("{integer}{decimals}").parse().map_err(|_| expected())?;
    let scale = 10_u128.pow(decimals.len().try_into().map_err(|_| expected())?);
    let bytes = digits.checked_mul(u128::from(unit)).map(|product| product / scale);
    match bytes.and_then(|bytes| u64::try_from(bytes).ok()) {
        Some(0) => Err("expected a size above 0".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("this size does not fit in 64 bits".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_decimal_and_binary_units() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("256MiB", 256 << 20),
            ("1.5 GiB", 3 << 29),
            ("0.5kb", 500),
            ("7", 7),
            ("12b", 12),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        for text in ["", "GB", "5G", "-5GB", "5 GB GB", "1.2.3MB", "1e9", ".5GB", "five", "1.0000000000001GB"]
        {
            assert!(size(text).unwrap_err().starts_with("expected a size such as"), "{text}");
        }
        assert_eq!(size("0MB").unwrap_err(), "expected a size above 0");
        assert_eq!(size("99999999999TB").unwrap_err(), "this size does not fit in 64 bits");
        assert!(size(&"9".repeat(60)).is_err());
    }
}
