//! Messages that the receiver reads directly from the sender's memory: between processes of one machine, if the
//! operating system permits it (`process_vm_readv`).
//!
//! A socket copies bytes twice, in pieces that fit into kernel buffers; this copies them once. Open MPI does the same
//! between processes of a node and calls it CMA.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::TcpStream;

use super::memory::{Memory, MemoryRange};

/// Determines whether both ends of a new connection can read each other's memory. Both ends call this at the same time;
/// if either is not `allowed`, the result is `None` for both.
///
/// Each end sends its process id and the address of a random number, and looks for the other's number: on another
/// machine or in another container, that process id belongs to another process, or to none.
///
/// # Errors
/// The errors of the stream.
pub(super) fn negotiate(mut stream: &TcpStream, allowed: bool) -> io::Result<Option<Memory>> {
    let mut secret = Box::new([0u8; 16]);
    getrandom::fill(&mut *secret).map_err(io::Error::other)?;
    let place = MemoryRange::of(&*secret);
    stream.write_all(&bytemuck::cast::<_, [u8; 24]>([
        u64::from(std::process::id()),
        place.address,
        place.len,
    ]))?;
    stream.write_all(&*secret)?;
    let (mut peer_location, mut peer_secret) = ([0; 24], [0; 16]);
    stream.read_exact(&mut peer_location)?;
    stream.read_exact(&mut peer_secret)?;
    let [process, address, len]: [u64; 3] = bytemuck::cast(peer_location);
    let memory = Memory::of(process).filter(|memory| {
        let mut found = [0; 16];
        let place = MemoryRange { address, len: len.min(found.len() as u64) };
        allowed && memory.read(&[place], &mut [IoSliceMut::new(&mut found)]).is_ok() && found == peer_secret
    });
    stream.write_all(&[u8::from(memory.is_some())])?;
    let mut peer_can_read = [0];
    stream.read_exact(&mut peer_can_read)?;
    // The other end may read the secret until here.
    drop(secret);
    Ok(memory.filter(|_| peer_can_read == [1]))
}

/// Encodes the locations of a message's non-empty parts: their number, then address and length of each.
pub(super) fn places(parts: &[&[u8]]) -> Vec<u8> {
    let places: Vec<MemoryRange> =
        parts.iter().filter(|part| !part.is_empty()).map(|part| MemoryRange::of(part)).collect();
    let numbers = places.iter().flat_map(|place| [place.address, place.len]);
    std::iter::once(places.len() as u64).chain(numbers).flat_map(u64::to_le_bytes).collect()
}

/// Locations being received.
pub(super) struct Places {
    bytes: Vec<u8>,
    received: usize,
}

const NUMBER_BYTES: usize = size_of::<u64>();

impl Places {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; NUMBER_BYTES], received: 0 }
    }

    /// Buffer for the next bytes; empty once everything has arrived.
    pub(super) fn missing(&mut self) -> &mut [u8] {
        &mut self.bytes[self.received..]
    }

    /// Records that `read` more bytes have arrived, for a message of `len_bytes`.
    ///
    /// # Errors
    /// There are more locations than bytes in the message.
    pub(super) fn advance(&mut self, read: usize, len_bytes: u64) -> io::Result<()> {
        self.received += read;
        if self.received == NUMBER_BYTES && self.bytes.len() == NUMBER_BYTES {
            let number = self.numbers().next().unwrap_or(0);
            if number > len_bytes {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a message has more parts than bytes",
                ));
            }
            self.bytes.resize((1 + 2 * number as usize) * NUMBER_BYTES, 0);
        }
        Ok(())
    }

    /// All locations, once they have arrived.
    ///
    /// # Errors
    /// Their total length is not `len_bytes`.
    pub(super) fn all(&self, len_bytes: u64) -> io::Result<Vec<MemoryRange>> {
        let numbers: Vec<u64> = self.numbers().skip(1).collect();
        let places: Vec<MemoryRange> =
            numbers.chunks_exact(2).map(|pair| MemoryRange { address: pair[0], len: pair[1] }).collect();
        let total = places.iter().try_fold(0u64, |total, place| total.checked_add(place.len));
        if total == Some(len_bytes) {
            Ok(places)
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the parts of a message do not add up to its length",
            ))
        }
    }

    fn numbers(&self) -> impl Iterator<Item = u64> {
        self.bytes
            .chunks_exact(NUMBER_BYTES)
            .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }
}
