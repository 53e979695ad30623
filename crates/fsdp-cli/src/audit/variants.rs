//! Models that a program may have computed by mistake: values that the families of `config.json` are known to have, and
//! settings that are easily lost.

use fsdp_core::DType;
use fsdp_nn::hf::HfConfig;
use fsdp_train::adapter;
use fsdp_train::audit::Variant;
use fsdp_train::config::Resolved;
use serde_json::{Map, Value, json};

use crate::error::CliError;
use crate::run_setup::{Model, RunSetup};

/// Bases of rotary positions in the families.
const THETAS: [f64; 7] = [1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7];

/// Epsilons of norms.
const EPSILONS: [f64; 6] = [1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2];

/// Activations of MLPs that are mistaken for each other.
const ACTIVATIONS: [&str; 5] = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"];

/// Returns the models that build.
pub(super) fn all(setup: &RunSetup) -> Vec<Variant<Model>> {
    let text = setup.model.export(DType::F32);
    let Ok(Value::Object(given)) = serde_json::from_str(&text) else { return Vec::new() };
    let mut variants: Vec<Variant<Model>> = Vec::new();
    let mut add = |text: String, config: Map<String, Value>| {
        let built =
            HfConfig::parse(&Value::Object(config).to_string()).ok().and_then(|model| built(setup, &model));
        variants.extend(built.map(|architecture| Variant {
            text,
            factor: None,
            is_random: false,
            architecture,
        }));
    };
    numbers(&given, &mut add);
    rotary(&given, &mut add);
    dropped(&given, &mut add);
    if let Some(architecture) = built(setup, &setup.model.without_padding_row()) {
        let text = "the embedding's row of the padding token is trained like the others".to_owned();
        variants.push(Variant { text, factor: None, is_random: false, architecture });
    }
    variants.extend(adapters(setup));
    variants.extend(dropouts(setup, &given));
    variants
}

/// Rates of dropout in the families.
const DROPOUTS: [&str; 7] = [
    "attention_dropout",
    "hidden_dropout",
    "residual_dropout",
    "embedding_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
];

/// The rate of dropout that is tried.
const DROPOUT: f64 = 0.1;

/// The same without dropout, whose masks nobody can draw again.
pub(super) fn without_dropout(mut setup: RunSetup) -> Result<RunSetup, CliError> {
    let Ok(Value::Object(mut config)) = serde_json::from_str(&setup.model.export(DType::F32)) else {
        return Ok(setup);
    };
    for (_, rate) in config.iter_mut().filter(|(key, _)| DROPOUTS.contains(&key.as_str())) {
        *rate = json!(0.0);
    }
    let origin = setup.config.model.path.clone();
    setup.model = HfConfig::parse(&Value::Object(config).to_string())
        .map_err(|source| CliError::Model { origin, source })?;
    setup.config.adapter.iter_mut().for_each(|adapter| adapter.dropout = 0.0);
    Ok(setup)
}

/// The model with dropout in one place.
fn dropouts(setup: &RunSetup, given: &Map<String, Value>) -> Vec<Variant<Model>> {
    let of_key = |key: &&str| {
        let config = given.contains_key(*key).then(|| with(given, key, json!(DROPOUT)))?;
        let architecture = built(setup, &HfConfig::parse(&Value::Object(config).to_string()).ok()?)?;
        Some(Variant {
            text: format!("dropout is active ({key})"),
            factor: None,
            is_random: true,
            architecture,
        })
    };
    let of_adapter = || {
        let mut config = setup.config.clone();
        config.adapter.as_mut()?.dropout = DROPOUT;
        let architecture = adapter::adapt(&config, setup.model.build().ok()?).ok()?;
        Some(Variant {
            text: "dropout of the adapters is active".to_owned(),
            factor: None,
            is_random: true,
            architecture,
        })
    };
    DROPOUTS.iter().filter_map(of_key).chain(of_adapter()).collect()
}

fn built(setup: &RunSetup, model: &HfConfig) -> Option<Model> {
    adapter::adapt(&setup.config, model.build().ok()?).ok()
}

/// The model with a key changed.
fn with(given: &Map<String, Value>, key: &str, value: Value) -> Map<String, Value> {
    let mut config = given.clone();
    config.insert(key.to_owned(), value);
    config
}

