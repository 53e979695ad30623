//! A time limit on the whole proof. Socket timeouts apply per read: a peer that sends a byte now and then could hold
//! the connection for minutes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::{AuthError, Side, Token, authenticate};

/// Runs [`authenticate`] on a socket, for at most `limit`. The socket has no timeouts afterwards.
///
/// # Errors
/// [`AuthError`]; [`AuthError::Connection`] of kind `TimedOut` if the limit was exceeded.
pub fn authenticate_within(
    stream: &TcpStream,
    limit: Duration,
    token: &Token,
    side: Side,
    purpose: &[u8],
) -> Result<(), AuthError> {
    authenticate(&mut Deadline { stream, end: Instant::now() + limit }, token, side, purpose)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(())
}

struct Deadline<'a> {
    stream: &'a TcpStream,
    end: Instant,
}

impl Deadline<'_> {
    fn remaining(&self) -> io::Result<Option<Duration>> {
        let remaining = self.end.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(timed_out()) } else { Ok(Some(remaining)) }
    }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the time limit has passed")
}

/// Maps a socket timeout to this error.
fn map_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { timed_out() } else { error }
}

impl Read for Deadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.remaining()?)?;
        self.stream.read(bytes).map_err(map_timeout)
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.remaining()?)?;
        self.stream.write(bytes).map_err(map_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
