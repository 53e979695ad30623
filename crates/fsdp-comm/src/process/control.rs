//! The control plane of a process: the [protocol](super) over TCP.
//!
//! One thread serves all connections of a process without blocking, so a slow connection never delays the others, and a
//! leader of hundreds of processes has as many threads as a leader of two. New connections reach this thread only after
//! they have proven that they know the token.

mod connection;
mod driver;
mod error;
mod join;
mod shared;

use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};

use super::frame::VALUE_MAX;
use super::protocol::{Machine, Request};
use super::rendezvous::RendezvousError;
use super::world::{Failure, Roster, Verdict};
use crate::assembly::{Assembly, AssemblyError};
use crate::auth::gate::no_thread;
use crate::flight::FlightRecorder;
use crate::link::Alarm;

use driver::Driver;
use shared::Shared;

pub use error::{JoinError, Obstacle};
pub use join::ControlOptions;

/// One process's part in a world that has begun. To the other processes, dropping it without [`Control::leave`] looks
/// like the death of this process.
pub struct Control {
    shared: Arc<Shared>,
    roster: Roster,
    process: usize,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Runs on process 0: waits at `listener` until all other processes have joined. Later arrivals are refused.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn lead(listener: TcpListener, options: ControlOptions) -> Result<Arc<Self>, JoinError> {
        let process = options.process;
        join::lead(listener, options).and_then(|(driver, roster)| Self::begin(driver, roster, process))
    }

    /// Runs on all other processes: joins process 0. `leader` returns its addresses and is called again before each
    /// attempt: process 0 may start later, or restart.
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
        let name = format!("fsdp-control-{process}");
        let thread = std::thread::Builder::new().name(name.clone()).spawn(move || driver.run());
        let thread = Some(thread.map_err(|error| no_thread(&name, &error))?);
        Ok(Arc::new(Control { shared, roster, process, thread }))
    }

    /// All processes of the world.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The alarm of this process. A raised error is visible here at once and is reported to the leader; once there is a
    /// verdict, [`Alarm::raised`] returns that instead.
    pub fn alarm(&self) -> Arc<dyn Alarm> {
        self.shared.clone()
    }

    /// From now on, reports to the other processes the last collective that this process has begun, according to
    /// `recorder`.
    pub fn record(&self, recorder: Arc<FlightRecorder>) {
        self.shared.record(recorder);
    }

    /// Reports a failure of this process: an [`Alarm::raise`] with more details.
    pub fn fail(&self, failure: Failure) {
        let rank = failure.rank.unwrap_or(Rank(self.local().start));
        self.shared.fail(CommError::PeerFailed { rank, reason: failure.cause.clone() }, failure);
    }

    /// The verdict that ended the world, if any.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shared.verdict()
    }

    /// Calls `hook` as soon as there is a verdict: immediately if there already is one, otherwise on the thread of the
    /// control plane, which it must not block. It must not own this control plane.
    pub fn on_verdict(&self, hook: Box<dyn FnOnce(&Verdict) + Send>) {
        self.shared.on_verdict(hook);
    }

    /// Leaves the world, after success or a reported failure. Waits until the others know; the leader waits until they
    /// have left, for at most a minute, or a few seconds if the world has failed.
    pub fn leave(&self) {
        self.shared.request(Request::Leave);
        self.shared.wait_until_left();
    }

    /// Checks that a value fits into a message.
    fn check_len(&self, topic: &str, value: &[u8]) -> Result<(), CommError> {
        if value.len() <= VALUE_MAX {
            return Ok(());
        }
        let reason =
            format!("{topic:?} has {} bytes; processes can exchange at most {VALUE_MAX}", value.len());
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
            self.shared.topics.give(topic, rank, value);
            return Ok(());
        }
        self.check_len(topic, &value)?;
        self.shared.check_leader()?;
        self.shared.request(Request::Give { topic: topic.to_owned(), rank: rank.0, value });
        Ok(())
    }

    fn given(&self, topic: &str) -> usize {
        self.shared.topics.given(topic)
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.shared.topics.collect(topic, ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.check_len(topic, &value)?;
        self.shared.check_leader()?;
        self.shared.topics.announce(topic, value.clone());
        self.shared.request(Request::Announce { topic: topic.to_owned(), value });
        Ok(())
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.shared.topics.hear(topic, limit)
    }

    fn fail(&self, rank: Rank, kind: FailureKind, cause: String) {
        let last_call = self.shared.last_call(Some(rank));
        Control::fail(self, Failure { rank: Some(rank), cause, kind, last_call });
    }

    fn give_up(&self, topic: &str) {
        self.shared.topics.give_up(topic);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.abandon();
        // It panics only on an internal bug, which was reported at that time.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests;
