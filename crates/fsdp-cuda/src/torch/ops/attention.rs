//! Causal attention over packed rows: by libtorch's fused kernels where they take the operands, else composed.

use fsdp_core::DType;
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::{AttentionDims, Dropout};
use tch::{Device, Kind, Tensor};

use super::int;
use super::pointwise::factors;
use crate::ffi::torch::{self as ffi, CudaAttention};
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, kind};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

/// The largest head that FlashAttention takes, and what must divide its size.
const FLASH_HEAD_DIM_MAX: usize = 256;
const FLASH_HEAD_DIM_UNIT: usize = 8;

/// How a call is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// libtorch's blocked kernel for the host.
    Host,
    /// One of libtorch's kernels for CUDA devices.
    Cuda(CudaAttention),
    /// Scores in memory: for dropout, whose masks are ours, and for heads that the kernels do not take.
    Composed,
}

impl Way {
    fn of(device: Device, kind: Kind, dims: AttentionDims, dropout: Option<Dropout<'_>>) -> Self {
        let fits = dims.head_dim.is_multiple_of(FLASH_HEAD_DIM_UNIT) && dims.head_dim <= FLASH_HEAD_DIM_MAX;
        match (device, kind) {
            _ if dropout.is_some() => Way::Composed,
            (Device::Cpu, _) => Way::Host,
            (_, Kind::BFloat16) if fits => Way::Cuda(CudaAttention::Flash),
            (_, Kind::Float) if fits && dims.heads == dims.kv_heads => Way::Cuda(CudaAttention::Efficient),
            _ => Way::Composed,
        }
    }
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
        let way = Way::of(self.storage().device(), kind(qkv.buffer.dtype()), dims, dropout);
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
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
        let way = Way::of(self.storage().device(), kind(qkv.buffer.dtype()), dims, dropout);
        let [q, k, v] = heads(dims, &*self.view(qkv, &packed(dims))?)?;
        let [mut dq, mut dk, mut dv] = heads(dims, &*self.view_mut(dqkv, &packed(dims))?)?;
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
                dq.f_copy_(&gradients.0)?;
                dk.f_copy_(&gradients.1)?;
                dv.f_copy_(&gradients.2)?;
            }
            Way::Cuda(which) => {
                ffi::attention_backward(which, &dy, [&q, &k, &v], [&y, &lse], [&mut dq, &mut dk, &mut dv])?;
            }
            Way::Composed => {
                let call = Composed::new(dims, self.factors(dims, dropout, &q)?, [&q, &k, &v])?;
                let [for_q, for_k, for_v] = call.gradients(&y, &dy, &lse)?;
                dq.f_copy_(&for_q)?;
                dk.f_copy_(&for_k)?;
                dv.f_copy_(&for_v)?;
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
