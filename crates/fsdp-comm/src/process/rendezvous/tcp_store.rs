//! A client of torchrun's store, used only as a name service.
//!
//! The protocol is that of PyTorch's `TCPStoreBackend.hpp`: a connection begins with `VALIDATE` (1 byte and a magic
//! number of 4 bytes, no reply) and `PING` (1 byte and a nonce of 4 bytes, which is returned); each query begins with
//! one byte. Strings are a length of 8 bytes, little-endian, followed by the bytes. Keys begin with a slash.
//!
//! Keys outlive a restart of the processes: a value may have been set by a dead process.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

const VALIDATE: [u8; 5] = [0x00, 0xce, 0xf7, 0x85, 0x3c];
const PING: u8 = 0x0d;
const SET: u8 = 0x01;
const GET: u8 = 0x03;

/// The longest value that is read; the values are addresses.
const VALUE_BYTES_MAX: u64 = 8 << 10;

/// Time limit for each operation on the store.
const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// A connection to a store.
pub(super) struct TcpStore {
    stream: TcpStream,
}

impl TcpStore {
    /// Connects to the store, makes one query, and disconnects.
    pub(super) fn query<T>(
        (host, port): (&str, u16),
        query: impl FnOnce(&mut Self) -> io::Result<T>,
    ) -> io::Result<T> {
        Self::connect(host, port).and_then(|mut store| query(&mut store)).map_err(|error| {
            match error.kind() {
                // What a socket with a time limit reports.
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    let text = format!("it has not answered within {} s", LIMIT.as_secs());
                    io::Error::new(io::ErrorKind::TimedOut, text)
                }
                io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "it has closed the connection"),
                _ => error,
            }
        })
    }

    fn connect(host: &str, port: u16) -> io::Result<Self> {
        let mut last_error = io::Error::other(format!("{host} has no address"));
        for address in (host, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, LIMIT) {
                Ok(stream) => return Self::handshake(stream),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    fn handshake(mut stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let nonce = std::process::id().to_le_bytes();
        stream.write_all(&[&VALIDATE[..], &[PING], &nonce].concat())?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        if answer == nonce { Ok(Self { stream }) } else { Err(io::Error::other("it is not a PyTorch store")) }
    }

    /// Sets a key.
    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        self.stream.write_all(&[&[SET][..], &encode_string(key.as_bytes()), &encode_string(value)].concat())
    }

    /// The value of a key; `None` if it is not set.
    pub(super) fn get(&mut self, key: &str) -> io::Result<Option<Vec<u8>>> {
        self.stream.write_all(&[&[GET][..], &encode_string(key.as_bytes())].concat())?;
        let mut len = [0; 8];
        self.stream.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > VALUE_BYTES_MAX {
            return Err(io::Error::other(format!("the value of {key} has {len} bytes")));
        }
        let mut value = vec![0; len as usize];
        self.stream.read_exact(&mut value)?;
        Ok((len > 0).then_some(value))
    }
}

fn encode_string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}
