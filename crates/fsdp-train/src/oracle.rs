//! The oracle: a plain, unsharded trainer.
//!
//! It has no engine, no schedule, no layout and no communicator: full parameters in one buffer each, one micro-batch
//! after the other, gradients added (never averaged) in the order of the tree T(V) (or in running order), the exact
//! norm, the update. It shares with the engine only the model's operations, the update rule, the rules of the loss
//! scale and the data. If both agree bit for bit, sharding and scheduling have changed nothing.

use std::sync::Arc;

use fsdp_core::comm::Comms;
use fsdp_core::engine::{StepInput, StepReport};
use fsdp_core::layout::SegmentId;
use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut, View};
use fsdp_core::model::{BlockId, ParamId};
use fsdp_core::program::{BlockCall, ForwardMode, Gradients, Params, Pass, Program};
use fsdp_core::scalars::{COUNT, GradientFactors};
use fsdp_core::schedule::{AccumulationOrder, Checkpointing, Round};
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StepScalars, Updates, WholeDirections};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, ExactSum, Memory, Queue, tree};
use fsdp_nn::Backend;
use fsdp_nn::cuts::{Chunks, Cuts};
use fsdp_nn::model::{Architecture, ModelProgram};
use fsdp_nn::update::Rule;

use crate::error::TrainError;
use crate::job::Job;
use crate::loss_scale::LossScaler;
use crate::router_bias::Changes;
use crate::rule;

/// PyTorch's `clip_grad_norm_` adds this to the norm before dividing.
const CLIP_EPSILON: f64 = 1e-6;

/// One unsharded parameter.
struct OracleParam<B> {
    id: ParamId,
    piece: Piece,
    master: B,
    /// The compute copy; `None` if its dtype is that of the master.
    low: Option<B>,
    state: Vec<B>,
    gradient: Option<B>,
}

/// A plain, unsharded trainer of a job.
pub struct Oracle<'a, M: Backend, A: Architecture + Clone> {
    job: &'a Job<A>,
    memory: Arc<M>,
    program: ModelProgram<M, A>,
    rule: Rule,
    params: Vec<OracleParam<M::Buffer>>,
    /// The exact sums of losses and of squares, as words.
    sums: [M::Buffer; 2],
    factors: M::Buffer,
    /// The update rule's flag for non-finite values. Not read: comparisons find such values anyway.
    not_finite: M::Buffer,
    /// For each trained parameter, the sums of the absolute values of all leaves in the last step, if they were
    /// requested.
    magnitudes: Option<Vec<Vec<f64>>>,
    /// `None` if the run has no loss scale.
    scaler: Option<LossScaler>,
}

/// The gradients of one micro-batch, one buffer per trained parameter.
type Leaf<B> = Vec<B>;

impl<'a, M: Backend, A: Architecture + Clone> Oracle<'a, M, A> {
    /// Allocates and initializes the whole model.
    ///
    /// # Errors
    /// Errors of the parts involved.
    pub fn new(job: &'a Job<A>, memory: Arc<M>) -> Result<Self, TrainError> {
        let plan = &job.plan;
        // All chunks of every sample, one after the other.
        let [samples, experts] = [plan.policy.chunks, plan.policy.expert_chunks].map(Chunks::all);
        let options = job.program_options(Cuts { samples, experts, sends_rows: false });
        let program = ModelProgram::new(job.architecture.clone(), plan.spec.clone(), options);
        let rule = rule::rule(&job.config.train, &plan.spec)?;
        let mut params = Vec::new();
        for id in (0..plan.spec.params.len()).map(ParamId) {
            params.push(load_param(job, &*memory, &rule, id)?);
        }
        let words = |len| memory.allocate(Category::CommStaging, DType::I64, len);
        let sums = [words(plan.spec.tallies.scalar_words())?, words(ExactSum::WORDS)?];
        let factors = memory.allocate(Category::CommStaging, DType::F64, GradientFactors::LEN)?;
        let not_finite = zeroed(&*memory, Category::CommStaging, DType::I64, 1)?;
        let scaler = LossScaler::of(&job.config);
        Ok(Self { job, memory, program, rule, params, sums, factors, not_finite, magnitudes: None, scaler })
    }

