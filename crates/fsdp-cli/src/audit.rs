//! `fsdp audit`.

mod init;
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
use fsdp_train::audit::{Audit, AuditMemory, MicroBatch, Setting, by_step, read_batches, steps_done};
use fsdp_train::config::{Init, Resolved};
use fsdp_train::memory::Available;
use fsdp_train::{InitSource, Job, RunData};
use indicatif::ProgressBar;

use self::variants::Stated;
use crate::args::AuditArgs;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::host::total_threads;
use crate::report::expect_replaceable;
use crate::run_setup::{Model, RunSetup};
use crate::stop_signal::StopSignal;
use crate::units::bytes;
use crate::{logging, output};

/// Judges a step and prints the verdict.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the report cannot be written.
pub(crate) fn run(args: &AuditArgs) -> Result<Exit, CliError> {
    // There is nothing to save: every signal ends the process at once.
    let signal = StopSignal::install_idle()?;
    logging::install(None)?;
    if let Some(folder) = &args.init {
        return init::run(folder, args.file.as_deref());
    }
    if let Some(report) = &args.report {
        expect_replaceable("--report", report)?;
    }
    let (job, steps, stated) = match &args.batch {
        Some(batch) => of_file(args, batch)?,
        None => of_data(args)?,
    };
    let longest = steps.iter().flatten().map(|batch| batch.seq).max().unwrap_or(0);
    let settings: Vec<Setting<Model>> = stated.settings(longest);
    let stages = Stages::new();
    let audit = Audit {
        job: &job,
        before: args.before(),
        after: args.after(),
        at_step: args.at_step,
        steps: &steps,
        settings: &settings,
        threads: total_threads(0),
        stop: &signal.stop,
        progress: &|what| stages.show(what),
    };
    say_need(&audit.memory()?);
    let report = audit.judge()?;
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

/// The job, the micro-batches of each step, and what is stated of its model.
type Judged = (Job<Model>, Vec<Vec<MicroBatch>>, Stated);

/// Reads what a run file says of the model and its update, and the batch from a file.
fn of_file(args: &AuditArgs, batch: &Path) -> Result<Judged, CliError> {
    let run = args.run();
    let (setup, warnings) = RunSetup::of(Resolved::load_for_audit(&run.file, &run.overrides)?)?;
    warnings.iter().for_each(|warning| output::warning(warning));
    let (setup, architecture, init) = prepared(args.before(), setup)?;
    let batches = read_batches(batch, args.shifted, architecture.head().vocab)?;
    let steps = by_step(batch, batches, args.steps)?;
    let stated = Stated::of(&setup);
    Ok((Job::with_data(setup.config, architecture, init, Arc::new(RunData::none()))?, steps, stated))
}

/// Reads a whole run file, and the batch from its data.
fn of_data(args: &AuditArgs) -> Result<Judged, CliError> {
    let (setup, architecture, init) = prepared(args.before(), RunSetup::load(&args.run())?)?;
    let stated = Stated::of(&setup);
    let job = Job::new(setup.config, architecture, init)?;
    let step = steps_done(&job, args.before(), args.at_step)?;
    let of_step = |step| {
        let batches = (0..job.data.micro_batches()).map(|index| job.data.train_batch(step, index));
        batches.map(|batch| MicroBatch::of_batch(&batch)).collect()
    };
    let steps = (0..args.steps as u64).map(|later| of_step(step + later)).collect();
    Ok((job, steps, stated))
}

/// Builds the model without dropout. Weights come from the checkpoint, except for the base of adapters where the checkpoint
/// lacks it.
fn prepared(before: &Path, setup: RunSetup) -> Result<(RunSetup, Model, InitSource), CliError> {
    let mut setup = variants::without_dropout(setup)?;
    setup.config.model.init =
        match setup.config.adapter.is_some() && ModelWeights::are_in(&setup.config.model.path) {
            true => Init::Pretrained,
            false => Init::Random,
        };
    let architecture = setup.build()?;
    let init = setup.init(&architecture, Some(before))?;
    Ok((setup, architecture, init))
}

/// Says what the judgement needs if it is much, and warns if that is more than there is.
fn say_need(need: &AuditMemory) {
    let text = || {
        format!(
            "this takes about {} of memory: {} for the largest layer and its gradient, {} for activations, {} for comparing{}",
            bytes(need.total()),
            bytes(need.layer),
            bytes(need.activations),
            bytes(need.samples),
            match need.states {
                0 => String::new(),
                states => format!(", {} for weights, moments and gradients of the steps", bytes(states)),
            }
        )
    };
    match Available::now() {
        Some(available) if need.total() > available.bytes => {
            output::warning(&format!("{}; {} are available", text(), bytes(available.bytes)));
        }
        _ if need.total() > SAID_MIN => output::note(&text()),
        _ => {}
    }
}

/// Needs below this are not worth a line.
const SAID_MIN: u64 = 1 << 30;

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
