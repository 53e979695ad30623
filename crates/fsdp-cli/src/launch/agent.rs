//! The agent of a node: starts processes on the coordinator's orders, supervises them, and reports how they ended.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGUSR1;

use super::attempt::{Attempt, Common};
use super::coordinator::PATIENCE;
use super::logs;
use super::meeting::{Meeting, Session};
use super::message::{Known, Message, NodeFacts, Order, Start, exit_of};
use super::note::{self, Note};
use super::plan::Plan;
use crate::args::LaunchArgs;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::output;

/// Interval between heartbeats.
pub(super) const PULSE: Duration = Duration::from_secs(1);

/// An event that an agent handles.
pub(super) enum Event {
    /// A process of an attempt has ended.
    Ended {
        /// Number of the attempt.
        attempt: u32,
        /// Index of the process.
        process: usize,
        /// How it ended.
        status: ExitStatus,
    },
    /// This process received a signal, with this number, that asks it to stop.
    Signal(i32),
    /// The coordinator gave an order.
    Ordered(Order),
    /// The connection to a session's coordinator is lost.
    Lost {
        /// Number of the session.
        session: u64,
    },
}

/// See the [module](self).
pub(super) struct Agent<'a> {
    args: &'a LaunchArgs,
    plan: &'a Plan,
    /// Folder in which processes of this node meet and leave notes.
    folder: &'a Path,
    sender: Sender<Event>,
    events: Receiver<Event>,
    running: Option<Attempt>,
    known: Known,
    /// When it last did its periodic checks.
    last_check: Instant,
    is_stop_requested: bool,
    /// Whether a stop signal other than SIGUSR1 was received; a second one does not wait for a save.
    was_signaled: bool,
    /// Whether a second such signal was received.
    was_interrupted: bool,
}

impl<'a> Agent<'a> {
    /// Creates an idle agent; events arrive through the channel.
    pub(super) fn new(
        args: &'a LaunchArgs,
        plan: &'a Plan,
        folder: &'a Path,
        (sender, events): (Sender<Event>, Receiver<Event>),
    ) -> Self {
        let attempts = args.log_dir.as_deref().map_or(0, logs::next);
        let known = Known { attempts, ..Known::default() };
        Self {
            args,
            plan,
            folder,
            sender,
            events,
            running: None,
            known,
            last_check: Instant::now(),
            is_stop_requested: false,
            was_signaled: false,
            was_interrupted: false,
        }
    }

    /// Takes part in a launch until it is over. If asked to stop twice, it ends like a run without a launcher.
    ///
    /// # Errors
    /// [`CliError`]: a process cannot be started, or there is no coordinator.
    pub(super) fn run(&mut self, meeting: &mut Meeting<'_>) -> Result<Exit, CliError> {
        let exit = self.run_until_over(meeting)?;
        Ok(if self.was_interrupted { Exit::Interrupted } else { exit })
    }

    fn run_until_over(&mut self, meeting: &mut Meeting<'_>) -> Result<Exit, CliError> {
        loop {
            let begin = Instant::now();
            let Some(session) = self.find(meeting)? else { return Ok(Exit::Temporary) };
            if let Some(exit) = self.run_session(&session)? {
                session.close();
                return Ok(exit);
            }
            output::note("the coordinator of the launch is lost; looking for another one");
            if self.is_stop_requested {
                return Ok(Exit::Temporary);
            }
            // Pause between attempts to reach a coordinator that is lost as soon as it is found.
            std::thread::sleep(PULSE.saturating_sub(begin.elapsed()));
        }
    }

    /// Finds the coordinator; `None` if asked to stop before it is found.
    fn find(&mut self, meeting: &mut Meeting<'_>) -> Result<Option<Session>, CliError> {
        let begin = Instant::now();
        loop {
            if let Some(session) = meeting.session(&self.sender)? {
                return Ok(Some(session));
            }
            if begin.elapsed() >= PATIENCE {
                return Err(CliError::NoCoordinator { waited: PATIENCE });
            }
            let pause = Instant::now() + PULSE;
            while let Ok(event) = self.events.recv_timeout(pause.saturating_duration_since(Instant::now())) {
                if matches!(event, Event::Signal(_)) {
                    return Ok(None);
                }
            }
        }
    }

