//! Files of `torch.save` are read to what was saved: every dtype, every kind of view, shared storages, nested
//! state.

use std::fs;

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Global, Key, Region, Role, Source, Value},
    digest::DigestKind,
    formats::torch_file,
};

use crate::{assert_equals_safetensors, bytes_of, fixture};

fn value<'a>(checkpoint: &'a Checkpoint, name: &str) -> &'a Value {
    &checkpoint.values[name].value
}

fn text(text: &str) -> Value {
    Value::Str(text.to_owned())
}

#[test]
fn training_state_matches_pytorch() {
    let checkpoint = torch_file::open(fixture("full.pth")).unwrap();
    assert_equals_safetensors(&checkpoint, &fixture("full.safetensors"), "");
    let expected: serde_json::Value =
        serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap();
    let names = expected.as_object().unwrap().iter().filter(|(_, entry)| entry.get("python").is_some());
    let mut names: Vec<&String> = names.map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(checkpoint.values.keys().collect::<Vec<_>>(), names);
    assert_eq!(value(&checkpoint, "extra.name"), &text("tiny-é"));
    assert_eq!(value(&checkpoint, "extra.blob"), &Value::Bytes(vec![0, 1, 255]));
    assert_eq!(value(&checkpoint, "extra.seed"), &Value::Int((1 << 40) + 7));
    assert_eq!(value(&checkpoint, "extra.betas"), &Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)]));
    assert_eq!(value(&checkpoint, "extra.nothing"), &Value::None);
    assert_eq!(value(&checkpoint, "extra.done"), &Value::Bool(false));
    assert_eq!(value(&checkpoint, "extra.mixed.1.k"), &Value::Int(7));
    assert_eq!(value(&checkpoint, "extra.nested.0"), &text("digit-key"));
    assert!(checkpoint.notes.is_empty());
}

#[test]
fn roles_and_paths_follow_nesting() {
    let checkpoint = torch_file::open(fixture("full.pth")).unwrap();
    let role = |name: &str| checkpoint.tensors[name].role;
    assert_eq!(role("model.emb.weight"), Role::Model);
    assert_eq!(role("optim.state.emb.weight.exp_avg"), Role::Optimizer);
    assert_eq!(role("extra.rng_state"), Role::Other);
    let path: Vec<&str> = vec!["optim", "state", "emb.weight", "exp_avg"];
    let path: Vec<Key> = path.into_iter().map(|step| Key::Name(step.to_owned())).collect();
    assert_eq!(checkpoint.tensors["optim.state.emb.weight.exp_avg"].path, path);
    let mixed = &checkpoint.tensors["extra.mixed.0"].path;
    assert_eq!(mixed[2], Key::Index(0));
}

#[test]
fn module_state_dict_is_read_without_versions() {
    let checkpoint = torch_file::open(fixture("model_only.pth")).unwrap();
    assert_equals_safetensors(&checkpoint, &fixture("full.safetensors"), "model.");
    assert!(checkpoint.values.is_empty());
    assert!(checkpoint.tensors.values().all(|tensor| tensor.role == Role::Model));
}

#[test]
fn every_dtype_and_view_matches_safetensors() {
    let checkpoint = torch_file::open(fixture("kinds.pth")).unwrap();
    assert_equals_safetensors(&checkpoint, &fixture("kinds.safetensors"), "");
    for tensor in checkpoint.tensors.values() {
        tensor.check_coverage(&checkpoint.sources).unwrap();
    }
    let is_flat = |name: &str| matches!(checkpoint.tensors[name].chunks[0].region, Region::Flat(_));
    for name in
        ["views.offset", "views.rows", "views.inner_of_one", "zero.scalar", "zero.empty", "tied.first"]
    {
        assert!(is_flat(name), "{name}");
    }
    for name in ["views.columns", "views.transposed", "views.channels_last", "views.expanded"] {
        assert!(!is_flat(name), "{name}");
    }
}

