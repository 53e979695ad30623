//! Sums, copies and dropout.

use fsdp_nn::op::{Dropout, Pointwise};

use super::Call;
use crate::trace::Trace;

impl Trace {
    pub(super) fn pointwise(&mut self, op: Pointwise, operands: Call<'_, '_>) {
        match op {
            Pointwise::Add { .. } => {
                let ([a, b], [y], _) = operands.split();
                let (a, b) = (self.read_master(a), self.read_master(b));
                let sum = self.hlo.add(&a, &b);
                self.write(&y, &sum);
            }
            Pointwise::Accumulate { .. } => {
                let ([x], [y], _) = operands.split();
                let (x, old) = (self.read_master(x), self.read_master(y.slice.as_slice()));
                let sum = self.hlo.add(&old, &x);
                self.write(&y, &sum);
            }
            Pointwise::Copy { .. } | Pointwise::Convert { .. } => {
                let ([x], [y], _) = operands.split();
                let x = self.read(x);
                self.write(&y, &x);
            }
            Pointwise::CopyColumns { rows, columns, from, to } => {
                let ([x], [mut y], _) = operands.split();
                let x = self.read_columns(x, [rows, columns, from]);
                self.write_columns(&mut y, &x, to);
            }
            Pointwise::Regroup { rows, groups, parts, width } => {
                let ([x], [y], _) = operands.split();
                let x = self.read(x);
                let x = self.hlo.reshape(&x, &[rows, groups, parts, width]);
                let x = self.hlo.transpose(&x, &[0, 2, 1, 3]);
                self.write(&y, &x);
            }
            Pointwise::Repeat { rows, width } => {
                let ([x], [y], _) = operands.split();
                let x = self.read(x);
                let x = self.hlo.broadcast(&x, &[1], &[rows, width]);
                self.write(&y, &x);
            }
            Pointwise::Scale { factor, .. } => {
                let ([], [x], _) = operands.split();
                let value = self.read_master(x.slice.as_slice());
                let scaled = self.hlo.with("multiply", &value, factor);
                self.write(&x, &scaled);
            }
            Pointwise::Dropout { p, .. } => {
                let dropout = Dropout { p, keys: operands.batch.keys };
                let ([], [x], _) = operands.split();
                let value = self.read_master(x.slice.as_slice());
                let (keys, count) = (self.dropout_keys(dropout), value.len() / dropout.keys.len());
                let factors = self.dropout_factors(dropout, keys, count, value.element());
                let factors = self.hlo.reshape(&factors, value.dims());
                let kept = self.hlo.multiply(&value, &factors);
                self.write(&x, &kept);
            }
        }
    }
}
