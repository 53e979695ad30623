//! Folders written by trainers: the model together with optimizer, scheduler and random states.

use std::{fs, path::Path, sync::atomic::AtomicBool};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Role},
    formats,
    transfer::{NoProgress, Options},
    verify::{Verification, verify_all},
};

use crate::{bytes_of, fixture};

/// Folder, prefix of the names of its model, and the file with its expected tensors.
const FOLDERS: [(&str, &str, &str); 5] = [
    ("accelerate/ddp", "", "accelerate/ddp.expected.safetensors"),
    ("accelerate/fsdp2_full", "", "accelerate/fsdp2_full.expected.safetensors"),
    ("accelerate/fsdp2_sharded", "model.", "accelerate/fsdp2_sharded.expected.safetensors"),
    ("trainer/single/checkpoint-10", "", "trainer/single.expected.safetensors"),
    ("trainer/fsdp2/checkpoint-10", "model.", "trainer/fsdp2.expected.safetensors"),
];

fn count(checkpoint: &Checkpoint, role: Role) -> usize {
    checkpoint.tensors.values().filter(|tensor| tensor.role == role).count()
}

#[test]
fn trainer_folder_opens_as_one_checkpoint() {
    for (folder, prefix, expected) in FOLDERS {
        let checkpoint = formats::open(fixture(folder)).unwrap();
        checkpoint.check_coverage().unwrap();
        let expected = formats::open(fixture(expected)).unwrap();
        for name in expected.tensors.keys().filter_map(|name| name.strip_prefix("model.")) {
            let found = bytes_of(&checkpoint, &format!("{prefix}{name}"));
            assert_eq!(found, bytes_of(&expected, &format!("model.{name}")), "{folder} {name}");
        }
        for role in [Role::Model, Role::Optimizer] {
            assert_eq!(count(&checkpoint, role), count(&expected, role), "{folder} {role:?}");
        }
        assert!(checkpoint.format.contains("; beside it optimizer"), "{}", checkpoint.format);
        assert!(checkpoint.values.keys().any(|name| name.starts_with("scheduler.")), "{folder}");
        assert!(checkpoint.tensors.values().any(|tensor| tensor.role == Role::Other), "random states");
    }
    let trainer = formats::open(fixture("trainer/single/checkpoint-10")).unwrap();
    assert_eq!(trainer.run_state[0], ("step".to_owned(), "10".to_owned()));
    assert!(trainer.tensors.contains_key("optimizer.state.0.exp_avg"));
}

fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::copy(from, to).unwrap();
        return;
    }
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        copy(&entry.path(), &to.join(entry.file_name()));
    }
}

#[test]
fn folder_without_model_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("accelerate/fsdp2_sharded"), dir.path());
    fs::remove_dir_all(dir.path().join("pytorch_model_fsdp_0")).unwrap();
    let message = formats::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("no model") && message.contains("optimizer_0"), "{message}");
    // Each part can still be read by name.
    for part in ["optimizer_0", "scheduler.bin", "random_states_0.pkl"] {
        formats::open(dir.path().join(part)).unwrap();
    }
}

/// Copies a folder of the fixtures.
fn copied(folder: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture(folder), dir.path());
    dir
}

fn message(path: &Path) -> String {
    formats::open(path).unwrap_err().to_string()
}

fn verified(path: &Path) -> Verification {
    let canceled = AtomicBool::new(false);
    verify_all(&formats::open(path).unwrap(), &Options::new(&NoProgress, &canceled)).unwrap()
}

#[test]
fn missing_model_is_not_replaced_by_other_files() {
    let dir = copied("trainer/single/checkpoint-10");
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let lost = message(dir.path());
    assert!(lost.contains("no model") && lost.contains("training_args.bin"), "{lost}");
    // A file of another name that holds no weights does not count as the model either.
    fs::copy(dir.path().join("scheduler.pt"), dir.path().join("state.bin")).unwrap();
    assert!(message(dir.path()).contains("no model"));
}

