//! The kinds of values a key can have: how to read one, and how an error describes it.
//!
//! A kind includes its range, so a wrong type and a wrong range are the same error with the same description, and a key
//! cannot be read without its range check.

use toml::Value;

/// How a run file writes the absence of a value, so that `resolved.toml` names every key.
pub(super) const NONE: &str = "none";

/// How a run file writes that the family of the model decides.
pub(super) const FAMILY: &str = "family";

/// A type with a range, and how to read it from TOML.
pub(super) struct Kind<T> {
    /// Completes "it must be ...".
    pub(super) allowed: &'static str,
    /// Returns the value if it is of this kind.
    pub(super) read: fn(&Value) -> Option<T>,
}

/// An integer of at least 0.
pub(super) const COUNT: Kind<u64> = Kind { allowed: "an integer of at least 0", read: count };

/// An integer of at least 1.
pub(super) const POSITIVE_COUNT: Kind<u64> =
    Kind { allowed: "an integer of at least 1", read: |value| count(value).filter(|&n| n > 0) };

/// Like [`COUNT`], for sizes in memory.
pub(super) const LENGTH: Kind<usize> = Kind { allowed: COUNT.allowed, read: count };

/// Like [`POSITIVE_COUNT`], for sizes in memory.
pub(super) const POSITIVE_LENGTH: Kind<usize> =
    Kind { allowed: POSITIVE_COUNT.allowed, read: |value| count(value).filter(|&n| n > 0) };

/// Maximum number of tokens in a micro-batch. At this limit its tokens and targets take 64 MiB, and element counts of
/// activations fit in 63 bits. The longest sequences trained today have a million tokens.
pub(super) const MICRO_BATCH_TOKENS_MAX: usize = 1 << 23;

/// Tokens per sequence, or sequences per micro-batch; their product has the same limit.
pub(super) const MICRO_BATCH_SIDE: Kind<usize> = Kind {
    allowed: "an integer from 1 to 8388608",
    read: |value| (SIZE.read)(value).filter(|&size| size <= MICRO_BATCH_TOKENS_MAX),
};

/// A number of ranks. Schedules can be inspected for clusters larger than any machine; the number of ranks that can be
/// started is smaller and depends on the launcher.
pub(super) const RANKS: Kind<usize> = Kind {
    allowed: "an integer from 1 to 1048576",
    read: |value| (SIZE.read)(value).filter(|&ranks| ranks <= 1 << 20),
};

/// A size that fits in memory: an integer from 1 to 2^32 - 1.
pub(super) const SIZE: Kind<usize> =
    Kind { allowed: "an integer from 1 to 4294967295", read: |value| size(value).filter(|&n| n > 0) };

/// A size that may be 0.
pub(super) const SIZE_OR_ZERO: Kind<usize> = Kind { allowed: "an integer from 0 to 4294967295", read: size };

/// A finite number above 0.
pub(super) const POSITIVE: Kind<f64> =
    Kind { allowed: "a finite number above 0", read: |value| number(value).filter(|&x| x > 0.0) };

/// A finite number of at least 0.
pub(super) const NON_NEGATIVE: Kind<f64> =
    Kind { allowed: "a finite number of at least 0", read: |value| number(value).filter(|&x| x >= 0.0) };

/// A finite number of at most 0.
pub(super) const NON_POSITIVE: Kind<f64> =
    Kind { allowed: "a finite number of at most 0", read: |value| number(value).filter(|&x| x <= 0.0) };

/// A power of two of at least 1 that single precision can hold.
pub(super) const POWER_OF_TWO: Kind<f64> = Kind {
    allowed: "a power of two from 1 to 2^127",
    read: |value| number(value).filter(|&x| (1.0..=2f64.powi(127)).contains(&x) && x.to_bits() << 12 == 0),
};

/// A number in [0, 1).
pub(super) const BETA: Kind<f64> = Kind {
    allowed: "a number of at least 0 and below 1",
    read: |value| number(value).filter(|x| (0.0..1.0).contains(x)),
};

/// A number in (0, 1].
pub(super) const FACTOR: Kind<f64> = Kind {
    allowed: "a number above 0 and at most 1",
    read: |value| number(value).filter(|&x| x > 0.0 && x <= 1.0),
};

/// A number in [0, 1].
pub(super) const SHARE: Kind<f64> = Kind {
    allowed: "a number of at least 0 and at most 1",
    read: |value| number(value).filter(|x| (0.0..=1.0).contains(x)),
};

/// Any finite number.
pub(super) const NUMBER: Kind<f64> = Kind { allowed: "a finite number", read: number };

/// Two numbers in [0, 1).
pub(super) const BETAS: Kind<[f64; 2]> = Kind {
    allowed: "two numbers of at least 0 and below 1, such as [0.9, 0.95]",
    read: |value| pair(value, BETA.read),
};

/// Two numbers of at least 0.
pub(super) const NON_NEGATIVES: Kind<[f64; 2]> = Kind {
    allowed: "two finite numbers of at least 0, such as [1e-30, 1e-3]",
    read: |value| pair(value, NON_NEGATIVE.read),
};

/// A boolean.
pub(super) const BOOL: Kind<bool> = Kind { allowed: "true or false", read: Value::as_bool };

/// A string that is not empty.
pub(super) const TEXT: Kind<String> = Kind { allowed: "a string that is not empty", read: text };

/// A name that is also used as a label of metrics and as a part of metric names.
pub(super) const NAME: Kind<String> = Kind {
    allowed: "a name of at most 64 letters, digits, '-', '_' and '.'",
    read: |value| {
        let is_plain = |text: &String| text.len() <= 64 && text.chars().all(is_name_char);
        text(value).filter(is_plain)
    },
};

/// A list of strings that are not empty.
pub(super) const TEXTS: Kind<Vec<String>> =
    Kind { allowed: "a list of strings that are not empty", read: |value| list(value, text) };

/// A list of at least one string.
pub(super) const SOME_TEXTS: Kind<Vec<String>> = Kind {
    allowed: "a list of at least one string, none of them empty",
    read: |value| list(value, text).filter(|items| !items.is_empty()),
};

/// One string or a list of at least one.
pub(super) const PATHS: Kind<Vec<String>> = Kind {
    allowed: "a string or a list of strings, none of them empty",
    read: |value| (SOME_TEXTS.read)(value).or_else(|| text(value).map(|path| vec![path])),
};

fn is_name_char(character: char) -> bool {
    character.is_ascii_alphanumeric() || "-_.".contains(character)
}

fn count<T: TryFrom<i64>>(value: &Value) -> Option<T> {
    value.as_integer().and_then(|n| T::try_from(n).ok())
}

fn size(value: &Value) -> Option<usize> {
    count::<u32>(value).and_then(|n| usize::try_from(n).ok())
}

/// Integers count as numbers, so a gradient clip of 1 need not be written as `1.0`.
#[expect(clippy::cast_precision_loss, reason = "hyperparameters are far below 2^53")]
fn number(value: &Value) -> Option<f64> {
    let number = value.as_float().or_else(|| value.as_integer().map(|n| n as f64))?;
    number.is_finite().then_some(number)
}

fn pair(value: &Value, read: fn(&Value) -> Option<f64>) -> Option<[f64; 2]> {
    let items = list(value, read)?;
    <[f64; 2]>::try_from(items).ok()
}

fn list<T>(value: &Value, read: fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(read).collect()
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}
