//! Joining a world, before the control plane has its own thread.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::FailureKind;

use super::driver::{Driver, PROOF_MAX, PURPOSE};
use super::error::{JoinError, Obstacle};
use crate::auth::{Side, Token, authenticate_within};
use crate::process::message::Join;
use crate::process::protocol::{Event, Leader, Member, Pulse};
use crate::process::rendezvous::RendezvousError;
use crate::process::world::{Facts, Roster};

/// Time limit for a connection to one address.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Pauses between two attempts.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The identity of a process in the control plane, and its time limits.
#[derive(Clone, Debug)]
pub struct ControlOptions {
    /// Index of this process.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// Number of ranks of this process; at least 1.
    pub local_ranks: usize,
    /// Facts about this process for the roster.
    pub facts: Facts,
    /// The token of the run.
    pub token: Token,
    /// Heartbeat interval; more than 0.
    pub heartbeat: Duration,
    /// Silence after which a process counts as dead; several heartbeats.
    pub dead_after: Duration,
    /// Time limit until all processes have joined.
    pub join_timeout: Duration,
}

impl ControlOptions {
    pub(super) fn join(&self, nonce: u64) -> Join {
        assert!(self.local_ranks > 0, "a process holds at least one rank");
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let (process, processes, local_ranks) = (self.process, self.processes, self.local_ranks);
        Join { version, process, processes, local_ranks, nonce, facts: self.facts.clone() }
    }

    fn pulse(&self) -> Pulse {
        assert!(
            !self.heartbeat.is_zero() && self.heartbeat < self.dead_after,
            "silence is longer than a heartbeat"
        );
        Pulse::new(self.heartbeat, self.dead_after)
    }
}

/// See [`Control::lead`](super::Control::lead).
pub(super) fn lead(
    listener: TcpListener,
    options: ControlOptions,
) -> Result<(Driver<Leader>, Roster), JoinError> {
    let begin = Instant::now();
    // Generation 0 marks a sender that does not know the generation.
    let generation = getrandom::u64()?.max(1);
    let leader = Leader::new(options.join(generation), generation, options.pulse());
    let mut driver = Driver::new(leader, options.heartbeat, options.processes)?;
    driver.open(listener, options.token)?;
    loop {
        if let Some(Event::Go(roster)) = driver.turn()? {
            return Ok((driver, roster));
        }
        if begin.elapsed() >= options.join_timeout {
            let (processes, waited) = (driver.machine.missing(), options.join_timeout);
            return Err(JoinError::Missing { processes, waited, stranger: driver.last_auth_error });
        }
    }
}

/// See [`Control::follow`](super::Control::follow).
pub(super) fn follow(
    leader: &dyn Fn() -> Result<Vec<SocketAddr>, RendezvousError>,
    options: ControlOptions,
) -> Result<(Driver<Member>, Roster), JoinError> {
    let begin = Instant::now();
    let end = begin + options.join_timeout;
    let member = Member::new(options.join(getrandom::u64()?), options.pulse());
    let mut driver = Driver::new(member, options.heartbeat, options.processes)?;
    let mut pause = PAUSE_MIN;
    // Since when there have been only obstacles that do not resolve by themselves.
    let mut hopeless_since = None;
    loop {
        let addresses = match leader() {
            // A name service may be temporarily unavailable.
            Err(error) if error.kind() == FailureKind::Temporary && Instant::now() + pause < end => {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
                continue;
            }
            found => found?,
        };
        let obstacle = match attempt(&mut driver, &addresses, &options, end)? {
            Ok(roster) => return Ok((driver, roster)),
            Err(obstacle) => obstacle,
        };
        let is_hopeless = match obstacle.patience(options.dead_after) {
            None => {
                hopeless_since = None;
                false
            }
            Some(patience) => hopeless_since.get_or_insert_with(Instant::now).elapsed() >= patience,
        };
        // A truncated attempt would report a less useful obstacle than this one.
        if is_hopeless || Instant::now() + 2 * pause >= end {
            let (process, waited) = (options.process, begin.elapsed());
            return Err(JoinError::Follow { process, waited, obstacle });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Makes one attempt: tries the addresses in turn until one authenticates.
fn attempt(
    driver: &mut Driver<Member>,
    addresses: &[SocketAddr],
    options: &ControlOptions,
    end: Instant,
) -> Result<Result<Roster, Obstacle>, JoinError> {
    let mut obstacle = Obstacle::NoAddress;
    for &address in addresses {
        match connect(address, options, end) {
            Ok(stream) => {
                driver.add(stream)?;
                return wait_for_go(driver, end);
            }
            Err(other) => obstacle = other,
        }
    }
    Ok(Err(obstacle))
}

fn connect(address: SocketAddr, options: &ControlOptions, end: Instant) -> Result<TcpStream, Obstacle> {
    // A timeout of zero is an error.
    let left = end.saturating_duration_since(Instant::now()).max(PAUSE_MIN);
    let stream = TcpStream::connect_timeout(&address, left.min(CONNECT_MAX));
    let stream = stream.map_err(|source| Obstacle::Connect { address, source })?;
    authenticate_within(&stream, left.min(PROOF_MAX), &options.token, Side::Caller, PURPOSE)
        .map_err(|source| Obstacle::Auth { address, source })?;
    Ok(stream)
}

fn wait_for_go(driver: &mut Driver<Member>, end: Instant) -> Result<Result<Roster, Obstacle>, JoinError> {
    while Instant::now() < end {
        match driver.turn()? {
            None => {}
            Some(Event::Go(roster)) => return Ok(Ok(roster)),
            Some(Event::Refused(refusal)) => return Ok(Err(Obstacle::Refused(refusal))),
            Some(Event::Dropped { reason }) => return Ok(Err(Obstacle::Dropped { reason })),
            Some(other) => unreachable!("{other:?} does not concern joining"),
        }
    }
    Ok(Err(Obstacle::Others))
}
