//! Calibration files: all points are from the same machine, and writes are atomic.

use std::path::Path;

use fsdp_config::Device;
use fsdp_config::input_file::{self, MEASUREMENT_BYTES_MAX};
use fsdp_plan::cluster::Cluster;
use fsdp_plan::measured::{Measured, Points};

use super::machine;
use crate::atomic_file;
use crate::error::CliError;

/// Reads the cluster in a file.
///
/// # Errors
/// [`CliError`]: the file cannot be read, or is not a cluster.
pub(crate) fn read_cluster(file: &Path) -> Result<Cluster, CliError> {
    let text = input_file::read_text(file, MEASUREMENT_BYTES_MAX).map_err(CliError::read(file))?;
    Ok(Cluster::parse(&text, &file.display().to_string())?)
}

/// Checks that points of this machine may be added to those of a file; returns the file's cluster and points.
///
/// # Errors
/// [`CliError::Option`]: the file has no points, or those of another machine, device or version.
pub(super) fn expect_compatible(
    mut cluster: Cluster,
    device: Device,
    file: &Path,
) -> Result<(Cluster, Measured), CliError> {
    let Some(measured) = cluster.measured.take() else {
        let file = file.display();
        let what = format!(
            "{file} has no measured points; run `fsdp calibrate --out {file}` without a launcher first"
        );
        return Err(CliError::Option { option: "--out", what });
    };
    // The name of a GPU is known only once its rank holds it.
    let machine_name =
        machine::name(device, (device == Device::Cuda).then(|| measured.machine.clone()), measured.threads);
    expect_matching("machine", &machine_name, &measured.machine, file)?;
    expect_matching("device", device.name(), &measured.device, file)?;
    expect_matching("version", env!("CARGO_PKG_VERSION"), &measured.version, file)?;
    Ok((cluster, measured))
}

/// Checks that a property of a file's points matches this machine's.
///
/// # Errors
/// [`CliError::Option`].
pub(super) fn expect_matching(what: &str, local: &str, recorded: &str, file: &Path) -> Result<(), CliError> {
    if local == recorded {
        return Ok(());
    }
    let what = format!(
        "{} is from another {what}: \"{recorded}\", but this one is \"{local}\"; their times cannot be mixed, so \
         choose another file",
        file.display()
    );
    Err(CliError::Option { option: "--out", what })
}

/// Adds points, replacing those with the same number of ranks.
pub(super) fn add(all: &mut Points, added: Points) {
    for (what, points) in added {
        let existing = all.entry(what).or_default();
        existing.retain(|point| points.iter().all(|new| new.ranks != point.ranks));
        existing.extend(points);
    }
}

/// Checks that a file does not exist, or is a calibration of this machine with any number of threads.
///
/// # Errors
/// [`CliError::Option`]: it has other contents.
pub(super) fn expect_replaceable(file: &Path, machine: &str) -> Result<(), CliError> {
    if !file.exists() {
        return Ok(());
    }
    let refused = |what: &str| {
        let what = format!("{} exists already and is {what}; choose another file", file.display());
        CliError::Option { option: "--out", what }
    };
    let measured = read_cluster(file).ok().and_then(|cluster| cluster.measured);
    let measured = measured.ok_or_else(|| refused("not a calibration"))?;
    let model =
        |machine: &str| machine.rsplit_once(", ").map_or(machine.to_owned(), |(model, _)| model.to_owned());
    if model(&measured.machine) != model(machine) {
        return Err(refused(&format!("a calibration of another machine: {}", measured.machine)));
    }
    Ok(())
}

/// Writes a file atomically.
///
/// # Errors
/// [`CliError::Write`].
pub(super) fn write(cluster: &Cluster, file: &Path) -> Result<(), CliError> {
    atomic_file::replace(file, &cluster.to_toml()).map_err(CliError::write(file))
}

#[cfg(test)]
mod tests;
