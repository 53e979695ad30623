//! Causal attention over packed rows: by libtorch's fused kernels where they take the operands, else composed.

use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp_core::DType;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_nn::backend::{AttentionDims, Dropout};
use tch::{Device, Kind, Tensor};

use super::int;
use super::pointwise::factors;
use crate::ffi::torch::{self as ffi, CudaAttention};
use crate::torch::error::{Done, Failure};
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

/// What must divide the size of a head for libtorch's kernels of CUDA devices, which here get no padded copies.
const HEAD_DIM_UNIT: usize = 8;

/// How a call is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// libtorch's blocked kernel for the host.
    Host,
    /// One of libtorch's kernels for CUDA devices: the one that PyTorch chooses for its own programs.
    Cuda(CudaAttention),
    /// Scores in memory: for dropout, whose masks are ours, and for heads that the kernels do not take.
    Composed,
}

impl Way {
    /// Forward and backward of the same operands go the same way: the choice depends on their shapes and dtype, the
    /// device, and settings of the process.
    fn of(
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        operands: [&Tensor; 3],
    ) -> Result<Self, Failure> {
        let way = if dropout.is_some() {
            Way::Composed
        } else if operands[0].device() == Device::Cpu {
            Way::Host
        } else {
            Way::of_kernel(dims, ffi::choose_attention(operands)?)
        };
        way.note();
        Ok(way)
    }

    /// The way of a kernel that was chosen for a CUDA device, if it takes the operands as they are.
    fn of_kernel(dims: AttentionDims, chosen: Option<CudaAttention>) -> Self {
        match chosen {
            Some(CudaAttention::Efficient) if dims.heads != dims.kv_heads => Way::Composed,
            Some(kernel) if dims.head_dim.is_multiple_of(HEAD_DIM_UNIT) => Way::Cuda(kernel),
            _ => Way::Composed,
        }
    }

    /// Keeps the name for whoever asks what has run.
    fn note(self) {
        let name = match self {
            Way::Host => 1,
            Way::Composed => 2,
            Way::Cuda(CudaAttention::Flash) => 3,
            Way::Cuda(CudaAttention::Efficient) => 4,
            Way::Cuda(CudaAttention::Cudnn) => 5,
        };
        LAST.store(name, Ordering::Relaxed);
    }
}

/// How the last call of this process was computed: an index of [`NAMES`].
static LAST: AtomicUsize = AtomicUsize::new(0);
const NAMES: [Option<&str>; 6] = [
    None,
    Some("libtorch's for the host"),
    Some("composed"),
    Some("FlashAttention"),
    Some("memory-efficient"),
    Some("cuDNN"),
];

/// Which kernels ran the last attention that libtorch computed in this process, if any.
pub fn attention_kernels() -> Option<&'static str> {
    NAMES[LAST.load(Ordering::Relaxed)]
}

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn aten_attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_, D>,
        y: Out<'_, D>,
        lse: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
        let way = Way::of(dims, dropout, [&q, &k, &v])?;
        let y = self.view_mut(y, &rows(dims))?;
        let mut y = y.f_transpose(1, 2)?;
        let mut lse = self.view_mut(lse, &[dims.batch, dims.heads, dims.seq].map(int))?;
        match way {
            Way::Host => {
                let (found, sums) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                    &q,
                    &k,
                    &v,
                    0.0,
                    true,
                    None::<Tensor>,
                    None,
                )?;
                y.f_copy_(&found)?;
                lse.f_copy_(&sums)?;
            }
            Way::Cuda(which) => ffi::attention(which, [&q, &k, &v], &mut y, &mut lse)?,
            Way::Composed => {
                let call = Composed::new(dims, self.factors(dims, dropout, &q)?, [&q, &k, &v])?;
                let scores = call.scores()?;
                let sums = scores.f_logsumexp(-1_i64, false)?;
                lse.f_copy_(&sums)?;
                let seen = call.dropped(&scores.f_sub(&sums.f_unsqueeze(-1)?)?.f_exp()?)?;
                y.f_copy_(&seen.f_matmul(&call.v)?)?;
            }
        }
        Ok(())
    }

    pub(in crate::torch) fn aten_attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        [qkv, y, lse, dy]: [In<'_, D>; 4],
        dqkv: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
        let way = Way::of(dims, dropout, [&q, &k, &v])?;
        let mut dqkv = self.view_mut(dqkv, &packed(dims))?;
        let [y, dy] =
            [self.view(y, &rows(dims))?.f_transpose(1, 2)?, self.view(dy, &rows(dims))?.f_transpose(1, 2)?];
        let lse = self.view(lse, &[dims.batch, dims.heads, dims.seq].map(int))?;
        match way {
            Way::Host => {
                let gradients = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                    &dy,
                    &q,
                    &k,
                    &v,
                    &y,
                    &lse,
                    0.0,
                    true,
                    None::<Tensor>,
                    None,
                )?;
                ffi::pack_heads([&gradients.0, &gradients.1, &gradients.2], &mut dqkv)?;
            }
            Way::Cuda(which) => {
                ffi::attention_backward(which, &dy, [&q, &k, &v], [&y, &lse], &mut dqkv)?;
            }
            Way::Composed => {
                let call = Composed::new(dims, self.factors(dims, dropout, &q)?, [&q, &k, &v])?;
                let [for_q, for_k, for_v] = call.gradients(&y, &dy, &lse)?;
                ffi::pack_heads([&for_q, &for_k, &for_v], &mut dqkv)?;
            }
        }
        Ok(())
    }
}

