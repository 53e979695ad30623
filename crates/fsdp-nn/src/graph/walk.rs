//! Walks a list of calls: on a device, or to count the memory it would allocate.

use std::ops::Range;
use std::sync::Arc;

use fsdp_core::comm::{Comms, Pending, Purpose, ReduceOp};
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::program::{Gradients, Params};
use fsdp_core::{Error, Group, Queue};
use tracing::trace_span;

use super::{Call, Decl, List, MicroBatch, Operand, Redistribution, Step};
use crate::accounting::{Account, Lease};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{ExpertAxis, Op};

/// Tracing target of call spans; the same as for the engine's operations, which contain them.
pub(super) const CALLS: &str = "fsdp::op";

const ROUTERS: &str = "a model with mixtures has room for what routers leave";

/// Executes the steps of a list.
pub(crate) trait Runner {
    /// A handle to a live place.
    type Handle: Clone;

    /// Allocates a place.
    fn allocate(&mut self, decl: &Decl) -> Result<Self::Handle, Error>;

    /// Called when recomputation from a kept value begins; backward then continues from `gradient`.
    fn recompute(&mut self, _kept: &mut Self::Handle, _gradient: &Self::Handle) {}

    /// Executes the call of a step.
    fn run(&mut self, step: &Step, places: &mut [Option<Self::Handle>]) -> Result<(), Error>;
}

/// Executes the steps of a list.
pub(crate) fn walk<R: Runner>(
    list: &List,
    decls: &[Decl],
    places: &mut [Option<R::Handle>],
    runner: &mut R,
) -> Result<(), Error> {
    list.unread.iter().for_each(|&id| places[id] = None);
    for step in &list.steps {
        for &id in &step.begins {
            places[id] = Some(runner.allocate(&decls[id])?);
        }
        runner.run(step, places)?;
        step.ends.iter().for_each(|&id| places[id] = None);
    }
    Ok(())
}

/// A [`Runner`] that only counts places in an account.
pub(crate) struct Counting(pub(crate) Arc<Account>);

impl Runner for Counting {
    type Handle = Arc<Lease>;

    fn allocate(&mut self, decl: &Decl) -> Result<Arc<Lease>, Error> {
        Ok(self.0.open(decl.category, decl.dtype, decl.len()))
    }

    fn run(&mut self, _step: &Step, _places: &mut [Option<Arc<Lease>>]) -> Result<(), Error> {
        Ok(())
    }
}

/// A [`Runner`] that executes calls on a device.
pub(crate) struct DeviceRunner<'a, M: Backend> {
    pub(crate) inputs: Inputs<'a, M>,
    /// The destinations of parameter gradients, for each leaf: a chunk, for experts of one source. Empty if the call computes
    /// none.
    pub(crate) gradients: &'a mut [Gradients<M::Buffer>],
    /// Reaches the ranks that have other chunks of samples, or other experts.
    pub(crate) comms: &'a mut Comms<M>,
    /// The destination of the loss of each row.
    pub(crate) losses: SliceMut<'a, M::Buffer>,
    /// The destination of the z-loss part of each loss, if there is a z-loss.
    pub(crate) z_losses: Option<SliceMut<'a, M::Buffer>>,
    /// Destinations of router data, if the model has routers.
    pub(crate) routers: Option<Routers<'a, M::Buffer>>,
    /// Redistributions that have started.
    pub(crate) in_flight: Vec<(Redistribution, Pending<M>)>,
}

/// The data that the routers of a micro-batch write.
pub(crate) struct Routers<'a, B> {
    /// The loads of all mixtures, chunk by chunk.
    pub(crate) loads: SliceMut<'a, B>,
    /// The range of the block's own load in those of a chunk; empty if the block is not a mixture.
    pub(crate) load_range: Range<usize>,
    /// The balancing loss.
    pub(crate) loss: SliceMut<'a, B>,
    /// The sums of loads over all chunks; `None` if samples are whole.
    pub(crate) total: Option<Slice<'a, B>>,
}

/// The inputs of calls, apart from places.
pub(crate) struct Inputs<'a, M: Backend> {
    pub(crate) memory: &'a M,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) block: BlockId,
    pub(crate) params: &'a Params<M::Buffer>,
    pub(crate) batch: MicroBatch<'a, M::Buffer>,
}

