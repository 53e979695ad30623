//! Locates the elements of each parameter in the flat tensors, by the layout of each stage.
//!
//! Stage 3 cuts each parameter into as many pieces as there are ranks, the last ones shorter or empty, and padded. A
//! rank's pieces of successive parameters follow one another through its groups. Stages 1 and 2 cut each group as a
//! whole: concatenated over the ranks, a group holds one parameter after another.

use std::ops::Range;

use super::parse::{FlatStates, ModelStates, Shapes};
use crate::{
    checkpoint::{Chunk, element_count},
    error::{Error, Fault},
    formats::{
        rank_fault::too_short,
        shards::{Shard, chunks_of, len_of},
    },
    safetensors::TensorType,
};

/// A parameter, the flat group in which it begins, and its chunks.
pub(super) struct Placed<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [u64],
    pub(super) group: usize,
    pub(super) chunks: Vec<Chunk>,
}

/// Locates all parameters in flat tensors, which are given by rank and group.
pub(super) fn place<'a>(
    first: &FlatStates,
    model: &'a ModelStates,
    flats: &[Vec<Shard>],
    dtype: TensorType,
) -> Result<Vec<Placed<'a>>, Error> {
    let size = dtype.size_bytes() as u64;
    let placed = if first.stage == 3 {
        place_cut_parameters(&model.param_shapes, flats, size)
    } else {
        place_cut_groups(&model.param_shapes, flats, size)
    };
    placed.map_err(|fault| fault.in_file(&first.path))
}

pub(super) fn len_checked(name: &str, shape: &[u64]) -> Result<u64, Fault> {
    element_count(shape).ok_or_else(|| Fault::unexpected(format!("the size of `{name}`"), "less than 2^64"))
}

fn left_over(what: String) -> Fault {
    Fault::unexpected(what, "used by parameters; names and weights do not belong together")
}

/// Stage 3: every parameter is cut over the ranks.
fn place_cut_parameters<'a>(
    groups: &'a [Shapes],
    flats: &[Vec<Shard>],
    size: u64,
) -> Result<Vec<Placed<'a>>, Fault> {
    let world = flats.len() as u64;
    let held = len_of(&flats[0]).unwrap_or(u64::MAX);
    let mut placed = Vec::new();
    let mut start = 0u64;
    for (name, shape) in groups.iter().flatten() {
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

/// The runs of a rank's flat tensors that make up a range of their sequence.
fn runs(flats: &[Shard], range: Range<u64>, size: u64) -> Vec<Shard> {
    let run = |chunk: Chunk| Shard {
        source: chunk.source,
        offset: chunk.offset,
        len: chunk.region.len().expect("a run of a file can be counted"),
    };
    chunks_of(flats, range, size).into_iter().map(run).collect()
}

/// The index of the flat tensor that holds an element of their sequence.
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
) -> Result<Vec<Placed<'a>>, Fault> {
    let world = flats.len() as u64;
    if groups.len() != flats[0].len() {
        let place = format!("the number of flat groups, {},", flats[0].len());
        return Err(Fault::unexpected(place, "the number of groups of parameters"));
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
