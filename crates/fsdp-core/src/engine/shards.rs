//! What a rank owns of a unit, for those who look at it from outside.

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
    /// What each segment's shard holds.
    pub pieces: &'a [Vec<Piece>],
    /// The gradient of the last step per trainable segment, as it was reduced: the sum of all micro-batches, over
    /// [`Schedule::averaged_ranks`](crate::schedule::Schedule::averaged_ranks). Empty before the first step, and behind an
    /// evaluation.
    pub gradients: Vec<&'a B>,
    /// Optimizer state per trainable segment; those are the first ones.
    pub state: Vec<Vec<&'a B>>,
    /// What each of its tensors is, and holds.
    pub state_tensors: &'a [Vec<StateTensor>],
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// This rank's shards of a unit: master parameters, last gradient, optimizer state, and what they hold.
    ///
    /// # Panics
    /// When a step has failed.
    pub fn shards(&self, unit: UnitId) -> UnitShards<'_, M::Buffer> {
        let (own, tables) = (&self.plan.step.lasting.units[unit.0], self.tables.unit(unit));
        UnitShards {
            params: self.present(&own.master),
            pieces: &tables.pieces,
            gradients: if self.has_gradients { self.present(&own.gradient) } else { Vec::new() },
            state: own.state.iter().map(|tensors| self.present(tensors)).collect(),
            state_tensors: &tables.state,
        }
    }

    fn present(&self, ids: &[BufferId]) -> Vec<&M::Buffer> {
        ids.iter().map(|&id| self.table.get(id).expect("nobody works on shards between steps")).collect()
    }
}