impl<M: Backend> Runner for DeviceRunner<'_, M> {
    type Handle = M::Buffer;

    fn allocate(&mut self, decl: &Decl) -> Result<M::Buffer, Error> {
        self.inputs.memory.allocate(decl.category, decl.dtype, decl.len())
    }

    fn recompute(&mut self, kept: &mut M::Buffer, gradient: &M::Buffer) {
        self.inputs.memory.recompute(kept, gradient);
    }

    fn run(&mut self, step: &Step, places: &mut [Option<M::Buffer>]) -> Result<(), Error> {
        self.run_call(step, places)?;
        step.arrivals.iter().try_for_each(|&place| self.complete(place, places))
    }
}

impl<M: Backend> DeviceRunner<'_, M> {
    fn run_call(&mut self, step: &Step, places: &mut [Option<M::Buffer>]) -> Result<(), Error> {
        let call = &step.call;
        if let Op::ExpertAxis(op @ (ExpertAxis::Send(rounds) | ExpertAxis::Return(rounds))) = call.op {
            return self.run_rounds(op, rounds, call, places);
        }
        if let Some(redistribution) = call.redistribution() {
            return self.start(call, redistribution, places);
        }
        // Written buffers are taken out of the table, so that the table can be borrowed for reads.
        let mut owned: Vec<Option<(usize, M::Buffer)>> = Vec::with_capacity(call.writes.len());
        for (operand, _) in &call.writes {
            owned.push(operand.local().and_then(|id| Some((id, places[id].take()?))));
        }
        let result = self.run_with(step, places, &mut owned);
        for (id, buffer) in owned.into_iter().flatten() {
            places[id] = Some(buffer);
        }
        result
    }

    /// Starts to redistribute a value over the context axis or the expert axis.
    fn start(
        &mut self,
        call: &Call,
        redistribution: Redistribution,
        places: &mut [Option<M::Buffer>],
    ) -> Result<(), Error> {
        let Redistribution { from, to, .. } = redistribution;
        let (memory, purpose) = (self.inputs.memory, Purpose::Activations);
        let _span = trace_span!(target: CALLS, "call", queue = Queue::Compute.name(), op = call.op.name());
        let group = if let Op::Exchange(_) = call.op { Group::CONTEXT } else { Group::EXPERT };
        let comm = self.comms.find(Queue::Compute, group).expect("ranks that share work are connected");
        let taken = |place: &mut Option<M::Buffer>| vec![place.take().expect("operands live")];
        let (inputs, outputs) = (taken(&mut places[from]), taken(&mut places[to]));
        let pending = match call.op {
            Op::ExpertAxis(ExpertAxis::ReduceScatter { .. }) => {
                comm.reduce_scatter(memory, ReduceOp::Sum, purpose, None, inputs, outputs)?
            }
            _ => {
                places[from] = inputs.first().cloned();
                match call.op {
                    Op::Exchange(_) => comm.all_to_all(memory, purpose, inputs, outputs)?,
                    _ => comm.all_gather(memory, purpose, None, inputs, outputs)?,
                }
            }
        };
        self.in_flight.push((redistribution, pending));
        Ok(())
    }

    /// Waits for what a place receives.
    fn complete(&mut self, place: usize, places: &mut [Option<M::Buffer>]) -> Result<(), Error> {
        let of_place = |(redistribution, _): &(Redistribution, _)| redistribution.to == place;
        let index = self.in_flight.iter().position(of_place).expect("what arrives has started");
        let (Redistribution { from, to, .. }, pending) = self.in_flight.swap_remove(index);
        let mut done = pending.wait_on(self.inputs.memory, Queue::Compute)?;
        places[to] = done.outputs.pop();
        // Contents of what was reduced are given up.
        places[from] = places[from].take().or_else(|| done.inputs.pop());
        Ok(())
    }

    fn run_with(
        &mut self,
        Step { call, chunk, .. }: &Step,
        places: &[Option<M::Buffer>],
        owned: &mut [Option<(usize, M::Buffer)>],
    ) -> Result<(), Error> {
        let inputs = &self.inputs;
        // A call that writes a load reads none.
        let writes_load = call.writes.iter().any(|(operand, _)| *operand == Operand::Load);
        let part = (*chunk, inputs.batch.chunks);
        let (loads, mut load, mut router_loss) = match &mut self.routers {
            None => (None, None, None),
            Some(Routers { loads, load_range, loss, .. }) if writes_load => {
                let SliceMut { buffer, offset, .. } = rows_of(loads, part);
                let load = SliceMut::new(buffer, offset + load_range.start, load_range.len());
                (None, Some(load), Some(loss.reborrow()))
            }
            Some(Routers { loads, loss, total, .. }) => {
                (Some(total.unwrap_or(loads.as_slice())), None, Some(loss.reborrow()))
            }
        };
        let read = |operand: &Operand| match operand {
            Operand::Loads => Ok(loads.expect(ROUTERS)),
            other => inputs.read(*other, *chunk, places),
        };
        let reads: Vec<Slice<'_, M::Buffer>> = call.reads.iter().map(read).collect::<Result<_, _>>()?;
        let mut losses = Some(rows_of(&mut self.losses, part));
        let mut z_losses = self.z_losses.as_mut().map(|all| rows_of(all, part));
        // Each derived call writes the gradient of at most one parameter, so the gradients need not be shared.
        let mut gradients = self.gradients.get_mut(call.op.source() * inputs.batch.chunks + chunk);
        let mut writes = Vec::with_capacity(call.writes.len());
        for ((operand, accumulate), owned) in call.writes.iter().zip(owned) {
            writes.push(match *operand {
                Operand::Local { offset, len, .. } => {
                    let (_, buffer) = owned.as_mut().expect("a call writes to places that live");
                    Write { slice: SliceMut::new(buffer, offset, len), accumulate: *accumulate }
                }
                Operand::ParamGradient(index) => {
                    let id = inputs.param(index);
                    let target = gradients.take().and_then(|gradients| gradients.target(id));
                    Write::from(target.ok_or_else(|| inputs.without_gradient(id))?)
                }
                Operand::Losses => Write::over(losses.take().expect("a call writes the losses once")),
                Operand::ZLosses => {
                    Write::over(z_losses.take().expect("a micro-batch has room for its z-losses"))
                }
                Operand::Load => Write::over(load.take().expect(ROUTERS)),
                Operand::RouterLoss => Write::over(router_loss.take().expect(ROUTERS)),
                Operand::Param(_) | Operand::Ids | Operand::Positions | Operand::Targets | Operand::Loads => {
                    unreachable!("{operand:?} is only read")
                }
            });
        }
        let keys =
            call.site.map_or_else(Vec::new, |site| inputs.batch.dropout_keys(inputs.block, site, *chunk));
        let _span = trace_span!(target: CALLS, "call", queue = Queue::Compute.name(), op = call.op.name());
        let MicroBatch { documents, counted: targets, counted_rows, lengths, keys_ends, .. } = inputs.batch;
        let samples = lengths.len() / inputs.batch.chunks;
        let lengths = &lengths[chunk * samples..][..samples];
        let batch = BatchFacts { keys: &keys, documents, targets, counted_rows, lengths, keys_ends };
        inputs.memory.run(&call.op, Operands { reads: &reads, writes: &mut writes, batch })
    }
}

