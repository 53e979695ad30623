//! What each operation does.

mod gradients;

use std::sync::Arc;

use super::Engine;
use super::buffers::{Home, SlotMap};
use crate::comm::{Completed, Purpose};
use crate::error::Error;
use crate::memory::{Buffer, Memory, Slice, SliceMut, View};
use crate::program::Program;
use crate::rank::Queue;
use crate::schedule::{OpId, OpKind, Schedule, Source};
use crate::update::{SegmentShard, StepScalars, UpdateRule};

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Issues one operation whose waits are met.
    pub(super) fn execute(&mut self, schedule: &Schedule, slots: &SlotMap, id: OpId) -> Result<(), Error> {
        let memory = Arc::clone(&self.memory);
        let memory = &*memory;
        match schedule.op(id).kind {
            OpKind::BeginStep => self.begin_step(),
            OpKind::BeginMicroBatch { round } => self.program.begin(memory, round),
            OpKind::Upload { unit, staging } => self.upload(unit, slots.staging[staging]),
            OpKind::AllGather { unit, slot, source, purpose } => {
                self.all_gather(id, unit, slots, slot, source, purpose)
            }
            OpKind::Forward { block, mode } => {
                self.params.enter(block);
                self.program.forward(memory, block, mode, &self.params)
            }
            OpKind::Finish { block, backward } => {
                self.params.enter(block);
                let gradients = backward.then_some(&mut self.gradients);
                self.program.finish(memory, block, &self.params, gradients)
            }
            OpKind::Backward { block } => {
                self.params.enter(block);
                self.program.backward(memory, block, &self.params, &mut self.gradients)
            }
            OpKind::KeepSubShard { unit } => self.keep_sub_shard(unit),
            OpKind::Reshard { unit } => self.reshard(unit),
            OpKind::OpenGradient { unit, slot } => self.open_gradient(unit, slot),
            OpKind::CloseGradient { unit } => self.close_gradient(unit),
            OpKind::FoldUnsharded { unit, last } => self.fold_unsharded(unit, last),
            OpKind::ReduceScatter { unit, slot } => self.reduce_scatter(id, unit, slot),
            OpKind::Fold { unit, last } => self.fold(unit, last),
            OpKind::AllReduceReplicas { unit } => self.all_reduce_replicas(id, unit),
            OpKind::Download { unit, .. } => self.download(unit),
            OpKind::SquareNorm { unit } => self.square_norm(unit),
            OpKind::ReduceScalars => self.scalars.reduce(memory, &mut self.comms.world, &mut self.program),
            OpKind::Statistics { unit, phase } => self.statistics(unit, phase),
            OpKind::ReduceStatistics { phase } => {
                self.scalars.reduce_statistics(memory, &mut self.comms.reduce, phase)
            }
            OpKind::Update { unit } => self.update(unit),
        }
    }

    /// Puts `queue` behind a collective, and its buffers where they belong; returns whether it was in flight.
    pub(super) fn settle(
        &mut self,
        schedule: &Schedule,
        slots: &SlotMap,
        id: OpId,
        queue: Queue,
    ) -> Result<bool, Error> {
        let Some(pending) = self.in_flight.remove(&id) else { return Ok(false) };
        let Completed { outputs, inputs } = pending.wait_on(&*self.memory, queue)?;
        match schedule.op(id).kind {
            OpKind::AllGather { unit, source, .. } => {
                if let Source::Staged(staging) = source {
                    let staged = self.staging_slots[slots.staging[staging]].iter_mut();
                    staged.for_each(|buffer| self.memory.release(queue, buffer));
                }
                self.arrived(unit, outputs)?;
            }
            OpKind::ReduceScatter { unit, slot: reduced } => {
                let name = &self.plan.layout.units[unit].name;
                let slot = self.units[unit].gradient_state.arrive(name)?;
                self.gradient_slots[slot] = Some(inputs);
                self.units[unit].incoming = Some(outputs);
                self.units[unit].home = reduced.map_or(Home::Sums, Home::Slot);
            }
            OpKind::AllReduceReplicas { unit } => self.units[unit].total = Some(outputs),
            _ => unreachable!("only all-gathers, reduce-scatters and all-reduces are in flight"),
        }
        self.events.insert(id, self.memory.record(queue));
        Ok(true)
    }

    /// Gives up the gradients of the step before.
    fn begin_step(&mut self) -> Result<(), Error> {
        for unit in 0..self.units.len() {
            if let Some(total) = self.units[unit].total.take() {
                self.give_up(Queue::Compute, unit, total);
            }
        }
        Ok(())
    }

    fn upload(&mut self, unit: usize, staging: usize) -> Result<(), Error> {
        let buffers = &mut self.units[unit];
        buffers.param_state.upload(&self.plan.layout.units[unit].name, staging)?;
        let shard = if buffers.low.is_empty() { &buffers.master } else { &buffers.low };
        for (from, to) in shard.iter().zip(&mut self.staging_slots[staging]) {
            self.memory.copy(Queue::Upload, Slice::whole(from), SliceMut::whole(to))?;
        }
        Ok(())
    }

    fn all_gather(
        &mut self,
        id: OpId,
        unit: usize,
        slots: &SlotMap,
        slot: usize,
        source: Source,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let (buffers, slot) = (&mut self.units[unit], slots.unsharded[slot]);
        let name = &self.plan.layout.units[unit].name;
        let (comm, inputs) = match (source, &mut self.comms.sub_gather) {
            (Source::Staged(staging), _) => {
                let staging = slots.staging[staging];
                buffers.param_state.gather_staged(name, staging, slot)?;
                (&mut self.comms.gather, &self.staging_slots[staging])
            }
            (Source::SubShard, Some(comm)) => {
                buffers.param_state.gather(name, slot)?;
                (comm, &buffers.sub_shards)
            }
            _ => {
                buffers.param_state.gather(name, slot)?;
                let shard = if buffers.low.is_empty() { &buffers.master } else { &buffers.low };
                (&mut self.comms.gather, shard)
            }
        };
        let outputs = self.slots[slot].take().expect("the checker proved the slot free");
        let pending = comm.all_gather(&*self.memory, purpose, Some(unit), inputs.clone(), outputs)?;
        self.in_flight.insert(id, pending);
        Ok(())
    }

    /// Hands the unsharded unit to the program.
    fn arrived(&mut self, unit: usize, buffers: Vec<M::Buffer>) -> Result<(), Error> {
        let layout = &self.plan.layout.units[unit];
        for (segment, buffer) in layout.segments.iter().zip(&buffers) {
            for place in &segment.params {
                let view = View { buffer: buffer.clone(), offset: place.offset, len: place.len };
                self.params.insert(place.param, view);
            }
        }
        self.units[unit].param_state.arrive(&layout.name, buffers)
    }

    fn keep_sub_shard(&mut self, unit: usize) -> Result<(), Error> {
        let buffers = &mut self.units[unit];
        let full = buffers.param_state.unsharded(&self.plan.layout.units[unit].name)?;
        let part = self.comms.sub_gather.as_ref().map_or(0, |comm| comm.rank());
        for (source, kept) in full.iter().zip(&mut buffers.sub_shards) {
            let source = Slice::new(source, part * kept.len(), kept.len());
            self.memory.copy(Queue::Compute, source, SliceMut::whole(kept))?;
        }
        Ok(())
    }

    fn reshard(&mut self, unit: usize) -> Result<(), Error> {
        let layout = &self.plan.layout.units[unit];
        for place in layout.segments.iter().flat_map(|segment| &segment.params) {
            self.params.remove(place.param);
        }
        let (slot, mut buffers) = self.units[unit].param_state.reshard(&layout.name)?;
        for buffer in &mut buffers {
            if !buffer.is_exclusive() {
                let (state, event) = ("still viewed by the program", "reshard");
                return Err(Error::Transition { unit: layout.name.clone(), state, event });
            }
            self.memory.release(Queue::Compute, buffer);
        }
        self.slots[slot] = Some(buffers);
        Ok(())
    }

    /// Adds to the squared norm. Replicas hold equal gradients: those of the first one count.
    fn square_norm(&mut self, unit: usize) -> Result<(), Error> {
        if self.plan.mesh.replica_of(self.rank) > 0 {
            return Ok(());
        }
        let total = self.take_total(unit, "measure the norm")?;
        let buffers = &mut self.units[unit];
        for (gradient, &segment) in total.iter().zip(&buffers.trainable) {
            for piece in &buffers.pieces[segment] {
                let slice = Slice::new(gradient, piece.offset, piece.len);
                self.memory.square_sum(Queue::Reduce, slice, piece.row_len, self.scalars.norm())?;
            }
        }
        buffers.total = Some(total);
        Ok(())
    }

    fn statistics(&mut self, unit: usize, phase: usize) -> Result<(), Error> {
        let (input, factors) = self.scalars.for_update();
        let scalars = StepScalars { step: input.step, lr: input.lr, factors: Slice::whole(&factors) };
        let memory = Arc::clone(&self.memory);
        self.each_shard(unit, "gather statistics", |rule, statistics, shard| {
            let (earlier, rest) = statistics.split_at_mut(phase);
            rule.statistics(&*memory, phase, shard, &scalars, earlier, &mut rest[0])
        })
    }

    fn update(&mut self, unit: usize) -> Result<(), Error> {
        self.units[unit].gradient_state.apply(&self.plan.layout.units[unit].name)?;
        let (input, factors) = self.scalars.for_update();
        let scalars = StepScalars { step: input.step, lr: input.lr, factors: Slice::whole(&factors) };
        let memory = Arc::clone(&self.memory);
        self.each_shard(unit, "update", |rule, statistics, shard| {
            rule.update(&*memory, shard, &scalars, statistics)
        })
    }

    /// Shows the update rule every trainable shard of a unit, with the statistics of all phases.
    fn each_shard(
        &mut self,
        unit: usize,
        event: &'static str,
        mut visit: impl FnMut(
            &mut dyn UpdateRule<M>,
            &mut [M::Buffer],
            &mut SegmentShard<'_, M::Buffer>,
        ) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let total = self.take_total(unit, event)?;
        let buffers = &mut self.units[unit];
        for (index, &segment) in buffers.trainable.iter().enumerate() {
            let mut shard = SegmentShard {
                params: &mut buffers.master[segment],
                low: buffers.low.get_mut(segment),
                gradient: &total[index],
                state: &mut buffers.state[index],
                pieces: &buffers.pieces[segment],
                not_finite: &mut self.scalars.not_finite,
            };
            visit(&mut *self.rule, &mut self.scalars.statistics, &mut shard)?;
        }
        buffers.total = Some(total);
        Ok(())
    }
}
