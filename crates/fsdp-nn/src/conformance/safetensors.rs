//! An independent safetensors reader: sufficient for golden files, without checks.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// Returns the tensors of a file as `f64`.
pub(crate) fn read(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, entry): (&String, &Value)| {
        let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        (name.clone(), floats(entry["dtype"].as_str().unwrap(), &data[offset(0)..offset(1)]))
    };
    entries.map(tensor).collect()
}

fn floats(dtype: &str, bytes: &[u8]) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.chunks_exact(N).map(|chunk| read(chunk.try_into().unwrap())).collect()
    }
    match dtype {
        "F32" => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
        "F64" => each(bytes, f64::from_le_bytes),
        "I64" => each(bytes, |b| i64::from_le_bytes(b) as f64),
        other => panic!("golden files have no tensors of {other}"),
    }
}
