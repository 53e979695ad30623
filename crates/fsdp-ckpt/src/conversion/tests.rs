//! Conversions of the fixtures, and requests that are refused.

mod damage;
mod random;
#[cfg(feature = "object-store")]
mod urls;

use std::{fs, path::Path, sync::atomic::AtomicBool};

use super::*;
use crate::{
    diff::{Outcome, Tolerance, diff},
    formats,
    transfer::NoProgress,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn converted(
    source: &Checkpoint,
    destination: &Path,
    conversion: &Conversion,
) -> Result<ConversionReport, Error> {
    let cancel = AtomicBool::new(false);
    convert(source, destination, conversion, &Options { sync: false, ..Options::new(&NoProgress, &cancel) })
}

fn outcomes(a: &Checkpoint, b: &Checkpoint) -> Vec<(String, Outcome)> {
    let cancel = AtomicBool::new(false);
    let diff = diff(a, b, Tolerance::default(), &Options::new(&NoProgress, &cancel)).unwrap();
    diff.tensors.into_iter().collect()
}

fn is_same(a: &Checkpoint, b: &Checkpoint) -> bool {
    outcomes(a, b).iter().all(|(_, outcome)| *outcome == Outcome::EqualBits)
}

#[test]
fn dcp_shards_convert_to_bitwise_equal_model() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("hf_dcp_shards")).unwrap();
    let out = dir.path().join("model");
    let report = converted(&source, &out, &Conversion::new(Target::Safetensors)).unwrap();
    let result = formats::open(&out).unwrap();
    let models = source.tensors.iter().filter(|(_, tensor)| tensor.role == crate::checkpoint::Role::Model);
    assert_eq!(report.tensors + report.tied.len(), models.count());
    let differing: Vec<_> = outcomes(&source, &result);
    for (name, outcome) in differing {
        let may_lack = report.tied.iter().any(|(copy, _)| *copy == name)
            || source.tensors[&name].role != crate::checkpoint::Role::Model;
        assert!(
            outcome == Outcome::EqualBits || (may_lack && outcome == Outcome::OnlyInFirst),
            "{name} {outcome:?}"
        );
    }
    assert_eq!(formats::open(out.join("model.safetensors")).unwrap().tensors.len(), report.tensors);
}

