//! Parses the keys of rotary positions, in the spellings of transformers 4 and 5.

use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::limits::ROWS_MAX;
use crate::model::{RopeConfig, RopeScaling, Yarn};

/// The keys of `rope_parameters` that all families know. Others, such as sections of several kinds of positions, are refused.
const KEYS: [&str; 16] = [
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
];

/// The growth of the base within the positions a model was made for (HunYuan).
pub(super) const ALPHA: &str = "alpha";

/// The keys and defaults of a family's rotary positions.
pub(super) struct Rotary {
    /// The older, outer key of `rope_theta`, and the default.
    pub(super) theta: (&'static str, f64),
    /// The older, outer key of `partial_rotary_factor`, and the default. `None` if whole heads rotate.
    pub(super) partial: Option<(&'static str, f64)>,
    /// Further keys of `rope_parameters`: `alpha` of `dynamic` (HunYuan), or sections of several kinds of positions, which
    /// are equal for text (Qwen 3.5).
    pub(super) more: &'static [&'static str],
    /// Default of `original_max_position_embeddings`. Set only for Phi 3, which supports only LongRoPE and also has
    /// other names for it.
    pub(super) phi3_original: Option<usize>,
}

/// Settings outside of the rotary keys that frequencies depend on.
pub(super) struct Heads {
    /// Elements per head.
    pub(super) dim: usize,
    /// `max_position_embeddings`.
    pub(super) positions: usize,
}

/// Parses `rope_scaling` or, if that is absent, `rope_parameters`, together with the outer keys of older versions.
pub(super) fn parse(keys: Keys<'_>, family: &Rotary, heads: &Heads) -> Result<RopeConfig, ConfigError> {
    let rope = match keys.object("rope_scaling")? {
        Some(rope) => rope,
        None => keys.object("rope_parameters")?.unwrap_or(keys.absent("rope_parameters")),
    };
    parse_object(keys, rope, family, heads)
}

/// Parses an object of rotary positions, together with the outer keys of older versions.
pub(super) fn parse_object(
    keys: Keys<'_>,
    rope: Keys<'_>,
    family: &Rotary,
    heads: &Heads,
) -> Result<RopeConfig, ConfigError> {
    rope.only_known(&[&KEYS, family.more].concat())?;
    let (legacy_key, default) = family.theta;
    let theta = rope.positive("rope_theta", keys.positive(legacy_key, default)?)?;
    let partial = partial(keys, rope, family, heads.dim)?;
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = rope.text(key)?.unwrap_or("default");
    let kind =
        if family.phi3_original.is_some() && (kind == "su" || kind == "yarn") { "longrope" } else { kind };
    let original = match keys.size(&["original_max_position_embeddings"], ROWS_MAX)?.or(family.phi3_original)
    {
        Some(original) => original,
        None => rope.size(&["original_max_position_embeddings"], ROWS_MAX)?.unwrap_or(heads.positions),
    };
    let scaling = match (kind, family.phi3_original) {
        ("default", _) => RopeScaling::Default,
        ("longrope", _) => longrope(rope, heads, original, (heads.dim as f64 * partial) as usize / 2)?,
        ("linear", None) => RopeScaling::Linear { factor: factor(rope)? },
        ("dynamic", None) => RopeScaling::Dynamic {
            factor: factor(rope)?,
            positions: heads.positions,
            alpha: if family.more.contains(&ALPHA) { rope.positive(ALPHA, 1.0)? } else { 1.0 },
        },
        ("llama3", None) => RopeScaling::Llama3 {
            factor: factor(rope)?,
            low: required(rope, "low_freq_factor")?,
            high: required(rope, "high_freq_factor")?,
            original,
        },
        ("yarn", None) => RopeScaling::Yarn(yarn(rope, heads, original)?),
        (_, None) => return Err(rope.unsupported(key, KINDS)),
        (_, Some(_)) => return Err(rope.unsupported(key, "\"default\" and \"longrope\"")),
    };
    Ok(RopeConfig { theta, partial, scaling })
}

/// Returns `rope_parameters` of a family that has an object for each layer type there.
pub(super) fn by_type(keys: Keys<'_>) -> Result<Keys<'_>, ConfigError> {
    let both = keys.object("rope_parameters")?.unwrap_or(keys.absent("rope_parameters"));
    both.only_known(&["full_attention", "sliding_attention"])?;
    Ok(both)
}

const KINDS: &str = "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" and \"longrope\"";

/// Parses the fraction of a head that rotates.
fn partial(keys: Keys<'_>, rope: Keys<'_>, family: &Rotary, head_dim: usize) -> Result<f64, ConfigError> {
    let (legacy_key, default) = family.partial.unwrap_or(("partial_rotary_factor", 1.0));
    let inner = "partial_rotary_factor";
    if family.partial.is_none() && rope.get(inner).is_none() {
        keys.only(inner, "1", |part| part.as_f64() == Some(1.0))?;
    }
    let (holder, key) = if rope.get(inner).is_some() { (rope, inner) } else { (keys, legacy_key) };
    let partial = holder.number(key, default, "above 0 and at most 1", |part| part > 0.0 && part <= 1.0)?;
    if partial < 1.0 && family.partial.is_none() {
        return Err(holder.unsupported(key, "1"));
    }
    let rotary = (head_dim as f64 * partial) as usize;
    if rotary == 0 || !rotary.is_multiple_of(2) {
        return Err(holder
            .wrong(key, "a fraction of a head with an even number of elements, as they rotate in pairs"));
    }
    Ok(partial)
}

fn required(rope: Keys<'_>, key: &'static str) -> Result<f64, ConfigError> {
    rope.get(key).ok_or_else(|| ConfigError::Missing { key: rope.path(key) })?;
    rope.positive(key, 1.0)
}

/// Parses `factor`, which must be there.
pub(super) fn factor(rope: Keys<'_>) -> Result<f64, ConfigError> {
    required(rope, "factor")
}

/// Parses `factor`; the default is the ratio of the positions to the original ones.
fn factor_of(rope: Keys<'_>, heads: &Heads, original: usize) -> Result<f64, ConfigError> {
    rope.positive("factor", heads.positions as f64 / original as f64)
}

fn yarn(rope: Keys<'_>, heads: &Heads, original: usize) -> Result<Yarn, ConfigError> {
    let factor = factor_of(rope, heads, original)?;
    // As in transformers, 0 is the same as absent.
    let nonzero = |key| {
        let number = rope.optional_number(key, "a non-negative number", |number| number >= 0.0)?;
        Ok(number.filter(|&number| number > 0.0))
    };
    let scale = |multiplier: f64| if factor <= 1.0 { 1.0 } else { 0.1 * multiplier * factor.ln() + 1.0 };
    let inferred = match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(numerator), Some(denominator)) => scale(numerator) / scale(denominator),
        _ => scale(1.0),
    };
    Ok(Yarn {
        factor,
        beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
        beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
        original,
        truncate: rope.flag("truncate", true)?,
        attention_factor: rope.positive("attention_factor", inferred)?,
    })
}

