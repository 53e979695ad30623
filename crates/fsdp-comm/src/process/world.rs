//! The processes of a world: which ranks they hold, and the failure that ended the world.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};
use serde::{Deserialize, Serialize};

/// Facts that a process reports when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Name of its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// The addresses at which it accepts data connections.
    pub addresses: Vec<SocketAddr>,
    /// Its CPU model: results are bitwise reproducible only on one model.
    pub cpu_model: String,
    /// The device its ranks compute on.
    pub device: String,
}

/// A process of a world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEntry {
    /// Its ranks.
    pub ranks: Range<usize>,
    /// The facts it reported.
    pub facts: Facts,
}

/// All processes of a world, by index; the same in every process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// A random number chosen by the leader; distinguishes this world from earlier ones of the same run.
    pub generation: u64,
    /// The processes; their ranks are consecutive.
    pub processes: Vec<ProcessEntry>,
}

impl Roster {
    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.processes.last().map_or(0, |process| process.ranks.end)
    }

    /// Index of the process that holds a rank; `None` if there is no such rank.
    pub fn process_of(&self, rank: Rank) -> Option<usize> {
        self.processes.iter().position(|process| process.ranks.contains(&rank.0))
    }
}

/// A failure of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed: one of this process, or another one that it blames. `None` if the process is gone.
    #[serde(with = "number_of_rank")]
    pub rank: Option<Rank>,
    /// The cause.
    pub cause: String,
    /// The kind of the failure.
    #[serde(with = "SerdeKind")]
    pub kind: FailureKind,
    /// The last collective that the rank has begun, if known.
    pub last_call: Option<String>,
}

impl From<&CommError> for Failure {
    /// Attributes the error to the rank that it names, whichever rank has found it.
    fn from(error: &CommError) -> Self {
        let (rank, cause) = match error {
            CommError::PeerFailed { rank, reason }
            | CommError::Aborted { rank, reason, .. }
            | CommError::Transport { rank, reason } => (Some(*rank), reason.clone()),
            CommError::Missing { missing, .. } | CommError::TimedOut { missing, .. } => {
                (missing.first().copied(), error.to_string())
            }
            CommError::Differs { ranks, .. } => (ranks.first().copied(), error.to_string()),
            CommError::Mismatch { rank, .. }
            | CommError::Order { rank, .. }
            | CommError::Length { rank, .. }
            | CommError::Type { rank, .. }
            | CommError::IntegerAverage { rank, .. }
            | CommError::Shared { rank, .. } => (Some(*rank), error.to_string()),
            other => (None, other.to_string()),
        };
        Failure { rank, cause, kind: error.kind(), last_call: None }
    }
}

/// The first failure of a world, which ended it; the same in every process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Index of the process that failed.
    pub process: usize,
    /// Its ranks.
    pub ranks: Range<usize>,
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// The failure.
    pub failure: Failure,
}

impl Verdict {
    /// A verdict on a process of this world.
    pub(super) fn new(roster: &Roster, process: usize, failure: Failure) -> Self {
        let ProcessEntry { ranks, facts } = &roster.processes[process];
        Self { process, ranks: ranks.clone(), host: facts.host.clone(), pid: facts.pid, failure }
    }

    /// A verdict on a process that is gone; the failure is temporary, so another attempt may succeed.
    pub(super) fn of_loss(roster: &Roster, process: usize, cause: String) -> Self {
        let failure = Failure { rank: None, cause, kind: FailureKind::Temporary, last_call: None };
        Self::new(roster, process, failure)
    }

    /// Whether the process is gone without having reported a failure itself.
    pub fn is_loss(&self) -> bool {
        self.failure.rank.is_none()
    }

    /// The error of the operations of other ranks.
    pub fn error(&self) -> CommError {
        let rank = self.failure.rank.unwrap_or(Rank(self.ranks.start));
        CommError::PeerFailed { rank, reason: self.to_string() }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { process, host, pid, failure, .. } = self;
        write!(f, "process {process} (pid {pid} on host {host}): {}", failure.cause)?;
        failure.last_call.iter().try_for_each(|call| write!(f, "; its last collective was {call}"))
    }
}

mod number_of_rank {
    use super::{Deserialize, Rank};

    pub(super) fn serialize<S: serde::Serializer>(rank: &Option<Rank>, to: S) -> Result<S::Ok, S::Error> {
        serde::Serialize::serialize(&rank.map(|rank| rank.0), to)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Rank>, D::Error> {
        Ok(Option::deserialize(from)?.map(Rank))
    }
}

/// [`FailureKind`], for `#[serde(with = ..)]`: core does not depend on serde.
#[derive(Serialize, Deserialize)]
#[serde(remote = "FailureKind")]
pub enum SerdeKind {
    /// See [`FailureKind`].
    Temporary,
    /// See [`FailureKind`].
    Permanent,
    /// See [`FailureKind`].
    Input,
    /// See [`FailureKind`].
    Interrupted,
}

#[cfg(test)]
mod tests;
