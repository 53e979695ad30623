//! Rank files of PyTorch/XLA FSDP: shards of flattened parameters with the table that says what they are.

mod merge;
mod rank_state;

#[cfg(test)]
mod tests;
