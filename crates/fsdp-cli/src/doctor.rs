//! `fsdp doctor`: reports the parts of the machine that were found and the devices that a run may use; with several
//! processes, also how well they work together.

mod folder;
mod links;
mod process_group;
mod report;
mod together;
#[cfg(feature = "xla")]
mod xla;

use std::fmt;
use std::path::PathBuf;

use comfy_table::Table;
use fsdp_config::{Device, Resolved, RunConfig, World, XlaConfig};
use fsdp_cuda::doctor::{Finding, Status, examine};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::DoctorArgs;
use crate::device::host;
use crate::document::{self, Document, print};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::{cluster, logging};

/// Whether this program cannot open libraries.
const IS_STATIC: bool = cfg!(target_feature = "crt-static");

/// The findings.
#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    devices: Vec<Usable>,
}

/// Whether a run may use a device.
#[derive(Debug, Serialize, Deserialize)]
struct Usable {
    device: String,
    usable: bool,
    /// What computes on it, or what is missing.
    with: String,
}

impl fmt::Display for Usable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, usable, with } = self;
        let verdict = if *usable { "usable" } else { "not usable" };
        write!(f, "run.device = \"{device}\": {verdict}, {with}")
    }
}

/// Examines and prints the findings. A missing part of this machine is not a failure; processes that cannot work
/// together are [`Exit::Found`].
///
/// # Errors
/// [`CliError`]: the run file is wrong, processes cannot join each other, or the report cannot be written.
pub(crate) fn run(args: &DoctorArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let place = cluster::place()?;
    if place.is_none() && !args.launch && args.file.is_none() {
        let xla_config = RunConfig::in_folder(".").xla;
        let findings = findings(&xla_config);
        let devices = devices(&findings, &xla_config, true);
        print(&Report { findings, devices }, args.json)?;
        return Ok(Exit::Done);
    }
    let config = config(args, place.map_or(1, |place| place.processes))?;
    cluster::within(place, &config, args.network, |team| {
        let (works, found) = together::examine(team, &config)?;
        found.map_or(Ok(()), |found| print(&found, args.json))?;
        Ok(if works { Exit::Done } else { Exit::Found })
    })
}

/// The settings of the run file, or defaults; each process has one rank.
fn config(args: &DoctorArgs, processes: usize) -> Result<RunConfig, CliError> {
    let run = match &args.file {
        Some(file) => Resolved::load_for(file, &args.overrides, &|_| World::of_ranks(processes))?.config.run,
        None => RunConfig::in_folder("."),
    };
    Ok(RunConfig { ranks: processes, ..run })
}

/// Examines this machine, including the plugin that a run file names.
fn findings(xla_config: &XlaConfig) -> Vec<Finding> {
    if IS_STATIC {
        // Whatever is installed, none of it can be used.
        return vec![static_program()];
    }
    let libtorch = libtorch::examine();
    let mut findings = examine(&libtorch.folders);
    findings.extend(libtorch.findings);
    findings.extend(xla::examine(xla_config));
    findings
}

fn static_program() -> Finding {
    let detail = "this fsdp is a static binary, which cannot open any: neither those of GPUs and libtorch nor XLA's plugins; the \
                  Python packages fsdp and fsdp-cuda can, and so can a build from source (docs/installing.md)";
    Finding::bad("libraries", Status::Unusable, detail)
}

/// Which devices a run may use; `is_alone` is whether this is the only process.
fn devices(findings: &[Finding], xla_config: &XlaConfig, is_alone: bool) -> Vec<Usable> {
    vec![host_device(), torch_cpu(findings), cuda(findings), xla::device(xla_config, is_alone)]
}

fn host_device() -> Usable {
    let with = format!("the kernels of fsdp on {} threads", host::total_threads(0));
    Usable { device: Device::Cpu.name().to_owned(), usable: true, with }
}

fn torch_cpu(findings: &[Finding]) -> Usable {
    let usable = findings.iter().any(|finding| finding.part == libtorch::PART && finding.is_good());
    let with = match usable {
        true => format!("libtorch on {} threads", host::total_threads(0)),
        false => without("torch", findings),
    };
    Usable { device: Device::TorchCpu.name().to_owned(), usable, with }
}

/// Why a device that needs libtorch is not usable.
fn without(feature: &str, findings: &[Finding]) -> String {
    let mut libtorch = findings.iter().filter(|finding| finding.part == libtorch::PART);
    if libtorch.any(|finding| finding.status == Status::Unusable) {
        return "libtorch is not usable".to_owned();
    }
    lacks(feature, IS_STATIC)
}

fn lacks(feature: &str, is_static: bool) -> String {
    match is_static {
        true => "this fsdp is a static binary".to_owned(),
        false => format!("this fsdp was built without the feature `{feature}`"),
    }
}

