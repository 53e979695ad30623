//! Merges what the files of all ranks hold into whole tensors: the one place where shards become chunks.
//!
//! A format says of each tensor in a file which box of which whole it is, by the coordinate of a
//! [`Distribution`] or by its first indices. Here the files are compared with each other, and copies of a box are read once.
//! A whole may be a sequence: a flattened parameter or several in a row, padded at the end, of which the named tensors are
//! [`Window`]s.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
    rc::Rc,
};

use fsdp_core::distribution::{Distribution, Placement};

use super::{
    local::LocalTensor,
    optimizer::put_tensor,
    rank_fault::{
        disagrees, not_in_rank, other_shape, other_type, placement, same_name, same_rank, too_short,
    },
};
use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Region, Role, Tensor, join},
    error::{Error, Fault},
};

/// The parts of tensors in a rank's file.
#[derive(Clone, Debug)]
pub(crate) struct RankParts {
    pub(crate) path: PathBuf,
    pub(crate) parts: Vec<Part>,
}

/// A part of a tensor or of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Path of the tensor in the nested state dict, or name of the sequence.
    pub(crate) path: Vec<Key>,
    pub(crate) role: Role,
    pub(crate) local: LocalTensor,
    pub(crate) place: Place,
    /// The tensors in a sequence; `None` if this is a part of a tensor.
    pub(crate) windows: Option<Rc<[Window]>>,
}

/// Which box of the whole a part is.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// The one at a coordinate. Every rank has a part.
    At(Distribution, Vec<u64>),
    /// The one that begins at these indices of a whole of this shape. A rank may have no part, or several.
    From { offsets: Vec<u64>, shape: Vec<u64> },
}

/// A tensor that is a range of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) path: Vec<Key>,
    pub(crate) shape: Vec<u64>,
    pub(crate) range: Range<u64>,
}

impl Part {
    /// A tensor that each of `world` ranks holds whole.
    pub(crate) fn copy(path: Vec<Key>, role: Role, local: LocalTensor, rank: usize, world: usize) -> Part {
        let axes = vec![(world as u64, Placement::Replicate)];
        let whole = Distribution::new(local.shape.clone(), axes).expect("there is at least one rank");
        Part { path, role, local, place: Place::At(whole, vec![rank as u64]), windows: None }
    }

    /// The run of a sequence that one of `world` ranks holds, all of which hold runs of this length. Fails for a strided
    /// view.
    pub(crate) fn run(
        name: &str,
        role: Role,
        local: &LocalTensor,
        (rank, world): (usize, usize),
        windows: Rc<[Window]>,
    ) -> Result<Part, Fault> {
        let local = local.flat(name)?;
        let shape = vec![local.len().saturating_mul(world as u64)];
        let axes = vec![(world as u64, Placement::Shard(0))];
        let whole = Distribution::new(shape, axes).expect("there is at least one rank");
        let place = Place::At(whole, vec![rank as u64]);
        Ok(Part { path: vec![Key::Name(name.to_owned())], role, local, place, windows: Some(windows) })
    }

    fn shape(&self) -> &[u64] {
        match &self.place {
            Place::At(whole, _) => whole.shape(),
            Place::From { shape, .. } => shape,
        }
    }

    /// First indices and sizes of its box.
    fn bounds(&self) -> (Vec<u64>, Vec<u64>) {
        match &self.place {
            Place::At(whole, coordinate) => {
                let bounds = whole.local_box(coordinate);
                bounds.iter().map(|range| (range.start, range.end - range.start)).unzip()
            }
            Place::From { offsets, .. } => (offsets.clone(), self.local.shape.clone()),
        }
    }
}

/// Adds the tensors of all ranks, which are in rank order and complete.
pub(crate) fn merge(ranks: &[RankParts], into: &mut Checkpoint) -> Result<(), Error> {
    let mut by_name: BTreeMap<String, Vec<(usize, &Part)>> = BTreeMap::new();
    for (rank, of_rank) in ranks.iter().enumerate() {
        for part in &of_rank.parts {
            by_name.entry(join(&part.path)).or_default().push((rank, part));
        }
    }
    for (name, parts) in &by_name {
        let (holder, first) = parts[0];
        if let Place::At(whole, _) = &first.place {
            check_complete(ranks, name, parts)?;
            check_coordinates(ranks, name, whole, parts)?;
        }
        let mut seen = BTreeSet::new();
        let mut held = Vec::new();
        for &(rank, part) in parts {
            let (offsets, sizes) = part.bounds();
            check_same(name, (ranks, holder, first), part, &sizes, rank)
                .map_err(|fault| fault.in_file(&ranks[rank].path))?;
            if part.local.len() > 0 && seen.insert((offsets.clone(), sizes)) {
                held.push((offsets, &part.local));
            }
        }
        put(name, first, &held, into).map_err(|fault| fault.in_file(&ranks[holder].path))?;
    }
    Ok(())
}

