//! Arguments of `fsdp check`.

use clap::Args as ClapArgs;

use super::shared::RunFileArgs;

/// `fsdp check`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Nothing is run, written or tokenized: the run file and those it extends, the device, the model and
its weights, the data files with their first records, the tokenizer, the output folder, the
schedule and the memory are checked, and all problems are listed. The exit code is 2 if there are
any.

Examples:
  fsdp check run.toml
  fsdp check run.toml --set run.ranks=8 --json"
)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
