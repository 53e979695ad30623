//! Merges the files of all ranks: locates each parameter, buffer and optimizer state.
//!
//! The optimizer numbers its parameters one group after another; within a group they are in the order of the shards in
//! the file. If there are several groups, weight decay identifies their parameters: as a rule, one-dimensional
//! parameters do not decay. If counts or shapes contradict this (frozen parameters, optimizers with factored states),
//! the optimizer is left out with a note, since its names would be guesses.

use std::collections::BTreeMap;

use super::rank_state::{OptimizerState, Part, RankState, Sharded, clean, split_key};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, Value},
    error::{Error, Fault},
    formats::{
        fields::{count, items},
        local::LocalTensor,
        optimizer::{Settings, StateItem, put_groups, put_tensor, put_value, state_path},
        rank_fault::{not_in_rank, other_shape, other_type, strided, too_short},
        shards::{Shard, chunks_of, len_of},
    },
    safetensors::TensorType,
};

/// Adds the model and the optimizer of `ranks`, which are in rank order and complete, to a checkpoint.
pub(super) fn merge(ranks: &[RankState], into: &mut Checkpoint) -> Result<(), Error> {
    let first = &ranks[0];
    let in_first = |fault: Fault| fault.in_file(&first.path);
    let sharded = first.sharded().map_err(in_first)?;
    for rank in &ranks[1..] {
        check_same_parameters(first, &sharded, rank).map_err(|fault| fault.in_file(&rank.path))?;
    }
    for parameter in &sharded {
        let tensors = same_in_all(ranks, &parameter.key, |rank| rank.model.get(&parameter.key))?;
        let shards = shards_of(ranks, parameter, &parameter.key, &tensors)?;
        for part in &parameter.parts {
            let path = vec![Key::Name(part.name.clone())];
            let tensor = sharded_tensor(path, Role::Model, tensors[0].dtype, part, &shards);
            put_tensor(into, tensor).map_err(in_first)?;
        }
    }
    for (key, buffer) in first.model.iter().filter(|(key, _)| split_key(key).is_none()) {
        same_in_all(ranks, key, |rank| rank.model.get(key))?;
        let tensor = buffer.to_tensor(vec![Key::Name(clean(key))], Role::Model);
        put_tensor(into, tensor).map_err(in_first)?;
    }
    match &first.optimizer {
        Some(optimizer) => merge_optimizer(ranks, &sharded, optimizer, into),
        None => Ok(()),
    }
}

/// Checks that a rank has the same sharded parameters as the first rank, and no other keys.
fn check_same_parameters(first: &RankState, sharded: &[Sharded], rank: &RankState) -> Result<(), Fault> {
    let other = &first.path;
    if let Some(key) = rank.keys.iter().find(|key| !first.model.contains_key(*key)) {
        let place = format!("`{key}`, which {} does not have,", other.display());
        return Err(Fault::unexpected(place, "in the files of all ranks or of none"));
    }
    let theirs = rank.sharded()?;
    let theirs: BTreeMap<&str, &Sharded> = theirs.iter().map(|same| (&same.key[..], same)).collect();
    for parameter in sharded {
        let Some(same) = theirs.get(&parameter.key[..]) else {
            return Err(not_in_rank(&parameter.key, other));
        };
        if same.shape != parameter.shape {
            return Err(other_shape(&parameter.key, &parameter.shape, &same.shape, other));
        }
        if same.parts != parameter.parts {
            let place = format!("what is flattened into `{}`", parameter.key);
            return Err(Fault::unexpected(place, "the same in the files of all ranks"));
        }
    }
    Ok(())
}

/// The tensors of all ranks, which must agree in shape and dtype.
fn same_in_all<'a>(
    ranks: &'a [RankState],
    name: &str,
    find: impl Fn(&'a RankState) -> Option<&'a LocalTensor>,
) -> Result<Vec<&'a LocalTensor>, Error> {
    let mut tensors: Vec<&LocalTensor> = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let (in_rank, other) = (|fault: Fault| Err(fault.in_file(&rank.path)), &ranks[0].path);
        let Some(found) = find(rank) else { return in_rank(not_in_rank(name, other)) };
        let first = tensors.first().copied().unwrap_or(found);
        if found.shape != first.shape {
            return in_rank(other_shape(name, &first.shape, &found.shape, other));
        }
        if found.dtype != first.dtype {
            return in_rank(other_type(name, first.dtype, found.dtype, other));
        }
        tensors.push(found);
    }
    Ok(tensors)
}

