//! Merging of ranks, over random meshes, compared with tensors that a simple model distributes; and damaged files.

use std::path::PathBuf;

use proptest::prelude::*;

use super::merge::{Part, RankTensor, RankTensors, merge};
use crate::{
    checkpoint::{Checkpoint, Key, Region, Source, Tensor, packed_strides},
    error::Error,
    formats::{
        local::LocalTensor,
        mesh::{Distribution, Placement},
    },
    safetensors::TensorType,
};

/// The files of ranks, with two bytes per element, and their parsed contents.
struct Written {
    bytes: Vec<Vec<u8>>,
    ranks: Vec<RankTensors>,
}

fn key(name: &str) -> Vec<Key> {
    vec![Key::Name(name.to_owned())]
}

/// The coordinates of a mesh in rank order.
fn places(mesh: &[u64]) -> Vec<Vec<u64>> {
    mesh.iter().fold(vec![vec![]], |all, ranks| {
        all.iter().flat_map(|at| (0..*ranks).map(move |i| [&at[..], &[i]].concat())).collect()
    })
}

/// The indices of a dimension that a rank holds, by cutting a list as `torch.chunk` does.
fn indices(d: &Distribution, dim: usize, place: &[u64]) -> Vec<u64> {
    let mut indices: Vec<u64> = (0..d.shape[dim]).collect();
    for (mesh_dim, placement) in d.placements.iter().enumerate() {
        if *placement == (Placement::Shard { dim }) {
            let each = indices.len().div_ceil(d.mesh[mesh_dim] as usize).max(1);
            indices = indices.chunks(each).nth(place[mesh_dim] as usize).unwrap_or_default().to_vec();
        }
    }
    indices
}

/// Distributes tensors whose elements are their flat indices. If `transposed`, local tensors are stored with their
/// dimensions reversed.
fn write(mesh: &[u64], tensors: &[(Vec<u64>, Vec<Placement>)], transposed: bool) -> Written {
    let places = places(mesh);
    let mut written = Written { bytes: vec![Vec::new(); places.len()], ranks: Vec::new() };
    for (rank, place) in places.iter().enumerate() {
        let bytes = &mut written.bytes[rank];
        let mut found = Vec::new();
        for (number, (shape, placements)) in tensors.iter().enumerate() {
            let (shape, placements) = (shape.clone(), placements.clone());
            let d = Distribution { shape, mesh: mesh.to_vec(), placements };
            let held: Vec<Vec<u64>> = (0..d.shape.len()).map(|dim| indices(&d, dim, place)).collect();
            let sizes: Vec<u64> = held.iter().map(|indices| indices.len() as u64).collect();
            let strides = if transposed {
                let mut strides = packed_strides(&sizes.iter().rev().copied().collect::<Vec<_>>());
                strides.reverse();
                strides
            } else {
                packed_strides(&sizes)
            };
            let offset = bytes.len() as u64;
            let len = sizes.iter().product::<u64>();
            bytes.resize(bytes.len() + 2 * len as usize, 0);
            // Every element of the local tensor: (flat index in the whole tensor, offset in the file).
            let mut elements = vec![(0, 0)];
            for dim in 0..sizes.len() {
                let step = |(flat, at): (u64, u64)| {
                    let inner = held[dim].iter().zip(0..);
                    let (size, stride) = (d.shape[dim], strides[dim]);
                    inner.map(move |(index, i): (&u64, u64)| (flat * size + index, at + i * stride))
                };
                elements = elements.into_iter().flat_map(step).collect();
            }
            for (flat, at) in elements.into_iter().take(len as usize) {
                let at = (offset + 2 * at) as usize;
                bytes[at..at + 2].copy_from_slice(&(flat as u16).to_le_bytes());
            }
            let local = LocalTensor { dtype: TensorType::Bf16, shape: sizes, strides, source: rank, offset };
            let part = Part { distribution: d, coordinate: place.clone(), rank: Some(rank as u64) };
            found.push(RankTensor { path: key(&format!("t{number}")), local, part: Some(part) });
        }
        let offset = bytes.len() as u64;
        bytes.extend([7, rank as u8]);
        let local =
            LocalTensor { dtype: TensorType::Bf16, shape: vec![], strides: vec![], source: rank, offset };
        found.push(RankTensor { path: key("plain"), local, part: None });
        let path = PathBuf::from(format!("rank{rank}"));
        written.ranks.push(RankTensors { path, rank, tensors: found });
    }
    written
}

