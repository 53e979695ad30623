//! The files of all ranks put together: where each parameter, buffer and optimizer state lies.
//!
//! The optimizer numbers its parameters; number `i` is the `i`-th shard in the order of the file. Where the
//! counts or shapes say otherwise (frozen parameters, optimizers with factored states), the optimizer is left
//! out with a note, since its names would be guesses.

use std::collections::BTreeMap;

use super::rank_state::{OptimizerState, Part, RankState, Sharded, StateItem, clean, split_key};
use crate::{
    checkpoint::{Checkpoint, Key, Object, Role, Tensor, Value, join},
    error::{Error, RankFault},
    formats::{
        local::LocalTensor,
        shards::{Shard, chunks_of, len_of},
    },
    safetensors::TensorType,
};

/// Fills the model and the optimizer of `ranks`, which are in order and whole, into a checkpoint.
pub(super) fn merge(ranks: &[RankState], into: &mut Checkpoint) -> Result<(), Error> {
    let first = &ranks[0];
    let sharded = first.sharded().map_err(|fault| in_file(first, fault))?;
    for rank in &ranks[1..] {
        check_same_parameters(first, &sharded, rank).map_err(|fault| in_file(rank, fault))?;
    }
    for parameter in &sharded {
        let tensors = same_in_all(ranks, &parameter.key, |rank| rank.model.get(&parameter.key))?;
        let shards = shards_of(ranks, parameter, &parameter.key, &tensors)?;
        for part in &parameter.parts {
            let path = vec![Key::Name(part.name.clone())];
            let tensor = sharded_tensor(path, Role::Model, tensors[0].dtype, part, &shards);
            insert(into, tensor).map_err(|fault| in_file(first, fault))?;
        }
    }
    for (key, buffer) in first.model.iter().filter(|(key, _)| split_key(key).is_none()) {
        same_in_all(ranks, key, |rank| rank.model.get(key))?;
        let tensor = buffer.to_tensor(vec![Key::Name(clean(key))], Role::Model);
        insert(into, tensor).map_err(|fault| in_file(first, fault))?;
    }
    match &first.optimizer {
        Some(optimizer) => merge_optimizer(ranks, &sharded, optimizer, into),
        None => Ok(()),
    }
}

fn in_file(rank: &RankState, fault: RankFault) -> Error {
    Error::Ranks { path: rank.path.clone(), fault }
}

/// Checks that a rank cuts the same parameters, and has nothing that the first rank has not.
fn check_same_parameters(first: &RankState, sharded: &[Sharded], rank: &RankState) -> Result<(), RankFault> {
    let other = first.path.clone();
    if let Some(key) = rank.keys.iter().find(|key| !first.model.contains_key(*key)) {
        let place = format!("`{key}`, which {} does not have,", other.display());
        return Err(RankFault::Unexpected { place, expected: "in the files of all ranks or of none" });
    }
    let theirs = rank.sharded()?;
    let theirs: BTreeMap<&str, &Sharded> = theirs.iter().map(|same| (&same.key[..], same)).collect();
    for parameter in sharded {
        let Some(same) = theirs.get(&parameter.key[..]) else {
            return Err(RankFault::NotInRank { tensor: parameter.key.clone(), other });
        };
        if same.shape != parameter.shape {
            let (expected, got) = (parameter.shape.clone(), same.shape.clone());
            return Err(RankFault::Shape { tensor: parameter.key.clone(), expected, got, other });
        }
        if same.parts != parameter.parts {
            let place = format!("what is flattened into `{}`", parameter.key);
            return Err(RankFault::Unexpected { place, expected: "the same in the files of all ranks" });
        }
    }
    Ok(())
}

/// The tensor of each rank, all of one shape and type.
fn same_in_all<'a>(
    ranks: &'a [RankState],
    name: &str,
    find: impl Fn(&'a RankState) -> Option<&'a LocalTensor>,
) -> Result<Vec<&'a LocalTensor>, Error> {
    let mut tensors: Vec<&LocalTensor> = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let (tensor, other) = (name.to_owned(), ranks[0].path.clone());
        let Some(found) = find(rank) else {
            return Err(in_file(rank, RankFault::NotInRank { tensor, other }));
        };
        let first = tensors.first().copied().unwrap_or(found);
        if found.shape != first.shape {
            let (expected, got) = (first.shape.clone(), found.shape.clone());
            return Err(in_file(rank, RankFault::Shape { tensor, expected, got, other }));
        }
        if found.dtype != first.dtype {
            let (expected, got) = (first.dtype, found.dtype);
            return Err(in_file(rank, RankFault::Type { tensor, expected, got, other }));
        }
        tensors.push(found);
    }
    Ok(tensors)
}

/// The shards of a parameter or of a state of it, which together hold all its elements.
fn shards_of(
    ranks: &[RankState],
    parameter: &Sharded,
    name: &str,
    tensors: &[&LocalTensor],
) -> Result<Vec<Shard>, Error> {
    let got = &tensors[0].shape;
    // One dimension is a run of the flattened parameter. More are rows of a parameter that was not flattened.
    if got.len() != 1 && (got.len() != parameter.shape.len() || got.get(1..) != parameter.shape.get(1..)) {
        let (tensor, expected, got) = (name.to_owned(), parameter.shape.clone(), got.clone());
        let other = ranks[0].path.clone();
        return Err(in_file(&ranks[0], RankFault::Shape { tensor, expected, got, other }));
    }
    let mut shards = Vec::with_capacity(ranks.len());
    for (rank, tensor) in ranks.iter().zip(tensors) {
        let strided = || in_file(rank, RankFault::Strided { tensor: name.to_owned() });
        shards.push(tensor.shard().ok_or_else(strided)?);
    }
    let len = len_of(&shards).unwrap_or(u64::MAX);
    if len < parameter.len {
        let fault = RankFault::TooShort { tensor: name.to_owned(), expected: parameter.len, got: len };
        return Err(in_file(&ranks[0], fault));
    }
    Ok(shards)
}

