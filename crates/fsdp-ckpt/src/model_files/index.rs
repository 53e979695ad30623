//! Opens a sharded model through its index and checks that the index and the files agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::ModelReader;
use crate::{
    error::Error,
    file_io::{Files, is_plain_name},
    safetensors::{HEADER_LEN_MAX, SafetensorsReader},
    unique_map::UniqueMap,
};

/// The contents of an index file. Its `metadata` (the total size) is not needed and often wrong.
#[derive(Deserialize)]
struct IndexFile {
    weight_map: UniqueMap<String>,
}

/// Opens an index and every file it names.
pub(super) fn open(path: PathBuf) -> Result<ModelReader, Error> {
    let weight_map = read(&path)?;
    let dir = path.parent().unwrap_or(Path::new("")).to_owned();
    let mut positions = BTreeMap::new();
    let mut files = Vec::new();
    let mut placed = Vec::with_capacity(weight_map.len());
    for (tensor, file) in &weight_map {
        let position = match positions.get(file.as_str()) {
            Some(&position) => position,
            None => {
                let file_path = file_path(&path, &dir, tensor, file, &weight_map)?;
                files.push(SafetensorsReader::open(file_path)?);
                positions.insert(file.as_str(), files.len() - 1);
                files.len() - 1
            }
        };
        placed.push((tensor.as_str(), position));
    }
    let file_of = join(&files)?;
    for (tensor, position) in placed {
        if file_of.get(tensor) != Some(&position) {
            return Err(not_in_file(&path, files[position].path(), tensor));
        }
    }
    let listed: BTreeSet<&str> = weight_map.iter().map(|(tensor, _)| tensor.as_str()).collect();
    if let Some((tensor, &position)) = file_of.iter().find(|(tensor, _)| !listed.contains(tensor.as_str())) {
        return Err(not_in_index(&path, files[position].path(), tensor));
    }
    Ok(ModelReader { path, files, file_of })
}

/// Reads the pairs (tensor, file) of an index, in file order.
pub(crate) fn read(path: &Path) -> Result<Vec<(String, String)>, Error> {
    let malformed = |detail: String| {
        Error::malformed(path, format!("not a valid model index: {detail}; fetch or export the model again"))
    };
    let text = Files::anywhere().read_small(path, HEADER_LEN_MAX)?;
    let text = text.ok_or_else(|| malformed(format!("it has more than {HEADER_LEN_MAX} bytes")))?;
    let index: IndexFile = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    Ok(index.weight_map.0)
}

/// The error for a tensor that is not in the file in which the index places it.
pub(crate) fn not_in_file(index: &Path, file: &Path, tensor: &str) -> Error {
    let reason = format!(
        "it places tensor `{tensor}` in {}, which does not hold it; index and files are of different exports",
        file.display()
    );
    Error::malformed(index, reason)
}

/// The error for a tensor in a model file that the index does not list.
pub(crate) fn not_in_index(index: &Path, file: &Path, tensor: &str) -> Error {
    let reason = format!(
        "it holds tensor `{tensor}`, which {} does not list; index and files are of different exports",
        index.display()
    );
    Error::malformed(file, reason)
}

/// The error for a tensor that two files of a model hold.
pub(crate) fn in_two_files(tensor: &str, first: &Path, second: &Path) -> Error {
    let reason =
        format!("it holds tensor `{tensor}`, as does {}; remove one and correct the index", first.display());
    Error::malformed(second, reason)
}

/// The path of the file that the index at `path` names for `tensor`. Checks that it is a plain name and that the file
/// exists.
pub(crate) fn file_path(
    path: &Path,
    dir: &Path,
    tensor: &str,
    file: &str,
    weight_map: &[(String, String)],
) -> Result<PathBuf, Error> {
    if !is_plain_name(file) {
        let reason = format!(
            "it maps tensor `{tensor}` to `{file}`, which is not a plain file name; files of a model lie beside their \
             index"
        );
        return Err(Error::malformed(path, reason));
    }
    let full = dir.join(file);
    if !Files::anywhere().exists(&full) {
        let tensor_count = weight_map.iter().filter(|(_, other)| other == file).count();
        let reason = format!(
            "it is missing: {} places {tensor_count} tensors in it (`{tensor}`, ..); fetch it again",
            path.display()
        );
        return Err(Error::malformed(full, reason));
    }
    Ok(full)
}

/// Maps each tensor to the file that holds it.
fn join(files: &[SafetensorsReader]) -> Result<BTreeMap<String, usize>, Error> {
    let mut file_of = BTreeMap::new();
    for (position, file) in files.iter().enumerate() {
        for name in file.names() {
            if let Some(first) = file_of.insert(name.to_owned(), position) {
                return Err(in_two_files(name, files[first].path(), file.path()));
            }
        }
    }
    Ok(file_of)
}
