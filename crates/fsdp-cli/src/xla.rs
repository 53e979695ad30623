//! The launcher of ranks on the devices of a PJRT plugin.

use std::path::PathBuf;
use std::sync::Arc;

use fsdp_train::config::{RunConfig, XlaReduction};
use fsdp_xla::{Devices, ProgramOptions, Reduction, Told, XlaError};

use crate::error::CliError;
use crate::{host, output};

/// The variable that names a plugin where the run file does not, as for PyTorch/XLA's and JAX's test programs.
const PLUGIN_VARIABLE: &str = "PJRT_PLUGIN_LIBRARY_PATH";

/// The plugin that a run file names, or the environment.
///
/// # Errors
/// [`XlaError::NoPlugin`].
pub(crate) fn plugin(run: &RunConfig) -> Result<PathBuf, XlaError> {
    run.xla.plugin.as_ref().map(|path| Ok(PathBuf::from(path))).unwrap_or_else(named_plugin)
}

/// The plugin that the environment names.
///
/// # Errors
/// [`XlaError::NoPlugin`].
pub(crate) fn named_plugin() -> Result<PathBuf, XlaError> {
    let given = std::env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty());
    given.map(PathBuf::from).ok_or(XlaError::NoPlugin)
}

/// How programs add gradients over ranks.
pub(crate) fn reduction(reduction: XlaReduction) -> Reduction {
    match reduction {
        XlaReduction::Tree => Reduction::Tree,
        XlaReduction::Native => Reduction::Native,
    }
}

/// Ranks that train, are measured or verified: each has a device of the plugin.
///
/// # Errors
/// [`CliError`]: there is no plugin, or it has too few devices.
pub(crate) fn devices(run: &RunConfig) -> Result<Devices, CliError> {
    let reduction = reduction(run.xla.reduction);
    let folder = |key: &Option<String>| key.as_ref().map(PathBuf::from);
    let (dump, compile_cache) = (folder(&run.xla.dump), folder(&run.xla.compile_cache));
    let options = ProgramOptions { reduction, dump, compile_cache };
    let devices = Devices::new(&plugin(run)?, run.ranks, options, host::world_options(run, false))?;
    Ok(devices.heard_by(Arc::new(hear)))
}

/// Passes on what is told of programs: to the log, and, where something is not as it should be, to the user.
fn hear(told: &Told) {
    match told {
        Told::Compiled { operations, took } => {
            tracing::info!(target: "fsdp", operations, took_s = took.as_secs_f64(), "a program was compiled");
        }
        Told::Found { operations, took } => {
            tracing::info!(target: "fsdp", operations, took_s = took.as_secs_f64(), "a compiled program was found");
        }
        _ => output::warning(&told.to_string()),
    }
}
