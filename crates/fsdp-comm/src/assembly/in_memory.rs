//! The assembly of a world whose ranks are threads of one process.

use std::ops::Range;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use super::{Assembly, AssemblyError, TopicStore};

/// The assembly of a world in one process.
pub struct InMemoryAssembly {
    board: TopicStore,
    world: usize,
}

impl InMemoryAssembly {
    /// Creates the assembly of a world of `world` ranks.
    pub fn new(world: usize) -> Self {
        Self { board: TopicStore::default(), world }
    }

    /// Marks a rank as lost: present and future waits for something that it has not given or announced fail with
    /// `error`.
    pub fn lose(&self, rank: Rank, error: CommError) {
        self.board.lose(rank, error);
    }
}

impl Assembly for InMemoryAssembly {
    fn world(&self) -> usize {
        self.world
    }

    fn local(&self) -> Range<usize> {
        0..self.world
    }

    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError> {
        self.board.give(topic, rank, value);
        Ok(())
    }

    fn given(&self, topic: &str) -> usize {
        self.board.given(topic)
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.board.collect(topic, ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.board.announce(topic, value);
        Ok(())
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.board.hear(topic, limit)
    }

    fn give_up(&self, topic: &str) {
        self.board.give_up(topic);
    }
}
