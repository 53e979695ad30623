//! Dropout, in the places that the families have.

use fsdp_core::DType;
use fsdp_nn::hf::HfConfig;
use fsdp_train::adapter;
use fsdp_train::audit::{Between, Setting, Variant};
use serde_json::{Value, json};

use super::stated::{Stated, with};
use crate::error::CliError;
use crate::run_setup::{Model, RunSetup};

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

/// The same without dropout, whose masks nobody can draw again.
pub(in crate::audit) fn without_dropout(mut setup: RunSetup) -> Result<RunSetup, CliError> {
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

/// Dropout in each place, and in all of them.
pub(super) fn settings(stated: &Stated) -> Vec<Setting<Model>> {
    let keys: Vec<&'static str> = DROPOUTS.into_iter().filter(|key| stated.keys.contains_key(*key)).collect();
    let mut places: Vec<Vec<&'static str>> = keys.iter().map(|key| vec![*key]).collect();
    if keys.len() > 1 {
        places.push(keys);
    }
    let of_keys = |keys: Vec<&'static str>| {
        let stated = stated.clone();
        random(move |rate| {
            let config = keys.iter().fold(stated.keys.clone(), |config, key| with(&config, key, json!(rate)));
            let text = format!("dropout is active ({})", keys.join(", "));
            Some(Variant { text, factor: None, architecture: stated.built(config)? })
        })
    };
    let of_adapter = || {
        let setup = stated.setup.clone();
        random(move |rate| {
            let mut config = setup.config.clone();
            config.adapter.as_mut()?.dropout = rate;
            let architecture = adapter::adapt(&config, setup.model.build().ok()?).ok()?;
            Some(Variant { text: "dropout of the adapters is active".to_owned(), factor: None, architecture })
        })
    };
    let adapters = stated.setup.config.adapter.iter().map(|_| of_adapter());
    places.into_iter().map(of_keys).chain(adapters).collect()
}

fn random(model: impl Fn(f64) -> Option<Variant<Model>> + Send + Sync + 'static) -> Setting<Model> {
    let (stated, sizes, between) = (None, Vec::new(), Between::Nothing);
    Setting { stated, sizes, between, is_random: true, model: Box::new(model) }
}
