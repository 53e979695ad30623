//! Fixtures `full.safetensors` and `hf_sharded/`: the same model, written by safetensors and huggingface_hub.

use std::fs;

use fsdp_ckpt::{
    export::ExportPlan,
    model_files::ModelReader,
    safetensors::{Metadata, SafetensorsReader, TensorSpec, TensorType},
};
use serde_json::Value;

use crate::fixture;

/// Returns all bytes of a tensor.
fn bytes(model: &ModelReader, name: &str) -> Vec<u8> {
    let entry = model.entry(name).unwrap();
    let mut out = vec![0; entry.len_bytes() as usize];
    model.read_rows(name, 0..entry.row_count(), &mut out).unwrap();
    out
}

#[test]
fn full_file_matches_pytorch_dtypes_and_shapes() {
    let file = SafetensorsReader::open(fixture("full.safetensors")).unwrap();
    let expected: Value = serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap();
    let mut tensor_count = 0;
    for (name, expected) in expected.as_object().unwrap() {
        let Some(dtype) = expected.get("dtype") else { continue };
        let entry = file.entry(name).unwrap();
        let dtype = match dtype.as_str().unwrap() {
            "float32" => TensorType::F32,
            "bfloat16" => TensorType::Bf16,
            "int64" => TensorType::I64,
            "uint8" => TensorType::U8,
            other => panic!("unexpected dtype {other}"),
        };
        let shape = expected["shape"].as_array().unwrap();
        let shape: Vec<usize> = shape.iter().map(|d| d.as_u64().unwrap() as usize).collect();
        assert_eq!((entry.dtype(), entry.shape()), (dtype, shape.as_slice()), "{name}");
        tensor_count += 1;
    }
    assert_eq!(file.names().count(), tensor_count);
    assert_eq!(file.header().metadata().unwrap()["format"], "pt");
}

#[test]
fn sharded_model_equals_full_file() {
    let sharded = ModelReader::open(fixture("hf_sharded")).unwrap();
    let full = ModelReader::open(fixture("full.safetensors")).unwrap();
    assert_eq!(sharded.names().len(), 13);
    assert_eq!(sharded.files().len(), 3);
    for name in sharded.names() {
        let prefixed = format!("model.{name}");
        assert_eq!(sharded.entry(name).unwrap().shape(), full.entry(&prefixed).unwrap().shape());
        assert_eq!(sharded.entry(name).unwrap().dtype(), full.entry(&prefixed).unwrap().dtype());
        assert_eq!(bytes(&sharded, name), bytes(&full, &prefixed), "{name}");
    }
    assert_eq!(full.names().filter(|name| name.starts_with("model.")).count(), 13);
}

#[test]
fn row_reads_match_slices_of_full_tensor() {
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    let mut whole = vec![0.0; 37 * 6];
    model.read_rows_f64("emb.weight", 0..37, &mut whole).unwrap();
    for rows in [0..1, 5..5, 11..30, 36..37, 37..37] {
        let mut part = vec![0.0; rows.len() * 6];
        model.read_rows_f64("emb.weight", rows.clone(), &mut part).unwrap();
        assert_eq!(part, whole[rows.start * 6..rows.end * 6]);
    }
}

#[test]
fn bf16_and_scalars_read_as_floats() {
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    assert_eq!(model.entry("head.weight").unwrap().dtype(), TensorType::Bf16);
    let raw = bytes(&model, "head.weight");
    let single = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    let expected = raw.chunks(2).map(|b| f64::from(single(b)));
    let mut head = vec![0.0; 18];
    model.read_rows_f64("head.weight", 0..3, &mut head).unwrap();
    assert!(head.iter().copied().eq(expected));
    let mut gate = [0.0];
    model.read_rows_f64("gate", 0..1, &mut gate).unwrap();
    assert_eq!((gate[0] as f32).to_le_bytes().as_slice(), bytes(&model, "gate"));
}

#[test]
fn check_tensors_accepts_exact_and_allowed_extra_names() {
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    let expected: Vec<(String, Vec<usize>)> =
        model.names().map(|name| (name.to_owned(), model.entry(name).unwrap().shape().to_owned())).collect();
    model.check_tensors(expected.clone(), |_| false, |_| true).unwrap();
    let fewer = expected.iter().filter(|(name, _)| name != "stats" && name != "steps_seen");
    model.check_tensors(fewer.cloned(), |name| name.starts_with("st"), |_| true).unwrap();
}

#[test]
fn sharded_export_index_matches_huggingface_hub() {
    let index = fs::read(fixture("hf_sharded/model.safetensors.index.json")).unwrap();
    let theirs: Value = serde_json::from_slice(&index).unwrap();
    let model = ModelReader::open(fixture("hf_sharded")).unwrap();
    // The index lists the tensors in state-dict order.
    let tensors = theirs["weight_map"].as_object().unwrap().keys().map(|name| {
        let entry = model.entry(name).unwrap();
        TensorSpec { name: name.clone(), dtype: entry.dtype(), shape: entry.shape().to_owned() }
    });
    let dir = tempfile::tempdir().unwrap();
    let plan = ExportPlan::sharded(dir.path(), tensors.collect(), Metadata::new(), 700).unwrap();
    let export = plan.create().unwrap();
    let mut writer = plan.writer();
    for name in model.names() {
        writer.write_rows(name, 0, &bytes(&model, name)).unwrap();
    }
    export.commit([writer.finish().unwrap()]).unwrap();

    let ours = fs::read(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&ours).unwrap(), theirs);
    let copy = ModelReader::open(dir.path()).unwrap();
    for name in model.names() {
        assert_eq!(bytes(&copy, name), bytes(&model, name), "{name}");
    }
}
