//! Tests of family parsers for cases that the golden files do not cover.

mod delta;
mod dense;
mod mixtures;

use serde_json::{Map, Value, json};

use super::*;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, RopeScaling};

type Parse = fn(Keys<'_>) -> Result<DecoderConfig, ConfigError>;

/// Parses a small model of four layers with these keys.
fn parsed(parse: Parse, more: &Value) -> Result<DecoderConfig, ConfigError> {
    let small = json!({"vocab_size": 61, "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2});
    let keys: Map<String, Value> =
        [&small, more].into_iter().flat_map(|keys| keys.as_object().unwrap().clone()).collect();
    parse(Keys::new(&keys, None))
}

fn windows(parse: Parse, more: &Value) -> Vec<Option<usize>> {
    parsed(parse, more).unwrap().layers.iter().map(|layer| layer.window).collect()
}

#[test]
fn sliding_window_layers_match_transformers() {
    assert_eq!(windows(mistral::parse, &json!({})), [Some(4096); 4]);
    assert_eq!(windows(mistral::parse, &json!({"sliding_window": null})), [None; 4]);
    assert_eq!(windows(mistral::parse, &json!({"sliding_window": 7})), [Some(7); 4]);
    assert_eq!(windows(phi3::parse, &json!({})), [None; 4]);
    assert_eq!(windows(phi3::parse, &json!({"sliding_window": 7})), [Some(7); 4]);
    for parse in [qwen2::parse, qwen3::parse] {
        let later = json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3});
        assert_eq!(windows(parse, &later), [None, None, None, Some(7)]);
        assert_eq!(windows(parse, &json!({"sliding_window": 7, "max_window_layers": 0})), [None; 4]);
        let all = json!({"use_sliding_window": true, "max_window_layers": 0});
        assert_eq!(windows(parse, &all), [Some(4096); 4]);
        let (full, sliding) = ("full_attention", "sliding_attention");
        let named = json!({"use_sliding_window": true, "sliding_window": 7,
            "layer_types": [sliding, full, sliding, full]});
        assert_eq!(windows(parse, &named), [Some(7), None, Some(7), None]);
    }
    let second = json!({"use_sliding_window": true, "sliding_window": 7, "no_rope_layers": [1, 0, 1, 1]});
    assert_eq!(windows(smollm3::parse, &second), [None, Some(7), None, None]);
}

#[test]
fn gemma_and_starcoder2_window_layers_match_transformers() {
    assert_eq!(windows(gemma2::parse, &json!({})), [Some(4096), None, Some(4096), None]);
    assert_eq!(windows(gemma2::parse, &json!({"sliding_window": 7})), [Some(7), None, Some(7), None]);
    assert_eq!(windows(gemma3_text::parse, &json!({})), [Some(4096); 4]);
    let third = json!({"sliding_window_pattern": 3, "sliding_window": 7});
    assert_eq!(windows(gemma3_text::parse, &third), [Some(7), Some(7), None, Some(7)]);
    assert_eq!(windows(starcoder2::parse, &json!({})), [None; 4]);
    assert_eq!(windows(starcoder2::parse, &json!({"sliding_window": 7})), [Some(7); 4]);
}

#[test]
fn gemma3_window_layers_use_local_rope() {
    let thetas = |more: Value| -> Vec<f64> {
        let layers = parsed(gemma3_text::parse, &more).unwrap().layers;
        layers[1..3].iter().map(|layer| layer.rope.as_ref().unwrap().theta).collect()
    };
    let third = |more: Value| {
        let mut keys = json!({"sliding_window_pattern": 3});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    assert_eq!(thetas(third(json!({}))), [10_000.0, 1_000_000.0]);
    assert_eq!(thetas(third(json!({"rope_theta": 5.0, "rope_local_base_freq": 6.0}))), [6.0, 5.0]);
    let inner = json!({"rope_theta": 5.0, "rope_parameters": {"full_attention": {"rope_theta": 7.0}}});
    assert_eq!(thetas(third(inner)), [10_000.0, 7.0]);
    let scaled = third(json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}));
    let layers = parsed(gemma3_text::parse, &scaled).unwrap().layers;
    let scaling = |layer: usize| layers[layer].rope.as_ref().unwrap().scaling.clone();
    assert_eq!((scaling(1), scaling(2)), (RopeScaling::Default, RopeScaling::Linear { factor: 8.0 }));
}

