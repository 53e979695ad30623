//! Joins a world: from the place of this process to its rendezvous, listening ports, token and control plane.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::{Error, FailureKind, Memory, Rank};

use super::ancestor::Ancestor;
use super::interface::{self, InterfaceError};
use super::launch::Processes;
use super::place::ProcessPlace;
use super::rendezvous::abandoned::Held;
use super::rendezvous::{Published, Rendezvous, RendezvousError};
use super::{Control, ControlOptions, JoinError};
use super::{Facts, Failure, Roster, Verdict};
use crate::assembly::Assembly;
use crate::auth::Token;
use crate::flight::FlightRecorder;
use crate::link::{Alarm, Link};
use crate::near::{MakeLink, local_links};
use crate::tcp::{DIRECT_FROM, TcpAcceptor, TcpWorld};

/// How often a process checks whether the leader has published its address.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long to wait for a connection to one address of the leader.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Number of missed heartbeats after which a process counts as dead.
const MISSED_HEARTBEATS_MAX: u32 = 15;

/// Environment variable; `0` disables direct memory reads between processes of one machine.
const DIRECT_READS: &str = "FSDP_DIRECT_READS";

/// The inputs with which a process joins a world.
pub struct Joining<'a> {
    /// The place of this process among those that were started.
    pub place: ProcessPlace,
    /// Looks up an environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// A folder that all nodes see (the output folder of a run), if any.
    pub shared: Option<&'a Path>,
    /// Number of ranks of this process.
    pub local_ranks: usize,
    /// The device they compute on, for display.
    pub device: String,
    /// The heartbeat interval.
    pub heartbeat: Duration,
    /// Time limit for joining, and later for each message.
    pub timeout: Duration,
    /// Whether processes on several nodes may run without a token.
    pub is_insecure: bool,
}

/// Why a process could not join a world.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The rendezvous failed.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The requested network interface does not exist, or the interfaces cannot be listed.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// Joining the control plane failed.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// There is no token to keep strangers out.
    #[error(
        "processes on several nodes have no token: anyone who can reach their ports could join; set FSDP_TOKEN_FILE \
         (a file of 64 hexadecimal digits that only you can read), or use a folder that all nodes share"
    )]
    NoToken,
    /// The leader has not published its address in time.
    #[error("process 0 has not published its address within {} s: check that it was started", waited.as_secs())]
    NoLeader {
        /// How long this process has waited.
        waited: Duration,
    },
    /// The operating system cannot open a port.
    #[error("cannot open a port for data from other processes: {0}")]
    Io(#[from] io::Error),
}

impl ClusterError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            ClusterError::Rendezvous(error) => error.kind(),
            ClusterError::Interface(InterfaceError::NoMatch { .. }) | ClusterError::NoToken => {
                FailureKind::Input
            }
            ClusterError::Join(error) => error.kind(),
            ClusterError::NoLeader { .. }
            | ClusterError::Io(_)
            | ClusterError::Interface(InterfaceError::List(_)) => FailureKind::Temporary,
        }
    }
}

/// One process's part in a world that has begun.
pub struct Cluster {
    place: ProcessPlace,
    control: Arc<Control>,
    links: Arc<MakeLink>,
    recorder: Arc<FlightRecorder>,
    rendezvous_text: String,
    /// Dropping it removes the published address when the world has ended.
    _published: Option<Published>,
    _held: Option<Held>,
}

