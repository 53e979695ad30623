//! Rows of mixtures on their way to the ranks of their experts and back, in rounds.

use fsdp_core::comm::{Comm, Purpose};
use fsdp_core::memory::{HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{Error, Group, Queue};
use tracing::trace_span;

use super::walk::{CALLS, DeviceRunner};
use super::{Call, Operand};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{ExpertAxis, Lookup, Op, Rounds};

impl<M: Backend> DeviceRunner<'_, M> {
    /// Sends rows, or sums of rows back. The host reads the routes, to know how many rounds there are and which rows go where.
    pub(super) fn run_rounds(
        &mut self,
        op: ExpertAxis,
        rounds: Rounds,
        call: &Call,
        places: &mut [Option<M::Buffer>],
    ) -> Result<(), Error> {
        let _span = trace_span!(target: CALLS, "call", queue = Queue::Compute.name(), op = call.op.name());
        let memory = self.inputs.memory;
        let mut written = call.writes.iter().map(|(operand, _)| {
            let place = operand.local().expect("rounds write places");
            places[place].take().expect("a call writes to places that live")
        });
        let [mut y, sent, received, ids] =
            std::array::from_fn(|_| written.next().expect("rounds write four places"));
        let comm =
            self.comms.find(Queue::Compute, Group::EXPERT).expect("ranks that share work are connected");
        let mut staging = Staging { memory, comm, rounds, sent, received: vec![received], ids };
        let mut routes = vec![0; rounds.routing.routes()];
        let read = self.inputs.read(call.reads[1], 0, places)?;
        memory.read(Queue::Compute, read, HostSliceMut::U32(&mut routes))?;
        let x = self.inputs.read(call.reads[0], 0, places)?;
        let (Operand::Local { offset, len, .. }, _) = call.writes[0] else { unreachable!("checked above") };
        staging.run(op, &routes, x, SliceMut::new(&mut y, offset, len))?;
        let Staging { sent, mut received, ids, .. } = staging;
        let written = [Some(y), Some(sent), received.pop(), Some(ids)];
        for ((operand, _), buffer) in call.writes.iter().zip(written) {
            places[operand.local().expect("checked above")] = buffer;
        }
        Ok(())
    }
}

/// Room for what a rank sends and receives in a round, and for indexes of rows.
struct Staging<'a, M: Backend> {
    memory: &'a M,
    comm: &'a mut Comm<M>,
    rounds: Rounds,
    sent: M::Buffer,
    /// One buffer.
    received: Vec<M::Buffer>,
    ids: M::Buffer,
}

impl<M: Backend> Staging<'_, M> {
    /// Runs all rounds.
    fn run(
        &mut self,
        op: ExpertAxis,
        routes: &[u32],
        x: Slice<'_, M::Buffer>,
        mut y: SliceMut<'_, M::Buffer>,
    ) -> Result<(), Error> {
        let rounds = self.rounds;
        for round in rounds.blocks(routes) {
            if let ExpertAxis::Return(_) = op {
                self.exchange(&rounds.returned_rows(routes, &round), x)?;
                let parts = rounds.received_parts(routes, &round);
                self.unpack(&parts, rounds.ranks(), &mut y, round[rounds.here()].start)?;
                continue;
            }
            self.exchange(&rounds.sent_rows(routes, &round), x)?;
            for (source, block) in round.iter().enumerate() {
                let found = rounds.received_rows(routes, &round, source);
                self.unpack(&found, 1, &mut y, source * rounds.routing.rows + block.start)?;
            }
        }
        Ok(())
    }

    /// Sends rows of `x` to all ranks.
    fn exchange(&mut self, rows: &[u32], x: Slice<'_, M::Buffer>) -> Result<(), Error> {
        let memory = self.memory;
        write_ids(memory, rows, &mut self.ids)?;
        sum_rows(
            memory,
            (&self.ids, rows.len()),
            (1, self.rounds.width),
            x,
            SliceMut::whole(&mut self.sent),
        )?;
        let (inputs, outputs) = (vec![self.sent.clone()], std::mem::take(&mut self.received));
        let pending = self.comm.all_to_all(memory, Purpose::Activations, inputs, outputs)?;
        self.received = pending.wait_on(memory, Queue::Compute)?.outputs;
        Ok(())
    }

    /// Writes sums of received rows to `y`, from a row on.
    fn unpack(
        &mut self,
        rows: &[u32],
        terms: usize,
        y: &mut SliceMut<'_, M::Buffer>,
        to: usize,
    ) -> Result<(), Error> {
        if rows.is_empty() {
            return Ok(());
        }
        let (memory, width) = (self.memory, self.rounds.width);
        write_ids(memory, rows, &mut self.ids)?;
        let y = SliceMut::new(&mut *y.buffer, y.offset + to * width, rows.len() / terms * width);
        sum_rows(memory, (&self.ids, rows.len()), (terms, width), Slice::whole(&self.received[0]), y)
    }
}

fn write_ids<M: Backend>(memory: &M, rows: &[u32], ids: &mut M::Buffer) -> Result<(), Error> {
    memory.write(Queue::Compute, HostSlice::U32(rows), SliceMut::new(ids, 0, rows.len()))
}

/// Sums rows of a table by the first `count` indexes, so many each.
fn sum_rows<M: Backend>(
    memory: &M,
    (ids, count): (&M::Buffer, usize),
    (terms, width): (usize, usize),
    table: Slice<'_, M::Buffer>,
    y: SliceMut<'_, M::Buffer>,
) -> Result<(), Error> {
    let op = Lookup::SumRows { rows: count / terms, terms, width, table_rows: table.len / width };
    let reads = &[Slice::new(ids, 0, count), table];
    let writes = &mut [Write::over(y)];
    memory.run(&Op::Lookup(op), Operands { reads, writes, batch: BatchFacts::default() })
}
