//! Hugging Face's `fsdp_config.json`, as `Trainer` reads it (reference: transformers 4.31 and 5.23).
//!
//! A leading `fsdp_` is dropped from every top-level key. Keys that Hugging Face silently ignores are reported as a
//! [`Warning`], and so is what was made of a sharding strategy. What it rejects is an error, and so is a size together
//! with classes, where its newer versions silently use the size. Settings of the XLA constructor that only steer XLA's
//! compiler have no meaning here.

mod strategy;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use toml::Table;

pub(super) use self::strategy::Replicas;
use self::strategy::{ReshardAfterForward, Strategy};
use super::error::ConfigError;
use super::kind::TEXT;
use super::reader::{Origin, Reader, unknown_key};
use super::warning::Warning;
use crate::input_file::{self, CONFIG_BYTES_MAX};

/// The keys of `[fsdp]` that set the wrap policy.
const WRAP: [&str; 2] = ["wrap", "min_num_params"];
const CLASSES: &str = "transformer_layer_cls_to_wrap";
const SIZE: &str = "min_num_params";
const STRATEGY: &str = "sharding_strategy";
const RESHARD: &str = "reshard_after_forward";
/// The key of `[fsdp]` that holds the mesh.
const MESH: &str = "mesh";
/// XLA settings that have a counterpart here.
const XLA_SETTINGS: [&str; 4] =
    ["reshard_after_forward", "disable_reshard_on_root", "compute_dtype", "fp32_reduce_scatter"];
/// Settings that only steer XLA.
const XLA_SETTINGS_WITHOUT_MEANING: &[&str] = &[
    "flatten_parameters",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "buffer_dtype",
    "sharding_groups",
    "sharding_rank",
    "sharding_world_size",
    "shard_param_on_dim_0",
    "pin_layout_in_collective_ops",
    "reduce_scatter_bucket_size_mb",
    "coalesce_all_gather_ops",
    "auto_wrap_policy",
    "auto_wrapper_callable",
    "param_init_fn",
];

/// The contents of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FsdpJson {
    /// The settings, as keys of `[fsdp]`.
    keys: Table,
    /// The mesh that a strategy asks for.
    replicas: Option<Replicas>,
    /// Keys that have no effect.
    warnings: Vec<Warning>,
}

/// If `[fsdp]` names such a file, copies its settings into the table. A key of the run file overrides them, with a
/// warning, but only one of the two files may set a wrap policy. Also returns the mesh that is still to be set, whose size
/// is not known before the number of ranks is.
///
/// # Errors
/// If the file cannot be read, is not a JSON object, or breaks a rule; [`ConfigError::Conflict`] if both files set a
/// wrap policy.
pub(super) fn fill_in(
    file: &mut Table,
    origin: &Origin,
) -> Result<(Option<Replicas>, Vec<Warning>), ConfigError> {
    let path = |fsdp: &Reader<'_>| fsdp.optional("config", TEXT);
    let Some(path) = Reader::new(origin, file.clone()).table("fsdp", path)? else {
        return Ok((None, Vec::new()));
    };
    let text = input_file::read_text(Path::new(&path), CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Read { file: path.clone().into(), source })?;
    let FsdpJson { keys, mut replicas, mut warnings } = parse(&text, &path)?;
    let fsdp = file["fsdp"].as_table_mut().expect("a key of it was read");
    let is_wrap = |key: &&str| WRAP.contains(key);
    let written = fsdp.keys().map(String::as_str).find(is_wrap);
    if let (Some(written), Some(_)) = (written, keys.keys().map(String::as_str).find(is_wrap)) {
        let remedy = "the JSON file has a wrap policy of its own; remove one of the two";
        let (first, second) = (format!("fsdp.{written}"), "fsdp.config".to_owned());
        return Err(ConfigError::Conflict { origin: origin.of(&second), first, second, remedy });
    }
    for (key, value) in keys {
        if fsdp.contains_key(&key) {
            warnings.push(Warning::Overridden { key: format!("fsdp.{key}") });
        } else {
            fsdp.insert(key, value);
        }
    }
    if replicas.is_some() && fsdp.contains_key(MESH) {
        replicas = None;
        warnings.push(Warning::Overridden { key: format!("fsdp.{MESH}") });
    }
    Ok((replicas, warnings))
}

/// Parses the text of a file; `origin` names it in errors and warnings.
///
/// # Errors
/// If it is not a JSON object, or breaks a rule.
fn parse(text: &str, origin: &str) -> Result<FsdpJson, ConfigError> {
    let object: Map<String, Value> = serde_json::from_str(text)
        .map_err(|source| ConfigError::Json { origin: origin.to_owned(), source })?;
    let mut file = File { origin, keys: without_prefix(object, origin)?, result: FsdpJson::default() };
    file.wrap()?;
    file.top_level()?;
    file.xla()?;
    for key in std::mem::take(&mut file.keys).into_keys() {
        file.warn_meaningless(key);
    }
    Ok(file.result)
}

