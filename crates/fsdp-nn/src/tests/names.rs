//! Spellings of configurations and names of tensors, on the golden files.

use std::path::{Path, PathBuf};

use fsdp_core::DType;

use crate::conformance::golden::{CASES, Case};
use crate::conformance::host;
use crate::hf::TensorRole;
use crate::model::Architecture;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn both_spellings_of_a_configuration_are_the_same_model() {
    for name in CASES {
        let new = Case::load(&golden(), name, "config.json", DType::F32);
        let old = Case::load(&golden(), name, "config.transformers-4.json", DType::F32);
        assert_eq!(new.subject.architecture.description(), old.subject.architecture.description());
        assert_eq!(new.run(&host()), old.run(&host()));
    }
}

#[test]
fn published_gpt2_names_are_known() {
    let case = Case::load(&golden(), "gpt2", "config.json", DType::F32);
    let model = &case.subject.architecture;
    let TensorRole::Param(id) = model.tensor_role("h.1.attn.c_attn.weight") else {
        panic!("names without `transformer.` are parameters")
    };
    assert_eq!(case.subject.spec.param(id).fqn, "transformer.h.1.attn.c_attn.weight");
    assert!(matches!(model.tensor_role("lm_head.weight"), TensorRole::Alias(_)));
    assert_eq!(model.tensor_role("h.0.attn.bias"), TensorRole::Constant);
    assert_eq!(model.tensor_role("h.0.attn.c_attn"), TensorRole::Unknown);
}
