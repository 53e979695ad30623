//! Merging of ranks, over random meshes, compared with tensors that a simple model distributes; and damaged files.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::{
    checkpoint::{Source, packed_strides},
    safetensors::TensorType,
};

/// The files of ranks, with two bytes per element, and their parsed contents.
struct Written {
    bytes: Vec<Vec<u8>>,
    ranks: Vec<RankParts>,
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

/// Distributes tensors whose elements are their flat indices. If `transposed`, local tensors are stored with their
/// dimensions reversed.
fn write(mesh: &[u64], tensors: &[(Vec<u64>, Vec<Placement>)], transposed: bool) -> Written {
    let places = places(mesh);
    let mut written = Written { bytes: vec![Vec::new(); places.len()], ranks: Vec::new() };
    for (rank, place) in places.iter().enumerate() {
        let bytes = &mut written.bytes[rank];
        let mut found = Vec::new();
        for (number, (shape, placements)) in tensors.iter().enumerate() {
            let axes = mesh.iter().copied().zip(placements.iter().copied()).collect();
            let whole = Distribution::new(shape.clone(), axes).unwrap();
            let held: Vec<Vec<u64>> = whole.local_box(place).into_iter().map(Iterator::collect).collect();
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
                    let (size, stride) = (shape[dim], strides[dim]);
                    inner.map(move |(index, i): (&u64, u64)| (flat * size + index, at + i * stride))
                };
                elements = elements.into_iter().flat_map(step).collect();
            }
            for (flat, at) in elements.into_iter().take(len as usize) {
                let at = (offset + 2 * at) as usize;
                bytes[at..at + 2].copy_from_slice(&(flat as u16).to_le_bytes());
            }
            let local = LocalTensor { dtype: TensorType::Bf16, shape: sizes, strides, source: rank, offset };
            let place = Place::At(whole, place.clone());
            let path = key(&format!("t{number}"));
            found.push(Part { path, role: Role::Model, local, place, windows: None });
        }
        let offset = bytes.len() as u64;
        bytes.extend([7, rank as u8]);
        let local =
            LocalTensor { dtype: TensorType::Bf16, shape: vec![], strides: vec![], source: rank, offset };
        found.push(Part::copy(key("plain"), Role::Model, local, rank, places.len()));
        let path = PathBuf::from(format!("rank{rank}"));
        written.ranks.push(RankParts { path, parts: found });
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
    let mut put = |element: u64, chunk: &Chunk, distance: u64| {
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
                if shard && dims > 0 { Placement::Shard(dim.index(dims)) } else { Placement::Replicate }
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
    let shard = vec![Placement::Shard(0)];
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

/// Replaces the distribution of the first tensor in a rank's file.
fn distribute(written: &mut Written, rank: usize, shape: &[u64], placement: Placement) {
    let whole = Distribution::new(shape.to_vec(), vec![(3, placement)]).unwrap();
    written.ranks[rank].parts[0].place = Place::At(whole, vec![rank as u64]);
}

fn coordinate(written: &mut Written, rank: usize) -> &mut Vec<u64> {
    let Place::At(_, coordinate) = &mut written.ranks[rank].parts[0].place else { panic!("it has one") };
    coordinate
}

#[test]
fn rank_mismatch_error_names_file_and_tensor() {
    let mut written = small();
    distribute(&mut written, 1, &[8, 2], Placement::Shard(0));
    let expected = "tensor `t0` has the shape [8, 2] in it, but [7, 2] follows from rank0".to_owned();
    assert_eq!(fault(&written), ("rank1".into(), expected));

    let mut written = small();
    distribute(&mut written, 2, &[7, 2], Placement::Shard(1));
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank2"));
    assert!(found.contains("rank0 distributes it differently"), "{found}");

    let mut written = small();
    written.ranks[1].parts[0].local.dtype = TensorType::F16;
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.contains(" is F16 in it and BF16 in "), "{found}");

    // Plain in one file, sharded in the others.
    let mut written = small();
    distribute(&mut written, 1, &[7, 2], Placement::Replicate);
    assert!(fault(&written).1.contains("rank0 distributes it differently"));
}

#[test]
fn wrong_local_tensor_shape_is_rejected() {
    for rank in 0..3 {
        let mut written = small();
        written.ranks[rank].parts[0].local.shape[0] += 1;
        let (path, found) = fault(&written);
        assert_eq!(path, PathBuf::from(format!("rank{rank}")));
        assert!(found.starts_with("tensor `t0` has the shape"), "{found}");
    }
}

#[test]
fn tensor_missing_from_one_rank_is_error() {
    let mut written = small();
    written.ranks[2].parts.remove(0);
    let expected = not_in_rank("t0", "rank0");
    assert_eq!(fault(&written), ("rank2".into(), expected));

    let mut written = small();
    written.ranks[0].parts.remove(1);
    let expected = not_in_rank("t1", "rank1");
    assert_eq!(fault(&written), ("rank0".into(), expected));
}

#[test]
fn plain_tensor_shape_mismatch_is_error() {
    let mut written = small();
    let plain = written.ranks[1].parts.pop().unwrap();
    let local = LocalTensor { shape: vec![1], strides: vec![1], ..plain.local };
    written.ranks[1].parts.push(Part::copy(plain.path, Role::Model, local, 1, 3));
    assert!(fault(&written).1.contains("tensor `plain` has the shape"));
}

#[test]
fn two_files_of_same_rank_are_rejected() {
    let mut written = small();
    *coordinate(&mut written, 1) = vec![0];
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.starts_with("rank0 and rank1 are both of rank 0; "), "{found}");

