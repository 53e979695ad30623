//! Runs the coordinator of a launch: receives messages from the agents of all nodes and executes the decisions of
//! [`Coordinator`].

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::process::auth::gate::Gate;
use fsdp_comm::process::auth::{Side, Token, authenticate_within};
use fsdp_comm::process::rendezvous::election::Lead;

use super::agent::{self, PULSE};
use super::coordinator::{Action, Coordinator, Event, NodeId, Rules};
use super::lines;
use super::message::{Beginning, Message, Order, Start};
use super::plan::Plan;
use crate::output;

/// The purpose that both ends include in the proof of the token.
pub(super) const PURPOSE: &[u8] = b"fsdp launch";

/// Time limit for a proof.
pub(super) const PROOF_MAX: Duration = Duration::from_secs(5);

/// How long nodes may take to learn that the launch is over.
const DISCONNECT_WITHIN: Duration = Duration::from_secs(3);

/// What the coordinator receives.
pub(super) enum Incoming {
    /// A node has connected.
    Connected(NodeId, TcpStream),
    /// A node sent a message.
    Received(NodeId, Message),
    /// A node's connection is closed.
    Lost(NodeId),
}

/// See the [module](self).
pub(super) struct Host {
    pub(super) rules: Rules,
    pub(super) plan: Plan,
    /// The agent of this node.
    pub(super) local: Sender<agent::Event>,
    /// The session of that agent.
    pub(super) session: u64,
    /// How other nodes find this one, if they were not given its address.
    pub(super) lead: Option<Lead>,
    /// This node's address for other nodes, if known before any has connected.
    pub(super) address: Option<IpAddr>,
    /// Keeps the port for other nodes open while this exists, if there may be any.
    pub(super) _admission: Option<Admission>,
}

/// The nodes that can receive orders.
struct Nodes {
    local: Sender<agent::Event>,
    local_address: Option<IpAddr>,
    others: BTreeMap<NodeId, TcpStream>,
}

impl Host {
    /// Coordinates until the launch is over, or another coordinator has taken over; then all nodes join that one, this
    /// node included.
    pub(super) fn run(self, incoming: &Receiver<Incoming>) {
        let begin = Instant::now();
        let mut coordinator = Coordinator::new(self.rules, Duration::ZERO);
        let mut nodes = Nodes { local: self.local, local_address: self.address, others: BTreeMap::new() };
        let mut last_pulse = Instant::now();
        while !coordinator.is_over() {
            if last_pulse.elapsed() >= PULSE {
                last_pulse = Instant::now();
                let pulse = Order::Pulse(coordinator.known());
                nodes.others.values().for_each(|node| lines::send(node, &pulse));
            }
            let left = coordinator.deadline().map(|deadline| deadline.saturating_sub(begin.elapsed()));
            let event = match incoming.recv_timeout(left.map_or(PULSE, |left| left.min(PULSE))) {
                Ok(Incoming::Connected(id, stream)) => {
                    nodes.connected(id, stream);
                    continue;
                }
                Ok(Incoming::Received(id, message)) => Event::Received(id, message),
                Ok(Incoming::Lost(id)) => {
                    nodes.others.remove(&id);
                    Event::Lost(id)
                }
                Err(RecvTimeoutError::Timeout) => Event::Tick,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let actions = coordinator.handle(begin.elapsed(), event);
            let starts = actions.iter().any(|action| matches!(action, Action::Start { .. }));
            if starts && self.lead.as_ref().is_some_and(Lead::is_superseded) {
                return drop(nodes.local.send(agent::Event::Lost { session: self.session }));
            }
            for action in actions {
                nodes.execute(action, &mut coordinator, &self.plan);
            }
        }
        nodes.wait_for_disconnects(incoming);
    }
}

impl Nodes {
    fn connected(&mut self, id: NodeId, stream: TcpStream) {
        // The other node reached this one at this address.
        self.local_address = self.local_address.or(stream.local_addr().ok().map(|address| address.ip()));
        self.others.insert(id, stream);
    }

