//! Merging of flat copies, in all stages, compared with parameters that a simple model cuts; and damaged copies.

use std::path::PathBuf;

use proptest::prelude::*;

use super::{
    merge::merge,
    parse::{FlatStates, ModelStates, Shapes},
};
use crate::{
    checkpoint::{Checkpoint, Region, Role, Source, Tensor, Value, element_count},
    error::Error,
    formats::{local::LocalTensor, optimizer::StateItem},
    safetensors::TensorType,
};

/// Two bytes per element: the number of the parameter, then that of the element; padding is 0xff.
type Element = [u8; 2];

struct Written {
    bytes: Vec<Vec<u8>>,
    flats: Vec<FlatStates>,
    models: Vec<ModelStates>,
}

fn len(shape: &[u64]) -> usize {
    element_count(shape).unwrap() as usize
}

fn elements(parameter: usize, shape: &[u64], base: u8) -> Vec<Element> {
    (0..len(shape)).map(|i| [base + parameter as u8, i as u8]).collect()
}

/// The elements that each rank holds of each group, by the layout of the stage. `cuts` are the places where stage 3
/// begins another flat group.
fn flat(stage: u64, world: usize, groups: &[Shapes], base: u8, cuts: &[usize]) -> Vec<Vec<Vec<Element>>> {
    let mut number = 0;
    let mut values = groups.iter().map(|group| {
        let parameters = group.iter().map(|(_, shape)| {
            number += 1;
            elements(number - 1, shape, base)
        });
        parameters.collect::<Vec<_>>()
    });
    if stage < 3 {
        let groups = values.map(|parameters| {
            let mut all: Vec<Element> = parameters.concat();
            all.resize(all.len().div_ceil(2 * world) * 2 * world, [0xff; 2]);
            all
        });
        let groups: Vec<Vec<Element>> = groups.collect();
        let of_rank = |rank| {
            groups.iter().map(move |all| {
                let each = all.len() / world;
                all[rank * each..(rank + 1) * each].to_vec()
            })
        };
        return (0..world).map(|rank| of_rank(rank).collect()).collect();
    }
    let parameters: Vec<Vec<Element>> = values.by_ref().flatten().collect();
    let of_rank = |rank: usize| {
        let mut all = Vec::new();
        for parameter in &parameters {
            let each = parameter.len().div_ceil(world);
            all.extend(
                (rank * each..(rank + 1) * each).map(|i| parameter.get(i).copied().unwrap_or([0xff; 2])),
            );
        }
        let mut flat = Vec::new();
        for cut in cuts.iter().rev() {
            flat.push(all.split_off((*cut).min(all.len())));
        }
        flat.push(all);
        flat.reverse();
        flat
    };
    (0..world).map(of_rank).collect()
}

fn write(stage: u64, world: usize, groups: &[Shapes], mut cuts: Vec<usize>) -> Written {
    cuts.sort_unstable();
    let mut written = Written { bytes: vec![Vec::new(); world], flats: Vec::new(), models: Vec::new() };
    let masters = flat(stage, world, groups, 0, &cuts);
    let averages = flat(stage, world, groups, 100, &cuts);
    for rank in 0..world {
        let bytes = &mut written.bytes[rank];
        let mut put = |elements: &[Element]| {
            let offset = bytes.len() as u64;
            bytes.extend(elements.iter().flatten());
            let shape = vec![elements.len() as u64];
            LocalTensor { dtype: TensorType::Bf16, shape, strides: vec![1], source: rank, offset }
        };
        let mut state = FlatStates {
            path: PathBuf::from(format!("optim{rank}")),
            stage,
            world_size: world,
            groups: masters[rank].iter().map(|elements| put(elements)).collect(),
            ..FlatStates::default()
        };
        for (number, elements) in averages[rank].iter().enumerate() {
            let items = vec![
                ("exp_avg".to_owned(), StateItem::Tensor(put(elements))),
                ("step".to_owned(), StateItem::Value(Value::Int(number as i64))),
            ];
            state.states.insert(number as u64, items);
        }
        written.flats.push(state);
    }
    for rank in 0..if stage == 3 { world } else { 1 } {
        let path = PathBuf::from(format!("model{rank}"));
        written.models.push(ModelStates { path, param_shapes: groups.to_vec(), ..ModelStates::default() });
    }
    written
}

