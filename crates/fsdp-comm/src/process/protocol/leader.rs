//! The process of rank 0: admits the others, begins the world in two phases, and hands it to [`World`].

mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use super::{ConnectionId, Event, Machine, Output, Pulse, Request};
use crate::process::frame::Frame;
use crate::process::message::{Join, Message, Refusal};
use crate::process::world::{ProcessEntry, Roster};

use world::World;

/// See the [module](self).
pub(in crate::process) struct Leader {
    local_join: Join,
    generation: u64,
    pulse: Pulse,
    joiners: BTreeMap<ConnectionId, Joiner>,
    /// Number of rosters sent.
    round: u32,
    /// The roster sent in this round; `None` while processes are missing.
    prepared: Option<Roster>,
    world: Option<World>,
    outputs: Vec<Output>,
}

/// A connection that is not part of a world yet.
struct Joiner {
    last_heard: Duration,
    join: Option<Join>,
    /// The last round for which it has reported ready.
    ready: Option<u32>,
}

impl Leader {
    /// Creates a leader that waits for `local_join.processes - 1` others.
    pub(in crate::process) fn new(local_join: Join, generation: u64, pulse: Pulse) -> Self {
        assert_eq!(local_join.process, 0, "the leader is process 0");
        assert_ne!(generation, 0, "0 is the generation of who knows none");
        let mut leader = Leader {
            local_join,
            generation,
            pulse,
            joiners: BTreeMap::new(),
            round: 0,
            prepared: None,
            world: None,
            outputs: Vec::new(),
        };
        leader.prepare_if_complete();
        leader
    }

    /// The indices with which no process has joined.
    pub(in crate::process) fn missing(&self) -> Vec<usize> {
        let has_joined = |process: &usize| self.joined().any(|(_, join)| join.process == *process);
        (1..self.local_join.processes).filter(|process| !has_joined(process)).collect()
    }

    fn joined(&self) -> impl Iterator<Item = (ConnectionId, &Join)> {
        self.joiners.iter().filter_map(|(connection, joiner)| Some((*connection, joiner.join.as_ref()?)))
    }

    fn send(&mut self, to: Vec<ConnectionId>, message: Message) {
        self.outputs.push(Output::Send(to, Frame { generation: self.generation, message }));
    }

    fn join(&mut self, connection: ConnectionId, join: Join) {
        if let Err(refusal) = self.check_join(&join) {
            self.send(vec![connection], Message::Refused(refusal));
            return self.drop(connection);
        }
        // The same process again; it must have lost its former connection.
        let former = self.joined().find(|(_, other)| other.process == join.process).map(|(former, _)| former);
        former.into_iter().for_each(|former| self.drop(former));
        self.joiners.entry(connection).and_modify(|joiner| joiner.join = Some(join));
        self.send(vec![connection], Message::Joined);
        self.prepare_if_complete();
    }

    /// Whether a process may join.
    fn check_join(&self, join: &Join) -> Result<(), Refusal> {
        let Join { version, processes, .. } = &self.local_join;
        if join.version != *version {
            return Err(Refusal::Version { expected: version.clone(), got: join.version.clone() });
        }
        if join.processes != *processes {
            return Err(Refusal::Processes { expected: *processes, got: join.processes });
        }
        if join.process >= *processes {
            return Err(Refusal::Index { process: join.process, processes: *processes });
        }
        if self.world.is_some() {
            return Err(Refusal::Started);
        }
        let others = self.joined().map(|(_, other)| other).chain([&self.local_join]);
        let mut holders = others.filter(|other| other.process == join.process && other.nonce != join.nonce);
        holders.next().map_or(Ok(()), |other| {
            let (host, pid) = (other.facts.host.clone(), other.facts.pid);
            Err(Refusal::Duplicate { process: join.process, host, pid })
        })
    }

    /// Closes a connection, or forgets one that has ended.
    fn drop(&mut self, connection: ConnectionId) {
        self.outputs.push(Output::Close(connection));
        if self.joiners.remove(&connection).is_some_and(|joiner| joiner.join.is_some()) {
            // Those that are ready were ready for a world with that process.
            self.prepared = None;
        }
    }

