//! Grids of chunks against a slow oracle, and stores that a hostile writer could make.

use std::{collections::BTreeMap, fs, path::Path};

use proptest::prelude::*;

use super::{
    grid,
    ocdbt::{MANIFEST, Tree},
};
use crate::{checkpoint::Region, digest::DigestKind, error::Error};

/// Shapes, and chunks that may be larger; inside of them smaller ones that divide them.
fn grids() -> impl Strategy<Value = (Vec<u64>, Vec<u64>, Vec<u64>)> {
    let dim = (1u64..8, 1u64..4, 1u64..4).prop_map(|(size, inner, times)| (size, inner * times, inner));
    prop::collection::vec(dim, 0..4).prop_map(|dims| {
        let of = |pick: fn(&(u64, u64, u64)) -> u64| dims.iter().map(pick).collect();
        (of(|dim| dim.0), of(|dim| dim.1), of(|dim| dim.2))
    })
}

/// All indexes of a box of these sizes, by counting.
fn all_indexes(sizes: &[u64]) -> Vec<Vec<u64>> {
    sizes.iter().fold(vec![Vec::new()], |found, &size| {
        let longer = |index: Vec<u64>| (0..size).map(move |step| [index.clone(), vec![step]].concat());
        found.into_iter().flat_map(longer).collect()
    })
}

proptest! {
    #[test]
    fn every_element_is_where_division_says((shape, outer, inner) in grids()) {
        // For each element: the numbers of its chunk and inner chunk, and its place in the padded inner chunk.
        let mut found = BTreeMap::new();
        for (number, index) in grid::indexes(&shape, &outer).unwrap().enumerate() {
            for (inner_number, inner_index) in grid::indexes(&outer, &inner).unwrap().enumerate() {
                let begin = |dim: usize| index[dim] * outer[dim] + inner_index[dim] * inner[dim];
                let offsets: Vec<u64> = (0..shape.len()).map(begin).collect();
                let Some(region) = grid::region(&shape, &inner, offsets) else { continue };
                prop_assert!(region.is_inside(&shape));
                let Region::Box { offsets, sizes, strides } = region else { unreachable!() };
                for at in all_indexes(&sizes) {
                    let element: Vec<u64> = at.iter().zip(&offsets).map(|(at, offset)| at + offset).collect();
                    let place: u64 = at.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                    prop_assert!(found.insert(element, (number as u64, inner_number as u64, place)).is_none());
                }
            }
        }
        let flat = |index: &[u64], sizes: &[u64]| index.iter().zip(sizes).fold(0, |flat, (at, size)| flat * size + at);
        let ratio = |a: &[u64], b: &[u64]| -> Vec<u64> { a.iter().zip(b).map(|(a, b)| a.div_ceil(*b)).collect() };
        let each = |element: &[u64], step: fn(u64, u64, u64) -> u64| -> Vec<u64> {
            (0..element.len()).map(|dim| step(element[dim], outer[dim], inner[dim])).collect()
        };
        let expected = all_indexes(&shape).into_iter().map(|element| {
            let number = flat(&each(&element, |at, outer, _| at / outer), &ratio(&shape, &outer));
            let inner_number = flat(&each(&element, |at, outer, inner| at % outer / inner), &ratio(&outer, &inner));
            let place = flat(&each(&element, |at, _, inner| at % inner), &inner);
            (element, (number, inner_number, place))
        });
        prop_assert_eq!(found, expected.collect::<BTreeMap<_, _>>());
    }
}

#[test]
fn grids_of_too_many_chunks_are_refused() {
    assert!(grid::indexes(&[1 << 40, 1 << 40], &[1, 1]).is_none());
    assert!(grid::indexes(&[1 << 23], &[1]).is_none());
    assert_eq!(grid::indexes(&[0, 4], &[1, 1]).unwrap().count(), 0);
    assert_eq!(grid::indexes(&[], &[]).unwrap().count(), 1);
}

