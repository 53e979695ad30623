//! Rotary position embedding of packed rows, in place.
//!
//! Sines and cosines are computed in double precision and rounded to the type of arithmetic, once per position; of
//! the `n` rotating elements of a head, element `i` rotates with element `i + n / 2`.

use crate::host::element::{Element, Float};
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::layer::Rope;
use crate::op::AttentionDims;

/// Rotates the query and key heads of every row by its position, which is its index in the sample unless `positions`
/// is given; `backward` rotates the other way.
pub(super) fn rotate_heads<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    rope: &Rope,
    positions: Option<&[u32]>,
    qkv: &mut [E],
    backward: bool,
) {
    let rotary_dim = rope.rotary_dim();
    let given_positions = || positions.into_iter().flatten().map(|&position| position as usize);
    let first = given_positions().min().unwrap_or(0);
    let count = given_positions().max().map_or(dims.seq, |last| last + 1 - first);
    let mut table = workers.scratch::<E::Acc>(count * rotary_dim);
    for (position, row) in table.chunks_exact_mut(rotary_dim.max(1)).enumerate() {
        for (index, (to, value)) in row.iter_mut().zip(rope.angles(first + position)).enumerate() {
            let is_negated = backward && index >= rotary_dim / 2;
            *to = E::Acc::of(if is_negated { -value } else { value });
        }
    }
    let (width, table) = (dims.packed(), &*table);
    let rows = task_rows(width);
    let rotated = (dims.heads + dims.kv_heads) * dims.head_dim;
    workers.each(qkv.chunks_mut(rows * width).enumerate(), |(task, qkv)| {
        for (row, packed) in qkv.chunks_exact_mut(width).enumerate() {
            let row = task * rows + row;
            let position = positions.map_or(row % dims.seq, |positions| positions[row] as usize - first);
            rotate(dims.head_dim, &table[position * rotary_dim..][..rotary_dim], &mut packed[..rotated]);
        }
    });
}

vectorized! {
    fn rotate<E: Element>(head_dim: usize, table: &[E::Acc], heads: &mut [E]) {
        let half = table.len() / 2;
        let (cosines, sines) = table.split_at(half);
        for head in heads.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(half);
            for (((a, b), &cosine), &sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
                let (x, y) = (a.load(), b.load());
                *a = E::store(x * cosine - y * sine);
                *b = E::store(y * cosine + x * sine);
            }
        }
    }
}
