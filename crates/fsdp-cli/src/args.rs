//! The command line, as clap reads it.
//!
//! Texts here are the help pages: each command says what it does, what it leaves behind and how it is called.

mod audit;
mod calibrate;
mod check;
mod ckpt;
#[cfg(feature = "xla")]
mod compile;
mod doctor;
mod eval;
mod generate;
mod init;
mod launch;
mod logs;
mod plan;
mod report;
mod shared;
mod shell;
mod sizes;
mod values;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand};
use fsdp_config::{Device, Quantize};
use fsdp_core::{DType, Mesh};

use crate::exit_code;
use crate::version::VERSION;

pub(crate) use audit::AuditArgs;
pub(crate) use calibrate::CalibrateArgs;
pub(crate) use check::CheckArgs;
#[cfg(feature = "xla")]
pub(crate) use compile::CompileArgs;
pub(crate) use doctor::DoctorArgs;
pub(crate) use eval::EvalArgs;
pub(crate) use generate::GenerateArgs;
pub(crate) use init::InitArgs;
pub(crate) use launch::LaunchArgs;
pub(crate) use logs::{LogArgs, LogFormat};
pub(crate) use plan::PlanArgs;
pub(crate) use report::ReportArgs;
pub(crate) use shared::{NetworkArgs, RunFileArgs};
pub(crate) use shell::{CompletionsArgs, ManArgs, SchemaArgs};

pub(crate) use ckpt::{
    CkptCommand, ConvertArgs, DiffArgs, ExpertsArg, InspectArgs, MemoryArgs, ReadArgs, VerifyCkptArgs,
    target_name,
};
use values::{DEVICES, DTYPES, FORMATS, mesh, one_of, positive};

const EXAMPLES: &str = "Examples:
  fsdp train examples/quickstart.toml
  fsdp verify examples/quickstart.toml --world-sizes 1,2,4
  fsdp audit run.toml --before checkpoint-7 --after checkpoint-8 --batch batch.safetensors
  fsdp schedule examples/quickstart.toml
  fsdp schedule examples/quickstart.toml --ops --costs
  fsdp plan examples/llama-8b.toml --on h100-sxm --nodes 8
  fsdp report runs/quickstart
  fsdp ckpt convert checkpoint/ model.safetensors --to safetensors";

const LOGS: &str =
    "RUST_LOG=fsdp=info or fsdp=debug logs events to stderr: start, plan, memory, data, checkpoints,
evaluation, slow ranks. With --log-format json, fsdp=info is the default.";

/// Fully sharded data parallel training that equals unsharded training, bit for bit.
#[derive(Debug, Parser)]
#[command(
    name = "fsdp",
    version = VERSION.as_str(),
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = format!("{EXAMPLES}\n\n{}\n{LOGS}", exit_code::help())
)]
pub(crate) struct Args {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) logs: LogArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a first run file
    Init(InitArgs),
    /// Train a model as a run file describes
    Train(TrainArgs),
    /// Compare sharded training with plain unsharded training, on your own run file
    Verify(VerifyArgs),
    /// Judge one step of another program: is its gradient right, and its update?
    Audit(AuditArgs),
    /// Start a run as several processes, here or on several nodes, and restart it after temporary failures
    Launch(LaunchArgs),
    /// Compute the loss and the perplexity of a model on a run file's evaluation sets
    Eval(EvalArgs),
    /// Let a model continue a text
    Generate(GenerateArgs),
    /// Check everything that a run file names, without running it
    Check(CheckArgs),
    /// Print what a training step does, without running it
    Schedule(ScheduleArgs),
    /// Predict what a run would take on other machines: memory, time, cost, better settings
    Plan(PlanArgs),
    /// Compile a step with XLA for devices that need not be present, and report what it takes
    #[cfg(feature = "xla")]
    Compile(CompileArgs),
    /// Measure how long operations and collectives take on this machine, for plans
    Calibrate(CalibrateArgs),
    /// Show what runs recorded: one HTML file with curves, memory, schedule and configurations
    Report(ReportArgs),
    /// Inspect, convert, verify and compare checkpoints, PyTorch's too
    #[command(subcommand)]
    Ckpt(CkptCommand),
    /// Measure speed and memory
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Report which devices can be used on this machine, and what others lack
    Doctor(DoctorArgs),
    /// Print a script that completes commands and options in a shell
    Completions(CompletionsArgs),
    /// Write man pages
    Man(ManArgs),
    /// Print the JSON schema of run files, for editors
    Schema(SchemaArgs),
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Time training steps of a Llama on random tokens
    Train(BenchTrainArgs),
}

