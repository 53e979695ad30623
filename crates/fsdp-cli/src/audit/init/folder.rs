//! What the folder of a checkpoint has: settings of the program, of its scheduler and of its optimizer, and the model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_ckpt::checkpoint::{Checkpoint, OptimizerName, Role, Value, join};
use fsdp_ckpt::formats::{self, torch_file};
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;
use fsdp_config::input_file;
use fsdp_train::adapter::peft;
use serde_json::Value as Json;

use super::lines::{Line, Lines};
use super::titan;
use crate::error::CliError;
use crate::output;
use crate::toml_text::{string, strings};

/// Maximum length of a file of settings; `trainer_state.json` has all losses.
const SETTINGS_BYTES_MAX: u64 = 1 << 26;

/// Settings of one file, by dotted names.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    /// The file, as comments name it.
    pub(super) file: String,
    values: BTreeMap<String, Value>,
}

impl Settings {
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(number)
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_on(&self, key: &str) -> bool {
        self.get(key) == Some(&Value::Bool(true))
    }

    /// Those of a checkpoint below one of these keys.
    fn below(checkpoint: &Checkpoint, keys: &[&str], file: &str) -> Option<Self> {
        let named = |name: &str| {
            keys.iter().find_map(|key| name.strip_prefix(key)?.strip_prefix('.').map(str::to_owned))
        };
        let found = checkpoint.values.iter().filter(|(_, object)| object.role != Role::Optimizer);
        let values: BTreeMap<String, Value> = found
            .filter_map(|(_, object)| Some((named(&join(&object.path))?, object.value.clone())))
            .collect();
        (!values.is_empty()).then(|| Self { file: file.to_owned(), values })
    }

    /// Those of a JSON or TOML file.
    pub(super) fn of_file(path: &Path) -> Result<Self, String> {
        let text = input_file::read_text(path, SETTINGS_BYTES_MAX).map_err(|error| error.to_string())?;
        let json: Json = match path.extension() {
            Some(ending) if ending == "toml" => toml::from_str(&text).map_err(|error| error.to_string())?,
            _ => serde_json::from_str(&text).map_err(|error| error.to_string())?,
        };
        Ok(Self::of_json(&path.file_name().unwrap_or_default().to_string_lossy(), &json))
    }

    /// Those of a JSON object.
    pub(super) fn of_json(file: &str, json: &Json) -> Self {
        let mut values = BTreeMap::new();
        add_json("", json, &mut values);
        Self { file: file.to_owned(), values }
    }

    /// The attributes of the arguments that the Trainer pickles.
    fn of_arguments(path: &Path) -> Result<Self, String> {
        let mut values = BTreeMap::new();
        for (name, value) in torch_file::attributes(path).map_err(|error| error.to_string())? {
            if let Value::Dict(items) = &value {
                let named = items.iter().filter_map(|(key, value)| match key {
                    Value::Str(key) => Some((format!("{name}.{key}"), value.clone())),
                    _ => None,
                });
                values.extend(named);
            }
            values.insert(name, value);
        }
        Ok(Self { file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(), values })
    }
}

/// Reads a file if it exists. One that cannot be read is left out, and a warning says so.
fn beside(path: &Path, read: fn(&Path) -> Result<Settings, String>) -> Option<Settings> {
    let settings = path.is_file().then(|| read(path))?;
    let warned = |reason| output::warning(&format!("{} is left out: {reason}", path.display()));
    settings.map_err(warned).ok()
}

fn add_json(name: &str, json: &Json, values: &mut BTreeMap<String, Value>) {
    let value = match json {
        Json::Object(items) => {
            let outer = if name.is_empty() { String::new() } else { format!("{name}.") };
            return items.iter().for_each(|(key, item)| add_json(&format!("{outer}{key}"), item, values));
        }
        Json::Bool(is_on) => Value::Bool(*is_on),
        Json::Number(number) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        Json::String(text) => Value::Str(text.clone()),
        Json::Array(items) => {
            Value::List(items.iter().filter_map(|item| Some(Value::Str(item.as_str()?.to_owned()))).collect())
        }
        Json::Null => Value::None,
    };
    values.insert(name.to_owned(), value);
}

/// The optimizer, by the settings of its groups.
pub(super) struct Optimizer {
    pub(super) name: &'static str,
    pub(super) line: Line,
}

