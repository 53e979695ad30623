//! Tokens of text that are kept for later starts, one file per text and tokenizer.
//!
//! A file of the cache is named by what decides its tokens ([`Text::key`]), written under another name, and renamed when it
//! is whole. Nobody waits for a lock: not all cluster file systems have locks, and one held by a process that is stopped is
//! held for ever. Of the processes of a run one makes the file, before the others look for it (whoever starts them sees to
//! that). Runs that start at the same time each make the same file, and all use the one that was named first.
//!
//! A sound file is never replaced: on NFS, what another machine replaces is gone for those who have it mapped. Nothing is
//! made durable: what a power failure damages, the checksum finds.

use std::fs::{self, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fsdp_ckpt::is_url;
use fsdp_core::Digest;
use tempfile::{NamedTempFile, SpooledData, spooled_tempfile_in};

use super::dataset::Loading;
use super::error::DataError;
use super::image::{Image, ImageFault};
use super::mapped::Mapped;
use super::text::{Key, NotTokenized, Text};
use super::tokens::Bytes;
use super::warning::DataWarning;
use crate::config::DataConfig;
use crate::true_path::true_path;

/// The cache in an output folder, where no other is asked for.
pub(crate) const CACHE: &str = "cache";

/// Tokens that are not kept are in memory up to this length.
const UNNAMED_BYTES_MAX: usize = 1 << 25;

/// Who reads a file of the cache maps it, so nobody is to write into it.
const READ_ONLY: u32 = 0o444;

impl DataConfig {
    /// Where the tokens of text are kept, by a run with this output folder.
    pub fn cache_folder(&self, out_dir: &Path) -> PathBuf {
        self.cache.as_ref().map_or_else(|| out_dir.join(CACHE), PathBuf::from)
    }
}

/// Tokens of text, from a cache or for it.
#[derive(Debug)]
pub(super) struct Cached {
    /// The tokens.
    pub(super) image: Image,
    /// Where they are to be kept.
    pub(super) unkept: Option<Unkept>,
    /// What the user should know.
    pub(super) warnings: Vec<DataWarning>,
}

/// Where tokens are to be kept once the run is accepted.
#[derive(Debug)]
pub(super) struct Unkept {
    folder: PathBuf,
    key: Digest,
    stage: Mutex<Stage>,
}

/// How far tokens have come on their way into an output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// They are in memory only.
    Nowhere,
    /// They are there for other processes of this run, and go with it if it is not accepted.
    Shared,
    /// They stay.
    Kept,
}

/// The tokens of a text for a run: kept ones if there are any, else new ones, which are kept if that
/// is possible.
///
/// # Errors
/// Text that can not be read or tokenized.
pub(super) fn tokens(
    text: &Text<'_>,
    config: &DataConfig,
    loading: &Loading<'_>,
) -> Result<Cached, DataError> {
    let out_dir = loading.out_dir;
    let folder = config.cache_folder(out_dir);
    // Kept tokens are mapped, which needs a file of this machine.
    if is_url(&folder) {
        let image = unnamed(text, &text.key_of_none_kept(), out_dir)?;
        return Ok(Cached { image, unkept: None, warnings: Vec::new() });
    }
    let key = text.key()?;
    let file = folder.join(name(key.digest));
    let mut warnings = Vec::new();
    match open(&file, key.digest) {
        Ok(image) => return Ok(Cached { image, unkept: None, warnings }),
        Err(ImageFault::Read(fault)) if fault.kind() == io::ErrorKind::NotFound => {}
        Err(fault) => warnings.push(DataWarning::Damaged { file, fault: fault.to_string() }),
    }
    // In the output folder nothing may be made before the run is accepted.
    let is_output = true_path(&folder).starts_with(true_path(out_dir));
    if !is_output && loading.keeps {
        match build(&folder, text, &key) {
            Ok(image) => return Ok(Cached { image, unkept: None, warnings }),
            Err(NotTokenized::Data(error)) => return Err(error),
            Err(NotTokenized::Write(fault)) => warnings.push(not_kept(&folder, &fault)),
        }
    }
    let image = unnamed(text, &key, out_dir)?;
    let unkept = is_output.then_some(Unkept { folder, key: key.digest, stage: Mutex::new(Stage::Nowhere) });
    Ok(Cached { image, unkept, warnings })
}

