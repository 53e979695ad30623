//! One `torch.save` file per rank, with distributed tensors (DTensor) or FSDP1's sharded tensors in it.
//!
//! VeRL (`model_world_size_4_rank_0.pt`) and Accelerate (`pytorch_model_fsdp_rank0.bin`) save these files. Every
//! DTensor records its global shape, its mesh and its placements, so a rank's own file is enough to locate its part.
//! Every coordinate of the mesh must be present. Of replicas, the first one is read. Plain tensors and values come from
//! rank 0; the plain tensors of all ranks must agree in shape and dtype.
//!
//! FSDP1's flat parameters (its local state dict) and partial sums are not read.

mod sharded;
mod spec;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{
    merge::{Part, Place, RankParts, merge},
    rank_fault::{disagrees, placement, several_files},
    rank_file::RankFile,
    rank_names::{Companion, DOUBTFUL, FoundSets, RankSet, doubt, find, sets_of},
    torch_file::{is_flat, part},
    tree::add_value,
};
use crate::{
    checkpoint::{Checkpoint, Global, Key, Role, flatten, join},
    error::Error,
    file_io::{Files, directory_of},
    formats::local::LocalTensor,
    torch::Item,
};

/// VeRL keeps the optimizer and the extra state of each rank in separate files.
const COMPANIONS: [Companion; 2] = [
    Companion { main: "model_world_size_", other: OPTIMIZER },
    Companion { main: "model_world_size_", other: "extra_state_world_size_" },
];

const OPTIMIZER: &str = "optim_world_size_";

/// Whether a `torch.save` file holds distributed or sharded tensors.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    match root {
        Item::Wrapped { class, .. } => is_dtensor(class) || is_sharded(class),
        Item::Dict(items) => items.iter().any(|(_, item)| is_rank_file(item)),
        Item::List(items) | Item::Tuple(items) => items.iter().any(is_rank_file),
        Item::Opaque { parts, .. } => parts.iter().any(|(_, item)| is_rank_file(item)),
        Item::Object { .. } | Item::Tensor(_) | Item::Value(_) => false,
    }
}

fn is_dtensor(class: &Global) -> bool {
    class.name == "DTensor"
}

fn is_sharded(class: &Global) -> bool {
    class.name == "ShardedTensor"
}

/// Reads the checkpoint in a directory, or the one that a file belongs to.
///
/// # Errors
/// [`Error::Malformed`] if rank files are missing or do not belong together, or a tensor is distributed in an unknown
/// way; other errors if a file cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let found = match whole_files(path)?.as_slice() {
        [] => find(path, &COMPANIONS)?,
        [only] => FoundSets { main: vec![only.clone()], companions: Vec::new() },
        several => return Err(several_files(path, &file_names(several))),
    };
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: String::new(),
        world_size: Some(found.main.len()),
        ..Checkpoint::default()
    };
    checkpoint.format = add_set(&found.main, &[], usize::MAX, &mut checkpoint)?;
    checkpoint.assign_roles();
    for (companion, set) in &found.companions {
        let is_optimizer = companion.other == OPTIMIZER;
        // Extra state, such as RNG state, cannot be merged; rank 0's is read.
        let (prefix, role, ranks) = match is_optimizer {
            true => ("optim", Role::Optimizer, usize::MAX),
            false => ("extra_state", Role::Other, 1),
        };
        let before: Vec<String> = checkpoint.tensors.keys().cloned().collect();
        add_set(set, &[Key::Name(prefix.into())], ranks, &mut checkpoint)?;
        let added = checkpoint.tensors.iter_mut().filter(|(name, _)| before.binary_search(name).is_err());
        added.for_each(|(_, tensor)| tensor.role = role);
        if !is_optimizer && set.len() > 1 {
            checkpoint.notes.push("only the first rank's extra state is read".to_owned());
        }
    }
    Ok(checkpoint)
}

