//! The event loop that connects sockets and clock to the protocol.

use std::collections::BTreeMap;
use std::io;
use std::net::{self, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};

use super::connection::Connection;
use super::shared::Shared;
use crate::auth::gate::Gate;
use crate::auth::{self, AuthError, Side, authenticate_within};
use crate::process::protocol::{ConnectionId, Event, Machine, Output, Request};

const WAKER: Token = Token(0);
const FIRST_CONNECTION: usize = 1;

/// The purpose that connections of the control plane authenticate for.
pub(super) const PURPOSE: &[u8] = b"control";

/// Time limit of one authentication.
pub(super) const PROOF_MAX: Duration = Duration::from_secs(5);

/// Ticks per heartbeat.
const TICKS: u32 = 4;

/// Time limit for the other ends to read the last messages of this process.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// Events handled per turn, in addition to one per process.
const EVENTS: usize = 64;

/// See the [module](self).
pub(super) struct Driver<M> {
    poll: Poll,
    events: Events,
    pub(super) machine: M,
    /// Keeps the port for other processes open while this exists.
    port: Option<Arc<()>>,
    connections: BTreeMap<ConnectionId, Connection>,
    /// The id of the next connection.
    next: usize,
    begin: Instant,
    tick: Duration,
    last_tick: Instant,
    ticks: u32,
    /// The last call that was reported to the others.
    reported_call: Option<String>,
    shared: Arc<Shared>,
    /// Why the last connection failed to authenticate.
    pub(super) last_auth_error: Option<AuthError>,
    has_left: bool,
}

impl<M: Machine> Driver<M> {
    pub(super) fn new(machine: M, heartbeat: Duration, processes: usize) -> io::Result<Self> {
        let poll = Poll::new()?;
        let shared = Arc::new(Shared::new(Waker::new(poll.registry(), WAKER)?));
        let now = Instant::now();
        Ok(Self {
            poll,
            events: Events::with_capacity(processes + EVENTS),
            machine,
            port: None,
            connections: BTreeMap::new(),
            next: FIRST_CONNECTION,
            begin: now,
            tick: heartbeat / TICKS,
            last_tick: now,
            ticks: 0,
            reported_call: None,
            shared,
            last_auth_error: None,
            has_left: false,
        })
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Accepts connections that know the token, from now on.
    pub(super) fn open(&mut self, listener: TcpListener, token: auth::Token) -> io::Result<()> {
        let (port, shared) = (Arc::new(()), self.shared());
        let weak = Arc::downgrade(&port);
        self.port = Some(port);
        let authenticate = move |stream: net::TcpStream, limit| {
            let proof = authenticate_within(&stream, limit, &token, Side::Answerer, PURPOSE);
            shared.arrive(proof.map(|()| stream));
        };
        Gate::new(listener, PROOF_MAX)?.open("fsdp-port", move || weak.strong_count() > 0, authenticate)
    }

    /// Adds an authenticated connection.
    pub(super) fn add(&mut self, stream: net::TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        let id = ConnectionId(self.next);
        self.next += 1;
        self.poll.registry().register(&mut stream, Token(id.0), Interest::READABLE | Interest::WRITABLE)?;
        self.connections.insert(id, Connection::new(stream));
        self.machine.opened(id);
        Ok(())
    }

    /// Runs the loop until this process has left.
    pub(super) fn run(mut self) {
        let shared = self.shared.clone();
        while !self.has_left {
            if let Err(error) = self.turn() {
                self.close_all(&error);
                break;
            }
        }
        self.drain();
        shared.leave();
    }

    /// Waits for an event or the next tick, handles it, and returns the event that concerns joining, if any. At most
    /// one: a process joins over one connection at a time.
    pub(super) fn turn(&mut self) -> io::Result<Option<Event>> {
        self.wait((self.last_tick + self.tick).saturating_duration_since(Instant::now()))?;
        let ready: Vec<Token> = self.events.iter().map(|event| event.token()).collect();
        for token in ready {
            match token {
                WAKER => {}
                Token(id) => self.serve(ConnectionId(id)),
            }
        }
        self.process_inbox();
        // After reading everything: a process that was stopped has not read for a long time.
        if self.last_tick.elapsed() >= self.tick {
            self.last_tick = Instant::now();
            self.report_last_call();
            self.machine.tick(self.begin.elapsed());
        }
        Ok(self.perform())
    }

    /// Reports, once per heartbeat, the last collective that this process has begun, if it has changed.
    fn report_last_call(&mut self) {
        self.ticks += 1;
        if !self.ticks.is_multiple_of(TICKS) {
            return;
        }
        let call = self.shared.last_call(None);
        if call.is_some() && call != self.reported_call {
            self.reported_call.clone_from(&call);
            self.machine.request(Request::Calling { call: call.unwrap_or_default() });
        }
    }

    fn wait(&mut self, limit: Duration) -> io::Result<()> {
        match self.poll.poll(&mut self.events, Some(limit)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                self.events.clear();
                Ok(())
            }
            other => other,
        }
    }