fn without_prefix(object: Map<String, Value>, origin: &str) -> Result<BTreeMap<String, Value>, ConfigError> {
    let mut keys = BTreeMap::new();
    for (written, value) in object {
        let key = written.strip_prefix("fsdp_").unwrap_or(&written).to_owned();
        if keys.insert(key.clone(), value).is_some() {
            return Err(ConfigError::Conflict {
                origin: origin.to_owned(),
                first: key.clone(),
                second: format!("fsdp_{key}"),
                remedy: "they are the same key; remove one of the two",
            });
        }
    }
    Ok(keys)
}

/// The keys that are left to read, and the result so far.
struct File<'a> {
    origin: &'a str,
    keys: BTreeMap<String, Value>,
    result: FsdpJson,
}

impl File<'_> {
    fn wrap(&mut self) -> Result<(), ConfigError> {
        let classes =
            self.take(CLASSES, "class names, as a list or separated by commas", classes)?.unwrap_or_default();
        let size = self.take(SIZE, "an integer of at least 0", non_negative_integer)?.unwrap_or(0);
        let [by_class, by_size] = WRAP;
        match (classes.is_empty(), size) {
            (true, 0) => {}
            (false, 0) => self.set(by_class, classes),
            (true, size) => self.set(by_size, size),
            (false, _) => {
                return Err(ConfigError::Conflict {
                    origin: self.origin.to_owned(),
                    first: CLASSES.to_owned(),
                    second: SIZE.to_owned(),
                    remedy: "choose units by class or by size, and remove the other",
                });
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: impl Into<toml::Value>) {
        self.result.keys.insert(key.to_owned(), value.into());
    }

    /// Reads the keys outside of XLA's that have a counterpart.
    fn top_level(&mut self) -> Result<(), ConfigError> {
        self.resharding()?;
        self.set_from_bool(
            "activation_checkpointing",
            "activation_checkpointing",
            ["none".into(), "full".into()],
        )?;
        self.set_from_bool("offload_params", "offload", ["none".into(), "cpu".into()])
    }

    /// Reads the strategy, from either of its keys. If both are there, they must agree: which one counts depends on the
    /// version of FSDP, whose default is not the same in accelerate and in transformers.
    fn resharding(&mut self) -> Result<(), ConfigError> {
        let strategy = self.take(STRATEGY, strategy::ALLOWED, Strategy::read)?;
        let allowed = format!("true, false, {}", strategy::ALLOWED);
        let reshard = self.take(RESHARD, &allowed, ReshardAfterForward::read)?;
        let agree = |strategy: Strategy| match reshard {
            None => true,
            Some(ReshardAfterForward::Is(reshards)) => reshards == strategy.reshards(),
            Some(ReshardAfterForward::Of(other)) => other == strategy,
        };
        if strategy.is_some_and(|strategy| !agree(strategy)) {
            return Err(ConfigError::Conflict {
                origin: self.origin.to_owned(),
                first: STRATEGY.to_owned(),
                second: RESHARD.to_owned(),
                remedy: "they ask for different strategies; remove one of the two",
            });
        }
        let named = match reshard {
            Some(ReshardAfterForward::Of(strategy)) => Some((RESHARD, strategy)),
            _ => strategy.map(|strategy| (STRATEGY, strategy)),
        };
        if let Some((key, strategy)) = named {
            self.result.replicas = strategy.replicas();
            let (file, settings) = (self.origin.to_owned(), strategy.settings());
            self.result.warnings.push(Warning::Strategy { file, key, strategy: strategy.name(), settings });
        }
        let reshards = named.map(|(_, strategy)| strategy.reshards());
        if let Some(reshards) = reshards.or(reshard.map(ReshardAfterForward::reshards)) {
            self.set(RESHARD, if reshards { toml::Value::from("auto") } else { false.into() });
        }
        Ok(())
    }

    /// Reads a boolean that selects one of two values for a key of `[fsdp]`.
    fn set_from_bool(
        &mut self,
        from: &str,
        key: &str,
        [off, on]: [toml::Value; 2],
    ) -> Result<(), ConfigError> {
        if let Some(is_on) = self.take_bool(from)? {
            self.set(key, if is_on { on } else { off });
        }
        Ok(())
    }

    fn xla(&mut self) -> Result<(), ConfigError> {
        let is_xla = self.take_bool("xla")?.unwrap_or(false);
        let grad_ckpt = self.take_bool("xla_fsdp_grad_ckpt")?.unwrap_or(false);
        let object = |value: &Value| value.as_object().cloned();
        let settings = self.take("xla_fsdp_settings", "an object", object)?.unwrap_or_default();
        if !is_xla {
            if grad_ckpt {
                self.warn_needs("xla_fsdp_grad_ckpt", "`xla`: true");
            }
            if !settings.is_empty() {
                self.warn_needs("xla_fsdp_settings", "`xla`: true");
            }
            return Ok(());
        }
        if grad_ckpt {
            self.set("activation_checkpointing", "full");
            if !WRAP.iter().any(|&key| self.result.keys.contains_key(key)) {
                self.warn_needs("xla_fsdp_grad_ckpt", "a wrap policy: the root is not checkpointed");
            }
        }
        self.xla_settings(settings)
    }

    fn xla_settings(&mut self, settings: Map<String, Value>) -> Result<(), ConfigError> {
        let known = [&XLA_SETTINGS, XLA_SETTINGS_WITHOUT_MEANING].concat();
        if let Some(key) = settings.keys().find(|key| !known.contains(&key.as_str())) {
            let dotted = |key: &str| format!("xla_fsdp_settings.{key}");
            return Err(unknown_key(self.origin.to_owned(), key, &known, dotted));
        }
        for (key, value) in settings {
            if XLA_SETTINGS.contains(&key.as_str()) {
                self.keys.insert(format!("xla_fsdp_settings.{key}"), value);
            } else {
                self.warn_meaningless(format!("xla_fsdp_settings.{key}"));
            }
        }
        self.xla_reshard()?;
        self.xla_dtypes()
    }

    fn xla_reshard(&mut self) -> Result<(), ConfigError> {
        let reshard = self.take_bool("xla_fsdp_settings.reshard_after_forward")?;
        let keep_root = self.take_bool("xla_fsdp_settings.disable_reshard_on_root")?;
        if reshard.is_some() || keep_root.is_some() {
            match (reshard.unwrap_or(true), keep_root.unwrap_or(true)) {
                (false, _) => self.set("reshard_after_forward", false),
                (true, true) => self.set("reshard_after_forward", "auto"),
                (true, false) => self.set("reshard_after_forward", true),
            }
        }
        Ok(())
    }

    fn xla_dtypes(&mut self) -> Result<(), ConfigError> {
        let allowed = "\"float32\" or \"bfloat16\" (XLA has no float64, and reduces float16 in float16)";
        let compute = self.take("xla_fsdp_settings.compute_dtype", allowed, compute_dtype)?;
        let in_f32 = self.take_bool("xla_fsdp_settings.fp32_reduce_scatter")?.unwrap_or(false);
        if let Some(dtype) = compute {
            self.set("param_dtype", dtype);
        }
        // As in XLA, gradients are reduced in the compute dtype unless requested otherwise.
        if let Some(dtype) = if in_f32 { Some("f32") } else { compute } {
            self.set("reduce_dtype", dtype);
        }
        Ok(())
    }

    fn take_bool(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.take(key, "true or false", boolean)
    }

    fn take<T>(
        &mut self,
        key: &str,
        allowed: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.keys.remove(key).filter(|value| !value.is_null()) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| ConfigError::Value {
            origin: self.origin.to_owned(),
            key: key.to_owned(),
            value: value.to_string(),
            allowed: allowed.to_owned(),
        })
    }

    fn warn_meaningless(&mut self, key: String) {
        self.result.warnings.push(Warning::Meaningless { file: self.origin.to_owned(), key });
    }

    fn warn_needs(&mut self, key: &'static str, needs: &'static str) {
        self.result.warnings.push(Warning::Needs { file: self.origin.to_owned(), key, needs });
    }
}

