//! PyTorch's distributed checkpoints (DCP): a directory as a run of N ranks would save it.
//!
//! ```text
//! __0_0.distcp, ..   per rank: a sequence of items, each a complete archive of torch.save
//! .metadata          a pickle: every tensor's chunks, and the location of each chunk's and value's item
//! ```
//!
//! Tensors are split by rows like `Shard(0)`; values and 0-d tensors belong to rank 0. Items start at multiples of 64
//! bytes, and so do the elements of tensors. Empty tensors have one empty chunk, and ranks without rows of a tensor
//! have none: loaders look up chunks, not ranks.
//!
//! `.metadata` has the form of torch 2.4 to 2.14, which later versions also read, and is written last.

mod items;
mod metadata;

use std::collections::BTreeSet;

use fsdp_core::distribution::shard;

use super::{OutputTensor, Selection};
use crate::{
    checkpoint::{Key, join},
    error::Error,
    transfer::OutputPlan,
};
use items::{Item, RankFile};

/// Rows of a tensor, and the item that contains them.
struct PlacedChunk {
    first_row: u64,
    row_count: u64,
    item: Item,
}

/// The content of `.metadata`.
struct Contents<'a> {
    tensors: Vec<(&'a OutputTensor, Vec<PlacedChunk>)>,
    values: Vec<(String, &'a [Key], Item)>,
}

/// Plans the directory that `rank_count` ranks would write.
///
/// # Errors
/// If `rank_count` is 0, or two tensors or values have the same name.
pub fn plan(selection: &Selection, rank_count: usize) -> Result<OutputPlan, Error> {
    check(selection, rank_count).map_err(|reason| {
        Error::bad_request(metadata::FILE_NAME, format!("it cannot be written: {reason}"))
    })?;
    let mut files: Vec<RankFile> = (0..rank_count).map(RankFile::new).collect();
    let values = selection.values.iter().map(|object| {
        let item = files[0].add_value(&object.value);
        (join(&object.path), object.path.as_slice(), item)
    });
    let values = values.collect();
    let tensors = selection.tensors.iter().map(|tensor| (tensor, add_tensor(&mut files, tensor)));
    let contents = Contents { tensors: tensors.collect(), values };
    let metadata = metadata::pickle(&contents);
    Ok(items::output_plan(files, (metadata::FILE_NAME.to_owned(), metadata)))
}

fn check(selection: &Selection, rank_count: usize) -> Result<(), String> {
    if rank_count == 0 {
        return Err("a checkpoint needs at least one rank; give a world size of 1 or more".to_owned());
    }
    let mut names = BTreeSet::new();
    let tensors = selection.tensors.iter().map(|tensor| tensor.name.clone());
    for name in tensors.chain(selection.values.iter().map(|object| join(&object.path))) {
        if let Some(name) = names.replace(name) {
            return Err(format!("two tensors or values would be named `{name}`; rename one of them"));
        }
    }
    Ok(())
}

fn add_tensor(files: &mut [RankFile], tensor: &OutputTensor) -> Vec<PlacedChunk> {
    let row_count = tensor.shape.first().copied().unwrap_or(1);
    if tensor.is_empty() || tensor.shape.is_empty() {
        let item = files[0].add_rows(tensor, 0, row_count);
        return vec![PlacedChunk { first_row: 0, row_count, item }];
    }
    let world = files.len() as u64;
    let rows = (0..world).map(|rank| shard(row_count, world, rank));
    let held = files.iter_mut().zip(rows).filter(|(_, rows)| !rows.is_empty());
    held.map(|(file, rows)| {
        let (first_row, row_count) = (rows.start, rows.end - rows.start);
        PlacedChunk { first_row, row_count, item: file.add_rows(tensor, first_row, row_count) }
    })
    .collect()
}

#[cfg(test)]
mod tests;