fn merged(written: &Written) -> Result<Checkpoint, Error> {
    let sources = written.ranks.iter().zip(&written.bytes);
    let sources =
        sources.map(|(rank, bytes)| Source::File { path: rank.path.clone(), len: bytes.len() as u64 });
    let mut checkpoint = Checkpoint { sources: sources.collect(), ..Checkpoint::default() };
    merge(&written.ranks, &mut checkpoint)?;
    Ok(checkpoint)
}

/// The elements of a tensor, read chunk by chunk.
fn read(written: &Written, tensor: &Tensor) -> Vec<u16> {
    let mut out = vec![u16::MAX; tensor.len() as usize];
    let mut put = |element: u64, chunk: &crate::checkpoint::Chunk, distance: u64| {
        let at = (chunk.offset + 2 * distance) as usize;
        let bytes = &written.bytes[chunk.source][at..at + 2];
        out[element as usize] = u16::from_le_bytes([bytes[0], bytes[1]]);
    };
    for chunk in &tensor.chunks {
        match &chunk.region {
            Region::Flat(range) => range.clone().zip(0..).for_each(|(element, i)| put(element, chunk, i)),
            Region::Box { offsets, sizes, strides } => {
                for place in places(sizes) {
                    let index = place.iter().zip(offsets).map(|(i, offset)| i + offset);
                    let flat = index.zip(&tensor.shape).fold(0, |flat, (i, dim)| flat * dim + i);
                    let distance = place.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                    put(flat, chunk, distance);
                }
            }
        }
    }
    out
}

/// Shapes and placements of tensors.
type Tensors = Vec<(Vec<u64>, Vec<Placement>)>;

/// A mesh of 1 to 8 ranks and tensors on it, some of them empty, uneven or 0-d.
fn worlds() -> impl Strategy<Value = (Vec<u64>, Tensors)> {
    let mesh = prop_oneof![
        (1u64..9).prop_map(|ranks| vec![ranks]),
        prop_oneof![Just(vec![2, 2]), Just(vec![1, 3]), Just(vec![3, 2]), Just(vec![2, 4])],
        Just(vec![2, 2, 2]),
    ];
    mesh.prop_flat_map(|mesh| {
        let mesh_dims = mesh.len();
        let shape = prop::collection::vec(prop_oneof![5 => 1u64..7, 1 => Just(0u64)], 0..4);
        let tensor = shape.prop_flat_map(move |shape| {
            let dims = shape.len();
            let placement = (any::<bool>(), any::<prop::sample::Index>()).prop_map(move |(shard, dim)| {
                if shard && dims > 0 {
                    Placement::Shard { dim: dim.index(dims) }
                } else {
                    Placement::Replicate
                }
            });
            (Just(shape), prop::collection::vec(placement, mesh_dims))
        });
        (Just(mesh), prop::collection::vec(tensor, 1..4))
    })
}

proptest! {
    #[test]
    fn merging_ranks_restores_distributed_tensors((mesh, tensors) in worlds(), transposed in any::<bool>()) {
        let written = write(&mesh, &tensors, transposed);
        let checkpoint = merged(&written).unwrap();
        checkpoint.check_coverage().unwrap();
        prop_assert_eq!(checkpoint.tensors.len(), tensors.len() + 1);
        for (number, (shape, _)) in tensors.iter().enumerate() {
            let tensor = &checkpoint.tensors[&format!("t{number}")];
            prop_assert_eq!(&tensor.shape, shape);
            let len = shape.iter().product::<u64>() as u16;
            prop_assert_eq!(read(&written, tensor), (0..len).collect::<Vec<u16>>());
        }
        prop_assert_eq!(read(&written, &checkpoint.tensors["plain"]), vec![7]);
    }

    #[test]
    fn merge_without_one_rank_is_error((mesh, tensors) in worlds(), rank in any::<prop::sample::Index>()) {
        let mut written = write(&mesh, &tensors, false);
        prop_assume!(written.ranks.len() > 1);
        written.ranks.remove(rank.index(written.ranks.len()));
        merged(&written).unwrap_err();
    }
}

fn small() -> Written {
    let shard = vec![Placement::Shard { dim: 0 }];
    write(&[3], &[(vec![7, 2], shard), (vec![4], vec![Placement::Replicate])], false)
}

