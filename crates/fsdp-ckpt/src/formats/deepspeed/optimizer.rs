//! The optimizer states, which have the layout of the flat copies.
//!
//! States with another layout are left out with a note; the weights can still be read.

use super::{parse::FlatStates, place::Flats};
use crate::{
    checkpoint::{Checkpoint, Role, Value},
    error::{Error, Fault},
    formats::{
        local::LocalTensor,
        optimizer::{StateItem, put_groups, put_tensor, put_value, state_path},
        rank_fault::not_in_rank,
    },
};

/// Adds the optimizer states that have the layout of the flat copies.
pub(super) fn add_optimizer(weights: &Flats<'_>, into: &mut Checkpoint) -> Result<(), Error> {
    let (first, model) = (&weights.ranks[0], weights.model);
    if first.states.is_empty() {
        return Ok(());
    }
    let Some(empty) = first.states.get(&0) else {
        into.notes.push("the optimizer is left out: it has no state of the first flat group".to_owned());
        return Ok(());
    };
    for (name, item) in empty {
        match item {
            StateItem::Tensor(tensor) if !tensor.shape.is_empty() => match flat_state(weights, name)? {
                Ok(held) => {
                    let state = Flats { held, ..*weights };
                    let put = state.put(Role::Optimizer, |parameter| state_path(parameter, name), into);
                    put.map_err(|fault| fault.in_file(&first.path))?;
                }
                Err(why) => into.notes.push(format!("the optimizer's `{name}` is left out: {why}")),
            },
            _ => add_scalar(weights, name, into).map_err(|fault| fault.in_file(&first.path))?,
        }
    }
    put_groups(into, &first.settings, |group, _| {
        let parameters = model.param_shapes.get(group).into_iter().flatten();
        Value::List(parameters.map(|(name, _)| Value::Str(name.clone())).collect())
    });
    Ok(())
}

fn item<'a>(rank: &'a FlatStates, group: usize, name: &str) -> Option<&'a StateItem> {
    let items = rank.states.get(&(group as u64))?;
    items.iter().find(|(found, _)| found == name).map(|(_, item)| item)
}

/// A state of all ranks and groups as flat tensors, or the reason why it does not have this layout: damage is an error,
/// another layout a note.
fn flat_state(weights: &Flats<'_>, name: &str) -> Result<Result<Vec<Vec<LocalTensor>>, String>, Error> {
    let mut dtype = None;
    let mut all = Vec::with_capacity(weights.ranks.len());
    for (rank, groups) in weights.ranks.iter().zip(&weights.held) {
        let mut state = Vec::with_capacity(groups.len());
        for (group, flat) in groups.iter().enumerate() {
            let label = format!("{name} of flat group {group}");
            let Some(StateItem::Tensor(tensor)) = item(rank, group, name) else {
                return Err(not_in_rank(&label, &weights.ranks[0].path).in_file(&rank.path));
            };
            // The last rank's padding is cut from the weights but not from the states.
            let padded = rank.paddings.get(group).and_then(|padding| flat.len().checked_add(*padding));
            let is_as_long = tensor.len() == flat.len() || Some(tensor.len()) == padded;
            if !is_as_long || *dtype.get_or_insert(tensor.dtype) != tensor.dtype {
                return Ok(Err(format!("{} has it in a different length or type", rank.path.display())));
            }
            state.push(rank.flat(&label, tensor)?.run(0..flat.len()));
        }
        all.push(state);
    }
    Ok(Ok(all))
}

/// Adds a scalar state of a flat group to each of the group's parameters.
fn add_scalar(weights: &Flats<'_>, name: &str, into: &mut Checkpoint) -> Result<(), Fault> {
    for located in weights.located()? {
        let path = state_path(located.name, name);
        match item(&weights.ranks[0], located.group, name) {
            Some(StateItem::Tensor(tensor)) => put_tensor(into, tensor.to_tensor(path, Role::Optimizer))?,
            Some(StateItem::Value(value)) => put_value(into, path, value.clone()),
            None => into.notes.push(format!("flat group {} has no `{name}`", located.group)),
        }
    }
    Ok(())
}
