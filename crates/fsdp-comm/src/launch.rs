//! The launcher contract: how the ranks of a world are started.
//!
//! A trainer does not know whether its ranks are threads or processes, nor what memory they use. It hands the code of
//! one rank to a launcher, which runs it once per rank, each with its own [`Seat`].

use std::fmt;
use std::sync::Arc;

use fsdp_core::comm::{Comm, CommError};
use fsdp_core::{Error, Memory, Rank};

use crate::assembly::{Assembly, InMemoryAssembly};

/// The memory and communicators with which a rank starts.
pub struct Seat<M: Memory> {
    /// The rank.
    pub rank: Rank,
    /// The memory of its device.
    pub memory: Arc<M>,
    /// A communicator of the whole world for all-gathers.
    pub gathers: Comm<M>,
    /// A communicator of the whole world for reductions.
    pub reductions: Comm<M>,
}

/// Creates the memory of a rank, given the rank and the world size.
pub type MakeMemory<M> = dyn Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync;

/// The failure of a launch.
#[derive(Debug)]
pub struct LaunchFailure<E> {
    /// The first rank that failed.
    pub rank: Rank,
    /// Why it failed.
    pub reason: FailureReason<E>,
}

/// How a rank failed.
#[derive(Debug)]
pub enum FailureReason<E> {
    /// It returned an error.
    Error(E),
    /// It panicked with this message.
    Panic(String),
    /// It reported no error itself, but its communication failed: it never joined a collective, or dropped one.
    Comm(CommError),
    /// Its thread or process could not be started.
    Spawn(std::io::Error),
    /// Its device or its communicators could not be set up.
    Setup(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: fmt::Display> fmt::Display for FailureReason<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureReason::Error(error) => error.fmt(f),
            FailureReason::Panic(message) => write!(f, "panicked: {message}"),
            FailureReason::Comm(error) => error.fmt(f),
            FailureReason::Spawn(error) => write!(f, "its thread could not be started: {error}"),
            FailureReason::Setup(error) => error.fmt(f),
        }
    }
}

/// Starts the ranks of a world.
pub trait Launcher {
    /// The memory of every rank.
    type Memory: Memory;

    /// Number of ranks, in a world of `world` ranks, that share the host memory of this machine.
    fn ranks_on_machine(&self, world: usize) -> usize {
        world
    }

    /// The assembly of the next world, which will have `world` ranks.
    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        Arc::new(InMemoryAssembly::new(world))
    }

    /// Runs `body` on those ranks of a world of `world` ranks that this process holds; returns their results in rank
    /// order.
    ///
    /// # Errors
    /// [`LaunchFailure`] of the rank that failed first; no rank is left running.
    fn launch<T: Send, E: Send + std::fmt::Debug + std::fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<Self::Memory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>>;
}