/// The rows of one of several chunks.
fn rows_of<'b, B: Buffer>(all: &'b mut SliceMut<'_, B>, (chunk, chunks): (usize, usize)) -> SliceMut<'b, B> {
    let len = all.len / chunks;
    SliceMut::new(&mut *all.buffer, all.offset + chunk * len, len)
}

impl<M: Backend> Inputs<'_, M> {
    pub(crate) fn read<'b>(
        &'b self,
        operand: Operand,
        chunk: usize,
        places: &'b [Option<M::Buffer>],
    ) -> Result<Slice<'b, M::Buffer>, Error> {
        Ok(match operand {
            Operand::Local { id, offset, len } => {
                Slice::new(places[id].as_ref().expect("a call reads places that live"), offset, len)
            }
            Operand::Param(index) => self.params.get(self.spec, self.param(index))?.slice(),
            Operand::Ids => self.of_chunk(self.batch.ids, chunk),
            Operand::Positions => {
                self.of_chunk(self.batch.positions.expect("positions that are read were uploaded"), chunk)
            }
            Operand::Targets => self.of_chunk(self.batch.targets, chunk),
            Operand::ParamGradient(_)
            | Operand::Losses
            | Operand::ZLosses
            | Operand::Load
            | Operand::RouterLoss => {
                unreachable!("{operand:?} is only written")
            }
            Operand::Loads => unreachable!("loads lie with what routers leave"),
        })
    }

    /// The rows of a chunk.
    fn of_chunk<'b>(&self, all: Slice<'b, M::Buffer>, chunk: usize) -> Slice<'b, M::Buffer> {
        let len = all.len / self.batch.chunks;
        Slice::new(all.buffer, all.offset + chunk * len, len)
    }

    /// Returns a parameter by its index in the block's list.
    fn param(&self, index: usize) -> ParamId {
        self.spec.block(self.block).params[index]
    }

    fn without_gradient(&self, id: ParamId) -> Error {
        Error::Parameter {
            block: self.spec.block(self.block).name.clone(),
            param: self.spec.param(id).fqn.clone(),
            why: "has no gradient slot at this point of the schedule",
        }
    }
}
