//! Messages between nodes: one line of JSON each, over an authenticated connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agent::PULSE;

/// A peer that is silent for longer is lost.
const SILENCE_MAX: Duration = PULSE.saturating_mul(15);

/// Messages are short, so they fit into the system's buffer at once, unless the peer has stopped reading.
const SEND_WITHIN: Duration = Duration::from_secs(2);

/// Maximum length of a message, in bytes.
const LINE_MAX: u64 = 64 << 10;

/// Sends a message. Failures are noticed by the reader of the connection.
pub(super) fn send<T: Serialize>(mut stream: &TcpStream, message: &T) {
    let mut line = serde_json::to_vec(message).expect("messages are plain values");
    line.push(b'\n');
    if let Err(error) = stream.set_write_timeout(Some(SEND_WITHIN)).and_then(|()| stream.write_all(&line)) {
        tracing::debug!("a message to another node: {error}");
    }
}

/// The received messages, until the peer is gone, silent for too long, or sends something that is not a message.
pub(super) fn receive<T: DeserializeOwned>(
    stream: &TcpStream,
) -> io::Result<impl Iterator<Item = T> + use<T>> {
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    Ok(std::iter::from_fn(move || {
        let mut line = Vec::new();
        let read = (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line);
        read.ok().and_then(|_| serde_json::from_slice(&line).ok())
    }))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::super::message::Order;
    use super::*;

    #[test]
    fn receive_ends_at_invalid_line_or_disconnect() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (answerer, _) = listener.accept().unwrap();
        let mut received = receive::<Order>(&answerer).unwrap();
        for order in [Order::Stop, Order::Finish { code: 3, because: Some("a\nb".to_owned()) }] {
            send(&caller, &order);
            assert_eq!(received.next(), Some(order));
        }
        caller.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(received.next(), None);
        drop(caller);
        assert_eq!(receive::<Order>(&answerer).unwrap().next(), None, "it is gone");
    }
}
