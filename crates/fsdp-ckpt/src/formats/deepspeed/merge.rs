//! The flat copies of all ranks put together, by the layout of each stage.
//!
//! Stage 3 cuts each parameter in as many pieces as there are ranks, the last ones shorter or empty and padded,
//! and a rank's pieces of successive parameters follow one another through its groups. Stages 1 and 2 cut each
//! group as a whole: the groups of the ranks, one after another, hold parameter after parameter.

use std::ops::Range;

use super::parse::{FlatStates, ModelStates, Shapes, StateItem};
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Object, Role, Tensor, Value, element_count, join},
    error::{Error, RankFault},
    formats::shards::{Shard, chunks_of, len_of},
    safetensors::TensorType,
};

/// A parameter, the flat group that it begins in, and where its elements are.
struct Placed<'a> {
    name: &'a str,
    shape: &'a [u64],
    group: usize,
    chunks: Vec<Chunk>,
}

/// Adds the parameters, buffers and states of the optimizer of all ranks, which are in order.
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
    for (name, local) in &model.module {
        let is_buffer = model.buffer_names.contains(name);
        // From stage 3 on, what the module holds of parameters are placeholders.
        if is_buffer || (first.stage < 3 && !into.tensors.contains_key(name)) {
            put(into, first, local.to_tensor(vec![Key::Name(name.clone())], Role::Model))?;
        }
    }
    for (name, other) in &model.shared {
        if let Some(tensor) = into.tensors.get(other).filter(|_| !into.tensors.contains_key(name)) {
            let tensor = Tensor { path: vec![Key::Name(name.clone())], ..tensor.clone() };
            into.tensors.insert(name.clone(), tensor);
        }
    }
    add_optimizer(flats, model, &groups, into)
}

fn fault(path: &std::path::Path, fault: RankFault) -> Error {
    Error::Ranks { path: path.to_owned(), fault }
}

fn put(into: &mut Checkpoint, first: &FlatStates, tensor: Tensor) -> Result<(), Error> {
    let name = join(&tensor.path);
    match into.tensors.insert(name.clone(), tensor) {
        None => Ok(()),
        Some(_) => Err(fault(&first.path, RankFault::SameName { tensor: name })),
    }
}

fn model_tensor(name: &str, shape: &[u64], dtype: TensorType, chunks: Vec<Chunk>) -> Tensor {
    Tensor { path: vec![Key::Name(name.to_owned())], role: Role::Model, dtype, shape: shape.to_vec(), chunks }
}

/// Checks that the files of all ranks are of one checkpoint, and all there.
fn check_ranks(flats: &[FlatStates], models: &[ModelStates]) -> Result<(), Error> {
    let first = &flats[0];
    let disagrees = |path: &std::path::Path, what, expected: String, got: String, because| {
        Err(fault(path, RankFault::Disagrees { what, expected, got, because }))
    };
    for rank in flats {
        if rank.world_size != flats.len() {
            let (expected, got) = (flats.len().to_string(), rank.world_size.to_string());
            let because = ", the number of files; files of ranks may be missing";
            return disagrees(&rank.path, "number of partitions", expected, got, because);
        }
        if rank.stage != first.stage {
            let (expected, got) = (first.stage.to_string(), rank.stage.to_string());
            return disagrees(&rank.path, "stage", expected, got, " by the first rank's file");
        }
        let lens = |rank: &FlatStates| rank.groups.iter().map(|group| group.len()).collect::<Vec<_>>();
        let (expected, got) = (lens(first), lens(rank));
        // In stages 1 and 2, padding of the last rank may have been cut.
        if expected.len() != got.len() || (first.stage == 3 && expected != got) {
            let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
            return disagrees(
                &rank.path,
                "list of lengths of flat groups",
                expected,
                got,
                " by the first rank's file",
            );
        }
        let mut types = rank.groups.iter().map(|group| group.dtype);
        if let Some(got) = types.find(|dtype| Some(dtype) != first.groups.first().map(|group| &group.dtype)) {
            let expected = first.groups.first().map_or(got, |group| group.dtype);
            let (tensor, other) = ("flat groups".to_owned(), first.path.clone());
            return Err(fault(&rank.path, RankFault::Type { tensor, expected, got, other }));
        }
    }
    let expected = if first.stage == 3 { flats.len() } else { 1 };
    if models.len() != expected {
        let because = match first.stage {
            3 => ", the number of files of the optimizer",
            _ => "; models that are cut by tensor parallelism are not supported",
        };
        let (expected, got) = (expected.to_string(), models.len().to_string());
        return disagrees(&models[0].path, "number of files of the model", expected, got, because);
    }
    for rank in &models[1..] {
        if (&rank.param_shapes, &rank.frozen_shapes) != (&models[0].param_shapes, &models[0].frozen_shapes) {
            let place = "the list of names and shapes of parameters".to_owned();
            let expected = "the same in the files of all ranks";
            return Err(fault(&rank.path, RankFault::Unexpected { place, expected }));
        }
    }
    Ok(())
}

