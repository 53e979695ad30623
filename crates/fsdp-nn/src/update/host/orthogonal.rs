//! Approximates the nearest orthogonal matrix with the five Newton-Schulz steps of Keller Jordan's Muon.
//!
//! A step maps a matrix X = U S V^T, whose singular values S are at most one, to U f(S) V^T with the odd polynomial
//! f(s) = a s + b s^3 + c s^5. The polynomial is steep at zero, so five steps bring nearly all singular values near
//! one, where they stay between about 0.7 and 1.2. With G = X X^T (X^T X if there are more rows than columns), a step
//! takes three products: G, G G, and (b G + c G G) X.
//!
//! All arithmetic is in the dtype of the master parameters; `torch.optim.Muon` rounds to bf16 after every operation.

use fsdp_core::update::Products;

use crate::host::element::Float;
use crate::host::floats::{Floats, Target, transfer};
use crate::host::kernels::matmul::{Matrix, MatrixMut, matmul};
use crate::host::math::sum1;
use crate::host::raw::vectorized;
use crate::host::workers::{TASK_ELEMS, Workers};

/// Number of steps.
pub(super) const STEPS: usize = 5;

/// The coefficients a, b and c of the polynomial.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// The shape of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::update) struct Shape {
    pub(in crate::update) rows: usize,
    pub(in crate::update) cols: usize,
}

impl Shape {
    pub(in crate::update) fn len(self) -> usize {
        self.rows * self.cols
    }

    /// Length of the shorter side.
    fn min_dim(self) -> usize {
        self.rows.min(self.cols)
    }

    /// Number of scratch elements for [`orthogonalize`].
    pub(in crate::update) fn scratch(self) -> usize {
        2 * (self.len() + self.min_dim() * self.min_dim())
    }

    /// The matrix products of [`orthogonalize`].
    pub(in crate::update) fn products(self) -> [Products; 3] {
        let (k, l, count) = (self.min_dim(), self.rows.max(self.cols), STEPS);
        [(k, k, l), (k, k, k), (self.rows, self.cols, k)].map(|(m, n, k)| Products { m, n, k, count })
    }
}

/// Orthogonalizes a matrix; the result occupies the first elements of `scratch`. `eps` is the minimum of the initial
/// divisor.
///
/// # Panics
/// If the scratch is too short.
pub(in crate::update) fn orthogonalize<'s, A: Float>(
    workers: &Workers,
    shape: Shape,
    direction: Floats<'_>,
    eps: f64,
    scratch: &'s mut [A],
) -> &'s [A] {
    let (k, [a, b, c]) = (shape.min_dim(), COEFFICIENTS.map(A::of));
    let (x, rest) = scratch.split_at_mut(shape.len());
    let (next, rest) = rest.split_at_mut(shape.len());
    let (gram, rest) = rest.split_at_mut(k * k);
    let square = &mut rest[..k * k];
    transfer(direction, A::floats_mut(x), false);
    let norm = x.chunks(shape.cols).map(squares).sum::<f64>().sqrt();
    each_chunk(workers, x, |_, x| divide(A::of(norm.max(eps)), x));
    for _ in 0..STEPS {
        let matrix = Matrix::new(x, shape.rows, shape.cols, shape.cols);
        let is_tall = shape.rows > shape.cols;
        let (left, right) = if is_tall { (matrix.t(), matrix) } else { (matrix, matrix.t()) };
        matmul(workers, dense(gram, k, k), left, right);
        let of_gram = Matrix::new(gram, k, k, k);
        matmul(workers, dense(square, k, k), of_gram, of_gram);
        each_chunk(workers, square, |start, square| combine([b, c], &gram[start..][..square.len()], square));
        let factor = Matrix::new(square, k, k, k);
        let (left, right) = if is_tall { (matrix, factor) } else { (factor, matrix) };
        matmul(workers, dense(next, shape.rows, shape.cols), left, right);
        each_chunk(workers, x, |start, x| add_scaled(a, &next[start..][..x.len()], x));
    }
    x
}

fn dense<A: Float>(data: &mut [A], rows: usize, cols: usize) -> MatrixMut<'_> {
    MatrixMut::dense(Target { data: A::floats_mut(data), accumulate: false }, rows, cols)
}

/// Runs an element-wise pass in parallel chunks; `pass` also receives the offset of each chunk.
fn each_chunk<A: Float>(workers: &Workers, values: &mut [A], pass: impl Fn(usize, &mut [A]) + Sync + Send) {
    let chunks = values.chunks_mut(TASK_ELEMS).enumerate();
    workers.each(chunks, |(index, chunk)| pass(index * TASK_ELEMS, chunk));
}

vectorized! {
    /// Returns the sum of squares of a row.
    fn squares<A: Float>(row: &[A]) -> f64 {
        sum1(row, |value| value.as_f64() * value.as_f64())
    }
}

vectorized! {
    fn divide<A: Float>(divisor: A, values: &mut [A]) {
        values.iter_mut().for_each(|value| *value = *value / divisor);
    }
}

vectorized! {
    /// `square = b gram + c square`.
    fn combine<A: Float>(factors: [A; 2], gram: &[A], square: &mut [A]) {
        let [b, c] = factors;
        for (square, &gram) in square.iter_mut().zip(gram) {
            *square = b * gram + c * *square;
        }
    }
}

vectorized! {
    /// `x = a x + product`.
    fn add_scaled<A: Float>(a: A, product: &[A], x: &mut [A]) {
        for (x, &product) in x.iter_mut().zip(product) {
            *x = a * *x + product;
        }
    }
}
