//! One exchange over connections: both directions at once, without intermediate copies.

use std::io;
use std::time::{Duration, Instant};

use fsdp_core::RunClock;
use fsdp_core::comm::CommError;
use rustix::event::{PollFd, Timespec, poll};

use super::connection::Connection;
use super::message::{Front, Receiving, Sending};
use crate::link::{Alarm, Exchanged, Header, Incoming, Outgoing};

/// How often a waiting thread checks whether the world has failed.
const LOOK: Duration = Duration::from_millis(50);

/// The transfers that are not finished yet.
struct Exchange<'a> {
    sending: Option<Sending<'a>>,
    receiving: Option<Receiving<'a>>,
    /// The acknowledgment to the sender of the incoming message that it was read; sent after our message to that rank.
    telling: Option<Sending<'a>>,
    /// The acknowledgment from the receiver of the outgoing message that it was read; received after its message to us.
    hearing: Option<Receiving<'a>>,
    /// The connection to the sender of the incoming message, and the acknowledgment to send there.
    back: Option<(&'a Connection, &'a Front)>,
}

/// An error, and the member on whose connection it occurred.
type Failed = (usize, io::Error);

impl Exchange<'_> {
    /// Transfers what is possible without waiting. Returns an unexpected message, if one arrived.
    fn step(&mut self) -> Result<Option<Exchanged>, Failed> {
        finish(&mut self.sending, Sending::step, |sending| sending.peer)?;
        if let Some(received) = finish(&mut self.receiving, Receiving::step, |receiving| receiving.peer)? {
            if let Some(differs) = received.differs() {
                return Ok(Some(differs));
            }
            if let Some((connection, word)) = self.back.filter(|_| received.is_direct()) {
                self.telling = Some(Sending::new(&connection.stream, received.peer, word, &[]));
            }
        }
        if !self.is_telling_behind() {
            finish(&mut self.telling, Sending::step, |telling| telling.peer)?;
        }
        if !self.is_hearing_behind()
            && let Some(heard) = finish(&mut self.hearing, Receiving::step, |hearing| hearing.peer)?
            && heard.differs().is_some()
        {
            let error = io::Error::other("it sent another message before it had read the last one");
            return Err((heard.peer, error));
        }
        Ok(None)
    }

    fn is_telling_behind(&self) -> bool {
        let telling = self.telling.as_ref().map(|telling| telling.peer);
        telling.is_some() && telling == self.sending.as_ref().map(|sending| sending.peer)
    }

    fn is_hearing_behind(&self) -> bool {
        let hearing = self.hearing.as_ref().map(|hearing| hearing.peer);
        hearing.is_some() && hearing == self.receiving.as_ref().map(|receiving| receiving.peer)
    }

    /// A member that the exchange waits for; `None` if it is finished.
    fn peer(&self) -> Option<usize> {
        let incoming = self.receiving.as_ref().or(self.hearing.as_ref()).map(|message| message.peer);
        incoming.or(self.sending.as_ref().or(self.telling.as_ref()).map(|message| message.peer))
    }

    /// Waits until a connection is ready, or for `limit` at most.
    fn wait(&self, limit: Duration) -> io::Result<()> {
        let telling = self.telling.as_ref().filter(|_| !self.is_telling_behind());
        let hearing = self.hearing.as_ref().filter(|_| !self.is_hearing_behind());
        let outgoing = self.sending.iter().chain(telling).map(Sending::poll);
        let incoming = self.receiving.iter().chain(hearing).map(Receiving::poll);
        let mut streams: Vec<PollFd<'_>> = outgoing.chain(incoming).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.min(LOOK).as_nanos() as i64 };
        match poll(&mut streams, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Advances a transfer, and takes it out when it is finished.
fn finish<M>(
    message: &mut Option<M>,
    step: impl Fn(&mut M) -> io::Result<bool>,
    peer: impl Fn(&M) -> usize,
) -> Result<Option<M>, Failed> {
    let Some(moving) = message else { return Ok(None) };
    let is_done = step(moving).map_err(|error| (peer(moving), error))?;
    Ok(if is_done { message.take() } else { None })
}

/// Transfers both messages, each over its own connection. `blame` creates the error for a failed connection to a
/// member.
pub(super) fn exchange(
    outgoing: Option<(&Connection, Outgoing<'_>)>,
    incoming: Option<(&Connection, Incoming<'_, '_>)>,
    alarm: &dyn Alarm,
    timeout: Duration,
    blame: &dyn Fn(usize, &io::Error) -> CommError,
) -> Result<Exchanged, CommError> {
    let front = outgoing.as_ref().map(|(connection, message)| Front::of(message, connection));
    let word = incoming.as_ref().map(|(_, message)| Front::of_word(message.header));
    let back = incoming.as_ref().map(|(connection, _)| *connection).zip(word.as_ref());
    let hearing = outgoing.as_ref().zip(front.as_ref()).filter(|(_, front)| front.is_direct()).map(
        |((connection, message), _)| {
            let header: &Header = message.header;
            Receiving::word(connection, message.to, header)
        },
    );
    let sending = outgoing.zip(front.as_ref()).map(|((connection, message), front)| {
        Sending::new(&connection.stream, message.to, front, message.parts)
    });
    let receiving = incoming.map(|(connection, message)| Receiving::new(connection, message));
    let exchange = Exchange { sending, receiving, telling: None, hearing, back };
    run(exchange, alarm, timeout, blame)
}

fn run(
    mut exchange: Exchange<'_>,
    alarm: &dyn Alarm,
    timeout: Duration,
    blame: &dyn Fn(usize, &io::Error) -> CommError,
) -> Result<Exchanged, CommError> {
    let begin = Instant::now();
    let mut clock = RunClock::new(timeout);
    let mut looked = begin;
    loop {
        if let Some(differs) = exchange.step().map_err(|(peer, error)| blame(peer, &error))? {
            return Ok(differs);
        }
        let Some(peer) = exchange.peer() else { return Ok(Exchanged::Done) };
        exchange.wait(clock.interval().min(LOOK)).map_err(|error| blame(peer, &error))?;
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
