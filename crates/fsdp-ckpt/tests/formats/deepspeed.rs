//! Directories in DeepSpeed's layout are read to the weights and states they were made from.

use std::{fs, path::Path};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Role, Value},
    formats::{self, deepspeed, torch_file},
};

use crate::{bytes_of, fixture};

fn open(stage: usize) -> Checkpoint {
    deepspeed::open(fixture(&format!("deepspeed_layout/zero{stage}"))).unwrap()
}

#[test]
fn zero2_and_zero3_match_reference_weights_and_states() {
    let reference = torch_file::open(fixture("deepspeed_layout/reference.pth")).unwrap();
    for stage in [2, 3] {
        let checkpoint = open(stage);
        checkpoint.check_coverage().unwrap();
        assert!(checkpoint.notes.is_empty(), "{:?}", checkpoint.notes);
        assert_eq!(
            checkpoint.tensors.keys().collect::<Vec<_>>(),
            reference.tensors.keys().collect::<Vec<_>>()
        );
        for (name, expected) in &reference.tensors {
            let tensor = &checkpoint.tensors[name];
            assert_eq!((tensor.dtype, &tensor.shape), (expected.dtype, &expected.shape), "{name}");
            assert_eq!(bytes_of(&checkpoint, name), bytes_of(&reference, name), "{name} of stage {stage}");
            assert_eq!(tensor.role == Role::Optimizer, name.starts_with("optim."), "{name}");
        }
        assert_eq!(checkpoint.world_size, Some(2));
    }
}

#[test]
fn settings_steps_and_other_values_are_kept() {
    for stage in [2, 3] {
        let checkpoint = open(stage);
        assert_eq!(checkpoint.format, format!("DeepSpeed ZeRO stage {stage}, one file per rank"));
        let step = ("step".to_owned(), "5".to_owned());
        assert!(checkpoint.run_state.contains(&step), "{:?}", checkpoint.run_state);
        let value = |name: &str| &checkpoint.values[name].value;
        assert_eq!(value("optim.param_groups.1.weight_decay"), &Value::Float(0.0));
        let names = ["up.bias", "norm.weight"].map(|name| Value::Str(name.to_owned()));
        assert_eq!(value("optim.param_groups.1.params"), &Value::List(names.to_vec()));
        assert_eq!(value("ds_config.train_batch_size"), &Value::Int(8));
        assert_eq!(value("lr_scheduler.last_epoch"), &Value::Int(5));
    }
}

#[test]
fn tied_parameters_share_chunks() {
    for stage in [2, 3] {
        let checkpoint = open(stage);
        assert_eq!(checkpoint.tensors["head.weight"].chunks, checkpoint.tensors["emb.weight"].chunks);
    }
}

#[test]
fn file_and_directory_open_same_checkpoint() {
    let dir = fixture("deepspeed_layout/zero3/global_step5");
    let file = dir.join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    for path in [dir, file] {
        assert_eq!(deepspeed::open(&path).unwrap().tensors, open(3).tensors);
        assert_eq!(formats::open(&path).unwrap().tensors, open(3).tensors);
    }
    let found = formats::open(fixture("deepspeed_layout/zero2")).unwrap();
    assert_eq!(found.format, "DeepSpeed ZeRO stage 2, one file per rank");
}

/// Copies the directory of a ZeRO stage, leaving out some files and renaming others.
fn copy(stage: usize, without: &[&str], renamed: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = fixture(&format!("deepspeed_layout/zero{stage}/global_step5"));
    for entry in fs::read_dir(&from).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !without.contains(&&name[..]) {
            fs::copy(from.join(&name), dir.path().join(&name)).unwrap();
        }
    }
    for (old, new) in renamed {
        fs::copy(from.join(old), dir.path().join(new)).unwrap();
    }
    dir
}

fn message(path: &Path) -> String {
    deepspeed::open(path).unwrap_err().to_string()
}

