//! Phi 3, 3.5 and 4: packed projections, residual dropout, LongRoPE, partial rotation of heads.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    base_class: "Phi3Model",
    about: "Phi 3, 3.5 and 4: packed projections, LongRoPE (also called `su` and `yarn` here), a part of each head rotates.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "Phi3",
    qkv: &["qkv_proj"],
    output_is_first: true,
    gate_up: &["gate_up_proj"],
    ..Names::LLAMA
};
const DEFAULTS: Defaults = Defaults {
    eps: (decoder::RMS_EPS, 1e-5),
    positions: 4096,
    padding: Some((decoder::PAD_TOKEN, Some(32_000))),
    rotary: Rotary {
        partial: Some(("partial_rotary_factor", 1.0)),
        phi3_original: Some(4096),
        ..Defaults::LLAMA.rotary
    },
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    let mut config = DecoderConfig {
        residual_dropout: keys.probability("resid_pdrop", 0.0)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let window = decoder::window(keys, None)?;
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
