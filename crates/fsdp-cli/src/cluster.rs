//! This process among those that a launcher has started: how it joins the others, and how it ends with them.
//!
//! What concerns the run is said once, by the process of rank 0. Another one speaks up only when it is the one that failed;
//! what else it has to say goes to the log (`RUST_LOG`).

mod error_file;
mod watchdog;

use std::env;
use std::time::Duration;

use fsdp_comm::process::Verdict;
use fsdp_comm::process::cluster::{Cluster, Joining};
use fsdp_comm::process::place::{Place, recognise};
use fsdp_train::TrainError;
use fsdp_train::config::RunConfig;

use crate::error::CliError;
use crate::exit_code::Exit;
use crate::output;

/// The place of this process, if it is one of several. From here on only the first one speaks.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn place() -> Result<Option<Place>, CliError> {
    let place = recognise(&variable)?;
    if let Some(place) = place.filter(|place| place.process > 0) {
        output::speak_as(format!("process {}", place.process));
    }
    Ok(place)
}

/// Whether this process is another one than the first of several: what one can say alone, it need not say too.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn is_another() -> Result<bool, CliError> {
    Ok(place()?.is_some_and(|place| place.process > 0))
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

/// Joins the other processes, does work, and ends with them; alone, it only does the work. How it ends is the same in all
/// processes, and the first failure of any of them decides it.
///
/// # Errors
/// [`CliError`]: of the work, or of the world; in other processes than the first only their own.
pub(crate) fn within(
    place: Option<Place>,
    run: &RunConfig,
    work: impl FnOnce(Option<&Cluster>) -> Result<Exit, CliError>,
) -> Result<Exit, CliError> {
    let Some(place) = place else { return work(None) };
    let cluster = join(place, run)?;
    watchdog::install(&cluster);
    let outcome = work(Some(&cluster));
    if let Err(error) = &outcome
        && !is_told(error)
    {
        cluster.fail(error.kind(), error.to_string());
    }
    cluster.leave();
    conclude(outcome, cluster.verdict(), place)
}

fn join(place: Place, run: &RunConfig) -> Result<Cluster, CliError> {
    let processes = place.processes;
    if !run.ranks.is_multiple_of(processes) {
        return Err(CliError::Processes { place, ranks: run.ranks });
    }
    let joining = Joining {
        place,
        variable: &variable,
        shared: Some(run.out_dir.as_ref()),
        local_ranks: run.ranks / processes,
        device: run.device.name().to_owned(),
        heartbeat: Duration::from_secs_f64(run.heartbeat_s),
        timeout: Duration::from_secs_f64(run.timeout_s),
        is_insecure: false,
    };
    Ok(Cluster::join(&joining)?)
}

/// Whether all processes know of a failure, and come to an end of their own.
fn is_told(error: &CliError) -> bool {
    matches!(error, CliError::Train(TrainError::Ended { .. } | TrainError::Told { .. } | TrainError::Stopped))
}

/// How a process ends whose world has ended.
fn conclude(
    outcome: Result<Exit, CliError>,
    verdict: Option<Verdict>,
    place: Place,
) -> Result<Exit, CliError> {
    match (outcome, verdict) {
        (Ok(exit), _) => Ok(exit),
        // Its own failure it tells itself, in its own words.
        (Err(error), Some(verdict)) if verdict.process == place.process => Err(error),
        // The first one that is left tells it for all.
        (Err(_), Some(verdict))
            if place.process == usize::from(verdict.process == 0 && verdict.is_loss()) =>
        {
            Err(CliError::World { verdict: Box::new(verdict) })
        }
        (Err(error), Some(verdict)) => {
            tracing::info!("ended: {error}");
            Ok(verdict.failure.kind.into())
        }
        (Err(error), None) if place.process > 0 && is_told(&error) => {
            tracing::info!("ended: {error}");
            Ok(error.exit())
        }
        (Err(error), None) => Err(error),
    }
}
