//! Arguments of `fsdp audit`.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use super::shared::{NetworkArgs, RunFileArgs};
use super::values::positive;

/// `fsdp audit`.
#[derive(Debug, ClapArgs)]
#[command(
    override_usage = "fsdp audit [OPTIONS] RUN.toml --before CHECKPOINT --after CHECKPOINT (--batch FILE | --data)
       fsdp audit [RUN.toml] --init CHECKPOINT",
    after_help = "Two checkpoints one step apart contain the gradient that the program really used, in the optimizer's
moments. It is compared with the gradient of the same step computed here. If they differ by more
than precision allows, known faults are planted one by one, and the one that explains the
difference is named. Then the update is judged, given that gradient. No hook, and no change to the
program, is needed: only its checkpoints and the batch.

The run file says what should have happened: [model], [adapter], [train.optimizer],
train.lr_schedule, train.steps, train.grad_clip, and of [fsdp] the dtypes and what is frozen.
[run] and [data] are not needed, except with --data. The checkpoints are what `train --resume-from`
takes.

The batch is a safetensors file with m0.input_ids, m0.labels, .. per micro-batch, over all ranks in
the order of the data; docs/auditing.md shows how to write it from each framework.

--init writes a first run file from what a checkpoint says of its run, with a comment on where each
value comes from, and lines to fill in for what it does not say. Without RUN.toml it is printed; a
file that exists is not replaced.

Exit codes: 0 the step is sound, 1 something was found, 2 the input is wrong.

Examples:
  fsdp audit run.toml --init checkpoint-7
  fsdp audit run.toml --before checkpoint-7 --after checkpoint-8 --batch batch.safetensors
  fsdp audit run.toml --before a --after b --batch batch.safetensors --report audit.html
  fsdp audit run.toml --before a --after b --batch batch.safetensors --json
  fsdp audit run.toml --before step-00000007 --after step-00000008 --data      (of a run of fsdp)
  srun -N 4 fsdp audit run.toml --before a --after b --batch batch.safetensors  (a rank per node)"
)]
pub(crate) struct AuditArgs {
    /// The run file (TOML); with --init, the file to write
    #[arg(value_name = "RUN.toml", required_unless_present = "init")]
    pub(crate) file: Option<PathBuf>,
    /// Change a key of the run file, such as --set train.grad_clip=1.0 (may be repeated)
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    overrides: Vec<String>,
    /// Write a run file from what the state before the step says of its run
    #[arg(
        long,
        value_name = "CHECKPOINT",
        conflicts_with_all = ["overrides", "before", "after", "batch", "data", "shifted", "at_step", "steps", "ranks", "report", "json"]
    )]
    pub(crate) init: Option<PathBuf>,
    /// The state before the step: a checkpoint with its optimizer
    #[arg(long, value_name = "CHECKPOINT", required_unless_present = "init")]
    before: Option<PathBuf>,
    /// The state after the step
    #[arg(long, value_name = "CHECKPOINT", required_unless_present = "init")]
    after: Option<PathBuf>,
    /// All micro-batches of the step, over all ranks (safetensors)
    #[arg(long, value_name = "FILE", required_unless_present_any = ["data", "init"])]
    pub(crate) batch: Option<PathBuf>,
    /// Take the batch from the run file's [data], at the step of the state before: for runs of fsdp
    #[arg(long, conflicts_with_all = ["batch", "shifted"])]
    pub(crate) data: bool,
    /// Labels are shifted already: that of a position is the token to predict there
    #[arg(long)]
    pub(crate) shifted: bool,
    /// Steps done before the step, if the checkpoints do not count them
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) at_step: Option<u64>,
    /// Steps between the states; of more than one, only the whole update is judged, and the batch has to have all of their
    /// micro-batches
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) steps: usize,
    /// Number of ranks that compute together, to which micro-batches are dealt [default: one per process]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) ranks: Option<usize>,
    /// Write an HTML file with a bar for each parameter
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

impl AuditArgs {
    /// The run file of a judgement.
    pub(crate) fn run(&self) -> RunFileArgs {
        let file = self.file.clone().expect("clap requires it without --init");
        RunFileArgs { file, overrides: self.overrides.clone() }
    }

    /// The state before the judged step.
    pub(crate) fn before(&self) -> &Path {
        self.before.as_deref().expect("clap requires it without --init")
    }

    /// The state after it.
    pub(crate) fn after(&self) -> &Path {
        self.after.as_deref().expect("clap requires it without --init")
    }
}
