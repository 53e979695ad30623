//! Measures the links between nodes, and the differences of their clocks, by messages over the links of a run.
//!
//! Each node is represented by one process. Pairs are measured in rounds, as in a tournament: each node has one partner
//! per round, so that its interface serves one measurement at a time and a large cluster does not take hours.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::{Exchanged, Header, Incoming, Link, Outgoing};
use fsdp_core::comm::CommError;
use fsdp_core::{Error, Rank};
use serde::{Deserialize, Serialize};

use super::process_group::ProcessGroup;
use crate::error::CliError;

/// Maximum partners of a node: all others, up to 16 nodes.
pub(super) const PARTNERS_MAX: usize = 15;

const HEADER: Header = [1; 31];

/// Round trips that only warm up the connection, and those that count.
const WARM_UP: usize = 5;
const ROUND_TRIPS: usize = 50;

/// Bytes of a bandwidth message, and the maximum number of these.
const BULK: usize = 4 << 20;
const BULKS_MAX: f64 = 32.0;

/// Approximate seconds of a bandwidth measurement.
const BULK_TIME: f64 = 0.15;

/// The measurements between two nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    /// The indices of the nodes, the lower one first.
    pub(super) nodes: [usize; 2],
    /// Half of the median round trip of a short message, in microseconds.
    pub(super) latency_us: f64,
    /// Bandwidth from the first to the second, and back, in GB/s.
    pub(super) gb_per_s: [f64; 2],
}

/// The difference between a node's clock and the first node's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Clock {
    /// How far it is ahead, in milliseconds.
    pub(super) ahead_ms: f64,
    /// The maximum error: half of the shortest round trip.
    pub(super) uncertainty_ms: f64,
}

/// This process's end of the links to all others.
pub(super) struct LinkProbe {
    link: Box<dyn Link>,
}

