//! Which format a path is, judged by what is in the files and never by a name alone, and opening it.
//!
//! A directory that is not a checkpoint but holds some is the most frequent mistake (the folder of all steps, the
//! folder above the one with `.metadata`): the error then names those that it holds.

use std::path::{Path, PathBuf};

use super::{
    dcp, deepspeed, native, rank_files, rank_kind::RankKind, safetensors_files, torch_file, torch_index, xla,
};
use crate::{
    checkpoint::Checkpoint,
    error::{Error, listed},
    file_io::{Files, PathFile, directory_of},
    model_files::{INDEX_FILE, SINGLE_FILE},
    native::{Attempt, MANIFEST_FILE},
};

/// The first bytes of a zip archive, as `torch.save` writes them.
const ZIP_START: &[u8] = b"PK\x03\x04";

/// Bytes of the start of a file that tell its format.
const START_BYTES: u64 = 16;

/// Directories below the named one that are searched for checkpoints, for a message.
const SEARCH_DEPTH: usize = 2;

/// Names that a message lists.
const LISTED_MAX: usize = 8;

/// How many directories are searched for it.
const SEARCHED_MAX: usize = 2000;

/// The index of one in several files.
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";

/// The model of older Hugging Face directories, beside files of the Trainer.
const TORCH_MODEL: &str = "pytorch_model.bin";

/// Endings of files of `torch.save`.
const TORCH_ENDINGS: [&str; 4] = [".pth", ".pt", ".bin", ".ckpt"];

/// Opens a checkpoint of any format that is read. Only metadata is read.
///
/// # Errors
/// [`Error::WrongPath`] when the path is no checkpoint; the errors of the format otherwise.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    if Files::anywhere().is_directory(path) { open_directory(path) } else { open_file(path) }
}

/// What a file is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Empty,
    Zip,
    Safetensors,
    Json,
    Other,
}

fn start_of(path: &Path) -> Result<Vec<u8>, Error> {
    let (file, len) = PathFile::open(path)?;
    file.read_first(len.min(START_BYTES))
}

fn kind_of(start: &[u8]) -> FileKind {
    match start {
        [] => FileKind::Empty,
        start if start.starts_with(ZIP_START) => FileKind::Zip,
        // A header length below 2^40, then the header.
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => FileKind::Safetensors,
        start if start.trim_ascii_start().starts_with(b"{") => FileKind::Json,
        _ => FileKind::Other,
    }
}

fn open_file(path: &Path) -> Result<Checkpoint, Error> {
    let start = start_of(path)?;
    let directory = directory_of(path);
    let around = || contents(&directory).unwrap_or(Contents::Unknown);
    match kind_of(&start) {
        FileKind::Empty => Err(Error::malformed(path, "it is empty, and no checkpoint")),
        FileKind::Zip => open_torch(path),
        FileKind::Safetensors => safetensors_files::open_file(path),
        FileKind::Json if is_named(path, TORCH_INDEX) => torch_index::open(path),
        FileKind::Json if is_named(path, INDEX_FILE) => safetensors_files::open_index(path),
        kind @ (FileKind::Json | FileKind::Other) => match around() {
            Contents::Unknown if kind == FileKind::Json => safetensors_files::open_index(path),
            around if around.has_part(path) => Err(part_of_directory(path, &directory)),
            around => {
                let start = start.escape_ascii();
                let beside = match around {
                    Contents::Unknown => String::new(),
                    _ => format!("; the directory {} holds a checkpoint", directory.display()),
                };
                let reason =
                    format!("it is no checkpoint file of a known format: it begins with {start}{beside}");
                Err(Error::wrong_path(path, reason))
            }
        },
    }
}

/// Opens a file of `torch.save`: one rank's with its siblings, or one by itself.
fn open_torch(path: &Path) -> Result<Checkpoint, Error> {
    // What is wrong with a file, its reader says best.
    match RankKind::of(path).unwrap_or(None) {
        Some(kind) => open_ranks(kind, path),
        None => torch_file::open(path),
    }
}

fn open_ranks(kind: RankKind, path: &Path) -> Result<Checkpoint, Error> {
    match kind {
        RankKind::Xla => xla::open(path),
        RankKind::DTensors => rank_files::open(path),
        RankKind::DeepSpeed => deepspeed::open(path),
    }
}

fn is_named(path: &Path, name: &str) -> bool {
    path.file_name().is_some_and(|found| found == name)
}

/// What a directory holds.
enum Contents {
    /// A native checkpoint.
    Native,
    /// A distributed checkpoint of PyTorch.
    Dcp,
    /// A model with an index.
    Index(PathBuf),
    /// These safetensors files.
    Safetensors(Vec<String>),
    /// Files of `torch.save` with an index.
    TorchIndex(PathBuf),
    /// One file of `torch.save`.
    TorchFile(PathBuf),
    /// Several of them.
    TorchFiles(Vec<String>),
    /// Nothing that is known.
    Unknown,
}

impl Contents {
    /// Whether a file of the directory belongs to the checkpoint in it.
    fn has_part(&self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        match self {
            Contents::Native => {
                name == MANIFEST_FILE || (name.starts_with("shard-") && ends(&[".safetensors"]))
            }
            Contents::Dcp => {
                name == dcp::METADATA_FILE || name == dcp::FIRST_RANK_METADATA_FILE || ends(&[".distcp"])
            }
            Contents::Index(_) => ends(&[".safetensors"]),
            Contents::Safetensors(names) => names.iter().any(|part| *part == name),
            Contents::TorchIndex(_) => ends(&TORCH_ENDINGS),
            Contents::TorchFile(_) | Contents::TorchFiles(_) | Contents::Unknown => false,
        }
    }
}

