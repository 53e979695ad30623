//! What a checkpoint records of its run in addition to tensors, and how it is compared with the run that resumes from
//! it.
//!
//! Every configuration key is of one of three kinds. *Free* keys do not change the computation: where and on how many
//! ranks it runs, when units are gathered, what is evaluated. *Recorded* keys may be changed by the user between two
//! steps (how long to train, with which learning rate). From then on the run no longer equals one that was never
//! changed, so the change is printed and recorded. Any other difference would make it another run; it is refused, with
//! a list of everything that differs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_ckpt::digest::DigestKind;
use fsdp_ckpt::native::NativeReader;
use fsdp_config::{Resolved, WatchedLoss};
use fsdp_data::DataPosition;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::settings;
use crate::error::TrainError;
use crate::job::Job;
use crate::loss_scale::LossScale;
use crate::rule::LateParams;

/// Keys, and tables of keys, that do not change the computation.
const FREE: [&str; 25] = [
    "model.path",
    "model.init",
    "adapter.path",
    "adapter.merge",
    // The content of the files is compared instead.
    "data.train",
    "data.source",
    "data.format",
    "data.column",
    "data.malformed",
    "data.tokenizer",
    "data.cache",
    "data.eval",
    "data.eval_every",
    "data.eval_batches",
    "train.early_stop",
    "fsdp.mesh",
    "fsdp.wrap",
    "fsdp.reshard_after_forward",
    "fsdp.forward_prefetch",
    "fsdp.accumulation",
    "fsdp.activation_checkpointing",
    "fsdp.offload",
    "fsdp.backward_prefetch",
    "checkpoint",
    "run",
];
/// Keys, and tables of keys, that may change between two steps.
const RECORDED: [&str; 13] = [
    "model.padding_row",
    "train.steps",
    "train.grad_clip",
    "train.lr_schedule",
    "train.optimizer",
    "train.label_smoothing",
    "train.z_loss",
    "train.router_aux_loss_coef",
    "train.router_z_loss_coef",
    "train.router_sequence_loss_coef",
    "train.router_bias_update_speed",
    "train.loss_scale",
    "fsdp.chunks",
];
/// Whether an exception to [`RECORDED`]: the state of one update rule does not fit another, and the average of
/// schedule-free AdamW has weights that follow from all learning rates so far.
fn is_fixed(key: &str, now: &RunState) -> bool {
    let is_schedule_free =
        leaves(&now.config).get("train.optimizer.name").is_some_and(|name| name.contains("schedule_free"));
    key == "train.optimizer.name" || (is_schedule_free && is_below(key, &["train.optimizer"]))
}

/// The state of a run, as recorded in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Steps done.
    pub step: u64,
    /// Input tokens seen.
    pub tokens: u64,
    /// Learning rate of the last step done.
    pub lr: f64,
    /// Position in the data at which the next step begins.
    pub data: DataPosition,
    /// The seed of dropout masks; together with the step it determines them.
    pub seed: u64,
    /// The text of the model's `config.json`, if it has one.
    pub model: Option<String>,
    /// CRC-64 of the weights of the frozen base, which are not in the checkpoint; `None` if they were not read from
    /// files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The checkpoint of another trainer from which that base is read; `None` if it is read from `model.path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_from: Option<PathBuf>,
    /// The resolved configuration, with the text of `resolved.toml`.
    pub config: String,
    /// CRC-64 of `config`.
    pub config_digest: String,
    /// Changes to the configuration each time the run resumed.
    pub changes: Vec<Change>,
    /// The losses seen so far that `train.early_stop` and `checkpoint.keep_best` watch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watched: Vec<WatchedLoss>,
    /// The loss scale; `None` if the run does not use one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// The parameters that began later than the run.
    #[serde(default, skip_serializing_if = "LateParams::is_empty")]
    pub late: LateParams,
    /// The version of `fsdp` that saved it; empty if saved before versions were recorded.
    #[serde(default)]
    pub version: String,
    /// The parameter groups of the optimizer, in PyTorch's format.
    #[serde(default)]
    pub param_groups: serde_json::Value,
}

