//! The scalars of a step: loss, count of targets, gradient norm and the stop flag, reduced together in one
//! integer all-reduce whose result does not depend on the number or order of ranks; and the statistics
//! that an update rule declares.

use crate::comm::{Comm, Purpose};
use crate::dtype::DType;
use crate::error::Error;
use crate::exact::ExactSum;
use crate::ledger::SCALAR_WORDS;
use crate::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use crate::program::LossSum;
use crate::rank::Queue;
use crate::update::{StepScalars, UpdateRule};

/// PyTorch's `clip_grad_norm_` adds this to the norm before dividing.
const CLIP_EPSILON: f64 = 1e-6;

/// What a caller says about a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Maximum of the gradient's L2 norm, if it is clipped.
    pub grad_clip: Option<f64>,
    /// This rank asks to stop after this step.
    pub stop: bool,
}

/// What a step found, the same on every rank, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over all counted targets of the global batch, before the update.
    pub loss: f64,
    /// Number of counted targets.
    pub targets: u64,
    /// L2 norm of the gradient of the mean loss, before clipping (0 in evaluation).
    pub grad_norm: f64,
    /// Whether loss and norm are finite. When they are not, parameters and optimizer state are untouched.
    pub finite: bool,
    /// Whether any rank asked to stop.
    pub stop: bool,
}

pub(super) struct Scalars<M: Memory> {
    buffer: Option<M::Buffer>,
    statistics: Vec<Option<M::Buffer>>,
    /// The reduced statistics of the phases so far.
    pub(super) reduced: Vec<Vec<f64>>,
    /// This rank's part of the phase under way.
    pub(super) partial: Vec<Vec<f64>>,
    pub(super) norm: ExactSum,
    pub(super) stop: bool,
    input: Option<StepInput>,
    report: StepReport,
}

impl<M: Memory> Scalars<M> {
    pub(super) fn new(memory: &M, rule: &dyn UpdateRule<M>) -> Result<Self, Error> {
        // Written now, so that they have their storage from the first step on.
        let allocate = |dtype, len| -> Result<_, Error> {
            let mut buffer = memory.allocate(Category::CommStaging, dtype, len)?;
            memory.zero(Queue::Reduce, SliceMut::whole(&mut buffer))?;
            Ok(Some(buffer))
        };
        let phases = rule.phases();
        Ok(Self {
            buffer: allocate(DType::I64, SCALAR_WORDS)?,
            statistics: phases.iter().map(|&len| allocate(DType::F64, len)).collect::<Result<_, _>>()?,
            reduced: Vec::new(),
            partial: phases.iter().map(|&len| vec![0.0; len]).collect(),
            norm: ExactSum::default(),
            stop: false,
            input: None,
            report: StepReport { loss: 0.0, targets: 0, grad_norm: 0.0, finite: true, stop: false },
        })
    }

    pub(super) fn begin(&mut self, input: Option<StepInput>) {
        self.norm = ExactSum::default();
        self.stop = input.is_some_and(|input| input.stop);
        self.input = input;
        self.reduced.clear();
        self.partial.iter_mut().for_each(|sums| sums.fill(0.0));
    }

    pub(super) fn report(&self) -> StepReport {
        self.report
    }

    /// The values that an update needs; `None` when it must not happen.
    pub(super) fn for_update(&self) -> Option<StepScalars> {
        let input = self.input.filter(|_| self.report.finite)?;
        let clip = match input.grad_clip {
            Some(max) => (max / (self.report.grad_norm + CLIP_EPSILON)).min(1.0),
            None => 1.0,
        };
        Some(StepScalars { step: input.step, lr: input.lr, gradient_scale: self.scale(), clip })
    }

    fn scale(&self) -> f64 {
        if self.report.targets == 0 { 0.0 } else { 1.0 / self.report.targets as f64 }
    }

    /// Sums loss, count, norm and stop flag over all ranks. Replicas hold equal gradients, so only one of
    /// them counts in the norm.
    pub(super) fn reduce(
        &mut self,
        memory: &M,
        world: &mut Comm<M>,
        loss: &LossSum,
        counts_norm: bool,
    ) -> Result<(), Error> {
        const NORM: usize = ExactSum::WORDS;
        const COUNT: usize = 2 * ExactSum::WORDS;
        let mut words = [0i64; SCALAR_WORDS];
        words[..NORM].copy_from_slice(&loss.sum.to_words());
        if counts_norm {
            words[NORM..COUNT].copy_from_slice(&self.norm.to_words());
        }
        words[COUNT] = i64::try_from(loss.count).expect("targets of a step fit 63 bits");
        words[COUNT + 1] = i64::from(self.stop);
        let mut buffer = self.buffer.take().expect("scalars are reduced once at a time");
        memory.write(Queue::Reduce, HostSlice::I64(&words), SliceMut::whole(&mut buffer))?;
        let pending = world.all_reduce(memory, Purpose::Scalars, None, vec![buffer])?;
        let buffer = pending.wait_on(memory, Queue::Reduce)?.outputs.pop().expect("one buffer came back");
        memory.read(Queue::Reduce, Slice::whole(&buffer), HostSliceMut::I64(&mut words))?;
        self.buffer = Some(buffer);
        let targets = words[COUNT] as u64;
        self.report = StepReport { targets, ..self.report };
        let scale = self.scale();
        let loss = ExactSum::from_words(&words[..NORM]).value() * scale;
        let grad_norm = ExactSum::from_words(&words[NORM..COUNT]).value().sqrt() * scale;
        let finite = loss.is_finite() && grad_norm.is_finite();
        self.report = StepReport { loss, targets, grad_norm, finite, stop: words[COUNT + 1] > 0 };
        Ok(())
    }

    /// Returns when every rank has called it.
    pub(super) fn meet(&mut self, memory: &M, world: &mut Comm<M>) -> Result<(), Error> {
        let mut buffer = self.buffer.take().expect("scalars are reduced once at a time");
        memory.zero(Queue::Reduce, SliceMut::whole(&mut buffer))?;
        let pending = world.all_reduce(memory, Purpose::Scalars, None, vec![buffer])?;
        self.buffer = pending.wait_on(memory, Queue::Reduce)?.outputs.pop();
        Ok(())
    }

    /// Sums the statistics of a phase over the shard axis.
    pub(super) fn reduce_statistics(
        &mut self,
        memory: &M,
        comm: &mut Comm<M>,
        phase: usize,
    ) -> Result<(), Error> {
        let mut buffer = self.statistics[phase].take().expect("a phase is reduced once at a time");
        memory.write(Queue::Reduce, HostSlice::F64(&self.partial[phase]), SliceMut::whole(&mut buffer))?;
        let pending = comm.all_reduce(memory, Purpose::UpdateRule, None, vec![buffer])?;
        let buffer = pending.wait_on(memory, Queue::Reduce)?.outputs.pop().expect("one buffer came back");
        let mut sums = vec![0.0; self.partial[phase].len()];
        memory.read(Queue::Reduce, Slice::whole(&buffer), HostSliceMut::F64(&mut sums))?;
        self.statistics[phase] = Some(buffer);
        self.reduced.push(sums);
        Ok(())
    }
}