/// The shards of a parameter or of one of its states, which must hold all of its elements.
fn shards_of(
    ranks: &[RankState],
    parameter: &Sharded,
    name: &str,
    tensors: &[&LocalTensor],
) -> Result<Vec<Shard>, Error> {
    let got = &tensors[0].shape;
    // A one-dimensional shard is a run of the flattened parameter; otherwise it is rows of a parameter that was not
    // flattened.
    if got.len() != 1 && (got.len() != parameter.shape.len() || got.get(1..) != parameter.shape.get(1..)) {
        let path = &ranks[0].path;
        return Err(other_shape(name, &parameter.shape, got, path).in_file(path));
    }
    let mut shards = Vec::with_capacity(ranks.len());
    for (rank, tensor) in ranks.iter().zip(tensors) {
        shards.push(tensor.shard().ok_or_else(|| strided(name).in_file(&rank.path))?);
    }
    let len = len_of(&shards).unwrap_or(u64::MAX);
    if len < parameter.len {
        return Err(too_short(name, parameter.len, len).in_file(&ranks[0].path));
    }
    Ok(shards)
}

fn sharded_tensor(path: Vec<Key>, role: Role, dtype: TensorType, part: &Part, shards: &[Shard]) -> Tensor {
    let chunks = chunks_of(shards, part.range.clone(), dtype.size_bytes() as u64);
    Tensor { path, role, dtype, shape: part.shape.clone(), chunks }
}

fn merge_optimizer(
    ranks: &[RankState],
    sharded: &[Sharded],
    optimizer: &OptimizerState,
    into: &mut Checkpoint,
) -> Result<(), Error> {
    let checked = numbered(sharded, optimizer).and_then(|numbered| {
        check_shapes(&ranks[0], &numbered, optimizer)?;
        Ok(numbered)
    });
    let numbered = match checked {
        Ok(numbered) => numbered,
        Err(why) => {
            into.notes.push(format!("the optimizer is left out: {why}"));
            return Ok(());
        }
    };
    for (number, items) in &optimizer.states {
        let parameter = numbered[number];
        let put = |into: &mut Checkpoint, tensor| {
            put_tensor(into, tensor).map_err(|fault| fault.in_file(&ranks[0].path))
        };
        for (name, item) in items {
            let label = format!("optimizer.state.{number}.{name}");
            let find = |rank| state_tensor(rank, *number, name);
            for part in &parameter.parts {
                let path = state_path(&part.name, name);
                match item {
                    StateItem::Value(value) => put_value(into, path, value.clone()),
                    StateItem::Tensor(local) if local.shape.is_empty() => {
                        same_in_all(ranks, &label, find)?;
                        put(into, local.to_tensor(path, Role::Optimizer))?;
                    }
                    StateItem::Tensor(local) => {
                        let tensors = same_in_all(ranks, &label, find)?;
                        let shards = shards_of(ranks, parameter, &label, &tensors)?;
                        put(into, sharded_tensor(path, Role::Optimizer, local.dtype, part, &shards))?;
                    }
                }
            }
        }
    }
    put_groups(into, &optimizer.groups, |_, params| named(params, &numbered));
    Ok(())
}

fn state_tensor<'a>(rank: &'a RankState, number: u64, name: &str) -> Option<&'a LocalTensor> {
    let items = rank.optimizer.as_ref()?.states.get(&number)?;
    items.iter().find_map(|(found, item)| match item {
        StateItem::Tensor(tensor) if found == name => Some(tensor),
        _ => None,
    })
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
fn named(params: &Value, numbered: &BTreeMap<u64, &Sharded>) -> Vec<String> {
    let parameters = numbers_of(params).into_iter().filter_map(|number| numbered.get(&number));
    parameters.flat_map(|parameter| &parameter.parts).map(|part| part.name.clone()).collect()
}
