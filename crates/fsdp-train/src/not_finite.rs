//! Looks for the value that is not finite, once it is known that there is one.

use fsdp_core::engine::Engine;
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::program::Program;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Memory, Queue};

use crate::checkpoint::{state_name, state_shape};
use crate::error::TrainError;

/// Values that are read at once.
const READ_ELEMS: usize = 1 << 16;

/// A value that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    /// The tensor, as checkpoints name it.
    pub(crate) tensor: String,
    /// Where in the tensor, along each of its dimensions.
    pub(crate) index: Vec<usize>,
    /// The value.
    pub(crate) value: f64,
    /// The type in which it is not finite.
    pub(crate) dtype: DType,
}

/// The first value among those that updates write on this rank, parameters before state, that is not finite. Parameters
/// have to be finite in the type that computes.
///
/// # Errors
/// Those of the memory.
pub(crate) fn first_not_finite<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
) -> Result<Option<Found>, TrainError> {
    for search in [first_param, first_of_state] {
        for unit in engine.plan().layout.unit_ids() {
            if let Some(found) = search(engine, unit)? {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

fn first_param<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    unit: UnitId,
) -> Result<Option<Found>, TrainError> {
    let (shards, plan, dtype) = (engine.shards(unit), engine.plan(), engine.plan().policy.param_dtype);
    for segment in 0..shards.state.len() {
        for piece in &shards.pieces[segment] {
            let slice = Slice::new(shards.params[segment], piece.offset, piece.len);
            if let Some((at, value)) = first_in(&**engine.memory(), slice, dtype)? {
                let param = plan.spec.param(piece.param);
                let index = index_of(&param.shape, piece.param_offset + at);
                return Ok(Some(Found { tensor: param.fqn.clone(), index, value, dtype }));
            }
        }
    }
    Ok(None)
}

fn first_of_state<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
    unit: UnitId,
) -> Result<Option<Found>, TrainError> {
    let (shards, plan) = (engine.shards(unit), engine.plan());
    let tensors = shards.state_tensors.iter().flatten();
    for (buffer, tensor) in shards.state.into_iter().flatten().zip(tensors) {
        for piece in &tensor.pieces {
            let slice = Slice::new(buffer, piece.offset, piece.len);
            if let Some((at, value)) = first_in(&**engine.memory(), slice, tensor.dtype)? {
                let param = plan.spec.param(piece.param);
                let index = index_of(&state_shape(param, piece.axis), piece.first + at);
                let tensor_name = state_name(param, tensor.name);
                return Ok(Some(Found { tensor: tensor_name, index, value, dtype: tensor.dtype }));
            }
        }
    }
    Ok(None)
}

/// The first value that is not finite in `dtype`, and how many are before it.
fn first_in<M: Memory>(
    memory: &M,
    slice: Slice<'_, M::Buffer>,
    dtype: DType,
) -> Result<Option<(usize, f64)>, TrainError> {
    let mut values = vec![0.0; READ_ELEMS.min(slice.len)];
    for start in (0..slice.len).step_by(READ_ELEMS) {
        let values = &mut values[..READ_ELEMS.min(slice.len - start)];
        let part = Slice::new(slice.buffer, slice.offset + start, values.len());
        memory.read(Queue::Compute, part, HostSliceMut::F64(values))?;
        let is_bad = |value: &f64| value.is_nan() || value.abs() > dtype.largest();
        if let Some(at) = values.iter().position(is_bad) {
            return Ok(Some((start + at, values[at])));
        }
    }
    Ok(None)
}

/// Where the value after `first` others is, along each dimension.
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
    fn an_index_has_a_number_per_dimension() {
        let all: Vec<Vec<usize>> = (0..6).map(|first| index_of(&[2, 3], first)).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert_eq!(index_of(&[7], 5), [5]);
        assert_eq!(index_of(&[2, 3, 4], 23), [1, 2, 3]);
    }
}
