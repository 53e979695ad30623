//! The values that a rank holds of each parameter, as contiguous runs.

use fsdp_core::Memory;
use fsdp_core::engine::Engine;
use fsdp_core::memory::Slice;
use fsdp_core::model::ParamId;
use fsdp_core::program::Program;
use fsdp_core::update::{StateAxis, StateTensor};

/// The kind of values in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Param,
    Gradient,
    /// A state tensor, by its index among those of the update rule.
    State(usize),
}

/// Contiguous values of one parameter.
pub(crate) struct Run<'e, B> {
    pub(crate) kind: Kind,
    pub(crate) param: ParamId,
    /// Index of the first value among all values of this kind that the parameter has.
    pub(crate) first: usize,
    /// The location of the values.
    pub(crate) slice: Slice<'e, B>,
    /// For state, its tensor and the axis along which that has values.
    pub(crate) state: Option<(&'e StateTensor, StateAxis)>,
}

/// Iterates over all runs that a rank holds, unit by unit.
pub(crate) fn runs<M: Memory, P: Program<M>>(
    engine: &Engine<M, P>,
) -> impl Iterator<Item = Run<'_, M::Buffer>> {
    engine.plan().layout.unit_ids().flat_map(|unit| {
        let shards = engine.shards(unit);
        let mut runs = Vec::new();
        for (kind, buffers) in [(Kind::Param, shards.params), (Kind::Gradient, shards.gradients)] {
            for (buffer, pieces) in buffers.into_iter().zip(shards.pieces) {
                runs.extend(pieces.iter().map(|piece| Run {
                    kind,
                    param: piece.param,
                    first: piece.param_offset,
                    slice: Slice::new(buffer, piece.offset, piece.len),
                    state: None,
                }));
            }
        }
        for (buffers, tensors) in shards.state.into_iter().zip(shards.state_tensors) {
            for (index, (buffer, tensor)) in buffers.into_iter().zip(tensors).enumerate() {
                runs.extend(tensor.pieces.iter().map(|piece| Run {
                    kind: Kind::State(index),
                    param: piece.param,
                    first: piece.first,
                    slice: Slice::new(buffer, piece.offset, piece.len),
                    state: Some((tensor, piece.axis)),
                }));
            }
        }
        runs
    })
}
