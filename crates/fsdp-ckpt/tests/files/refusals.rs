//! Each test damages one thing and expects the error that names it.

use std::{fs, path::Path};

use fsdp_ckpt::{
    Error, FileAction,
    model_files::{INDEX_FILE, ModelReader, SINGLE_FILE},
    safetensors::SafetensorsReader,
};
use tempfile::TempDir;

use crate::{fixture, write_raw};

const ONE: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
const OTHER: &str = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

/// A directory with two files and the given index.
fn sharded(weight_map: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_raw(&dir.path().join("one.safetensors"), ONE, &[0; 8]);
    write_raw(&dir.path().join("two.safetensors"), OTHER, &[0; 8]);
    let index = format!("{{\"metadata\":{{\"total_size\":16}},\"weight_map\":{weight_map}}}");
    fs::write(dir.path().join(INDEX_FILE), index).unwrap();
    dir
}

fn open_error(path: &Path) -> Error {
    ModelReader::open(path).expect_err("the model is refused")
}

#[test]
fn rejects_every_truncation_and_trailing_byte() {
    let whole = fs::read(fixture("hf_sharded/model-00002-of-00003.safetensors")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.safetensors");
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let error = SafetensorsReader::open(&path).expect_err("the file is truncated");
        assert!(matches!(error, Error::Malformed { .. }), "{len}: {error}");
    }
    fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    let error = SafetensorsReader::open(&path).unwrap_err();
    assert!(error.to_string().contains("its tensors end at data byte"), "{error}");
}

#[test]
fn error_names_file_tensor_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    write_raw(&path, ONE, &[0; 7]);
    let text = SafetensorsReader::open(&path).unwrap_err().to_string();
    for part in ["m.safetensors", "`a`", "byte 8", "only 7", "export the file again"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn rejects_missing_file_and_directory() {
    let dir = tempfile::tempdir().unwrap();
    let error = SafetensorsReader::open(dir.path().join("none")).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Open, .. }));
    let error = SafetensorsReader::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Open, .. }));
}

#[test]
fn reading_file_truncated_after_open_fails() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    write_raw(&path, ONE, &[0; 8]);
    let file = SafetensorsReader::open(&path).unwrap();
    write_raw(&path, ONE, &[0; 4]);
    let error = file.read_rows("a", 0..2, &mut [0; 8]).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Read, .. }));
    assert!(error.to_string().contains("became shorter"), "{error}");
}

#[test]
fn rejects_unknown_tensor_and_out_of_range_reads() {
    let file = SafetensorsReader::open(fixture("full.safetensors")).unwrap();
    let mut out = [0; 24];
    let unknown = file.read_rows("nope", 0..1, &mut out).unwrap_err();
    assert!(matches!(unknown, Error::BadRequest { .. }));
    let rows = file.read_rows("model.emb.weight", 37..38, &mut out).unwrap_err();
    let refused = |error: Error, part: &str| match error {
        Error::BadRequest { reason, .. } => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other}"),
    };
    refused(rows, "rows 37..38 of tensor `model.emb.weight` do not exist: it has 37 rows");
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is tested")]
    let reversed = file.read_rows("model.emb.weight", 5..4, &mut []).unwrap_err();
    refused(reversed, "rows 5..4");
    let length = file.read_rows("model.emb.weight", 0..2, &mut out).unwrap_err();
    refused(length, "48 bytes were expected for rows of tensor `model.emb.weight`, the buffer has 24");
    let bytes = file.read_at("model.emb.weight", 880, &mut out).unwrap_err();
    refused(bytes, "bytes 880..904 of tensor `model.emb.weight` do not exist: it has 888 bytes");
    let bytes = file.read_at("model.emb.weight", u64::MAX, &mut out).unwrap_err();
    refused(bytes, "do not exist");
}

#[test]
fn rejects_integers_as_floats() {
    let model = ModelReader::open(fixture("full.safetensors")).unwrap();
    let error = model.read_rows_f64("model.stats", 0..2, &mut [0.0; 6]).unwrap_err();
    assert!(error.to_string().contains("only F64, F32, BF16 and F16 convert"), "{error}");
    let error = model.read_rows_f64("model.emb.weight", 0..2, &mut [0.0; 6]).unwrap_err();
    assert!(error.to_string().contains("12 elements were expected"), "{error}");
    assert!(error.to_string().contains("the buffer has 6"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let header = r#"{"w":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}}"#;
    write_raw(&path, header, &[1.5_f64, -1e300, 2.0].map(f64::to_le_bytes).concat());
    let model = ModelReader::open(&path).unwrap();
    let mut read = [0.0; 2];
    model.read_rows_f64("w", 0..2, &mut read).unwrap();
    assert_eq!(read, [1.5, -1e300]);
}

#[test]
fn rejects_directory_without_model() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    fs::write(dir.path().join("notes.txt"), b"").unwrap();
    let error = open_error(dir.path());
    let is_named = |reason: &str| {
        reason.contains("neither model.safetensors") && reason.contains("(it holds pytorch_model.bin)")
    };
    assert!(matches!(&error, Error::WrongPath { reason, .. } if is_named(reason)), "{error}");
}

#[test]
fn rejects_single_file_next_to_index() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    assert_eq!(ModelReader::open(dir.path()).unwrap().names().len(), 2);
    write_raw(&dir.path().join(SINGLE_FILE), ONE, &[0; 8]);
    let error = open_error(dir.path());
    assert!(matches!(&error, Error::WrongPath { reason, .. } if reason.contains("ambiguous")), "{error}");
    // The remedy: name the file.
    assert_eq!(ModelReader::open(dir.path().join(INDEX_FILE)).unwrap().names().len(), 2);
    assert_eq!(ModelReader::open(dir.path().join(SINGLE_FILE)).unwrap().names().len(), 1);
}

