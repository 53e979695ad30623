//! What is kept of a gradient: sums and a sample. The gradient itself is given up block by block.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_core::model::{ModelSpec, ParamId};

use super::sample::Sample;
use super::sums::{Around, Sums, clip, total};
use crate::error::TrainError;

/// A gradient compared with the one that was used.
pub(super) struct Measured {
    /// By parameter; frozen ones have none.
    pub(super) sums: Vec<Sums>,
    /// What each rank holds, by split, parameter and rank.
    pub(super) shards: Vec<(Split, Vec<Vec<Sums>>)>,
    pub(super) sample: Sample,
    /// Of each parameter that is one expert's, the expert's number and the number of experts.
    experts: Vec<Option<(usize, usize)>>,
}

/// How parameters are split among ranks, as PyTorch splits tensors by rows (`chunk`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) ranks: usize,
    /// Whether the experts of a layer are one tensor, as transformers 5 has them in memory: then its rows are whole experts.
    pub(super) has_stacks: bool,
}

/// The ranks of splits that are looked at.
const RANKS: [usize; 6] = [2, 3, 4, 6, 8, 16];

impl Split {
    /// The splits of a model.
    pub(super) fn all(spec: &ModelSpec) -> Vec<Split> {
        let forms = if has_experts(spec) { &[false, true][..] } else { &[false] };
        let of_form = |&has_stacks| RANKS.map(|ranks| Split { ranks, has_stacks });
        forms.iter().flat_map(of_form).collect()
    }
}

/// The tensor that the parameters of this name of all experts of a layer are in memory, and the number of the expert.
pub(super) fn stacked(name: &str) -> Option<(String, usize)> {
    let (module, rest) = name.split_once(".experts.")?;
    let (number, rest) = rest.split_once('.')?;
    Some((format!("{module}.experts.{rest}"), number.parse().ok()?))
}

/// Whether a model is a mixture of experts.
pub(super) fn has_experts(spec: &ModelSpec) -> bool {
    experts(spec).iter().any(Option::is_some)
}

/// Of each parameter that is one expert's, the expert's number and the number of experts.
fn experts(spec: &ModelSpec) -> Vec<Option<(usize, usize)>> {
    let found: Vec<_> = spec.params.iter().map(|param| stacked(&param.fqn)).collect();
    let mut counts = BTreeMap::<&str, usize>::new();
    found.iter().flatten().for_each(|(stack, _)| *counts.entry(stack).or_default() += 1);
    found.iter().map(|expert| expert.as_ref().map(|(stack, number)| (*number, counts[&**stack]))).collect()
}

impl Measured {
    /// Begins with nothing; `clip` is about the coefficient of clipping.
    pub(super) fn new(spec: &ModelSpec, splits: &[Split], clip: f64) -> Self {
        let empty = Sums { clip, ..Sums::default() };
        let shards = |split: &Split| (*split, vec![vec![empty; split.ranks]; spec.params.len()]);
        Self {
            sums: vec![empty; spec.params.len()],
            shards: splits.iter().map(shards).collect(),
            sample: Sample::new(spec),
            experts: experts(spec),
        }
    }

    /// Adds rows of the gradient of a parameter, in their order.
    ///
    /// # Errors
    /// Errors of reading what was used.
    pub(super) fn add(
        &mut self,
        around: &mut Around<'_>,
        id: ParamId,
        rows: Range<usize>,
        values: &[f32],
    ) -> Result<(), TrainError> {
        let param = around.spec.param(id);
        let row_len = param.row_len().unwrap_or(1).max(1);
        let all = param.len() / row_len;
        self.sample.add(id, (rows.start * row_len, param.len()), values);
        let (sums, shards, expert) = (&mut self.sums[id.0], &mut self.shards, self.experts[id.0]);
        around.visit(id, rows, (values, sums.clip), |row, part| {
            *sums = *sums + part;
            for (split, params) in shards.iter_mut() {
                let (at, count) = expert.filter(|_| split.has_stacks).unwrap_or((row, all));
                let shard = &mut params[id.0][at / count.div_ceil(split.ranks).max(1)];
                *shard = *shard + part;
            }
        })
    }

    /// The coefficient of clipping.
    pub(super) fn clip(&self) -> f64 {
        total(&self.sums).clip
    }

    /// The same with the coefficient of clipping that the norm of the whole gradient calls for.
    pub(super) fn clipped(mut self, grad_clip: Option<f64>) -> Self {
        let clip = clip(grad_clip, total(&self.sums).ee.sqrt());
        let shards = self.shards.iter_mut().flat_map(|(_, params)| params).flatten();
        self.sums.iter_mut().chain(shards).for_each(|sums| *sums = sums.clipped(clip));
        self
    }
}

#[cfg(test)]
mod tests;
