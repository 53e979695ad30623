//! Each test damages one thing and expects the error that names it.

use std::{fs, path::Path};

use fsdp_ckpt::{
    Error, FileAction, HeaderFault, NameDifferences,
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
fn rejects_every_truncation_of_a_real_file() {
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
    assert!(matches!(error, Error::Malformed { fault: HeaderFault::UncoveredTail { .. }, .. }));
}

#[test]
fn messages_name_file_tensor_and_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    write_raw(&path, ONE, &[0; 7]);
    let text = SafetensorsReader::open(&path).unwrap_err().to_string();
    for part in ["m.safetensors", "`a`", "byte 8", "only 7", "export the file again"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn rejects_a_file_that_is_missing_or_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let error = SafetensorsReader::open(dir.path().join("none")).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Open, .. }));
    let error = SafetensorsReader::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Io { action: FileAction::Open, .. }));
}

#[test]
fn a_file_cut_after_opening_is_an_error_of_the_read() {
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
fn rejects_requests_outside_a_tensor() {
    let file = SafetensorsReader::open(fixture("full.safetensors")).unwrap();
    let mut out = [0; 24];
    let unknown = file.read_rows("nope", 0..1, &mut out).unwrap_err();
    assert!(matches!(unknown, Error::UnknownTensor { .. }));
    let rows = file.read_rows("model.emb.weight", 37..38, &mut out).unwrap_err();
    assert!(matches!(rows, Error::RowsOutsideTensor { row_count: 37, .. }));
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is tested")]
    let reversed = file.read_rows("model.emb.weight", 5..4, &mut []).unwrap_err();
    assert!(matches!(reversed, Error::RowsOutsideTensor { .. }));
    let length = file.read_rows("model.emb.weight", 0..2, &mut out).unwrap_err();
    assert!(matches!(length, Error::BufferLength { expected: 48, got: 24, .. }));
    let bytes = file.read_at("model.emb.weight", 880, &mut out).unwrap_err();
    assert!(matches!(bytes, Error::BytesOutsideTensor { len_bytes: 888, .. }));
    let bytes = file.read_at("model.emb.weight", u64::MAX, &mut out).unwrap_err();
    assert!(matches!(bytes, Error::BytesOutsideTensor { .. }));
}

#[test]
fn rejects_integers_as_floats_and_values_that_do_not_fit() {
    let model = ModelReader::open(fixture("full.safetensors")).unwrap();
    let error = model.read_rows_f32("model.stats", 0..2, &mut [0.0; 6]).unwrap_err();
    assert!(matches!(error, Error::NotConvertible { .. }), "{error}");
    let error = model.read_rows_f64("model.emb.weight", 0..2, &mut [0.0; 6]).unwrap_err();
    assert!(matches!(error, Error::BufferLength { unit: "elements", expected: 12, got: 6, .. }));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let header = r#"{"w":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}}"#;
    write_raw(&path, header, &[1.5_f64, -1e300, 2.0].map(f64::to_le_bytes).concat());
    let model = ModelReader::open(&path).unwrap();
    let error = model.read_rows_f32("w", 1..3, &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, Error::ValueOutOfRange { element: 1, .. }), "{error}");
    let mut first = [0.0];
    model.read_rows_f32("w", 0..1, &mut first).unwrap();
    assert_eq!(first, [1.5]);
}

#[test]
fn rejects_a_directory_without_model() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    fs::write(dir.path().join("notes.txt"), b"").unwrap();
    let error = open_error(dir.path());
    assert!(matches!(&error, Error::NoModel { found, .. } if found == &["pytorch_model.bin"]), "{error}");
}

#[test]
fn rejects_a_single_file_beside_an_index() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    assert_eq!(ModelReader::open(dir.path()).unwrap().names().len(), 2);
    write_raw(&dir.path().join(SINGLE_FILE), ONE, &[0; 8]);
    assert!(matches!(open_error(dir.path()), Error::TwoModels { .. }));
    // The way out: name the file.
    assert_eq!(ModelReader::open(dir.path().join(INDEX_FILE)).unwrap().names().len(), 2);
    assert_eq!(ModelReader::open(dir.path().join(SINGLE_FILE)).unwrap().names().len(), 1);
}

#[test]
fn rejects_an_index_that_is_not_one() {
    for weight_map in ["[]", r#"{"a":1}"#, r#"{"a":"one.safetensors","a":"two.safetensors"}"#] {
        let dir = sharded(weight_map);
        assert!(matches!(open_error(dir.path()), Error::MalformedIndex { .. }), "{weight_map}");
    }
    let dir = sharded("{}");
    fs::write(dir.path().join(INDEX_FILE), "{\"metadata\":{}}").unwrap();
    assert!(matches!(open_error(dir.path()), Error::MalformedIndex { .. }));
}

#[test]
fn rejects_an_index_that_leaves_its_directory() {
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
        assert!(matches!(error, Error::IndexEscapesDirectory { .. }), "{file}: {error}");
    }
}

#[test]
fn rejects_a_missing_file() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"three.safetensors","c":"three.safetensors"}"#);
    let error = open_error(dir.path());
    let Error::MissingFile { file, tensor, tensor_count, .. } = &error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), *tensor_count), ("b", 2));
    assert!(file.ends_with("three.safetensors"));
}

#[test]
fn rejects_a_tensor_that_is_not_in_its_file() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}"#);
    assert!(matches!(open_error(dir.path()), Error::NotInFile { tensor, .. } if tensor == "c"));
    let dir = sharded(r#"{"a":"two.safetensors","b":"one.safetensors"}"#);
    assert!(matches!(open_error(dir.path()), Error::NotInFile { tensor, .. } if tensor == "a"));
}

#[test]
fn rejects_a_tensor_that_is_not_in_the_index() {
    let two = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "z":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    let dir = sharded(r#"{"a":"one.safetensors"}"#);
    write_raw(&dir.path().join("one.safetensors"), two, &[0; 2]);
    assert!(matches!(open_error(dir.path()), Error::NotInIndex { tensor, .. } if tensor == "z"));
}

#[test]
fn rejects_a_tensor_in_two_files() {
    let dir = sharded(r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    let both = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    write_raw(&dir.path().join("two.safetensors"), both, &[0; 2]);
    assert!(matches!(open_error(dir.path()), Error::InTwoFiles { tensor, .. } if tensor == "a"));
}

#[test]
fn reports_all_differences_of_names_and_shapes_at_once() {
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    let expected = [("emb.weight", vec![37, 7]), ("nope", vec![]), ("gate", vec![]), ("nada", vec![2])];
    let error = model.check_tensors(expected, |_| false, |_| true).unwrap_err();
    let text = error.to_string();
    let Error::NamesDiffer { differences, .. } = error else { panic!("{text}") };
    let NameDifferences { missing, extra, wrong_shape, .. } = *differences;
    assert_eq!(missing, ["nope", "nada"]);
    assert_eq!(extra.len(), 11);
    assert_eq!(wrong_shape.len(), 1);
    assert!(text.contains("2 missing: `nope`, `nada`; 11 not expected: "), "{text}");
    assert!(text.contains("`emb.weight` (expected [37, 7], got [37, 6])"), "{text}");
}

#[test]
fn reports_tensors_that_are_no_floats_with_the_other_differences() {
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
