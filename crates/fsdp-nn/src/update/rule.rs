//! An update rule as a description: its parts, and what each of them keeps.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, Products, RuleState, SegmentShard, Stage, StateTensor, StepScalars, Updates};
use fsdp_core::{DType, Error};

use super::elementwise::{Elementwise, ElementwiseRule};
use super::{Adafactor, AdamW8bit, Muon};
use crate::backend::{Backend, Outcome};

/// One part of a rule. A device has a way to run each kind of part, or does not have it at all.
#[derive(Clone, Debug)]
pub enum Part {
    /// A formula for each element.
    Elementwise(Arc<dyn ElementwiseRule>),
    /// A formula on moments of 8 bits.
    Coded(AdamW8bit),
    /// Factored second moments, with sums over ranks.
    Factored(Adafactor),
    /// Orthogonalized directions of whole matrices.
    Orthogonal(Muon),
}

impl Part {
    fn name(&self) -> &'static str {
        match self {
            Part::Elementwise(_) => "element-wise rules",
            Part::Coded(_) => "moments of 8 bits",
            Part::Factored(_) => "factored moments",
            Part::Orthogonal(_) => "orthogonalized directions",
        }
    }
}

impl RuleState for Part {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        match self {
            Part::Elementwise(rule) => {
                let tensor = |name: &&'static str| StateTensor::elementwise(name, pieces, shard_len, dtype);
                rule.state().iter().map(tensor).collect()
            }
            Part::Coded(rule) => rule.state(pieces, dtype),
            Part::Factored(rule) => rule.state(pieces, shard_len, dtype),
            Part::Orthogonal(rule) => rule.state(pieces, dtype),
        }
    }

    fn phases(&self) -> Vec<usize> {
        match self {
            Part::Factored(rule) => rule.phases(),
            Part::Elementwise(_) | Part::Coded(_) | Part::Orthogonal(_) => Vec::new(),
        }
    }

    fn whole(&self) -> BTreeSet<ParamId> {
        match self {
            Part::Orthogonal(rule) => rule.whole(),
            Part::Elementwise(_) | Part::Coded(_) | Part::Factored(_) => BTreeSet::new(),
        }
    }

    fn scratch(&self) -> usize {
        match self {
            Part::Orthogonal(rule) => rule.scratch(),
            Part::Elementwise(_) | Part::Coded(_) | Part::Factored(_) => 0,
        }
    }

    fn products(&self, pieces: &[Piece]) -> Vec<Products> {
        match self {
            Part::Orthogonal(rule) => rule.products(pieces),
            Part::Elementwise(_) | Part::Coded(_) | Part::Factored(_) => Vec::new(),
        }
    }
}

/// An update rule: a part that updates the parameters, then element-wise parts that work on its results. The state is
/// that of all parts, one after the other.
#[derive(Clone, Debug)]
pub struct Rule {
    first: Part,
    others: Vec<Part>,
}

impl<R: Elementwise> From<R> for Part {
    fn from(rule: R) -> Self {
        Part::Elementwise(Arc::new(rule))
    }
}

impl From<AdamW8bit> for Part {
    fn from(rule: AdamW8bit) -> Self {
        Part::Coded(rule)
    }
}

impl From<Adafactor> for Part {
    fn from(rule: Adafactor) -> Self {
        Part::Factored(rule)
    }
}

impl From<Muon> for Part {
    fn from(rule: Muon) -> Self {
        Part::Orthogonal(rule)
    }
}

impl Rule {
    /// A rule of one part.
    pub fn new(part: impl Into<Part>) -> Self {
        Self { first: part.into(), others: Vec::new() }
    }

    /// The rule followed by another.
    #[must_use]
    pub fn then(mut self, rule: impl Elementwise) -> Self {
        self.others.push(rule.into());
        self
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl RuleState for Rule {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        self.parts().flat_map(|part| part.state(pieces, shard_len, dtype)).collect()
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

impl<M: Backend> Updates<M> for Rule {
    fn run(
        &self,
        memory: &M,
        mut stage: Stage<'_, M::Buffer>,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
    ) -> Result<(), Error> {
        let is_update = matches!(stage, Stage::Update { .. });
        let parts = self.parts().take(if is_update { usize::MAX } else { 1 });
        let mut start = 0;
        for part in parts {
            let count = part.state(&[], 0, DType::F32).len();
            let found = shard.state.len();
            assert!(
                start + count <= found,
                "{found} state tensors where the rule declared {}",
                start + count
            );
            let mut view = SegmentShard {
                params: &mut *shard.params,
                low: shard.low.as_deref_mut(),
                gradient: shard.gradient,
                state: &mut shard.state[start..start + count],
                pieces: shard.pieces,
                segment: shard.segment,
                whole: shard.whole.as_mut().map(|whole| whole.reborrow()),
                not_finite: &mut *shard.not_finite,
            };
            let outcome = memory.update(part, &mut stage, &mut view, scalars)?;
            assert_eq!(outcome, Outcome::Done, "this device has no {}", part.name());
            start += count;
        }
        Ok(())
    }
}
