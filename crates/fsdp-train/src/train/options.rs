//! What a caller says of a run that is not part of its configuration, and hears of its progress.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use fsdp_core::Rank;
use fsdp_core::engine::Observer;

use super::warning::RunWarning;
use crate::checkpoint::{Change, ImportSummary, Saved};
use crate::metrics::{Evaluation, FlopModel, ProcessTable, StepMetrics};

/// Receives the progress of a run. Called only on the first rank of the world.
pub trait Reporter: Sync {
    /// A step is done.
    fn step(&self, _metrics: &StepMetrics) {}

    /// An evaluation after `step` steps is done, on one set.
    fn evaluation(&self, _step: u64, _evaluation: &Evaluation) {}

    /// The run resumes from a checkpoint, or, with `None`, found none and starts from the beginning.
    fn resumed(&self, _resumed: Option<&Resumed>) {}

    /// The output folder now belongs to this run: files of an earlier run that it replaces are gone.
    fn taken_over(&self) {}

    /// A condition that the user should know, and despite which the run continues.
    fn warn(&self, _warning: &RunWarning) {}

    /// A checkpoint is complete.
    fn saved(&self, _saved: &Saved) {}
}

impl Reporter for () {}

/// Options of a run that are not part of its configuration.
pub struct RunOptions<'a> {
    /// Receives progress.
    pub reporter: &'a dyn Reporter,
    /// Raised to stop after the current step. All ranks stop after the same step.
    pub stop: &'a AtomicBool,
    /// Whether the run resumes from a checkpoint.
    pub resume: Resume,
    /// Whether to replace the content of a non-empty output folder.
    pub overwrite: bool,
    /// Creates the observer of each rank's operations.
    pub observer: &'a (dyn Fn(Rank) -> Box<dyn Observer> + Sync),
    /// The text of `config.json` to write beside the exported weights; `None` if the model has none.
    pub config_json: Option<String>,
    /// The quantities that determine the FLOPs of a token; `None` if utilization is not requested.
    pub flops: Option<FlopModel>,
    /// The participants of the run; `None` if this process is the only one.
    pub process_table: Option<ProcessTable>,
}

/// Whether a run resumes from a checkpoint, and from which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Starts from the beginning.
    Fresh,
    /// Resumes from the newest complete checkpoint of the output folder, or starts from the beginning if there is none.
    Newest,
    /// Like [`Resume::Newest`], but skips checkpoints that cannot be read completely, and sets them aside.
    NewestSound,
    /// Resumes from this checkpoint: its own, another run's or another trainer's.
    From {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done, if the checkpoint of another trainer does not record them.
        at_step: Option<u64>,
    },
}

/// A checkpoint that a run resumed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Steps done.
    pub step: u64,
    /// Its path.
    pub path: PathBuf,
    /// Configuration changes that take effect from here on.
    pub changes: Vec<Change>,
    /// Taken parts of another trainer's checkpoint; `None` for one of `fsdp`.
    pub taken: Option<ImportSummary>,
}
