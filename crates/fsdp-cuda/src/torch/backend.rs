//! [`Backend`] for [`Torch`]: our kernel where the memory has one, else libtorch's operations.

use fsdp_core::{Error, Queue};
use fsdp_nn::backend::{Backend, HeadChunks, Operands, Outcome};
use fsdp_nn::op::Op;

use super::error::Failure;
use super::memory::Torch;
use super::ops::{HeadCall, HeadGradients};
use super::storage::TorchStorage;

/// Products, look-ups and sums are libtorch's even where the memory could do them.
fn is_left_to_libtorch(op: &Op) -> bool {
    matches!(
        op,
        Op::Linear { .. }
            | Op::LinearBackwardInput { .. }
            | Op::LinearBackwardWeight { .. }
            | Op::ColumnSums { .. }
            | Op::Embedding { .. }
            | Op::EmbeddingBackward { .. }
            | Op::Add { .. }
            | Op::HeadLoss { .. }
            | Op::HeadLossBackward { .. }
            | Op::HeadLogits { .. }
    )
}

impl<D: TorchStorage> Backend for Torch<D> {
    fn execute(&self, op: &Op, mut operands: Operands<'_, '_, D::Buffer>) -> Result<Outcome, Error> {
        if !is_left_to_libtorch(op) && self.by_own_kernels(op, operands.reborrow())? == Outcome::Done {
            return Ok(Outcome::Done);
        }
        self.in_torch(Queue::Compute, op.name(), || match op {
            Op::RmsNorm { .. }
            | Op::RmsNormBackward { .. }
            | Op::LayerNorm { .. }
            | Op::LayerNormBackwardInput { .. }
            | Op::LayerNormBackwardWeight { .. } => self.norm_by_torch(op, operands),
            Op::HeadLoss { .. } | Op::HeadLossBackward { .. } | Op::HeadLogits { .. } => {
                self.head_by_torch(op, operands)
            }
            _ => self.by_torch(op, operands),
        })
    }

    fn head_chunks(&self) -> HeadChunks {
        self.storage().head_chunks()
    }
}

impl<D: TorchStorage> Torch<D> {
    fn by_torch(&self, op: &Op, operands: Operands<'_, '_, D::Buffer>) -> Result<Outcome, Failure> {
        let dropout = op.dropout(operands.keys);
        match op {
            Op::Linear { dims, .. } => {
                let bias = operands.reads.get(2).copied();
                let ([x, weight], [y], _) = operands.split();
                self.aten_linear(*dims, x, weight, bias, y.slice)?;
            }
            Op::LinearBackwardInput { dims } => {
                let ([dy, weight], [dx], _) = operands.split();
                self.aten_linear_backward_input(*dims, dy, weight, dx)?;
            }
            Op::LinearBackwardWeight { dims } => {
                let ([x, dy], [dweight], _) = operands.split();
                self.aten_linear_backward_weight(*dims, x, dy, dweight)?;
            }
            Op::ColumnSums { rows, columns, stride } => {
                let ([dy], [sums], _) = operands.split();
                self.aten_column_sums([*rows, *columns, *stride], dy, sums)?;
            }
            Op::Embedding { width, .. } => {
                let ([ids, table], [y], _) = operands.split();
                self.aten_embedding(*width, ids, table, y.slice, y.accumulate)?;
            }
            Op::EmbeddingBackward { width, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                self.aten_embedding_backward(*width, ids, dy, dtable)?;
            }
            Op::Rope { dims, inverse_frequencies, backward } => {
                let ([], [qkv], _) = operands.split();
                self.aten_rope(*dims, inverse_frequencies, qkv.slice, *backward)?;
            }
            Op::Attention { dims, .. } => {
                let ([qkv], [y, lse], _) = operands.split();
                self.aten_attention(*dims, dropout, qkv, y.slice, lse.slice)?;
            }
            Op::AttentionBackward { dims, .. } => {
                let (reads, [dqkv], _) = operands.split();
                self.aten_attention_backward(*dims, dropout, reads, dqkv.slice)?;
            }
            Op::Swiglu { .. } => {
                let ([gate, up], [y], _) = operands.split();
                self.aten_swiglu(gate, up, y.slice)?;
            }
            Op::SwigluBackward { .. } => {
                let (reads, [dgate, dup], _) = operands.split();
                self.aten_swiglu_backward(reads, dgate.slice, dup.slice)?;
            }
            Op::Gelu { .. } => {
                let ([x], [y], _) = operands.split();
                self.aten_gelu(x, y.slice)?;
            }
            Op::GeluBackward { .. } => {
                let ([x, dy], [dx], _) = operands.split();
                self.aten_gelu_backward(x, dy, dx.slice)?;
            }
            Op::Add { .. } => {
                let ([a, b], [y], _) = operands.split();
                self.aten_add(a, b, y.slice)?;
            }
            Op::Dropout { .. } => {
                let ([], [x], _) = operands.split();
                if let Some(dropout) = dropout {
                    self.aten_dropout(dropout, x.slice)?;
                }
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn norm_by_torch(&self, op: &Op, operands: Operands<'_, '_, D::Buffer>) -> Result<Outcome, Failure> {
        match *op {
            Op::RmsNorm { width, eps, .. } => {
                let ([x, weight], [y, rstd], _) = operands.split();
                self.aten_rms_norm(width, eps, x, weight, y.slice, rstd.slice)?;
            }
            Op::RmsNormBackward { width, .. } => {
                let (reads, [dx], mut more) = operands.split();
                self.aten_rms_norm_backward(width, reads, dx, more.next())?;
            }
            Op::LayerNorm { width, eps, .. } => {
                let (reads, [y, stats], _) = operands.split();
                self.aten_layer_norm(width, eps, reads, y.slice, stats.slice)?;
            }
            Op::LayerNormBackwardInput { width, .. } => {
                let (reads, [dx], _) = operands.split();
                self.aten_layer_norm_backward_input(width, reads, dx)?;
            }
            Op::LayerNormBackwardWeight { width, .. } => {
                let (reads, [dweight], _) = operands.split();
                self.aten_layer_norm_backward_weight(width, reads, dweight)?;
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn head_by_torch(&self, op: &Op, operands: Operands<'_, '_, D::Buffer>) -> Result<Outcome, Failure> {
        match *op {
            Op::HeadLoss { dims } => {
                let ([x, weight, targets], [losses, logits], _) = operands.split();
                let (losses, logits) = (losses.slice, logits.slice);
                self.chunked_head(HeadCall { dims, x, weight, targets, losses, logits }, None)?;
            }
            Op::HeadLossBackward { dims, weight: trains, .. } => {
                let ([x, weight, targets], [losses, logits, dx], mut more) = operands.split();
                let (losses, logits, dx) = (losses.slice, logits.slice, dx.slice);
                let dweight = if trains { more.next() } else { None };
                let gradients = HeadGradients { dlogits: more.next().map(|write| write.slice), dx, dweight };
                self.chunked_head(HeadCall { dims, x, weight, targets, losses, logits }, Some(gradients))?;
            }
            Op::HeadLogits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                self.all_logits(dims, x, weight, logits.slice)?;
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }
}
