//! How a node's agent finds the coordinator of its launch, or becomes it.

use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fsdp_ckpt::is_url;
use fsdp_comm::process::auth::{AuthError, Side, Token, authenticate_within};
use fsdp_comm::process::cluster::ClusterError;
use fsdp_comm::process::interface;
use fsdp_comm::process::rendezvous::election::{Elected, Lead, elect};
use fsdp_comm::process::rendezvous::{LAUNCH_FOLDER, RendezvousError, named_token, shared_token};

use super::agent::Event;
use super::coordinator::{NodeId, Rules};
use super::host::{Host, Incoming, PROOF_MAX, PURPOSE, admit};
use super::lines;
use super::message::{Message, Order};
use super::plan::Plan;
use crate::args::LaunchArgs;
use crate::cluster::variable;
use crate::error::CliError;

/// How long an address may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The meeting point of a launch's agents.
enum MeetingPoint {
    /// There is a single agent.
    Here,
    /// An address given to all agents.
    Endpoint {
        host: String,
        port: u16,
        /// Whether the coordinator is on this node; if `None`, it is on the node with the address.
        is_here: Option<bool>,
    },
    /// A folder visible to all agents.
    Folder(PathBuf),
}

/// See the [module](self).
pub(super) struct Meeting<'a> {
    point: MeetingPoint,
    rules: Rules,
    plan: &'a Plan,
    /// The token that authenticates agents, and later processes.
    token: Option<Token>,
    /// Whether the token comes from an environment variable.
    is_token_named: bool,
    /// The requested interface.
    address: Option<IpAddr>,
    sessions: u64,
}

/// An agent's connection to a coordinator.
pub(super) struct Session {
    pub(super) number: u64,
    link: Link,
    token: Option<String>,
    address: Option<IpAddr>,
}

enum Link {
    /// The coordinator is a thread of this process.
    Local { sender: Sender<Incoming>, thread: JoinHandle<()> },
    /// The coordinator is on another node.
    Remote(TcpStream),
}

impl<'a> Meeting<'a> {
    /// Determines the meeting point of a launch.
    ///
    /// # Errors
    /// [`CliError`]: there is none, or no token.
    pub(super) fn new(args: &LaunchArgs, plan: &'a Plan) -> Result<Self, CliError> {
        let rules = Rules {
            min: args.nnodes.min,
            max: args.nnodes.max,
            max_restarts: args.max_restarts,
            wait: Duration::from_secs(args.node_wait),
        };
        let is_token_named =
            ["FSDP_TOKEN_FILE", "FSDP_TOKEN"].into_iter().any(|name| variable(name).is_some());
        let mut meeting = Self {
            point: MeetingPoint::Here,
            rules,
            plan,
            token: None,
            is_token_named,
            address: None,
            sessions: 0,
        };
        if rules.max == 1 {
            return Ok(meeting);
        }
        meeting.address = interface::asked_for(&variable).map_err(cluster_error)?;
        let folder = plan.out_dir().filter(|folder| !is_url(folder));
        meeting.token = Some(token(args, folder)?);
        meeting.point = match (args.endpoint(), folder) {
            (Some((host, port)), _) => {
                MeetingPoint::Endpoint { host, port, is_here: args.node_rank.map(|number| number == 0) }
            }
            (None, Some(folder)) => MeetingPoint::Folder(folder.join(LAUNCH_FOLDER)),
            (None, None) => {
                let what =
                    "the nodes of this command share no folder to meet in; give host:port of the first one";
                return Err(CliError::Option { option: "--endpoint", what: what.to_owned() });
            }
        };
        Ok(meeting)
    }

    /// Finds the coordinator, or becomes it; `None` if there is none yet. Its orders arrive as events.
    ///
    /// # Errors
    /// [`CliError`]: the token differs, or a folder or port cannot be used.
    pub(super) fn session(&mut self, events: &Sender<Event>) -> Result<Option<Session>, CliError> {
        self.sessions += 1;
        let link = self.link(events)?;
        let token = self.token.as_ref().map(Token::to_hex);
        Ok(link.map(|link| Session { number: self.sessions, link, token, address: self.address }))
    }

    fn link(&self, events: &Sender<Event>) -> Result<Option<Link>, CliError> {
        match &self.point {
            MeetingPoint::Here => Ok(Some(self.lead(None, None, events)?)),
            MeetingPoint::Endpoint { host, port, is_here } => self.at_endpoint(host, *port, *is_here, events),
            MeetingPoint::Folder(folder) => match elect(folder, self.bind_address(), &|stream| {
                self.is_coordinator(stream)
            })? {
                Elected::Follower(stream) => self.follow(stream, events).map(Some),
                Elected::Leader(listener, lead) => Ok(Some(self.lead(Some(listener), Some(lead), events)?)),
            },
        }
    }

    fn at_endpoint(
        &self,
        host: &str,
        port: u16,
        is_here: Option<bool>,
        events: &Sender<Event>,
    ) -> Result<Option<Link>, CliError> {
        if is_here.map_or_else(|| is_local_host(host), Ok)? {
            let failed = |source| {
                let what = format!("the coordinator at {host}:{port}");
                CliError::Start { what, source }
            };
            let listener = TcpListener::bind((self.bind_address(), port)).map_err(failed)?;
            return Ok(Some(self.lead(Some(listener), None, events)?));
        }
        let connect = |address| TcpStream::connect_timeout(&address, ANSWER_WITHIN).ok();
        let Some(stream) = resolve(host, port).into_iter().find_map(connect) else { return Ok(None) };
        match self.authenticate(&stream) {
            Ok(()) => self.follow(stream, events).map(Some),
            Err(AuthError::Connection(_)) => Ok(None),
            Err(error) => {
                let why = format!("the coordinator at {host}:{port}: {error}");
                Err(CliError::Option { option: "--endpoint", what: why })
            }
        }
    }

