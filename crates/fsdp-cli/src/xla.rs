//! The launcher of ranks on the devices of a PJRT plugin.

use std::path::PathBuf;

use fsdp_train::config::{RunConfig, XlaReduction};
use fsdp_xla::{Devices, ProgramOptions, Reduction, XlaError};

use crate::error::CliError;
use crate::host;

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

/// Ranks that train, are measured or verified: each has a device of the plugin.
///
/// # Errors
/// [`CliError`]: there is no plugin, or it has too few devices.
pub(crate) fn devices(run: &RunConfig) -> Result<Devices, CliError> {
    let reduction = match run.xla.reduction {
        XlaReduction::Tree => Reduction::Tree,
        XlaReduction::Native => Reduction::Native,
    };
    let options = ProgramOptions { reduction, dump: run.xla.dump.as_ref().map(PathBuf::from) };
    Ok(Devices::new(&plugin(run)?, run.ranks, options, host::world_options(run, false))?)
}
