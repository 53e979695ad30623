//! Communication between the processes that examine themselves. Each is represented by one rank.

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::assembly::{Assembly, InMemoryAssembly};
use fsdp_core::{Error, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cluster::Team;
use crate::error::CliError;

/// How long processes wait for each other. A failed process ends all waits at once.
const TIMEOUT: Duration = Duration::from_secs(600);

const SAME_PROGRAM: &str = "all processes run the same program";

/// All processes, possibly only this one.
pub(super) struct ProcessGroup {
    assembly: Arc<dyn Assembly>,
}

impl ProcessGroup {
    /// The processes of a team.
    pub(super) fn of(team: Option<Team<'_>>) -> Self {
        let alone = || Arc::new(InMemoryAssembly::new(1)) as Arc<dyn Assembly>;
        Self { assembly: team.map_or_else(alone, |team| team.cluster.assembly()) }
    }

    /// The index of this process.
    pub(super) fn process(&self) -> usize {
        self.assembly.local().start
    }

    /// Gathers what all processes say, in process order; `Some` in the first process.
    ///
    /// # Errors
    /// [`CliError::NoAnswer`].
    pub(super) fn gather<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
    ) -> Result<Option<Vec<T>>, CliError> {
        let bytes = serde_json::to_vec(value).expect("values have a JSON form");
        self.assembly.give(topic, Rank(self.process()), bytes).map_err(Error::from)?;
        if !self.assembly.is_leader() {
            return Ok(None);
        }
        let all = self.assembly.collect(topic, self.assembly.world(), TIMEOUT)?;
        Ok(Some(all.iter().map(|bytes| serde_json::from_slice(bytes).expect(SAME_PROGRAM)).collect()))
    }

    /// Broadcasts what the first process says, which passes `Some`.
    ///
    /// # Errors
    /// [`CliError::NoAnswer`].
    pub(super) fn share<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: Option<T>,
    ) -> Result<T, CliError> {
        if let Some(value) = value {
            let bytes = serde_json::to_vec(&value).expect("values have a JSON form");
            self.assembly.announce(topic, bytes).map_err(Error::from)?;
        }
        Ok(serde_json::from_slice(&self.assembly.hear(topic, TIMEOUT)?).expect(SAME_PROGRAM))
    }

    /// A barrier of all processes.
    ///
    /// # Errors
    /// [`CliError::NoAnswer`].
    pub(super) fn barrier(&self, topic: &str) -> Result<(), CliError> {
        let met = self.gather(topic, &())?.map(|_| ());
        self.share(topic, met)
    }
}
