//! Rotary positions, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

use fsdp_train::audit::{Between, Setting, number};
use serde_json::{Value, json};

use super::{Keys, Stated, with};
use crate::run_setup::Model;

/// Bases in the families.
const THETAS: [f64; 7] = [1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7];

/// Factors by which positions are scaled.
const FACTORS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

pub(super) fn settings(stated: &Stated) -> Vec<Setting<Model>> {
    let mut found = Vec::new();
    found.extend(unscaled(stated));
    found.extend(base(stated));
    found.extend(factor(stated));
    found
}

/// The object with the kind of positions, and its key.
fn object(stated: &Stated) -> Option<(&'static str, &Keys)> {
    let of = |key: &'static str| Some((key, stated.keys.get(key)?.as_object()?));
    of("rope_scaling").or_else(|| of("rope_parameters"))
}

/// The kind of scaling; `None` without one.
fn kind(rope: &Keys) -> Option<&str> {
    let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
    kind.filter(|kind| *kind != "default")
}

/// Scaling is forgotten.
fn unscaled(stated: &Stated) -> Option<Setting<Model>> {
    let (key, rope) = object(stated)?;
    kind(rope)?;
    let plain = match key {
        "rope_scaling" => Value::Null,
        _ => json!({ "rope_type": "default", "rope_theta": rope.get("rope_theta") }),
    };
    let text = "rotary positions are not scaled, though config.json says so".to_owned();
    stated.one(text, stated.with(key, plain))
}

/// Another base.
fn base(stated: &Stated) -> Option<Setting<Model>> {
    let nested = stated.keys.get("rope_parameters").and_then(Value::as_object);
    let theta = nested.and_then(|rope| rope.get("rope_theta")).or_else(|| stated.keys.get("rope_theta"));
    let theta = theta.and_then(Value::as_f64)?;
    Some(stated.sized(Some(theta), THETAS, Between::Logarithmic, move |stated, other| {
        let nested = stated.keys.get("rope_parameters").and_then(Value::as_object);
        let keys = match nested.filter(|rope| rope.contains_key("rope_theta")) {
            Some(rope) => {
                stated.with("rope_parameters", Value::Object(with(rope, "rope_theta", json!(other))))
            }
            None => stated.with("rope_theta", json!(other)),
        };
        let [other, theta] = [other, theta].map(number);
        (format!("rotary positions have the base {other}, config.json says {theta}"), keys)
    }))
}

/// Another factor of scaling; without scaling, linear scaling.
fn factor(stated: &Stated) -> Option<Setting<Model>> {
    let rope = object(stated);
    let is_rotary = rope.is_some() || stated.keys.contains_key("rope_theta");
    let scaled = rope.and_then(|(_, rope)| Some((kind(rope)?, rope.get("factor")?.as_f64()?)));
    let (kind, given) = scaled.unwrap_or(("linear", 1.0));
    let (kind, is_scaled) = (kind.to_owned(), scaled.is_some());
    // Of kinds that need more than a factor, one that has none is not known.
    let is_known = is_scaled || rope.is_none_or(|(_, rope)| self::kind(rope).is_none());
    (is_rotary && is_known).then(|| {
        stated.sized(Some(given), FACTORS, Between::Logarithmic, move |stated, other| {
            let (key, rope) =
                object(stated).map_or(("rope_scaling", Keys::new()), |(key, rope)| (key, rope.clone()));
            let key_of_kind = if rope.contains_key("type") { "type" } else { "rope_type" };
            let rope = with(&with(&rope, key_of_kind, json!(kind)), "factor", json!(other));
            let says = match is_scaled {
                true => format!("config.json says {}", number(given)),
                false => "config.json has no scaling".to_owned(),
            };
            let text = format!("rotary positions are scaled ({kind}) by {}, {says}", number(other));
            (text, stated.with(key, Value::Object(rope)))
        })
    })
}
