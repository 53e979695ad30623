//! What is kept of a gradient: sums and a sample. The gradient itself is given up block by block.

use std::ops::Range;

use fsdp_core::model::{ModelSpec, ParamId};

use super::sample::Sample;
use super::sums::{Around, Sums, clip, total};
use crate::error::TrainError;

/// A gradient compared with the one that was used.
pub(super) struct Measured {
    /// By parameter; frozen ones have none.
    pub(super) sums: Vec<Sums>,
    /// The rows that each rank of some worlds holds, if parameters are split as PyTorch splits them (`chunk`): by world,
    /// parameter and rank.
    pub(super) shards: Vec<Vec<Vec<Sums>>>,
    pub(super) sample: Sample,
}

impl Measured {
    /// Begins with nothing; `clip` is about the coefficient of clipping.
    pub(super) fn new(spec: &ModelSpec, worlds: &[usize], clip: f64) -> Self {
        let empty = Sums { clip, ..Sums::default() };
        Self {
            sums: vec![empty; spec.params.len()],
            shards: worlds.iter().map(|ranks| vec![vec![empty; *ranks]; spec.params.len()]).collect(),
            sample: Sample::new(spec),
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
        let (sums, shards) = (&mut self.sums[id.0], &mut self.shards);
        around.visit(id, rows, (values, sums.clip), |row, part| {
            *sums = *sums + part;
            for params in shards.iter_mut() {
                let ranks = &mut params[id.0];
                let shard = row / all.div_ceil(ranks.len()).max(1);
                ranks[shard] = ranks[shard] + part;
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
        let shards = self.shards.iter_mut().flatten().flatten();
        self.sums.iter_mut().chain(shards).for_each(|sums| *sums = sums.clipped(clip));
        self
    }
}
