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
                let _room = if is_rounded { more.next() } else { None };
                let results = Results { losses, dx: Some(dx), dweight, z_losses: more.next() };
                self.loss(dims, [&x, &weight, &targets], &results);
            }
            Head::Logits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let mut made = self.hlo.matmul(&x, &weight, [1, 1], x.element().master());
                if let Some(cap) = dims.softcap {
                    [made, _] = self.capped(&made, cap);
                }
                self.write(&logits, &made);
            }
            Head::CrossEntropy { dims } => {
                let ([logits, targets], [losses], mut more) = operands.split();
                let (logits, targets) = (self.read_rows_master(logits, dims.vocab), self.read(targets));
                let made = self.cross_entropy(dims, &logits, &targets);
                self.write(&losses, &made.losses);
                self.write_if_there(more.next().as_ref(), made.z_losses.as_ref());
            }
            Head::CrossEntropyBackward { dims, is_rounded } => {
                let ([targets], [logits, losses], mut more) = operands.split();
                let targets = self.read(targets);
                let x = self.read_rows_master(logits.slice.as_slice(), dims.vocab);
                let made = self.cross_entropy(dims, &x, &targets);
                self.write(&losses, &made.losses);
                let rounded = if is_rounded { more.next() } else { None };
                self.write(rounded.as_ref().unwrap_or(&logits), &made.slopes);
                self.write_if_there(more.next().as_ref(), made.z_losses.as_ref());
            }
        }
    }

    fn write_if_there(&mut self, write: Option<&Write<'_, XlaBuffer>>, value: Option<&Value>) {
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
            let mut own = self.hlo.slice(x, &[rows.clone(), 0..dims.hidden]);
            if let Some(last) = dx.last().or(losses.last()) {
                // Order the chunks, so that only one chunk's logits are in memory at a time.
                own = self.hlo.behind(&own, last);
            }
            let logits = self.hlo.matmul(&own, weight, [1, 1], master);
            let own_targets = self.hlo.range(targets, rows.clone());
            let made = self.cross_entropy(dims.logits(rows.len()), &logits, &own_targets);
            losses.push(made.losses);
            z_losses.extend(made.z_losses);
            if results.dx.is_none() {
                continue;
            }
            let slopes = self.hlo.convert(&made.slopes, element);
            let part = self.hlo.matmul(&slopes, weight, [1, 0], master);
            dx.push(self.hlo.convert(&part, element));
            let part = self.hlo.matmul(&slopes, &own, [0, 0], master);
            dweight = Some(match dweight {
                Some(sum) => self.hlo.add(&sum, &part),
                None => part,
            });
        }
        let all =
            |trace: &mut Trace, parts: &[Value]| (!parts.is_empty()).then(|| trace.hlo.concatenate(parts, 0));
        let (losses, z_losses, dx) = (all(self, &losses), all(self, &z_losses), all(self, &dx));
        self.write_if_there(Some(&results.losses), losses.as_ref());
        self.write_if_there(results.z_losses.as_ref(), z_losses.as_ref());
        self.write_if_there(results.dx.as_ref(), dx.as_ref());
        self.write_if_there(results.dweight.as_ref(), dweight.as_ref());
    }

    fn cross_entropy(&mut self, dims: LogitsDims, logits: &Value, targets: &Value) -> RowLosses {
        let (rows, sizes, element) = (dims.rows, logits.dims(), logits.element());
        let terms = dims.terms;
        let (mut x, mut bend) = (logits.clone(), None);
        if let Some(cap) = dims.softcap {
            let [capped, slope] = self.capped(logits, cap);
            (x, bend) = (capped, Some(slope));
        }
        let hlo = &mut self.hlo;
        let wide = |hlo: &mut crate::hlo::Builder, of_rows: &Value| hlo.broadcast(of_rows, &[0], sizes);
        let classes = hlo.iota(sizes, 1, Element::U32);
        let wanted = wide(hlo, targets);
        let is_target = hlo.compare("EQ", &classes, &wanted);
        let zeros = hlo.zeros(sizes, element);
        let own = hlo.select(&is_target, &x, &zeros);
        let own = hlo.sum(&own, &[1]);
        let largest = hlo.largest(&x, &[1]);
        let most = wide(hlo, &largest);
        let exponentials = hlo.subtract(&x, &most);
        let exponentials = hlo.unary("exponential", &exponentials);
        let sums = hlo.sum(&exponentials, &[1]);
        let [wide_sums, wide_largest, wide_own] =
            [&sums, &largest, &own].map(|value| hlo.convert(value, Element::F64));
        let logarithms = hlo.unary("log", &wide_sums);
        let gap = hlo.subtract(&wide_largest, &wide_own);
        let mut loss = hlo.add(&logarithms, &gap);
        let normalizers = hlo.add(&logarithms, &wide_largest);
        if terms.label_smoothing > 0.0 {
            let total = hlo.sum(&x, &[1]);
            let total = hlo.convert(&total, Element::F64);
            let mean = hlo.with("divide", &total, dims.vocab as f64);
            let more = hlo.subtract(&wide_own, &mean);
            let more = hlo.with("multiply", &more, terms.label_smoothing);
            loss = hlo.add(&loss, &more);
        }
        let (mut scale, mut z_losses) = (hlo.float(1.0, &[rows], element), None);
        if terms.z_loss > 0.0 {
            let more = hlo.multiply(&normalizers, &normalizers);
            let more = hlo.with("multiply", &more, terms.z_loss);
            loss = hlo.add(&loss, &more);
            z_losses = Some(more);
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
        if let Some(bend) = bend {
            slopes = hlo.multiply(&slopes, &bend);
        }
        let slopes = self.scaled(slopes, terms.loss_scale);
        let hlo = &mut self.hlo;
        let ignored = hlo.int(i64::from(IGNORED_TARGET), &[rows], Element::U32);
        let is_ignored = hlo.compare("EQ", targets, &ignored);
        let none = hlo.zeros(&[rows], Element::F64);
        let losses = hlo.select(&is_ignored, &none, &loss);
        let z_losses = z_losses.map(|own| hlo.select(&is_ignored, &none, &own));
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
