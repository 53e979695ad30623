//! A process that does not hold rank 0.

use std::time::Duration;

use super::{ConnectionId, Event, GRACE, Machine, Output, Pulse, Request};
use crate::process::frame::Frame;
use crate::process::message::{Join, Message};
use crate::process::world::{Roster, Verdict};

/// See the [module](self).
pub(in crate::process) struct Member {
    local_join: Join,
    pulse: Pulse,
    /// The connection to the leader, if any.
    leader: Option<LeaderConnection>,
    world: Option<World>,
    outputs: Vec<Output>,
}

struct LeaderConnection {
    id: ConnectionId,
    last_heard: Duration,
    /// The generation in the leader's first message.
    generation: Option<u64>,
    /// The last collective that the leader has reported.
    last_call: Option<String>,
    /// The roster of the last round.
    prepared: Option<(u32, Roster)>,
}

/// A world that has begun.
struct World {
    roster: Roster,
    /// The verdict, with the time at which it arrived or was reached.
    verdict: Option<(Duration, Verdict)>,
    /// Whether the grace period after the verdict is over.
    is_over: bool,
}

impl Member {
    /// Creates a process that will join.
    pub(in crate::process) fn new(local_join: Join, pulse: Pulse) -> Self {
        assert_ne!(local_join.process, 0, "process 0 is the leader");
        Member { local_join, pulse, leader: None, world: None, outputs: Vec::new() }
    }

    fn notify(&mut self, event: Event) {
        self.outputs.push(Output::Event(event));
    }

    fn send(&mut self, message: Message) {
        if let Some(leader) = &self.leader {
            let frame = Frame { generation: leader.generation.unwrap_or(0), message };
            self.outputs.push(Output::Send(vec![leader.id], frame));
        }
    }

    /// Handles the loss of the leader, or gives up its connection.
    fn lose(&mut self, cause: String) {
        let leader = self.leader.take();
        self.outputs.extend(leader.iter().map(|leader| Output::Close(leader.id)));
        match &self.world {
            None => self.notify(Event::Dropped { reason: cause }),
            Some(world) => {
                let mut verdict = Verdict::of_loss(&world.roster, 0, cause);
                verdict.failure.last_call = leader.and_then(|leader| leader.last_call);
                self.lose_leader(&verdict);
                self.decide(verdict);
            }
        }
    }

    /// Marks the leader's ranks as lost. No announcements can follow: those of other members pass through the leader.
    fn lose_leader(&mut self, loss: &Verdict) {
        self.notify(Event::Lost { ranks: loss.ranks.clone(), error: loss.error() });
    }

    /// Records a verdict, if it is the first.
    fn decide(&mut self, verdict: Verdict) {
        let world = self.world.as_mut().expect("only a world that has begun can fail");
        if world.verdict.is_none() {
            world.verdict = Some((self.pulse.now(), verdict.clone()));
            self.notify(Event::Verdict(verdict));
        }
    }

    /// Handles a message before the world has begun.
    fn join(&mut self, message: Message) {
        let Some(leader) = &mut self.leader else {
            return;
        };
        match message {
            Message::Joined | Message::Heartbeat => {}
            Message::Refused(refusal) => {
                self.outputs.extend(self.leader.take().map(|leader| Output::Close(leader.id)));
                self.notify(Event::Refused(refusal));
            }
            Message::Prepare { round, roster } => {
                leader.prepared = Some((round, roster));
                self.send(Message::Ready { round });
            }
            Message::Go { round } => match leader.prepared.take() {
                Some((prepared, roster)) if prepared == round => {
                    self.world = Some(World { roster: roster.clone(), verdict: None, is_over: false });
                    self.notify(Event::Go(roster));
                }
                _ => self.lose(format!("it began round {round} without preparing it")),
            },
            other => self.lose(unexpected(&other)),
        }
    }

    /// Handles a message after the world has begun.
    fn run(&mut self, message: Message) {
        match message {
            Message::Heartbeat => {}
            Message::Announce { topic, value } => self.notify(Event::Announced { topic, value }),
            Message::Verdict(verdict) => self.decide(verdict),
            Message::Calling { call } => {
                if let Some(leader) = &mut self.leader {
                    leader.last_call = Some(call);
                }
            }
            Message::Goodbye => {
                self.outputs.extend(self.leader.take().map(|leader| Output::Close(leader.id)));
                if let Some(world) = &self.world {
                    let loss = Verdict::of_loss(&world.roster, 0, "it has left".to_owned());
                    self.lose_leader(&loss);
                }
            }
            other => self.lose(unexpected(&other)),
        }
    }
}

fn unexpected(message: &Message) -> String {
    format!("it sent an unexpected message ({message:?})")
}

impl Machine for Member {
    fn opened(&mut self, connection: ConnectionId) {
        let last_heard = self.pulse.now();
        self.leader = Some(LeaderConnection {
            id: connection,
            last_heard,
            generation: None,
            last_call: None,
            prepared: None,
        });
        self.send(Message::Join(self.local_join.clone()));
    }

    fn received(&mut self, connection: ConnectionId, frame: Frame) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.id == connection) else {
            return;
        };
        leader.last_heard = self.pulse.now();
        let expected = *leader.generation.get_or_insert(frame.generation);
        if expected != frame.generation {
            return self.lose(format!("it belongs to world {:016x}, not {expected:016x}", frame.generation));
        }
        if self.world.is_none() { self.join(frame.message) } else { self.run(frame.message) }
    }

    fn closed(&mut self, connection: ConnectionId, reason: &str) {
        if self.leader.as_ref().is_some_and(|leader| leader.id == connection) {
            self.lose(reason.to_owned());
        }
    }

    fn tick(&mut self, passed: Duration) {
        let is_due = self.pulse.tick(passed);
        if self.leader.as_ref().is_some_and(|leader| self.pulse.is_dead(leader.last_heard)) {
            self.lose(self.pulse.silence());
        }
        if is_due && self.leader.as_ref().is_some_and(|leader| leader.generation.is_some()) {
            self.send(Message::Heartbeat);
        }
        if let Some(world) = &mut self.world
            && let Some((since, verdict)) = &world.verdict
            && !world.is_over
            && self.pulse.is_past(*since, GRACE)
        {
            world.is_over = true;
            let (ranks, error) = (0..world.roster.world(), verdict.error());
            self.notify(Event::Lost { ranks, error });
        }
    }

    fn request(&mut self, request: Request) {
        let world = self.world.as_ref().expect("ranks run when the world has begun");
        match request {
            Request::Give { topic, rank, value } => self.send(Message::Give { topic, rank, value }),
            Request::Announce { topic, value } => self.send(Message::Announce { topic, value }),
            Request::Calling { call } => self.send(Message::Calling { call }),
            Request::Fail(failure) if self.leader.is_some() => self.send(Message::Failed(failure)),
            Request::Fail(failure) => {
                let process = failure.rank.and_then(|rank| world.roster.process_of(rank));
                let verdict =
                    Verdict::new(&world.roster, process.unwrap_or(self.local_join.process), failure);
                self.decide(verdict);
            }
            Request::Leave => {
                self.send(Message::Goodbye);
                self.leader = None;
                self.notify(Event::Left);
            }
        }
    }

    fn take(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }
}
