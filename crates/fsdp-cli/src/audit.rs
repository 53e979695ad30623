//! `fsdp audit`.

mod page;
mod text;
mod variants;

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_ckpt::training::ModelWeights;
use fsdp_nn::model::Architecture;
use fsdp_train::audit::{Audit, read_batches};
use fsdp_train::config::{Init, Resolved};
use fsdp_train::{Job, RunData};
use indicatif::ProgressBar;

use crate::args::AuditArgs;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::host::total_threads;
use crate::report::expect_replaceable;
use crate::run_setup::RunSetup;
use crate::stop_signal::StopSignal;
use crate::{logging, output};

/// Judges a step and prints the verdict.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the report cannot be written.
pub(crate) fn run(args: &AuditArgs) -> Result<Exit, CliError> {
    // There is nothing to save: every signal ends the process at once.
    let signal = StopSignal::install_idle()?;
    logging::install(None)?;
    if let Some(report) = &args.report {
        expect_replaceable("--report", report)?;
    }
    let setup = variants::without_dropout(load(args)?)?;
    let architecture = setup.build()?;
    let batches = read_batches(&args.batch, args.shifted, architecture.head().vocab)?;
    let init = setup.init(&architecture, Some(&args.before))?;
    let variants = variants::all(&setup);
    let job = Job::with_data(setup.config.clone(), architecture, init, Arc::new(RunData::none()))?;
    let stages = Stages::new();
    let report = Audit {
        job: &job,
        before: &args.before,
        after: &args.after,
        at_step: args.at_step,
        batches: &batches,
        variants: &variants,
        threads: total_threads(0),
        stop: &signal.stop,
        progress: &|what| stages.show(what),
    }
    .judge()?;
    drop(stages);
    if let Some(file) = &args.report {
        fs::write(file, page::render(&report)).map_err(CliError::write(file))?;
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&report).expect("a report is plain data") + "\n",
        false => text::render(&report, args.report.as_deref()),
    };
    output::print(&text)?;
    Ok(if report.is_sound() { Exit::Done } else { Exit::Found })
}

/// Loads the run file. Weights come from the checkpoint, except for the base of adapters where the checkpoint lacks it.
fn load(args: &AuditArgs) -> Result<RunSetup, CliError> {
    let file: &Path = &args.run.file;
    let (mut setup, warnings) = RunSetup::of(Resolved::load_for_audit(file, &args.run.overrides)?)?;
    warnings.iter().for_each(|warning| output::warning(warning));
    setup.config.model.init =
        match setup.config.adapter.is_some() && ModelWeights::are_in(&setup.config.model.path) {
            true => Init::Pretrained,
            false => Init::Random,
        };
    Ok(setup)
}

/// Interval between two lines of a log.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows on stderr what is being computed: in place on a terminal, and in a log as a line every few seconds.
struct Stages {
    spinner: Option<ProgressBar>,
    last: Cell<Instant>,
}

impl Stages {
    fn new() -> Self {
        let spinner = output::draws_bars().then(ProgressBar::new_spinner);
        spinner.iter().for_each(|spinner| spinner.enable_steady_tick(Duration::from_millis(100)));
        Self { spinner, last: Cell::new(Instant::now()) }
    }

    fn show(&self, what: &str) {
        match &self.spinner {
            Some(spinner) => spinner.set_message(what.to_owned()),
            None if self.last.get().elapsed() < LINE_INTERVAL => {}
            None => {
                self.last.set(Instant::now());
                output::note(what);
            }
        }
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        self.spinner.iter().for_each(ProgressBar::finish_and_clear);
    }
}
