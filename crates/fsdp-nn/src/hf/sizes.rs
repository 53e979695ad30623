//! The sizes of a model of any family, and a small model with the same proportions.
//!
//! Equal sizes stay equal and different sizes stay different, because parameters with equal row lengths share a
//! segment.

use std::fmt;
use std::sync::Arc;

use fsdp_core::Error;

use crate::model::{
    Architecture, Decoder, DecoderConfig, DeltaNet, Gpt2, Gpt2Config, LatentAttention, LayerConfig, Mixture,
    SharedExpert,
};
use crate::op::{Gating, Groups};

const KV_HEADS_MAX: usize = 2;
const QUERIES_PER_KV_HEAD_MAX: usize = 4;
const HEADS_MAX: usize = 4;
/// Even, for rotary positions; exceeded if only a part of a head rotates.
const HEAD_DIM_MAX: usize = 4;
/// More than the experts per token, if that was so in the original.
const EXPERTS_SMALL: usize = 4;
const TOP_SMALL: usize = 2;
/// Widths are multiples of this, as those of large models are multiples of larger numbers.
const WIDTH_STEP: usize = 4;

/// The sizes that a family parses from a `config.json`; they describe an architecture.
pub trait Sizes: fmt::Debug + Send + Sync {
    /// Builds the model.
    ///
    /// # Errors
    /// [`Error::Model`] if the description is inconsistent.
    fn build(&self) -> Result<Arc<dyn Architecture>, Error>;

    /// Returns the sizes that all architectures have.
    fn summary(&self) -> Summary;

    /// Returns a small model of the same kind: features that affect correctness are kept, sizes that affect run time
    /// are reduced.
    fn shrink(&self, to: Small) -> Arc<dyn Sizes>;

    /// Returns the same model without a row for padding ([`Summary::padding_row`]).
    fn without_padding_row(&self) -> Arc<dyn Sizes>;
}

/// The target size of a small model.
#[derive(Clone, Copy, Debug)]
pub struct Small {
    /// Maximum number of layers.
    pub layers: usize,
    /// Maximum size of the vocabulary; `None` to keep it.
    pub vocab: Option<usize>,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// What the widths of inputs of linear maps must be multiples of; 1 if they need not be.
    pub width_step: usize,
}

/// Sizes that every model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Number of layers.
    pub layers: usize,
    /// Elements per hidden state.
    pub hidden: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub inner: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Sequence length the model was made for.
    pub positions: usize,
    /// Whether positions are learned parameters, which limits the sequence length.
    pub positions_are_learned: bool,
    /// The row of the embedding that inputs give no gradient.
    pub padding_row: Option<usize>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { layers, hidden, heads, kv_heads, inner, vocab, .. } = self;
        write!(
            f,
            "{layers} layers, hidden {hidden}, heads {heads}/{kv_heads}, ffn {inner}, vocabulary {vocab}"
        )
    }
}

impl Sizes for DecoderConfig {
    fn build(&self) -> Result<Arc<dyn Architecture>, Error> {
        Ok(Arc::new(Decoder::new(self)?))
    }

    fn summary(&self) -> Summary {
        Summary {
            layers: self.layers.len(),
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            inner: self.intermediate_size,
            vocab: self.vocab_size,
            positions: self.max_position_embeddings,
            positions_are_learned: false,
            padding_row: self.padding_row,
        }
    }

    fn shrink(&self, to: Small) -> Arc<dyn Sizes> {
        let kv_heads = self.num_key_value_heads.min(KV_HEADS_MAX);
        let queries = self.num_attention_heads / self.num_key_value_heads;
        let heads = kv_heads * queries.min(QUERIES_PER_KV_HEAD_MAX);
        let head_dim = small_head(self, heads, to.width_step);
        let layers = few(&self.layers, to.layers).into_iter();
        // Keeps windows smaller than the sequence.
        let cut_window = |window: usize| window.min(to.seq_len.div_ceil(2));
        let attention = self.num_attention_heads * self.head_dim;
        let scaled = |size, old, new| scaled(size, old, new, to.width_step.max(WIDTH_STEP));
        let hidden = scaled(self.hidden_size, attention, heads * head_dim);
        let narrow = |size| scaled(size, self.hidden_size, hidden);
        let layers = layers.map(|layer| LayerConfig {
            window: layer.window.map(cut_window),
            mixture: layer.mixture.map(|mixture| small_mixture(mixture, narrow)),
            delta: layer.delta.map(|net| small_delta(net, to.width_step)),
            ..layer
        });
        let vocab_size = cut(self.vocab_size, to.vocab);
        Arc::new(Self {
            vocab_size,
            padding_row: self.padding_row.map(|row| row.min(vocab_size - 1)),
            hidden_size: hidden,
            intermediate_size: narrow(self.intermediate_size),
            latent: self.latent.map(|latent| small_latent(latent, head_dim, narrow)),
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            layers: layers.collect(),
            ..self.clone()
        })
    }

    fn without_padding_row(&self) -> Arc<dyn Sizes> {
        Arc::new(Self { padding_row: None, ..self.clone() })
    }
}

impl Sizes for Gpt2Config {
    fn build(&self) -> Result<Arc<dyn Architecture>, Error> {
        Ok(Arc::new(Gpt2::new(self)?))
    }

    fn summary(&self) -> Summary {
        Summary {
            layers: self.n_layer,
            hidden: self.n_embd,
            heads: self.n_head,
            kv_heads: self.n_head,
            head_dim: self.n_embd / self.n_head,
            inner: self.n_inner,
            vocab: self.vocab_size,
            positions: self.n_positions,
            positions_are_learned: true,
            padding_row: None,
        }
    }

