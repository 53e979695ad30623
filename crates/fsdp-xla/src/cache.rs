//! Caches compiled programs on disk, so that the next start need not compile them.
//!
//! An entry is a file whose name is the SHA-256 of everything it depends on: the program text, the options it was
//! compiled with, and the compiler ([`Cache::new`]). The file repeats this key, followed by a checksum of the contents;
//! an entry that does not check out is compiled anew and overwritten. Entries are executable code: the folder must be
//! as trustworthy as the plugin. Its size is bounded ([`MAX_BYTES`]).

mod bound;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest as _, Sha256};
use tempfile::Builder;

use crate::error::XlaError;
use crate::ffi::{Client, CompileOptions, Executable};
use crate::flags::environment_flags;

/// The magic bytes of every entry. Its key, the checksum of the rest, and the serialized program follow.
const MAGIC: &[u8] = b"fsdp xla program 1\n";

/// Maximum bytes of all entries of a folder; the least recently used are deleted. sccache has the same default for
/// compiled code.
const MAX_BYTES: u64 = 10 << 30;

type Sum = [u8; 32];

/// A folder of compiled programs.
pub(crate) struct Cache {
    folder: PathBuf,
    compiler: Sum,
    /// Whether the plugin has reported that it cannot serialize programs.
    cannot_serialize: AtomicBool,
}

/// The hash of everything an entry depends on, 64 hex digits as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(Sum);

impl Cache {
    /// Opens the cache for the programs of a client's compiler, identified by the plugin's file and versions, the
    /// device kind, flags in the environment and, for CPUs, the instruction set of this one.
    ///
    /// # Errors
    /// [`XlaError::Cache`]: the folder cannot be created; [`XlaError::Unusable`]: the plugin cannot be read.
    pub(crate) fn new(folder: &Path, client: &Client) -> Result<Self, XlaError> {
        fs::create_dir_all(folder).map_err(|source| XlaError::Cache { path: folder.into(), source })?;
        let mut compiler = Sha256::new();
        let plugin = client.path();
        add_file(&mut compiler, plugin).map_err(|error| XlaError::open(plugin, error))?;
        let [platform, version] = client.platform()?;
        let api = format!("{:?}", client.api_version());
        let instructions = if platform == "cpu" { instructions() } else { String::new() };
        for part in [&platform, &version, &api, &client.kind().name, &instructions] {
            add(&mut compiler, part.as_bytes());
        }
        environment_flags().iter().for_each(|value| add(&mut compiler, value.as_encoded_bytes()));
        let compiler = compiler.finalize().into();
        Ok(Self { folder: folder.into(), compiler, cannot_serialize: AtomicBool::new(false) })
    }

    /// Returns the key of a program.
    pub(crate) fn key(&self, text: &str, options: &CompileOptions) -> Key {
        let mut key = Sha256::new();
        key.update(self.compiler);
        add(&mut key, &options.to_proto());
        add(&mut key, text.as_bytes());
        Key(key.finalize().into())
    }

    fn path(&self, Key(key): Key) -> PathBuf {
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(format!("{digits}{}", bound::ENDING))
    }

    /// Loads the program with this key; `None` if there is no entry.
    ///
    /// # Errors
    /// Why an existing entry is unusable.
    pub(crate) fn find(&self, client: &Arc<Client>, key: Key) -> Result<Option<Executable>, String> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let program = content(key, &bytes).map_err(|reason| format!("{}: {reason}", path.display()))?;
        let loaded = client.load(program).map_err(|error| format!("{}: {error}", path.display()))?;
        bound::note_use(&path);
        Ok(Some(loaded))
    }

    /// Stores a program, evicting the least recently used ones if needed.
    ///
    /// # Errors
    /// Why it is not stored. That the plugin cannot serialize programs is reported once.
    pub(crate) fn insert(&self, key: Key, program: &Executable) -> Result<(), String> {
        let serialized = match program.compiled().and_then(|program| program.serialize()) {
            Ok(serialized) => serialized,
            Err(error) if self.cannot_serialize.swap(true, Ordering::Relaxed) => {
                tracing::debug!(target: "fsdp", %error, "a program was not serialized");
                return Ok(());
            }
            Err(error) => return Err(format!("the plugin does not serialize programs: {error}")),
        };
        let path = self.path(key);
        write(&path, key, &serialized).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Err(error) = bound::enforce(&self.folder, &path, MAX_BYTES) {
            let folder = self.folder.display();
            tracing::warn!(target: "fsdp", %folder, %error, "compiled programs cannot be deleted");
        }
        Ok(())
    }
}

/// Hashes bytes, preceded by their length, so that adjacent parts cannot be confused.
fn add(sum: &mut Sha256, bytes: &[u8]) {
    sum.update((bytes.len() as u64).to_le_bytes());
    sum.update(bytes);
}

/// Hashes the contents of a file.
fn add_file(sum: &mut Sha256, path: &Path) -> io::Result<()> {
    let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            return Ok(());
        }
        sum.update(bytes);
        let read = bytes.len();
        file.consume(read);
    }
}

/// The instruction set of this CPU, as listed by the kernel; empty if it lists none.
fn instructions() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let features = cpuinfo.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
    features.unwrap_or_default().to_owned()
}

/// Writes an entry to a temporary file and moves it into place.
fn write(path: &Path, Key(key): Key, serialized: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("an entry is in a folder");
    let mut file = Builder::new().prefix(bound::UNFINISHED).tempfile_in(folder)?;
    let sum: Sum = Sha256::digest(serialized).into();
    for part in [MAGIC, &key, &sum, serialized] {
        file.write_all(part)?;
    }
    file.persist(path)?;
    Ok(())
}

/// Returns the serialized program in the bytes of an entry.
fn content(Key(key): Key, bytes: &[u8]) -> Result<&[u8], &'static str> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("not written by this version of fsdp")?;
    let (stored_key, rest) = rest.split_first_chunk::<32>().ok_or("cut off")?;
    let (sum, program) = rest.split_first_chunk::<32>().ok_or("cut off")?;
    if *stored_key != key {
        return Err("of another program or compiler");
    }
    if Sum::from(Sha256::digest(program)) != *sum {
        return Err("damaged");
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_entry_round_trips_and_damage_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("entry"), Key([7; 32]));
        write(&path, key, b"the program").unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        let bytes = fs::read(&path).unwrap();
        assert_eq!(content(key, &bytes), Ok(&b"the program"[..]));
        assert_eq!(content(Key([8; 32]), &bytes), Err("of another program or compiler"));
        for len in 0..bytes.len() {
            assert!(content(key, &bytes[..len]).is_err(), "the first {len} bytes");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(content(key, &damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn key_part_boundaries_change_hash() {
        let sum = |parts: [&str; 2]| -> Sum {
            let mut sum = Sha256::new();
            parts.iter().for_each(|part| add(&mut sum, part.as_bytes()));
            sum.finalize().into()
        };
        assert_ne!(sum(["ab", "c"]), sum(["a", "bc"]));
    }
}
