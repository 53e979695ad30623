//! The communication contract.
//!
//! [`Communicator`] is what a backend implements; [`Comm`] is what everybody calls. The checks of lengths,
//! dtypes and shares, the sequence numbers and the fingerprints are made in [`Comm`], once, in front of the
//! backend, so that no backend can forget them.
//!
//! Collectives are asynchronous: buffers move into a [`Pending`] and come back from [`Pending::wait_on`].
//! Dropping a `Pending` that was not waited for aborts the communicator: the buffers may still be in flight.

mod agree;
mod error;
mod traffic;

pub use error::{CommError, RankStatus};
pub use traffic::Traffic;

use std::fmt;

use crate::dtype::DType;
use crate::error::Error;
use crate::memory::{Buffer, Memory};
use crate::rank::{Queue, Rank};

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// Every rank receives the concatenation of all inputs, in rank order.
    AllGather,
    /// Every rank receives its part of the sum of all inputs.
    ReduceScatter,
    /// Every rank receives the sum of all inputs.
    AllReduce,
    /// The group is cut into smaller groups.
    Split,
    /// The ranks of a group find each other.
    Connect,
}

impl CollectiveKind {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::Split => "split",
            CollectiveKind::Connect => "connect",
        }
    }
}

/// What a collective is for; part of its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Parameters of a unit, in forward.
    Forward,
    /// Parameters of a unit, in backward.
    Backward,
    /// Gradients of a unit.
    Gradient,
    /// Loss, norm and other scalars of a step.
    Scalars,
    /// Statistics that an update rule declares.
    UpdateRule,
    /// Setting up.
    Setup,
}

impl Purpose {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::Forward => "forward",
            Purpose::Backward => "backward",
            Purpose::Gradient => "gradient",
            Purpose::Scalars => "scalars",
            Purpose::UpdateRule => "update rule",
            Purpose::Setup => "setup",
        }
    }
}

/// Identifies a collective call: two ranks that meet in one collective must have equal fingerprints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Number of collectives issued on this group before.
    pub sequence: u64,
    /// The kind.
    pub kind: CollectiveKind,
    /// What it is for.
    pub purpose: Purpose,
    /// The unit concerned, if one is.
    pub unit: Option<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the unsharded side, over all segments.
    pub elements: usize,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} ({}", self.sequence, self.kind.name(), self.purpose.name())?;
        if let Some(unit) = self.unit {
            write!(f, ", unit {unit}")?;
        }
        write!(f, ", {} x {})", self.elements, self.dtype)
    }
}

/// What a finished collective gives back.
#[derive(Debug)]
pub struct Completed<B> {
    /// The results, one per segment.
    pub outputs: Vec<B>,
    /// The consumed inputs of a reduce-scatter, released; empty otherwise.
    pub inputs: Vec<B>,
}

/// A collective in flight, as a backend sees it.
///
/// On a device, the host may be long past [`InFlight::wait_on`] when the collective fails: then what it wrote is
/// wrong, and [`Communicator::check`] says so from that moment on.
pub trait InFlight<M: Memory>: Send {
    /// Whether [`InFlight::wait_on`] would return without blocking the host.
    fn is_ready(&mut self) -> bool;

    /// Orders `queue` behind the collective and returns its buffers; host backends block.
    ///
    /// # Errors
    /// [`CommError`] when the collective failed on any rank.
    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error>;

    /// Aborts the communicator because the caller will not wait.
    fn abandon(self: Box<Self>);
}

/// What a backend implements for one group of ranks. Calls arrive checked, in the order in which they were
/// issued; segments of one call move together.
///
/// Work is ordered by queues: an all-gather finds its buffers (inputs filled, outputs free) behind the earlier
/// work of [`Queue::Gather`] of its rank, a reduction behind that of [`Queue::Reduce`]; the results are ready
/// for the queue given to [`InFlight::wait_on`].
pub trait Communicator<M: Memory>: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// This rank's place in the world, for messages.
    fn world_rank(&self) -> Rank;

    /// Starts an all-gather: `outputs[i]` becomes the concatenation of every rank's `inputs[i]`.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn all_gather(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// Starts a reduce-scatter: `outputs[i]` becomes this rank's part of the sum of every rank's `inputs[i]`,
    /// added by the tree over ranks. The inputs are consumed.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn reduce_scatter(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// Starts an all-reduce in place, added by the tree over ranks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn all_reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// A new group of the ranks that give the same `color`, in the order of their present ranks; blocks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error>;

    /// Whether all collectives whose results the host has seen were good. A backend whose failures all come out of
    /// [`InFlight::wait_on`] needs no more than this.
    ///
    /// # Errors
    /// The failure that ended the world.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Makes every pending and future collective of the world fail with `reason`.
    fn abort(&mut self, reason: &str);
}

/// A collective in flight. Dropping it without waiting aborts the communicator.
pub struct Pending<M: Memory> {
    in_flight: Option<Box<dyn InFlight<M>>>,
    call: Fingerprint,
}

impl<M: Memory> fmt::Debug for Pending<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.call)
    }
}

impl<M: Memory> Pending<M> {
    /// The call that is in flight.
    pub fn call(&self) -> Fingerprint {
        self.call
    }

    /// Whether waiting would not block the host.
    pub fn is_ready(&mut self) -> bool {
        self.in_flight.as_mut().is_none_or(|in_flight| in_flight.is_ready())
    }

    /// Orders later work of `queue` behind the collective and returns its buffers.
    ///
    /// # Errors
    /// [`Error::Comm`] when the collective failed on any rank.
    pub fn wait_on(mut self, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let in_flight = self.in_flight.take().expect("a pending collective is waited for once");
        in_flight.wait_on(memory, queue)
    }
}

