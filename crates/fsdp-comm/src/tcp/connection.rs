//! Establishes a connection of a channel between two ranks: the later rank connects to the port of the earlier one.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use fsdp_core::comm::CommError;
use fsdp_core::{Rank, RunClock};

use super::Shared;
use super::direct::negotiate;
use super::memory::Memory;
use crate::link::Alarm;
use crate::process::auth::{Side, authenticate_within};

/// Time limit for authenticating a connection.
pub(super) const PROOF_LIMIT: Duration = Duration::from_secs(10);

/// How long to wait for the world's first failure before blaming the peer whose connection has ended.
const BLAME_AFTER: Duration = Duration::from_secs(2);

/// Pause between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An authenticated connection.
#[derive(Debug)]
pub(super) struct Connection {
    /// In non-blocking mode.
    pub(super) stream: TcpStream,
    /// The memory of the process at the other end, if each can read the other's.
    pub(super) memory: Option<Memory>,
    /// Minimum length in bytes of messages that are read from that memory.
    direct_from: u64,
}

/// The name of a connection, sent by its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    channel: u64,
    caller: u64,
    answerer: u64,
}

impl Name {
    fn to_bytes(self) -> [u8; 24] {
        let words = [self.channel, self.caller, self.answerer].map(u64::to_le_bytes);
        bytemuck::cast(words)
    }

    /// Reads the name of an authenticated connection.
    pub(super) fn read(mut stream: &TcpStream) -> io::Result<Self> {
        let mut bytes = [0; 24];
        stream.read_exact(&mut bytes)?;
        let words: [[u8; 8]; 3] = bytemuck::cast(bytes);
        let [channel, caller, answerer] = words.map(u64::from_le_bytes);
        Ok(Self { channel, caller, answerer })
    }
}

/// The purpose that data connections authenticate for.
pub(super) fn purpose(generation: u64) -> Vec<u8> {
    [b"data ".as_slice(), &generation.to_le_bytes()].concat()
}

impl Connection {
    /// Performs the last step of both ends before messages are exchanged.
    pub(super) fn open(stream: TcpStream, direct_from: Option<u64>) -> io::Result<Self> {
        stream.set_read_timeout(Some(PROOF_LIMIT))?;
        let memory = negotiate(&stream, direct_from.is_some())?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, memory, direct_from: direct_from.unwrap_or(u64::MAX) })
    }

    /// Whether a message of this length is read directly from its sender's memory.
    pub(super) fn is_direct(&self, len_bytes: u64) -> bool {
        self.memory.is_some() && len_bytes >= self.direct_from
    }
}

impl Shared {
    /// Stores an authenticated incoming connection.
    pub(super) fn add_arrived(&self, name: Name, connection: Connection) {
        self.arrived.lock().insert(name, connection);
        self.arrived.notify();
    }

    /// Returns the connection of a channel between two ranks; `None` after the time limit of the world.
    pub(super) fn connect(&self, channel: u64, rank: Rank, peer: Rank) -> io::Result<Option<Connection>> {
        if rank < peer {
            return self.wait_for(Name { channel, caller: peer.0 as u64, answerer: rank.0 as u64 });
        }
        let world = &self.world;
        let name = Name { channel, caller: rank.0 as u64, answerer: peer.0 as u64 };
        let begin = Instant::now();
        let mut clock = RunClock::new(world.timeout);
        loop {
            // Retried: an address may lead elsewhere, and the other end may be busy with other connections.
            let error = match self.call(&world.addresses[peer.0], name) {
                Ok(connection) => return Ok(Some(connection)),
                Err(error) => error,
            };
            if world.alarm.raised().is_some() || clock.at(begin.elapsed()) >= world.timeout {
                return Err(error);
            }
            std::thread::sleep(clock.interval().min(POLL_INTERVAL));
        }
    }

    /// Connects to the first address whose process authenticates.
    fn call(&self, addresses: &[SocketAddr], name: Name) -> io::Result<Connection> {
        let world = &self.world;
        let call = |address: &SocketAddr| -> io::Result<Connection> {
            let mut stream = TcpStream::connect_timeout(address, world.timeout.min(PROOF_LIMIT))?;
            stream.set_nodelay(true)?;
            authenticate_within(&stream, PROOF_LIMIT, &self.token, Side::Caller, &purpose(world.generation))
                .map_err(io::Error::other)?;
            stream.write_all(&name.to_bytes())?;
            Connection::open(stream, world.direct_from)
        };
        let mut last_error = io::Error::other("it has published no address");
        for address in addresses {
            match call(address) {
                Ok(connection) => return Ok(connection),
                Err(error) => last_error = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(last_error)
    }

    fn wait_for(&self, name: Name) -> io::Result<Option<Connection>> {
        let (world, begin) = (&self.world, Instant::now());
        let mut clock = RunClock::new(world.timeout);
        let mut arrived = self.arrived.lock();
        loop {
            if let Some(connection) = arrived.remove(&name) {
                return Ok(Some(connection));
            }
            if world.alarm.raised().is_some() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if clock.at(begin.elapsed()) >= world.timeout {
                return Ok(None);
            }
            arrived = self.arrived.wait(arrived, clock.interval().min(POLL_INTERVAL));
        }
    }
}

/// The first failure of the world, if it is reported soon.
pub(super) fn first_failure(alarm: &dyn Alarm) -> Option<CommError> {
    let begin = Instant::now();
    loop {
        let raised = alarm.raised();
        if raised.is_some() || begin.elapsed() >= BLAME_AFTER {
            return raised;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
