//! The small decoders that the suite runs, one of every kind.

use std::sync::Arc;

use crate::model::{
    DecoderConfig, DeltaNet, LatentAttention, LayerConfig, Mixture, Names, NormKind, NormsPlace,
    PackedExperts, QkNorm, RopeConfig, RopeScaling, SharedExpert,
};
use crate::op::{Function, Gating, Groups, Scoring};

/// A Llama with every option enabled.
pub(crate) fn llama() -> DecoderConfig {
    let rope = Some(Arc::new(RopeConfig { theta: 1000.0, partial: 1.0, scaling: RopeScaling::Default }));
    DecoderConfig {
        names: Names::LLAMA,
        vocab_size: 13,
        padding_row: None,
        embedding_scale: 1.0,
        embedding_scale_rounds: false,
        embedding_dropout: 0.0,
        hidden_size: 12,
        intermediate_size: 10,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        latent: None,
        layers: vec![LayerConfig { rope, window: None, mixture: None, delta: None }; 2],
        is_parallel: false,
        qk_norm: None,
        qkv_by_head: false,
        rotates_neighbors: false,
        attention_scale: None,
        attention_softcap: None,
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_softcap: None,
        is_gated: true,
        activation: Function::Silu,
        norm: NormKind::Rms,
        norm_eps: 1e-5,
        tie_word_embeddings: true,
        qkv_bias: true,
        output_bias: true,
        sinks: false,
        attention_gate: false,
        mlp_bias: true,
        attention_dropout: 0.2,
        residual_dropout: 0.0,
        router_loss: 0.0,
        keep_f32: &[],
        initializer_range: 0.3,
        max_position_embeddings: 32,
    }
}

/// The variations of other families on Llama, two or three per configuration.
pub(crate) fn relatives() -> [DecoderConfig; 10] {
    let layers = |scaling, window| {
        let rope = Some(Arc::new(RopeConfig { theta: 1000.0, partial: 0.67, scaling }));
        vec![
            LayerConfig { rope, window, mixture: None, delta: None },
            LayerConfig { rope: None, window: None, mixture: None, delta: None },
        ]
    };
    let packed = Names {
        class: "Packed",
        qkv: &["qkv_proj"],
        output_is_first: true,
        gate_up: &["gate_up_proj"],
        ..Names::LLAMA
    };
    let after = Names {
        class: "Behind",
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
        ..Names::LLAMA
    };
    let longrope = RopeScaling::LongRope {
        short: vec![1.0, 1.5],
        long: vec![2.0, 3.0],
        original: 4,
        attention_factor: 1.2,
    };
    [
        DecoderConfig {
            names: packed,
            layers: layers(longrope, Some(3)),
            residual_dropout: 0.1,
            residual_scale: 0.6,
            logit_scale: 1.7,
            ..llama()
        },
        DecoderConfig { names: after, qk_norm: Some(QkNorm::Rows), output_bias: false, ..llama() },
        DecoderConfig {
            qk_norm: Some(QkNorm::RotatedHeads),
            layers: layers(RopeScaling::Linear { factor: 2.0 }, None),
            rotates_neighbors: true,
            activation: Function::Gelu,
            ..llama()
        },
        neox(),
        gemma(),
        cohere(),
        mixture(),
        deepseek(),
        gpt_oss(),
        delta(),
    ]
}

/// Those with experts of both forms.
pub(crate) fn mixtures() -> [DecoderConfig; 2] {
    [mixture(), gpt_oss()]
}

/// Parallel attention and MLP, packed projections ordered by head, layer norms, no gate (GPT-NeoX).
fn neox() -> DecoderConfig {
    let names = Names {
        class: "Neox",
        layer_class: "Layer",
        qkv: &["query_key_value"],
        gate_up: &["wide"],
        norms: NormsPlace::BeforeAttention,
        ..Names::LLAMA
    };
    DecoderConfig {
        names,
        is_parallel: true,
        num_key_value_heads: llama().num_attention_heads,
        qkv_by_head: true,
        is_gated: false,
        activation: Function::GeluTanh,
        norm: NormKind::Layer,
        embedding_dropout: 0.1,
        residual_dropout: 0.2,
        ..llama()
    }
}

