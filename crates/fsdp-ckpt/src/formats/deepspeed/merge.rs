//! Merges the flat copies of all ranks, by the layout of each stage.
//!
//! Training continues from these copies, so they take precedence over any other form of a parameter. [`super::place`]
//! locates the elements of each parameter.

use super::{
    optimizer::add_optimizer,
    parse::{FlatStates, ModelStates},
    place::{len_checked, place},
};
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Role, Tensor},
    error::{Error, Fault},
    formats::{
        optimizer::put_tensor,
        rank_fault::{disagrees, not_in_rank, other_type, strided, too_short},
        shards::{Shard, chunks_of, len_of},
    },
    safetensors::TensorType,
};

/// Adds the parameters, buffers and optimizer states of all ranks, which are in rank order.
pub(super) fn merge(
    flats: &[FlatStates],
    models: &[ModelStates],
    into: &mut Checkpoint,
) -> Result<(), Error> {
    check_ranks(flats, models)?;
    let (first, model) = (&flats[0], &models[0]);
    let groups = flats.iter().map(|rank| {
        let shards = rank.groups.iter().enumerate();
        shards.map(|(index, tensor)| rank.shard(&format!("flat group {index}"), tensor)).collect()
    });
    let groups = groups.collect::<Result<Vec<Vec<Shard>>, Error>>()?;
    let dtype = first.groups.first().map_or(TensorType::F32, |group| group.dtype);
    for placed in place(first, model, &groups, dtype)? {
        put(into, first, model_tensor(placed.name, placed.shape, dtype, placed.chunks))?;
    }
    add_frozen(first, models, into)?;
    // The module holds a shared parameter in 16 bits; its other name has full precision.
    for (name, other) in &model.shared {
        if let Some(tensor) = into.tensors.get(other).filter(|_| !into.tensors.contains_key(name)) {
            let tensor = Tensor { path: vec![Key::Name(name.clone())], ..tensor.clone() };
            into.tensors.insert(name.clone(), tensor);
        }
    }
    for (name, local) in &model.module {
        let is_buffer = model.buffer_names.contains(name);
        // In stage 3, the module holds only placeholders of parameters.
        if is_buffer || (first.stage < 3 && !into.tensors.contains_key(name)) {
            put(into, first, local.to_tensor(vec![Key::Name(name.clone())], Role::Model))?;
        }
    }
    add_optimizer(flats, model, &groups, into)
}

pub(super) fn put(into: &mut Checkpoint, first: &FlatStates, tensor: Tensor) -> Result<(), Error> {
    put_tensor(into, tensor).map_err(|fault| fault.in_file(&first.path))
}

fn model_tensor(name: &str, shape: &[u64], dtype: TensorType, chunks: Vec<Chunk>) -> Tensor {
    Tensor { path: vec![Key::Name(name.to_owned())], role: Role::Model, dtype, shape: shape.to_vec(), chunks }
}

/// Checks that the rank files belong to one checkpoint and are complete.
fn check_ranks(flats: &[FlatStates], models: &[ModelStates]) -> Result<(), Error> {
    let first = &flats[0];
    for rank in flats {
        let in_rank = |fault: Fault| Err(fault.in_file(&rank.path));
        if rank.world_size != flats.len() {
            let because = ", the number of files; files of ranks may be missing";
            return in_rank(disagrees("number of partitions", flats.len(), rank.world_size, because));
        }
        if rank.stage != first.stage {
            return in_rank(disagrees("stage", first.stage, rank.stage, " by the first rank's file"));
        }
        let lens = |rank: &FlatStates| rank.groups.iter().map(|group| group.len()).collect::<Vec<_>>();
        let (expected, got) = (lens(first), lens(rank));
        // In stages 1 and 2, the last rank's padding may have been cut off.
        if expected.len() != got.len() || (first.stage == 3 && expected != got) {
            let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
            let because = " by the first rank's file";
            return in_rank(disagrees("list of lengths of flat groups", expected, got, because));
        }
        let mut types = rank.groups.iter().map(|group| group.dtype);
        if let Some(got) = types.find(|dtype| Some(dtype) != first.groups.first().map(|group| &group.dtype)) {
            let expected = first.groups.first().map_or(got, |group| group.dtype);
            return in_rank(other_type("flat groups", expected, got, &first.path));
        }
    }
    let expected = if first.stage == 3 { flats.len() } else { 1 };
    if models.len() != expected {
        let because = match first.stage {
            3 => ", the number of files of the optimizer",
            _ => "; models split by tensor parallelism are not supported",
        };
        let fault = disagrees("number of files of the model", expected, models.len(), because);
        return Err(fault.in_file(&models[0].path));
    }
    for rank in &models[1..] {
        if (&rank.param_shapes, &rank.frozen_shapes) != (&models[0].param_shapes, &models[0].frozen_shapes) {
            let place = "the list of names and shapes of parameters";
            return Err(Fault::unexpected(place, "the same in the files of all ranks").in_file(&rank.path));
        }
    }
    Ok(())
}

/// Adds frozen parameters, which have no flat copy; stage 3 partitions each of them over the ranks.
fn add_frozen(first: &FlatStates, models: &[ModelStates], into: &mut Checkpoint) -> Result<(), Error> {
    let model = &models[0];
    for (name, shape) in &model.frozen_shapes {
        let mut shards = Vec::with_capacity(models.len());
        let mut dtype = None;
        for rank in models {
            let in_rank = |fault: Fault| fault.in_file(&rank.path);
            let fragment = rank.frozen_fragments.get(name);
            let fragment = fragment.ok_or_else(|| in_rank(not_in_rank(name, &model.path)))?;
            let expected = *dtype.get_or_insert(fragment.dtype);
            if expected != fragment.dtype {
                return Err(in_rank(other_type(name, expected, fragment.dtype, &model.path)));
            }
            shards.push(fragment.shard().ok_or_else(|| in_rank(strided(name)))?);
        }
        let len = len_checked(name, shape).map_err(|fault| fault.in_file(&model.path))?;
        let held = len_of(&shards).unwrap_or(u64::MAX);
        if held < len {
            return Err(too_short(name, len, held).in_file(&model.path));
        }
        let dtype = dtype.expect("there is at least one file of the model");
        let chunks = chunks_of(&shards, 0..len, dtype.size_bytes() as u64);
        put(into, first, model_tensor(name, shape, dtype, chunks))?;
    }
    Ok(())
}
