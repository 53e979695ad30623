//! Simulates processes in virtual time, over connections with delays and losses.
//!
//! A connection delivers in order; each has its own delays. Everything is a function of the seed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use super::super::*;
use super::check::own_topic;
use super::faults::{Fault, Random};
use crate::process::frame::Frame;
use crate::process::message::{Join, Message, Refusal};
use crate::process::world::{Facts, Failure, Roster, Verdict};

pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(15);
pub(super) const TICK: Duration = Duration::from_millis(500);
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

fn announcement(topic: String) -> Request {
    Request::Announce { topic, value: Vec::new() }
}

#[derive(Debug)]
enum What {
    Start(usize),
    Connect(usize),
    Arrive { node: usize, connection: ConnectionId, item: Item },
    Tick(usize),
    Resume(usize),
    Request { node: usize, request: Request },
    Fault { process: usize, fault: Fault },
}

#[derive(Debug)]
enum Item {
    Opened,
    Frame(Frame),
    Closed,
}

/// A connection, and which nodes hold its ends while it is open.
struct Wire {
    member: usize,
    is_open: [bool; 2],
    /// Whether the wire is cut: nothing sent over it arrives.
    is_cut: bool,
    /// When the last item sent in each direction arrives.
    last: [Duration; 2],
}

const LEADER_END: usize = 0;
const MEMBER_END: usize = 1;

pub(super) struct Node {
    pub(super) process: usize,
    /// `None` before the start and after the end of the process.
    machine: Option<Box<dyn Machine>>,
    pub(super) born: Duration,
    pub(super) died: Option<Duration>,
    stopped: bool,
    /// Events that arrived while it was stopped.
    held: VecDeque<What>,
    /// When it gives up joining.
    give_up: Duration,
    pub(super) go: Option<Roster>,
    pub(super) verdicts: Vec<(Duration, Verdict)>,
    /// The ranks whose values it has received or given itself, with times.
    pub(super) given: BTreeMap<usize, Duration>,
    pub(super) announced: BTreeSet<String>,
    pub(super) lost: BTreeSet<usize>,
    pub(super) has_left: bool,
    /// Whether a fault has cut it off or ended it.
    pub(super) is_cut_off: bool,
    /// Whether a fault may have swallowed messages that it sent.
    pub(super) is_unheard: bool,
    pub(super) wants_to_leave: bool,
}

pub(super) struct Sim {
    pub(super) random: Random,
    pub(super) now: Duration,
    queue: BTreeMap<(Duration, usize), What>,
    queued: usize,
    pub(super) handled: usize,
    /// Kills a process before a given event.
    pub(super) kill_at: Option<(usize, usize, Fault)>,
    pub(super) nodes: Vec<Node>,
    wires: Vec<Wire>,
    pub(super) processes: usize,
    local_ranks: Vec<usize>,
    delay_max: u64,
    /// Times of the faults that end a world.
    pub(super) faults: Vec<Duration>,
    /// The faults of processes that were part of a world at that time.
    pub(super) deaths: Vec<(Duration, usize, Fault)>,
    /// The processes that may be blamed for them.
    pub(super) faulty: BTreeSet<usize>,
    pub(super) stopped_for: Duration,
    pub(super) last_prepare: Duration,
    pub(super) trace: bool,
}

impl Sim {
    pub(super) fn new(seed: u64, processes: usize, delay_max: u64, start_max: u64) -> Self {
        let mut random = Random(seed);
        let local_ranks = (0..processes).map(|_| 1 + random.below(3) as usize).collect();
        let mut sim = Sim {
            random,
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            queued: 0,
            handled: 0,
            kill_at: None,
            nodes: Vec::new(),
            wires: Vec::new(),
            processes,
            local_ranks,
            delay_max,
            faults: Vec::new(),
            deaths: Vec::new(),
            faulty: BTreeSet::new(),
            stopped_for: Duration::ZERO,
            last_prepare: Duration::ZERO,
            trace: false,
        };
        for process in 0..processes {
            let start = sim.random.time(0, start_max);
            sim.add(process, start);
        }
        sim
    }

    fn at(&mut self, time: Duration, what: What) {
        self.queue.insert((time, self.queued), what);
        self.queued += 1;
    }

    fn after(&mut self, millis: (u64, u64), what: What) {
        let time = self.now + self.random.time(millis.0, millis.1);
        self.at(time, what);
    }

