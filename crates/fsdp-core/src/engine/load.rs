//! Initial values: computed by every rank, or read from files by the first replica and broadcast to the others.

use std::sync::Arc;

use super::Engine;
use super::table::Table;
use crate::comm::{Comms, Purpose};
use crate::error::Error;
use crate::memory::{Memory, Slice, SliceMut};
use crate::mesh::{Axis, Group};
use crate::model::ParamId;
use crate::program::Program;
use crate::rank::Queue;
use crate::schedule::BufferId;
use crate::update::{Piece, StatePiece, StateTensor};
use crate::wrap::UnitId;

/// The source of initial values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Every rank computes its own values.
    Computed,
    /// The ranks of the first replica read the values from files and broadcast them to the other replicas. A file
    /// system thus serves each value once, regardless of the number of replicas.
    Read,
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Whether this rank belongs to the first replica, which reads for all.
    pub fn reads(&self) -> bool {
        self.plan.mesh.coordinate(self.rank, Axis::Replicate) == 0
    }

    /// Sets the master parameters: `fill` receives every piece of this rank's shards and a buffer for its elements. It
    /// is called on the ranks determined by `origin`.
    ///
    /// If `fill` fails, its rank must end with the error, as after every error of an engine; the ranks that wait for
    /// its values then fail as well.
    ///
    /// # Errors
    /// The errors of `fill` and of the memory; [`Error::Comm`].
    pub fn load_params<E: From<Error>>(
        &mut self,
        origin: Origin,
        mut fill: impl FnMut(&Piece, &mut Vec<f64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let fills_here = origin == Origin::Computed || self.reads();
        let plan = Arc::clone(&self.plan);
        let memory = &*self.memory;
        for (unit, buffers) in plan.layout.unit_ids().zip(&plan.step.lasting.units) {
            for (&id, pieces) in buffers.master.iter().zip(&self.tables.unit(unit).pieces) {
                for piece in pieces.iter().filter(|_| fills_here) {
                    let values = fill_values(piece.len, |values| fill(piece, values))?;
                    write(memory, self.table.get_mut(id)?, piece.offset, &values)?;
                }
            }
            if origin == Origin::Read {
                self.comms.broadcast_shards(memory, &mut self.table, unit, &buffers.master)?;
            }
            for (&master, &low) in buffers.master.iter().zip(&buffers.low) {
                let Some(low) = low else { continue };
                let (master, low) = self.table.pair(master, low)?;
                memory.copy(Queue::Compute, Slice::whole(master), SliceMut::whole(low))?;
            }
        }
        Ok(())
    }

    /// Changes the master values of some parameters between steps: `change` receives every piece of theirs in this rank's
    /// shards, with its elements. All ranks make the same changes. Waits for the device.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn change_params(
        &mut self,
        is_changed: impl Fn(ParamId) -> bool,
        mut change: impl FnMut(&Piece, &mut [f64]),
    ) -> Result<(), Error> {
        let plan = Arc::clone(&self.plan);
        let memory = &*self.memory;
        for (unit, buffers) in plan.layout.unit_ids().zip(&plan.step.lasting.units) {
            for (segment, pieces) in self.tables.unit(unit).pieces.iter().enumerate() {
                let changed: Vec<&Piece> = pieces.iter().filter(|piece| is_changed(piece.param)).collect();
                if changed.is_empty() {
                    continue;
                }
                let master = self.table.get_mut(buffers.master[segment])?;
                for piece in changed {
                    let mut values = vec![0.0; piece.len];
                    let slice = Slice::new(master, piece.offset, piece.len);
                    memory.read_numbers(Queue::Compute, slice, &mut values)?;
                    change(piece, &mut values);
                    write(memory, master, piece.offset, &values)?;
                }
                if let Some(low) = buffers.low[segment] {
                    let (master, low) = self.table.pair(buffers.master[segment], low)?;
                    memory.copy(Queue::Compute, Slice::whole(master), SliceMut::whole(low))?;
                }
            }
        }
        Ok(())
    }

    /// Sets the optimizer state: `fill` receives every piece of this rank's state tensors and a buffer for its
    /// elements. It is called on the ranks determined by `origin`.
    ///
    /// # Errors
    /// As [`Engine::load_params`].
    pub fn load_state<E: From<Error>>(
        &mut self,
        origin: Origin,
        mut fill: impl FnMut(&StateTensor, &StatePiece, &mut Vec<f64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let fills_here = origin == Origin::Computed || self.reads();
        let plan = Arc::clone(&self.plan);
        let memory = &*self.memory;
        for (unit, buffers) in plan.layout.unit_ids().zip(&plan.step.lasting.units) {
            let tensors = self.tables.unit(unit).state.iter().flatten();
            for (&id, tensor) in buffers.state.iter().flatten().zip(tensors) {
                for piece in tensor.pieces.iter().filter(|_| fills_here) {
                    let values = fill_values(piece.len, |values| fill(tensor, piece, values))?;
                    write(memory, self.table.get_mut(id)?, piece.offset, &values)?;
                }
                if origin == Origin::Read {
                    self.comms.broadcast_shards(memory, &mut self.table, unit, &[id])?;
                }
            }
        }
        Ok(())
    }
}

impl<M: Memory> Comms<M> {
    /// Broadcasts the contents of these buffers from the first replica to all others, for use by the compute queue.
    fn broadcast_shards(
        &mut self,
        memory: &M,
        table: &mut Table<M::Buffer>,
        unit: UnitId,
        ids: &[BufferId],
    ) -> Result<(), Error> {
        let Some(replicate) = self.find(Queue::Reduce, Group::REPLICATE) else { return Ok(()) };
        memory.wait(Queue::Reduce, &memory.record(Queue::Compute));
        let pending = replicate.broadcast(memory, Purpose::Setup, Some(unit), 0, table.take_all(ids)?)?;
        table.put_all(ids, pending.wait_on(memory, Queue::Compute)?.outputs);
        Ok(())
    }
}

/// Returns `len` values set by `fill`.
fn fill_values<E>(len: usize, fill: impl FnOnce(&mut Vec<f64>) -> Result<(), E>) -> Result<Vec<f64>, E> {
    let mut values = vec![0.0; len];
    fill(&mut values)?;
    Ok(values)
}

fn write<M: Memory>(memory: &M, buffer: &mut M::Buffer, offset: usize, values: &[f64]) -> Result<(), Error> {
    memory.write_numbers(Queue::Compute, values, SliceMut::new(buffer, offset, values.len()))
}
