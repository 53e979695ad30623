//! What manifests and nodes of OCDBT consist of: an envelope with length and CRC-32C, numbers, tables of files, keys.
//!
//! ```text
//! magic (4 bytes) | length of all (8) | version 0 | 0 plain or 1 zstd | body | CRC-32C of what is before it (4)
//! ```
//!
//! Numbers are varints of 7 bits per byte unless stated otherwise. Lists of records are stored by columns. No length or
//! count is trusted: memory is taken only for what is in the body, or within [`TABLE_BYTES_MAX`].

use std::{io::Read, sync::Arc};

use crate::{
    digest::{Digest, DigestKind},
    error::Fault,
    file_io::is_plain_name,
};

/// Maximum length of a manifest or node, encoded or decoded. Orbax's nodes have 100 million bytes at most.
pub(super) const NODE_BYTES_MAX: u64 = 1 << 28;

/// Maximum total length of the paths or keys of one table, which are stored without the beginnings that they share.
const TABLE_BYTES_MAX: usize = 1 << 26;

/// Maximum length of a path or key, as in the format.
const NAME_BYTES_MAX: usize = 65_535;

/// Bytes of an envelope before the version, and of the checksum at its end.
const HEADER_LEN: usize = 12;
const CRC_LEN: usize = 4;

/// The checksum of an envelope, over all bytes but its last four.
pub(super) fn digest(encoded: &[u8]) -> Digest {
    DigestKind::Crc32c.of(&encoded[..encoded.len() - CRC_LEN])
}

/// Checks an envelope and returns its decoded body.
pub(super) fn body(encoded: &[u8], magic: u32) -> Result<Vec<u8>, Fault> {
    if encoded.len() < HEADER_LEN + 2 + CRC_LEN || encoded[..4] != magic.to_be_bytes() {
        return Err(Fault::new(format!("it does not begin with {magic:08x}; fetch or save it again")));
    }
    let mut input = Input { bytes: &encoded[4..encoded.len() - CRC_LEN] };
    let length = u64::from_le_bytes(input.array()?);
    if length != encoded.len() as u64 {
        let got = encoded.len();
        return Err(Fault::new(format!(
            "it states a length of {length} bytes but has {got}; fetch it again"
        )));
    }
    let stated = u32::from_le_bytes(encoded[encoded.len() - CRC_LEN..].try_into().expect("four bytes"));
    let expected = Digest { kind: DigestKind::Crc32c, value: stated.into() };
    if digest(encoded) != expected {
        let got = digest(encoded);
        return Err(Fault::new(format!(
            "it is damaged: its checksum is {got}, it states {expected}; fetch it again"
        )));
    }
    let (version, compression) = (input.number()?, input.number()?);
    match (version, compression) {
        (0, 0) => Ok(input.bytes.to_vec()),
        (0, 1) => decode(input.bytes),
        _ => Err(Fault::unsupported(format!(
            "it has version {version} and compression {compression} of the format; known are version 0, and 0 or 1"
        ))),
    }
}

fn decode(compressed: &[u8]) -> Result<Vec<u8>, Fault> {
    let failed = |cause| Fault::new(format!("it cannot be decompressed: {cause}"));
    let decoder = zstd::Decoder::with_buffer(compressed).map_err(failed)?;
    let mut body = Vec::new();
    decoder.take(NODE_BYTES_MAX + 1).read_to_end(&mut body).map_err(failed)?;
    match body.len() as u64 > NODE_BYTES_MAX {
        true => Err(Fault::unsupported(format!("it has more than {NODE_BYTES_MAX} bytes when decoded"))),
        false => Ok(body),
    }
}

fn names_too_long() -> Fault {
    Fault::unsupported(format!(
        "it has names of more than {NAME_BYTES_MAX} bytes, or of {TABLE_BYTES_MAX} bytes together"
    ))
}

/// The unread rest of a body.
pub(super) struct Input<'a> {
    pub(super) bytes: &'a [u8],
}

/// A file that a node refers to.
#[derive(Debug)]
pub(super) struct DataFile {
    /// The folder that precedes all paths in a node that is read from this file.
    pub(super) base: String,
    /// The path below the root of the store.
    pub(super) path: String,
}

