//! Lays out archives as torch does: stored records, each at a multiple of 64 bytes, planned from their lengths.
//!
//! ```text
//! record:   local header | name | zip64 field, if large | "FB" field, padding | data | descriptor
//! archive:  records | central directory | zip64 end, locator | end
//! ```
//!
//! As in any archive that is written from front to back, the sizes and the CRC-32 of the data are in the descriptor
//! after it and in the central directory, so a local header is known before its data. All offsets count from the start
//! of the archive, which may be anywhere in a file.
//!
//! A record is large if its size, or the offset of its header, does not fit 32 bits.

use crate::digest::{Digest, DigestKind};

/// The data of records begins at multiples of this, so that torch can map it into memory.
pub(crate) const ALIGNMENT: u64 = 64;

const LOCAL_HEADER_LEN: u64 = 30;
const FIELD_HEADER_LEN: u64 = 4;
const ZIP64_SIZES_LEN: u64 = 16;
const FLAG_DESCRIPTOR: u16 = 0x0008;
const FLAG_UTF8: u16 = 0x0800;

/// A planned archive.
#[derive(Debug)]
pub(crate) struct Archive {
    records: Vec<Record>,
    /// Offset of the next record's header; of the central directory in a complete archive.
    end: u64,
    /// Known bytes, each with its offset. Gaps are the data that is filled in later.
    head: Vec<(u64, Vec<u8>)>,
}

#[derive(Debug)]
struct Record {
    name: String,
    header: u64,
    data: u64,
    len: u64,
    crc: Option<u32>,
}

impl Record {
    fn is_large(&self) -> bool {
        self.len >= u64::from(u32::MAX) || self.header >= u64::from(u32::MAX)
    }

    fn flags(&self) -> u16 {
        if self.len == 0 { FLAG_UTF8 } else { FLAG_UTF8 | FLAG_DESCRIPTOR }
    }

    fn descriptor_len(&self) -> u64 {
        match (self.len, self.is_large()) {
            (0, _) => 0,
            (_, false) => 16,
            (_, true) => 24,
        }
    }

    fn end(&self) -> u64 {
        self.data + self.len + self.descriptor_len()
    }
}

impl Archive {
    pub(crate) fn new() -> Archive {
        Archive { records: Vec::new(), end: 0, head: Vec::new() }
    }

    /// Adds a record with known bytes.
    pub(crate) fn add(&mut self, name: &str, data: &[u8]) {
        let crc = crc32(DigestKind::Crc32.of(data));
        self.push(name, data.len() as u64, Some(crc));
        let mut bytes = data.to_vec();
        bytes.extend(descriptor(self.last()));
        self.literal(self.last().data, bytes);
    }

    /// Adds a record whose bytes are filled in later; returns their offset in the archive.
    pub(crate) fn add_later(&mut self, name: &str, len: u64) -> u64 {
        self.push(name, len, (len == 0).then_some(0));
        self.last().data
    }

    fn push(&mut self, name: &str, len: u64, crc: Option<u32>) {
        let header = self.end;
        let mut record = Record { name: name.to_owned(), header, data: 0, len, crc };
        let zip64_len = if record.is_large() { FIELD_HEADER_LEN + ZIP64_SIZES_LEN } else { 0 };
        let unpadded = header + LOCAL_HEADER_LEN + name.len() as u64 + zip64_len + FIELD_HEADER_LEN;
        record.data = unpadded.next_multiple_of(ALIGNMENT);
        let local = local_header(&record, (record.data - unpadded) as usize);
        self.end = record.end();
        self.literal(header, local);
        self.records.push(record);
    }

    fn literal(&mut self, offset: u64, bytes: Vec<u8>) {
        match self.head.last_mut() {
            Some((start, known)) if *start + known.len() as u64 == offset => known.extend(bytes),
            _ => self.head.push((offset, bytes)),
        }
    }

    fn last(&self) -> &Record {
        self.records.last().expect("a record was added just before")
    }

    /// Length of the complete archive in bytes.
    pub(crate) fn len(&self) -> u64 {
        let entries: usize = self.records.iter().map(|record| directory_entry(record).len()).sum();
        self.end + (entries + end_records(0, 0, 0).len()) as u64
    }

    /// Takes the bytes that are known so far, with their offsets.
    pub(crate) fn take_literals(&mut self) -> Vec<(u64, Vec<u8>)> {
        std::mem::take(&mut self.head)
    }