impl LinkProbe {
    /// Opens the links of a process; each process of the cluster has one rank.
    pub(super) fn new(cluster: &Cluster) -> Self {
        Self { link: cluster.link(0, Rank(cluster.place().process)) }
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<(), CliError> {
        let failed = |peer, reason: &str| {
            let reason = reason.to_owned();
            CliError::from(Error::from(CommError::PeerFailed { rank: Rank(peer), reason }))
        };
        let peer = outgoing
            .as_ref()
            .map_or_else(|| incoming.as_ref().map(|incoming| incoming.from), |outgoing| Some(outgoing.to));
        match self.link.exchange(outgoing, incoming).map_err(Error::from)? {
            Exchanged::Done => Ok(()),
            Exchanged::Late { peer } => Err(failed(peer, "it did not answer in time")),
            Exchanged::Differs { .. } => {
                Err(failed(peer.unwrap_or_default(), "it sent an unexpected message"))
            }
        }
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<(), CliError> {
        self.exchange(Some(Outgoing { to, header: &HEADER, parts: &[data] }), None)
    }

    fn receive(&mut self, from: usize, data: &mut [u8]) -> Result<(), CliError> {
        self.exchange(None, Some(Incoming { from, header: &HEADER, parts: &mut [data] }))
    }

    fn send_number(&mut self, to: usize, number: u64) -> Result<(), CliError> {
        self.send(to, &number.to_le_bytes())
    }

    fn receive_number(&mut self, from: usize) -> Result<u64, CliError> {
        let mut bytes = [0; 8];
        self.receive(from, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Sends a number and receives the peer's clock; returns the round trip time and the clock.
    fn ping(&mut self, peer: usize) -> Result<(Duration, u64), CliError> {
        let begin = Instant::now();
        self.send_number(peer, 0)?;
        let clock = self.receive_number(peer)?;
        Ok((begin.elapsed(), clock))
    }

    /// Answers all calls of [`LinkProbe::ping`] by a peer.
    fn answer(&mut self, peer: usize) -> Result<(), CliError> {
        (0..WARM_UP + ROUND_TRIPS).try_for_each(|_| {
            self.receive_number(peer)?;
            self.send_number(peer, now())
        })
    }

    fn send_bulk(&mut self, to: usize, count: u64) -> Result<(), CliError> {
        let bulk = vec![0; BULK];
        (0..count).try_for_each(|_| self.send(to, &bulk))
    }

    fn receive_bulk(&mut self, from: usize, count: u64) -> Result<(), CliError> {
        let mut bulk = vec![0; BULK];
        (0..count).try_for_each(|_| self.receive(from, &mut bulk))
    }

    /// Measures latency and bandwidth with a peer, which [serves](LinkProbe::serve).
    fn measure(&mut self, peer: usize, nodes: [usize; 2]) -> Result<Pair, CliError> {
        let mut trips = Vec::new();
        for trip in 0..WARM_UP + ROUND_TRIPS {
            let (took, _) = self.ping(peer)?;
            trips.extend((trip >= WARM_UP).then_some(took));
        }
        trips.sort_unstable();
        let latency_us = trips[trips.len() / 2].as_secs_f64() * 1e6 / 2.0;
        // A single message determines how many to send.
        let mut transfer = |count: u64| -> Result<[f64; 2], CliError> {
            let begin = Instant::now();
            self.send_number(peer, count)?;
            self.send_bulk(peer, count)?;
            self.receive_number(peer)?;
            let send_seconds = begin.elapsed().as_secs_f64();
            let begin = Instant::now();
            self.send_number(peer, count)?;
            self.receive_bulk(peer, count)?;
            Ok([send_seconds, begin.elapsed().as_secs_f64()])
        };
        let [send_seconds, _] = transfer(1)?;
        let count = (BULK_TIME / send_seconds).clamp(1.0, BULKS_MAX).floor();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is between 1 and 32")]
        let took = transfer(count as u64)?;
        #[expect(clippy::cast_precision_loss, reason = "a few MiB")]
        let gb_per_s = took.map(|seconds| count * BULK as f64 / seconds / 1e9);
        Ok(Pair { nodes, latency_us, gb_per_s })
    }

    /// The other end of [`LinkProbe::measure`].
    fn serve(&mut self, peer: usize) -> Result<(), CliError> {
        self.answer(peer)?;
        for _ in 0..2 {
            let count = self.receive_number(peer)?;
            self.receive_bulk(peer, count)?;
            self.send_number(peer, 0)?;
            let count = self.receive_number(peer)?;
            self.send_bulk(peer, count)?;
        }
        Ok(())
    }

    /// Measures between nodes, each given by the index of its process. All processes must call it; the first one
    /// returns the measurements.
    ///
    /// # Errors
    /// [`CliError`]: a process does not answer.
    pub(super) fn pairs(
        &mut self,
        group: &ProcessGroup,
        nodes: &[usize],
    ) -> Result<Option<Vec<Pair>>, CliError> {
        let local_node = nodes.iter().position(|&process| process == group.process());
        let mut measured = Vec::new();
        for (index, round) in rounds(nodes.len()).into_iter().take(PARTNERS_MAX).enumerate() {
            let pair = round.into_iter().find(|pair| pair.iter().any(|&node| Some(node) == local_node));
            match pair {
                Some([first, second]) if Some(first) == local_node => {
                    measured.push(self.measure(nodes[second], [first, second])?);
                }
                Some([first, _]) => self.serve(nodes[first])?,
                None => {}
            }
            group.barrier(&format!("round {index}"))?;
        }
        let all = group.gather("pairs", &measured)?;
        Ok(all.map(|all| {
            let mut pairs: Vec<Pair> = all.into_iter().flatten().collect();
            pairs.sort_by_key(|pair| pair.nodes);
            pairs
        }))
    }

    /// Measures how the nodes' clocks differ from the first one's, in the first process; all others answer. They take
    /// turns, since a clock is known only as precisely as the round trip is short.
    ///
    /// # Errors
    /// Those of [`LinkProbe::pairs`].
    pub(super) fn clocks(&mut self, group: &ProcessGroup, nodes: &[usize]) -> Result<Vec<Clock>, CliError> {
        if group.process() > 0 {
            if nodes.contains(&group.process()) {
                self.answer(0)?;
            }
            return Ok(Vec::new());
        }
        let mut clocks = vec![Clock { ahead_ms: 0.0, uncertainty_ms: 0.0 }];
        for &process in &nodes[1..] {
            let mut best: Option<(Duration, Clock)> = None;
            for _ in 0..WARM_UP + ROUND_TRIPS {
                let before = now();
                let (took, peer_time) = self.ping(process)?;
                if best.is_none_or(|(shortest, _)| took < shortest) {
                    best = Some((took, clock(before, took, peer_time)));
                }
            }
            clocks.extend(best.map(|(_, clock)| clock));
        }
        Ok(clocks)
    }
}

/// Derives a clock difference from a round trip, during which the clock was read.
#[expect(clippy::cast_precision_loss, reason = "differences of milliseconds")]
fn clock(before: u64, took: Duration, peer_time: u64) -> Clock {
    let half = took.as_secs_f64() / 2.0;
    let difference = peer_time as i128 - before as i128;
    Clock { ahead_ms: difference as f64 / 1e6 - half * 1e3, uncertainty_ms: half * 1e3 }
}

/// Nanoseconds since 1970, by this node's clock.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Round-robin rounds in which each node meets each other one once, one at a time: one node stays, the others rotate.
fn rounds(nodes: usize) -> Vec<Vec<[usize; 2]>> {
    let players = nodes + nodes % 2;
    let others = players.saturating_sub(1);
    let pair = |a: usize, b: usize| [a.min(b), a.max(b)];
    let round = |round: usize| {
        let moving = (1..players / 2).map(|k| pair((round + k) % others, (round + others - k) % others));
        // With an odd number of nodes, the partner of the missing one rests.
        std::iter::once(pair(others, round)).chain(moving).filter(|pair| pair[1] < nodes).collect()
    };
    (0..others).map(round).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rounds_have_disjoint_pairs_and_cover_each_pair_once() {
        assert!(rounds(0).concat().is_empty() && rounds(1).concat().is_empty());
        for nodes in 2..20 {
            let rounds = rounds(nodes);
            for round in &rounds {
                let met: BTreeSet<usize> = round.iter().flatten().copied().collect();
                assert_eq!(met.len(), 2 * round.len(), "{round:?}");
            }
            let met: BTreeSet<[usize; 2]> = rounds.concat().into_iter().collect();
            assert_eq!((met.len(), rounds.concat().len()), (nodes * (nodes - 1) / 2, met.len()));
        }
    }

    #[test]
    fn clock_uncertainty_is_half_round_trip() {
        let clock = clock(1_000_000_000, Duration::from_millis(4), 1_005_000_000);
        assert_eq!(clock, Clock { ahead_ms: 3.0, uncertainty_ms: 2.0 });
    }
}
