//! Optimizer states that are keyed by parameter number, as `torch.optim` itself saves them.
//!
//! Numbers count the parameters of all groups, one group after the other, and within a group trainers keep the order of
//! the model. With one group, the order is the model's; with several, parameters are assigned by whether weight decay
//! applies to the group. The shapes must then match, which the caller checks. An optimizer numbers either the parameters
//! that are trained, or all of them.

use std::collections::BTreeMap;

use super::{Optimizer, Wanted};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Value},
    error::Error,
};

/// The lists of 32-bit copies of the weights, one for each parameter group.
const MASTERS: &str = "fp32_groups";

/// Returns the names or numbers of the parameters in a group.
pub(super) fn members(group: &BTreeMap<String, Value>) -> impl Iterator<Item = String> {
    let items = match group.get("params") {
        Some(Value::List(items) | Value::Tuple(items)) => &items[..],
        _ => &[],
    };
    items.iter().filter_map(|item| match item {
        Value::Str(name) => Some(name.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    })
}

/// Returns the number of each parameter, as text. `None` if no state is kept for it.
pub(super) fn names(
    checkpoint: &Checkpoint,
    optimizer: &Optimizer,
    wanted: &[Wanted],
) -> Result<Vec<Option<String>>, Error> {
    let numbered = |decays: Option<bool>, all: bool| -> Vec<usize> {
        let is_meant =
            |one: &Wanted| (all || !one.states.is_empty()) && decays.is_none_or(|yes| one.decays == yes);
        (0..wanted.len()).filter(|&index| is_meant(&wanted[index])).collect()
    };
    let mut names = vec![None; wanted.len()];
    let groups: Vec<Vec<String>> = optimizer.groups.values().map(|group| members(group).collect()).collect();
    for (group, members) in optimizer.groups.values().zip(&groups).filter(|(_, members)| !members.is_empty())
    {
        let is_only = groups.iter().filter(|members| !members.is_empty()).count() == 1;
        let decay = group.get("weight_decay").and_then(float);
        let decays = if is_only { None } else { decay.map(|decay| decay != 0.0) };
        let trained = numbered(decays, false);
        let parameters = if trained.len() == members.len() { trained } else { numbered(decays, true) };
        if parameters.len() != members.len() || parameters.iter().any(|&index| names[index].is_some()) {
            let (expected, got) = (parameters.len(), members.len());
            let reason = format!(
                "the optimizer's state identifies parameters by number, and a group has {got} of them where \
                 the model has {expected} to choose from: they cannot be matched. Save the optimizer by name \
                 (DCP, `get_optimizer_state_dict`), or apply weight decay to the same parameters"
            );
            return Err(Error::bad_request(&checkpoint.path, reason));
        }
        for (index, member) in parameters.into_iter().zip(members) {
            names[index] = Some(member.clone());
        }
    }
    Ok(names)
}

/// Uses the 32-bit copies that a trainer of 16-bit weights updates, if the optimizer stores them (`fp32_groups` of
/// DeepSpeed's stage 0): they have the same numbers as the states.
pub(super) fn prefer_masters(
    checkpoint: &mut Checkpoint,
    keys: &[Option<String>],
    weights: &mut [Option<String>],
) {
    let mut masters = BTreeMap::new();
    for (name, tensor) in checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer) {
        let steps: Vec<String> = tensor.path.iter().map(Key::text).collect();
        if let [.., list, group, index] = &steps[..]
            && list == MASTERS
            && let (Ok(group), Ok(index)) = (group.parse::<u64>(), index.parse::<u64>())
        {
            masters.insert((group, index), name.clone());
        }
    }
    let masters: Vec<String> = masters.into_values().collect();
    let of_key = |key: &String| masters.get(key.parse::<usize>().ok()?).cloned();
    let mut has_any = false;
    for (key, weight) in keys.iter().zip(weights) {
        if let Some(master) = key.as_ref().and_then(of_key) {
            *weight = Some(master);
            has_any = true;
        }
    }
    if has_any {
        let note = format!("weights are taken from the optimizer's 32-bit copies (`{MASTERS}`)");
        checkpoint.notes.push(note);
    }
}

/// Converts a value to a number. `None` if it is not one.
fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        #[expect(clippy::cast_precision_loss, reason = "settings are small")]
        Value::Int(number) => Some(*number as f64),
        _ => None,
    }
}
