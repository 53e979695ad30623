//! Files of `torch.save`: the nested state dict, with a separate storage for each tensor's elements.
//!
//! `torch.load(weights_only=True)` reads them. Tensors that are tied in the selection share a storage, and still do
//! after loading. Dict keys are text, because paths do not record that a key was an integer. A list item of which
//! flattening left nothing becomes `None`, as in PyTorch's own loader.

use std::path::Path;

use super::{Selection, torch_archive};
use crate::{
    checkpoint::{Tree, Value, nest},
    digest::DigestKind,
    error::{Error, Fault},
    pickle::writer::PickleWriter,
    safetensors::TensorType,
    transfer::{OutputPlan, PlannedFile, PlannedRun, Tail},
    zip::writer::Archive,
};

/// A part of the state dict that is not nested further.
enum Leaf<'a> {
    Tensor { dtype: TensorType, shape: &'a [u64], storage: usize },
    Value(&'a Value),
}

/// Plans one file of this name.
///
/// # Errors
/// If two names need the same place in the state dict, or too many items of lists are missing.
pub fn plan(file_name: &str, selection: &Selection) -> Result<OutputPlan, Error> {
    let storages = storages(selection);
    let tree = tree(selection, &storages)
        .map_err(|fault| Error::bad_request(file_name, format!("it cannot be written: {fault}")))?;
    let mut pickle = PickleWriter::new();
    write_tree(&mut pickle, &tree);

    let root = root_folder(file_name);
    let mut archive = torch_archive::begin(&root, &pickle.finish());
    let mut places = Vec::new();
    for (index, tensor) in selection.tensors.iter().enumerate() {
        if tensor.tied_to.is_none() {
            let offset = torch_archive::storage(&root, &mut archive, storages[index], tensor.len_bytes());
            if !tensor.is_empty() {
                places.push(PlannedRun {
                    offset,
                    tensor: tensor.source.clone(),
                    elements: 0..tensor.len(),
                    dtype: tensor.dtype,
                    digest: Some(DigestKind::Crc32),
                });
            }
        }
    }
    torch_archive::end(&root, &mut archive);
    Ok(one_file(file_name, archive, places))
}

fn one_file(name: &str, mut archive: Archive, places: Vec<PlannedRun>) -> OutputPlan {
    let (len, literals) = (archive.len(), archive.take_literals());
    OutputPlan {
        files: vec![PlannedFile { name: name.to_owned(), len, literals, places }],
        tail: Box::new(move |digests| {
            let digests =
                digests[0].iter().map(|digest| digest.expect("a CRC-32 of each place was asked for"));
            let patches = archive.finish(digests);
            let patches = patches.into_iter().map(|(offset, bytes)| (0, offset, bytes)).collect();
            Ok(Tail { patches, files: Vec::new() })
        }),
    }
}

/// Assigns the key of each tensor's storage.
fn storages(selection: &Selection) -> Vec<usize> {
    let mut keys = Vec::with_capacity(selection.tensors.len());
    let mut next = 0;
    for tensor in &selection.tensors {
        keys.push(match tensor.tied_to {
            Some(first) => keys[first],
            None => {
                next += 1;
                next - 1
            }
        });
    }
    keys
}

fn tree<'a>(selection: &'a Selection, storages: &[usize]) -> Result<Tree<Leaf<'a>>, Fault> {
    let tensors = selection.tensors.iter().zip(storages).map(|(tensor, &storage)| {
        (tensor.path.clone(), Leaf::Tensor { dtype: tensor.dtype, shape: &tensor.shape, storage })
    });
    let values = selection.values.iter().map(|object| (object.path.clone(), Leaf::Value(&object.value)));
    nest(tensors.chain(values))
}

fn write_tree(w: &mut PickleWriter, tree: &Tree<Leaf<'_>>) {
    match tree {
        Tree::Leaf(Leaf::Value(value)) => w.value(value),
        Tree::Leaf(Leaf::Tensor { dtype, shape, storage }) => {
            torch_archive::tensor(w, *storage, *dtype, shape)
        }
        Tree::Dict(items) => w.dict(|w| {
            for (name, item) in items {
                w.text(name);
                write_tree(w, item);
            }
        }),
        Tree::List(items) => w.list(|w| {
            for item in items {
                match item {
                    Some(item) => write_tree(w, item),
                    None => w.none(),
                }
            }
        }),
    }
}

/// Returns the root folder of all records: torch names it after the file, without the last extension.
fn root_folder(file_name: &str) -> String {
    let stem = Path::new(file_name).file_stem().and_then(|stem| stem.to_str());
    stem.filter(|stem| stem.is_ascii()).unwrap_or("archive").to_owned()
}
