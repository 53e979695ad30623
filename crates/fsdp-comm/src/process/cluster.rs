//! From the place of a process to its part in a world: who it meets, where it listens, what it proves itself with.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::{Error, FailureKind, Memory, Rank};

use super::ancestor::Ancestor;
use super::auth::Token;
use super::interface::{self, InterfaceError};
use super::launch::Processes;
use super::place::Place;
use super::rendezvous::abandoned::Held;
use super::rendezvous::{Published, Rendezvous, RendezvousError};
use super::{Control, ControlOptions, JoinError};
use super::{Facts, Failure, Roster, Verdict};
use crate::assembly::Assembly;
use crate::flight::FlightRecorder;
use crate::link::{Alarm, Link};
use crate::near::{MakeLink, near_links};
use crate::tcp::{DIRECT_FROM, TcpDoor, TcpWorld};

/// How often a process looks whether the leader has said where it is.
const LOOK: Duration = Duration::from_millis(100);

/// How long an address of the leader may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Who is silent for so many heartbeats is dead.
const BEATS_TO_DEATH: u32 = 15;

/// Keeps processes of one machine from reading each other's memory, if it is `0`.
const DIRECT_READS: &str = "FSDP_DIRECT_READS";

/// What a process brings to a world.
pub struct Joining<'a> {
    /// Its place among those that were started.
    pub place: Place,
    /// Looks a variable of the environment up.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// A folder that all nodes see, if there is one: the output folder of a run.
    pub shared: Option<&'a Path>,
    /// Ranks of this process.
    pub local_ranks: usize,
    /// What they compute on.
    pub device: String,
    /// How often processes say that they are there.
    pub heartbeat: Duration,
    /// How long others are waited for: until all have joined, and later for a message.
    pub timeout: Duration,
    /// Whether processes on several nodes may do without a token.
    pub is_insecure: bool,
}

/// Why a process has no part in a world.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// There is nowhere to meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The interface that was asked for is not there.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The others did not come, or did not want this one.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// Nothing keeps strangers out.
    #[error(
        "the processes of several nodes have no token: anybody who reaches their ports could take part. Give \
         FSDP_TOKEN_FILE (a file of 64 hexadecimal digits that only you can read), or a folder that all nodes share"
    )]
    NoToken,
    /// The leader has not said where it is.
    #[error("process 0 has not said within {} s where it can be reached: see whether it was started", waited.as_secs())]
    NoLeader {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The operating system failed.
    #[error("can not open a port for the data of other processes: {0}")]
    Io(#[from] io::Error),
}

impl ClusterError {
    /// What this failure calls for.
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

/// The part of this process in a world that has begun.
pub struct Cluster {
    place: Place,
    control: Arc<Control>,
    links: Arc<MakeLink>,
    recorder: Arc<FlightRecorder>,
    met_by: String,
    /// Removed when the world has ended.
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
        let meet = Rendezvous::of(&place, variable, shared, Ancestor::launcher(&place).pid())?;
        let asked = interface::asked_for(variable)?;
        let mut met_by = meet.to_string();
        let held = if place.process == 0 { meet.take()? } else { None };
        let (control, door, published) = if place.process == 0 {
            let token = token(joining, &meet)?;
            let address = asked.unwrap_or(if place.is_one_node() && !meet.is_at_port() {
                Ipv4Addr::LOCALHOST.into()
            } else {
                Ipv4Addr::UNSPECIFIED.into()
            });
            let listener = meet.bind(address)?;
            let door = TcpDoor::bind(address)?;
            let options = joining.control(token.clone(), interface::reachable(door.address()?)?);
            let addresses = interface::reachable(listener.local_addr()?)?;
            let published = meet.publish(&addresses)?;
            if let Some(address) = addresses.first().filter(|_| !meet.is_at_port()) {
                met_by += &format!(", which leads to {address}");
            }
            (Control::lead(listener, options)?, (door, token), Some(published))
        } else {
            let leader = first_address(&meet, timeout)?;
            let token = token(joining, &meet)?;
            let address = match asked {
                Some(address) => address,
                None => interface::towards(leader)?,
            };
            // The name of this machine may stand for its loopback, which others can not reach.
            let is_hidden = asked.is_none() && address.is_loopback() && !place.is_one_node();
            let address = if is_hidden { Ipv4Addr::UNSPECIFIED.into() } else { address };
            let door = TcpDoor::bind(address)?;
            let options = joining.control(token.clone(), interface::reachable(door.address()?)?);
            let options = ControlOptions { join_timeout: timeout.saturating_sub(begin.elapsed()), ..options };
            (Control::follow(&|| meet.find(), options)?, (door, token), None)
        };
        let (door, token) = door;
        let roster = control.roster();
        let addresses = roster
            .processes
            .iter()
            .flat_map(|process| process.ranks.clone().map(|_| process.facts.addresses.clone()))
            .collect();
        let is_direct = (joining.variable)(DIRECT_READS).is_none_or(|value| value != "0");
        let (alarm, direct_from) = (control.alarm(), is_direct.then_some(DIRECT_FROM));
        let world = TcpWorld { addresses, generation: roster.generation, alarm, timeout, direct_from };
        let links = door.open(world, token)?;
        let far: Arc<MakeLink> = Arc::new(move |channel, rank| links.link(channel, rank));
        let local = roster.processes[place.process].ranks.clone();
        let links = near_links(far, local, roster.world(), timeout, control.alarm());
        let recorder = Arc::new(FlightRecorder::new());
        control.record(Arc::clone(&recorder));
        Ok(Self { place, control, links, recorder, met_by, _published: published, _held: held })
    }

    /// The place of this process.
    pub fn place(&self) -> Place {
        self.place
    }

    /// All processes.
    pub fn roster(&self) -> &Roster {
        self.control.roster()
    }

    /// How the processes have found each other, in words; on the leader with its address.
    pub fn met_by(&self) -> &str {
        &self.met_by
    }

    /// The ends of a rank, which this process holds, of connections among all ranks; channels from 0 on are those of the
    /// [worlds](Cluster::processes) of ranks.
    pub fn link(&self, channel: u64, rank: Rank) -> Box<dyn Link> {
        (self.links)(channel, rank)
    }

    /// Whether this is the process of rank 0.
    pub fn is_leader(&self) -> bool {
        self.place.process == 0
    }

    /// Where all ranks come together beside collectives.
    pub fn assembly(&self) -> Arc<dyn Assembly> {
        self.control.clone()
    }

    /// Where failures are told, and heard.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.control.alarm()
    }

    /// Lets ranks that are started from now on talk over other links than TCP.
    pub fn connect_by(&mut self, links: Arc<MakeLink>) {
        self.links = links;
    }

    /// The ranks of this process, with the memory that `memory` makes.
    pub fn processes<M: Memory>(
        &self,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Processes<M> {
        let (assembly, alarm) = (self.control.clone(), self.control.alarm());
        let (links, recorder) = (self.links.clone(), self.recorder.clone());
        Processes::new(assembly, alarm, links, self.ranks_on_machine(), recorder, memory)
    }

    /// Ranks on this machine, of all its processes.
    pub fn ranks_on_machine(&self) -> usize {
        self.roster().world() / self.place.processes * self.place.local_processes
    }

    /// The last collectives of the ranks of this process.
    pub fn recorder(&self) -> Arc<FlightRecorder> {
        self.recorder.clone()
    }

    /// Tells all that something has failed here, what it calls for and why; only the first failure of the world counts.
    pub fn fail(&self, kind: FailureKind, cause: String) {
        let rank = self.control.roster().processes[self.place.process].ranks.start;
        let last_call = self.recorder.last(None);
        self.control.fail(Failure { rank: Some(Rank(rank)), cause, kind, last_call });
    }

    /// What ended the world, if something has.
    pub fn verdict(&self) -> Option<Verdict> {
        self.control.verdict()
    }

    /// Calls `hook` when something ends the world.
    pub fn on_verdict(&self, hook: Box<dyn FnOnce(&Verdict) + Send>) {
        self.control.on_verdict(hook);
    }

    /// Ends this process's part, when its work is done or its failure is told.
    pub fn leave(&self) {
        self.control.leave();
    }
}

impl Joining<'_> {
    fn control(&self, token: Token, addresses: Vec<SocketAddr>) -> ControlOptions {
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
            dead_after: self.heartbeat * BEATS_TO_DEATH,
            join_timeout: self.timeout,
        }
    }
}

