//! The model contract: blocks that compute, given views of unsharded parameters.
//!
//! A program never owns parameters. Each call of a block is handed fresh views through [`Params`]; keeping
//! one longer than the call is an error that the engine reports when it reshards the unit. Gradients are
//! written through [`Gradients`] straight into the buffer that the reduce-scatter reads, or, where whole gradients are added up
//! first, that is added.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::layout::SegmentId;
use crate::memory::{Buffer, Memory, SliceMut, View};
use crate::model::{BlockId, ModelSpec, ParamId};
use crate::rank::Queue;
use crate::schedule::Round;
use crate::wrap::UnitId;

/// What forward keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardMode {
    /// Everything that backward of this block needs; nothing when no gradient passes through the block.
    Record,
    /// Only the input of the layer, at its first block; the layer is recomputed before its backward.
    Checkpoint,
    /// As `Checkpoint`, and the outputs of matrix products and of attention, as far as the recomputation reads
    /// them.
    CheckpointProducts,
    /// As `Record`, starting from the input of the layer that was kept, with the outputs that were kept.
    Recompute,
    /// Nothing: there is no backward, and dropout is off.
    Evaluate,
}

/// Unsharded parameters, of which a block sees its own.
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

    /// Names the block that runs next: only its own parameters can be had.
    pub fn enter(&mut self, block: BlockId) {
        self.block = Some(block);
    }

    /// The values of a parameter, for the duration of the current block.
    ///
    /// # Errors
    /// [`Error::Parameter`] when it is not unsharded now, or not listed among the block's parameters.
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

/// Where a block writes the gradient of one parameter.
#[derive(Debug)]
pub struct GradientTarget<'a, B> {
    /// The range of the gradient slot.
    pub slice: SliceMut<'a, B>,
    /// Whether to add to what is there (a later use in the same micro-batch) or to overwrite it (the first).
    pub accumulate: bool,
}

#[derive(Debug)]
struct Place {
    unit: UnitId,
    segment: SegmentId,
    offset: usize,
    len: usize,
    written: bool,
}

/// The open gradient slots.
#[derive(Debug)]
pub struct Gradients<B> {
    open: BTreeMap<UnitId, Vec<B>>,
    places: BTreeMap<ParamId, Place>,
}

impl<B> Default for Gradients<B> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), places: BTreeMap::new() }
    }
}

impl<B: Buffer> Gradients<B> {
    /// Opens the slots of a unit: one buffer per trainable segment, and for every trainable parameter its
    /// segment, offset and length.
    pub fn open(
        &mut self,
        unit: UnitId,
        buffers: Vec<B>,
        params: impl IntoIterator<Item = (ParamId, SegmentId, usize, usize)>,
    ) {
        for (id, segment, offset, len) in params {
            self.places.insert(id, Place { unit, segment, offset, len, written: false });
        }
        self.open.insert(unit, buffers);
    }

    /// Closes a unit and returns its buffers; gradients that no block wrote are set to zero.
    ///
    /// # Errors
    /// Those of [`Memory::zero`].
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

    /// Where to write the gradient of a parameter; `None` when it is frozen. Each call counts as one write.
    pub fn target(&mut self, id: ParamId) -> Option<GradientTarget<'_, B>> {
        let place = self.places.get_mut(&id)?;
        let accumulate = std::mem::replace(&mut place.written, true);
        let buffer = &mut self.open.get_mut(&place.unit)?[place.segment.0];
        Some(GradientTarget { slice: SliceMut::new(buffer, place.offset, place.len), accumulate })
    }

    /// Whether the parameter's gradient is wanted now.
    pub fn wants(&self, id: ParamId) -> bool {
        self.places.contains_key(&id)
    }
}

/// Bytes that one call of a block allocates: what is left behind and what it needs on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFootprint {
    /// Change of live activation bytes over the call (negative in backward).
    pub activation_net: isize,
    /// Highest live activation bytes within the call, above those before it.
    pub activation_peak: usize,
    /// Highest live workspace bytes within the call (none is left behind).
    pub workspace_peak: usize,
    /// Highest live activation and workspace bytes together, above those before the call.
    pub total_peak: usize,
}

impl CallFootprint {
    /// Bytes left behind on top of `live`.
    ///
    /// # Panics
    /// When the call would give up more than there is.
    pub fn after(&self, live: usize) -> usize {
        live.checked_add_signed(self.activation_net).expect("a block gives up only what forward kept")
    }
}

/// A model on one rank.
///
/// For every micro-batch, [`Program::begin`] is followed by the blocks in order: `forward` of all but the
/// last, `last_block` of the last, `backward` of the others in reverse (down to the first trainable
/// one). Gradients are of the **sum** of losses over counted targets.
pub trait Program<M: Memory>: Send {
    /// The model's description.
    fn spec(&self) -> &ModelSpec;

    /// Takes the data of a micro-batch of the step.
    ///
    /// # Errors
    /// [`Error::Program`] when there is none.
    fn begin(&mut self, memory: &M, round: Round) -> Result<(), Error>;

    /// Runs a block other than the last one forward.
    ///
    /// # Errors
    /// [`Error::Program`], or those of the memory.
    fn forward(
        &mut self,
        memory: &M,
        block: BlockId,
        mode: ForwardMode,
        params: &Params<M::Buffer>,
    ) -> Result<(), Error>;

    /// Runs the last block: with gradients forward and backward in one, without them (evaluation) forward.
    ///
    /// # Errors
    /// [`Error::Program`], or those of the memory.
    fn last_block(
        &mut self,
        memory: &M,
        block: BlockId,
        params: &Params<M::Buffer>,
        gradients: Option<&mut Gradients<M::Buffer>>,
    ) -> Result<(), Error>;

    /// Runs a block backward and gives up what forward kept for it.
    ///
    /// # Errors
    /// [`Error::Program`], or those of the memory.
    fn backward(
        &mut self,
        memory: &M,
        block: BlockId,
        params: &Params<M::Buffer>,
        gradients: &mut Gradients<M::Buffer>,
    ) -> Result<(), Error>;

    /// Adds the losses of counted targets of all micro-batches since the last call to `words`, those of a step's scalars
    /// ([`LOSS`](crate::scalars::LOSS)), on `queue`, and what the model declares to sum up
    /// ([`Tallies`](crate::scalars::Tallies)); returns how many targets there were.
    ///
    /// # Errors
    /// Those of the memory.
    fn take_loss(&mut self, memory: &M, queue: Queue, words: SliceMut<'_, M::Buffer>) -> Result<u64, Error>;
}
