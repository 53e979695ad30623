//! The state machine of one exchange on one link, driven by the MPI thread.
//!
//! | message | tag | when |
//! |---|---|---|
//! | first: preamble, plus all data if it is short | 2 x channel | at once |
//! | ready: empty, sent by the receiver | 2 x channel + 1 | the receives for the announced long data are posted |
//! | data, cut at 64 MiB | 2 x channel | when the receiver is ready |
//!
//! Short data is copied, so the sender does not wait until it has been received. Long data is sent straight from the
//! caller's memory, and only into receives that are already posted. An exchange that is given up before that therefore
//! has no operation on the caller's memory, and operations that have started end soon as long as both processes live.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::mpsc::Sender;
use std::time::Duration;

use fsdp_comm::Header;
use fsdp_core::comm::CommError;

use crate::error::MpiError;
use crate::ffi::{Memory, Mpi, Piece, Request};
use crate::preamble::{PREAMBLE, Preamble, split};

/// Data of at most this many bytes travels in the first message.
pub(crate) const SHORT_MAX: usize = 16 << 10;

/// Longer data is cut into messages of this many bytes, because MPI counts in `int`.
pub(crate) const MESSAGE_MAX: usize = 64 << 20;

/// Every MPI allows tags up to 32767; a channel takes two.
pub(crate) const CHANNELS: u64 = 1 << 14;

/// How long posted receives are kept after their exchange was given up. The sender may have given up before it learned
/// that the receiver is ready; then no data comes, and the receives are cancelled.
const GRACE: Duration = Duration::from_secs(1);

/// Data to send.
pub(crate) struct Sent {
    pub(crate) to: c_int,
    /// The preamble, followed by the data if it is short.
    pub(crate) first: Vec<u8>,
    /// Long data; empty if the data is short.
    pub(crate) messages: Vec<Vec<Piece>>,
}

/// Data to receive.
pub(crate) struct Received {
    pub(crate) from: c_int,
    pub(crate) expected: Preamble,
    /// Destination of long data; empty if the data is short.
    pub(crate) messages: Vec<Vec<Piece>>,
}

/// A request of a link to the MPI thread.
pub(crate) struct Transfer {
    pub(crate) channel: c_int,
    pub(crate) sent: Option<Sent>,
    pub(crate) received: Option<Received>,
}

/// How an exchange ended.
pub(crate) enum Answer {
    /// Everything was sent and received. Contains the received data if it was short.
    Done(Vec<u8>),
    /// The preamble of the message differs from the expected one; none of its data reaches the caller.
    Differs { header: Header, len_bytes: u64 },
    /// The exchange with this rank did not progress within the time limit.
    Late(c_int),
    /// The alarm was raised.
    Alarm(CommError),
    /// MPI failed.
    Failed(MpiError),
}

enum Sending {
    /// Long data, waiting for the receiver's ready message.
    Waiting {
        ready: Request,
        to: c_int,
        messages: Vec<Vec<Piece>>,
    },
    Moving {
        to: c_int,
        requests: VecDeque<Request>,
    },
    Done,
}

enum Receiving {
    First { first: Request, from: c_int, expected: Preamble, messages: Vec<Vec<Piece>> },
    Moving { from: c_int, requests: VecDeque<Request> },
    Done,
}

/// The answer that is sent once no operation is in flight.
struct PendingOutcome {
    answer: Answer,
    since: Duration,
    cancelled: bool,
}

/// An exchange that has begun.
pub(crate) struct Exchange {
    tag: c_int,
    sending: Sending,
    receiving: Receiving,
    short: Vec<u8>,
    /// Set once the exchange was given up.
    ending: Option<PendingOutcome>,
    moved_at: Duration,
    answer: Sender<Answer>,
}

/// The engine state that an exchange works with.
pub(crate) struct ExchangeContext<'a> {
    pub(crate) mpi: &'a Mpi,
    /// Operations that own their memory; the engine completes them.
    pub(crate) detached: &'a mut Vec<Request>,
    /// The current time, on the engine's clock.
    pub(crate) now: Duration,
}

