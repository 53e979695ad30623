//! Weights in 32 bits and step counts, which Megatron keeps apart from the parameters.

use std::collections::BTreeSet;

use super::super::{Checkpoint, Key, Object, OptimizerName, Role, Tensor, join};

/// The names of 32-bit copies among the states of an optimizer.
const MASTERS: [&str; 2] = ["fp32_param", "param"];

impl Checkpoint {
    /// Replaces 16-bit weights by the copies that the optimizer updates.
    pub(super) fn use_masters(&mut self) {
        let master = |tensor: &Tensor| match OptimizerName::of_path(&tensor.path) {
            Some(OptimizerName::State { parameter, state }) if MASTERS.contains(&&*state) => Some(parameter),
            _ => None,
        };
        let of_optimizer = self.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
        let masters: Vec<_> =
            of_optimizer.filter_map(|(name, tensor)| Some((name.clone(), master(tensor)?))).collect();
        for (name, parameter) in masters {
            let Some(weight) = self.tensors.get_mut(&parameter) else { continue };
            let path = weight.path.clone();
            if let Some(master) = self.tensors.remove(&name) {
                self.tensors.insert(parameter, Tensor { path, role: Role::Model, ..master });
            }
        }
    }

    /// Gives each parameter with states the step count that Megatron stores once, or once for each group.
    pub(super) fn count_steps(&mut self) {
        let common = self.tensors.remove("optimizer.state.common_step");
        let is_of_group = |name: &&String| name.contains("param_groups.") && name.ends_with(".step");
        let mut of_groups =
            self.values.iter().filter(|(name, _)| is_of_group(name)).map(|(_, object)| &object.value);
        let first = of_groups.next().cloned().filter(|first| of_groups.all(|other| other == first));
        let of_parameters = self.tensors.values().filter(|tensor| tensor.role == Role::Optimizer);
        let paths: BTreeSet<Vec<Key>> = of_parameters
            .filter(|tensor| OptimizerName::of_path(&tensor.path).is_some())
            .map(|tensor| [&tensor.path[..tensor.path.len() - 1], &[Key::Name("step".to_owned())]].concat())
            .collect();
        for path in paths {
            let (name, role) = (join(&path), Role::Optimizer);
            if self.tensors.contains_key(&name) {
                continue;
            }
            if let Some(count) = &common {
                self.tensors.insert(name, Tensor { path, ..count.clone() });
            } else if let Some(value) = &first {
                self.values.insert(name, Object { path, role, value: value.clone() });
            }
        }
    }
}
