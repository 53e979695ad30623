//! Classifies errors by the reaction they require: see [`FailureKind`].
//!
//! The `match` over [`TrainError`] has no wildcard, so that a new variant does not compile until it is classified.

use fsdp_core::FailureKind;

use super::TrainError;

impl TrainError {
    /// The kind of this failure. For a failed rank, it is the kind of the underlying failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            TrainError::Io { source, .. } => FailureKind::of_io(source),
            TrainError::Config(source) => source.kind(),
            TrainError::Data(source) => source.kind(),
            TrainError::Checkpoint(source) => source.kind(),
            TrainError::Core(source) => source.kind(),
            TrainError::Failed { kind, .. } | TrainError::Remote { kind, .. } => *kind,
            TrainError::RankFailed { source, .. }
            | TrainError::Ended { source, .. }
            | TrainError::NotSaved { source, .. }
            | TrainError::NotExported { source } => source.kind(),
            TrainError::Model(_) | TrainError::Misfit { .. } | TrainError::Input(_) => FailureKind::Input,
            TrainError::NotFinite { .. }
            | TrainError::LossScale { .. }
            | TrainError::StateNotFinite { .. }
            | TrainError::EvaluationNotFinite { .. }
            | TrainError::Diverged { .. } => FailureKind::Permanent,
            TrainError::SaveUnfinished(_) | TrainError::Stopped => FailureKind::Temporary,
        }
    }
}

#[cfg(test)]
mod tests;
