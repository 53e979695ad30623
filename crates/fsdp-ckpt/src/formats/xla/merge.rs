//! Merges the files of all ranks: locates each parameter, buffer and optimizer state.
//!
//! The optimizer numbers its parameters one group after another; within a group they are in the order of the shards in
//! the file. If there are several groups, weight decay identifies their parameters: as a rule, one-dimensional
//! parameters do not decay. If counts or shapes contradict this (frozen parameters, optimizers with factored states),
//! the optimizer is left out with a note, since its names would be guesses.

use std::{collections::BTreeMap, rc::Rc};

use super::rank_state::{OptimizerState, RankState, Sharded, clean, split_key};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Value},
    error::{Error, Fault},
    formats::{
        fields::{count, items},
        merge::{self, Part, RankParts, Window},
        optimizer::{Settings, StateItem, put_groups, put_value, state_path},
        rank_fault::other_shape,
    },
};

/// Adds the model and the optimizer of `ranks`, which are in rank order and complete, to a checkpoint.
pub(super) fn merge(ranks: &[RankState], into: &mut Checkpoint) -> Result<(), Error> {
    let mut parts = Vec::with_capacity(ranks.len());
    for (rank, state) in ranks.iter().enumerate() {
        let of_model = model_parts(state, (rank, ranks.len())).map_err(|fault| fault.in_file(&state.path))?;
        parts.push(RankParts { path: state.path.clone(), parts: of_model });
    }
    let first = &ranks[0];
    if let Some(optimizer) = &first.optimizer {
        let numbered = numbered(&first.sharded, optimizer);
        match numbered.and_then(|numbered| check_shapes(first, &numbered, optimizer).map(|()| numbered)) {
            Ok(numbered) => {
                for (rank, (state, of_rank)) in ranks.iter().zip(&mut parts).enumerate() {
                    let found = optimizer_parts(state, (rank, ranks.len()), &numbered);
                    of_rank.parts.extend(found.map_err(|fault| fault.in_file(&state.path))?);
                }
                add_values(optimizer, &numbered, into);
            }
            Err(why) => into.notes.push(format!("the optimizer is left out: {why}")),
        }
    }
    merge::merge(&parts, into)
}

/// The shards and buffers in a rank's file.
fn model_parts(state: &RankState, place: (usize, usize)) -> Result<Vec<Part>, Fault> {
    let mut parts = Vec::with_capacity(state.model.len());
    for parameter in &state.sharded {
        let Some(local) = state.model.get(&parameter.key) else { continue };
        // A one-dimensional shard is a run of the flattened parameter; otherwise it is rows of a parameter that was not
        // flattened.
        let (got, whole) = (&local.shape, &parameter.shape);
        if got.len() != 1 && (got.len() != whole.len() || got.get(1..) != whole.get(1..)) {
            return Err(other_shape(&parameter.key, whole, got, &state.path));
        }
        let windows = windows(parameter, |name| vec![Key::Name(name.to_owned())]);
        parts.push(Part::run(&parameter.key, Role::Model, local, place, windows)?);
    }
    for (key, buffer) in state.model.iter().filter(|(key, _)| split_key(key).is_none()) {
        let (path, (rank, world)) = (vec![Key::Name(clean(key))], place);
        parts.push(Part::copy(path, Role::Model, buffer.clone(), rank, world));
    }
    Ok(parts)
}

fn windows(parameter: &Sharded, path: impl Fn(&str) -> Vec<Key>) -> Rc<[Window]> {
    let parts = parameter.parts.iter();
    parts
        .map(|part| Window { path: path(&part.name), shape: part.shape.clone(), range: part.range.clone() })
        .collect()
}

/// The tensors of a rank's optimizer: parts of what their parameters are parts of, and scalars.
fn optimizer_parts(
    state: &RankState,
    place: (usize, usize),
    numbered: &BTreeMap<u64, &Sharded>,
) -> Result<Vec<Part>, Fault> {
    let mut parts = Vec::new();
    let states = state.optimizer.iter().flat_map(|optimizer| &optimizer.states);
    for (number, items) in states {
        for (name, item) in items {
            let (Some(parameter), StateItem::Tensor(local)) = (numbered.get(number), item) else { continue };
            if local.shape.is_empty() {
                let copy = |window: &Window| {
                    Part::copy(window.path.clone(), Role::Optimizer, local.clone(), place.0, place.1)
                };
                parts.extend(windows(parameter, |parameter| state_path(parameter, name)).iter().map(copy));
            } else {
                let windows = windows(parameter, |parameter| state_path(parameter, name));
                let label = format!("optimizer.state.{number}.{name}");
                parts.push(Part::run(&label, Role::Optimizer, local, place, windows)?);
            }
        }
    }
    Ok(parts)
}

