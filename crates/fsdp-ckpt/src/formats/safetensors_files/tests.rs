//! Shards of real files join to the expected model; what does not belong together is refused.

use std::{fs, path::PathBuf};

use super::*;
use crate::{
    file_io::Files,
    safetensors::{Header, Metadata, TensorSpec, TensorType},
};

fn write(path: &Path, tensors: &[(&str, &[usize])], sharding: Option<&str>) {
    let spec = |(name, shape): &(&str, &[usize])| TensorSpec {
        name: (*name).to_owned(),
        dtype: TensorType::F32,
        shape: shape.to_vec(),
    };
    let metadata = sharding.map(|text| Metadata::from([(SHARDING_INFO.to_owned(), text.to_owned())]));
    let (header, mut bytes) = Header::layout(tensors.iter().map(spec).collect(), metadata).unwrap();
    bytes.resize(header.file_len() as usize, 1);
    fs::write(path, bytes).unwrap();
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn shards_of_real_ranks_cover_their_tensors() {
    let dir = fixture("hf_dcp_shards");
    let names: Vec<String> = Files::anywhere().list(&dir).unwrap();
    let names: Vec<String> = names.into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    let checkpoint = open_files(&dir, &names).unwrap();
    checkpoint.check_coverage().unwrap();
    assert_eq!(checkpoint.world_size, Some(2));
    assert!(checkpoint.tensors.len() > 3);
    let whole = open_file(&fixture("full.safetensors")).unwrap();
    for (name, tensor) in &whole.tensors {
        let shards = checkpoint.tensors.get(name);
        assert!(shards.is_none_or(|shards| shards.shape == tensor.shape), "{name}");
    }
}

#[test]
fn replicas_are_read_once_and_missing_ranks_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let info = r#"{"w":{"saved_offsets":[2,0],"more":1}}"#;
    write(
        &dir.path().join("shard-00001-model-00001-of-00001.safetensors"),
        &[("w", &[2, 3])],
        Some(r#"{"w":{"saved_offsets":[0,0]}}"#),
    );
    write(&dir.path().join("shard-00003-model-00001-of-00001.safetensors"), &[("w", &[1, 3])], Some(info));
    write(&dir.path().join("shard-00004-model-00001-of-00001.safetensors"), &[("w", &[1, 3])], Some(info));
    let checkpoint = open_files(dir.path(), &Files::anywhere().list(dir.path()).unwrap()).unwrap();
    checkpoint.check_coverage().unwrap();
    assert_eq!(checkpoint.tensors["w"].shape, [3, 3]);
    assert_eq!(checkpoint.world_size, Some(4));
    assert!(
        checkpoint.notes.iter().any(|note| note == "there is no file of rank 1"),
        "{:?}",
        checkpoint.notes
    );
    assert!(checkpoint.notes.iter().any(|note| note.starts_with("1 shards")));
}

#[test]
fn files_without_an_index_join_only_when_all_that_their_names_count_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write(&path("model-00001-of-00002.safetensors"), &[("a", &[2])], None);
    let names = || Files::anywhere().list(dir.path()).unwrap();
    assert!(open_files(dir.path(), &names()).is_ok_and(|one| one.tensors.len() == 1));
    write(&path("model-00002-of-00002.safetensors"), &[("b", &[2])], None);
    assert_eq!(open_files(dir.path(), &names()).unwrap().tensors.len(), 2);
    write(&path("other.safetensors"), &[("c", &[2])], None);
    assert!(open_files(dir.path(), &names()).unwrap_err().to_string().contains("several files"));
    fs::remove_file(path("other.safetensors")).unwrap();
    write(&path("model-00002-of-00002.safetensors"), &[("a", &[2])], None);
    let twice = open_files(dir.path(), &names()).unwrap_err().to_string();
    assert!(twice.contains("it holds tensor `a`, as does "), "{twice}");
}

#[test]
fn offsets_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let infos = [
        "{}",
        "[]",
        r#"{"w":{"saved_offsets":[0]}}"#,
        r#"{"w":{"saved_offsets":[0,-1]}}"#,
        r#"{"w":{"saved_offsets":[18446744073709551615,0]}}"#,
        r#"{"w":{"saved_offsets":[9223372036854775807,9223372036854775807]}}"#,
    ];
    for info in infos {
        write(&path, &[("w", &[2, 3])], Some(info));
        assert!(matches!(open_file(&path), Err(Error::Malformed { .. })), "{info}");
    }
}