    /// Runs step `step` (from 0). With `measure`, keeps the magnitudes of the leaves.
    ///
    /// # Errors
    /// Errors of the program and the memory.
    pub fn step(&mut self, step: u64, measure: bool) -> Result<StepReport, TrainError> {
        let count = self.job.data.micro_batches();
        self.magnitudes = measure.then(|| self.trained().map(|param| vec![0.0; param.piece.len]).collect());
        let batches = (0..count).map(|index| self.job.data.train_batch(step, index)).collect();
        let memory = Arc::clone(&self.memory);
        self.program.set_batches(&*memory, step, batches)?;
        let loss_scale = self.scaler.as_ref().map(|scaler| scaler.current().scale);
        self.program.set_loss_scale(loss_scale.unwrap_or(1.0));
        let total = self.sum_of_leaves(count)?;
        let found = self.losses()?;
        let norm = self.squares(&total)?.sqrt();
        let mean = if found.targets == 0 { 0.0 } else { 1.0 / found.targets as f64 };
        let scale = mean / loss_scale.unwrap_or(1.0);
        let grad_norm = norm * scale;
        let finite = self.scaler.is_none() || found.loss.is_finite() && grad_norm.is_finite();
        let report = StepReport { grad_norm, finite, ..found };
        let input = StepInput {
            step: self.scaler.as_ref().map_or(step + 1, |scaler| scaler.update_number(step)),
            lr: self.job.schedule.lr(step),
            grad_clip: self.job.config.train.grad_clip,
            loss_scale,
            stop: false,
        };
        self.update(total, &report, input, scale)?;
        self.correct_routers(&report)?;
        if let Some(scaler) = &mut self.scaler {
            scaler.note(finite);
        }
        Ok(report)
    }

