//! Decides which nodes take part in an attempt, what follows when it ends, and when the launch is over.
//!
//! A state machine without I/O: it receives events and the time, and returns actions. Nodes may come and go at any
//! time. An attempt uses as many of the present nodes as [`Rules::size`] allows; the others are spares. It ends on all
//! of its nodes before the next one starts.

use std::collections::BTreeMap;
use std::time::Duration;

use super::message::{Known, Message, NodeFacts, Order, exit_of};
use crate::exit_code::Exit;

/// How long to wait for nodes while there are too few.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// The longest pause before a restart, in seconds: a failed part may need time to recover.
const PAUSE_MAX: u32 = 30;

/// The connection of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(pub(super) u64);

impl NodeId {
    /// The node of the coordinator itself.
    pub(super) const LOCAL: NodeId = NodeId(0);
}

/// The settings of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Minimum number of nodes.
    pub(super) min: usize,
    /// Maximum number of nodes.
    pub(super) max: usize,
    /// Maximum number of failures after which processes are restarted.
    pub(super) max_restarts: u32,
    /// How long to wait for missing nodes once there are enough.
    pub(super) wait: Duration,
}

impl Rules {
    /// How many of `present` nodes take part: all that were requested, or a power of two, which keeps results
    /// bit-identical; `None` if there are too few.
    pub(super) fn size(&self, present: usize) -> Option<usize> {
        let usable = present.min(self.max);
        let size = if self.min == self.max { usable } else { (usable + 1).next_power_of_two() / 2 };
        (size >= self.min && size > 0).then_some(size)
    }
}

/// An event of a launch.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A node sent a message.
    Received(NodeId, Message),
    /// A node's connection is closed, or it was silent for too long.
    Lost(NodeId),
    /// Time has passed.
    Tick,
}

/// An action to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Send an order to a node.
    Send(NodeId, Order),
    /// Start an attempt on these nodes, in this order.
    Start {
        /// Number of the attempt.
        attempt: u32,
        /// The participating nodes.
        nodes: Vec<NodeId>,
        /// Whether the output folder already belongs to this run, so that the run continues.
        is_taken_over: bool,
    },
    /// Print a message to the user.
    Note(String),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Coordinator {
    rules: Rules,
    nodes: BTreeMap<NodeId, Node>,
    phase: Phase,
    known: Known,
    /// Whether the launch was asked to stop.
    is_stopping: bool,
}

#[derive(Debug)]
struct Node {
    facts: NodeFacts,
    is_leaving: bool,
}

#[derive(Debug)]
enum Phase {
    /// Waiting for nodes; `enough` is the time since when there are enough.
    Gathering {
        since: Duration,
        pause: Duration,
        enough: Option<Duration>,
    },
    Running(Running),
    Over,
}

/// An attempt in progress.
#[derive(Debug)]
struct Running {
    attempt: u32,
    /// Its nodes, and how their parts ended.
    nodes: BTreeMap<NodeId, Option<Exit>>,
    first: NodeId,
    /// The first failure.
    because: Option<String>,
    /// The stop order that was sent, if any: then the end of the processes is not a failure.
    stop_order: Option<Order>,
    was_killed: bool,
    is_elsewhere: bool,
}

/// How a node's part of an attempt ended.
struct End {
    exit: Exit,
    because: Option<String>,
    was_killed: bool,
    is_notified: bool,
    is_elsewhere: bool,
}

/// What follows an attempt.
enum Next {
    /// The launch is over; with the reason to print, if any.
    Finish(Option<String>),
    /// Another attempt, after a pause in seconds.
    Again { pause: u32 },
}

impl Coordinator {
    /// Begins a launch.
    pub(super) fn new(rules: Rules, now: Duration) -> Self {
        Self {
            rules,
            nodes: BTreeMap::new(),
            phase: Phase::Gathering { since: now, pause: Duration::ZERO, enough: None },
            known: Known::default(),
            is_stopping: false,
        }
    }

    /// The state that a successor needs.
    pub(super) fn known(&self) -> Known {
        self.known
    }

    /// A node's facts.
    ///
    /// # Panics
    /// If the node is not present.
    pub(super) fn node(&self, id: NodeId) -> &NodeFacts {
        &self.nodes[&id].facts
    }

    /// Ends the launch because its next attempt cannot be started.
    pub(super) fn abandon(&mut self, exit: Exit, because: String) -> Vec<Action> {
        let mut actions = Vec::new();
        self.finish(exit, Some(because), &mut actions);
        actions
    }

