//! Checks the coverage proof against counting every element, over random mixtures of flat ranges and boxes.

use std::{collections::BTreeMap, path::PathBuf};

use proptest::prelude::*;

use super::*;
use crate::{
    checkpoint::{Key, Role},
    safetensors::TensorType,
};

fn tensor(shape: &[u64], regions: Vec<Region>) -> (Tensor, Vec<Source>) {
    let sources = (0..regions.len().max(1))
        .map(|i| Source::File { path: PathBuf::from(format!("file{i}")), len: 1 << 20 })
        .collect();
    let chunks = regions.into_iter().enumerate();
    let chunks = chunks.map(|(source, region)| Chunk { region, source, offset: 0 }).collect();
    let path = vec![Key::Name("w".into())];
    let tensor = Tensor { path, role: Role::Model, dtype: TensorType::U8, shape: shape.to_vec(), chunks };
    (tensor, sources)
}

/// Lists the flat indices in a region, by counting.
fn elements(region: &Region, shape: &[u64]) -> Vec<u64> {
    match region {
        Region::Flat(range) => range.clone().collect(),
        Region::Box { offsets, sizes, .. } => {
            let mut flat = vec![0];
            for ((offset, size), dim) in offsets.iter().zip(sizes).zip(shape) {
                flat = flat.iter().flat_map(|at| (0..*size).map(move |i| at * dim + offset + i)).collect();
            }
            flat
        }
    }
}

/// Counts the chunks that contain each element.
fn holders(shape: &[u64], regions: &[Region]) -> Vec<usize> {
    let mut held = vec![0; shape.iter().product::<u64>() as usize];
    for element in regions.iter().flat_map(|region| elements(region, shape)) {
        held[element as usize] += 1;
    }
    held
}

/// Returns the two files named in a message as containing the same elements.
fn two_files(reason: &str) -> Option<(&str, &str)> {
    let (_, files) = reason.split_once("are held twice, by ")?;
    files.split_once(';')?.0.split_once(" and by ")
}

fn check_against_counting(shape: &[u64], regions: Vec<Region>) -> Result<(), TestCaseError> {
    let held = holders(shape, &regions);
    let (tensor, sources) = tensor(shape, regions);
    let first = held.iter().position(|holders| *holders != 1);
    match (tensor.check_coverage(&sources), first) {
        (Ok(()), None) => {}
        (Err(Error::NotWhole { elements, reason, .. }), Some(first)) => {
            prop_assert_eq!(elements.start, first as u64);
            prop_assert!(!elements.is_empty());
            let held = &held[first..elements.end as usize];
            match two_files(&reason) {
                None => prop_assert!(held.iter().all(|holders| *holders == 0), "{reason}"),
                Some((one, second)) => {
                    prop_assert!(held.iter().all(|holders| *holders > 1), "{reason}");
                    prop_assert_ne!(one, second);
                }
            }
        }
        (got, expected) => prop_assert!(false, "{got:?} where the first fault is at {expected:?}"),
    }
    Ok(())
}

/// Cuts a shape into boxes that cover it once, by repeatedly cutting a box in two.
fn cut(
    shape: &[u64],
    cuts: &[(prop::sample::Index, prop::sample::Index, prop::sample::Index)],
) -> Vec<Region> {
    let whole: Vec<Range<u64>> = shape.iter().map(|dim| 0..*dim).collect();
    let mut boxes = vec![whole];
    for (which, dim, at) in cuts.iter().filter(|_| !shape.is_empty()) {
        let which = which.index(boxes.len());
        let dim = dim.index(shape.len());
        let range = boxes[which][dim].clone();
        let at = range.start + at.index((range.end - range.start) as usize + 1) as u64;
        let mut second = boxes[which].clone();
        second[dim].start = at;
        boxes[which][dim].end = at;
        boxes.push(second);
    }
    let region = |bounds: Vec<Range<u64>>| {
        Region::packed(
            bounds.iter().map(|b| b.start).collect(),
            bounds.iter().map(|b| b.end - b.start).collect(),
        )
    };
    boxes.into_iter().map(region).collect()
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![3 => 1u64..6, 1 => Just(1u64), 1 => Just(0u64)], 0..5)
}

/// Converts a region to flat runs with the same elements.
fn as_flat_runs(region: &Region, shape: &[u64]) -> Vec<Region> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for element in elements(region, shape) {
        match runs.last_mut() {
            Some(run) if run.end == element => run.end += 1,
            _ => runs.push(element..element + 1),
        }
    }
    runs.into_iter().map(Region::Flat).collect()
}

