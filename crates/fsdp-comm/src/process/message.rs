//! The messages between the leader and the members.

use std::fmt;

use fsdp_core::FailureKind;
use serde::{Deserialize, Serialize};

use super::world::{Facts, Failure, Roster, Verdict};

/// The first message of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Join {
    /// Version of its program.
    pub(super) version: String,
    /// Index of the process.
    pub(super) process: usize,
    /// Number of processes that it expects.
    pub(super) processes: usize,
    /// Number of ranks that it holds.
    pub(super) local_ranks: usize,
    /// A random number that identifies this process among others with the same index. Host and pid do not suffice:
    /// containers may share them.
    pub(super) nonce: u64,
    pub(super) facts: Facts,
}

/// All messages; [`process`](super) documents who sends which and when.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    // From members to the leader.
    Join(Join),
    Ready {
        round: u32,
    },
    Failed(Failure),
    Give {
        topic: String,
        rank: usize,
        #[serde(skip)]
        value: Vec<u8>,
    },
    /// The collective that a rank of the process has begun last. From both sides.
    Calling {
        call: String,
    },
    // From the leader.
    Joined,
    Refused(Refusal),
    Prepare {
        round: u32,
        roster: Roster,
    },
    Go {
        round: u32,
    },
    Verdict(Verdict),
    // From both sides.
    Announce {
        topic: String,
        #[serde(skip)]
        value: Vec<u8>,
    },
    Heartbeat,
    Goodbye,
}

impl Message {
    /// The raw bytes of the value; empty if the message has none.
    pub(super) fn value(&self) -> &[u8] {
        match self {
            Message::Give { value, .. } | Message::Announce { value, .. } => value,
            _ => &[],
        }
    }

    /// The buffer for these bytes; `None` for messages without a value.
    pub(super) fn value_mut(&mut self) -> Option<&mut Vec<u8>> {
        match self {
            Message::Give { value, .. } | Message::Announce { value, .. } => Some(value),
            _ => None,
        }
    }
}

impl fmt::Debug for Message {
    /// The name only; the contents may be long.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Message::Join(_) => "join",
            Message::Ready { .. } => "ready",
            Message::Failed(_) => "failed",
            Message::Give { .. } => "give",
            Message::Calling { .. } => "calling",
            Message::Joined => "joined",
            Message::Refused(_) => "refused",
            Message::Prepare { .. } => "prepare",
            Message::Go { .. } => "go",
            Message::Verdict(_) => "verdict",
            Message::Announce { .. } => "announce",
            Message::Heartbeat => "heartbeat",
            Message::Goodbye => "goodbye",
        })
    }
}

/// Why a leader refuses a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// It runs another version of the program.
    #[error(
        "its program is fsdp {got}, but process 0 runs fsdp {expected}: start the same program everywhere"
    )]
    Version {
        /// The version of the leader.
        expected: String,
        /// The version of the process.
        got: String,
    },
    /// It expects another number of processes.
    #[error(
        "it expects {got} processes, but process 0 expects {expected}: give every process the same number"
    )]
    Processes {
        /// As the leader expects.
        expected: usize,
        /// As the process expects.
        got: usize,
    },
    /// Its index is not below the number of processes.
    #[error("its index is {process}, but there are {processes} processes, counted from 0")]
    Index {
        /// The index.
        process: usize,
        /// The number of processes.
        processes: usize,
    },
    /// Another process with the same index is connected.
    #[error(
        "process {process} has already joined (pid {pid} on host {host}): give every process its own index"
    )]
    Duplicate {
        /// The index.
        process: usize,
        /// The host of that process.
        host: String,
        /// Its process id.
        pid: u32,
    },
    /// The world has begun without it.
    #[error("this run has already begun: the process cannot join before the next start")]
    Started,
}

impl Refusal {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            Refusal::Version { .. }
            | Refusal::Processes { .. }
            | Refusal::Index { .. }
            | Refusal::Duplicate { .. } => FailureKind::Input,
            Refusal::Started => FailureKind::Temporary,
        }
    }
}
