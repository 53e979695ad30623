//! A port at which many connections may arrive, of which few know the token.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum number of connections that authenticate at a time; further ones wait in the listen backlog.
const AUTHENTICATING_MAX: usize = 256;

/// Connections that may wait. The system limits it further (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// How often the accepting thread checks whether it is still needed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Small, because there may be many threads.
const STACK_BYTES: usize = 128 << 10;

/// While others may be waiting, a connection has this part of its time.
const SHARE_WHEN_FULL: u32 = 5;

/// See the [module](self).
pub struct Gate {
    listener: TcpListener,
    /// Time limit of one authentication.
    limit: Duration,
}

impl Gate {
    /// Opens a gate at a listener. A connection has `limit` to authenticate, and less while all places are taken, so
    /// that others need not wait for long.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn new(listener: TcpListener, limit: Duration) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Self { listener, limit })
    }

    /// The listener.
    pub fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Starts a thread that accepts connections while `is_needed`. Each is passed to `authenticate` with its time
    /// limit, on a thread of its own with a small stack, so a slow one delays no other.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn open(
        self,
        name: &str,
        is_needed: impl Fn() -> bool + Send + 'static,
        authenticate: impl Fn(TcpStream, Duration) + Send + Sync + 'static,
    ) -> io::Result<()> {
        let accept = move || self.accept(&is_needed, &Arc::new(authenticate));
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(accept).map(drop).map_err(|error| no_thread(name, &error))
    }

    fn accept(
        &self,
        is_needed: &dyn Fn() -> bool,
        authenticate: &Arc<impl Fn(TcpStream, Duration) + Send + Sync + 'static>,
    ) {
        let authenticating = Arc::new(AtomicUsize::new(0));
        let mut was_full = false;
        while is_needed() {
            let busy = authenticating.load(Ordering::Relaxed);
            if busy >= AUTHENTICATING_MAX {
                was_full = true;
                thread::sleep(POLL_INTERVAL);
                continue;
            }
            was_full &= busy > AUTHENTICATING_MAX / 2;
            let stream = match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(false).is_ok() => stream,
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_caller();
                    continue;
                }
                // A lack of file descriptors, or a caller that has gone, does not end the world: the other end retries
                // or times out.
                Err(_) => {
                    thread::sleep(POLL_INTERVAL);
                    continue;
                }
            };
            let limit = if was_full { self.limit / SHARE_WHEN_FULL } else { self.limit };
            authenticating.fetch_add(1, Ordering::Relaxed);
            let (authenticate, counter) = (Arc::clone(authenticate), Arc::clone(&authenticating));
            let run = move || {
                authenticate(stream, limit);
                counter.fetch_sub(1, Ordering::Relaxed);
            };
            run_apart(run);
        }
    }

    fn wait_for_caller(&self) {
        let limit = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as i64 };
        if poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&limit)).is_err() {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Runs an authentication on a thread of its own, so that a slow one delays no other; if none can be started, on this one.
/// Where the system has no more threads, processes of the same run must still meet.
fn run_apart(authentication: impl FnOnce() + Send + 'static) {
    let kept = Arc::new(Mutex::new(Some(authentication)));
    let shared = Arc::clone(&kept);
    let run = move || {
        let authentication = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
        authentication.into_iter().for_each(|authentication| authentication());
    };
    let thread = thread::Builder::new().name("fsdp-auth".to_owned()).stack_size(STACK_BYTES);
    if thread.spawn(run.clone()).is_err() {
        run();
    }
}

/// The error of a thread that could not be started, which the system's own does not name.
pub(crate) fn no_thread(name: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot start the thread \"{name}\": {error}"))
}

#[cfg(test)]
mod tests;
