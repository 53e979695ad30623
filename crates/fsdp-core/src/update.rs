//! The update-rule contract: an optimizer over shards of segments.
//!
//! A rule sees one segment's shard at a time: the master parameters, the reduced gradient, its own state tensors, and
//! the list of pieces (which elements of which parameter the shard holds). Statistics that span ranks are declared as
//! phases: for each phase, the rule computes this rank's part, and the engine sums it over the shard axis and passes
//! the sums back. They stay in device buffers throughout, so a rule on a device never makes the host wait for them.
//!
//! A rule that needs whole parameters (such as Muon) works on **directions**: it computes this rank's rows of them,
//! they are all-gathered over the shard axis, and the update reads them unsharded.

mod tables;

use std::collections::BTreeSet;

pub use crate::layout::Piece;
pub use tables::{RankTables, UnitTables};

use crate::dtype::DType;
use crate::error::Error;
use crate::layout::Segment;
use crate::memory::{Buffer, HostSlice, Memory, Slice, SliceMut};
use crate::model::ParamId;
use crate::rank::Queue;

/// Inputs of an update that are the same on every rank.
#[derive(Debug)]
pub struct StepScalars<'a, B> {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// [`GradientFactors`](crate::scalars::GradientFactors), on the device. If they are not `finite`, a rule leaves
    /// parameters, state and [`SegmentShard::not_finite`] unchanged.
    pub factors: Slice<'a, B>,
}

impl<B> Clone for StepScalars<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for StepScalars<'_, B> {}

/// One state tensor of a segment's shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Name (`exp_avg`).
    pub name: &'static str,
    /// Number of elements on this rank.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
    /// The parameter that each range of elements belongs to, in the order of offsets. Elements outside all pieces are
    /// padding.
    pub pieces: Vec<StatePiece>,
}

/// A contiguous range of a state tensor that holds values of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatePiece {
    /// The parameter.
    pub param: ParamId,
    /// Whether the tensor has a value per element, row, column or block of the parameter.
    pub axis: StateAxis,
    /// First element within the state tensor.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Index of the first element among all such values of the parameter.
    pub first: usize,
}

/// The part of a parameter that one value of optimizer state belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateAxis {
    /// One element of the parameter.
    Elements,
    /// One row of the parameter.
    Rows,
    /// One column of the parameter: all columns, with equal values, on every rank that holds rows of it.
    Columns,
    /// This many neighboring elements of a row of the parameter; the last block of a row may be shorter.
    Blocks(usize),
}

impl StateTensor {
    /// Creates a state tensor with one element per element of a shard of `pieces`.
    pub fn elementwise(name: &'static str, pieces: &[Piece], shard_len: usize, dtype: DType) -> Self {
        let pieces = pieces.iter().map(|piece| StatePiece {
            param: piece.param,
            axis: StateAxis::Elements,
            offset: piece.offset,
            len: piece.len,
            first: piece.param_offset,
        });
        Self { name, len: shard_len, dtype, pieces: pieces.collect() }
    }
}

/// The view of a segment's shard that an update rule receives.
#[derive(Debug)]
pub struct SegmentShard<'a, B> {
    /// Master parameters (exclusive).
    pub params: &'a mut B,
    /// Low-precision copy for compute (exclusive); `None` if parameters compute in the master dtype.
    pub low: Option<&'a mut B>,
    /// The reduced gradient, in the reduce dtype: the sum of micro-batch gradients, divided by the number of averaged
    /// ranks if ranks are averaged. The factors of [`StepScalars`] turn it into the gradient of the mean loss.
    pub gradient: &'a B,
    /// State tensors as declared by [`RuleState::state`]; zero before step 1.
    pub state: &'a mut [B],
    /// The ranges of parameters in the shard.
    pub pieces: &'a [Piece],
    /// The segment in a schedule, which determines the contents of the other shards. A piece covers whole rows of it,
    /// except that its last row may be covered only in part.
    pub segment: Option<&'a Segment>,
    /// The directions of the segment; `Some` in an update of a segment that holds a parameter of [`RuleState::whole`].
    pub whole: Option<WholeDirections<'a, B>>,
    /// One word (`I64`, exclusive), initially 0. A rule sets it to 1 in the pass that writes a value that is not
    /// finite: to a parameter, to its copy (see [`SegmentShard::largest_param`]) or to state, but not to padding. It is
    /// never cleared.
    pub not_finite: &'a mut B,
}

/// The directions of an unsharded segment, and scratch space for computing on them.
#[derive(Debug)]
pub struct WholeDirections<'a, B> {
    /// The rows that [`Stage::Direct`] wrote on all ranks, in the layout of the unsharded segment and in the
    /// reduce dtype; zeros elsewhere.
    pub directions: &'a B,
    /// Offset of this rank's shard in `directions`.
    pub start: usize,
    /// [`RuleState::scratch`] elements (exclusive) in the dtype of the master parameters, with unspecified contents.
    pub scratch: &'a mut B,
}