    fn execute(&mut self, action: Action, coordinator: &mut Coordinator, plan: &Plan) {
        match action {
            Action::Send(id, order) => self.send(id, order),
            Action::Note(text) => output::note(&text),
            Action::Start { attempt, nodes, is_taken_over } => match plan.beginning(is_taken_over) {
                Ok(beginning) => self.start(attempt, &nodes, beginning, coordinator),
                Err(error) => {
                    for action in coordinator.abandon(error.exit(), error.to_string()) {
                        self.execute(action, coordinator, plan);
                    }
                }
            },
        }
    }

    fn start(&self, attempt: u32, nodes: &[NodeId], beginning: Beginning, coordinator: &Coordinator) {
        let rendezvous = (nodes.len() > 1).then(|| {
            let first = coordinator.node(nodes[0]);
            let of_peer = || self.others.get(&nodes[0])?.peer_addr().ok().map(|address| address.ip());
            let local = || self.local_address.filter(|_| nodes[0] == NodeId::LOCAL);
            let address = first.address.or_else(local).or_else(of_peer);
            let by_address = |ip| SocketAddr::new(ip, first.port).to_string();
            // A node that was just lost has no address any more. Its attempt fails, and another one follows.
            address.map_or_else(|| format!("{}:{}", first.host, first.port), by_address)
        });
        for (node, &id) in nodes.iter().enumerate() {
            let (nodes, rendezvous) = (nodes.len(), rendezvous.clone());
            self.send(id, Order::Start(Start { attempt, node, nodes, beginning, rendezvous }));
        }
    }

    fn send(&self, id: NodeId, order: Order) {
        if id == NodeId::LOCAL {
            // If the agent has ended, so does the launch.
            let _ = self.local.send(agent::Event::Ordered(order));
        } else if let Some(stream) = self.others.get(&id) {
            lines::send(stream, &order);
        }
    }

    /// Waits for the other nodes to disconnect, which they do when they learn that the launch is over.
    fn wait_for_disconnects(mut self, incoming: &Receiver<Incoming>) {
        let end = Instant::now() + DISCONNECT_WITHIN;
        while !self.others.is_empty()
            && let Ok(event) = incoming.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            match event {
                Incoming::Lost(id) => drop(self.others.remove(&id)),
                Incoming::Connected(..) | Incoming::Received(..) => {}
            }
        }
    }
}

/// The open port of a coordinator; it closes when this is dropped.
pub(super) struct Admission {
    _needed: Arc<()>,
}

/// Accepts nodes that know the token, and forwards their messages.
pub(super) fn admit(
    listener: TcpListener,
    token: Token,
    incoming: Sender<Incoming>,
) -> std::io::Result<Admission> {
    let next = AtomicU64::new(NodeId::LOCAL.0 + 1);
    let needed = Arc::new(());
    let of_port = Arc::downgrade(&needed);
    let authenticate = move |stream: TcpStream, limit| {
        if let Err(error) = authenticate_within(&stream, limit, &token, Side::Answerer, PURPOSE) {
            tracing::info!("an unknown client at the launch port: {error}");
            return;
        }
        let (id, incoming) = (NodeId(next.fetch_add(1, Ordering::Relaxed)), incoming.clone());
        // If no thread starts, the connection is closed, and the other end retries.
        let forward = move || forward_messages(stream, id, &incoming);
        let _ = thread::Builder::new().name("node".to_owned()).spawn(forward);
    };
    Gate::new(listener, PROOF_MAX)?.open("nodes", move || of_port.strong_count() > 0, authenticate)?;
    Ok(Admission { _needed: needed })
}

/// Forwards a node's messages until it is gone. The receiver is gone if the launch is over.
fn forward_messages(stream: TcpStream, id: NodeId, incoming: &Sender<Incoming>) {
    let Ok(lines) = lines::receive::<Message>(&stream) else { return };
    if incoming.send(Incoming::Connected(id, stream)).is_err() {
        return;
    }
    for message in lines {
        if incoming.send(Incoming::Received(id, message)).is_err() {
            return;
        }
    }
    let _ = incoming.send(Incoming::Lost(id));
}