    /// Adds a process that starts at `start`.
    fn add(&mut self, process: usize, start: Duration) {
        let node = self.nodes.len();
        self.nodes.push(Node {
            process,
            machine: None,
            born: start,
            died: None,
            stopped: false,
            held: VecDeque::new(),
            give_up: start + JOIN_TIMEOUT,
            go: None,
            verdicts: Vec::new(),
            given: BTreeMap::new(),
            announced: BTreeSet::new(),
            lost: BTreeSet::new(),
            has_left: false,
            is_cut_off: false,
            is_unheard: false,
            wants_to_leave: false,
        });
        self.at(start, What::Start(node));
    }

    pub(super) fn plan(&mut self, time: Duration, process: usize, fault: Fault) {
        self.at(time, What::Fault { process, fault });
    }

    /// The node of the latest process with an index.
    fn node_of(&self, process: usize) -> usize {
        self.nodes.iter().rposition(|node| node.process == process).expect("every process was started")
    }

    pub(super) fn ranks_of(&self, process: usize) -> Range<usize> {
        let start = self.local_ranks[..process].iter().sum();
        start..start + self.local_ranks[process]
    }

    pub(super) fn world(&self) -> usize {
        self.local_ranks.iter().sum()
    }

    /// Runs until every process has ended.
    pub(super) fn run(&mut self) {
        while self.nodes.iter().any(|node| node.died.is_none()) {
            let ((time, _), what) = self.queue.pop_first().expect("every process that runs has ticks");
            self.now = time;
            assert!(self.now < Duration::from_secs(600), "somebody waits for ever");
            if let Some((_, process, fault)) = self.kill_at.take_if(|(at, ..)| *at == self.handled) {
                self.fault(process, fault);
            }
            // Ticks are numerous and uneventful, so only other events are numbered.
            self.handled += usize::from(!matches!(what, What::Tick(_)));
            if self.trace && !matches!(what, What::Tick(_)) {
                println!("{:?} #{} {what:?}", self.now, self.handled);
            }
            self.handle(what);
        }
    }

    fn handle(&mut self, what: What) {
        match what {
            What::Start(node) => self.start(node),
            What::Connect(node) => self.connect(node),
            What::Arrive { node, connection, item } => self.arrive(node, connection, item),
            What::Tick(node) => self.tick(node),
            What::Resume(node) => {
                self.nodes[node].stopped = false;
                // Ticks last, as in the real driver.
                let mut held = std::mem::take(&mut self.nodes[node].held);
                held.make_contiguous().sort_by_key(|what| matches!(what, What::Tick(_)));
                held.into_iter().for_each(|what| self.handle(what));
            }
            What::Request { node, request } => self.request(node, request),
            What::Fault { process, fault } => self.fault(process, fault),
        }
    }

    fn start(&mut self, node: usize) {
        let process = self.nodes[node].process;
        let facts = Facts {
            host: format!("n{process}"),
            pid: u32::try_from(node).unwrap(),
            addresses: Vec::new(),
            cpu_model: String::new(),
            device: String::new(),
        };
        let local_ranks = self.local_ranks[process];
        let (nonce, processes) = (node as u64, self.processes);
        let join = Join { version: "1".into(), process, processes, local_ranks, nonce, facts };
        let pulse = Pulse::new(HEARTBEAT, DEAD_AFTER);
        let machine: Box<dyn Machine> = if process == 0 {
            Box::new(Leader::new(join, 1 + node as u64, pulse))
        } else {
            self.after((0, 10), What::Connect(node));
            Box::new(Member::new(join, pulse))
        };
        self.nodes[node].machine = Some(machine);
        self.after((1, 500), What::Tick(node));
        self.perform(node);
    }

    fn connect(&mut self, node: usize) {
        let leader = self.node_of(0);
        if self.nodes[node].died.is_some() {
            return;
        }
        if self.nodes[leader].machine.is_none() || self.nodes[node].stopped {
            return self.after((100, 1000), What::Connect(node));
        }
        let connection = ConnectionId(self.wires.len());
        self.wires.push(Wire { member: node, is_open: [true; 2], is_cut: false, last: [self.now; 2] });
        self.send(connection, LEADER_END, Item::Opened);
        self.arrive(node, connection, Item::Opened);
    }

    /// Sends an item to one end of a connection.
    fn send(&mut self, connection: ConnectionId, end: usize, item: Item) {
        let leader = self.node_of(0);
        let delay = self.random.time(1, self.delay_max + 1);
        let wire = &mut self.wires[connection.0];
        let node = if end == LEADER_END { leader } else { wire.member };
        let time = (self.now + delay).max(wire.last[end]);
        wire.last[end] = time;
        self.at(time, What::Arrive { node, connection, item });
    }

