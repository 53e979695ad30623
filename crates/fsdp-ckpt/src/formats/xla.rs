//! Files per rank of PyTorch/XLA's FSDP (`torch_xla.distributed.fsdp`).
//!
//! Each file holds the rank's shards of all parameters, and a table that says what they were: each parameter
//! flattened, padded and cut into equal runs (the default), or cut in dimension 0, or all parameters of a module
//! flattened into one before that. Merging needs neither the model's code nor any data: every parameter is a range
//! of the sequence of its shards. Buffers are the first rank's. Names lose the steps of wrapping modules.
//!
//! The optimizer of each rank becomes `optim.state.<parameter>.<state>`, which torch_xla itself cannot merge.
//! Anything else in the files is taken from the first rank as it is.
//!
//! torch_xla rounds buffers when it keeps them in another type than the model had; what it wrote is what is read.

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

/// The Trainer of Hugging Face keeps optimizers in files of their own.
const COMPANIONS: [Companion; 1] = [Companion { main: "pytorch_model.bin", other: "optimizer.pt" }];

/// Keys of files that have a meaning of their own.
const KNOWN_KEYS: [&str; 3] = ["model", "optimizer", "shard_metadata"];

/// Whether a file of `torch.save` is one rank's of this format.
pub(crate) fn is_rank_file(root: &Item) -> bool {
    root.get("shard_metadata").is_some()
}

/// Reads the checkpoint that a directory holds, or that one of its files belongs to.
///
/// # Errors
/// [`Error::Malformed`] when files of ranks are missing or do not belong together; other errors when a file cannot be
/// read.
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

/// Checks what a file says of its rank and world against the set of files.
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
