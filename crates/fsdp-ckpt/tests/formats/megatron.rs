//! Checkpoints of Megatron Core are read to what was saved, and have what the same step gives transformers and PyTorch.

use std::{fs, path::Path, sync::atomic::AtomicBool};

use fsdp_ckpt::{
    Error,
    checkpoint::{Checkpoint, Role},
    conversion::{Conversion, Part, Target, convert},
    formats,
    safetensors::SafetensorsReader,
    transfer::{NoProgress, Options},
    verify::verify,
};

use crate::{bytes_of, fixture};

/// The `torch_dist` checkpoints: of one process, then one per parallelism and kind of optimizer.
const SETS: [&str; 6] = ["single", "single_qwen2", "reshardable", "dp_reshardable", "experts", "pipeline"];

fn open(name: &str) -> Checkpoint {
    formats::open(fixture("megatron").join(name).join("iter_0000001")).unwrap()
}

fn is_sound(checkpoint: &Checkpoint) -> bool {
    verify(checkpoint, &Options::new(&NoProgress, &AtomicBool::new(false))).unwrap().is_sound()
}

fn converted(checkpoint: &Checkpoint, part: Part, config: &Path, to: &Path) -> Result<Checkpoint, Error> {
    let mut conversion = Conversion::new(Target::Safetensors);
    (conversion.part, conversion.config) = (part, Some(config.to_owned()));
    convert(checkpoint, to, &conversion, &Options::new(&NoProgress, &AtomicBool::new(false)))?;
    formats::open(to)
}

/// Whether two tensors have the same type, shape and bytes.
fn assert_same(checkpoint: &Checkpoint, name: &str, expected: &SafetensorsReader, expected_name: &str) {
    let entry = expected.entry(expected_name).unwrap_or_else(|_| panic!("{expected_name}"));
    let tensor = &checkpoint.tensors[name];
    let shape: Vec<u64> = entry.shape().iter().map(|&dim| dim as u64).collect();
    assert_eq!((tensor.dtype, &tensor.shape), (entry.dtype(), &shape), "{name}");
    let mut bytes = vec![0; entry.len_bytes() as usize];
    expected.read_rows(expected_name, 0..entry.row_count(), &mut bytes).unwrap();
    assert!(bytes_of(checkpoint, name) == bytes, "{name}");
}

/// The name under which Megatron stores a tensor.
fn stored_name(name: &str) -> String {
    let state = name.strip_prefix("optimizer.state.").and_then(|rest| rest.rsplit_once('.'));
    state.map_or_else(|| name.to_owned(), |(parameter, state)| format!("optimizer.state.{state}.{parameter}"))
}

#[test]
fn tensors_equal_what_megatron_loads() {
    for name in SETS {
        let checkpoint = open(name);
        checkpoint.check_coverage().unwrap();
        let plain = SafetensorsReader::open(fixture(&format!("megatron/plain_{name}.safetensors"))).unwrap();
        let stored: Vec<&String> = checkpoint
            .tensors
            .keys()
            .filter(|name| !name.ends_with(".common_step") && !name.contains("rng_state"))
            .collect();
        assert_eq!(stored.len(), plain.names().count(), "{name}");
        for tensor in stored {
            assert_same(&checkpoint, tensor, &plain, &stored_name(tensor));
        }
        assert!(is_sound(&checkpoint), "{name}");
        assert_eq!(checkpoint.run_state, [("step".to_owned(), "1".to_owned())]);
        assert!(checkpoint.format.starts_with("Megatron Core torch_dist"), "{}", checkpoint.format);
    }
    assert_eq!(open("reshardable").format, "Megatron Core torch_dist (fully_reshardable): PyTorch DCP 1.0.0");
    let buffers = open("dp_reshardable").tensors.into_iter().filter(|(name, _)| name.contains("bucket_idx_"));
    assert!(buffers.map(|(_, tensor)| tensor.role).all(|role| role == Role::Optimizer));
}

/// Checks that conversions with the configuration hold what transformers and PyTorch do, with states or without.
fn assert_converts(checkpoint: &Checkpoint, name: &str, has_states: bool) {
    let dir = tempfile::tempdir().unwrap();
    let config = fixture(&format!("megatron/expected_{name}.json"));
    let expected =
        SafetensorsReader::open(fixture(&format!("megatron/expected_{name}.safetensors"))).unwrap();
    let model = converted(checkpoint, Part::Model, &config, &dir.path().join("model.safetensors")).unwrap();
    let all = converted(checkpoint, Part::All, &config, &dir.path().join("all.safetensors")).unwrap();
    let weights: Vec<&str> = expected.names().filter_map(|name| name.strip_prefix("model.")).collect();
    assert_eq!(model.tensors.len(), weights.len(), "{name}");
    let mut compared = 0;
    for weight in weights {
        assert_same(&model, weight, &expected, &format!("model.{weight}"));
        let master = format!("optim.state.{weight}.fp32_param");
        let master = Some(master).filter(|master| has_states && expected.entry(master).is_ok());
        assert_same(&all, weight, &expected, &master.unwrap_or(format!("model.{weight}")));
        compared += 1;
        for state in ["exp_avg", "exp_avg_sq"].iter().filter(|_| has_states) {
            let state = format!("{weight}.{state}");
            assert_same(
                &all,
                &format!("optimizer.state.{state}"),
                &expected,
                &format!("optim.state.{state}"),
            );
            compared += 1;
        }
    }
    let is_other = |name: &String| {
        name.contains(".distributed.") || name.ends_with(".step") || name.starts_with("rng_state")
    };
    assert_eq!(compared, all.tensors.keys().filter(|name| !is_other(name)).count(), "{name}");
}

