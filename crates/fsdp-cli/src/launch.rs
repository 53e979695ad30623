//! `fsdp launch`: starts the processes of a run, supervises them, and restarts them if that can help.
//!
//! On every node an *agent* starts processes and reports how they ended; one of the agents is also the *coordinator*,
//! which decides. A launch consists of *attempts*. In an attempt all processes are started together and end together:
//! if one fails, the others are told and end by themselves (see [`cluster`](crate::cluster)). Their exit codes decide
//! whether there is another attempt: 75, or death by a signal, may be temporary; everything else is permanent.

mod agent;
mod attempt;
mod coordinator;
mod host;
mod lines;
mod logs;
mod meeting;
mod message;
mod note;
mod plan;

use std::sync::mpsc;
use std::thread;

use fsdp_comm::process::rendezvous::abandoned::{LAUNCH_PREFIX, hold, remove_abandoned};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::args::LaunchArgs;
use crate::descriptors;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::logging;
use agent::{Agent, Event};
use meeting::Meeting;
pub(crate) use note::{Note, leave_verdict};
use plan::Plan;

/// Starts processes until they have done their work, or cannot.
///
/// # Errors
/// [`CliError`]: the command to launch is wrong, or no process can be started.
pub(crate) fn run(args: &LaunchArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let plan = Plan::new(args)?;
    descriptors::expect(args.nproc * args.nnodes.min)?;
    let mut meeting = Meeting::new(args, &plan)?;
    let (sender, events) = mpsc::channel();
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGUSR1]).map_err(|source| CliError::Signal { source })?;
    let signal_sender = sender.clone();
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || signals.forever().try_for_each(|signal| signal_sender.send(Event::Signal(signal))))
        .map_err(|source| CliError::Start { what: "a thread".to_owned(), source })?;
    remove_abandoned(&std::env::temp_dir());
    let folder = tempfile::Builder::new().prefix(LAUNCH_PREFIX).tempdir();
    let what = || "a folder for the processes to meet".to_owned();
    let folder = folder.map_err(|source| CliError::Start { what: what(), source })?;
    let _held = hold(folder.path());
    Agent::new(args, &plan, folder.path(), (sender, events)).run(&mut meeting)
}
