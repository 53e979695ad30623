//! The map to logits, and its cross-entropy.

use fsdp_nn::backend::Write;
use fsdp_nn::op::{Head, HeadDims, IGNORED_TARGET, LogitsDims};

use super::Call;
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

/// Gradients that are written while chunks follow each other.
struct Gradients<'o> {
    dx: Write<'o, XlaBuffer>,
    dweight: Option<Write<'o, XlaBuffer>>,
}

impl Trace {
    pub(super) fn head(&mut self, op: Head, operands: Call<'_, '_>) {
        match op {
            Head::Loss { dims } => {
                let ([x, weight, targets], [losses, _], _) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let targets = self.read(targets);
                self.loss(dims, [&x, &weight, &targets], &losses, None);
            }
            Head::LossBackward { dims, weight: trains, .. } => {
                let ([x, weight, targets], [losses, _, dx], mut more) = operands.split();
                let (x, weight) = (self.read_rows(x, dims.hidden), self.read_rows(weight, dims.hidden));
                let targets = self.read(targets);
                let dweight = more.next().filter(|_| trains);
                self.loss(dims, [&x, &weight, &targets], &losses, Some(Gradients { dx, dweight }));
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
                let ([logits, targets], [losses], _) = operands.split();
                let (logits, targets) = (self.read_rows_master(logits, dims.vocab), self.read(targets));
                let [loss, _] = self.cross_entropy(dims, &logits, &targets);
                self.write(&losses, &loss);
            }
            Head::CrossEntropyBackward { dims, rounds } => {
                let ([targets], [logits, losses], mut more) = operands.split();
                let targets = self.read(targets);
                let x = self.read_rows_master(logits.slice.as_slice(), dims.vocab);
                let [loss, slopes] = self.cross_entropy(dims, &x, &targets);
                self.write(&losses, &loss);
                self.write(more.next().filter(|_| rounds).as_ref().unwrap_or(&logits), &slopes);
            }
        }
    }

    /// The losses of all rows and the gradients of their sum, chunk by chunk.
    fn loss(
        &mut self,
        dims: HeadDims,
        [x, weight, targets]: [&Value; 3],
        losses: &Write<'_, XlaBuffer>,
        gradients: Option<Gradients<'_>>,
    ) {
        let (element, master) = (x.element(), x.element().master());
        let (mut all_losses, mut all_dx, mut dweight): (Vec<Value>, Vec<Value>, Option<Value>) = Default::default();
        let chunk = dims.chunk_rows.max(1);
        for start in (0..dims.rows).step_by(chunk) {
            let rows = start..dims.rows.min(start + chunk);
            let mut own = self.hlo.slice(x, &[rows.clone(), 0..dims.hidden]);
            if let Some(last) = all_dx.last().or(all_losses.last()) {
                // One chunk after the other, so that their logits are not there at the same time.
                own = self.hlo.barrier(&[own, last.clone()]).swap_remove(0);
            }
            let logits = self.hlo.matmul(&own, weight, [1, 1], master);
            let own_targets = self.hlo.slice(targets, std::slice::from_ref(&rows));
            let [loss, slopes] = self.cross_entropy(dims.logits(rows.len()), &logits, &own_targets);
            all_losses.push(loss);
            if gradients.is_none() {
                continue;
            }
            let slopes = self.hlo.convert(&slopes, element);
            let dx = self.hlo.matmul(&slopes, weight, [1, 0], master);
            all_dx.push(self.hlo.convert(&dx, element));
            let part = self.hlo.matmul(&slopes, &own, [0, 0], master);
            dweight = Some(match dweight {
                Some(sum) => self.hlo.add(&sum, &part),
                None => part,
            });
        }
        let loss = self.hlo.concatenate(&all_losses, 0);
        self.write(losses, &loss);
        let Some(gradients) = gradients else { return };
        let dx = self.hlo.concatenate(&all_dx, 0);
        self.write(&gradients.dx, &dx);
        if let (Some(write), Some(dweight)) = (&gradients.dweight, &dweight) {
            self.write(write, dweight);
        }
    }

    /// The loss of each row of logits, in double precision, and its gradient.
    fn cross_entropy(&mut self, dims: LogitsDims, logits: &Value, targets: &Value) -> [Value; 2] {
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
        let own = hlo.reduce("add", &own, &[1]);
        let largest = hlo.reduce("maximum", &x, &[1]);
        let most = wide(hlo, &largest);
        let exponentials = hlo.subtract(&x, &most);
        let exponentials = hlo.unary("exponential", &exponentials);
        let sums = hlo.reduce("add", &exponentials, &[1]);
        let [wide_sums, wide_largest, wide_own] =
            [&sums, &largest, &own].map(|value| hlo.convert(value, Element::F64));
        let logarithms = hlo.unary("log", &wide_sums);
        let gap = hlo.subtract(&wide_largest, &wide_own);
        let mut loss = hlo.add(&logarithms, &gap);
        let normalizers = hlo.add(&logarithms, &wide_largest);
        if terms.label_smoothing > 0.0 {
            let total = hlo.reduce("add", &x, &[1]);
            let total = hlo.convert(&total, Element::F64);
            let mean = hlo.with("divide", &total, dims.vocab as f64);
            let more = hlo.subtract(&wide_own, &mean);
            let more = hlo.with("multiply", &more, terms.label_smoothing);
            loss = hlo.add(&loss, &more);
        }
        let mut scale = hlo.float(1.0, &[rows], element);
        if terms.z_loss > 0.0 {
            let more = hlo.multiply(&normalizers, &normalizers);
            let more = hlo.with("multiply", &more, terms.z_loss);
            loss = hlo.add(&loss, &more);
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
        let ignored = hlo.int(i64::from(IGNORED_TARGET), &[rows], Element::U32);
        let is_ignored = hlo.compare("EQ", targets, &ignored);
        let none = hlo.zeros(&[rows], Element::F64);
        let loss = hlo.select(&is_ignored, &none, &loss);
        let is_ignored = wide(hlo, &is_ignored);
        [loss, hlo.select(&is_ignored, &zeros, &slopes)]
    }
}
