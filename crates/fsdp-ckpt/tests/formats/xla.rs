//! Rank files of torch_xla are read to what torch_xla consolidates them to, and to the model they were made from.

use std::{collections::BTreeMap, fs, path::Path};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Role, Value},
    formats::{self, torch_file, xla},
};

use crate::{bytes_of, fixture};

const LAYOUTS: [&str; 5] = ["nested", "dim0", "flat", "bf16buf", "trained"];

/// Opens a layout by the file of one rank.
fn open(layout: &str, rank: usize) -> Checkpoint {
    let file = format!("xla_fsdp_2rank/{layout}_rank-{rank:08}-of-00000002.pth");
    xla::open(fixture(&file)).unwrap()
}

/// Returns dtype, shape and bytes of the tensors with a role, by name.
fn tensors(checkpoint: &Checkpoint, role: Role) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let tensors = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == role);
    let entry = |name: &str, tensor: &fsdp_ckpt::checkpoint::Tensor| {
        (tensor.dtype.to_string(), tensor.shape.clone(), bytes_of(checkpoint, name))
    };
    tensors.map(|(name, tensor)| (name.clone(), entry(name, tensor))).collect()
}

/// Returns the tensors of a file of `torch.save` whose names start with `prefix`, by the rest of the name.
fn expected(file: &str, prefix: &str) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let checkpoint = torch_file::open(fixture("xla_fsdp_2rank").join(file)).unwrap();
    let all = tensors(&checkpoint, Role::Model).into_iter();
    all.filter_map(|(name, entry)| Some((name.strip_prefix(prefix)?.to_owned(), entry))).collect()
}

#[test]
fn every_layout_matches_torch_xla_consolidation() {
    for layout in LAYOUTS {
        let checkpoint = open(layout, 0);
        checkpoint.check_coverage().unwrap();
        assert_eq!(checkpoint.world_size, Some(2));
        assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
        let model = tensors(&checkpoint, Role::Model);
        assert_eq!(model, expected(&format!("{layout}_consolidated.pth"), "model."), "{layout}");
    }
}

#[test]
fn untrained_layouts_match_reference_model() {
    let reference = expected("reference_state_dict.pth", "");
    for layout in ["nested", "dim0", "flat"] {
        assert_eq!(tensors(&open(layout, 1), Role::Model), reference, "{layout}");
    }
    // torch_xla keeps this buffer in its narrower compute dtype.
    let mut rounded = tensors(&open("bf16buf", 0), Role::Model);
    let gate = rounded.insert("gate".into(), reference["gate"].clone()).unwrap();
    assert_eq!((gate.0.as_str(), &gate.2[..]), ("BF16", &[0x80, 0x3f, 0xaa, 0x3e][..]));
    assert_eq!(rounded, reference);
}

/// Returns the gradient that the script set for parameter `index` at a step, on a rank.
fn gradient(index: usize, step: usize, rank: usize) -> f64 {
    0.01 * (index as f64 + 1.0) - 0.03 * step as f64 + 0.001 * rank as f64
}

#[test]
fn adam_moments_match_parameter_gradients() {
    let checkpoint = open("trained", 0);
    // The order of the model's parameters: the outer unit comes first.
    let order = [
        "head.weight",
        "head.bias",
        "blocks.0.up.weight",
        "blocks.0.up.bias",
        "blocks.0.down.weight",
        "blocks.1.up.weight",
        "blocks.1.up.bias",
        "blocks.1.down.weight",
    ];
    for (index, name) in order.into_iter().enumerate() {
        let elements = |state: &str| -> Vec<f64> {
            let bytes = bytes_of(&checkpoint, &format!("optim.state.{name}.{state}"));
            bytes
                .chunks_exact(4)
                .map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap())))
                .collect()
        };
        let (exp_avg, exp_avg_sq) = (elements("exp_avg"), elements("exp_avg_sq"));
        assert_eq!(elements("step"), [2.0]);
        let len = checkpoint.tensors[name].len() as usize;
        assert_eq!((exp_avg.len(), exp_avg_sq.len()), (len, len));
        // The default layout pads to a multiple of 128 elements per rank, so each rank holds 128 elements here.
        for (i, (first, second)) in exp_avg.into_iter().zip(exp_avg_sq).enumerate() {
            let g: Vec<f64> = (0..2).map(|step| gradient(index, step, i / 128)).collect();
            let (m, v) = (0.09 * g[0] + 0.1 * g[1], 0.000_999 * g[0] * g[0] + 0.001 * g[1] * g[1]);
            assert!((first - m).abs() < 1e-7, "{name}[{i}]: {first} {m}");
            assert!((second - v).abs() < 1e-8, "{name}[{i}]: {second} {v}");
        }
    }
}

#[test]
fn param_groups_keep_parameter_names_and_settings() {
    let checkpoint = open("trained", 0);
    let value = |key: &str| &checkpoint.values[&format!("optim.param_groups.0.{key}")].value;
    assert_eq!(value("lr"), &Value::Float(0.01));
    assert_eq!(value("betas"), &Value::List(vec![Value::Float(0.9), Value::Float(0.999)]));
    let Value::List(params) = value("params") else { panic!("names are a list") };
    assert_eq!(params.len(), 8);
    let flat = open("flat", 0);
    let Value::List(params) = &flat.values["optim.param_groups.0.params"].value else { panic!("a list") };
    assert_eq!(params.len(), 8);
    let names = params.iter().map(|name| match name {
        Value::Str(name) => name,
        other => panic!("{other:?}"),
    });
    assert!(names.clone().all(|name| flat.tensors.contains_key(name)));
}