/// The message for a tensor that is missing in one file and present in another.
fn not_in_rank(tensor: &str, other: &str) -> String {
    format!("it has no tensor `{tensor}`, which {other} has; the files are of different checkpoints")
}

/// The file and the message of a merge that fails.
fn fault(written: &Written) -> (PathBuf, String) {
    match merged(written) {
        Err(Error::Malformed { path, reason, .. } | Error::Unsupported { path, reason }) => (path, reason),
        other => panic!("{other:?}"),
    }
}

fn part(written: &mut Written, rank: usize) -> &mut Part {
    written.ranks[rank].tensors[0].part.as_mut().unwrap()
}

#[test]
fn rank_mismatch_error_names_file_and_tensor() {
    let mut written = small();
    part(&mut written, 1).distribution.shape = vec![8, 2];
    let expected = "tensor `t0` has the shape [8, 2] in it, but [7, 2] follows from rank0".to_owned();
    assert_eq!(fault(&written), ("rank1".into(), expected));

    let mut written = small();
    part(&mut written, 2).distribution.placements = vec![Placement::Shard { dim: 1 }];
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank2"));
    assert!(found.contains("rank0 distributes it differently"), "{found}");

    let mut written = small();
    written.ranks[1].tensors[0].local.dtype = TensorType::F16;
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.contains(" is F16 in it and BF16 in "), "{found}");

    let mut written = small();
    written.ranks[1].tensors[0].part = None;
    assert!(fault(&written).1.contains("distributed in only one of this file and rank0"));
}

#[test]
fn wrong_local_tensor_shape_is_rejected() {
    for rank in 0..3 {
        let mut written = small();
        written.ranks[rank].tensors[0].local.shape[0] += 1;
        let (path, found) = fault(&written);
        assert_eq!(path, PathBuf::from(format!("rank{rank}")));
        assert!(found.starts_with("tensor `t0` has the shape"), "{found}");
    }
}

#[test]
fn tensor_missing_from_one_rank_is_error() {
    let mut written = small();
    written.ranks[2].tensors.remove(0);
    let expected = not_in_rank("t0", "rank0");
    assert_eq!(fault(&written), ("rank2".into(), expected));

    let mut written = small();
    written.ranks[0].tensors.remove(1);
    let expected = not_in_rank("t1", "rank1");
    assert_eq!(fault(&written), ("rank0".into(), expected));
}

#[test]
fn plain_tensor_shape_mismatch_is_error() {
    let mut written = small();
    let plain = written.ranks[1].tensors.last_mut().unwrap();
    (plain.local.shape, plain.local.strides) = (vec![1], vec![1]);
    assert!(fault(&written).1.contains("tensor `plain` has the shape"));
}

#[test]
fn two_files_of_same_rank_are_rejected() {
    let mut written = small();
    let place = part(&mut written, 1);
    (place.rank, place.coordinate) = (None, vec![0]);
    written.ranks[1].tensors[0].local = written.ranks[0].tensors[0].local.clone();
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.starts_with("rank0 and rank1 are both of rank 0; "), "{found}");

    let mut written = small();
    part(&mut written, 1).rank = Some(2);
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.contains("its rank is 2, where 1 was expected"), "{found}");
}

#[test]
fn equal_meshes_are_merged_as_replicas() {
    // Two groups of two ranks, each of which holds the whole tensor.
    let shard = vec![Placement::Shard { dim: 0 }];
    let mut written = write(&[2], &[(vec![5], shard)], false);
    let again = written.ranks.clone();
    written.ranks.extend(again);
    for (rank, tensors) in written.ranks.iter_mut().enumerate() {
        tensors.rank = rank;
        tensors.tensors[0].part.as_mut().unwrap().rank = Some(rank as u64);
    }
    let checkpoint = merged(&written).unwrap();
    checkpoint.check_coverage().unwrap();
    assert_eq!(read(&written, &checkpoint.tensors["t0"]), [0, 1, 2, 3, 4]);

    // The files of the second coordinate both claim the first one.
    for rank in [1, 3] {
        let local = written.ranks[0].tensors[0].local.clone();
        written.ranks[rank].tensors[0].local = local;
        written.ranks[rank].tensors[0].part.as_mut().unwrap().coordinate = vec![0];
    }
    assert!(fault(&written).1.contains("no file holds position [1]"));
}
