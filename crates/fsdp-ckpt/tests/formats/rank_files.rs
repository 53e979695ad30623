//! Rank files with distributed tensors are read to the model they were made from.

use std::{fs, path::Path};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Role},
    formats::{self, rank_files, torch_file},
};

use crate::{bytes_of, fixture};

const RANK0: &str = "model_world_size_2_rank_0.pt";
const RANK1: &str = "model_world_size_2_rank_1.pt";

/// Creates a directory with renamed copies of files.
fn copies(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in files {
        fs::copy(fixture("fsdp2_rank_pth").join(from), dir.path().join(to)).unwrap();
    }
    dir
}

fn assert_is_reference(checkpoint: &Checkpoint, reference: &str) {
    checkpoint.check_coverage().unwrap();
    let reference = torch_file::open(fixture(reference)).unwrap();
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), reference.tensors.keys().collect::<Vec<_>>());
    for (name, expected) in &reference.tensors {
        let tensor = &checkpoint.tensors[name];
        assert_eq!((tensor.dtype, &tensor.shape), (expected.dtype, &expected.shape), "{name}");
        assert_eq!(tensor.role, Role::Model);
        assert_eq!(bytes_of(checkpoint, name), bytes_of(&reference, name), "{name}");
    }
}

#[test]
fn optimizer_files_without_model_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["optim_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"] {
        fs::copy(fixture("verl/actor").join(name), dir.path().join(name)).unwrap();
    }
    let message = formats::open(dir.path()).unwrap_err().to_string();
    let missing = "the files of the model (model_world_size_2_rank_*.pt) are missing beside optim_world_size_2_rank_*.pt";
    assert!(message.contains(missing), "{message}");
    let alone = formats::open(dir.path().join("optim_world_size_2_rank_1.pt")).unwrap();
    assert!(alone.tensors.keys().all(|name| name.contains("exp_avg") || name.ends_with("step")));
}

#[test]
fn fsdp2_rank_files_match_reference() {
    for rank in [RANK0, RANK1] {
        let checkpoint = rank_files::open(fixture("fsdp2_rank_pth").join(rank)).unwrap();
        assert_eq!(checkpoint.world_size, Some(2));
        assert_is_reference(&checkpoint, "fsdp2_rank_pth/reference.pth");
    }
    let dir = copies(&[(RANK0, "pytorch_model_fsdp_rank0.bin"), (RANK1, "pytorch_model_fsdp_rank1.bin")]);
    assert_is_reference(&rank_files::open(dir.path()).unwrap(), "fsdp2_rank_pth/reference.pth");
}

#[test]
fn dtensor_placements_on_2d_mesh_match_reference() {
    let checkpoint = rank_files::open(fixture("dtensor_mesh_rank_pth")).unwrap();
    assert_eq!(checkpoint.world_size, Some(4));
    assert_is_reference(&checkpoint, "dtensor_mesh_rank_pth/reference.pth");
}

#[test]
fn optimizer_rank_files_are_read_under_optim_prefix() {
    let dir = copies(&[
        (RANK0, RANK0),
        (RANK1, RANK1),
        (RANK0, "optim_world_size_2_rank_0.pt"),
        (RANK1, "optim_world_size_2_rank_1.pt"),
    ]);
    let checkpoint = rank_files::open(dir.path()).unwrap();
    checkpoint.check_coverage().unwrap();
    for (name, tensor) in &checkpoint.tensors {
        assert_eq!(tensor.role == Role::Optimizer, name.starts_with("optim."), "{name}");
    }
    assert_eq!(bytes_of(&checkpoint, "optim.1.bias"), bytes_of(&checkpoint, "1.bias"));
}

fn message(path: &Path) -> String {
    rank_files::open(path).unwrap_err().to_string()
}

#[test]
fn missing_rank_is_reported() {
    let message_of_rank = message(copies(&[(RANK0, RANK0)]).path());
    assert!(message_of_rank.contains("the files of ranks 1 of 2 are missing"), "{message_of_rank}");
    // If the names state no world size, the mesh does.
    let unnamed = message(copies(&[(RANK0, "model_rank0.bin")]).path());
    assert!(unnamed.contains("number of ranks in a mesh is 2, where 1 was expected"), "{unnamed}");
}

#[test]
fn same_rank_under_two_names_is_rejected() {
    let message = message(copies(&[(RANK0, RANK0), (RANK0, RANK1)]).path());
    let expected =
        "the file of rank 0, but has the name of rank 1: files of ranks were swapped, or one was copied";
    assert!(message.contains(RANK1) && message.contains(expected), "{message}");
}

#[test]
fn fsdp1_local_states_are_rejected_with_remedy() {
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        let from = fixture(&format!("fsdp1/local_rank{rank}.pth"));
        fs::copy(from, dir.path().join(format!("local_rank{rank}.pth"))).unwrap();
    }
    let message = message(dir.path());
    assert!(message.contains("save a sharded or full state dict"), "{message}");
}