impl Cluster {
    /// Joins the other processes.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn join(joining: &Joining<'_>) -> Result<Self, ClusterError> {
        let Joining { place, variable, shared, timeout, .. } = *joining;
        let begin = Instant::now();
        let rendezvous = Rendezvous::of(&place, variable, shared, Ancestor::launcher(&place).pid())?;
        let requested = interface::asked_for(variable)?;
        let mut rendezvous_text = rendezvous.to_string();
        let is_leader = place.process == 0;
        let held = if is_leader { rendezvous.take()? } else { None };
        let leader = if is_leader { None } else { Some(first_address(&rendezvous, timeout)?) };
        let token = token(joining, &rendezvous)?;
        let address = requested.map_or_else(|| own_address(&place, &rendezvous, leader), Ok)?;
        let acceptor = TcpAcceptor::bind(address)?;
        let options = joining.control_options(token.clone(), interface::reachable(acceptor.address()?)?);
        let (control, published) = if is_leader {
            let listener = rendezvous.bind(address)?;
            let addresses = interface::reachable(listener.local_addr()?)?;
            let published = rendezvous.publish(&addresses)?;
            if let Some(address) = addresses.first().filter(|_| !rendezvous.is_at_port()) {
                rendezvous_text += &format!(", which points to {address}");
            }
            (Control::lead(listener, options)?, Some(published))
        } else {
            let options = ControlOptions { join_timeout: timeout.saturating_sub(begin.elapsed()), ..options };
            (Control::follow(&|| rendezvous.find(), options)?, None)
        };
        let roster = control.roster();
        let addresses = roster
            .processes
            .iter()
            .flat_map(|process| process.ranks.clone().map(|_| process.facts.addresses.clone()))
            .collect();
        let is_direct = (joining.variable)(DIRECT_READS).is_none_or(|value| value != "0");
        let (alarm, direct_from) = (control.alarm(), is_direct.then_some(DIRECT_FROM));
        let world = TcpWorld { addresses, generation: roster.generation, alarm, timeout, direct_from };
        let links = acceptor.open(world, token)?;
        let far: Arc<MakeLink> = Arc::new(move |channel, rank| links.link(channel, rank));
        let local = roster.processes[place.process].ranks.clone();
        let links = local_links(far, local, roster.world(), timeout, control.alarm());
        let recorder = Arc::new(FlightRecorder::new());
        control.record(Arc::clone(&recorder));
        Ok(Self { place, control, links, recorder, rendezvous_text, _published: published, _held: held })
    }

    /// The place of this process.
    pub fn place(&self) -> ProcessPlace {
        self.place
    }

    /// All processes of the world.
    pub fn roster(&self) -> &Roster {
        self.control.roster()
    }

    /// A description of the rendezvous; on the leader it may include its address.
    pub fn met_by(&self) -> &str {
        &self.rendezvous_text
    }

    /// The link of a rank that this process holds, to all ranks, on `channel`; the [worlds](Cluster::processes) of
    /// ranks use the channels from 0 on.
    pub fn link(&self, channel: u64, rank: Rank) -> Box<dyn Link> {
        (self.links)(channel, rank)
    }

    /// Whether this is the process of rank 0.
    pub fn is_leader(&self) -> bool {
        self.place.process == 0
    }

    /// The assembly of all ranks, for communication besides collectives.
    pub fn assembly(&self) -> Arc<dyn Assembly> {
        self.control.clone()
    }

    /// The alarm of the world.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.control.alarm()
    }

    /// Makes ranks that start from now on use `links` instead of TCP.
    pub fn connect_by(&mut self, links: Arc<MakeLink>) {
        self.links = links;
    }

    /// A launcher for the ranks of this process, whose memory `memory` creates.
    pub fn processes<M: Memory>(
        &self,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Processes<M> {
        let (assembly, alarm) = (self.control.clone(), self.control.alarm());
        let (links, recorder) = (self.links.clone(), self.recorder.clone());
        Processes::new(assembly, alarm, links, self.ranks_on_machine(), recorder, memory)
    }

    /// Number of ranks on this machine, over all its processes.
    pub fn ranks_on_machine(&self) -> usize {
        self.roster().world() / self.place.processes * self.place.local_processes
    }

    /// The recorder of the last collectives of this process's ranks.
    pub fn recorder(&self) -> Arc<FlightRecorder> {
        self.recorder.clone()
    }

    /// Reports a failure of this process to the world; only the first failure of the world counts.
    pub fn fail(&self, kind: FailureKind, cause: String) {
        let rank = self.control.roster().processes[self.place.process].ranks.start;
        let last_call = self.recorder.last(None);
        self.control.fail(Failure { rank: Some(Rank(rank)), cause, kind, last_call });
    }

    /// The verdict that ended the world, if any.
    pub fn verdict(&self) -> Option<Verdict> {
        self.control.verdict()
    }

    /// Calls `hook` when the world fails.
    pub fn on_verdict(&self, hook: Box<dyn FnOnce(&Verdict) + Send>) {
        self.control.on_verdict(hook);
    }

    /// Leaves the world, when the work is done or the failure has been reported.
    pub fn leave(&self) {
        self.control.leave();
    }
}