/// A change to the configuration during a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Steps done when the change was made.
    pub step: u64,
    /// The configuration key, dotted.
    pub key: String,
    /// The value before, as TOML; empty if there was none.
    pub from: String,
    /// The value afterwards, as TOML; empty if there is none.
    pub to: String,
}

/// A difference between a checkpoint and the run that is to resume from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The key, or a description of what differs.
    pub(super) what: String,
    /// The value in the checkpoint.
    pub(super) saved: String,
    /// The value in the run.
    pub(super) given: String,
}

impl RunState {
    /// Describes a job after `step` steps.
    pub(crate) fn of<A>(
        job: &Job<A>,
        step: u64,
        model: Option<&str>,
        (changes, watched): (&[Change], &[WatchedLoss]),
    ) -> Self {
        let config = job.config.to_toml();
        let tokens_per_step = (job.config.train.global_batch_size * job.config.data.seq_len) as u64;
        Self {
            step,
            tokens: step * tokens_per_step,
            lr: job.schedule.lr(step.saturating_sub(1)),
            data: job.data.position(step),
            seed: job.config.train_seed(),
            model: model.map(str::to_owned),
            base: job.init.base_digest().map(str::to_owned),
            base_from: job.init.taken_base().map(|base| base.path.clone()),
            config_digest: DigestKind::Crc64.of(config.as_bytes()).to_string(),
            config,
            changes: changes.to_vec(),
            watched: watched.to_vec(),
            loss_scale: None,
            late: LateParams::new(),
            version: crate::VERSION.to_owned(),
            param_groups: settings::param_groups(job, step),
        }
    }

    /// Number of updates applied, as counted by the update rule: steps without the skipped ones.
    pub(super) fn updates(&self) -> u64 {
        self.step - self.loss_scale.map_or(0, |scale| scale.skipped)
    }

    /// Digest of everything that determines the computation: the configuration without its free keys, the data and the
    /// model.
    pub(crate) fn run_hash(&self) -> String {
        let mut leaves = leaves(&self.config);
        leaves.retain(|key, _| !is_below(key, &FREE));
        let parts = (leaves, &self.data.samples, &self.data.digest, json_leaves(self.model.as_deref()));
        DigestKind::Crc64.of(format!("{parts:?}").as_bytes()).to_string()
    }

    /// Reads the state of the run that wrote a checkpoint.
    ///
    /// # Errors
    /// [`TrainError::Input`] if it has none.
    pub(crate) fn read(reader: &NativeReader) -> Result<Self, TrainError> {
        let value = serde_json::Value::Object(reader.manifest().run_state.clone());
        serde_json::from_value(value).map_err(|error| {
            TrainError::Input(format!(
                "{} has no run state ({error}); its tensors can be converted with `fsdp ckpt convert`, and then trained on with \
                 model.init = \"pretrained\"",
                reader.dir().display()
            ))
        })
    }

    /// The state as JSON, for the manifest of a checkpoint.
    pub(super) fn to_json(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            other => unreachable!("a struct of plain fields is a JSON object, not {other:?}"),
        }
    }

    /// Returns the changes with which a run in state `now` can resume from this one, or every difference that forbids
    /// it.
    pub(crate) fn changes_to(&self, now: &RunState) -> Result<Vec<Change>, Vec<Difference>> {
        let mut refused = Vec::new();
        let mut changes = Vec::new();
        for Difference { what, saved, given } in
            differences(&leaves(&complete(&self.config)), &leaves(&now.config))
        {
            if is_below(&what, &RECORDED) && !is_fixed(&what, now) {
                changes.push(Change { step: self.step, key: what, from: saved, to: given });
            } else if !is_below(&what, &FREE) {
                refused.push(Difference { what, saved, given });
            }
        }
        refused.extend(self.data_difference(now));
        refused.extend(self.base_difference(now.base.as_deref()));
        let model = |state: &RunState| json_leaves(state.model.as_deref());
        let of_model = |d: Difference| Difference { what: format!("config.json {}", d.what), ..d };
        refused.extend(differences(&model(self), &model(now)).into_iter().map(of_model));
        if refused.is_empty() { Ok(changes) } else { Err(refused) }
    }

    pub(super) fn base_difference(&self, now: Option<&str>) -> Option<Difference> {
        let text = |base: Option<&str>| base.unwrap_or("random weights").to_owned();
        (self.base.as_deref() != now).then(|| Difference {
            what: "weights of the base in model.path".to_owned(),
            saved: text(self.base.as_deref()),
            given: text(now),
        })
    }

    fn data_difference(&self, now: &RunState) -> Option<Difference> {
        let text = |data: &DataPosition| format!("{} samples, {}", data.samples, data.digest);
        let is_same = (self.data.samples, &self.data.digest) == (now.data.samples, &now.data.digest);
        (!is_same).then(|| Difference {
            what: "content of data.train".to_owned(),
            saved: text(&self.data),
            given: text(&now.data),
        })
    }
}