/// The shape of packed projections: (batch, positions, heads, elements).
fn packed(dims: AttentionDims) -> [i64; 4] {
    [dims.batch, dims.seq, dims.heads + 2 * dims.kv_heads, dims.head_dim].map(int)
}

fn rows(dims: AttentionDims) -> [i64; 4] {
    [dims.batch, dims.seq, dims.heads, dims.head_dim].map(int)
}

/// Queries, keys and values of packed rows: (batch, heads, positions, elements).
fn heads(dims: AttentionDims, packed: &Tensor) -> Result<[Tensor; 3], Failure> {
    let (heads, kv_heads) = (int(dims.heads), int(dims.kv_heads));
    let part = |first, count| packed.f_narrow(2, first, count)?.f_transpose(1, 2);
    Ok([part(0, heads)?, part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?])
}

/// The type of arithmetic of a composition.
fn arithmetic(q: &Tensor) -> Result<Kind, Failure> {
    Ok(if q.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

impl<D: TorchStorage> Torch<D> {
    /// What dropout multiplies probabilities with: made by our kernel where the memory has one, else on the host.
    fn factors(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        q: &Tensor,
    ) -> Result<Option<Tensor>, Failure> {
        let Some(dropout) = dropout else { return Ok(None) };
        let kind = arithmetic(q)?;
        let dtype = if kind == Kind::Double { DType::F64 } else { DType::F32 };
        let sample_len = dims.heads * dims.seq * dims.seq;
        let sizes = [dims.batch, dims.heads, dims.seq, dims.seq].map(int);
        let (Some(fused), Some(mut buffer)) =
            (self.fused(), self.storage().scratch(dtype, dims.batch * sample_len)?)
        else {
            let factors = factors(dropout, sample_len)?;
            return Ok(Some(factors.f_to_kind(kind)?.f_to_device(q.device())?.f_view(sizes)?));
        };
        self.view_mut(SliceMut::whole(&mut buffer), &sizes)?.f_fill_(1.0).done()?;
        fused.dropout(dropout, SliceMut::whole(&mut buffer))?;
        let factors = self.view(Slice::whole(&buffer), &sizes)?.f_alias_copy()?;
        Ok(Some(factors))
    }
}

/// Attention with its scores in memory, in the type of arithmetic.
struct Composed {
    dims: AttentionDims,
    q: Tensor,
    /// Keys and values, repeated for every query head that reads them.
    k: Tensor,
    v: Tensor,
    factors: Option<Tensor>,
    scale: f64,
}

impl Composed {
    fn new(dims: AttentionDims, factors: Option<Tensor>, [q, k, v]: [&Tensor; 3]) -> Result<Self, Failure> {
        let kind = arithmetic(q)?;
        let group = int(dims.heads / dims.kv_heads);
        let repeated = |heads: &Tensor| heads.f_to_kind(kind)?.f_repeat_interleave_self_int(group, 1, None);
        Ok(Self {
            dims,
            q: q.f_to_kind(kind)?,
            k: repeated(k)?,
            v: repeated(v)?,
            factors,
            scale: 1.0 / (dims.head_dim as f64).sqrt(),
        })
    }

    /// Scaled scores; minus infinity for keys that a query does not see.
    fn scores(&self) -> Result<Tensor, Failure> {
        let scores = self.q.f_matmul(&self.k.f_transpose(-2, -1)?)?.f_mul_scalar(self.scale)?;
        let seq = int(self.dims.seq);
        let unseen = Tensor::f_ones([seq, seq], (Kind::Bool, scores.device()))?.f_triu(1)?;
        Ok(scores.f_masked_fill(&unseen, f64::NEG_INFINITY)?)
    }

    fn dropped(&self, values: &Tensor) -> Result<Tensor, Failure> {
        Ok(match &self.factors {
            Some(factors) => values.f_mul(factors)?,
            None => values.shallow_clone(),
        })
    }

    /// The gradients of queries, keys and values.
    fn gradients(&self, y: &Tensor, dy: &Tensor, lse: &Tensor) -> Result<[Tensor; 3], Failure> {
        let kind = self.q.f_kind()?;
        let (y, dy) = (y.f_to_kind(kind)?, dy.f_to_kind(kind)?);
        let probabilities = self.scores()?.f_sub(&lse.f_unsqueeze(-1)?)?.f_exp()?;
        let slopes = self.dropped(&dy.f_matmul(&self.v.f_transpose(-2, -1)?)?)?;
        let mean = y.f_mul(&dy)?.f_sum_dim_intlist(-1_i64, true, None)?;
        let for_scores = probabilities.f_mul(&slopes.f_sub(&mean)?)?.f_mul_scalar(self.scale)?;
        let for_q = for_scores.f_matmul(&self.k)?;
        let for_k = for_scores.f_transpose(-2, -1)?.f_matmul(&self.q)?;
        let for_v = self.dropped(&probabilities)?.f_transpose(-2, -1)?.f_matmul(&dy)?;
        Ok([for_q, self.grouped(&for_k)?, self.grouped(&for_v)?])
    }

    /// The sums over the query heads that read a key head.
    fn grouped(&self, gradient: &Tensor) -> Result<Tensor, Failure> {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = self.dims;
        let sizes = [batch, kv_heads, heads / kv_heads, seq, head_dim].map(int);
        Ok(gradient.f_view(sizes)?.f_sum_dim_intlist(2_i64, false, None)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_that_is_chosen_runs_when_it_takes_the_operands_as_they_are() {
        let dims = |heads, kv_heads, head_dim| AttentionDims { batch: 2, seq: 8, heads, kv_heads, head_dim };
        for kernel in [CudaAttention::Flash, CudaAttention::Efficient, CudaAttention::Cudnn] {
            assert_eq!(Way::of_kernel(dims(4, 4, 64), Some(kernel)), Way::Cuda(kernel));
            assert_eq!(Way::of_kernel(dims(4, 4, 20), Some(kernel)), Way::Composed);
        }
        assert_eq!(
            Way::of_kernel(dims(4, 2, 64), Some(CudaAttention::Cudnn)),
            Way::Cuda(CudaAttention::Cudnn)
        );
        assert_eq!(Way::of_kernel(dims(4, 2, 64), Some(CudaAttention::Efficient)), Way::Composed);
        assert_eq!(Way::of_kernel(dims(4, 4, 64), None), Way::Composed);
    }

    #[test]
    fn the_shim_asks_libtorch_which_kernel_it_would_take() {
        let tensor = |heads: i64| Tensor::zeros([1, heads, 8, 8], (Kind::Float, Device::Cpu));
        // On the host libtorch has one fused kernel, which it calls by the number of FlashAttention.
        let operands = [tensor(4), tensor(4), tensor(4)];
        let chosen = ffi::choose_attention(operands.each_ref()).expect("an operation of every libtorch");
        assert_eq!(chosen, Some(CudaAttention::Flash));
    }

    #[test]
    fn gradients_of_heads_lie_side_by_side_in_rows() {
        let part = |first: f64, heads: i64| {
            (Tensor::arange(heads * 6, (Kind::Float, Device::Cpu)) + first).view([1, heads, 3, 2])
        };
        let parts = [part(0.0, 2), part(100.0, 1), part(200.0, 1)];
        let mut rows = Tensor::zeros([1, 3, 4, 2], (Kind::Float, Device::Cpu));
        ffi::pack_heads(parts.each_ref(), &mut rows).expect("sizes that fit");
        let found = Vec::<f32>::try_from(rows.view([-1])).expect("floats");
        assert_eq!(&found[..8], [0.0, 1.0, 6.0, 7.0, 100.0, 101.0, 200.0, 201.0]);
        assert_eq!(&found[8..12], [2.0, 3.0, 8.0, 9.0]);
    }
}