impl<B> WholeDirections<'_, B> {
    /// Reborrows the directions for a shorter lifetime.
    pub fn reborrow(&mut self) -> WholeDirections<'_, B> {
        WholeDirections { directions: self.directions, start: self.start, scratch: &mut *self.scratch }
    }
}

impl<B: Buffer> SegmentShard<'_, B> {
    /// The largest magnitude for which a parameter, and its low-precision copy if any, remains finite.
    pub fn largest_param(&self) -> f64 {
        self.low.as_ref().map_or(self.params.dtype(), |low| low.dtype()).largest()
    }

    /// Records that a value that is not finite was written.
    ///
    /// # Errors
    /// The errors of [`Memory::write`].
    pub fn note_not_finite<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        memory.write(Queue::Compute, HostSlice::I64(&[1]), SliceMut::whole(self.not_finite))
    }

    /// Updates the low-precision copy from the master, for rules that do not write it themselves.
    ///
    /// # Errors
    /// The errors of [`Memory::copy`].
    pub fn refresh<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        match &mut self.low {
            Some(low) => memory.copy(Queue::Compute, Slice::whole(self.params), SliceMut::whole(low)),
            None => Ok(()),
        }
    }
}

/// The buffers that an update rule needs, declared before any are allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RuleDecl {
    /// Dtypes of the state tensors of a segment.
    pub state: Vec<DType>,
    /// For each phase of cross-rank statistics, the number of `f64` values that are summed over the shard axis.
    pub phases: Vec<usize>,
    /// The parameters whose directions are gathered.
    pub whole: BTreeSet<ParamId>,
    /// Elements of the master dtype that an update of such a parameter needs as scratch.
    pub scratch: usize,
}

/// Matrix products of an `m x k` with a `k x n` matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Products {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each inner product.
    pub k: usize,
    /// Number of products.
    pub count: usize,
}

impl Products {
    /// Floating-point operations of all products together.
    pub fn flops(&self) -> u128 {
        [2, self.m, self.n, self.k, self.count].into_iter().map(|factor| factor as u128).product()
    }
}

/// The state and statistics of an update rule, independent of the memory it runs on.
pub trait RuleState {
    /// The state tensors of a segment's shard that has `shard_len` elements of `dtype` and holds `pieces`. Their number
    /// and dtypes must be the same for every shard.
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor>;

    /// For each phase of cross-rank statistics, the number of `f64` values that are summed over the shard axis. Empty
    /// for element-wise rules.
    fn phases(&self) -> Vec<usize> {
        Vec::new()
    }

    /// The parameters whose directions an update reads unsharded. Empty for element-wise rules.
    fn whole(&self) -> BTreeSet<ParamId> {
        BTreeSet::new()
    }

    /// Elements of the master dtype that an update of a segment with such a parameter needs as scratch.
    fn scratch(&self) -> usize {
        0
    }

    /// The matrix products in an update of a shard with these pieces.
    fn products(&self, _pieces: &[Piece]) -> Vec<Products> {
        Vec::new()
    }

    /// Declares the rule's buffers for master parameters of `dtype`.
    fn declare(&self, dtype: DType) -> RuleDecl {
        let state = self.state(&[], 0, dtype).into_iter().map(|tensor| tensor.dtype).collect();
        RuleDecl { state, phases: self.phases(), whole: self.whole(), scratch: self.scratch() }
    }
}

/// What an operation of a schedule asks of an update rule for a shard, as work of the compute queue.
#[derive(Debug)]
pub enum Stage<'a, B> {
    /// This shard's part of the statistics of the next phase. State may be updated.
    Statistics {
        /// The sums of the earlier phases.
        earlier: &'a [B],
        /// What the part is added to (`F64`, exclusive).
        sums: &'a mut B,
    },
    /// This shard's part of the directions of the parameters in [`RuleState::whole`]. State may be updated.
    Direct {
        /// As long as the shard (exclusive), in the reduce dtype, and zero.
        direction: &'a mut B,
    },
    /// The shard's new parameters, their low-precision copy and the state, given [`SegmentShard::whole`].
    Update {
        /// The sums of all phases.
        statistics: &'a [B],
    },
}

/// Runs an update rule on one kind of memory.
pub trait Updates<M: Memory>: RuleState + Send {
    /// Runs a stage of a step.
    ///
    /// # Errors
    /// The errors of the memory.
    fn run(
        &self,
        memory: &M,
        stage: Stage<'_, M::Buffer>,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
    ) -> Result<(), Error>;
}
