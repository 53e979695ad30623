//! Hugging Face safetensors as a target: one file, or files of a limited size with an index.
//!
//! The layout is that of [`export`](mod@crate::export): wide elements first so that all are aligned, `format: pt`,
//! shards cut and named as Hugging Face does. The format holds plain tensors only: [`drop_unheld`] takes values
//! and the copies of tied weights out of a selection before it is planned.

use std::{collections::BTreeMap, path::Path};

use super::{OutputTensor, Selection};
use crate::{
    checkpoint::join,
    error::Error,
    export::{self, ExportPlan},
    safetensors::{Metadata, TensorEntry, TensorSpec},
    transfer::{Finish, OutputPlan, Place, PlannedFile},
};

/// What the format cannot hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unheld {
    /// Values that are not tensors, by name.
    pub values: Vec<String>,
    /// Copies of tied weights, each with the tensor that stays.
    pub tied: Vec<(String, String)>,
}

/// Removes values, and of tensors that share their bytes all but one, and says which these are.
///
/// The one that stays is the first by its place in the selection that is not the output weights: readers make
/// those out of the input weights, but not the other way round.
pub fn drop_unheld(selection: &mut Selection) -> Unheld {
    let values = selection.values.drain(..).map(|value| join(&value.path)).collect();
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, tensor) in selection.tensors.iter().enumerate() {
        groups.entry(tensor.tied_to.unwrap_or(index)).or_default().push(index);
    }
    let tensors = &mut selection.tensors;
    let mut tied = Vec::new();
    for members in groups.values().filter(|members| members.len() > 1) {
        let kept =
            members.iter().copied().find(|&index| !is_head(&tensors[index].name)).unwrap_or(members[0]);
        let copies = members.iter().filter(|&&index| index != kept);
        tied.extend(copies.map(|&index| (tensors[index].name.clone(), tensors[kept].name.clone())));
        members.iter().for_each(|&index| tensors[index].tied_to = (index != kept).then_some(kept));
    }
    tensors.retain(|tensor| tensor.tied_to.is_none());
    Unheld { values, tied }
}

/// Whether a name is the one of output weights.
fn is_head(name: &str) -> bool {
    ["lm_head.weight", "output.weight", "embed_out.weight"].iter().any(|head| name.ends_with(head))
}

/// Plans the files of `destination`, which names them in messages only: one file, or a directory of files with at most
/// `shard_bytes_max` tensor bytes each (a larger tensor gets a file of its own) and, if there are several, an index.
///
/// # Errors
/// [`Error::BadRequest`] for repeated names, a tensor named `__metadata__`, or sizes beyond what the format holds;
/// [`Error::WrongPath`] for a destination without a file name.
///
/// # Panics
/// When the selection holds what [`drop_unheld`] removes.
pub fn plan(
    selection: &Selection,
    destination: &Path,
    shard_bytes_max: Option<u64>,
) -> Result<OutputPlan, Error> {
    assert!(
        selection.values.is_empty() && selection.tensors.iter().all(|tensor| tensor.tied_to.is_none()),
        "a selection for safetensors went through `drop_unheld`"
    );
    let specs: Vec<TensorSpec> = selection.tensors.iter().map(spec).collect();
    let metadata = Metadata::new();
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
    Ok(OutputPlan { files, finish: Box::new(|_| Ok(Finish::default())) })
}

fn spec(tensor: &OutputTensor) -> TensorSpec {
    let shape = tensor.shape.iter().map(|&size| size as usize).collect();
    TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape }
}

fn planned(file: &export::PlannedFile, by_name: &BTreeMap<&str, &OutputTensor>) -> PlannedFile {
    let header = file.header();
    let place = |entry: &TensorEntry| {
        let tensor = by_name[entry.name()];
        Place {
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
    fn values_and_copies_of_tied_weights_are_taken_out_and_named() {
        let tensors = vec![
            tensor("lm_head.weight", TensorType::F32, &[2], None),
            tensor("other", TensorType::F32, &[2], None),
            tensor("wte.weight", TensorType::F32, &[2], Some(0)),
        ];
        let path = vec![Key::Name("step".to_owned())];
        let values = vec![Object { path, role: Role::Other, value: Value::Int(3) }];
        let mut selection = Selection { tensors, values };
        let unheld = drop_unheld(&mut selection);
        assert_eq!(unheld.values, ["step"]);
        assert_eq!(unheld.tied, [("lm_head.weight".to_owned(), "wte.weight".to_owned())]);
        assert_eq!(selection.tensors.len(), 2);
    }

    #[test]
    fn places_lie_where_the_header_says() {
        let tensors = vec![
            tensor("a", TensorType::Bf16, &[3], None),
            tensor("b", TensorType::F64, &[], None),
            tensor("c", TensorType::U8, &[0, 4], None),
        ];
        let selection = Selection { tensors, values: Vec::new() };
        let plan = plan(&selection, Path::new("out/model.safetensors"), None).unwrap();
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
    fn a_small_limit_cuts_shards_with_an_index() {
        let tensors =
            vec![tensor("a", TensorType::F32, &[3], None), tensor("b", TensorType::F32, &[3], None)];
        let selection = Selection { tensors, values: Vec::new() };
        let plan = plan(&selection, Path::new("out"), Some(12)).unwrap();
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
