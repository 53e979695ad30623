//! Simulated processes that die. Each is a thread that runs the whole of `train` with its own launcher, and one of them
//! stops for good at a chosen moment.
//!
//! Moments are the actions of a process that other processes or its disk can observe: operations of a schedule, link
//! messages, assembly messages, reports. They are counted, so a test can let a process die at each one. No wait depends
//! on a timeout: a death ends it, as a closed connection does.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use fsdp_comm::assembly::{Assembly, AssemblyError, InMemoryAssembly};
use fsdp_comm::process::launch::Processes;
use fsdp_comm::{Alarm, Exchanged, FlightRecorder, InMemoryLinks, Incoming, Link, Outgoing};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use fsdp_core::engine::Observer;
use fsdp_core::schedule::{OpId, OpKind};
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::checkpoint::Saved;
use fsdp_train::metrics::StepMetrics;
use fsdp_train::train::{Reporter, Resume, RunOptions, Summary, train};
use fsdp_train::{Job, TrainError};

use crate::support::run_options;

/// A world that takes longer than this, on any machine, hangs.
const HANGS_AFTER: Duration = Duration::from_secs(600);

/// The shape of a world of processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crew {
    pub(crate) ranks_per_process: usize,
    /// Whether each message of a collective counts as a moment.
    pub(crate) counts_messages: bool,
}

/// Lets a process die after a number of moments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Death {
    pub(crate) process: usize,
    pub(crate) moments: u64,
}

/// How a world ended.
pub(crate) struct End {
    /// Whether the process reached the moment of its death.
    pub(crate) is_dead: bool,
    /// Index and result of every process except one that died.
    pub(crate) results: Vec<(usize, Result<Summary, TrainError>)>,
    /// Number of moments of each process.
    pub(crate) moments: Vec<u64>,
}

/// Index and result of a process that returned; `None` for one that died.
type Ended = Option<(usize, Result<Summary, TrainError>)>;

