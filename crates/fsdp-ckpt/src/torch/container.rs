//! The records of a `torch.save` archive: one folder with the pickle, the byte order and the storages.

use crate::{
    bytes::Section,
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    pickle::PICKLE_BYTES_MAX,
    zip::{Archive, Record},
};

/// The first bytes of files from before PyTorch 1.6: protocol 2 and a magic number.
pub(crate) const LEGACY_MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
/// Maximum length of the record `byteorder`.
const BYTE_ORDER_LEN_MAX: u64 = 16;
/// Offset of the magic bytes of a tar archive.
const TAR_MAGIC_AT: u64 = 257;
const TAR_MAGIC: &[u8] = b"ustar";

/// An archive with the name of its folder.
pub(super) struct Container<'a> {
    section: Section<'a>,
    archive: &'a Archive,
    folder: &'a str,
}

impl<'a> Container<'a> {
    /// Finds the folder of the archive and checks its byte order.
    pub(super) fn new(section: Section<'a>, archive: &'a Archive) -> Result<Container<'a>, Error> {
        let names = archive.records().keys();
        let mut folders = names.filter_map(|name| name.strip_suffix("/data.pkl"));
        let folder = match (folders.next(), folders.next()) {
            (Some(folder), None) => folder,
            (None, _) => return Err(section.fault(missing_record("data.pkl"))),
            (Some(_), Some(_)) => {
                return Err(
                    section.fault(Fault::new("it is not an archive of torch.save; it holds several pickles"))
                );
            }
        };
        let container = Container { section, archive, folder };
        container.check_byte_order()?;
        Ok(container)
    }

    /// Makes a container for a file that is not an archive; its records are only the storages, by key.
    pub(super) fn without_records(
        section: Section<'a>,
        archive: &'a Archive,
        folder: &'a str,
    ) -> Container<'a> {
        Container { section, archive, folder }
    }

    /// The folder of all records.
    pub(super) fn folder(&self) -> &str {
        self.folder
    }

    /// The record with this name in the folder.
    pub(super) fn record(&self, name: &str) -> Option<&Record> {
        self.archive.record(&format!("{}/{name}", self.folder))
    }

    /// The bytes of the pickle.
    pub(super) fn pickle(&self) -> Result<Vec<u8>, Error> {
        self.bytes("data.pkl", self.pickle_record(), PICKLE_BYTES_MAX as u64)
    }

    /// Position of the pickle, counted like the section's start.
    pub(super) fn pickle_start(&self) -> u64 {
        self.pickle_record().data.start
    }

    fn pickle_record(&self) -> &Record {
        self.record("data.pkl").expect("the folder was found by it")
    }

    fn check_byte_order(&self) -> Result<(), Error> {
        let Some(record) = self.record("byteorder") else { return Ok(()) };
        let bytes = self.bytes("byteorder", record, BYTE_ORDER_LEN_MAX)?;
        if bytes == b"little" {
            return Ok(());
        }
        let reason = format!(
            "its record `byteorder` holds `{}`; supported is `little`; save the file again on a little-endian machine",
            String::from_utf8_lossy(&bytes).escape_debug()
        );
        Err(self.section.fault(Fault::unsupported(reason)))
    }

    fn bytes(&self, name: &str, record: &Record, limit: u64) -> Result<Vec<u8>, Error> {
        let range = record.data.start - self.section.start()..record.data.end - self.section.start();
        let len = range.end - range.start;
        if len > limit {
            let reason = format!(
                "its record `{name}` has {len} bytes, more than the {limit} that are read into memory"
            );
            return Err(self.section.fault(Fault::new(reason)));
        }
        if record.is_open {
            return Err(self.section.fault(missing_record(&format!("{name}, at least not at its start"))));
        }
        let bytes = self.section.read(range)?;
        let got = DigestKind::Crc32.of(&bytes);
        match record.crc32.map(|crc| Digest { kind: DigestKind::Crc32, value: crc.into() }) {
            Some(expected) if expected != got => {
                let sums = format!("the archive says {expected}, its bytes give {got}");
                let reason = format!("its record `{name}` is damaged: {sums}; fetch it again");
                Err(self.section.fault(Fault::new(reason)))
            }
            _ => Ok(bytes),
        }
    }
}

/// Refuses anything but a zip archive, and names the actual format if it is known.
pub(super) fn check_magic(section: Section<'_>) -> Result<(), Error> {
    let head = section.read(0..section.len().min(LEGACY_MAGIC.len() as u64))?;
    if head.starts_with(b"PK\x03\x04") {
        return Ok(());
    }
    let tar_end = TAR_MAGIC_AT + TAR_MAGIC.len() as u64;
    let what = if head.starts_with(LEGACY_MAGIC) {
        "it has the form of PyTorch before 1.6, which is read only as a file of its own"
    } else if section.len() >= tar_end && section.read(TAR_MAGIC_AT..tar_end)? == TAR_MAGIC {
        "it is a tar archive, the form of PyTorch before 0.1.10: load it there and save it again"
    } else if head.starts_with(b"\x80") {
        "it is a bare pickle without storages"
    } else if head.is_empty() {
        "it is empty"
    } else {
        "it does not begin as a zip archive"
    };
    Err(section.fault(Fault::new(format!("it is not an archive of torch.save; {what}"))))
}

/// The fault for a missing record that every archive has or that a tensor needs.
pub(super) fn missing_record(name: &str) -> Fault {
    Fault::new(format!("its archive has no record `{name}`"))
}