    /// The loss scale of the next step; 1 if the run has none.
    pub(crate) fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, |scaler| scaler.current().scale)
    }

    /// The losses of the step, the number of counted targets, and the other tallies of the model.
    fn losses(&mut self) -> Result<StepReport, TrainError> {
        let ([sums, _], tallies) = (&mut self.sums, self.job.plan.spec.tallies);
        self.memory.zero(Queue::Compute, SliceMut::whole(sums))?;
        let count = self.program.take_loss(&*self.memory, Queue::Compute, SliceMut::whole(sums))?;
        let mut words = vec![0; tallies.scalar_words()];
        self.memory.read(Queue::Compute, Slice::whole(sums), HostSliceMut::I64(&mut words))?;
        words[COUNT] = i64::try_from(count).expect("targets of a step fit 63 bits");
        Ok(StepReport::with(&words, tallies, 1.0))
    }

    /// The squared norm of the sum of all leaves.
    fn squares(&mut self, total: &Leaf<M::Buffer>) -> Result<f64, TrainError> {
        let [_, sum] = &mut self.sums;
        self.memory.zero(Queue::Compute, SliceMut::whole(sum))?;
        let trained = self.params.iter().filter(|param| param.gradient.is_some());
        for (gradient, param) in total.iter().zip(trained) {
            let rows = [param.piece.rows()];
            let squares = Arithmetic::SquareSum(Slice::whole(gradient), &rows);
            self.memory.compute(Queue::Compute, squares, SliceMut::whole(sum))?;
        }
        exact_sum(&*self.memory, sum)
    }

    fn trained(&self) -> impl Iterator<Item = &OracleParam<M::Buffer>> {
        self.params.iter().filter(|param| param.gradient.is_some())
    }

    /// Adds the leaves of all micro-batches in the order of the policy.
    fn sum_of_leaves(&mut self, count: usize) -> Result<Leaf<M::Buffer>, TrainError> {
        let memory = Arc::clone(&self.memory);
        let add = |left, right| add(&*memory, left, right);
        match self.job.plan.policy.accumulation_order {
            AccumulationOrder::Tree => {
                let mut leaf = |index| self.leaf(index);
                tree::fold(0, count, &mut leaf, &mut |left: Result<_, TrainError>, right| add(left?, right?))
            }
            AccumulationOrder::Running => {
                let mut sum = self.leaf(0)?;
                for index in 1..count {
                    sum = add(sum, self.leaf(index)?)?;
                }
                Ok(sum)
            }
        }
    }

    /// The gradients of one micro-batch: of all of its chunks, added by the tree.
    fn leaf(&mut self, index: usize) -> Result<Leaf<M::Buffer>, TrainError> {
        let leaves = self.chunk_leaves(index)?;
        let (count, mut leaves) = (leaves.len(), leaves.into_iter());
        // The tree reads its leaves in order.
        let mut leaf = |_| Ok(leaves.next().expect("there is a leaf for every chunk"));
        let memory = Arc::clone(&self.memory);
        tree::fold(0, count, &mut leaf, &mut |left: Result<_, TrainError>, right| {
            add(&*memory, left?, right?)
        })
    }

    /// Runs forward and backward of one micro-batch; returns the gradients of each of its chunks.
    fn chunk_leaves(&mut self, index: usize) -> Result<Vec<Leaf<M::Buffer>>, TrainError> {
        let memory = Arc::clone(&self.memory);
        let memory = &*memory;
        let spec = self.job.plan.spec.clone();
        let mut params = Params::default();
        for param in &self.params {
            let buffer = param.low.as_ref().unwrap_or(&param.master).clone();
            params.insert(param.id, View { buffer, offset: 0, len: param.piece.len });
        }
        let dtype = self.job.plan.policy.reduce_dtype;
        let mut gradients = Vec::new();
        for _ in 0..self.job.plan.policy.chunks {
            let mut buffers = Vec::new();
            let mut places = Vec::new();
            for param in self.trained() {
                places.push((param.id, SegmentId(buffers.len()), 0, param.piece.len));
                buffers.push(memory.allocate(Category::GradientSlot, dtype, param.piece.len)?);
            }
            let mut of_chunk = Gradients::default();
            of_chunk.open(UnitId(0), buffers, places);
            gradients.push(of_chunk);
        }
        let last = spec.blocks.len() - 1;
        let first = spec.first_trainable_block().map_or(last, |block| block.0);
        self.program.begin(memory, Round(index), Pass::Train(Checkpointing::None))?;
        let forward = (0..last).map(|block| BlockCall::Forward(BlockId(block), ForwardMode::Record));
        let backward = (first..last).rev().map(|block| BlockCall::Backward(BlockId(block)));
        for call in forward.chain([BlockCall::ForwardBackward(BlockId(last))]).chain(backward) {
            params.enter(call.block());
            self.program.call(memory, call, &params, &mut gradients, &mut Comms::alone())?;
        }
        let close = |mut of_chunk: Gradients<M::Buffer>| {
            let leaf = of_chunk.close(memory, UnitId(0))?.expect("the gradients were opened above");
            self.measure(&leaf)?;
            Ok(leaf)
        };
        gradients.into_iter().map(close).collect()
    }

    fn measure(&mut self, leaf: &Leaf<M::Buffer>) -> Result<(), TrainError> {
        let Some(magnitudes) = &mut self.magnitudes else { return Ok(()) };
        for (buffer, sums) in leaf.iter().zip(magnitudes) {
            let mut values = vec![0.0; buffer.len()];
            self.memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values))?;
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value.abs();
            }
        }
        Ok(())
    }

    fn update(
        &mut self,
        total: Leaf<M::Buffer>,
        report: &StepReport,
        input: StepInput,
        scale: f64,
    ) -> Result<(), TrainError> {
        let clip = input.grad_clip.map_or(1.0, |max| (max / (report.grad_norm + CLIP_EPSILON)).min(1.0));
        let memory = Arc::clone(&self.memory);
        let factors = GradientFactors { scale, clip, finite: report.finite }.to_array();
        memory.write(Queue::Compute, HostSlice::F64(&factors), SliceMut::whole(&mut self.factors))?;
        let scalars = StepScalars { step: input.step, lr: input.lr, factors: Slice::whole(&self.factors) };
        for (gradient, param) in
            total.into_iter().zip(self.params.iter_mut().filter(|p| p.gradient.is_some()))
        {
            param.gradient = Some(gradient);
        }
        let mut reduced: Vec<M::Buffer> = Vec::new();
        for len in self.rule.phases() {
            let mut sums = zeroed(&*memory, Category::CommStaging, DType::F64, len)?;
            for param in self.params.iter_mut() {
                let Some(mut shard) = param.shard(&mut self.not_finite) else { continue };
                let stage = Stage::Statistics { earlier: &reduced, sums: &mut sums };
                self.rule.run(&*memory, stage, &mut shard, &scalars)?;
            }
            reduced.push(sums);
        }
        let (whole, scratch) = (self.rule.whole(), self.rule.scratch());
        for param in self.params.iter_mut() {
            let (dtype, len) = (self.job.plan.policy.reduce_dtype, param.piece.len);
            let (is_whole, master) = (whole.contains(&param.id), param.master.dtype());
            let Some(mut shard) = param.shard(&mut self.not_finite) else { continue };
            if is_whole {
                let mut direction = zeroed(&*memory, Category::Workspace, dtype, len)?;
                let mut scratch = zeroed(&*memory, Category::Workspace, master, scratch)?;
                let stage = Stage::Direct { direction: &mut direction };
                self.rule.run(&*memory, stage, &mut shard, &scalars)?;
                shard.whole =
                    Some(WholeDirections { directions: &direction, start: 0, scratch: &mut scratch });
                let stage = Stage::Update { statistics: &reduced };
                self.rule.run(&*memory, stage, &mut shard, &scalars)?;
            } else {
                let stage = Stage::Update { statistics: &reduced };
                self.rule.run(&*memory, stage, &mut shard, &scalars)?;
            }
            if let Some(low) = &mut param.low {
                memory.copy(Queue::Compute, Slice::whole(&param.master), SliceMut::whole(low))?;
            }
        }
        Ok(())
    }

    fn correct_routers(&mut self, report: &StepReport) -> Result<(), TrainError> {
        let Some(changes) = Changes::after(self.job, report) else { return Ok(()) };
        let memory = Arc::clone(&self.memory);
        for param in self.params.iter_mut().filter(|param| changes.has(param.id)) {
            let mut values = vec![0.0; param.piece.len];
            memory.read_numbers(Queue::Compute, Slice::whole(&param.master), &mut values)?;
            changes.add(param.id, 0, &mut values);
            memory.write_numbers(Queue::Compute, &values, SliceMut::whole(&mut param.master))?;
            if let Some(low) = &mut param.low {
                memory.copy(Queue::Compute, Slice::whole(&param.master), SliceMut::whole(low))?;
            }
        }
        Ok(())
    }

    /// Reads the master values of a parameter.
    ///
    /// # Errors
    /// Errors of the memory.
    pub fn param(&self, id: ParamId) -> Result<Vec<f64>, TrainError> {
        self.read(&self.params[id.0].master)
    }

    /// Reads the summed, unscaled gradient of a parameter in the last step; `None` if it is frozen.
    ///
    /// # Errors
    /// Errors of the memory.
    pub fn gradient(&self, id: ParamId) -> Result<Option<Vec<f64>>, TrainError> {
        self.params[id.0].gradient.as_ref().map(|gradient| self.read(gradient)).transpose()
    }

    /// Reads the state tensors of a parameter.
    ///
    /// # Errors
    /// Errors of the memory.
    pub fn state(&self, id: ParamId) -> Result<Vec<Vec<f64>>, TrainError> {
        self.params[id.0].state.iter().map(|buffer| self.read(buffer)).collect()
    }

    /// The sums of absolute leaf values of trained parameters, in parameter order; `None` if the last step was not
    /// measured.
    pub fn magnitudes(&self) -> Option<&[Vec<f64>]> {
        self.magnitudes.as_deref()
    }

    fn read(&self, buffer: &M::Buffer) -> Result<Vec<f64>, TrainError> {
        let mut values = vec![0.0; buffer.len()];
        self.memory.read_numbers(Queue::Compute, Slice::whole(buffer), &mut values)?;
        Ok(values)
    }
}