    /// Returns the remaining bytes, with their offsets. `digests` are those of the records that were filled in later,
    /// in order. The number and lengths of the byte strings do not depend on the digests.
    ///
    /// # Panics
    /// If a digest is missing, superfluous or not a CRC-32.
    pub(crate) fn finish(mut self, digests: impl IntoIterator<Item = Digest>) -> Vec<(u64, Vec<u8>)> {
        let mut digests = digests.into_iter();
        let mut patches = Vec::new();
        for record in self.records.iter_mut().filter(|record| record.crc.is_none()) {
            record.crc = Some(crc32(digests.next().expect("each record that is filled in has a digest")));
            patches.push((record.data + record.len, descriptor(record)));
        }
        assert!(digests.next().is_none(), "each digest belongs to a record that is filled in");
        let mut tail: Vec<u8> = self.records.iter().flat_map(directory_entry).collect();
        let end = end_records(self.records.len() as u64, tail.len() as u64, self.end);
        tail.extend(end);
        patches.push((self.end, tail));
        patches
    }
}

fn crc32(digest: Digest) -> u32 {
    assert_eq!(digest.kind, DigestKind::Crc32, "zip keeps CRC-32");
    u32::try_from(digest.value).expect("a CRC-32 has 32 bits")
}

/// The local header, with the name and extra fields.
fn local_header(record: &Record, padding: usize) -> Vec<u8> {
    let mut extra = Vec::new();
    if record.is_large() {
        put_u16s(&mut extra, &[1, ZIP64_SIZES_LEN as u16]);
        put_u64s(&mut extra, &[record.len, record.len]);
    }
    extra.extend(b"FB");
    put_u16s(&mut extra, &[padding as u16]);
    extra.extend(std::iter::repeat_n(b'Z', padding));

    let size_field = if record.is_large() { u32::MAX } else { 0 };
    let mut out = b"PK\x03\x04".to_vec();
    // Version, flags, method, time, date; then CRC and sizes, which follow the data.
    put_u16s(&mut out, &[0, record.flags(), 0, 0, 0]);
    put_u32s(&mut out, &[0, size_field, size_field]);
    put_u16s(&mut out, &[record.name.len() as u16, extra.len() as u16]);
    out.extend(record.name.as_bytes());
    out.extend(extra);
    out
}

/// The descriptor after the data; empty for a record without data.
fn descriptor(record: &Record) -> Vec<u8> {
    if record.len == 0 {
        return Vec::new();
    }
    let mut out = b"PK\x07\x08".to_vec();
    put_u32s(&mut out, &[record.crc.expect("descriptors follow the data")]);
    if record.is_large() {
        put_u64s(&mut out, &[record.len, record.len]);
    } else {
        put_u32s(&mut out, &[record.len as u32, record.len as u32]);
    }
    out
}

/// The entry of a record in the central directory. An unknown CRC is written as zero.
fn directory_entry(record: &Record) -> Vec<u8> {
    // The zip64 field holds only the values that do not fit, in this order: size, stored size, offset.
    let fits = |value: u64| u32::try_from(value).ok().filter(|&value| value != u32::MAX);
    let mut large = Vec::new();
    for value in [record.len, record.len, record.header] {
        if fits(value).is_none() {
            put_u64s(&mut large, &[value]);
        }
    }
    let mut extra = Vec::new();
    if !large.is_empty() {
        put_u16s(&mut extra, &[1, large.len() as u16]);
        extra.extend(large);
    }
    let size = fits(record.len).unwrap_or(u32::MAX);

    let mut out = b"PK\x01\x02".to_vec();
    // Versions, flags, method, time, date.
    put_u16s(&mut out, &[0, 0, record.flags(), 0, 0, 0]);
    put_u32s(&mut out, &[record.crc.unwrap_or(0), size, size]);
    // Lengths of name, extra and comment; disk; attributes.
    put_u16s(&mut out, &[record.name.len() as u16, extra.len() as u16, 0, 0, 0]);
    put_u32s(&mut out, &[0, fits(record.header).unwrap_or(u32::MAX)]);
    out.extend(record.name.as_bytes());
    out.extend(extra);
    out
}

