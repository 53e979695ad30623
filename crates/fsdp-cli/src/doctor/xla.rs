//! PJRT plugins: those installed by Python packages, and the one that a run would use.

use std::path::{Path, PathBuf};

use fsdp_config::{Device, XlaConfig};
use fsdp_cuda::doctor::{Finding, Status};
use fsdp_xla::{PluginReport, PluginVersions, XlaError, inspect, versions};

use super::Usable;
use crate::device::xla::{installed_plugins, plugin};

/// All plugins found, with their versions. None is started: a GPU plugin would take the GPUs' memory, and a TPU plugin
/// would wait for the TPUs.
pub(super) fn examine(xla_config: &XlaConfig) -> Vec<Finding> {
    let installed = installed_plugins();
    let configured =
        plugin(xla_config).ok().filter(|configured| installed.iter().all(|(_, path)| path != configured));
    let python_plugins = installed.iter().map(|(name, path)| (format!("PJRT plugin \"{name}\""), path));
    let configured = configured.iter().map(|path| ("PJRT plugin".to_owned(), path));
    python_plugins.chain(configured).map(|(part, path)| finding(part, path)).collect()
}

fn finding(part: String, path: &Path) -> Finding {
    match versions(path) {
        Ok(found) => Finding::found(part, Some(version_text(found)), Some(path.to_owned())),
        Err(error) => Finding::bad(part, Status::Unusable, error.to_string()),
    }
}

fn version_text(PluginVersions { api: (major, minor), stablehlo }: PluginVersions) -> String {
    let stablehlo = stablehlo.map(|[major, minor, patch]| format!(", StableHLO {major}.{minor}.{patch}"));
    format!("PJRT {major}.{minor}{}", stablehlo.unwrap_or_default())
}

/// Whether a run may use XLA, with the devices of its plugin. One of several processes does not query them: it might
/// wait for the others.
pub(super) fn device(xla_config: &XlaConfig, is_alone: bool) -> Usable {
    let found = plugin(xla_config)
        .and_then(|path| if is_alone { with_devices(&path) } else { without_devices(path) });
    let (usable, with) = match found {
        Ok(with) => (true, with),
        Err(XlaError::NoPlugin) => (false, no_plugin_message()),
        Err(error) => (false, error.to_string()),
    };
    Usable { device: Device::Xla.name().to_owned(), usable, with }
}

fn with_devices(path: &Path) -> Result<String, XlaError> {
    let PluginReport { versions, platform: [platform, version], devices } = inspect(path)?;
    let (plugin, versions) = (path.display(), version_text(versions));
    Ok(format!("{devices} devices of {platform} ({version}) by {plugin}, {versions}"))
}

fn without_devices(path: PathBuf) -> Result<String, XlaError> {
    versions(&path)?;
    Ok(format!("the devices that {} has once all processes ask for them", path.display()))
}

/// The message that no plugin is configured, and which are available.
fn no_plugin_message() -> String {
    let good = installed_plugins().into_iter().filter(|(_, path)| versions(path).is_ok());
    let names: Vec<String> = good.map(|(name, _)| format!("\"{name}\"")).collect();
    match names.is_empty() {
        true => XlaError::NoPlugin.to_string(),
        false => format!("no plugin is named; run.xla.plugin may be {}", names.join(", ")),
    }
}
