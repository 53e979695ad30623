//! Rotary positions, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

use fsdp_train::audit::{Between, Setting, number};
use serde_json::{Value, json};

use super::functions::number_of;
use super::stated::{Keys, Stated, with};
use crate::run_setup::Model;

/// Bases in the families.
const THETAS: [f64; 7] = [1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7];

/// Factors by which positions are scaled.
const FACTORS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

pub(super) fn settings(stated: &Stated) -> Vec<Setting<Model>> {
    let mut found = Vec::new();
    for place in places(stated) {
        found.extend(unscaled(stated, &place));
        found.extend(base(stated, &place));
        found.extend(factors(stated, &place));
    }
    let local = "rope_local_base_freq";
    found.extend(number_of(stated, local, THETAS, Between::Logarithmic));
    found
}

/// Where the rotary positions of some layers are described: that of all, or of those of one kind.
#[derive(Clone)]
struct Place {
    /// Of an object with parts for kinds of layers, the part.
    kind: Option<String>,
}

/// The object that may have parts for kinds of layers.
const PARAMETERS: &str = "rope_parameters";

fn places(stated: &Stated) -> Vec<Place> {
    let parameters = stated.keys.get(PARAMETERS).and_then(Value::as_object);
    let kinds = parameters.into_iter().flatten().filter(|(_, part)| part.is_object());
    let kinds: Vec<Place> = kinds.map(|(kind, _)| Place { kind: Some(kind.clone()) }).collect();
    if kinds.is_empty() { vec![Place { kind: None }] } else { kinds }
}

impl Place {
    /// The object with the kind of positions, and its key.
    fn object<'s>(&self, stated: &'s Stated) -> Option<(&'static str, &'s Keys)> {
        let of = |key: &'static str| Some((key, stated.keys.get(key)?.as_object()?));
        match &self.kind {
            Some(kind) => {
                let (key, kinds) = of(PARAMETERS)?;
                Some((key, kinds.get(kind)?.as_object()?))
            }
            None => of("rope_scaling").or_else(|| of(PARAMETERS)),
        }
    }

    /// The keys with another object.
    fn with(&self, stated: &Stated, key: &'static str, rope: Value) -> Keys {
        let kinds = stated.keys.get(key).and_then(Value::as_object);
        match (&self.kind, kinds) {
            (Some(kind), Some(kinds)) => stated.with(key, Value::Object(with(kinds, kind, rope))),
            _ => stated.with(key, rope),
        }
    }

    /// What is said of its layers.
    fn positions(&self) -> String {
        let of = self.kind.as_ref().map_or(String::new(), |kind| format!(" of layers with {kind}"));
        format!("rotary positions{of}")
    }
}

/// The kind of scaling; `None` without one.
fn kind(rope: &Keys) -> Option<&str> {
    let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
    kind.filter(|kind| *kind != "default")
}

/// Scaling is forgotten.
fn unscaled(stated: &Stated, place: &Place) -> Option<Setting<Model>> {
    let (key, rope) = place.object(stated)?;
    kind(rope)?;
    let plain = match key {
        PARAMETERS => json!({ "rope_type": "default", "rope_theta": rope.get("rope_theta") }),
        _ => Value::Null,
    };
    let text = format!("{} are not scaled, though config.json says so", place.positions());
    stated.one(text, place.with(stated, key, plain))
}

/// Another base.
fn base(stated: &Stated, place: &Place) -> Option<Setting<Model>> {
    let nested = |stated: &Stated, place: &Place| -> Option<(&'static str, Keys)> {
        let (key, rope) = place.object(stated)?;
        rope.contains_key("rope_theta").then(|| (key, rope.clone()))
    };
    let theta = match nested(stated, place) {
        Some((_, rope)) => rope.get("rope_theta").and_then(Value::as_f64),
        None => stated.number("rope_theta"),
    }?;
    let place = place.clone();
    Some(stated.sized(Some(theta), THETAS, Between::Logarithmic, move |stated, other| {
        let keys = match nested(stated, &place) {
            Some((key, rope)) => {
                place.with(stated, key, Value::Object(with(&rope, "rope_theta", json!(other))))
            }
            None => stated.with("rope_theta", json!(other)),
        };
        let [other, theta] = [other, theta].map(number);
        (format!("{} have the base {other}, config.json says {theta}", place.positions()), keys)
    }))
}

/// Another factor of scaling; without scaling, each kind that a factor alone makes.
fn factors(stated: &Stated, place: &Place) -> Vec<Setting<Model>> {
    let rope = place.object(stated);
    let is_rotary = rope.is_some() || stated.keys.contains_key("rope_theta");
    let kind = rope.and_then(|(_, rope)| self::kind(rope));
    match kind.zip(rope.and_then(|(_, rope)| rope.get("factor")?.as_f64())) {
        Some((kind, given)) => vec![factor(stated, place, kind, Some(given))],
        None if is_rotary && kind.is_none() => {
            ["linear", "yarn"].map(|kind| factor(stated, place, kind, None)).into()
        }
        // Of kinds that need more than a factor, one that has none is not known.
        None => Vec::new(),
    }
}

fn factor(stated: &Stated, place: &Place, kind: &str, given: Option<f64>) -> Setting<Model> {
    let (place, kind) = (place.clone(), kind.to_owned());
    stated.sized(Some(given.unwrap_or(1.0)), FACTORS, Between::Logarithmic, move |stated, other| {
        let (key, rope) =
            place.object(stated).map_or(("rope_scaling", Keys::new()), |(key, rope)| (key, rope.clone()));
        let key_of_kind = if rope.contains_key("type") { "type" } else { "rope_type" };
        let rope = with(&with(&rope, key_of_kind, json!(kind)), "factor", json!(other));
        let says = match given {
            Some(given) => format!("config.json says {}", number(given)),
            None => "config.json has no scaling".to_owned(),
        };
        let text = format!("{} are scaled ({kind}) by {}, {says}", place.positions(), number(other));
        (text, place.with(stated, key, Value::Object(rope)))
    })
}
