//! `fsdp train`.

mod groups;
mod routers;
mod summary;

pub(crate) use summary::{EVALUATION_HEADER, evaluation_row, memory_rows, parameters, step_of, units_of};

use std::path::Path;
use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_comm::process::cluster::Cluster;
use fsdp_config::Resolved;
use fsdp_core::Rank;
use fsdp_core::engine::Observer;
use fsdp_data::Watch;
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture as _;
use fsdp_train::train::{Resume, RunOptions, Summary, base_of, is_filled, not_empty, train};
use fsdp_train::{Ending, Job, Kept, TrainError};

use crate::args::TrainArgs;
use crate::cluster::Team;
use crate::device::{Purpose, Work};
use crate::document::text;
use crate::error::CliError;
use crate::exit_code::Exit;
#[cfg(feature = "xla")]
use crate::out_of_memory_report::OutOfMemoryReport;
use crate::progress::Progress;
use crate::run_setup::{Model, RunSetup};
use crate::stop_signal::StopSignal;
use crate::token_progress::TokenProgress;
use crate::trace::{SpanObserver, TraceFile};
use crate::units::speed_unit;
use crate::{cluster, device, launch, logging, output, trace};

/// Trains according to a run file and prints the summary.
///
/// The exit code is not 0 if SIGTERM stopped the run early, or if any signal did so before its first step.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the run failed.
pub(crate) fn run(args: &TrainArgs) -> Result<Exit, CliError> {
    let signal = StopSignal::install_idle()?;
    let place = cluster::place()?;
    let setup = RunSetup::load(&args.run)?;
    if args.trace.is_none() {
        logging::install(None)?;
    }
    cluster::within(place, &setup.config.run, args.network, |team| run_within(args, &setup, &signal, team))
}

fn run_within(
    args: &TrainArgs,
    setup: &RunSetup,
    signal: &StopSignal,
    team: Option<Team<'_>>,
) -> Result<Exit, CliError> {
    let cluster = team.map(|team| team.cluster);
    device::expect_run(&setup.config.run)?;
    if let Some(path) = &args.trace {
        device::expect_operations(setup.config.run.device, "--trace")?;
        trace::check(path, &setup.config)?;
    }
    if cluster.is_none_or(Cluster::is_leader) {
        expect_free_out_dir(args, &setup.config)?;
    }
    let architecture = setup.build()?;
    let taken =
        setup.config.adapter.is_some().then(|| base_of(&resume(args), Path::new(&setup.config.run.out_dir)));
    let init = setup.init(&architecture, taken.transpose()?.flatten().as_deref())?;
    let load = || {
        let progress = TokenProgress::new();
        let update = |now| progress.update(now);
        Ok::<_, CliError>(Job::watched(setup.config.clone(), architecture, init, &Watch::new(&update))?)
    };
    let job = cluster::in_turns(team, load, |job| job.data.share())?;
    output::data_warnings(&job.data);
    groups::lines(&job)?.iter().chain(&routers::line(&job)).for_each(|line| output::note(line));
    output::sources(&job.data, job.config.train.steps);
    job.data.first_sample(&job.config.data)?.iter().for_each(output::sample);
    // From here on there is something to save or to restore.
    signal.begin();
    let trace = args.trace.as_deref().map(TraceFile::create).transpose()?;
    logging::install(trace.as_ref())?;
    let progress =
        Progress::new(job.config.train.steps, speed_unit(job.config.data.packing), Arc::clone(&signal.stop));
    let is_observed = trace.is_some() || logging::is_requested();
    let observer = |rank: Rank| -> Box<dyn Observer> {
        if is_observed { Box::new(SpanObserver::new(rank, job.plan.clone())) } else { Box::new(()) }
    };
    let options = RunOptions {
        reporter: &progress,
        stop: &signal.stop,
        resume: resume(args),
        overwrite: args.overwrite,
        observer: &observer,
        config_json: Some(setup.model.export(job.export_dtype())),
        flops: Some(setup.flops(&job.plan.spec, &job.architecture.description().token_shares)),
        process_table: team.map(|team| team.process_table()),
    };
    let work = Training { job: &job, options: &options };
    let outcome = device::on(&job.config.run, Purpose::Training, cluster, work)?;
    progress.finish();
    // The trace of a failed run is valuable, but the cause of the failure is reported first.
    let traced = trace.as_ref().map_or(Ok(()), TraceFile::finish);
    let summary = match outcome {
        Err(stopped @ TrainError::Stopped) => {
            output::note(&stopped.to_string());
            cluster::report_to_torchrun(&stopped.to_string());
            let should_resume = signal.is_terminated() || cluster.is_some();
            return Ok(if should_resume { Exit::Temporary } else { Exit::Interrupted });
        }
        Err(ended @ TrainError::Ended { ending: Ending { state: Ok(Kept::Elsewhere(_)), .. }, .. }) => {
            launch::Note::Elsewhere.leave();
            return Err(ended.into());
        }
        outcome => outcome.map_err(|error| to_cli_error(&job, error))?,
    };
    traced?;
    finish(&job, &summary, cluster, signal)
}

/// Converts the error of a run; if XLA found the step too large, adds by how much, and what would fit.
#[cfg_attr(not(feature = "xla"), expect(unused_variables, reason = "only XLA knows before it begins"))]
pub(crate) fn to_cli_error(job: &Job<Model>, error: TrainError) -> CliError {
    #[cfg(feature = "xla")]
    if let Some(report) = OutOfMemoryReport::of_run(&job.config, &job.architecture, &error) {
        return CliError::Input(report.to_string());
    }
    error.into()
}

/// Prints the summary; returns whether the run should resume, and tells torchrun why.
fn finish(
    job: &Job<Model>,
    summary: &Summary,
    cluster: Option<&Cluster>,
    signal: &StopSignal,
) -> Result<Exit, CliError> {
    if cluster.is_none_or(Cluster::is_leader) {
        output::print(&text::of_stdout(|to| summary::write(job, summary, to)))?;
    }
    // With several processes, the signal may have reached only one of them.
    if !(summary.stopped && (signal.is_terminated() || cluster.is_some())) {
        return Ok(Exit::Done);
    }
    let steps = summary.steps;
    cluster::report_to_torchrun(&format!(
        "asked to stop after step {steps}, whose state is saved; continue with --resume"
    ));
    Ok(Exit::Temporary)
}

/// Checks that a new run has its own output folder. The run checks again when it takes over the folder, but text is
/// tokenized before that, which may take minutes.
fn expect_free_out_dir(args: &TrainArgs, config: &Resolved) -> Result<(), TrainError> {
    let out_dir = Path::new(&config.run.out_dir);
    // Other problems of the folder are reported when the run takes it over.
    let is_filled = matches!(is_filled(out_dir, &config.data), Ok(true));
    if resume(args) == Resume::Fresh && !args.overwrite && is_filled {
        return Err(not_empty(out_dir));
    }
    Ok(())
}

/// Trains on any device.
struct Training<'a> {
    job: &'a Job<Model>,
    options: &'a RunOptions<'a>,
}

impl Work for Training<'_> {
    type Outcome = Result<Summary, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend,
    {
        train(self.job, launcher, self.options)
    }
}

fn resume(args: &TrainArgs) -> Resume {
    match &args.resume_from {
        Some(path) => Resume::From { path: path.clone(), at_step: args.at_step },
        None if args.skip_unsound => Resume::NewestSound,
        None if args.resume => Resume::Newest,
        None => Resume::Fresh,
    }
}