/// Tokenizes into a file of a folder, never holding all tokens in memory.
fn build(folder: &Path, text: &Text<'_>, key: &Key) -> Result<Image, NotTokenized> {
    let file = beside(folder)?;
    text.tokenize(BufWriter::new(file.as_file()), key)?;
    let image =
        Image::open(Bytes::Mapped(Mapped::of(file.as_file())?), key.digest).map_err(io::Error::other)?;
    Ok(name_it(file, folder, key.digest)?.unwrap_or(image))
}

impl Unkept {
    /// Writes the bytes of an [`Image`], if they were not before, and notes how far they have come.
    pub(super) fn reach(&self, next: Stage, bytes: &[u8]) -> Option<DataWarning> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || -> io::Result<()> {
            let mut file = beside(&self.folder)?;
            file.write_all(bytes)?;
            name_it(file, &self.folder, self.key).map(drop)
        };
        let written = if *stage == Stage::Nowhere { write() } else { Ok(()) };
        match written {
            Ok(()) => *stage = next,
            Err(fault) => return Some(not_kept(&self.folder, &fault)),
        }
        None
    }
}

impl Drop for Unkept {
    fn drop(&mut self) {
        if *self.stage.get_mut().unwrap_or_else(PoisonError::into_inner) == Stage::Shared {
            // The folder stays if there is anything else in it.
            let _ =
                fs::remove_file(self.folder.join(name(self.key))).and_then(|()| fs::remove_dir(&self.folder));
        }
    }
}

/// Tokenizes into memory or, what is longer, into a file without a name, on the disk where the output folder will be.
///
/// # Errors
/// Text that can not be read or tokenized.
pub(super) fn unnamed(text: &Text<'_>, key: &Key, out_dir: &Path) -> Result<Image, DataError> {
    let spill = || -> Result<Image, NotTokenized> {
        let file = spooled_tempfile_in(UNNAMED_BYTES_MAX, existing(out_dir));
        let file = text.tokenize(BufWriter::new(file), key)?.into_inner().map_err(io::Error::from)?;
        let bytes = match file.into_inner() {
            SpooledData::InMemory(bytes) => Bytes::Owned(bytes.into_inner()),
            SpooledData::OnDisk(file) => Bytes::Mapped(Mapped::of(&file)?),
        };
        Ok(Image::open(bytes, key.digest).map_err(io::Error::other)?)
    };
    match spill() {
        Ok(image) => return Ok(image),
        Err(NotTokenized::Data(error)) => return Err(error),
        Err(NotTokenized::Write(fault)) => tracing::info!("tokens are held in memory: {fault}"),
    }
    let bytes = match text.tokenize(Vec::new(), key) {
        Ok(made) => made,
        Err(NotTokenized::Data(error)) => return Err(error),
        Err(NotTokenized::Write(fault)) => unreachable!("memory takes everything, but: {fault}"),
    };
    Ok(Image::open(Bytes::Owned(bytes), key.digest).expect("what was just made is whole"))
}

/// The folder, or the nearest one above it that is there.
fn existing(folder: &Path) -> PathBuf {
    if is_url(folder) {
        return std::env::temp_dir();
    }
    let there = folder.ancestors().find(|above| above.is_dir());
    there.map_or_else(|| PathBuf::from("."), Path::to_owned)
}

fn open(file: &Path, key: Digest) -> Result<Image, ImageFault> {
    Image::open(Bytes::open(file)?, key)
}

fn name(key: Digest) -> String {
    let [high, low] = key.words();
    format!("{high:016x}{low:016x}.tokens")
}

/// A new file in a folder, which is made if need be, under a name that nobody else uses.
fn beside(folder: &Path) -> io::Result<NamedTempFile> {
    fs::create_dir_all(folder)?;
    let permissions = Permissions::from_mode(READ_ONLY);
    tempfile::Builder::new().prefix("new-").suffix(".tmp").permissions(permissions).tempfile_in(folder)
}

/// Gives a file its name, or returns what another process has given it to before.
fn name_it(file: NamedTempFile, folder: &Path, key: Digest) -> io::Result<Option<Image>> {
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
