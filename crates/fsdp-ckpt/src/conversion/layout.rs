//! Layouts of the output: the names and nesting that a reader expects of model and optimizer.

use std::collections::BTreeMap;

use crate::checkpoint::{Checkpoint, Key, Object, OptimizerName, Role, Value, has_model_step, join};

/// A layout of a training state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The layout of torchtitan: model names at the top level, the optimizer flattened below `optimizer`.
    Torchtitan,
    /// One flat dict: model names and `optim.state.<parameter>.<state>`.
    Flat,
    /// `{model, optimizer}`, both as returned by PyTorch's `get_state_dict`.
    ModelOptimizer,
}

impl Layout {
    /// Returns the path of a tensor, or of a value that is not a setting of the optimizer.
    pub(super) fn path(self, role: Role, path: &[Key]) -> Vec<Key> {
        match role {
            Role::Model => {
                let name = Key::Name(join(&path[usize::from(has_model_step(path))..]));
                match self {
                    Layout::ModelOptimizer => vec![key("model"), name],
                    Layout::Torchtitan | Layout::Flat => vec![name],
                }
            }
            Role::Optimizer => match OptimizerName::of_path(path) {
                Some(OptimizerName::State { parameter, state }) => self.state(&parameter, &state),
                _ => path.to_vec(),
            },
            Role::Other => path.to_vec(),
        }
    }

    /// Places the values, including settings of the optimizer, each with the name of its source value.
    pub(super) fn values(self, values: Vec<(String, Object)>) -> Vec<(String, Object)> {
        let (mut placed, mut settings) = (Vec::new(), Settings::default());
        for (source, object) in values {
            match OptimizerName::of_path(&object.path).filter(|_| object.role == Role::Optimizer) {
                Some(OptimizerName::GroupSetting { group, key }) => {
                    settings.groups.entry(group).or_default().insert(key, (source, object.value));
                }
                Some(OptimizerName::ParameterSetting { parameter, key }) => {
                    settings.parameters.entry(parameter).or_default().insert(key, (source, object.value));
                }
                _ => placed.push((source, Object { path: self.path(object.role, &object.path), ..object })),
            }
        }
        placed.extend(match self {
            Layout::ModelOptimizer => settings.by_group(),
            Layout::Torchtitan | Layout::Flat => settings.by_parameter(self),
        });
        placed
    }

    fn state(self, parameter: &str, state: &str) -> Vec<Key> {
        match self {
            Layout::ModelOptimizer => [key("optimizer"), key("state"), key(parameter), key(state)].to_vec(),
            Layout::Torchtitan => vec![key("optimizer"), Key::Name(format!("state.{parameter}.{state}"))],
            Layout::Flat => vec![Key::Name(format!("optim.state.{parameter}.{state}"))],
        }
    }

    fn setting(self, parameter: &str, name: &str) -> Vec<Key> {
        match self {
            Layout::Flat => vec![Key::Name(format!("optim.param_groups.{parameter}.{name}"))],
            _ => vec![key("optimizer"), Key::Name(format!("param_groups.{parameter}.{name}"))],
        }
    }
}

/// Returns the name of the first tensor or value that identifies an optimizer parameter by number: no layout has a
/// place for it.
pub(super) fn first_numbered(checkpoint: &Checkpoint) -> Option<&String> {
    let tensors = checkpoint.tensors.iter().map(|(name, tensor)| (name, tensor.role, &tensor.path, None));
    let values = checkpoint.values.iter();
    let values = values.map(|(name, object)| (name, object.role, &object.path, Some(&object.value)));
    let is_numbered = |path: &[Key], value: Option<&Value>| match OptimizerName::of_path(path) {
        Some(OptimizerName::State { parameter, .. }) => parameter.parse::<u64>().is_ok(),
        Some(OptimizerName::GroupSetting { key, .. }) if key == PARAMS => {
            matches!(value, Some(Value::List(params)) if params.iter().any(|one| matches!(one, Value::Int(_))))
        }
        _ => false,
    };
    let mut optimizer = tensors.chain(values).filter(|(_, role, ..)| *role == Role::Optimizer);
    optimizer.find(|(_, _, path, value)| is_numbered(path, *value)).map(|(name, ..)| name)
}

/// Settings by name, each with the name of its source value.
type Group = BTreeMap<String, (String, Value)>;

/// Settings of an optimizer, by group or by parameter.
#[derive(Default)]
struct Settings {
    groups: BTreeMap<u64, Group>,
    parameters: BTreeMap<String, Group>,
}

/// The setting of a group that lists its parameters.
const PARAMS: &str = "params";