/// The zip64 end record, its locator, and the end record.
fn end_records(count: u64, directory_len: u64, directory: u64) -> Vec<u8> {
    let mut out = b"PK\x06\x06".to_vec();
    put_u64s(&mut out, &[44]);
    // Versions (3.0 on Unix, needs 4.5), disks.
    put_u16s(&mut out, &[0x031e, 45]);
    put_u32s(&mut out, &[0, 0]);
    put_u64s(&mut out, &[count, count, directory_len, directory]);
    out.extend(b"PK\x06\x07");
    put_u32s(&mut out, &[0]);
    put_u64s(&mut out, &[directory + directory_len]);
    put_u32s(&mut out, &[1]);
    out.extend(b"PK\x05\x06");
    let count = u16::try_from(count).unwrap_or(u16::MAX);
    put_u16s(&mut out, &[0, 0, count, count]);
    put_u32s(&mut out, &[u32_or_max(directory_len), u32_or_max(directory)]);
    put_u16s(&mut out, &[0]);
    out
}

fn u32_or_max(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn put_u16s(out: &mut Vec<u8>, values: &[u16]) {
    values.iter().for_each(|value| out.extend(value.to_le_bytes()));
}

fn put_u32s(out: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| out.extend(value.to_le_bytes()));
}

fn put_u64s(out: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| out.extend(value.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of an archive whose later records get `data`.
    fn assemble(mut archive: Archive, later: &[(u64, &[u8])]) -> Vec<u8> {
        let mut out = vec![0xee; archive.len() as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            out[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        for (at, bytes) in archive.take_literals() {
            put(at, &bytes);
        }
        for (at, bytes) in later {
            put(*at, bytes);
        }
        let digests: Vec<Digest> = later.iter().map(|(_, data)| DigestKind::Crc32.of(data)).collect();
        for (at, bytes) in archive.finish(digests.into_iter().filter(|digest| digest.value != 0)) {
            put(at, &bytes);
        }
        out
    }

    #[test]
    fn records_are_laid_out_like_torch() {
        let mut archive = Archive::new();
        archive.add("archive/data.pkl", b"hello");
        let at = archive.add_later("archive/data/0", 7);
        let empty = archive.add_later("archive/data/1", 0);
        assert_eq!((at % ALIGNMENT, empty % ALIGNMENT), (0, 0));
        archive.add("archive/version", b"3\n");
        let bytes = assemble(archive, &[(at, b"tensor!"), (empty, b"")]);

        assert_eq!(&bytes[..8], b"PK\x03\x04\0\0\x08\x08");
        assert_eq!(&bytes[26..30], [16, 0, 18, 0]);
        assert_eq!(&bytes[46..50], b"FB\x0e\0");
        assert_eq!(&bytes[64..69], b"hello");
        let crc = DigestKind::Crc32.of(b"hello").value as u32;
        assert_eq!(&bytes[69..77], [b"PK\x07\x08", &crc.to_le_bytes()[..]].concat());
        assert_eq!(&bytes[77..85], [5, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(&bytes[at as usize..at as usize + 11], b"tensor!PK\x07\x08");
        // The header of the next record directly follows the offset of an empty record's data.
        assert_eq!(&bytes[empty as usize..empty as usize + 4], b"PK\x03\x04");
        assert!(bytes.ends_with(b"\0\0") && bytes[bytes.len() - 22..].starts_with(b"PK\x05\x06"));
        assert!(!bytes.contains(&0xee), "every byte is planned");
    }

    #[test]
    fn records_beyond_4_gib_use_zip64_fields() {
        let gib = 1 << 30;
        let mut archive = Archive::new();
        let first = archive.add_later("a/data/0", 5 * gib);
        let second = archive.add_later("a/data/1", 3);
        let end = second + 3 + 24;
        assert_eq!(first, 64);
        let digest = DigestKind::Crc32.of(b"abc");
        let len = archive.len();
        let patches = archive.finish([digest, digest]);
        assert_eq!(patches[0].1.len(), 24);
        assert_eq!(&patches[0].1[8..16], (5 * gib).to_le_bytes());
        let (at, directory) = &patches[2];
        assert_eq!((*at, at + directory.len() as u64), (end, len));
        // Size, stored size and extra of the first entry; offset of the second.
        assert_eq!(&directory[20..28], [0xff; 8]);
        assert_eq!(&directory[54..58], [1, 0, 16, 0]);
        let entry = &directory[46 + 8 + 20..];
        assert_eq!(&entry[42..46], [0xff; 4]);
        assert_eq!(&entry[54..58], [1, 0, 8, 0]);
    }
}
