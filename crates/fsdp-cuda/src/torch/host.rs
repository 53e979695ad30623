//! `torch-cpu`: libtorch over [`HostMemory`], with the host's kernels wherever ATen has no fused one.
//!
//! ATen's compositions of element-wise operations convert bf16 operands and make temporaries at every step, and its
//! blocked attention multiplies through MKL, which is slow on processors that are not Intel's. The host's kernels go once
//! over the operands.

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_nn::backend::{AttentionDims, Backend, Dropout};
use fsdp_nn::{HostBuffer, HostMemory};

use super::storage::{AttentionOps, TorchStorage, sealed};
use crate::fused::FusedOps;

type In<'a> = Slice<'a, HostBuffer>;
type Out<'a> = SliceMut<'a, HostBuffer>;
type Gradient<'a> = GradientTarget<'a, HostBuffer>;

impl sealed::Sealed for HostMemory {}

impl TorchStorage for HostMemory {
    fn device(&self) -> tch::Device {
        tch::Device::Cpu
    }

    fn address(&self, slice: In<'_>) -> Result<*const u8, Error> {
        HostMemory::address(self, slice)
    }

    fn address_mut(&self, slice: Out<'_>) -> Result<*mut u8, Error> {
        HostMemory::address_mut(self, slice)
    }

    fn enter(&self) -> Result<(), Error> {
        Ok(())
    }

    fn fused(&self) -> Option<&dyn FusedOps<HostBuffer>> {
        Some(self)
    }

    fn attention(&self) -> Option<&dyn AttentionOps<HostBuffer>> {
        Some(self)
    }
}

impl AttentionOps<HostBuffer> for HostMemory {
    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: Out<'_>,
        lse: Out<'_>,
    ) -> Result<(), Error> {
        Backend::attention(self, dims, dropout, qkv, y, lse)
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
        Backend::attention_backward(self, dims, dropout, qkv, y, lse, dy, dqkv)
    }
}

impl FusedOps<HostBuffer> for HostMemory {
    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        y: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<(), Error> {
        Backend::rms_norm(self, width, eps, x, weight, y, rstd)
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
        Backend::rms_norm_backward(self, width, x, weight, rstd, dy, dx, accumulate, dweight)
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
        Backend::layer_norm(self, width, eps, x, weight, bias, y, stats)
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
        Backend::layer_norm_backward_input(self, width, x, weight, stats, dy, dx, accumulate)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        Backend::layer_norm_backward_weight(self, width, x, stats, dy, dweight)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        backward: bool,
    ) -> Result<(), Error> {
        Backend::rope(self, dims, inverse_frequencies, qkv, backward)
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        Backend::swiglu(self, gate, up, y)
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        Backend::swiglu_backward(self, gate, up, dy, dgate, dup)
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        Backend::gelu(self, x, y)
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        Backend::gelu_backward(self, x, dy, dx)
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        Backend::dropout(self, dropout, x)
    }

    fn cross_entropy(
        &self,
        vocab: usize,
        logits: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
    ) -> Result<(), Error> {
        HostMemory::cross_entropy(self, vocab, logits, targets, losses)
    }

    fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: Out<'_>,
        targets: In<'_>,
        losses: Out<'_>,
    ) -> Result<(), Error> {
        HostMemory::cross_entropy_backward(self, vocab, logits, targets, losses)
    }
}
