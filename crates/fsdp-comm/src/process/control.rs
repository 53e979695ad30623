//! The control plane of a process: the [protocol](super) over TCP.
//!
//! One thread serves all connections of a process, so a slow one never holds up the others; a leader of hundreds of
//! processes has no more threads than one of two. Connections of strangers are kept away from it until they have proven
//! that they know the token.

mod connection;
mod driver;
mod error;
mod gate;
mod join;
mod shared;

use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};

use super::auth::Token;
use super::frame::VALUE_MAX;
use super::message::Join;
use super::protocol::{Machine, Pulse, Request};
use super::rendezvous::RendezvousError;
use super::world::{Facts, Failure, Roster, Verdict};
use crate::assembly::{Assembly, AssemblyError};
use crate::flight::FlightRecorder;
use crate::link::Alarm;

use driver::Driver;
use shared::Shared;

pub use error::{JoinError, Obstacle};

/// What connections of the control plane prove that they are for.
const PURPOSE: &[u8] = b"control";

/// Who a process is, and how long it waits.
#[derive(Clone, Debug)]
pub struct ControlOptions {
    /// Index of this process.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// How many ranks this process holds: at least one.
    pub local_ranks: usize,
    /// What others are told of this process.
    pub facts: Facts,
    /// The token of the run.
    pub token: Token,
    /// How often a process says that it is there: more than 0.
    pub heartbeat: Duration,
    /// Who is silent for so long is dead: several heartbeats.
    pub dead_after: Duration,
    /// How long to wait until all processes are there.
    pub join_timeout: Duration,
}

impl ControlOptions {
    fn join(&self, nonce: u64) -> Join {
        assert!(self.local_ranks > 0, "a process holds at least one rank");
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let (process, processes, local_ranks) = (self.process, self.processes, self.local_ranks);
        Join { version, process, processes, local_ranks, nonce, facts: self.facts.clone() }
    }

    fn pulse(&self) -> Pulse {
        assert!(
            !self.heartbeat.is_zero() && self.heartbeat < self.dead_after,
            "silence is longer than a heartbeat"
        );
        Pulse::new(self.heartbeat, self.dead_after)
    }
}

/// The part of one process in a world that has begun. Dropping it without [`Control::leave`] is, for all others, the
/// death of this process.
pub struct Control {
    shared: Arc<Shared>,
    roster: Roster,
    process: usize,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Waits at `listener` until all other processes have joined: what process 0 does. Refuses whoever comes later.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn lead(listener: TcpListener, options: ControlOptions) -> Result<Arc<Self>, JoinError> {
        let process = options.process;
        join::lead(listener, options).and_then(|(driver, roster)| Self::begin(driver, roster, process))
    }

    /// Joins process 0: what all others do. `leader` says where it listens, and is asked again before each new try: it
    /// may have been started later, or anew.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn follow(
        leader: &dyn Fn() -> Result<Vec<SocketAddr>, RendezvousError>,
        options: ControlOptions,
    ) -> Result<Arc<Self>, JoinError> {
        let process = options.process;
        join::follow(leader, options).and_then(|(driver, roster)| Self::begin(driver, roster, process))
    }

    fn begin<M: Machine + 'static>(
        driver: Driver<M>,
        roster: Roster,
        process: usize,
    ) -> Result<Arc<Self>, JoinError> {
        let shared = driver.shared();
        let thread = std::thread::Builder::new().name(format!("fsdp-control-{process}"));
        let thread = Some(thread.spawn(move || driver.run())?);
        Ok(Arc::new(Control { shared, roster, process, thread }))
    }

    /// All processes of the world.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Index of this process.
    pub fn process(&self) -> usize {
        self.process
    }

    /// The alarm of this process. What is raised here is known here at once, and told to the leader; when there is a
    /// verdict, that is what [`Alarm::raised`] gives from then on.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.shared.clone()
    }

    /// Tells others, from now on, which collective this process has begun last, as `recorder` has it.
    pub fn record(&self, recorder: Arc<FlightRecorder>) {
        self.shared.record(recorder);
    }

    /// Tells that something has failed in this process: an [`Alarm::raise`] that says more.
    pub fn fail(&self, failure: Failure) {
        let rank = failure.rank.unwrap_or(Rank(self.local().start));
        self.shared.fail(CommError::PeerFailed { rank, reason: failure.cause.clone() }, failure);
    }

    /// What ended the world, if something has.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shared.verdict()
    }

    /// Calls `hook` as soon as there is a verdict: at once if there is one, or else in the thread of the control plane,
    /// which it must not hold up. It must not own this control plane.
    pub fn on_verdict(&self, hook: Box<dyn FnOnce(&Verdict) + Send>) {
        self.shared.on_verdict(hook);
    }

    /// Ends this process's part: all went well, or its failure is known. Waits until others know; the leader waits until
    /// they have left: for at most a minute, or a few seconds when the world has failed.
    pub fn leave(&self) {
        self.shared.request(Request::Leave);
        self.shared.wait_until_left();
    }

    /// A value must fit into a message.
    fn check_len(&self, topic: &str, value: &[u8]) -> Result<(), CommError> {
        if value.len() <= VALUE_MAX {
            return Ok(());
        }
        let reason =
            format!("{topic:?} has {} bytes; processes tell each other up to {VALUE_MAX}", value.len());
        Err(CommError::Transport { rank: Rank(self.local().start), reason })
    }
}

impl Assembly for Control {
    fn world(&self) -> usize {
        self.roster.world()
    }

    fn local(&self) -> Range<usize> {
        self.roster.processes[self.process].ranks.clone()
    }

    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError> {
        assert!(self.local().contains(&rank.0), "{rank} is not of this process");
        if self.is_leader() {
            self.shared.board.give(topic, rank, value);
            return Ok(());
        }
        self.check_len(topic, &value)?;
        self.shared.reach_leader()?;
        self.shared.request(Request::Give { topic: topic.to_owned(), rank: rank.0, value });
        Ok(())
    }

    fn given(&self, topic: &str) -> usize {
        self.shared.board.given(topic)
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.shared.board.collect(topic, ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.check_len(topic, &value)?;
        self.shared.reach_leader()?;
        self.shared.board.announce(topic, value.clone());
        self.shared.request(Request::Announce { topic: topic.to_owned(), value });
        Ok(())
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.shared.board.hear(topic, limit)
    }

    fn fail(&self, rank: Rank, kind: FailureKind, cause: String) {
        let last_call = self.shared.last_call(Some(rank));
        Control::fail(self, Failure { rank: Some(rank), cause, kind, last_call });
    }

    fn give_up(&self, topic: &str) {
        self.shared.board.give_up(topic);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.abandon();
        // It panics only with a bug of ours, which was reported then.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests;
