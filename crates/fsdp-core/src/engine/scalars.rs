//! The path of a step's scalars: losses of the program, norms and the non-finite flag of earlier updates are reduced in
//! one integer all-reduce, read by updates, and reported to the host on request. Also the statistics of an update rule.
//!
//! Two buffers alternate: the report of one step may be read while the next one runs, so the host never waits inside a
//! step.

use std::collections::VecDeque;

use super::table::Table;
use crate::comm::{Comm, Purpose, ReduceOp};
use crate::error::Error;
use crate::memory::{Arithmetic, Buffer, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use crate::plan::Plan;
use crate::program::Program;
use crate::rank::Queue;
use crate::scalars::{COUNT, GradientFactors, NOT_FINITE, SCALAR_WORDS, SQUARED_NORM, StepReport, Tallies};
use crate::schedule::{BufferId, Lasting};

/// The caller's inputs to a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Maximum L2 norm of the gradient; `None` disables clipping.
    pub grad_clip: Option<f64>,
    /// The factor that the program multiplies gradients by, a power of two; `None` if it does not scale them. A step
    /// that is not finite then does not affect later ones, which may begin only after its report was read.
    pub loss_scale: Option<f64>,
    /// Whether this rank asks to stop after this step.
    pub stop: bool,
}

/// A flag of all ranks, combined between two steps.
pub(super) struct ReducedFlags {
    /// Whether any rank has set it.
    pub(super) any: bool,
    /// Whether everything that the updates so far wrote, on any rank, is finite.
    pub(super) state_finite: bool,
}

/// A step that was issued and whose report has not been read.
struct UnreadReport<E> {
    /// Whether its scalars are in the spare buffer, because a later step uses the main one.
    in_spare: bool,
    /// The divisor of its gradient.
    divisor: f64,
    ready: E,
}

/// Host-side state of the scalars; the buffers themselves are in the table.
pub(super) struct Scalars<M: Memory> {
    scalars: BufferId,
    spare: BufferId,
    factors: BufferId,
    not_finite: BufferId,
    tallies: Tallies,
    unread: VecDeque<UnreadReport<M::Event>>,
    /// Number of ranks that the gradient is averaged over.
    averaged_ranks: usize,
    stop: bool,
    input: Option<StepInput>,
}

/// The words of the scalars to which squared norms are added.
pub(super) fn squared_norm<B: Buffer>(scalars: &mut B) -> SliceMut<'_, B> {
    SliceMut::new(scalars, SQUARED_NORM.start, SQUARED_NORM.len())
}

impl<M: Memory> Scalars<M> {
    pub(super) fn new(memory: &M, plan: &Plan, table: &mut Table<M::Buffer>) -> Result<Self, Error> {
        let (step, tallies) = (&plan.step, plan.spec.tallies);
        let Lasting { scalars, spare_scalars: spare, factors, not_finite, .. } = step.lasting;
        let initial = HostSlice::F64(&GradientFactors::START);
        memory.write(Queue::Compute, initial, SliceMut::whole(table.get_mut(factors)?))?;
        let (unread, averaged_ranks) = (VecDeque::new(), step.averaged_ranks);
        let (stop, input) = (false, None);
        Ok(Self { scalars, spare, factors, not_finite, tallies, unread, averaged_ranks, stop, input })
    }

    /// Begins a step (with its input) or an evaluation.
    ///
    /// # Panics
    /// When two steps are unread, or one with loss scaling.
    pub(super) fn begin(&mut self, table: &mut Table<M::Buffer>, input: Option<StepInput>, stop: bool) {
        let scales = input.is_some_and(|input| input.loss_scale.is_some());
        assert!(
            !scales || self.is_read(),
            "the scale of a loss follows from the reports of all steps before"
        );
        self.free_scalars(table);
        self.stop = stop;
        self.input = input;
    }

    /// Frees the main buffer for new scalars: those of an unread step move to the spare buffer.
    fn free_scalars(&mut self, table: &mut Table<M::Buffer>) {
        assert!(
            self.unread.len() < 2,
            "the report of a step is read before the step after the next one begins"
        );
        if let Some(unread) = self.unread.front_mut() {
            table.swap(self.scalars, self.spare);
            unread.in_spare = true;
        }
    }

