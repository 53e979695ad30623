//! Turns measurements into a cluster description.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use fsdp_comm::process::cluster::cpu_model;
use fsdp_config::Device;
use fsdp_plan::cluster::{Cluster, Kind, Sourced};
use fsdp_plan::measured::{Measured, Point, Points};

use crate::error::CliError;

/// Size of the blocks written to measure write speed.
const BLOCK: usize = 4 << 20;
const BLOCKS: usize = 64;

/// This machine's name in calibration files.
pub(super) fn name(device: Device, device_name: Option<String>, threads: usize) -> String {
    match (device, device_name) {
        (Device::Cuda, Some(name)) => name,
        _ => format!("{}, {threads} threads", cpu_model()),
    }
}

/// The known cluster that supplies the properties that are not measured.
///
/// # Errors
/// [`CliError`]: the name is unknown, the cluster has other devices, or no name was given for GPUs.
pub(super) fn like(named: Option<&str>, device: Device) -> Result<Cluster, CliError> {
    let refused = |what: String| CliError::Option { option: "--like", what };
    let wants_cpu = device != Device::Cuda;
    let cluster = match named {
        Some(name) => Cluster::known(name)?,
        None if wants_cpu => Cluster::known("cpu-2core")?,
        None => return Err(refused(
            "name a cluster with such GPUs, as h100-sxm: its network, price and failures are not measured"
                .to_owned(),
        )),
    };
    if (cluster.kind == Kind::Cpu) != wants_cpu {
        return Err(refused(format!("{} has other devices than \"{}\"", cluster.name, device.name())));
    }
    Ok(cluster)
}

/// The cluster made of machines like this one.
pub(super) fn cluster(
    mut cluster: Cluster,
    measured: Measured,
    ranks: usize,
    write_speed: Option<f64>,
) -> Cluster {
    let source = |what: &str| format!("measured by `fsdp calibrate` on {}: {what}", measured.date);
    cluster.name = "measured".to_owned();
    cluster.about = measured.machine.clone();
    if cluster.kind == Kind::Cpu {
        let threads = measured.threads as f64;
        cluster.device.units = Sourced { value: threads, source: source("threads that compute") };
        if let Some(bytes) = memory() {
            cluster.device.memory = Sourced { value: bytes, source: source("MemTotal of /proc/meminfo") };
        }
        let devices = threads.max(ranks as f64);
        cluster.node.devices =
            Sourced { value: devices, source: source("threads that compute, or more ranks that were timed") };
    }
    for (dtype, peak) in &mut cluster.device.peak {
        if let Some(best) = fastest(&measured.calls, &format!("linear {dtype}")) {
            *peak = Sourced { value: best, source: source("the fastest product of one rank") };
        }
    }
    if let Some(best) = fastest(&measured.calls, "add f32").filter(|_| cluster.kind == Kind::Cpu) {
        cluster.device.memory_bandwidth =
            Sourced { value: best, source: source("the fastest sum of one rank") };
    }
    if let Some(value) = write_speed {
        cluster.storage.write =
            Sourced { value, source: source("a file in the folder of this one, made durable") };
    }
    cluster.measured = Some(measured);
    cluster
}

/// Measures how many bytes per second are written durably to a folder.
///
/// # Errors
/// [`CliError::Write`].
pub(super) fn measure_write_speed(folder: &Path) -> Result<f64, CliError> {
    let failed = || CliError::write(folder);
    let mut file = tempfile::tempfile_in(folder).map_err(failed())?;
    // Not zeros: some file systems store no pages for them.
    let block: Vec<u8> = (0..BLOCK).map(|index| (index * 7 % 251) as u8).collect();
    let begin = Instant::now();
    for _ in 0..BLOCKS {
        file.write_all(&block).map_err(failed())?;
    }
    file.sync_all().map_err(failed())?;
    Ok((BLOCK * BLOCKS) as f64 / begin.elapsed().as_secs_f64())
}

/// The highest rate of work per second among the points of one rank.
fn fastest(points: &Points, what: &str) -> Option<f64> {
    let rate = |point: &Point| point.work / point.seconds;
    let single_rank = points.get(what)?.iter().filter(|point| point.ranks == 1);
    single_rank.map(rate).max_by(f64::total_cmp)
}

/// Bytes of memory of this machine.
fn memory() -> Option<f64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(kib.trim().trim_end_matches("kB").trim().parse::<f64>().ok()? * 1024.0)
}
