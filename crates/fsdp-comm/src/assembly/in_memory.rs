//! The assembly of a world whose ranks are threads of one process.

use std::ops::Range;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use super::{Assembly, AssemblyError, TopicStore};

/// The assembly of a world in one process.
pub struct InMemoryAssembly {
    topics: TopicStore,
    world: usize,
}

impl InMemoryAssembly {
    /// Creates the assembly of a world of `world` ranks.
    pub fn new(world: usize) -> Self {
        Self { topics: TopicStore::default(), world }
    }

    /// Marks a rank as lost: present and future waits for something that it has not given or announced fail with
    /// `error`.
    pub fn lose(&self, rank: Rank, error: CommError) {
        self.topics.lose(rank, error);
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
        self.topics.give(topic, rank, value);
        Ok(())
    }

    fn given(&self, topic: &str) -> usize {
        self.topics.given(topic)
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.topics.collect(topic, ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.topics.announce(topic, value);
        Ok(())
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.topics.hear(topic, limit)
    }

    fn give_up(&self, topic: &str) {
        self.topics.give_up(topic);
    }
}
