//! `fsdp launch`: starts the processes of a run on this node, supervises them, and restarts them if that can help.
//!
//! A launch consists of *attempts*. In an attempt all processes are started together and end together: if one fails, the
//! others are told and end by themselves (see [`cluster`](crate::cluster)). Their exit codes decide whether there is
//! another attempt: 75, or death by a signal, may be temporary; everything else is permanent.
//!
//! It does not know of other nodes: torchrun, srun and mpirun start processes on several.

mod attempt;
mod logs;
mod note;
mod plan;

use std::path::Path;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::process::rendezvous::abandoned::{LAUNCH_PREFIX, hold, remove_abandoned};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::args::LaunchArgs;
use crate::descriptors;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::logging;
use crate::output;
use attempt::Attempt;
pub(crate) use note::{Note, leave_verdict};
use plan::Plan;

/// The longest pause before a restart, in seconds: a failed part may need time to recover.
const PAUSE_MAX: u32 = 30;

/// An event of a launch.
enum Event {
    /// A process of the attempt, with this index, has ended.
    Ended(usize, ExitStatus),
    /// The launcher received a signal, with this number, that asks it to stop.
    Signal(i32),
}

/// Starts processes until they have done their work, or cannot.
///
/// # Errors
/// [`CliError`]: the command to launch is wrong, no process can be started, or the run's checkpoints cannot be listed.
pub(crate) fn run(args: &LaunchArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let plan = Plan::new(args)?;
    descriptors::expect(args.nproc)?;
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
    let folder = folder.path();
    Launch {
        args,
        plan,
        folder,
        sender,
        events,
        is_stopping: false,
        was_signaled: false,
        was_interrupted: false,
    }
    .run()
}

/// A launch, between and during attempts.
struct Launch<'a> {
    args: &'a LaunchArgs,
    plan: Plan,
    /// Folder in which processes meet and leave notes.
    folder: &'a Path,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// Whether a signal asked to stop.
    is_stopping: bool,
    /// Whether a stop signal other than SIGUSR1 was received; a second one does not wait for a save.
    was_signaled: bool,
    /// Whether a second such signal was received.
    was_interrupted: bool,
}

impl Launch<'_> {
    /// Makes attempts until one is the last. If asked to stop twice, a launch ends like a run without a launcher.
    fn run(mut self) -> Result<Exit, CliError> {
        let exit = self.run_attempts()?;
        Ok(if self.was_interrupted { Exit::Interrupted } else { exit })
    }

    fn run_attempts(&mut self) -> Result<Exit, CliError> {
        let first = self.args.log_dir.as_deref().map_or(0, logs::next);
        let max = self.args.max_restarts;
        let mut restarts = 0;
        loop {
            let (exit, because) = self.attempt(first + restarts)?;
            if exit != Exit::Temporary || self.is_stopping {
                return Ok(exit);
            }
            if Note::Elsewhere.is_in(self.folder) {
                let why = "its state is not in run.out_dir, so it is not started again";
                output::note(&format!("{because}; {why}"));
                return Ok(exit);
            }
            if restarts == max {
                output::note(&format!("{because}; no restarts are left (--max-restarts {max})"));
                return Ok(exit);
            }
            let left = max - restarts;
            output::note(&format!("{because}; restarting all processes (at most {left} more times)"));
            self.pause(restarts.min(PAUSE_MAX));
            if self.is_stopping {
                return Ok(exit);
            }
            restarts += 1;
        }
    }

    /// Starts all processes and waits until all have ended; returns their joint exit and the first failure.
    fn attempt(&mut self, number: u32) -> Result<(Exit, String), CliError> {
        Note::Met.remove_from(self.folder);
        note::remove_verdict(self.folder);
        let arguments = self.plan.arguments(Note::TakenOver.is_in(self.folder))?;
        let mut attempt = Attempt::start(self.args, number, &arguments, self.folder, &self.sender)?;
        loop {
            attempt.kill_if_late();
            match self.next(attempt.deadline()) {
                Some(Event::Ended(process, status)) => {
                    let verdict = note::verdict(self.folder);
                    attempt.record_end(process, status, verdict, Note::Met.is_in(self.folder));
                    if let Some(outcome) = attempt.outcome() {
                        return Ok(outcome);
                    }
                }
                Some(Event::Signal(signal)) => {
                    self.record_signal(signal);
                    if self.was_interrupted { attempt.kill() } else { attempt.stop() }
                }
                None => {}
            }
        }
    }

    /// Waits before a restart, unless asked to stop.
    fn pause(&mut self, seconds: u32) {
        let end = Instant::now() + Duration::from_secs(seconds.into());
        while !self.is_stopping
            && let Some(event) = self.next(Some(end))
        {
            match event {
                Event::Signal(signal) => self.record_signal(signal),
                Event::Ended(..) => unreachable!("all processes of the last attempt have ended"),
            }
        }
    }

    /// The next event; `None` once the deadline has passed.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let event = match deadline {
            None => self.events.recv().map_err(RecvTimeoutError::from),
            Some(end) => self.events.recv_timeout(end.saturating_duration_since(Instant::now())),
        };
        match event {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the launch holds a sender itself"),
        }
    }

    /// The first signal lets processes save; a second one does not wait for that. SIGUSR1, which only asks, does not
    /// count: of signals sent together, it may arrive first even if it was sent last.
    fn record_signal(&mut self, signal: i32) {
        tracing::info!(signal, "asked to stop");
        if signal != SIGUSR1 {
            self.was_interrupted |= std::mem::replace(&mut self.was_signaled, true);
        }
        self.is_stopping = true;
    }
}
