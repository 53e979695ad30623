//! Runs a program without sharding: all parameters in one buffer, and the calls of a micro-batch as data.
//!
//! Used by memory predictions, tests of models and the unsharded oracle. Independent of units, schedules and other
//! ranks.

use fsdp_core::layout::SegmentId;
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, View};
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::program::{ForwardMode, Gradients, Params, Program};
use fsdp_core::schedule::{OpKind, Round};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, Queue};

/// All parameters of a model (or other values of the same shapes) in one buffer.
#[derive(Debug)]
pub struct Whole<B> {
    buffer: B,
    /// First element and length of each parameter.
    ranges: Vec<(usize, usize)>,
}

impl<B: Buffer> Whole<B> {
    /// Allocates space for the values of all parameters; their contents are unspecified.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn new<M: Memory<Buffer = B>>(
        memory: &M,
        spec: &ModelSpec,
        category: Category,
        dtype: DType,
    ) -> Result<Self, Error> {
        let ranges = ranges(spec);
        let len = ranges.last().map_or(0, |(offset, len)| offset + len);
        Ok(Self { buffer: memory.allocate(category, dtype, len)?, ranges })
    }

    /// Sets all values to zero.
    ///
    /// # Errors
    /// As [`Whole::write`].
    pub fn zero<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        memory.zero(Queue::Compute, SliceMut::whole(&mut self.buffer))
    }

    /// Writes the values of one parameter.
    ///
    /// # Errors
    /// [`Error::Shared`] while views of [`Whole::params`] exist, or those of the memory.
    pub fn write<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        id: ParamId,
        values: HostSlice<'_>,
    ) -> Result<(), Error> {
        let (offset, len) = self.ranges[id.0];
        memory.write(Queue::Compute, values, SliceMut::new(&mut self.buffer, offset, len))
    }

    /// Writes some values of one parameter, starting at element `first`.
    ///
    /// # Errors
    /// As [`Whole::write`].
    pub fn write_part<M: Memory<Buffer = B>>(
        &mut self,
        memory: &M,
        id: ParamId,
        first: usize,
        values: &[f64],
    ) -> Result<(), Error> {
        let (offset, len) = self.ranges[id.0];
        assert!(first + values.len() <= len, "the values are those of one parameter");
        memory.write(
            Queue::Compute,
            HostSlice::F64(values),
            SliceMut::new(&mut self.buffer, offset + first, values.len()),
        )
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    /// Reads the values of one parameter.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn read<M: Memory<Buffer = B>>(
        &self,
        memory: &M,
        id: ParamId,
        values: HostSliceMut<'_>,
    ) -> Result<(), Error> {
        let (offset, len) = self.ranges[id.0];
        memory.read(Queue::Compute, Slice::new(&self.buffer, offset, len), values)
    }

    /// Returns views of all parameters.
    pub fn params(&self) -> Params<B> {
        let mut params = Params::default();
        for (index, &(offset, len)) in self.ranges.iter().enumerate() {
            params.insert(ParamId(index), View { buffer: self.buffer.clone(), offset, len });
        }
        params
    }

    /// Converts the buffer to gradients of the trained parameters, to be written by the next micro-batch.
    pub fn into_gradients(self, spec: &ModelSpec) -> Gradients<B> {
        let trained = self.ranges.iter().enumerate().filter(|(index, _)| spec.params[*index].trainable);
        let places: Vec<_> =
            trained.map(|(index, &(offset, len))| (ParamId(index), SegmentId(0), offset, len)).collect();
        let mut gradients = Gradients::default();
        gradients.open(UnitId(0), vec![self.buffer], places);
        gradients
    }

    /// Closes gradients opened by [`Whole::into_gradients`]; elements that no block wrote are zero.
    ///
    /// # Errors
    /// Those of the memory.
    ///
    /// # Panics
    /// If they were opened elsewhere.
    pub fn from_gradients<M: Memory<Buffer = B>>(
        memory: &M,
        spec: &ModelSpec,
        mut gradients: Gradients<B>,
    ) -> Result<Self, Error> {
        let buffer = gradients.close(memory, UnitId(0))?.and_then(|mut buffers| buffers.pop());
        Ok(Self { buffer: buffer.expect("unsharded gradients are one buffer"), ranges: ranges(spec) })
    }
}

fn ranges(spec: &ModelSpec) -> Vec<(usize, usize)> {
    let mut offset = 0;
    let range = |param: &fsdp_core::model::ParamSpec| {
        offset += param.len();
        (offset - param.len(), param.len())
    };
    spec.params.iter().map(range).collect()
}