/// The parameters with their places in flat tensors, which are given by rank and group.
fn place<'a>(
    first: &FlatStates,
    model: &'a ModelStates,
    flats: &[Vec<Shard>],
    dtype: TensorType,
) -> Result<Vec<Placed<'a>>, Error> {
    let size = dtype.size_bytes() as u64;
    let placed = if first.stage == 3 {
        place_cut_parameters(&model.param_shapes.concat_names(), flats, size)
    } else {
        place_cut_groups(&model.param_shapes, flats, size)
    };
    placed.map_err(|found| fault(&first.path, found))
}

/// Names and shapes of all groups in one list.
trait ConcatNames {
    fn concat_names(&self) -> Vec<(&str, &[u64])>;
}

impl ConcatNames for Vec<Shapes> {
    fn concat_names(&self) -> Vec<(&str, &[u64])> {
        self.iter().flatten().map(|(name, shape)| (&name[..], &shape[..])).collect()
    }
}

fn len_checked(name: &str, shape: &[u64]) -> Result<u64, RankFault> {
    element_count(shape).ok_or_else(|| RankFault::Unexpected {
        place: format!("the size of `{name}`"),
        expected: "less than 2^64",
    })
}

fn too_short(name: &str, expected: u64, got: u64) -> RankFault {
    RankFault::TooShort { tensor: name.to_owned(), expected, got }
}

fn left_over(what: String) -> RankFault {
    RankFault::Unexpected {
        place: what,
        expected: "used by parameters; names and weights do not belong together",
    }
}

/// Stage 3: every parameter is cut over the ranks.
fn place_cut_parameters<'a>(
    parameters: &[(&'a str, &'a [u64])],
    flats: &[Vec<Shard>],
    size: u64,
) -> Result<Vec<Placed<'a>>, RankFault> {
    let world = flats.len() as u64;
    let held = len_of(&flats[0]).unwrap_or(u64::MAX);
    let mut placed = Vec::with_capacity(parameters.len());
    let mut start = 0u64;
    for &(name, shape) in parameters {
        let len = len_checked(name, shape)?;
        let each = len.div_ceil(world);
        let end = start.checked_add(each).filter(|end| *end <= held);
        let end = end.ok_or_else(|| too_short(name, start.saturating_add(each), held))?;
        let pieces: Vec<Shard> = flats.iter().flat_map(|groups| runs(groups, start..end, size)).collect();
        let group = group_at(&flats[0], start);
        placed.push(Placed { name, shape, group, chunks: chunks_of(&pieces, 0..len, size) });
        start = end;
    }
    if start != held {
        return Err(left_over(format!("the last {} elements of its flat groups", held - start)));
    }
    Ok(placed)
}

/// The runs of a rank's flat tensors that a range of their sequence lies in.
fn runs(flats: &[Shard], range: Range<u64>, size: u64) -> Vec<Shard> {
    let run = |chunk: Chunk| Shard {
        source: chunk.source,
        offset: chunk.offset,
        len: chunk.region.len().expect("a run of a file can be counted"),
    };
    chunks_of(flats, range, size).into_iter().map(run).collect()
}

/// The flat tensor that an element of their sequence is in.
fn group_at(flats: &[Shard], element: u64) -> usize {
    let mut end = 0;
    let ends = flats.iter().map(|flat| {
        end += flat.len;
        end
    });
    let last = flats.len().saturating_sub(1);
    ends.take(last).filter(|end| *end <= element).count()
}

