//! Tests spellings of configurations and names of tensors, on the golden files.

use std::path::{Path, PathBuf};

use fsdp_core::DType;

use crate::conformance::golden::{CASES, Case};
use crate::conformance::host;
use crate::hf::{FAMILIES, HfConfig, base_name, is_constant};
use crate::model::Architecture;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn old_and_new_config_spellings_give_same_model() {
    for name in CASES {
        let new = Case::load(&golden(), name, "config.json", DType::F32);
        let old = Case::load(&golden(), name, "config.transformers-4.json", DType::F32);
        assert_eq!(new.subject.architecture.description(), old.subject.architecture.description());
        assert_eq!(new.run(&host()), old.run(&host()));
    }
}

#[test]
fn base_names_and_old_constants_are_recognized() {
    assert_eq!(base_name("transformer.h.1.attn.c_attn.weight"), Some("h.1.attn.c_attn.weight"));
    assert_eq!(base_name("model.norm.weight"), Some("norm.weight"));
    assert_eq!(base_name("gpt_neox.embed_in.weight"), Some("embed_in.weight"));
    assert_eq!(base_name("lm_head.weight"), None);
    assert!(is_constant("h.0.attn.bias"));
    assert!(is_constant("model.layers.0.self_attn.rotary_emb.inv_freq"));
    assert!(!is_constant("h.0.attn.c_attn.bias"));
}

#[test]
fn family_names_are_unique_and_sorted() {
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
    assert!(names.is_sorted_by(|one, other| one < other), "{names:?}");
}

/// Optimizer states of other trainers identify parameters by their number.
#[test]
fn parameter_order_matches_transformers() {
    let mut compared = 0;
    for folder in std::fs::read_dir(golden().join("families")).unwrap() {
        let folder = folder.unwrap().path();
        let read = |file| std::fs::read_to_string(folder.join(file)).unwrap();
        let model = HfConfig::parse(&read("config.json")).unwrap().build().unwrap();
        let params = model.description().spec.params.clone();
        let trained = params.into_iter().filter(|param| param.trainable);
        let names: Vec<String> = trained.map(|param| param.fqn).collect();
        assert_eq!(names, read("parameters.txt").lines().collect::<Vec<_>>(), "{}", folder.display());
        compared += 1;
    }
    assert!(compared > 30, "{compared}");
}
