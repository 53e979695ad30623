//! Handmade archives: which are read, and how hostile ones are refused.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::bytes::Memory;

/// A stored record to write.
#[derive(Clone)]
struct Written {
    name: &'static str,
    data: &'static [u8],
    padding: usize,
}

fn written(name: &'static str, data: &'static [u8]) -> Written {
    Written { name, data, padding: 0 }
}

/// An archive of these records: local parts, directory, end record.
fn archive(records: &[Written]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for Written { name, data, padding } in records {
        let crc = crate::digest::DigestKind::Crc32.of(data).value as u32;
        let at = out.len() as u32;
        let fields = |extra: usize| {
            let mut fields = vec![0, 0, 0, 8, 0, 0, 0, 0, 0, 0];
            for number in [crc, data.len() as u32, data.len() as u32] {
                fields.extend(number.to_le_bytes());
            }
            fields.extend((name.len() as u16).to_le_bytes());
            fields.extend((extra as u16).to_le_bytes());
            fields
        };
        out.extend(
            [b"PK\x03\x04", &fields(*padding)[..], name.as_bytes(), &vec![b'Z'; *padding], data].concat(),
        );
        directory.extend(
            [b"PK\x01\x02\0\0", &fields(0)[..], &[0; 10], &at.to_le_bytes(), name.as_bytes()].concat(),
        );
    }
    let (count, len, start) = (records.len() as u16, directory.len() as u32, out.len() as u32);
    out.extend(directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend([len.to_le_bytes(), start.to_le_bytes()].concat());
    out.extend([0, 0]);
    out
}

/// Opens the archive, or returns what is wrong with it.
fn open_at(bytes: &[u8], range: Range<u64>) -> Result<Archive, String> {
    let bytes = Memory(bytes.to_vec());
    let error = match Archive::open(Section::new(&bytes, range, Path::new("a.pt"), "")) {
        Ok(archive) => return Ok(archive),
        Err(error) => error.to_string(),
    };
    Err(error.strip_prefix("a.pt: its archive is refused: ").expect("archives are refused").to_owned())
}

fn open(bytes: &[u8]) -> Result<Archive, String> {
    open_at(bytes, 0..bytes.len() as u64)
}

/// Replaces the bytes at `at`.
fn patch(bytes: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + new.len()].copy_from_slice(new);
    bytes
}

fn directory_at(bytes: &[u8]) -> usize {
    bytes.windows(4).position(|window| window == b"PK\x01\x02").unwrap()
}

#[test]
fn finds_records_of_archive_embedded_in_file() {
    let two = [written("a/x", b"hello"), Written { padding: 7, ..written("a/y", b"") }];
    let bytes = archive(&two);
    let found = open(&bytes).unwrap();
    assert_eq!(found.record("a/x").unwrap().data, 33..38);
    assert_eq!(found.record("a/x").unwrap().crc32, Some(0x3610_a686));
    assert_eq!(found.record("a/y").unwrap(), &Record { data: 78..78, crc32: None, is_open: false });
    let inside = [b"before", &bytes[..], b"after"].concat();
    let found = open_at(&inside, 6..6 + bytes.len() as u64).unwrap();
    assert_eq!(found.record("a/x").unwrap().data, 39..44);
    assert_eq!(found.records().len(), 2);
}

#[test]
fn rejects_every_truncation() {
    let bytes = archive(&[written("a", b"hello"), written("b", b"world")]);
    for len in 0..bytes.len() {
        open(&bytes[..len]).unwrap_err();
    }
}

#[test]
fn rejects_compressed_and_encrypted_records() {
    let bytes = archive(&[written("bomb", b"tiny")]);
    let directory = directory_at(&bytes);
    let fault = open(&patch(&bytes, directory + 10, &[8])).unwrap_err();
    assert!(fault.to_string().contains("`bomb` is compressed (method 8)"), "{fault}");
    let fault = open(&patch(&bytes, directory + 8, &[1])).unwrap_err();
    assert!(fault.to_string().contains("encrypted"), "{fault}");
    let fault = open(&patch(&bytes, 8, &[8])).unwrap_err();
    assert!(fault.to_string().contains("not stored"), "{fault}");
}

#[test]
fn rejects_duplicate_record_names() {
    let bytes = archive(&[written("same", b"1"), written("same", b"2")]);
    assert_eq!(open(&bytes), Err("record `same` occurs twice".into()));
}

#[test]
fn rejects_overlapping_records() {
    let bytes = archive(&[written("a", b"hello"), written("b", b"world")]);
    let first = directory_at(&bytes);
    let second = first + 47;
    // The first record is long enough to reach into the second one.
    let long = 10u32.to_le_bytes();
    let overlapping = patch(&patch(&bytes, first + 20, &long), first + 24, &long);
    assert_eq!(open(&overlapping), Err("records `a` and `b` overlap".into()));
    // Both entries point at the first record.
    let twice = patch(&patch(&bytes, second + 46, b"a"), second + 42, &[0; 4]);
    assert_eq!(open(&twice), Err("record `a` occurs twice".into()));
}

#[test]
fn rejects_sizes_beyond_archive() {
    let bytes = archive(&[written("a", b"hello")]);
    let directory = directory_at(&bytes);
    let huge = 0xffff_fff0u32.to_le_bytes();
    let sized = patch(&patch(&bytes, directory + 20, &huge), directory + 24, &huge);
    assert!(open(&sized).unwrap_err().starts_with("record `a` needs bytes up to"));
    let moved = patch(&bytes, directory + 42, &huge);
    assert!(open(&moved).unwrap_err().starts_with("record `a` needs bytes up to"));
    let end = bytes.len() - 22;
    let long = open(&patch(&bytes, end + 12, &huge)).unwrap_err();
    assert!(long.starts_with("its end record is inconsistent"), "{long}");
    let counted = patch(&bytes, end + 8, &[0xf0, 0xff, 0xf0, 0xff]);
    assert!(open(&counted).unwrap_err().starts_with("its directory of"));
}

#[test]
fn rejects_unsafe_record_paths() {
    for name in ["../a", "/a", "a/../b", "a//b", "a\\b", ".", "a/", ""] {
        let name: &'static str = name;
        let fault = open(&archive(&[written(name, b"1")])).unwrap_err();
        assert!(fault.ends_with("is not named by a plain relative path"), "{name}: {fault}");
    }
}

proptest! {
    #[test]
    fn damaged_archive_never_panics_or_escapes_bounds(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = archive(&[written("a/data.pkl", b"hello"), written("a/data/0", b"0123456789")]);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(archive) = open(&bytes) {
            for record in archive.records().values() {
                prop_assert!(record.data.end <= bytes.len() as u64);
            }
        }
    }
}