    /// Starts the first phase of *go* if all processes have joined.
    fn prepare_if_complete(&mut self) {
        let is_complete = self.joined().count() + 1 == self.local_join.processes;
        if !is_complete || self.prepared.is_some() || self.world.is_some() {
            return;
        }
        self.round += 1;
        let roster = self.roster();
        self.prepared = Some(roster.clone());
        let joined = self.joined().map(|(connection, _)| connection).collect();
        self.send(joined, Message::Prepare { round: self.round, roster });
        self.go_if_ready();
    }

    fn roster(&self) -> Roster {
        let mut joins: Vec<&Join> = self.joined().map(|(_, join)| join).chain([&self.local_join]).collect();
        joins.sort_by_key(|join| join.process);
        let mut end = 0;
        let entry = |join: &Join| {
            let ranks = end..end + join.local_ranks;
            end = ranks.end;
            ProcessEntry { ranks, facts: join.facts.clone() }
        };
        Roster { generation: self.generation, processes: joins.into_iter().map(entry).collect() }
    }

    /// Second phase: begins the world if all processes have the roster and none was lost since.
    fn go_if_ready(&mut self) {
        let round = self.round;
        let is_ready = |joiner: &Joiner| joiner.join.is_none() || joiner.ready == Some(round);
        if !self.joiners.values().all(is_ready) {
            return;
        }
        let Some(roster) = self.prepared.take() else {
            return;
        };
        let processes: Vec<_> = self.joined().map(|(connection, join)| (connection, join.process)).collect();
        self.send(processes.iter().map(|(connection, _)| *connection).collect(), Message::Go { round });
        self.outputs.push(Output::Event(Event::Go(roster.clone())));
        let mut world = World::new(roster);
        for (connection, process) in processes {
            let joiner = self.joiners.remove(&connection).expect("it has joined");
            world.add(connection, process, joiner.last_heard);
        }
        self.world = Some(world);
    }
}

impl Machine for Leader {
    fn opened(&mut self, connection: ConnectionId) {
        self.joiners.insert(connection, Joiner { last_heard: self.pulse.now(), join: None, ready: None });
    }

    fn received(&mut self, connection: ConnectionId, frame: Frame) {
        if let Some(world) = self.world.as_mut().filter(|world| world.is_live(connection)) {
            return world.received(connection, frame, &self.pulse);
        }
        let Some(joiner) = self.joiners.get_mut(&connection) else {
            return;
        };
        joiner.last_heard = self.pulse.now();
        let is_ours = frame.generation == self.generation;
        match (frame.message, &joiner.join) {
            (Message::Join(join), None) => self.join(connection, join),
            (Message::Heartbeat, Some(_)) if is_ours => {}
            (Message::Ready { round }, Some(_)) if is_ours => {
                joiner.ready = Some(round);
                self.go_if_ready();
            }
            _ => self.drop(connection),
        }
    }

    fn closed(&mut self, connection: ConnectionId, reason: &str) {
        if let Some(world) = &mut self.world {
            world.lose(connection, reason.to_owned(), &self.pulse);
        }
        if self.joiners.contains_key(&connection) {
            self.drop(connection);
        }
    }

    fn tick(&mut self, passed: Duration) {
        let is_due = self.pulse.tick(passed);
        let silent = self.joiners.iter().filter(|(_, joiner)| self.pulse.is_dead(joiner.last_heard));
        let silent: Vec<ConnectionId> = silent.map(|(connection, _)| *connection).collect();
        silent.into_iter().for_each(|connection| self.drop(connection));
        if is_due {
            let joined = self.joined().map(|(connection, _)| connection);
            let live = self.world.iter().flat_map(World::connections);
            let to = joined.chain(live).collect();
            self.send(to, Message::Heartbeat);
        }
        if let Some(world) = &mut self.world {
            world.tick(&self.pulse);
        }
    }

    fn request(&mut self, request: Request) {
        let world = self.world.as_mut().expect("ranks run when the world has begun");
        world.request(request, &self.pulse);
    }

    fn take(&mut self) -> Vec<Output> {
        let mut outputs = std::mem::take(&mut self.outputs);
        outputs.extend(self.world.iter_mut().flat_map(World::take));
        outputs
    }
}