#[test]
fn tensors_sharing_storage_have_equal_chunks() {
    let checkpoint = torch_file::open(fixture("kinds.pth")).unwrap();
    let chunks = |name: &str| &checkpoint.tensors[name].chunks;
    assert_eq!(chunks("tied.first"), chunks("tied.second"));
    assert_eq!(chunks("tied.first"), chunks("tied.same_storage"));
    assert_ne!(chunks("tied.first"), chunks("buffer"));
}

#[test]
fn values_of_every_kind_are_kept() {
    let checkpoint = torch_file::open(fixture("kinds.pth")).unwrap();
    let value = |name: &str| value(&checkpoint, &format!("values.{name}"));
    let global = |module: &str, name: &str| Global { module: module.to_owned(), name: name.to_owned() };
    assert_eq!(value("int"), &Value::Int(-5));
    assert_eq!(value("large"), &Value::Long(vec![0, 0, 0, 0, 0, 0, 0, 0, 64]));
    assert_eq!(value("infinite"), &Value::Float(f64::INFINITY));
    assert_eq!(value("text"), &text("é中😀"));
    assert_eq!(value("bytes"), &Value::Bytes(vec![0, 255]));
    assert_eq!(value("bytearray"), &Value::Bytes(b"ab".to_vec()));
    assert_eq!(value("set"), &Value::Set(vec![Value::Int(3)]));
    assert_eq!(value("frozenset"), &Value::Set(vec![Value::Int(4)]));
    assert_eq!(value("dtype"), &Value::Global(global("torch", "bfloat16")));
    assert_eq!(value("ordered.a"), &Value::Int(1));
    assert_eq!(value("counter.a"), &Value::Int(2));
    assert_eq!(value("default.x"), &Value::List(vec![Value::Int(1)]));
    assert_eq!(value("7"), &text("int key"));
    let size = Value::Tuple(vec![Value::Int(2), Value::Int(3)]);
    assert_eq!(
        value("size"),
        &Value::Object { class: global("torch", "Size"), args: vec![size], state: None }
    );
    assert!(matches!(value("array"), Value::Object { state: Some(_), .. }));
    assert_eq!(super::torch_file::value(&checkpoint, "pair.1"), &text("text"));
}

#[test]
fn record_checksums_match_file_bytes() {
    for name in ["full.pth", "kinds.pth", "xla_fsdp_2rank/nested_consolidated.pth"] {
        let checkpoint = torch_file::open(fixture(name)).unwrap();
        let Source::File { path, len } = &checkpoint.sources[0] else { panic!("a file") };
        let file = fs::read(path).unwrap();
        assert_eq!(file.len() as u64, *len);
        assert!(checkpoint.protections.len() > 10);
        for protection in &checkpoint.protections {
            let range = protection.range.start as usize..protection.range.end as usize;
            assert_eq!(DigestKind::Crc32.of(&file[range]), protection.digest, "{}", protection.what);
        }
    }
}

#[test]
fn plain_state_dict_fixtures_are_read() {
    let plain =
        ["fsdp1/reference.pth", "fsdp2_rank_pth/reference.pth", "xla_fsdp_2rank/reference_state_dict.pth"];
    for name in plain {
        let checkpoint = torch_file::open(fixture(name)).unwrap();
        assert!(!checkpoint.tensors.is_empty());
        for tensor in checkpoint.tensors.keys() {
            bytes_of(&checkpoint, tensor);
        }
    }
}

#[test]
fn xla_consolidated_files_match_reference_state_dict() {
    let reference = torch_file::open(fixture("xla_fsdp_2rank/reference_state_dict.pth")).unwrap();
    for layout in ["nested", "dim0", "flat"] {
        let file = fixture(&format!("xla_fsdp_2rank/{layout}_consolidated.pth"));
        let consolidated = torch_file::open(file).unwrap();
        for name in reference.tensors.keys() {
            let name_there = format!("model.{name}");
            assert_eq!(bytes_of(&reference, name), bytes_of(&consolidated, &name_there), "{layout} {name}");
        }
    }
}

