//! Values of a whole model, and the pieces of it that one rank holds.

use fsdp_core::engine::Engine;
use fsdp_core::memory::{Buffer, HostSliceMut, Slice};
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
    /// Summed, unscaled gradients; `None` where frozen.
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

/// What a piece's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Param,
    Gradient,
    /// A state tensor with one element per parameter element.
    State(usize),
}

/// Values that one rank holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pub(super) values: Vec<(Kind, Piece, Vec<f64>)>,
}

impl Pieces {
    pub(super) fn of_rank<M: Memory, P: Program<M>>(engine: &Engine<M, P>) -> Result<Self, TrainError> {
        let mut pieces = Pieces::default();
        for unit in 0..engine.plan().layout.units.len() {
            let shards = engine.shards(unit);
            for (segment, buffer) in shards.params.iter().enumerate() {
                pieces.read(&**engine.memory(), Kind::Param, buffer, &shards.pieces[segment])?;
            }
            for (index, &segment) in shards.trainable.iter().enumerate() {
                let held = &shards.pieces[segment];
                if let Some(gradients) = shards.gradients {
                    pieces.read(&**engine.memory(), Kind::Gradient, &gradients[index], held)?;
                }
                for (state, buffer) in shards.state[index].iter().enumerate() {
                    if buffer.len() == shards.params[segment].len() {
                        pieces.read(&**engine.memory(), Kind::State(state), buffer, held)?;
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
            let mut values = vec![0.0; piece.len];
            let slice = Slice::new(buffer, piece.offset, piece.len);
            memory.read(Queue::Compute, slice, HostSliceMut::F64(&mut values))?;
            self.values.push((kind, *piece, values));
        }
        Ok(())
    }
}
