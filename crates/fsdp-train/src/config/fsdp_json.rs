//! Hugging Face's `fsdp_config.json`, as `Trainer` reads it (reference: transformers 4.31 and 5.23).
//!
//! Leading `fsdp_` is dropped from every top-level key. What Hugging Face ignores silently is named in a
//! [`Warning`]; what it rejects is an error, and so is a size together with classes, of which its newer
//! versions silently take the size. Settings of the XLA constructor that only steer its compiler have no
//! meaning here.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::ConfigError;
use super::fsdp::{ActivationCheckpointing, Dtype, Offload, Reshard, WrapPolicy};
use super::reader::nearest;
use super::warning::Warning;
use crate::input_file::{self, CONFIG_BYTES_MAX};

const CLASSES: &str = "transformer_layer_cls_to_wrap";
const SIZE: &str = "min_num_params";
const XLA_SETTINGS: &[&str] = &[
    "reshard_after_forward",
    "flatten_parameters",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "disable_reshard_on_root",
    "compute_dtype",
    "buffer_dtype",
    "fp32_reduce_scatter",
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
const XLA_SETTINGS_WITH_MEANING: &[&str] =
    &["reshard_after_forward", "disable_reshard_on_root", "compute_dtype", "fp32_reduce_scatter"];

/// What a file says; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FsdpJson {
    /// Which modules become units.
    pub wrap: Option<WrapPolicy>,
    /// What happens to gathered parameters between forward and backward.
    pub reshard_after_forward: Option<Reshard>,
    /// What parameters are gathered and computed in.
    pub param_dtype: Option<Dtype>,
    /// What gradients are reduced in; as in XLA this is the compute dtype unless `fp32_reduce_scatter`.
    pub reduce_dtype: Option<Dtype>,
    /// What backward recomputes.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// Where shards, reduced gradients and optimizer state live.
    pub offload: Option<Offload>,
    /// What was written and has no effect.
    pub warnings: Vec<Warning>,
}

/// Reads a file.
///
/// # Errors
/// If it cannot be read, is not a JSON object, or breaks a rule.
pub fn load(path: &Path) -> Result<FsdpJson, ConfigError> {
    let text = input_file::read_text(path, CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Read { file: path.to_owned(), source })?;
    parse(&text, &path.display().to_string())
}

/// Reads the text of a file; `origin` names it in errors and warnings.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, origin: &str) -> Result<FsdpJson, ConfigError> {
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

/// The keys not yet read, and what was read from them.
struct File<'a> {
    origin: &'a str,
    keys: BTreeMap<String, Value>,
    result: FsdpJson,
}