fn merged(written: &Written) -> Result<Checkpoint, Error> {
    let sources = written.flats.iter().zip(&written.bytes);
    let sources =
        sources.map(|(rank, bytes)| Source::File { path: rank.path.clone(), len: bytes.len() as u64 });
    let mut checkpoint = Checkpoint { sources: sources.collect(), ..Checkpoint::default() };
    merge(&written.flats, &written.models, &mut checkpoint)?;
    Ok(checkpoint)
}

fn read(written: &Written, tensor: &Tensor) -> Vec<Element> {
    let mut out = vec![[0, 0]; tensor.len() as usize];
    for chunk in &tensor.chunks {
        let Region::Flat(range) = &chunk.region else { panic!("flat copies are flat: {chunk:?}") };
        for (i, element) in range.clone().enumerate() {
            let at = chunk.offset as usize + 2 * i;
            out[element as usize].copy_from_slice(&written.bytes[chunk.source][at..at + 2]);
        }
    }
    out
}

/// Groups of named shapes, some of them empty or 0-d.
fn groups() -> impl Strategy<Value = Vec<Shapes>> {
    let shape = prop::collection::vec(prop_oneof![5 => 1u64..6, 1 => Just(0u64)], 0..3);
    prop::collection::vec(prop::collection::vec(shape, 1..4), 1..4).prop_map(|groups| {
        let mut number = 0;
        let mut named = |shape| {
            number += 1;
            (format!("p{}", number - 1), shape)
        };
        groups.into_iter().map(|shapes| shapes.into_iter().map(&mut named).collect()).collect()
    })
}

proptest! {
    #[test]
    fn merging_ranks_restores_partitioned_tensors(
        stage in 1u64..4, world in 1usize..9, groups in groups(), cuts in prop::collection::vec(0usize..30, 0..3),
    ) {
        let written = write(stage, world, &groups, cuts);
        let checkpoint = merged(&written).unwrap();
        checkpoint.check_coverage().unwrap();
        prop_assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
        for (number, (name, shape)) in groups.iter().flatten().enumerate() {
            let state = format!("optim.state.{name}.exp_avg");
            for (name, base, role) in [(name, 0, Role::Model), (&state, 100, Role::Optimizer)] {
                let tensor = &checkpoint.tensors[name];
                prop_assert_eq!((&tensor.shape, tensor.role), (shape, role));
                prop_assert_eq!(read(&written, tensor), elements(number, shape, base));
            }
            let step = format!("optim.state.{name}.step");
            prop_assert!(checkpoint.values.contains_key(&step));
        }
        prop_assert_eq!(checkpoint.tensors.len(), 2 * groups.iter().flatten().count());
    }
}

fn small(stage: u64) -> Written {
    let group = |names: [(&str, Vec<u64>); 2]| names.map(|(name, shape)| (name.to_owned(), shape)).to_vec();
    let groups = [group([("a", vec![5, 3]), ("b", vec![4])]), group([("c", vec![9]), ("d", vec![2, 2])])];
    write(stage, 3, &groups, vec![4])
}

/// The message for a tensor that is missing in one file and present in another.
fn not_in_rank(tensor: &str, other: &str) -> String {
    format!("it has no tensor `{tensor}`, which {other} has; the files are of different checkpoints")
}

/// The message for shards with too few elements in total.
fn too_short(tensor: &str, expected: u64, got: u64) -> String {
    format!(
        "its shard of `{tensor}` is too short: all ranks together hold {got} elements, but its parameters \
         have {expected}; the file was truncated or belongs to another checkpoint"
    )
}

