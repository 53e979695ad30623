//! Keeps a malicious `tokenizer.json` from ending the process.
//!
//! The tokenizer library trusts its input: it allocates as much as the file asks for, indexes with numbers from the
//! file, and writes texts of any length that a normalizer produces. Contents that would cause unbounded allocations are
//! rejected before the library sees the file; panics are caught both on loading and on encoding.

use std::panic::AssertUnwindSafe;

use serde::Deserialize;
use serde_json::Value;

use super::fault::{CHARSMAP, GROWTH_MAX, Source, TokenizerFault, WORD_CHARS_MAX};
use crate::panics;

/// The part of the file that can write text.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    model: ModelParts,
}

/// The part of a model that determines how long it takes per word.
#[derive(Default, Deserialize)]
struct ModelParts {
    max_input_chars_per_word: Option<u64>,
}

/// Rejects files that would cause unbounded allocations, or take hours for a word.
///
/// # Errors
/// [`TokenizerFault`], or invalid JSON.
pub(super) fn check(text: &str) -> Result<(), Source> {
    let parts: Parts = serde_json::from_str(text)?;
    let growth = growth(&parts.normalizer)?;
    if growth > GROWTH_MAX {
        return Err(TokenizerFault::Growth { growth }.into());
    }
    match parts.model.max_input_chars_per_word.filter(|&chars| chars > WORD_CHARS_MAX) {
        Some(chars) => Err(TokenizerFault::WordLength { chars }.into()),
        None => Ok(()),
    }
}

/// Runs code of the library. A panic is returned as an error, without output on stderr.
pub(super) fn guarded<T>(run: impl FnOnce() -> Result<T, Source>) -> Result<T, Source> {
    panics::catch_panic(AssertUnwindSafe(run))
        .unwrap_or_else(|message| Err(TokenizerFault::Panic { message }.into()))
}

/// Returns the factor by which a normalizer may lengthen a text. Consecutive steps multiply.
fn growth(normalizer: &Value) -> Result<u64, TokenizerFault> {
    match normalizer {
        Value::Array(steps) => {
            steps.iter().try_fold(1, |so_far: u64, step| Ok(so_far.saturating_mul(growth(step)?)))
        }
        Value::Object(step) => {
            if let Some(Value::String(charsmap)) = step.get(CHARSMAP) {
                check_charsmap(charsmap)?;
            }
            // Each replaced part is at least one byte; an empty pattern matches between any two bytes.
            let written = step.get("content").and_then(Value::as_str).map_or(1, |text| text.len().max(1));
            let inner = step.get("normalizers").map_or(Ok(1), growth)?;
            Ok(inner.saturating_mul(written as u64))
        }
        _ => Ok(1),
    }
}

fn check_charsmap(base64: &str) -> Result<(), TokenizerFault> {
    let bytes = base64.trim_end_matches('=').len() as u64 * 3 / 4;
    let Some(table_bytes) = first_word(base64) else { return Ok(()) };
    if u64::from(table_bytes) + 4 > bytes {
        return Err(TokenizerFault::Charsmap { table_bytes: table_bytes.into(), bytes });
    }
    Ok(())
}

/// Returns the first four bytes of a base64 text as a little-endian number. The library rejects invalid base64.
fn first_word(base64: &str) -> Option<u32> {
    let six_bits = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits = base64.as_bytes().first_chunk::<6>()?;
    let bits = digits.iter().try_fold(0u64, |bits, &digit| Some(bits << 6 | u64::from(six_bits(digit)?)))?;
    Some(u32::try_from(bits >> 4).ok()?.swap_bytes())
}

#[cfg(test)]
mod tests;
