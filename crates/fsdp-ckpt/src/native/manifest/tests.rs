//! Manifests survive a round trip, and inconsistent ones are refused with the name of the problem.

use serde_json::{Value as Json, json};

use super::*;
use crate::checkpoint::Value;

/// A manifest of two files: rows 0..3 and 3..5 of `w`, and a 0-d `step`.
fn text() -> Json {
    json!({
        "format": "fsdp native checkpoint", "version": 1, "world_size": 2,
        "tensors": {
            "w": {"dtype": "F32", "shape": [5, 2], "role": "model"},
            "step": {"dtype": "I64", "shape": [], "role": "optimizer", "path": ["optim", 0, "step"]},
        },
        "files": [
            {"name": "a.safetensors", "len": 200, "data_start": 160, "header": "00000000000000ff", "shards": {
                "w": {"rows": [0, 3], "chunk_rows": 2, "chunks": ["0000000000000001", "0000000000000002"]},
                "step": {"rows": [0, 1], "chunk_rows": 1, "chunks": ["0000000000000003"]},
            }},
            {"name": "b.safetensors", "len": 100, "data_start": 84, "header": "0123456789abcdef", "shards": {
                "w": {"rows": [3, 5], "chunk_rows": 2, "chunks": ["0000000000000004"]},
            }},
        ],
        "values": {"v": {"path": ["v"], "role": "other", "value": [1, null]}},
        "run_state": {"step": 7},
    })
}

fn parse(text: &Json) -> Result<Manifest, Fault> {
    Manifest::parse(seal::seal(text))
}

/// Returns the error for a modified manifest.
fn refused(change: impl FnOnce(&mut Json)) -> String {
    let mut text = text();
    change(&mut text);
    parse(&text).unwrap_err().to_string()
}

#[test]
fn manifest_round_trips() {
    let manifest = parse(&text()).unwrap();
    assert_eq!(manifest.tensors["w"].path, [Key::Name("w".to_owned())]);
    assert_eq!(manifest.tensors["step"].path[1], Key::Index(0));
    assert_eq!(manifest.tensors["step"].role, Role::Optimizer);
    assert_eq!(manifest.files[0].shards[0].chunk(1), 2..3);
    assert_eq!(manifest.files[1].header.value, 0x0123_4567_89ab_cdef);
    assert_eq!(manifest.values["v"].value, Value::List(vec![Value::Int(1), Value::None]));
    let again = Manifest::parse(manifest.to_bytes().unwrap()).unwrap();
    assert_eq!(again, manifest);
}

#[test]
fn rejects_unknown_formats_and_newer_versions() {
    let fault = refused(|text| text["version"] = json!(2));
    assert_eq!(fault, "it has format version 2, but this program reads version 1; use a newer fsdp");
    // A later version may have any fields.
    let later = refused(|text| (text["version"], text["new"]) = (json!(3), json!(1)));
    assert!(later.contains("use a newer fsdp"), "{later}");
    let other = refused(|text| text["format"] = json!("x"));
    assert_eq!(other, "its format is `x`, not `fsdp native checkpoint`");
}

#[test]
fn rejects_world_size_that_differs_from_file_count() {
    for world_size in [0, 1, 3, usize::MAX] {
        let fault = refused(|text| text["world_size"] = json!(world_size));
        assert!(
            fault.starts_with(&format!("it says that {world_size} ranks saved it, but lists 2 files")),
            "{fault}"
        );
    }
    let nothing = refused(|text| {
        (text["world_size"], text["files"], text["tensors"]) = (json!(0), json!([]), json!({}));
    });
    assert!(nothing.starts_with("it says that 0 ranks saved it, but lists 0 files"), "{nothing}");
}

