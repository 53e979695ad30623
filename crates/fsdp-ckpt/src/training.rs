//! Finds in a checkpoint of any trainer the content that training needs, by the names of a model: weights, optimizer
//! states and step counts.
//!
//! Trainers agree on the tensors and differ in everything around them: prefixes, wrappers in names, flat or nested
//! states, states by parameter number. Names are compared without wrappers, and may share any prefix. [`Found`] lists
//! the tensors of the checkpoint that belong to each parameter; [`StateRows`] reads rows of them. [`ModelWeights`] are
//! the initial weights of a run that does not resume.

mod adapters;
mod names;
mod numbered;
mod rows;
mod steps;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

pub use rows::StateRows;
pub use steps::Count;
pub use weights::{ModelWeights, ViewedModel};

use crate::{
    checkpoint::{Checkpoint, ExpertNames, Experts, OptimizerName, Role, Tensor, Value, Wrappers},
    diff,
    error::{Error, NameDifferences},
    transfer::Options,
};
use names::Matched;

/// Name of the state that counts a parameter's steps. It is never one of the wanted state tensors.
pub(crate) const STEP: &str = "step";

/// A parameter to look for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its name, followed by alternative names.
    pub names: Vec<String>,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// The states that the optimizer keeps for it, with their shapes. A frozen parameter has none.
    pub states: Vec<(String, Vec<usize>)>,
    /// Whether weight decay applies to it: distinguishes the parameter groups of states that are keyed by number.
    pub decays: bool,
    /// Whether the optimizer may have none of these states, because it has never updated the parameter.
    pub may_lack_states: bool,
    /// Whether it belongs to the base of adapters: its weights are read elsewhere, whether they are here or not.
    pub is_base: bool,
}

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

/// The optimizer state by parameter, under the parameter names of the checkpoint without wrappers.
#[derive(Debug)]
struct Optimizer {
    wrapping: Wrappers,
    /// By parameter and state: name in the checkpoint.
    states: BTreeMap<String, BTreeMap<String, String>>,
    /// By optimizer and group.
    groups: BTreeMap<(u64, u64), BTreeMap<String, Value>>,
    /// By parameter.
    settings: BTreeMap<String, BTreeMap<String, Value>>,
}

impl Found {
    /// Finds the weights and states of all wanted parameters.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with all parameters and states that are missing, unexpected, or of another shape or
    /// dtype; [`Error::BadRequest`] if states are keyed by number and their parameters cannot be identified, or if only
    /// one of the checkpoint and the model has adapters; [`Error::NotWhole`] if a tensor is incomplete.
    pub fn new(mut checkpoint: Checkpoint, wanted: &[Wanted]) -> Result<Found, Error> {
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
        let mut differences = NameDifferences::default();
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
        weights.insert(crate::checkpoint::join(&path), name.clone());
    }
    (weights, wrappers)
}

/// Records a difference if the tensor has another shape, or a dtype that is not a float.
fn expect(checkpoint: &Checkpoint, name: &str, shape: &[usize], differences: &mut NameDifferences) {
    let Tensor { shape: got, dtype, .. } = &checkpoint.tensors[name];
    let got: Vec<usize> = got.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX)).collect();
    differences.expect(name, shape, Some(&got));
    if !dtype.is_convertible() {
        differences.wrong_type.push((name.to_owned(), *dtype));
    }
}

