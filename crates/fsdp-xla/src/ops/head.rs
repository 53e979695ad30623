//! The output projection to logits, and cross-entropy.

use fsdp_nn::backend::Write;
use fsdp_nn::op::{Head, HeadDims, IGNORED_TARGET, LogitsDims};

use super::Call;
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

/// Outputs of the loss over all rows, which is computed chunk by chunk.
struct Results<'o> {
    losses: Write<'o, XlaBuffer>,
    dx: Option<Write<'o, XlaBuffer>>,
    dweight: Option<Write<'o, XlaBuffer>>,
    /// The z-loss part of each loss, if requested.
    z_losses: Option<Write<'o, XlaBuffer>>,
}

/// Losses of rows of logits in double precision, the z-loss part of each, and the gradient.
struct RowLosses {
    losses: Value,
    z_losses: Option<Value>,
    slopes: Value,
}

impl Trace {
    pub(super) fn head(&mut self, op: Head, operands: Call<'_, '_>) {
        match op {
            Head::Loss { dims } => {
                let ([x, weight, targets], [losses, _], mut more) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let targets = self.read(targets);
                let results = Results { losses, dx: None, dweight: None, z_losses: more.next() };
                self.loss(dims, [&x, &weight, &targets], &results);
            }
            Head::LossBackward { dims, weight: trains, is_rounded } => {
                let ([x, weight, targets], [losses, _, dx], mut more) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let targets = self.read(targets);
                let dweight = if trains { more.next() } else { None };
                let _rounded = if is_rounded { more.next() } else { None };
                let results = Results { losses, dx: Some(dx), dweight, z_losses: more.next() };
                self.loss(dims, [&x, &weight, &targets], &results);
            }
            Head::Logits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let mut logit_rows = self.hlo.matmul(&x, &weight, [1, 1], x.element().master());
                if let Some(cap) = dims.softcap {
                    [logit_rows, _] = self.capped(&logit_rows, cap);
                }
                self.write(&logits, &logit_rows);
            }
            Head::CrossEntropy { dims } => {
                let ([logits, targets], [losses], mut more) = operands.split();
                let (logits, targets) = (self.read_rows_master(logits, dims.vocab), self.read(targets));
                let row_losses = self.cross_entropy(dims, &logits, &targets);
                self.write(&losses, &row_losses.losses);
                self.write_optional(more.next().as_ref(), row_losses.z_losses.as_ref());
            }
            Head::CrossEntropyBackward { dims, is_rounded } => {
                let ([targets], [logits, losses], mut more) = operands.split();
                let targets = self.read(targets);
                let x = self.read_rows_master(logits.slice.as_slice(), dims.vocab);
                let row_losses = self.cross_entropy(dims, &x, &targets);
                self.write(&losses, &row_losses.losses);
                let rounded = if is_rounded { more.next() } else { None };
                self.write(rounded.as_ref().unwrap_or(&logits), &row_losses.slopes);
                self.write_optional(more.next().as_ref(), row_losses.z_losses.as_ref());
            }
        }
    }

    fn write_optional(&mut self, write: Option<&Write<'_, XlaBuffer>>, value: Option<&Value>) {
        if let (Some(write), Some(value)) = (write, value) {
            self.write(write, value);
        }
    }

    /// Computes the losses of all rows and the gradients of their sum, chunk by chunk.
    fn loss(&mut self, dims: HeadDims, [x, weight, targets]: [&Value; 3], results: &Results<'_>) {
        let (element, master) = (x.element(), x.element().master());
        let [mut losses, mut z_losses, mut dx]: [Vec<Value>; 3] = Default::default();
        let mut dweight: Option<Value> = None;
        let chunk = dims.chunk_rows.max(1);
        for start in (0..dims.rows).step_by(chunk) {
            let rows = start..dims.rows.min(start + chunk);
            let mut x_rows = self.hlo.slice(x, &[rows.clone(), 0..dims.hidden]);
            if let Some(last) = dx.last().or(losses.last()) {
                // Order the chunks, so that only one chunk's logits are in memory at a time.
                x_rows = self.hlo.after(&x_rows, last);
            }
            let logits = self.hlo.matmul(&x_rows, weight, [1, 1], master);
            let row_targets = self.hlo.range(targets, rows.clone());
            let row_losses = self.cross_entropy(dims.logits(rows.len()), &logits, &row_targets);
            losses.push(row_losses.losses);
            z_losses.extend(row_losses.z_losses);
            if results.dx.is_none() {
                continue;
            }
            let slopes = self.hlo.convert(&row_losses.slopes, element);
            let part = self.hlo.matmul(&slopes, weight, [1, 0], master);
            dx.push(self.hlo.convert(&part, element));
            let part = self.hlo.matmul(&slopes, &x_rows, [0, 0], master);
            dweight = Some(match dweight {
                Some(sum) => self.hlo.add(&sum, &part),
                None => part,
            });
        }
        let joined =
            |trace: &mut Trace, parts: &[Value]| (!parts.is_empty()).then(|| trace.hlo.concatenate(parts, 0));
        let (losses, z_losses, dx) = (joined(self, &losses), joined(self, &z_losses), joined(self, &dx));
        self.write_optional(Some(&results.losses), losses.as_ref());
        self.write_optional(results.z_losses.as_ref(), z_losses.as_ref());
        self.write_optional(results.dx.as_ref(), dx.as_ref());
        self.write_optional(results.dweight.as_ref(), dweight.as_ref());
    }

    fn cross_entropy(&mut self, dims: LogitsDims, logits: &Value, targets: &Value) -> RowLosses {
        let (rows, sizes, element) = (dims.rows, logits.dims(), logits.element());
        let terms = dims.terms;
        let (mut x, mut cap_slope) = (logits.clone(), None);
        if let Some(cap) = dims.softcap {
            let [capped, slope] = self.capped(logits, cap);
            (x, cap_slope) = (capped, Some(slope));
        }
        let hlo = &mut self.hlo;
        let wide = |hlo: &mut crate::hlo::Builder, of_rows: &Value| hlo.broadcast(of_rows, &[0], sizes);
        let classes = hlo.iota(sizes, 1, Element::U32);
        let broadcast_targets = wide(hlo, targets);
        let is_target = hlo.compare("EQ", &classes, &broadcast_targets);
        let zeros = hlo.zeros(sizes, element);
        let target_logits = hlo.select(&is_target, &x, &zeros);
        let target_logits = hlo.sum(&target_logits, &[1]);
        let largest = hlo.largest(&x, &[1]);
        let row_max = wide(hlo, &largest);
        let exponentials = hlo.subtract(&x, &row_max);
        let exponentials = hlo.unary("exponential", &exponentials);
        let sums = hlo.sum(&exponentials, &[1]);
        let [wide_sums, wide_largest, wide_target_logits] =
            [&sums, &largest, &target_logits].map(|value| hlo.convert(value, Element::F64));
        let logarithms = hlo.unary("log", &wide_sums);
        let gap = hlo.subtract(&wide_largest, &wide_target_logits);
        let mut loss = hlo.add(&logarithms, &gap);
        let normalizers = hlo.add(&logarithms, &wide_largest);
        if terms.label_smoothing > 0.0 {
            let total = hlo.sum(&x, &[1]);
            let total = hlo.convert(&total, Element::F64);
            let mean = hlo.with("divide", &total, dims.vocab as f64);
            let extra = hlo.subtract(&wide_target_logits, &mean);
            let extra = hlo.with("multiply", &extra, terms.label_smoothing);
            loss = hlo.add(&loss, &extra);
        }
        let (mut scale, mut z_losses) = (hlo.float(1.0, &[rows], element), None);
        if terms.z_loss > 0.0 {
            let extra = hlo.multiply(&normalizers, &normalizers);
            let extra = hlo.with("multiply", &extra, terms.z_loss);
            loss = hlo.add(&loss, &extra);
            z_losses = Some(extra);
            let factor = hlo.with("multiply", &normalizers, 2.0 * terms.z_loss);
            let factor = hlo.with("add", &factor, 1.0);
            scale = hlo.convert(&factor, element);
        }
        let scale = hlo.divide(&scale, &sums);
        let scale = wide(hlo, &scale);
        let mut slopes = hlo.multiply(&exponentials, &scale);
        if terms.label_smoothing > 0.0 {
            slopes = hlo.with("subtract", &slopes, terms.label_smoothing / dims.vocab as f64);
        }
        let less = hlo.with("subtract", &slopes, 1.0 - terms.label_smoothing);
        let mut slopes = hlo.select(&is_target, &less, &slopes);
        if let Some(cap_slope) = cap_slope {
            slopes = hlo.multiply(&slopes, &cap_slope);
        }
        let slopes = self.scaled(slopes, terms.loss_scale);
        let hlo = &mut self.hlo;
        let ignored = hlo.int(i64::from(IGNORED_TARGET), &[rows], Element::U32);
        let is_ignored = hlo.compare("EQ", targets, &ignored);
        let zero_losses = hlo.zeros(&[rows], Element::F64);
        let losses = hlo.select(&is_ignored, &zero_losses, &loss);
        let z_losses = z_losses.map(|losses| hlo.select(&is_ignored, &zero_losses, &losses));
        let is_ignored = wide(hlo, &is_ignored);
        RowLosses { losses, z_losses, slopes: hlo.select(&is_ignored, &zeros, &slopes) }
    }

    /// Multiplies slopes by the loss scale. The scale is an argument, so the program is the same for all scales but 1.
    fn scaled(&mut self, slopes: Value, loss_scale: f64) -> Value {
        if loss_scale == 1.0 {
            return slopes;
        }
        let scale = self.input_floats(&[loss_scale], slopes.element());
        let scale = self.hlo.reshape(&scale, &[]);
        let scale = self.hlo.broadcast(&scale, &[], slopes.dims());
        self.hlo.multiply(&slopes, &scale)
    }
}
