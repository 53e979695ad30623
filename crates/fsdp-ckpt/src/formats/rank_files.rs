//! One file of `torch.save` per rank, with distributed tensors (DTensor) in it.
//!
//! VeRL (`model_world_size_4_rank_0.pt`) and Accelerate (`pytorch_model_fsdp_rank0.bin`) leave these. Every
//! distributed tensor says its shape, the mesh and how the mesh distributes it, so a rank's part has its place from
//! its own file alone, and every place in the mesh must be there. Of replicas, the first one is read. Plain tensors
//! and values are the first rank's; the plain tensors of all ranks must agree in shape and type.
//!
//! Not read: FSDP1's ShardedTensor and its flat parameters, and tensors that are partial sums.

mod merge;
mod spec;

#[cfg(test)]
mod tests;

use std::path::Path;

use super::{
    rank_fault::placement,
    rank_file::RankFile,
    rank_names::{Companion, RankSet, find},
};
use crate::{
    checkpoint::{Checkpoint, Global, Key, Object, Role, flatten, join},
    error::Error,
    formats::local::LocalTensor,
    torch::Item,
};
use merge::{RankTensor, RankTensors};

/// VeRL keeps the optimizer in files of its own.
const COMPANIONS: [Companion; 1] = [Companion { main: "model_world_size_", other: "optim_world_size_" }];

/// Whether a file of `torch.save` holds distributed tensors.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    match root {
        Item::Wrapped { class, .. } => is_dtensor(class),
        Item::Dict(items) => items.iter().any(|(_, item)| is_rank_file(item)),
        Item::List(items) | Item::Tuple(items) => items.iter().any(is_rank_file),
        Item::Object { .. } | Item::Tensor(_) | Item::Value(_) => false,
    }
}

fn is_dtensor(class: &Global) -> bool {
    class.name == "DTensor"
}

/// Reads the checkpoint that a directory holds, or that one of its files belongs to.
///
/// # Errors
/// [`Error::Malformed`] when files of ranks are missing or do not belong together, or a tensor is distributed in a way
/// that is not known; other errors when a file cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let found = find(path, &COMPANIONS)?;
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "PyTorch DTensors, one file per rank".to_owned(),
        world_size: Some(found.main.len()),
        ..Checkpoint::default()
    };
    add_set(&found.main, &[], &mut checkpoint)?;
    checkpoint.assign_roles();
    for set in &found.companions {
        let before: Vec<String> = checkpoint.tensors.keys().cloned().collect();
        add_set(set, &[Key::Name("optim".into())], &mut checkpoint)?;
        let added = checkpoint.tensors.iter_mut().filter(|(name, _)| before.binary_search(name).is_err());
        added.for_each(|(_, tensor)| tensor.role = Role::Optimizer);
    }
    Ok(checkpoint)
}

/// Adds what the files of a set hold, with names below `prefix`.
fn add_set(set: &RankSet, prefix: &[Key], into: &mut Checkpoint) -> Result<(), Error> {
    let files = RankFile::open_all(set, into)?;
    let mut ranks = Vec::with_capacity(files.len());
    for (rank, file) in files.iter().enumerate() {
        ranks.push(rank_tensors(file, rank, prefix, into)?);
    }
    merge::merge(&ranks, into)
}

/// The tensors of a file; the first rank's values go into the checkpoint.
fn rank_tensors(
    file: &RankFile,
    rank: usize,
    prefix: &[Key],
    into: &mut Checkpoint,
) -> Result<RankTensors, Error> {
    let mut found = RankTensors { path: file.path.clone(), rank, tensors: Vec::new() };
    for (path, item) in flatten(&file.root).map_err(|fault| fault.in_file(&file.path))? {
        let path = [prefix, &path[..]].concat();
        let name = join(&path);
        match item {
            Item::Tensor(stored) => {
                let local = LocalTensor::of(stored, file.source);
                found.tensors.push(RankTensor { path, local, part: None });
            }
            Item::Wrapped { class, state } if is_dtensor(class) => {
                let (local, part) = spec::parse(file, &name, state)?;
                found.tensors.push(RankTensor { path, local, part: Some(part) });
            }
            Item::Wrapped { class, .. } => {
                let why =
                    format!("it is a {}.{}; save DTensors or a full state dict", class.module, class.name);
                return Err(placement(&name, why).in_file(&file.path));
            }
            item if rank == 0 => {
                if item.holds_tensor() {
                    into.notes.push(format!("the object `{name}` holds tensors, which are not read"));
                }
                let role = if prefix.is_empty() { Role::Other } else { Role::Optimizer };
                into.values.insert(name, Object { path, role, value: item.to_value() });
            }
            _ => {}
        }
    }
    Ok(found)
}