/// Creates a directory with copies of files, possibly renamed.
fn copies(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in files {
        fs::copy(fixture("xla_fsdp_2rank").join(from), dir.path().join(to)).unwrap();
    }
    dir
}

fn message(path: &Path) -> String {
    xla::open(path).unwrap_err().to_string()
}

const RANK0: &str = "nested_rank-00000000-of-00000002.pth";
const RANK1: &str = "nested_rank-00000001-of-00000002.pth";

#[test]
fn directory_and_trainer_file_names_open_same_checkpoint() {
    let expected = tensors(&open("nested", 0), Role::Model);
    let plain = copies(&[(RANK0, RANK0), (RANK1, RANK1)]);
    assert_eq!(tensors(&xla::open(plain.path()).unwrap(), Role::Model), expected);

    let trainer = copies(&[
        (RANK0, "rank0-of-2-pytorch_model.bin"),
        (RANK1, "rank1-of-2-pytorch_model.bin"),
        ("trained_rank-00000000-of-00000002.pth", "rank0-of-2-optimizer.pt"),
        ("trained_rank-00000001-of-00000002.pth", "rank1-of-2-optimizer.pt"),
    ]);
    for path in [trainer.path().to_owned(), trainer.path().join("rank1-of-2-optimizer.pt")] {
        let checkpoint = xla::open(path).unwrap();
        assert_eq!(tensors(&checkpoint, Role::Model), expected);
        checkpoint.check_coverage().unwrap();
    }
}

#[test]
fn multiple_checkpoints_in_directory_are_listed_in_error() {
    let message = message(&fixture("xla_fsdp_2rank"));
    for layout in LAYOUTS {
        assert!(message.contains(&format!("{layout}_rank-*-of-00000002.pth")), "{message}");
    }
}

#[test]
fn missing_rank_is_reported() {
    let dir = copies(&[(RANK1, RANK1)]);
    let message = message(dir.path());
    assert!(message.contains("the files of ranks 0 of 2 are missing"), "{message}");
}

#[test]
fn same_rank_under_two_names_is_rejected() {
    let dir = copies(&[(RANK0, RANK0), (RANK0, RANK1)]);
    let message = message(dir.path());
    assert!(
        message.contains(RANK1) && message.contains("the file of rank 0, but has the name of rank 1"),
        "{message}"
    );
}

#[test]
fn world_size_mismatch_is_rejected() {
    let dir = copies(&[(RANK0, "x_rank-0-of-1.pth")]);
    let message = message(dir.path());
    assert!(message.contains("only what rank 0 of 2 saved"), "{message}");
    let files = [(RANK0, "x_rank-0-of-3.pth"), (RANK1, "x_rank-1-of-3.pth"), (RANK0, "x_rank-2-of-3.pth")];
    let message = self::message(copies(&files).path());
    assert!(message.contains("its world size is 2, where 3 was expected, the number of files"), "{message}");
}

/// Every way to name the files of two ranks wrongly, opened through the directory and through each file.
#[test]
fn wrongly_named_rank_files_are_never_read_as_model() {
    let other = |rank: usize| format!("x_rank-{rank}-of-2.pth");
    let swapped = [(RANK0, RANK1.to_owned()), (RANK1, RANK0.to_owned())];
    // Under other names, only the contents reveal the swap.
    let renamed = [(RANK0, other(1)), (RANK1, other(0))];
    let lone = ["model.pth", "pytorch_model.bin", "model_7.pt", RANK1, "x_rank-0-of-1.pth"];
    let mut sets = vec![swapped.to_vec(), renamed.to_vec()];
    sets.extend(lone.map(|name| vec![(RANK0, name.to_owned())]));
    for set in sets {
        let files: Vec<(&str, &str)> = set.iter().map(|(from, to)| (*from, to.as_str())).collect();
        let dir = copies(&files);
        for path in
            std::iter::once(dir.path().to_owned()).chain(files.iter().map(|file| dir.path().join(file.1)))
        {
            let message = formats::open(&path).unwrap_err().to_string();
            let reasons =
                ["files of ranks were swapped", "only what rank 0 of 2 saved", "is missing", "are missing"];
            assert!(reasons.iter().any(|reason| message.contains(reason)), "{files:?}: {message}");
            assert!(files.iter().any(|file| message.contains(file.1)), "{files:?}: {message}");
        }
    }
}

#[test]
fn mixed_checkpoints_error_names_file_and_parameter() {
    let dir = copies(&[(RANK0, RANK0), ("dim0_rank-00000001-of-00000002.pth", RANK1)]);
    let message = message(dir.path());
    assert!(message.contains(RANK1) && message.contains("_fsdp_shard_"), "{message}");
}

#[test]
fn non_xla_file_is_rejected() {
    let dir = copies(&[("reference_state_dict.pth", "x_rank-0-of-1.pth")]);
    let message = message(dir.path());
    assert!(message.contains("not of PyTorch/XLA FSDP"), "{message}");
}
