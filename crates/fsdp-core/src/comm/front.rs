//! The checks that run before every backend call.

use super::{CollectiveKind, CommError, Communicator, Fingerprint, Pending, Purpose, ReduceOp, Traffic};
use crate::dtype::DType;
use crate::error::Error;
use crate::failure::FailureKind;
use crate::memory::{Buffer, Memory};
use crate::rank::Rank;
use crate::wrap::UnitId;

/// One rank's handle of a group of ranks: a [`Communicator`] with checked arguments.
pub struct Comm<M: Memory> {
    backend: Box<dyn Communicator<M>>,
    sequence: u64,
    traffic: Traffic,
}

impl<M: Memory> Comm<M> {
    /// Wraps a backend.
    pub fn new(backend: Box<dyn Communicator<M>>) -> Self {
        Self { backend, sequence: 0, traffic: Traffic::default() }
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.backend.rank()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.backend.size()
    }

    /// This rank in the world.
    pub fn world_rank(&self) -> Rank {
        self.backend.world_rank()
    }

    /// Everything communicated through this handle so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Starts an all-gather of one or more segments, each of any dtype: `outputs[i]` (exclusive, `size` times as long as
    /// `inputs[i]`) becomes the concatenation of all ranks' inputs. Inputs are shared handles.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn all_gather(
        &mut self,
        memory: &M,
        purpose: Purpose,
        unit: Option<UnitId>,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::AllGather, purpose, unit, &outputs);
        self.check_pairs(call, &outputs, &inputs, self.size())?;
        self.start(memory, call, inputs, outputs)
    }

    /// Starts a reduce-scatter of one or more segments: `outputs[i]` (exclusive) becomes this rank's part of the sum or
    /// average of all `inputs[i]` (exclusive, `size` times as long), added by the tree over ranks. The inputs are
    /// returned released.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn reduce_scatter(
        &mut self,
        memory: &M,
        op: ReduceOp,
        purpose: Purpose,
        unit: Option<UnitId>,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::ReduceScatter(op), purpose, unit, &inputs);
        self.check_pairs(call, &inputs, &outputs, self.size())?;
        self.start(memory, call, inputs, outputs)
    }

    /// Starts an in-place all-reduce of one or more (exclusive) segments: each becomes the sum or average over all
    /// ranks, added by the tree over ranks.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn all_reduce(
        &mut self,
        memory: &M,
        op: ReduceOp,
        purpose: Purpose,
        unit: Option<UnitId>,
        buffers: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::AllReduce(op), purpose, unit, &buffers);
        self.check_dtypes(call, &buffers)?;
        self.start(memory, call, Vec::new(), buffers)
    }

    /// Starts an all-to-all of one or more segments: `inputs[i]` and `outputs[i]` (exclusive, of the same length) have one
    /// part for each rank, and part `r` of an output becomes this rank's part of rank `r`'s input. Inputs are shared
    /// handles.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    pub fn all_to_all(
        &mut self,
        memory: &M,
        purpose: Purpose,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let call = self.call(CollectiveKind::AllToAll, purpose, None, &inputs);
        self.check_pairs(call, &inputs, &outputs, 1)?;
        let size = self.size();
        if let Some(segment) = inputs.iter().position(|input| !input.len().is_multiple_of(size)) {
            let (rank, got) = (self.world_rank(), inputs[segment].len());
            let expected = got.next_multiple_of(size);
            return Err(CommError::Length { rank, call, segment, expected, got }.into());
        }
        self.start(memory, call, inputs, outputs)
    }

    /// Starts an in-place broadcast of one or more (exclusive) segments of any dtype: each becomes a copy of the segment on the rank
    /// at index `root` of the group.
    ///
    /// # Errors
    /// [`Error::Comm`]: a failed check, or the backend's failure.
    ///
    /// # Panics
    /// When `root` is not in the group.
    pub fn broadcast(
        &mut self,
        memory: &M,
        purpose: Purpose,
        unit: Option<UnitId>,
        root: usize,
        buffers: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        assert!(root < self.size(), "place {root} is not in a group of {} ranks", self.size());
        let root = u32::try_from(root).expect("a group has few ranks");
        let call = self.call(CollectiveKind::Broadcast { root }, purpose, unit, &buffers);
        self.start(memory, call, Vec::new(), buffers)
    }

    /// Creates a group of the ranks that pass the same `color`, ordered by their current ranks; blocks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn split(&mut self, memory: &M, color: usize) -> Result<Comm<M>, Error> {
        let call = self.call(CollectiveKind::Split, Purpose::Setup, None, &[]);
        self.sequence += 1;
        Ok(Comm::new(self.backend.split(memory, call, color)?))
    }

    /// Checks that no collective has failed. Call it after results of collectives have been read on the host and before
    /// they are used: a collective that was cut off on a device leaves wrong numbers.
    ///
    /// # Errors
    /// [`Error::Comm`]: the failure that ended the world.
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.backend.check()?)
    }

    /// Makes every pending and future collective of the world fail with `reason` and `kind`.
    pub fn abort(&mut self, reason: &str, kind: FailureKind) {
        self.backend.abort(reason, kind);
    }

    fn call(
        &self,
        kind: CollectiveKind,
        purpose: Purpose,
        unit: Option<UnitId>,
        unsharded: &[M::Buffer],
    ) -> Fingerprint {
        let first = unsharded.first().map_or(DType::U32, Buffer::dtype);
        // Segments of several dtypes can only be moved, as bytes.
        let is_mixed = unsharded.iter().any(|buffer| buffer.dtype() != first);
        let dtype = if is_mixed && kind.reduce_op().is_none() { DType::U8 } else { first };
        let bytes: usize = unsharded.iter().map(|buffer| buffer.len() * buffer.dtype().size_bytes()).sum();
        let elements = bytes / dtype.size_bytes();
        Fingerprint { sequence: self.sequence, kind, purpose, unit, dtype, elements }
    }

    /// Starts a call whose lengths and dtypes have been checked.
    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Pending<M>, Error> {
        let is_average = call.kind.reduce_op() == Some(ReduceOp::Average);
        if is_average && !outputs.is_empty() && !call.dtype.is_float() {
            return Err(CommError::IntegerAverage { rank: self.world_rank(), call }.into());
        }
        self.check_exclusive(call, &outputs)?;
        if call.kind.gives_up_inputs() {
            self.check_exclusive(call, &inputs)?;
        }
        let in_flight = self.backend.start(memory, call, inputs, outputs)?;
        self.sequence += 1;
        self.traffic.count(call.kind, call.elements * call.dtype.size_bytes(), self.size());
        Ok(Pending::new(in_flight, call))
    }

    /// Checks that each buffer is `times` as long as its counterpart.
    fn check_pairs(
        &self,
        call: Fingerprint,
        unsharded: &[M::Buffer],
        sharded: &[M::Buffer],
        times: usize,
    ) -> Result<(), CommError> {
        let rank = self.world_rank();
        if unsharded.len() != sharded.len() {
            let (expected, got) = (unsharded.len(), sharded.len());
            return Err(CommError::Length { rank, call, segment: expected.min(got), expected, got });
        }
        for (segment, (full, part)) in unsharded.iter().zip(sharded).enumerate() {
            if full.len() != part.len() * times {
                let (expected, got) = (part.len() * times, full.len());
                return Err(CommError::Length { rank, call, segment, expected, got });
            }
        }
        if call.kind.reduce_op().is_some() {
            self.check_dtypes(call, unsharded)?;
        }
        let dtypes = unsharded.iter().zip(sharded).map(|(full, part)| (full.dtype(), part.dtype()));
        self.check_equal(call, dtypes)
    }

    /// Checks that all buffers have the dtype of a call that combines elements.
    fn check_dtypes(&self, call: Fingerprint, buffers: &[M::Buffer]) -> Result<(), CommError> {
        self.check_equal(call, buffers.iter().map(|buffer| (call.dtype, buffer.dtype())))
    }

    /// Checks pairs of expected and given dtypes, one for each segment.
    fn check_equal(
        &self,
        call: Fingerprint,
        dtypes: impl IntoIterator<Item = (DType, DType)>,
    ) -> Result<(), CommError> {
        let rank = self.world_rank();
        for (segment, (expected, got)) in dtypes.into_iter().enumerate() {
            if expected != got {
                return Err(CommError::Type { rank, call, segment, expected, got });
            }
        }
        Ok(())
    }

    fn check_exclusive(&self, call: Fingerprint, buffers: &[M::Buffer]) -> Result<(), CommError> {
        match buffers.iter().position(|buffer| !buffer.is_exclusive()) {
            Some(segment) => Err(CommError::Shared { rank: self.world_rank(), call, segment }),
            None => Ok(()),
        }
    }
}
