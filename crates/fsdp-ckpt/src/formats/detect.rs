//! Detects the format of a path from the contents of its files, never from a name alone, and opens it.
//!
//! The most frequent mistake is to name a directory that holds checkpoints but is none itself (the folder of all steps,
//! the parent of the directory with `.metadata`). The error then lists the checkpoints in it.

use std::path::{Path, PathBuf};

use super::{
    contents::{Contents, FileKind, TORCH_INDEX, contents, kind_of, start_of},
    dcp, deepspeed, megatron, megatron_ranks, native, orbax,
    rank_fault::{part_of_directory, several_files},
    rank_kind::reader_of,
    safetensors_files, torch_file, torch_index, trainer_folder,
};
use crate::{
    checkpoint::{Checkpoint, Source},
    error::{Error, listed},
    file_io::{Files, directory_of},
    model_files::INDEX_FILE,
};

/// Levels of directories below the given one that are searched for checkpoints to list in an error message.
const SEARCH_DEPTH: usize = 2;

/// Maximum number of names that a message lists.
const LISTED_MAX: usize = 8;

/// Maximum number of directories that are searched.
const SEARCHED_MAX: usize = 2000;

/// Opens a checkpoint of any supported format. Reads metadata only.
///
/// # Errors
/// [`Error::WrongPath`] if the path is not a checkpoint; otherwise the errors of the format's reader.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    if Files::anywhere().is_directory(path) { open_directory(path) } else { open_file(path) }
}

fn open_file(path: &Path) -> Result<Checkpoint, Error> {
    let start = start_of(path)?;
    let directory = directory_of(path);
    let around = || contents(&directory).unwrap_or(Contents::Unknown);
    let is_safetensors = path.extension().is_some_and(|ending| ending == "safetensors");
    match kind_of(&start) {
        FileKind::Empty => Err(Error::malformed(path, "it is empty, not a checkpoint")),
        _ if path.to_string_lossy().ends_with(dcp::ITEMS_ENDING) => Err(match dcp::is_at(&directory) {
            true => part_of_directory(path, &directory),
            false => dcp::no_metadata(&directory),
        }),
        FileKind::Zip | FileKind::Legacy => open_torch(path),
        FileKind::Safetensors => safetensors_files::open_file(path),
        FileKind::Json if is_named(path, TORCH_INDEX) => torch_index::open(path),
        FileKind::Json if is_named(path, INDEX_FILE) => safetensors_files::open_index(path),
        kind @ (FileKind::Json | FileKind::Other) => match around() {
            around @ Contents::Native if around.has_part(path) => Err(part_of_directory(path, &directory)),
            // Its reader says what is wrong with it, whatever is beside it.
            _ if is_safetensors => safetensors_files::open_file(path),
            Contents::Unknown if kind == FileKind::Json => safetensors_files::open_index(path),
            around if around.has_part(path) => Err(part_of_directory(path, &directory)),
            around => {
                let start = start.escape_ascii();
                let beside = match around {
                    Contents::Unknown => String::new(),
                    _ => format!("; the directory {} holds a checkpoint", directory.display()),
                };
                let reason =
                    format!("it is not a checkpoint file of a known format: it begins with {start}{beside}");
                Err(Error::wrong_path(path, reason))
            }
        },
    }
}

/// Opens a `torch.save` file, together with its siblings if it is a rank's file.
fn open_torch(path: &Path) -> Result<Checkpoint, Error> {
    match reader_of(path) {
        Ok(Some(open_ranks)) => open_ranks(path),
        Ok(None) => torch_file::open(path),
        // The number in the name of a plain file need not be a rank.
        Err(error) => torch_file::open(path).map_err(|_| error),
    }
}

fn is_named(path: &Path, name: &str) -> bool {
    path.file_name().is_some_and(|found| found == name)
}

fn open_directory(dir: &Path) -> Result<Checkpoint, Error> {
    let contents = contents(dir)?;
    let is_whole =
        matches!(contents, Contents::Native | Contents::Orbax | Contents::Megatron | Contents::MegatronRanks);
    let mut checkpoint = open_contents(dir, contents)?;
    let names = Files::anywhere().list(dir)?;
    let read: Vec<&PathBuf> = checkpoint.sources.iter().map(Source::path).collect();
    let beside: Vec<String> = names.into_iter().filter(|name| !read.contains(&&dir.join(name))).collect();
    if !is_whole && !read.is_empty() {
        trainer_folder::add(&mut checkpoint, dir, &beside, |path| open(path))?;
    }
    Ok(checkpoint)
}

fn open_contents(dir: &Path, contents: Contents) -> Result<Checkpoint, Error> {
    match contents {
        Contents::ModelFolder(folder) => open(folder),
        Contents::NoModel(beside) => Err(trainer_folder::no_model(dir, &beside)),
        Contents::Native => native::open(dir),
        Contents::Dcp => dcp::open(dir),
        Contents::Megatron => megatron::open(dir),
        Contents::MegatronRanks => megatron_ranks::open(dir),
        Contents::Index(index) => safetensors_files::open_index(&index),
        Contents::Safetensors(names) => safetensors_files::open_files(dir, &names),
        Contents::TorchIndex(index) => torch_index::open(&index),
        Contents::TorchFile(path) => open_torch(&path),
        Contents::TorchFiles(files) => match reader_of(dir)? {
            Some(open_ranks) => open_ranks(dir),
            None => Err(several_files(dir, &files)),
        },
        Contents::DeepSpeed => deepspeed::open(dir),
        Contents::Orbax => orbax::open(dir),
        Contents::Unknown => Err(unknown_directory(dir)?),
    }
}

/// The error for a directory that is not a checkpoint itself but may hold some.
fn unknown_directory(dir: &Path) -> Result<Error, Error> {
    if dcp::lacks_metadata(dir, &Files::anywhere().list(dir)?) {
        return Ok(dcp::no_metadata(dir));
    }
    let candidates = candidates(dir);
    let reason = if candidates.is_empty() {
        let found = Files::anywhere().list(dir)?;
        let held = if found.is_empty() { String::new() } else { format!(" (it holds {})", shown(&found)) };
        format!(
            "it holds no checkpoint of a known format{held}; docs/checkpoints.md lists those that are known, and others have to be \
             converted to one of them first"
        )
    } else {
        format!("it is not a checkpoint itself; name one of those in it: {}", shown(&candidates))
    };
    Ok(Error::wrong_path(dir, reason))
}

fn shown(names: &[String]) -> String {
    listed(names, LISTED_MAX)
}

/// Directories below `dir` that hold a checkpoint, relative to `dir`.
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
                    || name.contains(orbax::UNCOMMITTED)
                    || searched == SEARCHED_MAX
                    || !Files::anywhere().is_directory(&dir.join(&inner))
                {
                    continue;
                }
                searched += 1;
                match contents(&dir.join(&inner)) {
                    Ok(Contents::Unknown) | Err(_) => next.push(inner),
                    // Batches and other data are saved in such files, too.
                    Ok(Contents::Safetensors(names)) if !names.iter().any(|name| name.contains("model")) => {
                        next.push(inner);
                    }
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
