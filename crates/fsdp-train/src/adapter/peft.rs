//! PEFT's adapter format: `adapter_config.json`, and `adapter_model.safetensors` with tensors named
//! `base_model.model.<name in the model>`. Follows PEFT 0.21.

use std::path::{Path, PathBuf};

use fsdp_config::input_file::{self, CONFIG_BYTES_MAX};
use fsdp_config::{AdapterConfig, ConfigError, Resolved, Targets};
use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_nn::layer::Description;
use fsdp_nn::op::Orientation;
use serde_json::{Map, Value, json};

use super::{is_called, last_part, params_of};
use crate::error::TrainError;

/// The file with the adapter's weights.
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// The file with the matrices of each expert by itself, from which the adapter's weights are written.
const PARTS_FILE: &str = "adapter_parts.safetensors";

/// The file with the adapter's settings.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// Prefix of all tensor names.
pub(super) const PREFIX: &str = "base_model.model.";

/// Keys whose values need no check here: the tensors imply them, or they are compared separately.
const HARMLESS: [&str; 22] = [
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// PEFT's names of a trained parameter that belongs to no expert: one for its name and one for each alias.
pub(crate) fn names(param: &ParamSpec) -> impl Iterator<Item = String> + '_ {
    std::iter::once(&param.fqn).chain(&param.aliases).map(|name| format!("{PREFIX}{name}"))
}

/// PEFT's first name of a trained parameter.
pub(crate) fn name(param: &ParamSpec) -> String {
    format!("{PREFIX}{}", param.fqn)
}

/// The file that ranks export adapters to.
pub(crate) fn exported_file(adapter: &AdapterConfig) -> &'static str {
    if adapter.target_parameters.is_empty() { ADAPTER_FILE } else { PARTS_FILE }
}

/// The settings in an `adapter_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    path: PathBuf,
    /// `r`: the rank of the adapter matrices.
    pub rank: usize,
    /// `lora_alpha`: the numerator of the scale.
    pub alpha: f64,
    /// `use_rslora`: whether the scale is `alpha / sqrt(rank)` instead of `alpha / rank`.
    pub rslora: bool,
    /// `use_dora`: whether rows have trained magnitudes.
    pub dora: bool,
}

impl PeftConfig {
    /// Reads the settings in the directory of an adapter.
    ///
    /// # Errors
    /// [`TrainError::Config`] if the file cannot be read, [`TrainError::Input`] for anything but LoRA and
    /// DoRA.
    pub fn read(dir: &Path) -> Result<Self, TrainError> {
        let path = dir.join(CONFIG_FILE);
        let text = input_file::read_text(&path, CONFIG_BYTES_MAX)
            .map_err(|source| ConfigError::Read { file: path.clone(), source })?;
        let parsed = serde_json::from_str::<Map<String, Value>>(&text);
        let fields = parsed.map_err(|error| failed(&path, format!("not a JSON object: {error}")))?;
        expect_lora(&fields).map_err(|what| failed(&path, what))?;
        let missing = |key: &str| failed(&path, format!("`{key}` is missing or not a number"));
        let rank = fields.get("r").and_then(Value::as_u64).ok_or_else(|| missing("r"))?;
        let alpha = fields.get("lora_alpha").and_then(Value::as_f64).ok_or_else(|| missing("lora_alpha"))?;
        let is_on = |key: &str| fields.get(key).and_then(Value::as_bool).unwrap_or(false);
        let (rslora, dora) = (is_on("use_rslora"), is_on("use_dora"));
        Ok(Self { rank: usize::try_from(rank).unwrap_or(usize::MAX), alpha, rslora, dora, path })
    }

    /// Checks that the run file agrees with the adapter from which training starts.
    ///
    /// # Errors
    /// [`TrainError::Input`] if it differs.
    pub(crate) fn expect(&self, adapter: &AdapterConfig) -> Result<(), TrainError> {
        let pairs = [
            ("rank", "r", self.rank.to_string(), adapter.rank.to_string()),
            ("alpha", "lora_alpha", self.alpha.to_string(), adapter.alpha.to_string()),
            ("rslora", "use_rslora", self.rslora.to_string(), adapter.rslora.to_string()),
            ("dora", "use_dora", self.dora.to_string(), adapter.dora.to_string()),
        ];
        let Some((ours, theirs, found, given)) =
            pairs.into_iter().find(|(_, _, found, given)| found != given)
        else {
            return Ok(());
        };
        let what = format!(
            "`{theirs}` is {found}, but adapter.{ours} of the run file is {given}; set that to {found}"
        );
        Err(failed(&self.path, what))
    }
}

