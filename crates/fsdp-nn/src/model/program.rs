//! Running an architecture block by block, as the engine asks.
//!
//! What lives between two calls is: the activation (forward) or the gradient (backward) that travels from
//! block to block; the recordings of blocks whose backward is still to come; and, under checkpointing, the
//! input of each layer and what the replay of its blocks needs. None of it holds a parameter.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::memory::SliceMut;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{ForwardMode, Gradients, Params, Program};

use super::architecture::Architecture;
use super::batch::{Batch, Parts, StepData};
use crate::backend::Backend;
use crate::error::ModelError;
use crate::tape::{MicroBatch, Recording, Replay, Scope, Tape, head_logits, head_loss, head_loss_backward};

/// What a program computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramOptions {
    /// The dtype of unsharded parameters and of values.
    pub dtype: DType,
    /// The seed of dropout masks.
    pub seed: u64,
}

/// A model on one rank: an architecture, the data of the step, and what lives between blocks.
pub struct ModelProgram<M: Backend, A> {
    architecture: A,
    spec: ModelSpec,
    first_trainable: Option<BlockId>,
    options: ProgramOptions,
    data: StepData<M::Buffer>,
    round: usize,
    travelling: Travelling<M>,
}

/// What lives between the blocks of a micro-batch.
struct Travelling<M: Backend> {
    activation: Option<M::Buffer>,
    gradient: Option<M::Buffer>,
    recordings: BTreeMap<BlockId, Recording<M>>,
    /// Inputs of layers that will be recomputed.
    checkpoints: BTreeMap<usize, M::Buffer>,
    /// What their blocks need besides.
    replays: BTreeMap<BlockId, Replay<M::Buffer>>,
}

impl<M: Backend> Default for Travelling<M> {
    fn default() -> Self {
        Self {
            activation: None,
            gradient: None,
            recordings: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
            replays: BTreeMap::new(),
        }
    }
}

impl<M: Backend, A: Architecture> ModelProgram<M, A> {
    /// A program of `architecture`. `spec` is its description, perhaps with frozen parameters.
    ///
    /// # Panics
    /// When `spec` differs from the architecture's description in more than what is frozen.
    pub fn new(architecture: A, spec: ModelSpec, options: ProgramOptions) -> Self {
        let described = &architecture.description().spec;
        assert!(
            described.blocks == spec.blocks && described.params.len() == spec.params.len(),
            "a program runs the model that its architecture describes"
        );
        let first_trainable = spec.first_trainable_block();
        let (data, travelling) = (StepData::default(), Travelling::default());
        Self { architecture, spec, first_trainable, options, data, round: 0, travelling }
    }

    /// The architecture.
    pub fn architecture(&self) -> &A {
        &self.architecture
    }

    /// Sets the micro-batches of this rank's next step (or evaluation), in order. Their tokens, targets and
    /// losses take 16 bytes per token, kept from step to step.
    ///
    /// # Errors
    /// [`ModelError::BatchShape`], [`ModelError::Token`] or [`ModelError::Positions`] inside
    /// [`Error::Program`], or those of the memory.
    pub fn set_batches(&mut self, memory: &M, step: u64, batches: Vec<Batch>) -> Result<(), Error> {
        self.data.set(memory, &self.architecture, step, batches)
    }

    /// Runs the last block on what the block before it left behind, and returns the logits of every token in
    /// the master dtype instead of the loss.
    ///
    /// # Errors
    /// As [`Program::finish`].
    pub fn logits(&mut self, memory: &M, params: &Params<M::Buffer>) -> Result<M::Buffer, Error> {
        let block = BlockId(self.spec.blocks.len() - 1);
        let x = self.take_activation(block)?;
        let Parts { micro_batch, .. } = self.data.parts(self.round, self.options.seed, false);
        let mut tape = Tape::forgetting(scope(&self.spec, self.options, memory, params, &micro_batch, block));
        let x = tape.input(x, false);
        let rows = self.architecture.last(&mut tape, x)?;
        head_logits(tape.scope(), &self.architecture.head(), rows)
    }

    /// Whether a block's input has a gradient: something is trained before it.
    fn input_needs_gradient(&self, block: BlockId) -> bool {
        self.first_trainable.is_some_and(|first| first < block)
    }

    fn take_activation(&mut self, block: BlockId) -> Result<M::Buffer, Error> {
        let activation = self.travelling.activation.take();
        activation.ok_or_else(|| self.out_of_order(block, "forward", "the output of the block before"))
    }

    /// The input of a block's forward; the first block has none.
    fn take_input(&mut self, block: BlockId, mode: ForwardMode) -> Result<Option<M::Buffer>, Error> {
        if block.0 == 0 {
            return Ok(None);
        }
        let layer = self.spec.block(block).layer;
        let is_first = layer.is_some() && self.spec.blocks[block.0 - 1].layer != layer;
        let (Some(layer), true) = (layer, is_first) else { return self.take_activation(block).map(Some) };
        if mode == ForwardMode::Recompute {
            let kept = self.travelling.checkpoints.remove(&layer);
            let missing = || self.out_of_order(block, "recomputation", "the layer's checkpointed input");
            return kept.ok_or_else(missing).map(Some);
        }
        let input = self.take_activation(block)?;
        if is_checkpoint(mode) {
            self.travelling.checkpoints.insert(layer, input.clone());
        }
        Ok(Some(input))
    }

    /// Whether a block is the last one of its layer.
    fn ends_layer(&self, block: BlockId) -> bool {
        let next = self.spec.blocks.get(block.0 + 1);
        next.is_none_or(|next| next.layer != self.spec.block(block).layer)
    }