/// Reads class names. accelerate splits a text at its commas, and passes a list through the same text.
fn classes(value: &Value) -> Option<Vec<String>> {
    let split = |value: &Value| -> Option<Vec<String>> {
        let class = |class: &str| Some(class.trim().to_owned()).filter(|class| !class.is_empty());
        value.as_str()?.split(',').map(class).collect()
    };
    match value {
        Value::Array(list) => Some(list.iter().map(split).collect::<Option<Vec<_>>>()?.concat()),
        text => split(text),
    }
}

/// Reads a boolean in the forms that accelerate takes: it makes text of the value, and reads that.
fn boolean(value: &Value) -> Option<bool> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned).to_ascii_lowercase();
    match text.as_str() {
        "true" | "1" | "yes" | "y" | "t" | "on" => Some(true),
        "false" | "0" | "no" | "n" | "f" | "off" => Some(false),
        _ => None,
    }
}

/// Reads a size; Python writes both `100000000` and `1e8`.
#[expect(clippy::cast_possible_truncation, reason = "whole and in range, checked here")]
fn non_negative_integer(value: &Value) -> Option<i64> {
    let is_whole = |x: &f64| x.fract() == 0.0 && (0.0..9e15).contains(x);
    let integer = value.as_i64().filter(|&x| x >= 0);
    integer.or_else(|| value.as_f64().filter(is_whole).map(|x| x as i64))
}

fn compute_dtype(value: &Value) -> Option<&'static str> {
    match value.as_str()? {
        "float32" | "float" => Some("f32"),
        "bfloat16" => Some("bf16"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
