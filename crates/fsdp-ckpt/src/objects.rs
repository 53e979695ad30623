//! Small files in object stores, for callers that store more than checkpoints there.

use std::{io::Write, path::Path};

pub use crate::files::hurry::hurry_when;
use crate::{
    error::{Error, FileAction},
    file_io::{Files, failed},
    files::{FileKind, Metadata},
};

/// Number of bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Reads an object; `None` if it does not exist.
///
/// # Errors
/// [`Error::Io`] if it cannot be read.
pub fn read(url: &Path) -> Result<Option<Vec<u8>>, Error> {
    let files = Files::anywhere();
    files.metadata_if_there(url)?.map(|_| files.read_whole(url)).transpose()
}

/// Writes an object, replacing an existing one.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn write(url: &Path, bytes: &[u8]) -> Result<(), Error> {
    Files::anywhere().replace(url, bytes)
}

/// The names directly below a URL, sorted; empty if there are none.
///
/// # Errors
/// [`Error::Io`] if they cannot be listed.
pub fn names(url: &Path) -> Result<Vec<String>, Error> {
    Files::anywhere().list(url)
}

/// A number that changes whenever the object does; `None` if it does not exist.
///
/// # Errors
/// [`Error::Io`] if the store cannot be asked.
pub fn version(url: &Path) -> Result<Option<u64>, Error> {
    let found = Files::anywhere().metadata_if_there(url)?;
    let of_file = |found: Metadata| (found.kind == FileKind::File).then_some(found.id.1);
    Ok(found.and_then(of_file))
}

/// Copies an object to `out`, piece by piece.
///
/// # Errors
/// [`Error::Io`], which names the URL even if writing fails.
pub fn read_to(url: &Path, out: &mut dyn Write) -> Result<(), Error> {
    let (object, len) = Files::anywhere().open(url)?;
    let mut bytes = Vec::new();
    for start in (0..len).step_by(PIECE_BYTES as usize) {
        bytes.resize(PIECE_BYTES.min(len - start) as usize, 0);
        object.read_exact_at(&mut bytes, start)?;
        out.write_all(&bytes).map_err(failed(FileAction::Copy, url))?;
    }
    Ok(())
}
