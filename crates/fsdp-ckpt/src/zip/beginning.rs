//! Scans the first records of an archive whose directory is not available, because the archive is being decoded from
//! its start.
//!
//! PyTorch writes headers without lengths and a descriptor with the length after the data. A record therefore ends at
//! the first descriptor whose length equals its distance from the data's start. The last record stays open if it
//! continues after the decoded bytes.

use super::{
    Record,
    directory::{check_stored, plain_name},
    fields::{u16_at, u32_at, u64_at},
    outside,
};
use crate::error::Fault;

const LOCAL_LEN: usize = 30;
const LOCAL_SIGNATURE: &[u8] = b"PK\x03\x04";
const DESCRIPTOR_SIGNATURE: &[u8] = b"PK\x07\x08";
/// The flag of headers whose lengths are in a descriptor after the data.
const HAS_DESCRIPTOR: u16 = 8;

/// The records in the first bytes of an archive that has at most `len_max` bytes. Positions count from its start.
pub(super) fn scan(bytes: &[u8], len_max: u64) -> Result<Vec<(String, Record)>, Fault> {
    let mut records = Vec::new();
    let mut at = 0;
    while let Some((name, record, next)) = next_record(bytes, at, len_max)? {
        records.push((name, record));
        match next {
            Some(next) => at = next,
            None => break,
        }
    }
    Ok(records)
}

/// The record at `at`, and the position of the next one; `None` for the latter if the record does not end in `bytes`.
fn next_record(
    bytes: &[u8],
    at: usize,
    len_max: u64,
) -> Result<Option<(String, Record, Option<usize>)>, Fault> {
    let rest = &bytes[at..];
    let Some(header) = rest.get(..LOCAL_LEN).filter(|header| header.starts_with(LOCAL_SIGNATURE)) else {
        return Ok(None);
    };
    let name_end = LOCAL_LEN + usize::from(u16_at(header, 26));
    let Some(name) = rest.get(LOCAL_LEN..name_end) else { return Ok(None) };
    let name = plain_name(name)?;
    check_stored(&name, u16_at(header, 6), u16_at(header, 8))?;
    let start = at + name_end + usize::from(u16_at(header, 28));
    let end = if u16_at(header, 6) & HAS_DESCRIPTOR == 0 {
        let len = u32_at(header, 22) as usize;
        let end =
            start.checked_add(len).filter(|end| *end <= bytes.len() && u32_at(header, 18) as usize == len);
        end.map(|end| (end, end, u32_at(header, 14)))
    } else {
        find_descriptor(bytes, start)
    };
    let (data, crc, next) = match end {
        Some((end, next, crc)) => (start as u64..end as u64, crc, Some(next)),
        None if start as u64 <= len_max => (start as u64..len_max, 0, None),
        None => return Err(outside(&name, start as u64, len_max)),
    };
    let record = Record { data, crc32: (crc != 0).then_some(crc), is_open: next.is_none() };
    Ok(Some((name, record, next)))
}

/// The end of the data that begins at `start`, the position of the next record, and the CRC-32.
fn find_descriptor(bytes: &[u8], start: usize) -> Option<(usize, usize, u32)> {
    let data = bytes.get(start..)?;
    for (len, window) in data.windows(DESCRIPTOR_SIGNATURE.len()).enumerate() {
        if window != DESCRIPTOR_SIGNATURE {
            continue;
        }
        let end = start + len;
        let is_len = |stated: u64| stated == len as u64;
        let descriptor = &bytes[end..];
        if descriptor.len() >= 16
            && is_len(u32_at(descriptor, 8).into())
            && is_len(u32_at(descriptor, 12).into())
        {
            return Some((end, end + 16, u32_at(descriptor, 4)));
        }
        if descriptor.len() >= 24 && is_len(u64_at(descriptor, 8)) && is_len(u64_at(descriptor, 16)) {
            return Some((end, end + 24, u32_at(descriptor, 4)));
        }
    }
    None
}
