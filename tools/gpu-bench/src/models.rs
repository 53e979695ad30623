//! The models that are known by name; bench/gpu/fsdp2_peer.py has the same ones.

use clap::ValueEnum;
use serde_json::{Value, json};

/// A model by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelName {
    /// GPT-2, 12 layers of 768, 1024 tokens
    #[value(name = "gpt2-124m")]
    Gpt2Small,
    /// Llama, 16 layers of 2048, tied head, 2048 tokens
    #[value(name = "llama-1.2b")]
    LlamaBillion,
    /// Llama, 2 layers of 64: to try the command
    #[value(name = "llama-tiny")]
    LlamaTiny,
}

/// A model and its work per step.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// `config.json`.
    pub(crate) config: Value,
    /// Module classes to wrap.
    pub(crate) wrap: &'static str,
    /// Tokens per sequence.
    pub(crate) seq: usize,
    /// Sequences per step, in one micro-batch.
    pub(crate) batch: usize,
    pub(crate) vocab: usize,
    pub(crate) layers: usize,
    /// Heads times head dim.
    pub(crate) width: usize,
}

impl ModelName {
    pub(crate) fn workload(self) -> Workload {
        match self {
            ModelName::Gpt2Small => Workload {
                config: json!({
                    "model_type": "gpt2", "vocab_size": 50304, "n_embd": 768, "n_layer": 12, "n_head": 12,
                    "n_positions": 1024, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                }),
                wrap: "GPT2Block",
                seq: 1024,
                batch: 64,
                vocab: 50304,
                layers: 12,
                width: 768,
            },
            ModelName::LlamaBillion => {
                let workload = llama(128_256, 2048, 16, LayerDims { heads: 32, kv_heads: 8, ffn: 8192 });
                Workload { seq: 2048, batch: 8, ..workload }
            }
            ModelName::LlamaTiny => {
                let workload = llama(512, 64, 2, LayerDims { heads: 4, kv_heads: 2, ffn: 128 });
                Workload { seq: 64, batch: 4, ..workload }
            }
        }
    }
}

/// Dimensions within a layer.
struct LayerDims {
    heads: usize,
    kv_heads: usize,
    ffn: usize,
}

/// A Llama for sequences of 2048 tokens, one per step.
fn llama(vocab: usize, width: usize, layers: usize, dims: LayerDims) -> Workload {
    let seq = 2048;
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": dims.ffn,
        "num_hidden_layers": layers, "num_attention_heads": dims.heads, "num_key_value_heads": dims.kv_heads,
        "max_position_embeddings": seq, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    Workload { config, wrap: "LlamaDecoderLayer", seq, batch: 1, vocab, layers, width }
}
