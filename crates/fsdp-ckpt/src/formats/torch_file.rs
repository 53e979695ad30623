//! Single files of `torch.save`: `.pth`, `.pt`, `.bin`.
//!
//! Nested state dicts are flattened as distributed checkpoints do it. Tensors keep their strides and shared
//! storages: two tensors that are views of the same bytes have equal chunks. A file that holds one rank's
//! part of distributed tensors is refused, as the other parts are not in it.

use std::path::Path;

use crate::{
    bytes::Section,
    checkpoint::{Checkpoint, Global, Key, Object, Role, Source, Tensor, flatten, join},
    error::{Error, TorchFault},
    file_io::PathFile,
    native::{RUN_STATE, value_to_run_state},
    torch::{self, Item, StoredTensor, TorchFile},
};

/// Reads a file of `torch.save` that holds a dict.
///
/// # Errors
/// When the file cannot be read, is damaged, is no such file or holds something that is not supported.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let (file, len) = PathFile::open(path)?;
    let section = Section::new(&file, 0..len, path, "");
    let torch_file = torch::open(section)?;
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "PyTorch file (torch.save)".to_owned(),
        sources: vec![Source::File { path: path.to_owned(), len }],
        ..Checkpoint::default()
    };
    fill(&mut checkpoint, &torch_file).map_err(|fault| match fault {
        Fault::Torch(fault) => section.fault(fault),
        Fault::Nesting(fault) => Error::Nesting { path: path.to_owned(), fault },
    })?;
    checkpoint.protections = torch_file.protections(0);
    checkpoint.assign_roles();
    Ok(checkpoint)
}

/// What can be wrong with a tree.
enum Fault {
    Torch(TorchFault),
    Nesting(crate::error::NestingFault),
}

fn fill(checkpoint: &mut Checkpoint, file: &TorchFile) -> Result<(), Fault> {
    let run_state = run_state(&file.root);
    let is_of_run = |path: &[Key]| matches!(path.first(), Some(Key::Name(first)) if first == RUN_STATE);
    for (path, item) in flatten(&file.root).map_err(Fault::Nesting)? {
        if run_state.is_some() && is_of_run(&path) {
            continue;
        }
        let name = join(&path);
        match item {
            Item::Tensor(stored) => {
                checkpoint.tensors.insert(name, tensor(path, stored));
            }
            Item::Wrapped { class, .. } => return Err(Fault::Torch(part(name, class))),
            item => {
                if item.holds_tensor() {
                    checkpoint.notes.push(format!("the object `{name}` holds tensors, which are not read"));
                }
                let object = Object { path, role: Role::Other, value: item.to_value() };
                checkpoint.values.insert(name, object);
            }
        }
    }
    checkpoint.values.extend(run_state.map(|object| (RUN_STATE.to_owned(), object)));
    Ok(())
}

/// The state of a run, as it comes from a native checkpoint. It stays one value, as in other formats: flattened,
/// it would lose its empty dicts, and would not be known again.
fn run_state(root: &Item) -> Option<Object> {
    let item = root.get(RUN_STATE).filter(|item| !item.holds_tensor())?;
    let value = item.to_value();
    value_to_run_state(&value)?;
    Some(Object { path: vec![Key::Name(RUN_STATE.to_owned())], role: Role::Other, value })
}

fn tensor(path: Vec<Key>, stored: &StoredTensor) -> Tensor {
    Tensor {
        path,
        role: Role::Model,
        dtype: stored.dtype,
        shape: stored.shape.clone(),
        chunks: vec![stored.chunk(0)],
    }
}

/// Why a distributed tensor cannot be read from one file.
fn part(name: String, class: &Global) -> TorchFault {
    let is_flat = name.split('.').next_back().is_some_and(|last| last.contains("_flat_param"));
    if class.name == "ShardedTensor" && is_flat {
        return TorchFault::FlatParameter { name };
    }
    TorchFault::PartOfTensor { name, class: format!("{}.{}", class.module, class.name) }
}
