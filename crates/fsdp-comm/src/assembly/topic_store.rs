//! The values given and announced in a process, and the threads that wait for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use fsdp_core::comm::CommError;
use fsdp_core::{Rank, RunClock};

use super::AssemblyError;
use crate::monitor::Monitor;

/// All values of a process, under one lock.
#[derive(Default)]
pub(crate) struct TopicStore {
    state: Monitor<State>,
}

#[derive(Default)]
struct State {
    given: BTreeMap<String, BTreeMap<Rank, Vec<u8>>>,
    announced: BTreeMap<String, Vec<u8>>,
    given_up: BTreeSet<String>,
    /// Ranks that will give nothing more, with the reason.
    lost: BTreeMap<Rank, CommError>,
}

impl TopicStore {
    /// Stores a value of a rank; a second value is ignored.
    pub(crate) fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) {
        self.state.lock().given.entry(topic.to_owned()).or_default().entry(rank).or_insert(value);
        self.state.notify();
    }

    /// Number of ranks that have given to a topic that has not been collected.
    pub(crate) fn given(&self, topic: &str) -> usize {
        self.state.lock().given.get(topic).map_or(0, BTreeMap::len)
    }

    /// Stores an announcement; a second one is ignored.
    pub(crate) fn announce(&self, topic: &str, value: Vec<u8>) {
        self.state.lock().announced.entry(topic.to_owned()).or_insert(value);
        self.state.notify();
    }

    /// Ends all waiting for a topic.
    pub(crate) fn give_up(&self, topic: &str) {
        self.state.lock().given_up.insert(topic.to_owned());
        self.state.notify();
    }

    /// Marks a rank as lost: it will give nothing more, and waiting for it fails with `error`.
    pub(crate) fn lose(&self, rank: Rank, error: CommError) {
        self.state.lock().lost.entry(rank).or_insert(error);
        self.state.notify();
    }

    /// See [`Assembly::collect`](super::Assembly::collect).
    pub(crate) fn collect(
        &self,
        topic: &str,
        ranks: usize,
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>, AssemblyError> {
        let missing = |state: &State| -> Vec<Rank> {
            let given = state.given.get(topic);
            let has_given = |rank: &Rank| given.is_some_and(|given| given.contains_key(rank));
            (0..ranks).map(Rank).filter(|rank| !has_given(rank)).collect()
        };
        let mut state = self.wait(topic, limit, missing)?;
        Ok(state.given.remove(topic).unwrap_or_default().into_values().take(ranks).collect())
    }

    /// See [`Assembly::hear`](super::Assembly::hear).
    pub(crate) fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        let missing =
            |state: &State| if state.announced.contains_key(topic) { Vec::new() } else { vec![Rank(0)] };
        Ok(self.wait(topic, limit, missing)?.announced[topic].clone())
    }

    /// Waits until no rank is missing.
    fn wait(
        &self,
        topic: &str,
        limit: Duration,
        missing: impl Fn(&State) -> Vec<Rank>,
    ) -> Result<MutexGuard<'_, State>, AssemblyError> {
        let begin = Instant::now();
        let mut clock = RunClock::new(limit);
        let mut state = self.state.lock();
        loop {
            let ranks = missing(&state);
            if ranks.is_empty() {
                return Ok(state);
            }
            if let Some(error) = ranks.iter().find_map(|rank| state.lost.get(rank)) {
                return Err(error.clone().into());
            }
            if state.given_up.contains(topic) {
                return Err(AssemblyError::GivenUp);
            }
            if clock.at(begin.elapsed()) >= limit {
                return Err(AssemblyError::Late { ranks, limit });
            }
            state = self.state.wait(state, clock.interval());
        }
    }
}