#[test]
fn missing_rank_files_are_reported() {
    let optimizer = |rank| format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    let message_first = message(copy(3, &[&optimizer(0)], &[]).path());
    assert!(message_first.contains("the files of ranks 0 of 2 are missing"), "{message_first}");
    let last = message(copy(3, &[&optimizer(1)], &[]).path());
    assert!(last.contains("number of partitions is 2, where 1 was expected, the number of files"), "{last}");
    let model = message(copy(3, &["zero_pp_rank_1_mp_rank_00_model_states.pt"], &[]).path());
    assert!(model.contains("number of files of the model is 1, where 2 was expected"), "{model}");
    let no_model = message(copy(2, &["mp_rank_00_model_states.pt"], &[]).path());
    assert!(no_model.contains("no file is named after a rank"), "{no_model}");
}

#[test]
fn tensor_parallel_model_is_rejected() {
    let model = "mp_rank_00_model_states.pt";
    let renamed = [(model, "x_mp_rank_00_model_states.pt"), (model, "x_mp_rank_01_model_states.pt")];
    let message = message(copy(2, &[model], &renamed).path());
    assert!(message.contains("tensor parallelism"), "{message}");
}

#[test]
fn mixed_zero_stages_are_rejected() {
    let dir = copy(3, &["zero_pp_rank_1_mp_rank_00_optim_states.pt"], &[]);
    let other = "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
    let to = dir.path().join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    fs::copy(fixture("deepspeed_layout/zero2").join(other), to).unwrap();
    let message = message(dir.path());
    assert!(
        message.contains("rank_1") && message.contains("its stage is 2, where 3 was expected"),
        "{message}"
    );
}

#[test]
fn latest_must_be_plain_name() {
    for tag in ["../secret", "/etc", "a/b", "", ".."] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("latest"), tag).unwrap();
        let message = message(dir.path());
        assert!(message.contains("latest"), "{tag}: {message}");
    }
}

#[test]
fn swapped_or_copied_rank_files_are_rejected() {
    for (stage, name) in [(2, "bf16_zero_pp_rank_"), (3, "zero_pp_rank_")] {
        let of_rank = |rank| format!("{name}{rank}_mp_rank_00_optim_states.pt");
        let (zero, one) = (of_rank(0), of_rank(1));
        let swapped = message(copy(stage, &[], &[(&zero, &one), (&one, &zero)]).path());
        assert!(swapped.contains(&format!("it was saved as {one}, the file of rank 1")), "{swapped}");
        let copied = message(copy(stage, &[], &[(&zero, &one)]).path());
        assert!(copied.contains(&one) && copied.contains("has the name of rank 1"), "{copied}");
        // With all files renamed, equal bytes still reveal a copy, but nothing reveals a swap.
        let renamed = [(&zero[..], "x_rank_0_optim_states.pt"), (&zero, "x_rank_1_optim_states.pt")];
        let copied = message(copy(stage, &[&zero, &one], &renamed).path());
        assert!(copied.contains("holds the same bytes as"), "{copied}");
        let renamed = [(&zero[..], "x_rank_0_optim_states.pt"), (&one, "x_rank_1_optim_states.pt")];
        let limits = deepspeed::open(copy(stage, &[&zero, &one], &renamed).path()).unwrap().limits;
        assert!(limits[0].contains("do not state their rank"), "{limits:?}");
        assert!(open(stage).limits.is_empty());
    }
}

/// Copies the files of a checkpoint that DeepSpeed saved.
fn saved(kind: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(&format!("deepspeed/{kind}/global_step10"))).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

#[test]
fn missing_optimizer_files_are_rejected() {
    for kind in ["zero1", "zero2_bf16_tied_frozen"] {
        let dir = saved(kind);
        for entry in fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().ends_with("_optim_states.pt") {
                fs::remove_file(path).unwrap();
            }
        }
        let message = message(dir.path());
        assert!(message.contains("none of them (*_optim_states.pt) is here"), "{kind}: {message}");
    }
}

#[test]
fn model_parallel_parts_in_zero0_are_rejected() {
    for other in ["mp_rank_01_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"] {
        let dir = saved("zero0");
        fs::copy(dir.path().join("mp_rank_00_model_states.pt"), dir.path().join(other)).unwrap();
        let message = message(dir.path());
        assert!(message.contains(other) && message.contains("tensor or pipeline parallelism"), "{message}");
    }
}

