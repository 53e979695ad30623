//! Token ids as bytes: mapped from a file, or in memory.

use std::ops::Deref;
use std::path::Path;
use std::{fmt, io};

use fsdp_ckpt::digest::{Digest, DigestKind};
use fsdp_config::input_file;
use rayon::prelude::*;

use super::mapped::Mapped;

/// Smaller files are read instead of mapped: a process can have some 65,000 mappings, and there may be as many files.
const MAPPED_BYTES_MIN: u64 = 1 << 16;

/// Bytes read per task of a scan.
const BLOCK_BYTES: usize = 1 << 18;

/// Token files of a larger total size, in bytes, are not read completely at every start but sampled.
pub(super) const FULL_SCAN_BYTES_MAX: usize = 1 << 28;

/// Minimum number of samples, and the size of each in bytes.
const SAMPLES_MIN: usize = 1024;
const SAMPLE_BYTES: usize = 1 << 12;

/// Immutable bytes.
pub(super) enum Bytes {
    /// Bytes in the memory of this process.
    Owned(Vec<u8>),
    /// Bytes in the kernel's page cache.
    Mapped(Mapped),
}

impl Bytes {
    /// Opens the bytes of a regular file.
    ///
    /// # Errors
    /// Errors of the file system, and [`InputFault`](input_file::InputFault) if the file is not regular.
    pub(super) fn open(path: &Path) -> io::Result<Bytes> {
        let file = input_file::open(path)?;
        if file.metadata()?.len() < MAPPED_BYTES_MIN {
            return input_file::read(path, u64::MAX).map(Bytes::Owned);
        }
        Mapped::of(&file).map(Bytes::Mapped)
    }

    /// Computes the CRC-64 of bytes on all cores.
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

/// The bit of a marked id that excludes the token from the loss. No vocabulary is that large.
pub(super) const IGNORED_BIT: u32 = 1 << 31;

/// A token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    /// Token id.
    pub(super) id: u32,
    /// Whether the token counts in the loss.
    pub(super) counts: bool,
}

impl Token {
    /// Returns a token that counts in the loss.
    pub(super) fn counted(id: u32) -> Token {
        Token { id, counts: true }
    }

    fn of_marked(word: u32) -> Token {
        Token { id: word & !IGNORED_BIT, counts: word & IGNORED_BIT == 0 }
    }
}

/// Format of an id, which is little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
    /// Four bytes, with [`IGNORED_BIT`] set in ids that do not count in the loss.
    Marked,
}

impl Width {
    /// Bytes per id.
    pub(super) fn bytes(self) -> usize {
        match self {
            Width::U16 => 2,
            Width::U32 | Width::Marked => 4,
        }
    }
}

/// Ids at the start of bytes.
#[derive(Debug)]
pub(super) struct Tokens {
    bytes: Bytes,
    width: Width,
    len: usize,
}

impl Tokens {
    /// Takes the first `len` ids of `bytes`.
    ///
    /// # Panics
    /// If there are fewer ids.
    pub(super) fn new(bytes: Bytes, width: Width, len: usize) -> Tokens {
        assert!(len <= bytes.len() / width.bytes(), "{bytes:?} hold {len} ids");
        Tokens { bytes, width, len }
    }

    /// Number of ids.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns a token.
    ///
    /// # Panics
    /// If the index is out of range.
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

    /// All bytes, including those after the ids.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads all ids once.
    pub(super) fn scan(&self) -> Scan {
        in_blocks(self.ids(), |block| Scan::of(block, self.width), Scan::then)
    }

    /// Reads the first ids of every `every`-th block.
    fn sample(&self, every: usize) -> Scan {
        // Training also reads samples of such large files at random.
        if let Bytes::Mapped(mapped) = &self.bytes {
            mapped.disable_read_ahead();
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

/// Maps each block of the bytes, on all cores, and combines the results of adjacent blocks.
fn in_blocks<T: Send>(
    bytes: &[u8],
    map: impl Fn(&[u8]) -> T + Sync + Send,
    combine: impl Fn(T, T) -> T + Sync + Send,
) -> T {
    // Small inputs do not start threads.
    if bytes.len() <= BLOCK_BYTES {
        return map(bytes);
    }
    bytes.par_chunks(BLOCK_BYTES).map(map).reduce_with(combine).expect("there is a block")
}

/// Statistics of ids, all of which or samples of which were read. Scans of adjacent ids can be combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// CRC-64 of the ids, each as four little-endian bytes with its mark. For sampled files, CRC-64 of the number of
    /// ids followed by the samples.
    pub(super) digest: Digest,
    /// Number of bytes in the checksum.
    len_bytes: u64,
    /// The largest id that was read; `None` if no id was read.
    pub(super) id_max: Option<u32>,
    /// Whether some tokens do not count in the loss.
    pub(super) has_ignored: bool,
}

impl Scan {
    /// A scan of no ids.
    pub(super) fn empty() -> Scan {
        Scan { digest: DigestKind::Crc64.empty(), len_bytes: 0, id_max: None, has_ignored: false }
    }

    /// Scans a sequence of token files: all ids if they have at most `full_scan_bytes_max`, else samples, so that the
    /// time of a start is bounded.
    pub(super) fn of_files<'a>(
        files: impl Iterator<Item = &'a Tokens> + Clone,
        full_scan_bytes_max: usize,
    ) -> Scan {
        let len_bytes: usize = files.clone().map(|tokens| tokens.ids().len()).sum();
        let every = (len_bytes / BLOCK_BYTES / SAMPLES_MIN).max(1);
        let scan = |tokens: &Tokens| {
            if len_bytes <= full_scan_bytes_max { tokens.scan() } else { tokens.sample(every) }
        };
        files.map(scan).fold(Scan::empty(), Scan::then)
    }

    /// Returns the scan of these ids followed by those of `next`.
    fn then(self, next: Scan) -> Scan {
        Scan {
            digest: self.digest.then(next.digest, next.len_bytes),
            len_bytes: self.len_bytes + next.len_bytes,
            id_max: self.id_max.max(next.id_max),
            has_ignored: self.has_ignored || next.has_ignored,
        }
    }

    fn of(block: &[u8], width: Width) -> Scan {
        match width {
            Width::U16 => {
                let wide = block.as_chunks().0.iter().map(|&id| u32::from(u16::from_le_bytes(id)).to_le());
                Scan::of_wide(bytemuck::cast_slice(&wide.collect::<Vec<u32>>()), 0)
            }
            Width::U32 => Scan::of_wide(block, 0),
            Width::Marked => Scan::of_wide(block, IGNORED_BIT),
        }
    }

    /// Scans 32-bit words, which are marked if a bit of `mark` is set.
    fn of_wide(bytes: &[u8], mark: u32) -> Scan {
        let words = || bytes.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id));
        let (id_max, has_ignored) =
            (words().map(|word| word & !mark).max(), words().any(|word| word & mark != 0));
        Scan { digest: DigestKind::Crc64.of(bytes), len_bytes: bytes.len() as u64, id_max, has_ignored }
    }
}

#[cfg(test)]
mod tests;
