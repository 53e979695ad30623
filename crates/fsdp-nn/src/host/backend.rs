//! [`Backend`] on the host: one `match` from operations to kernels.

use fsdp_core::memory::Buffer;
use fsdp_core::{DType, Error};

use super::buffer::HostBuffer;
use super::element::{Element, Float, for_float};
use super::floats::{Target, transfer};
use super::kernels::{attention, embedding, head, linear, norm, pointwise, rope};
use super::memory::HostMemory;
use crate::backend::{Backend, LinearDims, Operands, Orientation, Outcome, Write};
use crate::op::Op;

type Out<'a> = Write<'a, HostBuffer>;
type Call<'o, 'a> = Operands<'o, 'a, HostBuffer>;

impl Backend for HostMemory {
    fn execute(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        // The dtype of what is computed with: that of the values, or of the logits.
        let first = operands.reads.iter().map(|slice| slice.buffer.dtype());
        let written = operands.writes.iter().map(|write| write.slice.buffer.dtype());
        let dtype = first.chain(written).find(|dtype| dtype.is_float());
        for_float!(dtype.unwrap_or(DType::U32), E => match op {
            Op::Linear { .. }
            | Op::LinearBackwardInput { .. }
            | Op::LinearBackwardWeight { .. }
            | Op::ColumnSums { .. } => self.run_linear::<E>(op, operands),
            Op::Embedding { .. } | Op::EmbeddingBackward { .. } => self.run_lookup::<E>(op, operands),
            Op::RmsNorm { .. }
            | Op::RmsNormBackward { .. }
            | Op::LayerNorm { .. }
            | Op::LayerNormBackwardInput { .. }
            | Op::LayerNormBackwardWeight { .. } => self.run_norm::<E>(op, operands),
            Op::Attention { .. } | Op::AttentionBackward { .. } => self.run_attention::<E>(op, operands),
            Op::HeadLoss { .. } | Op::HeadLossBackward { .. } | Op::HeadLogits { .. } => self.run_head::<E>(op, operands),
            Op::CrossEntropy { .. } | Op::CrossEntropyBackward { .. } => {
                self.run_cross_entropy::<<E as Element>::Acc>(op, operands)
            }
            _ => self.run_pointwise::<E>(op, operands),
        })
    }
}

