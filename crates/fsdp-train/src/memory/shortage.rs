//! The error message for too little memory.

use std::fmt;

use fsdp_core::out_of_memory::Size;

use super::available::Available;

/// Memory that is held for one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The purpose, for the message.
    pub(super) name: &'static str,
    /// Bytes per rank.
    pub(super) per_rank_bytes: u64,
    /// Bytes that all ranks hold together at one time.
    pub(super) bytes: u64,
}

/// The error message of a job that needs more memory than is left: `needed_bytes`, the sum of the parts.
pub(super) fn shortage(parts: &[Part], ranks: usize, needed_bytes: u64, available: &Available) -> String {
    let width = parts.iter().map(|part| part.name.len()).max().unwrap_or(0);
    let line = |Part { name, per_rank_bytes, bytes }: &Part| {
        let (per_rank, all) = (size(*per_rank_bytes), size(*bytes));
        format!("\n  {name:<width$}  {per_rank:>10} per rank, {all:>10} in all")
    };
    format!(
        "{ranks} ranks need {} of memory at once, but {available}{}\nLower train.micro_batch_size, data.seq_len or \
         run.ranks, recompute (fsdp.activation_checkpointing = \"full\"), wrap smaller units (fsdp.wrap), or use a smaller \
         model or a machine with more memory",
        size(needed_bytes),
        parts.iter().map(line).collect::<String>()
    )
}

fn size(bytes: u64) -> Size {
    Size(usize::try_from(bytes).unwrap_or(usize::MAX))
}

impl fmt::Display for Available {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} leaves {}", self.limit, size(self.bytes))
    }
}
