//! What processes know of each other: who holds which ranks, and what ended their world.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};
use serde::{Deserialize, Serialize};

/// What a process says of itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Name of its machine.
    pub host: String,
    /// Number of the process there.
    pub pid: u32,
    /// Where it listens for connections that carry data.
    pub addresses: Vec<SocketAddr>,
    /// Model of its CPU: bits are promised on one model.
    pub cpu_model: String,
    /// What its ranks compute on.
    pub device: String,
}

/// A process of a world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEntry {
    /// Its ranks.
    pub ranks: Range<usize>,
    /// What it said of itself.
    pub facts: Facts,
}

/// All processes of a world, by their index. Every process has the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// A random number of the leader, which tells this world from earlier ones of the same run.
    pub generation: u64,
    /// The processes; their ranks follow each other.
    pub processes: Vec<ProcessEntry>,
}

impl Roster {
    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.processes.last().map_or(0, |process| process.ranks.end)
    }

    /// Index of the process that holds a rank.
    pub fn process_of(&self, rank: Rank) -> Option<usize> {
        self.processes.iter().position(|process| process.ranks.contains(&rank.0))
    }
}

/// What failed in a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed: one of this process, or another one that it blames. `None`: the process is gone.
    #[serde(with = "number_of_rank")]
    pub rank: Option<Rank>,
    /// Why.
    pub cause: String,
    /// What it calls for.
    #[serde(with = "SerdeKind")]
    pub kind: FailureKind,
    /// The collective that the rank began last, if that is known.
    pub last_call: Option<String>,
}

impl From<&CommError> for Failure {
    /// A failure that names a rank is that rank's, whoever has found it.
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

/// What ended a world: its first failure. There is one, the same in every process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Index of the process that failed.
    pub process: usize,
    /// Its ranks.
    pub ranks: Range<usize>,
    /// Its machine.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// How it failed.
    pub failure: Failure,
}

impl Verdict {
    /// A verdict on a process of this world.
    pub(super) fn new(roster: &Roster, process: usize, failure: Failure) -> Self {
        let ProcessEntry { ranks, facts } = &roster.processes[process];
        Self { process, ranks: ranks.clone(), host: facts.host.clone(), pid: facts.pid, failure }
    }

    /// A verdict on a process that is gone, which another try may find in good health.
    pub(super) fn of_loss(roster: &Roster, process: usize, cause: String) -> Self {
        let failure = Failure { rank: None, cause, kind: FailureKind::Temporary, last_call: None };
        Self::new(roster, process, failure)
    }

    /// Whether the process is gone, and has told nothing itself.
    pub fn is_loss(&self) -> bool {
        self.failure.rank.is_none()
    }

    /// What operations of other ranks fail with.
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

/// [`FailureKind`], for `#[serde(with = ..)]`: core knows nothing of files and messages.
#[derive(Serialize, Deserialize)]
#[serde(remote = "FailureKind")]
pub enum SerdeKind {
    /// As of [`FailureKind`].
    Temporary,
    /// As of [`FailureKind`].
    Permanent,
    /// As of [`FailureKind`].
    Input,
    /// As of [`FailureKind`].
    Interrupted,
}

#[cfg(test)]
mod tests;
