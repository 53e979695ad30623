//! The optimizer state of a checkpoint, by parameter.

use std::collections::BTreeMap;

use super::{
    names,
    numbered::members,
    steps::Count,
    wanted::{STEP, Wanted},
};
use crate::{
    checkpoint::{Checkpoint, Key, OptimizerName, Role, Tensor, Value, Wrappers},
    differences::Differences,
};

/// The optimizer state by parameter, under the parameter names of the checkpoint without wrappers.
#[derive(Debug)]
pub(super) struct Optimizer {
    wrapping: Wrappers,
    /// By parameter and state: name in the checkpoint.
    pub(super) states: BTreeMap<String, BTreeMap<String, String>>,
    /// By optimizer and group.
    pub(super) groups: BTreeMap<(u64, u64), BTreeMap<String, Value>>,
    /// By parameter.
    settings: BTreeMap<String, BTreeMap<String, Value>>,
}

impl Optimizer {
    pub(super) fn of(checkpoint: &Checkpoint) -> Optimizer {
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
        let has_names =
            |group: &BTreeMap<String, Value>| members(group).all(|member| member.parse::<u64>().is_err());
        optimizer.groups.retain(|(number, _), group| *number == 0 || has_names(group));
        optimizer
    }

    /// Whether states are keyed by parameter number.
    pub(super) fn is_numbered(&self) -> bool {
        !self.states.is_empty() && self.states.keys().all(|key| key.parse::<u64>().is_ok())
    }

    /// Returns the tensors of all wanted states. `None` if there is no optimizer state.
    pub(super) fn find_states(
        &self,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
        keys: &[Option<String>],
        differences: &mut Differences,
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
    pub(super) fn settings_of(&self, key: Option<&str>) -> BTreeMap<String, Value> {
        let Some(key) = key else { return BTreeMap::new() };
        let holds = |group: &&BTreeMap<String, Value>| {
            members(group).any(|member| self.wrapping.strip(&member).0 == key)
        };
        let group = || self.groups.values().find(holds);
        self.settings.get(key).or_else(group).cloned().unwrap_or_default()
    }

    /// Returns the step count of a parameter, if the checkpoint has one.
    pub(super) fn count(&self, checkpoint: &Checkpoint, key: &str) -> Option<Count> {
        let name = self.states.get(key)?.get(STEP)?;
        Count::of(checkpoint, name)
    }
}

/// Records a difference if the tensor has another shape, or a dtype that is not a float.
pub(super) fn expect(checkpoint: &Checkpoint, name: &str, shape: &[usize], differences: &mut Differences) {
    let Tensor { shape: got, dtype, .. } = &checkpoint.tensors[name];
    let got: Vec<usize> = got.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX)).collect();
    differences.expect(name, shape, Some(&got));
    if !dtype.is_convertible() {
        differences.no_float(name, *dtype);
    }
}

/// The number of an optimizer, and a name in it. A trainer's folder with several has the second one under `optimizer_1`.
pub(super) fn name_in_optimizer(path: &[Key]) -> Option<(u64, OptimizerName)> {
    let outer = path.first()?.text();
    match outer.strip_prefix("optimizer_").and_then(|number| number.parse().ok()) {
        Some(number) => Some((number, OptimizerName::of_path(&path[1..])?)),
        None => Some((0, OptimizerName::of_path(path)?)),
    }
}