type Cut = (prop::sample::Index, prop::sample::Index, prop::sample::Index);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn complete_coverage_passes_and_first_fault_is_located(
        shape in shapes(),
        cuts in prop::collection::vec(any::<Cut>(), 0..8),
        flat in prop::collection::vec(any::<bool>(), 9),
        removed in proptest::option::weighted(0.3, any::<prop::sample::Index>()),
        doubled in proptest::option::weighted(0.3, any::<prop::sample::Index>()),
    ) {
        let boxes = cut(&shape, &cuts);
        let mut regions: Vec<Region> = boxes
            .iter()
            .zip(flat)
            .flat_map(|(region, flat)| if flat { as_flat_runs(region, &shape) } else { vec![region.clone()] })
            .collect();
        if let Some(index) = removed.filter(|_| !regions.is_empty()) {
            let index = index.index(regions.len());
            regions.remove(index);
        }
        if let Some(index) = doubled.filter(|_| !regions.is_empty()) {
            let again = regions[index.index(regions.len())].clone();
            regions.push(again);
        }
        check_against_counting(&shape, regions)?;
    }

    #[test]
    fn coverage_of_random_regions_matches_naive_counting(
        shape in prop::collection::vec(1u64..5, 1..4),
        seeds in prop::collection::vec(prop::collection::vec(any::<Cut>(), 3..4), 0..5),
        flat in any::<Cut>(),
    ) {
        let len = shape.iter().product::<u64>() as usize;
        let start = flat.0.index(len);
        let mut regions = vec![Region::Flat(start as u64..(start + flat.1.index(len - start + 1)) as u64)];
        for seed in seeds {
            let bounds = shape.iter().zip(&seed).map(|(dim, (offset, size, _))| {
                let offset = offset.index(*dim as usize) as u64;
                (offset, size.index((dim - offset) as usize + 1) as u64)
            });
            let (offsets, sizes) = bounds.unzip();
            regions.push(Region::packed(offsets, sizes));
        }
        check_against_counting(&shape, regions)?;
    }
}

#[test]
fn missing_elements_error_names_tensor_index_and_files() {
    let (tensor, sources) = tensor(&[4, 3], vec![Region::Flat(0..6), Region::packed(vec![3, 0], vec![1, 3])]);
    let message = tensor.check_coverage(&sources).unwrap_err().to_string();
    let expected = "elements 6..9 (from index [2, 0]) of tensor `w` of shape [4, 3] are in none of its 2 files (file0, \
                    file1); a file or a rank is missing, or the checkpoint was not written to its end";
    assert_eq!(message, expected);
}

#[test]
fn overlapping_columns_error_names_both_files() {
    let halves = vec![Region::packed(vec![0, 0], vec![2, 2]), Region::packed(vec![0, 1], vec![2, 2])];
    let (tensor, sources) = tensor(&[2, 3], halves);
    let message = tensor.check_coverage(&sources).unwrap_err().to_string();
    let expected = "elements 1..2 (from index [0, 1]) of tensor `w` of shape [2, 3] are held twice, by file0 and by \
                    file1; files of different checkpoints may be mixed";
    assert_eq!(message, expected);
}

#[test]
fn chunks_outside_tensor_or_file_are_rejected() {
    let (outside, sources) = tensor(&[4], vec![Region::Flat(0..4), Region::Flat(4..5)]);
    let fault = outside.check_coverage(&sources).unwrap_err();
    assert!(fault.to_string().contains("Flat(4..5) of tensor `w`, which has the shape [4]"), "{fault}");

    let (mut beyond, sources) = tensor(&[4], vec![Region::Flat(0..4)]);
    beyond.chunks[0].offset = (1 << 20) - 4;
    beyond.check_coverage(&sources).unwrap();
    beyond.chunks[0].offset += 1;
    let fault = beyond.check_coverage(&sources).unwrap_err();
    assert!(fault.to_string().contains("tensor `w` reaches beyond its 1048576 bytes"), "{fault}");
    beyond.chunks[0].offset = u64::MAX;
    beyond.check_coverage(&sources).unwrap_err();
}

#[test]
fn huge_chunk_grid_is_checked_without_visiting_elements() {
    let (rows, columns, side) = (1 << 20, 1 << 20, 64);
    let cell = |i: u64| vec![i / side * (rows / side), i % side * (columns / side)];
    let cells = (0..side * side).rev();
    let cells = cells.map(|i| Region::packed(cell(i), vec![rows / side, columns / side])).collect();
    let (mut tensor, mut sources) = tensor(&[rows, columns], cells);
    for source in &mut sources {
        let Source::File { len, .. } = source else { continue };
        *len = u64::MAX;
    }
    tensor.check_coverage(&sources).unwrap();
    let removed = tensor.chunks.remove(100);
    let Region::Box { offsets, .. } = removed.region else { panic!("a grid has boxes") };
    let Err(Error::NotWhole { elements, .. }) = tensor.check_coverage(&sources) else {
        panic!("one cell is missing")
    };
    assert_eq!(elements.start, offsets[0] * columns + offsets[1]);
    let names = BTreeMap::from([("w".to_owned(), tensor)]);
    let checkpoint = Checkpoint { tensors: names, sources, ..Checkpoint::default() };
    checkpoint.check_coverage().unwrap_err();
}
