//! Folders written by `save_to_disk` of Hugging Face's `datasets`: determines which of their files are data.
//!
//! A data set is a folder with Arrow files and a `state.json` that lists them in order; a dictionary of splits is a
//! folder of such folders with a `dataset_dict.json`.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::formats::malformed;
use super::unreadable;
use crate::error::DataError;

/// The part of a `state.json` that determines the rows.
#[derive(Deserialize)]
struct State {
    #[serde(rename = "_data_files")]
    data_files: Vec<DataFile>,
    /// Versions before 2.0 select rows by a table of indices.
    #[serde(rename = "_indices_data_files", default)]
    indices: Option<Vec<serde_json::Value>>,
}

#[derive(Deserialize)]
struct DataFile {
    filename: String,
}

/// The contents of a `dataset_dict.json`.
#[derive(Deserialize)]
struct Splits {
    splits: Vec<String>,
}

/// A saved data set: its folder and files.
pub(super) struct Saved {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

impl Saved {
    /// Finds the saved data sets among the files of a folder.
    ///
    /// # Errors
    /// [`DataError`] if a `state.json` next to Arrow files cannot be read, or names files that do not exist.
    pub(super) fn among(found: &[PathBuf]) -> Result<Vec<Saved>, DataError> {
        let is_state = |path: &&PathBuf| path.file_name().is_some_and(|name| name == "state.json");
        let is_beside = |state: &Path, path: &PathBuf| {
            path.parent() == state.parent() && path.extension().is_some_and(|extension| extension == "arrow")
        };
        let states = found.iter().filter(is_state);
        states
            .filter(|state| found.iter().any(|path| is_beside(state, path)))
            .map(|state| Saved::of(state))
            .collect()
    }

    fn of(path: &Path) -> Result<Saved, DataError> {
        let state: State = read(path)?;
        if state.indices.is_some_and(|indices| !indices.is_empty()) {
            let reason = "it selects rows by a table of indices; save it again: \
                          `datasets.load_from_disk(FOLDER).flatten_indices().save_to_disk(OTHER)`";
            return Err(malformed(path, reason));
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let files: Vec<PathBuf> = state.data_files.iter().map(|file| folder.join(&file.filename)).collect();
        match files.iter().find(|file| !file.is_file()) {
            Some(missing) => {
                Err(malformed(path, &format!("it names {}, which does not exist", missing.display())))
            }
            None => Ok(Saved { folder, files }),
        }
    }

    /// Whether a file is in the folder of the data set without being one of its files.
    pub(super) fn excludes(&self, path: &Path) -> bool {
        path.parent() == Some(&*self.folder) && !self.files.iter().any(|file| file == path)
    }
}

/// Rejects folders with several splits, so that a run does not train on evaluation data that is in the same folder.
///
/// # Errors
/// [`DataError::Malformed`] if there are several splits.
pub(super) fn expect_one_split(folder: &Path, found: &[PathBuf]) -> Result<(), DataError> {
    for path in found.iter().filter(|path| path.file_name().is_some_and(|name| name == "dataset_dict.json")) {
        let Splits { splits } = read(path)?;
        if let [first, _, ..] = &splits[..] {
            let example = path.parent().unwrap_or(folder).join(first);
            let reason = format!(
                "it holds the splits {}; name the folder of one, such as {}",
                splits.join(", "),
                example.display()
            );
            return Err(malformed(folder, &reason));
        }
    }
    Ok(())
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, DataError> {
    let text = fs::read(path).map_err(|source| unreadable(path, source))?;
    serde_json::from_slice(&text).map_err(|fault| {
        malformed(path, &format!("`save_to_disk` of datasets does not write such a file: {fault}"))
    })
}
