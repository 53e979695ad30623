//! Causal attention over packed rows: by libtorch's fused kernels if they support the operands, composed otherwise.

mod composed;
mod sinks;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_nn::backend::{BatchFacts, Operands};
use fsdp_nn::op::{Attention, AttentionDims, Scores};
use tch::{Device, Tensor};

use self::composed::Composed;
use super::size::int;
use crate::ffi::torch::{self as ffi, CudaAttention};
use crate::torch::error::Failure;
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

/// libtorch's CUDA kernels need a head size that is a multiple of this, because operands are not padded here.
const HEAD_DIM_UNIT: usize = 8;

/// How a call is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionKernel {
    /// libtorch's blocked kernel for the host.
    Host,
    /// The CUDA kernel of libtorch that PyTorch would choose.
    Cuda(CudaAttention),
    /// The same with keys and values repeated for every query head, if no kernel supports grouped queries: those for
    /// f32 do not.
    Repeated(CudaAttention),
    /// Scores in memory, a bounded number at a time: for dropout, whose masks this project defines, for capped scores,
    /// for windows, and for head sizes that the kernels do not support.
    Composed,
}

impl AttentionKernel {
    /// Chooses the kernel; the same for forward and backward over the same operands, because the choice depends only on
    /// their shapes and dtype, the device, and process-wide settings.
    fn of(dims: AttentionDims, scores: Scores, operands: [&Tensor; 3]) -> Result<Self, Failure> {
        let kernel = if AttentionKernel::is_composed(scores) {
            AttentionKernel::Composed
        } else if operands[0].device() == Device::Cpu {
            AttentionKernel::Host
        } else {
            // Repeated keys and values have the sizes and dtype of queries, and the choice depends on nothing else.
            let [q, k, v] = operands;
            AttentionKernel::of_kernels(dims, |repeated| {
                Ok(ffi::choose_attention(if repeated { [q, q, q] } else { [q, k, v] })?)
            })?
        };
        *LAST_KERNEL.lock().unwrap_or_else(PoisonError::into_inner) = Some(kernel.name());
        Ok(kernel)
    }

    /// Whether no kernel supports these scores.
    fn is_composed(scores: Scores) -> bool {
        Scores { scale: None, packed: false, ..scores } != Scores::default()
    }

    /// The kernel on a CUDA device. `choose` returns libtorch's choice for the operands as they are or, if its argument
    /// is true, with repeated keys and values.
    fn of_kernels(
        dims: AttentionDims,
        choose: impl Fn(bool) -> Result<Option<CudaAttention>, Failure>,
    ) -> Result<Self, Failure> {
        if !dims.head_dim.is_multiple_of(HEAD_DIM_UNIT) {
            return Ok(AttentionKernel::Composed);
        }
        let is_grouped = dims.heads != dims.kv_heads;
        match choose(false)? {
            Some(kernel) if !is_grouped || kernel.takes_groups() => Ok(AttentionKernel::Cuda(kernel)),
            None if !is_grouped => Ok(AttentionKernel::Composed),
            _ => Ok(choose(true)?.map_or(AttentionKernel::Composed, AttentionKernel::Repeated)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            AttentionKernel::Host => "libtorch's for the host",
            AttentionKernel::Cuda(CudaAttention::Flash) | AttentionKernel::Repeated(CudaAttention::Flash) => {
                "FlashAttention"
            }
            AttentionKernel::Cuda(CudaAttention::Efficient)
            | AttentionKernel::Repeated(CudaAttention::Efficient) => "memory-efficient",
            AttentionKernel::Cuda(CudaAttention::Cudnn) | AttentionKernel::Repeated(CudaAttention::Cudnn) => {
                "cuDNN"
            }
            AttentionKernel::Composed => "composed",
        }
    }
}

/// The name of the kernel of the last call in this process.
static LAST_KERNEL: Mutex<Option<&'static str>> = Mutex::new(None);

/// The kernels of the last attention that libtorch computed in this process; `None` if there was none.
pub fn attention_kernels() -> Option<&'static str> {
    *LAST_KERNEL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn attention(
        &self,
        op: &Attention,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let batch = operands.batch;
        match op {
            Attention::Rope { dims, rope, positions, backward } => {
                let positions = positions.zip(operands.reads.first().copied());
                let ([], [qkv], _) = operands.split();
                self.aten_rope(*dims, rope, positions, qkv.slice, *backward)?;
            }
            Attention::Forward { dims, scores } => {
                let ([qkv], [y, lse], _) = operands.split();
                self.aten_attention(*dims, (*scores, batch), qkv, y.slice, lse.slice)?;
            }
            Attention::Backward { dims, scores } => {
                let (reads, [dqkv], _) = operands.split();
                self.aten_attention_backward(*dims, (*scores, batch), reads, dqkv.slice)?;
            }
            Attention::Sink { dims } => {
                let ([sinks], [y, lse], _) = operands.split();
                self.aten_sink(*dims, sinks, y.slice, lse.slice)?;
            }
            Attention::SinkBackward { dims } => {
                let (reads, [dsinks], _) = operands.split();
                self.aten_sink_backward(*dims, reads, dsinks.slice)?;
            }
        }
        Ok(())
    }