    fn out_of_order(&self, block: BlockId, call: &'static str, missing: &'static str) -> Error {
        self.error(block, ModelError::OutOfOrder { call, missing })
    }

    fn error(&self, block: BlockId, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(block).name.clone(), source: Box::new(source) }
    }
}

impl<M: Backend, A: Architecture> Program<M> for ModelProgram<M, A> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn begin(&mut self, _memory: &M, round: usize) -> Result<(), Error> {
        self.data.check_round(round)?;
        self.round = round;
        self.travelling = Travelling::default();
        Ok(())
    }

    fn forward(
        &mut self,
        memory: &M,
        block: BlockId,
        mode: ForwardMode,
        params: &Params<M::Buffer>,
    ) -> Result<(), Error> {
        let is_replay = mode == ForwardMode::Recompute;
        if (is_replay || is_checkpoint(mode)) && self.spec.block(block).layer.is_none() {
            return Err(self.error(block, ModelError::NotInLayer));
        }
        let input = self.take_input(block, mode)?;
        let replay = if is_replay { self.travelling.replays.remove(&block) } else { None };
        let needs_gradient = self.input_needs_gradient(block);
        let training = mode != ForwardMode::Evaluate;
        // Backward of the layers above has used the output of a recomputed layer already.
        let replay_has_output = !self.ends_layer(block);
        let Parts { micro_batch, .. } = self.data.parts(self.round, self.options.seed, training);
        let scope = scope(&self.spec, self.options, memory, params, &micro_batch, block);
        let mut tape = match (mode, replay) {
            (ForwardMode::Record, _) => Tape::recording(scope),
            (ForwardMode::Evaluate, _) => Tape::forgetting(scope),
            (ForwardMode::Checkpoint, _) => Tape::noting(scope, false),
            (ForwardMode::CheckpointProducts, _) => Tape::noting(scope, true),
            (ForwardMode::Recompute, Some(replay)) => Tape::replaying(scope, replay),
            (ForwardMode::Recompute, None) => {
                return Err(self.out_of_order(block, "recomputation", "a forward to replay"));
            }
        };
        let output = match input {
            None => self.architecture.first(&mut tape)?,
            Some(x) => {
                let x = tape.input(x, needs_gradient);
                self.architecture.middle(block, &mut tape, x)?
            }
        };
        if is_checkpoint(mode) {
            let replay = tape.into_replay(replay_has_output.then_some(&output));
            self.travelling.replays.insert(block, replay);
            self.travelling.activation = Some(output.into_buffer());
            return Ok(());
        }
        let (output, recording) = tape.finish(output);
        if recording.leads_back() {
            self.travelling.recordings.insert(block, recording);
        }
        let is_needed = !is_replay || replay_has_output;
        self.travelling.activation = is_needed.then(|| output.into_buffer());
        Ok(())
    }

    fn finish(
        &mut self,
        memory: &M,
        block: BlockId,
        params: &Params<M::Buffer>,
        gradients: Option<&mut Gradients<M::Buffer>>,
    ) -> Result<(), Error> {
        let x = self.take_activation(block)?;
        let needs_gradient = self.input_needs_gradient(block);
        let head = self.architecture.head();
        let Parts { micro_batch, targets, losses } =
            self.data.parts(self.round, self.options.seed, gradients.is_some());
        let scope = || scope(&self.spec, self.options, memory, params, &micro_batch, block);
        match gradients {
            None => {
                let mut tape = Tape::forgetting(scope());
                let x = tape.input(x, false);
                let rows = self.architecture.last(&mut tape, x)?;
                head_loss(&scope(), &head, rows, targets, losses)?;
            }
            Some(gradients) => {
                let mut tape = Tape::recording(scope());
                let x = tape.input(x, needs_gradient);
                let rows = self.architecture.last(&mut tape, x)?;
                let (rows, recording) = tape.finish(rows);
                let gradient = head_loss_backward(&scope(), &head, rows, targets, losses, gradients)?;
                self.travelling.gradient = recording.backward(scope(), gradients, gradient)?;
            }
        }
        self.data.finish(self.round);
        Ok(())
    }

    fn backward(
        &mut self,
        memory: &M,
        block: BlockId,
        params: &Params<M::Buffer>,
        gradients: &mut Gradients<M::Buffer>,
    ) -> Result<(), Error> {
        let recording = self.travelling.recordings.remove(&block);
        let recording =
            recording.ok_or_else(|| self.out_of_order(block, "backward", "a recording of forward"))?;
        let gradient = self.travelling.gradient.take();
        let gradient = gradient
            .ok_or_else(|| self.out_of_order(block, "backward", "the gradient of the block above"))?;
        let Parts { micro_batch, .. } = self.data.parts(self.round, self.options.seed, true);
        let scope = scope(&self.spec, self.options, memory, params, &micro_batch, block);
        self.travelling.gradient = recording.backward(scope, gradients, gradient)?;
        Ok(())
    }

    fn take_loss(&mut self, memory: &M, queue: Queue, sum: SliceMut<'_, M::Buffer>) -> Result<u64, Error> {
        self.data.take_loss(memory, queue, sum)
    }
}

/// Whether a forward in this mode will be replayed.
fn is_checkpoint(mode: ForwardMode) -> bool {
    matches!(mode, ForwardMode::Checkpoint | ForwardMode::CheckpointProducts)
}

fn scope<'a, M: Backend>(
    spec: &'a ModelSpec,
    options: ProgramOptions,
    memory: &'a M,
    params: &'a Params<M::Buffer>,
    batch: &'a MicroBatch<'a, M::Buffer>,
    block: BlockId,
) -> Scope<'a, M> {
    Scope { memory, spec, block, params, batch, dtype: options.dtype }
}
