//! What a run asks of each part of its data.

use super::error::DataError;
use crate::config::{DataConfig, EvalSet};

/// What a part of a run's data is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// It is all that is trained on.
    Training {
        /// Samples of a global batch.
        global_batch: usize,
    },
    /// It is one of several sources.
    Source {
        /// Which one, from 0.
        index: usize,
    },
    /// It is evaluated on.
    Evaluation {
        /// The name of the set.
        set: String,
        /// The samples of it that are evaluated on, if it has as many.
        samples_max: usize,
    },
}

impl Role {
    /// That of a set of evaluation data.
    pub fn of_set(set: &EvalSet, data: &DataConfig, global_batch: usize) -> Role {
        let limit = |most: u64| usize::try_from(most).ok().filter(|&most| most > 0).unwrap_or(usize::MAX);
        let in_batches = limit(data.eval_batches).saturating_mul(global_batch);
        Role::Evaluation { set: set.name.clone(), samples_max: limit(set.max_samples).min(in_batches) }
    }

    /// The samples that are used, if there are as many.
    pub(crate) fn samples_max(&self) -> usize {
        match self {
            Role::Evaluation { samples_max, .. } => *samples_max,
            Role::Training { .. } | Role::Source { .. } => usize::MAX,
        }
    }

    /// The key of the paths that lead to it, dotted.
    pub(super) fn key(&self, config: &DataConfig) -> &'static str {
        match self {
            Role::Training { .. } | Role::Source { .. } => config.train_key(),
            Role::Evaluation { .. } => "data.eval",
        }
    }

    /// That there are enough samples.
    ///
    /// # Errors
    /// [`DataError`]: there are fewer than a run takes.
    pub(crate) fn expect(&self, samples: usize, seq_len: usize) -> Result<(), DataError> {
        let is_empty = samples == 0;
        match self {
            &Role::Training { global_batch } if samples < global_batch => {
                Err(DataError::TooShort { samples, seq_len, global_batch })
            }
            &Role::Source { index } if is_empty => Err(DataError::EmptySource { index, seq_len }),
            Role::Evaluation { set, .. } if is_empty => {
                Err(DataError::NoSamples { set: set.clone(), seq_len })
            }
            Role::Training { .. } | Role::Source { .. } | Role::Evaluation { .. } => Ok(()),
        }
    }
}
