//! Rotary position embedding of packed rows, in place.
//!
//! Angles are computed in double precision and their sines and cosines rounded to the type of arithmetic,
//! once per position; element `i` of a head is rotated with element `i + head_dim / 2`.

use crate::host::element::{Element, Float};
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::AttentionDims;

/// Rotates the query and key heads of every row; `backward` the other way.
pub(super) fn rope<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    inverse_frequencies: &[f32],
    qkv: &mut [E],
    backward: bool,
) {
    let half = dims.head_dim / 2;
    let mut table = workers.scratch::<E::Acc>(dims.seq * 2 * half);
    for (position, row) in table.chunks_exact_mut(2 * half).enumerate() {
        let (cosines, sines) = row.split_at_mut(half);
        for ((cosine, sine), &frequency) in cosines.iter_mut().zip(sines).zip(inverse_frequencies) {
            // The product is rounded to single precision, as Hugging Face computes it.
            let angle = f64::from(position as f32 * frequency);
            *cosine = E::Acc::of(angle.cos());
            *sine = E::Acc::of(if backward { -angle.sin() } else { angle.sin() });
        }
    }
    let (width, table) = (dims.packed(), &*table);
    let rows = task_rows(width);
    let rotated = (dims.heads + dims.kv_heads) * dims.head_dim;
    workers.each(qkv.chunks_mut(rows * width).enumerate(), |(task, qkv)| {
        for (row, packed) in qkv.chunks_exact_mut(width).enumerate() {
            let position = (task * rows + row) % dims.seq;
            rotate(dims.head_dim, &table[position * 2 * half..][..2 * half], &mut packed[..rotated]);
        }
    });
}

vectorized! {
    fn rotate<E: Element>(head_dim: usize, table: &[E::Acc], heads: &mut [E]) {
        let (cosines, sines) = table.split_at(head_dim / 2);
        for head in heads.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(head_dim / 2);
            for (((a, b), &cosine), &sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
                let (x, y) = (a.load(), b.load());
                *a = E::store(x * cosine - y * sine);
                *b = E::store(y * cosine + x * sine);
            }
        }
    }
}
