//! Why a process has no part in a world.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fsdp_core::FailureKind;

use crate::assembly::join;
use crate::process::auth::AuthError;
use crate::process::message::Refusal;
use crate::process::rendezvous::RendezvousError;

/// Why a world has not begun.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The leader has waited in vain.
    #[error(
        "process 0 has waited {} s for {}: look at what they say, or give them more time{}",
        waited.as_secs_f64(),
        join(processes.iter().map(|index| format!("process {index}"))),
        stranger.as_ref().map(|error| format!("; of a connection that was refused: {error}")).unwrap_or_default()
    )]
    Missing {
        /// The processes that did not come.
        processes: Vec<usize>,
        /// How long.
        waited: Duration,
        /// What was wrong with the last connection that was not believed.
        stranger: Option<AuthError>,
    },
    /// Another process could not join the leader.
    #[error("process {process} has tried for {:.1} s to join process 0: {obstacle}", waited.as_secs_f64())]
    Follow {
        /// The process.
        process: usize,
        /// How long.
        waited: Duration,
        /// What kept it from joining at last.
        obstacle: Obstacle,
    },
    /// Nobody says where the leader is.
    #[error("can not find out where process 0 listens: {0}")]
    Rendezvous(#[from] RendezvousError),
    /// The operating system failed.
    #[error("can not serve connections between processes: {0}")]
    Io(#[from] io::Error),
    /// The operating system has no random numbers.
    #[error("no random numbers can be had: {0}")]
    Random(#[from] getrandom::Error),
}

/// What keeps a process from joining.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The leader has no address yet.
    #[error("it has not said yet where it listens")]
    NoAddress,
    /// There is no connection.
    #[error("can not connect to {address}: {source}")]
    Connect {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The ends of the connection do not believe each other.
    #[error("{address}: {source}")]
    Auth {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: AuthError,
    },
    /// The leader does not want this process.
    #[error("process 0 refuses it: {0}")]
    Refused(Refusal),
    /// The connection was lost before the world began.
    #[error("it has lost process 0: {reason}")]
    Dropped {
        /// How.
        reason: String,
    },
    /// It has joined, but others have not.
    #[error("it is connected, but others have not joined yet: look at what process 0 says")]
    Others,
}

impl Obstacle {
    /// What this failure calls for.
    pub fn kind(&self) -> FailureKind {
        match self {
            Obstacle::Connect { .. } | Obstacle::NoAddress | Obstacle::Dropped { .. } | Obstacle::Others => {
                FailureKind::Temporary
            }
            Obstacle::Auth { source, .. } => source.kind(),
            Obstacle::Refused(refusal) => refusal.kind(),
        }
    }

    /// How long it may last before there is no hope; `None`: as long as there is time to join.
    pub(super) fn patience(&self, dead_after: Duration) -> Option<Duration> {
        match self {
            Obstacle::Refused(
                Refusal::Version { .. } | Refusal::Processes { .. } | Refusal::Index { .. },
            ) => Some(Duration::ZERO),
            // They may be of an earlier start of this run, which is not noticed to be dead sooner.
            Obstacle::Refused(Refusal::Duplicate { .. })
            | Obstacle::Auth { source: AuthError::Token | AuthError::Version { .. }, .. } => {
                Some(dead_after * 2)
            }
            Obstacle::Refused(Refusal::Started)
            | Obstacle::Auth { .. }
            | Obstacle::NoAddress
            | Obstacle::Connect { .. }
            | Obstacle::Dropped { .. }
            | Obstacle::Others => None,
        }
    }
}

impl JoinError {
    /// What this failure calls for.
    pub fn kind(&self) -> FailureKind {
        match self {
            JoinError::Missing { .. } | JoinError::Random(_) => FailureKind::Temporary,
            JoinError::Follow { obstacle, .. } => obstacle.kind(),
            JoinError::Rendezvous(error) => error.kind(),
            JoinError::Io(error) => FailureKind::of_io(error),
        }
    }
}