fn number(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn numbers(values: &[u64]) -> Vec<u8> {
    values.iter().copied().flat_map(number).collect()
}

fn envelope(magic: u32, compression: u64, body: &[u8]) -> Vec<u8> {
    let len = 14 + body.len() as u64 + 4;
    let mut bytes =
        [&magic.to_be_bytes()[..], &len.to_le_bytes(), &numbers(&[0, compression]), body].concat();
    let crc = DigestKind::Crc32c.of(&bytes).value as u32;
    bytes.extend(crc.to_le_bytes());
    bytes
}

/// A table of one file.
fn table(path: &str) -> Vec<u8> {
    [&numbers(&[1, path.len() as u64, 0])[..], path.as_bytes()].concat()
}

/// A manifest whose newest version has its root in a file at a place, with a height and a number of keys.
fn manifest(path: &str, offset: u64, len: u64, height: u8, keys: u64) -> Vec<u8> {
    let config = [&[7; 16][..], &numbers(&[0, 100, 1 << 20, 4, 0])].concat();
    let version = numbers(&[1, 1, height.into(), 0, offset, len, keys, 0, 0]);
    envelope(0x0cdb_3a2a, 0, &[config, table(path), version, vec![0; 8], number(0)].concat())
}

/// A node with inline values.
fn leaf(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let of = |len: fn(&(&str, &[u8])) -> u64| entries.iter().map(len).collect::<Vec<u64>>();
    let bytes = |part: fn(&(&str, &[u8])) -> Vec<u8>| entries.iter().flat_map(part).collect::<Vec<u8>>();
    let lens = [
        numbers(&[0, 0, entries.len() as u64]),
        numbers(&vec![0; entries.len() - 1]),
        numbers(&of(|(key, _)| key.len() as u64)),
        bytes(|(key, _)| key.as_bytes().to_vec()),
        numbers(&of(|(_, value)| value.len() as u64)),
        vec![0; entries.len()],
        bytes(|(_, value)| value.to_vec()),
    ];
    envelope(0x0cdb_20de, 0, &lens.concat())
}

/// A node with children at places of the file `d`.
fn inner(height: u8, places: &[(&str, u64, u64)]) -> Vec<u8> {
    let of = |pick: fn(&(&str, u64, u64)) -> u64| numbers(&places.iter().map(pick).collect::<Vec<u64>>());
    let parts = [
        vec![height],
        table("d"),
        number(places.len() as u64),
        numbers(&vec![0; places.len() - 1]),
        of(|place| place.0.len() as u64),
        of(|place| place.0.len() as u64),
        places.iter().flat_map(|place| place.0.bytes()).collect(),
        of(|_| 0),
        of(|place| place.1),
        of(|place| place.2),
        vec![0; 3 * places.len()],
    ];
    envelope(0x0cdb_20de, 0, &parts.concat())
}

fn read(manifest: &[u8], data: &[u8]) -> Result<Tree, Error> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(MANIFEST), manifest).unwrap();
    fs::write(dir.path().join("d"), data).unwrap();
    Tree::read(dir.path())
}

fn refused(manifest: &[u8], data: &[u8]) -> String {
    read(manifest, data).unwrap_err().to_string()
}

#[test]
fn trees_made_by_hand_are_read() {
    let leaves = [leaf(&[("x", b"1"), ("y", b"22")]), leaf(&[("z", b"")])];
    let (first, second) = (leaves[0].len() as u64, leaves[1].len() as u64);
    let root = inner(1, &[("a/", 0, first), ("b/", first, second)]);
    let data = [&leaves[0][..], &leaves[1], &root].concat();
    let tree = read(&manifest("d", first + second, root.len() as u64, 1, 3), &data).unwrap();
    assert_eq!(tree.values.keys().collect::<Vec<_>>(), ["a/x", "a/y", "b/z"]);
    assert_eq!(tree.values["a/y"].read().unwrap(), b"22");
    assert_eq!(tree.protections.len(), 4);
    let error = refused(&manifest("d", first + second, root.len() as u64, 1, 4), &data);
    assert!(error.contains("states 4 keys, but its tree has 3"), "{error}");
}

#[test]
fn nodes_that_contain_themselves_or_repeat_are_refused() {
    // A root that is its own child: the child must be lower.
    let len = inner(5, &[("a", 0, 60)]).len() as u64;
    let error = refused(&manifest("d", 0, len, 5, 1), &inner(5, &[("a", 0, len)]));
    assert!(error.contains("its height is Some(5)") && error.contains("says 4"), "{error}");
    // A tower in which each node has the one below it many times, so that there are more paths than memory.
    let (mut data, mut below) = (leaf(&[("x", b"1")]), (0, 0));
    below.1 = data.len() as u64;
    let letters: Vec<String> = (0..100).map(|letter| format!("{letter:03}")).collect();
    for height in 1..=8 {
        let places: Vec<_> = letters.iter().map(|letter| (&letter[..], below.0, below.1)).collect();
        let node = inner(height, &places);
        below = (data.len() as u64, node.len() as u64);
        data.extend(node);
    }
    let error = refused(&manifest("d", below.0, below.1, 8, 1), &data);
    assert!(error.contains("65536 nodes or 1073741824 bytes"), "{error}");
}

