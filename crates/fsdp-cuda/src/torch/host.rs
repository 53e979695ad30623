//! `torch-cpu`: libtorch over [`HostMemory`], with the host's kernels wherever ATen has no fused one.
//!
//! ATen's compositions of element-wise operations convert bf16 operands and make temporaries at every step, and its
//! blocked attention multiplies through MKL, which is slow on processors that are not Intel's. The host's kernels go once
//! over the operands.

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{Error, Queue};
use fsdp_nn::backend::{AttentionDims, Backend, Dropout};
use fsdp_nn::{HostBuffer, HostMemory};

use super::storage::{AttentionOps, Fused, TorchStorage, sealed};
use crate::fused::FusedOps;

type In<'a> = Slice<'a, HostBuffer>;
type Out<'a> = SliceMut<'a, HostBuffer>;
type Gradient<'a> = GradientTarget<'a, HostBuffer>;

impl sealed::Sealed for HostMemory {}

impl TorchStorage for HostMemory {
    fn device(&self) -> tch::Device {
        tch::Device::Cpu
    }

    fn address(&self, _queue: Queue, slice: In<'_>) -> Result<*const u8, Error> {
        HostMemory::address(self, slice)
    }

    fn address_mut(&self, _queue: Queue, slice: Out<'_>) -> Result<*mut u8, Error> {
        HostMemory::address_mut(self, slice)
    }

    fn enter(&self, _queue: Queue) -> Result<(), Error> {
        Ok(())
    }

    fn fused(&self) -> Option<Fused<'_, HostBuffer>> {
        Some(Fused::Made(Box::new(HostKernels(self))))
    }

    fn attention(&self) -> Option<Box<dyn AttentionOps<HostBuffer> + '_>> {
        Some(Box::new(HostKernels(self)))
    }
}

/// The kernels of the host backend under the names of this crate. (Not [`HostMemory`] itself: it has operations of the same
/// names.)
struct HostKernels<'a>(&'a HostMemory);

impl AttentionOps<HostBuffer> for HostKernels<'_> {
    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: Out<'_>,
        lse: Out<'_>,
    ) -> Result<(), Error> {
        Backend::attention(self.0, dims, dropout, qkv, y, lse)
    }

    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: In<'_>,
        lse: In<'_>,
        dy: In<'_>,
        dqkv: Out<'_>,
    ) -> Result<(), Error> {
        self.0.attention_backward(dims, dropout, qkv, y, lse, dy, dqkv)
    }
}

impl FusedOps<HostBuffer> for HostKernels<'_> {
    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        y: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<(), Error> {
        self.0.rms_norm(width, eps, x, weight, y, rstd)
    }

    fn rms_norm_backward(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        rstd: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        self.0.rms_norm_backward(width, x, weight, rstd, dy, dx, accumulate, dweight)
    }

    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        bias: In<'_>,
        y: Out<'_>,
        stats: Out<'_>,
    ) -> Result<(), Error> {
        self.0.layer_norm(width, eps, x, weight, bias, y, stats)
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.0.layer_norm_backward_input(width, x, weight, stats, dy, dx, accumulate)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        self.0.layer_norm_backward_weight(width, x, stats, dy, dweight)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        backward: bool,
    ) -> Result<(), Error> {
        self.0.rope(dims, inverse_frequencies, qkv, backward)
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        self.0.swiglu(gate, up, y)
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        self.0.swiglu_backward(gate, up, dy, dgate, dup)
    }

    fn swiglu_backward_again(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: Out<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        self.0.swiglu_backward_again(gate, up, dy, dgate, dup)
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        self.0.gelu(x, y)
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        self.0.gelu_backward(x, dy, dx)
    }

    fn gelu_backward_again(&self, x: In<'_>, dy: Out<'_>, dx: Out<'_>) -> Result<(), Error> {
        self.0.gelu_backward_again(x, dy, dx)
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        self.0.dropout(dropout, x)
    }

    fn cross_entropy(
        &self,
        vocab: usize,
        logits: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
    ) -> Result<(), Error> {
        self.0.cross_entropy(vocab, logits, targets, losses)
    }

    fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: Out<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        gradient: Option<Out<'_>>,
    ) -> Result<(), Error> {
        let Some(gradient) = gradient else {
            return self.0.cross_entropy_backward(vocab, logits, targets, losses);
        };
        let (buffer, offset, len) = (logits.buffer, logits.offset, logits.len);
        self.0.cross_entropy_backward(vocab, SliceMut::new(&mut *buffer, offset, len), targets, losses)?;
        self.0.copy(Queue::Compute, Slice::new(buffer, offset, len), gradient)
    }
}