struct World {
    links: InMemoryLinks,
    assembly: InMemoryAssembly,
    ranks: usize,
    ranks_per_process: usize,
    counts_messages: bool,
    death: Option<Death>,
    moments: Vec<AtomicU64>,
    has_died: AtomicBool,
    ended: Sender<Ended>,
    /// Whether the threads of a dead process may end, since their effects are no longer observed.
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl World {
    fn ranks_of(&self, process: usize) -> Range<usize> {
        process * self.ranks_per_process..(process + 1) * self.ranks_per_process
    }

    /// Counts a moment of a process. A dead process blocks here until the world is over, then gets an error.
    fn live(&self, process: usize) -> Result<(), CommError> {
        let lived = self.moments[process].fetch_add(1, Ordering::SeqCst);
        let death = self.death.filter(|death| death.process == process);
        if death.is_none_or(|death| lived < death.moments) {
            return Ok(());
        }
        let rank = Rank(self.ranks_of(process).start);
        let error = CommError::PeerFailed { rank, reason: "its process died".to_owned() };
        if !self.has_died.swap(true, Ordering::SeqCst) {
            self.links.alarm().raise(error.clone());
            self.ranks_of(process).for_each(|rank| self.assembly.lose(Rank(rank), error.clone()));
            let _ = self.ended.send(None);
        }
        drop(self.changed.wait_while(self.is_over.lock().unwrap(), |is_over| !*is_over).unwrap());
        Err(error)
    }

    /// Like [`World::live`], for callers that cannot return an error.
    fn live_on(&self, process: usize) {
        // Unlike `panic!`, this prints nothing.
        self.live(process).unwrap_or_else(|error| resume_unwind(Box::new(error.to_string())));
    }

    fn end(&self) {
        *self.is_over.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// A process; implements the interfaces through which it passes its moments.
#[derive(Clone)]
struct Process {
    world: Arc<World>,
    index: usize,
}

impl Assembly for Process {
    fn world(&self) -> usize {
        self.world.ranks
    }

    fn local(&self) -> Range<usize> {
        self.world.ranks_of(self.index)
    }

    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError> {
        self.world.live(self.index)?;
        self.world.assembly.give(topic, rank, value)
    }

    fn given(&self, topic: &str) -> usize {
        self.world.assembly.given(topic)
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        let collected = self.world.assembly.collect(topic, ranks, limit);
        self.world.live(self.index)?;
        collected
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.world.live(self.index)?;
        self.world.assembly.announce(topic, value)
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        let received = self.world.assembly.hear(topic, limit);
        self.world.live(self.index)?;
        received
    }

    fn give_up(&self, topic: &str) {
        // This only reaches waiters in the same process, so it is not a moment.
        self.world.assembly.give_up(topic);
    }
}

impl Observer for Process {
    fn begin(&mut self, _op: OpId, _kind: &OpKind) {
        self.world.live_on(self.index);
    }
}

impl Reporter for Process {
    fn step(&self, _metrics: &StepMetrics) {
        self.world.live_on(self.index);
    }

    fn taken_over(&self) {
        self.world.live_on(self.index);
    }

    fn saved(&self, _saved: &Saved) {
        self.world.live_on(self.index);
    }
}

struct MortalLink {
    process: Process,
    link: Box<dyn Link>,
}

impl Link for MortalLink {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn members(&self) -> &[Rank] {
        self.link.members()
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        if self.process.world.counts_messages {
            self.process.world.live(self.process.index)?;
        }
        self.link.exchange(outgoing, incoming)
    }

    fn unused_channel(&self) -> u64 {
        self.link.unused_channel()
    }

    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link> {
        Box::new(Self { process: self.process.clone(), link: self.link.subgroup(members, channel) })
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.link.alarm()
    }
}

impl Process {
    /// Announces to all others that nothing more comes from this process.
    fn leave(&self) {
        let has_left = |rank| CommError::PeerFailed { rank, reason: "its process has left".to_owned() };
        for rank in self.local().map(Rank) {
            let error = self.world.links.alarm().raised().unwrap_or_else(|| has_left(rank));
            self.world.assembly.lose(rank, error);
        }
    }

    fn train<A: Architecture + Clone>(&self, job: &Job<A>) -> Result<Summary, TrainError> {
        let links = {
            let process = self.clone();
            move |channel, rank| -> Box<dyn Link> {
                Box::new(MortalLink {
                    link: process.world.links.link(channel, rank),
                    process: process.clone(),
                })
            }
        };
        let launcher = Processes::new(
            Arc::new(self.clone()),
            self.world.links.alarm(),
            Arc::new(links),
            self.world.ranks,
            Arc::new(FlightRecorder::new()),
            |_, _| Ok(Arc::new(HostMemory::new(HostOptions::default())?)),
        );
        let observer = |_| -> Box<dyn Observer> { Box::new(self.clone()) };
        let options = RunOptions { reporter: self, observer: &observer, ..run_options(Resume::Newest) };
        train(job, &launcher, &options)
    }
}

/// Runs a job in processes, of which one may die. Calls `look` when all others have ended: the disk is then in the
/// state that the dead process left.
///
/// # Panics
/// If one of the others does not end.
pub(crate) fn train_mortals<A: Architecture + Clone>(
    job: &Job<A>,
    crew: Crew,
    death: Option<Death>,
    look: impl FnOnce(),
) -> End {
    let ranks = job.plan.mesh.world();
    let processes = ranks / crew.ranks_per_process;
    let (sender, ended) = channel();
    let world = Arc::new(World {
        links: InMemoryLinks::new(ranks, HANGS_AFTER),
        assembly: InMemoryAssembly::new(ranks),
        ranks,
        ranks_per_process: crew.ranks_per_process,
        counts_messages: crew.counts_messages,
        death,
        moments: (0..processes).map(|_| AtomicU64::new(0)).collect(),
        has_died: AtomicBool::new(false),
        ended: sender,
        is_over: Mutex::new(false),
        changed: Condvar::new(),
    });
    let (mut results, mut living) = (Vec::new(), processes);
    thread::scope(|scope| {
        for index in 0..processes {
            let process = Process { world: Arc::clone(&world), index };
            scope.spawn(move || {
                let result = process.train(job);
                process.leave();
                process.world.ended.send(Some((index, result)))
            });
        }
        while results.len() < living {
            match ended.recv_timeout(HANGS_AFTER) {
                Ok(Some(end)) => results.push(end),
                Ok(None) => living -= 1,
                Err(_) => {
                    world.end();
                    panic!("{death:?}: only {results:?} have ended");
                }
            }
        }
        look();
        world.end();
    });
    let moments = world.moments.iter().map(|moments| moments.load(Ordering::SeqCst)).collect();
    End { is_dead: living < processes, results, moments }
}
