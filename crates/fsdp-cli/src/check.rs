//! `fsdp check`: everything that can be checked about a run file without running it.

mod data;

use std::error::Error;
use std::path::Path;

use fsdp_ckpt::is_url;
use fsdp_ckpt::native::free_bytes;
use fsdp_config::{Device, Init};
use fsdp_core::plan::Plan;
use fsdp_cuda::device::gpu_memory;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture as _;
use fsdp_train::checkpoint::DiskNeed;
use fsdp_train::memory::expect_room_for;
use fsdp_train::train::is_filled;
use fsdp_train::{TrainError, expect_chunks, expect_positions, expect_settings, plan};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::CheckArgs;
use crate::document::{Document, Mark, Report, print};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::{Model, RunSetup};
use crate::train::parameters;
use crate::units::bytes;
use crate::{cluster, device, logging, output};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warning,
    Error,
}

/// A finding about one subject.
#[derive(Debug, Serialize)]
struct Finding {
    subject: String,
    verdict: Verdict,
    detail: String,
}

/// Checks everything that a run file names, and prints the findings.
///
/// # Errors
/// [`CliError`]: the report cannot be printed.
pub(crate) fn run(args: &CheckArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let place = cluster::place().unwrap_or_default();
    let read = RunSetup::read(&args.run, &|run| device::world(place, device::has_gpus(run)));
    let findings = Findings::of(&args.run.file, read);
    print(&findings, args.json)?;
    Ok(if findings.has_errors() { Exit::Input } else { Exit::Done })
}

