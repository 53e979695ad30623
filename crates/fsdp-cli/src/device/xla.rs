//! Launchers of ranks on the devices of a PJRT plugin.

mod wheel;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::launch::Processes;
use fsdp_config::{RunConfig, XlaConfig, XlaReduction};
use fsdp_core::Rank;
use fsdp_cuda::device::{gpu_count, gpus_of_process};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_xla::{Devices, ProgramEvent, ProgramForm, ProgramOptions, Reduction, Tracer, XlaError};

pub(crate) use self::wheel::{installed_plugins, plugin_named};
use super::host;
use super::together::Together;
use crate::error::CliError;
use crate::output;

/// The variable that names a plugin if the run file does not, as for test programs of PyTorch/XLA and JAX.
const PLUGIN_VARIABLE: &str = "PJRT_PLUGIN_LIBRARY_PATH";

/// The plugin named by the run file or the environment.
///
/// # Errors
/// [`XlaError::NoPlugin`], [`XlaError::Unusable`].
pub(crate) fn plugin(config: &XlaConfig) -> Result<PathBuf, XlaError> {
    let of_environment = || {
        let given = std::env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty());
        given.map(PathBuf::from).ok_or(XlaError::NoPlugin)
    };
    config.plugin.as_deref().map_or_else(of_environment, plugin_named)
}

/// Whether the run's plugin is for GPUs. Errors of the plugin are reported when it is needed.
pub(crate) fn is_for_gpus(run: &RunConfig) -> bool {
    plugin(&run.xla).and_then(|path| fsdp_xla::is_for_gpus(&path)).unwrap_or(false)
}

/// The form of the run's programs.
pub(crate) fn form(run: &RunConfig) -> ProgramForm {
    let reduction = match run.xla.reduction {
        XlaReduction::Tree => Reduction::Tree,
        XlaReduction::Native => Reduction::Native,
    };
    ProgramForm { reduction, scan_layers: run.xla.scan_layers }
}

/// Ranks that train, are measured or verified, all in this process: each has a device of the plugin.
///
/// # Errors
/// [`CliError`]: there is no plugin, or it has too few devices.
pub(crate) fn devices(run: &RunConfig) -> Result<Devices, CliError> {
    let devices =
        Devices::new(&plugin(&run.xla)?, run.ranks, programs(run), host::world_options(run, false))?;
    Ok(devices.with_listener(Arc::new(log_event)))
}

/// The ranks of this process, one of several: each has one of the devices that the plugin gives to this process; and the
/// oracle, which is on the host.
///
/// # Errors
/// [`CliError`]: there is no plugin, it does not connect processes, or its device count differs from that of ranks.
pub(crate) fn processes(
    run: &RunConfig,
    cluster: &Cluster,
) -> Result<Together<Tracer, Devices<Processes<HostMemory>>>, CliError> {
    let pool = HostPool::new();
    let host = cluster.processes(move |_: Rank, _| {
        let pool = Arc::clone(&pool);
        host::memory(HostOptions { pool, threads: 1, poison: false, resident: false })
    });
    let limit = Duration::from_secs_f64(run.timeout_s);
    let devices = Devices::among(&plugin(&run.xla)?, host, local_gpus(run, cluster)?, programs(run), limit)?;
    let oracle = Tracer::new(form(run), false, host::world_options(run, false));
    Ok(Together::new(oracle, devices.with_listener(Arc::new(log_event))))
}

/// The GPUs of this process, if the plugin is for GPUs and NVIDIA's driver lists some.
fn local_gpus(run: &RunConfig, cluster: &Cluster) -> Result<Option<Range<usize>>, CliError> {
    let (place, ranks) = (cluster.place(), cluster.assembly().local().len());
    let gpus = if is_for_gpus(run) { gpu_count().unwrap_or(0) } else { 0 };
    if gpus == 0 {
        return Ok(None);
    }
    let is_chosen = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
    Ok(Some(gpus_of_process(gpus, ranks, (place.local_process, place.local_processes), is_chosen)?))
}

fn programs(run: &RunConfig) -> ProgramOptions {
    let folder = |key: &Option<String>| key.as_ref().map(PathBuf::from);
    let (dump, compile_cache) = (folder(&run.xla.dump), folder(&run.xla.compile_cache));
    ProgramOptions { form: form(run), dump, compile_cache }
}

/// Forwards events about programs to the log, and problems to the user.
fn log_event(event: &ProgramEvent) {
    match event {
        ProgramEvent::Compiled { operations, took } => {
            tracing::info!(target: "fsdp", operations, took_s = took.as_secs_f64(), "a program was compiled");
        }
        ProgramEvent::Found { operations, took } => {
            tracing::info!(target: "fsdp", operations, took_s = took.as_secs_f64(), "a compiled program was found");
        }
        _ => output::warning(&event.to_string()),
    }
}
