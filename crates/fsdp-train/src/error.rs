//! What can go wrong in a run.

use std::io;
use std::path::PathBuf;

use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_core::Rank;

use crate::checkpoint::Difference;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::memory::Shortage;

/// A run that can not start, or failed.
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
    /// A checkpoint can not be read or written.
    #[error(transparent)]
    Checkpoint(#[from] fsdp_ckpt::Error),
    /// Contracts, policies or communication.
    #[error(transparent)]
    Core(#[from] fsdp_core::Error),
    /// A pattern of `key` matches no parameter.
    #[error("{key}: pattern `{pattern}` matches no parameter of the model; one of its names is `{example}`")]
    Pattern {
        /// The key.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// A name that exists.
        example: String,
    },
    /// A checkpoint has two tensors for a parameter that the model ties, and they differ.
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
    /// Nothing is trained.
    #[error("fsdp.frozen matches every parameter of the model: nothing is left to train")]
    NothingToTrain,
    /// Sequences are longer than the model's position table.
    #[error(
        "data.seq_len = {seq_len} is more than the model's {positions} positions; choose a shorter data.seq_len"
    )]
    SequenceTooLong {
        /// Tokens per sample.
        seq_len: usize,
        /// Rows of the position table.
        positions: usize,
    },
    /// The run would not fit into memory.
    #[error("{0}")]
    NotEnoughMemory(Box<Shortage>),
    /// More ranks than one process can have as threads.
    #[error(
        "{ranks} ranks are too many: the ranks of a run are threads of one process, at most {ranks_max}; lower run.ranks \
         (`fsdp schedule` shows the schedule and memory of larger worlds)"
    )]
    TooManyRanks {
        /// Asked-for ranks.
        ranks: usize,
        /// The most that can be started.
        ranks_max: usize,
    },
    /// A schedule with more operations than are worth having.
    #[error(
        "a step of {rounds} micro-batches per rank over {blocks} blocks of the model has a schedule that is too long \
         (micro-batches times blocks may be {limit}); raise train.micro_batch_size or run.ranks, or lower \
         train.global_batch_size"
    )]
    StepTooLong {
        /// Micro-batches per rank and step.
        rounds: usize,
        /// Blocks of the model.
        blocks: usize,
        /// The most that both may be, multiplied.
        limit: usize,
    },
    /// The output folder has content.
    #[error(
        "run.out_dir {} is not empty; give --resume to go on, --overwrite to replace it, or another run.out_dir",
        path.display()
    )]
    OutDirNotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// The output folder is a file.
    #[error("run.out_dir {} is a file; remove it, or choose another run.out_dir", path.display())]
    OutDirIsFile {
        /// The file.
        path: PathBuf,
    },
    /// A run that goes on from an older checkpoint would write later ones again.
    #[error(
        "{} holds checkpoints after step {step}, up to step {newest}; give --overwrite to remove these, --resume to \
         go on from the newest, or another run.out_dir",
        dir.display()
    )]
    NewerCheckpoints {
        /// The directory of checkpoints.
        dir: PathBuf,
        /// Steps done by the checkpoint that was named.
        step: u64,
        /// Steps done by the newest one.
        newest: u64,
    },
    /// A checkpoint has done more steps than are asked for.
    #[error(
        "{} has done {done} steps, and train.steps is {steps}; extend the run with --set train.steps=N, or go on from \
         an older checkpoint with --resume-from",
        path.display()
    )]
    NothingLeft {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done.
        done: u64,
        /// Steps asked for.
        steps: u64,
    },
    /// A checkpoint that was named is none.
    #[error(
        "{} is not the checkpoint of a run: {detail}; give a directory such as runs/a/checkpoints/step-00000050 \
         (`fsdp ckpt inspect` says what a path is)",
        path.display()
    )]
    NoCheckpoint {
        /// What was named.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The thread that writes a checkpoint could not be started.
    #[error("can not start the thread that writes a checkpoint: {source}")]
    SaveThread {
        /// Why.
        source: io::Error,
    },
    /// The state of a parameter is of another step than the rest.
    #[error(
        "{}: tensor {tensor} says that {got} steps were done, the state of the run says {expected}; \
         the checkpoint is not the work of one run, go on from another one",
        path.display()
    )]
    OtherStep {
        /// The checkpoint.
        path: PathBuf,
        /// The count of steps of a parameter.
        tensor: String,
        /// Steps done by the run.
        expected: u64,
        /// Steps that the tensor counts.
        got: f64,
    },
    /// A checkpoint does not say how far its run was.
    #[error(
        "{} has no state of a run ({detail}); its tensors can be converted, or trained on with model.init = \
         \"pretrained\" after `fsdp ckpt convert`",
        path.display()
    )]
    NoRunState {
        /// The checkpoint.
        path: PathBuf,
        /// What is missing or wrong.
        detail: String,
    },
    /// The output folder, or a file in it, can not be written.
    #[error("can not {action} {}: {source}; make room there, or choose another run.out_dir", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Loss or gradient norm is not finite.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}: not finite; the step was not applied. \
         Lower the learning rate, clip gradients (train.grad_clip) or look at the data"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// The loss.
        loss: f64,
        /// The norm before clipping.
        grad_norm: f64,
    },
    /// A checkpoint is of another run.
    #[error(
        "the run can not go on from {}: {}. Give the run what it had, or start another one (model.init = \
         \"pretrained\" starts from exported weights)",
        path.display(), list(differences)
    )]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// A rank failed.
    #[error("{rank} failed: {source}")]
    RankFailed {
        /// The first rank that failed.
        rank: Rank,
        /// Why.
        source: Box<TrainError>,
    },
    /// A rank could not be started.
    #[error("{rank} could not be started: {source}")]
    Spawn {
        /// The rank.
        rank: Rank,
        /// Why.
        source: io::Error,
    },
    /// A rank has no device, or could not be connected with the others.
    #[error("{rank} could not be set up: {source}")]
    Setup {
        /// The rank.
        rank: Rank,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A rank panicked: a bug.
    #[error("{rank} panicked: {message}")]
    RankPanicked {
        /// The first rank that panicked.
        rank: Rank,
        /// Its message.
        message: String,
    },
}

impl TrainError {
    /// Whether something that the user gave is at fault: a key, a file, or a disk that is full (exit code 2).
    pub fn is_usage(&self) -> bool {
        match self {
            TrainError::Core(source) => matches!(
                source,
                fsdp_core::Error::Mesh { .. }
                    | fsdp_core::Error::WrapClass { .. }
                    | fsdp_core::Error::TiedAcrossUnits { .. }
                    | fsdp_core::Error::Policy { .. }
                    | fsdp_core::Error::Model { .. }
            ),
            // Ranks meet files only after the run has begun.
            TrainError::RankFailed { source, .. } => {
                matches!(**source, TrainError::Io { .. } | TrainError::Checkpoint(_))
            }
            TrainError::NotFinite { .. }
            | TrainError::Spawn { .. }
            | TrainError::Setup { .. }
            | TrainError::SaveThread { .. }
            | TrainError::RankPanicked { .. } => false,
            _ => true,
        }
    }

    /// Wraps an I/O error.
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

fn list(differences: &[Difference]) -> String {
    let or_nothing = |text: &str| if text.is_empty() { "nothing".to_owned() } else { text.to_owned() };
    let line = |Difference { what, saved, given }: &Difference| {
        format!("{what} was {}, now {}", or_nothing(saved), or_nothing(given))
    };
    differences.iter().map(line).collect::<Vec<_>>().join("; ")
}