    /// Initializes the words for a step: zeros, and the non-finite flag of earlier updates.
    pub(super) fn clear(&self, memory: &M, table: &mut Table<M::Buffer>, queue: Queue) -> Result<(), Error> {
        memory.zero(queue, SliceMut::whole(table.get_mut(self.scalars)?))?;
        let (not_finite, words) = table.pair(self.not_finite, self.scalars)?;
        memory.copy(queue, Slice::whole(not_finite), SliceMut::new(words, NOT_FINITE, 1))
    }

    /// Whether the reports of all issued steps have been read.
    pub(super) fn is_read(&self) -> bool {
        self.unread.is_empty()
    }

    /// The input of the current training step.
    pub(super) fn input(&self) -> StepInput {
        self.input.expect("only training steps update")
    }

    /// Returns the oldest report that has not been read; blocks until it is available.
    pub(super) fn report(
        &mut self,
        memory: &M,
        table: &Table<M::Buffer>,
    ) -> Result<Option<StepReport>, Error> {
        let Some(UnreadReport { in_spare, divisor, ready }) = self.unread.pop_front() else {
            return Ok(None);
        };
        let mut words = vec![0; self.tallies.scalar_words()];
        memory.wait(Queue::Download, &ready);
        let buffer = table.get(if in_spare { self.spare } else { self.scalars })?;
        memory.read(Queue::Download, Slice::whole(buffer), HostSliceMut::I64(&mut words))?;
        Ok(Some(StepReport::with(&words, self.tallies, divisor)))
    }

    /// Sums loss, target count, norm, flags and the model's tallies over all ranks, and computes the gradient factors.
    pub(super) fn reduce<P: Program<M>>(
        &mut self,
        memory: &M,
        table: &mut Table<M::Buffer>,
        world: &mut Comm<M>,
        program: &mut P,
    ) -> Result<(), Error> {
        let (stop, words) = (i64::from(self.stop), table.get_mut(self.scalars)?);
        let targets = program.take_loss(memory, Queue::Reduce, SliceMut::whole(words))?;
        let targets = i64::try_from(targets).expect("targets of a step fit 63 bits");
        memory.write(Queue::Reduce, HostSlice::I64(&[targets, stop]), SliceMut::new(words, COUNT, 2))?;
        self.all_reduce(memory, table, world)?;
        let loss_scale = self.input.and_then(|input| input.loss_scale);
        let divisor = self.averaged_ranks as f64 / loss_scale.unwrap_or(1.0);
        if let Some(StepInput { grad_clip, .. }) = self.input {
            let (words, factors) = table.pair(self.scalars, self.factors)?;
            let (words, mut factors) = (Slice::new(words, 0, SCALAR_WORDS), SliceMut::whole(factors));
            if loss_scale.is_some() {
                let initial = HostSlice::F64(&GradientFactors::START);
                memory.write(Queue::Reduce, initial, factors.reborrow())?;
            }
            let operation = Arithmetic::GradientFactors { scalars: words, divisor, grad_clip };
            memory.compute(Queue::Reduce, operation, factors)?;
        }
        self.unread.push_back(UnreadReport { in_spare: false, divisor, ready: memory.record(Queue::Reduce) });
        Ok(())
    }

    fn all_reduce(
        &mut self,
        memory: &M,
        table: &mut Table<M::Buffer>,
        world: &mut Comm<M>,
    ) -> Result<(), Error> {
        let buffers = vec![table.take(self.scalars)?];
        let pending = world.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, buffers)?;
        table.put_all(&[self.scalars], pending.wait_on(memory, Queue::Reduce)?.outputs);
        Ok(())
    }

    /// Combines a flag of all ranks. Returns when every rank has called it and its updates are done.
    pub(super) fn reduce_flag(
        &mut self,
        memory: &M,
        table: &mut Table<M::Buffer>,
        world: &mut Comm<M>,
        flag: bool,
    ) -> Result<ReducedFlags, Error> {
        self.free_scalars(table);
        memory.wait(Queue::Reduce, &memory.record(Queue::Compute));
        self.clear(memory, table, Queue::Reduce)?;
        let target = SliceMut::new(table.get_mut(self.scalars)?, COUNT, 1);
        memory.write(Queue::Reduce, HostSlice::I64(&[i64::from(flag)]), target)?;
        self.all_reduce(memory, table, world)?;
        let mut words = [0; SCALAR_WORDS];
        let source = Slice::new(table.get(self.scalars)?, 0, SCALAR_WORDS);
        memory.read(Queue::Reduce, source, HostSliceMut::I64(&mut words))?;
        Ok(ReducedFlags { any: words[COUNT] > 0, state_finite: words[NOT_FINITE] == 0 })
    }
}
