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
    let ConvolutionDims { width, kernel, .. } = dims;
    let (weights, reaches) = (by_distance(dims, weight), reaches(dims, spans));
    let trains = dweight.is_some();
    let partials = workers.map(dx.parts(PARTIAL_ROWS * width).enumerate(), |(task, dx)| {
        let rows = task * PARTIAL_ROWS..dims.rows().min((task + 1) * PARTIAL_ROWS);
        // The rows that see the last ones of the task belong to the next, which computes their gradients as well: so no
        // memory grows with the rows.
        let end = dims.rows().min(rows.end + kernel - 1);
        let mut slopes = workers.scratch::<E::Acc>((end - rows.start) * width);
        let mut sums = vec![E::Acc::ZERO; if trains { kernel * width } else { 0 }];
        for (row, slopes) in (rows.start..end).zip(slopes.chunks_exact_mut(width)) {
            let seen = &x[(row - reaches[row]) * width..(row + 1) * width];
            sum_row(seen, &weights, slopes);
            slope_row(&dy[row * width..(row + 1) * width], slopes);
            if row < rows.end {
                add_products(seen, slopes, &mut sums);
            }
        }
        let mut sum = workers.scratch::<E::Acc>(width);
        add_back((&weights, &reaches[rows.start..end]), &slopes, &mut sum, dx);
        sums
    });
    if let Some(mut dweight) = dweight {
        let by_distance = combine(partials);
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

/// Adds, for each row of `dx`, the gradients of the rows that see it, times their weights.
fn add_back<A: Float>(
    (weights, reaches): (&[A], &[usize]),
    slopes: &[A],
    sums: &mut [A],
    mut dx: Target<'_>,
) {
    let width = sums.len();
    for row in 0..dx.data.len() / width {
        sums.fill(A::ZERO);
        let later = reaches[row..].iter().zip(slopes[row * width..].chunks_exact(width));
        for ((distance, weights), (&reach, slopes)) in weights.chunks_exact(width).enumerate().zip(later) {
            if reach >= distance {
                add_product(weights, slopes, sums);
            }
        }
        dx.put(row * width, sums);
    }
}

vectorized! {
    fn add_product<A: Float>(weights: &[A], slopes: &[A], sums: &mut [A]) {
        for ((sum, &weight), &slope) in sums.iter_mut().zip(weights).zip(slopes) {
            *sum += weight * slope;
        }
    }
}
