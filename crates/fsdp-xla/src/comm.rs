//! Collectives: operations of the program within a schedule, host collectives outside of it.

use std::collections::BTreeMap;

use fsdp_core::comm::{
    CollectiveKind, Comm, CommError, Communicator, Completed, Fingerprint, InFlight, Pending, Purpose,
    ReduceOp,
};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, FailureKind, Queue, Rank};
use fsdp_nn::{HostBuffer, HostMemory};

use crate::buffer::{Content, XlaBuffer};
use crate::hlo::{Groups, Value};
use crate::memory::XlaMemory;
use crate::trace::Trace;

/// How gradients are summed over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// By the reduction tree that all other devices use: every rank receives all addends of what it sums.
    #[default]
    Tree,
    /// In any order the plugin chooses.
    Native,
}

/// A group of ranks whose steps are compiled.
pub(crate) struct XlaComm {
    /// The same group, on the host.
    host: Comm<HostMemory>,
    /// This group and its siblings; each rank of the world is in exactly one.
    groups: Groups,
    is_world: bool,
    reduction: Reduction,
}

impl XlaComm {
    /// Creates the group of the whole world.
    pub(crate) fn world(host: Comm<HostMemory>, reduction: Reduction) -> Self {
        let groups = Groups::new(vec![(0..host.size()).collect()]);
        Self { host, groups, is_world: true, reduction }
    }

    /// Gathers the colors of all ranks, in rank order.
    fn colors(&mut self, memory: &HostMemory, color: usize) -> Result<Vec<i64>, Error> {
        let size = self.host.size();
        let mut local = memory.allocate(Category::CommStaging, DType::I64, 1)?;
        let color = i64::try_from(color).expect("there are few colors");
        memory.write(Queue::Gather, HostSlice::I64(&[color]), SliceMut::whole(&mut local))?;
        let all = memory.allocate(Category::CommStaging, DType::I64, size)?;
        let pending = self.host.all_gather(memory, Purpose::Setup, None, vec![local], vec![all])?;
        let all = pending.wait_on(memory, Queue::Gather)?.outputs.pop().expect("one buffer came back");
        let mut colors = vec![0; size];
        memory.read(Queue::Gather, Slice::whole(&all), HostSliceMut::I64(&mut colors))?;
        Ok(colors)
    }

    /// Adds a collective to the program; returns its results.
    fn trace(
        &self,
        trace: &mut Trace,
        call: &Fingerprint,
        inputs: &[XlaBuffer],
        outputs: &mut [XlaBuffer],
    ) -> Vec<Value> {
        let (kind, purpose) = (call.kind, purpose(call));
        let queue = call.queue();
        trace.begin_collective(queue);
        let reads: Vec<Value> = match kind {
            CollectiveKind::AllReduce(_) => &*outputs,
            _ => inputs,
        }
        .iter()
        .map(|buffer| trace.load(queue, Slice::whole(buffer)))
        .collect();
        let mut results = Vec::with_capacity(reads.len());
        for (value, output) in reads.iter().zip(outputs) {
            let value = self.collective(trace, (kind, &purpose), value);
            trace.store(queue, &SliceMut::whole(output), &value);
            results.push(value);
        }
        trace.end_collective(queue, &results);
        if kind.gives_up_inputs() {
            inputs.iter().for_each(|input| trace.release(&input.storage));
        }
        results
    }

    fn collective(&self, trace: &mut Trace, (kind, purpose): (CollectiveKind, &str), x: &Value) -> Value {
        let (hlo, groups, size) = (&mut trace.hlo, &self.groups, self.groups.size());
        let mut scaled = |op: ReduceOp| match op.factor(size) {
            Some(factor) => hlo.with("multiply", x, factor),
            None => x.clone(),
        };
        match kind {
            // StableHLO has no gathers of empty tensors.
            _ if size == 1 || x.len() == 0 => x.clone(),
            CollectiveKind::AllGather => hlo.all_gather(x, groups, purpose),
            CollectiveKind::AllToAll => hlo.all_to_all(x, groups, purpose),
            CollectiveKind::ReduceScatter(op) => {
                let x = scaled(op);
                match self.reduction {
                    Reduction::Native => hlo.reduce_scatter(&x, groups, purpose),
                    Reduction::Tree => {
                        let parts = hlo.all_to_all(&x, groups, purpose);
                        let parts = hlo.reshape(&parts, &[size, x.len() / size]);
                        hlo.tree_sum(&parts)
                    }
                }
            }
            CollectiveKind::AllReduce(op) => {
                let x = scaled(op);
                // An integer sum is the same in any order.
                if self.reduction == Reduction::Native || !x.element().is_float() {
                    return hlo.all_reduce(&x, groups, purpose);
                }
                let all = hlo.all_gather(&x, groups, purpose);
                let all = hlo.reshape(&all, &[size, x.len()]);
                hlo.tree_sum(&all)
            }
            CollectiveKind::Broadcast { .. } | CollectiveKind::Split | CollectiveKind::Connect => {
                unreachable!("{} is not an operation of a schedule", kind.name())
            }
        }
    }

