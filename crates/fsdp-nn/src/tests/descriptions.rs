//! Tests of model descriptions: names, classes, blocks and initialization.

use fsdp_core::Error;
use fsdp_core::model::ModelSpec;
use fsdp_core::wrap::{WrapPolicy, units};

use super::harness::{gpt2, hf_models, llama, small};
use crate::init::Init;
use crate::model::{Architecture, Decoder, DecoderConfig, Gpt2, Mlp, MlpConfig};

fn unit_names(spec: &ModelSpec, class: &str) -> Vec<String> {
    let units = units(spec, &WrapPolicy::Classes(vec![class.into()])).unwrap();
    units.into_iter().map(|unit| unit.name).collect()
}

#[test]
fn modules_wrap_by_transformers_class_names() {
    let [llama, gpt2] = hf_models();
    let spec = &llama.description().spec;
    assert_eq!(unit_names(spec, "LlamaDecoderLayer"), ["(root)", "model.layers.0", "model.layers.1"]);
    assert_eq!(unit_names(spec, "LlamaMLP"), ["(root)", "model.layers.0.mlp", "model.layers.1.mlp"]);
    let spec = &gpt2.description().spec;
    assert_eq!(unit_names(spec, "GPT2Block"), ["(root)", "transformer.h.0", "transformer.h.1"]);
    assert_eq!(unit_names(spec, "GPT2Attention").len(), 3);
    assert_eq!(unit_names(spec, "Conv1D").len(), 9);
}

#[test]
fn splitting_tied_embedding_from_head_is_rejected() {
    for model in hf_models() {
        let policy = WrapPolicy::Classes(vec!["Embedding".into()]);
        let error = units(&model.description().spec, &policy).unwrap_err();
        assert!(matches!(error, Error::TiedAcrossUnits { alias, .. } if alias == "lm_head.weight"));
    }
    let untied = Decoder::new(&DecoderConfig { tie_word_embeddings: false, ..llama() }).unwrap();
    assert_eq!(unit_names(&untied.description().spec, "Embedding"), ["(root)", "model.embed_tokens"]);
}

#[test]
fn every_parameter_is_read_by_a_block() {
    let specs = hf_models().map(|model| model.description().spec.clone());
    for spec in specs.iter().chain([&small().description().spec]) {
        for (index, param) in spec.params.iter().enumerate() {
            let mut readers = spec.blocks.iter().filter(|block| block.params.iter().any(|id| id.0 == index));
            assert!(readers.next().is_some(), "{}", param.fqn);
        }
    }
}

#[test]
fn gpt2_initialization_matches_transformers() {
    let model = Gpt2::new(&gpt2()).unwrap();
    let description = model.description();
    for (param, init) in description.spec.params.iter().zip(&description.init) {
        let expected = match param.fqn.rsplit_once('.').unwrap() {
            (_, "bias") => Init::Zeros,
            (module, _) if module.contains("ln_") => Init::Ones,
            (module, _) if module.ends_with("c_proj") => Init::Normal { std: 0.3 / 2.0 },
            _ => Init::Normal { std: 0.3 },
        };
        assert_eq!(*init, expected, "{}", param.fqn);
    }
}

#[test]
fn impossible_mlp_sizes_are_rejected() {
    let mlp = |widths: &[usize], tied| {
        Mlp::new(&MlpConfig { vocab: 5, widths: widths.to_vec(), bias: false, tied, std: 1.0 })
    };
    assert!(mlp(&[], false).is_err());
    assert!(mlp(&[2, 3], true).is_err());
    assert!(mlp(&[2, 0], false).is_err());
    assert!(mlp(&[1], true).is_ok());
}