    fn arrive(&mut self, node: usize, connection: ConnectionId, item: Item) {
        let end = if self.nodes[node].process == 0 { LEADER_END } else { MEMBER_END };
        let wire = &mut self.wires[connection.0];
        if !wire.is_open[end] || wire.is_cut && !matches!(item, Item::Closed) {
            return;
        }
        let it = &mut self.nodes[node];
        if it.stopped {
            return it.held.push_back(What::Arrive { node, connection, item });
        }
        let Some(machine) = &mut it.machine else {
            return;
        };
        match item {
            Item::Opened => machine.opened(connection),
            Item::Frame(frame) => machine.received(connection, frame),
            Item::Closed => {
                wire.is_open[end] = false;
                machine.closed(connection, "its connection was closed");
            }
        }
        self.perform(node);
    }

    fn tick(&mut self, node: usize) {
        let passed = self.now - self.nodes[node].born;
        let it = &mut self.nodes[node];
        if it.stopped {
            return it.held.push_back(What::Tick(node));
        }
        let Some(machine) = &mut it.machine else {
            return;
        };
        machine.tick(passed);
        self.perform(node);
        if self.nodes[node].go.is_none() && self.now > self.nodes[node].give_up {
            // The *go* may already be in flight to all others.
            self.faulty.insert(self.nodes[node].process);
            return self.end(node, true);
        }
        self.at(self.now + TICK, What::Tick(node));
    }

    pub(super) fn request(&mut self, node: usize, request: Request) {
        let it = &mut self.nodes[node];
        if it.stopped {
            return it.held.push_back(What::Request { node, request });
        }
        let Some(machine) = it.machine.as_mut().filter(|_| it.go.is_some()) else {
            return;
        };
        match &request {
            Request::Give { rank, .. } => drop(it.given.insert(*rank, self.now)),
            Request::Announce { topic, .. } => drop(it.announced.insert(topic.clone())),
            _ => {}
        }
        // The leader does not need the request: it stores its values itself.
        if it.process != 0 || !matches!(request, Request::Give { .. }) {
            machine.request(request);
        }
        self.perform(node);
        self.go_on(node);
    }

    /// Performs the outputs of a machine.
    fn perform(&mut self, node: usize) {
        let outputs = self.nodes[node].machine.iter_mut().flat_map(|machine| machine.take());
        for output in outputs.collect::<Vec<_>>() {
            let process = self.nodes[node].process;
            let (own, other) = if process == 0 { (LEADER_END, MEMBER_END) } else { (MEMBER_END, LEADER_END) };
            match output {
                Output::Send(connections, frame) => {
                    if matches!(frame.message, Message::Prepare { .. }) {
                        self.last_prepare = self.now;
                    }
                    for connection in connections {
                        if self.wires[connection.0].is_open[own] {
                            self.send(connection, other, Item::Frame(frame.clone()));
                        }
                    }
                }
                Output::Close(connection) => {
                    let was_open = std::mem::take(&mut self.wires[connection.0].is_open[own]);
                    if was_open {
                        self.send(connection, other, Item::Closed);
                    }
                }
                Output::Event(event) => self.tell(node, event),
            }
        }
    }

    fn tell(&mut self, node: usize, event: Event) {
        let it = &mut self.nodes[node];
        if self.trace {
            println!("{:?}    process {} (node {node}): {event:?}", self.now, it.process);
        }
        assert!(!it.has_left, "who has left is told nothing");
        match event {
            Event::Refused(Refusal::Duplicate { .. } | Refusal::Started) | Event::Dropped { .. } => {
                self.after((100, 1000), What::Connect(node));
            }
            Event::Refused(refusal) => panic!("{refusal}"),
            Event::Go(roster) => {
                assert!(it.go.replace(roster).is_none(), "a world begins once");
                let process = self.nodes[node].process;
                // Before the values, so that a process that hears of the save has heard this.
                self.at(self.now, What::Request { node, request: announcement(own_topic(process)) });
                for rank in self.ranks_of(process) {
                    let request = Request::Give { topic: "save".into(), rank, value: vec![rank as u8] };
                    self.after((0, 5000), What::Request { node, request });
                }
            }
            Event::Gave { topic, rank, value } => {
                assert_eq!((topic.as_str(), value), ("save", vec![rank as u8]));
                it.given.insert(rank, self.now);
            }
            Event::Announced { topic, .. } => drop(it.announced.insert(topic)),
            Event::Verdict(verdict) => it.verdicts.push((self.now, verdict)),
            Event::Lost { ranks, .. } => it.lost.extend(ranks),
            Event::Left => it.has_left = true,
        }
        self.go_on(node);
    }

