//! Accepts the connections of other processes.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::connection::{Connection, Name, PROOF_LIMIT, purpose};
use super::memory::allow_reads;
use super::{Shared, TcpLinks, TcpWorld};
use crate::monitor::Monitor;
use crate::process::auth::{Side, Token, authenticate_within};

/// Maximum number of connections that authenticate at a time; further ones wait in the listen backlog.
const AUTHENTICATING_MAX: usize = 256;

/// How often the accepting thread checks whether it is still needed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Small, because there may be many threads.
const STACK_BYTES: usize = 128 << 10;

/// A listening port, bound before the other processes are known.
pub struct TcpAcceptor {
    listener: TcpListener,
}

impl TcpAcceptor {
    /// Binds a port that the operating system chooses.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn bind(address: IpAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// The address of the port.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Starts accepting connections that know the `token` and belong to this world.
    ///
    /// # Errors
    /// The accepting thread cannot be started.
    pub fn open(self, world: TcpWorld, token: Token) -> io::Result<TcpLinks> {
        if world.direct_from.is_some() {
            allow_reads();
        }
        let channels = world.addresses.iter().map(|_| Default::default()).collect();
        let shared = Arc::new(Shared { world, token, arrived: Monitor::default(), channels });
        let weak = Arc::downgrade(&shared);
        let accept = move || accept_connections(&self.listener, &weak);
        thread::Builder::new().name("data connections".to_owned()).stack_size(STACK_BYTES).spawn(accept)?;
        Ok(TcpLinks { shared })
    }
}

/// Accepts connections until the links are dropped.
fn accept_connections(listener: &TcpListener, shared: &Weak<Shared>) {
    let authenticating = Arc::new(AtomicUsize::new(0));
    while shared.strong_count() > 0 {
        if authenticating.load(Ordering::Relaxed) >= AUTHENTICATING_MAX {
            thread::sleep(POLL_INTERVAL);
            continue;
        }
        // A caller that has gone, or a lack of file descriptors or threads, does not end the world: the other end
        // retries or times out.
        let Ok((stream, _)) = listener.accept() else {
            wait_for_caller(listener);
            continue;
        };
        authenticating.fetch_add(1, Ordering::Relaxed);
        let (shared, counter) = (Weak::clone(shared), Arc::clone(&authenticating));
        let authenticate = move || {
            // A connection that fails to authenticate is ignored.
            let _ = admit(stream, &shared);
            counter.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new().stack_size(STACK_BYTES).spawn(authenticate).is_err() {
            authenticating.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn wait_for_caller(listener: &TcpListener) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as i64 };
    if poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)).is_err() {
        thread::sleep(POLL_INTERVAL);
    }
}

/// Authenticates a connection and stores it for its rank.
fn admit(stream: TcpStream, shared: &Weak<Shared>) -> io::Result<()> {
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let purpose = purpose(shared.world.generation);
    authenticate_within(&stream, PROOF_LIMIT, &shared.token, Side::Answerer, &purpose)
        .map_err(io::Error::other)?;
    stream.set_read_timeout(Some(PROOF_LIMIT))?;
    let name = Name::read(&stream)?;
    let connection = Connection::open(stream, shared.world.direct_from)?;
    shared.add_arrived(name, connection);
    Ok(())
}
