//! `fsdp doctor`: what of the machine was found, and which devices a run may name.

use std::path::PathBuf;

use comfy_table::Table;
use fsdp_cuda::doctor::{Finding, Status, examine};
use fsdp_train::config::Device;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::error::CliError;
use crate::{host, output};

/// What was found.
#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    devices: Vec<Usable>,
}

/// Whether a run may name a device.
#[derive(Debug, Serialize)]
struct Usable {
    device: &'static str,
    usable: bool,
    /// What will compute, or what is missing.
    with: String,
}

/// Looks, and prints what was found. That something is missing is no failure.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let libtorch = libtorch::examine();
    let folders = libtorch.folders;
    let mut findings = examine(&folders);
    findings.extend(libtorch.findings);
    let devices = vec![host_device(), torch_cpu(&findings), cuda(&findings)];
    let report = Report { findings, devices };
    output::print(&if args.json { json(&report) } else { text(&report) })
}

fn host_device() -> Usable {
    let with = format!("the kernels of fsdp on {} threads", host::total_threads(0));
    Usable { device: Device::Cpu.name(), usable: true, with }
}

fn torch_cpu(findings: &[Finding]) -> Usable {
    let usable = findings.iter().any(|finding| finding.part == libtorch::PART && finding.is_good());
    let with = if usable {
        format!("libtorch on {} threads", host::total_threads(0))
    } else {
        "this fsdp was built without the feature `torch`".to_owned()
    };
    Usable { device: Device::TorchCpu.name(), usable, with }
}

fn cuda(findings: &[Finding]) -> Usable {
    let device = Device::Cuda.name();
    if !cfg!(feature = "cuda") {
        let with = "this fsdp was built without the feature `cuda`".to_owned();
        return Usable { device, usable: false, with };
    }
    let bad: Vec<&str> =
        findings.iter().filter(|finding| !finding.is_good()).map(|finding| finding.part.as_str()).collect();
    let cards =
        findings.iter().filter(|finding| finding.is_good() && finding.part.starts_with("GPU ")).count();
    // One rank, or several on one card, do without NCCL.
    match bad.iter().all(|&part| part == "NCCL") && cards > 0 {
        true if bad.is_empty() => {
            Usable { device, usable: true, with: format!("up to {cards} ranks, one per GPU, with NCCL") }
        }
        true => Usable {
            device,
            usable: true,
            with: "one GPU (run.share_gpu = true), for want of NCCL".to_owned(),
        },
        false => Usable { device, usable: false, with: format!("missing: {}", bad.join(", ")) },
    }
}

fn json(report: &Report) -> String {
    let mut text = serde_json::to_string_pretty(report).expect("findings have a JSON form");
    text.push('\n');
    text
}

fn text(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(["found", "version", "where"]);
    for finding in report.findings.iter().filter(|finding| finding.is_good()) {
        let path = finding.path.as_ref().map(|path| path.display().to_string());
        let version = finding.version.clone().unwrap_or_default();
        table.add_row([finding.part.clone(), version, path.unwrap_or_else(|| finding.detail.clone())]);
    }
    let mut text = format!("{}\n", table.trim_fmt());
    for finding in report.findings.iter().filter(|finding| !finding.is_good()) {
        let state = if finding.status == Status::Missing { "not found" } else { "of no use" };
        text += &format!("\n{} ({state}): {}\n", finding.part, finding.detail);
    }
    text.push('\n');
    for Usable { device, usable, with } in &report.devices {
        let verdict = if *usable { "usable" } else { "not usable" };
        text += &format!("run.device = \"{device}\": {verdict}, {with}\n");
    }
    text
}

/// libtorch, as this binary sees it.
struct Libtorch {
    findings: Vec<Finding>,
    /// Where the libraries lie that came with it.
    folders: Vec<PathBuf>,
}

#[cfg(not(feature = "torch"))]
mod libtorch {
    use super::{Finding, Libtorch, Status};

    pub(super) const PART: &str = "libtorch";

    pub(super) fn examine() -> Libtorch {
        let detail = "this fsdp was built without it; see docs/gpu.md for how to build with it";
        Libtorch { findings: vec![Finding::bad(PART, Status::Missing, detail)], folders: Vec::new() }
    }
}

#[cfg(feature = "torch")]
mod libtorch {
    use super::{Finding, Libtorch, Status};
    use fsdp_cuda::device::gpu_count;
    use fsdp_cuda::torch::{VERSION, folder, library_folders, load_cuda, start_cuda};

    pub(super) const PART: &str = "libtorch";

    pub(super) fn examine() -> Libtorch {
        let cpu = Finding::found(PART, Some(VERSION.to_owned()), folder());
        Libtorch { findings: vec![cpu, cuda_half()], folders: library_folders() }
    }

    fn cuda_half() -> Finding {
        const PART: &str = "libtorch's CUDA half";
        if let Err(error) = load_cuda("libtorch_cuda.so") {
            return Finding::bad(PART, Status::Missing, error.to_string());
        }
        // Without a GPU there is nothing that it could fail to use.
        let started = if gpu_count().is_ok_and(|gpus| gpus > 0) { start_cuda() } else { Ok(()) };
        match started {
            Ok(()) => Finding::found(PART, None, folder()),
            Err(error) => Finding::bad(PART, Status::Unusable, error.to_string()),
        }
    }
}
