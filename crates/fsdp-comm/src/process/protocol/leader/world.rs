//! The leader's view of a world that has begun: which processes are alive, and the verdict.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::process::frame::Frame;
use crate::process::message::Message;
use crate::process::protocol::{ConnectionId, Event, GRACE, LEAVE_MAX, Output, Pulse, Request};
use crate::process::world::{Failure, Roster, Verdict};

/// See the [module](self). Processes that are not in `live` are dead or have left.
pub(super) struct World {
    roster: Roster,
    live: BTreeMap<ConnectionId, Live>,
    /// The verdict, with the time at which it was reached.
    verdict: Option<(Duration, Verdict)>,
    /// Blame of one process by another, with its time; the blamed process's own report takes precedence.
    blame: Option<(Duration, Verdict)>,
    /// Whether the grace period after the verdict is over.
    is_over: bool,
    /// Since when this process wants to leave.
    leaving: Option<Duration>,
    has_left: bool,
    outputs: Vec<Output>,
}

struct Live {
    process: usize,
    last_heard: Duration,
    /// The last collective that it has reported.
    last_call: Option<String>,
}

impl World {
    pub(super) fn new(roster: Roster) -> Self {
        World {
            roster,
            live: BTreeMap::new(),
            verdict: None,
            blame: None,
            is_over: false,
            leaving: None,
            has_left: false,
            outputs: Vec::new(),
        }
    }

    /// Adds a process.
    pub(super) fn add(&mut self, connection: ConnectionId, process: usize, last_heard: Duration) {
        self.live.insert(connection, Live { process, last_heard, last_call: None });
    }

    /// The connections of all live processes.
    pub(super) fn connections(&self) -> impl Iterator<Item = ConnectionId> {
        self.live.keys().copied()
    }

    pub(super) fn take(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    pub(super) fn is_live(&self, connection: ConnectionId) -> bool {
        self.live.contains_key(&connection)
    }

    /// Handles a frame from a live process.
    pub(super) fn received(&mut self, connection: ConnectionId, frame: Frame, pulse: &Pulse) {
        let live = self.live.get_mut(&connection).expect("the process is alive");
        live.last_heard = pulse.now();
        let (process, ranks) = (live.process, self.roster.processes[live.process].ranks.clone());
        if frame.generation != self.roster.generation {
            let (got, expected) = (frame.generation, self.roster.generation);
            return self.lose(
                connection,
                format!("it belongs to world {got:016x}, not {expected:016x}"),
                pulse,
            );
        }
        match frame.message {
            Message::Heartbeat => {}
            Message::Give { topic, rank, value } if ranks.contains(&rank) => {
                self.notify(Event::Gave { topic, rank, value });
            }
            Message::Announce { topic, value } => {
                let others = self.connections().filter(|other| *other != connection).collect();
                self.send(others, Message::Announce { topic: topic.clone(), value: value.clone() });
                self.notify(Event::Announced { topic, value });
            }
            Message::Calling { call } => live.last_call = Some(call),
            Message::Failed(failure) => self.fail(process, failure, pulse),
            Message::Goodbye => self.end(connection, "it has left"),
            other => {
                let cause = format!("it sent an unexpected message ({other:?})");
                self.lose(connection, cause, pulse);
            }
        }
        self.leave_if_last(pulse);
    }

    /// Handles the loss of a process: reaches a verdict if there is none.
    pub(super) fn lose(&mut self, connection: ConnectionId, cause: String, pulse: &Pulse) {
        if let Some(live) = self.live.get(&connection) {
            // Sent while its connection is still open: a process that was only silent may read it later.
            let mut verdict = Verdict::of_loss(&self.roster, live.process, cause.clone());
            verdict.failure.last_call.clone_from(&live.last_call);
            self.decide(verdict, pulse);
            self.end(connection, &cause);
            self.leave_if_last(pulse);
        }
    }

    /// Removes a process from which nothing more comes.
    fn end(&mut self, connection: ConnectionId, cause: &str) {
        if let Some(live) = self.live.remove(&connection) {
            let loss = Verdict::of_loss(&self.roster, live.process, cause.to_owned());
            self.outputs.push(Output::Close(connection));
            self.notify(Event::Lost { ranks: loss.ranks.clone(), error: loss.error() });
        }
    }

    /// Handles a process's report that it or another process has failed.
    fn fail(&mut self, reporter: usize, failure: Failure, pulse: &Pulse) {
        let process = failure.rank.and_then(|rank| self.roster.process_of(rank)).unwrap_or(reporter);
        let can_report = process == 0 || self.live.values().any(|live| live.process == process);
        let verdict = Verdict::new(&self.roster, process, failure);
        if process == reporter || !can_report {
            self.decide(verdict, pulse);
        } else {
            self.blame.get_or_insert((pulse.now(), verdict));
        }
    }

    /// Records and sends a verdict, if it is the first.
    fn decide(&mut self, verdict: Verdict, pulse: &Pulse) {
        if self.verdict.is_none() {
            self.send_all(Message::Verdict(verdict.clone()));
            self.notify(Event::Verdict(verdict.clone()));
            self.verdict = Some((pulse.now(), verdict));
        }
    }

    fn send(&mut self, to: Vec<ConnectionId>, message: Message) {
        self.outputs.push(Output::Send(to, Frame { generation: self.roster.generation, message }));
    }

    fn send_all(&mut self, message: Message) {
        self.send(self.connections().collect(), message);
    }

    fn notify(&mut self, event: Event) {
        if !self.has_left {
            self.outputs.push(Output::Event(event));
        }
    }

    pub(super) fn tick(&mut self, pulse: &Pulse) {
        let silent = self.live.iter().filter(|(_, live)| pulse.is_dead(live.last_heard));
        let silent: Vec<ConnectionId> = silent.map(|(connection, _)| *connection).collect();
        silent.into_iter().for_each(|connection| self.lose(connection, pulse.silence(), pulse));
        if let Some((_, verdict)) =
            self.blame.take_if(|(since, _)| pulse.is_past(*since, pulse.blame_delay()))
        {
            self.decide(verdict, pulse);
        }
        if let Some((since, verdict)) = &self.verdict
            && !self.is_over
            && pulse.is_past(*since, GRACE)
        {
            self.is_over = true;
            let (ranks, error) = (0..self.roster.world(), verdict.error());
            self.notify(Event::Lost { ranks, error });
        }
        self.leave_if_last(pulse);
    }

    pub(super) fn request(&mut self, request: Request, pulse: &Pulse) {
        match request {
            Request::Give { .. } => unreachable!("the leader stores its values itself"),
            Request::Announce { topic, value } => self.send_all(Message::Announce { topic, value }),
            Request::Calling { call } => self.send_all(Message::Calling { call }),
            Request::Fail(failure) => self.fail(0, failure, pulse),
            Request::Leave => {
                self.leaving.get_or_insert(pulse.now());
            }
        }
        self.leave_if_last(pulse);
    }

    /// Leaves when all others have left, or when their time is up.
    fn leave_if_last(&mut self, pulse: &Pulse) {
        let Some(leaving) = self.leaving.filter(|_| !self.has_left) else {
            return;
        };
        let is_late = match &self.verdict {
            Some((decided, _)) => pulse.is_past(leaving.max(*decided), GRACE),
            None => pulse.is_past(leaving, LEAVE_MAX),
        };
        if self.live.is_empty() || is_late {
            self.send_all(Message::Goodbye);
            self.notify(Event::Left);
            self.has_left = true;
        }
    }
}
