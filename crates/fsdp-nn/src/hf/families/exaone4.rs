//! EXAONE 4: norms as in OLMo 2, of queries and keys per head; windows, and no rotary positions without one.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::olmo2;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "exaone4",
    class: "Exaone4ForCausalLM",
    base_class: "Exaone4Model",
    about: "Norms come after attention and MLP instead of before them; queries and keys have norms per head; three of four layers have a \
            window, and the others no rotary positions (if `sliding_window` is null, all layers have them).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Exaone4", ..olmo2::NAMES };
const DEFAULTS: Defaults = Defaults { kv_heads: Some(32), eps: (decoder::RMS_EPS, 1e-5), ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let base = decoder::parse(keys, NAMES, &DEFAULTS)?;
    let mut config = DecoderConfig { qk_norm: Some(QkNorm::Heads), ..base };
    let window = decoder::window(keys, Some(4096))?;
    // Transformers reads it only without `layer_types`: files have 0 or "LLLG" beside that.
    let pattern = match keys.get("layer_types") {
        Some(_) => None,
        None => keys.size(&["sliding_window_pattern"], usize::MAX)?,
    };
    let pattern = pattern.unwrap_or(4);
    decoder::set_windows(keys, &mut config, window, |index, _| !(index + 1).is_multiple_of(pattern))?;
    for layer in config.layers.iter_mut().filter(|layer| window.is_some() && layer.window.is_none()) {
        layer.rope = None;
    }
    Ok(config)
}
