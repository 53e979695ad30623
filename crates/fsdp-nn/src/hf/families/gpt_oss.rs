//! gpt-oss: attention with sinks, and mixtures of experts with biases and a clamped gate.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::{self, Heads, Rotary};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Mixture, Names, PackedExperts, RopeConfig, RopeScaling, Yarn};
use crate::op::{CLAMP, Function};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    class: "GptOssForCausalLM",
    base_class: "GptOssModel",
    about: "Every query head has a sink, a score without a value; mixtures of experts in all layers, with biases, a clamped gate \
            and one stack per layer for each kind of weight; every other layer has a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "GptOss", router: "router", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    head_dim: Some(64),
    eps: (decoder::RMS_EPS, 1e-5),
    positions: 131_072,
    rotary: Rotary { theta: ("rope_theta", 150_000.0), ..Defaults::LLAMA.rotary },
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", true)?;
    let mut config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        sinks: true,
        router_loss: decoder::router_loss(keys, 0.001)?,
        ..decoder::parse_rotated(keys, NAMES, &DEFAULTS, |heads| rope(keys, heads))?
    };
    // Transformers ignores the activation and the limit of published files, and has these.
    keys.only("hidden_act", "\"silu\"", |name| name == "silu")?;
    keys.only("swiglu_limit", "7", |limit| limit.as_f64() == Some(CLAMP))?;
    config.activation = Function::ClampedSwish;
    let mixture = Mixture {
        packed: Some(PackedExperts { interleaved: true, bias: true }),
        up_activation: Some(Function::ClampedPlusOne),
        ..Mixture::softmax(decoder::experts(keys, [128, 4])?, config.intermediate_size, true)
    };
    config.layers.iter_mut().for_each(|layer| layer.mixture = Some(mixture));
    config.keep_f32 = &["norm.weight"];
    let window = decoder::window(keys, Some(128))?;
    decoder::set_windows(keys, &mut config, window, |index, _| index.is_multiple_of(2))?;
    Ok(config)
}

/// Parses rotary positions, which are YaRN's if the key is absent.
fn rope(keys: Keys<'_>, heads: &Heads) -> Result<RopeConfig, ConfigError> {
    if keys.get("rope_parameters").is_some() || keys.get("rope_scaling").is_some() {
        return rope::parse(keys, &DEFAULTS.rotary, heads);
    }
    let theta = keys.positive("rope_theta", DEFAULTS.rotary.theta.1)?;
    let factor: f64 = 32.0;
    let yarn = Yarn {
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original: 4096,
        truncate: false,
        attention_factor: 0.1 * factor.ln() + 1.0,
    };
    Ok(RopeConfig { theta, partial: 1.0, scaling: RopeScaling::Yarn(yarn) })
}
