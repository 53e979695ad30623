//! The thread that owns MPI: it takes orders of links, and works on all exchanges until none is left.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::Alarm;
use fsdp_core::comm::CommError;
use fsdp_core::{Rank, RunClock};

use crate::error::MpiError;
use crate::exchange::{Answer, Around, Exchange, Order};
use crate::ffi::{Mpi, Request};

/// How long there is looked without a pause after the last thing that happened: while messages are awaited, and while
/// data moves, which only happens when MPI is called.
const SPIN: Duration = Duration::from_micros(50);
const SPIN_MOVING: Duration = Duration::from_millis(20);

/// Pauses grow with the time since the last thing that happened, from the first of these up to one of the others.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX_MOVING: Duration = Duration::from_micros(50);
const NAP_MAX: Duration = Duration::from_millis(1);

/// When nothing is under way, MPI may still have bytes of messages that it took over in memory of its own, and sends them
/// only when it is called.
const NAP_MAX_IDLE: Duration = Duration::from_millis(20);

/// How often clock and alarm are looked at meanwhile.
const LOOK: Duration = Duration::from_millis(1);

/// What is asked of the thread.
pub(crate) enum Message {
    /// Exchange, and answer.
    Exchange(Order, Sender<Answer>),
    /// Finalise MPI, and end.
    Finalise(Sender<Result<(), MpiError>>),
}

/// MPI is to be finalised as soon as nothing is under way.
struct Finalise {
    answer: Sender<Result<(), MpiError>>,
    asked: Duration,
}

/// The state of the thread.
pub(crate) struct Engine {
    mpi: Mpi,
    messages: Receiver<Message>,
    alarm: Arc<dyn Alarm>,
    timeout: Duration,
    exchanges: Vec<Exchange>,
    /// Operations with memory of their own, for which nobody waits.
    loose: Vec<Request>,
    finalise: Option<Finalise>,
    clock: RunClock,
    born: Instant,
    /// Time as far as this process ran, when it was last looked at.
    now: Duration,
    looked: Instant,
    /// When something happened last.
    happened: Instant,
}

impl Engine {
    pub(crate) fn new(
        mpi: Mpi,
        messages: Receiver<Message>,
        alarm: Arc<dyn Alarm>,
        timeout: Duration,
    ) -> Self {
        let born = Instant::now();
        Self {
            mpi,
            messages,
            alarm,
            timeout,
            exchanges: Vec::new(),
            loose: Vec::new(),
            finalise: None,
            clock: RunClock::new(timeout),
            born,
            now: Duration::ZERO,
            looked: born,
            happened: born,
        }
    }

    /// Works until MPI is finalised, or nobody is left who could ask for anything.
    pub(crate) fn run(mut self) {
        loop {
            let has_happened = self.work();
            if self.looked.elapsed() >= LOOK {
                self.look();
            }
            if let Some(ending) =
                self.finalise.take_if(|_| self.exchanges.is_empty() && self.loose.is_empty())
            {
                // Whoever asked waits for it.
                drop(ending.answer.send(self.mpi.finalise()));
                return;
            }
            if has_happened {
                self.happened = Instant::now();
            }
            match self.next_message() {
                Ok(message) => self.accept(message),
                Err(TryRecvError::Empty) => {}
                // Whoever waits for an exchange could still ask for one, so there is none.
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// Goes through everything once; whether anything has happened.
    fn work(&mut self) -> bool {
        let mut around = Around { mpi: &self.mpi, loose: &mut self.loose, now: self.now };
        let mut has_happened = false;
        self.exchanges.retain_mut(|exchange| {
            has_happened |= exchange.step(&mut around);
            let has_ended = exchange.has_ended(&mut around);
            has_happened |= has_ended;
            !has_ended
        });
        let mut failure = None;
        self.loose.retain_mut(|request| match self.mpi.test(request) {
            Ok(has_ended) => !has_ended,
            Err(error) => {
                failure = Some(error);
                false
            }
        });
        if self.exchanges.is_empty() && self.loose.is_empty() {
            failure = self.mpi.progress().err().or(failure);
        }
        if let Some(error) = failure {
            self.alarm.raise(transport(Rank(self.mpi.rank() as usize), &error));
        }
        has_happened
    }

    /// Looks at the clock and at the alarm.
    fn look(&mut self) {
        self.looked = Instant::now();
        self.now = self.clock.at(self.looked - self.born);
        let alarm = self.alarm.raised();
        let mut around = Around { mpi: &self.mpi, loose: &mut self.loose, now: self.now };
        for exchange in &mut self.exchanges {
            match &alarm {
                Some(error) => exchange.give_up(Answer::Alarm(error.clone()), &mut around),
                None => exchange.look_at_clock(self.timeout, &mut around),
            }
        }
        let (messages, seconds) = (self.exchanges.len() + self.loose.len(), self.timeout.as_secs());
        let is_over =
            |ending: &mut Finalise| alarm.is_some() || self.now.saturating_sub(ending.asked) > self.timeout;
        if let Some(ending) = self.finalise.take_if(is_over) {
            let why = alarm.map_or(MpiError::Unfinished { messages, seconds }, MpiError::Failed);
            drop(ending.answer.send(Err(why)));
        }
    }

    fn accept(&mut self, message: Message) {
        self.happened = Instant::now();
        self.look();
        match message {
            Message::Exchange(order, answer) => match self.alarm.raised() {
                Some(error) => drop(answer.send(Answer::Alarm(error))),
                None => {
                    let mut around = Around { mpi: &self.mpi, loose: &mut self.loose, now: self.now };
                    self.exchanges.push(Exchange::begin(order, answer, &mut around));
                }
            },
            Message::Finalise(answer) => {
                self.finalise = Some(Finalise { answer, asked: self.now });
                self.look();
            }
        }
    }

    /// The next message; without one, after a pause that suits what is under way.
    fn next_message(&self) -> Result<Message, TryRecvError> {
        let is_moving = self.exchanges.iter().any(Exchange::is_moving);
        let is_idle = self.exchanges.is_empty() && self.loose.is_empty();
        let (spin, nap_max) = match (is_moving, is_idle) {
            (true, _) => (SPIN_MOVING, NAP_MAX_MOVING),
            (false, false) => (SPIN, NAP_MAX),
            (false, true) => (Duration::ZERO, NAP_MAX_IDLE),
        };
        let quiet = self.happened.elapsed();
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

/// A failure of MPI as collectives report it.
pub(crate) fn transport(rank: Rank, error: &MpiError) -> CommError {
    CommError::Transport { rank, reason: error.to_string() }
}
