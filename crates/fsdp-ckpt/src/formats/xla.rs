//! Files per rank of PyTorch/XLA's FSDP (`torch_xla.distributed.fsdp`).
//!
//! Each file holds the rank's shards of all parameters and a table that describes them. A parameter is flattened,
//! padded and cut into equal runs (the default), or cut along dimension 0; before that, all parameters of a module may
//! be flattened into one. Merging needs neither the model's code nor tensor data, because every parameter is a range of
//! the sequence of its shards. Buffers come from rank 0. The names of wrapping modules are removed from parameter
//! names.
//!
//! The optimizer states of all ranks become `optim.state.<parameter>.<state>`; torch_xla itself cannot merge them.
//! Everything else in the files is taken from rank 0 as it is.
//!
//! torch_xla rounds buffers if it keeps them in another dtype than the model had; they are read as torch_xla wrote
//! them.

mod merge;
mod parse;
mod rank_state;

#[cfg(test)]
mod tests;

use std::path::Path;

use super::{
    fields::text,
    rank_fault::{disagrees, one_of, ranks_swapped},
    rank_file::RankFile,
    rank_names::{Companion, find},
};
use crate::{checkpoint::Checkpoint, error::Error, torch::Item};
use rank_state::RankState;

/// The Trainer of Hugging Face keeps optimizers in separate files.
const COMPANIONS: [Companion; 1] = [Companion { main: "pytorch_model.bin", other: "optimizer.pt" }];

/// Keys of a rank's file that this module interprets.
const KNOWN_KEYS: [&str; 3] = ["model", "optimizer", METADATA];

/// The key of the table that describes a rank's shards.
const METADATA: &str = "shard_metadata";

/// The beginning of a shard's name in its module.
const SHARD: &str = "_fsdp_shard";

/// Whether a `torch.save` file is a rank's file of this format.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    root.get(METADATA).is_some()
}

/// Whether an item holds a rank's shards at any depth, with or without the table that describes them.
pub(crate) fn holds_shards(item: &Item) -> bool {
    let Item::Dict(items) = item else { return false };
    let is_shard = |name: &str| name.split('.').next_back().is_some_and(|last| last.starts_with(SHARD));
    is_rank_file(item)
        || items.iter().any(|(key, item)| text(key).is_some_and(is_shard) || holds_shards(item))
}

/// Reads the checkpoint in a directory, or the one that a file belongs to.
///
/// # Errors
/// [`Error::Malformed`] if rank files are missing or do not belong together; other errors if a file cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
    let path = path.as_ref();
    let found = find(path, &COMPANIONS)?;
    let mut checkpoint = Checkpoint {
        path: path.to_owned(),
        format: "PyTorch/XLA FSDP, one file per rank".to_owned(),
        world_size: Some(found.main.len()),
        ..Checkpoint::default()
    };
    let files = RankFile::open_all(&found.main, &mut checkpoint)?;
    let mut ranks = Vec::with_capacity(files.len());
    for (rank, file) in files.iter().enumerate() {
        ranks.push(checked(parse::rank_state(file)?, rank, files.len())?);
    }
    for (_, set) in &found.companions {
        let optimizers = RankFile::open_all(set, &mut checkpoint)?;
        if optimizers.len() != ranks.len() {
            let because = ", the number of files of the model";
            let fault = disagrees("number of files", ranks.len(), optimizers.len(), because);
            return Err(fault.in_file(&optimizers[0].path));
        }
        for (rank, file) in optimizers.iter().enumerate() {
            let state = checked(parse::rank_state(file)?, rank, optimizers.len())?;
            ranks[rank].optimizer = ranks[rank].optimizer.take().or(state.optimizer);
        }
        optimizers[0].add_unknown(&KNOWN_KEYS, &mut checkpoint)?;
    }
    merge::merge(&ranks, &mut checkpoint)?;
    files[0].add_unknown(&KNOWN_KEYS, &mut checkpoint)?;
    Ok(checkpoint)
}

/// Checks the rank and world size in a file against its place in the set of files.
fn checked(state: RankState, rank: usize, world_size: usize) -> Result<RankState, Error> {
    let fault = if state.rank >= state.world_size {
        disagrees("rank", format!("below {}", state.world_size), state.rank, " by its world size")
    } else if world_size == 1 && state.world_size > 1 {
        one_of(state.rank, state.world_size, "PyTorch/XLA FSDP")
    } else if state.world_size != world_size {
        disagrees("world size", world_size, state.world_size, ", the number of files")
    } else if state.rank != rank {
        ranks_swapped(rank, state.rank)
    } else {
        return Ok(state);
    };
    Err(fault.in_file(state.path))
}
