//! From `run.device` to a launcher: the only place that chooses the device of ranks.
//!
//! A command is [`Work`] that runs on any launcher. Each device has a module that creates its launchers: [`host`], and
//! `torch`, `cuda` and `xla` if they are built in.

pub(crate) mod clock;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod host;
mod together;
#[cfg(feature = "torch")]
mod torch;
mod work;
#[cfg(feature = "xla")]
pub(crate) mod xla;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::place::ProcessPlace;
use fsdp_config::{Device, Resolved, RunConfig, World};
use fsdp_core::Rank;
use fsdp_core::memory::Usage;
use fsdp_core::plan::Plan;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_train::{TrainError, predict};

use crate::cluster;
use crate::error::CliError;
#[cfg(not(feature = "torch"))]
use crate::with_libtorch;
pub(crate) use work::{Purpose, Work};

/// Checks, before data is read, that this binary supports a device with the libtorch that it has found.
///
/// # Errors
/// [`CliError`]: the device is not built in, or libtorch has another version than at build time.
pub(crate) fn expect(device: Device) -> Result<(), CliError> {
    match device {
        Device::Cpu => Ok(()),
        #[cfg(feature = "torch")]
        Device::TorchCpu => Ok(fsdp_cuda::torch::check_version()?),
        #[cfg(feature = "cuda")]
        Device::Cuda => Ok(fsdp_cuda::torch::check_version()?),
        #[cfg(feature = "xla")]
        Device::Xla => Ok(()),
        #[cfg(not(feature = "xla"))]
        Device::Xla => Err(missing(device, "xla")),
        #[cfg(not(feature = "torch"))]
        Device::TorchCpu => Err(missing(device, "torch")),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => Err(missing(device, "cuda")),
    }
}

/// Does the check of [`expect`], and checks that a plugin needed by the device is available.
///
/// # Errors
/// [`CliError`].
pub(crate) fn expect_run(run: &RunConfig) -> Result<(), CliError> {
    expect(run.device)?;
    #[cfg(feature = "xla")]
    if run.device == Device::Xla {
        fsdp_xla::versions(&xla::plugin(&run.xla)?)?;
    }
    Ok(())
}

/// Checks that a device runs the operations of a step one by one, as required by an option of a command.
///
/// # Errors
/// [`CliError::Option`].
pub(crate) fn expect_operations(device: Device, option: &'static str) -> Result<(), CliError> {
    if device != Device::Xla {
        return Ok(());
    }
    let what = "run.device = \"xla\" runs a step as one program, whose operations can be neither timed nor reordered from \
                outside: leave the option out, or choose another device";
    Err(CliError::Option { option, what: what.to_owned() })
}

/// The memory that a rank needs on the run's device, as predicted by the ledger.
///
/// # Errors
/// Those of the model: operations that do not fit together.
pub(crate) fn predicted(
    config: &Resolved,
    model: &(impl Architecture + Clone),
    plan: &Plan,
) -> Result<Usage, TrainError> {
    match config.run.device {
        #[cfg(feature = "torch")]
        Device::TorchCpu => predict::<fsdp_cuda::torch::Torch<HostMemory>, _>(config, model, plan, Rank(0)),
        #[cfg(feature = "cuda")]
        Device::Cuda => {
            predict::<fsdp_cuda::torch::Torch<fsdp_cuda::CudaMemory>, _>(config, model, plan, Rank(0))
        }
        _ => predict::<HostMemory, _>(config, model, plan, Rank(0)),
    }
}

/// Whether the ranks of a run compute on GPUs.
pub(crate) fn has_gpus(run: &RunConfig) -> bool {
    match run.device {
        Device::Cuda => true,
        #[cfg(feature = "xla")]
        Device::Xla => xla::is_for_gpus(run),
        _ => false,
    }
}

/// The world by default: a rank per process, or, if they compute on GPUs and a launcher has started one process per
/// node, one per visible GPU.
pub(crate) fn world(place: Option<ProcessPlace>, has_gpus: bool) -> World {
    let processes = place.map_or(1, |place| place.processes);
    let ranks = match has_gpus && cluster::is_alone_on_node(place) {
        // Errors of the driver are reported when it is needed.
        true => processes * fsdp_cuda::device::gpu_count().unwrap_or(1).max(1),
        false => processes,
    };
    World { ranks, nodes: place.map(ProcessPlace::nodes) }
}

