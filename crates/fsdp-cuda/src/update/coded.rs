//! AdamW with 8-bit moments: one thread block per block of moments.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{Piece, SegmentShard, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::update::{AdamW8bit, ElementwiseRule, STATES_MAX};

use super::elementwise::{Kind, numbers, source};
use super::runs::{copy, refresh};
use crate::device::{CudaBuffer, CudaMemory, expect_dtype, expect_float};
use crate::kernels::{Arg, Launch};

/// The kernels of a step.
struct Pass<'a> {
    rule: &'a AdamW8bit,
    memory: &'a CudaMemory,
    full: Launch<'a>,
    coded: Launch<'a>,
    constants: Vec<f64>,
    scalars: StepScalars<'a, CudaBuffer>,
}

/// Start of the next piece's moments: in full precision, as codes, and the magnitudes of blocks.
#[derive(Default)]
struct MomentOffsets {
    full: usize,
    codes: usize,
    blocks: usize,
}

/// Updates parameters and state of a shard.
pub(super) fn update(
    memory: &CudaMemory,
    rule: &AdamW8bit,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
) -> Result<(), Error> {
    let types = (expect_float(shard.params), expect_float(shard.gradient));
    expect_dtype(shard.params, types.0.master());
    let (formula, constants) = rule.adamw.formula();
    let kernels = |kind| memory.kernels(Queue::Compute, source(kind, &formula), types);
    let (full, coded) = (kernels(Kind::Elements), kernels(Kind::Coded));
    let pass = Pass { rule, memory, full, coded, constants, scalars: *scalars };
    let mut offsets = MomentOffsets::default();
    shard.pieces.iter().try_for_each(|piece| pass.piece(shard, piece, &mut offsets))?;
    refresh(memory, shard)
}

impl Pass<'_> {
    /// Updates a piece.
    fn piece(
        &self,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        piece: &Piece,
        offsets: &mut MomentOffsets,
    ) -> Result<(), Error> {
        let Self { rule, memory, full, coded, constants, scalars } = self;
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
        args.extend(numbers(&rule.adamw.factors_of(param, scalars.step, scalars.lr), constants));
        match blocks {
            Some(blocks) => coded.striding("update_coded", blocks, AdamW8bit::BLOCK as u32, &args)?,
            None => full.elements("update_elements", len, &args)?,
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
        let master = self.full.types.0;
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
            args.resize(STATES_MAX, Arg::Null);
        }
        Ok(args)
    }
}
