//! Where a process answers the connections of others.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::connection::{Connection, Name, PROOF_LIMIT, purpose};
use super::memory::allow;
use super::{Shared, TcpLinks, TcpWorld};
use crate::monitor::Monitor;
use crate::process::auth::{Side, Token, authenticate_within};

/// Connections that are being proven at one time: further ones wait in the queue of the operating system.
const PROVING_MAX: usize = 256;

/// How often the door looks whether it is still needed.
const LOOK: Duration = Duration::from_millis(100);

/// Small, since there may be many.
const STACK_BYTES: usize = 128 << 10;

/// A port that others can connect to, before it is known who they are.
pub struct TcpDoor {
    listener: TcpListener,
}

impl TcpDoor {
    /// Binds a port that the operating system chooses.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn bind(address: IpAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Where it is.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Begins to answer those who know the `token` and are of this world.
    ///
    /// # Errors
    /// The thread that answers can not be started.
    pub fn open(self, world: TcpWorld, token: Token) -> io::Result<TcpLinks> {
        if world.direct_from.is_some() {
            allow();
        }
        let channels = world.addresses.iter().map(|_| Default::default()).collect();
        let shared = Arc::new(Shared { world, token, arrived: Monitor::default(), channels });
        let weak = Arc::downgrade(&shared);
        let answer = move || answer(&self.listener, &weak);
        thread::Builder::new().name("data connections".to_owned()).stack_size(STACK_BYTES).spawn(answer)?;
        Ok(TcpLinks { shared })
    }
}

/// Answers until nobody uses the connections any more.
fn answer(listener: &TcpListener, shared: &Weak<Shared>) {
    let proving = Arc::new(AtomicUsize::new(0));
    while shared.strong_count() > 0 {
        if proving.load(Ordering::Relaxed) >= PROVING_MAX {
            thread::sleep(LOOK);
            continue;
        }
        // Neither a caller that went away nor a lack of files or threads ends the world: whoever is not answered tries again,
        // or is late.
        let Ok((stream, _)) = listener.accept() else {
            wait_for_caller(listener);
            continue;
        };
        proving.fetch_add(1, Ordering::Relaxed);
        let (shared, proven) = (Weak::clone(shared), Arc::clone(&proving));
        let prove = move || {
            // Who can not prove itself is nobody's concern.
            let _ = welcome(stream, &shared);
            proven.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new().stack_size(STACK_BYTES).spawn(prove).is_err() {
            proving.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn wait_for_caller(listener: &TcpListener) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
    if poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)).is_err() {
        thread::sleep(LOOK);
    }
}

/// Proves a connection and keeps it for the rank that it is for.
fn welcome(stream: TcpStream, shared: &Weak<Shared>) -> io::Result<()> {
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let purpose = purpose(shared.world.generation);
    authenticate_within(&stream, PROOF_LIMIT, &shared.token, Side::Answerer, &purpose)
        .map_err(io::Error::other)?;
    stream.set_read_timeout(Some(PROOF_LIMIT))?;
    let name = Name::read(&stream)?;
    let connection = Connection::open(stream, shared.world.direct_from)?;
    shared.arrive(name, connection);
    Ok(())
}