/// Names of everything that was not requested, except settings and step counts, which are read elsewhere.
fn unused(checkpoint: &Checkpoint, used: &BTreeSet<&String>) -> Vec<String> {
    let is_known = |name: &String, path: &[crate::checkpoint::Key], role: Role| {
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

/// The number of an optimizer, and a name in it. A trainer's folder with several has the second one under `optimizer_1`.
fn name_in_optimizer(path: &[crate::checkpoint::Key]) -> Option<(u64, OptimizerName)> {
    let outer = path.first()?.text();
    match outer.strip_prefix("optimizer_").and_then(|number| number.parse().ok()) {
        Some(number) => Some((number, OptimizerName::of_path(&path[1..])?)),
        None => Some((0, OptimizerName::of_path(path)?)),
    }
}

impl Optimizer {
    fn of(checkpoint: &Checkpoint) -> Optimizer {
        let wrapping = checkpoint.wrapping();
        let (states, groups, settings) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut optimizer = Optimizer { wrapping, states, groups, settings };
        let tensors = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
        let values = checkpoint.values.iter().filter(|(_, object)| object.role == Role::Optimizer);
        let paths = tensors.map(|(name, tensor)| (name, &tensor.path, None));
        let paths = paths.chain(values.map(|(name, object)| (name, &object.path, Some(&object.value))));
        for (name, path, value) in paths {
            let Some((number, found)) = name_in_optimizer(path) else { continue };
            match (found, value) {
                (OptimizerName::State { parameter, state }, _) => {
                    let parameter = wrapping.strip(&parameter).0;
                    // Each optimizer has numbers of its own, so those of the first alone can be matched.
                    if number == 0 || parameter.parse::<u64>().is_err() {
                        optimizer.states.entry(parameter).or_default().insert(state, name.clone());
                    }
                }
                (OptimizerName::GroupSetting { group, key }, Some(value)) => {
                    optimizer.groups.entry((number, group)).or_default().insert(key, value.clone());
                }
                (OptimizerName::ParameterSetting { parameter, key }, Some(value)) => {
                    let parameter = wrapping.strip(&parameter).0;
                    optimizer.settings.entry(parameter).or_default().insert(key, value.clone());
                }
                _ => {}
            }
        }
        let has_names = |group: &BTreeMap<String, Value>| {
            numbered::members(group).all(|member| member.parse::<u64>().is_err())
        };
        optimizer.groups.retain(|(number, _), group| *number == 0 || has_names(group));
        optimizer
    }

    /// Whether states are keyed by parameter number.
    fn is_numbered(&self) -> bool {
        !self.states.is_empty() && self.states.keys().all(|key| key.parse::<u64>().is_ok())
    }

    /// Returns the tensors of all wanted states. `None` if there is no optimizer state.
    fn find_states(
        &self,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
        keys: &[Option<String>],
        differences: &mut NameDifferences,
    ) -> Option<Vec<Vec<String>>> {
        if self.states.is_empty() {
            return None;
        }
        // States that belong to no parameter may be those of parameters that seem to have none.
        let may_lack = names::are_known(self.states.keys(), wanted, keys);
        let of_parameter = |(parameter, key): (&Wanted, &Option<String>)| {
            let held = key.as_ref().and_then(|key| self.states.get(key));
            let mut found = Vec::new();
            // Other states than the wanted ones are those of another optimizer.
            let is_state =
                |(state, name): (&String, &String)| state != STEP && checkpoint.tensors.contains_key(name);
            if may_lack && parameter.may_lack_states && !held.into_iter().flatten().any(is_state) {
                return found;
            }
            for (state, shape) in &parameter.states {
                let tensor = held.and_then(|held| held.get(state));
                match tensor.filter(|name| checkpoint.tensors.contains_key(*name)) {
                    Some(name) => {
                        expect(checkpoint, name, shape, differences);
                        found.push(name.clone());
                    }
                    None => differences.missing.push(format!("{state} of {}", parameter.names[0])),
                }
            }
            found
        };
        Some(wanted.iter().zip(keys).map(of_parameter).collect())
    }

    /// Returns the settings of the parameter's group.
    fn settings_of(&self, key: Option<&str>) -> BTreeMap<String, Value> {
        let Some(key) = key else { return BTreeMap::new() };
        let holds = |group: &&BTreeMap<String, Value>| {
            numbered::members(group).any(|member| self.wrapping.strip(&member).0 == key)
        };
        let group = || self.groups.values().find(holds);
        self.settings.get(key).or_else(group).cloned().unwrap_or_default()
    }

    /// Returns the step count of a parameter, if the checkpoint has one.
    fn count(&self, checkpoint: &Checkpoint, key: &str) -> Option<Count> {
        let name = self.states.get(key)?.get(STEP)?;
        Count::of(checkpoint, name)
    }
}

#[cfg(test)]
mod tests;
