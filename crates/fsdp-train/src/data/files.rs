//! Which files a list of paths means, and what each holds.
//!
//! A path that is a file is taken as it is; one that is none, but has `*`, `?` or `[` in it, is a pattern of files. Folders
//! are walked in the order of names; hidden entries, folders named `target` and links to folders are skipped. What a folder
//! contributes depends on the format: see [`formats`]. What lies in a folder that the run writes to, its output folder or
//! its cache, is never data: a run would else change the data that it is to go on with.

mod formats;
mod saved;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use fsdp_ckpt::is_url;
use glob::{MatchOptions, Pattern};

use super::error::DataError;
use crate::config::DataConfig;
use crate::true_path::true_path;
pub(super) use formats::{Compression, Kind, wanted};

/// Names the paths that were given, before it is said which key gave them.
const DATA: &str = "[data]";

/// As a shell does: `*` stands for no `/` and no leading dot.
const LIKE_A_SHELL: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataFile {
    /// Where it is.
    pub(super) path: PathBuf,
    /// Whether the user named it, rather than a folder it is in.
    pub(super) named: bool,
    /// What it holds.
    pub(super) kind: Kind,
    /// How it is compressed.
    pub(super) compression: Option<Compression>,
}

/// The folders that a run writes to.
struct Written {
    /// The key, the path, and the true path of each.
    folders: Vec<(&'static str, PathBuf, PathBuf)>,
}

impl Written {
    fn by(config: &DataConfig, out_dir: &Path) -> Written {
        let cache = config.cache.iter().map(|cache| ("data.cache", PathBuf::from(cache)));
        let named = [("run.out_dir", out_dir.to_owned())].into_iter().chain(cache);
        Written { folders: named.map(|(key, path)| (key, path.clone(), true_path(&path))).collect() }
    }

    /// The key and the path of the folder that a path lies in.
    fn folder_of(&self, path: &Path) -> Option<(&'static str, &Path)> {
        let path = true_path(path);
        let (key, folder, _) = self.folders.iter().find(|(_, _, folder)| path.starts_with(folder))?;
        Some((key, folder))
    }

    fn refuse(&self, path: &Path) -> Result<(), DataError> {
        self.folder_of(path).map_or(Ok(()), |(written, folder)| {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            Err(DataError::InOutput { key: DATA, path, written, folder })
        })
    }
}

/// The files of a list of paths, without those that the run writes: in the order of the list, each folder's in the order
/// of names.
///
/// # Errors
/// If a path cannot be read or lies where the run writes, it is not clear what a file holds, or there is no file at all.
pub(super) fn find(
    paths: &[String],
    config: &DataConfig,
    out_dir: &Path,
) -> Result<Vec<DataFile>, DataError> {
    let (format, written) = (config.format, Written::by(config, out_dir));
    let mut files = Vec::new();
    for path in paths {
        let there = fs::metadata(path);
        if there.is_err()
            && let Some(pattern) = pattern(path)
        {
            for path in matching(path, &pattern)? {
                written.refuse(&path)?;
                files.push(formats::of_named(path, format)?);
            }
            continue;
        }
        let path = Path::new(path);
        let metadata = there.map_err(|source| unreadable(path, source))?;
        written.refuse(path)?;
        if metadata.is_dir() {
            let mut found = Vec::new();
            walk(path, &written, &mut found)?;
            files.extend(formats::of_folder(path, found, format)?);
        } else {
            files.push(formats::of_named(path.to_owned(), format)?);
        }
    }
    if files.is_empty() {
        return Err(DataError::NoFiles { wanted: wanted(format), paths: paths.to_vec() });
    }
    Ok(files)
}

/// The pattern that a path is, if it is one.
fn pattern(path: &str) -> Option<Pattern> {
    path.contains(['*', '?', '[']).then(|| Pattern::new(path).ok()).flatten()
}

/// The files that match a pattern, in the order of names.
fn matching(path: &str, pattern: &Pattern) -> Result<Vec<PathBuf>, DataError> {
    let found = glob::glob_with(pattern.as_str(), LIKE_A_SHELL);
    let malformed = |fault: glob::PatternError| DataError::Malformed {
        file: path.into(),
        reason: format!("it is no pattern of files: {fault}"),
    };
    let mut files = Vec::new();
    for entry in found.map_err(malformed)? {
        let entry = entry.map_err(|fault| {
            let place = fault.path().to_owned();
            unreadable(&place, fault.into())
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

/// Whether a file of this path is data of a run, or will be once it is there.
pub fn is_data(data: &DataConfig, out_dir: &Path, file: &Path) -> bool {
    let is_written = Written::by(data, out_dir).folder_of(file).is_some();
    let (named, file) = (file, true_path(file));
    let leads_there = |path: &String| {
        let matches = |pattern: Pattern| pattern.matches_path_with(named, LIKE_A_SHELL);
        let folder = true_path(Path::new(path));
        let is_inside = || folder.is_dir() && file.starts_with(&folder) && formats::is_of(&file, data.format);
        file == folder || is_inside() || pattern(path).is_some_and(matches)
    };
    !is_written && data.paths().any(leads_there)
}

/// The paths of a configuration that lead nowhere on this machine now, as the run file has them; URLs are not looked at.
pub fn missing(data: &DataConfig) -> Vec<&String> {
    let paths = data.paths().filter(|path| !is_url(path));
    let is_there = |path: &str| {
        Path::new(path).exists() || pattern(path).is_some_and(|pattern| matching(path, &pattern).is_ok())
    };
    paths.filter(|path| !is_there(path)).collect()
}

/// All files below a folder.
fn walk(folder: &Path, written: &Written, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    if written.folder_of(folder).is_some() {
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
                walk(&path, written, files)?;
            }
        } else if kind.is_symlink() && written.folder_of(&path).is_some() {
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

/// The error for a file or folder of `[data]`.
pub(super) fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Read { key: DATA, file: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
