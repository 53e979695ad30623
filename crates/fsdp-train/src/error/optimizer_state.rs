//! Errors of the optimizer states that a run would continue with.

use std::path::PathBuf;

/// What a checkpoint lacks, or what contradicts it, of the state of its optimizer.
#[derive(Debug, thiserror::Error)]
pub enum OptimizerStateError {
    /// A checkpoint of another trainer has only weights.
    #[error(
        "{} has no optimizer state to resume from; to train from its weights, set model.init = \
         \"pretrained\" and model.path to it, or to the output of `fsdp ckpt convert --to safetensors`",
        path.display()
    )]
    Missing {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A checkpoint of another trainer does not record how many steps were done.
    #[error("{} does not record how many steps were done; pass --at-step N", path.display())]
    NoStep {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The step count of the optimizer differs from `--at-step`.
    #[error(
        "{}: --at-step {given}, but {tensor} counts {counted} steps, which the optimizer uses to correct its \
         moments; omit --at-step",
        path.display()
    )]
    AtStep {
        /// The checkpoint.
        path: PathBuf,
        /// Steps according to the checkpoint.
        counted: u64,
        /// Steps according to `--at-step`.
        given: u64,
        /// The name of the count in the checkpoint.
        tensor: String,
    },
    /// No step was done, but the optimizer has momenta. SGD begins its momentum with the first step.
    #[error("{}: 0 steps, but its optimizer has momenta; pass --at-step N with the number of steps done", path.display())]
    Momenta {
        /// The checkpoint.
        path: PathBuf,
    },
}
