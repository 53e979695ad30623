//! The launcher of ranks as threads.

use std::fmt;
use std::sync::Arc;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::{Error, Memory, Rank};

use crate::failure::RankFailure;
use crate::world::{World, WorldOptions};

/// Makes the memory of a rank in a world of a size.
type MakeMemory<M> = dyn Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync;

/// Launches every rank as a thread of this process.
pub struct Threads<M> {
    options: WorldOptions,
    memory: Box<MakeMemory<M>>,
}

impl<M: Memory> Threads<M> {
    /// Threads with `options` (whose number of ranks is replaced by each launch's world) and memory made by
    /// `memory(rank, world)`, each in its rank's thread: a rank that gets none was not set up.
    pub fn new(
        options: WorldOptions,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self { options, memory: Box::new(memory) }
    }
}

impl<M: Memory> Launcher for Threads<M> {
    type Memory = M;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let options = WorldOptions { ranks: world, ..self.options.clone() };
        let outcome = World::run(options, |mut context| {
            let rank = context.rank();
            let memory = (self.memory)(rank, world).map_err(|error| FailureReason::Setup(error.into()))?;
            let seat = Seat { rank, memory, gathers: context.comm(), reductions: context.comm() };
            body(seat).map_err(FailureReason::Error)
        });
        outcome.map_err(|error| LaunchFailure {
            rank: error.rank,
            reason: match *error.cause {
                RankFailure::Error(reason) => reason,
                RankFailure::Panic(message) => FailureReason::Panic(message),
                RankFailure::Comm(error) => FailureReason::Comm(error),
                RankFailure::Spawn(error) => FailureReason::Spawn(error),
            },
        })
    }
}
