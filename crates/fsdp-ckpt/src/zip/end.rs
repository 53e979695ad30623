//! The end records of an archive: the position of its directory and the number of entries.
//!
//! PyTorch always writes the zip64 end record and its locator before the plain one; other writers do so only if a field
//! does not fit. Both are read, and must agree if both have a value. The directory must end exactly where the end
//! records begin, so that an archive can be read in one way only.

use std::ops::Range;

use super::{
    DIRECTORY_BYTES_MAX,
    fields::{u16_at, u32_at, u64_at},
    refused,
};
use crate::{
    bytes::Section,
    error::{Error, Fault},
};

const END_LEN: u64 = 22;
const END_SIGNATURE: u32 = 0x0605_4b50;
const LOCATOR_LEN: u64 = 20;
const LOCATOR_SIGNATURE: u32 = 0x0706_4b50;
const END64_LEN: u64 = 56;
const END64_SIGNATURE: u32 = 0x0606_4b50;
/// Length of an entry without its name.
const ENTRY_LEN_MIN: u64 = 46;

/// The contents of the end records.
pub(super) struct End {
    /// Range of the directory, counted from the start of the archive.
    pub(super) directory: Range<u64>,
    /// Number of entries in the directory.
    pub(super) count: u64,
}

/// Finds and checks the end records of the archive that fills `section`.
pub(super) fn find(section: Section<'_>) -> Result<End, Error> {
    let tail_len = section.len().min(END_LEN + LOCATOR_LEN + END64_LEN);
    let tail = section.read(section.len() - tail_len..section.len())?;
    parse(&tail, section.len()).map_err(|fault| refused(section, fault))
}

/// Parses the end records in the last bytes of an archive of `archive_len` bytes.
fn parse(tail: &[u8], archive_len: u64) -> Result<End, Fault> {
    let Some((before, end)) = tail.len().checked_sub(END_LEN as usize).map(|at| tail.split_at(at)) else {
        return Err(no_end());
    };
    if u32_at(end, 0) != END_SIGNATURE || u16_at(end, 20) != 0 {
        return Err(no_end());
    }
    if u32_at(end, 4) != 0 || u16_at(end, 8) != u16_at(end, 10) {
        return Err(bad("it is one of several disks"));
    }
    let plain = (u64::from(u16_at(end, 10)), u64::from(u32_at(end, 12)), u64::from(u32_at(end, 16)));
    let end_at = archive_len - END_LEN;
    let (fields, directory_end) = match end64(before, end_at)? {
        Some((fields, at)) => {
            let agrees = |plain: u64, saturated: u64, large: u64| plain == saturated || plain == large;
            if !agrees(plain.0, 0xffff, fields.0)
                || !agrees(plain.1, 0xffff_ffff, fields.1)
                || !agrees(plain.2, 0xffff_ffff, fields.2)
            {
                return Err(bad("its plain and its zip64 form differ"));
            }
            (fields, at)
        }
        None => (plain, end_at),
    };
    let (count, len, start) = fields;
    if start.checked_add(len) != Some(directory_end) {
        return Err(bad("the directory does not end where the end record begins"));
    }
    if len > DIRECTORY_BYTES_MAX {
        let reason =
            format!("its directory has {len} bytes, more than the {DIRECTORY_BYTES_MAX} that are read");
        return Err(Fault::new(reason));
    }
    if count > len / ENTRY_LEN_MIN {
        return Err(Fault::new(format!("its directory of {len} bytes cannot hold {count} entries")));
    }
    Ok(End { directory: start..directory_end, count })
}

/// Number of entries, length of the directory, start of the directory.
type Fields = (u64, u64, u64);

/// The zip64 end record and its position; `None` if no locator precedes the plain end record.
fn end64(before: &[u8], end_at: u64) -> Result<Option<(Fields, u64)>, Fault> {
    let Some(locator_at) = before.len().checked_sub(LOCATOR_LEN as usize) else { return Ok(None) };
    let locator = &before[locator_at..];
    if u32_at(locator, 0) != LOCATOR_SIGNATURE {
        return Ok(None);
    }
    if u32_at(locator, 4) != 0 || u32_at(locator, 16) != 1 {
        return Err(bad("it is one of several disks"));
    }
    let Some(record_at) = locator_at.checked_sub(END64_LEN as usize) else {
        return Err(bad("its zip64 form is cut off"));
    };
    let record = &before[record_at..locator_at];
    let at = end_at - LOCATOR_LEN - END64_LEN;
    if u64_at(locator, 8) != at || u32_at(record, 0) != END64_SIGNATURE || u64_at(record, 4) != END64_LEN - 12
    {
        return Err(bad("its zip64 form is not right before the locator"));
    }
    if u64_at(record, 16) != 0 || u64_at(record, 24) != u64_at(record, 32) {
        return Err(bad("it is one of several disks"));
    }
    Ok(Some(((u64_at(record, 32), u64_at(record, 40), u64_at(record, 48)), at)))
}

fn no_end() -> Fault {
    Fault::new("no zip archive ends at its last byte (truncated, or not a zip archive)")
}

/// The fault for end records that contradict each other or their position.
fn bad(what: &str) -> Fault {
    Fault::new(format!("its end record is inconsistent: {what}"))
}
