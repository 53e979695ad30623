//! Derives the roles of tensors and values from their names alone.
//!
//! Readers of formats that know better (from the file of a tensor, or from a manifest) set roles themselves. Names
//! decide by the usual top-level keys: the optimizer is under a key such as `optim`. If there is a key such as `model`,
//! only tensors under it belong to the model; otherwise all tensors do, except the optimizer's and those under keys of
//! other trainer state.

use super::{Checkpoint, Key, Role, Tensor};

/// First steps of paths to an optimizer.
pub(super) const OPTIMIZER_STEPS: [&str; 10] = [
    "opt_state",
    "optim",
    "optimizer",
    "optimizers",
    "optim_state",
    "optim_state_dict",
    "optimizer_state",
    "optimizer_states",
    "optimizer_state_dict",
    "optimizer_states_dict",
];

/// First steps of paths to a model that has other content beside it.
const MODEL_STEPS: [&str; 6] = ["model", "model_state", "model_state_dict", "module", "params", "state_dict"];

/// First steps of paths to other trainer state, even if the model has no key of its own; some are followed by a number
/// (`random_states_0`).
const OTHER_STEPS: [&str; 13] = [
    "train_state",
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "dataloader",
    "rng",
    "rng_state",
    "random_states",
    "extra_state",
    "scaler",
    "sampler",
    "dl_state_dict",
    "custom_checkpoint",
];

/// Second steps in names of optimizers that were flattened before they were saved.
const FLAT_OPTIMIZER_STEPS: [&str; 2] = ["state", "param_groups"];

/// The rules by which the names of one checkpoint determine roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    has_model_step: bool,
    is_bare_optimizer: bool,
}

impl Roles {
    /// Derives the rules from the paths of all tensors and values of a checkpoint.
    pub fn of_paths<'a>(paths: impl IntoIterator<Item = &'a [Key]>) -> Roles {
        let mut roles = Roles { has_model_step: false, is_bare_optimizer: false };
        for path in paths {
            let first = first_step(path);
            roles.has_model_step |= has_model_step(path);
            roles.is_bare_optimizer |= path.len() > 1 && first == "param_groups";
        }
        roles
    }

    /// The role of a tensor.
    pub fn of_tensor(&self, path: &[Key]) -> Role {
        let is_other = path.len() > 1 && OTHER_STEPS.contains(&without_number(first_step(path)));
        if self.is_optimizer(path) {
            Role::Optimizer
        } else if self.is_model(path) || !(self.has_model_step || is_other) {
            Role::Model
        } else {
            Role::Other
        }
    }

    /// The role of a value that is not a tensor.
    pub fn of_value(&self, path: &[Key]) -> Role {
        if self.is_optimizer(path) {
            Role::Optimizer
        } else if self.is_model(path) {
            Role::Model
        } else {
            Role::Other
        }
    }

    fn is_model(&self, path: &[Key]) -> bool {
        self.has_model_step && has_model_step(path)
    }

    fn is_optimizer(&self, path: &[Key]) -> bool {
        let first = first_step(path);
        match path.len() {
            // A name that was flattened before it was saved: `optim.state.layer.weight.exp_avg`.
            1 => first.split_once('.').is_some_and(|(first, rest)| {
                let second = rest.split('.').next().unwrap_or(rest);
                OPTIMIZER_STEPS.contains(&first) && FLAT_OPTIMIZER_STEPS.contains(&second)
            }),
            // A state dict of only an optimizer: `state` next to `param_groups`.
            _ if self.is_bare_optimizer && FLAT_OPTIMIZER_STEPS.contains(&first) => true,
            _ => OPTIMIZER_STEPS.contains(&first),
        }
    }
}

/// Whether a path starts with a key that holds a whole model.
pub(crate) fn has_model_step(path: &[Key]) -> bool {
    path.len() > 1 && MODEL_STEPS.contains(&first_step(path))
}

fn first_step(path: &[Key]) -> &str {
    match path.first() {
        Some(Key::Name(name)) => name,
        _ => "",
    }
}

/// Removes the number of a rank or object from the end of a step.
fn without_number(step: &str) -> &str {
    match step.rsplit_once('_') {
        Some((name, number)) if number.parse::<u64>().is_ok() => name,
        _ => step,
    }
}