impl File<'_> {
    fn wrap(&mut self) -> Result<(), ConfigError> {
        let classes =
            self.take(CLASSES, "a class name or a list of class names", classes)?.unwrap_or_default();
        let size = self.take(SIZE, "an integer of at least 0", whole_number)?.unwrap_or(0);
        self.result.wrap = match (classes.is_empty(), size) {
            (true, 0) => None,
            (false, 0) => Some(WrapPolicy::Classes(classes)),
            (true, size) => Some(WrapPolicy::MinNumParams(size)),
            (false, _) => {
                return Err(ConfigError::Conflict {
                    origin: self.origin.to_owned(),
                    first: CLASSES.to_owned(),
                    second: SIZE.to_owned(),
                    remedy: "choose units by class or by size, and remove the other",
                });
            }
        };
        Ok(())
    }

    /// The keys of `fsdp_version` 2 that have a counterpart.
    fn top_level(&mut self) -> Result<(), ConfigError> {
        let reshard = self.take_bool("reshard_after_forward")?;
        self.result.reshard_after_forward =
            reshard.map(|free| if free { Reshard::Auto } else { Reshard::Never });
        let checkpointing = self.take_bool("activation_checkpointing")?;
        self.result.activation_checkpointing = checkpointing.map(checkpoint);
        let offload = self.take_bool("offload_params")?;
        self.result.offload = offload.map(|on| if on { Offload::Cpu } else { Offload::None });
        Ok(())
    }

    fn xla(&mut self) -> Result<(), ConfigError> {
        let on = self.take_bool("xla")?.unwrap_or(false);
        let grad_ckpt = self.take_bool("xla_fsdp_grad_ckpt")?.unwrap_or(false);
        let object = |value: &Value| value.as_object().cloned();
        let settings = self.take("xla_fsdp_settings", "an object", object)?.unwrap_or_default();
        if !on {
            if grad_ckpt {
                self.warn_needs("xla_fsdp_grad_ckpt", "`xla`: true");
            }
            if !settings.is_empty() {
                self.warn_needs("xla_fsdp_settings", "`xla`: true");
            }
            return Ok(());
        }
        if grad_ckpt {
            self.result.activation_checkpointing = Some(ActivationCheckpointing::Full);
            if self.result.wrap.is_none() {
                self.warn_needs("xla_fsdp_grad_ckpt", "a wrap policy: the root is not checkpointed");
            }
        }
        self.xla_settings(settings)
    }

    fn xla_settings(&mut self, settings: Map<String, Value>) -> Result<(), ConfigError> {
        let known = |key: &&String| XLA_SETTINGS.contains(&key.as_str());
        if let Some(key) = settings.keys().find(|key| !known(key)) {
            return Err(ConfigError::UnknownKey {
                origin: self.origin.to_owned(),
                key: format!("xla_fsdp_settings.{key}"),
                nearest: nearest(key, XLA_SETTINGS).map(|near| format!("xla_fsdp_settings.{near}")),
                known: XLA_SETTINGS.iter().map(|&key| key.to_owned()).collect(),
            });
        }
        for (key, value) in settings {
            if XLA_SETTINGS_WITH_MEANING.contains(&key.as_str()) {
                self.keys.insert(format!("xla_fsdp_settings.{key}"), value);
            } else {
                self.warn_meaningless(format!("xla_fsdp_settings.{key}"));
            }
        }
        self.xla_reshard()?;
        self.xla_dtypes()
    }

    fn xla_reshard(&mut self) -> Result<(), ConfigError> {
        let free = self.take_bool("xla_fsdp_settings.reshard_after_forward")?;
        let keep_root = self.take_bool("xla_fsdp_settings.disable_reshard_on_root")?;
        if free.is_some() || keep_root.is_some() {
            self.result.reshard_after_forward =
                Some(match (free.unwrap_or(true), keep_root.unwrap_or(true)) {
                    (false, _) => Reshard::Never,
                    (true, true) => Reshard::Auto,
                    (true, false) => Reshard::Always,
                });
        }
        Ok(())
    }

    fn xla_dtypes(&mut self) -> Result<(), ConfigError> {
        let allowed = "\"float32\" or \"bfloat16\" (XLA has no float64, and float16 needs loss scaling)";
        let compute = self.take("xla_fsdp_settings.compute_dtype", allowed, compute_dtype)?;
        let in_f32 = self.take_bool("xla_fsdp_settings.fp32_reduce_scatter")?.unwrap_or(false);
        self.result.param_dtype = compute;
        self.result.reduce_dtype = if in_f32 { Some(Dtype::F32) } else { compute };
        Ok(())
    }

    fn take_bool(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.take(key, "true or false", Value::as_bool)
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

fn checkpoint(on: bool) -> ActivationCheckpointing {
    if on { ActivationCheckpointing::Full } else { ActivationCheckpointing::None }
}

fn classes(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(class) => Some(vec![class.clone()]),
        Value::Array(classes) => classes.iter().map(|class| class.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

/// Python writes sizes as `100000000` and as `1e8`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "whole and in range, checked here"
)]
fn whole_number(value: &Value) -> Option<u64> {
    let whole = |x: &f64| x.fract() == 0.0 && (0.0..9e15).contains(x);
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|x| x as u64))
}

fn compute_dtype(value: &Value) -> Option<Dtype> {
    match value.as_str()? {
        "float32" | "float" => Some(Dtype::F32),
        "bfloat16" => Some(Dtype::Bf16),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