#[test]
fn stray_file_is_not_taken_as_model() {
    for folder in ["accelerate/fsdp2_sharded", "accelerate/fsdp2_full"] {
        let dir = copied(folder);
        fs::copy(fixture("torch_files/pickles/bare.pt"), dir.path().join("ema.pt")).unwrap();
        let (expected, found) = (formats::open(fixture(folder)).unwrap(), formats::open(dir.path()).unwrap());
        assert!(found.tensors.keys().eq(expected.tensors.keys()), "{folder}");
        let beside = formats::beside(&found).checkpoints;
        assert!(beside.iter().map(|one| &one.path).eq([&dir.path().join("ema.pt")]), "{folder}");
    }
}

#[test]
fn fsdp_folder_number_may_be_nonzero() {
    let dir = copied("accelerate/fsdp2_sharded");
    let expected = formats::open(dir.path()).unwrap();
    for (old, new) in [("pytorch_model_fsdp_0", "pytorch_model_fsdp_3"), ("optimizer_0", "optimizer_3")] {
        fs::rename(dir.path().join(old), dir.path().join(new)).unwrap();
    }
    let found = formats::open(dir.path()).unwrap();
    assert!(found.tensors.keys().eq(expected.tensors.keys()));
}

#[test]
fn deepspeed_files_take_precedence_over_trainer_files() {
    let dir = copied("deepspeed/zero2");
    let expected = formats::open(dir.path()).unwrap();
    let beside = ["model.safetensors", "training_args.bin", "scheduler.pt", "rng_state.pth"];
    for name in beside {
        fs::copy(fixture("trainer/single/checkpoint-10").join(name), dir.path().join(name)).unwrap();
        let found = formats::open(dir.path()).unwrap();
        assert!(expected.tensors.iter().all(|(name, tensor)| found.tensors[name].role == tensor.role));
    }
    let found = formats::open(dir.path()).unwrap();
    assert!(found.values.contains_key("scheduler.last_epoch") && found.format.starts_with("DeepSpeed"));
}

#[test]
fn trainer_file_overwritten_by_another_is_rejected() {
    for (folder, file) in
        [("accelerate/ddp", "optimizer.bin"), ("accelerate/fsdp2_full", "pytorch_model_fsdp.bin")]
    {
        let dir = copied(folder);
        fs::copy(dir.path().join("scheduler.bin"), dir.path().join(file)).unwrap();
        let message = message(dir.path());
        assert!(message.contains(file) && message.contains("was saved as `scheduler`"), "{message}");
    }
}

#[test]
fn missing_dcp_metadata_is_rejected_and_fails_verification() {
    let dir = copied("fsdp2/dcp");
    let part = message(&dir.path().join("__0_0.distcp"));
    assert!(part.contains("it is a part of a checkpoint; name the directory"), "{part}");
    fs::remove_file(dir.path().join(".metadata")).unwrap();
    for path in [dir.path().to_owned(), dir.path().join("__0_0.distcp")] {
        assert!(message(&path).contains("its .metadata is missing"), "{}", message(&path));
    }
    let beside = tempfile::tempdir().unwrap();
    fs::copy(fixture("fsdp2/model.safetensors"), beside.path().join("model.safetensors")).unwrap();
    copy(dir.path(), &beside.path().join("older"));
    let problems = verified(beside.path()).problems;
    assert!(problems.len() == 1 && problems[0].to_string().contains("older: its .metadata is missing"));
}

#[test]
fn file_without_tensors_fails_verification() {
    let problems = verified(&fixture("accelerate/ddp/scheduler.bin")).problems;
    assert!(problems.len() == 1 && problems[0].to_string().contains("no tensor was found"), "{problems:?}");
}

#[test]
fn truncated_first_shard_is_named_in_error() {
    for folder in ["torch_files/numbered_shards", "fsdp1_ranks/dtensor"] {
        let dir = copied(folder);
        let first = dir.path().join("shard_00000-of-00002.pt");
        let mut bytes = fs::read(&first).unwrap();
        bytes.truncate(bytes.len() / 2);
        fs::write(&first, bytes).unwrap();
        for path in [dir.path(), &first] {
            let message = message(path);
            assert!(message.contains("shard_00000-of-00002.pt") && !message.contains("name "), "{message}");
        }
    }
}
