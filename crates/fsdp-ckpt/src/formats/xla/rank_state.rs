//! The contents of a rank's file as plain data, and the parameters that its shards belong to.

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

use crate::{
    checkpoint::element_count,
    error::Fault,
    formats::{
        local::LocalTensor,
        optimizer::{Settings, StateItem},
    },
};

/// Prefix of the keys of shards, after the path of their module.
const SHARD_STEP: &str = "_fsdp_shard";

/// Names and shapes of parameters.
pub(super) type Named = [(String, Vec<u64>)];

/// The contents of a rank's file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankState {
    pub(super) path: PathBuf,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Shards and buffers by key.
    pub(super) model: BTreeMap<String, LocalTensor>,
    /// The parameters that the shards are parts of, in file order.
    pub(super) sharded: Vec<Sharded>,
    pub(super) optimizer: Option<OptimizerState>,
}

/// The optimizer state of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OptimizerState {
    /// States by parameter number.
    pub(super) states: BTreeMap<u64, Vec<(String, StateItem)>>,
    /// Settings of each group; `params` holds parameter numbers.
    pub(super) groups: Vec<Settings>,
}

/// A parameter that is cut into one shard per rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sharded {
    /// The key of its shards in the file.
    pub(super) key: String,
    /// The named parameters in it: the parameter itself, or those that were flattened into it.
    pub(super) parts: Vec<Part>,
    /// Its shape before it was cut.
    pub(super) shape: Vec<u64>,
    /// Elements without padding.
    pub(super) len: u64,
}

/// A named parameter in a sharded one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its name, without the names of wrapping modules.
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// The range of its elements in the sharded parameter.
    pub(super) range: Range<u64>,
}

impl Sharded {
    /// A parameter by the key of its shards, its name and its shape, and the names and shapes of what was flattened into
    /// it, if anything was.
    pub(super) fn new(
        key: &str,
        full: &str,
        shape: &[u64],
        flattened: Option<&Named>,
    ) -> Result<Sharded, Fault> {
        let too_large = || Fault::unexpected(format!("the size of `{full}`"), "less than 2^64");
        let len = element_count(shape).ok_or_else(too_large)?;
        let parts = match flattened {
            None => vec![Part { name: clean(full), shape: shape.to_vec(), range: 0..len }],
            Some(flattened) => {
                let base = full.rsplit_once('.').map_or("", |(base, _)| base);
                parts_of(base, flattened).ok_or_else(too_large)?
            }
        };
        let end = parts.last().map_or(0, |part| part.range.end);
        if end != len {
            let place = format!("the sum of sizes in shard_metadata.flatten_info of `{full}`, {end},");
            return Err(Fault::unexpected(place, "the number of elements of the flattened parameter"));
        }
        Ok(Sharded { key: key.to_owned(), parts, shape: shape.to_vec(), len })
    }
}

/// The consecutive parameters in a flattened one; `None` if they are too large.
fn parts_of(base: &str, flattened: &[(String, Vec<u64>)]) -> Option<Vec<Part>> {
    let mut start = 0u64;
    flattened
        .iter()
        .map(|(name, shape)| {
            let end = start.checked_add(element_count(shape)?)?;
            let name = if base.is_empty() { clean(name) } else { clean(&format!("{base}.{name}")) };
            let part = Part { name, shape: shape.clone(), range: start..end };
            start = end;
            Some(part)
        })
        .collect()
}

/// The module path and the shard's key in it; `None` if this is not the key of a shard.
pub(super) fn split_key(key: &str) -> Option<(&str, &str)> {
    if key.starts_with(SHARD_STEP) {
        return Some(("", key));
    }
    let at = key.find(&format!(".{SHARD_STEP}"))?;
    Some((&key[..at], &key[at + 1..]))
}

/// Removes the names of wrapping modules from a name.
pub(super) fn clean(name: &str) -> String {
    name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
}
