//! Executes each kind of operation.
//!
//! A gradient moves from buffer to buffer of the table; the schedule determines which ones, and when:
//! 1. `OpenGradient` takes the buffers of a unit out of the table and passes them to
//!    [`Gradients`](crate::program::Gradients), through which calls of blocks write into them.
//!    `CloseGradient` puts them back.
//! 2. `ReduceScatter` sums them over the ranks of its group. It may still be in flight when the call returns; the
//!    sum is in the table once a later operation waits for it or joins it ([`Engine::settle`]).
//! 3. `Add` adds it to the sum of earlier micro-batches, `AllReduce` sums over replicas, and `Download` moves
//!    it to the host; a schedule contains only those it needs. The result is the total of the step, a sum over
//!    micro-batches.
//! 4. `SquareNorm` adds its squared norm to the scalars of the step. `ReduceScalars` sums these over all ranks, and
//!    computes the factors that turn the total into the gradient of the mean loss, and clip it.
//! 5. `Update` passes the total, the factors, and this rank's parameters and state to the update rule (`update.rs`).

use std::sync::Arc;

use super::Engine;
use crate::comm::{Completed, Purpose};
use crate::error::Error;
use crate::layout::SegmentId;
use crate::memory::{Arithmetic, Buffer, Memory, Slice, SliceMut, View};
use crate::mesh::Group;
use crate::model::BlockId;
use crate::program::{Params, Program};
use crate::rank::Queue;
use crate::schedule::{Op, OpId, OpKind, Role, Schedule};
use crate::wrap::UnitId;

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Issues one operation whose waits are met.
    pub(super) fn execute(&mut self, schedule: &Schedule, id: OpId) -> Result<(), Error> {
        let memory = Arc::clone(&self.memory);
        let (memory, op) = (&*memory, schedule.op(id));
        match op.kind {
            OpKind::BeginStep => self.begin_step(memory, schedule, op),
            OpKind::BeginMicroBatch(round) => self.program.begin(memory, round, schedule.pass),
            OpKind::Upload(_) => self.copy(memory, Queue::Upload, op),
            OpKind::AllGather { unit, group, purpose, .. } => {
                self.all_gather(memory, id, op, unit, group, purpose)
            }
            OpKind::Call(call) => {
                let params = self.params(op, call.block())?;
                self.program.call(memory, call, &params, &mut self.gradients, &mut self.comms)
            }
            OpKind::KeepSubShard { group, .. } => self.keep_sub_shard(memory, op, group),
            OpKind::Reshard(unit) => self.reshard(memory, op, unit),
            OpKind::OpenGradient(unit) => self.open_gradient(memory, op, unit),
            OpKind::CloseGradient(unit) => self.close_gradient(memory, op, unit),
            OpKind::ReduceScatter { unit, reduce, group } => {
                let (inputs, outputs) = (self.table.take_all(&op.reads)?, self.table.take_all(&op.writes)?);
                let comm = self.comms.get(Queue::Reduce, group);
                let pending =
                    comm.reduce_scatter(memory, reduce, Purpose::Gradient, Some(unit), inputs, outputs)?;
                self.in_flight.insert(id, pending);
                Ok(())
            }
            OpKind::Add { queue, .. } => self.add(memory, queue, op),
            OpKind::AllReduce { unit, reduce, group } => {
                let comm = self.comms.get(Queue::Reduce, group);
                let buffers = self.table.take_all(&op.writes)?;
                let pending = comm.all_reduce(memory, reduce, Purpose::Gradient, Some(unit), buffers)?;
                self.in_flight.insert(id, pending);
                Ok(())
            }
            OpKind::Download(_) => {
                self.copy(memory, Queue::Download, op)?;
                op.reads.iter().try_for_each(|&id| self.table.release(memory, Queue::Download, id))
            }
            OpKind::SquareNorm(unit) => self.square_norm(memory, op, unit),
            OpKind::ReduceScalars => {
                let comm = self.comms.world();
                self.scalars.reduce(memory, &mut self.table, comm, &mut self.program)
            }
            OpKind::Statistics { unit, .. } => self.statistics(memory, op, unit),
            OpKind::ReduceStatistics(_) => self.reduce_statistics(memory, op),
            OpKind::Direct(unit) => self.direct(memory, op, unit),
            OpKind::GatherDirections { unit, group } => self.gather_directions(memory, id, op, unit, group),
            OpKind::Update(unit) => self.update(memory, op, unit),
        }
    }

    /// Makes `queue` wait for a collective, and puts its buffers into the table; returns whether it was in flight.
    pub(super) fn settle(&mut self, schedule: &Schedule, id: OpId, queue: Queue) -> Result<bool, Error> {
        let Some(pending) = self.in_flight.remove(&id) else { return Ok(false) };
        let Completed { outputs, inputs } = pending.wait_on(&*self.memory, queue)?;
        let op = schedule.op(id);
        self.table.put_all(&op.writes, outputs);
        match op.kind {
            OpKind::ReduceScatter { .. } => self.table.put_all(&op.reads, inputs),
            kind if kind.gives_up_inputs() => {
                op.reads.iter().try_for_each(|&id| self.table.release(&*self.memory, queue, id))?;
            }
            _ => {}
        }
        self.events.insert(id, self.memory.record(queue));
        Ok(true)
    }

    /// Resets scalars and statistics, keeping the non-finite flag of earlier updates, and gives up the previous
    /// gradients.
    fn begin_step(&mut self, memory: &M, schedule: &Schedule, op: &Op) -> Result<(), Error> {
        for &id in &op.writes {
            match schedule.buffer(id).role {
                Role::ShardedGradient => self.table.release(memory, Queue::Compute, id)?,
                Role::Scalars => self.scalars.clear(memory, &mut self.table, Queue::Compute)?,
                _ => memory.zero(Queue::Compute, SliceMut::whole(self.table.get_mut(id)?))?,
            }
        }
        Ok(())
    }

    /// Copies each buffer read to the corresponding buffer written.
    fn copy(&mut self, memory: &M, queue: Queue, op: &Op) -> Result<(), Error> {
        for (&from, &to) in op.reads.iter().zip(&op.writes) {
            let (from, to) = self.table.pair(from, to)?;
            memory.copy(queue, Slice::whole(from), SliceMut::whole(to))?;
        }
        Ok(())
    }

    fn add(&mut self, memory: &M, queue: Queue, op: &Op) -> Result<(), Error> {
        for (&from, &into) in op.reads.iter().zip(&op.writes) {
            let (source, sum) = self.table.pair(from, into)?;
            memory.compute(queue, Arithmetic::Accumulate(Slice::whole(source)), SliceMut::whole(sum))?;
            self.table.release(memory, queue, from)?;
        }
        Ok(())
    }

    fn all_gather(
        &mut self,
        memory: &M,
        id: OpId,
        op: &Op,
        unit: UnitId,
        group: Group,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let comm = self.comms.get(Queue::Gather, group);
        let inputs = op.reads.iter().map(|&id| self.table.get(id).cloned()).collect::<Result<_, _>>()?;
        let outputs = self.table.take_all(&op.writes)?;
        let pending = comm.all_gather(memory, purpose, Some(unit), inputs, outputs)?;
        self.in_flight.insert(id, pending);
        Ok(())
    }

    /// Creates views of a block's parameters, for one call.
    fn params(&self, op: &Op, block: BlockId) -> Result<Params<M::Buffer>, Error> {
        let mut params = Params::default();
        for (param, &id) in self.plan.layout.called(&self.plan.spec.block(block).params).zip(&op.reads) {
            let (.., place) = self.plan.layout.find(param).expect("every parameter lies in a unit");
            let buffer = self.table.get(id)?.clone();
            params.insert(param, View { buffer, offset: place.offset, len: place.len });
        }
        params.enter(block);
        Ok(params)
    }

    fn keep_sub_shard(&mut self, memory: &M, op: &Op, group: Group) -> Result<(), Error> {
        let part = self.plan.mesh.index_in_group(self.rank, group);
        for (&from, &to) in op.reads.iter().zip(&op.writes) {
            let (unsharded, sub_shard) = self.table.pair(from, to)?;
            memory.copy_part(Queue::Compute, unsharded, part, sub_shard)?;
        }
        Ok(())
    }

    fn reshard(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        for &id in &op.writes {
            if !self.table.get(id)?.is_exclusive() {
                return Err(Error::Viewed { unit: self.plan.layout.unit(unit).name.clone() });
            }
            self.table.release(memory, Queue::Compute, id)?;
        }
        Ok(())
    }

    /// Hands the buffers of the leaves' gradients to the program until they are closed.
    fn open_gradient(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        let segments = || self.plan.layout.unit(unit).trainable_segments();
        let params = segments().enumerate().flat_map(|(index, segment)| {
            segment.gathered().map(move |place| (place.param, SegmentId(index), place.offset, place.len))
        });
        let leaves = op.writes.chunks(segments().count());
        for (gradients, ids) in self.gradients.iter_mut().zip(leaves) {
            let mut buffers = self.table.take_all(ids)?;
            for (segment, buffer) in segments().zip(&mut buffers) {
                for (offset, len) in segment.padding() {
                    memory.zero(Queue::Compute, SliceMut::new(buffer, offset, len))?;
                }
            }
            gradients.open(unit, buffers, params.clone());
        }
        Ok(())
    }

    fn close_gradient(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        let mut buffers = Vec::new();
        for gradients in &mut self.gradients {
            buffers.extend(gradients.close(memory, unit)?.into_iter().flatten());
        }
        self.table.put_all(&op.writes, buffers);
        Ok(())
    }

    /// Adds to the squared norm.
    fn square_norm(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        for (&gradient, rows) in op.reads.iter().zip(&self.tables.unit(unit).measured) {
            let (gradient, scalars) = self.table.pair(gradient, op.writes[0])?;
            let sum = super::scalars::squared_norm(scalars);
            memory.compute(Queue::Reduce, Arithmetic::SquareSum(Slice::whole(gradient), rows), sum)?;
        }
        Ok(())
    }
}
