//! Tests of families with linear attention.

use super::*;
use crate::model::{DeltaNet, Mixture, NormKind, QkNorm, SharedExpert};

const ALL: [Parse; 3] = [qwen3_next::parse, qwen3_5_text::parse, qwen3_5_moe_text::parse];

/// Parses with heads of a size whose fourth part rotates, and what mixtures need.
fn of(parse: Parse, more: &Value) -> Result<DecoderConfig, ConfigError> {
    let mut keys = json!({"head_dim": 16, "moe_intermediate_size": 24});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parsed(parse, &keys)
}

fn is_linear(parse: Parse, more: &Value) -> Vec<bool> {
    of(parse, more).unwrap().layers.iter().map(|layer| layer.delta.is_some()).collect()
}

#[test]
fn linear_layers_match_transformers() {
    for parse in ALL {
        assert_eq!(is_linear(parse, &json!({})), [true, true, true, false]);
        assert_eq!(is_linear(parse, &json!({"full_attention_interval": 2})), [true, false, true, false]);
        let types = ["full_attention", "linear_attention", "full_attention", "full_attention"];
        let named = json!({"layer_types": types, "full_attention_interval": 2});
        assert_eq!(is_linear(parse, &named), [false, true, false, false]);
    }
}

#[test]
fn sizes_and_kinds_default_to_those_of_transformers() {
    for (parse, by_head) in ALL.into_iter().zip([true, false, false]) {
        let config = of(parse, &json!({})).unwrap();
        let net =
            DeltaNet { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, kernel: 4, by_head };
        assert_eq!(config.layers[0].delta, Some(net));
        assert_eq!((config.qk_norm, config.norm), (Some(QkNorm::Heads), NormKind::CentredRms));
        assert!(config.attention_gate && !config.qkv_bias && !config.output_bias);
        assert_eq!(config.layers[3].rope.as_ref().unwrap().partial, 0.25);
    }
    assert_eq!(parsed(qwen3_5_text::parse, &json!({})).unwrap().head_dim, 256);
    let mixture = |parse: Parse| of(parse, &json!({})).unwrap().layers[0].mixture.unwrap();
    let shared = Some(SharedExpert { inner: 512, is_weighed: true });
    for (parse, experts) in [(qwen3_next::parse as Parse, [512, 10]), (qwen3_5_moe_text::parse, [256, 8])] {
        assert_eq!(mixture(parse), Mixture { shared, ..Mixture::softmax(experts, 24, true) });
    }
}

#[test]
fn mixtures_of_qwen3_next_leave_layers_with_mlp() {
    let is_mixture = |more: Value| -> Vec<bool> {
        let config = of(qwen3_next::parse, &more).unwrap();
        config.layers.iter().map(|layer| layer.mixture.is_some()).collect()
    };
    assert_eq!(is_mixture(json!({})), [true; 4]);
    assert_eq!(is_mixture(json!({"decoder_sparse_step": 2})), [false, true, false, true]);
    assert_eq!(is_mixture(json!({"mlp_only_layers": [0]})), [false, true, true, true]);
}

#[test]
fn sections_of_positions_are_those_of_text() {
    let sections = json!({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0], "mrope_interleaved": true}});
    let rope = of(qwen3_5_text::parse, &sections).unwrap().layers[3].rope.clone().unwrap();
    assert_eq!((rope.theta, rope.partial), (5.0, 0.5));
    let error = of(qwen3_next::parse, &sections).unwrap_err().to_string();
    assert!(error.contains("`rope_parameters.mrope_"), "{error}");
}

#[test]
fn unsupported_keys_of_linear_attention_are_named() {
    let cases: [(Parse, Value, &str); 8] = [
        (qwen3_next::parse, json!({"hidden_act": "gelu"}), "`hidden_act` = \"gelu\""),
        (qwen3_5_text::parse, json!({"linear_num_value_heads": 24}), "`linear_num_value_heads` = 24"),
        (qwen3_5_text::parse, json!({"linear_conv_kernel_dim": 0}), "`linear_conv_kernel_dim` = 0"),
        (qwen3_5_text::parse, json!({"linear_key_head_dim": 1 << 20}), "`linear_num_key_heads * "),
        (qwen3_5_text::parse, json!({"layer_types": ["linear_attention"]}), "`layer_types`"),
        (qwen3_next::parse, json!({"layer_types": vec!["sliding_attention"; 4]}), "`layer_types`"),
        (qwen3_5_moe_text::parse, json!({"norm_topk_prob": false}), "`norm_topk_prob` = false"),
        (qwen3_5_moe_text::parse, json!({"mlp_only_layers": [0]}), "`mlp_only_layers` = [0]"),
    ];
    for (parse, more, key) in cases {
        let error = of(parse, &more).unwrap_err().to_string();
        assert!(error.contains(key), "{error} does not name {key}");
    }
}

#[test]
fn whole_models_are_read_as_their_text() {
    let text = json!({"model_type": "qwen3_5_text", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 36,
        "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16});
    let whole = json!({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": true, "dtype": "bfloat16"});
    let config = crate::hf::HfConfig::parse(&whole.to_string()).unwrap();
    assert_eq!(config.family().model_type, "qwen3_5_text");
    let exported: Value = serde_json::from_str(&config.export(fsdp_core::DType::F32)).unwrap();
    assert_eq!(exported["architectures"], json!(["Qwen3_5ForCausalLM"]));
    assert_eq!((&exported["model_type"], &exported["dtype"]), (&json!("qwen3_5_text"), &json!("float32")));
    assert!(exported["tie_word_embeddings"] == json!(true) && exported.get("vision_config").is_none());
    let refused = json!({"model_type": "qwen3_5_moe", "text_config": {"hidden_act": "gelu"}});
    assert!(crate::hf::HfConfig::parse(&refused.to_string()).is_err());
}
