//! The ops contract: what a backend computes.
//!
//! Operations are coarse, each with a forward and a backward, so that a fused kernel can stand behind each.
//! All outputs are buffers that the caller allocated (so a shape-only backend predicts memory by running the
//! same model code); all matrices are row-major; statistics are kept in the master dtype
//! ([`DType::master`](fsdp_core::DType::master)) of the tensors' dtype. Unless said otherwise every tensor of
//! a call has the same float dtype, arithmetic is done in the master dtype, and results are rounded once.
//!
//! Gradients are written or added as [`GradientTarget::accumulate`] says. Work goes to the compute queue.

use fsdp_core::Error;
use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;

pub use crate::chunks::HeadChunks;

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
    /// Rows whose logits are in memory at once (at least 1); depends on the shape and on [`Backend::head_chunks`] alone.
    pub chunk_rows: usize,
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

/// A memory that can compute.
///
/// # Errors
/// All methods: those of the memory ([`Error::Shared`], [`Error::Released`], [`Error::OutOfMemory`]).
pub trait Backend: Memory {
    /// `y = x W + b`.
    fn linear(
        &self,
        dims: LinearDims,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        bias: Option<Slice<'_, Self::Buffer>>,
        y: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// `dx = dy W^T`, or added to `dx`.
    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        dx: SliceMut<'_, Self::Buffer>,
        accumulate: bool,
    ) -> Result<(), Error>;

    /// `dW = x^T dy`, in the weight's orientation; the target may have another float dtype.
    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dweight: GradientTarget<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// `db = ` column sums of `dy`; the target may have another float dtype.
    fn linear_backward_bias(
        &self,
        dims: LinearDims,
        dy: Slice<'_, Self::Buffer>,
        dbias: GradientTarget<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Row `i` of `y` = row `ids[i]` of `table` (rows of `width`). With `add`, added to `y`.
    fn embedding(
        &self,
        width: usize,
        ids: Slice<'_, Self::Buffer>,
        table: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
        add: bool,
    ) -> Result<(), Error>;

    /// Adds row `i` of `dy` to row `ids[i]` of the gradient, in the order of `i`; the target may have another
    /// float dtype.
    fn embedding_backward(
        &self,
        width: usize,
        ids: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dtable: GradientTarget<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Root-mean-square norm over rows of `width`: `y = x * rstd * weight`; `rstd` (master dtype) per row.
    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
        rstd: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Backward of [`Backend::rms_norm`]; adds to `dx` when `accumulate`.
    fn rms_norm_backward(
        &self,
        width: usize,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        rstd: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dx: SliceMut<'_, Self::Buffer>,
        accumulate: bool,
        dweight: Option<GradientTarget<'_, Self::Buffer>>,
    ) -> Result<(), Error>;

    /// Layer norm over rows of `width`: `y = (x - mean) * rstd * weight + bias`; `stats` (master dtype) holds
    /// mean and rstd of each row, interleaved.
    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        bias: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
        stats: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Backward of [`Backend::layer_norm`] to its input; adds to `dx` when `accumulate`.
    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        stats: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dx: SliceMut<'_, Self::Buffer>,
        accumulate: bool,
    ) -> Result<(), Error>;

    /// The gradient of the weight of a layer norm: column sums of `dy * (x - mean) * rstd`. (The gradient of
    /// the bias is [`Backend::linear_backward_bias`].)
    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: Slice<'_, Self::Buffer>,
        stats: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dweight: GradientTarget<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Rotary position embedding of the query and key heads of packed rows, in place, in the convention of
    /// Hugging Face (element `i` is rotated with element `i + head_dim / 2`). `inverse_frequencies` has
    /// `head_dim / 2` entries; `backward` rotates the other way.
    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: SliceMut<'_, Self::Buffer>,
        backward: bool,
    ) -> Result<(), Error>;

