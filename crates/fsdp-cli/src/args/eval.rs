//! Arguments of `fsdp eval`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::shared::{NetworkArgs, RunFileArgs};

/// `fsdp eval`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "The model is one of these:
  a Hugging Face directory, or the model/ that a run exports
  a checkpoint of a run, such as runs/a/checkpoints/step-00000050: the model that it was saved from
  an adapter in PEFT's format, such as the adapter/ of a run, on the model of the run file

The data is that of data.eval, in the batches and on the ranks of training: the loss has the same
bits as an evaluation of the same weights during training. No training data is read, nothing is
written, and no memory is needed for gradients or optimizer state.

Examples:
  fsdp eval examples/quickstart.toml --model runs/quickstart/model --set \"data.eval=['README.md']\"
  fsdp eval run.toml --model runs/a/checkpoints/step-00000050 --json")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// What is evaluated
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}
