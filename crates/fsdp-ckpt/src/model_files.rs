//! The weights of a Hugging Face model: one `model.safetensors`, or several files with an index.
//!
//! A [`ModelReader`] joins the files under one set of names and reads rows of any tensor as `f32` or `f64`. Opening
//! reads headers only, but proves completeness: the index and the files name the same tensors, each in one file. What
//! the names mean to a model (orientation, tied weights) is not known here.

pub(crate) mod index;
mod names;
mod rows;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

pub(crate) use names::check_names;

use crate::{
    error::{Error, shell_word},
    file_io::Files,
    safetensors::{SafetensorsReader, TensorEntry},
};

/// The file of an unsharded model.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The index of a sharded model.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Endings of files that look like weights, for the error message if no model is found.
const WEIGHT_ENDINGS: [&str; 5] = [".safetensors", ".bin", ".pth", ".pt", ".distcp"];

/// An open model. Reads are positioned, so one reader can serve any number of threads.
#[derive(Debug)]
pub struct ModelReader {
    path: PathBuf,
    files: Vec<SafetensorsReader>,
    /// The file of each tensor, as an index in `files`.
    file_of: BTreeMap<String, usize>,
}

impl ModelReader {
    /// Opens a model directory, one safetensors file of any name, or an index (`*.json`).
    ///
    /// # Errors
    /// [`Error::WrongPath`] for a directory without a model, or with two; [`Error::Malformed`] for a damaged header or
    /// index, or an index that does not match its files; [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<ModelReader, Error> {
        let path = path.as_ref();
        let file = if Files::anywhere().is_directory(path) { find_in(path)? } else { path.to_owned() };
        if file.extension().is_some_and(|extension| extension == "json") {
            index::open(file)
        } else {
            let reader = SafetensorsReader::open(&file)?;
            let file_of = reader.names().map(|name| (name.to_owned(), 0)).collect();
            Ok(ModelReader { path: file, files: vec![reader], file_of })
        }
    }

    /// The path of the single file or the index that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open files, in the order in which the index first names them.
    pub fn files(&self) -> &[SafetensorsReader] {
        &self.files
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// The shape, dtype and size of a tensor.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the model has no such tensor.
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, Error> {
        self.locate(name)?.entry(name)
    }

    /// The file that holds a tensor.
    fn locate(&self, name: &str) -> Result<&SafetensorsReader, Error> {
        match self.file_of.get(name) {
            Some(&file) => Ok(&self.files[file]),
            None => Err(Error::unknown_tensor(&self.path, name, self.file_of.len())),
        }
    }
}

/// The path of the single file or the index in a directory.
fn find_in(dir: &Path) -> Result<PathBuf, Error> {
    let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
    match (Files::anywhere().exists(&single), Files::anywhere().exists(&index)) {
        (true, true) => Err(two_models(&single, &index)),
        (true, false) => Ok(single),
        (false, true) => Ok(index),
        (false, false) => Err(no_model(dir)?),
    }
}

fn no_model(dir: &Path) -> Result<Error, Error> {
    let mut names = Files::anywhere().list(dir)?;
    names.retain(|name| WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending)));
    let found = if names.is_empty() { String::new() } else { format!(" (it holds {})", names.join(", ")) };
    let way_out = match &names[..] {
        [] => "fetch the weights as well".to_owned(),
        [one] if one.ends_with(".safetensors") => format!("rename {one} to {SINGLE_FILE}"),
        names if names.iter().any(|name| name.ends_with(".safetensors")) => {
            format!("several files of weights need {INDEX_FILE}: fetch it as well")
        }
        _ => format!("`{}` converts it to a model that can be named here", conversion_command(dir)),
    };
    let reason = format!("it holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}; {way_out}");
    Ok(Error::wrong_path(dir, reason))
}

/// The command that converts a directory to safetensors, in a new directory beside it.
fn conversion_command(dir: &Path) -> String {
    let (source, config) = (dir.to_string_lossy(), dir.join("config.json"));
    let source = source.trim_end_matches('/');
    let target = format!("{source}-safetensors");
    let mut words = vec!["fsdp", "ckpt", "convert", source, &target, "--to", "safetensors"];
    let config_text = config.to_string_lossy();
    if Files::anywhere().exists(&config) {
        words.extend(["--config", &*config_text]);
    }
    words.into_iter().map(shell_word).collect::<Vec<_>>().join(" ")
}

/// The error for a directory that holds, or would hold after an export, both a single model file and a sharded model.
pub(crate) fn two_models(wanted: &Path, other: &Path) -> Error {
    let reason = format!(
        "it would be ambiguous beside {}: one is a single file, the other a sharded model; remove the \
         unwanted one, or name a file or another directory",
        other.display()
    );
    Error::wrong_path(wanted, reason)
}