#[test]
fn gemma_softcaps_follow_family_defaults_and_null() {
    let caps = |parse: Parse, more: Value| {
        let config = parsed(parse, &more).unwrap();
        (config.attention_softcap, config.logit_softcap)
    };
    assert_eq!(caps(gemma2::parse, json!({})), (Some(50.0), Some(30.0)));
    let null = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    assert_eq!(caps(gemma2::parse, null), (None, None));
    assert_eq!(caps(gemma3_text::parse, json!({})), (None, None));
    assert_eq!(caps(gemma3_text::parse, json!({"final_logit_softcapping": 4.0})), (None, Some(4.0)));
    let scale = parsed(gemma2::parse, &json!({})).unwrap().attention_scale;
    assert_eq!(scale, Some(1.0 / 16.0));
}

#[test]
fn gpt_neox_rotates_quarter_of_head_by_default() {
    let rope = |more: Value| {
        let mut keys = json!({"hidden_size": 64, "num_key_value_heads": 1});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = parsed(gpt_neox::parse, &keys).unwrap();
        assert_eq!(config.num_key_value_heads, 4);
        let rope = config.layers[0].rope.clone().unwrap();
        (rope.partial, rope.theta)
    };
    assert_eq!(rope(json!({})), (0.25, 10_000.0));
    assert_eq!(rope(json!({"rotary_pct": 1.0, "rotary_emb_base": 5})), (1.0, 5.0));
    let inner =
        json!({"rotary_pct": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 3}});
    assert_eq!(rope(inner), (0.5, 3.0));
}

#[test]
fn smollm3_skips_rope_in_every_fourth_layer_by_default() {
    let rotates = |more: &Value| -> Vec<bool> {
        let layers = parsed(smollm3::parse, more).unwrap().layers;
        layers.iter().map(|layer| layer.rope.is_some()).collect()
    };
    assert_eq!(rotates(&json!({})), [true, true, true, false]);
    assert_eq!(rotates(&json!({"no_rope_layer_interval": 2})), [true, false, true, false]);
    assert_eq!(rotates(&json!({"no_rope_layers": [0, 1, 1, 0, 1]})), [false, true, true, false]);
}

#[test]
fn absent_sizes_match_transformers_and_null_is_derived() {
    let kv_heads = |parse: Parse, more: Value| {
        parsed(parse, &more).map(|config| (config.num_key_value_heads, config.head_dim)).unwrap()
    };
    assert_eq!(kv_heads(llama::parse, json!({"num_key_value_heads": null})), (4, 8));
    assert_eq!(kv_heads(mistral::parse, json!({"num_key_value_heads": null})), (4, 8));
    assert_eq!(kv_heads(qwen3::parse, json!({})), (2, 128));
    assert_eq!(kv_heads(seed_oss::parse, json!({})), (2, 128));
    assert_eq!(kv_heads(seed_oss::parse, json!({"head_dim": null, "num_key_value_heads": null})), (4, 8));
    // Eight is more than the number of query heads.
    let without = |keys: &Map<String, Value>| mistral::parse(Keys::new(keys, None));
    let keys = json!({"hidden_size": 32, "num_attention_heads": 4});
    assert!(matches!(without(keys.as_object().unwrap()), Err(ConfigError::Indivisible { divisor: 8, .. })));
    assert!(parsed(smollm3::parse, &json!({})).unwrap().tie_word_embeddings);
    assert!(!parsed(qwen2::parse, &json!({})).unwrap().tie_word_embeddings);
}

#[test]
fn rope_theta_and_yarn_length_follow_key_precedence() {
    let theta = |more: Value| parsed(llama::parse, &more).unwrap().layers[0].rope.as_ref().unwrap().theta;
    let outer = json!({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}});
    assert_eq!(theta(outer), 2.0);
    assert_eq!(
        theta(json!({"rope_scaling": {"rope_theta": 3.0}, "rope_parameters": {"rope_theta": 2.0}})),
        3.0
    );
    assert_eq!(theta(json!({"rope_scaling": {}, "rope_theta": 4.0})), 4.0);
    let original = json!({"original_max_position_embeddings": 100, "max_position_embeddings": 300,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 50}});
    let rope = parsed(llama::parse, &original).unwrap().layers[0].rope.clone().unwrap();
    let RopeScaling::Yarn(yarn) = &rope.scaling else { panic!("it is YaRN") };
    assert_eq!((yarn.original, yarn.factor), (100, 3.0));
}