    fn aten_attention(
        &self,
        dims: AttentionDims,
        facts: (Scores, BatchFacts<'_>),
        qkv: In<'_, D>,
        y: Out<'_, D>,
        lse: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
        let y = self.view_mut(y, &rows(dims))?.f_transpose(1, 2)?;
        let lse = self.view_mut(lse, &[dims.batch, dims.heads, dims.seq].map(int))?;
        for span in Span::all(dims, facts) {
            let of = |tensor: &Tensor| span.narrow(tensor, 2);
            let (qkv, mut y, mut lse) = ([of(&q)?, of(&k)?, of(&v)?], of(&y)?, of(&lse)?);
            self.attend(&span, qkv.each_ref(), &mut y, &mut lse)?;
        }
        Ok(())
    }

    fn attend(
        &self,
        span: &Span<'_>,
        [q, k, v]: [&Tensor; 3],
        y: &mut Tensor,
        lse: &mut Tensor,
    ) -> Result<(), Failure> {
        let (dims, (scores, _)) = (span.dims, span.facts);
        let scale = scores.scale(dims.head_dim);
        match AttentionKernel::of(dims, scores, [q, k, v])? {
            AttentionKernel::Host => {
                let (output, log_sums) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                    q,
                    k,
                    v,
                    0.0,
                    true,
                    None::<Tensor>,
                    scores.scale,
                )?;
                y.f_copy_(&output)?;
                lse.f_copy_(&log_sums)?;
            }
            AttentionKernel::Cuda(kernel) => ffi::attention(kernel, scale, [q, k, v], y, lse)?,
            AttentionKernel::Repeated(kernel) => {
                let [k, v] = [repeated(dims, k)?, repeated(dims, v)?];
                ffi::attention(kernel, scale, [q, &k, &v], y, lse)?;
            }
            AttentionKernel::Composed => {
                Composed::new(self, dims, span.facts).forward([q, k, v], [y, lse])?
            }
        }
        Ok(())
    }

