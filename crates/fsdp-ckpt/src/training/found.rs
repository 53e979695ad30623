//! Finds the tensors and values of a model in a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    adapters,
    names::{self, Matched},
    numbered,
    optimizer::{Optimizer, expect, name_in_optimizer},
    steps::{self, Count},
    wanted::{STEP, Wanted},
};
use crate::{
    checkpoint::{Checkpoint, ExpertNames, Experts, Key, OptimizerName, Role, Tensor, Value, join},
    diff,
    differences::Differences,
    error::Error,
    transfer::Options,
};

/// The tensors and values found for a model.
#[derive(Debug)]
pub struct Found {
    /// The checkpoint that was searched.
    pub checkpoint: Checkpoint,
    /// For each parameter, the tensor with its values; `None` for those of a base.
    pub weights: Vec<Option<String>>,
    /// Pairs of tensors of a tied parameter that the checkpoint contains twice.
    pub tied: Vec<[String; 2]>,
    /// For each parameter, the tensors of its states, in the wanted order; none if the optimizer has never updated it.
    /// `None` if the checkpoint has no optimizer state at all.
    pub states: Option<Vec<Vec<String>>>,
    /// For each parameter, the settings of its group, by name.
    pub settings: Vec<BTreeMap<String, Value>>,
    /// For each parameter, the count of its steps, if there is one.
    pub counts: Vec<Option<Count>>,
    /// Whether states were keyed by parameter number, so that names had to be derived.
    pub is_numbered: bool,
    /// Parts of names that module wrappers have added.
    pub wrappers: BTreeSet<&'static str>,
    /// Names of tensors and values that are not used.
    pub unused: Vec<String>,
}

impl Found {
    /// Finds the weights and states of all wanted parameters.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with all parameters and states that are missing, unexpected, or of another shape or
    /// dtype; [`Error::BadRequest`] if states are keyed by number and their parameters cannot be identified, or if only
    /// one of the checkpoint and the model has adapters; [`Error::NotWhole`] if a tensor is incomplete.
    pub fn new(mut checkpoint: Checkpoint, wanted: &[Wanted]) -> Result<Found, Error> {
        if checkpoint.has_megatron_names() {
            let path = checkpoint.path.display();
            let reason = format!(
                "its names and shapes are those of Megatron Core: convert it first, with the config.json of the model \
                 (`fsdp ckpt convert {path} NEW --to native --config CONFIG`)"
            );
            return Err(Error::bad_request(&checkpoint.path, reason));
        }
        checkpoint = adapters::without_peft(checkpoint, wanted)?;
        let optimizer = Optimizer::of(&checkpoint);
        let is_numbered = optimizer.is_numbered();
        let is_of_model = |tensor: &Tensor| tensor.role == Role::Model;
        if !optimizer.states.is_empty() && !checkpoint.tensors.values().any(is_of_model) {
            let reason = "it holds an optimizer without its model: name the folder or the file that has both";
            return Err(Error::bad_request(&checkpoint.path, reason));
        }
        if is_numbered {
            numbered::name_stacked_experts(&mut checkpoint, &optimizer, wanted)?;
        }
        let names = wanted.iter().flat_map(|one| &one.names).map(String::as_str);
        if let Some(names) = ExpertNames::of_parameters(names).filter(|_| checkpoint.has_fused_experts()) {
            checkpoint = checkpoint.with_experts(Experts::Separate(names))?;
            checkpoint.notes.push("the stacked weights of experts are read one by one".to_owned());
        }
        let (weights, wrappers) = weights(&checkpoint);
        let prefix = names::common_prefix(&weights, wanted);
        let mut differences = Differences::default();
        let mut matched = Matched::new(&weights, wanted, &prefix, &mut differences);
        let optimizer = Optimizer::of(&checkpoint);
        let keys = match optimizer.is_numbered() {
            true => numbered::names(&checkpoint, &optimizer, wanted)?,
            false => names::keys(&optimizer.states, wanted),
        };
        numbered::prefer_masters(&mut checkpoint, &keys, &mut matched.names);
        for (parameter, name) in wanted.iter().zip(&matched.names) {
            name.iter().for_each(|name| expect(&checkpoint, name, &parameter.shape, &mut differences));
        }
        let states = optimizer.find_states(&checkpoint, wanted, &keys, &mut differences);
        differences.into_result(&checkpoint.path)?;
        let settings = keys.iter().map(|key| optimizer.settings_of(key.as_deref())).collect();
        let count = |key: &Option<String>| key.as_ref().and_then(|key| optimizer.count(&checkpoint, key));
        let counts = keys.iter().map(count).collect();
        let weights = matched.names;
        let used: BTreeSet<&String> = weights
            .iter()
            .flatten()
            .chain(matched.tied.iter().flatten())
            .chain(states.iter().flatten().flatten())
            .collect();
        for name in &used {
            checkpoint.tensors[*name].check_coverage(&checkpoint.sources)?;
        }
        let unused = unused(&checkpoint, &used.into_iter().chain(&matched.base).collect());
        let tied = matched.tied;
        Ok(Found { weights, tied, states, settings, counts, is_numbered, wrappers, unused, checkpoint })
    }

    /// Returns the trainer's own step count. `None` if it stores none.
    pub fn run_count(&self) -> Option<Count> {
        Count::of_run(&self.checkpoint)
    }

    /// Returns the first pair of tensors of a tied parameter that differ. `None` if there are none.
    ///
    /// # Errors
    /// Those of [`diff`](crate::diff::diff).
    pub fn tied_difference(&self, options: &Options<'_>) -> Result<Option<[String; 2]>, Error> {
        for names @ [first, second] in &self.tied {
            if !diff::within(&self.checkpoint, [first, second], options)?.is_equal() {
                return Ok(Some(names.clone()));
            }
        }
        Ok(None)
    }
}

/// The tensors of the model: names without wrappers to names, and the wrappers found.
fn weights(checkpoint: &Checkpoint) -> (BTreeMap<String, String>, BTreeSet<&'static str>) {
    let wrapping = checkpoint.wrapping();
    let (mut weights, mut wrappers) = (BTreeMap::new(), BTreeSet::new());
    for (name, tensor) in checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Model) {
        let (path, found) = wrapping.strip_path(&tensor.path);
        wrappers.extend(found);
        weights.insert(join(&path), name.clone());
    }
    (weights, wrappers)
}

/// Names of everything that was not requested, except settings and step counts, which are read elsewhere.
fn unused(checkpoint: &Checkpoint, used: &BTreeSet<&String>) -> Vec<String> {
    let is_known = |name: &String, path: &[Key], role: Role| {
        let of_optimizer = (role == Role::Optimizer).then(|| name_in_optimizer(path)).flatten();
        let of_optimizer = of_optimizer.map(|(_, name)| name);
        let is_count = matches!(&of_optimizer, Some(OptimizerName::State { state, .. }) if state == STEP);
        let is_setting = of_optimizer.is_some_and(|name| !matches!(name, OptimizerName::State { .. }));
        used.contains(name) || is_count || is_setting || steps::is_run_count(path)
    };
    let tensors = checkpoint.tensors.iter().map(|(name, tensor)| (name, &tensor.path, tensor.role));
    let values = checkpoint.values.iter().map(|(name, object)| (name, &object.path, object.role));
    tensors
        .chain(values)
        .filter(|(name, path, role)| !is_known(name, path, *role))
        .map(|all| all.0.clone())
        .collect()
}
