//! Short convolutions. Rows are blocks of tasks; every row sees the rows before it that belong to its document.

use std::ops::Range;

use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::kernels::linear::{PARTIAL_ROWS, combine};
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::ConvolutionDims;

/// The weights by row: those of the row itself, then those of the row before it, and so on.
pub(super) fn by_distance<E: Element>(dims: ConvolutionDims, weight: &[E]) -> Vec<E::Acc> {
    let ConvolutionDims { width, kernel, .. } = dims;
    let place = |distance: usize| move |column: usize| weight[column * kernel + kernel - 1 - distance].load();
    (0..kernel).flat_map(|distance| (0..width).map(place(distance))).collect()
}

/// For each row, the number of earlier rows that it sees.
fn reaches(dims: ConvolutionDims, spans: &[Range<usize>]) -> Vec<usize> {
    spans.iter().flat_map(|rows| 0..rows.len()).map(|position| position.min(dims.kernel - 1)).collect()
}

/// Computes the rows of `y`.
pub(super) fn forward<E: Element>(
    workers: &Workers,
    dims: ConvolutionDims,
    spans: &[Range<usize>],
    x: &[E],
    weight: &[E],
    y: &mut [E],
) {
    let (width, rows) = (dims.width, task_rows(dims.width));
    let (weights, reaches) = (by_distance(dims, weight), reaches(dims, spans));
    workers.each(y.chunks_mut(rows * width).enumerate(), |(task, y)| {
        let mut sums = workers.scratch::<E::Acc>(width);
        for (index, y) in y.chunks_exact_mut(width).enumerate() {
            let row = task * rows + index;
            sum_row(&x[(row - reaches[row]) * width..(row + 1) * width], &weights, &mut sums);
            silu_row(&sums, y);
        }
    });
}

vectorized! {
    /// Sums rows times their weights, from the last row to the first.
    pub(super) fn sum_row<E: Element>(rows: &[E], weights: &[E::Acc], sums: &mut [E::Acc]) {
        let width = sums.len();
        sums.fill(E::Acc::ZERO);
        for (row, weights) in rows.rchunks_exact(width).zip(weights.chunks_exact(width)) {
            for ((sum, x), &weight) in sums.iter_mut().zip(row).zip(weights) {
                *sum += x.load() * weight;
            }
        }
    }
}

vectorized! {
    pub(super) fn silu_row<E: Element>(sums: &[E::Acc], y: &mut [E]) {
        for (y, &sum) in y.iter_mut().zip(sums) {
            *y = E::store(sum * sum.logistic());
        }
    }
}

/// Computes the gradients of the rows, and of the weights if they have a target.
pub(super) fn backward<E: Element>(
    workers: &Workers,
    dims: ConvolutionDims,
    spans: &[Range<usize>],
    [x, weight, dy]: [&[E]; 3],
    (dx, dweight): (Target<'_>, Option<Target<'_>>),
) {
    let width = dims.width;
    let (weights, reaches) = (by_distance(dims, weight), reaches(dims, spans));
    let mut slopes = workers.scratch::<E::Acc>(dims.rows() * width);
    let trains = dweight.is_some();
    let tasks = slopes.chunks_mut(PARTIAL_ROWS * width).enumerate();
    let partials = workers.map(tasks, |(task, slopes)| {
        let mut sums = vec![E::Acc::ZERO; if trains { dims.kernel * width } else { 0 }];
        for (index, slopes) in slopes.chunks_exact_mut(width).enumerate() {
            let row = task * PARTIAL_ROWS + index;
            let seen = &x[(row - reaches[row]) * width..(row + 1) * width];
            sum_row(seen, &weights, slopes);
            slope_row(&dy[row * width..(row + 1) * width], slopes);
            add_products(seen, slopes, &mut sums);
        }
        sums
    });
    add_back(workers, dims, (&weights, &reaches), &slopes, dx);
    if let Some(mut dweight) = dweight {
        let (by_distance, kernel) = (combine(partials), dims.kernel);
        let of = |index: usize| by_distance[(kernel - 1 - index % kernel) * width + index / kernel];
        dweight.put(0, &(0..width * kernel).map(of).collect::<Vec<_>>());
    }
}

vectorized! {
    /// Replaces sums by the gradients of the sums.
    fn slope_row<E: Element>(dy: &[E], sums: &mut [E::Acc]) {
        for (sum, dy) in sums.iter_mut().zip(dy) {
            let logistic = sum.logistic();
            *sum = dy.load() * (logistic * (E::Acc::ONE + *sum * (E::Acc::ONE - logistic)));
        }
    }
}

vectorized! {
    /// Adds the products of the gradients of a row with the rows that it sees.
    fn add_products<E: Element>(rows: &[E], slopes: &[E::Acc], sums: &mut [E::Acc]) {
        let width = slopes.len();
        for (row, sums) in rows.rchunks_exact(width).zip(sums.chunks_exact_mut(width)) {
            for ((sum, x), &slope) in sums.iter_mut().zip(row).zip(slopes) {
                *sum += x.load() * slope;
            }
        }
    }
}

/// Adds, for each row, the gradients of the rows that see it, times their weights.
fn add_back<A: Float>(
    workers: &Workers,
    dims: ConvolutionDims,
    (weights, reaches): (&[A], &[usize]),
    slopes: &[A],
    dx: Target<'_>,
) {
    let (width, rows) = (dims.width, task_rows(dims.width));
    workers.each(dx.parts(rows * width).enumerate(), |(task, mut dx)| {
        let mut sums = workers.scratch::<A>(width);
        for index in 0..rows.min(dims.rows() - task * rows) {
            let row = task * rows + index;
            sums.fill(A::ZERO);
            for distance in 0..dims.kernel.min(dims.rows() - row) {
                if reaches[row + distance] >= distance {
                    let slopes = &slopes[(row + distance) * width..][..width];
                    add_product(&weights[distance * width..][..width], slopes, &mut sums);
                }
            }
            dx.put(index * width, &sums);
        }
    });
}

vectorized! {
    fn add_product<A: Float>(weights: &[A], slopes: &[A], sums: &mut [A]) {
        for ((sum, &weight), &slope) in sums.iter_mut().zip(weights).zip(slopes) {
            *sum += weight * slope;
        }
    }
}
