//! The processes of one attempt, from start to end.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Event, logs, note};
use crate::args::LaunchArgs;
use crate::cluster::LAUNCHER;
use crate::error::CliError;
use crate::exit_code::Exit;

/// How long other processes may take to end after one has; they may have to detect it first.
const GRACE: Duration = Duration::from_secs(15);

/// How long they may take if they know at once: they were told of a failure, or a process was killed, which closes its
/// connections. A little longer than the limit each has for itself (see [`cluster`](crate::cluster)). A process that is
/// left after that is stopped, hangs, or still waits to meet the one that was killed.
const GRACE_IF_NOTIFIED: Duration = Duration::from_secs(5);

/// See the [module](self).
#[derive(Default)]
pub(super) struct Attempt {
    processes: Vec<Running>,
    /// The process that failed first, and how it ended.
    failed: Option<(usize, ExitStatus)>,
    /// The failure that ended all of them, as reported by processes that were told of it.
    verdict: Option<String>,
    deadline: Option<Instant>,
    is_stop_requested: bool,
}

struct Running {
    pid: Pid,
    status: Option<ExitStatus>,
}

impl Attempt {
    /// Starts the processes of attempt `number`, which meet and leave notes in a folder.
    ///
    /// # Errors
    /// [`CliError::Start`]; no process is left running.
    pub(super) fn start(
        args: &LaunchArgs,
        number: u32,
        arguments: &[OsString],
        folder: &Path,
        events: &Sender<Event>,
    ) -> Result<Self, CliError> {
        let failed = |source| CliError::Start { what: "fsdp".to_owned(), source };
        let program = std::env::current_exe().map_err(failed)?;
        let processes = args.nproc.to_string();
        let mut attempt = Self::default();
        for process in 0..args.nproc {
            let mut command = Command::new(&program);
            command
                .args(arguments)
                .env("FSDP_PROCESS", process.to_string())
                .env("FSDP_PROCESSES", &processes)
                .env("FSDP_LOCAL_PROCESS", process.to_string())
                .env("FSDP_LOCAL_PROCESSES", &processes)
                .env("FSDP_RENDEZVOUS_DIR", folder.join(format!("attempt-{number}")))
                .env(LAUNCHER, std::process::id().to_string())
                .env(note::FOLDER, folder)
                // Signals that the terminal sends to this group are forwarded by the launcher.
                .process_group(0)
                .stdin(Stdio::null());
            let logs = args.log_dir.as_deref().map(|dir| logs::folder(dir, number, process));
            // On failure, dropping the attempt ends the processes already started.
            attempt.start_process(process, command, logs, events)?;
        }
        Ok(attempt)
    }

    fn start_process(
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
        let events = events.clone();
        let wait = move || {
            if let Ok(status) = Child::wait(&mut child) {
                // The receiver is gone if the launch is over.
                let _ = events.send(Event::Ended(process, status));
            }
        };
        self.processes.push(Running { pid, status: None });
        thread::Builder::new().name(format!("process {process}")).spawn(wait).map_err(failed)?;
        Ok(())
    }

    /// Records the end of a process; `verdict` is the failure that ended all of them, if they were told of one. Those that
    /// wait to meet a process that could not start have nothing to save, and would not learn of its end.
    pub(super) fn record_end(
        &mut self,
        process: usize,
        status: ExitStatus,
        verdict: Option<String>,
        have_met: bool,
    ) {
        self.processes[process].status = Some(status);
        self.verdict = verdict;
        if !status.success() {
            self.failed.get_or_insert((process, status));
        }
        let is_unmet = !have_met && exit_of(status) == Exit::Temporary;
        match self.failed {
            Some(_) if is_unmet && !self.is_stop_requested => self.kill(),
            Some(_) => self.end(),
            None => {}
        }
    }