impl HostMemory {
    fn target<'a>(&self, write: Out<'a>) -> Result<Target<'a>, Error> {
        Ok(Target { data: self.floats_mut(write.slice)?, accumulate: write.accumulate })
    }

    fn run_linear<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Op::Linear { dims, .. } => {
                let bias = operands.reads.get(2).map(|bias| self.elements::<E>(*bias)).transpose()?;
                let ([x, weight], [y], _) = operands.split();
                let (x, weight) = (self.elements(x)?, self.elements(weight)?);
                linear::forward(workers, dims, x, weight, bias, self.elements_mut(y.slice)?);
            }
            Op::LinearBackwardInput { dims } => {
                let ([dy, weight], [dx], _) = operands.split();
                let (dy, weight) = (self.elements::<E>(dy)?, self.elements(weight)?);
                let accumulate = dx.accumulate;
                linear::backward_input(workers, dims, dy, weight, self.elements_mut(dx.slice)?, accumulate);
            }
            Op::LinearBackwardWeight { dims } => {
                let ([x, dy], [dweight], _) = operands.split();
                let (x, dy) = (self.elements::<E>(x)?, self.elements(dy)?);
                linear::backward_weight(workers, dims, x, dy, self.target(dweight)?);
            }
            Op::ColumnSums { rows, columns, stride } => {
                let ([dy], [sums], _) = operands.split();
                let orientation = Orientation::OutIn;
                let dims = LinearDims { rows, inputs: 1, outputs: columns, y_stride: stride, orientation };
                linear::backward_bias(workers, dims, self.elements::<E>(dy)?, self.target(sums)?);
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn run_lookup<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        match *op {
            Op::Embedding { width, table_rows, .. } => {
                let ([ids, table], [y], _) = operands.split();
                let ids = self.elements(ids)?;
                embedding::check_ids(ids, table_rows)?;
                let (table, add) = (self.elements::<E>(table)?, y.accumulate);
                embedding::forward(self.workers(), width, ids, table, self.elements_mut(y.slice)?, add);
            }
            Op::EmbeddingBackward { width, table_rows, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                let ids = self.elements(ids)?;
                embedding::check_ids(ids, table_rows)?;
                let dy = self.elements::<E>(dy)?;
                embedding::backward(self.workers(), width, ids, dy, self.target(dtable)?);
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn run_norm<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Op::RmsNorm { width, eps, .. } => {
                let ([x, weight], [y, rstd], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (y, rstd) = (self.elements_mut(y.slice)?, self.elements_mut(rstd.slice)?);
                norm::rms(workers, width, eps, x, weight, y, rstd);
            }
            Op::RmsNormBackward { width, .. } => {
                let ([x, weight, rstd, dy], [dx], mut more) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (rstd, dy, accumulate) = (self.elements(rstd)?, self.elements(dy)?, dx.accumulate);
                let dx = self.elements_mut(dx.slice)?;
                norm::rms_backward_input(workers, width, x, weight, rstd, dy, dx, accumulate);
                if let Some(dweight) = more.next() {
                    norm::rms_backward_weight(workers, width, x, rstd, dy, self.target(dweight)?);
                }
            }
            Op::LayerNorm { width, eps, .. } => {
                let ([x, weight, bias], [y, stats], _) = operands.split();
                let (x, weight, bias) =
                    (self.elements::<E>(x)?, self.elements(weight)?, self.elements(bias)?);
                let (y, stats) = (self.elements_mut(y.slice)?, self.elements_mut(stats.slice)?);
                norm::layer(workers, width, eps, x, weight, bias, y, stats);
            }
            Op::LayerNormBackwardInput { width, .. } => {
                let ([x, weight, stats, dy], [dx], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (stats, dy, accumulate) = (self.elements(stats)?, self.elements(dy)?, dx.accumulate);
                let dx = self.elements_mut(dx.slice)?;
                norm::layer_backward_input(workers, width, x, weight, stats, dy, dx, accumulate);
            }
            Op::LayerNormBackwardWeight { width, .. } => {
                let ([x, stats, dy], [dweight], _) = operands.split();
                let (x, stats, dy) = (self.elements::<E>(x)?, self.elements(stats)?, self.elements(dy)?);
                norm::layer_backward_weight(workers, width, x, stats, dy, self.target(dweight)?);
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn run_attention<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let dropout = op.dropout(operands.keys);
        match *op {
            Op::Attention { dims, .. } => {
                let ([qkv], [y, lse], _) = operands.split();
                let qkv = self.elements::<E>(qkv)?;
                let (y, lse) = (self.elements_mut(y.slice)?, self.elements_mut(lse.slice)?);
                attention::forward(self.workers(), dims, dropout, qkv, y, lse);
            }
            Op::AttentionBackward { dims, .. } => {
                let ([qkv, y, lse, dy], [dqkv], _) = operands.split();
                let recorded = attention::Recorded {
                    qkv: self.elements::<E>(qkv)?,
                    y: self.elements(y)?,
                    lse: self.elements(lse)?,
                    dy: self.elements(dy)?,
                };
                attention::backward(self.workers(), dims, dropout, recorded, self.elements_mut(dqkv.slice)?);
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn run_pointwise<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (workers, dropout) = (self.workers(), op.dropout(operands.keys));
        match op {
            Op::Rope { dims, inverse_frequencies, backward } => {
                let ([], [qkv], _) = operands.split();
                let qkv = self.elements_mut::<E>(qkv.slice)?;
                rope::rope(workers, *dims, inverse_frequencies, qkv, *backward);
            }
            Op::Swiglu { .. } => {
                let ([gate, up], [y], _) = operands.split();
                let (gate, up) = (self.elements::<E>(gate)?, self.elements(up)?);
                pointwise::swiglu(workers, gate, up, self.elements_mut(y.slice)?);
            }
            Op::SwigluBackward { .. } => {
                let ([gate, up, dy], [dgate, dup], _) = operands.split();
                let (gate, up, dy) = (self.elements::<E>(gate)?, self.elements(up)?, self.elements(dy)?);
                let (dgate, dup) = (self.elements_mut(dgate.slice)?, self.elements_mut(dup.slice)?);
                pointwise::swiglu_backward(workers, gate, up, dy, dgate, dup);
            }
            Op::Gelu { .. } => {
                let ([x], [y], _) = operands.split();
                pointwise::gelu(workers, self.elements::<E>(x)?, self.elements_mut(y.slice)?);
            }
            Op::GeluBackward { .. } => {
                let ([x, dy], [dx], _) = operands.split();
                let (x, dy) = (self.elements::<E>(x)?, self.elements(dy)?);
                pointwise::gelu_backward(workers, x, dy, self.elements_mut(dx.slice)?);
            }
            Op::Add { .. } => {
                let ([a, b], [y], _) = operands.split();
                let (a, b) = (self.elements::<E>(a)?, self.elements(b)?);
                pointwise::add(workers, a, b, self.elements_mut(y.slice)?);
            }
            Op::Dropout { .. } => {
                let ([], [x], _) = operands.split();
                let x = self.elements_mut::<E>(x.slice)?;
                if let Some(dropout) = dropout {
                    pointwise::dropout(workers, dropout, x);
                }
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn run_head<E: Element>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Op::HeadLoss { dims } => {
                let ([x, weight, targets], [losses, logits], _) = operands.split();
                let targets = self.elements(targets)?;
                head::check_targets(targets, dims.vocab)?;
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (losses, logits) = (self.elements_mut(losses.slice)?, self.elements_mut(logits.slice)?);
                head::loss(workers, dims, x, weight, targets, losses, logits, None);
            }
            Op::HeadLossBackward { dims, weight: trains, .. } => {
                let ([x, weight, targets], [losses, logits, dx], mut more) = operands.split();
                let targets = self.elements(targets)?;
                head::check_targets(targets, dims.vocab)?;
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (losses, logits) = (self.elements_mut(losses.slice)?, self.elements_mut(logits.slice)?);
                let dweight =
                    more.next().filter(|_| trains).map(|dweight| self.target(dweight)).transpose()?;
                let gradients = head::HeadGradients { dx: self.elements_mut(dx.slice)?, dweight };
                head::loss(workers, dims, x, weight, targets, losses, logits, Some(gradients));
            }
            Op::HeadLogits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                head::logits(workers, dims, x, weight, self.elements_mut(logits.slice)?);
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    /// The loss of logits that are there already, for backends that multiply in another way.
    fn run_cross_entropy<A: Float>(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (Op::CrossEntropy { vocab, .. } | Op::CrossEntropyBackward { vocab, .. }) = *op else {
            return Ok(Outcome::Unsupported);
        };
        let targets = operands.reads.last().copied();
        let targets = self.elements(targets.expect("the targets are read"))?;
        head::check_targets(targets, vocab)?;
        if let Op::CrossEntropy { .. } = op {
            let ([logits], [losses], _) = operands.split();
            let losses = self.elements_mut(losses.slice)?;
            head::losses::<A>(self.workers(), vocab, self.elements(logits)?, targets, losses);
            return Ok(Outcome::Done);
        }
        let ([], [mut logits, losses], mut more) = operands.split();
        let losses = self.elements_mut(losses.slice)?;
        let slopes = self.elements_mut(logits.slice.reborrow())?;
        head::cross_entropy::<A>(self.workers(), vocab, slopes, targets, losses, true);
        if let Some(rounded) = more.next() {
            transfer(self.floats(logits.slice.as_slice())?, self.floats_mut(rounded.slice)?, false);
        }
        Ok(Outcome::Done)
    }
}