#[test]
fn rejects_unknown_missing_invalid_and_repeated_fields() {
    let malformed = |change: fn(&mut Json)| {
        let fault = refused(change);
        assert!(fault.starts_with("its text cannot be read: "), "{fault}");
    };
    malformed(|text| text["extra"] = json!(1));
    malformed(|text| text["tensors"]["w"]["stride"] = json!([2, 1]));
    malformed(|text| text["files"][0]["shards"]["w"]["offset"] = json!(0));
    malformed(|text| drop(text.as_object_mut().unwrap().remove("run_state")));
    malformed(|text| text["tensors"]["w"]["shape"] = json!([-1]));
    malformed(|text| text["tensors"]["w"]["shape"] = json!([1e30]));
    malformed(|text| text["files"][0]["header"] = json!("00000000000000FF"));
    malformed(|text| text["files"][0]["header"] = json!("ff"));
    malformed(|text| text["tensors"]["w"]["role"] = json!("Model"));
    let repeated = text().to_string().replacen("\"values\":{", "\"values\":{},\"values\":{", 1);
    let body = repeated.strip_suffix('}').unwrap();
    let digest = DigestKind::Crc64.of(body.as_bytes());
    let sealed = format!("{body},\"digest\":\"{digest}\"}}\n");
    let fault = Manifest::parse(sealed.into_bytes()).unwrap_err().to_string();
    assert!(fault.starts_with("its text cannot be read: "), "{fault}");
}

#[test]
fn rejects_rows_not_in_exactly_one_file() {
    let fault = refused(|text| text["files"][1]["shards"] = json!({}));
    assert_eq!(fault, "rows 3..5 of tensor `w` are in no file");
    let fault = refused(|text| text["files"][1]["shards"]["w"]["rows"] = json!([4, 5]));
    assert_eq!(fault, "rows 3..4 of tensor `w` are in no file");
    let fault = refused(|text| text["files"][1]["shards"]["w"]["rows"] = json!([2, 4]));
    assert_eq!(fault, "rows 2..3 of tensor `w` are in both `a.safetensors` and `b.safetensors`");
    for rows in [[4, 6], [5, 4]] {
        let fault = refused(|text| text["files"][1]["shards"]["w"]["rows"] = json!(rows));
        assert!(fault.ends_with("of tensor `w`, which has 5"), "{fault}");
    }
    let fault = refused(|text| text["tensors"]["x"] = text["tensors"]["w"].clone());
    assert_eq!(fault, "rows 0..5 of tensor `x` are in no file");
    let fault = refused(|text| drop(text["tensors"].as_object_mut().unwrap().remove("step")));
    assert!(fault.ends_with("holds rows of tensor `step`, which the manifest does not describe"), "{fault}");
}

#[test]
fn rejects_wrong_checksum_counts() {
    let fault = refused(|text| text["files"][0]["shards"]["w"]["chunk_rows"] = json!(1));
    assert!(fault.contains("has 2 checksums for rows 0..3 of tensor `w`, not 3, with"), "{fault}");
    let fault = refused(|text| text["files"][0]["shards"]["w"]["chunk_rows"] = json!(0));
    assert!(fault.contains("has 2 checksums for rows 0..3 of tensor `w`, not 0, with"), "{fault}");
}

#[test]
fn rejects_invalid_or_repeated_file_names() {
    for name in ["../a.safetensors", "/a.safetensors", "a\\b.safetensors", "a.bin", "b.safetensors"] {
        let fault = refused(|text| text["files"][0]["name"] = json!(name));
        assert!(fault.contains("is not a plain name ending in .safetensors"), "{name}: {fault}");
    }
}

#[test]
fn rejects_impossible_tensors_and_values() {
    let fault = refused(|text| text["tensors"]["w"]["dtype"] = json!("F31"));
    assert_eq!(fault, "tensor `w` has the unknown dtype `F31`");
    for shape in [json!([2, u64::MAX]), json!([u64::MAX / 2, 4]), json!([2, u64::MAX, 2])] {
        let fault = refused(|text| text["tensors"]["w"]["shape"] = shape);
        assert!(fault.ends_with("has more bytes than can be counted"), "{fault}");
    }
    let fault = refused(|text| text["values"]["v"]["value"] = json!({"what": 1}));
    assert_eq!(fault, "value `v` cannot be stored in a manifest");
}
