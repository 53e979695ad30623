//! An authenticated connection, and who is to blame when it ends.

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use fsdp_core::comm::CommError;

use super::direct::negotiate;
use super::memory::Memory;
use crate::link::Alarm;

/// Time limit for authenticating a connection.
pub(super) const PROOF_LIMIT: Duration = Duration::from_secs(10);

/// How long to wait for the world's first failure before blaming the peer whose connection has ended.
const BLAME_AFTER: Duration = Duration::from_secs(2);

/// Pause between two polls.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

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
