//! What a run asks of each part of its data.

use super::error::DataError;

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
    },
}

impl Role {
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
            Role::Evaluation { set } if is_empty => Err(DataError::NoSamples { set: set.clone(), seq_len }),
            Role::Training { .. } | Role::Source { .. } | Role::Evaluation { .. } => Ok(()),
        }
    }
}
