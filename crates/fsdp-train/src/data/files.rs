//! Which files a list of paths means.
//!
//! A path that is a file is taken as it is. Folders are walked in the order of names; hidden entries,
//! folders named `target` and links to folders are skipped. What a folder contributes depends on the
//! format: any file for text (those that are not UTF-8 are dropped when read), `.jsonl` or `.bin`
//! otherwise. What lies in a folder that the run writes to, its output folder or its cache, is never data: a run
//! would else change the data that it is to go on with.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::DataError;
use crate::config::{DataConfig, Format};
use crate::true_path::true_path;

/// Names the paths that were given, before it is said which key gave them.
const DATA: &str = "[data]";

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataFile {
    /// Where it is.
    pub(super) path: PathBuf,
    /// Whether the user named it, rather than a folder it is in.
    pub(super) named: bool,
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
}

/// The files of a list of paths, without those that the run writes: in the order of the list, each folder's in the order
/// of names.
///
/// # Errors
/// If a path cannot be read or lies where the run writes, or there is no file at all.
pub(super) fn find(
    paths: &[String],
    config: &DataConfig,
    out_dir: &Path,
) -> Result<Vec<DataFile>, DataError> {
    let (format, written) = (config.format, Written::by(config, out_dir));
    let mut files = Vec::new();
    for path in paths.iter().map(Path::new) {
        let metadata = fs::metadata(path).map_err(|source| unreadable(path, source))?;
        if let Some((written, folder)) = written.folder_of(path) {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            return Err(DataError::InOutput { key: DATA, path, written, folder });
        }
        if metadata.is_dir() {
            walk(path, format, &written, &mut files)?;
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

/// Whether a file of this path is data of a run, or will be once it is there.
pub fn is_data(data: &DataConfig, out_dir: &Path, file: &Path) -> bool {
    let is_written = Written::by(data, out_dir).folder_of(file).is_some();
    let file = true_path(file);
    let leads_there = |path: &String| {
        let path = true_path(Path::new(path));
        file == path || (path.is_dir() && file.starts_with(&path) && is_of(&file, data.format))
    };
    !is_written && data.train.iter().chain(data.eval.iter().flat_map(|set| &set.paths)).any(leads_there)
}

fn walk(
    folder: &Path,
    format: Format,
    written: &Written,
    files: &mut Vec<DataFile>,
) -> Result<(), DataError> {
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
                walk(&path, format, written, files)?;
            }
        } else if kind.is_symlink() && written.folder_of(&path).is_some() {
            continue;
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
    DataError::Read { key: DATA, file: path.to_owned(), source }
}
