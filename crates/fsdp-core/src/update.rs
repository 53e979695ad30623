//! The update-rule contract: an optimizer over shards of segments.
//!
//! A rule sees one segment's shard at a time: the master parameters, the reduced gradient and its own state
//! tensors, and the list of pieces (which elements of which parameter the shard holds). Statistics that
//! span ranks are declared as phases: the engine lets the rule compute this rank's part of every phase,
//! sums it over the shard axis, and hands the sums back. They stay in buffers of the memory all the way, so a
//! rule for a device never makes the host wait for them.
//!
//! A rule may have to see something of whole parameters: their **directions**. It makes this rank's rows of them, which are
//! gathered over the shard axis, and finds them whole when it updates.

mod tables;

use std::collections::BTreeSet;

pub use tables::{RankTables, UnitTables};

use crate::dtype::DType;
use crate::error::Error;
use crate::layout::Segment;
use crate::memory::{Buffer, HostSlice, Memory, Slice, SliceMut};
use crate::model::ParamId;
use crate::rank::Queue;

/// A contiguous run of elements of one parameter inside a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The parameter.
    pub param: ParamId,
    /// First element within the shard.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Index, within the parameter, of the first element.
    pub param_offset: usize,
    /// Row length of the parameter, 1 when it has fewer than two dimensions. Pieces are whole rows.
    pub row_len: usize,
}

/// Values of one step, the same on every rank.
#[derive(Debug)]
pub struct StepScalars<'a, B> {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// [`GradientFactors`](crate::scalars::GradientFactors), on the device. When they say that something was not
    /// finite, a rule leaves parameters and state untouched, and notes nothing.
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
    /// Elements on this rank.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
    /// Which of its elements belong to which parameter, in the order of offsets. Elements of no piece are
    /// padding.
    pub pieces: Vec<StatePiece>,
}

/// A contiguous run of a state tensor: values of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatePiece {
    /// The parameter.
    pub param: ParamId,
    /// Whether there is a value per element, per row, per column or per block of the parameter.
    pub axis: StateAxis,
    /// First element within the state tensor.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Where the run begins among all such values of the parameter.
    pub first: usize,
}

/// What of a parameter a value of the optimizer's state belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateAxis {
    /// Each element of the parameter.
    Elements,
    /// Each row of the parameter.
    Rows,
    /// Each column of the parameter: whole, and equal, on every rank that holds rows of it.
    Columns,
    /// So many neighbouring elements of a row of the parameter; the last block of a row may be shorter.
    Blocks(usize),
}

impl StateTensor {
    /// A state tensor with one element per element of the shard, which holds `pieces`.
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

/// A segment's shard as an update rule sees it.
#[derive(Debug)]
pub struct SegmentShard<'a, B> {
    /// Master parameters (exclusive).
    pub params: &'a mut B,
    /// Their copy in the dtype that computes (exclusive), where the two differ.
    pub low: Option<&'a mut B>,
    /// The reduced gradient, in the reduce dtype: the sum of micro-batch gradients or, with averages, that over the averaged
    /// ranks; the factors of [`StepScalars`] make it the gradient of the mean loss.
    pub gradient: &'a B,
    /// State tensors, as [`RuleState::state`] declared them; zero before step 1.
    pub state: &'a mut [B],
    /// What the shard holds.
    pub pieces: &'a [Piece],
    /// The segment, within a schedule: what its other shards hold. Pieces are whole rows of it, or the begin of some.
    pub segment: Option<&'a Segment>,
    /// The directions of the segment, in an update of one that holds a parameter of [`RuleState::whole`].
    pub whole: Option<WholeDirections<'a, B>>,
    /// One word (`I64`, exclusive), 0 at first. A rule sets it to 1 in the pass that writes a value which is not finite:
    /// of a parameter, of its copy (see [`SegmentShard::largest_param`]) or of state, but not of padding. Nobody
    /// clears it.
    pub not_finite: &'a mut B,
}

/// The directions of a whole segment, and room to work on them.
#[derive(Debug)]
pub struct WholeDirections<'a, B> {
    /// What [`UpdateRule::direct`] wrote on all ranks, in the layout of the unsharded segment and in the reduce dtype; zeros
    /// elsewhere.
    pub directions: &'a B,
    /// Where in them this rank's shard begins.
    pub start: usize,
    /// [`RuleState::scratch`] elements (exclusive), in the dtype of the master parameters, with any contents.
    pub scratch: &'a mut B,
}

impl<B> WholeDirections<'_, B> {
    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> WholeDirections<'_, B> {
        WholeDirections { directions: self.directions, start: self.start, scratch: &mut *self.scratch }
    }
}

