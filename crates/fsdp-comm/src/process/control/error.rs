//! Errors of joining a world.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fsdp_core::FailureKind;

use crate::assembly::join;
use crate::auth::AuthError;
use crate::process::message::Refusal;
use crate::process::rendezvous::RendezvousError;

/// Why joining a world failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Some processes did not join the leader in time.
    #[error(
        "process 0 has waited {} s for {}: check their output, or allow more time{}",
        waited.as_secs_f64(),
        join(processes.iter().map(|index| format!("process {index}"))),
        stranger.as_ref().map(|error| format!("; a connection was refused: {error}")).unwrap_or_default()
    )]
    Missing {
        /// The processes that did not join.
        processes: Vec<usize>,
        /// The time limit.
        waited: Duration,
        /// The error of the last connection that failed to authenticate.
        stranger: Option<AuthError>,
    },
    /// A member could not join the leader.
    #[error("process {process} has tried for {:.1} s to join process 0: {obstacle}", waited.as_secs_f64())]
    Follow {
        /// The index of the member.
        process: usize,
        /// How long it has tried.
        waited: Duration,
        /// The last obstacle.
        obstacle: Obstacle,
    },
    /// The rendezvous does not yield the leader's address.
    #[error("cannot find out where process 0 listens: {0}")]
    Rendezvous(#[from] RendezvousError),
    /// The operating system cannot serve the connections.
    #[error("cannot serve connections between processes: {0}")]
    Io(#[from] io::Error),
    /// The operating system cannot provide random numbers.
    #[error("cannot get random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

/// Why an attempt to join failed.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The leader has not published its address yet.
    #[error("it has not published its address yet")]
    NoAddress,
    /// The connection could not be established.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address of the leader.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The ends of the connection could not authenticate each other.
    #[error("{address}: {source}")]
    Auth {
        /// The address of the leader.
        address: SocketAddr,
        /// The cause.
        source: AuthError,
    },
    /// The leader refuses this process.
    #[error("process 0 refuses it: {0}")]
    Refused(Refusal),
    /// The connection was lost before the world began.
    #[error("it lost process 0: {reason}")]
    Dropped {
        /// The cause.
        reason: String,
    },
    /// This process has joined, but others have not.
    #[error("it is connected, but others have not joined yet: check the output of process 0")]
    Others,
}

impl Obstacle {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            Obstacle::Connect { .. } | Obstacle::NoAddress | Obstacle::Dropped { .. } | Obstacle::Others => {
                FailureKind::Temporary
            }
            Obstacle::Auth { source, .. } => source.kind(),
            Obstacle::Refused(refusal) => refusal.kind(),
        }
    }

    /// How long the obstacle may persist before joining fails; `None` if only the join timeout limits it.
    pub(super) fn patience(&self, dead_after: Duration) -> Option<Duration> {
        match self {
            Obstacle::Refused(
                Refusal::Version { .. } | Refusal::Processes { .. } | Refusal::Index { .. },
            ) => Some(Duration::ZERO),
            // The other side may belong to an earlier start of this run, whose death is not noticed sooner.
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
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            JoinError::Missing { .. } | JoinError::Random(_) => FailureKind::Temporary,
            JoinError::Follow { obstacle, .. } => obstacle.kind(),
            JoinError::Rendezvous(error) => error.kind(),
            JoinError::Io(error) => FailureKind::of_io(error),
        }
    }
}
