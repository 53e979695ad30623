//! Operations that have a kernel of ours, for backends that compute the rest in another way.
//!
//! Arguments, their checks and their meaning are those of [`Backend`](fsdp_nn::Backend), where the operation
//! has the same name there. Work goes to the compute queue.

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_nn::backend::{AttentionDims, Dropout};

/// Fused operations over buffers of type `B`.
///
/// # Errors
/// All methods: those of the memory.
pub trait FusedOps<B> {
    /// As [`Backend::rms_norm`](fsdp_nn::Backend::rms_norm).
    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: Slice<'_, B>,
        weight: Slice<'_, B>,
        y: SliceMut<'_, B>,
        rstd: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::rms_norm_backward`](fsdp_nn::Backend::rms_norm_backward).
    fn rms_norm_backward(
        &self,
        width: usize,
        x: Slice<'_, B>,
        weight: Slice<'_, B>,
        rstd: Slice<'_, B>,
        dy: Slice<'_, B>,
        dx: SliceMut<'_, B>,
        accumulate: bool,
        dweight: Option<GradientTarget<'_, B>>,
    ) -> Result<(), Error>;

    /// As [`Backend::layer_norm`](fsdp_nn::Backend::layer_norm).
    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: Slice<'_, B>,
        weight: Slice<'_, B>,
        bias: Slice<'_, B>,
        y: SliceMut<'_, B>,
        stats: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::layer_norm_backward_input`](fsdp_nn::Backend::layer_norm_backward_input).
    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: Slice<'_, B>,
        weight: Slice<'_, B>,
        stats: Slice<'_, B>,
        dy: Slice<'_, B>,
        dx: SliceMut<'_, B>,
        accumulate: bool,
    ) -> Result<(), Error>;

    /// As [`Backend::layer_norm_backward_weight`](fsdp_nn::Backend::layer_norm_backward_weight).
    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: Slice<'_, B>,
        stats: Slice<'_, B>,
        dy: Slice<'_, B>,
        dweight: GradientTarget<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::rope`](fsdp_nn::Backend::rope).
    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: SliceMut<'_, B>,
        backward: bool,
    ) -> Result<(), Error>;

    /// As [`Backend::swiglu`](fsdp_nn::Backend::swiglu).
    fn swiglu(&self, gate: Slice<'_, B>, up: Slice<'_, B>, y: SliceMut<'_, B>) -> Result<(), Error>;

    /// As [`Backend::swiglu_backward`](fsdp_nn::Backend::swiglu_backward).
    fn swiglu_backward(
        &self,
        gate: Slice<'_, B>,
        up: Slice<'_, B>,
        dy: Slice<'_, B>,
        dgate: SliceMut<'_, B>,
        dup: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::swiglu_backward_again`](fsdp_nn::Backend::swiglu_backward_again).
    fn swiglu_backward_again(
        &self,
        gate: Slice<'_, B>,
        up: Slice<'_, B>,
        dy: SliceMut<'_, B>,
        dgate: SliceMut<'_, B>,
        dup: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::gelu`](fsdp_nn::Backend::gelu).
    fn gelu(&self, x: Slice<'_, B>, y: SliceMut<'_, B>) -> Result<(), Error>;

    /// As [`Backend::gelu_backward`](fsdp_nn::Backend::gelu_backward).
    fn gelu_backward(&self, x: Slice<'_, B>, dy: Slice<'_, B>, dx: SliceMut<'_, B>) -> Result<(), Error>;

    /// As [`Backend::gelu_backward_again`](fsdp_nn::Backend::gelu_backward_again).
    fn gelu_backward_again(
        &self,
        x: Slice<'_, B>,
        dy: SliceMut<'_, B>,
        dx: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::dropout`](fsdp_nn::Backend::dropout).
    fn dropout(&self, dropout: Dropout<'_>, x: SliceMut<'_, B>) -> Result<(), Error>;

    /// The losses of a chunk of rows whose logits (`targets.len * vocab` of any float dtype) are there: one
    /// `f64` per row, 0 for [`IGNORED_TARGET`](fsdp_nn::backend::IGNORED_TARGET). A target that is no class
    /// makes its loss not a number: it is not looked at on the host.
    fn cross_entropy(
        &self,
        vocab: usize,
        logits: Slice<'_, B>,
        targets: Slice<'_, B>,
        losses: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// [`FusedOps::cross_entropy`] with the gradient of the **sum** of losses: `softmax - one_hot`, and zeros for
    /// rows whose target does not count. It goes to `gradient`, rounded to its dtype, whose master dtype is that of
    /// the logits; or where the logits were, if there is none.
    fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: SliceMut<'_, B>,
        targets: Slice<'_, B>,
        losses: SliceMut<'_, B>,
        gradient: Option<SliceMut<'_, B>>,
    ) -> Result<(), Error>;
}
