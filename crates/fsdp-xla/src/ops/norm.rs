//! Normalizations of rows.

use fsdp_nn::op::Norm;

use super::Call;
use crate::hlo::Value;
use crate::memory::In;
use crate::trace::Trace;

impl Trace {
    pub(super) fn norm(&mut self, op: Norm, operands: Call<'_, '_>) {
        match op {
            Norm::Rms { width, eps, offset, .. } => self.rms_norm((width, eps, offset), operands),
            Norm::RmsBackward { width, offset, weight, .. } => {
                self.rms_norm_backward((width, offset, weight), operands);
            }
            Norm::Layer { width, eps, .. } => self.layer_norm(width, eps, operands),
            Norm::LayerBackwardInput { width, .. } => {
                let ([x, weight, stats, dy], [dx], _) = operands.split();
                let (x, dy) = (self.read_rows_master(x, width), self.read_rows_master(dy, width));
                let weight = self.scale(weight, 0.0, x.dims()[0]);
                let [normal, rstd] = self.normalized(&x, stats);
                let scaled = self.hlo.multiply(&dy, &weight);
                let projection = self.mean_product(&scaled, &normal);
                let mean = self.row_means(&scaled);
                let mean = self.in_columns(&mean, width);
                let rest = self.hlo.subtract(&scaled, &mean);
                let projection = self.hlo.multiply(&normal, &projection);
                let rest = self.hlo.subtract(&rest, &projection);
                let slope = self.hlo.multiply(&rest, &rstd);
                self.write(&dx, &slope);
            }
            Norm::LayerBackwardWeight { width, .. } => {
                let ([x, stats, dy], [dweight], _) = operands.split();
                let (x, dy) = (self.read_rows_master(x, width), self.read_rows_master(dy, width));
                let [normal, _] = self.normalized(&x, stats);
                let products = self.hlo.multiply(&dy, &normal);
                let sums = self.hlo.sum_rows(&products);
                self.write(&dweight, &sums);
            }
        }
    }

    /// `weight + offset`, broadcast to every row.
    fn scale(&mut self, weight: In<'_>, offset: f64, rows: usize) -> Value {
        let mut weight = self.read_master(weight);
        if offset != 0.0 {
            weight = self.hlo.with("add", &weight, offset);
        }
        self.in_rows(&weight, rows)
    }

    /// The mean of the products of each row, broadcast to all of its columns.
    fn mean_product(&mut self, a: &Value, b: &Value) -> Value {
        let products = self.hlo.multiply(a, b);
        let means = self.row_means(&products);
        self.in_columns(&means, a.dims()[1])
    }

    fn rms_norm(&mut self, (width, eps, offset): (usize, f64, f64), operands: Call<'_, '_>) {
        let ([x, weight], [y, rstd], _) = operands.split();
        let x = self.read_rows_master(x, width);
        let weight = self.scale(weight, offset, x.dims()[0]);
        let squares = self.hlo.multiply(&x, &x);
        let means = self.row_means(&squares);
        let means = self.hlo.with("add", &means, eps);
        let roots = self.hlo.unary("rsqrt", &means);
        self.write(&rstd, &roots);
        let roots = self.in_columns(&roots, width);
        let normal = self.hlo.multiply(&x, &roots);
        let scaled = self.hlo.multiply(&normal, &weight);
        self.write(&y, &scaled);
    }

    fn rms_norm_backward(&mut self, (width, offset, trains): (usize, f64, bool), operands: Call<'_, '_>) {
        let ([x, weight, rstd, dy], [dx], mut more) = operands.split();
        let (x, dy) = (self.read_rows_master(x, width), self.read_rows_master(dy, width));
        let weight = self.scale(weight, offset, x.dims()[0]);
        let rstd = self.read_master(rstd);
        let rstd = self.in_columns(&rstd, width);
        let normal = self.hlo.multiply(&x, &rstd);
        let scaled = self.hlo.multiply(&dy, &weight);
        let projection = self.mean_product(&scaled, &normal);
        let projection = self.hlo.multiply(&normal, &projection);
        let rest = self.hlo.subtract(&scaled, &projection);
        let slope = self.hlo.multiply(&rest, &rstd);
        self.write(&dx, &slope);
        if let Some(dweight) = more.next().filter(|_| trains) {
            let products = self.hlo.multiply(&dy, &normal);
            let sums = self.hlo.sum_rows(&products);
            self.write(&dweight, &sums);
        }
    }

    fn layer_norm(&mut self, width: usize, eps: f64, operands: Call<'_, '_>) {
        let bias = operands.reads.get(2).copied();
        let ([x, weight], [y, stats], _) = operands.split();
        let x = self.read_rows_master(x, width);
        let rows = x.dims()[0];
        let (weight, bias) = (self.scale(weight, 0.0, rows), bias.map(|bias| self.scale(bias, 0.0, rows)));
        let means = self.row_means(&x);
        let wide = self.in_columns(&means, width);
        let centred = self.hlo.subtract(&x, &wide);
        let squares = self.hlo.multiply(&centred, &centred);
        let variances = self.row_means(&squares);
        let variances = self.hlo.with("add", &variances, eps);
        let roots = self.hlo.unary("rsqrt", &variances);
        let pairs = [&means, &roots].map(|column| self.hlo.reshape(column, &[rows, 1]));
        let pairs = self.hlo.concatenate(&pairs, 1);
        self.write(&stats, &pairs);
        let roots = self.in_columns(&roots, width);
        let normal = self.hlo.multiply(&centred, &roots);
        let scaled = self.hlo.multiply(&normal, &weight);
        let shifted = match &bias {
            Some(bias) => self.hlo.add(&scaled, bias),
            None => scaled,
        };
        self.write(&y, &shifted);
    }

    /// `(x - mean) * rstd`, and `rstd` broadcast to all columns.
    fn normalized(&mut self, x: &Value, stats: In<'_>) -> [Value; 2] {
        let (rows, width) = (x.dims()[0], x.dims()[1]);
        let stats = self.read_rows_master(stats, 2);
        let column = |trace: &mut Trace, index: usize| {
            let column = trace.hlo.columns(&stats, index..index + 1);
            let column = trace.hlo.reshape(&column, &[rows]);
            trace.in_columns(&column, width)
        };
        let (mean, rstd) = (column(self, 0), column(self, 1));
        let centred = self.hlo.subtract(x, &mean);
        [self.hlo.multiply(&centred, &rstd), rstd]
    }
}