impl Checkpoint {
    /// Sets the role of every tensor and value by its name.
    pub fn assign_roles(&mut self) {
        let tensors = self.tensors.values().map(|tensor| &tensor.path[..]);
        let roles = Roles::of_paths(tensors.chain(self.values.values().map(|object| &object.path[..])));
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let role = match roles.of_tensor(&tensor.path) {
                // Tensors in opaque objects of a program are not weights to load.
                Role::Model if self.is_in_opaque(&tensor.path) => Role::Other,
                role => role,
            };
            self.tensors.insert(name, Tensor { role, ..tensor });
        }
        self.values.values_mut().for_each(|object| object.role = roles.of_value(&object.path));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::checkpoint::{Object, Value, join};

    fn path(steps: &[&str]) -> Vec<Key> {
        steps.iter().map(|step| Key::Name((*step).to_owned())).collect()
    }

    /// For each path, the roles of a tensor and of a value with this path.
    fn roles(paths: &[&[&str]]) -> Vec<(Role, Role)> {
        let paths: Vec<Vec<Key>> = paths.iter().map(|steps| path(steps)).collect();
        let roles = Roles::of_paths(paths.iter().map(|path| &path[..]));
        paths.iter().map(|path| (roles.of_tensor(path), roles.of_value(path))).collect()
    }

    #[test]
    fn keys_next_to_model_and_optimizer_get_role_other() {
        let names: [&[&str]; 3] = [&["model", "w"], &["optim", "state", "w", "exp_avg"], &["rng"]];
        let expected =
            [(Role::Model, Role::Model), (Role::Optimizer, Role::Optimizer), (Role::Other, Role::Other)];
        assert_eq!(roles(&names), expected);
    }

    #[test]
    fn unknown_tensors_are_model_without_model_key() {
        let names: [&[&str]; 4] =
            [&["layers.0.weight"], &["optimizer", "param_groups"], &["gate"], &["train_state", "step"]];
        let expected = [
            (Role::Model, Role::Other),
            (Role::Optimizer, Role::Optimizer),
            (Role::Model, Role::Other),
            (Role::Other, Role::Other),
        ];
        assert_eq!(roles(&names), expected);
    }

    #[test]
    fn trainer_state_gets_role_other() {
        for step in
            ["random_states_0", "rng_state_12", "extra_state", "scaler", "dl_state_dict_1", "scheduler_1"]
        {
            assert_eq!(roles(&[&[step, "torch"], &["layers.0.weight"]])[0].0, Role::Other, "{step}");
        }
        assert_eq!(roles(&[&["sampler_x", "weight"]])[0].0, Role::Model);
    }

    #[test]
    fn single_step_dotted_names_are_not_top_level_keys() {
        let names: [&[&str]; 3] =
            [&["model.embed.weight"], &["lm_head.weight"], &["optim.state.lm_head.step"]];
        let tensors: Vec<Role> = roles(&names).into_iter().map(|(tensor, _)| tensor).collect();
        assert_eq!(tensors, [Role::Model, Role::Model, Role::Optimizer]);
        assert_eq!(roles(&[&["optim.weight"]])[0].0, Role::Model);
        assert_eq!(roles(&[&["model"]])[0].0, Role::Model);
    }

    #[test]
    fn bare_optimizer_state_dict_is_detected_by_param_groups() {
        let names: [&[&str]; 2] = [&["state", "0", "exp_avg"], &["param_groups", "0", "lr"]];
        assert!(roles(&names).iter().all(|role| *role == (Role::Optimizer, Role::Optimizer)));
        assert_eq!(roles(&[&["state", "0", "exp_avg"]])[0].0, Role::Model);
    }

    #[test]
    fn assign_roles_covers_values() {
        let object = |steps: &[&str]| {
            let path = path(steps);
            (join(&path), Object { path, role: Role::Other, value: Value::None })
        };
        let values =
            BTreeMap::from([object(&["model", "extra"]), object(&["optim", "lr"]), object(&["step"])]);
        let mut checkpoint = Checkpoint { values, ..Checkpoint::default() };
        checkpoint.assign_roles();
        let roles: Vec<Role> = checkpoint.values.values().map(|object| object.role).collect();
        assert_eq!(roles, [Role::Model, Role::Optimizer, Role::Other]);
    }
}