    fn serve(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.write();
        let mut frames = Vec::new();
        let end = connection.read(&mut frames);
        frames.into_iter().for_each(|frame| self.machine.received(id, frame));
        if let Err(reason) = end {
            self.connections.remove(&id);
            self.machine.closed(id, &reason);
        }
    }

    fn process_inbox(&mut self) {
        let inbox = self.shared.take();
        for proof in inbox.arrivals {
            // A connection for which this process has no resources is closed; the other end retries.
            let _refused =
                proof.map(|stream| self.add(stream)).map_err(|error| self.last_auth_error = Some(error));
        }
        inbox.requests.into_iter().for_each(|request| self.machine.request(request));
        if inbox.is_abandoned {
            self.perform();
            self.connections.clear();
            self.has_left = true;
        }
    }

    fn perform(&mut self) -> Option<Event> {
        let mut joining = None;
        for output in self.machine.take() {
            match output {
                Output::Send(to, frame) => {
                    let bytes: Arc<[u8]> = frame.encode().into();
                    for id in to {
                        self.connections
                            .get_mut(&id)
                            .into_iter()
                            .for_each(|connection| connection.send(bytes.clone()));
                    }
                }
                Output::Close(id) => drop(self.connections.remove(&id)),
                Output::Event(event) => joining = joining.or(self.dispatch(event)),
            }
        }
        joining
    }

    /// Passes an event to the ranks of this process; returns it if it concerns joining.
    fn dispatch(&mut self, event: Event) -> Option<Event> {
        match event {
            Event::Gave { topic, rank, value } => {
                self.shared.topics.give(&topic, fsdp_core::Rank(rank), value);
            }
            Event::Announced { topic, value } => self.shared.topics.announce(&topic, value),
            Event::Verdict(verdict) => self.shared.decide(&verdict),
            Event::Lost { ranks, error } => self.shared.lose(ranks, &error),
            Event::Left => self.has_left = true,
            Event::Refused(_) | Event::Dropped { .. } | Event::Go(_) => return Some(event),
        }
        None
    }

    /// Handles a failure to poll: all connections are closed, and their loss is reported as usual.
    fn close_all(&mut self, error: &io::Error) {
        for id in std::mem::take(&mut self.connections).into_keys() {
            self.machine.closed(id, &format!("it cannot be reached: {error}"));
        }
        self.perform();
    }

    /// Sends the rest, and waits until the other ends have closed: closing a connection with unread data resets it,
    /// which may lose the last bytes sent.
    fn drain(&mut self) {
        self.port = None;
        let begin = Instant::now();
        loop {
            self.connections.retain(|_, connection| !connection.drain());
            let left = DRAIN_MAX.saturating_sub(begin.elapsed());
            if self.connections.is_empty() || left.is_zero() || self.wait(left).is_err() {
                return;
            }
        }
    }
}
