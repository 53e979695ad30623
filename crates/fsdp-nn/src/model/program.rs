//! Runs an architecture block by block, as the engine requests.

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::SliceMut;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{BlockCall, Gradients, Params, Program};
use fsdp_core::schedule::Round;

use super::architecture::Architecture;
use super::batch::{Batch, Parts, RowFacts, StepData};
use super::blocks::Blocks;
use super::counted::Counted;
use super::kinds::Shape;
use crate::backend::Backend;
use crate::graph::{DeviceRunner, Inputs, Route};
use crate::op::{Balance, LossTerms};

/// The settings of a [`ModelProgram`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramOptions {
    /// The dtype of unsharded parameters and of activations.
    pub dtype: DType,
    /// The seed of dropout masks.
    pub seed: u64,
    /// The loss terms that training adds; evaluation uses the cross-entropy only.
    pub terms: LossTerms,
}

/// A model on one rank: an architecture, the data of the step, and the state between block calls.
pub struct ModelProgram<M: Backend, A> {
    blocks: Blocks<A, M::Buffer>,
    options: ProgramOptions,
    data: StepData<M::Buffer>,
    round: usize,
}

impl<M: Backend, A: Architecture> ModelProgram<M, A> {
    /// Creates a program of `architecture`. `spec` is its description, possibly with frozen parameters.
    ///
    /// # Panics
    /// If `spec` differs from the architecture's description in more than what is frozen.
    pub fn new(architecture: A, spec: ModelSpec, options: ProgramOptions) -> Self {
        let described = &architecture.description().spec;
        assert!(
            described.blocks == spec.blocks && described.params.len() == spec.params.len(),
            "a program runs the model that its architecture describes"
        );
        Self { blocks: Blocks::new(architecture, spec), options, data: StepData::default(), round: 0 }
    }

    /// Returns the architecture.
    pub fn architecture(&self) -> &A {
        &self.blocks.architecture
    }

    /// Sets the micro-batches of this rank's next step (or evaluation), in order. Their tokens, targets and losses
    /// take 16 bytes per token (4 more with positions, 8 more with a z-loss), kept from step to step; so are the
    /// loads of experts.
    ///
    /// # Errors
    /// [`ModelError::BatchShape`](crate::ModelError::BatchShape), `Token`, `Positions` or `Position` inside
    /// [`Error::Program`], or those of the memory.
    pub fn set_batches(&mut self, memory: &M, step: u64, batches: Vec<Batch>) -> Result<(), Error> {
        let balance = self.balance();
        let z_loss = self.options.terms.z_loss > 0.0;
        self.data.set(memory, (&self.blocks.architecture, balance, z_loss), step, batches)
    }

    /// Replaces facts about the rows of the next [`set_batches`](Self::set_batches), which has one micro-batch: audits compute
    /// what other programs do, rightly or wrongly.
    pub fn set_row_facts(&mut self, facts: RowFacts) {
        self.data.row_facts = facts;
    }

    /// Sets the factor of the losses' gradients, from the next micro-batch on.
    pub fn set_loss_scale(&mut self, scale: f64) {
        self.options.terms.loss_scale = scale;
    }

    /// Runs the last block on the output of the previous block, and returns the logits of every token in the master
    /// dtype instead of the loss.
    ///
    /// # Errors
    /// As [`Program::call`].
    pub fn logits(&mut self, memory: &M, params: &Params<M::Buffer>) -> Result<M::Buffer, Error> {
        let block = BlockId(self.blocks.spec.blocks.len() - 1);
        self.with_runner(memory, (block, false), (params, None), |blocks, shape, runner| {
            Ok(blocks.last(block, Route::Logits, shape, runner)?.expect("a plan of logits leaves them"))
        })
    }

    /// Returns the model's mixtures with the balancing loss of training, if it has any.
    fn balance(&self) -> Option<Balance> {
        self.blocks.architecture.description().balance(self.options.terms)
    }

    fn with_runner<T>(
        &mut self,
        memory: &M,
        (block, training): (BlockId, bool),
        (params, gradients): (&Params<M::Buffer>, Option<&mut Gradients<M::Buffer>>),
        body: impl FnOnce(&mut Blocks<A, M::Buffer>, Shape, &mut DeviceRunner<'_, M>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (balance, load_range) = (self.balance(), self.blocks.architecture.description().load(block));
        let place = (self.round, self.options.seed);
        let Parts { batch, losses, z_losses, routers, samples, seq } =
            self.data.parts(place, balance, load_range);
        let (head_chunks, packed) = (memory.head_chunks(), batch.positions.is_some());
        let ProgramOptions { dtype, terms, .. } = self.options;
        let shape = Shape { samples, seq, length: seq, dtype, head_chunks, terms, training, packed };
        let spec = Arc::clone(&self.blocks.spec);
        let inputs = Inputs { memory, spec: &spec, block, params, batch };
        body(&mut self.blocks, shape, &mut DeviceRunner { inputs, gradients, losses, z_losses, routers })
    }
}

impl<M: Backend, A: Architecture> Program<M> for ModelProgram<M, A> {
    fn spec(&self) -> &ModelSpec {
        &self.blocks.spec
    }

    fn begin(&mut self, _memory: &M, Round(round): Round) -> Result<(), Error> {
        self.data.check_round(round)?;
        self.round = round;
        self.blocks.begin();
        Ok(())
    }

    fn call(
        &mut self,
        memory: &M,
        call: BlockCall,
        params: &Params<M::Buffer>,
        gradients: Option<&mut Gradients<M::Buffer>>,
    ) -> Result<(), Error> {
        let training = !call.evaluates();
        self.with_runner(memory, (call.block(), training), (params, gradients), |blocks, shape, runner| {
            blocks.call(call, shape, runner)
        })?;
        if call.is_last() {
            self.data.note_losses(self.round, training);
        }
        Ok(())
    }

    fn take_loss(&mut self, memory: &M, queue: Queue, words: SliceMut<'_, M::Buffer>) -> Result<u64, Error> {
        let counted = Counted::of(self.blocks.architecture.description(), &self.blocks.spec);
        self.data.take_loss(memory, queue, (counted, self.balance()), words)
    }
}
