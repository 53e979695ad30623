//! The processes of this node in one attempt, from their start to their end.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::agent::Event;
use super::coordinator::worst;
use super::message::Start;
use super::{logs, note};
use crate::args::LaunchArgs;
use crate::cluster::LAUNCHER;
use crate::error::CliError;
use crate::exit_code::Exit;

/// How long the others may take to end when one process has. They may have to notice first.
const GRACE: Duration = Duration::from_secs(15);

/// How long they may take when they know of it at once: they were told of a failure, or that one was killed, which ends its
/// connections. A little longer than each of them gives itself (see [`cluster`](crate::cluster)). What is here then is
/// stopped, hangs, or still waits for the one that was killed before they had met.
const GRACE_OF_TOLD: Duration = Duration::from_secs(5);

/// What the processes of an attempt have in common.
pub(super) struct Common<'a> {
    /// What they are started with.
    pub(super) arguments: &'a [OsString],
    /// A folder of this node, for them to meet and to leave notes.
    pub(super) folder: &'a Path,
    /// What they prove themselves with, if there are several nodes.
    pub(super) token: Option<&'a str>,
}

/// See the [module](self).
pub(super) struct Attempt {
    pub(super) number: u32,
    /// The number of the first process of this node.
    first_process: usize,
    processes: Vec<Running>,
    /// The process that failed first, and how.
    failed: Option<(usize, ExitStatus)>,
    /// What ended all of them, in the words of those who were told.
    verdict: Option<String>,
    /// When the others are killed.
    pub(super) deadline: Option<Instant>,
    was_asked: bool,
}

struct Running {
    pid: Pid,
    status: Option<ExitStatus>,
}

impl Attempt {
    /// Starts the processes of this node.
    ///
    /// # Errors
    /// [`CliError::Start`]; none is left running.
    pub(super) fn start(
        args: &LaunchArgs,
        start: &Start,
        common: &Common<'_>,
        events: &Sender<Event>,
    ) -> Result<Self, CliError> {
        let failed = |source| CliError::Start { what: "fsdp".to_owned(), source };
        let program = std::env::current_exe().map_err(failed)?;
        let nproc = args.nproc;
        let mut attempt = Self {
            number: start.attempt,
            first_process: start.node * nproc,
            processes: Vec::new(),
            failed: None,
            verdict: None,
            deadline: None,
            was_asked: false,
        };
        for local in 0..nproc {
            let process = attempt.first_process + local;
            let mut command = Command::new(&program);
            command
                .args(common.arguments)
                .env("FSDP_PROCESS", process.to_string())
                .env("FSDP_PROCESSES", (start.nodes * nproc).to_string())
                .env("FSDP_LOCAL_PROCESS", local.to_string())
                .env("FSDP_LOCAL_PROCESSES", nproc.to_string())
                .env(LAUNCHER, std::process::id().to_string())
                .env(note::FOLDER, common.folder)
                // What the terminal sends to this group, it gets from here.
                .process_group(0)
                .stdin(Stdio::null());
            match (&start.rendezvous, common.token) {
                (Some(endpoint), Some(token)) => {
                    command.env("FSDP_RENDEZVOUS", endpoint).env("FSDP_TOKEN", token);
                }
                _ => {
                    let folder = common.folder.join(format!("attempt-{}", start.attempt));
                    command.env("FSDP_RENDEZVOUS_DIR", folder);
                }
            }
            let logs = args.log_dir.as_deref().map(|dir| logs::folder(dir, start.attempt, process));
            // Dropping what was begun ends it.
            attempt.start_one(process, command, logs, events)?;
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

    /// A process has ended; `verdict` is what ended all of them, if they were told of something.
    pub(super) fn note(&mut self, process: usize, status: ExitStatus, verdict: Option<String>) {
        self.processes[process - self.first_process].status = Some(status);
        self.verdict = verdict;
        if !status.success() {
            self.failed.get_or_insert((process, status));
        }
        if self.failed.is_some() {
            self.end(self.is_told());
        }
    }

    /// Gives the processes a moment to end by themselves: a shorter one if they know why at once.
    pub(super) fn end(&mut self, is_told: bool) {
        let deadline = Instant::now() + if is_told { GRACE_OF_TOLD } else { GRACE };
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    /// Kills what still runs when its moment has passed, a process that is stopped too.
    pub(super) fn kill_if_late(&mut self) {
        if self.deadline.take_if(|deadline| *deadline <= Instant::now()).is_some() {
            self.kill();
        }
    }

    /// Lets the processes save and stop. Not by the signal that was sent to this one: a scheduler may have sent it to all
    /// processes, and the second of its kind would end them.
    pub(super) fn stop(&mut self) {
        if !std::mem::replace(&mut self.was_asked, true) {
            self.signal(Signal::USR1);
        }
    }

    /// Kills what still runs.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Whether a process was killed by a signal before it was asked to end.
    pub(super) fn was_killed(&self) -> bool {
        self.failed.is_some_and(|(_, status)| status.code().is_none())
    }

    /// Whether the processes know of a failure at once, or can not learn of it.
    pub(super) fn is_told(&self) -> bool {
        self.verdict.is_some() || self.was_killed()
    }

    /// What the processes come to, and what failed first, when all have ended.
    pub(super) fn ended(&self) -> Option<(Exit, Option<String>)> {
        let statuses = self.processes.iter().map(|running| running.status);
        let statuses = statuses.collect::<Option<Vec<ExitStatus>>>()?;
        Some((worst(statuses.into_iter().map(exit_of)), self.because()))
    }

    /// What failed first. Whoever ends first often is not who has failed, unless it was killed.
    fn because(&self) -> Option<String> {
        let (process, status) = self.failed?;
        let verdict = self.verdict.clone().filter(|_| !self.was_killed());
        Some(verdict.unwrap_or_else(|| describe(process, status)))
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
        self.kill();
    }
}

fn exit_of(status: ExitStatus) -> Exit {
    let of_code = |code: i32| Exit::of_code(code).unwrap_or(Exit::Failed);
    // Whatever kills a process (a lack of memory, an administrator, a failing device) can pass.
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

    /// An attempt whose two processes are not there.
    fn attempt() -> Attempt {
        let running = |pid| Running { pid: Pid::from_raw(pid).unwrap(), status: None };
        Attempt {
            number: 0,
            first_process: 0,
            processes: vec![running(i32::MAX - 1), running(i32::MAX)],
            failed: None,
            verdict: None,
            deadline: None,
            was_asked: false,
        }
    }

    #[test]
    fn others_have_a_moment_when_they_know_of_a_failure_and_longer_when_they_have_to_notice_it() {
        let (killed, failed) = (ExitStatus::from_raw(9), ExitStatus::from_raw(75 << 8));
        let told = || Some("process 1 has failed".to_owned());
        for (status, verdict, grace) in
            [(killed, None, GRACE_OF_TOLD), (failed, told(), GRACE_OF_TOLD), (failed, None, GRACE)]
        {
            let (mut attempt, before) = (attempt(), Instant::now());
            attempt.note(1, status, verdict);
            let deadline = attempt.deadline.expect("the others have to end");
            assert!((before + grace..=Instant::now() + grace).contains(&deadline), "{status}");
            // What ends later says nothing new.
            attempt.note(0, failed, told());
            assert!(attempt.deadline.is_some_and(|later| later <= deadline), "{status}");
        }
    }

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