impl<B: Buffer> SegmentShard<'_, B> {
    /// The largest magnitude of a parameter that is finite, and in the copy too, where there is one.
    pub fn largest_param(&self) -> f64 {
        self.low.as_ref().map_or(self.params.dtype(), |low| low.dtype()).largest()
    }

    /// Notes that a value which was written is not finite.
    ///
    /// # Errors
    /// Those of [`Memory::write`].
    pub fn note_not_finite<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        memory.write(Queue::Compute, HostSlice::I64(&[1]), SliceMut::whole(self.not_finite))
    }

    /// Brings the copy up to date, for rules that do not write it in passing.
    ///
    /// # Errors
    /// Those of [`Memory::copy`].
    pub fn refresh<M: Memory<Buffer = B>>(&mut self, memory: &M) -> Result<(), Error> {
        match &mut self.low {
            Some(low) => memory.copy(Queue::Compute, Slice::whole(self.params), SliceMut::whole(low)),
            None => Ok(()),
        }
    }
}

/// What an update rule says of its buffers before there are any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RuleDecl {
    /// Types of the state tensors of a segment.
    pub state: Vec<DType>,
    /// For each phase of cross-rank statistics, how many `f64` are summed over the shard axis.
    pub phases: Vec<usize>,
    /// The parameters whose directions are gathered.
    pub whole: BTreeSet<ParamId>,
    /// Elements of the master dtype that an update of one of them needs beside.
    pub scratch: usize,
}

/// Products of an `m x k` with a `k x n` matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Products {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// How many.
    pub count: usize,
}

impl Products {
    /// Floating-point operations of all of them.
    pub fn flops(&self) -> u128 {
        [2, self.m, self.n, self.k, self.count].into_iter().map(|factor| factor as u128).product()
    }
}

/// What an update rule keeps and sums, whatever memory it works in.
pub trait RuleState {
    /// The state tensors of a segment shard of `shard_len` elements of `dtype`, holding `pieces`: as many, of the same
    /// types, for every shard.
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor>;

    /// For each phase of cross-rank statistics, how many `f64` are summed over the shard axis. Empty for
    /// element-wise rules.
    fn phases(&self) -> Vec<usize> {
        Vec::new()
    }

    /// The parameters whose directions an update sees whole. None for element-wise rules.
    fn whole(&self) -> BTreeSet<ParamId> {
        BTreeSet::new()
    }

    /// Elements of the master dtype that an update of a segment with such a parameter works in.
    fn scratch(&self) -> usize {
        0
    }

    /// The products of matrices that an update of a shard with these pieces makes.
    fn products(&self, _pieces: &[Piece]) -> Vec<Products> {
        Vec::new()
    }

    /// The rule's buffers, for master parameters of `dtype`.
    fn declare(&self, dtype: DType) -> RuleDecl {
        let state = self.state(&[], 0, dtype).into_iter().map(|tensor| tensor.dtype).collect();
        RuleDecl { state, phases: self.phases(), whole: self.whole(), scratch: self.scratch() }
    }
}

/// An optimizer, in one memory.
pub trait UpdateRule<M: Memory>: RuleState + Send {
    /// Adds this shard's part of the statistics of the next phase to `sums` (`F64`, exclusive), given the sums of the
    /// earlier phases, as work of the compute queue. May advance state.
    ///
    /// # Errors
    /// Those of the memory.
    fn statistics(
        &mut self,
        _memory: &M,
        _shard: &mut SegmentShard<'_, M::Buffer>,
        _scalars: &StepScalars<'_, M::Buffer>,
        _earlier: &[M::Buffer],
        _sums: &mut M::Buffer,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Writes this shard's part of the directions of the parameters of [`RuleState::whole`] to `direction`, which is as long as
    /// the shard, of the reduce dtype and zero (exclusive), as work of the compute queue. May advance state.
    ///
    /// # Errors
    /// Those of the memory.
    fn direct(
        &mut self,
        _memory: &M,
        _shard: &mut SegmentShard<'_, M::Buffer>,
        _scalars: &StepScalars<'_, M::Buffer>,
        _direction: &mut M::Buffer,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Updates the shard's parameters, their copy, and the state, given the sums of all phases and, in
    /// [`SegmentShard::whole`], the directions, as work of the compute queue.
    ///
    /// # Errors
    /// Those of the memory.
    fn update(
        &mut self,
        memory: &M,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
        statistics: &[M::Buffer],
    ) -> Result<(), Error>;
}