/// A safetensors file with a tensor of every packed type, each of 24 values in rows of 8, and one of bytes.
fn packed_file(path: &Path, types: &[(&str, usize)]) {
    let (mut entries, mut data) = (serde_json::Map::new(), Vec::new());
    for (index, (dtype, bytes)) in types.iter().enumerate() {
        let start = data.len();
        data.extend((0..*bytes).map(|at| (37 * at + index) as u8));
        let entry =
            serde_json::json!({ "dtype": dtype, "shape": [3, 8], "data_offsets": [start, data.len()] });
        entries.insert(format!("t{index}"), entry);
    }
    let header = serde_json::to_vec(&entries).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

#[test]
fn packed_types_are_copied_by_conversions() {
    let dir = tempfile::tempdir().unwrap();
    let (all, of_torch) = (dir.path().join("all.safetensors"), dir.path().join("torch.safetensors"));
    packed_file(&all, &[("F4", 12), ("F6_E2M3", 18), ("F8_E8M0", 24), ("F6_E3M2", 18), ("U8", 24)]);
    packed_file(&of_torch, &[("F4", 12), ("F8_E8M0", 24), ("F8_E4M3FNUZ", 24), ("F8_E5M2FNUZ", 24)]);
    let cases = [
        (&all, &[Target::Safetensors, Target::Native][..]),
        (&of_torch, &[Target::Safetensors, Target::Native, Target::Torch, Target::Dcp]),
    ];
    for (index, (path, targets)) in cases.into_iter().enumerate() {
        let source = formats::open(path).unwrap();
        for target in targets {
            let out = dir.path().join(format!("{target:?}{index}"));
            let conversion = Conversion { world_size: NonZero::new(2).unwrap(), ..Conversion::new(*target) };
            converted(&source, &out, &conversion).unwrap();
            let result = formats::open(&out).unwrap();
            assert!(is_same(&source, &result), "{target:?}: {:?}", outcomes(&source, &result));
            let back = dir.path().join(format!("{target:?}{index}.safetensors"));
            converted(&result, &back, &Conversion::new(Target::Safetensors)).unwrap();
            let text = fs::read(&back).unwrap();
            assert!(String::from_utf8_lossy(&text).contains(r#""dtype":"F4","shape":[3,8]"#), "{target:?}");
        }
    }
}

/// A safetensors file with an empty tensor of this shape, and one of a byte.
fn file_with_empty_tensor(path: &Path, shape: &[u64]) {
    let header = serde_json::json!({
        "z": { "dtype": "F32", "shape": shape, "data_offsets": [0, 0] },
        "a": { "dtype": "U8", "shape": [1], "data_offsets": [0, 1] },
    });
    let header = serde_json::to_vec(&header).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &[7]].concat()).unwrap();
}

#[test]
fn empty_tensors_of_any_size_are_converted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.safetensors");
    let most = i64::MAX as u64;
    let shapes: [&[u64]; 5] = [&[0], &[0, 1 << 62, 1 << 62], &[0, most, most], &[most, 0], &[3, 0, most]];
    for (index, shape) in shapes.into_iter().enumerate() {
        file_with_empty_tensor(&path, shape);
        let source = formats::open(&path).unwrap();
        for target in [Target::Safetensors, Target::Native, Target::Torch, Target::Dcp] {
            let out = dir.path().join(format!("{target:?}{index}"));
            let conversion = Conversion { world_size: NonZero::new(2).unwrap(), ..Conversion::new(target) };
            converted(&source, &out, &conversion).unwrap();
            let result = formats::open(&out).unwrap();
            assert!(is_same(&source, &result), "{target:?} {shape:?}: {:?}", outcomes(&source, &result));
        }
    }
    file_with_empty_tensor(&path, &[0, most + 1]);
    let source = formats::open(&path).unwrap();
    for target in [Target::Torch, Target::Dcp] {
        let error =
            converted(&source, &dir.path().join("out"), &Conversion::new(target)).unwrap_err().to_string();
        assert!(error.contains("`z` has a dimension of 9223372036854775808, more than PyTorch"), "{error}");
    }
}

#[test]
fn types_that_torch_lacks_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    packed_file(&path, &[("U8", 24), ("F6_E3M2", 18)]);
    let source = formats::open(&path).unwrap();
    for target in [Target::Torch, Target::Dcp] {
        let out = dir.path().join("out");
        let text = converted(&source, &out, &Conversion::new(target)).unwrap_err().to_string();
        assert!(text.contains("tensor `t1` is F6_E3M2, a type that PyTorch does not have"), "{text}");
        assert!(!out.exists());
    }
}

#[test]
fn every_fixture_converts_bitwise_to_every_target() {
    let fixtures = [
        "full.pth",
        "kinds.pth",
        "kinds.safetensors",
        "hf_dcp_shards",
        "dcp_2rank",
        "dcp_2rank_zstd",
        "dcp_hsdp_2x2",
    ];
    for name in fixtures {
        let source = formats::open(fixture(name)).unwrap();
        for target in [Target::Torch, Target::Dcp, Target::Native, Target::Safetensors] {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("out.safetensors");
            let world_size = NonZero::new(3).unwrap();
            let conversion = Conversion { part: Part::All, world_size, ..Conversion::new(target) };
            let report = match converted(&source, &out, &conversion) {
                // Some formats cannot represent complex numbers and similar types.
                Err(Error::BadRequest { .. }) if name.starts_with("kinds") => continue,
                result => result.unwrap_or_else(|error| panic!("{name} to {target:?}: {error}")),
            };
            let result = formats::open(&out).unwrap();
            for (tensor, outcome) in outcomes(&source, &result) {
                let is_tied = report.tied.iter().any(|(copy, _)| *copy == tensor);
                let expected = if is_tied { Outcome::OnlyInFirst } else { Outcome::EqualBits };
                assert_eq!(outcome, expected, "{tensor} of {name} to {target:?}");
            }
            assert_eq!(report.values, if target == Target::Safetensors { 0 } else { source.values.len() });
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }
}

#[test]
fn multi_shard_output_has_index_and_config() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("full.safetensors")).unwrap();
    let config = dir.path().join("given.json");
    fs::write(&config, r#"{"tie_word_embeddings": false}"#).unwrap();
    let out = dir.path().join("out");
    let conversion = Conversion {
        part: Part::All,
        shard_bytes_max: 1000,
        config: Some(config),
        ..Conversion::new(Target::Safetensors)
    };
    let report = converted(&source, &out, &conversion).unwrap();
    assert!(report.files > 2 && out.join("config.json").is_file());
    assert!(is_same(&source, &formats::open(&out).unwrap()));
    fs::remove_file(out.join("model.safetensors.index.json")).unwrap();
    assert!(is_same(&source, &formats::open(&out).unwrap()));
}