#[cfg(not(feature = "xla"))]
mod xla {
    use super::{Device, Finding, IS_STATIC, Usable, XlaConfig, lacks};

    pub(super) fn examine(_xla_config: &XlaConfig) -> Vec<Finding> {
        Vec::new()
    }

    pub(super) fn device(_xla_config: &XlaConfig, _is_alone: bool) -> Usable {
        let with = lacks("xla", IS_STATIC);
        Usable { device: Device::Xla.name().to_owned(), usable: false, with }
    }
}

fn cuda(findings: &[Finding]) -> Usable {
    let device = Device::Cuda.name().to_owned();
    if !cfg!(feature = "cuda") {
        return Usable { device, usable: false, with: without("cuda", findings) };
    }
    match gpus(findings) {
        Ok(with) => Usable { device, usable: true, with },
        Err(with) => Usable { device, usable: false, with },
    }
}

/// The GPUs that ranks can use, or why they cannot. Rank r uses GPU r, so these are the GPUs from 0 up to the first
/// unusable one; `CUDA_VISIBLE_DEVICES` renumbers them.
fn gpus(findings: &[Finding]) -> Result<String, String> {
    let is_card = |finding: &&Finding| finding.part.starts_with("GPU ");
    let bad = findings.iter().filter(|finding| !finding.is_good());
    let parts: Vec<&str> = bad.clone().map(|finding| finding.part.as_str()).collect();
    if bad.clone().any(|finding| !is_card(&finding) && finding.part != "NCCL") {
        return Err(format!("missing or unusable: {}", parts.join(", ")));
    }
    let cards: Vec<&Finding> = findings.iter().filter(is_card).collect();
    let good = cards.iter().filter(|card| card.is_good()).count();
    let first = cards.iter().take_while(|card| card.is_good()).count();
    let others: Vec<&str> =
        cards.iter().filter(|card| !card.is_good()).map(|card| card.part.as_str()).collect();
    let hint = format!("leave {} out of CUDA_VISIBLE_DEVICES to use {good}", others.join(", "));
    // A single rank, or several on one GPU, do not need NCCL.
    let with = match first {
        0 if good == 0 => return Err("there is no GPU that can be used".to_owned()),
        0 => return Err(format!("ranks use GPUs from number 0 on; {hint}")),
        _ if parts.contains(&"NCCL") => {
            return Ok("one GPU (run.share_gpu = true), because NCCL is missing".to_owned());
        }
        1 => "1 rank, on one GPU, with NCCL".to_owned(),
        _ => format!("up to {first} ranks, one per GPU, with NCCL"),
    };
    Ok(if good > first { format!("{with}; {hint}") } else { with })
}

impl document::Report for Report {
    fn json(&self) -> Value {
        document::json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        let (good, bad): (Vec<&Finding>, Vec<&Finding>) =
            self.findings.iter().partition(|found| found.is_good());
        if !good.is_empty() {
            let mut table = Table::new();
            table.load_preset(comfy_table::presets::NOTHING).set_header(["found", "version", "where"]);
            for Finding { part, version, path, detail, .. } in good {
                let place = path.as_ref().map_or_else(|| detail.clone(), |path| path.display().to_string());
                table.add_row([part.clone(), version.clone().unwrap_or_default(), place]);
            }
            to.block(&format!("{}\n", table.trim_fmt()));
        }
        for Finding { part, status, detail, .. } in bad {
            let state = if *status == Status::Missing { "not found" } else { "unusable" };
            to.block(&format!("\n{part} ({state}): {detail}\n"));
        }
        to.gap();
        self.devices.iter().for_each(|device| to.block(&format!("{device}\n")));
    }
}

/// libtorch, as found by this binary.
struct Libtorch {
    findings: Vec<Finding>,
    /// The folders of the libraries that came with it.
    folders: Vec<PathBuf>,
}

#[cfg(not(feature = "torch"))]
mod libtorch {
    use super::{Finding, Libtorch, Status};
    use crate::with_libtorch::unfit;

    pub(super) const PART: &str = "libtorch";

    pub(super) fn examine() -> Libtorch {
        let finding = match unfit() {
            Some(unfit) => Finding::bad(PART, Status::Unusable, unfit.to_string()),
            None => {
                let detail = "this fsdp was built without it; install the Python package fsdp-cuda beside this one, or see \
                              docs/gpu.md for how to build with it";
                Finding::bad(PART, Status::Missing, detail)
            }
        };
        Libtorch { findings: vec![finding], folders: Vec::new() }
    }
}

#[cfg(feature = "torch")]
mod libtorch {
    use super::{Finding, Libtorch, Status};
    use fsdp_cuda::device::gpu_count;
    use fsdp_cuda::torch::{check_version, folder, library_folders, load_cuda, start_cuda, stated_version};