/// Finds files that are whole although their names contain a number: it may not be a rank (`step_100.pt`), and all
/// their tensors are distributed over one rank. Empty if the path is another file.
fn whole_files(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let files = Files::anywhere();
    let is_directory = files.is_directory(path);
    let dir = if is_directory { path.to_owned() } else { directory_of(path) };
    let doubtful = sets_of(&files.list(&dir)?).into_iter().filter(|(pattern, _)| doubt(pattern) == DOUBTFUL);
    let named = doubtful.flat_map(|(_, set)| set).map(|(_, name)| dir.join(name));
    let mut whole = Vec::new();
    for file in named.filter(|file| is_directory || file == path) {
        // A file that cannot be read is reported when the checkpoint is opened.
        if is_of_one_rank(&file).unwrap_or(false) {
            whole.push(file);
        }
    }
    Ok(whole)
}

/// Whether a file has distributed tensors and all of their meshes have one rank.
fn is_of_one_rank(path: &Path) -> Result<bool, Error> {
    let file = RankFile::open(path, &mut Checkpoint::default())?;
    let mut ranks = Vec::new();
    for (name, item) in flatten(&file.root).map_err(|fault| fault.in_file(&file.path))? {
        if let Item::Wrapped { class, state } = item
            && is_dtensor(class)
            && let Place::At(whole, _) = spec::parse(&file, &join(&name), state)?.1
        {
            ranks.push(whole.ranks());
        }
    }
    Ok(!ranks.is_empty() && ranks.iter().all(|&ranks| ranks == 1))
}

/// File names, for messages.
fn file_names(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect()
}

/// Adds the contents of at most `ranks_max` files of a set, with names below `prefix`. Returns a description of the
/// format.
fn add_set(set: &RankSet, prefix: &[Key], ranks_max: usize, into: &mut Checkpoint) -> Result<String, Error> {
    let files = RankFile::open_all(set, into)?;
    let world = files.len().min(ranks_max);
    let (mut ranks, mut sharded) = (Vec::new(), BTreeMap::new());
    for (rank, file) in files[..world].iter().enumerate() {
        ranks.push(rank_parts(file, (rank, world), prefix, &mut sharded, into)?);
    }
    merge(&ranks, into)?;
    if let Some((name, path)) = sharded.iter().find(|(name, _)| !into.tensors.contains_key(*name)) {
        return Err(placement(name, "no file holds a piece of it").in_file(path));
    }
    let kind = if sharded.is_empty() { "DTensors" } else { "ShardedTensors (FSDP1)" };
    Ok(format!("PyTorch {kind}, one file per rank"))
}

/// Reads the tensors of a file. The values of rank 0 are added to the checkpoint, and the names of sharded tensors, which
/// may have no piece in this file, to `sharded`.
fn rank_parts(
    file: &RankFile,
    (rank, world): (usize, usize),
    prefix: &[Key],
    sharded: &mut BTreeMap<String, PathBuf>,
    into: &mut Checkpoint,
) -> Result<RankParts, Error> {
    let mut parts = Vec::new();
    for (path, item) in flatten(&file.root).map_err(|fault| fault.in_file(&file.path))? {
        let path = [prefix, &path[..]].concat();
        let name = join(&path);
        match item {
            Item::Tensor(stored) => {
                let local = LocalTensor::of(stored, file.source);
                parts.push(Part::copy(path, Role::Other, local, rank, world));
            }
            Item::Wrapped { class, state } if is_dtensor(class) => {
                let (local, place, saved) = spec::parse(file, &name, state)?;
                if let Some(saved) = saved.filter(|saved| *saved != rank as u64) {
                    return Err(disagrees("rank", rank, saved, " by its name").in_file(&file.path));
                }
                parts.push(Part { path, role: Role::Other, local, place, windows: None });
            }
            Item::Wrapped { class, state } if is_sharded(class) && !is_flat(&name) => {
                parts.extend(sharded::parse(file, rank, &path, state)?);
                sharded.entry(name).or_insert_with(|| file.path.clone());
            }
            Item::Wrapped { class, .. } if is_flat(&name) => {
                return Err(part(&name, class).in_file(&file.path));
            }
            Item::Wrapped { class, .. } => {
                let why =
                    format!("it is a {}.{}; save DTensors or a full state dict", class.module, class.name);
                return Err(placement(&name, why).in_file(&file.path));
            }
            item if rank == 0 => {
                let role = if prefix.is_empty() { Role::Other } else { Role::Optimizer };
                add_value(item, path, role, into).map_err(|fault| fault.in_file(&file.path))?;
            }
            _ => {}
        }
    }
    Ok(RankParts { path: file.path.clone(), parts })
}