/// Adds the states that are no tensors, and the settings.
fn add_values(optimizer: &OptimizerState, numbered: &BTreeMap<u64, &Sharded>, into: &mut Checkpoint) {
    for (number, items) in &optimizer.states {
        for (name, item) in items {
            let StateItem::Value(value) = item else { continue };
            for part in &numbered[number].parts {
                put_value(into, state_path(&part.name, name), value.clone());
            }
        }
    }
    put_groups(into, &optimizer.groups, |_, params| named(params, numbered));
}

/// Maps parameter numbers to parameters.
fn numbered<'a>(
    sharded: &'a [Sharded],
    optimizer: &OptimizerState,
) -> Result<BTreeMap<u64, &'a Sharded>, String> {
    let members = |group: &Settings| setting(group, "params").map(numbers_of).unwrap_or_default();
    let groups: Vec<(&Settings, Vec<u64>)> =
        optimizer.groups.iter().map(|group| (group, members(group))).collect();
    let groups: Vec<_> = groups.into_iter().filter(|(_, members)| !members.is_empty()).collect();
    let count: usize = groups.iter().map(|(_, members)| members.len()).sum();
    if count != sharded.len() {
        return Err(format!("it has {count} parameters, but the model has {} shards", sharded.len()));
    }
    let mut numbered = BTreeMap::new();
    for (group, members) in &groups {
        let decays = setting(group, "weight_decay").is_some_and(|decay| !is_zero(decay));
        let is_meant =
            |one: &&Sharded| groups.len() == 1 || decays == one.parts.iter().any(|part| part.shape.len() > 1);
        let is_free = |one: &&Sharded| numbered.values().all(|taken: &&Sharded| taken.key != one.key);
        let parameters: Vec<&Sharded> = sharded.iter().filter(is_meant).filter(is_free).collect();
        if parameters.len() != members.len() {
            return Err(format!(
                "it has {} groups of parameters, and weight decay does not tell which are in the group of {}",
                groups.len(),
                members.len()
            ));
        }
        numbered.extend(members.iter().copied().zip(parameters));
    }
    Ok(numbered)
}

/// Checks that states have the shapes of their parameters' shards.
fn check_shapes(
    first: &RankState,
    numbered: &BTreeMap<u64, &Sharded>,
    optimizer: &OptimizerState,
) -> Result<(), String> {
    for (number, items) in &optimizer.states {
        let Some(parameter) = numbered.get(number) else {
            return Err(format!("it has a state of parameter {number}, which is in no group"));
        };
        let shape = first.model.get(&parameter.key).map(|tensor| &tensor.shape);
        for (name, item) in items {
            if let StateItem::Tensor(tensor) = item
                && !tensor.shape.is_empty()
                && Some(&tensor.shape) != shape
            {
                return Err(format!("its state {number}.{name} differs in shape from its parameter's shard"));
            }
        }
    }
    Ok(())
}

/// A setting of a group.
fn setting<'a>(group: &'a Settings, name: &str) -> Option<&'a Value> {
    group.iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

fn is_zero(value: &Value) -> bool {
    matches!(value, Value::Int(0)) || matches!(value, Value::Float(number) if *number == 0.0)
}

/// The numbers in `params` of a group.
fn numbers_of(params: &Value) -> Vec<u64> {
    items(params).unwrap_or_default().iter().filter_map(count).collect()
}

/// Converts parameter numbers to names.
fn named(params: &Value, numbered: &BTreeMap<u64, &Sharded>) -> Value {
    let parameters = numbers_of(params).into_iter().filter_map(|number| numbered.get(&number));
    let parts = parameters.flat_map(|parameter| &parameter.parts);
    Value::List(parts.map(|part| Value::Str(part.name.clone())).collect())
}