/// `fsdp train`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "The output folder (run.out_dir) gets:
  metrics.jsonl   one JSON object per step: loss, grad_norm, lr, tokens_per_s, wait_ms, ...;
                  per evaluation and set: eval_loss, eval_perplexity, eval_tokens;
                  in front of the steps of each start, one with hosts, processes and transport
  metrics.csv, evaluations.csv, tensorboard/    the same figures, where run.metrics asks for them
  resolved.toml   the run file with every default written out
  model/          weights, config.json and the base's tokenizer files, for transformers and others
  checkpoints/    step-00000050, ..: the whole state, as [checkpoint] says; PyTorch reads them too

Ctrl-C (or SIGTERM) stops after the current step, saves a checkpoint and exports the model; a
second one exits at once. After SIGTERM the exit code is 75: repeat the command with --resume.
Before the first step, SIGTERM (75) and Ctrl-C (130) leave the files of an earlier run unchanged.
A resumed run has the bits of one that never stopped, even on another number of ranks where the
numerics contract holds. train.steps and the optimizer's numbers may change; that is recorded.

--resume-from also takes weights, optimizer state and step from PyTorch's distributed checkpoints
(FSDP2, torchtitan), folders of accelerate and of the Trainer of transformers, DeepSpeed and
PyTorch/XLA, and prints what it took, derived and did not find. Learning rate and data position
follow from the run file and the step.

Examples:
  fsdp train examples/quickstart.toml
  fsdp train examples/quickstart.toml --set train.steps=50 --set run.out_dir=runs/short
  fsdp train examples/quickstart.toml --set checkpoint.every=50
  fsdp train examples/quickstart.toml --set checkpoint.every=50 --resume --set run.ranks=2
  fsdp train examples/quickstart.toml --set checkpoint.every=50 --resume --skip-unsound
  fsdp train run.toml --resume-from torchtitan/checkpoint/step-1000
  fsdp train examples/quickstart.toml --overwrite --trace trace.json   (open it in ui.perfetto.dev)")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// Continue from the newest complete checkpoint in run.out_dir, or start if there is none
    #[arg(long)]
    pub(crate) resume: bool,
    /// With --resume: skip damaged checkpoints, and keep them under names that end in .unsound
    #[arg(long, requires = "resume")]
    pub(crate) skip_unsound: bool,
    /// Continue from this checkpoint: a directory step-.. of a run, or a file or folder of another trainer
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
    pub(crate) resume_from: Option<PathBuf>,
    /// With --resume-from: the number of steps done, if another trainer's checkpoint does not record it
    #[arg(long, value_name = "N", requires = "resume_from")]
    pub(crate) at_step: Option<u64>,
    /// Replace what an earlier run left in run.out_dir
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Write every operation of the schedule, per rank and queue, as Chrome/Perfetto JSON; of existing
    /// files, only an earlier trace is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

/// `fsdp verify`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Each world size trains the same steps as one plain process without sharding. Where the
numerics contract promises equal bits (worlds and micro-batches that are powers of two, on the
device \"cpu\"), losses, gradients, parameters and optimizer state must be equal, bit for bit;
elsewhere gradients must lie within a derived bound. Communication must match its closed form and
memory its prediction, to the byte.
If a launcher has started several processes, they hold the ranks, connected as in training; the
first one also trains without sharding, compares, and reports.

Examples:
  fsdp verify examples/quickstart.toml --world-sizes 1,2,4
  fsdp verify cluster.toml --world-sizes 2,8 --shrink      (an 8B configuration, on a laptop)
  fsdp verify run.toml --meshes \"shard=4; shard=2,context=2; context=4\"
  fsdp verify examples/quickstart.toml --world-sizes 4 --order-seed 7 --json report.json"
)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// Numbers of ranks to try; those that do not fit the run file are skipped, with the reason [default: 1,2,4; in several
    /// processes, which form one world, run.ranks]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = positive)]
    pub(crate) world_sizes: Vec<usize>,
    /// Meshes to try in place of world sizes, each as the sizes of its axes (replicate, shard, context, expert; those left out
    /// are 1): "shard=4; shard=2,context=2; shard=4,expert=2". Samples and experts are cut into as many chunks as the largest
    /// axis has ranks, if the run file does not have more
    #[arg(long, value_name = "MESH;MESH;...", value_delimiter = ';', value_parser = mesh, conflicts_with = "world_sizes")]
    pub(crate) meshes: Vec<Mesh>,
    /// Optimizer steps to train
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: u64,
    /// Keep units and policies but reduce layers, widths, sequences and batches
    #[arg(long)]
    pub(crate) shrink: bool,
    /// Also write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Run host queues in a random order that respects declared waits only, with poisoned memory
    #[arg(long, value_name = "SEED")]
    pub(crate) order_seed: Option<u64>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

