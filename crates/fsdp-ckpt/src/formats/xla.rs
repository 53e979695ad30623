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
    rank_fault::disagrees,
    rank_file::RankFile,
    rank_names::{Companion, find},
};
use crate::{checkpoint::Checkpoint, error::Error, torch::Item};
use rank_state::RankState;

/// The Trainer of Hugging Face keeps optimizers in separate files.
const COMPANIONS: [Companion; 1] = [Companion { main: "pytorch_model.bin", other: "optimizer.pt" }];

/// Keys of a rank's file that this module interprets.
const KNOWN_KEYS: [&str; 3] = ["model", "optimizer", "shard_metadata"];

/// Whether a `torch.save` file is a rank's file of this format.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    root.get("shard_metadata").is_some()
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
    let numbers = [
        ("world size", world_size, state.world_size, ", the number of files"),
        ("rank", rank, state.rank, " by its name"),
    ];
    for (what, expected, got, because) in numbers {
        if expected != got {
            return Err(disagrees(what, expected, got, because).in_file(state.path));
        }
    }
    Ok(state)
}
