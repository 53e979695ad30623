//! Reads zip archives as PyTorch writes them: located by their directory, stored, and checked before any record is
//! read.
//!
//! This is not a general zip reader: records are not compressed, archives have no comment, names are plain relative
//! paths, no two records share a name or a byte, and everything is inside the given bytes. Whatever an archive claims,
//! it takes no more memory than its directory has bytes. An archive may be in the middle of a file: positions in the
//! archive count from its start, those in [`Record::data`] from the start of the underlying bytes.

mod beginning;
mod directory;
mod end;
mod fields;
pub(crate) mod writer;

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ops::Range};

use crate::{
    bytes::Section,
    error::{Error, Fault},
};

/// Maximum length of a directory.
const DIRECTORY_BYTES_MAX: u64 = 1 << 28;

/// A stored record of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Range of its bytes, counted from the start of the bytes that the archive's section is part of.
    pub(crate) data: Range<u64>,
    /// The CRC-32 of its bytes; `None` if the archive has zero, which writers store when they compute none.
    pub(crate) crc32: Option<u32>,
    /// Whether only the beginning of the archive was scanned and the record goes on after it. Its data then ends at or
    /// before the end of `data`.
    pub(crate) is_open: bool,
}

/// An archive with checked records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Archive {
    records: BTreeMap<String, Record>,
}

impl Archive {
    /// Reads the directory of the archive that fills `section`.
    pub(crate) fn open(section: Section<'_>) -> Result<Archive, Error> {
        let end = end::find(section)?;
        let bytes = section.read(end.directory.clone())?;
        let refused = |fault| refused(section, fault);
        let entries = directory::parse(&bytes, end.count).map_err(refused)?;
        let mut entries = directory::locate(section, entries, end.directory.start)?;
        directory::check_overlaps(&mut entries).map_err(refused)?;
        let records = entries.into_iter().map(|entry| {
            let crc32 = (entry.crc32 != 0).then_some(entry.crc32);
            (entry.name, Record { data: entry.data, crc32, is_open: false })
        });
        Archive::of_records(section, records)
    }

    /// Reads the first records of an archive that begins with `section` and has at most `len_max` bytes.
    pub(crate) fn scan(section: Section<'_>, len_max: u64) -> Result<Archive, Error> {
        let bytes = section.read(0..section.len())?;
        let records = beginning::scan(&bytes, len_max).map_err(|fault| refused(section, fault))?;
        Archive::of_records(section, records)
    }

    /// Makes an archive of records whose positions count from its start.
    pub(crate) fn of_records(
        section: Section<'_>,
        found: impl IntoIterator<Item = (String, Record)>,
    ) -> Result<Archive, Error> {
        let mut records = BTreeMap::new();
        for (name, record) in found {
            let data = section.start() + record.data.start..section.start() + record.data.end;
            if records.insert(name.clone(), Record { data, ..record }).is_some() {
                return Err(refused(section, there_twice(&name)));
            }
        }
        Ok(Archive { records })
    }

    /// All records, by name.
    pub(crate) fn records(&self) -> &BTreeMap<String, Record> {
        &self.records
    }

    /// The record with this name.
    pub(crate) fn record(&self, name: &str) -> Option<&Record> {
        self.records.get(name)
    }
}

/// The error for a fault in an archive.
fn refused(section: Section<'_>, fault: Fault) -> Error {
    section.fault(fault.of_part("its archive is refused: ", section.start()))
}

/// The fault for two records with the same name.
fn there_twice(name: &str) -> Fault {
    Fault::new(format!("record `{name}` occurs twice"))
}

/// The fault for a record or header that is not inside the archive's data.
fn outside(name: &str, end: u64, limit: u64) -> Fault {
    Fault::new(format!(
        "record `{name}` needs bytes up to {end}, but the archive's data ends at byte {limit}"
    ))
}
