//! Opening a sharded model by its index, and holding the two against each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;

use super::ModelReader;
use crate::{
    error::Error,
    file_io::Files,
    safetensors::{HEADER_LEN_MAX, SafetensorsReader},
    unique_map::UniqueMap,
};

/// What an index file says; its `metadata` (the total size) is not needed and often wrong.
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
                files.push(open_file(&path, &dir, tensor, file, &weight_map)?);
                positions.insert(file.as_str(), files.len() - 1);
                files.len() - 1
            }
        };
        placed.push((tensor.as_str(), position));
    }
    let file_of = join(&files)?;
    for (tensor, position) in placed {
        if file_of.get(tensor) != Some(&position) {
            let file = files[position].path().to_owned();
            return Err(Error::NotInFile { path, file, tensor: tensor.to_owned() });
        }
    }
    let listed: BTreeSet<&str> = weight_map.iter().map(|(tensor, _)| tensor.as_str()).collect();
    if let Some((tensor, &position)) = file_of.iter().find(|(tensor, _)| !listed.contains(tensor.as_str())) {
        let (file, tensor) = (files[position].path().to_owned(), tensor.clone());
        return Err(Error::NotInIndex { path, file, tensor });
    }
    Ok(ModelReader { path, files, file_of })
}

/// The pairs (tensor, file) of an index, in its order.
pub(crate) fn read(path: &Path) -> Result<Vec<(String, String)>, Error> {
    let malformed = |detail| Error::MalformedIndex { path: path.to_owned(), detail };
    let text = Files::anywhere().read_small(path, HEADER_LEN_MAX)?;
    let text = text.ok_or_else(|| malformed(format!("it has more than {HEADER_LEN_MAX} bytes")))?;
    let index: IndexFile = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    Ok(index.weight_map.0)
}

fn open_file(
    path: &Path,
    dir: &Path,
    tensor: &str,
    file: &str,
    weight_map: &[(String, String)],
) -> Result<SafetensorsReader, Error> {
    SafetensorsReader::open(file_path(path, dir, tensor, file, weight_map)?)
}

/// The path of a file that the index at `path` names for `tensor`: a plain name of a file that is there.
pub(crate) fn file_path(
    path: &Path,
    dir: &Path,
    tensor: &str,
    file: &str,
    weight_map: &[(String, String)],
) -> Result<PathBuf, Error> {
    let mut components = Path::new(file).components();
    let is_plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    // `a/` and `a/.` have one component too, so the text itself must be that component.
    if !is_plain || file.contains(['/', '\\']) {
        let (path, tensor, file) = (path.to_owned(), tensor.to_owned(), file.to_owned());
        return Err(Error::IndexEscapesDirectory { path, tensor, file });
    }
    let full = dir.join(file);
    if !Files::anywhere().exists(&full) {
        return Err(Error::MissingFile {
            path: path.to_owned(),
            file: full,
            tensor: tensor.to_owned(),
            tensor_count: weight_map.iter().filter(|(_, other)| other == file).count(),
        });
    }
    Ok(full)
}

/// The file of each tensor that any of the files holds.
fn join(files: &[SafetensorsReader]) -> Result<BTreeMap<String, usize>, Error> {
    let mut file_of = BTreeMap::new();
    for (position, file) in files.iter().enumerate() {
        for name in file.names() {
            if let Some(first) = file_of.insert(name.to_owned(), position) {
                return Err(Error::InTwoFiles {
                    tensor: name.to_owned(),
                    first: files[first].path().to_owned(),
                    second: file.path().to_owned(),
                });
            }
        }
    }
    Ok(file_of)
}
