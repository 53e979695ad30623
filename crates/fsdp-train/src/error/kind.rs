//! Classifies errors by the reaction they require: see [`FailureKind`].
//!
//! The `match` over [`TrainError`] has no wildcard, so that a new variant does not compile until it is classified.

use fsdp_core::FailureKind;

use super::TrainError;

impl TrainError {
    /// The kind of this failure. For a failed rank, it is the kind of the underlying failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            TrainError::Base { source, .. } | TrainError::Io { source, .. } => FailureKind::of_io(source),
            TrainError::Config(source) => source.kind(),
            TrainError::Data(source) => source.kind(),
            TrainError::Remote { kind, .. } => *kind,
            TrainError::Checkpoint(source) => source.kind(),
            TrainError::Core(source) => source.kind(),
            TrainError::RankFailed { source, .. }
            | TrainError::Ended { source, .. }
            | TrainError::NotExported { source } => source.kind(),
            TrainError::NotSaved(failure) => failure.error.kind(),
            TrainError::Setup { source, .. } => {
                // Other errors come from a device or its library.
                let core = source.downcast_ref::<fsdp_core::Error>();
                core.map_or(FailureKind::Temporary, fsdp_core::Error::kind)
            }
            TrainError::Audit(_)
            | TrainError::Model(_)
            | TrainError::Misfit { .. }
            | TrainError::Adapter { .. }
            | TrainError::TiedDiffer { .. }
            | TrainError::NoHead(_)
            | TrainError::NotEnoughMemory(_)
            | TrainError::TooMuchToCompare { .. }
            | TrainError::NothingLeft { .. }
            | TrainError::NoCheckpoint { .. }
            | TrainError::OtherStep { .. }
            | TrainError::NoRunState { .. }
            | TrainError::OtherRun { .. }
            | TrainError::Renamed { .. }
            | TrainError::Damaged { .. }
            | TrainError::NoSoundCheckpoint { .. }
            | TrainError::OutDir(_)
            | TrainError::OptimizerState(_) => FailureKind::Input,
            TrainError::NotFinite { .. }
            | TrainError::LossScale { .. }
            | TrainError::StateNotFinite { .. }
            | TrainError::EvaluationNotFinite { .. }
            | TrainError::ModelNotFinite { .. }
            | TrainError::Diverged { .. }
            | TrainError::RankPanicked { .. } => FailureKind::Permanent,
            TrainError::Thread { .. }
            | TrainError::SaveLate { .. }
            | TrainError::SaveAbandoned
            | TrainError::Stopped
            | TrainError::Spawn { .. } => FailureKind::Temporary,
        }
    }
}

#[cfg(test)]
mod tests;
