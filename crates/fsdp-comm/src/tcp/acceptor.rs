//! Accepts the connections of other processes.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::TcpLinks;
use super::connection::{Connection, PROOF_LIMIT};
use super::memory::allow_reads;
use super::shared::{Name, Shared, TcpWorld, purpose};
use crate::auth::gate::Gate;
use crate::auth::{Side, Token, authenticate_within};
use crate::monitor::Monitor;

/// A listening port, bound before the other processes are known.
pub struct TcpAcceptor {
    gate: Gate,
}

impl TcpAcceptor {
    /// Binds a port that the operating system chooses.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn bind(address: IpAddr) -> io::Result<Self> {
        let gate = Gate::new(TcpListener::bind((address, 0))?, PROOF_LIMIT)?;
        Ok(Self { gate })
    }

    /// The address of the port.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.gate.listener().local_addr()
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
        let (links, weak) = (Arc::downgrade(&shared), Arc::downgrade(&shared));
        self.gate.open(
            "data connections",
            move || links.strong_count() > 0,
            // A connection that fails to authenticate is ignored.
            move |stream, limit| drop(admit(stream, limit, &weak)),
        )?;
        Ok(TcpLinks { shared })
    }
}

/// Authenticates a connection and stores it for its rank.
fn admit(stream: TcpStream, limit: Duration, shared: &Weak<Shared>) -> io::Result<()> {
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    stream.set_nodelay(true)?;
    let purpose = purpose(shared.world.generation);
    authenticate_within(&stream, limit, &shared.token, Side::Answerer, &purpose).map_err(io::Error::other)?;
    stream.set_read_timeout(Some(PROOF_LIMIT))?;
    let name = Name::read(&stream)?;
    let connection = Connection::open(stream, shared.world.direct_from)?;
    shared.add_arrived(name, connection);
    Ok(())
}
