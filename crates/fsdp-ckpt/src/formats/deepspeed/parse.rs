//! Converts the trees of DeepSpeed's files to plain data.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    checkpoint::Value,
    error::Error,
    formats::{
        fields::{count, entries, items, sizes, text},
        local::LocalTensor,
        optimizer::{Settings, StateItem, groups},
        rank_file::RankFile,
    },
    torch::{Item, StoredTensor},
};

/// Names and shapes of parameters, in order.
pub(super) type Shapes = Vec<(String, Vec<u64>)>;

/// The contents of a rank's optimizer file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FlatStates {
    pub(super) path: PathBuf,
    pub(super) stage: u64,
    pub(super) world_size: usize,
    /// The flat copies of the weights, by group.
    pub(super) groups: Vec<LocalTensor>,
    /// Number of padding elements after each flat copy that only the optimizer states have; empty if the file does not
    /// record it.
    pub(super) paddings: Vec<u64>,
    /// The optimizer states of each flat copy, by the copy's number.
    pub(super) states: BTreeMap<u64, Vec<(String, StateItem)>>,
    /// Settings of the parameter groups.
    pub(super) settings: Vec<Settings>,
}

/// The contents of a model file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ModelStates {
    pub(super) path: PathBuf,
    /// Tensors of the module.
    pub(super) module: BTreeMap<String, LocalTensor>,
    pub(super) buffer_names: Vec<String>,
    /// Trained parameters, by group.
    pub(super) param_shapes: Vec<Shapes>,
    pub(super) frozen_shapes: Shapes,
    pub(super) frozen_fragments: BTreeMap<String, LocalTensor>,
    /// Pairs of a name and the parameter it shares.
    pub(super) shared: Vec<(String, String)>,
}

impl FlatStates {
    /// A flat tensor as one run of elements; fails if it is strided.
    pub(super) fn flat(&self, what: &str, tensor: &LocalTensor) -> Result<LocalTensor, Error> {
        tensor.flat(what).map_err(|fault| fault.in_file(&self.path))
    }
}

/// Reads a rank's optimizer file.
pub(super) fn flat_states(file: &RankFile) -> Result<FlatStates, Error> {
    let unexpected =
        |place: &str, expected| file.unexpected(format!("`optimizer_state_dict{place}`"), expected);
    let root = file.root.get("optimizer_state_dict").ok_or_else(|| unexpected("", "present"))?;
    let value = |name: &str| root.get(name).map(Item::to_value);
    let stage = value("zero_stage").as_ref().and_then(stage_of);
    let stage = stage.filter(|stage| (1..=3).contains(stage));
    let stage = stage.ok_or_else(|| unexpected(".zero_stage", "a stage from 1 to 3"))?;
    let world_size = value("partition_count").as_ref().and_then(partition_count);
    let world_size = world_size.and_then(|ranks| usize::try_from(ranks).ok());
    let world_size = world_size.ok_or_else(|| unexpected(".partition_count", "a number of ranks"))?;
    let (groups, base) = match stage {
        3 => ("fp32_flat_groups", "optimizer_state_dict"),
        _ => ("single_partition_of_fp32_groups", "base_optimizer_state"),
    };
    let flat = root.get(groups).and_then(tensors);
    let flat = flat.ok_or_else(|| unexpected(&format!(".{groups}"), "a list of tensors"))?;
    let groups = flat.into_iter().map(|stored| LocalTensor::of(stored, file.source)).collect();
    let paddings = value("group_paddings").as_ref().and_then(sizes).unwrap_or_default();
    let mut found =
        FlatStates { path: file.path.clone(), stage, world_size, groups, paddings, ..FlatStates::default() };
    if let Some(base) = root.get(base) {
        fill_base(file, base, &mut found);
    }
    Ok(found)
}

/// Reads the parts of the wrapped optimizer's state that have PyTorch's layout.
fn fill_base(file: &RankFile, base: &Item, found: &mut FlatStates) {
    let states: Vec<(u64, &Item)> = match base.get("state") {
        Some(Item::Dict(pairs)) => {
            pairs.iter().filter_map(|(number, item)| Some((count(number)?, item))).collect()
        }
        _ => match base {
            // Checkpoints that another number of ranks can load keep one dict per group.
            Item::List(items) => (0..).zip(items).collect(),
            _ => Vec::new(),
        },
    };
    for (number, item) in states {
        let Item::Dict(pairs) = item else { continue };
        let item =
            |(name, item): &(Value, Item)| Some((text(name)?.to_owned(), StateItem::of(item, file.source)));
        found.states.insert(number, pairs.iter().filter_map(item).collect());
    }
    let list = base.get("param_groups").map(Item::to_value);
    found.settings = list.as_ref().and_then(groups).unwrap_or_default();
}

