//! Reads the bytes of a pickle from front to back, with checked lengths.

use super::limits::{STRING_BYTES_MAX, too_large};
use crate::error::Fault;

/// A position in the bytes of a pickle.
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input { bytes, at: 0 }
    }

    /// The position of the next byte.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], Fault> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| truncated(self.at, what))?;
        self.at += len;
        Ok(taken)
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        Ok(self.take(N, what)?.try_into().expect("a slice of this length was taken"))
    }

    /// The next byte.
    pub(super) fn byte(&mut self, what: &str) -> Result<u8, Fault> {
        Ok(self.array::<1>(what)?[0])
    }

    /// An unsigned little-endian number of `N` bytes.
    pub(super) fn unsigned<const N: usize>(&mut self, what: &str) -> Result<u64, Fault> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.array::<N>(what)?);
        Ok(u64::from_le_bytes(wide))
    }

    /// Bytes that follow their length, which is a number of `N` bytes.
    pub(super) fn counted<const N: usize>(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let at = self.at;
        let len = self.unsigned::<N>(what)?;
        if len > STRING_BYTES_MAX as u64 {
            return Err(too_large(at, "bytes in one value", STRING_BYTES_MAX));
        }
        self.take(len as usize, what)
    }

    /// Text that follows its length, which is a number of `N` bytes.
    pub(super) fn text<const N: usize>(&mut self) -> Result<&'a str, Fault> {
        let at = self.at;
        str::from_utf8(self.counted::<N>("a text")?).map_err(|_| not_utf8(at))
    }

    /// Text up to a line feed, which is consumed too.
    pub(super) fn line(&mut self) -> Result<&'a str, Fault> {
        let at = self.at;
        let rest = &self.bytes[at..];
        let len = rest.iter().position(|&byte| byte == b'\n');
        let len = len.ok_or_else(|| truncated(at, "the name of a global"))?;
        self.at += len + 1;
        str::from_utf8(&rest[..len]).map_err(|_| not_utf8(at))
    }
}

fn truncated(at: usize, what: &str) -> Fault {
    Fault::at(at, format!("it ends inside {what}"))
}

fn not_utf8(at: usize) -> Fault {
    Fault::at(at, "a text is not UTF-8")
}