#[test]
fn fsdp1_local_state_is_rejected_with_reason() {
    let error = torch_file::open(fixture("fsdp1/local_rank0.pth")).unwrap_err().to_string();
    assert!(error.contains("local state of FSDP1") && error.contains("_flat_param"), "{error}");
}

#[test]
fn single_rank_file_is_rejected_with_remedy() {
    let file = fixture("fsdp2_rank_pth/model_world_size_2_rank_1.pt");
    let error = torch_file::open(file).unwrap_err().to_string();
    assert!(error.contains("torch.distributed.tensor.DTensor") && error.contains("all ranks"), "{error}");
}

#[test]
fn tensors_next_to_and_inside_unknown_classes_are_read() {
    let checkpoint = torch_file::open(fixture("opaque.pth")).unwrap();
    let tensors: Vec<(&str, Role)> =
        checkpoint.tensors.iter().map(|(name, tensor)| (&name[..], tensor.role)).collect();
    let expected = [
        ("attributes.w", Role::Other),
        ("default.a", Role::Other),
        ("list.2", Role::Other),
        ("model.bias", Role::Model),
        ("model.weight", Role::Model),
        ("subclass.data", Role::Other),
    ];
    assert_eq!(tensors, expected);
    let floats = |name| -> Vec<f32> {
        let bytes = bytes_of(&checkpoint, name);
        bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    assert_eq!(floats("attributes.w"), [0.0, 1.0, 2.0]);
    assert_eq!(floats("subclass.data"), [5.0, 5.0]);
    let classes = [
        ("attributes", "__main__.AttributeDict"),
        ("class", "__main__.Config"),
        ("color", "__main__.Color"),
        ("colors.?", "__main__.Color"),
        ("config", "__main__.Config"),
        ("evil", "posix.system"),
        ("list.1", "__main__.Config"),
        ("partial", "functools.partial"),
        ("stream", "_io.BytesIO"),
        ("subclass", "__main__.Subclass"),
        ("when", "datetime.datetime"),
    ];
    let found: Vec<(&str, String)> =
        checkpoint.opaque.iter().map(|(name, class)| (&name[..], class.to_string())).collect();
    assert_eq!(found, classes.map(|(name, class)| (name, class.to_owned())));
    let refused = checkpoint.refuse_opaque().unwrap_err().to_string();
    assert!(refused.contains("`evil` (posix.system)"), "{refused}");
    let plain = torch_file::open(fixture("full.pth")).unwrap();
    assert!(plain.opaque.is_empty() && plain.refuse_opaque().is_ok());
}

#[test]
fn self_referencing_unknown_object_is_read_with_note() {
    let checkpoint = torch_file::open(fixture("opaque_circle.pth")).unwrap();
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), ["model.bias", "model.weight"]);
    assert!(checkpoint.notes[0].contains("hold themselves"), "{:?}", checkpoint.notes);
}

#[test]
fn legacy_format_before_pytorch_1_6_is_read() {
    let checkpoint = torch_file::open(fixture("torch_files/pickles/before_1_6/pytorch_model.bin")).unwrap();
    let bare = torch_file::open(fixture("torch_files/pickles/bare.pt")).unwrap();
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), bare.tensors.keys().collect::<Vec<_>>());
    for name in bare.tensors.keys() {
        assert_eq!(bytes_of(&checkpoint, name), bytes_of(&bare, name), "{name}");
    }
}

#[test]
fn truncated_or_extended_legacy_file_is_rejected() {
    let bytes = fs::read(fixture("torch_files/pickles/before_1_6/pytorch_model.bin")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pytorch_model.bin");
    for len in 14..bytes.len() {
        fs::write(&path, &bytes[..len]).unwrap();
        assert!(torch_file::open(&path).is_err(), "{len} bytes");
    }
    fs::write(&path, [&bytes[..], b"more"].concat()).unwrap();
    assert!(torch_file::open(&path).unwrap_err().to_string().contains("4 bytes follow"));
}