/// A folder with a checkpoint.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// `training_args.bin` of the Trainer.
    pub(super) arguments: Option<Settings>,
    /// `trainer_state.json` of the Trainer.
    pub(super) state: Option<Settings>,
    /// The configuration of DeepSpeed.
    pub(super) deepspeed: Option<Settings>,
    /// The job of torchtitan.
    pub(super) titan: Option<Settings>,
    pub(super) scheduler: Option<Settings>,
    adapter: Option<Settings>,
    /// Steps done, as the trainer counts them.
    pub(super) steps: Option<u64>,
    /// Settings of the optimizer's groups, or of parameters where these have their own.
    pub(super) groups: Vec<BTreeMap<String, Value>>,
    /// The dtype of most weights.
    pub(super) dtype: Option<TensorType>,
}

impl Folder {
    /// # Errors
    /// [`CliError`] if it is not a checkpoint.
    pub(super) fn read(path: &Path) -> Result<Self, CliError> {
        let checkpoint = formats::open(path)?;
        let groups = groups(&checkpoint);
        // SGD without momentum has settings, but no tensors.
        if groups.is_empty() && !checkpoint.tensors.values().any(|tensor| tensor.role == Role::Optimizer) {
            let what = format!(
                "{} has no state of an optimizer; give the whole checkpoint of a step, or, if it is one of SGD without momentum \
                 that saves no settings either, write the run file yourself: docs/auditing-reference.md says which keys matter",
                path.display()
            );
            return Err(CliError::Option { option: "--init", what });
        }
        let dir = folder_of(path);
        let json = |name: &str| beside(&dir.join(name), Settings::of_file);
        let count = checkpoint.run_state.iter().find(|(key, _)| key == "step");
        Ok(Self {
            path: path.to_owned(),
            arguments: beside(&dir.join("training_args.bin"), Settings::of_arguments),
            state: json("trainer_state.json"),
            deepspeed: Settings::below(&checkpoint, &["ds_config"], "ds_config in the checkpoint")
                .or_else(|| json("ds_config.json")),
            titan: titan::job(dir),
            scheduler: Settings::below(
                &checkpoint,
                &["scheduler", "lr_scheduler", "lr_schedulers.0"],
                "the scheduler's state",
            ),
            adapter: json(peft::CONFIG_FILE),
            steps: count.and_then(|(_, steps)| steps.parse().ok()),
            groups,
            dtype: most_common(&checkpoint),
        })
    }

    /// The model: a folder with its `config.json`, here or one above.
    pub(super) fn model_lines(&self) -> Lines {
        let own = folder_of(&self.path);
        let base = self.adapter.as_ref().and_then(|adapter| adapter.text("base_model_name_or_path"));
        let places = [
            base.map(|base| (Path::new(base), "adapter_config.json: base_model_name_or_path")),
            Some((own, "it has the config.json")),
            Some((above(own), "config.json is in the folder above")),
        ];
        let has_model = |dir: &Path| dir.join("config.json").is_file();
        match places.into_iter().flatten().find(|(dir, _)| has_model(dir)) {
            Some((dir, from)) => {
                let mut lines = vec![Line::known("path", string(&dir.display().to_string()), from)];
                if self.adapter.is_some() && ModelWeights::are_in(dir) {
                    lines.push(Line::known("init", "\"pretrained\"", "the base of the adapters"));
                }
                Lines(lines)
            }
            None => {
                let named = base.map_or_else(String::new, |base| format!(" ({base})"));
                let place = format!(
                    "a folder with the model's config.json{named}; none is here or in the folder above (with one there, --init \
                     also finds which parameters each group has)"
                );
                Lines(vec![Line::open("path", "\"model\"", place)])
            }
        }
    }

