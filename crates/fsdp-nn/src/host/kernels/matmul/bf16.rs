//! Products of bf16 matrices with instructions that multiply bf16 and add in f32 (AVX512-BF16).
//!
//! Both operands are packed into panels of pairs along the summed dimension, the layout that the instruction takes. A
//! tile of the result processes all pairs in order: each element is one sum in the order of the summed dimension,
//! independent of the number of threads, and is rounded once. An f32 operand (the gradient of logits) is rounded to
//! bf16 when it is packed, as on devices, which multiply operands of one dtype.

use half::bf16;

use super::{Matrix, MatrixMut};
use crate::host::element::Element;
use crate::host::floats::{Floats, Target};
use crate::host::raw::{Bf16Dot, TILE_COLS, TILE_ROWS, vectorized};
use crate::host::workers::Workers;

/// Columns of the right operand that are packed at a time; a few hundred of their rows stay in the L2 cache.
const PACKED_COLS: usize = 1024;
/// Rows of the result per task.
const TASK_ROWS: usize = 4 * TILE_ROWS;

/// An operand with an element type that can be packed.
#[derive(Clone, Copy)]
pub(super) enum Operand<'a> {
    Bf16(Matrix<'a, bf16>),
    F32(Matrix<'a, f32>),
}

impl<'a> Operand<'a> {
    pub(super) fn of<E: Element>(matrix: Matrix<'a, E>) -> Option<Self> {
        let Matrix { data, rows, cols, stride, transposed } = matrix;
        match E::floats(data) {
            Floats::Bf16(data) => Some(Self::Bf16(Matrix { data, rows, cols, stride, transposed })),
            Floats::F32(data) => Some(Self::F32(Matrix { data, rows, cols, stride, transposed })),
            Floats::F64(_) | Floats::F16(_) => None,
        }
    }

    /// Packs `len` rows from `start` on (after transposition) into panels of `width` rows.
    fn pack(self, start: usize, len: usize, width: usize, workers: &Workers, packed: &mut [u32]) {
        match self {
            Self::Bf16(matrix) => pack(matrix.rows(start, len), width, workers, packed),
            Self::F32(matrix) => pack(matrix.rows(start, len), width, workers, packed),
        }
    }

    fn t(self) -> Self {
        match self {
            Self::Bf16(matrix) => Self::Bf16(matrix.t()),
            Self::F32(matrix) => Self::F32(matrix.t()),
        }
    }
}

/// `dst = lhs * rhs`, or `dst += lhs * rhs` if the target accumulates. `depth`, the summed dimension, is not zero.
pub(super) fn matmul(
    dot: Bf16Dot,
    workers: &Workers,
    dst: MatrixMut<'_>,
    depth: usize,
    lhs: Operand<'_>,
    rhs: Operand<'_>,
) {
    let MatrixMut { mut target, rows, cols, stride } = dst;
    let pairs = depth.div_ceil(2);
    let inline = workers.inline();
    for first in (0..cols).step_by(PACKED_COLS) {
        let width = PACKED_COLS.min(cols - first);
        let mut columns = workers.scratch::<u32>(width.div_ceil(TILE_COLS) * TILE_COLS * pairs);
        rhs.t().pack(first, width, TILE_COLS, workers, &mut columns);
        let tasks = target.reborrow().parts(stride * TASK_ROWS).enumerate();
        workers.each(tasks, |(task, mut target)| {
            let start = task * TASK_ROWS;
            let len = TASK_ROWS.min(rows - start);
            let mut packed = workers.scratch::<u32>(len.div_ceil(TILE_ROWS) * TILE_ROWS * pairs);
            lhs.pack(start, len, TILE_ROWS, &inline, &mut packed);
            let block = Block { rows: len, cols: width, first, stride };
            block.compute(dot, pairs, &mut target, &packed, &columns);
        });
    }
}

/// A block of the result: the rows of a task and the packed columns.
struct Block {
    rows: usize,
    cols: usize,
    /// The first column.
    first: usize,
    stride: usize,
}

impl Block {
    fn compute(&self, dot: Bf16Dot, pairs: usize, target: &mut Target<'_>, rows: &[u32], columns: &[u32]) {
        let mut tile = [[0.0; TILE_COLS]; TILE_ROWS];
        for (col, columns) in (0..).step_by(TILE_COLS).zip(columns.chunks(pairs * TILE_COLS)) {
            let width = TILE_COLS.min(self.cols - col);
            for (row, rows) in (0..).step_by(TILE_ROWS).zip(rows.chunks(pairs * TILE_ROWS)) {
                dot.tile(rows.as_chunks().0, columns.as_chunks().0, &mut tile);
                for (row, values) in (row..self.rows).zip(&tile) {
                    target.put(row * self.stride + self.first + col, &values[..width]);
                }
            }
        }
    }
}

/// Packs all rows of a matrix into panels of `width` rows: entry `p` of a panel holds the elements `2 p` (in the low
/// half) and `2 p + 1` of each row. Entries beyond the matrix are zero.
fn pack<E: Element<Acc = f32>>(matrix: Matrix<'_, E>, width: usize, workers: &Workers, packed: &mut [u32]) {
    let (rows, depth) = matrix.dim();
    let panels = packed.chunks_mut(depth.div_ceil(2) * width).enumerate();
    workers.each(panels, |(panel, packed)| {
        let start = panel * width;
        let part = matrix.rows(start, width.min(rows - start));
        if part.dim().0 < width || depth % 2 == 1 {
            packed.fill(0);
        }
        if part.transposed {
            pack_across(part, width, packed);
        } else {
            pack_along(part, width, packed);
        }
    });
}

#[inline(always)]
fn pair<E: Element<Acc = f32>>(low: E, high: E) -> u32 {
    let bits = |value: E| u32::from(bf16::store(value.load()).to_bits());
    bits(low) | bits(high) << 16
}

vectorized! {
    /// Packs a matrix that is not transposed: the elements of a row are contiguous.
    fn pack_along<E: Element<Acc = f32>>(matrix: Matrix<'_, E>, width: usize, packed: &mut [u32]) {
        for row in 0..matrix.rows {
            let (pairs, last) = matrix.data[row * matrix.stride..][..matrix.cols].as_chunks::<2>();
            let mut entries = packed[row..].iter_mut().step_by(width);
            // `pairs` comes first in the zip, so that no entry is lost when the pairs end.
            for (&[low, high], entry) in pairs.iter().zip(entries.by_ref()) {
                *entry = pair(low, high);
            }
            if let ([last], Some(entry)) = (last, entries.next()) {
                *entry = pair(*last, E::store(0.0));
            }
        }
    }
}

vectorized! {
    /// Packs a transposed matrix: the elements of a column are contiguous.
    fn pack_across<E: Element<Acc = f32>>(matrix: Matrix<'_, E>, width: usize, packed: &mut [u32]) {
        let column = |index: usize| &matrix.data[index * matrix.stride..][..matrix.cols];
        for (index, entries) in (0..matrix.rows).step_by(2).zip(packed.chunks_mut(width)) {
            let low = column(index);
            if index + 1 == matrix.rows {
                entries.iter_mut().zip(low).for_each(|(entry, &low)| *entry = pair(low, E::store(0.0)));
                return;
            }
            let high = column(index + 1);
            for ((entry, &low), &high) in entries.iter_mut().zip(low).zip(high) {
                *entry = pair(low, high);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::floats::FloatsMut;
    use crate::host::pool::HostPool;

    /// Small integers, whose products and sums are exact in any order.
    fn integers<E: Element<Acc = f32>>(len: usize, salt: usize) -> Vec<E> {
        (0..len).map(|at| E::store(((at * 7919 + salt) % 13) as f32 - 6.0)).collect()
    }

    /// Returns a matrix of integers whose stride exceeds its row length by `gap`, and a function that returns its
    /// elements.
    fn operand<E: Element<Acc = f32>>(
        data: &[E],
        (rows, cols): (usize, usize),
        gap: usize,
        transposed: bool,
    ) -> (Matrix<'_, E>, impl Fn(usize, usize) -> f32) {
        let (stored, stride) =
            if transposed { ((cols, rows), rows + gap) } else { ((rows, cols), cols + gap) };
        let matrix = Matrix::new(data, stored.0, stored.1, stride);
        let at = move |row: usize, col: usize| {
            data[if transposed { col * stride + row } else { row * stride + col }].load()
        };
        (if transposed { matrix.t() } else { matrix }, at)
    }

    fn is_exact<L: Element<Acc = f32>>((rows, depth, cols): (usize, usize, usize), threads: usize) {
        let workers = Workers::new(threads, HostPool::new()).unwrap();
        for (case, accumulate) in (0..8).zip([false, true].into_iter().cycle()) {
            let (left, right) =
                (integers::<L>((rows + 3) * (depth + 3), 1), integers::<bf16>((depth + 3) * (cols + 3), 2));
            let (lhs, a) = operand(&left, (rows, depth), case % 3, case & 2 != 0);
            let (rhs, b) = operand(&right, (depth, cols), case % 2, case & 4 != 0);
            // With the default implementation on this CPU, and with the instructions even if they are not faster.
            for dot in [None, Bf16Dot::detect()] {
                let mut got = vec![1.0_f32; rows * (cols + 1)];
                let target = Target { data: FloatsMut::F32(&mut got), accumulate };
                let dst = MatrixMut { target, rows, cols, stride: cols + 1 };
                match dot.zip(Operand::of(lhs)).zip(Operand::of(rhs)) {
                    Some(((dot, lhs), rhs)) => matmul(dot, &workers, dst, depth, lhs, rhs),
                    None => super::super::matmul(&workers, dst, lhs, rhs),
                }
                for row in 0..rows {
                    for col in 0..cols {
                        let sum: f32 = (0..depth).map(|at| a(row, at) * b(at, col)).sum();
                        let expected = sum + f32::from(u8::from(accumulate));
                        assert_eq!(got[row * (cols + 1) + col], expected, "({row}, {col}) of case {case}");
                    }
                    assert_eq!(got[row * (cols + 1) + cols], 1.0, "what lies between rows stays");
                }
            }
        }
    }

    #[test]
    fn integer_products_are_exact_at_tile_edges() {
        for rows in [1, TILE_ROWS - 1, TILE_ROWS, TASK_ROWS + 1] {
            for cols in [1, TILE_COLS, TILE_COLS + 1] {
                for depth in [1, 2, 7] {
                    is_exact::<bf16>((rows, depth, cols), 1);
                    is_exact::<f32>((rows, depth, cols), 2);
                }
            }
        }
        is_exact::<bf16>((TASK_ROWS, 3, PACKED_COLS + TILE_COLS + 5), 2);
    }

    #[test]
    fn non_finite_values_propagate_through_matmul() {
        let workers = Workers::new(1, HostPool::new()).unwrap();
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (left, right) = ([bf16::ONE, bf16::store(value), bf16::ONE], [bf16::ONE; 3]);
            let mut got = [0.0_f32];
            let target = Target { data: FloatsMut::F32(&mut got), accumulate: false };
            let (lhs, rhs) = (Matrix::new(&left, 1, 3, 3), Matrix::new(&right, 3, 1, 1));
            super::super::matmul(&workers, MatrixMut::dense(target, 1, 1), lhs, rhs);
            assert!(got[0] == value || value.is_nan() && got[0].is_nan(), "{value} became {}", got[0]);
        }
    }
}
