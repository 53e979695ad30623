//! Links over TCP, for ranks in different processes.
//!
//! Every channel has its own connection between two ranks, established on first use: collectives of different
//! communicators do not wait for each other, the kernel's buffers receive while a rank computes, and bytes move
//! directly from and to the slices of a collective. The rank with the higher number connects.
//!
//! A connection begins with the proof that both ends know the token of this world (see [`auth`](crate::auth));
//! then the connecting rank names the channel. A message is its length without the header (8 bytes, little-endian), the
//! header, and the data. Between processes that can read each other's memory, a long message carries only the addresses
//! of its data (`direct.rs`).
//!
//! When a connection ends, the peer has failed, or has ended because another rank did. The component that watches the
//! processes knows the first failure, so its alarm gets a moment to report it before the peer is blamed. The end of a
//! rank that was never connected is noticed only by that component.

mod acceptor;
mod connection;
mod direct;
mod exchange;
mod memory;
mod message;
mod shared;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::link::{Alarm, Exchanged, Incoming, Link, Outgoing, place};

pub use acceptor::TcpAcceptor;
pub use shared::TcpWorld;

use connection::Connection;
use shared::Shared;

/// Shorter messages pass through the socket faster than the acknowledgment of a direct read returns.
pub(crate) const DIRECT_FROM: u64 = 32 << 10;

/// The connections of the ranks of one process to all others.
pub struct TcpLinks {
    shared: Arc<Shared>,
}

impl TcpLinks {
    /// Creates the link to all ranks, on `channel`, of a `rank` that this process holds. Different channels are
    /// independent.
    pub fn link(&self, channel: u64, rank: Rank) -> Box<dyn Link> {
        let members = (0..self.shared.world.addresses.len()).map(Rank).collect();
        Box::new(TcpLink::new(self.shared.clone(), channel, rank, members))
    }
}

/// One rank's ends of the connections of a channel.
struct TcpLink {
    shared: Arc<Shared>,
    channel: u64,
    rank: usize,
    members: Arc<[Rank]>,
    /// By member; `None` before first use.
    connections: Vec<Option<Connection>>,
}

impl TcpLink {
    fn new(shared: Arc<Shared>, channel: u64, rank: Rank, members: Arc<[Rank]>) -> Self {
        shared.channels[rank.0].fetch_max(channel + 1, Ordering::Relaxed);
        let rank = place(rank, &members);
        let connections = members.iter().map(|_| None).collect();
        Self { shared, channel, rank, members, connections }
    }

    fn connect(&mut self, peer: usize) -> Result<bool, CommError> {
        if self.connections[peer].is_some() {
            return Ok(true);
        }
        let (rank, peer_rank) = (self.members[self.rank], self.members[peer]);
        let connection = self.shared.connect(self.channel, rank, peer_rank);
        self.connections[peer] = connection.map_err(|error| self.blame(peer, &error))?;
        Ok(self.connections[peer].is_some())
    }

    /// The first failure of the world, or else the failure of the connection to a member.
    fn blame(&self, peer: usize, error: &std::io::Error) -> CommError {
        let rank = self.members[peer];
        let reason = match error.kind() {
            std::io::ErrorKind::UnexpectedEof => "it has closed its links".to_owned(),
            _ => format!("the connection to it failed: {error}"),
        };
        connection::first_failure(&*self.shared.world.alarm).unwrap_or(CommError::PeerFailed { rank, reason })
    }
}

impl Link for TcpLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[Rank] {
        &self.members
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        let peers =
            [outgoing.as_ref().map(|message| message.to), incoming.as_ref().map(|message| message.from)];
        for peer in peers.into_iter().flatten() {
            if !self.connect(peer)? {
                return Ok(Exchanged::Late { peer });
            }
        }
        let connection = |peer: usize| self.connections[peer].as_ref().expect("it was just connected");
        let outgoing = outgoing.map(|message| (connection(message.to), message));
        let incoming = incoming.map(|message| (connection(message.from), message));
        let world = &self.shared.world;
        let blame = |peer, error: &_| self.blame(peer, error);
        exchange::exchange(outgoing, incoming, &*world.alarm, world.timeout, &blame)
    }

    fn unused_channel(&self) -> u64 {
        self.shared.channels[self.members[self.rank].0].load(Ordering::Relaxed)
    }

    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link> {
        Box::new(TcpLink::new(self.shared.clone(), channel, self.members[self.rank], members))
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.shared.world.alarm.clone()
    }
}

#[cfg(test)]
mod tests;
