//! Kernels of linear maps: products, bias and bias gradient.

use fsdp_core::Error;

use super::matmul::{Matrix, MatrixMut, matmul};
use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::raw::vectorized;
use crate::host::workers::Workers;
use crate::op::{Linear, LinearDims, Orientation};

/// Number of rows whose column sums form one partial result.
pub(super) const PARTIAL_ROWS: usize = 128;

impl HostMemory {
    pub(in crate::host) fn linear<E: Element>(
        &self,
        op: &Linear,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Linear::Forward { dims, .. } => {
                let bias = operands.reads.get(2).map(|bias| self.elements::<E>(*bias)).transpose()?;
                let ([x, weight], [y], _) = operands.split();
                let (x, weight) = (self.elements(x)?, self.elements(weight)?);
                let accumulate = y.accumulate;
                forward(workers, dims, x, weight, bias, self.elements_mut(y.slice)?, accumulate);
            }
            Linear::BackwardInput { dims } => {
                let ([dy, weight], [dx], _) = operands.split();
                let (dy, weight) = (self.elements::<E>(dy)?, self.elements(weight)?);
                let accumulate = dx.accumulate;
                backward_input(workers, dims, dy, weight, self.elements_mut(dx.slice)?, accumulate);
            }
            Linear::BackwardWeight { dims } => {
                let ([x, dy], [dweight], _) = operands.split();
                let (x, dy) = (self.elements::<E>(x)?, self.elements(dy)?);
                backward_weight(workers, dims, x, dy, self.target(dweight)?);
            }
            Linear::ColumnSums { columns, stride, .. } => {
                let ([dy], [sums], _) = operands.split();
                column_sums(workers, [columns, stride], self.elements::<E>(dy)?, self.target(sums)?);
            }
        }
        Ok(Outcome::Done)
    }
}

impl LinearDims {
    fn weight<'a, E: Element>(&self, data: &'a [E]) -> Matrix<'a, E> {
        match self.orientation {
            Orientation::OutIn => Matrix::new(data, self.outputs, self.inputs, self.inputs).t(),
            Orientation::InOut => Matrix::new(data, self.inputs, self.outputs, self.outputs),
        }
    }

    fn strided<'a, E: Element>(&self, data: &'a [E]) -> Matrix<'a, E> {
        Matrix::new(data, self.rows, self.outputs, self.y_stride)
    }
}

/// `y = x W + b`, rounded once: `y` is set to the bias and the product is added to it; or `y += x W`.
fn forward<E: Element>(
    workers: &Workers,
    dims: LinearDims,
    x: &[E],
    weight: &[E],
    bias: Option<&[E]>,
    y: &mut [E],
    accumulate: bool,
) {
    if let Some(bias) = bias {
        y.chunks_mut(dims.y_stride).for_each(|row| row[..bias.len()].copy_from_slice(bias));
    }
    let x = Matrix::new(x, dims.rows, dims.inputs, dims.inputs);
    let target = Target { data: E::floats_mut(y), accumulate: accumulate || bias.is_some() };
    let dst = MatrixMut { target, rows: dims.rows, cols: dims.outputs, stride: dims.y_stride };
    matmul(workers, dst, x, dims.weight(weight));
}

/// `dx = dy W^T`.
fn backward_input<E: Element>(
    workers: &Workers,
    dims: LinearDims,
    dy: &[E],
    weight: &[E],
    dx: &mut [E],
    accumulate: bool,
) {
    let target = Target { data: E::floats_mut(dx), accumulate };
    let dst = MatrixMut::dense(target, dims.rows, dims.inputs);
    matmul(workers, dst, dims.strided(dy), dims.weight(weight).t());
}

/// `dW = x^T dy` in the weight's orientation.
fn backward_weight<E: Element>(workers: &Workers, dims: LinearDims, x: &[E], dy: &[E], dweight: Target<'_>) {
    let x = Matrix::new(x, dims.rows, dims.inputs, dims.inputs);
    let dy = dims.strided(dy);
    match dims.orientation {
        Orientation::OutIn => {
            matmul(workers, MatrixMut::dense(dweight, dims.outputs, dims.inputs), dy.t(), x);
        }
        Orientation::InOut => {
            matmul(workers, MatrixMut::dense(dweight, dims.inputs, dims.outputs), x.t(), dy);
        }
    }
}

/// Sums the columns of `dy`.
pub(super) fn column_sums<E: Element>(
    workers: &Workers,
    [columns, stride]: [usize; 2],
    dy: &[E],
    mut into: Target<'_>,
) {
    let partials = workers.map(dy.chunks(stride * PARTIAL_ROWS), |rows| {
        let mut sums = vec![E::Acc::ZERO; columns];
        add_rows(stride, rows, &mut sums);
        sums
    });
    into.put(0, &combine(partials));
}

vectorized! {
    fn add_rows<E: Element>(stride: usize, rows: &[E], sums: &mut [E::Acc]) {
        for row in rows.chunks(stride) {
            for (sum, y) in sums.iter_mut().zip(row) {
                *sum += y.load();
            }
        }
    }
}

/// Adds partial sums in index order.
pub(super) fn combine<A: Float>(partials: Vec<Vec<A>>) -> Vec<A> {
    let mut partials = partials.into_iter();
    let mut total = partials.next().unwrap_or_default();
    for partial in partials {
        total.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
    total
}
