//! Converts the tree of a rank's file to plain data.

use std::collections::BTreeMap;

use super::{
    METADATA,
    rank_state::{OptimizerState, RankState, Sharded, split_key},
};
use crate::{
    checkpoint::{Value, element_count},
    error::{Error, Fault},
    formats::{
        fields::{count, entries, field, items, sizes, text},
        local::LocalTensor,
        optimizer::{StateItem, groups},
        rank_file::RankFile,
    },
    torch::Item,
};

/// Reads the state of a rank. A file with only an optimizer has no model.
pub(super) fn rank_state(file: &RankFile) -> Result<RankState, Error> {
    let metadata = file.root.get(METADATA).ok_or_else(|| {
        file.unexpected("`shard_metadata`", "present; the file is not of PyTorch/XLA FSDP or has no shards")
    })?;
    let metadata = metadata.to_value();
    let number = |name: &str| {
        let number = field(&metadata, name).and_then(count).and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| file.unexpected(format!("`shard_metadata.{name}`"), "a number"))
    };
    let mut state = RankState {
        path: file.path.clone(),
        rank: number("rank")?,
        world_size: number("world_size")?,
        ..RankState::default()
    };
    if let Some(model) = file.root.get("model") {
        fill_model(file, model, &metadata, &mut state)?;
    }
    if let Some(optimizer) = file.root.get("optimizer") {
        state.optimizer = Some(optimizer_state(file, optimizer)?);
    }
    Ok(state)
}

fn fill_model(file: &RankFile, model: &Item, metadata: &Value, state: &mut RankState) -> Result<(), Error> {
    let Item::Dict(pairs) = model else { return Err(file.unexpected("`model`", "a dict")) };
    let tables = Tables::read(metadata).map_err(|fault| fault.in_file(&file.path))?;
    for (key, item) in pairs {
        let key = text(key).ok_or_else(|| file.unexpected(format!("the key {key:?} of `model`"), "text"))?;
        let Item::Tensor(stored) = item else {
            return Err(file.unexpected(format!("`model.{key}`"), "a tensor"));
        };
        state.model.insert(key.to_owned(), LocalTensor::of(stored, file.source));
        if let Some(place) = split_key(key) {
            state.sharded.push(tables.sharded(key, place).map_err(|fault| fault.in_file(&file.path))?);
        }
    }
    Ok(())
}

/// The tables of `shard_metadata`, by module and by flattened parameter.
pub(super) struct Tables<'a> {
    shards: BTreeMap<&'a str, &'a Value>,
    flattened: BTreeMap<&'a str, &'a Value>,
}

impl Tables<'_> {
    pub(super) fn read(metadata: &Value) -> Result<Tables<'_>, Fault> {
        let table = |name: &str| match field(metadata, name) {
            None if name == "flatten_info" => Ok(BTreeMap::new()),
            table => table
                .and_then(entries)
                .map(BTreeMap::from_iter)
                .ok_or_else(|| Fault::unexpected(format!("`shard_metadata.{name}`"), "a dict by name")),
        };
        Ok(Tables { shards: table("shard_info")?, flattened: table("flatten_info")? })
    }

    /// The parameter that a shard is a part of.
    pub(super) fn sharded(&self, key: &str, (module, shard): (&str, &str)) -> Result<Sharded, Fault> {
        let entry = self.shards.get(module).and_then(|shards| field(shards, shard));
        let name = entry.and_then(|entry| field(entry, "_orig_name")).and_then(text);
        let shape = entry.and_then(|entry| field(entry, "_orig_size")).and_then(sizes);
        let (Some(name), Some(shape)) = (name, shape) else {
            let place = format!("the entry of `{key}` in shard_metadata.shard_info");
            return Err(Fault::unexpected(place, "present, with `_orig_name` and `_orig_size`"));
        };
        let full = if module.is_empty() { name.to_owned() } else { format!("{module}.{name}") };
        let flattened = self.flattened.get(&full[..]).map(|entry| {
            let place = format!("the entry of `{full}` in shard_metadata.flatten_info");
            let expected = "names, shapes and matching numbers of elements";
            flattened_parts(entry).ok_or_else(|| Fault::unexpected(place, expected))
        });
        Sharded::new(key, &full, &shape, flattened.transpose()?.as_deref())
    }
}

/// The names and shapes in `(names, shapes, element counts)`; `None` if these do not agree.
fn flattened_parts(entry: &Value) -> Option<Vec<(String, Vec<u64>)>> {
    let [names, shapes, counts] = items(entry)? else { return None };
    let (names, shapes, counts) = (items(names)?, items(shapes)?, sizes(counts)?);
    if names.len() != shapes.len() || names.len() != counts.len() {
        return None;
    }
    let part = |((name, shape), count): ((&Value, &Value), &u64)| {
        let shape = sizes(shape)?;
        (element_count(&shape)? == *count).then_some((text(name)?.to_owned(), shape))
    };
    names.iter().zip(shapes).zip(&counts).map(part).collect()
}

fn optimizer_state(file: &RankFile, optimizer: &Item) -> Result<OptimizerState, Error> {
    let Some(Item::Dict(states)) = optimizer.get("state") else {
        return Err(file.unexpected("`optimizer.state`", "a dict"));
    };
    let mut state = OptimizerState::default();
    for (number, entries) in states {
        let (Some(number), Item::Dict(entries)) = (count(number), entries) else {
            let place = format!("the entry {number:?} of `optimizer.state`");
            return Err(file.unexpected(place, "a dict under a number"));
        };
        let mut list = Vec::with_capacity(entries.len());
        for (name, item) in entries {
            let Some(name) = text(name) else {
                return Err(
                    file.unexpected(format!("the key {name:?} of `optimizer.state.{number}`"), "text")
                );
            };
            if item.holds_tensor() && !matches!(item, Item::Tensor(_)) {
                let place = format!("`optimizer.state.{number}.{name}`");
                return Err(file.unexpected(place, "a tensor or a value"));
            }
            list.push((name.to_owned(), StateItem::of(item, file.source)));
        }
        state.states.insert(number, list);
    }
    let list = optimizer.get("param_groups").map(Item::to_value);
    let unknown = || file.unexpected("`optimizer.param_groups`", "a list of dicts by name");
    state.groups = list.as_ref().and_then(groups).ok_or_else(unknown)?;
    Ok(state)
}