#[test]
fn directory_without_rank_files_is_rejected_with_example() {
    let dir = tempfile::tempdir().unwrap();
    assert!(message(dir.path()).contains("such as model_world_size_4_rank_0.pt"));
    fs::write(dir.path().join("model.pt"), "x").unwrap();
    assert!(message(dir.path()).contains("no file is named after a rank"));
    assert!(message(&dir.path().join("model.pt")).contains("not an archive of torch.save"));
}

#[test]
fn rank_file_formats_are_detected_by_content() {
    let format = |path: &str| formats::open(fixture(path)).unwrap().format;
    assert_eq!(format("fsdp2_rank_pth"), "PyTorch DTensors, one file per rank");
    let xla = "xla_fsdp_2rank/flat_rank-00000001-of-00000002.pth";
    assert_eq!(format(xla), "PyTorch/XLA FSDP, one file per rank");
    assert_eq!(format("full.pth"), "PyTorch file (torch.save)");
    // The reader of rank files takes directories of several sets, too, and says what is wrong.
    let several = formats::open(fixture("xla_fsdp_2rank")).unwrap_err().to_string();
    assert!(several.contains("it holds files of several checkpoints"), "{several}");
}

/// Compares the model with what the writer's own tools load; the prefix `model.` of names is ignored.
fn assert_is_model(checkpoint: &Checkpoint, expected: &str) {
    checkpoint.check_coverage().unwrap();
    let mut expected = formats::open(fixture(expected)).unwrap();
    if expected.tensors.keys().all(|name| name.starts_with("model.")) {
        expected = expected.under("model").unwrap();
    }
    let found = match checkpoint.tensors.keys().any(|name| name.starts_with("model.")) {
        true => checkpoint.clone().under("model").unwrap(),
        false => checkpoint.clone(),
    };
    assert_eq!(found.tensors.keys().collect::<Vec<_>>(), expected.tensors.keys().collect::<Vec<_>>());
    for (name, tensor) in &expected.tensors {
        assert_eq!((found.tensors[name].dtype, &found.tensors[name].shape), (tensor.dtype, &tensor.shape));
        assert_eq!(bytes_of(&found, name), bytes_of(&expected, name), "{name}");
    }
}

#[test]
fn fsdp1_sharded_rank_files_match_reference() {
    let reference = torch_file::open(fixture("fsdp1_ranks/reference.pth")).unwrap();
    for kind in ["sharded_tensor", "dtensor"] {
        let dir = fixture(&format!("fsdp1_ranks/{kind}"));
        for entry in fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).chain([dir.clone()]) {
            let checkpoint = formats::open(entry).unwrap();
            checkpoint.check_coverage().unwrap();
            let names: Vec<_> = checkpoint.tensors.keys().collect();
            assert_eq!(names, reference.tensors.keys().collect::<Vec<_>>());
            for (name, expected) in &reference.tensors {
                assert_eq!(checkpoint.tensors[name].role, expected.role);
                assert_eq!(bytes_of(&checkpoint, name), bytes_of(&reference, name), "{kind} {name}");
            }
        }
    }
}

#[test]
fn missing_or_copied_sharded_tensor_file_is_rejected() {
    let from = fixture("fsdp1_ranks/sharded_tensor");
    let dir = tempfile::tempdir().unwrap();
    fs::copy(from.join("rank0.pt"), dir.path().join("rank0.pt")).unwrap();
    let lost = formats::open(dir.path()).unwrap().check_coverage().unwrap_err().to_string();
    assert!(lost.contains("`model.a.bias`") || lost.contains("`model.a.weight`"), "{lost}");
    fs::copy(from.join("rank0.pt"), dir.path().join("part1.pt")).unwrap();
    fs::rename(dir.path().join("rank0.pt"), dir.path().join("part0.pt")).unwrap();
    let copied = message(dir.path());
    assert!(copied.contains("its rank is 0, where 1 was expected"), "{copied}");
}

#[test]
fn rank_files_are_found_under_any_name() {
    for kind in ["fsdp1_sharded_tensors", "fsdp1_dtensors", "numbered_shards"] {
        assert_is_model(
            &formats::open(fixture(&format!("torch_files/{kind}"))).unwrap(),
            "torch_files/expected.safetensors",
        );
    }
    let named = fixture("torch_files/numbered_shards/shard_00001-of-00002.pt");
    assert_is_model(&formats::open(named).unwrap(), "torch_files/expected.safetensors");
}

#[test]
fn verl_actor_folder_is_read_with_extra_state() {
    let checkpoint = formats::open(fixture("verl/actor")).unwrap();
    checkpoint.check_coverage().unwrap();
    let expected = formats::open(fixture("verl/expected.safetensors")).unwrap();
    for name in expected.tensors.keys().filter_map(|name| name.strip_prefix("model.")) {
        assert_eq!(bytes_of(&checkpoint, name), bytes_of(&expected, &format!("model.{name}")), "{name}");
    }
    let extra: Vec<_> =
        checkpoint.tensors.iter().filter(|(name, _)| name.starts_with("extra_state.")).collect();
    assert!(!extra.is_empty() && extra.iter().all(|(_, tensor)| tensor.role == Role::Other));
    assert_eq!(checkpoint.tensors.len(), expected.tensors.len() + extra.len());
}
