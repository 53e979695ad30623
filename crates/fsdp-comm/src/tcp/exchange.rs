//! One exchange over connected streams: both directions at once, without another copy.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use fsdp_core::RunClock;
use fsdp_core::comm::CommError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::link::{Alarm, Exchanged, Header, Incoming, Outgoing};

/// Length and header in front of a message.
const PREAMBLE_BYTES: usize = size_of::<u64>() + size_of::<Header>();

/// How often somebody who waits looks whether the world has failed.
const LOOK: Duration = Duration::from_millis(50);

/// The most slices that the operating system takes in one call.
const SLICES_MAX: usize = 1024;

/// Why an exchange failed.
pub(super) enum Failed {
    /// The world has.
    Alarm(CommError),
    /// The connection to a member has.
    Connection {
        /// The member.
        peer: usize,
        /// How.
        error: io::Error,
    },
}

/// A message on its way out.
pub(super) struct Sending<'a> {
    stream: &'a TcpStream,
    peer: usize,
    preamble: [u8; PREAMBLE_BYTES],
    parts: &'a [&'a [u8]],
    place: Place,
}

/// A message on its way in.
pub(super) struct Receiving<'a, 'p> {
    stream: &'a TcpStream,
    peer: usize,
    expected: [u8; PREAMBLE_BYTES],
    preamble: [u8; PREAMBLE_BYTES],
    parts: &'a mut [&'p mut [u8]],
    place: Place,
}

/// How far a message is: the first slices are done (the preamble is number 0), and some bytes of the next.
#[derive(Clone, Copy, Default)]
struct Place {
    slice: usize,
    bytes: usize,
}

impl Place {
    /// Some more bytes are done; `len` of each slice.
    fn advance(&mut self, mut bytes: usize, len: impl Fn(usize) -> usize, slices: usize) {
        while self.slice < slices && bytes >= len(self.slice) - self.bytes {
            bytes -= len(self.slice) - self.bytes;
            *self = Place { slice: self.slice + 1, bytes: 0 };
        }
        self.bytes += bytes;
    }
}

fn preamble(header: &Header, len_bytes: u64) -> [u8; PREAMBLE_BYTES] {
    let mut preamble = [0; PREAMBLE_BYTES];
    let (len, rest) = preamble.split_at_mut(size_of::<u64>());
    len.copy_from_slice(&len_bytes.to_le_bytes());
    rest.copy_from_slice(header);
    preamble
}

/// What moving bytes came to.
enum Moved {
    /// All are there.
    Whole,
    /// Some may be; the stream takes or has no more now.
    Blocked,
}

impl<'a> Sending<'a> {
    pub(super) fn new(stream: &'a TcpStream, message: Outgoing<'a>) -> Self {
        let preamble = preamble(message.header, message.len_bytes());
        Self { stream, peer: message.to, preamble, parts: message.parts, place: Place::default() }
    }

    fn step(&mut self) -> io::Result<Moved> {
        let slices = self.parts.len() + 1;
        while self.place.slice < slices {
            let slice = |index: usize| if index == 0 { &self.preamble[..] } else { self.parts[index - 1] };
            let Place { slice: first, bytes } = self.place;
            let rest = (first + 1..slices).take(SLICES_MAX - 1).map(slice);
            let out: Vec<IoSlice<'_>> =
                std::iter::once(&slice(first)[bytes..]).chain(rest).map(IoSlice::new).collect();
            match (&mut &*self.stream).write_vectored(&out) {
                Ok(written) => self.place.advance(written, |index| slice(index).len(), slices),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Moved::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Moved::Whole)
    }
}

impl<'a, 'p> Receiving<'a, 'p> {
    pub(super) fn new(stream: &'a TcpStream, message: Incoming<'a, 'p>) -> Self {
        let expected = preamble(message.header, message.len_bytes());
        let preamble = [0; PREAMBLE_BYTES];
        let Incoming { from: peer, parts, .. } = message;
        Self { stream, peer, expected, preamble, parts, place: Place::default() }
    }

