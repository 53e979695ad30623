//! Runs of a shard, each of which one launch updates.

use fsdp_core::memory::{Buffer, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, SegmentShard};
use fsdp_core::{DType, Error};
use fsdp_nn::update::Groups;

use crate::device::{CudaBuffer, CudaMemory, expect_dtype, expect_float};
use crate::kernels::Arg;

/// Elements of neighboring pieces with the same settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// One of its parameters.
    pub(crate) param: ParamId,
    /// Index of its first element.
    pub(crate) offset: usize,
    /// Number of elements.
    pub(crate) len: usize,
}

/// The runs of a shard: adjacent pieces are merged if their groups have the same settings.
pub(crate) fn runs(pieces: &[Piece], groups: &Groups) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for piece in pieces {
        match runs.last_mut() {
            Some(run)
                if run.offset + run.len == piece.offset && groups.of(run.param) == groups.of(piece.param) =>
            {
                run.len += piece.len;
            }
            _ => runs.push(Run { param: piece.param, offset: piece.offset, len: piece.len }),
        }
    }
    runs
}

/// A range of the parameters' low-precision copy, if kernels write it in the same pass, which they do in bf16. A copy
/// in f16 is refreshed afterwards ([`refresh`]).
pub(super) fn copy<'a>(
    memory: &CudaMemory,
    low: Option<&'a mut CudaBuffer>,
    offset: usize,
    len: usize,
) -> Result<Arg<'a>, Error> {
    let Some(low) = low.filter(|low| low.dtype() != DType::F16) else { return Ok(Arg::Null) };
    expect_dtype(low, DType::Bf16);
    memory.output(SliceMut::new(low, offset, len))
}

/// Updates a copy of the parameters that kernels do not write.
pub(super) fn refresh(memory: &CudaMemory, shard: &mut SegmentShard<'_, CudaBuffer>) -> Result<(), Error> {
    let is_half = shard.low.as_ref().is_some_and(|low| low.dtype() == DType::F16);
    if is_half { shard.refresh(memory) } else { Ok(()) }
}

/// The dtype of parameters and state, and the dtype of the gradient.
pub(super) fn types(shard: &SegmentShard<'_, CudaBuffer>) -> Result<(DType, DType), Error> {
    let master = expect_float(shard.params);
    expect_dtype(shard.params, master.master());
    shard.state.iter().for_each(|buffer| expect_dtype(buffer, master));
    Ok((master, expect_float(shard.gradient)))
}

#[cfg(test)]
mod tests {
    use fsdp_nn::update::GroupSettings;

    use super::*;

    #[test]
    fn adjacent_pieces_with_equal_settings_form_one_run() {
        let piece = |param, offset, len| {
            let param = ParamId(param);
            Piece { param, offset, len, param_offset: 0, row_len: 1 }
        };
        let pieces = [piece(0, 0, 5), piece(1, 5, 3), piece(2, 8, 4), piece(3, 14, 2), piece(4, 16, 1)];
        let other = GroupSettings { lr_scale: 1.0, weight_decay: 0.0, late: 0 };
        let run = |param, offset, len| Run { param: ParamId(param), offset, len };
        let found = runs(&pieces, &Groups::uniform(0.1).with([ParamId(2)], other));
        assert_eq!(found, [run(0, 0, 8), run(2, 8, 4), run(3, 14, 3)]);
    }
}
