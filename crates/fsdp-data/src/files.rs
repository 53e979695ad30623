//! Resolves a list of paths to files, and the kind of each.
//!
//! A path to a file is taken as it is. If there is no such file and the path contains `*`, `?` or `[`, it is a glob
//! pattern. Folders are walked in the order of names; hidden entries, folders named `target` and links to folders are
//! skipped. Which files of a folder are data depends on the format: see [`formats`]. Files in a folder that the run
//! writes to, its output folder or its cache, are never data: otherwise a run would change the data that it resumes
//! with.

mod formats;
mod saved;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use fsdp_ckpt::is_url;
use fsdp_config::DataConfig;
use glob::{MatchOptions, Pattern};

use super::error::DataError;
use crate::resolve_links::resolve_links;
pub(super) use formats::{Compression, Kind, expected_files};

/// Names the given paths in errors, until the key that they belong to is known.
const DATA: &str = "[data]";

/// As in a shell: `*` matches neither `/` nor a leading dot.
const GLOB_OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataFile {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Whether the user named the file itself, rather than a folder around it.
    pub(super) named: bool,
    /// Kind of contents.
    pub(super) kind: Kind,
    /// How the file is compressed, if it is.
    pub(super) compression: Option<Compression>,
}

/// The folders that a run writes to.
struct OutputFolders {
    /// For each folder its key, its path, and its path with links resolved.
    folders: Vec<(&'static str, PathBuf, PathBuf)>,
}

impl OutputFolders {
    fn of(config: &DataConfig, out_dir: &Path) -> OutputFolders {
        let cache = config.cache.iter().map(|cache| ("data.cache", PathBuf::from(cache)));
        let named = [("run.out_dir", out_dir.to_owned())].into_iter().chain(cache);
        OutputFolders {
            folders: named.map(|(key, path)| (key, path.clone(), resolve_links(&path))).collect(),
        }
    }

    /// Returns the key and the path of the folder that contains a path.
    fn folder_of(&self, path: &Path) -> Option<(&'static str, &Path)> {
        let path = resolve_links(path);
        let (key, folder, _) = self.folders.iter().find(|(_, _, folder)| path.starts_with(folder))?;
        Some((key, folder))
    }

    fn expect_outside(&self, path: &Path) -> Result<(), DataError> {
        self.folder_of(path).map_or(Ok(()), |(written, folder)| {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            Err(DataError::InOutput { key: DATA, path, written, folder })
        })
    }
}

/// Returns the files of a list of paths, without those that the run writes: in the order of the list, and by name
/// within each folder.
///
/// # Errors
/// If a path cannot be read or is in a folder that the run writes to, if the kind of a file is unclear, or if there are
/// no files at all.
pub(super) fn find(
    paths: &[String],
    config: &DataConfig,
    out_dir: &Path,
) -> Result<Vec<DataFile>, DataError> {
    let (format, outputs) = (config.format, OutputFolders::of(config, out_dir));
    let mut files = Vec::new();
    for path in paths {
        let metadata = fs::metadata(path);
        if metadata.is_err()
            && let Some(pattern) = pattern(path)
        {
            for path in matching(path, &pattern)? {
                outputs.expect_outside(&path)?;
                files.push(formats::named_file(path, format)?);
            }
            continue;
        }
        let path = Path::new(path);
        let metadata = metadata.map_err(|source| unreadable(path, source))?;
        outputs.expect_outside(path)?;
        if metadata.is_dir() {
            let mut found = Vec::new();
            walk(path, &outputs, &mut found)?;
            files.extend(formats::folder_files(path, found, format)?);
        } else {
            files.push(formats::named_file(path.to_owned(), format)?);
        }
    }
    if files.is_empty() {
        return Err(DataError::NoFiles { wanted: expected_files(format), paths: paths.to_vec() });
    }
    Ok(files)
}

/// Parses a path as a glob pattern; `None` if it is not one.
fn pattern(path: &str) -> Option<Pattern> {
    path.contains(['*', '?', '[']).then(|| Pattern::new(path).ok()).flatten()
}

/// Returns the files that match a pattern, in the order of names.
fn matching(path: &str, pattern: &Pattern) -> Result<Vec<PathBuf>, DataError> {
    let found = glob::glob_with(pattern.as_str(), GLOB_OPTIONS);
    let malformed = |fault: glob::PatternError| DataError::Malformed {
        file: path.into(),
        reason: format!("it is not a valid file pattern: {fault}"),
    };
    let mut files = Vec::new();
    for entry in found.map_err(malformed)? {
        let entry = entry.map_err(|fault| {
            let path = fault.path().to_owned();
            unreadable(&path, fault.into())
        })?;
        if !entry.is_dir() {
            files.push(entry);
        }
    }
    if files.is_empty() {
        let paths = vec![path.to_owned()];
        return Err(DataError::NoFiles { wanted: "files that match", paths });
    }
    Ok(files)
}

/// Whether a file with this path is data of a run, or would be if it existed.
pub fn is_data(data: &DataConfig, out_dir: &Path, file: &Path) -> bool {
    let is_output = OutputFolders::of(data, out_dir).folder_of(file).is_some();
    let (unresolved, file) = (file, resolve_links(file));
    let yields_file = |path: &String| {
        let matches = |pattern: Pattern| pattern.matches_path_with(unresolved, GLOB_OPTIONS);
        let folder = resolve_links(Path::new(path));
        let is_inside =
            || folder.is_dir() && file.starts_with(&folder) && formats::has_data_name(&file, data.format);
        file == folder || is_inside() || pattern(path).is_some_and(matches)
    };
    !is_output && data.paths().any(yields_file)
}

/// Returns the paths of a configuration that do not exist on this machine, as written in the run file; URLs are not
/// checked.
pub fn missing(data: &DataConfig) -> Vec<&String> {
    let paths = data.paths().filter(|path| !is_url(path));
    let exists = |path: &str| {
        Path::new(path).exists() || pattern(path).is_some_and(|pattern| matching(path, &pattern).is_ok())
    };
    paths.filter(|path| !exists(path)).collect()
}

/// Collects all files below a folder.
fn walk(folder: &Path, outputs: &OutputFolders, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    if outputs.folder_of(folder).is_some() {
        return Ok(());
    }
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut entries = entries.map_err(|source| unreadable(folder, source))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if is_hidden(&entry.file_name()) {
            continue;
        }
        let kind = entry.file_type().map_err(|source| unreadable(&path, source))?;
        if kind.is_dir() {
            if entry.file_name() != "target" {
                walk(&path, outputs, files)?;
            }
        } else if kind.is_symlink() && outputs.folder_of(&path).is_some() {
            continue;
        } else if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

/// Returns the error for a file or folder of `[data]`.
pub(super) fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Read { key: DATA, file: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