/// Stages 1 and 2: every group is cut over the ranks.
fn place_cut_groups<'a>(
    groups: &'a [Shapes],
    flats: &[Vec<Shard>],
    size: u64,
) -> Result<Vec<Placed<'a>>, RankFault> {
    let world = flats.len() as u64;
    if groups.len() != flats[0].len() {
        let place = format!("the number of flat groups, {},", flats[0].len());
        return Err(RankFault::Unexpected { place, expected: "the number of groups of parameters" });
    }
    let mut placed = Vec::new();
    for (group, parameters) in groups.iter().enumerate() {
        let shards: Vec<Shard> = flats.iter().map(|flats| flats[group]).collect();
        let held = len_of(&shards).unwrap_or(u64::MAX);
        let mut start = 0u64;
        for (name, shape) in parameters {
            let len = len_checked(name, shape)?;
            let end = start.checked_add(len).filter(|end| *end <= held);
            let end = end.ok_or_else(|| too_short(name, start.saturating_add(len), held))?;
            placed.push(Placed { name, shape, group, chunks: chunks_of(&shards, start..end, size) });
            start = end;
        }
        // Groups are padded to a multiple of twice the number of ranks.
        if held - start >= 2 * world {
            return Err(left_over(format!("the last {} elements of flat group {group}", held - start)));
        }
    }
    Ok(placed)
}

/// Parameters that are not trained have no flat copy; stage 3 cuts each of them over the ranks.
fn add_frozen(first: &FlatStates, models: &[ModelStates], into: &mut Checkpoint) -> Result<(), Error> {
    let model = &models[0];
    for (name, shape) in &model.frozen_shapes {
        let mut shards = Vec::with_capacity(models.len());
        let mut dtype = None;
        for rank in models {
            let other = model.path.clone();
            let fragment = rank.frozen_fragments.get(name).ok_or_else(|| {
                fault(&rank.path, RankFault::NotInRank { tensor: name.clone(), other: other.clone() })
            })?;
            let expected = *dtype.get_or_insert(fragment.dtype);
            if expected != fragment.dtype {
                let (tensor, got) = (name.clone(), fragment.dtype);
                return Err(fault(&rank.path, RankFault::Type { tensor, expected, got, other }));
            }
            let strided = || fault(&rank.path, RankFault::Strided { tensor: name.clone() });
            shards.push(fragment.shard().ok_or_else(strided)?);
        }
        let len = len_checked(name, shape).map_err(|found| fault(&model.path, found))?;
        let held = len_of(&shards).unwrap_or(u64::MAX);
        if held < len {
            return Err(fault(&model.path, too_short(name, len, held)));
        }
        let dtype = dtype.expect("there is at least one file of the model");
        let chunks = chunks_of(&shards, 0..len, dtype.size_bytes() as u64);
        put(into, first, model_tensor(name, shape, dtype, chunks))?;
    }
    Ok(())
}

/// Adds the states of the optimizer, if they are laid out as the flat copies are.
fn add_optimizer(
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
    for (index, settings) in first.settings.iter().enumerate() {
        let names = model.param_shapes.get(index).into_iter().flatten();
        let names = Value::List(names.map(|(name, _)| Value::Str(name.clone())).collect());
        for (key, value) in settings {
            let value = if key == "params" { &names } else { value };
            let steps = ["optim", "param_groups"].map(|step| Key::Name(step.to_owned()));
            let path = [&steps[..], &[Key::Index(index as u64), Key::Name(key.clone())]].concat();
            let object = Object { path, role: Role::Optimizer, value: value.clone() };
            into.values.insert(join(&object.path), object);
        }
    }
    Ok(())
}

fn state_path(parameter: &str, name: &str) -> Vec<Key> {
    ["optim", "state", parameter, name].map(|step| Key::Name(step.to_owned())).to_vec()
}

fn item<'a>(rank: &'a FlatStates, group: usize, name: &str) -> Option<&'a StateItem> {
    let items = rank.states.get(&(group as u64))?;
    items.iter().find(|(found, _)| found == name).map(|(_, item)| item)
}

/// A state of all ranks and groups as flat tensors, or why it is none.
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
                let other = flats[0].path.clone();
                return Err(fault(&rank.path, RankFault::NotInRank { tensor: label, other }));
            };
            if tensor.len() != flat.len || *dtype.get_or_insert(tensor.dtype) != tensor.dtype {
                return Ok(Err(format!("{} keeps it in another length or type", rank.path.display())));
            }
            state.push(rank.shard(&label, tensor)?);
        }
        all.push(state);
    }
    Ok(dtype.map(|dtype| (dtype, all)).ok_or_else(|| "there are no flat groups".to_owned()))
}

/// A number that a flat group has becomes that of each of its parameters.
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
            Some(StateItem::Value(value)) => {
                let object = Object { path, role: Role::Optimizer, value: value.clone() };
                into.values.insert(join(&object.path), object);
            }
            None => into.notes.push(format!("flat group {} has no `{name}`", placed.group)),
        }
    }
    Ok(())
}
