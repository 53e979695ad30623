//! Tests of the families of mixtures of experts: absent keys, which layers are mixtures, refused keys.

use super::*;
use crate::model::{LatentAttention, Mixture, QkNorm, SharedExpert};
use crate::op::{Function, Gating, Groups, Scoring};

/// A small object with more keys, which replace those of the same name.
fn with(base: &Value, more: &Value) -> Value {
    let mut all = base.as_object().unwrap().clone();
    all.extend(more.as_object().unwrap().clone());
    Value::Object(all)
}

/// Parses a small model with latent attention.
fn latent(parse: Parse, more: &Value) -> Result<DecoderConfig, ConfigError> {
    let sizes = json!({"num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 2, "v_head_dim": 8});
    parsed(parse, &with(&sizes, more))
}

/// The mixtures of all layers.
fn mixtures(config: &DecoderConfig) -> Vec<Option<Mixture>> {
    config.layers.iter().map(|layer| layer.mixture).collect()
}

fn is_mixture(parse: Parse, more: &Value) -> Vec<bool> {
    mixtures(&parsed(parse, more).unwrap()).iter().map(Option::is_some).collect()
}

/// Logistic scores with corrections.
fn corrected(groups: Groups) -> Gating {
    Gating { scoring: Scoring::Sigmoid, biased: true, groups, normalized: true }
}

fn shared(inner: usize, is_weighed: bool) -> Option<SharedExpert> {
    Some(SharedExpert { inner, is_weighed })
}

#[test]
fn corrected_mixtures_default_to_transformers_sizes() {
    let deepseek = Mixture {
        gating: corrected(Groups { count: 8, top: 4 }),
        scale: 2.5,
        shared: shared(2048, false),
        ..Mixture::softmax([256, 8], 2048, true)
    };
    let config = latent(deepseek_v3::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [None, None, None, Some(deepseek)]);
    assert_eq!((config.max_position_embeddings, config.norm_eps, config.padding_row), (4096, 1e-6, None));
    let one = Mixture { gating: corrected(Groups::ONE), scale: 1.0, ..deepseek };
    let glm = Mixture { experts: 128, inner: 1408, shared: shared(1408, false), ..one };
    let config = parsed(glm4_moe::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [None, Some(glm), Some(glm), Some(glm)]);
    assert_eq!((config.max_position_embeddings, config.norm_eps, config.qk_norm), (131_072, 1e-5, None));
    let flash = Mixture { experts: 64, top: 4, inner: 1536, scale: 1.8, shared: shared(1536, false), ..one };
    let config = latent(glm4_moe_lite::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [None, Some(flash), Some(flash), Some(flash)]);
    assert_eq!((config.max_position_embeddings, config.norm_eps), (202_752, 1e-5));
    // Its experts have the size of its MLP, of which there is none.
    let minimax = Mixture { experts: 256, inner: 36, shared: None, ..one };
    let config = parsed(minimax_m2::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [Some(minimax); 4]);
    assert_eq!((config.head_dim, config.qk_norm), (128, Some(QkNorm::Rows)));
    assert_eq!(config.layers[0].rope.as_ref().unwrap().theta, 5_000_000.0);
}

#[test]
fn softmax_mixtures_default_to_transformers_sizes() {
    let config = parsed(olmoe::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [Some(Mixture::softmax([64, 8], 36, false)); 4]);
    assert_eq!((config.padding_row, config.norm_eps, config.qk_norm), (Some(1), 1e-5, Some(QkNorm::Rows)));
    let qwen = Mixture { shared: shared(5632, true), ..Mixture::softmax([60, 4], 1408, false) };
    let config = parsed(qwen2_moe::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [Some(qwen); 4]);
    assert!(config.qkv_bias && !config.output_bias);
    let ernie = Mixture {
        gating: Gating { biased: true, ..Gating::softmax(true) },
        shared: shared(2 * 1536, false),
        ..Mixture::softmax([64, 6], 1536, true)
    };
    let config = parsed(ernie4_5_moe::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [None, Some(ernie), Some(ernie), Some(ernie)]);
    assert_eq!((config.padding_row, config.head_dim), (Some(0), 8));
    assert!(config.tie_word_embeddings && config.rotates_neighbors);
    let config = parsed(granitemoe::parse, &json!({})).unwrap();
    assert_eq!(mixtures(&config), [Some(Mixture::softmax([8, 2], 36, true)); 4]);
    assert_eq!((config.attention_scale, config.padding_row), (Some(1.0), None));
}

#[test]
fn gpt_oss_defaults_to_sinks_clamps_windows_and_yarn() {
    let config = parsed(gpt_oss::parse, &json!({})).unwrap();
    let mixture = mixtures(&config)[0].unwrap();
    assert_eq!((mixture.experts, mixture.top, mixture.inner), (128, 4, 36));
    let packed = mixture.packed.unwrap();
    assert!(packed.interleaved && packed.bias && mixture.gating.normalized && config.sinks);
    assert_eq!(
        (config.activation, mixture.up_activation),
        (Function::ClampedSwish, Some(Function::ClampedPlusOne))
    );
    assert_eq!(windows(gpt_oss::parse, &json!({})), [Some(128), None, Some(128), None]);
    let types = json!({"sliding_window": 7, "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]});
    assert_eq!(windows(gpt_oss::parse, &types), [None, None, Some(7), None]);
    let yarn = |more: Value| {
        let rope = parsed(gpt_oss::parse, &more).unwrap().layers[0].rope.clone().unwrap();
        let RopeScaling::Yarn(yarn) = rope.scaling.clone() else { panic!("it is YaRN") };
        (rope.theta, yarn.factor, yarn.original, yarn.truncate)
    };
    assert_eq!(yarn(json!({})), (150_000.0, 32.0, 4096, false));
    assert_eq!(yarn(json!({"rope_theta": 5.0})), (5.0, 32.0, 4096, false));
    let given =
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}});
    assert_eq!(yarn(given), (150_000.0, 2.0, 10, true));
}

#[test]
fn dense_layers_match_transformers() {
    let of = |parse: Parse, more: Value| is_mixture(parse, &more);
    assert_eq!(of(glm4_moe::parse, json!({"first_k_dense_replace": 0})), [true; 4]);
    assert_eq!(of(glm4_moe::parse, json!({"first_k_dense_replace": 3})), [false, false, false, true]);
    assert_eq!(of(glm4_moe::parse, json!({"first_k_dense_replace": 9})), [false; 4]);
    let every_second = [false, true, false, true];
    assert_eq!(of(qwen2_moe::parse, json!({"decoder_sparse_step": 2})), every_second);
    assert_eq!(of(qwen2_moe::parse, json!({"mlp_only_layers": [0, 2]})), every_second);
    assert_eq!(
        of(ernie4_5_moe::parse, json!({"moe_layer_interval": 2, "moe_layer_start_index": 0})),
        every_second
    );
    let middle = json!({"moe_layer_start_index": 1, "moe_layer_end_index": 2});
    assert_eq!(of(ernie4_5_moe::parse, middle), [false, true, true, false]);
    assert_eq!(of(ernie4_5_moe::parse, json!({"moe_layer_end_index": -1})), [false, true, true, true]);
    let types = ["sparse", "dense", "dense", "sparse"];
    let config = latent(glm4_moe_lite::parse, &json!({"mlp_layer_types": types})).unwrap();
    let is_mixture: Vec<bool> = mixtures(&config).iter().map(Option::is_some).collect();
    assert_eq!(is_mixture, types.map(|kind| kind == "sparse"));
}

#[test]
fn qwen2_moe_windows_are_in_every_second_of_first_layers() {
    let used = |more: Value| {
        let used = json!({"use_sliding_window": true, "sliding_window": 7});
        windows(qwen2_moe::parse, &with(&used, &more))
    };
    assert_eq!(used(json!({})), [Some(7), None, Some(7), None]);
    assert_eq!(used(json!({"max_window_layers": 2})), [Some(7), None, None, None]);
    assert_eq!(used(json!({"max_window_layers": 0})), [None; 4]);
    assert_eq!(windows(qwen2_moe::parse, &json!({"sliding_window": 0})), [None; 4]);
}

#[test]
fn latent_sizes_and_yarn_factor_match_transformers() {
    let of = |more: Value| latent(deepseek_v3::parse, &more).unwrap();
    let sizes = LatentAttention {
        query_rank: Some(6),
        kv_rank: 5,
        fixed: 6,
        rotating: 2,
        value: 8,
        interleaved: true,
    };
    let config = of(json!({}));
    assert_eq!((config.latent, config.num_key_value_heads, config.head_dim), (Some(sizes), 4, 8));
    // Values may have more elements than queries.
    assert_eq!(of(json!({"v_head_dim": 12, "num_key_value_heads": null})).head_dim, 12);
    let direct = of(json!({"q_lora_rank": null, "rope_interleave": false})).latent.unwrap();
    assert_eq!((direct.query_rank, direct.interleaved), (None, false));
    let scale = |more: Value| of(more).attention_scale.unwrap();
    let plain = 8f64.powf(-0.5);
    let published = json!({"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"});
    let grown = plain * (0.1 * 40f64.ln() + 1.0).powi(2);
    for key in ["rope_scaling", "rope_parameters"] {
        assert!((scale(json!({key: published})) / grown - 1.0).abs() < 1e-12);
        for less in [
            json!({"mscale_all_dim": null}),
            json!({"mscale_all_dim": 0}),
            json!({"type": "default"}),
            json!({"factor": 1.0}),
        ] {
            assert!((scale(json!({key: with(&published, &less)})) / plain - 1.0).abs() < 1e-12, "{less}");
        }
    }
    let rope = of(json!({"rope_scaling": published})).layers[0].rope.clone().unwrap();
    let RopeScaling::Yarn(yarn) = &rope.scaling else { panic!("it is YaRN") };
    // Equal multipliers cancel in the factor of cosines and sines.
    assert_eq!((yarn.factor, yarn.attention_factor), (40.0, 1.0));
}

#[test]
fn rotating_part_of_heads_matches_transformers() {
    let partial =
        |parse: Parse, more: Value| parsed(parse, &more).unwrap().layers[0].rope.as_ref().unwrap().partial;
    assert_eq!(partial(glm4_moe::parse, json!({})), 0.5);
    assert_eq!(partial(glm4_moe::parse, json!({"rope_parameters": {"rope_theta": 5.0}})), 0.5);
    assert_eq!(partial(minimax_m2::parse, json!({})), 1.0);
    let half = json!({"rotary_dim": 64, "partial_rotary_factor": 0.5});
    assert_eq!(partial(minimax_m2::parse, half), 0.5);
}

#[test]
fn unsupported_keys_of_mixtures_are_named() {
    type Family = fn(Parse, &Value) -> Result<DecoderConfig, ConfigError>;
    let cases: [(Family, Parse, Value, &str); 22] = [
        (
            latent,
            deepseek_v3::parse,
            json!({"n_group": 5}),
            "`n_routed_experts` = 256 is not divisible by `n_group` = 5",
        ),
        (latent, deepseek_v3::parse, json!({"n_group": 2, "topk_group": 3}), "`topk_group` = 3"),
        (latent, deepseek_v3::parse, json!({"n_group": 64, "topk_group": 1}), "`topk_group` = 1"),
        (latent, deepseek_v3::parse, json!({"n_group": 256, "topk_group": 8}), "`n_group` = 256"),
        (latent, deepseek_v3::parse, json!({"num_experts_per_tok": 257}), "`num_experts_per_tok` = 257"),
        (latent, deepseek_v3::parse, json!({"num_key_value_heads": 2}), "`num_key_value_heads` = 2"),
        (latent, deepseek_v3::parse, json!({"qk_rope_head_dim": 3}), "`qk_rope_head_dim` = 3"),
        (latent, deepseek_v3::parse, json!({"kv_lora_rank": null}), "lacks `kv_lora_rank`"),
        (
            latent,
            deepseek_v3::parse,
            json!({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}),
            "lacks `rope_scaling.factor`",
        ),
        (
            parsed,
            deepseek_v3::parse,
            json!({"num_key_value_heads": 4, "qk_rope_head_dim": 2, "kv_lora_rank": 5}),
            "lacks `q_lora_rank`",
        ),
        (
            latent,
            glm4_moe_lite::parse,
            json!({"mlp_layer_types": ["sparse"]}),
            "`mlp_layer_types` = [\"sparse\"]",
        ),
        (
            latent,
            glm4_moe_lite::parse,
            json!({"mlp_layer_types": ["sparse", "dense", "wide", "dense"]}),
            "`mlp_layer_types`",
        ),
        (parsed, minimax_m2::parse, json!({"rotary_dim": 64}), "`rotary_dim` = 64"),
        (parsed, minimax_m2::parse, json!({"output_router_logits": true}), "`output_router_logits` = true"),
        (parsed, minimax_m2::parse, json!({"router_jitter_noise": 0.1}), "`router_jitter_noise` = 0.1"),
        (parsed, olmoe::parse, json!({"clip_qkv": 8.0}), "`clip_qkv` = 8.0"),
        (parsed, qwen2_moe::parse, json!({"mlp_only_layers": [-1]}), "`mlp_only_layers` = [-1]"),
        (parsed, ernie4_5_moe::parse, json!({"use_bias": true}), "`use_bias` = true"),
        (parsed, ernie4_5_moe::parse, json!({"output_router_logits": true}), "`output_router_logits` = true"),
        (parsed, gpt_oss::parse, json!({"swiglu_limit": 5.0}), "`swiglu_limit` = 5.0"),
        (parsed, gpt_oss::parse, json!({"hidden_act": "gelu"}), "`hidden_act` = \"gelu\""),
        (parsed, granitemoe::parse, json!({"output_router_logits": true}), "`output_router_logits` = true"),
    ];
    for (family, parse, more, key) in cases {
        let error = family(parse, &more).unwrap_err().to_string();
        assert!(error.contains(key), "{error} does not name {key}");
    }
}

#[test]
fn balancing_loss_is_used_only_where_router_logits_are_requested() {
    let coefficient = |parse: Parse, more: Value| parsed(parse, &more).unwrap().router_loss;
    for (parse, absent) in [(olmoe::parse as Parse, 0.01), (qwen2_moe::parse, 0.001), (gpt_oss::parse, 0.001)]
    {
        assert_eq!(coefficient(parse, json!({"router_aux_loss_coef": 0.5})), 0.0);
        assert_eq!(coefficient(parse, json!({"output_router_logits": true})), absent);
        let both = json!({"output_router_logits": true, "router_aux_loss_coef": 0.5});
        assert_eq!(coefficient(parse, both), 0.5);
    }
}
