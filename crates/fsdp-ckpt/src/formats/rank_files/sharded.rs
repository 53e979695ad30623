//! FSDP1's sharded tensors (`ShardedTensor`): every piece records its box, so no mesh is needed.
//!
//! The state is a tuple of the rank's own pieces, metadata of all pieces, and the process group.

use crate::{
    checkpoint::{Key, Role, element_count, is_box_inside, join},
    error::Error,
    formats::{
        fields::{count, field, sizes},
        local::LocalTensor,
        merge::{Part, Place},
        rank_fault::{disagrees, placement},
        rank_file::RankFile,
    },
    torch::Item,
};

/// Reads a rank's pieces of a sharded tensor.
pub(super) fn parse(file: &RankFile, rank: usize, path: &[Key], state: &Item) -> Result<Vec<Part>, Error> {
    let name = join(path);
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
    let part = |shard| {
        let (local, offsets) = piece(file, shard, &shape)?;
        let place = Place::From { offsets, shape: shape.clone() };
        Some(Part { path: path.to_vec(), role: Role::Other, local, place, windows: None })
    };
    let parts = shards.iter().map(part).collect::<Option<_>>();
    parts.ok_or_else(|| refused("a piece is not a tensor of the size that it states"))
}

/// A piece; `None` unless its tensor has the recorded sizes and is inside of the whole tensor.
fn piece(file: &RankFile, shard: &Item, shape: &[u64]) -> Option<(LocalTensor, Vec<u64>)> {
    let Item::Object { state: Some(state), .. } = shard else { return None };
    let state = state.attributes();
    let Some(Item::Tensor(stored)) = state.get("tensor") else { return None };
    let metadata = state.get("metadata")?.to_value();
    let [offsets, lens] = ["shard_offsets", "shard_sizes"].map(|name| field(&metadata, name).and_then(sizes));
    let (offsets, lens) = (offsets?, lens?);
    let local = LocalTensor::of(stored, file.source);
    (is_box_inside(&offsets, &lens, shape) && local.shape == lens).then_some((local, offsets))
}
