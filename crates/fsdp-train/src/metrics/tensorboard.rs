//! Event files of `TensorBoard`.
//!
//! A file is a sequence of `TFRecord`s, each a serialized `Event` (tensorflow/core/util/event.proto). The messages are
//! encoded by hand, because only these messages and fields of the protocol buffers are needed:
//!
//! ```text
//! Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; SessionLog session_log = 7 }
//! Summary { repeated Value value = 1 }    Value { string tag = 1; float simple_value = 2 }
//! SessionLog { SessionStatus status = 1 }
//! ```
//!
//! Each start of a run writes a separate file, because an open reader has already consumed the others. Steps that a
//! start repeats are cut off from the earlier files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crc_fast::CrcAlgorithm;

use super::sink::{Figure, Sink};
use crate::atomic_file;

/// Name of the folder with the files, in the output folder.
pub(crate) const TENSORBOARD: &str = "tensorboard";

/// Prefix of file names; readers only find names that contain `tfevents`.
const NAME: &str = "events.out.tfevents.";

/// The version of the format. Readers support [`START`] from this version on.
const VERSION: &str = "brain.Event:2";

/// `SessionStatus.START`: later steps of earlier files do not count.
const START: u64 = 1;

/// An event file that is being written.
pub(super) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file in an output folder for steps after `step`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn begin(out_dir: &Path, step: u64) -> io::Result<Self> {
        let folder = out_dir.join(TENSORBOARD);
        fs::create_dir_all(&folder)?;
        let (path, file) = create(&folder)?;
        let mut events = Self { path, file };
        events.write(None, |event| event.bytes(3, VERSION.as_bytes()))?;
        events.write(Some(step + 1), |event| event.message(7, |log| log.number(1, START)))?;
        Ok(events)
    }

    fn write(&mut self, step: Option<u64>, write_fields: impl FnOnce(&mut Message)) -> io::Result<()> {
        let mut event = Message::default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        event.double(1, now.as_secs_f64());
        if let Some(step) = step {
            event.number(2, step);
        }
        write_fields(&mut event);
        self.file.write_all(&record(&event.0))
    }

    fn scalars(&mut self, step: u64, figures: &[Figure], tag: impl Fn(&Figure) -> String) -> io::Result<()> {
        let value = |summary: &mut Message, figure: &Figure| {
            summary.message(1, |value| {
                value.bytes(1, tag(figure).as_bytes());
                value.float(2, figure.value);
            });
        };
        self.write(Some(step), |event| {
            event.message(5, |summary| figures.iter().for_each(|figure| value(summary, figure)));
        })
    }
}

impl Sink for EventFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn step(&mut self, step: u64, figures: &[Figure]) -> io::Result<()> {
        self.scalars(step, figures, |figure| format!("train/{}", figure.name))
    }

    fn evaluation(&mut self, step: u64, set: &str, figures: &[Figure]) -> io::Result<()> {
        self.scalars(step, figures, |figure| format!("{}/{set}", figure.name))
    }
}

/// Creates a file whose name sorts after those of earlier starts.
fn create(folder: &Path) -> io::Result<(PathBuf, File)> {
    let mut seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    loop {
        let path = folder.join(format!("{NAME}{seconds:010}.fsdp"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => seconds += 1,
            file => return file.map(|file| (path, file)),
        }
    }
}

/// Removes steps after `step` from all event files of an output folder, and everything from the first incomplete or
/// damaged record on. A file without remaining steps is removed.
///
/// # Errors
/// If a file cannot be read or replaced.
pub(super) fn cut(out_dir: &Path, step: u64) -> io::Result<()> {
    let entries = match fs::read_dir(out_dir.join(TENSORBOARD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(NAME.as_bytes()) {
            continue;
        }
        let path = entry.path();
        let bytes = fs::read(&path)?;
        let last = events(&bytes).take_while(|event| !event.has_summary || event.step <= step);
        match last.filter(|event| event.has_summary).last() {
            None => fs::remove_file(&path)?,
            Some(last) if last.end < bytes.len() => drop(atomic_file::replace(&path, &bytes[..last.end])?),
            Some(_) => {}
        }
    }
    Ok(())
}

/// The fields of an event that are read.
struct Event {
    step: u64,
    has_summary: bool,
    /// End of its record in the file.
    end: usize,
}

/// Returns the events of a file, up to the first that is incomplete or damaged.
fn events(bytes: &[u8]) -> impl Iterator<Item = Event> {
    let mut end = 0;
    std::iter::from_fn(move || {
        let (data, len) = unframe(&bytes[end..])?;
        end += len;
        let mut event = Event { step: 0, has_summary: false, end };
        for field in Fields(data) {
            match field? {
                (2, Wire::Number(step)) => event.step = step,
                (5, _) => event.has_summary = true,
                _ => {}
            }
        }
        Some(event)
    })
}

/// Encodes a record: the length and the data, each followed by its checksum.
fn record(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &masked_crc(&len), data, &masked_crc(data)].concat()
}

/// Returns the data of the first record, and the length of that record; `None` if it is not intact.
fn unframe(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    let count = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|_| *crc == masked_crc(len))?;
    let (data, rest) = rest.split_at_checked(count)?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    (*crc == masked_crc(data)).then_some((data, bytes.len() - rest.len()))
}

/// Computes the CRC-32C of bytes, rotated and offset as in `TFRecord`: a plain checksum of data that contains checksums
/// would be weak.
fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    const DELTA: u32 = 0xa282_ead8;
    let crc = u32::try_from(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes)).expect("it has 32 bits");
    crc.rotate_right(15).wrapping_add(DELTA).to_le_bytes()
}

/// A protocol buffers message that is being written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    fn key(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    #[expect(clippy::cast_possible_truncation, reason = "the format holds single precision")]
    fn float(&mut self, field: u64, value: f64) {
        self.key(field, 5);
        self.0.extend((value as f32).to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u64, write: impl FnOnce(&mut Message)) {
        let mut message = Message::default();
        write(&mut message);
        self.bytes(field, &message.0);
    }
}

/// A value of a field, as far as it is needed for reading events.
enum Wire {
    Number(u64),
    Other,
}

/// Iterator over the fields of a message, in order; yields `None` for invalid data.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn skip(&mut self, count: usize) -> Option<Wire> {
        self.0 = self.0.get(count..)?;
        Some(Wire::Other)
    }

    fn field(&mut self) -> Option<(u64, Wire)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Wire::Number(self.varint()?),
            1 => self.skip(8)?,
            2 => {
                let count = usize::try_from(self.varint()?).ok()?;
                self.skip(count)?
            }
            5 => self.skip(4)?,
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl Iterator for Fields<'_> {
    type Item = Option<(u64, Wire)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() { None } else { Some(self.field()) }
    }
}

#[cfg(test)]
mod tests;
