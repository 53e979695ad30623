//! From `run.device` to a launcher: the one place where it is chosen what ranks compute on.
//!
//! A command is [`Work`] over any launcher. Each device has a module that makes its launchers, for training and for
//! verification: [`host`], and `torch` and `cuda` where they are built in.

use fsdp_comm::launch::Launcher;
use fsdp_comm::process::cluster::Cluster;
use fsdp_train::TrainBackend;
use fsdp_train::config::{Device, RunConfig};

use crate::clock::Clock;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::CliError;
use crate::host;
#[cfg(feature = "torch")]
use crate::torch;

/// What a command does with ranks, whatever they compute on.
pub(crate) trait Work {
    /// What comes of it.
    type Outcome;

    /// Does it.
    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: TrainBackend + Clock;
}

/// That this binary can compute on a device, with the libtorch that it has found: better known before the data is read.
///
/// # Errors
/// [`CliError`]: the device is not built in, or libtorch is of another version than the one that this was built with.
pub(crate) fn expect(device: Device) -> Result<(), CliError> {
    match device {
        Device::Cpu => Ok(()),
        #[cfg(feature = "torch")]
        Device::TorchCpu => Ok(fsdp_cuda::torch::check_version()?),
        #[cfg(feature = "cuda")]
        Device::Cuda => Ok(fsdp_cuda::torch::check_version()?),
        #[cfg(not(feature = "torch"))]
        Device::TorchCpu => Err(missing(device, "torch")),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => Err(missing(device, "cuda")),
    }
}

#[cfg(not(feature = "cuda"))]
fn missing(device: Device, feature: &'static str) -> CliError {
    let instead = if cfg!(feature = "torch") { "\"cpu\" or \"torch-cpu\"" } else { "\"cpu\"" };
    CliError::Device { device: device.name(), feature, instead }
}

/// Does work with ranks that train or are measured: those of this process, where there are several.
///
/// # Errors
/// [`CliError`]: the device is not there.
pub(crate) fn training<W: Work>(
    run: &RunConfig,
    cluster: Option<&Cluster>,
    work: W,
) -> Result<W::Outcome, CliError> {
    expect(run.device)?;
    if let Some(cluster) = cluster {
        return match run.device {
            Device::Cpu => Ok(work.on(&host::processes(run, cluster))),
            #[cfg(feature = "torch")]
            Device::TorchCpu => Ok(work.on(&torch::processes(run, cluster)?)),
            device => Err(CliError::ProcessDevice { device: device.name() }),
        };
    }
    match run.device {
        #[cfg(feature = "torch")]
        Device::TorchCpu => Ok(work.on(&torch::training(run)?)),
        #[cfg(feature = "cuda")]
        Device::Cuda => cuda::on(run, false, work),
        _ => Ok(work.on(&host::training(run))),
    }
}

/// Does work with ranks that are compared with the oracle; with `poison`, contents that were given up are overwritten. On
/// GPUs libtorch is held to deterministic algorithms: what differs must not be its doing.
///
/// # Errors
/// [`CliError`]: the device is not there.
pub(crate) fn verification<W: Work>(
    run: &RunConfig,
    poison: bool,
    cluster: Option<&Cluster>,
    work: W,
) -> Result<W::Outcome, CliError> {
    expect(run.device)?;
    if let Some(cluster) = cluster {
        return match run.device {
            Device::Cpu => Ok(work.on(&host::verification_processes(run, poison, cluster))),
            #[cfg(feature = "torch")]
            Device::TorchCpu => Ok(work.on(&torch::verification_processes(run, poison, cluster)?)),
            device => Err(CliError::ProcessDevice { device: device.name() }),
        };
    }
    match run.device {
        #[cfg(feature = "torch")]
        Device::TorchCpu => Ok(work.on(&torch::verification(run, poison)?)),
        #[cfg(feature = "cuda")]
        Device::Cuda => cuda::on(&RunConfig { deterministic: true, ..run.clone() }, poison, work),
        _ => Ok(work.on(&host::verification(run, poison))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_built_in_is_named_with_the_way_to_build_it() {
        assert_eq!(expect(Device::Cuda).is_ok(), cfg!(feature = "cuda"));
        if let Err(error) = expect(Device::Cuda) {
            assert_eq!(error.exit().code(), 2);
            assert!(error.to_string().contains("--features cuda"), "{error}");
        }
        assert_eq!(expect(Device::TorchCpu).is_ok(), cfg!(feature = "torch"));
        assert!(expect(Device::Cpu).is_ok());
    }
}
