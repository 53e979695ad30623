//! Optimizer states that are keyed by parameter number, as `torch.optim` itself saves them.
//!
//! Numbers count the parameters of all groups, one group after the other, and within a group trainers keep the order of
//! the module. With one group, the order is the module's; with several, parameters are assigned by whether weight decay
//! applies to the group. The shapes must then match, which the caller checks. An optimizer numbers either the parameters
//! that are trained, or all of them.

mod module;

use std::collections::{BTreeMap, BTreeSet};

use super::{Wanted, optimizer::Optimizer};
use crate::{
    checkpoint::{Checkpoint, Key, OptimizerName, Role, Value, join, number_span, with_parameter},
    error::Error,
};
use module::Parameter;

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
    let parameters = module::published(wanted);
    let numbers = assigned(optimizer, &parameters).map_err(|counts| unmatched(checkpoint, counts))?;
    let mut names = vec![None; wanted.len()];
    for (parameter, number) in parameters.iter().zip(numbers) {
        names[parameter.wanted[0]] = number;
    }
    Ok(names)
}

/// Replaces numbers by names, if experts are stacked in the module of the numbered optimizer, or in the model beside it:
/// [`Checkpoint::with_experts`] takes states with names apart. Other checkpoints remain as they are.
///
/// # Errors
/// [`Error::BadRequest`] if states and parameters cannot be matched.
pub(super) fn name_stacked_experts(
    checkpoint: &mut Checkpoint,
    optimizer: &Optimizer,
    wanted: &[Wanted],
) -> Result<(), Error> {
    let is_stacked = has_stacked_state(checkpoint);
    let published = module::published(wanted);
    // Without any state of an expert, only the number of parameters shows which form they had.
    let is_published = !is_stacked && assigned(optimizer, &published).is_ok();
    let orders = match is_published {
        true if checkpoint.has_fused_experts() => vec![published],
        true => Vec::new(),
        false => module::stacked(wanted),
    };
    let mut fault = None;
    for parameters in &orders {
        let numbers = match assigned(optimizer, parameters) {
            Ok(numbers) => numbers,
            Err(counts) if is_stacked => return Err(unmatched(checkpoint, counts)),
            // Whatever is wrong is reported for the published form.
            Err(_) => return Ok(()),
        };
        let pairs = parameters.iter().zip(numbers).filter_map(|(one, number)| Some((number?, one)));
        let named: BTreeMap<String, &Parameter> = pairs.collect();
        match first_unfit(checkpoint, optimizer, &named, wanted) {
            None => return rename(checkpoint, &named),
            Some(reason) => fault = fault.or(Some(reason)),
        }
    }
    fault.map_or(Ok(()), |reason| Err(Error::bad_request(&checkpoint.path, reason)))
}

/// Whether a state that is keyed by number is a stack.
fn has_stacked_state(checkpoint: &Checkpoint) -> bool {
    let mut states = checkpoint.tensors.values().filter(|tensor| tensor.role == Role::Optimizer);
    states.any(|tensor| tensor.shape.len() == 3 && number_span(&tensor.path).is_some())
}

/// Describes the first state whose shape is not that of the parameter with its number.
fn first_unfit(
    checkpoint: &Checkpoint,
    optimizer: &Optimizer,
    named: &BTreeMap<String, &Parameter>,
    wanted: &[Wanted],
) -> Option<String> {
    // States that are like their parameter, as moments are. They tell the order also by parameters that are frozen here.
    let moments: BTreeSet<&String> = wanted
        .iter()
        .flat_map(|one| one.states.iter().filter(|(_, shape)| *shape == one.shape).map(|(state, _)| state))
        .collect();
    for (number, parameter) in named {
        for state in moments.iter().copied() {
            let held = optimizer.states.get(number).and_then(|states| states.get(state));
            let Some((name, tensor)) = held.and_then(|name| checkpoint.tensors.get_key_value(name)) else {
                continue;
            };
            let expected: Vec<u64> = parameter.shape.iter().map(|&size| size as u64).collect();
            if tensor.shape != expected {
                return Some(format!(
                    "the optimizer's state identifies parameters by number, and `{name}` should be that of `{}`, of \
                     shape {expected:?}, but it has {:?}: another model, or another order of its parameters",
                    parameter.name, tensor.shape
                ));
            }
        }
    }
    None
}