/// Checks that every rank has one part.
fn check_complete(ranks: &[RankParts], name: &str, parts: &[(usize, &Part)]) -> Result<(), Error> {
    let rank_of = |index: usize| parts.get(index).map(|part| part.0);
    let Some(odd) = (0..ranks.len().max(parts.len())).find(|&index| rank_of(index) != Some(index)) else {
        return Ok(());
    };
    match rank_of(odd).filter(|rank| *rank < odd) {
        Some(twice) => Err(same_name(name).in_file(&ranks[twice].path)),
        None => Err(not_in_rank(name, &ranks[parts[0].0].path).in_file(&ranks[odd].path)),
    }
}

/// Checks that every coordinate is there. Several meshes of the same shape hold the same data.
fn check_coordinates(
    ranks: &[RankParts],
    name: &str,
    whole: &Distribution,
    parts: &[(usize, &Part)],
) -> Result<(), Error> {
    if whole.ranks() > ranks.len() as u64 {
        let because = ", the number of files; files of ranks are missing";
        let fault = disagrees("number of ranks in a mesh", ranks.len(), whole.ranks(), because);
        return Err(fault.in_file(&ranks[0].path));
    }
    let mut seen: BTreeMap<&[u64], usize> = BTreeMap::new();
    for &(rank, part) in parts {
        let Place::At(_, coordinate) = &part.place else { continue };
        if let Some(other) = seen.insert(coordinate, rank)
            && whole.ranks() == ranks.len() as u64
        {
            let (first, second) = (&ranks[other].path, &ranks[rank].path);
            return Err(same_rank(other, first, second).in_file(second));
        }
    }
    if let Some(missing) = whole.coordinates().find(|coordinate| !seen.contains_key(&coordinate[..])) {
        let mesh: Vec<u64> = whole.axes().iter().map(|axis| axis.0).collect();
        let why = format!("no file holds position {missing:?} of its mesh {mesh:?}");
        return Err(placement(name, why).in_file(&ranks[0].path));
    }
    Ok(())
}

/// Checks that a part belongs to the same whole as the first one, and has the size of its box.
fn check_same(
    name: &str,
    (ranks, holder, first): (&[RankParts], usize, &Part),
    part: &Part,
    sizes: &[u64],
    rank: usize,
) -> Result<(), Fault> {
    let other = &ranks[holder].path;
    if part.local.dtype != first.local.dtype {
        return Err(other_type(name, first.local.dtype, part.local.dtype, other));
    }
    let (expected, got) =
        (first.windows.iter().flat_map(|all| &**all), part.windows.iter().flat_map(|all| &**all));
    let is_other =
        |(expected, got): &(&Window, &Window)| expected.path == got.path && expected.shape != got.shape;
    if let Some((expected, got)) = expected.zip(got).find(is_other) {
        return Err(other_shape(&join(&got.path), &expected.shape, &got.shape, other));
    }
    if part.shape() != first.shape() {
        return Err(other_shape(name, first.shape(), part.shape(), other));
    }
    let is_same = match (&first.place, &part.place) {
        (Place::At(expected, _), Place::At(whole, _)) => expected == whole,
        (Place::From { .. }, Place::From { .. }) => true,
        _ => false,
    };
    if !is_same || first.windows != part.windows {
        return Err(placement(name, format!("{} distributes it differently", other.display())));
    }
    if part.local.shape != sizes {
        return Err(other_shape(name, sizes, &part.local.shape, &ranks[rank].path));
    }
    Ok(())
}

/// Adds the tensor, or those in a sequence, whose boxes are held here.
fn put(
    name: &str,
    first: &Part,
    held: &[(Vec<u64>, &LocalTensor)],
    into: &mut Checkpoint,
) -> Result<(), Fault> {
    let (role, dtype, shape) = (first.role, first.local.dtype, first.shape());
    let Some(windows) = &first.windows else {
        let chunks = held.iter().map(|(offsets, local)| local.chunk_at(offsets.clone(), shape)).collect();
        return put_tensor(
            into,
            Tensor { path: first.path.clone(), role, dtype, shape: shape.to_vec(), chunks },
        );
    };
    for Window { path, shape: window_shape, range } in &**windows {
        if range.end > shape[0] {
            return Err(too_short(name, range.end, shape[0]));
        }
        let chunks = chunks_of(held.iter().map(|held| held.1), range.clone());
        let (path, shape) = (path.clone(), window_shape.clone());
        put_tensor(into, Tensor { path, role, dtype, shape, chunks })?;
    }
    Ok(())
}

/// The chunks of a range of successive runs of elements.
pub(crate) fn chunks_of<'a>(
    runs: impl IntoIterator<Item = &'a LocalTensor>,
    range: Range<u64>,
) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut start = 0;
    for run in runs {
        let held = range.start.max(start)..range.end.min(start + run.len());
        if !held.is_empty() {
            let offset = run.run(held.start - start..held.end - start).offset;
            let region = Region::Flat(held.start - range.start..held.end - range.start);
            chunks.push(Chunk { region, source: run.source, offset });
        }
        start += run.len();
    }
    chunks
}

#[cfg(test)]
mod tests;
