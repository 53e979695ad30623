//! The model as it should be, and models made of other keys of its `config.json`.

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_nn::hf::HfConfig;
use fsdp_train::adapter;
use fsdp_train::audit::{Between, Setting, Variant};
use serde_json::{Map, Value};

use crate::run_setup::{Model, RunSetup};

/// Keys of a `config.json`.
pub(super) type Keys = Map<String, Value>;

/// The model as it should be.
#[derive(Clone)]
pub(in crate::audit) struct Stated {
    pub(super) setup: Arc<RunSetup>,
    pub(super) keys: Keys,
}

impl Stated {
    pub(in crate::audit) fn of(setup: &RunSetup) -> Self {
        let keys = match serde_json::from_str(&setup.model.export(DType::F32)) {
            Ok(Value::Object(keys)) => keys,
            _ => Map::new(),
        };
        Self { setup: Arc::new(setup.clone()), keys }
    }

    /// The model of other keys; `None` if there is none.
    pub(super) fn built(&self, keys: Keys) -> Option<Model> {
        self.of_model(&HfConfig::parse(&Value::Object(keys).to_string()).ok()?)
    }

    /// Another model, with the adapters of the run file.
    pub(super) fn of_model(&self, model: &HfConfig) -> Option<Model> {
        adapter::adapt(&self.setup.config, model.build().ok()?).ok()
    }

    /// The keys with one changed.
    pub(super) fn with(&self, key: &str, value: Value) -> Keys {
        with(&self.keys, key, value)
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.keys.get(key).and_then(Value::as_f64)
    }

    /// A setting without a size.
    pub(super) fn one(&self, text: String, keys: Keys) -> Option<Setting<Model>> {
        Some(one(text, self.built(keys)?))
    }

    /// A setting with sizes, from the text and the keys for one.
    pub(super) fn sized(
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
pub(super) fn with(keys: &Keys, key: &str, value: Value) -> Keys {
    let mut keys = keys.clone();
    keys.insert(key.to_owned(), value);
    keys
}

/// A model as the only one of its setting.
pub(super) fn one(text: String, architecture: Model) -> Setting<Model> {
    let variant = Variant { text, factor: None, architecture };
    let model = Box::new(move |_| Some(variant.clone()));
    Setting { stated: None, sizes: vec![1.0], between: Between::Nothing, is_random: false, model }
}