    /// Gives the processes time to end by themselves: less if they learn of the failure at once, or cannot learn of it.
    fn end(&mut self) {
        let is_notified = self.verdict.is_some() || self.was_killed();
        let deadline = Instant::now() + if is_notified { GRACE_IF_NOTIFIED } else { GRACE };
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    /// Kills remaining processes, stopped ones too, once the deadline has passed.
    pub(super) fn kill_if_late(&mut self) {
        if self.deadline.take_if(|deadline| *deadline <= Instant::now()).is_some() {
            self.kill();
        }
    }

    /// Lets the processes save and stop. Does not forward the signal that this process received: a scheduler may have
    /// sent it to all processes, and a second one would end them.
    pub(super) fn stop(&mut self) {
        if !std::mem::replace(&mut self.is_stop_requested, true) {
            self.signal(Signal::USR1);
        }
    }

    /// Kills remaining processes.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// When the remaining processes are to be [killed](Self::kill_if_late).
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the process that failed first was killed by a signal.
    fn was_killed(&self) -> bool {
        self.failed.is_some_and(|(_, status)| status.code().is_none())
    }

    /// The joint exit of the processes and the first failure, once all have ended; the text is empty if none failed.
    pub(super) fn outcome(&self) -> Option<(Exit, String)> {
        let statuses = self.processes.iter().map(|running| running.status);
        let statuses = statuses.collect::<Option<Vec<ExitStatus>>>()?;
        Some((worst(statuses.into_iter().map(exit_of)), self.because()))
    }

    /// The first failure. The first process to end is often not the one that failed, unless it was killed.
    fn because(&self) -> String {
        let verdict = self.verdict.clone().filter(|_| !self.was_killed());
        verdict.or_else(|| self.failed.map(|(process, status)| describe(process, status))).unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        for running in self.processes.iter().filter(|running| running.status.is_none()) {
            // The process may just have ended.
            if let Err(error) = kill_process(running.pid, signal) {
                tracing::debug!("signal {signal:?} to {:?}: {error}", running.pid);
            }
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The joint exit of all processes: permanent failures take precedence over temporary ones.
fn worst(exits: impl IntoIterator<Item = Exit>) -> Exit {
    const ORDER: [Exit; 6] =
        [Exit::Input, Exit::Failed, Exit::Interrupted, Exit::Temporary, Exit::Found, Exit::Done];
    let place = |exit: &Exit| ORDER.iter().position(|other| other == exit);
    exits.into_iter().min_by_key(place).unwrap_or(Exit::Done)
}

fn exit_of(status: ExitStatus) -> Exit {
    let of_code = |code: i32| Exit::of_code(code).unwrap_or(Exit::Failed);
    // Any cause of a kill (lack of memory, an administrator, a failing device) may be temporary.
    status.code().map_or(Exit::Temporary, of_code)
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

    /// An attempt with two processes that do not exist.
    fn attempt() -> Attempt {
        let running = |pid| Running { pid: Pid::from_raw(pid).unwrap(), status: None };
        let mut attempt = Attempt::default();
        attempt.processes.extend([i32::MAX - 1, i32::MAX].map(running));
        attempt
    }

    #[test]
    fn grace_is_shorter_when_failure_is_known_at_once() {
        let (killed, failed) = (ExitStatus::from_raw(9), ExitStatus::from_raw(75 << 8));
        let reported = || Some("process 1 has failed".to_owned());
        for (status, verdict, grace) in [
            (killed, None, GRACE_IF_NOTIFIED),
            (failed, reported(), GRACE_IF_NOTIFIED),
            (failed, None, GRACE),
        ] {
            let (mut attempt, before) = (attempt(), Instant::now());
            attempt.record_end(1, status, verdict, true);
            let deadline = attempt.deadline.expect("the others have to end");
            assert!((before + grace..=Instant::now() + grace).contains(&deadline), "{status}");
            // Later ends do not extend the deadline.
            attempt.record_end(0, failed, reported(), true);
            assert!(attempt.deadline.is_some_and(|later| later <= deadline), "{status}");
        }
    }

    #[test]
    fn processes_that_have_not_met_get_no_grace() {
        let (failed, refused) = (ExitStatus::from_raw(75 << 8), ExitStatus::from_raw(2 << 8));
        for (status, is_stopped, has_grace) in
            [(failed, false, false), (failed, true, true), (refused, false, true)]
        {
            let mut attempt = attempt();
            attempt.is_stop_requested = is_stopped;
            attempt.record_end(1, status, None, false);
            assert_eq!(attempt.deadline.is_some(), has_grace, "{status}, stopped: {is_stopped}");
        }
    }

    #[test]
    fn permanent_failure_outranks_temporary_one() {
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
