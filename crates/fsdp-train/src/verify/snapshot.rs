//! Values of a whole model, and the pieces of it that one rank holds.

use fsdp_core::engine::Engine;
use fsdp_core::memory::{HostSliceMut, Slice};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::program::Program;
use fsdp_core::update::Piece;
use fsdp_core::{Memory, Queue};
use fsdp_nn::model::Architecture;

use crate::error::TrainError;
use crate::oracle::Oracle;
use crate::rule::TrainBackend;

/// All values of a model, by parameter.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) params: Vec<Vec<f64>>,
    /// Sums of micro-batch gradients, not scaled; `None` where frozen.
    pub(super) gradients: Vec<Option<Vec<f64>>>,
    pub(super) states: Vec<Vec<Vec<f64>>>,
}

impl Snapshot {
    pub(super) fn of_oracle<M: TrainBackend, A: Architecture + Clone>(
        oracle: &Oracle<'_, M, A>,
        spec: &ModelSpec,
    ) -> Result<Self, TrainError> {
        let ids = || (0..spec.params.len()).map(ParamId);
        Ok(Self {
            params: ids().map(|id| oracle.param(id)).collect::<Result<_, _>>()?,
            gradients: ids().map(|id| oracle.gradient(id)).collect::<Result<_, _>>()?,
            states: ids().map(|id| oracle.state(id)).collect::<Result<_, _>>()?,
        })
    }
}

/// What a run of values is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Param,
    Gradient,
    /// A state tensor, by its position among those of the update rule.
    State(usize),
}

/// A run of values that one rank holds; of a gradient, the sum of micro-batch gradients, whatever was reduced.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) kind: Kind,
    pub(super) param: ParamId,
    /// Index of the first one among all values of this kind that the parameter has.
    pub(super) first: usize,
    pub(super) values: Vec<f64>,
}

/// Values that one rank holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pub(super) values: Vec<Held>,
}

impl Pieces {
    pub(super) fn of_rank<M: Memory, P: Program<M>>(engine: &Engine<M, P>) -> Result<Self, TrainError> {
        let mut pieces = Pieces::default();
        let ranks = engine.plan().step.averaged_ranks as f64;
        for unit in engine.plan().layout.unit_ids() {
            let shards = engine.shards(unit);
            for (segment, buffer) in shards.params.iter().enumerate() {
                pieces.read(&**engine.memory(), Kind::Param, buffer, &shards.pieces[segment])?;
            }
            for (segment, state) in shards.state.iter().enumerate() {
                if let Some(gradient) = shards.gradients.get(segment) {
                    let held = &shards.pieces[segment];
                    let before = pieces.values.len();
                    pieces.read(&**engine.memory(), Kind::Gradient, gradient, held)?;
                    let read = pieces.values[before..].iter_mut().flat_map(|held| &mut held.values);
                    read.for_each(|value| *value *= ranks);
                }
                let tensors = state.iter().zip(&shards.state_tensors[segment]);
                for (state, (&buffer, tensor)) in tensors.enumerate() {
                    for held in &tensor.pieces {
                        let slice = Slice::new(buffer, held.offset, held.len);
                        pieces.push(&**engine.memory(), Kind::State(state), held.param, held.first, slice)?;
                    }
                }
            }
        }
        Ok(pieces)
    }

    fn read<M: Memory>(
        &mut self,
        memory: &M,
        kind: Kind,
        buffer: &M::Buffer,
        held: &[Piece],
    ) -> Result<(), TrainError> {
        for piece in held {
            let slice = Slice::new(buffer, piece.offset, piece.len);
            self.push(memory, kind, piece.param, piece.param_offset, slice)?;
        }
        Ok(())
    }

    fn push<M: Memory>(
        &mut self,
        memory: &M,
        kind: Kind,
        param: ParamId,
        first: usize,
        slice: Slice<'_, M::Buffer>,
    ) -> Result<(), TrainError> {
        let mut values = vec![0.0; slice.len];
        memory.read(Queue::Compute, slice, HostSliceMut::F64(&mut values))?;
        self.values.push(Held { kind, param, first, values });
        Ok(())
    }
}
