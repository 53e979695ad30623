//! Errors of a run: one variant per failure that a caller tells from others, by its name or by its kind.
//!
//! Messages are made where a failure arises, and are complete: what was expected, what was found, and the way out.

mod ending;
mod kind;
mod remedy;

use std::io;
use std::path::PathBuf;

use fsdp_comm::assembly::AssemblyError;
use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_config::ConfigError;
use fsdp_core::comm::CommError;
use fsdp_core::{DType, FailureKind, Rank};
use fsdp_data::DataError;

pub use ending::{Ending, Kept};

/// Maximum number of late ranks that a message names.
const NAMED_MAX: usize = 8;

/// The reason why a run cannot start or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The run file or `--set` is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data is missing or does not fit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model directory or its description is wrong.
    #[error(transparent)]
    Model(#[from] fsdp_nn::ModelError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] fsdp_ckpt::Error),
    /// An error of the core: contracts, policies or communication.
    #[error("{}", remedy::with_remedy(.0))]
    Core(#[from] fsdp_core::Error),
    /// A key of the run file does not fit the model, or is not supported.
    #[error("{key}: {reason}")]
    Misfit {
        /// The key, dotted.
        key: &'static str,
        /// What does not fit, and how to fix it.
        reason: String,
    },
    /// What the run was given cannot be used: a checkpoint of another run, an output folder in use, too little memory.
    #[error("{0}")]
    Input(String),
    /// A failure that differs from others by its kind alone.
    #[error("{message}")]
    Failed {
        /// The kind of the failure.
        kind: FailureKind,
        /// The error message.
        message: String,
    },
    /// A stop was requested before the first step.
    #[error("stopped before the first step; the files of an earlier run were not touched")]
    Stopped,
    /// A save was given up before all ranks have ended their parts: some may still write.
    #[error("{0}")]
    SaveUnfinished(String),
    /// A checkpoint could not be saved.
    #[error("the checkpoint after step {step} could not be saved: {source}")]
    NotSaved {
        /// Steps done by the state to be saved.
        step: u64,
        /// The failure, with the rank on which it occurred.
        source: Box<TrainError>,
    },
    /// The model could not be exported.
    #[error("the model could not be exported: {source}")]
    NotExported {
        /// The underlying error.
        source: Box<TrainError>,
    },
    /// A failure outside the computation; all ranks have stopped after the same step and have saved their state or
    /// tried to.
    #[error("{source}; {ending}")]
    Ended {
        /// The failure.
        source: Box<TrainError>,
        /// What happened to the state.
        ending: Ending,
    },
    /// The loss or the state has become non-finite.
    #[error("{source}; {advice}")]
    Diverged {
        /// The non-finite value, as an error.
        source: Box<TrainError>,
        /// Where the run can resume, and how.
        advice: String,
    },
    /// The output folder, or a file in it, cannot be written.
    #[error("cannot {action} {}: {source}; {}, or choose another run.out_dir", path.display(), remedy::of_output(source))]
    Io {
        /// The failed operation, as a verb.
        action: &'static str,
        /// The path it failed on.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// The loss or the gradient norm is not finite.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}: not finite; the step was not applied. \
         Lower the learning rate, clip gradients (train.grad_clip) or check the data"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// The loss.
        loss: f64,
        /// The gradient norm before clipping.
        grad_norm: f64,
    },
    /// Gradients overflow in f16 even with a loss scale of 1.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}: not finite even with a loss scale of 1, after \
         {skipped} skipped steps; the step was not applied. Lower the learning rate, check the data, or set \
         fsdp.param_dtype to \"bf16\" or \"f32\", which have more range"
    )]
    LossScale {
        /// The step, from 1.
        step: u64,
        /// The loss.
        loss: f64,
        /// The gradient norm before clipping.
        grad_norm: f64,
        /// Number of steps skipped during the run, including this one.
        skipped: u64,
    },
    /// An update wrote a value that is not finite.
    #[error(
        "step {step} wrote {value:e} to {tensor}, at {index:?}: not finite in {dtype}; this state was \
         neither saved nor exported. Lower the learning rate, or clip gradients (train.grad_clip)"
    )]
    StateNotFinite {
        /// The step that wrote it, from 1.
        step: u64,
        /// The name of the tensor, as in checkpoints.
        tensor: String,
        /// The index in the tensor, one number per dimension.
        index: Vec<usize>,
        /// The non-finite value.
        value: f64,
        /// The dtype in which the value is not finite: of the tensor, or of the compute copy of the parameters.
        dtype: DType,
    },
    /// The loss of an evaluation is not finite.
    #[error(
        "evaluation on \"{set}\" after step {step}: loss {loss}: not finite although all parameters are, so \
         activations overflow. Lower the learning rate, clip gradients (train.grad_clip) or check the \
         evaluation data"
    )]
    EvaluationNotFinite {
        /// The name of the evaluation set.
        set: String,
        /// Steps done.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// A rank failed.
    #[error("{rank} failed: {source}")]
    RankFailed {
        /// The first rank that failed.
        rank: Rank,
        /// The underlying error.
        source: Box<TrainError>,
    },
    /// A failure in another process, as that process reported it.
    #[error("{message}")]
    Remote {
        /// The kind of the failure.
        kind: FailureKind,
        /// The error message.
        message: String,
    },
}