/// Replaces the numbers in states and groups.
fn rename(checkpoint: &mut Checkpoint, named: &BTreeMap<String, &Parameter>) -> Result<(), Error> {
    if checkpoint.tensors.values().any(|tensor| tensor.path.iter().any(|step| step.text() == MASTERS)) {
        let reason = format!("32-bit copies of stacked experts in an optimizer (`{MASTERS}`) are not read");
        return Err(Error::bad_request(&checkpoint.path, reason));
    }
    let renamed = |path: &[Key]| {
        let (step, range) = number_span(path)?;
        let number = path[step].text()[range.clone()].to_owned();
        let mut path = path.to_vec();
        // The number of a list item has the form of an index.
        path[step] = Key::Name(path[step].text());
        Some(with_parameter(&path, (step, range), &named.get(&number)?.name))
    };
    for (name, mut tensor) in std::mem::take(&mut checkpoint.tensors) {
        match renamed(&tensor.path).filter(|_| tensor.role == Role::Optimizer) {
            Some(path) => {
                tensor.path = path;
                checkpoint.tensors.insert(join(&tensor.path), tensor);
            }
            None => drop(checkpoint.tensors.insert(name, tensor)),
        }
    }
    for (name, mut object) in std::mem::take(&mut checkpoint.values) {
        let is_optimizer = object.role == Role::Optimizer;
        if is_optimizer && is_list_of_members(&object.path) {
            name_members(&mut object.value, named);
        }
        match renamed(&object.path).filter(|_| is_optimizer) {
            Some(path) => {
                object.path = path;
                checkpoint.values.insert(join(&object.path), object);
            }
            None => drop(checkpoint.values.insert(name, object)),
        }
    }
    Ok(())
}

fn is_list_of_members(path: &[Key]) -> bool {
    matches!(OptimizerName::of_path(path), Some(OptimizerName::GroupSetting { key, .. }) if key == "params")
}

fn name_members(value: &mut Value, named: &BTreeMap<String, &Parameter>) {
    let (Value::List(items) | Value::Tuple(items)) = value else { return };
    for item in items {
        if let Value::Int(number) = item
            && let Some(parameter) = named.get(&number.to_string())
        {
            *item = Value::Str(parameter.name.clone());
        }
    }
}

/// Returns the number of each parameter, as text; or, of a group that does not match, how many parameters it may choose
/// from and how many it has.
fn assigned(optimizer: &Optimizer, parameters: &[Parameter]) -> Result<Vec<Option<String>>, [usize; 2]> {
    let chosen = |decays: Option<bool>, all: bool| -> Vec<usize> {
        let is_meant =
            |one: &Parameter| (all || one.is_trained) && decays.is_none_or(|yes| one.decays == Some(yes));
        (0..parameters.len()).filter(|&index| is_meant(&parameters[index])).collect()
    };
    let mut numbers = vec![None; parameters.len()];
    let groups = optimizer.groups.values().map(|group| (group, members(group).collect::<Vec<_>>()));
    let groups: Vec<_> = groups.filter(|(_, members)| !members.is_empty()).collect();
    for ((_, members), decays) in groups.iter().zip(decays_of(&groups)) {
        let trained = chosen(decays, false);
        let chosen = if trained.len() == members.len() { trained } else { chosen(decays, true) };
        if chosen.len() != members.len() || chosen.iter().any(|&index| numbers[index].is_some()) {
            return Err([chosen.len(), members.len()]);
        }
        for (index, member) in chosen.into_iter().zip(members) {
            numbers[index] = Some(member.clone());
        }
    }
    Ok(numbers)
}

/// Whether weight decay applies to each group; `None` if that does not matter, or is not saved.
fn decays_of(groups: &[(&BTreeMap<String, Value>, Vec<String>)]) -> Vec<Option<bool>> {
    let decays = groups.iter().map(|(group, _)| Some(group.get("weight_decay").and_then(float)? != 0.0));
    match &decays.collect::<Vec<_>>()[..] {
        [_] => vec![None],
        // A run without weight decay. The Trainer makes both groups all the same, first the one that would decay.
        [Some(false), Some(false)] => vec![Some(true), Some(false)],
        decays => decays.to_vec(),
    }
}

fn unmatched(checkpoint: &Checkpoint, [expected, got]: [usize; 2]) -> Error {
    let is_second = |name: &String| name.starts_with("optimizer_1.");
    let several = match checkpoint.tensors.keys().any(is_second) {
        true => ", and there are several optimizers, each with numbers of its own",
        false => "",
    };
    let reason = format!(
        "the optimizer's state identifies parameters by number, and a group has {got} of them where the model has \
         {expected} to choose from{several}: they cannot be matched. Save the optimizer by name (DCP, \
         `get_optimizer_state_dict`), or apply weight decay to the same parameters"
    );
    Error::bad_request(&checkpoint.path, reason)
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

#[cfg(test)]
mod tests;