fn sharded_tensor(path: Vec<Key>, role: Role, dtype: TensorType, part: &Part, shards: &[Shard]) -> Tensor {
    let chunks = chunks_of(shards, part.range.clone(), dtype.size_bytes() as u64);
    Tensor { path, role, dtype, shape: part.shape.clone(), chunks }
}

fn insert(into: &mut Checkpoint, tensor: Tensor) -> Result<(), RankFault> {
    let name = join(&tensor.path);
    if into.tensors.insert(name.clone(), tensor).is_some() {
        return Err(RankFault::SameName { tensor: name });
    }
    Ok(())
}

fn merge_optimizer(
    ranks: &[RankState],
    sharded: &[Sharded],
    optimizer: &OptimizerState,
    into: &mut Checkpoint,
) -> Result<(), Error> {
    if let Err(why) = check_numbers(&ranks[0], sharded, optimizer) {
        into.notes.push(format!("the optimizer is left out: {why}"));
        return Ok(());
    }
    for (number, items) in &optimizer.states {
        let parameter = &sharded[*number as usize];
        for (name, item) in items {
            let label = format!("optimizer.state.{number}.{name}");
            let find = |rank| state_tensor(rank, *number, name);
            for part in &parameter.parts {
                let path = optimizer_path(&["state", &part.name, name]);
                match item {
                    StateItem::Value(value) => put_value(into, path, value.clone()),
                    StateItem::Tensor(local) if local.shape.is_empty() => {
                        same_in_all(ranks, &label, find)?;
                        put(into, ranks, local.to_tensor(path, Role::Optimizer))?;
                    }
                    StateItem::Tensor(local) => {
                        let tensors = same_in_all(ranks, &label, find)?;
                        let shards = shards_of(ranks, parameter, &label, &tensors)?;
                        put(into, ranks, sharded_tensor(path, Role::Optimizer, local.dtype, part, &shards))?;
                    }
                }
            }
        }
    }
    for (index, settings) in optimizer.groups.iter().enumerate() {
        for (key, value) in settings {
            let mut path = optimizer_path(&["param_groups"]);
            path.extend([Key::Index(index as u64), Key::Name(key.clone())]);
            let value = if key == "params" { named(value, sharded) } else { value.clone() };
            put_value(into, path, value);
        }
    }
    Ok(())
}

fn put(into: &mut Checkpoint, ranks: &[RankState], tensor: Tensor) -> Result<(), Error> {
    insert(into, tensor).map_err(|fault| in_file(&ranks[0], fault))
}

fn put_value(into: &mut Checkpoint, path: Vec<Key>, value: Value) {
    into.values.insert(join(&path), Object { path, role: Role::Optimizer, value });
}

fn optimizer_path(steps: &[&str]) -> Vec<Key> {
    ["optim"].iter().chain(steps).map(|step| Key::Name((*step).to_owned())).collect()
}

fn state_tensor<'a>(rank: &'a RankState, number: u64, name: &str) -> Option<&'a LocalTensor> {
    let items = rank.optimizer.as_ref()?.states.get(&number)?;
    items.iter().find_map(|(found, item)| match item {
        StateItem::Tensor(tensor) if found == name => Some(tensor),
        _ => None,
    })
}

/// Checks that the numbers of the optimizer can be the shards in the order of the file.
fn check_numbers(first: &RankState, sharded: &[Sharded], optimizer: &OptimizerState) -> Result<(), String> {
    let count: usize = optimizer.groups.iter().map(|group| numbers_of(group).len()).sum();
    if count != sharded.len() {
        return Err(format!("it has {count} parameters where the model has {} shards", sharded.len()));
    }
    for (number, items) in &optimizer.states {
        let Some(parameter) = sharded.get(*number as usize) else {
            return Err(format!(
                "it has a state of parameter {number}, but the model has {} shards",
                sharded.len()
            ));
        };
        let shape = first.model.get(&parameter.key).map(|tensor| &tensor.shape);
        for (name, item) in items {
            if let StateItem::Tensor(tensor) = item
                && !tensor.shape.is_empty()
                && Some(&tensor.shape) != shape
            {
                return Err(format!(
                    "its state {number}.{name} has another shape than its parameter's shard"
                ));
            }
        }
    }
    Ok(())
}

/// The numbers in `params` of a group.
fn numbers_of(group: &[(String, Value)]) -> Vec<u64> {
    let params = group.iter().find(|(key, _)| key == "params").map(|(_, value)| value);
    match params {
        Some(Value::List(items) | Value::Tuple(items)) => items
            .iter()
            .filter_map(|item| match item {
                Value::Int(number) => u64::try_from(*number).ok(),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Numbers of parameters as names.
fn named(params: &Value, sharded: &[Sharded]) -> Value {
    let numbers = numbers_of(&[("params".to_owned(), params.clone())]);
    let parameters = numbers.iter().filter_map(|number| sharded.get(*number as usize));
    let names = parameters.flat_map(|parameter| &parameter.parts).map(|part| Value::Str(part.name.clone()));
    Value::List(names.collect())
}
