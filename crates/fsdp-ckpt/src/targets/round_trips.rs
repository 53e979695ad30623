//! Torch files and DCP directories read back as they were written, over dtypes, shapes and values.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::Path,
};

use proptest::prelude::*;

use super::{OutputTensor, Selection, assemble, dcp, torch_file};
use crate::{
    checkpoint::{Checkpoint, Global, Key, Object, Region, Role, Value, join},
    formats,
    safetensors::TensorType,
    transfer::OutputPlan,
};

/// Writes a plan, and returns the bytes of all tensors by their names in the output.
fn write(plan: OutputPlan, selection: &Selection, dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let data = assemble::data_of(selection);
    for (name, bytes) in assemble::assemble(plan, &data) {
        fs::write(dir.join(name), bytes).unwrap();
    }
    selection.tensors.iter().map(|tensor| (tensor.name.clone(), data[&tensor.source].clone())).collect()
}

fn assert_is(checkpoint: &Checkpoint, selection: &Selection, data: &BTreeMap<String, Vec<u8>>) {
    checkpoint.check_coverage().unwrap();
    assert_eq!(checkpoint.tensors.len(), selection.tensors.len());
    for expected in &selection.tensors {
        let found = &checkpoint.tensors[&expected.name];
        assert_eq!((found.dtype, &found.shape), (expected.dtype, &expected.shape), "{}", expected.name);
        assert_eq!(found.path, expected.path);
        let size = found.dtype.size_bytes();
        for chunk in &found.chunks {
            let Region::Flat(range) = &chunk.region else { panic!("rows are flat") };
            let expected = &data[&expected.name][range.start as usize * size..range.end as usize * size];
            let file = fs::read(checkpoint.sources[chunk.source].path()).unwrap();
            assert_eq!(&file[chunk.offset as usize..][..expected.len()], expected);
        }
    }
    for protection in &checkpoint.protections {
        let file = fs::read(checkpoint.sources[protection.source].path()).unwrap();
        let bytes = &file[protection.range.start as usize..protection.range.end as usize];
        assert_eq!(protection.digest.kind.of(bytes), protection.digest, "{}", protection.what);
    }
    let values: Vec<(String, &Value)> =
        checkpoint.values.iter().map(|(name, object)| (name.clone(), &object.value)).collect();
    let mut expected: Vec<(String, &Value)> =
        selection.values.iter().map(|object| (join(&object.path), &object.value)).collect();
    expected.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(values, expected);
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0u64..8, 0..4)
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        any::<u64>().prop_map(|low| Value::Long((u128::from(low) << 64).to_le_bytes().to_vec())),
        any::<f64>()
            .prop_filter("NaN is not equal to itself", |float| !float.is_nan())
            .prop_map(Value::Float),
        any::<String>().prop_map(Value::Str),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Value::Bytes),
        Just(Value::Global(Global { module: "torch".to_owned(), name: "float32".to_owned() })),
        prop::collection::hash_set(any::<i64>(), 0..4)
            .prop_map(|items| Value::Set(items.into_iter().map(Value::Int).collect())),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::List),
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Tuple),
            prop::collection::vec(inner.clone(), 0..4).prop_map(|args| Value::Object {
                class: Global { module: "torch".to_owned(), name: "device".to_owned() },
                args,
                state: None,
            }),
        ]
    })
}

fn keys(prefix: &'static str, name: &str, depth: usize) -> Vec<Key> {
    let steps = [prefix, "a", "b.c"].into_iter().take(depth).chain([name]);
    steps.map(|step| Key::Name(step.to_owned())).collect()
}

fn selections() -> impl Strategy<Value = Selection> {
    let tensor = (
        prop::sample::select(TensorType::all().filter(|ty| ty.torch_name().is_some()).collect::<Vec<_>>()),
        shapes(),
        1usize..4,
    );
    let tensors = prop::collection::vec(tensor, 0..6);
    let values = prop::collection::vec((values(), 1usize..4), 0..6);
    (tensors, values, any::<bool>()).prop_map(|(tensors, values, is_tied)| {
        let mut selection = Selection::default();
        for (index, (dtype, shape, depth)) in tensors.into_iter().enumerate() {
            let path = keys("model", &format!("t{index}"), depth);
            let name = join(&path);
            let (role, source) = (Role::Model, name.clone());
            selection.tensors.push(OutputTensor { name, path, role, source, dtype, shape, tied_to: None });
        }
        if let (true, Some(first)) = (is_tied, selection.tensors.first().cloned()) {
            let path = keys("model", "tied", 1);
            selection.tensors.push(OutputTensor { name: join(&path), path, tied_to: Some(0), ..first });
        }
        for (index, (value, depth)) in values.into_iter().enumerate() {
            let path = keys("extra", &format!("é{index}"), depth);
            selection.values.push(Object { path, role: Role::Other, value });
        }
        selection
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn torch_file_round_trips(selection in selections()) {
        let dir = tempfile::tempdir().unwrap();
        let data = write(torch_file::plan("x.y.pth", &selection).unwrap(), &selection, dir.path());
        let checkpoint = formats::torch_file::open(dir.path().join("x.y.pth")).unwrap();
        assert_is(&checkpoint, &selection, &data);
    }

    #[test]
    fn dcp_directory_round_trips_at_any_world_size(selection in selections(), rank_count in 1usize..6) {
        let dir = tempfile::tempdir().unwrap();
        let data = write(dcp::plan(&selection, rank_count).unwrap(), &selection, dir.path());
        let checkpoint = formats::dcp::open(dir.path()).unwrap();
        assert_is(&checkpoint, &selection, &data);
        let ranks: HashSet<_> = checkpoint.sources.iter().map(|source| source.path().clone()).collect();
        prop_assert!(ranks.len() <= rank_count);
    }
}

#[test]
fn tied_tensors_share_storage_in_torch_file() {
    let mut selection = Selection {
        tensors: vec![
            assemble::tensor("emb", TensorType::Bf16, &[5, 2]),
            assemble::tensor("head", TensorType::Bf16, &[5, 2]),
        ],
        values: Vec::new(),
    };
    selection.tensors[1].tied_to = Some(0);
    let plan = torch_file::plan("m.pth", &selection).unwrap();
    assert_eq!(plan.files[0].places.len(), 1);
    let dir = tempfile::tempdir().unwrap();
    write(plan, &selection, dir.path());
    let checkpoint = formats::torch_file::open(dir.path().join("m.pth")).unwrap();
    assert_eq!(checkpoint.tensors["emb"].chunks, checkpoint.tensors["head"].chunks);
}

#[test]
fn list_gaps_are_written_as_none() {
    let selection = Selection {
        tensors: vec![
            assemble::tensor("blocks.0.w", TensorType::U8, &[2]),
            assemble::tensor("blocks.2.w", TensorType::U8, &[2]),
        ],
        values: Vec::new(),
    };
    let dir = tempfile::tempdir().unwrap();
    write(torch_file::plan("m.pth", &selection).unwrap(), &selection, dir.path());
    let checkpoint = formats::torch_file::open(dir.path().join("m.pth")).unwrap();
    assert_eq!(checkpoint.values["blocks.1"].value, Value::None);
    assert_eq!(checkpoint.tensors["blocks.2.w"].path, assemble::path("blocks.2.w"));
}