impl Exchange {
    /// Starts every operation that can start at once.
    pub(crate) fn begin(
        transfer: Transfer,
        answer: Sender<Answer>,
        context: &mut ExchangeContext<'_>,
    ) -> Self {
        let mut exchange = Self {
            tag: 2 * transfer.channel,
            sending: Sending::Done,
            receiving: Receiving::Done,
            short: Vec::new(),
            ending: None,
            moved_at: context.now,
            answer,
        };
        let begun = exchange.begin_operations(transfer.sent, transfer.received, context);
        begun.unwrap_or_else(|error| exchange.give_up(Answer::Failed(error), context));
        exchange
    }

    fn begin_operations(
        &mut self,
        sent: Option<Sent>,
        received: Option<Received>,
        context: &mut ExchangeContext<'_>,
    ) -> Result<(), MpiError> {
        if let Some(Received { from, expected, messages }) = received {
            let buffer = Memory::Own(vec![0; PREAMBLE + SHORT_MAX]);
            let first = context.mpi.receive(buffer, from, self.tag)?;
            self.receiving = Receiving::First { first, from, expected, messages };
        }
        if let Some(Sent { to, first, messages }) = sent {
            if !messages.is_empty() {
                let ready = context.mpi.receive(Memory::Own(Vec::new()), to, self.tag + 1)?;
                self.sending = Sending::Waiting { ready, to, messages };
            }
            context.detached.push(context.mpi.send(Memory::Own(first), to, self.tag)?);
        }
        Ok(())
    }

    /// Whether operations on the caller's memory are in flight.
    pub(crate) fn is_moving(&self) -> bool {
        matches!(self.sending, Sending::Moving { .. }) || matches!(self.receiving, Receiving::Moving { .. })
    }

    /// Advances as far as possible without blocking. Returns whether anything has happened.
    pub(crate) fn step(&mut self, context: &mut ExchangeContext<'_>) -> bool {
        let moved = self.send(context).and_then(|sent| Ok(self.receive(context)? || sent));
        match moved {
            Ok(moved) => {
                if moved {
                    self.moved_at = context.now;
                }
                moved
            }
            Err(error) => {
                self.give_up(Answer::Failed(error), context);
                true
            }
        }
    }

    fn send(&mut self, context: &mut ExchangeContext<'_>) -> Result<bool, MpiError> {
        match &mut self.sending {
            Sending::Done => return Ok(false),
            Sending::Waiting { ready, to, messages } => {
                if !context.mpi.test(ready)? {
                    return Ok(false);
                }
                let (to, messages) = (*to, std::mem::take(messages));
                // If a later message is refused, the operations that have started are kept.
                self.sending = Sending::Moving { to, requests: VecDeque::new() };
                let Sending::Moving { requests, .. } = &mut self.sending else { unreachable!("just set") };
                for pieces in messages {
                    requests.push_back(context.mpi.send(Memory::Lent(pieces), to, self.tag)?);
                }
            }
            Sending::Moving { requests, .. } => {
                if !poll_first(context.mpi, requests)? {
                    return Ok(false);
                }
                if requests.is_empty() {
                    self.sending = Sending::Done;
                }
            }
        }
        Ok(true)
    }

    fn receive(&mut self, context: &mut ExchangeContext<'_>) -> Result<bool, MpiError> {
        match &mut self.receiving {
            Receiving::Done => return Ok(false),
            Receiving::First { first, .. } => {
                if !context.mpi.test(first)? {
                    return Ok(false);
                }
                self.receive_first(context)?;
            }
            Receiving::Moving { requests, .. } => {
                if !poll_first(context.mpi, requests)? {
                    return Ok(false);
                }
                if requests.is_empty() {
                    self.receiving = Receiving::Done;
                }
            }
        }
        Ok(true)
    }

