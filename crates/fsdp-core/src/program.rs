//! The model contract: blocks that compute on views of unsharded parameters.
//!
//! A program never owns parameters. Each call of a block receives fresh views through [`Params`]; a view that outlives
//! the call is an error, which the engine reports when it reshards the unit. Gradients are written through
//! [`Gradients`] directly into the buffer that the reduce-scatter reads or, with unsharded accumulation, into one that
//! is added to the sum.

mod calls;

use std::collections::BTreeMap;

pub use calls::{BlockCall, Checkpointing, Pass, Round, calls};

use crate::comm::Comms;
use crate::error::Error;
use crate::layout::SegmentId;
use crate::memory::{Buffer, Memory, SliceMut, View};
use crate::model::{BlockId, ModelSpec, ParamId};
use crate::rank::Queue;
use crate::wrap::UnitId;

/// What forward saves for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardMode {
    /// Everything that backward of this block needs; nothing if no gradient flows through the block.
    Record,
    /// Only the input of the layer, at its first block; the layer is recomputed before its backward.
    Checkpoint,
    /// As `Checkpoint`, plus the outputs of matrix products and of attention that the recomputation reads.
    CheckpointProducts,
    /// As `Record`, starting from the saved input of the layer, with the saved outputs.
    Recompute,
    /// Nothing: no backward follows, and dropout is off.
    Evaluate,
}

/// The unsharded parameters; a block has access only to its own.
#[derive(Debug)]
pub struct Params<B> {
    views: BTreeMap<ParamId, View<B>>,
    block: Option<BlockId>,
}

impl<B> Default for Params<B> {
    fn default() -> Self {
        Self { views: BTreeMap::new(), block: None }
    }
}

impl<B: Buffer> Params<B> {
    /// Makes a parameter available.
    pub fn insert(&mut self, id: ParamId, view: View<B>) {
        self.views.insert(id, view);
    }

    /// Sets the block that runs next; only its own parameters are accessible.
    pub fn enter(&mut self, block: BlockId) {
        self.block = Some(block);
    }

    /// The values of a parameter, for the duration of the current block.
    ///
    /// # Errors
    /// [`Error::Parameter`] when it is not unsharded now, or not in the block's list of parameters.
    pub fn get(&self, spec: &ModelSpec, id: ParamId) -> Result<&View<B>, Error> {
        let fail = |why| Error::Parameter {
            block: self.block.map_or_else(String::new, |block| spec.block(block).name.clone()),
            param: spec.param(id).fqn.clone(),
            why,
        };
        if self.block.is_some_and(|block| !spec.block(block).params.contains(&id)) {
            return Err(fail("is not in the block's list of parameters"));
        }
        self.views.get(&id).ok_or_else(|| fail("is not unsharded at this point of the schedule"))
    }
}

/// The destination of one parameter's gradient.
#[derive(Debug)]
pub struct GradientTarget<'a, B> {
    /// The range of the gradient slot.
    pub slice: SliceMut<'a, B>,
    /// Whether to add to the contents (a later use in the same micro-batch) or to overwrite them (the first use).
    pub accumulate: bool,
}

#[derive(Debug)]
struct OpenSegment {
    unit: UnitId,
    segment: SegmentId,
    offset: usize,
    len: usize,
    written: bool,
}

/// The gradient slots that are open for writing.
#[derive(Debug)]
pub struct Gradients<B> {
    open: BTreeMap<UnitId, Vec<B>>,
    places: BTreeMap<ParamId, OpenSegment>,
}

impl<B> Default for Gradients<B> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), places: BTreeMap::new() }
    }
}

impl<B: Buffer> Gradients<B> {
    /// Opens the slots of a unit: one buffer per trainable segment, and the segment, offset and length of every
    /// trainable parameter.
    pub fn open(
        &mut self,
        unit: UnitId,
        buffers: Vec<B>,
        params: impl IntoIterator<Item = (ParamId, SegmentId, usize, usize)>,
    ) {
        for (id, segment, offset, len) in params {
            self.places.insert(id, OpenSegment { unit, segment, offset, len, written: false });
        }
        self.open.insert(unit, buffers);
    }

