//! Matrix products of any mix of float types, computed in the type of arithmetic.
//!
//! If all types agree, this is one call of `gemm`. If an operand is in bf16, the CPU's instructions for it are used
//! where they are faster. Otherwise operands are widened and results rounded (once) panel by panel; the panels are
//! determined by the shape and never split the summed dimension.

mod bf16;

use fsdp_core::DType;
use ndarray::{ArrayView2, ArrayViewMut2, ShapeBuilder};

use crate::host::element::{Element, Float};
use crate::host::floats::{Target, cast};
use crate::host::pool::Scratch;
use crate::host::raw::{Bf16Dot, product};
use crate::host::workers::{Workers, task_rows};

use bf16::Operand;

/// Rows and columns of a panel of the result.
const PANEL: usize = 512;

/// Maximum columns of a narrow result, whose short rows would leave vectors partly empty. Wider results gain nothing.
const NARROW: usize = 32;

/// A readable matrix, possibly transposed, with contiguous rows `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl<'a, E: Element> Matrix<'a, E> {
    /// A matrix of `rows x cols` elements with rows `stride` apart.
    pub(crate) fn new(data: &'a [E], rows: usize, cols: usize, stride: usize) -> Self {
        Self { data, rows, cols, stride, transposed: false }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Returns the number of rows and columns.
    fn dim(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Returns a range of rows (after transposition).
    fn rows(self, start: usize, count: usize) -> Self {
        if self.transposed {
            return Self { data: &self.data[start..], cols: count, ..self };
        }
        Self { data: &self.data[start * self.stride..], rows: count, ..self }
    }

    fn view(self) -> ArrayView2<'a, E> {
        let view = ArrayView2::from_shape((self.rows, self.cols).strides((self.stride, 1)), self.data);
        let view = view.expect("lengths were checked by the caller of the kernel");
        if self.transposed { view.reversed_axes() } else { view }
    }
}

/// A writable matrix with contiguous rows `stride` elements apart.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a> {
    /// The elements, and whether to add to them.
    pub(crate) target: Target<'a>,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Number of columns.
    pub(crate) cols: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl<'a> MatrixMut<'a> {
    /// A matrix with contiguous rows.
    pub(crate) fn dense(target: Target<'a>, rows: usize, cols: usize) -> Self {
        Self { target, rows, cols, stride: cols }
    }
}

/// `dst = lhs * rhs`, or `dst += lhs * rhs` if the target accumulates.
pub(crate) fn matmul<L: Element, R: Element<Acc = L::Acc>>(
    workers: &Workers,
    mut dst: MatrixMut<'_>,
    lhs: Matrix<'_, L>,
    rhs: Matrix<'_, R>,
) {
    let accumulate = dst.target.accumulate;
    let (rows, cols, stride) = (dst.rows, dst.cols, dst.stride);
    assert!(lhs.dim().0 == rows && rhs.dim().1 == cols && lhs.dim().1 == rhs.dim().0, "shapes fit");
    if rows == 0 || cols == 0 {
        return;
    }
    if let (Some(data), Some(lhs), Some(rhs)) = (dst.target.direct::<L::Acc>(), exact(lhs), exact(rhs)) {
        return multiply(workers, mutable(data, rows, cols, stride), accumulate, lhs, rhs);
    }
    let depth = lhs.dim().1;
    let is_bf16 = L::DTYPE == DType::Bf16 || R::DTYPE == DType::Bf16;
    if is_bf16
        && depth > 0
        && let (Some(dot), Some(lhs), Some(rhs)) = (Bf16Dot::where_fast(), Operand::of(lhs), Operand::of(rhs))
    {
        return bf16::matmul(dot, workers, dst, depth, lhs, rhs);
    }
    for row in (0..rows).step_by(PANEL) {
        let panel_rows = PANEL.min(rows - row);
        let wide_lhs = Widened::new(workers, lhs.rows(row, panel_rows));
        for col in (0..cols).step_by(PANEL) {
            let panel_cols = PANEL.min(cols - col);
            let wide_rhs = Widened::new(workers, rhs.t().rows(col, panel_cols));
            let start = row * stride + col;
            let panel = Panel { start, rows: panel_rows, cols: panel_cols, stride };
            panel.compute(workers, &mut dst.target, wide_lhs.view(), wide_rhs.view().reversed_axes());
        }
    }
}