/// Norms on both sides with weights centered at zero, scaled embeddings, caps and scales (Gemma).
fn gemma() -> DecoderConfig {
    let names = Names {
        class: "Gemma",
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
        ..Names::LLAMA
    };
    DecoderConfig {
        names,
        norm: NormKind::CentredRms,
        embedding_scale: 1.7,
        embedding_scale_rounds: true,
        qk_norm: Some(QkNorm::Heads),
        attention_scale: Some(0.4),
        attention_softcap: Some(1.5),
        logit_softcap: Some(2.0),
        activation: Function::GeluTanh,
        ..llama()
    }
}

/// Parallel attention and MLP behind one layer norm without a bias, and no norm of the MLP (Cohere).
fn cohere() -> DecoderConfig {
    let names = Names { class: "Cohere", before_mlp: None, ..Names::LLAMA };
    DecoderConfig {
        names,
        is_parallel: true,
        norm: NormKind::LayerWithoutBias,
        rotates_neighbors: true,
        logit_scale: 0.6,
        ..llama()
    }
}

/// Mixtures of experts, with weights that sum to one in the first layer (Mixtral) and not in the second (Qwen 3), and
/// a balancing loss.
fn mixture() -> DecoderConfig {
    let layer = |is_normalized| LayerConfig {
        rope: None,
        window: None,
        mixture: Some(Mixture::softmax([4, 2], 5, is_normalized)),
        delta: None,
    };
    DecoderConfig { layers: vec![layer(true), layer(false)], router_loss: 0.4, ..llama() }
}

/// Latent attention with values that are narrower than queries, and a mixture whose router has logistic scores,
/// corrections and groups, beside a shared expert (DeepSeek V3) with a weight (Qwen 2).
fn deepseek() -> DecoderConfig {
    let gating = Gating {
        scoring: Scoring::Sigmoid,
        biased: true,
        groups: Groups { count: 2, top: 1 },
        normalized: true,
    };
    let shared = Some(SharedExpert { inner: 7, is_weighed: true });
    let mixture = Mixture { gating, scale: 1.5, shared, ..Mixture::softmax([4, 2], 5, true) };
    let dense = llama().layers[0].clone();
    let latent = LatentAttention {
        query_rank: Some(5),
        kv_rank: 3,
        fixed: 3,
        rotating: 4,
        value: 5,
        interleaved: true,
    };
    DecoderConfig {
        latent: Some(latent),
        layers: vec![dense.clone(), LayerConfig { mixture: Some(mixture), ..dense }],
        ..llama()
    }
}

/// Sinks, and packed experts with biases: interleaved and clamped (gpt-oss), or neither (Llama 4).
fn gpt_oss() -> DecoderConfig {
    let layer = |window, packed, up_activation| LayerConfig {
        window,
        mixture: Some(Mixture { packed: Some(packed), up_activation, ..Mixture::softmax([4, 2], 5, true) }),
        ..llama().layers[0].clone()
    };
    let [interleaved, not] =
        [true, false].map(|interleaved| PackedExperts { interleaved, bias: interleaved });
    DecoderConfig {
        sinks: true,
        activation: Function::ClampedSwish,
        layers: vec![layer(Some(3), interleaved, Some(Function::ClampedPlusOne)), layer(None, not, None)],
        ..llama()
    }
}

/// Linear attention, packed by head or not, with several value heads per key head or one, and attention with gates (Qwen 3
/// Next).
pub(crate) fn delta() -> DecoderConfig {
    let layer = |value_heads, by_head| LayerConfig {
        delta: Some(DeltaNet { key_heads: 2, value_heads, key_dim: 4, value_dim: 3, kernel: 3, by_head }),
        ..llama().layers[0].clone()
    };
    DecoderConfig {
        attention_gate: true,
        qk_norm: Some(QkNorm::Heads),
        layers: vec![layer(4, true), layer(2, false), llama().layers[0].clone()],
        ..llama()
    }
}
