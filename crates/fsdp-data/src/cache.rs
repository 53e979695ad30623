//! A cache of tokenized text for later starts, with one file per text and tokenizer.
//!
//! The name of a cache file is the digest of everything that determines its tokens ([`Text::key`]). A file is written
//! under a temporary name and renamed once it is complete. Entries have no locks: not all cluster file systems have them,
//! and a suspended process would hold one forever. Of the processes of a run, one creates the file before the others
//! look for it (the launcher takes care of that). Runs that start at the same time each create the same file, and all
//! use the one that was renamed first.
//!
//! A temporary file is locked while its process writes it, where the file system has locks. A file that nobody has locked is
//! left by a process that was killed, and the next start removes it.
//!
//! An intact file is never replaced: on NFS, a file replaced by another machine disappears under the processes that
//! have it mapped. Files are not synced: the checksum detects damage by a power failure.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fsdp_ckpt::is_url;
use fsdp_config::DataConfig;
use fsdp_core::Digest;
use tempfile::{NamedTempFile, SpooledData, spooled_tempfile_in};

use super::error::DataError;
use super::image::{Image, ImageFault};
use super::loading::Loading;
use super::mapped::Mapped;
use super::pipeline::Text;
use super::text::{Key, TokenizeFault};
use super::tokens::Bytes;
use super::warning::DataWarning;
use crate::resolve_links::resolve_links;

/// Tokens that are not cached stay in memory up to this size, in bytes.
const IN_MEMORY_BYTES_MAX: usize = 1 << 25;

/// Mode of cache files: they are mapped by their readers, so they must not be written to.
const READ_ONLY: u32 = 0o444;

/// Start and end of the names of temporary files.
const TEMPORARY: [&str; 2] = ["new-", ".tmp"];

/// Tokens of text, read from the cache or new.
#[derive(Debug)]
pub(super) struct Cached {
    /// The tokens.
    pub(super) image: Image,
    /// Where the tokens are still to be cached; `None` if they are already, or will not be.
    pub(super) pending: Option<PendingEntry>,
    /// Warnings for the user.
    pub(super) warnings: Vec<DataWarning>,
}

/// A cache entry that is written once the run is accepted.
#[derive(Debug)]
pub(super) struct PendingEntry {
    folder: PathBuf,
    key: Digest,
    stage: Mutex<Stage>,
}

/// The state of a cache entry in an output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The entry has no file yet.
    Unwritten,
    /// The file is there for the other processes of the run, and is deleted on drop unless the run is accepted.
    Shared,
    /// The file is permanent.
    Kept,
}

/// Returns the tokens of a text: cached ones if possible, else new ones, which are then cached if possible.
///
/// # Errors
/// If text cannot be read or tokenized.
pub(super) fn tokens(
    text: &Text<'_>,
    config: &DataConfig,
    loading: &Loading<'_>,
) -> Result<Cached, DataError> {
    let out_dir = loading.out_dir;
    let folder = config.cache_folder(out_dir);
    // Cached tokens are memory-mapped, which requires a local file.
    if is_url(&folder) {
        let image = uncached(text, &text.uncached_key(), out_dir)?;
        return Ok(Cached { image, pending: None, warnings: Vec::new() });
    }
    if loading.keeps {
        remove_abandoned(&folder);
    }
    let key = text.key()?;
    let file = folder.join(name(key.digest));
    let mut warnings = Vec::new();
    match open(&file, key.digest) {
        Ok(image) => return Ok(Cached { image, pending: None, warnings }),
        Err(ImageFault::Read(fault)) if fault.kind() == io::ErrorKind::NotFound => {}
        Err(fault) => warnings.push(DataWarning::Damaged { file, fault: fault.to_string() }),
    }
    // Nothing may be created in the output folder before the run is accepted.
    let is_output = resolve_links(&folder).starts_with(resolve_links(out_dir));
    if !is_output && loading.keeps {
        match build(&folder, text, &key) {
            Ok(image) => return Ok(Cached { image, pending: None, warnings }),
            Err(TokenizeFault::Data(error)) => return Err(error),
            Err(TokenizeFault::Write(fault)) => warnings.push(not_kept(&folder, &fault)),
        }
    }
    let image = uncached(text, &key, out_dir)?;
    let pending =
        is_output.then_some(PendingEntry { folder, key: key.digest, stage: Mutex::new(Stage::Unwritten) });
    Ok(Cached { image, pending, warnings })
}

/// Tokenizes into a file of a folder, without holding all tokens in memory.
fn build(folder: &Path, text: &Text<'_>, key: &Key) -> Result<Image, TokenizeFault> {
    let file = create_temporary(folder)?;
    text.tokenize(file.as_file(), key)?;
    let image =
        Image::open(Bytes::Mapped(Mapped::of(file.as_file())?), key.digest).map_err(io::Error::other)?;
    Ok(persist(file, folder, key.digest)?.unwrap_or(image))
}

