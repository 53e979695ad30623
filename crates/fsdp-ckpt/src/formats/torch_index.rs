//! Older Hugging Face models in several `torch.save` files, joined by `pytorch_model.bin.index.json`.
//!
//! As for safetensors, the index and the files must name the same tensors, each in one file.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::torch_file;
use crate::{
    checkpoint::Checkpoint,
    error::Error,
    file_io::directory_of,
    model_files::index::{file_path, not_in_file, not_in_index, read},
};

/// Reads a model through its index.
///
/// # Errors
/// [`Error::Malformed`] if the index is invalid or does not match its files, and the errors of [`torch_file::open`].
pub fn open(path: &Path) -> Result<Checkpoint, Error> {
    let weight_map = read(path)?;
    let dir = directory_of(path);
    let mut joined = Checkpoint {
        path: path.to_owned(),
        format: "PyTorch files (torch.save) with an index".to_owned(),
        ..Checkpoint::default()
    };
    let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in &weight_map {
        wanted.entry(file).or_default().insert(tensor);
    }
    for (file, tensors) in wanted {
        let first = tensors.first().copied().unwrap_or_default();
        let full = file_path(path, &dir, first, file, &weight_map)?;
        let part = torch_file::open(&full)?;
        if let Some(tensor) = tensors.iter().find(|tensor| !part.tensors.contains_key(**tensor)) {
            return Err(not_in_file(path, &full, tensor));
        }
        if let Some(tensor) = part.tensors.keys().find(|tensor| !tensors.contains(tensor.as_str())) {
            return Err(not_in_index(path, &full, tensor));
        }
        joined.join(part, &[], None)?;
    }
    joined.assign_roles();
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use serde_json::Value;

    use super::*;
    use crate::formats;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    /// A directory with one file and an index made from the names of its tensors.
    fn directory(index: &dyn Fn(&[String]) -> Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture("model_only.pth"), dir.path().join("pytorch_model-00001-of-00001.bin")).unwrap();
        let names: Vec<String> =
            torch_file::open(fixture("model_only.pth")).unwrap().tensors.into_keys().collect();
        let text = serde_json::json!({ "metadata": {}, "weight_map": index(&names) });
        fs::write(dir.path().join("pytorch_model.bin.index.json"), text.to_string()).unwrap();
        dir
    }

    #[test]
    fn indexed_files_are_joined() {
        let all = |names: &[String]| {
            let file = || Value::from("pytorch_model-00001-of-00001.bin");
            names.iter().map(|name| (name.clone(), file())).collect()
        };
        let dir = directory(&all);
        let joined = formats::open(dir.path()).unwrap();
        joined.check_coverage().unwrap();
        let whole = torch_file::open(fixture("model_only.pth")).unwrap();
        assert_eq!(joined.tensors, whole.tensors);
        assert!(formats::open(dir.path().join("pytorch_model.bin.index.json")).is_ok());
    }

    #[test]
    fn index_that_mismatches_its_files_is_rejected() {
        let file = "pytorch_model-00001-of-00001.bin";
        let fewer =
            |names: &[String]| names.iter().skip(1).map(|name| (name.clone(), Value::from(file))).collect();
        let refused = |index: &dyn Fn(&[String]) -> Value, what: &str| {
            let error = formats::open(directory(index).path()).unwrap_err();
            assert!(matches!(error, Error::Malformed { .. }) && error.to_string().contains(what), "{error}");
        };
        refused(&fewer, "pytorch_model.bin.index.json does not list");
        let more = |names: &[String]| {
            names.iter().cloned().chain(["x".to_owned()]).map(|name| (name, Value::from(file))).collect()
        };
        refused(&more, "it places tensor `x` in ");
        let outside = |_: &[String]| serde_json::json!({ "x": "../x.bin" });
        refused(&outside, "to `../x.bin`, which is not a plain file name");
        let missing = |_: &[String]| serde_json::json!({ "x": "y.bin" });
        refused(&missing, "y.bin: it is missing");
    }
}