    fn bind_address(&self) -> IpAddr {
        self.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into())
    }

    /// Whether the peer is a coordinator of this launch. If the token comes from a variable, a peer with another token
    /// is an error; a token from the folder is the same for all, so a peer with another one is another program.
    fn is_coordinator(&self, stream: &TcpStream) -> Result<bool, CliError> {
        match self.authenticate(stream) {
            Ok(()) => Ok(true),
            Err(error @ AuthError::Token) if self.is_token_named => {
                let what = format!("the coordinator in {LAUNCH_FOLDER}: {error}");
                Err(CliError::Option { option: "FSDP_TOKEN", what })
            }
            Err(error) => {
                tracing::info!("the process that answers in {LAUNCH_FOLDER} is not a coordinator: {error}");
                Ok(false)
            }
        }
    }

    fn authenticate(&self, stream: &TcpStream) -> Result<(), AuthError> {
        let token = self.token.as_ref().expect("there is a token where there are several nodes");
        authenticate_within(stream, PROOF_MAX, token, Side::Caller, PURPOSE)
    }

    fn lead(
        &self,
        listener: Option<TcpListener>,
        lead: Option<Lead>,
        events: &Sender<Event>,
    ) -> Result<Link, CliError> {
        let failed = |source| CliError::Start { what: "a thread".to_owned(), source };
        let (sender, incoming) = mpsc::channel();
        let admission = match (listener, &self.token) {
            (Some(listener), Some(token)) => {
                Some(admit(listener, token.clone(), sender.clone()).map_err(failed)?)
            }
            _ => None,
        };
        let (rules, plan, session) = (self.rules, self.plan.clone(), self.sessions);
        let host = Host {
            rules,
            plan,
            local: events.clone(),
            session,
            lead,
            address: self.address,
            _admission: admission,
        };
        let thread = thread::Builder::new().name("coordinator".to_owned()).spawn(move || host.run(&incoming));
        Ok(Link::Local { sender, thread: thread.map_err(failed)? })
    }

    fn follow(&self, stream: TcpStream, events: &Sender<Event>) -> Result<Link, CliError> {
        let failed = |source| CliError::Start { what: "a thread".to_owned(), source };
        let orders = lines::receive::<Order>(&stream).map_err(failed)?;
        let (events, session) = (events.clone(), self.sessions);
        let forward = move || {
            for order in orders {
                // The receiver is gone if the launch is over.
                let _ = events.send(Event::Ordered(order));
            }
            let _ = events.send(Event::Lost { session });
        };
        thread::Builder::new().name("coordinator".to_owned()).spawn(forward).map_err(failed)?;
        Ok(Link::Remote(stream))
    }
}

impl Session {
    /// Sends a message to the coordinator.
    pub(super) fn send(&self, message: Message) {
        match &self.link {
            // The coordinator has ended if the launch is over.
            Link::Local { sender, .. } => drop(sender.send(Incoming::Received(NodeId::LOCAL, message))),
            Link::Remote(stream) => lines::send(stream, &message),
        }
    }

    /// Whether the coordinator is in this process.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.link, Link::Local { .. })
    }

    /// The token that authenticates processes.
    pub(super) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// The requested interface.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// A port that is free now, for process 0. If it is taken before process 0 binds it, the attempt fails and is
    /// repeated.
    pub(super) fn free_port(&self) -> u16 {
        let bind_address = self.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let bound = TcpListener::bind((bind_address, 0)).and_then(|listener| listener.local_addr());
        bound.map_or(0, |address| address.port())
    }

    /// Closes the session when the launch is over.
    pub(super) fn close(self) {
        match self.link {
            Link::Local { sender, thread } => {
                drop(sender);
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            Link::Remote(stream) => drop(stream.shutdown(Shutdown::Both)),
        }
    }
}

/// The token of a launch on several nodes: from the environment, or in the output folder.
fn token(args: &LaunchArgs, folder: Option<&Path>) -> Result<Token, CliError> {
    if let Some(named) = named_token(&variable).map_err(RendezvousError::from).map_err(cluster_error)? {
        return Ok(named);
    }
    if args.network.insecure_network {
        return Ok(Token::open());
    }
    let Some(folder) = folder else { return Err(ClusterError::NoToken.into()) };
    let failed = |source| CliError::Create { option: "run.out_dir", file: folder.to_owned(), source };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let token = shared_token(folder, true).map_err(cluster_error)?;
    Ok(token.expect("it is made if there is none"))
}

fn cluster_error<E: Into<ClusterError>>(error: E) -> CliError {
    CliError::Cluster(error.into())
}

fn resolve(host: &str, port: u16) -> Vec<SocketAddr> {
    (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
}

/// Whether a host name refers to this host.
fn is_local_host(host: &str) -> Result<bool, CliError> {
    let interfaces =
        interface::interfaces().map_err(|source| CliError::Start { what: host.to_owned(), source })?;
    let addresses = resolve(host, 0);
    // Some systems map the machine's name to a loopback address that is on no interface.
    let is_here = |ip: IpAddr| ip.is_loopback() || interfaces.iter().any(|interface| interface.address == ip);
    Ok(addresses.iter().any(|address| is_here(address.ip())))
}