impl PendingEntry {
    /// Advances to the stage `next`, writing the bytes of an [`Image`] unless they were written before. Returns a
    /// warning if that fails.
    pub(super) fn advance_to(&self, next: Stage, bytes: &[u8]) -> Option<DataWarning> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || -> io::Result<()> {
            let mut file = create_temporary(&self.folder)?;
            file.write_all(bytes)?;
            persist(file, &self.folder, self.key).map(drop)
        };
        let written = if *stage == Stage::Unwritten { write() } else { Ok(()) };
        match written {
            Ok(()) => *stage = next,
            Err(fault) => return Some(not_kept(&self.folder, &fault)),
        }
        None
    }
}

impl Drop for PendingEntry {
    fn drop(&mut self) {
        if *self.stage.get_mut().unwrap_or_else(PoisonError::into_inner) == Stage::Shared {
            // The folder stays if it contains anything else.
            let _ =
                fs::remove_file(self.folder.join(name(self.key))).and_then(|()| fs::remove_dir(&self.folder));
        }
    }
}

/// Tokenizes into memory or, beyond a limit, into an unnamed file on the disk of the future output folder.
///
/// # Errors
/// If text cannot be read or tokenized.
pub(super) fn uncached(text: &Text<'_>, key: &Key, out_dir: &Path) -> Result<Image, DataError> {
    let spill = || -> Result<Image, TokenizeFault> {
        let file = spooled_tempfile_in(IN_MEMORY_BYTES_MAX, existing_ancestor(out_dir));
        let file = text.tokenize(file, key)?;
        let bytes = match file.into_inner() {
            SpooledData::InMemory(bytes) => Bytes::Owned(bytes.into_inner()),
            SpooledData::OnDisk(file) => Bytes::Mapped(Mapped::of(&file)?),
        };
        Ok(Image::open(bytes, key.digest).map_err(io::Error::other)?)
    };
    match spill() {
        Ok(image) => return Ok(image),
        Err(TokenizeFault::Data(error)) => return Err(error),
        Err(TokenizeFault::Write(fault)) => tracing::info!("tokens are held in memory: {fault}"),
    }
    let bytes = match text.tokenize(Vec::new(), key) {
        Ok(bytes) => bytes,
        Err(TokenizeFault::Data(error)) => return Err(error),
        Err(TokenizeFault::Write(fault)) => unreachable!("memory takes everything, but: {fault}"),
    };
    Ok(Image::open(Bytes::Owned(bytes), key.digest).expect("what was just made is whole"))
}

/// Returns the folder itself or its nearest existing ancestor.
fn existing_ancestor(folder: &Path) -> PathBuf {
    if is_url(folder) {
        return std::env::temp_dir();
    }
    let ancestor = folder.ancestors().find(|ancestor| ancestor.is_dir());
    ancestor.map_or_else(|| PathBuf::from("."), Path::to_owned)
}

fn open(file: &Path, key: Digest) -> Result<Image, ImageFault> {
    Image::open(Bytes::open(file)?, key)
}

fn name(key: Digest) -> String {
    let [high, low] = key.words();
    format!("{high:016x}{low:016x}.tokens")
}

/// Creates a file with a unique temporary name in a folder, which is created if necessary. It is locked until it is closed.
fn create_temporary(folder: &Path) -> io::Result<NamedTempFile> {
    fs::create_dir_all(folder)?;
    let [prefix, suffix] = TEMPORARY;
    loop {
        let permissions = Permissions::from_mode(READ_ONLY);
        let file = tempfile::Builder::new()
            .prefix(prefix)
            .suffix(suffix)
            .permissions(permissions)
            .tempfile_in(folder)?;
        let locked = file.as_file().try_lock();
        // Before it was locked, another start may have taken it for abandoned.
        if !matches!(locked, Err(TryLockError::WouldBlock)) && file.path().exists() {
            return Ok(file);
        }
    }
}

/// Removes temporary files of processes that were killed. Where the file system has no locks, they stay.
fn remove_abandoned(folder: &Path) {
    let [prefix, suffix] = TEMPORARY;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_temporary =
            name.to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(suffix));
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_temporary && is_file && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            // Another start may remove it at the same time.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Gives a file its final name. If another process created that file first, returns its image instead.
fn persist(file: NamedTempFile, folder: &Path, key: Digest) -> io::Result<Option<Image>> {
    let path = folder.join(name(key));
    match file.persist_noclobber(&path) {
        Ok(_) => Ok(None),
        Err(taken) if taken.error.kind() == io::ErrorKind::AlreadyExists => match open(&path, key) {
            Ok(image) => Ok(Some(image)),
            Err(_) => Ok(taken.file.persist(&path).map(|_| None)?),
        },
        Err(failed) => Err(failed.error),
    }
}

fn not_kept(folder: &Path, fault: &io::Error) -> DataWarning {
    DataWarning::NotKept { folder: folder.to_owned(), fault: fault.to_string() }
}

#[cfg(feature = "tokenizers")]
#[cfg(test)]
mod tests;
