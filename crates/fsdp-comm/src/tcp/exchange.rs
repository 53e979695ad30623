//! One exchange over connected streams: both directions at once, without another copy.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use fsdp_core::RunClock;
use fsdp_core::comm::CommError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::link::{Alarm, Exchanged, Header, Incoming, Outgoing};

/// How often somebody who waits looks whether the world has failed.
const LOOK: Duration = Duration::from_millis(50);

/// The most slices that the operating system takes in one call.
const SLICES_MAX: usize = 1024;

/// A message on its way out.
struct Sending<'a> {
    stream: &'a TcpStream,
    peer: usize,
    /// The preamble and the data; those before `first` are sent.
    slices: Vec<IoSlice<'a>>,
    first: usize,
}

/// A message on its way in.
struct Receiving<'a> {
    stream: &'a TcpStream,
    peer: usize,
    expected: Preamble,
    preamble: Preamble,
    /// Bytes of the preamble that have come.
    begun: usize,
    /// The data; that before `first` has come.
    slices: Vec<IoSliceMut<'a>>,
    first: usize,
}

/// Length and header in front of a message.
type Preamble = [u8; PREAMBLE_BYTES];
const PREAMBLE_BYTES: usize = size_of::<u64>() + size_of::<Header>();

fn preamble(header: &Header, len_bytes: u64) -> Preamble {
    let mut preamble = [0; PREAMBLE_BYTES];
    let (len, rest) = preamble.split_at_mut(size_of::<u64>());
    len.copy_from_slice(&len_bytes.to_le_bytes());
    rest.copy_from_slice(header);
    preamble
}

/// What a call of the operating system moved; none if the stream takes or has no more now.
fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
        moved => moved.map(Some),
    }
}

impl Sending<'_> {
    /// Sends what the stream takes; whether that is all.
    fn step(&mut self) -> io::Result<bool> {
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
}

impl Receiving<'_> {
    /// Nothing is read beyond a preamble that was not expected.
    fn differs(&self) -> Option<Exchanged> {
        let (len, header) = self.preamble.split_at(size_of::<u64>());
        let is_other = self.begun == self.preamble.len() && self.preamble != self.expected;
        is_other.then(|| Exchanged::Differs {
            header: header.try_into().expect("the rest of a preamble is a header"),
            len_bytes: u64::from_le_bytes(len.try_into().expect("a preamble begins with a length")),
        })
    }

    /// Takes what the stream has; whether that is all.
    fn step(&mut self) -> io::Result<bool> {
        while self.begun < self.preamble.len() {
            let read = self.stream.read(&mut self.preamble[self.begun..]);
            let Some(read) = moved(read.and_then(not_the_end))? else { return Ok(false) };
            self.begun += read;
        }
        // Reading into nothing would look like the end of the stream.
        self.advance(0);
        while self.first < self.slices.len() && self.differs().is_none() {
            let rest = &mut self.slices[self.first..];
            let slices = rest.len().min(SLICES_MAX);
            let read = self.stream.read_vectored(&mut rest[..slices]);
            let Some(read) = moved(read.and_then(not_the_end))? else { return Ok(false) };
            self.advance(read);
        }
        Ok(true)
    }

    fn advance(&mut self, read: usize) {
        let mut rest = &mut self.slices[self.first..];
        let left = rest.len();
        IoSliceMut::advance_slices(&mut rest, read);
        self.first += left - rest.len();
    }
}

fn not_the_end(read: usize) -> io::Result<usize> {
    if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
}

/// Moves both messages, each over its stream, to their ends. `blame` says what to report when the connection to a member
/// fails.
pub(super) fn exchange(
    outgoing: Option<(&TcpStream, Outgoing<'_>)>,
    incoming: Option<(&TcpStream, Incoming<'_, '_>)>,
    alarm: &dyn Alarm,
    timeout: Duration,
    blame: &dyn Fn(usize, &io::Error) -> CommError,
) -> Result<Exchanged, CommError> {
    let begin = Instant::now();
    let mut clock = RunClock::new(timeout);
    let mut looked = begin;
    let first = outgoing.map(|(_, message)| preamble(message.header, message.len_bytes()));
    let mut outgoing = outgoing.zip(first.as_ref()).map(|((stream, message), first)| {
        let slices = std::iter::once(&first[..]).chain(message.parts.iter().copied());
        Sending { stream, peer: message.to, slices: slices.map(IoSlice::new).collect(), first: 0 }
    });
    let mut incoming = incoming.map(|(stream, message)| {
        let (peer, expected) = (message.from, preamble(message.header, message.len_bytes()));
        let slices = message.parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
        Receiving { stream, peer, expected, preamble: [0; PREAMBLE_BYTES], begun: 0, slices, first: 0 }
    });
    loop {
        if let Some(sending) = &mut outgoing {
            let peer = sending.peer;
            if sending.step().map_err(|error| blame(peer, &error))? {
                outgoing = None;
            }
        }
        if let Some(receiving) = &mut incoming {
            let peer = receiving.peer;
            if receiving.step().map_err(|error| blame(peer, &error))? {
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
            .map_err(|error| blame(peer, &error))?;
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            if let Some(error) = alarm.raised() {
                return Err(error);
            }
        }
        if clock.at(begin.elapsed()) >= timeout {
            return Ok(Exchanged::Late { peer });
        }
    }
}

/// Waits until one of the streams can go on, or for a while.
fn wait(outgoing: Option<&Sending<'_>>, incoming: Option<&Receiving<'_>>, limit: Duration) -> io::Result<()> {
    let outgoing = outgoing.map(|sending| PollFd::new(sending.stream, PollFlags::OUT));
    let incoming = incoming.map(|receiving| PollFd::new(receiving.stream, PollFlags::IN));
    let mut streams: Vec<PollFd<'_>> = outgoing.into_iter().chain(incoming).collect();
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.min(LOOK).as_nanos() as i64 };
    match poll(&mut streams, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
