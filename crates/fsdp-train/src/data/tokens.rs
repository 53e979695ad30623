//! Token ids as bytes: mapped from a file, or in memory.

use std::ops::Deref;
use std::path::Path;
use std::{fmt, io};

use fsdp_ckpt::digest::{Digest, DigestKind};
use rayon::prelude::*;

use super::mapped::Mapped;
use crate::input_file;

/// Files below this length are read. A process has some 65,000 mappings, and documents may lie in as many files.
const MAPPED_BYTES_MIN: u64 = 1 << 16;

/// What one task of a scan reads.
const BLOCK_BYTES: usize = 1 << 18;

/// Files of tokens that have more bytes together are not read whole at every start, only samples of them.
pub(super) const WHOLE_BYTES_MAX: usize = 1 << 28;

/// How many samples that are, at least, and the bytes of each.
const SAMPLES_MIN: usize = 1024;
const SAMPLE_BYTES: usize = 1 << 12;

/// Bytes that do not change.
pub(super) enum Bytes {
    /// In the memory of this process.
    Owned(Vec<u8>),
    /// In the kernel's cache of files.
    Mapped(Mapped),
}

impl Bytes {
    /// The bytes of a regular file.
    ///
    /// # Errors
    /// Those of the file system, and [`InputFault`](input_file::InputFault) for what is no regular file.
    pub(super) fn open(path: &Path) -> io::Result<Bytes> {
        let file = input_file::open(path)?;
        if file.metadata()?.len() < MAPPED_BYTES_MIN {
            return input_file::read(path, u64::MAX).map(Bytes::Owned);
        }
        Mapped::of(&file).map(Bytes::Mapped)
    }

    /// CRC-64 of them, worked out by all cores.
    pub(super) fn digest(bytes: &[u8]) -> Digest {
        let block = |bytes: &[u8]| (DigestKind::Crc64.of(bytes), bytes.len() as u64);
        let then =
            |(first, len): (Digest, u64), (next, next_len)| (first.then(next, next_len), len + next_len);
        in_blocks(bytes, block, then).0
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// The bit of a marked id that says that the token does not count. No vocabulary is that large.
pub(super) const SILENT: u32 = 1 << 31;

/// A token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    /// Its id.
    pub(super) id: u32,
    /// Whether it is to be learned.
    pub(super) counts: bool,
}

impl Token {
    /// One that counts.
    pub(super) fn counted(id: u32) -> Token {
        Token { id, counts: true }
    }

    fn of_marked(word: u32) -> Token {
        Token { id: word & !SILENT, counts: word & SILENT == 0 }
    }
}

/// How wide an id is. Ids are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
    /// Four bytes, and [`SILENT`] in those that do not count.
    Marked,
}

impl Width {
    /// Bytes of an id.
    pub(super) fn bytes(self) -> usize {
        match self {
            Width::U16 => 2,
            Width::U32 | Width::Marked => 4,
        }
    }
}

/// The ids that bytes begin with.
#[derive(Debug)]
pub(super) struct Tokens {
    bytes: Bytes,
    width: Width,
    len: usize,
}

impl Tokens {
    /// The first `len` ids.
    ///
    /// # Panics
    /// If there are fewer bytes.
    pub(super) fn new(bytes: Bytes, width: Width, len: usize) -> Tokens {
        assert!(len <= bytes.len() / width.bytes(), "{bytes:?} hold {len} ids");
        Tokens { bytes, width, len }
    }

    /// The number of ids.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// A token.
    ///
    /// # Panics
    /// If it is behind the last.
    pub(super) fn token(&self, index: usize) -> Token {
        let wide = || u32::from_le_bytes(self.bytes.as_chunks().0[..self.len][index]);
        match self.width {
            Width::U16 => {
                Token::counted(u16::from_le_bytes(self.bytes.as_chunks().0[..self.len][index]).into())
            }
            Width::U32 => Token::counted(wide()),
            Width::Marked => Token::of_marked(wide()),
        }
    }

    /// All bytes, also those behind the ids.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads all ids once.
    pub(super) fn scan(&self) -> Scan {
        in_blocks(self.ids(), |block| Scan::of(block, self.width), Scan::then)
    }