#[test]
fn weights_and_moments_have_the_names_and_values_of_hugging_face() {
    for name in SETS {
        // The buffers of this kind do not say whose states they are.
        assert_converts(&open(name), name, name != "dp_reshardable");
    }
}

#[test]
fn other_configurations_are_refused_by_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(fixture("megatron/expected_single.json")).unwrap();
    let path = dir.path().join("config.json");
    for (from, to, expected) in [
        (
            "\"num_key_value_heads\": 2",
            "\"num_key_value_heads\": 4",
            "has 32 rows, and the configuration has 4 query heads",
        ),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "has 2 layers, and the configuration has 3"),
        ("\"vocab_size\": 37", "\"vocab_size\": 49", "fewer rows than the vocabulary of 49"),
        ("\"model_type\": \"llama\"", "\"model_type\": \"gpt2\"", "not known"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let error = converted(&open("single"), Part::All, &path, &dir.path().join("out.safetensors"))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!dir.path().join("out.safetensors").exists());
    }
    let other = fixture("megatron/expected_single.json");
    let error = converted(&open("experts"), Part::All, &other, &dir.path().join("out.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mlp.experts.experts.linear_fc1.weight") && error.contains("without --config"),
        "{error}"
    );
}

#[test]
fn saves_that_did_not_end_and_other_kinds_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixture("megatron/single/iter_0000001");
    let fresh = || {
        for entry in fs::read_dir(&from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    };
    let error = || formats::open(dir.path()).unwrap_err().to_string();
    for (lost, expected) in [
        ("metadata.json", "its metadata.json is missing or damaged"),
        ("common.pt", "its common.pt is missing"),
        ("__0_0.distcp", "__0_0.distcp"),
    ] {
        fresh();
        fs::remove_file(dir.path().join(lost)).unwrap();
        assert!(error().contains(expected), "{}", error());
    }
    fresh();
    fs::write(
        dir.path().join("metadata.json"),
        r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#,
    )
    .unwrap();
    assert!(error().contains("of the kind `zarr`"), "{}", error());
}

#[test]
fn folders_of_ranks_are_one_model() {
    for (name, world) in [("ranks", 4), ("ranks_dist", 2), ("ranks_experts", 2)] {
        let checkpoint = open(name);
        checkpoint.check_coverage().unwrap();
        assert_eq!(checkpoint.world_size, Some(world), "{name}");
        assert_eq!(checkpoint.run_state, [("step".to_owned(), "1".to_owned())]);
        assert!(is_sound(&checkpoint), "{name}");
        let has_states = name != "ranks_dist";
        assert_eq!(
            checkpoint.notes.iter().any(|note| note.contains("are not read: it is distributed")),
            !has_states
        );
        assert_converts(&checkpoint, name, has_states);
    }
}

/// Copies a folder of folders with files.
fn copied(name: &str, to: &Path) {
    for folder in fs::read_dir(fixture("megatron").join(name).join("iter_0000001")).unwrap() {
        let folder = folder.unwrap();
        fs::create_dir_all(to.join(folder.file_name())).unwrap();
        for file in fs::read_dir(folder.path()).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(folder.file_name()).join(file.file_name())).unwrap();
        }
    }
}

#[test]
fn lost_copied_and_mixed_ranks_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = |path: &Path| formats::open(path).unwrap_err().to_string();
    for rank in ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"] {
        let path = dir.path().join(rank);
        copied("ranks", &path);
        fs::remove_file(path.join(rank).join("model_optim_rng.pt")).unwrap();
        assert!(error(&path).contains(rank) && error(&path).contains("missing"), "{}", error(&path));
    }
    // The last stage has the output layer, the first one the embedding.
    let path = dir.path().join("stage");
    copied("ranks", &path);
    let file = |rank: &str| path.join(rank).join("model_optim_rng.pt");
    fs::copy(file("mp_rank_00_000"), file("mp_rank_00_001")).unwrap();
    assert!(formats::open(&path).and_then(|found| found.check_coverage()).is_err());
    let path = dir.path().join("mixed");
    copied("ranks", &path);
    copied("ranks_dist", &path);
    assert!(error(&path).contains("files were mixed"), "{}", error(&path));
}

/// The metadata of DCP has no checksum, so shapes, offsets and names in it may be anything.
#[test]
fn changed_metadata_is_refused_or_converted_within_its_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (fixture("megatron/experts/iter_0000001"), dir.path().join("changed"));
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let config = fixture("megatron/expected_experts.json");
    let bytes = fs::read(to.join(".metadata")).unwrap();
    let (mut refused, mut converted_too) = (0, 0);
    for trial in 0..400 {
        let at = (trial * 104_729) % bytes.len();
        let mut changed = bytes.clone();
        changed[at] = changed[at].wrapping_add([1, 7, 128, 255][trial % 4]);
        fs::write(to.join(".metadata"), changed).unwrap();
        let out = dir.path().join(format!("{trial}.safetensors"));
        let found = formats::open(&to).and_then(|found| converted(&found, Part::All, &config, &out));
        assert_eq!(found.is_ok(), out.exists(), "an output is whole or not there");
        if found.is_ok() { converted_too += 1 } else { refused += 1 }
    }
    assert!(refused > 100 && converted_too > 0, "{refused} refused, {converted_too} converted");
}