    /// The adapters, by PEFT's settings.
    pub(super) fn adapter_lines(&self) -> Lines {
        let Some(adapter) = &self.adapter else { return Lines::default() };
        let from = |key: &str| format!("{}: {key}", adapter.file);
        let mut lines = Vec::new();
        for (key, theirs) in [("rank", "r"), ("alpha", "lora_alpha")] {
            match adapter.number(theirs) {
                Some(value) => lines.push(Line::known(key, value, from(theirs))),
                None => lines.push(Line::open(key, 8, from(theirs))),
            }
        }
        for key in ["target_modules", "target_parameters", "modules_to_save"] {
            match adapter.get(key) {
                Some(Value::List(items)) if !items.is_empty() => {
                    let text =
                        |item: &Value| if let Value::Str(text) = item { Some(text.clone()) } else { None };
                    let texts: Vec<String> = items.iter().filter_map(text).collect();
                    lines.push(Line::known(key, strings(&texts), from(key)));
                }
                Some(Value::Str(text)) if text == "all-linear" => {
                    lines.push(Line::known(key, string(text), from(key)));
                }
                Some(Value::Str(text)) => {
                    let what = format!("{} is the pattern {text}; name the modules", from(key));
                    lines.push(Line::open(key, "[\"q_proj\"]", what));
                }
                _ => {}
            }
        }
        for (key, theirs) in [("rslora", "use_rslora"), ("dora", "use_dora")] {
            if adapter.is_on(theirs) {
                lines.push(Line::known(key, true, from(theirs)));
            }
        }
        Lines(lines)
    }

    /// The kind of optimizer, by the settings that its groups have.
    pub(super) fn optimizer(&self) -> Optimizer {
        let has = |key: &str| self.groups.iter().any(|group| group.contains_key(key));
        let said =
            match self.arguments.as_ref().and_then(|arguments| Some((arguments, arguments.text("optim")?))) {
                Some((arguments, optim)) => format!("{}: optim = {optim}", arguments.file),
                None => "param_groups".to_owned(),
            };
        let known = |name: &'static str, what: &str| Optimizer {
            name,
            line: Line::known("name", string(name), format!("{said}{what}")),
        };
        let has_flag =
            |key, value| self.groups.iter().any(|group| group.get(key) == Some(&Value::Bool(value)));
        if has("clip_threshold") || has_flag("amsgrad", true) || has_flag("maximize", true) {
            let what = "none that a run file can name: its groups have clip_threshold, amsgrad or maximize";
            return Optimizer {
                name: "adamw",
                line: Line::open("name", "\"adamw\"", format!("{said}: {what}")),
            };
        }
        match (has("betas"), has("eps"), has("momentum")) {
            (true, true, _) if has_flag("decoupled_weight_decay", false) => known(
                "adamw",
                ", but with decay added to the gradient (torch.optim.Adam): a decay above 0 is a finding",
            ),
            (true, true, _) => known("adamw", ", with betas and eps"),
            (true, false, _) => known("lion", ", with betas and without eps"),
            (_, _, true) => known("sgd", ", whose groups have a momentum"),
            _ => Optimizer {
                name: "adamw",
                line: Line::open(
                    "name",
                    "\"adamw\"",
                    "the optimizer: its groups have none of the settings that are known",
                ),
            },
        }
    }
}

/// A folder, or that of a file.
fn folder_of(path: &Path) -> &Path {
    if path.is_dir() { path } else { above(path) }
}

/// The folder that holds a path.
pub(super) fn above(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() && path == Path::new(".") => Path::new(".."),
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// The settings of all groups.
fn groups(checkpoint: &Checkpoint) -> Vec<BTreeMap<String, Value>> {
    let mut groups: BTreeMap<String, BTreeMap<String, Value>> = BTreeMap::new();
    for object in checkpoint.values.values().filter(|object| object.role == Role::Optimizer) {
        let (group, key) = match OptimizerName::of_path(&object.path) {
            Some(OptimizerName::GroupSetting { group, key }) => (format!("{group:08}"), key),
            Some(OptimizerName::ParameterSetting { parameter, key }) => (parameter, key),
            _ => continue,
        };
        groups.entry(group).or_default().insert(key, object.value.clone());
    }
    groups.into_values().collect()
}

/// The dtype of most elements of the model.
fn most_common(checkpoint: &Checkpoint) -> Option<TensorType> {
    let mut elements: BTreeMap<TensorType, u64> = BTreeMap::new();
    for tensor in checkpoint.tensors.values().filter(|tensor| tensor.role == Role::Model) {
        *elements.entry(tensor.dtype).or_default() += tensor.len();
    }
    elements.into_iter().max_by_key(|(_, count)| *count).map(|(dtype, _)| dtype)
}

/// A number of any type; `None` for any other value.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        #[expect(clippy::cast_precision_loss, reason = "settings are small")]
        Value::Int(number) => Some(*number as f64),
        _ => None,
    }
}
