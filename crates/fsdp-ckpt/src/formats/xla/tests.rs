//! Merging of ranks, in all layouts and world sizes, compared with checkpoints that a simple model cuts; and damaged
//! files.

use std::path::PathBuf;

use proptest::prelude::*;

use super::{
    METADATA, holds_shards,
    merge::merge,
    parse::Tables,
    rank_state::{OptimizerState, RankState, Sharded},
};
use crate::{
    checkpoint::{Checkpoint, Region, Role, Source, Tensor, Value, element_count, packed_strides},
    error::Error,
    formats::{local::LocalTensor, optimizer::StateItem},
    safetensors::TensorType,
    torch::Item,
};

/// How parameters are cut.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Flat,
    Dim0,
    Flattened,
}

/// A model in one module, with values that distinguish every element of every tensor.
#[derive(Clone, Debug)]
struct Model {
    world: usize,
    layout: Layout,
    /// Shapes of the parameters `p0`, `p1`, ..
    shapes: Vec<Vec<u64>>,
    buffer: Vec<u64>,
}

/// The rank files, with two bytes per element, and their parsed contents.
struct Written {
    bytes: Vec<Vec<u8>>,
    ranks: Vec<RankState>,
}

fn len(shape: &[u64]) -> u64 {
    element_count(shape).unwrap()
}

/// Elements of a tensor: the number of the tensor, then the number of the element.
fn elements(tensor: u8, len: u64) -> Vec<[u8; 2]> {
    (0..len).map(|i| [tensor, i as u8]).collect()
}

impl Written {
    /// Appends elements to the file of a rank.
    fn put(&mut self, rank: usize, shape: Vec<u64>, elements: &[[u8; 2]]) -> LocalTensor {
        assert_eq!(len(&shape), elements.len() as u64);
        let offset = self.bytes[rank].len() as u64;
        self.bytes[rank].extend(elements.iter().flatten());
        let strides = packed_strides(&shape);
        LocalTensor { dtype: TensorType::Bf16, shape, strides, source: rank, offset }
    }

    /// Cuts the elements of a parameter into one shard per rank.
    fn cut(&mut self, layout: Layout, shape: &[u64], mut elements: Vec<[u8; 2]>) -> Vec<LocalTensor> {
        let world = self.ranks.len();
        let inner = match layout {
            Layout::Dim0 => shape[1..].to_vec(),
            _ => vec![],
        };
        let unit = if layout == Layout::Dim0 { len(&inner) as usize } else { 128 };
        let whole = (world * unit).max(1);
        elements.resize(elements.len().div_ceil(whole) * whole * usize::from(unit > 0), [0xff, 0xff]);
        let each = elements.len() / world;
        (0..world)
            .map(|rank| {
                let rows = each
                    .checked_div(unit)
                    .map_or_else(|| shape[0].div_ceil(world as u64), |rows| rows as u64);
                let shape =
                    if layout == Layout::Dim0 { [&[rows], &inner[..]].concat() } else { vec![each as u64] };
                self.put(rank, shape, &elements[rank * each..(rank + 1) * each])
            })
            .collect()
    }
}

