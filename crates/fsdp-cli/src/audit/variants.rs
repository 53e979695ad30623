//! Models that a program may have computed by mistake: values that the families of `config.json` are known to have, and
//! settings that are easily lost.

mod adapters;
mod dropouts;
mod functions;
mod rotary;
mod windows;

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_nn::hf::HfConfig;
use fsdp_train::adapter;
use fsdp_train::audit::{Between, Setting, Variant};
use serde_json::{Map, Value};

pub(super) use self::dropouts::without_dropout;
use crate::run_setup::{Model, RunSetup};

/// Keys of a `config.json`.
type Keys = Map<String, Value>;

/// The model as it should be.
#[derive(Clone)]
pub(super) struct Stated {
    setup: Arc<RunSetup>,
    keys: Keys,
}

impl Stated {
    pub(super) fn of(setup: &RunSetup) -> Self {
        let keys = match serde_json::from_str(&setup.model.export(DType::F32)) {
            Ok(Value::Object(keys)) => keys,
            _ => Map::new(),
        };
        Self { setup: Arc::new(setup.clone()), keys }
    }

    /// Settings to try for rows of at most so many tokens, the likely ones first.
    pub(super) fn settings(&self, longest: usize) -> Vec<Setting<Model>> {
        let mut settings = rotary::settings(self);
        settings.extend(windows::settings(self, longest));
        settings.extend(functions::settings(self));
        settings.extend(adapters::scale(self));
        settings.extend(dropouts::settings(self));
        settings
    }

    /// The model of other keys; `None` if there is none.
    fn built(&self, keys: Keys) -> Option<Model> {
        self.of_model(&HfConfig::parse(&Value::Object(keys).to_string()).ok()?)
    }

    /// Another model, with the adapters of the run file.
    fn of_model(&self, model: &HfConfig) -> Option<Model> {
        adapter::adapt(&self.setup.config, model.build().ok()?).ok()
    }

    /// The keys with one changed.
    fn with(&self, key: &str, value: Value) -> Keys {
        with(&self.keys, key, value)
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.keys.get(key).and_then(Value::as_f64)
    }

    /// A setting without a size.
    fn one(&self, text: String, keys: Keys) -> Option<Setting<Model>> {
        Some(one(text, self.built(keys)?))
    }

    /// A setting with sizes, from the text and the keys for one.
    fn sized(
        &self,
        stated: Option<f64>,
        sizes: impl IntoIterator<Item = f64>,
        between: Between,
        change: impl Fn(&Stated, f64) -> (String, Keys) + Send + Sync + 'static,
    ) -> Setting<Model> {
        let this = self.clone();
        let model = move |size| {
            let (text, keys) = change(&this, size);
            Some(Variant { text, factor: None, architecture: this.built(keys)? })
        };
        let is_other = |size: &f64| stated.is_none_or(|stated| (size - stated).abs() > 1e-9 * stated.abs());
        let sizes = sizes.into_iter().filter(is_other).collect();
        Setting { stated, sizes, between, is_random: false, model: Box::new(model) }
    }
}

/// Keys with one changed.
fn with(keys: &Keys, key: &str, value: Value) -> Keys {
    let mut keys = keys.clone();
    keys.insert(key.to_owned(), value);
    keys
}

/// A model as the only one of its setting.
fn one(text: String, architecture: Model) -> Setting<Model> {
    let variant = Variant { text, factor: None, architecture };
    let model = Box::new(move |_| Some(variant.clone()));
    Setting { stated: None, sizes: vec![1.0], between: Between::Nothing, is_random: false, model }
}
