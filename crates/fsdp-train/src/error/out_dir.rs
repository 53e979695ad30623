//! Errors of output folders that are in use by other files.

use std::path::PathBuf;

/// The reason why a run cannot use its output folder.
#[derive(Debug, thiserror::Error)]
pub enum OutDirError {
    /// The output folder is not empty.
    #[error(
        "run.out_dir {} is not empty; pass --resume to continue, --overwrite to replace it, or choose \
         another run.out_dir",
        path.display()
    )]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// The output folder is a file.
    #[error("run.out_dir {} is a file; remove it, or choose another run.out_dir", path.display())]
    IsFile {
        /// The file.
        path: PathBuf,
    },
    /// A run that resumes from an older checkpoint would overwrite later ones.
    #[error(
        "{} holds checkpoints after step {step}, up to step {newest}; pass --overwrite to remove them, \
         --resume to continue from the newest, or choose another run.out_dir",
        dir.display()
    )]
    NewerCheckpoints {
        /// The directory of checkpoints.
        dir: PathBuf,
        /// Steps done by the checkpoint to resume from.
        step: u64,
        /// Steps done by the newest checkpoint.
        newest: u64,
    },
    /// The folder holds the model of a finished run, and no checkpoint to resume from.
    #[error(
        "run.out_dir {} holds {} but no checkpoint: its run has ended and cannot be resumed. Pass \
         --overwrite to train from the start; to continue from these weights, --set model.init=pretrained \
         --set model.path={}, with --overwrite or another run.out_dir",
        out_dir.display(), model.display(), model.parent().unwrap_or(out_dir).display()
    )]
    OnlyModel {
        /// The folder.
        out_dir: PathBuf,
        /// The exported weights.
        model: PathBuf,
    },
}
