//! The optimizer states, which have the layout of the flat copies.
//!
//! States with another layout are left out with a note; the weights can still be read.

use super::{
    merge::put,
    parse::{FlatStates, ModelStates},
    place::place,
};
use crate::{
    checkpoint::{Checkpoint, Role, Tensor},
    error::Error,
    formats::{
        optimizer::{StateItem, put_groups, put_value, state_path},
        rank_fault::not_in_rank,
        shards::Shard,
    },
    safetensors::TensorType,
};

/// Adds the optimizer states that have the layout of the flat copies.
pub(super) fn add_optimizer(
    flats: &[FlatStates],
    model: &ModelStates,
    groups: &[Vec<Shard>],
    into: &mut Checkpoint,
) -> Result<(), Error> {
    let first = &flats[0];
    if first.states.is_empty() {
        return Ok(());
    }
    let Some(empty) = first.states.get(&0) else {
        into.notes.push("the optimizer is left out: it has no state of the first flat group".to_owned());
        return Ok(());
    };
    for (name, item) in empty {
        match item {
            StateItem::Tensor(tensor) if !tensor.shape.is_empty() => match flat_state(flats, groups, name)? {
                Ok((dtype, state)) => {
                    for placed in place(first, model, &state, dtype)? {
                        let path = state_path(placed.name, name);
                        let (shape, chunks) = (placed.shape.to_vec(), placed.chunks);
                        put(into, first, Tensor { path, role: Role::Optimizer, dtype, shape, chunks })?;
                    }
                }
                Err(why) => into.notes.push(format!("the optimizer's `{name}` is left out: {why}")),
            },
            _ => add_scalar(first, model, groups, name, into)?,
        }
    }
    put_groups(into, &first.settings, |group, _| {
        let parameters = model.param_shapes.get(group).into_iter().flatten();
        parameters.map(|(name, _)| name.clone()).collect()
    });
    Ok(())
}

fn item<'a>(rank: &'a FlatStates, group: usize, name: &str) -> Option<&'a StateItem> {
    let items = rank.states.get(&(group as u64))?;
    items.iter().find(|(found, _)| found == name).map(|(_, item)| item)
}

/// A state of all ranks and groups as flat tensors, or the reason why it does not have this layout.
#[expect(clippy::type_complexity, reason = "damage is an error, another layout a note")]
fn flat_state(
    flats: &[FlatStates],
    groups: &[Vec<Shard>],
    name: &str,
) -> Result<Result<(TensorType, Vec<Vec<Shard>>), String>, Error> {
    let mut dtype = None;
    let mut all = Vec::with_capacity(flats.len());
    for (rank, groups) in flats.iter().zip(groups) {
        let mut state = Vec::with_capacity(groups.len());
        for (group, flat) in groups.iter().enumerate() {
            let label = format!("{name} of flat group {group}");
            let Some(StateItem::Tensor(tensor)) = item(rank, group, name) else {
                return Err(not_in_rank(&label, &flats[0].path).in_file(&rank.path));
            };
            // The last rank's padding is cut from the weights but not from the states.
            let padded = rank.paddings.get(group).and_then(|padding| flat.len.checked_add(*padding));
            let is_as_long = tensor.len() == flat.len || Some(tensor.len()) == padded;
            if !is_as_long || *dtype.get_or_insert(tensor.dtype) != tensor.dtype {
                return Ok(Err(format!("{} has it in a different length or type", rank.path.display())));
            }
            state.push(Shard { len: flat.len, ..rank.shard(&label, tensor)? });
        }
        all.push(state);
    }
    Ok(dtype.map(|dtype| (dtype, all)).ok_or_else(|| "there are no flat groups".to_owned()))
}

/// Adds a scalar state of a flat group to each of the group's parameters.
fn add_scalar(
    first: &FlatStates,
    model: &ModelStates,
    groups: &[Vec<Shard>],
    name: &str,
    into: &mut Checkpoint,
) -> Result<(), Error> {
    let dtype = first.groups.first().map_or(TensorType::F32, |group| group.dtype);
    for placed in place(first, model, groups, dtype)? {
        let path = state_path(placed.name, name);
        match item(first, placed.group, name) {
            Some(StateItem::Tensor(tensor)) => put(into, first, tensor.to_tensor(path, Role::Optimizer))?,
            Some(StateItem::Value(value)) => put_value(into, path, value.clone()),
            None => into.notes.push(format!("flat group {} has no `{name}`", placed.group)),
        }
    }
    Ok(())
}
