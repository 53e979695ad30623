//! The scalars of a step on their way: gathered by blocks, norms and the updates of the step before, reduced in one
//! integer all-reduce, used by updates, read by the host when it asks; and the statistics that an update rule declares.
//!
//! There are two buffers, used in turn: the report of one step may be read while the next one is under way, so that
//! the host never waits inside a step.

use std::collections::VecDeque;

use crate::comm::{Comm, Purpose, ReduceOp};
use crate::dtype::DType;
use crate::error::Error;
use crate::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use crate::program::Program;
use crate::rank::Queue;
use crate::scalars::{COUNT, GradientFactors, LOSS, NORM, NOT_FINITE, SCALAR_WORDS, ScalarValues};
use crate::update::UpdateRule;

/// The invariant of the two buffers.
const REDUCED_ONCE: &str = "scalars are reduced once at a time";

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
    /// Whether loss, norm, and parameters and optimizer state before the update are finite. When they are not, neither
    /// this step nor a later one updates parameters and state.
    pub finite: bool,
    /// Whether parameters and state are. If not, the first report that says so names the step after the one that wrote
    /// such a value.
    pub state_finite: bool,
    /// Whether any rank asked to stop.
    pub stop: bool,
}

impl From<ScalarValues> for StepReport {
    fn from(values: ScalarValues) -> Self {
        let ScalarValues { loss, targets, grad_norm, stop, state_finite, scale: _ } = values;
        Self { loss, targets, grad_norm, finite: values.is_finite(), state_finite, stop }
    }
}

/// What all ranks say between two steps.
pub(super) struct Answers {
    /// Whether any rank says yes.
    pub(super) any: bool,
    /// Whether all that the updates so far wrote, on any rank, is finite.
    pub(super) state_finite: bool,
}

/// A step that was issued and whose report was not read yet.
struct Unread<E> {
    buffer: usize,
    ready: E,
}

pub(super) struct Scalars<M: Memory> {
    buffers: [Option<M::Buffer>; 2],
    /// The one of the step under way.
    current: usize,
    unread: VecDeque<Unread<M::Event>>,
    factors: M::Buffer,
    /// One word: 1 from the update on that wrote a value which is not finite on this rank.
    pub(super) not_finite: M::Buffer,
    /// Of how many ranks the measured gradient is the average.
    averaged_ranks: usize,
    /// Of every phase of the update rule: this rank's part, and from its all-reduce on the sum.
    pub(super) statistics: Vec<M::Buffer>,
    stop: bool,
    input: Option<StepInput>,
}

impl<M: Memory> Scalars<M> {
    pub(super) fn new(memory: &M, rule: &dyn UpdateRule<M>, averaged_ranks: usize) -> Result<Self, Error> {
        // Written now, so that they have their storage from the first step on.
        let allocate = |dtype, len| -> Result<_, Error> {
            let mut buffer = memory.allocate(Category::CommStaging, dtype, len)?;
            memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
            Ok(buffer)
        };
        let mut factors = allocate(DType::F64, GradientFactors::LEN)?;
        let start = HostSlice::F64(&GradientFactors::START);
        memory.write(Queue::Compute, start, SliceMut::whole(&mut factors))?;
        let words = || allocate(DType::I64, SCALAR_WORDS).map(Some);
        let statistics = rule.phases().into_iter().map(|len| allocate(DType::F64, len));
        Ok(Self {
            buffers: [words()?, words()?],
            current: 0,
            unread: VecDeque::new(),
            factors,
            not_finite: allocate(DType::I64, 1)?,
            averaged_ranks,
            statistics: statistics.collect::<Result<_, _>>()?,
            stop: false,
            input: None,
        })
    }

    /// Begins a step (with its input) or an evaluation.
    ///
    /// # Panics
    /// When two steps are unread.
    pub(super) fn begin(&mut self, memory: &M, input: Option<StepInput>, stop: bool) -> Result<(), Error> {
        self.current = self.free();
        // The updates of the step before are earlier work of this queue.
        self.clear(memory, Queue::Compute)?;
        self.stop = stop;
        self.input = input;
        if input.is_none() {
            return Ok(());
        }
        self.statistics.iter_mut().try_for_each(|sums| memory.zero(Queue::Compute, SliceMut::whole(sums)))
    }

    /// The buffer that no unread step has.
    fn free(&self) -> usize {
        assert!(
            self.unread.len() < 2,
            "the report of a step is read before the step after the next one begins"
        );
        self.unread.front().map_or(0, |unread| 1 - unread.buffer)
    }

    fn words(&mut self) -> &mut M::Buffer {
        self.buffers[self.current].as_mut().expect(REDUCED_ONCE)
    }

