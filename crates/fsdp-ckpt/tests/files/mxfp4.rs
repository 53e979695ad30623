//! Experts in MXFP4, compared with what transformers makes of them.

use std::fs;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::ModelWeights;

use crate::fixture;

const EXPERTS: usize = 3;

/// The name, and the shape `inputs x outputs`, of the weights of each expert.
const WEIGHTS: [(&str, [usize; 2]); 2] = [("gate_up_proj", [32, 128]), ("down_proj", [64, 32])];

#[test]
fn every_element_equals_that_of_transformers() {
    let weights = ModelWeights::open(fixture("mxfp4")).unwrap();
    let expected = ModelReader::open(fixture("mxfp4/expected.safetensors")).unwrap();
    for (name, [inputs, outputs]) in WEIGHTS {
        let mut stack = vec![0.0; EXPERTS * inputs * outputs];
        expected
            .read_rows_f64(&format!("model.layers.0.mlp.experts.{name}"), 0..EXPERTS, &mut stack)
            .unwrap();
        assert!(stack.iter().any(|value| *value < 0.0) && stack.contains(&0.0));
        for (expert, expected) in stack.chunks(inputs * outputs).enumerate() {
            let one = format!("model.layers.0.mlp.experts.{expert}.{name}");
            // Rows that begin and end within blocks and bytes.
            for rows in [0..inputs, 0..1, 3..17, 31..32, inputs - 1..inputs] {
                let mut found = vec![9.0; rows.len() * outputs];
                weights.read_rows_f64(&one, rows.clone(), &mut found).unwrap();
                assert_eq!(found, expected[rows.start * outputs..rows.end * outputs], "{one} {rows:?}");
            }
            let beyond = weights.read_rows_f64(&one, inputs..inputs + 1, &mut vec![0.0; outputs]);
            assert!(beyond.unwrap_err().to_string().contains("do not exist"));
        }
    }
}

#[test]
fn weights_are_listed_one_by_one_as_floats() {
    let weights = ModelWeights::open(fixture("mxfp4")).unwrap();
    assert!(weights.dtypes().iter().all(|dtype| *dtype == TensorType::Bf16));
    assert!(weights.has("model.layers.0.mlp.experts.2.gate_up_proj"));
    assert!(weights.has("model.layers.0.mlp.experts.2.down_proj_bias"));
    assert!(!weights.has("model.layers.0.mlp.experts.3.gate_up_proj"));
    let is_other = |name: &str| !name.contains(".experts.") || name.ends_with("_bias");
    let wanted = |sizes: [[usize; 2]; 2]| {
        let names = WEIGHTS.map(|(name, _)| name).into_iter().zip(sizes);
        let each = (0..EXPERTS).flat_map(move |expert| {
            names
                .clone()
                .map(move |(name, size)| (format!("model.layers.0.mlp.experts.{expert}.{name}"), size))
        });
        weights.check_tensors(each, is_other, |dtype| dtype == TensorType::Bf16)
    };
    wanted(WEIGHTS.map(|(_, size)| size)).unwrap();
    let wrong = wanted([[128, 32], [64, 32]]).unwrap_err().to_string();
    assert!(wrong.contains("`model.layers.0.mlp.experts.0.gate_up_proj`"), "{wrong}");
}

#[test]
fn blocks_without_their_scales_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("mxfp4/config.json"), dir.path().join("config.json")).unwrap();
    let mut bytes = fs::read(fixture("mxfp4/model.safetensors")).unwrap();
    let name = b"gate_up_proj_scales";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(b"gate_up_proj_scaled");
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let error = ModelWeights::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("gate_up_proj_scales` are not experts in MXFP4"), "{error}");
}