/// Writes a model with an optimizer of one state tensor, a step and a value per parameter.
fn write(model: &Model) -> Written {
    let state = |rank| RankState {
        path: PathBuf::from(format!("rank{rank}")),
        rank,
        world_size: model.world,
        optimizer: Some(OptimizerState::default()),
        ..RankState::default()
    };
    let mut written =
        Written { bytes: vec![Vec::new(); model.world], ranks: (0..model.world).map(state).collect() };
    let all: Vec<(u8, Vec<u64>)> = (0..).zip(model.shapes.iter().cloned()).collect();
    let groups: Vec<Vec<(u8, Vec<u64>)>> = match model.layout {
        Layout::Flattened => vec![all],
        _ => all.into_iter().map(|one| vec![one]).collect(),
    };
    for (number, group) in groups.iter().enumerate() {
        let of = |base: u8| -> Vec<[u8; 2]> {
            group.iter().flat_map(|(tensor, shape)| elements(base + tensor, len(shape))).collect()
        };
        let (name, shape) = match model.layout {
            Layout::Flattened => ("_fsdp_wrapped_module.flat_param_0".to_owned(), vec![of(0).len() as u64]),
            _ => (format!("_fpw_module.p{number}"), group[0].1.clone()),
        };
        let shards = written.cut(model.layout, &shape, of(0));
        let states = written.cut(model.layout, &shape, of(100));
        for (rank, (shard, exp_avg)) in shards.into_iter().zip(states).enumerate() {
            let step = written.put(rank, vec![], &[[200, number as u8]]);
            let key = format!("_fsdp_shard_{number}");
            let state = &mut written.ranks[rank];
            state.model.insert(format!("m.{key}"), shard);
            let parts = group.iter().map(|(tensor, shape)| (format!("_fpw_module.p{tensor}"), shape.clone()));
            let parts: Vec<_> = parts.collect();
            let flattened = (model.layout == Layout::Flattened).then_some(&parts[..]);
            let sharded = Sharded::new(&format!("m.{key}"), &format!("m.{name}"), &shape, flattened);
            state.sharded.push(sharded.unwrap());
            let items = vec![
                ("exp_avg".into(), StateItem::Tensor(exp_avg)),
                ("step".into(), StateItem::Tensor(step)),
                ("flag".into(), StateItem::Value(Value::Bool(true))),
            ];
            state.optimizer.as_mut().unwrap().states.insert(number as u64, items);
        }
    }
    for rank in 0..model.world {
        let buffer = written.put(rank, model.buffer.clone(), &elements(250, len(&model.buffer)));
        let state = &mut written.ranks[rank];
        state.model.insert("_fsdp_wrapped_module.buffer".into(), buffer);
        let params = Value::List((0..groups.len() as i64).map(Value::Int).collect());
        let settings = vec![("lr".into(), Value::Float(0.5)), ("params".into(), params)];
        state.optimizer.as_mut().unwrap().groups.push(settings);
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
fn read(written: &Written, tensor: &Tensor) -> Vec<[u8; 2]> {
    let mut out = vec![[0, 0]; tensor.len() as usize];
    for chunk in &tensor.chunks {
        let Region::Flat(range) = &chunk.region else { panic!("shards are flat: {chunk:?}") };
        for (i, element) in range.clone().enumerate() {
            let at = chunk.offset as usize + 2 * i;
            out[element as usize].copy_from_slice(&written.bytes[chunk.source][at..at + 2]);
        }
    }
    out
}

fn check_model(model: &Model) -> Result<(), TestCaseError> {
    let written = write(model);
    let checkpoint = merged(&written).unwrap();
    checkpoint.check_coverage().unwrap();
    prop_assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
    let prefix = "m.";
    for (tensor, shape) in (0u8..).zip(&model.shapes) {
        let name = format!("{prefix}p{tensor}");
        for (name, base, role) in
            [(name.clone(), 0, Role::Model), (format!("optim.state.{name}.exp_avg"), 100, Role::Optimizer)]
        {
            let found = &checkpoint.tensors[&name];
            prop_assert_eq!((&found.shape, found.role), (shape, role));
            prop_assert_eq!(read(&written, found), elements(base + tensor, len(shape)));
        }
        let number = if model.layout == Layout::Flattened { 0 } else { tensor };
        let step = &checkpoint.tensors[&format!("optim.state.{name}.step")];
        prop_assert_eq!(read(&written, step), vec![[200, number]]);
        let flag = format!("optim.state.{name}.flag");
        prop_assert!(checkpoint.values.contains_key(&flag));
    }
    let buffer = &checkpoint.tensors["buffer"];
    prop_assert_eq!(read(&written, buffer), elements(250, len(&model.buffer)));
    prop_assert_eq!(checkpoint.tensors.len(), 3 * model.shapes.len() + 1);
    let names = (0..model.shapes.len()).map(|i| Value::Str(format!("{prefix}p{i}"))).collect();
    prop_assert_eq!(&checkpoint.values["optim.param_groups.0.params"].value, &Value::List(names));
    Ok(())
}

fn models() -> impl Strategy<Value = Model> {
    let shape = || prop::collection::vec(prop_oneof![4 => 1u64..7, 1 => Just(0u64)], 0..4);
    let layout = prop_oneof![Just(Layout::Flat), Just(Layout::Dim0), Just(Layout::Flattened)];
    (1usize..9, layout, prop::collection::vec(shape(), 1..5), shape()).prop_map(
        |(world, layout, mut shapes, buffer)| {
            // A 0-d tensor cannot be cut along dimension 0; torch_xla flattens it.
            shapes
                .iter_mut()
                .filter(|shape| layout == Layout::Dim0 && shape.is_empty())
                .for_each(|s| s.push(1));
            Model { world, layout, shapes, buffer }
        },
    )
}

proptest! {
    #[test]
    fn merging_ranks_restores_sharded_model(model in models()) {
        check_model(&model)?;
    }

    #[test]
    fn truncated_shard_is_rejected_and_named(
        model in models(), rank in any::<prop::sample::Index>(),
    ) {
        let mut written = write(&model);
        let rank = rank.index(model.world);
        let key = written.ranks[0].sharded[0].key.clone();
        let shard = written.ranks[rank].model.get_mut(&key).unwrap();
        prop_assume!(shard.shape[0] > 0);
        shard.shape[0] = 0;
        let whole = written.ranks[0].sharded[0].len;
        match merged(&written) {
            // Shards of a parameter without elements may have any shape.
            Ok(_) => prop_assert_eq!(whole, 0),
            Err(Error::Malformed { path, reason, .. }) => {
                let file = if rank == 0 && model.world > 1 { 1 } else { rank };
                prop_assert_eq!(path, written.ranks[file].path.clone());
                prop_assert!(reason.contains(&key), "{reason}");
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

fn small(layout: Layout) -> Written {
    let shapes = vec![vec![3, 2], vec![5, 300]];
    write(&Model { world: 3, layout, shapes, buffer: vec![2] })
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

/// The file and the message of a merge that fails.
fn fault(written: &Written) -> (PathBuf, String) {
    match merged(written) {
        Err(Error::Malformed { path, reason, .. } | Error::Unsupported { path, reason }) => (path, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensor_missing_or_extra_on_one_rank_is_error() {
    let mut written = small(Layout::Flat);
    let shard = written.ranks[2].sharded.remove(1);
    written.ranks[2].model.remove(&shard.key);
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank2"));
    assert_eq!(fault_found, not_in_rank("m._fsdp_shard_1", "rank0"));

    let mut written = small(Layout::Flat);
    let extra = written.ranks[1].model["m._fsdp_shard_0"].clone();
    written.ranks[1].model.insert("extra".into(), extra);
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank0"));
    assert_eq!(fault_found, not_in_rank("extra", "rank1"));
}

#[test]
fn parameter_mismatch_between_ranks_is_error() {
    let mut written = small(Layout::Flat);
    written.ranks[1].sharded[1].parts[0].shape = vec![300, 5];
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(fault_found.contains("has the shape"), "{fault_found}");

    let mut written = small(Layout::Flat);
    written.ranks[1].model.get_mut("m._fsdp_shard_1").unwrap().dtype = TensorType::F16;
    assert!(fault(&written).1.contains(" is F16 in it and BF16 in "));

    let mut written = small(Layout::Flattened);
    written.ranks[2].sharded[0].parts.reverse();
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank2"));
    assert!(fault_found.contains("m._fsdp_shard_0"), "{fault_found}");
}

#[test]
fn uniformly_short_shards_are_rejected_and_not_padded() {
    let mut written = small(Layout::Dim0);
    for rank in &mut written.ranks {
        rank.model.get_mut("m._fsdp_shard_1").unwrap().shape[0] = 1;
    }
    let (_, fault_found) = fault(&written);
    let expected = too_short("m._fsdp_shard_1", 1500, 900);
    assert_eq!(fault_found, expected);
}

#[test]
fn wrong_shape_or_strided_shards_are_rejected() {
    let mut written = small(Layout::Dim0);
    for rank in &mut written.ranks {
        rank.model.get_mut("m._fsdp_shard_1").unwrap().shape = vec![300, 2];
    }
    assert!(fault(&written).1.contains("has the shape"));

    let mut written = small(Layout::Dim0);
    written.ranks[1].model.get_mut("m._fsdp_shard_1").unwrap().strides = vec![1, 2];
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank1"));
    assert!(fault_found.starts_with("its shard of `m._fsdp_shard_1` is a strided view"), "{fault_found}");
}

#[test]
fn incomplete_or_inconsistent_metadata_is_rejected() {
    let text = |text: &str| Value::Str(text.to_owned());
    let dict = |key: &str, value: Value| Value::Dict(vec![(text(key), value)]);
    let list = |values: Vec<Value>| Value::List(values);
    let numbers = |numbers: &[i64]| list(numbers.iter().map(|number| Value::Int(*number)).collect());
    let entry = |size: &[i64]| {
        Value::Dict(vec![(text("_orig_name"), text("flat_param_0")), (text("_orig_size"), numbers(size))])
    };
    let metadata = |shard: &str, entry: Value, count: i64| {
        let flattened = list(vec![list(vec![text("w")]), list(vec![numbers(&[2, 3])]), numbers(&[count])]);
        let shards = dict("m", dict(shard, entry));
        Value::Dict(vec![
            (text("shard_info"), shards),
            (text("flatten_info"), dict("m.flat_param_0", flattened)),
        ])
    };
    let sharded = |metadata: &Value| {
        let tables = Tables::read(metadata).unwrap();
        tables.sharded("m._fsdp_shard_0", ("m", "_fsdp_shard_0"))
    };
    let found = sharded(&metadata("_fsdp_shard_0", entry(&[6]), 6)).unwrap();
    assert_eq!((&found.parts[0].name[..], &found.parts[0].shape[..]), ("m.w", &[2, 3][..]));
    for (bad, expected) in [
        (
            metadata("_fsdp_shard_1", entry(&[6]), 6),
            "the entry of `m._fsdp_shard_0` in shard_metadata.shard_info",
        ),
        (
            metadata("_fsdp_shard_0", Value::None, 6),
            "the entry of `m._fsdp_shard_0` in shard_metadata.shard_info",
        ),
        (
            metadata("_fsdp_shard_0", entry(&[6]), 5),
            "the entry of `m.flat_param_0` in shard_metadata.flatten_info",
        ),
        (metadata("_fsdp_shard_0", entry(&[7]), 6), "the sum of sizes in shard_metadata.flatten_info"),
    ] {
        let fault = sharded(&bad).unwrap_err().to_string();
        assert!(fault.starts_with(expected), "{fault}");
    }
    let without_table = Tables::read(&Value::None).err().unwrap().to_string();
    assert!(without_table.starts_with("`shard_metadata.shard_info`"), "{without_table}");
}

#[test]
fn duplicate_parameter_names_are_rejected() {
    let mut written = small(Layout::Flat);
    for rank in &mut written.ranks {
        rank.sharded[1].parts[0].name = "m.p0".into();
    }
    assert!(fault(&written).1.starts_with("two tensors or values have the name `m.p0`"));
}

#[test]
fn mismatched_optimizer_is_skipped_with_note() {
    let mut written = small(Layout::Flat);
    written.ranks[0].optimizer.as_mut().unwrap().groups[0].retain(|(key, _)| key != "params");
    let checkpoint = merged(&written).unwrap();
    assert!(checkpoint.tensors.values().all(|tensor| tensor.role == Role::Model));
    assert_eq!(
        checkpoint.notes,
        ["the optimizer is left out: it has 0 parameters, but the model has 2 shards"]
    );

    let mut written = small(Layout::Flat);
    for rank in &mut written.ranks {
        let state = rank.optimizer.as_mut().unwrap();
        let items = state.states.remove(&0).unwrap();
        state.states.insert(7, items);
    }
    assert!(merged(&written).unwrap().notes[0].contains("parameter 7"));
}

#[test]
fn optimizer_state_missing_from_one_rank_is_error() {
    let mut written = small(Layout::Flat);
    written.ranks[2].optimizer.as_mut().unwrap().states.remove(&1);
    let (path, fault_found) = fault(&written);
    assert_eq!(path, PathBuf::from("rank2"));
    assert_eq!(fault_found, not_in_rank("optim.state.m.p1.step", "rank0"));
}

#[test]
fn truncated_file_is_rejected_by_coverage_check() {
    let mut written = small(Layout::Flat);
    written.bytes[1].truncate(10);
    let fault = merged(&written).unwrap().check_coverage().unwrap_err();
    assert!(fault.to_string().contains("reaches beyond its 10 bytes"), "{fault}");
}

/// Two parameters, the second one-dimensional, with an optimizer of two groups. The group without decay comes first, so
/// the numbers are not in file order.
fn in_two_groups(decays: [f64; 2]) -> Written {
    let shapes = vec![vec![3, 2], vec![5]];
    let mut written = write(&Model { world: 2, layout: Layout::Flat, shapes, buffer: vec![2] });
    for rank in &mut written.ranks {
        let optimizer = rank.optimizer.as_mut().unwrap();
        let [first, second] = [0, 1].map(|number| optimizer.states.remove(&number).unwrap());
        optimizer.states.extend([(0, second), (1, first)]);
        let group = |number: i64, decay: f64| {
            let params = Value::List(vec![Value::Int(number)]);
            vec![("params".to_owned(), params), ("weight_decay".to_owned(), Value::Float(decay))]
        };
        optimizer.groups = vec![group(0, decays[0]), group(1, decays[1])];
    }
    written
}

#[test]
fn parameters_are_matched_to_groups_by_weight_decay() {
    let written = in_two_groups([0.0, 0.1]);
    let checkpoint = merged(&written).unwrap();
    assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
    for (name, base, len) in [("m.p0", 100, 6), ("m.p1", 101, 5)] {
        let moment = &checkpoint.tensors[&format!("optim.state.{name}.exp_avg")];
        assert_eq!(read(&written, moment), elements(base, len), "{name}");
    }
    let params = &checkpoint.values["optim.param_groups.0.params"].value;
    assert_eq!(params, &Value::List(vec![Value::Str("m.p1".into())]));
}

#[test]
fn optimizer_is_skipped_if_groups_share_weight_decay() {
    let checkpoint = merged(&in_two_groups([0.1, 0.1])).unwrap();
    assert!(checkpoint.tensors.values().all(|tensor| tensor.role == Role::Model));
    assert!(checkpoint.notes[0].contains("weight decay does not tell"), "{:?}", checkpoint.notes);
}

/// Shards are recognized by their names or by the table, wherever a program has put them.
#[test]
fn shards_are_recognized_at_any_depth() {
    let dict = |key: &str, item: Item| Item::Dict(vec![(Value::Str(key.to_owned()), item)]);
    let leaf = || Item::Value(Value::Int(1));
    let (by_name, by_table) = (dict("m._fsdp_shard_0", leaf()), dict(METADATA, dict("world_size", leaf())));
    for held in [by_name, by_table] {
        assert!(holds_shards(&held) && holds_shards(&dict("state", dict("model", held))));
    }
    for other in ["model", "m.weight", "m._fsdp_wrapped_module.weight"] {
        assert!(!holds_shards(&dict("model", dict(other, leaf()))), "{other}");
    }
}