fn numbers(given: &Map<String, Value>, add: &mut impl FnMut(String, Map<String, Value>)) {
    for key in ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"] {
        let Some(value) = given.get(key).and_then(Value::as_f64) else { continue };
        for other in EPSILONS.into_iter().filter(|other| *other != value) {
            add(
                format!("the model computes with {key} = {other:e}, config.json says {value:e}"),
                with(given, key, json!(other)),
            );
        }
    }
    for key in ["hidden_act", "activation_function", "hidden_activation"] {
        let Some(value) = given.get(key).and_then(Value::as_str) else { continue };
        for other in ACTIVATIONS.into_iter().filter(|other| *other != value) {
            add(
                format!("the model computes with {key} = \"{other}\", config.json says \"{value}\""),
                with(given, key, json!(other)),
            );
        }
    }
    if let Some(count) = given.get("num_experts_per_tok").and_then(Value::as_u64) {
        for other in [count.saturating_sub(1), count + 1].into_iter().filter(|other| *other > 0) {
            add(
                format!("each token goes to {other} experts, config.json says {count}"),
                with(given, "num_experts_per_tok", json!(other)),
            );
        }
    }
    if let Some(value) = given.get("norm_topk_prob").and_then(Value::as_bool) {
        add(
            format!("the model computes with norm_topk_prob = {}, config.json says {value}", !value),
            with(given, "norm_topk_prob", json!(!value)),
        );
    }
}

/// Rotary positions, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
fn rotary(given: &Map<String, Value>, add: &mut impl FnMut(String, Map<String, Value>)) {
    let nested = given.get("rope_parameters").and_then(Value::as_object);
    let theta = nested.and_then(|rope| rope.get("rope_theta")).or_else(|| given.get("rope_theta"));
    if let Some(theta) = theta.and_then(Value::as_f64) {
        for other in THETAS.into_iter().filter(|other| *other != theta) {
            let config = match nested {
                Some(rope) => {
                    with(given, "rope_parameters", Value::Object(with(rope, "rope_theta", json!(other))))
                }
                None => with(given, "rope_theta", json!(other)),
            };
            add(format!("rotary positions have the base {other}, config.json says {theta}"), config);
        }
    }
    let kind = nested.and_then(|rope| rope.get("rope_type")).and_then(Value::as_str);
    let text = || "rotary positions are not scaled, though config.json says so".to_owned();
    if let (Some(rope), Some(kind)) = (nested, kind)
        && kind != "default"
    {
        let plain = json!({ "rope_type": "default", "rope_theta": rope.get("rope_theta") });
        add(text(), with(given, "rope_parameters", plain));
    }
    if given.get("rope_scaling").is_some_and(Value::is_object) {
        add(text(), with(given, "rope_scaling", Value::Null));
    }
}

/// Settings that a program may not follow.
fn dropped(given: &Map<String, Value>, add: &mut impl FnMut(String, Map<String, Value>)) {
    if given.get("sliding_window").is_some_and(Value::is_number) {
        let mut config = with(given, "sliding_window", Value::Null);
        config.remove("layer_types");
        config.insert("use_sliding_window".to_owned(), json!(false));
        add("attention has no sliding window, though config.json has one".to_owned(), config);
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if given.get(key).is_some_and(Value::is_number) {
            add(
                format!("logits are not capped, though config.json has {key}"),
                with(given, key, Value::Null),
            );
        }
    }
}

/// Adapters with another scale.
fn adapters(setup: &RunSetup) -> Vec<Variant<Model>> {
    let Some(adapter) = &setup.config.adapter else { return Vec::new() };
    let scale = |alpha: f64, rslora: bool| {
        alpha / if rslora { (adapter.rank as f64).sqrt() } else { adapter.rank as f64 }
    };
    let given = scale(adapter.alpha, adapter.rslora);
    let rank = adapter.rank as f64;
    let mut scales: Vec<f64> = [1.0, 2.0, rank, 1.0 / rank]
        .into_iter()
        .chain([8.0, 16.0, 32.0, 64.0].map(|alpha| alpha / rank))
        .chain([
            scale(adapter.alpha, !adapter.rslora),
            adapter.alpha,
            given * 2.0,
            given / 2.0,
            given * given,
        ])
        .filter(|scale| (scale - given).abs() > 1e-9 * given)
        .collect();
    scales.sort_by(f64::total_cmp);
    scales.dedup_by(|left, right| (*left - *right).abs() <= 1e-9 * *right);
    let variant = |scale: f64| {
        let mut config: Resolved = setup.config.clone();
        let adapter = config.adapter.as_mut()?;
        (adapter.alpha, adapter.rslora) = (scale * rank, false);
        let architecture = adapter::adapt(&config, setup.model.build().ok()?).ok()?;
        let text = format!("adapters are scaled by {scale}, the run file says {given}");
        Some(Variant { text, factor: Some(scale / given), is_random: false, architecture })
    };
    scales.into_iter().filter_map(variant).collect()
}
