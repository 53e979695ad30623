//! Access to a rank's shards of a unit from outside the engine.

use super::Engine;
use crate::memory::Memory;
use crate::program::Program;
use crate::schedule::BufferId;
use crate::update::{Piece, StateTensor};
use crate::wrap::UnitId;

/// A rank's shards of one unit.
#[derive(Debug)]
pub struct UnitShards<'a, B> {
    /// Master parameters, one per segment.
    pub params: Vec<&'a B>,
    /// The pieces of parameters in each segment's shard.
    pub pieces: &'a [Vec<Piece>],
    /// The reduced gradient of the last step per trainable segment: the sum over all micro-batches, divided by
    /// [`Schedule::averaged_ranks`](crate::schedule::Schedule::averaged_ranks). Empty before the first step, and after
    /// an evaluation.
    pub gradients: Vec<&'a B>,
    /// Optimizer state per trainable segment; trainable segments come first.
    pub state: Vec<Vec<&'a B>>,
    /// Descriptions of the state tensors: names, dtypes and contents.
    pub state_tensors: &'a [Vec<StateTensor>],
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Returns this rank's shards of a unit: master parameters, last gradient, optimizer state, and their contents.
    ///
    /// # Panics
    /// When a step has failed and left a buffer in use.
    pub fn shards(&self, unit: UnitId) -> UnitShards<'_, M::Buffer> {
        let (buffers, tables) = (&self.plan.step.lasting.units[unit.0], self.tables.unit(unit));
        UnitShards {
            params: self.present(&buffers.master),
            pieces: &tables.pieces,
            gradients: if self.has_gradients { self.present(&buffers.gradient) } else { Vec::new() },
            state: buffers.state.iter().map(|tensors| self.present(tensors)).collect(),
            state_tensors: &tables.state,
        }
    }

    fn present(&self, ids: &[BufferId]) -> Vec<&M::Buffer> {
        ids.iter().map(|&id| self.table.get(id).expect("nobody works on shards between steps")).collect()
    }
}