    /// Sets the words to what is known before a step: what earlier updates wrote.
    fn clear(&mut self, memory: &M, queue: Queue) -> Result<(), Error> {
        let words = self.buffers[self.current].as_mut().expect(REDUCED_ONCE);
        memory.zero(queue, SliceMut::whole(words))?;
        memory.copy(queue, Slice::whole(&self.not_finite), SliceMut::new(words, NOT_FINITE, 1))
    }

    /// Whether the reports of all issued steps were read.
    pub(super) fn is_read(&self) -> bool {
        self.unread.is_empty()
    }

    /// Where squared norms are added.
    pub(super) fn norm(&mut self) -> SliceMut<'_, M::Buffer> {
        SliceMut::new(self.words(), NORM.start, NORM.len())
    }

    /// The report of the oldest step that was not read yet; blocks until it is there.
    pub(super) fn report(&mut self, memory: &M) -> Result<Option<StepReport>, Error> {
        let Some(Unread { buffer, ready }) = self.unread.pop_front() else { return Ok(None) };
        let mut words = [0; SCALAR_WORDS];
        memory.wait(Queue::Download, &ready);
        let buffer = self.buffers[buffer].as_ref().expect("the scalars of an issued step came back");
        memory.read(Queue::Download, Slice::whole(buffer), HostSliceMut::I64(&mut words))?;
        Ok(Some(ScalarValues::of(&words, self.averaged_ranks).into()))
    }

    /// The step's number and learning rate, and the factors as a handle of their own.
    pub(super) fn for_update(&self) -> (StepInput, M::Buffer) {
        (self.input.expect("only training steps update"), self.factors.clone())
    }

    /// Sums loss, count, norm and flags over all ranks, and derives what updates need.
    pub(super) fn reduce<P: Program<M>>(
        &mut self,
        memory: &M,
        world: &mut Comm<M>,
        program: &mut P,
    ) -> Result<(), Error> {
        let stop = i64::from(self.stop);
        let loss = SliceMut::new(self.words(), LOSS.start, LOSS.len());
        let targets = program.take_loss(memory, Queue::Reduce, loss)?;
        let targets = i64::try_from(targets).expect("targets of a step fit 63 bits");
        let count = SliceMut::new(self.words(), COUNT, 2);
        memory.write(Queue::Reduce, HostSlice::I64(&[targets, stop]), count)?;
        self.all_reduce(memory, world)?;
        if let Some(StepInput { grad_clip, .. }) = self.input {
            let words = self.buffers[self.current].as_ref().expect("the scalars came back");
            let factors = SliceMut::whole(&mut self.factors);
            let (words, ranks) = (Slice::whole(words), self.averaged_ranks);
            memory.gradient_factors(Queue::Reduce, words, ranks, grad_clip, factors)?;
        }
        self.unread.push_back(Unread { buffer: self.current, ready: memory.record(Queue::Reduce) });
        Ok(())
    }

    fn all_reduce(&mut self, memory: &M, world: &mut Comm<M>) -> Result<(), Error> {
        let buffer = self.buffers[self.current].take().expect(REDUCED_ONCE);
        let pending = world.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?;
        self.buffers[self.current] = pending.wait_on(memory, Queue::Reduce)?.outputs.pop();
        Ok(())
    }

    /// What all ranks answer together. Returns when every rank has called it, after its updates.
    pub(super) fn ask(&mut self, memory: &M, world: &mut Comm<M>, yes: bool) -> Result<Answers, Error> {
        self.current = self.free();
        memory.wait(Queue::Reduce, &memory.record(Queue::Compute));
        self.clear(memory, Queue::Reduce)?;
        let votes = SliceMut::new(self.words(), COUNT, 1);
        memory.write(Queue::Reduce, HostSlice::I64(&[i64::from(yes)]), votes)?;
        self.all_reduce(memory, world)?;
        let mut ranks = [0; SCALAR_WORDS];
        memory.read(Queue::Reduce, Slice::whole(self.words()), HostSliceMut::I64(&mut ranks))?;
        Ok(Answers { any: ranks[COUNT] > 0, state_finite: ranks[NOT_FINITE] == 0 })
    }

    /// Sums the statistics of a phase over the shard axis.
    pub(super) fn reduce_statistics(
        &mut self,
        memory: &M,
        comm: &mut Comm<M>,
        phase: usize,
    ) -> Result<(), Error> {
        let partial = self.statistics.remove(phase);
        let pending = comm.all_reduce(memory, ReduceOp::Sum, Purpose::UpdateRule, None, vec![partial])?;
        let sums = pending.wait_on(memory, Queue::Reduce)?.outputs.pop().expect("one buffer came back");
        self.statistics.insert(phase, sums);
        Ok(())
    }
}