/// A block of the result.
struct Panel {
    start: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl Panel {
    fn compute<A: Float>(
        &self,
        workers: &Workers,
        target: &mut Target<'_>,
        lhs: ArrayView2<'_, A>,
        rhs: ArrayView2<'_, A>,
    ) {
        let accumulate = target.accumulate;
        if let Some(data) = target.direct::<A>() {
            let dst = mutable(&mut data[self.start..], self.rows, self.cols, self.stride);
            return multiply(workers, dst, accumulate, lhs, rhs);
        }
        let mut wide = workers.scratch::<A>(self.rows * self.cols);
        let dst = mutable(&mut wide, self.rows, self.cols, self.cols);
        multiply(workers, dst, false, lhs, rhs);
        for (row, values) in wide.chunks(self.cols).enumerate() {
            target.put(self.start + row * self.stride, values);
        }
    }
}

/// `dst = lhs * rhs`, or `dst += lhs * rhs`.
///
/// If `lhs` is stored by columns, as for the weight gradient of a map with few inputs (such as an adapter), a narrow
/// result is computed by columns and then transposed: `gemm` vectorizes along the contiguous dimension of the result.
fn multiply<A: Float>(
    workers: &Workers,
    mut dst: ArrayViewMut2<'_, A>,
    accumulate: bool,
    lhs: ArrayView2<'_, A>,
    rhs: ArrayView2<'_, A>,
) {
    let (rows, cols) = dst.dim();
    let multiplications = rows * cols * lhs.ncols();
    let is_narrow = cols <= NARROW && cols < rows && lhs.strides()[0] == 1;
    if !is_narrow {
        return workers.product(multiplications, |threads| product(dst, accumulate, lhs, rhs, threads));
    }
    let mut columns = workers.scratch::<A>(rows * cols);
    let mut by_columns = mutable(&mut columns, cols, rows, rows).reversed_axes();
    workers.product(multiplications, |threads| product(by_columns.view_mut(), false, lhs, rhs, threads));
    dst.zip_mut_with(&by_columns, |dst, &sum| *dst = if accumulate { *dst + sum } else { sum });
}

/// A panel of an operand, widened to the type of arithmetic; its rows are contiguous unless it is transposed.
struct Widened<A> {
    data: Scratch<A>,
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl<A: Float> Widened<A> {
    fn new<E: Element<Acc = A>>(workers: &Workers, matrix: Matrix<'_, E>) -> Self {
        let Matrix { data, rows, cols, stride, transposed } = matrix;
        let mut wide = workers.scratch(rows * cols);
        let tasks = wide.chunks_mut(cols * task_rows(cols)).enumerate();
        workers.each(tasks, |(task, wide)| {
            let first = task * task_rows(cols);
            for (row, wide) in wide.chunks_mut(cols).enumerate() {
                let start = (first + row) * stride;
                cast(&data[start..start + cols], wide);
            }
        });
        Self { data: wide, rows, cols, transposed }
    }

    fn view(&self) -> ArrayView2<'_, A> {
        Matrix {
            data: &self.data,
            rows: self.rows,
            cols: self.cols,
            stride: self.cols,
            transposed: self.transposed,
        }
        .view()
    }
}

/// Returns a view of the matrix if its elements already have the type of arithmetic.
fn exact<'a, E: Element>(matrix: Matrix<'a, E>) -> Option<ArrayView2<'a, E::Acc>> {
    let data = E::Acc::from_floats(E::floats(matrix.data))?;
    let Matrix { rows, cols, stride, transposed, .. } = matrix;
    Some(Matrix { data, rows, cols, stride, transposed }.view())
}

/// Returns a writable view of rows `stride` apart.
pub(crate) fn mutable<A: Float>(
    data: &mut [A],
    rows: usize,
    cols: usize,
    stride: usize,
) -> ArrayViewMut2<'_, A> {
    let view = ArrayViewMut2::from_shape((rows, cols).strides((stride, 1)), data);
    view.expect("lengths were checked by the caller of the kernel")
}