/// The purpose of running a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Loss and gradients.
    Train,
    /// Loss and gradients, with the layers recomputed in backward.
    TrainRecomputing,
    /// As `TrainRecomputing`, with the outputs of linear maps and of attention kept.
    TrainKeepingProducts,
    /// The loss only.
    Evaluate,
}

/// One call of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockCall {
    /// [`Program::forward`].
    Forward(BlockId, ForwardMode),
    /// [`Program::last_block`] with gradients.
    ForwardBackward(BlockId),
    /// [`Program::last_block`] without gradients.
    Evaluate(BlockId),
    /// [`Program::backward`].
    Backward(BlockId),
}

impl BlockCall {
    /// Returns the block call of a schedule operation, or `None` if it makes none.
    pub const fn of(kind: OpKind) -> Option<Self> {
        match kind {
            OpKind::Forward { block, mode } => Some(BlockCall::Forward(block, mode)),
            OpKind::LastBlock { block, backward: true } => Some(BlockCall::ForwardBackward(block)),
            OpKind::LastBlock { block, backward: false } => Some(BlockCall::Evaluate(block)),
            OpKind::Backward(block) => Some(BlockCall::Backward(block)),
            _ => None,
        }
    }

    /// Returns the block.
    pub fn block(self) -> BlockId {
        match self {
            BlockCall::Forward(block, _)
            | BlockCall::ForwardBackward(block)
            | BlockCall::Evaluate(block)
            | BlockCall::Backward(block) => block,
        }
    }

    /// Executes the call.
    ///
    /// # Errors
    /// Those of the program.
    pub fn make<M: Memory>(
        self,
        program: &mut impl Program<M>,
        memory: &M,
        params: &mut Params<M::Buffer>,
        gradients: &mut Gradients<M::Buffer>,
    ) -> Result<(), Error> {
        params.enter(self.block());
        match self {
            BlockCall::Forward(block, mode) => program.forward(memory, block, mode, params),
            BlockCall::ForwardBackward(block) => program.last_block(memory, block, params, Some(gradients)),
            BlockCall::Evaluate(block) => program.last_block(memory, block, params, None),
            BlockCall::Backward(block) => program.backward(memory, block, params, gradients),
        }
    }
}

/// Returns the calls of one micro-batch, in order, after [`Program::begin`].
pub fn calls(spec: &ModelSpec, pass: Pass) -> Vec<BlockCall> {
    let last = BlockId(spec.blocks.len() - 1);
    let first_trainable = spec.first_trainable_block().unwrap_or(last);
    // Layers below the first trained parameter record nothing, so recomputing them would save nothing.
    let recomputes = |block: BlockId| {
        let layer = spec.block(block).layer;
        let needs_backward = |(index, other): (usize, &fsdp_core::model::BlockSpec)| {
            other.layer == layer && index >= first_trainable.0
        };
        matches!(pass, Pass::TrainRecomputing | Pass::TrainKeepingProducts)
            && layer.is_some()
            && spec.blocks.iter().enumerate().any(needs_backward)
    };
    let mode = |block| match pass {
        Pass::Evaluate => ForwardMode::Evaluate,
        Pass::TrainKeepingProducts if recomputes(block) => ForwardMode::CheckpointProducts,
        _ if recomputes(block) => ForwardMode::Checkpoint,
        _ => ForwardMode::Record,
    };
    let mut calls: Vec<BlockCall> =
        (0..last.0).map(BlockId).map(|block| BlockCall::Forward(block, mode(block))).collect();
    if pass == Pass::Evaluate {
        calls.push(BlockCall::Evaluate(last));
        return calls;
    }
    calls.push(BlockCall::ForwardBackward(last));
    for block in (first_trainable.0..last.0).rev().map(BlockId) {
        let layer = spec.block(block).layer;
        if recomputes(block) && spec.blocks[block.0 + 1].layer != layer {
            let members = (0..last.0).map(BlockId).filter(|&member| spec.block(member).layer == layer);
            calls.extend(members.map(|member| BlockCall::Forward(member, ForwardMode::Recompute)));
        }
        calls.push(BlockCall::Backward(block));
    }
    calls
}

/// Runs one micro-batch.
///
/// # Errors
/// Those of the program.
pub fn run<M: Memory>(
    program: &mut impl Program<M>,
    memory: &M,
    round: usize,
    pass: Pass,
    params: &mut Params<M::Buffer>,
    gradients: &mut Gradients<M::Buffer>,
) -> Result<(), Error> {
    program.begin(memory, Round(round))?;
    for call in calls(program.spec(), pass) {
        call.make(program, memory, params, gradients)?;
    }
    Ok(())
}