impl Settings {
    /// Converts the settings to a list of groups, each with the names of its parameters.
    fn by_group(self) -> Vec<(String, Object)> {
        let mut groups: Vec<Group> = self.groups.into_values().collect();
        for (parameter, mut settings) in self.parameters {
            // Membership is expressed by the group's own list.
            settings.remove(PARAMS);
            let is_same = |group: &&mut Group| {
                let values = |group: &Group| -> Vec<(String, Value)> {
                    let settings = group.iter().filter(|(name, _)| *name != PARAMS);
                    settings.map(|(name, (_, value))| (name.clone(), value.clone())).collect()
                };
                values(group) == values(&settings)
            };
            let source = settings.values().next().map(|(source, _)| source.clone()).unwrap_or_default();
            let parameter = Value::Str(parameter);
            match groups.iter_mut().find(is_same) {
                Some(group) => {
                    if let Some((_, Value::List(params))) = group.get_mut(PARAMS) {
                        params.push(parameter);
                    }
                }
                None => {
                    settings.insert(PARAMS.to_owned(), (source, Value::List(vec![parameter])));
                    groups.push(settings);
                }
            }
        }
        let place = |(index, group): (usize, Group)| {
            group.into_iter().map(move |(name, (source, value))| {
                let path =
                    vec![key("optimizer"), key("param_groups"), Key::Index(index as u64), Key::Name(name)];
                (source, Object { path, role: Role::Optimizer, value })
            })
        };
        groups.into_iter().enumerate().flat_map(place).collect()
    }

    /// Converts the settings to settings of each parameter.
    fn by_parameter(self, layout: Layout) -> Vec<(String, Object)> {
        let mut parameters = self.parameters;
        for mut group in self.groups.into_values() {
            let Some((_, Value::List(members))) = group.remove(PARAMS) else { continue };
            for member in members {
                if let Value::Str(parameter) = member {
                    parameters.insert(parameter, group.clone());
                }
            }
        }
        let place = |(parameter, settings): (String, Group)| {
            settings.into_iter().map(move |(name, (source, value))| {
                (source, Object { path: layout.setting(&parameter, &name), role: Role::Optimizer, value })
            })
        };
        parameters.into_iter().flat_map(place).collect()
    }
}

fn key(name: &str) -> Key {
    Key::Name(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(steps: &[&str]) -> Vec<Key> {
        steps.iter().map(|step| key(step)).collect()
    }

    fn settings(layout: Layout, values: Vec<(Vec<Key>, Value)>) -> Vec<(String, Value)> {
        let object = |(path, value)| (String::new(), Object { path, role: Role::Optimizer, value });
        let placed = layout.values(values.into_iter().map(object).collect());
        placed.into_iter().map(|(_, object)| (join(&object.path), object.value)).collect()
    }

    #[test]
    fn each_layout_maps_weight_and_state_paths() {
        let places = |layout: Layout| {
            [
                (Role::Model, path(&["model", "layers.0.w"])),
                (Role::Optimizer, path(&["optim", "state", "layers.0.w", "exp_avg"])),
            ]
            .map(|(role, path)| layout.path(role, &path))
        };
        let state = "state.layers.0.w.exp_avg";
        assert_eq!(places(Layout::Torchtitan), [path(&["layers.0.w"]), path(&["optimizer", state])]);
        assert_eq!(places(Layout::Flat), [path(&["layers.0.w"]), path(&["optim.state.layers.0.w.exp_avg"])]);
        let nested = path(&["optimizer", "state", "layers.0.w", "exp_avg"]);
        assert_eq!(places(Layout::ModelOptimizer), [path(&["model", "layers.0.w"]), nested]);
    }

    #[test]
    fn param_groups_round_trip_through_parameter_settings() {
        let group = |index, decay, params: &[&str]| {
            let at = |name: &str| vec![key("optim"), key("param_groups"), Key::Index(index), key(name)];
            let params = params.iter().map(|name| Value::Str((*name).to_owned())).collect();
            [(at("params"), Value::List(params)), (at("weight_decay"), Value::Float(decay))]
        };
        let groups = [group(0, 0.1, &["a.w", "b.w"]), group(1, 0.0, &["n.w"])].concat();
        let flat = settings(Layout::Torchtitan, groups.clone());
        let expected = [("a.w", 0.1), ("b.w", 0.1), ("n.w", 0.0)].map(|(parameter, decay)| {
            (format!("optimizer.param_groups.{parameter}.weight_decay"), Value::Float(decay))
        });
        assert_eq!(flat, expected);
        let paths = flat.into_iter().map(|(name, value)| {
            let rest = name.strip_prefix("optimizer.").unwrap().to_owned();
            (vec![key("optimizer"), Key::Name(rest)], value)
        });
        let nested = settings(Layout::ModelOptimizer, paths.collect());
        assert_eq!(nested, settings(Layout::ModelOptimizer, groups));
        assert_eq!(nested[0].0, "optimizer.param_groups.0.params");
    }
}
