//! Gemma 2: norms around both halves, caps of scores and logits, scaled embeddings, windows in every other layer.

use std::sync::Arc;

use super::Family;
use super::decoder::{Defaults, ROTARY_TABLES};
use super::{gemma, rope};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::DecoderConfig;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    base_class: "Gemma2Model",
    about: "Norms before and after attention and MLP, whose weights are offsets from one; scores and logits are capped, \
            embeddings scaled; every other layer has a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const DEFAULTS: Defaults = Defaults { positions: 8192, ..gemma::DEFAULTS };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    Ok(DecoderConfig {
        attention_softcap: gemma::cap(keys, "attn_logit_softcapping", Some(50.0))?,
        logit_softcap: gemma::cap(keys, "final_logit_softcapping", Some(30.0))?,
        ..gemma::parse(keys, gemma::names("Gemma2"), &DEFAULTS, 2, |heads| {
            rope::parse(keys, &DEFAULTS.rotary, heads)
        })?
    })
}
