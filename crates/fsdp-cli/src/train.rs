//! `fsdp train`.

mod summary;

pub(crate) use summary::memory_rows;

use fsdp_core::Rank;
use fsdp_core::engine::Observer;
use fsdp_train::Job;
use fsdp_train::train::{RunOptions, train};

use crate::args::TrainArgs;
use crate::error::CliError;
use crate::progress::Progress;
use crate::run_setup::RunSetup;
use crate::trace::{SpanObserver, TraceFile};
use crate::{host, logging, output, stop_signal};

/// Trains as a run file says and prints the summary.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the run failed.
pub(crate) fn run(args: &TrainArgs) -> Result<(), CliError> {
    let setup = RunSetup::load(&args.run)?;
    let architecture = setup.build()?;
    let init = setup.init(&architecture)?;
    let job = Job::new(setup.config.clone(), architecture, init)?;
    let trace = args.trace.as_deref().map(TraceFile::create).transpose()?;
    logging::install(trace.as_ref())?;
    let stop = stop_signal::install()?;
    let progress = Progress::new(job.config.train.steps, stop.clone());
    let is_observed = trace.is_some() || logging::is_asked_for();
    let observer = |rank: Rank| -> Box<dyn Observer> {
        if is_observed { Box::new(SpanObserver::new(rank, job.plan.clone())) } else { Box::new(()) }
    };
    let options = RunOptions {
        reporter: &progress,
        stop: &stop,
        overwrite: args.overwrite,
        observer: &observer,
        config_json: Some(setup.model.export(job.plan.policy.param_dtype.master())),
        flops: Some(setup.flops(job.plan.spec.elements())),
    };
    let outcome = train(&job, &host::training(&job.config.run), &options);
    progress.finish();
    // A trace of a run that failed is worth having; but the reason of the failure comes first.
    let traced = trace.as_ref().map_or(Ok(()), TraceFile::finish);
    let summary = outcome?;
    traced?;
    output::print(&summary::render(&job, &summary))
}