    /// Executes the orders of one coordinator; `None` if it is lost.
    fn run_session(&mut self, session: &Session) -> Result<Option<Exit>, CliError> {
        session.send(Message::Join(NodeFacts {
            host: fsdp_comm::process::cluster::host(),
            number: self.args.node_rank,
            nproc: self.args.nproc,
            address: session.address(),
            port: session.free_port(),
            known: self.known,
        }));
        let mut is_lost = false;
        loop {
            if is_lost && self.running.is_none() {
                return Ok(None);
            }
            if self.last_check.elapsed() >= PULSE {
                self.check(session);
            }
            self.running.iter_mut().for_each(Attempt::kill_if_late);
            match self.next() {
                Some(Event::Ended { attempt, process, status }) => {
                    self.ended(attempt, process, status, session)
                }
                Some(Event::Signal(signal)) => self.handle_signal(signal, session),
                Some(Event::Ordered(Order::Start(start))) => self.start(&start, session)?,
                Some(Event::Ordered(Order::Finish { code, because })) => {
                    // Messages for all nodes are printed by the coordinator's node.
                    if let Some(because) = because.filter(|_| !session.is_local() || code != 0) {
                        output::note(&because);
                    }
                    return Ok(Some(exit_of(code)));
                }
                Some(Event::Ordered(order)) => self.obey(&order),
                Some(Event::Lost { session: number }) if number == session.number => {
                    is_lost = true;
                    self.obey(&Order::End { is_notified: false });
                }
                Some(Event::Lost { .. }) => {}
                None => {}
            }
        }
    }

    /// The next event; `None` when periodic checks are due.
    fn next(&self) -> Option<Event> {
        let deadline = self.running.as_ref().and_then(|attempt| attempt.deadline);
        let next_check = self.last_check + PULSE;
        let wake = deadline.map_or(next_check, |deadline| deadline.min(next_check));
        match self.events.recv_timeout(wake.saturating_duration_since(Instant::now())) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the agent holds a sender itself"),
        }
    }

    /// Does the periodic checks.
    fn check(&mut self, session: &Session) {
        self.last_check = Instant::now();
        if !self.known.is_taken_over && Note::TakenOver.is_in(self.folder) {
            self.known.is_taken_over = true;
            session.send(Message::TakenOver);
        }
        session.send(Message::Pulse);
    }

    fn start(&mut self, start: &Start, session: &Session) -> Result<(), CliError> {
        self.known.attempts = self.known.attempts.max(start.attempt + 1);
        Note::StopAtSave.remove_from(self.folder);
        Note::Met.remove_from(self.folder);
        note::remove_verdict(self.folder);
        let arguments: Vec<OsString> = self.plan.arguments(start.beginning);
        let common = Common { arguments: &arguments, folder: self.folder, token: session.token() };
        self.running = Some(Attempt::start(self.args, start, &common, &self.sender)?);
        Ok(())
    }

    fn obey(&mut self, order: &Order) {
        if let Order::Pulse(known) = order {
            self.known = *known;
        }
        let Some(attempt) = &mut self.running else { return };
        match order {
            Order::Stop => attempt.stop(),
            Order::StopAtSave => Note::StopAtSave.leave_in(self.folder),
            Order::End { is_notified } => attempt.end(*is_notified),
            Order::Start(_) | Order::Finish { .. } | Order::Pulse(_) => {}
        }
    }

    /// The first signal lets processes save; a second one does not wait for that. SIGUSR1, which only asks, does not
    /// count: of signals sent together, it may arrive first even if it was sent last.
    fn handle_signal(&mut self, signal: i32, session: &Session) {
        tracing::info!(signal, "asked to stop");
        session.send(Message::Leave);
        if signal != SIGUSR1 {
            self.was_interrupted |= std::mem::replace(&mut self.was_signaled, true);
        }
        self.is_stop_requested = true;
        match &mut self.running {
            Some(attempt) if self.was_interrupted => attempt.kill(),
            Some(attempt) => attempt.stop(),
            None => {}
        }
    }

    fn ended(&mut self, number: u32, process: usize, status: ExitStatus, session: &Session) {
        let Some(attempt) = self.running.as_mut().filter(|attempt| attempt.number == number) else { return };
        attempt.record_end(process, status, note::verdict(self.folder), Note::Met.is_in(self.folder));
        let Some((exit, because)) = attempt.outcome() else { return };
        let (was_killed, is_notified) = (attempt.was_killed(), attempt.is_notified());
        self.running = None;
        self.check(session);
        session.send(Message::Ended {
            attempt: number,
            code: exit.code(),
            because,
            was_killed,
            is_notified,
            is_elsewhere: Note::Elsewhere.is_in(self.folder),
            port: session.free_port(),
        });
    }
}