impl<'a> Input<'a> {
    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], Fault> {
        let len = usize::try_from(len).ok().filter(|len| *len <= self.bytes.len());
        let (taken, rest) =
            self.bytes.split_at(len.ok_or_else(|| Fault::new("it ends early; save it again"))?);
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        Ok(self.take(N as u64)?.try_into().expect("N bytes were taken"))
    }

    pub(super) fn byte(&mut self) -> Result<u8, Fault> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn number(&mut self) -> Result<u64, Fault> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                break;
            }
            value |= part << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Fault::new("it has a number of more than 64 bits; save it again"))
    }

    /// A count of records, each of which has at least one more byte.
    pub(super) fn count(&mut self) -> Result<u64, Fault> {
        let count = self.number()?;
        match count <= self.bytes.len() as u64 {
            true => Ok(count),
            false => Err(Fault::new(format!("it states {count} records, more than it has bytes"))),
        }
    }

    /// A column of numbers.
    pub(super) fn numbers(&mut self, count: u64) -> Result<Vec<u64>, Fault> {
        (0..count.min(self.bytes.len() as u64 + 1)).map(|_| self.number()).collect()
    }

    /// Texts, of which each begins like the one before it for as long as `prefixes` says.
    fn texts(&mut self, prefixes: &[u64], suffixes: &[u64]) -> Result<Vec<String>, Fault> {
        let mut texts: Vec<String> = Vec::with_capacity(prefixes.len());
        let mut total = 0;
        for (&prefix, &suffix) in prefixes.iter().zip(suffixes) {
            let before = texts.last().map_or("", String::as_str).as_bytes();
            let shared = usize::try_from(prefix).ok().and_then(|prefix| before.get(..prefix));
            let shared =
                shared.ok_or_else(|| Fault::new("a name in it shares more than the name before it has"))?;
            let text = [shared, self.take(suffix)?].concat();
            total += text.len();
            if text.len() > NAME_BYTES_MAX || total > TABLE_BYTES_MAX {
                return Err(names_too_long());
            }
            texts.push(String::from_utf8(text).map_err(|_| Fault::new("a name in it is not UTF-8"))?);
        }
        Ok(texts)
    }

    fn shared(&mut self, count: u64) -> Result<Vec<u64>, Fault> {
        Ok([vec![0], self.numbers(count - 1)?].concat())
    }

    /// The table of the files that the node refers to; `transitive` precedes their paths.
    pub(super) fn files(&mut self, transitive: &str) -> Result<Vec<Arc<DataFile>>, Fault> {
        let count = self.count()?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let (prefixes, suffixes) = (self.shared(count)?, self.numbers(count)?);
        let bases = self.numbers(count)?;
        let paths = self.texts(&prefixes, &suffixes)?;
        let longest = NAME_BYTES_MAX.min(TABLE_BYTES_MAX / paths.len());
        let file = |(local, base_len): (String, u64)| {
            let base = usize::try_from(base_len).ok().and_then(|len| local.get(..len));
            let path = format!("{transitive}{local}");
            if path.len() > longest {
                return Err(names_too_long());
            }
            match base {
                Some(base) if path.is_empty() || path.split('/').all(is_plain_name) => {
                    Ok(Arc::new(DataFile { base: format!("{transitive}{base}"), path }))
                }
                _ => Err(Fault::new(format!("it refers to `{path}`, which is not a path below its folder"))),
            }
        };
        paths.into_iter().zip(bases).map(file).collect()
    }

    /// The keys of a node: `count` of them, sorted; of an inner node, how much of each all keys of its child begin with.
    pub(super) fn keys(&mut self, count: u64, is_inner: bool) -> Result<(Vec<String>, Vec<u64>), Fault> {
        let (prefixes, suffixes) = (self.shared(count)?, self.numbers(count)?);
        let common = if is_inner { self.numbers(count)? } else { Vec::new() };
        let keys = self.texts(&prefixes, &suffixes)?;
        match keys.is_sorted_by(|a, b| a < b) {
            true => Ok((keys, common)),
            false => Err(Fault::new("its keys are not in order; save it again")),
        }
    }
}