    /// Starts a collective on the host.
    fn on_host(
        &mut self,
        memory: &XlaMemory,
        call: Fingerprint,
        inputs: Vec<XlaBuffer>,
        outputs: Vec<XlaBuffer>,
    ) -> Result<OnHost, Error> {
        let (host, Fingerprint { purpose, unit, .. }) = (memory.host(), call);
        let reads: Vec<HostBuffer> =
            inputs.iter().map(|input| memory.on_host(input)).collect::<Result<_, _>>()?;
        let host_outputs: Vec<HostBuffer> =
            outputs.iter().map(|output| memory.take_to_host(output)).collect::<Result<_, _>>()?;
        let pending = match call.kind {
            CollectiveKind::AllGather => self.host.all_gather(host, purpose, unit, reads, host_outputs)?,
            CollectiveKind::AllReduce(op) => self.host.all_reduce(host, op, purpose, unit, host_outputs)?,
            CollectiveKind::Broadcast { root } => {
                self.host.broadcast(host, purpose, unit, root as usize, host_outputs)?
            }
            kind => unreachable!("{} is made by schedules only", kind.name()),
        };
        Ok(OnHost { pending, outputs })
    }
}

/// The purpose of a collective: `forward/unit 3`, or `scalars`.
fn purpose(call: &Fingerprint) -> String {
    match call.unit {
        Some(UnitId(unit)) => format!("{}/unit {unit}", call.purpose.name()),
        None => call.purpose.name().to_owned(),
    }
}

impl Communicator<XlaMemory> for XlaComm {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn world_rank(&self) -> Rank {
        self.host.world_rank()
    }

    fn start(
        &mut self,
        memory: &XlaMemory,
        call: Fingerprint,
        inputs: Vec<XlaBuffer>,
        mut outputs: Vec<XlaBuffer>,
    ) -> Result<Box<dyn InFlight<XlaMemory>>, Error> {
        if let Some(trace) = &mut *memory.lock() {
            let results = self.trace(trace, &call, &inputs, &mut outputs);
            let inputs = if call.kind.gives_up_inputs() { inputs } else { Vec::new() };
            return Ok(Box::new(Traced { completed: Completed { outputs, inputs }, results }));
        }
        Ok(Box::new(self.on_host(memory, call, inputs, outputs)?))
    }

    fn split(
        &mut self,
        memory: &XlaMemory,
        _call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<XlaMemory>>, Error> {
        assert!(self.is_world, "a mesh is made of the world: how other groups are divided is not known here");
        let mut groups: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        for (rank, color) in self.colors(memory.host(), color)?.into_iter().enumerate() {
            groups.entry(color).or_default().push(rank);
        }
        let host = self.host.split(memory.host(), color)?;
        let groups = Groups::new(groups.into_values().collect());
        Ok(Box::new(Self { host, groups, is_world: false, reduction: self.reduction }))
    }

    fn check(&self) -> Result<(), CommError> {
        match self.host.check() {
            Err(Error::Comm(error)) => Err(error),
            // Other errors do not concern the communicator.
            _ => Ok(()),
        }
    }

    fn abort(&mut self, reason: &str, kind: FailureKind) {
        self.host.abort(reason, kind);
    }
}

/// A collective that was traced.
struct Traced {
    completed: Completed<XlaBuffer>,
    /// The results, which a queue that waits for the collective has to follow.
    results: Vec<Value>,
}

impl InFlight<XlaMemory> for Traced {
    fn is_ready(&mut self) -> bool {
        true
    }

    fn wait_on(self: Box<Self>, memory: &XlaMemory, queue: Queue) -> Result<Completed<XlaBuffer>, Error> {
        if let Some(trace) = &mut *memory.lock() {
            self.results.iter().for_each(|value| trace.wait(queue, value));
        }
        Ok(self.completed)
    }

    fn abandon(self: Box<Self>, _reason: String) {}
}

/// A collective in flight on the host.
struct OnHost {
    pending: Pending<HostMemory>,
    /// The buffers that receive its results.
    outputs: Vec<XlaBuffer>,
}

impl InFlight<XlaMemory> for OnHost {
    fn is_ready(&mut self) -> bool {
        self.pending.is_ready()
    }

    fn wait_on(self: Box<Self>, memory: &XlaMemory, queue: Queue) -> Result<Completed<XlaBuffer>, Error> {
        let Self { pending, outputs } = *self;
        let results = pending.wait_on(memory.host(), queue)?.outputs;
        outputs.iter().zip(results).for_each(|(output, result)| output.storage.put(Content::Host(result)));
        Ok(Completed { outputs, inputs: Vec::new() })
    }

    /// Dropping the host's collective notifies the other ranks.
    fn abandon(self: Box<Self>, _reason: String) {}
}
