//! The [`Backend`] trait, which runs an [`Op`] on operands, and the types of its operands.
//!
//! All outputs are buffers of the caller. Work goes to the compute queue.

use std::ops::Range;

use fsdp_core::memory::{Arithmetic, Buffer, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{Error, Queue};

pub use crate::chunks::HeadChunks;
pub use crate::op::{AttentionDims, Dropout, HeadDims, IGNORED_TARGET, LinearDims, Orientation};

use crate::op::{Activation, Lookup, Op, Pass, Pointwise};
use crate::update::Part;

/// A written operand.
#[derive(Debug)]
pub struct Write<'a, B> {
    /// The range to write.
    pub slice: SliceMut<'a, B>,
    /// Whether to add to the current contents instead of overwriting them, if the operation supports it.
    pub accumulate: bool,
}

impl<'a, B: Buffer> Write<'a, B> {
    /// A range that is overwritten or updated.
    pub fn over(slice: SliceMut<'a, B>) -> Self {
        Self { slice, accumulate: false }
    }

    /// Reborrows the operand for a shorter lifetime.
    pub fn reborrow(&mut self) -> Write<'_, B> {
        Write { slice: self.slice.reborrow(), accumulate: self.accumulate }
    }
}

impl<'a, B> From<GradientTarget<'a, B>> for Write<'a, B> {
    fn from(GradientTarget { slice, accumulate }: GradientTarget<'a, B>) -> Self {
        Self { slice, accumulate }
    }
}

/// The operands of one call, in the order of [`Op::describe`].
#[derive(Debug)]
pub struct Operands<'o, 'a, B> {
    /// Read-only operands.
    pub reads: &'o [Slice<'a, B>],
    /// Written operands.
    pub writes: &'o mut [Write<'a, B>],
    /// Host-side facts about the micro-batch.
    pub batch: BatchFacts<'o>,
}

/// Host-side facts about a micro-batch that operations may need beside their operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchFacts<'o> {
    /// Dropout keys, one per sample, if the operation drops elements.
    pub keys: &'o [u64],
    /// The rows of each document, in order, if samples pack several documents that do not attend to each other.
    pub documents: &'o [Range<usize>],
    /// Number of counted targets of the micro-batch, in all chunks.
    pub targets: u64,
    /// Number of rows of the micro-batch up to the last counted target of their sample, in all chunks.
    pub counted_rows: usize,
    /// Per sample, the number of these rows among those of the operation. Later rows, mostly padding, contribute to no
    /// loss.
    pub lengths: &'o [usize],
    /// Per sample, where the keys end that any of its queries sees; empty if a query sees all keys up to its own.
    /// Only [`HostMemory`](crate::HostMemory) follows it.
    pub keys_ends: &'o [usize],
}

impl<'o> BatchFacts<'o> {
    /// Facts with dropout keys only.
    pub fn with_keys(keys: &'o [u64]) -> Self {
        Self { keys, ..Self::default() }
    }

    /// For each of `rows` rows, whether it counts.
    pub fn counted(&self, rows: usize) -> impl Iterator<Item = bool> + use<'o> {
        let seq = rows / self.lengths.len().max(1);
        self.lengths.iter().flat_map(move |&length| (0..seq).map(move |row| row < length))
    }

    /// The counted rows of each sequence that has any, in order, among `rows` rows of whole samples: of a document, or of a
    /// sample that is not packed.
    pub fn sequences(&self, rows: usize) -> Vec<Range<usize>> {
        let seq = rows / self.lengths.len().max(1);
        let counted = |rows: Range<usize>| {
            let sample = rows.start / seq;
            let end = rows.end.min(sample * seq + self.lengths[sample]);
            (rows.start < end).then_some(rows.start..end)
        };
        let samples = (0..self.lengths.len()).map(|sample| sample * seq..(sample + 1) * seq);
        match self.documents {
            [] => samples.filter_map(counted).collect(),
            documents => documents.iter().cloned().filter_map(counted).collect(),
        }
    }
}

impl<'o, 'a, B: Buffer> Operands<'o, 'a, B> {
    /// Reborrows the operands for a shorter lifetime.
    pub fn reborrow(&mut self) -> Operands<'_, 'a, B> {
        Operands { reads: self.reads, writes: self.writes, batch: self.batch }
    }

