//! Arguments of `fsdp compile`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::shared::RunFileArgs;
use super::values::positive;

/// `fsdp compile`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "No device, data or weights are needed: the step is traced as for run.device = \"xla\", on stand-in
tokens and parameters that take no memory, and compiled by the plugin, for devices that may be
absent.

Topologies have the plugin's names: v4:2x2x1, v5e:4x4, v5p:2x2x2, v6e:2x4 (libtpu); cpu:4 is four
devices of this processor, h100:1x1x8 eight GPUs of one host (the CUDA plugin). Other GPUs need
options: --topology-option target_config=@b200.txtpb --topology-option topology=1x1x8.
libtpu asks a metadata server about the machine unless TPU_SKIP_MDS_QUERY=1 is set.

Examples:
  fsdp compile examples/quickstart.toml --topology cpu:4 --plugin pjrt_c_api_cpu_plugin.so
  TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost \\
    fsdp compile run.toml --topology v4:4x8x8 --plugin libtpu.so --json"
)]
pub(crate) struct CompileArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// Devices to compile for, by the plugin's name for them; each is a rank
    #[arg(long, value_name = "NAME")]
    pub(crate) topology: String,
    /// An option of the topology; @FILE is the text of a file (may be repeated)
    #[arg(long = "topology-option", value_name = "KEY=VALUE")]
    pub(crate) topology_options: Vec<String>,
    /// The PJRT plugin's shared library, or cpu, tpu or cuda for that of a Python package [default: `run.xla.plugin`, or what `PJRT_PLUGIN_LIBRARY_PATH` names]
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<String>,
    /// Ranks, on the first devices [default: all devices]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ranks: Option<usize>,
    /// Write the program, as StableHLO text
    #[arg(long, value_name = "FILE")]
    pub(crate) dump: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
