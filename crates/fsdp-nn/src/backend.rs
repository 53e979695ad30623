//! What a backend does: it runs an [`Op`] on operands.
//!
//! All outputs are buffers of the caller. Work goes to the compute queue.

use std::ops::Range;

use fsdp_core::memory::{Buffer, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{Error, Queue};

pub use crate::chunks::HeadChunks;
pub use crate::op::{AttentionDims, Dropout, HeadDims, IGNORED_TARGET, LinearDims, Orientation};

use crate::op::{Activation, Lookup, Op, Pass, Pointwise};

/// An operand that is written.
#[derive(Debug)]
pub struct Write<'a, B> {
    /// The range.
    pub slice: SliceMut<'a, B>,
    /// Whether to add to what is there, where the operation can, instead of overwriting it.
    pub accumulate: bool,
}

impl<'a, B: Buffer> Write<'a, B> {
    /// A range that is overwritten or updated.
    pub fn over(slice: SliceMut<'a, B>) -> Self {
        Self { slice, accumulate: false }
    }

    /// The same operand for a shorter time.
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
    /// What is only read.
    pub reads: &'o [Slice<'a, B>],
    /// What is written.
    pub writes: &'o mut [Write<'a, B>],
    /// What is known on the host of the micro-batch.
    pub batch: BatchFacts<'o>,
}

/// What an operation may want to know of a micro-batch on the host, beside its operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchFacts<'o> {
    /// Dropout keys, one per sample, where the operation drops anything.
    pub keys: &'o [u64],
    /// The rows of each document, in order, where samples hold several that do not see each other.
    pub documents: &'o [Range<usize>],
    /// Targets that count.
    pub targets: u64,
    /// Of each sample the rows up to its last counted target: what is behind them, padding above all, has no part in any loss.
    pub lengths: &'o [usize],
}

impl<'o> BatchFacts<'o> {
    /// Dropout keys alone.
    pub fn with_keys(keys: &'o [u64]) -> Self {
        Self { keys, ..Self::default() }
    }

    /// Which of so many rows count.
    pub fn counted(&self, rows: usize) -> impl Iterator<Item = bool> + use<'o> {
        let seq = rows / self.lengths.len().max(1);
        self.lengths.iter().flat_map(move |&length| (0..seq).map(move |row| row < length))
    }
}

impl<'o, 'a, B: Buffer> Operands<'o, 'a, B> {
    /// The same operands for a shorter time.
    pub fn reborrow(&mut self) -> Operands<'_, 'a, B> {
        Operands { reads: self.reads, writes: self.writes, batch: self.batch }
    }

    /// Operands that were checked, by number: what is read, what is written, and one more written where there is one.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn split<const R: usize, const W: usize>(
        self,
    ) -> ([Slice<'a, B>; R], [Write<'o, B>; W], impl Iterator<Item = Write<'o, B>>) {
        let reads = *self.reads.first_chunk().expect(CHECKED);
        let mut writes = self.writes.iter_mut().map(Write::reborrow);
        (reads, std::array::from_fn(|_| writes.next().expect(CHECKED)), writes)
    }
}

const CHECKED: &str = "operands were checked";

/// Whether a device has run an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that is not supported has not run"]
pub enum Outcome {
    /// It has, or has it on its queue.
    Done,
    /// It has no way to run it, and has done nothing.
    Unsupported,
}

/// A memory that can compute.
pub trait Backend: Memory {
    /// Runs an operation on operands that were checked, if this backend has it.
    ///
    /// # Errors
    /// Those of the memory ([`Error::Shared`], [`Error::Released`], [`Error::OutOfMemory`]).
    fn execute(&self, op: &Op, operands: Operands<'_, '_, Self::Buffer>) -> Result<Outcome, Error>;

    /// How many rows of logits the head makes at once. Predictions of memory must be made for the same.
    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Small
    }

    /// What is computed of `kept` from now on was computed before, and is computed again for a backward that continues from
    /// `gradient`. Devices that run operations when they are told to have nothing to do; a compiler must not take the first results.
    fn recompute(&self, _kept: &mut Self::Buffer, _gradient: &Self::Buffer) {}

    /// Checks operands, and runs an operation on them: by the memory, by this backend, or made of other operations.
    ///
    /// # Errors
    /// As [`Backend::execute`].
    ///
    /// # Panics
    /// When operands do not fit, or this backend does not have the operation.
    fn run(&self, op: &Op, mut operands: Operands<'_, '_, Self::Buffer>) -> Result<(), Error> {
        op.check(&operands);
        match *op {
            Op::Pointwise(Pointwise::Copy { .. }) => {
                let ([x], [y], _) = operands.split();
                return self.copy(Queue::Compute, x, y.slice);
            }
            Op::Pointwise(Pointwise::Accumulate { .. }) => {
                let ([x], [y], _) = operands.split();
                return self.accumulate(Queue::Compute, x, y.slice);
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

/// [`Pass::BackwardAgain`] of activations is made of the two other passes where a device does not have them in one.
fn composed<M: Backend + ?Sized>(
    memory: &M,
    op: &Op,
    operands: Operands<'_, '_, M::Buffer>,
) -> Result<Outcome, Error> {
    let Op::Activation(again @ Activation { pass: Pass::BackwardAgain, .. }) = *op else {
        return Ok(Outcome::Unsupported);
    };
    let [backward, forward] =
        [Pass::Backward, Pass::Forward].map(|pass| Op::Activation(Activation { pass, ..again }));
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
