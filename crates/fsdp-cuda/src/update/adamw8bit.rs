//! AdamW with 8-bit moments: one thread block per block of moments.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{Piece, SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::update::AdamW8bit;

use super::adamw::factor_args;
use super::on_host::with_host_shard;
use super::runs::{copy, refresh};
use crate::device::{CudaBuffer, CudaMemory, expect_dtype, expect_float};
use crate::kernels::{Arg, Launch, UPDATE};

/// The kernels of a step.
struct Pass<'a> {
    rule: &'a AdamW8bit,
    memory: &'a CudaMemory,
    kernels: Launch<'a>,
    scalars: StepScalars<'a, CudaBuffer>,
}

/// Start of the next piece's moments: in full precision, as codes, and the magnitudes of blocks.
#[derive(Default)]
struct MomentOffsets {
    full: usize,
    codes: usize,
    blocks: usize,
}

impl UpdateRule<CudaMemory> for AdamW8bit {
    fn update(
        &mut self,
        memory: &CudaMemory,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        _statistics: &[CudaBuffer],
    ) -> Result<(), Error> {
        if shard.params.is_on_host() {
            return with_host_shard(memory, shard, scalars, |host, shard, scalars| {
                self.update(host, shard, scalars, &[])
            });
        }
        let types = (expect_float(shard.params), expect_float(shard.gradient));
        expect_dtype(shard.params, types.0.master());
        let kernels = memory.kernels(Queue::Compute, &UPDATE, types);
        let pass = Pass { rule: self, memory, kernels, scalars: *scalars };
        let mut offsets = MomentOffsets::default();
        shard.pieces.iter().try_for_each(|piece| pass.piece(shard, piece, &mut offsets))?;
        refresh(memory, shard)
    }
}

impl Pass<'_> {
    /// Updates a piece.
    fn piece(
        &self,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        piece: &Piece,
        offsets: &mut MomentOffsets,
    ) -> Result<(), Error> {
        let Self { rule, memory, kernels, scalars } = self;
        let &Piece { param, offset, len, .. } = piece;
        let largest_param = Arg::Real(shard.largest_param());
        let row_len = rule.row_len(param);
        let blocks = row_len.map(|row_len| len / row_len * row_len.div_ceil(AdamW8bit::BLOCK));
        let code_books = memory.code_books()?;
        let mut args = vec![
            memory.input(Slice::new(shard.gradient, offset, len))?,
            memory.output(SliceMut::new(shard.params, offset, len))?,
        ];
        args.extend(self.moments(&mut *shard.state, len, blocks, offsets)?);
        args.push(copy(memory, shard.low.as_deref_mut(), offset, len)?);
        match row_len {
            Some(row_len) => {
                args.extend([Arg::Len(len / row_len), Arg::Len(row_len)]);
                args.push(memory.input(Slice::whole(&code_books))?);
            }
            None => args.push(Arg::Len(len)),
        }
        args.extend([memory.input(scalars.factors)?, memory.output(SliceMut::whole(shard.not_finite))?]);
        args.push(largest_param);
        args.extend(factor_args(rule.adamw.factors(param, scalars.step, scalars.lr)));
        match blocks {
            Some(blocks) => kernels.striding("adamw_8bit", blocks, AdamW8bit::BLOCK as u32, &args)?,
            None => kernels.elements("adamw", len, &args)?,
        }
        Ok(())
    }

    /// The moments of the next piece, which has `len` elements and, if its moments are 8-bit, `blocks` blocks.
    fn moments<'b>(
        &self,
        state: &'b mut [CudaBuffer],
        len: usize,
        blocks: Option<usize>,
        offsets: &mut MomentOffsets,
    ) -> Result<Vec<Arg<'b>>, Error> {
        let count = state.len();
        let [mean, square, mean_codes, square_codes, mean_largest, square_largest] = state else {
            panic!("{count} state tensors where the rule declared 6");
        };
        let mut args = Vec::new();
        let master = self.kernels.types.0;
        let mut push = |buffer: &'b mut CudaBuffer, dtype, at: usize, len: usize| -> Result<(), Error> {
            expect_dtype(buffer, dtype);
            args.push(self.memory.output(SliceMut::new(buffer, at, len))?);
            Ok(())
        };
        if let Some(blocks) = blocks {
            push(mean_codes, DType::U8, offsets.codes, len)?;
            push(square_codes, DType::U8, offsets.codes, len)?;
            push(mean_largest, master, offsets.blocks, blocks)?;
            push(square_largest, master, offsets.blocks, blocks)?;
            (offsets.codes, offsets.blocks) = (offsets.codes + len, offsets.blocks + blocks);
        } else {
            push(mean, master, offsets.full, len)?;
            push(square, master, offsets.full, len)?;
            offsets.full += len;
        }
        Ok(args)
    }
}
