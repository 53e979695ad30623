//! Parses the keys of linear attention beside attention with gates: Qwen 3 Next and its relatives.

use super::decoder::{self, Defaults};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::{Keys, divides};
use crate::hf::limits::{INNER_MAX, WIDTH_MAX};
use crate::model::{DecoderConfig, DeltaNet, Mixture, Names, NormKind, QkNorm, SharedExpert};

/// The defaults that the families share.
pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(256),
    positions: 32768,
    rotary: Rotary { partial: Some(("partial_rotary_factor", 0.25)), ..Defaults::LLAMA.rotary },
    ..Defaults::LLAMA
};

/// Parses everything but mixtures; `by_head` says whether the projections of linear attention are packed by head.
pub(super) fn parse(
    keys: Keys<'_>,
    names: Names,
    defaults: &Defaults,
    by_head: bool,
) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qk_norm: Some(QkNorm::Heads),
        norm: NormKind::CentredRms,
        attention_gate: true,
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, names, defaults)?
    };
    // It is the activation of the convolution, too.
    keys.only("hidden_act", "\"silu\"", |name| name == "silu")?;
    let net = net(keys, by_head)?;
    let is_linear = linear_layers(keys, config.layers.len())?;
    for (layer, is_linear) in config.layers.iter_mut().zip(is_linear) {
        layer.delta = is_linear.then_some(net);
    }
    Ok(config)
}

fn net(keys: Keys<'_>, by_head: bool) -> Result<DeltaNet, ConfigError> {
    let size = |key, absent| Ok(keys.size(&[key], WIDTH_MAX)?.unwrap_or(absent));
    let (of_keys, of_values) = ("linear_num_key_heads", "linear_num_value_heads");
    let net = DeltaNet {
        key_heads: size(of_keys, 16)?,
        value_heads: size(of_values, 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
        by_head,
    };
    divides((of_values, net.value_heads), (of_keys, net.key_heads))?;
    let widths = [net.key_heads.checked_mul(net.key_dim), net.value_heads.checked_mul(net.value_dim)];
    if widths.iter().any(|width| width.is_none_or(|width| width > WIDTH_MAX)) {
        let key = format!("{of_keys} * linear_key_head_dim, {of_values} * linear_value_head_dim");
        return Err(ConfigError::TooLarge { key, value: format!("{widths:?}"), limit: WIDTH_MAX });
    }
    Ok(net)
}

/// Returns, for each layer, whether it has linear attention: as `layer_types` lists, or all but every
/// `full_attention_interval`-th.
fn linear_layers(keys: Keys<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
    let key = "layer_types";
    let interval = keys.size(&["full_attention_interval"], usize::MAX)?.unwrap_or(4);
    let Some(types) = keys.get(key) else {
        return Ok((1..=count).map(|number| !number.is_multiple_of(interval)).collect());
    };
    let types = types.as_array().filter(|types| types.len() == count);
    let types = types.ok_or_else(|| keys.wrong(key, "a list with the type of each layer"))?;
    let is_linear = types.iter().map(|kind| match kind.as_str() {
        Some("linear_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    });
    let supported = "\"linear_attention\" and \"full_attention\"";
    is_linear.collect::<Option<_>>().ok_or_else(|| keys.unsupported(key, supported))
}

/// Parses mixtures beside a shared expert with a weight.
pub(super) fn mixture(
    keys: Keys<'_>,
    experts: [usize; 2],
    is_normalized: bool,
) -> Result<Mixture, ConfigError> {
    let inner = |key| Ok(keys.size(&[key], INNER_MAX)?.unwrap_or(512));
    let shared = SharedExpert { inner: inner("shared_expert_intermediate_size")?, is_weighed: true };
    let routed = inner("moe_intermediate_size")?;
    let experts = decoder::experts(keys, experts)?;
    Ok(Mixture { shared: Some(shared), ..Mixture::softmax(experts, routed, is_normalized) })
}
