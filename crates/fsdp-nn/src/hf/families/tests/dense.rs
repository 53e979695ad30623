//! Tests of the families of dense models whose layers differ in windows, rotation or scales.

use super::*;

fn thetas(parse: Parse, more: &Value) -> Vec<Option<f64>> {
    let layers = parsed(parse, more).unwrap().layers;
    layers.iter().map(|layer| layer.rope.as_ref().map(|rope| rope.theta)).collect()
}

#[test]
fn olmo3_window_layers_match_transformers() {
    let first = Some(4096);
    assert_eq!(windows(olmo3::parse, &json!({})), [first, first, first, None]);
    let (full, sliding) = ("full_attention", "sliding_attention");
    let named = json!({"sliding_window": 7, "layer_types": [full, sliding, full, full]});
    assert_eq!(windows(olmo3::parse, &named), [None, Some(7), None, None]);
}

/// An outer `rope_theta` does not reach layers with a window, whose `theta` is another key of `rope_parameters`.
#[test]
fn olmo3_outer_rope_keys_apply_to_layers_without_window() {
    let third = |more: &Value| thetas(olmo3::parse, more)[2..].to_vec();
    let default = Some(500_000.0);
    assert_eq!(third(&json!({})), [default, default]);
    assert_eq!(third(&json!({"rope_theta": 7.0})), [default, Some(7.0)]);
    let inner = json!({"rope_theta": 7.0, "rope_parameters":
        {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}});
    assert_eq!(third(&inner), [Some(6.0), Some(5.0)]);
    let scaled = json!({"rope_theta": 7.0, "original_max_position_embeddings": 5, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}});
    assert_eq!(third(&scaled), [default, Some(7.0)]);
    let layers = parsed(olmo3::parse, &scaled).unwrap().layers;
    let scaling = |layer: usize| layers[layer].rope.as_ref().unwrap().scaling.clone();
    let RopeScaling::Yarn(yarn) = scaling(3) else { panic!("it is YaRN") };
    assert_eq!((scaling(2), yarn.original), (RopeScaling::Default, 64));
}

#[test]
fn seed_oss_drops_and_has_biases_by_default() {
    let config = |more: Value| parsed(seed_oss::parse, &more).unwrap();
    let default = config(json!({}));
    assert_eq!((default.attention_dropout, default.residual_dropout), (0.1, 0.1));
    assert_eq!([default.qkv_bias, default.output_bias, default.mlp_bias], [true, false, false]);
    let none = config(json!({"attention_dropout": 0.0, "residual_dropout": 0, "attention_bias": false}));
    assert_eq!((none.attention_dropout, none.residual_dropout, none.qkv_bias), (0.0, 0.0, false));
}

#[test]
fn granite_factors_default_to_one_and_logits_are_divided() {
    let factors = |more: Value| {
        let config = parsed(granite::parse, &more).unwrap();
        (config.embedding_scale, config.attention_scale, config.residual_scale, config.logit_scale)
    };
    assert_eq!(factors(json!({})), (1.0, Some(1.0), 1.0, 1.0));
    let given = json!({"embedding_multiplier": 12, "attention_multiplier": 0.25, "residual_multiplier": 0.5,
        "logits_scaling": 8.0});
    assert_eq!(factors(given), (12.0, Some(0.25), 0.5, 0.125));
    let error = parsed(granite::parse, &json!({"logits_scaling": 0.0})).unwrap_err().to_string();
    assert!(error.contains("`logits_scaling` = 0.0"), "{error}");
}

#[test]
fn exaone4_rotates_layers_with_window_or_all_without() {
    let layers = |more: &Value| -> Vec<(Option<usize>, bool)> {
        let layers = parsed(exaone4::parse, more).unwrap().layers;
        layers.iter().map(|layer| (layer.window, layer.rope.is_some())).collect()
    };
    let (wide, full) = ((Some(4096), true), (None, false));
    assert_eq!(layers(&json!({})), [wide, wide, wide, full]);
    assert_eq!(layers(&json!({"sliding_window_pattern": 2})), [wide, full, wide, full]);
    let types = vec!["full_attention"; 4];
    assert_eq!(layers(&json!({"layer_types": types, "sliding_window_pattern": "LLLG"})), [full; 4]);
    let none = json!({"layer_types": types, "sliding_window": null, "sliding_window_pattern": 0});
    assert_eq!(layers(&none), [(None, true); 4]);
    for pattern in [json!("LLLG"), json!(0)] {
        let error = parsed(exaone4::parse, &json!({"sliding_window_pattern": pattern})).unwrap_err();
        assert!(error.to_string().contains("`sliding_window_pattern`"), "{error}");
    }
}