impl Joining<'_> {
    fn control_options(&self, token: Token, addresses: Vec<SocketAddr>) -> ControlOptions {
        ControlOptions {
            process: self.place.process,
            processes: self.place.processes,
            local_ranks: self.local_ranks,
            facts: Facts {
                host: host(),
                pid: std::process::id(),
                addresses,
                cpu_model: cpu_model(),
                device: self.device.clone(),
            },
            token,
            heartbeat: self.heartbeat,
            dead_after: self.heartbeat * MISSED_HEARTBEATS_MAX,
            join_timeout: self.timeout,
        }
    }
}

/// The host name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The CPU model of this machine as Linux reports it, with family, model and stepping, because hypervisors give CPUs of
/// several generations the same name.
pub fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let value_of = |line: &'_ str| {
            line.split_once(':')
                .filter(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned())
        };
        text.lines().find_map(value_of)
    };
    let name = field("model name").unwrap_or_else(|| "unknown".to_owned());
    match (field("cpu family"), field("model"), field("stepping")) {
        (Some(family), Some(model), Some(stepping)) => {
            format!("{name} (family {family}, model {model}, stepping {stepping})")
        }
        _ => name,
    }
}

/// Obtains the token: as a variable names it, or from the folder, where the leader may take a moment to create it.
fn token(joining: &Joining<'_>, rendezvous: &Rendezvous) -> Result<Token, ClusterError> {
    if let Some(named) = Token::named(joining.variable).map_err(RendezvousError::from)? {
        return Ok(named);
    }
    if joining.is_insecure {
        return Ok(Token::open());
    }
    let begin = Instant::now();
    loop {
        if let Some(token) = rendezvous.token(joining.place.process == 0)? {
            return Ok(token);
        }
        let may_appear = rendezvous.has_folder() && begin.elapsed() < joining.timeout;
        if !may_appear {
            return Err(ClusterError::NoToken);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The address at which this process opens its ports; `leader` is where it has found process 0, if it is not that one.
fn own_address(
    place: &ProcessPlace,
    rendezvous: &Rendezvous,
    leader: Option<SocketAddr>,
) -> io::Result<IpAddr> {
    let address = match leader {
        Some(leader) => interface::towards(leader)?,
        None if rendezvous.is_at_port() => Ipv4Addr::UNSPECIFIED.into(),
        None => Ipv4Addr::LOCALHOST.into(),
    };
    // Other nodes cannot reach loopback, to which the name of a host may resolve.
    let is_hidden = address.is_loopback() && !place.is_one_node();
    Ok(if is_hidden { Ipv4Addr::UNSPECIFIED.into() } else { address })
}

/// The first address of the leader that answers.
fn first_address(rendezvous: &Rendezvous, timeout: Duration) -> Result<SocketAddr, ClusterError> {
    let begin = Instant::now();
    loop {
        // A rendezvous that is not available yet is retried too.
        let found = rendezvous.find();
        let answers = |address: &&SocketAddr| TcpStream::connect_timeout(address, ANSWER_WITHIN).is_ok();
        if let Some(address) = found.as_ref().ok().and_then(|addresses| addresses.iter().find(answers)) {
            return Ok(*address);
        }
        if begin.elapsed() >= timeout {
            return Err(found.err().map_or(ClusterError::NoLeader { waited: timeout }, Into::into));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