/// Findings, in order of subjects.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    /// Checks everything that a run file names; `read` is the result of reading it.
    pub(crate) fn of(file: &Path, read: Result<(RunSetup, Vec<String>), CliError>) -> Findings {
        let mut findings = Findings::default();
        if let Some((setup, warnings)) = findings.record("run file", read, |_| file.display().to_string()) {
            warnings.into_iter().for_each(|detail| findings.note("run file", Verdict::Warning, detail));
            findings.setup(&setup);
        }
        findings
    }

    /// Whether the run would fail to start.
    pub(crate) fn has_errors(&self) -> bool {
        self.0.iter().any(|finding| finding.verdict == Verdict::Error)
    }

    /// Findings that do not prevent the run, but deserve attention.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = String> {
        let warnings = self.0.iter().filter(|finding| finding.verdict == Verdict::Warning);
        warnings.map(|Finding { subject, detail, .. }| format!("{subject}: {detail}"))
    }

    fn setup(&mut self, setup: &RunSetup) {
        let config = &setup.config;
        self.record("device", device::expect_run(&config.run), |()| config.run.device.name().to_owned());
        self.data(config, setup.model.summary().vocab);
        self.folder(setup);
        let Some(model) = self.record("model", setup.build(), |model| describe(setup, model)) else { return };
        if let Some(row) = setup.model.summary().padding_row {
            self.note("padding row", Verdict::Ok, padding_row(row));
        }
        self.record("positions", expect_positions(config, &model), |()| {
            format!("{} of {} in a sample", config.data.seq_len, setup.model.summary().positions)
        });
        if let Err(error) = expect_settings(config, &model) {
            // A schedule for unsupported settings might take long.
            return self.record_error("settings", &error);
        }
        let spec = &model.description().spec;
        let evaluates = !config.data.eval.is_empty();
        let planned = plan(config, spec, evaluates);
        let Some(plan) = self.record("schedule", planned, |plan| {
            let units = plan.layout.units.len();
            format!("{} operations in {units} units on mesh {}, safe", plan.step.ops.len(), plan.mesh)
        }) else {
            return;
        };
        if let Err(error) = expect_chunks(config, &model, &plan) {
            return self.record_error("settings", &error);
        }
        let weights = setup.init(&model, None).and_then(|init| Ok(init.check(&plan.spec)?));
        self.record("weights", weights, |()| match config.model.init {
            Init::Random => "random".to_owned(),
            Init::Pretrained => format!("those in {}", config.model.path),
        });
        self.memory(setup, &model, &plan);
        self.disk(setup, &plan);
    }

    fn folder(&mut self, setup: &RunSetup) {
        let out_dir = Path::new(&setup.config.run.out_dir);
        if is_url(out_dir) {
            return self.note("output", Verdict::Warning, "an object store, which is not checked".to_owned());
        }
        match is_filled(out_dir, &setup.config.data) {
            Ok(true) => {
                let detail = format!(
                    "{} holds a run: continue it with --resume, or replace it with --overwrite",
                    out_dir.display()
                );
                self.note("output", Verdict::Warning, detail);
            }
            found => drop(self.record("output", found, |_| out_dir.display().to_string())),
        }
    }

    fn memory(&mut self, setup: &RunSetup, model: &Model, plan: &Plan) {
        let config = &setup.config;
        let room = device::predicted(config, model, plan).and_then(|usage| {
            expect_room_for::<HostMemory, _>(config, model, plan, config.run.ranks)?;
            Ok(usage)
        });
        let is_gpu = config.run.device == Device::Cuda;
        let usage = self.record("memory", room, |usage| {
            let (device, host) = (usage.device.total_peak_bytes as u64, usage.host.total_peak_bytes as u64);
            let peak = match (is_gpu, host) {
                (true, 0) => format!("{} of a GPU", bytes(device)),
                (true, _) => format!("{} of a GPU and {} of the host", bytes(device), bytes(host)),
                (false, _) => bytes(device + host),
            };
            format!("{peak} at the peak of a rank, of {} ranks", config.run.ranks)
        });
        if let Some(usage) = usage.filter(|_| is_gpu) {
            self.gpu(usage.device.total_peak_bytes as u64, config.run.share_gpu, config.run.ranks);
        }
    }

    /// Checks whether the first GPU has room for a rank or, if ranks share it, for all of them.
    fn gpu(&mut self, rank_bytes: u64, is_shared: bool, ranks: usize) {
        let needed = if is_shared { rank_bytes.saturating_mul(ranks as u64) } else { rank_bytes };
        let (verdict, detail) = match gpu_memory(0) {
            Err(error) => (Verdict::Warning, format!("not checked: {error}")),
            Ok((free, total)) => {
                let (free, total) = (free as u64, total as u64);
                let detail = format!(
                    "{} needed, not counting what CUDA and NCCL take; {} of {} free",
                    bytes(needed),
                    bytes(free),
                    bytes(total)
                );
                let verdict = match needed {
                    _ if needed > total => Verdict::Error,
                    _ if needed > free => Verdict::Warning,
                    _ => Verdict::Ok,
                };
                (verdict, detail)
            }
        };
        self.note("GPU", verdict, detail);
    }

    /// Checks whether the disk has room for the checkpoints and the exported model.
    fn disk(&mut self, setup: &RunSetup, plan: &Plan) {
        let out_dir = Path::new(&setup.config.run.out_dir);
        if is_url(out_dir) {
            return;
        }
        let found = match DiskNeed::of(&setup.config, plan) {
            Ok(need) => free_bytes(out_dir).map(|free| (need, free)).map_err(TrainError::from),
            Err(error) => Err(error),
        };
        let (need, free) = match found {
            Ok(found) => found,
            Err(error) => return self.note("disk", Verdict::Warning, format!("not checked: {error}")),
        };
        let verdict = match free {
            _ if free < need.save_bytes => Verdict::Error,
            _ if free < need.at_most() => Verdict::Warning,
            _ => Verdict::Ok,
        };
        let detail = format!(
            "a checkpoint takes {}, the model {}, all of them together at most {}; {} free",
            bytes(need.save_bytes),
            bytes(need.model_bytes),
            bytes(need.at_most()),
            bytes(free)
        );
        self.note("disk", verdict, detail);
    }

    /// Records a finding, or the error.
    fn record<T, E: Error>(
        &mut self,
        subject: &str,
        found: Result<T, E>,
        detail: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        match found {
            Ok(found) => {
                self.note(subject, Verdict::Ok, detail(&found));
                Some(found)
            }
            Err(error) => {
                self.record_error(subject, &error);
                None
            }
        }
    }

    fn record_error(&mut self, subject: &str, error: &dyn Error) {
        let causes = output::causes(error);
        let text = std::iter::once(error.to_string()).chain(causes).collect::<Vec<_>>().join(": ");
        self.note(subject, Verdict::Error, text);
    }

    fn note(&mut self, subject: &str, verdict: Verdict, detail: String) {
        self.0.push(Finding { subject: subject.to_owned(), verdict, detail });
    }
}

impl Report for Findings {
    fn json(&self) -> Value {
        json!({ "findings": self.0 })
    }

    fn write(&self, to: &mut dyn Document) {
        for Finding { subject, verdict, detail } in &self.0 {
            let (mark, verdict) = match verdict {
                Verdict::Ok => (Mark::Good, "ok     "),
                Verdict::Warning => (Mark::Warning, "warning"),
                Verdict::Error => (Mark::Bad, "error  "),
            };
            to.marked(mark, verdict, &format!("  {subject:<12}  {detail}"));
        }
    }
}

fn padding_row(row: usize) -> String {
    format!(
        "inputs give row {row} of the embedding (pad_token_id) no gradient, as in transformers; \
         model.padding_row = \"none\" trains it"
    )
}

fn describe(setup: &RunSetup, model: &Model) -> String {
    let family = setup.model.family().model_type;
    format!("{family}, {}; {}", parameters(&model.description().spec), setup.model.summary())
}