    let mut written = small();
    let again = written.ranks[1].parts[0].clone();
    written.ranks[1].parts.push(again);
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(found.starts_with("two tensors or values have the name `t0`"), "{found}");
}

#[test]
fn equal_meshes_are_merged_as_replicas() {
    // Two groups of two ranks, each of which holds the whole tensor.
    let shard = vec![Placement::Shard(0)];
    let mut written = write(&[2], &[(vec![5], shard)], false);
    let again = written.ranks.clone();
    written.ranks.extend(again);
    for (rank, of_rank) in written.ranks.iter_mut().enumerate() {
        let plain = of_rank.parts.pop().unwrap();
        of_rank.parts.push(Part::copy(plain.path, Role::Model, plain.local, rank, 4));
    }
    let checkpoint = merged(&written).unwrap();
    checkpoint.check_coverage().unwrap();
    assert_eq!(read(&written, &checkpoint.tensors["t0"]), [0, 1, 2, 3, 4]);

    // The files of the second coordinate both claim the first one.
    for rank in [1, 3] {
        let local = written.ranks[0].parts[0].local.clone();
        written.ranks[rank].parts[0].local = local;
        *coordinate(&mut written, rank) = vec![0];
    }
    assert!(fault(&written).1.contains("no file holds position [1]"));
}

/// Pieces that say where they begin: a rank may have several or none, and a copy of one is read once.
#[test]
fn pieces_that_state_their_box_are_joined() {
    let whole = write(&[4], &[(vec![7, 2], vec![Placement::Shard(0)])], false);
    let mut written = write(&[4], &[(vec![7, 2], vec![Placement::Shard(0)])], false);
    for (rank, of_rank) in written.ranks.iter_mut().enumerate() {
        let place = Place::From { offsets: vec![2 * rank as u64, 0], shape: vec![7, 2] };
        of_rank.parts.truncate(1);
        of_rank.parts[0].place = place;
    }
    let (copy, moved) = (written.ranks[0].parts[0].clone(), written.ranks[2].parts.pop().unwrap());
    written.ranks[1].parts.extend([copy, moved]);
    let checkpoint = merged(&written).unwrap();
    checkpoint.check_coverage().unwrap();
    assert_eq!(checkpoint.tensors["t0"].chunks.len(), 4);
    let expected = merged(&whole).unwrap();
    assert_eq!(read(&written, &checkpoint.tensors["t0"]), read(&whole, &expected.tensors["t0"]));

    // A lost piece is found when coverage is checked.
    written.ranks[3].parts.clear();
    assert!(merged(&written).unwrap().check_coverage().is_err());
    // A piece of another shape is not.
    let Place::From { shape, .. } = &mut written.ranks[1].parts[0].place else { panic!("it begins there") };
    shape[0] = 8;
    assert!(fault(&written).1.contains("tensor `t0` has the shape [8, 2] in it"));
}

proptest! {
    #[test]
    fn chunks_locate_every_element_of_range(
        lens in prop::collection::vec(0u64..6, 1..6),
        ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let run = |(source, len): (usize, &u64)| LocalTensor {
            dtype: TensorType::F32, shape: vec![*len], strides: vec![1], source, offset: 100 * source as u64
        };
        let runs: Vec<LocalTensor> = lens.iter().enumerate().map(run).collect();
        // The place of each element of the sequence, one by one.
        let places = runs.iter().flat_map(|run| (0..run.len()).map(|i| (run.source, run.offset + 4 * i)));
        let places: Vec<(usize, u64)> = places.collect();
        let ends = [ends.0, ends.1].map(|end| end.index(places.len() + 1) as u64);
        let range = ends[0].min(ends[1])..ends[0].max(ends[1]);
        let mut seen = 0;
        for chunk in chunks_of(&runs, range.clone()) {
            let Region::Flat(elements) = chunk.region else { panic!("runs are flat") };
            prop_assert_eq!(elements.start, seen);
            for (i, element) in elements.enumerate() {
                let place = places[(range.start + element) as usize];
                prop_assert_eq!(place, (chunk.source, chunk.offset + 4 * i as u64));
                seen += 1;
            }
        }
        prop_assert_eq!(seen, range.end - range.start);
    }
}
