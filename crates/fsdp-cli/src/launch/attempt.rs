//! One start of all processes, and their end.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{logs, note};
use crate::args::LaunchArgs;
use crate::error::CliError;
use crate::exit_code::Exit;

/// How long the others may take to end when one process has.
const GRACE: Duration = Duration::from_secs(15);

/// What happens to a launch.
pub(super) enum Event {
    /// A process of an attempt has ended.
    Ended {
        /// The attempt.
        attempt: u32,
        /// The process.
        process: usize,
        /// How.
        status: ExitStatus,
    },
    /// This process was sent a signal that asks to stop.
    Signal,
}

/// The processes of an attempt.
pub(super) struct Attempt {
    number: u32,
    processes: Vec<Running>,
}

struct Running {
    pid: Pid,
    status: Option<ExitStatus>,
}

/// How an attempt has ended.
pub(super) struct Ended {
    pub(super) exit: Exit,
    /// Whether that is because somebody asked for it.
    pub(super) was_stopped: bool,
    /// What happened first.
    pub(super) because: String,
}

impl Attempt {
    /// Starts all processes; `folder` is for them to meet and to leave notes.
    ///
    /// # Errors
    /// [`CliError::Start`]; none is left running.
    pub(super) fn start(
        args: &LaunchArgs,
        number: u32,
        arguments: &[OsString],
        folder: &Path,
        events: &Sender<Event>,
    ) -> Result<Self, CliError> {
        let failed = |source| CliError::Start { what: "fsdp".to_owned(), source };
        let program = std::env::current_exe().map_err(failed)?;
        let mut attempt = Self { number, processes: Vec::new() };
        for process in 0..args.nproc {
            let mut command = Command::new(&program);
            command
                .args(arguments)
                .env("FSDP_PROCESS", process.to_string())
                .env("FSDP_PROCESSES", args.nproc.to_string())
                .env("FSDP_LOCAL_PROCESS", process.to_string())
                .env("FSDP_LOCAL_PROCESSES", args.nproc.to_string())
                .env("FSDP_RENDEZVOUS_DIR", folder.join(format!("attempt-{number}")))
                .env(note::FOLDER, folder)
                // What the terminal sends to this group, it gets from here.
                .process_group(0)
                .stdin(Stdio::null());
            let logs = args.log_dir.as_deref().map(|dir| logs::folder(dir, number, process));
            let started = attempt.start_one(process, command, logs, events);
            if let Err(error) = started {
                attempt.signal(Signal::KILL);
                return Err(error);
            }
        }
        Ok(attempt)
    }

    fn start_one(
        &mut self,
        process: usize,
        mut command: Command,
        logs: Option<PathBuf>,
        events: &Sender<Event>,
    ) -> Result<(), CliError> {
        let failed = |source| CliError::Start { what: format!("process {process}"), source };
        let mut child = match logs {
            None => command.spawn().map_err(failed)?,
            Some(folder) => logs::spawn(&mut command, &folder, process == 0).map_err(failed)?,
        };
        let pid = Pid::from_child(&child);
        let (attempt, events) = (self.number, events.clone());
        let wait = move || {
            if let Ok(status) = Child::wait(&mut child) {
                // Nobody listens any more when the launch is over.
                let _ = events.send(Event::Ended { attempt, process, status });
            }
        };
        self.processes.push(Running { pid, status: None });
        thread::Builder::new().name(format!("process {process}")).spawn(wait).map_err(failed)?;
        Ok(())
    }

    /// Waits until all processes have ended.
    pub(super) fn watch(mut self, events: &Receiver<Event>) -> Ended {
        let mut first: Option<(usize, ExitStatus)> = None;
        let mut deadline: Option<Instant> = None;
        let mut was_stopped = false;
        while self.processes.iter().any(|running| running.status.is_none()) {
            let wait = deadline.map_or(GRACE, |deadline| deadline.saturating_duration_since(Instant::now()));
            match events.recv_timeout(wait) {
                Ok(Event::Ended { attempt, process, status }) if attempt == self.number => {
                    self.processes[process].status = Some(status);
                    if !status.success() && first.is_none() {
                        first = Some((process, status));
                        deadline = Some(Instant::now() + GRACE);
                    }
                }
                Ok(Event::Ended { .. }) => {}
                Ok(Event::Signal) => {
                    let again = std::mem::replace(&mut was_stopped, true);
                    self.signal(forwarded(again));
                }
                Err(RecvTimeoutError::Timeout) if deadline.is_some() => self.signal(Signal::KILL),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        let because = first.map_or_else(String::new, |(process, status)| describe(process, status));
        let exits = self.processes.iter().filter_map(|running| running.status).map(exit_of);
        Ended { exit: worst(exits), was_stopped, because }
    }

    fn signal(&self, signal: Signal) {
        for running in self.processes.iter().filter(|running| running.status.is_none()) {
            // It may have ended a moment ago.
            if let Err(error) = kill_process(running.pid, signal) {
                tracing::debug!("signal {signal:?} to {:?}: {error}", running.pid);
            }
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// What processes are sent when this one is: first to save and stop, then to end at once. Not the signal itself: a scheduler
/// may have sent it to all processes, and the second of its kind would end them.
fn forwarded(again: bool) -> Signal {
    if again { Signal::KILL } else { Signal::USR1 }
}

fn exit_of(status: ExitStatus) -> Exit {
    let of_code = |code: i32| Exit::of_code(code).unwrap_or(Exit::Failed);
    // Whatever kills a process (a lack of memory, an administrator, a failing device) can pass.
    status.code().map_or(Exit::Temporary, of_code)
}

/// What all processes come to: what can not pass counts before what can.
fn worst(exits: impl Iterator<Item = Exit>) -> Exit {
    const ORDER: [Exit; 6] =
        [Exit::Input, Exit::Failed, Exit::Interrupted, Exit::Temporary, Exit::Found, Exit::Done];
    exits.min_by_key(|exit| ORDER.iter().position(|other| other == exit)).unwrap_or(Exit::Done)
}

fn describe(process: usize, status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("process {process} has ended with exit code {code}"),
        (None, Some(signal)) => format!("process {process} was killed by signal {signal}"),
        (None, None) => format!("process {process} has ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_pass_counts_before_what_can() {
        let of =
            |codes: &[i32]| worst(codes.iter().map(|&code| exit_of(ExitStatus::from_raw(code << 8)))).code();
        assert_eq!(of(&[0, 0]), 0);
        assert_eq!(of(&[0, 75]), 75);
        assert_eq!(of(&[75, 2, 75]), 2);
        assert_eq!(of(&[75, 3]), 3);
        assert_eq!(of(&[75, 101]), 3, "what is none of our codes is a panic");
        assert_eq!(exit_of(ExitStatus::from_raw(9)), Exit::Temporary, "killed");
    }
}
