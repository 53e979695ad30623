//! [`Backend`] for [`Torch`]: the memory's own kernel if it has one, libtorch's operations otherwise.

use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{Error, Queue};
use fsdp_nn::backend::{Backend, HeadChunks, Operands, Outcome};
use fsdp_nn::op::{Head, Linear, Op, Pointwise};
use fsdp_nn::update::Part;

use super::memory::Torch;
use super::storage::TorchStorage;

/// Whether libtorch runs this operation even if the memory has a kernel: matrix products, look-ups and sums of tensors.
fn is_left_to_libtorch(op: &Op) -> bool {
    matches!(
        op,
        Op::Linear(Linear::Forward { .. } | Linear::BackwardInput { .. } | Linear::BackwardWeight { .. })
            | Op::Lookup(_)
            | Op::Pointwise(Pointwise::Add { .. })
            | Op::Head(Head::Loss { .. } | Head::LossBackward { .. } | Head::Logits { .. })
    )
}

impl<D: TorchStorage> Backend for Torch<D> {
    fn execute(&self, op: &Op, mut operands: Operands<'_, '_, D::Buffer>) -> Result<Outcome, Error> {
        if !is_left_to_libtorch(op) && self.execute_fused(op, operands.reborrow())? == Outcome::Done {
            return Ok(Outcome::Done);
        }
        self.in_torch(Queue::Compute, op.name(), || {
            match op {
                Op::Linear(op) => self.linear(op, operands)?,
                Op::Dequantize(matrix) => self.dequantize(*matrix, operands)?,
                Op::Dora(op) => self.dora(op, operands)?,
                Op::Lookup(op) => self.lookup(op, operands)?,
                Op::Norm(op) => self.norm(op, operands)?,
                Op::Attention(op) => self.attention(op, operands)?,
                Op::Latent(op) => self.latent(op, operands)?,
                Op::Delta(op) => self.delta(op, operands)?,
                Op::Activation(op) => return self.activation(*op, operands),
                Op::Pointwise(op) => self.pointwise(op, operands)?,
                Op::Experts(op) => self.experts(op, operands)?,
                Op::Head(op) => return self.head(op, operands),
                Op::ExpertAxis(_) | Op::Exchange(_) => return Ok(Outcome::Unsupported),
            }
            Ok(Outcome::Done)
        })
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, D::Buffer>,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
    ) -> Result<Outcome, Error> {
        self.update_part(part, stage, shard, scalars)
    }

    fn head_chunks(&self) -> HeadChunks {
        self.storage().head_chunks()
    }
}