/// The error for a checkpoint that belongs to another run.
pub(crate) fn other_run(path: &Path, differences: &[Difference]) -> TrainError {
    let or_nothing = |text: &str| if text.is_empty() { "nothing".to_owned() } else { text.to_owned() };
    let line = |Difference { what, saved, given }: &Difference| {
        format!("{what} was {}, now {}", or_nothing(saved), or_nothing(given))
    };
    TrainError::Input(format!(
        "the run cannot resume from {}: {}. Undo these changes, or start a new run (model.init = \"pretrained\" starts from \
         exported weights)",
        path.display(),
        differences.iter().map(line).collect::<Vec<_>>().join("; ")
    ))
}

/// Adds the defaults of keys that did not exist when the configuration was saved.
fn complete(text: &str) -> String {
    Resolved::parse(text, "", &[]).map_or_else(|_| text.to_owned(), |loaded| loaded.config.to_toml())
}

/// Whether a key is one of `keys`, or inside one of these tables.
fn is_below(key: &str, keys: &[&str]) -> bool {
    let below =
        |table: &&str| key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    keys.iter().any(below)
}

/// Every key whose value differs, sorted by key.
fn differences(saved: &BTreeMap<String, String>, given: &BTreeMap<String, String>) -> Vec<Difference> {
    let mut keys: Vec<&String> = saved.keys().chain(given.keys()).collect();
    keys.sort();
    keys.dedup();
    let value = |of: &BTreeMap<String, String>, key: &str| of.get(key).cloned().unwrap_or_default();
    keys.into_iter()
        .filter(|key| saved.get(*key) != given.get(*key))
        .map(|key| Difference { what: key.clone(), saved: value(saved, key), given: value(given, key) })
        .collect()
}

/// The dotted keys of a TOML text, with their values.
pub fn leaves(text: &str) -> BTreeMap<String, String> {
    let mut leaves = BTreeMap::new();
    match toml::from_str::<Table>(text) {
        Ok(table) => flatten("", &Value::Table(table), &mut leaves),
        Err(_) => drop(leaves.insert("configuration".to_owned(), text.to_owned())),
    }
    leaves
}

/// Keys of `config.json` for the dtype in which the weights are stored.
const DTYPES: [&str; 2] = ["dtype", "torch_dtype"];

/// The top-level keys of a JSON object, with their values.
fn json_leaves(text: Option<&str>) -> BTreeMap<String, String> {
    let Some(text) = text else { return BTreeMap::new() };
    match serde_json::from_str::<BTreeMap<String, serde_json::Value>>(text) {
        // This is the dtype of the exported weights, which does not affect the computation.
        Ok(keys) => keys
            .into_iter()
            .filter(|(key, _)| !DTYPES.contains(&key.as_str()))
            .map(|(key, value)| (key, value.to_string()))
            .collect(),
        Err(_) => BTreeMap::from([("text".to_owned(), text.to_owned())]),
    }
}

fn flatten(key: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(&key, value, leaves);
            }
        }
        value => drop(leaves.insert(key.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests;
