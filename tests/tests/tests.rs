//! The integration tests of the workspace, one module per theme.

mod support;

// Sharded training against the unsharded oracle.
mod parity;

// Sharded training against PyTorch and transformers (tests/golden).
mod golden_training;
