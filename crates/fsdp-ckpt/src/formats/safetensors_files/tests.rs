//! Shards of real files join to the expected model; files that do not belong together are refused.

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
fn dcp_fixture_shards_cover_their_tensors() {
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

/// A shard of rows of `w`, which has 3 columns.
fn write_shard(dir: &Path, rank: usize, first_row: usize, rows: usize) {
    let path = dir.join(format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1));
    let info = format!(r#"{{"w":{{"saved_offsets":[{first_row},0],"more":1}}}}"#);
    write(&path, &[("w", &[rows, 3])], Some(&info));
}

fn open_dir(dir: &Path) -> Result<Checkpoint, Error> {
    open_files(dir, &Files::anywhere().list(dir).unwrap())
}

#[test]
fn shards_must_cover_every_tensor_once() {
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..3 {
        write_shard(dir.path(), rank, 2 * rank, 2);
    }
    let whole = open_dir(dir.path()).unwrap();
    whole.check_coverage().unwrap();
    assert_eq!((whole.world_size, &whole.tensors["w"].shape[..]), (Some(3), &[6, 3][..]));
    assert!(whole.limits[0].starts_with("missing files of the last ranks"), "{:?}", whole.limits);

    let shard =
        |rank: usize| dir.path().join(format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1));
    for (from, over) in [(0, 1), (1, 2), (2, 0)] {
        let kept = fs::read(shard(over)).unwrap();
        fs::copy(shard(from), shard(over)).unwrap();
        let copied = open_dir(dir.path()).unwrap_err().to_string();
        assert!(copied.contains("the same piece of tensor `w`"), "{copied}");
        fs::write(shard(over), kept).unwrap();
    }
    for lost in [0, 1] {
        let kept = fs::read(shard(lost)).unwrap();
        fs::remove_file(shard(lost)).unwrap();
        let message = open_dir(dir.path()).unwrap_err().to_string();
        let expected = format!("there is no file of rank {lost}, but there is one of rank 2");
        assert!(message.contains(&expected), "{message}");
        fs::write(shard(lost), kept).unwrap();
    }
    // Overlaps and gaps are found when elements are counted.
    write_shard(dir.path(), 1, 1, 2);
    open_dir(dir.path()).unwrap().check_coverage().unwrap_err();
    write_shard(dir.path(), 1, 3, 1);
    open_dir(dir.path()).unwrap().check_coverage().unwrap_err();
}

#[test]
fn unindexed_files_join_only_if_numbered_as_one_set() {
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
fn invalid_saved_offsets_are_rejected() {
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