impl<M: Memory> Drop for Pending<M> {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.abandon();
        }
    }
}

/// One rank's handle of a group of ranks: the checked front of a [`Communicator`].
pub struct Comm<M: Memory> {
    backend: Box<dyn Communicator<M>>,
    sequence: u64,
    traffic: Traffic,
}

impl<M: Memory> Comm<M> {
    /// Puts the checks in front of a backend.
    pub fn new(backend: Box<dyn Communicator<M>>) -> Self {
        Self { backend, sequence: 0, traffic: Traffic::default() }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.backend.rank()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.backend.size()
    }

    /// This rank's place in the world.
    pub fn world_rank(&self) -> Rank {
        self.backend.world_rank()
    }

    /// What was communicated through this handle so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Starts an all-gather of one or more segments: `outputs[i]` (exclusive, `size` times as long as
    /// `inputs[i]`) becomes the concatenation of all ranks' inputs. Inputs are shared handles.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn all_gather(
        &mut self,
        memory: &M,
        purpose: Purpose,
        unit: Option<usize>,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::AllGather, purpose, unit, &outputs);
        self.check_pairs(call, &outputs, &inputs)?;
        self.check_exclusive(call, &outputs)?;
        let in_flight = self.backend.all_gather(memory, call, inputs, outputs)?;
        Ok(self.issued(call, in_flight))
    }

    /// Starts a reduce-scatter of one or more segments: `outputs[i]` (exclusive) becomes this rank's part of
    /// the sum of all `inputs[i]` (exclusive, `size` times as long), added by the tree over ranks. The
    /// inputs come back released.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn reduce_scatter(
        &mut self,
        memory: &M,
        purpose: Purpose,
        unit: Option<usize>,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::ReduceScatter, purpose, unit, &inputs);
        self.check_pairs(call, &inputs, &outputs)?;
        self.check_exclusive(call, &outputs)?;
        self.check_exclusive(call, &inputs)?;
        let in_flight = self.backend.reduce_scatter(memory, call, inputs, outputs)?;
        Ok(self.issued(call, in_flight))
    }

    /// Starts an all-reduce in place of one or more (exclusive) segments, added by the tree over ranks.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn all_reduce(
        &mut self,
        memory: &M,
        purpose: Purpose,
        unit: Option<usize>,
        buffers: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::AllReduce, purpose, unit, &buffers);
        self.check_dtypes(call, &buffers)?;
        self.check_exclusive(call, &buffers)?;
        let in_flight = self.backend.all_reduce(memory, call, buffers)?;
        Ok(self.issued(call, in_flight))
    }

    /// A new group of the ranks that give the same `color`, in the order of their present ranks; blocks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn split(&mut self, memory: &M, color: usize) -> Result<Comm<M>, Error> {
        let call = self.call(CollectiveKind::Split, Purpose::Setup, None, &[]);
        self.sequence += 1;
        Ok(Comm::new(self.backend.split(memory, call, color)?))
    }

    /// To be called when results of collectives have been read on the host, before they are trusted: a collective
    /// that was cut off on a device leaves wrong numbers behind.
    ///
    /// # Errors
    /// [`Error::Comm`]: the failure that ended the world.
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.backend.check()?)
    }

    /// Makes every pending and future collective of the world fail with `reason`.
    pub fn abort(&mut self, reason: &str) {
        self.backend.abort(reason);
    }

    fn call(
        &self,
        kind: CollectiveKind,
        purpose: Purpose,
        unit: Option<usize>,
        unsharded: &[M::Buffer],
    ) -> Fingerprint {
        Fingerprint {
            sequence: self.sequence,
            kind,
            purpose,
            unit,
            dtype: unsharded.first().map_or(DType::U32, Buffer::dtype),
            elements: unsharded.iter().map(Buffer::len).sum(),
        }
    }

    fn issued(&mut self, call: Fingerprint, in_flight: Box<dyn InFlight<M>>) -> Pending<M> {
        self.sequence += 1;
        self.traffic.count(call.kind, call.elements * call.dtype.size_bytes(), self.backend.size());
        Pending { in_flight: Some(in_flight), call }
    }

    fn check_pairs(
        &self,
        call: Fingerprint,
        unsharded: &[M::Buffer],
        sharded: &[M::Buffer],
    ) -> Result<(), CommError> {
        let (rank, size) = (self.world_rank(), self.size());
        if unsharded.len() != sharded.len() {
            let (expected, got) = (unsharded.len(), sharded.len());
            return Err(CommError::Length { rank, call, segment: expected.min(got), expected, got });
        }
        for (segment, (full, part)) in unsharded.iter().zip(sharded).enumerate() {
            if full.len() != part.len() * size {
                let (expected, got) = (part.len() * size, full.len());
                return Err(CommError::Length { rank, call, segment, expected, got });
            }
        }
        self.check_dtypes(call, unsharded)?;
        self.check_dtypes(call, sharded)
    }

    fn check_dtypes(&self, call: Fingerprint, buffers: &[M::Buffer]) -> Result<(), CommError> {
        match buffers.iter().position(|buffer| buffer.dtype() != call.dtype) {
            Some(segment) => Err(CommError::Type {
                rank: self.world_rank(),
                call,
                segment,
                expected: call.dtype,
                got: buffers[segment].dtype(),
            }),
            None => Ok(()),
        }
    }

    fn check_exclusive(&self, call: Fingerprint, buffers: &[M::Buffer]) -> Result<(), CommError> {
        match buffers.iter().position(|buffer| !buffer.is_exclusive()) {
            Some(segment) => Err(CommError::Shared { rank: self.world_rank(), call, segment }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