impl TrainError {
    /// Wraps an I/O error, for use with `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { action, path, source }
    }

    /// The error for a thread that could not be started, and that does this.
    pub(crate) fn no_thread(task: &str, source: &io::Error) -> TrainError {
        let message = format!("cannot start the thread that {task}: {source}");
        TrainError::Failed { kind: FailureKind::Temporary, message }
    }
}

impl From<CommError> for TrainError {
    fn from(error: CommError) -> Self {
        fsdp_core::Error::from(error).into()
    }
}

impl From<AssemblyError> for TrainError {
    fn from(error: AssemblyError) -> Self {
        match error {
            AssemblyError::Late { ranks, limit } => {
                let named = ranks.iter().take(NAMED_MAX).map(|rank| rank.0.to_string()).collect::<Vec<_>>();
                TrainError::SaveUnfinished(format!(
                    "ranks {} did not write their parts of the checkpoint within {limit:?} (run.timeout_s); check whether \
                     their disk is slow or hangs",
                    named.join(", ")
                ))
            }
            AssemblyError::GivenUp => {
                TrainError::SaveUnfinished("the save was abandoned because the run failed".to_owned())
            }
            AssemblyError::Failed(error) => error.into(),
        }
    }
}

impl From<LaunchFailure<TrainError>> for TrainError {
    fn from(LaunchFailure { rank, reason }: LaunchFailure<TrainError>) -> Self {
        let (kind, message) = match reason {
            FailureReason::Error(source) => return TrainError::RankFailed { rank, source: Box::new(source) },
            FailureReason::Comm(source) => {
                return TrainError::RankFailed { rank, source: Box::new(source.into()) };
            }
            FailureReason::Panic(message) => (FailureKind::Permanent, format!("{rank} panicked: {message}")),
            FailureReason::Spawn(source) => (
                FailureKind::Temporary,
                format!(
                    "the thread of {rank} could not be started: {source}; use fewer ranks in this process, or raise the \
                     limit on threads (ulimit -u, pids.max) or on the address space (ulimit -v)"
                ),
            ),
            FailureReason::Setup(source) => {
                // Other errors come from a device or its library.
                let kind = source.downcast_ref().map_or(FailureKind::Temporary, fsdp_core::Error::kind);
                let message = format!("{rank} could not be set up: {}", remedy::any_with_remedy(&*source));
                (kind, message)
            }
        };
        TrainError::Failed { kind, message }
    }
}
