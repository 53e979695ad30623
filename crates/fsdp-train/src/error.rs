//! What can go wrong in a run.

mod kind;
mod remedy;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_core::{DType, FailureKind, Rank};

use crate::checkpoint::{Difference, SaveFailure};
use crate::config::ConfigError;
use crate::data::DataError;
use crate::memory::Shortage;
use crate::train::{Divergence, Ending};

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
    #[error("{}", remedy::told(.0))]
    Core(#[from] fsdp_core::Error),
    /// A key of the run file does not fit the model, or what can be started.
    #[error("{key}: {reason}")]
    Misfit {
        /// The key, dotted.
        key: &'static str,
        /// What does not fit, and the way out.
        reason: String,
    },
    /// An adapter in PEFT's format is not one that can be trained, or not that of the run file.
    #[error("{}: {what}", path.display())]
    Adapter {
        /// Its `adapter_config.json`.
        path: PathBuf,
        /// What does not fit.
        what: String,
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
    /// The run would not fit into memory.
    #[error("{0}")]
    NotEnoughMemory(Box<Shortage>),
    /// What a rank has found is more than processes tell each other.
    #[error(
        "{rank} has {bytes} bytes to compare, and processes tell each other up to {bytes_max}: verify with --shrink, with \
         more ranks, or in one process"
    )]
    TooMuchToCompare {
        /// The rank.
        rank: Rank,
        /// What it has.
        bytes: usize,
        /// What can be told.
        bytes_max: usize,
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
    /// There is a model of a finished run, and no checkpoint to go on from.
    #[error(
        "run.out_dir {} holds {} and no checkpoint: its run has ended, and to go on would be to begin anew. Give \
         --overwrite to train from the start; to go on from these weights, --set model.init=pretrained --set \
         model.path={}, with --overwrite or another run.out_dir",
        out_dir.display(), model.display(), model.parent().unwrap_or(out_dir).display()
    )]
    OnlyModel {
        /// The folder.
        out_dir: PathBuf,
        /// The exported weights.
        model: PathBuf,
    },
    /// The newest checkpoint is damaged.
    #[error("{} is damaged: {fault}. {}", path.display(), after_damage(sound.as_deref()))]
    Damaged {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: Box<fsdp_ckpt::Error>,
        /// The newest older one that can be read whole.
        sound: Option<PathBuf>,
    },
    /// No checkpoint can be read whole.
    #[error(
        "none of the {count} checkpoints in {} can be read whole; restore one from a copy, or give --overwrite to begin \
         anew",
        dir.display()
    )]
    NoSoundCheckpoint {
        /// The directory of checkpoints.
        dir: PathBuf,
        /// How many there are.
        count: usize,
    },
    /// The directory of a checkpoint has the name of another step.
    #[error(
        "{} has the name of step {named}, and holds the state after step {step}: it was renamed. Rename it back to {}, \
         or move it away",
        path.display(), fsdp_ckpt::native::RunDir::name_of(*step)
    )]
    Renamed {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done, by its name.
        named: u64,
        /// Steps done, by the state in it.
        step: u64,
    },
    /// A stop was asked for before the first step.
    #[error("stopped before the first step; what an earlier run left was not touched")]
    Stopped,
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
    /// Ranks did not write their parts of a checkpoint in time.
    #[error(
        "ranks {} did not write their parts of the checkpoint within {limit:?} (run.timeout_s); see whether their disk is \
         slow or hangs",
        numbers(ranks)
    )]
    SaveLate {
        /// The ranks that are late (the first few).
        ranks: Vec<Rank>,
        /// The limit.
        limit: Duration,
    },
    /// A save was given up because the run has failed elsewhere.
    #[error("the save was given up because the run failed")]
    SaveAbandoned,
    /// A checkpoint could not be saved.
    #[error("{0}")]
    NotSaved(Arc<SaveFailure>),
    /// The model could not be exported.
    #[error("the model could not be exported: {source}")]
    NotExported {
        /// Why.
        source: Box<TrainError>,
    },
    /// Something beside the computation failed; all ranks have stopped after the same step and saved their state, or have
    /// tried to.
    #[error("{source}; {ending}")]
    Ended {
        /// What failed.
        source: Box<TrainError>,
        /// What became of the run.
        ending: Ending,
    },
    /// Loss or state is not finite any more.
    #[error("{source}; {divergence}")]
    Diverged {
        /// What was found.
        source: Box<TrainError>,
        /// From where the run can go on.
        divergence: Divergence,
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
    /// A checkpoint of another trainer has weights only.
    #[error(
        "{} has no state of an optimizer that could be gone on from; to train from its weights, set model.init = \
         \"pretrained\" and model.path to it, or to what `fsdp ckpt convert --to safetensors` makes of it",
        path.display()
    )]
    NoOptimizerState {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A checkpoint of another trainer does not say how many steps were done.
    #[error("{} does not say how many steps were done; give --at-step N", path.display())]
    NoStep {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The optimizer counts other steps than were given.
    #[error(
        "{}: --at-step {given}, but {tensor} counts {counted} steps, by which the optimizer corrects its moments; leave \
         --at-step out",
        path.display()
    )]
    AtStep {
        /// The checkpoint.
        path: PathBuf,
        /// Steps that the checkpoint counts.
        counted: u64,
        /// Steps that were given.
        given: u64,
        /// The count.
        tensor: String,
    },
    /// A file of the base model can not be read.
    #[error("can not read {} (model.path), which is copied beside the exported model: {source}", path.display())]
    Base {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
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
    /// Gradients overflow in f16 whatever they are multiplied with.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}: not finite with a loss scale of 1 either, after {skipped} skipped \
         steps; the step was not applied. Lower the learning rate, look at the data, or set fsdp.param_dtype to \"bf16\" or \
         \"f32\", which have more range"
    )]
    LossScale {
        /// The step, from 1.
        step: u64,
        /// The loss.
        loss: f64,
        /// The norm before clipping.
        grad_norm: f64,
        /// How many steps of the run were skipped, this one included.
        skipped: u64,
    },
    /// An update wrote a value that is not finite.
    #[error(
        "step {step} wrote {value:e} to {tensor}, at {index:?}: not finite in {dtype}; nothing of this state was saved or \
         exported. Lower the learning rate, or clip gradients (train.grad_clip)"
    )]
    StateNotFinite {
        /// The step that wrote it, from 1.
        step: u64,
        /// The tensor, as checkpoints name it.
        tensor: String,
        /// Where in the tensor, along each of its dimensions.
        index: Vec<usize>,
        /// The value.
        value: f64,
        /// The type in which it is not finite: that of the tensor, or of the parameters that compute.
        dtype: DType,
    },
    /// The loss of a model that is only evaluated is not finite.
    #[error(
        "the loss on \"{set}\" is {loss}: the weights hold values that are not finite, or activations overflow in \
         fsdp.param_dtype; look at them with `fsdp ckpt inspect`, or evaluate in f32"
    )]
    ModelNotFinite {
        /// The set.
        set: String,
        /// The loss.
        loss: f64,
    },
    /// The loss of an evaluation is not finite.
    #[error(
        "evaluation on \"{set}\" after step {step}: loss {loss}: not finite, though all parameters are, so activations overflow. \
         Lower the learning rate, clip gradients (train.grad_clip) or look at the data of the evaluation"
    )]
    EvaluationNotFinite {
        /// The set.
        set: String,
        /// Steps done.
        step: u64,
        /// The loss.
        loss: f64,
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
    /// What failed in another process, as it says it.
    #[error("{message}")]
    Told {
        /// What it calls for.
        kind: FailureKind,
        /// What it says.
        message: String,
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
    #[error("{rank} could not be set up: {}", remedy::told_of_any(&**source))]
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

fn numbers(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// What to do when the newest checkpoint is damaged.
fn after_damage(sound: Option<&Path>) -> String {
    match sound.map(Path::display) {
        Some(sound) => format!(
            "The newest sound one is {sound}: go on from it with --resume --skip-unsound (damaged ones are kept, under \
             names that end in .unsound), or with --resume-from {sound} --overwrite (later ones are removed)"
        ),
        None => {
            "No older one is sound: restore one from a copy, or give --overwrite to begin anew".to_owned()
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
