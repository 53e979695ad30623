//! The error message for too little memory.

use std::fmt;

use fsdp_core::out_of_memory::Size;

use super::available::Available;

/// Memory that is held for one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The purpose, for the message.
    pub name: &'static str,
    /// Bytes per rank.
    pub per_rank_bytes: u64,
    /// Bytes that all ranks hold together at one time.
    pub bytes: u64,
}

/// The memory that a job needs and does not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The memory needed, by purpose.
    pub parts: Vec<Part>,
    /// Number of ranks.
    pub ranks: usize,
    /// The sum of the parts.
    pub needed_bytes: u64,
    /// The memory that is left.
    pub available: Available,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parts, ranks, needed_bytes, available } = self;
        write!(f, "{ranks} ranks need {} of memory at once, but {available}", size(*needed_bytes))?;
        let width = parts.iter().map(|part| part.name.len()).max().unwrap_or(0);
        for Part { name, per_rank_bytes, bytes } in parts {
            let (per_rank, all) = (size(*per_rank_bytes), size(*bytes));
            write!(f, "\n  {name:<width$}  {per_rank:>10} per rank, {all:>10} in all")?;
        }
        write!(
            f,
            "\nLower train.micro_batch_size, data.seq_len or run.ranks, recompute (fsdp.activation_checkpointing = \
             \"full\"), wrap smaller units (fsdp.wrap), or use a smaller model or a machine with more memory"
        )
    }
}

fn size(bytes: u64) -> Size {
    Size(usize::try_from(bytes).unwrap_or(usize::MAX))
}

impl fmt::Display for Available {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} leaves {}", self.limit, size(self.bytes))
    }
}