    pub(super) const PART: &str = "libtorch";

    pub(super) fn examine() -> Libtorch {
        let version = stated_version().map(|stated| stated.version);
        let found = Finding::found(PART, version, folder());
        let findings = match check_version() {
            Ok(()) => vec![found, cuda_half()],
            // Its CUDA half has the same version and cannot be used either.
            Err(error) => {
                vec![Finding { status: Status::Unusable, detail: error.to_string(), ..found }]
            }
        };
        Libtorch { findings, folders: library_folders() }
    }

    fn cuda_half() -> Finding {
        const PART: &str = "libtorch's CUDA half";
        if let Err(error) = load_cuda("libtorch_cuda.so") {
            let status = if error.is_absent() { Status::Missing } else { Status::Unusable };
            return Finding::bad(PART, status, error.to_string());
        }
        // Without a GPU there is nothing to fail on.
        let started = if gpu_count().is_ok_and(|gpus| gpus > 0) { start_cuda() } else { Ok(()) };
        match started {
            Ok(()) => Finding::found(PART, None, folder()),
            Err(error) => Finding::bad(PART, Status::Unusable, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::text::Text;
    use crate::output::Paint;

    fn text(report: &Report) -> String {
        Text::of(Paint::none(), |to| document::Report::write(report, to))
    }

    fn findings(cards: &[bool], bad: &[&str]) -> Vec<Finding> {
        let finding = |part: String, is_good: bool| match is_good {
            true => Finding::found(part, None, None),
            false => Finding::bad(part, Status::Unusable, "broken"),
        };
        let parts =
            ["driver", "NVRTC", "NCCL", "libtorch"].map(|part| (part.to_owned(), !bad.contains(&part)));
        let cards = cards.iter().enumerate().map(|(number, &is_good)| (format!("GPU {number}"), is_good));
        parts.into_iter().chain(cards).map(|(part, is_good)| finding(part, is_good)).collect()
    }

    #[test]
    fn broken_gpu_does_not_hide_others() {
        let with = |cards: &[bool]| gpus(&findings(cards, &[]));
        assert_eq!(with(&[true, true]).as_deref(), Ok("up to 2 ranks, one per GPU, with NCCL"));
        let expected = "1 rank, on one GPU, with NCCL; leave GPU 1 out of CUDA_VISIBLE_DEVICES to use 2";
        assert_eq!(with(&[true, false, true]).as_deref(), Ok(expected));
        let expected = "ranks use GPUs from number 0 on; leave GPU 0 out of CUDA_VISIBLE_DEVICES to use 1";
        assert_eq!(with(&[false, true]), Err(expected.to_owned()));
        assert_eq!(with(&[false]), Err("there is no GPU that can be used".to_owned()));
        assert_eq!(with(&[true, false]).as_deref(), Ok("1 rank, on one GPU, with NCCL"));
    }

    #[test]
    fn table_is_omitted_when_nothing_is_found() {
        let bad = || vec![Finding::bad("NCCL", Status::Missing, "no library")];
        let shown = text(&Report { findings: bad(), devices: vec![host_device()] });
        assert!(shown.starts_with("\nNCCL (not found): no library\n\nrun.device = "), "{shown}");
        let good = Finding::found("driver", Some("1.2".to_owned()), None);
        let shown = text(&Report { findings: [bad(), vec![good]].concat(), devices: Vec::new() });
        assert!(shown.trim_start().starts_with("found ") && shown.contains("driver"), "{shown}");
    }

    #[test]
    fn static_program_names_the_builds_that_open_libraries() {
        let devices = vec![Usable { device: "cuda".to_owned(), usable: false, with: lacks("cuda", true) }];
        let shown = text(&Report { findings: vec![static_program()], devices });
        for told in [
            "Python packages fsdp and fsdp-cuda",
            "build from source",
            "\"cuda\": not usable, this fsdp is a static",
        ] {
            assert!(shown.contains(told), "{shown}");
        }
        assert!(!shown.contains("install the"), "no library helps: {shown}");
        assert!(!lacks("cuda", false).contains("static"));
    }

    #[test]
    fn only_nccl_is_optional_for_gpus() {
        let expected = "one GPU (run.share_gpu = true), because NCCL is missing";
        assert_eq!(gpus(&findings(&[true, true], &["NCCL"])).as_deref(), Ok(expected));
        assert_eq!(gpus(&findings(&[true, false, true], &["NCCL"])).as_deref(), Ok(expected));
        let found = gpus(&findings(&[true], &["NVRTC", "NCCL"]));
        assert_eq!(found, Err("missing or unusable: NVRTC, NCCL".to_owned()));
    }
}
