//! Functions of the model: activations, norms, caps of logits, experts.

use fsdp_train::audit::{Between, Setting, number};
use serde_json::{Value, json};

use super::stated::{Stated, one};
use crate::run_setup::Model;

/// Epsilons of norms.
const EPSILONS: [f64; 6] = [1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2];

/// Activations of MLPs that are mistaken for each other.
const ACTIVATIONS: [&str; 4] = ["silu", "gelu", "gelu_pytorch_tanh", "relu"];

pub(super) fn settings(stated: &Stated) -> Vec<Setting<Model>> {
    let mut found = Vec::new();
    activations(stated, &mut found);
    caps(stated, &mut found);
    for key in ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"] {
        // Far below the squares that it is added to, an epsilon moves the gradient evenly.
        found.extend(number_of(stated, key, EPSILONS, Between::Linear));
    }
    if let Some(value) = stated.number("query_pre_attn_scalar") {
        let sizes = [0.125, 0.25, 0.5, 2.0, 4.0, 8.0].map(|factor| factor * value);
        found.extend(number_of(stated, "query_pre_attn_scalar", sizes, Between::Logarithmic));
    }
    experts(stated, &mut found);
    let text = "the embedding's row of the padding token is trained like the others".to_owned();
    let has_row = stated.number("pad_token_id").is_some();
    let model = stated.of_model(&stated.setup.model.without_padding_row()).filter(|_| has_row);
    found.extend(model.map(|model| one(text, model)));
    found
}

/// Another value of a number.
pub(super) fn number_of(
    stated: &Stated,
    key: &'static str,
    sizes: impl IntoIterator<Item = f64>,
    between: Between,
) -> Option<Setting<Model>> {
    let value = stated.number(key).filter(|value| *value > 0.0)?;
    Some(stated.sized(Some(value), sizes, between, move |stated, other| {
        let text =
            format!("the model computes with {key} = {}, config.json says {}", number(other), number(value));
        (text, stated.with(key, json!(other)))
    }))
}

fn activations(stated: &Stated, found: &mut Vec<Setting<Model>>) {
    for key in ["hidden_act", "activation_function", "hidden_activation"] {
        let Some(value) = stated.keys.get(key).and_then(Value::as_str) else { continue };
        for other in ACTIVATIONS.into_iter().filter(|other| *other != value) {
            let text = format!("the model computes with {key} = \"{other}\", config.json says \"{value}\"");
            found.extend(stated.one(text, stated.with(key, json!(other))));
        }
    }
}

/// Caps of logits that are ignored, or others.
fn caps(stated: &Stated, found: &mut Vec<Setting<Model>>) {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        let Some(value) = stated.number(key) else { continue };
        let text = format!("logits are not capped, though config.json has {key}");
        found.extend(stated.one(text, stated.with(key, Value::Null)));
        let sizes = [0.25, 0.5, 2.0, 4.0].map(|factor| factor * value);
        found.extend(number_of(stated, key, sizes, Between::Logarithmic));
    }
}

fn experts(stated: &Stated, found: &mut Vec<Setting<Model>>) {
    if let Some(count) = stated.keys.get("num_experts_per_tok").and_then(Value::as_u64) {
        for other in [count.saturating_sub(1), count + 1].into_iter().filter(|other| *other > 0) {
            let text = format!("each token goes to {other} experts, config.json says {count}");
            found.extend(stated.one(text, stated.with("num_experts_per_tok", json!(other))));
        }
    }
    if let Some(value) = stated.keys.get("norm_topk_prob").and_then(Value::as_bool) {
        let text = format!("the model computes with norm_topk_prob = {}, config.json says {value}", !value);
        found.extend(stated.one(text, stated.with("norm_topk_prob", json!(!value))));
    }
}
