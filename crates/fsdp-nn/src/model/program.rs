//! Runs an architecture block by block, as the engine requests.

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_core::Error;
use fsdp_core::Queue;
use fsdp_core::comm::Comms;
use fsdp_core::memory::SliceMut;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{BlockCall, Gradients, Params, Pass, Program};
use fsdp_core::schedule::Round;

use super::architecture::Architecture;
use super::batch::{Batch, Parts, RowFacts, StepData};
use super::counted::Counted;
use super::kinds::{Kinds, Shape};
use super::micro_batch::{MicroBatchPlan, PlannedCall};
use crate::backend::Backend;
use crate::cuts::Cuts;
use crate::error::ModelError;
use crate::graph::{DeviceRunner, Inputs, Request, Route};
use crate::op::{LossTerms, RouterTerms};

/// The settings of a [`ModelProgram`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramOptions {
    /// The dtype of unsharded parameters and of activations.
    pub dtype: DType,
    /// The seed of dropout masks.
    pub seed: u64,
    /// The loss terms that training adds; evaluation uses the cross-entropy only.
    pub terms: LossTerms,
    /// How samples and experts are cut, and which chunks are on this rank.
    pub cuts: Cuts,
}

/// A model on one rank: an architecture, the data of the step, and the values between the calls of a micro-batch.
pub struct ModelProgram<M: Backend, A> {
    architecture: A,
    spec: Arc<ModelSpec>,
    options: ProgramOptions,
    data: StepData<M::Buffer>,
    /// Plans made so far.
    plans: Vec<(Shape, Pass, Arc<MicroBatchPlan>)>,
    round: usize,
    /// The plan of the micro-batch, its next call, and the values that are live before that.
    plan: Arc<MicroBatchPlan>,
    next: usize,
    values: Vec<Option<M::Buffer>>,
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
        Self {
            architecture,
            spec: Arc::new(spec),
            options,
            data: StepData::default(),
            plans: Vec::new(),
            round: 0,
            plan: Arc::default(),
            next: 0,
            values: Vec::new(),
        }
    }

    /// Returns the architecture.
    pub fn architecture(&self) -> &A {
        &self.architecture
    }

    /// Sets the micro-batches of this rank's next step (or evaluation), in order, as whole samples. The tokens, targets and
    /// losses of its chunks take 16 bytes per token (4 more with positions, 8 more with a z-loss), kept from step to step; so are the
    /// loads of experts.
    ///
    /// # Errors
    /// [`ModelError::BatchShape`](crate::ModelError::BatchShape), `Token`, `Positions` or `Position` inside
    /// [`Error::Program`], or those of the memory.
    pub fn set_batches(&mut self, memory: &M, step: u64, batches: Vec<Batch>) -> Result<(), Error> {
        let routers = self.router_terms();
        let z_loss = self.options.terms.z_loss > 0.0;
        self.data.set(memory, (&self.architecture, routers, z_loss), self.options.cuts.samples, step, batches)
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

    /// Runs the last block of an evaluation, and returns the logits of every token in the master dtype instead of the
    /// loss.
    ///
    /// # Errors
    /// As [`Program::call`].
    pub fn logits(&mut self, memory: &M, params: &Params<M::Buffer>) -> Result<M::Buffer, Error> {
        let shape = self.shape(memory, Pass::Evaluate);
        let block = BlockId(self.spec.blocks.len() - 1);
        let index = self.expect(BlockCall::Evaluate(block))?;
        let call = self.plan.calls[index].clone();
        let mut kinds = Kinds::new(&self.architecture, &self.spec, shape)?;
        let request = Request { route: Route::Logits, input_shared: false, output_read: true };
        let plan = kinds.plan(block, request);
        let logits = self.values.len();
        self.values.push(None);
        let outputs = plan.output.map(|place| (place, logits)).into_iter().collect();
        self.run(memory, &PlannedCall { plan, outputs, ..call }, params, &mut [], &mut Comms::alone())?;
        Ok(self.values[logits].take().expect("a plan of logits leaves them"))
    }

    /// Returns the model's mixtures with what they add to the loss of training, if it has any.
    fn router_terms(&self) -> Option<RouterTerms> {
        self.architecture.description().router_terms(self.options.terms)
    }

    /// The shape of the graphs of this micro-batch.
    fn shape(&self, memory: &M, pass: Pass) -> Shape {
        let ProgramOptions { dtype, terms, cuts, .. } = self.options;
        let (samples, seq, packed) = self.data.sizes(self.round);
        let (head_chunks, training) = (memory.head_chunks(), pass != Pass::Evaluate);
        let length = seq * cuts.samples.count;
        Shape { samples, seq, length, dtype, head_chunks, terms, training, packed, cuts }
    }

    /// Returns the index of the next call, which has to be this one.
    fn expect(&mut self, call: BlockCall) -> Result<usize, Error> {
        let expected = self.plan.calls.get(self.next).map(|planned| planned.call);
        if expected == Some(call) {
            self.next += 1;
            return Ok(self.next - 1);
        }
        let source = Box::new(ModelError::OutOfOrder { expected, got: call });
        Err(Error::Program { block: self.spec.block(call.block()).name.clone(), source })
    }

    /// Executes a call on a device.
    fn run(
        &mut self,
        memory: &M,
        call: &PlannedCall,
        params: &Params<M::Buffer>,
        gradients: &mut [Gradients<M::Buffer>],
        comms: &mut Comms<M>,
    ) -> Result<(), Error> {
        let block = call.call.block();
        let load_range = self.architecture.description().load(block, self.options.terms);
        let place = (self.round, self.options.seed);
        let Parts { batch, losses, z_losses, routers } = self.data.parts(place, load_range);
        let inputs = Inputs { memory, spec: &self.spec, block, params, batch };
        let mut runner =
            DeviceRunner { inputs, gradients, comms, losses, z_losses, routers, in_flight: Vec::new() };
        call.run(&mut self.values, &mut runner)
    }
}

impl<M: Backend, A: Architecture> Program<M> for ModelProgram<M, A> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn begin(&mut self, memory: &M, Round(round): Round, pass: Pass) -> Result<(), Error> {
        self.data.check_round(round)?;
        self.round = round;
        let shape = self.shape(memory, pass);
        let known = self.plans.iter().find(|(other, of, _)| (*other, *of) == (shape, pass));
        self.plan = match known {
            Some((.., plan)) => Arc::clone(plan),
            None => {
                let plan = Arc::new(MicroBatchPlan::new(&self.architecture, &self.spec, shape, pass)?);
                self.plans.push((shape, pass, Arc::clone(&plan)));
                plan
            }
        };
        self.next = 0;
        self.values = vec![None; self.plan.values];
        Ok(())
    }

    fn call(
        &mut self,
        memory: &M,
        call: BlockCall,
        params: &Params<M::Buffer>,
        gradients: &mut [Gradients<M::Buffer>],
        comms: &mut Comms<M>,
    ) -> Result<(), Error> {
        let (index, plan) = (self.expect(call)?, Arc::clone(&self.plan));
        if call.is_last() && call.is_backward() {
            self.data.sum_loads(memory, comms, self.round)?;
        }
        self.run(memory, &plan.calls[index], params, gradients, comms)?;
        if call.is_last() {
            self.data.note_losses(self.round, call.is_backward());
        }
        Ok(())
    }

    fn take_loss(&mut self, memory: &M, queue: Queue, words: SliceMut<'_, M::Buffer>) -> Result<u64, Error> {
        let counted = Counted::of(self.architecture.description(), &self.spec);
        self.data.take_loss(memory, queue, counted, words)
    }
}
