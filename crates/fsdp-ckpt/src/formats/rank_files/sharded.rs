//! FSDP1's sharded tensors (`ShardedTensor`): every piece records its box, so no mesh is needed.
//!
//! The state is a tuple of the rank's own pieces, metadata of all pieces, and the process group.

use std::{collections::BTreeMap, path::Path};

use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, Value, element_count, join},
    error::Error,
    formats::{
        fields::{count, field, sizes},
        local::LocalTensor,
        optimizer::put_tensor,
        rank_fault::{disagrees, other_shape, other_type, placement},
        rank_file::RankFile,
    },
    torch::Item,
};

/// First indices and sizes of a piece.
type PieceBox = (Vec<u64>, Vec<u64>);

/// A rank's pieces of a sharded tensor.
#[derive(Clone, Debug)]
pub(super) struct ShardedTensor {
    /// Its path in the nested state dict.
    pub(super) path: Vec<Key>,
    shape: Vec<u64>,
    /// Pieces with their first indices.
    pieces: Vec<(LocalTensor, Vec<u64>)>,
}

/// Reads the state of a sharded tensor in a rank's file.
pub(super) fn parse(
    file: &RankFile,
    rank: usize,
    path: Vec<Key>,
    state: &Item,
) -> Result<ShardedTensor, Error> {
    let name = join(&path);
    let refused = |why: &str| placement(&name, why).in_file(&file.path);
    let Item::Tuple(parts) = state else { return Err(refused("its state is not a tuple")) };
    let [Item::List(shards), metadata, group, ..] = &parts[..] else {
        return Err(refused("its state has no list of pieces"));
    };
    let saved = field(&group.to_value(), "global_rank").and_then(count);
    if let Some(saved) = saved.filter(|&saved| saved != rank as u64) {
        return Err(disagrees("rank", rank, saved, " by its name").in_file(&file.path));
    }
    let shape = field(&metadata.to_value(), "size").and_then(sizes);
    let shape = shape.filter(|shape| element_count(shape).is_some());
    let shape = shape.ok_or_else(|| refused("its metadata has no known shape"))?;
    let pieces = shards.iter().map(|shard| piece(file, shard, &shape));
    let pieces = pieces.collect::<Option<_>>();
    let pieces = pieces.ok_or_else(|| refused("a piece is not a tensor of the size that it states"))?;
    Ok(ShardedTensor { path, shape, pieces })
}

/// A piece; `None` unless its tensor has the recorded sizes and is inside of the whole tensor.
fn piece(file: &RankFile, shard: &Item, shape: &[u64]) -> Option<(LocalTensor, Vec<u64>)> {
    let state = match shard {
        Item::Object { state: Some(state), .. } => &**state,
        _ => return None,
    };
    // For a class with slots, the second item holds the attributes.
    let state = match state {
        Item::Tuple(two) if two.len() == 2 => &two[1],
        state => state,
    };
    let Some(Item::Tensor(stored)) = state.get("tensor") else { return None };
    let metadata: Value = state.get("metadata")?.to_value();
    let metadata = match &metadata {
        Value::Object { state: Some(state), .. } => match &**state {
            Value::Tuple(two) if two.len() == 2 => two[1].clone(),
            state => state.clone(),
        },
        _ => return None,
    };
    let [offsets, lens] = ["shard_offsets", "shard_sizes"].map(|name| field(&metadata, name).and_then(sizes));
    let (offsets, lens) = (offsets?, lens?);
    let local = LocalTensor::of(stored, file.source);
    let ends = offsets.iter().zip(&lens).zip(shape);
    let is_inside = ends.clone().count() == shape.len()
        && offsets.len() == lens.len()
        && ends
            .into_iter()
            .all(|((offset, len), size)| offset.checked_add(*len).is_some_and(|end| end <= *size));
    (is_inside && local.shape == lens).then_some((local, offsets))
}

/// Adds the tensors of all ranks. A piece that several ranks hold is read once, like a replica.
pub(super) fn merge(ranks: &[(&Path, Vec<ShardedTensor>)], into: &mut Checkpoint) -> Result<(), Error> {
    let mut whole: BTreeMap<String, (&Path, Tensor)> = BTreeMap::new();
    let mut boxes: BTreeMap<String, Vec<PieceBox>> = BTreeMap::new();
    for (path, tensors) in ranks {
        for found in tensors {
            let name = join(&found.path);
            for (local, offsets) in &found.pieces {
                let dtype = local.dtype;
                let (first, tensor) = whole.entry(name.clone()).or_insert_with(|| {
                    let (path_in, shape) = (found.path.clone(), found.shape.clone());
                    (path, Tensor { path: path_in, role: Role::Other, dtype, shape, chunks: Vec::new() })
                });
                if tensor.shape != found.shape {
                    return Err(other_shape(&name, &tensor.shape, &found.shape, first).in_file(*path));
                }
                if tensor.dtype != dtype {
                    return Err(other_type(&name, tensor.dtype, dtype, first).in_file(*path));
                }
                let boxes = boxes.entry(name.clone()).or_default();
                let piece = (offsets.clone(), local.shape.clone());
                if local.len() > 0 && !boxes.contains(&piece) {
                    boxes.push(piece);
                    tensor.chunks.push(local.chunk_at(offsets.clone(), &found.shape));
                }
            }
        }
    }
    let names = ranks.iter().flat_map(|(path, tensors)| tensors.iter().map(move |found| (path, found)));
    for (path, found) in names {
        let name = join(&found.path);
        if !whole.contains_key(&name) {
            return Err(placement(&name, "no file holds a piece of it").in_file(*path));
        }
    }
    for (path, tensor) in whole.into_values() {
        put_tensor(into, tensor).map_err(|fault| fault.in_file(path))?;
    }
    Ok(())
}