/// `fsdp schedule`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Nothing is run and no training data is read. The schedule is the same on every rank; memory
may differ by the optimizer state of padding.

Examples:
  fsdp schedule examples/quickstart.toml
  fsdp schedule examples/llama-8b.toml --set fsdp.activation_checkpointing=full | less"
)]
pub(crate) struct ScheduleArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// The rank whose memory is predicted
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub(crate) rank: usize,
    /// Print every operation that blocks run, with operands, shapes and dtypes
    #[arg(long)]
    pub(crate) ops: bool,
    /// Print what blocks and the step cost: FLOPs, bytes, FLOPs for each byte
    #[arg(long)]
    pub(crate) costs: bool,
    /// Print buffers, operations with their operands, and costs as JSON, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// `fsdp bench train`.
#[derive(Clone, Debug, ClapArgs)]
#[command(
    after_help = "The model is a Llama; the optimizer AdamW (lr 1e-3, betas 0.9 and 0.99, weight decay 0.1) with
gradients clipped at 1.0. The median is over the steps after the warm-up.

Examples:
  fsdp bench train --ranks 4
  fsdp bench train --ranks 2 --micro-batch 2 --json
  fsdp bench train --hidden 512 --layers 8 --ffn 2048 --param-dtype bf16
  fsdp bench train --device torch-cpu --param-dtype bf16"
)]
pub(crate) struct BenchTrainArgs {
    /// Elements of a hidden state
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub(crate) hidden: usize,
    /// Layers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive)]
    pub(crate) layers: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive)]
    pub(crate) heads: usize,
    /// Key/value heads
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = positive)]
    pub(crate) kv_heads: usize,
    /// Elements between the two halves of the MLP
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = positive)]
    pub(crate) ffn: usize,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = positive)]
    pub(crate) vocab: usize,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub(crate) seq: usize,
    /// Sequences per step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive)]
    pub(crate) global_batch: usize,
    /// Sequences per forward and backward [default: global batch / ranks]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) micro_batch: Option<usize>,
    /// Ranks, as threads of this process or of all processes that were started together [default: one per process]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ranks: Option<usize>,
    /// Steps to run
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = positive)]
    pub(crate) steps: usize,
    /// Warm-up steps, which are not timed
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) warmup: usize,
    /// Threads that compute, over all ranks [default: one per core]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Dtype of gathered parameters and of compute
    #[arg(long, value_name = "DTYPE", value_parser = one_of(&DTYPES), default_value = "f32")]
    pub(crate) param_dtype: DType,
    /// What computes
    #[arg(long, value_name = "DEVICE", value_parser = one_of(&DEVICES), default_value = "cpu")]
    pub(crate) device: Device,
    /// Recompute layers in backward
    #[arg(long)]
    pub(crate) checkpointing: bool,
    /// Train LoRA adapters of this rank on all linear maps, and nothing else
    #[arg(long, value_name = "RANK", value_parser = positive)]
    pub(crate) lora_rank: Option<usize>,
    /// How the base of adapters is kept: a value of adapter.quantize
    #[arg(long, value_name = "FORMAT", value_parser = one_of(&FORMATS), default_value = "none", requires = "lora_rank")]
    pub(crate) quantize: Quantize,
    /// Classes of modules to wrap
    #[arg(long, value_name = "CLASS,...", value_delimiter = ',', default_value = "LlamaDecoderLayer")]
    pub(crate) wrap: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

impl BenchTrainArgs {
    /// Ranks over all processes.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.unwrap_or(1)
    }
}

#[cfg(test)]
mod tests;