/// The name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The model of this machine's CPU, as Linux names it: with the numbers of its family, since hypervisors give CPUs of several
/// generations one name.
pub fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let of = |line: &'_ str| {
            line.split_once(':')
                .filter(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned())
        };
        text.lines().find_map(of)
    };
    let name = field("model name").unwrap_or_else(|| "unknown".to_owned());
    match (field("cpu family"), field("model"), field("stepping")) {
        (Some(family), Some(model), Some(stepping)) => {
            format!("{name} (family {family}, model {model}, stepping {stepping})")
        }
        _ => name,
    }
}

/// The token: it may take the leader a moment to make it.
fn token(joining: &Joining<'_>, meet: &Rendezvous) -> Result<Token, ClusterError> {
    let is_leader = joining.place.process == 0;
    let is_named =
        ["FSDP_TOKEN_FILE", "FSDP_TOKEN"].into_iter().any(|name| (joining.variable)(name).is_some());
    if joining.is_insecure && !is_named {
        return Ok(Token::open());
    }
    let begin = Instant::now();
    loop {
        if let Some(token) = meet.token(joining.variable, is_leader)? {
            return Ok(token);
        }
        let may_come = meet.has_folder() && begin.elapsed() < joining.timeout;
        if !may_come {
            return Err(ClusterError::NoToken);
        }
        std::thread::sleep(LOOK);
    }
}

/// The first address of the leader that answers.
fn first_address(meet: &Rendezvous, timeout: Duration) -> Result<SocketAddr, ClusterError> {
    let begin = Instant::now();
    loop {
        // A store that is not there yet is waited for too.
        let found = meet.find();
        let answers = |address: &&SocketAddr| TcpStream::connect_timeout(address, ANSWER_WITHIN).is_ok();
        if let Some(address) = found.as_ref().ok().and_then(|addresses| addresses.iter().find(answers)) {
            return Ok(*address);
        }
        if begin.elapsed() >= timeout {
            return Err(found.err().map_or(ClusterError::NoLeader { waited: timeout }, Into::into));
        }
        std::thread::sleep(LOOK);
    }
}
