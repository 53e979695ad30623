//! DoRA: the lengths of rows of adapted weights, and products by one number per column.

use fsdp_nn::op::{AdaptedDims, Dora, Orientation};

use super::Call;
use crate::hlo::Value;
use crate::memory::In;
use crate::trace::Trace;

impl Trace {
    pub(super) fn dora(&mut self, op: Dora, operands: Call<'_, '_>) {
        match op {
            Dora::Norms { dims } => {
                let (reads, [norms], _) = operands.split();
                let lengths = self.row_norms(dims, reads);
                self.write(&norms, &lengths);
            }
            Dora::Rescale { rows, width, .. } => {
                let bias = operands.reads.get(3).copied();
                let ([x, magnitude, norms], [y], _) = operands.split();
                let factors = self.column_factors([magnitude, norms], rows);
                let x = self.read_rows_master(x, width);
                let mut scaled = self.hlo.multiply(&x, &factors);
                if let Some(bias) = bias {
                    let bias = self.read_master(bias);
                    let bias = self.in_rows(&bias, rows);
                    scaled = self.hlo.add(&scaled, &bias);
                }
                self.write(&y, &scaled);
            }
            Dora::RescaleBackward { rows, width } => {
                let ([x, magnitude, norms], [dy, dmagnitude], _) = operands.split();
                let factors = self.column_factors([magnitude, norms], rows);
                let x = self.read_rows_master(x, width);
                let gradient = self.read_rows_master(dy.slice.as_slice(), width);
                let products = self.hlo.multiply(&gradient, &x);
                let (sums, norms) = (self.hlo.sum_rows(&products), self.read_master(norms));
                let sums = self.hlo.divide(&sums, &norms);
                self.write(&dmagnitude, &sums);
                let scaled = self.hlo.multiply(&gradient, &factors);
                self.write(&dy, &scaled);
            }
        }
    }

    /// The factor of each column, in every row.
    fn column_factors(&mut self, [magnitude, norms]: [In<'_>; 2], rows: usize) -> Value {
        let (magnitude, norms) = (self.read_master(magnitude), self.read_master(norms));
        let factors = self.hlo.divide(&magnitude, &norms);
        self.in_rows(&factors, rows)
    }

    fn row_norms(&mut self, dims: AdaptedDims, [weight, down, up]: [In<'_>; 3]) -> Value {
        let AdaptedDims { inputs, outputs, rank, scale, orientation } = dims;
        let weight = match orientation {
            Orientation::OutIn => self.read_rows_master(weight, inputs),
            Orientation::InOut => {
                let weight = self.read_rows_master(weight, outputs);
                self.hlo.transpose(&weight, &[1, 0])
            }
        };
        let (down, up) = (self.read_rows(down, inputs), self.read_rows(up, rank));
        let product = self.hlo.matmul(&up, &down, [1, 0], weight.element());
        let product = self.hlo.with("multiply", &product, scale);
        let sums = self.hlo.add(&weight, &product);
        let squares = self.hlo.multiply(&sums, &sums);
        let squares = self.hlo.sum(&squares, &[1]);
        self.hlo.unary("sqrt", &squares)
    }
}
