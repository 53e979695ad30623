//! [`Backend`] on the host: one file of kernels per family of operations, selected by one `match`.

use fsdp_core::memory::Buffer;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error};

use super::buffer::HostBuffer;
use super::element::for_float;
use super::floats::Target;
use super::memory::HostMemory;
use crate::backend::{Backend, Operands, Outcome, Write};
use crate::op::Op;
use crate::update::Part;

/// Operands on the host.
pub(super) type Call<'o, 'a> = Operands<'o, 'a, HostBuffer>;

impl Backend for HostMemory {
    fn execute(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        // The dtype of the computation: that of the values, or of the logits.
        let first = operands.reads.iter().map(|slice| slice.buffer.dtype());
        let written = operands.writes.iter().map(|write| write.slice.buffer.dtype());
        let dtype = first.chain(written).find(|dtype| dtype.is_float());
        for_float!(dtype.unwrap_or(DType::U32), E => match op {
            Op::Linear(op) => self.linear::<E>(op, operands),
            Op::Dequantize(matrix) => self.dequantize::<E>(*matrix, operands),
            Op::Dora(op) => self.dora::<E>(op, operands),
            Op::Lookup(op) => self.lookup::<E>(op, operands),
            Op::Norm(op) => self.norm::<E>(op, operands),
            Op::Attention(op) => self.attention::<E>(op, operands),
            Op::Latent(op) => self.latent::<E>(op, operands),
            Op::Delta(op) => self.delta::<E>(op, operands),
            Op::Activation(op) => self.activation::<E>(*op, operands),
            Op::Pointwise(op) => self.pointwise::<E>(op, operands),
            Op::Experts(op) => self.experts::<E>(op, operands),
            Op::Head(op) => self.head::<E>(op, operands),
            Op::ExpertAxis(_) | Op::Exchange(_) => Ok(Outcome::Unsupported),
        })
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, HostBuffer>,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
    ) -> Result<Outcome, Error> {
        self.update_part(part, stage, shard, scalars).map(|()| Outcome::Done)
    }
}

impl HostMemory {
    /// Returns a gradient target that is overwritten or added to.
    pub(super) fn target<'a>(&self, write: Write<'a, HostBuffer>) -> Result<Target<'a>, Error> {
        Ok(Target { data: self.floats_mut(write.slice)?, accumulate: write.accumulate })
    }
}
