//! Names the optimizer states that ranks keep by number: `optim.state.<parameter>.<state>` and
//! `optim.param_groups.<group>.<setting>`.

use super::{
    fields::{entries, items},
    local::LocalTensor,
    rank_fault::same_name,
};
use crate::{
    checkpoint::{Checkpoint, Key, Object, Role, Tensor, Value, join},
    error::Fault,
    torch::Item,
};

/// One state of a parameter or of a flat group of parameters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StateItem {
    Tensor(LocalTensor),
    Value(Value),
}

impl StateItem {
    /// Converts an item of the file with index `source`.
    pub(crate) fn of(item: &Item, source: usize) -> StateItem {
        match item {
            Item::Tensor(stored) => StateItem::Tensor(LocalTensor::of(stored, source)),
            item => StateItem::Value(item.to_value()),
        }
    }
}

/// The settings of a parameter group, with their names.
pub(crate) type Settings = Vec<(String, Value)>;

/// The settings of a group, which is a dict with text keys; `None` for any other value.
pub(crate) fn settings_of(group: &Value) -> Option<Settings> {
    let pairs = entries(group)?.into_iter();
    Some(pairs.map(|(key, value)| (key.to_owned(), value.clone())).collect())
}

/// The settings of each group in a list; `None` for any other value.
pub(crate) fn groups(list: &Value) -> Option<Vec<Settings>> {
    items(list)?.iter().map(settings_of).collect()
}

/// The path of a parameter's state.
pub(crate) fn state_path(parameter: &str, state: &str) -> Vec<Key> {
    ["optim", "state", parameter, state].map(|step| Key::Name(step.to_owned())).to_vec()
}

/// Adds a tensor; fails if its name is taken.
pub(crate) fn put_tensor(into: &mut Checkpoint, tensor: Tensor) -> Result<(), Fault> {
    let name = join(&tensor.path);
    expect_free(into, &name)?;
    into.tensors.insert(name, tensor);
    Ok(())
}

/// Fails if a tensor or value has this name.
pub(crate) fn expect_free(into: &Checkpoint, name: &str) -> Result<(), Fault> {
    match into.tensors.contains_key(name) || into.values.contains_key(name) {
        true => Err(same_name(name)),
        false => Ok(()),
    }
}

/// Adds a value of the optimizer.
pub(crate) fn put_value(into: &mut Checkpoint, path: Vec<Key>, value: Value) {
    into.values.insert(join(&path), Object { path, role: Role::Optimizer, value });
}

/// Adds the settings of all groups. `names` maps the parameters of a group (its `params`) to names.
pub(crate) fn put_groups(into: &mut Checkpoint, groups: &[Settings], names: impl Fn(usize, &Value) -> Value) {
    for (group, settings) in groups.iter().enumerate() {
        for (key, value) in settings {
            let value = match &key[..] {
                "params" => names(group, value),
                _ => value.clone(),
            };
            let steps = ["optim", "param_groups"].map(|step| Key::Name(step.to_owned()));
            let path = [&steps[..], &[Key::Index(group as u64), Key::Name(key.clone())]].concat();
            put_value(into, path, value);
        }
    }
}
