//! `fsdp launch`: starts the processes of a run on this machine, watches over them, and starts them again when that can
//! help.
//!
//! A launch is one or several *attempts*. In an attempt all processes are started together, and end together: when one
//! fails, the others hear of it and end by themselves (see [`cluster`](crate::cluster)). What their exit codes say decides
//! whether there is another attempt: 75, or death by a signal, may pass; anything else stays.

mod attempt;
mod logs;
mod note;
mod plan;

use std::ffi::OsString;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::args::LaunchArgs;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::{logging, output};
use attempt::{Attempt, Ended, Event};
pub(crate) use note::Note;
use plan::Plan;

/// The longest pause before processes are started again, in seconds. What has failed may need a while.
const PAUSE_MAX: u32 = 30;

/// Starts processes until they have done their work, or can not.
///
/// # Errors
/// [`CliError`]: what is to be launched is wrong, or no process can be started.
pub(crate) fn run(args: &LaunchArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let plan = Plan::new(args)?;
    let (sender, events) = mpsc::channel();
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGUSR1]).map_err(|source| CliError::Signal { source })?;
    let told = sender.clone();
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || signals.forever().try_for_each(|_| told.send(Event::Signal)))
        .map_err(|source| CliError::Start { what: "a thread".to_owned(), source })?;
    supervise(args, &plan, &sender, &events)
}

fn supervise(
    args: &LaunchArgs,
    plan: &Plan,
    sender: &mpsc::Sender<Event>,
    events: &Receiver<Event>,
) -> Result<Exit, CliError> {
    let folder = tempfile::Builder::new().prefix("fsdp-launch-").tempdir();
    let folder = folder.map_err(|source| CliError::Start {
        what: "a folder for the processes to meet".to_owned(),
        source,
    })?;
    for number in 0.. {
        let arguments: Vec<OsString> = plan.arguments(folder.path())?;
        let attempt = Attempt::start(args, number, &arguments, folder.path(), sender)?;
        let Ended { exit, was_stopped, because } = attempt.watch(events);
        if exit != Exit::Temporary || was_stopped {
            return Ok(exit);
        }
        if number == args.max_restarts {
            output::note(&format!("{because}; no restart is left (--max-restarts {})", args.max_restarts));
            return Ok(exit);
        }
        if Note::Elsewhere.is_in(folder.path()) {
            output::note(&format!("{because}; its state is not in run.out_dir, so it is not started again"));
            return Ok(exit);
        }
        let left = args.max_restarts - number;
        output::note(&format!("{because}; starting all processes again ({left} more times at most)"));
        if is_stopped_within(Duration::from_secs(number.min(PAUSE_MAX).into()), events) {
            return Ok(exit);
        }
    }
    unreachable!("the last attempt returns")
}

/// Waits; whether somebody asks to stop meanwhile.
fn is_stopped_within(pause: Duration, events: &Receiver<Event>) -> bool {
    let end = Instant::now() + pause;
    loop {
        match events.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Event::Signal) => return true,
            Ok(Event::Ended { .. }) => {}
            Err(_) => return false,
        }
    }
}