    /// Plays the ranks: all give, the leader announces after collecting, and a process leaves when it has heard the
    /// announcement, or when collecting or hearing has become impossible.
    fn go_on(&mut self, node: usize) {
        let world = self.world();
        let it = &mut self.nodes[node];
        if it.has_left {
            // An end after goodbye: everything sent arrives.
            return self.end(node, true);
        }
        if it.wants_to_leave || it.go.is_none() {
            return;
        }
        let is_done = if it.process == 0 {
            let missing: Vec<usize> = (0..world).filter(|rank| !it.given.contains_key(rank)).collect();
            if missing.is_empty() {
                self.at(self.now, What::Request { node, request: announcement("save".into()) });
            }
            missing.is_empty() || missing.iter().any(|rank| self.nodes[node].lost.contains(rank))
        } else {
            it.announced.contains("save") || it.lost.contains(&0)
        };
        if is_done {
            self.nodes[node].wants_to_leave = true;
            self.after((0, 2000), What::Request { node, request: Request::Leave });
        }
    }

    /// Ends a process; `closes` says whether its machine closes the connections.
    fn end(&mut self, node: usize, closes: bool) {
        let it = &mut self.nodes[node];
        it.machine = None;
        it.died.get_or_insert(self.now);
        let (own, other) = if it.process == 0 { (0, 1) } else { (1, 0) };
        for connection in 0..self.wires.len() {
            let wire = &mut self.wires[connection];
            let is_mine = own == LEADER_END || wire.member == node;
            if is_mine && std::mem::take(&mut wire.is_open[own]) && closes {
                self.send(ConnectionId(connection), other, Item::Closed);
            }
        }
    }

    pub(super) fn fault(&mut self, process: usize, fault: Fault) {
        let node = self.node_of(process);
        if self.nodes[node].died.is_some() || self.nodes[node].machine.is_none() {
            return;
        }
        let ends_a_world = !matches!(fault, Fault::Stop(time) if time < DEAD_AFTER / 3);
        if ends_a_world && fault != Fault::Duplicate {
            self.faults.push(self.now);
            self.faulty.insert(process);
            if self.nodes[node].go.is_some() && !self.nodes[node].stopped {
                self.deaths.push((self.now, process, fault));
            }
            self.nodes[node].is_cut_off |= !matches!(fault, Fault::Fail | Fault::Blame);
            self.nodes[node].is_unheard |= matches!(fault, Fault::Cut | Fault::CutAtLeader | Fault::Stop(_));
        }
        match fault {
            Fault::Kill => self.end(node, true),
            Fault::PowerLoss => self.end(node, false),
            Fault::Cut | Fault::CutAtLeader => self.cut(node, fault),
            Fault::Stop(time) => {
                self.stopped_for += time;
                if !std::mem::replace(&mut self.nodes[node].stopped, true) {
                    self.at(self.now + time, What::Resume(node));
                }
            }
            Fault::Fail => self.fail(node, self.ranks_of(process).start),
            Fault::Blame => {
                let rank = (self.ranks_of(process).end) % self.world();
                self.faulty.insert((process + 1) % self.processes);
                self.fail(node, rank);
            }
            Fault::Restart | Fault::Duplicate => {
                if fault == Fault::Restart {
                    self.end(node, true);
                }
                // The leader starts only once: the others would have to learn of another one.
                if process != 0 {
                    self.add(process, self.now);
                }
            }
        }
    }

    fn cut(&mut self, node: usize, fault: Fault) {
        let mine: Vec<usize> =
            (0..self.wires.len()).filter(|&wire| self.wires[wire].member == node).collect();
        for wire in mine {
            self.wires[wire].is_cut = true;
            self.send(ConnectionId(wire), LEADER_END, Item::Closed);
            if fault == Fault::Cut {
                self.send(ConnectionId(wire), MEMBER_END, Item::Closed);
            }
        }
    }

    fn fail(&mut self, node: usize, rank: usize) {
        let rank = Some(fsdp_core::Rank(rank));
        let kind = fsdp_core::FailureKind::Permanent;
        let failure = Failure { rank, cause: "it has failed".into(), kind, last_call: None };
        self.request(node, Request::Fail(failure));
    }
}
