//! Linear maps.

use fsdp_nn::op::{Linear, LinearDims, Orientation};

use super::Call;
use crate::hlo::Value;
use crate::memory::In;
use crate::trace::Trace;

impl Trace {
    pub(super) fn linear(&mut self, op: Linear, operands: Call<'_, '_>) {
        match op {
            Linear::Forward { dims, bias } => {
                let reads = operands.reads;
                let ([x, weight], [mut y], _) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.inputs), self.weight(dims, weight));
                let mut product = self.hlo.matmul(&x, &weight, [1, inputs(dims)], x.element().master());
                if bias {
                    let bias = self.read_master(reads[2]);
                    let bias = self.in_rows(&bias, dims.rows);
                    product = self.hlo.add(&product, &bias);
                }
                self.write_columns(&mut y, &product, dims.y_stride);
            }
            Linear::BackwardInput { dims } => {
                let ([dy, weight], [dx], _) = operands.split();
                let (dy, weight) = (self.outputs(dims, dy), self.weight(dims, weight));
                let product = self.hlo.matmul(&dy, &weight, [1, 1 - inputs(dims)], dy.element().master());
                self.write(&dx, &product);
            }
            Linear::BackwardWeight { dims } => {
                let ([x, dy], [dweight], _) = operands.split();
                let (x, dy) = (self.read_rows(x, dims.inputs), self.outputs(dims, dy));
                let (a, b) = if dims.orientation == Orientation::OutIn { (&dy, &x) } else { (&x, &dy) };
                let product = self.hlo.matmul(a, b, [0, 0], x.element().master());
                self.write(&dweight, &product);
            }
            Linear::ColumnSums { rows, columns, stride } => {
                let ([dy], [sums], _) = operands.split();
                let dy = self.read_columns(dy, [rows, columns, stride]);
                let dy = self.hlo.master(&dy);
                let total = self.hlo.sum_rows(&dy);
                self.write(&sums, &total);
            }
        }
    }

    fn weight(&mut self, dims: LinearDims, weight: In<'_>) -> Value {
        match dims.orientation {
            Orientation::OutIn => self.read_rows(weight, dims.inputs),
            Orientation::InOut => self.read_rows(weight, dims.outputs),
        }
    }

    fn outputs(&mut self, dims: LinearDims, y: In<'_>) -> Value {
        self.read_columns(y, [dims.rows, dims.outputs, dims.y_stride])
    }
}

/// The dimension of a weight that its inputs index.
fn inputs(dims: LinearDims) -> usize {
    usize::from(dims.orientation == Orientation::OutIn)
}