    /// Splits checked operands into fixed numbers of reads and writes and the remaining writes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split<const R: usize, const W: usize>(
        self,
    ) -> ([Slice<'a, B>; R], [Write<'o, B>; W], impl Iterator<Item = Write<'o, B>>) {
        let reads = *self.reads.first_chunk().expect(CHECKED);
        let mut writes = self.writes.iter_mut().map(Write::reborrow);
        (reads, std::array::from_fn(|_| writes.next().expect(CHECKED)), writes)
    }
}

const CHECKED: &str = "operands were checked";

/// Whether a backend ran an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that is not supported has not run"]
pub enum Outcome {
    /// The operation has run or is queued.
    Done,
    /// The backend does not implement the operation and has done nothing.
    Unsupported,
}

/// A [`Memory`] that executes operations.
pub trait Backend: Memory {
    /// Runs an operation on checked operands, if this backend implements it.
    ///
    /// # Errors
    /// Those of the memory ([`Error::Shared`], [`Error::Released`], [`Error::OutOfMemory`]).
    fn execute(&self, op: &Op, operands: Operands<'_, '_, Self::Buffer>) -> Result<Outcome, Error>;

    /// Runs a stage of a part of an update rule, if this backend has parts of its kind. If the factors of the step are not
    /// finite, nothing is changed.
    ///
    /// # Errors
    /// As [`Backend::execute`].
    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, Self::Buffer>,
        shard: &mut SegmentShard<'_, Self::Buffer>,
        scalars: &StepScalars<'_, Self::Buffer>,
    ) -> Result<Outcome, Error>;

    /// How many rows of logits the head computes at once. Memory predictions must use the same value.
    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Small
    }

    /// Marks the start of recomputation: everything computed from `kept` from now on repeats earlier work, for a
    /// backward pass that continues from `gradient`. Eager backends do nothing; a compiler must not reuse the earlier
    /// results.
    fn recompute(&self, _kept: &mut Self::Buffer, _gradient: &Self::Buffer) {}

    /// Checks the operands and runs an operation: by the memory, by this backend, or composed of other operations.
    ///
    /// # Errors
    /// As [`Backend::execute`].
    ///
    /// # Panics
    /// If the operands do not fit or the backend cannot run the operation.
    fn run(&self, op: &Op, mut operands: Operands<'_, '_, Self::Buffer>) -> Result<(), Error> {
        op.check(&operands);
        match *op {
            Op::Pointwise(Pointwise::Copy { .. } | Pointwise::Convert { .. }) => {
                let ([x], [y], _) = operands.split();
                return self.copy(Queue::Compute, x, y.slice);
            }
            Op::Pointwise(Pointwise::Accumulate { .. }) => {
                let ([x], [y], _) = operands.split();
                return self.compute(Queue::Compute, Arithmetic::Accumulate(x), y.slice);
            }
            Op::Lookup(Lookup::Positions { samples, seq }) => {
                let ([], [ids], _) = operands.split();
                let positions: Vec<u32> = (0..samples).flat_map(|_| 0..seq as u32).collect();
                return self.write(Queue::Compute, HostSlice::U32(&positions), ids.slice);
            }
            _ => {}
        }
        let is_done = self.execute(op, operands.reborrow())? == Outcome::Done
            || composed(self, op, operands)? == Outcome::Done;
        assert!(is_done, "this device has no way to run {}", op.name());
        Ok(())
    }
}

/// Composes [`Pass::BackwardRecompute`] of an activation from its two other passes, for backends without a fused one.
fn composed<M: Backend + ?Sized>(
    memory: &M,
    op: &Op,
    operands: Operands<'_, '_, M::Buffer>,
) -> Result<Outcome, Error> {
    let Op::Activation(activation @ Activation { pass: Pass::BackwardRecompute, .. }) = *op else {
        return Ok(Outcome::Unsupported);
    };
    let [backward, forward] =
        [Pass::Backward, Pass::Forward].map(|pass| Op::Activation(Activation { pass, ..activation }));
    let (inputs, ([], [mut dy], slopes)) = (operands.reads, operands.split());
    let mut slopes: Vec<_> = slopes.collect();
    let reads: Vec<_> = inputs.iter().copied().chain([dy.slice.as_slice()]).collect();
    memory.run(&backward, Operands { reads: &reads, writes: &mut slopes, batch: BatchFacts::default() })?;
    memory.run(
        &forward,
        Operands { reads: inputs, writes: &mut [dy.reborrow()], batch: BatchFacts::default() },
    )?;
    Ok(Outcome::Done)
}
