//! Attention of new rows to cached keys and values, over all positions up to each row's own.

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Slice, SliceMut};

use super::rows::{cap_row, softmax_row, store_scaled};
use crate::host::element::{Element, Float, for_float};
use crate::host::floats::cast;
use crate::host::math;
use crate::host::raw::vectorized;
use crate::host::workers::Workers;
use crate::host::{HostBuffer, HostMemory};
use crate::op::{AttentionDims, Scores};

impl HostMemory {
    /// Computes [`Attention::Forward`](crate::op::Attention) for the last `dims.seq` rows of one sample, the first of
    /// which is at position `first`. `qkv` holds these rows, packed as usual; `cached` holds all rows of the sample,
    /// with the heads of keys and values only.
    ///
    /// # Errors
    /// Those of the memory.
    pub(crate) fn attend_cached(
        &self,
        (dims, scores): (&AttentionDims, &Scores),
        first: usize,
        [qkv, cached]: [Slice<'_, HostBuffer>; 2],
        [y, lse]: [SliceMut<'_, HostBuffer>; 2],
    ) -> Result<(), Error> {
        for_float!(qkv.buffer.dtype(), E => {
            let rows = Rows { dims, scores, first, qkv: self.elements::<E>(qkv)?, cached: self.elements(cached)? };
            rows.attend(self.workers(), self.elements_mut(y)?, self.elements_mut(lse)?);
            Ok(())
        })
    }
}

/// New rows, and the keys and values they attend to.
struct Rows<'a, E> {
    dims: &'a AttentionDims,
    scores: &'a Scores,
    first: usize,
    qkv: &'a [E],
    cached: &'a [E],
}

impl<E: Element> Rows<'_, E> {
    /// Computes the output and the log-sum-exps; each head of each row is a task.
    fn attend(&self, workers: &Workers, y: &mut [E], lse: &mut [E::Acc]) {
        let AttentionDims { heads, kv_heads, head_dim, .. } = *self.dims;
        let (width, cached_width) = (self.dims.packed(), 2 * kv_heads * head_dim);
        let mut log_sums = vec![E::Acc::ZERO; lse.len()];
        workers.each(y.chunks_mut(head_dim).zip(&mut log_sums).enumerate(), |(task, (y, log_sum))| {
            let (row, head) = (task / heads, task % heads);
            let last = self.first + row;
            let visible = &self.cached[self.scores.first_key(last) * cached_width..][..];
            let count = last + 1 - self.scores.first_key(last);
            let column = head / (heads / kv_heads) * head_dim;
            let mut scratch = workers.scratch::<E::Acc>(2 * head_dim + 2 * count);
            let (query, rest) = scratch.split_at_mut(head_dim);
            let (sum, rest) = rest.split_at_mut(head_dim);
            let (scores, slopes) = rest.split_at_mut(count);
            cast(&self.qkv[row * width + head * head_dim..][..head_dim], query);
            multiply_keys(query, &visible[column..], cached_width, scores);
            let scale = E::Acc::of(self.scores.scale(head_dim));
            let remaining_scale = match self.scores.softcap {
                None => scale,
                Some(cap) => {
                    cap_row(scale, E::Acc::of(cap), scores, slopes);
                    E::Acc::ONE
                }
            };
            let normalizer;
            (*log_sum, normalizer) = softmax_row(remaining_scale, scores);
            sum.fill(E::Acc::ZERO);
            add_values(scores, &visible[kv_heads * head_dim + column..], cached_width, sum);
            store_scaled(normalizer, sum, y);
        });
        // Log-sum-exps are ordered by head, outputs by row.
        for (task, log_sum) in log_sums.into_iter().enumerate() {
            lse[task % heads * self.dims.seq + task / heads] = log_sum;
        }
    }
}

vectorized! {
    /// Computes the dot products of a query with keys that are `stride` elements apart.
    fn multiply_keys<E: Element>(query: &[E::Acc], keys: &[E], stride: usize, scores: &mut [E::Acc]) {
        for (key, score) in scores.iter_mut().enumerate() {
            *score = math::sum2(query, &keys[key * stride..][..query.len()], |query, key| query * key.load());
        }
    }
}

vectorized! {
    /// Adds values that are `stride` elements apart, each times its weight.
    fn add_values<E: Element>(weights: &[E::Acc], values: &[E], stride: usize, sum: &mut [E::Acc]) {
        for (value, &weight) in weights.iter().enumerate() {
            for (sum, value) in sum.iter_mut().zip(&values[value * stride..]) {
                *sum += weight * value.load();
            }
        }
    }
}