    fn shrink(&self, to: Small) -> Arc<dyn Sizes> {
        let heads = self.n_head.min(HEADS_MAX);
        let hidden = heads * (self.n_embd / self.n_head).min(HEAD_DIM_MAX);
        Arc::new(Self {
            vocab_size: cut(self.vocab_size, to.vocab),
            n_positions: self.n_positions.min(to.seq_len),
            n_embd: hidden,
            n_layer: self.n_layer.min(to.layers),
            n_head: heads,
            n_inner: scaled(self.n_inner, self.n_embd, hidden, WIDTH_STEP),
            ..self.clone()
        })
    }

    fn without_padding_row(&self) -> Arc<dyn Sizes> {
        Arc::new(self.clone())
    }
}

/// A mixture of few experts, in groups as before.
fn small_mixture(mixture: Mixture, narrow: impl Fn(usize) -> usize) -> Mixture {
    let groups = if mixture.gating.groups.restrict() { Groups { count: 2, top: 1 } } else { Groups::ONE };
    Mixture {
        experts: mixture.experts.min(EXPERTS_SMALL),
        top: mixture.top.min(TOP_SMALL),
        inner: narrow(mixture.inner),
        gating: Gating { groups, ..mixture.gating },
        shared: mixture.shared.map(|shared| SharedExpert { inner: narrow(shared.inner), ..shared }),
        ..mixture
    }
}

/// Linear attention of few heads, several of values to a key head if there were, with few elements.
fn small_delta(net: DeltaNet, width_step: usize) -> DeltaNet {
    let key_heads = net.key_heads.min(KV_HEADS_MAX);
    let value_heads = key_heads * (net.value_heads / net.key_heads).min(2);
    DeltaNet {
        key_heads,
        value_heads,
        key_dim: net.key_dim.min(HEAD_DIM_MAX),
        // All value heads together are the input of a map.
        value_dim: net.value_dim.min(HEAD_DIM_MAX.max(width_step.div_ceil(value_heads))),
        ..net
    }
}

/// Latent attention whose heads have few elements, and values that are narrower than queries if they were.
fn small_latent(
    latent: LatentAttention,
    head_dim: usize,
    narrow: impl Fn(usize) -> usize,
) -> LatentAttention {
    let half = head_dim.div_ceil(2);
    LatentAttention {
        query_rank: latent.query_rank.map(&narrow),
        kv_rank: narrow(latent.kv_rank),
        fixed: latent.fixed.min(half),
        rotating: latent.rotating.min(half),
        value: latent.value.min(if latent.value <= latent.fixed { half } else { head_dim }),
        ..latent
    }
}

/// Elements of a small head: the minimum for which every rotated layer still rotates a whole number of pairs, and all heads
/// together are a width that is allowed.
fn small_head(config: &DecoderConfig, heads: usize, width_step: usize) -> usize {
    if config.latent.is_some() {
        return HEAD_DIM_MAX.max(width_step).min(config.head_dim);
    }
    let rotates = |head_dim: usize| {
        let ropes = config.layers.iter().filter_map(|layer| layer.rope.as_ref());
        ropes.map(|rope| rope.rotary_dim(head_dim)).all(|dim| dim >= 2 && dim.is_multiple_of(2))
    };
    let sizes = (HEAD_DIM_MAX..config.head_dim).step_by(2);
    let fits = |head_dim: &usize| rotates(*head_dim) && (heads * head_dim).is_multiple_of(width_step);
    sizes.into_iter().find(fits).unwrap_or(config.head_dim)
}

fn cut(vocab: usize, needed: Option<usize>) -> usize {
    needed.map_or(vocab, |needed| vocab.min(needed))
}

/// Scales `size` by the ratio of `new` to `old`, to a multiple of `step`.
fn scaled(size: usize, old: usize, new: usize, step: usize) -> usize {
    if size == old || new >= old {
        return if size == old { new } else { size };
    }
    let nearest = (size * new / old / step).max(1) * step;
    let different = if nearest == new { nearest + step } else { nearest };
    different.min(size)
}

/// Selects some layers in their order: one of each kind, then the first of the others.
fn few<T: Clone + PartialEq>(layers: &[T], count: usize) -> Vec<T> {
    let count = count.min(layers.len());
    let (first, others): (Vec<usize>, Vec<usize>) =
        (0..layers.len()).partition(|&index| !layers[..index].contains(&layers[index]));
    let mut chosen: Vec<usize> = first.into_iter().chain(others).take(count).collect();
    chosen.sort_unstable();
    chosen.into_iter().map(|index| layers[index].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_sizes_keep_proportions() {
        assert_eq!(scaled(14336, 4096, 32, 4), 112);
        assert_eq!(scaled(4096, 4096, 32, 4), 32);
        assert_eq!(scaled(4100, 4096, 32, 4), 36);
        assert_eq!(scaled(14336, 4096, 64, 64), 192);
    }

    #[test]
    fn small_sizes_stay_unchanged() {
        assert_eq!(scaled(24, 16, 16, 4), 24);
        assert_eq!(cut(300, None), 300);
        assert_eq!(cut(300, Some(512)), 300);
    }

    #[test]
    fn few_layers_cover_kinds_in_order() {
        assert_eq!(few(b"aaaab", 3), b"aab");
        assert_eq!(few(b"aabbc", 4), b"aabc");
        assert_eq!(few(b"abcd", 2), b"ab");
        assert_eq!(few(b"aa", 3), b"aa");
    }
}
