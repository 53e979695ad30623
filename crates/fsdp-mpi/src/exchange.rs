//! One exchange of one link, on the thread of MPI: what it has begun, and what comes next.
//!
//! | message | tag | when |
//! |---|---|---|
//! | first: preamble, and all data if it is short | 2 x channel | at once |
//! | ready: empty | 2 x channel + 1, the other way | a first message of long data was expected, and its receives are begun |
//! | data, cut at 64 MiB | 2 x channel | when the receiver is ready |
//!
//! Short data are copied, so nobody waits until they have been received. Long data are sent out of the caller's memory, and
//! only into receives that have begun: so whoever gives up before that has nothing under way in that memory, and what is
//! under way ends soon as long as both processes live.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::mpsc::Sender;
use std::time::Duration;

use fsdp_comm::Header;
use fsdp_core::comm::CommError;

use crate::error::MpiError;
use crate::ffi::{Memory, Mpi, Piece, Request};
use crate::preamble::{PREAMBLE, Preamble, split};

/// Data of at most so many bytes travel in the first message.
pub(crate) const SHORT_MAX: usize = 16 << 10;

/// Longer data are cut, because MPI counts in `int`.
pub(crate) const MESSAGE_MAX: usize = 64 << 20;

/// Tags up to 32767 are allowed by every MPI; a channel takes two.
pub(crate) const CHANNELS: u64 = 1 << 14;

/// How long data may still come after an exchange was given up, when its receives have begun. Its sender may have given up
/// before it heard that it may send; then nothing comes, and the receives are cancelled.
const GRACE: Duration = Duration::from_secs(1);

/// Data to send.
pub(crate) struct Sent {
    pub(crate) to: c_int,
    /// The preamble, and short data.
    pub(crate) first: Vec<u8>,
    /// Long data.
    pub(crate) messages: Vec<Vec<Piece>>,
}

/// Data to receive.
pub(crate) struct Received {
    pub(crate) from: c_int,
    pub(crate) expected: Preamble,
    /// Where long data goes.
    pub(crate) messages: Vec<Vec<Piece>>,
}

/// What a link asks for.
pub(crate) struct Order {
    pub(crate) channel: c_int,
    pub(crate) sent: Option<Sent>,
    pub(crate) received: Option<Received>,
}

/// How an exchange ended.
pub(crate) enum Answer {
    /// All was sent, and received; the short data.
    Done(Vec<u8>),
    /// Another message came.
    Differs { header: Header, len_bytes: u64 },
    /// The time limit has passed without this rank.
    Late(c_int),
    /// The alarm was raised.
    Alarm(CommError),
    /// MPI failed.
    Failed(MpiError),
}

enum Sending {
    /// Long data, until the receiver is ready.
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

/// What is answered when nothing is under way any more.
struct Ending {
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
    /// Set once it was given up.
    ending: Option<Ending>,
    moved_at: Duration,
    answer: Sender<Answer>,
}

/// What an exchange needs of its surroundings.
pub(crate) struct Around<'a> {
    pub(crate) mpi: &'a Mpi,
    /// Operations with memory of their own, which somebody else ends.
    pub(crate) loose: &'a mut Vec<Request>,
    /// The time.
    pub(crate) now: Duration,
}

impl Exchange {
    /// Begins what can begin at once.
    pub(crate) fn begin(order: Order, answer: Sender<Answer>, around: &mut Around<'_>) -> Self {
        let mut exchange = Self {
            tag: 2 * order.channel,
            sending: Sending::Done,
            receiving: Receiving::Done,
            short: Vec::new(),
            ending: None,
            moved_at: around.now,
            answer,
        };
        let begun = exchange.begin_both(order.sent, order.received, around);
        begun.unwrap_or_else(|error| exchange.give_up(Answer::Failed(error), around));
        exchange
    }

    fn begin_both(
        &mut self,
        sent: Option<Sent>,
        received: Option<Received>,
        around: &mut Around<'_>,
    ) -> Result<(), MpiError> {
        if let Some(Received { from, expected, messages }) = received {
            let room = Memory::Own(vec![0; PREAMBLE + SHORT_MAX]);
            let first = around.mpi.receive(room, from, self.tag)?;
            self.receiving = Receiving::First { first, from, expected, messages };
        }
        if let Some(Sent { to, first, messages }) = sent {
            if !messages.is_empty() {
                let ready = around.mpi.receive(Memory::Own(Vec::new()), to, self.tag + 1)?;
                self.sending = Sending::Waiting { ready, to, messages };
            }
            around.loose.push(around.mpi.send(Memory::Own(first), to, self.tag)?);
        }
        Ok(())
    }

    /// Whether data of the caller is under way.
    pub(crate) fn is_moving(&self) -> bool {
        matches!(self.sending, Sending::Moving { .. }) || matches!(self.receiving, Receiving::Moving { .. })
    }

    /// Goes on as far as possible without waiting; whether anything has happened.
    pub(crate) fn step(&mut self, around: &mut Around<'_>) -> bool {
        let moved = self.send(around).and_then(|sent| Ok(self.receive(around)? || sent));
        match moved {
            Ok(moved) => {
                if moved {
                    self.moved_at = around.now;
                }
                moved
            }
            Err(error) => {
                self.give_up(Answer::Failed(error), around);
                true
            }
        }
    }

