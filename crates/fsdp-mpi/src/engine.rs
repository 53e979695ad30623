//! The thread that owns MPI: it takes requests from the links and drives all exchanges until none is left.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::Alarm;
use fsdp_core::comm::CommError;
use fsdp_core::{Rank, RunClock};

use crate::error::MpiError;
use crate::exchange::{Answer, Exchange, ExchangeContext, Transfer};
use crate::ffi::{Mpi, Request};

/// How long to poll without sleeping after the last event: while waiting for messages, and while data moves, because
/// MPI moves data only inside its calls.
const SPIN: Duration = Duration::from_micros(50);
const SPIN_MOVING: Duration = Duration::from_millis(20);

/// Sleeps grow with the time since the last event, from the first of these up to one of the maxima.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX_MOVING: Duration = Duration::from_micros(50);
const NAP_MAX: Duration = Duration::from_millis(1);

/// Maximum sleep when nothing is in flight. MPI may still hold messages in its own buffers, and sends them only when it
/// is called.
const NAP_MAX_IDLE: Duration = Duration::from_millis(20);

/// Interval between checks of the clock and the alarm.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// A request to the thread.
pub(crate) enum Message {
    /// Run an exchange and answer.
    Exchange(Transfer, Sender<Answer>),
    /// Finalize MPI and end the thread.
    Finalize(Sender<Result<(), MpiError>>),
}

/// A pending request to finalize MPI as soon as nothing is in flight.
struct Finalize {
    answer: Sender<Result<(), MpiError>>,
    requested_at: Duration,
}

/// The state of the MPI thread.
pub(crate) struct Engine {
    mpi: Mpi,
    messages: Receiver<Message>,
    alarm: Arc<dyn Alarm>,
    timeout: Duration,
    exchanges: Vec<Exchange>,
    /// Operations that own their memory and that no exchange waits for.
    detached: Vec<Request>,
    finalize: Option<Finalize>,
    clock: RunClock,
    start: Instant,
    /// Time during which this process was running, as of the last check.
    now: Duration,
    last_check: Instant,
    /// Time of the last event.
    last_event: Instant,
}

impl Engine {
    pub(crate) fn new(
        mpi: Mpi,
        messages: Receiver<Message>,
        alarm: Arc<dyn Alarm>,
        timeout: Duration,
    ) -> Self {
        let start = Instant::now();
        Self {
            mpi,
            messages,
            alarm,
            timeout,
            exchanges: Vec::new(),
            detached: Vec::new(),
            finalize: None,
            clock: RunClock::new(timeout),
            start,
            now: Duration::ZERO,
            last_check: start,
            last_event: start,
        }
    }

    /// Runs until MPI is finalized, or the world and all its links are dropped.
    pub(crate) fn run(mut self) {
        loop {
            let has_progressed = self.work();
            if self.last_check.elapsed() >= CHECK_INTERVAL {
                self.check();
            }
            if let Some(ending) =
                self.finalize.take_if(|_| self.exchanges.is_empty() && self.detached.is_empty())
            {
                // The caller waits for the answer.
                drop(ending.answer.send(self.mpi.finalize()));
                return;
            }
            if has_progressed {
                self.last_event = Instant::now();
            }
            match self.next_message() {
                Ok(message) => self.accept(message),
                Err(TryRecvError::Empty) => {}
                // A caller that waits for an exchange holds a sender, so no exchange is pending.
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// Advances all operations once. Returns whether anything has happened.
    fn work(&mut self) -> bool {
        let mut context = ExchangeContext { mpi: &self.mpi, detached: &mut self.detached, now: self.now };
        let mut has_progressed = false;
        self.exchanges.retain_mut(|exchange| {
            has_progressed |= exchange.step(&mut context);
            let has_ended = exchange.has_ended(&mut context);
            has_progressed |= has_ended;
            !has_ended
        });
        let mut failure = None;
        self.detached.retain_mut(|request| match self.mpi.test(request) {
            Ok(has_ended) => !has_ended,
            Err(error) => {
                failure = Some(error);
                false
            }
        });
        if self.exchanges.is_empty() && self.detached.is_empty() {
            failure = self.mpi.progress().err().or(failure);
        }
        if let Some(error) = failure {
            self.alarm.raise(transport(Rank(self.mpi.rank() as usize), &error));
        }
        has_progressed
    }

    /// Checks the clock and the alarm.
    fn check(&mut self) {
        self.last_check = Instant::now();
        self.now = self.clock.at(self.last_check - self.start);
        let alarm = self.alarm.raised();
        let mut context = ExchangeContext { mpi: &self.mpi, detached: &mut self.detached, now: self.now };
        for exchange in &mut self.exchanges {
            match &alarm {
                Some(error) => exchange.give_up(Answer::Alarm(error.clone()), &mut context),
                None => exchange.check_timeout(self.timeout, &mut context),
            }
        }
        let (messages, seconds) = (self.exchanges.len() + self.detached.len(), self.timeout.as_secs());
        let is_over = |ending: &mut Finalize| {
            alarm.is_some() || self.now.saturating_sub(ending.requested_at) > self.timeout
        };
        if let Some(ending) = self.finalize.take_if(is_over) {
            let error = alarm.map_or(MpiError::Unfinished { messages, seconds }, MpiError::Failed);
            drop(ending.answer.send(Err(error)));
        }
    }

    fn accept(&mut self, message: Message) {
        self.last_event = Instant::now();
        self.check();
        match message {
            Message::Exchange(transfer, answer) => match self.alarm.raised() {
                Some(error) => drop(answer.send(Answer::Alarm(error))),
                None => {
                    let mut context =
                        ExchangeContext { mpi: &self.mpi, detached: &mut self.detached, now: self.now };
                    self.exchanges.push(Exchange::begin(transfer, answer, &mut context));
                }
            },
            Message::Finalize(answer) => {
                self.finalize = Some(Finalize { answer, requested_at: self.now });
                self.check();
            }
        }
    }

    /// Returns the next message, or an error after a pause that suits the operations in flight.
    fn next_message(&self) -> Result<Message, TryRecvError> {
        let is_moving = self.exchanges.iter().any(Exchange::is_moving);
        let is_idle = self.exchanges.is_empty() && self.detached.is_empty();
        let (spin, nap_max) = match (is_moving, is_idle) {
            (true, _) => (SPIN_MOVING, NAP_MAX_MOVING),
            (false, false) => (SPIN, NAP_MAX),
            (false, true) => (Duration::ZERO, NAP_MAX_IDLE),
        };
        let quiet = self.last_event.elapsed();
        if quiet < spin {
            thread::yield_now();
            return self.messages.try_recv();
        }
        let nap = (quiet / 4).clamp(NAP_MIN, nap_max).min(self.clock.interval());
        self.messages.recv_timeout(nap).map_err(|error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
        })
    }
}

/// Converts a failure of MPI into the error that collectives report.
pub(crate) fn transport(rank: Rank, error: &MpiError) -> CommError {
    CommError::Transport { rank, reason: error.to_string() }
}
