//! Small files in object stores, for callers that store more than checkpoints there.

#[cfg(feature = "object-store")]
use std::sync::atomic::Ordering;
use std::{
    io::Write,
    path::Path,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

use crate::{
    error::{Error, FileAction},
    file_io::{Files, failed},
    files::{FileKind, Metadata},
};

/// Number of bytes that are copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Set when requests should not be repeated for long.
static HURRY: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From the moment that the flag is set on, requests to stores that fail are repeated for ten seconds at most: the user or a
/// scheduler waits for this process to end. The first flag that is given counts.
pub fn hurry_when(flag: Arc<AtomicBool>) {
    HURRY.get_or_init(|| flag);
}

/// Whether a flag was [given](hurry_when) and is set.
#[cfg(feature = "object-store")]
pub(crate) fn is_hurried() -> bool {
    HURRY.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

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
