//! What the links of a process have in common: the world, and how the connection of a channel between two ranks is
//! established. The later rank connects to the port of the earlier one.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use fsdp_core::{Rank, RunClock};

use super::connection::{Connection, POLL_INTERVAL, PROOF_LIMIT};
use crate::auth::{Side, Token, authenticate_within};
use crate::link::Alarm;
use crate::monitor::Monitor;

/// The world as the connections of a process need to know it.
pub struct TcpWorld {
    /// The addresses of each rank's process, by rank.
    pub addresses: Vec<Vec<SocketAddr>>,
    /// Distinguishes this world from those before and after it.
    pub generation: u64,
    /// The alarm of the world: reports failures, and learns of them.
    pub alarm: Arc<dyn Alarm>,
    /// Time limit for a message.
    pub timeout: Duration,
    /// Minimum length in bytes (at least 1, the same on all ranks) of messages that processes of one machine read from
    /// each other's memory, where allowed; `None` disables it.
    pub direct_from: Option<u64>,
}

/// See the [module](self).
pub(super) struct Shared {
    pub(super) world: TcpWorld,
    pub(super) token: Token,
    /// Incoming connections that are not in use yet.
    pub(super) arrived: Monitor<BTreeMap<Name, Connection>>,
    /// Number of channels used, by rank; maintained for the ranks of this process.
    pub(super) channels: Vec<AtomicU64>,
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
