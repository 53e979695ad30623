//! `fsdp bench gpu` and `fsdp doctor`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};

use super::{DeviceArg, NetworkArgs, positive};
use crate::bench::gpu::ModelName;

/// `fsdp bench gpu`.
#[derive(Clone, Debug, ClapArgs)]
#[command(
    after_help = "Parameters and compute are bf16, master weights and reductions f32; the optimizer is AdamW with
gradients clipped at 1.0. Steps are timed, then a few more are observed: when each queue was busy,
and how much communication was not hidden behind compute; then the ceilings of the device are
measured (a large matrix product, a large copy). Model FLOPs are 6N + 12 L d T per token. The mean
is over the steps after the warm-up.

Examples:
  fsdp bench gpu --model gpt2-124m
  fsdp bench gpu --model llama-1.2b --batch 16 --checkpointing selective --json
  fsdp bench gpu --model llama-tiny --device torch-cpu     (to try it without a GPU)"
)]
pub(crate) struct BenchGpuArgs {
    /// The model
    #[arg(long, value_name = "NAME", value_enum, default_value_t = ModelName::Gpt2Small)]
    pub(crate) model: ModelName,
    /// What computes
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = DeviceArg::Cuda)]
    pub(crate) device: DeviceArg,
    /// Ranks, one per GPU
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    pub(crate) ranks: usize,
    /// Sequences of a rank's step [default: the model's]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// What backward recomputes
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = CheckpointingArg::None)]
    pub(crate) checkpointing: CheckpointingArg,
    /// Steps to run
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = positive)]
    pub(crate) steps: usize,
    /// Warm-up steps, which are not timed
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) warmup: usize,
    /// Peak in TFLOP/s, for the MFU [default: the data sheet's, for known cards]
    #[arg(long, value_name = "TFLOP/S")]
    pub(crate) peak_tflops: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckpointingArg {
    /// Nothing
    None,
    /// Layers, except matrix products and attention
    Selective,
    /// Layers
    Full,
}

impl CheckpointingArg {
    /// The name in run files.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            CheckpointingArg::None => "none",
            CheckpointingArg::Selective => "selective",
            CheckpointingArg::Full => "full",
        }
    }
}

/// `fsdp doctor`.
#[derive(Clone, Debug, ClapArgs)]
#[command(
    after_help = "Looks for the NVIDIA driver and its GPUs, for NVRTC, cuBLAS and NCCL, and for libtorch if this
fsdp was built with it: beside libtorch first, then where the system's loader looks. A missing part
is not a failure; the last lines show which devices a run file may name.

If a launcher has started several processes, they connect as for a run, and the first one reports
what was recognized, how fast nodes reach each other, how their clocks, CPUs and libraries
differ, and whether all see the output folder of the run file (without one: the current folder).
A problem that would fail a run gives exit code 1, and names the node.

Examples:
  fsdp doctor
  fsdp doctor --json
  fsdp doctor --launch run.toml
  srun -N 4 --ntasks-per-node 8 fsdp doctor run.toml
  fsdp launch --nproc 4 -- doctor run.toml"
)]
pub(crate) struct DoctorArgs {
    /// A run file, for run.out_dir, run.device and run.transport
    #[arg(value_name = "RUN.toml")]
    pub(crate) file: Option<PathBuf>,
    /// Change a key of the run file (may be repeated)
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE", requires = "file")]
    pub(crate) overrides: Vec<String>,
    /// Check what processes need to work together, even if there is only this one
    #[arg(long)]
    pub(crate) launch: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}