/// Reads a model file.
pub(super) fn model_states(file: &RankFile) -> Result<ModelStates, Error> {
    let unexpected = |name: &str, expected| file.unexpected(format!("`{name}`"), expected);
    let value = |name: &str| file.root.get(name).map(Item::to_value).filter(|value| *value != Value::None);
    let shapes = value("param_shapes").and_then(|groups| match &groups {
        Value::Dict(_) => Some(vec![shapes_of(&groups)?]),
        groups => items(groups)?.iter().map(shapes_of).collect(),
    });
    let buffer_names = match value("buffer_names") {
        Some(Value::List(names) | Value::Tuple(names) | Value::Set(names)) => {
            names.iter().map(|name| Some(text(name)?.to_owned())).collect()
        }
        _ => None,
    };
    let frozen_shapes = value("frozen_param_shapes").map_or(Some(Shapes::new()), |shapes| shapes_of(&shapes));
    let shared = value("shared_params").map_or(Some(Vec::new()), |pairs| shared_pairs(&pairs));
    Ok(ModelStates {
        path: file.path.clone(),
        module: named_tensors(file, "module"),
        buffer_names: buffer_names.ok_or_else(|| unexpected("buffer_names", "a list of names"))?,
        param_shapes: shapes
            .ok_or_else(|| unexpected("param_shapes", "a list of dicts of names and shapes"))?,
        frozen_shapes: frozen_shapes
            .ok_or_else(|| unexpected("frozen_param_shapes", "a dict of names and shapes"))?,
        frozen_fragments: named_tensors(file, "frozen_param_fragments"),
        shared: shared.ok_or_else(|| unexpected("shared_params", "a dict of names"))?,
    })
}

/// The plain tensors of a dict of the file, by name.
fn named_tensors(file: &RankFile, name: &str) -> BTreeMap<String, LocalTensor> {
    let Some(Item::Dict(pairs)) = file.root.get(name) else { return BTreeMap::new() };
    let tensor = |(key, item): &(Value, Item)| match item {
        Item::Tensor(stored) => Some((text(key)?.to_owned(), LocalTensor::of(stored, file.source))),
        _ => None,
    };
    pairs.iter().filter_map(tensor).collect()
}

fn tensors(item: &Item) -> Option<Vec<&StoredTensor>> {
    let (Item::List(items) | Item::Tuple(items)) = item else { return None };
    let tensors = items.iter().map(|item| match item {
        Item::Tensor(stored) => Some(stored),
        _ => None,
    });
    tensors.collect()
}

fn shapes_of(value: &Value) -> Option<Shapes> {
    let pairs = entries(value)?;
    pairs.into_iter().map(|(name, shape)| Some((name.to_owned(), sizes(shape)?))).collect()
}

/// Parses shared parameters, which are a dict or a list of pairs.
fn shared_pairs(value: &Value) -> Option<Vec<(String, String)>> {
    let pair = |name: &Value, other: &Value| Some((text(name)?.to_owned(), text(other)?.to_owned()));
    match value {
        Value::Dict(pairs) => pairs.iter().map(|(name, other)| pair(name, other)).collect(),
        pairs => {
            let pairs = items(pairs)?.iter().map(|two| match items(two)? {
                [name, other] => pair(name, other),
                _ => None,
            });
            pairs.collect()
        }
    }
}

/// Parses a stage: a number, or an enum made from its value or its name.
fn stage_of(value: &Value) -> Option<u64> {
    let Value::Object { args, .. } = value else { return count(value) };
    match &args[..] {
        [value] => count(value),
        [Value::Global(_), Value::Str(name)] => match &name[..] {
            "optimizer_states" => Some(1),
            "gradients" => Some(2),
            "weights" | "max_stage" => Some(3),
            _ => None,
        },
        _ => None,
    }
}

/// Parses the number of ranks, or of one number per group; the maximum, since groups of experts may have fewer.
fn partition_count(value: &Value) -> Option<u64> {
    count(value).or_else(|| sizes(value)?.into_iter().max())
}
