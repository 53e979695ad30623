//! What the operations on gradients do, from the slot that backward writes to the total of the step.

use super::super::Engine;
use super::super::buffers::Home;
use crate::comm::{Purpose, ReduceOp};
use crate::error::Error;
use crate::memory::{Memory, Slice, SliceMut};
use crate::program::Program;
use crate::rank::Queue;
use crate::schedule::OpId;

impl<M: Memory, P: Program<M>> Engine<M, P> {
    pub(super) fn open_gradient(&mut self, unit: usize, slot: usize) -> Result<(), Error> {
        let layout = &self.plan.layout.units[unit];
        self.units[unit].gradient_state.open(&layout.name, slot)?;
        let mut buffers = self.gradient_slots[slot].take().expect("the checker proved the slot free");
        for (segment, buffer) in layout.trainable_segments().zip(&mut buffers) {
            for (offset, len) in segment.padding() {
                self.memory.zero(Queue::Compute, SliceMut::new(buffer, offset, len))?;
            }
        }
        let params = layout.trainable_segments().enumerate().flat_map(|(index, segment)| {
            segment.params.iter().map(move |place| (place.param, index, place.offset, place.len))
        });
        self.gradients.open(unit, buffers, params);
        Ok(())
    }

    pub(super) fn close_gradient(&mut self, unit: usize) -> Result<(), Error> {
        let name = &self.plan.layout.units[unit].name;
        let Some(buffers) = self.gradients.close(&*self.memory, unit)? else {
            let (state, event) = (self.units[unit].gradient_state.name(), "close gradient");
            return Err(Error::Transition { unit: name.clone(), state, event });
        };
        self.units[unit].gradient_state.close(name, buffers)
    }

    pub(super) fn fold_unsharded(&mut self, unit: usize, last: bool) -> Result<(), Error> {
        let name = &self.plan.layout.units[unit].name;
        let buffers = &mut self.units[unit];
        let (slot, set) = buffers.gradient_state.fold(name)?;
        buffers.unsharded_sums.push(&*self.memory, Queue::Compute, set)?;
        if last {
            let total = buffers.unsharded_sums.total(&*self.memory, Queue::Compute)?;
            let total = total.expect("the total holds at least the last micro-batch");
            return buffers.gradient_state.total(name, slot, total);
        }
        self.gradient_slots[slot] = buffers.unsharded_sums.free.pop();
        Ok(())
    }

    pub(super) fn reduce_scatter(&mut self, id: OpId, unit: usize, slot: Option<usize>) -> Result<(), Error> {
        let buffers = &mut self.units[unit];
        let inputs = buffers.gradient_state.reduce(&self.plan.layout.units[unit].name)?;
        let outputs = match slot {
            None => buffers.sums.free.pop().expect("there is an accumulator for every partial sum"),
            Some(slot) => self.reduced_slots[slot].take().expect("the checker proved the slot free"),
        };
        let comm = &mut self.comms.reduce;
        let pending = comm.reduce_scatter(
            &*self.memory,
            ReduceOp::Sum,
            Purpose::Gradient,
            Some(unit),
            inputs,
            outputs,
        )?;
        self.in_flight.insert(id, pending);
        Ok(())
    }

    pub(super) fn fold(&mut self, unit: usize, last: bool) -> Result<(), Error> {
        let buffers = &mut self.units[unit];
        let name = &self.plan.layout.units[unit].name;
        let Some(set) = buffers.incoming.take() else {
            let (state, event) = (buffers.gradient_state.name(), "fold");
            return Err(Error::Transition { unit: name.clone(), state, event });
        };
        buffers.sums.push(&*self.memory, Queue::Reduce, set)?;
        if last {
            buffers.total = buffers.sums.total(&*self.memory, Queue::Reduce)?;
        }
        Ok(())
    }

    pub(super) fn all_reduce_replicas(&mut self, id: OpId, unit: usize) -> Result<(), Error> {
        let set = self.take_total(unit, "all-reduce")?;
        let comm = self.comms.replicate.as_mut().expect("a mesh with replicas has their communicator");
        let pending = comm.all_reduce(&*self.memory, ReduceOp::Sum, Purpose::Gradient, Some(unit), set)?;
        self.in_flight.insert(id, pending);
        Ok(())
    }

    /// Moves the total to its place in host memory.
    pub(super) fn download(&mut self, unit: usize) -> Result<(), Error> {
        let total = self.take_total(unit, "download")?;
        let buffers = &mut self.units[unit];
        buffers.gradient_state.download(&self.plan.layout.units[unit].name)?;
        let mut on_host = buffers.host_gradient.take().expect("there is room for one total on the host");
        for (from, to) in total.iter().zip(&mut on_host) {
            self.memory.copy(Queue::Download, Slice::whole(from), SliceMut::whole(to))?;
        }
        self.give_up(Queue::Download, unit, total);
        let buffers = &mut self.units[unit];
        (buffers.total, buffers.home) = (Some(on_host), Home::Host);
        Ok(())
    }

    pub(super) fn take_total(&mut self, unit: usize, event: &'static str) -> Result<Vec<M::Buffer>, Error> {
        let unit_name = || self.plan.layout.units[unit].name.clone();
        let state = self.units[unit].gradient_state.name();
        self.units[unit].total.take().ok_or_else(|| Error::Transition { unit: unit_name(), state, event })
    }

    /// Gives up a set of reduced gradients.
    pub(super) fn give_up(&mut self, queue: Queue, unit: usize, mut set: Vec<M::Buffer>) {
        set.iter_mut().for_each(|buffer| self.memory.release(queue, buffer));
        let buffers = &mut self.units[unit];
        match buffers.home {
            Home::Sums => buffers.sums.free.push(set),
            Home::Slot(slot) => self.reduced_slots[slot] = Some(set),
            Home::Host => buffers.host_gradient = Some(set),
        }
    }
}
