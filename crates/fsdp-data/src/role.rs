//! The requirements of a run on each part of its data.

use fsdp_config::{DataConfig, EvalSet};

use super::error::DataError;

/// The purpose of a part of a run's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The only training data.
    Training {
        /// Samples per global batch.
        global_batch: usize,
    },
    /// One of several sources of training data.
    Source {
        /// Index of the source, from 0.
        index: usize,
    },
    /// An evaluation set.
    Evaluation {
        /// Name of the set.
        set: String,
        /// Maximum number of samples to evaluate.
        samples_max: usize,
    },
}

impl Role {
    /// Returns the role of an evaluation set.
    pub fn of_set(set: &EvalSet, data: &DataConfig, global_batch: usize) -> Role {
        let limit = |max: u64| usize::try_from(max).ok().filter(|&max| max > 0).unwrap_or(usize::MAX);
        let in_batches = limit(data.eval_batches).saturating_mul(global_batch);
        Role::Evaluation { set: set.name.clone(), samples_max: limit(set.max_samples).min(in_batches) }
    }

    /// Maximum number of samples that are used.
    pub(crate) fn samples_max(&self) -> usize {
        match self {
            Role::Evaluation { samples_max, .. } => *samples_max,
            Role::Training { .. } | Role::Source { .. } => usize::MAX,
        }
    }

    /// The dotted key of the paths to the data.
    pub(super) fn key(&self, config: &DataConfig) -> &'static str {
        match self {
            Role::Training { .. } | Role::Source { .. } => config.train_key(),
            Role::Evaluation { .. } => "data.eval",
        }
    }

    /// Checks that there are enough samples.
    ///
    /// # Errors
    /// [`DataError`] if there are fewer samples than a run needs.
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
