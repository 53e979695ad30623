//! Where a leader accepts connections. Each proves in a thread of its own that it knows the token, so nobody waits for
//! one that is slow.

use std::io;
use std::net::{self, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use mio::net::TcpListener;

use super::PURPOSE;
use super::shared::Shared;
use crate::process::auth::{Side, Token, authenticate_within};

/// How long a proof may take.
pub(super) const PROOF_MAX: Duration = Duration::from_secs(5);

/// Strangers that may try at the same time, beside as many processes as there are. Whoever comes then waits in the queue
/// of the system until one of them has proven itself or has had its time.
const STRANGERS_MAX: usize = 64;

/// A proof needs a few hundred bytes.
const STACK_LEN: usize = 128 << 10;

/// See the [module](self).
pub(super) struct Gate {
    pub(super) listener: TcpListener,
    token: Token,
    /// Connections that are proving themselves.
    busy: usize,
    busy_max: usize,
    /// Whether somebody may stand at the gate.
    pub(super) is_called: bool,
}

impl Gate {
    pub(super) fn new(listener: net::TcpListener, token: Token, processes: usize) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener);
        Ok(Self { listener, token, busy: 0, busy_max: STRANGERS_MAX + processes, is_called: true })
    }

    /// Lets in who stands there, as far as there is room; others wait outside.
    pub(super) fn accept(&mut self, shared: &Arc<Shared>) {
        while self.is_called && self.busy < self.busy_max {
            match self.listener.accept() {
                Ok((stream, _)) => self.busy += usize::from(self.examine(stream.into(), shared)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_called = false,
                // Files may be short, or the other end gone: look again later.
                Err(_) => return,
            }
        }
    }

    /// A thread has told how a connection proved itself.
    pub(super) fn examined(&mut self) {
        self.busy -= 1;
    }

    /// Whether there is a thread that will tell.
    fn examine(&self, stream: TcpStream, shared: &Arc<Shared>) -> bool {
        let (token, shared) = (self.token.clone(), shared.clone());
        let prove = move || {
            let proof = stream
                .set_nonblocking(false)
                .map_err(Into::into)
                .and_then(|()| authenticate_within(&stream, PROOF_MAX, &token, Side::Answerer, PURPOSE));
            shared.arrive(proof.map(|()| stream));
        };
        // Without a thread the connection is closed, and whoever made it tries again.
        thread::Builder::new().name("fsdp-gate".to_owned()).stack_size(STACK_LEN).spawn(prove).is_ok()
    }
}