    /// Handles the first message, which has arrived.
    fn receive_first(&mut self, context: &mut ExchangeContext<'_>) -> Result<(), MpiError> {
        let receiving = std::mem::replace(&mut self.receiving, Receiving::Done);
        let Receiving::First { first, from, expected, messages } = receiving else {
            unreachable!("it was awaited")
        };
        let mut bytes = first.into_bytes().expect("it has ended, and is not lent");
        let got: &Preamble = bytes.first_chunk().expect("there is room for a preamble");
        if *got != expected {
            let (header, len_bytes) = split(got);
            self.give_up(Answer::Differs { header, len_bytes }, context);
        } else if messages.is_empty() {
            bytes.drain(..PREAMBLE);
            self.short = bytes;
        } else {
            self.receiving = Receiving::Moving { from, requests: VecDeque::new() };
            let Receiving::Moving { requests, .. } = &mut self.receiving else { unreachable!("just set") };
            for pieces in messages {
                requests.push_back(context.mpi.receive(Memory::Lent(pieces), from, self.tag)?);
            }
            context.detached.push(context.mpi.send(Memory::Own(Vec::new()), from, self.tag + 1)?);
        }
        Ok(())
    }

    /// Gives up if nothing has moved within the time limit.
    pub(crate) fn check_timeout(&mut self, timeout: Duration, context: &mut ExchangeContext<'_>) {
        if context.now.saturating_sub(self.moved_at) > timeout {
            let late = match (&self.receiving, &self.sending) {
                (Receiving::First { from, .. } | Receiving::Moving { from, .. }, _) => *from,
                (Receiving::Done, Sending::Waiting { to, .. } | Sending::Moving { to, .. }) => *to,
                (Receiving::Done, Sending::Done) => return,
            };
            self.give_up(Answer::Late(late), context);
        }
    }

    /// Gives up; only the first reason is kept. Operations on the caller's memory run to their end.
    pub(crate) fn give_up(&mut self, answer: Answer, context: &mut ExchangeContext<'_>) {
        self.ending.get_or_insert(PendingOutcome { answer, since: context.now, cancelled: false });
        self.sending = match std::mem::replace(&mut self.sending, Sending::Done) {
            Sending::Waiting { ready, .. } => {
                cancel_receive(ready, context);
                Sending::Done
            }
            other => other,
        };
        self.receiving = match std::mem::replace(&mut self.receiving, Receiving::Done) {
            Receiving::First { first, .. } => {
                cancel_receive(first, context);
                Receiving::Done
            }
            other => other,
        };
    }

    /// Whether the exchange is complete; if so, it has sent its answer.
    pub(crate) fn has_ended(&mut self, context: &mut ExchangeContext<'_>) -> bool {
        if let (Sending::Done, Receiving::Done) = (&self.sending, &self.receiving) {
            let short = std::mem::take(&mut self.short);
            let answer = self.ending.take().map_or(Answer::Done(short), |ending| ending.answer);
            // The caller waits for the answer, unless the process has torn down its thread.
            drop(self.answer.send(answer));
            return true;
        }
        if let (Some(ending), Receiving::Moving { requests, .. }) = (&mut self.ending, &mut self.receiving)
            && !ending.cancelled
            && context.now.saturating_sub(ending.since) > GRACE
        {
            ending.cancelled = true;
            // If MPI refuses to cancel a receive, the receive stays in flight.
            requests.iter_mut().for_each(|request| drop(context.mpi.cancel(request)));
        }
        false
    }
}

/// Cancels a receive that is no longer needed. It owns its memory.
fn cancel_receive(mut receive: Request, context: &mut ExchangeContext<'_>) {
    // If MPI refuses to cancel, the receive stays in flight and keeps its memory.
    drop(context.mpi.cancel(&mut receive));
    context.detached.push(receive);
}

/// Whether the first of these operations has ended. A failed operation is removed like one that has ended.
fn poll_first(mpi: &Mpi, requests: &mut VecDeque<Request>) -> Result<bool, MpiError> {
    let Some(first) = requests.front_mut() else { return Ok(true) };
    let ended = mpi.test(first);
    if !matches!(ended, Ok(false)) {
        requests.pop_front();
    }
    ended
}