    fn send(&mut self, around: &mut Around<'_>) -> Result<bool, MpiError> {
        match &mut self.sending {
            Sending::Done => return Ok(false),
            Sending::Waiting { ready, to, messages } => {
                if !around.mpi.test(ready)? {
                    return Ok(false);
                }
                let (to, messages) = (*to, std::mem::take(messages));
                // What has begun is kept when a later message is refused.
                self.sending = Sending::Moving { to, requests: VecDeque::new() };
                let Sending::Moving { requests, .. } = &mut self.sending else { unreachable!("just set") };
                for pieces in messages {
                    requests.push_back(around.mpi.send(Memory::Lent(pieces), to, self.tag)?);
                }
            }
            Sending::Moving { requests, .. } => {
                if !end_first(around.mpi, requests)? {
                    return Ok(false);
                }
                if requests.is_empty() {
                    self.sending = Sending::Done;
                }
            }
        }
        Ok(true)
    }

    fn receive(&mut self, around: &mut Around<'_>) -> Result<bool, MpiError> {
        match &mut self.receiving {
            Receiving::Done => return Ok(false),
            Receiving::First { first, .. } => {
                if !around.mpi.test(first)? {
                    return Ok(false);
                }
                self.meet(around)?;
            }
            Receiving::Moving { requests, .. } => {
                if !end_first(around.mpi, requests)? {
                    return Ok(false);
                }
                if requests.is_empty() {
                    self.receiving = Receiving::Done;
                }
            }
        }
        Ok(true)
    }

    /// The first message is there.
    fn meet(&mut self, around: &mut Around<'_>) -> Result<(), MpiError> {
        let receiving = std::mem::replace(&mut self.receiving, Receiving::Done);
        let Receiving::First { first, from, expected, messages } = receiving else {
            unreachable!("it was awaited")
        };
        let mut bytes = first.into_bytes().expect("it has ended, and is not lent");
        let got: &Preamble = bytes.first_chunk().expect("there is room for a preamble");
        if *got != expected {
            let (header, len_bytes) = split(got);
            self.give_up(Answer::Differs { header, len_bytes }, around);
        } else if messages.is_empty() {
            bytes.drain(..PREAMBLE);
            self.short = bytes;
        } else {
            self.receiving = Receiving::Moving { from, requests: VecDeque::new() };
            let Receiving::Moving { requests, .. } = &mut self.receiving else { unreachable!("just set") };
            for pieces in messages {
                requests.push_back(around.mpi.receive(Memory::Lent(pieces), from, self.tag)?);
            }
            around.loose.push(around.mpi.send(Memory::Own(Vec::new()), from, self.tag + 1)?);
        }
        Ok(())
    }

    /// Gives up after the time limit.
    pub(crate) fn look_at_clock(&mut self, timeout: Duration, around: &mut Around<'_>) {
        if around.now.saturating_sub(self.moved_at) > timeout {
            let late = match (&self.receiving, &self.sending) {
                (Receiving::First { from, .. } | Receiving::Moving { from, .. }, _) => *from,
                (Receiving::Done, Sending::Waiting { to, .. } | Sending::Moving { to, .. }) => *to,
                (Receiving::Done, Sending::Done) => return,
            };
            self.give_up(Answer::Late(late), around);
        }
    }

    /// Ends what can be ended; the first reason counts. What moves in the caller's memory goes on to its end.
    pub(crate) fn give_up(&mut self, answer: Answer, around: &mut Around<'_>) {
        self.ending.get_or_insert(Ending { answer, since: around.now, cancelled: false });
        self.sending = match std::mem::replace(&mut self.sending, Sending::Done) {
            Sending::Waiting { ready, .. } => {
                let_go(ready, around);
                Sending::Done
            }
            other => other,
        };
        self.receiving = match std::mem::replace(&mut self.receiving, Receiving::Done) {
            Receiving::First { first, .. } => {
                let_go(first, around);
                Receiving::Done
            }
            other => other,
        };
    }

    /// Whether nothing of it is left to do; then it has answered.
    pub(crate) fn has_ended(&mut self, around: &mut Around<'_>) -> bool {
        if let (Sending::Done, Receiving::Done) = (&self.sending, &self.receiving) {
            let short = std::mem::take(&mut self.short);
            let answer = self.ending.take().map_or(Answer::Done(short), |ending| ending.answer);
            // Whoever asked waits for the answer, unless its thread was torn down with the process.
            drop(self.answer.send(answer));
            return true;
        }
        if let (Some(ending), Receiving::Moving { requests, .. }) = (&mut self.ending, &mut self.receiving)
            && !ending.cancelled
            && around.now.saturating_sub(ending.since) > GRACE
        {
            ending.cancelled = true;
            // Where that is refused, the receive goes on.
            requests.iter_mut().for_each(|request| drop(around.mpi.cancel(request)));
        }
        false
    }
}

/// Nobody waits for this receive any more. Its memory is its own.
fn let_go(mut receive: Request, around: &mut Around<'_>) {
    // Where that is refused, the receive goes on, and its memory with it.
    drop(around.mpi.cancel(&mut receive));
    around.loose.push(receive);
}

/// Whether the first of these operations has ended. One that failed is taken out, as one that has ended.
fn end_first(mpi: &Mpi, requests: &mut VecDeque<Request>) -> Result<bool, MpiError> {
    let Some(first) = requests.front_mut() else { return Ok(true) };
    let ended = mpi.test(first);
    if !matches!(ended, Ok(false)) {
        requests.pop_front();
    }
    ended
}
