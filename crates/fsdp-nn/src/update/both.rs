//! Two update rules in sequence.

use std::collections::BTreeSet;
use std::ops::Range;

use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, Products, RuleState, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error, Memory};

/// A rule followed by a second one, without statistics or directions, that works on the first one's results. The
/// state is the concatenation of both states.
pub struct Both<M: Memory> {
    first: Box<dyn UpdateRule<M>>,
    second: Box<dyn UpdateRule<M>>,
}

impl<M: Memory> Both<M> {
    /// Combines two rules.
    ///
    /// # Panics
    /// If the second has statistics or directions.
    pub fn new(first: Box<dyn UpdateRule<M>>, second: Box<dyn UpdateRule<M>>) -> Self {
        assert!(second.phases().is_empty(), "the second rule has no statistics");
        assert!(second.whole().is_empty(), "the second rule has no directions");
        Self { first, second }
    }
}

impl<M: Memory> RuleState for Both<M> {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        let [first, second] = [&self.first, &self.second].map(|rule| rule.state(pieces, shard_len, dtype));
        [first, second].concat()
    }

    fn phases(&self) -> Vec<usize> {
        self.first.phases()
    }

    fn whole(&self) -> BTreeSet<ParamId> {
        self.first.whole()
    }

    fn scratch(&self) -> usize {
        self.first.scratch()
    }

    fn products(&self, pieces: &[Piece]) -> Vec<Products> {
        self.first.products(pieces)
    }
}

impl<M: Memory> UpdateRule<M> for Both<M> {
    fn statistics(
        &mut self,
        memory: &M,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
        earlier: &[M::Buffer],
        sums: &mut M::Buffer,
    ) -> Result<(), Error> {
        let count = self.first.state(&[], 0, DType::F32).len();
        self.first.statistics(memory, &mut with_state(shard, 0..count), scalars, earlier, sums)
    }

    fn direct(
        &mut self,
        memory: &M,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
        direction: &mut M::Buffer,
    ) -> Result<(), Error> {
        let count = self.first.state(&[], 0, DType::F32).len();
        self.first.direct(memory, &mut with_state(shard, 0..count), scalars, direction)
    }

    fn update(
        &mut self,
        memory: &M,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
        statistics: &[M::Buffer],
    ) -> Result<(), Error> {
        let count = self.first.state(&[], 0, DType::F32).len();
        let all = shard.state.len();
        self.first.update(memory, &mut with_state(shard, 0..count), scalars, statistics)?;
        self.second.update(memory, &mut with_state(shard, count..all), scalars, &[])
    }
}

/// Returns the shard with a range of its state tensors.
fn with_state<'s, B>(shard: &'s mut SegmentShard<'_, B>, state: Range<usize>) -> SegmentShard<'s, B> {
    SegmentShard {
        params: &mut *shard.params,
        low: shard.low.as_deref_mut(),
        gradient: shard.gradient,
        state: &mut shard.state[state],
        pieces: shard.pieces,
        segment: shard.segment,
        whole: shard.whole.as_mut().map(|whole| whole.reborrow()),
        not_finite: &mut *shard.not_finite,
    }
}
