//! Merges the tensors of all ranks.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, element_count, join},
    error::{Error, Fault},
    formats::{
        local::LocalTensor,
        mesh::Distribution,
        optimizer::put_tensor,
        rank_fault::{disagrees, not_in_rank, other_shape, other_type, placement, same_rank},
    },
};

/// The tensors in a rank's file.
#[derive(Clone, Debug)]
pub(super) struct RankTensors {
    pub(super) path: PathBuf,
    pub(super) rank: usize,
    pub(super) tensors: Vec<RankTensor>,
}

/// A tensor in a rank's file.
#[derive(Clone, Debug)]
pub(super) struct RankTensor {
    /// Its path in the nested state dict.
    pub(super) path: Vec<Key>,
    pub(super) local: LocalTensor,
    /// Its place in a distributed tensor; `None` for a plain tensor, which is whole.
    pub(super) part: Option<Part>,
}

/// The place of a local tensor in a distributed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) distribution: Distribution,
    /// The rank's coordinate in the mesh.
    pub(super) coordinate: Vec<u64>,
    /// The rank; `None` if the mesh does not record it.
    pub(super) rank: Option<u64>,
}

/// Adds the tensors of all ranks, which are in rank order and complete.
pub(super) fn merge(ranks: &[RankTensors], into: &mut Checkpoint) -> Result<(), Error> {
    let by_name: Vec<BTreeMap<String, &RankTensor>> = ranks.iter().map(by_name).collect();
    let first = &ranks[0];
    for (rank, names) in ranks.iter().zip(&by_name).skip(1) {
        if let Some(name) = names.keys().find(|name| !by_name[0].contains_key(*name)) {
            return Err(not_in_rank(name, &rank.path).in_file(&first.path));
        }
    }
    for (name, tensor) in &by_name[0] {
        let mut all = Vec::with_capacity(ranks.len());
        for (rank, names) in ranks.iter().zip(&by_name) {
            let in_rank = |fault: Fault| fault.in_file(&rank.path);
            let found = names.get(name).copied();
            let found = found.ok_or_else(|| in_rank(not_in_rank(name, &first.path)))?;
            check_same(name, (first, tensor), (rank, found)).map_err(in_rank)?;
            all.push(found);
        }
        let merged = match &tensor.part {
            None => tensor.local.to_tensor(tensor.path.clone(), Role::Other),
            Some(part) => distributed(ranks, name, &part.distribution, &all)?,
        };
        put_tensor(into, merged).map_err(|fault| fault.in_file(&first.path))?;
    }
    Ok(())
}

fn by_name(rank: &RankTensors) -> BTreeMap<String, &RankTensor> {
    rank.tensors.iter().map(|tensor| (join(&tensor.path), tensor)).collect()
}

/// Checks that a rank describes a tensor as the first rank does, and holds the box that its coordinate requires.
fn check_same(
    name: &str,
    (first, expected): (&RankTensors, &RankTensor),
    (rank, found): (&RankTensors, &RankTensor),
) -> Result<(), Fault> {
    let other = &first.path;
    if found.local.dtype != expected.local.dtype {
        return Err(other_type(name, expected.local.dtype, found.local.dtype, other));
    }
    match (&expected.part, &found.part) {
        (None, None) if found.local.shape != expected.local.shape => {
            Err(other_shape(name, &expected.local.shape, &found.local.shape, other))
        }
        (None, None) => Ok(()),
        (Some(expected), Some(part)) => {
            let (d, expected) = (&part.distribution, &expected.distribution);
            if d.shape != expected.shape {
                return Err(other_shape(name, &expected.shape, &d.shape, other));
            }
            if d != expected {
                let why = format!("{} distributes it differently", other.display());
                return Err(placement(name, why));
            }
            if let Some(got) = part.rank.filter(|got| *got != rank.rank as u64) {
                return Err(disagrees("rank", rank.rank, got, " by its name"));
            }
            let sizes: Vec<u64> =
                d.local_box(&part.coordinate).iter().map(|range| range.end - range.start).collect();
            if found.local.shape != sizes {
                return Err(other_shape(name, &sizes, &found.local.shape, &rank.path));
            }
            Ok(())
        }
        (None, Some(_)) | (Some(_), None) => {
            let why = format!("it is distributed in only one of this file and {}", other.display());
            Err(placement(name, why))
        }
    }
}

/// Merges the parts of all ranks, whose descriptions agree.
fn distributed(
    ranks: &[RankTensors],
    name: &str,
    distribution: &Distribution,
    all: &[&RankTensor],
) -> Result<Tensor, Error> {
    let places = element_count(&distribution.mesh).and_then(|places| usize::try_from(places).ok());
    let places = places.unwrap_or(usize::MAX);
    if places > ranks.len() {
        let because = ", the number of files; files of ranks are missing";
        let fault = disagrees("number of ranks in a mesh", ranks.len(), places, because);
        return Err(fault.in_file(&ranks[0].path));
    }
    let mut seen: BTreeMap<&[u64], usize> = BTreeMap::new();
    let mut chunks = Vec::new();
    for (index, tensor) in all.iter().enumerate() {
        let Some(part) = &tensor.part else { continue };
        match seen.insert(&part.coordinate, index) {
            Some(other) if places == ranks.len() => {
                let (first, second) = (&ranks[other].path, &ranks[index].path);
                return Err(same_rank(other, first, second).in_file(second));
            }
            // Several meshes of the same shape hold the same data; the first one is read.
            Some(_) => continue,
            None if !distribution.is_first_replica(&part.coordinate) => continue,
            None => {}
        }
        let offsets: Vec<u64> =
            distribution.local_box(&part.coordinate).iter().map(|range| range.start).collect();
        if tensor.local.len() > 0 {
            chunks.push(tensor.local.chunk_at(offsets, &distribution.shape));
        }
    }
    if seen.len() != places {
        let missing = missing_places(distribution, &seen.keys().copied().collect());
        let why = format!("no file holds position {missing:?} of its mesh {:?}", distribution.mesh);
        return Err(placement(name, why).in_file(&ranks[0].path));
    }
    let first = all[0];
    let (path, dtype) = (first.path.clone(), first.local.dtype);
    Ok(Tensor { path, role: Role::Other, dtype, shape: distribution.shape.clone(), chunks })
}

/// The first coordinate of the mesh that no rank has.
fn missing_places(distribution: &Distribution, seen: &BTreeSet<&[u64]>) -> Vec<u64> {
    let mut place = vec![0; distribution.mesh.len()];
    while seen.contains(&place[..]) {
        for dim in (0..place.len()).rev() {
            place[dim] += 1;
            if place[dim] < distribution.mesh[dim] {
                break;
            }
            place[dim] = 0;
        }
    }
    place
}