#[test]
fn dtype_conversion_applies_only_to_floats() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("kinds.safetensors")).unwrap();
    let out = dir.path().join("x.safetensors");
    let conversion = Conversion { dtype: Some(TensorType::Bf16), ..Conversion::new(Target::Safetensors) };
    let report = converted(&source, &out, &conversion).unwrap();
    let result = formats::open(&out).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("kept their types")));
    for (name, tensor) in &result.tensors {
        let was = source.tensors[name].dtype;
        assert_eq!(tensor.dtype, if was.is_convertible() { TensorType::Bf16 } else { was }, "{name}");
    }
}

/// A file with tensors of these names, of two bytes each.
fn of_names(path: &Path, names: &[(&str, u8)]) -> Checkpoint {
    use crate::safetensors::{Header, TensorSpec};
    let spec = |(name, _): &(&str, u8)| TensorSpec {
        name: (*name).into(),
        dtype: TensorType::U8,
        shape: vec![1, 2],
    };
    let (_, mut bytes) = Header::layout(names.iter().map(spec).collect(), None).unwrap();
    bytes.extend(names.iter().flat_map(|(_, byte)| [*byte; 2]));
    fs::write(path, bytes).unwrap();
    formats::open(path).unwrap()
}

fn refused(source: &Checkpoint, dir: &Path, conversion: Conversion) -> String {
    let before = fs::read_dir(dir).unwrap().count();
    let error = converted(source, &dir.join("never"), &conversion).unwrap_err();
    assert_eq!(fs::read_dir(dir).unwrap().count(), before, "nothing is left");
    error.to_string()
}

#[test]
fn invalid_requests_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let source = of_names(&dir.path().join("s"), &[("model.a", 1), ("model.b", 2), ("c", 3)]);
    let usual = || Conversion::new(Target::Safetensors);
    let rename = |text: &str| vec![Rename::parse(text).unwrap()];
    let message = refused(&source, dir.path(), Conversion { renames: rename("a$=b"), ..usual() });
    assert!(message.contains("`model.a` and `model.b` would both be named `model.b`"), "{message}");
    let message = refused(&source, dir.path(), Conversion { renames: rename("xyz=b"), ..usual() });
    assert!(message.contains("no name matches `xyz`"), "{message}");
    let message = refused(&source, dir.path(), Conversion { strip_prefix: Some("mode.".into()), ..usual() });
    assert!(message.contains("no name begins with `mode.`"), "{message}");
    let message = refused(&source, dir.path(), Conversion { part: Part::Optimizer, ..usual() });
    assert!(message.contains("3 model tensors"), "{message}");
    let message = refused(&source, dir.path(), Conversion { dtype: Some(TensorType::I64), ..usual() });
    assert!(message.contains("cannot be converted to I64"), "{message}");
    let message = refused(&source, dir.path(), Conversion { renames: rename("^c$="), ..usual() });
    assert!(message.contains("nothing is left of the name `c`"), "{message}");
    let message = refused(&source, dir.path(), Conversion { tied: Some(Tied::Twice), ..usual() });
    assert!(message.contains("safetensors hold tied weights once"), "{message}");
}