#[test]
fn rejects_malformed_index() {
    for weight_map in ["[]", r#"{"a":1}"#, r#"{"a":"one.safetensors","a":"two.safetensors"}"#] {
        let dir = sharded(weight_map);
        let error = open_error(dir.path()).to_string();
        assert!(error.contains("not a valid model index"), "{weight_map}: {error}");
    }
    let dir = sharded("{}");
    fs::write(dir.path().join(INDEX_FILE), "{\"metadata\":{}}").unwrap();
    assert!(open_error(dir.path()).to_string().contains("not a valid model index"));
}

#[test]
fn rejects_index_entry_that_is_not_plain_file_name() {
    for file in [
        "../one.safetensors",
        "/etc/passwd",
        "sub/one.safetensors",
        "one.safetensors/",
        ".",
        "..",
        "",
        "a\\\\b",
    ] {
        let dir = sharded(&format!("{{\"a\":\"{file}\"}}"));
        let error = open_error(dir.path());
        assert!(error.to_string().contains("which is not a plain file name"), "{file}: {error}");
    }
}

#[test]
fn rejects_missing_shard_file() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"three.safetensors","c":"three.safetensors"}"#);
    let error = open_error(dir.path());
    let Error::Malformed { path, reason, .. } = &error else { panic!("{error}") };
    assert!(path.ends_with("three.safetensors"));
    assert!(
        reason.starts_with("it is missing: ") && reason.contains("2 tensors in it (`b`, ..)"),
        "{reason}"
    );
}

#[test]
fn rejects_tensor_missing_from_its_file() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}"#);
    let says = |error: Error, what: &str| assert!(error.to_string().contains(what), "{error}");
    says(open_error(dir.path()), "it places tensor `c` in ");
    let dir = sharded(r#"{"a":"two.safetensors","b":"one.safetensors"}"#);
    says(open_error(dir.path()), "it places tensor `a` in ");
}

#[test]
fn rejects_tensor_missing_from_index() {
    let two = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "z":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    let dir = sharded(r#"{"a":"one.safetensors"}"#);
    write_raw(&dir.path().join("one.safetensors"), two, &[0; 2]);
    let error = open_error(dir.path()).to_string();
    assert!(error.contains("one.safetensors: it holds tensor `z`, which "), "{error}");
}

#[test]
fn rejects_tensor_in_two_files() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    let both = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    write_raw(&dir.path().join("two.safetensors"), both, &[0; 2]);
    let error = open_error(dir.path()).to_string();
    assert!(error.contains("two.safetensors: it holds tensor `a`, as does "), "{error}");
}

#[test]
fn reports_all_name_and_shape_differences_at_once() {
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    let expected = [("emb.weight", vec![37, 7]), ("nope", vec![]), ("gate", vec![]), ("nada", vec![2])];
    let error = model.check_tensors(expected, |_| false, |_| true).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::NamesDiffer { .. }), "{text}");
    assert!(text.contains("2 missing: `nope`, `nada`; 11 not expected: "), "{text}");
    let shape = "; 1 of the wrong shape: `emb.weight` (expected [37, 7], got [37, 6]); ";
    assert!(text.contains(shape), "{text}");
}

#[test]
fn reports_non_float_tensors_with_other_differences() {
    let dir = tempfile::tempdir().unwrap();
    let header = r#"{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},
        "b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    write_raw(&dir.path().join("model.safetensors"), header, &[0; 8]);
    let model = ModelReader::open(dir.path()).unwrap();
    model.check_tensors([("a", [1]), ("b", [1])], |_| false, |_| true).unwrap();
    let error = model
        .check_tensors(
            [("a", [1]), ("b", [2])],
            |_| false,
            fsdp_ckpt::safetensors::TensorType::is_convertible,
        )
        .unwrap_err()
        .to_string();
    assert!(error.contains("1 of the wrong shape: `b`"), "{error}");
    assert!(error.contains("1 of a type that is not F64, F32, BF16 or F16: `a` (I32)"), "{error}");
}