#[test]
fn ernie4_5_defaults_match_transformers() {
    let config = |more: Value| parsed(ernie4_5::parse, &more).unwrap();
    let default = config(json!({"attention_dropout": 0.5}));
    assert_eq!((default.head_dim, default.attention_dropout, default.norm_eps), (128, 0.0, 1e-5));
    assert!(default.tie_word_embeddings && !default.qkv_bias && !default.output_bias && !default.mlp_bias);
    assert_eq!(thetas(ernie4_5::parse, &json!({})), [Some(500_000.0); 4]);
    let biases = config(json!({"use_bias": true}));
    assert!(biases.qkv_bias && biases.output_bias && biases.mlp_bias);
}

#[test]
fn hunyuan_alpha_grows_base_up_to_positions_of_model() {
    let base = |more: &Value, seq: usize| {
        let mut keys = json!({"head_dim": 8, "max_position_embeddings": 16});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = parsed(hunyuan_v1_dense::parse, &keys).unwrap();
        assert_eq!(config.padding_row, Some(0));
        // The second frequency is the base to the power of -1/4.
        let rope = config.layers[0].rope.as_ref().unwrap().rope(8, seq);
        f64::from(rope.inverse_frequencies[1]).powi(-4)
    };
    let is = |found: f64, expected: f64| {
        assert!((found / expected - 1.0).abs() < 1e-5, "{found} is not {expected}");
    };
    let published = json!({"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}});
    is(base(&published, 16), 10_000.0 * 1000.0f64.powf(8.0 / 6.0));
    is(base(&published, 32), 10_000.0 * 2.0f64.powf(8.0 / 6.0));
    is(base(&json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), 16), 10_000.0);
    let missing = parsed(hunyuan_v1_dense::parse, &json!({})).unwrap_err().to_string();
    assert!(missing.contains("`head_dim`"), "{missing}");
    let elsewhere = json!({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3.0}});
    let error = parsed(llama::parse, &elsewhere).unwrap_err().to_string();
    assert!(error.contains("`rope_scaling.alpha` = 3"), "{error}");
}

#[test]
fn cohere2_rotates_only_layers_with_window() {
    let layers = |more: &Value| -> Vec<(Option<usize>, bool)> {
        let layers = parsed(cohere2::parse, more).unwrap().layers;
        layers.iter().map(|layer| (layer.window, layer.rope.is_some())).collect()
    };
    let (wide, full) = ((Some(4096), true), (None, false));
    assert_eq!(layers(&json!({})), [wide, wide, wide, full]);
    assert_eq!(layers(&json!({"sliding_window_pattern": 2})), [wide, full, wide, full]);
    assert_eq!(layers(&json!({"layer_types": vec!["full_attention"; 4]})), [full; 4]);
    let config = parsed(cohere2::parse, &json!({"layer_norm_eps": 0.5, "rms_norm_eps": 0.25})).unwrap();
    assert_eq!((config.logit_scale, config.norm_eps, config.tie_word_embeddings), (0.0625, 0.5, true));
    let error = parsed(cohere2::parse, &json!({"sliding_window": null})).unwrap_err().to_string();
    assert!(error.contains("`sliding_window` = null"), "{error}");
}

#[test]
fn glm4_rotates_half_of_head_by_default() {
    let partial = |more: Value| {
        let config = parsed(glm4::parse, &more).unwrap();
        assert!(config.qkv_bias && !config.output_bias);
        config.layers[0].rope.as_ref().unwrap().partial
    };
    assert_eq!(partial(json!({})), 0.5);
    assert_eq!(partial(json!({"rope_parameters": {"rope_theta": 5.0}})), 0.5);
    assert_eq!(partial(json!({"partial_rotary_factor": 1.0})), 1.0);
    assert_eq!(partial(json!({"rope_parameters": {"partial_rotary_factor": 0.25}})), 0.25);
}