/// DeepSpeed stores one step count for each group of parameters.
#[test]
fn optimizer_state_is_never_tied() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("deepspeed_layout/zero3")).unwrap();
    let steps = || source.tensors.iter().filter(|(name, _)| name.ends_with(".step"));
    let places = |of: &Checkpoint| -> std::collections::BTreeSet<u64> {
        steps().map(|(name, _)| of.tensors[name].chunks[0].offset).collect()
    };
    assert!(places(&source).len() < steps().count(), "the source has fewer counts than parameters");
    for target in [Target::Safetensors, Target::Torch] {
        let out = dir.path().join(format!("{target:?}"));
        converted(&source, &out, &Conversion { part: Part::All, ..Conversion::new(target) }).unwrap();
        let result = formats::open(&out).unwrap();
        assert_eq!(places(&result).len(), steps().count(), "every parameter has its own");
    }
}

#[test]
fn config_tied_weights_are_written_once_if_equal() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    fs::write(&config, r#"{"tie_word_embeddings": true}"#).unwrap();
    let names = [("lm_head.weight", 7), ("model.embed_tokens.weight", 7), ("model.norm.weight", 1)];
    let source = of_names(&dir.path().join("s"), &names);
    let conversion = Conversion { config: Some(config), ..Conversion::new(Target::Safetensors) };
    let out = dir.path().join("out");
    let report = converted(&source, &out, &conversion).unwrap();
    let tied = ("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned());
    assert_eq!((report.tensors, report.tied), (2, vec![tied]));
    let source = of_names(&dir.path().join("s"), &[names[0], ("model.embed_tokens.weight", 8)]);
    let message = refused(&source, dir.path(), conversion);
    assert!(message.contains("their elements differ"), "{message}");
}

#[test]
fn config_ties_weights_of_converted_experts_in_file_and_folder() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let tied = ("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned());
    let experts =
        ["gate", "up", "down"].map(|part| format!("model.layers.0.mlp.experts.0.{part}_proj.weight"));
    let mut names = vec![("lm_head.weight", 7), ("model.embed_tokens.weight", 7)];
    names.extend(experts.iter().map(|name| (name.as_str(), 1)));
    let source = of_names(&dir.path().join("s"), &names);
    for ties in [true, false] {
        fs::write(&config, format!(r#"{{"tie_word_embeddings": {ties}}}"#)).unwrap();
        for out in ["out", "out.safetensors"] {
            let conversion = Conversion {
                config: Some(config.clone()),
                experts: Some(Experts::Fused),
                ..Conversion::new(Target::Safetensors)
            };
            let report = converted(&source, &dir.path().join(format!("{ties}-{out}")), &conversion).unwrap();
            assert_eq!(report.tied, if ties { vec![tied.clone()] } else { Vec::new() }, "{out}");
        }
    }
}

#[test]
fn layout_change_of_numbered_optimizer_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["trainer/single/checkpoint-10", "accelerate/ddp"] {
        let source = formats::open(fixture(name)).unwrap();
        for layout in [Layout::Torchtitan, Layout::Flat, Layout::ModelOptimizer] {
            let conversion = Conversion { layout: Some(layout), ..Conversion::new(Target::Dcp) };
            let message = refused(&source, dir.path(), conversion.clone());
            assert!(message.contains("by number (`optimizer.state.0.exp_avg`)"), "{message}");
            let model = Conversion { part: Part::Model, ..conversion };
            let out = dir.path().join(format!("{layout:?}"));
            converted(&source, &out, &model).unwrap();
            fs::remove_dir_all(out).unwrap();
        }
    }
}

#[test]
fn roles_survive_conversion_to_dcp() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("accelerate/fsdp2_sharded")).unwrap();
    let roles = |of: &Checkpoint| -> Vec<_> {
        of.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.role)).collect()
    };
    let out = dir.path().join("dcp");
    converted(&source, &out, &Conversion::new(Target::Dcp)).unwrap();
    assert_eq!(roles(&formats::open(&out).unwrap()), roles(&source));
}

