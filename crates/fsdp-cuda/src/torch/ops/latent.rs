//! Latent attention: between its heads and packed rows.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::Operands;
use fsdp_nn::op::{Latent, LatentDims};
use tch::Tensor;

use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn latent(
        &self,
        op: &Latent,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        match *op {
            Latent::Pack(dims) => {
                let [query, fixed] = [dims.query(), dims.fixed + dims.value];
                let ([q, k_rotating, kv], [packed], _) = operands.split();
                let q = self.view(q, &heads(dims, query))?;
                let k_rotating = self.view(k_rotating, &[dims.rows, 1, dims.rotating].map(int))?;
                let kv = self.view(kv, &heads(dims, fixed))?;
                let [mut queries, mut keys, mut values] = parts(&*self.view_mut(packed.slice, &rows(dims))?)?;
                [&mut queries, &mut keys, &mut values]
                    .into_iter()
                    .try_for_each(|part| part.f_zero_().done())?;
                let (fixed, rotating) = (int(dims.fixed), int(dims.rotating));
                put(&queries, 0, &halves_first(dims, &q.f_narrow(2, fixed, rotating)?)?)?;
                put(&queries, rotating, &q.f_narrow(2, 0, fixed)?)?;
                put(&keys, 0, &halves_first(dims, &k_rotating)?)?;
                put(&keys, rotating, &kv.f_narrow(2, 0, fixed)?)?;
                put(&values, 0, &kv.f_narrow(2, fixed, int(dims.value))?)?;
            }
            Latent::PackBackward(dims) => {
                let ([packed], [q, k_rotating, kv], _) = operands.split();
                let kind = arithmetic(packed.buffer.dtype())?;
                let [queries, keys, values] = parts(&*self.view(packed, &rows(dims))?)?;
                let (fixed, rotating) = (int(dims.fixed), int(dims.rotating));
                let q = self.view_mut(q.slice, &heads(dims, dims.query()))?;
                put(&q, fixed, &neighbors_first(dims, &queries.f_narrow(2, 0, rotating)?)?)?;
                put(&q, 0, &queries.f_narrow(2, rotating, fixed)?)?;
                let kv = self.view_mut(kv.slice, &heads(dims, dims.fixed + dims.value))?;
                put(&kv, 0, &keys.f_narrow(2, rotating, fixed)?)?;
                put(&kv, fixed, &values.f_narrow(2, 0, int(dims.value))?)?;
                let shared = neighbors_first(dims, &keys.f_narrow(2, 0, rotating)?)?;
                let shared = shared.f_sum_dim_intlist(1_i64, false, kind)?;
                self.view_mut(k_rotating.slice, &[dims.rows, dims.rotating].map(int))?.f_copy_(&shared)?;
            }
            Latent::Unpack(dims) => {
                let ([x], [y], _) = operands.split();
                let x = self.view(x, &heads(dims, dims.head_dim()))?.f_narrow(2, 0, int(dims.value))?;
                self.view_mut(y.slice, &heads(dims, dims.value))?.f_copy_(&x)?;
            }
            Latent::UnpackBackward(dims) => {
                let ([dy], [dx], _) = operands.split();
                let dy = self.view(dy, &heads(dims, dims.value))?;
                let mut dx = self.view_mut(dx.slice, &heads(dims, dims.head_dim()))?;
                dx.f_zero_().done()?;
                put(&dx, 0, &dy)?;
            }
        }
        Ok(())
    }
}

/// Rows x heads x elements.
fn heads(dims: LatentDims, width: usize) -> [i64; 3] {
    [dims.rows, dims.heads, width].map(int)
}

/// Packed rows: rows x (queries, keys and values of all heads) x elements.
fn rows(dims: LatentDims) -> [i64; 3] {
    [dims.rows, 3 * dims.heads, dims.head_dim()].map(int)
}

/// The query, key and value heads of packed rows.
fn parts(packed: &Tensor) -> Result<[Tensor; 3], Failure> {
    let heads = packed.size()[1] / 3;
    Ok([
        packed.f_narrow(1, 0, heads)?,
        packed.f_narrow(1, heads, heads)?,
        packed.f_narrow(1, 2 * heads, heads)?,
    ])
}

/// Copies elements into every head from `offset` on.
fn put(heads: &Tensor, offset: i64, elements: &Tensor) -> Result<(), Failure> {
    heads.f_narrow(2, offset, elements.size()[2])?.f_copy_(elements)?;
    Ok(())
}

/// Rotating elements in the order of packed rows, from that of the model.
fn halves_first(dims: LatentDims, elements: &Tensor) -> Result<Tensor, Failure> {
    regroup(dims, elements, [-1, 2])
}

/// Rotating elements in the order of the model, from that of packed rows.
fn neighbors_first(dims: LatentDims, elements: &Tensor) -> Result<Tensor, Failure> {
    regroup(dims, elements, [2, -1])
}

fn regroup(dims: LatentDims, elements: &Tensor, [groups, parts]: [i64; 2]) -> Result<Tensor, Failure> {
    if !dims.interleaved {
        return Ok(elements.shallow_clone());
    }
    let sizes = elements.size();
    let grouped = elements.f_reshape([sizes[0], sizes[1], groups, parts])?;
    Ok(grouped.f_transpose(2, 3)?.f_reshape(sizes)?)
}
