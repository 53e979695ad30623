//! Hugging Face safetensors as a target: one file, or files of a limited size with an index.
//!
//! The layout is the one of [`export`](mod@crate::export): wide elements first so that all are aligned, `format: pt`,
//! shards cut and named as by Hugging Face. The format contains plain tensors only: [`drop_unsupported`] removes
//! values and the copies of tied weights from a selection before it is planned.

use std::{collections::BTreeMap, path::Path};

use super::{OutputTensor, Selection};
use crate::{
    checkpoint::join,
    error::Error,
    export::{self, ExportPlan},
    safetensors::{Metadata, TensorEntry, TensorSpec},
    transfer::{OutputPlan, PlannedFile, PlannedRun, Tail},
};

/// Parts of a selection that the format cannot represent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsupported {
    /// Names of values that are not tensors.
    pub values: Vec<String>,
    /// Copies of tied weights, each with the name that is kept for it.
    pub tied: Vec<(String, String)>,
}

/// Removes values and the copies of tied weights, and returns what was removed.
pub fn drop_unsupported(selection: &mut Selection) -> Unsupported {
    let values = selection.values.drain(..).map(|value| join(&value.path)).collect();
    Unsupported { values, tied: selection.drop_tied() }
}

/// Plans the files of `destination`, which is used for names and messages only: one file if `shard_bytes_max` is
/// `None`, or a directory of files with at most that many tensor bytes each (a larger tensor gets a file of its own)
/// and, if there are several, an index.
///
/// # Errors
/// [`Error::BadRequest`] for repeated names, a tensor named `__metadata__`, or sizes that the format cannot represent;
/// [`Error::WrongPath`] for a destination without a file name.
///
/// # Panics
/// If the selection contains anything that [`drop_unsupported`] removes.
pub fn plan(
    selection: &Selection,
    destination: &Path,
    shard_bytes_max: Option<u64>,
    metadata: Metadata,
) -> Result<OutputPlan, Error> {
    assert!(
        selection.values.is_empty() && selection.tensors.iter().all(|tensor| tensor.tied_to.is_none()),
        "a selection for safetensors went through `drop_unsupported`"
    );
    let specs: Vec<TensorSpec> = selection.tensors.iter().map(spec).collect();
    let export = match shard_bytes_max {
        None => ExportPlan::new(destination, specs, metadata)?,
        Some(max) => ExportPlan::sharded(destination, specs, metadata, max)?,
    };
    let by_name = selection.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut files: Vec<PlannedFile> = export.files().iter().map(|file| planned(file, &by_name)).collect();
    files.extend(export.index().map(|index| PlannedFile {
        name: file_name(&index.path),
        len: index.text.len() as u64,
        literals: vec![(0, index.text.clone())],
        places: Vec::new(),
    }));
    Ok(OutputPlan { files, tail: Box::new(|_| Ok(Tail::default())) })
}

fn spec(tensor: &OutputTensor) -> TensorSpec {
    let shape = tensor.shape.iter().map(|&size| size as usize).collect();
    TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape }
}

fn planned(file: &export::PlannedFile, by_name: &BTreeMap<&str, &OutputTensor>) -> PlannedFile {
    let header = file.header();
    let place = |entry: &TensorEntry| {
        let tensor = by_name[entry.name()];
        PlannedRun {
            offset: header.data_start() + entry.data_range().start,
            tensor: tensor.source.clone(),
            elements: 0..tensor.len(),
            dtype: tensor.dtype,
            digest: None,
        }
    };
    PlannedFile {
        name: file_name(file.path()),
        len: header.file_len(),
        literals: vec![(0, file.prefix().to_vec())],
        places: header.entries().iter().map(place).collect(),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).expect("planned files have names")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checkpoint::{Key, Object, Role, Value},
        safetensors::{Header, TensorType},
    };

    fn tensor(name: &str, dtype: TensorType, shape: &[u64], tied_to: Option<usize>) -> OutputTensor {
        OutputTensor {
            name: name.to_owned(),
            path: vec![Key::Name(name.to_owned())],
            role: Role::Model,
            source: format!("model.{name}"),
            dtype,
            shape: shape.to_vec(),
            tied_to,
        }
    }

    #[test]
    fn values_and_tied_copies_are_dropped_and_reported() {
        let tensors = vec![
            tensor("lm_head.weight", TensorType::F32, &[2], None),
            tensor("other", TensorType::F32, &[2], None),
            tensor("wte.weight", TensorType::F32, &[2], Some(0)),
        ];
        let path = vec![Key::Name("step".to_owned())];
        let values = vec![Object { path, role: Role::Other, value: Value::Int(3) }];
        let mut selection = Selection { tensors, values };
        let unheld = drop_unsupported(&mut selection);
        assert_eq!(unheld.values, ["step"]);
        assert_eq!(unheld.tied, [("lm_head.weight".to_owned(), "wte.weight".to_owned())]);
        assert_eq!(selection.tensors.len(), 2);
    }

    #[test]
    fn planned_offsets_match_header() {
        let tensors = vec![
            tensor("a", TensorType::Bf16, &[3], None),
            tensor("b", TensorType::F64, &[], None),
            tensor("c", TensorType::U8, &[0, 4], None),
        ];
        let selection = Selection { tensors, values: Vec::new() };
        let plan = plan(&selection, Path::new("out/model.safetensors"), None, Metadata::new()).unwrap();
        let [file] = plan.files.as_slice() else { panic!("one file was planned") };
        let text = &file.literals[0].1[8..];
        let header = Header::parse(text, file.len).unwrap();
        assert_eq!(header.metadata().unwrap()["format"], "pt");
        for place in &file.places {
            let name = place.tensor.strip_prefix("model.").unwrap();
            let entry = header.entry(name).unwrap();
            assert_eq!(place.offset, header.data_start() + entry.data_range().start);
            assert_eq!(place.elements.end * place.dtype.size_bytes() as u64, entry.len_bytes());
        }
    }

    #[test]
    fn small_shard_limit_splits_files_and_adds_index() {
        let tensors =
            vec![tensor("a", TensorType::F32, &[3], None), tensor("b", TensorType::F32, &[3], None)];
        let selection = Selection { tensors, values: Vec::new() };
        let plan = plan(&selection, Path::new("out"), Some(12), Metadata::new()).unwrap();
        let names: Vec<&str> = plan.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json"
            ]
        );
        let index: serde_json::Value = serde_json::from_slice(&plan.files[2].literals[0].1).unwrap();
        assert_eq!(index["weight_map"]["b"], names[1]);
        assert_eq!(index["metadata"]["total_size"], 24);
    }
}
