//! Files of points: of the same machine, and whole.

use std::path::Path;

use fsdp_plan::cluster::Cluster;
use fsdp_plan::measured::{Measured, Points};
use fsdp_train::config::Device;
use fsdp_train::input_file::{self, MEASUREMENT_BYTES_MAX};

use super::machine;
use crate::error::CliError;
use crate::whole_file;

/// The cluster that is in a file.
///
/// # Errors
/// [`CliError`]: it can not be read, or is no cluster.
pub(super) fn earlier(file: &Path) -> Result<Cluster, CliError> {
    let unreadable = |source| CliError::ReadFile { file: file.to_owned(), source };
    let text = input_file::read_text(file, MEASUREMENT_BYTES_MAX).map_err(unreadable)?;
    Ok(Cluster::parse(&text, &file.display().to_string())?)
}

/// That points of this machine may stand beside those of a file; its cluster, and its points.
///
/// # Errors
/// [`CliError::Option`]: it has none, or those of another machine, device or version.
pub(super) fn expect_same(
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
    // A GPU is asked for its name when its rank has it.
    let own =
        machine::name(device, (device == Device::Cuda).then(|| measured.machine.clone()), measured.threads);
    expect_own("machine", &own, &measured.machine, file)?;
    expect_own("device", device.name(), &measured.device, file)?;
    expect_own("version", env!("CARGO_PKG_VERSION"), &measured.version, file)?;
    Ok((cluster, measured))
}

/// That a file's points are of what is here.
///
/// # Errors
/// [`CliError::Option`].
pub(super) fn expect_own(what: &str, own: &str, theirs: &str, file: &Path) -> Result<(), CliError> {
    if own == theirs {
        return Ok(());
    }
    let what = format!(
        "{} is of another {what}: \"{theirs}\", and this one is \"{own}\"; times of different ones do not go together, so \
         choose another file",
        file.display()
    );
    Err(CliError::Option { option: "--out", what })
}

/// Adds points, in the place of those with the same number of ranks.
pub(super) fn add(all: &mut Points, more: Points) {
    for (what, points) in more {
        let there = all.entry(what).or_default();
        there.retain(|point| points.iter().all(|new| new.ranks != point.ranks));
        there.extend(points);
    }
}

/// That a file is not there, or is a calibration of this machine, with whatever number of threads.
///
/// # Errors
/// [`CliError::Option`]: it is something else.
pub(super) fn expect_replaceable(file: &Path, machine: &str) -> Result<(), CliError> {
    if !file.exists() {
        return Ok(());
    }
    let refused = |what: &str| {
        let what = format!("{} is there, and is {what}; choose another file", file.display());
        CliError::Option { option: "--out", what }
    };
    let measured = earlier(file).ok().and_then(|cluster| cluster.measured);
    let measured = measured.ok_or_else(|| refused("no calibration"))?;
    let model =
        |machine: &str| machine.rsplit_once(", ").map_or(machine.to_owned(), |(model, _)| model.to_owned());
    if model(&measured.machine) != model(machine) {
        return Err(refused(&format!("a calibration of another machine: {}", measured.machine)));
    }
    Ok(())
}

/// Writes a file, whole or not at all.
///
/// # Errors
/// [`CliError::Write`].
pub(super) fn write(cluster: &Cluster, file: &Path) -> Result<(), CliError> {
    whole_file::replace(file, &cluster.to_toml()).map_err(CliError::write(file))
}

#[cfg(test)]
mod tests;
