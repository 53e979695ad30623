//! Starting values: from a function that every rank can evaluate, or from files that one replica reads for all.

use super::buffers::UnitBuffers;
use super::{Comms, Engine};
use crate::comm::Purpose;
use crate::error::Error;
use crate::memory::{HostSlice, Memory, Slice, SliceMut};
use crate::program::Program;
use crate::rank::Queue;
use crate::update::{Piece, StatePiece, StateTensor};

/// Where starting values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// They are computed, by every rank for itself.
    Computed,
    /// They are read from files, by the ranks of the first replica only; the others receive theirs by broadcast. So
    /// a file system serves each value once, however many replicas there are.
    Read,
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Whether this rank is one of the first replica, which reads for all.
    pub fn reads(&self) -> bool {
        self.plan.mesh.replica_of(self.rank) == 0
    }

    /// Sets master parameters: `fill` gets every piece of this rank's shards and room for its elements. It is called
    /// on the ranks that `origin` says.
    ///
    /// When it fails there, that rank has to end with its error, as after every error of an engine: the ranks that
    /// wait for its values then fail with it.
    ///
    /// # Errors
    /// Those of `fill` and of the memory; [`Error::Comm`].
    pub fn load_params<E: From<Error>>(
        &mut self,
        origin: Origin,
        mut fill: impl FnMut(&Piece, &mut Vec<f64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let fills = origin == Origin::Computed || self.reads();
        for index in 0..self.units.len() {
            let (memory, unit) = (&*self.memory, &mut self.units[index]);
            if fills {
                fill_params(memory, unit, &mut fill)?;
            }
            if origin == Origin::Read {
                unit.master = self.comms.receive(memory, index, std::mem::take(&mut unit.master))?;
            }
            for (master, low) in unit.master.iter().zip(&mut unit.low) {
                memory.copy(Queue::Compute, Slice::whole(master), SliceMut::whole(low))?;
            }
        }
        Ok(())
    }

    /// Sets optimizer state: `fill` gets every piece of this rank's state tensors and room for its elements. It is
    /// called on the ranks that `origin` says.
    ///
    /// # Errors
    /// As [`Engine::load_params`].
    pub fn load_state<E: From<Error>>(
        &mut self,
        origin: Origin,
        mut fill: impl FnMut(&StateTensor, &StatePiece, &mut Vec<f64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let fills = origin == Origin::Computed || self.reads();
        for index in 0..self.units.len() {
            let (memory, unit) = (&*self.memory, &mut self.units[index]);
            if fills {
                fill_state(memory, unit, &mut fill)?;
            }
            if origin == Origin::Read {
                for tensors in &mut unit.state {
                    // One call per tensor, because their dtypes may differ.
                    let own = std::mem::take(tensors).into_iter();
                    let received = own.map(|buffer| self.comms.receive(memory, index, vec![buffer]));
                    *tensors = received.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
                }
            }
        }
        Ok(())
    }
}

impl<M: Memory> Comms<M> {
    /// Brings what the first replica has in these buffers to all replicas, for the compute queue.
    fn receive(&mut self, memory: &M, unit: usize, buffers: Vec<M::Buffer>) -> Result<Vec<M::Buffer>, Error> {
        let Some(replicate) = &mut self.replicate else { return Ok(buffers) };
        memory.wait(Queue::Reduce, &memory.record(Queue::Compute));
        let pending = replicate.broadcast(memory, Purpose::Setup, Some(unit), 0, buffers)?;
        Ok(pending.wait_on(memory, Queue::Compute)?.outputs)
    }
}

fn fill_params<M: Memory, E: From<Error>>(
    memory: &M,
    unit: &mut UnitBuffers<M::Buffer>,
    fill: &mut impl FnMut(&Piece, &mut Vec<f64>) -> Result<(), E>,
) -> Result<(), E> {
    let mut values = Vec::new();
    for (buffer, pieces) in unit.master.iter_mut().zip(&unit.pieces) {
        for piece in pieces {
            values.clear();
            values.resize(piece.len, 0.0);
            fill(piece, &mut values)?;
            let slice = SliceMut::new(buffer, piece.offset, piece.len);
            memory.write(Queue::Compute, HostSlice::F64(&values), slice)?;
        }
    }
    Ok(())
}

fn fill_state<M: Memory, E: From<Error>>(
    memory: &M,
    unit: &mut UnitBuffers<M::Buffer>,
    fill: &mut impl FnMut(&StateTensor, &StatePiece, &mut Vec<f64>) -> Result<(), E>,
) -> Result<(), E> {
    let mut values = Vec::new();
    let buffers = unit.state.iter_mut().flatten();
    for (buffer, tensor) in buffers.zip(unit.state_tensors.iter().flatten()) {
        for piece in &tensor.pieces {
            values.clear();
            values.resize(piece.len, 0.0);
            fill(tensor, piece, &mut values)?;
            let slice = SliceMut::new(buffer, piece.offset, piece.len);
            memory.write(Queue::Compute, HostSlice::F64(&values), slice)?;
        }
    }
    Ok(())
}
