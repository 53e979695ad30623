//! Arguments of `fsdp calibrate`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use fsdp_config::Device;

use super::shared::NetworkArgs;
use super::values::{DEVICES, one_of, positive};

/// `fsdp calibrate`.
#[derive(Clone, Debug, ClapArgs)]
#[command(
    after_help = "Models of several shapes are trained for a few steps, on one rank and on as many as there are
cores or GPUs; the time of each operation is recorded with its sizes. Then collectives are timed:
between ranks of this process, and on the CPU also between processes, which `fsdp launch` starts.
All points go to the file, with the machine, the version and the date. The file describes a cluster,
for `fsdp plan --cluster FILE`; what is not measured (network, price, failures) is taken from --like
and marked so. It takes some minutes; other work on the machine makes the times wrong.

If a launcher has started several processes, only collectives between them are timed, and added to
a file of the same machine, device and version.

Examples:
  fsdp calibrate --out mine.toml
  fsdp calibrate --device cuda --like h100-sxm --out mine.toml
  mpirun -np 4 fsdp calibrate --out mine.toml
  fsdp plan run.toml --cluster mine.toml"
)]
pub(crate) struct CalibrateArgs {
    /// Where the points go; of existing files, only an earlier calibration is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// What computes
    #[arg(long, value_name = "DEVICE", value_parser = one_of(&DEVICES), default_value = "cpu")]
    pub(crate) device: Device,
    /// The named cluster that supplies what is not measured [default: cpu-2core on CPUs]
    #[arg(long, value_name = "NAME")]
    pub(crate) like: Option<String>,
    /// The most ranks on this machine [default: twice its cores, or its GPUs]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ranks: Option<usize>,
    /// Steps of each model that are timed, in each of three passes over all models
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = positive)]
    pub(crate) steps: usize,
    /// Number of models, smallest first [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) models: Option<usize>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}