fn contents(dir: &Path) -> Result<Contents, Error> {
    let names = Files::anywhere().list(dir)?;
    let has = |name: &str| names.iter().any(|found| found == name);
    let ending = |endings: &[&str]| -> Vec<String> {
        let is_one =
            |name: &&String| !name.starts_with('.') && endings.iter().any(|ending| name.ends_with(ending));
        names.iter().filter(is_one).cloned().collect()
    };
    let safetensors = ending(&[".safetensors"]);
    // Files of ranks beside a manifest are native whatever the manifest says: one that is damaged must not make
    // them plain shards, which nothing protects.
    let is_of_rank = |name: &String| name.starts_with("shard-") || Attempt::named(name).is_some();
    if has(MANIFEST_FILE) && names.iter().any(is_of_rank) {
        return Ok(Contents::Native);
    }
    // Where PyTorch wrote safetensors, its metadata says nothing of use.
    let has_dcp_metadata = has(dcp::METADATA_FILE) || has(dcp::FIRST_RANK_METADATA_FILE);
    if has_dcp_metadata && (safetensors.is_empty() || !ending(&[".distcp"]).is_empty()) {
        return Ok(Contents::Dcp);
    }
    if has(INDEX_FILE) && !has(SINGLE_FILE) {
        return Ok(Contents::Index(dir.join(INDEX_FILE)));
    }
    if has(SINGLE_FILE) {
        return Ok(Contents::Safetensors(vec![SINGLE_FILE.to_owned()]));
    }
    if !safetensors.is_empty() {
        return Ok(Contents::Safetensors(safetensors));
    }
    if has(TORCH_INDEX) && !has(TORCH_MODEL) {
        return Ok(Contents::TorchIndex(dir.join(TORCH_INDEX)));
    }
    if has(TORCH_MODEL) {
        return Ok(Contents::TorchFile(dir.join(TORCH_MODEL)));
    }
    let mut torch_files = ending(&TORCH_ENDINGS);
    torch_files.retain(|name| start_of(&dir.join(name)).is_ok_and(|start| kind_of(&start) == FileKind::Zip));
    Ok(match torch_files.as_slice() {
        [] => Contents::Unknown,
        [one] => Contents::TorchFile(dir.join(one)),
        _ => Contents::TorchFiles(torch_files),
    })
}

fn open_directory(dir: &Path) -> Result<Checkpoint, Error> {
    match contents(dir)? {
        Contents::Native => native::open(dir),
        Contents::Dcp => dcp::open(dir),
        Contents::Index(index) => safetensors_files::open_index(&index),
        Contents::Safetensors(names) => safetensors_files::open_files(dir, &names),
        Contents::TorchIndex(index) => torch_index::open(&index),
        Contents::TorchFile(path) => open_torch(&path),
        Contents::TorchFiles(files) => match RankKind::of(dir)? {
            Some(kind) => open_ranks(kind, dir),
            None => Err(several_files(dir, &files)),
        },
        Contents::Unknown => {
            // DeepSpeed's directory of all steps names the newest one, in which a file may be damaged.
            let names_newest =
                || deepspeed::directory_of(&Files::anywhere(), dir).is_ok_and(|newest| newest != dir);
            match RankKind::of(dir) {
                Ok(Some(kind)) => return open_ranks(kind, dir),
                Err(error) if names_newest() => return Err(error),
                Ok(None) | Err(_) => {}
            }
            Err(unknown_directory(dir)?)
        }
    }
}

/// A directory that is no checkpoint: it may hold some.
fn unknown_directory(dir: &Path) -> Result<Error, Error> {
    let candidates = candidates(dir);
    let reason = if candidates.is_empty() {
        let found = Files::anywhere().list(dir)?;
        let held = if found.is_empty() { String::new() } else { format!(" (it holds {})", shown(&found)) };
        format!("it holds no checkpoint of a known format{held}")
    } else {
        format!("it is not a checkpoint itself; name one of those in it: {}", shown(&candidates))
    };
    Ok(Error::wrong_path(dir, reason))
}

/// Several files of weights that nothing joins.
pub(super) fn several_files(dir: &Path, files: &[String]) -> Error {
    let reason = format!(
        "it holds several files of weights and nothing says that they belong together; name one of them: {}",
        shown(files)
    );
    Error::wrong_path(dir, reason)
}

/// A file that is part of a checkpoint.
pub(super) fn part_of_directory(file: &Path, directory: &Path) -> Error {
    let directory = directory.display();
    Error::wrong_path(file, format!("it is a part of a checkpoint; name the directory {directory} instead"))
}

fn shown(names: &[String]) -> String {
    listed(names, LISTED_MAX)
}

/// Directories below this one that hold a checkpoint, relative to it.
fn candidates(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut level = vec![PathBuf::new()];
    let mut searched = 0;
    for _ in 0..SEARCH_DEPTH {
        let mut next = Vec::new();
        for relative in level {
            for name in Files::anywhere().list(&dir.join(&relative)).unwrap_or_default() {
                let inner = relative.join(&name);
                if name.starts_with('.')
                    || searched == SEARCHED_MAX
                    || !Files::anywhere().is_directory(&dir.join(&inner))
                {
                    continue;
                }
                searched += 1;
                match contents(&dir.join(&inner)) {
                    Ok(Contents::Unknown) | Err(_) => next.push(inner),
                    Ok(_) => found.push(inner.display().to_string()),
                }
            }
        }
        level = next;
    }
    found
}

#[cfg(test)]
mod tests;
