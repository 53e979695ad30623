//! Which files a list of paths means.
//!
//! A path that is a file is taken as it is. Folders are walked in the order of names; hidden entries,
//! folders named `target` and links to folders are skipped. What a folder contributes depends on the
//! format: any file for text (those that are not UTF-8 are dropped when read), `.jsonl` or `.bin`
//! otherwise.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::DataError;
use crate::config::Format;

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataFile {
    /// Where it is.
    pub(super) path: PathBuf,
    /// Whether the user named it, rather than a folder it is in.
    pub(super) named: bool,
}

/// The files of a list of paths: in the order of the list, each folder's in the order of names.
///
/// # Errors
/// If a path cannot be read or there is no file at all.
pub(super) fn find(paths: &[String], format: Format) -> Result<Vec<DataFile>, DataError> {
    let mut files = Vec::new();
    for path in paths.iter().map(Path::new) {
        let metadata = fs::metadata(path).map_err(|source| unreadable(path, source))?;
        if metadata.is_dir() {
            walk(path, format, &mut files)?;
        } else {
            files.push(DataFile { path: path.to_owned(), named: true });
        }
    }
    if files.is_empty() {
        return Err(DataError::NoFiles { wanted: wanted(format), paths: paths.to_vec() });
    }
    Ok(files)
}

/// What a folder is searched for.
pub(super) fn wanted(format: Format) -> &'static str {
    match format {
        Format::Text => "UTF-8 text files",
        Format::Jsonl => "*.jsonl files",
        Format::TokensU16 | Format::TokensU32 => "*.bin files",
    }
}

fn walk(folder: &Path, format: Format, files: &mut Vec<DataFile>) -> Result<(), DataError> {
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
                walk(&path, format, files)?;
            }
        } else if path.is_file() && is_of(&path, format) {
            files.push(DataFile { path, named: false });
        }
    }
    Ok(())
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

fn is_of(path: &Path, format: Format) -> bool {
    match format {
        Format::Text => true,
        Format::Jsonl => path.extension() == Some(OsStr::new("jsonl")),
        Format::TokensU16 | Format::TokensU32 => path.extension() == Some(OsStr::new("bin")),
    }
}

/// The error for a file or folder of `[data]`.
pub(super) fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Read { key: "[data]", file: path.to_owned(), source }
}
