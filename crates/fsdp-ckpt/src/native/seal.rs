//! JSON texts that end with their own digest.
//!
//! ```text
//! {"format":"..", .. ,"digest":"crc64:0123456789abcdef"}\n
//! \___ body: digested ___/\___ fixed, except the 16 digits ___/
//! ```
//!
//! The text stays valid JSON for other tools. Each byte belongs to the digested body, is a digit of the digest, or is
//! fixed by the format, so no byte can change unnoticed. Digits must be lower case; otherwise the case of a digit could
//! change.

use serde::Serialize;

use crate::{
    digest::{Digest, DigestKind},
    error::Fault,
};

/// Maximum length of a sealed text, in bytes. One of 671 billion parameters on 2,048 ranks has 354 MB.
pub(super) const SEALED_LEN_MAX: u64 = 1 << 30;

const BEFORE_DIGITS: &[u8] = br#","digest":"crc64:"#;
const DIGITS: usize = 16;
const AFTER_DIGITS: &[u8] = b"\"}\n";
const TRAILER_LEN: usize = BEFORE_DIGITS.len() + DIGITS + AFTER_DIGITS.len();

/// Returns the sealed text of a value that serializes to an object with at least one field.
pub(super) fn seal(object: &impl Serialize) -> Vec<u8> {
    let mut text =
        serde_json::to_vec(object).expect("texts of checkpoints have string keys and no failing fields");
    assert_eq!(text.pop(), Some(b'}'), "an object is sealed");
    let digest = DigestKind::Crc64.of(&text);
    text.extend_from_slice(BEFORE_DIGITS);
    text.extend_from_slice(format!("{:016x}", digest.value).as_bytes());
    text.extend_from_slice(AFTER_DIGITS);
    text
}

/// Verifies the digest of a sealed text, and returns the JSON object without it.
pub(super) fn unseal(mut text: Vec<u8>) -> Result<Vec<u8>, Fault> {
    let body_len = text.len().checked_sub(TRAILER_LEN).ok_or_else(not_sealed)?;
    let (body, trailer) = text.split_at(body_len);
    let digits = trailer.strip_prefix(BEFORE_DIGITS).and_then(|rest| rest.strip_suffix(AFTER_DIGITS));
    let value = digits.and_then(parse_digits).ok_or_else(not_sealed)?;
    let (expected, got) = (Digest { kind: DigestKind::Crc64, value }, DigestKind::Crc64.of(body));
    if expected != got {
        let sums = format!("its bytes 0..{body_len} give {got}, but it ends in {expected}");
        return Err(Fault::new(format!("{sums}; it was changed, so use another checkpoint")));
    }
    text.truncate(body_len);
    text.push(b'}');
    Ok(text)
}

/// The error for a text that does not end with a digest.
fn not_sealed() -> Fault {
    Fault::new("it does not end in its own digest; it was cut off or changed, so use another checkpoint")
}

/// Parses exactly sixteen lower-case hexadecimal digits.
pub(super) fn parse_digits(digits: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| match byte {
        b'0'..=b'9' => Some(u64::from(byte - b'0')),
        b'a'..=b'f' => Some(u64::from(byte - b'a') + 10),
        _ => None,
    };
    if digits.len() != DIGITS {
        return None;
    }
    digits.iter().try_fold(0, |value, byte| Some(value << 4 | digit(byte)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_text_is_json_and_round_trips() {
        let object = serde_json::json!({"a": 1, "b": [true, "}"]});
        let text = seal(&object);
        let whole: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert!(whole["digest"].as_str().unwrap().starts_with("crc64:"));
        let body: serde_json::Value = serde_json::from_slice(&unseal(text).unwrap()).unwrap();
        assert_eq!(body, object);
    }

    #[test]
    fn every_bit_flip_and_length_change_is_detected() {
        let text = seal(&serde_json::json!({"a": 1, "name": "abcdef"}));
        for byte in 0..text.len() {
            for bit in 0..8 {
                let mut changed = text.clone();
                changed[byte] ^= 1 << bit;
                assert!(unseal(changed).is_err(), "bit {bit} of byte {byte}");
            }
            assert!(unseal(text[..byte].to_vec()).is_err(), "cut to {byte}");
        }
        assert!(unseal([&text[..], b"\n"].concat()).is_err());
        assert!(unseal([b" ", &text[..]].concat()).is_err());
    }
}