fn fault(written: &Written) -> (PathBuf, String) {
    match merged(written) {
        Err(Error::Malformed { path, reason, .. } | Error::Unsupported { path, reason }) => (path, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn short_flat_group_error_names_parameter() {
    let mut written = small(3);
    for rank in &mut written.flats {
        rank.groups[1].shape[0] -= 1;
    }
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("optim0"));
    assert_eq!(found, too_short("d", 12, 11));

    let mut written = small(2);
    for rank in &mut written.flats {
        rank.groups[0].shape[0] -= 3;
    }
    assert!(fault(&written).1.contains("shard of `b` is too short"));
}

#[test]
fn truncated_flat_group_error_names_rank_file() {
    let mut written = small(3);
    written.flats[2].groups[1].shape[0] -= 1;
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("optim2"));
    assert!(found.contains("list of lengths of flat groups"), "{found}");
}

#[test]
fn unused_flat_group_elements_are_rejected() {
    for stage in [2, 3] {
        let mut written = small(stage);
        for model in &mut written.models {
            model.param_shapes[1].remove(0);
        }
        let (_, found) = fault(&written);
        assert!(found.contains("used by parameters"), "{found}");
    }
}

#[test]
fn shape_or_dtype_mismatch_between_ranks_is_error() {
    let mut written = small(3);
    written.models[1].param_shapes[0][0].1 = vec![3, 5];
    assert_eq!(fault(&written).0, PathBuf::from("model1"));

    let mut written = small(3);
    written.flats[1].groups[0].dtype = TensorType::F16;
    let (path, found) = fault(&written);
    assert_eq!(path, PathBuf::from("optim1"));
    assert!(found.contains(" is F16 in it and BF16 in "), "{found}");
}

#[test]
fn frozen_parameter_requires_fragment_from_every_rank() {
    let mut written = small(3);
    let fragment = |rank: usize| LocalTensor {
        dtype: TensorType::Bf16,
        shape: vec![2],
        strides: vec![1],
        source: rank,
        offset: 0,
    };
    for (rank, model) in written.models.iter_mut().enumerate() {
        model.frozen_shapes = vec![("f".into(), vec![5])];
        model.frozen_fragments.insert("f".into(), fragment(rank));
    }
    let tensor = merged(&written).unwrap().tensors["f"].clone();
    assert_eq!(tensor.chunks.len(), 3);
    written.models[2].frozen_fragments.clear();
    let expected = not_in_rank("f", "model0");
    assert_eq!(fault(&written), ("model2".into(), expected));
}

#[test]
fn states_of_another_length_are_skipped_with_note() {
    let mut written = small(3);
    let Some(StateItem::Tensor(average)) = written.flats[1].states.get_mut(&1).map(|items| &mut items[0].1)
    else {
        panic!("the first item is a tensor")
    };
    average.shape[0] -= 1;
    let checkpoint = merged(&written).unwrap();
    let note = "the optimizer's `exp_avg` is left out: optim1 has it in a different length or type";
    assert_eq!(checkpoint.notes, [note]);
    assert!(checkpoint.tensors.values().all(|tensor| tensor.role == Role::Model));

    let mut written = small(3);
    written.flats[1].states.remove(&1);
    let expected = not_in_rank("exp_avg of flat group 1", "optim0");
    assert_eq!(fault(&written), ("optim1".into(), expected));
}

#[test]
fn module_weights_are_used_only_without_flat_copy() {
    let mut written = small(1);
    let weight = written.flats[0].groups[0].clone();
    let module = &mut written.models[0].module;
    module.insert("a".into(), weight.clone());
    module.insert("alone".into(), weight.clone());
    let checkpoint = merged(&written).unwrap();
    assert_ne!(checkpoint.tensors["a"].shape, weight.shape);
    assert_eq!(checkpoint.tensors["alone"].shape, weight.shape);
}

#[test]
fn state_padding_of_last_rank_is_removed() {
    // 15 + 4 elements over 3 ranks: the last rank has 5 of padding, which DeepSpeed cuts from the weights only.
    let mut written = small(2);
    let whole = merged(&written).unwrap();
    let last = &mut written.flats[2];
    last.paddings = vec![5, 0];
    last.groups[0].shape[0] -= 5;
    let checkpoint = merged(&written).unwrap();
    assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
    checkpoint.check_coverage().unwrap();
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), whole.tensors.keys().collect::<Vec<_>>());
    for (name, tensor) in &whole.tensors {
        assert_eq!(read(&written, &checkpoint.tensors[name]), read(&written, tensor), "{name}");
    }
    // Any other length means another layout.
    written.flats[2].paddings = vec![4, 0];
    assert!(merged(&written).unwrap().notes[0].contains("is left out"));
}
