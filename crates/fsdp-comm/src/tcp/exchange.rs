//! One exchange over connections: both directions at once, without intermediate copies.

use std::io;
use std::time::{Duration, Instant};

use fsdp_core::RunClock;
use fsdp_core::comm::CommError;
use rustix::event::{PollFd, Timespec, poll};

use super::connection::Connection;
use super::message::{Prefix, Receiving, Sending};
use crate::link::{Alarm, Exchanged, Header, Incoming, Outgoing};

/// How often a waiting thread checks whether the world has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The transfers that are not finished yet.
struct Exchange<'a> {
    sending: Option<Sending<'a>>,
    receiving: Option<Receiving<'a>>,
    /// The acknowledgment to the sender of the incoming message that it was read; sent after our message to that rank.
    ack_out: Option<Sending<'a>>,
    /// The acknowledgment from the receiver of the outgoing message that it was read; received after its message to us.
    ack_in: Option<Receiving<'a>>,
    /// The connection to the sender of the incoming message, and the acknowledgment to send there.
    ack_to_send: Option<(&'a Connection, &'a Prefix)>,
}

/// An error, and the member on whose connection it occurred.
type Failed = (usize, io::Error);

impl Exchange<'_> {
    /// Transfers what is possible without waiting. Returns an unexpected message, if one arrived.
    fn step(&mut self) -> Result<Option<Exchanged>, Failed> {
        finish(&mut self.sending, Sending::step, |sending| sending.peer)?;
        if let Some(received) = finish(&mut self.receiving, Receiving::step, |receiving| receiving.peer)? {
            if let Some(unexpected) = received.unexpected() {
                return Ok(Some(unexpected));
            }
            if let Some((connection, prefix)) = self.ack_to_send.filter(|_| received.is_direct()) {
                self.ack_out = Some(Sending::new(&connection.stream, received.peer, prefix, &[]));
            }
        }
        if !self.is_ack_out_blocked() {
            finish(&mut self.ack_out, Sending::step, |ack| ack.peer)?;
        }
        if !self.is_ack_in_blocked()
            && let Some(ack) = finish(&mut self.ack_in, Receiving::step, |ack| ack.peer)?
            && ack.unexpected().is_some()
        {
            let error = io::Error::other("it sent another message before it had read the last one");
            return Err((ack.peer, error));
        }
        Ok(None)
    }

    fn is_ack_out_blocked(&self) -> bool {
        let peer = self.ack_out.as_ref().map(|ack| ack.peer);
        peer.is_some() && peer == self.sending.as_ref().map(|sending| sending.peer)
    }

    fn is_ack_in_blocked(&self) -> bool {
        let peer = self.ack_in.as_ref().map(|ack| ack.peer);
        peer.is_some() && peer == self.receiving.as_ref().map(|receiving| receiving.peer)
    }

    /// A member that the exchange waits for; `None` if it is finished.
    fn peer(&self) -> Option<usize> {
        let incoming = self.receiving.as_ref().or(self.ack_in.as_ref()).map(|message| message.peer);
        incoming.or(self.sending.as_ref().or(self.ack_out.as_ref()).map(|message| message.peer))
    }

    /// Waits until a connection is ready, or for `limit` at most.
    fn wait(&self, limit: Duration) -> io::Result<()> {
        let ack_out = self.ack_out.as_ref().filter(|_| !self.is_ack_out_blocked());
        let ack_in = self.ack_in.as_ref().filter(|_| !self.is_ack_in_blocked());
        let outgoing = self.sending.iter().chain(ack_out).map(Sending::poll);
        let incoming = self.receiving.iter().chain(ack_in).map(Receiving::poll);
        let mut streams: Vec<PollFd<'_>> = outgoing.chain(incoming).collect();
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.min(POLL_INTERVAL).as_nanos() as i64 };
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
    let Some(transfer) = message else { return Ok(None) };
    let is_done = step(transfer).map_err(|error| (peer(transfer), error))?;
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
    let prefix = outgoing.as_ref().map(|(connection, message)| Prefix::of(message, connection));
    let ack_prefix = incoming.as_ref().map(|(_, message)| Prefix::of_ack(message.header));
    let ack_to_send = incoming.as_ref().map(|(connection, _)| *connection).zip(ack_prefix.as_ref());
    let ack_in = outgoing.as_ref().zip(prefix.as_ref()).filter(|(_, prefix)| prefix.is_direct()).map(
        |((connection, message), _)| {
            let header: &Header = message.header;
            Receiving::ack(connection, message.to, header)
        },
    );
    let sending = outgoing.zip(prefix.as_ref()).map(|((connection, message), prefix)| {
        Sending::new(&connection.stream, message.to, prefix, message.parts)
    });
    let receiving = incoming.map(|(connection, message)| Receiving::new(connection, message));
    let exchange = Exchange { sending, receiving, ack_out: None, ack_in, ack_to_send };
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
    let mut last_check = begin;
    loop {
        if let Some(unexpected) = exchange.step().map_err(|(peer, error)| blame(peer, &error))? {
            return Ok(unexpected);
        }
        let Some(peer) = exchange.peer() else { return Ok(Exchanged::Done) };
        exchange.wait(clock.interval().min(POLL_INTERVAL)).map_err(|error| blame(peer, &error))?;
        if last_check.elapsed() >= POLL_INTERVAL {
            last_check = Instant::now();
            if let Some(error) = alarm.raised() {
                return Err(error);
            }
        }
        if clock.at(begin.elapsed()) >= timeout {
            return Ok(Exchanged::Late { peer });
        }
    }
}
