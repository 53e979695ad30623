//! Small files at the URLs of object stores, for those who keep more there than checkpoints.

use std::{io::Write, path::Path};

use crate::{
    error::{Error, FileAction},
    file_io::{Files, failed},
    files::{FileKind, Metadata},
};

/// Bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// The content of an object; nothing if there is none.
///
/// # Errors
/// [`Error::Io`].
pub fn read(url: &Path) -> Result<Option<Vec<u8>>, Error> {
    let files = Files::anywhere();
    files.metadata_if_there(url)?.map(|_| files.read_whole(url)).transpose()
}

/// Puts an object, in the place of one that has its name.
///
/// # Errors
/// [`Error::Io`].
pub fn write(url: &Path, bytes: &[u8]) -> Result<(), Error> {
    Files::anywhere().replace(url, bytes)
}

/// The names of what is directly below a URL, sorted; none if nothing is there.
///
/// # Errors
/// [`Error::Io`].
pub fn names(url: &Path) -> Result<Vec<String>, Error> {
    Files::anywhere().list(url)
}

/// A number that changes when an object does; nothing if there is no object.
///
/// # Errors
/// [`Error::Io`].
pub fn version(url: &Path) -> Result<Option<u64>, Error> {
    let found = Files::anywhere().metadata_if_there(url)?;
    let of_file = |found: Metadata| (found.kind == FileKind::File).then_some(found.id.1);
    Ok(found.and_then(of_file))
}

/// Copies an object to where it is written, piece by piece.
///
/// # Errors
/// [`Error::Io`], which names the URL also when writing fails.
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
