//! Errors of a run.

mod kind;
mod optimizer_state;
mod out_dir;
mod remedy;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_config::ConfigError;
use fsdp_core::{DType, FailureKind, Rank};
use fsdp_data::DataError;

pub use optimizer_state::OptimizerStateError;
pub use out_dir::OutDirError;

use crate::audit::AuditError;
use crate::checkpoint::{Difference, SaveFailure};
use crate::init::NoHead;
use crate::memory::Shortage;
use crate::train::{Divergence, Ending};

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
    /// A step of another program cannot be judged.
    #[error(transparent)]
    Audit(#[from] AuditError),
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
    /// An adapter in PEFT's format cannot be trained, or differs from the run file.
    #[error("{}: {what}", path.display())]
    Adapter {
        /// Its `adapter_config.json`.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// A checkpoint has two different tensors for a parameter that the model ties.
    #[error(
        "{}: `{first}` and `{second}` differ, but the model ties them (tie_word_embeddings in config.json); remove \
         one of the two, or set tie_word_embeddings to false",
        path.display()
    )]
    TiedDiffer {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor that would be used.
        first: String,
        /// The other.
        second: String,
    },
    /// Files of a model without its output head.
    #[error(transparent)]
    NoHead(#[from] NoHead),
    /// The run would not fit into memory.
    #[error("{0}")]
    NotEnoughMemory(Box<Shortage>),
    /// The values of a rank are too large to be sent to another process for comparison.
    #[error(
        "{rank} has {bytes} bytes to compare, but processes can exchange at most {bytes_max}: verify with \
         --shrink, with more ranks, or in one process"
    )]
    TooMuchToCompare {
        /// The rank.
        rank: Rank,
        /// Bytes to send.
        bytes: usize,
        /// Maximum number of bytes that can be sent.
        bytes_max: usize,
    },
    /// The output folder cannot be used.
    #[error(transparent)]
    OutDir(#[from] OutDirError),
    /// The newest checkpoint is damaged.
    #[error("{} is damaged: {fault}. {}", path.display(), after_damage(sound.as_deref()))]
    Damaged {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: Box<fsdp_ckpt::Error>,
        /// The newest older checkpoint that can be read completely; `None` if there is none.
        sound: Option<PathBuf>,
    },
    /// No checkpoint can be read completely.
    #[error(
        "none of the {count} checkpoints in {} can be read completely; restore one from a copy, or pass \
         --overwrite to start over",
        dir.display()
    )]
    NoSoundCheckpoint {
        /// The directory of checkpoints.
        dir: PathBuf,
        /// Number of checkpoints.
        count: usize,
    },
    /// The directory of a checkpoint is named after another step.
    #[error(
        "{} is named after step {named} but holds the state after step {step}: it was renamed. Rename it \
         back to {}, or move it away",
        path.display(), fsdp_ckpt::native::RunDir::name_of(*step)
    )]
    Renamed {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done, according to its name.
        named: u64,
        /// Steps done, according to its content.
        step: u64,
    },
    /// A stop was requested before the first step.
    #[error("stopped before the first step; the files of an earlier run were not touched")]
    Stopped,
    /// A checkpoint has done more steps than requested.
    #[error(
        "{} has done {done} steps, and train.steps is {steps}; extend the run with --set train.steps=N, or \
         continue from an older checkpoint with --resume-from",
        path.display()
    )]
    NothingLeft {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done.
        done: u64,
        /// Steps requested.
        steps: u64,
    },
    /// The path that the user named is not a checkpoint.
    #[error(
        "{} is not the checkpoint of a run: {detail}; give a directory such as runs/a/checkpoints/step-00000050 \
         (`fsdp ckpt inspect` shows what a path holds)",
        path.display()
    )]
    NoCheckpoint {
        /// The path.
        path: PathBuf,
        /// The reason.
        detail: String,
    },
    /// A thread for work on files could not be started.
    #[error("cannot start the thread that {task}: {source}")]
    Thread {
        /// What it does.
        task: &'static str,
        /// The underlying error.
        source: io::Error,
    },
    /// Ranks did not write their parts of a checkpoint in time.
    #[error(
        "ranks {} did not write their parts of the checkpoint within {limit:?} (run.timeout_s); check \
         whether their disk is slow or hangs",
        numbers(ranks)
    )]
    SaveLate {
        /// The first few of the late ranks.
        ranks: Vec<Rank>,
        /// The time limit.
        limit: Duration,
    },
    /// A save was given up because the run has failed elsewhere.
    #[error("the save was abandoned because the run failed")]
    SaveAbandoned,
    /// A checkpoint could not be saved.
    #[error("{0}")]
    NotSaved(Arc<SaveFailure>),
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
    #[error("{source}; {divergence}")]
    Diverged {
        /// The non-finite value, as an error.
        source: Box<TrainError>,
        /// Where the run can resume.
        divergence: Divergence,
    },
    /// The state of a parameter belongs to another step than the rest.
    #[error(
        "{}: tensor {tensor} counts {got} steps, the rest of the checkpoint {expected}; \
         it was not written by a single run, resume from another checkpoint",
        path.display()
    )]
    OtherStep {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor with the parameter's step count.
        tensor: String,
        /// Steps done according to the state of the run.
        expected: u64,
        /// Steps done according to the tensor.
        got: f64,
    },
    /// A checkpoint has no state of a run.
    #[error(
        "{} has no run state ({detail}); its tensors can be converted with `fsdp ckpt convert`, and then \
         trained on with model.init = \"pretrained\"",
        path.display()
    )]
    NoRunState {
        /// The checkpoint.
        path: PathBuf,
        /// What is missing or wrong.
        detail: String,
    },
    /// A checkpoint lacks what continuing needs of its optimizer.
    #[error(transparent)]
    OptimizerState(#[from] OptimizerStateError),
    /// A file of the base model cannot be read.
    #[error("cannot read {} (model.path), which is copied next to the exported model: {source}", path.display())]
    Base {
        /// The file.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
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
    /// The loss of a model that is only evaluated is not finite.
    #[error(
        "the loss on \"{set}\" is {loss}: the weights contain values that are not finite, or activations \
         overflow in fsdp.param_dtype; check them with `fsdp ckpt inspect`, or evaluate in f32"
    )]
    ModelNotFinite {
        /// The name of the evaluation set.
        set: String,
        /// The loss.
        loss: f64,
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
    /// A checkpoint belongs to another run.
    #[error(
        "the run cannot resume from {}: {}. Undo these changes, or start a new run (model.init = \
         \"pretrained\" starts from exported weights)",
        path.display(), list(differences)
    )]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// All differences.
        differences: Vec<Difference>,
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
    /// A rank could not be started.
    #[error(
        "the thread of {rank} could not be started: {source}; use fewer ranks in this process, or raise the limit on \
         threads (ulimit -u, pids.max) or on the address space (ulimit -v)"
    )]
    Spawn {
        /// The rank.
        rank: Rank,
        /// The underlying error.
        source: io::Error,
    },
    /// A rank has no device, or could not be connected to the others.
    #[error("{rank} could not be set up: {}", remedy::any_with_remedy(&**source))]
    Setup {
        /// The rank.
        rank: Rank,
        /// The underlying error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A rank panicked: a bug.
    #[error("{rank} panicked: {message}")]
    RankPanicked {
        /// The first rank that panicked.
        rank: Rank,
        /// The panic message.
        message: String,
    },
}

