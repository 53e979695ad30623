//! The forward side of a tape: what an operation needs to run and to be recorded.

use fsdp_core::DType;
use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::{Buffer, Category, HostSlice, Slice, SliceMut};
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::program::Params;

use super::backward::{INPUT, Node, Recording};
use super::batch::MicroBatch;
use super::products::{Products, Replay};
use super::tensor::{Tensor, Value};
use crate::backend::Backend;
use crate::error::ModelError;

/// What operations of one block read, forward and backward alike.
pub struct Scope<'a, M: Backend> {
    /// The memory.
    pub memory: &'a M,
    /// The model.
    pub spec: &'a ModelSpec,
    /// The block that runs.
    pub block: BlockId,
    /// The parameters that are present.
    pub params: &'a Params<M::Buffer>,
    /// The data.
    pub batch: &'a MicroBatch<'a, M::Buffer>,
    /// The dtype of values and parameters.
    pub dtype: DType,
}

impl<'a, M: Backend> Scope<'a, M> {
    /// The elements of a parameter.
    ///
    /// # Errors
    /// [`Error::Parameter`] when it is not there.
    pub fn param(&self, id: ParamId) -> Result<Slice<'a, M::Buffer>, Error> {
        Ok(self.params.get(self.spec, id)?.slice())
    }

    /// Whether a parameter is trained.
    pub fn is_trained(&self, id: ParamId) -> bool {
        self.spec.param(id).trainable
    }

    /// A new buffer of the values' dtype.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn allocate(&self, category: Category, len: usize) -> Result<M::Buffer, Error> {
        self.memory.allocate(category, self.dtype, len)
    }

    /// A new buffer for statistics, in the master dtype.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn statistics(&self, category: Category, len: usize) -> Result<M::Buffer, Error> {
        self.memory.allocate(category, self.dtype.master(), len)
    }

    /// The position of every row, as ids for a position table, in workspace.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn positions(&self) -> Result<M::Buffer, Error> {
        let seq = self.batch.seq as u32;
        let positions: Vec<u32> = (0..self.batch.batch).flat_map(|_| 0..seq).collect();
        let mut buffer = self.memory.allocate(Category::Workspace, DType::U32, positions.len())?;
        self.memory.write(Queue::Compute, HostSlice::U32(&positions), SliceMut::whole(&mut buffer))?;
        Ok(buffer)
    }

    /// The buffer itself if nobody else reads it, else a copy in `category`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn writable(&self, category: Category, buffer: M::Buffer) -> Result<M::Buffer, Error> {
        if buffer.is_exclusive() {
            return Ok(buffer);
        }
        let mut copy = self.memory.allocate(category, buffer.dtype(), buffer.len())?;
        self.memory.copy(Queue::Compute, Slice::whole(&buffer), SliceMut::whole(&mut copy))?;
        Ok(copy)
    }

    /// An error of this block.
    pub fn error(&self, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(self.block).name.clone(), source: Box::new(source) }
    }
}

/// One block's forward computation, recorded or not.
///
/// The operations are methods: see the table in the [module's documentation](crate::tape).
pub struct Tape<'a, M: Backend> {
    pub(super) scope: Scope<'a, M>,
    recording: Option<Vec<Box<dyn Node<M>>>>,
    values: usize,
    sites: u64,
    pub(super) products: Products<M::Buffer>,
}

impl<'a, M: Backend> Tape<'a, M> {
    /// A tape that records what backward needs.
    pub fn recording(scope: Scope<'a, M>) -> Self {
        Self::new(scope, Some(Vec::new()), Products::Plain)
    }

    /// A tape that records nothing: tensors are freed as soon as the model lets go of them.
    pub fn forgetting(scope: Scope<'a, M>) -> Self {
        Self::new(scope, None, Products::Plain)
    }

    /// A tape that records nothing but what a replay needs ([`Tape::into_replay`]): the outputs of linear maps and
    /// of attention if `keep` says so, and which of them are read at all.
    pub fn noting(scope: Scope<'a, M>, keep: bool) -> Self {
        Self::new(scope, None, Products::noting(keep))
    }

    /// A tape that records what backward needs, running a block that ran before a second time.
    pub fn replaying(scope: Scope<'a, M>, replay: Replay<M::Buffer>) -> Self {
        Self::new(scope, Some(Vec::new()), Products::Replaying(replay))
    }

    fn new(
        scope: Scope<'a, M>,
        recording: Option<Vec<Box<dyn Node<M>>>>,
        products: Products<M::Buffer>,
    ) -> Self {
        Self { scope, recording, values: INPUT + 1, sites: 0, products }
    }

    /// What the operations read.
    pub fn scope(&self) -> &Scope<'a, M> {
        &self.scope
    }

    /// Brings the block's input onto the tape; its gradient is computed if `needs_gradient`.
    pub fn input(&mut self, buffer: M::Buffer, needs_gradient: bool) -> Tensor<M> {
        let width = buffer.len() / self.scope.batch.rows();
        let needs_gradient = needs_gradient && self.recording.is_some();
        Tensor::new(buffer, Value { index: INPUT, needs_gradient }, width)
    }

    /// A new value; it needs a gradient if one of its inputs or parameters does and the tape records.
    pub fn value(&mut self, needs_gradient: bool) -> Value {
        self.values += 1;
        Value { index: self.values - 1, needs_gradient: needs_gradient && self.recording.is_some() }
    }

    /// Records an operation. To be called only for outputs that need a gradient.
    ///
    /// # Panics
    /// When the tape does not record.
    pub fn record(&mut self, node: impl Node<M> + 'static) {
        self.recording
            .as_mut()
            .expect("only a recording tape makes values with gradients")
            .push(Box::new(node));
    }

    /// Ends the block: its output, and how to go back from it (nowhere, if the tape does not record).
    pub fn finish(self, output: Tensor<M>) -> (Tensor<M>, Recording<M>) {
        let recording = Recording::new(self.recording.unwrap_or_default(), self.values, output.value());
        (output, recording)
    }

    /// Ends a block that was noted: what its replay needs, of which the output is a part when `output` is given.
    pub fn into_replay(self, output: Option<&Tensor<M>>) -> Replay<M::Buffer> {
        if let Some(output) = output {
            let _contents = output.slice();
        }
        self.products.into_replay()
    }

    /// The number of the next dropout site of this block: the same for the same place in the model's code.
    pub(super) fn next_site(&mut self) -> u64 {
        self.sites += 1;
        self.sites - 1
    }

    /// Checks the width of an operation's input.
    pub(super) fn check(&self, op: &'static str, x: &Tensor<M>, expected: usize) -> Result<(), Error> {
        if x.width() == expected {
            return Ok(());
        }
        Err(self.scope.error(ModelError::Width { op, expected, got: x.width() }))
    }
}
