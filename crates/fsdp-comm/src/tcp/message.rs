//! The transfer of a message over a non-blocking stream.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use rustix::event::{PollFd, PollFlags};

use super::connection::Connection;
use super::direct::{Places, places};
use crate::link::{Exchanged, Header, Incoming, Outgoing};

/// Maximum number of slices that the operating system accepts in one call.
const SLICES_MAX: usize = 1024;

/// Sent instead of a length to acknowledge that a message was read directly.
const READ: u64 = u64::MAX;

/// Length and header, which precede a message.
type Preamble = [u8; PREAMBLE_BYTES];
const PREAMBLE_BYTES: usize = size_of::<u64>() + size_of::<Header>();

fn preamble(header: &Header, len_bytes: u64) -> Preamble {
    let mut preamble = [0; PREAMBLE_BYTES];
    let (len, rest) = preamble.split_at_mut(size_of::<u64>());
    len.copy_from_slice(&len_bytes.to_le_bytes());
    rest.copy_from_slice(header);
    preamble
}

/// The bytes that precede a message's data or, if its receiver reads it directly, replace them.
pub(super) struct Prefix {
    preamble: Preamble,
    places: Option<Vec<u8>>,
}

impl Prefix {
    pub(super) fn of(message: &Outgoing<'_>, connection: &Connection) -> Self {
        let len_bytes = message.len_bytes();
        let places = connection.is_direct(len_bytes).then(|| places(message.parts));
        Self { preamble: preamble(message.header, len_bytes), places }
    }

    /// The prefix of the acknowledgment that a message was read.
    pub(super) fn of_ack(header: &Header) -> Self {
        Self { preamble: preamble(header, READ), places: None }
    }

    /// Whether the receiver reads the data directly; then the bytes must not change before its acknowledgment.
    pub(super) fn is_direct(&self) -> bool {
        self.places.is_some()
    }
}

/// A message being sent.
pub(super) struct Sending<'a> {
    stream: &'a TcpStream,
    pub(super) peer: usize,
    /// Those before `first` are sent.
    slices: Vec<IoSlice<'a>>,
    first: usize,
}

impl<'a> Sending<'a> {
    pub(super) fn new(stream: &'a TcpStream, peer: usize, prefix: &'a Prefix, parts: &[&'a [u8]]) -> Self {
        let parts = if prefix.is_direct() { &[] } else { parts };
        let slices = std::iter::once(&prefix.preamble[..])
            .chain(prefix.places.as_deref())
            .chain(parts.iter().copied());
        Self { stream, peer, slices: slices.map(IoSlice::new).collect(), first: 0 }
    }

    /// Sends as much as the stream accepts; returns whether everything is sent.
    pub(super) fn step(&mut self) -> io::Result<bool> {
        while self.first < self.slices.len() {
            let mut rest = &mut self.slices[self.first..];
            let left = rest.len();
            let written = self.stream.write_vectored(&rest[..left.min(SLICES_MAX)]);
            let Some(written) = moved(written)? else { return Ok(false) };
            IoSlice::advance_slices(&mut rest, written);
            self.first += left - rest.len();
        }
        Ok(true)
    }

    pub(super) fn poll(&self) -> PollFd<'a> {
        PollFd::new(self.stream, PollFlags::OUT)
    }
}

/// A message being received.
pub(super) struct Receiving<'a> {
    connection: &'a Connection,
    pub(super) peer: usize,
    expected: Preamble,
    preamble: Preamble,
    /// Number of preamble bytes received.
    preamble_received: usize,
    /// Slices for the data; those before `first` are filled.
    slices: Vec<IoSliceMut<'a>>,
    first: usize,
    /// Locations of the data at the sender, if read directly.
    places: Option<Places>,
    len_bytes: u64,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(connection: &'a Connection, message: Incoming<'a, '_>) -> Self {
        let (peer, len_bytes) = (message.from, message.len_bytes());
        let slices = message.parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
        let places = connection.is_direct(len_bytes).then(Places::new);
        let expected = preamble(message.header, len_bytes);
        Self {
            connection,
            peer,
            expected,
            preamble: [0; _],
            preamble_received: 0,
            slices,
            first: 0,
            places,
            len_bytes,
        }
    }

    /// Expects the acknowledgment that a message with this header was read.
    pub(super) fn ack(connection: &'a Connection, peer: usize, header: &Header) -> Self {
        let (expected, slices) = (preamble(header, READ), Vec::new());
        Self {
            connection,
            peer,
            expected,
            preamble: [0; _],
            preamble_received: 0,
            slices,
            first: 0,
            places: None,
            len_bytes: 0,
        }
    }

    /// Whether the data is read directly; then its sender waits for an acknowledgment.
    pub(super) fn is_direct(&self) -> bool {
        self.places.is_some()
    }

    /// Returns the message if it was not the expected one; nothing is read after an unexpected preamble.
    pub(super) fn unexpected(&self) -> Option<Exchanged> {
        let (len, header) = self.preamble.split_at(size_of::<u64>());
        let is_unexpected = self.preamble_received == self.preamble.len() && self.preamble != self.expected;
        is_unexpected.then(|| Exchanged::Differs {
            header: header.try_into().expect("the rest of a preamble is a header"),
            len_bytes: u64::from_le_bytes(len.try_into().expect("a preamble begins with a length")),
        })
    }

    /// Receives what the stream has; returns whether everything has arrived.
    pub(super) fn step(&mut self) -> io::Result<bool> {
        let mut stream = &self.connection.stream;
        while self.preamble_received < self.preamble.len() {
            let read = stream.read(&mut self.preamble[self.preamble_received..]);
            let Some(read) = moved(read.and_then(check_not_end))? else { return Ok(false) };
            self.preamble_received += read;
        }
        // A read into an empty slice would look like the end of the stream.
        self.advance(0);
        if self.unexpected().is_some() {
            return Ok(true);
        }
        if self.places.is_some() {
            return self.read_directly();
        }
        while self.first < self.slices.len() {
            let rest = &mut self.slices[self.first..];
            let slices = rest.len().min(SLICES_MAX);
            let read = stream.read_vectored(&mut rest[..slices]);
            let Some(read) = moved(read.and_then(check_not_end))? else { return Ok(false) };
            self.advance(read);
        }
        Ok(true)
    }

    /// Receives the locations; once they are complete, reads the data there.
    fn read_directly(&mut self) -> io::Result<bool> {
        let (mut stream, memory) = (&self.connection.stream, self.connection.memory.as_ref());
        let (Some(places), Some(memory)) = (&mut self.places, memory) else { return Ok(true) };
        while !places.missing().is_empty() {
            let read = stream.read(places.missing());
            let Some(read) = moved(read.and_then(check_not_end))? else { return Ok(false) };
            places.advance(read, self.len_bytes)?;
        }
        memory.read(&places.all(self.len_bytes)?, &mut self.slices)?;
        Ok(true)
    }

    fn advance(&mut self, read: usize) {
        let mut rest = &mut self.slices[self.first..];
        let left = rest.len();
        IoSliceMut::advance_slices(&mut rest, read);
        self.first += left - rest.len();
    }

    pub(super) fn poll(&self) -> PollFd<'a> {
        PollFd::new(&self.connection.stream, PollFlags::IN)
    }
}

/// Number of bytes moved by a system call; `None` if the call would block.
fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
        moved => moved.map(Some),
    }
}

fn check_not_end(read: usize) -> io::Result<usize> {
    if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
}