#[test]
fn invalid_and_unsupported_family_keys_are_named() {
    let named = |parse: Parse, more: Value| parsed(parse, &more).unwrap_err().to_string();
    let factors = json!({"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [1]});
    for (parse, more, key) in [
        (llama::parse as Parse, json!({"rope_scaling": {"type": "linear"}}), "lacks `rope_scaling.factor`"),
        (llama::parse, json!({"rope_scaling": {"type": 3}}), "`rope_scaling.type` = 3"),
        (llama::parse, json!({"rope_scaling": {"type": "su"}}), "`rope_scaling.type` = \"su\""),
        (
            llama::parse,
            json!({"rope_parameters": {"mrope_section": [1]}}),
            "`rope_parameters.mrope_section` = [1]",
        ),
        (phi3::parse, json!({"rope_scaling": factors}), "`rope_scaling.long_factor` = [1]"),
        (
            phi3::parse,
            json!({"rope_scaling": {"type": "linear", "factor": 2}}),
            "only \"default\" and \"longrope\"",
        ),
        (phi3::parse, json!({"partial_rotary_factor": 0.4}), "`partial_rotary_factor` = 0.4"),
        (qwen2::parse, json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` = 0.5"),
        (qwen2::parse, json!({"layer_types": ["full_attention"]}), "`layer_types`"),
        (qwen3::parse, json!({"layer_types": vec!["sliding_attention"; 4]}), "`layer_types`"),
        (smollm3::parse, json!({"no_rope_layers": [1]}), "`no_rope_layers` = [1]"),
        (mistral::parse, json!({"layer_types": ["sliding_attention"]}), "`layer_types`"),
        (olmo2::parse, json!({"sliding_window": 3}), "`sliding_window` = 3"),
        (gemma2::parse, json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` = true"),
        (gemma2::parse, json!({"sliding_window": null}), "`sliding_window` = null"),
        (gemma3_text::parse, json!({"attn_logit_softcapping": 5}), "`attn_logit_softcapping` = 5"),
        (
            gemma3_text::parse,
            json!({"rope_parameters": {"rope_theta": 5}}),
            "`rope_parameters.rope_theta` = 5",
        ),
        (
            gemma3_text::parse,
            json!({"rope_parameters": {"sliding_attention": {"rope_type": "none"}}}),
            "`rope_parameters.sliding_attention.rope_type` = \"none\"",
        ),
        (gpt_neox::parse, json!({"rotary_pct": 0.1}), "`rotary_pct` = 0.1"),
        (olmo3::parse, json!({"sliding_window": null}), "`sliding_window` = null"),
        (olmo3::parse, json!({"rope_parameters": {"rope_theta": 5}}), "`rope_parameters.rope_theta` = 5"),
        (
            olmo3::parse,
            json!({"rope_scaling": {"type": "yarn", "factor": 2}}),
            "`rope_scaling.type` = \"yarn\"",
        ),
        (
            olmo3::parse,
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"full_attention": {}}}),
            "`rope_parameters` = {",
        ),
        (starcoder2::parse, json!({"hidden_act": "mish"}), "`hidden_act` = \"mish\""),
    ] {
        let error = named(parse, more);
        assert!(error.contains(key), "{error} does not name {key}");
    }
}

#[test]
fn padding_row_follows_family_default_null_and_sign() {
    let row = |parse: Parse, more: Value| parsed(parse, &more).unwrap().padding_row;
    let large = json!({"vocab_size": 200_000});
    let families: [(Parse, Option<usize>); 19] = [
        (llama::parse, None),
        (granite::parse, None),
        (exaone4::parse, None),
        (mistral::parse, None),
        (mixtral::parse, None),
        (qwen2::parse, None),
        (qwen3::parse, None),
        (qwen3_moe::parse, None),
        (starcoder2::parse, None),
        (gemma2::parse, Some(0)),
        (gemma3_text::parse, Some(0)),
        (ernie4_5::parse, Some(0)),
        (cohere2::parse, Some(0)),
        (olmo2::parse, Some(1)),
        (olmo3::parse, Some(1)),
        (seed_oss::parse, Some(1)),
        (phi3::parse, Some(32_000)),
        (smollm3::parse, Some(128_004)),
        (glm4::parse, Some(151_329)),
    ];
    for (parse, absent) in families {
        assert_eq!(row(parse, large.clone()), absent);
        assert_eq!(row(parse, json!({"pad_token_id": null})), None);
        for (id, expected) in [(0, 0), (60, 60), (-1, 60), (-61, 0)] {
            assert_eq!(row(parse, json!({"pad_token_id": id})), Some(expected));
        }
        for id in
            [json!(61), json!(-62), json!(i64::MIN), json!(u64::MAX), json!(2.0), json!(true), json!([1])]
        {
            let error = parsed(parse, &json!({"pad_token_id": id})).unwrap_err();
            assert!(matches!(error, ConfigError::Value { ref key, .. } if key == "pad_token_id"), "{error}");
        }
    }
    // transformers builds no model whose default is beyond the vocabulary.
    assert_eq!(row(phi3::parse, json!({})), None);
    // GPT-NeoX has no such row in transformers either.
    assert_eq!(row(gpt_neox::parse, json!({"pad_token_id": 3})), None);
}