#[cfg(not(all(feature = "cuda", feature = "xla")))]
fn missing(device: Device, feature: &'static str) -> CliError {
    #[cfg(not(feature = "torch"))]
    if let Some(unfit) = with_libtorch::unfit()
        && device != Device::Xla
    {
        return CliError::Input(format!("device \"{}\" cannot be used: {unfit}", device.name()));
    }
    let instead = if cfg!(feature = "torch") { "\"cpu\" or \"torch-cpu\"" } else { "\"cpu\"" };
    let command = format!("cargo build --release -p fsdp-cli --features {feature}");
    let (packages, build) = match device {
        Device::Xla => ("package fsdp", format!("`{command}`")),
        _ => {
            let torch = fsdp_cuda::libtorch::VERSION;
            let build = format!("`LIBTORCH_USE_PYTORCH=1 {command}` (after `pip install torch=={torch}`)");
            ("packages fsdp and fsdp-cuda", build)
        }
    };
    CliError::Input(format!(
        "device \"{}\": this fsdp was built without the feature `{feature}`; install the Python {packages}, build it with {build}, \
         or use {instead}",
        device.name()
    ))
}

/// Runs work on ranks: those of this process, if there are several.
///
/// # Errors
/// [`CliError`]: the device is not available.
pub(crate) fn on<W: Work>(
    run: &RunConfig,
    purpose: Purpose,
    cluster: Option<&Cluster>,
    work: W,
) -> Result<W::Outcome, CliError> {
    expect(run.device)?;
    match (run.device, cluster) {
        #[cfg(feature = "torch")]
        (Device::TorchCpu, None) => Ok(work.on(&torch::ranks(run, purpose)?)),
        #[cfg(feature = "torch")]
        (Device::TorchCpu, Some(cluster)) => Ok(work.on(&torch::processes(run, purpose, cluster)?)),
        #[cfg(feature = "cuda")]
        (Device::Cuda, None) => cuda::on(run, purpose, work),
        #[cfg(feature = "cuda")]
        (Device::Cuda, Some(cluster)) => cuda::among(run, purpose, cluster, work),
        #[cfg(feature = "xla")]
        (Device::Xla, None) => Ok(work.on(&xla::devices(run)?)),
        #[cfg(feature = "xla")]
        (Device::Xla, Some(cluster)) => Ok(work.on(&xla::processes(run, cluster)?)),
        (_, None) => Ok(work.on(&host::ranks(run, purpose))),
        (_, Some(cluster)) => Ok(work.on(&host::processes(run, purpose, cluster))),
    }
}

#[cfg(test)]
mod tests {
    use fsdp_comm::process::place::LaunchedBy;

    use super::*;

    #[test]
    fn process_alone_on_gpu_node_gets_one_rank_per_gpu() {
        let place = |processes, local_processes| {
            let (process, local_process) = Default::default();
            let launched_by = LaunchedBy::Torchrun;
            Some(ProcessPlace { launched_by, process, processes, local_process, local_processes })
        };
        let ranks = |place, has_gpus| world(place, has_gpus).ranks;
        assert_eq!(ranks(None, true), 1);
        assert_eq!(ranks(place(8, 4), true), 8);
        assert_eq!(ranks(place(8, 1), false), 8);
        let gpus = fsdp_cuda::device::gpu_count().unwrap_or(1).max(1);
        assert_eq!(ranks(place(8, 1), true), 8 * gpus);
    }

    #[test]
    fn unbuilt_device_error_names_cargo_feature() {
        assert_eq!(expect(Device::Cuda).is_ok(), cfg!(feature = "cuda"));
        if let Err(error) = expect(Device::Cuda) {
            assert_eq!(error.exit().code(), 2);
            assert!(error.to_string().contains("--features cuda"), "{error}");
        }
        assert_eq!(expect(Device::TorchCpu).is_ok(), cfg!(feature = "torch"));
        assert!(expect(Device::Cpu).is_ok());
    }
}