fn longrope(
    rope: Keys<'_>,
    heads: &Heads,
    original: usize,
    pairs: usize,
) -> Result<RopeScaling, ConfigError> {
    let factor = factor_of(rope, heads, original)?;
    let inferred = match factor > 1.0 && original > 1 {
        true => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        false => 1.0,
    };
    Ok(RopeScaling::LongRope {
        short: rope.positive_numbers("short_factor", pairs)?,
        long: rope.positive_numbers("long_factor", pairs)?,
        original,
        attention_factor: rope.positive("attention_factor", inferred)?,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use crate::hf::families::{llama, phi3};
    use crate::hf::keys::Keys;

    /// Different implementations of the power function may differ in the last bits of single precision.
    const BAND: f64 = 1e-6;

    #[test]
    fn rope_frequencies_match_transformers() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/ropes.json");
        let cases: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        for case in cases.as_array().unwrap() {
            let keys = Keys::new(case["config"].as_object().unwrap(), None);
            let parse = if case["config"]["model_type"] == "phi3" { phi3::parse } else { llama::parse };
            let config = parse(keys).unwrap_or_else(|error| panic!("{error}: {case}"));
            let seq = case["seq"].as_u64().unwrap() as usize;
            let rope = config.layers[0].rope.as_ref().unwrap().rope(config.head_dim, seq);
            let expected = case["inverse_frequencies"].as_array().unwrap();
            assert_eq!(rope.inverse_frequencies.len(), expected.len(), "{case}");
            for (got, expected) in rope.inverse_frequencies.iter().zip(expected) {
                let expected = expected.as_f64().unwrap();
                let difference = (f64::from(*got) - expected).abs() / expected;
                assert!(difference <= BAND, "{got} is off by {difference:e} in {case}");
            }
            let factor = case["factor"].as_f64().unwrap();
            assert!((rope.factor - factor).abs() <= 1e-12, "{} in {case}", rope.factor);
        }
    }
}
