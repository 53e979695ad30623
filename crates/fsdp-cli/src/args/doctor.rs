//! `fsdp doctor`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::shared::NetworkArgs;

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