    fn aten_attention_backward(
        &self,
        dims: AttentionDims,
        facts: (Scores, BatchFacts<'_>),
        [qkv, y, lse, dy]: [In<'_, D>; 4],
        dqkv: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
        let dqkv = self.view_mut(dqkv, &packed(dims))?;
        let [y, dy] =
            [self.view(y, &rows(dims))?.f_transpose(1, 2)?, self.view(dy, &rows(dims))?.f_transpose(1, 2)?];
        let lse = self.view(lse, &[dims.batch, dims.heads, dims.seq].map(int))?;
        for span in Span::all(dims, facts) {
            let of = |tensor: &Tensor| span.narrow(tensor, 2);
            let (qkv, saved) = ([of(&q)?, of(&k)?, of(&v)?], [of(&y)?, of(&lse)?.f_contiguous()?]);
            let mut dqkv = span.narrow(&dqkv, 1)?;
            self.attend_backward(&span, qkv.each_ref(), saved.each_ref(), &of(&dy)?, &mut dqkv)?;
        }
        Ok(())
    }

    fn attend_backward(
        &self,
        span: &Span<'_>,
        [q, k, v]: [&Tensor; 3],
        [y, lse]: [&Tensor; 2],
        dy: &Tensor,
        dqkv: &mut Tensor,
    ) -> Result<(), Failure> {
        let (dims, (scores, _)) = (span.dims, span.facts);
        let scale = scores.scale(dims.head_dim);
        match AttentionKernel::of(dims, scores, [q, k, v])? {
            AttentionKernel::Host => {
                let gradients = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                    dy,
                    q,
                    k,
                    v,
                    y,
                    lse,
                    0.0,
                    true,
                    None::<Tensor>,
                    scores.scale,
                )?;
                ffi::pack_heads([&gradients.0, &gradients.1, &gradients.2], dqkv)?;
            }
            AttentionKernel::Cuda(kernel) => {
                ffi::attention_backward(kernel, scale, dy, [q, k, v], [y, lse], dqkv)?
            }
            AttentionKernel::Repeated(kernel) => {
                let [k, v] = [repeated(dims, k)?, repeated(dims, v)?];
                ffi::attention_backward(kernel, scale, dy, [q, &k, &v], [y, lse], dqkv)?;
            }
            AttentionKernel::Composed => {
                let [dq, dk, dv] = heads(dims, dqkv)?;
                Composed::new(self, dims, span.facts).backward([q, k, v], [y, lse, dy], [&dq, &dk, &dv])?;
            }
        }
        Ok(())
    }
}

/// The part computed by one kernel call: all samples, or one document.
struct Span<'a> {
    dims: AttentionDims,
    facts: (Scores, BatchFacts<'a>),
    /// For a document: its sample, its first position there, and its length.
    document: Option<[i64; 3]>,
}

impl<'a> Span<'a> {
    /// Kernels take documents one by one; the composition handles all documents together.
    fn all(dims: AttentionDims, (scores, batch): (Scores, BatchFacts<'a>)) -> Vec<Self> {
        if !scores.packed || AttentionKernel::is_composed(scores) {
            return vec![Self { dims, facts: (scores, batch), document: None }];
        }
        let document = |rows: &Range<usize>| Self {
            dims: AttentionDims { batch: 1, seq: rows.len(), ..dims },
            facts: (Scores { packed: false, ..scores }, BatchFacts::default()),
            document: Some([rows.start / dims.seq, rows.start % dims.seq, rows.len()].map(int)),
        };
        batch.documents.iter().map(document).collect()
    }

    /// Its part of a tensor of all samples; `positions` is the dimension of positions.
    fn narrow(&self, tensor: &Tensor, positions: i64) -> Result<Tensor, Failure> {
        let Some([sample, first, len]) = self.document else { return Ok(tensor.shallow_clone()) };
        Ok(tensor.f_narrow(0, sample, 1)?.f_narrow(positions, first, len)?)
    }
}

/// The shape of packed projections: (batch, positions, heads, elements).
fn packed(dims: AttentionDims) -> [i64; 4] {
    [dims.batch, dims.seq, dims.heads + 2 * dims.kv_heads, dims.head_dim].map(int)
}

fn rows(dims: AttentionDims) -> [i64; 4] {
    [dims.batch, dims.seq, dims.heads, dims.head_dim].map(int)
}

/// Queries, keys and values of packed rows, as (batch, heads, positions, elements).
fn heads(dims: AttentionDims, packed: &Tensor) -> Result<[Tensor; 3], Failure> {
    let (heads, kv_heads) = (int(dims.heads), int(dims.kv_heads));
    let part = |first, count| packed.f_narrow(2, first, count)?.f_transpose(1, 2);
    Ok([part(0, heads)?, part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?])
}

/// Keys or values, repeated for every query head that reads them, in the memory order of packed rows: (batch,
/// positions, heads, elements).
fn repeated(dims: AttentionDims, heads: &Tensor) -> Result<Tensor, Failure> {
    let group = int(dims.heads / dims.kv_heads);
    Ok(heads.f_transpose(1, 2)?.f_repeat_interleave_self_int(group, 2, None)?.f_transpose(1, 2)?)
}