    /// Nothing is read beyond a preamble that was not expected.
    fn differs(&self) -> Option<Exchanged> {
        let (len, header) = self.preamble.split_at(size_of::<u64>());
        let is_other = self.place.slice > 0 && self.preamble != self.expected;
        is_other.then(|| Exchanged::Differs {
            header: header.try_into().expect("the rest of a preamble is a header"),
            len_bytes: u64::from_le_bytes(len.try_into().expect("a preamble begins with a length")),
        })
    }

    fn step(&mut self) -> io::Result<Moved> {
        let slices = self.parts.len() + 1;
        while self.place.slice < slices && self.differs().is_none() {
            let Place { slice: first, bytes } = self.place;
            let read = if first == 0 {
                (&mut &*self.stream).read(&mut self.preamble[bytes..])
            } else {
                let mut rest = self.parts[first - 1..].iter_mut().take(SLICES_MAX);
                let head = rest.next().map(|part| &mut part[bytes..]);
                let rest = rest.map(|part| &mut **part);
                let mut into: Vec<IoSliceMut<'_>> =
                    head.into_iter().chain(rest).map(IoSliceMut::new).collect();
                if into.iter().all(|slice| slice.is_empty()) {
                    // Reading into nothing would look like the end of the stream.
                    let taken = into.len();
                    self.place = Place { slice: first + taken, bytes: 0 };
                    continue;
                }
                (&mut &*self.stream).read_vectored(&mut into)
            };
            let parts = &*self.parts;
            let len = |index: usize| if index == 0 { PREAMBLE_BYTES } else { parts[index - 1].len() };
            match read {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.place.advance(read, len, slices),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Moved::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Moved::Whole)
    }
}

/// Moves both messages to their ends.
pub(super) fn exchange(
    mut outgoing: Option<Sending<'_>>,
    mut incoming: Option<Receiving<'_, '_>>,
    alarm: &dyn Alarm,
    timeout: Duration,
) -> Result<Exchanged, Failed> {
    let begin = Instant::now();
    let mut clock = RunClock::new(timeout);
    let mut looked = begin;
    loop {
        if let Some(sending) = &mut outgoing {
            let moved = sending.step();
            let peer = sending.peer;
            if let Moved::Whole = moved.map_err(|error| Failed::Connection { peer, error })? {
                outgoing = None;
            }
        }
        if let Some(receiving) = &mut incoming {
            let moved = receiving.step();
            let peer = receiving.peer;
            if let Moved::Whole = moved.map_err(|error| Failed::Connection { peer, error })? {
                if let Some(differs) = receiving.differs() {
                    return Ok(differs);
                }
                incoming = None;
            }
        }
        let Some(peer) = incoming
            .as_ref()
            .map(|receiving| receiving.peer)
            .or(outgoing.as_ref().map(|sending| sending.peer))
        else {
            return Ok(Exchanged::Done);
        };
        wait(outgoing.as_ref(), incoming.as_ref(), clock.interval().min(LOOK))
            .map_err(|error| Failed::Connection { peer, error })?;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            if let Some(error) = alarm.raised() {
                return Err(Failed::Alarm(error));
            }
        }
        if clock.at(begin.elapsed()) >= timeout {
            return Ok(Exchanged::Late { peer });
        }
    }
}

/// Waits until one of the streams can go on, or for a while.
fn wait(
    outgoing: Option<&Sending<'_>>,
    incoming: Option<&Receiving<'_, '_>>,
    limit: Duration,
) -> io::Result<()> {
    let outgoing = outgoing.map(|sending| PollFd::new(sending.stream, PollFlags::OUT));
    let incoming = incoming.map(|receiving| PollFd::new(receiving.stream, PollFlags::IN));
    let mut streams: Vec<PollFd<'_>> = outgoing.into_iter().chain(incoming).collect();
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.min(LOOK).as_nanos() as i64 };
    match poll(&mut streams, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
