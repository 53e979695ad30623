//! Every fixture is recognized by its content, whatever its name; mistakes get a helpful message.

use std::fs;

use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn message(path: &Path) -> String {
    open(path).unwrap_err().to_string()
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

#[test]
fn fixture_formats_are_detected_by_content() {
    let known = [
        ("full.pth", "PyTorch file"),
        ("full.safetensors", "safetensors file"),
        ("hf_dcp_shards", "safetensors shards"),
        ("hf_sharded", "safetensors with an index"),
        ("dcp_2rank", "DCP"),
        ("dcp_2rank_zstd", "DCP"),
        ("dcp_hsdp_2x2", "DCP"),
        ("fsdp1/sharded", "DCP"),
        ("fsdp2_rank_pth/model_world_size_2_rank_0.pt", "DTensors"),
        ("xla_fsdp_2rank/flat_rank-00000000-of-00000002.pth", "XLA"),
        ("deepspeed_layout/zero3", "DeepSpeed ZeRO stage 3"),
        ("deepspeed_layout/zero2/global_step5", "DeepSpeed ZeRO stage 2"),
    ];
    for (name, format) in known {
        let checkpoint = open(fixture(name)).unwrap();
        assert!(checkpoint.format.contains(format), "{name}: {}", checkpoint.format);
        checkpoint.check_coverage().unwrap();
    }
}

#[test]
fn format_is_detected_without_file_extension() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["full.pth", "full.safetensors"] {
        let path = dir.path().join("no_ending");
        fs::copy(fixture(name), &path).unwrap();
        assert_eq!(open(&path).unwrap().format, open(fixture(name)).unwrap().format);
    }
}

/// As the safetensors library does; a file of JSON has no header length before it.
#[test]
fn header_may_begin_with_white_space() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let entry = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    for space in [" ", "\n\t\r ", &" ".repeat(100)] {
        let header = format!("{space}{entry}");
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"\x07"].concat();
        fs::write(&path, bytes).unwrap();
        assert_eq!(open(&path).unwrap().format, "safetensors file");
    }
    fs::write(&path, b"\x08\0\0\0\0\0\0\0        ").unwrap();
    assert!(message(&path).contains("its header does not begin with `{`"), "{}", message(&path));
}

#[test]
fn folder_of_checkpoints_error_lists_them() {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("dcp_2rank"), &dir.path().join("checkpoint-50/pytorch_model_fsdp_0"));
    copy(&fixture("hf_sharded"), &dir.path().join("export"));
    let text = message(dir.path());
    assert!(text.contains("name one of those in it: checkpoint-50, export"), "{text}");
}

#[test]
fn folder_of_other_tensors_is_not_offered_as_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("hf_sharded"), &dir.path().join("data"));
    let data = dir.path().join("data");
    for path in fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path()) {
        fs::rename(&path, data.join(path.file_name().unwrap().to_string_lossy().replace("model", "batch")))
            .unwrap();
    }
    let text = message(dir.path());
    assert!(text.contains("no checkpoint of a known format (it holds data); docs/checkpoints.md"), "{text}");
}

#[test]
fn file_of_directory_checkpoint_error_names_directory() {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("dcp_2rank"), &dir.path().join("step"));
    let text = message(&dir.path().join("step/.metadata"));
    assert!(text.contains("name the directory") && text.contains("step instead"), "{text}");
}

#[test]
fn unrelated_file_next_to_checkpoint_is_not_its_part() {
    let dir = tempfile::tempdir().unwrap();
    for (checkpoint, part) in [("dcp_2rank", "__0_0.distcp"), ("hf_sharded", "model.safetensors")] {
        let step = dir.path().join(checkpoint);
        copy(&fixture(checkpoint), &step);
        for (name, text) in [("notes.txt", "some words"), ("config.json", "{}")] {
            fs::write(step.join(name), text).unwrap();
            let text = message(&step.join(name));
            let expected = format!("the directory {} holds a checkpoint", step.display());
            assert!(text.contains("known format") && text.contains(&expected), "{text}");
        }
        fs::write(step.join(part), "these are no tensors").unwrap();
        let text = message(&step.join(part));
        let expected = match part {
            "model.safetensors" => {
                "not a valid safetensors file: it does not begin with the length of a header"
            }
            _ => "a part of a checkpoint; name the directory",
        };
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn fault_of_safetensors_file_is_named_whatever_is_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let of_header = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let faults = [
        (of_header("[]"), "its header does not begin with `{`"),
        (of_header("\"a\""), "its header does not begin with `{`"),
        (of_header("null"), "its header does not begin with `{`"),
        (of_header("  "), "its header does not begin with `{`"),
        (of_header("{\"a\":1}"), "the entry of tensor `a` cannot be read"),
        (of_header("{"), "its header is not valid JSON"),
        (vec![0; 8], "its header does not begin with `{`"),
        (vec![0; 64], "its header does not begin with `{`"),
        (b"1234567".to_vec(), "it has 7 bytes, too few for the 8-byte header length"),
        (Vec::new(), "it is empty"),
        (vec![0xff; 64], "more than the 100000000 that the format allows"),
        (b"{\"weight_map\": {}}".to_vec(), "more than the 100000000 that the format allows"),
    ];
    let path = dir.path().join("b.safetensors");
    for beside in ["full.safetensors", "hf_sharded", "hf_dcp_shards", "dcp_2rank", "full.pth"] {
        let folder = dir.path().join(beside);
        let others = if fixture(beside).is_dir() { folder.clone() } else { folder.join(beside) };
        fs::create_dir_all(&folder).unwrap();
        copy(&fixture(beside), &others);
        for (bytes, fault) in &faults {
            let path = folder.join("b.safetensors");
            fs::write(&path, bytes).unwrap();
            let text = message(&path);
            assert!(text.contains("b.safetensors: ") && text.contains(fault), "{beside}: {text}");
        }
    }
    for (bytes, fault) in &faults {
        fs::write(&path, bytes).unwrap();
        for text in [message(&path), message(dir.path())] {
            // In a folder, an empty file is one of the model.
            let fault = if bytes.is_empty() { "" } else { fault };
            assert!(text.contains("b.safetensors: ") && text.contains(fault), "{text}");
        }
    }
}

#[test]
fn damaged_file_of_newest_step_is_named() {
    for file in ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"] {
        for at in [0, 1000] {
            let dir = tempfile::tempdir().unwrap();
            copy(&fixture("deepspeed_layout/zero3"), dir.path());
            let path = dir.path().join("global_step5").join(file);
            let mut bytes = fs::read(&path).unwrap();
            bytes.truncate(bytes.len() - at);
            bytes[0] ^= u8::from(at == 0);
            fs::write(&path, bytes).unwrap();
            let text = message(dir.path());
            assert!(text.contains(file), "{text}");
        }
    }
}

#[test]
fn non_checkpoint_error_describes_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.pth");
    fs::write(&path, b"").unwrap();
    assert!(message(&path).contains("is empty"));
    fs::write(&path, b"\x80\x02hello, this is not a zip").unwrap();
    assert!(message(&path).contains("begins with \\x80\\x02hello"), "{}", message(&path));
    assert!(message(dir.path()).contains("it holds x.pth"), "{}", message(dir.path()));
    fs::write(&path, br#"{"architectures": []}"#).unwrap();
    assert!(open(&path).is_err());
    assert!(matches!(open(dir.path().join("nowhere")), Err(Error::Io { .. })));
}
