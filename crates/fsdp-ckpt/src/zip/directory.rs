//! The entries of the directory, and the local headers that they point to.
//!
//! Only a local header gives its own length: PyTorch pads it so that the data begins at a multiple of 64, and the
//! directory does not repeat the padding.

use std::ops::Range;

use super::{
    fields::{u16_at, u32_at, u64_at},
    outside, refused, there_twice,
};
use crate::{
    bytes::Section,
    error::{Error, Fault},
};

const ENTRY_LEN: usize = 46;
const ENTRY_SIGNATURE: u32 = 0x0201_4b50;
const LOCAL_LEN: u64 = 30;
const LOCAL_SIGNATURE: u32 = 0x0403_4b50;
const ZIP64_FIELD: u16 = 0x0001;
/// The flags of encrypted records: bits 0, 6 and 13.
const ENCRYPTED: u16 = 0x2041;

/// An entry of the directory. Positions count from the start of the archive.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) crc32: u32,
    /// Position of the local header.
    pub(super) header: u64,
    /// Length of the data.
    len: u64,
    /// Range of the data; empty until the local header was read.
    pub(super) data: Range<u64>,
}

/// Reads `count` entries, which must fill `bytes`.
pub(super) fn parse(bytes: &[u8], count: u64) -> Result<Vec<Entry>, Fault> {
    let mut entries = Vec::new();
    let mut rest = bytes;
    for index in 0..count {
        let (entry, after) = parse_one(rest, index)?;
        entries.push(entry);
        rest = after;
    }
    if rest.is_empty() { Ok(entries) } else { Err(Fault::new("its directory is longer than its entries")) }
}

fn parse_one(bytes: &[u8], index: u64) -> Result<(Entry, &[u8]), Fault> {
    let bad = |what| Fault::new(format!("entry {index} of its directory cannot be read: {what}"));
    if bytes.len() < ENTRY_LEN {
        return Err(bad("it is cut off"));
    }
    let (fixed, rest) = bytes.split_at(ENTRY_LEN);
    if u32_at(fixed, 0) != ENTRY_SIGNATURE {
        return Err(bad("its signature is wrong"));
    }
    let name_len = usize::from(u16_at(fixed, 28));
    let extra_len = usize::from(u16_at(fixed, 30));
    let comment_len = usize::from(u16_at(fixed, 32));
    if rest.len() < name_len + extra_len + comment_len {
        return Err(bad("it is cut off"));
    }
    let (name, rest) = rest.split_at(name_len);
    let (extra, rest) = rest.split_at(extra_len);
    let name = plain_name(name)?;
    check_stored(&name, u16_at(fixed, 8), u16_at(fixed, 10))?;
    let saturated = [u32_at(fixed, 24), u32_at(fixed, 20), u32_at(fixed, 42)];
    let [len, packed_len, header] =
        zip64_fields(saturated, extra).ok_or_else(|| bad("a zip64 field is missing"))?;
    if len != packed_len {
        return Err(bad("it is stored with two different lengths"));
    }
    let entry = Entry { name, crc32: u32_at(fixed, 16), header, len, data: 0..0 };
    Ok((entry, &rest[comment_len..]))
}

/// Checks that a name is a relative path that cannot lead out of a directory.
pub(super) fn plain_name(bytes: &[u8]) -> Result<String, Fault> {
    let bad = || {
        let name = String::from_utf8_lossy(bytes);
        Fault::new(format!("record `{}` is not named by a plain relative path", name.escape_debug()))
    };
    let name = str::from_utf8(bytes).map_err(|_| bad())?;
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    if name.split('/').all(plain) && !name.contains(['\\', '\0']) { Ok(name.to_owned()) } else { Err(bad()) }
}

pub(super) fn check_stored(name: &str, flags: u16, method: u16) -> Result<(), Fault> {
    let how = match (flags & ENCRYPTED, method) {
        (0, 0) => return Ok(()),
        (0, _) => format!("compressed (method {method})"),
        _ => "encrypted".to_owned(),
    };
    let stored = "archives of PyTorch store their records as they are";
    Err(Fault::unsupported(format!("record `{name}` is {how}; {stored}")))
}

/// The three sizes of an entry; those that are saturated come from its zip64 field.
fn zip64_fields(plain: [u32; 3], extra: &[u8]) -> Option<[u64; 3]> {
    let mut large = if plain.contains(&u32::MAX) { find_extra(extra, ZIP64_FIELD)? } else { &[] };
    let mut fields = [0; 3];
    for (field, plain) in fields.iter_mut().zip(plain) {
        *field = u64::from(plain);
        if plain == u32::MAX {
            *field = u64_at(large.get(..8)?, 0);
            large = &large[8..];
        }
    }
    Some(fields)
}

fn find_extra(mut extra: &[u8], id: u16) -> Option<&[u8]> {
    while extra.len() >= 4 {
        let (head, rest) = extra.split_at(4);
        let field = rest.get(..usize::from(u16_at(head, 2)))?;
        if u16_at(head, 0) == id {
            return Some(field);
        }
        extra = &rest[field.len()..];
    }
    None
}

/// Reads the local header of each entry to locate its data. Headers and data must end at or before `limit`.
pub(super) fn locate(section: Section<'_>, mut entries: Vec<Entry>, limit: u64) -> Result<Vec<Entry>, Error> {
    for entry in &mut entries {
        let need = |end: Option<u64>| {
            let end = end.unwrap_or(u64::MAX);
            if end <= limit { Ok(end) } else { Err(refused(section, outside(&entry.name, end, limit))) }
        };
        let name_end = need(entry.header.checked_add(LOCAL_LEN + entry.name.len() as u64))?;
        let local = section.read(entry.header..name_end)?;
        let extra_len = check_local(entry, &local).map_err(|fault| refused(section, fault))?;
        let start = name_end + extra_len;
        entry.data = start..need(start.checked_add(entry.len))?;
    }
    Ok(entries)
}

/// Compares a local header with its entry; returns the length of the extra field, which precedes the data.
fn check_local(entry: &Entry, local: &[u8]) -> Result<u64, Fault> {
    let bad = |what| {
        let reason =
            format!("the header of record `{}` does not agree with the directory: {what}", entry.name);
        Err(Fault::at(entry.header as usize, reason))
    };
    if u32_at(local, 0) != LOCAL_SIGNATURE {
        return bad("its signature is wrong");
    }
    if u16_at(local, 6) & ENCRYPTED != 0 || u16_at(local, 8) != 0 {
        return bad("it says that the record is not stored");
    }
    if usize::from(u16_at(local, 26)) != entry.name.len()
        || &local[LOCAL_LEN as usize..] != entry.name.as_bytes()
    {
        return bad("it has a different name");
    }
    Ok(u64::from(u16_at(local, 28)))
}

/// Sorts by position and refuses records that share bytes.
pub(super) fn check_overlaps(entries: &mut [Entry]) -> Result<(), Fault> {
    entries.sort_by_key(|entry| entry.header);
    for pair in entries.windows(2) {
        if pair[0].data.end > pair[1].header {
            let [first, second] = [&pair[0].name, &pair[1].name];
            return Err(if first == second {
                there_twice(first)
            } else {
                Fault::new(format!("records `{first}` and `{second}` overlap"))
            });
        }
    }
    Ok(())
}