impl TrainError {
    /// Wraps an I/O error, for use with `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { action, path, source }
    }
}

impl From<LaunchFailure<TrainError>> for TrainError {
    fn from(failure: LaunchFailure<TrainError>) -> Self {
        let rank = failure.rank;
        match failure.reason {
            FailureReason::Error(source) => TrainError::RankFailed { rank, source: Box::new(source) },
            FailureReason::Panic(message) => TrainError::RankPanicked { rank, message },
            FailureReason::Comm(source) => {
                TrainError::RankFailed { rank, source: Box::new(fsdp_core::Error::from(source).into()) }
            }
            FailureReason::Spawn(source) => TrainError::Spawn { rank, source },
            FailureReason::Setup(source) => TrainError::Setup { rank, source },
        }
    }
}

fn numbers(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// Advice for a damaged newest checkpoint.
fn after_damage(sound: Option<&Path>) -> String {
    match sound.map(Path::display) {
        Some(sound) => format!(
            "The newest sound one is {sound}: resume from it with --resume --skip-unsound (damaged ones are \
             kept, under names that end in .unsound), or with --resume-from {sound} --overwrite (later ones \
             are removed)"
        ),
        None => {
            "No older one is sound: restore one from a copy, or pass --overwrite to start over".to_owned()
        }
    }
}

fn list(differences: &[Difference]) -> String {
    let or_nothing = |text: &str| if text.is_empty() { "nothing".to_owned() } else { text.to_owned() };
    let line = |Difference { what, saved, given }: &Difference| {
        format!("{what} was {}, now {}", or_nothing(saved), or_nothing(given))
    };
    differences.iter().map(line).collect::<Vec<_>>().join("; ")
}
