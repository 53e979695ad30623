//! Weights in 4 bits, compared with what bitsandbytes decodes them to.

use std::fs;
use std::path::Path;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;

use crate::fixture;

const WEIGHTS: [&str; 5] = ["nested", "single", "fp4", "large", "packed"];
const COLUMNS: usize = 384;
/// Rows of a weight, and the first of them whose elements the fixture has.
const ROWS: usize = 60;
const FIRST: usize = 50;

#[test]
fn every_element_equals_that_of_bitsandbytes() {
    let weights = ModelWeights::open(fixture("bitsandbytes/model.safetensors")).unwrap();
    let reader = ModelReader::open(fixture("bitsandbytes/expected.safetensors")).unwrap();
    for name in WEIGHTS {
        let mut expected = vec![0.0; (ROWS - FIRST) * COLUMNS];
        reader.read_rows_f64(name, 0..ROWS - FIRST, &mut expected).unwrap();
        let weight = format!("{name}.weight");
        for rows in [FIRST..ROWS, FIRST + 1..FIRST + 2, FIRST + 3..ROWS, ROWS..ROWS] {
            let mut found = vec![9.0; rows.len() * COLUMNS];
            weights.read_rows_f64(&weight, rows.clone(), &mut found).unwrap();
            let of_rows = (rows.start - FIRST) * COLUMNS..(rows.end - FIRST) * COLUMNS;
            assert_eq!(found, expected[of_rows], "{name} {rows:?}");
        }
        let beyond = weights.read_rows_f64(&weight, ROWS..ROWS + 1, &mut [0.0; COLUMNS]).unwrap_err();
        assert!(beyond.to_string().contains("do not exist"), "{beyond}");
    }
}

#[test]
fn weights_are_listed_without_their_parts() {
    let weights = ModelWeights::open(fixture("bitsandbytes/model.safetensors")).unwrap();
    assert!(weights.has("nested.weight") && weights.has("norm.weight"));
    let wanted = |size: [usize; 2]| {
        let names = WEIGHTS.map(|name| (format!("{name}.weight"), size));
        weights.check_tensors(names, |name| name == "norm.weight", |_| true)
    };
    wanted([ROWS, COLUMNS]).unwrap();
    let wrong = wanted([COLUMNS, ROWS]).unwrap_err().to_string();
    assert!(wrong.contains("`fp4.weight`") && wrong.contains("[60, 384]"), "{wrong}");
    assert!(weights.dtypes().contains(&TensorType::F32));
}

/// Opens the fixture after some of its bytes were replaced.
fn open_with(changes: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(fixture("bitsandbytes/model.safetensors")).unwrap();
    for (given, other) in changes {
        assert_eq!(given.len(), other.len());
        let at = bytes.windows(given.len()).position(|window| window == given.as_bytes()).unwrap();
        bytes[at..at + given.len()].copy_from_slice(other.as_bytes());
    }
    let path: &Path = &dir.path().join("model.safetensors");
    fs::write(path, bytes).unwrap();
    ModelWeights::open(path).unwrap_err().to_string()
}

#[test]
fn damaged_parts_are_refused_by_name() {
    let error = open_with(&[("single.weight.absmax", "single.weight.absmin")]);
    assert!(error.contains("single.weight.absmax"), "{error}");
    let error = open_with(&[("\"blocksize\": 128", "\"blocksize\": 256")]);
    assert!(error.contains("`large.weight` in 4 bits has `absmax`") && error.contains("[90]"), "{error}");
    let error = open_with(&[("\"blocksize\": 128", "\"blocksize\": 000")]);
    assert!(error.contains("does not describe a matrix"), "{error}");
    let error = open_with(&[("\"shape\": [60, 384]", "\"shape\": [69, 384]")]);
    assert!(error.contains("elements have"), "{error}");
    let error = open_with(&[("\"shape\": [60, 384]", "\"shape\": [60, \"a\"]")]);
    assert!(error.contains("does not describe a matrix"), "{error}");
}
