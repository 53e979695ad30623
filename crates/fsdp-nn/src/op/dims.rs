//! Sizes of operations.

/// How a weight matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// `outputs x inputs`, as `torch.nn.Linear`.
    OutIn,
    /// `inputs x outputs`, as GPT-2's `Conv1D`.
    InOut,
}

/// Sizes of a linear map `y = x W (+ b)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearDims {
    /// Rows of `x` (tokens).
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// Elements from one row of `y` to the next, at least `outputs`: `y` may be a block of columns. The last
    /// row need not be complete: a `y` slice has `(rows - 1) * y_stride + outputs` elements or more.
    pub y_stride: usize,
    /// How the weight is stored.
    pub orientation: Orientation,
}

impl LinearDims {
    /// Elements of a `y` slice, at least.
    pub fn y_len(&self) -> usize {
        self.rows.saturating_sub(1) * self.y_stride + self.outputs
    }
}

/// Sizes of causal self-attention with grouped queries over packed projections.
///
/// A packed row holds `heads` query heads, then `kv_heads` key heads, then `kv_heads` value heads, each of
/// `head_dim` elements; query head `h` reads key/value head `h / (heads / kv_heads)`. Rows are ordered by
/// (sample, position).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionDims {
    /// Samples.
    pub batch: usize,
    /// Positions.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl AttentionDims {
    /// Elements of a packed row.
    pub fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Elements of the output.
    pub fn output_len(&self) -> usize {
        self.rows() * self.heads * self.head_dim
    }

    /// Scores that are computed: every query with itself and all keys before it.
    pub fn scores(&self) -> usize {
        self.batch * self.heads * (self.seq * (self.seq + 1) / 2)
    }
}

/// Sizes of a linear map to logits followed by cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadDims {
    /// Rows (tokens).
    pub rows: usize,
    /// Columns of the hidden states.
    pub hidden: usize,
    /// Classes.
    pub vocab: usize,
    /// Rows whose logits are in memory at once (at least 1); depends on the shape and on
    /// [`Backend::head_chunks`](crate::Backend::head_chunks) alone.
    pub chunk_rows: usize,
}

impl HeadDims {
    /// Logits of a chunk.
    pub fn chunk_len(&self) -> usize {
        self.chunk_rows.clamp(1, self.rows.max(1)) * self.vocab
    }
}

/// A counter-based dropout mask: element `i` of sample `s` is dropped when the generator keyed by `keys[s]`
/// says so at counter `i`; kept elements are scaled by `1 / (1 - p)`.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Probability of dropping, `0 <= p < 1`.
    pub p: f64,
    /// One key per sample, made of (seed, step, sample, site).
    pub keys: &'a [u64],
}

impl Dropout<'_> {
    /// An element is dropped when its 32 random bits are below this: `p` in units of 2^-32.
    pub fn threshold(&self) -> u32 {
        (self.p * 4_294_967_296.0) as u32
    }

    /// The factor of elements that are kept.
    pub fn kept(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
}

/// Targets that do not count in the loss.
pub const IGNORED_TARGET: u32 = u32::MAX;