#[test]
fn counts_lengths_and_paths_that_lie_are_refused() {
    let node = leaf(&[("x", b"1")]);
    let len = node.len() as u64;
    for (path, offset, len, expected) in [
        ("d", 1, len, "it has"),
        ("d", u64::MAX, 2, "which is not there"),
        ("d", 0, 1 << 40, "it has"),
        ("../d", 0, len, "not a path below its folder"),
        ("/etc/passwd", 0, len, "not a path below its folder"),
        ("", 0, len, "which is not there"),
        ("e", 0, len, "failed to open"),
    ] {
        let error = refused(&manifest(path, offset, len, 0, 1), &node);
        assert!(error.contains(expected), "{path} {offset} {len}: {error}");
    }
    for (body, expected) in [
        (numbers(&[0, u64::MAX]), "more than it has bytes"),
        (numbers(&[0, 0, u64::MAX]), "more than it has bytes"),
        (numbers(&[0, 0, 0]), "it is empty"),
        (numbers(&[0, 0, 1, 50]), "ends early"),
        (numbers(&[0, 0, 1, 1, 120, 1, 0]), "ends early"),
        (numbers(&[0, 0, 1, 1, 120, 0, 2]), "of the kind 2"),
        (numbers(&[0, 0, 1, 1, 120, 0, 0, 9]), "1 bytes beyond its end"),
        (numbers(&[0, 0, 2, 9, 1, 1, 120, 121]), "shares more"),
        (numbers(&[0, 0, 2, 0, 1, 1, 121, 120]), "not in order"),
        (numbers(&[0, 0, 1, 1, 120, 5, 1, 0, 0]), "which is not there"),
        ([&[0][..], &[0xff; 11]].concat(), "more than 64 bits"),
        ([&numbers(&[0, 0, 1, 1])[..], &[0xff]].concat(), "not UTF-8"),
    ] {
        let node = envelope(0x0cdb_20de, 0, &body);
        let error = refused(&manifest("d", 0, node.len() as u64, 0, 1), &node);
        assert!(error.contains(expected), "{body:?}: {error}");
    }
    // Names that share their beginnings, and would be gigabytes.
    let long = "p".repeat(60_000);
    let count = 20_000;
    let prefixes = numbers(&vec![60_000; count - 1]);
    let suffixes = [number(60_000), vec![0; count - 1]].concat();
    let body =
        [number(0), number(count as u64), prefixes, suffixes, vec![0; count], long.into_bytes()].concat();
    let node = envelope(0x0cdb_20de, 0, &body);
    let error = refused(&manifest("d", 0, node.len() as u64, 0, 1), &node);
    assert!(error.contains("names of more than 65535 bytes, or of 67108864 bytes together"), "{error}");
    // A node that decodes to more than may be in memory.
    let zeros = zstd::bulk::compress(&vec![0; (1 << 28) + 1], 1).unwrap();
    let node = envelope(0x0cdb_20de, 1, &zeros);
    let error = refused(&manifest("d", 0, node.len() as u64, 0, 1), &node);
    assert!(error.contains("more than 268435456 bytes when decoded"), "{error}");
}

#[test]
fn envelopes_of_other_kinds_are_refused() {
    let good = manifest("d", 0, 1, 0, 1);
    assert!(refused(&good[..10], b"").contains("does not begin with 0cdb3a2a"));
    assert!(refused(&good[..good.len() - 1], b"").contains("states a length"));
    assert!(refused(&envelope(0x0cdb_3a2a, 7, b""), b"").contains("compression 7"));
    let mut numbered = vec![7; 16];
    numbered.push(1);
    assert!(refused(&envelope(0x0cdb_3a2a, 0, &numbered), b"").contains("numbered manifests"));
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            refused(&bytes, b"");
        }
    }
    assert!(Tree::read(Path::new("/nowhere")).is_err());
}

/// A tree without chunks, whose array is of zeros.
fn zeros(shape: &str, chunk: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let zarr = format!(
        r#"{{"chunk_grid":{{"configuration":{{"chunk_shape":[{chunk}]}},"name":"regular"}},"chunk_key_encoding":{{"name":
        "default"}},"codecs":[{{"configuration":{{"endian":"little"}},"name":"bytes"}},{{"name":"zstd"}}],"data_type":
        "float32","fill_value":0,"node_type":"array","shape":[{shape}],"zarr_format":3}}"#
    );
    let node = leaf(&[("w/zarr.json", zarr.as_bytes())]);
    fs::write(dir.path().join(MANIFEST), manifest("d", 0, node.len() as u64, 0, 1)).unwrap();
    fs::write(dir.path().join("d"), node).unwrap();
    let metadata = r#"{"tree_metadata":{"w":{"key_metadata":[{"key":"w","key_type":2}],"value_metadata":
        {"value_type":"jax.Array"}}},"use_zarr3":true}"#;
    fs::write(dir.path().join(super::METADATA_FILE), metadata).unwrap();
    match super::open(dir.path()) {
        Ok(checkpoint) => format!("{} chunks", checkpoint.tensors["w"].chunks.len()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn chunks_of_zeros_that_are_not_stored_are_limited() {
    assert_eq!(zeros("1000000", "1000"), "1000 chunks");
    let refused = zeros("2000000", "1");
    assert!(refused.contains("`w/c/1048576` stands for 4 bytes of zeros"), "{refused}");
    let refused = zeros("1099511627776", "1099511627776");
    assert!(refused.contains("stands for 4398046511104 bytes"), "{refused}");
}
