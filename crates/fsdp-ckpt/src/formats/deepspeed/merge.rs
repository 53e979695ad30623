//! Merges the flat copies of all ranks, by the layout of each stage.
//!
//! Training continues from these copies, so they take precedence over any other form of a parameter. [`super::place`]
//! locates the elements of each parameter.

use super::{
    optimizer::add_optimizer,
    parse::{FlatStates, ModelStates},
    place::Flats,
};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, element_count},
    error::{Error, Fault},
    formats::{
        merge::{self, Part, RankParts, Window},
        optimizer::put_tensor,
        rank_fault::{disagrees, not_in_rank, other_type},
    },
};

/// Adds the parameters, buffers and optimizer states of all ranks, which are in rank order.
pub(super) fn merge(
    flats: &[FlatStates],
    models: &[ModelStates],
    into: &mut Checkpoint,
) -> Result<(), Error> {
    check_ranks(flats, models)?;
    let (first, model) = (&flats[0], &models[0]);
    let held = flats.iter().map(|rank| {
        let groups = rank.groups.iter().enumerate();
        groups.map(|(index, tensor)| rank.flat(&format!("flat group {index}"), tensor)).collect()
    });
    let weights = Flats { ranks: flats, model, held: held.collect::<Result<_, Error>>()? };
    let put = weights.put(Role::Model, |name| vec![Key::Name(name.to_owned())], into);
    put.map_err(|fault| fault.in_file(&first.path))?;
    add_frozen(models, into)?;
    add_shared(model, into);
    for (name, local) in &model.module {
        let is_buffer = model.buffer_names.contains(name);
        // In stage 3, the module holds only placeholders of parameters.
        if is_buffer || (first.stage < 3 && !into.tensors.contains_key(name)) {
            let tensor = local.to_tensor(vec![Key::Name(name.clone())], Role::Model);
            put_tensor(into, tensor).map_err(|fault| fault.in_file(&first.path))?;
        }
    }
    add_optimizer(&weights, into)
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

/// Makes shared parameters two names for the same bytes. Other files hold the second one in 16 bits, or as these were widened.
pub(super) fn add_shared(model: &ModelStates, into: &mut Checkpoint) {
    for (name, other) in &model.shared {
        if let Some(tensor) = into.tensors.get(other) {
            let tensor = Tensor { path: vec![Key::Name(name.clone())], ..tensor.clone() };
            into.tensors.insert(name.clone(), tensor);
        }
    }
}

/// Adds frozen parameters, which have no flat copy; stage 3 partitions each of them over the ranks.
pub(super) fn add_frozen(models: &[ModelStates], into: &mut Checkpoint) -> Result<(), Error> {
    let model = &models[0];
    let mut ranks = Vec::with_capacity(models.len());
    for (rank, state) in models.iter().enumerate() {
        let part = |(name, shape): &(String, Vec<u64>)| {
            let fragment = state.frozen_fragments.get(name).ok_or_else(|| not_in_rank(name, &model.path))?;
            let len = element_count(shape);
            let len =
                len.ok_or_else(|| Fault::unexpected(format!("the size of `{name}`"), "less than 2^64"))?;
            let window = Window { path: vec![Key::Name(name.clone())], shape: shape.clone(), range: 0..len };
            Part::run(name, Role::Model, fragment, (rank, models.len()), [window].into())
        };
        let parts = model.frozen_shapes.iter().map(part).collect::<Result<_, _>>();
        let parts = parts.map_err(|fault| fault.in_file(&state.path))?;
        ranks.push(RankParts { path: state.path.clone(), parts });
    }
    merge::merge(&ranks, into)
}