impl<B: Buffer> OracleParam<B> {
    fn shard<'a>(&'a mut self, not_finite: &'a mut B) -> Option<SegmentShard<'a, B>> {
        let gradient = self.gradient.as_ref()?;
        Some(SegmentShard {
            low: None,
            params: &mut self.master,
            gradient,
            state: &mut self.state,
            pieces: std::slice::from_ref(&self.piece),
            segment: None,
            whole: None,
            not_finite,
        })
    }
}

fn load_param<M: Backend, A>(
    job: &Job<A>,
    memory: &M,
    rule: &dyn RuleState,
    id: ParamId,
) -> Result<OracleParam<M::Buffer>, TrainError> {
    let (spec, policy) = (&job.plan.spec, &job.plan.policy);
    let param = spec.param(id);
    let (len, row_len) = (param.stored_len(), param.stored_row_len().unwrap_or(1));
    let piece = Piece { param: id, offset: 0, len, param_offset: 0, row_len };
    let gathered = param.gathered_dtype(policy.param_dtype);
    let dtype = match gathered == policy.param_dtype {
        true => policy.kept_dtype(param.trainable),
        false => gathered,
    };
    let mut values = vec![0.0; len];
    job.init.fill(spec, &piece, &mut values)?;
    let mut master = memory.allocate(Category::ParameterShard, dtype, len)?;
    memory.write_numbers(Queue::Compute, &values, SliceMut::whole(&mut master))?;
    let low = if gathered == dtype {
        None
    } else {
        let mut low = memory.allocate(Category::ParameterShard, gathered, len)?;
        memory.copy(Queue::Compute, Slice::whole(&master), SliceMut::whole(&mut low))?;
        Some(low)
    };
    let mut state = Vec::new();
    let mut gradient = None;
    if param.trainable {
        for tensor in rule.state(std::slice::from_ref(&piece), len, dtype) {
            state.push(zeroed(memory, Category::OptimizerState, tensor.dtype, tensor.len)?);
        }
        gradient = Some(zeroed(memory, Category::ShardedGradient, policy.reduce_dtype, len)?);
    }
    Ok(OracleParam { id, piece, master, low, state, gradient })
}

fn zeroed<M: Backend>(
    memory: &M,
    category: Category,
    dtype: DType,
    len: usize,
) -> Result<M::Buffer, TrainError> {
    let mut buffer = memory.allocate(category, dtype, len)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
    Ok(buffer)
}

/// Adds gradients to others.
fn add<M: Memory>(
    memory: &M,
    mut left: Leaf<M::Buffer>,
    right: Leaf<M::Buffer>,
) -> Result<Leaf<M::Buffer>, TrainError> {
    for (sum, part) in left.iter_mut().zip(&right) {
        memory.compute(Queue::Compute, Arithmetic::Accumulate(Slice::whole(part)), SliceMut::whole(sum))?;
    }
    Ok(left)
}

/// Reads the value of an exact sum.
fn exact_sum<M: Memory>(memory: &M, words: &M::Buffer) -> Result<f64, TrainError> {
    let mut values = [0; ExactSum::WORDS];
    memory.read(Queue::Compute, Slice::whole(words), HostSliceMut::I64(&mut values))?;
    Ok(ExactSum::from_words(&values).value())
}