    /// Whether the launch is over and all nodes have been told.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// When the next [`Event::Tick`] is due, if nothing else happens.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let Phase::Gathering { since, pause, enough } = self.phase else { return None };
        match self.rules.size(self.nodes.len()) {
            Some(size) if Some(size) == self.rules.size(self.rules.max) => Some(since + pause),
            Some(_) => Some((since + pause).max(enough.unwrap_or(since) + self.rules.wait)),
            None => Some(since + PATIENCE),
        }
    }

    /// Handles an event; returns the actions that follow.
    pub(super) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Received(id, Message::Join(facts)) => self.join(id, facts, &mut actions),
            Event::Received(id, Message::Leave) => self.leave(id, &mut actions),
            Event::Received(_, Message::TakenOver) => self.known.is_taken_over = true,
            Event::Received(
                id,
                Message::Ended { attempt, code, because, was_killed, is_notified, is_elsewhere, port },
            ) => {
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.facts.port = port;
                }
                let end = End { exit: exit_of(code), because, was_killed, is_notified, is_elsewhere };
                self.ended(id, Some(attempt), end, &mut actions);
            }
            Event::Lost(id) => self.lost(id, &mut actions),
            Event::Received(_, Message::Pulse) | Event::Tick => {}
        }
        self.conclude(now, &mut actions);
        self.gathered(now, &mut actions);
        actions
    }

    fn join(&mut self, id: NodeId, facts: NodeFacts, actions: &mut Vec<Action>) {
        let nproc = self.nodes.values().next().map_or(facts.nproc, |node| node.facts.nproc);
        if self.is_over() || facts.nproc != nproc {
            let mismatch = format!(
                "node {} has --nproc {}, but the others have {nproc}: give all nodes the same",
                facts.host, facts.nproc
            );
            let (code, because) = match self.is_over() {
                true => (Exit::Temporary.code(), "the launch is over".to_owned()),
                false => (Exit::Input.code(), mismatch),
            };
            actions.push(Action::Send(id, Order::Finish { code, because: Some(because) }));
            return;
        }
        self.known.attempts = self.known.attempts.max(facts.known.attempts);
        self.known.restarts = self.known.restarts.max(facts.known.restarts);
        self.known.is_taken_over |= facts.known.is_taken_over;
        if self.rules.max > 1 {
            let present = self.nodes.len() + 1;
            let min = self.rules.min;
            let waits = if present < min {
                format!("; waiting for {min}, however long it takes")
            } else {
                String::new()
            };
            let note = format!("node {} has joined: {present} of {}{waits}", facts.host, self.rules.max);
            actions.push(Action::Note(note));
        }
        self.nodes.insert(id, Node { facts, is_leaving: false });
        let present = self.nodes.values().filter(|node| !node.is_leaving).count();
        let size = self.rules.size(present);
        if let Phase::Running(running) = &mut self.phase
            && running.stop_order.is_none()
            && size > Some(running.nodes.len())
        {
            running.stop_order = Some(Order::StopAtSave);
            actions.push(Action::Send(running.first, Order::StopAtSave));
        }
    }

    fn leave(&mut self, id: NodeId, actions: &mut Vec<Action>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.is_leaving = true;
        // The launch ends with the coordinator's own node, and, if the number of nodes is fixed, with any of them.
        self.is_stopping |= id == NodeId::LOCAL || self.rules.min == self.rules.max;
        if let Phase::Running(running) = &mut self.phase
            && (self.is_stopping || running.nodes.contains_key(&id))
            && running.stop_order != Some(Order::Stop)
        {
            running.stop_order = Some(Order::Stop);
            actions.extend(running.nodes.keys().map(|&id| Action::Send(id, Order::Stop)));
        }
        self.dismiss(actions);
    }

    /// Releases nodes that want to leave and are not taking part in an attempt.
    fn dismiss(&mut self, actions: &mut Vec<Action>) {
        if self.is_stopping {
            return;
        }
        let is_busy =
            |id: &NodeId| matches!(&self.phase, Phase::Running(running) if running.nodes.contains_key(id));
        let free: Vec<NodeId> = self
            .nodes
            .iter()
            .filter(|(id, node)| node.is_leaving && !is_busy(id))
            .map(|(&id, _)| id)
            .collect();
        for id in free {
            self.nodes.remove(&id);
            actions.push(Action::Send(id, Order::Finish { code: Exit::Temporary.code(), because: None }));
        }
    }

    fn lost(&mut self, id: NodeId, actions: &mut Vec<Action>) {
        let Some(node) = self.nodes.remove(&id) else { return };
        let because = format!("node {} is lost", node.facts.host);
        let end = End {
            exit: Exit::Temporary,
            because: Some(because),
            was_killed: true,
            is_notified: false,
            is_elsewhere: false,
        };
        self.ended(id, None, end, actions);
    }

    /// Handles the end of a node's part in an attempt; `attempt` is `None` if the node is lost, whichever attempt it
    /// was in.
    fn ended(
        &mut self,
        id: NodeId,
        attempt: Option<u32>,
        End { exit, because, was_killed, is_notified, is_elsewhere }: End,
        actions: &mut Vec<Action>,
    ) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(end) = running.nodes.get_mut(&id) else { return };
        if end.is_some() || attempt.is_some_and(|attempt| attempt != running.attempt) {
            return;
        }
        *end = Some(exit);
        running.is_elsewhere |= is_elsewhere;
        running.was_killed |= was_killed;
        if exit != Exit::Done && running.because.is_none() && because.is_some() {
            running.because = because;
            let others = running.nodes.iter().filter(|(_, end)| end.is_none());
            actions.extend(others.map(|(&id, _)| Action::Send(id, Order::End { is_notified })));
        }
    }

    /// Decides what follows once an attempt has ended on all of its nodes.
    fn conclude(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let Phase::Running(running) = &self.phase else {
            if self.is_stopping && !self.is_over() {
                self.finish(Exit::Temporary, None, actions);
            }
            return;
        };
        let Some(ends) = running.nodes.values().copied().collect::<Option<Vec<Exit>>>() else { return };
        let exit = worst(ends);
        let because = running.because.clone().unwrap_or_else(|| "the processes have ended".to_owned());
        let is_stop_requested = running.stop_order.is_some() && !running.was_killed;
        let is_elsewhere = running.is_elsewhere;
        let left = self.rules.max_restarts.saturating_sub(self.known.restarts);
        let next = match exit {
            Exit::Temporary if self.is_stopping => Next::Finish(None),
            Exit::Temporary if is_elsewhere => {
                let why = "its state is not in run.out_dir, so it is not started again";
                Next::Finish(Some(format!("{because}; {why}")))
            }
            Exit::Temporary if is_stop_requested => Next::Again { pause: 0 },
            Exit::Temporary if left == 0 => {
                let max = self.rules.max_restarts;
                Next::Finish(Some(format!("{because}; no restarts are left (--max-restarts {max})")))
            }
            Exit::Temporary => {
                let note = format!("{because}; restarting all processes (at most {left} more times)");
                actions.push(Action::Note(note));
                self.known.restarts += 1;
                Next::Again { pause: (self.known.restarts - 1).min(PAUSE_MAX) }
            }
            _ => Next::Finish(None),
        };
        match next {
            Next::Finish(why) => self.finish(exit, why, actions),
            Next::Again { pause } => {
                let pause = Duration::from_secs(pause.into());
                self.phase = Phase::Gathering { since: now, pause, enough: None };
                self.dismiss(actions);
            }
        }
    }

    /// Starts an attempt if there are enough nodes, or gives up if they do not come.
    fn gathered(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let is_enough = self.rules.size(self.nodes.len()).is_some();
        let Phase::Gathering { since, enough, .. } = &mut self.phase else { return };
        let since = *since;
        *enough = if is_enough { enough.or(Some(now)) } else { None };
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let (present, Rules { min, .. }) = (self.nodes.len(), self.rules);
        let Some(size) = self.rules.size(present) else {
            let waited = (now - since).as_secs();
            let why = format!("{present} of at least {min} nodes have joined after {waited} s");
            return self.finish(Exit::Temporary, Some(why), actions);
        };
        let mut order: Vec<(Option<usize>, NodeId)> =
            self.nodes.iter().map(|(&id, node)| (node.facts.number, id)).collect();
        // Nodes without a number come last, in order of arrival.
        order.sort_by_key(|&(number, id)| (number.is_none(), number, id));
        let nodes: Vec<NodeId> = order.into_iter().take(size).map(|(_, id)| id).collect();
        if self.rules.max > 1 {
            let spares = present - size;
            let spares = if spares > 0 { format!(", {spares} spare") } else { String::new() };
            actions.push(Action::Note(format!(
                "attempt {}: {size} of {} nodes{spares}",
                self.known.attempts, self.rules.max
            )));
        }
        let attempt = self.known.attempts;
        self.known.attempts += 1;
        self.phase = Phase::Running(Running {
            attempt,
            first: nodes[0],
            nodes: nodes.iter().map(|&id| (id, None)).collect(),
            because: None,
            stop_order: None,
            was_killed: false,
            is_elsewhere: false,
        });
        actions.push(Action::Start { attempt, nodes, is_taken_over: self.known.is_taken_over });
    }

    fn finish(&mut self, exit: Exit, because: Option<String>, actions: &mut Vec<Action>) {
        self.phase = Phase::Over;
        let finish =
            |&id: &NodeId| Action::Send(id, Order::Finish { code: exit.code(), because: because.clone() });
        actions.extend(self.nodes.keys().map(finish));
    }
}

/// The joint exit of all processes: permanent failures take precedence over temporary ones.
pub(super) fn worst(exits: impl IntoIterator<Item = Exit>) -> Exit {
    const ORDER: [Exit; 6] =
        [Exit::Input, Exit::Failed, Exit::Interrupted, Exit::Temporary, Exit::Found, Exit::Done];
    let place = |exit: &Exit| ORDER.iter().position(|other| other == exit);
    exits.into_iter().min_by_key(place).unwrap_or(Exit::Done)
}

#[cfg(test)]
mod tests;
