//! Accepts connections on the leader.

use std::io;
use std::net::{self, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use mio::net::TcpListener;

use super::PURPOSE;
use super::shared::Shared;
use crate::process::auth::gate::run_apart;
use crate::process::auth::{Side, Token, authenticate_within};

/// Time limit of one authentication.
pub(super) const PROOF_MAX: Duration = Duration::from_secs(5);

/// Connections that may authenticate at the same time, in addition to one per process. Further ones wait in the listen
/// backlog until one of these has finished or timed out.
const AUTHENTICATING_MAX: usize = 64;

/// See the [module](self).
pub(super) struct Authenticator {
    pub(super) listener: TcpListener,
    token: Token,
    /// Number of connections that are authenticating.
    busy: usize,
    busy_max: usize,
    /// Whether connections may be waiting in the backlog.
    pub(super) may_have_backlog: bool,
}

impl Authenticator {
    pub(super) fn new(listener: net::TcpListener, token: Token, processes: usize) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener);
        Ok(Self {
            listener,
            token,
            busy: 0,
            busy_max: AUTHENTICATING_MAX + processes,
            may_have_backlog: true,
        })
    }

    /// Accepts waiting connections, as far as the limit allows.
    pub(super) fn accept(&mut self, shared: &Arc<Shared>) {
        while self.may_have_backlog && self.busy < self.busy_max {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    self.busy += 1;
                    self.authenticate(stream.into(), shared);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.may_have_backlog = false,
                // Out of file descriptors, or the other end is gone: retried later.
                Err(_) => return,
            }
        }
    }

    /// A connection has finished its authentication.
    pub(super) fn authentication_ended(&mut self) {
        self.busy -= 1;
    }

    fn authenticate(&self, stream: TcpStream, shared: &Arc<Shared>) {
        let (token, shared) = (self.token.clone(), shared.clone());
        run_apart(move || {
            let proof = stream
                .set_nonblocking(false)
                .map_err(Into::into)
                .and_then(|()| authenticate_within(&stream, PROOF_MAX, &token, Side::Answerer, PURPOSE));
            shared.arrive(proof.map(|()| stream));
        });
    }
}