#[test]
fn renamed_zero3_files_note_limit_and_copies_are_rejected() {
    let dir = saved("zero3_bf16_tied_frozen");
    let path = |name: &str| dir.path().join(name);
    for rank in 0..2 {
        let old = format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
        fs::rename(path(&old), path(&format!("x_rank_{rank}_model_states.pt"))).unwrap();
    }
    let limits = deepspeed::open(dir.path()).unwrap().limits;
    assert!(limits.len() == 1 && limits[0].contains("do not state their rank"), "{limits:?}");
    fs::copy(path("x_rank_0_model_states.pt"), path("x_rank_1_model_states.pt")).unwrap();
    let message = message(dir.path());
    assert!(message.contains("holds the same bytes as"), "{message}");
}

/// The universal checkpoints that DeepSpeed's converter made of the others.
const UNIVERSAL: [&str; 3] = ["zero1", "zero2_bf16_tied_frozen", "zero3_bf16_tied_frozen"];

#[test]
fn universal_checkpoints_hold_what_they_were_made_of() {
    for kind in UNIVERSAL {
        let universal = formats::open(fixture(&format!("deepspeed_universal/{kind}"))).unwrap();
        let original = formats::open(fixture(&format!("deepspeed/{kind}"))).unwrap();
        assert_eq!(universal.format, "DeepSpeed universal checkpoint");
        universal.check_coverage().unwrap();
        let names = |checkpoint: &Checkpoint| checkpoint.tensors.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&universal), names(&original), "{kind}");
        for (name, expected) in &original.tensors {
            let tensor = &universal.tensors[name];
            assert_eq!((&tensor.shape, tensor.role), (&expected.shape, expected.role), "{kind}: {name}");
            // The converter widens frozen parameters of stage 2.
            if tensor.dtype == expected.dtype {
                assert_eq!(bytes_of(&universal, name), bytes_of(&original, name), "{kind}: {name}");
            } else {
                assert_eq!((kind, &name[..]), (UNIVERSAL[1], "model.layers.0.self_attn.k_proj.weight"));
            }
        }
        let values = |checkpoint: &Checkpoint, of: &str| {
            let values = checkpoint.values.iter().filter(|(name, _)| name.starts_with(of));
            values.map(|(name, object)| (name.clone(), object.value.clone())).collect::<Vec<_>>()
        };
        for of in ["optim.param_groups", "optim.state"] {
            assert_eq!(values(&universal, of), values(&original, of), "{kind}");
        }
        assert_eq!(universal.run_state, original.run_state, "{kind}");
        // The folder itself, and its model file, are the same checkpoint.
        let folder = fixture(&format!("deepspeed_universal/{kind}/global_step10_universal"));
        assert_eq!(formats::open(&folder).unwrap().tensors, universal.tensors);
        let file = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let file = file.into_iter().find(|path| path.extension().is_some_and(|ending| ending == "pt"));
        assert_eq!(formats::open(file.unwrap()).unwrap().tensors, universal.tensors);
    }
}

#[test]
fn incomplete_universal_checkpoints_are_rejected() {
    let from = fixture("deepspeed_universal/zero1/global_step10_universal");
    let norm = "zero/model.norm.weight";
    let damaged = |damage: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        copy_tree(&from, dir.path());
        damage(dir.path());
        message(dir.path())
    };
    let without = |file: &str| damaged(&|dir| fs::remove_file(dir.join(norm).join(file)).unwrap());
    assert!(without("exp_avg.pt").contains("`exp_avg.pt`, which other parameters have"));
    assert!(without("fp32.pt").contains("fp32.pt"));
    let folder = damaged(&|dir| fs::remove_dir_all(dir.join(norm)).unwrap());
    assert!(folder.contains("`model.norm.weight`"), "{folder}");
    let state = damaged(&|dir| {
        fs::copy(dir.join(norm).join("exp_avg.pt"), dir.join(norm).join("exp_avg_sq.pt")).map(drop).unwrap();
    });
    assert!(state.contains("the name it was saved under, exp_avg.pt,"), "{state}");
    let shape = damaged(&|dir| {
        let other = dir.join("zero/lm_head.weight/fp32.pt");
        fs::copy(other, dir.join(norm).join("fp32.pt")).map(drop).unwrap();
    });
    assert!(shape.contains("[33, 9]") && shape.contains("[9]"), "{shape}");
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}
