//! A non-blocking connection.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;

use mio::net::TcpStream;

use crate::process::frame::{Decoder, Frame};

/// Bytes per read.
const CHUNK_LEN: usize = 16 << 10;

/// A socket with its outgoing queue and its partly received frame.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    decoder: Decoder,
    outbox: VecDeque<Arc<[u8]>>,
    /// Number of bytes sent of the first entry of the outbox.
    sent: usize,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, decoder: Decoder::default(), outbox: VecDeque::new(), sent: 0 }
    }

    /// Reads the available frames. An error means that the connection has ended, after these frames.
    pub(super) fn read(&mut self, frames: &mut Vec<Frame>) -> Result<(), String> {
        let mut chunk = [0; CHUNK_LEN];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => {
                    self.decoder.end().map_err(|error| error.to_string())?;
                    return Err(closed());
                }
                Ok(len) => {
                    self.decoder.push(&chunk[..len]);
                    while let Some(frame) = self.decoder.next().map_err(|error| error.to_string())? {
                        frames.push(frame);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => return Err(closed()),
                    _ => return Err(format!("its connection failed: {error}")),
                },
            }
        }
    }

    /// Queues bytes and sends as much as possible.
    pub(super) fn send(&mut self, bytes: Arc<[u8]>) {
        self.outbox.push_back(bytes);
        self.write();
    }

    /// Sends as much as possible. Errors are not reported: reading meets them too, after the last frames of the other
    /// end.
    pub(super) fn write(&mut self) {
        while let Some(bytes) = self.outbox.front() {
            match self.stream.write(&bytes[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.outbox.clear(),
            }
            if self.outbox.front().is_some_and(|bytes| bytes.len() == self.sent) {
                self.outbox.pop_front();
                self.sent = 0;
            }
        }
    }

    /// Shuts down the sending side once everything is sent; returns whether the other end has closed too.
    pub(super) fn drain(&mut self) -> bool {
        self.write();
        if self.outbox.is_empty() {
            // An error means that the connection has ended; reading then reports it.
            let _ended = self.stream.shutdown(Shutdown::Write);
        }
        self.read(&mut Vec::new()).is_err()
    }
}

fn closed() -> String {
    "its connection was closed".to_owned()
}