    /// Closes a unit and returns its buffers, with zeros in the gradients that no block wrote; `None` if it is not
    /// open.
    ///
    /// # Errors
    /// The errors of [`Memory::zero`].
    pub fn close<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        unit: UnitId,
    ) -> Result<Option<Vec<B>>, Error> {
        let Some(mut buffers) = self.open.remove(&unit) else { return Ok(None) };
        for place in self.places.values().filter(|place| place.unit == unit && !place.written) {
            let slice = SliceMut::new(&mut buffers[place.segment.0], place.offset, place.len);
            memory.zero(Queue::Compute, slice)?;
        }
        self.places.retain(|_, place| place.unit != unit);
        Ok(Some(buffers))
    }

    /// Returns where to write the gradient of a parameter; `None` if it is frozen. Each call counts as one write.
    pub fn target(&mut self, id: ParamId) -> Option<GradientTarget<'_, B>> {
        let place = self.places.get_mut(&id)?;
        let accumulate = std::mem::replace(&mut place.written, true);
        let buffer = &mut self.open.get_mut(&place.unit)?[place.segment.0];
        Some(GradientTarget { slice: SliceMut::new(buffer, place.offset, place.len), accumulate })
    }

    /// Whether the parameter's gradient is to be computed now.
    pub fn wants(&self, id: ParamId) -> bool {
        self.places.contains_key(&id)
    }
}

/// Bytes that one call of a block allocates: those that remain allocated, and the peaks within the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFootprint {
    /// Change of live activation bytes over the call (negative in backward).
    pub activation_net: isize,
    /// Peak activation bytes within the call, above those live before it.
    pub activation_peak: usize,
    /// Peak workspace bytes within the call (none remains allocated).
    pub workspace_peak: usize,
    /// Peak activation and workspace bytes together, above those live before the call.
    pub total_peak: usize,
}

impl CallFootprint {
    /// Returns the live bytes after the call, given `live` bytes before it.
    ///
    /// # Panics
    /// When the call would free more than is live.
    pub fn after(&self, live: usize) -> usize {
        live.checked_add_signed(self.activation_net).expect("a block gives up only what forward kept")
    }
}

/// A model on one rank.
///
/// For every micro-batch, [`Program::begin`] is followed by its [`calls`] in order. Gradients are of the **sum** of
/// losses over counted targets.
pub trait Program<M: Memory>: Send {
    /// The description of the model.
    fn spec(&self) -> &ModelSpec;

    /// Begins a micro-batch of the step.
    ///
    /// # Errors
    /// [`Error::Program`] when there is no data, or operations of the model do not fit each other.
    fn begin(&mut self, memory: &M, round: Round, pass: Pass) -> Result<(), Error>;

    /// Runs a block on the chunks of this rank's part of the samples. Calls that compute gradients are given where to
    /// write those of each chunk; they are not accessed by other calls. Activations are redistributed by collectives of
    /// the compute queue.
    ///
    /// # Errors
    /// [`Error::Program`], or the errors of the memory and of collectives.
    fn call(
        &mut self,
        memory: &M,
        call: BlockCall,
        params: &Params<M::Buffer>,
        gradients: &mut [Gradients<M::Buffer>],
        comms: &mut Comms<M>,
    ) -> Result<(), Error>;

    /// Adds the losses of counted targets of all micro-batches since the last call to `words`, the scalars of a step
    /// ([`LOSS`](crate::scalars::LOSS)), on `queue`, as well as the sums and counts that the model declares
    /// ([`Tallies`](crate::scalars::Tallies)); returns the number of targets.
    ///
    /// # Errors
    /// The errors of the memory.
    fn take_loss(&mut self, memory: &M, queue: Queue, words: SliceMut<'_, M::Buffer>) -> Result<u64, Error>;
}
