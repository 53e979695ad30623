//! Small sizes with the proportions of large ones.
//!
//! Sizes that are equal stay equal and sizes that differ stay different, because parameters with equal row
//! lengths share a segment.

use fsdp_nn::hf::HfFamily;
use fsdp_nn::model::{Gpt2Config, LlamaConfig};

const KV_HEADS_MAX: usize = 2;
const QUERIES_PER_KV_HEAD_MAX: usize = 4;
const HEADS_MAX: usize = 4;
/// Even, for rotary positions.
const HEAD_DIM_MAX: usize = 4;
/// Widths are multiples of it, as those of large models are of larger numbers.
const WIDTH_STEP: usize = 4;

/// A Llama of at most `layers` layers and `vocab` tokens (`None`: as many as before).
pub(super) fn llama(config: &LlamaConfig, layers: usize, vocab: Option<usize>) -> LlamaConfig {
    let kv_heads = config.num_key_value_heads.min(KV_HEADS_MAX);
    let queries = config.num_attention_heads / config.num_key_value_heads;
    let heads = kv_heads * queries.min(QUERIES_PER_KV_HEAD_MAX);
    let head_dim = config.head_dim.min(HEAD_DIM_MAX);
    let attention = config.num_attention_heads * config.head_dim;
    let hidden = scaled(config.hidden_size, attention, heads * head_dim);
    LlamaConfig {
        vocab_size: cut(config.vocab_size, vocab),
        hidden_size: hidden,
        intermediate_size: scaled(config.intermediate_size, config.hidden_size, hidden),
        num_hidden_layers: config.num_hidden_layers.min(layers),
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        ..config.clone()
    }
}

/// A GPT-2 of at most `layers` layers and `vocab` tokens, with positions for `seq_len` tokens.
pub(super) fn gpt2(config: &Gpt2Config, layers: usize, vocab: Option<usize>, seq_len: usize) -> Gpt2Config {
    let heads = config.n_head.min(HEADS_MAX);
    let hidden = heads * (config.n_embd / config.n_head).min(HEAD_DIM_MAX);
    Gpt2Config {
        vocab_size: cut(config.vocab_size, vocab),
        n_positions: config.n_positions.min(seq_len),
        n_embd: hidden,
        n_layer: config.n_layer.min(layers),
        n_head: heads,
        n_inner: scaled(config.n_inner, config.n_embd, hidden),
        ..config.clone()
    }
}

/// The sizes of a model, for people.
pub(super) fn describe(family: &HfFamily) -> String {
    match family {
        HfFamily::Llama(llama) => format!(
            "{} layers, hidden {}, heads {}/{}, ffn {}, vocabulary {}",
            llama.num_hidden_layers,
            llama.hidden_size,
            llama.num_attention_heads,
            llama.num_key_value_heads,
            llama.intermediate_size,
            llama.vocab_size
        ),
        HfFamily::Gpt2(gpt2) => format!(
            "{} layers, hidden {}, heads {}, inner {}, vocabulary {}",
            gpt2.n_layer, gpt2.n_embd, gpt2.n_head, gpt2.n_inner, gpt2.vocab_size
        ),
    }
}

fn cut(vocab: usize, needed: Option<usize>) -> usize {
    needed.map_or(vocab, |needed| vocab.min(needed))
}

/// The size that is to `new` what `size` is to `old`.
fn scaled(size: usize, old: usize, new: usize) -> usize {
    if size == old || new >= old {
        return if size == old { new } else { size };
    }
    let nearest = (size * new / old / WIDTH_STEP).max(1) * WIDTH_STEP;
    let different = if nearest == new { nearest + WIDTH_STEP } else { nearest };
    different.min(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_their_proportions() {
        assert_eq!(scaled(14336, 4096, 32), 112);
        assert_eq!(scaled(4096, 4096, 32), 32);
        assert_eq!(scaled(4100, 4096, 32), 36);
    }

    #[test]
    fn small_models_stay_as_they_are() {
        assert_eq!(scaled(24, 16, 16), 24);
        assert_eq!(cut(300, None), 300);
        assert_eq!(cut(300, Some(512)), 300);
    }
}