    /// Causal attention: `y` (rows of `heads * head_dim`) and the log-sum-exp of every (sample, head,
    /// position) in the master dtype. Scores are scaled by `1 / sqrt(head_dim)`. Dropout applies to the
    /// probabilities; element index `(head * seq + query) * seq + key`.
    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
        lse: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Backward of [`Backend::attention`]: overwrites the packed `dqkv`.
    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: Slice<'_, Self::Buffer>,
        y: Slice<'_, Self::Buffer>,
        lse: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dqkv: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// `y = silu(gate) * up`, element by element.
    fn swiglu(
        &self,
        gate: Slice<'_, Self::Buffer>,
        up: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Backward of [`Backend::swiglu`]: overwrites `dgate` and `dup`.
    fn swiglu_backward(
        &self,
        gate: Slice<'_, Self::Buffer>,
        up: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dgate: SliceMut<'_, Self::Buffer>,
        dup: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// [`Backend::swiglu_backward`] that leaves the output of [`Backend::swiglu`] where `dy` was: for whoever did not
    /// keep it.
    fn swiglu_backward_again(
        &self,
        gate: Slice<'_, Self::Buffer>,
        up: Slice<'_, Self::Buffer>,
        dy: SliceMut<'_, Self::Buffer>,
        dgate: SliceMut<'_, Self::Buffer>,
        dup: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error> {
        self.swiglu_backward(gate, up, dy.as_slice(), dgate, dup)?;
        self.swiglu(gate, up, dy)
    }

    /// GELU in the tanh form (`gelu_new`), element by element.
    fn gelu(&self, x: Slice<'_, Self::Buffer>, y: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// Backward of [`Backend::gelu`]: overwrites `dx`.
    fn gelu_backward(
        &self,
        x: Slice<'_, Self::Buffer>,
        dy: Slice<'_, Self::Buffer>,
        dx: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// [`Backend::gelu_backward`] that leaves the output of [`Backend::gelu`] where `dy` was: for whoever did not keep it.
    fn gelu_backward_again(
        &self,
        x: Slice<'_, Self::Buffer>,
        dy: SliceMut<'_, Self::Buffer>,
        dx: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error> {
        self.gelu_backward(x, dy.as_slice(), dx)?;
        self.gelu(x, dy)
    }

    /// `y = a + b`, element by element.
    fn add(
        &self,
        a: Slice<'_, Self::Buffer>,
        b: Slice<'_, Self::Buffer>,
        y: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Dropout in place; applied to a gradient it is its own backward. The samples divide the buffer evenly.
    fn dropout(&self, dropout: Dropout<'_>, x: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// How many rows of logits the head makes at once. Predictions of memory must be made for the same.
    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Small
    }

    /// Cross-entropy of `logits = x W^T` (`weight` is `vocab x hidden`) against `targets` (u32;
    /// [`IGNORED_TARGET`] does not count). `losses` (f64) gets one entry per row, 0 where ignored. `logits`
    /// (master dtype, `chunk_rows * vocab`) is scratch.
    fn head_loss(
        &self,
        dims: HeadDims,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        targets: Slice<'_, Self::Buffer>,
        losses: SliceMut<'_, Self::Buffer>,
        logits: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// [`Backend::head_loss`] with the gradients of the **sum** of losses: overwrites `dx`; `dweight` is
    /// `None` when the head is frozen. The gradient of the logits may be rounded to the tensors' dtype before the two
    /// products: devices multiply operands of one dtype. `dlogits` is scratch for that, as long as `logits`, and there when
    /// [`HeadChunks::round`] says so.
    fn head_loss_backward(
        &self,
        dims: HeadDims,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        targets: Slice<'_, Self::Buffer>,
        losses: SliceMut<'_, Self::Buffer>,
        logits: SliceMut<'_, Self::Buffer>,
        dlogits: Option<SliceMut<'_, Self::Buffer>>,
        dx: SliceMut<'_, Self::Buffer>,
        dweight: Option<GradientTarget<'_, Self::Buffer>>,
    ) -> Result<(), Error>;

    /// `logits = x W^T` in the master dtype, for all rows: for callers who want the predictions themselves.
    fn head_logits(
        &self,
        dims: HeadDims,
        x: Slice<'_, Self::Buffer>,
        weight: Slice<'_, Self::Buffer>,
        logits: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;
}
