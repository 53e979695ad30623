//! Locates a non-finite value once one is known to exist.

use fsdp_core::engine::Engine;
use fsdp_core::memory::Slice;
use fsdp_core::program::Program;
use fsdp_core::{DType, Memory, Queue};

use crate::checkpoint::{state_name, state_shape};
use crate::error::TrainError;
use crate::shard_runs::{Kind, runs};

/// Values to read at a time.
const READ_ELEMS: usize = 1 << 16;

/// Finds the first non-finite value that updates write on this rank, parameters before state, and returns it as the
/// error for the step that wrote it. Parameters must be finite in the compute dtype.
///
/// # Errors
/// Errors of the memory.
pub(crate) fn first_not_finite<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    step: u64,
) -> Result<Option<TrainError>, TrainError> {
    let plan = engine.plan();
    let params = runs(engine).filter(|run| run.kind == Kind::Param);
    let state = runs(engine).filter(|run| matches!(run.kind, Kind::State(_)));
    for run in params.chain(state) {
        let dtype = run.state.map_or(plan.policy.param_dtype, |(tensor, _)| tensor.dtype);
        let Some((at, value)) = first_in(&**engine.memory(), run.slice, dtype)? else { continue };
        let param = plan.spec.param(run.param);
        let (tensor, shape) = match run.state {
            None => (param.fqn.clone(), param.shape.clone()),
            Some((tensor, axis)) => (state_name(param, tensor.name), state_shape(param, axis)),
        };
        let index = index_of(&shape, run.first + at);
        return Ok(Some(TrainError::StateNotFinite { step, tensor, index, value, dtype }));
    }
    Ok(None)
}

/// The first value that is not finite in `dtype`, with its index.
fn first_in<M: Memory>(
    memory: &M,
    slice: Slice<'_, M::Buffer>,
    dtype: DType,
) -> Result<Option<(usize, f64)>, TrainError> {
    let mut values = vec![0.0; READ_ELEMS.min(slice.len)];
    for start in (0..slice.len).step_by(READ_ELEMS) {
        let values = &mut values[..READ_ELEMS.min(slice.len - start)];
        let part = Slice::new(slice.buffer, slice.offset + start, values.len());
        memory.read_numbers(Queue::Compute, part, values)?;
        let is_bad = |value: &f64| value.is_nan() || value.abs() > dtype.largest();
        if let Some(at) = values.iter().position(is_bad) {
            return Ok(Some((start + at, values[at])));
        }
    }
    Ok(None)
}

/// Converts a flat index into one index per dimension.
fn index_of(shape: &[usize], first: usize) -> Vec<usize> {
    let mut rest = first;
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&len| {
            let at = rest % len;
            rest /= len;
            at
        })
        .collect();
    index.reverse();
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_index_converts_to_one_index_per_dimension() {
        let all: Vec<Vec<usize>> = (0..6).map(|first| index_of(&[2, 3], first)).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert_eq!(index_of(&[7], 5), [5]);
        assert_eq!(index_of(&[2, 3, 4], 23), [1, 2, 3]);
    }
}