    /// Reads the first ids of one in `every` blocks.
    fn sample(&self, every: usize) -> Scan {
        // So are training samples of what is so large.
        if let Bytes::Mapped(mapped) = &self.bytes {
            mapped.is_read_here_and_there();
        }
        let blocks = self.ids().par_chunks(BLOCK_BYTES).step_by(every);
        let samples = blocks.map(|block| Scan::of(&block[..block.len().min(SAMPLE_BYTES)], self.width));
        let len = DigestKind::Crc64.of(&(self.len as u64).to_le_bytes());
        let sampled = samples.reduce(Scan::empty, Scan::then);
        Scan {
            digest: len.then(sampled.digest, sampled.len_bytes),
            len_bytes: 8 + sampled.len_bytes,
            ..sampled
        }
    }

    /// The bytes of the ids.
    fn ids(&self) -> &[u8] {
        &self.bytes[..self.len * self.width.bytes()]
    }
}

/// What is known of bytes, by all cores: of each block, then of neighbours together.
fn in_blocks<T: Send>(
    bytes: &[u8],
    of: impl Fn(&[u8]) -> T + Sync + Send,
    then: impl Fn(T, T) -> T + Sync + Send,
) -> T {
    // What is small starts no threads.
    if bytes.len() <= BLOCK_BYTES {
        return of(bytes);
    }
    bytes.par_chunks(BLOCK_BYTES).map(of).reduce_with(then).expect("there is a block")
}

/// What is known of ids once they, or samples of them, were read. Scans of neighbours combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// CRC-64 of the ids, each as four little-endian bytes, with their marks. Of sampled files: of the number of ids and then
    /// of the samples.
    pub(super) digest: Digest,
    /// The length of these bytes.
    len_bytes: u64,
    /// The largest id that was read; `None` where there is none.
    pub(super) id_max: Option<u32>,
    /// Whether there are tokens that do not count.
    pub(super) has_silent: bool,
}

impl Scan {
    /// Of no ids.
    pub(super) fn empty() -> Scan {
        Scan { digest: DigestKind::Crc64.empty(), len_bytes: 0, id_max: None, has_silent: false }
    }

    /// Of files of tokens, one after the other: of all ids if they have at most `whole_bytes`, else of samples, so that a
    /// start takes no longer the more there are.
    pub(super) fn of_files<'a>(files: impl Iterator<Item = &'a Tokens> + Clone, whole_bytes: usize) -> Scan {
        let len_bytes: usize = files.clone().map(|tokens| tokens.ids().len()).sum();
        let every = (len_bytes / BLOCK_BYTES / SAMPLES_MIN).max(1);
        let scan = |tokens: &Tokens| {
            if len_bytes <= whole_bytes { tokens.scan() } else { tokens.sample(every) }
        };
        files.map(scan).fold(Scan::empty(), Scan::then)
    }

    /// Of these ids followed by others.
    fn then(self, next: Scan) -> Scan {
        Scan {
            digest: self.digest.then(next.digest, next.len_bytes),
            len_bytes: self.len_bytes + next.len_bytes,
            id_max: self.id_max.max(next.id_max),
            has_silent: self.has_silent || next.has_silent,
        }
    }

    fn of(block: &[u8], width: Width) -> Scan {
        match width {
            Width::U16 => {
                let wide = block.as_chunks().0.iter().map(|&id| u32::from(u16::from_le_bytes(id)).to_le());
                Scan::of_wide(bytemuck::cast_slice(&wide.collect::<Vec<u32>>()), 0)
            }
            Width::U32 => Scan::of_wide(block, 0),
            Width::Marked => Scan::of_wide(block, SILENT),
        }
    }

    /// Of words that have a mark where one of these bits is set.
    fn of_wide(bytes: &[u8], mark: u32) -> Scan {
        let words = || bytes.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id));
        let (id_max, has_silent) =
            (words().map(|word| word & !mark).max(), words().any(|word| word & mark != 0));
        Scan { digest: DigestKind::Crc64.of(bytes), len_bytes: bytes.len() as u64, id_max, has_silent }
    }
}

#[cfg(test)]
mod tests;
