use fsdp_config::FqnPatterns;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::Architecture;
use proptest::prelude::*;

use super::*;

/// A Qwen2 of two layers, with biases and a tied head.
fn spec() -> ModelSpec {
    let config = r#"{"model_type": "qwen2", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true}"#;
    HfConfig::parse(config).unwrap().build().unwrap().description().spec.clone()
}

#[test]
fn usual_groups_have_short_patterns() {
    let spec = spec();
    let of = |is_in: &dyn Fn(&str) -> bool| {
        let found = (0..spec.params.len()).filter(|&index| is_in(&spec.params[index].fqn));
        patterns(&spec, &found.collect())
    };
    assert_eq!(of(&|name| name.contains("norm") || name.contains("bias")), ["norm", "bias"]);
    assert_eq!(of(&|name| name.contains("layers.1.")), [r"layers\.1\."]);
    assert_eq!(of(&|name| name.contains("embed")), ["embed"]);
    assert_eq!(of(&|name| name == "model.norm.weight"), [r"^model\.norm\.weight$"]);
}

proptest! {
    #[test]
    fn patterns_match_their_parameters_and_no_other(wanted in prop::collection::btree_set(0..spec().params.len(), 0..12)) {
        let spec = spec();
        let compiled = FqnPatterns::new(&patterns(&spec, &wanted)).unwrap();
        for index in 0..spec.params.len() {
            let is_matched = names(&spec, index).any(|name| compiled.matches(name));
            prop_assert_eq!(is_matched, wanted.contains(&index), "{}", spec.params[index].fqn);
        }
    }
}
