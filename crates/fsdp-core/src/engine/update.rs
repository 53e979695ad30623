//! Runs the update rule: its statistics, its directions, and updates.

use std::sync::Arc;

use super::Engine;
use crate::comm::{Purpose, ReduceOp};
use crate::error::Error;
use crate::layout::SegmentId;
use crate::memory::{Memory, Slice, SliceMut};
use crate::mesh::Group;
use crate::program::Program;
use crate::rank::Queue;
use crate::schedule::{Op, OpId, UnitBuffers};
use crate::update::{SegmentShard, Stage, StepScalars, Updates, WholeDirections};
use crate::wrap::UnitId;

/// The gathered directions of a unit, one buffer per segment that has some, and the scratch.
struct Gathered<B> {
    directions: Vec<B>,
    scratch: B,
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    pub(super) fn statistics(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        let id = *op.writes.last().expect("the checker proved that statistics are written");
        let mut sums = self.table.take(id)?;
        self.for_each_shard(op, unit, None, |rule, _, shard, scalars, earlier| {
            rule.run(memory, Stage::Statistics { earlier, sums: &mut sums }, shard, scalars)
        })?;
        self.table.put(id, sums);
        Ok(())
    }

    pub(super) fn reduce_statistics(&mut self, memory: &M, op: &Op) -> Result<(), Error> {
        let parts = self.table.take_all(&op.writes)?;
        let (comm, purpose) = (self.comms.get(Queue::Reduce, Group::SHARDS), Purpose::UpdateRule);
        let pending = comm.all_reduce(memory, ReduceOp::Sum, purpose, None, parts)?;
        self.table.put_all(&op.writes, pending.wait_on(memory, Queue::Reduce)?.outputs);
        Ok(())
    }

    pub(super) fn direct(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        let plan = Arc::clone(&self.plan);
        let buffers = &plan.step.lasting.units[unit.0];
        let ids = &op.writes[update_prefix_len(buffers)..];
        let mut rows = self.table.take_all(ids)?;
        for rows in &mut rows {
            // A rank may hold no rows with a direction, and padding is gathered too.
            memory.zero(Queue::Compute, SliceMut::whole(rows))?;
        }
        self.for_each_shard(op, unit, None, |rule, segment, shard, scalars, _| {
            let Some(index) = buffers.whole_index(segment) else { return Ok(()) };
            rule.run(memory, Stage::Direct { direction: &mut rows[index] }, shard, scalars)
        })?;
        self.table.put_all(ids, rows);
        Ok(())
    }

    pub(super) fn gather_directions(
        &mut self,
        memory: &M,
        id: OpId,
        op: &Op,
        unit: UnitId,
        group: Group,
    ) -> Result<(), Error> {
        let inputs = op.reads.iter().map(|&id| self.table.get(id).cloned()).collect::<Result<_, _>>()?;
        let outputs = self.table.take_all(&op.writes)?;
        let (comm, purpose) = (self.comms.get(Queue::Gather, group), Purpose::UpdateRule);
        let pending = comm.all_gather(memory, purpose, Some(unit), inputs, outputs)?;
        self.in_flight.insert(id, pending);
        Ok(())
    }

    pub(super) fn update(&mut self, memory: &M, op: &Op, unit: UnitId) -> Result<(), Error> {
        let ids = &op.writes[update_prefix_len(&self.plan.step.lasting.units[unit.0])..];
        let mut gathered = match ids.split_last() {
            Some((&scratch, directions)) => Some(Gathered {
                directions: self.table.take_all(directions)?,
                scratch: self.table.take(scratch)?,
            }),
            None => None,
        };
        self.for_each_shard(op, unit, gathered.as_mut(), |rule, _, shard, scalars, statistics| {
            rule.run(memory, Stage::Update { statistics }, shard, scalars)
        })?;
        let Some(Gathered { directions, scratch }) = gathered else { return Ok(()) };
        self.table.put_all(ids, directions.into_iter().chain([scratch]));
        let gathered_ids = &ids[..ids.len() - 1];
        gathered_ids.iter().try_for_each(|&id| self.table.release(memory, Queue::Compute, id))
    }

    /// Calls `visit` for every trainable shard of a unit, with the statistics that the operation reads and, if they are
    /// gathered, the directions. Operands are in the order of [`OpKind::Update`](crate::schedule::OpKind::Update).
    fn for_each_shard(
        &mut self,
        op: &Op,
        unit: UnitId,
        mut gathered: Option<&mut Gathered<M::Buffer>>,
        mut visit: impl FnMut(
            &dyn Updates<M>,
            SegmentId,
            &mut SegmentShard<'_, M::Buffer>,
            &StepScalars<'_, M::Buffer>,
            &[M::Buffer],
        ) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let plan = Arc::clone(&self.plan);
        let buffers = &plan.step.lasting.units[unit.0];
        let (gradients, rest) = op.reads.split_at(buffers.gradient.len());
        let (factors, statistics) = (self.table.get(rest[0])?.clone(), &rest[1..]);
        let input = self.scalars.input();
        let scalars = StepScalars { step: input.step, lr: input.lr, factors: Slice::whole(&factors) };
        let [mut state, mut sums] = std::mem::take(&mut self.buffer_lists);
        self.table.take_into(statistics, &mut sums)?;
        let flag_id = op.writes[update_prefix_len(buffers) - 1];
        let mut not_finite = self.table.take(flag_id)?;
        for (index, [shard, state_ids]) in buffers.updated(&op.writes).enumerate() {
            let mut params = self.table.take(shard[0])?;
            let mut low = shard.get(1).map(|&id| self.table.take(id)).transpose()?;
            self.table.take_into(state_ids, &mut state)?;
            let segment = &plan.layout.unit(unit).segments[index];
            let start = plan.mesh.shard(self.rank) / segment.blocks * segment.shard_len();
            let whole = buffers.whole_index(SegmentId(index)).zip(gathered.as_deref_mut());
            let whole = whole.map(|(at, Gathered { directions, scratch })| WholeDirections {
                directions: &directions[at],
                start,
                scratch,
            });
            let mut view = SegmentShard {
                params: &mut params,
                low: low.as_mut(),
                gradient: self.table.get(gradients[index])?,
                state: &mut state,
                pieces: &self.tables.unit(unit).pieces[index],
                segment: Some(segment),
                whole,
                not_finite: &mut not_finite,
            };
            visit(&*self.rule, SegmentId(index), &mut view, &scalars, &sums)?;
            self.table.put_all(shard, [Some(params), low].into_iter().flatten());
            self.table.put_all(state_ids, state.drain(..));
        }
        self.table.put(flag_id, not_finite);
        self.table.put_all(statistics, sums.drain(..));
        self.buffer_lists = [state, sums];
        Ok(())
    }
}

/// The number of buffers that an update writes, up to and including the non-finite flag.
fn update_prefix_len(buffers: &UnitBuffers) -> usize {
    buffers.updated_len() + 1
}