#[test]
fn tied_weights_keep_embeddings_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let names = [("model.embed_tokens.weight", 7), ("model.norm.weight", 1)];
    let mut source = of_names(&dir.path().join("s"), &names);
    let mut head = source.tensors["model.embed_tokens.weight"].clone();
    head.path = vec![crate::checkpoint::Key::Name("lm_head.weight".to_owned())];
    source.tensors.insert("lm_head.weight".to_owned(), head);
    for target in [Target::Safetensors, Target::Dcp, Target::Native, Target::Torch] {
        let conversion = Conversion { tied: Some(Tied::Once), ..Conversion::new(target) };
        let out = dir.path().join(format!("{target:?}"));
        let report = converted(&source, &out, &conversion).unwrap();
        let tied = ("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned());
        assert_eq!(report.tied, [tied], "{target:?}");
        assert!(formats::open(&out).unwrap().tensors.keys().eq(names.map(|(name, _)| name).iter()));
    }
}

#[test]
fn destination_inside_source_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["dcp_2rank", "hf_sharded"] {
        let source = dir.path().join(name);
        damage::copy(&fixture(name), &source);
        fs::create_dir(source.join("deep")).unwrap();
        let opened = formats::open(&source).unwrap();
        for inner in ["new", "deep/new", "deep/../new"] {
            let result = converted(&opened, &source.join(inner), &Conversion::new(Target::Native));
            let message = result.unwrap_err().to_string();
            assert!(message.contains("name a destination outside of it"), "{message}");
            assert!(!source.join(inner).exists());
        }
        let beside = dir.path().join(format!("{name}-2"));
        converted(&opened, &beside, &Conversion::new(Target::Native)).unwrap();
    }
}

#[test]
fn trailing_slash_of_destination_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let source = formats::open(fixture("dcp_2rank")).unwrap();
    let outputs = [
        ("a.safetensors", Target::Safetensors),
        ("b.pth", Target::Torch),
        ("c", Target::Dcp),
        ("d", Target::Native),
    ];
    for (name, target) in outputs {
        let slashed = dir.path().join(format!("{name}/"));
        converted(&source, &slashed, &Conversion::new(target)).unwrap();
        formats::open(dir.path().join(name)).unwrap();
        assert_eq!(dir.path().join(name).is_file(), name.contains('.'));
    }
}

#[test]
fn run_state_survives_torch_and_dcp_conversion() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = of_names(&dir.path().join("s"), &[("model.a", 1)]);
    let fields = serde_json::json!({
        "step": 7, "seed": u64::MAX, "config": {"lr": 0.1, "empty": {}, "list": [{"a": null}, true, {}]},
    });
    let value = crate::native::run_state_to_value(fields.as_object().unwrap());
    let path = vec![crate::checkpoint::Key::Name("run_state".to_owned())];
    let object = crate::checkpoint::Object { path, role: crate::checkpoint::Role::Other, value };
    source.values.insert("run_state".to_owned(), object);
    let mut opened = source;
    for (name, target) in
        [("n", Target::Native), ("t.pth", Target::Torch), ("d", Target::Dcp), ("m", Target::Native)]
    {
        let out = dir.path().join(name);
        converted(&opened, &out, &Conversion::new(target)).unwrap();
        opened = formats::open(&out).unwrap();
        assert_eq!(opened.values.keys().collect::<Vec<_>>(), ["run_state"], "{name}");
    }
    let reader = crate::native::NativeReader::open(dir.path().join("m")).unwrap();
    assert_eq!(Some(&reader.manifest().run_state), fields.as_object());
}

#[test]
fn missing_chunk_is_rejected_before_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = of_names(&dir.path().join("s"), &[("a", 1)]);
    source.tensors.get_mut("a").unwrap().chunks.clear();
    let message = refused(&source, dir.path(), Conversion::new(Target::Dcp));
    assert!(message.contains("in none of its"), "{message}");
}