fn failed(path: &Path, what: String) -> TrainError {
    TrainError::Input(format!("{}: {what}", path.display()))
}

/// Checks that the fields describe a plain LoRA or DoRA: any other setting would change the computation.
fn expect_lora(fields: &Map<String, Value>) -> Result<(), String> {
    let kind = fields.get("peft_type").and_then(Value::as_str).unwrap_or_default();
    if kind != "LORA" {
        return Err(format!("peft_type is \"{kind}\", but only \"LORA\" is supported"));
    }
    for (key, value) in fields {
        let is_unset = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(entries) => entries.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => false,
        };
        let is_plain = match key.as_str() {
            "bias" => value == "none",
            // The initialization does not matter, unless it modified the base.
            "init_lora_weights" => *value == true || value == "gaussian",
            "rank_pattern" => is_same_for_all(value, fields.get("r")),
            "alpha_pattern" => is_same_for_all(value, fields.get("lora_alpha")),
            key => HARMLESS.contains(&key),
        };
        if !is_unset && !is_plain && key.ends_with("_pattern") {
            let ours = if key == "rank_pattern" { "rank" } else { "alpha" };
            return Err(format!("`{key}` is {value}, but adapter.{ours} is one for all modules"));
        }
        if !is_unset && !is_plain {
            return Err(format!("`{key}` is {value}, which is not supported: only plain LoRA and DoRA are"));
        }
    }
    Ok(())
}

/// Whether a pattern gives all modules the value that they have without it.
fn is_same_for_all(pattern: &Value, value: Option<&Value>) -> bool {
    let is_same = |one: &Value| value.is_some_and(|value| value.as_f64() == one.as_f64());
    pattern.as_object().is_some_and(|pattern| pattern.values().all(is_same))
}

/// The text of `adapter_config.json` for the adapters of a run.
///
/// # Panics
/// When the run file has no adapter.
pub(crate) fn config_json(config: &Resolved, description: &Description) -> String {
    let adapter = config.adapter.as_ref().expect("an adapter is exported");
    let spec = &description.spec;
    let is_transposed = description.linears.iter().any(|(_, layer)| layer.orientation == Orientation::InOut);
    let fields = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": adapter.rank,
        "lora_alpha": number(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "target_modules": target_modules(description, &adapter.target_modules),
        "target_parameters": (!adapter.target_parameters.is_empty()).then_some(&adapter.target_parameters),
        "modules_to_save": saved_modules(spec, &adapter.modules_to_save),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    let mut text = serde_json::to_string_pretty(&fields).expect("plain values are JSON");
    text.push('\n');
    text
}

/// `lora_alpha` as PEFT writes it: as an integer if it is whole.
#[expect(clippy::cast_possible_truncation, reason = "it is whole and small")]
fn number(alpha: f64) -> Value {
    if alpha.fract() == 0.0 && alpha < 1e15 { json!(alpha as i64) } else { json!(alpha) }
}

/// Names by which PEFT finds the adapted modules; if all linear maps are adapted, the last parts of their names.
fn target_modules(description: &Description, targets: &Targets) -> Vec<String> {
    let mut names = match targets {
        Targets::Named(names) => names.clone(),
        Targets::AllLinear => {
            let modules =
                description.linears.iter().map(|(module, _)| &description.spec.modules[*module].fqn);
            modules.map(|module| last_part(module).to_owned()).collect()
        }
    };
    names.sort();
    names.dedup();
    names
}

/// The full names of modules that are saved whole, since PEFT matches any name by its ending. For tied parameters all
/// modules are listed: PEFT gives each of them its own weights.
fn saved_modules(spec: &ModelSpec, names: &[String]) -> Option<Vec<String>> {
    let mut saved = Vec::new();
    for name in names {
        for module in spec.modules.iter().filter(|module| is_called(&module.fqn, name)) {
            saved.push(module.fqn.clone());
            let params = params_of(spec, &module.fqn).map(|id| spec.param(id));
            for param in params.filter(|param| !param.aliases.is_empty()) {
                let uses = std::iter::once(&param.fqn).chain(&param.aliases);
                let modules = uses.filter_map(|name| Some(name.rsplit_once('.')?.0));
                saved.extend(modules.map(str::to_owned));
            }
        }
    }
    saved.sort();
    saved.dedup();
    (!saved.is_empty()).then_some(saved)
}
